"""Every callback in real, short fits of a DQN agent on CartPole: on one env and on lanes, and a second time."""

import csv
import importlib.util
import json

import gymnasium as gym
import keras
import numpy as np
import pytest

from rl.agents.dqn import DQNAgent
from rl.callbacks import FileLogger, ModelIntervalCheckpoint, TrainEpisodeLogger, TrainIntervalLogger, Visualizer
from rl.common.vec_env import DummyVecEnv
from rl.memory import SequentialMemory
from rl.policy import EpsGreedyQPolicy

METRICS = ["loss", "mae", "mean_q"]


def make_agent(**options):
    model = keras.Sequential(
        [
            keras.layers.Input((1, 4)),
            keras.layers.Flatten(),
            keras.layers.Dense(8, "relu", kernel_initializer=keras.initializers.GlorotUniform(1)),
            keras.layers.Dense(2, kernel_initializer=keras.initializers.GlorotUniform(2)),
        ]
    )
    options = {"nb_steps_warmup": 60, "target_model_update": 0.01, "policy": EpsGreedyQPolicy(1.0)} | options
    agent = DQNAgent(model, nb_actions=2, memory=SequentialMemory(2000, window_length=1), **options)
    agent.compile(keras.optimizers.Adam(1e-3), metrics=["mae"], jit_compile=False)
    return agent


def make_env(lanes, render_mode=None):
    if lanes == 1:
        return gym.make("CartPole-v1", render_mode=render_mode)
    return DummyVecEnv([lambda: gym.make("CartPole-v1", render_mode=render_mode)] * lanes)


def strict_json(path):
    def refuse(token):
        raise AssertionError(f"{token} is not JSON")

    return json.loads(path.read_text(), parse_constant=refuse)


@pytest.mark.parametrize("lanes", [1, 3])
def test_all_callbacks_at_once_twice_and_in_a_test(tmp_path, lanes, capsys):
    agent, env = make_agent(), make_env(lanes)
    assert agent.metrics_names == METRICS
    ends = []
    callbacks = [
        keras.callbacks.CSVLogger(tmp_path / "log.csv", append=True),
        keras.callbacks.ModelCheckpoint(tmp_path / "last.weights.h5", save_weights_only=True, save_freq=50),
        keras.callbacks.ModelCheckpoint(tmp_path / "best.keras", "episode_reward", save_best_only=True),
        keras.callbacks.ModelCheckpoint(
            tmp_path / "loss.weights.h5", "loss", save_best_only=True, save_weights_only=True
        ),
        keras.callbacks.EarlyStopping("episode_reward", patience=10_000),
        keras.callbacks.ReduceLROnPlateau("loss", patience=10_000),
        keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: ends.append((epoch, logs["nb_steps"]))),
        keras.callbacks.ProgbarLogger(),
        keras.callbacks.TerminateOnNaN(),
        keras.callbacks.BackupAndRestore(tmp_path / "backup"),
        FileLogger(tmp_path / "log.json", interval=3),
        ModelIntervalCheckpoint(tmp_path / "at_{step}.weights.h5", interval=100),
        TrainEpisodeLogger(),
        TrainIntervalLogger(interval=100),
    ]
    returns = []
    for verbose in (1, 2):
        seed = 1 if verbose == 1 else None  # the second fit goes on with the open episodes
        history = agent.fit(env, nb_steps=150, callbacks=callbacks, verbose=verbose, seed=seed)
        returns += history.history["episode_reward"]
        assert {len(values) for values in history.history.values()} == {len(history.epoch)}
        assert {*METRICS, "episode_reward", "nb_steps", "nb_episode_steps"} <= set(history.history)
        assert 150 - lanes < agent.step - 150 * (verbose - 1) < 150 + lanes
    rows = list(csv.DictReader((tmp_path / "log.csv").open()))
    assert [float(row["episode_reward"]) for row in rows] == returns
    assert rows[0]["loss"] == "nan"
    assert float(rows[-1]["loss"]) > 0
    data = strict_json(tmp_path / "log.json")
    assert sorted(data["episode_reward"]) == sorted(returns)
    assert len(set(data["episode"])) == len(returns)
    assert data["loss"][-1] > 0
    assert [nb_steps for _, nb_steps in ends] == sorted(nb_steps for _, nb_steps in ends)
    names = {path.name for path in tmp_path.iterdir()}
    assert {"best.keras", "last.weights.h5", "loss.weights.h5"} <= names
    assert sum(name.startswith("at_") for name in names) == agent.step // 100
    out = capsys.readouterr().out
    assert "nan" not in out

    step = agent.step
    history = agent.test(env, nb_episodes=4, callbacks=callbacks[-4:-2], visualize=False)
    assert len(history.history["episode_reward"]) == 4
    assert agent.step == step
    assert {path.name for path in tmp_path.iterdir()} == names
    assert "Episode 4: reward: " in capsys.readouterr().out
    env.close()


def test_checkpoints_can_be_loaded(tmp_path):
    agent, env = make_agent(), make_env(1)
    full = keras.callbacks.ModelCheckpoint(tmp_path / "agent.keras")
    weights = keras.callbacks.ModelCheckpoint(tmp_path / "agent.weights.h5", save_weights_only=True)
    history = agent.fit(env, nb_steps=200, callbacks=[full, weights], verbose=0, seed=1)
    agent.fit(env, nb_episodes=1, callbacks=[full, weights], verbose=0)  # ends with a save
    states = np.random.default_rng(0).normal(size=(5, 1, 4)).astype("float32")
    expected = agent.compute_batch_q_values(states)
    np.testing.assert_allclose(
        keras.models.load_model(tmp_path / "agent.keras").compute_batch_q_values(states), expected, rtol=1e-6
    )
    other = make_agent()
    assert not np.allclose(other.compute_batch_q_values(states), expected)
    other.load_weights(tmp_path / "agent.weights.h5")
    np.testing.assert_allclose(other.compute_batch_q_values(states), expected, rtol=1e-6)
    assert len(history.epoch) > 2


def test_early_stopping_stops_and_restores_the_weights_of_the_best_episode():
    kept = {}

    def keep(epoch, logs):
        kept[epoch] = (logs["episode_reward"], agent.get_weights())

    agent = make_agent(nb_steps_warmup=5)
    stopping = keras.callbacks.EarlyStopping("episode_reward", patience=3, restore_best_weights=True)
    history = agent.fit(
        make_env(1),
        nb_steps=3000,
        callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=keep), stopping],
        verbose=0,
        seed=1,
    )
    returns = history.history["episode_reward"]
    best = int(np.argmax(returns))
    assert agent.step < 3000
    assert len(returns) == best + 4
    for restored, expected in zip(agent.get_weights(), kept[best][1], strict=True):
        np.testing.assert_array_equal(restored, expected)


def test_plateau_lowers_the_learning_rate_of_the_agent():
    agent = make_agent(nb_steps_warmup=90)
    plateau = keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=1e6)
    history = agent.fit(make_env(3), nb_steps=300, callbacks=[plateau], verbose=0, seed=1)
    rates = history.history["learning_rate"]
    nb_seen = int(np.sum(~np.isnan(history.history["loss"])))
    assert 2 < nb_seen < len(rates)
    assert float(agent.optimizer.learning_rate) == pytest.approx(1e-3 * 0.5 ** (nb_seen - 1), rel=1e-4)


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="needs the package tensorboard")
@pytest.mark.parametrize("options", [{}, {"histogram_freq": 1, "update_freq": 1}, {"write_steps_per_second": True}])
def test_tensorboard_has_the_returns(tmp_path, options):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    agent = make_agent()
    board = keras.callbacks.TensorBoard(tmp_path, **options)
    history = agent.fit(make_env(3), nb_steps=200, callbacks=[board], verbose=0, seed=1)
    events = EventAccumulator(str(tmp_path / "train"), size_guidance={"tensors": 0})  # 0: keep all
    events.Reload()
    rewards = events.Tensors("epoch_episode_reward")
    assert [event.step for event in rewards] == list(range(len(history.epoch)))
    values = [float(make_ndarray(event.tensor_proto)) for event in rewards]
    assert values == history.history["episode_reward"]
    assert {f"epoch_{name}" for name in METRICS} <= set(events.Tags()["tensors"])


@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("verbose", [1, 2])
def test_what_fit_prints(capsys, lanes, verbose):
    agent, env = make_agent(), make_env(lanes)
    for _ in range(2):
        first = agent.step
        history = agent.fit(env, nb_steps=120, verbose=verbose, log_interval=50, seed=1 if first == 0 else None)
        out = capsys.readouterr().out
        assert "nan" not in out and "\r" not in out
        head, header, *rows, end = out.splitlines()
        assert max(map(len, rows)) <= 100
        assert head == "Training for 120 steps ..."
        assert end.startswith("done, took ")
        assert {len(row) for row in rows} == {len(header)}
        steps = [int(row.split("/")[0]) for row in rows]
        if verbose == 1:
            assert steps[-1] == agent.step - first
            assert len(rows) == 3
            assert sum(int(row.split()[2]) for row in rows) == len(history.epoch)
        else:
            assert [float(row.split()[5]) for row in rows] == history.history["episode_reward"]
            assert [first + n for n in steps] == history.history["nb_steps"]


@pytest.mark.parametrize("lanes", [1, 3])
def test_visualizer_draws_each_vector_step(lanes):
    class Spy(gym.Wrapper):
        frames = 0

        def render(self):
            Spy.frames += 1

    agent = make_agent()
    env = Spy(make_env(1, "rgb_array")) if lanes == 1 else make_env(lanes)
    if lanes == 1:
        agent.fit(env, nb_steps=30, visualize=True, verbose=0)
        assert Spy.frames == 30
    else:
        with pytest.warns(UserWarning, match="Nothing to visualize") as caught:
            agent.fit(env, nb_steps=30, callbacks=[Visualizer()], verbose=0)
        assert caught[0].filename == __file__  # it points at the call of fit


def test_callbacks_do_not_disturb_the_training(tmp_path):
    def train(callbacks, verbose):
        keras.utils.set_random_seed(5)
        agent = make_agent()
        agent.fit(make_env(3), nb_steps=200, callbacks=callbacks, verbose=verbose, seed=7)
        return agent.get_weights()

    path = tmp_path / "a.weights.h5"
    expected = train([], 0)
    watched = train(
        [
            ModelIntervalCheckpoint(path, 10),
            FileLogger(tmp_path / "log.json", 1),
            keras.callbacks.ModelCheckpoint(tmp_path / "a.keras"),
            keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: None),
        ],
        2,
    )
    for a, b in zip(expected, watched, strict=True):
        np.testing.assert_array_equal(a, b)
