"""Advantage actor-critic: A2C."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from rl.agents.base import RolloutAgent
from rl.ops import standardize, weighted_mean
from rl.rollout import RolloutBatch


@keras.saving.register_keras_serializable(package="rl")
class A2CAgent(RolloutAgent):
    """Advantage actor-critic, on any number of lanes: A3C's equations with synchronous actors.

    One gradient step per rollout (Mnih et al. 2016, arXiv:1602.01783, algorithm S3), with policy pi, value V, the
    advantage A and the value's target R = A + V of the rollout as constants:

        L = mean[-A log pi(a | s)] + value_loss_weight mean[(R - V(s))^2] - entropy_weight mean[H(pi(. | s))]

    `A = sum_k (gamma lam)^k delta_{t+k}`; at `lam=1` R is the discounted return up to the rollout's end, plus the
    discounted value of what followed.

    Differs from the paper in: lanes step together, so there is no stale gradient; the gradient is that of one mean over
    the rollout, its norm is clipped; a truncated episode bootstraps from its true last observation. In Keras' RMSprop
    epsilon stands inside the root and the mean of squares starts at 0 (in TensorFlow 1's, which the paper's authors
    used, it starts at 1).

    Args:
        actor: See `RolloutAgent`.
        critic: The same.
        action_space: The same.
        nb_rollout_steps: The same.
        gamma: The same.
        lam: The same.
        value_loss_weight: The same.
        entropy_weight: The same.
        max_grad_norm: The same.
        normalize_advantage: The same.
        **kwargs: The other arguments of `RolloutAgent`.

    Raises:
        ValueError: An argument is out of range, or the networks do not fit the action space.
    """

    logged: tuple[str, ...] = ("policy_loss", "value_loss", "entropy")

    def __init__(
        self,
        actor: keras.Model,
        critic: keras.Model | None = None,
        action_space: Any = None,
        nb_rollout_steps: int = 5,
        gamma: float = 0.99,
        lam: float = 1.0,
        value_loss_weight: float = 0.5,
        entropy_weight: float = 0.0,
        max_grad_norm: float | None = 0.5,
        normalize_advantage: bool = False,
        **kwargs: Any,
    ):
        super().__init__(
            actor,
            critic,
            action_space,
            nb_rollout_steps=nb_rollout_steps,
            gamma=gamma,
            lam=lam,
            value_loss_weight=value_loss_weight,
            entropy_weight=entropy_weight,
            max_grad_norm=max_grad_norm,
            normalize_advantage=normalize_advantage,
            **kwargs,
        )

    def default_optimizer(self) -> keras.optimizers.Optimizer:
        """RMSprop with the step size and decay of the reference implementation."""
        return keras.optimizers.RMSprop(7e-4, rho=0.99, epsilon=1e-5)

    def loss_fn(self, batch: RolloutBatch) -> tuple[Any, Any, Any, dict[str, Any]]:
        """L; see `GradientAgent.loss_fn`."""
        outputs, value = self.model(batch.state0)
        log_prob = self.distribution.log_prob(outputs, batch.action)
        entropy = weighted_mean(self.distribution.entropy(outputs), batch.weight)
        advantage = standardize(batch.advantage, batch.weight) if self.normalize_advantage else batch.advantage
        policy_loss, logs = self.policy_loss(log_prob, advantage, batch)
        value_loss = weighted_mean(self.value_loss(value, batch), batch.weight)
        loss = policy_loss + self.value_loss_weight * value_loss - self.entropy_weight * entropy
        logs = {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy, **logs}
        return loss, batch.target, value, logs

    def policy_loss(self, log_prob: Any, advantage: Any, batch: RolloutBatch) -> tuple[Any, dict[str, Any]]:
        """The first term of L for log-probabilities `(B,)` and advantages `(B,)`, and what is logged of it."""
        return weighted_mean(-advantage * log_prob, batch.weight), {}

    def value_loss(self, value: Any, batch: RolloutBatch) -> Any:
        """What the second term of L is the mean of, `(B,)`, for values `(B,)`."""
        return ops.square(batch.target - value)
