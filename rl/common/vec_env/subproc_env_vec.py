"""A vector env whose environments live in worker processes."""

from __future__ import annotations

import atexit
import contextlib
import mmap
import os
import pickle
import select
import signal
import socket
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import cloudpickle
import numpy as np
from gymnasium.vector import AutoresetMode

from rl.common.vec_env.arena import BUSY, COMMAND, CONTROL_WORDS, DONE, ENDED, MESSAGE, TARGET, fence
from rl.common.vec_env.channel import Channel, ChannelClosed
from rl.common.vec_env.cores import choose_workers, logger, probe_env, usable_cores
from rl.common.vec_env.engine import Engine, Job, LaneVecEnv, check_env_fns, mode_of
from rl.common.vec_env.errors import ClosedEnvironmentError, EnvFnError, WorkerDiedError, WorkerTimeoutError
from rl.common.vec_env.lanes import Failure, Report, dumps
from rl.common.vec_env.launcher import METHODS, Process, check_platform, private_fds, start, worker_environ
from rl.common.vec_env.main_module import find_main, refuse_in_import
from rl.common.vec_env.spinner import Spinner

__all__ = ["SubprocVecEnv"]

_engines: weakref.WeakSet[_ProcessEngine] = weakref.WeakSet()


class _Worker:
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


class _ProcessEngine(Engine):
    """Runs the lanes in workers, one group each.

    A step is announced by a sequence number in the arena and one eventfd write, and answered the same way. The
    numbers are the truth, the eventfds only wake; they are sticky, so a wake-up cannot be lost. Everything else goes
    through a socket per worker.
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
        self.workers = [_Worker(g, *bounds[g], env_fns[g]) for g in range(len(bounds))]
        self.memory = -1
        self.released = False
        self.deaths = select.epoll()
        private_fds.add(self.deaths.fileno())
        self.self_fd = os.pidfd_open(os.getpid())
        _engines.add(self)

    # Starting.

    def launch(self, workers: Sequence[_Worker]) -> list[dict[str, Any]]:
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

    def _spawn(self, worker: _Worker) -> None:
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

    def _greet(self, worker: _Worker, death: int) -> None:
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

    def _instruct(self, worker: _Worker, deadline: float) -> None:
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
        available = _available_memory()
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

    def _attach(self, worker: _Worker) -> None:
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

    def _post(self, worker: _Worker, kind: str, body: Any, deadline: float | None) -> None:
        """Send a message; raises ChannelClosed if the worker has ended."""
        message = self.dumps((worker.seq, kind, body))
        worker.channel.send(message, lambda events: self._wait(worker, events, deadline, kind))

    def _wait(self, worker: _Worker, events: int, deadline: float | None, what: str) -> None:
        """Wait for a worker's socket; raises where it, or in vain another, has ended, or it takes too long."""
        poller = select.poll()
        poller.register(worker.channel.fileno(), events)
        poller.register(self.deaths, select.POLLIN)
        ready = poller.poll(_milliseconds(deadline))
        if not ready:
            raise self._late([worker], what)
        if all(fd != worker.channel.fileno() for fd, _ in ready):
            self._bury()
            if worker.death is not None:
                raise ChannelClosed

    def _receive(self, worker: _Worker, deadline: float | None, what: str) -> tuple[str, Any]:
        """The answer to the worker's latest message; older answers, to calls that were given up, are dropped."""
        while True:
            try:
                seq, kind, body = worker.channel.receive(lambda events: self._wait(worker, events, deadline, what))
            except ChannelClosed:
                self._await_death(worker)
                raise
            if seq == worker.seq:
                return kind, body

    def _await_death(self, worker: _Worker) -> None:
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

    def _died(self, worker: _Worker, more: str = "") -> WorkerDiedError:
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

    def _busy_lane(self, worker: _Worker) -> int | None:
        if self.memory < 0:
            return None
        busy = self.arena.control[worker.index * CONTROL_WORDS + BUSY]
        return worker.low + busy if 0 <= busy < worker.high - worker.low else None

    def _late(self, workers: Sequence[_Worker], what: str) -> WorkerTimeoutError:
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

    # The hot path.

    def begin(self, first: int, last: int, actions: list[Any] | None) -> None:
        workers = self.workers[first:last]
        try:
            self._ring(workers, actions)
        except BaseException:
            # Ctrl-C between two workers: the step is pending all the same, so every worker must know of it. Who knows
            # already ignores the second call, which has the same number.
            self._ring(workers, actions)
            raise

    def _ring(self, workers: Sequence[_Worker], actions: list[Any] | None) -> None:
        control, targets, stepping, write = self.arena.control, self.target, self.stepping, os.eventfd_write
        if fence is not None:
            fence()
        for worker in workers:
            g = worker.index
            if not stepping[g]:
                worker.seq += 1
                worker.done = False
                stepping[g] = True
            if worker.death is not None:
                continue
            if actions is None:
                base = g * CONTROL_WORDS
                control[base + TARGET] = targets[g]
                control[base + COMMAND] = worker.seq
                write(worker.command, 1)
            else:
                low = workers[0].low
                part = actions[worker.low - low : worker.high - low]
                with contextlib.suppress(ChannelClosed):
                    self._post(worker, "step", (part, targets[g]), None)

    def finish(self, groups: Sequence[int], deadline: float | None) -> bool:
        workers, control = self.workers, self.arena.control
        any_ended = 0
        # The last one first: it was woken last, so when it has finished the others mostly have, too.
        for g in reversed(groups):
            worker = workers[g]
            if not worker.done:
                self._finish(worker, deadline, groups)
            any_ended |= control[g * CONTROL_WORDS + ENDED]
        return bool(any_ended)

    def _finish(self, worker: _Worker, deadline: float | None, groups: Sequence[int]) -> None:
        """Wait for one worker's step and its message."""
        control, at, seq = self.arena.control, worker.done_at, worker.seq
        self.spinner.wait(control, at, seq, True)
        while control[at] != seq:
            if worker.death is not None:
                self._revive(worker)
                return
            ready = worker.poller.poll(_milliseconds(deadline))
            if not ready:
                raise self._late([self.workers[g] for g in groups if not self._has_finished(g)], "step")
            for fd, _ in ready:
                if fd == worker.done_fd:
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(fd)
                elif control[at] != seq:
                    self._bury()
        if fence is not None:
            fence()
        if control[at - DONE + MESSAGE]:
            try:
                _, self.reports[worker.index] = self._receive(worker, deadline, "step")
            except ChannelClosed:
                self._revive(worker)
                return
        worker.done = True

    def _has_finished(self, g: int) -> bool:
        return self.workers[g].done or self.arena.control[self.workers[g].done_at] == self.workers[g].seq

    def finish_some(self, groups: Sequence[int], min_lanes: int, deadline: float | None) -> list[int]:
        while True:
            ready = [g for g in groups if self._has_finished(g) or self.workers[g].death is not None]
            if sum(self.bounds[g][1] - self.bounds[g][0] for g in ready) >= min_lanes:
                self.finish(ready, deadline)
                return ready
            poller = select.poll()
            poller.register(self.deaths, select.POLLIN)
            waiting = {self.workers[g].done_fd for g in groups if g not in ready}
            for fd in waiting:
                poller.register(fd, select.POLLIN)
            events = poller.poll(_milliseconds(deadline))
            if not events:
                raise self._late([self.workers[g] for g in groups if g not in ready], "step")
            for fd, _ in events:
                if fd in waiting:
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(fd)
                else:
                    self._bury()

    # The rest of the calls.

    def reset(self, jobs: dict[int, list[Job]], target: int, deadline: float | None) -> list[Report]:
        reports: list[Report] = []
        asked = []
        for g, group_jobs in jobs.items():
            worker = self.workers[g]
            worker.seq += 1
            try:
                if worker.death is None:
                    self._post(worker, "reset", (group_jobs, target), deadline)
            except ChannelClosed:
                self._await_death(worker)
            asked.append((worker, group_jobs))
        for worker, group_jobs in asked:
            try:
                if worker.death is not None:
                    raise ChannelClosed
                reports.append(self._receive(worker, deadline, "reset")[1])
            except ChannelClosed:
                reports.append(self._reset_anew(worker, group_jobs, target, deadline))
        return reports

    def ask(self, kind: str, lanes: Sequence[int], args: Any, deadline: float | None) -> list[Any]:
        try:
            data = self.dumps(args)
        except Exception as error:
            raise TypeError(f"The arguments of {kind}() cannot be pickled, so they cannot be sent: {error}") from error
        by_worker: dict[int, list[int]] = {}
        for lane in lanes:
            by_worker.setdefault(self.lane_worker[lane], []).append(lane)
        answers: dict[int, Any] = {}
        try:
            for g, wanted in by_worker.items():
                worker = self.workers[g]
                if worker.death is not None:
                    raise self._died(worker)
                worker.seq += 1
                self._post(worker, "ask", (kind, [lane - worker.low for lane in wanted], data), deadline)
            for g, wanted in by_worker.items():
                worker = self.workers[g]
                _, replies = self._receive(worker, deadline, kind)
                for lane, reply in zip(wanted, replies, strict=False):
                    answers[lane] = reply if isinstance(reply, Failure) else pickle.loads(reply)
        except ChannelClosed:
            self._await_death(worker)
            raise self._died(worker) from None
        failures = [one for one in answers.values() if isinstance(one, Failure)]
        return failures or [answers[lane] for lane in lanes]

    def worker_of(self, lane: int) -> int | None:
        return self.lane_worker[lane]

    def rebuild(self, one: Failure) -> tuple[BaseException, bool]:
        if isinstance(one.error, bytes):
            try:
                error = pickle.loads(one.error)
            except Exception:
                error = None
            if isinstance(error, Exception) and _is_known(type(error)):
                return error, True
        return super().rebuild(one._replace(error=None))

    # Restarting.

    def _replace(self, worker: _Worker) -> None:
        """A new process for a worker that has ended, within its budget."""
        if not self.restart or worker.nb_restarts >= self.max_restarts:
            more = f" It was restarted {worker.nb_restarts} times, which is max_restarts." if self.restart else ""
            self.failure = self._died(worker, more)
            raise self.failure
        worker.nb_restarts += 1
        warnings.warn(
            f"{self._died(worker)} Restarted ({worker.nb_restarts} of {self.max_restarts} times): the open episodes of "
            "these environments end as truncated.",
            RuntimeWarning,
            stacklevel=7,
        )
        worker.release()
        try:
            self.launch([worker])
        except WorkerDiedError:
            if worker.death is None:
                raise
            return self._replace(worker)
        except Exception as error:  # its environments cannot be made any more
            self.failure = error
            raise
        self._attach(worker)

    def _derived(self, worker: _Worker) -> list[Job]:
        """Reset jobs with seeds that follow from the lanes' last seeds and the number of restarts."""
        jobs: list[Job] = []
        for lane in worker.lanes:
            seed = self.lane_seeds[lane]
            if seed is not None:
                seed = int(np.random.SeedSequence([seed, worker.nb_restarts]).generate_state(1)[0])
            jobs.append((lane - worker.low, seed, None))
        return jobs

    def _revive(self, worker: _Worker) -> None:
        """The step of a worker that ended within it: its lanes' episodes count as truncated, without a reward."""
        while not worker.done:
            try:
                self._revive_once(worker)
            except ChannelClosed:  # it has ended once more
                self._await_death(worker)
            except BaseException:
                # Ctrl-C or a failure: what is half alive now must not be taken for a worker by the next call.
                if worker.process is not None:
                    worker.process.kill(signal.SIGKILL)
                raise

    def _revive_once(self, worker: _Worker) -> None:
        g, arena, tree = worker.index, self.arena, self.observation_tree
        rows, target = slice(worker.low, worker.high), self.target[g]
        told_return, told_length = arena.running_return[rows].copy(), arena.running_length[rows].copy()
        self._replace(worker)
        # Answered, as a step announced through the arena would overtake it.
        worker.seq += 1
        self._post(worker, "owe_reset", self._derived(worker), None)
        self._receive(worker, None, "restart")
        last, latest = arena.observation[self.current[g]], arena.observation[target]
        report: Report = {"infos": [(lane, {"worker_restarted": True}) for lane in worker.lanes]}
        if self.mode == AutoresetMode.SAME_STEP:
            for k, array in last.items():
                arena.final[k][rows] = array[rows]
            report["final_objects"] = [(lane, k, self.objects[k][lane]) for lane in worker.lanes for k in tree.objects]
            told = self.reset({g: [(k, None, None) for k in range(worker.high - worker.low)]}, target, None)[0]
            report["reset_infos"] = told.pop("infos", [])
            report.update(told)
        else:
            for k, array in last.items():
                latest[k][rows] = array[rows]
        arena.reward[rows] = 0.0
        arena.terminated[rows] = False
        arena.truncated[rows] = True
        arena.episode_return[rows] = told_return
        arena.episode_length[rows] = told_length
        arena.episode_seconds[rows] = np.nan
        arena.control[g * CONTROL_WORDS + ENDED] = 1
        self.reports[g] = report
        worker.done = True

    def _reset_anew(self, worker: _Worker, jobs: list[Job], target: int, deadline: float | None) -> Report:
        """The reset of a worker that has ended: all lanes of its successor are reset."""
        self._replace(worker)
        given = {k: (seed, options) for k, seed, options in jobs}
        anew = []
        for k, derived, _ in self._derived(worker):
            seed, options = given.get(k, (None, None))
            anew.append((k, derived if seed is None else seed, options))
        report = self.reset({worker.index: anew}, target, deadline)[0]
        known = dict(report.get("infos", ()))
        report["infos"] = [
            (lane, {**known.get(lane, {}), **({} if lane - worker.low in given else {"worker_restarted": True})})
            for lane in worker.lanes
        ]
        return report

    # The end.

    def abort(self) -> None:
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

    def _leave(self, workers: Sequence[_Worker], deadline: float) -> list[_Worker]:
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
            ready = poller.poll(_milliseconds(deadline))
            if not ready:
                return live
            for fd, _ in ready:
                if fd in talking:
                    self._hear(talking[fd])
            live = [worker for worker in live if not worker.process.poll()]  # type: ignore[union-attr]
        return live

    @staticmethod
    def _hear(worker: _Worker) -> None:
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


def _milliseconds(deadline: float | None) -> float | None:
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


def _is_known(cls: type) -> bool:
    """Whether a class is the one that this process finds under its name, so that `except` can catch it."""
    found: Any = sys.modules.get(cls.__module__)
    for name in cls.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is cls


def _directory() -> str | None:
    try:
        return os.getcwd()
    except OSError:  # it has been removed
        return None


def _available_memory() -> int | None:
    """Bytes that may still be used, by the machine's and the control group's account."""
    limits = []
    try:
        with open("/proc/meminfo") as file:
            fields = {line.split(":")[0]: line.split()[1] for line in file}
        limits.append(int(fields["MemAvailable"]) * 1024)
    except (OSError, KeyError, IndexError, ValueError):
        pass
    try:
        with open("/sys/fs/cgroup/memory.max") as file, open("/sys/fs/cgroup/memory.current") as used:
            limits.append(int(file.read()) - int(used.read()))
    except (OSError, ValueError):
        pass
    return min(limits) if limits else None


def _pickle_env_fns(env_fns: Sequence[Callable[[], Any]], low: int, import_main: bool) -> bytes:
    try:
        return dumps(list(env_fns)) if import_main else cloudpickle.dumps(list(env_fns))
    except Exception:
        for i, env_fn in enumerate(env_fns):
            try:
                cloudpickle.dumps(env_fn)
            except Exception as error:
                raise EnvFnError(
                    f"env_fns[{low + i}] cannot be sent to a worker process{_culprit(env_fn)}: {error}. Make the "
                    "environment, and what it needs, inside the function."
                ) from error
        raise


def _culprit(env_fn: Any) -> str:
    """Which variable of a function cannot be pickled."""
    variables: dict[str, Any] = {}
    code = getattr(env_fn, "__code__", None)
    if code is not None:
        for name, cell in zip(code.co_freevars, env_fn.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):
                variables[name] = cell.cell_contents
        variables |= {name: env_fn.__globals__[name] for name in code.co_names if name in env_fn.__globals__}
        variables |= {f"default {k}": value for k, value in enumerate(env_fn.__defaults__ or ())}
    elif hasattr(env_fn, "func"):
        variables = {f"argument {k}": value for k, value in enumerate(env_fn.args)} | dict(env_fn.keywords)
    for name, value in {**variables, **getattr(env_fn, "__dict__", {})}.items():
        try:
            cloudpickle.dumps(value)
        except Exception:
            return f" because of its variable {name!r} ({type(value).__name__})"
    return ""


class SubprocVecEnv(LaneVecEnv):
    """Steps N environments in worker processes, several per worker.

    Observations, actions, rewards and flags travel through shared memory; infos, attributes and errors through a
    socket per worker. No environment is made in this process. Workers do not import the main module (unless
    `import_main` asks for it), so a script needs no `if __name__ == "__main__"` guard, and functions and classes
    defined in it are sent by value.

    An environment's exception is raised here with its own type (`WorkerError` where that is not possible), the
    worker's traceback as cause and the attributes `env_index`, `worker_index` and `env_failures`; after `reset()` the
    vector env goes on. Ctrl-C never reaches the workers. They end with this process, however that ends.

    Args:
        env_fns: N functions without arguments, each of which makes one environment.
        autoreset_mode: What happens when an episode ends, see `VecEnv`.
        workers: Number of worker processes. Default: one per usable core, at most N. "auto": times some steps of
            `env_fns[0]()` first, and takes one per environment if they wait rather than compute; `worker_choice`
            and the log tell what was chosen and why.
        start_method: "forkserver", "spawn" or "fork". Fork is quick, but a worker that uses TensorFlow hangs if this
            process has.
        copy: Whether returned observations are the caller's own. With False they are views of the shared memory that
            stay intact until the second next step or reset.
        check_actions: Whether discrete actions must lie in their space.
        clip_actions: Whether `Box` actions are clipped to their bounds.
        on_bad_info: What to do about an info that cannot be pickled: "raise" `InfoSerializationError`, or "drop" the
            value for a description.
        on_worker_failure: "raise" `WorkerDiedError` when a worker process ends, or "restart" it: its environments
            are made and reset anew; their rows of that step have reward 0, `truncated` and
            `infos[i]["worker_restarted"]` True and the last delivered observation as final one. Such a row is no
            transition of the environment: learn nothing from it.
        max_restarts: How often each worker may be restarted.
        spaces: "same": all environments must have equal spaces. "compatible": their bounds may differ.
        step_timeout: Default seconds that a step, a reset or any other call waits for the workers, None: no limit.
        start_timeout: Seconds that all environments may take to be made.
        worker_env: Environment variables for the workers; None removes one. By default libraries get one thread and
            see no GPU.
        spin_us: Microseconds that both sides look for the other's answer before they sleep, 0: none. They do so
            politely, and not where it does not pay off (see `Spinner`).
        import_main: Whether workers import the main module, as multiprocessing's do, under the name `__mp_main__`: for
            what it registers or sets up when it is imported. It then needs a guard, and is imported by each worker
            with all that it imports. Functions and classes are sent by reference where pickle can.

    Raises:
        ValueError: If `env_fns` is empty, an option is wrong, the spaces differ, or `import_main` is True and the
            main module cannot be imported.
        EnvFnError: If an entry of `env_fns` is no function or cannot be sent (a TypeError).
        WorkerTimeoutError: If the environments are not made in time.
        RuntimeError: If this is not Linux 5.3 or later; use `DummyVecEnv` there.
    """

    def __init__(
        self,
        env_fns: Iterable[Callable[[], Any]],
        *,
        autoreset_mode: AutoresetMode | str = AutoresetMode.SAME_STEP,
        workers: int | Literal["auto"] | None = None,
        start_method: Literal["forkserver", "spawn", "fork"] = "forkserver",
        copy: bool = True,
        check_actions: bool = True,
        clip_actions: bool = False,
        on_bad_info: Literal["raise", "drop"] = "raise",
        on_worker_failure: Literal["raise", "restart"] = "raise",
        max_restarts: int = 3,
        spaces: Literal["same", "compatible"] = "same",
        step_timeout: float | None = None,
        start_timeout: float = 60.0,
        worker_env: Mapping[str, str | None] | None = None,
        spin_us: float = 50.0,
        import_main: bool = False,
    ) -> None:
        check_platform()
        refuse_in_import()
        mode = mode_of(autoreset_mode)
        functions = check_env_fns(env_fns)
        nb = len(functions)
        if start_method not in METHODS:
            raise ValueError(f"start_method must be one of {METHODS}, got {start_method!r}.")
        if on_worker_failure not in ("raise", "restart"):
            raise ValueError(f"on_worker_failure must be 'raise' or 'restart', got {on_worker_failure!r}.")
        if spaces not in ("same", "compatible"):
            raise ValueError(f"spaces must be 'same' or 'compatible', got {spaces!r}.")
        if on_bad_info not in ("raise", "drop"):
            raise ValueError(f"on_bad_info must be 'raise' or 'drop', got {on_bad_info!r}.")
        if not (workers is None or workers == "auto" or (isinstance(workers, (int, np.integer)) and workers >= 1)):
            raise ValueError(f"workers must be a positive number, 'auto' or None, got {workers!r}.")
        cores = usable_cores()
        if workers == "auto":
            _pickle_env_fns(functions[:1], 0, import_main)
            probe = probe_env(
                functions[0],
                start_method=start_method,
                worker_env=worker_env,
                start_timeout=start_timeout,
                import_main=import_main,
            )
            nb_workers, self.worker_choice = choose_workers(nb, probe)
            logger.info("SubprocVecEnv: %s", self.worker_choice)
        elif workers is None:
            nb_workers = min(nb, cores)
            self.worker_choice = f"one worker per usable core, at most one per environment ({nb_workers})"
        else:
            nb_workers = min(nb, int(workers))
            self.worker_choice = f"as asked for, at most one per environment ({nb_workers})"
        # Worker floor(i * W / N) runs environment i.
        edges = [-(-w * nb // nb_workers) for w in range(nb_workers + 1)]
        bounds = list(zip(edges[:-1], edges[1:], strict=True))
        pickled = [_pickle_env_fns(functions[low:high], low, import_main) for low, high in bounds]
        engine = _ProcessEngine(
            bounds,
            pickled,
            mode,
            start_method,
            worker_environ(worker_env),
            on_worker_failure == "restart",
            max_restarts,
            start_timeout,
            spin_us * 1e-6,
            import_main,
        )
        try:
            made = engine.launch(engine.workers)
            engine.describe(
                [space for one in made for space in one["observation_spaces"]],
                [space for one in made for space in one["action_spaces"]],
                spaces,
                check_actions,
                clip_actions,
            )
            engine.share()
            super().__init__(
                engine,
                0,
                nb_workers,
                autoreset_mode=mode,
                copy=copy,
                on_bad_info=on_bad_info,
                timeout=step_timeout,
                metadata=made[0]["metadata"],
                render_mode=made[0]["render_mode"],
                spec=made[0]["spec"],
            )
        except BaseException:
            engine.close(1.0)
            raise
        self.start_method = start_method
        self.nb_workers = nb_workers
        # The exit hook below covers what is still open then; this covers what is forgotten before.
        weakref.finalize(self, engine.close, 1.0).atexit = False

    @property
    def worker_pids(self) -> list[int | None]:
        """The workers' process ids (None: ended)."""
        return [worker.process.pid if worker.process is not None else None for worker in self._engine.workers]  # type: ignore[attr-defined]


@atexit.register
def _close_all() -> None:
    # Registered after launcher's hook and so run before it: the fork server must see the workers' end.
    for engine in list(_engines):
        engine.close(1.0)
