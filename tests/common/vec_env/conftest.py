"""Both vector envs behind one fixture."""

import pytest

from rl.common.vec_env import DummyVecEnv, SubprocVecEnv


def _make(kind, opened):
    def make(env_fns, **kwargs):
        if kind == "dummy":
            for name in ("workers", "start_method", "step_timeout", "start_timeout", "on_worker_failure"):
                kwargs.pop(name, None)
            venv = DummyVecEnv(env_fns, **kwargs)
        else:
            kwargs.setdefault("workers", 2)
            kwargs.setdefault("start_method", kind)
            venv = SubprocVecEnv(env_fns, **kwargs)
        opened.append(venv)
        return venv

    make.kind = kind
    return make


@pytest.fixture(params=["dummy", "forkserver"])
def make(request):
    """DummyVecEnv or SubprocVecEnv: make(env_fns, **options), closed at the test's end."""
    opened = []
    yield _make(request.param, opened)
    for venv in opened:
        venv.close()


@pytest.fixture
def subproc():
    """SubprocVecEnv on the default start method: subproc(env_fns, **options), closed at the test's end."""
    opened = []
    yield _make("forkserver", opened)
    for venv in opened:
        venv.close()


@pytest.fixture(params=["forkserver", "spawn", "fork"])
def method(request):
    """Every start method: method(env_fns, **options) makes a SubprocVecEnv, closed at the test's end."""
    opened = []
    yield _make(request.param, opened)
    for venv in opened:
        venv.close()
