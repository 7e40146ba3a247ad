"""Times acting on one vector env, and on its two halves in turns: one half steps while the network acts for the other.

python tests/benchmarks/split_speed.py              # 8 lanes that wait 5 ms per step, DQN's network for Atari
"""

import argparse
import statistics
import time

import gymnasium
import numpy as np

from rl import backend
from rl.common.vec_env import SubprocVecEnv
from rl.networks import nature_cnn


class Waiting(gymnasium.Env):
    """An env that gives images and waits, as for a simulator."""

    observation_space = gymnasium.spaces.Box(0, 255, (84, 84, 4), np.uint8)
    action_space = gymnasium.spaces.Discrete(4)

    def __init__(self, seconds):
        self.seconds = seconds
        self.image = np.zeros((84, 84, 4), np.uint8)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.image, {}

    def step(self, action):
        time.sleep(self.seconds)
        return self.image, 1.0, False, False, {}


def rate(venv, act, nb_halves, nb_steps):
    """Env steps per second."""
    halves = venv.split(nb_halves)
    for half in halves:
        half.step_async(act(half.reset()[0]))
    start = time.perf_counter()
    for _ in range(nb_steps):
        for half in halves:
            observation, *_ = half.step_wait()
            half.step_async(act(observation))  # with two, the workers of the other one step meanwhile
    seconds = time.perf_counter() - start
    for half in halves:
        half.step_wait()
    return nb_steps * venv.num_envs / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wait", type=float, default=0.005, help="seconds that each step of the env waits")
    parser.add_argument("--lanes", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    network = nature_cnn((84, 84, 4), 4)
    q_values = backend.compile_function(lambda x: network(x, training=False), network.variables, jit_compile=False)
    make = [lambda: Waiting(args.wait)] * args.lanes
    with SubprocVecEnv(make, workers=args.lanes) as venv:
        rates = []
        for _ in range(args.rounds):
            rates.append([rate(venv, lambda x: q_values(x).argmax(axis=1), k, 200) for k in (1, 2)])
            print("whole {:,.0f}, two halves {:,.0f} env steps/s".format(*rates[-1]), flush=True)
    print(f"median ratio {statistics.median(b / a for a, b in rates):.2f}")


if __name__ == "__main__":
    main()
