"""The contract: what every vector env answers, in-process and in workers alike."""

import copy
import pickle
import random

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from rl.common.vec_env import (
    AlreadySteppingError,
    ClosedEnvironmentError,
    CloudpickleWrapper,
    EnvFnError,
    NotSteppingError,
    ResetNeeded,
    VecEnv,
    VecEnvWrapper,
)
from tests.common.vec_env.envs import BoundEnv, CountingEnv, MaskEnv, MaskInfoEnv, counting, equal

pytestmark = pytest.mark.timeout(30)


def test_describes_itself(make):
    venv = make(counting(3, infos=True))
    assert isinstance(venv, VecEnv)
    assert venv.num_envs == len(venv) == 3
    assert venv.observation_space == venv.single_observation_space == spaces.Box(-1, 10**6, (4,), np.int64)
    assert venv.action_space == venv.single_action_space == spaces.Discrete(5)
    assert isinstance(venv.action_space.n, int)
    assert venv.batched_observation_space.shape == (3, 4)
    assert venv.batched_action_space == spaces.MultiDiscrete([5, 5, 5])
    assert venv.metadata["autoreset_mode"] == AutoresetMode.SAME_STEP
    assert venv.metadata["render_modes"] == ["rgb_array", "ansi"]
    assert venv.unwrapped is venv
    assert not venv.closed
    assert type(venv).__name__ in repr(venv)


class SamplingEnv(CountingEnv):
    """Uses its action space's random stream for itself."""

    def __init__(self):
        super().__init__()
        self.action_space = spaces.Box(0, 1, (2,), np.float64, seed=3)

    def step(self, action):
        return super().step(int(self.action_space.sample()[0] * 5))


def test_the_action_space_has_a_random_stream_of_its_own(make):
    reference = spaces.Box(0, 1, (2,), np.float64, seed=3)
    wanted = [int(reference.sample()[0] * 5) for _ in range(3)]
    venv = make([SamplingEnv] * 2)
    venv.reset()
    for action in wanted:
        actions = np.stack([venv.action_space.sample() for _ in range(2)])
        assert venv.step(actions)[0][:, 3].tolist() == [action] * 2
    # Who samples through a view or a wrapper goes on in the same stream, rather than repeat it.
    venv.action_space.seed(5)
    inside = [one.action_space.sample()[0] for one in (*venv.split(2), VecEnvWrapper(venv), venv)]
    venv.action_space.seed(5)
    assert inside == [venv.action_space.sample()[0] for _ in range(4)]


def test_same_step_table(make):
    """Env 1 ends after 3 steps: by termination in its first episode, by truncation in its second."""
    venv = make(counting(3, length=2))
    obs, infos = venv.reset()
    assert obs.tolist() == [[0, 0, 0, -1], [1, 0, 0, -1], [2, 0, 0, -1]] and obs.dtype == np.int64
    assert infos == [{}, {}, {}]
    ends = []
    for t in range(1, 7):
        obs, rewards, terminated, truncated, infos = venv.step([t % 5] * 3)
        assert rewards.dtype == np.float64 and terminated.dtype == truncated.dtype == bool
        for array in (rewards, terminated, truncated):
            assert array.shape == (3,)
        if terminated[1] or truncated[1]:
            ends.append((t, bool(terminated[1]), bool(truncated[1])))
            assert obs[1].tolist() == [1, len(ends), 0, -1]
            assert infos[1]["final_obs"].tolist() == [1, len(ends) - 1, 3, t % 5]
            assert infos[1]["episode"]["l"] == 3 and infos[1]["reset_info"] == {}
            assert infos[1]["episode"]["r"] == pytest.approx(3 * (len(ends) - 1) + 0.06)
            assert infos[1]["episode"]["t"] > 0
            assert venv.next_obs()[1].tolist() == infos[1]["final_obs"].tolist()
        else:
            assert "final_obs" not in infos[1] and venv.next_obs()[1].tolist() == obs[1].tolist()
    assert ends == [(3, True, False), (6, False, True)]


def test_next_step_table(make):
    venv = make(counting(2, length=2), autoreset_mode="next_step")
    venv.reset()
    seen = []
    for _ in range(6):
        obs, rewards, terminated, truncated, infos = venv.step([1, 2])
        seen.append((obs[0].tolist(), round(float(rewards[0]), 2), bool(terminated[0]), bool(truncated[0])))
        assert infos[0].get("is_reset", False) == (obs[0, 2] == 0)
        assert equal(venv.next_obs(), obs)
        assert "final_obs" not in infos[0]
    assert seen == [
        ([0, 0, 1, 1], 0.01, False, False),
        ([0, 0, 2, 1], 0.02, True, False),
        ([0, 1, 0, -1], 0.0, False, False),
        ([0, 1, 1, 1], 1.01, False, False),
        ([0, 1, 2, 1], 1.02, False, True),
        ([0, 2, 0, -1], 0.0, False, False),
    ]


def test_disabled_table(make):
    venv = make(counting(3, length=2), autoreset_mode=AutoresetMode.DISABLED)
    venv.reset()
    venv.step([0, 0, 0])
    obs, _, terminated, _, infos = venv.step([0, 0, 0])
    assert terminated.tolist() == [True, False, True] and obs[0].tolist() == [0, 0, 2, 0]
    assert infos[0]["episode"]["l"] == 2 and "final_obs" not in infos[0]
    with pytest.raises(ResetNeeded, match=r"\[0, 2\].*mask"):
        venv.step([0, 0, 0])
    obs, infos = venv.reset(mask=terminated)
    assert obs.tolist() == [[0, 1, 0, -1], [1, 0, 2, 0], [2, 1, 0, -1]] and infos[1] == {}
    obs, *_ = venv.step([3, 3, 3])
    assert obs.tolist() == [[0, 1, 1, 3], [1, 0, 3, 3], [2, 1, 1, 3]]


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_masked_reset_leaves_the_other_lanes_alone(make, mode):
    venv = make(counting(4, length=3), autoreset_mode=mode)
    venv.reset()
    for _ in range(2):
        before, *_ = venv.step([1, 2, 3, 4])
    after, infos = venv.reset(mask=np.array([False, True, False, True]))
    assert after[[0, 2]].tolist() == before[[0, 2]].tolist()
    assert after[[1, 3]].tolist() == [[1, 1, 0, -1], [3, 1, 0, -1]]
    assert len(infos) == 4
    with pytest.raises(RuntimeError, match="next_obs"):
        venv.next_obs()
    # Lanes 0 and 2 end now, in their third step; lanes 1 and 3 go on.
    obs, _, terminated, truncated, _ = venv.step([1, 2, 3, 4])
    assert (terminated | truncated).tolist() == [True, False, True, False]
    assert obs[1].tolist() == [1, 1, 1, 2] and obs[3].tolist() == [3, 1, 1, 4]
    # In NEXT_STEP a masked reset also takes the place of the reset that was due.
    obs, _ = venv.reset(mask=terminated)
    obs, *_ = venv.step([1, 1, 1, 1])
    assert obs[0, 2] == 1


def test_seeds_are_stored_and_used_once(make):
    venv = make(counting(3, infos=True))
    assert venv.seed(10) == [10, 11, 12]
    _, first = venv.reset()
    assert venv.get_attr("seed") == [10, 11, 12]
    _, second = venv.reset()
    _, again = venv.reset(seed=[10, 11, 12])
    assert [i["draw"] for i in first] == [i["draw"] for i in again] != [i["draw"] for i in second]
    venv.reset(seed=[None, np.int64(7), None], mask=np.array([True, True, False]))
    assert venv.get_attr("seed") == [10, 7, 12]
    assert type(venv.get_attr("seed")[1]) is int


def test_f50_without_a_seed_all_lanes_differ(make):
    venv = make(counting(4, infos=True))
    draws = [info["draw"] for info in venv.reset()[1]]
    assert len(set(draws)) == 4


class GlobalDraws(CountingEnv):
    def draws(self):
        return random.random(), float(np.random.random()), float(self.np_random.random()), self.action_space.seed()


def test_f50_without_a_seed_workers_differ_under_every_start_method(method):
    random.seed(3)
    np.random.seed(3)
    seen = [method([GlobalDraws] * 4, workers=4).call("draws") for _ in range(2)]
    for column in zip(*seen[0], *seen[1], strict=True):
        assert len(set(map(str, column))) == 8


@pytest.mark.parametrize("seed", [-1, 2**32, 2**32 - 2, [1, 2], [1, 2, 3, 4], [1, -1, 2], "1", [1.5, 2, 3]])
def test_f50_bad_seeds_are_refused(make, seed):
    venv = make(counting(3))
    with pytest.raises(ValueError, match="seed"):
        venv.reset(seed=seed)
    with pytest.raises(ValueError, match="seed"):
        venv.seed(seed)
    venv.reset(seed=3)


def test_options_reach_the_environments(make):
    venv = make(counting(3))
    venv.reset(options={"a": 1})
    assert venv.get_attr("options") == [{"a": 1}] * 3
    venv.reset(options=[{"b": 0}, None, {"b": 2}])
    assert venv.get_attr("options") == [{"b": 0}, None, {"b": 2}]
    with pytest.raises(ValueError, match="options"):
        venv.reset(options=[{}])


def test_bad_masks_are_refused(make):
    venv = make(counting(3))
    venv.reset()
    for mask in ([0, 1, 2], np.array([True, False]), np.ones(3), True):
        with pytest.raises(ValueError, match="mask"):
            venv.reset(mask=mask)


def test_attributes_and_methods(make):
    venv = make([*counting(2), lambda: gym.wrappers.TimeLimit(CountingEnv(2), 50)])
    assert venv.get_attr("number") == [0, 1, 2]
    assert venv.get_attr("number", indices=-1) == [2]
    assert venv.get_attr("number", indices=[2, 0]) == [2, 0]
    venv.set_attr("length", 9, indices=[1, 2])
    assert venv.get_attr("length") == [5, 9, 9]
    assert venv.call("double", 10, plus=1) == [21, 22, 23]
    assert venv.call("double", 10, indices=1) == [21]
    assert venv.has_attr("number") and not venv.has_attr("nonsense")
    assert venv.env_is_wrapped(gym.wrappers.TimeLimit) == [False, False, True]
    assert venv.env_is_wrapped(gym.Wrapper, indices=2) == [True]
    with pytest.raises(AttributeError, match="nonsense") as caught:
        venv.get_attr("nonsense", indices=[1])
    assert caught.value.env_index == 1
    with pytest.raises(IndexError):
        venv.get_attr("number", indices=3)
    with pytest.raises(TypeError):
        venv.call("number")


def test_set_attr_goes_on_into_steps(make):
    venv = make(counting(2, length=50))
    venv.reset()
    venv.set_attr("length", 1, indices=0)
    assert venv.step([0, 0])[2].tolist() == [True, False]


def test_action_masks(make):
    assert make(counting(2)).action_masks() is None
    venv = make([MaskEnv, MaskEnv])
    venv.reset()
    assert venv.action_masks().tolist() == [[True] * 5] * 2 and venv.action_masks().dtype == bool
    venv.step([0, 0])
    assert venv.action_masks().tolist() == [[False] * 5] * 2
    venv = make([MaskInfoEnv, CountingEnv])
    venv.reset()
    assert venv.action_masks()[0].tolist() == [False, True, True, True, True]
    venv.step([0, 0])
    assert venv.action_masks().tolist() == [[True, False, True, True, True], [True] * 5]


def test_rendering(make):
    venv = make(counting(3, render_mode="rgb_array"))
    venv.reset()
    assert venv.render_mode == "rgb_array"
    assert [image[0, 0, 0] for image in venv.get_images()] == [0, 1, 2]
    picture = venv.render()
    assert picture.shape == (8, 12, 3) and picture[0, 6, 0] == 1 and picture[4, 0, 0] == 2
    with pytest.raises(ValueError, match="render_mode"):
        venv.render("human")
    venv = make(counting(2, render_mode="ansi"))
    assert venv.render() == "env 0\n\nenv 1"
    assert make(counting(2)).render() is None


def test_f28_f29_order_of_calls(make):
    venv = make(counting(2))
    with pytest.raises(ResetNeeded, match="reset"):
        venv.step([0, 0])
    venv.reset()
    with pytest.raises(NotSteppingError):
        venv.step_wait()
    with pytest.raises(NotSteppingError):
        venv.recv()
    venv.step_async([1, 1])
    with pytest.raises(AlreadySteppingError):
        venv.step_async([2, 2])
    with pytest.raises(AlreadySteppingError):
        venv.get_attr("number")
    assert venv.step_wait()[0].tolist() == [[0, 0, 1, 1], [1, 0, 1, 1]]
    with pytest.raises(NotSteppingError):
        venv.step_wait()
    # A reset drops the pending step, in order.
    venv.step_async([3, 3])
    assert venv.reset()[0].tolist() == [[0, 1, 0, -1], [1, 1, 0, -1]]
    assert venv.step([4, 4])[0].tolist() == [[0, 1, 1, 4], [1, 1, 1, 4]]


def test_f27_closing(make):
    with make(counting(2)) as venv:
        venv.reset()
    assert venv.closed
    venv.close()
    for call in (
        venv.reset,
        lambda: venv.step([0, 0]),
        lambda: venv.step_async([0, 0]),
        venv.step_wait,
        venv.recv,
        lambda: venv.get_attr("number"),
        venv.action_masks,
        venv.__enter__,
    ):
        with pytest.raises(ClosedEnvironmentError):
            call()


def test_f45_cannot_be_pickled_or_copied(make):
    venv = make(counting(2))
    for attempt in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="function"):
            attempt(venv)


def test_f26_f33_bad_env_fns_are_refused(make):
    with pytest.raises(ValueError, match="at least one"):
        make([])
    with pytest.raises(EnvFnError, match=r"env_fns\[1\] is an environment.*function"):
        make([CountingEnv, CountingEnv()])
    with pytest.raises(EnvFnError, match="must be a function"):
        make([CountingEnv, 3])
    with pytest.raises(EnvFnError, match="sequence"):
        make(CountingEnv)
    with pytest.raises(TypeError, match="must return an environment"):
        make([lambda: 3])


def test_f26_same_environment_twice_is_refused(make):
    def twice():
        shared = CountingEnv()
        return [lambda: shared] * 2

    with pytest.raises(ValueError, match="same environment"):
        make(twice(), workers=1)


def test_bad_options_are_refused(make):
    for options in (
        {"autoreset_mode": "sometimes"},
        {"on_bad_info": "ignore"},
        {"spaces": "any"},
    ):
        with pytest.raises(ValueError, match=next(iter(options))):
            make(counting(2), **options)


def test_f34_differing_spaces(make):
    fns = [lambda: BoundEnv(1), lambda: BoundEnv(2), lambda: BoundEnv(1, n=4)]
    with pytest.raises(ValueError, match="environment 0 has .*environment 1 has .*compatible"):
        make(fns)
    with pytest.raises(ValueError, match="action_space"):
        make([fns[0], fns[2]])
    venv = make(fns, spaces="compatible")
    assert venv.batched_observation_space.high[:, 0].tolist() == [1, 2, 1]
    venv.reset()
    venv.step([2, 2, 3])
    with pytest.raises(ValueError, match="environment 1 is 3"):
        venv.step([2, 3, 3])
    with pytest.raises(ValueError, match="observation_space"):
        make([fns[0], CountingEnv], spaces="compatible")


def test_f24_returned_arrays_are_the_callers_own(make):
    venv = make(counting(2, reuse=True))
    obs, infos = venv.reset()
    kept = [(obs, obs.copy())]
    for _ in range(12):
        obs, rewards, *_, infos = venv.step([1, 1])
        kept.append((obs, obs.copy()))
        obs_rewards = rewards.copy()
        venv.get_attr("number")
        assert (rewards == obs_rewards).all()
    assert all((a == b).all() for a, b in kept)


def test_views_stay_intact_for_two_steps(make):
    venv = make(counting(3, length=4), copy=False)
    previous, _ = venv.reset()
    snapshot = previous.copy()
    for _ in range(10):
        obs, *_ = venv.step([2, 2, 2])
        assert (previous == snapshot).all()
        previous, snapshot = obs, obs.copy()
    after, _ = venv.reset(mask=np.array([True, False, False]))
    assert (previous == snapshot).all() and not np.shares_memory(previous, after)


def test_f24_a_reused_observation_does_not_overwrite_the_final_one(make):
    venv = make(counting(2, length=2, infos=True, reuse=True))
    venv.reset()
    for _ in range(3):
        obs, _, terminated, _, infos = venv.step([1, 3])
        if terminated[0]:
            assert infos[0]["final_obs"].tolist() == [0, 0, 2, 1] and obs[0].tolist() == [0, 1, 0, -1]
            assert infos[0]["count"] == 2 and infos[0]["nested"] == [0, 2]
            assert infos[0]["reset_info"]["reset_of"] == 1 and infos[0]["reset_info"]["nested"] == [1, 0]
            kept = infos[0]
    assert terminated[1] and kept["nested"] == [0, 2]


def test_an_own_episode_statistic_is_kept(make):
    venv = make([lambda: gym.wrappers.RecordEpisodeStatistics(CountingEnv(0, length=1))])
    venv.reset()
    info = venv.step([0])[4][0]
    assert info["episode"]["l"] == 1 and isinstance(info["episode"]["r"], (float, np.floating))


def test_send_and_recv(make):
    venv = make(counting(5, length=9), workers=2)
    venv.reset()
    venv.send([0, 1, 2, 3, 4])
    obs, rewards, terminated, truncated, infos, env_ids = venv.recv()
    assert env_ids.tolist() == [0, 1, 2, 3, 4] and obs[:, 3].tolist() == [0, 1, 2, 3, 4]
    block = [0, 1, 2]  # the first worker's
    venv.send([4, 3, 2], env_ids=block[::-1])
    obs, rewards, terminated, truncated, infos, env_ids = venv.recv(min_envs=1)
    assert env_ids.tolist() == block[: len(env_ids)]
    assert obs[:, 3].tolist() == [2, 3, 4][: len(env_ids)] and len(infos) == len(rewards) == len(env_ids)
    while len(env_ids) < 3:
        env_ids = np.append(env_ids, venv.recv()[-1])
    venv.send([1, 1], env_ids=[3, 4])
    with pytest.raises(AlreadySteppingError):
        venv.send([1, 1], env_ids=[3, 4])
    with pytest.raises(NotSteppingError, match="recv"):
        venv.step_wait()
    assert venv.recv()[-1].tolist() == [3, 4]
    with pytest.raises(ValueError, match=r"lanes|workers"):
        venv.send([1, 1], env_ids=[3, 3])
    # A full step after partial ones has all lanes in order again.
    obs, *_ = venv.step([1, 2, 3, 4, 0])
    assert obs.tolist() == [[0, 0, 3, 1], [1, 0, 3, 2], [2, 0, 3, 3], [3, 0, 3, 4], [4, 0, 3, 0]]
    venv.send([0, 0, 0, 0, 0])
    assert venv.step_wait()[0][:, 2].tolist() == [4] * 5
    assert venv.reset(mask=np.arange(5) < 2)[0][:, 2].tolist() == [0, 0, 4, 4, 4]


def test_split(make):
    venv = make(counting(6, length=3), workers=3)
    venv.reset(seed=5)
    views = venv.split(2)
    assert sum(view.num_envs for view in views) == 6
    for _ in range(7):
        for k, view in enumerate(views):
            view.step_async([k + 1] * view.num_envs)
        for k, view in enumerate(views):
            obs, _, terminated, truncated, infos = view.step_wait()
            assert (obs[(~(terminated | truncated)), 3] == k + 1).all()
            assert len(infos) == view.num_envs
    assert views[1].get_attr("number")[0] == views[0].num_envs
    low = views[0].num_envs
    obs, _ = views[1].reset(mask=np.arange(views[1].num_envs) == 0)
    assert obs[0, 0] == low and obs[0, 2] == 0
    whole, *_ = venv.step([0] * 6)
    assert whole[:, 0].tolist() == [0, 1, 2, 3, 4, 5]
    views[0].close()
    assert views[0].closed and not venv.closed
    with pytest.raises(ClosedEnvironmentError):
        views[0].reset()
    with pytest.raises(ValueError, match="split"):
        venv.split(7)
    venv.close()
    with pytest.raises(ClosedEnvironmentError):
        views[1].reset()


def test_views_must_not_be_mixed_with_a_pending_step(make):
    venv = make(counting(4), workers=2)
    venv.reset()
    left, right = venv.split(2)
    left.step_async([0, 0])
    with pytest.raises(AlreadySteppingError):
        venv.step([0] * 4)
    assert right.step([1, 1])[0][:, 0].tolist() == [2, 3]
    left.step_wait()
    venv.step([0] * 4)


def test_cloudpickle_wrapper():
    offset = 3
    twin = pickle.loads(pickle.dumps(CloudpickleWrapper(lambda x: x + offset)))
    assert twin.x(4) == 7
