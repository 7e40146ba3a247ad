import gymnasium as gym
import numpy as np
import pytest

from rl.common.vec_env import DummyVecEnv
from rl.common.vec_env.copies import CopyPool

SHAPE = (64, 1024)  # of float32: 256 KB


def owner(array):
    while array.base is not None:
        array = array.base
    return array.__array_interface__["data"][0]


def filled(value):
    return np.full(SHAPE, value, np.float32)


def test_memory_is_used_again_once_it_is_let_go():
    pool = CopyPool()
    copy = pool.copy(filled(1))
    place = owner(copy)
    del copy
    again = pool.copy(filled(2))
    assert owner(again) == place
    np.testing.assert_array_equal(again, filled(2))


@pytest.mark.parametrize(
    "keep",
    [
        lambda copy: copy,
        lambda copy: copy[3:, ::2],
        lambda copy: copy.reshape(-1)[5:],
        lambda copy: memoryview(copy),
        lambda copy: np.asarray(memoryview(copy)),
        lambda copy: copy.T.view(np.uint32),
    ],
)
def test_what_the_caller_holds_on_to_never_changes(keep):
    pool = CopyPool()
    held, expected = [], []
    for value in range(12):
        copy = pool.copy(filled(value))
        held.append(keep(copy))
        expected.append(np.array(held[-1]))
        del copy
    for value in range(12, 20):
        pool.copy(filled(value))
    for now, before in zip(held, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(now), before)


def test_a_copy_can_be_changed_without_harm():
    pool = CopyPool()
    first = pool.copy(filled(1))
    first[:] = 7
    first.shape = (-1,)
    second = pool.copy(filled(2))
    assert (first == 7).all() and (second == 2).all()
    del first
    assert pool.copy(filled(3)).shape == SHAPE


def test_small_arrays_and_other_shapes():
    pool = CopyPool()
    small = pool.copy(np.arange(3))
    assert small.base is None
    wide = pool.copy(np.ones((128, 1024), np.float32))
    assert wide.shape == (128, 1024) and pool.copy(np.ones(SHAPE, np.float64)).dtype == np.float64


def test_observations_of_a_vector_env_stay_what_they_were():
    class Large(gym.Env):
        observation_space = gym.spaces.Box(0, 255, (256, 256), np.uint8)
        action_space = gym.spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            self.t = 0
            return np.zeros((256, 256), np.uint8), {}

        def step(self, action):
            self.t += 1
            return np.full((256, 256), self.t, np.uint8), 0.0, False, False, {}

    with DummyVecEnv([Large] * 4) as env:
        env.reset()
        seen = [env.step([0] * 4)[0] for _ in range(10)]
    assert [int(observation[2, 3, 4]) for observation in seen] == list(range(1, 11))
