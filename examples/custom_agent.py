"""An agent of one's own: soft Q-learning on CartPole, on eight environments at once.

    python examples/custom_agent.py
    python examples/custom_agent.py --num-env 1 --alpha 0.2

The class is the one that docs/writing_an_agent.md explains line by line.
"""

import argparse

import keras
import numpy as np
from keras import ops

from rl.agents.base import ReplayAgent
from rl.common.cmd_util import make_gym_env
from rl.common.vec_env import DummyVecEnv
from rl.memory import SequentialMemory
from rl.networks import check_output, feed, mlp
from rl.ops import huber, take
from rl.policy import BoltzmannQPolicy, GreedyQPolicy
from rl.util import clone_model


@keras.saving.register_keras_serializable(package="mine")
class SoftQAgent(ReplayAgent):
    logged = ("mean_v",)

    def __init__(self, model, alpha=1.0, **kwargs):
        check_output(model, kwargs.get("nb_actions"), "SoftQAgent")
        super().__init__(**kwargs)
        self.alpha = float(alpha)
        self.model = model
        self.target_model = clone_model(model, self.custom_model_objects)
        self.target_model.trainable = False
        self.policy = BoltzmannQPolicy(tau=alpha)
        self.test_policy = GreedyQPolicy()

    def call(self, states, training=False):
        return ops.cast(self.model(feed(self.model, states), training=training), "float32")

    def loss_fn(self, batch):
        q1 = ops.cast(self.target_model(feed(self.target_model, batch.state1)), "float32")
        v1 = self.alpha * ops.logsumexp(q1 / self.alpha, axis=-1)
        target = ops.stop_gradient(batch.reward + batch.discount * (1.0 - batch.terminal1) * v1)
        prediction = take(self.call(batch.state0, training=True), batch.action)
        loss = ops.mean(batch.weight * huber(target - prediction, self.delta_clip))
        return loss, target, prediction, {"mean_v": ops.mean(v1)}

    def targets(self):
        return [(self.target_model, self.model)]

    def explore(self, outputs):
        return (self.policy if self.training else self.test_policy).select_actions(outputs)


def main() -> None:
    parser = argparse.ArgumentParser(description="Soft Q-learning on CartPole")
    parser.add_argument("--nb-steps", type=int, default=50_000, help="env steps, summed over the envs")
    parser.add_argument("--num-env", type=int, default=8, help="environments that step together")
    parser.add_argument("--alpha", type=float, default=0.5, help="temperature: how much entropy is worth")
    parser.add_argument("--nb-test-episodes", type=int, default=10)
    parser.add_argument("--seed", type=int, default=123)
    args = parser.parse_args()

    keras.utils.set_random_seed(args.seed)
    # In this process: a step of CartPole costs less than asking another process for it.
    env = make_gym_env("CartPole-v1", num_env=args.num_env, seed=args.seed, vec_env_cls=DummyVecEnv)
    agent = SoftQAgent(
        mlp(env.observation_space.shape, env.action_space.n, hidden=(64, 64)),
        alpha=args.alpha,
        nb_actions=env.action_space.n,
        memory=SequentialMemory(limit=50_000),
        nb_steps_warmup=200,
        target_model_update=0.01,
        delta_clip=1.0,
    )
    agent.compile(keras.optimizers.Adam(1e-3), metrics=["mae"])
    agent.fit(env, nb_steps=args.nb_steps, verbose=1)

    history = agent.test(env, nb_episodes=args.nb_test_episodes, visualize=False)
    print(f"Mean return of the greedy policy: {np.mean(history.history['episode_reward']):.1f}")
    env.close()


if __name__ == "__main__":
    main()
