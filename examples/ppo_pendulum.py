"""PPO with continuous actions: swings up a pendulum.

`actor_critic` makes a network of means; the agent adds a log standard deviation that does not depend on the state. An
action beyond the torque's bounds is clipped for the environment only.

    python examples/ppo_pendulum.py
    python examples/ppo_pendulum.py --normalize

The hyper-parameters are those of rl-baselines3-zoo, but for its state-dependent exploration and its 100,000 steps.
"""

import argparse

import keras
import numpy as np

from rl.agents import PPOAgent
from rl.common.cmd_util import make_gym_env
from rl.common.vec_env import DummyVecEnv
from rl.networks import actor_critic


def main() -> None:
    parser = argparse.ArgumentParser(description="PPO on Pendulum")
    parser.add_argument("--nb-steps", type=int, default=200_000, help="env steps, summed over the envs")
    parser.add_argument("--num-env", type=int, default=4, help="environments that step together")
    parser.add_argument("--nb-rollout-steps", type=int, default=1024, help="steps of each of them per rollout")
    parser.add_argument("--normalize", action="store_true", help="learn from normalised observations and rewards")
    parser.add_argument("--nb-test-episodes", type=int, default=10)
    parser.add_argument("--seed", type=int, default=123)
    args = parser.parse_args()

    keras.utils.set_random_seed(args.seed)
    # In this process: a step of Pendulum costs less than asking another process for it.
    env = make_gym_env("Pendulum-v1", num_env=args.num_env, seed=args.seed, vec_env_cls=DummyVecEnv)
    ppo = PPOAgent(
        *actor_critic(env),
        env.action_space,
        nb_rollout_steps=args.nb_rollout_steps,
        nb_epochs=10,
        batch_size=64,
        gamma=0.9,
        lam=0.95,
        normalize_observation=args.normalize,
        normalize_reward=args.normalize,
    )
    ppo.compile(keras.optimizers.Adam(1e-3, epsilon=1e-5))
    ppo.fit(env, nb_steps=args.nb_steps, verbose=1)

    history = ppo.test(env, nb_episodes=args.nb_test_episodes, visualize=False)
    print(f"Mean return of the greedy policy: {np.mean(history.history['episode_reward']):.1f}")
    env.close()


if __name__ == "__main__":
    main()
