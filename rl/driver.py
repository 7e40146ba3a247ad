"""`EnvDriver`: any environment, single or vector, new API or old, as rows of `Transition`.

The loop and the agents see N lanes and nothing else. What differs between environments is settled here, once: which
lane has ended, which begins, who resets it and when. The parts of a step that need no such knowledge stand in
``rl/common``: `SingleEnv`, `ActionSpec`, `LaneProcessor`, `StartSteps`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from gymnasium.vector import AutoresetMode

from rl.common.action_spec import ActionSpec
from rl.common.lane_processor import LaneProcessor
from rl.common.misc_util import tree_map
from rl.common.single_env import SingleEnv, as_lanes
from rl.common.start_steps import StartSteps
from rl.common.vec_env import successors

__all__ = ["EnvDriver", "Transition"]


class Transition(NamedTuple):
    """One step of N lanes. Observations are arrays with leading axis N, or dicts or tuples (trees) of such arrays.

    Attributes:
        observation: (N, *obs), what the agent acted on, in the env's dtype.
        action: (N,) integers (an index 0..n-1), (N, K) integers (such indices for ``MultiDiscrete``, 0 or 1 for
            ``MultiBinary``) or (N, A) floats, as the agent chose them: before the processor, the `start` of the space
            and the clipping to a ``Box``.
        reward: (N,) float32.
        next_observation: (N, *obs), the true successor: where an episode ended, its final observation, never the
            first one of the next episode.
        terminated: (N,) bool, the task ended here: there is nothing to bootstrap from.
        truncated: (N,) bool, the episode was cut here. Where both are True the lane counts as terminated.
        valid: (N,) bool, False for a lane that made no transition of the agent's in this call: it only reset itself,
            played a random start step, or lost its worker process. Such a row has reward 0 and no flag, but for the
            lost one's `truncated`, which ends the episode; the rest of it means nothing.
        info: list of N dicts, the step's own (where an episode ended: that of its last step).
    """

    observation: Any
    action: np.ndarray
    reward: np.ndarray
    next_observation: Any
    terminated: np.ndarray
    truncated: np.ndarray
    valid: np.ndarray
    info: list[dict[str, Any]]


class EnvDriver:
    """Steps an environment of N lanes and hands out `Transition` rows; a single env is one lane in the same path.

    Call `observe` for what to act on and `step` with the actions, in turn. `observe` resets what has ended and was
    not reset by the env itself, so an episode begins only when somebody wants to act in it.

    Args:
        env: A ``gymnasium.Env`` or anything with ``reset`` and ``step`` (also of the older API, see `SingleEnv`), an
            ``rl.common.vec_env.VecEnv``, or a ``gymnasium.vector.VectorEnv`` of any autoreset mode. It stays the
            user's: the driver never closes it.
        processor: An ``rl.core.Processor`` or None. Its hooks see one lane's row at a time; only those that are
            overridden cost anything. A `process_step` that turns ``done`` on ends the episode there (terminated,
            and the lane is reset); one that turns it off makes the end a truncation, since the env cannot go on.
        action_repetition: How often a single env is given each action (1). Rewards and the numbers in ``info`` are
            summed; an end stops the repetition.
        nb_max_episode_steps: Steps of the agent after which an episode is cut (truncated), or None.
        nb_max_start_steps: Each episode begins with n random steps, 0 <= n < `nb_max_start_steps` (0: none), which
            no valid row shows.
        start_step_policy: ``observation -> action`` for those steps, where the action is one of the env's action
            space. By default the action space is sampled.

    Attributes:
        env: The env as given.
        nb_lanes: N.
        is_vector: Whether `env` is a vector env (with N = 1, too).
        observation_space: Space of one lane's observation, None where an old env declares none.
        action_space: Likewise, of its action.
        episode_step: (N,) int, the agent's steps in the running episode of each lane; after an end those of the
            ended episode, until the next one begins.
        started: (N,) bool, the lanes whose episode began with the latest `observe`; all False once `step` is called.
        reset_infos: List of N dicts, the info of each lane's latest reset.
        failed: True after an exception in the env or a hook, until `reset`.

    Raises:
        TypeError: If `env` lacks ``reset`` or ``step``, is a class or an unknown kind of vector env.
        ValueError: If a number is out of range, or `action_repetition` is above 1 on a vector env.
        gymnasium.error.ClosedEnvironmentError: If `env` is closed.
    """

    def __init__(
        self,
        env: Any,
        processor: Any = None,
        action_repetition: int = 1,
        nb_max_episode_steps: int | None = None,
        nb_max_start_steps: int = 0,
        start_step_policy: Callable[[Any], Any] | None = None,
    ) -> None:
        self._venv = as_lanes(env)
        self._name = type(getattr(env, "unwrapped", env)).__name__
        self.env, self.processor = env, processor
        self.is_vector = not isinstance(self._venv, SingleEnv)
        self.nb_lanes = self._venv.num_envs
        self.observation_space = self._venv.observation_space
        self.action_space = self._venv.action_space
        self._mode = AutoresetMode(self._venv.metadata["autoreset_mode"])
        self.action_repetition = _at_least(1, "action_repetition", action_repetition)
        nb_max_start_steps = _at_least(0, "nb_max_start_steps", nb_max_start_steps)
        self.nb_max_episode_steps = nb_max_episode_steps
        if nb_max_episode_steps is not None:
            self.nb_max_episode_steps = _at_least(1, "nb_max_episode_steps", nb_max_episode_steps)
        if self.is_vector and self.action_repetition > 1:
            raise ValueError(
                f"action_repetition={action_repetition} needs a single env, {self._name} is a vector env. Repeat in "
                f"each of its envs: make_gym_env(..., wrapper_kwargs={{'action_repeat': {action_repetition}}})."
            )
        space, n = self.action_space, self.nb_lanes
        self._starts = StartSteps(n, nb_max_start_steps, space, start_step_policy, self._name)
        self._actions = ActionSpec(space, n, self.is_vector, self._name)
        self._lane_processor = LaneProcessor(processor, self.observation_space, n, self._gave)

        self._none = np.zeros(self.nb_lanes, bool)
        self._all = np.ones(self.nb_lanes, bool)
        self._none.flags.writeable = self._all.flags.writeable = False  # handed out again and again
        self._observation: Any = None
        self.failed = False
        self._clear()

    def _clear(self, seed: int | None = None) -> None:
        """Forget the open episodes."""
        self._starts.clear(seed)
        self._due = self._none  # lanes that observe() resets
        self._resetting = self._none  # lanes that reset themselves within the next step (NEXT_STEP)
        self._fresh = self._none  # lanes whose episode has begun, but not for the agent yet
        self.started = self._none
        self._special = self._settled = False
        self.episode_step = np.zeros(self.nb_lanes, np.int64)
        self.reset_infos: list[dict[str, Any]] = [{} for _ in range(self.nb_lanes)]

    def reset(self, seed: int | None = None) -> Any:
        """Reset every lane, ending the open episodes, and return the observations to act on.

        Args:
            seed: An integer: lane i is seeded with ``seed + i``, the start steps with `seed`. None: the env goes on
                with its own random stream.

        Returns:
            What `observe` returns.
        """
        seed = None if seed is None else operator.index(seed)  # Gymnasium refuses NumPy's integers
        self.failed = True
        observation, infos = self._venv.reset(seed=seed)
        self._clear(seed)
        self._observation = self._lane_processor.first(observation, range(self.nb_lanes))
        self.reset_infos[:] = infos
        self._begin(self._all)
        self.failed = False
        return self.observe()

    def observe(self) -> Any:
        """Return the observations (N, *obs) to act on now.

        Lanes whose episode has ended and that the env does not reset itself are reset here, and random start steps
        are played while no lane has anything else to do. Unless an episode ended or a lane was reset, this is the
        very object that the last `Transition` holds as `next_observation`. A second call before `step` changes
        nothing.

        Raises:
            RuntimeError: If the env or a hook has failed and `reset` has not been called since.
        """
        self._require_sound()
        if self._observation is None:
            return self.reset()
        if not self._settled:
            self.failed = True
            self._reset_due()
            while self._starts.left.all():
                self._settle(self._play(self._none, self._to_env([None] * self.nb_lanes)))
                self._reset_due()
            self.started = self._fresh & (self._starts.left == 0)
            self._fresh = self._fresh & ~self.started
            self.episode_step = np.where(self.started, 0, self.episode_step)
            self._settled, self.failed = True, False
        return self._observation

    def step(
        self,
        action: Any,
        meanwhile: Callable[[], Any] | None = None,
        before: Callable[[], Any] = lambda: None,
        after: Callable[[], Any] = lambda: None,
    ) -> Transition:
        """Act in every lane.

        Args:
            action: (N,) integers, an index 0..n-1 each, (N, K) integers for ``MultiDiscrete`` and ``MultiBinary``, or
                (N, A) floats; see `Transition`. A lane that only resets itself or plays a start step ignores its
                action.
            meanwhile: Called once while the envs step; on a vector env only.
            before: Called before the env's step, before each one of a repeated action.
            after: Called after it, likewise.

        Returns:
            The `Transition`.

        Raises:
            ValueError: For actions of another length or NaN ones; for an observation that changes its shape or is
                no array of numbers; for a reward that is not finite.
            TypeError: If a single env returns neither five nor four values.
            RuntimeError: If `observe` has to be called first, or `reset` after a failure.
        """
        self._require_sound()
        if not self._settled or self._observation is None:
            raise RuntimeError("Call observe() before step(): it resets what has ended and returns what to act on.")
        action = np.asarray(action)
        if action.ndim == 0 or len(action) != self.nb_lanes:
            raise ValueError(f"step() needs {self.nb_lanes} actions, one per lane, got shape {action.shape}.")
        sent = self._to_env(self._actions.in_space(action))
        self.started, self.failed = self._none, True
        before()
        row = self._play(action, sent, meanwhile)
        after()
        for _ in range(self.action_repetition - 1):
            if row.terminated[0] or row.truncated[0]:
                break
            before()
            new = self._play(action, sent)
            after()
            info = [_summed(row.info[0], new.info[0])]
            row = new._replace(observation=row.observation, reward=row.reward + new.reward, info=info)
        row = self._settle(row)
        self.failed = False
        return row

    # One step of the env.

    def _to_env(self, actions: Any) -> Any:
        """Actions of the env's action space as the env takes them, those of start steps put in."""
        if self._starts.active:
            actions = self._starts.fill(actions, self._observation)
        return self._actions.to_env(self._lane_processor.actions(actions))

    def _play(self, action: np.ndarray, sent: Any, meanwhile: Callable[[], Any] | None = None) -> Transition:
        """Step the env once; what is left to `_settle` is the episodes' bookkeeping."""
        before = self._observation
        valid = ~(self._resetting | (self._starts.left > 0)) if self._special else self._all
        if meanwhile is None:
            given, reward, terminated, truncated, info = self._venv.step(sent)
        else:
            self._venv.step_async(sent)
            try:
                meanwhile()
            finally:  # no step is left pending, whatever happened
                given, reward, terminated, truncated, info = self._venv.step_wait()
        # Copies, since an env may reuse its arrays and a processor may change an entry.
        terminated, truncated = np.array(terminated, bool), np.array(truncated, bool)
        self._env_ended = terminated | truncated
        gone_on = self._mode is AutoresetMode.SAME_STEP and np.count_nonzero(self._env_ended)
        observation = successors(given, info) if gone_on else given
        observation, rewards, info = self._lane_processor.step(
            observation, reward, terminated, truncated, info, self._resetting
        )
        self._observation = observation
        if gone_on:
            lanes = np.flatnonzero(self._env_ended)
            self._observation = self._with_rows(observation, self._lane_processor.first(given, lanes), lanes)
        return Transition(before, action, rewards, observation, terminated, truncated, valid, info)

    def _with_rows(self, observation: Any, rows: Any, lanes: Any) -> Any:
        """A copy of `observation` in which `rows` stand at `lanes`; `rows` itself where these are all."""
        if len(lanes) == self.nb_lanes:
            return rows
        observation = tree_map(np.copy, observation)
        tree_map(lambda leaf, new: operator.setitem(leaf, lanes, new), observation, rows)
        return observation

    # Episodes: who has ended, who begins, who is to be reset.

    def _settle(self, row: Transition) -> Transition:
        """Count the steps, cut episodes that are too long, note which lanes end, begin or must be reset."""
        terminated, truncated, valid = row.terminated, row.truncated, row.valid
        over = terminated | truncated
        self.episode_step = self.episode_step + valid
        if self.nb_max_episode_steps is not None and self.episode_step.max() >= self.nb_max_episode_steps:
            cut = valid & ~over & (self.episode_step >= self.nb_max_episode_steps)
            truncated, over = truncated | cut, over | cut
        if not self._special and not np.count_nonzero(over):
            return row
        self._settled = False
        lost = np.array([bool(over[i] and info.get("worker_restarted")) for i, info in enumerate(row.info)])
        if lost.any():  # the env died in mid-step: its episode is cut here, and this step did not happen
            self.episode_step = self.episode_step - (valid & lost)
            valid = valid & ~lost
        same, following = self._mode is AutoresetMode.SAME_STEP, self._mode is AutoresetMode.NEXT_STEP
        begun = self._env_ended if same else self._resetting
        for i in np.flatnonzero(begun):
            self.reset_infos[i] = row.info[i].get("reset_info", {}) if same else row.info[i]
        self._due = over & ~self._env_ended if same or following else over
        self._resetting = self._env_ended if following else self._none
        if self._starts.active:
            self._fresh = self._fresh & ~over
            self._starts.count(over)
        self._begin(begun)
        if valid is self._all:
            return row._replace(truncated=truncated)
        truncated = (truncated & valid) | lost
        return row._replace(reward=row.reward * valid, terminated=terminated & valid, truncated=truncated, valid=valid)

    def _begin(self, lanes: np.ndarray) -> None:
        """Note that these lanes stand at an episode's first observation, and draw their start steps."""
        self._fresh = self._fresh | lanes
        self._starts.draw(lanes)
        self._special = self._starts.active or bool(self._resetting.any())

    def _reset_due(self) -> None:
        if self._due.any():
            due, lanes = self._due, np.flatnonzero(self._due)
            given, infos = self._venv.reset(mask=due)
            self._observation = self._with_rows(self._observation, self._lane_processor.first(given, lanes), lanes)
            for i in lanes:
                self.reset_infos[i] = infos[i]
            self._due = self._none
            self._begin(due)

    def _require_sound(self) -> None:
        if self.failed:
            raise RuntimeError(f"{self._name} failed in an earlier call and may be in any state: call reset() first.")

    def _gave(self, what: str, lane: int) -> str:
        return f"{self._name} gave {what} in lane {lane}, step {self.episode_step[lane] + 1} of its episode"


def _at_least(low: int, name: str, value: Any) -> int:
    if not isinstance(value, int | np.integer) or value < low:
        raise ValueError(f"{name} must be an integer of at least {low}, got {value!r}.")
    return int(value)


def _summed(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """The infos of a repeated action: numbers add up, of anything else the last value stays."""
    result = {**first, **second}
    for key in first.keys() & second.keys():
        if all(isinstance(x, int | float | np.number) and not isinstance(x, bool) for x in (first[key], second[key])):
            result[key] = first[key] + second[key]
    return result
