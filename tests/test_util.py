import json
import os
import subprocess
import sys
import textwrap

import keras
import numpy as np
import pytest
from keras import layers

import rl.util
from rl import backend
from rl.util import (
    RandomStream,
    WhiteningNormalizer,
    clone_model,
    clone_optimizer,
    get_object_config,
    huber_loss,
)
from tests.backends import TWO_CPUS


class Stream(RandomStream):
    def __init__(self):
        pass  # as user subclasses do: no super().__init__()


def test_random_stream_is_decided_by_the_global_seed_at_first_use():
    np.random.seed(7)
    first, second = Stream(), Stream()
    a = [first.rng.random(3), second.rng.random(3)]
    first, second = Stream(), Stream()
    np.random.seed(7)  # after construction, before use
    b = [first.rng.random(3), second.rng.random(3)]
    np.testing.assert_array_equal(a, b)
    assert not np.array_equal(a[0], a[1])
    np.random.seed(8)
    assert not np.array_equal(Stream().rng.random(3), a[0])


def test_random_stream_leaves_the_global_stream_alone_after_first_use():
    stream = Stream()
    stream.rng.random()
    np.random.seed(1)
    expected = np.random.random()
    np.random.seed(1)
    stream.rng.random(100)
    assert np.random.random() == expected


def test_random_state_round_trip_through_json():
    stream, other = Stream(), Stream()
    state = json.loads(json.dumps(stream.get_random_state()))
    drawn = stream.rng.random(4)
    for _ in range(2):
        stream.set_random_state(state)
        np.testing.assert_array_equal(stream.rng.random(4), drawn)
    other.set_random_state(state)
    stream.set_random_state(state)
    other.rng.random()
    np.testing.assert_array_equal(stream.rng.random(4), drawn)  # a snapshot is not shared


def test_rng_takes_a_seed_or_a_generator():
    stream, other = Stream(), Stream()
    stream.rng = 5
    generator = np.random.Generator(np.random.Philox(3))
    other.rng = generator
    assert stream.rng.random() == np.random.default_rng(5).random()
    assert other.rng is generator
    state = other.get_random_state()
    expected = other.rng.random()
    stream.set_random_state(state)  # also from another kind of bit generator
    assert stream.rng.random() == expected


def test_state_of_a_stream_is_its_random_state():
    stream = Stream()
    state = stream.get_state()
    expected = stream.rng.random(2)
    stream.set_state(state)
    np.testing.assert_array_equal(stream.rng.random(2), expected)


@pytest.mark.parametrize("bad", [None, 3, {}, {"bit_generator": "Nope"}])
def test_set_random_state_refuses_what_is_not_a_snapshot(bad):
    with pytest.raises(ValueError, match="get_random_state"):
        Stream().set_random_state(bad)


# ---- clone_model ---------------------------------------------------------------------------------


def two_times(x):
    return 2 * x


@keras.saving.register_keras_serializable(package="rl_test")
class Scale(layers.Layer):
    def __init__(self, factor=2.0, **kwargs):
        super().__init__(**kwargs)
        self.factor = factor

    def compute_output_shape(self, input_shape):
        return input_shape

    def build(self, input_shape):
        self.scale = self.add_weight(shape=(input_shape[-1],), initializer="random_normal")

    def call(self, x):
        return x * self.scale * self.factor

    def get_config(self):
        return {**super().get_config(), "factor": self.factor}


class Unregistered(Scale):
    pass


class Forgetful(layers.Layer):
    """Has a constructor argument that Keras cannot record, and no get_config."""

    def __init__(self, function, **kwargs):
        super().__init__(**kwargs)
        self.function = function
        self.inner = layers.Dense(2)

    def call(self, x):
        return self.inner(self.function(x))


@keras.saving.register_keras_serializable(package="rl_test")
class Net(keras.Model):
    def __init__(self, units=5, **kwargs):
        super().__init__(**kwargs)
        self.units = units
        self.flatten = layers.Flatten()
        self.hidden = layers.Dense(units, activation="relu")
        self.out = layers.Dense(2)

    def call(self, x):
        return self.out(self.hidden(self.flatten(x)))

    def get_config(self):
        return {**super().get_config(), "units": self.units}


class NoArgumentsNet(keras.Model):
    """Needs no get_config of its own."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.out = layers.Dense(2)

    def call(self, x):
        return self.out(x[:, 0])


class DictNet(Net):
    def call(self, x):
        return super().call(x["a"]) + keras.ops.sum(x["b"], axis=1)


class Doubled(keras.Sequential):
    """A Sequential whose call is its own: a plain copy would halve the outputs."""

    def call(self, inputs, training=None, mask=None, **kwargs):
        return 2 * super().call(inputs, training=training, mask=mask, **kwargs)


def sequential():
    return keras.Sequential([keras.Input((1, 4)), layers.Flatten(), layers.Dense(3, "tanh"), layers.Dense(2)])


def functional():
    x = keras.Input((1, 4))
    y = layers.Flatten()(x)
    shared = layers.Dense(4, "relu")
    y = layers.Add()([shared(y), shared(shared(y))])
    y = layers.Lambda(lambda t, k: keras.ops.tanh(t) * k, arguments={"k": 3.0})(y)
    y = layers.Lambda(two_times, output_shape=lambda shape: shape)(y)
    y = layers.BatchNormalization()(y)
    y = layers.Dropout(0.5)(Scale(3.0)(y))
    return keras.Model(x, layers.Dense(2)(y))


def nested():
    inner = keras.Sequential([layers.Flatten(), layers.Dense(3), layers.Lambda(lambda t: keras.ops.abs(t))])
    x = keras.Input((1, 4))
    y = layers.Concatenate()([inner(x), Net(3)(x), inner(2 * x)])
    return keras.Model(x, layers.Dense(2, kernel_constraint="non_neg")(Unregistered()(y)))


def subclassed(cls=Net, *args):
    model = cls(*args)
    model(np.ones((2, 1, 4)))
    return model


def subclassed_sequential():
    return Doubled([keras.Input((1, 4)), layers.Flatten(), layers.Dense(2)])


def scaled_sequential():
    class Plain(keras.Sequential):
        pass

    return Plain([keras.Input((1, 4)), layers.Flatten(), layers.Dense(2)])


MODELS = [
    sequential,
    functional,
    nested,
    lambda: subclassed(Net, 3),
    lambda: subclassed(NoArgumentsNet),
    subclassed_sequential,
    scaled_sequential,
]


def randomize(model):
    rng = np.random.default_rng(3)
    model.set_weights([0.1 + rng.random(w.shape) for w in model.get_weights()])


@pytest.mark.parametrize("build", MODELS)
def test_clone_has_equal_weights_and_outputs_but_shares_no_variable(build):
    model = build()
    randomize(model)
    x = np.random.default_rng(0).normal(size=(3, 1, 4)).astype("float32")
    before = np.array(model(x))
    clone = clone_model(model)
    again = clone_model(clone)
    for copy in (clone, again):
        assert copy.built
        assert len(copy.weights) == len(model.weights) > 1
        np.testing.assert_allclose(np.array(copy(x)), before, rtol=1e-6)
        assert not {id(v) for v in copy.variables} & {id(v) for v in model.variables}
    randomize(clone)
    for variable in clone.weights:
        variable.assign(variable + 1)
    np.testing.assert_array_equal(np.array(model(x)), before)
    assert not np.allclose(np.array(clone(x)), before)


def test_clone_keeps_a_subclass_and_trainable_flags():
    assert type(clone_model(subclassed_sequential())) is Doubled
    model = functional()
    model.layers[2].trainable = False
    clone = clone_model(model)
    assert len(clone.trainable_weights) == len(model.trainable_weights) < len(model.weights)


def test_a_fresh_clone_has_weights_of_its_own():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2), keras.layers.Dense(1)])
    clone = clone_model(model, fresh=True)
    for own, copied in zip(model.get_weights()[::2], clone.get_weights()[::2], strict=True):
        assert own.shape == copied.shape and not np.any(own == copied)


def test_clone_of_a_model_with_dict_inputs():
    model = DictNet(3)
    x = {"a": np.ones((2, 1, 4), "float32"), "b": np.ones((2, 3, 2), "float32")}
    model(x)
    np.testing.assert_allclose(np.array(clone_model(model)(x)), np.array(model(x)))


def test_clone_copies_moving_statistics():
    model = keras.Sequential([keras.Input((3,)), layers.BatchNormalization()])
    model(np.random.default_rng(0).normal(2.0, 1.0, (64, 3)), training=True)
    moved = model.layers[0].moving_mean.numpy()
    assert np.abs(moved).min() > 0
    clone = clone_model(model)
    clone(np.full((8, 3), 9.0), training=False)
    np.testing.assert_array_equal(clone.layers[0].moving_mean.numpy(), moved)


def test_clone_under_mixed_float16():
    keras.config.set_dtype_policy("mixed_float16")
    model = sequential()
    keras.config.set_dtype_policy("float32")  # the model's policy counts, not the one of the moment
    clone = clone_model(model)
    assert [layer.compute_dtype for layer in clone.layers] == ["float16"] * 3
    for variable, original in zip(clone.weights, model.weights, strict=True):
        assert variable.dtype == "float32"
        np.testing.assert_array_equal(variable.numpy(), original.numpy())


def test_clone_under_keras_device():
    script = """
        from rl.util import clone_model
        with keras.device("cpu:1"):
            model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])
            clone = clone_model(model)
        if place(clone.weights + model.weights) != {"CPU:1"}:
            raise SystemExit(place(clone.weights + model.weights))
    """
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    script = TWO_CPUS + textwrap.dedent(script)
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120, env=environment)


def test_clone_needs_a_built_keras_model():
    with pytest.raises(ValueError, match="no weights yet"):
        clone_model(keras.Sequential([layers.Dense(2)]))
    with pytest.raises(TypeError, match="keras.Model"):
        clone_model("model")


def test_clone_says_what_to_register():
    x = keras.Input((4,))
    wrapped = keras.Model(x, layers.Dense(2)(layers.TimeDistributed(Unregistered())(x[:, None])[:, 0]))
    with pytest.raises(ValueError, match=r"TimeDistributed[\s\S]*register_keras_serializable"):
        clone_model(wrapped)
    clone = clone_model(wrapped, custom_objects={"Unregistered": Unregistered})
    np.testing.assert_allclose(np.array(clone(np.ones((2, 4)))), np.array(wrapped(np.ones((2, 4)))))
    with pytest.raises(ValueError, match=r"Forgetful[\s\S]*get_config"):
        clone_model(keras.Model(x, Forgetful(lambda t: 2 * t)(x)))


def test_clone_refuses_configs_that_lie():
    class Slope(keras.Model):
        """Keras' own config would hold the default slope, and no weight shape would tell."""

        def __init__(self, slope=1.0, **kwargs):
            super().__init__(**kwargs)
            self.slope = slope
            self.out = layers.Dense(2)

        def call(self, x):
            return self.slope * self.out(x)

    with pytest.raises(ValueError, match=r"Slope has no get_config\(\) that returns slope"):
        clone_model(subclassed(Slope, 3.0))

    class Liar(Net):
        def get_config(self):
            return {"units": 7}

    with pytest.raises(ValueError, match=r"weights of shapes[\s\S]*get_config"):
        clone_model(subclassed(Liar, 3))

    class Sharing(keras.Model):
        def __init__(self, blocks, **kwargs):
            super().__init__(**kwargs)
            self.blocks = blocks

        def call(self, x):
            return self.blocks[0](x)

        def get_config(self):
            return {"blocks": list(self.blocks)}

    model = Sharing([layers.Dense(2)])
    model(np.ones((2, 4)))
    with pytest.raises(ValueError, match="share variables"):
        clone_model(model)

    class TwoArguments(keras.Model):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.out = layers.Dense(2)

        def call(self, x, y):
            return self.out(x + y)

    model = TwoArguments()
    model(np.ones((2, 4)), np.ones((2, 4)))
    with pytest.raises(ValueError, match="could not be built"):
        clone_model(model)


# ---- clone_optimizer, get_object_config ----------------------------------------------------------


@keras.saving.register_keras_serializable(package="rl_test")
class Halving(keras.optimizers.schedules.LearningRateSchedule):
    def __init__(self, start):
        self.start = start

    def __call__(self, step):
        return self.start * 0.5 ** keras.ops.cast(step, "float32")

    def get_config(self):
        return {"start": self.start}


class UnregisteredHalving(Halving):
    pass


def test_clone_optimizer_from_names_and_configs():
    first, second = clone_optimizer("adam"), clone_optimizer("adam")
    assert isinstance(first, keras.optimizers.Adam) and first is not second
    config = keras.saving.serialize_keras_object(keras.optimizers.SGD(0.3))
    assert float(clone_optimizer(config).learning_rate) == pytest.approx(0.3)


@pytest.mark.parametrize(
    "make",
    [
        lambda: keras.optimizers.Adam(3e-4, epsilon=1e-5, clipnorm=1.0),
        lambda: keras.optimizers.RMSprop(keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5)),
        lambda: keras.optimizers.SGD(Halving(0.5), momentum=0.9),
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.AdamW(1e-3), initial_scale=8.0),
    ],
)
def test_clone_optimizer_keeps_settings_and_starts_anew(make):
    def step(optimizer):
        variable = keras.Variable(np.ones(3, "float32"))
        optimizer.build([variable])
        backend.minimize(lambda: (keras.ops.sum(variable.value), None), [variable], optimizer)

    optimizer = make()
    step(optimizer)
    clone = clone_optimizer(optimizer)
    assert type(clone) is type(optimizer) and clone.get_config() == optimizer.get_config()
    assert int(clone.iterations) == 0 and int(optimizer.iterations) == 1
    assert not {id(v) for v in clone.variables} & {id(v) for v in optimizer.variables}
    step(clone)
    assert int(clone.iterations) == 1
    assert int(optimizer.iterations) == 1


def test_clone_optimizer_takes_the_learning_rate_of_the_moment():
    optimizer = keras.optimizers.Adam(1e-3)
    optimizer.learning_rate = 0.25
    clone = clone_optimizer(optimizer)
    clone.learning_rate = 0.5
    assert float(optimizer.learning_rate) == 0.25


def test_clone_optimizer_refuses_what_is_none():
    class Adam:
        pass

    for foreign in (Adam(), None, 0.1):
        with pytest.raises(TypeError, match=r"keras\.optimizers\.Optimizer"):
            clone_optimizer(foreign)
    with pytest.raises(ValueError, match="register_keras_serializable"):
        clone_optimizer(keras.optimizers.SGD(UnregisteredHalving(0.5)))


def test_get_object_config():
    assert get_object_config(None) is None
    assert get_object_config(Halving(0.5)) == {"class_name": "Halving", "config": {"start": 0.5}}


# ---- huber_loss ----------------------------------------------------------------------------------


@pytest.mark.parametrize("clip_value", [0.5, 1.0, 3.0, np.inf])
def test_huber_loss_against_its_definition(clip_value):
    y_true = np.array([[0.0, 1.0, -2.0], [4.0, 0.3, -7.0]], "float32")
    y_pred = np.array([[0.0, 1.6, 1.0], [-5.0, 0.0, -6.5]], "float32")
    expected = np.empty_like(y_true)
    for index in np.ndindex(*y_true.shape):
        e = abs(float(y_true[index]) - float(y_pred[index]))
        expected[index] = 0.5 * e**2 if e <= clip_value else clip_value * (e - 0.5 * clip_value)
    np.testing.assert_allclose(np.array(huber_loss(y_true, y_pred, clip_value)), expected, rtol=1e-6)


def test_huber_loss_takes_a_scalar_and_refuses_silent_broadcasting():
    assert float(huber_loss(0.0, 3.0, 1.0)) == 2.5
    np.testing.assert_allclose(np.array(huber_loss(0.0, np.array([3.0, 0.5]), 1.0)), [2.5, 0.125])
    with pytest.raises(ValueError, match=r"\(4, 1\) and \(4,\)"):
        huber_loss(np.ones((4, 1)), np.ones(4), 1.0)
    for bad in (0.0, -1.0, np.nan):
        with pytest.raises(ValueError, match="clip_value"):
            huber_loss(np.ones(2), np.ones(2), bad)


# ---- WhiteningNormalizer -------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_whitening_equals_numpy_on_the_concatenation(shape):
    rng = np.random.default_rng(0)
    batches = [rng.normal(5.0, 3.0, (n, *shape)) for n in (1, 7, 0, 32, 4)]
    normalizer = WhiteningNormalizer(shape)
    for batch in batches:
        normalizer.update(batch)
    data = np.concatenate(batches)
    np.testing.assert_allclose(normalizer.mean, data.mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(normalizer.std, data.std(axis=0), rtol=1e-12)
    white = normalizer.normalize(data)
    np.testing.assert_allclose(white.mean(axis=0), np.zeros(shape), atol=1e-12)
    np.testing.assert_allclose(white.std(axis=0), np.ones(shape), rtol=1e-12)
    np.testing.assert_allclose(normalizer.denormalize(white), data, rtol=1e-12)


def test_whitening_is_sound_far_from_zero():
    rng = np.random.default_rng(0)
    data = 1e8 + rng.normal(size=(4000, 2))
    normalizer = WhiteningNormalizer((2,))
    for batch in data.reshape(50, 80, 2):
        normalizer.update(batch)
    np.testing.assert_allclose(normalizer.std, data.std(axis=0), rtol=1e-6)  # sums of squares: 0 or NaN


def test_whitening_takes_single_samples_and_several_leading_axes():
    one, many = WhiteningNormalizer((3,)), WhiteningNormalizer((3,))
    data = np.random.default_rng(0).normal(size=(2, 4, 3))
    for sample in data.reshape(-1, 3):
        one.update(sample)
    many.update(data)
    np.testing.assert_allclose(one.mean, many.mean)
    np.testing.assert_allclose(one.std, many.std)


def test_whitening_before_data_and_with_constant_data():
    normalizer = WhiteningNormalizer((2,), eps=0.1)
    np.testing.assert_array_equal(normalizer.normalize([3.0, -4.0]), [3.0, -4.0])
    normalizer.update(np.full((10, 2), 7.0))
    np.testing.assert_array_equal(normalizer.std, [0.1, 0.1])
    np.testing.assert_array_equal(normalizer.normalize([7.0, 7.0]), [0.0, 0.0])


def test_whitening_returns_its_dtype():
    normalizer = WhiteningNormalizer((2,), dtype="float32")
    normalizer.update(np.ones((3, 2), np.uint8))
    results = normalizer.mean, normalizer.std, normalizer.normalize([1, 2]), normalizer.denormalize([1, 2])
    for result in results:
        assert result.dtype == np.float32
    assert WhiteningNormalizer((2,)).mean.dtype == np.float64


def test_whitening_refuses_bad_samples_and_stays_as_it_was():
    normalizer = WhiteningNormalizer((3,))
    normalizer.update(np.ones((2, 3)))
    for bad in (np.ones((2, 4)), np.ones(()), [1.0, np.nan, 2.0], [[1.0, np.inf, 2.0]]):
        with pytest.raises(ValueError, match="shape|NaN"):
            normalizer.update(bad)
    np.testing.assert_array_equal(normalizer.mean, np.ones(3))
    with pytest.raises(ValueError, match="shape"):
        WhiteningNormalizer((2,)).set_state(normalizer.get_state())


def test_whitening_state_round_trip():
    rng = np.random.default_rng(0)
    first, second = WhiteningNormalizer((3,)), WhiteningNormalizer((3,))
    first.update(rng.normal(size=(5, 3)))
    state = first.get_state()
    plain = json.loads(json.dumps({k: v if k == "count" else v.tolist() for k, v in state.items()}))
    batch = rng.normal(size=(4, 3))
    first.update(batch)
    for snapshot in (state, plain):
        second.set_state(snapshot)
        second.update(batch)
        np.testing.assert_array_equal(first.mean, second.mean)
        np.testing.assert_array_equal(first.std, second.std)


# ---- the module ----------------------------------------------------------------------------------


def test_dropped_names_say_what_to_use():
    with pytest.raises(AttributeError, match="polyak"):
        rl.util.get_soft_target_model_updates  # noqa: B018
    with pytest.raises(AttributeError, match="optimizer"):
        rl.util.AdditionalUpdatesOptimizer  # noqa: B018
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        rl.util.nothing  # noqa: B018
    assert not hasattr(rl.util, "AdditionalUpdatesOptimizer")


def test_star_import_gives_the_names_of_keras_rl():
    namespace = {}
    exec("from rl.util import *", namespace)
    assert {"clone_model", "clone_optimizer", "get_object_config", "huber_loss"} <= set(namespace)
