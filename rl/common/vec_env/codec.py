"""From what a user calls actions to checked arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

from rl.common.vec_env.arena import Arena, Leaf, SpaceTree

__all__ = ["ActionCodec"]


class ActionCodec:
    """Checks the actions of N lanes and writes them to an arena.

    Args:
        tree: Leaves of one action.
        lane_spaces: The lanes' action spaces; their shapes are equal, their bounds may differ.
        check: Whether discrete actions must lie in their space.
        clip: Whether `Box` actions are clipped to their bounds.
    """

    def __init__(
        self, tree: SpaceTree, lane_spaces: list[spaces.Space[Any]], check: bool = True, clip: bool = False
    ) -> None:
        self.tree = tree
        self.check = check
        self.clip = clip
        trees = [tree if one == tree.space else SpaceTree(one) for one in lane_spaces]
        space = tree.space
        self._range: tuple[int, int] | None = None
        if isinstance(space, spaces.Discrete) and all(one == space for one in lane_spaces):
            self._range = (int(space.start), int(space.start + space.n - 1))
        self._bounds = {k: self._bound([one.leaves[k].space for one in trees]) for k in tree.arrays}

    @staticmethod
    def _bound(lane_spaces: list[Any]) -> tuple[np.ndarray, np.ndarray]:
        """Lowest and highest values per lane, `(N, *shape)`; bounds shared by all lanes keep the length 1."""
        if all(one == lane_spaces[0] for one in lane_spaces):
            lane_spaces = lane_spaces[:1]
        low, high = [], []
        for one in lane_spaces:
            if isinstance(one, spaces.Discrete):
                low.append(np.asarray(one.start))
                high.append(np.asarray(one.start + one.n - 1))
            elif isinstance(one, spaces.MultiDiscrete):
                start = np.asarray(one.start)
                low.append(start)
                high.append(start + np.asarray(one.nvec) - 1)
            elif isinstance(one, spaces.MultiBinary):
                low.append(np.zeros(one.shape, np.int8))
                high.append(np.ones(one.shape, np.int8))
            else:
                low.append(one.low)
                high.append(one.high)
        return np.stack(low), np.stack(high)

    def encode(self, actions: Any, arena: Arena, lanes: slice | np.ndarray, nb_lanes: int) -> list[Any] | None:
        """Check the actions of some lanes and write them; nothing is written unless all of them are right.

        Args:
            actions: As `VecEnv.step_async` takes them.
            arena: Where they are written.
            lanes: Which lanes they are for.
            nb_lanes: How many those are.

        Returns:
            None, or one action per lane where they hold Python objects and thus cannot be written to arrays.

        Raises:
            ValueError: If number, shape, dtype or range are wrong.
        """
        tree = self.tree
        if self._range is not None and type(actions) is np.ndarray and actions.shape == (nb_lanes,):
            # The usual case, worth a way of its own; what it does not take, or refuses, goes on to be explained.
            if actions.dtype.kind in "iu" and nb_lanes:
                low, high = self._range
                values = actions.tolist()
                if not self.check or (min(values) >= low and max(values) <= high):
                    arena.action[0][lanes] = actions
                    return None
        if tree.is_leaf and tree.arrays:
            # The bounds are read in place: their first axis is 1 or N.
            arena.action[0][lanes] = self._leaf(0, tree.leaves[0], actions, lanes, nb_lanes)
            return None
        columns = self._columns(actions, nb_lanes)
        checked = [
            column if leaf.dtype is None else self._leaf(k, leaf, column, lanes, nb_lanes)
            for k, (leaf, column) in enumerate(zip(tree.leaves, columns, strict=True))
        ]
        if tree.objects:
            return [tree.join(list(row)) for row in zip(*checked, strict=True)]
        for k, column in enumerate(checked):
            arena.action[k][lanes] = column
        return None

    def _columns(self, actions: Any, nb_lanes: int) -> list[Any]:
        """One column of N entries per leaf, from a batch (dict or tuple of columns) or a list of N actions."""
        space = self.tree.space
        batched = isinstance(actions, dict) or (isinstance(actions, tuple) and isinstance(space, spaces.Tuple))
        columns: list[Any] = []
        if batched:
            _walk(self.tree.tree, actions, "", columns)
            for leaf, column in zip(self.tree.leaves, columns, strict=True):
                if not hasattr(column, "__len__") or len(column) != nb_lanes:
                    raise ValueError(
                        f"Expected {nb_lanes} actions at {leaf.path!r}, one per environment, got "
                        f"{len(column) if hasattr(column, '__len__') else type(column).__name__}."
                    )
            return columns
        if not isinstance(actions, (list, tuple, np.ndarray)) or len(actions) != nb_lanes:
            size = f"{len(actions)} actions" if hasattr(actions, "__len__") else type(actions).__name__
            raise ValueError(f"Expected {nb_lanes} actions, one per environment, got {size}.")
        rows = []
        for action in actions:
            row: list[Any] = []
            _walk(self.tree.tree, action, "", row)
            rows.append(row)
        return [list(column) for column in zip(*rows, strict=True)]

    def _leaf(self, k: int, leaf: Leaf, values: Any, lanes: slice | np.ndarray, nb_lanes: int) -> np.ndarray:
        at = f" at {leaf.path!r}" if leaf.path else ""
        try:
            array = np.asarray(values)
        except ValueError as error:
            raise ValueError(f"The actions{at} are no array of shape {(nb_lanes, *leaf.shape)}: {error}") from error
        dtype, kind = leaf.dtype, array.dtype.kind
        if array.shape != (nb_lanes, *leaf.shape):
            if array.ndim == 0 or len(array) != nb_lanes:
                got = len(array) if array.ndim else f"the single value {values!r}"
                raise ValueError(f"Expected {nb_lanes} actions{at}, one per environment, got {got}.")
            raise ValueError(
                f"Expected actions{at} of shape {(nb_lanes, *leaf.shape)} (one of shape {leaf.shape} per environment), "
                f"got shape {array.shape}."
            )
        integer = dtype.kind in "iub"  # type: ignore[union-attr]
        if kind not in "biuf":
            raise ValueError(f"Expected numbers as actions{at}, got {array.dtype}.")
        if integer and kind == "f" and not np.all(array == np.trunc(array)):
            raise ValueError(f"Expected integers as actions{at} for {leaf.space}, got {values!r}.")
        if not integer or not self.check:
            if self.clip and isinstance(leaf.space, spaces.Box):
                low, high = self._bounds[k]
                array = np.clip(array, _pick(low, lanes), _pick(high, lanes))
            return array
        low, high = self._bounds[k]
        if isinstance(leaf.space, spaces.Box):
            return np.clip(array, _pick(low, lanes), _pick(high, lanes)) if self.clip else array
        low, high = _pick(low, lanes), _pick(high, lanes)
        if (array < low).any() or (array > high).any():
            wrong = np.argwhere(((array < low) | (array > high)).reshape(nb_lanes, -1).any(axis=1)).ravel()
            lane = int(np.arange(self.nb_lanes_of(lanes, nb_lanes))[lanes][wrong[0]])
            raise ValueError(
                f"The action{at} of environment {lane} is {array[wrong[0]]}, which is not in {leaf.space}."
            )
        return array

    @staticmethod
    def nb_lanes_of(lanes: slice | np.ndarray, nb_lanes: int) -> int:
        """An upper bound of the lane numbers that `lanes` selects."""
        return int(lanes.stop) if isinstance(lanes, slice) else int(lanes.max()) + 1 if nb_lanes else 0


def _pick(bounds: np.ndarray, lanes: slice | np.ndarray) -> np.ndarray:
    return bounds if len(bounds) == 1 else bounds[lanes]


def _walk(node: Any, value: Any, path: str, leaves: list[Any]) -> None:
    """Append the leaves of an action, batched or not."""
    dot = "." if path else ""
    if isinstance(node, dict):
        if not isinstance(value, dict) or set(value) != set(node):
            got = f"the keys {list(value)}" if isinstance(value, dict) else type(value).__name__
            raise ValueError(f"Expected an action with the keys {list(node)}, got {got}.")
        for key, child in node.items():
            _walk(child, value[key], f"{path}{dot}{key}", leaves)
    elif isinstance(node, tuple):
        if not isinstance(value, (tuple, list)) or len(value) != len(node):
            got = f"{len(value)}" if isinstance(value, (tuple, list)) else type(value).__name__
            raise ValueError(f"Expected an action of {len(node)} parts, got {got}.")
        for k, child in enumerate(node):
            _walk(child, value[k], f"{path}{dot}{k}", leaves)
    else:
        leaves.append(value)
