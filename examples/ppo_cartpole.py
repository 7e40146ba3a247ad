"""PPO on CartPole: the smallest on-policy script, with a learning rate and a clip range that fall to 0.

    python examples/ppo_cartpole.py
    python examples/ppo_cartpole.py --num-env 16 --nb-steps 200000

The hyper-parameters are those of rl-baselines3-zoo.
"""

import argparse
import math

import keras
import numpy as np

from rl.agents import PPOAgent
from rl.common.cmd_util import make_gym_env
from rl.common.vec_env import DummyVecEnv
from rl.networks import actor_critic
from rl.util import LinearSchedule

NB_ROLLOUT_STEPS, NB_EPOCHS, BATCH_SIZE = 32, 20, 256


def main() -> None:
    parser = argparse.ArgumentParser(description="PPO on CartPole")
    parser.add_argument("--nb-steps", type=int, default=100_000, help="env steps, summed over the envs")
    parser.add_argument("--num-env", type=int, default=8, help="environments that step together")
    parser.add_argument("--nb-test-episodes", type=int, default=10)
    parser.add_argument("--seed", type=int, default=123)
    args = parser.parse_args()

    keras.utils.set_random_seed(args.seed)
    # In this process: a step of CartPole costs less than asking another process for it.
    env = make_gym_env("CartPole-v1", num_env=args.num_env, seed=args.seed, vec_env_cls=DummyVecEnv)
    ppo = PPOAgent(
        *actor_critic(env),
        env.action_space,
        nb_rollout_steps=NB_ROLLOUT_STEPS,
        nb_epochs=NB_EPOCHS,
        batch_size=BATCH_SIZE,
        gamma=0.98,
        lam=0.8,
        clip_range=LinearSchedule(0.2),
        nb_total_steps=args.nb_steps,
    )
    # A Keras schedule counts gradient steps: so many per rollout, and only complete rollouts are learnt from.
    rows = NB_ROLLOUT_STEPS * args.num_env
    nb_updates = args.nb_steps // rows * NB_EPOCHS * math.ceil(rows / BATCH_SIZE)
    learning_rate = keras.optimizers.schedules.PolynomialDecay(1e-3, max(1, nb_updates), end_learning_rate=0.0)
    ppo.compile(keras.optimizers.Adam(learning_rate, epsilon=1e-5))
    ppo.fit(env, nb_steps=args.nb_steps, verbose=1)

    history = ppo.test(env, nb_episodes=args.nb_test_episodes, visualize=False)
    print(f"Mean return of the greedy policy: {np.mean(history.history['episode_reward']):.1f}")
    env.close()


if __name__ == "__main__":
    main()
