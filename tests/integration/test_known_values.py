"""Q-learning against fixed points that are known exactly, on one env and on lanes."""

import gymnasium as gym
import keras
import numpy as np
import pytest

from rl.agents.dqn import DQNAgent
from rl.common.vec_env import DummyVecEnv
from rl.memory import SequentialMemory
from rl.policy import EpsGreedyQPolicy
from tests.toy_envs import ConstantReward, TwoStateMDP


def linear(nb_inputs, nb_actions=2, bias=False):
    return keras.Sequential(
        [
            keras.layers.Input((1, nb_inputs)),
            keras.layers.Flatten(),
            keras.layers.Dense(nb_actions, use_bias=bias, kernel_initializer="zeros"),
        ]
    )


def agent_on(model, nb_actions=2, optimizer=None, **options):
    options = {"nb_steps_warmup": 50, "target_model_update": 0.1, "policy": EpsGreedyQPolicy(1.0)} | options
    agent = DQNAgent(model, nb_actions=nb_actions, memory=SequentialMemory(20_000, window_length=1), **options)
    agent.compile(optimizer or keras.optimizers.Adam(0.02), jit_compile=False, steps_per_execution=16)
    return agent


@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize(
    "options",
    [{}, {"enable_double_dqn": True}, {"target_model_update": 40}],
    ids=["soft", "double", "hard"],
)
def test_two_state_mdp(options, lanes):
    def make():
        return gym.wrappers.TimeLimit(TwoStateMDP(), 20)

    env = make() if lanes == 1 else DummyVecEnv([make] * lanes)
    agent = agent_on(linear(2), gamma=TwoStateMDP.GAMMA, **options)
    agent.fit(env, nb_steps=3000, verbose=0, seed=3)
    np.testing.assert_allclose(agent.compute_batch_q_values(np.eye(2)[:, None]), TwoStateMDP.Q_STAR, atol=0.02)


@pytest.mark.parametrize("kind", ["avg", "max", "naive"])
def test_two_state_mdp_with_a_dueling_head(kind):
    model = keras.Sequential(
        [
            keras.layers.Input((1, 2)),
            keras.layers.Flatten(),
            keras.layers.Dense(16, activation="relu"),
            keras.layers.Dense(2),
        ]
    )
    agent = agent_on(model, gamma=TwoStateMDP.GAMMA, enable_dueling_network=True, dueling_type=kind)
    agent.compile(keras.optimizers.Adam(0.01), jit_compile=False, steps_per_execution=16)
    agent.fit(gym.wrappers.TimeLimit(TwoStateMDP(), 20), nb_steps=4000, verbose=0, seed=3)
    np.testing.assert_allclose(agent.compute_batch_q_values(np.eye(2)[:, None]), TwoStateMDP.Q_STAR, atol=0.02)


def optimal_q(env, gamma):
    """Value iteration on Gymnasium's own transition table."""
    table = env.unwrapped.P
    q = np.zeros((len(table), len(table[0])))
    for _ in range(1000):
        for s, actions in table.items():
            for a, outcomes in actions.items():
                q[s, a] = sum(p * (r + gamma * (not end) * q[s1].max()) for p, s1, r, end in outcomes)
    return q


@pytest.mark.parametrize("lanes", [1, 4])
def test_frozen_lake_without_slipping(lanes):
    def make():
        return gym.make("FrozenLake-v1", is_slippery=False)

    env = make() if lanes == 1 else DummyVecEnv([make] * lanes)
    model = keras.Sequential(
        [
            keras.layers.Input((1,), dtype="int32"),
            keras.layers.Embedding(16, 4, embeddings_initializer="zeros"),
            keras.layers.Flatten(),
        ]
    )
    agent = agent_on(model, nb_actions=4, optimizer=keras.optimizers.SGD(8.0), gamma=0.99, batch_size=128)
    agent.fit(env, nb_steps=12_000, verbose=0, seed=1)
    expected = optimal_q(make(), 0.99)
    assert expected[0].max() == pytest.approx(0.95099, abs=1e-5)
    states, actions = agent.memory.observations, agent.memory.actions
    visited = {(int(states[i]), int(actions[i])) for i in range(agent.memory.nb_entries)}
    assert len(visited) >= 40
    learnt = agent.compute_batch_q_values(np.arange(16)[:, None])
    worst = max(abs(learnt[s, a] - expected[s, a]) for s, a in visited)
    assert worst < 0.02


def lanes_of_gymnasium(mode):
    return gym.vector.SyncVectorEnv([lambda: ConstantReward(5)] * 3, autoreset_mode=mode)


def lanes_of_ours(mode):
    return DummyVecEnv([lambda: ConstantReward(5)] * 3, autoreset_mode=mode)


@pytest.mark.parametrize(
    ("make", "limit"),
    [(lambda: ConstantReward(5), None), (lambda: ConstantReward(None), 5)]
    + [
        (lambda make=make, mode=mode: make(mode), None)
        for make in (lanes_of_gymnasium, lanes_of_ours)
        for mode in gym.vector.AutoresetMode
    ],
    ids=["single", "nb_max_episode_steps"]
    + [f"{kind}-{mode.value}" for kind in ("gymnasium", "ours") for mode in gym.vector.AutoresetMode],
)
def test_a_time_limit_is_not_a_terminal_state(make, limit):
    agent = agent_on(linear(1), optimizer=keras.optimizers.SGD(0.9), gamma=0.99, target_model_update=0.9)
    agent.fit(make(), nb_steps=2600, verbose=0, nb_max_episode_steps=limit, seed=0)
    np.testing.assert_allclose(agent.compute_q_values([np.ones(1)]), [100, 100], atol=1.0)
