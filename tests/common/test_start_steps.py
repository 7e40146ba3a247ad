import numpy as np
import pytest
from gymnasium import spaces

from rl.common.start_steps import StartSteps

ALL, NONE = np.ones(3, bool), np.zeros(3, bool)


def begun(limit=5, seed=0, **kwargs):
    starts = StartSteps(3, limit, **{"space": spaces.Discrete(9), **kwargs})
    starts.clear(seed)
    starts.draw(ALL)
    return starts


def test_draws_below_the_limit():
    for limit in (1, 2, 5):
        starts = begun(limit)
        drawn = []
        for _ in range(60):
            starts.clear()
            starts.draw(ALL)
            assert starts.active == starts.left.any()
            drawn.append(starts.left)
        for lane in range(3):
            assert {left[lane] for left in drawn} == set(range(limit))


def test_none_at_all():
    state = np.random.get_state()[1].copy()
    starts = StartSteps(3, 0)  # neither space nor policy needed
    for _ in range(3):
        starts.draw(ALL)
        assert not starts.active and not starts.left.any()
    np.testing.assert_array_equal(np.random.get_state()[1], state)


def test_draws_only_for_lanes_that_begin():
    starts = begun(100)
    for lane in (0, 2, 2):
        before = starts.left
        starts.draw(np.arange(3) == lane)
        np.testing.assert_array_equal(starts.left != before, np.arange(3) == lane)


def test_counts_down_in_every_lane():
    starts = begun(4)
    starts.left = np.array([2, 0, 3])
    for left in ([1, 0, 2], [0, 0, 1], [0, 0, 0]):
        assert starts.active
        starts.count(NONE)
        assert starts.left.tolist() == left
    assert not starts.active


def test_an_episode_that_ends_within_them_leaves_the_next_one_none():
    starts = begun(1000)
    starts.left = np.array([2, 0, 1])
    starts.count(np.array([True, True, False]))
    assert starts.left.tolist() == [0, 0, 0] and not starts.active
    starts.draw(ALL)
    assert starts.left[0] == 0 and starts.left[1:].all()
    starts.draw(ALL)
    assert starts.left.all()  # the one after that has some again
    starts.count(ALL)
    starts.clear(seed=0)
    starts.draw(ALL)
    assert starts.left.all()  # forgotten


def test_actions_of_a_policy():
    seen = []

    def policy(observation):
        seen.append(observation)
        return 7

    starts = begun(policy=policy, space=None)
    observation = {"a": np.arange(3), "b": (np.arange(6).reshape(3, 2),)}
    for left, expected in (([1, 0, 4], [7, 1, 7]), ([0, 0, 0], [0, 1, 2])):
        starts.left = np.array(left)
        actions = np.arange(3)
        assert starts.fill(actions, observation) == expected and actions.tolist() == [0, 1, 2]
    assert [row["a"] for row in seen] == [0, 2] and [row["b"][0].tolist() for row in seen] == [[0, 1], [4, 5]]
    starts.left = np.ones(3, int)
    assert starts.fill([None] * 3, observation) == [7, 7, 7]


def test_samples_repeat_with_the_seed_and_leave_the_space_alone():
    space = spaces.Discrete(1000)

    def run(seed):
        starts = begun(seed=seed, space=space)
        left = starts.left
        starts.left = np.ones(3, int)
        return [*left, *starts.fill([None] * 3, None)]

    space.seed(3)
    expected = space.sample()
    space.seed(3)
    assert run(0) == run(0) != run(1)
    np.random.seed(4)
    unseeded = run(None)
    assert unseeded != run(None)
    np.random.seed(4)
    assert run(None) == unseeded
    assert space.sample() == expected


def test_one_number_of_the_global_generator_and_none_with_a_seed():
    np.random.seed(1)
    first, second = np.random.random(), np.random.random()
    np.random.seed(1)
    begun(seed=5)
    assert np.random.random() == first
    np.random.seed(1)
    np.random.randint(2**31)
    following = np.random.random()
    np.random.seed(1)
    starts = begun(seed=None)
    starts.draw(ALL)
    starts.draw(ALL)
    assert np.random.random() == following
    assert second != first


def test_needs_a_policy_or_a_space():
    with pytest.raises(ValueError, match="Old has no action_space.*start_step_policy"):
        StartSteps(1, 2, name="Old")
