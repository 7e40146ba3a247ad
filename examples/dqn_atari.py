"""DQN on Atari games, with the network and the settings of Mnih et al. (2015), doi:10.1038/nature14236.

    pip install -e '.[atari]'
    python examples/dqn_atari.py --env ALE/Pong-v5
    python examples/dqn_atari.py --env ALE/Breakout-v5 --num-env 8 --mixed-precision   # on a GPU

Gymnasium's AtariPreprocessing makes 84 x 84 grey frames and plays each action for four of them; the agent
stacks the last four (`window_length`). Frames stay uint8, in the memory too, until the network scales them.

Differs from the paper: Adam in place of RMSProp; the target network is copied every 10,000 agent steps, not
every 10,000 updates; the game repeats actions at random, as in Machado et al. (2018), doi:10.1613/jair.5699.
"""

import argparse

import ale_py
import gymnasium
import keras

from rl.agents.dqn import DQNAgent
from rl.common.vec_env import SubprocVecEnv
from rl.memory import SequentialMemory
from rl.policy import EpsGreedyQPolicy, LinearAnnealedPolicy

WINDOW_LENGTH = 4


def make_env(env_id: str, training: bool) -> gymnasium.Env:
    """One game. In training a lost life ends the episode and rewards are clipped to [-1, 1]."""
    gymnasium.register_envs(ale_py)
    env = gymnasium.make(env_id, frameskip=1)  # AtariPreprocessing does the skipping
    env = gymnasium.wrappers.AtariPreprocessing(env, noop_max=30, terminal_on_life_loss=training)
    return gymnasium.wrappers.ClipReward(env, -1.0, 1.0) if training else env


def make_model(nb_actions: int) -> keras.Model:
    """The paper's network. The window axis of the frames becomes the channel axis of the convolutions."""
    return keras.Sequential(
        [
            keras.Input((WINDOW_LENGTH, 84, 84), dtype="uint8"),
            keras.layers.Permute((2, 3, 1)),
            keras.layers.Rescaling(1.0 / 255.0),
            keras.layers.Conv2D(32, 8, strides=4, activation="relu"),
            keras.layers.Conv2D(64, 4, strides=2, activation="relu"),
            keras.layers.Conv2D(64, 3, strides=1, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(512, activation="relu"),
            keras.layers.Dense(nb_actions, dtype="float32"),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="DQN on Atari games")
    parser.add_argument("--env", default="ALE/Pong-v5", metavar="ID")
    parser.add_argument("--nb-steps", type=int, default=1_750_000, help="agent steps, of four frames each")
    parser.add_argument("--nb-steps-warmup", type=int, default=50_000, help="steps before the first update")
    parser.add_argument("--num-env", type=int, default=1, help="games played at once, in worker processes")
    parser.add_argument("--limit", type=int, default=1_000_000, help="frames kept; a million take about 7 GB")
    parser.add_argument("--nb-test-episodes", type=int, default=10)
    parser.add_argument("--nb-max-test-steps", type=int, default=None, help="cut test episodes there")
    parser.add_argument("--mixed-precision", action="store_true", help="compute in float16 (for GPUs)")
    parser.add_argument("--seed", type=int, default=123)
    args = parser.parse_args()

    keras.utils.set_random_seed(args.seed)
    if args.mixed_precision:
        keras.mixed_precision.set_global_policy("mixed_float16")

    env = SubprocVecEnv([lambda: make_env(args.env, training=True)] * args.num_env)
    nb_actions = int(env.action_space.n)
    dqn = DQNAgent(
        model=make_model(nb_actions),
        nb_actions=nb_actions,
        memory=SequentialMemory(limit=args.limit, window_length=WINDOW_LENGTH),
        policy=LinearAnnealedPolicy(
            EpsGreedyQPolicy(), attr="eps", value_max=1.0, value_min=0.1, value_test=0.05, nb_steps=1_000_000
        ),
        nb_steps_warmup=args.nb_steps_warmup,
        train_interval=4,
        target_model_update=10_000,
        delta_clip=1.0,
    )
    dqn.compile(keras.optimizers.Adam(2.5e-4), metrics=["mae"])
    dqn.fit(env, nb_steps=args.nb_steps, seed=args.seed, verbose=1)
    env.close()

    test_env = make_env(args.env, training=False)
    dqn.test(
        test_env,
        nb_episodes=args.nb_test_episodes,
        nb_max_episode_steps=args.nb_max_test_steps,
        visualize=False,
    )
    test_env.close()


if __name__ == "__main__":
    main()
