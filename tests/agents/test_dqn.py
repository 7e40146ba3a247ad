"""`DQNAgent`: its equations against NumPy twins, every kind of observation and network, optimizers, files, refusals."""

import pathlib
import subprocess
import sys
import warnings

import gymnasium as gym
import keras
import numpy as np
import pytest
from gymnasium import spaces
from keras import layers, ops

from rl.agents.dqn import DQNAgent, mean_q
from rl.common.vec_env import DummyVecEnv
from rl.core import Processor
from rl.memory import Batch, SequentialMemory
from rl.policy import BoltzmannQPolicy, EpsGreedyQPolicy, LinearAnnealedPolicy, Policy
from tests.backends import call_back, tensorflow_only
from tests.toy_envs import Counting


class Spaces(gym.Env):
    """Random observations from any space, episodes of `length` steps, and a record of the actions it was given."""

    def __init__(self, observation_space, action_space=None, length=4, truncate=False):
        self.observation_space = observation_space
        self.action_space = action_space or spaces.Discrete(3)
        self.length, self.truncate = length, truncate
        self.actions = []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.t = 0
        return self.observation_space.sample(), {}

    def step(self, action):
        self.actions.append(action)
        self.t += 1
        end = self.t >= self.length
        return self.observation_space.sample(), float(action == 0), end and not self.truncate, end and self.truncate, {}


def mlp(*shape, nb_actions=3, hidden=8, seed=0):
    first, last = (keras.initializers.GlorotUniform(seed=seed + i) for i in range(2))
    bias = keras.initializers.RandomNormal(seed=seed)
    return keras.Sequential(
        [
            layers.Input(shape),
            layers.Flatten(),
            layers.Dense(hidden, activation="tanh", kernel_initializer=first),
            layers.Dense(nb_actions, kernel_initializer=last, bias_initializer=bias),
        ]
    )


def joined(inputs, nb_actions=3):
    flat = [layers.Flatten()(x) for x in keras.tree.flatten(inputs)]
    return keras.Model(inputs, layers.Dense(nb_actions)(layers.Concatenate()(flat) if len(flat) > 1 else flat[0]))


def make_agent(model=None, compiled=True, optimizer="adam", metrics=None, jit_compile=False, window=1, **options):
    options = {"nb_steps_warmup": 8, "target_model_update": 0.1, "batch_size": 8, "nb_actions": 3} | options
    options.setdefault("memory", SequentialMemory(200, window_length=window))
    agent = DQNAgent(mlp(window, 3) if model is None else model, **options)
    if compiled:
        agent.compile(optimizer, metrics=metrics, jit_compile=jit_compile)
    return agent


def fit(agent, env=None, nb_steps=24, **options):
    return agent.fit(Counting() if env is None else env, nb_steps=nb_steps, verbose=0, **options)


def train_on(agent, batch):
    """One gradient step on a batch (B, ...) through the compiled function; returns the metrics by name."""
    agent._make_functions()
    fields = tuple(np.asarray(x)[None] for x in batch[:-1])
    values, _ = agent._functions[1](fields, np.int32(1), np.asarray(batch.state0)[:1])
    return dict(zip(agent.metrics_names, values, strict=False))


def random_batch(size=16, window=1, nb_actions=3, scale=1.0, seed=0):
    rng = np.random.default_rng(seed)
    return Batch(
        state0=rng.normal(size=(size, window, 3)).astype("f4"),
        action=rng.integers(nb_actions, size=size),
        reward=(scale * rng.normal(size=size)).astype("f4"),
        state1=rng.normal(size=(size, window, 3)).astype("f4"),
        terminal1=(rng.random(size) < 0.4).astype("f4"),
        discount=rng.choice([0.9, 0.81], size=size).astype("f4"),
        weight=rng.random(size).astype("f4"),
        index=np.arange(size),
    )


def to_list(tensor):
    return ops.convert_to_numpy(tensor)


# ---- equations -----------------------------------------------------------------------------------------------------


def naive_q(weights, state, dueling):
    """Q-values of one state, from the weights of `mlp`, with loops and lists only."""
    kernel0, bias0, kernel1, bias1 = [w.astype("f8") for w in weights]
    hidden = np.tanh(state.reshape(-1).astype("f8") @ kernel0 + bias0)
    out = (hidden @ kernel1 + bias1).tolist()
    if dueling is None:
        return out
    value, advantages = out[0], out[1:]
    baseline = {"avg": sum(advantages) / len(advantages), "max": max(advantages), "naive": 0.0}[dueling]
    return [value + a - baseline for a in advantages]


@pytest.mark.parametrize("delta_clip", [0.3, 1.0, float("inf")])
@pytest.mark.parametrize("dueling", [None, "avg", "max", "naive"])
@pytest.mark.parametrize("double", [False, True])
def test_target_and_loss_equal_a_naive_twin(double, dueling, delta_clip):
    options = {} if dueling is None else {"enable_dueling_network": True, "dueling_type": dueling}
    agent = make_agent(mlp(2, 3), window=2, enable_double_dqn=double, delta_clip=delta_clip, **options)
    rng = np.random.default_rng(1)
    agent.target_model.set_weights([rng.normal(size=w.shape) for w in agent.target_model.get_weights()])
    online, target = agent.model.get_weights(), agent.target_model.get_weights()
    batch = random_batch(window=2)

    targets, losses, predictions, largest = [], [], [], []
    for i in range(16):
        q0 = naive_q(online, batch.state0[i], dueling)
        q1 = naive_q(target, batch.state1[i], dueling)
        choose = naive_q(online, batch.state1[i], dueling) if double else q1
        best = q1[choose.index(max(choose))]
        y = float(batch.reward[i]) + (0.0 if batch.terminal1[i] else float(batch.discount[i]) * best)
        error = abs(y - q0[batch.action[i]])
        inside = error <= delta_clip
        losses.append(float(batch.weight[i]) * (0.5 * error**2 if inside else delta_clip * (error - 0.5 * delta_clip)))
        targets.append(y)
        predictions.append(q0[batch.action[i]])
        largest.append(max(q0))

    loss, y, prediction, logs = agent.loss_fn(batch)
    np.testing.assert_allclose(to_list(y), targets, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(to_list(prediction), predictions, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(to_list(loss), np.mean(losses), rtol=1e-4)
    np.testing.assert_allclose(to_list(logs["mean_q"]), np.mean(largest), rtol=1e-4)
    np.testing.assert_allclose(to_list(agent.td_target(batch)), targets, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("dueling", [False, True])
def test_the_target_network_is_used_and_only_it(double, dueling):
    agent = make_agent(enable_double_dqn=double, enable_dueling_network=dueling)
    constant = [np.zeros_like(w) for w in agent.target_model.get_weights()]
    constant[-1][...] = 0.0 if dueling else 7.0
    constant[-1][0] = 7.0
    agent.target_model.set_weights(constant)
    batch = random_batch()
    expected = batch.reward + batch.discount * (1 - batch.terminal1) * 7
    np.testing.assert_allclose(to_list(agent.td_target(batch)), expected, rtol=1e-5)


@pytest.mark.parametrize("kind", ["avg", "max", "naive"])
def test_a_dueling_head_works_row_by_row(kind):
    agent = make_agent(enable_dueling_network=True, dueling_type=kind)
    states = np.random.default_rng(0).normal(size=(32, 1, 3)).astype("f4") * 3
    together = agent.compute_batch_q_values(states)
    one_by_one = np.stack([agent.compute_q_values(list(state)) for state in states])
    np.testing.assert_allclose(together, one_by_one, atol=1e-6)


def test_a_dueling_head_replaces_a_dense_layer_and_a_linear_activation_behind_it():
    model = keras.Sequential(
        [layers.Input((1, 3)), layers.Flatten(), layers.Dense(8), layers.Dense(3), layers.Activation("linear")]
    )
    agent = make_agent(model, enable_dueling_network=True)
    assert [w.shape for w in agent.model.get_weights()] == [(3, 8), (8,), (8, 4), (4,)]


def test_a_dueling_head_with_several_inputs_and_branches():
    a, b = keras.Input((1, 3), name="a"), keras.Input((1, 2), name="b")
    x = layers.Concatenate()([layers.Flatten()(a), layers.Dense(4)(layers.Flatten()(b))])
    model = keras.Model([a, b], layers.Dense(3)(layers.Dense(5, activation="relu")(x)))
    agent = make_agent(model, enable_dueling_network=True)
    fit(agent, Spaces(spaces.Dict({"a": spaces.Box(-1, 1, (3,)), "b": spaces.Box(-1, 1, (2,))})))
    assert agent.run_state.nb_updates == 16


def test_a_dueling_head_needs_one_layer_to_replace():
    x = keras.Input((1, 3))
    y = layers.Flatten()(x)
    branches = keras.Model(x, layers.Add()([layers.Dense(3)(y), layers.Dense(3)(layers.Dense(4)(y))]))
    for model in (branches, Subclassed.built(1, 3)):
        with pytest.raises(ValueError, match="enable_dueling_network"):
            make_agent(model, enable_dueling_network=True)
    with pytest.raises(ValueError, match="dueling_type.*'mean'"):
        make_agent(enable_dueling_network=True, dueling_type="mean")


def test_online_and_target_network_are_two():
    agent = make_agent()
    before = agent.target_model.get_weights()
    agent.model.set_weights([w + 1 for w in agent.model.get_weights()])
    for old, new in zip(before, agent.target_model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)


@pytest.mark.parametrize("truncate", [False, True])
@pytest.mark.parametrize("lanes", [1, 3])
def test_a_truncated_episode_bootstraps_and_a_terminated_one_does_not(truncate, lanes):
    def make():
        return Counting(lengths=(1,), truncate=truncate)  # every transition ends an episode

    agent = make_agent(nb_steps_warmup=1000)
    fit(agent, make() if lanes == 1 else DummyVecEnv([make] * lanes), nb_steps=12)
    batch = Batch(*[None if x is None else np.asarray(x)[0] for x in agent.memory.sample_batch(8, gamma=0.5)])
    best = agent.compute_batch_q_values(batch.state1).max(axis=1)
    assert (np.abs(best) > 1e-3).all()
    expected = batch.reward + (0.5 * best if truncate else 0.0)
    np.testing.assert_allclose(to_list(agent.td_target(batch)), expected, rtol=1e-5)
    assert batch.state1[:, 0, 2].tolist() == [1.0] * 8  # the true last observation, not the reset one


def test_delta_clip_bounds_what_one_transition_can_do():
    def bias_after(delta_clip):
        model = keras.Sequential([layers.Input((1, 3)), layers.Flatten(), layers.Dense(3, kernel_initializer="zeros")])
        agent = make_agent(model, optimizer=keras.optimizers.SGD(1.0), delta_clip=delta_clip)
        batch = random_batch(size=4)._replace(
            reward=np.array([50, 0.25, -50, 0], "f4"),
            action=np.array([0, 1, 2, 0]),
            terminal1=np.ones(4, "f4"),
            weight=np.ones(4, "f4"),
        )
        train_on(agent, batch)
        return agent.model.get_weights()[1] * 4  # the loss is a mean over four rows

    np.testing.assert_allclose(bias_after(1.0), [1, 0.25, -1], atol=1e-6)
    np.testing.assert_allclose(bias_after(float("inf")), [50, 0.25, -50], atol=1e-5)


def test_huge_rewards_stay_finite_with_delta_clip():
    class Huge(Counting):
        def step(self, action):
            observation, _, *rest = super().step(action)
            return observation, 1e6 * (-1.0) ** self.total, *rest

    agent = make_agent(delta_clip=1.0, gamma=0.99)
    fit(agent, Huge(), nb_steps=500)
    assert all(np.isfinite(w).all() for w in agent.get_weights())


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("kind", ["kernel", "activity"])
def test_regularisers_add_to_the_loss_of_the_states_that_are_learnt(kind, double):
    penalty = {f"{kind}_regularizer": keras.regularizers.L2(0.5)}
    model = keras.Sequential([layers.Input((1, 3)), layers.Flatten(), layers.Dense(3, **penalty)])
    agent = make_agent(model, optimizer=keras.optimizers.SGD(0.0), enable_double_dqn=double)
    batch = random_batch()
    plain = float(agent.loss_fn(batch)[0])
    kernel, bias = agent.model.get_weights()
    if kind == "kernel":
        expected = 0.5 * np.sum(kernel**2)
    else:
        expected = 0.5 * np.sum((batch.state0[:, 0] @ kernel + bias) ** 2) / 16
    assert train_on(agent, batch)["loss"] == pytest.approx(plain + expected, rel=1e-4)


def test_a_kernel_regulariser_shrinks_weights_without_any_error():
    layer = layers.Dense(3, kernel_regularizer=keras.regularizers.L2(0.5), use_bias=False)
    agent = make_agent(
        keras.Sequential([layers.Input((1, 3)), layers.Flatten(), layer]), optimizer=keras.optimizers.SGD(0.1)
    )
    before = agent.model.get_weights()[0]
    train_on(agent, random_batch()._replace(weight=np.zeros(16, "f4")))
    np.testing.assert_allclose(agent.model.get_weights()[0], 0.9 * before, rtol=1e-5)


# ---- metrics -------------------------------------------------------------------------------------------------------


@keras.saving.register_keras_serializable("test_dqn")
class Spy(keras.metrics.Metric):
    """Sums what it is given, and fails on anything but two float32 vectors."""

    def __init__(self, name="spy", **kwargs):
        super().__init__(name=name, **kwargs)
        self.total = self.add_weight(name="total", initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        if len(y_true.shape) != 1 or len(y_pred.shape) != 1:
            raise ValueError("not vectors")
        self.total.assign_add(ops.sum(y_true) + 1000 * ops.sum(y_pred))

    def result(self):
        return self.total + 0.0

    def reset_state(self):
        self.total.assign(0.0)


def test_user_metrics_compare_the_target_with_the_prediction():
    agent = make_agent(metrics=["mae", Spy(), keras.metrics.MeanSquaredError(name="error2")])
    assert agent.metrics_names == ["loss", "mae", "spy", "error2", "mean_q"]
    for seed in range(2):  # the second call starts from zero
        batch = random_batch(seed=seed)
        _, target, prediction, _ = (to_list(x) if not isinstance(x, dict) else x for x in agent.loss_fn(batch))
        logs = train_on(agent, batch)
        assert logs["mae"] == pytest.approx(np.abs(target - prediction).mean(), rel=1e-5)
        assert logs["spy"] == pytest.approx(target.sum() + 1000 * prediction.sum(), rel=1e-4)
        assert logs["error2"] == pytest.approx(np.square(target - prediction).mean(), rel=1e-5)


def test_metrics_reach_the_logs_and_compiling_again_replaces_them():
    def bias(y_true, y_pred):
        return ops.mean(y_pred - y_true)

    agent = make_agent(metrics=[bias, keras.metrics.MeanAbsoluteError])
    history = fit(agent).history
    assert {"loss", "bias", "mean_absolute_error", "mean_q"} <= set(history)
    assert np.isfinite(history["bias"][-1])
    agent.compile("sgd", metrics=["mse"], jit_compile=False)
    assert agent.metrics_names == ["loss", "mse", "mean_q"]
    assert np.isfinite(fit(agent).history["mse"][-1])


def test_mean_q_of_keras_rl_is_accepted_and_logged_once():
    agent = make_agent(metrics=[mean_q, "mae"])
    assert agent.metrics_names == ["loss", "mae", "mean_q"]
    batch = random_batch()
    expected = agent.compute_batch_q_values(batch.state0).max(axis=1).mean()
    assert train_on(agent, batch)["mean_q"] == pytest.approx(expected, rel=1e-5)
    q = np.array([[1.0, 3.0], [5.0, 2.0]], "f4")
    assert float(mean_q(None, q)) == 4.0


@pytest.mark.parametrize("metrics", [["mae", "mae"], [Spy(name="loss")], [Spy(name="mean_q")]])
def test_two_metrics_of_one_name_are_refused(metrics):
    with pytest.raises(ValueError, match="metrics must be of different names"):
        make_agent(metrics=metrics)


# ---- observations --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "window"), [((3,), 1), ((1, 3), 1), ((3, 3), 3), ((4, 3), 4)], ids=["plain", "W=1", "W=3", "W=4"]
)
@pytest.mark.parametrize("lanes", [1, 3])
def test_inputs_with_and_without_the_window_axis(shape, window, lanes):
    agent = make_agent(mlp(*shape), window=window)
    fit(agent, Counting() if lanes == 1 else DummyVecEnv([Counting] * lanes))
    agent.test(Counting(), nb_episodes=2, verbose=0, visualize=False)
    assert agent.run_state.nb_updates == 16
    assert agent.compute_q_values([np.zeros(3)] * window).shape == (3,)


def test_an_input_without_a_window_axis_learns_the_same():
    plain, windowed = make_agent(mlp(3)), make_agent(mlp(1, 3))
    for agent in (plain, windowed):
        fit(agent, seed=3)
    for a, b in zip(plain.get_weights(), windowed.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


PARTS = {"img": spaces.Box(0, 255, (8, 8, 1), np.uint8), "vec": spaces.Box(-1, 1, (3,), np.float32)}


def named_inputs(window):
    return [keras.Input((window, *PARTS[key].shape), name=key) for key in ("vec", "img")]


class Parts(Spaces):
    """A `Dict` space; the observations' keys come in the order given, whatever the space's is."""

    def __init__(self, keys, **options):
        super().__init__(spaces.Dict([(key, PARTS[key]) for key in sorted(PARTS)]), **options)
        self.keys = keys
        self.seen = []

    def _ordered(self, observation):
        observation = {key: observation[key] for key in self.keys}
        self.seen.append(observation)
        return observation

    def reset(self, **kwargs):
        observation, info = super().reset(**kwargs)
        return self._ordered(observation), info

    def step(self, action):
        observation, *rest = super().step(action)
        return self._ordered(observation), *rest


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("lanes", [1, 2])
def test_dict_observations_are_routed_by_name_whatever_their_order(window, lanes):
    results = []
    for keys in (("img", "vec"), ("vec", "img")):
        keras.utils.set_random_seed(1)
        np.random.seed(1)
        agent = make_agent(joined(named_inputs(window)), window=window, enable_double_dqn=True)
        envs = [Parts(keys) for _ in range(lanes)]
        fit(agent, envs[0] if lanes == 1 else DummyVecEnv([lambda env=env: env for env in envs]), seed=5)
        assert agent.run_state.nb_updates == 16
        state = [{key: np.full(PARTS[key].shape, 1 + i, PARTS[key].dtype) for key in keys} for i in range(window)]
        results.append([*agent.get_weights(), agent.compute_q_values(state), agent.compute_batch_q_values([state] * 2)])
    for a, b in zip(*results, strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_allclose(results[0][-1][0], results[0][-2], atol=1e-5)


def test_the_parts_of_a_window_are_padded_with_zeros_of_their_own_shape():
    seen = []

    @keras.saving.register_keras_serializable("test_dqn")
    class Record(layers.Layer):
        def call(self, x):
            call_back(seen.append, x)
            return x + 0.0

    vec, img = named_inputs(3)
    model = joined([vec, img])
    flat = layers.Concatenate()([layers.Flatten()(Record()(vec)), layers.Flatten()(Record()(img))])
    model = keras.Model([vec, img], layers.Dense(3)(flat))
    agent = make_agent(model, window=3, nb_steps_warmup=1000)
    env = Parts(("img", "vec"))
    seen.clear()
    fit(agent, env, nb_steps=6)
    acted = {shape: [x[0] for x in seen if x.shape == shape] for shape in ((1, 3, 3), (1, 3, 8, 8, 1))}
    for key, shape in (("vec", (1, 3, 3)), ("img", (1, 3, 8, 8, 1))):
        frames = [observation[key] for observation in env.seen]  # 0-4: first episode, 5-: second
        assert len(acted[shape]) == 6
        for step, window in {0: [None, None, 0], 1: [None, 0, 1], 3: [1, 2, 3], 4: [None, None, 5]}.items():
            for frame, index in zip(acted[shape][step], window, strict=True):
                np.testing.assert_array_equal(frame, np.zeros_like(frame) if index is None else frames[index])


@pytest.mark.parametrize("window", [1, 3])
def test_tuple_and_nested_observations(window):
    two = spaces.Tuple([PARTS["vec"], PARTS["img"]])
    fit(agent := make_agent(joined(named_inputs(window)), window=window), Spaces(two))
    assert agent.run_state.nb_updates == 16
    nested = spaces.Dict([("a", spaces.Dict(PARTS)), ("b", spaces.Tuple([PARTS["vec"], spaces.Discrete(5)]))])
    shapes = [(8, 8, 1), (3,), (3,), ()]
    fit(
        agent := make_agent(joined([keras.Input((window, *s)) for s in shapes]), window=window),
        DummyVecEnv([lambda: Spaces(nested)] * 2),
    )
    assert agent.run_state.nb_updates == 16
    agent.test(Spaces(nested), nb_episodes=1, verbose=0, visualize=False)


def test_a_model_made_with_a_dict_of_inputs():
    vec, img = named_inputs(1)
    agent = make_agent(joined({"vec": vec, "img": img}))
    fit(agent, Parts(("vec", "img")))
    assert agent.run_state.nb_updates == 16


@pytest.mark.parametrize("rescaled", [False, True])
def test_uint8_images_stay_uint8_until_the_network(rescaled):
    rescale = [layers.Rescaling(1 / 255)] * rescaled
    body = [layers.Permute((2, 3, 1, 4)), layers.Reshape((8, 8, 4)), *rescale, layers.Conv2D(2, 3), layers.Flatten()]
    model = keras.Sequential([layers.Input((4, 8, 8, 1)), *body, layers.Dense(3)])
    agent = make_agent(model, window=4)
    fit(agent, Spaces(PARTS["img"]))
    assert agent.memory.observations[0].dtype == np.uint8
    state = np.random.default_rng(0).integers(256, size=(1, 4, 8, 8, 1)).astype(np.uint8)
    np.testing.assert_allclose(agent.compute_batch_q_values(state), model(state.astype("f4")), rtol=1e-5)


def test_discrete_observations():
    embedded = keras.Sequential(
        [layers.Input((1,), dtype="int32"), layers.Embedding(6, 4), layers.Flatten(), layers.Dense(3)]
    )
    for model, shape in ((embedded, (1,)), (keras.Sequential([layers.Input((1,)), layers.Dense(3)]), (1,))):
        agent = make_agent(model)
        fit(agent, Spaces(spaces.Discrete(6)))
        assert agent.run_state.nb_updates == 16
        assert agent.compute_batch_q_values(np.zeros((5, *shape), np.int64)).shape == (5, 3)


def test_float64_observations():
    agent = make_agent(mlp(1, 3))
    fit(agent, Spaces(spaces.Box(-1, 1, (3,), np.float64)))
    assert agent.compute_batch_q_values(np.zeros((3000, 1, 3))).dtype == np.float32  # large: travels on its own


def test_a_recurrent_network_over_a_window():
    model = keras.Sequential([layers.Input((4, 3)), layers.LSTM(5), layers.Dense(3)])
    agent = make_agent(model, window=4)
    fit(agent, DummyVecEnv([Counting] * 2))
    assert agent.run_state.nb_updates == 16


# ---- networks ------------------------------------------------------------------------------------------------------


@keras.saving.register_keras_serializable("test_dqn")
class Scale(layers.Layer):
    def build(self, shape):
        self.factor = self.add_weight(shape=(shape[-1],), initializer="ones", name="factor")

    def call(self, x):
        return x * self.factor


@keras.saving.register_keras_serializable("test_dqn")
class Subclassed(keras.Model):
    def __init__(self, units=8, nb_actions=3, **kwargs):
        super().__init__(**kwargs)
        self.units, self.nb_actions = units, nb_actions
        self.body, self.head = layers.Dense(units, activation="tanh"), layers.Dense(nb_actions)

    def call(self, x, training=False):
        if len(x.shape) > 2 and x.shape[1] > 1:
            x = ops.reshape(x, (-1, x.shape[1] * x.shape[2]))
        return self.head(self.body(x))

    def get_config(self):
        return {**super().get_config(), "units": self.units, "nb_actions": self.nb_actions}

    @classmethod
    def built(cls, *shape, **options):
        model = cls(**options)
        model(np.zeros((1, *shape), "f4"))
        return model


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize(("shape", "window"), [((3,), 1), ((3, 3), 3)])
def test_subclassed_models(shape, window, double):
    agent = make_agent(Subclassed.built(*shape, units=5), window=window, enable_double_dqn=double)
    before = agent.model.get_weights()
    fit(agent)
    assert agent.run_state.nb_updates == 16
    assert all(not np.array_equal(a, b) for a, b in zip(before, agent.model.get_weights(), strict=True))
    q = agent.compute_q_values([np.ones(3)] * window)
    np.testing.assert_allclose(q, agent.model(np.ones((1, *shape), "f4"))[0], atol=1e-6)


def test_custom_layers_registered_and_by_name():
    class Local(Scale):
        pass

    registered = keras.Sequential([layers.Input((1, 3)), layers.Flatten(), Scale(), layers.Dense(3)])
    fit(make_agent(registered))
    local = keras.Sequential([layers.Input((1, 3)), layers.Flatten(), Local(), layers.Dense(3)])
    agent = make_agent(local, custom_model_objects={"Local": Local})
    fit(agent)
    assert not {id(v) for v in agent.model.variables} & {id(v) for v in agent.target_model.variables}


def test_dropout_is_off_in_acting_and_in_the_target_and_on_in_learning():
    model = keras.Sequential([layers.Input((1, 3)), layers.Flatten(), layers.Dropout(0.5), layers.Dense(3)])
    agent = make_agent(model)
    states = np.ones((4, 1, 3), "f4")
    np.testing.assert_array_equal(agent.compute_batch_q_values(states), agent.compute_batch_q_values(states))
    batch = random_batch(size=64)
    np.testing.assert_array_equal(to_list(agent.td_target(batch)), to_list(agent.td_target(batch)))
    first, second = (to_list(agent.loss_fn(batch)[2]) for _ in range(2))
    assert not np.allclose(first, second)
    fit(agent, nb_steps=16)
    agent.training = True  # what the compiled training call looks ahead to is not noisy, either
    observation = np.ones((1, 3), "f4")
    agent.memory.begin_lanes(1)
    agent._make_functions()
    batch = tuple(agent.memory.sample_batch(8))[:-1]
    _, ahead = agent._functions[1](batch, np.int32(1), observation[:, None])
    np.testing.assert_allclose(ahead, agent.evaluate(observation[:, None]), atol=1e-6)


@pytest.mark.parametrize("update", [0.5, 1])
def test_batch_normalisation_moves_in_learning_reaches_the_target_and_rests_in_acting(update):
    model = keras.Sequential([layers.Input((1, 3)), layers.Flatten(), layers.BatchNormalization(), layers.Dense(3)])
    agent = make_agent(model, target_model_update=update, enable_double_dqn=True)
    fit(agent, nb_steps=8)
    moving = agent.model.layers[1].moving_mean
    assert moving.numpy().tolist() == [0, 0, 0]  # nothing learnt yet, however often it acted
    fit(agent, nb_steps=8)
    learnt = moving.numpy()
    assert np.abs(learnt[1:]).min() > 0
    target = agent.target_model.layers[1].moving_mean.numpy()
    if update == 1:
        np.testing.assert_array_equal(target, learnt)
    else:
        assert np.abs(target[1:]).min() > 0
    agent.test(Counting(), nb_episodes=2, verbose=0, visualize=False)
    agent.compute_batch_q_values(np.ones((4, 1, 3)))
    np.testing.assert_array_equal(moving.numpy(), learnt)


def test_a_nan_observation_leaves_the_moving_statistics_as_they_were():
    class Broken(Counting):
        def step(self, action):
            observation, *rest = super().step(action)
            return observation if self.total < 20 else np.full_like(observation, np.nan), *rest

    model = keras.Sequential([layers.Input((1, 3)), layers.Flatten(), layers.BatchNormalization(), layers.Dense(3)])
    agent = make_agent(model, batch_size=64)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*rows repeat")
        with pytest.raises((FloatingPointError, ValueError), match="NaN|nan"):
            fit(agent, Broken(), nb_steps=40)
    assert agent.step < 24
    assert all(np.isfinite(w).all() for w in agent.get_weights())


def test_frozen_layers_stay_and_the_target_learns_nothing_by_itself():
    model = mlp(1, 3)
    model.layers[1].trainable = False
    agent = make_agent(model, target_model_update=1000)
    before, target = agent.model.get_weights(), agent.target_model.get_weights()
    fit(agent)
    after = agent.model.get_weights()
    assert [np.array_equal(a, b) for a, b in zip(before, after, strict=True)] == [True, True, False, False]
    for a, b in zip(target, agent.target_model.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_processor_sees_every_batch_of_states():
    class Half(Processor):
        shapes = set()

        def process_state_batch(self, batch):
            self.shapes.add(batch.shape[1:])
            return batch / 2

    agent = make_agent(processor=Half())
    fit(agent)
    assert agent.run_state.nb_updates == 16 and Half.shapes == {(1, 3)}
    states = np.ones((2, 1, 3), "f4")
    np.testing.assert_allclose(agent.compute_batch_q_values(states), agent.model(states / 2), atol=1e-6)


@pytest.mark.parametrize(
    ("window", "shape", "rearranged"),
    [
        (1, (3,), lambda batch: batch[:, 0]),
        (4, (3, 4), lambda batch: np.moveaxis(batch, 1, -1)),
        (4, (12,), lambda batch: batch.reshape(len(batch), -1)),
    ],
)
def test_a_processor_may_rearrange_the_axes_of_the_states(window, shape, rearranged):
    class Rearranging(Processor):
        def process_state_batch(self, batch):
            return rearranged(batch)

    agent = make_agent(mlp(*shape), window=window, processor=Rearranging())
    fit(agent)
    assert agent.run_state.nb_updates == 16
    agent = make_agent(mlp(1, 5), window=window, processor=Rearranging())
    with pytest.raises(ValueError, match=rf"shape \(1, 5\).*make it \({', '.join(map(str, shape))},?\)"):
        fit(agent)


def test_a_processor_may_give_a_list_of_batches_one_per_input():
    class Halves(Processor):
        def process_state_batch(self, batch):
            return [batch[..., :1], batch[..., 1:]]

    inputs = [keras.Input((1, 1)), keras.Input((1, 2))]
    joined = layers.Flatten()(layers.Concatenate()(inputs))
    agent = make_agent(keras.Model(inputs, layers.Dense(3)(joined)), processor=Halves())
    fit(agent)
    assert agent.run_state.nb_updates == 16


# ---- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["eps", EpsGreedyQPolicy, object()])
@pytest.mark.parametrize("name", ["policy", "test_policy"])
def test_what_is_no_policy_is_refused(name, policy):
    with pytest.raises(ValueError, match=rf"^{name} must be an instance of rl.policy.Policy, got .*"):
        make_agent(**{name: policy})


def test_classes_in_the_place_of_instances_are_refused():
    with pytest.raises(ValueError, match=r"^memory must be an instance of rl.memory.SequentialMemory, got <class"):
        make_agent(memory=SequentialMemory)
    with pytest.raises(ValueError, match=r"^processor must be an instance of rl.core.Processor, got <class"):
        make_agent(processor=Processor)


@pytest.mark.parametrize(
    ("model", "texts"),
    [
        (
            lambda: keras.Model(x := keras.Input((1, 3)), [layers.Dense(3)(x), layers.Dense(3)(x)]),
            ["DQNAgent", "2 out"],
        ),
        (lambda: mlp(1, 3, nb_actions=4), ["DQNAgent", "(None, 4)", "(None, 3)", "Dense(3)"]),
        (
            lambda: keras.Sequential([layers.Input((1, 3)), layers.Dense(3)]),
            ["DQNAgent", "(None, 1, 3)", "(None, 3)", "axis of size 1", "Flatten()", "own shape"],
        ),
    ],
)
def test_a_model_with_another_output_is_refused_at_construction(model, texts):
    with pytest.raises(ValueError) as caught:
        make_agent(model())
    for text in texts:
        assert text in str(caught.value)


@pytest.mark.parametrize(
    ("model", "window", "texts"),
    [
        (lambda: mlp(3), 4, ["(4, 3)", "(3,)", "window_length", "Fix"]),
        (lambda: mlp(1, 5), 1, ["(1, 5)", "(1, 3) or (3,)", "Fix"]),
    ],
)
def test_a_model_with_another_input_is_refused_before_the_first_step(model, window, texts):
    agent, env = make_agent(model(), window=window), Counting()
    with pytest.raises(ValueError) as caught:
        fit(agent, env)
    for text in ["DQNAgent", *texts]:
        assert text in str(caught.value)
    assert env.total == 0 and agent.step == 0


@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(-1, 1, (2,)),
        spaces.MultiDiscrete([2, 2, 2]),
        spaces.MultiBinary(3),
        spaces.Tuple([spaces.Discrete(3)]),
    ],
)
def test_other_action_spaces_are_refused_by_name(space):
    env = Spaces(PARTS["vec"], space)
    agent = make_agent()
    for run in (lambda: fit(agent, env), lambda: agent.test(env, verbose=0, visualize=False)):
        with pytest.raises(ValueError, match=f"DQNAgent .*{type(space).__name__}.*Fix"):
            run()
    assert env.actions == [] and agent.step == 0


def test_another_number_of_actions_is_refused():
    env = Spaces(PARTS["vec"], spaces.Discrete(4))
    with pytest.raises(ValueError, match="nb_actions=3, but the env has 4 actions.*Fix"):
        fit(make_agent(), env)
    assert env.actions == []


@pytest.mark.parametrize("lanes", [1, 2])
def test_an_offset_discrete_space(lanes):
    envs = [Spaces(PARTS["vec"], spaces.Discrete(3, start=5)) for _ in range(lanes)]
    agent = make_agent(policy=EpsGreedyQPolicy(1.0))
    fit(agent, envs[0] if lanes == 1 else DummyVecEnv([lambda env=env: env for env in envs]), nb_steps=60)
    assert {int(a) for env in envs for a in env.actions} == {5, 6, 7}
    assert set(agent.memory.actions[:].tolist()) == {0, 1, 2}


def test_an_agent_that_is_not_compiled_says_so():
    agent = make_agent(compiled=False)
    for run in (
        lambda: fit(agent),
        lambda: agent.test(Counting(), verbose=0, visualize=False),
        lambda: agent.compute_q_values([np.zeros(3)]),
        lambda: agent.forward(np.zeros(3, "f4")),
    ):
        with pytest.raises(RuntimeError, match="before compile"):
            run()


@pytest.mark.parametrize("value", [0, 2.5, -1])
def test_steps_per_execution_is_a_whole_number(value):
    with pytest.raises(ValueError, match="steps_per_execution must be a whole number"):
        make_agent(compiled=False).compile("adam", steps_per_execution=value)


@pytest.mark.parametrize("value", [-1, 0, -0.5])
def test_target_model_update_is_positive(value):
    with pytest.raises(ValueError, match="target_model_update"):
        make_agent(target_model_update=value)


@pytest.mark.parametrize("value", [1, 1.0])
def test_target_model_update_of_one_copies_each_step(value):
    agent = make_agent(target_model_update=value)
    fit(agent)
    for a, b in zip(agent.model.get_weights(), agent.target_model.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


# ---- optimizers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: "adam",
        lambda: "rmsprop",
        lambda: {"class_name": "SGD", "config": {"learning_rate": 0.1}},
        lambda: keras.optimizers.SGD(0.01, momentum=0.9, nesterov=True),
        lambda: keras.optimizers.Adam(clipnorm=1.0),
        lambda: keras.optimizers.Adam(global_clipnorm=1.0, gradient_accumulation_steps=2),
        lambda: keras.optimizers.AdamW(weight_decay=0.01, clipvalue=0.5),
        lambda: keras.optimizers.RMSprop(centered=True),
        lambda: keras.optimizers.Adadelta(1.0),
        lambda: keras.optimizers.Nadam(),
        lambda: keras.optimizers.Adagrad(),
        lambda: keras.optimizers.Adamax(),
        lambda: keras.optimizers.Ftrl(),
        lambda: keras.optimizers.Lion(),
        lambda: keras.optimizers.Adafactor(),
        lambda: keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.01, 10, 0.9)),
        lambda: keras.optimizers.Adam(use_ema=True, ema_overwrite_frequency=5),
    ],
)
def test_every_optimizer_changes_every_weight(optimizer):
    agent = make_agent(optimizer=optimizer())
    before = agent.model.get_weights()
    fit(agent, nb_steps=58)
    accumulated = getattr(agent.optimizer, "gradient_accumulation_steps", None) or 1
    assert agent.run_state.nb_updates == 50 and int(agent.optimizer.iterations) == 50 / accumulated
    for old, new in zip(before, agent.model.get_weights(), strict=True):
        assert not np.array_equal(old, new) and np.isfinite(new).all()


def test_the_optimizer_is_the_users_and_its_rate_can_be_changed_on_the_way():
    optimizer = keras.optimizers.SGD(0.0)
    agent = make_agent(optimizer=optimizer)
    assert agent.optimizer is optimizer
    before = agent.model.get_weights()
    fit(agent, nb_steps=12)
    assert all(np.array_equal(a, b) for a, b in zip(before, agent.model.get_weights(), strict=True))
    optimizer.learning_rate = 0.1
    fit(agent, nb_steps=4)
    assert not any(np.array_equal(a, b) for a, b in zip(before, agent.model.get_weights(), strict=True))


def test_a_learning_rate_schedule_counts_gradient_steps():
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([15], [0.1, 0.0])
    agent = make_agent(optimizer=keras.optimizers.SGD(schedule), train_interval=2)
    env = Counting()
    fit(agent, env, nb_steps=8 + 40)
    before = agent.model.get_weights()
    assert int(agent.optimizer.iterations) == 20
    fit(agent, env, nb_steps=8)
    for a, b in zip(before, agent.model.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_weight_decay_and_clipnorm_do_what_they_say():
    def step(optimizer, weight):
        agent = make_agent(optimizer=optimizer)
        before = agent.model.get_weights()
        batch = random_batch(scale=1000)
        train_on(agent, batch._replace(weight=np.full(16, weight, "f4")))
        return before, agent.model.get_weights()

    before, after = step(keras.optimizers.SGD(0.1, weight_decay=0.5), 0.0)
    for old, new in zip(before, after, strict=True):
        np.testing.assert_allclose(new, old * (1 - 0.1 * 0.5), rtol=1e-5, atol=1e-8)
    before, after = step(keras.optimizers.SGD(1.0, global_clipnorm=0.5), 1.0)
    change = np.sqrt(sum(np.sum((a - b) ** 2) for a, b in zip(before, after, strict=True)))
    assert change == pytest.approx(0.5, rel=1e-4)


@tensorflow_only
def test_the_optimizer_of_tensorflows_keras_works():
    import tensorflow as tf

    agent = make_agent(optimizer=tf.keras.optimizers.Adam(1e-3))
    fit(agent)
    assert int(agent.optimizer.iterations) == 16


def test_foreign_optimizers_are_refused():
    class Adam:
        pass

    for wrong in (Adam(), Adam, keras.optimizers.Adam):
        with pytest.raises(TypeError, match=r"keras\.optimizers\.Optimizer"):
            make_agent(optimizer=wrong)
    with pytest.raises(ValueError, match="adamm"):
        make_agent(optimizer="adamm")


# ---- files ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ending", "dueling"), [(".weights.h5", False), (".weights.h5", True), (".h5f", False), (".h5", False)]
)
def test_weights_round_trip(tmp_path, ending, dueling):
    options = {"enable_dueling_network": dueling}
    agent, other = make_agent(**options), make_agent(mlp(1, 3, seed=9), **options)
    fit(agent)
    path = tmp_path / "new" / ("dqn" + ending)
    agent.save_weights(str(path))
    with pytest.raises(FileExistsError, match="overwrite=True"):
        agent.save_weights(path)
    fit(agent)
    agent.save_weights(path, overwrite=True)
    other.load_weights(path)
    for network in (other.model, other.target_model):
        for a, b in zip(agent.model.get_weights(), network.get_weights(), strict=True):
            np.testing.assert_array_equal(a, b)
    assert [p.name for p in path.parent.iterdir()] == [path.name]  # no temporary file is left
    fit(other)


def test_weights_of_subclassed_and_multi_input_models_round_trip(tmp_path):
    for i, make in enumerate((lambda: Subclassed.built(3), lambda: joined(named_inputs(1)))):
        agent, other = make_agent(make()), make_agent(make())
        agent.save_weights(tmp_path / f"{i}.weights.h5")
        other.load_weights(tmp_path / f"{i}.weights.h5")
        for a, b in zip(agent.model.get_weights(), other.target_model.get_weights(), strict=True):
            np.testing.assert_array_equal(a, b)


def test_bad_weights_files_are_refused_and_change_nothing(tmp_path):
    agent = make_agent()
    before = agent.get_weights()
    make_agent(mlp(1, 3, nb_actions=4), nb_actions=4).save_weights(tmp_path / "other.h5f")
    (tmp_path / "rubbish.h5").write_bytes(b"rubbish")
    with pytest.raises(ValueError, match=".weights.h5"):
        agent.save_weights(tmp_path / "dqn.ckpt")
    with pytest.raises(ValueError, match=".weights.h5"):
        agent.load_weights(tmp_path / "dqn.ckpt")
    with pytest.raises(FileNotFoundError, match="missing.h5f"):
        agent.load_weights(tmp_path / "missing.h5f")
    for name in ("other.h5f", "rubbish.h5"):
        with pytest.raises((ValueError, OSError)):
            agent.load_weights(tmp_path / name)
    for a, b in zip(before, agent.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["other.h5f", "rubbish.h5"]


def test_loading_weights_between_two_fits_decides_the_very_next_action(tmp_path):
    def constant(action):
        model = mlp(1, 3)
        weights = [np.zeros_like(w) for w in model.get_weights()]
        weights[-1][action] = 1.0
        model.set_weights(weights)
        return model

    make_agent(constant(2)).save_weights(tmp_path / "two.h5f")
    agent = make_agent(constant(0), optimizer=keras.optimizers.SGD(0.0), policy=EpsGreedyQPolicy(0.0))
    env = Spaces(PARTS["vec"])
    fit(agent, env, nb_steps=10)
    agent.load_weights(tmp_path / "two.h5f")
    fit(agent, env, nb_steps=5)
    assert env.actions == [0] * 10 + [2] * 5


def saved_agent(path):
    policy = LinearAnnealedPolicy(BoltzmannQPolicy(clip=(-50.0, 50.0)), "tau", 1.0, 0.1, 0.05, 1000)
    agent = make_agent(
        metrics=["mae", Spy()],
        optimizer=keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.01, 100, 0.9), clipnorm=0.7),
        policy=policy,
        test_policy=EpsGreedyQPolicy(0.02),
        gamma=0.9,
        delta_clip=1.0,
        enable_double_dqn=True,
        enable_dueling_network=True,
        dueling_type="max",
        train_interval=2,
    )
    agent.compile(agent.optimizer, metrics=["mae", Spy()], jit_compile=False, steps_per_execution=3)
    fit(agent, nb_steps=29)
    agent.save(path)
    return agent


SETTINGS = (
    "nb_actions gamma batch_size nb_steps_warmup train_interval memory_interval target_model_update delta_clip "
    "enable_double_dqn dueling_type step metrics_names jit_compile steps_per_execution"
).split()


def test_a_saved_agent_comes_back_whole(tmp_path):
    agent = saved_agent(tmp_path / "dqn.keras")
    loaded = keras.saving.load_model(tmp_path / "dqn.keras")
    assert type(loaded) is DQNAgent
    assert {n: getattr(loaded, n) for n in SETTINGS} == {n: getattr(agent, n) for n in SETTINGS}
    for name in agent.run_state.COUNTERS:
        assert getattr(loaded.run_state, name) == getattr(agent.run_state, name), name
    for a, b in zip(agent.get_weights(), loaded.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    for a, b in zip(agent.optimizer.variables, loaded.optimizer.variables, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())
    assert loaded.optimizer.get_config() == agent.optimizer.get_config()
    assert loaded.policy.get_config() == agent.policy.get_config()
    assert loaded.policy.get_current_value() == agent.policy.get_current_value()
    assert loaded.test_policy.eps == 0.02
    assert loaded.memory.limit == 200 and loaded.memory.nb_entries == 0
    batch = random_batch()
    np.testing.assert_allclose(to_list(loaded.loss_fn(batch)[0]), to_list(agent.loss_fn(batch)[0]), rtol=1e-6)
    before = loaded.step
    history = fit(loaded, nb_steps=20).history
    assert loaded.step == before + 20 and np.isfinite(history["loss"]).any()
    loaded.save(tmp_path / "again.keras")
    again = keras.saving.load_model(tmp_path / "again.keras")
    assert again.step == loaded.step and again.run_state.nb_updates == loaded.run_state.nb_updates
    np.testing.assert_array_equal(again.get_weights()[0], loaded.get_weights()[0])


def test_a_saved_agent_goes_on_in_a_fresh_process(tmp_path):
    agent = saved_agent(tmp_path / "dqn.keras")
    states = np.random.default_rng(0).normal(size=(4, 1, 3)).astype("f4")
    np.save(tmp_path / "states.npy", states)
    code = """
import sys
import keras, numpy as np
import rl.agents
from rl.memory import SequentialMemory
class Spy(keras.metrics.Metric):
    def __init__(self, name="spy", **kwargs):
        super().__init__(name=name, **kwargs)
    def update_state(self, y_true, y_pred, sample_weight=None): pass
    def result(self): return keras.ops.zeros(())
    def reset_state(self): pass
agent = keras.saving.load_model(sys.argv[1] + "/dqn.keras", custom_objects={"test_dqn>Spy": Spy})
from tests.toy_envs import Counting
assert agent.step == 29
assert agent.metrics_names == ["loss", "mae", "spy", "mean_q", "mean_tau"], agent.metrics_names
assert int(agent.optimizer.iterations) == agent.run_state.nb_updates == 9
states = np.load(sys.argv[1] + "/states.npy")
np.save(sys.argv[1] + "/q.npy", agent.compute_batch_q_values(states))
np.save(sys.argv[1] + "/moments.npy", agent.optimizer.variables[2].numpy())
agent.fit(Counting(), nb_steps=20, verbose=0)
agent.test(Counting(), nb_episodes=1, verbose=0, visualize=False)
assert agent.step == 49
# One update was owed; seven steps pass until the new memory holds a batch of 8, the other thirteen owe six.
assert agent.run_state.nb_updates == 9 + 6
"""
    root = pathlib.Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=150, cwd=root)
    np.testing.assert_allclose(np.load(tmp_path / "q.npy"), agent.compute_batch_q_values(states), atol=1e-6)
    np.testing.assert_array_equal(np.load(tmp_path / "moments.npy"), agent.optimizer.variables[2].numpy())


def test_agents_with_other_networks_and_optimizers_come_back(tmp_path):
    keras.config.set_dtype_policy("mixed_float16")
    half = make_agent(mlp(1, 3))
    keras.config.set_dtype_policy("float32")
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(), initial_scale=64.0)
    agents = {
        "subclassed": make_agent(Subclassed.built(3)),
        "inputs": make_agent(joined(named_inputs(3)), window=3),
        "half": half,
        "scaled": make_agent(optimizer=scaled),
    }
    for name, agent in agents.items():
        fit(agent, Parts(("vec", "img")) if name == "inputs" else Counting())
        agent.save(tmp_path / f"{name}.keras")
        loaded = keras.saving.load_model(tmp_path / f"{name}.keras")
        for a, b in zip(agent.get_weights(), loaded.get_weights(), strict=True):
            np.testing.assert_array_equal(a, b)
        assert loaded.dtype_policy.name == agent.dtype_policy.name == ("mixed_float16" if name == "half" else "float32")
        assert type(loaded.optimizer) is type(agent.optimizer)
        for a, b in zip(agent.optimizer.variables, loaded.optimizer.variables, strict=True):
            np.testing.assert_array_equal(a.numpy(), b.numpy())
        if name != "inputs":
            np.testing.assert_allclose(
                loaded.compute_q_values([np.ones(3)]), agent.compute_q_values([np.ones(3)]), atol=1e-6
            )
        fit(loaded, Parts(("vec", "img")) if name == "inputs" else Counting())
        assert loaded.run_state.nb_updates > agent.run_state.nb_updates


def test_a_metric_made_of_a_function_is_saved_as_the_function(tmp_path):
    def bias(y_true, y_pred):
        return ops.mean(y_true - y_pred)

    named = keras.metrics.MeanMetricWrapper(keras.losses.huber, name="other")
    agent = make_agent(metrics=[bias, "mae", named])
    agent.save(tmp_path / "dqn.keras")
    loaded = keras.saving.load_model(tmp_path / "dqn.keras", custom_objects={"bias": bias})
    assert loaded.metrics_names == agent.metrics_names == ["loss", "bias", "mae", "other", "mean_q"]
    fit(loaded)


def test_an_agent_that_was_never_compiled_can_be_saved(tmp_path):
    agent = make_agent(compiled=False)
    agent.save(tmp_path / "dqn.keras")
    loaded = keras.saving.load_model(tmp_path / "dqn.keras")
    assert not loaded.compiled
    loaded.compile("sgd", jit_compile=False)
    fit(loaded)


def test_predict_and_call_give_the_q_values():
    agent = make_agent(mlp(3, 3), window=3)
    states = np.random.default_rng(0).normal(size=(50, 3, 3)).astype("f4")
    expected = agent.compute_batch_q_values(states)
    np.testing.assert_allclose(agent.predict(states, verbose=0), expected, atol=1e-6)
    np.testing.assert_allclose(agent(states), expected, atol=1e-6)
    plain = make_agent(mlp(3))
    np.testing.assert_allclose(plain.predict(states[:, :1], verbose=0), plain.compute_batch_q_values(states[:, :1]))
    parts = make_agent(joined(named_inputs(1)))
    state = {key: np.ones((7, 1, *PARTS[key].shape), PARTS[key].dtype) for key in ("img", "vec")}
    np.testing.assert_allclose(parts.predict(state, verbose=0), parts.evaluate(state), atol=1e-6)
    fit(agent)  # and it still learns
    assert agent.run_state.nb_updates == 16


# ---- counters ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("start", "lanes"), [(32_760, 1), (2**31 - 5, 1), (2**31 - 5, 3), (2**32 - 5, 1)])
def test_counters_do_not_wrap(start, lanes, tmp_path):
    policy = LinearAnnealedPolicy(EpsGreedyQPolicy(), "eps", 1.0, 0.1, 0.0, start + 20)
    agent = make_agent(policy=policy)
    env = Counting() if lanes == 1 else DummyVecEnv([Counting] * lanes)
    fit(agent, env, nb_steps=12)
    agent.step = agent.run_state.requested = agent.run_state.nb_updates = agent.run_state.episode = start
    seen = []

    class Watch(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            seen.append(logs["nb_steps"])

    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        eps = []
        for _ in range(4):
            fit(agent, env, nb_steps=6, callbacks=[Watch()])
            eps.append(policy.inner_policy.eps)  # what the last action was chosen with
    assert agent.step == start + 24 and agent.run_state.nb_updates == start + 24
    assert type(agent.step) is int
    assert eps == sorted(eps, reverse=True) and 1 > eps[0] >= eps[-1] >= 0.1
    assert seen == sorted(seen) and start < min(seen) <= max(seen) <= start + 24
    agent.save(tmp_path / "dqn.keras")
    loaded = keras.saving.load_model(tmp_path / "dqn.keras")
    assert loaded.step == start + 24 and loaded.run_state.episode == agent.run_state.episode > start


# ---- policies, XLA -------------------------------------------------------------------------------------------------


def test_fit_asks_the_policy_and_test_the_test_policy():
    class Always(Policy):
        def __init__(self, action):
            self.action, self.shapes = action, set()

        def select_action(self, q_values):
            self.shapes.add(q_values.shape)
            return self.action

    policy, test_policy = Always(1), Always(2)
    agent = make_agent(policy=policy, test_policy=test_policy)
    env = Spaces(PARTS["vec"])
    fit(agent, env, nb_steps=12)
    assert set(env.actions) == {1} and test_policy.shapes == set()
    env.actions.clear()
    agent.test(env, nb_episodes=2, verbose=0, visualize=False)
    assert env.actions == [2] * 8 and policy.shapes == test_policy.shapes == {(3,)}


def test_with_xla_everything_at_once():
    agent = make_agent(
        joined(named_inputs(2)),
        window=2,
        jit_compile=True,
        metrics=["mae"],
        enable_double_dqn=True,
        enable_dueling_network=False,
        delta_clip=1.0,
        optimizer=keras.optimizers.Adam(clipnorm=1.0),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # XLA accepted it
        fit(agent, DummyVecEnv([lambda: Parts(("img", "vec"))] * 2), nb_steps=30)
    assert agent.run_state.nb_updates == 22


@tensorflow_only
def test_a_network_that_xla_refuses_learns_after_one_warning():
    @keras.saving.register_keras_serializable("test_dqn")
    class Host(layers.Layer):
        def call(self, x):
            import tensorflow as tf

            return ops.reshape(tf.py_function(lambda t: t, [x], x.dtype), (-1, 8))

    model = keras.Sequential([layers.Input((1, 3)), layers.Flatten(), layers.Dense(8), Host(), layers.Dense(3)])
    agent = make_agent(model, jit_compile=True)
    with pytest.warns(RuntimeWarning, match="XLA cannot compile this network") as caught:
        fit(agent)
    assert len([w for w in caught if w.category is RuntimeWarning]) == 1
    assert agent.run_state.nb_updates == int(agent.optimizer.iterations) == 16
