"""Normalised advantage functions: deep Q-learning of continuous actions."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from rl.agents.base import ReplayAgent
from rl.agents.continuous import ContinuousActions
from rl.agents.quadratic import NAFLayer, NAFModel, value_of
from rl.memory import Batch
from rl.ops import huber
from rl.util import clone_model

__all__ = ["ContinuousDQNAgent", "NAFAgent", "NAFLayer"]


@keras.saving.register_keras_serializable(package="rl")
class NAFAgent(ContinuousActions, ReplayAgent):
    """Deep Q-learning of continuous actions by normalised advantage functions, on any number of lanes.

    Q is quadratic in the action, so that its maximum is known: V(s), at mu(s). With target network V' of V, and d = 1
    where the episode terminated (Gu, Lillicrap, Sutskever and Levine 2016, arXiv:1603.00748, eq. 2 and 3, algorithm 1):

        Q(s, a) = V(s) - 1/2 (a - mu(s))^T P(s) (a - mu(s)),    P = L L^T
        y = r + gamma (1 - d) V'(s1)
        L = mean Huber(y - Q(s0, a0))

    One optimizer trains the three networks. In `fit` the action is mu(s) plus noise, clipped to the env's bounds; the
    executed action is the one that is learnt from. `test` takes mu(s).

    Differs from the paper in: three networks instead of one with three heads (which they may share layers of);
    `delta_clip`; no imagination rollouts; see also `NAFLayer`.

    Args:
        V_model: Keras network from states `(W, *obs)`, or `(*obs)` where `window_length` is 1, to the value.
        L_model: Keras network from the same states to the entries of L, see `NAFLayer`: `A (A + 1) / 2`, or A with
            `covariance_mode="diag"`. keras-rl's form, with the action as first input, is given zeros for it, with a
            warning.
        mu_model: Keras network from the same states to the action. End it with a bound, such as tanh and a scale: V is
            the value of mu, which should be an action that the env takes.
        random_process: Noise for `fit`, an `rl.random.RandomProcess`, or None.
        covariance_mode: `"full"` or `"diag"`.
        *args: `nb_actions`, `memory`, ...
        **kwargs: The arguments of `ReplayAgent`.

    Attributes:
        model: The `NAFModel`, called `combined_model` in keras-rl.
        target_V_model: V'.

    Raises:
        ValueError: The networks' outputs do not fit, or an argument is out of range.
    """

    logged = ("mean_q",)

    def __init__(
        self,
        V_model: keras.Model,
        L_model: keras.Model,
        mu_model: keras.Model,
        random_process: Any = None,
        covariance_mode: str = "full",
        *args: Any,
        **kwargs: Any,
    ):
        kwargs.setdefault("dtype", getattr(mu_model, "dtype_policy", None))
        super().__init__(*args, random_process=random_process, **kwargs)
        self.covariance_mode = covariance_mode
        self.model = NAFModel(V_model, L_model, mu_model, self.nb_actions, covariance_mode, type(self).__name__)
        self.target_V_model = clone_model(V_model, self.custom_model_objects)
        self.target_V_model.trainable = False

    @property
    def V_model(self) -> keras.Model:
        """The network of the value, as given."""
        return self.model.V_model

    @property
    def L_model(self) -> keras.Model:
        """The network of L's entries, as given."""
        return self.model.L_model

    @property
    def mu_model(self) -> keras.Model:
        """The network of the action, as given."""
        return self.model.mu_model

    @property
    def combined_model(self) -> NAFModel:
        """Q as a model of `[action, *observations]`."""
        return self.model

    def check_states(self, states: Any) -> None:
        """See `ReplayAgent.check_states`."""
        self.model.check_states(states)

    def targets(self) -> list[tuple[Any, Any]]:
        """See `ReplayAgent.targets`."""
        return [(self.target_V_model, self.V_model)]

    def call(self, states: Any, training: bool = False) -> Any:
        """mu(s), `(B, A)` float32, for states `(B, W, *obs)`."""
        return self.model.mu(states, training)

    def td_target(self, batch: Batch) -> Any:
        """y, `(B,)`: the equation above; `batch.discount` is gamma."""
        v1 = value_of(self.target_V_model, batch.state1)
        return ops.stop_gradient(batch.reward + batch.discount * (1.0 - batch.terminal1) * v1)

    def loss_fn(self, batch: Batch) -> tuple[Any, Any, Any, dict[str, Any]]:
        """L; see `ReplayAgent.loss_fn`. `mean_q` is the mean of the largest Q per state, V."""
        target = self.td_target(batch)
        prediction, value = self.model.q_and_value(batch.state0, batch.action, training=True)
        loss = ops.mean(batch.weight * huber(target - prediction, self.delta_clip))
        return loss, target, prediction, {"mean_q": ops.mean(value)}

    def load_weights(self, filepath: Any) -> None:
        """Reads a weights file into the networks and the target; see `Agent.load_weights`."""
        super().load_weights(filepath)
        self._ahead.forget()  # what the old weights said
        self.update_target_model_hard()

    def get_config(self) -> dict[str, Any]:
        """See `SavedAgent.get_config`."""
        if sum(len(x.weights) for x in (self.V_model, self.L_model, self.mu_model)) > len(self.model.weights):
            raise ValueError(
                "An agent whose networks share layers cannot be saved as a whole: Keras would load networks that share "
                "none. Fix: save_weights() and load_weights(), or networks without common layers"
            )
        return super().get_config()

    def update_target_model_hard(self) -> None:
        """Copies the weights of V into its target network."""
        self.target_V_model.set_weights(self.V_model.get_weights())


ContinuousDQNAgent = NAFAgent
