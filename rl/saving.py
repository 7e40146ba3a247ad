"""What Keras' saver asks of an agent, and weights files: nothing half written, nothing half read."""

from __future__ import annotations

import errno
import inspect
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from typing import Any

import h5py
import keras
import numpy as np
from gymnasium import spaces

from rl.loop import RunState

_WEIGHTS = ".weights.h5"
_ENDINGS = (_WEIGHTS, ".h5f", ".h5")
# Constructor arguments that leave no trace: an old spelling, and classes, which a file cannot hold.
_NOT_SAVED = {"self", "args", "kwargs", "delta_range", "custom_model_objects"}


class SavedAgent:
    """Mixin of `Agent`: configuration, counters and weights.

    A saved agent (`agent.save("x.keras")`) holds its constructor's arguments, all weights, the optimizer, the lifetime
    counters, and what a processor (statistics), policies and noise (schedules, random streams) tell by `get_state`; of
    a memory its settings, not its contents. Each constructor argument is expected to be an attribute of the same name;
    a class that changes an argument overrides `get_config`.
    """

    model: Any
    compiled: bool
    optimizer: Any
    run_state: RunState
    _compiled_metrics: Any = ()

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments, networks and helpers serialised by Keras."""
        names = {"name": None, "dtype": None}
        for cls in type(self).__mro__:
            if cls is SavedAgent:
                break
            if constructor := vars(cls).get("__init__"):
                names |= dict.fromkeys(inspect.signature(constructor).parameters)
        config = {name: _saved(getattr(self, name)) for name in names if name not in _NOT_SAVED | {"dtype"}}
        return config | {"dtype": keras.dtype_policies.serialize(self.dtype_policy)}  # type: ignore[attr-defined]

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None) -> Any:
        """The agent that `get_config` described, with fresh weights and an empty memory."""
        return cls(**{k: _each(lambda x: _restored(x, custom_objects), value) for k, value in config.items()})

    def get_compile_config(self) -> dict[str, Any] | None:
        """What `compile` was given, for `keras.saving`; None before."""
        if not self.compiled:
            return None
        optimizer, metrics = self._compiled_with()
        return {
            "optimizer": _each(_saved, optimizer),
            "metrics": _each(_saved_metric, metrics),
            "jit_compile": self._jit_compile_given,  # type: ignore[attr-defined]
            "steps_per_execution": self.steps_per_execution,  # type: ignore[attr-defined]
        }

    def compile_from_config(self, config: dict[str, Any]) -> None:
        """Compiles a loaded agent as it was; see `get_compile_config`."""
        restored = {name: _each(_restored, config[name]) for name in ("optimizer", "metrics")}
        self.compile(**config | restored)  # type: ignore[attr-defined]

    def _compiled_with(self) -> tuple[Any, Any]:
        """The optimizer and the metrics, in the form that `compile` takes."""
        return self.optimizer, list(self._compiled_metrics)

    def save_own_variables(self, store: Any) -> None:
        """Adds the lifetime counters, and the helpers' state as JSON, to a saved agent."""
        store["counters"] = np.array([getattr(self.run_state, name) for name in RunState.COUNTERS], np.int64)
        states = json.dumps([helper.get_state() for helper in self._helpers()], default=lambda x: x.tolist())
        store["helpers"] = np.frombuffer(states.encode(), np.uint8)

    def load_own_variables(self, store: Any) -> None:
        """Reads what `save_own_variables` wrote."""
        for name, value in zip(RunState.COUNTERS, np.asarray(store["counters"]), strict=True):
            setattr(self.run_state, name, int(value))
        states = json.loads(np.asarray(store["helpers"]).tobytes())
        for helper, state in zip(self._helpers(), states, strict=True):
            helper.set_state(state)

    def _helpers(self) -> list[Any]:
        """What has a state besides weights. An agent that is not compiled has drawn nothing from its streams yet."""
        streams = self.random_streams() if self.compiled else []  # type: ignore[attr-defined]
        return [x for x in (self.processor, *streams) if hasattr(x, "get_state")]  # type: ignore[attr-defined]

    def weights_files(self, path: str) -> dict[str, Any]:
        """Which network is kept in which file: `{path: network}`. An agent of several networks overrides it.

        Args:
            path: What `save_weights` and `load_weights` were given; `suffixed` makes other names of it.
        """
        return {path: self.model}

    def save_weights(self, filepath: str | os.PathLike, overwrite: bool = False) -> None:
        """Writes the weights of the agent's network, completely or not at all; makes the folder where it is missing.

        Args:
            filepath: Ends in `.weights.h5`, or in keras-rl's `.h5f` or `.h5` (the content is the same).
            overwrite: Replace an existing file. Nobody is asked.

        Raises:
            FileExistsError: The file exists and `overwrite` is False.
            OSError: The file cannot be written; one that was there is as it was.
            ValueError: Another ending.
        """
        write_weights(self.weights_files(_checked(filepath)), overwrite)

    def load_weights(self, filepath: str | os.PathLike) -> None:
        """Reads what `save_weights` wrote, or a file of keras-rl or keras-rl2: the HDF5 format of Keras 2.

        Such a file knows the weights by their order. The network may name its layers otherwise, but needs as many with
        weights, of the same shapes and in the same order.

        Args:
            filepath: The file.

        Raises:
            FileNotFoundError: There is no such file.
            ValueError: Another ending, no weights file, or weights of another network; the agent keeps its own.
        """
        read_weights(self.weights_files(_checked(filepath)))


# ---- weights files ------------------------------------------------------------------------------------------------


def suffixed(path: str, suffix: str) -> str:
    """The name with a suffix before its ending: `ddpg.weights.h5`, `_actor` -> `ddpg_actor.weights.h5`."""
    ending = next(ending for ending in _ENDINGS if path.endswith(ending))
    return path.removesuffix(ending) + suffix + ending


def write_weights(files: dict[str, Any], overwrite: bool = False) -> None:
    """Writes networks' weights, all of them or none; see `SavedAgent.save_weights`.

    Args:
        files: `{path: network}`.
        overwrite: Replace existing files.
    """
    for path in files:
        if os.path.exists(path) and not overwrite:
            raise FileExistsError(f"{path} exists; pass overwrite=True to replace it")
    path = next(iter(files))
    folder = os.path.dirname(path) or "."
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as beside:  # the same disk, where a file is moved in one step
            written = {path: os.path.join(beside, f"{i}{_WEIGHTS}") for i, path in enumerate(files)}
            for path, network in files.items():
                network.save_weights(written[path])
            for path, file in written.items():
                os.replace(file, path)
    except (OSError, RuntimeError) as error:  # HDF5 says RuntimeError where a file cannot be completed
        number = getattr(error, "errno", None) or errno.EIO
        reason = f"Cannot write {path}: {os.strerror(number)}. Nothing was replaced. Fix: another folder or disk"
        raise OSError(number, reason) from error


def read_weights(files: dict[str, Any]) -> None:
    """Reads networks' weights, all of them or none; see `SavedAgent.load_weights`.

    Args:
        files: `{path: network}`.
    """
    before = [(network, network.get_weights()) for network in files.values()]
    try:
        for path, network in files.items():
            _read(path, network)
    except BaseException:  # Keras assigns layer by layer
        for network, weights in before:
            network.set_weights(weights)
        raise


def _read(path: str, network: Any) -> None:
    if not os.path.isfile(path):
        if os.path.isfile(path + ".index"):
            raise FileNotFoundError(
                f"{path} is a checkpoint of TensorFlow's own format ({os.path.basename(path)}.index and .data-...), "
                "which keras-rl2 wrote for every ending but .h5. Fix: load it there, and save it as .h5"
            )
        raise FileNotFoundError(f"no weights file at {path}")
    try:
        with h5py.File(path, "r") as file:
            group = file["model_weights"] if "model_weights" in file else file  # of a whole model
            layers = _old_layers(group) if _names(group, "layer_names") else None
            nb_values = _nb_values(file)
    except (OSError, KeyError) as error:
        raise ValueError(f"{path} is damaged, or no weights file: {error}. Fix: another copy of it") from error
    if layers is not None:
        _assign(path, network, layers)
        return
    if not nb_values:
        raise ValueError(f"{path} is an HDF5 file, but holds no weights of a Keras model")
    with tempfile.TemporaryDirectory() as folder:  # Keras reads by its own ending only
        link = os.path.join(folder, "network" + _WEIGHTS)
        try:
            os.symlink(os.path.abspath(path), link)
        except OSError:  # a file system or an account without links
            shutil.copyfile(path, link)
        try:
            network.load_weights(link)
        except Exception as error:
            raise ValueError(f"{path} does not fit the network {network.name!r}: {error}") from error
        own = os.path.join(folder, "own" + _WEIGHTS)
        network.save_weights(own)
        with h5py.File(own, "r") as file:
            needed = _nb_values(file)
    if nb_values > needed:  # Keras leaves layers alone that the network lacks
        raise ValueError(f"{path} does not fit the network {network.name!r}: {nb_values} weights for {needed}")


def _nb_values(file: Any) -> int:
    """How many weights a file in Keras 3's format holds."""
    names: list[str] = []
    file.visit(names.append)
    return sum("vars" in name.split("/")[:-1] and not name.startswith("optimizer/") for name in names)


def _names(group: Any, attribute: str) -> list[str]:
    """A list of names in a file of Keras 2, which splits a long one into several attributes."""
    keys = [attribute] if attribute in group.attrs else []
    while (key := f"{attribute}{len(keys)}") in group.attrs:
        keys.append(key)
    return [name.decode() if isinstance(name, bytes) else str(name) for key in keys for name in group.attrs[key]]


def _old_layers(group: Any) -> list[tuple[str, list[tuple[str, np.ndarray]]]]:
    """The layers with weights in a file of Keras 2, in the network's order: `(layer, [(weight, value), ...])`."""
    layers = [*_names(group, "layer_names"), *({"top_level_model_weights"} & set(group))]  # the latter are its own
    named = [(layer, _names(group[layer], "weight_names")) for layer in layers]
    return [(layer, [(name, np.asarray(group[layer][name])) for name in names]) for layer, names in named if names]


def _assign(path: str, network: Any, old: list[tuple[str, list[tuple[str, np.ndarray]]]]) -> None:
    """Gives a network the weights of a file of Keras 2, which puts trainable weights first in each layer."""
    layers = [(layer.name, layer.trainable_weights + layer.non_trainable_weights) for layer in network.layers]
    layers = [(name, weights) for name, weights in layers if weights]
    wrong = f"{path} does not fit the network {network.name!r}:"
    if len(layers) != len(old):
        there, here = ", ".join(name for name, _ in old), ", ".join(name for name, _ in layers)
        raise ValueError(f"{wrong} {len(old)} layers with weights ({there}) for {len(layers)} ({here})")
    pairs = []
    for (old_name, values), (name, weights) in zip(old, layers, strict=True):
        shapes, needed = [value.shape for _, value in values], [tuple(weight.shape) for weight in weights]
        if shapes != needed:
            raise ValueError(f"{wrong} its layer {old_name!r} holds shapes {shapes}, layer {name!r} needs {needed}")
        pairs += [(weight, value) for weight, (_, value) in zip(weights, values, strict=True)]
    if {id(weight) for weight, _ in pairs} != {id(weight) for weight in network.weights}:
        raise ValueError(f"{wrong} the network has weights of its own, outside of its layers")
    for weight, value in pairs:
        weight.assign(value)


def _checked(filepath: str | os.PathLike) -> str:
    path = os.fspath(filepath)
    if not path.endswith(_ENDINGS):
        raise ValueError(f"a weights file ends in {_WEIGHTS} (or keras-rl's .h5f, .h5), got {path!r}")
    return path


# What describes a space of actions: the arguments of its constructor.
_SPACES: dict[type, tuple[str, ...]] = {
    spaces.Discrete: ("n", "start"),
    spaces.MultiDiscrete: ("nvec", "start"),
    spaces.MultiBinary: ("n",),
    spaces.Box: ("low", "high", "shape", "dtype"),
}


def _saved(value: Any) -> Any:
    if type(value) in _SPACES:
        arguments = {name: _plain(getattr(value, name)) for name in _SPACES[type(value)]}
        return {"space": type(value).__name__, "arguments": arguments}
    if getattr(value, "__name__", "") == "<lambda>":
        raise ValueError(
            "An agent with a lambda among its arguments cannot be saved: a file cannot hold it. Fix: "
            "rl.util.LinearSchedule, or a function registered with keras.saving.register_keras_serializable()"
        )
    return value if value is None else keras.saving.serialize_keras_object(value)


def _plain(value: Any) -> Any:
    if isinstance(value, np.dtype):
        return value.name
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value


def _each(function: Callable[[Any], Any], value: Any) -> Any:
    """Applies a function to a value, or to each in lists, and lists of lists, of them."""
    return [_each(function, x) for x in value] if isinstance(value, list) else function(value)


def _saved_metric(metric: keras.metrics.Metric) -> Any:
    saved = _saved(metric)
    function = saved["config"].get("fn")
    # Where a function is among the custom objects, Keras takes the name of a metric made of it for the function, too.
    return function if isinstance(function, dict) and function.get("config") == metric.name else saved


def _restored(value: Any, custom_objects: dict[str, Any] | None = None) -> Any:
    if isinstance(value, dict) and "space" in value:
        cls = next(c for c in _SPACES if c.__name__ == value["space"])
        arguments = value["arguments"]
        if cls is spaces.Box:  # lists would be taken for scalars where the shape is given
            arguments = arguments | {name: np.array(arguments[name], arguments["dtype"]) for name in ("low", "high")}
        dtype = {"dtype": np.dtype(arguments["dtype"])} if "dtype" in arguments else {}
        return cls(**arguments | dtype)
    if isinstance(value, dict) and "class_name" in value:
        return keras.saving.deserialize_keras_object(value, custom_objects=custom_objects)
    return value
