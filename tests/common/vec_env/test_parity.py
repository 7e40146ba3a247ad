"""DummyVecEnv and SubprocVecEnv give the same results, whatever the number of workers; and random walks of calls."""

import itertools

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from rl.common.vec_env import DummyVecEnv, SubprocVecEnv
from tests.common.vec_env.envs import SpaceEnv, counting, equal, without_times

pytestmark = pytest.mark.timeout(60)


LEAVES = [
    spaces.Box(-1, 1, (3,), np.float32),
    spaces.Box(-1, 1, (), np.float64),
    spaces.Box(0, 255, (4, 5, 1), np.uint8),
    spaces.Box(-5, 5, (2, 2), np.int16),
    spaces.Box(0, 1, (0,), np.float32),
    spaces.Discrete(4),
    spaces.Discrete(3, start=-1),
    spaces.MultiDiscrete([2, 3, 4]),
    spaces.MultiBinary(3),
    spaces.MultiBinary((2, 2)),
    spaces.Text(6, min_length=1, charset="abc"),
    spaces.Graph(spaces.Box(-1, 1, (2,)), spaces.Discrete(3)),
]


def random_space(rng, depth=2, leaves=LEAVES):
    kind = rng.integers(3) if depth else 0
    if kind == 0:
        return leaves[rng.integers(len(leaves))]
    children = [random_space(rng, depth - 1, leaves) for _ in range(rng.integers(1, 4))]
    if kind == 1:
        return spaces.Tuple(children)
    return spaces.Dict({f"k{i}": child for i, child in enumerate(children)})


def same_graphs(a, b):
    """equal(), also for Graph instances."""
    if hasattr(a, "_fields"):
        return type(a) is type(b) and all(same_graphs(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_graphs(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same_graphs, a, b))
    return equal(a, b)


def compare(observation_space, action_space, nb, workers, mode, steps, copy, seed=0, **options):
    def maker(i):
        return lambda: SpaceEnv(observation_space, action_space, i)

    fns = [maker(i) for i in range(nb)]
    action_space.seed(seed)
    with (
        DummyVecEnv(fns, autoreset_mode=mode, copy=copy) as dummy,
        SubprocVecEnv(fns, autoreset_mode=mode, copy=copy, workers=workers, **options) as subproc,
    ):
        assert same_graphs(dummy.reset(seed=seed), subproc.reset(seed=seed))
        for _ in range(steps):
            actions = [action_space.sample() for _ in range(nb)]
            a, b = dummy.step(actions), subproc.step(actions)
            assert same_graphs(a[:4], b[:4])
            assert same_graphs(without_times(a[4]), without_times(b[4]))
            assert same_graphs(dummy.next_obs(), subproc.next_obs())
            if mode == AutoresetMode.DISABLED and (a[2] | a[3]).any():
                mask = a[2] | a[3]
                assert same_graphs(dummy.reset(mask=mask), subproc.reset(mask=mask))


@pytest.mark.parametrize("space", LEAVES, ids=str)
def test_every_space(space):
    compare(space, space, 3, 2, AutoresetMode.SAME_STEP, 15, True)


@pytest.mark.parametrize(("mode", "copy"), list(itertools.product(AutoresetMode, (True, False))))
def test_every_mode_and_number_of_workers(mode, copy):
    space = spaces.Dict({"a": LEAVES[0], "b": spaces.Tuple([LEAVES[5], LEAVES[10]])})
    for workers in (1, 2, 3, 5):
        compare(space, spaces.Box(-1, 1, (2,)), 5, workers, mode, 30, copy)


@pytest.mark.parametrize("options", [{"start_method": "spawn"}, {"start_method": "fork"}, {"spin_us": 100}], ids=str)
def test_every_start_method(options):
    compare(
        spaces.Dict({"a": LEAVES[2], "b": LEAVES[8]}), LEAVES[7], 4, 2, AutoresetMode.SAME_STEP, 30, True, **options
    )


@pytest.mark.parametrize("seed", range(6))
def test_random_nested_spaces(seed):
    rng = np.random.default_rng(seed)
    nb = int(rng.integers(1, 6))
    compare(
        random_space(rng),
        random_space(rng),
        nb,
        int(rng.integers(1, nb + 1)),
        list(AutoresetMode)[seed % 3],
        20,
        bool(seed % 2),
        seed,
    )


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 200))
def test_many_random_nested_spaces(seed):
    test_random_nested_spaces(seed)


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1", "FrozenLake-v1"])
def test_real_environments(env_id):
    def maker():
        return gym.make(env_id)

    rng = np.random.default_rng(0)
    with DummyVecEnv([maker] * 4) as dummy, SubprocVecEnv([maker] * 4, workers=3) as subproc:
        assert same_graphs(dummy.reset(seed=1), subproc.reset(seed=1))
        space = dummy.batched_action_space
        space.seed(int(rng.integers(100)))
        for _ in range(250):
            actions = space.sample()
            a, b = dummy.step(actions), subproc.step(actions)
            assert same_graphs(a[:4], b[:4])
            assert same_graphs(without_times(a[4]), without_times(b[4]))


def walk(seed, venv, mode, nb, steps=60):
    """Random calls against a model of what every lane must show."""
    rng = np.random.default_rng(seed)
    lengths = [5 + i % 2 for i in range(nb)]
    episode, step, due = [0] * nb, [0] * nb, [False] * nb
    rows = venv.reset()[0]
    pending = None

    def advance(i, action):
        """The lane's row after a step: (observation, reward, terminated, truncated)."""
        if due[i]:
            due[i], episode[i], step[i] = False, episode[i] + 1, 0
            return [i, episode[i], 0, -1], 0.0, False, False
        step[i] += 1
        reward = episode[i] + step[i] / 100
        row, ended, even = [i, episode[i], step[i], action], step[i] >= lengths[i], episode[i] % 2 == 0
        if ended and mode == AutoresetMode.SAME_STEP:
            episode[i], step[i] = episode[i] + 1, 0
            row = [i, episode[i], 0, -1]
        elif ended:
            due[i] = True
        return row, reward, ended and even, ended and not even

    def reset_lanes(mask):
        for i in np.flatnonzero(mask):
            episode[i], step[i], due[i] = episode[i] + 1, 0, False

    for _ in range(steps):
        choice = rng.integers(6)
        if mode == AutoresetMode.DISABLED and pending is None and any(due):
            mask = np.array(due)
            got, _ = venv.reset(mask=mask)
            reset_lanes(mask)
            rows = np.where(mask[:, None], [[i, episode[i], 0, -1] for i in range(nb)], rows)
            assert got.tolist() == rows.tolist()
        elif pending is not None and choice < 4:
            got = venv.step_wait()
            want = [advance(i, a) for i, a in enumerate(pending)]
            rows, pending = got[0].copy(), None
            assert got[0].tolist() == [w[0] for w in want]
            assert got[1].tolist() == [w[1] for w in want]
            assert got[2].tolist() == [w[2] for w in want] and got[3].tolist() == [w[3] for w in want]
        elif pending is None and choice < 4:
            pending = rng.integers(0, 5, nb).tolist()
            venv.step_async(pending)
        elif choice == 4:
            if pending is not None:
                for i, action in enumerate(pending):
                    row = advance(i, action)[0]
                    rows[i] = row
                pending = None
            mask = rng.random(nb) < 0.5
            got, _ = venv.reset(mask=mask)
            reset_lanes(mask)
            rows = np.where(mask[:, None], [[i, episode[i], 0, -1] for i in range(nb)], rows)
            assert got.tolist() == rows.tolist()
        elif pending is None:
            assert venv.get_attr("step_count") == step
            with pytest.raises(ValueError, match="actions"):
                venv.step([0] * (nb + 1))


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_random_walks(make, mode):
    for seed, nb in ((0, 1), (1, 4), (2, 7)):
        walk(seed, make(counting(nb), autoreset_mode=mode, workers=1 + seed), mode, nb)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
def test_many_random_walks(make, seed):
    nb = 1 + seed % 9
    mode = list(AutoresetMode)[seed % 3]
    walk(seed, make(counting(nb), autoreset_mode=mode, workers=1 + seed % 4, copy=bool(seed % 2)), mode, nb, 400)
