"""Policies: how an agent turns Q-values (or probabilities) into actions while it explores."""

from __future__ import annotations

import functools
import math
from typing import Any

import keras
import numpy as np
from numpy.typing import ArrayLike

from rl.util import RandomStream

__all__ = [
    "BoltzmannGumbelQPolicy",
    "BoltzmannQPolicy",
    "EpsGreedyQPolicy",
    "GreedyQPolicy",
    "LinearAnnealedPolicy",
    "MaxBoltzmannQPolicy",
    "Policy",
    "SoftmaxPolicy",
]

register = keras.saving.register_keras_serializable(package="rl")


class Policy(RandomStream):
    """Base class of all policies.

    A policy of your own overrides `select_action` and is then called once per lane with ``q_values`` of shape
    ``(nb_actions,)``. One that handles all lanes at once, ``(N, nb_actions)`` to ``(N,)``, says so by
    ``vectorized = True`` in its own class body; a subclass of it that overrides `select_action` without
    repeating this is called lane by lane again. Draw from `self.rng`, so that evaluation can leave the random
    stream of training as it was.
    """

    vectorized = False
    agent: Any = None

    def _set_agent(self, agent: Any) -> None:
        self.agent = agent

    def select_action(self, *args: Any, **kwargs: Any) -> Any:
        """Chooses an action.

        Args:
            *args: Not used: agents pass keywords.
            **kwargs: What the agent knows: ``q_values``, float, ``(nb_actions,)``.

        Returns:
            The index of the action.
        """
        raise NotImplementedError(f"{type(self).__name__} must override select_action.")

    def select_actions(self, q_values: ArrayLike) -> np.ndarray:
        """Chooses an action for each of N lanes, by one call of `select_action` or by one per lane.

        Args:
            q_values: ``(N, nb_actions)``.

        Returns:
            ``(N,)`` int64.

        Raises:
            ValueError: If `q_values` is no matrix, or `select_action` returned no action indices.
        """
        rows = np.asarray(q_values)
        if rows.ndim != 2:
            raise ValueError(f"select_actions expects q_values of shape (N, nb_actions), got {rows.shape}.")
        cls: Any = type(self)
        if _takes_all_lanes(cls) and "select_action" not in vars(self):
            actions = np.asarray(self._select(rows))
        else:
            actions = np.array([self._select(row) for row in rows])
        if actions.dtype != np.int64 or actions.ndim != 1 or len(actions) != len(rows):
            if actions.size != len(rows) or actions.dtype.kind not in "iub":
                raise ValueError(
                    f"{type(self).__name__}.select_action must return one integer per lane, got "
                    f"{actions.tolist()} for {len(rows)} lane(s)."
                )
            actions = actions.reshape(-1).astype(np.int64)
        # One test of both bounds: read as an unsigned number, a negative one is huge.
        if len(actions) and actions.view(np.uint64).max() >= rows.shape[1]:
            raise ValueError(
                f"{type(self).__name__}.select_action must return indices from 0 to {rows.shape[1] - 1}, got "
                f"{actions.tolist()}."
            )
        return actions

    def _select(self, rows: np.ndarray) -> Any:
        return self.select_action(q_values=rows)

    def probabilities(self, q_values: ArrayLike) -> np.ndarray:
        """The probability of each action, for agents that learn from the mean over actions.

        Args:
            q_values: ``(..., nb_actions)``.

        Returns:
            Of the same shape, float64; along the last axis they add up to 1.

        Raises:
            ValueError: If the policy cannot tell.
        """
        raise ValueError(
            f"{type(self).__name__} cannot tell the probabilities of its actions. Use an epsilon-greedy, greedy or "
            "Boltzmann policy, or implement probabilities(q_values)."
        )

    @property
    def metrics(self) -> list[Any]:
        """Values to log, in the order of `metrics_names`."""
        return []

    @property
    def metrics_names(self) -> list[str]:
        """Names of the values in `metrics`."""
        return []

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments."""
        return {}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Policy:
        """Makes a policy from what `get_config` returned."""
        return cls(**config)


class _QPolicy(Policy):
    """The built-in policies over Q-values: `_choose` maps ``(N, nb_actions)`` to ``(N,)``."""

    vectorized = True

    def select_action(self, q_values: ArrayLike) -> Any:
        """Chooses an action, or one for each lane.

        Args:
            q_values: ``(nb_actions,)`` or ``(N, nb_actions)``.

        Returns:
            An int, or ``(N,)`` int64.

        Raises:
            ValueError: If a Q-value is NaN or infinite. (Minus infinity is allowed beside a finite one.)
        """
        q_values = np.asarray(q_values)
        rows = q_values[None] if q_values.ndim == 1 else q_values
        if rows.ndim != 2 or not rows.shape[1]:
            raise ValueError(f"q_values: expected (nb_actions,) or (N, nb_actions), got {q_values.shape}.")
        # The sum is finite where all are, and the cheapest to know; what fails this test is looked at lane by lane.
        if not math.isfinite(rows.sum(dtype=np.float64)) and not (finite := np.isfinite(rows.max(axis=1))).all():
            raise ValueError(
                f"q_values are NaN or infinite in lane(s) {np.flatnonzero(~finite).tolist()}: "
                f"{rows[~finite][0].tolist()}. The network has diverged or was fed such values: check "
                "observations and rewards, clip errors (delta_clip=1.), lower the learning rate."
            )
        actions = self._choose(rows)
        return int(actions[0]) if q_values.ndim == 1 else actions

    def _choose(self, rows: np.ndarray) -> np.ndarray:
        raise NotImplementedError


@register
class EpsGreedyQPolicy(_QPolicy):
    """With probability `eps` a uniformly random action, else the one of the highest Q-value.

    Every lane tosses its own coin. `eps` may be changed at any time.

    Args:
        eps: Probability of a random action (which may be the best one), from 0 to 1.
    """

    def __init__(self, eps: float = 0.1):
        super().__init__()
        self.eps = _checked_probability("eps", eps)

    def _choose(self, rows: np.ndarray) -> np.ndarray:
        coins, dice = self.rng.random((2, len(rows)))
        # Below 1, so the product rounds to a number below nb_actions.
        random = (dice * rows.shape[1]).astype(np.int64)
        return np.where(coins < self.eps, random, rows.argmax(axis=1))

    def probabilities(self, q_values: ArrayLike) -> np.ndarray:
        """`eps` spread evenly, the rest on the best action, float64."""
        return self.eps / np.shape(q_values)[-1] + (1.0 - self.eps) * _greedy(q_values)

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments."""
        return {**super().get_config(), "eps": self.eps}


@register
class GreedyQPolicy(_QPolicy):
    """The action of the highest Q-value, the first one among equals."""

    def probabilities(self, q_values: ArrayLike) -> np.ndarray:
        """1 for the best action, float64."""
        return _greedy(q_values)

    def _choose(self, rows: np.ndarray) -> np.ndarray:
        return rows.argmax(axis=1)


@register
class BoltzmannQPolicy(_QPolicy):
    """Actions with probability ``exp(q / tau) / sum(exp(q / tau))``.

    Differs from keras-rl in one respect: `clip` bounds the range of ``q / tau`` within a lane, not its value.
    Probabilities depend on differences only, and clipping the values made all actions equally likely as soon
    as all Q-values lay above ``tau * clip[1]`` or below ``tau * clip[0]``.

    Args:
        tau: Temperature, above 0: small is greedy, large is uniform.
        clip: ``(low, high)``; ``q / tau`` lies at most ``high - low`` below the lane's maximum.
    """

    def __init__(self, tau: float = 1.0, clip: tuple[float, float] = (-500.0, 500.0)):
        super().__init__()
        self.tau = _checked_positive("tau", tau)
        self.clip = _checked_clip(clip)

    def probabilities(self, q_values: ArrayLike) -> np.ndarray:
        """Returns the probability of every action, of the shape of `q_values`, float64."""
        return self._boltzmann(q_values)

    def _boltzmann(self, q_values: ArrayLike) -> np.ndarray:
        q_values = np.asarray(q_values, np.float64)
        below = (q_values - q_values.max(axis=-1, keepdims=True)) / self.tau
        weights = np.exp(np.maximum(below, self.clip[0] - self.clip[1]))
        return weights / weights.sum(axis=-1, keepdims=True)

    def _choose(self, rows: np.ndarray) -> np.ndarray:
        return _sample_rows(self._boltzmann(rows), self.rng)

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments."""
        return {**super().get_config(), "tau": self.tau, "clip": list(self.clip)}


@register
class MaxBoltzmannQPolicy(BoltzmannQPolicy):
    """With probability `eps` a Boltzmann-distributed action, else the one of the highest Q-value.

    Source: Wiering, "Explorations in efficient reinforcement learning", PhD thesis, 1999 (max-Boltzmann).

    Args:
        eps: Probability of drawing from the Boltzmann distribution, from 0 to 1; each lane tosses its own coin.
        tau: Temperature, as in `BoltzmannQPolicy`.
        clip: As in `BoltzmannQPolicy`.
    """

    def __init__(self, eps: float = 0.1, tau: float = 1.0, clip: tuple[float, float] = (-500.0, 500.0)):
        super().__init__(tau=tau, clip=clip)
        self.eps = _checked_probability("eps", eps)

    def _choose(self, rows: np.ndarray) -> np.ndarray:
        random = super()._choose(rows)
        return np.where(self.rng.random(len(rows)) < self.eps, random, rows.argmax(axis=1))

    def probabilities(self, q_values: ArrayLike) -> np.ndarray:
        """Boltzmann's by `eps`, the rest on the best action, float64."""
        return self.eps * super().probabilities(q_values) + (1.0 - self.eps) * _greedy(q_values)

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments."""
        return {**super().get_config(), "eps": self.eps}


@register
class BoltzmannGumbelQPolicy(_QPolicy):
    """Boltzmann-Gumbel exploration: ``argmax_a q_a + C / sqrt(n_a) Z_a`` with standard Gumbel noise ``Z_a``.

    Source: Cesa-Bianchi et al., "Boltzmann exploration done right", arXiv:1705.10257. ``n_a`` counts how often
    action a has been chosen in training, over all lanes; it starts at 1, so that the first draw is defined.
    Outside training (``agent.training`` false) the policy explores with the counts it has and counts nothing.

    Args:
        C: Scale of the noise, above 0: of the order of the standard deviation of the returns.

    Attributes:
        action_counts: ``(nb_actions,)`` int64, or None before the first choice. A further `fit` goes on with
            the counts; assigning None starts over.
    """

    def __init__(self, C: float = 1.0):
        super().__init__()
        self.C = _checked_positive("C", C)
        self.action_counts: np.ndarray | None = None

    def _set_agent(self, agent: Any) -> None:
        if self.agent is not None and agent is not self.agent:
            self.action_counts = None  # another agent's choices say nothing about this one's
        super()._set_agent(agent)

    def _choose(self, rows: np.ndarray) -> np.ndarray:
        nb_actions = rows.shape[1]
        counts = np.ones(nb_actions, np.int64) if self.action_counts is None else self.action_counts
        if len(counts) != nb_actions:
            raise ValueError(
                f"This BoltzmannGumbelQPolicy has counted {len(counts)} actions and was given Q-values of "
                f"{nb_actions}. Use one policy per agent, or set policy.action_counts = None."
            )
        noise = self.rng.gumbel(size=rows.shape)
        actions = np.argmax(rows + self.C / np.sqrt(counts) * noise, axis=1)
        if self.agent is None or self.agent.training:
            self.action_counts = counts + np.bincount(actions, minlength=nb_actions)
        return actions

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments."""
        return {**super().get_config(), "C": self.C}

    def get_state(self) -> dict[str, Any]:
        """Returns the random stream and the counts."""
        counts = None if self.action_counts is None else self.action_counts.tolist()
        return {**super().get_state(), "action_counts": counts}

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes on from a `get_state()` snapshot."""
        super().set_state(state)
        counts = state["action_counts"]
        self.action_counts = None if counts is None else np.array(counts, np.int64)


@register
class SoftmaxPolicy(Policy):
    """Draws an action from given probabilities, for networks that end in a softmax (CEM)."""

    vectorized = True

    def select_action(self, nb_actions: int, probs: ArrayLike) -> Any:
        """Draws an action, or one for each lane.

        Args:
            nb_actions: Number of actions.
            probs: ``(nb_actions,)`` or ``(N, nb_actions)``, from 0 to 1, adding up to 1.

        Returns:
            An int, or ``(N,)`` int64.

        Raises:
            ValueError: If `probs` are no probabilities, or not `nb_actions` of them.
        """
        rows = np.asarray(probs, np.float64)
        if rows.ndim not in (1, 2) or rows.shape[-1] != nb_actions:
            raise ValueError(f"probs: expected ({nb_actions},) or (N, {nb_actions}), got {rows.shape}.")
        # Half-precision softmax outputs add up to 1 only roughly.
        if not (rows.min(initial=0) >= 0 and np.all(np.abs(rows.sum(axis=-1) - 1) < 1e-2)):
            raise ValueError(
                f"SoftmaxPolicy expects probabilities (from 0 to 1, adding up to 1), got {rows.tolist()}. "
                "Give the network a softmax as last activation, or use BoltzmannQPolicy for Q-values."
            )
        actions = _sample_rows(np.atleast_2d(rows), self.rng)
        return int(actions[0]) if rows.ndim == 1 else actions

    def _select(self, rows: np.ndarray) -> Any:
        return self.select_action(nb_actions=rows.shape[-1], probs=rows)


@register
class LinearAnnealedPolicy(Policy):
    """Moves an attribute of another policy linearly from `value_max` to `value_min` over the first env steps.

    With s = ``agent.step``, the agent's lifetime count of env steps over all lanes, the value in training is
    ``value_max + (value_min - value_max) * min(s / nb_steps, 1)``, and `value_test` outside training.

    Args:
        inner_policy: The policy that chooses the actions.
        attr: Name of the attribute of `inner_policy` to anneal, for instance ``"eps"``.
        value_max: Value at step 0.
        value_min: Value from step `nb_steps` on. It may be above `value_max`: then the value increases.
        value_test: Value outside training.
        nb_steps: Length of the schedule in env steps (summed over lanes), above 0.

    Raises:
        ValueError: If `inner_policy` has no such attribute, or `nb_steps` is not above 0.
    """

    vectorized = True

    def __init__(
        self,
        inner_policy: Policy,
        attr: str,
        value_max: float,
        value_min: float,
        value_test: float,
        nb_steps: float,
    ):
        super().__init__()
        if not hasattr(inner_policy, attr):
            raise ValueError(f"{type(inner_policy).__name__} has no attribute {attr!r} to anneal.")
        self.inner_policy = inner_policy
        self.attr = attr
        self.value_max = value_max
        self.value_min = value_min
        self.value_test = value_test
        self.nb_steps = _checked_positive("nb_steps", nb_steps)

    def _set_agent(self, agent: Any) -> None:
        super()._set_agent(agent)
        self.inner_policy._set_agent(agent)

    def get_current_value(self) -> float:
        """Returns the value of the attribute at the agent's current step.

        Raises:
            RuntimeError: If the policy belongs to no agent yet.
        """
        if self.agent is None:
            raise RuntimeError("LinearAnnealedPolicy reads the step from its agent: pass it to an agent.")
        if not self.agent.training:
            return self.value_test
        done = min(self.agent.step / self.nb_steps, 1.0)
        return (1.0 - done) * self.value_max + done * self.value_min

    def select_action(self, **kwargs: Any) -> Any:
        """Sets the attribute and lets the inner policy choose, for one lane or for all."""
        self._anneal()
        values: Any = kwargs["q_values"] if "q_values" in kwargs else kwargs.get("probs")
        if np.ndim(values) == 2:
            return self.inner_policy.select_actions(values)
        return self.inner_policy.select_action(**kwargs)

    def _anneal(self) -> None:
        setattr(self.inner_policy, self.attr, self.get_current_value())

    def probabilities(self, q_values: ArrayLike) -> np.ndarray:
        """Sets the attribute and asks the inner policy."""
        self._anneal()
        return self.inner_policy.probabilities(q_values)

    @property
    def rng(self) -> np.random.Generator:
        """The random stream of the inner policy."""
        return self.inner_policy.rng

    @rng.setter
    def rng(self, value: np.random.Generator | int) -> None:
        self.inner_policy.rng = value

    def get_state(self) -> dict[str, Any]:
        """Returns the inner policy's state."""
        return self.inner_policy.get_state()

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes on from a `get_state()` snapshot."""
        self.inner_policy.set_state(state)

    @property
    def metrics(self) -> list[Any]:
        """The attribute's value in the last choice, then the inner policy's metrics."""
        return [getattr(self.inner_policy, self.attr), *self.inner_policy.metrics]

    @property
    def metrics_names(self) -> list[str]:
        """``mean_<attr>``, then the inner policy's names."""
        return [f"mean_{self.attr}", *self.inner_policy.metrics_names]

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments, the inner policy in Keras' serialised form."""
        return {
            **super().get_config(),
            "inner_policy": keras.saving.serialize_keras_object(self.inner_policy),
            "attr": self.attr,
            "value_max": self.value_max,
            "value_min": self.value_min,
            "value_test": self.value_test,
            "nb_steps": self.nb_steps,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> LinearAnnealedPolicy:
        """Makes a policy from what `get_config` returned."""
        config = dict(config)
        config["inner_policy"] = keras.saving.deserialize_keras_object(config["inner_policy"])
        return cls(**config)


@functools.lru_cache(64)
def _takes_all_lanes(cls: type[Policy]) -> bool:
    """Whether the class that defines `select_action` also says `vectorized`."""
    owner = next(c for c in cls.__mro__ if "select_action" in vars(c))
    return bool(vars(owner).get("vectorized", False))


def _greedy(q_values: ArrayLike) -> np.ndarray:
    q_values = np.asarray(q_values)
    return np.eye(q_values.shape[-1])[q_values.argmax(axis=-1)]


def _sample_rows(probabilities: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    # The inverse distribution function, row by row: how many cumulated probabilities does a uniform draw reach?
    # `>=` skips leading zeros; a draw below the last sum never goes past the last action with a probability.
    cumulated = probabilities.cumsum(axis=1)
    draws = rng.random((len(probabilities), 1)) * cumulated[:, -1:]
    return (draws >= cumulated).sum(axis=1)


def _checked_probability(name: str, value: float) -> float:
    if not 0 <= value <= 1:
        raise ValueError(f"{name} is a probability, from 0 to 1, got {value!r}.")
    return value


def _checked_positive(name: str, value: float) -> float:
    if not value > 0:
        raise ValueError(f"{name} must be above 0, got {value!r}.")
    return value


def _checked_clip(clip: tuple[float, float]) -> tuple[float, float]:
    low, high = clip
    if not low <= high:
        raise ValueError(f"clip must be (low, high), got {clip!r}.")
    return low, high
