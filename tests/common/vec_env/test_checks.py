import warnings

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from rl.common.cmd_util import make_gym_env
from rl.common.vec_env import DummyVecEnv, SubprocVecEnv, checks
from rl.common.vec_env.checks import MemoryEstimate, available_memory, check_envs_equal, check_memory


class SpaceEnv(gym.Env):
    def __init__(self, observation_space=None, goal=None, render_mode=None):
        self.observation_space = observation_space or spaces.Box(0, 255, (84, 84), np.uint8)
        self.action_space = spaces.Discrete(4)
        self.goal, self.render_mode = goal, render_mode


def test_the_estimate_counts_what_a_transition_stores():
    images = DummyVecEnv([SpaceEnv] * 2)
    estimate = check_memory(images, 1000)
    assert estimate.replay == 1000 * (84 * 84 + 8 + 64) and estimate.workers == 0
    tree = spaces.Dict(a=spaces.Tuple((spaces.Discrete(3), spaces.Box(0, 1, (2, 3), np.float32))), b=spaces.Text(9))
    assert check_memory(DummyVecEnv([lambda: SpaceEnv(tree)]), 10).replay == 10 * (8 + 24 + 8 + 64)
    assert check_memory(gym.make("CartPole-v1"), 10).replay == 10 * (16 + 8 + 64)
    assert check_memory(gym.make_vec("CartPole-v1", 3), 10).replay == 10 * (16 + 8 + 64)


def test_a_memory_that_will_not_fit_is_told(monkeypatch):
    env = DummyVecEnv([SpaceEnv])
    monkeypatch.setattr(checks, "available_memory", lambda: 4_000_000_000)
    with pytest.warns(RuntimeWarning, match=r"1,000,000 transitions will take 7.13 GB .* 4 GB are .* About 505,"):
        assert check_memory(env, 1_000_000) == MemoryEstimate(7_128_000_000, 0, 4_000_000_000)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_memory(env, 500_000)
        monkeypatch.setattr(checks, "available_memory", lambda: None)
        assert check_memory(env, 10**9).available is None


def test_available_memory_is_that_of_this_machine():
    available = available_memory()
    assert available is not None and 1_000_000 < available < 10**14


@pytest.mark.timeout(60)
def test_workers_are_counted(monkeypatch):
    with SubprocVecEnv([SpaceEnv] * 2, workers=2) as env:
        both = check_memory(env, 1).workers
        assert 4_000_000 < both < 1_000_000_000
        monkeypatch.setattr(checks, "available_memory", lambda: 1000)
        with pytest.warns(RuntimeWarning, match="beside the 2 workers' 0.0"):
            check_memory(env, 1)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("vec_env_cls", [SubprocVecEnv, DummyVecEnv])
def test_equal_envs_pass(vec_env_cls):
    with make_gym_env("CartPole-v1", 3, wrapper_kwargs={"frame_stack": 2}, vec_env_cls=vec_env_cls) as env:
        check_envs_equal(env, ["gravity", "length"])
        with pytest.raises(AttributeError, match="nonsense"):
            check_envs_equal(env, ["nonsense"])
    with vec_env_cls([lambda: SpaceEnv(goal=np.arange(3))] * 2) as env:
        check_envs_equal(env, ["goal"])


def test_differences_are_named():
    env = DummyVecEnv([lambda goal=goal: SpaceEnv(goal=np.full(2, goal)) for goal in (1, 1, 2, 3)])
    check_envs_equal(env)
    with pytest.raises(ValueError, match=r"goal: lane 0 has \[1 1\], lanes \[2, 3\] \[2 2\]"):
        check_envs_equal(env, ["goal"])
    bounds = [spaces.Box(0, high, (2,), np.float32) for high in (1, 2)]
    env = DummyVecEnv([lambda space=space: SpaceEnv(space) for space in bounds], spaces="compatible")
    with pytest.raises(ValueError, match="observation_space: lane 0 .* lane 1 Box"):
        check_envs_equal(env)
    env = DummyVecEnv(
        [
            lambda: gym.make("CartPole-v1"),
            lambda: gym.make("CartPole-v1", max_episode_steps=7),
            lambda: gym.wrappers.ClipReward(gym.make("CartPole-v1"), 0, 1),
        ]
    )
    with pytest.raises(ValueError, match=r"spec: .*500.*lanes \[1, 2\].*'max_episode_steps': 7"):
        check_envs_equal(env)
    env = DummyVecEnv([lambda mode=mode: SpaceEnv(render_mode=mode) for mode in (None, "rgb_array")])
    with pytest.raises(ValueError, match="render_mode: lane 0 has None, lane 1 rgb_array"):
        check_envs_equal(env)
