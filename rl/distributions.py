"""Policies as probability distributions over actions: sample, mode, log-probability, entropy.

A distribution describes the policy of one action space and holds no tensor: its methods take `outputs`, what the policy
network says about B states, `(B, nb_outputs)` float32. A sample is a function of outputs and of noise that was
drawn on the host, so that one generator decides every action and a compiled function stays a function of its arguments.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from keras import ops


class Distribution(ABC):
    """What a policy needs to know about an action space.

    Attributes:
        nb_outputs: Length of `outputs` per state.
        nb_actions: Components of one action.
    """

    nb_outputs: int
    nb_actions: int

    def noise(self, rng: np.random.Generator, nb_rows: int) -> np.ndarray:
        """Draws what `sample` makes actions of: `(nb_rows, K)` float32."""
        return rng.standard_normal((nb_rows, self.nb_actions), np.float32)

    @abstractmethod
    def sample(self, outputs: Any, noise: Any) -> Any:
        """Actions drawn from the policy: `(B,)` or `(B, A)`; a function of `noise`, see there."""

    @abstractmethod
    def mode(self, outputs: Any) -> Any:
        """The most probable actions, shaped as those of `sample`."""

    @abstractmethod
    def log_prob(self, outputs: Any, action: Any) -> Any:
        """Log-probability, or log-density, of actions, `(B,)`; that of several components is the sum of theirs."""

    @abstractmethod
    def entropy(self, outputs: Any) -> Any:
        """Entropy in nats, `(B,)`; that of several components is the sum of theirs."""


class Categorical(Distribution):
    """One of n actions, `p_a = exp(l_a) / sum_b exp(l_b)` with the logits l as outputs; an action is its index.

    A sample is `argmax_a (l_a + g_a)` with Gumbel noise g (Maddison et al. 2014, arXiv:1411.0030, section 2).

    Args:
        nb_actions: n.
    """

    nb_actions = 1

    def __init__(self, nb_actions: int):
        self.nb_outputs = int(nb_actions)

    def noise(self, rng: np.random.Generator, nb_rows: int) -> np.ndarray:
        """Gumbel noise `(nb_rows, n)`."""
        # Drawn as float64: NumPy's float32 exponential is 0 once in 1e7 draws, whose Gumbel noise outdoes any logits.
        return rng.gumbel(size=(nb_rows, self.nb_outputs)).astype(np.float32)

    def sample(self, outputs: Any, noise: Any) -> Any:
        """Indices `(B,)`, int32."""
        return ops.argmax(outputs + noise, axis=-1)

    def mode(self, outputs: Any) -> Any:
        """Indices `(B,)`, int32."""
        return ops.argmax(outputs, axis=-1)

    def log_prob(self, outputs: Any, action: Any) -> Any:
        """See `Distribution.log_prob`."""
        chosen = ops.one_hot(ops.cast(action, "int32"), self.nb_outputs, dtype="float32")
        return ops.sum(chosen * ops.log_softmax(outputs, axis=-1), axis=-1)

    def entropy(self, outputs: Any) -> Any:
        """`-sum_a p_a log p_a`."""
        log_p = ops.log_softmax(outputs, axis=-1)
        return -ops.sum(ops.exp(log_p) * log_p, axis=-1)


class MultiCategorical(Distribution):
    """K independent choices, the k-th one of `nvec[k]`; outputs are their logits side by side.

    Args:
        nvec: Number of actions of each component.
    """

    def __init__(self, nvec: Sequence[int]):
        self.parts = [Categorical(n) for n in nvec]
        self.nb_actions = len(self.parts)
        ends = list(itertools.accumulate(part.nb_outputs for part in self.parts))
        self.nb_outputs = ends[-1]
        self._slices = [slice(end - part.nb_outputs, end) for end, part in zip(ends, self.parts, strict=True)]

    def _split(self, *tensors: Any) -> Any:
        """The parts, each with its columns of every tensor."""
        return zip(self.parts, *([x[:, at] for at in self._slices] for x in tensors), strict=True)

    def noise(self, rng: np.random.Generator, nb_rows: int) -> np.ndarray:
        """Gumbel noise `(nb_rows, nb_outputs)`."""
        return np.concatenate([part.noise(rng, nb_rows) for part in self.parts], axis=1)

    def sample(self, outputs: Any, noise: Any) -> Any:
        """Indices `(B, K)`, int32."""
        return ops.stack([part.sample(o, n) for part, o, n in self._split(outputs, noise)], axis=-1)

    def mode(self, outputs: Any) -> Any:
        """Indices `(B, K)`, int32."""
        return ops.stack([part.mode(o) for part, o in self._split(outputs)], axis=-1)

    def log_prob(self, outputs: Any, action: Any) -> Any:
        """See `Distribution.log_prob`."""
        return sum(part.log_prob(o, action[:, k]) for k, (part, o) in enumerate(self._split(outputs)))

    def entropy(self, outputs: Any) -> Any:
        """See `Distribution.entropy`."""
        return sum(part.entropy(o) for part, o in self._split(outputs))


class Bernoulli(Distribution):
    """K independent switches, on with probability `sigmoid(l_k)`, with the logits l as outputs.

    A switch is on where `l + n > 0` with logistic noise n, whose distribution function is the sigmoid.

    Args:
        nb_actions: K.
    """

    def __init__(self, nb_actions: int):
        self.nb_actions = self.nb_outputs = int(nb_actions)

    def noise(self, rng: np.random.Generator, nb_rows: int) -> np.ndarray:
        """Logistic noise `(nb_rows, K)`."""
        return rng.logistic(size=(nb_rows, self.nb_actions)).astype(np.float32)

    def sample(self, outputs: Any, noise: Any) -> Any:
        """0 or 1, `(B, K)` int32."""
        return ops.cast(outputs + noise > 0, "int32")

    def mode(self, outputs: Any) -> Any:
        """0 or 1, `(B, K)` int32."""
        return ops.cast(outputs > 0, "int32")

    def log_prob(self, outputs: Any, action: Any) -> Any:
        """`sum_k log sigmoid(+-l_k)`, with plus where the switch is on."""
        return ops.sum(ops.log_sigmoid((2.0 * ops.cast(action, "float32") - 1.0) * outputs), axis=-1)

    def entropy(self, outputs: Any) -> Any:
        """`sum_k softplus(l_k) - l_k sigmoid(l_k)`."""
        return ops.sum(ops.softplus(outputs) - outputs * ops.sigmoid(outputs), axis=-1)


class DiagGaussian(Distribution):
    """A independent normal components; outputs are their means, then the logarithms of their standard deviations.

    Actions are unbounded: what an env cannot take is clipped on the way to it, and the log-probability is that of
    the action before.

    Args:
        nb_actions: A.
    """

    def __init__(self, nb_actions: int):
        self.nb_actions = int(nb_actions)
        self.nb_outputs = 2 * self.nb_actions

    def _split(self, outputs: Any) -> tuple[Any, Any]:
        return outputs[:, : self.nb_actions], outputs[:, self.nb_actions :]

    def sample(self, outputs: Any, noise: Any) -> Any:
        """`mean + std * noise` with standard normal noise, `(B, A)` float32."""
        mean, log_std = self._split(outputs)
        return mean + ops.exp(log_std) * noise

    def mode(self, outputs: Any) -> Any:
        """The mean, `(B, A)` float32."""
        return self._split(outputs)[0]

    def log_prob(self, outputs: Any, action: Any) -> Any:
        """`-sum (z^2 / 2 + log std + log(2 pi) / 2)` with `z = (action - mean) / std`."""
        mean, log_std = self._split(outputs)
        z = (action - mean) * ops.exp(-log_std)
        return -ops.sum(0.5 * ops.square(z) + log_std, axis=-1) - 0.5 * self.nb_actions * math.log(2 * math.pi)

    def entropy(self, outputs: Any) -> Any:
        """`sum (log std + log(2 pi e) / 2)`."""
        log_std = self._split(outputs)[1]
        return ops.sum(log_std, axis=-1) + 0.5 * self.nb_actions * math.log(2 * math.pi * math.e)


class SquashedGaussian(DiagGaussian):
    """Independent normal components u, squashed: `action = tanh(u)`, in [-1, 1].

    Outputs are the means of u, then the logarithms of its standard deviations, which are clipped to [-20, 2]. The
    density is that of u over the slope of tanh (Haarnoja et al. 2018, arXiv:1801.01290, appendix C), in a form without
    the logarithm of a difference, which stays finite where tanh rounds to 1:

        log pi(tanh u) = log N(u) - sum 2 (log 2 - u - softplus(-2 u))

    Args:
        nb_actions: A.
    """

    LOG_STD = (-20.0, 2.0)

    def bounded(self, outputs: Any) -> Any:
        """The outputs `(B, 2 A)` with log standard deviations within their bounds."""
        return ops.concatenate(self._split(outputs), axis=-1)

    def _split(self, outputs: Any) -> tuple[Any, Any]:
        mean, log_std = super()._split(outputs)
        return mean, ops.clip(log_std, *self.LOG_STD)

    def sample(self, outputs: Any, noise: Any) -> Any:
        """`tanh(mean + std * noise)` with standard normal noise, `(B, A)` float32."""
        return ops.tanh(super().sample(outputs, noise))

    def sample_and_log_prob(self, outputs: Any, noise: Any) -> tuple[Any, Any]:
        """What `sample` gives, and its log-density `(B,)`: exact, and differentiable through the sample."""
        u = super().sample(outputs, noise)
        return ops.tanh(u), self.log_prob_of(outputs, u, noise)

    def mode(self, outputs: Any) -> Any:
        """`tanh(mean)`, `(B, A)` float32: the median of each component, by custom called the policy's mode."""
        return ops.tanh(super().mode(outputs))

    def log_prob(self, outputs: Any, action: Any) -> Any:
        """Log-density of actions. Near -1 and 1 float32 hardly tells them apart: where u is known, `log_prob_of`."""
        edge = 1.0 - 2.0**-24  # the largest float32 below 1; atanh(1) would be infinite
        return self.log_prob_of(outputs, ops.arctanh(ops.clip(action, -edge, edge)))

    def log_prob_of(self, outputs: Any, u: Any, noise: Any = None) -> Any:
        """Log-density of the action `tanh(u)`, `(B,)`.

        Args:
            outputs: `(B, 2 A)`.
            u: The action before tanh, `(B, A)`.
            noise: What u was made of, where that is known: `(u - mean) / std` without its rounding.
        """
        mean, log_std = self._split(outputs)
        z = (u - mean) * ops.exp(-log_std) if noise is None else noise
        normal = 0.5 * ops.square(z) + log_std + 0.5 * math.log(2 * math.pi)
        return -ops.sum(normal + _log_slope(u), axis=-1)

    def entropy(self, outputs: Any) -> Any:
        """That of u, plus the mean of log(1 - tanh^2), which has no closed form: to 0.03 nats, by 65 points."""
        mean, log_std = self._split(outputs)
        points, shares = np.polynomial.hermite_e.hermegauss(65)
        u = ops.expand_dims(mean, -1) + ops.expand_dims(ops.exp(log_std), -1) * points.astype("float32")
        shares = (shares / math.sqrt(2 * math.pi)).astype("float32")
        return super().entropy(outputs) + ops.sum(ops.sum(shares * _log_slope(u), axis=-1), axis=-1)


def _log_slope(u: Any) -> Any:
    """`log(1 - tanh(u)^2)`, elementwise."""
    return 2.0 * (math.log(2.0) - u - ops.softplus(-2.0 * u))


def distribution_for(action_space: Any) -> Distribution:
    """The distribution over an action space.

    Args:
        action_space: Of one env: `Discrete` (`Categorical`), `MultiDiscrete` (`MultiCategorical`), `MultiBinary`
            (`Bernoulli`), or `Box` of floats (`DiagGaussian`); of more than one axis, the components are flattened.

    Raises:
        ValueError: For another space.
    """
    if isinstance(action_space, spaces.Discrete):
        return Categorical(int(action_space.n))
    if isinstance(action_space, spaces.MultiDiscrete):
        return MultiCategorical([int(n) for n in np.ravel(action_space.nvec)])
    if isinstance(action_space, spaces.MultiBinary):
        return Bernoulli(int(np.prod(action_space.shape)))
    if isinstance(action_space, spaces.Box) and np.issubdtype(action_space.dtype, np.floating):
        return DiagGaussian(int(np.prod(action_space.shape)))
    raise ValueError(
        "action_space must be one env's Discrete, MultiDiscrete, MultiBinary or Box of floats (env.action_space; "
        f"env.single_action_space of a gymnasium.vector env), got {action_space!r}"
    )
