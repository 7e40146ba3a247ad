"""Steps and other calls of lanes that run in worker processes; what becomes of those of a worker that has died."""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode

from rl.common.vec_env.arena import COMMAND, CONTROL_WORDS, DONE, ENDED, MESSAGE, TARGET, fence
from rl.common.vec_env.channel import ChannelClosed
from rl.common.vec_env.engine import Job
from rl.common.vec_env.errors import WorkerDiedError
from rl.common.vec_env.lanes import Failure, Report
from rl.common.vec_env.pool import Worker, WorkerPool, milliseconds

__all__ = ["ProcessEngine"]


class ProcessEngine(WorkerPool):
    """Runs the lanes in workers, one group each.

    A step is announced by a sequence number in the arena and one eventfd write, and answered the same way. The
    numbers are the truth, the eventfds only wake; they are sticky, so a wake-up cannot be lost. Everything else goes
    through a socket per worker.
    """

    # The hot path.

    def begin(self, first: int, last: int, actions: list[Any] | None) -> None:
        """Wake the workers; see `Engine.begin`."""
        workers = self.workers[first:last]
        try:
            self._ring(workers, actions)
        except BaseException:
            # Ctrl-C between two workers: the step is pending all the same, so every worker must know of it. Who knows
            # already ignores the second call, which has the same number.
            self._ring(workers, actions)
            raise

    def _ring(self, workers: Sequence[Worker], actions: list[Any] | None) -> None:
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
        """Wait for workers, and restart those that have died; see `Engine.finish`."""
        workers, control = self.workers, self.arena.control
        any_ended = 0
        # The last one first: it was woken last, so when it has finished the others mostly have, too.
        for g in reversed(groups):
            worker = workers[g]
            if not worker.done:
                self._finish(worker, deadline, groups)
            any_ended |= control[g * CONTROL_WORDS + ENDED]
        return bool(any_ended)

    def _finish(self, worker: Worker, deadline: float | None, groups: Sequence[int]) -> None:
        """Wait for one worker's step and its message."""
        control, at, seq = self.arena.control, worker.done_at, worker.seq
        self.spinner.wait(control, at, seq, True)
        while control[at] != seq:
            if worker.death is not None:
                self._revive(worker)
                return
            ready = worker.poller.poll(milliseconds(deadline))
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
        """Wait for some of the workers; see `Engine.finish_some`."""
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
            events = poller.poll(milliseconds(deadline))
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
        """Reset lanes, at once in all workers; see `Engine.reset`."""
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
        """Put a question to lanes, at once in all workers; see `Engine.ask`."""
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
        """Number of the worker that runs a lane."""
        return self.lane_worker[lane]

    def rebuild(self, one: Failure) -> tuple[BaseException, bool]:
        """The exception itself, where it came out of the pickle; see `Engine.rebuild`."""
        if isinstance(one.error, bytes):
            try:
                error = pickle.loads(one.error)
            except Exception:
                error = None
            if isinstance(error, Exception) and _is_known(type(error)):
                return error, True
        return super().rebuild(one._replace(error=None))

    # Restarting.

    def _replace(self, worker: Worker) -> None:
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

    def _derived(self, worker: Worker) -> list[Job]:
        """Reset jobs with seeds that follow from the lanes' last seeds and the number of restarts."""
        jobs: list[Job] = []
        for lane in worker.lanes:
            seed = self.lane_seeds[lane]
            if seed is not None:
                seed = int(np.random.SeedSequence([seed, worker.nb_restarts]).generate_state(1)[0])
            jobs.append((lane - worker.low, seed, None))
        return jobs

    def _revive(self, worker: Worker) -> None:
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

    def _revive_once(self, worker: Worker) -> None:
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

    def _reset_anew(self, worker: Worker, jobs: list[Job], target: int, deadline: float | None) -> Report:
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


def _is_known(cls: type) -> bool:
    """Whether a class is the one that this process finds under its name, so that `except` can catch it."""
    found: Any = sys.modules.get(cls.__module__)
    for name in cls.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is cls
