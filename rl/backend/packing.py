"""Small arrays that travel to a compiled function side by side in one buffer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

# Leaves up to this size travel together: an argument of its own costs 5-50 us whatever is in it.
_PACK_BYTES = 16384
_ALIGNMENT = 64  # of the address, for a tensor to share the memory


class Packing:
    """Which leaves of an input signature are packed into one int32 buffer, and where.

    Args:
        leaves: Arrays as they will come.
        carriers: What is packed: dtypes (`"f8"`) to the ones they travel as, 4 or 8 bytes wide.

    Attributes:
        buffer: The packed leaves, `(words,)` int32.
        separate: Numbers of the leaves that are not.
    """

    def __init__(self, leaves: Sequence[np.ndarray], carriers: Mapping[str, str]):
        self._packed, self.separate, offset = [], [], 0
        for i, leaf in enumerate(leaves):
            carrier = carriers.get(leaf.dtype.str[1:]) if leaf.dtype.isnative else None
            if carrier and leaf.nbytes <= _PACK_BYTES:
                words = leaf.size * (np.dtype(carrier).itemsize // 4)
                self._packed.append((i, slice(offset, offset + words), np.dtype(carrier), leaf.shape, leaf.dtype))
                offset += words
            else:
                self.separate.append(i)
        room = np.zeros(4 * offset + _ALIGNMENT, np.uint8)
        start = -room.ctypes.data % _ALIGNMENT
        self.buffer = room[start : start + 4 * offset].view(np.int32)
        views = [(i, self.buffer[at].view(carrier).reshape(shape)) for i, at, carrier, shape, _ in self._packed]
        self._views = views
        # An integer of 64 bits that travels as one of 32 has to fit.
        narrowed = {i for i, _, carrier, _, dtype in self._packed if dtype.kind in "iu" and dtype.itemsize > 4}
        self._narrowed = [(i, v) for i, v in views if i in narrowed and v.dtype.itemsize == 4]

    def fill(self, leaves: Sequence[np.ndarray]) -> int | None:
        """Writes the leaves into the buffer; returns the number of one that holds integers too large for it."""
        for i, view in self._views:
            view[...] = leaves[i]
        for i, view in self._narrowed:
            if not (view == leaves[i]).all():
                return i
        return None

    def unpacked(self, buffer: Any, separate: Sequence[Any], read: Callable[..., Any]) -> list[Any]:
        """Maps tensors of buffer and separate leaves to those of all leaves; called while compiling.

        Args:
            buffer: Tensor of the buffer.
            separate: Those of the others.
            read: `(words, carrier, dtype, shape) -> tensor`: what these int32 words hold.
        """
        tensors: list[Any] = [None] * (len(self._packed) + len(separate))
        for i, tensor in zip(self.separate, separate, strict=True):
            tensors[i] = tensor
        for i, at, carrier, shape, dtype in self._packed:
            tensors[i] = read(buffer[at], carrier, dtype, shape)
        return tensors
