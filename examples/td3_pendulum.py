"""TD3 swings up a pendulum: DDPG with two critics, a smoothed target and a delayed actor.

`deterministic_actor_critic` makes an actor with outputs in [-1, 1], which the agent maps to the environment's bounds,
and a critic; the agent makes the critic's twin.

    python examples/td3_pendulum.py
    python examples/td3_pendulum.py --num-env 4
"""

import argparse

import keras
import numpy as np

from rl.agents import TD3Agent
from rl.common.cmd_util import make_gym_env
from rl.common.vec_env import DummyVecEnv
from rl.memory import SequentialMemory
from rl.networks import deterministic_actor_critic
from rl.random import GaussianWhiteNoiseProcess


def main() -> None:
    parser = argparse.ArgumentParser(description="TD3 on Pendulum")
    parser.add_argument("--nb-steps", type=int, default=20_000, help="env steps, summed over the envs")
    parser.add_argument("--num-env", type=int, default=1, help="environments that step together")
    parser.add_argument("--nb-test-episodes", type=int, default=10)
    parser.add_argument("--seed", type=int, default=123)
    args = parser.parse_args()

    keras.utils.set_random_seed(args.seed)
    # In this process: a step of Pendulum costs less than asking another process for it.
    env = make_gym_env("Pendulum-v1", num_env=args.num_env, seed=args.seed, vec_env_cls=DummyVecEnv)
    nb_actions = env.action_space.shape[0]
    td3 = TD3Agent(
        nb_actions,
        *deterministic_actor_critic(env, hidden=(64, 64)),
        SequentialMemory(limit=100_000),
        gamma=0.98,
        random_process=GaussianWhiteNoiseProcess(sigma=0.1, size=nb_actions),
    )
    td3.compile(keras.optimizers.Adam(1e-3))
    td3.fit(env, nb_steps=args.nb_steps, verbose=1)

    history = td3.test(env, nb_episodes=args.nb_test_episodes, visualize=False)
    print(f"Mean return of the greedy policy: {np.mean(history.history['episode_reward']):.1f}")
    env.close()


if __name__ == "__main__":
    main()
