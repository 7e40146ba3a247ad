"""What users of Keras-style libraries ran into in training, logging and evaluation, each with its test.

Most of these tests stand with what they are about; those that need a whole run stand below.
"""

import json
import re
import sys
import types
from pathlib import Path

import gymnasium as gym
import keras
import numpy as np
import pytest
from gymnasium.wrappers import RecordVideo

from rl.agents import A2CAgent, CEMAgent, DQNAgent, PPOAgent, SARSAAgent
from rl.callbacks import Callback, FileLogger, ModelIntervalCheckpoint
from rl.common.vec_env import DummyVecEnv
from rl.core import Processor
from rl.memory import EpisodeParameterMemory, SequentialMemory
from rl.networks import actor_critic
from rl.policy import EpsGreedyQPolicy, GreedyQPolicy
from tests.index_of_tests import missing
from tests.integration.test_every_agent import each, make_agent, make_env
from tests.toy_envs import Counting

ROOT = Path(__file__).parents[2]
HERE = "integration/test_user_reports.py"
QUIET = {"verbose": 0, "visualize": False}

# what was reported: where it is tested
TRAINING = {
    "values far too small where a time limit cuts episodes": [
        "integration/test_known_values.py: a_time_limit_is_not_a_terminal_state",
        "integration/test_on_policy_known_values.py: a_time_limit_is_not_a_terminal_state_on_one_env",
        "agents/test_sarsa.py: a_time_limit_is_not_the_end",
        "agents/test_naf.py: a_time_limit_is_not_a_terminal_state",
        "agents/test_ddpg.py: a_time_limit_is_not_a_terminal_state",
        f"{HERE}: the_end_of_an_episode_that_terminates_is_one",
    ],
    "the env hands out its own array, and the memory stores it again and again": [
        "test_memory.py: arrays_that_the_environment_reuses_are_copied",
        "test_loop.py: logged_observations_are_not_overwritten_by_later_steps",
        f"{HERE}: an_env_that_hands_out_the_same_array_is_learnt_from",
    ],
    "the test policy is ignored": [f"{HERE}: fit_asks_the_policy_and_test_the_test_policy"],
    "evaluation takes random actions": [
        f"{HERE}: a_test_repeats_itself_and_explores_nothing",
        "agents/test_continuous.py: test_acts_without_noise_and_changes_none",
    ],
    "sampled states mix episodes once the ring is full": [
        "test_memory.py: random_use_leaks_nothing a_million_one_step_episodes_leak_nothing",
    ],
    "n-step returns leak the rewards of the next episode": [
        "agents/test_sarsa.py: pairs_are_those_of_a_naive_list_of_steps",
    ],
    "what target_model_update means": [
        "agents/test_dqn.py: target_model_update_is_positive target_model_update_of_one_copies_each_step",
        "agents/test_replay.py: hard_copies_fall_on_multiples_of_the_interval",
        "agents/test_replay.py: soft_updates_move_the_target_by_tau_after_each_gradient_step",
    ],
    "the target network is maintained and never used": [
        "agents/test_dqn.py: the_target_network_is_used_and_only_it",
        "agents/test_naf.py: the_target_is_the_target_networks_value_alone",
        "agents/test_ddpg.py: whole_updates_equal_a_naive_twin",
    ],
    "counters wrap": [
        "agents/test_dqn.py: counters_do_not_wrap",
        "test_core.py: counters_are_python_integers_that_do_not_wrap the_return_of_a_long_episode_is_exact",
        "test_policy.py: annealing_follows_the_agents_step_in_both_directions",
    ],
    "NaN hours after the cause": [
        "test_core.py: a_nan_reward_is_refused_at_its_step_and_the_agent_goes_on",
        "test_core.py: huge_rewards_stay_finite_with_delta_clip",
        "test_policy.py: boltzmann_is_safe_for_huge_values nan_and_infinite_q_values_are_refused_by_name",
    ],
    "a last batch of one sample is divided by an undefined deviation": [
        "test_ops.py: one_row_is_left_as_it_is",
        "agents/test_ppo.py: sizes_that_do_not_divide_are_told_once",
        f"{HERE}: batches_of_one_row_leave_all_weights_finite",
    ],
    "dropout and batch normalisation": [
        "agents/test_dqn.py: dropout_is_off_in_acting_and_in_the_target_and_on_in_learning",
        "agents/test_dqn.py: batch_normalisation_moves_in_learning_reaches_the_target_and_rests_in_acting",
    ],
    "actions stick to the bounds": [
        "agents/test_naf.py: a_bandits_best_action_is_found_within_its_bounds",
        "agents/test_ddpg.py: a_bandits_best_action_is_found_within_its_bounds a_linear_quadratic_regulator_is_found",
    ],
    "episodes of one step are not learnt": [f"{HERE}: episodes_of_one_step_are_learnt"],
    "the step counter grows by the number of epochs": [
        "agents/test_rollout.py: each_transition_is_learnt_from_and_counted_once_in_every_mode",
    ],
    "a dueling mean over the batch; a target network that is the online one": [
        "agents/test_dqn.py: a_dueling_head_works_row_by_row online_and_target_network_are_two",
    ],
    "an agent of discrete actions in an env of continuous ones": [
        f"{HERE}: a_processor_makes_the_actions_of_a_box_of_indexes",
    ],
    "always the same action, and no diagnosis": [f"{HERE}: actions_and_mean_q_can_be_followed"],
}
LOGGING = {
    "Keras' callbacks fail in ever new ways": [
        "integration/test_callbacks_fit.py: all_callbacks_at_once_twice_and_in_a_test tensorboard_has_the_returns",
        "integration/test_callbacks_fit.py: plateau_lowers_the_learning_rate_of_the_agent checkpoints_can_be_loaded",
    ],
    "early stopping with the best weights": [
        "integration/test_callbacks_fit.py: early_stopping_stops_and_restores_the_weights_of_the_best_episode",
    ],
    "loss and metrics are missing from the logs of episodes": [
        "test_loop.py: metrics_of_a_step_are_nan_without_an_update_and_those_of_an_episode_are_means",
        f"{HERE}: actions_and_mean_q_can_be_followed",
    ],
    "a record of states, actions and rewards": [f"{HERE}: a_callback_records_what_was_seen_and_done"],
    "what is in the history": ["test_core.py: history_has_an_entry_per_finished_episode history_of_test"],
    "log files that strict parsers refuse": [
        "test_callbacks.py: file_logger_interval_extra_keys_and_infinities a_failed_write_leaves_the_old_file",
    ],
    "a logger in a second fit": [
        "test_callbacks.py: file_logger_is_strict_json_and_goes_on_in_a_second_fit",
        f"{HERE}: a_logger_and_a_checkpoint_serve_two_fits_that_end_amid_an_episode",
    ],
    "nothing to render": [
        "test_core.py: visualize_without_a_render_mode_is_one_warning fit_does_not_visualize_by_default_and_test_does",
    ],
    "evaluation disturbs training": [
        "test_core.py: tests_inside_a_fit_leave_the_training_bit_identical test_changes_nothing",
        "test_legacy.py: a_test_in_a_callback_leaves_the_training_as_it_is",
    ],
    "videos": [
        "common/vec_env/test_wrappers.py: chosen_episodes_are_filmed",
        f"{HERE}: a_test_is_filmed",
    ],
    "every 10,000 steps becomes every 80,000 on eight envs": [
        "test_callbacks.py: interval_checkpoint_counts_env_steps_over_its_life",
    ],
    "the optimizer is ignored": [
        "agents/test_dqn.py: the_optimizer_is_the_users_and_its_rate_can_be_changed_on_the_way",
        "test_core.py: the_optimizer_is_the_users_and_a_new_learning_rate_counts",
    ],
}


@pytest.mark.parametrize("report", sorted(TRAINING | LOGGING))
def test_each_report_has_its_test(report):
    assert not missing((TRAINING | LOGGING)[report])


# ---- training ------------------------------------------------------------------------------------------------------


def table(nb_states, nb_actions=2, value=0.0):
    """A network that is a table: one weight per state and action."""
    layer = keras.layers.Dense(nb_actions, use_bias=False, kernel_initializer=keras.initializers.Constant(value))
    return keras.Sequential([keras.Input((1, nb_states)), keras.layers.Flatten(), layer])


def q_of(agent, nb_states):
    return agent.compute_batch_q_values([[row] for row in np.eye(nb_states, dtype="f4")])


def q_agent(cls, nb_states, **options):
    if cls is DQNAgent:
        options |= {"memory": SequentialMemory(1000, window_length=1), "target_model_update": 0.1, "batch_size": 32}
    agent = cls(table(nb_states), nb_actions=2, policy=EpsGreedyQPolicy(1.0), gamma=0.9, **options)
    agent.compile(keras.optimizers.SGD(0.5 if cls is SARSAAgent else 2.0), jit_compile=False)
    return agent


class FiveSteps(gym.Env):
    """Reward 1 in each of five steps, whose number is what is observed; then the episode terminates."""

    observation_space = gym.spaces.Box(0, 1, (5,), np.float32)
    action_space = gym.spaces.Discrete(2)
    nb_steps = 5

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.observed(), {}

    def observed(self):
        return np.eye(5, dtype=np.float32)[min(self.t, 4)]

    def step(self, action):
        self.t += 1
        return self.observed(), 1.0, self.t == self.nb_steps, False, {}


@pytest.mark.parametrize("cls", [DQNAgent, SARSAAgent])
def test_the_end_of_an_episode_that_terminates_is_one(cls):
    agent = q_agent(cls, 5, nb_steps_warmup=32)
    agent.fit(FiveSteps(), nb_steps=1500, seed=0, **QUIET)
    np.testing.assert_allclose(q_of(agent, 5).T, [[4.0951, 3.439, 2.71, 1.9, 1.0]] * 2, atol=0.05)


class OneArray(Counting):
    """Hands out the same array in every step, and writes into it."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.array = np.zeros(3, np.float32)

    def _obs(self):
        self.array[:] = super()._obs()
        return self.array


@pytest.mark.parametrize("lanes", [1, 3])
def test_an_env_that_hands_out_the_same_array_is_learnt_from(lanes):
    agents = []
    for cls in (Counting, OneArray):
        env = cls() if lanes == 1 else DummyVecEnv([lambda i=i, cls=cls: cls(i) for i in range(lanes)])
        agent = DQNAgent(table(3, 3), nb_actions=3, memory=SequentialMemory(200), nb_steps_warmup=8, batch_size=8)
        agent.compile(keras.optimizers.SGD(1e-4), jit_compile=False)
        agent.fit(env, nb_steps=60, seed=2, **QUIET)
        agents.append(agent)
    for plain, reused in zip(*(agent.get_weights() for agent in agents), strict=True):
        np.testing.assert_array_equal(plain, reused)


class Spy(GreedyQPolicy):
    nb_asked = 0

    def select_actions(self, q_values):
        type(self).nb_asked += len(q_values)
        return super().select_actions(q_values)


@pytest.mark.parametrize("cls", [DQNAgent, SARSAAgent])
@pytest.mark.parametrize("lanes", [1, 3])
def test_fit_asks_the_policy_and_test_the_test_policy(cls, lanes):
    policy, test_policy = (type(name, (Spy,), {}) for name in ("Policy", "TestPolicy"))
    options = {"memory": SequentialMemory(200)} if cls is DQNAgent else {}
    agent = cls(table(3, 3), nb_actions=3, policy=policy(), test_policy=test_policy(), **options)
    agent.compile("sgd", jit_compile=False)
    env = Counting() if lanes == 1 else DummyVecEnv([lambda i=i: Counting(i) for i in range(lanes)])
    agent.fit(env, nb_steps=30, **QUIET)
    assert policy.nb_asked == 30 and test_policy.nb_asked == 0
    agent.test(env, nb_episodes=lanes, **QUIET)
    assert policy.nb_asked == 30 and test_policy.nb_asked >= 3 * lanes


class Actions(Callback):
    def __init__(self):
        super().__init__()
        self.actions = []

    def on_step_end(self, step, logs=None):
        self.actions.append(np.array(logs["action"]).tolist())


@each
def test_a_test_repeats_itself_and_explores_nothing(name):
    agent = make_agent(name)
    runs = []
    for seed in (0, 0, None):
        if seed is None:  # another state of all random streams
            agent.seed(99)
        actions = Actions()
        agent.test(make_env(name), nb_episodes=2, seed=0, callbacks=[actions], **QUIET)
        runs.append(actions.actions)
        agent.fit(make_env(name), nb_steps=3, **QUIET)  # draws from them; too short to learn
    assert len(runs[0]) > 5
    assert runs[0] == runs[1] == runs[2]


def test_a_test_policy_that_explores_is_the_users_choice():
    agent = DQNAgent(table(3, 3, 1.0), nb_actions=3, memory=SequentialMemory(50), test_policy=EpsGreedyQPolicy(1.0))
    agent.compile("sgd", jit_compile=False)
    actions = Actions()
    agent.test(Counting(lengths=(30,)), callbacks=[actions], **QUIET)
    assert set(actions.actions) == {0, 1, 2}


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (PPOAgent, {"nb_rollout_steps": 65, "batch_size": 64, "nb_epochs": 1}),
        (PPOAgent, {"nb_rollout_steps": 1, "batch_size": 1, "nb_epochs": 1}),
        (PPOAgent, {"nb_rollout_steps": 1, "batch_size": 64, "nb_epochs": 2}),
        (A2CAgent, {"nb_rollout_steps": 1, "normalize_advantage": True}),
    ],
)
@pytest.mark.filterwarnings("ignore:A rollout of")
def test_batches_of_one_row_leave_all_weights_finite(cls, options):
    env = Counting()
    agent = cls(*actor_critic(env, hidden=(4,)), env.action_space, **options)
    agent.compile(jit_compile=False)
    agent.fit(env, nb_steps=10 * options["nb_rollout_steps"] + 10, **QUIET)
    assert agent.run_state.nb_updates >= 20
    assert all(np.isfinite(w).all() for w in agent.get_weights())


class OneStep(gym.Env):
    """Each episode is one step; action 1 is the good one."""

    observation_space = gym.spaces.Box(0, 1, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.ones(1, np.float32), {}

    def step(self, action):
        return np.ones(1, np.float32), float(action), True, False, {}


@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("cls", [DQNAgent, SARSAAgent])
def test_episodes_of_one_step_are_learnt(cls, lanes):
    agent = q_agent(cls, 1, nb_steps_warmup=32)
    agent.compile(keras.optimizers.SGD(0.1), jit_compile=False)
    agent.fit(OneStep() if lanes == 1 else DummyVecEnv([OneStep] * lanes), nb_steps=600, seed=0, **QUIET)
    np.testing.assert_allclose(q_of(agent, 1), [[0.0, 1.0]], atol=0.05)


def cem():
    memory = EpisodeParameterMemory(100)
    agent = CEMAgent(table(1), 2, memory=memory, batch_size=20, elite_frac=0.2, train_interval=20, nb_steps_warmup=0)
    agent.compile(jit_compile=False)
    return agent


def ppo():
    agent = PPOAgent(*actor_critic(OneStep(), hidden=(4,)), OneStep.action_space, nb_rollout_steps=64, batch_size=32)
    agent.compile(keras.optimizers.Adam(0.01), jit_compile=False)
    return agent


@pytest.mark.parametrize("make", [cem, ppo])
def test_episodes_of_one_step_are_learnt_without_values(make):
    agent = make()
    agent.fit(OneStep(), nb_steps=640, seed=0, **QUIET)
    assert agent.test(OneStep(), nb_episodes=5, **QUIET).history["episode_reward"] == [1.0] * 5


class Steered(gym.Env):
    """A Box of actions (of one or two components); the good one has 0.5 everywhere."""

    observation_space = gym.spaces.Box(0, 1, (1,), np.float32)

    def __init__(self, size):
        self.action_space = gym.spaces.Box(-1, 1, (size,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.ones(1, np.float32), {}

    def step(self, action):
        assert action.shape == self.action_space.shape
        return np.ones(1, np.float32), float((action == 0.5).all()), True, False, {}


class Levers(Processor):
    def __init__(self, size):
        self.size = size

    def process_action(self, action):
        return np.full(self.size, [-1.0, 0.5][action])


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("cls", [DQNAgent, SARSAAgent])
def test_a_processor_makes_the_actions_of_a_box_of_indexes(cls, lanes, size):
    agent = q_agent(cls, 1, nb_steps_warmup=32, processor=Levers(size))
    agent.compile(keras.optimizers.SGD(0.1), jit_compile=False)
    env = Steered(size) if lanes == 1 else DummyVecEnv([lambda: Steered(size)] * lanes)
    agent.fit(env, nb_steps=600, seed=0, **QUIET)
    np.testing.assert_allclose(q_of(agent, 1), [[0.0, 1.0]], atol=0.05)
    agent.processor = None
    with pytest.raises(ValueError, match="process_action makes the env's actions"):
        agent.fit(env, nb_steps=10, **QUIET)


def test_actions_and_mean_q_can_be_followed():
    page = (ROOT / "docs/not_learning.md").read_text("utf-8")
    exec(re.search(r"^```python\n(.*?)^```", page, re.M | re.S).group(1), namespace := {})
    agent = DQNAgent(table(3, 3), nb_actions=3, memory=SequentialMemory(200), nb_steps_warmup=8, batch_size=8)
    agent.compile(keras.optimizers.SGD(1e-4), metrics=["mae"], jit_compile=False)
    history = agent.fit(Counting(), nb_steps=36, callbacks=[namespace["ActionCounts"](3)], **QUIET).history
    counts = np.array([history[f"action_{i}"] for i in range(3)])
    np.testing.assert_array_equal(counts.sum(axis=0), history["nb_episode_steps"])
    for name in ("loss", "mae", "mean_q"):
        assert np.isnan(history[name][0]) and np.isfinite(history[name][-6:]).all()


# ---- logging and evaluation ----------------------------------------------------------------------------------------


def test_a_callback_records_what_was_seen_and_done():
    class Record(Callback):
        """All states, actions and rewards, aligned; `env` is a wrapper that keeps what it returned last."""

        def __init__(self):
            super().__init__()
            self.states, self.actions, self.rewards = [], [], []

        def on_step_begin(self, step, logs=None):
            self.states.append(self.env.last.tolist())

        def on_step_end(self, step, logs=None):
            self.actions.append(int(logs["action"]))
            self.rewards.append(logs["reward"])

    class Last(gym.ObservationWrapper):
        def observation(self, observation):
            self.last = observation
            return observation

    agent, record = q_agent(DQNAgent, 5), Record()
    agent.test(Last(FiveSteps()), nb_episodes=2, callbacks=[record], **QUIET)
    assert record.states == 2 * np.eye(5).tolist()
    assert record.rewards == [1.0] * 10
    assert record.actions == 2 * [int(a) for a in q_of(agent, 5).argmax(axis=1)]


def test_a_logger_and_a_checkpoint_serve_two_fits_that_end_amid_an_episode(tmp_path):
    agent = q_agent(DQNAgent, 5)
    env = gym.wrappers.TimeLimit(type("Long", (FiveSteps,), {"nb_steps": 10**9})(), 50)
    logger = FileLogger(str(tmp_path / "log.json"))
    checkpoint = ModelIntervalCheckpoint(str(tmp_path / "{step}.weights.h5"), interval=30)
    for _ in range(2):
        agent.fit(env, nb_steps=55, callbacks=[logger, checkpoint], **QUIET)
    log = json.loads((tmp_path / "log.json").read_text())
    assert log["episode"] == [0, 1] and log["nb_episode_steps"] == [50, 50] and log["nb_steps"] == [50, 100]
    assert sorted(p.name for p in tmp_path.glob("*.h5")) == [f"{n}.weights.h5" for n in (30, 60, 90)]


def test_a_test_is_filmed(monkeypatch, tmp_path):
    films = {}

    class Clip:  # stands in for MoviePy's
        def __init__(self, frames, fps):
            self.nb_frames = len(frames)

        def write_videofile(self, path, **kwargs):
            films[path.rsplit("/", 1)[-1]] = self.nb_frames

    names = ("moviepy", "moviepy.video", "moviepy.video.io", "moviepy.video.io.ImageSequenceClip")
    modules = {name: types.ModuleType(name) for name in names}
    modules[names[-1]].ImageSequenceClip = Clip
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)

    class Seen(FiveSteps):
        metadata = {"render_modes": ["rgb_array"], "render_fps": 10}
        render_mode = "rgb_array"

        def render(self):
            return np.full((4, 4, 3), self.t, np.uint8)

    env = RecordVideo(Seen(), str(tmp_path), episode_trigger=lambda episode: episode != 1)
    q_agent(DQNAgent, 5).test(env, nb_episodes=3, verbose=0)
    env.close()
    assert films == {"rl-video-episode-0.mp4": 6, "rl-video-episode-2.mp4": 6}
