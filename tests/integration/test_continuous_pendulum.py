"""Agents for continuous actions learn Pendulum-v1, by `pytest -m slow`; the agents' pages record the scores.

    python tests/integration/test_continuous_pendulum.py               # all agents, seeds 1 to 3
    python tests/integration/test_continuous_pendulum.py ddpg 1 2 3    # one of them

DDPG's, TD3's and SAC's hyper-parameters are those of rl-baselines3-zoo, but for networks of 64-64 units and
1,000 uniform steps; NAF's are those of `examples/naf_pendulum.py`. The score of a seed is the mean return of the
greedy policy over 100 episodes on seeds of their own, with the last weights.
"""

import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import gymnasium as gym
import keras
import numpy as np
import pytest
from keras import layers

from rl.agents import DDPGAgent, NAFAgent, SACAgent, TD3Agent
from rl.common.vec_env import DummyVecEnv
from rl.core import Processor
from rl.memory import SequentialMemory
from rl.networks import mlp
from rl.random import GaussianWhiteNoiseProcess, OrnsteinUhlenbeckProcess


class Task(NamedTuple):
    nb_steps: int
    make: Callable  # () -> compiled agent
    mean: float  # what the mean over three seeds must reach


def actor_and_critic(hidden=(64, 64), scale=1.0):
    """An actor with actions in [-scale, scale], a critic, and the critic's action input."""
    observation, action = keras.Input((1, 3)), keras.Input((1,))
    x = layers.Flatten()(observation)
    for units in hidden:
        x = layers.Dense(units, "relu")(x)
    actor = keras.Model(observation, layers.Rescaling(scale)(layers.Dense(1, "tanh")(x)))
    x = layers.Concatenate()([action, layers.Flatten()(observation)])
    for units in hidden:
        x = layers.Dense(units, "relu")(x)
    return actor, keras.Model([action, observation], layers.Dense(1)(x)), action


def ddpg():
    agent = DDPGAgent(
        1,
        *actor_and_critic(scale=2.0),
        SequentialMemory(20_000),
        gamma=0.98,
        batch_size=256,
        nb_steps_warmup_critic=1000,
        nb_steps_warmup_actor=1000,
        random_process=GaussianWhiteNoiseProcess(sigma=0.2),
        target_model_update=0.005,
        nb_steps_random=1000,
    )
    agent.compile(keras.optimizers.Adam(1e-3))
    return agent


class TenthOfTheReward(Processor):
    def process_reward(self, reward):
        return reward / 10


def naf():
    unbounded = mlp((3,), 1, activation="relu", output_gain=0.01)
    mu = keras.Model(unbounded.input, layers.Rescaling(2.0)(layers.Activation("tanh")(unbounded.output)))
    agent = NAFAgent(
        mlp((3,), 1, activation="relu"),
        mlp((3,), 1, activation="relu", output_gain=0.01),
        mu,
        OrnsteinUhlenbeckProcess(theta=0.15, sigma=0.4, dt=1.0),
        nb_actions=1,
        memory=SequentialMemory(100_000),
        batch_size=64,
        nb_steps_warmup=1000,
        target_model_update=0.005,
        processor=TenthOfTheReward(),
    )
    agent.compile(keras.optimizers.Adam(1e-3))
    return agent


def td3():
    agent = TD3Agent(
        1,
        *actor_and_critic(),
        SequentialMemory(20_000),
        gamma=0.98,
        random_process=GaussianWhiteNoiseProcess(sigma=0.1),
    )
    agent.compile(keras.optimizers.Adam(1e-3))
    return agent


def sac():
    observation = keras.Input((1, 3))
    x = layers.Flatten()(observation)
    for _ in range(2):
        x = layers.Dense(64, "relu")(x)
    actor = keras.Model(observation, layers.Dense(2)(x))
    agent = SACAgent(1, actor, *actor_and_critic()[1:], SequentialMemory(20_000))
    agent.compile(keras.optimizers.Adam(1e-3))
    return agent


TASKS = {"ddpg": Task(20_000, ddpg, -200), "td3": Task(20_000, td3, -200), "sac": Task(20_000, sac, -200)}
TASKS["naf"] = Task(40_000, naf, -250)


def score(name, seed):
    """Trains a task's agent; returns `(mean return over 100 greedy episodes, env steps per second)`."""
    task = TASKS[name]
    keras.utils.set_random_seed(seed)
    env, test_env = gym.make("Pendulum-v1"), DummyVecEnv([lambda: gym.make("Pendulum-v1")] * 20)
    agent = task.make()
    start = time.perf_counter()
    agent.fit(env, nb_steps=task.nb_steps, verbose=0, seed=1000 * seed)
    rate = agent.step / (time.perf_counter() - start)
    agent.processor = None  # the env's own rewards
    history = agent.test(test_env, nb_episodes=100, visualize=False, verbose=0, seed=900_000 + 1000 * seed)
    env.close()
    test_env.close()
    return np.mean(history.history["episode_reward"]), rate


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", TASKS)
def test_pendulum_is_learnt(name):
    scores = [score(name, seed)[0] for seed in (1, 2, 3)]
    print(f"\n{name}, Pendulum-v1, {TASKS[name].nb_steps} steps, mean of 100 greedy episodes by seed: {scores}")
    assert np.mean(scores) >= TASKS[name].mean


if __name__ == "__main__":
    for name in sys.argv[1:2] or TASKS:
        for seed in [int(x) for x in sys.argv[2:]] or (1, 2, 3):
            print(name, "seed", seed, "score {:.1f}, {:.0f} env steps/s".format(*score(name, seed)), flush=True)
