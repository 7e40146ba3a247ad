"""Worker processes: their death, hanging, restart, end and traces. The numbers are the fault table's."""

import contextlib
import errno
import gc
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import types
import warnings
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from rl.common.vec_env import (
    AlreadySteppingError,
    ClosedEnvironmentError,
    SubprocVecEnv,
    WorkerDiedError,
    WorkerTimeoutError,
    launcher,
    pool,
    subproc_env_vec,
)
from tests.common.vec_env.envs import (
    CountingEnv,
    FaultEnv,
    alive,
    counting,
    descriptors,
    faulty,
    gone,
    run_script,
    script,
    session_members,
    start_script,
)

pytestmark = pytest.mark.timeout(60)
A4 = [0, 1, 2, 3]


@contextlib.contextmanager
def within(seconds):
    begun = time.monotonic()
    yield
    assert time.monotonic() - begun < seconds


def run_python(arguments, **kwargs):
    environ = {**os.environ, "PYTHONPATH": str(launcher.__file__).split("/rl/common")[0]}
    return subprocess.run(
        [sys.executable, *arguments], env=environ, capture_output=True, text=True, timeout=30, **kwargs
    )


def hangs(venv, lane):
    """Wait until the worker is in the step of this environment."""
    engine = venv._engine
    while engine._busy_lane(engine.workers[engine.lane_worker[lane]]) != lane:
        time.sleep(0.01)


# Death of workers.


@pytest.mark.parametrize(
    ("kind", "words"),
    [("kill", "SIGKILL - often.*out of memory"), ("segv", "SIGSEGV"), ("os_exit", "exited with code 3")],
)
def test_f07_worker_dies_in_step(method, kind, words):
    venv = method(faulty(4, bad=[1], kind=kind))
    pids = venv.worker_pids
    venv.reset()
    venv.step(A4)
    with (
        within(1.5),
        pytest.raises(WorkerDiedError, match=f"Worker 0 .pid {pids[0]}.*environment 1 was busy.*{words}") as e,
    ):
        venv.step(A4)
    assert e.value.worker_index == 0 and e.value.env_indices == [0, 1] and e.value.env_index == 1
    for call in (lambda: venv.step(A4), venv.reset, lambda: venv.get_attr("number"), venv.step_wait):
        with pytest.raises(WorkerDiedError):
            call()
    with within(5):
        venv.close()
    assert gone(pids, 0)


def test_f07_idle_worker_dies(subproc):
    venv = subproc(counting(4))
    venv.reset()
    os.kill(venv.worker_pids[1], signal.SIGKILL)
    with within(1), pytest.raises(WorkerDiedError, match=r"Worker 1 .*\[2, 3\].*SIGKILL"):
        venv.step(A4)


@pytest.mark.parametrize("call", ["reset", "get_attr", "recv"])
def test_f07_worker_dies_in_other_calls(subproc, call):
    venv = subproc(counting(4))
    venv.reset()
    os.kill(venv.worker_pids[0], signal.SIGKILL)
    calls = {
        "reset": venv.reset,
        "get_attr": lambda: venv.get_attr("number"),
        "recv": lambda: (venv.send(A4), venv.recv(min_envs=4)),
    }
    with within(1), pytest.raises(WorkerDiedError, match="Worker 0"):
        calls[call]()


@pytest.mark.parametrize("kind", ["kill", "os_exit", "sys_exit"])
def test_f03_worker_dies_in_constructor(method, kind):
    before = descriptors()
    with pytest.raises(Exception, match="SIGKILL|code 3|SystemExit: 4") as caught:
        method(faulty(4, bad=[2], kind=kind, where="make"))
    assert type(caught.value).__name__ == ("WorkerError" if kind == "sys_exit" else "WorkerDiedError")
    del caught
    assert same_descriptors(before)


def same_descriptors(before):
    """No descriptor more than before, the fork server's socket left aside (it outlives every vector env)."""
    gc.collect()
    mine = {fd: what for fd, what in descriptors().items() if fd not in before}
    servers = {server.sock.fileno() for server in [*launcher._Server._running.values(), *launcher._Server._retired]}
    return not set(mine) - servers


def test_f03_failed_constructor_leaves_nothing(method):
    method(counting(1)).close()  # a fork server may start now
    before = descriptors()
    with pytest.raises(ValueError, match="fault"):
        method(faulty(6, bad=[4], where="make"), workers=3)
    assert same_descriptors(before)
    assert launcher.private_fds <= set(descriptors())


# Restarting.


@pytest.mark.parametrize("how", ["kill", "os_exit"])
def test_f08_restart_in_same_step(subproc, tmp_path, how):
    venv = subproc(
        faulty(4, bad=[1], kind=how, at=3, flag=str(tmp_path / "once"), length=9), on_worker_failure="restart"
    )
    pids = venv.worker_pids
    venv.reset(seed=5)
    venv.step(A4)
    before, *_ = venv.step(A4)
    with pytest.warns(RuntimeWarning, match=r"Worker 0.*\[0, 1\].*Restarted \(1 of 3"):
        obs, rewards, terminated, truncated, infos = venv.step(A4)
    assert obs[:2].tolist() == [[0, 0, 0, -1], [1, 0, 0, -1]] and obs[2:, 2].tolist() == [3, 3]
    assert rewards.tolist() == [0, 0, 0.03, 0.03]
    assert not terminated.any() and truncated.tolist() == [True, True, False, False]
    for i in (0, 1):
        assert infos[i]["worker_restarted"] is True
        assert infos[i]["final_obs"].tolist() == before[i].tolist()
        assert infos[i]["reset_info"] == {}
    assert infos[0]["episode"]["r"] == pytest.approx(0.06) and infos[0]["episode"]["l"] >= 2
    assert infos[2:] == [{}, {}]
    assert venv.worker_pids[0] != pids[0] and venv.worker_pids[1] == pids[1] and not alive(pids[0])
    seeds = venv.get_attr("seed")
    assert seeds[2:] == [7, 8] and len({*seeds, 5, 6}) == 6
    assert venv.step(A4)[0][:, 2].tolist() == [1, 1, 4, 4]
    venv.reset(seed=1)
    assert venv.get_attr("seed") == [1, 2, 3, 4]


def test_f08_restart_seeds_are_derived(subproc, tmp_path):
    """The same failure gives the same seeds."""
    seeds = []
    for run in range(2):
        venv = subproc(faulty(2, bad=[0], kind="kill", flag=str(tmp_path / str(run))), on_worker_failure="restart")
        venv.reset(seed=11)
        with pytest.warns(RuntimeWarning, match="Restarted"):
            venv.step([0, 0])
            venv.step([0, 0])
        seeds.append(venv.get_attr("seed"))
    assert seeds[0] == seeds[1] and seeds[0][0] != 11


@pytest.mark.parametrize("mode", ["next_step", "disabled"])
def test_f08_restart_in_other_modes(subproc, tmp_path, mode):
    venv = subproc(
        faulty(4, bad=[3], kind="kill", at=2, flag=str(tmp_path / "once"), length=9),
        on_worker_failure="restart",
        autoreset_mode=mode,
    )
    venv.reset(seed=5)
    before, *_ = venv.step(A4)
    with pytest.warns(RuntimeWarning, match="Worker 1"):
        obs, rewards, terminated, truncated, infos = venv.step(A4)
    assert obs[2:].tolist() == before[2:].tolist() and obs[:2, 2].tolist() == [2, 2]
    assert truncated.tolist() == [False, False, True, True] and not terminated.any() and rewards[2:].tolist() == [0, 0]
    assert infos[3]["worker_restarted"] and "final_obs" not in infos[3]
    if mode == "disabled":
        venv.reset(mask=truncated)
    else:
        obs, *_, infos = venv.step(A4)
        assert obs[2:, 2].tolist() == [0, 0] and infos[2]["is_reset"]
    seeds = venv.get_attr("seed")
    assert seeds[:2] == [5, 6] and None not in seeds and not {7, 8} & set(seeds)
    assert venv.step(A4)[0][2:, 2].tolist() == [1, 1]


def test_f08_budget(subproc):
    venv = subproc(counting(2, length=100), on_worker_failure="restart", max_restarts=2)
    venv.reset()
    for _ in range(2):
        os.kill(venv.worker_pids[0], signal.SIGKILL)
        with pytest.warns(RuntimeWarning, match="Restarted"):
            assert venv.step([0, 0])[3].tolist() == [True, False]
    os.kill(venv.worker_pids[0], signal.SIGKILL)
    with pytest.raises(WorkerDiedError, match="restarted 2 times, which is max_restarts"):
        venv.step([0, 0])
    with within(2):
        venv.close()


def test_f08_restart_in_reset_and_after_a_failed_call(subproc):
    venv = subproc(counting(4, length=100), on_worker_failure="restart")
    venv.reset(seed=1)
    venv.step(A4)
    os.kill(venv.worker_pids[0], signal.SIGKILL)
    with pytest.warns(RuntimeWarning, match="Restarted"):
        assert venv.reset()[0][:, 2].tolist() == [0] * 4
    assert venv.step(A4)[0][:, 2].tolist() == [1] * 4
    # A masked reset of a dead worker's lane resets its other lanes as well, and says so.
    os.kill(venv.worker_pids[1], signal.SIGKILL)
    with pytest.warns(RuntimeWarning, match="Restarted"):
        obs, infos = venv.reset(mask=np.arange(4) == 2)
    assert obs[:, 2].tolist() == [1, 1, 0, 0] and infos[3] == {"worker_restarted": True} and infos[2] == {}
    os.kill(venv.worker_pids[0], signal.SIGKILL)
    with pytest.raises(WorkerDiedError):
        venv.get_attr("number")
    with pytest.warns(RuntimeWarning, match="Restarted"):
        assert venv.step(A4)[3].tolist() == [True, True, False, False]
    assert venv.get_attr("number") == A4


def test_f08_restart_of_a_worker_that_sent_half_a_message(subproc, tmp_path):
    """Killed while the main process has not read its large info yet."""
    venv = subproc(
        faulty(2, bad=[0], kind="big_info", at=1, seconds=5e7, flag=str(tmp_path / "once")), on_worker_failure="restart"
    )
    venv.reset()
    venv.step_async([0, 0])
    time.sleep(0.3)
    os.kill(venv.worker_pids[0], signal.SIGKILL)
    with pytest.warns(RuntimeWarning, match="Restarted"):
        assert venv.step_wait()[3].tolist() == [True, False]
    assert venv.step([0, 0])[0][:, 2].tolist() == [1, 2]


class Reluctant(CountingEnv):
    """Can be made once; then its constructor raises or takes `seconds`, as long as the file is there."""

    def __init__(self, flag, seconds=0.0):
        super().__init__(length=100)
        try:
            os.close(os.open(flag, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            if not seconds:
                raise OSError("no second one") from None
            time.sleep(seconds)


def test_f08_environments_that_cannot_be_made_again(subproc, tmp_path):
    flag = str(tmp_path / "made")
    venv = subproc([CountingEnv, lambda: Reluctant(flag)], on_worker_failure="restart")
    venv.reset()
    os.kill(venv.worker_pids[1], signal.SIGKILL)
    with pytest.warns(RuntimeWarning, match="Restarted"), pytest.raises(OSError, match="no second one"):
        venv.step([0, 0])
    with pytest.raises(OSError, match="no second one"):
        venv.step_wait()
    with within(2):
        venv.close()


def test_f13_interrupt_while_a_worker_restarts(subproc, tmp_path):
    flag = str(tmp_path / "made")
    venv = subproc([CountingEnv, lambda: Reluctant(flag, 1.0)], on_worker_failure="restart")
    venv.reset()
    os.kill(venv.worker_pids[1], signal.SIGKILL)
    threading.Timer(0.4, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.warns(RuntimeWarning, match="Restarted"), pytest.raises(KeyboardInterrupt):
        venv.step([3, 3])
    with pytest.warns(RuntimeWarning, match="2 of 3"):
        obs, _, _, truncated, _ = venv.step_wait()
    assert obs[:, 2].tolist() == [1, 0] and truncated.tolist() == [False, True]
    assert venv.step([4, 4])[0].tolist() == [[0, 0, 2, 4], [0, 0, 1, 4]]


def test_f08_objects_survive_a_restart(subproc):
    class Words(CountingEnv):
        def __init__(self):
            super().__init__(length=100)
            self.observation_space = spaces.Text(9)

        def _observe(self, action):
            return f"step {self.step_count}"

    venv = subproc([Words, Words], on_worker_failure="restart")
    venv.reset()
    venv.step([0, 0])
    os.kill(venv.worker_pids[1], signal.SIGKILL)
    with pytest.warns(RuntimeWarning, match="Restarted"):
        obs, *_, infos = venv.step([0, 0])
    assert obs == ["step 2", "step 0"] and infos[1]["final_obs"] == "step 1"
    assert venv.next_obs() == ["step 2", "step 1"]


@pytest.mark.parametrize(
    ("mode", "seconds"),
    [
        ("same_step", 1.5),
        ("next_step", 1.5),
        pytest.param("same_step", 40, marks=pytest.mark.slow),
        pytest.param("next_step", 40, marks=pytest.mark.slow),
    ],
)
def test_f08_workers_are_killed_at_random(subproc, mode, seconds):
    """Every lane goes on by one step, or tells that its worker was restarted; no row is swapped, stale or lost."""
    nb = 6
    venv = subproc(
        counting(nb, length=10**6, infos=True),
        workers=3,
        on_worker_failure="restart",
        max_restarts=10**6,
        autoreset_mode=mode,
    )
    rng = np.random.default_rng(0)
    stop = threading.Event()

    def murder():
        while not stop.is_set():
            time.sleep(float(rng.uniform(0.01, 0.08)))
            pid = venv.worker_pids[rng.integers(3)]
            if pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    obs, _ = venv.reset(seed=0)
    want, nb_restarts, nb_steps = np.zeros(nb, int), 0, 0
    thread = threading.Thread(target=murder)
    thread.start()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline:
                before, action = obs, int(rng.integers(5))
                obs, rewards, terminated, truncated, infos = venv.step([action] * nb)
                nb_steps += 1
                for i in range(nb):
                    if infos[i].get("worker_restarted"):
                        nb_restarts += 1
                        last = infos[i]["final_obs"] if mode == "same_step" else obs[i]
                        assert last.tolist() == before[i].tolist() and truncated[i] and rewards[i] == 0
                        want[i] = 0 if mode == "same_step" else -1
                        assert mode != "same_step" or obs[i].tolist() == [i, 0, 0, -1]
                        continue
                    want[i] += 1
                    assert not truncated[i] and not terminated[i]
                    assert obs[i, [0, 2]].tolist() == [i, want[i]] and rewards[i] == want[i] / 100
                    assert obs[i, 3] == (action if want[i] else -1)
                    assert infos[i].get("count") == (want[i] or None)
    finally:
        stop.set()
        thread.join()
    assert nb_restarts > 5 and nb_steps > nb_restarts // 2


# Hanging workers.


@pytest.mark.parametrize("kind", ["hang", "gil_hang"])
def test_f09_f10_timeout_names_who_hangs_and_close_ends_it(method, kind):
    venv = method(faulty(4, bad=[2], kind=kind))
    pids = venv.worker_pids
    venv.reset()
    venv.step(A4)
    venv.step_async(A4)
    for _ in range(2):
        with within(0.8), pytest.raises(WorkerTimeoutError, match=r"\[2, 3\], now busy with 2.*step_wait") as caught:
            venv.step_wait(timeout=0.2)
        assert isinstance(caught.value, TimeoutError) and caught.value.env_indices == [2, 3]
    with pytest.raises(AlreadySteppingError):
        venv.step_async(A4)
    with within(2):
        venv.close(timeout=0.7)
    assert gone(pids, 0)


def test_f09_a_late_step_is_the_right_step(make):
    venv = make(faulty(4, bad=[1], kind="hang", at=2, seconds=0.5), step_timeout=0.15)
    venv.reset()
    venv.step(A4)
    venv.step_async([4, 4, 4, 4])
    if make.kind != "dummy":
        for _ in range(2):
            with pytest.raises(WorkerTimeoutError):
                venv.step_wait()
    obs, rewards, *_ = venv.step_wait(timeout=5)
    assert obs.tolist() == [[i, 0, 2, 4] for i in range(4)] and rewards.tolist() == [0.02] * 4
    assert venv.step([1] * 4)[0].tolist() == [[i, 0, 3, 1] for i in range(4)]


def test_f09_a_late_message_is_the_right_one(subproc):
    """The timeout strikes while a large info arrives."""
    venv = subproc(faulty(2, kind="big_info", at=1, seconds=2e8))
    venv.reset()
    venv.step_async([1, 1])
    late = 0
    while True:
        try:
            *_, infos = venv.step_wait(timeout=0.01)
            break
        except WorkerTimeoutError:
            late += 1
    assert late > 0 and len(infos[1]["big"]) == 2e8
    assert venv.step([2, 2])[0][:, 3].tolist() == [2, 2]


def test_f09_timeouts_of_reset_and_recv(subproc):
    venv = subproc(faulty(4, bad=[0], kind="hang", where="reset", at=1, seconds=0.6), step_timeout=0.2)
    venv.reset()
    with pytest.raises(WorkerTimeoutError, match="No answer to reset"):
        venv.reset()
    time.sleep(0.6)
    assert venv.reset()[0].tolist() == [[0, 2, 0, -1]] + [[i, 2, 0, -1] for i in (1, 2, 3)]
    venv.call("reset", indices=0)
    assert venv.step(A4)[0][0, 3] == 0


def test_f09_timeouts_of_other_calls(subproc):
    class Slow(CountingEnv):
        def nap(self):
            time.sleep(0.5)
            return "late"

    venv = subproc([Slow, Slow], step_timeout=0.2)
    venv.reset()
    with pytest.raises(WorkerTimeoutError, match="No answer to call in time"):
        venv.call("nap", indices=1)
    time.sleep(0.5)
    assert venv.get_attr("step_count") == [0, 0]  # and not "late"
    assert venv.step([1, 1])[0][:, 2].tolist() == [1, 1]


def test_f09_start_timeout(method):
    with within(6), pytest.raises(WorkerTimeoutError, match="start.*start_timeout"):
        method(faulty(2, bad=[1], kind="hang", where="make"), start_timeout=0.5)


def test_f49_the_clock_on_the_wall_may_jump(subproc, monkeypatch):
    venv = subproc(faulty(2, kind="hang", at=1, seconds=0.3), step_timeout=5)
    venv.reset()
    venv.step_async([0, 0])
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 10**6)
    assert venv.step_wait()[0][:, 2].tolist() == [1, 1]


def test_f48_recv_returns_the_quick_ones(subproc):
    venv = subproc(faulty(4, bad=[3], kind="hang", where="reset", at=1, seconds=1.0, length=1), workers=2)
    venv.reset()
    venv.send([0] * 4)
    assert len(venv.recv()[-1]) == 4
    venv.send([0] * 4)  # environment 3 ends now and takes its time to reset
    with within(0.8):
        assert venv.recv(min_envs=2)[-1].tolist() == [0, 1]
        venv.send([0, 0], env_ids=[0, 1])
        assert venv.recv(min_envs=2)[-1].tolist() == [0, 1]
    with pytest.raises(WorkerTimeoutError, match=r"\[2, 3\]"):
        venv.recv(timeout=0.1)
    assert venv.recv()[-1].tolist() == [2, 3]


# Ctrl-C.


def test_f13_interrupt_in_step_wait(subproc, capfd):
    venv = subproc(faulty(2, kind="hang", at=1, seconds=0.8))
    venv.reset()
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with within(0.7), pytest.raises(KeyboardInterrupt):
        venv.step([1, 1])
    for pid in venv.worker_pids:  # as a terminal does to its foreground processes
        os.kill(pid, signal.SIGINT)
    with pytest.raises(AlreadySteppingError):
        venv.step([2, 2])
    assert venv.step_wait()[0].tolist() == [[0, 0, 1, 1], [1, 0, 1, 1]]
    assert venv.step([2, 2])[0].tolist() == [[0, 0, 2, 2], [1, 0, 2, 2]]
    assert capfd.readouterr() == ("", "")


def test_f13_interrupt_anywhere_loses_nothing(subproc):
    """Many interrupts at random moments: every step arrives once and in order."""
    venv = subproc(counting(4, length=10**6))
    venv.reset()
    stop = threading.Event()
    rng = np.random.default_rng(0)

    def disturb():
        while not stop.is_set():
            time.sleep(float(rng.uniform(0.0005, 0.004)))
            os.kill(os.getpid(), signal.SIGUSR1)

    def interrupt(signum, frame):
        # Only inside the vector env: elsewhere it would hit the test itself.
        while frame is not None:
            if frame.f_code.co_name in ("step_async", "step_wait"):
                raise KeyboardInterrupt
            frame = frame.f_back

    before = signal.signal(signal.SIGUSR1, interrupt)
    thread = threading.Thread(target=disturb)
    thread.start()
    done, interrupts, pending = 0, 0, False
    try:
        deadline = time.monotonic() + 2
        while time.monotonic() < deadline:
            try:
                if not pending:
                    with contextlib.suppress(AlreadySteppingError):
                        venv.step_async([done % 5] * 4)
                pending = True
                obs = venv.step_wait()[0]
            except KeyboardInterrupt:
                interrupts += 1
                pending = any(venv._engine.stepping)
                if not pending:
                    done = int(venv.get_attr("step_count")[0])
                continue
            done, pending = done + 1, False
            assert obs[:, 2].tolist() == [done] * 4
    finally:
        stop.set()
        thread.join()
        signal.signal(signal.SIGUSR1, before)
    assert interrupts > 20 and done > 50


def test_f13_second_interrupt_during_close(subproc):
    venv = subproc(faulty(2, kind="hang", at=1))
    pids = venv.worker_pids
    venv.reset()
    venv.step_async([0, 0])
    hangs(venv, 1)
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    with within(2), pytest.raises(KeyboardInterrupt):
        venv.close(timeout=20)
    assert gone(pids, 0.5)


@pytest.mark.parametrize("start_method", ["forkserver", "spawn", "fork"])
def test_f14_interrupt_while_workers_start(start_method, tmp_path):
    class Hanging(CountingEnv):
        def __init__(self, number):
            (tmp_path / str(number)).touch()
            time.sleep(100)

    # An exception within os.fork() is printed and lost, so a fork is not interrupted before its workers are there.
    awaited, sent = 2 if start_method == "fork" else 0, []

    def interrupt():
        time.sleep(0.4)
        while len(list(tmp_path.iterdir())) < awaited:
            time.sleep(0.02)
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    before = descriptors()
    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        SubprocVecEnv([partial(Hanging, i) for i in range(2)], workers=2, start_method=start_method)
    assert time.monotonic() - sent[0] < 5
    assert same_descriptors(before)


# The end.


def test_close_ends_all_workers_and_closes_the_environments(method, tmp_path):
    class Marks(CountingEnv):
        def close(self):
            (tmp_path / str(self.number)).touch()

    venv = method([lambda i=i: Marks(i) for i in range(3)])
    pids = venv.worker_pids
    venv.reset()
    with within(2):
        venv.close()
    assert gone(pids, 0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "2"]
    assert venv.worker_pids == [None, None]


def test_f15_garbage_collection_ends_the_workers(method):
    venv = SubprocVecEnv(counting(2), start_method=method.kind)
    pids = venv.worker_pids
    venv.reset()
    venv.step_async([0, 0])
    del venv
    gc.collect()
    assert gone(pids, 2)


def test_views_and_arrays_outlive_their_vector_env():
    venv = SubprocVecEnv(counting(4), workers=2, copy=False)
    pids = venv.worker_pids
    view = venv.split(2)[1]
    obs, _ = venv.reset()
    del venv
    gc.collect()
    assert view.step([1, 1])[0][:, 3].tolist() == [1, 1]
    view._parent.close()
    del view
    gc.collect()
    assert gone(pids, 2) and obs[3, 0] == 3


def test_f15_exception_without_close(tmp_path):
    path = script(
        tmp_path,
        """
        from rl.common.vec_env import SubprocVecEnv
        from tests.common.vec_env.envs import counting
        venv = SubprocVecEnv(counting(4), workers=2)
        venv.reset()
        venv.step_async([0] * 4)
        raise KeyError("mine")
        """,
    )
    with within(10):
        code, out, err = run_script(path)
    assert code == 1 and out == "" and err.count("Traceback") == 1
    assert err.strip().splitlines()[-1] == "KeyError: 'mine'" and len(err.splitlines()) <= 4


def test_f15_exit_with_a_hanging_worker(tmp_path):
    path = script(
        tmp_path,
        """
        import time
        from rl.common.vec_env import SubprocVecEnv
        from tests.common.vec_env.envs import faulty
        venv = SubprocVecEnv(faulty(2, kind="gil_hang", at=1))
        venv.reset()
        venv.step_async([0, 0])
        print(time.time())
        """,
    )
    code, out, err = run_script(path)
    assert code == 0 and err == "" and time.time() - float(out) < 5


@pytest.mark.parametrize("start_method", ["forkserver", "spawn", "fork"])
def test_f36_script_without_a_guard(tmp_path, start_method):
    path = script(
        tmp_path,
        f"""
        print("main module")
        import numpy as np
        from gymnasium import Env, spaces
        from rl.common.vec_env import SubprocVecEnv

        class MyError(Exception):
            pass

        class Thing:
            pass

        class MyEnv(Env):
            observation_space = spaces.Box(0, 1, (2,))
            action_space = spaces.Discrete(2)
            def reset(self, *, seed=None, options=None):
                return np.zeros(2, np.float32), {{"thing": Thing()}}
            def step(self, action):
                if action:
                    raise MyError("from the worker")
                return np.ones(2, np.float32), 1.0, False, False, {{}}
            thing = property(lambda self: Thing())

        venv = SubprocVecEnv([MyEnv] * 4, workers=2, start_method={start_method!r})
        obs, infos = venv.reset()
        assert type(infos[3]["thing"]) is Thing and type(venv.get_attr("thing")[0]) is Thing
        assert venv.env_is_wrapped(MyEnv) == [True] * 4
        venv.step([0] * 4)
        try:
            venv.step([0, 0, 1, 0])
        except MyError as error:
            print(error, error.env_index)
        venv.close()
        """,
    )
    code, out, err = run_script(path)
    assert (code, out, err) == (0, "main module\nfrom the worker 2\n", "")


@pytest.mark.parametrize("how", ["-c", "-"])
def test_f36_command_line_and_standard_input(how):
    code = (
        "from rl.common.vec_env import SubprocVecEnv\n"
        "from tests.common.vec_env.envs import CountingEnv\n"
        "class E(CountingEnv): pass\n"
        "with SubprocVecEnv([E, E]) as v: print(v.reset()[0].shape)\n"
    )
    done = run_python(["-c", code] if how == "-c" else ["-"], input=code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "(2, 4)\n", "")


IMPORTED = """
    import sys
    import gymnasium
    from rl.common.cmd_util import make_gym_env
    from rl.common.vec_env import SubprocVecEnv
    from tests.common.vec_env.envs import CountingEnv

    class MyError(Exception):
        pass

    class MyEnv(CountingEnv):
        me = property(lambda self: self.__class__)
        def describe(self, cls):
            return cls is type(self) is sys.modules["__main__"].MyEnv, cls.__module__
        def fail(self):
            raise MyError("from the worker")

    def make():
        return gymnasium.make("Mine-v0", disable_env_checker=True)

    gymnasium.register("Mine-v0", MyEnv)

    if __name__ == "__main__":
        options = dict(start_method={method!r}, import_main=True)
        for workers in (2, "auto"):
            for venv in (
                SubprocVecEnv([make] * 2, workers=workers, **options),
                make_gym_env(make, 2, workers=workers, verbose=0, **options),
            ):
                with venv:
                    print(venv.reset()[0].shape, *venv.call("describe", MyEnv))
                    assert venv.get_attr("me") == [MyEnv] * 2 and venv.env_is_wrapped(MyEnv) == [True] * 2
                    try:
                        venv.call("fail")
                    except MyError as error:
                        assert error.env_index == 0
                    else:
                        raise AssertionError
        if {method!r} != "fork":
            try:
                SubprocVecEnv([make] * 2, start_method={method!r})
            except gymnasium.error.NameNotFound:
                print("not found without")
"""


@pytest.mark.parametrize("how", ["script", "module"])
@pytest.mark.parametrize("start_method", ["forkserver", "spawn", "fork"])
def test_f36_import_main(tmp_path, start_method, how):
    path = script(tmp_path, IMPORTED.format(method=start_method), "my_script.py")
    if how == "script":
        code, out, err = run_script(path)
    else:
        done = run_python(["-m", "my_script"], cwd=tmp_path)
        code, out, err = done.returncode, done.stdout, done.stderr
    name = "__main__" if start_method == "fork" else "__mp_main__"
    expected = [f"(2, 4) (True, '{name}') (True, '{name}')"] * 4
    if start_method != "fork":
        expected.append("not found without")
    assert (code, out.splitlines(), err) == (0, expected, "")


@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
def test_f36_import_main_needs_a_guard(tmp_path, start_method):
    path = script(
        tmp_path,
        f"""
        from rl.common.vec_env import SubprocVecEnv
        from tests.common.vec_env.envs import CountingEnv

        SubprocVecEnv([CountingEnv] * 2, start_method={start_method!r}, import_main=True)
        """,
    )
    code, out, err = run_script(path)
    assert (code, out) == (1, "")
    told = [line for line in err.splitlines() if line.startswith("RuntimeError: With import_main=True")]
    assert "if __name__ == '__main__':" in told[-1]


def test_f36_import_main_restarts_and_refuses_what_it_cannot_import(tmp_path):
    path = script(
        tmp_path,
        """
        import os, signal, warnings
        from rl.common.vec_env import SubprocVecEnv
        from tests.common.vec_env.envs import CountingEnv

        class MyEnv(CountingEnv):
            pass

        if __name__ == "__main__":
            warnings.simplefilter("ignore")
            with SubprocVecEnv([MyEnv] * 2, workers=2, import_main=True, on_worker_failure="restart") as venv:
                venv.reset()
                os.kill(venv.worker_pids[1], signal.SIGKILL)
                assert venv.step([1, 1])[3].tolist() == [False, True]
                assert venv.env_is_wrapped(MyEnv) == [True, True]
        """,
    )
    assert run_script(path) == (0, "", "")
    code = "from rl.common.vec_env import SubprocVecEnv\nSubprocVecEnv([int], import_main=True)"
    done = run_python(["-c", code])
    assert done.returncode == 1 and "ValueError: import_main=True needs a main module" in done.stderr
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__main__.py").write_text(code)
    done = run_python(["-m", "pack"], cwd=tmp_path)
    assert done.returncode == 1 and "this is pack.__main__" in done.stderr


KILLED = """
    import os, sys, time
    from rl.common.vec_env import SubprocVecEnv
    from tests.common.vec_env.envs import CountingEnv, faulty, counting
    fns = {fns}
    venv = SubprocVecEnv(fns, workers=2, start_method={method!r})
    venv.reset()
    if {busy}:
        venv.step_async([0] * len(fns))
        time.sleep(0.2)
    print(*venv.worker_pids, flush=True)
    time.sleep(1000)
"""


@pytest.mark.parametrize("start_method", ["forkserver", "spawn", "fork"])
@pytest.mark.parametrize("kind", ["idle", "hang", "gil_hang"])
def test_f11_f12_main_is_killed(tmp_path, start_method, kind):
    fns = "counting(4)" if kind == "idle" else f"faulty(4, bad=[0, 3], kind={kind!r}, at=1)"
    path = script(tmp_path, KILLED.format(fns=fns, method=start_method, busy=kind != "idle"))
    process = start_script(path)
    try:
        pids = [int(word) for word in process.stdout.readline().split()]
        assert len(pids) == 2 and all(alive(pid) for pid in pids)
        process.kill()
        process.wait()
        deadline = time.monotonic() + 2
        while left := session_members(process.pid):
            assert time.monotonic() < deadline, left
            time.sleep(0.02)
        # The pipe's other ends are closed, so what the workers wrote is complete.
        assert process.stderr.read() == ""
    finally:
        for pid in session_members(process.pid):
            os.kill(pid, signal.SIGKILL)
        process.stdout.close()
        process.stderr.close()
        process.wait()


class Spawner(CountingEnv):
    """Starts a child process, as a simulator's env does, and never ends it."""

    def __init__(self, number=0):
        super().__init__(number)
        self.child = subprocess.Popen(["sleep", "1000"])

    def child_pid(self):
        return self.child.pid


@pytest.mark.parametrize("end", ["close", "kill"])
def test_f37_children_of_environments_end_with_their_worker(method, end):
    venv = method([Spawner, Spawner])
    children = venv.call("child_pid")
    assert all(alive(pid) for pid in children)
    if end == "kill":
        for pid in venv.worker_pids:
            os.kill(pid, signal.SIGKILL)
    venv.close()
    assert gone(children, 2)


def test_f12_children_of_environments_end_with_main(tmp_path):
    path = script(
        tmp_path,
        KILLED.format(fns="[Spawner, Spawner]", method="forkserver", busy=False)
        .replace("import CountingEnv", "import")
        .replace("import, faulty", "import faulty")
        .replace("counting\n", "counting\n    from tests.common.vec_env.test_subproc_env_vec import Spawner\n"),
    )
    process = start_script(path)
    try:
        process.stdout.readline()
        assert len(session_members(process.pid)) >= 6
        process.kill()
        process.wait()
        deadline = time.monotonic() + 2
        while left := session_members(process.pid):
            assert time.monotonic() < deadline, left
            time.sleep(0.02)
    finally:
        for pid in session_members(process.pid):
            os.kill(pid, signal.SIGKILL)
        process.stdout.close()
        process.stderr.close()


def test_f38_nested_vector_envs_end_with_the_outer_worker(subproc):
    class Nest(CountingEnv):
        def __init__(self):
            super().__init__()
            self.inner = SubprocVecEnv(counting(2))

        def pids(self):
            return self.inner.worker_pids

    venv = subproc([Nest, Nest])
    inner = [pid for pids in venv.call("pids") for pid in pids]
    assert len(inner) >= 4 and all(alive(pid) for pid in inner)
    for pid in venv.worker_pids:
        os.kill(pid, signal.SIGKILL)
    assert gone(inner, 2)


# Traces.


def test_f39_f40_nothing_leaks(method):
    cycles = {"forkserver": 15, "fork": 6, "spawn": 3}[method.kind]

    def cycle():
        venv = SubprocVecEnv(counting(2), workers=2, start_method=method.kind)
        venv.reset()
        venv.step([0, 0])
        venv.close()

    shm = sorted(os.listdir("/dev/shm"))
    for _ in range(2):
        cycle()
    gc.collect()
    before, threads, known = len(descriptors()), threading.active_count(), len(launcher.private_fds)
    for _ in range(cycles):
        cycle()
    gc.collect()
    assert len(descriptors()) == before and threading.active_count() == threads
    assert len(launcher.private_fds) == known
    assert sorted(os.listdir("/dev/shm")) == shm


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_f39_a_thousand_cycles():
    test_f39_f40_nothing_leaks(types.SimpleNamespace(kind="fork"))
    before = len(descriptors())
    for _ in range(1000):
        SubprocVecEnv(counting(2), workers=2, start_method="fork").close()
    gc.collect()
    assert len(descriptors()) == before


def test_f40_no_names_while_open(method):
    shm = sorted(os.listdir("/dev/shm"))
    venv = method(counting(2))
    venv.reset()
    assert sorted(os.listdir("/dev/shm")) == shm


class Large(CountingEnv):
    def __init__(self, shape):
        super().__init__()
        self.observation_space = spaces.Box(0, 255, shape, np.uint8)

    def _observe(self, action):
        return np.full(self.observation_space.shape, self.step_count, np.uint8)  # touches every page


def test_f41_large_observations(make):
    """Shared memory that /dev/shm, 64 MB in a container, has nothing to do with."""
    free = os.statvfs("/dev/shm").f_bfree
    venv = make([lambda: Large((12, 2**20))] * 2, copy=False)
    venv.reset()
    assert (venv.step([0, 0])[0] == 1).all()
    assert os.statvfs("/dev/shm").f_bfree >= free - 1000


def test_f41_more_than_there_is(subproc, monkeypatch):
    monkeypatch.setattr("rl.common.vec_env.checks.available_memory", lambda: 2**20)
    with pytest.raises(MemoryError, match="0.0 GiB of shared memory; 0.0 GiB are available"):
        subproc([lambda: Large((2**20,))])


class Busy(CountingEnv):
    def __init__(self, seconds=200e-6):
        super().__init__(length=10**9)
        self.seconds = seconds

    def step(self, action):
        until = time.thread_time() + self.seconds
        while time.thread_time() < until:
            pass
        return super().step(action)


@pytest.mark.slow
def test_f42_more_workers_than_cores():
    rates, shares = {}, {}
    venvs = {nb: SubprocVecEnv([Busy] * 64, workers=nb) for nb in (2, 16)}
    for venv in venvs.values():
        venv.reset()
    for _ in range(3):
        for nb, venv in venvs.items():
            begun, cpu = time.perf_counter(), time.process_time()
            for _ in range(60):
                venv.step([0] * 64)
            seconds = time.perf_counter() - begun
            rates[nb] = max(rates.get(nb, 0), 60 / seconds)
            shares[nb] = (time.process_time() - cpu) / seconds
    for venv in venvs.values():
        venv.close()
    assert rates[16] > 0.8 * rates[2] and shares[16] < 0.2


def test_f43_idle_workers_use_no_cpu(subproc):
    venv = subproc(counting(4), workers=2)
    venv.reset()
    venv.step(A4)

    def ticks():
        total = 0
        for pid in venv.worker_pids:
            with open(f"/proc/{pid}/stat") as file:
                fields = file.read().rpartition(")")[2].split()
            total += int(fields[11]) + int(fields[12])
        return total

    before = ticks()
    time.sleep(1)
    assert ticks() - before <= 1  # hundredths of a second
    assert venv.step(A4)[0][:, 2].tolist() == [2] * 4


def test_f44_a_forked_child_cannot_use_it_and_does_no_harm(subproc):
    venv = subproc(counting(2))
    venv.reset()
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        answer = b"none"
        try:
            venv.step([0, 0])
        except RuntimeError as error:
            answer = str(error).encode()
        venv.close()
        del venv
        gc.collect()
        pool._close_all()
        launcher._stop_servers()
        os.write(write, answer)
        os._exit(0)
    os.close(write)
    os.waitpid(pid, 0)
    with os.fdopen(read, "rb") as file:
        assert b"belongs to process" in file.read()
    assert venv.step([1, 1])[0][:, 3].tolist() == [1, 1]
    subproc(counting(2)).reset()  # the fork server is still there


def test_a_vector_env_may_be_made_and_used_in_a_thread(method):
    results = []

    def run():
        venv = method(counting(2))
        venv.reset()
        results.append(venv.step([1, 2])[0].tolist())
        results.append(venv)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(20)
    time.sleep(0.1)  # the workers must not end with the thread that has started them
    assert results[0] == [[0, 0, 1, 1], [1, 0, 1, 2]]
    assert results[1].step([3, 4])[0].tolist() == [[0, 0, 2, 3], [1, 0, 2, 4]]


def test_f44_close_from_another_thread_ends_a_waiting_step(subproc):
    venv = subproc(faulty(2, kind="hang", at=1))
    venv.reset()
    caught = []

    def step():
        try:
            venv.step([0, 0])
        except Exception as error:
            caught.append(error)

    thread = threading.Thread(target=step)
    thread.start()
    hangs(venv, 1)
    with within(3):
        venv.close(timeout=20)
    thread.join(5)
    assert not thread.is_alive() and isinstance(caught[0], ClosedEnvironmentError)
    assert venv.worker_pids == [None, None]


def test_f44_close_from_a_signal_handler_ends_a_waiting_step(subproc):
    venv = subproc(faulty(2, kind="hang", at=1))
    venv.reset()
    before = signal.signal(signal.SIGUSR1, lambda *_: venv.close(timeout=0.5))
    try:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        with within(4), pytest.raises(ClosedEnvironmentError):
            venv.step([0, 0])
    finally:
        signal.signal(signal.SIGUSR1, before)


# How workers are set up.


class Tells(CountingEnv):
    def tell(self):
        return {
            "environ": dict(os.environ),
            "path": list(sys.path),
            "cwd": os.getcwd(),
            "argv": sys.argv,
            "modules": set(sys.modules),
            "random": float(np.random.random()),
            "sigint": signal.getsignal(signal.SIGINT),
            "group": os.getpgrp() == os.getpid(),
            "main": sys.modules["__main__"].__dict__.get("__file__"),
        }


def test_worker_environment(method, monkeypatch, tmp_path):
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("RL_TEST", "from main")
    monkeypatch.setenv("RL_GONE", "x")
    monkeypatch.chdir(tmp_path)
    venv = method([Tells, Tells], worker_env={"RL_MORE": "1", "RL_GONE": None, "OMP_NUM_THREADS": "2"})
    told = venv.call("tell")
    environ = told[0]["environ"]
    assert environ["RL_TEST"] == "from main" and environ["RL_MORE"] == "1" and "RL_GONE" not in environ
    assert "OMPI_COMM_WORLD_RANK" not in environ
    assert (
        environ["OMP_NUM_THREADS"] == "2"
        and environ["MKL_NUM_THREADS"] == "1"
        and environ["CUDA_VISIBLE_DEVICES"] == ""
    )
    assert told[0]["cwd"] == str(tmp_path) and told[0]["path"] == sys.path and told[0]["argv"] == sys.argv
    assert told[0]["random"] != told[1]["random"]
    assert told[0]["sigint"] == signal.SIG_IGN and told[0]["group"]
    if method.kind != "fork":
        assert not {"keras", "tensorflow"} & told[0]["modules"]
        assert told[0]["main"] is None


def test_no_env_is_made_in_the_main_process(subproc, tmp_path):
    class Traces(CountingEnv):
        def __init__(self, number):
            super().__init__(number)
            (tmp_path / f"{number}-{os.getpid()}").touch()

    venv = subproc([lambda i=i: Traces(i) for i in range(4)], workers=3)
    made = sorted(path.name.split("-") for path in tmp_path.iterdir())
    assert [number for number, _ in made] == ["0", "1", "2", "3"]  # each once
    assert {int(pid) for _, pid in made} == set(venv.worker_pids)


def test_f35_fork_warns_where_tensorflow_runs(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow", types.ModuleType("tensorflow"))
    context = types.SimpleNamespace(_context=types.SimpleNamespace(_initialized=True))
    monkeypatch.setitem(sys.modules, "tensorflow.python.eager.context", context)
    with pytest.warns(RuntimeWarning, match="TensorFlow is initialised"):
        SubprocVecEnv(counting(1), start_method="fork").close()
    context._context._initialized = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SubprocVecEnv(counting(1), start_method="fork").close()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_f35_environments_that_use_keras(tmp_path):
    path = script(
        tmp_path,
        """
        import keras, numpy as np, tensorflow as tf, time
        tf.function(lambda x: x + 1)(tf.ones(3))
        from gymnasium import Env, spaces
        from rl.common.vec_env import SubprocVecEnv

        class Model(Env):
            observation_space = spaces.Box(-99, 99, (1,))
            action_space = spaces.Discrete(2)
            def __init__(self):
                import keras
                self.model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
            def reset(self, *, seed=None, options=None):
                return np.zeros(1, np.float32), {}
            def step(self, action):
                return self.model.predict_on_batch(np.ones((1, 1)))[0], 1.0, False, False, {}

        with SubprocVecEnv([Model] * 2, start_timeout=120) as venv:
            venv.reset()
            for _ in range(3):
                print(venv.step([0, 0])[0].shape)
        begun = time.time()
        with SubprocVecEnv([lambda: __import__("gymnasium").make("CartPole-v1")] * 4, workers=4) as venv:
            venv.reset()
        print("started in", time.time() - begun)
        """,
    )
    code, out, _ = run_script(path, 240)
    assert code == 0 and out.count("(2, 1)") == 3
    assert float(out.split()[-1]) < 1


def test_start_does_not_run_the_script_again(tmp_path):
    """A heavy main module, as one that imports TensorFlow, costs the workers nothing."""
    path = script(
        tmp_path,
        f"""
        with open({str(tmp_path / "runs")!r}, "a") as file:
            file.write("x")
        from rl.common.vec_env import SubprocVecEnv
        from tests.common.vec_env.envs import counting
        venv = SubprocVecEnv(counting(4), workers=4)
        venv.reset()
        venv.close()
        """,
    )
    code, _, err = run_script(path)
    assert code == 0 and err == "" and (tmp_path / "runs").read_text() == "x"


def test_uneven_workers(subproc):
    venv = subproc(counting(7), workers=3)
    assert venv._engine.bounds == [(0, 3), (3, 5), (5, 7)] and venv.nb_workers == len(venv.worker_pids) == 3
    venv.reset()
    assert venv.step([i % 5 for i in range(7)])[0][:, [0, 3]].tolist() == [[i, i % 5] for i in range(7)]


def test_workers_option(monkeypatch):
    monkeypatch.setattr(subproc_env_vec, "usable_cores", lambda: 3)
    for workers, want in ((None, 3), (1, 1), (4, 4), (9, 5)):
        with SubprocVecEnv(counting(5), workers=workers) as venv:
            assert venv.nb_workers == want and str(want) in venv.worker_choice
    for workers in (0, -1, "many", 1.5):
        with pytest.raises(ValueError, match="workers"):
            SubprocVecEnv(counting(5), workers=workers)


class Sleeper(CountingEnv):
    def step(self, action):
        time.sleep(0.003)
        return super().step(action)


def test_workers_auto(caplog, monkeypatch):
    monkeypatch.setattr("rl.common.vec_env.cores.usable_cores", lambda: 2)
    caplog.set_level(logging.INFO, "rl.common.vec_env")
    with SubprocVecEnv([Sleeper] * 5, workers="auto") as venv:
        assert venv.nb_workers == 5 and "it waits" in venv.worker_choice and venv.worker_choice in caplog.text
    with SubprocVecEnv([Busy] * 5, workers="auto") as venv:
        assert venv.nb_workers == 2 and "it computes" in venv.worker_choice


def test_bad_options_are_refused():
    for options, word in (
        ({"start_method": "thread"}, "start_method"),
        ({"on_worker_failure": "ignore"}, "on_worker_failure"),
    ):
        with pytest.raises(ValueError, match=word):
            SubprocVecEnv(counting(1), **options)


def test_other_platforms_are_told_to_use_the_twin(monkeypatch):
    monkeypatch.delattr(os, "eventfd")
    with pytest.raises(RuntimeError, match="eventfd.*DummyVecEnv"):
        SubprocVecEnv(counting(1))


@pytest.mark.parametrize("spin_us", [0, 200])
def test_spinning_changes_nothing(subproc, spin_us):
    venv = subproc(counting(4), spin_us=spin_us, workers=2)
    venv.reset()
    for t in range(1, 6):
        assert venv.step(A4)[0][0, 2] == t % 5


def test_spec_and_metadata_come_from_the_worker(subproc):
    venv = subproc([lambda: gym.make("CartPole-v1", render_mode="rgb_array")] * 2)
    assert venv.spec.id == "CartPole-v1" and venv.render_mode == "rgb_array"
    assert venv.metadata["render_fps"] == 50
    venv.reset()
    assert venv.render().shape == (800, 600, 3) or venv.render().ndim == 3


def test_unpicklable_spec_and_metadata_are_left_out(subproc):
    class Odd(CountingEnv):
        def __init__(self):
            super().__init__()
            self.metadata = {"lock": threading.Lock()}

    assert set(subproc([Odd]).metadata) == {"autoreset_mode"}


def test_the_fork_server_is_replaced_when_it_has_died(subproc):
    subproc(counting(1))
    for server in list(launcher._Server._running.values()):
        server.process.kill()
        server.process.wait()
    venv = subproc(counting(2))
    venv.reset()
    assert venv.step([1, 1])[0][:, 3].tolist() == [1, 1]


def test_no_more_processes_allowed(monkeypatch):
    """An error of the operating system in the fork server arrives here as such, and leaves nothing open."""
    before = descriptors()
    ours, theirs = socket.socketpair()
    server = object.__new__(launcher._Server)
    server.sock, server.mutex = ours, threading.Lock()

    def refuse():
        _, fds, _, _ = socket.recv_fds(theirs, 1, 4)
        for fd in fds:
            os.close(fd)
        theirs.sendall(launcher._PID.pack(-errno.EAGAIN))

    thread = threading.Thread(target=refuse)
    thread.start()
    with ours, theirs, pytest.raises(BlockingIOError, match="cannot start a worker"):
        server.start(ours)
    thread.join()
    assert same_descriptors(before)


def test_fault_env_of_the_tests_is_sound():
    env = FaultEnv(0, "raise", at=1)
    env.reset()
    with pytest.raises(ValueError, match="fault of env 0"):
        env.step(0)
