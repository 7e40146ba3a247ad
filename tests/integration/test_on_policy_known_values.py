"""PPO and A2C against values and policies that are known exactly: probe envs, each of which can fail in one way."""

import gymnasium as gym
import keras
import numpy as np
import pytest
from gymnasium import spaces
from keras import layers

from rl.agents.a2c import A2CAgent
from rl.agents.ppo import PPOAgent
from rl.common.vec_env import DummyVecEnv
from rl.networks import mlp
from tests.toy_envs import ConstantReward, TwoStateMDP

AGENTS = [A2CAgent, PPOAgent]
MODES = list(gym.vector.AutoresetMode)


class Probe(gym.Env):
    """A tiny env: `start(rng)` draws a state, `after(state, action)` gives `(state, reward, terminated, truncated)`.

    Observations are rows of `seen`, by the state.
    """

    def __init__(self, seen, start, after, action_space):
        self.seen, self.start, self.after = np.asarray(seen, np.float32), start, after
        self.observation_space = spaces.Box(-10, 10, self.seen.shape[1:], np.float32)
        self.action_space = action_space

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.state = self.start(self.np_random)
        return self.seen[self.state], {}

    def step(self, action):
        self.state, reward, terminated, truncated = self.after(self.state, action)
        return self.seen[self.state], float(reward), terminated, truncated, {}


def probe(seen, start, after, action_space=None):
    action_space = action_space or spaces.Discrete(2)
    return lambda: Probe(seen, start, after, action_space)


def first(rng):
    return 0


def coin(rng):
    return int(rng.integers(2))


def end(state, reward):
    return state, reward, True, False


CONSTANT = probe([[1]], first, lambda s, a: end(s, 1))
TWO_VALUES = probe([[-1], [1]], coin, lambda s, a: end(s, 2 * s - 1))
LATER = probe([[1, 0], [0, 1]], first, lambda s, a: (1, s, s == 1, False))
BY_ACTION = probe([[1]], first, lambda s, a: end(s, 2 * a - 1))
BY_BOTH = probe([[-1], [1]], coin, lambda s, a: end(s, 1 if a == s else -1))
DELAYED = probe(np.eye(3), first, lambda s, a: (1 + a, 0, False, False) if s == 0 else end(s, 2 * s - 3))


def lanes(make, n=4, mode="SameStep"):
    return DummyVecEnv([make] * n, autoreset_mode=mode)


def make_agent(kind, make, nb_rollouts, nb_outputs=None, hidden=(16,), rate=0.02, **options):
    """An agent whose learning rate falls to a twentieth, so that Adam comes to rest."""
    keras.utils.set_random_seed(3)
    env = make()
    shape, nb_outputs = env.observation_space.shape, nb_outputs or spaces.flatdim(env.action_space)
    networks = mlp(shape, nb_outputs, hidden, output_gain=0.01), mlp(shape, 1, hidden)
    options = {"nb_rollout_steps": 8, "gamma": 0.9, "lam": 0.9, "max_grad_norm": None} | options
    if kind is PPOAgent:
        options = {"nb_epochs": 4, "batch_size": 32} | options
    nb_updates = nb_rollouts * options.get("nb_epochs", 1)  # an epoch is one batch
    rate = keras.optimizers.schedules.PolynomialDecay(rate, nb_updates, rate / 20)
    agent = kind(*networks, env.action_space, **options)
    agent.compile(keras.optimizers.Adam(rate), jit_compile=False)
    return agent


def learn(kind, make, nb_rollouts=None, mode="SameStep", **options):
    nb_rollouts = nb_rollouts or (200 if kind is A2CAgent else 60)
    agent = make_agent(kind, make, nb_rollouts, **options)
    agent.fit(lanes(make, mode=mode), nb_steps=4 * agent.nb_rollout_steps * nb_rollouts, verbose=0, seed=1)
    outputs, value = agent.evaluate(make().seen[:, None])
    return agent, outputs, value


def softmax(logits):
    return np.asarray(keras.ops.softmax(logits, axis=-1))


# ---- values ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "expected"),
    [(CONSTANT, [1]), (TWO_VALUES, [-1, 1]), (LATER, [0.9, 1])],
    ids=["constant", "by observation", "discounted"],
)
@pytest.mark.parametrize("kind", AGENTS)
def test_values(kind, make, expected):
    _, _, value = learn(kind, make)
    np.testing.assert_allclose(value, expected, atol=0.05)


def twin(state, action):
    """Two steps, a reward after the second one: states 0 and 1 terminate, 2 and 3 are truncated, 4 and 5 both."""
    second, pair = state % 2 == 1, state // 2
    return 2 * pair + 1, second, second and pair != 1, second and pair != 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", AGENTS)
def test_twins_that_end_differently(kind, mode):
    make = probe(np.eye(6), lambda rng: 2 * int(rng.integers(3)), twin)
    _, _, value = learn(kind, make, mode=mode, gamma=0.5)
    np.testing.assert_allclose(value, [0.5, 1, 1, 2, 0.5, 1], atol=0.05)


class Terminating(ConstantReward):
    def step(self, action):
        observation, reward, _, end, info = super().step(action)
        return observation, reward, end, False, info


def value_of_a_constant(kind, env, limit=None, nb_lanes=3, nb_rollout_steps=6, nb_rollouts=300):
    """The value of the only state, gamma 0.99."""
    init = "zeros"
    actor, critic = (
        keras.Sequential([layers.Input((1,)), layers.Dense(n, use_bias=False, kernel_initializer=init)]) for n in (2, 1)
    )
    options = {"nb_rollout_steps": nb_rollout_steps, "gamma": 0.99, "lam": 1.0, "max_grad_norm": None}
    if kind is PPOAgent:
        options |= {"nb_epochs": 1, "batch_size": nb_rollout_steps * nb_lanes}
    agent = kind(actor, critic, ConstantReward.action_space, normalize_advantage=True, **options)
    agent.compile(keras.optimizers.SGD(0.9), jit_compile=False)
    nb_steps = nb_rollouts * nb_rollout_steps * nb_lanes
    agent.fit(env, nb_steps=nb_steps, verbose=0, nb_max_episode_steps=limit, seed=0)
    return float(agent.evaluate(np.ones((1, 1, 1), np.float32))[1][0])


@pytest.mark.parametrize(("kind", "limit"), [(A2CAgent, None), (PPOAgent, 5)], ids=["env", "nb_max_episode_steps"])
def test_a_time_limit_is_not_a_terminal_state_on_one_env(kind, limit):
    env = ConstantReward(5 if limit is None else None)
    assert value_of_a_constant(kind, env, limit, nb_lanes=1) == pytest.approx(100, abs=1)


@pytest.mark.parametrize("make", [lanes, gym.vector.SyncVectorEnv], ids=["ours", "gymnasium's"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", AGENTS)
def test_a_time_limit_is_not_a_terminal_state_on_lanes(kind, mode, make):
    fns = [lambda: ConstantReward(5)] * 3
    env = lanes(fns[0], 3, mode) if make is lanes else make(fns, autoreset_mode=mode)
    assert value_of_a_constant(kind, env) == pytest.approx(100, abs=1)


@pytest.mark.parametrize("mode", MODES)
def test_but_the_end_of_its_terminal_twin_is(mode):
    # Rollouts of 30 steps hold whole episodes in each mode, so the value is the mean over the places in an episode.
    value = value_of_a_constant(A2CAgent, lanes(lambda: Terminating(5), 3, mode), nb_rollout_steps=30, nb_rollouts=30)
    assert value == pytest.approx(np.mean([(1 - 0.99**n) / (1 - 0.99) for n in range(1, 6)]), abs=0.03)


@pytest.mark.parametrize(("lam", "mode"), [(0.0, MODES[0]), (0.8, MODES[1]), (1.0, MODES[2])])
def test_the_value_of_a_fixed_policy_whatever_lambda(lam, mode):
    actor = keras.Sequential([layers.Input((2,)), layers.Dense(2, kernel_initializer="zeros")])
    actor.trainable = False  # uniform for ever
    critic = keras.Sequential([layers.Input((2,)), layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
    agent = A2CAgent(actor, critic, TwoStateMDP.action_space, 10, gamma=TwoStateMDP.GAMMA, lam=lam, max_grad_norm=None)
    rate = keras.optimizers.schedules.PolynomialDecay(0.05, 250, 0.0005)
    agent.compile(keras.optimizers.Adam(rate), jit_compile=False)
    env = lanes(lambda: gym.wrappers.TimeLimit(TwoStateMDP(), 7), 16, mode)
    agent.fit(env, nb_steps=250 * 160, verbose=0, seed=0)
    v1 = 0.6 / (1 - 0.45**2 / 0.55)
    np.testing.assert_allclose(agent.evaluate(np.eye(2)[:, None])[1], [0.45 / 0.55 * v1, v1], atol=0.03)


# ---- policies -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", AGENTS)
def test_the_better_action(kind):
    agent, logits, value = learn(kind, BY_ACTION)
    assert softmax(logits)[0, 1] > 0.95
    np.testing.assert_allclose(value, [1], atol=0.05)
    assert agent.test(BY_ACTION(), nb_episodes=3, verbose=0, visualize=False).history["episode_reward"] == [1.0] * 3


@pytest.mark.parametrize("kind", AGENTS)
def test_the_action_that_fits_the_observation(kind):
    _, logits, value = learn(kind, BY_BOTH)
    assert np.diag(softmax(logits)).min() > 0.95
    np.testing.assert_allclose(value, [1, 1], atol=0.05)


@pytest.mark.parametrize(("kind", "mode"), [(A2CAgent, MODES[0]), (PPOAgent, MODES[1]), (PPOAgent, MODES[2])])
def test_an_action_that_pays_off_later(kind, mode):
    _, logits, value = learn(kind, DELAYED, mode=mode)
    assert softmax(logits)[0, 1] > 0.95
    np.testing.assert_allclose(value[[0, 2]], [0.9, 1], atol=0.05)


@pytest.mark.parametrize("nb_outputs", [2, 4], ids=["mean", "mean and log std"])
@pytest.mark.parametrize("kind", AGENTS)
def test_continuous_actions(kind, nb_outputs):
    box, goal = spaces.Box(-2, 2, (2,)), np.array([0.5, -1.0])
    make = probe([[1]], first, lambda s, a: end(s, -np.sum((a - goal) ** 2)), box)
    nb_rollouts, rate = (400, 0.02) if kind is A2CAgent else (200, 0.01)
    _, outputs, value = learn(kind, make, nb_rollouts, nb_outputs=nb_outputs, rate=rate)
    np.testing.assert_allclose(outputs[0, :2], goal, atol=0.15)
    assert outputs[0, 2:].max() < -1  # surer than at the start, when the standard deviation was 1
    assert abs(value[0]) < 0.2


IDENTITIES = {
    "MultiDiscrete": (spaces.MultiDiscrete([2, 3]), [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]),
    "MultiBinary": (spaces.MultiBinary(2), [[0, 0], [0, 1], [1, 0], [1, 1]]),
    "Discrete": (spaces.Discrete(4, start=2), [2, 3, 4, 5]),
}


@pytest.mark.parametrize("name", IDENTITIES)
@pytest.mark.parametrize("kind", AGENTS)
def test_identity(kind, name):
    space, goals = IDENTITIES[name]
    goals = np.array(goals)
    make = probe(
        np.eye(len(goals)),
        lambda rng: int(rng.integers(len(goals))),
        lambda s, a: end(s, np.mean(a == goals[s])),
        space,
    )
    agent, outputs, value = learn(kind, make, nb_rollouts=300 if kind is A2CAgent else 80)
    action = goals - 2 if name == "Discrete" else goals
    p = np.exp(np.asarray(agent.distribution.log_prob(outputs, action)))
    assert p.min() > 0.9 and p.mean() > 0.95
    np.testing.assert_allclose(value, 1, atol=0.1)
    rewards = agent.test(lanes(make), nb_episodes=20, verbose=0, visualize=False).history["episode_reward"]
    assert rewards == [1.0] * 20


@pytest.mark.parametrize("kind", AGENTS)
def test_a_bandit_with_noisy_arms(kind):
    class Bandit(gym.Env):
        observation_space, action_space = spaces.Box(0, 1, (1,), np.float32), spaces.Discrete(5)

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            return np.ones(1, np.float32), {}

        def step(self, action):
            return np.ones(1, np.float32), self.np_random.normal([0, 0.5, 2, 1, -1][action], 0.5), True, False, {}

    nb_rollouts = 250 if kind is A2CAgent else 80
    agent = make_agent(kind, Bandit, nb_rollouts)
    agent.fit(lanes(Bandit), nb_steps=32 * nb_rollouts, verbose=0, seed=0)
    outputs, value = agent.evaluate(np.ones((1, 1, 1), np.float32))
    assert softmax(outputs)[0, 2] > 0.95
    assert value[0] == pytest.approx(2, abs=0.25)


@pytest.mark.parametrize("kind", AGENTS)
def test_with_an_entropy_bonus_a_bandits_policy_is_the_softmax_of_its_rewards(kind):
    """`E[r] + beta H` is largest at `p_a = exp(r_a / beta) / sum_b exp(r_b / beta)`."""
    rewards, beta = np.array([0.0, 1.0, 0.5]), 0.5
    make = probe([[1]], first, lambda s, a: end(s, rewards[a]), spaces.Discrete(3))
    nb_rollouts = 300 if kind is A2CAgent else 75
    options = {"entropy_weight": beta, "normalize_advantage": False, "nb_rollout_steps": 4}
    if kind is PPOAgent:
        options["batch_size"] = 256
    agent = make_agent(kind, make, nb_rollouts, hidden=(), rate=0.05, **options)
    agent.fit(lanes(make, 64), nb_steps=256 * nb_rollouts, verbose=0, seed=0)
    outputs, _ = agent.evaluate(np.ones((1, 1, 1), np.float32))
    np.testing.assert_allclose(softmax(outputs)[0], softmax(rewards / beta), atol=0.03)
