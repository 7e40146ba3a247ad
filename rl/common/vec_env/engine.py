"""What runs the lanes of a vector env, in this process or in workers."""

from __future__ import annotations

import abc
import os
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from gymnasium import spaces

from rl.common.vec_env.arena import Arena, SpaceTree
from rl.common.vec_env.arguments import common_space
from rl.common.vec_env.codec import ActionCodec
from rl.common.vec_env.errors import EnvFailure, RemoteTraceback, WorkerError
from rl.common.vec_env.lanes import Failure, Report

__all__ = ["Engine", "Job"]

Job = tuple[int, int | None, dict[str, Any] | None]


class Engine(abc.ABC):
    """Runs the lanes, in groups of consecutive ones: the units that can be stepped on their own.

    Attributes:
        bounds: First and last-plus-one lane of each group.
        stepping: Per group, whether a step was begun and its results were not collected yet.
        target: Per group, the observation set that the pending step writes.
        current: Per group, the observation set that holds the latest observations.
        reports: Per group, what the finished step has to tell.
        stale: Per lane, whether it needs a reset before the next step.
    """

    arena: Arena
    failure: BaseException | None = None  # once set, the engine cannot be used any more

    def __init__(self, bounds: list[tuple[int, int]]) -> None:
        self.bounds = bounds
        self.nb_lanes = bounds[-1][1]
        self.pid = os.getpid()
        nb = len(bounds)
        self.stepping = [False] * nb
        self.target = [0] * nb
        self.current = [0] * nb
        self.reports: list[Report | None] = [None] * nb
        self.stale = np.ones(self.nb_lanes, dtype=bool)
        self.any_stale = True
        self.fresh = [True] * self.nb_lanes  # never reset
        self.objects: dict[int, list[Any]] = {}  # latest values of the leaves that are no arrays
        self.lane_seeds: list[int | None] = [None] * self.nb_lanes
        self.closed = False
        self.remarked: set[str] = set()

    def describe(
        self,
        observation_spaces: list[spaces.Space[Any]],
        action_spaces: list[spaces.Space[Any]],
        rule: Literal["same", "compatible"],
        check_actions: bool,
        clip_actions: bool,
    ) -> None:
        """Agree on the spaces and lay out the arena (without memory yet)."""
        if rule not in ("same", "compatible"):
            raise ValueError(f"spaces must be 'same' or 'compatible', got {rule!r}.")
        self.observation_space, self.same_observations = common_space("observation_space", observation_spaces, rule)
        self.action_space, self.same_actions = common_space("action_space", action_spaces, rule)
        self.observation_spaces, self.action_spaces = observation_spaces, action_spaces
        self.observation_tree, self.action_tree = (
            SpaceTree(self.observation_space),
            SpaceTree(self.action_space),
        )
        self.codec = ActionCodec(self.action_tree, action_spaces, check_actions, clip_actions)
        self.objects = {k: [None] * self.nb_lanes for k in self.observation_tree.objects}
        self.arena = Arena(self.observation_tree, self.action_tree, self.nb_lanes, len(self.bounds))

    def set_stale(self, lanes: Any, value: bool) -> None:
        """Note that lanes need, or had, a reset."""
        self.stale[lanes] = value
        self.any_stale = bool(self.stale.any())

    @abc.abstractmethod
    def begin(self, first: int, last: int, actions: list[Any] | None) -> None:
        """Start the step of groups first..last-1 into their `target`; actions as `ActionCodec.encode` returned them."""

    @abc.abstractmethod
    def finish(self, groups: Sequence[int], deadline: float | None) -> bool:
        """Wait for the steps of all these groups; fills `reports`. Returns whether an episode ended."""

    @abc.abstractmethod
    def finish_some(self, groups: Sequence[int], min_lanes: int, deadline: float | None) -> list[int]:
        """Wait until at least `min_lanes` lanes of these groups have finished; returns the finished groups."""

    @abc.abstractmethod
    def reset(self, jobs: dict[int, list[Job]], target: int, deadline: float | None) -> list[Report]:
        """Reset lanes into an observation set: per group (lane in the group, seed, options)."""

    @abc.abstractmethod
    def ask(self, kind: str, lanes: Sequence[int], args: Any, deadline: float | None) -> list[Any]:
        """Put `Lanes.ask`'s question to some lanes; answers in their order."""

    def abort(self) -> None:
        """Make a call that waits in another thread give up, as the vector env is being closed."""
        self.closed = True

    @abc.abstractmethod
    def close(self, timeout: float) -> None:
        """End everything."""

    def worker_of(self, lane: int) -> int | None:
        """Number of the worker that runs a lane; None where lanes run in this process."""
        return None

    def raise_failures(self, failures: list[Failure]) -> None:
        """Raise the exception of the lowest lane, with all of them attached."""
        failures = sorted(failures, key=lambda one: one.lane)
        first = failures[0]
        error, foreign = self.rebuild(first)
        worker = self.worker_of(first.lane)
        where = f"environment {first.lane}" + ("" if worker is None else f", worker {worker}")
        details = {
            "env_index": first.lane,
            "worker_index": worker,
            "env_failures": [
                EnvFailure(f.lane, self.worker_of(f.lane), f.type_name, f.message, f.traceback) for f in failures
            ],
        }
        for name, value in details.items():
            try:
                setattr(error, name, value)
            except Exception:  # noqa: S112 - an exception class may refuse attributes; the note below still tells
                continue
        error.add_note(f"Raised in {where}.")
        for other in failures[1:]:
            error.add_note(f"Environment {other.lane} failed as well: {other.type_name}: {other.message}")
        if foreign:
            raise error from RemoteTraceback(first.traceback)
        raise error

    def rebuild(self, one: Failure) -> tuple[BaseException, bool]:
        """The exception to raise for a failure, and whether its traceback is only known as text."""
        if isinstance(one.error, Exception):
            return one.error, False
        return WorkerError(f"{one.type_name}: {one.message} (environment {one.lane})\n\n{one.traceback}"), True
