"""`LaneProcessor`: what an environment of N lanes gives, as the agent sees it."""

from __future__ import annotations

import copy
import operator
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from rl.common.action_spec import python_ints
from rl.common.misc_util import tree_map, tree_paths
from rl.common.observation_spec import MisfitError, ObservationSpec

__all__ = ["LaneProcessor", "changes_actions"]


class LaneProcessor:
    """Applies a `Processor` to each lane's row in turn, checks what results and stacks it into arrays.

    Only hooks that are overridden are called: an env whose arrays are sound and whose processor has none passes its
    arrays through.

    Args:
        processor: An ``rl.core.Processor`` or None.
        space: The declared space of one lane's observation, or None.
        nb_lanes: N.
        gave: ``(what, lane) -> str``, the beginning of an error: "CartPole gave <what> in lane 0 ...".
    """

    def __init__(self, processor: Any, space: Any, nb_lanes: int, gave: Callable[[str, int], str]) -> None:
        own = _overridden(processor)
        self._processor, self._gave = processor, gave
        self._acts = "process_action" in own
        self._sees = bool(own & {"process_step", "process_observation"})
        self._steps = bool(own - {"process_action"})
        self._lanes = range(nb_lanes)
        self._zeros = np.zeros(nb_lanes, np.float32)
        # What the env declares says nothing about what a processor makes of it.
        self._spec = ObservationSpec(space if isinstance(space, spaces.Space) and not self._sees else None)

    def actions(self, actions: Any) -> Any:
        """The N actions after `process_action`, which is given NumPy's integers as Python's."""
        return [self._processor.process_action(one) for one in python_ints(actions)] if self._acts else actions

    def first(self, given: Any, lanes: Sequence[int] | np.ndarray) -> Any:
        """The first observations of episodes.

        Args:
            given: What the env gave for all N lanes.
            lanes: Those whose episode begins.

        Returns:
            The tree of arrays ``(len(lanes), *obs)``, through `process_observation`.

        Raises:
            ValueError: If one does not look like the earlier ones, is no array of numbers, or is not finite.
        """
        if self._sees:
            rows = [self._processor.process_observation(self._row(given, i)) for i in lanes]
            return self._finite_observation(self._stack(rows, lanes), lanes)
        return self._finite_observation(self._sound(given, lanes), lanes)

    def step(
        self, given: Any, reward: Any, terminated: np.ndarray, truncated: np.ndarray, info: Any, begun: np.ndarray
    ) -> tuple[Any, np.ndarray, Any]:
        """What one step of the env gave.

        Args:
            given: The N observations.
            reward: The N rewards.
            terminated: (N,) bool. Changed in place where `process_step` changes ``done``.
            truncated: (N,) bool. Likewise.
            info: The N infos.
            begun: (N,) bool, lanes that only reset themselves: of them `given` is an episode's first observation.

        Returns:
            Observations (N, *obs), rewards (N,) float32, infos.

        Raises:
            ValueError: For a bad or non-finite observation, as `first`, or a reward that is not finite.
        """
        if self._steps:
            rows = [self._row(given, i) if self._sees else None for i in self._lanes]
            reward, info = list(reward), list(info)
            for i in self._lanes:
                if begun[i]:
                    rows[i] = self._processor.process_observation(rows[i])
                    continue
                ended = bool(terminated[i] or truncated[i])
                rows[i], reward[i], done, info[i] = self._processor.process_step(rows[i], reward[i], ended, info[i])
                if bool(done) != ended:
                    terminated[i], truncated[i] = done, ended
        observation = self._stack(rows, self._lanes) if self._sees else self._sound(given, self._lanes)
        return self._finite_observation(observation, self._lanes), self._finite(reward), info

    def _row(self, observation: Any, lane: int) -> Any:
        """One lane's observation; a copy where it is the env's own object and a processor might change it."""
        if isinstance(observation, list):
            return copy.deepcopy(observation[lane]) if self._sees else observation[lane]
        return tree_map(operator.itemgetter(lane), observation)

    def _sound(self, given: Any, lanes: Sequence[int] | np.ndarray) -> Any:
        """Some lanes' observations as they are where the env gave sound arrays of just these, else stacked."""
        if len(lanes) == len(self._lanes) and self._spec.holds(given, len(lanes)):
            return given
        return self._stack([self._row(given, i) for i in lanes], lanes)

    def _stack(self, rows: Sequence[Any], lanes: Sequence[int] | np.ndarray) -> Any:
        """Stack some lanes' observations into new arrays (an env may reuse its own), checking each."""
        try:
            return self._spec.stack(rows)
        except MisfitError as error:
            raise ValueError(
                f"{self._gave('a bad observation', lanes[error.row])}: {error}. Make all observations number arrays "
                "of one shape, in the env or in Processor.process_observation."
            ) from None

    def _finite_observation(self, observation: Any, lanes: Sequence[int] | np.ndarray) -> Any:
        parts = [("", observation)] if isinstance(observation, np.ndarray) else tree_paths(observation)
        for path, leaf in parts:
            # To count is half the price of all().
            if leaf.dtype.kind == "f" and np.count_nonzero(np.isfinite(leaf)) < leaf.size:
                row = int(np.flatnonzero(~np.isfinite(leaf.reshape(len(leaf), -1)).all(axis=1))[0])
                raise ValueError(
                    f"{self._gave('an observation with NaN or infinity', lanes[row])}: observation{path} is "
                    f"{leaf[row]}. Nothing of the step was stored. Replace such values in the env or in "
                    "Processor.process_observation."
                )
        return observation

    def _finite(self, reward: Any) -> np.ndarray:
        with np.errstate(all="ignore"):
            rewards = np.array(reward, np.float32)
            finite = rewards.dot(self._zeros) == 0.0  # the cheapest test: 0 * x is 0 for finite x only
        if not finite:
            i = int(np.flatnonzero(~np.isfinite(rewards))[0])
            raise ValueError(f"{self._gave(f'the reward {reward[i]}', i)}: it must be a finite float32.")
        return rewards


def changes_actions(processor: Any) -> bool:
    """Whether a processor has a `process_action`: then an env's action space says nothing about the agent's actions."""
    return "process_action" in _overridden(processor)


def _overridden(processor: Any) -> set[str]:
    """The hooks that a processor has of its own."""
    if processor is None:
        return set()
    # rl.core is not imported, since that would bring Keras along: whoever has a processor has imported it already.
    base = getattr(sys.modules.get("rl.core"), "Processor", None)
    names = ("process_step", "process_observation", "process_reward", "process_info", "process_action")
    hooks = {name: getattr(processor, name, None) for name in names}
    return {name for name in names if getattr(hooks[name], "__func__", hooks[name]) is not getattr(base, name, None)}
