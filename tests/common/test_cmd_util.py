import copy
import functools
import os
import random
import re
import subprocess
import sys
import textwrap
import time
import warnings
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces, wrappers
from gymnasium.envs.classic_control import CartPoleEnv
from gymnasium.vector import AutoresetMode

from rl.common import cmd_util
from rl.common.cmd_util import WRAPPER_KEYS, make_gym_env, wrap_env
from rl.common.vec_env import DummyVecEnv, SubprocVecEnv
from rl.common.vec_env.adapters import GymnasiumVecEnv
from rl.common.vec_env.cores import Probe, usable_cores

in_process = functools.partial(make_gym_env, vec_env_cls=DummyVecEnv)


class ImageEnv(gym.Env):
    """Pictures of 6 x 8 pixels whose brightness is the step; reward = step - 2; never ends."""

    metadata = {"render_modes": ["rgb_array"], "mine": [1]}

    def __init__(self, size=(6, 8), render_mode=None, delay=0.0):
        self.observation_space = spaces.Box(0, 255, (*size, 3), np.uint8)
        self.action_space = spaces.Discrete(3)
        self.size, self.render_mode, self.delay = size, render_mode, delay
        self.steps = 0

    def observe(self):
        return np.full((*self.size, 3), self.steps, np.uint8)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self.observe(), {}

    def step(self, action):
        if self.delay:
            time.sleep(self.delay)
        self.steps += 1
        return self.observe(), float(self.steps - 2), False, False, {}

    def render(self):
        return self.observe()


class NumberEnv(ImageEnv):
    """Observes the step as one number, in a Dict."""

    def __init__(self):
        super().__init__()
        self.observation_space = spaces.Dict(x=spaces.Box(-100, 100, (2,), np.float32))

    def observe(self):
        return {"x": np.full(2, 10 * self.steps, np.float32)}


class Marked(gym.Wrapper):
    def __init__(self, env, mark=0):
        super().__init__(env)
        self.mark = mark

    def draw(self):
        return [int(self.action_space.sample()) for _ in range(5)]


class Drawn(gym.Wrapper):
    def draw(self):
        return float(self.action_space.sample()[0])


def layers(env):
    names = []
    while isinstance(env, gym.Wrapper):
        names.append(type(env).__name__)
        env = env.env
    return names[::-1]


# --- the main job, seeds ---------------------------------------------------------------------------------------------


@pytest.mark.timeout(60)
def test_cartpole_in_eight_subprocess_lanes():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env = make_gym_env("CartPole-v0", num_env=8, seed=123)
    with env:
        assert type(env) is SubprocVecEnv and env.num_envs == 8
        assert env.observation_space.shape == (4,) and env.action_space.n == 2
        assert env.spec.id == "CartPole-v0" and env.spec.max_episode_steps == 200
        assert env.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
        observations, infos = env.reset()
        assert observations.shape == (8, 4) and observations.dtype == np.float32 and len(infos) == 8
        assert len(np.unique(observations[:, 0])) == 8
        lengths = []
        for _ in range(40):
            observations, rewards, terminated, truncated, infos = env.step(np.zeros(8, np.int64))
            lengths += [info["episode"]["l"] for info in infos if "episode" in info]
        assert len(lengths) >= 24 and set(lengths) <= set(range(7, 13))


def run(env, nb_steps=40):
    """What an env gives from its first reset on, with random but reproducible actions."""
    with env:
        seen = [env.reset()[0]]
        for _ in range(nb_steps):
            actions = [env.action_space.sample() for _ in range(env.num_envs)]
            seen.append(env.step(actions)[0])
        return np.stack(seen)


@pytest.mark.timeout(60)
def test_the_seed_makes_everything_reproducible_wherever_it_runs():
    numpy_state, python_state = np.random.get_state()[1].copy(), random.getstate()
    subprocess_run = run(make_gym_env("CartPole-v1", 3, 7))
    np.testing.assert_array_equal(np.random.get_state()[1], numpy_state)
    assert random.getstate() == python_state
    np.testing.assert_array_equal(subprocess_run, run(make_gym_env("CartPole-v1", 3, 7, workers=1)))
    np.testing.assert_array_equal(subprocess_run, run(in_process("CartPole-v1", 3, 7)))
    np.testing.assert_array_equal(subprocess_run, run(in_process("CartPole-v1", 3, np.int64(7))))
    assert not np.array_equal(subprocess_run, run(in_process("CartPole-v1", 3, 8)))


def test_lane_seeds_count_up_from_the_start_index():
    env = in_process("CartPole-v1", 3, 100, None, 20, wrapper_class=Marked)
    assert env.envs[0].unwrapped.np_random_seed != 120  # not reset yet: nothing was used up
    env.reset()
    assert [one.unwrapped.np_random_seed for one in env.envs] == [120, 121, 122]
    draws = env.call("draw")
    expected = []
    for seed in (120, 121, 122):
        space = spaces.Discrete(2)
        space.seed(seed)
        expected.append([int(space.sample()) for _ in range(5)])
    assert draws == expected
    # Other learner processes have other lanes: the second's first lane is none of the first's.
    assert in_process("CartPole-v1", 3, 100, start_index=3).seed is not None
    first, second = (in_process("CartPole-v1", 3, 100, start_index=i).reset()[0] for i in (0, 3))
    assert len(np.unique(np.concatenate([first, second])[:, 0])) == 6
    # The seeds are used once: the next full reset begins other episodes.
    assert not np.array_equal(env.reset()[0], env.reset()[0])


def test_sampling_actions_leaves_the_envs_own_random_streams_alone():
    quiet, sampled = (in_process("Pendulum-v1", 2, wrapper_class=Drawn) for _ in range(2))
    sampled.action_space.sample()
    assert quiet.call("draw") == sampled.call("draw")
    assert quiet.action_space.sample() == in_process("Pendulum-v1", 2).action_space.sample()


def test_without_a_seed_everything_differs():
    first, second = (in_process("CartPole-v1", 3, None).reset()[0] for _ in range(2))
    assert len(np.unique(np.concatenate([first, second])[:, 0])) == 6


@pytest.mark.parametrize(
    ("kwargs", "error", "words"),
    [
        ({"seed": -1}, ValueError, "seed"),
        ({"seed": 2**32 - 2}, ValueError, "seed"),
        ({"seed": 1.0}, TypeError, "seed"),
        ({"start_index": -3}, ValueError, "start_index"),
        ({"start_index": None}, TypeError, "start_index"),
        ({"num_env": 0}, ValueError, "num_env"),
        ({"num_env": -2}, ValueError, "num_env"),
        ({"num_env": True}, TypeError, "num_env"),
        ({"num_env": 2.0}, TypeError, "num_env"),
        ({"num_env": "many"}, TypeError, "'auto'"),
        ({"wrapper_class_kwargs": {"k": 1}}, TypeError, "without wrapper_class"),
        ({"wrapper_class": 3}, TypeError, "wrapper_class"),
        ({"nonsense": 1}, TypeError, "nonsense"),
        ({"vec_env_cls": "subproc"}, TypeError, "vec_env_cls"),
        ({"vec_env_cls": "dummy", "workers": "auto"}, TypeError, "vec_env_cls"),
        ({"wrapper_kwargs": ["flatten"]}, TypeError, "dict"),
        ({"wrapper_kwargs": {"time_limit": 3}, "env_kwargs": {"max_episode_steps": 4}}, TypeError, "same"),
    ],
)
def test_bad_arguments_are_refused(kwargs, error, words):
    with pytest.raises(error, match=words):
        make_gym_env("CartPole-v1", **{"num_env": 3, **kwargs})


# --- what the env is made from ---------------------------------------------------------------------------------------


def test_classes_functions_specs_and_unversioned_ids():
    assert in_process(ImageEnv, 3).envs[2].unwrapped.size == (6, 8)
    assert in_process(ImageEnv, env_kwargs={"size": (2, 3)}).observation_space.shape == (2, 3, 3)
    assert in_process(lambda size: ImageEnv(size), env_kwargs={"size": (2, 3)}).num_envs == 2
    assert in_process(gym.spec("CartPole-v0")).spec.max_episode_steps == 200
    assert in_process("CartPole").spec.id == "CartPole-v1"


def test_instances_are_refused():
    instance = ImageEnv()
    for refused in (instance, DummyVecEnv([ImageEnv]), gym.make_vec("CartPole-v1", 2)):
        with pytest.raises(TypeError, match="every process must build its own"):
            make_gym_env(refused)
    with pytest.raises(ValueError, match="same environment"):
        in_process(lambda: instance, 2)


def test_wrong_ids_are_refused_before_any_process_starts():
    with pytest.raises(gym.error.NameNotFound, match="CartPole"):
        make_gym_env("CartPool-v1")
    with pytest.raises(gym.error.VersionNotFound):
        make_gym_env("CartPole-v9")
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        make_gym_env("no_such_module:Env-v0")
    with pytest.raises(TypeError, match="env_id"):
        make_gym_env(3)


@pytest.fixture
def registered():
    ids = []

    def register(**kwargs):
        gym.register(**kwargs)
        ids.append(kwargs["id"])

    yield register
    for name in ids:
        gym.registry.pop(name, None)


@pytest.mark.timeout(60)
def test_an_id_registered_only_here_works_in_workers(registered):
    class LocalEnv(ImageEnv):
        pass

    registered(id="RegisteredHere-v0", entry_point=LocalEnv, max_episode_steps=3, kwargs={"size": (2, 2)})
    with make_gym_env("RegisteredHere-v0", 2, env_kwargs={"render_mode": "rgb_array"}) as env:
        assert env.spec.id == "RegisteredHere-v0" and env.observation_space.shape == (2, 2, 3)
        assert env.render_mode == "rgb_array" and env.get_attr("render_mode") == ["rgb_array"] * 2
        env.reset()
        flags = [env.step([0, 0])[3].tolist() for _ in range(4)]
        assert flags == [[False] * 2, [False] * 2, [True] * 2, [False] * 2]
        assert env.get_images()[0].shape == (2, 2, 3)


@pytest.mark.timeout(60)
def test_module_and_id(tmp_path, monkeypatch):
    (tmp_path / "registering_module.py").write_text(
        textwrap.dedent(
            """
            import gymnasium as gym
            from gymnasium.envs.classic_control import CartPoleEnv

            IMPORTED = True

            class MyEnv(CartPoleEnv):
                def where(self):
                    import registering_module
                    return registering_module.IMPORTED

            gym.register(id="FromModule-v3", entry_point="registering_module:MyEnv")
            gym.register(id="FromModule2-v0", entry_point="gymnasium.envs.classic_control:CartPoleEnv")
            CartPoleEnv.prepared_by_module = True
            """
        )
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        for name in ("registering_module:FromModule-v3", "registering_module:FromModule"):
            with make_gym_env(name, 2, workers=1) as env:
                assert env.call("where") == [True, True]
        # The module does more than its env's class needs: the workers import it, too.
        with make_gym_env("registering_module:FromModule2-v0", 1) as env:
            assert env.get_attr("prepared_by_module") == [True]
    finally:
        del CartPoleEnv.prepared_by_module
        for name in ("FromModule-v3", "FromModule2-v0"):
            gym.registry.pop(name, None)
        sys.modules.pop("registering_module", None)


@pytest.mark.timeout(60)
def test_an_unguarded_script_with_its_own_env(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import gymnasium as gym
            from rl.common.cmd_util import make_gym_env

            class MyEnv(gym.Env):
                observation_space = gym.spaces.Discrete(10)
                action_space = gym.spaces.Discrete(2)

                def reset(self, *, seed=None, options=None):
                    super().reset(seed=seed)
                    return 3, {}

                def step(self, action):
                    return 4, 1.0, False, False, {}

            gym.register(id="Mine-v0", entry_point="__main__:MyEnv")
            for made_of in ("Mine-v0", MyEnv):
                env = make_gym_env(made_of, 2, workers=1)
                print(env.reset()[0].tolist(), env.step([0, 1])[0].tolist())
                env.close()
            """
        )
    )
    environ = {**os.environ, "PYTHONPATH": str(Path(cmd_util.__file__).parents[2])}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=50, env=environ)
    assert done.stdout.splitlines() == ["[3, 3] [4, 4]"] * 2, done.stderr
    assert done.stderr == ""


@pytest.mark.timeout(60)
@pytest.mark.parametrize("vec_env_cls", [SubprocVecEnv, DummyVecEnv])
def test_arguments_reach_every_env(vec_env_cls):
    with make_gym_env(
        "CartPole-v1",
        2,
        env_kwargs={"sutton_barto_reward": True},
        wrapper_kwargs={"time_limit": 7},
        wrapper_class=Marked,
        wrapper_class_kwargs={"mark": 3},
        vec_env_cls=vec_env_cls,
        autoreset_mode=AutoresetMode.NEXT_STEP,
    ) as env:
        assert env.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP
        assert env.get_attr("_sutton_barto_reward") == [True] * 2
        assert env.get_attr("mark") == [3] * 2
        assert env.env_is_wrapped(Marked) == [True] * 2
        env.reset()
        assert env.step([0, 1])[1].tolist() == [0.0, 0.0]


def test_the_users_wrapper_is_outermost_and_the_checker_is_off_but_can_be_turned_on():
    env = in_process("CartPole-v1", 1, wrapper_kwargs={"frame_stack": 2}, wrapper_class=Marked)
    assert layers(env.envs[0]) == ["OrderEnforcing", "TimeLimit", "FrameStackObservation", "Marked"]
    env = in_process("CartPole-v1", 1, env_kwargs={"disable_env_checker": False})
    assert layers(env.envs[0])[0] == "PassiveEnvChecker"


def test_class_level_metadata_are_left_alone():
    before = copy.deepcopy(ImageEnv.metadata)
    in_process(ImageEnv, 2).close()
    assert ImageEnv.metadata == before


# --- wrapper_kwargs --------------------------------------------------------------------------------------------------


def test_each_key_does_what_it_says():
    def first_steps(env_class=ImageEnv, nb_steps=3, **wrapper_kwargs):
        env = in_process(env_class, 1, wrapper_kwargs=wrapper_kwargs)
        seen = [env.reset()[0]]
        rewards, infos, flags = [], [], []
        for _ in range(nb_steps):
            observation, reward, _, truncated, info = env.step([0])
            seen.append(observation)
            rewards.append(float(reward[0]))
            infos.append(info[0])
            flags.append(bool(truncated[0]))
        return env, np.stack(seen)[:, 0] if not isinstance(seen[0], dict) else seen, rewards, infos, flags

    env, seen, rewards, _, _ = first_steps()
    assert seen.shape == (4, 6, 8, 3) and rewards == [-1, 0, 1]

    assert first_steps(time_limit=2)[4] == [False, True, False]
    env, seen, rewards, _, _ = first_steps(action_repeat=3)
    assert rewards == [-1 + 0 + 1, 2 + 3 + 4, 5 + 6 + 7] and seen[:, 0, 0, 0].tolist() == [0, 3, 6, 9]
    env, seen, *_ = first_steps(grayscale=True)
    assert seen.shape == (4, 6, 8) and env.observation_space.shape == (6, 8)
    env, seen, *_ = first_steps(resize=(3, 4))
    assert seen.shape == (4, 3, 4, 3) and seen[:, 0, 0, 0].tolist() == [0, 1, 2, 3]
    assert first_steps(flatten=True)[1].shape == (4, 144)
    env, seen, *_ = first_steps(frame_stack=2)
    assert seen.shape == (4, 2, 6, 8, 3) and seen[:, :, 0, 0, 0].tolist() == [[0, 0], [0, 1], [1, 2], [2, 3]]
    assert seen.dtype == np.uint8
    assert first_steps(clip_reward=(-0.5, 0.25))[2] == [-0.5, 0, 0.25]
    assert first_steps(scale_reward=10)[2] == [-10, 0, 10]
    rewards = first_steps(nb_steps=50, normalize_reward=True)[2]
    assert 0 < rewards[-1] < 10
    env, seen, *_ = first_steps(NumberEnv, flatten=True, clip_observation=(-1, 15))
    assert seen[:, 0].tolist() == [0, 10, 15, 15]
    assert env.observation_space == spaces.Box(-1, 15, (2,), np.float32)
    env, seen, *_ = first_steps(NumberEnv, nb_steps=60, flatten=True, normalize_observation=True)
    assert np.abs(seen).max() < 15 and env.observation_space.dtype == np.float32
    _, _, rewards, infos, _ = first_steps(time_limit=3, episode_statistics=True, clip_reward=(0, 1), action_repeat=1)
    assert infos[2]["episode"]["r"] == 0.0 and infos[2]["episode"]["l"] == 3  # of the rewards -1, 0, 1
    assert rewards == [0, 0, 1]
    assert set(WRAPPER_KEYS) == {
        "atari", "action_repeat", "grayscale", "resize", "flatten", "frame_stack", "clip_reward", "scale_reward",
        "normalize_reward", "normalize_observation", "clip_observation", "time_limit", "episode_statistics",
    }  # fmt: skip


def test_the_order_is_fixed_and_documented():
    given = {
        "clip_reward": (-1, 1),
        "frame_stack": 2,
        "flatten": True,
        "scale_reward": 0.1,
        "resize": (4, 4),
        "normalize_observation": True,
        "time_limit": 10,
        "normalize_reward": True,
        "grayscale": True,
        "episode_statistics": True,
        "clip_observation": (-5, 5),
        "action_repeat": 2,
    }
    expected = [
        "TimeLimit", "RepeatAction", "RecordEpisodeStatistics", "GrayscaleObservation", "ResizeObservation",
        "FlattenObservation", "NormalizeObservation", "TransformObservation", "FrameStackObservation",
        "NormalizeReward", "TransformReward", "ClipReward",
    ]  # fmt: skip
    for order in (list(given), sorted(given), sorted(given, reverse=True)):
        env = wrap_env(ImageEnv(), {key: given[key] for key in order})
        assert layers(env) == expected
    table = wrap_env.__doc__
    positions = [table.index(f"``{key}=") for key in WRAPPER_KEYS]
    assert positions == sorted(positions)
    assert env.observation_space.shape == (2, 16)


def test_none_and_false_mean_off_and_the_users_dict_is_left_alone():
    given = {"flatten": False, "grayscale": np.False_, "resize": None, "frame_stack": None, "atari": False}
    before = dict(given)
    env = ImageEnv()
    assert wrap_env(env, given) is env and wrap_env(env) is env
    assert given == before


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"flaten": True}, TypeError, r"\['flaten'\]; valid keys: time_limit, atari.*clip_reward.*wrapper_class_kw"),
        ({"k": 3, "flatten": True}, TypeError, r"\['k'\]"),
        ({"flatten": 1}, TypeError, "flatten.*True or False"),
        ({"frame_stack": 0}, ValueError, "at least 1"),
        ({"frame_stack": True}, TypeError, "integer"),
        ({"action_repeat": 2.5}, TypeError, "integer"),
        ({"resize": 84}, TypeError, "pair"),
        ({"resize": (84, 84, 3)}, TypeError, "pair"),
        ({"resize": (84, 0)}, ValueError, "at least 1"),
        ({"clip_reward": (1, -1)}, ValueError, "low < high"),
        ({"clip_reward": True}, TypeError, "pair"),
        ({"clip_observation": "ab"}, TypeError, "pair"),
        ({"scale_reward": "2"}, TypeError, "number"),
        ({"scale_reward": float("nan")}, ValueError, "finite"),
        ({"atari": {"frameskip": 4}}, TypeError, r"\['frameskip'\]; valid.*frame_skip"),
        ({"atari": 1}, TypeError, "True or False"),
    ],
)
def test_bad_wrapper_kwargs_are_refused_before_any_process_starts(given, error, words):
    with pytest.raises(error, match=words):
        make_gym_env("CartPole-v1", 2, wrapper_kwargs=given)


@pytest.mark.timeout(60)
def test_what_a_wrapper_refuses_reaches_the_caller():
    with pytest.raises(TypeError, match="Box observation space.*flatten=True"):
        make_gym_env(NumberEnv, 2, wrapper_kwargs={"clip_observation": (0, 1)}, workers=1)


@pytest.mark.timeout(60)
def test_wrapper_kwargs_work_in_workers():
    wrapper_kwargs = {
        "grayscale": True, "resize": (3, 3), "frame_stack": 2, "scale_reward": 0.5, "clip_reward": (0, 9),
        "normalize_observation": True, "clip_observation": (-2, 2), "episode_statistics": True, "time_limit": 4,
    }  # fmt: skip
    subprocess_run = run(make_gym_env(ImageEnv, 3, wrapper_kwargs=wrapper_kwargs, workers=2), 9)
    assert subprocess_run.shape == (10, 3, 2, 3, 3)
    np.testing.assert_array_equal(subprocess_run, run(in_process(ImageEnv, 3, wrapper_kwargs=wrapper_kwargs), 9))


def test_atari():
    pytest.importorskip("ale_py")
    with in_process("ALE/Pong-v5", 2, wrapper_kwargs={"atari": True, "frame_stack": 4, "clip_reward": (-1, 1)}) as env:
        assert env.observation_space == spaces.Box(0, 255, (4, 84, 84), np.uint8)
        observations, _ = env.reset()
        observations, rewards, *_ = env.step([0, 1])
        assert observations.shape == (2, 4, 84, 84) and observations.max() > 0
        assert env.envs[0].unwrapped._frameskip == 1
    small = {"atari": True, "resize": (40, 30), "grayscale": False, "action_repeat": 2}
    with in_process("ALE/Pong-v5", 1, wrapper_kwargs=small) as env:
        assert env.observation_space.shape == (40, 30, 3)
        assert env.reset()[0].shape == (1, 40, 30, 3)
        assert env.envs[0].frame_skip == 2
        assert "ResizeObservation" not in layers(env.envs[0])
    with in_process("ALE/Pong-v5", 1, wrapper_kwargs={"atari": {"noop_max": 0, "frame_skip": 3}}) as env:
        assert (env.envs[0].noop_max, env.envs[0].frame_skip) == (0, 3)


def test_atari_without_its_package(monkeypatch):
    for name in [name for name in gym.registry if name.startswith("ALE/")]:
        monkeypatch.delitem(gym.registry, name)
    monkeypatch.setitem(sys.modules, "ale_py", None)
    with pytest.raises(gym.error.NamespaceNotFound, match="ale-py, which is not installed"):
        make_gym_env("ALE/Pong-v5")


# --- native ----------------------------------------------------------------------------------------------------------


def test_native_vector_envs():
    wrapper_kwargs = {"time_limit": 5, "scale_reward": 3.0, "clip_reward": (0, 2)}
    first, second = (
        make_gym_env("CartPole-v1", 6, 11, wrapper_kwargs, start_index, vec_env_cls="native") for start_index in (0, 0)
    )
    assert isinstance(first, GymnasiumVecEnv) and first.num_envs == 6
    assert first.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP
    np.testing.assert_array_equal(first.reset()[0], second.reset()[0])
    other = make_gym_env("CartPole-v1", 6, 11, None, 6, vec_env_cls="native")
    assert not np.array_equal(first.reset(seed=11)[0], other.reset()[0])
    truncations = []
    for _ in range(6):
        _, rewards, _, truncated, _ = first.step([0, 1] * 3)
        truncations.append(truncated.all())
    assert truncations == [False] * 4 + [True, False]
    assert first.step([0] * 6)[1].tolist() == [2.0] * 6
    assert make_gym_env(
        "CartPole-v1", 2, env_kwargs={"sutton_barto_reward": True}, vec_env_cls="native"
    ).env.unwrapped._sutton_barto_reward


@pytest.mark.parametrize(
    ("env_id", "kwargs", "error", "words"),
    [
        ("Pendulum-v1", {}, ValueError, "Pendulum-v1 has no vectorised implementation"),
        (ImageEnv, {}, ValueError, "no vectorised implementation"),
        ("CartPole-v1", {"wrapper_kwargs": {"flatten": True}}, TypeError, "flatten.*VecNormalize"),
        ("CartPole-v1", {"wrapper_class": Marked}, TypeError, "wrapper_class"),
        ("CartPole-v1", {"workers": 2}, TypeError, "workers"),
        ("CartPole-v1", {"autoreset_mode": "Disabled"}, TypeError, "autoreset_mode.*env_kwargs"),
    ],
)
def test_native_refuses_what_it_cannot_do(env_id, kwargs, error, words):
    with pytest.raises(error, match=words):
        make_gym_env(env_id, 2, vec_env_cls="native", **kwargs)


def test_native_atari():
    pytest.importorskip("ale_py")
    with make_gym_env("ALE/Pong-v5", 2, vec_env_cls="native", env_kwargs={"autoreset_mode": "SameStep"}) as env:
        assert env.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
        first, _ = env.reset()
        assert first.shape == (2, 4, 84, 84) and first.dtype == np.uint8
        env.step([2, 3])
        moved = env.step([2, 3])[0]
        observations, infos = env.reset(mask=np.array([False, True]))
        np.testing.assert_array_equal(observations[0], moved[0])
        assert not np.array_equal(observations[1], moved[1]) and infos[0] == {} and infos[1]["env_id"] == 1
        np.testing.assert_array_equal(env.reset(seed=123)[0], first)


# --- how many --------------------------------------------------------------------------------------------------------


def test_num_env_auto_says_what_it_chose(capsys):
    env = in_process("CartPole-v1", "auto")
    assert 8 <= env.num_envs <= 64 and env.num_envs >= min(64, 4 * usable_cores())
    assert f"{env.num_envs} environments on {usable_cores()} usable cores" in capsys.readouterr().out
    in_process("CartPole-v1", "auto", verbose=0)
    assert capsys.readouterr().out == ""


@pytest.mark.timeout(60)
def test_workers_auto_keeps_cheap_envs_in_this_process(capsys):
    with make_gym_env("CartPole-v1", 3, workers="auto") as env:
        assert type(env) is DummyVecEnv
    said = capsys.readouterr().out
    assert said.startswith("make_gym_env: workers='auto' runs 3 environments in this process: a step takes")


@pytest.mark.timeout(60)
def test_workers_auto_gives_waiting_envs_a_worker_each(capsys):
    with make_gym_env(ImageEnv, 3, env_kwargs={"delay": 0.01}, workers="auto") as env:
        assert type(env) is SubprocVecEnv
        env.reset()
        env.step([0, 0, 0])
    assert "in 3 worker processes: a step takes" in capsys.readouterr().out


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("seconds", "kwargs", "expected"),
    [
        (5e-3, {}, SubprocVecEnv),  # computing, and worth it
        (5e-6, {}, DummyVecEnv),
        (5e-6, {"copy": False}, DummyVecEnv),
        (5e-6, {"on_worker_failure": "restart"}, SubprocVecEnv),  # what only processes can do
        (5e-6, {"vec_env_cls": SubprocVecEnv}, SubprocVecEnv),
    ],
)
def test_workers_auto_chooses_by_cost_and_by_what_was_asked_for(seconds, kwargs, expected, monkeypatch, capsys):
    probe = Probe(**{**dict.fromkeys(Probe._fields, 0), "seconds": seconds, "cpu_seconds": seconds})
    monkeypatch.setattr(cmd_util, "probe_env", lambda env_fn, **_: probe)
    monkeypatch.setattr("rl.common.vec_env.cores.usable_cores", lambda: 2)
    with make_gym_env("CartPole-v1", 4, workers="auto", verbose=0, **kwargs) as env:
        assert type(env) is expected
    assert capsys.readouterr().out == ""


def test_workers_auto_needs_a_class_with_workers():
    with pytest.raises(TypeError, match="leave out one of the two"):
        in_process("CartPole-v1", 2, workers="auto")


def test_wrap_env_serves_a_single_evaluation_env():
    env = wrap_env(gym.make("CartPole-v1"), {"frame_stack": 3, "clip_reward": (0, 0.5)})
    assert isinstance(env, wrappers.ClipReward)
    env.reset(seed=1)
    observation, reward, *_ = env.step(0)
    assert observation.shape == (3, 4) and reward == 0.5


@pytest.mark.timeout(90)
def test_the_scripts_of_the_documentation_run(tmp_path):
    root = Path(cmd_util.__file__).parents[2]
    scripts = re.findall(r"^```python\n(.*?)^```", (root / "docs/vector_envs.md").read_text("utf-8"), re.M | re.S)
    assert len(scripts) == 5
    for number, script in enumerate(scripts):
        (tmp_path / f"script{number}.py").write_text(script)
        done = subprocess.run(
            [sys.executable, f"script{number}.py"],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(root)},
            capture_output=True,
            text=True,
            timeout=80,
        )
        assert done.returncode == 0 and done.stderr == "", done.stderr
    page = (root / "docs/vector_envs.md").read_text("utf-8")
    positions = [page.index(f"`{key}=") for key in WRAPPER_KEYS]
    assert positions == sorted(positions)


@pytest.mark.parametrize("name", ["num_envs", "n_envs"])
def test_other_names_of_the_number_of_environments_are_told_the_right_one(name):
    with pytest.raises(TypeError, match="num_env, as"):
        make_gym_env("CartPole-v1", **{name: 2})


def test_workers_auto_says_so_of_a_single_environment(capsys):
    with make_gym_env("CartPole-v1", 1, workers="auto") as env:
        assert env.num_envs == 1
    assert "runs 1 environment in this process: one environment alone" in capsys.readouterr().out
