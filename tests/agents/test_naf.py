"""`NAFAgent` and `NAFLayer`: the equations against NumPy twins, known values, files, refusals."""

import gymnasium as gym
import keras
import numpy as np
import pytest
from gymnasium import spaces
from keras import layers, ops

import rl.agents
from rl.agents import dqn
from rl.agents.naf import ContinuousDQNAgent, NAFAgent, NAFLayer
from rl.common.vec_env import DummyVecEnv
from rl.memory import Batch, SequentialMemory
from rl.random import GaussianWhiteNoiseProcess, OrnsteinUhlenbeckProcess
from tests.test_saving import write_as_keras_2
from tests.toy_envs import Bandit, ConstantReward, LinearQuadratic

MODES = ("full", "diag")
BOX = {a: spaces.Box(-0.5, 0.5, (a,), np.float32) for a in (1, 2, 3, 4)}


def nb_entries(nb_actions, mode="full"):
    return nb_actions * (nb_actions + 1) // 2 if mode == "full" else nb_actions


def net(nb_outputs, seed=0, shape=(1, 3), hidden=(3,), std=0.3):
    x = keras.Input(shape)
    y = layers.Flatten()(x)
    for i, units in enumerate((*hidden, nb_outputs)):
        init = keras.initializers.RandomNormal(stddev=std, seed=100 * seed + i)
        activation = "tanh" if i < len(hidden) else None
        y = layers.Dense(units, activation, kernel_initializer=init, bias_initializer=init)(y)
    return keras.Model(x, y)


def make_agent(nb_actions=2, mode="full", optimizer="adam", compile_options=None, networks=None, window=1, **options):
    shape = (window, 3)
    if networks is None:
        sizes = (1, nb_entries(nb_actions, mode), nb_actions)
        networks = [net(n, i, shape) for i, n in enumerate(sizes)]
    options = {"nb_steps_warmup": 8, "target_model_update": 0.1, "batch_size": 8} | options
    options.setdefault("memory", SequentialMemory(200, window_length=window))
    agent = NAFAgent(*networks, covariance_mode=mode, nb_actions=nb_actions, **options)
    if optimizer is not None:
        agent.compile(optimizer, jit_compile=False, **(compile_options or {}))
    return agent


class Weather(gym.Env):
    """Random states, rewards and ends, whatever one does; what it was told to do is noted."""

    observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float32)

    def __init__(self, action_space=BOX[2]):
        self.action_space, self.actions = action_space, []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.np_random.normal(size=3).astype("f4"), {}

    def step(self, action):
        self.actions.append(np.array(action))
        terminated, truncated = (self.np_random.random(2) < 0.1).tolist()
        state, reward = self.np_random.normal(size=3).astype("f4"), float(self.np_random.normal())
        return state, reward, terminated, truncated, {}


def fit(agent, env=None, nb_steps=24, **options):
    env = Weather(BOX[agent.nb_actions]) if env is None else env
    return agent.fit(env, nb_steps=nb_steps, verbose=0, **options)


def random_batches(nb_actions, k=1, size=5, window=1, seed=0):
    """Batches `(k, size, ...)` as the memory gives them."""
    rng = np.random.default_rng(seed)
    return Batch(
        state0=rng.normal(size=(k, size, window, 3)).astype("f4"),
        action=0.5 * rng.normal(size=(k, size, nb_actions)).astype("f4"),
        reward=rng.normal(size=(k, size)).astype("f4"),
        state1=rng.normal(size=(k, size, window, 3)).astype("f4"),
        terminal1=(rng.random((k, size)) < 0.4).astype("f4"),
        discount=rng.choice([0.9, 0.81], size=(k, size)).astype("f4"),
        weight=rng.random((k, size)).astype("f4"),
        index=None,
    )


def one(batches):
    return Batch._make([None if x is None else x[0] for x in batches])


def train_on(agent, batches, n=None):
    """Gradient steps on batches `(k, B, ...)` through the compiled function; returns the metrics by name."""
    agent._make_functions()
    n = len(batches.reward) if n is None else n
    values, _ = agent._functions[1](tuple(batches[:-1]), np.int32(n), batches.state0[0][:1])
    return dict(zip(agent.metrics_names, values, strict=False))


def numpy(tensor):
    return ops.convert_to_numpy(tensor)


# ---- the naive twin ------------------------------------------------------------------------------------------------


def naive_lower(entries, nb_actions, mode):
    """L of one state: row by row, one number after the other."""
    lower, rest = [[0.0] * nb_actions for _ in range(nb_actions)], [float(x) for x in entries]
    for i in range(nb_actions):
        for j in range(i + 1) if mode == "full" else [i]:
            value = rest.pop(0)
            lower[i][j] = np.exp(value) + 1e-7 if i == j else value
    assert not rest
    return np.array(lower)


def naive_advantage(entries, mu, action, mode):
    lower = naive_lower(entries, len(mu), mode)
    precision = lower @ lower.T
    total = 0.0
    for i in range(len(mu)):
        for j in range(len(mu)):
            total -= 0.5 * (action[i] - mu[i]) * precision[i, j] * (action[j] - mu[j])
    return total


def naive_net(weights, state):
    kernel0, bias0, kernel1, bias1 = weights
    return np.tanh(state.reshape(-1) @ kernel0 + bias0) @ kernel1 + bias1


def naive_loss(weights, target, batch, mode, delta_clip):
    """Loss, mean V and Q of a batch; `weights` holds those of L, mu and V, `target` those of V'. All float64."""
    total, values, predictions = 0.0, [], []
    nb_rows = len(batch.reward)
    for i in range(nb_rows):
        entries, mu = (naive_net(weights[4 * n : 4 * n + 4], batch.state0[i]) for n in (0, 1))
        value = naive_net(weights[8:12], batch.state0[i])[0]
        q = value + naive_advantage(entries, mu, batch.action[i], mode)
        y = batch.reward[i]
        if not batch.terminal1[i]:
            y = y + batch.discount[i] * naive_net(target, batch.state1[i])[0]
        error = abs(y - q)
        inside = error <= delta_clip
        total += batch.weight[i] * (0.5 * error**2 if inside else delta_clip * (error - 0.5 * delta_clip)) / nb_rows
        values.append(value)
        predictions.append(q)
    return total, np.mean(values), np.array(predictions)


def naive_updates(weights, target, batches, mode, delta_clip, rate, tau):
    """Gradient descent with central differences, then the target moves; returns the loss and mean V of each step."""
    logs = []
    for t in range(len(batches.reward)):
        batch = Batch._make([None if x is None else x[t].astype("f8") for x in batches])
        loss, mean, _ = naive_loss(weights, target, batch, mode, delta_clip)
        logs.append((loss, mean))
        gradients = []
        for w in weights:
            gradient = np.zeros_like(w)
            for place in np.ndindex(w.shape):
                both = []
                for shift in (1e-5, -1e-5):
                    w[place] += shift
                    both.append(naive_loss(weights, target, batch, mode, delta_clip)[0])
                    w[place] -= shift
                gradient[place] = (both[0] - both[1]) / 2e-5
            gradients.append(gradient)
        for w, gradient in zip(weights, gradients, strict=True):
            w -= rate * gradient
        for w, source in zip(target, weights[8:12], strict=True):
            w += tau * (source - w)
    return np.mean(logs, axis=0)


# ---- learning: the equation ------------------------------------------------------------------------------------------


def test_names_of_keras_rl():
    for module in (rl.agents, dqn):
        assert module.NAFAgent is module.ContinuousDQNAgent is NAFAgent is ContinuousDQNAgent
        assert module.NAFLayer is NAFLayer


@pytest.mark.parametrize("delta_clip", [float("inf"), 0.7])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("nb_actions", [1, 2, 3])
def test_whole_updates_equal_a_naive_twin(nb_actions, mode, delta_clip):
    agent = make_agent(nb_actions, mode, keras.optimizers.SGD(0.05), delta_clip=delta_clip, target_model_update=0.3)
    agent.target_V_model.set_weights([w + 0.1 for w in agent.target_V_model.get_weights()])
    parts = (agent.L_model, agent.mu_model, agent.V_model)
    weights = [w.astype("f8") for part in parts for w in part.get_weights()]
    target = [w.astype("f8") for w in agent.target_V_model.get_weights()]
    batches = random_batches(nb_actions, k=3, seed=nb_actions)
    loss, mean_q = naive_updates(weights, target, Batch._make([None if x is None else x[:2] for x in batches]),
                                 mode, delta_clip, 0.05, 0.3)  # fmt: skip
    logs = train_on(agent, batches, n=2)  # the third is padding
    assert logs["loss"] == pytest.approx(loss, rel=1e-4)
    assert logs["mean_q"] == pytest.approx(mean_q, abs=1e-5)
    learnt = [w for part in parts for w in part.get_weights()]
    for new, expected in zip(learnt, weights, strict=True):
        np.testing.assert_allclose(new, expected, rtol=1e-4, atol=2e-5)
    for new, expected in zip(agent.target_V_model.get_weights(), target, strict=True):
        np.testing.assert_allclose(new, expected, rtol=1e-4, atol=2e-5)
    assert [w.shape for w in agent.model.get_weights()] == [w.shape for w in weights]  # L, mu, V, as in keras-rl's file


def test_the_target_is_the_target_networks_value_alone():
    agent = make_agent(2)
    constant = [np.zeros_like(w) for w in agent.target_V_model.get_weights()]
    constant[-1][...] = 7.0
    agent.target_V_model.set_weights(constant)
    batch = one(random_batches(2, size=16))
    expected = batch.reward + batch.discount * (1 - batch.terminal1) * 7
    np.testing.assert_allclose(agent.td_target(batch), expected, rtol=1e-5)
    loss, target, prediction, logs = agent.loss_fn(batch)
    np.testing.assert_allclose(target, expected, rtol=1e-5)
    np.testing.assert_allclose(loss, np.mean(batch.weight * (expected - numpy(prediction)) ** 2 / 2), rtol=1e-5)
    np.testing.assert_allclose(logs["mean_q"], np.mean(numpy(agent.V_model(batch.state0))), rtol=1e-5)


def test_hard_updates_copy_the_value_network_and_nothing_else():
    agent = make_agent(2, target_model_update=10)
    first = agent.target_V_model.get_weights()
    fit(agent, nb_steps=9)
    np.testing.assert_array_equal(agent.target_V_model.get_weights()[0], first[0])
    fit(agent, nb_steps=11)
    for a, b in zip(agent.target_V_model.get_weights(), agent.V_model.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    assert len(agent.targets()) == 1


def test_metrics_and_regularisers():
    def penalised(nb_outputs):
        x = keras.Input((1, 3))
        return keras.Model(
            x, layers.Dense(nb_outputs, kernel_regularizer=keras.regularizers.L2(0.5))(layers.Flatten()(x))
        )

    networks = [penalised(1), penalised(3), penalised(2)]
    agent = make_agent(networks=networks, optimizer=keras.optimizers.SGD(0.0),
                       compile_options={"metrics": ["mae", dqn.mean_q]})  # fmt: skip
    assert agent.metrics_names == ["loss", "mae", "mean_q"]
    batches = random_batches(2)
    plain, target, prediction, _ = agent.loss_fn(one(batches))
    logs = train_on(agent, batches)
    penalty = sum(0.5 * np.sum(np.square(n.get_weights()[0])) for n in networks)
    assert logs["loss"] == pytest.approx(float(plain) + penalty, rel=1e-5)
    assert logs["mae"] == pytest.approx(np.abs(numpy(target) - numpy(prediction)).mean(), rel=1e-5)


# ---- learning: values that are known ---------------------------------------------------------------------------------


@keras.saving.register_keras_serializable("test_naf")
class Products(layers.Layer):
    """`x_i x_j` for i <= j."""

    def call(self, x):
        rows, columns = np.triu_indices(x.shape[1])
        return ops.take(x, rows, axis=1) * ops.take(x, columns, axis=1)


def start(*networks, nb_actions, rate, nb_updates, **options):
    """An agent whose learning rate falls to a hundredth, so that Adam comes to rest."""
    options = {"nb_steps_warmup": 200, "target_model_update": 0.1, "batch_size": 32} | options
    memory = SequentialMemory(20_000, window_length=1)
    agent = NAFAgent(*networks, nb_actions=nb_actions, memory=memory, **options)
    schedule = keras.optimizers.schedules.PolynomialDecay(rate, nb_updates, rate / 100)
    agent.compile(keras.optimizers.Adam(schedule), jit_compile=False, steps_per_execution=32)
    return agent


def linear(nb_inputs, nb_outputs, features=None, **options):
    x = keras.Input((1, nb_inputs))
    y = layers.Flatten()(x)
    y = layers.Dense(nb_outputs, kernel_initializer="zeros", **options)(y if features is None else features(y))
    return keras.Model(x, y)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_linear_quadratic_regulator_is_found_exactly(size):
    s, gain, precision = LinearQuadratic(size).solution()
    if size == 1:
        np.testing.assert_allclose([s[0, 0], gain[0, 0], precision[0, 0]], [1.238432, 1.324624, 0.757295], atol=1e-6)
    agent = start(
        linear(size, 1, Products(), use_bias=False),
        linear(size, nb_entries(size)),
        linear(size, size, use_bias=False),
        GaussianWhiteNoiseProcess(sigma=1.0, size=size),
        nb_actions=size,
        gamma=LinearQuadratic.GAMMA,
        rate=0.03,
        nb_updates=3000,
    )
    agent.fit(DummyVecEnv([lambda: LinearQuadratic(size)] * 4), nb_steps=3200, verbose=0, seed=1)
    states = np.random.default_rng(0).uniform(-1, 1, (50, 1, size)).astype("f4")
    x = states[:, 0]
    np.testing.assert_allclose(agent.model.precision(states), np.broadcast_to(precision, (50, size, size)), atol=0.02)
    np.testing.assert_allclose(agent.model.mu(states), -x @ gain.T, atol=0.02)
    np.testing.assert_allclose(agent.V_model(states)[:, 0], -np.sum((x @ s) * x, axis=1), atol=0.02)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("low", "high"), [(-2, 2), (0, 1)])
def test_a_bandits_best_action_is_found_within_its_bounds(low, high, mode):
    agent = start(
        *[linear(1, 1) for _ in range(3)],
        GaussianWhiteNoiseProcess(sigma=0.5),
        mode,
        nb_actions=1,
        rate=0.02,
        nb_updates=1500,
    )
    agent.fit(Bandit(low, high), nb_steps=1700, verbose=0, seed=1)
    one = np.ones((1, 1, 1), "f4")
    assert float(agent.model.mu(one)[0, 0]) == pytest.approx(0.3, abs=0.02)
    assert float(agent.model.precision(one)[0, 0, 0]) == pytest.approx(2, abs=0.1)  # -(a - 0.3)^2 = -P (a - mu)^2 / 2
    assert float(agent.V_model(one)[0, 0]) == pytest.approx(0, abs=0.02)
    actions = agent.memory.actions[:]
    assert np.min(actions) >= low and np.max(actions) <= high


@pytest.mark.parametrize("lanes", [1, 3])
def test_a_time_limit_is_not_a_terminal_state(lanes):
    class Continuous(ConstantReward):
        action_space = spaces.Box(-1, 1, (1,), np.float32)

    agent = start(
        *[linear(1, 1, use_bias=False) for _ in range(3)],
        nb_actions=1,
        rate=1.0,
        nb_updates=2400,
        gamma=0.99,
        target_model_update=0.9,
    )
    agent.compile(keras.optimizers.SGD(0.9), jit_compile=False, steps_per_execution=32)
    env = Continuous(5) if lanes == 1 else DummyVecEnv([lambda: Continuous(5)] * lanes)
    agent.fit(env, nb_steps=2600, verbose=0, seed=0)
    assert float(agent.V_model(np.ones((1, 1, 1), "f4"))[0, 0]) == pytest.approx(100, abs=1)


# ---- what keras-rl got wrong -----------------------------------------------------------------------------------------


def networks_of_keras_rl(nb_actions=2, nb_observations=1, shape=(1, 3)):
    """V and mu of the observations, L of the action and the observations, as in keras-rl's example."""
    action = keras.Input((nb_actions,), name="action_input")
    observations = [keras.Input(shape) for _ in range(nb_observations)]
    joined = layers.Concatenate()([action, *[layers.Flatten()(x) for x in observations]])
    x = layers.Dense(4, "tanh", kernel_initializer=keras.initializers.RandomNormal(seed=5))(joined)
    l_model = keras.Model([action, *observations], layers.Dense(nb_entries(nb_actions))(x))
    others = []
    for n in (1, nb_actions):
        inputs = [keras.Input(shape) for _ in range(nb_observations)]
        flat = [layers.Flatten()(x) for x in inputs]
        flat = layers.Concatenate()(flat) if len(flat) > 1 else flat[0]
        others.append(keras.Model(inputs, layers.Dense(n)(flat)))
    return others[0], l_model, others[1]


def test_a_precision_network_that_takes_the_action_is_given_zeros(tmp_path):
    with pytest.warns(
        UserWarning, match="zeros for its input 'action_input'.*Fix: an L_model of the observations"
    ) as caught:
        agent = make_agent(networks=networks_of_keras_rl())
    assert len([w for w in caught if w.category is UserWarning]) == 1
    states = np.random.default_rng(0).normal(size=(5, 1, 3)).astype("f4")
    mu = numpy(agent.model.mu(states))
    best, value = agent.model.q_and_value(states, mu)
    np.testing.assert_allclose(best, value, rtol=1e-6)
    for size in (0.1, 1.0, 5.0):  # in every direction it falls, by the same quadratic
        step = size * np.array([0.6, -0.8], "f4")
        up, down = (numpy(agent.model.q_and_value(states, mu + sign * step)[0]) for sign in (1, -1))
        np.testing.assert_allclose(up, down, rtol=1e-4)
        assert (up < numpy(value)).all()
    np.testing.assert_allclose(agent.L_model([np.zeros((5, 2), "f4"), states]), agent.model._entries(states, False))
    fit(agent, nb_steps=40)
    agent.save(tmp_path / "old.keras")
    with pytest.warns(UserWarning, match="action_input"):
        loaded = keras.saving.load_model(tmp_path / "old.keras")
    np.testing.assert_allclose(loaded.model.precision(states), agent.model.precision(states), rtol=1e-6)
    fit(loaded, nb_steps=40)


def test_a_precision_network_of_the_action_and_two_observations():
    class Two(Weather):
        observation_space = spaces.Tuple([Weather.observation_space] * 2)

        def reset(self, **options):
            x, info = super().reset(**options)
            return (x, -x), info

        def step(self, action):
            x, *rest = super().step(action)
            return (x, -x), *rest

    with pytest.warns(UserWarning, match="action_input"):
        agent = make_agent(networks=networks_of_keras_rl(nb_observations=2))
    fit(agent, Two())
    assert agent.run_state.nb_updates == 16
    x = np.ones((4, 1, 3), "f4")
    assert agent.combined_model([np.zeros((4, 2), "f4"), x, -x]).shape == (4, 1)


@pytest.mark.parametrize("mode", MODES)
def test_a_curvature_is_positive_whatever_the_network_says(mode):
    agent = make_agent(3, mode, optimizer=None)
    weights = agent.L_model.get_weights()
    agent.L_model.set_weights([np.zeros_like(w) for w in weights[:-1]] + [np.full_like(weights[-1], -2.0)])
    precision = numpy(agent.model.precision(np.ones((1, 1, 3), "f4")))[0]
    assert (np.linalg.eigvalsh(precision.astype("f8")) > 0).all()
    assert precision[0, 0] == pytest.approx(np.exp(-4), rel=1e-4)  # keras-rl took -2 itself for "diag"


@pytest.mark.parametrize("lanes", [1, 3])
def test_the_executed_action_is_the_one_that_is_learnt_from(lanes):
    envs = [Weather(BOX[3]) for _ in range(lanes)]
    agent = make_agent(3, random_process=OrnsteinUhlenbeckProcess(theta=0.15, sigma=0.5, dt=1.0, size=3))
    fit(agent, envs[0] if lanes == 1 else DummyVecEnv([lambda e=e: e for e in envs]), nb_steps=60)
    stored = {tuple(a) for a in np.round(np.asarray(agent.memory.actions[:]), 5).tolist()}
    executed = {tuple(a) for env in envs for a in np.round(env.actions, 5).tolist()}
    assert len(executed) > 30 and stored <= executed
    assert np.abs(list(executed)).max() == 0.5  # some were clipped


# ---- precision, files ------------------------------------------------------------------------------------------------


def test_in_half_precision_the_quadratic_form_is_float32():
    keras.mixed_precision.set_global_policy("mixed_float16")
    agent = make_agent(2)
    assert agent.mu_model.layers[2].compute_dtype == "float16" and agent.model.naf_layer.compute_dtype == "float32"
    batch = one(random_batches(2))._replace(action=np.full((5, 2), 300.0, "f4"))  # whose square float16 cannot hold
    loss, target, prediction, logs = agent.loss_fn(batch)
    for tensor in (loss, target, prediction, logs["mean_q"], agent(batch.state0), agent.model.precision(batch.state0)):
        assert keras.backend.standardize_dtype(tensor.dtype) == "float32" and np.isfinite(numpy(tensor)).all()
    assert (numpy(prediction) < -1000).all()


def test_networks_may_share_layers(tmp_path):
    x = keras.Input((1, 3))
    trunk = layers.Dense(6, "tanh")(layers.Flatten()(x))
    agent = make_agent(networks=[keras.Model(x, layers.Dense(n)(trunk)) for n in (1, 3, 2)])
    assert len(agent.model.get_weights()) == 2 + 3 * 2
    fit(agent)
    assert agent.run_state.nb_updates == 16
    before = agent.model.get_weights()
    agent.save_weights(tmp_path / "naf.weights.h5")
    fit(agent)
    agent.load_weights(tmp_path / "naf.weights.h5")
    for old, new in zip(before, agent.model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)
    with pytest.raises(ValueError, match="share layers.*Fix: save_weights"):
        agent.save(tmp_path / "naf.keras")


def test_loaded_weights_reach_all_networks_and_the_target(tmp_path):
    agent, other = (
        make_agent(3, "diag"),
        make_agent(3, "diag", networks=[net(n, 7 + i) for i, n in enumerate((1, 3, 3))]),
    )
    fit(agent)
    agent.save_weights(tmp_path / "naf.h5f")
    other.load_weights(tmp_path / "naf.h5f")
    for a, b in zip(agent.model.get_weights(), other.model.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    for a, b in zip(agent.V_model.get_weights(), other.target_V_model.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_file_of_keras_rl_is_read(tmp_path):
    with pytest.warns(UserWarning, match="action_input"):
        agent = make_agent(networks=networks_of_keras_rl())
    rng = np.random.default_rng(0)
    expected = [rng.normal(size=w.shape).astype("f4") for w in agent.model.get_weights()]
    parts = {"model_1": 4, "sequential_2": 2, "sequential_1": 2}  # L, mu, V, as its combined model names them
    named, rest = [("action_input", []), ("observation_input_0", [])], list(expected)
    for name, n in parts.items():
        named.append((name, [(f"dense_{name}_{i}/weight:0", rest.pop(0)) for i in range(n)]))
    write_as_keras_2(tmp_path / "cdqn_Pendulum-v0_weights.h5f", [*named, ("naf_layer_1", []), ("lambda_1", [])])
    agent.load_weights(tmp_path / "cdqn_Pendulum-v0_weights.h5f")
    for new, old in zip(agent.model.get_weights(), expected, strict=True):
        np.testing.assert_array_equal(new, old)
    np.testing.assert_array_equal(agent.target_V_model.get_weights()[0], agent.V_model.get_weights()[0])


# ---- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "mode", "message"),
    [
        ((1, 2, 2), "full", r"NAFAgent \(L_model\).*\(None, 2\), expected \(None, 3\).*Dense\(3\)"),
        ((1, 3, 2), "diag", r"NAFAgent \(L_model\).*\(None, 3\), expected \(None, 2\).*Dense\(2\)"),
        ((2, 3, 2), "full", r"NAFAgent \(V_model\).*\(None, 2\), expected \(None, 1\).*Dense\(1\)"),
        ((1, 3, 3), "full", r"NAFAgent \(mu_model\).*\(None, 3\), expected \(None, 2\).*Dense\(2\)"),
    ],
)
def test_networks_of_the_wrong_size_are_named(sizes, mode, message):
    with pytest.raises(ValueError, match=message):
        make_agent(2, mode, networks=[net(n) for n in sizes])


def test_other_bad_arguments_are_named():
    with pytest.raises(ValueError, match="covariance_mode.*'full' or 'diag', got 'both'"):
        make_agent(2, networks=[net(1), net(3), net(2)], mode="both")
    with pytest.raises(ValueError, match=r"L_model.*keras.Model as network, got str"):
        make_agent(2, networks=[net(1), "L", net(2)])
    with pytest.raises(ValueError, match=r"noise of shape \(nb_lanes, 2\).*\(2, 3\).*size=2"):
        make_agent(2, random_process=GaussianWhiteNoiseProcess(size=3))


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_network_of_other_observations_is_named_before_the_first_step(which):
    networks = [net(n, shape=(1, 4) if i == which else (1, 3)) for i, n in enumerate((1, 3, 2))]
    agent = make_agent(networks=networks)
    name = ("V_model", "L_model", "mu_model")[which]
    with pytest.raises(ValueError, match=rf"NAFAgent \({name}\).*\(1, 4\).*\(1, 3\)"):
        fit(agent)
    assert agent.step == 0


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (spaces.Discrete(2), r"NAFAgent chooses continuous actions.*Discrete\(2\).*Fix: .*DQNAgent"),
        (spaces.MultiBinary(2), "NAFAgent chooses continuous actions"),
        (BOX[3], r"nb_actions=2.*3 components.*Fix: nb_actions=3"),
    ],
)
def test_an_env_of_other_actions_is_refused_before_the_first_step(space, message):
    agent = make_agent(2)
    with pytest.raises(ValueError, match=message):
        fit(agent, Weather(space))
    assert agent.step == 0


def test_unbounded_actions_are_executed_as_they_are():
    env = Weather(spaces.Box(-np.inf, np.inf, (2,), np.float32))
    agent = make_agent(2, random_process=GaussianWhiteNoiseProcess(sigma=50.0, size=2))
    fit(agent, env, nb_steps=20)
    assert np.abs(env.actions).max() > 20
