"""Replay memory, checked against a slow list-based one: every frame names its lane, episode and step."""

import copy
import itertools
import pickle
import time
import warnings
from types import SimpleNamespace

import keras
import numpy as np
import psutil
import pytest

from rl.common.misc_util import tree_leaves, tree_map
from rl.memory import (
    Batch,
    EpisodeParameterMemory,
    Memory,
    RecentFrames,
    RingBuffer,
    SequentialMemory,
    sample_batch_indexes,
    zeroed_observation,
)

few = pytest.mark.filterwarnings("ignore:.* rows repeat")  # tests draw more often than there are rows

# -- Lanes whose frames name their episode and step


def box(code):
    """A frame of three numbers from the code of a step (never zero, so that padding shows)."""
    code = np.asarray(code)
    return np.stack([code, code + 0.25, -code], axis=-1).astype(np.float32)


def image_and_vector(code):
    code = np.asarray(code)
    image = np.stack([code % 251, code // 251, np.full_like(code, 7)], axis=-1).astype(np.uint8)
    return {"img": np.repeat(image[..., None], 2, axis=-1), "parts": (box(code), code.astype(np.int64))}


def transitions(observation, next_observation, action=None, terminated=None, truncated=None, valid=None):
    n = len(tree_leaves(observation)[0])
    return SimpleNamespace(
        observation=observation,
        action=np.zeros(n, np.int64) if action is None else action,
        reward=np.zeros(n, np.float32),
        next_observation=next_observation,
        terminated=np.zeros(n, bool) if terminated is None else np.asarray(terminated),
        truncated=np.zeros(n, bool) if truncated is None else np.asarray(truncated),
        valid=np.ones(n, bool) if valid is None else np.asarray(valid),
        info=[{}] * n,
    )


def one_lane(frame, next_frame, action=None, terminated=False, truncated=False, valid=True):
    frames = np.array([frame], np.float32), np.array([next_frame], np.float32)
    return transitions(*frames, action, [bool(terminated)], [bool(truncated)], [valid])


class Lanes:
    """N lanes of random episodes; what they send is recorded in a list, as simply as possible."""

    def __init__(self, nb_lanes, window_length, rng, encode=box, max_length=6, ignore_boundaries=False):
        self.nb_lanes, self.window_length, self.rng, self.encode = nb_lanes, window_length, rng, encode
        self.max_length, self.ignore_boundaries = max_length, ignore_boundaries
        self.next_code = itertools.count(1)
        self.rows = []  # (history of codes incl. this one, code of the successor, action, reward, terminated)
        self.begin(nb_lanes)

    def begin(self, nb_lanes):
        self.nb_lanes = nb_lanes
        self.history = [[] for _ in range(nb_lanes)]  # codes of the stored frames of the open episode
        self.code = [next(self.next_code) for _ in range(nb_lanes)]
        self.left = list(self.rng.integers(1, self.max_length + 1, nb_lanes))

    def window(self, codes):
        codes = codes[-self.window_length :]
        frames = [self.encode(np.array([code])) for code in codes]
        pad = self.window_length - len(frames)
        frames = [tree_map(np.zeros_like, frames[0])] * pad + frames
        return tree_map(lambda *parts: np.concatenate(parts), *frames)

    def observation(self):
        return self.encode(np.array(self.code))

    def step(self, store=None, p_valid=1.0, p_truncated=0.5):
        """Plays one step in every lane, and notes in `rows` what a memory must hold afterwards."""
        n = self.nb_lanes
        valid = self.rng.random(n) < p_valid
        ends = np.array([left == 1 for left in self.left]) & valid
        truncated = ends & (self.rng.random(n) < p_truncated)
        terminated = ends & ~(truncated & (self.rng.random(n) < 0.8))  # sometimes both
        action = self.rng.integers(0, 100, n)
        reward = self.rng.random(n).astype(np.float32)
        observation = self.observation()
        successors = [next(self.next_code) for _ in range(n)]
        stored = valid if store is None else valid & store
        for lane in np.flatnonzero(valid):
            if stored[lane]:
                self.history[lane] = self.history[lane] + [self.code[lane]]
                self.rows.append((self.history[lane], successors[lane], action[lane], reward[lane], terminated[lane]))
            self.code[lane], self.left[lane] = successors[lane], self.left[lane] - 1
            if ends[lane]:
                self.code[lane] = next(self.next_code)
                self.left[lane] = self.rng.integers(1, self.max_length + 1)
                if not self.ignore_boundaries:
                    self.history[lane] = []
        return SimpleNamespace(
            observation=observation,
            action=action,
            reward=reward,
            next_observation=self.encode(np.array(successors)),
            terminated=terminated,
            truncated=truncated,
            valid=valid,
            info=[{}] * n,
        )


def assert_same(tree, expected):
    for leaf, want in zip(tree_leaves(tree), tree_leaves(expected), strict=True):
        assert leaf.dtype == want.dtype
        np.testing.assert_array_equal(leaf, want)


def check_batch(batch, lanes, limit):
    """Compares a batch (without the axis k) with the recorded rows, and returns the ids that it holds."""
    first = max(0, len(lanes.rows) - limit)
    kept = {codes[-1] for codes, *_ in lanes.rows[first:]}
    for i, index in enumerate(batch.index):
        assert first <= index < len(lanes.rows)
        codes, successor, action, reward, terminated = lanes.rows[index]
        assert set(codes[-lanes.window_length :]) <= kept
        assert_same(tree_map(lambda leaf, i=i: leaf[i], batch.state0), lanes.window(codes))
        assert_same(tree_map(lambda leaf, i=i: leaf[i], batch.state1), lanes.window([*codes, successor]))
        assert batch.action[i] == action
        assert batch.reward[i] == reward
        assert batch.terminal1[i] == terminated
    return set(batch.index.tolist())


def fit_ids(lanes, limit):
    first = max(0, len(lanes.rows) - limit)
    kept = {codes[-1] for codes, *_ in lanes.rows[first:]}
    return {
        index for index in range(first, len(lanes.rows)) if set(lanes.rows[index][0][-lanes.window_length :]) <= kept
    }


def filled(nb_lanes, window_length, limit, steps, seed=0, encode=box, **kwargs):
    lanes = Lanes(nb_lanes, window_length, np.random.default_rng(seed), encode, **kwargs)
    memory = SequentialMemory(limit, window_length, lanes.ignore_boundaries)
    memory.rng = seed
    memory.begin_lanes(nb_lanes)
    for _ in range(steps):
        memory.extend(lanes.step())
    return memory, lanes


def rows_of(batch):
    """Drops the axis k of a batch with k = 1."""
    return tree_map(lambda leaf: leaf[0], batch)


# -- What is drawn is what was recorded


@few
@pytest.mark.parametrize("encode", [box, image_and_vector])
@pytest.mark.parametrize("nb_lanes", [1, 3])
@pytest.mark.parametrize("window_length", [1, 3, 4])
@pytest.mark.parametrize("limit", [10, 37, 500])
def test_samples_equal_the_recorded_steps(encode, nb_lanes, window_length, limit):
    memory, lanes = filled(nb_lanes, window_length, limit, 40, encode=encode)
    for _ in range(3):
        memory.extend(lanes.step())
        check_batch(rows_of(memory.sample_batch(100)), lanes, limit)


@few
@pytest.mark.parametrize("ignore_boundaries", [False, True])
@pytest.mark.parametrize("window_length", [1, 2, 4])
@pytest.mark.parametrize("limit", [24, 1000])
def test_masks_invalid_rows_and_new_lanes(ignore_boundaries, window_length, limit):
    rng = np.random.default_rng(1)
    memory, lanes = filled(2, window_length, limit, 5, ignore_boundaries=ignore_boundaries)
    windows = {}
    for nb_lanes in (3, 1, 8, 1, 2, 3):
        memory.begin_lanes(nb_lanes)
        lanes.begin(nb_lanes)
        for _ in range(15):
            states = memory.get_recent_states(lanes.observation())
            store = rng.random(nb_lanes) < 0.7 if rng.random() < 0.7 else None
            first = len(lanes.rows)
            transition = lanes.step(store, p_valid=0.8)
            stored = transition.valid if store is None else transition.valid & store
            memory.extend(transition, store)
            windows.update(zip(range(first, len(lanes.rows)), states[stored], strict=True))
            assert memory.nb_entries == min(limit, len(lanes.rows))
        batch = rows_of(memory.sample_batch(150))
        check_batch(batch, lanes, limit)
        for index, state in zip(batch.index, batch.state0, strict=True):
            if index in windows:  # the window acted on is the window trained on
                np.testing.assert_array_equal(windows[index], state)


@few
def test_recent_states_of_trees_are_what_is_trained_on():
    lanes = Lanes(3, 3, np.random.default_rng(0), image_and_vector)
    memory = SequentialMemory(1000, 3)
    acted = []
    for _ in range(50):
        acted.append(memory.get_recent_states(lanes.observation()))
        memory.extend(lanes.step())
    batch = rows_of(memory.sample_batch(300))
    for i, index in enumerate(batch.index):
        expected = tree_map(lambda leaf, index=index: leaf[index % 3], acted[index // 3])
        assert_same(tree_map(lambda leaf, i=i: leaf[i], batch.state0), expected)


def test_first_state_has_zero_frames_in_every_part():
    lanes = Lanes(2, 3, np.random.default_rng(0), image_and_vector)
    states = SequentialMemory(10, 3).get_recent_states(lanes.observation())
    assert [leaf.shape for leaf in tree_leaves(states)] == [(2, 3, 3, 2), (2, 3, 3), (2, 3)]
    assert [leaf.dtype for leaf in tree_leaves(states)] == [np.uint8, np.float32, np.int64]
    for leaf, now in zip(tree_leaves(states), tree_leaves(lanes.observation()), strict=True):
        assert not leaf[:, :2].any()
        np.testing.assert_array_equal(leaf[:, 2], now)


def test_window_one_is_a_view():
    observation = np.ones((4, 3), np.float32)
    states = SequentialMemory(10).get_recent_states(observation)
    assert states.shape == (4, 1, 3) and np.shares_memory(states, observation)


@few
def test_small_wrapped_ring_with_short_episodes():
    """Windows mix no episodes, padding is at true starts only, the next state is the next step."""
    rng = np.random.default_rng(3)
    memory = SequentialMemory(limit=10, window_length=3)
    memory.rng = 0
    step, length, episode = 0, 3, 1
    for _ in range(100):
        ended = step + 1 == length
        memory.extend(one_lane([episode, step + 1], [episode, step + 2], truncated=ended))
        if ended:
            step, length, episode = 0, rng.integers(1, 7), episode + 1
        else:
            step += 1
        batch = rows_of(memory.sample_batch(100))
        for state in (batch.state0, batch.state1):
            newest = state[:, -1]
            for age in (1, 2):
                expected = newest - [0, age]
                expected[expected[:, 1] < 1] = 0
                np.testing.assert_array_equal(state[:, -1 - age], expected)
        np.testing.assert_array_equal(batch.state1[:, -1], batch.state0[:, -1] + [0, 1])


@few
@pytest.mark.parametrize("window_length", [1, 2, 4])
@pytest.mark.parametrize(("nb_lanes", "limit"), [(1, 12), (3, 40), (3, 1000)])
def test_every_fit_row_is_drawn_the_newest_included(window_length, nb_lanes, limit):
    memory, lanes = filled(nb_lanes, window_length, limit, 60)
    drawn = set(memory.sample_batch(2000).index.ravel().tolist())
    assert drawn == fit_ids(lanes, limit)
    assert len(lanes.rows) - 1 in drawn
    if limit == 1000:
        assert drawn == set(range(180 if nb_lanes == 3 else 60))


@few
@pytest.mark.parametrize("ending", ["terminated", "truncated", "both"])
def test_last_observation_of_an_episode_is_its_last_state1(ending):
    memory = SequentialMemory(100, 2)
    flags = {"terminated": ending != "truncated", "truncated": ending != "terminated"}
    memory.extend(one_lane([1], [2]))
    memory.extend(one_lane([2], [3], **flags))
    memory.extend(one_lane([50], [51]))  # the observation after the reset
    batch = rows_of(memory.sample_batch(200))
    last = batch.index == 1
    np.testing.assert_array_equal(np.unique(batch.state1[last], axis=0), [[[2], [3]]])
    np.testing.assert_array_equal(np.unique(batch.state0[batch.index == 2], axis=0), [[[0], [50]]])
    assert set(batch.terminal1[last]) == {float(ending != "truncated")}
    assert set(batch.terminal1[~last]) == {0.0}
    assert list(memory.truncations) == [False, ending != "terminated", False]
    assert list(memory.terminals) == [False, ending != "truncated", False]


@few
def test_unstored_end_of_an_episode_closes_the_window():
    memory = SequentialMemory(100, 2)
    memory.extend(one_lane([1], [2]))
    memory.extend(one_lane([2], [3], terminated=True), store=np.array([False]))
    np.testing.assert_array_equal(memory.get_recent_states(np.array([[9.0]])), [[[0], [9]]])
    memory.extend(one_lane([9], [10]))
    batch = rows_of(memory.sample_batch(100))
    assert set(batch.index) == {0, 1}
    np.testing.assert_array_equal(np.unique(batch.state1[batch.index == 0], axis=0), [[[1], [2]]])
    np.testing.assert_array_equal(np.unique(batch.state0[batch.index == 1], axis=0), [[[0], [9]]])


@few
def test_lost_step_that_counts_as_truncated_closes_the_window():
    """A worker died: the row is not valid, but the episode is over."""
    memory = SequentialMemory(100, 2)
    memory.extend(one_lane([1], [2]))
    memory.extend(one_lane([2], [70], truncated=True, valid=False))
    memory.extend(one_lane([80], [81]))
    batch = rows_of(memory.sample_batch(100))
    np.testing.assert_array_equal(np.unique(batch.state1[batch.index == 0], axis=0), [[[1], [2]]])
    np.testing.assert_array_equal(np.unique(batch.state0[batch.index == 1], axis=0), [[[0], [80]]])


@few
@pytest.mark.parametrize("nb_lanes", [1, 4])
def test_one_step_episodes(nb_lanes):
    memory, lanes = filled(nb_lanes, 3, 20, 30, max_length=1)
    batch = rows_of(memory.sample_batch(500))
    assert check_batch(batch, lanes, 20) == set(range(len(lanes.rows) - 20, len(lanes.rows)))
    assert not batch.state0[:, :2].any()


@few
def test_idle_lane_outlives_its_rows():
    """A lane that waits until its rows are overwritten goes on with the right window, and leaks no slot."""
    memory = SequentialMemory(8, 2)
    memory.begin_lanes(2)
    clock = {"both": [True, True], "first": [True, False]}

    def step(first, second, who):
        observation = np.array([[first], [second]], np.float32)
        memory.extend(transitions(observation, observation + 1, valid=clock[who]))

    step(1, 100, "both")
    for first in range(2, 20):
        step(first, 101, "first")
    np.testing.assert_array_equal(memory.get_recent_states(np.array([[20.0], [101.0]]))[1], [[100], [101]])
    step(20, 101, "both")
    step(21, 102, "both")
    batch = rows_of(memory.sample_batch(500))
    newest = {tuple(state.ravel()) for state in batch.state0}
    assert (100.0, 101.0) not in newest  # its first frame is overwritten
    assert (101.0, 102.0) in newest
    np.testing.assert_array_equal(batch.state1[:, -1], batch.state0[:, -1] + 1)
    assert_slots_balance(memory)


# -- Shapes, dtypes, options


@few
def test_batch_fields():
    memory, _ = filled(3, 2, 100, 20)
    batch = memory.sample_batch(5, k=4, gamma=0.9)
    assert isinstance(batch, Batch)
    shapes = {name: leaf.shape for name, leaf in batch._asdict().items()}
    assert shapes.pop("state0") == shapes.pop("state1") == (4, 5, 2, 3)
    assert set(shapes.values()) == {(4, 5)}
    dtypes = {name: leaf.dtype for name, leaf in batch._asdict().items()}
    assert dtypes.pop("action") == dtypes.pop("index") == np.int64
    assert set(dtypes.values()) == {np.dtype(np.float32)}
    assert (batch.discount == np.float32(0.9)).all() and (batch.weight == 1).all()
    assert all(leaf.flags.c_contiguous for leaf in tree_leaves(batch))


def test_k_batches_are_one_draw():
    memory, _ = filled(3, 2, 100, 50)
    memory.rng = 5
    four = memory.sample_batch(8, k=4)
    memory.rng = 5
    one = memory.sample_batch(32)
    assert_same(tree_map(lambda leaf: leaf.reshape(1, 32, *leaf.shape[2:]), four), one)


@pytest.mark.parametrize("shape", [(1,), (2,), (3, 2)])
def test_continuous_actions_are_float32(shape):
    memory = SequentialMemory(100)
    for value in range(5):
        memory.extend(one_lane([value], [value + 1], action=np.full((1, *shape), value / 3)))
    batch = memory.sample_batch(4)
    assert batch.action.shape == (1, 4, *shape) and batch.action.dtype == np.float32
    np.testing.assert_array_equal(batch.action[..., 0].ravel()[:1], (batch.state0.ravel() / 3)[:1])


@pytest.mark.parametrize(
    ("dtype", "kept"),
    [("uint8", "uint8"), ("float64", "float32"), ("int64", "int64"), ("float16", "float16"), ("bool", "bool")],
)
@pytest.mark.parametrize("window_length", [1, 3])
def test_frames_keep_their_dtype(dtype, kept, window_length):
    memory = SequentialMemory(10, window_length)
    observation = np.ones((2, 5), dtype)
    for _ in range(4):
        assert memory.get_recent_states(observation).dtype == kept
        memory.extend(transitions(observation, observation))
    assert memory.sample_batch(3).state0.dtype == memory.sample_batch(3).state1.dtype == kept


@few
def test_discrete_observations_have_no_axis():
    memory = SequentialMemory(10, 2)
    memory.extend(transitions(np.array([3, 4]), np.array([5, 6])))
    np.testing.assert_array_equal(memory.get_recent_states(np.array([5, 6])), [[3, 5], [4, 6]])
    assert memory.sample_batch(7).state1.shape == (1, 7, 2)


@few
def test_dicts_are_matched_by_key():
    memory = SequentialMemory(10, 2)
    for value in (1.0, 2.0, 3.0):
        observation = {"a": np.full((1, 2), value), "b": np.full((1, 3), -value)}
        if value == 2.0:
            observation = dict(reversed(observation.items()))
        states = memory.get_recent_states(observation)
        memory.extend(transitions(observation, tree_map(lambda leaf: leaf + 1, observation)))
        assert states["a"].shape == (1, 2, 2) and states["b"].shape == (1, 2, 3)
    batch = memory.sample_batch(20)
    np.testing.assert_array_equal(batch.state0["a"][..., 0], -batch.state0["b"][..., 0])
    assert list(batch.state0) == ["a", "b"]


@few
def test_arrays_that_the_environment_reuses_are_copied():
    memory = SequentialMemory(10, 3)
    observation, successor = np.zeros((1, 2)), np.zeros((1, 2))
    for value in range(6):
        observation[:], successor[:] = value, value + 1
        memory.extend(transitions(observation, successor))
    observation[:], successor[:] = 99, 99
    assert memory.get_recent_states(np.zeros((1, 2)))[0, :, 0].tolist() == [4, 5, 0]
    batch = memory.sample_batch(200)
    assert batch.state1.max() == 6
    batch.state0[:] = 77  # and what is handed out is the caller's
    assert memory.sample_batch(200).state0.max() == 5


# -- The draw


def chi_square(memory, ids, draws):
    counts = np.bincount(memory.sample_batch(draws).index.ravel() - min(ids), minlength=max(ids) - min(ids) + 1)
    counts = counts[np.array(sorted(ids)) - min(ids)]
    assert counts.sum() == draws
    expected = draws / len(ids)
    return ((counts - expected) ** 2 / expected).sum()


@few
def test_draw_is_uniform():
    memory, _ = filled(1, 1, 64, 150)
    assert chi_square(memory, set(range(86, 150)), 100_000) < 103.4  # 63 degrees of freedom, p = 0.001


@few
def test_draw_is_uniform_among_the_fit_rows():
    memory, lanes = filled(3, 4, 64, 150, seed=1)
    ids = fit_ids(lanes, 64)
    assert 40 < len(ids) < 64
    degrees = len(ids) - 1
    assert chi_square(memory, ids, 100_000) < degrees + 3.3 * np.sqrt(2 * degrees) + 5  # about p = 0.001


def test_draw_ends_when_almost_no_row_is_fit():
    memory, observation = SequentialMemory(301, window_length=4), np.ones((100, 1))
    memory.begin_lanes(100)
    for value in range(10):
        memory.extend(transitions(observation * value, observation * value + 1))
    batch = memory.sample_batch(50, k=2)
    assert set(batch.index.ravel()) == {999}  # the only row whose window still is whole
    assert batch.state0[0, 0, :, 0].tolist() == [6, 7, 8, 9]


def test_no_row_is_fit():
    memory, observation = SequentialMemory(300, window_length=4), np.ones((100, 1))
    for _ in range(10):
        memory.extend(transitions(observation, observation))
    with pytest.raises(ValueError, match="limit=300 is too small for window_length=4 on 100 lanes"):
        memory.sample_batch(32)


def test_limit_must_hold_a_row_of_each_lane():
    with pytest.raises(ValueError, match="limit=3 cannot hold one transition of each of 4 lanes"):
        SequentialMemory(3).begin_lanes(4)
    memory = SequentialMemory(3)
    with pytest.raises(ValueError, match="4 lanes"):
        memory.extend(transitions(np.zeros((4, 1)), np.zeros((4, 1))))
    memory.extend(transitions(np.zeros((3, 1)), np.ones((3, 1))))
    memory.extend(transitions(np.ones((3, 1)), np.full((3, 1), 2.0)))
    assert memory.nb_entries == 3
    assert (memory.sample_batch(3).state1 == 2).all()


def test_fewer_rows_than_a_batch_repeat_and_say_so_once():
    memory, _ = filled(1, 1, 100, 5)
    with pytest.warns(UserWarning, match="5 transitions for a batch of 32: rows repeat") as caught:
        for _ in range(3):
            assert memory.sample_batch(32, k=2).reward.shape == (2, 32)
    assert len(caught) == 1
    assert caught[0].filename == __file__  # the line of the user, not one of the package
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        filled(1, 1, 100, 32)[0].sample_batch(32, k=4)


@pytest.mark.parametrize("sizes", [{"batch_size": 0}, {"batch_size": 4, "k": 0}, {"batch_size": -1}])
def test_sizes_below_one_are_refused(sizes):
    memory, _ = filled(1, 1, 100, 5)
    with pytest.raises(ValueError, match="batch_size and k must be at least 1"):
        memory.sample_batch(**sizes)
    with pytest.raises(ValueError, match="batch_size and k must be at least 1, got 0"):
        memory.sample(0)


def test_empty_memory_is_refused():
    memory = SequentialMemory(10)
    memory.begin_lanes(2)
    with pytest.raises(ValueError, match="memory is empty"):
        memory.sample_batch(4)
    with pytest.raises(ValueError, match="memory is empty"):
        memory.sample(4)


@pytest.mark.parametrize(
    "kwargs", [{"limit": 0}, {"limit": 1e6}, {"limit": 10, "window_length": 0}, {"limit": 10, "window_length": "4"}]
)
def test_constructor_refuses(kwargs):
    with pytest.raises(ValueError, match=f"{list(kwargs)[-1]} must be an integer and at least 1"):
        SequentialMemory(**kwargs)


def test_draws_come_from_the_memorys_generator_only():
    one, _ = filled(2, 2, 100, 60)
    two, _ = filled(2, 2, 100, 60)
    before = np.random.get_state()[1].copy()
    first = one.sample_batch(20)
    np.testing.assert_array_equal(first.index, two.sample_batch(20).index)
    np.testing.assert_array_equal(np.random.get_state()[1], before)
    state = one.get_random_state()
    again = one.sample_batch(20, rng=np.random.default_rng(3))  # leaves the memory's own stream alone
    assert one.get_random_state() == state
    np.testing.assert_array_equal(again.index, one.sample_batch(20, rng=np.random.default_rng(3)).index)
    later = one.sample_batch(20)
    one.set_random_state(state)
    np.testing.assert_array_equal(one.sample_batch(20).index, later.index)
    assert (first.index != later.index).any()


def test_global_seed_decides_the_draws_of_a_memory_without_one():
    def draw():
        memory, _ = filled(1, 1, 100, 50)
        memory._rng = None
        np.random.seed(7)
        return memory.sample_batch(30).index

    np.testing.assert_array_equal(draw(), draw())


# -- Bad input leaves the memory as it was


@few
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"observation": np.zeros((2, 4), np.float32)}, r"observation has shape \(2, 4\), expected \(2, 3\)"),
        ({"next_observation": np.zeros((2, 1), np.float32)}, "next_observation has shape"),
        ({"next_observation": np.zeros((1, 3), np.float32)}, "next_observation has shape"),
        ({"observation": np.zeros((2, 3), complex)}, "dtype complex128, but this memory holds float32"),
        ({"observation": {"a": np.zeros((2, 3))}}, "observation has shape"),
        ({"action": np.zeros((2, 2))}, "action has shape"),
        ({"action": np.zeros(2)}, "action has dtype float64, but this memory holds int64"),
        ({"reward": np.zeros((2, 1))}, "reward has shape"),
        ({"terminated": np.zeros(1, bool)}, "terminated has shape"),
    ],
)
def test_bad_rows_are_refused_whole(change, message):
    memory, lanes = filled(2, 1, 100, 10)
    good = lanes.step()
    lanes.rows[-2:] = []
    with pytest.raises(ValueError, match=message):
        memory.extend(SimpleNamespace(**{**vars(good), **change}))
    assert memory.nb_entries == 20
    check_batch(rows_of(memory.sample_batch(100)), lanes, 100)


def test_uint8_frames_refuse_floats():
    memory = SequentialMemory(10)
    frames = np.full((1, 4), 200, np.uint8)
    memory.extend(transitions(frames, frames))
    with pytest.raises(ValueError, match="dtype float32, but this memory holds uint8"):
        memory.extend(transitions(frames / np.float32(255), frames))


@pytest.mark.parametrize("observation", [np.array([[None]]), np.array([["x"]])])
def test_observations_must_be_numbers(observation):
    with pytest.raises(ValueError, match="arrays of numbers, got dtype"):
        SequentialMemory(10).extend(transitions(observation, observation))
    with pytest.raises(ValueError, match="arrays of numbers, got dtype"):
        SequentialMemory(10).get_recent_states(observation)


@pytest.mark.parametrize("window_length", [1, 3])
def test_other_number_of_lanes_needs_begin_lanes(window_length):
    memory, _ = filled(3, window_length, 100, 5)
    for call in (
        lambda: memory.extend(transitions(np.ones((1, 3)), np.ones((1, 3)))),
        lambda: memory.get_recent_states(np.ones((2, 3))),
    ):
        with pytest.raises(ValueError, match=r"lanes while 3 are open: call begin_lanes\(\d\) first"):
            call()


# -- Size and speed


def assert_slots_balance(memory):
    """Every slot of the extra store is either free or the successor of exactly one row."""
    successors = memory._rows["successor"][: memory.limit]
    used = ~successors[(successors < 0) & (successors > np.iinfo(np.int64).min)]
    assert sorted([*used, *memory._free]) == list(range(len(tree_leaves(memory._extra)[0])))


@pytest.mark.parametrize("limit", [1000, 1500, 5000])
def test_a_million_one_step_episodes_leak_nothing(limit):
    memory = SequentialMemory(limit)
    observation = np.ones((1000, 1), np.float32)
    transition = transitions(observation, observation + 1, terminated=np.ones(1000, bool))
    for _ in range(1000):
        memory.extend(transition)
    assert len(tree_leaves(memory._extra)[0]) <= limit
    assert memory.nbytes <= (limit + 1) * (4 + 40) + limit * 4
    assert_slots_balance(memory)


def test_a_waiting_lane_stores_its_frames_once_too():
    """Asynchronous lanes: most calls bring no step of most lanes, and their episodes go on."""
    memory, rng = SequentialMemory(1000), np.random.default_rng(0)
    steps = np.zeros((4, 1), np.float32)
    for _ in range(1000):
        valid = rng.random(4) < 0.3
        memory.extend(transitions(steps, steps + 1, valid=valid))
        steps = steps + valid[:, None]
    successors = memory._rows["successor"][:1000]
    assert np.sum(successors < 0) == 4  # of the newest row of each lane


def test_appended_row_that_was_overwritten_before_its_successor_came():
    memory = SequentialMemory(6)
    memory.begin_lanes(1)
    memory.append(np.full(1, 50.0), 0, 0.0, False)
    for value in range(6):
        memory.extend(one_lane([value], [value + 1]))
    memory.append(np.full(1, 51.0), 0, 0.0, False)
    batch = memory.sample_batch(6, k=50)
    np.testing.assert_array_equal(batch.state1, batch.state0 + 1)
    assert set(batch.state0.ravel()) == {1, 2, 3, 4, 5}


@pytest.mark.parametrize("limit", [8, 30, 300])
def test_random_use_leaks_nothing(limit):
    rng = np.random.default_rng(2)
    memory, lanes = filled(3, 2, limit, 10)
    for _ in range(30):
        nb_lanes = int(rng.integers(1, 9))
        memory.begin_lanes(nb_lanes)
        lanes.begin(nb_lanes)
        for _ in range(rng.integers(1, 20)):
            memory.extend(lanes.step(rng.random(nb_lanes) < 0.8, p_valid=0.9))
        for _ in range(rng.integers(0, 5)):
            memory.append(np.ones(3), 0, 0.0, rng.random() < 0.3)
        assert_slots_balance(memory)
    assert len(tree_leaves(memory._extra)[0]) <= limit


def resident(memory=None):
    """Bytes in RAM: of the process, which other tests make grow and shrink, too, or of a memory's arrays alone."""
    if memory is None:
        return psutil.Process().memory_info().rss
    spans = [(a.ctypes.data, a.ctypes.data + a.nbytes) for a in tree_leaves((memory._rows, memory._frames))]
    total = 0
    for mapping in psutil.Process().memory_maps(grouped=False):
        begin, end = (int(x, 16) for x in mapping.addr.split("-"))
        total += min(mapping.rss, sum(max(0, min(end, b) - max(begin, a)) for a, b in spans))
    return total


def test_a_million_atari_frames_take_at_most_7_2_gb_and_none_before_they_come():
    before = resident()
    memory = SequentialMemory(1_000_000, window_length=4)
    memory.begin_lanes(8)
    frames = np.ones((8, 84, 84), np.uint8)
    assert memory.nbytes == 0
    for _ in range(10):
        memory.extend(transitions(frames, frames))
    assert 7.056e9 <= memory.nbytes <= 7.2e9
    assert resident() - before < 200e6
    assert memory.sample_batch(8).state1.shape == (1, 8, 4, 84, 84)


def test_frames_are_stored_once():
    frames = np.random.default_rng(0).integers(0, 255, (8, 84, 84)).astype(np.uint8)
    memory = SequentialMemory(1_000_000, window_length=4)
    memory.extend(transitions(frames, frames))  # the links of all rows are written at once
    before, all_before = resident(memory), resident()
    for step in range(10_000 // 8):
        ended = np.full(8, step % 250 == 249)
        memory.extend(transitions(frames, frames, truncated=ended))
    assert memory.nb_entries == 10_008
    assert 0.99 * 10_000 * 84 * 84 <= resident(memory) - before <= 1.15 * 10_000 * 84 * 84
    assert resident() - all_before <= 1.6 * 10_000 * 84 * 84  # nor anywhere else


def best_time(function, repeats=7, number=100):
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(number):
            function()
        best = min(best, (time.perf_counter() - start) / number)
    return best


def test_time_to_sample_does_not_grow_with_the_memory():
    times = []
    for entries in (10_000, 1_000_000):
        memory = SequentialMemory(1_000_000)
        observation = np.ones((1000, 4), np.float32)
        for _ in range(entries // 1000):
            memory.extend(transitions(observation, observation))
        assert memory.nb_entries == entries
        times.append(best_time(lambda: memory.sample_batch(32)))  # noqa: B023
    assert times[1] <= 2 * times[0]


def test_hot_calls_are_fast():
    """Measured on an idle core: 22, 18 and 1 microseconds. The bounds allow for a loaded machine."""
    memory, lanes = filled(8, 1, 10_000, 2000, max_length=200)
    transition, observation = lanes.step(), lanes.observation()
    assert best_time(lambda: memory.sample_batch(32, k=8)) < 300e-6
    assert best_time(lambda: memory.extend(transition)) < 200e-6
    assert best_time(lambda: memory.get_recent_states(observation)) < 50e-6


# -- Copies and configuration


@few
@pytest.mark.parametrize("copied", [lambda m: pickle.loads(pickle.dumps(m)), copy.deepcopy])
def test_a_copy_goes_on_alike(copied):
    memory, lanes = filled(3, 3, 50, 40)
    memory.sample_batch(4)
    twin = copied(memory)
    for _ in range(10):
        transition = lanes.step()
        memory.extend(transition)
        twin.extend(transition)
        assert_same(tree_map(np.asarray, twin.sample_batch(20)), memory.sample_batch(20))
    assert_slots_balance(twin)


@pytest.mark.parametrize(
    "memory",
    [
        SequentialMemory(12, window_length=3, ignore_episode_boundaries=True),
        SequentialMemory(12),
        EpisodeParameterMemory(5, window_length=2),
    ],
)
def test_keras_serialises_the_configuration(memory):
    config = keras.saving.serialize_keras_object(memory)
    assert config["registered_name"] == f"rl>{type(memory).__name__}"
    twin = keras.saving.deserialize_keras_object(config)
    assert type(twin) is type(memory) and twin.get_config() == memory.get_config()
    assert type(memory).from_config(memory.get_config()).get_config() == memory.get_config()
    assert twin.nb_entries == 0


def test_base_class_stores_nothing():
    with pytest.raises(NotImplementedError, match="Memory does not define sample"):
        Memory(window_length=1).sample(1)


# -- Small parts


@pytest.mark.parametrize("window_length", [1, 2, 4])
def test_recent_frames_on_their_own(window_length):
    recent = RecentFrames(window_length)
    recent.begin(2)
    everywhere = np.array([True, True])
    for value in (1, 2, 3):
        recent.push(np.full((2, 1), value), everywhere, np.array([False, value == 2]))
    states = recent.states(np.full((2, 1), 4))[..., 0]
    assert states[0].tolist() == [1, 2, 3, 4][-window_length:]
    assert states[1].tolist() == [0, 0, 3, 4][-window_length:]
    recent.begin(1)
    assert recent.states(np.full((1, 1), 5))[..., 0].tolist() == [[0, 0, 0, 5][-window_length:]]


def test_sample_batch_indexes():
    indexes = sample_batch_indexes(3, 13, 10)
    assert sorted(indexes) == list(range(3, 13))
    with pytest.warns(UserWarning, match="Drew 20 indexes out of only 10"):
        indexes = sample_batch_indexes(3, 13, 20, np.random.default_rng(0))
    assert len(indexes) == 20 and set(indexes) <= set(range(3, 13))
    with pytest.raises(ValueError, match="empty range"):
        sample_batch_indexes(3, 3, 1)
    np.random.seed(1)
    first = sample_batch_indexes(0, 1000, 5)
    np.random.seed(1)
    np.testing.assert_array_equal(first, sample_batch_indexes(0, 1000, 5))


def test_zeroed_observation():
    zeros = zeroed_observation({"a": np.ones((2, 3), np.uint8), "b": (np.ones(4), 5)})
    assert zeros["a"].shape == (2, 3) and zeros["a"].dtype == np.uint8 and not zeros["a"].any()
    assert zeros["b"][0].shape == (4,) and zeros["b"][1] == 0
    assert [part.shape for part in zeroed_observation([np.ones(2), np.ones(3)])] == [(2,), (3,)]
    assert zeroed_observation(7) == 0


@pytest.mark.parametrize("maxlen", [1, 3, 5])
def test_ring_buffer(maxlen):
    buffer = RingBuffer(maxlen)
    assert buffer.length == len(buffer) == 0
    for value in range(12):
        buffer.append(value)
        expected = list(range(value + 1))[-maxlen:]
        assert [buffer[i] for i in range(len(buffer))] == expected
        assert buffer.length == len(expected)
    for index in (-1, maxlen):
        with pytest.raises(KeyError):
            buffer[index]


def test_episode_parameter_memory():
    memory = EpisodeParameterMemory(limit=3)
    with pytest.raises(ValueError, match="empty range"):
        memory.sample(1)
    for episode in range(5):
        for reward in (1.0, episode):
            memory.append(np.zeros(2), 0, reward, False)
        memory.append(np.zeros(2), 0, 1000.0, True, training=False)
        memory.finalize_episode(f"params {episode}")
        assert memory.nb_entries == min(3, episode + 1) and memory.intermediate_rewards == []
    assert memory.sample(2, batch_idxs=[0, 2]) == (["params 2", "params 4"], [3.0, 5.0])
    params, rewards = memory.sample(3)
    assert sorted(zip(rewards, params, strict=True)) == [(3.0, "params 2"), (4.0, "params 3"), (5.0, "params 4")]
    memory.rng = 4
    first = memory.sample(2)
    memory.rng = 4
    assert memory.sample(2) == first
