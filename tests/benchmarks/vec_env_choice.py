"""How many environments and workers? Environment steps per second for environments that are cheap, compute or wait.

    python tests/benchmarks/vec_env_choice.py [--seconds 1.0] [--rounds 3]

Prints the table of docs/vector_envs.md. The candidates of one row take turns, and the best round counts, so that a
busy machine does not decide.
"""

import argparse
import time

import gymnasium as gym
import numpy as np

from rl.common.cmd_util import make_gym_env
from rl.common.vec_env import DummyVecEnv
from rl.common.vec_env.cores import usable_cores


class CostlyEnv(gym.Env):
    """A step that computes for `cpu` seconds and waits for `wait` seconds."""

    observation_space = gym.spaces.Box(-1, 1, (4,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, cpu=0.0, wait=0.0):
        self.cpu, self.wait = cpu, wait

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(4, np.float32), {}

    def step(self, action):
        if self.wait:
            time.sleep(self.wait)
        until = time.thread_time() + self.cpu
        while time.thread_time() < until:
            pass
        return np.zeros(4, np.float32), 1.0, False, False, {}


ENVS = {
    "CartPole-v1": ("CartPole-v1", {}),
    "200 us of computing": (CostlyEnv, {"cpu": 200e-6}),
    "2 ms of computing": (CostlyEnv, {"cpu": 2e-3}),
    "2 ms of waiting": (CostlyEnv, {"wait": 2e-3}),
}


def steps_per_second(venv, seconds):
    actions = np.zeros(venv.num_envs, np.int64)
    for _ in range(2):
        venv.step(actions)
    start, count = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - start) < seconds:
        venv.step(actions)
        count += venv.num_envs
    return count / elapsed


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=1.0, help="time for one measurement (1.0)")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each, of which the best counts (3)")
    args = parser.parse_args()
    cores = usable_cores()
    print(f"| {cores} usable cores | N | in process | {cores} workers | N workers | native |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, (made_of, env_kwargs) in ENVS.items():
        for nb_envs in (1, 8, 32):
            kinds = [{"vec_env_cls": DummyVecEnv}, {"workers": cores}, {"workers": nb_envs}]
            if name.startswith("CartPole"):
                kinds.append({"vec_env_cls": "native"})
            best = [0.0] * len(kinds)
            venvs = [make_gym_env(made_of, nb_envs, env_kwargs=env_kwargs, **kind) for kind in kinds]
            for venv in venvs:
                venv.reset()
            for _ in range(args.rounds):
                for index, venv in enumerate(venvs):
                    best[index] = max(best[index], steps_per_second(venv, args.seconds))
            for venv in venvs:
                venv.close()
            cells = [f"{value:,.0f}" for value in best] + [""] * (4 - len(best))
            print(f"| {name} | {nb_envs} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
