"""NAF swings up a pendulum: Q-learning with a Q that is quadratic in the action, made of three networks.

python examples/naf_pendulum.py
python examples/naf_pendulum.py --save-weights pendulum.weights.h5
"""

import argparse

import gymnasium
import keras
import numpy as np
from keras import layers

from rl.agents import NAFAgent
from rl.core import Processor
from rl.memory import SequentialMemory
from rl.networks import mlp
from rl.random import OrnsteinUhlenbeckProcess


class PendulumProcessor(Processor):
    """Learns from a tenth of the reward, which lies between -16 and 0, so that the values are of moderate size."""

    def process_reward(self, reward: float) -> float:
        return reward / 10


def main() -> None:
    parser = argparse.ArgumentParser(description="NAF on Pendulum")
    parser.add_argument("--nb-steps", type=int, default=40_000, help="env steps to train for")
    parser.add_argument("--nb-test-episodes", type=int, default=10)
    parser.add_argument("--seed", type=int, default=123)
    parser.add_argument("--save-weights", metavar="FILE", help="a name that ends in .weights.h5")
    args = parser.parse_args()

    keras.utils.set_random_seed(args.seed)
    env = gymnasium.make("Pendulum-v1")
    nb_actions = env.action_space.shape[0]
    shape = (1, *env.observation_space.shape)  # the leading 1 is the memory's window_length

    # The value; the entries of the triangular L; and mu, whose bound is the largest torque: V is the value of mu, which
    # should be an action that the environment takes.
    V_model = mlp(shape, 1, activation="relu")
    L_model = mlp(shape, nb_actions * (nb_actions + 1) // 2, activation="relu", output_gain=0.01)
    mu_model = keras.Sequential([mlp(shape, nb_actions, activation="relu", output_gain=0.01)])
    mu_model.add(layers.Activation("tanh"))
    mu_model.add(layers.Rescaling(float(env.action_space.high[0])))

    naf = NAFAgent(
        nb_actions=nb_actions,
        V_model=V_model,
        L_model=L_model,
        mu_model=mu_model,
        memory=SequentialMemory(limit=100_000, window_length=1),
        random_process=OrnsteinUhlenbeckProcess(theta=0.15, sigma=0.4, dt=1.0, size=nb_actions),
        batch_size=64,
        nb_steps_warmup=1_000,
        target_model_update=0.005,
        processor=PendulumProcessor(),
    )
    naf.compile(keras.optimizers.Adam(1e-3), metrics=["mae"])
    naf.fit(env, nb_steps=args.nb_steps, nb_max_episode_steps=200, seed=args.seed, verbose=1)
    if args.save_weights:
        naf.save_weights(args.save_weights, overwrite=True)

    naf.processor = None  # the test shows the environment's own rewards
    history = naf.test(env, nb_episodes=args.nb_test_episodes, visualize=False)
    print(f"Mean return of the greedy policy: {np.mean(history.history['episode_reward']):.1f}")
    env.close()


if __name__ == "__main__":
    main()
