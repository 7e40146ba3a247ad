"""Replay memory: transitions of N lanes in one ring of arrays, every frame stored once.

The ring has `limit` rows; rows of all lanes share it in the order of their arrival. A row's id counts up for
ever, its place is ``id % limit``, so an id below ``next id - limit`` names a row that has been overwritten::

      id         4      5      6      7      8      9
               +------+------+------+------+------+------+
      frame    | a0   | b4   | a1   | b5   | a2   | b0'  |   lanes a and b; b's episode ended with row 7
      previous | -1   |  3   |  4   |  5   |  6   | -1   |   row before it in the same episode, -1: a start
      successor| 6    |  7   |  8   | x1   | x0   | x2   |   place of s': another row, or a slot of `extra`
               +------+------+------+------+------+------+
      action, reward, terminated, truncated: one entry per row

               +------+------+------+
      extra    | a3   | b6   | b1'  |   successors that are nobody's frame: of each lane's newest row, of the
               +------+------+------+   last row of an episode (terminated or truncated), of a row cut off

The successor of a row is the frame of the lane's next row, so it is not stored a second time. Where there
is no next row it lives in `extra`, which grows by need; its slot passes on to the next row when that
arrives, and is freed when its row is overwritten. The window of a row is found by following `previous`:
it crosses neither episodes nor lanes, is padded with zeros at true starts of episodes only, and a row
whose window reaches into overwritten rows is not drawn.

keras-rl's protocol (`append`, `sample`, `get_recent_state`) works on the same ring, as a lane of its own.
In it the observation after an action arrives with the next `append`: the newest row cannot be drawn yet,
and the row after a terminal one only supplies the terminal row's successor.
"""

from __future__ import annotations

import copy
import functools
import math
import operator
from collections import deque, namedtuple
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import keras
import numpy as np

from rl.common.misc_util import tree_leaves, tree_map, warn_user
from rl.frames import RecentFrames, as_frames, matching
from rl.util import RandomStream

if TYPE_CHECKING:
    from rl.driver import Transition

_NONE = -1  # `previous` of the first row of an episode
_LOST = -2  # `previous` of a row whose predecessor was never stored: below every id, as if overwritten
_UNKNOWN = np.iinfo(np.int64).min  # `successor` of a row that is no complete transition
_MAX_REDRAWS = 32


# A transition as keras-rl hands it out: the states are lists of `window_length` observations.
Experience = namedtuple("Experience", "state0, action, reward, state1, terminal1")


class Batch(NamedTuple):
    """A batch of transitions as arrays; from `sample_batch` each field has a leading axis k.

    Args:
        state0: Tree of (B, W, *obs), the environment's dtype: what the agent acted on.
        action: (B,) int64 or (B, A) float32.
        reward: (B,) float32.
        state1: Tree of (B, W, *obs): what followed, at the end of an episode its true last observation.
        terminal1: (B,) float32, 1 where the episode terminated. A truncated one (time limit) has 0.
        discount: (B,) float32, gamma^n for a reward summed over n steps.
        weight: (B,) float32, the weight of the row's loss.
        index: (B,) int64, the id of the row.
    """

    state0: Any
    action: np.ndarray
    reward: np.ndarray
    state1: Any
    terminal1: np.ndarray
    discount: np.ndarray
    weight: np.ndarray
    index: np.ndarray  # type: ignore[assignment]  # hides tuple.index, which nobody calls on a batch


def sample_batch_indexes(low: int, high: int, size: int, rng: np.random.Generator | None = None) -> np.ndarray:
    """Draws indexes from low, ..., high - 1: different ones if there are enough, else with repetitions.

    Args:
        low: Smallest index.
        high: One above the largest index.
        size: How many.
        rng: Generator to use; default: one seeded from NumPy's global generator.

    Returns:
        (size,) int64.

    Raises:
        ValueError: If the range is empty.
    """
    if high <= low:
        raise ValueError(f"Cannot draw an index from the empty range low={low}, high={high}.")
    rng = RandomStream().rng if rng is None else rng
    if high - low >= size:
        return low + rng.choice(high - low, size=size, replace=False)
    warn_user(f"Drew {size} indexes out of only {high - low}: some repeat.")
    return rng.integers(low, high, size=size)


def zeroed_observation(observation: Any) -> Any:
    """Returns an observation of zeros with the structure, shape and dtype of the given one."""
    if isinstance(observation, list):
        return [zeroed_observation(part) for part in observation]
    return tree_map(lambda leaf: np.zeros_like(leaf) if hasattr(leaf, "shape") else 0.0, observation)


def _count(name: str, value: Any) -> int:
    if not isinstance(value, (int, np.integer)) or value < 1:
        raise ValueError(f"{name} must be an integer and at least 1, got {value!r}.")
    return int(value)


class Memory(RandomStream):
    """Base of the memories, with keras-rl's interface.

    `append` here only remembers the frames for `get_recent_state`; a subclass stores the transition.

    Args:
        window_length: W, how many frames make a state.
        ignore_episode_boundaries: Let windows reach back into earlier episodes.
    """

    def __init__(self, window_length: int, ignore_episode_boundaries: bool = False) -> None:
        self.window_length = _count("window_length", window_length)
        self.ignore_episode_boundaries = bool(ignore_episode_boundaries)
        self.recent_observations: deque[Any] = deque(maxlen=self.window_length)
        self.recent_terminals: deque[bool] = deque(maxlen=self.window_length)

    def sample(self, batch_size: int, batch_idxs: Sequence[int] | None = None) -> Any:
        """Draws `batch_size` entries, or returns those with the given indexes."""
        raise NotImplementedError(f"{type(self).__name__} does not define sample().")

    def append(self, observation: Any, action: Any, reward: float, terminal: bool, training: bool = True) -> None:
        """Adds one step: what the agent saw and did, the reward for it, and whether that ended the episode.

        After a terminal step keras-rl appends once more, with the episode's last observation.

        Args:
            observation: One observation (without a lane axis).
            action: The action taken.
            reward: The reward received for it.
            terminal: Whether the episode ended with this step.
            training: False: the step is only remembered for `get_recent_state`, not stored.
        """
        # A copy: many environments hand out the same array in every step.
        self.recent_observations.append(copy.deepcopy(observation))
        self.recent_terminals.append(bool(terminal))

    def get_recent_state(self, current_observation: Any) -> list[Any]:
        """Returns the last appended frames of this episode and the current one, zero-padded in front.

        Args:
            current_observation: One observation (without a lane axis).

        Returns:
            List of `window_length` observations.
        """
        state = [current_observation]
        for age in range(1, min(self.window_length, len(self.recent_observations) + 1)):
            # The frame of a terminal step and the one after it belong together; the next begins an episode.
            before = self.recent_terminals[-age - 1] if age < len(self.recent_terminals) else False
            if before and not self.ignore_episode_boundaries:
                break
            state.append(self.recent_observations[-age])
        state += [zeroed_observation(current_observation) for _ in range(self.window_length - len(state))]
        return state[::-1]

    def attach(self, function: Any, variables: list[Any], processor: Any) -> None:
        """Called by an agent that made its compiled functions. Where frames stay on the host there is nothing to do.

        Args:
            function: One of the compiled functions.
            variables: The agent's.
            processor: The agent's, or None.
        """

    def resolve(self, batch: Batch) -> Batch:
        """Called within a compiled function, on a batch of tensors made of what `sample_batch` gave.

        Returns:
            The batch with frames in `state0` and `state1`: here as it is.
        """
        return batch

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments."""
        return {"window_length": self.window_length, "ignore_episode_boundaries": self.ignore_episode_boundaries}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """Builds an (empty) memory from what `get_config` returned."""
        return cls(**config)


def _write(stores: Any, places: Any, values: Any) -> None:
    tree_map(lambda store, leaf: operator.setitem(store, places, leaf), stores, values)


class _InOrderOfAge:
    """Read-only view of a field of a memory: index 0 is its oldest row. Slices work, negative indexes too."""

    def __init__(self, memory: SequentialMemory, name: str) -> None:
        self._memory, self._name = memory, name

    def __len__(self) -> int:
        return self._memory.nb_entries

    def __getitem__(self, index: int | slice) -> Any:
        memory = self._memory
        places = np.asarray(range(memory._oldest, memory._next_id)[index], np.int64) % memory.limit
        return tree_map(lambda leaf: leaf[places], memory._store(self._name))


@keras.saving.register_keras_serializable(package="rl")
class SequentialMemory(Memory):
    """Replay memory of the last `limit` transitions over all lanes, drawn uniformly.

    Memory is committed as it fills; a row costs its frame plus about 30 bytes. Frames keep the environment's
    dtype (uint8 stays uint8), except that float64 is kept as float32. Keras saves the configuration only.

    Args:
        limit: Number of transitions over all lanes; the oldest are overwritten.
        window_length: W, how many frames make a state.
        ignore_episode_boundaries: Let windows reach back into earlier episodes of the lane.

    Raises:
        ValueError: If `limit` or `window_length` is not an integer of at least 1.
    """

    def __init__(self, limit: int, window_length: int = 1, ignore_episode_boundaries: bool = False) -> None:
        super().__init__(window_length, ignore_episode_boundaries)
        self.limit = _count("limit", limit)
        self._next_id = 0
        self._rows: Any = None  # structured array, allocated when the first row shows what actions look like
        self._frames: Any = None  # tree of (limit + 1, *obs), likewise; the last one stays zero: padding
        self._extra: Any = None  # tree of (capacity, *obs)
        self._free: list[int] = []
        self._nb_first_slots = 16
        self._recent = RecentFrames(self.window_length)
        self._warned = False
        self._checked_signature: list[Any] = []
        self._appends = False  # whether rows came by keras-rl's protocol
        self._close_windows(0)

    def _close_windows(self, nb_lanes: int) -> None:
        # Per lane the newest stored row of its episode, and whether the next observation is its successor.
        self._last = np.full(nb_lanes, _NONE, np.int64)
        self._linked = np.zeros(nb_lanes, bool)
        self._recent.begin(nb_lanes)
        # Of `append`: its newest row, and whether that row only supplied the successor of a terminal one.
        self._tail, self._tail_trails = _NONE, False
        self.recent_observations.clear()
        self.recent_terminals.clear()

    # -- Lanes

    def begin_lanes(self, nb_lanes: int) -> None:
        """Opens lanes anew: no window reaches back beyond this call. What is stored stays.

        Args:
            nb_lanes: N, may differ from the number before.

        Raises:
            ValueError: If `limit` is smaller: the newest transition of each lane must fit.
        """
        nb_lanes = _count("nb_lanes", nb_lanes)
        if nb_lanes > self.limit:
            raise ValueError(
                f"A memory with limit={self.limit} cannot hold one transition of each of {nb_lanes} lanes: "
                "choose a larger limit."
            )
        self._close_windows(nb_lanes)

    def get_recent_states(self, observation: Any) -> Any:
        """Returns the states to act on: exactly what `sample_batch` later returns as `state0` for this step.

        Args:
            observation: Tree of (N, *obs).

        Returns:
            Tree of (N, W, *obs): per lane the last W - 1 stored frames of its open episode and this
            observation, zeros before the start. For W = 1 a view of `observation`.

        Raises:
            ValueError: If the number of lanes is not the one that is open.
        """
        self._expect_lanes(len(tree_leaves(observation)[0]))
        return self._recent.states(observation)

    def extend(self, transition: Transition, store: np.ndarray | None = None) -> None:
        """Stores one transition per lane.

        An episode that ended closes the window of its lane, whether or not the row is stored.

        Args:
            transition: Of N lanes. Rows with `valid` False are not stored.
            store: (N,) bool, rows to store; default: all that are valid.

        Raises:
            ValueError: If the number of lanes is not the one that is open, or shapes or dtypes are not those
                of the rows before. Nothing is stored then.
        """
        valid = transition.valid
        self._expect_lanes(len(valid))
        keep = valid if store is None else valid & store
        ended = transition.terminated | transition.truncated
        if np.count_nonzero(keep):
            self._store_lanes(transition, np.flatnonzero(keep))
        self._linked = np.where(valid, keep, self._linked) & ~ended
        closed = ended & (not self.ignore_episode_boundaries)
        if np.count_nonzero(closed):
            self._last[closed] = _NONE
        self._recent.push(transition.observation, keep, closed)

    def _store_lanes(self, transition: Transition, lanes: np.ndarray) -> None:
        names, count = (
            ("observation", "next_observation", "action", "reward", "terminated", "truncated"),
            len(self._last),
        )
        fields = {name: getattr(transition, name) for name in names}
        signature = [(leaf.shape, leaf.dtype) for tree in fields.values() for leaf in tree_leaves(tree)]
        if signature != self._checked_signature:  # arrays that look like the last ones need not be checked again
            fields, self._checked_signature = self._checked(count, **fields), signature
        last, linked = self._last, self._linked
        if len(lanes) < count:
            fields = tree_map(lambda leaf: leaf[lanes], fields)
            last, linked = last[lanes], linked[lanes]
        successors = fields.pop("next_observation")
        ids, places = self._insert(previous=last, **fields)
        linked = linked & (last >= self._oldest)
        successor = self._rows["successor"]
        # The row before needs its slot no longer, now that its successor is a row: that takes it over.
        if np.count_nonzero(linked) == len(linked):
            before = last % self.limit
            slots = ~successor[before]
            successor[before] = places
        else:
            before = last[linked] % self.limit
            slots = np.empty(len(lanes), np.int64)
            slots[linked] = ~successor[before]
            slots[~linked] = self._take_slots(len(lanes) - len(before))
            successor[before] = places[linked]
        successor[places] = ~slots
        _write(self._extra, slots, successors)
        self._last[lanes] = ids

    # -- Sampling

    def sample_batch(
        self, batch_size: int, k: int = 1, gamma: float = 0.99, rng: np.random.Generator | None = None
    ) -> Batch:
        """Draws k batches at once, each row independently and uniformly from all rows that can be drawn.

        Args:
            batch_size: B, rows per batch.
            k: Number of batches.
            gamma: Discount per step.
            rng: Generator to use instead of the memory's own.

        Returns:
            A `Batch` whose fields have leading axes (k, B).

        Raises:
            ValueError: If the memory is empty, or no row can be drawn.
        """
        ids, places = self._draw((k, batch_size), self.rng if rng is None else rng)
        return self._gather(ids, places, gamma)

    def sample(self, batch_size: int, batch_idxs: Sequence[int] | None = None) -> list[Experience]:
        """Draws transitions as keras-rl does.

        Args:
            batch_size: How many.
            batch_idxs: Their indexes in order of age: index i has `observations[i]` as the last frame of
                `state0`. An entry that is no complete transition (it would start from a finished episode, or
                has no successor yet, or its window is overwritten) is replaced by a random one.

        Returns:
            List of `Experience`.

        Raises:
            ValueError: If the memory is empty, no row can be drawn, or the indexes do not fit.
        """
        ids = None if batch_idxs is None else self._oldest + np.asarray(batch_idxs, np.int64)
        if ids is not None and (ids.shape != (batch_size,) or min(ids) < self._oldest or max(ids) >= self._next_id):
            raise ValueError(f"Expected {batch_size} batch_idxs from 0 to {self.nb_entries - 1}, got {batch_idxs}.")
        batch = self._gather(*self._draw((batch_size,), self.rng, ids), gamma=1.0)

        def states(tree: Any) -> list[list[Any]]:
            at = [[operator.itemgetter((i, w)) for w in range(self.window_length)] for i in range(batch_size)]
            return [[tree_map(frame, tree) for frame in frames] for frames in at]

        reward, terminal1 = batch.reward.tolist(), (batch.terminal1 > 0).tolist()
        return list(map(Experience, states(batch.state0), batch.action, reward, states(batch.state1), terminal1))

    def _draw(
        self, shape: tuple[int, ...], rng: np.random.Generator, ids: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Draws rows uniformly among the fit ones, by rejection; given `ids` are kept where they are fit.

        Returns:
            Their ids, in the given shape, and the places (*shape, W) of their windows.
        """
        oldest, end = self._oldest, self._next_id
        if min(shape) < 1:
            raise ValueError(f"batch_size and k must be at least 1, got {' and '.join(map(str, shape[::-1]))}.")
        if end == 0:
            raise ValueError("The memory is empty: store transitions before sampling.")
        if self.nb_entries < shape[-1] and not self._warned:
            self._warned = True
            warn_user(
                f"{self.nb_entries} transitions for a batch of {shape[-1]}: rows repeat. A longer warm-up avoids it."
            )
        if ids is None:
            ids = rng.integers(oldest, end, size=math.prod(shape))
        places, fit = self._window(ids)
        bad = np.flatnonzero(~fit)
        for attempt in range(_MAX_REDRAWS + 1):
            if not len(bad):
                break
            if attempt < _MAX_REDRAWS:
                ids[bad] = rng.integers(oldest, end, size=len(bad))
            else:  # almost every row is unfit: choose among those that are left
                ids[bad] = rng.choice(self._fit_ids(), size=len(bad))
            places[bad], fit = self._window(ids[bad])
            bad = bad[~fit]
        return ids.reshape(shape), places.reshape(*shape, -1)

    def _fit_ids(self) -> np.ndarray:
        ids = np.arange(self._oldest, self._next_id)
        ids = ids[self._window(ids)[1]]
        if not len(ids):
            raise ValueError(
                f"None of the {self.nb_entries} stored rows can be drawn: each lacks its successor (it comes with the "
                f"next append) or a frame of its window, overwritten since limit={self.limit} is too small for "
                f"window_length={self.window_length} on {self._recent.nb_lanes} lanes."
            )
        return ids

    def _window(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the places (M, W) of the windows that end with `ids` (padding: `limit`), and which fit."""
        oldest, previous = self._oldest, self._rows["previous"]
        places = np.empty((len(ids), self.window_length), np.int64)
        places[:, -1] = place = ids % self.limit
        # Only rows of `append` may lack their successor.
        fit = self._rows["successor"][place] != _UNKNOWN if self._appends else np.ones(len(ids), bool)
        for column in range(self.window_length - 2, -1, -1):
            before = previous[place]
            gone = before < oldest
            fit &= ~gone | (before == _NONE)
            places[:, column] = place = np.where(gone, self.limit, before % self.limit)
        return places, fit

    def _gather(self, ids: np.ndarray, places: np.ndarray, gamma: float) -> Batch:
        rows = self._rows.take(places[..., -1])
        successor = rows["successor"]
        outside = np.nonzero(successor < 0)
        slots = ~successor[outside]
        successor[outside] = self.limit
        places1 = successor[..., None]
        if self.window_length > 1:
            places1 = np.concatenate((places[..., 1:], places1), axis=-1)
        state0, state1 = self._states(places, places1, outside, slots)
        terminal1 = rows["terminated"].astype(np.float32)
        discount, weight = np.full(ids.shape, gamma, np.float32), np.ones(ids.shape, np.float32)
        return Batch(state0, rows["action"].copy(), rows["reward"].copy(), state1, terminal1, discount, weight, ids)

    def _states(self, places: np.ndarray, places1: np.ndarray, outside: tuple, slots: np.ndarray) -> tuple[Any, Any]:
        """Returns the frames at `places` and at `places1`, the last ones of windows `outside` from `slots`."""

        def states1(frames: np.ndarray, extra: np.ndarray) -> np.ndarray:
            states = frames.take(places1, axis=0)
            states[(*outside, -1)] = extra[slots]
            return states

        state0 = tree_map(lambda frames: frames.take(places, axis=0), self._frames)
        return state0, tree_map(states1, self._frames, self._extra)

    # -- keras-rl's protocol

    def append(self, observation: Any, action: Any, reward: float, terminal: bool, training: bool = True) -> None:
        """Adds one step in keras-rl's protocol: see `Memory.append`.

        The row gets its successor from the next `append`, so the newest one is not drawn yet. The row after a
        terminal one holds the episode's last observation and is never drawn itself. These rows are apart from
        the lanes of `extend`.

        Args:
            observation: One observation (without a lane axis); a list of arrays is read as a tuple.
            action: The action taken.
            reward: The reward received for it.
            terminal: Whether the episode terminated with this step.
            training: False: the step is only remembered for `get_recent_state`, not stored.

        Raises:
            ValueError: If shapes or dtypes are not those of the rows before.
        """
        row, self._appends = _LOST, True
        if isinstance(observation, list) and any(isinstance(part, np.ndarray) for part in observation):
            observation = tuple(observation)
        if training:
            fields = self._checked(
                1,
                observation=tree_map(lambda leaf: np.asarray(leaf)[None], observation),
                action=np.asarray(action)[None],
                reward=[float(reward)],
                terminated=[bool(terminal)],
                truncated=[False],
            )
            (row,), places = self._insert(previous=np.array([self._tail]), **fields)
            if self._tail >= self._oldest and not self._tail_trails:
                self._rows["successor"][self._tail % self.limit] = places[0]
        trails = bool(self.recent_terminals) and self.recent_terminals[-1]
        super().append(observation, action, reward, terminal, training)
        self._tail_trails = trails
        self._tail = _NONE if trails and not self.ignore_episode_boundaries else int(row)

    observations = property(lambda self: _InOrderOfAge(self, "observation"), doc="Frames, oldest first.")
    actions = property(lambda self: _InOrderOfAge(self, "action"), doc="Actions, oldest first.")
    rewards = property(lambda self: _InOrderOfAge(self, "reward"), doc="Rewards, oldest first.")
    terminals = property(lambda self: _InOrderOfAge(self, "terminated"), doc="Terminated flags, oldest first.")
    truncations = property(lambda self: _InOrderOfAge(self, "truncated"), doc="Truncated flags, oldest first.")

    @property
    def nb_entries(self) -> int:
        """Number of rows stored, at most `limit`."""
        return min(self._next_id, self.limit)

    @property
    def nbytes(self) -> int:
        """Bytes allocated; the operating system commits them only as the rows are written."""
        if self._rows is None:
            return 0
        return sum(array.nbytes for array in tree_leaves((self._rows, self._frames, self._extra)))

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments."""
        return {"limit": self.limit, **super().get_config()}

    # -- Storage

    @property
    def _oldest(self) -> int:
        return max(0, self._next_id - self.limit)

    def _expect_lanes(self, nb_lanes: int) -> None:
        if self._recent.nb_lanes == 0:
            self.begin_lanes(nb_lanes)
        elif nb_lanes != self._recent.nb_lanes:
            raise ValueError(
                f"Got {nb_lanes} lanes while {self._recent.nb_lanes} are open: call begin_lanes({nb_lanes}) first."
            )

    def _store(self, name: str) -> Any:
        return self._frames if "observation" in name else self._rows[name]

    def _checked(self, count: int, **given: Any) -> dict[str, Any]:
        """Returns the fields of rows as arrays, or raises before anything is written."""
        if self._rows is None:
            self._allocate(tree_map(as_frames, given["observation"]), np.asarray(given["action"]))
        return {
            name: tree_map(functools.partial(matching, name, count), self._store(name), rows)
            for name, rows in given.items()
        }

    def _allocate(self, frames: Any, action: np.ndarray) -> None:
        # One record per row, so that a drawn row costs one access to far memory and not one per field. The
        # successor is a place in the ring, or ~slot of the extra store.
        fields: list[Any] = [("previous", np.int64), ("successor", np.int64), ("reward", np.float32)]
        fields += [("terminated", bool), ("truncated", bool)]
        fields += [("action", np.float32 if action.dtype.kind == "f" else np.int64, action.shape[1:])]
        # Index `limit` stands for padding wherever rows are followed or gathered.
        self._frames = tree_map(lambda leaf: self._resized(leaf[:0], self.limit + 1), frames)
        self._extra = tree_map(lambda leaf: self._resized(leaf[:0], 0), frames)
        self._rows = np.zeros(self.limit + 1, np.dtype(fields, align=True))
        self._rows["previous"] = _NONE
        self._rows["successor"] = _UNKNOWN

    def _insert(self, previous: np.ndarray, observation: Any, **fields: Any) -> tuple[np.ndarray, np.ndarray]:
        """Writes rows without successors over the oldest ones, and returns their ids and places."""
        ids = np.arange(self._next_id, self._next_id + len(previous))
        places = ids % self.limit
        self._next_id += len(previous)
        if self._next_id > self.limit:
            old = self._rows["successor"][places]
            self._free += (~old[(old < 0) & (old != _UNKNOWN)]).tolist()
        # A slice, where the ring does not wrap, is written in a third of the time.
        at = slice(places[0], places[-1] + 1) if places[0] <= places[-1] else places
        for name, values in fields.items():
            self._rows[name][at] = values
        self._rows["previous"][at], self._rows["successor"][at] = previous, _UNKNOWN
        _write(self._frames, places, observation)
        return ids, places

    def _resized(self, rows: Any, count: int) -> Any:
        # np.zeros leaves the pages to the operating system until they are written.
        larger = np.zeros((count, *rows.shape[1:]), rows.dtype)
        larger[: len(rows)] = rows
        return larger

    def _take_slots(self, count: int) -> list[int]:
        if len(self._free) < count:
            # At most `limit` rows need a slot at a time, so doubling stops there.
            old = len(tree_leaves(self._extra)[0])
            new = min(self.limit, max(2 * old, old + count, self._nb_first_slots))
            self._free += range(new - 1, old - 1, -1)  # the lowest, and so few pages, first
            self._extra = tree_map(lambda extra: self._resized(extra, new), self._extra)
        cut = len(self._free) - count
        slots = self._free[cut:]
        del self._free[cut:]
        return slots


class RingBuffer:
    """List of the last `maxlen` items; index 0 is the oldest. Unlike a deque it finds any item at once.

    Args:
        maxlen: Largest number of items.
    """

    def __init__(self, maxlen: int) -> None:
        self.maxlen = _count("maxlen", maxlen)
        self.data: list[Any] = []
        self.start = 0

    def __len__(self) -> int:
        return len(self.data)

    length = property(__len__, doc="Number of items.")

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < len(self.data):
            raise KeyError(f"Index {index} is outside of 0, ..., {len(self.data) - 1}.")
        return self.data[(self.start + index) % self.maxlen]

    def append(self, item: Any) -> None:
        """Adds an item, over the oldest one if the buffer is full."""
        if len(self.data) < self.maxlen:
            self.data.append(item)
        else:
            self.data[self.start] = item
            self.start = (self.start + 1) % self.maxlen


@keras.saving.register_keras_serializable(package="rl")
class EpisodeParameterMemory(Memory):
    """Memory of CEM: the parameters of the last `limit` episodes and the total reward of each.

    Args:
        limit: Number of episodes.
        window_length: W, how many frames make a state.
        ignore_episode_boundaries: Let windows reach back into earlier episodes.
    """

    def __init__(self, limit: int, window_length: int = 1, ignore_episode_boundaries: bool = False) -> None:
        super().__init__(window_length, ignore_episode_boundaries)
        self.limit = _count("limit", limit)
        self.params = RingBuffer(self.limit)
        self.total_rewards = RingBuffer(self.limit)
        self.intermediate_rewards: list[float] = []

    def append(self, observation: Any, action: Any, reward: float, terminal: bool, training: bool = True) -> None:
        """Adds one step; its reward counts for the episode that is running if `training`."""
        super().append(observation, action, reward, terminal, training)
        if training:
            self.intermediate_rewards.append(reward)

    def finalize_episode(self, params: Any) -> None:
        """Files the running episode's sum of rewards under the parameters that were used in it."""
        self.total_rewards.append(sum(self.intermediate_rewards))
        self.params.append(params)
        self.intermediate_rewards = []

    def sample(self, batch_size: int, batch_idxs: Sequence[int] | None = None) -> tuple[list[Any], list[float]]:
        """Draws episodes.

        Args:
            batch_size: How many.
            batch_idxs: Their indexes, oldest 0; default: random, without repetitions where there are enough.

        Returns:
            The lists of their parameters and of their total rewards.

        Raises:
            ValueError: If no episode is stored.
        """
        if batch_idxs is None:
            batch_idxs = [int(i) for i in sample_batch_indexes(0, self.nb_entries, batch_size, self.rng)]
        return [self.params[i] for i in batch_idxs], [self.total_rewards[i] for i in batch_idxs]

    @property
    def nb_entries(self) -> int:
        """Number of finished episodes stored."""
        return len(self.total_rewards)

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments."""
        return {"limit": self.limit, **super().get_config()}
