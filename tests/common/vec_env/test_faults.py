"""What goes wrong in environments: errors, bad observations, infos and actions. Numbers are the fault table's."""

import threading
import time
import warnings
from functools import partial

import numpy as np
import pytest
from gymnasium import spaces

from rl.common.vec_env import (
    AlreadySteppingError,
    EnvFnError,
    InfoSerializationError,
    ObservationError,
    ResetNeeded,
    WorkerError,
    pool,
)
from tests.common.vec_env.envs import BadArgsError, CountingEnv, SpaceEnv, alive, counting, faulty

pytestmark = pytest.mark.timeout(30)
A4 = [0, 1, 2, 3]


def is_usable_again(venv, nb=4):
    """A reset brings every lane back, in order and in step."""
    obs, _ = venv.reset()
    assert obs[:, [0, 2, 3]].tolist() == [[i, 0, -1] for i in range(nb)]
    obs, *_ = venv.step(list(range(nb)))
    assert obs[:, [0, 2, 3]].tolist() == [[i, 1, i] for i in range(nb)]


def close_quickly(venv, seconds=5.0):
    begun = time.monotonic()
    venv.close()
    assert time.monotonic() - begun < seconds


def test_f01_env_raises_in_step(make):
    venv = make(faulty(4, bad=[1]))
    venv.reset()
    venv.step(A4)
    begun = time.monotonic()
    with pytest.raises(ValueError, match="fault of env 1") as caught:
        venv.step(A4)
    assert time.monotonic() - begun < 1
    assert type(caught.value) is ValueError and str(caught.value) == "fault of env 1"
    assert caught.value.env_index == 1
    assert caught.value.worker_index == (None if make.kind == "dummy" else 0)
    failure = caught.value.env_failures[0]
    assert failure.type_name == "ValueError" and "in fail" in failure.traceback and "envs.py" in failure.traceback
    if make.kind != "dummy":
        assert "in fail" in str(caught.value.__cause__)
    with pytest.raises(ResetNeeded, match=r"\[1\]"):
        venv.step(A4)
    is_usable_again(venv)
    close_quickly(venv)


def test_f01_only_the_failed_lane_needs_the_reset(make):
    venv = make(faulty(4, bad=[1], length=50))
    venv.reset()
    venv.step(A4)
    with pytest.raises(ValueError, match="fault"):
        venv.step(A4)
    obs, _ = venv.reset(mask=np.arange(4) == 1)
    assert obs.tolist() == [[0, 0, 2, 0], [1, 1, 0, -1], [2, 0, 2, 2], [3, 0, 2, 3]]
    assert venv.step(A4)[0][:, 2].tolist() == [3, 1, 3, 3]


def test_f29_what_a_dropped_step_leaves_behind(make):
    """A lane that fails or ends in a step that a masked reset drops still needs its own reset."""
    venv = make(faulty(4, bad=[1], at=1, length=1), autoreset_mode="disabled")
    venv.reset()
    venv.step_async(A4)
    venv.reset(mask=np.arange(4) == 3)
    with pytest.raises(ResetNeeded, match=r"\[0, 1, 2\]"):
        venv.step(A4)
    venv.reset(mask=np.arange(4) < 3)
    assert venv.step(A4)[0][:, 2].tolist() == [1] * 4


def test_f01_every_start_method(method):
    venv = method(faulty(2))
    venv.reset()
    venv.step([0, 0])
    with pytest.raises(ValueError, match="fault of env 1"):
        venv.step([0, 0])
    is_usable_again(venv, 2)


def test_f02_env_raises_in_reset(make):
    venv = make(faulty(3, bad=[2], where="reset", at=1))
    venv.reset()
    venv.step([0, 0, 0])
    with pytest.raises(ValueError, match="fault of env 2") as caught:
        venv.reset()
    assert caught.value.env_index == 2
    with pytest.raises(ResetNeeded):
        venv.step([0, 0, 0])
    is_usable_again(venv, 3)


@pytest.mark.parametrize("mode", ["same_step", "next_step"])
def test_f02_env_raises_in_autoreset(make, mode):
    venv = make(faulty(2, bad=[1], where="reset", at=1, length=2), autoreset_mode=mode)
    venv.reset()
    with pytest.raises(ValueError, match="fault of env 1"):
        for _ in range(5):
            venv.step([0, 0])
    is_usable_again(venv, 2)


def test_f03_env_raises_in_constructor(make):
    with pytest.raises(ValueError, match="fault of env 3") as caught:
        make(faulty(4, bad=[3], where="make"))
    assert caught.value.env_index == 3


def test_f04_local_exception_class(make):
    venv = make(faulty(4, kind="raise_local"))
    venv.reset()
    venv.step(A4)
    # In-process the exception itself is at hand; from a worker its class cannot be had.
    kind = Exception if make.kind == "dummy" else WorkerError
    begun = time.monotonic()
    with pytest.raises(kind, match="a local fault") as caught:
        venv.step(A4)
    assert time.monotonic() - begun < 1
    if make.kind != "dummy":
        assert "LocalError" in str(caught.value) and "in fail" in str(caught.value)
    is_usable_again(venv)


def test_f05_exception_that_cannot_be_rebuilt(make):
    venv = make(faulty(2, kind="raise_args"))
    venv.reset()
    venv.step([0, 0])
    kind = BadArgsError if make.kind == "dummy" else WorkerError
    with pytest.raises(kind, match="7: several arguments"):
        venv.step([0, 0])
    is_usable_again(venv, 2)


def test_f05_exception_with_many_arguments(make):
    venv = make(faulty(2, kind="raise_unicode"))
    venv.reset()
    venv.step([0, 0])
    with pytest.raises(UnicodeDecodeError, match="0xff"):
        venv.step([0, 0])


def test_f05_exception_that_holds_a_lock(make):
    venv = make(faulty(2, kind="raise_attribute"))
    venv.reset()
    venv.step([0, 0])
    kind = ValueError if make.kind == "dummy" else WorkerError
    with pytest.raises(kind, match="holds a lock"):
        venv.step([0, 0])


def test_f06_several_envs_raise_at_once(make):
    venv = make(faulty(5, bad=[1, 2, 4]))
    venv.reset()
    venv.step([0] * 5)
    with pytest.raises(ValueError, match="fault of env 1") as caught:
        venv.step([0] * 5)
    assert [one.env_index for one in caught.value.env_failures] == [1, 2, 4]
    assert any("Environment 4 failed as well" in note for note in caught.value.__notes__)
    is_usable_again(venv, 5)


def test_f13_keyboard_interrupt_of_an_env_stays_in_its_worker(subproc):
    venv = subproc(faulty(2, kind="keyboard"))
    venv.reset()
    venv.step([0, 0])
    with pytest.raises(WorkerError, match="KeyboardInterrupt"):
        venv.step([0, 0])
    is_usable_again(venv, 2)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("shape", r"shape \(1,\).*\(4,\)"),
        ("scalar", r"shape \(\).*\(4,\)"),
        ("reshape", r"shape \(2, 2\).*\(4,\)"),
        ("ragged", r"no array of shape \(4,\)"),
        ("none", r"shape \(\).*\(4,\)"),
        ("float", r"dtype float64.*int64"),
    ],
)
def test_f16_f17_bad_observations(make, kind, words):
    venv = make(faulty(4, bad=[2], kind=kind))
    venv.reset()
    venv.step(A4)
    with pytest.raises(ObservationError, match=f"(?s)Environment 2: observation.*{words}") as caught:
        venv.step(A4)
    assert caught.value.env_index == 2
    is_usable_again(venv)


@pytest.mark.parametrize("where", ["reset", "step"])
def test_f16_bad_final_and_first_observations(make, where):
    venv = make(faulty(2, kind="shape", where=where, at=1, length=1))
    venv.reset()
    with pytest.raises(ObservationError, match="Environment 1"):
        for _ in range(4):
            venv.step([0, 0])
    assert venv.reset()[0][:, [0, 2, 3]].tolist() == [[0, 0, -1], [1, 0, -1]]
    assert venv.step([2, 3])[0][1].tolist()[2:] == [1, 3]


def test_f17_harmless_casts_are_remarked_once(make):
    venv = make(faulty(2, kind="int32", at=1))
    venv.reset()
    with pytest.warns(UserWarning, match="FaultEnv: observation has dtype int32"):
        assert venv.step([3, 4])[0].tolist() == [[0, 0, 1, 3], [1, 0, 1, 4]]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        venv.step([3, 4])
        assert not caught
        venv = make([partial(Fixed, FLOATS, np.array([0.1]))] * 4)
        for _ in range(3):
            assert venv.reset()[0].dtype == np.float32
    assert len(caught) == 1 and "Fixed: observation has dtype float64" in str(caught[0].message)


def test_f17_lists_of_numbers_are_observations(make):
    venv = make(faulty(2, kind="list"))
    venv.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for t in (1, 2, 3):
            assert venv.step([1, 1])[0][:, 2].tolist() == [t, t]


class Fixed(CountingEnv):
    """Returns what it is given, whatever its space says."""

    def __init__(self, space, value):
        super().__init__()
        self.observation_space, self.value = space, value

    def _observe(self, action):
        return self.value() if callable(self.value) else self.value


BYTES = spaces.Box(0, 255, (1,), np.uint8)
FLOATS = spaces.Box(-np.inf, np.inf, (1,), np.float32)


@pytest.mark.parametrize(
    ("space", "value"),
    [
        (BYTES, np.array([300])),
        (BYTES, np.array([-1])),
        (BYTES, np.array([1.0])),
        (FLOATS, np.array([1e40])),
        (FLOATS, np.array(["a"])),
        (FLOATS, np.array([1j])),
        (spaces.Discrete(4), 2.0),
        (spaces.Discrete(4), np.array([2])),
        (spaces.MultiBinary(1), np.array([200])),
        (FLOATS, {"a": 1}),
    ],
    ids=str,
)
def test_f17_lossy_casts_are_refused(make, space, value):
    venv = make([partial(Fixed, space, value)])
    with pytest.raises(ObservationError, match="Environment 0: observation"):
        venv.reset()


@pytest.mark.filterwarnings("ignore:Fixed")
@pytest.mark.parametrize(
    ("space", "value", "want"),
    [
        (BYTES, np.array([7], np.int64), 7),
        (FLOATS, np.array([0.1]), np.float32(0.1)),
        (FLOATS, np.array([3], np.int32), 3.0),
        (FLOATS, [np.inf], np.inf),
        (spaces.Discrete(4), np.int8(3), 3),
        (spaces.Discrete(4), True, 1),
        (spaces.Box(-1, 1, (1,), np.float64), np.array([0.5], np.float32), 0.5),
    ],
    ids=str,
)
def test_f17_lossless_casts_are_made(make, space, value, want):
    venv = make([partial(Fixed, space, value)])
    obs = venv.reset()[0]
    assert obs.dtype == space.dtype and obs.ravel()[0] == want


def test_f18_dict_keys(make):
    space = spaces.Dict({"a": spaces.Box(0, 1, (2,)), "b": spaces.Discrete(3)})
    good = {"a": np.zeros(2, np.float32), "b": 1}
    with pytest.raises(ObservationError, match="lacks the key 'b'"):
        make([partial(Fixed, space, {"a": good["a"]})]).reset()
    with pytest.raises(ObservationError, match="must be a dict"):
        make([partial(Fixed, space, good["a"])]).reset()
    with pytest.raises(ObservationError, match=r"'a'.*shape \(3,\).*\(2,\)"):
        make([partial(Fixed, space, {**good, "a": np.zeros(3, np.float32)})]).reset()
    venv = make([partial(Fixed, space, {**good, "c": 1})])
    with pytest.warns(UserWarning, match=r"\['c'\]"):
        venv.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert set(venv.step([0])[0]) == {"a", "b"}
    with pytest.raises(ObservationError, match="tuple of 1, got tuple of 2"):
        make([partial(Fixed, spaces.Tuple([spaces.Discrete(2)]), (1, 1))]).reset()


def test_f19_nan_passes(make):
    venv = make([partial(Fixed, FLOATS, np.array([np.nan], np.float32))])
    assert np.isnan(venv.reset()[0]).all()


@pytest.mark.parametrize("kind", ["reward_none", "reward_text", "reward_two"])
def test_f20_bad_rewards(make, kind):
    venv = make(faulty(3, kind=kind))
    venv.reset()
    venv.step([0, 0, 0])
    with pytest.raises(TypeError, match="Environment 1: the reward must be a number"):
        venv.step([0, 0, 0])
    is_usable_again(venv, 3)


def test_f20_array_of_one_reward(make):
    venv = make(faulty(2, kind="reward_one"))
    venv.reset()
    venv.step([0, 0])
    rewards = venv.step([0, 0])[1]
    assert rewards.tolist() == [0.02, 2.5] and rewards.dtype == np.float64


@pytest.mark.parametrize(("where", "words"), [("step", "got 4 values.*old Gym API"), ("reset", "old Gym API")])
def test_f21_old_gym_api(make, where, words):
    venv = make(faulty(2, kind="old_api", where=where, at={"step": 1, "reset": 0}[where]))
    with pytest.raises(TypeError, match=f"Environment 1: FaultEnv.{where}\\(\\) must return.*{words}"):
        venv.reset()
        venv.step([0, 0])


def test_f22_info_that_cannot_be_pickled(make):
    venv = make(faulty(4, bad=[1], kind="bad_info"))
    venv.reset()
    venv.step(A4)
    with pytest.raises(InfoSerializationError, match=r"Environment 1: info\['lock'\] of type _thread.lock") as caught:
        venv.step(A4)
    assert caught.value.env_index == 1
    with pytest.raises(AlreadySteppingError):
        venv.step_async(A4)
    obs, rewards, *_, infos = venv.step_wait()
    assert obs[:, 2].tolist() == [2, 2, 2, 2] and rewards.tolist() == [0.02] * 4
    assert infos[1] == {"lock": "<not picklable: _thread.lock>", "fine": 1}
    assert venv.step(A4)[0][:, 2].tolist() == [3, 3, 3, 3]


def test_f22_bad_infos_can_be_dropped(make):
    venv = make(faulty(2, kind="bad_info"), on_bad_info="drop")
    venv.reset()
    venv.step([0, 0])
    assert venv.step([0, 0])[4][1] == {"lock": "<not picklable: _thread.lock>", "fine": 1}


def test_f22_reset_info_that_cannot_be_pickled(make):
    venv = make(faulty(2, kind="bad_info", where="reset", at=1))
    venv.reset()
    with pytest.raises(InfoSerializationError):
        venv.reset()
    assert venv.step([0, 0])[0][:, 2].tolist() == [1, 1]


def test_f22_lambdas_travel(make):
    venv = make(faulty(2, kind="lambda_info", at=1))
    venv.reset()
    assert venv.step([0, 0])[4][1]["f"](1) == 2


def test_f22_info_that_is_no_dict(make):
    venv = make(faulty(2, kind="info_list", at=1))
    venv.reset()
    with pytest.raises(TypeError, match="Environment 1: the info must be a dict, got list"):
        venv.step([0, 0])


def test_f23_big_info(make):
    size = 100 * 2**20
    venv = make(faulty(4, bad=[0, 3], kind="big_info", at=1, seconds=size))
    venv.reset()
    obs, *_, infos = venv.step(A4)
    assert len(infos[0]["big"]) == len(infos[3]["big"]) == size and obs[:, 2].tolist() == [1] * 4
    assert venv.step(A4)[0][:, 2].tolist() == [2] * 4


def test_f23_close_with_a_big_info_unread(subproc):
    venv = subproc(faulty(2, bad=[0, 1], kind="big_info", at=1, seconds=50 * 2**20))
    venv.reset()
    venv.step_async([0, 0])
    time.sleep(0.2)
    close_quickly(venv, 3)


def test_f24_infos_are_snapshots(make):
    venv = make(counting(2, reuse=True, length=20, infos=True))
    venv.reset()
    first = venv.step([0, 0])[4]
    venv.step([0, 0])
    assert first[0]["nested"] == [0, 1] and first[0]["count"] == 1


def test_f25_env_fn_that_cannot_be_pickled(subproc, monkeypatch):
    monkeypatch.delattr(pool, "start")  # refused before any process is started
    lock = threading.Lock()

    def env_fn():
        return lock and CountingEnv()

    with pytest.raises(EnvFnError, match=r"env_fns\[2\] cannot be sent.*'lock'"):
        subproc([CountingEnv, CountingEnv, env_fn])
    with pytest.raises(EnvFnError, match=r"env_fns\[0\].*'lock'"):
        subproc([partial(CountingEnv, lock=lock)])
    with pytest.raises(EnvFnError, match=r"env_fns\[0\].*'lock'"):
        subproc([env_fn] * 2, workers="auto")


def test_f25_closures_and_local_classes_work(method):
    offset = 7

    class Local(CountingEnv):
        def double(self, x):
            return x + offset

    venv = method([lambda: Local(0), partial(Local, 1)])
    assert venv.call("double", 1) == [8, 8]
    assert venv.env_is_wrapped(Local) == [True, True]


@pytest.mark.parametrize(
    ("actions", "words"),
    [
        ([0, 1, 2], "Expected 4 actions.*got 3"),
        ([0, 1, 2, 3, 4], "Expected 4 actions.*got 5"),
        (1, "Expected 4 actions.*single value 1"),
        ([[0], [1], [2], [3]], r"shape \(4,\).*got shape \(4, 1\)"),
        ([0.5, 0, 0, 0], "integers"),
        ([np.nan, 0, 0, 0], "integers"),
        (["a", "b", "c", "d"], "numbers"),
        ([0, 1, 5, 2], "environment 2 is 5"),
        ([0, 1, 2, -1], "environment 3 is -1"),
        ([[1, 2], [3]], "array|Expected"),
        (None, "Expected"),
    ],
    ids=str,
)
def test_f30_f31_f32_bad_actions_change_nothing(make, actions, words):
    venv = make(counting(4))
    venv.reset()
    venv.step(A4)
    for _ in range(2):
        with pytest.raises(ValueError, match=words):
            venv.step(actions)
    assert venv.step(A4)[0].tolist() == [[i, 0, 2, i] for i in range(4)]


@pytest.mark.parametrize(
    "actions", [[1.0, 2.0], np.array([1, 2], np.uint8), (1, 2), [np.int64(1), np.float32(2)], np.array([1, 2.0])]
)
def test_f31_good_actions(make, actions):
    venv = make(counting(2))
    venv.reset()
    assert venv.step(actions)[0][:, 3].tolist() == [1, 2]


def test_f32_check_can_be_turned_off(make):
    venv = make(counting(2), check_actions=False)
    venv.reset()
    assert venv.step([9, -3])[0][:, 3].tolist() == [9, -3]


class Echo(CountingEnv):
    """Observes its action."""

    def __init__(self, space):
        super().__init__()
        self.action_space = space
        self.observation_space = spaces.Box(-np.inf, np.inf, space.shape, space.dtype)

    def _observe(self, action):
        return np.zeros(self.action_space.shape, self.action_space.dtype) if isinstance(action, int) else action


def test_f31_f32_box_actions(make):
    box = spaces.Box(-1, 1, (2,), np.float32)
    venv = make([partial(Echo, box)] * 2)
    venv.reset()
    assert venv.step([[0.5, 3], [-4, 0]])[0].tolist() == [[0.5, 3], [-4, 0]]
    for bad in ([[1, 2, 3]] * 2, [1, 2], np.zeros((2, 1)), np.zeros((3, 2))):
        with pytest.raises(ValueError, match="Expected"):
            venv.step(bad)
    clipped = make([partial(Echo, box)] * 2, clip_actions=True)
    clipped.reset()
    assert clipped.step(np.array([[0.5, 3], [-4, 0]]))[0].tolist() == [[0.5, 1], [-1, 0]]


def test_f31_f32_multidiscrete_actions(make):
    venv = make([partial(Echo, spaces.MultiDiscrete([2, 3]))] * 2)
    venv.reset()
    assert venv.step([[1, 2], [0, 0]])[0].tolist() == [[1, 2], [0, 0]]
    with pytest.raises(ValueError, match="environment 1"):
        venv.step([[1, 2], [2, 0]])


def test_f31_nested_actions(make):
    space = spaces.Dict({"a": spaces.Discrete(3), "b": spaces.Tuple([spaces.Box(-1, 1, (2,)), spaces.Discrete(2)])})
    venv = make([partial(SpaceEnv, spaces.Discrete(2), space)] * 2)
    venv.reset(seed=1)
    zeros = np.zeros((2, 2), np.float32)
    venv.step({"a": [0, 1], "b": (zeros, [0, 1])})
    venv.step([{"a": 0, "b": (zeros[0], 1)}, {"a": 2, "b": (zeros[1], 0)}])
    for bad, words in (
        ({"a": [0, 1]}, "keys"),
        ({"a": [0, 1, 2], "b": (zeros, [0, 1])}, "Expected 2 actions at 'a'"),
        ({"a": [0, 3], "b": (zeros, [0, 1])}, "at 'a' of environment 1 is 3"),
        ([{"a": 0, "b": (zeros[0], 1)}], "Expected 2 actions"),
        ([{"a": 0, "b": (zeros[0],)}] * 2, "2 parts"),
    ):
        with pytest.raises(ValueError, match=words):
            venv.step(bad)


def test_f32_actions_given_to_an_env_are_its_own(make):
    class Keeper(Echo):
        def step(self, action):
            self.kept = getattr(self, "kept", [])
            self.kept.append(action)
            return super().step(action)

    venv = make([partial(Keeper, spaces.Box(-1, 1, (2,), np.float32))])
    venv.reset()
    for value in (0.25, 0.5, 0.75):
        venv.step([[value, value]])
    assert [float(a[0]) for a in venv.get_attr("kept")[0]] == [0.25, 0.5, 0.75]


def test_f44_one_thread_at_a_time(subproc):
    venv = subproc(faulty(2, kind="hang", at=1, seconds=1.5))
    venv.reset()
    thread = threading.Thread(target=venv.step, args=([0, 0],))
    thread.start()
    time.sleep(0.2)
    for call in (lambda: venv.step([0, 0]), venv.step_wait, venv.reset, lambda: venv.get_attr("number")):
        with pytest.raises(AlreadySteppingError):
            call()
    assert thread.is_alive()  # none has waited for the step
    thread.join()
    assert venv.step([1, 1])[0].tolist() == [[0, 0, 2, 1], [1, 0, 2, 1]]


def test_f46_sys_exit_is_an_error(make):
    venv = make(faulty(2, kind="sys_exit"))
    venv.reset()
    venv.step([0, 0])
    with pytest.raises(WorkerError, match="SystemExit: 4"):
        venv.step([0, 0])
    is_usable_again(venv, 2)


def test_f46_env_prints(make, capfd):
    venv = make(faulty(2, kind="print", at=1))
    venv.reset()
    venv.step([0, 0])
    out, err = capfd.readouterr()
    assert out == "words of an env\n" and err == "words of an env\n"


def test_f47_changed_action_space_is_reported_once(make):
    venv = make(faulty(2, kind="action_space", where="reset", at=1))
    venv.reset()
    with pytest.warns(UserWarning, match="Environment 1 changed its action_space"):
        venv.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        venv.reset()


def test_f37_f38_environments_may_start_processes_and_vector_envs(method):
    def nested():
        from rl.common.vec_env import SubprocVecEnv

        class Nest(CountingEnv):
            def __init__(self):
                super().__init__()
                self.inner = SubprocVecEnv(counting(2), workers=2)

            def reset(self, **kwargs):
                self.inner.reset()
                return super().reset(**kwargs)

            def step(self, action):
                self.inner.step([action, action])
                return super().step(action)

            def pids(self):
                return self.inner.worker_pids

            def close(self):
                self.inner.close()

        return Nest()

    venv = method([nested, nested], workers=2)
    venv.reset()
    venv.step([1, 1])
    inner = [pid for pids in venv.call("pids") for pid in pids]
    assert len(inner) == 4 and all(alive(pid) for pid in inner)
    venv.close()
    assert not any(alive(pid) for pid in inner)


def test_failures_in_close_are_warnings(make):
    class Stubborn(CountingEnv):
        def close(self):
            raise ValueError("I stay")

    venv = make([Stubborn, CountingEnv])
    venv.reset()
    with pytest.warns(RuntimeWarning, match=r"Environment 0 failed in close\(\): ValueError: I stay"):
        venv.close()


def test_arguments_and_results_that_cannot_be_pickled(subproc):
    venv = subproc(counting(2))
    with pytest.raises(TypeError, match="cannot be pickled"):
        venv.set_attr("length", threading.Lock())
    venv.set_attr("double", threading.Lock)
    with pytest.raises(TypeError, match="lock cannot leave the worker of environment 0"):
        venv.call("double")
    assert venv.get_attr("number") == [0, 1]
