"""PPO and A2C learn: a short CartPole run always, the rest by `pytest -m slow`; the agents' pages record the scores.

    python tests/integration/test_on_policy.py                       # all tasks, seeds 1 to 3
    python tests/integration/test_on_policy.py ppo_pendulum 1 2 3    # one of them

The hyper-parameters are those of rl-baselines3-zoo, but for Acrobot's number of steps, Pendulum's exploration (no gSDE)
and its 200,000 steps. The score of a seed is the mean return of the greedy policy over 100 episodes on seeds of their
own, with the last weights.
"""

import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import gymnasium as gym
import keras
import numpy as np
import pytest

from rl.agents import A2CAgent, PPOAgent
from rl.common.vec_env import DummyVecEnv
from rl.networks import actor_critic
from rl.util import LinearSchedule


class Task(NamedTuple):
    env_id: str
    nb_steps: int
    nb_lanes: int
    make: Callable  # (env, nb_steps) -> compiled agent
    mean: float  # what the mean over three seeds must reach
    floor: float  # what each seed must reach


def ppo(learning_rate, linear=False, **options):
    def make(env, nb_steps):
        rows = options["nb_rollout_steps"] * env.num_envs
        nb_updates = nb_steps // rows * options["nb_epochs"] * -(-rows // options["batch_size"])
        rate = keras.optimizers.schedules.PolynomialDecay(learning_rate, nb_updates, 0.0) if linear else learning_rate
        clip = {"clip_range": LinearSchedule(0.2), "nb_total_steps": nb_steps} if linear else {}
        agent = PPOAgent(*actor_critic(env), env.action_space, **options, **clip)
        agent.compile(keras.optimizers.Adam(rate, epsilon=1e-5))
        return agent

    return make


def a2c(**options):
    def make(env, nb_steps):
        agent = A2CAgent(*actor_critic(env), env.action_space, **options)
        agent.compile()
        return agent

    return make


_CARTPOLE = ppo(1e-3, linear=True, nb_rollout_steps=32, nb_epochs=20, batch_size=256, gamma=0.98, lam=0.8)
_ACROBOT = {"gamma": 0.99, "lam": 0.94, "normalize_observation": True, "normalize_reward": True}
_PENDULUM = ppo(1e-3, nb_rollout_steps=1024, nb_epochs=10, batch_size=64, gamma=0.9, lam=0.95)
_LANDER = {"gamma": 0.999, "lam": 0.98, "entropy_weight": 0.01}
TASKS = {
    "ppo_cartpole": Task("CartPole-v1", 100_000, 8, _CARTPOLE, 475, 400),
    "ppo_acrobot": Task(
        "Acrobot-v1", 300_000, 16, ppo(3e-4, nb_rollout_steps=256, nb_epochs=4, batch_size=64, **_ACROBOT), -95, -110
    ),
    "ppo_pendulum": Task("Pendulum-v1", 200_000, 4, _PENDULUM, -250, -400),
    "ppo_lunarlander": Task(
        "LunarLander-v3",
        1_000_000,
        16,
        ppo(3e-4, nb_rollout_steps=1024, nb_epochs=4, batch_size=64, **_LANDER),
        200,
        120,
    ),
    "a2c_cartpole": Task("CartPole-v1", 500_000, 8, a2c(), 475, 300),
    "a2c_acrobot": Task("Acrobot-v1", 500_000, 16, a2c(normalize_observation=True, normalize_reward=True), -100, -130),
}


def score(name, seed, nb_steps=None):
    """Trains a task's agent; returns `(mean return over 100 greedy episodes, env steps per second)`."""
    task = TASKS[name]
    keras.utils.set_random_seed(seed)
    env, test_env = (DummyVecEnv([lambda: gym.make(task.env_id)] * task.nb_lanes) for _ in range(2))
    agent = task.make(env, nb_steps or task.nb_steps)
    start = time.perf_counter()
    agent.fit(env, nb_steps=nb_steps or task.nb_steps, verbose=0, seed=1000 * seed)
    rate = agent.step / (time.perf_counter() - start)
    history = agent.test(test_env, nb_episodes=100, visualize=False, verbose=0, seed=900_000 + 1000 * seed)
    env.close()
    test_env.close()
    return np.mean(history.history["episode_reward"]), rate


def test_ppo_learns_cartpole():
    mean, _ = score("ppo_cartpole", seed=1, nb_steps=50_000)
    assert mean >= 400


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", TASKS)
def test_the_references_scores_are_reached(name):
    scores = [score(name, seed)[0] for seed in (1, 2, 3)]
    print(f"\n{name}, {TASKS[name].nb_steps} steps, mean of 100 greedy episodes by seed: {scores}")
    assert np.mean(scores) >= TASKS[name].mean
    assert min(scores) >= TASKS[name].floor


if __name__ == "__main__":
    for name in sys.argv[1:2] or TASKS:
        for seed in [int(x) for x in sys.argv[2:]] or (1, 2, 3):
            print(name, "seed", seed, "score {:.1f}, {:.0f} env steps/s".format(*score(name, seed)), flush=True)
