"""Replay memory whose frames live on the agent's device: only row numbers travel with a batch.

What belongs to which row is kept on the host, as in `SequentialMemory`; the frames are Keras variables. New frames
wait on the host until there are enough or until a batch is drawn, then one compiled call writes them. The compiled
function that trains gathers the frames of each of its batches itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NoReturn

import keras
import numpy as np
from keras import ops

from rl import backend
from rl.backend import read_rows, write_rows
from rl.common.misc_util import tree_leaves, tree_map
from rl.core import Processor
from rl.memory import Batch, SequentialMemory

_MIN_WAITING = 4  # frames that wait for one call at least, so that one lane does not pay one per step


@keras.saving.register_keras_serializable(package="rl")
class DeviceMemory(SequentialMemory):
    """A `SequentialMemory` for accelerators: the same transitions and draws, frames in the device's memory.

    Use it by choice, where a batch of frames takes longer to reach the device than to be learnt from::

        DQNAgent(model, nb_actions=4, memory=DeviceMemory(100_000, window_length=4))

    It takes `limit` frames, an eighth more for the last observations of episodes, and more of those by need (each time
    the agent's training function is compiled anew). It serves one agent, on whose device the frames lie.

    Args:
        limit: Number of transitions over all lanes; the oldest are overwritten.
        window_length: W, how many frames make a state.
        ignore_episode_boundaries: Let windows reach back into earlier episodes of the lane.

    Raises:
        ValueError: If `limit` or `window_length` is not an integer of at least 1.
    """

    def __init__(self, limit: int, window_length: int = 1, ignore_episode_boundaries: bool = False) -> None:
        super().__init__(limit, window_length, ignore_episode_boundaries)
        self._nb_first_slots = max(16, self.limit // 8)
        self._nb_waiting = _MIN_WAITING
        self._function: Any = None  # one of the agent's
        self._variables: list[Any] = []  # the agent's
        self._write: Any = None  # compiled: what waits goes to the device
        self._nb_growths = 0

    def attach(self, function: Any, variables: list[Any], processor: Any) -> None:
        """Takes the frames to the agent's device; see `Memory.attach`.

        Raises:
            ValueError: If the processor changes states, which are put together on the device only.
        """
        if processor is not None and type(processor).process_state_batch is not Processor.process_state_batch:
            raise ValueError(
                f"A DeviceMemory puts states together on the device, where {type(processor).__name__}."
                "process_state_batch cannot reach them. Fix: do its work in the network (keras.layers.Rescaling) or in "
                "process_observation, or use a SequentialMemory"
            )
        self._flush()
        first, self._write = self._function is None, None
        self._function, self._variables = function, variables
        if first and self._rows is not None:
            self._frames, self._extra = tree_map(lambda x: self._resized(x, len(x)), (self._frames, self._extra))

    def begin_lanes(self, nb_lanes: int) -> None:
        """Opens lanes anew; see `SequentialMemory.begin_lanes`."""
        super().begin_lanes(nb_lanes)
        self._flush()
        self._nb_waiting = max(nb_lanes, _MIN_WAITING)
        for rows in self._stores():
            rows.hold(self._nb_waiting)

    def sample_batch(
        self, batch_size: int, k: int = 1, gamma: float = 0.99, rng: np.random.Generator | None = None
    ) -> Batch:
        """Draws k batches as `SequentialMemory.sample_batch` does; `resolve` puts the frames into them.

        Returns:
            A `Batch` whose `state0` and `state1` say where the frames are.
        """
        self._flush()
        return super().sample_batch(batch_size, k, gamma, rng)

    def resolve(self, batch: Batch) -> Batch:
        """Gathers the frames of a batch of tensors; see `Memory.resolve`."""
        places, slots = batch.state1["places"], batch.state1["slots"][..., 0]
        axis = len(slots.shape)

        def states1(frames: _DeviceRows, extra: _DeviceRows) -> Any:
            last = read_rows(frames.variable, places[..., -1])
            outside = ops.reshape(slots >= 0, (*slots.shape, *[1] * (len(last.shape) - axis)))
            last = ops.where(outside, read_rows(extra.variable, ops.maximum(slots, 0)), last)
            before = read_rows(frames.variable, places[..., :-1])
            return ops.concatenate([before, ops.expand_dims(last, axis)], axis=axis)

        state0 = tree_map(lambda frames: read_rows(frames.variable, batch.state0), self._frames)
        return batch._replace(state0=state0, state1=tree_map(states1, self._frames, self._extra))

    def sample(self, batch_size: int, batch_idxs: Any = None) -> NoReturn:
        """Says that keras-rl's lists of frames are not to be had."""
        raise NotImplementedError("A DeviceMemory does not hand out frames. Fix: sample_batch, or a SequentialMemory.")

    def __getstate__(self) -> NoReturn:
        """Says that a copy is not to be had."""
        raise TypeError("A DeviceMemory cannot be copied or pickled. Fix: a new one made with its get_config().")

    # -- Storage

    def _states(self, places: np.ndarray, places1: np.ndarray, outside: tuple, slots: np.ndarray) -> tuple[Any, Any]:
        # Columns beyond the first mean nothing, but their number makes compiled functions, which know variables and
        # not this memory, trace anew where `extra` has become another variable.
        slot = np.full((*places.shape[:-1], self._nb_growths), -1, np.int32)
        slot[(*outside, 0)] = slots
        return places.astype(np.int32), {"places": places1.astype(np.int32), "slots": slot}

    def _allocate(self, frames: Any, action: np.ndarray) -> None:
        super()._allocate(frames, action)
        self._free += self._take_slots(1)  # allocates; of what `append` stores nothing needs a slot
        self._nb_growths = 1

    def _resized(self, rows: Any, count: int) -> _DeviceRows:
        self._flush()
        self._write = None
        self._nb_growths += 1
        with backend.device_scope(self._variables):
            larger = _DeviceRows(count, rows.shape[1:], rows.dtype, self._flush)
            if len(rows):
                values = np.zeros((count + 1, *rows.shape[1:]), rows.dtype)
                values[: len(rows)] = ops.convert_to_numpy(rows.variable)[:-1]
                larger.variable.assign(values)
        larger.hold(self._nb_waiting)
        return larger

    def _stores(self) -> list[_DeviceRows]:
        return [] if self._rows is None else tree_leaves((self._frames, self._extra))

    def _flush(self) -> None:
        """Writes what waits, in one compiled call."""
        stores = self._stores()
        if any(store.nb_waiting for store in stores):
            if self._write is None:
                variables = [store.variable for store in stores]
                self._write = backend.compile_function(self._write_all, variables, like=self._function)
            self._write([(store.places, store.rows) for store in stores])
            for store in stores:
                store.hold()

    def _write_all(self, waiting: Any) -> None:
        for store, (places, rows) in zip(self._stores(), waiting, strict=True):
            write_rows(store.variable, places, rows)


class _DeviceRows:
    """The rows of one array: a variable on the device, and rows that wait on the host to be written there.

    Args:
        count: Number of rows.
        shape: Of one row.
        dtype: Of the rows as they come.
        flush: Called where no more rows can wait: writes those of all arrays.
    """

    def __init__(self, count: int, shape: tuple[int, ...], dtype: Any, flush: Callable[[], None]):
        self.shape, self.dtype, self._flush = (count, *shape), np.dtype(dtype), flush
        kept = ops.convert_to_numpy(ops.convert_to_tensor(np.zeros(1, dtype))).dtype.name  # JAX narrows 64 bits
        # One row more, where rows go that nobody waits for, so that each call writes the same number.
        self.variable = keras.Variable(initializer="zeros", shape=(count + 1, *shape), dtype=kept, trainable=False)
        self.hold(0)

    def hold(self, count: int | None = None) -> None:
        """Empties what waits, and has up to `count` rows wait from now on. Default: as many as before."""
        if count is not None:
            self.places = np.empty(count, np.int32)
            self.rows = np.zeros((count, *self.shape[1:]), self.dtype)
        self.places[:] = len(self)
        self.nb_waiting = 0

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of the variable."""
        return (len(self) + 1) * math.prod(self.shape[1:]) * self.dtype.itemsize

    def __setitem__(self, places: np.ndarray, rows: np.ndarray) -> None:
        if self.nb_waiting + len(places) > len(self.places):
            self._flush()
        waiting, end = self.places[: self.nb_waiting], self.nb_waiting + len(places)
        waiting[(waiting[:, None] == places).any(axis=1)] = len(self)  # only the newest row of a place is written
        self.places[self.nb_waiting : end], self.rows[self.nb_waiting : end] = places, rows
        self.nb_waiting = end

    def __getitem__(self, places: Any) -> NoReturn:
        raise NotImplementedError("A DeviceMemory does not hand out frames. Fix: sample_batch, or a SequentialMemory.")
