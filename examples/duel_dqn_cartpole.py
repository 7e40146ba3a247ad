"""A dueling network with Double DQN on one CartPole, and a log of all episodes to draw afterwards.

The last layer of the network is replaced by a dueling head: one value of the state and one advantage per action.

    python examples/duel_dqn_cartpole.py --log duel.json
    python examples/visualize_log.py duel.json --output duel.png
"""

import argparse

import gymnasium
import keras

from rl.agents import DQNAgent
from rl.callbacks import FileLogger
from rl.memory import SequentialMemory
from rl.policy import BoltzmannQPolicy


def main() -> None:
    parser = argparse.ArgumentParser(description="A dueling network with Double DQN on one CartPole")
    parser.add_argument("--nb-steps", type=int, default=50_000, help="env steps to train for")
    parser.add_argument("--nb-test-episodes", type=int, default=5)
    parser.add_argument("--dueling-type", choices=["avg", "max", "naive"], default="avg")
    parser.add_argument("--log", metavar="FILE", help="write all episodes' rewards and metrics there, as JSON")
    parser.add_argument("--seed", type=int, default=123)
    args = parser.parse_args()

    keras.utils.set_random_seed(args.seed)
    env = gymnasium.make("CartPole-v1")
    nb_actions = int(env.action_space.n)
    model = keras.Sequential(
        [
            keras.Input((1, *env.observation_space.shape)),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(nb_actions),  # what the dueling head replaces
        ]
    )
    dqn = DQNAgent(
        model=model,
        nb_actions=nb_actions,
        memory=SequentialMemory(limit=50_000, window_length=1),
        policy=BoltzmannQPolicy(),
        enable_double_dqn=True,
        enable_dueling_network=True,
        dueling_type=args.dueling_type,
        nb_steps_warmup=1_000,
        target_model_update=1e-2,
    )
    dqn.compile(keras.optimizers.Adam(1e-3), metrics=["mae"])
    callbacks = [FileLogger(args.log, interval=100)] if args.log else []
    dqn.fit(env, nb_steps=args.nb_steps, callbacks=callbacks, seed=args.seed, verbose=2)
    dqn.test(env, nb_episodes=args.nb_test_episodes, visualize=False)
    env.close()


if __name__ == "__main__":
    main()
