"""What docs/migration.md says is so: its script runs, its names and arguments exist, what it calls gone is gone."""

import importlib
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import keras
import numpy as np
import pytest

import rl.agents
from rl.agents import DQNAgent
from rl.callbacks import Callback
from rl.common.cmd_util import make_gym_env
from rl.common.vec_env import DummyVecEnv
from rl.memory import SequentialMemory
from rl.networks import mlp
from tests.backends import tensorflow_only

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "migration.md").read_text("utf-8")


def script(which):
    """One side of the page's diff: `-` the old script, `+` the new one."""
    lines = re.search(r"```diff\n(.*?)```", PAGE, re.S).group(1).splitlines()
    return "\n".join(line[1:] for line in lines if line[:1] in ("", " ", which)) + "\n"


def test_the_script_of_the_page_runs(tmp_path):
    source = script("+")
    assert "nb_steps=50000, visualize" in source
    (tmp_path / "script.py").write_text(source.replace("nb_steps=50000, visualize", "nb_steps=300, visualize"))
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.returncode == 0, done.stderr
    assert "Episode 5: reward:" in done.stdout and (tmp_path / "dqn_weights.h5f").exists()


@tensorflow_only
def test_tensorflows_keras_is_the_same_keras():
    """So imports of keras-rl2's scripts may stay."""
    import tensorflow

    keras_of_tensorflow = tensorflow.keras
    assert keras_of_tensorflow.layers.Dense is keras.layers.Dense
    assert keras_of_tensorflow.models.Sequential is keras.models.Sequential
    assert keras_of_tensorflow.optimizers.Adam is keras.optimizers.Adam
    with pytest.raises(ImportError, match="legacy"):
        keras_of_tensorflow.optimizers.legacy.Adam(1e-3)


def test_the_edits_are_the_ones_named():
    old, new = script("-"), script("+")
    compile(old, "old", "exec")
    changed = set(old.splitlines()) ^ set(new.splitlines())
    for line in changed:
        assert any(part in line for part in ("gym", "seed", "nb_actions = ", "lr=", "learning_rate=", "dqn.fit")), line


def test_each_edit_is_needed():
    env = gym.make("CartPole-v1")
    with pytest.raises(ValueError, match="lr"):
        keras.optimizers.Adam(lr=1e-3)
    with pytest.raises(ValueError, match="units"):
        keras.layers.Dense(env.action_space.n)
    with pytest.raises(AttributeError):
        env.seed(123)
    with pytest.raises(gym.error.DeprecatedEnv, match="Pendulum-v1"):
        gym.make("Pendulum-v0")
    with pytest.raises(ValueError):
        keras.layers.Convolution2D(32, 8, 8, subsample=(4, 4))
    assert keras.layers.Conv2D(32, 8, strides=4).kernel_size == (8, 8)
    assert type(make_gym_env("CartPole-v1", 1, vec_env_cls=DummyVecEnv).action_space.n) is int


def found(path):
    """What a dotted name of the package stands for."""
    parts = path.split(".")
    for i in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:i]))
        except ModuleNotFoundError:
            continue
        for part in parts[i:]:
            value = getattr(value, part)
        return value
    raise AssertionError(path)


GONE = {"rl.util.AdditionalUpdatesOptimizer", "rl.util.get_soft_target_model_updates"}


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`(rl(?:\.\w+)+)", PAGE)) | {"rl.common.vec_env"}))
def test_a_name_of_the_page_is_there_or_gone_as_it_says(path):
    if path in GONE:
        with pytest.raises(AttributeError, match="is gone; use "):
            found(path)
    else:
        assert found(path) is not None


SHORT = {
    "rl.common.vec_env": (
        "SubprocVecEnv DummyVecEnv VecNormalize VecFrameStack VecMonitor VecVideoRecorder VecCheckNan"
    ),
    "rl.agents": "DQNAgent DDPGAgent NAFAgent SARSAAgent SarsaAgent CEMAgent PPOAgent A2CAgent ContinuousDQNAgent",
    "rl.random": "GaussianWhiteNoiseProcess OrnsteinUhlenbeckProcess",
    "rl.policy": "LinearAnnealedPolicy EpsGreedyQPolicy",
}


@pytest.mark.parametrize(("module", "names"), sorted(SHORT.items()))
def test_names_that_stand_without_their_module(module, names):
    for name in names.split():
        assert name in PAGE and hasattr(importlib.import_module(module), name), name


def test_what_is_gone_elsewhere():
    import rl.common.vec_env.subproc_env_vec as subproc_env_vec

    assert not hasattr(subproc_env_vec, "worker")
    assert not hasattr(DQNAgent, "trainable_model") and hasattr(rl.agents.DDPGAgent, "update_target_models_hard")


# Arguments by the agent whose rows name them.
ARGUMENTS = {
    "DQNAgent": "nb_steps_warmup train_interval target_model_update policy memory delta_clip gamma enable_double_dqn",
    "DDPGAgent": "nb_steps_warmup_critic nb_steps_warmup_actor nb_steps_random random_process scale_actions",
    "TD3Agent": "policy_delay target_noise target_noise_clip scale_actions nb_steps_random random_process",
    "PPOAgent": (
        "nb_rollout_steps batch_size nb_epochs lam clip_range clip_value_range entropy_weight value_loss_weight "
        "max_grad_norm target_kl normalize_advantage initial_log_std nb_total_steps normalize_observation "
        "normalize_reward"
    ),
    "A2CAgent": (
        "nb_rollout_steps lam entropy_weight value_loss_weight max_grad_norm normalize_advantage normalize_observation"
    ),
}


@pytest.mark.parametrize("name", sorted(ARGUMENTS))
def test_arguments_of_the_page_are_there(name):
    accepted = set()
    for cls in getattr(rl.agents, name).__mro__:
        if constructor := vars(cls).get("__init__"):
            accepted |= set(inspect.signature(constructor).parameters)
    for argument in ARGUMENTS[name].split():
        assert argument in PAGE and argument in accepted, argument


def test_what_stands_for_predict_learn_load_and_evaluation(tmp_path):
    env, eval_env = make_gym_env("CartPole-v1", num_env=2, seed=0, vec_env_cls=DummyVecEnv), gym.make("CartPole-v1")
    agent = DQNAgent(
        mlp((1, 4), 2, hidden=(8,)),
        nb_actions=2,
        memory=SequentialMemory(limit=100, window_length=1),
        nb_steps_warmup=10,
        target_model_update=0.005,
        train_interval=4,
        delta_clip=1.0,
    )
    agent.compile(keras.optimizers.Adam(1e-3, global_clipnorm=10.0), jit_compile=False, steps_per_execution=2)
    returns = []

    class Evaluation(Callback):
        def on_episode_end(self, episode, logs=None):
            history = self.model.test(eval_env, nb_episodes=2, visualize=False, verbose=0)
            returns.extend(history.history["episode_reward"])

    best = keras.callbacks.ModelCheckpoint(
        tmp_path / "x.weights.h5", "episode_reward", save_best_only=True, save_weights_only=True
    )
    agent.fit(env, nb_steps=1e2, nb_max_episode_steps=20, callbacks=[Evaluation(), best], verbose=0)
    assert agent.step == 100 and agent.run_state.nb_updates == 22
    assert returns and (tmp_path / "x.weights.h5").exists()
    agent.save(tmp_path / "x.keras")
    loaded = keras.models.load_model(tmp_path / "x.keras")
    observation = np.array([0.1, 0.2, 0.3, 0.4], np.float32)
    agent.training = loaded.training = False
    assert agent.forward(observation) == loaded.forward(observation) == agent.compute_q_values([observation]).argmax()
