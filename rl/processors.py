"""Ready-made processors; `Processor`, the base class for your own, is defined in `rl.core`."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from rl.common.misc_util import tree_leaves, tree_map
from rl.core import Processor
from rl.util import WhiteningNormalizer

__all__ = ["MultiInputProcessor", "Processor", "WhiteningNormalizerProcessor"]

register = keras.saving.register_keras_serializable(package="rl")


@register
class MultiInputProcessor(Processor):
    """Sorts observations that have several parts by part, for networks with several inputs.

    Agents here feed `Dict` and `Tuple` observations to such networks without a processor. This one is for
    observations whose parts are the entries of a list or of an array's first axis, and for code that calls
    `process_state_batch` itself.

    Args:
        nb_inputs: Number of parts of an observation, and of the network's inputs.
    """

    def __init__(self, nb_inputs: int):
        self.nb_inputs = nb_inputs

    def process_state_batch(self, batch: Any) -> Any:
        """Turns a batch of states into one batch per input.

        Args:
            batch: One of: B states, each of W observations, each a sequence (or dict) of `nb_inputs` parts; an
                array ``(B, W, nb_inputs, ...)``; or a tuple (or dict) of `nb_inputs` arrays ``(B, W, ...)``.

        Returns:
            A tuple of `nb_inputs` arrays ``(B, W, ...)``; a dict of them where the observations are dicts.

        Raises:
            ValueError: If an observation has another number of parts.
        """
        if isinstance(batch, (dict, tuple)):  # sorted by part already, as for a Dict or Tuple space
            self._check(len(batch))
            return batch
        if isinstance(batch, np.ndarray) and batch.dtype != object:
            self._check(batch.shape[2] if batch.ndim > 2 else 1)
            return tuple(np.moveaxis(batch, 2, 0))
        states = [list(state) for state in batch]
        for observation in (observation for state in states for observation in state):
            self._check(len(observation))
        first = states[0][0]
        keys = list(first) if isinstance(first, dict) else range(self.nb_inputs)
        parts = [np.array([[observation[key] for observation in state] for state in states]) for key in keys]
        return dict(zip(keys, parts, strict=True)) if isinstance(first, dict) else tuple(parts)

    def _check(self, nb_parts: int) -> None:
        if nb_parts != self.nb_inputs:
            raise ValueError(f"MultiInputProcessor(nb_inputs={self.nb_inputs}) got observations of {nb_parts} part(s).")

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments."""
        return {**super().get_config(), "nb_inputs": self.nb_inputs}


@register
class WhiteningNormalizerProcessor(Processor):
    """Shifts and scales states to mean 0 and standard deviation 1, by running statistics of the states seen.

    Statistics are kept for every position of the window and every part of a `Dict` or `Tuple` observation, and
    cover all states that the network is shown, in acting and in training, as in keras-rl: each env step of every lane
    once, and each batch that is learnt from. `Agent.test` leaves them alone, and `Agent.save` keeps them; a file of
    weights does not.

    Attributes:
        training: While false, states are normalised and not counted.
        normalizer: The `rl.util.WhiteningNormalizer` (`mean`, `std`), or a dict or tuple of them; None before the
            first batch.
    """

    training = True

    def __init__(self) -> None:
        self.normalizer: Any = None
        self._restored: list[dict[str, Any]] | None = None

    def process_state_batch(self, batch: Any) -> Any:
        """Takes a batch ``(B, W, *obs)`` into the statistics and normalises it.

        Returns:
            The batch in its floating type, or float32 where it holds integers.
        """
        if isinstance(batch, list):  # keras-rl's list of states
            batch = np.array(batch)
        if self.normalizer is None:
            self.normalizer = tree_map(_normalizer_for, batch)
            if self._restored is not None:
                self.set_state({"normalizers": self._restored})
        if self.training:
            tree_map(lambda x, normalizer: normalizer.update(x), batch, self.normalizer)
        return tree_map(lambda x, normalizer: normalizer.normalize(x), batch, self.normalizer)

    def get_state(self) -> dict[str, Any]:
        """Returns a snapshot of the statistics, one entry per part of the observation."""
        if self.normalizer is None:
            return {"normalizers": self._restored}
        return {"normalizers": [normalizer.get_state() for normalizer in tree_leaves(self.normalizer)]}

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes on from a `get_state()` snapshot, also before the first batch."""
        self._restored = state["normalizers"]
        if self._restored is None:
            self.normalizer = None
        elif self.normalizer is not None:
            for normalizer, one in zip(tree_leaves(self.normalizer), self._restored, strict=True):
                normalizer.set_state(one)
            self._restored = None


def _normalizer_for(batch: np.ndarray) -> WhiteningNormalizer:
    dtype = batch.dtype if np.issubdtype(batch.dtype, np.floating) else np.float32
    return WhiteningNormalizer(batch.shape[1:], dtype=dtype)
