"""How many workers: the cores that this process may use, and whether stepping computes or waits."""

from __future__ import annotations

import logging
import math
import os
import resource
import statistics
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
        seconds: Wall time of a step (median).
        cpu_seconds: CPU time of a step (median).
        sleeps: How often a step gives up its core of its own accord (mean), to sleep or to wait for something.
        nb_steps: Steps timed.
    """

    seconds: float
    cpu_seconds: float
    sleeps: float
    nb_steps: int

    @property
    def waits(self) -> bool:
        """Whether a step waits (for a simulator, a network) rather than computes.

        On a busy machine a step that computes takes longer than its CPU time as well, but it never gives up its core.
        """
        return self.seconds > 200e-6 and self.cpu_seconds < 0.5 * self.seconds and self.sleeps >= 0.5


def time_steps(env: Any, nb_steps: int = 50, limit: float = 0.5) -> Probe:
    """Step an environment with random actions, resetting it where an episode ends; resets are not timed.

    Args:
        env: A Gymnasium environment.
        nb_steps: Steps to take.
        limit: Seconds after which to stop early.
    """
    env.reset()
    env.step(env.action_space.sample())  # the first step may import or compile something
    env.reset()
    wall: list[float] = []
    cpu: list[float] = []
    sleeps = 0
    begun = time.perf_counter()
    while not wall or (len(wall) < nb_steps and time.perf_counter() - begun < limit):
        action = env.action_space.sample()
        sleeps0, wall0, cpu0 = _voluntary_switches(), time.perf_counter(), time.process_time()
        result = env.step(action)
        wall.append(time.perf_counter() - wall0)
        cpu.append(time.process_time() - cpu0)
        sleeps += _voluntary_switches() - sleeps0
        if result[2] or result[3]:
            env.reset()
    return Probe(statistics.median(wall), statistics.median(cpu), sleeps / len(wall), len(wall))


def _voluntary_switches() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw


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
        return venv.call("time_steps")[0]


class _Timed:
    """Adds `time_steps` to an environment."""

    def __init__(self, env: Any) -> None:
        self.env = env
        self.observation_space, self.action_space = env.observation_space, env.action_space

    def reset(self, **kwargs: Any) -> Any:
        return self.env.reset(**kwargs)

    def step(self, action: Any) -> Any:
        return self.env.step(action)

    def time_steps(self) -> Probe:
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
