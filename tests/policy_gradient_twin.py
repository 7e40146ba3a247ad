"""PPO and A2C once more, naively: float64 NumPy, loops, gradients by central differences. Written from the papers."""

import copy
import math

import gymnasium as gym
import keras
import numpy as np

from rl.common.misc_util import tree_map
from rl.common.vec_env import DummyVecEnv

NB_INPUTS, NB_HIDDEN = 3, 4
Box = gym.spaces.Box(-0.5, 0.5, (2,), np.float32)
KINDS = {  # name: action space, outputs of the policy network
    "discrete": (gym.spaces.Discrete(3), 3),
    "discrete from 5": (gym.spaces.Discrete(3, start=5), 3),
    "multi-discrete": (gym.spaces.MultiDiscrete([2, 3, 4]), 9),
    "multi-binary": (gym.spaces.MultiBinary(3), 3),
    "box": (Box, 2),
    "box with log std": (Box, 4),
}


class Weather(gym.Env):
    """Random states, rewards and ends, whatever one does. What is done is noted in `actions`."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (NB_INPUTS,), np.float32)

    def __init__(self, action_space, number=0, ends=0.15):
        self.action_space, self.number, self.ends = action_space, number, ends
        self.actions = []
        self.rng = np.random.default_rng(number)

    def _obs(self):
        return self.rng.normal(1.0, 2.0, NB_INPUTS).astype(np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._obs(), {}

    def step(self, action):
        self.actions.append(copy.deepcopy(action))
        terminated, truncated = self.rng.random(2) < self.ends
        return self._obs(), float(self.rng.normal(0.5, 2.0)), bool(terminated), bool(truncated), {}


def weather(kind="discrete", lanes=3, mode=gym.vector.AutoresetMode.NEXT_STEP, **options):
    """A `Weather` env of one or several lanes; rows that are no transitions follow episodes' ends."""
    space = KINDS[kind][0]
    if lanes == 1:
        return Weather(space, **options)
    return DummyVecEnv([lambda i=i: Weather(space, i, **options) for i in range(lanes)], autoreset_mode=mode)


def networks(kind="discrete", shared=False, seed=0):
    """Actor and critic, tanh of four units and linear; or one model with the two outputs, and None."""

    def dense(units, **options):
        nonlocal seed
        seed += 1
        init = keras.initializers.RandomNormal(stddev=0.5, seed=seed)
        return keras.layers.Dense(units, kernel_initializer=init, bias_initializer=init, **options)

    def features():
        x = keras.layers.Input((1, NB_INPUTS))
        return x, keras.layers.Flatten()(x)

    nb_outputs = KINDS[kind][1]
    x, flat = features()
    hidden = dense(NB_HIDDEN, activation="tanh")(flat)
    if shared:
        return keras.Model(x, [dense(nb_outputs)(hidden), dense(1)(hidden)]), None
    actor = keras.Model(x, dense(nb_outputs)(hidden))
    x, flat = features()
    return actor, keras.Model(x, dense(1)(flat))


def make_agent(cls, kind="discrete", optimizer=None, shared=False, compile_options=None, seed=0, **options):
    """An agent with small networks, compiled without XLA."""
    agent = cls(*networks(kind, shared, seed), KINDS[kind][0], **options)
    agent.compile(optimizer or keras.optimizers.SGD(0.1), **({"jit_compile": False} | (compile_options or {})))
    return agent


def flat_weights(agent):
    """All weights that are learnt: actor's, critic's, log std; float64."""
    parts = [*agent.actor.get_weights(), *(agent.critic.get_weights() if agent.critic else [])]
    if agent.model.log_std is not None:
        parts.append(keras.ops.convert_to_numpy(agent.model.log_std))
    return np.concatenate([np.ravel(p) for p in parts]).astype(float)


class Watched:
    """Notes the rows, batches, metrics and weights of every rollout that an agent learns from.

    Attributes:
        rollouts: One dict each: `steps` (transitions), `batches` (row numbers of each gradient step), `metrics`, and
            `weights` after it.
    """

    def __init__(self, agent):
        self.agent, self.rollouts, self.steps, self.batches = agent, [], [], []
        self.start = flat_weights(agent)
        self._observe, self._deal = agent.observe, agent._batches
        agent.observe, agent._batches = self.observe, self.deal

    def observe(self, transition):
        self.steps.append(
            transition._replace(**{k: tree_map(np.copy, v) for k, v in transition._asdict().items() if k != "info"})
        )
        metrics = self._observe(transition)
        if metrics is not None:
            named = dict(zip(self.agent.metrics_names, metrics.tolist(), strict=True))
            self.rollouts.append(
                {"steps": self.steps, "batches": self.batches, "metrics": named, "weights": flat_weights(self.agent)}
            )
            self.steps, self.batches = [], []
        return metrics

    def deal(self, valid, nb_rows):
        rows, sizes, n = self._deal(valid, nb_rows)
        self.batches = [rows[i, : sizes[i]].copy() for i in range(n)]
        return rows, sizes, n


def naive_gae(reward, value0, value1, terminated, ended, valid, gamma, lam):
    """`A_t = sum_k (gamma lam)^k delta_{t+k}`, for each t anew, up to the episode's end or a row that is none."""
    steps, lanes = reward.shape
    advantage = np.zeros(reward.shape)
    for n in range(lanes):
        for t in range(steps):
            for k in range(steps - t):
                at = (t + k, n)
                if not valid[at]:
                    break
                delta = float(reward[at]) - float(value0[at])
                if not terminated[at]:
                    delta += gamma * float(value1[at])
                advantage[t, n] += (gamma * lam) ** k * delta
                if ended[at]:
                    break
    return advantage


def softmax_terms(logits, action):
    """Log-probability of the action and entropy, of one categorical."""
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    return np.log(p[np.arange(len(p)), action]), -(p * np.log(p)).sum(axis=1)


class Twin:
    """What an agent should do to its weights, one rollout after the other.

    Args:
        agent: Whose weights to start from, and whose arguments to take.
        kind: Key of `KINDS`.
        ppo: PPO's losses, not A2C's.
        rate: SGD's learning rate.

    Attributes:
        step_logs: Metrics of each gradient step of the latest rollout.
    """

    def __init__(self, agent, kind, ppo, rate):
        self.o, self.ppo, self.rate = agent, ppo, rate
        self.space, self.nb_outputs = KINDS[kind]
        self.shared = agent.critic is None
        self.weights = flat_weights(agent)
        self.states = self.next_statistics = None
        self.seen, self.returns, self.running = [], [], None

    # ---- networks and distributions

    def forward(self, w, x):
        at = 0

        def take(*shape):
            nonlocal at
            at += math.prod(shape)
            return w[at - math.prod(shape) : at].reshape(shape)

        hidden = np.tanh(x @ take(NB_INPUTS, NB_HIDDEN) + take(NB_HIDDEN))
        outputs = hidden @ take(NB_HIDDEN, self.nb_outputs) + take(self.nb_outputs)
        features = hidden if self.shared else x
        value = (features @ take(features.shape[1], 1) + take(1))[:, 0]
        if isinstance(self.space, gym.spaces.Box) and self.nb_outputs == self.space.shape[0]:
            outputs = np.hstack([outputs, np.tile(take(self.nb_outputs), (len(x), 1))])
        assert at == len(w)
        return outputs, value

    def log_prob_and_entropy(self, outputs, action):
        if isinstance(self.space, gym.spaces.Discrete):
            return softmax_terms(outputs, action)
        if isinstance(self.space, gym.spaces.MultiDiscrete):
            parts = np.split(outputs, np.cumsum(self.space.nvec)[:-1], axis=1)
            terms = [softmax_terms(part, action[:, k]) for k, part in enumerate(parts)]
            return sum(t[0] for t in terms), sum(t[1] for t in terms)
        if isinstance(self.space, gym.spaces.MultiBinary):
            p = 1 / (1 + np.exp(-outputs))
            log_prob = np.where(action == 1, np.log(p), np.log(1 - p))
            return log_prob.sum(axis=1), -(p * np.log(p) + (1 - p) * np.log(1 - p)).sum(axis=1)
        mean, log_std = np.split(outputs, 2, axis=1)
        variance = np.exp(log_std) ** 2
        density = np.exp(-((action - mean) ** 2) / (2 * variance)) / np.sqrt(2 * np.pi * variance)
        return np.log(density).sum(axis=1), (0.5 * np.log(2 * np.pi * np.e * variance)).sum(axis=1)

    # ---- one rollout

    def update(self, rollout, clip_range=None, clip_value_range=None):
        """Learns from what `Watched` noted; returns the metrics by name."""
        o, steps = self.o, rollout["steps"]
        x0, x1, action, reward, terminated, truncated, valid = (
            np.array([getattr(s, name) for s in steps])
            for name in ("observation", "next_observation", "action", "reward", "terminated", "truncated", "valid")
        )
        x0, x1 = x0.astype(float), x1.astype(float)
        ended = terminated | truncated
        if o.normalize_reward:
            reward = self.scaled_reward(reward.astype(float), ended, valid)
        if o.normalize_observation:
            self.seen += list(x0[valid])
            if self.next_statistics is None:  # the first rollout is learnt from with its own statistics
                self.next_statistics = np.mean(self.seen, axis=0), np.var(self.seen, axis=0)
            mean, variance = self.next_statistics
            x0, x1 = (np.clip((x - mean) / np.sqrt(variance + 1e-8), -10, 10) for x in (x0, x1))
            self.next_statistics = np.mean(self.seen, axis=0), np.var(self.seen, axis=0)

        def flat(x):
            return x.reshape(-1, *x.shape[2:])

        outputs, value0 = self.forward(self.weights, flat(x0))
        value1 = self.forward(self.weights, flat(x1))[1]
        old = self.log_prob_and_entropy(outputs, flat(action))[0]
        shape = valid.shape
        advantage = naive_gae(
            reward, value0.reshape(shape), value1.reshape(shape), terminated, ended, valid, o.gamma, o.lam
        ).ravel()
        target = advantage + value0
        used = valid.ravel()
        metrics = []
        for rows in rollout["batches"]:
            assert used[rows].all() and len(rows)
            batch = (flat(x0)[rows], flat(action)[rows], old[rows], value0[rows], advantage[rows], target[rows])

            def loss(w, batch=batch):
                return self.losses(w, *batch, clip_range, clip_value_range)

            metrics.append(loss(self.weights))
            gradient = central_differences(lambda w, loss=loss: loss(w)["loss"], self.weights)
            norm = np.sqrt((gradient**2).sum())
            if o.max_grad_norm is not None and norm > o.max_grad_norm:
                gradient *= o.max_grad_norm / norm
            self.weights = self.weights - self.rate * gradient
        self.step_logs = metrics
        result = {name: float(np.mean([m[name] for m in metrics])) for name in metrics[0]}
        spread = np.var(target[used])
        result["explained_variance"] = 1 - np.var((target - value0)[used]) / spread if spread > 1e-9 else np.nan
        return result

    def losses(self, w, x, action, old, value0, advantage, target, epsilon, c):
        o = self.o
        outputs, value = self.forward(w, x)
        log_prob, entropy = self.log_prob_and_entropy(outputs, action)
        if o.normalize_advantage and len(advantage) > 1:
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        value_loss = (target - value) ** 2
        logs = {}
        if self.ppo:
            rho = np.exp(log_prob - old)
            pairs = zip(rho, advantage, strict=True)
            objective = [min(r * a, min(max(r, 1 - epsilon), 1 + epsilon) * a) for r, a in pairs]
            if c is not None:
                near = value0 + np.clip(value - value0, -c, c)
                value_loss = np.maximum(value_loss, (target - near) ** 2)
            logs["approx_kl"] = np.mean((rho - 1) - np.log(rho))
            logs["clip_fraction"] = np.mean(np.abs(rho - 1) > epsilon)
        else:
            objective = log_prob * advantage
        logs |= {"policy_loss": -np.mean(objective), "value_loss": value_loss.mean(), "entropy": entropy.mean()}
        logs["loss"] = (
            logs["policy_loss"] + o.value_loss_weight * logs["value_loss"] - o.entropy_weight * logs["entropy"]
        )
        return logs

    def scaled_reward(self, reward, ended, valid):
        """Rewards over the standard deviation of all discounted returns so far, these ones included."""
        if self.running is None:
            self.running = np.zeros(reward.shape[1])
        for t in range(len(reward)):
            for n in range(reward.shape[1]):
                if valid[t, n]:
                    self.running[n] = self.o.gamma * self.running[n] + reward[t, n]
                    self.returns.append(self.running[n])
                if ended[t, n]:
                    self.running[n] = 0.0
        return np.clip(reward / np.sqrt(np.var(self.returns) + 1e-8), -10, 10)


def central_differences(function, w, h=1e-6):
    """The gradient of a function of a vector."""
    gradient = np.zeros(len(w))
    for i in range(len(w)):
        step = np.zeros(len(w))
        step[i] = h
        gradient[i] = (function(w + step) - function(w - step)) / (2 * h)
    return gradient


def assert_agrees(agent, watched, twin, nb_rollouts, tolerance=2e-5, **clips):
    """The twin learns from the same rows and gets the same weights and metrics, rollout by rollout."""
    assert len(watched.rollouts) >= nb_rollouts
    np.testing.assert_array_equal(twin.weights, watched.start)
    moved = 0.0
    for rollout in watched.rollouts:
        before = twin.weights
        expected = twin.update(rollout, **clips)
        moved += np.abs(twin.weights - before).max()
        np.testing.assert_allclose(rollout["weights"], twin.weights, atol=tolerance, rtol=0)
        assert set(expected) <= set(rollout["metrics"])
        assert set(rollout["metrics"]) - set(expected) == {"learning_rate", "steps_per_second"}
        for name, value in expected.items():
            np.testing.assert_allclose(rollout["metrics"][name], value, rtol=1e-4, atol=1e-4, err_msg=name)
    assert moved > 100 * tolerance
