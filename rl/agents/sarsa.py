"""SARSA: on-policy learning of action values, with n-step returns and Expected SARSA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from rl.agents.gradient import GradientAgent, states_of
from rl.agents.q_values import QValues
from rl.common.misc_util import tree_leaves, tree_map
from rl.networks import check_fit, check_output
from rl.ops import entry, huber, take
from rl.util import require


class Pair(NamedTuple):
    """State-action pairs, B rows: where n steps led from s0, and how the policy acts there.

    Attributes:
        state0: Tree of (B, 1, *obs).
        action: (B,) what was done in it.
        reward: (B,) the discounted sum of the n rewards that followed.
        state1: Tree of (B, 1, *obs): the state after them.
        policy1: (B, nb_actions) probabilities of the next action there: of the one that was chosen 1, or the policy's.
        terminal1: (B,) 1 where the episode terminated there.
        discount: (B,) gamma^n.
    """

    state0: Any
    action: Any
    reward: Any
    state1: Any
    policy1: Any
    terminal1: Any
    discount: Any


@keras.saving.register_keras_serializable(package="rl")
class SARSAAgent(QValues, GradientAgent):
    """SARSA on any number of lanes.

    With d = 1 where the episode terminated, and the action a1 that the policy then really takes in s1 (Rummery and
    Niranjan 1994, CUED/F-INFENG/TR 166; Sutton and Barto 2018, eq. 6.7):

        y = r + gamma (1 - d) Q(s1, a1)
        L = mean Huber(y - Q(s0, a0))

    With `nb_return_steps=n` r is `sum_{i<n} gamma^i r_i`, s1 the state n steps later and gamma its n-th power (eq.
    7.4); returns end with their episode. Expected SARSA (van Seijen et al. 2009, doi:10.1109/ADPRL.2009.4927542,
    eq. 5) takes the mean over the policy pi in place of the one action:
    `y = r + gamma (1 - d) sum_a pi(a | s1) Q(s1, a)`.

    A pair is learnt from once, when a1 is known. No pair crosses the end of an episode: where it terminated there is no
    a1; where it was cut short a1 is drawn in its true last state, and not executed.

    Differs from the papers in: the gradient is that of a batch of `train_interval` pairs, taken with the optimizer; no
    eligibility traces.

    Args:
        model: Keras network from states `(1, *obs)` or `(*obs)` to `nb_actions` Q-values.
        nb_actions: Number of actions: the network's outputs.
        policy: Exploration over Q-values in `fit`. Default: `EpsGreedyQPolicy()`.
        test_policy: The same in `test`. Default: `GreedyQPolicy()`.
        gamma: Discount factor, in [0, 1].
        nb_steps_warmup: Env steps before the first gradient step; what they bring is not learnt from.
        train_interval: Env steps per gradient step, which learns from as many pairs.
        delta_clip: Where Huber's loss turns linear. Default: never.
        nb_return_steps: n.
        expected: Expected SARSA. The policy must have `probabilities(q_values)`, as the epsilon-greedy, greedy and
            Boltzmann ones have.
        **kwargs: Passed to `Agent`.

    Raises:
        ValueError: An argument is out of range, or the network's output is not `(None, nb_actions)`.
    """

    logged = ("mean_q",)

    def __init__(
        self,
        model: keras.Model,
        nb_actions: int,
        policy: Any = None,
        test_policy: Any = None,
        gamma: float = 0.99,
        nb_steps_warmup: int = 10,
        train_interval: int = 1,
        delta_clip: float = np.inf,
        nb_return_steps: int = 1,
        expected: bool = False,
        **kwargs: Any,
    ):
        check_output(model, nb_actions, type(self).__name__)
        require("gamma", gamma, 0 <= gamma <= 1, "in [0, 1]")
        require("delta_clip", delta_clip, delta_clip > 0, "positive")
        require("nb_steps_warmup", nb_steps_warmup, nb_steps_warmup >= 0, "at least 0")
        for name, value in (("train_interval", train_interval), ("nb_return_steps", nb_return_steps)):
            require(name, value, int(value) == value and value >= 1, "a whole number of at least 1")
        kwargs.setdefault("dtype", model.dtype_policy)
        super().__init__(**kwargs)
        self.nb_actions = int(nb_actions)
        self.gamma, self.delta_clip = float(gamma), float(delta_clip)
        self.nb_steps_warmup, self.train_interval = int(nb_steps_warmup), int(train_interval)
        self.nb_return_steps, self.expected = int(nb_return_steps), bool(expected)
        self.model = model
        self._set_policies(policy, test_policy)
        if expected:
            self.policy.probabilities(np.zeros((1, self.nb_actions)))  # says so where it has none
        self._trails = _Trails()

    def loss_fn(self, batch: Pair) -> tuple[Any, Any, Any, dict[str, Any]]:
        """L; see `GradientAgent.loss_fn`."""
        v1 = ops.sum(batch.policy1 * self.call(batch.state1), axis=-1)
        target = ops.stop_gradient(batch.reward + batch.discount * (1.0 - batch.terminal1) * v1)
        # After the target: Keras keeps the activity regularisers' losses of a network's last call.
        q0 = self.call(batch.state0, training=True)
        prediction = take(q0, batch.action)
        loss = ops.mean(huber(target - prediction, self.delta_clip))
        return loss, target, prediction, {"mean_q": ops.mean(ops.max(q0, axis=-1))}

    def prepare(self, driver: Any, observation: Any) -> None:
        """Checks that env and network fit, and makes the compiled functions; see `Agent.prepare`."""
        self.check_spaces(driver.observation_space, driver.action_space)
        check_fit(self.model, self._example_states(observation, 1), self.nb_actions, type(self).__name__)
        self._make_functions()

    def open_lanes(self, nb_lanes: int) -> None:
        """Opens lanes at new episodes; in `fit` pairs that are not complete are left out."""
        if self.training:
            self._trails.steps = [[] for _ in range(nb_lanes)]

    def random_streams(self) -> list[Any]:
        """The policies; see `Agent.random_streams`."""
        return [self.policy, self.test_policy]

    def _functions_to_compile(self) -> list[Callable]:
        return [self.call, self._train]

    def act(self, observation: Any) -> np.ndarray:
        """Evaluates the network and lets the policy choose; see `Agent.act`."""
        outputs = self.evaluate(states_of(observation))
        if self.training:  # a test may come between this and what follows
            self._trails.outputs = outputs
        return self.explore(outputs)

    def observe(self, transition: Any) -> np.ndarray | None:
        """Completes pairs by the action that was just taken, and learns from them; see `Agent.observe`."""
        if not self.training:
            return None
        ended = transition.terminated | transition.truncated
        state0, state1 = states_of(transition.observation), states_of(transition.next_observation)
        outputs0 = self._trails.outputs
        policy0, policy1 = self._next_policy(outputs0, transition.action), np.zeros(outputs0.shape, "float32")
        cut = np.flatnonzero(transition.valid & transition.truncated & ~transition.terminated)
        if len(cut):
            outputs = self.evaluate(state1)[cut]
            policy1[cut] = self._next_policy(outputs, self.explore(outputs))
        for lane in np.flatnonzero(transition.valid | ended).tolist():
            steps = self._trails.steps[lane]
            here = tree_map(lambda x, i=lane: x[i], state0)
            if len(steps) == self.nb_return_steps:
                self._complete(lane, here, policy0[lane], False)
            if transition.valid[lane]:
                steps.append((here, transition.action[lane], transition.reward[lane]))
            if ended[lane]:  # a lane that lost its env led to the state it acted in last
                where = tree_map(lambda x, i=lane: x[i], state1) if transition.valid[lane] else here
                policy = policy1 if transition.valid[lane] else policy0
                while steps:
                    self._complete(lane, where, policy[lane], bool(transition.terminated[lane]))
        return self._learn(len(ended))

    def _next_policy(self, outputs: np.ndarray, actions: np.ndarray) -> np.ndarray:
        """pi1 in the target, `(N, nb_actions)`, for Q-values and the actions chosen by them."""
        if self.expected:
            return np.asarray(self.policy.probabilities(outputs), np.float32)
        return np.eye(self.nb_actions, dtype=np.float32)[actions]

    def _complete(self, lane: int, state1: Any, policy1: np.ndarray, terminal: bool) -> None:
        """Makes a row of a lane's oldest step and those after it."""
        steps = self._trails.steps[lane]
        total = sum(self.gamma**i * reward for i, (_, _, reward) in enumerate(steps))
        discount = self.gamma ** len(steps)
        state0, action, _ = steps.pop(0)
        rest = (np.float32(total), state1, policy1, np.float32(terminal), np.float32(discount))
        self._trails.rows.append(Pair(state0, np.int32(action), *rest))

    def _learn(self, nb_lanes: int) -> np.ndarray | None:
        rows, size, state = self._trails.rows, self.train_interval, self.run_state
        if state.step <= self.nb_steps_warmup:
            rows.clear()
            return None
        kmax = max(self.steps_per_execution, -(-nb_lanes // size))  # a constant, so that nothing is compiled anew
        total, nb_updates = np.zeros(()), 0
        while (k := min(len(rows) // size, kmax)) >= self.steps_per_execution:
            batch = tree_map(lambda *x: np.stack(x), *rows[: k * size], *[rows[0]] * ((kmax - k) * size))
            del rows[: k * size]
            batch = tree_map(lambda x: x.reshape(kmax, size, *x.shape[1:]), batch)
            batch = batch._replace(state0=self._processed(batch.state0, 2), state1=self._processed(batch.state1, 2))
            metrics, _ = self._functions[1](tuple(batch), np.int32(k))
            state.nb_updates += k
            self._check_finite(metrics[0], "delta_clip=1., a smaller learning_rate, optimizer clipnorm")
            total, nb_updates = total + k * metrics, nb_updates + k
        return self._with_logged(total / nb_updates) if nb_updates else None

    def _train(self, fields: tuple, n: Any) -> tuple[Any, Any]:
        """Compiled: n gradient steps on batches with a leading axis k."""

        def batch_at(i: Any) -> Pair:
            return Pair._make(tree_map(lambda x: entry(x, i), fields))

        return self.gradient_steps(n, tree_leaves(fields)[0].shape[0], batch_at)


SarsaAgent = SARSAAgent


class _Trails:
    """Of each lane the steps whose pairs are not complete; complete pairs; the outputs for the states acted on.

    Not lists of the agent, which Keras would wrap.
    """

    def __init__(self) -> None:
        self.steps: list[list[tuple]] = []
        self.rows: list[Pair] = []
        self.outputs: Any = None
