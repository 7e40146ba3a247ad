"""Where the numbers of N lanes lie: the leaves of a space, and one block of memory that holds all arrays."""

from __future__ import annotations

import mmap
import platform
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces

from rl.common.vec_env.errors import ObservationError

__all__ = ["Arena", "Leaf", "SpaceTree", "fence"]

# A group's control words, int64. What the main process writes and what the worker writes lie on separate cache lines.
COMMAND, TARGET = 0, 1
DONE, ENDED, MESSAGE, BUSY = 8, 9, 10, 11
CONTROL_WORDS = 16
ALIGNMENT = 64

# x86 keeps the order of stores and of loads, so a sequence number that has changed proves that the data before it
# have arrived. Elsewhere taking a lock is the one full memory barrier that Python has.
_barrier = threading.Lock()
fence: Callable[[], object] | None = None
if platform.machine() not in ("x86_64", "AMD64"):

    def fence() -> object:
        """Keep loads and stores before it before those after it."""
        with _barrier:
            return None


class Leaf(NamedTuple):
    """One array of a space: its path ("" for the space itself), shape and dtype (None: Python objects)."""

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype | None
    space: spaces.Space[Any]


class SpaceTree:
    """The leaves of a space, and the way between a nested value and the list of its leaves.

    Args:
        space: Any Gymnasium space. `Box`, `Discrete`, `MultiDiscrete` and `MultiBinary` are arrays, `Dict` and `Tuple`
            are nodes, everything else is a leaf of Python objects.
    """

    def __init__(self, space: spaces.Space[Any]) -> None:
        """List the leaves."""
        self.space = space
        self.leaves: list[Leaf] = []
        self.tree = self._grow(space, "")
        self.is_leaf = not isinstance(self.tree, (dict, tuple))
        self.arrays = [k for k, leaf in enumerate(self.leaves) if leaf.dtype is not None]
        self.objects = [k for k, leaf in enumerate(self.leaves) if leaf.dtype is None]

    def _grow(self, space: spaces.Space[Any], path: str) -> Any:
        dot = "." if path else ""
        if isinstance(space, spaces.Dict):
            return {key: self._grow(child, f"{path}{dot}{key}") for key, child in space.spaces.items()}
        if isinstance(space, spaces.Tuple):
            return tuple(self._grow(child, f"{path}{dot}{k}") for k, child in enumerate(space.spaces))
        dtype: np.dtype | None = None
        shape: tuple[int, ...] = ()
        if isinstance(space, (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)):
            dtype, shape = np.dtype(space.dtype), tuple(space.shape or ())
            if dtype.kind not in "biufc":
                dtype = None
        self.leaves.append(Leaf(path, shape, dtype, space))
        return len(self.leaves) - 1

    def flatten(self, value: Any, lane: int) -> tuple[list[Any], list[str]]:
        """The leaves of one lane's value, and the paths of entries that the space does not know.

        Args:
            value: A value of the space.
            lane: Number of the environment, for messages.

        Raises:
            ObservationError: If an entry is missing.
        """
        leaves: list[Any] = []
        extra: list[str] = []
        self._flatten(self.tree, value, "", lane, leaves, extra)
        return leaves, extra

    def _flatten(self, node: Any, value: Any, path: str, lane: int, leaves: list[Any], extra: list[str]) -> None:
        dot = "." if path else ""
        if isinstance(node, dict):
            if not hasattr(value, "keys"):
                raise ObservationError(
                    f"Environment {lane}: observation{_at(path)} must be a dict with the keys {list(node)}, "
                    f"got {type(value).__name__}."
                )
            for key, child in node.items():
                if key not in value:
                    raise ObservationError(
                        f"Environment {lane}: observation{_at(path)} lacks the key {key!r} of its space; "
                        f"it has {list(value.keys())}."
                    )
                self._flatten(child, value[key], f"{path}{dot}{key}", lane, leaves, extra)
            if len(value) > len(node):
                extra.extend(f"{path}{dot}{key}" for key in value if key not in node)
        elif isinstance(node, tuple):
            if not isinstance(value, (tuple, list)) or len(value) != len(node):
                size = f" of {len(value)}" if isinstance(value, (tuple, list)) else ""
                raise ObservationError(
                    f"Environment {lane}: observation{_at(path)} must be a tuple of {len(node)}, "
                    f"got {type(value).__name__}{size}."
                )
            for k, child in enumerate(node):
                self._flatten(child, value[k], f"{path}{dot}{k}", lane, leaves, extra)
        else:
            leaves.append(value)

    def join(self, leaves: list[Any]) -> Any:
        """The nested value of a list of leaves (batched or not)."""
        return leaves[0] if self.is_leaf else _join(self.tree, leaves)


def _join(node: Any, leaves: list[Any]) -> Any:
    if isinstance(node, dict):
        return {key: _join(child, leaves) for key, child in node.items()}
    if isinstance(node, tuple):
        return tuple(_join(child, leaves) for child in node)
    return leaves[node]


def _at(path: str) -> str:
    return f" at {path!r}" if path else ""


def fit(value: Any, leaf: Leaf, lane: int) -> tuple[np.ndarray, str | None]:
    """One lane's observation leaf as an array that can be stored without loss, and a remark about a cast or None.

    Args:
        value: What the environment returned.
        leaf: What its space promises.
        lane: Number of the environment, for messages.

    Raises:
        ObservationError: If the shape differs, or the values do not survive the cast: floats for integers,
            integers out of range, floats that overflow.
    """
    where = f"Environment {lane}: observation{_at(leaf.path)}"
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise ObservationError(f"{where} is no array of shape {leaf.shape}: {error}") from error
    dtype = leaf.dtype
    if array.shape != leaf.shape:
        raise ObservationError(f"{where} has shape {array.shape}, its space says {leaf.shape}.")
    if array.dtype == dtype:
        return array, None
    kinds = array.dtype.kind + (dtype.kind if dtype is not None else "?")
    fits = kinds[0] in "biuf"
    if kinds[1] == "f":
        with np.errstate(over="ignore"):
            cast = array.astype(dtype) if fits else array
        fits = fits and not np.any(np.isinf(cast) & np.isfinite(array))
    elif kinds[1] in "iub":
        info = np.iinfo(dtype) if kinds[1] != "b" else None
        low, high = (int(info.min), int(info.max)) if info else (0, 1)
        fits = kinds[0] in "biu" and (not array.size or (low <= int(array.min()) and int(array.max()) <= high))
        cast = array.astype(dtype) if fits else array
    else:
        cast = array.astype(dtype) if fits else array
    if not fits:
        raise ObservationError(
            f"{where} has dtype {array.dtype}, which cannot become the space's {dtype} without loss "
            f"(value {np.array2string(array, threshold=8, edgeitems=2)}). Cast it in the environment."
        )
    # Python numbers and lists have no dtype of their own, so casting them is nothing to remark on.
    if not isinstance(value, (np.ndarray, np.generic)):
        return cast, None
    return (
        cast,
        f"observation{_at(leaf.path)} has dtype {array.dtype}, its space says {dtype}: cast at every step.",
    )


class Arena:
    """All arrays of N lanes in one block of memory, private or shared.

    Observations have two sets, written in turn, so that the arrays of step k stay intact while k + 1 is written.

    Args:
        observations: Leaves of one observation.
        actions: Leaves of one action.
        nb_lanes: N.
        nb_groups: Number of lane groups, each with its own control words.
    """

    def __init__(self, observations: SpaceTree, actions: SpaceTree, nb_lanes: int, nb_groups: int) -> None:
        """Lay the arrays out; `attach` gives them memory."""
        self.observation_tree = observations
        self.action_tree = actions
        self.nb_lanes = nb_lanes
        self.nb_groups = nb_groups
        self.size = 0
        self._fields: dict[str, tuple[int, tuple[int, ...], np.dtype]] = {}
        self._add("control", (nb_groups, CONTROL_WORDS), np.int64)
        self._add("reward", (nb_lanes,), np.float64)
        self._add("terminated", (nb_lanes,), np.bool_)
        self._add("truncated", (nb_lanes,), np.bool_)
        self._add("running_return", (nb_lanes,), np.float64)
        self._add("running_length", (nb_lanes,), np.int64)
        self._add("episode_return", (nb_lanes,), np.float64)
        self._add("episode_length", (nb_lanes,), np.int64)
        self._add("episode_seconds", (nb_lanes,), np.float64)
        for k, leaf in self._array_leaves(actions):
            self._add(f"action{k}", (nb_lanes, *leaf.shape), leaf.dtype)
        for part in ("observation0.", "observation1.", "final."):
            for k, leaf in self._array_leaves(observations):
                self._add(f"{part}{k}", (nb_lanes, *leaf.shape), leaf.dtype)

    @staticmethod
    def _array_leaves(tree: SpaceTree) -> Iterator[tuple[int, Leaf]]:
        return ((k, tree.leaves[k]) for k in tree.arrays)

    def _add(self, name: str, shape: tuple[int, ...], dtype: Any) -> None:
        dtype = np.dtype(dtype)
        nb_bytes = dtype.itemsize
        for size in shape:
            nb_bytes *= size
        self._fields[name] = (self.size, shape, dtype)
        self.size += -(-max(nb_bytes, 1) // ALIGNMENT) * ALIGNMENT

    def attach(self, memory: mmap.mmap) -> Arena:
        """Point the arrays at `memory`, which must have at least `size` bytes. Returns this arena."""

        def array(name: str) -> np.ndarray:
            offset, shape, dtype = self._fields[name]
            count = 1
            for size in shape:
                count *= size
            return np.frombuffer(memory, dtype=dtype, count=count, offset=offset).reshape(shape)

        self.control: Any = memoryview(array("control").data).cast("B").cast("q")
        self.reward = array("reward")
        self.terminated = array("terminated")
        self.truncated = array("truncated")
        self.running_return = array("running_return")
        self.running_length = array("running_length")
        self.episode_return = array("episode_return")
        self.episode_length = array("episode_length")
        self.episode_seconds = array("episode_seconds")
        self.action = {k: array(f"action{k}") for k in self.action_tree.arrays}
        self.observation = [
            {k: array(f"observation{part}.{k}") for k in self.observation_tree.arrays} for part in range(2)
        ]
        self.final = {k: array(f"final.{k}") for k in self.observation_tree.arrays}
        return self

    def allocate(self) -> Arena:
        """Give the arrays zeroed memory of this process alone. Returns this arena."""
        return self.attach(mmap.mmap(-1, self.size))
