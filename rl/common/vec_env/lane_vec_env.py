"""The main process's half of a vector env: order of calls, checks, results."""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_differing_spaces, batch_space

from rl.common.vec_env.base import VecEnv
from rl.common.vec_env.copies import CopyPool
from rl.common.vec_env.engine import Engine, Job
from rl.common.vec_env.errors import (
    AlreadySteppingError,
    ClosedEnvironmentError,
    InfoSerializationError,
    NotSteppingError,
    ResetNeeded,
)
from rl.common.vec_env.lanes import Failure, Report, thaw

__all__ = ["LaneVecEnv"]

StepResult = tuple[Any, np.ndarray, np.ndarray, np.ndarray, list[dict[str, Any]]]


class LaneVecEnv(VecEnv):
    """A vector env over the groups first..last-1 of an engine: the whole of it, or a view.

    Args:
        engine: Runs the lanes.
        first: First group.
        last: Last group plus one.
        autoreset_mode: What the lanes do at the end of an episode.
        copy: Whether returned observations are copies (else views, valid until the second next step or reset).
        on_bad_info: "raise" or "drop": what to do about infos that cannot be pickled.
        timeout: Default seconds for waiting calls, None: no limit.
        metadata: The environments' metadata.
        render_mode: The environments' render mode.
        spec: The environments' spec.
    """

    def __init__(
        self,
        engine: Engine,
        first: int,
        last: int,
        *,
        autoreset_mode: AutoresetMode,
        copy: bool = True,
        on_bad_info: Literal["raise", "drop"] = "raise",
        timeout: float | None = None,
        metadata: dict[str, Any] | None = None,
        render_mode: str | None = None,
        spec: Any = None,
    ) -> None:
        low, high = engine.bounds[first][0], engine.bounds[last - 1][1]
        super().__init__(
            high - low,
            engine.observation_space,
            engine.action_space,
            autoreset_mode=autoreset_mode,
            metadata=metadata,
            render_mode=render_mode,
            spec=spec,
        )
        if on_bad_info not in ("raise", "drop"):
            raise ValueError(f"on_bad_info must be 'raise' or 'drop', got {on_bad_info!r}.")
        self._engine = engine
        self._first, self._last = first, last
        self._low, self._high = low, high
        self._lanes = slice(low, high)
        self._groups = range(first, last)
        arena, lanes = engine.arena, slice(low, high)
        self._results = (arena.reward[lanes], arena.terminated[lanes], arena.truncated[lanes])
        tree = engine.observation_tree
        self._plain = [part[0][lanes] for part in arena.observation] if tree.is_leaf and tree.arrays else []
        self._copy, self._copies = copy, CopyPool()
        self._on_bad_info = on_bad_info
        self._timeout = timeout
        self._disabled = autoreset_mode == AutoresetMode.DISABLED
        self._same_step = autoreset_mode == AutoresetMode.SAME_STEP
        # Re-entrant, so that a signal handler of the same thread may close; other threads are turned away.
        self._lock = threading.RLock()

    # Order of calls.

    def _enter(self) -> None:
        """Begin a call: refuse it where the engine cannot serve it. Every call ends with `_lock.release()`."""
        engine = self._engine
        if engine.closed or self._closed:
            raise ClosedEnvironmentError(f"This {type(self).__name__} is closed.")
        if engine.pid != os.getpid():
            raise RuntimeError(
                f"This {type(self).__name__} belongs to process {engine.pid}; this is its forked child {os.getpid()}. "
                "Make a new one here."
            )
        if not self._lock.acquire(blocking=False):
            raise AlreadySteppingError("Another thread is using this vector env: one call at a time.")
        if engine.failure is not None:
            self._lock.release()
            raise engine.failure

    def _refuse_closed(self, error: BaseException) -> None:
        """Say so where a call failed because the vector env was closed meanwhile, by a signal handler or a thread."""
        if self._engine.closed:
            raise ClosedEnvironmentError(f"This {type(self).__name__} was closed while a step was pending.") from error

    def _deadline(self, timeout: float | None) -> float | None:
        timeout = self._timeout if timeout is None else timeout
        return None if timeout is None else time.monotonic() + timeout

    def _refuse_pending(self, what: str) -> None:
        if any(self._engine.stepping[self._first : self._last]):
            raise AlreadySteppingError(f"A step is pending: call step_wait() before {what}.")

    def _refuse_stale(self, lanes: Any) -> None:
        stale = np.arange(self._engine.nb_lanes)[lanes][self._engine.stale[lanes]]
        if not len(stale):
            return
        shown = (stale - self._low).tolist()
        if len(stale) == self.num_envs and all(self._engine.fresh[i] for i in stale):
            raise ResetNeeded("Call reset() before the first step.")
        how = "reset(mask=...)" if self._disabled else "reset() or reset(mask=...)"
        raise ResetNeeded(f"Environments {shown} have ended or failed and need {how} before the next step.")

    # Stepping.

    def step_async(self, actions: Any) -> None:
        """Start a step of all lanes; see `VecEnv.step_async`."""
        self._enter()
        try:
            engine = self._engine
            self._refuse_pending("the next step_async()")
            if engine.any_stale:
                self._refuse_stale(self._lanes)
            objects = engine.codec.encode(actions, engine.arena, self._lanes, self.num_envs)
            # One set for all lanes, so that they lie together also after steps of some groups only.
            engine.target[self._first : self._last] = [1 - engine.current[self._first]] * len(self._groups)
            engine.begin(self._first, self._last, objects)
        finally:
            self._lock.release()

    def step_wait(self, timeout: float | None = None) -> StepResult:
        """Wait for the step; see `VecEnv.step_wait`."""
        self._enter()
        try:
            engine = self._engine
            if not all(engine.stepping[self._first : self._last]):
                if any(engine.stepping[self._first : self._last]):
                    raise NotSteppingError("Only some lanes were sent: call recv().")
                raise NotSteppingError()
            ended = engine.finish(self._groups, self._deadline(timeout))
            target = engine.target[self._first]
            if engine.target[self._first : self._last].count(target) == len(self._groups):
                return self._collect(self._groups, self._lanes, target, ended, self._copy)
            return self._collect(self._groups, np.arange(self._low, self._high), None, ended, True)
        except (OSError, ValueError) as error:
            self._refuse_closed(error)
            raise
        finally:
            self._lock.release()

    def send(self, actions: Any, env_ids: Iterable[int] | None = None) -> None:
        """Start a step of some lanes only.

        Args:
            actions: Actions of these lanes, in the order of `env_ids`.
            env_ids: Lanes; all lanes of each worker that is touched, such as `recv` returns them. Default: all.
        """
        self._enter()
        try:
            engine = self._engine
            lanes = self.lane_indices(None if env_ids is None else env_ids)
            order = np.argsort(np.asarray(lanes, dtype=np.int64), kind="stable")
            wanted = np.asarray(lanes, dtype=np.int64)[order] + self._low
            groups = [
                g for g in self._groups if np.any((wanted >= engine.bounds[g][0]) & (wanted < engine.bounds[g][1]))
            ]
            whole = [i for g in groups for i in range(*engine.bounds[g])]
            if wanted.tolist() != whole:
                blocks = [[i - self._low for i in range(*engine.bounds[g])] for g in self._groups]
                raise ValueError(
                    f"send() takes whole workers' lanes, each once: any of the blocks {blocks}, got {sorted(lanes)}."
                )
            if any(engine.stepping[g] for g in groups):
                raise AlreadySteppingError("Some of these lanes are stepping: call recv() first.")
            self._refuse_stale(wanted)
            if not np.array_equal(order, np.arange(len(order))):
                actions = _take(actions, order)
            objects = engine.codec.encode(actions, engine.arena, wanted, len(wanted))
            at = 0
            for g in groups:
                low, high = engine.bounds[g]
                engine.target[g] = 1 - engine.current[g]
                engine.begin(g, g + 1, None if objects is None else objects[at : at + high - low])
                at += high - low
        finally:
            self._lock.release()

    def recv(self, min_envs: int | None = None, timeout: float | None = None) -> tuple[Any, ...]:
        """Wait for some of the lanes that were sent.

        Args:
            min_envs: Return as soon as this many lanes are ready (whole workers, so it may be more). Default: all
                that were sent.
            timeout: Seconds to wait at most.

        Returns:
            `(observations, rewards, terminated, truncated, infos, env_ids)` of the n lanes that are ready, in
            ascending order: shapes `(n, ...)`, always copies.
        """
        self._enter()
        try:
            engine = self._engine
            pending = [g for g in self._groups if engine.stepping[g]]
            if not pending:
                raise NotSteppingError("No lane was sent: call send(actions) first.")
            sent = sum(engine.bounds[g][1] - engine.bounds[g][0] for g in pending)
            wanted = sent if min_envs is None else min(max(int(min_envs), 1), sent)
            ready = sorted(engine.finish_some(pending, wanted, self._deadline(timeout)))
            lanes = np.concatenate([np.arange(*engine.bounds[g]) for g in ready])
            return (*self._collect(ready, lanes, None, True, True), lanes - self._low)
        except (OSError, ValueError) as error:
            self._refuse_closed(error)
            raise
        finally:
            self._lock.release()

    def _collect(
        self,
        groups: Sequence[int],
        lanes: slice | np.ndarray,
        target: int | None,
        any_ended: bool,
        copy: bool,
    ) -> StepResult:
        """The results of finished groups. `target` None: the groups have written sets that differ."""
        engine = self._engine
        reports = [report for g in groups if (report := engine.reports[g])]
        if reports:
            self._check_infos(reports)
            self._take_objects(reports)
            if any("failures" in report for report in reports):
                self._last_step = None
                self._settle(groups)
                self._raise_reported(reports)
        observations = self._observations(groups, lanes, target, copy)
        if target is not None:
            rewards, terminated, truncated = (view.copy() for view in self._results)
        else:
            arena = engine.arena
            rewards, terminated, truncated = arena.reward[lanes], arena.terminated[lanes], arena.truncated[lanes]
        infos: list[dict[str, Any]]
        if not reports and not any_ended:
            infos = [{} for _ in range(len(rewards))]
        else:
            numbers = range(self._low, self._high) if target is not None else lanes.tolist()  # type: ignore[union-attr]
            infos = self._infos(reports, numbers, terminated | truncated)
        self._last_step = (observations, infos)
        # Last of all: after a Ctrl-C before this the step is pending as before, and can be collected again.
        self._settle(groups)
        return observations, rewards, terminated, truncated, infos

    def _settle(self, groups: Sequence[int]) -> None:
        """The steps of these groups are over, and what they wrote is the latest."""
        engine = self._engine
        if type(groups) is range:  # one operation each, which no signal handler can divide
            first, last = groups.start, groups.stop
            engine.reports[first:last] = [None] * (last - first)
            engine.current[first:last] = engine.target[first:last]
            engine.stepping[first:last] = [False] * (last - first)
            return
        for g in groups:
            engine.reports[g] = None
            engine.current[g] = engine.target[g]
            engine.stepping[g] = False

    def _observations(self, groups: Sequence[int], lanes: slice | np.ndarray, target: int | None, copy: bool) -> Any:
        engine = self._engine
        tree, sets = engine.observation_tree, engine.arena.observation
        if target is not None and self._plain:
            rows = self._plain[target]
            return self._copies.copy(rows) if copy else rows.view()
        leaves: list[Any] = []
        for k, leaf in enumerate(tree.leaves):
            if leaf.dtype is None:
                numbers = np.arange(engine.nb_lanes)[lanes].tolist()
                leaves.append([engine.objects[k][i] for i in numbers])
            elif target is not None:
                rows = sets[target][k][lanes]
                leaves.append(self._copies.copy(rows) if copy else rows)
            else:
                leaves.append(np.concatenate([sets[engine.target[g]][k][slice(*engine.bounds[g])] for g in groups]))
        return tree.join(leaves)

    def _infos(self, reports: list[Report], lanes: Sequence[int], ended: np.ndarray) -> list[dict[str, Any]]:
        engine, arena = self._engine, self._engine.arena
        told, reset_infos, finals = {}, {}, {}
        for report in reports:
            for lane, info in report.get("infos", ()):
                told[lane] = thaw(info)
            for lane, info in report.get("reset_infos", ()):
                reset_infos[lane] = thaw(info)
            for lane, k, value in report.get("final_objects", ()):
                finals[lane, k] = thaw({"": value})[""]
        infos: list[dict[str, Any]] = [told.get(lane, {}) for lane in lanes] if told else [{} for _ in lanes]
        tree, rows = engine.observation_tree, np.flatnonzero(ended).tolist()
        for row in rows:
            lane, info = lanes[row], infos[row]
            # An environment that keeps its own statistics knows better (rewards before clipping, for instance).
            if "episode" not in info:
                info["episode"] = {
                    "r": arena.episode_return.item(lane),
                    "l": arena.episode_length.item(lane),
                    "t": arena.episode_seconds.item(lane),
                }
            if self._same_step:
                leaves = [
                    finals.get((lane, k)) if leaf.dtype is None else arena.final[k][lane].copy()
                    for k, leaf in enumerate(tree.leaves)
                ]
                info["final_obs"] = tree.join(leaves)
                info["reset_info"] = reset_infos.get(lane, {})
        if rows and self._disabled:
            engine.set_stale([lanes[row] for row in rows], True)
        return infos

    def _check_infos(self, reports: list[Report]) -> None:
        """Raise once for infos that cannot travel; the step stays pending and is returned by the next call."""
        for text in [text for report in reports for text in report.pop("remarks", ())]:
            if text not in self._engine.remarked:
                self._engine.remarked.add(text)
                warnings.warn(text, UserWarning, stacklevel=5)
        bad = [one for report in reports for one in report.pop("bad_infos", ())]
        if bad and self._on_bad_info == "raise":
            lane, key, name = bad[0]
            error = InfoSerializationError(
                f"Environment {lane}: info[{key!r}] of type {name} cannot be pickled, so it cannot leave the "
                "environment: remove it there, or pass on_bad_info='drop'. The step is not lost: step_wait() returns "
                "it with the value replaced by a description."
            )
            error.env_index = lane  # type: ignore[attr-defined]
            raise error

    def _take_objects(self, reports: list[Report]) -> None:
        for report in reports:
            for lane, k, value in report.get("objects", ()):
                self._engine.objects[k][lane] = thaw({"": value})[""]

    def _raise_reported(self, reports: list[Report]) -> None:
        failures = [one for report in reports for one in report.get("failures", ())]
        if failures:
            self._last_step = None
            self._engine.set_stale([one.lane for one in failures], True)
            self._engine.raise_failures(failures)

    # Resetting.

    def reset(
        self,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | Sequence[dict[str, Any] | None] | None = None,
        mask: Any = None,
    ) -> tuple[Any, list[dict[str, Any]]]:
        """Reset all lanes or those of the mask; see `VecEnv.reset`."""
        self._enter()
        try:
            engine = self._engine
            chosen = self.lane_mask(mask)
            lane_options = self._lane_options(options)
            seeds = self.lane_seeds(seed)
            if seed is None and self._next_seeds is not None:
                seeds = self._next_seeds
            deadline = self._deadline(None)
            self._drain(deadline)
            self._next_seeds = None
            self._last_step = None
            jobs: dict[int, list[Job]] = {}
            for g in self._groups:
                low, high = engine.bounds[g]
                for lane in range(low, high):
                    row = lane - self._low
                    if chosen[row]:
                        jobs.setdefault(g, []).append((lane - low, seeds[row], lane_options[row]))
                        if seeds[row] is not None or engine.fresh[lane]:
                            engine.lane_seeds[lane] = seeds[row]
            target = 1 - engine.current[self._first]
            for g in self._groups:  # rows outside the mask move along into the other set
                source = engine.current[g]
                if source != target:
                    low, high = engine.bounds[g]
                    for k, array in engine.arena.observation[target].items():
                        if g not in jobs or len(jobs[g]) < high - low:
                            array[low:high] = engine.arena.observation[source][k][low:high]
            lanes = [row + self._low for row in np.flatnonzero(chosen).tolist()]
            engine.set_stale(lanes, True)
            reports = engine.reset(jobs, target, deadline) if jobs else []
            for g in self._groups:
                engine.current[g] = target
            engine.set_stale(lanes, False)
            for lane in lanes:
                engine.fresh[lane] = False
            self._take_objects(reports)
            self._raise_reported(reports)
            self._check_infos(reports)
            told = {lane: thaw(info) for report in reports for lane, info in report.get("infos", ())}
            infos = [told.get(lane, {}) for lane in range(self._low, self._high)]
            return self._observations(self._groups, self._lanes, target, self._copy), infos
        finally:
            self._lock.release()

    def _drain(self, deadline: float | None) -> None:
        """Wait for pending steps and forget them, but not which lanes they leave in need of a reset."""
        engine = self._engine
        pending = [g for g in self._groups if engine.stepping[g]]
        if not pending:
            return
        engine.finish(pending, deadline)
        for g in pending:
            if report := engine.reports[g]:
                self._take_objects([report])
                engine.set_stale([one.lane for one in report.get("failures", ())], True)
            if self._disabled:
                low, high = engine.bounds[g]
                ended = engine.arena.terminated[low:high] | engine.arena.truncated[low:high]
                engine.set_stale((np.flatnonzero(ended) + low).tolist(), True)
        self._settle(pending)

    def _lane_options(self, options: Any) -> list[dict[str, Any] | None]:
        if options is None or isinstance(options, dict):
            return [options] * self.num_envs
        given = list(options)
        if len(given) != self.num_envs or not all(one is None or isinstance(one, dict) for one in given):
            raise ValueError(
                f"options must be a dict, or a sequence of {self.num_envs} dicts or Nones, got {options!r}."
            )
        return given

    # Talking to the environments.

    def _ask(self, kind: str, indices: int | Iterable[int] | None, args: Any) -> list[Any]:
        lanes = [lane + self._low for lane in self.lane_indices(indices)]
        self._enter()
        try:
            self._refuse_pending(f"{kind}()")
            answers = self._engine.ask(kind, lanes, args, self._deadline(None))
            failures = [one for one in answers if isinstance(one, Failure)]
            if failures:
                self._engine.raise_failures(failures)
            return answers
        finally:
            self._lock.release()

    def get_attr(self, name: str, indices: int | Iterable[int] | None = None) -> list[Any]:
        """Read an attribute; see `VecEnv.get_attr`."""
        return self._ask("get_attr", indices, name)

    def set_attr(self, name: str, value: Any, indices: int | Iterable[int] | None = None) -> None:
        """Set an attribute; see `VecEnv.set_attr`."""
        self._ask("set_attr", indices, (name, value))

    def call(self, name: str, *args: Any, indices: int | Iterable[int] | None = None, **kwargs: Any) -> list[Any]:
        """Call a method; see `VecEnv.call`."""
        return self._ask("call", indices, (name, args, kwargs))

    def has_attr(self, name: str) -> bool:
        """Whether every environment has an attribute."""
        return all(self._ask("has_attr", None, name))

    def env_is_wrapped(self, wrapper_class: type, indices: int | Iterable[int] | None = None) -> list[bool]:
        """Whether environments are wrapped in a class; see `VecEnv.env_is_wrapped`."""
        return self._ask("is_wrapped", indices, wrapper_class)

    def action_masks(self) -> np.ndarray | None:
        """Valid actions now, `(N, n)`; see `VecEnv.action_masks`."""
        masks = self._ask("action_masks", None, None)
        known = [one for one in masks if one is not None]
        if not known:
            return None
        # An environment that tells nothing forbids nothing.
        return np.stack([np.ones_like(known[0]) if one is None else one for one in masks])

    # The rest.

    @property
    def batched_observation_space(self) -> spaces.Space[Any]:
        """The space of N observations; with spaces="compatible" each lane keeps its bounds."""
        if self._engine.same_observations:
            return batch_space(self.observation_space, self.num_envs)
        return batch_differing_spaces(self._engine.observation_spaces[self._lanes])

    @property
    def batched_action_space(self) -> spaces.Space[Any]:
        """The space of N actions; with spaces="compatible" each lane keeps its bounds."""
        if self._engine.same_actions:
            return batch_space(self.action_space, self.num_envs)
        return batch_differing_spaces(self._engine.action_spaces[self._lanes])

    @property
    def closed(self) -> bool:
        """Whether it, or the vector env that it is a view of, was closed."""
        return self._closed or self._engine.closed

    def split(self, k: int) -> list[VecEnv]:
        """Make k views over consecutive blocks of lanes, each a vector env with its own steps.

        While one view steps, actions for the other can be computed. The vector env itself must not be stepped while
        a view's step is pending.

        Args:
            k: Number of views, at most the number of workers (of lanes for a `DummyVecEnv`).
        """
        nb = self._last - self._first
        if not 1 <= k <= nb:
            raise ValueError(f"split(k) needs 1 <= k <= {nb}, the number of lane groups (workers), got {k}.")
        edges = [self._first + (i * nb) // k for i in range(k + 1)]
        return [_View(self, first, last) for first, last in zip(edges[:-1], edges[1:], strict=True)]

    def close(self, timeout: float = 5.0) -> None:
        """Close the environments; see `VecEnv.close`."""
        if self._closed:
            return
        self._closed = True
        if not self._lock.acquire(blocking=False):
            self._engine.abort()
            self._lock.acquire(timeout=timeout)
        self._engine.close(timeout)


class _View(LaneVecEnv):
    """A block of another vector env's lanes. Closing it only ends the view."""

    def __init__(self, parent: LaneVecEnv, first: int, last: int) -> None:
        super().__init__(
            parent._engine,
            first,
            last,
            autoreset_mode=parent.metadata["autoreset_mode"],
            copy=parent._copy,
            on_bad_info=parent._on_bad_info,
            timeout=parent._timeout,
            metadata=parent.metadata,
            render_mode=parent.render_mode,
            spec=parent.spec,
        )
        self._parent = parent  # keeps the workers alive
        self.action_space = parent.action_space  # copies would all sample the same actions

    def close(self, timeout: float = 5.0) -> None:
        """End the view; the vector env that it is a view of stays open."""
        self._closed = True


def _take(actions: Any, order: np.ndarray) -> Any:
    """Actions in another order of lanes."""
    if isinstance(actions, dict):
        return {key: _take(value, order) for key, value in actions.items()}
    if isinstance(actions, tuple):
        return tuple(_take(value, order) for value in actions)
    if isinstance(actions, np.ndarray):
        return actions[order]
    return [actions[i] for i in order.tolist()]
