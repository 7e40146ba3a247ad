"""How NumPy trees travel to a TensorFlow function and back at the lowest price per call."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from rl.common.misc_util import tree_map

# Leaves up to this size travel together in one int32 buffer: a tensor of its own costs 5-50 us whatever is in it.
_PACK_BYTES = 16384
_ALIGNMENT = 64
# What is packed, and the type it travels as: 4 bytes wide, or 8 where the upper half of an integer would be lost.
_CARRIER = dict.fromkeys(("f2", "f4", "f8"), "f4") | dict.fromkeys(("i4", "i2", "i1", "u2", "u1", "b1"), "i4")
_CARRIER |= {"i8": "i8", "u8": "u8", "u4": "u4"}


class Plan:
    """How the leaves of one input signature travel: which are packed, where, and the function traced for them."""

    def __init__(self, function: Callable, args: tuple, leaves: Sequence[np.ndarray], jit_compile: bool):
        packed, self.separate, offset = [], [], 0
        for i, leaf in enumerate(leaves):
            carrier = _CARRIER.get(leaf.dtype.str[1:])
            if carrier and leaf.nbytes <= _PACK_BYTES:
                words = leaf.size * (np.dtype(carrier).itemsize // 4)
                packed.append((i, slice(offset, offset + words), carrier, leaf.shape, leaf.dtype))
                offset += words
            else:
                self.separate.append(i)
        self.buffer = _aligned(offset)
        self.views = [(i, self.buffer[at].view(carrier).reshape(shape)) for i, at, carrier, shape, _ in packed]

        def unpacked(buffer: tf.Tensor, *separate: tf.Tensor) -> Any:
            tensors: list[Any] = [None] * len(leaves)
            for i, tensor in zip(self.separate, separate, strict=True):
                tensors[i] = tf.cast(tensor, tf.float32) if tensor.dtype == tf.float64 else tensor
            for i, at, carrier, shape, dtype in packed:
                piece = buffer[at]
                if carrier != "i4":
                    pair = tf.reshape(piece, (-1, 2)) if carrier in ("i8", "u8") else piece
                    piece = tf.bitcast(pair, np.dtype(carrier))
                if dtype != np.dtype(carrier) and dtype != np.float64:
                    piece = tf.cast(piece, dtype)
                tensors[i] = tf.reshape(piece, shape)
            return function(*tf.nest.pack_sequence_as(args, tensors))

        signature = [tf.TensorSpec(self.buffer.shape, tf.int32)]
        signature += [tf.TensorSpec(leaves[i].shape, tf.as_dtype(leaves[i].dtype)) for i in self.separate]
        concrete = tf.function(unpacked, jit_compile=jit_compile, autograph=False).get_concrete_function(*signature)
        number = itertools.count()
        # Where each output stands among the flat ones, which leave out None and take dicts by sorted keys.
        self.outputs = tf.nest.map_structure(lambda x: None if x is None else next(number), concrete.structured_outputs)
        self.captured = list(concrete.captured_inputs)
        self.concrete = concrete  # the graph lives as long as this object
        self.execute = _direct(concrete)
        self.tensor = _sharing(self.buffer)

    def __call__(self, leaves: Sequence[np.ndarray]) -> Any:
        """Runs the function on the leaves; returns the tree of its outputs as NumPy arrays."""
        for i, view in self.views:
            view[...] = leaves[i]
        # Given the dtype, a constant is made in half the time.
        separate = [tf.constant(leaves[i], leaves[i].dtype) for i in self.separate]
        packed = tf.constant(self.buffer, tf.int32) if self.tensor is None else self.tensor
        # `numpy` copies, so that nothing which leaves here is overwritten by the next call.
        flat = self.execute([packed, *separate, *self.captured])
        return tree_map(lambda i: None if i is None else flat[i].numpy(), self.outputs)


def _aligned(nb_words: int) -> np.ndarray:
    """Returns int32 zeros at an address that TensorFlow takes for a tensor's."""
    room = np.zeros(4 * nb_words + _ALIGNMENT, np.uint8)
    start = -room.ctypes.data % _ALIGNMENT
    return room[start : start + 4 * nb_words].view(np.int32)


def _sharing(buffer: np.ndarray) -> tf.Tensor | None:
    """Returns a tensor on the memory of an array, or None where a tensor would be a copy or on another device.

    To make a tensor costs 5 us in a benchmark and 45 us in training, where everything else has been in the cache since.
    """
    try:
        tensor = tf.experimental.dlpack.from_dlpack(buffer.__dlpack__())
        buffer[0] = 1
        shares = tensor.device == tf.constant(buffer).device and int(tensor[0]) == 1
        buffer[0] = 2
        shares = shares and int(tensor[0]) == 2
    except Exception:  # of whatever kind: an optimisation that is not to be had
        return None
    return tensor if shares else None


def _direct(concrete: Any) -> Callable[[list[Any]], list[Any]]:
    """Returns what runs a function on flat tensors, without the layers that bind arguments and look for gradient tapes.

    Those cost 100 of 270 us, on every call. TensorFlow's own operations run this way, but it promises nothing about the
    names; where they are gone the function's usual entrance serves.
    """
    function = concrete.inference_fn
    try:
        from tensorflow.python.eager import context, execute

        bound = context.context()
        attributes = tuple(itertools.chain(*bound.function_call_options.as_attrs().items()))
        name, nb_outputs = function.name.decode(), len(function.function_type.flat_outputs)
        quick_execute = execute.quick_execute
    except (ImportError, AttributeError):
        return lambda tensors: function.call_flat(*tensors)
    return lambda tensors: quick_execute(name, nb_outputs, tensors, attributes, bound)
