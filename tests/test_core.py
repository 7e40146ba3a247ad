"""`Agent.fit` and `Agent.test`: arguments, limits, envs of every kind, refusals, and what an error leaves behind."""

import inspect
import warnings

import gymnasium as gym
import keras
import numpy as np
import pytest
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from keras import ops

from rl.agents.base import ReplayAgent
from rl.agents.dqn import DQNAgent
from rl.callbacks import Callback
from rl.common.vec_env import ClosedEnvironmentError, DummyVecEnv, SubprocVecEnv
from rl.core import Agent, Env, Processor, Space
from rl.memory import SequentialMemory
from rl.ops import take
from rl.policy import BoltzmannQPolicy, EpsGreedyQPolicy, LinearAnnealedPolicy
from tests.toy_agents import Noting, recorder
from tests.toy_envs import Counting

MODES = list(AutoresetMode)
QUIET = {"verbose": 0, "visualize": False}


def makers(nb_lanes, cls=Counting, **options):
    return [lambda i=i: cls(i, **options) for i in range(nb_lanes)]


def lanes_of(nb_lanes, mode=AutoresetMode.SAME_STEP, **options):
    return DummyVecEnv(makers(nb_lanes, **options), autoreset_mode=mode)


def network(nb_outputs=3, seed=0, dropout=0.0):
    layers = [
        keras.layers.Input((1, 3)),
        keras.layers.Flatten(),
        keras.layers.Rescaling(0.1),
        keras.layers.Dense(8, "tanh", kernel_initializer=keras.initializers.GlorotUniform(seed)),
        *([keras.layers.Dropout(dropout, seed=seed)] if dropout else []),
        keras.layers.Dense(nb_outputs, kernel_initializer=keras.initializers.GlorotUniform(seed + 1)),
    ]
    return keras.Sequential(layers)


def dqn(dropout=0.0, **options):
    options = {"nb_steps_warmup": 10, "batch_size": 8, "target_model_update": 0.1} | options
    agent = DQNAgent(network(dropout=dropout), nb_actions=3, memory=SequentialMemory(500, window_length=1), **options)
    agent.compile("adam", jit_compile=False)
    return agent


def state_of(agent):
    """All that `test` must leave alone, as one flat list."""
    state = agent.run_state
    counts = [np.array(getattr(state, name)) for name in (*state.COUNTERS, "metric_sum", "metric_count", "training")]
    generators = [repr(stream.get_random_state()) for stream in agent.random_streams()]
    variables = [ops.convert_to_numpy(v) for v in (*agent.variables, *agent.optimizer.variables)]
    memory = getattr(agent, "memory", None)
    stored = [] if memory is None else [memory.nb_entries, *memory.rewards, *memory.terminals]
    return [*counts, *generators, repr(np.random.get_state()), *variables, *stored, agent.stop_training]


def assert_equal(first, second):
    assert len(first) == len(second)
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one, other)


# ---- arguments -----------------------------------------------------------------------------------------------------


def test_arguments_and_defaults_are_keras_rls():
    fit = {
        "env": inspect.Parameter.empty,
        "nb_steps": None,  # required in keras-rl; here nb_episodes may take its place
        "action_repetition": 1,
        "callbacks": None,
        "verbose": 1,
        "visualize": False,
        "nb_max_start_steps": 0,
        "start_step_policy": None,
        "log_interval": 10000,
        "nb_max_episode_steps": None,
    }
    test = {
        "env": inspect.Parameter.empty,
        "nb_episodes": 1,
        "action_repetition": 1,
        "callbacks": None,
        "visualize": True,
        "nb_max_episode_steps": None,
        "nb_max_start_steps": 0,
        "start_step_policy": None,
        "verbose": 1,
    }
    for method, old, new in ((Agent.fit, fit, {"nb_episodes", "seed", "overlap"}), (Agent.test, test, {"seed"})):
        parameters = list(inspect.signature(method).parameters.values())[1:]
        assert {p.name: p.default for p in parameters[: len(old)]} == old
        assert [p.name for p in parameters[: len(old)]] == list(old)  # positions, too
        assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters[: len(old)])
        assert {p.name for p in parameters[len(old) :]} == new
        assert all(p.kind is p.KEYWORD_ONLY and not p.default for p in parameters[len(old) :])


@pytest.mark.parametrize("method", ["fit", "test"])
def test_an_agent_that_is_not_compiled_says_so(method):
    agents = [DQNAgent(network(), nb_actions=3, memory=SequentialMemory(100)), Agent()]
    for agent in agents:
        env = Counting()
        with pytest.raises(RuntimeError, match=rf"{type(agent).__name__}\.{method}\(\).*call agent\.compile"):
            getattr(agent, method)(env, 5)
        assert env.nb_resets == 0


BAD_COUNTS = [0, -1, 2.5, float("nan"), float("inf"), True, np.True_, "5", [5], 0.0]


@pytest.mark.parametrize("bad", BAD_COUNTS, ids=repr)
@pytest.mark.parametrize("name", ["nb_steps", "nb_episodes"])
def test_what_is_no_count_is_refused_before_anything_happens(name, bad):
    agent, env = Noting(), Counting()
    with pytest.raises(ValueError, match=f"{name} must be a whole number of at least 1, got "):
        agent.fit(env, **{name: bad}, verbose=0)
    if name == "nb_episodes":
        with pytest.raises(ValueError, match="nb_episodes must be a whole number"):
            agent.test(env, bad, **QUIET)
    assert not agent.calls
    assert env.nb_resets == 0


def test_fit_without_a_limit_is_refused():
    with pytest.raises(ValueError, match="nb_steps .* nb_episodes"):
        Noting().fit(Counting())


@pytest.mark.parametrize("nb_steps", [5e1, 50, np.int64(50), np.float32(50)])
def test_nb_steps_may_be_a_float(nb_steps):
    agent = Noting()
    agent.fit(Counting(), nb_steps, verbose=0)
    assert agent.step == 50
    assert type(agent.step) is int


@pytest.mark.parametrize(
    ("option", "bad"),
    [
        ("action_repetition", 0),
        ("action_repetition", -2),
        ("action_repetition", 1.5),
        ("nb_max_start_steps", -1),
        ("nb_max_episode_steps", 0),
        ("nb_max_episode_steps", 2.5),
    ],
)
@pytest.mark.parametrize("method", ["fit", "test"])
def test_options_out_of_range_are_refused(method, option, bad):
    agent, env = Noting(), Counting()
    with pytest.raises(ValueError, match=option):
        getattr(agent, method)(env, 5, **{option: bad})
    assert env.nb_resets == 0
    assert not agent.training
    agent.fit(env, 5, verbose=0)
    assert agent.step == 5


def test_log_interval_is_checked():
    agent, env = Noting(), Counting()
    with pytest.raises(ValueError, match="interval"):
        agent.fit(env, 5, log_interval=0)
    assert env.nb_resets == 0


@pytest.mark.parametrize("seed", [-1, 1.5, "a"])
def test_a_seed_that_is_none_is_refused(seed):
    agent, env = Noting(), Counting()
    with pytest.raises((ValueError, TypeError, gym.error.Error)):
        agent.fit(env, 5, seed=seed, verbose=0)
    agent.fit(env, 5, verbose=0)
    assert agent.step == 5


# ---- limits --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nb_episodes", [1, 3, 7])
def test_nb_episodes_is_exact_on_one_env(nb_episodes):
    agent = Noting()
    history = agent.fit(Counting(lengths=(2,)), nb_episodes=nb_episodes, verbose=0)
    assert history.history["episode_reward"] == [3.0] * nb_episodes
    assert agent.step == 2 * nb_episodes


@pytest.mark.parametrize("mode", MODES)
def test_nb_episodes_on_lanes_ends_with_the_step_in_which_it_is_reached(mode):
    agent = Noting()
    history = agent.fit(lanes_of(3, mode, lengths=(2,)), nb_episodes=4, verbose=0)
    assert history.history["episode_reward"] == [3.0] * 6
    assert agent.step == 12


def test_of_both_limits_the_first_one_reached_decides():
    agent = Noting()
    assert agent.fit(Counting(lengths=(2,)), 100, nb_episodes=3, verbose=0).history["nb_steps"] == [2, 4, 6]
    assert agent.step == 6
    agent = Noting()
    assert agent.fit(Counting(lengths=(2,)), 5, nb_episodes=100, verbose=0).history["nb_steps"] == [2, 4]
    assert agent.step == 5


@pytest.mark.parametrize("first", [{"nb_episodes": 7}, {"nb_steps": 100, "nb_episodes": 7}])
@pytest.mark.parametrize("nb_lanes", [1, 3])
def test_a_fit_by_steps_after_one_by_episodes_takes_all_its_steps(nb_lanes, first):
    agent = Noting()
    env = Counting() if nb_lanes == 1 else lanes_of(nb_lanes)
    for _ in range(3):
        before = agent.step
        agent.fit(env, **first, verbose=0)
        assert before < agent.step
        before = agent.step
        agent.fit(env, nb_steps=30, verbose=0)
        assert agent.step - before == 30


def test_overshoot_is_taken_off_the_next_fit_on_the_same_env_only():
    agent, env = Noting(), lanes_of(4)
    for nb_steps, total in ((10, 12), (10, 20), (1, 24), (3, 24), (1, 28)):
        agent.fit(env, nb_steps, verbose=0)
        assert agent.step == total
    agent.fit(lanes_of(4), 4, verbose=0)
    assert agent.step == 32


def test_a_stop_is_not_made_up_for():
    class Stopper(Callback):
        def on_episode_end(self, episode, logs=None):
            self.model.stop_training = True

    agent, env = Noting(), Counting(lengths=(4,))
    agent.fit(env, 100, callbacks=[Stopper()], verbose=0)
    agent.fit(env, 10, verbose=0)
    assert agent.step == 14


def test_steps_may_be_assigned():
    agent, env = Noting(), Counting()
    agent.fit(env, 10, verbose=0)
    agent.step = 0
    agent.fit(env, 10, verbose=0)
    assert agent.step == 10
    assert [t.valid.sum() for t in agent.transitions()] == [1] * 20


@pytest.mark.parametrize("start", [2**15 - 7, 2**31 - 7, 2**53])
def test_counters_are_python_integers_that_do_not_wrap(start):
    policy = LinearAnnealedPolicy(EpsGreedyQPolicy(), "eps", 1.0, 0.1, 0.0, 100)
    agent, steps = dqn(policy=policy), []
    agent.step = start
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        history = agent.fit(lanes_of(2), 40, callbacks=[recorder(steps, ("on_vector_step_end",))], verbose=0)
    assert agent.step == start + 40
    assert [logs["nb_steps"] for _, logs in steps] == list(range(start + 2, start + 41, 2))
    assert all(start < n <= start + 40 for n in history.history["nb_steps"])
    assert agent.run_state.nb_updates == 40 - 6  # the memory is empty: none until it holds a batch of 8


def test_the_return_of_a_long_episode_is_exact():
    class Tenth(Counting):
        def step(self, action):
            observation, _, *rest = super().step(action)
            return observation, 0.1, *rest

    history = Noting().test(Tenth(lengths=(20_000,)), **QUIET)
    assert history.history["episode_reward"][0] == pytest.approx(2000, abs=1e-3)


# ---- history -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nb_lanes", [1, 3])
def test_history_has_an_entry_per_finished_episode(nb_lanes):
    agent = Noting()
    env = Counting() if nb_lanes == 1 else lanes_of(nb_lanes)
    nb_ended, last = 0, 0
    for _ in range(3):
        history = agent.fit(env, 10 * nb_lanes, verbose=0)
        assert isinstance(history, keras.callbacks.History)
        assert set(history.history) == {"episode_reward", "nb_episode_steps", "nb_steps", "duration", "loss"}
        assert {len(values) for values in history.history.values()} == {len(history.epoch)}
        steps = history.history["nb_steps"]
        assert steps == sorted(steps)
        assert last < steps[0] and steps[-1] <= agent.step
        nb_ended, last = nb_ended + len(steps), steps[-1]
    assert nb_ended == sum(int((t.terminated | t.truncated).sum()) for t in agent.transitions())


def test_history_of_a_fit_without_a_finished_episode_is_empty():
    assert Noting().fit(Counting(), 2, verbose=0).history == {}


def test_history_of_test():
    history = Noting().test(Counting(), 3, **QUIET).history
    assert history["episode_reward"] == [6.0, 15.0, 10.0]
    assert history["nb_steps"] == history["nb_episode_steps"] == [3, 5, 4]


# ---- options -------------------------------------------------------------------------------------------------------


def test_action_repetition_counts_the_agents_steps():
    agent, env = Noting(), Counting(lengths=(5,))
    history = agent.fit(env, 6, action_repetition=2, verbose=0)
    assert (agent.step, env.total) == (6, 10)
    assert history.history["episode_reward"] == [15.0, 15.0]
    assert history.history["nb_episode_steps"] == [3, 3]
    with pytest.raises(ValueError, match="action_repetition=2 needs a single env"):
        agent.fit(lanes_of(2), 6, action_repetition=2, verbose=0)
    assert agent.test(env, 1, action_repetition=5, **QUIET).history["nb_steps"] == [1]


@pytest.mark.parametrize("nb_lanes", [1, 3])
def test_start_steps_are_the_policys_and_recorded_nowhere(nb_lanes):
    seen = []

    def policy(observation):
        seen.append(np.array(observation))
        return 1

    agent = Noting()
    env = Counting(lengths=(6,)) if nb_lanes == 1 else lanes_of(nb_lanes, lengths=(6,))
    history = agent.fit(env, 60, nb_max_start_steps=3, start_step_policy=policy, verbose=0, seed=1)
    assert agent.step in range(60, 60 + nb_lanes)
    assert all(observation.shape == (3,) for observation in seen)
    assert {int(o[2]) for o in seen} == {0, 1}
    lengths = history.history["nb_episode_steps"]
    assert set(lengths) == {4, 5, 6}
    rewards = {length: sum(range(7 - length, 7)) for length in (4, 5, 6)}
    assert history.history["episode_reward"] == [rewards[length] for length in lengths]
    assert set(agent.test(env, 12, nb_max_start_steps=3, seed=1, **QUIET).history["nb_steps"]) == {4, 5, 6}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("nb_lanes", [1, 3])
def test_nb_max_episode_steps_truncates(nb_lanes, mode):
    agent = Noting()
    env = Counting() if nb_lanes == 1 else lanes_of(nb_lanes, mode)
    history = agent.fit(env, 12 * nb_lanes, nb_max_episode_steps=4, verbose=0)
    assert history.history["nb_episode_steps"][::nb_lanes][:2] == [3, 4]
    assert max(history.history["nb_episode_steps"]) == 4
    rows = [(t.terminated[0], t.truncated[0], t.next_observation[0][2]) for t in agent.transitions() if t.valid[0]]
    ends = [row for row in rows if row[0] or row[1]]
    assert ends == [(True, False, 3), (False, True, 4), (True, False, 4)]
    assert set(agent.test(env, 6, nb_max_episode_steps=2, **QUIET).history["nb_steps"]) == {2}


class Screen(Counting):
    def __init__(self, number=0, render_mode=None, **options):
        super().__init__(number, **options)
        self.render_mode, self.nb_rendered = render_mode, 0

    def render(self):
        self.nb_rendered += 1
        return np.zeros((4, 4, 3), np.uint8)


@pytest.mark.parametrize("method", ["fit", "test"])
def test_visualize_renders_an_env_with_a_render_mode(method):
    env = Screen(render_mode="rgb_array", lengths=(5,))
    getattr(Noting(), method)(env, **({"nb_episodes": 2}), visualize=True, verbose=0)
    assert env.nb_rendered == 10
    getattr(Noting(), method)(env, **({"nb_episodes": 2}), visualize=False, verbose=0)
    assert env.nb_rendered == 10


def test_fit_does_not_visualize_by_default_and_test_does():
    env = Screen(render_mode="rgb_array")
    Noting().fit(env, 5, verbose=0)
    assert env.nb_rendered == 0
    Noting().test(env, verbose=0)
    assert env.nb_rendered > 0


@pytest.mark.parametrize("env", [Screen, lambda: lanes_of(2)])
@pytest.mark.parametrize("method", ["fit", "test"])
def test_visualize_without_a_render_mode_is_one_warning(method, env):
    with pytest.warns(UserWarning, match="render_mode='human'") as caught:
        getattr(Noting(), method)(env(), nb_episodes=3, visualize=True, verbose=0)
    assert len(caught) == 1


def test_callbacks_may_be_one_or_nested_and_nothing_else():
    for callbacks in (lambda c: c, lambda c: (c,), lambda c: [[c], []]):
        calls = []
        Noting().fit(Counting(), 10, callbacks=callbacks(recorder(calls, ("on_episode_end",))), verbose=0)
        assert len(calls) == 2
    agent, env = Noting(), Counting()
    for bad in (["log"], [Callback], [None], print):
        with pytest.raises(TypeError, match="callbacks"):
            agent.fit(env, 10, callbacks=bad, verbose=0)
        assert not agent.training
    agent.fit(env, 10, verbose=0)
    assert agent.step == 10


@pytest.mark.parametrize("verbose", [0, 1, 2, True, False])
def test_verbose_prints_or_not(verbose, capsys):
    Noting().fit(Counting(), 30, verbose=verbose)
    Noting().test(Counting(), 2, visualize=False, verbose=verbose)
    assert bool(capsys.readouterr().out) == bool(verbose)


# ---- test() --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("nb_episodes", "nb_lanes"), [(1, 3), (2, 3), (3, 3), (7, 3), (4, 1)])
def test_each_lane_plays_its_share_of_the_episodes(mode, nb_episodes, nb_lanes):
    calls = []
    env = DummyVecEnv([lambda i=i: Counting(i, lengths=(1 + 3 * i,)) for i in range(nb_lanes)], autoreset_mode=mode)
    history = Noting().test(env, nb_episodes, callbacks=[recorder(calls, ("on_episode_end",))], **QUIET)
    assert len(history.history["episode_reward"]) == nb_episodes
    shares = np.bincount([c[2]["lane"] for c in calls], minlength=nb_lanes)
    each, more = divmod(nb_episodes, nb_lanes)
    assert shares.tolist() == [each + (i < more) for i in range(nb_lanes)]


def annealed(eps=1.0):
    return LinearAnnealedPolicy(EpsGreedyQPolicy(), "eps", eps, 0.1, 0.0, 100)


@pytest.mark.parametrize("fitted", [False, True])
@pytest.mark.parametrize("nb_lanes", [1, 3])
def test_test_changes_nothing(nb_lanes, fitted):
    agent = dqn(dropout=0.5, policy=annealed(), test_policy=BoltzmannQPolicy())
    if fitted:
        agent.fit(lanes_of(2), 31, verbose=0)
    before = state_of(agent)
    for _ in range(2):
        env = Counting() if nb_lanes == 1 else lanes_of(nb_lanes)
        agent.test(env, 4, **QUIET)
        assert_equal(before, state_of(agent))


def test_a_test_does_not_depend_on_numpys_global_generator():
    agent = dqn(test_policy=BoltzmannQPolicy())
    actions = []
    for seed in (1, 2):
        np.random.seed(seed)
        calls = []
        agent.test(Counting(), 4, callbacks=[recorder(calls, ("on_step_end",))], **QUIET)
        actions.append([int(c[2]["action"]) for c in calls])
    assert actions[0] == actions[1]
    assert len(set(actions[0])) > 1


def test_a_test_uses_the_test_policy_only_and_fit_the_other():
    class Spy(EpsGreedyQPolicy):
        nb_calls = 0

        def select_action(self, q_values):
            self.nb_calls += 1
            return super().select_action(q_values=q_values)

    agent = dqn(policy=Spy(), test_policy=Spy())
    agent.test(Counting(), **QUIET)
    assert (agent.policy.nb_calls, agent.test_policy.nb_calls) == (0, 3)
    agent.fit(Counting(), 20, verbose=0)
    assert (agent.policy.nb_calls, agent.test_policy.nb_calls) == (20, 3)


def test_a_failed_test_changes_nothing_either():
    one, two = dqn(policy=annealed()), dqn(policy=annealed())
    envs = [lanes_of(2), lanes_of(2)]
    for agent, env in zip((one, two), envs, strict=True):
        agent.fit(env, 31, verbose=0, seed=3)
    before = state_of(two)
    with pytest.raises(ZeroDivisionError):
        two.test(Failing(at=2), 4, **QUIET)
    with pytest.raises(TypeError):
        two.test(None, 4, **QUIET)
    with pytest.raises(ValueError, match="nb_actions"):
        two.test(gym.make("CartPole-v1"), 4, **QUIET)
    assert_equal(before, state_of(two))
    for agent, env in zip((one, two), envs, strict=True):
        agent.fit(env, 31, verbose=0)
    assert_equal(state_of(one), state_of(two))


class Evaluation(Callback):
    """Tests now and then during a fit, at each hook in turn."""

    def __init__(self, make_env, every=7):
        super().__init__()
        self.make_env, self.every, self.nb_tests, self.nb_calls = make_env, every, 0, 0

    def evaluate(self, *args):
        self.nb_calls += 1
        if self.nb_calls % self.every == 0:
            self.nb_tests += 1
            history = self.model.test(self.make_env(), 2, **QUIET)
            assert len(history.history["episode_reward"]) == 2
            assert self.model.training

    on_step_begin = on_step_end = on_action_begin = on_action_end = on_episode_begin = on_episode_end = evaluate
    on_vector_step_end = evaluate


@pytest.mark.parametrize("nb_lanes", [1, 3])
def test_tests_inside_a_fit_leave_the_training_bit_identical(nb_lanes):
    agents = [dqn(dropout=0.3, policy=annealed(), test_policy=BoltzmannQPolicy()) for _ in range(2)]
    evaluations, histories = Evaluation(lambda: lanes_of(2)), []
    for agent, callbacks in zip(agents, ([], [evaluations]), strict=True):
        env = Counting() if nb_lanes == 1 else lanes_of(nb_lanes)
        agent.seed(5)
        for _ in range(2):
            history = agent.fit(env, 40, callbacks=callbacks, verbose=0).history
            histories.append({name: values for name, values in history.items() if name != "duration"})
    assert evaluations.nb_tests > 20
    assert_equal(state_of(agents[0]), state_of(agents[1]))
    for plain, disturbed in zip(histories[:2], histories[2:], strict=True):
        assert plain.keys() == disturbed.keys()
        assert_equal(list(plain.values()), list(disturbed.values()))


def test_a_test_on_the_env_of_the_running_fit_between_two_episodes():
    class Each(Callback):
        def on_episode_end(self, episode, logs=None):
            returns.extend(self.model.test(self.env, 1, **QUIET).history["episode_reward"])

    agent, env, returns = Noting(), Counting(lengths=(3,)), []
    history = agent.fit(env, 12, callbacks=[Each()], verbose=0)
    assert history.history["episode_reward"] == returns == [6.0] * 4
    fitted = [t for t in agent.transitions() if t.valid.all()]
    assert len(fitted) == 24
    history = agent.fit(env, 6, verbose=0)
    assert history.history["episode_reward"] == [6.0] * 2


@pytest.mark.parametrize("method", ["fit", "test"])
@pytest.mark.parametrize("nb_lanes", [1, 3])
def test_a_test_amid_an_episode_of_the_running_fit_or_test_is_refused(nb_lanes, method):
    class Each(Callback):
        def on_step_end(self, step, logs=None):
            self.model.test(self.env, 1, **QUIET)

    agent = Noting()
    env = Counting() if nb_lanes == 1 else lanes_of(nb_lanes)
    with pytest.raises(RuntimeError, match="amid an episode of this env: give it another env"):
        getattr(agent, method)(env, 12, callbacks=[Each()], **QUIET)
    agent.fit(env, 12, verbose=0)
    agent.test(env, 2, **QUIET)


@pytest.mark.parametrize("method", ["fit", "test"])
def test_a_fit_inside_a_fit_or_test_is_refused(method):
    class Each(Callback):
        def on_episode_end(self, episode, logs=None):
            self.model.fit(Counting(), 5, verbose=0)

    agent = Noting()
    with pytest.raises(RuntimeError, match="inside fit"):
        getattr(agent, method)(Counting(), 12, callbacks=[Each()], **QUIET)
    before = agent.step
    agent.fit(Counting(), 12, verbose=0)
    assert agent.step == before + 12


# ---- seeds ---------------------------------------------------------------------------------------------------------


class Seeded(Counting):
    """Rewards are random, and the seeds of the resets are noted."""

    def __init__(self, number=0, **options):
        super().__init__(number, **options)
        self.seeds = []

    def reset(self, *, seed=None, options=None):
        self.seeds.append(seed)
        return super().reset(seed=seed)

    def step(self, action):
        observation, _, *rest = super().step(action)
        return observation, float(self.np_random.normal()) + int(action), *rest


@pytest.mark.parametrize("seed", [0, 7, np.int64(7)])
def test_a_seed_reaches_every_lane_and_the_agent(seed):
    envs = [Seeded(i) for i in range(3)]
    rewards = []
    for _ in range(2):
        agent = Noting()
        agent.fit(Counting(), 3, verbose=0)  # other draws before
        history = agent.fit(DummyVecEnv([lambda e=e: e for e in envs]), 30, seed=seed, verbose=0)
        rewards.append(history.history["episode_reward"])
        for i, env in enumerate(envs):
            assert env.seeds[0] == seed + i
            assert set(env.seeds[1:]) == {None}
            env.seeds.clear()
            env.episode = -1
    assert rewards[0] == rewards[1]


def test_a_seed_of_test_decides_the_env_and_leaves_the_agents_streams():
    agent, results = Noting(), []
    for seed in (3, 3, 4):
        results.append(agent.test(Seeded(), 3, seed=seed, **QUIET).history["episode_reward"])
    assert results[0] == results[1] != results[2]


def test_fit_with_a_seed_starts_new_episodes():
    agent, env = Noting(), Seeded(lengths=(10,))
    agent.fit(env, 5, verbose=0)
    agent.fit(env, 5, seed=1, verbose=0)
    assert env.seeds == [None, 1]


def test_dropout_follows_the_seed():
    agents = [dqn(dropout=0.5) for _ in range(3)]
    for agent, seed in zip(agents, (1, 1, 2), strict=True):
        agent.fit(Counting(), 30, seed=seed, verbose=0)
    assert_equal(agents[0].get_weights(), agents[1].get_weights())
    assert not np.array_equal(agents[0].get_weights()[0], agents[2].get_weights()[0])
    fresh = dqn(dropout=0.5)
    for agent in (fresh, *agents):
        agent.seed(7)
    states = [
        [ops.convert_to_numpy(v) for v in a.variables if v.name == "seed_generator_state"] for a in (fresh, *agents)
    ]
    assert states[0]
    for state in states[1:]:
        assert_equal(states[0], state)


# ---- envs ----------------------------------------------------------------------------------------------------------


class NoReset:
    def step(self, action):
        raise NotImplementedError


@pytest.mark.parametrize(
    ("env", "text"),
    [
        (None, "NoneType .*reset"),
        ("CartPole-v1", "str .*reset"),
        (Counting, "class Counting itself"),
        (NoReset(), r"NoReset .*reset\(\)"),
        ([Counting()], "list .*reset"),
        (lambda: Counting(), "function .*reset"),
        (gym.spec("CartPole-v1"), "EnvSpec .*reset"),
    ],
)
@pytest.mark.parametrize("method", ["fit", "test"])
def test_what_is_no_env_is_refused(method, env, text):
    agent = Noting()
    with pytest.raises(TypeError, match=text):
        getattr(agent, method)(env, 5)
    assert not agent.training
    agent.fit(Counting(), 5, verbose=0)
    assert agent.step == 5


@pytest.mark.parametrize("make", [lambda: lanes_of(2), lambda: SyncVectorEnv(makers(2))])
def test_a_closed_env_is_refused(make):
    agent, env = Noting(), make()
    env.close()
    for method in (agent.fit, agent.test):
        with pytest.raises((ClosedEnvironmentError, gym.error.ClosedEnvironmentError), match="closed"):
            method(env, 5, verbose=0)
    env = make()
    agent.fit(env, 6, verbose=0)
    env.close()
    nb_calls = len(agent.calls)
    with pytest.raises((ClosedEnvironmentError, gym.error.ClosedEnvironmentError), match="closed: create a new one"):
        agent.fit(env, 6, verbose=0, callbacks=[recorder(agent.calls)])
    assert agent.step == 6 and len(agent.calls) == nb_calls  # no callback has begun
    agent.fit(make(), 6, verbose=0)
    assert agent.step == 12


class OldEnv(Env):
    """keras-rl's API: four values, one from reset, `seed()`; episodes of 3 steps, every second one cut."""

    action_space = gym.spaces.Discrete(3)
    observation_space = gym.spaces.Box(-9, 9, (3,), np.float32)

    def __init__(self):
        self.episode, self.seeds, self.nb_rendered = -1, [], 0

    def reset(self):
        self.episode, self.t = self.episode + 1, 0
        return np.zeros(3, np.float32)

    def step(self, action):
        self.t += 1
        done = self.t == 3
        info = {"TimeLimit.truncated": self.episode % 2 == 1} if done else {}
        return np.full(3, self.t, np.float32), 1.0, done, info

    def seed(self, seed=None):
        self.seeds.append(seed)
        return [seed]

    def render(self, mode="human", close=False):
        self.nb_rendered += 1


def test_an_old_env_in_fit_and_test():
    agent, env = Noting(), OldEnv()
    history = agent.fit(env, 12, seed=4, verbose=0)
    assert history.history["episode_reward"] == [3.0] * 4
    assert [bool(t.terminated[0]) for t in agent.transitions()] == ([0, 0, 1] + [0, 0, 0]) * 2
    assert [bool(t.truncated[0]) for t in agent.transitions()] == ([0, 0, 0] + [0, 0, 1]) * 2
    assert env.seeds == [4]
    assert agent.test(env, 2, verbose=0).history["nb_steps"] == [3, 3]
    assert env.nb_rendered == 6
    trained = dqn()
    trained.fit(env, 30, verbose=0)
    assert trained.run_state.nb_updates == 20


@pytest.mark.parametrize("values", [3, 6])
def test_a_step_of_another_length_is_one_clear_type_error(values):
    class Odd(Counting):
        def step(self, action):
            return (*super().step(action), 0)[:values]

    agent = Noting()
    for method in ("fit", "test"):
        with pytest.raises(TypeError, match=rf"Odd\.step\(\) returned {values} values, expected 5 values"):
            getattr(agent, method)(Odd(), 5, **QUIET)


VECTOR_ENVS = [
    *[lambda mode=mode: SyncVectorEnv(makers(3), autoreset_mode=mode) for mode in MODES],
    lambda: AsyncVectorEnv(makers(3)),
    *[lambda mode=mode: lanes_of(3, mode) for mode in MODES],
    lambda: SubprocVecEnv(makers(3)),
]
NAMES = ["sync-next", "sync-same", "sync-disabled", "async", "dummy-next", "dummy-same", "dummy-disabled", "subproc"]


@pytest.mark.parametrize("make", VECTOR_ENVS, ids=NAMES)
def test_vector_envs_of_every_kind(make):
    agent, env = Noting(), make()
    try:
        returns = agent.fit(env, 36, verbose=0, seed=1).history["episode_reward"]
        returns += agent.fit(env, 36, verbose=0).history["episode_reward"]
        assert agent.step == 72
        assert sorted(returns) == sorted([6.0, 15.0, 10.0] * 6)
        history = agent.test(env, 7, **QUIET)
        assert len(history.history["episode_reward"]) == 7
        agent.fit(env, 9, verbose=0)
        rows = [(t, i) for t in agent.transitions() for i in range(3) if t.valid[i]]
        for t, i in rows:
            number, episode, step = t.observation[i]
            assert t.next_observation[i].tolist() == [number, episode, step + 1]
            assert t.reward[i] == step + 1
            assert t.terminated[i] == (step + 1 == (3, 5, 4)[int(episode) % 3])
    finally:
        env.close()


def test_training_is_the_same_on_every_vector_env_of_a_mode():
    makes = [
        lambda: lanes_of(3, AutoresetMode.SAME_STEP),
        lambda: SyncVectorEnv(makers(3), autoreset_mode=AutoresetMode.SAME_STEP),
        lambda: SubprocVecEnv(makers(3)),
    ]
    results = []
    for make in makes:
        agent, env = dqn(), make()
        agent.fit(env, 60, seed=2, verbose=0)
        env.close()
        results.append(agent.get_weights())
    assert_equal(results[0], results[1])
    assert_equal(results[0], results[2])


# ---- errors --------------------------------------------------------------------------------------------------------


class Failing(Counting):
    def __init__(self, number=0, at=20, where="step", **options):
        super().__init__(number, **options)
        self.at, self.where = at, where

    def reset(self, **options):
        if self.where == "reset" and self.total >= self.at:
            self.where = None
            raise ZeroDivisionError("in reset")
        return super().reset(**options)

    def step(self, action):
        result = super().step(action)
        if self.where == "step" and self.total >= self.at:
            self.where = None
            raise ZeroDivisionError("in step")
        return result


def assert_trains(agent, env):
    assert not agent.training
    step, updates, weights = agent.step, agent.run_state.nb_updates, agent.model.get_weights()
    history = agent.fit(env, 30, verbose=0)
    assert agent.step in range(step + 30, step + 33)
    assert agent.run_state.nb_updates >= updates + 29 - max(0, agent.nb_steps_warmup - step)
    assert not np.array_equal(weights[0], agent.model.get_weights()[0])
    assert np.isfinite(history.history["loss"][-1])
    assert len(agent.test(Counting(), 2, **QUIET).history["episode_reward"]) == 2


@pytest.mark.parametrize("where", ["step", "reset"])
@pytest.mark.parametrize("nb_lanes", [1, 3])
def test_an_error_of_the_env_leaves_the_agent_usable(nb_lanes, where):
    agent, ends = dqn(), []
    env = Failing(where=where) if nb_lanes == 1 else DummyVecEnv(makers(3, Failing, where=where))
    with pytest.raises(ZeroDivisionError, match=where):
        agent.fit(env, 1000, callbacks=[recorder(ends, ("on_train_end",))], verbose=0)
    assert ends == [("on_train_end", {"did_abort": True})]
    assert agent.step in range(19 * nb_lanes, 22 * nb_lanes)
    assert_trains(agent, env if nb_lanes == 1 else lanes_of(3))


HOOKS = ["on_train_begin", "on_episode_begin", "on_step_begin", "on_action_begin", "on_action_end", "on_step_end"]
HOOKS += ["on_vector_step_end", "on_episode_end", "on_train_end"]


@pytest.mark.parametrize("hook", HOOKS)
def test_an_error_of_a_callback_leaves_the_agent_usable(hook):
    def fail(self, *args):
        if self.model.step >= 20 or hook == "on_train_begin":
            raise ZeroDivisionError(hook)

    agent, env = dqn(), lanes_of(2)
    callback = type("Broken", (Callback,), {hook: fail})()
    with pytest.raises(ZeroDivisionError, match=hook):
        agent.fit(env, 40, callbacks=[callback], verbose=0)
    assert_trains(agent, env)


def test_an_error_of_the_processor_or_a_start_policy_leaves_the_agent_usable():
    class Broken(Processor):
        def process_reward(self, reward):
            return 1 // 0 if self.broken else reward

    processor = Broken()
    processor.broken = True
    agent, env = dqn(processor=processor), Counting()
    with pytest.raises(ZeroDivisionError):
        agent.fit(env, 20, verbose=0)
    processor.broken = False
    with pytest.raises(ZeroDivisionError):
        agent.fit(env, 20, nb_max_start_steps=3, start_step_policy=lambda o: 1 // 0, verbose=0, seed=1)
    agent.fit(env, 20, verbose=0)
    assert_trains(agent, env)


def test_a_nan_reward_is_refused_at_its_step_and_the_agent_goes_on():
    class Poisoned(Counting):
        def step(self, action):
            observation, reward, *rest = super().step(action)
            return observation, np.nan if self.total == 37 else reward, *rest

    agent, env = dqn(), Poisoned()
    with pytest.raises(ValueError, match="reward nan"):
        agent.fit(env, 100, verbose=0)
    assert agent.step == 36
    assert_trains(agent, env)


def test_huge_rewards_stay_finite_with_delta_clip():
    class Huge(Counting):
        def step(self, action):
            observation, _, *rest = super().step(action)
            return observation, 1e6 * (-1) ** self.total, *rest

    agent = dqn(delta_clip=1.0)
    history = agent.fit(lanes_of(4, lengths=(5,)), 8, verbose=0)
    history = agent.fit(DummyVecEnv(makers(4, Huge)), 800, verbose=0)
    assert np.isfinite(history.history["loss"]).all()


# ---- agents --------------------------------------------------------------------------------------------------------


def test_an_agent_that_implements_act_and_observe_is_all_it_takes():
    class Constant(Agent):
        def act(self, observation):
            return np.full(len(observation), 2)

        def observe(self, transition):
            return None

    agent = Constant()
    agent.compile()
    for env in (Counting(), lanes_of(3)):
        for verbose in (0, 1, 2):
            history = agent.fit(env, 30, verbose=verbose)
            assert len(history.history["episode_reward"]) >= 6
        assert len(agent.test(env, 4, verbose=1, visualize=False).history["episode_reward"]) == 4
    assert agent.step == 180


@pytest.mark.parametrize("missing", ["act", "observe"])
def test_a_method_that_is_missing_is_named(missing):
    methods = {"act": lambda self, observation: np.zeros(len(observation), int), "observe": lambda self, t: None}
    agent = type("Half", (Agent,), {name: m for name, m in methods.items() if name != missing})()
    agent.compile()
    with pytest.raises(NotImplementedError, match=f"Half must implement {missing}"):
        agent.fit(Counting(), 5, verbose=0)


def test_wrong_actions_are_refused():
    class Wrong(Noting):
        def act(self, observation):
            return np.zeros(len(observation) + 1, int)

    with pytest.raises(ValueError, match="needs 3 actions, one per lane"):
        Wrong().fit(lanes_of(3), 5, verbose=0)


@keras.saving.register_keras_serializable(package="tests")
class ValueAgent(ReplayAgent):
    """One-step Q-learning without a target network's lag, to show what a new algorithm costs."""

    logged = ("mean_target",)

    def __init__(self, model, *, nb_actions, **options):
        super().__init__(nb_actions=nb_actions, **options)
        self.model = model

    def targets(self):
        return []

    def loss_fn(self, batch):
        target = batch.reward + batch.discount * (1 - batch.terminal1) * ops.max(self.call(batch.state1), axis=-1)
        target = ops.stop_gradient(target)
        prediction = take(self.call(batch.state0, training=True), batch.action)
        return ops.mean(ops.square(target - prediction)), target, prediction, {"mean_target": ops.mean(target)}

    def explore(self, outputs):
        return np.argmax(outputs, axis=1)


@pytest.mark.parametrize("jit_compile", [False, True])
def test_a_replay_agent_with_a_loss_function_learns(jit_compile):
    agent = ValueAgent(network(), nb_actions=3, memory=SequentialMemory(500), nb_steps_warmup=40, gamma=0.5)
    agent.compile(keras.optimizers.Adam(0.01), metrics=["mae"], jit_compile=jit_compile)
    assert agent.metrics_names == ["loss", "mae", "mean_target"]
    env = lanes_of(2, lengths=(2,))
    first = agent.fit(env, 60, verbose=0).history
    last = agent.fit(env, 600, verbose=0).history
    assert {"loss", "mae", "mean_target"} <= set(last)
    assert last["loss"][-1] < 0.2 * np.nanmax(first["loss"])
    assert last["mean_target"][-1] == pytest.approx(2.0, abs=0.5)  # of 1 + 0.5 * 2 and 2
    assert agent.test(Counting(lengths=(2,)), 2, **QUIET).history["episode_reward"] == [3.0, 3.0]


def test_a_new_compile_or_policy_between_two_fits_takes_effect():
    agent, env = dqn(), Counting(lengths=(7,))
    agent.compile("adam", metrics=["mae"], jit_compile=False)
    agent.fit(env, 20, verbose=0)
    agent.compile("sgd", metrics=["mse", "mae"], jit_compile=False)
    for verbose in (1, 2):
        history = agent.fit(env, 20, verbose=verbose).history
        assert {"loss", "mse", "mae", "mean_q"} <= set(history)
        assert np.isfinite([history[name] for name in ("loss", "mse", "mae", "mean_q")]).all()
    agent.compile("sgd", metrics=["mse"], jit_compile=False)
    agent.policy = annealed()
    agent.policy._set_agent(agent)
    history = agent.fit(env, 20, verbose=2).history
    assert {"loss", "mse", "mean_q", "mean_eps"} <= set(history)
    assert "mae" not in history
    assert np.isfinite(history["mean_eps"]).all()


def test_a_processor_set_between_two_fits_takes_effect():
    class Doubling(Processor):
        def process_reward(self, reward):
            return 2 * reward

    agent, env = Noting(), Counting(lengths=(2,))
    assert agent.fit(env, 4, verbose=0).history["episode_reward"] == [3.0, 3.0]
    agent.processor = Doubling()
    assert agent.fit(env, 4, verbose=0).history["episode_reward"] == [6.0, 6.0]
    agent.processor = None
    assert agent.fit(env, 4, verbose=0).history["episode_reward"] == [3.0, 3.0]


def test_the_optimizer_is_the_users_and_a_new_learning_rate_counts():
    class Freeze(Callback):
        def on_episode_end(self, episode, logs=None):
            self.model.optimizer.learning_rate = 0.0

    agent, optimizer = dqn(), keras.optimizers.SGD(0.1)
    agent.compile(optimizer, jit_compile=False)
    assert agent.optimizer is optimizer
    env = Counting(lengths=(15,))
    agent.fit(env, 15, callbacks=[Freeze()], verbose=0)
    before = agent.model.get_weights()
    agent.fit(env, 15, verbose=0)
    assert_equal(before, agent.model.get_weights())
    assert agent.run_state.nb_updates == 20


@pytest.mark.parametrize("nb_lanes", [1, 3])
def test_agents_that_take_turns_on_one_env_do_not_go_on_with_each_others_episodes(nb_lanes):
    agents = [Noting(), Noting(), Noting()]
    env = Counting(lengths=(50,)) if nb_lanes == 1 else lanes_of(nb_lanes, lengths=(50,))
    for _ in range(3):
        for agent in agents[:2]:
            agent.fit(env, 7 * nb_lanes, verbose=0)
    agents[0].fit(env, 7 * nb_lanes, verbose=0)
    agents[2].test(env, nb_max_episode_steps=3, **QUIET)
    agents[0].fit(env, 7 * nb_lanes, verbose=0)
    for agent in agents[:2]:
        for transition in agent.transitions():
            assert (transition.next_observation - transition.observation == [0, 0, 1]).all()
    firsts = [int(t.observation[0][2]) for t in agents[0].transitions()[::7]]
    assert firsts == [0] * 5


def test_an_agent_goes_on_with_its_episode_only_where_it_has_the_env_to_itself():
    agent, other, env = Noting(), Noting(), Counting(lengths=(50,))
    for nb_resets in (1, 1):
        agent.fit(env, 7, verbose=0)
        other.fit(Counting(), 7, verbose=0)
        assert env.nb_resets == nb_resets
    other.fit(env, 7, verbose=0)
    del other
    for _ in range(2):
        agent.fit(env, 7, verbose=0)
        assert env.nb_resets == 3


def test_metrics_cannot_be_assigned():
    agent = Noting()
    assert agent.metrics == []
    with pytest.raises(AttributeError, match="compile"):
        agent.metrics = ["mae"]


@pytest.mark.parametrize("method", ["step", "reset", "render", "seed", "configure"])
def test_the_old_base_classes_name_what_is_missing(method):
    arguments = [0] if method == "step" else []
    with pytest.raises(NotImplementedError, match=rf"Env must implement {method}\("):
        getattr(Env(), method)(*arguments)
    assert Env().close() is None
    with pytest.raises(NotImplementedError, match="sample"):
        Space().sample()
    with pytest.raises(NotImplementedError, match="contains"):
        Space().contains(0)
