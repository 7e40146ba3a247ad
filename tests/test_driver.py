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
        row = driver.step(action)
        assert isinstance(row, Transition) and row.observation is observation
        assert row.reward.dtype == np.float32 and row.terminated.dtype == row.truncated.dtype == bool
        assert row.valid.dtype == bool and len(row.info) == driver.nb_lanes
        np.testing.assert_array_equal(row.action, action)
        assert not ((row.terminated | row.truncated) & ~row.valid).any() and not row.reward[~row.valid].any()
        for i in np.flatnonzero(row.valid):
            rows[i].append(
                (*(row[k][i].copy() for k in range(6)), row.info[i], int(driver.episode_step[i]))
            )
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
