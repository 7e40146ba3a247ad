"""Stepping some environments in this process: the one loop behind DummyVecEnv and every worker of SubprocVecEnv."""

from __future__ import annotations

import pickle
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
from gymnasium import Wrapper
from gymnasium.spaces import Discrete
from gymnasium.vector import AutoresetMode

from rl.common.vec_env.arena import BUSY, CONTROL_WORDS, Arena, SpaceTree, fit

__all__ = ["Failure", "Frozen", "Lanes", "Report", "dumps", "new_report", "thaw"]

_ATOMS = frozenset({int, float, bool, str, bytes, type(None), complex})

# What a step or reset has to tell beside its arrays: lists of (lane, ...) by kind; absent kinds are empty.
# infos: (lane, dict); reset_infos: (lane, dict); failures: Failure; bad_infos: (lane, key, type name);
# objects, final_objects: (lane, leaf number, value); remarks: text.
Report = dict[str, list[Any]]


def new_report() -> Report:
    """An empty report."""
    return {}


class Failure(NamedTuple):
    """An exception of one lane. `error` is the exception, its pickle, or None if it cannot travel."""

    lane: int
    type_name: str
    message: str
    traceback: str
    error: BaseException | bytes | None


class Frozen(NamedTuple):
    """A pickled value: a snapshot that later changes to the original cannot reach."""

    data: bytes


def dumps(value: Any) -> bytes:
    """Pickle `value`, by value where it holds lambdas or classes that cannot be imported elsewhere."""
    try:
        return pickle.dumps(value, protocol=5)
    except Exception:
        # A partial pickle may have failed for any reason, and with any exception, that a __reduce__ can think of.
        return cloudpickle.dumps(value, protocol=5)


def freeze(info: dict[str, Any], lane: int, bad: list[tuple[int, str, str]]) -> dict[str, Any]:
    """A snapshot of an info. Values that cannot be pickled become descriptions and are listed in `bad`."""
    frozen: dict[str, Any] = {}
    for key, value in info.items():
        kind = type(value)
        if type(key) is not str:
            try:
                dumps(key)
            except Exception:
                bad.append((lane, str(key), f"{type(key).__module__}.{type(key).__qualname__} (a key)"))
                continue
        if kind in _ATOMS or (isinstance(value, np.generic) and not value.dtype.hasobject):
            frozen[key] = value
        elif kind is np.ndarray and not value.dtype.hasobject:
            frozen[key] = value.copy()
        else:
            try:
                frozen[key] = Frozen(dumps(value))
            except Exception:
                name = f"{kind.__module__}.{kind.__qualname__}"
                frozen[key] = f"<not picklable: {name}>"
                bad.append((lane, str(key), name))
    return frozen


def thaw(info: dict[str, Any]) -> dict[str, Any]:
    """The info of a snapshot, in place."""
    for key, value in info.items():
        if type(value) is Frozen:
            info[key] = pickle.loads(value.data)
    return info


def as_reward(value: Any, lane: int) -> float:
    """A reward as float: numbers and arrays of one number.

    Raises:
        TypeError: For everything else.
    """
    if isinstance(value, float):  # np.float64 is one
        return float(value)
    if isinstance(value, (int, float, np.bool_, np.number)) or (
        isinstance(value, np.ndarray) and value.size == 1 and value.dtype.kind in "biuf"
    ):
        number = value.item() if isinstance(value, (np.ndarray, np.generic)) else value
        if not isinstance(number, complex):
            return float(number)
    shown = f"an array of shape {value.shape}" if isinstance(value, np.ndarray) else type(value).__name__
    raise TypeError(f"Environment {lane}: the reward must be a number, got {shown}.")


def as_flag(value: Any, lane: int, name: str) -> bool:
    """A terminated or truncated flag as bool: bools, numbers and arrays of one of them.

    Raises:
        TypeError: For everything else.
    """
    if isinstance(value, (bool, np.bool_, int, np.number)) or (isinstance(value, np.ndarray) and value.size == 1):
        return bool(value)
    raise TypeError(f"Environment {lane}: {name} must be a bool, got {type(value).__name__}.")


def _describe(result: Any) -> str:
    return f"{len(result)} values" if isinstance(result, (tuple, list)) else type(result).__name__


def unpack_step(result: Any, lane: int, env: Any) -> Any:
    """The five values of a step.

    Raises:
        TypeError: If there are not five.
    """
    if isinstance(result, (tuple, list)) and len(result) == 5:
        return result
    hint = (
        " (the old Gym API: wrap the environment so that it returns terminated and truncated)"
        if (isinstance(result, tuple) and len(result) == 4)
        else ""
    )
    raise TypeError(
        f"Environment {lane}: {type(env).__name__}.step() must return (observation, reward, terminated, truncated, "
        f"info), got {_describe(result)}{hint}."
    )


def unpack_reset(result: Any, lane: int, env: Any) -> Any:
    """The observation and info of a reset.

    Raises:
        TypeError: If it is not a pair of an observation and a dict.
    """
    if isinstance(result, (tuple, list)) and len(result) == 2 and (isinstance(result[1], dict) or result[1] is None):
        return result
    raise TypeError(
        f"Environment {lane}: {type(env).__name__}.reset() must return (observation, info), got {_describe(result)} "
        "(the old Gym API returned the observation alone: wrap the environment)."
    )


def failure(lane: int, error: BaseException) -> Failure:
    """Describe `error`, which is being handled."""
    kind = type(error)
    name = (
        kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"
    )
    try:
        message = str(error)
    except Exception:
        message = "<no message: str() of the exception failed>"
    try:
        text = "".join(traceback.format_exception(error))
    except Exception:
        text = "".join(traceback.format_tb(error.__traceback__)) + f"{name}: {message}\n"
    return Failure(lane, name, message, text, error)


class Lanes:
    """Some environments, stepped one after the other.

    Args:
        first: Number of the first one among all lanes.
        autoreset_mode: What happens at the end of an episode.
        catch: Exceptions of an environment that are reported; others fly through.
    """

    def __init__(
        self,
        first: int,
        autoreset_mode: AutoresetMode,
        catch: tuple[type[BaseException], ...] = (Exception, SystemExit),
    ) -> None:
        self.first = first
        self._catch = catch
        self.same_step = autoreset_mode == AutoresetMode.SAME_STEP
        self.next_step = autoreset_mode == AutoresetMode.NEXT_STEP
        self.envs: list[Any] = []

    def build(
        self, env_fns: Sequence[Callable[[], Any]], on_start: Callable[[int], None] | None = None
    ) -> list[Failure]:
        """Make the environments.

        Args:
            env_fns: Functions without arguments.
            on_start: Called with the local number before each.

        Returns:
            The failures; building stops at the first.
        """
        for k, env_fn in enumerate(env_fns):
            lane = self.first + k
            try:
                if on_start is not None:
                    on_start(k)
                env = env_fn()
                for name in ("reset", "step", "observation_space", "action_space"):
                    if not hasattr(env, name):
                        raise TypeError(
                            f"env_fns[{lane}] returned {type(env).__name__}, which has no {name}: it must return an "
                            "environment."
                        )
                if any(env is other for other in self.envs):
                    raise ValueError(
                        f"env_fns[{lane}] returned the same environment as env_fns["
                        f"{self.first + [env is other for other in self.envs].index(True)}]: every call must make a "
                        "new one."
                    )
            except self._catch as error:
                return [failure(lane, error)]
            self.envs.append(env)
        self._masks: list[Any] = [None] * len(self.envs)
        self._action_spaces = [env.action_space for env in self.envs]
        return []

    def attach(self, arena: Arena, observations: SpaceTree, actions: SpaceTree, group: int) -> None:
        """Bind the lanes' rows of the arena.

        Args:
            arena: Arrays of all lanes.
            observations: Leaves of one observation.
            actions: Leaves of one action.
            group: Whose control words tell which lane is busy.
        """
        nb = len(self.envs)
        low, high = self.first, self.first + nb
        self._observations = observations
        self._actions = actions
        self._sets = [
            [{k: a[i : i + 1] for k, a in part.items()} for i in range(low, high)] for part in arena.observation
        ]
        self._final = [{k: a[i : i + 1] for k, a in arena.final.items()} for i in range(low, high)]
        leaf = observations.leaves[0] if observations.is_leaf else None
        self._plain = leaf is not None and leaf.dtype is not None
        # A step of a plain observation writes through these; "..." keeps a scalar space's row an array.
        self._rows = [[a[0][i, ...] for i in range(low, high)] for a in arena.observation] if self._plain else []
        self._shape, self._dtype = (leaf.shape, leaf.dtype) if leaf is not None else ((), None)
        self._action_block = {k: a[low:high] for k, a in arena.action.items()}
        self._reward: Any = arena.reward.data[low:high]
        self._terminated: Any = arena.terminated.view(np.uint8).data[low:high]
        self._truncated: Any = arena.truncated.view(np.uint8).data[low:high]
        self._episode = (
            arena.episode_return[low:high],
            arena.episode_length[low:high],
            arena.episode_seconds[low:high],
        )
        self._control = arena.control
        self._busy = group * CONTROL_WORDS + BUSY
        # In the arena, so that they outlive the worker.
        self._return: Any = arena.running_return.data[low:high]
        self._length: Any = arena.running_length.data[low:high]
        self._started = [0.0] * nb
        self._due = [False] * nb  # NEXT_STEP: the next step resets this lane
        self._owed_seeds: dict[int, int | None] = {}
        self.current = 0

    def actions(self, low: int, high: int) -> list[Any]:
        """The actions of local lanes low..high-1 as the environments get them.

        They are copies: an environment may keep or change what it is given.
        """
        tree = self._actions
        if tree.is_leaf:
            block = self._action_block[0][low:high]
            # Python ints are what an env that looks its action up in a dict or a match statement expects.
            return block.tolist() if isinstance(tree.space, Discrete) else [*block.copy()]
        lists = []
        for k, leaf in enumerate(tree.leaves):
            block = self._action_block[k][low:high]
            lists.append(block.tolist() if isinstance(leaf.space, Discrete) else [*block.copy()])
        return [tree.join(list(row)) for row in zip(*lists, strict=True)]

    def reset(self, jobs: Sequence[tuple[int, int | None, dict[str, Any] | None]], target: int) -> Report:
        """Reset some lanes into observation set `target`.

        Args:
            jobs: (local number, seed, options) per lane.
            target: Observation set to write.
        """
        report = new_report()
        for k, seed, options in jobs:
            self._control[self._busy] = k
            try:
                self._put(k, self._reset_env(k, seed, options, report, "infos"), target, report)
                self._due[k] = False
                self._compare_action_space(k, report)
            except self._catch as error:
                report.setdefault("failures", []).append(failure(self.first + k, error))
                self._keep(k, target)
        self._control[self._busy] = -1
        self.current = target
        return report

    def owe_reset(self, jobs: Sequence[tuple[int, int | None, dict[str, Any] | None]]) -> None:
        """Leave lanes to their next reset (in NEXT_STEP: the next step's), and remember the seeds for it."""
        for k, seed, _ in jobs:
            self._owed_seeds[k] = seed
            self._due[k] = self.next_step

    def step(self, actions: Sequence[Any], low: int, target: int) -> tuple[bool, Report | None]:
        """Step local lanes low, low + 1, ... into observation set `target`.

        Args:
            actions: One per lane, as the environments get them.
            low: Local number of the first lane.
            target: Observation set to write.

        Returns:
            Whether an episode ended, and what there is to tell beside the arrays.
        """
        report = new_report()
        any_ended = False
        # Everything the loop touches is a local name: this is the time that each environment's step costs on top.
        envs, first, control, busy = self.envs, self.first, self._control, self._busy
        rewards, terminations, truncations = self._reward, self._terminated, self._truncated
        returns, lengths = self._return, self._length
        plain, shape, dtype, ndarray = self._plain, self._shape, self._dtype, np.ndarray
        rows: Any = self._rows[target] if plain else self._sets[target]
        next_step, due = self.next_step, self._due
        for k, action in enumerate(actions, low):
            control[busy] = k
            try:
                if next_step and due[k]:
                    self._lazy_reset(k, target, report)
                    continue
                result = envs[k].step(action)
                try:
                    observation, reward, terminated, truncated, info = result
                except (TypeError, ValueError):
                    unpack_step(result, first + k, envs[k])
                    raise
                if type(reward) is not float:
                    reward = as_reward(reward, first + k)
                if type(terminated) is not bool:
                    terminated = as_flag(terminated, first + k, "terminated")
                if type(truncated) is not bool:
                    truncated = as_flag(truncated, first + k, "truncated")
                rewards[k] = reward
                terminations[k] = terminated
                truncations[k] = truncated
                returns[k] += reward
                lengths[k] += 1
                if info:
                    self._tell_info(k, info, report, "infos")
                if terminated or truncated:
                    any_ended = True
                    self._end(k, observation, target, report)
                elif (
                    plain and type(observation) is ndarray and observation.dtype == dtype and observation.shape == shape
                ):
                    rows[k][...] = observation
                else:
                    self._put(k, observation, target, report)
            except self._catch as error:
                report.setdefault("failures", []).append(failure(first + k, error))
                self._keep(k, target)
        control[busy] = -1
        self.current = target
        return any_ended, report or None

    def _end(self, k: int, observation: Any, target: int, report: Report) -> None:
        """Finish lane k's episode: its statistics, its final observation, and in SAME_STEP its reset."""
        for array, value in zip(
            self._episode,
            (self._return[k], self._length[k], time.perf_counter() - self._started[k]),
            strict=True,
        ):
            array[k] = value
        if not self.same_step:
            self._put(k, observation, target, report)
            self._due[k] = self.next_step
            return
        # Stored before the reset, so that an environment that reuses its observation buffer cannot overwrite it.
        self._write(k, observation, self._final[k], report, "final_objects")
        self._put(k, self._reset_env(k, None, None, report, "reset_infos"), target, report)
        self._compare_action_space(k, report)

    def _lazy_reset(self, k: int, target: int, report: Report) -> None:
        self._reward[k] = 0.0
        self._terminated[k] = self._truncated[k] = 0
        self._put(k, self._reset_env(k, None, None, report, "infos", {"is_reset": True}), target, report)
        self._due[k] = False
        self._compare_action_space(k, report)

    def _reset_env(
        self,
        k: int,
        seed: int | None,
        options: dict[str, Any] | None,
        report: Report,
        kind: str,
        more: dict[str, Any] | None = None,
    ) -> Any:
        self._return[k], self._length[k] = 0.0, 0
        self._masks[k] = None
        env = self.envs[k]
        owed = self._owed_seeds.pop(k, None)
        seed = owed if seed is None else seed
        kwargs: dict[str, Any] = {}
        # Passed only where given: a duck-typed environment may know neither.
        if seed is not None:
            kwargs["seed"] = seed
        if options is not None:
            kwargs["options"] = options
        observation, info = unpack_reset(env.reset(**kwargs), self.first + k, env)
        self._started[k] = time.perf_counter()
        if info or more:
            self._tell_info(k, {**(info or {}), **(more or {})}, report, kind)
        return observation

    def _tell_info(self, k: int, info: Any, report: Report, kind: str) -> None:
        if not isinstance(info, dict):
            raise TypeError(f"Environment {self.first + k}: the info must be a dict, got {type(info).__name__}.")
        bad: list[tuple[int, str, str]] = []
        report.setdefault(kind, []).append((self.first + k, freeze(info, self.first + k, bad)))
        if bad:
            report.setdefault("bad_infos", []).extend(bad)
        self._masks[k] = info.get("action_mask")

    def _put(self, k: int, observation: Any, target: int, report: Report) -> None:
        self._write(k, observation, self._sets[target][k], report, "objects")

    def _write(self, k: int, observation: Any, rows: dict[int, np.ndarray], report: Report, objects: str) -> None:
        if (
            self._plain
            and type(observation) is np.ndarray
            and observation.dtype == self._dtype
            and observation.shape == self._shape
        ):
            rows[0][0] = observation
            return
        lane, tree = self.first + k, self._observations
        leaves, extra = tree.flatten(observation, lane)
        remarks = [f"observation has entries that its space does not know: {extra}. They are dropped."] if extra else []
        for number, value in enumerate(leaves):
            leaf = tree.leaves[number]
            if leaf.dtype is None:
                report.setdefault(objects, []).append((lane, number, Frozen(dumps(value))))
                continue
            array, remark = fit(value, leaf, lane)
            rows[number][0] = array
            if remark:
                remarks.append(remark)
        if remarks:
            name = type(getattr(self.envs[k], "unwrapped", self.envs[k])).__name__
            report.setdefault("remarks", []).extend(f"{name}: {text}" for text in remarks)

    def _keep(self, k: int, target: int) -> None:
        """After a failure: the lane's row stays what it was, without reward or end."""
        for number, row in self._sets[target][k].items():
            row[...] = self._sets[self.current][k][number]
        self._reward[k] = 0.0
        self._terminated[k] = self._truncated[k] = 0

    def _compare_action_space(self, k: int, report: Report) -> None:
        space = self.envs[k].action_space
        if space is not self._action_spaces[k]:
            if space != self._action_spaces[k]:
                report.setdefault("remarks", []).append(
                    f"Environment {self.first + k} changed its action_space from {self._action_spaces[k]} to {space}: "
                    "the vector env goes on with the first one."
                )
            self._action_spaces[k] = space

    def ask(self, kind: str, lanes: Sequence[int], args: Any) -> list[Any]:
        """Answer a question about some lanes: get_attr, set_attr, call, has_attr, is_wrapped or action_masks.

        Args:
            kind: The question.
            lanes: Local numbers.
            args: Its arguments.

        Returns:
            One answer per lane. An exception carries the number of its lane in the attribute `env_index`.
        """
        answers = []
        for k in lanes:
            self._control[self._busy] = k
            try:
                answers.append(self._ask(kind, k, args))
            except self._catch as error:
                answers.append(failure(self.first + k, error))
                break
        self._control[self._busy] = -1
        return answers

    def _ask(self, kind: str, k: int, args: Any) -> Any:
        env = self.envs[k]
        if kind == "get_attr":
            return _get(env, args)
        if kind == "set_attr":
            name, value = args
            setter = getattr(env, "set_wrapper_attr", None)
            return setattr(env, name, value) if setter is None else setter(name, value)
        if kind == "call":
            name, positional, keywords = args
            return _get(env, name)(*positional, **keywords)
        if kind == "has_attr":
            try:
                _get(env, args)
            except AttributeError:
                return False
            return True
        if kind == "is_wrapped":
            while not isinstance(env, args):
                if not isinstance(env, Wrapper):
                    return False
                env = env.env
            return True
        mask = self._masks[k]
        if mask is None and _has(env, "action_masks"):
            mask = _get(env, "action_masks")()
        return None if mask is None else np.array(mask, dtype=bool)

    def close(self) -> list[Failure]:
        """Close the environments; returns the failures."""
        failures = []
        for k, env in enumerate(self.envs):
            try:
                if hasattr(env, "close"):
                    env.close()
            except self._catch as error:
                failures.append(failure(self.first + k, error))
        self.envs = []
        return failures


def _get(env: Any, name: str) -> Any:
    """An attribute of an environment or of the first wrapper around it that has it."""
    getter = getattr(env, "get_wrapper_attr", None)
    return getattr(env, name) if getter is None else getter(name)


def _has(env: Any, name: str) -> bool:
    try:
        _get(env, name)
    except AttributeError:
        return False
    return True
