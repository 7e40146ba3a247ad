"""DDPG: deterministic policy gradients, an actor and a critic that learn from replay."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import ops

from rl.agents.base import ReplayAgent
from rl.agents.continuous import ContinuousActions
from rl.agents.critics import Critics
from rl.agents.dqn import mean_q
from rl.agents.gradient import when
from rl.memory import Batch
from rl.networks import action_input_index, check_output, feed
from rl.ops import polyak, weights_of
from rl.util import clone_model

__all__ = ["DDPGAgent", "mean_q"]


@keras.saving.register_keras_serializable(package="rl")
class DDPGAgent(ContinuousActions, Critics, ReplayAgent):
    """Deep deterministic policy gradients on any number of lanes.

    With actor mu, critic Q, their targets mu' and Q', and d = 1 where the episode terminated (Lillicrap et al. 2016,
    arXiv:1509.02971, algorithm 1; the gradient is that of Silver et al. 2014, theorem 1):

        y = r + gamma (1 - d) Q'(s1, mu'(s1))
        L_critic = mean Huber(y - Q(s0, a0))
        L_actor = -mean Q(s0, mu(s0))

    Each gradient step is one of the critic, then one of the actor, which leaves the critic as it is, then the targets
    move. In `fit` the action is mu(s) plus noise, clipped to the env's bounds; `test` takes mu(s).

    Differs from the paper in: the noise is the user's, none by default; `delta_clip`; the optimizers, and with them
    weight decay, are the user's; a truncated episode bootstraps from its true last observation.

    Args:
        nb_actions: Number of action components, A.
        actor: Keras network from states `(W, *obs)`, or `(*obs)` where `window_length` is 1, to the action. End it with
            a bound, such as tanh and a scale: the critic is asked about what the actor says, the env is given what lies
            within its bounds.
        critic: Keras network from the same states, and the action, to the value, `(None, 1)`: a functional model.
        critic_action_input: Which of the critic's inputs takes the action: that `keras.Input`, its name or its index.
            The others take the states as the actor's do.
        memory: A `SequentialMemory`.
        gamma: Discount factor, in [0, 1].
        batch_size: Transitions per gradient step.
        nb_steps_warmup_critic: Env steps before the first gradient step.
        nb_steps_warmup_actor: Env steps before the actor's first one.
        train_interval: Env steps per gradient step.
        memory_interval: Each lane stores every this many of its steps.
        delta_range: Deprecated: use `delta_clip`.
        delta_clip: Where Huber's loss turns linear. Default: never.
        random_process: Noise for `fit`, a `RandomProcess` with `size=nb_actions`, or None.
        custom_model_objects: Names to classes, for copies of networks with layers that are not registered with Keras.
        target_model_update: As in `ReplayAgent`; the default is the paper's tau.
        **kwargs: `scale_actions` and `nb_steps_random` (see `ContinuousActions`), and those of `Agent`.

    Attributes:
        target_actor: mu'.
        target_critic: Q'.

    Raises:
        ValueError: A network's output or the critic's action input does not fit, or an argument is out of range.
    """

    logged = ("mean_q", "actor_loss")
    loss_learner = "critic"
    policy_delay = 1  # critic's steps per step of the actor and the targets

    def __init__(
        self,
        nb_actions: int,
        actor: keras.Model,
        critic: keras.Model,
        critic_action_input: Any,
        memory: Any,
        gamma: float = 0.99,
        batch_size: int = 32,
        nb_steps_warmup_critic: int = 1000,
        nb_steps_warmup_actor: int = 1000,
        train_interval: int = 1,
        memory_interval: int = 1,
        delta_range: tuple[float, float] | None = None,
        delta_clip: float = np.inf,
        random_process: Any = None,
        custom_model_objects: dict[str, Any] | None = None,
        target_model_update: float = 0.001,
        **kwargs: Any,
    ):
        owner = type(self).__name__
        check_output(actor, nb_actions, f"{owner} (actor)")
        action_input = action_input_index(critic, critic_action_input, nb_actions, owner)
        if nb_steps_warmup_critic > nb_steps_warmup_actor:
            raise ValueError(
                f"{owner}: nb_steps_warmup_critic={nb_steps_warmup_critic} must be at most nb_steps_warmup_actor="
                f"{nb_steps_warmup_actor}: an actor cannot follow a critic that has not learnt. Fix: the same for both"
            )
        mixed = [x.dtype_policy for x in (critic, actor) if x.dtype_policy.name == "mixed_float16"]
        kwargs.setdefault("dtype", (mixed or [actor.dtype_policy])[0])
        super().__init__(
            nb_actions=nb_actions,
            memory=memory,
            gamma=gamma,
            batch_size=batch_size,
            nb_steps_warmup=nb_steps_warmup_critic,
            train_interval=train_interval,
            memory_interval=memory_interval,
            target_model_update=target_model_update,
            delta_range=delta_range,
            delta_clip=delta_clip,
            custom_model_objects=custom_model_objects,
            random_process=random_process,
            **kwargs,
        )
        self.critic_action_input = action_input
        self.nb_steps_warmup_actor = int(nb_steps_warmup_actor)
        # The order of these lines is part of the file format: Keras stores weights by order of assignment.
        self.actor = self.model = actor
        self.critic = critic
        self.target_actor = clone_model(actor, self.custom_model_objects)
        self.target_critic = clone_model(critic, self.custom_model_objects)
        self.target_actor.trainable = self.target_critic.trainable = False
        self._start_clock()

    @property
    def nb_steps_warmup_critic(self) -> int:
        """Env steps before the first gradient step."""
        return self.nb_steps_warmup

    @property
    def critics(self) -> list[tuple[keras.Model, keras.Model]]:
        """The critics, each with its target."""
        return [(self.critic, self.target_critic)]

    def learners(self) -> dict[str, list[Any]]:
        """See `GradientAgent.learners`."""
        return {"actor": [self.actor], "critic": [critic for critic, _ in self.critics]}

    def targets(self) -> list[tuple[Any, Any]]:
        """See `ReplayAgent.targets`."""
        return [(self.target_actor, self.actor), *[(target, critic) for critic, target in self.critics]]

    # ---- the equations ------------------------------------------------------------------------------------------

    def action_of(self, actor: keras.Model, states: Any, training: bool = False) -> Any:
        """mu(s), `(B, A)` float32, of an actor."""
        return ops.cast(actor(feed(actor, states), training=training), "float32")

    def target_action(self, states: Any) -> Any:
        """What the target policy does in the next states, `(B, A)`."""
        return self.action_of(self.target_actor, states)

    def td_target(self, batch: Batch) -> Any:
        """y, `(B,)`: the equation above, with the least of the critics; `batch.discount` is gamma."""
        action1 = self.target_action(batch.state1)
        q1 = ops.stack([self.q_value(target, batch.state1, action1) for _, target in self.critics])
        return ops.stop_gradient(batch.reward + batch.discount * (1.0 - batch.terminal1) * ops.min(q1, axis=0))

    def actor_loss_fn(self, batch: Batch) -> tuple[Any, Any, Any, dict[str, Any]]:
        """L_actor, by the first critic; the actor's metrics compare the stored actions with its own."""
        action = self.action_of(self.actor, batch.state0, training=True)
        loss = -ops.mean(batch.weight * self.q_value(self.critic, batch.state0, action))
        return loss, batch.action, action, {}

    def train_step(self, batch: Batch) -> dict[str, Any]:
        """A step of the critic, and one of the actor and of the targets where it is their turn; compiled."""
        number = self._tick()
        logs = self.gradient_step(batch)
        alone = self.nb_steps_warmup_actor // self.train_interval - self.nb_steps_warmup // self.train_interval

        def follow() -> Any:
            loss = when(alone == 0 or number > alone, lambda: self._actor_step(batch), _no_loss())
            if self.target_model_update < 1:
                polyak(*weights_of(self.targets()), tau=self.target_model_update)
            return loss

        turn = self.policy_delay == 1 or ops.equal(number % self.policy_delay, 0)
        actor_loss = when(turn, follow, _no_loss())
        # A step that failed is told from one that was not due.
        loss = ops.where(ops.isinf(actor_loss), float("nan"), logs["loss"])
        return logs | {"loss": loss, "actor_loss": actor_loss}

    def _actor_step(self, batch: Batch) -> Any:
        loss = self.descend("actor", lambda: self.actor_loss_fn(batch))["loss"]
        return ops.where(ops.isnan(loss), float("inf"), loss)

    # ---- weights and files --------------------------------------------------------------------------------------

    def update_target_models_hard(self) -> None:
        """Copies the networks' weights into the target networks."""
        self.copy_to_targets()

    def get_config(self) -> dict[str, Any]:
        """See `SavedAgent.get_config`."""
        return {name: value for name, value in super().get_config().items() if name != "nb_steps_warmup"}


def _no_loss() -> Any:
    return ops.convert_to_tensor(float("nan"), dtype="float32")
