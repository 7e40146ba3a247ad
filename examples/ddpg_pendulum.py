"""DDPG swings up a pendulum: an actor, a critic that takes its action as an input, and noise to explore with.

python examples/ddpg_pendulum.py
python examples/ddpg_pendulum.py --save-weights pendulum.weights.h5  # pendulum_actor.weights.h5 and _critic
"""

import argparse

import gymnasium
import keras
import numpy as np
from keras import layers

from rl.agents import DDPGAgent
from rl.memory import SequentialMemory
from rl.random import OrnsteinUhlenbeckProcess


def main() -> None:
    parser = argparse.ArgumentParser(description="DDPG on Pendulum")
    parser.add_argument("--nb-steps", type=int, default=20_000, help="env steps to train for")
    parser.add_argument("--nb-test-episodes", type=int, default=10)
    parser.add_argument("--seed", type=int, default=123)
    parser.add_argument("--save-weights", metavar="FILE", help="a name that ends in .weights.h5")
    args = parser.parse_args()

    keras.utils.set_random_seed(args.seed)
    env = gymnasium.make("Pendulum-v1")
    nb_actions = env.action_space.shape[0]
    shape = (1, *env.observation_space.shape)  # the leading 1 is the memory's window_length

    # The actor says actions in the environment's units: tanh, times the largest torque.
    actor = keras.Sequential([keras.Input(shape), layers.Flatten()])
    actor.add(layers.Dense(64, activation="relu"))
    actor.add(layers.Dense(64, activation="relu"))
    actor.add(layers.Dense(nb_actions, activation="tanh"))
    actor.add(layers.Rescaling(float(env.action_space.high[0])))

    action_input = keras.Input((nb_actions,), name="action")
    observation_input = keras.Input(shape, name="observation")
    x = layers.Concatenate()([action_input, layers.Flatten()(observation_input)])
    x = layers.Dense(64, activation="relu")(x)
    x = layers.Dense(64, activation="relu")(x)
    critic = keras.Model([action_input, observation_input], layers.Dense(1)(x))

    ddpg = DDPGAgent(
        nb_actions=nb_actions,
        actor=actor,
        critic=critic,
        critic_action_input=action_input,
        memory=SequentialMemory(limit=100_000, window_length=1),
        gamma=0.98,
        batch_size=256,
        nb_steps_warmup_critic=1_000,
        nb_steps_warmup_actor=1_000,
        nb_steps_random=1_000,
        random_process=OrnsteinUhlenbeckProcess(theta=0.15, sigma=0.2, dt=1.0, size=nb_actions),
        target_model_update=0.005,
    )
    ddpg.compile([keras.optimizers.Adam(1e-3), keras.optimizers.Adam(1e-3)])  # the actor's, the critic's
    ddpg.fit(env, nb_steps=args.nb_steps, nb_max_episode_steps=200, seed=args.seed, verbose=1)
    if args.save_weights:
        ddpg.save_weights(args.save_weights, overwrite=True)

    history = ddpg.test(env, nb_episodes=args.nb_test_episodes, visualize=False)
    print(f"Mean return of the greedy policy: {np.mean(history.history['episode_reward']):.1f}")
    env.close()


if __name__ == "__main__":
    main()
