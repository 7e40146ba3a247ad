import re

import numpy as np
import pytest
from gymnasium import spaces

from rl.common.lane_processor import LaneProcessor

NONE = np.zeros(3, bool)


def make(space=None, nb_lanes=3, **hooks):
    if hooks:
        from rl.core import Processor

        return LaneProcessor(type("Own", (Processor,), hooks)(), space, nb_lanes, gave)
    return LaneProcessor(None, space, nb_lanes, gave)


def gave(what, lane):
    return f"The env gave {what} in lane {lane}"


def step(lanes, given, reward=(1.0, 2.0, 3.0), ended=NONE, info=None, begun=NONE):
    terminated, truncated = np.array(ended), np.zeros(len(ended), bool)
    info = [{} for _ in ended] if info is None else info
    observation, reward, info = lanes.step(given, np.array(reward), terminated, truncated, info, begun)
    return observation, reward, info, terminated, truncated


def test_sound_arrays_pass_through():
    given, info = np.arange(6.0).reshape(3, 2), [{}, {}, {}]
    for space in (None, spaces.Box(-9, 9, (2,), np.float64)):
        lanes = make(space)
        np.testing.assert_array_equal(lanes.first(given, range(3)), given)  # the first one tells what is sound
        for _ in range(2):
            observation, reward, same, _, _ = step(lanes, given, info=info)
            assert observation is given and same is info and reward.dtype == np.float32
            assert lanes.first(given, range(3)) is given
    actions = np.arange(3)
    assert lanes.actions(actions) is actions


def test_a_single_envs_own_object_is_copied():
    lanes, own = make(nb_lanes=1), np.zeros(2)
    for _ in range(2):
        observation = lanes.first([own], [0])
        following = step(lanes, [own], [1.0], NONE[:1], begun=NONE[:1])[0]
        own += 1
        assert (observation == own - 1).all() and (following == own - 1).all() and observation.shape == (1, 2)


@pytest.mark.parametrize("chosen", [[0], [2, 0], [1, 2]])
def test_first_of_some_lanes(chosen):
    given = {"a": np.arange(3), "b": (np.arange(6.0).reshape(3, 2),)}
    lanes = make()
    for _ in range(2):
        first = lanes.first(given, np.array(chosen))
        np.testing.assert_array_equal(first["a"], chosen)
        np.testing.assert_array_equal(first["b"][0], given["b"][0][chosen])
    see = make(process_observation=lambda self, row: row["b"][0] + 10)
    np.testing.assert_array_equal(see.first(given, chosen), given["b"][0][chosen] + 10)


def test_hooks_see_one_row_each():
    lanes = make(
        process_observation=lambda self, row: row[:1].astype(np.float16) * 2,
        process_reward=lambda self, reward: -reward,
        process_info=lambda self, info: {"told": info["i"]},
        process_action=lambda self, action: (type(action), action),
    )
    given = np.arange(6.0).reshape(3, 2)
    for _ in range(2):
        observation, reward, info, terminated, truncated = step(lanes, given, info=[{"i": i} for i in range(3)])
        assert observation.dtype == np.float16 and observation.tolist() == [[0], [4], [8]]
        assert reward.tolist() == [-1, -2, -3] and info == [{"told": i} for i in range(3)]
        assert not terminated.any() and not truncated.any()
    assert lanes.actions(np.arange(3)) == [(int, 0), (int, 1), (int, 2)]


def test_what_a_processor_makes_need_not_fit_the_declared_space():
    space = spaces.Box(0, 255, (2,), np.uint8)
    given = np.full((3, 2), 200, np.uint8)
    assert step(make(space, process_observation=lambda self, row: row / 400), given)[0].tolist() == [[0.5, 0.5]] * 3
    # Only where it does change observations is the space forgotten.
    rate = make(space, process_reward=lambda self, reward: 0.5 * reward)
    observation, reward, *_ = step(rate, [[1, 2], [3, 4], [5, 6]])
    assert observation.dtype == np.uint8 and reward.tolist() == [0.5, 1, 1.5]


def test_a_processor_cannot_change_the_envs_own_object():
    def spoil(self, row):
        row["a"] += 1
        return row["a"]

    own = {"a": np.zeros(2)}
    lanes = make(nb_lanes=1, process_observation=spoil)
    for _ in range(2):
        assert lanes.first([own], [0]).tolist() == [[1, 1]] and not own["a"].any()


def test_a_processor_that_changes_done():
    def flip(self, observation, reward, done, info):
        return observation, reward, not done, info

    lanes = make(process_step=flip)
    _, _, _, terminated, truncated = step(lanes, np.zeros((3, 2)), ended=[True, False, True])
    # Turned on it is an end of the task; turned off the env still cannot go on.
    assert terminated.tolist() == [False, True, False] and truncated.tolist() == [True, False, True]
    same = make(process_step=lambda self, *row: row)
    terminated, truncated = np.array([True, False, True]), np.array([True, True, False])
    same.step(np.zeros((3, 2)), np.ones(3), terminated, truncated, [{}] * 3, NONE)
    assert terminated.tolist() == [True, False, True] and truncated.tolist() == [True, True, False]


def test_lanes_that_only_reset_themselves_made_no_step():
    calls = []

    def whole(self, observation, reward, done, info):
        calls.append(info["i"])
        return self.process_observation(observation), reward + 10, done, info

    lanes = make(process_step=whole, process_observation=lambda self, row: row + 1)
    info = [{"i": i} for i in range(3)]
    observation, reward, *_ = step(lanes, np.zeros((3, 2)), info=info, begun=np.array([False, True, False]))
    assert calls == [0, 2] and reward.tolist() == [11, 2, 13] and (observation == 1).all()


@pytest.mark.parametrize("lane", [0, 1, 2])
def test_errors_name_the_lane(lane):
    lanes = make()
    given = [np.zeros(2) for _ in range(3)]
    lanes.first(given, range(3))
    for bad in (np.nan, np.inf, -np.inf, 1e300):
        reward = np.ones(3)
        reward[lane] = bad
        with pytest.raises(ValueError, match=rf"The env gave the reward {re.escape(str(bad))} in lane {lane}: it"):
            step(lanes, given, reward)
    given[lane] = np.zeros(3)
    message = rf"gave a bad observation in lane {lane}: .*shape \(3,\).*Processor.process_observation"
    with pytest.raises(ValueError, match=message):
        step(lanes, given)
    for chosen in ([lane], [(lane + 1) % 3, lane]):
        with pytest.raises(ValueError, match=message):
            lanes.first(given, chosen)
    given[lane] = np.zeros(2)
    assert step(lanes, given)[0].shape == (3, 2)


def test_a_hook_set_on_the_object_counts_and_an_empty_processor_costs_nothing():
    from rl.core import Processor

    given = np.zeros((3, 2))
    empty, own = Processor(), Processor()
    own.process_reward = lambda reward: 0.25
    for processor, expected in ((empty, [1, 2, 3]), (own, [0.25] * 3)):
        lanes = LaneProcessor(processor, None, 3, gave)
        lanes.first(given, range(3))
        observation, reward, *_ = step(lanes, given)
        assert observation is given and reward.tolist() == expected
