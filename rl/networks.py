"""Between states and Keras networks: which part of an observation feeds which input, and whether they fit."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from rl.common.misc_util import tree_leaves, tree_map


def feed(network: Any, states: Any) -> Any:
    """Arranges states the way a network takes them.

    Args:
        network: A Keras model.
        states: `(B, W, *obs)`, or a tree of those.

    Returns:
        What to call the network with: a `Dict` observation's parts go to the inputs of the same names, a `Tuple`'s
        (and anything nested) by position. An input without a window axis gets `(B, *obs)` where W = 1.
    """
    inputs = _inputs(network)
    if not inputs:  # a subclassed model says nothing about its inputs
        return tree_map(lambda x: x[:, 0], states) if _takes_plain(network, states) else states
    leaves = []
    for x, part in zip(inputs, _route(inputs, states), strict=True):
        without_window = len(x.shape) == len(part.shape) - 1 and part.shape[1] == 1
        leaves.append(part[:, 0] if without_window else part)
    if isinstance(network, keras.Sequential):
        return leaves[0]
    return keras.tree.pack_sequence_as(network.input, leaves)


def check_fit(network: Any, states: Any, nb_outputs: int, owner: str) -> None:
    """Raises where a network cannot take an env's states.

    Args:
        network: A Keras model.
        states: What `feed` will be given: `(B, W, *obs)`, or a tree of those, after the processor.
        nb_outputs: How many outputs per state the network must have.
        owner: The agent's class name, for the message.

    Raises:
        ValueError: With both shapes, and what to change.
    """
    inputs = _inputs(network)
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
    inputs = _inputs(network)
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
        raise ValueError(f"{owner}: the network's output has shape {got}, expected (None, {nb_outputs}). {hint}")


def has_convolutions(network: Any) -> bool:
    """Whether a network, or one inside it, has a convolutional layer."""
    return any("Conv" in type(layer).__name__ or has_convolutions(layer) for layer in getattr(network, "layers", ()))


def _inputs(network: Any) -> list[Any]:
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
