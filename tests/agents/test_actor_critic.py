"""The model of policy and value: networks of every kind, and running normalisation against NumPy."""

import gymnasium as gym
import keras
import numpy as np
import pytest
from gymnasium import spaces
from keras import layers, ops

from rl.agents.a2c import A2CAgent
from rl.agents.actor_critic import RunningStatistics
from rl.agents.ppo import PPOAgent
from rl.common.vec_env import DummyVecEnv, VecNormalize
from rl.networks import actor_critic
from tests.agents.test_rollout import MODES, Any, assert_same, differ, make_agent, make_env, network, state_of, watched
from tests.toy_envs import Counting

# ---- networks -------------------------------------------------------------------------------------------------------


def test_networks_with_and_without_a_window_axis_give_the_same_results():
    plain = make_agent()
    windowed = make_agent(networks=(network(3, 1, (1, 3)), network(1, 2, (1, 3))))
    mixed = make_agent(networks=(network(3, 1), network(1, 2, (1, 3))))
    for agent in (plain, windowed, mixed):
        agent.fit(make_env(3), nb_steps=60, verbose=0, seed=3)
    assert_same(plain, windowed)
    assert_same(plain, mixed)


class Own(keras.Model):
    """A subclassed network of one head or two."""

    def __init__(self, *nb_outputs):
        super().__init__()
        self.body = layers.Dense(8, "tanh", kernel_initializer=keras.initializers.GlorotUniform(1))
        self.heads = [layers.Dense(n, kernel_initializer=keras.initializers.GlorotUniform(2 + n)) for n in nb_outputs]

    def call(self, x, training=False):
        y = self.body(ops.reshape(x, (-1, 3)))
        outputs = [head(y) for head in self.heads]
        return outputs[0] if len(outputs) == 1 else tuple(outputs)


def built(model):
    model(np.zeros((1, 1, 3), np.float32))
    return model


@pytest.mark.parametrize("kind", [PPOAgent, A2CAgent])
def test_subclassed_networks(kind):
    two = make_agent(kind, networks=(built(Own(3)), built(Own(1))))
    one = make_agent(kind, networks=(built(Own(3, 1)), None))
    for agent in (two, one):
        before = agent.get_weights()
        agent.fit(make_env(3), nb_steps=40, verbose=0, seed=1)
        assert all(not np.array_equal(a, b) for a, b in zip(before, agent.get_weights(), strict=True))
        assert len(agent.test(make_env(2), nb_episodes=2, verbose=0, visualize=False).history["episode_reward"]) == 2


def test_subclassed_networks_that_do_not_fit_are_refused():
    for networks in ((built(Own(4)), built(Own(1))), (built(Own(3)), built(Own(2))), (built(Own(4, 1)), None)):
        with pytest.raises(ValueError, match="must (map|return)"):
            make_agent(networks=networks).fit(make_env(), nb_steps=5, verbose=0)


def test_a_shared_network_with_two_heads_learns_both():
    x = keras.Input((3,))
    y = layers.Dense(8, "tanh")(x)
    agent = make_agent(networks=(keras.Model(x, [layers.Dense(3)(y), layers.Dense(1)(y)]), None))
    before = agent.get_weights()
    agent.fit(make_env(3), nb_steps=40, verbose=0)
    assert len(before) == 6
    assert all(not np.array_equal(a, b) for a, b in zip(before, agent.get_weights(), strict=True))


@pytest.mark.parametrize("kind", [PPOAgent, A2CAgent])
def test_layers_that_act_differently_in_training_warn_once_and_stay_in_inference_mode(kind):
    x = keras.Input((3,))
    y = layers.Dropout(0.5)(layers.Dense(16, "tanh")(x))
    y = keras.Sequential([layers.BatchNormalization()])(y)
    options = {"nb_epochs": 1, "batch_size": 18} if kind is PPOAgent else {}
    with pytest.warns(UserWarning, match="dropout.*batch_normalization.*inference mode") as caught:
        agent = make_agent(kind, networks=(keras.Model(x, layers.Dense(3)(y)), network(1)), **options)
        _, metrics = watched(agent)
        agent.fit(make_env(3), nb_steps=60, verbose=0)
    assert len([w for w in caught if "inference mode" in str(w.message)]) == 1
    moving = [w.numpy() for w in agent.model.non_trainable_variables if "moving" in w.path]
    np.testing.assert_array_equal(np.concatenate(moving), [0.0] * 16 + [1.0] * 16)
    for logs in metrics if kind is PPOAgent else ():
        assert (
            abs(logs["approx_kl"]) < 1e-6 and logs["clip_fraction"] == 0
        )  # the policy that learns is the one that acted


class Parts(gym.Env):
    """A `Dict` or `Tuple` of a vector, a number of a set, and a nested part."""

    action_space = spaces.Discrete(2)

    def __init__(self, kind="dict"):
        self.kind = kind
        parts = {"b": spaces.Box(-5, 5, (2,), np.float64), "a": spaces.Discrete(3), "c": spaces.MultiBinary(2)}
        self.observation_space = spaces.Dict(parts) if kind == "dict" else spaces.Tuple(list(parts.values()))

    def _obs(self):
        parts = {"a": self.t % 3, "b": np.array([self.t, -1.0]), "c": np.array([1, self.t % 2], np.int8)}
        return parts if self.kind == "dict" else (parts["b"], parts["a"], parts["c"])

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self._obs(), {}

    def step(self, action):
        self.t += 1
        return self._obs(), float(action), self.t == 4, False, {}


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("kind", ["dict", "tuple"])
@pytest.mark.parametrize("lanes", [1, 3])
def test_dict_and_tuple_observations(kind, lanes, normalize):
    env = Parts(kind) if lanes == 1 else DummyVecEnv([lambda: Parts(kind)] * lanes, autoreset_mode="NextStep")
    agent = make_agent(action_space=env.action_space, networks=actor_critic(env), normalize_observation=normalize)
    before = agent.get_weights()
    agent.fit(env, nb_steps=60, verbose=0, seed=1)
    assert agent.step >= 60 and agent.run_state.nb_updates > 10
    assert differ(before, agent.get_weights())
    assert all(np.isfinite(w).all() for w in agent.get_weights())
    agent.test(env, nb_episodes=2, verbose=0, visualize=False)


# ---- normalisation --------------------------------------------------------------------------------------------------


def seen_by(rollouts, lanes=slice(None)):
    """The observations `(n, *obs)` of all valid rows."""
    return np.concatenate([r[0][:, lanes][r[-1][:, lanes]][:, 0] for r in rollouts])


def naive_returns(rollouts, gamma):
    """`R <- gamma R + r` of every valid row, lane by lane, from one rollout to the next."""
    sums = []
    for lane in range(rollouts[0][2].shape[1]):
        running = 0.0
        for _, _, reward, _, _, ended, valid in rollouts:
            for t in range(len(reward)):
                if valid[t, lane]:
                    running = gamma * running + float(reward[t, lane])
                    sums.append(running)
                if ended[t, lane]:
                    running = 0.0
    return np.array(sums)


def assert_statistics(statistics, samples):
    assert float(statistics.count) == len(samples)
    np.testing.assert_allclose(statistics.mean.numpy(), samples.mean(axis=0), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(statistics.variance.numpy(), samples.var(axis=0), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("kind", [PPOAgent, A2CAgent])
@pytest.mark.parametrize(("lanes", "mode"), [(1, None)] + [(3, mode) for mode in MODES])
def test_the_statistics_are_numpys_over_every_valid_step(kind, lanes, mode):
    agent = make_agent(kind, gamma=0.9, normalize_observation=True, normalize_reward=True)
    rollouts, _ = watched(agent)
    env = make_env(lanes, mode, truncate=mode == MODES[0])
    agent.fit(env, nb_steps=50, verbose=0, seed=1)
    before = state_of(agent)
    agent.test(make_env(2), nb_episodes=5, verbose=0, visualize=False)
    agent.evaluate(np.full((4, 1, 3), 77, np.float32))
    assert not differ(before, state_of(agent))
    agent.fit(env, nb_steps=50, verbose=0)  # in the middle of episodes and of a rollout
    assert len(rollouts) >= 5
    assert_statistics(agent.model.normalizers[0], seen_by(rollouts))
    assert_statistics(agent.model.returns, naive_returns(rollouts, 0.9))


def test_returns_go_on_from_rollout_to_rollout_and_stop_where_lanes_are_opened_anew():
    agent = make_agent(gamma=0.9, normalize_reward=True)
    rollouts, _ = watched(agent)
    agent.fit(Counting(lengths=(50,)), nb_steps=9, verbose=0)  # a rollout and a half
    agent.fit(Counting(lengths=(50,)), nb_steps=9, verbose=0)
    agent.fit(Counting(lengths=(50,)), nb_steps=6, verbose=0)
    assert len(rollouts) == 4
    expected = []
    for length in (9, 9, 6):
        running = 0.0
        for t in range(1, length + 1):
            running = 0.9 * running + t
            expected.append(running)
    assert_statistics(agent.model.returns, np.array(expected))


@pytest.mark.parametrize("kind", ["dict", "tuple"])
def test_float_parts_have_statistics_of_their_own_and_others_none(kind):
    env = DummyVecEnv([lambda: Parts(kind)] * 3, autoreset_mode="NextStep")
    agent = make_agent(action_space=env.action_space, networks=actor_critic(env), normalize_observation=True)
    rollouts, _ = watched(agent)
    agent.fit(env, nb_steps=60, verbose=0, seed=1)
    vector = np.concatenate([(r[0]["b"] if kind == "dict" else r[0][0])[r[-1]][:, 0] for r in rollouts])
    counts = [float(n.count) for n in agent.model.normalizers]
    assert sorted(counts) == [0, 0, len(vector)]
    assert_statistics(agent.model.normalizers[int(np.argmax(counts))], vector)


@pytest.mark.parametrize("observations", ["box", "dict"])
def test_the_policy_that_is_learnt_from_is_the_one_that_acted(observations):
    """After the first rollout the statistics change only when it has been learnt from."""
    keras.utils.set_random_seed(0)  # by chance two policies may be as sure of themselves
    env = Parts() if observations == "dict" else Any(spaces.Discrete(2))
    nets = actor_critic(env)
    nets[0].layers[-1].kernel.assign(np.random.default_rng(0).normal(size=nets[0].layers[-1].kernel.shape))
    agent = make_agent(A2CAgent, action_space=env.action_space, networks=nets, normalize_observation=True)
    agent.compile(keras.optimizers.SGD(0.0), jit_compile=False)
    acted = []
    act = agent.act

    def acting(observation):
        states = keras.tree.map_structure(lambda x: np.asarray(x)[:, None], observation)
        acted.append(np.array(agent.distribution.entropy(agent.evaluate(states)[0]))[0])
        return act(observation)

    agent.act = acting
    _, metrics = watched(agent)
    agent.fit(env, nb_steps=30, verbose=0, seed=1)
    learnt = [m["entropy"] for m in metrics]
    expected = np.reshape(acted, (5, 6)).mean(axis=1)
    np.testing.assert_allclose(learnt[1:], expected[1:], rtol=1e-4)
    assert abs(learnt[0] - expected[0]) > 1e-3  # but the first policy learns from states on the scale to come


def test_the_networks_see_normalised_states_and_logs_the_envs_rewards():
    agent = make_agent(normalize_observation=True, normalize_reward=True)
    history = agent.fit(Counting(lengths=(4,)), nb_steps=24, verbose=0).history
    assert history["episode_reward"] == [10.0] * 6
    (n,) = agent.model.normalizers
    states = np.array([[[0, 2, 1]], [[0, 1e6, -1e6]]], np.float32)
    scaled = np.clip((states[:, 0] - n.mean.numpy()) / np.sqrt(n.variance.numpy() + 1e-8), -10, 10)
    assert np.abs(scaled).max() == 10
    np.testing.assert_allclose(agent.evaluate(states)[0], agent.actor(scaled), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(agent.evaluate(states)[1], agent.critic(scaled)[:, 0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("reward", [1e-3, 1.0, 1e4])
def test_values_are_learnt_on_the_scale_of_the_returns(reward):
    class Paying(Any):
        def step(self, action):
            observation, _, *rest = super().step(action)
            return observation, reward * self.t, *rest

    agent = make_agent(A2CAgent, gamma=0.0, normalize_reward=True, compile_options={"metrics": ["mse"]})
    rollouts, metrics = watched(agent)
    agent.compile(keras.optimizers.SGD(0.0), jit_compile=False)
    env = Paying()
    agent.fit(env, nb_steps=6, verbose=0, seed=1)
    value = agent.evaluate(rollouts[0][0][:, 0])[1]
    scaled = rollouts[0][2][:, 0] / np.sqrt(np.var(rollouts[0][2]) + 1e-8)
    assert metrics[0]["value_loss"] == pytest.approx(np.mean((np.clip(scaled, -10, 10) - value) ** 2), rel=1e-3)


def test_the_scale_of_rewards_is_that_of_the_wrapper():
    def venv():
        return make_env(3, "NextStep", truncate=True)

    agent = make_agent(gamma=0.95, normalize_reward=True)
    agent.fit(venv(), nb_steps=600, verbose=0, seed=1)
    wrapper = VecNormalize(venv(), norm_obs=False, gamma=0.95)
    wrapper.reset(seed=1)
    while wrapper.return_rms.count - 1e-4 < float(agent.model.returns.count):
        wrapper.step(np.zeros(3, int))
    for statistic, value in (("mean", agent.model.returns.mean), ("var", agent.model.returns.variance)):
        assert float(value) == pytest.approx(float(getattr(wrapper.return_rms, statistic)), rel=0.02)


def test_statistics_stay_exact_far_from_zero_and_over_many_rollouts():
    rng, statistics = np.random.default_rng(0), RunningStatistics((2,))
    samples = rng.normal([1000.0, -5.0], [0.5, 3.0], size=(2000, 2)).astype(np.float32)
    for rows in np.split(samples, 100):
        junk = np.full((3, 2), np.nan, np.float32)
        weight = np.append(np.ones(20, np.float32), np.zeros(3, np.float32))
        for variable, value in statistics.merged(np.concatenate([rows, junk]), weight):
            variable.assign(value)
    assert float(statistics.count) == 2000
    np.testing.assert_allclose(statistics.mean.numpy(), samples.mean(axis=0, dtype=float), rtol=1e-5)
    np.testing.assert_allclose(statistics.variance.numpy(), samples.var(axis=0, dtype=float), rtol=1e-3)


def test_normalisation_needs_to_know_the_inputs():
    with pytest.raises(ValueError, match="normalize_observation=True needs to know the shapes.*VecNormalize"):
        make_agent(networks=(built(Own(3)), built(Own(1))), normalize_observation=True)
