"""`DeviceMemory`: what it draws is what `SequentialMemory` draws, what an agent learns from it likewise."""

import copy
import os
import pathlib
import pickle
import subprocess
import sys

import gymnasium as gym
import keras
import numpy as np
import pytest
from keras import layers

from rl import backend
from rl.agents.dqn import DQNAgent
from rl.common.misc_util import tree_leaves, tree_map
from rl.common.vec_env import DummyVecEnv
from rl.core import Processor
from rl.device_memory import DeviceMemory
from rl.memory import SequentialMemory
from rl.policy import EpsGreedyQPolicy
from rl.processors import WhiteningNormalizerProcessor
from tests.backends import TWO_CPUS
from tests.test_memory import Lanes, box, image_and_vector, transitions

ROOT = pathlib.Path(__file__).parents[1]
pytestmark = pytest.mark.filterwarnings("ignore:.* rows repeat")


def frame(code):
    return np.repeat(np.asarray(code)[..., None, None] % 256, 4, axis=-1).astype(np.uint8)


def pair(*args):
    memories = SequentialMemory(*args), DeviceMemory(*args)
    for memory in memories:
        memory.rng = 5
    return memories


def assert_same_batches(host, device, size=40, k=2):
    expected, batch = host.sample_batch(size, k, 0.9), device.sample_batch(size, k, 0.9)
    assert all(leaf.dtype == np.int32 for leaf in tree_leaves((batch.state0, batch.state1)))
    batch = tree_map(lambda x: backend.to_numpy(x), device.resolve(batch))
    for x, y in zip(tree_leaves(batch), tree_leaves(expected), strict=True):
        narrow = y.dtype == np.int64 and keras.backend.backend() == "jax"
        assert x.dtype == y.dtype or narrow and x.dtype == np.int32
        np.testing.assert_array_equal(x, y)


# ---- what is drawn ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("encode", [box, image_and_vector, frame])
@pytest.mark.parametrize("nb_lanes", [1, 3])
@pytest.mark.parametrize("window_length", [1, 4])
@pytest.mark.parametrize("limit", [12, 37, 300])
def test_batches_are_those_of_a_sequential_memory(encode, nb_lanes, window_length, limit):
    host, device = pair(limit, window_length)
    lanes = Lanes(nb_lanes, window_length, np.random.default_rng(1), encode)
    for step in range(400 // nb_lanes):
        observation, store = lanes.observation(), lanes.rng.random(nb_lanes) < 0.9
        states = [memory.get_recent_states(observation) for memory in (host, device)]
        for x, y in zip(*map(tree_leaves, states), strict=True):
            np.testing.assert_array_equal(x, y)
        transition = lanes.step(store, p_valid=0.9)
        for memory in (host, device):
            memory.extend(transition, store)
        if step > 5 and step % 23 == 0:
            assert_same_batches(host, device)
    assert host.nb_entries == device.nb_entries == min(limit, len(lanes.rows))
    if limit == 300:  # more ends of episodes than there was room for at first
        assert len(tree_leaves(device._extra)[0]) > limit // 8


@pytest.mark.parametrize("ignore_boundaries", [False, True])
def test_lanes_that_change_in_number_and_keras_rls_append(ignore_boundaries):
    host, device = pair(50, 3, ignore_boundaries)
    lanes = Lanes(2, 3, np.random.default_rng(2), ignore_boundaries=ignore_boundaries)
    for nb_lanes in (2, 9, 1, 3):
        lanes.begin(nb_lanes)
        for memory in (host, device):
            memory.begin_lanes(nb_lanes)
        for i in range(12):
            transition = lanes.step()
            for memory in (host, device):
                memory.extend(transition)
                memory.append(np.full(3, i, np.float32), i, 0.5, i % 5 == 4)
        assert_same_batches(host, device)
    recent = [memory.get_recent_state(np.ones(3, np.float32)) for memory in (host, device)]
    np.testing.assert_array_equal(*recent)


def test_append_alone():
    host, device = pair(20, 2)
    for i in range(30):
        for memory in (host, device):
            memory.append(np.full(2, i, np.uint8), i, float(i), i % 7 == 6)
    assert_same_batches(host, device)


@pytest.mark.parametrize("dtype", ["uint8", "float64", "float32", "float16", "bool", "int16", "int64"])
def test_dtypes(dtype):
    host, device = pair(20, 2)
    for i in range(8):
        observation = np.full((2, 3), i % 2 if dtype == "bool" else i, dtype)
        for memory in (host, device):
            memory.extend(transitions(observation, observation + np.ones_like(observation)))
    assert_same_batches(host, device)


def test_new_frames_are_written_by_one_call_per_vector_step_at_most():
    device = DeviceMemory(100, 2)
    lanes = Lanes(6, 2, np.random.default_rng(0), image_and_vector)
    device.extend(lanes.step())
    device.sample_batch(4)
    write, calls = device._write, []
    device._write = lambda waiting: (calls.append(None), write(waiting))
    for _ in range(5):
        device.extend(lanes.step())
        device.sample_batch(4)
        device.sample_batch(4)
    assert len(calls) == 5 and write.nb_traces == 1


def test_frames_take_their_bytes_and_an_eighth():
    device = DeviceMemory(800, 4)
    device.extend(transitions(np.ones((2, 10, 10), np.uint8), np.ones((2, 10, 10), np.uint8)))
    sizes = [(str(v.dtype), v.shape) for v in (device._frames.variable, device._extra.variable)]
    assert sizes == [("uint8", (802, 10, 10)), ("uint8", (101, 10, 10))]
    assert device.nbytes - device._rows.nbytes == 903 * 100


# ---- an agent -----------------------------------------------------------------------------------------------------


class Episodes(gym.Env):
    """Observations of a space by random draw; episodes of random length, ended or cut."""

    action_space = gym.spaces.Discrete(3)

    def __init__(self, space):
        self.observation_space = space

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        end = self.np_random.integers(20)
        return self.observation_space.sample(), float(action), end == 0, end == 1, {}


IMAGE = gym.spaces.Box(0, 255, (8, 8), np.uint8)
VECTOR = gym.spaces.Box(-1, 1, (3,), np.float32)


def small_network(space, window):
    if isinstance(space, gym.spaces.Dict):
        inputs = {name: keras.Input((window, *part.shape), name=name) for name, part in space.items()}
    else:
        inputs = keras.Input((window, *space.shape))
    parts = []
    for x in tree_leaves(inputs):
        if len(x.shape) == 4:
            x = layers.Conv2D(4, 3, 2)(layers.Rescaling(1 / 255)(layers.Permute((2, 3, 1))(x)))
        parts.append(layers.Flatten()(x))
    x = layers.Concatenate()(parts) if len(parts) > 1 else parts[0]
    return keras.Model(inputs, layers.Dense(3)(layers.Dense(16, activation="tanh")(x)))


def make_agent(memory, space, seed=3, jit_compile=False, run_eagerly=False, **options):
    keras.utils.set_random_seed(seed)
    model = small_network(space, memory.window_length)
    options = {"nb_steps_warmup": 20, "target_model_update": 0.1, "batch_size": 8} | options
    agent = DQNAgent(model, nb_actions=3, memory=memory, policy=EpsGreedyQPolicy(0.5), **options)
    agent.compile("adam", jit_compile=jit_compile, run_eagerly=run_eagerly)
    return agent


def lanes_of(space, n=3):
    return DummyVecEnv([lambda: Episodes(copy.deepcopy(space))] * n)


@pytest.mark.parametrize(
    ("space", "window", "options"),
    [
        (VECTOR, 1, {"jit_compile": True}),
        (IMAGE, 4, {"jit_compile": True}),
        (IMAGE, 4, {}),
        (gym.spaces.Dict(image=IMAGE, vector=VECTOR), 2, {}),
        (VECTOR, 3, {"run_eagerly": True, "train_interval": 10}),
        (VECTOR, 3, {"train_interval": 4, "processor": Processor()}),
    ],
)
def test_an_agent_learns_the_same_from_both(space, window, options):
    agents = [make_agent(memory, space, **options) for memory in pair(150, window)]
    for agent in agents:
        env = lanes_of(space)
        agent.fit(env, nb_steps=120, verbose=0, seed=1)
        agent.fit(env, nb_steps=120, verbose=0)
        assert agent.run_state.nb_updates == 220 // options.get("train_interval", 1)
    for x, y in zip(*[agent.get_weights() for agent in agents], strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-6)
    if "run_eagerly" not in options:
        assert agents[1]._functions[1].nb_traces == 1 and agents[1].memory._write.nb_traces == 1


def test_more_ends_of_episodes_than_expected_cost_one_more_trace():
    agents = [make_agent(memory, VECTOR, memory_interval=2) for memory in pair(200)]
    for agent in agents:  # of every second step the successor is no row
        agent.fit(lanes_of(VECTOR), nb_steps=180, verbose=0, seed=1)
    assert len(agents[1].memory._extra) == 100 and agents[1]._functions[1].nb_traces == 3
    for x, y in zip(*[agent.get_weights() for agent in agents], strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-6)


def test_another_compile_and_rows_from_before_the_agent_keep_what_is_stored():
    host, device = pair(100)
    for i in range(20):
        for memory in (host, device):
            memory.extend(transitions(np.full((2, 3), i / 20, np.float32), np.full((2, 3), (i + 1) / 20, np.float32)))
    agents = [make_agent(memory, VECTOR) for memory in (host, device)]
    for agent in agents:
        agent.fit(lanes_of(VECTOR), nb_steps=40, verbose=0, seed=1)
        agent.compile("sgd", jit_compile=True)
        agent.fit(lanes_of(VECTOR), nb_steps=40, verbose=0, seed=1)
    for x, y in zip(*[agent.get_weights() for agent in agents], strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-6)
    assert_same_batches(host, device)


TWO_DEVICES = """
from tests.test_device_memory import *

weights = []
for before in (False, True):  # frames from before the agent move to its device
    for jit_compile in (False, True):
        host, device = pair(100, 2)
        for memory in (host, device):
            if before:
                memory.extend(transitions(np.ones((3, 8, 8), np.uint8), np.ones((3, 8, 8), np.uint8)))
            with keras.device("cpu:1"):
                agent = make_agent(memory, IMAGE, jit_compile=jit_compile)
            agent.fit(lanes_of(IMAGE), nb_steps=90, verbose=0, seed=1)
            weights.append(agent.get_weights())
        assert place([device._frames.variable, device._extra.variable, *agent.weights]) == {"CPU:1"}
        for x, y in zip(*weights[-2:], strict=True):
            np.testing.assert_allclose(x, y, rtol=0, atol=1e-6)
print("all well")
"""


def test_frames_live_where_the_agent_lives():
    done = subprocess.run(
        [sys.executable, "-c", TWO_CPUS + TWO_DEVICES],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "all well" in done.stdout


def test_a_saved_agent_has_an_empty_memory_of_the_same_kind(tmp_path):
    agent = make_agent(DeviceMemory(90, 2, True), VECTOR)
    agent.fit(lanes_of(VECTOR), nb_steps=30, verbose=0)
    agent.save(tmp_path / "a.keras")
    loaded = keras.saving.load_model(tmp_path / "a.keras")
    assert type(loaded.memory) is DeviceMemory and loaded.memory.get_config() == agent.memory.get_config()
    assert loaded.memory.nb_entries == 0
    assert len(agent.variables) == len(loaded.variables) == 8  # frames are no weights
    loaded.fit(lanes_of(VECTOR), nb_steps=30, verbose=0)


# ---- what is refused ----------------------------------------------------------------------------------------------


def test_a_processor_of_states_is_refused_each_time():
    agent = make_agent(DeviceMemory(90), VECTOR, processor=WhiteningNormalizerProcessor())
    for _ in range(2):
        with pytest.raises(ValueError, match="WhiteningNormalizerProcessor.process_state_batch cannot reach them"):
            agent.fit(lanes_of(VECTOR), nb_steps=30, verbose=0)


def test_frames_are_not_handed_out():
    device = DeviceMemory(10)
    device.extend(transitions(np.ones((2, 3)), np.ones((2, 3))))
    assert device.rewards[0] == 0
    for ask in (lambda: device.sample(1), lambda: device.observations[0]):
        with pytest.raises(NotImplementedError, match="does not hand out frames. Fix: sample_batch"):
            ask()


@pytest.mark.parametrize("copied", [copy.deepcopy, pickle.dumps])
def test_copies_are_refused(copied):
    with pytest.raises(TypeError, match="cannot be copied or pickled"):
        copied(DeviceMemory(10))


def test_bad_rows_are_refused_whole():
    host, device = pair(10)
    for memory in (host, device):
        memory.extend(transitions(np.ones((2, 3), np.uint8), np.ones((2, 3), np.uint8)))
        with pytest.raises(ValueError, match="observation has dtype float64, but this memory holds uint8"):
            memory.extend(transitions(np.ones((2, 3)), np.ones((2, 3), np.uint8)))
        with pytest.raises(ValueError, match="next_observation has shape"):
            memory.extend(transitions(np.ones((2, 3), np.uint8), np.ones((2, 4), np.uint8)))
    assert_same_batches(host, device)


def test_arguments_are_checked():
    with pytest.raises(ValueError, match="limit must be an integer and at least 1"):
        DeviceMemory(0)
    with pytest.raises(ValueError, match="The memory is empty"):
        DeviceMemory(3).sample_batch(2)
