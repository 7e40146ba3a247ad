"""`ActionSpec`: turns the actions that an agent chose into what an environment takes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from gymnasium import spaces

__all__ = ["ActionSpec", "python_ints"]


class ActionSpec:
    """What an env of N lanes takes as actions.

    Args:
        space: The action space of one lane, or None where an old env declares none: then anything goes.
        nb_lanes: N.
        is_vector: Whether the env takes all actions as one array. A single env gets Python ints, as some demand.
        name: What errors call the env.
    """

    def __init__(self, space: Any, nb_lanes: int, is_vector: bool, name: str = "The env") -> None:
        self._box = space if isinstance(space, spaces.Box) else None
        self._offset = space.start if isinstance(space, spaces.Discrete) else 0
        self._nb_lanes, self._is_vector, self._name = nb_lanes, is_vector, name

    def in_space(self, actions: np.ndarray) -> np.ndarray:
        """Actions of an agent, which counts from 0, as members of the space: shifted for ``Discrete(n, start)``."""
        return actions + self._offset if self._offset else actions

    def to_env(self, actions: Any) -> Any:
        """What the env's ``step`` takes.

        Args:
            actions: N members of the space, as an array or a list; those of a ``Box`` may be flat, out of bounds and
                of another dtype.

        Returns:
            For a ``Box`` an array of its shape and dtype, clipped to its bounds. Else `actions` as they are, for a
            single env as a list.

        Raises:
            ValueError: If actions of a ``Box`` are NaN or cannot take its shape.
        """
        if self._box is not None:
            return self._clipped(np.asarray(actions), self._box)
        return actions if self._is_vector else python_ints(actions)

    def _clipped(self, actions: np.ndarray, box: spaces.Box) -> np.ndarray:
        if actions.size != self._nb_lanes * box.low.size:
            raise ValueError(f"{self._name} takes actions of shape {box.shape} per lane, got {actions.shape}.")
        actions = np.minimum(np.maximum(actions.reshape(-1, *box.shape), box.low), box.high)
        if (actions != actions).any():
            raise ValueError(f"NaN in the actions for {self._name}: {actions.tolist()}.")
        return actions.astype(box.dtype, copy=False)


def python_ints(values: Iterable[Any]) -> list[Any]:
    """The values as a list, NumPy's integers as Python's."""
    return [value.item() if isinstance(value, np.integer) else value for value in values]
