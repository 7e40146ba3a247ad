"""Small helpers that several modules share: random streams, cloning, the Huber loss, running whitening."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from rl.ops import huber

__all__ = [
    "LinearSchedule",
    "RandomStream",
    "WhiteningNormalizer",
    "clone_model",
    "clone_optimizer",
    "get_metrics",
    "get_object_config",
    "get_optimizer",
    "huber_loss",
    "require",
]

# What keras-rl offered here and is gone, with what to do instead.
_DROPPED = {
    "get_soft_target_model_updates": "rl.ops.polyak(target_variables, source_variables, tau)",
    "AdditionalUpdatesOptimizer": "a keras.optimizers optimizer (target networks are updated by the agent)",
}


def __getattr__(name: str) -> Any:
    if name in _DROPPED:
        raise AttributeError(f"rl.util.{name} was part of keras-rl and is gone; use {_DROPPED[name]}.")
    raise AttributeError(f"module 'rl.util' has no attribute {name!r}")


class RandomStream:
    """Mixin that gives an object its own random stream.

    The stream is seeded from NumPy's global generator when it is first used, so `np.random.seed(123)` at
    the top of a script decides every later draw, and no object disturbs the draws of another one. Nothing
    has to be set up in `__init__`: subclasses that never call `super().__init__()` work too.
    """

    _rng: np.random.Generator | None = None

    @property
    def rng(self) -> np.random.Generator:
        """This object's `numpy.random.Generator`. Assign a generator or an integer seed to replace it."""
        if self._rng is None:
            self._rng = np.random.default_rng(np.random.randint(0, 2**31, size=4))
        return self._rng

    @rng.setter
    def rng(self, value: np.random.Generator | int) -> None:
        self._rng = np.random.default_rng(value)

    def get_random_state(self) -> dict[str, Any]:
        """Returns a snapshot of the random stream, plain enough for JSON; seeds it if still due."""
        return dict(self.rng.bit_generator.state)

    def set_random_state(self, state: dict[str, Any]) -> None:
        """Puts the random stream back to a snapshot.

        Args:
            state: What `get_random_state` returned.

        Raises:
            ValueError: If `state` is not such a snapshot.
        """
        if not isinstance(state, dict) or not hasattr(np.random, str(state.get("bit_generator"))):
            raise ValueError(f"Expected a snapshot taken with get_random_state(), got {state!r}.")
        bit_generator = getattr(np.random, state["bit_generator"])(0)
        bit_generator.state = state
        self.rng = np.random.Generator(bit_generator)

    def get_state(self) -> dict[str, Any]:
        """Returns what `get_config` leaves out: the random stream and what subclasses have counted so far."""
        return {"random_state": self.get_random_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes on from a `get_state()` snapshot."""
        self.set_random_state(state["random_state"])


def clone_model(
    model: keras.Model, custom_objects: Mapping[str, Any] | None = None, fresh: bool = False
) -> keras.Model:
    """Makes an independent copy of a built model: same architecture, same weights, no shared variable.

    Sequential and functional models are copied layer by layer (`Lambda` layers keep their function),
    subclassed models through `get_config` and `from_config`. The copy's variables live on the device of the
    surrounding `keras.device` scope; every layer keeps its dtype policy.

    Args:
        model: A built `keras.Model`.
        custom_objects: Classes and functions, by name, that the model's config refers to and that are not
            registered with Keras.
        fresh: Leave the copy the weights that its initializers give it.

    Raises:
        TypeError: If `model` is not a `keras.Model`.
        ValueError: If the model is not built, or cannot be rebuilt from its config; the message says what to
            register or to implement.
    """
    if not isinstance(model, keras.Model):
        raise TypeError(f"Expected a keras.Model to clone, got {model!r} of type {_class_path(model)}.")
    name = f"Cannot clone model {model.name!r} ({type(model).__name__})"
    if not model.built:
        raise ValueError(
            f"{name}: it has no weights yet. Give it an input shape (keras.Input as first layer, or "
            "model.build(shape)) or call it once on data."
        )
    with keras.saving.custom_object_scope(dict(custom_objects or {})):
        clone = _copy_layer(model, {})
        if not clone.built:
            _build_like(clone, model)
    source, target = model.get_weights(), clone.get_weights()
    if [w.shape for w in source] != [w.shape for w in target]:
        raise ValueError(
            f"{name}: the copy made from its config has weights of shapes {[w.shape for w in target]}, the "
            f"model has {[w.shape for w in source]}. get_config() must return every argument that decides "
            "the architecture."
        )
    if {id(v) for v in model.variables} & {id(v) for v in clone.variables}:
        raise ValueError(
            f"{name}: the copy would share variables with the model, since get_config() hands out live "
            "objects. Return their configs (keras.saving.serialize_keras_object) and rebuild them in "
            "from_config()."
        )
    if not fresh:
        clone.set_weights(source)
    return clone


def _copy_layer(layer: keras.Layer, copies: dict[int, keras.Layer]) -> keras.Layer:
    # Ours instead of keras.models.clone_model(recursive=True), which turns the user's own Sequential and
    # functional subclasses into plain ones and so loses an overridden `call`. `copies` makes a layer that
    # occurs twice one layer in the copy, too.
    if id(layer) in copies:
        return copies[id(layer)]
    cls = type(layer)
    try:
        if isinstance(layer, keras.layers.Lambda):
            copy = _copy_lambda(layer)
        elif isinstance(layer, keras.Model) and _is_plain(cls):
            copy = keras.models.clone_model(layer, clone_function=lambda inner: _copy_layer(inner, copies))
        else:
            if isinstance(layer, keras.Model):
                _check_config(cls)
            config = {
                key: keras.saving.serialize_keras_object(value) if isinstance(value, keras.Layer) else value
                for key, value in layer.get_config().items()
            }
            copy = cls.from_config(config)
    except _CloneError:  # an inner layer has told what is wrong already
        raise
    except Exception as error:
        raise _CloneError(
            f"Cannot clone {layer.name!r} ({cls.__name__}): from_config(get_config()) failed with "
            f"{type(error).__name__}: {str(error).strip()}\nImplement get_config() (every constructor "
            "argument) and, if it holds layers or functions, from_config(); decorate the classes and "
            "functions that the config names with @keras.saving.register_keras_serializable() or pass them "
            "as custom_objects (custom_model_objects of an agent)."
        ) from error
    copies[id(layer)] = copy
    return copy


class _CloneError(ValueError):
    pass


def _is_plain(cls: Any) -> bool:
    # A user's Sequential subclass that only lists its layers is as good as plain.
    lists_layers = (
        issubclass(cls, keras.Sequential)
        and cls.get_config is keras.Sequential.get_config
        and cls.call is keras.Sequential.call
    )
    return lists_layers or cls.__module__.startswith("keras.")


def _check_config(cls: type) -> None:
    # The config that Keras makes up for a subclassed model holds the defaults of the arguments in
    # place of their values (seen with Keras 3.15): the copy would silently be another model.
    init, get_config = (
        next(owner for owner in cls.__mro__ if name in vars(owner)) for name in ("__init__", "get_config")
    )
    if init.__module__.startswith("keras.") or not get_config.__module__.startswith("keras."):
        return
    parameters = list(inspect.signature(vars(init)["__init__"]).parameters.values())[1:]
    own = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD and p.name not in ("name", "dtype", "trainable")]
    if own:
        raise NotImplementedError(f"{cls.__name__} has no get_config() that returns {', '.join(own)}.")


def _copy_lambda(layer: keras.layers.Lambda) -> keras.layers.Lambda:
    # Keras refuses to rebuild a Python lambda, and would lose its globals; within one process it can be kept.
    config = layer.get_config()
    config.update(function=layer.function, mask=layer.mask, arguments=layer.arguments)
    if isinstance(config.get("output_shape"), dict):  # a serialised function
        config["output_shape"] = layer.compute_output_shape
    return type(layer)(**config)


def _build_like(clone: keras.Model, model: keras.Model) -> None:
    try:
        shapes = model.get_build_config()["input_shape"]
        inputs = keras.tree.map_shape_structure(lambda shape: keras.KerasTensor(shape, "float32"), shapes)
        # The layer's own record of shapes is one of Keras' tracked containers, which JAX does not look into.
        clone(dict(inputs) if isinstance(inputs, dict) else list(inputs) if isinstance(inputs, list) else inputs)
    except Exception as error:
        raise ValueError(
            f"Cannot clone model {model.name!r} ({type(model).__name__}): its copy could not be built "
            f"({type(error).__name__}: {str(error).strip()}). Implement build() and get_build_config(), or "
            "let call() take all inputs as one argument."
        ) from error


def clone_optimizer(
    optimizer: keras.optimizers.Optimizer | str | dict[str, Any],
) -> keras.optimizers.Optimizer:
    """Makes a fresh optimizer with another one's learning rate or schedule, clipping and loss scaling.

    Args:
        optimizer: An optimizer, the name of one (``"adam"``) or its serialised config. It is not changed, and
            moments and step counts are not copied.

    Raises:
        TypeError: If `optimizer` is none of these, for instance an optimizer of another library.
        ValueError: If it cannot be rebuilt from its config.
    """
    if isinstance(optimizer, (str, dict)):
        return keras.optimizers.get(optimizer)
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(
            "Expected a keras.optimizers.Optimizer, the name of one or its config, got "
            f"{optimizer!r} of type {_class_path(optimizer)}."
        )
    try:
        return type(optimizer).from_config(optimizer.get_config())
    except Exception as error:
        raise ValueError(
            f"Cannot clone optimizer {optimizer.name!r} ({type(optimizer).__name__}): "
            f"{type(error).__name__}: {str(error).strip()}\nA custom learning-rate schedule or optimizer "
            "needs get_config() and @keras.saving.register_keras_serializable()."
        ) from error


def get_metrics(metrics: Iterable[Any], taken: Sequence[str] = ()) -> list[keras.metrics.Metric]:
    """Makes built Keras metrics of what `compile(metrics=[...])` takes.

    Args:
        metrics: Keras metrics, their classes or names, or functions of `(y_true, y_pred)`. One given by name is called
            by that name, as Keras does.
        taken: Names of values that are logged anyway: a metric of such a name is left out.

    Raises:
        ValueError: Two metrics have the same name, or one is called `loss`.
    """
    made = [_get_metric(metric) for metric in metrics if getattr(metric, "__name__", metric) not in taken]
    names = ["loss", *taken, *[metric.name for metric in made]]
    require("metrics", names[1:], len(set(names)) == len(names), "of different names, none of them 'loss'")
    for metric in made:
        metric.update_state(np.zeros(1, "float32"), np.zeros(1, "float32"))  # some build on first use
        metric.reset_state()
    return made


def _get_metric(metric: Any) -> keras.metrics.Metric:
    resolved = keras.metrics.get(metric)
    if isinstance(resolved, type):
        resolved = resolved()
    if isinstance(resolved, keras.metrics.Metric):
        if isinstance(metric, str):
            resolved.name = metric
        return resolved
    name = metric if isinstance(metric, str) else getattr(metric, "__name__", type(metric).__name__)
    return keras.metrics.MeanMetricWrapper(resolved, name=name)


def get_optimizer(optimizer: Any) -> keras.optimizers.Optimizer:
    """Makes a Keras optimizer of what `compile` takes: an optimizer, its name or its configuration.

    Raises:
        TypeError: It is none of these; the message names what it is.
    """
    if not isinstance(optimizer, (str, dict, keras.optimizers.Optimizer)):
        raise TypeError(
            "optimizer must be a keras.optimizers.Optimizer (an instance) or the name of one, got "
            f"{optimizer!r} of type {type(optimizer).__module__}.{type(optimizer).__qualname__}"
        )
    return keras.optimizers.get(optimizer)


def require(name: str, value: Any, ok: bool, expected: str) -> None:
    """Raises `ValueError` with an argument's name, what was expected and what was given, unless `ok`."""
    if not ok:
        raise ValueError(f"{name} must be {expected}, got {value!r}")


def get_object_config(o: Any) -> dict[str, Any] | None:
    """Describes an object as ``{"class_name": ..., "config": ...}``; None stays None."""
    if o is None:
        return None
    return {"class_name": type(o).__name__, "config": o.get_config()}


def huber_loss(y_true: Any, y_pred: Any, clip_value: float) -> Any:
    """Huber's loss, elementwise: ``0.5 e^2`` for ``|e| <= c = clip_value``, else ``c (|e| - 0.5 c)``.

    Args:
        y_true: Targets.
        y_pred: Predictions, of the same shape.
        clip_value: Where the loss turns linear, above 0; ``inf`` gives half the squared error.

    Raises:
        ValueError: If `clip_value` is not positive, or one argument has an axis more than the other (they
            would broadcast to a loss of all pairs).
    """
    if not clip_value > 0:
        raise ValueError(f"clip_value must be above 0, got {clip_value!r}.")
    y_true, y_pred = keras.ops.convert_to_tensor(y_true), keras.ops.convert_to_tensor(y_pred)
    ranks = len(y_true.shape), len(y_pred.shape)
    if ranks[0] != ranks[1] and min(ranks) > 0:
        shapes = f"{tuple(y_true.shape)} and {tuple(y_pred.shape)}"
        raise ValueError(f"y_true and y_pred must have the same shape, got {shapes}.")
    return huber(keras.ops.subtract(y_true, y_pred), clip_value)


@keras.saving.register_keras_serializable(package="rl")
class LinearSchedule:
    """A function of the progress from 0 to 1 that goes straight from `start` to `end`.

    Args:
        start: Value at progress 0.
        end: Value at progress 1, and after.
    """

    def __init__(self, start: float, end: float = 0.0):
        self.start, self.end = float(start), float(end)

    def __call__(self, progress: float) -> float:
        """The value at a progress."""
        return self.start + min(max(progress, 0.0), 1.0) * (self.end - self.start)

    def get_config(self) -> dict[str, float]:
        """The constructor's arguments."""
        return {"start": self.start, "end": self.end}

    @classmethod
    def from_config(cls, config: dict[str, float]) -> LinearSchedule:
        """The schedule that `get_config` described."""
        return cls(**config)


class WhiteningNormalizer:
    """Running mean and standard deviation, to shift and scale data to mean 0 and standard deviation 1.

    Batches are merged by their means and squared deviations (Chan, Golub & LeVeque 1983, doi:10.2307/2683386)
    in double precision, which stays exact where the difference of two large sums would cancel.

    Args:
        shape: Shape of one sample.
        eps: The standard deviation is at least this, so that a constant feature is not blown up.
        dtype: Type of what `normalize`, `denormalize`, `mean` and `std` return.
    """

    def __init__(self, shape: tuple[int, ...], eps: float = 1e-2, dtype: DTypeLike = np.float64):
        self.shape = tuple(shape)
        self.eps = eps
        self.dtype = np.dtype(dtype)
        self._assign(0, np.zeros(self.shape), np.zeros(self.shape))

    def _assign(self, count: int, mean: np.ndarray, deviation: np.ndarray) -> None:
        self._count, self._mean, self._deviation = count, mean, deviation
        self._std = np.sqrt(np.maximum(deviation / count, self.eps**2)) if count else np.ones(self.shape)

    @property
    def mean(self) -> np.ndarray:
        """Mean of what has been seen so far, 0 before the first update."""
        return self._mean.astype(self.dtype)

    @property
    def std(self) -> np.ndarray:
        """Population standard deviation of what has been seen, at least `eps`; 1 before the first update."""
        return self._std.astype(self.dtype)

    def update(self, x: ArrayLike) -> None:
        """Takes samples into account.

        Args:
            x: ``shape`` (one sample) or ``(..., *shape)``.

        Raises:
            ValueError: If the shape does not fit, or a value is NaN or infinite (which would stay).
        """
        x = np.asarray(x, np.float64)
        if x.shape[x.ndim - len(self.shape) :] != self.shape or x.ndim < len(self.shape):
            raise ValueError(f"Expected samples of shape {self.shape}, got an array of shape {x.shape}.")
        if not np.isfinite(x).all():
            raise ValueError("Cannot take NaN or infinite values into the running mean and deviation.")
        x = x.reshape(-1, *self.shape)
        if not len(x):
            return
        mean = x.mean(axis=0)
        shift = mean - self._mean
        count = self._count + len(x)
        deviation = np.square(x - mean).sum(axis=0) + np.square(shift) * (self._count * len(x) / count)
        self._assign(count, self._mean + shift * (len(x) / count), self._deviation + deviation)

    def normalize(self, x: ArrayLike) -> np.ndarray:
        """Returns ``(x - mean) / std``."""
        return ((np.asarray(x) - self._mean) / self._std).astype(self.dtype)

    def denormalize(self, x: ArrayLike) -> np.ndarray:
        """Returns ``x * std + mean``."""
        return (np.asarray(x) * self._std + self._mean).astype(self.dtype)

    def get_state(self) -> dict[str, Any]:
        """Returns a snapshot of the statistics."""
        return {"count": self._count, "mean": self._mean.copy(), "deviation": self._deviation.copy()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes on from a `get_state()` snapshot (its arrays may have become lists).

        Raises:
            ValueError: If it was taken for samples of another shape.
        """
        mean, deviation = (np.array(state[key], np.float64) for key in ("mean", "deviation"))
        if mean.shape != self.shape or deviation.shape != self.shape:
            raise ValueError(f"Expected a snapshot for shape {self.shape}, got one for {mean.shape}.")
        self._assign(int(state["count"]), mean, deviation)


def _class_path(o: Any) -> str:
    return f"{type(o).__module__}.{type(o).__qualname__}"
