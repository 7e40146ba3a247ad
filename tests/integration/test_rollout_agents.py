"""Agents that learn from rollouts: files, action spaces, processors, callbacks, interruptions, precision, devices."""

import os
import pathlib
import signal
import subprocess
import sys

import keras
import numpy as np
import pytest
from gymnasium import spaces

from rl.agents.a2c import A2CAgent
from rl.agents.ppo import PPOAgent
from rl.callbacks import Callback, ModelIntervalCheckpoint
from rl.common.vec_env import DummyVecEnv
from rl.core import Processor
from rl.util import LinearSchedule
from tests.agents.test_rollout import Any, assert_same, differ, make_agent, make_env, network, state_of, watched
from tests.backends import TWO_CPUS
from tests.toy_envs import Counting

ROOT = pathlib.Path(__file__).parents[2]


# ---- files ----------------------------------------------------------------------------------------------------------

SPACES = [
    (spaces.Discrete(3, start=-1), 3),
    (spaces.MultiDiscrete([2, 3, 4]), 9),
    (spaces.MultiDiscrete(np.array([[2, 3], [4, 2]]), start=np.array([[1, 0], [0, 2]])), 11),
    (spaces.MultiBinary(3), 3),
    (spaces.MultiBinary((2, 2)), 4),
    (spaces.Box(-np.inf, np.inf, (2,), np.float32), 2),
    (spaces.Box(np.array([[-1, 0], [0, -2]], np.float32), np.array([[1, np.inf], [2, 3]], np.float32)), 4),
    (spaces.Box(-2, 2, (3,), np.float64), 6),  # means and log standard deviations
]


@pytest.mark.parametrize(("space", "nb_outputs"), SPACES, ids=[str(space) for space, _ in SPACES])
def test_every_action_space_trains_and_survives_saving(tmp_path, space, nb_outputs):
    agent = make_agent(action_space=space, nb_outputs=nb_outputs)
    env = Any(space)
    before = agent.get_weights()
    agent.fit(env, nb_steps=24, verbose=0, seed=0)  # the env checks each action
    assert len(env.actions) == 24
    assert differ(before, agent.get_weights())
    copy = PPOAgent.from_config(agent.get_config())
    assert copy.action_space == space
    assert type(copy.distribution) is type(agent.distribution)
    agent.save(tmp_path / "agent.keras")
    loaded = keras.models.load_model(tmp_path / "agent.keras")
    assert loaded.action_space == space
    assert loaded.step == 24
    states = np.random.default_rng(0).normal(size=(5, 1, 3)).astype(np.float32)
    for one, other in zip(agent.evaluate(states), loaded.evaluate(states), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)
    played = []
    for a in (agent, loaded):
        env = Any(space)
        a.test(env, nb_episodes=2, verbose=0, visualize=False, seed=3)
        played.append(np.array(env.actions))
    assert len(played[0]) == 10
    np.testing.assert_allclose(played[0], played[1], rtol=1e-6)


@pytest.mark.parametrize("kind", [PPOAgent, A2CAgent])
def test_a_loaded_agent_goes_on_as_if_nothing_had_happened(tmp_path, kind):
    options = {"normalize_observation": True, "normalize_reward": True}
    if kind is PPOAgent:
        options |= {"clip_range": LinearSchedule(0.3, 0.1), "nb_total_steps": 100, "target_kl": 0.5}
    agent = make_agent(kind, **options, compile_options={"metrics": ["mae"]})
    agent.fit(make_env(3), nb_steps=36, verbose=0, seed=1)  # two rollouts
    agent.save(tmp_path / "agent.keras")
    loaded = keras.models.load_model(tmp_path / "agent.keras")
    assert loaded.metrics_names == agent.metrics_names
    assert type(loaded) is kind
    for name in ("nb_rollout_steps", "gamma", "lam", "value_loss_weight", "max_grad_norm", "normalize_advantage"):
        assert getattr(loaded, name) == getattr(agent, name)
    assert_same(agent, loaded)
    for a in (agent, loaded):
        a.fit(make_env(3), nb_steps=36, verbose=0, seed=2)
    assert loaded.step == agent.step == 72
    assert loaded.run_state.nb_updates == agent.run_state.nb_updates
    assert_same(agent, loaded, 1e-6)


def test_weights_files_hold_the_statistics_and_the_log_standard_deviation(tmp_path):
    box = spaces.Box(-1, 1, (2,))
    options = {"nb_outputs": 2, "action_space": box, "normalize_observation": True, "normalize_reward": True}
    agent, other = make_agent(**options), make_agent(**options, networks=(network(2, 5), network(1, 6)))
    agent.fit(Any(box), nb_steps=30, verbose=0)
    assert differ(agent.get_weights(), other.get_weights())
    agent.save_weights(tmp_path / "agent.weights.h5")
    other.load_weights(tmp_path / "agent.weights.h5")
    assert not differ(agent.get_weights(), other.get_weights())
    assert float(other.model.normalizers[0].count) == float(other.model.returns.count) == 30
    assert np.any(other.model.log_std.numpy() != 0)
    states = np.ones((2, 1, 3), np.float32)
    np.testing.assert_array_equal(agent.evaluate(states)[0], other.evaluate(states)[0])


def test_what_a_file_cannot_hold_is_named(tmp_path):
    agent = make_agent(clip_range=lambda progress: 0.2 - 0.1 * progress, nb_total_steps=100)
    agent.fit(make_env(), nb_steps=12, verbose=0)
    with pytest.raises(ValueError, match="lambda .*LinearSchedule"):
        agent.save(tmp_path / "agent.keras")
    agent.save_weights(tmp_path / "agent.weights.h5")  # weights can be kept all the same


# ---- processors, repetition, old envs -------------------------------------------------------------------------------


class Halving(Processor):
    """Halves observations and rewards, and turns frames into features of the network."""

    def process_observation(self, observation):
        return observation / 2

    def process_reward(self, reward):
        return -reward

    def process_state_batch(self, batch):
        assert batch.ndim == 3 and batch.shape[1] == 1
        return batch[:, 0, 1:] * 10.0

    def process_action(self, action):
        return 2 - action


def test_a_processor_is_in_the_way_of_everything():
    class Noting(Counting):
        def step(self, action):
            taken.append(int(action))
            return super().step(action)

    taken = []
    agent = make_agent(networks=(network(3, 1, (2,)), network(1, 2, (2,))), processor=Halving())
    rollouts, _ = watched(agent)
    agent.fit(Noting(lengths=(4,)), nb_steps=12, verbose=0)
    for rollout in rollouts:
        np.testing.assert_array_equal(rollout[2], -2 * rollout[3][:, :, 0, 2])
    assert rollouts[0][0][:4, 0, 0, 2].tolist() == [0, 0.5, 1, 1.5]
    assert taken == [2 - a for r in rollouts for a in r[1][:, 0].tolist()]
    states = np.ones((2, 1, 3), np.float32)
    expected = agent.actor(10.0 * np.ones((2, 2), np.float32))
    np.testing.assert_allclose(agent.evaluate(states)[0], expected, rtol=1e-6)
    agent.test(Counting(), nb_episodes=1, verbose=0, visualize=False)


def test_repeated_actions_are_one_step_with_the_sum_of_rewards():
    agent, env = make_agent(), Counting(lengths=(5,))
    rollouts, _ = watched(agent)
    agent.fit(env, nb_steps=6, action_repetition=2, verbose=0)
    assert agent.step == 6
    assert rollouts[0][2][:, 0].tolist() == [3, 7, 5, 3, 7, 5]
    assert rollouts[0][0][:, 0, 0, 2].tolist() == [0, 2, 4, 0, 2, 4]
    assert rollouts[0][4][:, 0].tolist() == [False, False, True] * 2


@pytest.mark.parametrize("lanes", [1, 3])
def test_start_steps_and_episode_limits(lanes):
    agent, env = make_agent(), make_env(lanes, "NextStep", lengths=(9,))
    rollouts, _ = watched(agent)
    agent.fit(env, nb_steps=120, nb_max_start_steps=4, nb_max_episode_steps=3, verbose=0, seed=1)
    assert 120 <= agent.step < 123
    for rollout in rollouts:
        state0, _, reward, state1, terminated, ended, valid = rollout
        np.testing.assert_array_equal(state1[valid][:, 0, 2], state0[valid][:, 0, 2] + 1)
        np.testing.assert_array_equal(reward[valid], state1[valid][:, 0, 2])
        assert not terminated.any() and ended.any()
    assert np.isfinite(agent.get_weights()[0]).all()


class Old:
    """The four-value API, no spaces."""

    def __init__(self):
        self.actions = []

    def reset(self):
        self.t = 0
        return np.zeros(3)

    def step(self, action):
        self.t += 1
        self.actions.append(action)
        return np.full(3, self.t / 5.0), 1.0, self.t == 5, {}


def test_an_old_env_without_spaces():
    agent, env = make_agent(), Old()
    rollouts, _ = watched(agent)
    history = agent.fit(env, nb_steps=30, verbose=0).history
    assert history["episode_reward"] == [5.0] * 6
    assert {*env.actions} <= {0, 1, 2} and all(type(a) is int for a in env.actions)
    assert rollouts[0][0].dtype == np.float32
    assert agent.test(Old(), nb_episodes=1, verbose=0, visualize=False).history["episode_reward"] == [5.0]


@pytest.mark.parametrize("lanes", [1, 3])
def test_boxes_reach_the_env_clipped_and_are_learnt_from_as_drawn(lanes):
    box = spaces.Box(np.array([-0.1, -np.inf, 0.5], np.float32), np.array([0.1, 0.2, np.inf], np.float32))
    envs = [Any(box) for _ in range(lanes)]
    env = envs[0] if lanes == 1 else DummyVecEnv([lambda e=e: e for e in envs])
    agent = make_agent(nb_outputs=3, action_space=box, initial_log_std=0.5)
    rollouts, _ = watched(agent)
    agent.fit(env, nb_steps=36, verbose=0, seed=0)
    drawn = np.concatenate([r[1] for r in rollouts])
    assert drawn.dtype == np.float32 and drawn.shape == (36 // lanes, lanes, 3)
    assert np.abs(drawn).max() > 1 and len(np.unique(drawn)) == drawn.size
    for lane, single in enumerate(envs):
        sent = np.array(single.actions)
        np.testing.assert_array_equal(sent, np.clip(drawn[:, lane], box.low, box.high))
        assert set(np.abs(sent[:, 0])) & {np.float32(0.1)}


# ---- callbacks ------------------------------------------------------------------------------------------------------


def test_callbacks_that_save_stop_and_test(tmp_path):
    class Testing(Callback):
        def on_episode_end(self, episode, logs=None):
            before = state_of(agent), agent.dice.get_random_state(), agent.storage.count
            agent.test(other, nb_episodes=2, verbose=0, visualize=False)
            assert not differ(before[0], state_of(agent))
            assert before[1:] == (agent.dice.get_random_state(), agent.storage.count)

    other = make_env(2)
    plain, agent = make_agent(), make_agent()
    plain.fit(make_env(3), nb_steps=90, verbose=0, seed=1)
    checkpoint = ModelIntervalCheckpoint(tmp_path / "at_{step}.weights.h5", interval=30)
    agent.fit(make_env(3), nb_steps=90, verbose=0, seed=1, callbacks=[checkpoint, Testing()])
    assert_same(plain, agent)
    assert len(list(tmp_path.iterdir())) == 3
    fresh = make_agent(networks=(network(3, 7), network(1, 8)))
    fresh.load_weights(sorted(tmp_path.iterdir())[-1])
    np.testing.assert_array_equal(fresh.get_weights()[0], agent.get_weights()[0])


def test_early_stopping_with_patience_restores_the_best_weights():
    kept = []
    agent = make_agent(normalize_observation=True)
    keep = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: kept.append((logs["episode_reward"], agent.get_weights()))
    )
    stopping = keras.callbacks.EarlyStopping("episode_reward", mode="max", patience=5, restore_best_weights=True)
    env = Counting(lengths=(3, 4, 7, 5, 5, 6, 5, 5, 5))
    returns = agent.fit(env, nb_steps=500, verbose=0, callbacks=[keep, stopping]).history["episode_reward"]
    assert len(returns) == 8 and int(np.argmax(returns)) == 2
    assert not differ(agent.get_weights(), kept[2][1])
    assert agent.step < 500


# ---- interruptions --------------------------------------------------------------------------------------------------


class Trouble(Counting):
    """Something happens once, in the step of a given number."""

    def __init__(self, at, trouble, **options):
        super().__init__(**options)
        self.at, self.trouble = at, trouble

    def step(self, action):
        result = super().step(action)
        if self.total == self.at:
            result = self.trouble(result) or result
        return result


def press_twice(result):
    signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGINT)


def fail(result):
    raise ArithmeticError("the env fails")


@pytest.mark.parametrize("at", [14, 18])  # within a rollout, in its last step
@pytest.mark.parametrize(
    ("trouble", "error"),
    [
        (lambda result: signal.raise_signal(signal.SIGINT), None),
        (press_twice, None),
        (fail, ArithmeticError),
        (lambda result: (result[0], 1e30, *result[2:]), FloatingPointError),
        (lambda result: (result[0] * np.nan, *result[1:]), ValueError),
        (lambda result: (result[0], np.inf, *result[2:]), ValueError),
    ],
    ids=["ctrl-c", "ctrl-c twice", "exception", "infinite loss", "nan observation", "infinite reward"],
)
def test_an_interruption_leaves_an_agent_that_learns_on(trouble, error, at):
    agent, env = make_agent(), Trouble(at, trouble, lengths=(50,))
    before = agent.get_weights()
    if error is None:
        agent.fit(env, nb_steps=100, verbose=0)
    else:
        with pytest.raises(error):
            agent.fit(env, nb_steps=100, verbose=0)
    done = agent.step
    assert done in (at - 1, at, 18)
    assert not agent.training
    good = agent.get_weights()
    assert differ(before, good) and all(np.isfinite(w).all() for w in good)
    rollouts, _ = watched(agent)
    agent.fit(env, nb_steps=30, verbose=0)
    assert agent.step == done + 30
    assert len(rollouts) >= 4 and differ(good, agent.get_weights())
    assert all(np.isfinite(w).all() for w in agent.get_weights())
    # Two episodes in one rollout are kept apart.
    for rollout in rollouts:
        begins = rollout[0][1:, 0, 0, 2] == 0
        assert rollout[5][:-1, 0][begins].all()


def test_an_error_amid_learning_leaves_no_rollout_behind():
    class Sour(Processor):
        def process_state_batch(self, batch):
            if len(batch) == 6 and agent.step == 12:
                raise ArithmeticError("cannot process this")
            return batch

    agent, env = make_agent(processor=Sour()), make_env()
    with pytest.raises(ArithmeticError):
        agent.fit(env, nb_steps=30, verbose=0)
    updates = agent.run_state.nb_updates
    agent.fit(env, nb_steps=30, verbose=0)
    assert agent.step == 42
    assert agent.run_state.nb_updates == updates + 5 * 2


# ---- precision and devices ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("kind", [PPOAgent, A2CAgent])
def test_mixed_precision(kind, policy):
    keras.mixed_precision.set_global_policy(policy)
    box = spaces.Box(-1, 1, (2,))
    options = {"normalize_observation": True, "normalize_reward": True}
    agent = make_agent(kind, nb_outputs=2, action_space=box, **options, compile_options={"metrics": ["mae"]})
    assert agent.actor.layers[1].compute_dtype == policy.removeprefix("mixed_")
    assert isinstance(agent.optimizer, keras.optimizers.LossScaleOptimizer) == (policy == "mixed_float16")
    assert {v.dtype for v in agent.model.variables} == {"float32"}
    before = agent.get_weights()
    history = agent.fit(DummyVecEnv([lambda: Any(box)] * 4), nb_steps=480, verbose=0, seed=1).history
    assert np.isfinite(history["mae"][-1])
    after = agent.get_weights()
    assert all(np.isfinite(w).all() for w in after)
    assert all(not np.array_equal(a, b) for a, b in zip(before, after, strict=True))
    outputs, value = agent.evaluate(np.zeros((2, 1, 3), np.float32))
    assert outputs.dtype == value.dtype == np.float32
    assert outputs.shape == (2, 4) and value.shape == (2,)
    assert float(agent.model.normalizers[0].count) == 480
    agent.test(Any(box), nb_episodes=1, verbose=0, visualize=False)


DEVICES = """
import sys, warnings
import gymnasium as gym, keras, numpy as np
from rl.agents.ppo import PPOAgent
from rl.common.vec_env import DummyVecEnv
from rl.networks import actor_critic

warnings.simplefilter("error", RuntimeWarning)  # XLA must not refuse
env = DummyVecEnv([lambda: gym.make("Pendulum-v1")] * 2)


for jit in (False, True):
    with keras.device("cpu:1"):
        actor, critic = actor_critic(env, hidden=(4,))
        agent = PPOAgent(actor, critic, env.action_space, nb_rollout_steps=8, batch_size=8, nb_epochs=2,
                         normalize_observation=True, normalize_reward=True, target_kl=0.05)
    agent.compile("adam", metrics=["mae"], jit_compile=jit)  # outside of the scope
    everything = [*agent.variables, *agent.optimizer.variables]
    everything += [v for m in agent._compiled_metrics for v in m.variables]
    assert place(everything) == {"CPU:1"}, [(v.path, place([v])) for v in everything]
    before = agent.get_weights()
    agent.fit(env, nb_steps=64, verbose=0)
    agent.test(gym.make("Pendulum-v1"), nb_episodes=1, nb_max_episode_steps=5, verbose=0, visualize=False)
    assert place(everything) == {"CPU:1"}
    assert all(not np.array_equal(a, b) for a, b in zip(before, agent.get_weights()))
agent.save(sys.argv[1])
loaded = keras.models.load_model(sys.argv[1])
assert place([*loaded.variables, *loaded.optimizer.variables]) == {"CPU:0"}
loaded.fit(env, nb_steps=32, verbose=0)
print("all well")
"""


def test_an_agent_lives_on_the_device_it_was_built_on(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", TWO_CPUS + DEVICES, str(tmp_path / "agent.keras")],
        cwd=ROOT,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "all well" in done.stdout
