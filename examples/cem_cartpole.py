"""The cross-entropy method on CartPole: a linear policy, found without gradients.

    python examples/cem_cartpole.py
    python examples/cem_cartpole.py --num-env 50

Each episode is played by a policy whose ten weights are drawn at random around the best ones so far; the fifth of them
with the highest returns tells where to draw the next fifty.
"""

import argparse

import keras
import numpy as np

from rl.agents import CEMAgent
from rl.common.cmd_util import make_gym_env
from rl.common.vec_env import DummyVecEnv
from rl.memory import EpisodeParameterMemory


def main() -> None:
    parser = argparse.ArgumentParser(description="The cross-entropy method on CartPole")
    parser.add_argument("--nb-steps", type=int, default=100_000, help="env steps, summed over the envs")
    parser.add_argument("--num-env", type=int, default=8, help="environments that step together")
    parser.add_argument("--nb-test-episodes", type=int, default=10)
    parser.add_argument("--seed", type=int, default=123)
    args = parser.parse_args()

    keras.utils.set_random_seed(args.seed)
    # In this process: a step of CartPole costs less than asking another process for it.
    env = make_gym_env("CartPole-v1", num_env=args.num_env, seed=args.seed, vec_env_cls=DummyVecEnv)
    model = keras.Sequential(
        [
            keras.Input((1, *env.observation_space.shape)),
            keras.layers.Flatten(),
            keras.layers.Dense(env.action_space.n),
        ]
    )
    cem = CEMAgent(
        model,
        nb_actions=env.action_space.n,
        memory=EpisodeParameterMemory(limit=1000, window_length=1),
        batch_size=50,
        train_interval=50,
        elite_frac=0.2,
        nb_steps_warmup=0,
        noise_ampl=0.5,
        noise_decay_const=5e-5,
    )
    cem.compile()
    cem.fit(env, nb_steps=args.nb_steps, verbose=1)

    history = cem.test(env, nb_episodes=args.nb_test_episodes, visualize=False)
    print(f"Mean return of the mean policy: {np.mean(history.history['episode_reward']):.1f}")
    env.close()


if __name__ == "__main__":
    main()
