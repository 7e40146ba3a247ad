"""`rl.ops` against naive twins in NumPy."""

import keras
import numpy as np
import pytest
from keras import ops

from rl import backend
from rl.ops import entry, explained_variance, gae, huber, polyak, standardize, take, weighted_mean, weights_of
from tests.backends import value_and_gradient
from tests.policy_gradient_twin import naive_gae


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
    def loss(values):
        return ops.sum(take(values, np.array([2, 0])) * np.array([3.0, 5.0], "float32"))

    assert value_and_gradient(loss, np.ones((2, 3)))[1].tolist() == [[0, 0, 3], [5, 0, 0]]
    assert take(ops.ones((2, 3), "float16"), [0, 0]).dtype == "float16"


@pytest.mark.parametrize("delta", [0.5, 1.0, 10.0, float("inf")])
def test_huber(delta):
    error = np.array([-100, -1.5, -1, -0.5, -0.1, 0, 0.1, 0.5, 1, 1.5, 100], "float32")
    expected = [0.5 * e * e if abs(e) <= delta else delta * (abs(e) - 0.5 * delta) for e in error.tolist()]
    np.testing.assert_allclose(ops.convert_to_numpy(huber(error, delta)), expected, rtol=1e-6)


@pytest.mark.parametrize("delta", [0.5, 1.0, float("inf")])
def test_the_gradient_of_huber_is_the_clipped_error(delta):
    error = np.array([-1e6, -2.0, -0.2, 0.0, 0.2, 2.0, 1e6], "float32")
    gradient = value_and_gradient(lambda x: huber(x, delta), error)[1]
    np.testing.assert_allclose(gradient, np.clip(error, -delta, delta), rtol=1e-6)


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


# ---- advantages ---------------------------------------------------------------------------------------------------


def random_rows(seed, shape):
    """Rewards, values, values of successors, and flags of T steps of N lanes."""
    rng = np.random.default_rng(seed)
    reward, value0, value1 = (rng.normal(size=shape).astype("float32") for _ in range(3))
    terminated, truncated = rng.random(shape) < 0.15, rng.random(shape) < 0.15
    valid = rng.random(shape) < 0.8
    # A row that is no transition has no flag, except where a lane was lost: that ends the episode.
    terminated &= valid
    return reward, value0, value1, terminated, terminated | truncated, valid


def in_numpy(function, *arguments):
    return ops.convert_to_numpy(function(*arguments))


@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("steps", [1, 5, 128])
@pytest.mark.parametrize("seed", range(4))
def test_gae_is_the_sum_over_later_errors(steps, lanes, seed):
    rows = random_rows(seed, (steps, lanes))
    got = in_numpy(gae, *rows, 0.99, 0.95)
    assert got.dtype == np.float32 and got.shape == (steps, lanes)
    np.testing.assert_allclose(got, naive_gae(*rows, 0.99, 0.95), atol=1e-5)
    assert (got[~rows[-1]] == 0).all()


@pytest.mark.parametrize("jit_compile", [False, True])
def test_gae_compiled(jit_compile):
    rows = random_rows(7, (128, 3))
    compiled = backend.compile_function(lambda *rows: gae(*rows, 0.9, 0.8), [], jit_compile=jit_compile)
    np.testing.assert_allclose(compiled(*rows), naive_gae(*rows, 0.9, 0.8), atol=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_gae_at_lambda_0_is_the_one_step_error(seed):
    reward, value0, value1, terminated, ended, valid = rows = random_rows(seed, (40, 3))
    delta = np.where(valid, reward + 0.9 * value1 * ~terminated - value0, 0)
    np.testing.assert_allclose(in_numpy(gae, *rows, 0.9, 0.0), delta, atol=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_gae_at_lambda_1_is_the_discounted_return_minus_the_value(seed):
    gamma = 0.9
    reward, value0, value1, terminated, ended, valid = random_rows(seed, (40, 3))
    valid[:] = True
    value0[1:] = np.where(ended[:-1], value0[1:], value1[:-1])  # the successor is the next state, where there is one
    expected = np.zeros((40, 3))
    later = value1[-1].astype(float)  # what follows the rollout
    for t in reversed(range(40)):
        later = np.where(ended[t], value1[t], later)  # a truncated episode is worth its last observation's value
        later = reward[t] + gamma * np.where(terminated[t], 0.0, later)
        expected[t] = later - value0[t]
    got = in_numpy(gae, reward, value0, value1, terminated, ended, valid, gamma, 1.0)
    np.testing.assert_allclose(got, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("cut", "expected"),
    [("truncated", [3.51824, 2.942, 6.1, -0.498, 2.225]), ("terminated", [1.652, 0.35, 2.5, -0.498, 2.225])],
)
def test_gae_of_an_episode_that_ends_in_the_middle(cut, expected):
    reward, value0, value1 = np.array([[1, 0, 2, -1, 3], [0.5, 1, -0.5, 2, 1], [1, -0.5, 4, 1, 0.25]], "float32")
    ended = np.array([0, 0, 1, 0, 0], bool)
    terminated = ended if cut == "terminated" else np.zeros(5, bool)
    columns = [x[:, None] for x in (reward, value0, value1, terminated, ended, np.ones(5, bool))]
    np.testing.assert_allclose(in_numpy(gae, *columns, 0.9, 0.8)[:, 0], expected, atol=1e-5)


def test_gae_with_both_flags_is_gae_of_a_terminal_step():
    reward, value0, value1, _, _, valid = random_rows(0, (6, 2))
    end = np.zeros((6, 2), bool)
    end[2] = True
    once = in_numpy(gae, reward, value0, value1, end, end, valid, 0.9, 0.8)
    other = in_numpy(gae, reward, value0, np.where(end, 1e3, value1).astype("float32"), end, end, valid, 0.9, 0.8)
    np.testing.assert_array_equal(once, other)


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e38])
def test_what_stands_in_rows_that_are_none_does_not_reach_gae(bad):
    rows = random_rows(3, (30, 3))
    reward, value0, value1, terminated, ended, valid = rows
    assert not valid.all()
    poisoned = [np.where(valid, x, np.float32(bad)) for x in (reward, value0, value1)]
    got = in_numpy(gae, *poisoned, terminated, ended, valid, 0.99, 0.95)
    np.testing.assert_array_equal(got, in_numpy(gae, *rows, 0.99, 0.95))


def test_a_terminal_successor_may_have_any_value():
    reward, value0, value1, terminated, ended, valid = rows = random_rows(3, (30, 3))
    value1 = np.where(terminated, np.float32(np.nan), value1)
    got = in_numpy(gae, reward, value0, value1, terminated, ended, valid, 0.99, 0.95)
    np.testing.assert_array_equal(got, in_numpy(gae, *rows, 0.99, 0.95))


# ---- means and spreads ------------------------------------------------------------------------------------------


def masked(seed, size):
    rng = np.random.default_rng(seed)
    values, weight = (3 + 5 * rng.normal(size=size)).astype("float32"), (rng.random(size) < 0.6).astype("float32")
    weight[:2] = 1
    return values, weight


@pytest.mark.parametrize("size", [2, 5, 257])
def test_weighted_mean(size):
    values, weight = masked(size, size)
    np.testing.assert_allclose(in_numpy(weighted_mean, values, weight), values[weight > 0].mean(), rtol=1e-5)
    weight = np.random.default_rng(0).random(size).astype("float32")
    np.testing.assert_allclose(in_numpy(weighted_mean, values, weight), np.average(values, weights=weight), rtol=1e-5)


@pytest.mark.parametrize("size", [2, 5, 257])
def test_standardize(size):
    values, weight = masked(size, size)
    got, used = in_numpy(standardize, values, weight), values[weight > 0].astype(float)
    counted = got[weight > 0].astype(float)
    np.testing.assert_allclose(counted, (used - used.mean()) / used.std(), atol=1e-4)
    assert abs(counted.mean()) < 1e-5 and abs(counted.std() - 1) < 1e-5
    changed = np.where(weight > 0, values, np.float32(1e4))
    np.testing.assert_array_equal(in_numpy(standardize, changed, weight)[weight > 0], got[weight > 0])
    changed[weight == 0] = np.nan
    np.testing.assert_array_equal(in_numpy(standardize, changed, weight)[weight > 0], got[weight > 0])


@pytest.mark.parametrize("size", [2, 3, 7, 64, 1000])
@pytest.mark.parametrize("value", [0.0, 0.1, 1.0, -7.3, 1000.1, 1e6 / 3])
def test_standardized_constants_are_0(value, size):
    # Not only not NaN: the mean of equal float32 numbers may be off by a bit, which must not be scaled up to 1.
    values = np.full(size, value, "float32")
    weight = np.ones(size, "float32")
    np.testing.assert_allclose(in_numpy(standardize, values, weight), np.zeros(size), atol=1e-3)
    weight[1::3] = 0
    if weight.sum() > 1:
        np.testing.assert_allclose(in_numpy(standardize, values, weight)[weight > 0], 0, atol=1e-3)


def test_standardize_with_a_large_offset():
    values = (np.float32(1000.0) + np.arange(9) / np.float32(64)).astype("float32")
    expected = (values.astype(float) - values.mean(dtype=float)) / values.astype(float).std()
    np.testing.assert_allclose(in_numpy(standardize, values, np.ones(9, "float32")), expected, atol=1e-4)


@pytest.mark.parametrize("value", [-3.5, 0.0, 1e4])
def test_one_row_is_left_as_it_is(value):
    assert in_numpy(standardize, np.array([value], "float32"), np.ones(1, "float32")).tolist() == [value]
    weight = np.array([0, 1, 0], "float32")
    assert in_numpy(standardize, np.array([7, value, 9], "float32"), weight)[1] == value


@pytest.mark.parametrize("size", [2, 5, 257])
def test_explained_variance(size):
    target, weight = masked(size, size)
    prediction = (target + np.random.default_rng(1).normal(size=size)).astype("float32")
    used = weight > 0
    expected = 1 - (target - prediction)[used].astype(float).var() / target[used].astype(float).var()
    np.testing.assert_allclose(in_numpy(explained_variance, target, prediction, weight), expected, atol=1e-4)


def test_explained_variance_of_a_perfect_a_shifted_a_constant_and_an_opposite_prediction():
    target, weight = np.arange(5, dtype="float32"), np.ones(5, "float32")
    predictions = [target, target + 3, np.full(5, 7, "float32"), -target]
    got = [float(explained_variance(target, prediction, weight)) for prediction in predictions]
    np.testing.assert_allclose(got, [1, 1, 0, -3], atol=1e-6)


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
@pytest.mark.parametrize("value", [0.0, 0.1, -7.3, 1000.1])
def test_explained_variance_of_a_constant_target_is_not_a_number(value, size):
    prediction = np.random.default_rng(0).normal(size=size).astype("float32")
    got = explained_variance(np.full(size, value, "float32"), prediction, np.ones(size, "float32"))
    assert np.isnan(float(got))


def test_explained_variance_of_a_target_that_is_constant_but_for_rounding_is_not_a_number():
    value = np.random.default_rng(0).normal(size=64).astype("float32")
    target = (np.float32(1.0) - value) + value  # what a reward of 1 in every one-step episode makes
    assert len(set(target.tolist())) > 1
    assert np.isnan(float(explained_variance(target, value, np.ones(64, "float32"))))


def test_take_is_not_disturbed_by_what_it_does_not_pick():
    values = np.array([[1.0, -np.inf, 3.0], [4.0, 5.0, np.nan]], "f4")
    assert ops.convert_to_numpy(take(values, np.array([2, 1]))).tolist() == [3.0, 5.0]


@pytest.mark.parametrize("shape", [(3,), (3, 2), (3, 2, 1, 4)])
def test_entry_is_the_one_at_an_index(shape):
    values = np.arange(np.prod(shape)).reshape(shape).astype("uint8")
    for i in range(3):
        got = ops.convert_to_numpy(entry(ops.convert_to_tensor(values), ops.convert_to_tensor(i)))
        assert got.dtype == np.uint8
        np.testing.assert_array_equal(got, values[i])
