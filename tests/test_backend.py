"""The seam to the backend: what goes in and out of compiled functions, gradient steps, loops, refusals of XLA.

The same tests for every backend; those of one alone say so.
"""

import os
import pathlib
import re
import subprocess
import sys
import warnings

import keras
import numpy as np
import pytest
from keras import ops

from rl import backend
from tests.backends import NAME, jax_only, tensorflow_only

ROOT = pathlib.Path(__file__).parents[1]
PACK_BYTES = 16384  # up to this size arrays travel to TensorFlow in one buffer


def compiled(function, state=(), jit_compile=False, **options):
    return backend.compile_function(function, state, jit_compile=jit_compile, **options)


# ---- NumPy in, NumPy out ------------------------------------------------------------------------------------------

VALUES = {
    "bool": [True, False, True],
    "int8": [-128, 0, 127],
    "uint8": [0, 1, 255],
    "int16": [-(2**15), 0, 2**15 - 1],
    "uint16": [0, 1, 2**16 - 1],
    "int32": [-(2**31), 0, 2**31 - 1],
    "uint32": [0, 1, 2**32 - 1],
    "int64": [-(2**63), 2**40 + 1, 2**63 - 1],
    "uint64": [0, 2**40 + 1, 2**64 - 1],
    "float16": [-65504.0, 6e-8, 0.5],
    "float32": [-3.4e38, 1e-38, 0.1],
}


@pytest.mark.parametrize("dtype", VALUES)
@pytest.mark.parametrize("size", [3, 3 * 4096], ids=["packed", "separate"])
def test_dtypes_and_values_arrive_unchanged(dtype, size):
    x = np.resize(np.array(VALUES[dtype], dtype), size).reshape(3, -1)
    arrives = dtype
    if NAME == "jax" and x.itemsize == 8:  # has 32 bits, and says so where that is not enough
        arrives = dtype.replace("64", "32")
        with pytest.raises(ValueError, match=f"32 bits, and an array of {dtype} holds"):
            compiled(lambda t: t)(x)
        x = np.clip(x, np.iinfo(arrives).min, np.iinfo(arrives).max)
    seen = []

    def identity(t):
        seen.append((keras.backend.standardize_dtype(t.dtype), tuple(t.shape)))
        return t

    for function in (compiled(identity), compiled(identity, run_eagerly=True)):
        y = function(x)
        assert y.dtype == arrives and y.shape == x.shape
        np.testing.assert_array_equal(y, x)
    assert set(seen) == {(arrives, x.shape)}


@pytest.mark.parametrize("size", [2, 10_000])
@pytest.mark.parametrize("eager", [False, True])
def test_float64_arrives_as_float32(size, eager):
    y = compiled(lambda t: t * 1, run_eagerly=eager)(np.full(size, 0.1))
    assert y.dtype == np.float32
    np.testing.assert_array_equal(y, np.full(size, 0.1, np.float32))


def test_special_floats_survive_packing():
    x = np.array([np.nan, np.inf, -np.inf, -0.0], np.float32)
    y = compiled(lambda t: t)(x)
    np.testing.assert_array_equal(y, x)
    assert np.signbit(y[3])


@tensorflow_only
def test_where_tensorflows_own_way_to_run_operations_is_gone_the_usual_one_serves(monkeypatch):
    from tensorflow.python.eager import execute

    variable = keras.Variable(1.0)

    def function(x):
        variable.assign(variable + ops.sum(x))
        return {"twice": 2 * x, "none": None}, variable + 0

    x = np.arange(3, dtype="float32")
    direct = compiled(function, [variable])(x)
    monkeypatch.delattr(execute, "quick_execute")
    usual = compiled(function, [variable])(x)
    np.testing.assert_array_equal(direct[0]["twice"], usual[0]["twice"])
    assert direct[0]["none"] is usual[0]["none"] is None
    assert (direct[1], usual[1]) == (4.0, 7.0)


@pytest.mark.parametrize("nbytes", [PACK_BYTES - 4, PACK_BYTES, PACK_BYTES + 4])
def test_arrays_around_the_packing_limit(nbytes):
    x = np.arange(nbytes // 4, dtype=np.int32)
    function = compiled(lambda a, b, c: (a + 1, b, c))
    for shift in (0, 5):
        a, b, c = function(x + shift, np.int64(2**30 + shift), np.array([True, False]))
        np.testing.assert_array_equal(a, x + shift + 1)
        assert b == 2**30 + shift and c.tolist() == [True, False]
    assert function.nb_traces == 1


def test_all_kinds_of_arrays_travel_together_in_any_order():
    rng = np.random.default_rng(0)
    parts = [np.array(v, d) for d, v in VALUES.items() if NAME != "jax" or "64" not in d] + [
        rng.normal(size=(70, 80)).astype("f4"),
        np.zeros((0, 3), "f4"),
    ]
    for order in (range(len(parts)), rng.permutation(len(parts)), rng.permutation(len(parts))):
        given = [parts[i] for i in order]
        for got, x in zip(compiled(lambda *t: t)(*given), given, strict=True):
            np.testing.assert_array_equal(got, x)


def test_trees_keep_their_structure_and_dicts_their_keys():
    tree = {"b": np.ones((2, 1), "f4"), "a": (np.zeros(3, "u1"), {"c": np.int32(4)})}

    def function(t, n):
        return {"sum": t["b"] + 1, "rest": (t["a"][0], t["a"][1]["c"] + n)}

    f = compiled(function)
    for given in (tree, dict(reversed(tree.items()))):
        out = f(given, np.int32(3))
        assert out["sum"].tolist() == [[2], [2]] and out["rest"][0].dtype == np.uint8 and out["rest"][1] == 7
    assert f.nb_traces == 1


def test_strided_and_foreign_endian_arrays_and_python_scalars():
    f = compiled(lambda a, b, c, d: (a, b, c, d))
    strided, swapped = np.arange(12, dtype="f4").reshape(3, 4).T[::2], np.arange(3, dtype=">i4")
    a, b, c, d = f(strided, swapped, 3, True)
    np.testing.assert_array_equal(a, strided)
    assert b.tolist() == [0, 1, 2] and c == 3 and d


def test_a_function_without_arguments_updates_its_state():
    v = keras.Variable(np.zeros(2, "float32"))

    def bump():
        v.assign(v + 1)

    f = compiled(bump, [v])
    for expected in (1, 2, 3):
        f()
        assert v.numpy().tolist() == [expected] * 2
    assert f.nb_traces == 1


def test_a_result_is_not_overwritten_by_the_next_call():
    given, v = np.ones(20_000, "f4"), keras.Variable(np.zeros(20_000, "float32"))

    def function(x):
        v.assign(x)
        return x, x[:3]

    f = compiled(function, [v])
    whole, part = f(given)
    given[:] = 0  # the caller may use its arrays again
    assert v.numpy().all()
    f(given)
    assert whole.all() and part.tolist() == [1, 1, 1]
    whole += 1  # and those that it got
    assert not v.numpy().any()


@pytest.mark.parametrize("jit", [False, True])
def test_one_trace_per_signature(jit):
    traced = []

    def function(x, n):
        traced.append(1)
        return x * ops.cast(n, x.dtype)

    f = compiled(function, jit_compile=jit)
    for n in range(4):  # values are no part of the signature
        assert f(np.ones(2, "f4"), np.int32(n)).tolist() == [n, n]
    assert f.nb_traces == 1
    f(np.ones(3, "f4"), np.int32(1))
    f(np.ones(3, "f2"), np.int32(1))
    f(np.ones(2, "f4"), np.int32(1))
    assert f.nb_traces == len(traced) == 3


def test_to_numpy_converts_every_leaf():
    tree = backend.to_numpy({"a": ops.convert_to_tensor(1), "b": (keras.Variable([1.0]), 2.5)})
    assert all(isinstance(x, np.ndarray) or np.isscalar(x) for x in (tree["a"], *tree["b"]))
    assert tree["b"][0].tolist() == [1.0] and tree["b"][1] == 2.5


# ---- state ---------------------------------------------------------------------------------------------------------


def test_state_is_read_written_and_assigned_outside_in_any_order():
    a, b, c = (keras.Variable(np.full(3, x, "float32")) for x in (1, 2, 3))

    def function(x):
        old = a + 0
        a.assign(a + x)
        a.assign(a * 2)  # twice in one call
        b.assign(c)  # two variables of one value
        return old, a + 0, b + c

    first = compiled(function, [a, b, c])
    second = compiled(lambda: a.assign(c), like=first)  # returns what it assigned
    third = compiled(lambda x: ops.sum(x) * c, like=first)
    old, new, both = first(np.ones(3, "f4"))
    assert (old[0], new[0], both[0]) == (1, 4, 6)
    assert [v.numpy()[0] for v in (a, b, c)] == [4, 3, 3]
    kept = [a.numpy(), *keras.tree.map_structure(np.asarray, [b.numpy()])]
    c.assign(np.full(3, 7, "float32"))
    a.assign(c)  # outside, too
    assert first(np.zeros(3, "f4"))[1][0] == 14
    assert [v.numpy()[0] for v in (a, b, c)] == [14, 7, 7]
    assert third(np.ones(2, "f4"))[0] == 14
    for _ in range(3):
        second()
        first(np.ones(3, "f4"))
    assert [v.numpy()[0] for v in (a, b, c)] == [16, 7, 7]
    assert [x[0] for x in kept] == [4, 3]  # copies that were taken stay what they were


def test_weights_taken_and_given_back_survive_the_calls_between():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3), keras.layers.BatchNormalization()])
    f = compiled(lambda x: [v.assign(v + x) for v in model.weights] and None, model.variables)
    taken = model.get_weights()
    copies = [w.copy() for w in taken]
    f(np.float32(1))
    model.set_weights(taken)
    f(np.float32(1))
    f(np.float32(1))
    for now, then, copy in zip(model.get_weights(), taken, copies, strict=True):
        np.testing.assert_array_equal(then, copy)
        np.testing.assert_allclose(now, copy + 2, rtol=1e-6)


def test_variables_that_nobody_listed_are_read_and_updated_all_the_same():
    listed, count, factor = (keras.Variable(np.float32(x)) for x in (0, 0, 2))

    def function(n, x):
        def step(i, total):
            count.assign(count + 1)
            listed.assign(listed + factor * x)
            return total + count

        return backend.repeat(n, 3, step, ops.zeros(())), count + 0

    f = compiled(function, [listed])
    assert f(np.int32(2), np.float32(1)) == (3, 2)
    factor.assign(5.0)
    assert f(np.int32(3), np.float32(1)) == (12, 5)
    assert (count.numpy(), listed.numpy(), factor.numpy()) == (5, 19, 5)


def test_random_layers_draw_anew_in_every_call_and_step():
    drop = keras.layers.Dropout(0.5, seed=1)
    drop.build((1, 64))

    def function(x):
        def step(i, carry):
            return carry + ops.one_hot(i, 2)[:, None] * drop(x, training=True)

        return backend.repeat(2, 2, step, ops.zeros((2, 64)))

    f = compiled(function, drop.variables)
    rows = np.concatenate([f(np.ones((1, 64), "f4")) for _ in range(2)])
    assert len(np.unique(rows, axis=0)) == 4
    assert set(np.unique(rows)) == {0, 2}


# ---- XLA refuses ----------------------------------------------------------------------------------------------------


def refused(x):
    import tensorflow as tf

    y = tf.py_function(lambda t: t + 1, [x], x.dtype)
    y.set_shape(x.shape)
    return y


def refused_strings(x):
    import tensorflow as tf

    return tf.strings.to_number(tf.strings.as_string(x)) + 1.0


@tensorflow_only
@pytest.mark.parametrize("op", [refused, refused_strings])
def test_what_xla_refuses_runs_as_a_plain_graph_with_one_warning_and_one_update(op):
    v = keras.Variable(np.zeros((), "float32"))

    def function(x):
        v.assign(v + 1)  # must not happen twice: once under XLA, once without
        return op(x)

    f = compiled(function, [v], jit_compile=True)
    with pytest.warns(RuntimeWarning, match="XLA cannot compile.*plain TensorFlow graph") as caught:
        assert f(np.ones(2, "f4")).tolist() == [2, 2]
    assert len(caught) == 1
    assert v.numpy() == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        f(np.ones(2, "f4"))
        f(np.ones(3, "f4"))
    assert v.numpy() == 3 and f.nb_traces == 2


@tensorflow_only
def test_functions_of_one_agent_share_the_refusal():
    first = compiled(refused, jit_compile=True)
    second = compiled(refused, like=first)
    with pytest.warns(RuntimeWarning) as caught:
        first(np.ones(2, "f4"))
        second(np.ones(2, "f4"))
    assert len(caught) == 1
    assert "PyFunc" in str(caught[0].message)  # says which operation it was


@tensorflow_only
def test_an_error_of_the_function_itself_is_not_blamed_on_xla():
    import tensorflow as tf

    def wrong(x):
        tf.debugging.assert_less(x, 1.0)
        return x

    f = compiled(wrong, jit_compile=False)
    with pytest.raises(tf.errors.InvalidArgumentError), warnings.catch_warnings():
        warnings.simplefilter("error")
        f(np.ones(2, "f4"))


def test_a_python_error_while_tracing_comes_through_and_the_next_call_works():
    broken = [True]

    def function(x):
        if broken:
            raise KeyError("mine")
        return x

    f = compiled(function, jit_compile=True)
    with pytest.raises(KeyError, match="mine"):
        f(np.ones(2, "f4"))
    broken.clear()
    assert f(np.ones(2, "f4")).tolist() == [1, 1]


# ---- one gradient step ----------------------------------------------------------------------------------------------


def test_minimize_takes_one_step_of_the_optimizer():
    w = keras.Variable(np.array([1.0, 2.0], "float32"))
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build([w])
    f = compiled(lambda x: backend.minimize(lambda: (ops.sum(x * w * w), {"w": w + 0}), [w], optimizer), [w])
    loss, aux = f(np.array([1.0, 3.0], "f4"))
    assert loss == 13.0 and aux["w"].tolist() == [1, 2]
    np.testing.assert_allclose(w.numpy(), [1 - 0.1 * 2, 2 - 0.1 * 12], rtol=1e-6)
    assert int(optimizer.iterations) == 1


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("bad", ["loss", "infinite loss", "gradient"])
def test_minimize_changes_nothing_where_loss_or_gradient_is_not_finite(bad, jit):
    w, mean = keras.Variable(np.array([0.0, 2.0], "float32")), keras.Variable(np.zeros(1, "float32"))
    optimizer = keras.optimizers.Adam(0.1)
    optimizer.build([w])
    state = [w, mean, *optimizer.variables]

    def loss_fn(x):
        mean.assign(mean + x)  # as batch normalisation does
        loss = {"loss": ops.sum(w * x), "infinite loss": ops.sum(w * x), "gradient": ops.sum(ops.sqrt(w))}[bad]
        return loss, ops.sum(x)

    f = compiled(lambda x: backend.minimize(lambda: loss_fn(x), [w], optimizer, [mean]), state, jit_compile=jit)
    poison = {"loss": np.nan, "infinite loss": np.inf, "gradient": 1.0}[bad]
    before = [v.numpy().copy() for v in state]
    loss, _ = f(np.array([poison], "f4"))
    assert np.isnan(loss)
    for v, old in zip(state, before, strict=True):
        np.testing.assert_array_equal(v.numpy(), old)
    if bad != "gradient":
        loss, aux = f(np.ones(1, "f4"))
        assert loss == 2.0 and aux == 1.0 and mean.numpy() == 1 and int(optimizer.iterations) == 1


def test_minimize_scales_a_gradient_down_to_the_largest_norm():
    w = keras.Variable(np.zeros(2, "float32"))
    for optimizer, scale in ((keras.optimizers.SGD(1.0), 1), (keras.optimizers.SGD(1.0, loss_scale_factor=8.0), 8)):
        optimizer.build([w])

        def function(x, optimizer=optimizer):
            return backend.minimize(lambda: (ops.sum(w * x), None), [w], optimizer, max_norm=0.5)[0]

        f = compiled(function, [w, *optimizer.variables])
        for x, step in ((np.array([3.0, 4.0], "f4"), [0.3, 0.4]), (np.array([0.3, 0.0], "f4"), [0.3, 0])):
            w.assign(np.zeros(2, "float32"))
            f(x)
            np.testing.assert_allclose(w.numpy(), -np.array(step), rtol=1e-6, err_msg=str(scale))


def test_minimize_keeps_what_the_loss_assigns_and_applies_constraints_and_regularisers():
    dense = keras.layers.Dense(
        *(1,),
        use_bias=False,
        kernel_initializer="ones",
        kernel_constraint=keras.constraints.NonNeg(),
        kernel_regularizer=keras.regularizers.L2(0.5),
        activity_regularizer=keras.regularizers.L2(1.0),
    )
    model = keras.Sequential([keras.Input((2,)), dense])
    metric, optimizer = keras.metrics.Mean(), keras.optimizers.SGD(1.0)
    optimizer.build(model.trainable_variables)

    def loss_fn(x):
        y = model(x, training=True)
        metric.update_state(y)
        return ops.sum(y) + sum(model.losses), {"y": y}

    def function(x):
        return backend.minimize(lambda: loss_fn(x), model.trainable_variables, optimizer)

    for eager in (False, True):
        dense.kernel.assign(np.ones((2, 1), "float32"))
        metric.reset_state()
        f = compiled(function, [*model.variables, *optimizer.variables, *metric.variables], run_eagerly=eager)
        loss, aux = f(np.array([[1.0, -4.0]], "f4"))
        # y = -3; the activity's square is 9, the kernel's half 1; derivatives 1 + 2 y times x, and the kernel itself
        assert aux["y"] == -3 and loss == -3 + 9 + 1
        assert metric.result() == -3
        np.testing.assert_allclose(dense.kernel.numpy(), [[1 - (-5 + 1)], [0]])  # 1 - (20 + 1) is cut off


def test_minimize_with_variables_that_the_loss_does_not_use_and_sparse_gradients():
    table, unused = keras.Variable(np.ones((4, 2), "float32")), keras.Variable(np.ones(1, "float32"))
    optimizer = keras.optimizers.SGD(1.0)
    optimizer.build([table, unused])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Gradients do not exist")
        loss, _ = backend.minimize(
            lambda: (ops.sum(ops.take(table, np.array([1, 1]), axis=0)), None), [table, unused], optimizer
        )
    assert float(loss) == 4.0
    assert table.numpy().tolist() == [[1, 1], [-1, -1], [1, 1], [1, 1]] and unused.numpy().tolist() == [1]


def test_a_loss_scaling_optimizer_skips_overflowing_steps_by_itself_and_halves_its_scale():
    w = keras.Variable(np.array([1.0], "float32"))
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=4.0)
    optimizer.build([w])
    step = compiled(lambda x: backend.minimize(lambda: (ops.sum(w * x), None), [w], optimizer), [w])
    loss, _ = step(np.array([1e38], "f4"))  # finite, but not four times as large
    assert np.isfinite(loss) and w.numpy() == 1.0
    assert float(optimizer.dynamic_scale) == 2.0
    step(np.array([0.25], "f4"))
    assert w.numpy() == 0.75  # unscaled


# ---- a counted loop -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("jit", [False, True])
def test_repeat_takes_n_steps_of_at_most_kmax_without_retracing(jit):
    v = keras.Variable(np.zeros(6, "float32"))

    def function(n, x):
        def step(i, carry):
            v.assign(v + ops.one_hot(i, 6))
            return (carry[0] + ops.take(x, i, axis=0), carry[1] * 2)

        return backend.repeat(n, 6, step, (ops.zeros(()), ops.ones((), "int32")))

    f = compiled(function, [v], jit_compile=jit)
    x = np.array([1, 10, 100, 1000, 10_000, 100_000], "f4")
    counts = np.zeros(6)
    for n in (6, 1, 0, 3, 6, 2):
        total, doubled = f(np.int32(n), x)
        assert total == x[:n].sum() and doubled == 2**n
        counts[:n] += 1
        assert v.numpy().tolist() == counts.tolist()
    assert f.nb_traces == 1
    assert f(np.int32(9), x)[0] == x.sum()  # never more than kmax


@pytest.mark.parametrize("eager", [False, True])
def test_repeat_ends_early_where_it_is_told_to(eager):
    v = keras.Variable(np.float32(0))

    def function(n, limit):
        def step(i, total):
            v.assign(v + 1)
            return total + ops.cast(i, "float32")

        return backend.repeat(n, 6, step, ops.zeros(()), lambda total: total < limit)

    f = compiled(function, [v], run_eagerly=eager)
    for n, limit, total, nb_steps in ((6, 3.0, 3, 3), (6, 100.0, 15, 6), (2, 3.0, 1, 2), (6, 1.0, 1, 2)):
        v.assign(0.0)
        assert f(np.int32(n), np.float32(limit)) == total
        assert v.numpy() == nb_steps


@pytest.mark.parametrize("kmax, has_loop", [(1, False), (2, True)])
def test_a_single_step_is_compiled_without_a_loop(kmax, has_loop):
    # TensorFlow's XLA on CPUs is ten times slower at the gradients of convolutions within a loop.
    def function(n, x):
        return backend.repeat(n, kmax, lambda i, carry: carry + ops.take(x, i, axis=0), ops.ones(()))

    f = compiled(function, jit_compile=False)
    assert [f(np.int32(1), np.array([x, 100], "f4")) for x in (1, 10, 5)] == [2, 11, 6]
    (plan,) = f._plans.values()
    if NAME == "jax":
        text = plan.execute.lower([], [], plan.packed, []).as_text()
    else:
        text = " ".join(operation.type.lower() for operation in plan.concrete.graph.get_operations())
    assert ("while" in text) == has_loop


def test_what_a_call_returned_is_not_changed_by_the_next_one():
    # Small arguments travel in one buffer, which calls use again and again.
    f = compiled(lambda x, y: (x, ops.reshape(y, (3, 2)), x), jit_compile=False)
    rows = np.arange(6, dtype="f4")
    results = [f(rows + i, rows.astype("i4") * i) for i in range(3)]
    for i, (x, y, again) in enumerate(results):
        assert x.tolist() == again.tolist() == (rows + i).tolist()
        assert y.tolist() == (rows * i).reshape(3, 2).tolist()


def test_small_and_large_leaves_of_all_dtypes_arrive_as_they_are():
    trees = {
        f"{dtype}{size}": np.arange(size).astype(dtype) % 2 if dtype == "?" else np.arange(size).astype(dtype)
        for dtype in ("?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "f2", "f4", "f8")
        for size in (0, 1, 3, 9000)
    }
    f = compiled(lambda tree: tree, jit_compile=False)
    for sign in (1, 3):
        given = {k: (x * sign).astype(x.dtype) for k, x in trees.items()}
        got = f(given)
        for key, x in given.items():
            assert np.array_equal(got[key], x), key
            narrow = {"float64": "float32"} | ({"int64": "int32"} if NAME == "jax" else {})
            assert got[key].dtype == narrow.get(x.dtype.name, x.dtype.name), key


def test_k_steps_in_one_call_equal_k_calls():
    def make():
        w = keras.Variable(np.array([1.0, -2.0], "float32"))
        optimizer = keras.optimizers.Adam(0.1)
        optimizer.build([w])

        def function(n, xs):
            def step(i, carry):
                x = ops.take(xs, i, axis=0)
                return carry + backend.minimize(lambda: (ops.sum(ops.square(w - x)), None), [w], optimizer)[0]

            return backend.repeat(n, xs.shape[0], step, ops.zeros(()))

        return w, compiled(function, [w, *optimizer.variables])

    xs = np.random.default_rng(0).normal(size=(5, 2)).astype("f4")
    (w1, many), (w2, one) = make(), make()
    total = many(np.int32(5), xs)
    singles = sum(one(np.int32(1), x[None]) for x in xs)
    np.testing.assert_allclose(w1.numpy(), w2.numpy(), atol=1e-6)
    np.testing.assert_allclose(total, singles, rtol=1e-5)


def convolutional_network(nb_axes):
    layers = keras.layers
    x = keras.Input((9, 10, 5, 4)[-nb_axes - 1 :])
    y = {1: layers.Conv1D, 2: layers.Conv2D, 3: layers.Conv3D}[nb_axes](4, 3, 2, activation="relu")(x)
    if nb_axes == 2:
        y = layers.Conv2D(4, 2, padding="same", dilation_rate=2, groups=2)(y)
        y = layers.Conv2DTranspose(3, 3, 2)(layers.DepthwiseConv2D(2, padding="same")(y))
    return keras.Model(x, layers.Dense(1)(layers.Flatten()(y)))


@pytest.mark.parametrize("nb_axes", [1, 2, 3])
def test_gradient_steps_on_convolutions_in_a_loop_equal_single_ones(nb_axes):
    model, optimizer = convolutional_network(nb_axes), keras.optimizers.SGD(0.01)
    optimizer.build(model.trainable_variables)

    def function(n, xs):
        def step(i, carry):
            def loss_fn():
                return ops.mean(ops.square(model(ops.take(xs, i, axis=0)) - 1)), None

            return carry + backend.minimize(loss_fn, model.trainable_variables, optimizer)[0]

        return backend.repeat(n, xs.shape[0], step, ops.zeros(()))

    function = compiled(function, [*model.variables, *optimizer.variables])
    rng = np.random.default_rng(0)
    xs = rng.normal(size=(3, 4, *model.input_shape[1:])).astype("f4")
    weights, results = [rng.normal(size=v.shape, scale=0.2) for v in model.variables], []
    for batches in ([xs], xs[:, None]):
        model.set_weights(weights)
        losses = [function(np.int32(len(batch)), batch) for batch in batches]
        results.append([sum(losses), *model.get_weights()])
    for a, b in zip(*results, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)
    assert all(np.any(a != b) for a, b in zip(results[0][1:], weights, strict=True))
    if NAME == "jax":  # XLA has a fast one for one order of the axes, and brings others into it outside of loops only
        plan, _ = function._plans.values()
        assigned, read = ([function._state.values[i] for i in numbers] for numbers in (plan.assigned, plan.read))
        text = plan.execute.lower(assigned, read, plan.packed, [xs] if plan.packing.separate else []).as_text()
        space = ", ".join(str(i) for i in range(nb_axes))
        orders = re.findall(r"stablehlo.convolution.*? dim_numbers = (\S.*?), window", text)
        assert len(orders) >= 2 and set(orders) == {f"[b, {space}, f]x[{space}, i, o]->[b, {space}, f]"}


@jax_only
def test_convolutions_are_put_in_order_wherever_they_stand():
    import jax
    from jax import lax

    from rl.backend.jax_convolutions import with_fast_convolutions

    def convolve(x, w):
        return lax.conv_general_dilated(x, w, (1, 1), "SAME")  # its default: features before space

    def everywhere(x, w):
        x = lax.cond(x[0, 0, 0, 0] > 0, convolve, lambda x, w: -x, x, w)
        x, _ = lax.scan(lambda x, _: (convolve(x, w), None), x, length=2)
        x = jax.checkpoint(convolve)(x, w)
        return {"y": jax.jit(convolve)(x, w), "z": jax.vmap(lambda x: convolve(x[None], w)[0])(x)}

    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(2, 3, 5, 4)).astype("f4"), rng.normal(size=(3, 3, 3, 3)).astype("f4")
    assert "lhs_spec=(0, 1, 2, 3)" in str(jax.make_jaxpr(everywhere)(x, w))
    traced = str(jax.make_jaxpr(with_fast_convolutions(everywhere))(x, w))
    assert traced.count("lhs_spec=(0, 3, 1, 2)") >= 4 and "lhs_spec=(0, 1, 2, 3)" not in traced
    for a, b in zip(*(jax.tree.leaves(f(x, w)) for f in (with_fast_convolutions(everywhere), everywhere)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


# ---- threads, other backends ----------------------------------------------------------------------------------------


def test_set_threads_too_late_says_so():
    ops.zeros(1)
    with pytest.raises(RuntimeError, match="before building a model"):
        backend.set_threads(1, 1)


def run(code, name=NAME):
    environment = os.environ | {"KERAS_BACKEND": name}
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )


@tensorflow_only
def test_set_threads_in_time_on_tensorflow():
    done = run("""
from rl import backend
backend.set_threads(1, 2)
import tensorflow as tf
assert tf.config.threading.get_intra_op_parallelism_threads() == 1
assert tf.config.threading.get_inter_op_parallelism_threads() == 2
""")
    assert done.returncode == 0, done.stderr


@jax_only
@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="counts threads in /proc")
def test_set_threads_in_time_on_jax():
    def nb_threads(n):
        done = run(f"""
import os
from rl import backend
backend.set_threads({n}, {n})
from keras import ops
ops.matmul(ops.ones((500, 500)), ops.ones((500, 500)))
print(sum(open(f"/proc/self/task/{{t}}/comm").read().startswith("tf_XLA") for t in os.listdir("/proc/self/task")))
""")
        assert done.returncode == 0, done.stderr
        return int(done.stdout)

    assert nb_threads(7) - nb_threads(1) >= 6


def test_any_other_backend_raises_one_sentence_that_says_what_to_set():
    done = run("""
import keras
keras.backend.backend = lambda: "torch"
import rl.agents
""")
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: keras-rl3 runs on") and "KERAS_BACKEND is 'torch'" in last
    assert "KERAS_BACKEND=tensorflow" in last and "KERAS_BACKEND=jax" in last


@jax_only
def test_on_jax_tensorflow_is_not_loaded():
    done = run("import sys, rl.agents; sys.exit('tensorflow' in sys.modules)")
    assert done.returncode == 0, done.stderr
