"""The worker processes of a vector env: their start, messages, death and end."""

from __future__ import annotations

import atexit
import contextlib
import mmap
import os
import select
import signal
import socket
import sys
import time
import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import cloudpickle
from gymnasium.vector import AutoresetMode

from rl.common.vec_env.arena import BUSY, CONTROL_WORDS, DONE
from rl.common.vec_env.channel import Channel, ChannelClosed
from rl.common.vec_env.engine import Engine
from rl.common.vec_env.errors import ClosedEnvironmentError, WorkerDiedError, WorkerTimeoutError
from rl.common.vec_env.lanes import Failure, dumps
from rl.common.vec_env.launcher import Process, private_fds, start
from rl.common.vec_env.main_module import find_main
from rl.common.vec_env.spinner import Spinner

__all__ = ["Worker", "WorkerPool", "milliseconds"]

_pools: weakref.WeakSet[WorkerPool] = weakref.WeakSet()


class Worker:
    """The main process's view of one worker: its process, its wake-ups, and what was asked of it last."""

    channel: Channel
    command: int
    done_fd: int
    done_at: int
    poller: select.poll

    def __init__(self, index: int, low: int, high: int, env_fns: bytes) -> None:
        self.index = index
        self.low, self.high = low, high
        self.env_fns = env_fns
        self.process: Process | None = None
        self.connected = False
        self.seq = 0
        self.done = True  # the step that was begun last has been answered in full
        self.nb_restarts = 0
        self.fds: list[int] = []
        self.death: str | None = None  # how it ended, once it has

    @property
    def lanes(self) -> list[int]:
        """Its lanes, by number."""
        return list(range(self.low, self.high))

    def release(self) -> None:
        """Close the descriptors of a worker that has ended."""
        if self.process is not None:
            self.process.close()
            self.process = None
        if self.connected:
            self.connected = False
            private_fds.discard(self.channel.fileno())
            self.channel.close()
        # The death pipe among them: should the worker live in spite of all, this ends it.
        while self.fds:
            private_fds.discard(self.fds[-1])
            os.close(self.fds.pop())


class WorkerPool(Engine):
    """Starts the workers, talks to them, notices when they end, and ends them.

    Messages go through a socket per worker. Each call has a number and so has its answer: late ones are dropped.
    """

    def __init__(
        self,
        bounds: list[tuple[int, int]],
        env_fns: list[bytes],
        mode: AutoresetMode,
        method: str,
        environ: dict[str, str],
        restart: bool,
        max_restarts: int,
        start_timeout: float,
        spin_seconds: float,
        import_main: bool,
    ) -> None:
        super().__init__(bounds)
        self.mode = mode
        self.method = method
        self.environ = environ
        self.restart = restart
        self.max_restarts = max_restarts
        self.start_timeout = start_timeout
        self.spin_seconds = spin_seconds
        self.spinner = Spinner(spin_seconds)
        # A forked worker has it already.
        self.main = find_main() if import_main and method != "fork" else None
        # By value, where to a worker `__main__` is another module, so that plain pickle's references lead nowhere.
        self.dumps = dumps if import_main else cloudpickle.dumps
        self.lane_worker = [g for g, (low, high) in enumerate(bounds) for _ in range(low, high)]
        self.workers = [Worker(g, *bounds[g], env_fns[g]) for g in range(len(bounds))]
        self.memory = -1
        self.released = False
        self.deaths = select.epoll()
        private_fds.add(self.deaths.fileno())
        self.self_fd = os.pidfd_open(os.getpid())
        _pools.add(self)

    # Starting.

    def launch(self, workers: Sequence[Worker]) -> list[dict[str, Any]]:
        """Start workers and wait until all have made their environments; returns what they tell about them."""
        deadline = time.monotonic() + self.start_timeout
        for worker in workers:
            self._spawn(worker)
        for worker in workers:  # once all have started, as large functions wait until they are read
            self._instruct(worker, deadline)
        descriptions: list[dict[str, Any]] = []
        failures: list[Failure] = []
        for worker in workers:
            try:
                kind, body = self._receive(worker, deadline, "start")
            except ChannelClosed:
                raise self._died(worker) from None
            if kind == "failed":
                failures.extend(body)
            else:
                descriptions.append(body)
        if failures:
            self.raise_failures(failures)
        if not self.restart:
            for worker in workers:
                worker.env_fns = b""  # may hold much, and is not needed again
        return descriptions

    def _spawn(self, worker: Worker) -> None:
        ours, theirs = socket.socketpair()
        death = -1
        try:
            # Everything is noted in the worker at once, so that close() finds it wherever this is interrupted.
            worker.channel, worker.connected = Channel(ours), True
            death, death_w = os.pipe()
            worker.fds.append(death_w)
            flags = os.EFD_CLOEXEC | os.EFD_NONBLOCK
            for _ in range(2):
                worker.fds.append(os.eventfd(0, flags))
            _, worker.command, worker.done_fd = worker.fds
            private_fds.update((ours.fileno(), *worker.fds))
            worker.process = start(self.method, theirs, self.environ)
            self._greet(worker, death)
        finally:
            theirs.close()
            if death >= 0:
                os.close(death)

    def _greet(self, worker: Worker, death: int) -> None:
        """Set up the talk with a new worker."""
        process = worker.process
        if process is None:
            raise RuntimeError("The worker was not started.")
        worker.death = None
        worker.seq += 1
        self.deaths.register(process.sentinel, select.EPOLLIN)
        worker.poller = select.poll()
        worker.poller.register(worker.done_fd, select.POLLIN)
        worker.poller.register(self.deaths, select.POLLIN)
        worker.done_at = worker.index * CONTROL_WORDS + DONE
        with contextlib.suppress(ChannelClosed):  # it has ended already: waiting for its answer tells how
            worker.channel.send_fds([death, self.self_fd, worker.command, worker.done_fd])

    def _instruct(self, worker: Worker, deadline: float) -> None:
        message = {
            "first": worker.low,
            "autoreset_mode": self.mode,
            "environ": self.environ,
            "sys_path": list(sys.path),
            "sys_argv": list(sys.argv),
            "directory": _directory(),
            "main": self.main,
            "env_fns": worker.env_fns,
        }
        with contextlib.suppress(ChannelClosed):
            self._post(worker, "make", message, deadline)

    def share(self) -> None:
        """Give all workers the arena."""
        from rl.common.vec_env.checks import available_memory  # not needed in workers, which import this module

        available = available_memory()
        if available is not None and self.arena.size > available:
            raise MemoryError(
                f"The observations of {self.nb_lanes} environments (two sets and the final ones) need "
                f"{self.arena.size / 2**30:.1f} GiB of shared memory; {available / 2**30:.1f} GiB are available. "
                "Use fewer environments or smaller observations."
            )
        self.memory = os.memfd_create("rl-vec-env", os.MFD_CLOEXEC)
        private_fds.add(self.memory)
        try:
            os.ftruncate(self.memory, self.arena.size)
            self.arena.attach(mmap.mmap(self.memory, self.arena.size))
        except OSError as error:
            raise MemoryError(f"Cannot share {self.arena.size} bytes of observations: {error}") from error
        for worker in self.workers:
            self._attach(worker)

    def _attach(self, worker: Worker) -> None:
        control, base = self.arena.control, worker.index * CONTROL_WORDS
        for word in range(CONTROL_WORDS):
            control[base + word] = 0
        control[base + BUSY] = -1
        body = {
            "observation_space": self.observation_space,
            "action_space": self.action_space,
            "nb_lanes": self.nb_lanes,
            "nb_groups": len(self.bounds),
            "group": worker.index,
            "spin_seconds": self.spin_seconds,
        }
        worker.seq += 1
        try:
            self._post(worker, "attach", body, time.monotonic() + self.start_timeout)
            worker.channel.send_fds([self.memory])
        except ChannelClosed:
            pass  # noticed by the first call that waits

    # Messages.

    def _post(self, worker: Worker, kind: str, body: Any, deadline: float | None) -> None:
        """Send a message; raises ChannelClosed if the worker has ended."""
        message = self.dumps((worker.seq, kind, body))
        worker.channel.send(message, lambda events: self._wait(worker, events, deadline, kind))

    def _wait(self, worker: Worker, events: int, deadline: float | None, what: str) -> None:
        """Wait for a worker's socket; raises where it, or in vain another, has ended, or it takes too long."""
        poller = select.poll()
        poller.register(worker.channel.fileno(), events)
        poller.register(self.deaths, select.POLLIN)
        ready = poller.poll(milliseconds(deadline))
        if not ready:
            raise self._late([worker], what)
        if all(fd != worker.channel.fileno() for fd, _ in ready):
            self._bury()
            if worker.death is not None:
                raise ChannelClosed

    def _receive(self, worker: Worker, deadline: float | None, what: str) -> tuple[str, Any]:
        """The answer to the worker's latest message; older answers, to calls that were given up, are dropped."""
        while True:
            try:
                seq, kind, body = worker.channel.receive(lambda events: self._wait(worker, events, deadline, what))
            except ChannelClosed:
                self._await_death(worker)
                raise
            if seq == worker.seq:
                return kind, body

    def _await_death(self, worker: Worker) -> None:
        """A worker has hung up: learn how it ended."""
        poller = select.poll()
        process = worker.process
        if worker.death is None and process is not None:
            poller.register(process.sentinel, select.POLLIN)
            if not poller.poll(2000):
                process.kill(signal.SIGKILL)
                poller.poll(2000)
            self._bury()

    def _bury(self) -> None:
        """Note which workers have ended. Unless they may be restarted, that ends the vector env."""
        ended = {fd for fd, _ in self.deaths.poll(0)}
        for worker in self.workers:
            process = worker.process
            if process is None or worker.death is not None or process.sentinel not in ended:
                continue
            process.poll()
            self.deaths.unregister(process.sentinel)
            worker.death = _how(process.returncode)
            if self.closed:
                raise ClosedEnvironmentError("This vector env was closed while a step was pending.")
            if not self.restart and self.failure is None:
                self.failure = self._died(worker)
        if self.failure is not None:
            raise self.failure

    def _died(self, worker: Worker, more: str = "") -> WorkerDiedError:
        busy = self._busy_lane(worker)
        where = "" if busy is None else f" while environment {busy} was busy"
        pid = worker.process.pid if worker.process is not None else None
        error = WorkerDiedError(
            f"Worker {worker.index} (pid {pid}) with the environments {worker.lanes} ended{where}: "
            f"{worker.death}.{more}"
        )
        error.worker_index = worker.index  # type: ignore[attr-defined]
        error.env_indices = worker.lanes  # type: ignore[attr-defined]
        error.env_index = worker.low if busy is None else busy  # type: ignore[attr-defined]
        return error

    def _busy_lane(self, worker: Worker) -> int | None:
        if self.memory < 0:
            return None
        busy = self.arena.control[worker.index * CONTROL_WORDS + BUSY]
        return worker.low + busy if 0 <= busy < worker.high - worker.low else None

    def _late(self, workers: Sequence[Worker], what: str) -> WorkerTimeoutError:
        parts = []
        for worker in workers:
            busy = self._busy_lane(worker)
            pid = worker.process.pid if worker.process is not None else None
            parts.append(
                f"worker {worker.index} (pid {pid}) with the environments {worker.lanes}"
                + ("" if busy is None else f", now busy with {busy}")
            )
        hint = {
            "step": " The step is still pending: call step_wait() again, or close().",
            "start": " A longer start_timeout may help.",
        }.get(what, "")
        error = WorkerTimeoutError(f"No answer to {what} in time from {'; '.join(parts)}.{hint}")
        error.env_indices = [lane for worker in workers for lane in worker.lanes]  # type: ignore[attr-defined]
        return error

    # The end.

    def abort(self) -> None:
        """Kill the workers, so that a call that waits in another thread gives up."""
        super().abort()
        for worker in self.workers:
            if worker.process is not None:
                worker.process.kill(signal.SIGKILL)

    def close(self, timeout: float) -> None:
        """Ask, then SIGTERM, then SIGKILL; returns within about `timeout` seconds."""
        if self.released:
            return
        self.closed = self.released = True
        if self.pid != os.getpid():  # a forked copy: the workers are the parent's
            return
        begun = time.monotonic()
        live = [worker for worker in self.workers if worker.process is not None and not worker.process.poll()]
        try:
            for worker in live:
                worker.seq = -1
                with contextlib.suppress(ChannelClosed, _WouldBlock):
                    worker.channel.send(dumps((0, "close", None)), _would_block)
            live = self._leave(live, begun + 0.7 * timeout)
            for signum, seconds in ((signal.SIGTERM, min(1.0, 0.2 * timeout)), (signal.SIGKILL, 2.0)):
                if live:
                    for worker in live:
                        worker.process.kill(signum)  # type: ignore[union-attr]
                    live = self._leave(live, time.monotonic() + seconds)
        except BaseException:
            for worker in live:
                worker.process.kill(signal.SIGKILL)  # type: ignore[union-attr]
            self._leave(live, time.monotonic() + 2.0)
            raise
        finally:
            for worker in self.workers:
                worker.release()
            private_fds.discard(self.deaths.fileno())
            self.deaths.close()
            os.close(self.self_fd)
            if self.memory >= 0:
                private_fds.discard(self.memory)
                os.close(self.memory)
                self.memory = -1

    def _leave(self, workers: Sequence[Worker], deadline: float) -> list[Worker]:
        """Wait until workers have ended, reading what they still have to say; returns those that have not."""
        live = list(workers)
        while live:
            poller = select.poll()
            talking = {}
            for worker in live:
                poller.register(worker.process.sentinel, select.POLLIN)  # type: ignore[union-attr]
                if worker.seq == -1:
                    poller.register(worker.channel.fileno(), select.POLLIN)
                    talking[worker.channel.fileno()] = worker
            ready = poller.poll(milliseconds(deadline))
            if not ready:
                return live
            for fd, _ in ready:
                if fd in talking:
                    self._hear(talking[fd])
            live = [worker for worker in live if not worker.process.poll()]  # type: ignore[union-attr]
        return live

    @staticmethod
    def _hear(worker: Worker) -> None:
        try:
            while True:
                worker.channel.flush(_would_block)
                _, kind, body = worker.channel.receive(_would_block)
                if kind == "closed":
                    for one in body:
                        warnings.warn(
                            f"Environment {one.lane} failed in close(): {one.type_name}: {one.message}",
                            RuntimeWarning,
                            stacklevel=6,
                        )
        except _WouldBlock:
            return
        except Exception:
            worker.seq = -2  # nothing more to hear


class _WouldBlock(Exception):
    pass


def _would_block(events: int) -> None:
    raise _WouldBlock


def milliseconds(deadline: float | None) -> float | None:
    """What `poll` takes for a deadline of the monotonic clock; None: for ever."""
    # Rounded up: a poll that ends early would be taken for a timeout.
    return None if deadline is None else max(0.0, (deadline - time.monotonic()) * 1000 + 1)


def _how(returncode: int | None) -> str:
    if returncode is None:
        return "its exit status is unknown"
    if returncode >= 0:
        return f"it exited with code {returncode}"
    try:
        name = signal.Signals(-returncode).name
    except ValueError:
        name = f"signal {-returncode}"
    hints: dict[int, str] = {
        signal.SIGKILL: " - often the kernel's, out of memory",
        signal.SIGSEGV: " - a crash in native code",
    }
    return f"killed by {name}{hints.get(-returncode, '')}"


def _directory() -> str | None:
    try:
        return os.getcwd()
    except OSError:  # it has been removed
        return None


@atexit.register
def _close_all() -> None:
    # Registered after launcher's hook and so run before it: the fork server must see the workers' end.
    for pool in list(_pools):
        pool.close(1.0)
