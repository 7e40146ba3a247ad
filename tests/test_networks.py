"""`rl.networks`: which part of an observation feeds which input, and what is refused with which words."""

import keras
import numpy as np
import pytest
from keras import layers, ops

from rl.networks import check_fit, check_output, feed


def batch(*shape, window=1, dtype="float32"):
    return np.arange(2 * window * int(np.prod(shape)), dtype=dtype).reshape(2, window, *shape)


def model(inputs, nb_outputs=3):
    flat = [layers.Flatten()(x) for x in keras.tree.flatten(inputs)]
    joined = layers.Concatenate()(flat) if len(flat) > 1 else flat[0]
    return keras.Model(inputs, layers.Dense(nb_outputs)(joined))


def sequential(*shape, flatten=True):
    return keras.Sequential([layers.Input(shape), *[layers.Flatten()] * flatten, layers.Dense(3)])


@keras.saving.register_keras_serializable("test_networks")
class Subclassed(keras.Model):
    def __init__(self, flatten=False, **kwargs):
        super().__init__(**kwargs)
        self.flatten = layers.Flatten() if flatten else None
        self.dense = layers.Dense(3)

    def call(self, x, training=False):
        if isinstance(x, dict):
            x = ops.concatenate([x["a"], x["b"]], axis=-1)
        return self.dense(x if self.flatten is None else self.flatten(x))


def subclassed(x, **options):
    network = Subclassed(**options)
    network(x)
    return network


# ---- feed -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [1, 3, 4])
def test_a_windowed_input_gets_the_states_as_they_are(window):
    x = batch(5, window=window)
    assert feed(sequential(window, 5), x) is x
    assert feed(model(keras.Input((window, 5))), x) is x


def test_an_input_without_the_window_axis_gets_the_only_frame():
    x = batch(5)
    for network in (sequential(5), model(keras.Input((5,))), sequential(5, flatten=False)):
        np.testing.assert_array_equal(feed(network, x), x[:, 0])


@pytest.mark.parametrize("keys", [("a", "b", "c"), ("c", "b", "a"), ("b", "c", "a")])
def test_a_dict_is_routed_by_the_names_of_the_inputs(keys):
    inputs = [keras.Input((1, 2), name="b"), keras.Input((3,), name="c"), keras.Input((1, 4), name="a")]
    parts = {"a": batch(4), "b": batch(2), "c": batch(3)}
    fed = feed(model(inputs), {key: parts[key] for key in keys})
    np.testing.assert_array_equal(fed[0], parts["b"])
    np.testing.assert_array_equal(fed[1], parts["c"][:, 0])
    np.testing.assert_array_equal(fed[2], parts["a"])


@pytest.mark.parametrize("structure", ["list", "tuple", "dict"])
def test_a_network_is_called_with_the_structure_it_was_made_with(structure):
    a, b = keras.Input((1, 2), name="a"), keras.Input((1, 3), name="b")
    inputs = {"list": [b, a], "tuple": (b, a), "dict": {"b": b, "a": a}}[structure]
    network = model(inputs)
    parts = {"a": batch(2), "b": batch(3)}
    fed = feed(network, parts)
    if structure == "dict":
        assert set(fed) == {"a", "b"}
        assert fed["a"] is parts["a"] and fed["b"] is parts["b"]
    else:
        assert fed[0] is parts["b"] and fed[1] is parts["a"]
    assert network(fed).shape == (2, 3)


def test_a_tuple_is_routed_by_position_whatever_the_names():
    network = model([keras.Input((1, 2), name="z"), keras.Input((1, 3), name="a")])
    parts = (batch(2), batch(3))
    fed = feed(network, parts)
    assert fed[0] is parts[0] and fed[1] is parts[1]


def test_nested_observations_are_routed_by_position_in_the_order_of_the_space():
    network = model([keras.Input((1, 2)), keras.Input((1, 3)), keras.Input((1, 4))])
    states = {"x": (batch(2), batch(3)), "a": {"y": batch(4)}}
    fed = feed(network, states)
    assert fed[0] is states["x"][0] and fed[1] is states["x"][1] and fed[2] is states["a"]["y"]


def test_a_dict_of_one_part_goes_into_the_only_input():
    x = batch(2)
    assert feed(sequential(1, 2), {"whatever": x}) is x


@pytest.mark.parametrize("flatten", [False, True])
def test_a_subclassed_network_gets_what_it_was_built_on(flatten):
    x = batch(4)
    np.testing.assert_array_equal(feed(subclassed(x[:, 0]), x), x[:, 0])
    np.testing.assert_array_equal(feed(subclassed(x, flatten=flatten), x), x)
    y = batch(4, window=3)
    assert feed(subclassed(y, flatten=True), y) is y


def test_a_subclassed_network_over_a_dict():
    states = {"b": batch(2), "a": batch(3)}
    plain = {key: x[:, 0] for key, x in states.items()}
    np.testing.assert_array_equal(feed(subclassed(plain), states)["a"], plain["a"])
    np.testing.assert_array_equal(feed(subclassed(states), states)["a"], states["a"])


# ---- check_fit ------------------------------------------------------------------------------------------------------


def fits(network, *shape, window=1, dtype="float32"):
    check_fit(network, np.zeros((2, window, *shape), dtype), 3, "DQNAgent")


@pytest.mark.parametrize("window", [1, 3, 4])
@pytest.mark.parametrize("shape", [(), (4,), (8, 8, 1)])
def test_windowed_inputs_fit(window, shape):
    fits(sequential(window, *shape), *shape, window=window)
    fits(model(keras.Input((window, *shape))), *shape, window=window)


def test_plain_inputs_and_open_axes_fit():
    fits(sequential(4), 4)
    conv = [layers.Input((None, None, 1)), layers.Conv2D(2, 3), layers.GlobalMaxPooling2D(), layers.Dense(3)]
    fits(keras.Sequential(conv), 8, 8, 1, dtype="uint8")


@pytest.mark.parametrize(
    ("network", "window", "texts"),
    [
        (lambda: sequential(4), 4, ["shape (4,)", "make it (4, 4)", "window_length", "Input(shape=(4, 4))"]),
        (lambda: sequential(1, 5), 1, ["shape (1, 5)", "(1, 4) or (4,)", "Input(shape=(1, 4))"]),
        (lambda: sequential(3, 4), 1, ["shape (3, 4)", "(1, 4) or (4,)"]),
        (lambda: sequential(1, 4), 3, ["shape (1, 4)", "make it (3, 4)"]),
        (lambda: sequential(1, 1, 4), 1, ["shape (1, 1, 4)", "(1, 4) or (4,)"]),
    ],
)
def test_what_does_not_fit_is_refused_with_both_shapes_and_the_fix(network, window, texts):
    with pytest.raises(ValueError) as caught:
        fits(network(), 4, window=window)
    for text in ["DQNAgent", "Fix:", *texts]:
        assert text in str(caught.value), (text, str(caught.value))


def test_the_part_that_does_not_fit_is_named():
    network = model([keras.Input((1, 2), name="left"), keras.Input((1, 5), name="right")])
    with pytest.raises(ValueError, match=r"'right' has shape \(1, 5\).*\(1, 3\) or \(3,\)"):
        check_fit(network, {"left": batch(2), "right": batch(3)}, 3, "DQNAgent")


def test_names_that_differ_are_shown():
    network = model([keras.Input((1, 2), name="left"), keras.Input((1, 3), name="right")])
    with pytest.raises(ValueError, match=r"\['left', 'right'\].*\['links', 'right'\].*Fix: .*name=key"):
        check_fit(network, {"links": batch(2), "right": batch(3)}, 3, "DQNAgent")


@pytest.mark.parametrize("states", [(batch(2),) * 3, batch(2), {"a": batch(2)}])
def test_the_wrong_number_of_inputs_is_shown(states):
    network = model([keras.Input((1, 2), name="left"), keras.Input((1, 2), name="right")])
    with pytest.raises(ValueError, match="Fix"):
        check_fit(network, states, 3, "DQNAgent")


def test_a_subclassed_network_that_does_not_fit_is_refused_with_what_went_wrong():
    wrong_size = subclassed(np.zeros((1, 5), "f4"))
    with pytest.raises(ValueError, match=r"DQNAgent: .*shape \(B,\) \+ \(4,\) to \(B, 3\).*Fix"):
        fits(wrong_size, 4)
    unflattened = subclassed(np.zeros((1, 1, 4), "f4"))
    with pytest.raises(ValueError, match=r"output's shape is \(1, 1, 3\).*Fix: flatten the window axis"):
        fits(unflattened, 4)
    with pytest.raises(ValueError, match=r"\(3, 4\)"):
        fits(unflattened, 4, window=3)
    fits(subclassed(np.zeros((1, 4), "f4")), 4)
    fits(subclassed(np.zeros((1, 3, 4), "f4"), flatten=True), 4, window=3)


# ---- check_output ---------------------------------------------------------------------------------------------------


def test_one_output_of_the_right_size_is_accepted():
    check_output(sequential(1, 4), 3, "DQNAgent")
    check_output(model(keras.Input((4,))), 3, "DQNAgent")
    check_output(subclassed(np.zeros((1, 4), "f4")), 3, "DQNAgent")


def two_outputs():
    x = keras.Input((1, 4))
    y = layers.Flatten()(x)
    return keras.Model(x, [layers.Dense(3)(y), layers.Dense(3)(y)])


@pytest.mark.parametrize(
    ("network", "texts"),
    [
        (two_outputs, ["2 outputs", "(None, 3)", "Concatenate"]),
        (lambda: model(keras.Input((4,)), nb_outputs=4), ["(None, 4)", "(None, 3)", "Dense(3)"]),
        (lambda: sequential(1, 4, flatten=False), ["(None, 1, 3)", "(None, 3)", "size 1", "Flatten", "own shape"]),
        (lambda: sequential(4, 4, flatten=False), ["(None, 4, 3)", "(None, 3)", "size 4", "Flatten"]),
        (lambda: keras.Sequential([layers.Dense(3)]), ["no weights yet", "Input(shape="]),
        (lambda: Subclassed(), ["no weights yet", "call a subclassed model once"]),
        (lambda: layers.Dense(3), ["expected a keras.Model", "Dense"]),
        (lambda: None, ["expected a keras.Model", "NoneType"]),
    ],
)
def test_other_outputs_are_refused_with_both_shapes_and_the_fix(network, texts):
    with pytest.raises(ValueError) as caught:
        check_output(network(), 3, "DQNAgent")
    for text in ["DQNAgent", *texts]:
        assert text in str(caught.value), (text, str(caught.value))
