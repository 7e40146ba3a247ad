"""What holds for every agent; a new one joins by a line in `AGENTS`.

It trains on one env and on lanes, in this process and in others; in half precision; where `keras.device` put it; it is
saved and loaded; a test changes nothing; several short fits are one long fit; a seed decides everything.
"""

import functools
import os
import pathlib
import subprocess
import sys

import gymnasium as gym
import keras
import numpy as np
import pytest
from keras import layers

from rl.agents import A2CAgent, CEMAgent, DDPGAgent, DQNAgent, NAFAgent, PPOAgent, SACAgent, SARSAAgent, TD3Agent
from rl.common.vec_env import DummyVecEnv, SubprocVecEnv
from rl.memory import EpisodeParameterMemory, SequentialMemory
from rl.policy import EpsGreedyQPolicy
from rl.random import OrnsteinUhlenbeckProcess
from tests.backends import TWO_CPUS
from tests.toy_envs import Drift

ROOT = pathlib.Path(__file__).parents[2]
DISCRETE, BOX = gym.spaces.Discrete(3), gym.spaces.Box(-1, 1, (2,), np.float32)
QUIET = {"verbose": 0, "visualize": False}


def net(nb_outputs, activation=None):
    """A network of four units."""
    stack = [layers.Input((1, 3)), layers.Flatten(), layers.Dense(4, "tanh"), layers.Dense(nb_outputs, activation)]
    return keras.Sequential(stack)


def replay():
    return {
        "memory": SequentialMemory(200, window_length=1),
        "batch_size": 8,
        "nb_steps_warmup": 10,
        "target_model_update": 0.1,
    }


def noise():
    return OrnsteinUhlenbeckProcess(theta=0.15, sigma=0.2, dt=1.0, size=2)


def dqn():
    return DQNAgent(net(3), nb_actions=3, **replay())


def sarsa():
    return SARSAAgent(net(3), nb_actions=3, policy=EpsGreedyQPolicy(0.3), nb_steps_warmup=0)


def cem():
    options = {"train_interval": 5, "batch_size": 5, "elite_frac": 0.4, "nb_steps_warmup": 0}
    return CEMAgent(net(3), nb_actions=3, memory=EpisodeParameterMemory(20), **options)


def ppo():
    return PPOAgent(net(3), net(1), DISCRETE, nb_rollout_steps=8, batch_size=8, nb_epochs=2)


def a2c():
    return A2CAgent(net(2), net(1), BOX, nb_rollout_steps=7, normalize_observation=True)


def naf():
    return NAFAgent(*[net(n) for n in (1, 3)], net(2, "tanh"), noise(), nb_actions=2, **replay())


def critic_and_action():
    observation, action = layers.Input((1, 3)), layers.Input((2,))
    x = layers.Dense(4, "tanh")(layers.Concatenate()([action, layers.Flatten()(observation)]))
    return keras.Model([action, observation], layers.Dense(1)(x)), action


def ddpg(kind=DDPGAgent):
    options = replay() | {"nb_steps_warmup_critic": 10, "nb_steps_warmup_actor": 10, "random_process": noise()}
    del options["nb_steps_warmup"]
    return kind(2, net(2, "tanh"), *critic_and_action(), **options)


def td3():
    return ddpg(TD3Agent)


def sac():
    return SACAgent(2, net(4), *critic_and_action(), **replay())


AGENTS = {  # name: (what makes it, what it chooses from)
    "dqn": (dqn, DISCRETE),
    "sarsa": (sarsa, DISCRETE),
    "cem": (cem, DISCRETE),
    "ppo": (ppo, DISCRETE),
    "a2c": (a2c, BOX),
    "naf": (naf, BOX),
    "ddpg": (ddpg, BOX),
    "td3": (td3, BOX),
    "sac": (sac, BOX),
}
each = pytest.mark.parametrize("name", AGENTS)


def build(name, seed=0):
    """An agent with the weights of a seed, not compiled."""
    keras.utils.set_random_seed(seed)
    return AGENTS[name][0]()


def make_agent(name, seed=0):
    agent = build(name, seed)
    agent.compile(jit_compile=False)
    return agent


def makers(name, nb_lanes):
    return [functools.partial(Drift, AGENTS[name][1])] * nb_lanes


def make_env(name, nb_lanes=1):
    return makers(name, 1)[0]() if nb_lanes == 1 else DummyVecEnv(makers(name, nb_lanes))


@functools.cache
def trained(name, nb_lanes):
    """An agent after 90 env steps in one fit; not to be changed."""
    agent = make_agent(name)
    agent.fit(make_env(name, nb_lanes), nb_steps=90, seed=1, **QUIET)
    return agent


def counters(agent):
    return {name: getattr(agent.run_state, name) for name in agent.run_state.COUNTERS}


def slots(agent):
    """The variables of all its optimizers."""
    return [v for optimizer in agent.optimizers.values() for v in optimizer.variables]


def everything(agent):
    """What decides how an agent goes on, as lists and numbers."""
    memory = getattr(agent, "memory", None)
    return {
        "counters": counters(agent),
        "weights": [w.tolist() for w in agent.get_weights()],
        "optimizers": [keras.ops.convert_to_numpy(v).tolist() for v in slots(agent)],
        "streams": [stream.get_state() for stream in agent.random_streams()],
        "entries": getattr(memory, "nb_entries", 0),
    }


def assert_same(one, other):
    assert counters(one) == counters(other)
    for a, b in zip(one.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


def greedy(agent, name):
    """The actions of a test, and its returns."""
    env = make_env(name)
    returns = agent.test(env, nb_episodes=3, seed=7, **QUIET).history["episode_reward"]
    return np.array(env.actions), returns


def assert_learnt(agent, name):
    """Every trainable weight has moved from where it began, and is finite."""
    assert agent.run_state.nb_updates > 0
    moved = [
        not np.array_equal(a, b) and np.isfinite(a).all()
        for a, b in zip(agent.get_weights(), build(name).get_weights(), strict=True)
    ]
    assert all(moved), moved


# ---- where it trains -------------------------------------------------------------------------------------------------


@each
@pytest.mark.parametrize("nb_lanes", [1, 3])
def test_it_learns_on_one_env_and_on_lanes(name, nb_lanes):
    agent = trained(name, nb_lanes)
    assert agent.step == 90
    assert_learnt(agent, name)
    actions, returns = greedy(agent, name)
    assert len(returns) == 3 and len(actions) >= 3
    assert all(AGENTS[name][1].contains(a if a.ndim else int(a)) for a in actions)


@pytest.fixture(scope="module")
def workers():
    """Makes lanes in a worker process, once for each action space."""
    envs = {}

    def lanes(name):
        key = str(AGENTS[name][1])
        if key not in envs:
            envs[key] = SubprocVecEnv(makers(name, 3), workers=1)
        return envs[key]

    yield lanes
    for env in envs.values():
        env.close()


@each
def test_lanes_in_another_process_give_the_same_weights(name, workers):
    agent = make_agent(name)
    agent.fit(workers(name), nb_steps=90, seed=1, **QUIET)
    assert_same(agent, trained(name, 3))


@each
def test_half_precision(name):
    keras.mixed_precision.set_global_policy("mixed_float16")
    agent = make_agent(name)
    assert agent.dtype_policy.name == "mixed_float16"
    assert {v.dtype for v in agent.trainable_variables} == {"float32"}
    agent.fit(make_env(name, 3), nb_steps=150, seed=1, **QUIET)
    assert_learnt(agent, name)
    assert np.isfinite(greedy(agent, name)[0]).all()


DEVICES = """
import sys, warnings
import keras, numpy as np
from tests.integration.test_every_agent import AGENTS, build, make_env, slots

for name in AGENTS:
    with keras.device("cpu:1"):
        agent = build(name)
    agent.compile(jit_compile=False)  # outside of the scope
    variables = [*agent.variables, *slots(agent)]
    assert place(variables) == {"CPU:1"}, name
    before = agent.get_weights()
    agent.fit(make_env(name, 3), nb_steps=60, verbose=0)
    agent.test(make_env(name), nb_episodes=1, verbose=0, visualize=False)
    assert place(variables) == {"CPU:1"}, name
    assert not all(np.array_equal(a, b) for a, b in zip(before, agent.get_weights())), name
    agent.save(sys.argv[1])
    loaded = keras.saving.load_model(sys.argv[1])  # a file carries no device
    assert place([*loaded.variables, *slots(loaded)]) == {"CPU:0"}, name
    loaded.fit(make_env(name, 3), nb_steps=30, verbose=0)
print("all well")
"""


def test_each_lives_on_the_device_it_was_built_on(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", TWO_CPUS + DEVICES, str(tmp_path / "agent.keras")],
        cwd=ROOT,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "all well" in done.stdout


# ---- files -----------------------------------------------------------------------------------------------------------


@each
def test_a_weights_file_holds_what_acts(name, tmp_path):
    agent, other = trained(name, 1), make_agent(name, seed=5)
    actions, returns = greedy(agent, name)
    assert greedy(other, name)[1] != returns
    agent.save_weights(tmp_path / "agent.weights.h5")
    other.load_weights(tmp_path / "agent.weights.h5")
    loaded_actions, loaded_returns = greedy(other, name)
    np.testing.assert_array_equal(actions, loaded_actions)
    assert returns == loaded_returns
    other.fit(make_env(name), nb_steps=60, **QUIET)
    assert other.run_state.nb_updates > 0


@each
def test_a_saved_agent_comes_back_whole_and_goes_on(name, tmp_path):
    agent = trained(name, 1)
    agent.save(tmp_path / "agent.keras")
    loaded = keras.saving.load_model(tmp_path / "agent.keras")
    assert type(loaded) is type(agent) and loaded.metrics_names == agent.metrics_names
    assert_same(agent, loaded)
    for a, b in zip(slots(agent), slots(loaded), strict=True):
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(a), keras.ops.convert_to_numpy(b))
    np.testing.assert_array_equal(greedy(agent, name)[0], greedy(loaded, name)[0])
    before, nb_updates = loaded.get_weights(), loaded.run_state.nb_updates
    loaded.fit(make_env(name), nb_steps=60, **QUIET)
    assert loaded.step == 150 and loaded.run_state.nb_updates > nb_updates
    assert any(not np.array_equal(a, b) for a, b in zip(before, loaded.get_weights(), strict=True))


# ---- the same again --------------------------------------------------------------------------------------------------


@each
@pytest.mark.parametrize("nb_lanes", [1, 3])
def test_short_fits_are_one_long_fit_and_tests_between_change_nothing(name, nb_lanes):
    agent, env = make_agent(name), make_env(name, nb_lanes)
    agent.test(make_env(name), nb_episodes=1, **QUIET)
    agent.fit(env, nb_steps=20, seed=1, **QUIET)
    for nb_steps in (31, 39):
        before = everything(agent)
        agent.test(make_env(name, 2), nb_episodes=3, **QUIET)
        assert everything(agent) == before
        agent.fit(env, nb_steps=nb_steps, **QUIET)
    assert_same(agent, trained(name, nb_lanes))


@each
def test_a_seed_decides_everything_and_another_one_otherwise(name):
    again, other = make_agent(name), make_agent(name)
    again.fit(make_env(name), nb_steps=90, seed=1, **QUIET)
    assert_same(again, trained(name, 1))
    assert everything(again) == everything(trained(name, 1))
    other.fit(make_env(name), nb_steps=90, seed=2, **QUIET)
    assert everything(other)["weights"] != everything(again)["weights"]
