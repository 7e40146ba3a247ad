"""SARSA learns CartPole-v1: `pytest -m slow`; docs/agents/sarsa.md records the scores.

    python tests/integration/test_sarsa_cartpole.py 1 2 3      # seeds

The hyper-parameters are those of `examples/sarsa_cartpole.py`: SLM-Lab's, on four lanes.
"""

import sys

import gymnasium as gym
import keras
import numpy as np
import pytest

from rl.agents import SARSAAgent
from rl.common.vec_env import DummyVecEnv
from rl.networks import mlp
from rl.policy import BoltzmannQPolicy, LinearAnnealedPolicy


def score(seed, nb_steps=200_000, **options):
    """Mean return of the greedy policy over 100 episodes on seeds of their own, with the last weights."""
    keras.utils.set_random_seed(seed)
    env, test_env = (DummyVecEnv([lambda: gym.make("CartPole-v1")] * 4) for _ in range(2))
    policy = LinearAnnealedPolicy(BoltzmannQPolicy(), "tau", 1.0, 0.05, 0.05, nb_steps=15_000)
    agent = SARSAAgent(mlp((4,), 2, hidden=(128,)), nb_actions=2, policy=policy, train_interval=32, **options)
    agent.compile(keras.optimizers.RMSprop(8.7e-3, rho=0.99, epsilon=1e-8, global_clipnorm=0.35))
    agent.fit(env, nb_steps=nb_steps, verbose=0, seed=1000 * seed)
    history = agent.test(test_env, nb_episodes=100, visualize=False, verbose=0, seed=900_000 + 1000 * seed)
    return np.mean(history.history["episode_reward"])


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("expected", [False, True])
def test_sarsa_learns_cartpole(expected):
    scores = [score(seed, expected=expected) for seed in (1, 2, 3)]
    print(f"\nCartPole-v1, 200,000 steps, expected={expected}, mean of 100 greedy episodes by seed: {scores}")
    assert np.mean(scores) >= 350
    assert min(scores) >= 150


if __name__ == "__main__":
    for number in [int(x) for x in sys.argv[1:]] or (1, 2, 3):
        for kind in (False, True):
            print(
                "Expected SARSA" if kind else "SARSA",
                "seed",
                number,
                f"score {score(number, expected=kind):.1f}",
            )
