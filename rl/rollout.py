"""Storage of the latest steps of N lanes, for agents that learn on-policy."""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rl.common.misc_util import tree_map
from rl.frames import as_frames, matching

if TYPE_CHECKING:
    from rl.driver import Transition


class Rollout(NamedTuple):
    """T steps of N lanes, as the env gave them.

    Attributes:
        state0: Tree of (T, N, 1, *obs), the env's dtype (float64 as float32): what the agent acted on.
        action: (T, N) int32, or (T, N, A): int32 or float32.
        reward: (T, N) float32.
        state1: Tree of (T, N, 1, *obs): the true successors.
        terminated: (T, N) bool.
        ended: (T, N) bool: terminated or truncated.
        valid: (T, N) bool: False for rows that are no transitions.
    """

    state0: Any
    action: np.ndarray
    reward: np.ndarray
    state1: Any
    terminated: np.ndarray
    ended: np.ndarray
    valid: np.ndarray


class RolloutBatch(NamedTuple):
    """Steps of a rollout as an on-policy loss wants them: B rows, tensors.

    Attributes:
        state0: Tree of (B, 1, *obs).
        action: (B,) or (B, A).
        log_prob0: (B,): log-probability of the action under the policy that the rollout was learnt with at its start.
        value0: (B,): V(s) then.
        advantage: (B,): the estimate, not standardised.
        target: (B,): what V(s) should be: advantage + value0.
        weight: (B,): 1, or 0 for a row that only fills up the batch.
        scheduled: What `RolloutAgent.scheduled` returned, as scalars.
    """

    state0: Any
    action: Any
    log_prob0: Any
    value0: Any
    advantage: Any
    target: Any
    weight: Any
    scheduled: dict[str, Any]


class RolloutStorage:
    """Collects T vector steps of N lanes in preallocated arrays.

    Args:
        nb_steps: T.

    Attributes:
        nb_lanes: N; 0 before `begin`.
        count: Vector steps that are stored.
        started_at: When the first of them was waited for, in `time.monotonic` seconds.
    """

    def __init__(self, nb_steps: int):
        self.nb_steps = nb_steps
        self.nb_lanes = self.count = 0
        self.started_at = self._latest = 0.0
        self._rows: Any = None
        self._return = np.zeros(0)

    def begin(self, nb_lanes: int) -> None:
        """Opens lanes at new episodes.

        An incomplete rollout of as many lanes stays, cut off where it ends. A complete one is there only where
        learning from it was interrupted; it is dropped.
        """
        if nb_lanes == self.nb_lanes and 0 < self.count < self.nb_steps:
            self._rows.ended[self.count - 1] = True
        else:
            self.nb_lanes, self._rows, self._return = nb_lanes, None, np.zeros(nb_lanes)
            self.clear()

    def clear(self) -> None:
        """Forgets all steps."""
        self.count, self.started_at = 0, time.monotonic()

    def resume(self) -> None:
        """Goes on after a pause, which does not count: `started_at` moves by the time since the last step."""
        now = time.monotonic()
        self.started_at = now if self.count == 0 else self.started_at + now - self._latest

    @property
    def full(self) -> bool:
        """Whether there are T steps."""
        return self.count == self.nb_steps

    @property
    def nb_valid(self) -> int:
        """Transitions among them."""
        return int(np.count_nonzero(self._rows.valid[: self.count])) if self.count else 0

    def append(self, transition: Transition) -> None:
        """Stores a vector step; the storage is not full.

        Raises:
            ValueError: The rows are not shaped as those before.
        """
        given = Rollout(*transition[:5], transition.terminated | transition.truncated, transition.valid)
        if self._rows is None:
            self._rows = Rollout._make(tree_map(self._allocated, part) for part in given)
        for name, store, rows in zip(Rollout._fields, self._rows, given, strict=True):
            if isinstance(store, np.ndarray):
                self._write(name, store, rows)
            else:
                tree_map(functools.partial(self._write, name), store, rows)
        self.count, self._latest = self.count + 1, time.monotonic()

    def _allocated(self, rows: Any) -> np.ndarray:
        rows = as_frames(rows)
        wide = rows.dtype.kind in "iu" and rows.dtype.itemsize > 4
        return np.zeros((self.nb_steps, *rows.shape), np.int32 if wide else rows.dtype)

    def _write(self, name: str, store: np.ndarray, rows: Any) -> None:
        if np.shape(rows) != store.shape[1:] or rows.dtype is not store.dtype:
            rows = matching(name, self.nb_lanes, store[0], rows)  # raises where these cannot be stored
        store[self.count] = rows

    def rollout(self) -> Rollout:
        """The T steps; views, which the next `append` overwrites."""
        windowed = (tree_map(lambda x: x[:, :, None], part) for part in (self._rows.state0, self._rows.state1))
        state0, state1 = windowed
        return self._rows._replace(state0=state0, state1=state1)

    def discounted_returns(self, gamma: float) -> np.ndarray:
        """Of each row the discounted sum of its lane's rewards so far, `(T, N)` float32: `R <- gamma R + r`.

        The sums start anew with each episode and go on from one rollout to the next: call it once per rollout.
        """
        sums = np.zeros((self.nb_steps, self.nb_lanes), np.float32)
        running = self._return
        for t in range(self.nb_steps):
            running = np.where(self._rows.valid[t], gamma * running + self._rows.reward[t], running)
            sums[t] = running
            running = np.where(self._rows.ended[t], 0.0, running)
        self._return = running
        return sums
