"""`ObservationSpec`: checks the observations of several environments and stacks them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from rl.common.misc_util import tree_leaves, tree_map, tree_paths

__all__ = ["MisfitError", "ObservationSpec"]


class MisfitError(ValueError):
    """An observation that does not look like the first one, or is no array of numbers.

    Args:
        message: What is wrong with it.
        row: Which of the stacked observations it is; kept as an attribute.
    """

    def __init__(self, message: str, row: int) -> None:
        super().__init__(message)
        self.row = row


class ObservationSpec:
    """What one observation looks like: a tree of shapes and dtypes, taken from the first one that is stacked.

    Args:
        space: The declared space or None. A ``Dict`` space gives the order of keys; a declared dtype wins over the one
            that arrives where it can hold the values (an env that computes in float64 and declares float32).
    """

    def __init__(self, space: Any = None) -> None:
        self._space = space
        self._tree: Any = None
        self._leaves: list[_Leaf] = []

    def holds(self, batch: Any, size: int) -> bool:
        """Whether `batch` is a tree of sound arrays with leading axis `size`, in need of no conversion."""
        if isinstance(batch, list) or self._tree is None:
            return False
        pairs = zip(self._leaves, tree_leaves(batch), strict=False)
        return all(array.dtype == leaf.dtype and array.shape == (size, *leaf.shape) for leaf, array in pairs)

    def stack(self, rows: Sequence[Any]) -> Any:
        """Stack observations into a tree of new arrays with leading axis ``len(rows)``.

        Args:
            rows: One tree each: dicts, tuples, and leaves that NumPy can make an array of. A list of arrays counts as
                a tuple (keras-rl's envs with several inputs) unless the space is a ``Box``.

        Raises:
            MisfitError: If keys, a shape or a kind of dtype differ from the first observation's, or it has no numbers.
        """
        if not isinstance(self._space, spaces.Box):
            rows = [_tupled(row) for row in rows]
        if self._tree is None:
            self._learn(rows[0])
        if isinstance(self._tree, _Leaf):
            try:
                array = np.array(rows)
                if array.dtype == self._tree.dtype and array.shape[1:] == self._tree.shape:
                    return array
            except ValueError:  # rows of several shapes: the one at fault is found below
                pass
        fitted = [_at_row(i, _fit, self._tree, row) for i, row in enumerate(rows)]
        return tree_map(lambda _, *values: np.array(values), self._tree, *fitted)

    def _learn(self, row: Any) -> None:
        template = row if self._space is None else _space_tree(self._space)
        paths = iter([path for path, _ in tree_paths(template)])

        def leaf(space: Any, value: Any) -> _Leaf:
            path, array = next(paths), np.asarray(value)
            if array.dtype.kind not in "biuf":
                raise ValueError(f"it is no array of numbers at {path or 'its root'} but {value!r:.99} ({array.dtype})")
            declared = array.dtype if self._space is None or space.dtype is None else np.dtype(space.dtype)
            return _Leaf(path, array.shape, declared if _castable(array.dtype, declared) else array.dtype)

        self._tree = _at_row(0, leaf, template, row)
        self._leaves = tree_leaves(self._tree)


@dataclasses.dataclass(frozen=True, slots=True)
class _Leaf:
    path: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


def _at_row(row: int, fn: Any, *trees: Any) -> Any:
    try:
        return tree_map(fn, *trees)
    except ValueError as error:
        raise MisfitError(str(error), row) from None


def _fit(leaf: _Leaf, value: Any) -> np.ndarray:
    array = np.asarray(value)
    if array.shape != leaf.shape or not _castable(array.dtype, leaf.dtype):
        raise ValueError(
            f"at {leaf.path or 'its root'} it has shape {array.shape} and dtype {array.dtype}, the first one had shape "
            f"{leaf.shape} and dtype {leaf.dtype}"
        )
    return array.astype(leaf.dtype, copy=False)


def _castable(given: np.dtype[Any], wanted: np.dtype[Any]) -> bool:
    return np.can_cast(given, wanted, "same_kind") or (given.kind in "iu" and wanted.kind in "iu")


def _space_tree(space: Any) -> Any:
    if isinstance(space, spaces.Dict):
        return {key: _space_tree(part) for key, part in space.spaces.items()}
    return tuple(map(_space_tree, space.spaces)) if isinstance(space, spaces.Tuple) else space


def _tupled(row: Any) -> Any:
    if isinstance(row, list) and row and all(isinstance(part, np.ndarray) and part.ndim for part in row):
        return tuple(row)
    return row
