"""Starting worker processes: forkserver, spawn or fork, none of which imports the user's main module.

`multiprocessing` is not used: it would import the main module of a script again in every worker (a `RuntimeError`
without a guard, seconds and half a gigabyte where the script imports TensorFlow), needs named semaphores, and joins
its children at exit. What is needed of it is small.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import gc
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

__all__ = ["METHODS", "Process", "check_platform", "start", "worker_environ"]

METHODS = ("forkserver", "spawn", "fork")

# One thread each: there is one worker per core already. No GPU: it is the learner's.
_WORKER_ENVIRON = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "NUMEXPR_NUM_THREADS": "1",
    "TF_NUM_INTRAOP_THREADS": "1",
    "TF_NUM_INTEROP_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
}
_STATUS = struct.Struct("<i")
_PID = struct.Struct("<q")

# Descriptors of this process that a forked child must not keep: its copies would hide our death from the others.
private_fds: set[int] = set()


def check_platform() -> None:
    """Raise where the kernel lacks what workers need.

    Raises:
        RuntimeError: On anything but Linux 5.3 or later.
    """
    missing = [name for name in ("eventfd", "memfd_create", "pidfd_open") if not hasattr(os, name)]
    if not missing:
        try:
            os.close(os.pidfd_open(os.getpid()))
            os.close(os.memfd_create("check"))
            return
        except OSError as error:
            missing = [str(error)]
    raise RuntimeError(
        f"SubprocVecEnv needs Linux 5.3 or later with eventfd, memfd and pidfd (missing: {', '.join(missing)}). "
        "Use DummyVecEnv, which gives the same results in this process."
    )


def worker_environ(worker_env: Mapping[str, str | None] | None) -> dict[str, str]:
    """The environment variables of a worker: ours, one thread per library, no GPU, no MPI, then `worker_env`.

    Args:
        worker_env: Variables to set, or to remove where the value is None.
    """
    # An MPI library would take a worker for a second process of the same rank and wait for it.
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("OMPI_", "PMI_"))}
    environ.update(_WORKER_ENVIRON)
    for key, value in (worker_env or {}).items():
        if value is None:
            environ.pop(key, None)
        else:
            environ[key] = value
    return environ


class Process:
    """A worker process.

    Attributes:
        pid: Its process id, which is also its process group.
        sentinel: A descriptor that becomes readable when the process has ended.
    """

    def __init__(self, pid: int, sentinel: int) -> None:
        self.pid = pid
        self.sentinel = sentinel
        self.returncode: int | None = None
        self.ended = False
        private_fds.add(sentinel)

    def poll(self) -> bool:
        """Whether it has ended; then `returncode` holds its exit code (negative: signal; None: unknown)."""
        if not self.ended and _readable(self.sentinel):
            self.returncode = self._reap()
            self.ended = True
        return self.ended

    def _reap(self) -> int | None:
        raise NotImplementedError

    def kill(self, signum: int) -> None:
        """Send a signal to the process and to everything it has started in its group."""
        if self.poll():
            return
        try:
            os.killpg(self.pid, signum)
        except (ProcessLookupError, PermissionError):  # it has not made its group yet
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, signum)

    def close(self) -> None:
        """Release the descriptors."""
        if self.sentinel >= 0:
            private_fds.discard(self.sentinel)
            os.close(self.sentinel)
            self.sentinel = -1


class _Child(Process):
    """A child of this process (spawn, fork)."""

    def __init__(self, pid: int, popen: subprocess.Popen[bytes] | None = None) -> None:
        super().__init__(pid, os.pidfd_open(pid))
        self._popen = popen

    def _reap(self) -> int | None:
        _end_group(self.pid)
        if self._popen is not None:
            return self._popen.wait()
        try:
            return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        except ChildProcessError:  # somebody else has waited for it
            return None


class _Served(Process):
    """A child of the fork server, which reports its end through a pipe."""

    def _reap(self) -> int | None:
        data = os.read(self.sentinel, _STATUS.size)
        return _STATUS.unpack(data)[0] if len(data) == _STATUS.size else None


def _end_group(pid: int) -> None:
    """Kill what a worker that has ended left behind. Its pid is still taken, as nobody has waited for it yet."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _readable(fd: int) -> bool:
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(0))


def start(method: str, sock: socket.socket, environ: dict[str, str]) -> Process:
    """Start a worker.

    Args:
        method: One of `METHODS`.
        sock: The worker's end of its socket pair; everything else it needs comes through it.
        environ: Its environment variables.

    Returns:
        The process.
    """
    if method == "spawn":
        fd = sock.fileno()
        popen = _python(f"from rl.common.vec_env.worker import work; work({fd})", fd, environ)
        return _Child(popen.pid, popen)
    if method == "fork":
        return _fork(sock)
    return _Server.get(environ).start(sock)


def _python(code: str, fd: int, environ: dict[str, str]) -> subprocess.Popen[bytes]:
    """A fresh interpreter that finds the same modules as this one."""
    if not sys.executable:
        raise RuntimeError("sys.executable is empty, so no worker can be started: use start_method='fork'.")
    flags: list[str] = getattr(subprocess, "_args_from_interpreter_flags", list)()
    prepare = f"import sys; sys.path[:] = {[str(p) for p in sys.path]!r}; "
    return subprocess.Popen(
        [sys.executable, *flags, "-c", prepare + code],
        stdin=subprocess.DEVNULL,
        pass_fds=[fd],
        env=environ,
        process_group=0,  # Ctrl-C in the terminal is for the main process, also while this one still starts
    )


def _fork(sock: socket.socket) -> Process:
    if _tensorflow_runs():
        warnings.warn(
            "TensorFlow is initialised in this process, and a forked worker that calls it hangs. Use the default "
            "start_method, 'forkserver'.",
            RuntimeWarning,
            stacklevel=6,
        )
    for stream in (sys.stdout, sys.stderr):  # else the worker would write this process's buffered text once more
        with contextlib.suppress(Exception):
            stream.flush()
    pid = _quiet_fork()
    if pid == 0:
        _become(lambda: _forget_parent(sock))
    return _Child(pid)


def _quiet_fork() -> int:
    """Fork without Python 3.12's warning of other threads.

    Who asks for fork has been told; the child runs our code alone, and TensorFlow, the one that does hang, has its
    own warning above. The fork server's only other threads would be those of a BLAS that was given some.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _forget_parent(sock: socket.socket) -> int:
    """In a forked child: drop what is the parent's; returns the descriptor of the child's own socket."""
    fd = os.dup(sock.fileno())
    for other in list(private_fds):
        with contextlib.suppress(OSError):
            os.close(other)
    private_fds.clear()
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    return fd


def _become(prepare: Callable[[], int]) -> NoReturn:
    """The forked child's life: it must never return into the code that called fork."""
    code = 1
    try:
        fd = prepare()
        from rl.common.vec_env.worker import work

        work(fd)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(code)


def _tensorflow_runs() -> bool:
    if "tensorflow" not in sys.modules:
        return False
    module = sys.modules.get("tensorflow.python.eager.context")
    context = getattr(module, "_context", None)
    return bool(getattr(context, "_initialized", context is not None))


class _Server:
    """A process of one thread that has imported what workers need, and forks them.

    It ends with this process, or at its exit; it outlives the vector envs, so that only the first one waits for
    the imports.
    """

    _running: dict[Any, _Server] = {}
    _retired: list[_Server] = []
    _lock = threading.Lock()

    def __init__(self, environ: dict[str, str]) -> None:
        self.sock, theirs = socket.socketpair()
        with theirs:
            self.process = _python(
                f"from rl.common.vec_env.launcher import serve; serve({theirs.fileno()})", theirs.fileno(), environ
            )
        private_fds.add(self.sock.fileno())
        self.mutex = threading.Lock()
        self.pid = os.getpid()

    @classmethod
    def get(cls, environ: dict[str, str]) -> _Server:
        # Libraries read these when they are loaded, that is in the server; all else is set in the worker.
        key = (os.getpid(), *(environ.get(name) for name in _WORKER_ENVIRON))
        with cls._lock:
            server = cls._running.get(key)
            if server is None or server.process.poll() is not None:
                if server is not None:
                    server.retire()
                server = cls._running[key] = cls(environ)
            return server

    def start(self, sock: socket.socket) -> Process:
        status, theirs = os.pipe()
        sent = [theirs]
        try:
            for fd in (1, 2):  # where this process writes now, which need not be where it wrote at the server's start
                try:
                    sent.append(os.dup(fd))
                except OSError:
                    sent.append(os.open(os.devnull, os.O_WRONLY))
            with self.mutex:
                socket.send_fds(self.sock, [b"S"], [sock.fileno(), *sent])
                data = self.sock.recv(_PID.size, socket.MSG_WAITALL)
            if len(data) < _PID.size:
                raise RuntimeError(
                    f"The fork server (pid {self.process.pid}) has ended with exit code {self.process.wait()}: see "
                    "its messages above, or use start_method='spawn'."
                )
            (pid,) = _PID.unpack(data)
            if pid < 0:
                raise OSError(-pid, f"The fork server cannot start a worker: {os.strerror(-pid)}")
        except BaseException:
            os.close(status)
            self.retire()
            raise
        finally:
            for fd in sent:
                os.close(fd)
        return _Served(pid, status)

    def retire(self) -> None:
        """Start no more workers here: an interrupt may have left a reply unread. It still watches its children."""
        for key, server in list(self._running.items()):
            if server is self:
                self._retired.append(self._running.pop(key))

    def stop(self) -> None:
        """End the server, at the end of this process."""
        private_fds.discard(self.sock.fileno())
        self.sock.close()
        try:
            self.process.wait(2.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@atexit.register
def _stop_servers() -> None:
    for server in [*_Server._running.values(), *_Server._retired]:
        if server.pid == os.getpid():
            server.stop()


def serve(fd: int) -> None:
    """The fork server's life.

    Args:
        fd: Its end of the socket to the main process.
    """
    import rl.common.vec_env.worker  # noqa: F401 - imported for the children's sake

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(fileno=fd) as sock:
        children: dict[int, tuple[int, int]] = {}  # pidfd: (pid, status pipe)
        poller = select.poll()
        poller.register(sock, select.POLLIN)
        gc.collect()
        gc.freeze()  # collections in the children would copy every page that this process shares with them
        while True:
            for ready, _ in poller.poll():
                if ready in children:
                    pid, status = children.pop(ready)
                    poller.unregister(ready)
                    os.close(ready)
                    _end_group(pid)
                    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                    with contextlib.suppress(OSError):
                        os.write(status, _STATUS.pack(code))
                    os.close(status)
                    continue
                data, fds, _, _ = socket.recv_fds(sock, 1, 4)
                if not data:
                    return
                try:
                    pid = _quiet_fork()
                except OSError as error:  # too many processes
                    pid = -(error.errno or errno.EAGAIN)
                    os.close(fds[1])
                if pid == 0:
                    _become(lambda fds=fds: _settle(sock, children, fds))  # type: ignore[misc]
                if pid > 0:
                    pidfd = os.pidfd_open(pid)
                    children[pidfd] = (pid, fds[1])
                    poller.register(pidfd, select.POLLIN)
                for one in (fds[0], *fds[2:]):
                    os.close(one)
                try:
                    sock.sendall(_PID.pack(pid))
                except OSError:  # the main process is gone
                    return


def _settle(sock: socket.socket, children: dict[int, tuple[int, int]], fds: list[int]) -> int:
    """In a child of the server: drop the server's descriptors, take over the main process's streams."""
    sock.close()
    for pidfd, (_, status) in children.items():
        os.close(pidfd)
        os.close(status)
    os.close(fds[1])
    os.dup2(fds[2], 1)
    os.dup2(fds[3], 2)
    os.close(fds[2])
    os.close(fds[3])
    return fds[0]
