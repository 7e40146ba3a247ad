"""CEM: the search distribution against theory and NumPy, generations on lanes, members, files, refusals."""

import os
from types import SimpleNamespace

import gymnasium as gym
import keras
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

from rl.agents.cem import CEMAgent
from rl.common.vec_env import DummyVecEnv, SubprocVecEnv
from rl.memory import EpisodeParameterMemory, SequentialMemory
from tests.toy_envs import Counting

QUIET = {"verbose": 0, "visualize": False}
MODES = list(AutoresetMode)


def network(nb_inputs=3, nb_actions=3, hidden=(), seed=0):
    layers = [keras.layers.Input((1, nb_inputs)), keras.layers.Flatten()]
    for i, n in enumerate((*hidden, nb_actions)):
        init = keras.initializers.GlorotUniform(seed=seed + i)
        layers.append(keras.layers.Dense(n, activation="tanh" if i < len(hidden) else None, kernel_initializer=init))
    return keras.Sequential(layers)


def make_agent(model=None, nb_actions=3, **options):
    defaults = {"batch_size": 10, "train_interval": 10, "elite_frac": 0.2, "nb_steps_warmup": 0}
    agent = CEMAgent(model or network(nb_actions=nb_actions), nb_actions, **(defaults | options))
    agent.compile(jit_compile=False)
    return agent


def make_env(lanes=1, mode=AutoresetMode.SAME_STEP, cls=Counting):
    return cls() if lanes == 1 else DummyVecEnv([lambda i=i: cls(i) for i in range(lanes)], autoreset_mode=mode)


class OneStep(gym.Env):
    """An episode is one step; what the member is worth is told by the test through `scores`."""

    observation_space = gym.spaces.Box(-1, 1, (3,), np.float32)
    action_space = gym.spaces.Discrete(3)

    def __init__(self, number=0):
        self.number = number

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(3, np.float32), {}

    def step(self, action):
        return np.zeros(3, np.float32), 0.0, True, False, {}


def scored_by(agent, score):
    """Lets a function of a member's weights decide its return."""
    population = agent.population
    file = population.score

    def scored(lane):
        population.returns[lane] = score(population.members[lane])
        return file(lane)

    population.score = scored
    return agent


# ---- the search distribution -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("share", "shift", "factor"), [(0.2, 1.3998, 0.2186), (0.1, 1.755, 0.1691)])
def test_a_generation_on_a_linear_objective_moves_as_theory_says(share, shift, factor):
    """The mean moves by E[z | z in the elite], its variance is that of the elite; other directions stay."""
    agent = make_agent(batch_size=20_000, train_interval=20_000, elite_frac=share)
    scored_by(agent, lambda member: float(member[0]))
    start = agent.theta.copy()
    agent.fit(DummyVecEnv([OneStep] * 500), nb_steps=20_000, seed=1, **QUIET)
    assert agent.run_state.nb_updates == 1
    moved, sigma = agent.theta[0] - start[0], agent.theta[1]
    nb_elite = 20_000 * share
    assert moved[0] == pytest.approx(shift, abs=4 * np.sqrt(factor / nb_elite))
    assert sigma[0] ** 2 == pytest.approx(factor, rel=0.1)
    np.testing.assert_allclose(moved[1:], 0.0, atol=4.5 / np.sqrt(nb_elite))
    np.testing.assert_allclose(sigma[1:], 1.0, atol=4.5 / np.sqrt(2 * nb_elite))


@pytest.mark.parametrize("lanes", [1, 3, 16])
def test_a_generation_against_numpy(lanes):
    agent = make_agent(noise_ampl=0.5, noise_decay_const=0.01)
    scored_by(agent, lambda member: float(-np.square(member).sum()))
    members, thetas = [], [agent.theta.copy()]
    end = agent._end_generation

    def ending():
        scores = [-np.square(m).sum() for _, m in agent.population.scored]
        members.append(np.stack([m for _, m in agent.population.scored]))
        metrics = end()
        assert metrics[0] == pytest.approx(np.mean(sorted(scores)[-2:]), rel=1e-5)
        thetas.append(agent.theta.copy())
        best = members[-1][np.argsort(scores)[-2:]]
        np.testing.assert_allclose(agent.theta[0], best.mean(axis=0), rtol=1e-5)
        noise = 0.5 * np.exp(-0.01 * agent.step)
        np.testing.assert_allclose(agent.theta[1], best.std(axis=0) + noise, rtol=1e-5)
        return metrics

    object.__setattr__(agent, "_end_generation", ending)
    agent.fit(make_env(lanes, cls=OneStep), nb_steps=160, seed=1, **QUIET)
    assert len(members) >= 5
    for population, (mean, sigma) in zip(members, thetas, strict=False):  # each from the distribution before, no other
        assert len(population) >= 10
        assert (np.abs(population - mean) <= 5 * sigma).all()
    np.testing.assert_allclose(agent.get_weights_flat(agent.model.get_weights()), agent.theta[0])


def test_long_episodes_are_waited_for_and_old_members_do_not_count():
    """Lane 0 plays 40 steps, the others one: the generation ends with the long one, and its next is a new one."""

    class Lengths(OneStep):
        def reset(self, *, seed=None, options=None):
            self.t = 0
            return super().reset(seed=seed)

        def step(self, action):
            self.t += 1
            return np.zeros(3, np.float32), 1.0, self.t == (40 if self.number == 0 else 1), False, {}

    agent = make_agent(train_interval=4, batch_size=4, elite_frac=0.5)
    env, ends, generations = DummyVecEnv([lambda i=i: Lengths(i) for i in range(3)]), [], []
    end = agent._end_generation

    def ending():
        ends.append(agent.step)
        generations.append([score for score, _ in agent.population.scored])
        return end()

    object.__setattr__(agent, "_end_generation", ending)
    agent.fit(env, nb_steps=3 * 41, seed=1, **QUIET)
    assert ends[0] == 3 * 40
    assert sorted(generations[0])[-1] == 40.0
    assert len(generations[0]) == 81
    agent.fit(env, nb_steps=3, **QUIET)
    # Lane 0 started anew with the second generation; all of its first four members but that one are done at once.
    assert len(ends) == 1


def test_a_member_that_outlives_its_generation_is_not_scored_in_the_next():
    agent = make_agent(train_interval=2, batch_size=4, elite_frac=0.5)
    agent.run_state.training, agent.run_state.step = True, 3
    agent.open_lanes(3)
    p = agent.population
    old = p.members[2].copy()
    step = {"reward": np.ones(3), "truncated": np.zeros(3, bool), "valid": np.ones(3, bool)}
    agent._make_functions()
    assert agent.observe(SimpleNamespace(terminated=np.array([True, True, False]), **step)) is not None
    np.testing.assert_array_equal(p.members[2], old)  # it plays on
    assert agent.observe(SimpleNamespace(terminated=np.array([False, False, True]), **step)) is None
    assert p.scored == []
    assert agent.memory.nb_entries == 3  # but it is filed
    assert not np.array_equal(p.members[2], old)


@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("mode", MODES, ids=lambda m: m.value)
def test_returns_are_the_episodes_own(lanes, mode):
    if lanes == 1 and mode is not MODES[0]:
        return
    agent = make_agent(train_interval=1000)
    history = agent.fit(make_env(lanes, mode), nb_steps=40 * lanes, seed=1, **QUIET).history["episode_reward"]
    assert sorted(score for score, _ in agent.population.scored) == sorted(history)
    memory = agent.memory
    assert sorted(memory.total_rewards[i] for i in range(memory.nb_entries)) == sorted(history)
    assert agent.best_seen[0] == max(history)


# ---- members ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lanes", [1, 3, 5])
@pytest.mark.parametrize("hidden", [(), (7,), (4, 5)])
@pytest.mark.parametrize("jit", [False, True])
def test_members_are_evaluated_together_as_they_would_be_one_by_one(lanes, hidden, jit):
    agent = CEMAgent(network(hidden=hidden), 3)
    agent.compile(jit_compile=jit)
    agent._make_functions()
    rng = np.random.default_rng(0)
    members = rng.normal(size=(lanes, agent.theta.shape[1])).astype("float32")
    states = rng.normal(size=(lanes, 1, 3)).astype("float32")
    together = agent._functions[1](members, states)
    before = agent.model.get_weights()
    for member, state, outputs in zip(members, states, together, strict=True):
        agent.model.set_weights(agent.get_weights_list(member))
        np.testing.assert_allclose(agent.evaluate(state[None])[0], outputs, rtol=1e-5, atol=1e-5)
    agent.model.set_weights(before)
    np.testing.assert_array_equal(agent.get_weights_flat(before), agent.theta[0])


def test_the_search_starts_at_the_networks_weights_and_test_uses_the_mean():
    agent = make_agent(network(seed=3))
    np.testing.assert_array_equal(agent.theta[0], agent.get_weights_flat(network(seed=3).get_weights()))
    np.testing.assert_array_equal(agent.theta[1], 1.0)
    env, random = make_env(2), agent.population.get_random_state()
    agent.test(env, nb_episodes=3, **QUIET)
    assert agent.population.get_random_state() == random
    assert agent.memory.nb_entries == 0
    theta = np.stack([np.arange(12.0), np.full(12, 0.1)])
    np.testing.assert_allclose(make_agent(theta_init=theta).theta, theta)


def test_lanes_play_different_members_and_one_keeps_its_own_for_an_episode():
    agent = make_agent(train_interval=1000)
    seen = []
    act = agent.act

    def acting(observation):
        seen.append((observation[:, 1].copy(), agent.population.members.copy()))
        return act(observation)

    object.__setattr__(agent, "act", acting)
    agent.fit(make_env(3), nb_steps=60, seed=1, **QUIET)
    by_episode = {}
    for episodes, members in seen:
        for lane in range(3):
            by_episode.setdefault((lane, episodes[lane]), set()).add(members[lane].tobytes())
    assert all(len(kept) == 1 for kept in by_episode.values())
    assert len(set().union(*by_episode.values())) == len(by_episode) > 10


def test_a_lost_worker_scores_nothing(tmp_path):
    class DiesOnce(Counting):
        def step(self, action):
            if self.number == 1 and self.total == 1 and not (tmp_path / "died").exists():
                (tmp_path / "died").touch()
                os._exit(1)
            return super().step(action)

    agent = make_agent(train_interval=1000)
    makers = [lambda i=i: DiesOnce(i) for i in range(2)]
    with SubprocVecEnv(makers, workers=2, on_worker_failure="restart") as env, pytest.warns(RuntimeWarning):
        agent.fit(env, nb_steps=40, seed=1, **QUIET)
    assert (tmp_path / "died").exists()
    scores = [score for score, _ in agent.population.scored]
    assert len(scores) >= 6
    assert set(scores) <= {6.0, 15.0, 10.0}  # of whole episodes, of 3, 5 and 4 steps


# ---- files, refusals -----------------------------------------------------------------------------------------------


def test_saved_and_loaded(tmp_path):
    agent = make_agent(noise_ampl=0.5)
    agent.fit(make_env(3), nb_steps=300, seed=1, **QUIET)
    agent.save(tmp_path / "agent.keras")
    loaded = keras.saving.load_model(tmp_path / "agent.keras")
    np.testing.assert_array_equal(loaded.theta, agent.theta)
    states = np.random.default_rng(0).normal(size=(4, 1, 3)).astype("float32")
    np.testing.assert_array_equal(agent.evaluate(states), loaded.evaluate(states))
    assert (loaded.step, loaded.noise_ampl, loaded.train_interval) == (300, 0.5, 10)
    loaded.fit(make_env(3), nb_steps=30, **QUIET)
    agent.save_weights(tmp_path / "w.h5f")
    other = make_agent(network(seed=9))
    other.load_weights(tmp_path / "w.h5f")
    np.testing.assert_array_equal(other.theta[0], agent.theta[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nb_actions": 2}, r"output has shape \(None, 3\), expected \(None, 2\)"),
        ({"memory": SequentialMemory(10)}, "memory must be an rl.memory.EpisodeParameterMemory"),
        ({"elite_frac": 0.05}, "elite_frac must be such that the elite has 2 to train_interval=10 of batch_size=10"),
        ({"batch_size": 100, "elite_frac": 0.5}, "the elite has 2 to train_interval=10 of batch_size=100 members"),
        ({"elite_frac": 0}, "elite_frac must be above 0 and at most 1"),
        ({"train_interval": 1}, "train_interval must be a whole number of at least 2"),
        ({"memory_interval": 2}, "memory_interval must be 1: every step counts"),
        ({"noise_ampl": -1}, "noise_ampl must be at least 0"),
        ({"theta_init": np.zeros((2, 3))}, r"theta_init must be \(2, 12\): mu and sigma .* got \(2, 3\)"),
    ],
)
def test_bad_arguments(options, message):
    defaults = {"nb_actions": 3, "batch_size": 10, "train_interval": 10, "elite_frac": 0.2}
    with pytest.raises(ValueError, match=message):
        CEMAgent(network(), **(defaults | options))


def test_an_env_that_does_not_fit_and_arguments_of_compile():
    with pytest.raises(ValueError, match="CEMAgent chooses one of nb_actions discrete actions"):
        make_agent(network(3)).fit(gym.make("Pendulum-v1"), nb_steps=10, **QUIET)
    with pytest.raises(ValueError, match="has shape"):
        make_agent(network(4)).fit(make_env(), nb_steps=10, **QUIET)
    with pytest.raises(RuntimeError, match="before compile"):
        CEMAgent(network(), 3).fit(make_env(), nb_steps=10, **QUIET)


def test_cartpole_is_learnt():
    keras.utils.set_random_seed(1)
    agent = CEMAgent(
        network(4, 2), 2, memory=EpisodeParameterMemory(100), elite_frac=0.2, noise_ampl=0.5, noise_decay_const=5e-5
    )
    agent.compile(jit_compile=False)
    agent.fit(DummyVecEnv([lambda: gym.make("CartPole-v1")] * 8), nb_steps=60_000, seed=1, **QUIET)
    history = agent.test(gym.make("CartPole-v1"), nb_episodes=10, seed=9, **QUIET).history["episode_reward"]
    assert np.mean(history) >= 400
