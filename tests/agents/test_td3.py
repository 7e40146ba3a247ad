"""`TD3Agent`: whole updates against a NumPy twin, the three tricks one by one, known values, files, refusals."""

import functools

import keras
import numpy as np
import pytest
from gymnasium import spaces
from keras import layers, ops

import rl.agents
from rl.agents.td3 import TD3Agent
from rl.common.vec_env import DummyVecEnv, SubprocVecEnv
from rl.memory import SequentialMemory
from rl.random import GaussianWhiteNoiseProcess
from tests.agents import test_ddpg as ddpg
from tests.toy_envs import Bandit, ConstantReward, Drift, LinearQuadratic

BOX = ddpg.BOX
NAMES = ("actor", "critic", "critic_2", "target_actor", "target_critic", "target_critic_2")


def networks(nb_actions=2, seed=0):
    """`(actor, [critic, critic], action input)` of three hidden units each, the actor's outputs in [-1, 1]."""
    actor, critic, action = ddpg.networks(nb_actions, seed)
    actor = keras.Model(actor.input, layers.Activation("tanh")(actor.output))
    return actor, [critic, ddpg.networks(nb_actions, seed + 10)[1]], action


def make_agent(nb_actions=2, optimizer="adam", metrics=None, nets=None, **options):
    options = {"nb_steps_warmup_critic": 8, "nb_steps_warmup_actor": 8, "batch_size": 8} | options
    options = {"target_model_update": 0.1, "memory": SequentialMemory(200), "nb_steps_random": 0} | options
    agent = TD3Agent(nb_actions, *(nets or networks(nb_actions)), **options)
    if optimizer is not None:
        agent.compile(optimizer, metrics=metrics, jit_compile=False)
    return agent


def weights(agent):
    return {name: [np.float64(w) for w in getattr(agent, name).get_weights()] for name in NAMES}


def assert_close(agent, expected, **tolerance):
    for name, values in weights(agent).items():
        for got, wanted in zip(values, expected[name], strict=True):
            np.testing.assert_allclose(got, wanted, err_msg=name, **tolerance)


# ---- equations -------------------------------------------------------------------------------------------------------


def naive_actor(w, state):
    return np.tanh(ddpg.naive_net(w, state))


def naive_critic_loss(critic, w, batch):
    total = 0.0
    for i in range(len(batch.reward)):
        action1 = naive_actor(w["target_actor"], batch.state1[i])
        values = [ddpg.naive_net(w[f"target_{x}"], batch.state1[i], action1)[0] for x in ("critic", "critic_2")]
        target = batch.reward[i] + (0.0 if batch.terminal1[i] else batch.discount[i] * min(values))
        prediction = ddpg.naive_net(critic, batch.state0[i], batch.action[i])[0]
        total += batch.weight[i] * 0.5 * (target - prediction) ** 2
    return total / len(batch.reward)


def naive_actor_loss(actor, w, batch):
    rows = range(len(batch.reward))
    values = [ddpg.naive_net(w["critic"], batch.state0[i], naive_actor(actor, batch.state0[i]))[0] for i in rows]
    return -np.mean(batch.weight * values)


def naive_update(w, batch, follow):
    names = ("critic", "critic_2")
    w |= {x: ddpg.descended(lambda c: naive_critic_loss(c, w, batch), w[x], 0.3) for x in names}
    if follow:
        w["actor"] = ddpg.descended(lambda a: naive_actor_loss(a, w, batch), w["actor"], 0.2)
        for x in ("actor", *names):
            w[f"target_{x}"] = [0.9 * t + 0.1 * s for t, s in zip(w[f"target_{x}"], w[x], strict=True)]


@pytest.mark.parametrize(("nb_actions", "delay"), [(1, 2), (2, 1), (3, 3)])
def test_whole_updates_equal_a_naive_twin(nb_actions, delay):
    optimizers = [keras.optimizers.SGD(0.2), keras.optimizers.SGD(0.3)]
    agent = make_agent(nb_actions, optimizers, policy_delay=delay, target_noise=0.0)
    batches, w = ddpg.random_batches(nb_actions, k=4), weights(agent)
    for i in range(4):
        naive_update(w, ddpg.one(batches, i), (i + 1) % delay == 0)
    ddpg.train_on(agent, batches)
    assert_close(agent, w, rtol=2e-4, atol=2e-5)


def test_the_loss_is_the_sum_of_both_critics_and_the_target_the_least_of_each_row():
    agent = make_agent(optimizer=keras.optimizers.SGD(0.0), target_noise=0.0)
    batches, w = ddpg.random_batches(2, size=50), weights(agent)
    logs = ddpg.train_on(agent, batches)
    batch = ddpg.one(batches)
    expected = naive_critic_loss(w["critic"], w, batch) + naive_critic_loss(w["critic_2"], w, batch)
    assert logs["loss"] == pytest.approx(expected, rel=1e-5)
    actions = [naive_actor(w["target_actor"], s) for s in batch.state1]
    first, second = (
        np.array([ddpg.naive_net(w[f"target_{x}"], s, a)[0] for s, a in zip(batch.state1, actions, strict=True)])
        for x in ("critic", "critic_2")
    )
    assert np.any(first < second) and np.any(second < first)  # so that the least of the means is told from it


def test_actor_and_targets_move_in_every_second_step_only():
    agent = make_agent()
    batches = ddpg.random_batches(2, k=1)
    before = weights(agent)
    for number in range(1, 7):
        logs = ddpg.train_on(agent, batches)
        moved = ddpg.changed(before, weights(agent))
        assert moved == (set(NAMES) if number % 2 == 0 else {"critic", "critic_2"})
        assert np.isnan(logs["actor_loss"]) == (number % 2 == 1)
        before = weights(agent)
    assert int(ops.convert_to_numpy(agent.critic_optimizer.iterations)) == 6
    assert int(ops.convert_to_numpy(agent.actor_optimizer.iterations)) == 3


def test_the_delay_goes_on_over_calls_of_several_steps_and_in_a_loaded_agent(tmp_path):
    agent, twin = make_agent(target_noise=0.0), make_agent(target_noise=0.0)
    batches = ddpg.random_batches(2, k=7)

    def part(low, high):
        return batches._replace(**{n: x[low:high] for n, x in batches._asdict().items() if x is not None})

    ddpg.train_on(agent, batches)
    ddpg.train_on(twin, part(0, 3))
    twin.run_state.nb_updates = 3
    twin.save(tmp_path / "twin.keras")
    loaded = keras.models.load_model(tmp_path / "twin.keras")
    ddpg.train_on(loaded, part(3, 7))
    assert_close(loaded, weights(agent), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("scale", [True, False])
def test_the_target_actions_noise_is_clipped_independent_and_within_the_bounds(scale):
    low, high = (-1, 1) if scale else (-0.5, 0.5)
    observation = keras.Input((1, 3))
    actor = keras.Model(observation, layers.Dense(2, kernel_initializer="zeros")(layers.Flatten()(observation)))
    critics = [ddpg.networks(2, seed)[1] for seed in (0, 10)]
    agent = make_agent(nets=(actor, critics, 1), target_noise=0.2, target_noise_clip=0.3, scale_actions=scale)
    ddpg.fit(agent, nb_steps=4)
    states = ops.convert_to_tensor(np.zeros((20_000, 1, 3), "f4"))

    def drawn():
        return ops.convert_to_numpy(agent.target_action(states))

    noise = drawn()
    assert np.abs(noise).max() == pytest.approx(0.3)
    assert np.mean(np.abs(noise) > 0.2999) == pytest.approx(0.1336, abs=0.01)  # beyond 1.5 standard deviations
    clipped = np.clip(np.random.default_rng(0).normal(0, 0.2, 10**6), -0.3, 0.3)
    np.testing.assert_allclose(noise.std(axis=0), clipped.std(), rtol=0.02)
    assert abs(np.corrcoef(noise.T)[0, 1]) < 0.03  # not shared by the components
    assert abs(np.corrcoef(noise[:-1, 0], noise[1:, 0])[0, 1]) < 0.03  # nor by the rows
    assert not np.array_equal(noise, drawn())
    agent.target_actor.set_weights([np.zeros((3, 2)), np.array([high - 0.1, low + 0.1])])
    noise = drawn()
    assert noise[:, 0].max() == high and noise[:, 1].min() == low
    assert noise[:, 0].min() == pytest.approx(high - 0.4) and noise[:, 1].max() == pytest.approx(low + 0.4)


def test_in_the_envs_units_other_bounds_are_kept_to_by_a_second_fit():
    agent = make_agent(scale_actions=False, target_noise=100.0, target_noise_clip=100.0)
    ddpg.fit(agent, Drift(spaces.Box(-0.5, 0.5, (2,), np.float32)))
    functions = agent._functions
    ddpg.fit(agent, Drift(spaces.Box(-0.5, 0.5, (2,), np.float32)))
    assert agent._functions is functions
    ddpg.fit(agent, Drift(spaces.Box(2.0, 3.0, (2,), np.float32)))
    assert agent._functions is not functions
    action = ops.convert_to_numpy(agent.target_action(ops.convert_to_tensor(np.zeros((50, 1, 3), "f4"))))
    assert action.min() == 2 and action.max() == 3


def test_a_seed_decides_the_targets_noise():
    def after_a_fit(seed):
        agent = make_agent()
        ddpg.fit(agent, seed=seed)
        return weights(agent)

    first, again, other = after_a_fit(1), after_a_fit(1), after_a_fit(2)
    assert not ddpg.changed(first, again) and ddpg.changed(first, other)


# ---- twins -----------------------------------------------------------------------------------------------------------


def test_one_critic_gets_a_twin_with_weights_of_its_own():
    observation, action = keras.Input((1, 3)), keras.Input((2,))
    flat = layers.Flatten()(observation)
    actor = keras.Model(observation, layers.Dense(2, "tanh")(flat))
    critic = keras.Model([observation, action], layers.Dense(1)(layers.Concatenate()([flat, action])))
    agent = make_agent(nets=(actor, critic, action))
    assert agent.critic is critic is not agent.critic_2
    first, second = critic.get_weights(), agent.critic_2.get_weights()
    assert not np.array_equal(first[0], second[0])
    for name in ("actor", "critic", "critic_2"):
        for x, y in zip(
            getattr(agent, name).get_weights(), getattr(agent, f"target_{name}").get_weights(), strict=True
        ):
            np.testing.assert_array_equal(x, y)


def test_a_twin_that_would_be_no_other_critic_is_refused():
    actor, critics, action = networks()  # its initializers have seeds
    with pytest.raises(ValueError, match=r"very same weights.*critic=\[critic, another_critic\]"):
        make_agent(nets=(actor, critics[0], action))


# ---- known values ----------------------------------------------------------------------------------------------------


def start(actor, critics, action, rate=0.02, nb_updates=3000, **options):
    """An agent whose learning rates fall to a hundredth, so that Adam comes to rest."""
    options = {"nb_steps_warmup_critic": 200, "nb_steps_warmup_actor": 200, "batch_size": 32} | options
    agent = TD3Agent(action.shape[-1], actor, critics, action, SequentialMemory(20_000), **options)
    schedule = keras.optimizers.schedules.PolynomialDecay(rate, nb_updates, rate / 100)
    agent.compile(keras.optimizers.Adam(schedule), jit_compile=False, steps_per_execution=32)
    return agent


def quadratic(size, *, bias=False):
    """An actor that is linear in the state, and critics that are quadratic in state and action."""
    observation, action = keras.Input((1, size)), keras.Input((size,))
    flat = layers.Flatten()(observation)
    actor = keras.Model(observation, layers.Dense(size, use_bias=False, kernel_initializer="zeros")(flat))
    joined = layers.Concatenate()([flat, action])
    features = ddpg.Products()(joined)
    if bias:
        features = layers.Concatenate()([features, joined])
    critics = [keras.Model([observation, action], layers.Dense(1, use_bias=bias)(features)) for _ in range(2)]
    return actor, critics, action


def test_a_linear_quadratic_regulator_is_found():
    s, gain, _ = LinearQuadratic(1).solution()
    # The target's noise would add to the value; the twins agree in the end, so that the least of them is no bias.
    agent = start(
        *quadratic(1),
        random_process=GaussianWhiteNoiseProcess(sigma=0.3),
        gamma=LinearQuadratic.GAMMA,
        target_model_update=0.05,
        target_noise=0.0,
        rate=0.03,
        nb_updates=4000,
    )
    agent.fit(DummyVecEnv([lambda: LinearQuadratic(1)] * 4), nb_steps=4200, verbose=0, seed=1)
    states = np.random.default_rng(0).uniform(-1, 1, (50, 1, 1)).astype("f4")
    x, inner = states[:, 0], agent.evaluate(states)
    np.testing.assert_allclose(3 * inner, -x @ gain.T, atol=0.05)
    for critic, _ in agent.critics:
        value = ops.convert_to_numpy(agent.q_value(critic, states, inner))
        np.testing.assert_allclose(value, -np.sum((x @ s) * x, axis=1), atol=0.05)


@pytest.mark.parametrize(("low", "high"), [(-2, 2), (0, 1)])
def test_a_bandits_best_action_is_found_within_its_bounds(low, high):
    agent = start(
        *quadratic(1, bias=True),
        random_process=GaussianWhiteNoiseProcess(sigma=0.5),
        nb_updates=1500,
    )
    agent.fit(Bandit(low, high), nb_steps=1700, verbose=0, seed=1)
    inner = float(agent.evaluate(np.ones((1, 1, 1), "f4"))[0, 0])
    assert low + (inner + 1) / 2 * (high - low) == pytest.approx(0.3, abs=0.02)


def test_a_time_limit_is_not_a_terminal_state():
    class Continuous(ConstantReward):
        action_space = spaces.Box(-1, 1, (1,), np.float32)

    observation, action = keras.Input((1, 1)), keras.Input((1,))
    flat = layers.Flatten()(observation)
    actor = keras.Model(observation, layers.Dense(1, "tanh")(flat))
    joined = layers.Concatenate()([flat, layers.Rescaling(0.0)(action)])
    critics = [keras.Model([action, observation], layers.Dense(1, use_bias=False)(joined)) for _ in range(2)]
    agent = TD3Agent(1, actor, critics, action, SequentialMemory(5000), target_model_update=0.9, batch_size=32)
    agent.compile(keras.optimizers.SGD(0.9), jit_compile=False, steps_per_execution=32)
    agent.fit(DummyVecEnv([lambda: Continuous(5)] * 3), nb_steps=3400, verbose=0, seed=0)
    value = agent.q_value(agent.critic, np.ones((1, 1, 1), "f4"), np.zeros((1, 1), "f4"))
    assert float(value[0]) == pytest.approx(100, abs=1)


# ---- lanes, defaults, files, refusals --------------------------------------------------------------------------------


@pytest.mark.parametrize("vec_env", [DummyVecEnv, SubprocVecEnv])
def test_three_lanes_of_three_actions(vec_env):
    agent = make_agent(3, random_process=GaussianWhiteNoiseProcess(sigma=0.2, size=3))
    env = vec_env([functools.partial(Drift, BOX[3])] * 3)
    before = weights(agent)
    ddpg.fit(agent, env, 60)
    assert agent.step == 60 and agent.run_state.nb_updates == 52
    assert ddpg.changed(before, weights(agent)) == set(NAMES)
    assert len(agent.test(env, 4, visualize=False, verbose=0).history["episode_reward"]) == 4
    ddpg.fit(agent, env, 30, overlap=True)
    assert agent.step == 90 and agent.run_state.nb_updates == 82
    env.close()


def test_defaults_are_the_papers():
    actor, critics, action = networks()
    agent = rl.agents.TD3Agent(2, actor, critics, action, SequentialMemory(100), nb_steps_warmup_critic=700)
    assert (agent.policy_delay, agent.target_noise, agent.target_noise_clip) == (2, 0.2, 0.5)
    assert (agent.batch_size, agent.target_model_update, agent.scale_actions) == (256, 0.005, True)
    assert agent.nb_steps_random == 700


def test_a_saved_agent_has_both_critics_and_its_optimizers(tmp_path):
    agent = make_agent(policy_delay=3, target_noise=0.1, target_noise_clip=0.2)
    ddpg.fit(agent)
    agent.save(tmp_path / "agent.keras")
    loaded = keras.models.load_model(tmp_path / "agent.keras")
    assert_close(loaded, weights(agent), rtol=0)
    assert (loaded.policy_delay, loaded.target_noise, loaded.target_noise_clip) == (3, 0.1, 0.2)
    for name, optimizer in agent.optimizers.items():
        for x, y in zip(optimizer.variables, loaded.optimizers[name].variables, strict=True):
            np.testing.assert_array_equal(ops.convert_to_numpy(x), ops.convert_to_numpy(y))
    ddpg.fit(loaded)


def test_weights_are_three_files(tmp_path):
    agent, other = make_agent(), make_agent(nets=networks(seed=50))
    agent.save_weights(str(tmp_path / "td3.weights.h5"))
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        *("td3_actor.weights.h5", "td3_critic.weights.h5", "td3_critic_2.weights.h5")
    ]
    other.load_weights(str(tmp_path / "td3.weights.h5"))
    assert_close(other, weights(agent))


@pytest.mark.slow
@pytest.mark.parametrize("scale", [False, True])
def test_five_thousand_updates_in_half_precision_stay_finite(scale):
    policy = keras.mixed_precision.dtype_policy()
    keras.mixed_precision.set_dtype_policy("mixed_float16")
    try:
        agent = make_agent(random_process=GaussianWhiteNoiseProcess(sigma=0.2, size=2), scale_actions=scale)
    finally:
        keras.mixed_precision.set_dtype_policy(policy)
    env = DummyVecEnv([functools.partial(Drift, BOX[2])] * 16)
    for _ in range(5):
        history = ddpg.fit(agent, env, 1008).history
        assert np.isfinite(history["loss"][-1]) and np.isfinite(history["actor_loss"][-1])
    assert agent.run_state.nb_updates >= 5000
    assert all(np.isfinite(w).all() for values in weights(agent).values() for w in values)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy_delay": 0}, "policy_delay must be a whole number of at least 1, got 0"),
        ({"policy_delay": 1.5}, "policy_delay must be a whole number"),
        ({"target_noise": -0.1}, "target_noise must be at least 0"),
        ({"target_noise_clip": -0.1}, "target_noise_clip must be at least 0"),
    ],
)
def test_bad_arguments_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        make_agent(**options)


def test_critics_that_do_not_fit_are_named():
    actor, critics, action = networks()
    with pytest.raises(ValueError, match="critic must be one critic, or a list of two"):
        make_agent(nets=(actor, [*critics, critics[0]], action))
    with pytest.raises(ValueError, match=r"critic's input 'action'.*\(None, 3\), expected \(None, 2\)"):
        make_agent(nets=(actor, [critics[0], ddpg.networks(3)[1]], action))
    with pytest.raises(ValueError, match="scale_actions=True needs an env whose actions are bounded"):
        ddpg.fit(make_agent(), Drift(spaces.Box(-np.inf, np.inf, (2,), np.float32)))
