"""DQN on several CartPoles at once, in worker processes.

The same script serves one environment or many; `nb_steps` counts the steps of all of them together.

    python examples/dqn_cartpole_vec.py
    python examples/dqn_cartpole_vec.py --num-env 16 --nb-steps 200000
"""

import argparse

import keras

from rl.agents.dqn import DQNAgent
from rl.common.cmd_util import make_gym_env
from rl.memory import SequentialMemory
from rl.policy import EpsGreedyQPolicy


def main() -> None:
    parser = argparse.ArgumentParser(description="DQN on several CartPoles at once")
    parser.add_argument("--nb-steps", type=int, default=100_000, help="env steps, summed over the envs")
    parser.add_argument("--num-env", type=int, default=8, help="environments that step together")
    parser.add_argument("--nb-test-episodes", type=int, default=10)
    parser.add_argument("--seed", type=int, default=123)
    args = parser.parse_args()

    keras.utils.set_random_seed(args.seed)
    env = make_gym_env("CartPole-v0", num_env=args.num_env, seed=args.seed)
    model = keras.Sequential(
        [
            keras.Input((1, *env.observation_space.shape)),  # the spaces are those of one env
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(env.action_space.n),
        ]
    )
    dqn = DQNAgent(
        model=model,
        nb_actions=env.action_space.n,
        memory=SequentialMemory(limit=100_000, window_length=1),
        nb_steps_warmup=10,
        target_model_update=1e-2,
        policy=EpsGreedyQPolicy(),
    )
    dqn.compile(optimizer="adam", metrics=["mae"])
    dqn.fit(env, nb_steps=args.nb_steps, visualize=False, verbose=2)
    dqn.test(env, nb_episodes=args.nb_test_episodes, visualize=False)
    env.close()


if __name__ == "__main__":
    main()
