"""What Keras' saver asks of an agent, and weights files: nothing half written, nothing half read."""

from __future__ import annotations

import inspect
import os
import shutil
import tempfile
from typing import Any

import keras
import numpy as np
from gymnasium import spaces

from rl.loop import RunState

_WEIGHTS = ".weights.h5"
# Constructor arguments that leave no trace: an old spelling, and classes, which a file cannot hold.
_NOT_SAVED = {"self", "args", "kwargs", "delta_range", "custom_model_objects"}


class SavedAgent:
    """Mixin of `Agent`: configuration, counters and weights.

    A saved agent (`agent.save("x.keras")`) holds its constructor's arguments, all weights, the optimizer and the
    lifetime counters; of a memory its settings, not its contents. Each constructor argument is expected to be an
    attribute of the same name; a class that changes an argument overrides `get_config`.
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
        return cls(**{name: _restored(value, custom_objects) for name, value in config.items()})

    def get_compile_config(self) -> dict[str, Any] | None:
        """What `compile` was given, for `keras.saving`; None before."""
        if not self.compiled:
            return None
        return {
            "optimizer": _saved(self.optimizer),
            "metrics": [_saved_metric(m) for m in self._compiled_metrics],
            "jit_compile": self._jit_compile_given,  # type: ignore[attr-defined]
            "steps_per_execution": self.steps_per_execution,  # type: ignore[attr-defined]
        }

    def compile_from_config(self, config: dict[str, Any]) -> None:
        """Compiles a loaded agent as it was; see `get_compile_config`."""
        metrics = [_restored(m) for m in config["metrics"]]
        restored = config | {"optimizer": _restored(config["optimizer"]), "metrics": metrics}
        self.compile(**restored)  # type: ignore[attr-defined]

    def save_own_variables(self, store: Any) -> None:
        """Adds the lifetime counters to a saved agent."""
        store["counters"] = np.array([getattr(self.run_state, name) for name in RunState.COUNTERS], np.int64)

    def load_own_variables(self, store: Any) -> None:
        """Reads the lifetime counters of a saved agent."""
        for name, value in zip(RunState.COUNTERS, np.asarray(store["counters"]), strict=True):
            setattr(self.run_state, name, int(value))

    def save_weights(self, filepath: str | os.PathLike, overwrite: bool = False) -> None:
        """Writes the weights of the agent's network, completely or not at all; makes the folder where it is missing.

        Args:
            filepath: Ends in `.weights.h5`, or in keras-rl's `.h5f` or `.h5` (the content is the same).
            overwrite: Replace an existing file.

        Raises:
            FileExistsError: The file exists and `overwrite` is False.
            ValueError: Another ending.
        """
        path = _checked(filepath)
        if os.path.exists(path) and not overwrite:
            raise FileExistsError(f"{path} exists; pass overwrite=True to replace it")
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        with tempfile.TemporaryDirectory(dir=os.path.dirname(path) or ".") as folder:
            written = os.path.join(folder, "network" + _WEIGHTS)
            self.model.save_weights(written)
            os.replace(written, path)

    def load_weights(self, filepath: str | os.PathLike) -> None:
        """Reads what `save_weights` wrote.

        Args:
            filepath: The file.

        Raises:
            FileNotFoundError: There is no such file.
            ValueError: Another ending, or weights of another network; the agent keeps its own.
        """
        path = _checked(filepath)
        if not os.path.isfile(path):
            raise FileNotFoundError(f"no weights file at {path}")
        with tempfile.TemporaryDirectory() as folder:  # Keras reads by its own ending only
            link = os.path.join(folder, "network" + _WEIGHTS)
            try:
                os.symlink(os.path.abspath(path), link)
            except OSError:  # a file system or an account without links
                shutil.copyfile(path, link)
            before = self.model.get_weights()
            try:
                self.model.load_weights(link)
            except BaseException:  # Keras assigns layer by layer
                self.model.set_weights(before)
                raise


def _checked(filepath: str | os.PathLike) -> str:
    path = os.fspath(filepath)
    if not path.endswith((_WEIGHTS, ".h5f", ".h5")):
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
