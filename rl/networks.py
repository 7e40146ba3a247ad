"""Between states and Keras networks: which part of an observation feeds which input, whether they fit, ready-made ones.

The networks made here start as those of the published results do: orthogonal kernels (Saxe et al., 2014,
arXiv:1312.6120) of gain sqrt(2) and zero biases, a policy head of gain 0.01, so that the first policy hardly depends on
the state, and a value head of gain 1 (Andrychowicz et al., 2021, arXiv:2006.05990, on what that is worth).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from gymnasium import spaces
from keras import layers, ops

from rl.common.misc_util import tree_leaves, tree_map, tree_paths
from rl.common.single_env import as_lanes

_MIN_IMAGE = 36  # pixels: the smallest edge of which the three convolutions leave something


def feed(network: Any, states: Any, others: dict[int, Any] | None = None) -> Any:
    """Arranges states the way a network takes them.

    Args:
        network: A Keras model.
        states: `(B, W, *obs)`, or a tree of those.
        others: What goes to inputs that no state feeds, such as a critic's action, by the input's index.

    Returns:
        What to call the network with: a `Dict` observation's parts go to the inputs of the same names, a `Tuple`'s
        (and anything nested) by position. An input without a window axis gets `(B, *obs)` where W = 1.
    """
    inputs = network_inputs(network)
    if not inputs:  # a subclassed model says nothing about its inputs
        return tree_map(lambda x: x[:, 0], states) if _takes_plain(network, states) else states
    leaves = []
    others = others or {}
    fed = [x for i, x in enumerate(inputs) if i not in others]
    for x, part in zip(fed, _route(fed, states), strict=True):
        without_window = len(x.shape) == len(part.shape) - 1 and part.shape[1] == 1
        leaves.append(part[:, 0] if without_window else part)
    for i in sorted(others):
        leaves.insert(i, others[i])
    if isinstance(network, keras.Sequential):
        return leaves[0]
    return keras.tree.pack_sequence_as(network.input, leaves)


def check_fit(network: Any, states: Any, nb_outputs: int, owner: str, others: Sequence[int] = ()) -> None:
    """Raises where a network cannot take an env's states.

    Args:
        network: A Keras model.
        states: What `feed` will be given: `(B, W, *obs)`, or a tree of those, after the processor.
        nb_outputs: How many outputs per state the network must have.
        owner: The agent's class name, for the message.
        others: The indices of inputs that no state feeds.

    Raises:
        ValueError: With both shapes, and what to change.
    """
    inputs = [x for i, x in enumerate(network_inputs(network)) if i not in others]
    if not inputs:
        _probe(network, states, nb_outputs, owner)
        return
    for x, part in zip(inputs, _route(inputs, states), strict=True):
        windowed, got = tuple(part.shape[1:]), tuple(x.shape[1:])
        fits = [windowed] + ([windowed[1:]] if windowed[:1] == (1,) else [])
        if any(len(got) == len(f) and all(g in (None, w) for g, w in zip(got, f, strict=True)) for f in fits):
            continue
        expected = " or ".join(str(f) for f in fits)
        raise ValueError(
            f"{owner}: the network's input {x.name!r} has shape {got}, but the env's states make it {expected}: the "
            "memory's window_length, then the observation's shape, unless a processor rearranges them. "
            f"Fix: keras.layers.Input(shape={windowed}), followed by keras.layers.Flatten() for dense layers"
        )


def check_output(network: Any, nb_outputs: int, owner: str) -> None:
    """Raises where a network has not exactly one output of shape `(None, nb_outputs)`.

    Args:
        network: A Keras model.
        nb_outputs: Expected size of the last axis.
        owner: The agent's class name, for the message.

    Raises:
        ValueError: With both shapes, and what to change.
    """
    if not isinstance(network, keras.Model):
        raise ValueError(f"{owner}: expected a keras.Model as network, got {type(network).__name__}")
    inputs = network_inputs(network)
    if not inputs:
        if not network.built or not network.weights:
            raise ValueError(
                f"{owner}: the network {network.name!r} has no weights yet. Give its shapes: add "
                "keras.layers.Input(shape=(window_length,) + env.observation_space.shape) as first layer, or call a "
                "subclassed model once before building the agent"
            )
        return
    outputs = network.outputs
    if len(outputs) != 1:
        raise ValueError(
            f"{owner}: the network must have one output of shape (None, {nb_outputs}), got {len(outputs)} outputs. "
            "Fix: concatenate them with keras.layers.Concatenate()"
        )
    got = tuple(outputs[0].shape)
    if got != (None, nb_outputs):
        hint = f"Fix: make the last layer keras.layers.Dense({nb_outputs})"
        if len(got) > 2 and got[-1] == nb_outputs:
            hint = f"The extra axis of size {got[1]} is the window: add keras.layers.Flatten() as first layer" + (
                ", or give the input the observation's own shape" if got[1] == 1 else ""
            )
        elif got[1:] == (nb_outputs,):
            hint = "Fix: leave the batch size open. A stateful layer cannot be used: give it a window of frames"
        raise ValueError(f"{owner}: the network's output has shape {got}, expected (None, {nb_outputs}). {hint}")


def action_input_index(critic: Any, given: Any, nb_actions: int, owner: str) -> int:
    """The index of the input of a critic that takes the action.

    Args:
        critic: Should be a functional model.
        given: That input, its name or its index.
        nb_actions: A.
        owner: The agent's class name, for the message.

    Raises:
        ValueError: There is no such input, it has another shape than `(None, A)`, or the output is not `(None, 1)`.
    """
    check_output(critic, 1, f"{owner} (critic)")
    inputs = network_inputs(critic)
    found = [i for i, x in enumerate(inputs) if given is x or (isinstance(given, (int, str)) and given in (i, x.name))]
    if len(found) != 1 or len(inputs) < 2 or isinstance(given, bool):
        raise ValueError(
            f"{owner}: critic_action_input must be one of the inputs of the critic, beside those for the states: the "
            f"keras.Input, its name or its index; got {given!r}, the critic has {[x.name for x in inputs]}. Fix: "
            "critic = keras.Model([action_input, observation_input], value); critic_action_input=action_input"
        )
    shape = tuple(inputs[found[0]].shape)
    if shape != (None, nb_actions):
        raise ValueError(
            f"{owner}: the critic's input {inputs[found[0]].name!r}, for the action, has shape {shape}, expected "
            f"{(None, nb_actions)}. Fix: keras.Input((nb_actions,))"
        )
    return found[0]


def has_convolutions(network: Any) -> bool:
    """Whether a network, or one inside it, has a convolutional layer."""
    return any("Conv" in type(layer).__name__ or has_convolutions(layer) for layer in getattr(network, "layers", ()))


def mlp(
    input_shape: Sequence[int],
    nb_outputs: int,
    hidden: Sequence[int] = (64, 64),
    activation: Any = "tanh",
    output_gain: float = 1.0,
    name: str | None = None,
) -> keras.Model:
    """Makes a network of dense layers.

    Args:
        input_shape: Of one state, without the batch axis: `env.observation_space.shape`, or `(W, *obs)` for a window of
            W observations. It is flattened.
        nb_outputs: Number of outputs.
        hidden: Units of each hidden layer.
        activation: Of the hidden layers, as Keras takes it.
        output_gain: Gain of the last layer's orthogonal kernel: 0.01 for a policy, 1 (the default) for values.
        name: The model's name.

    Returns:
        A model from `(B, *input_shape)` to `(B, nb_outputs)`, float32 under any dtype policy.
    """
    x = keras.Input(tuple(input_shape))
    return _network([x], [layers.Flatten()(x)], hidden, activation, [(nb_outputs, output_gain)], name)


def nature_cnn(
    input_shape: Sequence[int],
    nb_outputs: int,
    output_gain: float = 1.0,
    dtype: str = "uint8",
    name: str | None = None,
) -> keras.Model:
    """Makes the convolutional network of Mnih et al. (2015), doi:10.1038/nature14236.

    Convolutions of 32 filters of 8 x 8 with stride 4, 64 of 4 x 4 with stride 2 and 64 of 3 x 3 with stride 1, then 512
    dense units, all with ReLU.

    Differs from the paper in: initialisation (see the module), and any image from 36 x 36 up is taken.

    Args:
        input_shape: Of one state. The only two neighbouring axes of at least 36 each are height and width; all others,
            wherever they stand, are stacked frames and channels and become the channels of the first convolution:
            `(4, 84, 84)`, `(84, 84, 4)`, `(84, 84)`, `(4, 84, 84, 3)` and `(4, 3, 84, 84)` will do.
        nb_outputs: Number of outputs.
        output_gain: Gain of the last layer's orthogonal kernel: 0.01 for a policy, 1 (the default) for values.
        dtype: Of the images. "uint8" (the default) is scaled to [0, 1], anything else is taken as it is.
        name: The model's name.

    Returns:
        A model from `(B, *input_shape)` to `(B, nb_outputs)`, float32 under any dtype policy.

    Raises:
        ValueError: If the image is too small, or more than two axes could be its height and width.
    """
    x = keras.Input(tuple(input_shape), dtype=dtype)
    return _network([x], [_nature_trunk(x)], (), None, [(nb_outputs, output_gain)], name)


def actor_critic(
    env: Any, hidden: Sequence[int] | None = None, activation: Any = "tanh"
) -> tuple[keras.Model, keras.Model | None]:
    """Makes the networks of a policy and of its value function for an environment.

    From vectors, two networks like those of `mlp`. From images, one that both share: the layers of `nature_cnn`, then a
    head for each, so `PPOAgent(*actor_critic(env), env.action_space)` fits either. Of a `Dict` or `Tuple` space every
    part is an input of its own; what comes of the parts is concatenated. A part that is

    - a `Box` of uint8 with two or more axes, or of floats from 0 to 1 with three or more, is an image;
    - any other `Box`, a `MultiDiscrete` or a `MultiBinary`, is flattened, as floats;
    - a `Discrete` becomes one-hot.

    The policy has one output per action of a `Discrete` space, `sum(nvec)` for `MultiDiscrete`, and one per component
    of a `MultiBinary` or a `Box` (its means).

    Args:
        env: A `gymnasium.Env`, a `VecEnv` or a `gymnasium.vector.VectorEnv`, with declared spaces.
        hidden: Units of each hidden layer between the (concatenated) parts and the heads. By default `(64, 64)`, and
            none where all parts are images, which have their 512.
        activation: Of those hidden layers, as Keras takes it.

    Returns:
        `(actor, critic)` with outputs `(B, n)` and `(B, 1)`, or `(model, None)` where the model has both as outputs.

    Raises:
        ValueError: For a space that is none of these, or an image that `nature_cnn` refuses.
        TypeError: If `env` is no environment.
    """
    lanes = as_lanes(env)
    policy, value = (_nb_policy_outputs(lanes.action_space), 0.01), (1, 1.0)
    space = lanes.observation_space
    images = [_is_image(part) for _, part in tree_paths(space)]
    units: Sequence[int] = hidden if hidden is not None else () if all(images) else (64, 64)
    if any(images):
        return _network(*_inputs_and_features(space), units, activation, [policy, value], "actor_critic"), None
    actor = _network(*_inputs_and_features(space), units, activation, [policy], "actor")
    return actor, _network(*_inputs_and_features(space), units, activation, [value], "critic")


def deterministic_actor_critic(
    env: Any, hidden: Sequence[int] = (256, 256), activation: Any = "relu"
) -> tuple[keras.Model, keras.Model, Any]:
    """Makes the networks of a policy that says one continuous action, and of its action values, for an environment.

    Two networks, each with an input per part of the observation space as in `actor_critic`. The actor ends in tanh: its
    actions are in [-1, 1], so they are for `TD3Agent`, or for `DDPGAgent` with `scale_actions=True`:
    `TD3Agent(nb_actions, *deterministic_actor_critic(env), memory)`.

    Args:
        env: As in `actor_critic`; its action space is a `Box`.
        hidden: Units of each hidden layer between the (concatenated) parts and the heads.
        activation: Of those layers, as Keras takes it.

    Returns:
        `(actor, critic, action_input)`: networks with outputs `(B, A)` and `(B, 1)`, and that input of the critic, the
        first one, that takes the action.

    Raises:
        ValueError: For an action space that is no `Box`, and as `actor_critic`.
        TypeError: If `env` is no environment.
    """
    linear, critic, action = _actor_and_action_critic(env, 1, hidden, activation, "deterministic_actor_critic")
    actor = keras.Model(linear.input, layers.Activation("tanh", dtype="float32")(linear.output), name="actor")
    return actor, critic, action


def stochastic_actor_critic(
    env: Any, hidden: Sequence[int] = (256, 256), activation: Any = "relu"
) -> tuple[keras.Model, keras.Model, Any]:
    """Makes the networks of a `SquashedGaussian` policy and of its action values, for an environment.

    As `deterministic_actor_critic`, but the actor's outputs are means and log standard deviations before tanh, both
    near 0 to begin with: `SACAgent(nb_actions, *stochastic_actor_critic(env), memory)`.

    Args:
        env: As in `actor_critic`; its action space is a `Box`.
        hidden: Units of each hidden layer between the (concatenated) parts and the heads.
        activation: Of those layers, as Keras takes it.

    Returns:
        `(actor, critic, action_input)`: networks with outputs `(B, 2 A)` and `(B, 1)`, and that input of the critic,
        the first one, that takes the action.

    Raises:
        ValueError: For an action space that is no `Box`, and as `actor_critic`.
        TypeError: If `env` is no environment.
    """
    return _actor_and_action_critic(env, 2, hidden, activation, "stochastic_actor_critic")


def _actor_and_action_critic(
    env: Any, outputs_per_action: int, hidden: Sequence[int], activation: Any, name: str
) -> tuple[keras.Model, keras.Model, Any]:
    lanes = as_lanes(env)
    if not isinstance(lanes.action_space, spaces.Box):
        raise ValueError(
            f"{name} makes an actor of continuous actions, a Box, the env's action space is {lanes.action_space}. "
            "Fix: actor_critic for any other space"
        )
    nb_actions = math.prod(lanes.action_space.shape)
    head = (outputs_per_action * nb_actions, 0.01)
    actor = _network(*_inputs_and_features(lanes.observation_space), hidden, activation, [head], "actor")
    inputs, features = _inputs_and_features(lanes.observation_space)
    action = keras.Input((nb_actions,))  # without a name, which a part of the observation may have
    critic = _network([action, *inputs], [action, *features], hidden, activation, [(1, 1.0)], "critic")
    return actor, critic, action


def _network(
    inputs: list[Any],
    features: list[Any],
    hidden: Sequence[int],
    activation: Any,
    heads: Sequence[tuple[int, float]],
    name: str | None,
) -> keras.Model:
    """Features `(B, n)` of each input, concatenated, through dense layers to heads of `(nb_outputs, gain)`."""
    x = layers.Concatenate()(features) if len(features) > 1 else features[0]
    for units in hidden:
        x = layers.Dense(units, activation, kernel_initializer=_orthogonal())(x)
    # float32, since probabilities and values from float16 are too coarse to learn from.
    outputs = [layers.Dense(n, kernel_initializer=_orthogonal(gain), dtype="float32")(x) for n, gain in heads]
    return keras.Model(_only(inputs), _only(outputs), name=name)


def _only(tensors: list[Any]) -> Any:
    return tensors if len(tensors) > 1 else tensors[0]


def _orthogonal(gain: float = math.sqrt(2)) -> keras.initializers.Initializer:
    return keras.initializers.Orthogonal(gain)  # one for each layer: an initializer repeats itself


def _nature_trunk(x: Any) -> Any:
    """The layers of `nature_cnn` below its head."""
    shape = tuple(x.shape[1:])
    edges = [i for i in range(len(shape) - 1) if min(shape[i : i + 2]) >= _MIN_IMAGE]
    if len(edges) != 1:
        raise ValueError(
            f"Expected images with exactly two neighbouring axes of at least {_MIN_IMAGE}, height and width, and all "
            f"others (channels, stacked frames) smaller, got shape {shape}. Fix: "
            + (
                f"fewer than {_MIN_IMAGE} channels and frames each"
                if edges
                else "gymnasium.wrappers.ResizeObservation(env, (84, 84)), or FlattenObservation where it is no image"
            )
        )
    height, width = edges[0], edges[0] + 1
    others = [axis for axis in range(len(shape)) if axis not in (height, width)]
    if others and others[0] < height:
        x = layers.Permute([axis + 1 for axis in (height, width, *others)])(x)
    if len(others) != 1:
        x = layers.Reshape((shape[height], shape[width], math.prod(shape[axis] for axis in others)))(x)
    if x.dtype == "uint8":
        x = layers.Rescaling(1.0 / 255.0)(x)
    for filters, size, stride in ((32, 8, 4), (64, 4, 2), (64, 3, 1)):
        x = layers.Conv2D(filters, size, stride, activation="relu", kernel_initializer=_orthogonal())(x)
    return layers.Dense(512, "relu", kernel_initializer=_orthogonal())(layers.Flatten()(x))


def _is_image(space: Any) -> bool:
    if not isinstance(space, spaces.Box):
        return False
    nb_axes = len(space.shape)
    if space.dtype == np.uint8:
        return nb_axes >= 2
    return nb_axes >= 3 and space.dtype.kind == "f" and bool(np.all(space.low == 0) and np.all(space.high == 1))


def _inputs_and_features(space: Any) -> tuple[list[Any], list[Any]]:
    """An input for each part of an observation space, named as `feed` looks for it, and the features made of it."""
    parts = tree_paths(space)
    is_flat = isinstance(space, spaces.Dict) and not any(
        isinstance(part, spaces.Dict | spaces.Tuple) for part in space.values()
    )
    inputs, features = [], []
    for (path, part), name in zip(parts, space if is_flat else [None] * len(parts), strict=True):
        if isinstance(part, spaces.Discrete):
            inputs.append(keras.Input((), dtype="int32", name=name))
            features.append(ops.one_hot(inputs[-1] - int(part.start), int(part.n)))
        elif _is_image(part):
            inputs.append(keras.Input(part.shape, dtype=part.dtype.name, name=name))
            features.append(_nature_trunk(inputs[-1]))
        elif isinstance(part, spaces.Box | spaces.MultiDiscrete | spaces.MultiBinary):
            inputs.append(keras.Input(part.shape, name=name))
            features.append(layers.Flatten()(inputs[-1]))
        else:
            raise ValueError(
                f"actor_critic cannot make a network for observation{path} of the space {part}: it knows Box, "
                "Discrete, MultiDiscrete, MultiBinary, and Dict and Tuple of those. Fix: build the networks yourself"
            )
    return inputs, features


def _nb_policy_outputs(space: Any) -> int:
    if not isinstance(space, spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary | spaces.Box):
        raise ValueError(
            f"actor_critic cannot make a policy over the action space {space}: it knows Discrete, MultiDiscrete, "
            "MultiBinary and Box. Fix: wrap the env with gymnasium.wrappers.TransformAction"
        )
    return int(spaces.flatdim(space))  # n, sum(nvec), or the number of components


def network_inputs(network: Any) -> list[Any]:
    """The input tensors of a network; none where a subclassed model does not tell."""
    try:
        return list(network.inputs or [])
    except AttributeError:  # a subclassed model, or a Sequential without shapes
        return []


def _route(inputs: list[Any], states: Any) -> list[Any]:
    if isinstance(states, dict) and not any(isinstance(v, (dict, tuple)) for v in states.values()):
        names = [x.name for x in inputs]
        if set(names) == set(states):
            return [states[name] for name in names]
        if len(inputs) > 1:
            raise ValueError(
                f"The network's inputs are named {sorted(names)}, the observation's parts {sorted(states)}. "
                "Fix: keras.layers.Input(..., name=key) with the keys of the Dict space"
            )
    leaves = tree_leaves(states)
    if len(leaves) != len(inputs):
        raise ValueError(
            f"The network has {len(inputs)} input(s), the observation {len(leaves)} part(s). "
            "Fix: one keras.layers.Input per part of the observation space, in its order"
        )
    return leaves


def _takes_plain(network: Any, states: Any) -> bool:
    """Whether a subclassed network was built on inputs without a window axis, and W is 1."""
    ranks: list[int] = []
    shapes = (network.get_build_config() or {}).get("input_shape")
    if shapes is not None:
        keras.tree.map_shape_structure(lambda shape: ranks.append(len(shape)), shapes)
    parts = tree_leaves(states)
    return all(p.shape[1] == 1 for p in parts) and 0 < sum(ranks) == sum(len(p.shape) - 1 for p in parts)


def _probe(network: Any, states: Any, nb_outputs: int, owner: str) -> None:
    """Finds out by one call on zeros whether a subclassed network fits."""
    fed = feed(
        network,
        tree_map(lambda x: ops.zeros((1, *x.shape[1:]), dtype="uint8" if x.dtype == "uint8" else "float32"), states),
    )
    try:
        got = f"the output's shape is {tuple(network(fed, training=False).shape)}"
    except Exception as error:  # whatever the user's call raises on a wrong shape
        got = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    if got == f"the output's shape is {(1, nb_outputs)}":
        return
    shapes = tree_map(lambda x: tuple(x.shape[1:]), fed)
    raise ValueError(
        f"{owner}: the network {network.name!r} must map states of shape (B,) + {shapes} to (B, {nb_outputs}), but "
        f"for B=1 {got}. Fix: flatten the window axis inside it, or (for window_length=1) build it on observations "
        "without that axis"
    )
