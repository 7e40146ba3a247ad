import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from rl.common.single_env import SingleEnv, as_lanes
from rl.common.vec_env import DummyVecEnv, VecEnv


class Env(gymnasium.Env):
    """Returns what it is told to, and keeps what it was given."""

    observation_space = spaces.Box(0, 1, (4,))
    action_space = spaces.Discrete(2)

    def __init__(self, from_reset=(0, {}), from_step=(1, 1.0, False, False, {})):
        self.from_reset, self.from_step, self.seeds, self.actions = from_reset, from_step, [], []

    def reset(self, *, seed=None, options=None):
        self.seeds.append(seed)
        return self.from_reset

    def step(self, action):
        self.actions.append(action)
        return self.from_step


class Old:
    def __init__(self, *results):
        self.results = list(results)

    def reset(self):
        return self.results[0]

    def step(self, action):
        return self.results[1]


def test_new_api():
    observation, info = np.zeros(4), {"a": 1}
    env = Env((observation, info), (observation, 2.5, np.True_, 0, info))
    lanes = SingleEnv(env)
    assert lanes.reset() == ([observation], [info]) and lanes.reset(seed=3, mask=np.ones(1, bool))[1][0] is info
    assert env.seeds == [None, 3]
    observations, reward, terminated, truncated, infos = lanes.step([1])
    assert observations[0] is observation and infos[0] is info and env.actions == [1]
    assert reward.shape == (1,) and reward[0] == 2.5 and terminated == [True] and truncated == [False]
    assert lanes.observation_space is Env.observation_space and lanes.action_space is Env.action_space


@pytest.mark.parametrize(
    ("done", "info", "flags"),
    [
        (False, {}, (False, False)),
        (True, {}, (True, False)),
        (True, {"TimeLimit.truncated": True}, (False, True)),
        (True, {"TimeLimit.truncated": False}, (True, False)),
        (False, {"TimeLimit.truncated": True}, (False, False)),
        (np.True_, {"TimeLimit.truncated": np.True_}, (False, True)),
    ],
)
def test_old_api(done, info, flags):
    lanes = SingleEnv(Old("first", ["next", 1, done, info]))
    assert lanes.reset() == (["first"], [{}])
    observation, reward, terminated, truncated, infos = lanes.step([0])
    assert (observation, reward.tolist(), infos) == (["next"], [1], [info])
    assert (terminated, truncated) == ([flags[0]], [flags[1]])
    assert lanes.observation_space is None and lanes.action_space is None


def test_old_api_with_a_tuple_space():
    env = Old((1, "b"), ((2, "c"), np.array([1.5]), True, {}))
    env.observation_space = spaces.Tuple([spaces.Discrete(3), spaces.Text(3)])
    lanes = SingleEnv(env)
    assert lanes.reset() == ([(1, "b")], [{}])
    assert lanes.step([0])[1].tolist() == [1.5]


@pytest.mark.parametrize("value", [None, 3.0, (1,), (1, 2, 3), (1, 2, 3, 4, 5, 6), [1, 2]])
def test_a_wrong_number_of_values_from_step(value):
    given = f"{len(value)} values" if isinstance(value, tuple | list) else f"one {type(value).__name__}"
    lanes = SingleEnv(gymnasium.Wrapper(Env(from_step=value)))
    with pytest.raises(TypeError, match=rf"Env.step\(\) returned {given}, expected 5 values"):
        lanes.step([0])


@pytest.mark.parametrize("value", [(np.zeros(4),), (np.zeros(4), 1), (np.zeros(4), {}, {})])
def test_a_wrong_number_of_values_from_reset(value):
    with pytest.raises(TypeError, match=rf"Env.reset\(\) returned {len(value)} values, expected 2"):
        SingleEnv(Env(from_reset=value)).reset()


def test_seeding():
    class Seeded(Old):
        def seed(self, seed):
            self.seeded = seed

    class Open(Old):
        def reset(self, **kwargs):
            self.seeded = kwargs.get("seed")
            return 0

    for cls in (Seeded, Open):
        env = cls(0)
        for seed in (1, 5):
            SingleEnv(env).reset(seed=seed)
            assert env.seeded == seed
    with pytest.warns(UserWarning, match="Old has no reset.*not seeded"):
        assert SingleEnv(Old("first")).reset(seed=1)[0] == ["first"]


def test_as_lanes():
    def make():
        return gymnasium.make("CartPole-v1")

    venv = DummyVecEnv([make])
    assert as_lanes(venv) is venv
    adapted = as_lanes(gymnasium.vector.SyncVectorEnv([make]))
    assert isinstance(adapted, VecEnv) and adapted.num_envs == 1
    assert isinstance(as_lanes(make()), SingleEnv) and isinstance(as_lanes(Old()), SingleEnv)


def test_envs_that_are_refused():
    class Retired:
        def _reset(self):
            pass

        def _step(self, action):
            pass

    class Half(Retired):
        def reset(self):
            pass

    class Foreign(Old):
        num_envs = 2

    for env, message in [
        (Retired(), r"Retired is no environment: it has no reset\(\) and no step\(\)"),
        (Half(), r"Half is no environment: it has no step\(\)"),
        ("CartPole-v1", "str is no environment"),
        (None, "NoneType is no environment"),
        (Env, "class Env itself"),
        (Foreign(), "Foreign is neither"),
    ]:
        with pytest.raises(TypeError, match=message):
            as_lanes(env)


def test_closed_envs_are_refused():
    class Closing(Env):
        closed = False

        def close(self):
            self.closed = True

    envs = [DummyVecEnv([Env]), gymnasium.vector.SyncVectorEnv([Env]), Closing()]
    for env in envs:
        as_lanes(env)
        env.close()
        with pytest.raises(gymnasium.error.ClosedEnvironmentError, match="is closed: create a new one"):
            as_lanes(env)
