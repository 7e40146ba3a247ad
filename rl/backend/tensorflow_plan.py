"""How NumPy trees travel to a TensorFlow function and back at the lowest price per call."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from rl.backend.packing import Packing
from rl.common.misc_util import tree_map

# What is packed, and the type it travels as: 4 bytes wide, or 8 where the upper half of an integer would be lost.
_CARRIERS = dict.fromkeys(("f2", "f4", "f8"), "f4") | dict.fromkeys(("i4", "i2", "i1", "u2", "u1", "b1"), "i4")
_CARRIERS |= {"i8": "i8", "u8": "u8", "u4": "u4"}


class Plan:
    """How the leaves of one input signature travel: which are packed, where, and the function traced for them."""

    def __init__(self, function: Callable, args: tuple, leaves: Sequence[np.ndarray], jit_compile: bool):
        self.packing = packing = Packing(leaves, _CARRIERS)

        def unpacked(buffer: tf.Tensor, *separate: tf.Tensor) -> Any:
            wide = [tf.cast(x, tf.float32) if x.dtype == tf.float64 else x for x in separate]
            return function(*tf.nest.pack_sequence_as(args, packing.unpacked(buffer, wide, _read)))

        signature = [tf.TensorSpec(packing.buffer.shape, tf.int32)]
        signature += [tf.TensorSpec(leaves[i].shape, tf.as_dtype(leaves[i].dtype)) for i in packing.separate]
        concrete = tf.function(unpacked, jit_compile=jit_compile, autograph=False).get_concrete_function(*signature)
        number = itertools.count()
        # Where each output stands among the flat ones, which leave out None and take dicts by sorted keys.
        self.outputs = tf.nest.map_structure(lambda x: None if x is None else next(number), concrete.structured_outputs)
        self.captured = list(concrete.captured_inputs)
        self.concrete = concrete  # the graph lives as long as this object
        self.execute = _direct(concrete)
        self.tensor = _sharing(packing.buffer)

    def __call__(self, leaves: Sequence[np.ndarray]) -> Any:
        """Runs the function on the leaves; returns the tree of its outputs as NumPy arrays."""
        self.packing.fill(leaves)
        # Given the dtype, a constant is made in half the time.
        separate = [tf.constant(leaves[i], leaves[i].dtype) for i in self.packing.separate]
        packed = tf.constant(self.packing.buffer, tf.int32) if self.tensor is None else self.tensor
        # `numpy` copies, so that nothing which leaves here is overwritten by the next call.
        flat = self.execute([packed, *separate, *self.captured])
        return tree_map(lambda i: None if i is None else flat[i].numpy(), self.outputs)


def _read(words: tf.Tensor, carrier: np.dtype, dtype: np.dtype, shape: tuple[int, ...]) -> tf.Tensor:
    """The elements that int32 words hold; see `Packing.unpacked`."""
    if carrier != np.int32:
        words = tf.bitcast(tf.reshape(words, (-1, 2)) if carrier.itemsize == 8 else words, carrier)
    if dtype not in (carrier, np.float64):  # which becomes float32
        words = tf.cast(words, dtype)
    return tf.reshape(words, shape)


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
