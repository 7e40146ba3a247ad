"""keras-rl's memory protocol: append, sample by index, get_recent_state.

The rules are written out once more over plain lists (`Reference`), where they are easy to check by reading.
"""

import numpy as np
import pytest

from rl.memory import Experience, Memory, SequentialMemory


class Reference:
    """Every step ever appended; the rules of keras-rl over them."""

    def __init__(self, window_length, ignore_boundaries):
        self.window_length, self.ignore_boundaries = window_length, ignore_boundaries
        self.steps = []  # (frame, action, reward, terminal)

    def starts(self, i):
        """Step i begins an episode: two steps ago one ended (the step in between holds its last frame)."""
        return i == 0 or (i >= 2 and self.steps[i - 2][3])

    def window(self, i, frame):
        """The frames that lead to `frame`, which is at place i."""
        frames = [frame]
        while len(frames) < self.window_length and i > 0:
            if self.starts(i) and not self.ignore_boundaries:
                break
            i -= 1
            frames.insert(0, self.steps[i][0])
        return [np.zeros_like(frame)] * (self.window_length - len(frames)) + frames

    def is_transition(self, i):
        """A successor is known, and step i is not the one that only holds a last frame."""
        return i + 1 < len(self.steps) and not (i > 0 and self.steps[i - 1][3])

    def state1(self, i):
        return self.window(i, self.steps[i][0])[1:] + [self.steps[i + 1][0]]


def frame(code):
    return np.array([code, -code, code + 0.5], np.float32)


def play(memory, reference, nb_steps, rng, p_end=0.25):
    """Appends random episodes as keras-rl's loop does, with the extra step at each end."""
    after_end = False
    for _ in range(nb_steps):
        code = len(reference.steps) + 1
        terminal = not after_end and rng.random() < p_end
        step = (frame(code), int(rng.integers(5)), 0.0 if after_end else float(code), terminal)
        state = memory.get_recent_state(step[0])
        np.testing.assert_array_equal(state, reference.window(len(reference.steps), step[0]))
        memory.append(*step)
        reference.steps.append(step)
        after_end = terminal


def check(experience, reference, i):
    np.testing.assert_array_equal(experience.state0, reference.window(i, reference.steps[i][0]))
    np.testing.assert_array_equal(experience.state1, reference.state1(i))
    assert (experience.action, experience.reward, experience.terminal1) == reference.steps[i][1:]


@pytest.mark.parametrize("ignore_boundaries", [False, True])
@pytest.mark.parametrize("window_length", [1, 2, 4])
@pytest.mark.parametrize("limit", [20, 1000])
def test_sample_by_index(window_length, limit, ignore_boundaries):
    rng = np.random.default_rng(0)
    memory = SequentialMemory(limit, window_length=window_length, ignore_episode_boundaries=ignore_boundaries)
    reference = Reference(window_length, ignore_boundaries)
    for _ in range(4):
        play(memory, reference, 30, rng)
        first = len(reference.steps) - memory.nb_entries
        assert memory.nb_entries == min(limit, len(reference.steps))
        for idx in range(window_length, memory.nb_entries - 1):
            (experience,) = memory.sample(1, batch_idxs=[idx])
            if reference.is_transition(first + idx):
                check(experience, reference, first + idx)
            else:  # replaced by another one
                replaced = int(experience.state0[-1][0]) - 1
                assert reference.is_transition(replaced)
                check(experience, reference, replaced)


@pytest.mark.parametrize("window_length", [1, 3])
def test_random_sample_reaches_all_transitions(window_length):
    memory, reference = SequentialMemory(50, window_length=window_length), Reference(window_length, False)
    memory.rng = 1
    play(memory, reference, 120, np.random.default_rng(1))
    drawn = set()
    with pytest.warns(UserWarning, match="rows repeat"):
        experiences = memory.sample(2000)
    for experience in experiences:
        assert isinstance(experience, Experience)
        assert len(experience.state0) == len(experience.state1) == window_length
        i = int(experience.state0[-1][0]) - 1
        check(experience, reference, i)
        drawn.add(i)
    oldest = 120 - 50
    inside = {i for i in range(oldest, 120) if reference.is_transition(i)}
    assert drawn <= inside
    # Missing are only those at the far end, whose window is overwritten.
    assert all(i < oldest + window_length - 1 for i in inside - drawn)


def test_two_episodes_step_by_step():
    memory = SequentialMemory(3, window_length=2)
    observations = [np.random.random((3, 4)) for _ in range(6)]
    zeros = np.zeros((3, 4))

    def recent(observation):
        state = np.array(memory.get_recent_state(observation))
        assert state.shape == (2, 3, 4)
        return state

    def same(state, first, second):
        np.testing.assert_allclose(state, [first, second])

    same(recent(observations[0]), zeros, observations[0])
    memory.append(observations[0], 0, 0.0, False)
    same(recent(observations[1]), observations[0], observations[1])
    memory.append(observations[1], 0, 0.0, False)
    memory.append(observations[2], 0, 0.0, True)
    same(recent(observations[3]), observations[2], observations[3])
    memory.append(observations[3], 0, 0.0, False)
    same(recent(observations[4]), zeros, observations[4])
    memory.append(observations[4], 0, 0.0, False)
    same(recent(observations[5]), observations[4], observations[5])


def test_sample_of_seven_steps():
    memory = SequentialMemory(100, window_length=2)
    observations = [np.random.random((3, 4)) for _ in range(7)]
    for i, observation in enumerate(observations):
        memory.append(observation, i % 5, i / 10, i == 2)
    assert memory.nb_entries == 7
    one, replaced, three, four = memory.sample(batch_size=4, batch_idxs=[2, 3, 4, 5])
    np.testing.assert_allclose(one.state0, observations[1:3])
    np.testing.assert_allclose(one.state1, observations[2:4])
    assert (one.action, one.terminal1) == (2, True) and np.isclose(one.reward, 0.2)
    assert not np.allclose(replaced.state0[-1], observations[3])
    np.testing.assert_allclose(three.state0, [np.zeros((3, 4)), observations[4]])
    np.testing.assert_allclose(three.state1, observations[4:6])
    np.testing.assert_allclose(four.state0, observations[4:6])
    assert not three.terminal1 and not four.terminal1


@pytest.mark.parametrize("training", [True, False])
def test_training_flag(training):
    memory = SequentialMemory(3, window_length=2)
    observations = [np.random.random((3, 4)) for _ in range(3)]
    for i in range(2):
        memory.append(observations[i], 0, 0.0, False, training=training)
        np.testing.assert_allclose(memory.get_recent_state(observations[i + 1]), observations[i : i + 2])
        assert memory.nb_entries == (i + 1 if training else 0)


def test_steps_that_are_not_stored_leave_no_wrong_window():
    memory = SequentialMemory(100, window_length=2)
    for code in range(1, 10):
        memory.append(frame(code), 0, 0.0, False, training=code not in (4, 5))
    with pytest.warns(UserWarning, match="rows repeat"):
        experiences = memory.sample(300)
    windows = {(int(e.state0[0][0]), int(e.state0[1][0]), int(e.state1[1][0])) for e in experiences}
    assert windows == {(0, 1, 2), (1, 2, 3), (6, 7, 8), (7, 8, 9)}


def test_fields_by_index_oldest_first():
    memory = SequentialMemory(4)
    for code in range(1, 8):
        memory.append(frame(code), code % 3, code / 2, code == 5)
        codes = list(range(max(1, code - 3), code + 1))
        assert len(memory.observations) == len(memory.actions) == len(memory.rewards) == len(codes)
        assert [row[0] for row in memory.observations] == codes
        assert list(memory.actions) == [c % 3 for c in codes]
        assert list(memory.rewards[:]) == [c / 2 for c in codes]
        assert list(memory.terminals) == [c == 5 for c in codes]
        assert memory.rewards[-1] == code / 2
    with pytest.raises(IndexError):
        memory.rewards[4]


@pytest.mark.parametrize("batch_idxs", [[-1, 2], [2, 10], [2], [[2, 3]]])
def test_wrong_indexes_are_refused(batch_idxs):
    memory = SequentialMemory(20)
    for code in range(10):
        memory.append(frame(code), 0, 0.0, False)
    with pytest.raises(ValueError, match="Expected 2 batch_idxs from 0 to 9"):
        memory.sample(2, batch_idxs=batch_idxs)


def test_newest_step_has_no_successor_yet():
    memory = SequentialMemory(20)
    memory.append(frame(1), 0, 0.0, False)
    with pytest.raises(ValueError, match="can be drawn"):
        memory.sample(1)
    memory.append(frame(2), 0, 0.0, False)
    (experience,) = memory.sample(1, batch_idxs=[1])
    np.testing.assert_array_equal(experience.state1, [frame(2)])


@pytest.mark.parametrize("window_length", [1, 2, 3])
def test_steps_in_which_the_environment_reuses_its_array(window_length):
    memory = SequentialMemory(20, window_length=window_length)
    observation = np.zeros(2)
    for code in range(1, 6):
        observation[:] = code
        assert [f[0] for f in memory.get_recent_state(observation)] == [
            max(0, code - age) for age in reversed(range(window_length))
        ]
        memory.append(observation, 0, 0.0, False)
    observation[:] = 99
    assert [row[0] for row in memory.observations] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("kind", [tuple, list, lambda parts: dict(zip("ab", parts, strict=True))])
def test_several_inputs(kind):
    memory = SequentialMemory(20, window_length=2)
    for code in range(1, 6):
        observation = kind([np.full(2, code), np.full((2, 3), -code)])
        first, second = memory.get_recent_state(observation)
        parts = list(first.values() if isinstance(first, dict) else first)
        assert [part.shape for part in parts] == [(2,), (2, 3)]
        assert (parts[0] == code - 1).all() and (parts[1] == 1 - code).all()
        memory.append(observation, 0, 0.0, False)
    (experience,) = memory.sample(1, batch_idxs=[2])
    parts = list(experience.state1[-1].values() if kind not in (tuple, list) else experience.state1[-1])
    assert (parts[0] == 4).all() and (parts[1] == -4).all() and parts[1].shape == (2, 3)


def test_continuous_actions():
    memory = SequentialMemory(20)
    for code in range(4):
        memory.append(frame(code), np.array([code, 0.5]), 0.0, False)
    (experience,) = memory.sample(1, batch_idxs=[2])
    np.testing.assert_array_equal(experience.action, [2, 0.5])


def test_appended_steps_and_lanes_share_a_memory():
    memory = SequentialMemory(100, window_length=2)
    memory.begin_lanes(1)
    for code in range(1, 6):
        memory.append(frame(code), 0, 0.0, False)
        observation, successor = frame(100 + code)[None], frame(101 + code)[None]
        state = memory.get_recent_states(observation)
        assert state[0, 0, 0] == (100 + code - 1 if code > 1 else 0)
        memory.extend(
            type(
                "Row",
                (),
                {
                    "observation": observation,
                    "next_observation": successor,
                    "action": np.zeros(1, int),
                    "reward": np.zeros(1),
                    "terminated": np.array([False]),
                    "truncated": np.array([False]),
                    "valid": np.array([True]),
                },
            )
        )
    with pytest.warns(UserWarning, match="rows repeat"):
        experiences = memory.sample(400)
    windows = {(int(e.state0[0][0]), int(e.state0[1][0]), int(e.state1[1][0])) for e in experiences}
    appended = {(max(0, code - 1), code, code + 1) for code in range(1, 5)}
    lane = {(99 + code if code > 1 else 0, 100 + code, 101 + code) for code in range(1, 6)}
    assert windows == appended | lane


def test_begin_lanes_closes_the_appended_window_too():
    memory = SequentialMemory(100, window_length=2)
    memory.append(frame(1), 0, 0.0, False)
    memory.begin_lanes(1)
    np.testing.assert_array_equal(memory.get_recent_state(frame(2)), [np.zeros(3), frame(2)])
    memory.append(frame(2), 0, 0.0, False)
    memory.append(frame(3), 0, 0.0, False)
    (experience,) = memory.sample(1)  # the step before the call never learns its successor
    np.testing.assert_array_equal(experience.state0, [np.zeros(3), frame(2)])


def test_configuration():
    config = {"limit": 7, "window_length": 2, "ignore_episode_boundaries": True}
    assert SequentialMemory(7, window_length=2, ignore_episode_boundaries=True).get_config() == config
    assert SequentialMemory.from_config(config).get_config() == config


def test_users_subclass_of_memory():
    """A user's own memory calls `Memory.append` and defines `sample`."""

    class Latest(Memory):
        def append(self, observation, action, reward, terminal, training=True):
            super().append(observation, action, reward, terminal, training=training)
            self.latest = reward

        def sample(self, batch_size, batch_idxs=None):
            return [self.latest] * batch_size

    memory = Latest(window_length=3, ignore_episode_boundaries=False)
    for code in range(1, 4):
        memory.append(frame(code), 0, float(code), False)
    assert memory.sample(2) == [3.0, 3.0]
    np.testing.assert_array_equal(memory.get_recent_state(frame(4)), [frame(2), frame(3), frame(4)])
    assert memory.get_config() == {"window_length": 3, "ignore_episode_boundaries": False}
