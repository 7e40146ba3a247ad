"""Questions to ask of a vector env before a long run: does it fit into memory, and are its environments all alike?"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces

from rl.common.misc_util import tree_paths
from rl.common.vec_env.base import VecEnv

__all__ = ["MemoryEstimate", "available_memory", "check_envs_equal", "check_memory"]

ROW_OVERHEAD = 64  # bytes of a replay row beside its observation and action: reward, flags, links


class MemoryEstimate(NamedTuple):
    """What `check_memory` found, in bytes.

    Attributes:
        replay: What a full replay memory will take.
        workers: What the worker processes take now, shared pages counted once; 0 without workers.
        available: What this machine, or this container, can still give; None where it does not tell.
    """

    replay: int
    workers: int
    available: int | None


def check_memory(env: Any, limit: int, margin: float = 0.9) -> MemoryEstimate:
    """Estimate the memory of the environments and of a replay memory, and warn where the latter will not fit.

    The replay memory commits its pages as it fills, so a run that asks for too much is killed hours after its start.
    Call this once the environments exist and before training: what they take is gone from the available memory then.

    Args:
        env: A `VecEnv`, or any environment with spaces.
        limit: Number of transitions of the replay memory, each of which stores one observation (also with a window).
        margin: Fraction of the available memory that may be used.

    Returns:
        The estimate. Observations that are no arrays (text, graphs) count as nothing.

    Warns:
        RuntimeWarning: If the full replay memory exceeds ``margin`` of the available memory; it says how many
            transitions would fit.
    """
    observation_space = getattr(env, "single_observation_space", env.observation_space)
    action_space = getattr(env, "single_action_space", env.action_space)
    row = _nb_bytes(observation_space) + _nb_bytes(action_space) + ROW_OVERHEAD
    unwrapped = getattr(env, "unwrapped", env)
    pids = [pid for pid in getattr(unwrapped, "worker_pids", ()) if pid is not None]
    estimate = MemoryEstimate(limit * row, sum(_process_memory(pid) for pid in pids), available_memory())
    if estimate.available is not None and estimate.replay > margin * estimate.available:
        workers = f" beside the {len(pids)} workers' {_gigabytes(estimate.workers)}" if pids else ""
        fits = int(margin * estimate.available / row)
        warnings.warn(
            f"A replay memory of {limit:,} transitions will take {_gigabytes(estimate.replay)} when it is full, but "
            f"{_gigabytes(estimate.available)} are available{workers}: the system would end the run. About {fits:,} "
            "transitions fit; leave images uint8, and make them smaller or the limit lower.",
            RuntimeWarning,
            stacklevel=2,
        )
    return estimate


def available_memory() -> int | None:
    """Bytes that can still be used, by the account of the machine and of its container; None if neither tells."""
    limits = []
    try:
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        limits.append(int(fields["MemAvailable"].split()[0]) * 1024)
    except (OSError, KeyError, IndexError, ValueError):
        pass
    try:
        group = Path("/sys/fs/cgroup")
        limits.append(int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    except (OSError, ValueError):  # no such file, or "max"
        pass
    return min(limits) if limits else None


def check_envs_equal(venv: VecEnv, attributes: Sequence[str] = ()) -> None:
    """Check that all environments of a vector env have the same spaces and configuration.

    Compared are spaces with their bounds, render mode, and of the spec its id, step limit, arguments and wrappers.

    Args:
        venv: The vector env.
        attributes: Names of further attributes that should be equal, found through the wrappers.

    Raises:
        AttributeError: If an environment lacks one of `attributes`.
        ValueError: If they differ; it names each difference, the lanes, and both values.
    """
    differences = []
    for name in dict.fromkeys(["observation_space", "action_space", "render_mode", "spec", *attributes]):
        if name in ("render_mode", "spec") and not venv.has_attr(name):
            continue
        values = venv.get_attr(name)
        described = [_describe_spec(value) if name == "spec" else value for value in values]
        other = [lane for lane, value in enumerate(described) if not _is_equal(value, described[0])]
        if other:
            lanes = f"lane {other[0]}" if len(other) == 1 else f"lanes {other}"
            differences.append(f"{name}: lane 0 has {described[0]}, {lanes} {described[other[0]]}")
    if differences:
        raise ValueError("The environments differ. " + "; ".join(differences) + ".")


def _describe_spec(spec: Any) -> Any:
    # Not the entry point: classes that were sent to workers by value are equal to nothing but themselves.
    if spec is None or not hasattr(spec, "additional_wrappers"):
        return spec
    wrappers = [(wrapper.name, wrapper.kwargs) for wrapper in spec.additional_wrappers]
    return {"id": spec.id, "max_episode_steps": spec.max_episode_steps, "kwargs": spec.kwargs, "wrappers": wrappers}


def _is_equal(first: Any, second: Any) -> bool:
    if isinstance(first, np.ndarray) or isinstance(second, np.ndarray):
        return np.array_equal(first, second)
    return bool(first == second)


def _nb_bytes(space: Any) -> int:
    total = 0
    for _, part in tree_paths(space):
        if isinstance(part, (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)):
            total += int(np.prod(part.shape or (), dtype=np.int64)) * np.dtype(part.dtype).itemsize
    return total


def _process_memory(pid: int) -> int:
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return 0


def _gigabytes(nb_bytes: int) -> str:
    return f"{nb_bytes / 1e9:.3g} GB"
