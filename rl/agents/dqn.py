"""Deep Q-learning: DQN, Double DQN and the dueling network."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from rl.agents.base import ReplayAgent
from rl.agents.naf import ContinuousDQNAgent, NAFAgent, NAFLayer
from rl.agents.q_values import QValues
from rl.memory import Batch
from rl.networks import check_output, feed
from rl.ops import huber, take
from rl.util import clone_model

# What keras-rl had in this module, too.
__all__ = ["AbstractDQNAgent", "ContinuousDQNAgent", "DQNAgent", "NAFAgent", "NAFLayer", "dueling_network", "mean_q"]

AbstractDQNAgent = ReplayAgent


def mean_q(y_true: Any, y_pred: Any) -> Any:
    """keras-rl's metric: the mean of the largest Q-value per state. The agents log it by themselves."""
    return ops.mean(ops.max(y_pred, axis=-1)) if len(y_pred.shape) > 1 else ops.mean(y_pred)


@keras.saving.register_keras_serializable(package="rl")
class DQNAgent(QValues, ReplayAgent):
    """Deep Q-learning on any number of lanes.

    With online network Q, target network Q' and d = 1 where the episode terminated (Mnih et al. 2015,
    doi:10.1038/nature14236, algorithm 1):

        y = r + gamma (1 - d) max_a Q'(s1, a)
        L = mean Huber(y - Q(s0, a0))

    Double DQN (van Hasselt et al. 2016, arXiv:1509.06461, eq. 4) evaluates the online network's choice instead:
    `y = r + gamma (1 - d) Q'(s1, argmax_a Q(s1, a))`. The dueling network (Wang et al. 2016, arXiv:1511.06581, eq. 9)
    splits the last layer: `Q = V + A - mean_a A` (`avg`), `V + A - max_a A` (`max`), or `V + A` (`naive`).

    Differs from the papers in: `delta_clip` is infinite by default, as in keras-rl (the paper clips at 1); the
    optimizer is the user's; the gradient into the dueling network's trunk is not rescaled; a truncated episode
    bootstraps from its true last observation.

    Args:
        model: Keras network from states `(W, *obs)`, or `(*obs)` where `window_length` is 1, to `nb_actions`
            Q-values. With several inputs, `Dict` observations are routed by input name, `Tuple` by position.
        policy: Exploration over Q-values in `fit`. Default: `EpsGreedyQPolicy()`.
        test_policy: The same in `test`. Default: `GreedyQPolicy()`.
        enable_double_dqn: Use Double DQN's target.
        enable_dueling_network: Replace the network's last layer by a dueling head.
        dueling_type: `"avg"`, `"max"` or `"naive"`.
        nb_actions: Number of actions: the network's outputs.
        **kwargs: `memory` and the other arguments of `ReplayAgent`.

    Raises:
        ValueError: The network's output is not `(None, nb_actions)`, or an argument is out of range.
    """

    logged = ("mean_q",)

    def __init__(
        self,
        model: keras.Model,
        policy: Any = None,
        test_policy: Any = None,
        enable_double_dqn: bool = False,
        enable_dueling_network: bool = False,
        dueling_type: str = "avg",
        *,
        nb_actions: int,
        **kwargs: Any,
    ):
        if dueling_type not in ("avg", "max", "naive"):
            raise ValueError(f"dueling_type must be 'avg', 'max' or 'naive', got {dueling_type!r}")
        check_output(model, nb_actions, type(self).__name__)
        kwargs.setdefault("dtype", model.dtype_policy)
        super().__init__(nb_actions=nb_actions, **kwargs)
        self.enable_double_dqn = bool(enable_double_dqn)
        self.enable_dueling_network = bool(enable_dueling_network)
        self.dueling_type = dueling_type
        # The order of these two lines is part of the file format: Keras stores weights by order of assignment.
        self.model = dueling_network(model, self.nb_actions, dueling_type) if enable_dueling_network else model
        self.target_model = clone_model(self.model, self.custom_model_objects)
        self.target_model.trainable = False
        self._set_policies(policy, test_policy)

    def targets(self) -> list[tuple[Any, Any]]:
        """See `ReplayAgent.targets`."""
        return [(self.target_model, self.model)]

    def q_values(self, network: keras.Model, states: Any, training: bool = False) -> Any:
        """Q-values `(B, nb_actions)` of a network, in float32."""
        return ops.cast(network(feed(network, states), training=training), "float32")

    def td_target(self, batch: Batch) -> Any:
        """y, `(B,)`: the equation above; `batch.discount` is gamma."""
        q1 = self.q_values(self.target_model, batch.state1)
        if self.enable_double_dqn:
            v1 = take(q1, ops.argmax(self.q_values(self.model, batch.state1), axis=-1))
        else:
            v1 = ops.max(q1, axis=-1)
        return ops.stop_gradient(batch.reward + batch.discount * (1.0 - batch.terminal1) * v1)

    def loss_fn(self, batch: Batch) -> tuple[Any, Any, Any, dict[str, Any]]:
        """L; see `ReplayAgent.loss_fn`."""
        target = self.td_target(batch)
        # After the target: Keras keeps the activity regularisers' losses of a network's last call.
        q0 = self.q_values(self.model, batch.state0, training=True)
        prediction = take(q0, batch.action)
        loss = ops.mean(batch.weight * huber(target - prediction, self.delta_clip))
        return loss, target, prediction, {"mean_q": ops.mean(ops.max(q0, axis=-1))}

    def update_target_model_hard(self) -> None:
        """Copies the network's weights into the target network."""
        self.copy_to_targets()

    def get_config(self) -> dict[str, Any]:
        """See `SavedAgent.get_config`; a dueling head is part of the model by now."""
        return super().get_config() | {"enable_dueling_network": False}


def dueling_network(model: keras.Model, nb_actions: int, dueling_type: str = "avg") -> keras.Model:
    """Replaces a network's last layer by a dueling head: one value and `nb_actions` advantages.

    Args:
        model: A functional or sequential network with a dense last layer.
        nb_actions: Number of actions.
        dueling_type: `"avg"`, `"max"` or `"naive"`: what is taken from the advantages, per state.

    Returns:
        A network with the same inputs, made of Keras' own pieces only, so that it loads without this library.

    Raises:
        ValueError: The output does not come from a dense layer that can be found and replaced.
    """
    try:
        kept = list(model.layers)
        found = kept[-1].output is model.outputs[0]
        while type(kept[-1]) is keras.layers.Activation and kept[-1].activation is keras.activations.linear:
            kept.pop()
        trunk, inputs = kept[-1].input, model.inputs[0] if len(model.inputs) == 1 else model.input
    except (AttributeError, IndexError, ValueError, TypeError):  # Keras' ways to say that there is none
        found = False
    if not found or not isinstance(kept[-1], keras.layers.Dense):
        raise ValueError(
            "enable_dueling_network=True replaces the last layer, a keras.layers.Dense(nb_actions), of a functional or "
            f"Sequential model; {type(model).__name__} {model.name!r} has no such layer. Fix: end the model with it, "
            "or build the dueling head into the model"
        )
    head = keras.layers.Dense(nb_actions + 1, dtype="float32", name="dueling")(trunk)
    value, advantage = head[:, :1], head[:, 1:]
    if dueling_type == "avg":
        advantage = advantage - ops.mean(advantage, axis=1, keepdims=True)
    elif dueling_type == "max":
        advantage = advantage - ops.max(advantage, axis=1, keepdims=True)
    return keras.Model(inputs, value + advantage, name=f"dueling_{model.name}")
