"""`RolloutStorage`: what comes in goes out, in order, as the env gave it; and sums of rewards against a loop."""

import numpy as np
import pytest

from rl.driver import Transition
from rl.rollout import Rollout, RolloutStorage


def step(t, lanes=2, observation=None, action=None, terminated=False, truncated=False, valid=True):
    """A vector step whose numbers tell t and the lane; flags may be one for all lanes."""
    lane = np.arange(lanes)

    def flags(x):
        return np.array(np.broadcast_to(x, lanes), bool)

    def states(later):
        return (100 * t + 10 * lane[:, None] + np.arange(3) + 0.5 * later).astype("float32")

    make = observation or states
    action = lane + t if action is None else action
    reward = (t + 0.25 * lane).astype("float32")
    ends = (flags(terminated), flags(truncated), flags(valid))
    return Transition(make(0), action, reward, make(1), *ends, [{}] * lanes)


def filled(steps, lanes=2, **options):
    storage = RolloutStorage(len(steps))
    storage.begin(lanes)
    for transition in steps:
        storage.append(transition)
    return storage


@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("nb_steps", [1, 4])
def test_a_rollout_is_the_steps_stacked(nb_steps, lanes):
    rng = np.random.default_rng(0)
    flags = rng.random((3, nb_steps, lanes)) < 0.5
    steps = [step(t, lanes, terminated=flags[0, t], truncated=flags[1, t], valid=flags[2, t]) for t in range(nb_steps)]
    storage = RolloutStorage(nb_steps)
    storage.begin(lanes)
    for t, transition in enumerate(steps):
        assert (storage.count, storage.full) == (t, False)
        storage.append(transition)
    assert (storage.count, storage.full, storage.nb_lanes) == (nb_steps, True, lanes)
    rollout = storage.rollout()
    assert isinstance(rollout, Rollout)
    assert rollout.state0.shape == rollout.state1.shape == (nb_steps, lanes, 1, 3)
    for field in ("action", "reward", "terminated", "ended", "valid"):
        assert getattr(rollout, field).shape == (nb_steps, lanes)
    np.testing.assert_array_equal(rollout.state0[:, :, 0], [s.observation for s in steps])
    np.testing.assert_array_equal(rollout.state1[:, :, 0], [s.next_observation for s in steps])
    np.testing.assert_array_equal(rollout.action, [s.action for s in steps])
    np.testing.assert_array_equal(rollout.reward, [s.reward for s in steps])
    np.testing.assert_array_equal(rollout.terminated, flags[0])
    np.testing.assert_array_equal(rollout.ended, flags[0] | flags[1])
    np.testing.assert_array_equal(rollout.valid, flags[2])
    assert storage.nb_valid == flags[2].sum()


@pytest.mark.parametrize(
    ("given", "stored"),
    [
        ("uint8", "uint8"),
        ("int8", "int8"),
        ("int32", "int32"),
        ("int64", "int32"),
        ("float16", "float16"),
        ("float32", "float32"),
        ("float64", "float32"),
        ("bool", "bool"),
    ],
)
def test_dtypes_of_observations(given, stored):
    x = np.array([[0, 1, 1], [1, 0, 1]], given)
    rollout = filled([step(t, observation=lambda later: x) for t in range(2)]).rollout()
    assert rollout.state0.dtype == rollout.state1.dtype == stored
    np.testing.assert_array_equal(rollout.state0[1, :, 0], x)


@pytest.mark.parametrize(
    ("action", "stored"),
    [
        (np.array([3, 1]), "int32"),
        (np.array([3, 1], "int32"), "int32"),
        (np.array([[3, 1, 0], [0, 1, 2]]), "int32"),
        (np.array([[0.5], [-7.25]], "float32"), "float32"),
    ],
)
def test_actions_keep_shape_and_value(action, stored):
    rollout = filled([step(t, action=action + t) for t in range(3)]).rollout()
    assert rollout.action.dtype == stored and rollout.action.shape == (3, *action.shape)
    np.testing.assert_array_equal(rollout.action, [action, action + 1, action + 2])
    assert rollout.reward.dtype == np.float32
    assert rollout.terminated.dtype == rollout.ended.dtype == rollout.valid.dtype == bool


def test_trees_of_observations():
    def tree(t):
        def make(later):
            number = 10 * t + later
            return {"image": np.full((2, 4, 4, 1), number, np.uint8), "more": (np.full((2, 5), number / 2, float),)}

        return make

    rollout = filled([step(t, observation=tree(t)) for t in range(3)]).rollout()
    assert set(rollout.state0) == {"image", "more"}
    assert rollout.state0["image"].shape == (3, 2, 1, 4, 4, 1) and rollout.state0["image"].dtype == np.uint8
    assert rollout.state1["more"][0].shape == (3, 2, 1, 5) and rollout.state1["more"][0].dtype == np.float32
    assert rollout.state0["image"][:, 1, 0, 0, 0, 0].tolist() == [0, 10, 20]
    assert rollout.state1["more"][0][:, 0, 0, 4].tolist() == [0.5, 5.5, 10.5]


def test_the_envs_arrays_may_be_reused():
    x, action, reward = np.zeros((2, 3), "float32"), np.zeros(2, int), np.zeros(2, "float32")
    flags = [np.zeros(2, bool) for _ in range(3)]
    storage = RolloutStorage(3)
    storage.begin(2)
    for t in range(3):
        for array in (x, action, reward):
            array[:] = t
        flags[t % 3][:] = True
        storage.append(Transition(x, action, reward, x, *flags, [{}] * 2))
    for array in (x, action, reward):
        array[:] = 99
    for flag in flags:
        flag[:] = False
    rollout = storage.rollout()
    for stored in (rollout.state0[:, 0, 0, 0], rollout.state1[:, 0, 0, 0], rollout.action[:, 0], rollout.reward[:, 0]):
        assert stored.tolist() == [0, 1, 2]
    assert rollout.terminated[:, 0].tolist() == [True] * 3
    assert rollout.ended[:, 0].tolist() == [True] * 3
    assert rollout.valid[:, 0].tolist() == [False, False, True]


def test_the_second_rollout_takes_the_place_of_the_first_one():
    storage = filled([step(t, terminated=True) for t in range(3)])
    storage.clear()
    assert (storage.count, storage.full, storage.nb_valid) == (0, False, 0)
    for t in range(3, 6):
        storage.append(step(t))
    rollout = storage.rollout()
    assert rollout.reward[:, 0].tolist() == [3, 4, 5]
    assert not rollout.ended.any() and rollout.valid.all()


def test_opening_the_same_lanes_cuts_what_is_stored_and_keeps_it():
    storage = RolloutStorage(4)
    storage.begin(2)
    for t in range(2):
        storage.append(step(t))
    storage.begin(2)
    assert (storage.count, storage.nb_valid) == (2, 4)
    for t in range(2, 4):
        storage.append(step(t))
    rollout = storage.rollout()
    assert rollout.reward[:, 0].tolist() == [0, 1, 2, 3]
    assert rollout.ended[:, 0].tolist() == [False, True, False, False]
    assert not rollout.terminated.any()  # what was cut off goes on, for all that is known


def test_opening_other_lanes_forgets_what_is_stored():
    storage = RolloutStorage(2)
    storage.begin(2)
    storage.append(step(0))
    storage.begin(3)
    assert (storage.nb_lanes, storage.count, storage.nb_valid) == (3, 0, 0)
    for t in range(5, 7):
        storage.append(step(t, lanes=3))
    rollout = storage.rollout()
    assert rollout.state0.shape == (2, 3, 1, 3) and rollout.reward[:, 0].tolist() == [5, 6]
    assert not rollout.ended.any()


@pytest.mark.parametrize(
    ("x", "action", "text"),
    [
        (np.zeros((2, 4), "float32"), None, r"state0 has shape \(2, 4\), expected \(2, 3\)"),
        (np.zeros((3, 3), "float32"), None, r"state0 has shape \(3, 3\), expected \(2, 3\)"),
        (np.zeros((2, 3), complex), None, "complex"),
        (None, np.zeros((2, 2), int), r"action has shape \(2, 2\), expected \(2,\)"),
        (None, np.full(2, 0.5), "action has dtype float64"),
    ],
)
def test_rows_unlike_those_before_are_refused(x, action, text):
    storage = RolloutStorage(3)
    storage.begin(2)
    storage.append(step(0))
    with pytest.raises(ValueError, match=text):
        storage.append(step(1, observation=None if x is None else lambda later: x, action=action))
    assert storage.count == 1
    storage.append(step(1))
    storage.append(step(2))
    assert storage.rollout().reward[:, 0].tolist() == [0, 1, 2]


def test_with_nothing_stored_a_space_of_another_shape_may_come():
    storage = filled([step(0)])
    storage.clear()
    storage.begin(2)
    storage.append(step(1, observation=lambda later: np.full((2, 7), later, "uint8")))
    assert storage.rollout().state1.shape == (1, 2, 1, 7)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("lanes", [1, 3])
def test_discounted_returns_are_a_loop_over_each_lane(lanes, seed):
    nb_steps, nb_rollouts, gamma = 6, 3, 0.9
    rng = np.random.default_rng(seed)
    total = nb_steps * nb_rollouts
    valid = rng.random((total, lanes)) < 0.7
    terminated = valid & (rng.random((total, lanes)) < 0.15)
    truncated = rng.random((total, lanes)) < 0.15  # of a row that is none, too: a lost worker's episode ends
    reward = rng.normal(size=(total, lanes)).astype("float32")
    storage, got = RolloutStorage(nb_steps), []
    storage.begin(lanes)
    for t in range(total):
        rows = step(t, lanes, terminated=terminated[t], truncated=truncated[t], valid=valid[t])
        storage.append(rows._replace(reward=reward[t]))
        if storage.full:
            got.append(storage.discounted_returns(gamma))
            storage.clear()
    assert got[0].dtype == np.float32 and got[0].shape == (nb_steps, lanes)
    got = np.concatenate(got)
    nb_checked = 0
    for lane in range(lanes):
        so_far = 0.0
        for t in range(total):
            if valid[t, lane]:
                so_far = gamma * so_far + float(reward[t, lane])
                assert got[t, lane] == pytest.approx(so_far, abs=1e-5)
                nb_checked += 1
            if terminated[t, lane] or truncated[t, lane]:
                so_far = 0.0
    assert nb_checked == valid.sum()


def test_rubbish_in_rows_that_are_none_stays_out_of_the_returns():
    storage = RolloutStorage(3)
    storage.begin(1)
    for t, reward in enumerate([1.0, np.nan, 1.0]):
        storage.append(step(t, 1, valid=t != 1)._replace(reward=np.array([reward], "float32")))
    assert storage.discounted_returns(0.5)[[0, 2], 0].tolist() == [1, 1.5]


def test_returns_go_on_through_a_rollout_that_is_interrupted():
    def returns(interrupted):
        storage, got = RolloutStorage(3), []
        storage.begin(1)
        for t in range(6):
            if t == 5 and interrupted:
                storage.begin(1)
            storage.append(step(t, 1)._replace(reward=np.ones(1, "float32")))
            if storage.full:
                got += storage.discounted_returns(0.5)[:, 0].tolist()
                storage.clear()
        return got

    assert returns(False) == [1, 1.5, 1.75, 1.875, 1.9375, 1.96875]
    # The two rows of the second rollout before the cut are in the episode that the first rollout began.
    assert returns(True) == [1, 1.5, 1.75, 1.875, 1.9375, 1]


def test_returns_start_anew_where_lanes_are_opened_between_two_rollouts():
    storage = filled([step(0, 1)._replace(reward=np.ones(1, "float32"))], lanes=1)
    assert storage.discounted_returns(0.5).tolist() == [[1]]
    storage.clear()
    storage.begin(1)
    storage.append(step(0, 1)._replace(reward=np.ones(1, "float32")))
    assert storage.discounted_returns(0.5).tolist() == [[1]]
