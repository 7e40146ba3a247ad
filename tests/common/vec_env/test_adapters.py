import copy
import pickle

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.wrappers.vector import ClipReward, DictInfoToList, RecordEpisodeStatistics

from rl.common.misc_util import tree_map
from rl.common.vec_env import (
    AlreadySteppingError,
    ClosedEnvironmentError,
    DummyVecEnv,
    NotSteppingError,
    ResetNeeded,
    VecEnv,
)
from rl.common.vec_env.adapters import GymnasiumVecEnv, LegacyVecEnv, from_gymnasium, to_gymnasium

MODES = list(AutoresetMode)
BOX = spaces.Box(-1000, 1000, (3,), np.float32)


class CountingEnv(gym.Env):
    """Observes (episode, step, last action), so that a stale, shifted or swapped row shows; ends after `length`."""

    def __init__(self, length=3, kind="box", truncate=False, start=0):
        self.length, self.kind, self.truncate = length, kind, truncate
        self.episode, self.steps, self.action, self.goal = start, 0, 0, 1
        self.action_space = spaces.Discrete(5)
        self.observation_space = {
            "box": BOX,
            "dict": spaces.Dict(b=BOX, a=spaces.Discrete(1000)),
            "tuple": spaces.Tuple((BOX, spaces.Dict(c=BOX))),
            "text": spaces.Text(30),
        }[kind]
        self.render_mode = "rgb_array"

    def observe(self):
        row = np.array([self.episode, self.steps, self.action], np.float32)
        return {
            "box": row,
            "dict": {"b": row, "a": self.steps},
            "tuple": (row, {"c": row + 1}),
            "text": f"{self.episode} {self.steps} {self.action}",
        }[self.kind]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode, self.steps, self.action = self.episode + 1, 0, 0
        return self.observe(), {"is_start": self.episode, **({"seed": seed} if seed is not None else {})}

    def step(self, action):
        self.steps, self.action = self.steps + 1, int(action)
        end = self.steps == self.length
        info = {"steps": self.steps, **({"name": f"e{self.episode}"} if end else {})}
        return self.observe(), float(self.goal), end and not self.truncate, end and self.truncate, info

    def render(self):
        return np.full((2, 3, 3), self.steps, np.uint8)

    def double(self, x):
        return 2 * x * self.goal


def makers(nb_envs=3, **kwargs):
    # Lane i runs episodes of length 2 + i.
    return [lambda i=i: CountingEnv(length=2 + i, **kwargs) for i in range(nb_envs)]


def adapted(mode=AutoresetMode.SAME_STEP, nb_envs=3, **kwargs):
    return from_gymnasium(SyncVectorEnv(makers(nb_envs, **kwargs), autoreset_mode=mode))


def assert_trees_equal(first, second):
    if isinstance(first, dict):
        assert first.keys() == second.keys()
        for key in first:
            assert_trees_equal(first[key], second[key])
    elif isinstance(first, tuple):
        assert len(first) == len(second)
        for one, other in zip(first, second, strict=True):
            assert_trees_equal(one, other)
    else:
        np.testing.assert_array_equal(first, second)


def without_times(info):
    info = dict(info)
    if "episode" in info:
        info["episode"] = {key: info["episode"][key] for key in ("r", "l")}
    return info


# --- from_gymnasium --------------------------------------------------------------------------------------------------


def test_it_describes_one_env_and_the_batch():
    inner = SyncVectorEnv(makers(), autoreset_mode=AutoresetMode.NEXT_STEP)
    venv = from_gymnasium(inner)
    assert isinstance(venv, VecEnv) and venv.num_envs == len(venv) == 3
    assert venv.observation_space == venv.single_observation_space == BOX
    assert venv.action_space == spaces.Discrete(5)
    assert venv.batched_observation_space == inner.observation_space
    assert venv.batched_action_space == inner.action_space
    assert venv.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP
    assert venv.render_mode == "rgb_array"


@pytest.mark.parametrize("kind", ["box", "dict", "tuple", "text"])
@pytest.mark.parametrize("mode", MODES)
def test_it_steps_as_our_own_in_process_env_does(mode, kind):
    with DummyVecEnv(makers(kind=kind), autoreset_mode=mode) as ours, adapted(mode, kind=kind) as theirs:
        observations, infos = ours.reset(seed=7)
        other, other_infos = theirs.reset(seed=7)
        assert_trees_equal(observations, other)
        assert infos == other_infos
        for step in range(12):
            actions = np.array([step % 5, (step + 1) % 5, 2])
            result, other_result = ours.step(actions), theirs.step(actions)
            for one, other in zip(result[:4], other_result[:4], strict=True):
                assert_trees_equal(one, other)
                if isinstance(one, np.ndarray):
                    assert one.dtype == other.dtype
            for info, other_info in zip(result[4], other_result[4], strict=True):
                info, other_info = without_times(info), without_times(other_info)
                assert_trees_equal(info.pop("final_obs", None), other_info.pop("final_obs", None))
                if mode is not AutoresetMode.SAME_STEP:
                    info.pop("episode", None), other_info.pop("episode", None)
                assert info == other_info
            if kind != "text":
                assert_trees_equal(ours.next_obs(), theirs.next_obs())
            ended = result[2] | result[3]
            if mode is AutoresetMode.DISABLED and ended.any():
                observations, infos = ours.reset(mask=ended)
                other, other_infos = theirs.reset(mask=ended)
                assert_trees_equal(observations, other)
                assert infos == other_infos


def test_same_step_keeps_the_true_last_observation_and_info():
    venv = adapted(truncate=True)
    venv.reset()
    observations, rewards, terminated, truncated, infos = venv.step([1, 1, 1])
    observations, rewards, terminated, truncated, infos = venv.step([4, 1, 1])
    assert truncated.tolist() == [True, False, False] and not terminated.any()
    np.testing.assert_array_equal(observations[0], [2, 0, 0])
    np.testing.assert_array_equal(infos[0]["final_obs"], [1, 2, 4])
    assert infos[0]["steps"] == 2 and infos[0]["name"] == "e1"
    assert infos[0]["reset_info"] == {"is_start": 2}
    assert infos[0]["episode"]["r"] == 2.0 and infos[0]["episode"]["l"] == 2 and infos[0]["episode"]["t"] >= 0
    assert infos[1] == {"steps": 2}
    np.testing.assert_array_equal(venv.next_obs(), [[1, 2, 4], [1, 2, 1], [1, 2, 1]])


def test_next_step_marks_the_row_that_only_reset():
    venv = adapted(AutoresetMode.NEXT_STEP)
    venv.reset()
    venv.step([0, 0, 0])
    _, _, terminated, _, infos = venv.step([0, 0, 0])
    assert terminated.tolist() == [True, False, False]
    assert infos[0]["episode"]["l"] == 2 and "is_reset" not in infos[0]
    observations, rewards, terminated, _, infos = venv.step([3, 0, 0])
    np.testing.assert_array_equal(observations[0], [2, 0, 0])
    assert rewards.tolist() == [0, 1, 1] and terminated.tolist() == [False, True, False]
    assert infos[0]["is_reset"] is True and "is_reset" not in infos[1]
    # The second episode is counted from its own first step.
    venv.step([0, 0, 0])
    assert venv.step([0, 0, 0])[4][0]["episode"]["l"] == 2


def test_disabled_refuses_to_step_what_has_ended():
    venv = adapted(AutoresetMode.DISABLED)
    venv.reset()
    venv.step([0, 0, 0])
    venv.step([0, 0, 0])
    with pytest.raises(ResetNeeded, match=r"\[0\]"):
        venv.step([0, 0, 0])
    venv.reset(mask=np.array([True, False, False]))
    np.testing.assert_array_equal(venv.step([0, 0, 0])[0], [[2, 1, 0], [1, 3, 0], [1, 3, 0]])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["box", "dict", "text"])
def test_reset_of_some_lanes_leaves_the_others_alone(mode, kind):
    venv = adapted(mode, kind=kind)
    venv.reset()
    venv.step([1, 1, 1])
    before = venv.step([1, 1, 1])[0]
    observations, infos = venv.reset(mask=np.array([False, True, False]), seed=[5, 6, 7])
    rows = observations if kind == "text" else observations["b"] if kind == "dict" else observations
    old = before if kind == "text" else before["b"] if kind == "dict" else before
    np.testing.assert_array_equal(rows[1], "2 0 0" if kind == "text" else [2, 0, 0])
    for lane in (0, 2):
        np.testing.assert_array_equal(rows[lane], old[lane])
    assert infos == [{}, {"is_start": 2, "seed": 6}, {}]
    assert venv.reset(mask=np.zeros(3, bool))[1] == [{}, {}, {}]
    with pytest.raises(ValueError, match="mask"):
        venv.reset(mask=[1, 0, 0])


def test_what_was_returned_never_changes():
    inner = SyncVectorEnv(makers(), copy=False, autoreset_mode=AutoresetMode.SAME_STEP)
    venv = from_gymnasium(inner)
    kept = [venv.reset()[0]] + [venv.step([step, 0, 0])[0] for step in range(4)]
    np.testing.assert_array_equal([row[0] for row in kept], [[1, 0, 0], [1, 1, 0], [2, 0, 0], [2, 1, 2], [3, 0, 0]])


@pytest.mark.parametrize("mode", MODES)
def test_an_episode_lasts_from_its_own_reset(mode, monkeypatch):
    class SlowEnv(CountingEnv):
        def step(self, action):
            clock[0] += 10
            return super().step(action)

    clock = [0]
    monkeypatch.setattr("rl.common.vec_env.adapters.time.perf_counter", lambda: clock[0])
    venv = from_gymnasium(SyncVectorEnv([lambda: SlowEnv(2)], autoreset_mode=mode))
    venv.reset()
    episodes = []
    for _ in range(8):
        _, _, terminated, _, infos = venv.step([0])
        episodes += [infos[0]["episode"]] if "episode" in infos[0] else []
        if mode is AutoresetMode.DISABLED and terminated[0]:
            venv.reset(mask=terminated)
    assert len(episodes) >= 3
    assert all(episode == {"r": 2.0, "l": 2, "t": 20} for episode in episodes)


class ReusingEnv(CountingEnv):
    """Writes every step into one array."""

    row = None

    def step(self, action):
        result = super().step(action)
        self.row = np.zeros(3, np.float32) if self.row is None else self.row
        self.row[:] = result[0]
        return self.row, *result[1:]


def test_a_final_observation_never_changes_either():
    venv = from_gymnasium(SyncVectorEnv([lambda: ReusingEnv(2)], autoreset_mode=AutoresetMode.SAME_STEP))
    venv.reset()
    venv.step([1])
    final = venv.step([1])[4][0]["final_obs"]
    venv.step([4])
    np.testing.assert_array_equal(final, [1, 2, 1])


def test_next_obs_belongs_to_a_step():
    venv = adapted()
    venv.reset()
    with pytest.raises(RuntimeError, match="needs a step"):
        venv.next_obs()
    venv.step([0, 0, 0])
    venv.next_obs()
    venv.reset()
    with pytest.raises(RuntimeError, match="needs a step"):
        venv.next_obs()


def test_seeds_are_used_once_and_reach_every_lane():
    venv = adapted()
    assert venv.seed(11) == [11, 12, 13]
    assert [info["seed"] for info in venv.reset()[1]] == [11, 12, 13]
    assert all("seed" not in info for info in venv.reset()[1])
    assert [info["seed"] for info in venv.reset(seed=[3, 9, 4])[1]] == [3, 9, 4]
    assert [info["seed"] for info in venv.reset(seed=np.int64(3))[1]] == [3, 4, 5]
    for seed in (-1, [1, 2], 2**32):
        with pytest.raises(ValueError):
            venv.reset(seed=seed)


def test_calls_out_of_order():
    venv = adapted()
    with pytest.raises(ResetNeeded):
        venv.step([0, 0, 0])
    with pytest.raises(ResetNeeded):
        venv.reset(mask=np.array([True, False, False]))
    venv.reset()
    with pytest.raises(NotSteppingError):
        venv.step_wait()
    venv.step_async([0, 0, 0])
    with pytest.raises(AlreadySteppingError):
        venv.step_async([0, 0, 0])
    venv.step_wait()
    venv.close()
    venv.close()
    assert venv.closed
    for call in (venv.reset, lambda: venv.step([0, 0, 0]), lambda: venv.get_attr("goal")):
        with pytest.raises(ClosedEnvironmentError):
            call()


@pytest.mark.parametrize(
    ("actions", "words"),
    [
        ([0, 0], "3 actions.*got 2"),
        ([[0], [0], [0]], r"\(3, 1\)"),
        ([0.5, 0, 0], "integers"),
        (0, "single"),
        ([0, 5, 0], "environment 1"),
    ],
)
def test_wrong_actions_are_refused_before_anything_moves(actions, words):
    venv = adapted()
    venv.reset()
    with pytest.raises(ValueError, match=words):
        venv.step(actions)
    np.testing.assert_array_equal(venv.step([1.0, 2, np.int8(3)])[0][:, 1:], [[1, 1], [1, 2], [1, 3]])


class NestedActionEnv(CountingEnv):
    def __init__(self):
        super().__init__()
        self.action_space = spaces.Dict(go=spaces.Box(-1, 1, (2,), np.float32), jump=spaces.Discrete(3))

    def step(self, action):
        assert self.action_space.contains({"go": action["go"], "jump": np.int64(action["jump"])})
        return super().step(action["jump"])


def test_nested_actions_as_batch_and_as_list():
    venv = from_gymnasium(SyncVectorEnv([NestedActionEnv] * 2))
    venv.reset()
    go = np.zeros((2, 2))
    np.testing.assert_array_equal(venv.step({"jump": [1, 2], "go": go})[0][:, 2], [1, 2])
    np.testing.assert_array_equal(venv.step([{"go": go[0], "jump": 2}, {"go": go[1], "jump": 0}])[0][:, 2], [2, 0])
    with pytest.raises(ValueError, match="keys"):
        venv.step({"jump": [1, 2]})
    with pytest.raises(ValueError, match=r"'go' of shape \(2, 2\)"):
        venv.step({"jump": [1, 2], "go": go[0]})


def test_attributes_methods_and_layers():
    venv = adapted()
    assert venv.get_attr("goal") == [1, 1, 1]
    venv.set_attr("goal", 5, indices=1)
    assert venv.get_attr("goal") == [1, 5, 1] and venv.get_attr("goal", [2, 1]) == [1, 5]
    venv.set_attr("goal", 2)
    venv.reset()
    assert venv.step([0, 0, 0])[1].tolist() == [2, 2, 2]
    assert venv.call("double", 3) == [12, 12, 12] and venv.call("double", x=1, indices=[0]) == [4]
    assert venv.has_attr("goal") and not venv.has_attr("nonsense")
    with pytest.raises(AttributeError, match="nonsense"):
        venv.set_attr("nonsense", 1)
    with pytest.raises(AttributeError, match="nonsense"):
        venv.get_attr("nonsense")
    with pytest.raises(IndexError):
        venv.get_attr("goal", 3)
    assert venv.env_is_wrapped(gym.wrappers.TimeLimit) == [False] * 3
    limited = from_gymnasium(SyncVectorEnv([lambda: gym.wrappers.TimeLimit(CountingEnv(), 2)] * 2))
    assert limited.env_is_wrapped(gym.wrappers.TimeLimit, 0) == [True]
    assert [image.shape for image in venv.get_images()] == [(2, 3, 3)] * 3
    assert venv.render().shape == (4, 6, 3)


def test_vector_wrappers_of_gymnasium_may_lie_between():
    inner = RecordEpisodeStatistics(SyncVectorEnv(makers(), autoreset_mode=AutoresetMode.SAME_STEP))
    venv = from_gymnasium(inner)
    venv.reset()
    venv.step([0, 0, 0])
    info = venv.step([0, 0, 0])[4][0]
    assert info["episode"]["r"] == 2 and info["reset_info"] == {"is_start": 2}
    assert venv.env_is_wrapped(RecordEpisodeStatistics) == [True] * 3
    # Statistics that were recorded below a change of rewards are kept.
    clipped = from_gymnasium(ClipReward(inner, 0, 0.25))
    clipped.reset()
    clipped.step([0, 0, 0])
    _, rewards, *_, infos = clipped.step([0, 0, 0])
    assert rewards[0] == 0.25 and infos[0]["episode"]["r"] == 2
    listed = from_gymnasium(DictInfoToList(SyncVectorEnv(makers(), autoreset_mode=AutoresetMode.NEXT_STEP)))
    assert listed.reset()[1] == [{"is_start": 1}] * 3


def test_no_single_envs_and_no_copies():
    with pytest.raises(TypeError, match="CountingEnv"):
        from_gymnasium(CountingEnv())
    venv = adapted()
    for copier in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="cannot be pickled or copied"):
            copier(venv)
    with pytest.raises(TypeError, match="options"):
        venv.reset(options=[{}, {}, {}])


@pytest.mark.timeout(60)
def test_gymnasium_async_env():
    with from_gymnasium(AsyncVectorEnv(makers(2), autoreset_mode=AutoresetMode.SAME_STEP)) as venv:
        venv.reset(seed=[4, 2])
        venv.step_async([1, 2])
        with pytest.raises(AlreadySteppingError):
            venv.step_async([1, 2])
        np.testing.assert_array_equal(venv.step_wait(timeout=20)[0], [[1, 1, 1], [1, 1, 2]])
        venv.step_async([1, 2])
        np.testing.assert_array_equal(venv.reset()[0], [[3, 0, 0], [2, 0, 0]])  # the pending step was dropped
        venv.set_attr("goal", 7, indices=1)
        assert venv.get_attr("goal") == [1, 7] and venv.has_attr("double") and not venv.has_attr("nonsense")
        assert venv.call("double", 1) == [2, 14]
        with pytest.raises(ValueError, match="alone"):
            venv.call("double", 1, indices=0)
        observations, infos = venv.reset(mask=np.array([False, True]))
        np.testing.assert_array_equal(observations, [[3, 0, 0], [3, 0, 0]])
        assert infos[0] == {}
        with pytest.raises(NotImplementedError):
            venv.env_is_wrapped(gym.Wrapper)
    assert venv.closed


# --- vector envs of other makes --------------------------------------------------------------------------------------


def test_an_env_that_ignores_the_reset_mask_is_found_out():
    venv = from_gymnasium(gym.make_vec("CartPole-v1", 4, vectorization_mode="vector_entry_point"))
    first, _ = venv.reset(seed=3)
    again, _ = venv.reset(seed=3)
    np.testing.assert_array_equal(first, again)
    with pytest.raises(ValueError, match="one int as seed"):
        venv.reset(seed=[1, 5, 2, 7])
    assert venv.get_attr("gravity") == [9.8] * 4
    venv.set_attr("gravity", 5.0)
    assert venv.env.gravity == 5.0
    with pytest.raises(ValueError, match="alone"):
        venv.set_attr("gravity", 6.0, indices=[1])
    with pytest.raises(RuntimeError, match="has reset all lanes"):
        venv.reset(mask=np.array([True, False, False, False]))
    with pytest.raises(ResetNeeded):
        venv.step([0, 0, 0, 0])
    venv.reset()
    assert venv.step([0, 1, 0, 1])[1].tolist() == [1.0] * 4


def test_native_cartpole_runs_episodes():
    venv = from_gymnasium(gym.make_vec("CartPole-v1", 4, vectorization_mode="vector_entry_point"))
    venv.reset(seed=0)
    lengths, resets, ends = [], 0, 0
    for _ in range(60):
        _, rewards, terminated, truncated, infos = venv.step(np.ones(4, np.int64))
        ends += int((terminated | truncated).sum())
        for lane, info in enumerate(infos):
            if info.get("is_reset"):
                resets += 1
                assert rewards[lane] == 0
            if "episode" in info:
                lengths.append(info["episode"]["l"])
                assert info["episode"]["r"] == info["episode"]["l"]
    assert ends == len(lengths) > 15 and resets >= ends - 4
    assert set(lengths) <= {8, 9, 10, 11}


class DenseVectorEnv(VectorEnv):
    """As ALE's: final observations as one dense array, partial resets, seeds as an int."""

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}

    def __init__(self):
        self.num_envs, self.single_observation_space, self.single_action_space = 3, BOX, spaces.Discrete(5)
        self.steps = np.zeros(3, int)

    def reset(self, *, seed=None, options=None):
        mask = np.ones(3, bool) if options is None or "reset_mask" not in options else options["reset_mask"]
        self.steps[mask] = 0
        return self.observe(), {"lives": np.array([3, 2, 1]), "total": 5}

    def step(self, actions):
        assert actions.dtype == np.int64
        self.steps += 1
        final = self.observe()
        ended = self.steps >= [2, 3, 4]
        self.steps[ended] = 0
        infos = {"lives": np.arange(3), "final_obs": final}
        return self.observe(), np.ones(3, np.float32), ended, np.zeros(3, bool), infos

    def observe(self):
        return np.repeat(self.steps[:, None], 3, axis=1).astype(np.float32)


def test_dense_final_observations():
    venv = from_gymnasium(DenseVectorEnv())
    assert venv.reset()[1][1] == {"lives": 2, "total": 5}
    assert "final_obs" not in venv.step([0, 0, 0])[4][0]
    observations, rewards, _, _, infos = venv.step([0, 0, 0])
    assert rewards.dtype == np.float64
    assert ["final_obs" in info for info in infos] == [True, False, False]
    np.testing.assert_array_equal(observations[:, 0], [0, 2, 2])
    np.testing.assert_array_equal(venv.next_obs()[:, 0], [2, 2, 2])
    np.testing.assert_array_equal(venv.reset(mask=np.array([False, True, False]))[0][:, 0], [0, 0, 2])


class PartialRowsVectorEnv(DenseVectorEnv):
    """As EnvPool's: a partial reset returns the rows of the lanes that it reset, in an order of its own."""

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}

    def reset(self, *, seed=None, options=None):
        if options is None or options.get("reset_mask") is None:
            return self.observe(), {"env_id": np.arange(3)}
        rows = np.flatnonzero(options["reset_mask"])[::-1]
        self.steps[rows] = 0
        return self.observe()[rows] + rows[:, None], {"env_id": rows, "elapsed_step": self.steps[rows]}


def test_partial_rows_of_a_partial_reset_find_their_lanes():
    venv = from_gymnasium(PartialRowsVectorEnv())
    venv.reset()
    venv.step([0, 0, 0])
    observations, infos = venv.reset(mask=np.array([True, False, True]))
    np.testing.assert_array_equal(observations[:, 0], [0, 1, 2])
    assert [info.get("env_id") for info in infos] == [0, None, 2]


def test_action_masks_come_from_the_latest_info():
    class MaskedEnv(CountingEnv):
        def reset(self, **kwargs):
            observation, _ = super().reset(**kwargs)
            return observation, {"action_mask": np.array([1, 1, 1, 1, 0], np.int8)}

        def step(self, action):
            *rest, info = super().step(action)
            return *rest, {"action_mask": np.arange(5) == action}

    venv = from_gymnasium(SyncVectorEnv([lambda: MaskedEnv(2)] * 2, autoreset_mode=AutoresetMode.SAME_STEP))
    assert venv.action_masks() is None
    venv.reset()
    assert venv.action_masks().tolist() == [[True] * 4 + [False]] * 2
    venv.step([0, 2])
    assert venv.action_masks().tolist() == [[True] + [False] * 4, [False, False, True, False, False]]
    venv.step([0, 2])  # both lanes begin a new episode: its mask counts
    assert venv.action_masks().tolist() == [[True] * 4 + [False]] * 2
    assert adapted().action_masks() is None


# --- to_gymnasium ----------------------------------------------------------------------------------------------------


def test_adapters_undo_each_other():
    inner = SyncVectorEnv(makers())
    assert to_gymnasium(from_gymnasium(inner)) is inner
    venv = DummyVecEnv(makers())
    assert from_gymnasium(to_gymnasium(venv)) is venv
    with pytest.raises(TypeError, match="SyncVectorEnv"):
        to_gymnasium(inner)
    assert isinstance(from_gymnasium(RecordEpisodeStatistics(to_gymnasium(venv))), GymnasiumVecEnv)


@pytest.mark.parametrize("kind", ["box", "dict", "text"])
@pytest.mark.parametrize("mode", MODES)
def test_a_view_for_gymnasium_is_what_gymnasium_itself_would_give(mode, kind):
    theirs = SyncVectorEnv(makers(kind=kind), autoreset_mode=mode)
    ours = to_gymnasium(DummyVecEnv(makers(kind=kind), autoreset_mode=mode))
    assert ours.observation_space == theirs.observation_space and ours.action_space == theirs.action_space
    assert ours.metadata["autoreset_mode"] is mode
    first, second = ours.reset(seed=3), theirs.reset(seed=3)
    assert_trees_equal(first[0], second[0])
    assert_infos_equal(first[1], second[1])
    for step in range(10):
        actions = np.array([step % 5, 1, 2])
        first, second = ours.step(actions), theirs.step(actions)
        for one, other in zip(first[:4], second[:4], strict=True):
            assert_trees_equal(one, other)
        assert_infos_equal(first[4], second[4])
        ended = first[2] | first[3]
        if mode is AutoresetMode.DISABLED and ended.any():
            first = ours.reset(options={"reset_mask": ended})
            second = theirs.reset(options={"reset_mask": ended})
            assert_trees_equal(first[0], second[0])


def assert_infos_equal(ours, theirs):
    """Equal but for what the VecEnv adds: `episode` and `is_reset`."""
    added = {"episode", "_episode", "is_reset", "_is_reset"}
    assert ours.keys() - added == theirs.keys()
    for key in theirs:
        if key == "final_obs":
            for one, other in zip(ours[key], theirs[key], strict=True):
                assert_trees_equal(one, other)
        elif isinstance(theirs[key], dict):
            assert_infos_equal(ours[key], theirs[key])
        else:
            np.testing.assert_array_equal(ours[key], theirs[key])


def test_a_view_for_gymnasium_reaches_the_envs():
    view = to_gymnasium(DummyVecEnv(makers()))
    assert view.get_attr("goal") == view.call("goal") == (1, 1, 1)
    view.set_attr("goal", [1, 2, 3])
    assert view.get_attr("goal") == (1, 2, 3)
    view.set_attr("goal", 4)
    assert view.call("double", 2) == (16, 16, 16)
    with pytest.raises(ValueError, match="3 values"):
        view.set_attr("goal", [1, 2])
    view.reset()
    assert len(view.render()) == 3
    view.close()
    view.close()
    assert view.closed and view.venv.closed


# --- LegacyVecEnv ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("truncate", [False, True])
def test_the_four_tuple_view(truncate):
    view = LegacyVecEnv(DummyVecEnv(makers(truncate=truncate)))
    assert (view.num_envs, len(view)) == (3, 3)
    assert view.action_space.n == 5 and view.observation_space == BOX
    np.testing.assert_array_equal(view.reset(), [[1, 0, 0]] * 3)
    observations, rewards, dones, infos = view.step([1, 2, 3])
    assert not dones.any() and "TimeLimit.truncated" not in infos[0]
    view.step_async([1, 2, 3])
    observations, rewards, dones, infos = view.step_wait()
    assert dones.tolist() == [True, False, False] and rewards.tolist() == [1, 1, 1]
    np.testing.assert_array_equal(observations[0], [2, 0, 0])
    np.testing.assert_array_equal(infos[0]["terminal_observation"], [1, 2, 1])
    assert infos[0]["TimeLimit.truncated"] is truncate
    assert view.get_attr("goal") == [1, 1, 1]
    view.close()
    assert view.closed


def test_a_true_end_at_the_time_limit_is_no_truncation():
    class BothEnv(CountingEnv):
        def step(self, action):
            observation, reward, terminated, _, info = super().step(action)
            return observation, reward, terminated, terminated, info

    view = LegacyVecEnv(DummyVecEnv([lambda: BothEnv(1)]))
    view.reset()
    _, _, dones, infos = view.step([0])
    assert dones[0] and infos[0]["TimeLimit.truncated"] is False


def test_the_four_tuple_view_knows_one_mode_and_does_not_recurse():
    with pytest.raises(ValueError, match="NEXT_STEP"):
        LegacyVecEnv(DummyVecEnv(makers(), autoreset_mode=AutoresetMode.NEXT_STEP))
    with pytest.raises(TypeError, match="VecEnv"):
        LegacyVecEnv(CountingEnv())
    empty = object.__new__(LegacyVecEnv)
    assert not hasattr(empty, "venv") and not hasattr(empty, "num_envs")
    with pytest.raises(AttributeError, match="nonsense"):
        _ = LegacyVecEnv(DummyVecEnv(makers())).nonsense


def test_every_row_belongs_to_its_lane_for_many_lanes():
    venv = from_gymnasium(SyncVectorEnv([lambda i=i: CountingEnv(4, start=100 * i) for i in range(7)]))
    observations, _ = venv.reset()
    np.testing.assert_array_equal(observations[:, 0], 100 * np.arange(7) + 1)
    tree_map(np.testing.assert_array_equal, venv.step(np.arange(7) % 5)[0][:, 2], np.arange(7) % 5)
