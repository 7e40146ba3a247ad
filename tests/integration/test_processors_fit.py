"""Processors while an agent trains: on one env and on three lanes, in `test`, and in a saved agent."""

import gymnasium as gym
import keras
import numpy as np
import pytest
from gymnasium import spaces
from keras import layers

from rl.agents import DQNAgent, SARSAAgent
from rl.common.vec_env import DummyVecEnv
from rl.memory import SequentialMemory
from rl.policy import BoltzmannGumbelQPolicy, LinearAnnealedPolicy
from rl.processors import MultiInputProcessor, WhiteningNormalizerProcessor
from tests.toy_envs import Counting


def mlp(*shape, seed=0):
    start = keras.initializers.GlorotUniform(seed=seed)
    return keras.Sequential([keras.Input(shape), layers.Flatten(), layers.Dense(3, kernel_initializer=start)])


def dqn(model=None, window=1, nb_steps_warmup=8, **options):
    memory = SequentialMemory(200, window_length=window)
    options = {"batch_size": 8, "target_model_update": 0.1, "nb_steps_warmup": nb_steps_warmup} | options
    agent = DQNAgent(mlp(window, 3) if model is None else model, nb_actions=3, memory=memory, **options)
    agent.compile("adam", jit_compile=False)
    return agent


def env_of(lanes, make=Counting):
    """One env, or several as a vector env: lane i is `make(i)`."""
    return make(0) if lanes == 1 else DummyVecEnv([lambda i=i: make(i) for i in range(lanes)])


# ---- observations of several parts ---------------------------------------------------------------------------------


class TwoParts(gym.Env):
    """A position and its double, as a dict with the keys in any order, a tuple, or rows of one array."""

    action_space = spaces.Discrete(3)

    def __init__(self, kind):
        box = spaces.Box(-1e3, 1e3, (2,), np.float32)
        self.kind = kind
        if kind in ("near far", "far near"):
            self.observation_space = spaces.Dict(near=box, far=box)
        else:
            wide = spaces.Box(-1e3, 1e3, (2, 2), np.float32)
            self.observation_space = spaces.Tuple((box, box)) if kind == "tuple" else wide

    def observation(self):
        parts = {name: np.array([self.t, k * self.t], np.float32) for k, name in enumerate(("near", "far"), 1)}
        if self.kind == "tuple":
            return tuple(parts.values())
        return np.stack(list(parts.values())) if self.kind == "array" else {k: parts[k] for k in self.kind.split()}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.observation(), {}

    def step(self, action):
        self.t += 1
        return self.observation(), float(action), self.t == 4, False, {}


def two_inputs(window):
    inputs = [keras.Input((window, 2), name=name) for name in ("near", "far")]
    flat = [layers.Flatten()(x) for x in inputs]
    start = keras.initializers.GlorotUniform(seed=3)
    return keras.Model(inputs, layers.Dense(3, kernel_initializer=start)(layers.Concatenate()(flat)))


@pytest.mark.parametrize("lanes", [1, 3])
def test_several_inputs_get_the_same_parts_however_an_observation_holds_them(lanes):
    results = []
    for kind in ("near far", "far near", "tuple", "array"):
        agent = dqn(two_inputs(2), window=2, processor=MultiInputProcessor(2))
        env = env_of(lanes, lambda i, kind=kind: TwoParts(kind))
        agent.fit(env, nb_steps=24, seed=1, verbose=0)
        agent.test(env, nb_episodes=2, visualize=False, verbose=0)
        assert agent.run_state.nb_updates == 16
        results.append(agent.get_weights())
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-6)


def test_another_number_of_parts_is_an_error_before_training():
    with pytest.raises(ValueError, match=r"nb_inputs=3\) got observations of 2"):
        dqn(two_inputs(1), processor=MultiInputProcessor(3)).fit(TwoParts("tuple"), nb_steps=10, verbose=0)


# ---- whitening -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [dqn, lambda **o: SARSAAgent(mlp(1, 3), nb_actions=3, **o)])
@pytest.mark.parametrize("lanes", [1, 3])
def test_each_env_step_is_counted_once(lanes, make):
    processor = WhiteningNormalizerProcessor()
    agent = make(processor=processor, nb_steps_warmup=10_000)
    agent.compile("adam", jit_compile=False)
    agent.fit(env_of(lanes), nb_steps=30, verbose=0)
    state = processor.normalizer.get_state()
    assert state["count"] == 30  # the states that were acted on, not what an episode ended with
    # Every lane's own observations: their first number is the lane.
    np.testing.assert_allclose(state["mean"][0, 0], (lanes - 1) / 2, atol=1e-6)
    agent.fit(env_of(lanes), nb_steps=30, verbose=0)
    assert processor.normalizer.get_state()["count"] == 60


@pytest.mark.parametrize("lanes", [1, 3])
def test_a_test_normalises_and_counts_nothing(lanes):
    processor = WhiteningNormalizerProcessor()
    agent = dqn(processor=processor)
    agent.fit(env_of(lanes), nb_steps=24, verbose=0)
    before = processor.normalizer.get_state()
    agent.test(env_of(lanes), nb_episodes=4, visualize=False, verbose=0)
    after = processor.normalizer.get_state()
    # Each env step once, and two batches per gradient step; the last steps ended episodes, or their successors counted.
    assert before["count"] == after["count"] == 24 + 16 * 2 * 8
    np.testing.assert_array_equal(before["mean"], after["mean"])
    assert processor.training
    states = np.random.default_rng(0).normal(size=(5, 1, 3)).astype("f4")
    processor.training = False
    expected = agent.model(processor.normalizer.normalize(states))
    np.testing.assert_allclose(agent.compute_batch_q_values(states), expected, atol=1e-6)


def test_a_test_of_an_agent_that_never_trained_leaves_no_statistics():
    agent = dqn(processor=WhiteningNormalizerProcessor())
    agent.test(Counting(), nb_episodes=1, visualize=False, verbose=0)
    assert agent.processor.normalizer.get_state()["count"] == 0


# ---- a saved agent -------------------------------------------------------------------------------------------------


def test_a_saved_agent_keeps_the_statistics_of_its_processor(tmp_path):
    agent = dqn(processor=WhiteningNormalizerProcessor())
    agent.save(tmp_path / "fresh.keras")
    assert keras.saving.load_model(tmp_path / "fresh.keras").processor.normalizer is None
    agent.fit(Counting(), nb_steps=24, verbose=0)
    agent.save(tmp_path / "agent.keras")
    loaded = keras.saving.load_model(tmp_path / "agent.keras")
    states = np.random.default_rng(0).normal(size=(5, 1, 3)).astype("f4")
    agent.processor.training = loaded.processor.training = False
    np.testing.assert_array_equal(loaded.compute_batch_q_values(states), agent.compute_batch_q_values(states))
    loaded.processor.training = True
    count = agent.processor.normalizer.get_state()["count"]
    loaded.fit(Counting(), nb_steps=4, verbose=0)
    assert loaded.processor.normalizer.get_state()["count"] > count
    loaded.save(tmp_path / "again.keras")
    again = keras.saving.load_model(tmp_path / "again.keras")
    again.save(tmp_path / "again.keras")  # what waits for its first batch is kept, too
    again = keras.saving.load_model(tmp_path / "again.keras")
    again.processor.training = loaded.processor.training = False
    np.testing.assert_array_equal(again.compute_batch_q_values(states), loaded.compute_batch_q_values(states))


def test_a_saved_agent_goes_on_with_the_same_draws_and_counts(tmp_path):
    def trained():
        policy = LinearAnnealedPolicy(BoltzmannGumbelQPolicy(), "C", 1.0, 0.1, 0.05, 100)
        agent = dqn(policy=policy, nb_steps_warmup=10_000)
        agent.fit(Counting(), nb_steps=40, seed=3, verbose=0)
        return agent

    agent = trained()
    agent.save(tmp_path / "agent.keras")
    loaded, counts = keras.saving.load_model(tmp_path / "agent.keras"), agent.policy.inner_policy.action_counts
    np.testing.assert_array_equal(loaded.policy.inner_policy.action_counts, counts)
    assert loaded.policy.get_current_value() == agent.policy.get_current_value() == 0.05

    def actions(agent):
        env, taken = Counting(), []
        env.step = lambda action, step=env.step: (taken.append(action), step(action))[1]
        agent.fit(env, nb_steps=20, verbose=0)
        return taken

    assert actions(loaded) == actions(agent)  # the file was written without a draw being spent
    same = trained()
    assert actions(same) == actions(keras.saving.load_model(tmp_path / "agent.keras"))
