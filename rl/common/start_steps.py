"""`StartSteps`: random steps with which episodes begin, before the agent acts in them."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium import spaces

from rl.common.misc_util import tree_map

__all__ = ["StartSteps"]


class StartSteps:
    """How many random steps each of N lanes has left to play at the start of its episode, and the actions for them.

    It draws from a generator and a copy of the action space that are its own: start steps in ``test()`` must not
    shift what the user's space and NumPy's global generator give during training. Without a seed only the first draw
    takes one number from the global generator.

    Args:
        nb_lanes: N.
        limit: Each episode gets n steps, 0 <= n < `limit`; 0 for none at all.
        space: The action space of one lane, sampled where there is no `policy`.
        policy: ``observation -> action``, an action of the env's action space, or None.
        name: What an error calls the env.

    Attributes:
        left: (N,) int, the start steps that are left in each lane.
        active: Whether any lane has some left.

    Raises:
        ValueError: If `limit` is above 0 and there is neither a policy nor a space to sample.
    """

    def __init__(
        self,
        nb_lanes: int,
        limit: int,
        space: Any = None,
        policy: Callable[[Any], Any] | None = None,
        name: str = "The env",
    ) -> None:
        if limit and policy is None and not hasattr(space, "sample"):
            raise ValueError(f"{name} has no action_space to sample start steps from: give start_step_policy.")
        self._limit, self._policy = limit, policy
        self._given_space = self._space = space
        self._nb_lanes = nb_lanes
        self._rng: np.random.Generator | None = None
        self.clear()

    def clear(self, seed: int | None = None) -> None:
        """Forget the episodes that are open, and begin the random stream of `seed` where one is given."""
        self.left = np.zeros(self._nb_lanes, np.int64)
        self._spent = np.zeros(self._nb_lanes, bool)  # lanes that ended within their start steps
        self.active = False
        if seed is not None and self._limit:
            self._seed(seed)

    def draw(self, lanes: np.ndarray) -> None:
        """Draw the number of steps for the lanes (N,) bool whose episode begins.

        None are drawn where the previous episode ended within its own: else short episodes might never be shown.
        """
        if self._limit:
            rng = self._rng or self._seed(np.random.randint(2**31))
            drawn = rng.integers(self._limit, size=self._nb_lanes)
            self.left = np.where(lanes & ~self._spent, drawn, self.left)
            self._spent = self._spent & ~lanes
            self.active = bool(self.left.any())

    def count(self, over: np.ndarray) -> None:
        """Count a step that was played in every lane; where `over` (N,) bool the episode ended in it."""
        self._spent = self._spent | (over & (self.left > 0))
        self.left = np.where(over, 0, np.maximum(self.left - 1, 0))
        self.active = bool(self.left.any())

    def fill(self, actions: Any, observation: Any) -> list[Any]:
        """The N actions, in lanes with start steps replaced by one for the lane's row of `observation` (N, *obs)."""
        actions = list(actions)
        for i in np.flatnonzero(self.left):
            if self._policy is None:
                actions[i] = self._space.sample()
            else:
                actions[i] = self._policy(tree_map(operator.itemgetter(i), observation))
        return actions

    def _seed(self, seed: int) -> np.random.Generator:
        self._rng = np.random.default_rng(seed)
        self._space = copy.deepcopy(self._given_space)
        if isinstance(self._space, spaces.Space):
            self._space.seed(seed)
        return self._rng
