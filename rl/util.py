"""Small helpers that several modules share: random streams, cloning, the Huber loss, running whitening."""

from __future__ import annotations

from typing import Any

import numpy as np


class RandomStream:
    """Mixin that gives an object its own random stream.

    The stream is seeded from NumPy's global generator when it is first used, so `np.random.seed(123)` at the top
    of a script decides every later draw, and no object disturbs the draws of another one. Nothing has to be set up
    in `__init__`: subclasses that never call `super().__init__()` work too.
    """

    _rng: np.random.Generator | None = None

    @property
    def rng(self) -> np.random.Generator:
        """The `numpy.random.Generator` of this object. Assign a generator or an integer seed to replace it."""
        if self._rng is None:
            self._rng = np.random.default_rng(np.random.randint(0, 2**31, size=4))
        return self._rng

    @rng.setter
    def rng(self, value: np.random.Generator | int) -> None:
        self._rng = np.random.default_rng(value)

    def get_random_state(self) -> dict[str, Any]:
        """Returns a snapshot of the random stream (JSON-serialisable), which seeds the stream if that is still due."""
        return self.rng.bit_generator.state

    def set_random_state(self, state: dict[str, Any]) -> None:
        """Puts the random stream back to a snapshot.

        Args:
            state: What `get_random_state` returned.

        Raises:
            ValueError: If `state` is not such a snapshot.
        """
        if not isinstance(state, dict) or not hasattr(np.random, str(state.get("bit_generator"))):
            raise ValueError(f"Expected a snapshot taken with get_random_state(), got {state!r}.")
        bit_generator = getattr(np.random, state["bit_generator"])(0)
        bit_generator.state = state
        self._rng = np.random.Generator(bit_generator)
