"""A policy and a value of states in one model, from the networks that a user gives, and running normalisation."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from rl.common.misc_util import tree_map, warn_user
from rl.distributions import DiagGaussian, Distribution
from rl.networks import check_fit, check_output, feed, network_inputs

_MODAL = (
    *(keras.layers.Dropout, keras.layers.AlphaDropout, keras.layers.GaussianDropout, keras.layers.SpatialDropout1D),
    *(keras.layers.SpatialDropout2D, keras.layers.GaussianNoise, keras.layers.BatchNormalization),
)


class ActorCritic(keras.Model):
    """Maps states to what a distribution takes, and to their value.

    Args:
        actor: Keras network from states `(1, *obs)` or `(*obs)` to logits, to means, or to means and log standard
            deviations; without a critic, a network with two outputs: that, and the value `(None, 1)`.
        critic: Keras network from the same states to `(None, 1)`, or None.
        distribution: The policy's. To a network of means a trainable log standard deviation is added, the same for all
            states.
        owner: The agent's class name, for messages.
        initial_log_std: Where that starts.
        normalize_observation: Normalise float observations by running statistics, which are weights of this model.
        normalize_reward: Keep such statistics of discounted returns, too.

    Attributes:
        log_std: `(A,)`, or None.
        normalizers: One `RunningStatistics` per input of the actor; empty unless `normalize_observation`.
        returns: The `RunningStatistics` of discounted returns, or None.

    Raises:
        ValueError: The networks' outputs do not fit the distribution.
    """

    def __init__(
        self,
        actor: keras.Model,
        critic: keras.Model | None,
        distribution: Distribution,
        owner: str,
        initial_log_std: float = 0.0,
        normalize_observation: bool = False,
        normalize_reward: bool = False,
    ):
        super().__init__(dtype="float32")  # the networks keep their own policies; what is added here stays float32
        self.owner = owner
        self.nb_outputs = _nb_outputs(actor, critic, distribution, owner)
        self.actor, self.critic = actor, critic
        self.log_std: Any = None
        if self.nb_outputs != distribution.nb_outputs:
            start = keras.initializers.Constant(initial_log_std)
            self.log_std = self.add_weight(shape=(distribution.nb_actions,), initializer=start, name="log_std")
        self.normalizers = []
        if normalize_observation:
            inputs = network_inputs(actor)
            if not inputs:
                raise ValueError(
                    f"{owner}: normalize_observation=True needs to know the shapes of the actor's inputs, which the "
                    f"subclassed model {actor.name!r} does not tell. Fix: a functional or Sequential model, or "
                    "rl.common.vec_env.wrappers.VecNormalize around the env"
                )
            self.normalizers = [RunningStatistics(tuple(x.shape[1:]), name=x.name) for x in inputs]
        self.returns = RunningStatistics((), name="returns") if normalize_reward else None
        modal = [x.name for network in (actor, critic) if network is not None for x in _layers(network)]
        if modal:
            warn_user(
                f"{owner}: the layers {modal} stay in inference mode: the policy that learns must be the one that acts"
            )
        self.built = True

    def call(self, states: Any) -> tuple[Any, Any]:
        """`(outputs, value)` of states `(B, 1, *obs)`: `(B, nb_outputs)` and `(B,)`, float32."""
        if self.critic is not None:
            return self.policy(states), self.value(states)
        outputs, value = self._evaluated(self.actor, states)
        return self._with_log_std(outputs), ops.squeeze(value, axis=-1)

    def policy(self, states: Any) -> Any:
        """The outputs alone, `(B, nb_outputs)`."""
        return self._with_log_std(self._evaluated(self.actor, states)) if self.critic is not None else self(states)[0]

    def value(self, states: Any) -> Any:
        """The value alone, `(B,)`."""
        if self.critic is None:
            return self(states)[1]
        return ops.squeeze(self._evaluated(self.critic, states), axis=-1)

    def _evaluated(self, network: keras.Model, states: Any) -> Any:
        given = network(feed(network, self.normalized(states)), training=False)
        return tree_map(lambda x: ops.cast(x, "float32"), tuple(given) if isinstance(given, list) else given)

    def _with_log_std(self, outputs: Any) -> Any:
        if self.log_std is None:
            return outputs
        return ops.concatenate([outputs, ops.broadcast_to(self.log_std, ops.shape(outputs))], axis=-1)

    def normalized(self, states: Any) -> Any:
        """States with the float parts normalised by the statistics as they are."""
        return states if not self.normalizers else self._map_parts(lambda n, x: n.normalize(x), states)

    def _map_parts(self, fn: Any, states: Any) -> Any:
        """Applies `fn(normalizer, part)` to the float parts; a `Dict`'s are known by name, others by position."""
        by_name = {n.name: n for n in self.normalizers}
        if isinstance(states, dict) and set(states) == set(by_name):
            return {key: fn(by_name[key], x) if _is_float(x) else x for key, x in states.items()}
        order = iter(self.normalizers)
        return tree_map(lambda x: fn(n, x) if [n := next(order)] and _is_float(x) else x, states)

    def check_states(self, states: Any) -> None:
        """Raises `ValueError` where the networks cannot take states `(N, 1, *obs)`."""
        if self.critic is not None or network_inputs(self.actor):
            check_fit(self.actor, states, self.nb_outputs, self.owner)
        else:
            zeros = tree_map(lambda x: ops.zeros((2, *x.shape[1:]), dtype=x.dtype), states)
            got = self.actor(feed(self.actor, zeros), training=False)
            shapes = [tuple(x.shape) for x in got] if isinstance(got, (tuple, list)) else tuple(got.shape)
            if shapes != [(2, self.nb_outputs), (2, 1)]:
                raise ValueError(
                    f"{self.owner}: the network {self.actor.name!r} must return (policy, value) of shapes "
                    f"{(2, self.nb_outputs)} and (2, 1) for a batch of two, got {shapes}"
                )
        if self.critic is not None:
            check_fit(self.critic, states, 1, f"{self.owner} (critic)")

    def merged_statistics(self, states: Any, weight: Any) -> list[tuple[Any, Any]]:
        """The statistics' variables, and what they are with these states `(B, 1, *obs)` taken in."""
        merged: list[tuple[Any, Any]] = []
        if self.normalizers:
            self._map_parts(lambda n, x: merged.extend(n.merged(x, weight)), states)
        return merged


class RunningStatistics(keras.layers.Layer):
    """Mean and variance of all samples so far, as weights; they change only where somebody assigns `merged`.

    Args:
        shape: Of one sample.
        clip: Bound of normalised values.
        epsilon: Added to the variance.
        name: Name of the layer.
    """

    def __init__(self, shape: tuple[int, ...], clip: float = 10.0, epsilon: float = 1e-8, name: str | None = None):
        super().__init__(dtype="float32", trainable=False, name=name)
        self.clip, self.epsilon = clip, epsilon
        self.mean = self.add_weight(shape=shape, initializer="zeros", trainable=False, name="mean")
        self.variance = self.add_weight(shape=shape, initializer="ones", trainable=False, name="variance")
        self.count = self.add_weight(shape=(), initializer="zeros", trainable=False, name="count")
        self.built = True

    def normalize(self, x: Any) -> Any:
        """`clip((x - mean) / sqrt(variance + epsilon))`, float32, for samples `(B, ...)` of as many elements."""
        mean, variance = (ops.reshape(v, x.shape[1:]) for v in (self.mean, self.variance))
        return ops.clip((ops.cast(x, "float32") - mean) / ops.sqrt(variance + self.epsilon), -self.clip, self.clip)

    def scaled(self, x: Any) -> Any:
        """`clip(x / sqrt(variance + epsilon))` for numbers: not centred."""
        return ops.clip(x / ops.sqrt(self.variance + self.epsilon), -self.clip, self.clip)

    def merged(self, x: Any, weight: Any) -> list[tuple[Any, Any]]:
        """`(variable, new value)` with samples `(B, ...)` taken in that have weight 1, not 0; one has at least.

        Means and squared deviations are merged (Chan, Golub & LeVeque 1983, doi:10.2307/2683386), which stays exact
        where the difference of two large sums would cancel.
        """
        x = ops.reshape(ops.cast(x, "float32"), (-1, *self.mean.shape))
        w = ops.reshape(weight, (-1, *[1] * len(self.mean.shape)))
        x = ops.where(w > 0, x, 0.0)  # a row that is none may hold anything
        count = ops.sum(weight)
        mean = ops.sum(x * w, axis=0) / count
        variance = ops.sum(ops.square(x - mean) * w, axis=0) / count
        total, shift = self.count + count, mean - self.mean
        share = count / total
        spread = self.variance * (1.0 - share) + variance * share + ops.square(shift) * share * (1.0 - share)
        return [(self.mean, self.mean + shift * share), (self.variance, spread), (self.count, total)]


def _is_float(x: Any) -> bool:
    return keras.backend.is_float_dtype(keras.backend.standardize_dtype(x.dtype))


def _layers(network: keras.Model) -> list[Any]:
    """The layers of a network, at any depth, that behave differently in training."""
    inner = getattr(network, "layers", [])
    return [x for x in inner if isinstance(x, _MODAL)] + [x for layer in inner for x in _layers(layer)]


def _nb_outputs(actor: Any, critic: Any, distribution: Distribution, owner: str) -> int:
    """How many outputs the policy network has; raises where that, or the critic's, does not fit."""
    given = list(getattr(actor, "outputs", None) or [])
    if critic is None and given and len(given) != 2:
        raise ValueError(
            f"{owner}: without a critic the network must have two outputs, policy and value, got {len(given)}. "
            f"Fix: {owner}(actor, critic, ...), or keras.Model(inputs, [policy, value])"
        )
    takes = [distribution.nb_outputs]
    if isinstance(distribution, DiagGaussian):  # means, the log standard deviations being a variable of their own
        takes.insert(0, distribution.nb_actions)
    nb_outputs = given[0].shape[-1] if given and given[0].shape[-1] in takes else takes[0]
    if critic is not None:
        check_output(actor, nb_outputs, owner)
        check_output(critic, 1, f"{owner} (critic)")
    elif given:
        for what, output, n in (("policy", given[0], nb_outputs), ("value", given[1], 1)):
            if tuple(output.shape) != (None, n):
                raise ValueError(
                    f"{owner}: the network's {what} output has shape {tuple(output.shape)}, expected {(None, n)}. "
                    f"Fix: keras.Model(inputs, [policy, value]) with keras.layers.Dense({n}) as {what}"
                )
    return nb_outputs
