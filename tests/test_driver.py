import re
import subprocess
import sys
from functools import partial

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from rl.driver import EnvDriver, Transition

MODES = [mode.value for mode in AutoresetMode]


class CountingEnv(gymnasium.Env):
    """Observes (env id, episode, step, last action): stale, shifted and swapped rows show by value.

    Episodes take turns in length. `end` says how they end: "terminated", "truncated" or "both".
    """

    def __init__(self, env_id=0, lengths=(3, 5, 4), end="terminated", action_space=None, dtype=np.float64, reuse=True):
        self.env_id, self.lengths, self.end, self.reuse = env_id, lengths, end, reuse
        self.observation_space = spaces.Box(-np.inf, np.inf, (4,), dtype)
        self.action_space = action_space or spaces.Discrete(5)
        self.episode, self.nb_steps, self.nb_resets, self.seeds, self.actions, self.finals = -1, 0, 0, [], [], []
        self.buffer = np.zeros(4, dtype)
        self.step_count = None

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.seeds.append(seed)
        self.episode += 1
        self.nb_resets += 1
        self.step_count, self.last_action = 0, -1
        return self.observe(), {"reset_of": self.episode}

    def observe(self):
        self.buffer[:] = self.env_id, self.episode, self.step_count, self.last_action
        return self.buffer if self.reuse else self.buffer.copy()  # many envs return their own array

    def step(self, action):
        assert self.step_count is not None, "stepped after the end of an episode"
        self.actions.append(action)
        self.nb_steps += 1
        self.step_count += 1
        self.last_action = float(np.sum(action))
        over = self.step_count == self.lengths[self.episode % len(self.lengths)]
        observation, info = self.observe(), {"step": self.step_count, "episode": self.episode}
        if over:
            self.finals.append(tuple(self.buffer))
            self.step_count = None
        terminated, truncated = over and self.end != "truncated", over and self.end != "terminated"
        return observation, self.env_id * 100.0 + info["step"], terminated, truncated, info


class OldEnv:
    """The older API: reset() -> observation, step() -> 4 values; no base class, no space declared."""

    def __init__(self, *args, spaced=False, **kwargs):
        self.inner = CountingEnv(*args, **kwargs)
        if spaced:
            self.observation_space, self.action_space = self.inner.observation_space, self.inner.action_space

    def __getattr__(self, name):
        if name in ("inner", "observation_space", "action_space", "unwrapped", "closed", "num_envs", "spec"):
            raise AttributeError(name)
        return getattr(self.inner, name)

    def reset(self):
        return self.inner.reset()[0]

    def step(self, action):
        observation, reward, terminated, truncated, info = self.inner.step(action)
        if truncated:
            info = {**info, "TimeLimit.truncated": not terminated}
        return observation, reward, terminated or truncated, info

    def seed(self, seed):
        self.inner.seeds.append(("old", seed))


def make(kind, nb_lanes=1, copy=True, cls=CountingEnv, **kwargs):
    """An env of some kind and the plain envs inside it. Lengths differ from lane to lane."""
    lengths = kwargs.pop("lengths", (3, 5, 4))
    if kind == "sync SameStep":
        kwargs["reuse"] = False  # Gymnasium itself keeps a reference only: the reset would overwrite final_obs
    turned = [lengths[i % len(lengths) :] + lengths[: i % len(lengths)] for i in range(nb_lanes)]
    inner = [cls(i, lengths=turned[i], **kwargs) for i in range(nb_lanes)]
    fns = [lambda env=env: env for env in inner]
    library, _, mode = kind.partition(" ")
    if library == "old":
        return OldEnv(0, lengths=lengths, **kwargs), None
    if library == "single":
        return inner[0], inner
    if library == "dummy":
        from rl.common.vec_env import DummyVecEnv

        return DummyVecEnv(fns, autoreset_mode=AutoresetMode(mode)), inner
    return gymnasium.vector.SyncVectorEnv(fns, copy=copy, autoreset_mode=mode), inner


VECTOR = [f"{library} {mode}" for library in ("dummy", "sync") for mode in MODES]
KINDS = [("single", 1), ("old", 1), *((kind, n) for kind in VECTOR for n in (1, 3))]
every_kind = pytest.mark.parametrize(("kind", "nb_lanes"), KINDS)
three_lanes = pytest.mark.parametrize("kind", VECTOR)


def play(driver, nb_calls, seed=0):
    """Random actions; returns the valid rows of each lane, and checks what holds in every call."""
    rng = np.random.default_rng(seed)
    rows = [[] for _ in range(driver.nb_lanes)]
    for _ in range(nb_calls):
        observation = driver.observe()
        assert driver.observe() is observation  # a second call changes nothing
        action = rng.integers(5, size=driver.nb_lanes)
        started = driver.started
        row = driver.step(action)
        np.testing.assert_array_equal(started[row.valid], driver.episode_step[row.valid] == 1)
        assert not (started & ~row.valid).any() and not driver.started.any()
        assert isinstance(row, Transition) and row.observation is observation
        assert row.reward.dtype == np.float32 and row.terminated.dtype == row.truncated.dtype == bool
        assert row.valid.dtype == bool and len(row.info) == driver.nb_lanes
        np.testing.assert_array_equal(row.action, action)
        assert not ((row.terminated | row.truncated) & ~row.valid).any() and not row.reward[~row.valid].any()
        for i in np.flatnonzero(row.valid):
            rows[i].append((*(row[k][i].copy() for k in range(6)), row.info[i], int(driver.episode_step[i])))
    return rows


def check_rows(rows, inner):
    """The oracle: what was handed out is what the envs did, once each, in order and in their own lane."""
    for lane, (mine, env) in enumerate(zip(rows, inner, strict=True)):
        assert len(mine) == env.nb_steps
        for n, (observation, action, reward, following, terminated, truncated, info, length) in enumerate(mine):
            assert observation[0] == following[0] == lane
            assert observation[1] == following[1]
            assert observation[2] + 1 == following[2] == info["step"]
            assert following[3] == action and reward == lane * 100 + info["step"]
            assert info["episode"] == observation[1]
            assert length == info["step"]
            if n + 1 < len(mine):
                if terminated or truncated:
                    assert mine[n + 1][0][1] == observation[1] + 1
                    assert mine[n + 1][0][2] == 0
                else:
                    np.testing.assert_array_equal(mine[n + 1][0], following)


@every_kind
def test_rows_are_the_real_transitions(kind, nb_lanes):
    env, inner = make(kind, nb_lanes)
    inner = inner or [env.inner]
    driver = EnvDriver(env)
    rows = play(driver, 40)
    check_rows(rows, inner)
    assert driver.nb_lanes == nb_lanes and driver.is_vector == (kind not in ("single", "old"))
    for mine, one in zip(rows, inner, strict=True):
        assert len(one.finals) >= 5
        assert [tuple(row[3]) for row in mine if row[4] or row[5]] == one.finals
        assert all(row[4] for row in mine if row[4] or row[5])


@pytest.mark.parametrize("kind", ["single", "dummy SameStep", "dummy NextStep"])
def test_passing_the_same_object_on(kind):
    env, _ = make(kind, 1 if kind == "single" else 3, lengths=(4,))
    driver = EnvDriver(env)
    for _ in range(3):
        first = driver.observe()
        assert driver.started.all()
        for _ in range(3):
            row = driver.step(np.zeros(driver.nb_lanes, int))
            assert driver.observe() is row.next_observation
            assert not driver.started.any()
        assert (first[:, 2] == 0).all()
        row = driver.step(np.zeros(driver.nb_lanes, int))
        assert row.terminated.all() and (row.next_observation[:, 2] == 4).all()
        if "NextStep" in kind:
            driver.observe()
            assert not driver.started.any()
            row = driver.step(np.zeros(driver.nb_lanes, int))
            assert not row.valid.any() and not row.reward.any() and not row.terminated.any()
            assert (driver.episode_step == 4).all()  # until the next one begins


@every_kind
@pytest.mark.parametrize("end", ["terminated", "truncated", "both"])
def test_ends_are_not_merged(kind, nb_lanes, end):
    env, _ = make(kind, nb_lanes, end=end)
    driver = EnvDriver(env)
    ended = [row for rows in play(driver, 30) for row in rows if row[4] or row[5]]
    assert ended
    for row in ended:
        # An old env's `done` cannot say both.
        assert (row[4], row[5]) == (end != "truncated", end != "terminated" and not (kind == "old" and end == "both"))


@every_kind
@pytest.mark.parametrize("limit", [1, 2, 4])
def test_limit_on_episodes(kind, nb_lanes, limit):
    env, inner = make(kind, nb_lanes)
    inner = inner or [env.inner]
    driver = EnvDriver(env, nb_max_episode_steps=limit)
    rows = play(driver, 40)
    check_rows(rows, inner)
    for mine in rows:
        lengths = [row[7] for row in mine if row[4] or row[5]]
        assert len(lengths) > 5
        assert max(lengths) == limit
        for row in mine:
            natural = row[7] == (3, 5, 4)[int(row[0][0] + row[0][1]) % 3]
            assert row[4] == natural
            assert row[5] == (row[7] == limit and not natural)


@every_kind
def test_start_steps(kind, nb_lanes):
    env, inner = make(kind, nb_lanes, lengths=(7, 8, 9))
    inner = inner or [env.inner]
    seen = []

    def policy(observation):
        seen.append(observation.copy())
        return 3

    driver = EnvDriver(env, nb_max_start_steps=4, start_step_policy=policy)
    driver.reset(seed=5)
    rows = play(driver, 200)
    starts = [[row[0][2] for n, row in enumerate(mine) if n == 0 or mine[n - 1][4]] for mine in rows]
    assert {0, 1, 2, 3} == {start for lane in starts for start in lane}
    for lane, (mine, one) in enumerate(zip(rows, inner, strict=True)):
        shown = {(row[0][1], row[0][2]) for row in mine}
        played = {(o[1], o[2]) for o in seen if o[0] == lane}
        assert len(shown) == len(mine) and not shown & played
        assert len(mine) + len(played) == one.nb_steps
        for n, row in enumerate(mine):
            assert row[0][2] + 1 == row[3][2] and row[0][1] == row[3][1] and row[3][3] == row[1]
            if n and not mine[n - 1][4]:
                np.testing.assert_array_equal(mine[n - 1][3], row[0])
            assert row[7] == row[3][2] - starts[lane][int(row[0][1])]
    again, _ = make(kind, nb_lanes, lengths=(7, 8, 9))
    driver = EnvDriver(again, nb_max_start_steps=4, start_step_policy=policy)
    driver.reset(seed=5)
    for mine, other in zip(rows, play(driver, 200), strict=True):
        np.testing.assert_array_equal([row[0] for row in mine], [row[0] for row in other])


@every_kind
def test_episodes_that_end_within_their_start_steps(kind, nb_lanes):
    # A plain reset then and no start steps for that one episode; no endless loop.
    env, inner = make(kind, nb_lanes, lengths=(1,))
    inner = inner or [env.inner]
    driver = EnvDriver(env, nb_max_start_steps=3, start_step_policy=lambda observation: 0)
    driver.reset(seed=3)
    for mine, one in zip(play(driver, 80), inner, strict=True):
        assert all(row[0][2] == 0 and row[4] for row in mine)
        lost = set(range(one.episode)) - {int(row[0][1]) for row in mine}
        assert len(lost) > 5 and not lost & {episode + 1 for episode in lost}


def test_start_steps_sample_the_action_space_without_shifting_it():
    def run(nb_start_steps, seed=None):
        env, inner = make("dummy SameStep", 3, lengths=(9, 8))
        env.action_space.seed(1)
        np.random.seed(7)
        driver = EnvDriver(env, nb_max_start_steps=nb_start_steps)
        driver.reset(seed=seed)
        play(driver, 20)
        return [one.actions for one in inner], env.action_space.sample(), np.random.random()

    plain, sample, number = run(0)
    started, same_sample, other = run(6)
    assert sample == same_sample and number != other
    assert run(6) == (started, sample, other) and started != plain
    assert run(6, seed=4)[0] == run(6, seed=4)[0] != run(6, seed=5)[0]
    assert run(6, seed=4)[2] == number  # a seeded driver leaves NumPy's global generator alone
    assert {action for one in started for action in one} == {0, 1, 2, 3, 4}


def test_start_steps_of_an_env_without_action_space():
    with pytest.raises(ValueError, match="start_step_policy"):
        EnvDriver(OldEnv(), nb_max_start_steps=3)
    assert EnvDriver(OldEnv(spaced=True), nb_max_start_steps=3).reset(seed=0).shape == (1, 4)


@every_kind
def test_reset_in_the_middle(kind, nb_lanes):
    env, inner = make(kind, nb_lanes, lengths=(6, 7, 8))
    driver = EnvDriver(env)
    for seed in (None, 3, np.int64(4)):
        play(driver, 4)
        observation = driver.reset(seed=seed)
        assert driver.started.all() and not driver.episode_step.any()
        assert not observation[:, 2].any()
        assert driver.observe() is observation
        if seed is not None and kind != "old":
            assert [one.seeds[-1] for one in inner] == [seed + i for i in range(nb_lanes)]
            assert all(type(one.seeds[-1]) is int for one in inner)
        if seed is not None and kind == "old":
            assert env.inner.seeds[-2] == ("old", seed)  # then the reset itself, without one
        row = driver.step(np.zeros(nb_lanes, int))
        assert row.valid.all() and (row.next_observation[:, 2] == 1).all()
        assert (driver.episode_step == 1).all() and not driver.started.any()
    with pytest.raises(TypeError):
        driver.reset(seed=1.5)


@three_lanes
def test_reset_infos(kind):
    env, inner = make(kind, 3)
    driver = EnvDriver(env, nb_max_episode_steps=4)
    for _ in range(25):
        observation = driver.observe()
        for i in np.flatnonzero(driver.started):
            assert driver.reset_infos[i]["reset_of"] == observation[i, 1] == inner[i].episode
        driver.step(np.zeros(3, int))


@three_lanes
def test_episode_steps_and_starts(kind):
    env, _ = make(kind, 3)
    driver = EnvDriver(env)
    begun = []
    for _ in range(30):
        observation = driver.observe()
        begun += [tuple(observation[i, :3]) for i in np.flatnonzero(driver.started)]
        row = driver.step(np.zeros(3, int))
        np.testing.assert_array_equal(driver.episode_step[row.valid], row.next_observation[row.valid, 2])
    assert all(step == 0 for _, _, step in begun)
    assert len(begun) == len(set(begun)) > 15
    assert {episode for lane, episode, _ in begun if lane == 1} == set(range(sum(b[0] == 1 for b in begun)))


@pytest.mark.parametrize("kind", ["sync SameStep", "sync NextStep", "sync Disabled"])
def test_a_vector_env_that_hands_out_its_own_buffer(kind):
    env, inner = make(kind, 3, copy=False)
    check_rows(play(EnvDriver(env), 40), inner)


def test_a_vector_env_that_reuses_its_flags_and_rewards():
    env, _ = make("dummy SameStep", 3)
    step, kept = env.step, [np.zeros(3), np.zeros(3, bool), np.zeros(3, bool)]

    def reusing(actions):
        observation, *new, info = step(actions)
        for array, value in zip(kept, new, strict=True):
            array[:] = value
        return observation, *kept, info

    env.step = reusing
    driver = EnvDriver(env, nb_max_episode_steps=4)
    rows, copies = [], []
    for _ in range(12):
        driver.observe()
        rows.append(driver.step(np.zeros(3, int)))
        copies.append([array.copy() for array in (rows[-1].reward, rows[-1].terminated, rows[-1].truncated)])
    for row, copied in zip(rows, copies, strict=True):
        np.testing.assert_array_equal([row.reward, row.terminated, row.truncated], copied)
    assert any(row.truncated.any() for row in rows)


def test_order_of_calls():
    for kind in ("single", "sync Disabled", "dummy SameStep"):
        env, _ = make(kind, 1, lengths=(2,))
        driver = EnvDriver(env)
        with pytest.raises(RuntimeError, match="observe"):
            driver.step([0])
        driver.observe()
        driver.step([0])
        assert driver.step([0]).terminated  # nothing ended before: observe() may be left out
        with pytest.raises(RuntimeError, match="observe"):
            driver.step([0])
        assert driver.observe()[0, 2] == 0
        assert driver.step([0]).valid


# Actions


@pytest.mark.parametrize("kind", ["single", "old", "dummy SameStep", "sync NextStep"])
def test_discrete_actions_that_start_at_five(kind):
    nb_lanes = 1 if kind in ("single", "old") else 3
    if kind == "old":
        env = OldEnv(action_space=spaces.Discrete(3, start=5), spaced=True)
        inner = [env.inner]
    else:
        env, inner = make(kind, nb_lanes, action_space=spaces.Discrete(3, start=5))
    driver = EnvDriver(env)
    rng = np.random.default_rng(0)
    for _ in range(30):
        driver.observe()
        action = rng.integers(3, size=nb_lanes)
        row = driver.step(action)
        np.testing.assert_array_equal(row.action, action)
        np.testing.assert_array_equal(row.next_observation[row.valid, 3], action[row.valid] + 5)
    assert {int(action) for one in inner for action in one.actions} == {5, 6, 7}
    if nb_lanes == 1:
        assert all(type(action) is int for action in inner[0].actions)


@pytest.mark.parametrize("kind", ["single", "dummy SameStep", "dummy NextStep", "sync Disabled"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int8])
def test_box_actions_are_clipped(kind, dtype):
    nb_lanes = 1 if kind == "single" else 3
    space = spaces.Box(np.array([-1, 0], dtype), np.array([1, 3], dtype), dtype=dtype)
    env, inner = make(kind, nb_lanes, action_space=space)
    driver = EnvDriver(env)
    rng = np.random.default_rng(0)
    for _ in range(30):
        driver.observe()
        action = rng.normal(size=(nb_lanes, 2), scale=3).astype(np.float32)
        kept = action.copy()
        row = driver.step(action)
        np.testing.assert_array_equal(row.action, kept)
        expected = np.clip(action, space.low, space.high).astype(dtype).sum(-1)
        np.testing.assert_allclose(row.next_observation[row.valid, 3], expected[row.valid], rtol=1e-6)
    for one in inner:
        assert all(action.dtype == dtype and action.shape == (2,) and space.contains(action) for action in one.actions)
        assert {-1.0, 1.0} <= {float(action[0]) for action in one.actions}


def test_flat_actions_take_the_shape_of_the_box():
    env, inner = make("dummy SameStep", 3, action_space=spaces.Box(-1, 1, (2, 3)))
    driver = EnvDriver(env)
    driver.observe()
    driver.step(np.arange(18, dtype=np.float32).reshape(3, 6) / 20)
    np.testing.assert_allclose(inner[1].actions[0], np.arange(6, 12).reshape(2, 3) / 20, rtol=1e-6)


class Strict(gymnasium.Env):
    """Observes the last action, and the number of steps in the episode; takes members of its action space only."""

    def __init__(self, action_space):
        self.action_space = action_space
        self.observation_space = spaces.Box(-99, 99, (spaces.flatdim(spaces.Box(0, 1, action_space.shape)) + 1,))

    def observe(self, action):
        return np.append(np.ravel(action), self.step_count).astype(np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.step_count = 0
        return self.observe(np.zeros(self.action_space.shape)), {}

    def step(self, action):
        assert self.action_space.contains(action), f"{action!r} is not in {self.action_space}"
        self.step_count += 1
        return self.observe(action), 0.0, self.step_count == 7, False, {}


@pytest.mark.parametrize("nb_start_steps", [0, 4])
@pytest.mark.parametrize("kind", ["single", "dummy", "subproc", "gymnasium"])
@pytest.mark.parametrize(
    "space",
    [
        spaces.MultiDiscrete([2, 3, 4], start=[5, -1, 1]),
        spaces.MultiDiscrete([[2, 3], [4, 5]], start=[[1, 2], [-3, 0]]),
        spaces.MultiBinary((2, 3)),
        spaces.Box(-1, 1, (2, 3)),
    ],
)
def test_flat_actions_that_count_from_0_become_members_of_the_space(space, kind, nb_start_steps):
    from rl.common.vec_env import DummyVecEnv, SubprocVecEnv

    nb_lanes = 1 if kind == "single" else 3
    makers = [partial(Strict, space)] * nb_lanes
    env = {
        "single": lambda: Strict(space),
        "dummy": lambda: DummyVecEnv(makers),
        "subproc": lambda: SubprocVecEnv(makers),
        "gymnasium": lambda: gymnasium.vector.SyncVectorEnv(makers),
    }[kind]()
    driver = EnvDriver(env, nb_max_start_steps=nb_start_steps)
    driver.reset(seed=0)
    start = np.ravel(getattr(space, "start", 0))
    nb_valid, starts = 0, set()
    rng = np.random.default_rng(0)
    size = int(np.prod(space.shape))
    for _ in range(40):
        observation = driver.observe()
        starts.update(observation[driver.started, -1].tolist())
        if isinstance(space, spaces.Box):
            action = rng.uniform(-1, 1, (nb_lanes, size)).astype(np.float32)
        else:
            action = rng.integers(np.ravel(getattr(space, "nvec", 2)), size=(nb_lanes, size))
        row = driver.step(action)
        assert row.action is action
        np.testing.assert_array_equal(row.next_observation[row.valid, :-1], (action + start)[row.valid])
        nb_valid += row.valid.sum()
    env.close()
    assert nb_valid > 20 * nb_lanes
    assert starts == {0} if nb_start_steps == 0 else len(starts) > 1


def test_bad_actions_touch_nothing():
    env, inner = make("dummy SameStep", 3, action_space=spaces.Box(-1, 1, (2,)))
    driver = EnvDriver(env)
    driver.observe()
    for bad, message in [
        (np.zeros((2, 2)), "3 actions"),
        (np.float32(1), "3 actions"),
        (np.zeros((3, 3)), r"shape \(2,\)"),
        (np.array([[0, 0], [0, np.nan], [0, 0]]), "NaN"),
    ]:
        with pytest.raises(ValueError, match=message):
            driver.step(bad)
    assert inner[0].nb_steps == 0
    assert driver.step(np.zeros((3, 2))).valid.all()


# Repetition


def test_action_repetition():
    class Telling(CountingEnv):
        def step(self, action):
            observation, reward, terminated, truncated, info = super().step(action)
            more = {"n": 1, "x": np.float64(0.5), "flag": True, "text": "a", "mask": np.ones(2, bool), "none": None}
            if terminated:
                more["last"] = 3
            return observation, reward, terminated, truncated, info | more

    env = Telling(lengths=(5, 9))
    driver = EnvDriver(env, action_repetition=3)
    driver.observe()
    row = driver.step([2])
    assert env.actions == [2, 2, 2]
    assert row.reward == 1 + 2 + 3 and row.observation[0, 2] == 0 and row.next_observation[0, 2] == 3
    info = row.info[0]
    assert info["n"] == 3 and info["x"] == 1.5 and info["flag"] is True and info["text"] == "a"
    assert info["mask"].dtype == bool and info["none"] is None and info["step"] == 1 + 2 + 3
    assert driver.episode_step == 1
    driver.observe()
    row = driver.step([4])
    assert env.actions[3:] == [4, 4] and row.terminated and row.reward == 4 + 5 and row.info[0]["last"] == 3
    assert driver.observe()[0, 1] == 1
    assert driver.step([1]).reward == 1 + 2 + 3


def test_action_repetition_counts_the_agents_steps():
    env = CountingEnv(lengths=(20,))
    driver = EnvDriver(env, action_repetition=4, nb_max_episode_steps=2)
    driver.observe()
    driver.step([0])
    driver.observe()
    row = driver.step([0])
    assert row.truncated and not row.terminated and row.next_observation[0, 2] == 8


def test_action_repetition_leaves_an_unrepeated_info_alone():
    class Same(CountingEnv):
        info = {"array": np.ones(3), "nested": {"a": 1}}

        def step(self, action):
            return *super().step(action)[:4], self.info

    driver = EnvDriver(Same())
    driver.observe()
    assert driver.step([0]).info[0] is Same.info


def test_numbers_out_of_range():
    for name, values in {
        "action_repetition": (0, -1, 1.5, "2"),
        "nb_max_episode_steps": (0, -3, 2.5),
        "nb_max_start_steps": (-1, 0.5, None),
    }.items():
        for value in values:
            with pytest.raises(ValueError, match=name):
                EnvDriver(CountingEnv(), **{name: value})
    with pytest.raises(ValueError, match="action_repeat': 2"):
        EnvDriver(make("dummy SameStep", 1)[0], action_repetition=2)


# Processors


def processor(**hooks):
    from rl.core import Processor

    return type("Own", (Processor,), hooks)()


EVERY = [("single", 1), ("old", 1), *((kind, 3) for kind in VECTOR)]


@pytest.mark.parametrize(("kind", "nb_lanes"), EVERY)
@pytest.mark.parametrize("whole", [False, True])
def test_processor_sees_each_thing_once(kind, nb_lanes, whole):
    calls = {"observation": [], "reward": 0, "info": 0, "action": 0}

    def see(self, observation):
        calls["observation"].append(tuple(observation[:3]))
        observation[3] = 77  # changing the row must not reach the env
        return np.append(observation[:3] + 1000, 5).astype(np.float16)

    def rate(self, reward):
        calls["reward"] += 1
        return -2 * reward

    def tell(self, info):
        calls["info"] += 1
        return {"told": info["step"]}

    def act(self, action):
        calls["action"] += 1
        return 4 - action

    def step(self, observation, reward, done, info):
        return see(self, observation), rate(self, reward), done, tell(self, info)

    hooks = {"process_observation": see, "process_action": act}
    hooks |= {"process_step": step} if whole else {"process_reward": rate, "process_info": tell}
    env, inner = make(kind, nb_lanes, dtype=np.float32)
    inner = inner or [env.inner]
    driver = EnvDriver(env, processor(**hooks))
    rows = play(driver, 30)
    for lane, (mine, one) in enumerate(zip(rows, inner, strict=True)):
        assert len(mine) == one.nb_steps
        for n, (observation, action, reward, following, terminated, _, info, length) in enumerate(mine):
            assert observation.dtype == following.dtype == np.float16
            assert observation[0] == following[0] == lane + 1000 and observation[3] == following[3] == 5
            assert following[2] == 1000 + length and observation[2] == 999 + length
            assert reward == -2 * (lane * 100 + length) and info == {"told": length}
            assert one.actions[n] == 4 - action
            assert terminated == (length == one.lengths[int(observation[1] - 1000) % 3])
    nb_steps = sum(one.nb_steps for one in inner)
    assert calls["reward"] == calls["info"] == nb_steps
    assert calls["action"] >= nb_steps  # NEXT_STEP: also for the actions that are ignored
    assert len(calls["observation"]) == len(set(calls["observation"])) == nb_steps + sum(one.nb_resets for one in inner)


def test_a_processor_cannot_change_the_envs_own_array():
    class Owning(CountingEnv):
        def reset(self, *, seed=None, options=None):
            self.state = np.zeros(4)
            return self.state, {}

        def step(self, action):
            self.state += 1
            return self.state, 1.0, False, False, {}

    def spoil(self, observation):
        observation *= 10
        return observation

    driver = EnvDriver(Owning(), processor(process_observation=spoil))
    for expected in (0, 10, 20, 30):
        assert driver.observe()[0, 0] == expected
        driver.step([0])


def test_hooks_that_are_not_overridden_are_not_called(monkeypatch):
    from rl.core import Processor

    own = processor(process_action=lambda self, action: action)

    def forbidden(*args):
        raise AssertionError("called")

    for name in ("process_step", "process_observation", "process_reward", "process_info"):
        monkeypatch.setattr(Processor, name, forbidden)
    driver = EnvDriver(make("dummy SameStep", 3)[0], own)
    check_rows(play(driver, 15), driver.env.get_attr("unwrapped"))
    assert EnvDriver(CountingEnv(), Processor()).observe().shape == (1, 4)


def test_a_hook_set_on_the_object_counts():
    own = processor()
    own.process_reward = lambda reward: 0.25
    driver = EnvDriver(CountingEnv(), own)
    driver.observe()
    assert driver.step([0]).reward == 0.25


@pytest.mark.parametrize(("kind", "nb_lanes"), EVERY)
def test_processor_that_ends_an_episode(kind, nb_lanes):
    def step(self, observation, reward, done, info):
        return observation, reward, done or info["step"] == 2, info

    env, inner = make(kind, nb_lanes, end="truncated", lengths=(3, 2, 4))
    inner = inner or [env.inner]
    rows = play(EnvDriver(env, processor(process_step=step)), 30)
    check_rows(rows, inner)
    for mine in rows:
        assert len(mine) > 10
        for observation, _, _, _, terminated, truncated, _, length in mine:
            natural = (3, 2, 4)[int(observation[0] + observation[1]) % 3]
            assert length <= 2 and terminated == (length == 2 < natural) and truncated == (length == 2 == natural)


@pytest.mark.parametrize(("kind", "nb_lanes"), EVERY)
def test_processor_that_denies_an_end(kind, nb_lanes):
    def step(self, observation, reward, done, info):
        return observation, reward, False, info

    env, inner = make(kind, nb_lanes)
    rows = play(EnvDriver(env, processor(process_step=step)), 30)
    check_rows(rows, inner or [env.inner])
    flags = [(row[4], row[5]) for mine in rows for row in mine]
    assert (False, True) in flags and not any(terminated for terminated, _ in flags)


def test_processor_makes_arrays_of_anything():
    class Words(gymnasium.Env):
        observation_space, action_space = spaces.Text(9), spaces.Discrete(2)
        step_count = 0

        def reset(self, seed=None, options=None):
            self.step_count = 0
            return "", {}

        def step(self, action):
            self.step_count += 1
            return "x" * self.step_count, 1.0, self.step_count == 3, False, {}

    count = processor(process_observation=lambda self, text: [float(len(text))])
    from rl.common.vec_env import DummyVecEnv

    for env, nb_lanes in ((Words(), 1), (DummyVecEnv([Words, Words]), 2)):
        driver = EnvDriver(env, count)
        seen = []
        for _ in range(7):
            observation = driver.observe()
            row = driver.step(np.zeros(nb_lanes, int))
            assert observation.shape == (nb_lanes, 1) and observation.dtype == float
            seen += [(observation[-1, 0], row.next_observation[-1, 0])]
        assert seen == [(0, 1), (1, 2), (2, 3)] * 2 + [(0, 1)]
        with pytest.raises(ValueError, match="no array of numbers.*process_observation"):
            EnvDriver(env).reset()


# Observations


class NestedEnv(CountingEnv):
    """The same counts spread over a nested space, keys in another order than the space's."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        step = spaces.Tuple([spaces.Discrete(50), spaces.Box(0, 255, (2, 2), np.uint8)])
        self.observation_space = spaces.Dict({"step": step, "id": spaces.Box(-9, 99, (2,), np.float32)})

    def observe(self):
        super().observe()
        image = np.full((2, 2), self.step_count, np.uint8)
        return {"step": (self.step_count, image), "id": np.array([self.env_id, self.episode], np.float64)}


@pytest.mark.filterwarnings("ignore:.*cast at every step")
@pytest.mark.parametrize(("kind", "nb_lanes"), EVERY)
def test_nested_observations(kind, nb_lanes):
    if kind == "old":
        env = OldEnv()
        env.inner = NestedEnv(0)
        inner = [env.inner]
    else:
        env, inner = make(kind, nb_lanes, cls=NestedEnv)
    driver = EnvDriver(env, nb_max_episode_steps=4)
    nb_valid = np.zeros(nb_lanes, int)
    for _ in range(30):
        observation = driver.observe()
        row = driver.step(np.zeros(nb_lanes, int))
        nb_valid += row.valid
        for tree in (observation, row.next_observation):
            assert list(tree) == (["step", "id"] if kind == "old" else ["id", "step"])
            assert type(tree["step"]) is tuple
            assert tree["step"][0].shape == (nb_lanes,) and tree["step"][0].dtype == np.int64
            assert tree["step"][1].shape == (nb_lanes, 2, 2) and tree["step"][1].dtype == np.uint8
            assert tree["id"].dtype == (np.float64 if kind == "old" else np.float32)
            np.testing.assert_array_equal(tree["id"][:, 0], range(nb_lanes))
            np.testing.assert_array_equal(tree["step"][1][:, 1, 0], tree["step"][0])
        first, following = observation["step"][0][row.valid], row.next_observation["step"][0][row.valid]
        np.testing.assert_array_equal(first + 1, following)
        np.testing.assert_array_equal(observation["id"][row.valid], row.next_observation["id"][row.valid])
        assert driver.observe() is row.next_observation or (row.terminated | row.truncated | ~row.valid).any()
    np.testing.assert_array_equal(nb_valid, [one.nb_steps for one in inner])


def test_lists_of_arrays_are_several_inputs():
    class Two:  # an env of keras-rl's own test-suite in spirit
        def reset(self):
            return [np.zeros(3), np.zeros((2, 2))]

        def step(self, action):
            return [np.ones(3), np.ones((2, 2))], 1.0, False, {}

    driver = EnvDriver(Two())
    observation = driver.observe()
    assert type(observation) is tuple and observation[0].shape == (1, 3) and observation[1].shape == (1, 2, 2)
    assert driver.step([0]).next_observation[1].sum() == 4


class Faulty(CountingEnv):
    """Does something else at one step of its second episode."""

    def __init__(self, *args, fault=None, space=True, at=2, **kwargs):
        super().__init__(*args, **kwargs)
        self.fault, self.at = fault, at
        if not space:
            self.observation_space = None

    def step(self, action):
        result = super().step(action)
        if self.episode == 1 and self.step_count == self.at and self.env_id == self.num_faulty:
            return self.fault(result)
        return result

    num_faulty = 0


def run_until(driver, error, match):
    with pytest.raises(error, match=match):
        play(driver, 20)
    assert driver.failed
    for call in (driver.observe, lambda: driver.step(np.zeros(driver.nb_lanes, int))):
        with pytest.raises(RuntimeError, match="reset"):
            call()
    driver.reset()
    assert not driver.failed
    play(driver, 4)


@pytest.mark.parametrize("space", [True, False])
@pytest.mark.parametrize(
    ("observation", "message"),
    [
        (np.zeros(3), r"lane 0, step 2 .*shape \(3,\).*shape \(4,\)"),
        (np.zeros((1, 4)), r"shape \(1, 4\).*shape \(4,\)"),
        (np.zeros(1), r"shape \(1,\)"),
        (np.array([None] * 4), "dtype object"),
        ([1.0, [2.0], 3.0, 4.0], "lane 0, step 2"),
        ({"a": np.zeros(4)}, "dtype object"),
        (np.zeros(4, complex), "complex"),
    ],
)
def test_an_observation_that_changes_is_refused_at_once(observation, message, space):
    env = Faulty(fault=lambda result: (observation, *result[1:]), space=space)
    run_until(EnvDriver(env), ValueError, f"Faulty gave a bad observation.*{message}")


@pytest.mark.parametrize("observation", [{"id": np.zeros(2)}, np.zeros(2), ({}, {})])
def test_an_observation_of_another_structure_is_refused(observation):
    class Nested(NestedEnv):
        def step(self, action):
            return (observation, *super().step(action)[1:])

    driver = EnvDriver(Nested())
    driver.observe()
    with pytest.raises(ValueError, match="Nested gave a bad observation in lane 0, step 1 .*expected a dict with keys"):
        driver.step([0])


def test_a_processor_that_changes_the_shape_is_refused_in_its_lane():
    grow = processor(process_observation=lambda self, o: np.zeros(5 if o[0] == 2 and o[2] == 2 else 4))
    driver = EnvDriver(make("dummy SameStep", 3)[0], grow)
    with pytest.raises(ValueError, match="lane 2, step 2"):
        play(driver, 5)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e300, None])
def test_a_reward_that_is_no_number_is_refused_at_once(bad):
    env = Faulty(fault=lambda result: (result[0], bad, *result[2:]))
    run_until(EnvDriver(env), ValueError, f"reward {re.escape(str(bad))} in lane 0, step 2 of its episode")


@three_lanes
def test_a_bad_reward_names_its_lane(kind):
    class Second(Faulty):
        num_faulty = 1

    env, inner = make(kind, 3, cls=Second, fault=lambda result: (result[0], np.nan, *result[2:]))
    driver = EnvDriver(env)
    with pytest.raises(ValueError, match="reward nan in lane 1, step 2"):
        play(driver, 20)
    assert inner[1].episode == 1 and inner[1].step_count == 2
    driver.reset()
    play(driver, 3)


def test_a_processor_may_mend_a_reward():
    mend = processor(process_reward=lambda self, reward: np.nan_to_num(reward))
    env = Faulty(fault=lambda result: (result[0], np.nan, *result[2:]))
    assert 0.0 in [row[2] for row in play(EnvDriver(env, mend), 20)[0]]


def test_an_exception_of_the_env_needs_a_reset():
    class Breaking(CountingEnv):
        breaks_in = "step"

        def step(self, action):
            if self.episode == 1 and self.breaks_in == "step":
                raise OSError("lost")
            return super().step(action)

        def reset(self, *, seed=None, options=None):
            result = super().reset()
            if self.episode == 1 and self.breaks_in == "reset":
                raise OSError("lost")
            return result

    for where in ("step", "reset"):
        for options in ({}, {"nb_max_start_steps": 3}):
            env = Breaking()
            env.breaks_in = where
            driver = EnvDriver(env, **options)
            driver.reset(seed=1)
            run_until(driver, OSError, "lost")
    env = Breaking()
    env.breaks_in, driver = "reset", EnvDriver(env)
    driver.observe()
    with pytest.raises(OSError, match="lost"):
        driver.reset()
    with pytest.raises(RuntimeError, match="reset"):
        driver.observe()


# What is refused


@pytest.mark.parametrize("kind", VECTOR)
def test_a_closed_env_is_refused(kind):
    env, _ = make(kind, 2)
    env.close()
    with pytest.raises(gymnasium.error.ClosedEnvironmentError, match="closed"):
        EnvDriver(env)


@pytest.mark.parametrize("mode", MODES)
def test_real_envs(mode):
    from rl.common.vec_env import DummyVecEnv

    def cartpole():
        return gymnasium.make("CartPole-v1", max_episode_steps=12)

    for env in (
        DummyVecEnv([cartpole] * 3, autoreset_mode=mode),
        gymnasium.make_vec("CartPole-v1", 3, "sync", max_episode_steps=12, vector_kwargs={"autoreset_mode": mode}),
    ):
        driver = EnvDriver(env)
        driver.reset(seed=np.int64(1))
        nb_ends = np.zeros(2, int)
        for _ in range(100):
            observation = driver.observe()
            row = driver.step(np.array([0, 1, 0]) if driver.episode_step[0] % 2 else np.array([1, 1, 1]))
            moved = observation[:, 0] + np.float32(0.02) * observation[:, 1]
            np.testing.assert_allclose(row.next_observation[row.valid, 0], moved[row.valid], atol=1e-6)
            nb_ends += np.count_nonzero(row.terminated), np.count_nonzero(row.truncated)
        assert (nb_ends > 0).all()
        env.close()


def test_importing_brings_no_keras():
    code = "import sys, rl.driver; sys.exit('keras' in sys.modules or 'tensorflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
