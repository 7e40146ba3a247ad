"""SARSA on CartPole: the value of what the policy really does next, on four environments at once.

    python examples/sarsa_cartpole.py
    python examples/sarsa_cartpole.py --num-env 1 --expected

Each gradient step learns from the 32 latest pairs of state and action, and then forgets them. The policy draws actions
by their values (Boltzmann), at a temperature that falls from 1 to 0.05 in 15,000 steps.
"""

import argparse

import keras
import numpy as np

from rl.agents import SARSAAgent
from rl.common.cmd_util import make_gym_env
from rl.common.vec_env import DummyVecEnv
from rl.networks import mlp
from rl.policy import BoltzmannQPolicy, LinearAnnealedPolicy


def main() -> None:
    parser = argparse.ArgumentParser(description="SARSA on CartPole")
    parser.add_argument("--nb-steps", type=int, default=200_000, help="env steps, summed over the envs")
    parser.add_argument("--num-env", type=int, default=4, help="environments that step together")
    parser.add_argument("--expected", action="store_true", help="Expected SARSA")
    parser.add_argument("--nb-test-episodes", type=int, default=10)
    parser.add_argument("--seed", type=int, default=123)
    args = parser.parse_args()

    keras.utils.set_random_seed(args.seed)
    # In this process: a step of CartPole costs less than asking another process for it.
    env = make_gym_env("CartPole-v1", num_env=args.num_env, seed=args.seed, vec_env_cls=DummyVecEnv)
    sarsa = SARSAAgent(
        mlp(env.observation_space.shape, env.action_space.n, hidden=(128,)),
        nb_actions=env.action_space.n,
        policy=LinearAnnealedPolicy(
            BoltzmannQPolicy(), attr="tau", value_max=1.0, value_min=0.05, value_test=0.05, nb_steps=15_000
        ),
        train_interval=32,
        expected=args.expected,
    )
    sarsa.compile(keras.optimizers.RMSprop(8.7e-3, rho=0.99, epsilon=1e-8, global_clipnorm=0.35), metrics=["mae"])
    sarsa.fit(env, nb_steps=args.nb_steps, verbose=1)

    history = sarsa.test(env, nb_episodes=args.nb_test_episodes, visualize=False)
    print(f"Mean return of the greedy policy: {np.mean(history.history['episode_reward']):.1f}")
    env.close()


if __name__ == "__main__":
    main()
