"""Tests the usual rules for more lanes: as many env steps, fewer and larger gradient steps, a larger learning rate.

python tests/benchmarks/scaling.py                 # all, three seeds
python tests/benchmarks/scaling.py --works ppo --seeds 1

CartPole-v1, 64-64. Per recipe: env steps per second of the whole training, and the mean return of the greedy policy
over 100 fresh episodes after it. `lr` multiplies the learning rate (1e-3 for DQN, 3e-4 for PPO). DQN is the README's.
"""

import argparse
import statistics
import time

import keras

from rl import backend
from rl.agents import DQNAgent, PPOAgent
from rl.common.cmd_util import make_gym_env
from rl.common.vec_env import DummyVecEnv
from rl.memory import SequentialMemory
from rl.networks import actor_critic, mlp

DQN = {  # name: lanes, batch size, env steps per gradient step, factor of the learning rate
    "1 lane": (1, 32, 1, 1.0),
    "8 lanes, the same updates": (8, 32, 1, 1.0),
    "8 lanes, 1/8 of the updates": (8, 32, 8, 1.0),
    "8 lanes, 1/8 of the updates, batch x8": (8, 256, 8, 1.0),
    "8 lanes, 1/8 of the updates, batch x8, lr x sqrt 8": (8, 256, 8, 8**0.5),
    "8 lanes, 1/8 of the updates, batch x8, lr x8": (8, 256, 8, 8.0),
}
PPO = {  # name: lanes, steps of each per rollout, batch size, factor of the learning rate
    "8 lanes": (8, 128, 256, 1.0),
    "64 lanes, rollouts as large": (64, 16, 256, 1.0),
    "64 lanes, rollouts x8": (64, 128, 256, 1.0),
    "64 lanes, rollouts x8, batch x8": (64, 128, 2048, 1.0),
    "64 lanes, rollouts x8, batch x8, lr x sqrt 8": (64, 128, 2048, 8**0.5),
    "64 lanes, rollouts x8, batch x8, lr x8": (64, 128, 2048, 8.0),
}


def dqn(env, nb_steps, batch_size, train_interval, factor):
    agent = DQNAgent(
        mlp((1, *env.observation_space.shape), 2, activation="relu"),
        nb_actions=2,
        memory=SequentialMemory(50_000),
        batch_size=batch_size,
        train_interval=train_interval,
        nb_steps_warmup=100,
        target_model_update=0.01 * train_interval,  # it counts gradient steps: as fast in env steps
    )
    agent.compile(keras.optimizers.Adam(1e-3 * factor))
    return agent


def ppo(env, nb_steps, nb_rollout_steps, batch_size, factor):
    agent = PPOAgent(
        *actor_critic(env), env.action_space, nb_rollout_steps=nb_rollout_steps, nb_epochs=4, batch_size=batch_size
    )
    agent.compile(keras.optimizers.Adam(3e-4 * factor, epsilon=1e-5))
    return agent


def measure(make, lanes, recipe, nb_steps, seed):
    keras.utils.set_random_seed(seed)
    with make_gym_env("CartPole-v1", num_env=lanes, seed=1000 * seed, vec_env_cls=DummyVecEnv) as env:
        agent = make(env, nb_steps, *recipe)
        agent.fit(env, nb_steps=1, verbose=0)  # compiles what acts
        start = time.perf_counter()
        agent.fit(env, nb_steps=nb_steps, seed=seed, verbose=0)
        rate = nb_steps / (time.perf_counter() - start)
    with make_gym_env("CartPole-v1", num_env=8, seed=1000 * seed + 500) as env:
        returns = agent.test(env, nb_episodes=100, visualize=False, verbose=0).history["episode_reward"]
    return rate, statistics.mean(returns)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--works", default="dqn,ppo")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--nb-steps", type=int, default=None, help="default: 60,000 for DQN, 200,000 for PPO")
    args = parser.parse_args()
    backend.set_threads(1)
    for work, make, recipes, nb_steps in (("dqn", dqn, DQN, 60_000), ("ppo", ppo, PPO, 200_000)):
        if work not in args.works.split(","):
            continue
        print(f"{work}, {args.nb_steps or nb_steps:,} env steps, seeds 1 to {args.seeds}", flush=True)
        for name, (lanes, *recipe) in recipes.items():
            runs = [measure(make, lanes, recipe, args.nb_steps or nb_steps, 1 + i) for i in range(args.seeds)]
            rates, scores = zip(*runs, strict=True)
            each = " ".join(f"{score:.0f}" for score in scores)
            print(f"| {name} | {statistics.median(rates):,.0f} | {each} |", flush=True)


if __name__ == "__main__":
    main()
