"""A vector env without processes: the twin of SubprocVecEnv for cheap environments and for debugging."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from gymnasium.vector import AutoresetMode

from rl.common.vec_env.arguments import check_env_fns, mode_of
from rl.common.vec_env.engine import Engine, Job
from rl.common.vec_env.lane_vec_env import LaneVecEnv
from rl.common.vec_env.lanes import Failure, Lanes, Report

__all__ = ["DummyVecEnv"]


class _LocalEngine(Engine):
    """Runs the lanes in this process. Every lane is a group of its own."""

    def __init__(self, lanes: Lanes) -> None:
        super().__init__([(i, i + 1) for i in range(len(lanes.envs))])
        self.lanes = lanes
        self.actions: list[Any] = [None] * self.nb_lanes

    def begin(self, first: int, last: int, actions: list[Any] | None) -> None:
        self.actions[first:last] = self.lanes.actions(first, last) if actions is None else actions
        self.stepping[first:last] = [True] * (last - first)

    def finish(self, groups: Sequence[int], deadline: float | None) -> bool:
        # A report means: stepped already, and kept because an info could not be copied.
        todo = [g for g in groups if self.reports[g] is None]
        any_ended = len(todo) < len(groups)
        while todo:
            first, nb = todo[0], len(todo)
            target = self.target[first]
            if todo[-1] >= first + nb or self.target[first : first + nb].count(target) < nb:  # not all in one go
                nb = 1
                while nb < len(todo) and todo[nb] == first + nb and self.target[todo[nb]] == target:
                    nb += 1
            try:
                ended, report = self.lanes.step(self.actions[first : first + nb], first, target)
            except BaseException:
                # Ctrl-C between two lanes: nobody knows which of them have stepped.
                for g in groups:
                    self.stepping[g] = False
                self.set_stale(list(groups), True)
                raise
            self.reports[first : first + nb] = [report or {}, *[{} for _ in range(nb - 1)]]
            any_ended |= ended
            todo = todo[nb:]
        return any_ended

    def finish_some(self, groups: Sequence[int], min_lanes: int, deadline: float | None) -> list[int]:
        self.finish(groups, deadline)
        return list(groups)

    def reset(self, jobs: dict[int, list[Job]], target: int, deadline: float | None) -> list[Report]:
        return [self.lanes.reset([(g, seed, options) for g, [(_, seed, options)] in jobs.items()], target)]

    def ask(self, kind: str, lanes: Sequence[int], args: Any, deadline: float | None) -> list[Any]:
        return self.lanes.ask(kind, lanes, args)

    def rebuild(self, one: Failure) -> tuple[BaseException, bool]:
        if isinstance(one.error, Exception):
            return one.error, False
        # SystemExit: as an exception of this process it would end the program.
        error, _ = super().rebuild(one)
        error.__cause__ = one.error  # type: ignore[assignment]
        return error, not isinstance(one.error, BaseException)

    def close(self, timeout: float) -> None:
        self.closed = True
        _warn_close(self.lanes.close())


def _warn_close(failures: list[Failure]) -> None:
    for one in failures:
        warnings.warn(
            f"Environment {one.lane} failed in close(): {one.type_name}: {one.message}",
            RuntimeWarning,
            stacklevel=4,
        )


class DummyVecEnv(LaneVecEnv):
    """Steps N environments one after the other in this process.

    With the same functions, seeds and actions it gives bit-identical results to `SubprocVecEnv` and raises the same
    exceptions; it is the faster one where a step costs less than about 30 microseconds.

    Args:
        env_fns: N functions without arguments, each of which makes one environment.
        autoreset_mode: What happens when an episode ends, see `VecEnv`.
        copy: Whether returned observations are the caller's own. With False they are views that stay intact until
            the second next step or reset.
        check_actions: Whether discrete actions must lie in their space.
        clip_actions: Whether `Box` actions are clipped to their bounds.
        on_bad_info: What to do about an info that cannot be pickled: "raise" `InfoSerializationError`, or "drop" the
            value for a description.
        spaces: "same": all environments must have equal spaces. "compatible": their bounds may differ.

    Raises:
        ValueError: If `env_fns` is empty, two functions return the same environment, or the spaces differ.
        EnvFnError: If an entry of `env_fns` is no function (a TypeError).
    """

    def __init__(
        self,
        env_fns: Iterable[Callable[[], Any]],
        *,
        autoreset_mode: AutoresetMode | str = AutoresetMode.SAME_STEP,
        copy: bool = True,
        check_actions: bool = True,
        clip_actions: bool = False,
        on_bad_info: Literal["raise", "drop"] = "raise",
        spaces: Literal["same", "compatible"] = "same",
    ) -> None:
        mode = mode_of(autoreset_mode)
        lanes = Lanes(0, mode)
        functions = check_env_fns(env_fns)
        failures = lanes.build(functions)
        try:
            if failures:
                Engine.raise_failures(_LocalEngine.__new__(_LocalEngine), failures)
            engine = _LocalEngine(lanes)
            engine.describe(
                [env.observation_space for env in lanes.envs],
                [env.action_space for env in lanes.envs],
                spaces,
                check_actions,
                clip_actions,
            )
            lanes.attach(engine.arena.allocate(), engine.observation_tree, engine.action_tree, 0)
        except BaseException:
            lanes.close()
            raise
        self.envs = list(lanes.envs)
        env = lanes.envs[0]
        super().__init__(
            engine,
            0,
            engine.nb_lanes,
            autoreset_mode=mode,
            copy=copy,
            on_bad_info=on_bad_info,
            metadata=getattr(env, "metadata", None),
            render_mode=getattr(env, "render_mode", None),
            spec=getattr(env, "spec", None),
        )
