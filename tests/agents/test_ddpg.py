"""`DDPGAgent`: whole updates against a NumPy twin, known values, warm-ups, inputs, optimizers, files, refusals."""

from functools import partial

import gymnasium as gym
import keras
import numpy as np
import pytest
from gymnasium import spaces
from keras import layers, ops

import rl.agents
from rl.agents.ddpg import DDPGAgent, mean_q
from rl.common.vec_env import DummyVecEnv, SubprocVecEnv
from rl.memory import Batch, SequentialMemory
from rl.random import GaussianWhiteNoiseProcess
from tests.toy_envs import Bandit, ConstantReward, Drift, LinearQuadratic

BOX = {a: spaces.Box(-0.5, 0.5, (a,), np.float32) for a in (1, 2, 3)}


def dense(units, activation=None, seed=0):
    init = keras.initializers.RandomNormal(stddev=0.5, seed=seed)
    return layers.Dense(units, activation, kernel_initializer=init, bias_initializer=init)


def networks(nb_actions=2, seed=0, window=1):
    """`(actor, critic, action input)` of three hidden units each."""
    observation, action = keras.Input((window, 3)), keras.Input((nb_actions,), name="action")
    flat = layers.Flatten()(observation)
    actor = keras.Model(observation, dense(nb_actions, None, seed + 1)(dense(3, "tanh", seed)(flat)))
    joined = layers.Concatenate()([flat, action])
    critic = keras.Model([observation, action], dense(1, None, seed + 3)(dense(3, "tanh", seed + 2)(joined)))
    return actor, critic, action


def make_agent(nb_actions=2, optimizer="adam", metrics=None, nets=None, window=1, **options):
    options = {"nb_steps_warmup_critic": 8, "nb_steps_warmup_actor": 8, "batch_size": 8} | options
    options = {"target_model_update": 0.1, "memory": SequentialMemory(200, window_length=window)} | options
    agent = DDPGAgent(nb_actions, *(nets or networks(nb_actions, window=window)), **options)
    if optimizer is not None:
        agent.compile(optimizer, metrics=metrics, jit_compile=False)
    return agent


def fit(agent, env=None, nb_steps=24, **options):
    env = Drift(BOX[agent.nb_actions]) if env is None else env
    return agent.fit(env, nb_steps=nb_steps, verbose=0, **options)


def random_batches(nb_actions, k=1, size=5, seed=0):
    """Batches `(k, size, ...)` as the memory gives them."""
    rng = np.random.default_rng(seed)
    return Batch(
        state0=rng.normal(size=(k, size, 1, 3)).astype("f4"),
        action=rng.normal(size=(k, size, nb_actions)).astype("f4"),
        reward=rng.normal(size=(k, size)).astype("f4"),
        state1=rng.normal(size=(k, size, 1, 3)).astype("f4"),
        terminal1=(rng.random((k, size)) < 0.4).astype("f4"),
        discount=rng.choice([0.9, 0.81], size=(k, size)).astype("f4"),
        weight=rng.random((k, size)).astype("f4"),
        index=None,
    )


def one(batches, i=0):
    return Batch._make([None if x is None else x[i] for x in batches])


def train_on(agent, batches, n=None):
    """Gradient steps on batches `(k, B, ...)` through the compiled function; returns the metrics by name."""
    agent._make_functions()
    n = len(batches.reward) if n is None else n
    values, _ = agent._functions[1](tuple(batches[:-1]), np.int32(n), batches.state0[0][:1])
    return dict(zip(agent.metrics_names, values, strict=True))


def weights(agent):
    names = ("actor", "critic", "target_actor", "target_critic")
    return {name: [np.float64(w) for w in getattr(agent, name).get_weights()] for name in names}


def assert_close(agent, expected, **tolerance):
    for name, values in weights(agent).items():
        for got, wanted in zip(values, expected[name], strict=True):
            np.testing.assert_allclose(got, wanted, err_msg=name, **tolerance)


def changed(before, after):
    """Which networks are not what they were."""
    return {
        name for name in before if any(not np.array_equal(x, y) for x, y in zip(before[name], after[name], strict=True))
    }


# ---- the naive twin: one row after the other, gradients by finite differences ----------------------------------------


def naive_net(w, *inputs):
    kernel0, bias0, kernel1, bias1 = w
    return np.tanh(np.concatenate([np.ravel(x) for x in inputs]) @ kernel0 + bias0) @ kernel1 + bias1


def naive_huber(error, delta):
    return 0.5 * error**2 if abs(error) <= delta else delta * (abs(error) - 0.5 * delta)


def naive_critic_loss(critic, w, batch, delta):
    total = 0.0
    for i in range(len(batch.reward)):
        action1 = naive_net(w["target_actor"], batch.state1[i])
        value1 = naive_net(w["target_critic"], batch.state1[i], action1)[0]
        target = batch.reward[i] + (0.0 if batch.terminal1[i] else batch.discount[i] * value1)
        prediction = naive_net(critic, batch.state0[i], batch.action[i])[0]
        total += batch.weight[i] * naive_huber(target - prediction, delta)
    return total / len(batch.reward)


def naive_actor_loss(actor, w, batch):
    total = 0.0
    for i in range(len(batch.reward)):
        total -= batch.weight[i] * naive_net(w["critic"], batch.state0[i], naive_net(actor, batch.state0[i]))[0]
    return total / len(batch.reward)


def gradient(function, w, step=1e-5):
    result = [np.zeros_like(x) for x in w]
    for x, g in zip(w, result, strict=True):
        for place in np.ndindex(x.shape):
            kept = x[place]
            x[place] = kept + step
            above = function(w)
            x[place] = kept - step
            g[place] = (above - function(w)) / (2 * step)
            x[place] = kept
    return result


def descended(function, w, rate):
    return [x - rate * g for x, g in zip(w, gradient(function, w), strict=True)]


def naive_update(w, batch, rates, tau, delta=np.inf):
    w["critic"] = descended(lambda c: naive_critic_loss(c, w, batch, delta), w["critic"], rates[1])
    w["actor"] = descended(lambda a: naive_actor_loss(a, w, batch), w["actor"], rates[0])
    for name in ("actor", "critic"):
        pairs = zip(w[f"target_{name}"], w[name], strict=True)
        w[f"target_{name}"] = [(1 - tau) * t + tau * s for t, s in pairs]


@pytest.mark.parametrize(("nb_actions", "delta_clip"), [(1, np.inf), (2, 0.5), (3, np.inf)])
def test_whole_updates_equal_a_naive_twin(nb_actions, delta_clip):
    optimizers = [keras.optimizers.SGD(0.2), keras.optimizers.SGD(0.3)]
    agent = make_agent(nb_actions, optimizers, delta_clip=delta_clip)
    batches, expected = random_batches(nb_actions, k=3), weights(agent)
    for x in expected["target_actor"] + expected["target_critic"]:
        x += 0.05  # targets that are not their networks
    agent.target_actor.set_weights(expected["target_actor"])
    agent.target_critic.set_weights(expected["target_critic"])
    for i in range(3):
        naive_update(expected, one(batches, i), rates=(0.2, 0.3), tau=0.1, delta=delta_clip)
    train_on(agent, batches)
    assert_close(agent, expected, rtol=2e-4, atol=2e-5)


def test_steps_in_one_call_are_the_steps_of_several_calls():
    agents = [make_agent() for _ in range(2)]
    batches = random_batches(2, k=4)
    train_on(agents[0], batches, n=3)  # the fourth is padding
    for i in range(3):
        train_on(agents[1], Batch._make([None if x is None else x[i : i + 1] for x in batches]))
    assert_close(agents[0], weights(agents[1]), rtol=1e-5, atol=1e-6)


def test_each_optimizer_moves_its_own_network_alone():
    for moved, rates in (("actor", (0.1, 0.0)), ("critic", (0.0, 0.1))):
        agent = make_agent(optimizer=[keras.optimizers.SGD(x) for x in rates])
        before = weights(agent)
        train_on(agent, random_batches(2))
        assert changed(before, weights(agent)) == {moved, f"target_{moved}"}


def test_logs_are_the_losses_and_the_mean_value():
    agent = make_agent(optimizer=keras.optimizers.SGD(0.0), metrics=[["mae"], ["mse", mean_q]])
    assert agent.metrics_names == ["loss", "mse", "actor_mae", "mean_q", "actor_loss"]
    batches, w = random_batches(2), weights(agent)
    batch = one(batches)
    logs = train_on(agent, batches)
    assert logs["loss"] == pytest.approx(naive_critic_loss(w["critic"], w, batch, np.inf), rel=1e-5)
    assert logs["actor_loss"] == pytest.approx(naive_actor_loss(w["actor"], w, batch), rel=1e-5)
    q = [naive_net(w["critic"], s, a)[0] for s, a in zip(batch.state0, batch.action, strict=True)]
    assert logs["mean_q"] == pytest.approx(np.mean(q), rel=1e-5)
    does = np.array([naive_net(w["actor"], s) for s in batch.state0])
    assert logs["actor_mae"] == pytest.approx(np.abs(does - batch.action).mean(), rel=1e-5)
    assert make_agent(metrics=["mae"]).metrics_names == ["loss", "mae", "mean_q", "actor_loss"]
    assert make_agent(metrics=["mae"]).metrics_names == ["loss", "mae", "mean_q", "actor_loss"]  # keras-rl changed it


def test_regularisers_count_for_the_network_that_has_them():
    def nets(penalty):
        observation, action = keras.Input((1, 3)), keras.Input((2,))
        flat = layers.Flatten()(observation)
        actor = keras.Model(observation, layers.Dense(2, kernel_regularizer=keras.regularizers.L2(penalty))(flat))
        critic = keras.Model([observation, action], dense(1)(layers.Concatenate()([flat, action])))
        actor.set_weights([np.full((3, 2), 0.5), np.zeros(2)])
        return actor, critic, action

    plain, penalised = (train_on(make_agent(optimizer="sgd", nets=nets(x)), random_batches(2)) for x in (0.0, 0.1))
    assert penalised["loss"] == pytest.approx(plain["loss"], rel=1e-6)
    assert penalised["actor_loss"] == pytest.approx(plain["actor_loss"] + 0.1 * 6 * 0.25, rel=1e-5)


def test_batch_normalisation_learns_in_its_own_networks_step_and_reaches_the_target():
    observation, action = keras.Input((1, 3)), keras.Input((2,))
    flat = layers.Flatten()(observation)
    actor = keras.Model(observation, dense(2)(layers.BatchNormalization()(flat)))
    joined = layers.Concatenate()([layers.BatchNormalization()(flat), action])
    critic = keras.Model([observation, action], dense(1)(joined))
    agent = make_agent(nets=(actor, critic, action), optimizer=keras.optimizers.SGD(0.0))
    batches = random_batches(2)
    train_on(agent, batches)
    mean = batches.state0[0].mean(axis=(0, 1))
    for network in (agent.actor, agent.critic):  # once: the actor's step leaves the critic's statistics alone
        np.testing.assert_allclose(network.non_trainable_weights[0], 0.01 * mean, rtol=1e-4)
    for network in (agent.target_actor, agent.target_critic):
        statistics = next(w for w in network.weights if w.path.endswith("moving_mean"))
        np.testing.assert_allclose(statistics, 0.1 * 0.01 * mean, rtol=1e-3)


# ---- target networks -------------------------------------------------------------------------------------------------


def test_a_thousand_soft_updates_bring_the_target_as_near_as_they_must():
    agent = make_agent(optimizer=keras.optimizers.SGD(0.0), target_model_update=0.005)
    for network, value in ((agent.actor, 1), (agent.critic, 1), (agent.target_actor, 0), (agent.target_critic, 0)):
        network.set_weights([np.full(w.shape, value) for w in network.get_weights()])
    batches = random_batches(2, k=200)
    for _ in range(5):
        train_on(agent, batches)
    for network in (agent.target_actor, agent.target_critic):
        for w in network.get_weights():
            np.testing.assert_allclose(w, 0.993346, rtol=1e-4)


def test_hard_updates_copy_both_networks_when_they_are_due():
    agent = make_agent(target_model_update=20)
    before = weights(agent)
    env = Drift(BOX[2])
    fit(agent, env, 19)
    assert changed(before, weights(agent)) == {"actor", "critic"}
    fit(agent, env, 1)
    after = weights(agent)
    assert not changed(
        {x: after[x] for x in ("actor", "critic")}, {x: after[f"target_{x}"] for x in ("actor", "critic")}
    )
    agent.actor.set_weights([0 * w for w in agent.actor.get_weights()])
    agent.update_target_models_hard()
    assert not any(np.any(w) for w in agent.target_actor.get_weights())


# ---- warm-up ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("nb_lanes", "interval"), [(1, 1), (1, 3), (3, 1), (4, 2)])
def test_the_actor_begins_after_the_critic(nb_lanes, interval):
    agent = make_agent(nb_steps_warmup_critic=12, nb_steps_warmup_actor=24, train_interval=interval)
    env = DummyVecEnv([lambda: Drift(BOX[2])] * nb_lanes) if nb_lanes > 1 else Drift(BOX[2])
    before = weights(agent)
    fit(agent, env, 12)
    assert not changed(before, weights(agent))
    fit(agent, env, 12)
    assert changed(before, weights(agent)) == {"critic", "target_critic"}
    history = fit(agent, env, 24)
    assert changed(before, weights(agent)) == {"actor", "critic", "target_actor", "target_critic"}
    assert agent.run_state.nb_updates == 36 // interval
    iterations = {name: int(ops.convert_to_numpy(o.iterations)) for name, o in agent.optimizers.items()}
    assert iterations == {"critic": 36 // interval, "actor": 24 // interval}
    assert np.isfinite(history.history["actor_loss"][-1])


def test_metrics_of_an_actor_that_does_not_learn_yet_say_nothing():
    agent = make_agent(nb_steps_warmup_actor=10**6, metrics=[["mae"], []])
    history = fit(agent, nb_steps=40).history
    assert np.isfinite(history["loss"][-1])
    assert np.isnan(history["actor_loss"]).all() and np.isnan(history["actor_mae"]).all()


# ---- known values ----------------------------------------------------------------------------------------------------


class Products(layers.Layer):
    """`x_i x_j` for i <= j."""

    def call(self, x):
        rows, columns = np.triu_indices(x.shape[1])
        return ops.take(x, rows, axis=1) * ops.take(x, columns, axis=1)


def start(actor, critic, action, rate=0.02, nb_updates=3000, **options):
    """An agent whose learning rates fall to a hundredth, so that Adam comes to rest."""
    options = {"nb_steps_warmup_critic": 200, "nb_steps_warmup_actor": 200, "batch_size": 32} | options
    agent = DDPGAgent(action.shape[-1], actor, critic, action, SequentialMemory(20_000), **options)
    schedule = keras.optimizers.schedules.PolynomialDecay(rate, nb_updates, rate / 100)
    agent.compile(keras.optimizers.Adam(schedule), jit_compile=False, steps_per_execution=32)
    return agent


@pytest.mark.parametrize("size", [1, 2])
def test_a_linear_quadratic_regulator_is_found(size):
    s, gain, _ = LinearQuadratic(size).solution()
    if size == 1:
        np.testing.assert_allclose([s[0, 0], gain[0, 0]], [1.238432, 1.324624], atol=1e-6)
    observation, action = keras.Input((1, size)), keras.Input((size,))
    flat = layers.Flatten()(observation)
    actor = keras.Model(observation, layers.Dense(size, use_bias=False, kernel_initializer="zeros")(flat))
    joined = Products()(layers.Concatenate()([flat, action]))
    q = layers.Dense(1, use_bias=False, kernel_initializer="zeros")(joined)
    agent = start(
        *(actor, keras.Model([observation, action], q), action),
        random_process=GaussianWhiteNoiseProcess(sigma=1.0, size=size),
        gamma=LinearQuadratic.GAMMA,
        target_model_update=0.05,
    )
    agent.fit(DummyVecEnv([lambda: LinearQuadratic(size)] * 4), nb_steps=3200, verbose=0, seed=1)
    states = np.random.default_rng(0).uniform(-1, 1, (50, 1, size)).astype("f4")
    x = states[:, 0]
    mu = agent.evaluate(states)
    np.testing.assert_allclose(mu, -x @ gain.T, atol=0.05)
    value = ops.convert_to_numpy(agent.q_value(agent.critic, states, mu))
    np.testing.assert_allclose(value, -np.sum((x @ s) * x, axis=1), atol=0.05)


@pytest.mark.parametrize("scale", [False, True])
@pytest.mark.parametrize(("low", "high"), [(-2, 2), (0, 1)])
def test_a_bandits_best_action_is_found_within_its_bounds(low, high, scale):
    observation, action = keras.Input((1, 1)), keras.Input((1,))
    flat = layers.Flatten()(observation)
    actor = keras.Model(observation, layers.Dense(1, use_bias=False, kernel_initializer="zeros")(flat))
    q = layers.Dense(1)(layers.Concatenate()([Products()(action), action]))
    agent = start(
        *(actor, keras.Model([action, observation], q), action),
        random_process=GaussianWhiteNoiseProcess(sigma=0.5),
        scale_actions=scale,
        nb_updates=1500,
    )
    agent.fit(Bandit(low, high), nb_steps=1700, verbose=0, seed=1)

    class Noted(Bandit):
        def step(self, chosen):
            noted.append(float(chosen[0]))
            return super().step(chosen)

    noted = []
    agent.test(Noted(low, high), 1, visualize=False, verbose=0)
    assert noted == pytest.approx([0.3], abs=0.02)


@pytest.mark.parametrize("lanes", [1, 3])
def test_a_time_limit_is_not_a_terminal_state(lanes):
    class Continuous(ConstantReward):
        action_space = spaces.Box(-1, 1, (1,), np.float32)

    observation, action = keras.Input((1, 1)), keras.Input((1,))
    flat = layers.Flatten()(observation)
    actor = keras.Model(observation, layers.Dense(1, kernel_initializer="zeros")(flat))
    unaware = layers.Rescaling(0.0)(action)  # so that Q is the same for all actions
    q = layers.Dense(1, use_bias=False)(layers.Concatenate()([flat, unaware]))
    agent = DDPGAgent(
        *(1, actor, keras.Model([action, observation], q), action, SequentialMemory(5000)),
        nb_steps_warmup_critic=100,
        nb_steps_warmup_actor=100,
        target_model_update=0.9,
    )
    agent.compile(keras.optimizers.SGD(0.9), jit_compile=False, steps_per_execution=32)
    env = Continuous(5) if lanes == 1 else DummyVecEnv([lambda: Continuous(5)] * lanes)
    agent.fit(env, nb_steps=2000, verbose=0, seed=0)
    one_state = np.ones((1, 1, 1), "f4")
    assert float(agent.q_value(agent.critic, one_state, np.zeros((1, 1), "f4"))[0]) == pytest.approx(100, abs=1)


@pytest.mark.parametrize(("terminated", "truncated", "value"), [(True, True, 1), (True, False, 1), (False, True, 1.9)])
def test_terminated_and_truncated_at_once_is_terminated(terminated, truncated, value):
    class Once(ConstantReward):
        action_space = spaces.Box(-1, 1, (1,), np.float32)

        def step(self, action):
            return np.ones(1, "f4"), 1.0, terminated, truncated, {}

    agent = make_agent(1, nets=single_input_networks(), nb_steps_warmup_critic=0, nb_steps_warmup_actor=0, gamma=0.9)
    fit(agent, Once(), 12)
    batch = agent.memory.sample_batch(4, k=1, gamma=0.9)
    agent.target_critic.set_weights([np.array([[0.0], [1.0]]), np.zeros(1)])  # Q' = 1 everywhere
    rows = Batch._make([None if x is None else ops.convert_to_tensor(x) for x in one(batch)])
    np.testing.assert_allclose(ops.convert_to_numpy(agent.td_target(rows)), value, rtol=1e-6)


def single_input_networks():
    observation, action = keras.Input((1, 1)), keras.Input((1,))
    flat = layers.Flatten()(observation)
    actor = keras.Model(observation, layers.Dense(1)(flat))
    return actor, keras.Model([action, observation], layers.Dense(1)(layers.Concatenate()([action, flat]))), action


# ---- inputs ----------------------------------------------------------------------------------------------------------


class Parts(gym.Env):
    """A `Dict` or `Tuple` observation of a picture and two numbers."""

    action_space = spaces.Box(-1, 1, (2,), np.float32)

    def __init__(self, kind):
        parts = {"picture": spaces.Box(0, 255, (2, 2), np.uint8), "vector": spaces.Box(-1, 1, (3,), np.float32)}
        self.observation_space = spaces.Dict(parts) if kind == "dict" else spaces.Tuple(list(parts.values()))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.observation_space.sample(), {}

    def step(self, action):
        self.t += 1
        return self.observation_space.sample(), float(action[0]), self.t == 5, False, {}


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("kind", ["dict", "tuple"])
def test_several_observations_are_routed_around_the_action(kind, place):
    picture, vector = keras.Input((1, 2, 2), name="picture", dtype="uint8"), keras.Input((1, 3), name="vector")
    action = keras.Input((2,), name="action")

    def joined(inputs):
        # Small numbers: tanh would be flat at pixels, and the actor without a gradient.
        return layers.Concatenate()([layers.Flatten()(ops.cast(x, "float32") / 1000) for x in inputs])

    actor = keras.Model([picture, vector], layers.Dense(2, "tanh")(joined([picture, vector])))
    inputs = [vector, picture] if kind == "dict" else [picture, vector]  # by name, or by position
    inputs.insert(place, action)
    critic = keras.Model(inputs, layers.Dense(1)(joined(inputs)))
    agent = make_agent(nets=(actor, critic, action))
    assert agent.critic_action_input == place
    env = DummyVecEnv([lambda: Parts(kind)] * 3)
    before = weights(agent)
    fit(agent, env, 60)
    assert changed(before, weights(agent)) == {"actor", "critic", "target_actor", "target_critic"}


def test_an_action_input_may_be_given_by_name_or_index_and_inputs_may_be_a_dict():
    actor, critic, action = networks()
    for given in (action, "action", 1):
        assert make_agent(nets=(actor, critic, given)).critic_action_input == 1
    observation = keras.Input((1, 3), name="z")
    q = dense(1)(layers.Concatenate()([layers.Flatten()(observation), action]))
    agent = make_agent(nets=(actor, keras.Model({"z": observation, "action": action}, q), action))
    fit(agent)
    assert agent.run_state.nb_updates > 0


def test_windows_of_observations():
    agent = make_agent(window=4)
    fit(agent, nb_steps=40)
    assert agent.run_state.nb_updates == 32


@pytest.mark.parametrize("vec_env", [DummyVecEnv, SubprocVecEnv])
def test_three_lanes_of_three_actions(vec_env):
    agent = make_agent(3, random_process=GaussianWhiteNoiseProcess(sigma=0.2, size=3))
    env = vec_env([partial(Drift, BOX[3])] * 3)
    fit(agent, env, 60)
    assert agent.step == 60 and agent.run_state.nb_updates == 52
    history = agent.test(env, 4, visualize=False, verbose=0)
    assert len(history.history["episode_reward"]) == 4
    fit(agent, env, 30)
    assert agent.step == 90 and agent.run_state.nb_updates == 82
    env.close()


# ---- compile and files -----------------------------------------------------------------------------------------------


def test_optimizers():
    agent = make_agent(optimizer=keras.optimizers.Adam(0.25, clipnorm=1.0))
    assert agent.actor_optimizer is agent.optimizer is not agent.critic_optimizer
    assert agent.critic_optimizer.get_config()["clipnorm"] == 1.0
    assert float(agent.critic_optimizer.learning_rate) == 0.25
    pair = [keras.optimizers.Adam(0.5), keras.optimizers.SGD(0.125)]
    agent.compile(pair, jit_compile=False)
    assert [agent.actor_optimizer, agent.critic_optimizer] == pair
    same = keras.optimizers.Adam()
    agent.compile([same, same], jit_compile=False)
    assert agent.critic_optimizer is not agent.actor_optimizer
    fit(agent)
    for bad in ([same], [same, same, same], []):
        with pytest.raises(ValueError, match=r"optimizer must be one optimizer, or a list of 2: \['actor', 'critic'\]"):
            agent.compile(bad)
    with pytest.raises(ValueError, match=r"metrics must be a list of metrics, or of 2 such lists"):
        agent.compile("adam", metrics=[["mae"], "mse"])
    with pytest.raises(ValueError, match="optimizer must be one optimizer, got"):
        rl.agents.SARSAAgent(keras.Sequential([layers.Input((1, 3)), layers.Flatten(), layers.Dense(2)]), 2).compile(
            ["sgd", "sgd"]
        )


def test_a_saved_agent_goes_on_with_both_optimizers(tmp_path):
    pair = [keras.optimizers.Adam(0.01), keras.optimizers.RMSprop(0.02)]
    process = GaussianWhiteNoiseProcess(sigma=0.3, size=2)
    options = {"nb_steps_warmup_actor": 20, "random_process": process, "nb_steps_random": 5, "scale_actions": True}
    agent = make_agent(optimizer=pair, metrics=[["mae"], ["mse"]], **options)
    fit(agent)
    agent.save(tmp_path / "agent.keras")
    loaded = keras.models.load_model(tmp_path / "agent.keras")
    assert loaded.metrics_names == agent.metrics_names == ["loss", "mse", "actor_mae", "mean_q", "actor_loss"]
    assert (loaded.nb_steps_warmup_critic, loaded.nb_steps_warmup_actor, loaded.nb_steps_random) == (8, 20, 5)
    assert loaded.scale_actions and loaded.critic_action_input == 1
    assert isinstance(loaded.critic_optimizer, keras.optimizers.RMSprop)
    batches = random_batches(2, k=3)
    for each in (agent, loaded):
        train_on(each, batches)
    assert_close(loaded, weights(agent), rtol=1e-6)
    for name, optimizer in agent.optimizers.items():
        for x, y in zip(optimizer.variables, loaded.optimizers[name].variables, strict=True):
            np.testing.assert_allclose(ops.convert_to_numpy(x), ops.convert_to_numpy(y), rtol=1e-6)


@pytest.mark.parametrize("ending", [".weights.h5", ".h5f", ".h5"])
def test_weights_are_a_pair_of_files_and_reach_the_targets(tmp_path, ending):
    agent, other = make_agent(), make_agent(nets=networks(seed=50))
    agent.save_weights(str(tmp_path / f"ddpg{ending}"))
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"ddpg_actor{ending}", f"ddpg_critic{ending}"]
    with pytest.raises(FileExistsError):
        agent.save_weights(str(tmp_path / f"ddpg{ending}"))
    other.load_weights(str(tmp_path / f"ddpg{ending}"))
    assert_close(other, weights(agent))
    (tmp_path / f"ddpg_critic{ending}").unlink()
    third = make_agent(nets=networks(seed=50))
    before = weights(third)
    with pytest.raises(FileNotFoundError, match="ddpg_critic"):
        third.load_weights(str(tmp_path / f"ddpg{ending}"))
    assert not changed(before, weights(third))


def test_half_precision_scales_both_losses():
    policy = keras.mixed_precision.dtype_policy()
    keras.mixed_precision.set_dtype_policy("mixed_float16")
    try:
        agent = make_agent(optimizer=[keras.optimizers.Adam(1e-3), keras.optimizers.Adam(1e-3)])
    finally:
        keras.mixed_precision.set_dtype_policy(policy)
    assert all(hasattr(x, "inner_optimizer") for x in agent.optimizers.values())
    before = weights(agent)
    history = fit(agent, nb_steps=60).history
    assert np.isfinite(history["loss"][-1]) and np.isfinite(history["actor_loss"][-1])
    assert changed(before, weights(agent)) == {"actor", "critic", "target_actor", "target_critic"}


def test_with_xla_and_without_the_steps_are_the_same():
    agents = [make_agent(nb_steps_warmup_actor=10), make_agent(nb_steps_warmup_actor=10)]
    agents[1].compile("adam", jit_compile=True)
    for agent in agents:
        train_on(agent, random_batches(2, k=4))
    assert_close(agents[0], weights(agents[1]), rtol=1e-4, atol=1e-6)


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["reward", "state0"])
def test_a_step_that_is_not_finite_changes_nothing_and_is_reported(where):
    agent = make_agent(optimizer="sgd")
    before = weights(agent)
    batches = random_batches(2)
    getattr(batches, where)[:] = np.nan
    logs = train_on(agent, batches)
    assert np.isnan(logs["loss"])
    assert "critic" not in changed(before, weights(agent))
    if where == "state0":
        assert not changed(before, weights(agent))


def test_an_actors_loss_that_is_not_finite_is_reported_too():
    agent = make_agent(optimizer="sgd")
    agent.actor.set_weights([np.full_like(w, np.nan) for w in agent.actor.get_weights()])
    assert np.isnan(train_on(agent, random_batches(2))["loss"])


def networks_with(actor_outputs=2, critic_outputs=1, action_shape=(2,), given=None):
    observation, action = keras.Input((1, 3), name="state"), keras.Input(action_shape, name="action")
    flat = layers.Flatten()(observation)
    critic = layers.Dense(critic_outputs)(layers.Concatenate()([flat, layers.Flatten()(action)]))
    actor = keras.Model(observation, layers.Dense(actor_outputs)(flat))
    return actor, keras.Model([observation, action], critic), action if given is None else given


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"actor_outputs": 3}, r"DDPGAgent \(actor\).*\(None, 3\), expected \(None, 2\)"),
        ({"critic_outputs": 2}, r"DDPGAgent \(critic\).*\(None, 2\), expected \(None, 1\)"),
        ({"action_shape": (3,)}, r"critic's input 'action', for the action, has shape \(None, 3\).*\(None, 2\)"),
        ({"action_shape": (1, 2)}, r"has shape \(None, 1, 2\)"),
        ({"given": "wind"}, r"critic_action_input must be one of the inputs.*'wind'.*\['state', 'action'\]"),
        ({"given": 2}, "critic_action_input must be one of the inputs"),
        ({"given": True}, "critic_action_input must be one of the inputs"),
        ({"given": keras.Input((2,))}, "critic_action_input must be one of the inputs"),
    ],
)
def test_networks_that_do_not_fit_are_named(options, message):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        make_agent(nets=networks_with(**options))


def test_a_critic_of_the_action_alone_or_one_that_hides_its_inputs_is_refused():
    actor, _, _ = networks()
    action = keras.Input((2,))
    with pytest.raises(ValueError, match="beside those for the states"):
        make_agent(nets=(actor, keras.Model(action, layers.Dense(1)(action)), action))

    class Hidden(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(1)

        def call(self, inputs):
            return self.dense(ops.concatenate(inputs, axis=-1))

    hidden = Hidden()
    hidden([np.zeros((1, 3), "f4"), np.zeros((1, 2), "f4")])
    with pytest.raises(ValueError, match="critic_action_input must be one of the inputs"):
        make_agent(nets=(actor, hidden, 1))


@pytest.mark.parametrize("which", ["actor", "critic"])
def test_a_network_of_other_observations_is_named_before_the_first_step(which):
    actor, critic, action = networks()
    wrong = networks(window=2)
    nets = (wrong[0], critic, action) if which == "actor" else (actor, wrong[1], wrong[2])
    env = Drift(BOX[2])
    with pytest.raises(ValueError, match=rf"DDPGAgent \({which}\): the network's input .* has shape \(2, 3\)"):
        fit(make_agent(nets=nets), env)
    assert not env.actions


def test_an_actor_that_would_begin_before_its_critic_is_refused():
    with pytest.raises(ValueError, match="nb_steps_warmup_critic=100 must be at most nb_steps_warmup_actor=50"):
        make_agent(nb_steps_warmup_critic=100, nb_steps_warmup_actor=50)


def test_names_of_keras_rl():
    assert rl.agents.DDPGAgent is DDPGAgent
    actor, critic, action = networks()
    agent = DDPGAgent(
        nb_actions=2,
        actor=actor,
        critic=critic,
        critic_action_input=action,
        memory=SequentialMemory(limit=100, window_length=1),
        nb_steps_warmup_critic=10,
        nb_steps_warmup_actor=10,
        random_process=GaussianWhiteNoiseProcess(size=2),
        gamma=0.99,
        target_model_update=1e-3,
    )
    agent.compile(keras.optimizers.Adam(1e-3, clipnorm=1.0), metrics=["mae"])
    for name in ("target_actor", "target_critic", "actor_optimizer", "update_target_models_hard", "select_action"):
        assert hasattr(agent, name)
    with pytest.warns(DeprecationWarning, match="delta_clip=2"):
        assert make_agent(delta_range=(-2, 2)).delta_clip == 2
