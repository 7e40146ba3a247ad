"""SARSA: pairs against a naive list of steps, fixed points, what a lane's end does, refusals."""

import gymnasium as gym
import keras
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

from rl.agents.sarsa import SARSAAgent, SarsaAgent
from rl.callbacks import Callback
from rl.common.vec_env import DummyVecEnv
from rl.policy import BoltzmannGumbelQPolicy, BoltzmannQPolicy, EpsGreedyQPolicy, LinearAnnealedPolicy
from tests.toy_envs import ConstantReward, Counting, TwoStateMDP

QUIET = {"verbose": 0, "visualize": False}
MODES = list(AutoresetMode)


def network(nb_inputs=3, nb_actions=3, seed=0, window=True):
    init = [keras.initializers.GlorotUniform(seed=seed + i) for i in range(2)]
    shape = (1, nb_inputs) if window else (nb_inputs,)
    return keras.Sequential(
        [
            keras.layers.Input(shape),
            keras.layers.Flatten(),
            keras.layers.Dense(8, activation="tanh", kernel_initializer=init[0]),
            keras.layers.Dense(nb_actions, kernel_initializer=init[1]),
        ]
    )


def make_agent(model=None, nb_actions=3, optimizer=None, compile_options=None, **options):
    agent = SARSAAgent(model or network(nb_actions=nb_actions), nb_actions, **({"nb_steps_warmup": 0} | options))
    agent.compile(optimizer or keras.optimizers.SGD(0.01), jit_compile=False, **(compile_options or {}))
    return agent


def make_env(lanes=1, mode=AutoresetMode.SAME_STEP, **options):
    if lanes == 1:
        return Counting(**options)
    return DummyVecEnv([lambda i=i: Counting(i, **options) for i in range(lanes)], autoreset_mode=mode)


def pairs_of(agent):
    """The complete pairs, noted as they come; nothing is learnt from them."""
    noted = []

    def noting(nb_lanes):
        noted.extend(agent._trails.rows)
        agent._trails.rows.clear()

    object.__setattr__(agent, "_learn", noting)
    return noted


class Steps(Callback):
    """All steps by lane and episode: (observation acted on, action, reward, next observation)."""

    def __init__(self):
        super().__init__()
        self.episodes = {}

    def on_step_end(self, step, logs=None):
        row = (logs["action"], logs["reward"], np.array(logs["observation"]))
        self.episodes.setdefault((logs["lane"], logs["episode"]), []).append(row)


# ---- pairs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3, 10])
@pytest.mark.parametrize("truncate", [False, True])
@pytest.mark.parametrize("lanes", [1, 2, 3])
@pytest.mark.parametrize("mode", MODES, ids=lambda m: m.value)
def test_pairs_are_those_of_a_naive_list_of_steps(n, truncate, lanes, mode):
    if lanes == 1 and mode is not MODES[0]:
        return
    gamma = 0.9
    agent = make_agent(nb_return_steps=n, gamma=gamma, policy=EpsGreedyQPolicy(1.0))
    pairs, steps = pairs_of(agent), Steps()
    agent.fit(make_env(lanes, mode, truncate=truncate), nb_steps=40 * lanes, callbacks=[steps], seed=1, **QUIET)

    expected = {}
    for (lane, episode), rows in steps.episodes.items():
        number, count = rows[0][2][0], rows[0][2][1]
        ended = len(rows) == (3, 5, 4)[int(count) % 3]
        assert number == (lane if lanes > 1 else 0)
        for t, (action, _, _) in enumerate(rows):
            last = min(t + n, len(rows))
            if last == len(rows) and not ended:
                continue  # not complete yet
            total = sum(gamma ** (i - t) * rows[i][1] for i in range(t, last))
            terminal = float(last == len(rows) and not truncate)
            chosen = rows[last][0] if last < len(rows) else None  # after the end nobody chooses, or a draw decides
            expected[(lane, episode, t)] = (action, total, rows[last - 1][2], chosen, terminal, gamma ** (last - t))

    ids = {(lane, rows[0][2][1]): episode for (lane, episode), rows in steps.episodes.items()}
    found = {}
    for pair in pairs:
        number, count, t = pair.state0[0]
        lane = int(number)
        found[(lane, ids[(lane, count)], int(t))] = pair
    assert found.keys() == expected.keys()
    assert len(pairs) == len(found) > 20
    for key, (action, total, state1, chosen, terminal, discount) in expected.items():
        pair = found[key]
        assert pair.action == action
        assert pair.reward == pytest.approx(total, rel=1e-6)
        np.testing.assert_array_equal(pair.state1[0], state1)
        assert pair.terminal1 == terminal
        assert pair.discount == pytest.approx(discount, rel=1e-6)
        if chosen is not None:
            np.testing.assert_array_equal(pair.policy1, np.eye(3)[chosen])
        elif terminal:
            assert not pair.policy1.any()
        else:
            assert sorted(pair.policy1) == [0, 0, 1]


def test_expected_sarsa_takes_the_policys_probabilities():
    agent = make_agent(expected=True, policy=EpsGreedyQPolicy(0.3))
    pairs = pairs_of(agent)
    agent.fit(make_env(2, truncate=True), nb_steps=40, seed=1, **QUIET)
    for pair in pairs:
        expected = EpsGreedyQPolicy(0.3).probabilities(agent.evaluate(pair.state1[None]))[0]
        np.testing.assert_allclose(pair.policy1, expected, rtol=1e-6)


def test_one_update_against_the_equation():
    gamma, rate = 0.9, 0.1
    model = keras.Sequential([keras.Input((1, 3)), keras.layers.Flatten(), keras.layers.Dense(3, use_bias=False)])
    agent = make_agent(model, gamma=gamma, optimizer=keras.optimizers.SGD(rate), policy=EpsGreedyQPolicy(1.0))
    steps = Steps()
    w = np.array(model.get_weights()[0], np.float64)
    agent.fit(make_env(), nb_steps=5, callbacks=[steps], seed=3, **QUIET)
    first, second = (steps.episodes[(0, k)] for k in (0, 1))  # of 3 and 5 steps; two of the second are taken
    observations = [[np.array([0.0, k, t]) for t in range(6)] for k in (0, 1)]
    for k, rows, nb_pairs in ((0, first, 3), (1, second, 1)):
        for t in range(nb_pairs):
            s0, s1 = observations[k][t], observations[k][t + 1]
            a0, r, _ = rows[t]
            end = k == 0 and t == 2
            y = r + (0 if end else gamma * (s1 @ w)[rows[t + 1][0]])
            w[:, a0] += rate * (y - s0 @ w[:, a0]) * s0
    np.testing.assert_allclose(model.get_weights()[0], w, rtol=1e-5)
    assert agent.run_state.nb_updates == 4


# ---- fixed points ------------------------------------------------------------------------------------------------

SARSA_FIXED_POINT = np.array([[0.803939, 0.903190], [1.0, 1.003939]])  # of epsilon-greedy with epsilon 0.2


@pytest.mark.parametrize(
    ("options", "lanes"),
    [({}, 1), ({}, 4), ({"expected": True}, 4), ({"nb_return_steps": 3}, 4)],
    ids=["sarsa-1", "sarsa-4", "expected-4", "n=3-4"],
)
def test_the_fixed_point_is_that_of_the_policy_and_not_q_star(options, lanes):
    class FromEveryPair(TwoStateMDP):  # both states and actions occur: the policy is followed after the first step
        pass

    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2, use_bias=False, kernel_initializer="zeros")])
    rate = keras.optimizers.schedules.InverseTimeDecay(0.3, 500, 1.0)
    agent = make_agent(
        model,
        nb_actions=2,
        gamma=TwoStateMDP.GAMMA,
        policy=EpsGreedyQPolicy(0.2),
        optimizer=keras.optimizers.SGD(rate),
        **options,
    )
    env = FromEveryPair() if lanes == 1 else DummyVecEnv([FromEveryPair] * lanes)
    agent.fit(env, nb_steps=16_000, seed=2, **QUIET)
    q = agent.compute_batch_q_values(np.eye(2, dtype="float32")[:, None])
    if "nb_return_steps" in options:  # its first n - 1 actions are the policy's, too: the same fixed point
        np.testing.assert_allclose(q, SARSA_FIXED_POINT, atol=0.04)
    else:
        np.testing.assert_allclose(q, SARSA_FIXED_POINT, atol=0.02)
    assert np.abs(q - TwoStateMDP.Q_STAR).max() > 0.03


@pytest.mark.parametrize("limit", [5])
def test_a_time_limit_is_not_the_end(limit):
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(2, use_bias=False)])
    agent = make_agent(model, nb_actions=2, gamma=0.9, optimizer=keras.optimizers.SGD(0.1))
    agent.fit(DummyVecEnv([lambda: ConstantReward(limit)] * 2), nb_steps=4000, seed=1, **QUIET)
    np.testing.assert_allclose(agent.compute_q_values([np.ones(1, "float32")]), 10.0, atol=0.1)


# ---- schedule ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lanes", [1, 3, 8])
@pytest.mark.parametrize("interval", [1, 4, 16])
@pytest.mark.parametrize("execution", [1, 3])
def test_each_gradient_step_learns_from_train_interval_pairs(lanes, interval, execution):
    agent = make_agent(train_interval=interval, compile_options={"steps_per_execution": execution})
    agent.fit(make_env(lanes), nb_steps=48, seed=1, **QUIET)
    agent.fit(make_env(lanes), nb_steps=48, **QUIET)
    waiting = len(agent._trails.rows)
    nb_updates = agent.run_state.nb_updates
    assert int(agent.optimizer.iterations) == nb_updates
    assert waiting < interval * execution
    complete = nb_updates * interval + waiting
    assert 96 - 2 * lanes <= complete <= 96  # what the lanes have open, when they are left and at the end, is not
    assert [f.nb_traces for f in agent._functions] == [1, 1]


def test_warm_up_steps_are_not_learnt_from():
    agent = make_agent(nb_steps_warmup=20)
    before = agent.get_weights()
    agent.fit(make_env(2), nb_steps=20, seed=1, **QUIET)
    for a, b in zip(before, agent.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    agent.fit(make_env(2), nb_steps=4, **QUIET)
    assert 0 < agent.run_state.nb_updates <= 4


def test_a_test_changes_nothing_and_is_greedy():
    agent = make_agent(policy=EpsGreedyQPolicy(0.5))
    env = make_env(2)
    agent.fit(env, nb_steps=30, seed=1, **QUIET)
    before, random = agent.get_weights(), agent.policy.get_random_state()
    actions = []

    class Actions(Callback):
        def on_step_end(self, step, logs=None):
            actions.append((logs["observation"], logs["action"]))

    agent.test(make_env(), nb_episodes=2, callbacks=[Actions()], **QUIET)
    assert agent.policy.get_random_state() == random
    for a, b in zip(before, agent.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    for (observation, _), (_, action) in zip(actions, actions[1:], strict=False):
        if observation[2] < 3:
            assert action == agent.compute_q_values([observation]).argmax()


# ---- files, options, refusals -------------------------------------------------------------------------------------


def test_saved_and_loaded(tmp_path):
    policy = LinearAnnealedPolicy(EpsGreedyQPolicy(), "eps", 1.0, 0.1, 0.0, 100)
    agent = make_agent(policy=policy, nb_return_steps=2, expected=True, train_interval=3)
    agent.fit(make_env(), nb_steps=30, seed=1, **QUIET)
    agent.save(tmp_path / "agent.keras")
    loaded = keras.saving.load_model(tmp_path / "agent.keras")
    states = np.random.default_rng(0).normal(size=(4, 1, 3)).astype("float32")
    np.testing.assert_array_equal(agent.evaluate(states), loaded.evaluate(states))
    assert (loaded.nb_return_steps, loaded.expected, loaded.train_interval, loaded.step) == (2, True, 3, 30)
    loaded.fit(make_env(), nb_steps=10, **QUIET)
    agent.save_weights(tmp_path / "w.h5f")
    other = make_agent(network(seed=7))
    other.load_weights(tmp_path / "w.h5f")
    np.testing.assert_array_equal(agent.evaluate(states), other.evaluate(states))


def test_dict_observations_xla_and_user_metrics():
    class Parts(Counting):
        observation_space = gym.spaces.Dict(
            a=gym.spaces.Box(-9, 9, (2,), np.float32), b=gym.spaces.Box(-9, 9, (1,), np.float32)
        )

        def _obs(self):
            whole = super()._obs()
            return {"a": whole[:2], "b": whole[2:]}

    inputs = {"b": keras.Input((1,), name="b"), "a": keras.Input((2,), name="a")}
    joined = keras.layers.Concatenate()([inputs["a"], inputs["b"]])
    agent = SARSAAgent(keras.Model(inputs, keras.layers.Dense(3)(joined)), 3, policy=BoltzmannQPolicy())
    agent.compile("adam", metrics=["mae"])
    history = agent.fit(DummyVecEnv([Parts] * 3), nb_steps=60, seed=1, **QUIET).history
    assert agent.metrics_names == ["loss", "mae", "mean_q"]
    assert np.isfinite([history[name][-1] for name in agent.metrics_names]).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nb_actions": 2}, r"output has shape \(None, 3\), expected \(None, 2\)"),
        ({"gamma": 1.5}, r"gamma must be in \[0, 1\], got 1.5"),
        ({"train_interval": 0}, "train_interval must be a whole number of at least 1, got 0"),
        ({"nb_return_steps": 1.5}, "nb_return_steps must be a whole number of at least 1, got 1.5"),
        ({"nb_steps_warmup": -1}, "nb_steps_warmup must be at least 0"),
        ({"delta_clip": 0}, "delta_clip must be positive"),
        ({"policy": EpsGreedyQPolicy}, "policy must be an instance of rl.policy.Policy"),
        ({"expected": True, "policy": BoltzmannGumbelQPolicy()}, "BoltzmannGumbelQPolicy cannot tell the probab"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        SARSAAgent(network(), **({"nb_actions": 3} | options))


def test_an_env_that_does_not_fit():
    with pytest.raises(ValueError, match="SARSAAgent chooses one of nb_actions discrete actions"):
        make_agent(network(3)).fit(gym.make("Pendulum-v1"), nb_steps=10, **QUIET)
    with pytest.raises(ValueError, match="has shape"):
        make_agent(network(4)).fit(make_env(), nb_steps=10, **QUIET)


def test_a_loss_that_is_not_finite_is_an_error_and_leaves_the_weights():
    agent = make_agent(optimizer=keras.optimizers.SGD(1e30))
    with pytest.raises(FloatingPointError, match="The weights are the last good ones"):
        agent.fit(make_env(2), nb_steps=200, seed=1, **QUIET)
    assert all(np.isfinite(w).all() for w in agent.get_weights())


def test_keras_rls_other_name():
    assert SarsaAgent is SARSAAgent


def test_a_test_between_the_choice_of_an_action_and_the_step_changes_no_pair():
    class Tests(Callback):
        def on_action_end(self, action, logs=None):
            self.model.test(make_env(2), nb_episodes=1, **QUIET)

    results = []
    for callbacks in ([], [Tests()]):
        agent = make_agent(policy=EpsGreedyQPolicy(0.5), expected=True)
        agent.fit(make_env(), nb_steps=12, callbacks=callbacks, seed=1, **QUIET)
        results.append(agent.get_weights())
    for a, b in zip(*results, strict=True):
        np.testing.assert_array_equal(a, b)
