"""Frames as they are stored and given to networks, and the recent ones that make a window."""

from __future__ import annotations

from typing import Any

import numpy as np

from rl.common.misc_util import tree_map


def as_frames(leaf: Any) -> np.ndarray:
    """An array of numbers as it is stored and given to networks: float64 as float32."""
    leaf = np.asarray(leaf)
    if leaf.dtype.kind not in "biuf":
        raise ValueError(f"Observations must be arrays of numbers, got dtype {leaf.dtype}.")
    # Networks compute in float32 at most: storing float64 would double the memory and change no result.
    return leaf.astype(np.float32) if leaf.dtype == np.float64 else leaf


def matching(name: str, count: int, store: np.ndarray, rows: Any) -> np.ndarray:
    """Returns rows as an array, or raises if they could only be stored by losing shape or value."""
    rows = np.asarray(rows)
    if rows.shape != (count, *store.shape[1:]):
        raise ValueError(
            f"{name} has shape {rows.shape}, expected {(count, *store.shape[1:])}: {count} lanes of what "
            "this memory holds. Use a new memory for an environment with other spaces."
        )
    if rows.dtype != store.dtype and not np.can_cast(rows.dtype, store.dtype, "same_kind"):
        raise ValueError(f"{name} has dtype {rows.dtype}, but this memory holds {store.dtype}.")
    return rows


class RecentFrames:
    """The last frames of each lane's open episode: what a window needs besides the current observation.

    Args:
        window_length: W, number of frames in a state.
    """

    def __init__(self, window_length: int) -> None:
        self.window_length = window_length
        self.nb_lanes = 0
        self._recent: Any = None

    def begin(self, nb_lanes: int) -> None:
        """Forgets all frames and opens `nb_lanes` lanes."""
        self.nb_lanes = nb_lanes
        self._recent = None

    def states(self, observation: Any) -> Any:
        """Returns the states to act on: per lane the last W - 1 frames, zeros before its start, and this one.

        Args:
            observation: Tree of (N, *obs).

        Returns:
            Tree of (N, W, *obs); for W = 1 a view of `observation`, else fresh arrays.

        Raises:
            ValueError: If the number of lanes is not the one given to `begin`.
        """
        if self.window_length == 1:
            return tree_map(lambda leaf: as_frames(leaf)[:, None], observation)
        return tree_map(self._joined, self._allocated(observation), observation)

    def push(self, observation: Any, keep: np.ndarray, ended: np.ndarray) -> None:
        """Appends the frames of the lanes in `keep`, then empties the windows of the lanes in `ended`.

        Args:
            observation: Tree of (N, *obs).
            keep: (N,) bool.
            ended: (N,) bool.
        """

        def shift(recent: np.ndarray, leaf: Any) -> None:
            recent[keep] = self._joined(recent, leaf)[keep, 1:]
            recent[ended] = 0

        if self.window_length > 1:
            tree_map(shift, self._allocated(observation), observation)

    def _joined(self, recent: np.ndarray, leaf: Any) -> np.ndarray:
        leaf = matching("observation", self.nb_lanes, recent[:, 0], leaf)
        return np.concatenate((recent, leaf[:, None]), axis=1, dtype=recent.dtype)

    def _allocated(self, observation: Any) -> Any:
        if self._recent is None:
            frames = tree_map(as_frames, observation)
            shape = (self.nb_lanes, self.window_length - 1)
            self._recent = tree_map(lambda leaf: np.zeros(shape + leaf.shape[1:], leaf.dtype), frames)
        return self._recent
