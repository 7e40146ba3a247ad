"""How NumPy trees travel to a function on JAX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax

from rl.backend.packing import Packing

# What is packed, and the type it travels as; see `Packing`. JAX computes with 32 bits.
CARRIERS = dict.fromkeys(("f2", "f4", "f8"), "f4") | dict.fromkeys(("i8", "i4", "i2", "i1", "u2", "u1", "b1"), "i4")


class Plan(NamedTuple):
    """A function compiled for one input signature.

    Attributes:
        execute: `(donated values, kept values, packed, separate) -> (result, new values)`.
        assigned: Numbers of the state's variables that it assigns; their values are donated.
        read: Of those that it only reads.
        packing: How the leaves travel.
        packed: The buffer, as it is passed.
    """

    execute: Callable
    assigned: list[int]
    read: list[int]
    packing: Packing
    packed: Any


def sharing(buffer: np.ndarray, device: Any) -> Any:
    """Returns a JAX array on the memory of an array, or the array where there is none, or on another device.

    JAX takes it for constant: it may change between calls only, after the results of the last one were read.
    """
    if not len(buffer) or device != jax.local_devices()[0] or device.platform != "cpu":
        return buffer
    shared = jax.dlpack.from_dlpack(buffer)
    buffer[0] = 1 - int(shared[0])
    return shared if int(shared[0]) == buffer[0] else buffer


def read_words(words: Any, carrier: np.dtype, dtype: np.dtype, shape: tuple[int, ...]) -> Any:
    """The elements that int32 words hold; see `Packing.unpacked`."""
    words = words if carrier == np.int32 else lax.bitcast_convert_type(words, carrier)
    return words.reshape(shape) if dtype.itemsize == 8 else words.astype(dtype).reshape(shape)


def arriving(x: Any) -> np.ndarray:
    """What JAX can take: native byte order, floats and integers of at most 32 bits."""
    x = x if isinstance(x, np.ndarray) else np.asarray(x)
    if x.dtype.itemsize < 8 and x.dtype.isnative:
        return x
    dtype = {"f": np.float32, "i": np.int32, "u": np.uint32}.get(x.dtype.kind)
    narrow = x.astype(dtype if x.dtype.itemsize >= 8 and dtype else x.dtype.newbyteorder("="))
    if narrow.dtype.kind in "iu" and not np.array_equal(narrow, x):
        raise ValueError(
            f"JAX computes with integers of 32 bits, and an array of {x.dtype} holds {x.flat[np.argmax(np.abs(x))]}. "
            "Fix: smaller numbers, floats, or KERAS_BACKEND=tensorflow"
        )
    return narrow
