"""Times `fit` of DQN on 1 and on N lanes, one gradient step per env step in both, as a ratio of env steps per second.

python tests/benchmarks/fit_lanes.py                # CartPole, 1 and 8 lanes
python tests/benchmarks/fit_lanes.py --wait 0.005   # an env that waits 5 ms per step, 1 and 8 lanes
python tests/benchmarks/fit_lanes.py --wait 0.005 --overlap     # the same, learning while the workers step
"""

import argparse
import statistics
import time

import gymnasium
import keras
import numpy as np

from rl import backend
from rl.agents import DQNAgent
from rl.common.cmd_util import make_gym_env
from rl.memory import SequentialMemory


class Waiting(gymnasium.Env):
    """An env that waits, as for a simulator or the network, and does nothing else."""

    observation_space = gymnasium.spaces.Box(-1, 1, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, seconds):
        self.seconds = seconds

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(4, np.float32), {}

    def step(self, action):
        time.sleep(self.seconds)
        self.t += 1
        return np.zeros(4, np.float32), 1.0, self.t >= 200, False, {}


def rate(lanes: int, steps: int, wait: float, overlap: bool) -> float:
    env_id = (lambda: Waiting(wait)) if wait else "CartPole-v1"
    with make_gym_env(env_id, num_env=lanes, seed=1, workers="auto", verbose=1) as env:
        layers = [keras.layers.Input((1, 4)), keras.layers.Flatten(), keras.layers.Dense(64, "relu")]
        model = keras.Sequential([*layers, keras.layers.Dense(64, "relu"), keras.layers.Dense(2)])
        agent = DQNAgent(model, nb_actions=2, memory=SequentialMemory(50_000, window_length=1), nb_steps_warmup=50)
        agent.compile("adam")
        agent.fit(env, nb_steps=max(200, steps // 4), verbose=0, overlap=overlap)
        start, first = time.perf_counter(), agent.step
        agent.fit(env, nb_steps=steps, verbose=0, overlap=overlap)
        return (agent.step - first) / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lanes", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4000, help="timed env steps on one lane; more on many")
    parser.add_argument("--wait", type=float, default=0.0, help="seconds that each step of the env waits")
    parser.add_argument("--overlap", action="store_true", help="fit(overlap=True), on one lane and on many")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    backend.set_threads(1)
    steps = args.steps if not args.wait else min(args.steps, int(4 / args.wait))
    ratios = []
    for _ in range(args.rounds):
        one = rate(1, steps, args.wait, args.overlap)
        many = rate(args.lanes, steps * 3, args.wait, args.overlap)
        ratios.append(many / one)
        print(f"1 lane {one:7.0f}, {args.lanes} lanes {many:7.0f} env steps/s, ratio {ratios[-1]:.2f}", flush=True)
    print(f"median ratio {statistics.median(ratios):.2f}")


if __name__ == "__main__":
    main()
