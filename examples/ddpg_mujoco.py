"""DDPG learns to run in MuJoCo (extra `mujoco`): actions in [-1, 1], mapped to the bounds of any environment.

    python examples/ddpg_mujoco.py
    python examples/ddpg_mujoco.py --env Walker2d-v5 --nb-steps 100000

With `--num-env 8` eight environments step in worker processes, for the same number of gradient steps.
"""

import argparse

import keras
import numpy as np
from keras import layers

from rl.agents import DDPGAgent
from rl.common.cmd_util import make_gym_env
from rl.memory import SequentialMemory
from rl.random import GaussianWhiteNoiseProcess


def main() -> None:
    parser = argparse.ArgumentParser(description="DDPG on a MuJoCo environment")
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
    nb_actions = env.action_space.shape[0]
    shape = (1, *env.observation_space.shape)

    actor = keras.Sequential([keras.Input(shape), layers.Flatten()])
    actor.add(layers.Dense(256, activation="relu"))
    actor.add(layers.Dense(256, activation="relu"))
    actor.add(layers.Dense(nb_actions, activation="tanh"))

    action_input, observation_input = keras.Input((nb_actions,)), keras.Input(shape)
    x = layers.Concatenate()([action_input, layers.Flatten()(observation_input)])
    x = layers.Dense(256, activation="relu")(x)
    x = layers.Dense(256, activation="relu")(x)
    critic = keras.Model([action_input, observation_input], layers.Dense(1)(x))

    ddpg = DDPGAgent(
        nb_actions,
        actor,
        critic,
        action_input,
        SequentialMemory(limit=1_000_000),
        batch_size=256,
        nb_steps_warmup_critic=args.nb_steps_warmup,
        nb_steps_warmup_actor=args.nb_steps_warmup,
        nb_steps_random=args.nb_steps_warmup,
        random_process=GaussianWhiteNoiseProcess(sigma=0.1, size=nb_actions),
        target_model_update=0.005,
        scale_actions=True,
    )
    ddpg.compile(keras.optimizers.Adam(3e-4))  # one like it for the critic
    ddpg.fit(env, nb_steps=args.nb_steps, verbose=1)

    history = ddpg.test(
        env,
        nb_episodes=args.nb_test_episodes,
        nb_max_episode_steps=args.nb_max_test_steps,
        visualize=False,
    )
    print(f"Mean return of the greedy policy: {np.mean(history.history['episode_reward']):.1f}")
    env.close()


if __name__ == "__main__":
    main()
