"""DQN on one CartPole: the smallest complete script.

Train, then test, in a window if you like (that needs the extra `classic-control`):

    python examples/dqn_cartpole.py
    python examples/dqn_cartpole.py --render
    python examples/dqn_cartpole.py --save-weights cartpole.weights.h5
"""

import argparse

import gymnasium
import keras

from rl.agents import DQNAgent
from rl.memory import SequentialMemory
from rl.policy import BoltzmannQPolicy


def main() -> None:
    parser = argparse.ArgumentParser(description="DQN on one CartPole")
    parser.add_argument("--nb-steps", type=int, default=50_000, help="env steps to train for")
    parser.add_argument("--nb-test-episodes", type=int, default=5)
    parser.add_argument("--seed", type=int, default=123)
    parser.add_argument("--render", action="store_true", help="show a window while testing")
    parser.add_argument("--save-weights", metavar="FILE", help="a name that ends in .weights.h5")
    args = parser.parse_args()

    keras.utils.set_random_seed(args.seed)
    env = gymnasium.make("CartPole-v1")
    nb_actions = int(env.action_space.n)  # Gymnasium counts in NumPy's integers, which Keras layers refuse
    model = keras.Sequential(
        [
            keras.Input((1, *env.observation_space.shape)),  # the leading 1 is the memory's window_length
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(nb_actions),
        ]
    )
    dqn = DQNAgent(
        model=model,
        nb_actions=nb_actions,
        memory=SequentialMemory(limit=50_000, window_length=1),
        policy=BoltzmannQPolicy(),
        nb_steps_warmup=1_000,
        target_model_update=1e-2,
    )
    dqn.compile(keras.optimizers.Adam(1e-3), metrics=["mae"])
    dqn.fit(env, nb_steps=args.nb_steps, seed=args.seed, verbose=2)
    env.close()

    if args.save_weights:
        dqn.save_weights(args.save_weights, overwrite=True)
    # An env of render mode "human" shows itself at every step: nothing is left for `visualize` to do.
    env = gymnasium.make("CartPole-v1", render_mode="human" if args.render else None)
    dqn.test(env, nb_episodes=args.nb_test_episodes, visualize=False)
    env.close()


if __name__ == "__main__":
    main()
