"""How many workers: the cores that this process may use, and whether stepping computes or waits."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Probe", "choose_workers", "probe_env", "usable_cores"]

logger = logging.getLogger("rl.common.vec_env")


def usable_cores() -> int:
    """Cores that this process may use: its affinity, or the control group's CPU quota if that is less."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity is not None else (os.cpu_count() or 1)
    for quota_file, period_file in (
        ("/sys/fs/cgroup/cpu.max", None),
        ("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "/sys/fs/cgroup/cpu/cpu.cfs_period_us"),
    ):
        try:
            words = Path(quota_file).read_text().split()
            if period_file is not None:
                words += Path(period_file).read_text().split()
            quota, period = float(words[0]), float(words[1])
        except (OSError, ValueError, IndexError):  # no such file, or "max"
            continue
        if quota > 0:
            cores = min(cores, max(1, math.floor(quota / period + 0.5)))
    return cores


class Probe(NamedTuple):
    """What a step of one environment costs.

    Attributes:
        seconds: Wall time of a step.
        cpu_seconds: CPU time of a step.
        nb_steps: Steps timed.
    """

    seconds: float
    cpu_seconds: float
    nb_steps: int

    @property
    def waits(self) -> bool:
        """Whether a step waits (for a simulator, a network) rather than computes."""
        return self.seconds > 200e-6 and self.cpu_seconds < 0.5 * self.seconds


def time_steps(env: Any, nb_steps: int = 50, limit: float = 0.5) -> tuple[float, float, int]:
    """Step an environment with random actions, resetting it where an episode ends; resets are not timed.

    Args:
        env: A Gymnasium environment.
        nb_steps: Steps to take.
        limit: Seconds after which to stop early.

    Returns:
        Wall and CPU seconds of all steps, and their number.
    """
    env.reset()
    env.step(env.action_space.sample())  # the first step may import or compile something
    env.reset()
    wall = cpu = 0.0
    count = 0
    while count < nb_steps and wall < limit:
        action = env.action_space.sample()
        wall0, cpu0 = time.perf_counter(), time.process_time()
        result = env.step(action)
        wall, cpu, count = wall + time.perf_counter() - wall0, cpu + time.process_time() - cpu0, count + 1
        if result[2] or result[3]:
            env.reset()
    return wall, cpu, count


def probe_env(env_fn: Callable[[], Any], **kwargs: Any) -> Probe:
    """Time some steps of one environment, made in a worker process of its own and closed again.

    Args:
        env_fn: Makes the environment.
        **kwargs: Further arguments for `SubprocVecEnv`, such as `start_method` and `worker_env`.
    """
    from rl.common.vec_env.subproc_env_vec import SubprocVecEnv

    def timed() -> Any:
        return _Timed(env_fn())

    with SubprocVecEnv([timed], workers=1, **kwargs) as venv:
        wall, cpu, count = venv.call("time_steps")[0]
    return Probe(wall / count, cpu / count, count)


class _Timed:
    """Adds `time_steps` to an environment."""

    def __init__(self, env: Any) -> None:
        self.env = env
        self.observation_space, self.action_space = env.observation_space, env.action_space

    def reset(self, **kwargs: Any) -> Any:
        return self.env.reset(**kwargs)

    def step(self, action: Any) -> Any:
        return self.env.step(action)

    def time_steps(self) -> tuple[float, float, int]:
        return time_steps(self.env)

    def close(self) -> None:
        if hasattr(self.env, "close"):
            self.env.close()


def choose_workers(nb_envs: int, probe: Probe) -> tuple[int, str]:
    """The number of workers for N environments, and why.

    Args:
        nb_envs: N.
        probe: What a step costs.
    """
    cores = usable_cores()
    cost = f"a step takes {_micros(probe.seconds)}, {_micros(probe.cpu_seconds)} of it on the CPU"
    if probe.waits:
        return nb_envs, f"{cost}: it waits, so every environment gets a worker of its own ({nb_envs})"
    workers = min(nb_envs, cores)
    return (
        workers,
        f"{cost}: it computes, so there is one worker per usable core, at most one per environment ({workers})",
    )


def _micros(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} us" if seconds < 0.01 else f"{seconds * 1e3:.1f} ms"
