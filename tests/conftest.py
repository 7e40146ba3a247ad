"""Settings for the whole suite: a watchdog, quiet logs, and no leaks of global Keras state between tests."""

import faulthandler
import os
import signal
import sys

# Before anything imports Keras or TensorFlow: they read these once, and worker processes inherit them.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("SDL_VIDEODRIVER", "dummy")

import pytest

# A shell starts background jobs with Ctrl-C ignored, and what is ignored is inherited: the tests of interrupts, and the
# scripts that they start, need the usual handler.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_WATCHDOG_FD = pytest.StashKey[int]()


def pytest_addoption(parser):
    parser.addoption(
        "--session-limit",
        type=float,
        default=None,
        metavar="SECONDS",
        help="print all stacks and exit after this long; 0: never. Default: 1500, or 0 with -m slow",
    )


def pytest_configure(config):
    # pytest-timeout ends a test by a signal, which Python handles only between two bytecodes: a test stuck
    # in a native call would hang for ever. faulthandler's timer is a C thread and needs no Python to run.
    limit = config.getoption("session_limit")
    if limit is None:
        limit = 1500 if "not slow" in config.getoption("markexpr") else 0
    if limit > 0:
        fd = os.dup(sys.__stderr__.fileno())  # pytest redirects file descriptor 2 during tests
        config.stash[_WATCHDOG_FD] = fd
        faulthandler.dump_traceback_later(limit, exit=True, file=fd)


def pytest_unconfigure(config):
    if _WATCHDOG_FD in config.stash:
        faulthandler.cancel_dump_traceback_later()
        os.close(config.stash[_WATCHDOG_FD])


@pytest.hookimpl(trylast=True)  # after -m has deselected
def pytest_collection_modifyitems(items):
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    if not _sees_gpu():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no GPU visible"))


def _sees_gpu():
    if os.environ["KERAS_BACKEND"] == "jax":
        import jax

        return jax.default_backend() != "cpu"
    import tensorflow as tf

    return bool(tf.config.list_physical_devices("GPU"))


@pytest.fixture(autouse=True)
def keras_global_state():
    """Give every test the default dtype policy and float type, and put back what a test changed."""
    yield
    if (keras := sys.modules.get("keras")) is not None:
        keras.config.set_dtype_policy("float32")
        keras.config.set_floatx("float32")
