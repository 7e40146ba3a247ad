"""`RolloutAgent`: collects rollouts of N lanes and learns from each in one compiled call."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from gymnasium import spaces
from keras import ops

from rl import backend
from rl.agents.actor_critic import ActorCritic
from rl.agents.gradient import GradientAgent, states_of
from rl.common.misc_util import tree_leaves, tree_map, warn_user
from rl.distributions import distribution_for
from rl.ops import explained_variance, gae
from rl.rollout import Rollout, RolloutBatch, RolloutStorage
from rl.util import RandomStream, require


class RolloutAgent(GradientAgent):
    """An on-policy agent with a policy and a value: it acts for some steps, learns from them, and forgets them.

    A rollout is `nb_rollout_steps` steps of each of N lanes. When it is complete, one compiled call

    1. evaluates policy and value of all states, and the value of all true successors, with the weights that acted,
    2. estimates advantages A by `rl.ops.gae`, and sets the value's targets to A + V,
    3. takes gradient steps on `loss_fn` over `nb_epochs` shuffles of the rollout, cut into batches of `batch_size`.

    Rows that are no transitions take part in nothing. A rollout that `fit` leaves incomplete goes on in the next one.

    Args:
        actor: Keras network from states `(1, *obs)` or `(*obs)` to what the policy's distribution takes: logits for
            `Discrete`, `MultiDiscrete` (side by side) and `MultiBinary`; for `Box` means `(None, A)`, to which a
            trainable log standard deviation is added that does not depend on the state, or (a functional or Sequential
            model) means and log standard deviations `(None, 2 A)`. Without a critic: a network with two outputs, that
            and the value.
        critic: Keras network from the same states to one value `(None, 1)`, or None.
        action_space: The action space of one env.
        nb_rollout_steps: Steps of each lane per rollout.
        gamma: Discount factor, in [0, 1].
        lam: GAE's lambda, in [0, 1].
        value_loss_weight: Weight of the value's loss, at least 0.
        entropy_weight: Weight of the policy's entropy in the loss, at least 0.
        max_grad_norm: A gradient of a larger global norm is scaled down to it. None: never.
        normalize_advantage: Shift and scale advantages to mean 0 and standard deviation 1 in each batch; a batch of
            one row is left as it is.
        normalize_observation: Feed the networks `clip((s - mean) / std, -10, 10)` of float observations. The statistics
            count every step once, at the end of its rollout (of the first rollout, before it is learnt from), are
            weights of the agent and are frozen in `test`.
        normalize_reward: Learn from rewards divided by the running standard deviation of the discounted return, clipped
            to [-10, 10]. Logs keep the env's rewards.
        initial_log_std: Where the log standard deviation starts that is added to a network of means.
        processor: A `Processor`.
        **kwargs: Passed to `Agent`.

    Raises:
        ValueError: An argument is out of range, or the networks do not fit the action space.
    """

    measured = ("explained_variance", "learning_rate", "steps_per_second")
    nb_epochs = 1
    batch_size: int | None = None  # the whole rollout

    def __init__(
        self,
        actor: keras.Model,
        critic: keras.Model | None = None,
        action_space: Any = None,
        nb_rollout_steps: int = 128,
        gamma: float = 0.99,
        lam: float = 0.95,
        value_loss_weight: float = 0.5,
        entropy_weight: float = 0.0,
        max_grad_norm: float | None = 0.5,
        normalize_advantage: bool = True,
        normalize_observation: bool = False,
        normalize_reward: bool = False,
        initial_log_std: float = 0.0,
        **kwargs: Any,
    ):
        whole = int(nb_rollout_steps) == nb_rollout_steps and nb_rollout_steps >= 1
        require("nb_rollout_steps", nb_rollout_steps, whole, "a whole number of at least 1")
        require("gamma", gamma, 0 <= gamma <= 1, "in [0, 1]")
        require("lam", lam, 0 <= lam <= 1, "in [0, 1]")
        require("value_loss_weight", value_loss_weight, value_loss_weight >= 0, "at least 0")
        require("entropy_weight", entropy_weight, entropy_weight >= 0, "at least 0")
        require("max_grad_norm", max_grad_norm, max_grad_norm is None or max_grad_norm > 0, "positive, or None")
        for name, network in (("actor", actor), ("critic", critic)):
            optional = network is None and name == "critic"
            require(name, network, optional or isinstance(network, keras.Model), "a keras.Model")
        distribution, name = distribution_for(action_space), type(self).__name__
        kwargs.setdefault("dtype", actor.dtype_policy)
        super().__init__(**kwargs)
        self.action_space, self.distribution = action_space, distribution
        self.nb_rollout_steps = int(nb_rollout_steps)
        self.gamma, self.lam = float(gamma), float(lam)
        self.value_loss_weight, self.entropy_weight = float(value_loss_weight), float(entropy_weight)
        self.max_grad_norm = None if max_grad_norm is None else float(max_grad_norm)
        self.normalize_advantage = bool(normalize_advantage)
        self.normalize_observation, self.normalize_reward = bool(normalize_observation), bool(normalize_reward)
        self.initial_log_std = float(initial_log_std)
        self.model = ActorCritic(
            actor, critic, distribution, name, initial_log_std, self.normalize_observation, self.normalize_reward
        )
        self.dice = RandomStream()  # actions and shuffles
        self.storage = RolloutStorage(self.nb_rollout_steps)
        self._told_sizes = False

    @property
    def actor(self) -> keras.Model:
        """The network of the policy, as given."""
        return self.model.actor

    @property
    def critic(self) -> keras.Model | None:
        """The network of the value, as given."""
        return self.model.critic

    # ---- what an algorithm implements -------------------------------------------------------------------------

    def scheduled(self) -> dict[str, float]:
        """Numbers that change from rollout to rollout; `loss_fn` finds them in `batch.scheduled`."""
        return {}

    def stop_rule(self) -> Callable[[dict[str, Any]], Any] | None:
        """Maps the logs of a gradient step to whether it was the rollout's last, a bool tensor; None: all are taken."""
        return None

    def train_step(self, batch: RolloutBatch) -> dict[str, Any]:
        """One gradient step on `loss_fn`; compiled."""
        return self.gradient_step(batch, weight=batch.weight, max_norm=self.max_grad_norm)

    def call(self, states: Any, training: bool = False) -> Any:
        """The policy's outputs `(B, distribution.nb_outputs)` for states `(B, 1, *obs)`, in float32."""
        return self.model.policy(states)

    # ---- set-up -------------------------------------------------------------------------------------------------

    def compile(
        self,
        optimizer: Any = None,
        metrics: list[Any] | None = None,
        jit_compile: bool | str = "auto",
        steps_per_execution: int = 1,
        run_eagerly: bool = False,
    ) -> None:
        """Configures the agent for training.

        Args:
            optimizer: As in `GradientAgent.compile`. A Keras learning-rate schedule counts gradient steps: a rollout
                takes `nb_epochs * ceil(nb_rollout_steps * N / batch_size)` of them.
            metrics: As there; they compare the value's target with the value, both `(B, 1)`, and give a number per row.
            jit_compile: As there.
            steps_per_execution: 1, since all gradient steps on a rollout are one compiled call anyway.
            run_eagerly: As there.

        Raises:
            TypeError: See `GradientAgent.compile`.
            ValueError: The same, or a metric gives one number for all rows.
        """
        steps = steps_per_execution
        require("steps_per_execution", steps, steps == 1, "1: all gradient steps on a rollout are one compiled call")
        super().compile(optimizer, metrics, jit_compile, steps, run_eagerly)
        with backend.device_scope(self.model.variables):
            self._check_metrics()

    def _check_metrics(self) -> None:
        """Sees to it that the metrics give a number for each row."""
        for metric in self._compiled_metrics:
            try:  # as in training, where rows that only fill up a batch weigh nothing
                metric.update_state(ops.zeros((2, 1)), ops.ones((2, 1)), sample_weight=ops.ones(2))
            except Exception as error:  # whatever a user's function raises
                raise ValueError(
                    f"the metric {metric.name!r} must give one number per row of targets (B, 1) and values (B, 1), as "
                    "keras.ops.mean(..., axis=-1) does, since rows that only fill up a batch are left out"
                ) from error
            metric.reset_state()

    def prepare(self, driver: Any, observation: Any) -> None:
        """Checks that env and networks fit, and makes the compiled functions; see `Agent.prepare`."""
        self.check_spaces(driver.observation_space, driver.action_space)
        self.model.check_states(self._example_states(observation, 1))
        rows, size = self.nb_rollout_steps * driver.nb_lanes, self.batch_size
        if self.training and size is not None and rows % size and not self._told_sizes:
            self._told_sizes = True
            last = f"the last batch of each epoch has {rows % size}" if rows > size else "so an epoch is one batch"
            warn_user(f"A rollout of {self.nb_rollout_steps} x {driver.nb_lanes} steps, batch_size={size}: {last}")
        self.storage.resume()
        self._make_functions()

    def check_spaces(self, observation_space: Any, action_space: Any) -> None:
        """The env's actions must be those that the agent was built for; see `GradientAgent.check_spaces`."""
        if action_space is None:  # an old env that does not tell
            plain = isinstance(self.action_space, spaces.Discrete) and self.action_space.start == 0
            expected = "Discrete, from 0 up, where the env tells no action_space that others would be fitted to"
            require("action_space", self.action_space, plain, f"{expected} (fix: set env.action_space)")
            return
        own, given = (distribution_for(space) for space in (self.action_space, action_space))
        sizes = [[part.nb_outputs for part in getattr(d, "parts", [d])] for d in (own, given)]
        if type(own) is not type(given) or sizes[0] != sizes[1]:
            raise ValueError(
                f"{type(self).__name__} was built for actions of {self.action_space}, the env takes {action_space}. "
                "Fix: build the agent with action_space=env.action_space (of a gymnasium.vector env: "
                "env.single_action_space)"
            )

    def open_lanes(self, nb_lanes: int) -> None:
        """Opens lanes at new episodes; in `fit` an incomplete rollout of as many lanes goes on."""
        if self.training:
            self.storage.begin(nb_lanes)

    def random_streams(self) -> list[Any]:
        """The one stream that decides actions and shuffles; see `Agent.random_streams`."""
        return [self.dice]

    def _functions_to_compile(self) -> list[Callable]:
        d = self.distribution
        return [
            lambda states, noise: d.sample(self.call(states), noise),
            lambda states: d.mode(self.call(states)),
            self._learn_from,
            self.model,
        ]

    # ---- acting -------------------------------------------------------------------------------------------------

    def act(self, observation: Any) -> np.ndarray:
        """Draws actions from the policy in `fit`, takes the most probable ones in `test`; see `Agent.act`."""
        states = self._processed(states_of(observation))
        if not self.training:
            return self._functions[1](states)
        noise = self.distribution.noise(self.dice.rng, len(tree_leaves(states)[0]))
        return self._functions[0](states, noise)

    def evaluate(self, states: Any) -> tuple[np.ndarray, np.ndarray]:
        """The policy's outputs `(B, distribution.nb_outputs)` and the values `(B,)` of states `(B, 1, *obs)`."""
        self._make_functions()
        return self._functions[3](self._processed(states))

    # ---- learning -----------------------------------------------------------------------------------------------

    def observe(self, transition: Any) -> np.ndarray | None:
        """Stores the rows, and learns where they complete a rollout; see `Agent.observe`."""
        if not self.training:
            return None
        self.storage.append(transition)
        return self._learn() if self.storage.full else None

    def _learn(self) -> np.ndarray | None:
        storage, rollout = self.storage, self.storage.rollout()
        sums = storage.discounted_returns(self.gamma) if self.normalize_reward else rollout.reward[:1]
        valid = np.flatnonzero(rollout.valid)
        if not len(valid):
            storage.clear()
            return None
        rows, sizes, n = self._batches(valid, rollout.valid.size)
        rollout = rollout._replace(state0=self._processed(rollout.state0, 2), state1=self._processed(rollout.state1, 2))
        scheduled = {name: np.float32(value) for name, value in self.scheduled().items()}
        metrics, taken = self._functions[2](tuple(rollout), sums, rows, sizes, np.int32(n), scheduled)
        self.run_state.nb_updates += int(taken)
        rate = len(valid) / (time.monotonic() - storage.started_at)
        storage.clear()
        self._check_finite(metrics[0], "a smaller learning_rate, normalize_observation=True, normalize_reward=True")
        return self._with_logged(np.append(metrics, rate))

    def _batches(self, valid: np.ndarray, nb_rows: int) -> tuple[np.ndarray, np.ndarray, int]:
        """Deals out the valid rows, once per epoch.

        Returns:
            `(rows, sizes, n)`: `(kmax, B)` rows; `(kmax,)` how many of them count, others fill up the batch; the number
            of batches, at most kmax, which a rollout without invalid rows has.
        """
        size = min(self.batch_size or nb_rows, nb_rows)
        full, needed = -(-nb_rows // size), -(-len(valid) // size)
        rows = np.full((self.nb_epochs * full, size), valid[0], np.int32)
        sizes = np.ones(self.nb_epochs * full, np.int32)
        for epoch in range(self.nb_epochs):
            at = slice(epoch * needed, (epoch + 1) * needed)
            order = valid if needed == 1 else self.dice.rng.permutation(valid)
            rows[at].ravel()[: len(valid)] = order
            sizes[at] = np.minimum(size, len(valid) - size * np.arange(needed))
        return rows, sizes, self.nb_epochs * needed

    def _learn_from(
        self, rollout: tuple, sums: Any, rows: Any, sizes: Any, n: Any, scheduled: dict[str, Any]
    ) -> tuple[Any, Any]:
        """Compiled: learns from a rollout; see the class.

        Args:
            rollout: A `Rollout` of tensors.
            sums: `(T, N)` discounted returns, where rewards are normalised.
            rows: See `_batches`.
            sizes: The same.
            n: The same.
            scheduled: What `scheduled` returned.

        Returns:
            `(metrics, taken)`: one value per metric but `steps_per_second`; the number of gradient steps.
        """
        rollout = Rollout._make(rollout)
        shape, reward = rollout.reward.shape, rollout.reward

        def flat(x: Any) -> Any:
            return ops.reshape(x, (-1, *x.shape[2:]))

        state0, state1, action = tree_map(flat, (rollout.state0, rollout.state1, rollout.action))
        weight = flat(ops.cast(rollout.valid, "float32"))
        if self.normalize_reward:
            for variable, value in self.model.returns.merged(flat(sums), weight):
                variable.assign(value)
            reward = self.model.returns.scaled(reward)
        # The policy that acted is the one in the loss, so the statistics of states wait until it is learnt from. But
        # the very first policy is hardly one, and should not learn from states on their own scale.
        statistics = self.model.merged_statistics(state0, weight)
        if statistics:
            first = ops.equal(statistics[-1][0], 0)  # the count of a part that is normalised
            for variable, value in statistics:
                variable.assign(ops.where(first, value, variable.value))
        outputs, value0 = self.model(state0)
        value0 = ops.where(weight > 0, value0, 0.0)
        advantage = gae(
            reward,
            ops.reshape(value0, shape),
            ops.reshape(self.model.value(state1), shape),
            rollout.terminated,
            rollout.ended,
            rollout.valid,
            self.gamma,
            self.lam,
        )
        advantage = flat(advantage)
        target = advantage + value0
        log_prob0 = self.distribution.log_prob(outputs, action)
        everything = (state0, action, log_prob0, value0, advantage, target)

        def batch_at(i: Any) -> RolloutBatch:
            index = ops.take(rows, i, axis=0)
            real = ops.arange(rows.shape[1]) < ops.take(sizes, i)
            parts = tree_map(lambda x: ops.take(x, index, axis=0), everything)
            return RolloutBatch._make([*parts, ops.cast(real, "float32"), scheduled])

        optimizer = getattr(self.optimizer, "inner_optimizer", self.optimizer)
        rate = ops.cast(optimizer.learning_rate, "float32")
        explained = explained_variance(target, value0, weight)
        metrics, taken = self.gradient_steps(n, rows.shape[0], batch_at, self.stop_rule())
        for variable, value in statistics:
            variable.assign(value)
        return ops.concatenate([metrics, ops.stack([explained, rate])]), taken
