"""`rl.networks`: which part feeds which input, what is refused with which words, what the ready-made networks are."""

import gymnasium
import keras
import numpy as np
import pytest
from gymnasium import spaces
from keras import layers, ops

from rl.backend import compile_function
from rl.common.misc_util import tree_leaves, tree_map
from rl.common.vec_env import DummyVecEnv
from rl.networks import (
    actor_critic,
    check_fit,
    check_output,
    deterministic_actor_critic,
    feed,
    has_convolutions,
    mlp,
    nature_cnn,
    stochastic_actor_critic,
)
from rl.util import clone_model


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


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("names", [("a", "b"), ("b", "a")])
def test_inputs_that_no_state_feeds_are_left_out_of_the_routing(names, place):
    sizes = {"a": 2, "b": 3}
    inputs = [keras.Input((1, sizes[name]), name=name) for name in names]
    inputs.insert(place, keras.Input((4,), name="action"))
    network, parts, action = model(inputs), {"a": batch(2), "b": batch(3)}, np.ones((2, 4), "f4")
    fed = feed(network, parts, {place: action})
    assert fed[place] is action
    for x, name in zip([x for i, x in enumerate(fed) if i != place], names, strict=True):
        assert x is parts[name]
    check_fit(network, parts, 3, "Owner", [place])
    with pytest.raises(ValueError, match="inputs are named"):
        check_fit(network, parts, 3, "Owner")


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


# ---- mlp and nature_cnn ---------------------------------------------------------------------------------------------


def kernels_and_biases(network):
    """Those of the dense and convolutional layers, from input to output; kernels as (inputs, outputs)."""
    kernels = [layer.kernel.numpy() for layer in network.layers if hasattr(layer, "kernel")]
    biases = [layer.bias.numpy() for layer in network.layers if hasattr(layer, "kernel")]
    return [kernel.reshape(-1, kernel.shape[-1]) for kernel in kernels], biases


def gain(kernel):
    """The g of a kernel W with W^T W = g^2 I, or W W^T = g^2 I where it has more columns than rows."""
    product = kernel.T @ kernel if kernel.shape[0] >= kernel.shape[1] else kernel @ kernel.T
    squared = product[0, 0]
    np.testing.assert_allclose(product, squared * np.eye(len(product)), atol=1e-5)
    return float(np.sqrt(squared))


def pixels(*shape, seed=0):
    return np.random.default_rng(seed).integers(256, size=shape, dtype=np.uint8)


def survives(network, x, tmp_path):
    """A network's saved and loaded copy, its clone and its XLA function say what it says."""
    expected = tree_map(np.asarray, tuple(keras.tree.flatten(network(x))))
    network.save(tmp_path / "network.keras")
    loaded = keras.models.load_model(tmp_path / "network.keras")
    compiled = compile_function(lambda x: tuple(keras.tree.flatten(network(x))), network.variables, jit_compile=True)
    for got in (loaded(x), clone_model(network)(x), compiled(x)):
        for one, other in zip(keras.tree.flatten(got), expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
    return expected


def test_an_mlp_is_a_naive_mlp(tmp_path):
    network = mlp((3, 2), 4, hidden=(16, 8, 5), output_gain=0.5, name="three")
    assert network.name == "three" and network.output_shape == (None, 4)
    x = np.random.default_rng(0).normal(size=(7, 3, 2)).astype("f4")
    kernels, biases = kernels_and_biases(network)
    assert [kernel.shape for kernel in kernels] == [(6, 16), (16, 8), (8, 5), (5, 4)]
    y = x.reshape(7, 6)
    for kernel in kernels[:-1]:
        y = np.tanh(y @ kernel)
    np.testing.assert_allclose(survives(network, x, tmp_path)[0], y @ kernels[-1], rtol=1e-4, atol=1e-5)
    assert [gain(kernel) for kernel in kernels] == pytest.approx([2**0.5] * 3 + [0.5], rel=1e-4)
    assert all((bias == 0).all() for bias in biases)


def test_the_activation_and_the_absence_of_hidden_layers():
    x = np.full((2, 3), -1, "f4")
    kernels, _ = kernels_and_biases(network := mlp((3,), 2, hidden=(4,), activation="relu"))
    np.testing.assert_allclose(network(x), np.maximum(x @ kernels[0], 0) @ kernels[1], rtol=1e-4, atol=1e-6)
    kernels, _ = kernels_and_biases(linear := mlp((3,), 2, hidden=()))
    np.testing.assert_allclose(linear(x), x @ kernels[0], rtol=1e-4, atol=1e-6)


def test_layers_of_one_shape_start_with_kernels_of_their_own():
    kernels, _ = kernels_and_biases(mlp((8,), 8, hidden=(8, 8)))
    assert all(np.abs(a - b).max() > 0.1 for a, b in zip(kernels, kernels[1:], strict=False))


def test_the_seed_decides_the_kernels():
    first, second, third = [(keras.utils.set_random_seed(seed), mlp((3,), 2).get_weights())[1] for seed in (5, 5, 6)]
    assert all((a == b).all() for a, b in zip(first, second, strict=True))
    assert not (first[0] == third[0]).all()


def test_the_nature_network_is_the_papers():
    network = nature_cnn((84, 84, 4), 3, output_gain=0.01, name="nature")
    # The layers of Mnih et al. (2015) on 84 x 84 x 4, with a head for three actions.
    assert network.count_params() == 32 * (256 + 1) + 64 * (512 + 1) + 64 * (576 + 1) + 512 * (3136 + 1) + 3 * 513
    assert network.name == "nature" and has_convolutions(network)
    kernels, biases = kernels_and_biases(network)
    assert [gain(kernel) for kernel in kernels] == pytest.approx([2**0.5] * 4 + [0.01], rel=1e-4)
    assert all((bias == 0).all() for bias in biases)


def test_bytes_are_scaled_to_one_and_floats_are_not(tmp_path):
    x = pixels(2, 36, 40, 3)
    of_bytes, of_floats = nature_cnn((36, 40, 3), 2), nature_cnn((36, 40, 3), 2, dtype="float32")
    of_floats.set_weights(of_bytes.get_weights())
    expected = survives(of_bytes, x, tmp_path)[0]
    np.testing.assert_allclose(of_floats(x / np.float32(255)), expected, rtol=1e-4, atol=1e-5)
    assert np.abs(of_floats(x.astype("f4")) - expected).max() > 1


@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        ((4, 36, 40), (2, 3, 1)),
        ((1, 36, 40), (2, 3, 1)),
        ((36, 40), (1, 2)),
        ((4, 36, 40, 1), (2, 3, 1, 4)),
        ((4, 36, 40, 3), (2, 3, 1, 4)),
        ((4, 3, 36, 40), (3, 4, 1, 2)),
        ((36, 40, 3, 2), (1, 2, 3, 4)),
        ((2, 2, 36, 40, 3), (3, 4, 1, 2, 5)),
    ],
)
def test_frames_and_channels_become_channels_wherever_they_stand(shape, axes, tmp_path):
    network, last = nature_cnn(shape, 2), nature_cnn((36, 40, int(np.prod(shape)) // (36 * 40)), 2)
    last.set_weights(network.get_weights())
    x = pixels(3, *shape)
    moved = x.transpose(0, *axes).reshape(3, 36, 40, -1)
    np.testing.assert_allclose(survives(network, x, tmp_path)[0], last(moved), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(3,), (35, 84, 3), (84, 35, 3), (4, 3, 35, 84), (84, 3, 84)])
def test_images_that_are_too_small_are_refused(shape):
    with pytest.raises(ValueError) as caught:
        nature_cnn(shape, 2)
    for text in ("36", str(shape), "Fix", "ResizeObservation"):
        assert text in str(caught.value)


@pytest.mark.parametrize("shape", [(40, 40, 40), (4, 40, 40, 64)])
def test_images_of_which_the_channels_cannot_be_told_are_refused(shape):
    with pytest.raises(ValueError) as caught:
        nature_cnn(shape, 2)
    for text in ("two neighbouring axes", str(shape), "Fix: fewer than 36 channels"):
        assert text in str(caught.value)


@pytest.fixture
def mixed_float16():
    before = keras.mixed_precision.dtype_policy()
    keras.mixed_precision.set_dtype_policy("mixed_float16")
    yield
    keras.mixed_precision.set_dtype_policy(before)


def test_outputs_stay_float32_in_half_precision(mixed_float16):
    for network, x in ((mlp((3,), 2), np.ones((2, 3), "f4")), (nature_cnn((4, 36, 36), 2), pixels(2, 4, 36, 36))):
        assert network(x).dtype == "float32" and network.layers[-2].compute_dtype == "float16"
        assert clone_model(network)(x).dtype == "float32"
    space = spaces.Dict(camera=spaces.Box(0, 255, (36, 36, 3), np.uint8), room=spaces.Discrete(3), x=spaces.Box(-1, 1))
    both, _ = actor_critic(Declaring(space, spaces.Discrete(2)))
    assert [y.dtype for y in both(feed(both, states_of(space)))] == ["float32"] * 2


# ---- actor_critic ---------------------------------------------------------------------------------------------------


class Declaring(gymnasium.Env):
    """An env that only declares its spaces."""

    def __init__(self, observation_space, action_space):
        self.observation_space, self.action_space = observation_space, action_space


def states_of(space, nb_rows=3):
    """Some observations with a window axis of 1, as agents have them."""
    space.seed(0)
    return tree_map(lambda *rows: np.stack(rows)[:, None], *[space.sample() for _ in range(nb_rows)])


VECTOR, TWO, GREY = spaces.Box(-1, 1, (3,)), spaces.Discrete(2), spaces.Box(0, 255, (4, 36, 40), np.uint8)


@pytest.mark.parametrize(
    ("action_space", "nb_outputs"),
    [
        (spaces.Discrete(5, start=-2), 5),
        (spaces.MultiDiscrete([2, 3, 4]), 9),
        (spaces.MultiDiscrete([[2, 3], [4, 5]]), 14),
        (spaces.MultiBinary(3), 3),
        (spaces.MultiBinary((2, 3)), 6),
        (spaces.Box(-1, 1, (3,)), 3),
        (spaces.Box(-1, 1, (2, 3)), 6),
        (spaces.Box(-1, 1, ()), 1),
    ],
)
@pytest.mark.parametrize("space", [VECTOR, GREY])
def test_the_policy_has_an_output_per_action_or_component(space, action_space, nb_outputs):
    actor, critic = actor_critic(Declaring(space, action_space))
    x = feed(actor, states_of(space))
    policy, value = actor(x) if critic is None else (actor(x), critic(x))
    assert policy.shape == (3, nb_outputs) and value.shape == (3, 1)
    assert (critic is None) == (space is GREY)
    assert np.abs(policy).max() < 0.1  # all actions are about equally likely, all means are near 0


@pytest.mark.parametrize(
    ("space", "nb_features"),
    [
        (VECTOR, 3),
        (spaces.Box(-1, 1, (2, 3), np.float64), 6),
        (spaces.Box(-9, 9, (2, 2, 3)), 12),  # floats, but not of an image
        (spaces.Box(-1, 1, ()), 1),
        (spaces.Box(0, 255, (128,), np.uint8), 128),
        (spaces.Discrete(4), 4),
        (spaces.Discrete(4, start=3), 4),
        (spaces.MultiDiscrete([[2, 3], [4, 5]]), 4),
        (spaces.MultiBinary((2, 3)), 6),
        (spaces.Dict(b=VECTOR, a=spaces.Discrete(4), c=spaces.MultiBinary(2)), 9),
        (spaces.Dict(only=VECTOR), 3),
        (spaces.Tuple([spaces.Discrete(4), VECTOR, spaces.Box(-1, 1, (2, 2))]), 11),
        (spaces.Dict(a=spaces.Tuple([VECTOR, TWO]), b=spaces.Dict(c=spaces.MultiDiscrete([2, 2]))), 7),
    ],
)
def test_vectors_give_two_networks(space, nb_features, tmp_path):
    actor, critic = actor_critic(Declaring(space, spaces.Discrete(5)), hidden=(8, 7, 6), activation="relu")
    states = states_of(space)
    for network, nb_outputs, output_gain in ((actor, 5, 0.01), (critic, 1, 1.0)):
        check_fit(network, states, nb_outputs, "PPOAgent")
        check_output(network, nb_outputs, "PPOAgent")
        kernels, biases = kernels_and_biases(network)
        assert [len(kernel) for kernel in kernels] == [nb_features, 8, 7, 6]
        assert [gain(kernel) for kernel in kernels] == pytest.approx([2**0.5] * 3 + [output_gain], rel=1e-4)
        assert all((bias == 0).all() for bias in biases)
        survives(network, feed(network, states), tmp_path)
    assert not {id(v) for v in actor.variables} & {id(v) for v in critic.variables}


def test_two_hidden_layers_of_64_are_the_default():
    for network in actor_critic(Declaring(VECTOR, TWO)):
        assert [len(kernel) for kernel in kernels_and_biases(network)[0]] == [3, 64, 64]
        assert [layer.activation.__name__ for layer in network.layers[-3:]] == ["tanh", "tanh", "linear"]


def only_layer(space):
    """What the actor's only layer gets of three observations."""
    actor, _ = actor_critic(Declaring(space, spaces.Discrete(2)), hidden=())
    return np.array(keras.Model(actor.input, actor.layers[-1].input)(feed(actor, states_of(space))))


def test_discrete_observations_are_one_hot_from_the_start_of_their_space():
    for start in (0, 3, -2):
        space = spaces.Discrete(4, start=start)
        expected = np.eye(4)[states_of(space)[:, 0] - start]
        np.testing.assert_array_equal(only_layer(space), expected)
    assert len({*expected.argmax(axis=1)}) > 1


def test_the_parts_of_an_observation_stand_side_by_side_in_the_order_of_the_space():
    space = spaces.Dict(c=VECTOR, b=spaces.MultiDiscrete([5, 6, 7], start=[1, 2, 3]), a=spaces.Discrete(3, start=1))
    states = states_of(space)
    expected = [states["c"][:, 0], states["b"][:, 0], np.eye(3)[states["a"][:, 0] - 1]]
    np.testing.assert_allclose(only_layer(space), np.concatenate(expected, axis=1), rtol=1e-6)
    pair = spaces.Tuple([VECTOR, spaces.MultiBinary(2)])
    expected = [part[:, 0] for part in states_of(pair)]
    np.testing.assert_allclose(only_layer(pair), np.concatenate(expected, axis=1), rtol=1e-6)


def test_a_dict_is_fed_by_its_keys_in_whatever_order():
    actor, _ = actor_critic(Declaring(spaces.Dict(b=VECTOR, a=spaces.Box(-1, 1, (3,))), TWO))
    states = states_of(spaces.Dict(b=VECTOR, a=VECTOR))
    np.testing.assert_array_equal(actor(feed(actor, states)), actor(feed(actor, dict(reversed(states.items())))))
    swapped = {"a": states["b"], "b": states["a"]}
    assert np.abs(actor(feed(actor, states)) - actor(feed(actor, swapped))).max() > 1e-5


@pytest.mark.parametrize(
    ("space", "hidden", "nb_layers"),
    [
        (GREY, None, 4),
        (GREY, (8, 8, 8), 7),
        (spaces.Box(0, 255, (36, 40), np.uint8), None, 4),
        (spaces.Box(0, 1, (36, 40, 3), np.float32), None, 4),
        (spaces.Dict(left=GREY, right=GREY), None, 8),
        (spaces.Dict(camera=GREY, joints=VECTOR, room=spaces.Discrete(3)), None, 6),
        (spaces.Tuple([VECTOR, GREY]), (8,), 5),
    ],
)
def test_images_give_one_network_with_two_heads(space, hidden, nb_layers, tmp_path):
    model, critic = actor_critic(Declaring(space, spaces.Discrete(3)), hidden)
    assert critic is None and has_convolutions(model)
    assert model.output_shape == [(None, 3), (None, 1)]
    kernels, biases = kernels_and_biases(model)
    gains = [gain(kernel) for kernel in kernels]
    assert gains == pytest.approx([2**0.5] * nb_layers + [0.01, 1.0], rel=1e-4)
    assert all((bias == 0).all() for bias in biases)
    survives(model, feed(model, states_of(space)), tmp_path)


def test_an_image_goes_the_way_of_the_nature_network():
    model, _ = actor_critic(Declaring(GREY, TWO))
    policy = nature_cnn((4, 36, 40), 2, output_gain=0.01)
    policy.set_weights(model.get_weights()[:-2])
    states = states_of(GREY)
    np.testing.assert_allclose(model(feed(model, states))[0], policy(states[:, 0]), rtol=1e-4, atol=1e-6)


def test_all_parts_of_a_mixed_observation_reach_both_heads():
    space = spaces.Dict(camera=GREY, joints=VECTOR, room=spaces.Discrete(3))
    model, _ = actor_critic(Declaring(space, TWO))
    states = states_of(space)
    before = model(feed(model, states))
    for key, other in (
        ("camera", 255 - states["camera"]),
        ("joints", states["joints"] + 1),
        ("room", 2 - states["room"]),
    ):
        after = model(feed(model, {**states, key: other}))
        for old, new in zip(before, after, strict=True):
            assert np.abs(old - new).max() > 1e-5, key


def make_frozen_lake():
    return gymnasium.make("FrozenLake-v1")


@pytest.mark.parametrize(
    "make",
    [
        make_frozen_lake,
        lambda: DummyVecEnv([make_frozen_lake] * 3),
        lambda: gymnasium.vector.SyncVectorEnv([make_frozen_lake] * 3),
    ],
)
def test_the_spaces_are_those_of_one_lane(make):
    env = make()
    actor, critic = actor_critic(env)
    assert actor.input_shape == critic.input_shape == (None,)
    assert actor.output_shape == (None, 4) and critic.output_shape == (None, 1)
    assert len(kernels_and_biases(actor)[0][0]) == 16
    env.close()


@pytest.mark.parametrize("action_space", [spaces.Dict(a=TWO), spaces.Text(3), spaces.Sequence(TWO), None])
def test_other_action_spaces_are_refused(action_space):
    with pytest.raises(ValueError) as caught:
        actor_critic(Declaring(VECTOR, action_space))
    for text in (str(action_space), "Discrete, MultiDiscrete, MultiBinary and Box", "Fix"):
        assert text in str(caught.value)


@pytest.mark.parametrize("part", [spaces.Text(3), spaces.Sequence(TWO), spaces.Graph(TWO, None), None])
def test_other_observation_spaces_are_refused(part):
    for space, path in (
        (part, "observation of"),
        (spaces.Tuple([VECTOR, part or spaces.Text(2)]), "observation[1] of"),
    ):
        with pytest.raises(ValueError) as caught:
            actor_critic(Declaring(space, TWO))
        for text in (str(tree_leaves(space)[-1] if part is None else part), path, "Box, Discrete", "Fix"):
            assert text in str(caught.value) or part is None


def test_a_small_image_is_refused_and_flattened_on_request():
    env = Declaring(spaces.Box(0, 255, (7, 7, 3), np.uint8), TWO)
    with pytest.raises(ValueError, match=r"\(7, 7, 3\).*FlattenObservation"):
        actor_critic(env)
    actor, _ = actor_critic(gymnasium.wrappers.FlattenObservation(env))
    assert actor.input_shape == (None, 147)


# ---- deterministic_actor_critic -------------------------------------------------------------------------------------


class Pushed(gymnasium.Env):
    def __init__(self, observation_space, action_space):
        self.observation_space, self.action_space = observation_space, action_space


@pytest.mark.parametrize("shape", [(1,), (3,), (2, 2)])
def test_a_deterministic_actor_and_its_critic_fit_the_env(shape):
    vector, picture = spaces.Box(-1, 1, (3,)), spaces.Box(0, 255, (40, 40, 3), np.uint8)
    nb_actions = int(np.prod(shape))
    for space in (vector, spaces.Dict(action=vector, b=picture), spaces.Tuple([spaces.Discrete(4), vector])):
        env = Pushed(space, spaces.Box(-2, 2, shape))
        actor, critic, action = deterministic_actor_critic(env, hidden=(8, 8, 8))
        assert actor.output.shape == (None, nb_actions) and critic.output.shape == (None, 1)
        assert critic.inputs[0] is action and action.shape == (None, nb_actions)
        states = tree_map(lambda x: np.asarray(x)[None, None], space.sample())
        acts = np.asarray(actor(feed(actor, states)))
        assert acts.shape == (1, nb_actions) and np.abs(acts).max() < 0.2  # near the middle to begin with
        assert critic(feed(critic, states, {0: acts})).shape == (1, 1)
        assert not {id(v) for v in actor.variables} & {id(v) for v in critic.variables}


def test_a_stochastic_actor_says_means_and_log_stds_and_its_critic_fits_the_env():
    space = spaces.Dict(goal=spaces.Box(-1, 1, (2,)), vector=spaces.Box(-1, 1, (3,)))
    env = Pushed(space, spaces.Box(-2, 2, (3,)))
    actor, critic, action = stochastic_actor_critic(env, hidden=(8,))
    states = tree_map(lambda x: np.asarray(x)[None, None], space.sample())
    outputs = np.asarray(actor(feed(actor, states)))
    assert outputs.shape == (1, 6) and np.abs(outputs).max() < 0.2
    assert critic.inputs[0] is action and action.shape == (None, 3)
    assert critic(feed(critic, states, {0: outputs[:, :3]})).shape == (1, 1)
    with pytest.raises(ValueError, match=r"stochastic_actor_critic makes.*Discrete\(2\).*actor_critic for any other"):
        stochastic_actor_critic(gymnasium.make("CartPole-v1"))


def test_a_deterministic_actor_of_discrete_actions_is_refused():
    with pytest.raises(ValueError, match=r"action space is Discrete\(2\).*actor_critic for any other"):
        deterministic_actor_critic(gymnasium.make("CartPole-v1"))
