"""Environments that tell by value which row they are, and environments that fail on purpose; process helpers."""

import copy
import ctypes
import faulthandler
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
from gymnasium import spaces

ROOT = Path(__file__).resolve().parents[3]


class CountingEnv(gym.Env):
    """Observes (number, episode, step in the episode, last action); pays episode + step / 100.

    An episode ends after `length` steps: terminated in even episodes, truncated in odd ones.
    """

    metadata = {"render_modes": ["rgb_array", "ansi"]}

    def __init__(self, number=0, length=5, infos=False, reuse=False, render_mode=None):
        self.observation_space = spaces.Box(-1, 10**6, (4,), np.int64)
        self.action_space = spaces.Discrete(5)
        self.number, self.length, self.infos = number, length + number % 2, infos
        self.reuse = np.zeros(4, np.int64) if reuse else None
        self.reused_info = {} if reuse else None
        self.render_mode = render_mode
        self.episode = -1
        self.step_count = 0
        self.seed = None
        self.options = None
        self.closed = False

    def _observe(self, action):
        row = [self.number, self.episode, self.step_count, action]
        if self.reuse is None:
            return np.array(row, np.int64)
        self.reuse[:] = row
        return self.reuse

    def _info(self, **info):
        if self.reused_info is None:
            return info
        self.reused_info.clear()
        self.reused_info.update(info, nested=[self.episode, self.step_count])
        return self.reused_info

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.seed = seed
        self.options = options
        self.episode += 1
        self.step_count = 0
        info = {"reset_of": self.episode, "draw": float(self.np_random.random())} if self.infos else {}
        return self._observe(-1), self._info(**info)

    def step(self, action):
        self.step_count += 1
        ended = self.step_count >= self.length
        info = {"count": self.step_count, "who": np.array([self.number])} if self.infos else {}
        even = self.episode % 2 == 0
        reward = self.episode + self.step_count / 100
        return self._observe(action), reward, ended and even, ended and not even, self._info(**info)

    def render(self):
        if self.render_mode == "ansi":
            return f"env {self.number}"
        return np.full((4, 6, 3), self.number, np.uint8)

    def double(self, x, plus=0):
        return 2 * x + plus + self.number

    def close(self):
        self.closed = True


def counting(nb, **kwargs):
    """Functions for N counting environments."""

    def maker(i):
        return lambda: CountingEnv(i, **kwargs)

    return [maker(i) for i in range(nb)]


class MaskEnv(CountingEnv):
    def action_masks(self):
        return [self.step_count % 2 == 0] * 5


class MaskInfoEnv(CountingEnv):
    def _info(self, **info):
        return {"action_mask": np.arange(5) != self.step_count}


class BoundEnv(gym.Env):
    def __init__(self, high, n=3):
        self.observation_space = spaces.Box(0, high, (2,), np.float32)
        self.action_space = spaces.Discrete(n)

    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {}

    def step(self, action):
        return np.full(2, action, np.float32), 0.0, False, False, {}


class SpaceEnv(gym.Env):
    """Observations, rewards, ends and infos drawn at random from any spaces; a function of the seed and actions."""

    def __init__(self, observation_space, action_space, number=0):
        # A space holds a random generator, which environments in one process must not share.
        self.observation_space = copy.deepcopy(observation_space)
        self.action_space = action_space
        self.number = number

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        return self.observation_space.sample(), {"start": self.np_random.random()}

    def step(self, action):
        if not self.action_space.contains(action):
            raise ValueError(f"{action!r} is not in {self.action_space}")
        ended = self.np_random.random(2) < 0.1
        info = {"action": action, "even": True} if self.np_random.random() < 0.5 else {}
        return self.observation_space.sample(), self.np_random.normal(), *ended, info


class BadArgsError(Exception):
    """Cannot be unpickled: its constructor wants more than its args hold."""

    def __init__(self, code, reason):
        super().__init__(f"{code}: {reason}")
        self.code = code


class FaultEnv(CountingEnv):
    """Fails at the given step of its life, in the way that `kind` says; `sleep` seconds are for hanging."""

    def __init__(self, number=0, kind="raise", at=2, where="step", seconds=1000.0, flag=None, **kwargs):
        super().__init__(number, **kwargs)
        self.kind, self.at, self.where, self.seconds, self.flag = kind, at, where, seconds, flag
        self.life = 0
        if where == "make":
            self.fail()

    def reset(self, *, seed=None, options=None):
        result = super().reset(seed=seed, options=options)
        if self.where == "reset" and self.episode == self.at:
            return self.fail(result)
        return result

    def step(self, action):
        self.life += 1
        result = super().step(action)
        if self.where == "step" and self.life == self.at:
            return self.fail(result)
        return result

    def once(self):
        """True the first time over all processes, where a file marks what has happened."""
        if self.flag is None:
            return True
        try:
            os.close(os.open(self.flag, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    def fail(self, result=None):
        kind = self.kind
        if not self.once():
            return result
        if kind == "raise":
            raise ValueError(f"fault of env {self.number}")
        if kind == "raise_local":

            class LocalError(Exception):
                pass

            raise LocalError("a local fault")
        if kind == "raise_args":
            raise BadArgsError(7, "several arguments")
        if kind == "raise_unicode":
            b"\xff".decode("utf-8")
        if kind == "raise_attribute":
            error = ValueError("holds a lock")
            error.lock = threading.Lock()
            raise error
        if kind == "keyboard":
            raise KeyboardInterrupt
        if kind == "sys_exit":
            sys.exit(4)
        if kind == "os_exit":
            os._exit(3)
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "segv":
            faulthandler.disable()  # pytest's, which a forked worker inherits, would fill the screen
            os.kill(os.getpid(), signal.SIGSEGV)
        if kind == "hang":
            time.sleep(self.seconds)
            return result
        if kind == "gil_hang":
            ctypes.PyDLL(None).sleep(int(self.seconds))  # PyDLL keeps the interpreter locked
            return result
        if kind == "print":
            print("words of an env", flush=True)
            print("words of an env", file=sys.stderr, flush=True)
            return result
        observation, *rest = result
        if kind == "shape":
            return observation[:1], *rest
        if kind == "scalar":
            return 3, *rest
        if kind == "reshape":
            return observation.reshape(2, 2), *rest
        if kind == "ragged":
            return [[1, 2], [3]], *rest
        if kind == "float":
            return observation + 0.5, *rest
        if kind == "none":
            return None, *rest
        if kind == "list":
            return observation.tolist(), *rest
        if kind == "int32":
            return observation.astype(np.int32), *rest
        if kind == "old_api":
            return (observation, 0.0, False, {}) if len(rest) == 4 else observation
        reward = {"reward_none": None, "reward_text": "1", "reward_two": np.ones(2), "reward_one": np.array([2.5])}
        if kind in reward:
            return observation, reward[kind], *rest[1:]
        if kind == "bad_info":
            return (*result[:-1], {"lock": threading.Lock(), "fine": 1})
        if kind == "lambda_info":
            return (*result[:-1], {"f": lambda x: x + self.number})
        if kind == "big_info":
            return (*result[:-1], {"big": bytes(int(self.seconds))})
        if kind == "info_list":
            return (*result[:-1], [1])
        if kind == "action_space":
            self.action_space = spaces.Discrete(7)
            return result
        raise AssertionError(kind)


def faulty(nb, bad=(1,), kind="raise", **kwargs):
    """Functions for N counting environments of which those in `bad` fail; keywords are FaultEnv's."""

    def maker(i):
        if i in bad:
            return lambda: FaultEnv(i, kind, **kwargs)
        rest = {key: value for key, value in kwargs.items() if key in ("length", "infos", "reuse")}
        return lambda: CountingEnv(i, **rest)

    return [maker(i) for i in range(nb)]


def equal(a, b):
    """Whether two trees are equal bit by bit, dtypes and container types included."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    return a == b or (a != a and b != b)


def without_times(infos):
    """Infos without the seconds that an episode took."""
    return [
        {**info, "episode": {key: value for key, value in info["episode"].items() if key != "t"}}
        if "episode" in info
        else info
        for info in infos
    ]


def stat_of(pid):
    """State, parent and session of a process, or None if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return fields[0], int(fields[1]), int(fields[3])


def session_members(session):
    """Live processes of a session, zombies left out."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and (stat := stat_of(int(name))) and stat[2] == session and stat[0] not in "ZX":
            found.append(int(name))
    return found


def alive(pid):
    """Whether a process exists and is no zombie."""
    stat = stat_of(pid)
    return stat is not None and stat[0] not in "ZX"


def gone(pids, seconds=2.0):
    """Whether processes end within some seconds."""
    deadline = time.monotonic() + seconds
    while any(alive(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def descriptors():
    """The open descriptors of this process, by what they refer to."""
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            found[int(fd)] = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:
            continue
    return found


def script(tmp_path, code, name="script.py"):
    """Write a script that can import this package and these tests."""
    path = tmp_path / name
    path.write_text(textwrap.dedent(code))
    return path


def start_script(path, **kwargs):
    """Start a script in a session of its own."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        [sys.executable, str(path)],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        **kwargs,
    )


def run_script(path, limit=30.0):
    """Run a script to its end: (exit code, stdout, stderr). No process of its session may be left two seconds later."""
    process = start_script(path)
    try:
        out, err = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        for pid in session_members(process.pid):
            os.kill(pid, signal.SIGKILL)
        raise
    left = session_members(process.pid)
    assert gone(left), f"left over: {left}"
    return process.returncode, out, err
