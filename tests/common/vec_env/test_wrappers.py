import copy
import csv
import json
import pickle
import sys
import types

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import FrameStackObservation

from rl.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv
from rl.common.vec_env.adapters import from_gymnasium
from rl.common.vec_env.wrappers import (
    VecCheckNan,
    VecEnvWrapper,
    VecFrameStack,
    VecMonitor,
    VecNormalize,
    VecVideoRecorder,
    frozen_statistics,
)

MODES = list(AutoresetMode)
BOX = spaces.Box(-1000, 1000, (3,), np.float32)


class CountingEnv(gym.Env):
    """Observes (episode, step, last action); reward = step; ends after `length` steps."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 20}

    def __init__(self, length=3, kind="box", render_mode=None):
        self.length, self.kind, self.render_mode = length, kind, render_mode
        self.episode, self.steps, self.action, self.bad = 0, 0, 0, None
        self.action_space = spaces.Discrete(5)
        self.observation_space = {
            "box": BOX,
            "dict": spaces.Dict(x=BOX, y=spaces.Discrete(100), z=spaces.Tuple((BOX,))),
            "text": spaces.Text(10),
        }[kind]

    def observe(self):
        row = np.array([self.episode, self.steps, self.action], np.float32)
        if self.bad == self.steps:
            row[1] = np.nan
        if self.kind == "text":
            return f"{self.steps}"
        return row if self.kind == "box" else {"x": row, "y": self.steps, "z": (row * 2,)}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode, self.steps, self.action = self.episode + 1, 0, 0
        return self.observe(), {}

    def step(self, action):
        self.steps, self.action = self.steps + 1, int(action)
        return self.observe(), float(self.steps), self.steps == self.length, False, {"level": self.episode}

    def render(self):
        return np.full((2, 4, 3), 10 * self.episode + self.steps, np.uint8)


def dummy(nb_envs=3, mode=AutoresetMode.SAME_STEP, lengths=(2, 3, 4), **kwargs):
    return DummyVecEnv(
        [lambda i=i: CountingEnv(lengths[i % len(lengths)], **kwargs) for i in range(nb_envs)], autoreset_mode=mode
    )


def play(venv, nb_steps, mode):
    """Yield what each step returned, and reset what ended where the mode asks for it."""
    for step in range(nb_steps):
        result = venv.step((np.arange(venv.num_envs) + step) % 5)
        yield result
        ended = result[2] | result[3]
        if mode is AutoresetMode.DISABLED and ended.any():
            venv.reset(mask=ended)


# --- VecEnvWrapper ---------------------------------------------------------------------------------------------------


def test_a_plain_wrapper_passes_everything_on():
    inner = dummy(render_mode="rgb_array")
    venv = VecEnvWrapper(VecEnvWrapper(inner))
    assert isinstance(venv, VecEnv) and venv.unwrapped is inner and len(venv) == 3
    assert venv.observation_space == BOX and venv.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
    assert venv.batched_observation_space.shape == (3, 3)
    assert venv.seed(3) == [3, 4, 5]
    venv.reset()
    assert [env.np_random_seed for env in inner.envs] == [3, 4, 5]
    observations, *_, infos = venv.step([1, 2, 3])
    np.testing.assert_array_equal(observations[:, 2], [1, 2, 3])
    observations, *_, infos = venv.step([1, 2, 3])
    np.testing.assert_array_equal(venv.next_obs()[0], [1, 2, 1])
    venv.set_attr("length", 9, indices=1)
    assert venv.get_attr("length") == [2, 9, 4] and venv.has_attr("length") and not venv.has_attr("nonsense")
    assert venv.call("observe", indices=2)[0].tolist() == [1, 2, 3]
    assert venv.env_is_wrapped(VecEnvWrapper) == [True] * 3
    assert venv.env_is_wrapped(gym.wrappers.TimeLimit, [0]) == [False]
    assert venv.action_masks() is None
    assert len(venv.get_images()) == 3 and venv.render().shape == (4, 8, 3)
    with pytest.raises(ValueError, match="human"):
        venv.render("human")
    venv.close()
    venv.close()
    assert venv.closed and inner.closed


def test_steps_of_some_lanes_pass_a_plain_wrapper_and_no_other():
    venv = VecEnvWrapper(dummy())
    venv.reset()
    venv.send([1, 2], [0, 2])
    assert venv.recv()[-1].tolist() == [0, 2]
    assert [part.num_envs for part in venv.split(3)] == [1, 1, 1]
    monitored = VecMonitor(dummy())
    monitored.reset()
    for call in (lambda: monitored.send([1, 2], [0, 2]), monitored.recv, lambda: monitored.split(2)):
        with pytest.raises(NotImplementedError, match="VecMonitor"):
            call()


def test_attributes_are_looked_up_inside():
    venv = VecFrameStack(VecNormalize(VecMonitor(dummy())), 2)
    assert venv.clip_obs == 10.0 and venv.nb_frames == 2
    with pytest.raises(AttributeError, match="VecFrameStack > VecNormalize > VecMonitor > DummyVecEnv.*'nonsense'"):
        _ = venv.nonsense
    twice = VecEnvWrapper(VecNormalize(VecNormalize(dummy())))
    with pytest.raises(AttributeError, match="ambiguous"):
        twice.save("never.npz")
    assert twice.venv.save and twice.envs


def test_half_made_wrappers_and_copies_fail_cleanly():
    for cls in (VecEnvWrapper, VecNormalize, VecFrameStack, VecMonitor):
        empty = object.__new__(cls)
        assert not hasattr(empty, "venv") and not hasattr(empty, "envs")
    venv = VecNormalize(dummy())
    for copier in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="cannot be pickled or copied"):
            copier(venv)
    for wrapped in (CountingEnv(), SyncVectorEnv([CountingEnv])):
        for cls in (VecEnvWrapper, VecNormalize, lambda env: VecFrameStack(env, 2), VecMonitor, VecCheckNan):
            with pytest.raises(TypeError, match="wraps a VecEnv"):
                cls(wrapped)


# --- VecNormalize ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_statistics_are_those_of_all_that_was_seen(mode):
    venv = VecNormalize(dummy(mode=mode), gamma=0.9, clip_obs=1e9, clip_reward=1e9)
    assert venv.observation_space == spaces.Box(-1e9, 1e9, (3,), np.float32)
    normalized, _ = venv.reset()
    seen, returns, running, skip = [venv.get_original_obs()], [], np.zeros(3), np.zeros(3, bool)
    rms = venv.obs_rms[""]
    for observations, rewards, terminated, truncated, infos in play(venv, 14, mode):
        raw, raw_rewards = venv.get_original_obs(), venv.get_original_reward()
        seen.append(raw)
        for lane in range(3):
            if not skip[lane]:
                running[lane] = 0.9 * running[lane] + raw_rewards[lane]
                returns.append(running[lane])
        ended = terminated | truncated
        running[ended] = 0
        skip = ended if mode is AutoresetMode.NEXT_STEP else np.zeros(3, bool)
        expected = (raw - rms.mean) / np.sqrt(rms.var + 1e-8)
        np.testing.assert_allclose(observations, expected, rtol=1e-5)
        assert observations.dtype == np.float32
        np.testing.assert_allclose(rewards, raw_rewards / np.sqrt(venv.return_rms.var + 1e-8))
        if mode is AutoresetMode.SAME_STEP:
            for lane in np.flatnonzero(ended):
                final = np.array([raw[lane][0] - 1, (2, 3, 4)[lane], infos[lane]["final_obs"][2]])
                expected = (final - rms.mean) / np.sqrt(rms.var + 1e-8)
                np.testing.assert_allclose(infos[lane]["final_obs"][:2], expected[:2], rtol=1e-5)
                np.testing.assert_array_equal(venv.next_obs()[lane], infos[lane]["final_obs"])
                assert infos[lane]["episode"]["r"] == sum(range((2, 3, 4)[lane] + 1))
        if mode is AutoresetMode.DISABLED and ended.any():
            # The lanes reset by `play` after this are seen, too, and no others.
            rows = np.stack([[raw[lane][0] + 1, 0, 0] for lane in np.flatnonzero(ended)])
            seen.append(rows)
    # Gymnasium's statistics start with a count of 1e-4 at mean 0, variance 1.
    everything = np.concatenate(seen)
    if mode is AutoresetMode.DISABLED and not (terminated | truncated).any():
        assert len(everything) == round(rms.count)
    assert rms.count == pytest.approx(len(everything) + 1e-4)
    np.testing.assert_allclose(rms.mean, everything.mean(axis=0), rtol=1e-3)
    np.testing.assert_allclose(rms.var, everything.var(axis=0), rtol=1e-3, atol=1e-3)
    assert venv.return_rms.count == pytest.approx(len(returns) + 1e-4)
    np.testing.assert_allclose(venv.return_rms.var, np.var(returns), rtol=1e-3)


def test_normalising_changes_neither_what_lies_inside_nor_earlier_results():
    inner = dummy(nb_envs=1)
    venv = VecNormalize(inner)
    first, _ = venv.reset()
    kept = first.copy()
    venv.step([1])
    _, _, _, _, infos = venv.step([1])
    np.testing.assert_array_equal(first, kept)
    np.testing.assert_array_equal(inner.next_obs()[0], [1, 2, 1])
    assert venv.next_obs().dtype == np.float32 and not np.array_equal(venv.next_obs()[0], [1, 2, 1])


def test_values_are_clipped_and_can_be_brought_back():
    venv = VecNormalize(dummy(), clip_obs=0.5, clip_reward=0.25)
    venv.reset()
    for observations, rewards, *_ in play(venv, 20, AutoresetMode.SAME_STEP):
        assert np.abs(observations).max() <= 0.5 and np.abs(rewards).max() <= 0.25
    rms = venv.obs_rms[""]
    rows = rms.mean + np.sqrt(rms.var) * np.array([[0.1, -0.2, 0.3], [-0.3, 0.2, 0.4]])
    assert np.abs(venv.normalize_obs(rows)).max() < 0.5
    np.testing.assert_allclose(venv.unnormalize_obs(venv.normalize_obs(rows)), rows, rtol=1e-5)
    rewards = np.array([0.1, -0.2])
    np.testing.assert_allclose(venv.unnormalize_reward(venv.normalize_reward(rewards)), rewards)


def test_parts_that_are_no_boxes_and_keys_that_were_not_chosen_stay():
    venv = VecNormalize(dummy(kind="dict"), norm_obs_keys=["z"], norm_reward=False)
    assert list(venv.obs_rms) == ["['z'][0]"]
    assert venv.observation_space["x"] == BOX and venv.observation_space["z"][0].high[0] == 10
    observations, _ = venv.reset()
    observations, rewards, *_ = venv.step([0, 1, 2])
    np.testing.assert_array_equal(observations["x"][:, 2], [0, 1, 2])
    assert observations["y"].tolist() == [1, 1, 1] and observations["z"][0].dtype == np.float32
    assert rewards.tolist() == [1, 1, 1]
    observations, rewards, _, _, infos = venv.step([0, 1, 2])
    assert infos[0]["final_obs"]["y"] == 2 and np.abs(infos[0]["final_obs"]["z"][0]).max() < 10
    everything = VecNormalize(dummy(kind="dict"))
    assert list(everything.obs_rms) == ["['x']", "['z'][0]"]


def test_frozen_statistics():
    venv = VecMonitor(VecNormalize(dummy()))
    venv.reset()
    venv.step([0, 1, 2])
    before = venv.get_state()
    with frozen_statistics(venv):
        assert venv.venv.training is False
        venv.reset()
        venv.step([0, 1, 2])
        with frozen_statistics(venv):
            pass
        assert venv.venv.training is False
    assert venv.venv.training is True
    for key, value in venv.get_state().items():
        np.testing.assert_array_equal(value, before[key])
    venv.reset()
    assert venv.get_state()["obs/count"] > before["obs/count"]
    with pytest.raises(ZeroDivisionError), frozen_statistics(venv):
        raise ZeroDivisionError
    assert venv.venv.training is True
    with frozen_statistics(CountingEnv()), frozen_statistics(None):
        pass


def test_statistics_are_saved_without_pickle_and_loaded(tmp_path):
    venv = VecNormalize(dummy(kind="dict"), clip_obs=5.0, gamma=0.5, norm_obs_keys=["x", "z"])
    venv.reset()
    for _ in play(venv, 7, AutoresetMode.SAME_STEP):
        pass
    path = tmp_path / "statistics.dat"
    path.write_text("an older file")
    venv.save(path)
    assert [file.name for file in tmp_path.iterdir()] == ["statistics.dat"]
    with np.load(path, allow_pickle=False) as file:
        assert all(file[name].dtype != object for name in file.files)
    loaded = VecNormalize.load(path, dummy(kind="dict"))
    assert loaded.training is False and loaded.clip_obs == 5.0 and loaded.gamma == 0.5
    assert loaded.observation_space == venv.observation_space
    for key, value in venv.get_state().items():
        np.testing.assert_array_equal(loaded.get_state()[key], value)
    observations = venv.get_original_obs()
    np.testing.assert_array_equal(loaded.normalize_obs(observations)["x"], venv.normalize_obs(observations)["x"])
    # A loaded one goes on learning, and does not share its arrays with the file's other reader.
    loaded.training = True
    loaded.reset()
    assert loaded.get_state()["return/count"] == venv.get_state()["return/count"]
    assert loaded.obs_rms["['x']"].count == venv.obs_rms["['x']"].count + 3
    other = VecNormalize(dummy())
    before = other.get_state()
    with pytest.raises(ValueError, match="other observations"):
        other.load_statistics(path)
    assert other.get_state().keys() == before.keys()
    np.savez(tmp_path / "foreign.npz", a=np.zeros(3))
    with pytest.raises(ValueError, match="not written by"):
        other.load_statistics(tmp_path / "foreign.npz")
    with pytest.raises(FileNotFoundError):
        venv.save(tmp_path / "nowhere" / "file")


@pytest.mark.parametrize(
    ("kwargs", "error", "words"),
    [
        ({"clip_obs": 0}, ValueError, "clip_obs"),
        ({"gamma": 1.5}, ValueError, "gamma"),
        ({"norm_obs_keys": ["q"]}, ValueError, "'q'"),
        ({"norm_obs_keys": ["y"]}, TypeError, "Box observation"),
    ],
)
def test_bad_settings_are_refused(kwargs, error, words):
    with pytest.raises(error, match=words):
        VecNormalize(dummy(kind="dict"), **kwargs)
    with pytest.raises(ValueError, match="Dict observations"):
        VecNormalize(dummy(), norm_obs_keys=["x"])


# --- VecFrameStack ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("padding", ["reset", "zero"])
@pytest.mark.parametrize("nb_frames", [1, 2, 4])
@pytest.mark.parametrize("mode", MODES)
def test_stacks_are_those_of_gymnasiums_wrapper_in_each_env(mode, nb_frames, padding):
    venv = VecFrameStack(dummy(mode=mode), nb_frames, padding)
    wrapped = DummyVecEnv(
        [lambda i=i: FrameStackObservation(CountingEnv(2 + i), nb_frames, padding_type=padding) for i in range(3)],
        autoreset_mode=mode,
    )
    assert venv.observation_space == wrapped.observation_space and venv.observation_space.shape == (nb_frames, 3)
    np.testing.assert_array_equal(venv.reset()[0], wrapped.reset()[0])
    kept = []
    for step in range(12):
        actions = (np.arange(3) + step) % 5
        first, second = venv.step(actions), wrapped.step(actions)
        kept.append((first[0], first[0].copy()))
        np.testing.assert_array_equal(first[0], second[0])
        assert first[0].dtype == np.float32
        np.testing.assert_array_equal(venv.next_obs(), wrapped.next_obs())
        for info, other in zip(first[4], second[4], strict=True):
            assert info.keys() == other.keys()
            if "final_obs" in info:
                np.testing.assert_array_equal(info["final_obs"], other["final_obs"])
        ended = first[2] | first[3]
        if mode is AutoresetMode.DISABLED and ended.any():
            np.testing.assert_array_equal(venv.reset(mask=ended)[0], wrapped.reset(mask=ended)[0])
    for returned, copied in kept:
        np.testing.assert_array_equal(returned, copied)


def test_a_lane_reset_by_hand_begins_anew_also_under_next_step():
    venv = VecFrameStack(VecNormalize(dummy(mode=AutoresetMode.NEXT_STEP), norm_obs=False, gamma=1.0), 2)
    venv.reset()
    venv.step([0, 0, 0])
    assert venv.step([0, 0, 0])[2].tolist() == [True, False, False]
    # Lane 0 has ended, lane 1 has not: both go on in a new episode, whose first step is a real one.
    observations, _ = venv.reset(mask=np.array([True, True, False]))
    np.testing.assert_array_equal(observations[:, :, 1], [[0, 0], [0, 0], [1, 2]])
    before = venv.return_rms.count
    observations, *_ = venv.step([0, 0, 0])
    np.testing.assert_array_equal(observations[:, :, 1], [[0, 1], [0, 1], [2, 3]])
    assert venv.return_rms.count == before + 3
    np.testing.assert_array_equal(venv.returns, [1, 1, 6])


def test_what_the_user_does_to_a_stack_is_his_own_affair():
    venv = VecFrameStack(dummy(), 2)
    venv.reset()[0][:] = -1
    observations = venv.step([1, 1, 1])[0]
    np.testing.assert_array_equal(observations[0], [[1, 0, 0], [1, 1, 1]])
    observations[:] = -1
    np.testing.assert_array_equal(venv.step([1, 1, 1])[0][1], [[1, 1, 1], [1, 2, 1]])


def test_trees_are_stacked_leaf_by_leaf_and_text_is_refused():
    venv = VecFrameStack(dummy(kind="dict"), 3)
    observations, _ = venv.reset()
    assert observations["x"].shape == (3, 3, 3) and observations["y"].shape == (3, 3)
    assert observations["z"][0].shape == (3, 3, 3)
    assert venv.observation_space.contains(
        {"x": observations["x"][0], "y": observations["y"][0], "z": (observations["z"][0][0],)}
    )
    venv.step([1, 1, 1])
    observations, _, _, _, infos = venv.step([1, 1, 1])
    assert observations["y"].tolist() == [[0, 0, 0], [0, 1, 2], [0, 1, 2]]
    assert infos[0]["final_obs"]["y"].tolist() == [0, 1, 2]
    with pytest.raises(TypeError, match="Text"):
        VecFrameStack(dummy(kind="text"), 2)
    for nb_frames in (0, -1, 2.0, True):
        with pytest.raises(ValueError, match="nb_frames"):
            VecFrameStack(dummy(), nb_frames)
    with pytest.raises(ValueError, match="padding"):
        VecFrameStack(dummy(), 2, "edge")


@pytest.mark.parametrize("order", ["stack first", "normalise first"])
def test_stacking_and_normalising_work_in_both_orders(order):
    if order == "stack first":
        venv = VecNormalize(VecFrameStack(dummy(), 2))
    else:
        venv = VecFrameStack(VecNormalize(dummy()), 2)
    observations, _ = venv.reset()
    assert observations.shape == (3, 2, 3) and observations.dtype == np.float32
    for observations, *_, infos in play(venv, 9, AutoresetMode.SAME_STEP):
        assert observations.shape == (3, 2, 3) and venv.next_obs().shape == (3, 2, 3)
        assert all(info["final_obs"].shape == (2, 3) for info in infos if "final_obs" in info)
    assert venv.observation_space.shape == (2, 3)


def test_wrappers_take_an_adapted_vector_env():
    venv = VecFrameStack(from_gymnasium(SyncVectorEnv([lambda: CountingEnv(2)] * 2)), 2)
    venv.reset()
    for step in range(5):
        observations, *_, infos = venv.step([step, step])
    # NEXT_STEP: steps 1 2 | reset | 1 2
    np.testing.assert_array_equal(observations[0], [[2, 1, 3], [2, 2, 4]])


@pytest.mark.timeout(60)
@pytest.mark.parametrize("copy_out", [True, False])
def test_wrappers_give_the_same_around_worker_processes(copy_out):
    env_fns = [lambda i=i: CountingEnv(2 + i) for i in range(3)]

    def wrap(venv):
        return VecFrameStack(VecNormalize(VecMonitor(VecCheckNan(venv))), 2)

    with wrap(SubprocVecEnv(env_fns, workers=2, copy=copy_out)) as ours, wrap(DummyVecEnv(env_fns)) as twin:
        np.testing.assert_array_equal(ours.reset()[0], twin.reset()[0])
        for first, second in zip(play(ours, 9, None), play(twin, 9, None), strict=True):
            for one, other in zip(first[:4], second[:4], strict=True):
                np.testing.assert_array_equal(one, other)
            np.testing.assert_array_equal(ours.next_obs(), twin.next_obs())
            for info, other in zip(first[4], second[4], strict=True):
                assert info.keys() == other.keys()


# --- VecMonitor ------------------------------------------------------------------------------------------------------


def read_monitor(path):
    lines = path.read_text().splitlines()
    assert lines[0].startswith("#")
    return json.loads(lines[0][1:]), list(csv.DictReader(lines[1:]))


@pytest.mark.parametrize("mode", MODES)
def test_every_finished_episode_is_a_line(mode, tmp_path):
    path = tmp_path / "monitor.csv"
    venv = VecMonitor(dummy(mode=mode), path, info_keywords=["level"])
    venv.reset()
    ends = []
    for _, _, terminated, truncated, infos in play(venv, 13, mode):
        for lane in np.flatnonzero(terminated | truncated):
            ends.append(lane)
            assert infos[lane]["episode"]["l"] == (2, 3, 4)[lane]
        assert len(read_monitor(path)[1]) == len(ends)  # on disk at once
    header, rows = read_monitor(path)
    assert header["env_id"] is None and header["t_start"] > 1e9
    assert [int(row["lane"]) for row in rows] == ends and len(ends) > 8
    levels = [0, 0, 0]
    for row in rows:
        lane = int(row["lane"])
        levels[lane] += 1
        length = (2, 3, 4)[lane]
        assert (float(row["r"]), int(row["l"])) == (length * (length + 1) / 2, length)
        assert int(row["level"]) == levels[lane]
    times = [float(row["t"]) for row in rows]
    assert times == sorted(times) and times[0] >= 0
    venv.close()
    venv.close()


def test_an_episode_cut_by_a_reset_is_not_counted(tmp_path):
    path = tmp_path / "monitor.csv"
    venv = VecMonitor(dummy(), path)
    venv.reset()
    venv.step([0, 0, 0])
    venv.reset(mask=np.array([True, False, False]))
    venv.step([0, 0, 0])
    assert read_monitor(path)[1] == []
    venv.step([0, 0, 0])
    assert [(row["lane"], row["l"]) for row in read_monitor(path)[1]] == [("0", "2"), ("1", "3")]
    venv.close()
    again = VecMonitor(dummy(), path, append=True)
    again.reset()
    again.step([0, 0, 0])
    again.step([0, 0, 0])
    assert len(read_monitor(path)[1]) == 3
    again.close()
    VecMonitor(dummy(), path).close()
    assert read_monitor(path)[1] == []


@pytest.mark.parametrize("mode", MODES)
def test_an_episode_lasts_from_its_own_reset(mode, monkeypatch):
    class Bare(VecEnvWrapper):
        def step_wait(self, timeout=None):
            clock[0] += 10
            *result, infos = super().step_wait(timeout)
            return *result, [{} for _ in infos]

    clock = [0]
    venv = VecMonitor(Bare(dummy(1, mode, lengths=(2,))))
    monkeypatch.setattr("rl.common.vec_env.recording.time.perf_counter", lambda: clock[0])
    venv.reset()
    episodes = [infos[0]["episode"] for *_, infos in play(venv, 8, mode) if "episode" in infos[0]]
    assert len(episodes) >= 3
    assert all(episode == {"r": 3.0, "l": 2, "t": 20} for episode in episodes)


def test_monitor_without_a_file_and_with_a_missing_key(tmp_path):
    venv = VecMonitor(from_gymnasium(SyncVectorEnv([lambda: CountingEnv(2)])))
    venv.reset()
    venv.step([0])
    episode = venv.step([0])[4][0]["episode"]
    assert (episode["r"], episode["l"]) == (3.0, 2) and episode["t"] >= 0
    missing = VecMonitor(dummy(), tmp_path / "m.csv", info_keywords=["score"])
    missing.reset()
    missing.step([0, 0, 0])
    with pytest.raises(KeyError, match="lane 0 has no 'score'"):
        missing.step([0, 0, 0])


# --- VecCheckNan -----------------------------------------------------------------------------------------------------


def test_f19_nan_is_found_where_it_appears():
    venv = VecCheckNan(dummy())
    venv.set_attr("bad", 1, indices=2)
    venv.reset()
    with pytest.raises(ValueError, match=r"observation of lane 2 is \[ 1. nan  3.\] after action .*3"):
        venv.step([1, 2, 3])
    nested = VecCheckNan(dummy(kind="dict"))
    nested.set_attr("bad", 0)
    with pytest.raises(ValueError, match=r"observation\['x'\] of lane 0 .* lanes \[1, 2\]"):
        nested.reset()
    final = VecCheckNan(dummy())
    final.set_attr("bad", 2, indices=0)
    final.reset()
    final.step([0, 0, 0])
    with pytest.raises(ValueError, match="final observation of lane 0"):
        final.step([0, 0, 0])


class PlainVecEnv(VecEnvWrapper):
    """Returns what it is told to."""

    rewards = np.zeros(3)

    def step_async(self, actions):
        pass

    def step_wait(self, timeout=None):
        none = np.zeros(3, bool)
        return np.zeros((3, 3), np.float32), self.rewards, none, none, [{}, {}, {}]


@pytest.mark.parametrize(("value", "finds_inf"), [(np.nan, True), (np.inf, True), (-np.inf, True), (np.inf, False)])
def test_rewards_and_actions_are_checked(value, finds_inf):
    venv = VecCheckNan(PlainVecEnv(dummy()), check_inf=finds_inf)
    venv.reset()
    venv.step(np.zeros((3, 2)))
    venv.venv.rewards = np.array([0, value, 0])
    if np.isnan(value) or finds_inf:
        with pytest.raises(ValueError, match=r"reward of lane 1 .* after action array\(\[0.5, 0.5\]\)"):
            venv.step(np.full((3, 2), 0.5))
        rows = [np.zeros(1), np.zeros(1), np.full(1, value)]
        for actions in (np.array(rows), [0.0, 0.0, value], rows):
            with pytest.raises(ValueError, match="action of lane 2"):
                venv.step_async(actions)
    else:
        venv.step(np.full((3, 2), value))


def test_warnings_come_once_or_each_time():
    with pytest.raises(ValueError, match="on_nan"):
        VecCheckNan(dummy(), on_nan="ignore")
    for once in (True, False):
        venv = VecCheckNan(PlainVecEnv(dummy()), on_nan="warn", warn_once=once)
        venv.reset()
        venv.venv.rewards = np.array([np.nan, 0, 0])
        with pytest.warns(RuntimeWarning, match="reward of lane 0") as record:
            for _ in range(3):
                venv.step([0, 0, 0])
        assert len(record) == (1 if once else 3)


# --- VecVideoRecorder ------------------------------------------------------------------------------------------------


@pytest.fixture
def films(monkeypatch):
    """Stands in for MoviePy, and keeps the frames of every film."""
    made = {}

    class Clip:
        def __init__(self, frames, fps):
            self.frames, self.fps = list(frames), fps

        def write_videofile(self, path, logger=None):
            made[path.rsplit("/", 1)[-1]] = (np.stack(self.frames), self.fps)

    names = ("moviepy", "moviepy.video", "moviepy.video.io", "moviepy.video.io.ImageSequenceClip")
    modules = {name: types.ModuleType(name) for name in names}
    modules[names[-1]].ImageSequenceClip = Clip
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return made


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP])
def test_chosen_episodes_are_filmed(mode, films, tmp_path):
    inner = dummy(nb_envs=2, mode=mode, lengths=(2, 50), render_mode="rgb_array")
    venv = VecVideoRecorder(inner, tmp_path, episode_trigger=lambda n: n in (0, 2))
    venv.reset()
    for _ in play(venv, 8, mode):
        pass
    venv.close()
    venv.close()
    assert set(films) == {"rl-video-episode-0.mp4", "rl-video-episode-2.mp4"}
    frames, fps = films["rl-video-episode-0.mp4"]
    assert fps == 20 and frames.shape[1:] == (2, 8, 3)
    lane0 = frames[:, 0, 0, 0].tolist()
    assert lane0 == ([10, 11] if mode is AutoresetMode.SAME_STEP else [10, 11, 12])
    assert frames[:, 0, 4, 0].tolist() == [10, 11, 12][: len(lane0)]
    assert films["rl-video-episode-2.mp4"][0][:, 0, 0, 0].tolist()[:2] == [30, 31]


def test_films_begin_at_chosen_steps_and_have_a_length(films, tmp_path):
    inner = dummy(render_mode="rgb_array", lengths=(50,))
    venv = VecVideoRecorder(
        inner, tmp_path, step_trigger=lambda n: n == 3, video_length=2, name_prefix="x", record_first_only=True, fps=7
    )
    venv.reset()
    for _ in play(venv, 9, AutoresetMode.SAME_STEP):
        pass
    venv.close()
    frames, fps = films["x-step-3.mp4"]
    assert fps == 7 and frames.shape[1:] == (2, 4, 3)
    assert frames[:2, 0, 0, 0].tolist() == [14, 15]


def test_what_does_not_render_is_refused(films, tmp_path):
    with pytest.raises(ValueError, match="render_mode='rgb_array'"):
        VecVideoRecorder(dummy(), tmp_path)
