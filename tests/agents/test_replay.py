"""`ReplayAgent`: schedules in env steps, fused updates, lifetime counters, refusals."""

import gymnasium as gym
import keras
import numpy as np
import pytest

from rl.agents.dqn import DQNAgent
from rl.common.vec_env import DummyVecEnv
from rl.memory import SequentialMemory
from rl.policy import EpsGreedyQPolicy, GreedyQPolicy, LinearAnnealedPolicy
from tests.toy_envs import Counting


def network(nb_inputs=3, nb_actions=3, window=1, seed=0):
    init = [keras.initializers.GlorotUniform(seed=seed + i) for i in range(2)]
    return keras.Sequential(
        [
            keras.layers.Input((window, nb_inputs)),
            keras.layers.Flatten(),
            keras.layers.Dense(16, activation="tanh", kernel_initializer=init[0]),
            keras.layers.Dense(nb_actions, kernel_initializer=init[1]),
        ]
    )


def make_agent(window=1, compile_options=None, **options):
    options = {"nb_steps_warmup": 10, "target_model_update": 0.1, "batch_size": 8} | options
    memory = SequentialMemory(500, window_length=window)
    agent = DQNAgent(network(window=window), nb_actions=3, memory=memory, **options)
    agent.compile("adam", **({"jit_compile": False} | (compile_options or {})))
    return agent


def make_env(lanes):
    return Counting() if lanes == 1 else DummyVecEnv([lambda i=i: Counting(i) for i in range(lanes)])


def weights(agent):
    return [np.array(w) for w in agent.get_weights()]


def assert_same(a, b, tolerance=0.0):
    for x, y in zip(weights(a), weights(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance)


# ---- schedules ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lanes", "interval", "warmup"),
    [(1, 1, 0), (1, 3, 10), (1, 4, 11), (3, 1, 10), (3, 3, 11), (3, 4, 0), (8, 1, 11), (8, 3, 0), (8, 4, 10)],
)
def test_the_replay_ratio_does_not_depend_on_the_number_of_lanes(lanes, interval, warmup):
    agent = make_agent(train_interval=interval, nb_steps_warmup=warmup)
    agent.fit(make_env(lanes), nb_steps=48, verbose=0)
    assert agent.step == 48
    expected = sum(1 for step in range(1, 49) if step > warmup and step % interval == 0)
    assert agent.run_state.nb_updates == expected
    assert int(agent.optimizer.iterations) == expected


@pytest.mark.parametrize("lanes", [1, 3])
def test_steps_per_execution_collects_updates_and_loses_none(lanes):
    agent = make_agent(compile_options={"steps_per_execution": 7})
    agent.fit(make_env(lanes), nb_steps=30, verbose=0)
    owed = agent.step - 10
    assert agent.run_state.nb_updates == owed - owed % 7
    assert agent.run_state.owed == owed % 7


@pytest.mark.parametrize("lanes", [1, 3])
def test_hard_copies_fall_on_multiples_of_the_interval(lanes):
    agent = make_agent(target_model_update=30)
    env = make_env(lanes)
    agent.fit(env, nb_steps=27, verbose=0)
    start = agent.target_model.get_weights()
    assert not np.array_equal(start[0], agent.model.get_weights()[0])
    agent.fit(env, nb_steps=3, verbose=0)
    for target, online in zip(agent.target_model.get_weights(), agent.model.get_weights(), strict=True):
        np.testing.assert_array_equal(target, online)
    agent.fit(env, nb_steps=15, verbose=0)
    assert not np.array_equal(agent.target_model.get_weights()[0], agent.model.get_weights()[0])


def test_soft_updates_move_the_target_by_tau_after_each_gradient_step():
    agent = make_agent(target_model_update=0.25)
    env = make_env(1)
    agent.fit(env, nb_steps=10, verbose=0)
    before = agent.target_model.get_weights()
    agent.fit(env, nb_steps=1, verbose=0)
    for old, new, online in zip(before, agent.target_model.get_weights(), agent.model.get_weights(), strict=True):
        np.testing.assert_allclose(new, 0.75 * old + 0.25 * online, atol=1e-6)


@pytest.mark.parametrize("lanes", [1, 3])
def test_memory_interval_stores_every_kth_step_of_each_lane(lanes):
    agent = make_agent(memory_interval=3)
    agent.fit(make_env(lanes), nb_steps=9 * lanes, verbose=0)
    assert agent.memory.nb_entries == 3 * lanes
    numbers = sorted(int(agent.memory.observations[i][0]) for i in range(agent.memory.nb_entries))
    assert numbers == sorted(list(range(lanes)) * 3)


@pytest.mark.parametrize("lanes", [1, 3])
def test_windows_in_a_test_reach_back_by_the_memory_interval_as_in_training(lanes):
    agent = make_agent(window=3, memory_interval=2)
    agent.fit(make_env(lanes), nb_steps=24, verbose=0, seed=0)
    seen = []

    class Seeing(GreedyQPolicy):
        vectorized = True

        def select_action(self, q_values):
            seen.append(agent.run_state.windows.states(agent.seen)[0, :, 2].tolist())
            return super().select_action(q_values)

    act = agent.act

    def noting(observation):
        agent.seen = observation
        return act(observation)

    agent.act, agent.test_policy = noting, Seeing()
    env = Counting(lengths=(7,)) if lanes == 1 else DummyVecEnv([lambda i=i: Counting(i, (7,)) for i in range(lanes)])
    agent.test(env, nb_episodes=lanes, verbose=0, visualize=False)
    # Steps 0, 2, 4, ... are remembered, the others only seen.
    assert seen == [[0, 0, 0], [0, 0, 1], [0, 0, 2], [0, 2, 3], [0, 2, 4], [2, 4, 5], [2, 4, 6]]


# ---- fused updates ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tau", [0.1, 1000])
def test_k_updates_in_one_call_equal_k_calls(tau):
    one, many = make_agent(target_model_update=tau), make_agent(target_model_update=tau)
    for agent in (one, many):
        agent.fit(make_env(1), nb_steps=10, verbose=0, seed=4)
    batches = [one.memory.sample_batch(8, k=1) for _ in range(5)]
    state = np.zeros((1, 1, 3), np.float32)
    for agent in (one, many):
        agent._make_functions()
    singles = [one._functions[1](tuple(b)[:-1], np.int32(1), state)[0] for b in batches]
    stacked = tuple(np.concatenate([np.asarray(b[i]) for b in batches]) for i in range(7))
    fused, outputs = many._functions[1](stacked, np.int32(5), state)
    assert_same(one, many, 1e-6)
    np.testing.assert_allclose(fused, np.mean(singles, axis=0), rtol=1e-5)
    np.testing.assert_allclose(outputs, many.evaluate(state), atol=1e-6)


def test_padding_is_not_trained_on():
    exact, padded = make_agent(), make_agent()
    for agent in (exact, padded):
        agent.fit(make_env(1), nb_steps=10, verbose=0, seed=4)
        agent._make_functions()
    fields = tuple(exact.memory.sample_batch(8, k=2))[:-1]
    rubbish = tuple(np.concatenate([x, np.full_like(x, 77)[:1]]) for x in fields)
    state = np.zeros((1, 1, 3), np.float32)
    exact._functions[1](fields, np.int32(2), state)
    padded._functions[1](rubbish, np.int32(2), state)
    assert_same(exact, padded, 1e-6)


@pytest.mark.parametrize("mode", list(gym.vector.AutoresetMode))
def test_nothing_is_traced_anew_after_warm_up(mode):
    agent = make_agent(train_interval=2)
    env = DummyVecEnv([lambda i=i: Counting(i) for i in range(3)], autoreset_mode=mode)
    agent.fit(env, nb_steps=30, verbose=0)
    before = [f.nb_traces for f in agent._functions]
    agent.fit(env, nb_steps=200, verbose=0)
    assert [f.nb_traces for f in agent._functions] == before
    assert before[:2] == [1, 1]


def test_xla_gives_the_same_weights():
    plain, xla = make_agent(), make_agent(compile_options={"jit_compile": True})
    for agent in (plain, xla):
        agent.fit(make_env(3), nb_steps=60, verbose=0, seed=2)
    assert_same(plain, xla, 1e-4)


def convolutional():
    return keras.Sequential(
        [
            keras.layers.Input((1, 8, 8)),
            keras.layers.Permute((2, 3, 1)),
            keras.Sequential([keras.layers.Conv2D(2, 3), keras.layers.Flatten()]),
            keras.layers.Dense(3),
        ]
    )


@pytest.mark.parametrize(
    ("model", "given", "used"),
    [(network, "auto", True), (network, False, False), (convolutional, "auto", False), (convolutional, True, True)],
)
def test_xla_is_used_where_it_pays(model, given, used):
    agent = DQNAgent(model(), nb_actions=3, memory=SequentialMemory(100, window_length=1))
    agent.compile("adam", jit_compile=given)
    assert agent.jit_compile is used
    assert agent.get_compile_config()["jit_compile"] == given


def test_run_eagerly_gives_the_same_weights():
    plain, eager = make_agent(), make_agent(compile_options={"run_eagerly": True})
    for agent in (plain, eager):
        agent.fit(make_env(1), nb_steps=20, verbose=0, seed=2)
    assert_same(plain, eager, 1e-5)


# ---- lifetime -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("lanes", "window", "update"), [(1, 1, 0.1), (1, 2, 25), (3, 1, 25), (3, 2, 0.1)])
def test_short_fits_equal_one_long_fit_and_tests_between_change_nothing(lanes, window, update):
    def annealed():
        return LinearAnnealedPolicy(EpsGreedyQPolicy(), "eps", 1.0, 0.1, 0.0, 100)

    options = {"window": window, "target_model_update": update}
    long = make_agent(policy=annealed(), **options)
    short = make_agent(policy=annealed(), **options)
    long_env, short_env = make_env(lanes), make_env(lanes)
    for agent in (long, short):
        agent.seed(5)
    long_history = long.fit(long_env, nb_steps=120, verbose=0).history["episode_reward"]
    rewards = []
    for part in (7, 50, 1, 22, 40):
        rewards += short.fit(short_env, nb_steps=part, verbose=0).history.get("episode_reward", [])
        short.test(make_env(2), nb_episodes=3, verbose=0, visualize=False)
    assert short.step == long.step
    assert short.run_state.nb_updates == long.run_state.nb_updates
    assert rewards == long_history
    assert_same(long, short)


def test_a_test_on_the_training_env_starts_new_episodes_in_the_next_fit():
    agent, env = make_agent(), Counting(lengths=(50,))
    agent.fit(env, nb_steps=20, verbose=0)
    agent.test(env, nb_episodes=1, verbose=0, visualize=False)
    resets = env.nb_resets
    agent.fit(env, nb_steps=5, verbose=0)
    assert env.nb_resets == resets + 1


def test_a_seed_starts_anew_and_decides_everything():
    results = []
    for _ in range(2):
        agent = make_agent()
        agent.fit(make_env(3), nb_steps=60, verbose=0, seed=11)
        results.append(agent)
    assert_same(*results)
    other = make_agent()
    other.fit(make_env(3), nb_steps=60, verbose=0, seed=12)
    assert not np.array_equal(weights(other)[0], weights(results[0])[0])


# ---- refusals -------------------------------------------------------------------------------------------------------


def test_a_nan_loss_stops_names_the_step_and_keeps_the_last_good_weights():
    class Poisoned(SequentialMemory):
        def sample_batch(self, *args, **kwargs):
            batch = super().sample_batch(*args, **kwargs)
            if agent.step > 30:
                batch.reward[:] = np.nan
            return batch

    agent = DQNAgent(network(), nb_actions=3, memory=Poisoned(100, window_length=1), nb_steps_warmup=5)
    agent.compile("adam", jit_compile=False)
    env = Counting()
    agent.fit(env, nb_steps=30, verbose=0)
    good = weights(agent)
    with pytest.raises(FloatingPointError, match="env step 31 .*last good"):
        agent.fit(env, nb_steps=30, verbose=0)
    for before, after in zip(good, weights(agent), strict=True):
        np.testing.assert_array_equal(before, after)
    assert not agent.training


def test_an_exploding_gradient_is_refused_as_well():
    @keras.saving.register_keras_serializable(package="tests")
    class Kink(keras.layers.Layer):
        def call(self, x):
            return x + keras.ops.sqrt(keras.ops.abs(0.0 * x))  # finite, but its gradient is not

    model = keras.Sequential(
        [keras.layers.Input((1, 3)), keras.layers.Flatten(), keras.layers.Dense(4), Kink(), keras.layers.Dense(3)]
    )
    agent = DQNAgent(model, nb_actions=3, memory=SequentialMemory(100, window_length=1), nb_steps_warmup=5)
    agent.compile("adam", jit_compile=False)
    before = weights(agent)
    with pytest.raises(FloatingPointError):
        agent.fit(Counting(), nb_steps=30, verbose=0)
    for old, new in zip(before, weights(agent), strict=True):
        np.testing.assert_array_equal(old, new)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"gamma": 1.5}, "gamma must be in"),
        ({"batch_size": 0}, "batch_size must be"),
        ({"train_interval": 0.5}, "train_interval must be"),
        ({"memory_interval": -1}, "memory_interval must be"),
        ({"target_model_update": -1}, "target_model_update must be positive"),
        ({"delta_clip": 0}, "delta_clip must be positive"),
        ({"nb_steps_warmup": -1}, "nb_steps_warmup must be"),
    ],
)
def test_arguments_are_checked_at_construction(options, text):
    with pytest.raises(ValueError, match=text):
        make_agent(**options)


def test_a_memory_that_is_none_is_refused():
    with pytest.raises(ValueError, match="SequentialMemory"):
        DQNAgent(network(), nb_actions=3, memory=[])


def test_delta_range_warns_and_sets_delta_clip():
    with pytest.warns(DeprecationWarning, match="delta_clip=1"):
        agent = make_agent(delta_range=(-1.0, 1.0))
    assert agent.delta_clip == 1.0


def test_training_by_hand_with_forward_and_backward():
    agents = [make_agent(), make_agent()]
    env = Counting(lengths=(4,))
    for agent in agents:
        agent.training = True
    for _ in range(15):
        observation, _ = env.reset()
        end = False
        while not end:
            for agent in agents:  # two agents that share an env, turn by turn
                action = agent.forward(observation)
                assert 0 <= int(action) < 3
            observation, reward, end, _, _ = env.step(action)
            for agent in agents:
                metrics = agent.backward(reward, terminal=end)
                assert len(metrics) == len(agent.metrics_names)
        for agent in agents:  # keras-rl's trailing pair stores the last observation
            agent.forward(observation)
            agent.backward(0.0, terminal=False)
    assert agents[0].run_state.nb_updates > 30
    assert np.isfinite(metrics).all()


@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bad_observation_is_named_and_not_stored(lanes, bad):
    class Poisoned(Counting):
        def _obs(self):
            once = self.number == 0 and self.total == 25 and not hasattr(self, "done")
            if once:
                self.done = True
            return np.array([self.number, bad if once else 1, 2], np.float32)

    env = Poisoned() if lanes == 1 else DummyVecEnv([lambda i=i: Poisoned(i) for i in range(lanes)])
    agent = make_agent()
    with pytest.raises(ValueError, match="an observation with NaN or infinity in lane 0, step"):
        agent.fit(env, nb_steps=200, verbose=0)
    assert agent.memory.nb_entries == 24 * lanes
    agent.fit(env, nb_steps=20, verbose=0)  # the memory is clean: training can go on
    assert np.isfinite(weights(agent)[0]).all()


@pytest.mark.parametrize("lanes", [1, 3])
def test_past_the_warm_up_with_an_empty_memory_waits_for_a_batch_and_catches_nothing_up(lanes):
    agent = make_agent()  # batches of 8
    agent.step = 1000  # as after loading
    agent.fit(make_env(lanes), nb_steps=6, verbose=0)
    assert agent.run_state.nb_updates == 0
    agent.fit(make_env(lanes), nb_steps=24, verbose=0)
    assert agent.run_state.nb_updates == 30 - (7 if lanes == 1 else 6)
