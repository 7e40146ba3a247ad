"""What agents share that have critics of states and actions."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import ops

from rl.memory import Batch
from rl.networks import check_fit, feed
from rl.ops import huber
from rl.saving import suffixed
from rl.util import clone_model, require


class Critics:
    """Mixin of agents on `ReplayAgent`, named before it: the values of actions, and a count of gradient steps.

    A subclass has `actor`, `critic_action_input`, `td_target` and `critics`, and calls `_start_clock` last of all, as
    Keras stores weights by order of assignment.
    """

    outputs_per_action = 1  # of the actor
    nb_actions: int
    actor: keras.Model
    critic_action_input: int
    delta_clip: float

    @property
    def critics(self) -> list[tuple[keras.Model, keras.Model]]:
        """The critics, each with its target."""
        raise NotImplementedError(f"{type(self).__name__} must have critics")

    def q_value(self, critic: keras.Model, states: Any, action: Any, training: bool = False) -> Any:
        """Q(s, a), `(B,)` float32, of a critic, for actions `(B, A)` in the units of the actor's outputs."""
        fed = feed(critic, states, {self.critic_action_input: action})
        return ops.squeeze(ops.cast(critic(fed, training=training), "float32"), axis=-1)

    def loss_fn(self: Any, batch: Batch) -> tuple[Any, Any, Any, dict[str, Any]]:
        """L_critic, summed over the critics; see `ReplayAgent.loss_fn`."""
        target = self.td_target(batch)
        # After the target: Keras keeps the activity regularisers' losses of a network's last call.
        q0 = [self.q_value(critic, batch.state0, batch.action, training=True) for critic, _ in self.critics]
        loss = sum(ops.mean(batch.weight * huber(target - q, self.delta_clip)) for q in q0)
        return loss, target, q0[0], {"mean_q": ops.mean(q0[0])}

    def check_states(self, states: Any) -> None:
        """See `ReplayAgent.check_states`."""
        owner = type(self).__name__
        check_fit(self.actor, states, self.outputs_per_action * self.nb_actions, f"{owner} (actor)")
        for critic, _ in self.critics:
            check_fit(critic, states, 1, f"{owner} (critic)", [self.critic_action_input])

    def weights_files(self, path: str) -> dict[str, Any]:
        """`<name>_actor<ending>` and `<name>_critic<ending>`; see `SavedAgent.weights_files`."""
        return {suffixed(path, "_actor"): self.actor, suffixed(path, "_critic"): self.critics[0][0]}

    def _start_clock(self: Any) -> None:
        self._clock = self.add_weight(shape=(), initializer="zeros", dtype="int", trainable=False, name="nb_updates")

    def _tick(self: Any) -> Any:
        """Counts a gradient step, and returns its number; compiled."""
        number = ops.convert_to_tensor(self._clock) + 1
        self._clock.assign(number)
        return number

    def load_own_variables(self: Any, store: Any) -> None:
        """Goes on counting the gradient steps; see `SavedAgent.load_own_variables`."""
        super().load_own_variables(store)  # type: ignore[misc]
        self._clock.assign(self.run_state.nb_updates)


class TwinCritics(Critics):
    """Mixin of agents with two critics, `critic` and `critic_2`, and their targets."""

    critic: keras.Model
    critic_2: keras.Model
    target_critic: keras.Model
    target_critic_2: keras.Model

    @property
    def critics(self) -> list[tuple[keras.Model, keras.Model]]:
        """The two critics, each with its target."""
        return [(self.critic, self.target_critic), (self.critic_2, self.target_critic_2)]

    def weights_files(self, path: str) -> dict[str, Any]:
        """`<name>_actor<ending>`, `<name>_critic<ending>` and `<name>_critic_2<ending>`."""
        return super().weights_files(path) | {suffixed(path, "_critic_2"): self.critic_2}

    def get_config(self) -> dict[str, Any]:
        """See `SavedAgent.get_config`."""
        both = keras.saving.serialize_keras_object([self.critic, self.critic_2])
        return super().get_config() | {"critic": both}  # type: ignore[misc]


def pair_of(critic: Any) -> list[keras.Model]:
    """The one critic, or the two, that a user gave.

    Raises:
        ValueError: They are more.
    """
    pair = list(critic) if isinstance(critic, (list, tuple)) else [critic]
    require("critic", critic, len(pair) in (1, 2), "one critic, or a list of two")
    return pair


def twin_of(critic: keras.Model, custom_objects: dict[str, Any], owner: str) -> keras.Model:
    """A copy of a critic with fresh weights.

    Args:
        critic: The critic.
        custom_objects: See `rl.util.clone_model`.
        owner: The agent's class name, for the message.

    Raises:
        ValueError: The copy would start where the critic did.
    """
    twin = clone_model(critic, custom_objects, fresh=True)
    if all(np.array_equal(*w) for w in zip(twin.get_weights(), critic.get_weights(), strict=True)):
        raise ValueError(
            f"{owner}: the critic's twin would start with the very same weights, since its initializers have seeds or "
            "are constant. Fix: critic=[critic, another_critic]"
        )
    return twin
