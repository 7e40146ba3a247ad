"""A2C on CartPole: one gradient step per five steps of each environment.

    python examples/a2c_cartpole.py
    python examples/a2c_cartpole.py --num-env 16

The hyper-parameters are the agent's defaults, which are those of Stable-Baselines3 and rl-baselines3-zoo.
"""

import argparse

import keras
import numpy as np

from rl.agents import A2CAgent
from rl.common.cmd_util import make_gym_env
from rl.common.vec_env import DummyVecEnv
from rl.networks import actor_critic


def main() -> None:
    parser = argparse.ArgumentParser(description="A2C on CartPole")
    parser.add_argument("--nb-steps", type=int, default=500_000, help="env steps, summed over the envs")
    parser.add_argument("--num-env", type=int, default=8, help="environments that step together")
    parser.add_argument("--nb-test-episodes", type=int, default=10)
    parser.add_argument("--seed", type=int, default=123)
    args = parser.parse_args()

    keras.utils.set_random_seed(args.seed)
    # In this process: a step of CartPole costs less than asking another process for it.
    env = make_gym_env("CartPole-v1", num_env=args.num_env, seed=args.seed, vec_env_cls=DummyVecEnv)
    a2c = A2CAgent(*actor_critic(env), env.action_space)
    a2c.compile()  # RMSprop, as the reference has it
    a2c.fit(env, nb_steps=args.nb_steps, verbose=1)

    history = a2c.test(env, nb_episodes=args.nb_test_episodes, visualize=False)
    print(f"Mean return of the greedy policy: {np.mean(history.history['episode_reward']):.1f}")
    env.close()


if __name__ == "__main__":
    main()
