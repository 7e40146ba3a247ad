"""PPO on Atari games: one convolutional network for policy and value, both from the last four frames.

    pip install -e '.[atari]'
    python examples/ppo_atari.py --env ALE/Pong-v5
    python examples/ppo_atari.py --env ALE/Breakout-v5 --mixed-precision   # on a GPU

Gymnasium's AtariPreprocessing makes 84 x 84 grey frames and plays each action for four of them; frames stay uint8
until the network scales them. The hyper-parameters are those of rl-baselines3-zoo, which are close to those of Schulman
et al. (2017), arXiv:1707.06347.

Differs from both: the game repeats actions at random, as in Machado et al. (2018), doi:10.1613/jair.5699, and FIRE is
not pressed for the agent at the start of an episode. In games that wait for it, give --nb-max-test-steps.
"""

import argparse
import math

import keras
import numpy as np

from rl.agents import PPOAgent
from rl.common.cmd_util import make_gym_env
from rl.networks import actor_critic
from rl.util import LinearSchedule

NB_EPOCHS, BATCH_SIZE = 4, 256


def main() -> None:
    parser = argparse.ArgumentParser(description="PPO on Atari games")
    parser.add_argument("--env", default="ALE/Pong-v5", metavar="ID")
    parser.add_argument("--nb-steps", type=int, default=10_000_000, help="agent steps, of four frames each")
    parser.add_argument("--num-env", type=int, default=8, help="games played at once, in worker processes")
    parser.add_argument("--nb-rollout-steps", type=int, default=128, help="steps of each of them per rollout")
    parser.add_argument("--nb-test-episodes", type=int, default=10)
    parser.add_argument("--nb-max-test-steps", type=int, default=None, help="cut test episodes there")
    parser.add_argument("--mixed-precision", action="store_true", help="compute in float16 (for GPUs)")
    parser.add_argument("--seed", type=int, default=123)
    args = parser.parse_args()

    keras.utils.set_random_seed(args.seed)
    if args.mixed_precision:
        keras.mixed_precision.set_global_policy("mixed_float16")

    # In training a lost life ends the episode and rewards are clipped to [-1, 1].
    training = {"atari": {"noop_max": 30, "terminal_on_life_loss": True}, "clip_reward": (-1, 1), "frame_stack": 4}
    env = make_gym_env(args.env, num_env=args.num_env, seed=args.seed, wrapper_kwargs=training)
    ppo = PPOAgent(
        *actor_critic(env),
        env.action_space,
        nb_rollout_steps=args.nb_rollout_steps,
        nb_epochs=NB_EPOCHS,
        batch_size=BATCH_SIZE,
        clip_range=LinearSchedule(0.1),
        entropy_weight=0.01,
        nb_total_steps=args.nb_steps,
    )
    # A Keras schedule counts gradient steps: so many per rollout, and only complete rollouts are learnt from.
    rows = args.nb_rollout_steps * args.num_env
    nb_updates = args.nb_steps // rows * NB_EPOCHS * math.ceil(rows / BATCH_SIZE)
    learning_rate = keras.optimizers.schedules.PolynomialDecay(2.5e-4, max(1, nb_updates), end_learning_rate=0.0)
    ppo.compile(keras.optimizers.Adam(learning_rate, epsilon=1e-5))
    ppo.fit(env, nb_steps=args.nb_steps, log_interval=100_000, verbose=1)
    env.close()

    testing = {"atari": {"noop_max": 30}, "frame_stack": 4}
    test_env = make_gym_env(args.env, num_env=1, seed=args.seed + args.num_env, wrapper_kwargs=testing)
    history = ppo.test(
        test_env,
        nb_episodes=args.nb_test_episodes,
        nb_max_episode_steps=args.nb_max_test_steps,
        visualize=False,
    )
    print(f"Mean return of the greedy policy: {np.mean(history.history['episode_reward']):.1f}")
    test_env.close()


if __name__ == "__main__":
    main()
