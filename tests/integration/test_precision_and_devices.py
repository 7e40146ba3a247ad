"""Mixed precision and device placement, both through Keras' own switches."""

import os
import pathlib
import subprocess
import sys

import gymnasium as gym
import keras
import numpy as np
import pytest
from keras import layers, ops

from rl import backend
from rl.agents.dqn import DQNAgent
from rl.common.vec_env import DummyVecEnv
from rl.memory import SequentialMemory
from rl.policy import EpsGreedyQPolicy
from tests.backends import TWO_CPUS
from tests.toy_envs import TwoStateMDP

ROOT = pathlib.Path(__file__).parents[2]


def make_agent(nb_inputs=4, hidden=16, optimizer="adam", jit_compile=False, **options):
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [layers.Input((1, nb_inputs)), layers.Flatten(), layers.Dense(hidden, activation="relu"), layers.Dense(2)]
    )
    options = {"nb_steps_warmup": 50, "target_model_update": 0.05} | options
    agent = DQNAgent(model, nb_actions=2, memory=SequentialMemory(5000), policy=EpsGreedyQPolicy(0.3), **options)
    agent.compile(optimizer, metrics=["mae"], jit_compile=jit_compile, steps_per_execution=16)
    return agent


def lanes(n=8):
    return DummyVecEnv([lambda: gym.make("CartPole-v1")] * n)


def assert_float32(agent):
    assert {v.dtype for v in agent.weights} == {"float32"}
    states = np.zeros((2, 1, 4), "f4")
    assert agent.compute_batch_q_values(states).dtype == np.float32
    batch = agent.memory.sample_batch(4)
    batch = batch._make(x if x is None else keras.tree.map_structure(lambda y: np.asarray(y)[0], x) for x in batch)
    loss, target, prediction, logs = agent.loss_fn(batch)
    tensors = (loss, target, prediction, *logs.values())
    assert {keras.backend.standardize_dtype(x.dtype) for x in tensors} == {"float32"}


@pytest.mark.parametrize("dueling", [False, True])
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_mixed_precision_trains_without_nan(policy, dueling):
    keras.mixed_precision.set_global_policy(policy)
    agent = make_agent(enable_dueling_network=dueling)
    assert agent.model.layers[2].compute_dtype == policy.removeprefix("mixed_")
    scaled = isinstance(agent.optimizer, keras.optimizers.LossScaleOptimizer)
    assert scaled == (policy == "mixed_float16")
    before = agent.get_weights()
    history = agent.fit(lanes(), nb_steps=2000, verbose=0).history
    assert agent.run_state.nb_updates >= 1900
    for name in ("loss", "mae", "mean_q"):
        values = np.array(history[name])
        assert np.isfinite(values[len(values) // 2 :]).all()
    for old, new in zip(before, agent.get_weights(), strict=True):
        assert np.isfinite(new).all() and not np.array_equal(old, new)
    assert_float32(agent)
    if scaled:
        assert 1 <= float(agent.optimizer.dynamic_scale) <= 2.0**16
        done = int(agent.optimizer.inner_optimizer.iterations)
        assert 1800 <= done <= agent.run_state.nb_updates  # steps that overflowed are left out
    agent.test(gym.make("CartPole-v1"), nb_episodes=1, verbose=0, visualize=False)


def test_mixed_float16_under_xla_equals_float32_on_a_known_mdp():
    keras.mixed_precision.set_global_policy("mixed_float16")
    agent = make_agent(2, gamma=TwoStateMDP.GAMMA, optimizer=keras.optimizers.Adam(0.01), jit_compile=True)
    agent.policy.eps = 1.0
    env = DummyVecEnv([lambda: gym.wrappers.TimeLimit(TwoStateMDP(), 20)] * 8)
    agent.fit(env, nb_steps=6000, verbose=0, seed=1)
    np.testing.assert_allclose(agent.compute_batch_q_values(np.eye(2)[:, None]), TwoStateMDP.Q_STAR, atol=0.05)


def test_an_overflow_halves_the_scale_and_is_no_error():
    keras.mixed_precision.set_global_policy("mixed_float16")
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(), initial_scale=2.0**30)
    agent = make_agent(optimizer=optimizer)
    assert agent.optimizer is optimizer
    before = agent.model.get_weights()
    # Whatever the policy does, an episode begins and ends after the warm-up, and its losses are known.
    history = agent.fit(lanes(1), nb_steps=150, nb_max_episode_steps=40, verbose=0).history
    assert float(optimizer.dynamic_scale) < 2.0**30
    assert 0 < int(optimizer.inner_optimizer.iterations) < agent.run_state.nb_updates
    assert np.isfinite(history["loss"]).any() and not np.isinf(history["loss"]).any()
    assert all(np.isfinite(w).all() for w in agent.get_weights())
    assert not np.array_equal(before[0], agent.model.get_weights()[0])


def test_one_layer_in_half_precision_is_enough_for_nothing_to_break():
    x = keras.Input((1, 4))
    y = layers.Dense(16, activation="relu", dtype="mixed_float16")(layers.Flatten()(x))
    agent = DQNAgent(
        keras.Model(x, layers.Dense(2, dtype="mixed_bfloat16")(y)), nb_actions=2, memory=SequentialMemory(500)
    )
    agent.nb_steps_warmup = 50
    agent.compile("adam", jit_compile=False)
    agent.fit(lanes(4), nb_steps=200, verbose=0)
    assert_float32(agent)
    assert ops.is_tensor(agent(np.zeros((1, 1, 4), "f4")))


DEVICES = """
import sys, warnings
import gymnasium as gym, keras, numpy as np
from keras import layers, ops
from rl import backend
from rl.agents.dqn import DQNAgent
from rl.common.vec_env import DummyVecEnv
from rl.memory import SequentialMemory
from rl.policy import EpsGreedyQPolicy

warnings.simplefilter("error", RuntimeWarning)  # XLA must not refuse
keras.utils.set_random_seed(1)
folder = sys.argv[1]


def build():
    body = [layers.Dense(8, activation="relu"), layers.Dropout(0.1), layers.BatchNormalization(), layers.Dense(2)]
    model = keras.Sequential([layers.Input((1, 4)), layers.Flatten(), *body])
    return DQNAgent(model, nb_actions=2, memory=SequentialMemory(500), nb_steps_warmup=20, target_model_update=50,
                    enable_double_dqn=True, policy=EpsGreedyQPolicy(0.3))


def lanes(n):
    return DummyVecEnv([lambda: gym.make("CartPole-v1")] * n)


# a compiled function runs where its state is, also the second time
for home in ("CPU:0", "CPU:1"):
    for jit in (False, True):
        with keras.device(home.lower()):
            v = keras.Variable(np.zeros(3, "float32"))
        ran = []

        def function(x):
            v.assign(v + x)
            ran.append(ops.zeros(()) if eager else None)
            return v + 0

        eager = False

        f = backend.compile_function(function, [v], jit_compile=jit)
        f(np.ones(3, "f4"))
        assert f(np.ones(3, "f4")).tolist() == [2, 2, 2]
        assert place([v]) == {home}
        eager = True
        backend.compile_function(function, [v], run_eagerly=True)(np.ones(3, "f4"))
        with backend.device_scope([v]):
            assert place([keras.Variable(1.0), keras.Variable(ran[-1])]) == {home}

agents = []
for jit in (False, True):
    with keras.device("cpu:1"):
        agent = build()
    agent.compile("adam", metrics=["mae", keras.metrics.MeanSquaredError], jit_compile=jit)  # outside of the scope
    everything = [*agent.variables, *agent.model.variables, *agent.target_model.variables, *agent.optimizer.variables]
    everything += [v for m in agent._compiled_metrics for v in m.variables]
    assert place(everything) == {"CPU:1"}, place(everything)
    before = agent.get_weights()
    history = agent.fit(gym.make("CartPole-v1"), nb_steps=60, nb_max_episode_steps=20, verbose=0).history
    agent.fit(lanes(3), nb_steps=60, verbose=0)
    agent.test(gym.make("CartPole-v1"), nb_episodes=1, verbose=0, visualize=False)
    assert agent.run_state.nb_updates == 100 and np.isfinite(history["mae"]).any()
    assert not np.array_equal(before[0], agent.get_weights()[0])
    assert place(everything) == {"CPU:1"}
    assert agent.compute_batch_q_values(np.zeros((2, 1, 4), "f4")).shape == (2, 2)
    agents.append(agent)

with keras.device("cpu:1"):
    agent = build()
    agent.compile(keras.optimizers.Adam(1e-3), jit_compile=False)  # inside of the scope
assert place(agent.optimizer.variables) == {"CPU:1"}
agent.fit(lanes(2), nb_steps=60, verbose=0)

# files and copies carry no device: a saved agent is loaded where the reader wants it
agents[0].save(folder + "/a.keras")
agents[0].save_weights(folder + "/w.h5f")
on0 = keras.saving.load_model(folder + "/a.keras")
assert place([*on0.variables, *on0.optimizer.variables]) == {"CPU:0"}
on0.fit(lanes(2), nb_steps=60, verbose=0)
with keras.device("cpu:1"):
    on1 = keras.saving.load_model(folder + "/a.keras")
assert place([*on1.variables, *on1.optimizer.variables]) == {"CPU:1"}
on1.fit(lanes(2), nb_steps=60, verbose=0)
agents[1].load_weights(folder + "/w.h5f")
agents[1].compute_batch_q_values(np.zeros((2, 1, 4), "f4"))  # on JAX an assigned array goes home with the next call
assert place(agents[1].variables) == {"CPU:1"}
np.testing.assert_array_equal(agents[1].target_model.get_weights()[0], agents[0].model.get_weights()[0])

# two agents on two devices side by side
with keras.device("cpu:0"):
    first = build()
first.compile("sgd", jit_compile=False)
for _ in range(2):
    first.fit(lanes(1), nb_steps=30, verbose=0)
    agents[0].fit(lanes(1), nb_steps=30, verbose=0)
assert place(first.variables) == {"CPU:0"} and place(agents[0].variables) == {"CPU:1"}
print("all well")
"""


def test_an_agent_lives_acts_and_learns_on_the_device_it_was_built_on(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", TWO_CPUS + DEVICES, str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "all well" in done.stdout


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_on_a_gpu(policy):
    keras.mixed_precision.set_global_policy(policy)
    agent = make_agent(jit_compile=True)
    agent.fit(lanes(), nb_steps=500, verbose=0)
    assert not backend.on_cpu(agent.model.weights)
    with keras.device("cpu:0"):
        agent = make_agent(jit_compile=True)
    agent.fit(lanes(), nb_steps=500, verbose=0)
    assert backend.on_cpu(agent.model.weights)
