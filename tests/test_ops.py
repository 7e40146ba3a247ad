"""`rl.ops` against naive twins in NumPy."""

import keras
import numpy as np
import pytest
from keras import ops

from rl.ops import huber, polyak, take, weights_of


@pytest.mark.parametrize("shape", [(1, 1), (5, 3), (32, 4)])
@pytest.mark.parametrize("dtype", ["int32", "int64", "uint8"])
def test_take_picks_one_entry_per_row(shape, dtype):
    rng = np.random.default_rng(0)
    values = rng.normal(size=shape).astype("float32")
    index = rng.integers(shape[1], size=shape[0]).astype(dtype)
    picked = ops.convert_to_numpy(take(values, index))
    assert picked.shape == (shape[0],)
    assert picked.tolist() == [values[b, index[b]] for b in range(shape[0])]


def test_take_keeps_the_dtype_and_lets_the_gradient_reach_the_taken_entry_only():
    import tensorflow as tf

    values = tf.ones((2, 3))
    with tf.GradientTape() as tape:
        tape.watch(values)
        loss = ops.sum(take(values, np.array([2, 0])) * np.array([3.0, 5.0], "float32"))
    assert tf.convert_to_tensor(tape.gradient(loss, values)).numpy().tolist() == [[0, 0, 3], [5, 0, 0]]
    assert take(ops.ones((2, 3), "float16"), [0, 0]).dtype == "float16"


@pytest.mark.parametrize("delta", [0.5, 1.0, 10.0, float("inf")])
def test_huber(delta):
    error = np.array([-100, -1.5, -1, -0.5, -0.1, 0, 0.1, 0.5, 1, 1.5, 100], "float32")
    expected = [0.5 * e * e if abs(e) <= delta else delta * (abs(e) - 0.5 * delta) for e in error.tolist()]
    np.testing.assert_allclose(ops.convert_to_numpy(huber(error, delta)), expected, rtol=1e-6)


@pytest.mark.parametrize("delta", [0.5, 1.0, float("inf")])
def test_the_gradient_of_huber_is_the_clipped_error(delta):
    import tensorflow as tf

    error = tf.constant([-1e6, -2.0, -0.2, 0.0, 0.2, 2.0, 1e6])
    with tf.GradientTape() as tape:
        tape.watch(error)
        loss = huber(error, delta)
    np.testing.assert_allclose(tape.gradient(loss, error), np.clip(error, -delta, delta), rtol=1e-6)


@pytest.mark.parametrize("tau", [0.0, 0.01, 0.25, 1, 1.0])
def test_polyak_moves_by_tau(tau):
    target = [keras.Variable(np.full(3, 2.0, "float32")), keras.Variable(np.zeros((2, 2), "float32"))]
    source = [keras.Variable(np.arange(3, dtype="float32")), keras.Variable(np.ones((2, 2), "float32"))]
    old = [v.numpy().copy() for v in target]
    polyak(target, source, tau)
    for t, o, s in zip(target, old, source, strict=True):
        np.testing.assert_allclose(t.numpy(), (1 - tau) * o + tau * s.numpy(), atol=1e-7)
    assert source[0].numpy().tolist() == [0, 1, 2]


def test_polyak_copies_what_is_no_float():
    target = [keras.Variable(np.array([3, 4]), dtype="int32"), keras.Variable(np.array(7), dtype="uint32")]
    source = [keras.Variable(np.array([9, 8]), dtype="int32"), keras.Variable(np.array(1), dtype="uint32")]
    polyak(target, source, 0.01)
    assert target[0].numpy().tolist() == [9, 8] and int(target[1].numpy()) == 1


def test_polyak_refuses_lists_of_different_lengths():
    with pytest.raises(ValueError):
        polyak([keras.Variable(np.zeros(1))], [], 0.5)


def test_weights_of_pairs_up_weights_with_moving_statistics_and_without_seeds():
    def net():
        layers = [keras.layers.Dense(2), keras.layers.BatchNormalization(), keras.layers.Dropout(0.1)]
        return keras.Sequential([keras.layers.Input((3,)), *layers])

    a, b, c, d = net(), net(), net(), net()
    target, source = weights_of([(a, b), (c, d)])
    assert [id(v) for v in target] == [id(v) for v in [*a.weights, *c.weights]]
    assert [id(v) for v in source] == [id(v) for v in [*b.weights, *d.weights]]
    assert len(target) == 12
    assert weights_of([]) == ([], [])
