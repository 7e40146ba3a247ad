"""`ContinuousActions`: noise per lane, the env's bounds, what is stored is what was executed, by DDPG."""

import gymnasium as gym
import keras
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from keras import layers

from rl.agents import DDPGAgent
from rl.agents.continuous import ActionBounds
from rl.common.vec_env import DummyVecEnv
from rl.memory import SequentialMemory
from rl.random import GaussianWhiteNoiseProcess, OrnsteinUhlenbeckProcess, RandomProcess
from tests.toy_envs import Drift

LOW, HIGH = np.array([-2, 0, 1], "f4"), np.array([2, 1, 5], "f4")
BOX = spaces.Box(LOW, HIGH)
UNBOUNDED = spaces.Box(-np.inf, np.inf, (3,), np.float32)


def make_agent(nb_actions=3, kernel="glorot_uniform", **options):
    observation, action = keras.Input((1, 3)), keras.Input((nb_actions,))
    flat = layers.Flatten()(observation)
    actor = keras.Model(observation, layers.Dense(nb_actions, "tanh", kernel_initializer=kernel)(flat))
    critic = keras.Model([action, observation], layers.Dense(1)(layers.Concatenate()([action, flat])))
    options = {"nb_steps_warmup_critic": 10**6, "nb_steps_warmup_actor": 10**6, "batch_size": 4} | options
    agent = DDPGAgent(nb_actions, actor, critic, action, SequentialMemory(1000), **options)
    agent.compile(jit_compile=False)
    return agent


def noise(sigma=1.0, **options):
    return GaussianWhiteNoiseProcess(sigma=sigma, size=3, **options)


def fit(agent, env, nb_steps=30, **options):
    return agent.fit(env, nb_steps=nb_steps, verbose=0, **options)


def executed(envs):
    return np.array([action for env in envs for action in env.actions])


class Noting(RandomProcess):
    """Noise that is the number of the lane's step in its episode, and notes which lanes begin anew."""

    def __init__(self):
        self.steps, self.resets = None, []

    def sample(self, nb_lanes=None):
        if self.steps is None or len(self.steps) != nb_lanes:
            self.steps = np.zeros(nb_lanes, int)
        self.steps += 1
        return np.repeat(self.steps[:, None] / 10, 3, axis=1)

    def reset_states(self, lanes=None):
        self.resets.append(None if lanes is None else np.array(lanes))
        if self.steps is not None:
            self.steps[slice(None) if lanes is None else lanes] = 0


# ---- bounds ----------------------------------------------------------------------------------------------------------


def test_actions_in_the_envs_units_are_clipped_component_by_component():
    bounds = ActionBounds(BOX, scaled=False)
    given = np.array([[-3, -3, -3], [0.5, 0.5, 0.5], [9, 9, 9]])
    np.testing.assert_array_equal(bounds.executed(given), [LOW, [0.5, 0.5, 1], HIGH])
    assert bounds.executed(given).dtype == np.float32


def test_scaled_actions_are_mapped_to_asymmetric_bounds_and_back():
    bounds = ActionBounds(BOX, scaled=True)
    given = np.array([[-1, -1, -1], [0, 0, 0], [1, 1, 1], [-7, 0.5, 7]])
    np.testing.assert_array_equal(bounds.executed(given), [LOW, [0, 0.5, 3], HIGH, [-2, 0.75, 5]])
    np.testing.assert_allclose(bounds.stored(bounds.executed(given)), np.clip(given, -1, 1), atol=1e-6)
    inner = np.random.default_rng(0).uniform(-1, 1, (1000, 3))
    assert np.abs(bounds.stored(bounds.executed(inner)) - inner).max() < 1e-6
    assert np.abs(bounds.stored(bounds.executed(inner))).max() <= 1


def test_a_component_that_cannot_move_stays_where_it_is():
    bounds = ActionBounds(spaces.Box(np.array([1, -1], "f4"), np.array([1, 1], "f4")), scaled=True)
    np.testing.assert_array_equal(bounds.executed(np.array([[0.3, 0.5]])), np.array([[1, 0.5]], "f4"))
    assert np.isfinite(bounds.stored(np.array([[1, 0.5]], "f4"))).all()


@pytest.mark.parametrize("scale", [False, True])
@pytest.mark.parametrize("nb_lanes", [1, 3])
def test_the_stored_action_is_the_executed_one(nb_lanes, scale):
    envs = [Drift(BOX) for _ in range(nb_lanes)]
    agent = make_agent(random_process=noise(sigma=4.0), scale_actions=scale)
    fit(agent, DummyVecEnv([lambda i=i: envs[i] for i in range(nb_lanes)]), 60)
    done = executed(envs)
    assert len(done) == 60 and np.all(done >= LOW) and np.all(done <= HIGH)
    assert np.any(done == LOW, axis=0).all() and np.any(done == HIGH, axis=0).all()  # the noise is that large
    stored = np.array(agent.memory.actions[:])
    assert stored.dtype == np.float32
    if scale:
        assert np.abs(stored).max() == 1
        stored = LOW + (stored + 1) / 2 * (HIGH - LOW)
    np.testing.assert_allclose(np.sort(stored, axis=0), np.sort(done, axis=0), atol=1e-6)


def test_actions_of_several_axes_are_flat_for_the_agent():
    env = Drift(spaces.Box(-1, 1, (3, 1), np.float32))
    fit(make_agent(random_process=noise()), env)
    assert np.shape(env.actions) == (30, 3, 1)


def test_unbounded_actions_are_executed_as_they_are():
    env = Drift(UNBOUNDED)
    agent = make_agent(random_process=noise(sigma=100.0))
    fit(agent, env)
    assert np.abs(env.actions).max() > 10
    np.testing.assert_array_equal(np.sort(agent.memory.actions[:], axis=0), np.sort(env.actions, axis=0))


def test_a_test_on_an_env_of_other_bounds_leaves_those_of_the_training():
    train, test = Drift(BOX), Drift(spaces.Box(10, 11, (3,), np.float32))
    agent = make_agent(random_process=noise())
    fit(agent, train)
    agent.test(test, 2, visualize=False, verbose=0)
    assert np.all(executed([test]) == 10)
    fit(agent, train)
    assert len(train.actions) == 60 and executed([train]).max() <= 5

    class Testing(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            agent.test(Drift(test.action_space), 1, visualize=False, verbose=0)

    fit(agent, train, callbacks=[Testing()])
    assert executed([train]).max() <= 5


# ---- noise -----------------------------------------------------------------------------------------------------------


def test_test_acts_without_noise_and_changes_none():
    env = Drift(BOX)
    agent = make_agent(random_process=OrnsteinUhlenbeckProcess(theta=0.15, size=3, dt=1.0), kernel="zeros")
    fit(agent, env)
    before = agent.random_process.get_state()
    agent.test(test := Drift(BOX), 2, visualize=False, verbose=0)
    assert np.all(executed([test]) == [0, 0, 1])  # tanh(0), clipped
    assert agent.random_process.get_state() == before


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_noise_begins_anew_with_each_lanes_episode_and_its_schedule_counts_real_steps(mode):
    envs = [Drift(UNBOUNDED) for _ in range(3)]
    process = Noting()
    process.n_steps = 0
    agent = make_agent(random_process=process, kernel="zeros")
    fit(agent, SyncVectorEnv([lambda i=i: envs[i] for i in range(3)], autoreset_mode=mode), 90, seed=3)
    for env in envs:  # a step's noise is its number, so that each episode counts from 1
        numbers = np.round(10 * executed([env])[:, 0]).astype(int)
        starts = np.flatnonzero(numbers == 1)
        assert len(starts) > 2
        for first, last in zip(starts, [*starts[1:], len(numbers)], strict=True):
            np.testing.assert_array_equal(numbers[first:last], np.arange(1, last - first + 1))
    lanes = [x for x in process.resets if x is not None]
    assert any(0 < np.count_nonzero(x) < 3 for x in lanes)  # single lanes began anew, not all of them


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_the_noises_schedule_counts_real_steps(mode):
    agent = make_agent(random_process=noise(sigma_min=0.1, n_steps_annealing=1000))
    env = SyncVectorEnv([lambda: Drift(BOX)] * 3, autoreset_mode=mode)
    fit(agent, env, 90)
    assert agent.random_process.n_steps == agent.step >= 90
    fit(agent, env, 30)
    assert agent.random_process.n_steps == agent.step >= 120
    assert agent.random_process.current_sigma == pytest.approx(1 - 0.9 * agent.step / 1000)


def test_a_second_fit_goes_on_with_the_noise_of_the_open_episode():
    class Endless(Drift):
        def step(self, action):
            state, reward, *_ = super().step(action)
            return state, reward, False, False, {}

    env, process = Endless(UNBOUNDED), Noting()
    agent = make_agent(random_process=process, kernel="zeros")
    fit(agent, env, 5)
    fit(agent, env, 5)
    np.testing.assert_array_equal(np.round(10 * executed([env])[:, 0]), np.arange(1, 11))
    fit(agent, env, 5, seed=1)  # new episodes
    np.testing.assert_array_equal(np.round(10 * executed([env])[-5:, 0]), np.arange(1, 6))


def test_a_saved_agent_goes_on_with_the_noises_schedule(tmp_path):
    agent = make_agent(random_process=noise(sigma_min=0.1, n_steps_annealing=100), scale_actions=True)
    fit(agent, Drift(BOX))
    agent.save(tmp_path / "agent.keras")
    loaded = keras.models.load_model(tmp_path / "agent.keras")
    assert loaded.random_process.n_steps == 30
    assert loaded.scale_actions and loaded.random_process.sigma_min == 0.1
    np.testing.assert_array_equal(loaded.random_process.sample(4), agent.random_process.sample(4))


def test_uniform_actions_come_first_within_the_bounds_whatever_the_network_says():
    envs = [Drift(BOX) for _ in range(3)]
    agent = make_agent(nb_steps_random=600, kernel="zeros", scale_actions=True, random_process=noise(sigma=0.0))
    fit(agent, env := DummyVecEnv([lambda i=i: envs[i] for i in range(3)]), 600)
    done = executed(envs)
    assert len(done) == 600
    assert agent.random_process.n_steps == 0
    quarter = (HIGH - LOW) / 4
    for i in range(4):  # 150 are expected in each quarter, 4 standard deviations are 42
        share = np.mean((done >= LOW + i * quarter) & (done < LOW + (i + 1) * quarter), axis=0)
        assert np.all(np.abs(share - 0.25) < 0.07)
    agent.test(test := Drift(BOX), 1, visualize=False, verbose=0)
    np.testing.assert_allclose(executed([test]), np.broadcast_to((LOW + HIGH) / 2, (len(test.actions), 3)))
    fit(agent, env, 30)
    np.testing.assert_allclose(executed([envs[0]])[-10:], np.broadcast_to((LOW + HIGH) / 2, (10, 3)))


# ---- by hand ---------------------------------------------------------------------------------------------------------


def test_one_action_for_one_state():
    agent = make_agent(random_process=noise(sigma=0.01))
    state = np.random.default_rng(0).normal(size=3)
    expected = agent.evaluate(state[None, None].astype("f4"))[0]
    np.testing.assert_array_equal(agent.select_action([state]), expected)
    agent.training = True
    noisy = agent.select_action([state])
    assert noisy.shape == (3,) and noisy.dtype == np.float32
    assert 0 < np.abs(noisy - expected).max() < 0.1


def test_by_hand_scaled_actions_are_mapped_once_the_bounds_are_known():
    agent = make_agent(scale_actions=True)
    agent.training = True
    with pytest.raises(ValueError, match="bounds of the actions are not known"):
        agent.forward(np.zeros(3))
    agent.training = False
    fit(agent, Drift(BOX), 5)
    agent.training = True
    nb_entries, observation = agent.memory.nb_entries, np.ones(3)
    agent.reset_states()
    done = []
    for _ in range(4):
        done.append(agent.forward(observation))
        agent.backward(1.0, False)
    agent.forward(observation)
    assert np.all(np.array(done) >= LOW) and np.all(np.array(done) <= HIGH)
    stored = np.array(agent.memory.actions[:])[nb_entries:][:3]
    np.testing.assert_allclose(LOW + (stored + 1) / 2 * (HIGH - LOW), done[:3], atol=1e-6)


# ---- refusals --------------------------------------------------------------------------------------------------------


class WithoutLanes(RandomProcess):
    def sample(self):
        return np.zeros(3)


@pytest.mark.parametrize(
    ("process", "message"),
    [
        (GaussianWhiteNoiseProcess(size=2), r"shape \(nb_lanes, 3\).*gave shape \(2, 2\).*size=3"),
        (OrnsteinUhlenbeckProcess(theta=0.15), r"gave shape \(2, 1\)"),
        (GaussianWhiteNoiseProcess(mu=[0.0, 0.0], size=3), "ValueError"),
        (WithoutLanes(), r"TypeError.*sample\(nb_lanes=None\)"),
        (GaussianWhiteNoiseProcess, "must be an instance of rl.random.RandomProcess"),
        (0.1, "must be an instance of rl.random.RandomProcess, got 0.1"),
    ],
)
def test_noise_that_does_not_fit_is_refused_at_once(process, message):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        make_agent(random_process=process)


def test_the_check_of_the_noise_draws_nothing_from_it():
    process = noise()
    process.rng = 7
    make_agent(random_process=process)
    np.testing.assert_array_equal(process.sample(2), np.random.default_rng(7).normal(0, 1, (2, 3)))
    assert process.n_steps == 2


@pytest.mark.parametrize(
    ("space", "options", "message"),
    [
        (spaces.Discrete(3), {}, r"one Box of floats.*Discrete\(3\).*DQNAgent"),
        (spaces.Dict(a=BOX), {}, "one Box of floats"),
        (spaces.Box(0, 9, (3,), np.int32), {}, "one Box of floats"),
        (spaces.Box(-1, 1, (2,), np.float32), {}, "nb_actions=3.*2 components.*nb_actions=2"),
        (spaces.Box(-1, 1, (4,), np.float32), {}, "nb_actions=3.*4 components"),
        (UNBOUNDED, {"scale_actions": True}, "scale_actions=True needs.*bounded in every component"),
        (UNBOUNDED, {"nb_steps_random": 10}, "nb_steps_random needs.*bounded in every component"),
        (spaces.Box(np.array([-1, -1, -np.inf], "f4"), 1.0), {"scale_actions": True}, "bounded"),
        (spaces.Box(-3e38, 3e38, (3,), np.float32), {"scale_actions": True}, "bounded"),
        (spaces.Box(-1e300, 1e300, (3,), np.float64), {"scale_actions": True}, "bounded"),
    ],
)
def test_an_env_of_other_actions_is_refused_before_the_first_step(space, options, message):
    env = Drift(space)
    with pytest.raises(ValueError, match=f"(?s){message}"):
        fit(make_agent(**options), env)
    assert not env.actions


def test_an_old_env_without_spaces_is_taken_in_its_own_units_only():
    class Old(gym.Env):
        action_space = observation_space = None

        def reset(self, *, seed=None, options=None):
            return np.zeros(3, "f4"), {}

        def step(self, action):
            return np.zeros(3, "f4"), 0.0, False, False, {}

    fit(make_agent(random_process=noise()), Old())
    with pytest.raises(ValueError, match="scale_actions=True needs"):
        fit(make_agent(scale_actions=True), Old())


def test_a_negative_number_of_uniform_steps_is_refused():
    with pytest.raises(ValueError, match="nb_steps_random must be at least 0, got -1"):
        make_agent(nb_steps_random=-1)
