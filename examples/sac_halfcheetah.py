"""SAC learns to run in MuJoCo (extra `mujoco`), with the hyper-parameters of the paper.

    python examples/sac_halfcheetah.py
    python examples/sac_halfcheetah.py --env Walker2d-v5 --nb-steps 300000

With `--num-env 8` eight environments step in worker processes, for the same number of gradient steps.
"""

import argparse

import keras
import numpy as np

from rl.agents import SACAgent
from rl.common.cmd_util import make_gym_env
from rl.memory import SequentialMemory
from rl.networks import stochastic_actor_critic


def main() -> None:
    parser = argparse.ArgumentParser(description="SAC on a MuJoCo environment")
    parser.add_argument("--env", default="HalfCheetah-v5")
    parser.add_argument("--nb-steps", type=int, default=1_000_000, help="env steps, summed over the envs")
    parser.add_argument("--nb-steps-warmup", type=int, default=10_000, help="uniform actions, before any learning")
    parser.add_argument("--num-env", type=int, default=1, help="environments that step together")
    parser.add_argument("--nb-test-episodes", type=int, default=5)
    parser.add_argument("--nb-max-test-steps", type=int, default=1_000, help="steps of a test episode")
    parser.add_argument("--seed", type=int, default=123)
    args = parser.parse_args()

    keras.utils.set_random_seed(args.seed)
    env = make_gym_env(args.env, num_env=args.num_env, seed=args.seed)

    sac = SACAgent(
        env.action_space.shape[0],
        *stochastic_actor_critic(env),
        SequentialMemory(limit=1_000_000),
        nb_steps_warmup=args.nb_steps_warmup,
    )
    sac.compile(keras.optimizers.Adam(3e-4))  # two more like it, for critics and temperature
    sac.fit(env, nb_steps=args.nb_steps, verbose=1)

    history = sac.test(
        env,
        nb_episodes=args.nb_test_episodes,
        nb_max_episode_steps=args.nb_max_test_steps,
        visualize=False,
    )
    print(f"Mean return of the greedy policy: {np.mean(history.history['episode_reward']):.1f}")
    env.close()


if __name__ == "__main__":
    main()
