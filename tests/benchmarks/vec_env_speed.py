"""Vector env speed as ratios against Gymnasium's vector envs, all measured in one run.

    python tests/benchmarks/vec_env_speed.py [--seconds 1.0] [--case NAME]

Each case is measured in several rounds that take turns between the candidates, so that a busy machine slows all of
them; the best round counts.
"""

import argparse
import time

import gymnasium as gym
import numpy as np

from rl.common.vec_env import DummyVecEnv, SubprocVecEnv


class Trivial(gym.Env):
    """An env that costs nothing but what is asked for."""

    action_space = gym.spaces.Discrete(2)

    def __init__(self, shape=(4,), dtype=np.float32, cpu=0.0, wait=0.0):
        high = 255 if dtype == np.uint8 else 1
        self.observation_space = gym.spaces.Box(0, high, shape, dtype)
        self.obs = np.ones(shape, dtype)
        self.cpu, self.wait = cpu, wait

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.obs, {}

    def step(self, action):
        if self.cpu:
            until = time.thread_time() + self.cpu
            while time.thread_time() < until:
                pass
        if self.wait:
            time.sleep(self.wait)
        return self.obs, 1.0, False, False, {}


def cartpole():
    return gym.make("CartPole-v1")


def gym_async(fns):
    return gym.vector.AsyncVectorEnv(fns)


def gym_sync(fns):
    return gym.vector.SyncVectorEnv(fns)


def subproc(fns, **kwargs):
    return SubprocVecEnv(fns, **kwargs)


# name: (env_fn, number of envs, candidates, reference, wanted: (candidate, reference, at least))
CASES = {
    "trivial, 8 envs": (
        lambda: Trivial(),
        8,
        {"async": gym_async, "sync": gym_sync, "dummy": DummyVecEnv, "subproc": subproc},
        ("subproc", "async", 6.0),
    ),
    "CartPole, 32 envs": (
        cartpole,
        32,
        {"async": gym_async, "sync": gym_sync, "dummy": DummyVecEnv, "subproc": subproc},
        ("subproc", "async", 8.0),
    ),
    "200 us CPU, 8 envs": (
        lambda: Trivial(cpu=200e-6),
        8,
        {"async": gym_async, "dummy": DummyVecEnv, "subproc": subproc},
        ("subproc", "dummy", 1.5),
    ),
    "84x84x4 uint8, 32 envs": (
        lambda: Trivial((84, 84, 4), np.uint8),
        32,
        {
            "async": gym_async,
            "sync": gym_sync,
            "dummy": DummyVecEnv,
            "subproc": subproc,
            "subproc, no copy": lambda fns: subproc(fns, copy=False),
        },
        ("subproc", "async", 10.0),
    ),
    "waits 2 ms, 32 envs": (
        lambda: Trivial(wait=2e-3),
        32,
        {
            "one env": lambda fns: DummyVecEnv(fns[:1]),
            "async": gym_async,
            "subproc, auto": lambda fns: subproc(fns, workers="auto"),
        },
        ("subproc, auto", "one env", 18.0),
    ),
}


def throughput(venv, seconds):
    """Env steps per second."""
    nb = venv.num_envs
    actions = np.random.default_rng(0).integers(0, 2, (64, nb))
    begun, steps = time.perf_counter(), 0
    while time.perf_counter() - begun < seconds:
        for row in range(steps % 64, steps % 64 + 4):
            venv.step(actions[row])
        steps += 4
    return steps * nb / (time.perf_counter() - begun)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1.0, help="seconds per candidate and round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--case", default="", help="only cases whose name holds this")
    args = parser.parse_args()
    for name, (env_fn, nb, candidates, (ours, reference, wanted)) in CASES.items():
        if args.case not in name:
            continue
        venvs = {}
        for label, make in candidates.items():
            venvs[label] = make([env_fn] * nb)
            venvs[label].reset(seed=1)
        best = dict.fromkeys(venvs, 0.0)
        for _ in range(args.rounds):
            for label, venv in venvs.items():
                best[label] = max(best[label], throughput(venv, args.seconds / args.rounds))
        for venv in venvs.values():
            venv.close()
        print(f"\n{name}")
        for label, rate in best.items():
            lanes = venvs[label].num_envs
            print(f"  {label:18s} {rate:10,.0f} env steps/s {lanes / rate * 1e6:10.0f} us per vector step")
        ratio = best[ours] / best[reference]
        print(f"  {ours} / {reference}: {ratio:.1f} (wanted: {wanted:g})")


if __name__ == "__main__":
    main()
