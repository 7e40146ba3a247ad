"""`set_global_seeds(seed, deterministic=True)`: the same bits in every run."""

import os
import pathlib
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import keras
import numpy as np
import pytest

from rl.common import set_global_seeds

ROOT = pathlib.Path(__file__).parents[2]
NAME = keras.backend.backend()

FIT = """
import hashlib
import sys
from rl.common import set_global_seeds

set_global_seeds(1)
assert "keras" not in sys.modules
set_global_seeds(1, deterministic=True)
import gymnasium as gym, keras, numpy as np
from keras import layers
from rl.agents.dqn import DQNAgent
from rl.common.vec_env import DummyVecEnv
from rl.memory import SequentialMemory

if keras.backend.backend() == "tensorflow":
    from tensorflow.python.framework import config

    assert config.is_op_determinism_enabled()


class Frames(gym.Env):
    observation_space = gym.spaces.Box(0, 255, (12, 12), np.uint8)
    action_space = gym.spaces.Discrete(3)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        return self.np_random.integers(0, 256, (12, 12)).astype("u1"), {}

    def step(self, action):
        frame = self.np_random.integers(0, 256, (12, 12)).astype("u1")
        return frame, float(action == frame[0, 0] % 3), frame[0, 0] < 20, False, {}


def trained(seed):
    set_global_seeds(seed, deterministic=True)
    frames = keras.Input((4, 12, 12))
    x = layers.Rescaling(1 / 255)(layers.Permute((2, 3, 1))(frames))
    x = layers.Conv2D(8, 3, 2, activation="relu")(x)
    x = layers.Dropout(0.2)(layers.Conv2D(8, 3, activation="relu")(x))
    model = keras.Model(frames, layers.Dense(3)(layers.Dense(16, activation="relu")(layers.Flatten()(x))))
    memory = SequentialMemory(200, window_length=4)
    agent = DQNAgent(model, nb_actions=3, memory=memory, nb_steps_warmup=40, target_model_update=0.1)
    agent.compile()
    env = DummyVecEnv([Frames] * 4)
    agent.fit(env, nb_steps=120, verbose=0, seed=seed)
    assert agent.run_state.nb_updates == 80
    return hashlib.sha256(b"".join(w.tobytes() for w in agent.get_weights())).hexdigest()


print(trained(3), trained(4), trained(3))
"""


def test_two_processes_give_the_same_weights_to_the_last_bit():
    def run(hash_seed):  # of Python's sets
        done = subprocess.run(
            [sys.executable, "-c", FIT],
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            timeout=150,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout.split()

    with ThreadPoolExecutor() as pool:  # at the same time
        outputs = list(pool.map(run, ["1", "2"]))
    first, other, again = outputs[0]
    assert outputs[0] == outputs[1]
    assert first == again != other


def test_deterministic_needs_a_seed():
    with pytest.raises(ValueError, match="deterministic=True needs a seed"):
        set_global_seeds(None, deterministic=True)


@pytest.mark.skipif(NAME != "tensorflow", reason="TensorFlow's switch")
def test_only_deterministic_touches_tensorflow(monkeypatch):
    import tensorflow as tf

    calls = []
    monkeypatch.setattr(tf.config.experimental, "enable_op_determinism", lambda: calls.append(random.random()))
    set_global_seeds(3)
    assert not calls
    set_global_seeds(3, deterministic=True)
    assert len(calls) == 1
    draws = random.random(), np.random.rand(), float(keras.random.uniform(()))
    set_global_seeds(3)
    assert draws == (random.random(), np.random.rand(), float(keras.random.uniform(())))


@pytest.mark.skipif(NAME != "jax", reason="about XLA's flags with JAX")
@pytest.mark.parametrize(
    ("device", "flags", "refused"),
    [
        ("cpu", "", False),
        ("gpu", "", True),
        ("gpu", "--xla_gpu_deterministic_ops=false", True),
        ("gpu", "--xla_dump_to=x --xla_gpu_deterministic_ops=true", False),
        ("gpu", "--xla_gpu_exclude_nondeterministic_ops", False),
    ],
)
def test_jax_on_a_gpu_must_have_been_told_before(monkeypatch, device, flags, refused):
    import jax

    monkeypatch.setattr(jax, "default_backend", lambda: device)
    monkeypatch.setenv("XLA_FLAGS", flags)
    random.seed(7)
    before = random.getstate()
    if refused:
        with pytest.raises(RuntimeError, match="XLA_FLAGS=--xla_gpu_deterministic_ops=true"):
            set_global_seeds(3, deterministic=True)
        assert random.getstate() == before
    else:
        set_global_seeds(3, deterministic=True)
