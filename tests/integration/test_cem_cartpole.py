"""CEM learns CartPole-v1: `pytest -m slow`; docs/agents/cem.md records the scores.

    python tests/integration/test_cem_cartpole.py 1 2 3      # seeds

The settings are those of `examples/cem_cartpole.py`.
"""

import sys

import gymnasium as gym
import keras
import numpy as np
import pytest

from rl.agents import CEMAgent
from rl.common.vec_env import DummyVecEnv


def score(seed, nb_steps=100_000, nb_lanes=8):
    """Mean return of the mean policy over 100 episodes on seeds of their own."""
    keras.utils.set_random_seed(seed)
    env, test_env = (DummyVecEnv([lambda: gym.make("CartPole-v1")] * nb_lanes) for _ in range(2))
    model = keras.Sequential([keras.Input((1, 4)), keras.layers.Flatten(), keras.layers.Dense(2)])
    agent = CEMAgent(
        model,
        nb_actions=2,
        batch_size=50,
        train_interval=50,
        elite_frac=0.2,
        nb_steps_warmup=0,
        noise_ampl=0.5,
        noise_decay_const=5e-5,
    )
    agent.compile()
    agent.fit(env, nb_steps=nb_steps, verbose=0, seed=1000 * seed)
    history = agent.test(test_env, nb_episodes=100, visualize=False, verbose=0, seed=900_000 + 1000 * seed)
    return np.mean(history.history["episode_reward"])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("nb_lanes", [1, 8])  # more would leave too few generations
def test_cem_learns_cartpole(nb_lanes):
    scores = [score(seed, nb_lanes=nb_lanes) for seed in (1, 2, 3)]
    print(f"\nCartPole-v1, 100,000 steps, {nb_lanes} lanes, mean of 100 episodes by seed: {scores}")
    assert np.mean(scores) >= 475
    assert min(scores) >= 400


if __name__ == "__main__":
    for lanes in (1, 8, 32):
        for number in [int(x) for x in sys.argv[1:]] or (1, 2, 3):
            print(f"{lanes} lanes, seed {number}, score {score(number, nb_lanes=lanes):.1f}", flush=True)
