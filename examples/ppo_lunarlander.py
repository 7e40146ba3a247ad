"""PPO on LunarLander, with discrete or continuous actions: the same script.

    pip install -e '.[box2d]'
    python examples/ppo_lunarlander.py
    python examples/ppo_lunarlander.py --continuous

The hyper-parameters are those of rl-baselines3-zoo.
"""

import argparse

import keras
import numpy as np

from rl.agents import PPOAgent
from rl.common.cmd_util import make_gym_env
from rl.networks import actor_critic


def main() -> None:
    parser = argparse.ArgumentParser(description="PPO on LunarLander")
    parser.add_argument("--nb-steps", type=int, default=1_000_000, help="env steps, summed over the envs")
    parser.add_argument("--num-env", type=int, default=16, help="environments that step together")
    parser.add_argument("--nb-rollout-steps", type=int, default=1024, help="steps of each of them per rollout")
    parser.add_argument("--continuous", action="store_true", help="the engines have throttles, not switches")
    parser.add_argument("--nb-test-episodes", type=int, default=10)
    parser.add_argument("--seed", type=int, default=123)
    args = parser.parse_args()

    keras.utils.set_random_seed(args.seed)
    # "auto" measures whether worker processes are worth their messages here.
    env = make_gym_env(
        "LunarLander-v3",
        num_env=args.num_env,
        seed=args.seed,
        env_kwargs={"continuous": args.continuous},
        workers="auto",
    )
    ppo = PPOAgent(
        *actor_critic(env),
        env.action_space,
        nb_rollout_steps=args.nb_rollout_steps,
        nb_epochs=4,
        batch_size=64,
        gamma=0.999,
        lam=0.98,
        entropy_weight=0.01,
    )
    ppo.compile(keras.optimizers.Adam(3e-4, epsilon=1e-5))
    ppo.fit(env, nb_steps=args.nb_steps, log_interval=50_000, verbose=1)

    history = ppo.test(env, nb_episodes=args.nb_test_episodes, visualize=False)
    print(f"Mean return of the greedy policy: {np.mean(history.history['episode_reward']):.1f}")
    env.close()


if __name__ == "__main__":
    main()
