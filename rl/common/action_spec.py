"""`ActionSpec`: turns the actions that an agent chose into what an environment takes."""

from __future__ import annotations

import math
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
        self._space = space if isinstance(space, spaces.Box | spaces.MultiDiscrete | spaces.MultiBinary) else None
        self._offset = space.start if isinstance(space, spaces.Discrete | spaces.MultiDiscrete) else 0
        self._shifts = bool(np.any(self._offset))
        self._size = 0 if self._space is None else nb_lanes * math.prod(self._space.shape)  # of all actions
        self._is_vector, self._name = is_vector, name

    def in_space(self, actions: np.ndarray) -> np.ndarray:
        """Actions of an agent, which are flat and count from 0, as members of the space.

        Args:
            actions: (N,), or (N, K) with the K components of a ``Box``, ``MultiDiscrete`` or ``MultiBinary``.

        Returns:
            (N, *space.shape), shifted by the `start` of a ``Discrete`` or ``MultiDiscrete``. Actions of another size,
            and integers (N,) for a ``Box``, are returned as they are, for a processor to make members of.
        """
        if self._space is not None:
            is_index = actions.ndim == 1 and actions.dtype.kind in "iu" and isinstance(self._space, spaces.Box)
            if actions.size != self._size or is_index:
                return actions
            actions = actions.reshape(-1, *self._space.shape)
        return actions + self._offset if self._shifts else actions

    def to_env(self, actions: Any) -> Any:
        """What the env's ``step`` takes.

        Args:
            actions: N members of the space, as an array or a list. Those of a ``Box``, ``MultiDiscrete`` or
                ``MultiBinary`` may be flat and of another dtype, those of a ``Box`` out of bounds.

        Returns:
            For those three spaces an array (N, *space.shape) of the space's dtype, clipped to the bounds of a ``Box``.
            Else `actions` as they are, for a single env as a list.

        Raises:
            ValueError: If actions for those spaces cannot take their shape, are NaN, or are no integers of the dtype
                where the space is not a ``Box``.
        """
        space = self._space
        if space is None:
            return actions if self._is_vector else python_ints(actions)
        actions = np.asarray(actions)
        if actions.size != self._size:
            raise ValueError(f"{self._name} takes actions of shape {space.shape} per lane, got {actions.shape}.")
        actions = actions.reshape(-1, *space.shape)
        if isinstance(space, spaces.Box):
            actions = np.minimum(np.maximum(actions, space.low), space.high)
            if (actions != actions).any():
                raise ValueError(f"NaN in the actions for {self._name}: {actions.tolist()}.")
            return actions.astype(space.dtype, copy=False)
        with np.errstate(invalid="ignore"):
            integers = actions.astype(space.dtype, copy=False)
        if (integers != actions).any():
            raise ValueError(f"{self._name} takes actions of {space.dtype} integers, got {actions.tolist()}.")
        return integers


def python_ints(values: Iterable[Any]) -> list[Any]:
    """The values as a list, NumPy's integers as Python's."""
    return [value.item() if isinstance(value, np.integer) else value for value in values]
