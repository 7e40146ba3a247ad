"""SAC swings up a pendulum: a stochastic actor, twin critics and a temperature that it learns.

The networks are made for the environment; the twin of the critic is made from it.

    python examples/sac_pendulum.py
    python examples/sac_pendulum.py --num-env 4
"""

import argparse

import keras
import numpy as np

from rl.agents import SACAgent
from rl.common.cmd_util import make_gym_env
from rl.common.vec_env import DummyVecEnv
from rl.memory import SequentialMemory
from rl.networks import stochastic_actor_critic


def main() -> None:
    parser = argparse.ArgumentParser(description="SAC on Pendulum")
    parser.add_argument("--nb-steps", type=int, default=20_000, help="env steps, summed over the envs")
    parser.add_argument("--num-env", type=int, default=1, help="environments that step together")
    parser.add_argument("--nb-test-episodes", type=int, default=10)
    parser.add_argument("--seed", type=int, default=123)
    args = parser.parse_args()

    keras.utils.set_random_seed(args.seed)
    # In this process: a step of Pendulum costs less than asking another process for it.
    env = make_gym_env("Pendulum-v1", num_env=args.num_env, seed=args.seed, vec_env_cls=DummyVecEnv)
    nb_actions = env.action_space.shape[0]

    sac = SACAgent(nb_actions, *stochastic_actor_critic(env, hidden=(64, 64)), SequentialMemory(limit=100_000))
    sac.compile(keras.optimizers.Adam(1e-3))
    sac.fit(env, nb_steps=args.nb_steps, verbose=1)

    history = sac.test(env, nb_episodes=args.nb_test_episodes, visualize=False)
    print(f"Mean return of the greedy policy: {np.mean(history.history['episode_reward']):.1f}")
    env.close()


if __name__ == "__main__":
    main()
