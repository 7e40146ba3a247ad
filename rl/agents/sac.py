"""SAC: a stochastic actor that is paid for its entropy, with twin critics, learnt from replay."""

from __future__ import annotations

import math
from typing import Any

import keras
import numpy as np
from keras import ops

from rl.agents.base import ReplayAgent
from rl.agents.continuous import ContinuousActions
from rl.agents.critics import TwinCritics, pair_of, twin_of
from rl.agents.gradient import when
from rl.distributions import SquashedGaussian
from rl.memory import Batch
from rl.networks import action_input_index, check_output
from rl.ops import polyak, weights_of
from rl.util import clone_model, require


@keras.saving.register_keras_serializable(package="rl")
class SACAgent(ContinuousActions, TwinCritics, ReplayAgent):
    """Soft actor-critic on any number of lanes.

    With the policy pi, a `SquashedGaussian` over actions in [-1, 1], the critics Q1 and Q2, their targets Q1' and Q2',
    the temperature alpha, and d = 1 where the episode terminated (Haarnoja et al. 2018, arXiv:1812.05905, algorithm 1
    and equations 5, 9 and 18):

        y = r + gamma (1 - d) (min(Q1'(s1, a1), Q2'(s1, a1)) - alpha log pi(a1|s1)),  a1 ~ pi(s1)
        L_critic = mean Huber(y - Q1(s0, a0)) + mean Huber(y - Q2(s0, a0))
        L_actor = mean (alpha log pi(a|s0) - min(Q1(s0, a), Q2(s0, a))),  a ~ pi(s0), differentiated through a
        L_temperature = -log alpha mean (log pi(a|s0) + target_entropy)

    Each gradient step is one of both critics, after which their targets move, then one of the actor and one of the
    temperature, on the actions that the actor's was taken on. In `fit` the action is drawn from pi; `test` takes
    tanh(mean). Actions in [-1, 1] are mapped to the env's bounds.

    Differs from the paper in: the temperature's loss has log alpha where the paper has alpha, as in the authors' code;
    `delta_clip`, never by default; a truncated episode bootstraps from its true last observation.

    Args:
        nb_actions: Number of action components, A.
        actor: Keras network from states `(W, *obs)`, or `(*obs)` where `window_length` is 1, to `(None, 2 A)`: means
            and log standard deviations before tanh. The latter are clipped to [-20, 2].
        critic: Keras network from the same states, and the action, to the value, `(None, 1)`: a functional model. Its
            twin is a copy with fresh weights. Or a list of two critics.
        critic_action_input: Which of the critic's inputs takes the action: that `keras.Input`, its name or its index;
            of two critics, at the same place in both.
        memory: A `SequentialMemory`.
        target_entropy: What the temperature holds the policy's entropy at, in nats, for actions in [-1, 1]. "auto": -A,
            as in the paper. None: the temperature stays as it is.
        initial_temperature: Alpha at the start, positive; 0 will do where it stays.
        policy_delay: Gradient steps of the critics per step of the actor and the temperature.
        **kwargs: Those of `ReplayAgent`, with other defaults for `batch_size` (256) and `target_model_update` (0.005);
            of `ContinuousActions`, with other defaults for `scale_actions` (True) and `nb_steps_random` (as many as
            `nb_steps_warmup`); and of `Agent`.

    Attributes:
        critic_2: Q2.
        target_critic: Q1'.
        target_critic_2: Q2'.

    Raises:
        ValueError: A network does not fit, the twin would be no other critic, or an argument is out of range.
    """

    logged: tuple[str, ...] = ("mean_q", "actor_loss", "entropy", "temperature", "temperature_loss")
    loss_learner = "critic"
    outputs_per_action = 2

    def __init__(
        self,
        nb_actions: int,
        actor: keras.Model,
        critic: Any,
        critic_action_input: Any,
        memory: Any,
        *,
        target_entropy: float | str | None = "auto",
        initial_temperature: float = 1.0,
        policy_delay: int = 1,
        **kwargs: Any,
    ):
        owner = type(self).__name__
        require("policy_delay", policy_delay, int(policy_delay) == policy_delay >= 1, "a whole number of at least 1")
        auto, learnt = isinstance(target_entropy, str), target_entropy is not None
        sound = target_entropy == "auto" if auto else not learnt or math.isfinite(target_entropy)  # type: ignore[arg-type]
        require("target_entropy", target_entropy, sound, "a finite number, 'auto' or None")
        positive = initial_temperature > 0 or (initial_temperature == 0 and not learnt)
        expected = "positive" if learnt else "at least 0"
        require("initial_temperature", initial_temperature, positive and math.isfinite(initial_temperature), expected)
        pair = pair_of(critic)
        check_output(actor, 2 * nb_actions, f"{owner} (actor: means and log standard deviations)")
        action_input = action_input_index(pair[0], critic_action_input, nb_actions, owner)
        if len(pair) == 2:
            action_input_index(pair[1], action_input, nb_actions, owner)
        kwargs = {"batch_size": 256, "target_model_update": 0.005, "scale_actions": True} | kwargs
        kwargs.setdefault("nb_steps_random", kwargs.get("nb_steps_warmup", 1000))
        mixed = [x.dtype_policy for x in (*pair, actor) if x.dtype_policy.name == "mixed_float16"]
        kwargs.setdefault("dtype", (mixed or [actor.dtype_policy])[0])
        super().__init__(nb_actions=nb_actions, memory=memory, **kwargs)
        self.critic_action_input = action_input
        self.target_entropy, self.initial_temperature = target_entropy, float(initial_temperature)
        self.policy_delay = int(policy_delay)
        self.distribution = SquashedGaussian(self.nb_actions)
        # The order of these lines is part of the file format: Keras stores weights by order of assignment.
        self.actor = self.model = actor
        self.critic = pair[0]
        self.critic_2 = pair[1] if len(pair) == 2 else twin_of(pair[0], self.custom_model_objects, owner)
        self.target_critic = clone_model(self.critic, self.custom_model_objects)
        self.target_critic_2 = clone_model(self.critic_2, self.custom_model_objects)
        self.target_critic.trainable = self.target_critic_2.trainable = False
        self.log_temperature: Any = _LogTemperature(self.initial_temperature) if learnt else None
        if not learnt:
            self.logged = self.logged[:-1]
        self._start_clock()
        self._noise_seeds = keras.random.SeedGenerator(int(np.random.randint(2**31)))

    @property
    def temperature(self) -> float:
        """Alpha, as it is now."""
        return float(ops.convert_to_numpy(self._alpha()))

    def learners(self) -> dict[str, list[Any]]:
        """See `GradientAgent.learners`."""
        networks = {"actor": [self.actor], "critic": [self.critic, self.critic_2]}
        return networks if self.log_temperature is None else networks | {"temperature": [self.log_temperature]}

    def targets(self) -> list[tuple[Any, Any]]:
        """See `ReplayAgent.targets`."""
        return [(target, critic) for critic, target in self.critics]

    # ---- the policy ---------------------------------------------------------------------------------------------

    def call(self, states: Any, training: bool = False) -> Any:
        """Means and (bounded) log standard deviations `(B, 2 A)` for states `(B, W, *obs)`, in float32."""
        return self.distribution.bounded(super().call(states, training))

    def choose(self, outputs: np.ndarray) -> np.ndarray:
        """Actions `(N, A)` in [-1, 1]: drawn from the policy in `fit`; see `ContinuousActions.choose`."""
        u, log_std = np.split(outputs, 2, axis=1)
        if self.training:  # in NumPy: a few rows, which a call of the backend would take longer for
            u = u + np.exp(log_std) * self.distribution.noise(self._acting.stream.rng, len(outputs))
        return super().choose(np.tanh(u))

    # ---- the equations ------------------------------------------------------------------------------------------

    def drawn(self, states: Any, training: bool = False) -> tuple[Any, Any]:
        """Actions `(B, A)` of the policy in states, and their log-densities `(B,)`."""
        outputs = self.call(states, training)
        noise = keras.random.normal((ops.shape(outputs)[0], self.nb_actions), seed=self._noise_seeds)
        return self.distribution.sample_and_log_prob(outputs, noise)

    def td_target(self, batch: Batch) -> Any:
        """y, `(B,)`; `batch.discount` is gamma."""
        action1, log_prob1 = self.drawn(batch.state1)
        q1, q2 = (self.q_value(target, batch.state1, action1) for _, target in self.critics)
        value1 = ops.minimum(q1, q2) - self._alpha() * log_prob1
        return ops.stop_gradient(batch.reward + batch.discount * (1.0 - batch.terminal1) * value1)

    def actor_loss_fn(self, batch: Batch) -> tuple[Any, Any, Any, dict[str, Any]]:
        """L_actor; the actor's metrics compare the stored actions with drawn ones."""
        action, log_prob = self.drawn(batch.state0, training=True)
        q1, q2 = (self.q_value(critic, batch.state0, action) for critic, _ in self.critics)
        loss = ops.mean(batch.weight * (self._alpha() * log_prob - ops.minimum(q1, q2)))
        return loss, batch.action, action, {"log_prob": log_prob}

    def temperature_loss_fn(self, batch: Batch, log_prob: Any) -> tuple[Any, Any, Any, dict[str, Any]]:
        """L_temperature; its metrics compare the target entropy with -log pi of each row."""
        target = float(-self.nb_actions if self.target_entropy == "auto" else self.target_entropy)  # type: ignore[arg-type]
        loss = -self.log_temperature.value * ops.mean(batch.weight * (log_prob + target))
        return loss, ops.full_like(log_prob, target), -log_prob, {}

    def _alpha(self) -> Any:
        if self.log_temperature is None:
            return ops.convert_to_tensor(self.initial_temperature, "float32")
        return ops.exp(self.log_temperature.value)

    def train_step(self, batch: Batch) -> dict[str, Any]:
        """A step of the critics and targets, and one of actor and temperature where it is their turn; compiled."""
        number = self._tick()
        logs = self.gradient_step(batch)
        if self.target_model_update < 1:
            polyak(*weights_of(self.targets()), tau=self.target_model_update)
        none = {name: _nothing() for name in ("actor_loss", "entropy", "temperature_loss")}
        turn = self.policy_delay == 1 or ops.equal(number % self.policy_delay, 0)
        logs |= when(turn, lambda: self._policy_step(batch), none)
        # An actor's step that failed is told from one that was not due.
        loss = ops.where(ops.isinf(logs["actor_loss"]), float("nan"), logs["loss"])
        return logs | {"loss": loss, "temperature": self._alpha()}

    def _policy_step(self, batch: Batch) -> dict[str, Any]:
        logs = self.descend("actor", lambda: self.actor_loss_fn(batch))
        log_prob, loss, temperature_loss = logs["log_prob"], logs["loss"], _nothing()
        if self.log_temperature is not None:
            temperature_loss = self.descend("temperature", lambda: self.temperature_loss_fn(batch, log_prob))["loss"]
        failed = ops.where(ops.isnan(loss), float("inf"), loss)
        return {"actor_loss": failed, "entropy": -ops.mean(log_prob), "temperature_loss": temperature_loss}


class _LogTemperature(keras.layers.Layer):
    """The logarithm of the temperature, as a network of one weight."""

    def __init__(self, start: float):
        super().__init__(dtype="float32", name="log_temperature")
        value = keras.initializers.Constant(math.log(start))
        self.value = self.add_weight(shape=(), initializer=value, name="value")
        self.built = True


def _nothing() -> Any:
    return ops.convert_to_tensor(float("nan"), dtype="float32")
