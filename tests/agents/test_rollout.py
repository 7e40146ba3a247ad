"""`RolloutAgent`: lifetime and lanes, rollouts left open, what is logged, refusals, compiled or not."""

import time
import warnings

import gymnasium as gym
import keras
import numpy as np
import pytest
from gymnasium import spaces
from keras import layers, ops

from rl.agents.a2c import A2CAgent
from rl.agents.ppo import PPOAgent
from rl.common.misc_util import tree_map
from rl.common.vec_env import DummyVecEnv
from rl.core import Processor
from tests.toy_envs import Counting

MODES = list(gym.vector.AutoresetMode)
MEASURED = ["explained_variance", "learning_rate", "steps_per_second"]
THREE = spaces.Discrete(3)


def network(nb_outputs, seed=0, shape=(3,)):
    init = [keras.initializers.GlorotUniform(seed=2 * seed + i) for i in range(2)]
    return keras.Sequential(
        [
            layers.Input(shape),
            layers.Flatten(),
            layers.Dense(8, activation="tanh", kernel_initializer=init[0]),
            layers.Dense(nb_outputs, kernel_initializer=init[1]),
        ]
    )


def make_agent(kind=PPOAgent, nb_outputs=3, action_space=THREE, networks=None, compile_options=None, **options):
    if kind is PPOAgent:
        options = {"nb_epochs": 2, "batch_size": 6} | options
    options = {"nb_rollout_steps": 6} | options
    networks = networks or (network(nb_outputs, 1), network(1, 2))
    agent = kind(*networks, action_space, **options)
    agent.compile(**({"optimizer": keras.optimizers.Adam(0.01), "jit_compile": False} | (compile_options or {})))
    return agent


def make_env(lanes=1, mode="SameStep", **options):
    if lanes == 1:
        return Counting(**options)
    return DummyVecEnv([lambda i=i: Counting(i, **options) for i in range(lanes)], autoreset_mode=mode)


def state_of(agent):
    """All that learning changes."""
    return [np.array(x) for x in (*agent.get_weights(), *agent.optimizer.variables)]


def assert_same(a, b, tolerance=0.0):
    for x, y in zip(state_of(a), state_of(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance)


def differ(a, b):
    return any(not np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def watched(agent):
    """The rollouts that an agent learns from, copied before it does, and the metrics that it then returns."""
    rollouts, metrics, take, learn = [], [], agent.storage.rollout, agent._learn

    def taking():
        rollouts.append(tree_map(np.copy, tuple(take())))
        return take()

    def learning():
        values = learn()
        if values is not None:
            metrics.append(dict(zip(agent.metrics_names, values, strict=True)))
        return values

    agent.storage.rollout, agent._learn = taking, learning
    return rollouts, metrics


class Any(gym.Env):
    """Random observations, any action space; episodes of 5 steps, truncated; notes its actions."""

    observation_space = spaces.Box(-1, 1, (3,), np.float32)

    def __init__(self, action_space=THREE):
        self.action_space, self.actions = action_space, []

    def _obs(self):
        return self.np_random.uniform(-1, 1, 3).astype(np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self._obs(), {}

    def step(self, action):
        assert self.action_space.contains(action), (action, self.action_space)
        self.actions.append(np.array(action))
        self.t += 1
        return self._obs(), float(np.sum(action)), False, self.t == 5, {}


# ---- lifetime -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "lanes", "mode"),
    [(PPOAgent, 1, None), (A2CAgent, 1, None), (A2CAgent, 3, "Disabled")] + [(PPOAgent, 3, mode) for mode in MODES],
)
def test_short_fits_equal_one_long_fit_and_tests_between_change_nothing(kind, lanes, mode):
    normalized = {"normalize_observation": True, "normalize_reward": True}
    agents = [make_agent(kind, **normalized) for _ in range(2)]
    envs = [make_env(lanes, mode, truncate=True) for _ in range(2)]
    long, short = agents
    for agent in agents:
        agent.seed(5)
    expected = long.fit(envs[0], nb_steps=120, verbose=0).history["episode_reward"]
    rewards = []
    for part in (7, 50, 1, 22, 40):
        rewards += short.fit(envs[1], nb_steps=part, verbose=0).history.get("episode_reward", [])
        before, noise = state_of(short), short.dice.get_random_state()
        short.test(make_env(2), nb_episodes=3, verbose=0, visualize=False)
        assert not differ(before, state_of(short))
        assert short.dice.get_random_state() == noise
    assert rewards == expected
    assert short.step == long.step and 120 <= long.step < 120 + lanes
    assert short.run_state.nb_updates == long.run_state.nb_updates == int(long.optimizer.iterations)
    assert all(np.isfinite(x).all() for x in state_of(long))
    assert_same(long, short)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", [PPOAgent, A2CAgent])
def test_each_transition_is_learnt_from_and_counted_once_in_every_mode(kind, mode):
    agent = make_agent(kind)
    rollouts, metrics = watched(agent)
    history = agent.fit(make_env(3, mode), nb_steps=100, verbose=0, seed=1)
    assert 100 <= agent.step < 103
    assert np.isfinite(history.history["episode_reward"]).all()
    learnt = sum(int(rollout[-1].sum()) for rollout in rollouts)
    assert learnt + agent.storage.nb_valid == agent.step
    assert len(rollouts) == len(metrics) >= 5
    expected = sum(2 * -(-int(r[-1].sum()) // 6) if kind is PPOAgent else 1 for r in rollouts)
    assert agent.run_state.nb_updates == expected == int(agent.optimizer.iterations)
    if mode is gym.vector.AutoresetMode.NEXT_STEP:
        assert not all(r[-1].all() for r in rollouts)
    # The rows are those of the env: each lane's steps in order, rewards that count them, true successors.
    for lane in range(3):
        keep = np.concatenate([r[-1][:, lane] for r in rollouts])
        state0, reward, state1, terminated = (
            np.concatenate([r[i][:, lane] for r in rollouts])[keep] for i in (0, 2, 3, 4)
        )
        np.testing.assert_array_equal(state0[:, 0, 2] + 1, state1[:, 0, 2])
        np.testing.assert_array_equal(reward, state1[:, 0, 2])
        np.testing.assert_array_equal(state0[:, 0, 1], state1[:, 0, 1])
        goes_on = ~terminated[:-1]
        np.testing.assert_array_equal(state0[1:][goes_on], state1[:-1][goes_on])
        np.testing.assert_array_equal(state0[1:][~goes_on][:, 0, 2], 0)


def test_a_seed_decides_everything():
    agents = [make_agent() for _ in range(3)]
    for agent, seed in zip(agents, (11, 11, 12), strict=True):
        agent.fit(make_env(3), nb_steps=60, verbose=0, seed=seed)
    assert_same(agents[0], agents[1])
    assert differ(state_of(agents[0]), state_of(agents[2]))


def test_numpys_global_seed_decides_everything_where_none_is_given():
    results = []
    for seed in (3, 3, 4):
        np.random.seed(seed)
        agent = make_agent()
        agent.fit(make_env(3), nb_steps=60, verbose=0)
        results.append(state_of(agent))
    assert not differ(*results[:2])
    assert differ(*results[1:])


# ---- rollouts that fit leaves open ----------------------------------------------------------------------------------


def test_an_open_rollout_goes_on_in_the_open_episode_of_the_same_env():
    agent, env = make_agent(), Counting(lengths=(50,))
    rollouts, _ = watched(agent)
    agent.fit(env, nb_steps=4, verbose=0)
    assert not rollouts and agent.storage.nb_valid == 4
    agent.fit(env, nb_steps=3, verbose=0)
    assert len(rollouts) == 1 and agent.storage.nb_valid == 1
    assert not rollouts[0][5].any()
    assert rollouts[0][0][:, 0, 0, 2].tolist() == [0, 1, 2, 3, 4, 5]


def test_an_open_rollout_is_cut_where_another_env_takes_over():
    agent = make_agent(kind=A2CAgent, gamma=0.9, compile_options={"optimizer": keras.optimizers.SGD(0.0)})
    rollouts, metrics = watched(agent)
    agent.fit(Counting(1, lengths=(50,)), nb_steps=4, verbose=0)
    agent.fit(Counting(2, lengths=(50,)), nb_steps=2, verbose=0)
    (rollout,) = rollouts
    assert rollout[0][:, 0, 0, 0].tolist() == [1, 1, 1, 1, 2, 2]
    assert rollout[5][:, 0].tolist() == [False] * 3 + [True] + [False] * 2
    assert not rollout[4].any()  # cut, not terminated
    expected = naive_targets(agent, rollout, 0.9, 1.0)[0]
    assert metrics[0]["value_loss"] == pytest.approx(np.mean((expected - values(agent, rollout[0])) ** 2), rel=1e-4)


def test_another_number_of_lanes_starts_a_new_rollout():
    agent = make_agent()
    rollouts, _ = watched(agent)
    agent.fit(make_env(1), nb_steps=4, verbose=0)
    agent.fit(make_env(3), nb_steps=17, verbose=0)  # 18 are taken
    assert [r[2].shape for r in rollouts] == [(6, 3)]
    agent.fit(make_env(1), nb_steps=5, verbose=0)
    agent.fit(make_env(1), nb_steps=1, verbose=0)
    assert [r[2].shape for r in rollouts] == [(6, 3), (6, 1)]
    assert agent.step == 4 + 18 + 6
    assert all(np.isfinite(x).all() for x in state_of(agent))


def test_an_env_with_observations_of_another_dtype_may_follow():
    class Bytes(Counting):
        observation_space = spaces.Box(0, 255, (3,), np.uint8)

        def _obs(self):
            return super()._obs().astype(np.uint8)

    class Halves(Counting):
        def _obs(self):
            return np.array([0.5, 0.25, self.t], np.float32)

    agent = make_agent()
    rollouts, _ = watched(agent)
    agent.fit(Bytes(), nb_steps=6, verbose=0)
    agent.fit(Halves(), nb_steps=6, verbose=0)
    assert [r[0].dtype for r in rollouts] == [np.uint8, np.float32]
    assert set(rollouts[1][0][:, 0, 0, 0]) == {0.5}


def test_an_open_rollout_never_holds_what_its_arrays_cannot():
    class Bytes(Any):
        observation_space = spaces.Box(0, 255, (3,), np.uint8)

        def _obs(self):
            return self.np_random.integers(0, 255, 3, np.uint8)

    agent = make_agent()
    rollouts, _ = watched(agent)
    agent.fit(Bytes(), nb_steps=4, verbose=0)
    with pytest.raises(ValueError, match="float32.*uint8"):
        agent.fit(Any(), nb_steps=6, verbose=0)
    assert not rollouts


# ---- what is logged -------------------------------------------------------------------------------------------------


def values(agent, states):
    return agent.evaluate(states.reshape(-1, *states.shape[2:]))[1].reshape(states.shape[:2])


def naive_targets(agent, rollout, gamma, lam):
    """Targets and advantages `(T, N)` of a rollout, step by step."""
    state0, _, reward, state1, terminated, ended, valid = rollout
    v0, v1 = values(agent, state0), values(agent, state1)
    advantage = np.zeros(reward.shape)
    for lane in range(reward.shape[1]):
        later = 0.0
        for t in reversed(range(len(reward))):
            if not valid[t, lane]:
                later = 0.0
                continue
            delta = reward[t, lane] + gamma * (not terminated[t, lane]) * v1[t, lane] - v0[t, lane]
            later = delta + gamma * lam * (not ended[t, lane]) * later
            advantage[t, lane] = later
    return advantage + v0, advantage


@pytest.mark.filterwarnings("ignore:A rollout of")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", [PPOAgent, A2CAgent])
def test_user_metrics_compare_targets_with_values_over_the_valid_rows(kind, mode):
    def squared(target, value):
        return ops.mean(ops.square(target - value), axis=-1)

    given = ["mae", keras.metrics.MeanSquaredError("mse"), squared]
    compile_options = {"optimizer": keras.optimizers.SGD(0.0), "metrics": given}
    options = {"batch_size": 8} if kind is PPOAgent else {}
    agent = make_agent(kind, gamma=0.9, lam=0.8, compile_options=compile_options, **options)
    rollouts, metrics = watched(agent)
    agent.fit(make_env(3, mode, truncate=mode is MODES[0]), nb_steps=60, verbose=0, seed=3)
    assert len(rollouts) >= 3
    for rollout, logs in zip(rollouts, metrics, strict=True):
        target, _ = naive_targets(agent, rollout, 0.9, 0.8)
        error = (target - values(agent, rollout[0]))[rollout[-1]]
        assert logs["mae"] == pytest.approx(np.mean(np.abs(error)), rel=1e-4)
        assert logs["mse"] == pytest.approx(np.mean(error**2), rel=1e-4)
        assert logs["squared"] == pytest.approx(np.mean(error**2), rel=1e-4)
        if kind is A2CAgent:
            assert logs["value_loss"] == pytest.approx(np.mean(error**2), rel=1e-4)
        truth = target[rollout[-1]]
        assert logs["explained_variance"] == pytest.approx(1 - np.var(error) / np.var(truth), abs=1e-3)
        assert logs["learning_rate"] == 0


def test_a_metric_that_is_one_number_for_all_rows_is_refused():
    def mean_value(target, value):
        return ops.mean(value)

    with pytest.raises(ValueError, match="'mean_value' must give one number per row"):
        make_agent(compile_options={"metrics": [mean_value]})
    agent = make_agent(compile_options={"metrics": [keras.metrics.RootMeanSquaredError()]})
    history = agent.fit(make_env(3, "NextStep"), nb_steps=40, verbose=0).history
    assert np.isfinite(history["root_mean_squared_error"][-1])


@pytest.mark.parametrize(("kind", "more"), [(PPOAgent, ["approx_kl", "clip_fraction"]), (A2CAgent, [])])
def test_history_has_every_metric_once_per_episode(kind, more):
    agent = make_agent(kind, compile_options={"metrics": ["mae"]})
    names = ["loss", "mae", "policy_loss", "value_loss", "entropy", *more, *MEASURED]
    assert agent.metrics_names == names
    history = agent.fit(make_env(3), nb_steps=200, verbose=0).history
    assert {*names, "episode_reward", "nb_steps", "nb_episode_steps"} <= set(history)
    assert len({len(column) for column in history.values()}) == 1
    for name in names:
        assert np.isfinite(history[name]).sum() > 10, name
    assert np.nanmin(history["steps_per_second"]) > 0
    rate = np.array(history["learning_rate"])
    np.testing.assert_allclose(rate[~np.isnan(rate)], 0.01, rtol=1e-6)


def test_a_learning_rate_schedule_counts_gradient_steps():
    schedule = keras.optimizers.schedules.PolynomialDecay(1.0e-3, 12, 0.0)
    agent = make_agent(compile_options={"optimizer": keras.optimizers.Adam(schedule)})
    _, metrics = watched(agent)
    agent.fit(make_env(3), nb_steps=72, verbose=0)  # four rollouts of 18: two epochs of three batches each
    np.testing.assert_allclose([m["learning_rate"] for m in metrics], [1e-3, 5e-4, 0, 0], atol=1e-9)


def test_compiling_again_starts_the_optimizer_anew_and_keeps_the_weights():
    agent, env = make_agent(), make_env(3)
    agent.fit(env, nb_steps=40, verbose=0)
    before = agent.get_weights()
    agent.compile(keras.optimizers.SGD(0.1), metrics=["mae"], jit_compile=False)
    assert not differ(before, agent.get_weights())
    assert int(agent.optimizer.iterations) == 0
    history = agent.fit(env, nb_steps=60, verbose=0).history
    assert "mae" in history and np.isfinite(history["mae"]).any()
    assert int(agent.optimizer.iterations) > 0
    assert differ(before, agent.get_weights())


# ---- refusals -------------------------------------------------------------------------------------------------------


def test_steps_per_execution_has_no_meaning_here():
    with pytest.raises(ValueError, match="steps_per_execution must be 1"):
        make_agent(compile_options={"steps_per_execution": 2})


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"nb_rollout_steps": 0}, "nb_rollout_steps must be"),
        ({"nb_rollout_steps": 2.5}, "nb_rollout_steps must be"),
        ({"gamma": 1.1}, "gamma must be in"),
        ({"lam": -0.1}, "lam must be in"),
        ({"value_loss_weight": -1}, "value_loss_weight must be"),
        ({"entropy_weight": -1}, "entropy_weight must be"),
        ({"max_grad_norm": 0}, "max_grad_norm must be"),
        ({"nb_epochs": 0}, "nb_epochs must be"),
        ({"batch_size": 1.5}, "batch_size must be"),
        ({"clip_range": 0}, "clip_range must be"),
        ({"clip_range": lambda p: 0.1}, "nb_total_steps must be given for the schedule clip_range"),
        ({"target_kl": 0}, "target_kl must be"),
        ({"action_space": spaces.Dict(a=THREE)}, "action_space must be one env's"),
        ({"action_space": None}, "action_space must be one env's"),
        ({"action_space": spaces.Box(0, 255, (3,), np.uint8)}, "action_space must be one env's"),
        ({"nb_outputs": 4}, "shape"),
        ({"processor": Processor}, "processor must be an instance"),
    ],
)
def test_arguments_are_checked_at_construction(options, text):
    with pytest.raises(ValueError, match=text):
        make_agent(**options)


@pytest.mark.parametrize(
    "networks",
    [
        (lambda: network(3), lambda: network(2)),  # a critic with two outputs
        (lambda: network(3), lambda: None),  # one output and no critic
        (lambda: None, lambda: network(1)),
        (lambda: network(3), lambda: "critic"),
    ],
)
def test_networks_that_do_not_fit_are_refused(networks):
    with pytest.raises(ValueError, match="PPOAgent|actor|critic"):
        make_agent(networks=[make() for make in networks])


@pytest.mark.parametrize(
    ("space", "nb_outputs", "other"),
    [
        (THREE, 3, spaces.Discrete(4)),
        (THREE, 3, spaces.MultiBinary(3)),
        (spaces.MultiDiscrete([2, 3]), 5, spaces.MultiDiscrete([3, 2])),
        (spaces.Box(-1, 1, (2,)), 2, spaces.Box(-1, 1, (3,))),
        (spaces.Box(-1, 1, (2,)), 2, spaces.Box(0, 255, (2,), np.uint8)),
    ],
)
def test_an_env_with_other_actions_is_refused(space, nb_outputs, other):
    agent = make_agent(action_space=space, nb_outputs=nb_outputs)
    with pytest.raises(ValueError, match="action"):
        agent.fit(Any(other), nb_steps=5, verbose=0)
    assert agent.step == 0
    agent.fit(Any(space), nb_steps=12, verbose=0)
    assert agent.step == 12


def test_the_action_space_of_all_lanes_is_not_that_of_one():
    env = gym.vector.SyncVectorEnv([Any] * 3)
    agent = make_agent(action_space=env.action_space, nb_outputs=9)
    with pytest.raises(ValueError, match=r"MultiDiscrete\(\[3 3 3\]\).*env.single_action_space"):
        agent.fit(env, nb_steps=5, verbose=0)


def test_an_env_with_other_observations_is_refused():
    env = gym.make("CartPole-v1")
    agent = make_agent(action_space=env.action_space, nb_outputs=2)
    with pytest.raises(ValueError, match=r"shape \(3,\)"):
        agent.fit(env, nb_steps=5, verbose=0)
    narrow = make_agent(action_space=env.action_space, networks=(network(2, shape=(4,)), network(1, shape=(3,))))
    with pytest.raises(ValueError, match="critic"):
        narrow.fit(env, nb_steps=5, verbose=0)


def test_batches_that_do_not_divide_the_rollout_are_told_of_once():
    agent = make_agent(batch_size=4)
    with pytest.warns(UserWarning, match="6 x 1 steps, batch_size=4: the last batch of each epoch has 2"):
        agent.fit(make_env(), nb_steps=12, verbose=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        agent.fit(make_env(), nb_steps=12, verbose=0)
        make_agent(batch_size=3).fit(make_env(), nb_steps=12, verbose=0)


# ---- compiled or not ------------------------------------------------------------------------------------------------

FULL = {
    "batch_size": 8,
    "normalize_observation": True,
    "normalize_reward": True,
    "target_kl": 0.02,
    "clip_value_range": 0.2,
}


@pytest.mark.parametrize(("kind", "options"), [(PPOAgent, FULL), (A2CAgent, {})])
@pytest.mark.parametrize("other", [{"run_eagerly": True}, {"jit_compile": True}], ids=["eager", "xla"])
@pytest.mark.filterwarnings("ignore:A rollout of")
def test_eager_compiled_and_xla_give_the_same_weights(kind, options, other):
    agents = [make_agent(kind, **options, compile_options=o) for o in ({}, other)]
    histories = []
    for agent in agents:
        env = make_env(3, "NextStep", truncate=True)
        histories.append(agent.fit(env, nb_steps=60, verbose=0, seed=2).history["episode_reward"])
    assert histories[0] == histories[1]
    assert agents[0].run_state.nb_updates == agents[1].run_state.nb_updates
    assert_same(*agents, 2e-5)


@pytest.mark.parametrize("mode", MODES)
def test_nothing_is_traced_anew_after_the_first_rollout(mode):
    agent, env = make_agent(normalize_reward=True), make_env(3, mode)
    agent.fit(env, nb_steps=30, verbose=0)
    agent.test(env, nb_episodes=1, verbose=0, visualize=False)
    before = [f.nb_traces for f in agent._functions]
    assert before == [1, 1, 1, 0]
    rollouts, _ = watched(agent)
    agent.fit(env, nb_steps=200, verbose=0)
    agent.test(env, nb_episodes=3, verbose=0, visualize=False)
    assert [f.nb_traces for f in agent._functions] == before
    if mode is gym.vector.AutoresetMode.NEXT_STEP:
        assert len({int(r[-1].sum()) for r in rollouts}) > 1


def test_a_pause_between_two_fits_is_not_counted_as_time_of_the_rollout():
    agent, env = make_agent(nb_rollout_steps=8), Counting()
    agent.fit(env, nb_steps=12, verbose=0)
    time.sleep(0.5)
    history = agent.fit(env, nb_steps=12, verbose=0).history["steps_per_second"]
    assert np.nanmin(history) > 8 / 0.4


@pytest.mark.parametrize("space", [spaces.Discrete(3, start=5), spaces.Box(-1, 1, (3,), np.float32)])
def test_an_env_that_tells_no_action_space_takes_actions_that_need_no_fitting(space):
    make_agent().check_spaces(None, None)
    agent = make_agent(action_space=space)
    agent.check_spaces(None, space)
    with pytest.raises(ValueError, match=r"action_space must be Discrete, from 0 up, .* \(fix: set env.action_space\)"):
        agent.check_spaces(None, None)
