"""Proximal policy optimisation: PPO with the clipped objective."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
from keras import ops

from rl.agents.a2c import A2CAgent
from rl.ops import weighted_mean
from rl.rollout import RolloutBatch
from rl.util import require

_KL_MARGIN = 1.5  # how far above `target_kl` a batch may be


@keras.saving.register_keras_serializable(package="rl")
class PPOAgent(A2CAgent):
    """Proximal policy optimisation, on any number of lanes.

    A rollout is learnt from in several epochs of batches. With the ratio `rho = pi(a | s) / pi_old(a | s)` to the
    policy that acted, the policy's loss is the negative of (Schulman et al. 2017, arXiv:1707.06347, eq. 7)

        L_CLIP = mean[min(rho A, clip(rho, 1 - epsilon, 1 + epsilon) A)]

    with epsilon as `clip_range`; the value's loss and the entropy are those of `A2CAgent`, A is GAE (eq. 11). With
    `clip_value_range` c the value's loss is the mean of the larger one of `(R - V)^2` and
    `(R - (V_old + clip(V - V_old, -c, c)))^2`, as in the authors' implementation.

    Differs from the paper in: the value's loss is weighed by 0.5, the gradient's norm is clipped, advantages are
    standardised in each batch (as in the authors' implementation, which halves the value's loss once more); a truncated
    episode bootstraps from its true last observation.

    Args:
        actor: See `RolloutAgent`.
        critic: The same.
        action_space: The same.
        nb_rollout_steps: The same.
        nb_epochs: How often the rollout is gone through.
        batch_size: Rows per gradient step, out of `nb_rollout_steps * N`. Where these do not divide, the last batch of
            each epoch is smaller.
        gamma: See `RolloutAgent`.
        lam: The same.
        clip_range: epsilon, positive; or a function of the progress, which goes from 0 to 1 in `nb_total_steps` env
            steps, such as `rl.util.LinearSchedule(0.2)`.
        value_loss_weight: See `RolloutAgent`.
        entropy_weight: The same.
        max_grad_norm: The same.
        clip_value_range: c, positive; or a function of the progress; or None: the value is not clipped.
        target_kl: Leave a rollout after the first batch whose `approx_kl` is above 1.5 times this. None: never.
        normalize_advantage: See `RolloutAgent`.
        nb_total_steps: Env steps, over the agent's life, in which the progress goes from 0 to 1.
        **kwargs: The other arguments of `RolloutAgent`.

    Raises:
        ValueError: An argument is out of range, the networks do not fit the action space, or a schedule is given
            without `nb_total_steps`.
    """

    logged = (*A2CAgent.logged, "approx_kl", "clip_fraction")

    def __init__(
        self,
        actor: keras.Model,
        critic: keras.Model | None = None,
        action_space: Any = None,
        nb_rollout_steps: int = 128,
        nb_epochs: int = 4,
        batch_size: int = 256,
        gamma: float = 0.99,
        lam: float = 0.95,
        clip_range: float | Callable[[float], float] = 0.2,
        value_loss_weight: float = 0.5,
        entropy_weight: float = 0.0,
        max_grad_norm: float | None = 0.5,
        clip_value_range: float | Callable[[float], float] | None = None,
        target_kl: float | None = None,
        normalize_advantage: bool = True,
        nb_total_steps: float | None = None,
        **kwargs: Any,
    ):
        for name, count in (("nb_epochs", nb_epochs), ("batch_size", batch_size)):
            require(name, count, int(count) == count and count >= 1, "a whole number of at least 1")
        require("target_kl", target_kl, target_kl is None or target_kl > 0, "positive, or None")
        require("nb_total_steps", nb_total_steps, nb_total_steps is None or nb_total_steps >= 1, "at least 1, or None")
        require("clip_range", clip_range, clip_range is not None, "positive, or a function of the progress")
        for name, value in (("clip_range", clip_range), ("clip_value_range", clip_value_range)):
            if callable(value):
                require("nb_total_steps", nb_total_steps, nb_total_steps is not None, f"given for the schedule {name}")
            else:
                require(name, value, value is None or value > 0, "positive, or a function of the progress")
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
        self.nb_epochs, self.batch_size = int(nb_epochs), int(batch_size)
        self.clip_range, self.clip_value_range = clip_range, clip_value_range
        self.target_kl = None if target_kl is None else float(target_kl)
        self.nb_total_steps = nb_total_steps

    def default_optimizer(self) -> keras.optimizers.Optimizer:
        """Adam with the paper's step size and the authors' epsilon."""
        return keras.optimizers.Adam(3e-4, epsilon=1e-5)

    def policy_loss(self, log_prob: Any, advantage: Any, batch: RolloutBatch) -> tuple[Any, dict[str, Any]]:
        """`-L_CLIP` for log-probabilities `(B,)` and advantages `(B,)`, and what is logged of it."""
        epsilon, log_ratio = batch.scheduled["clip_range"], log_prob - batch.log_prob0
        ratio = ops.exp(log_ratio)
        clipped = ops.clip(ratio, 1.0 - epsilon, 1.0 + epsilon)
        loss = weighted_mean(-ops.minimum(ratio * advantage, clipped * advantage), batch.weight)
        # An estimate of KL(pi_old | pi) that is unbiased, and never negative: E[rho] = 1.
        approx_kl = weighted_mean(ratio - 1.0 - log_ratio, batch.weight)
        outside = ops.cast(ops.abs(ratio - 1.0) > epsilon, "float32")
        return loss, {"approx_kl": approx_kl, "clip_fraction": weighted_mean(outside, batch.weight)}

    def value_loss(self, value: Any, batch: RolloutBatch) -> Any:
        """The squared error, `(B,)`, clipped where `clip_value_range` is given."""
        loss = super().value_loss(value, batch)
        if self.clip_value_range is None:
            return loss
        c = batch.scheduled["clip_value_range"]
        clipped = batch.value0 + ops.clip(value - batch.value0, -c, c)
        return ops.maximum(loss, super().value_loss(clipped, batch))

    def scheduled(self) -> dict[str, float]:
        """The clip ranges at the rollout's first step; see `RolloutAgent.scheduled`."""
        given = {"clip_range": self.clip_range, "clip_value_range": self.clip_value_range}
        now = {name: x(self.progress()) if callable(x) else x for name, x in given.items() if x is not None}
        for name, value in now.items():
            require(f"{name}(progress={self.progress()})", value, value >= 0, "a number of at least 0")
        return now

    def progress(self) -> float:
        """How much of `nb_total_steps` lay behind when the rollout began, from 0 to 1."""
        begun = self.step - self.storage.nb_valid
        return min(1.0, begun / self.nb_total_steps) if self.nb_total_steps else 0.0

    def stop_rule(self) -> Callable[[dict[str, Any]], Any] | None:
        """See `target_kl`."""
        limit = self.target_kl
        return None if limit is None else lambda logs: logs["approx_kl"] > _KL_MARGIN * limit
