"""A worker process of SubprocVecEnv: makes its environments, then steps them whenever it is told to."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import mmap
import os
import pickle
import random
import select
import signal
import socket
import sys
import traceback
from typing import Any, NoReturn

import cloudpickle
import numpy as np

from rl.common.vec_env.arena import COMMAND, CONTROL_WORDS, DONE, ENDED, MESSAGE, TARGET, Arena, SpaceTree, fence
from rl.common.vec_env.channel import Channel, ChannelClosed
from rl.common.vec_env.lanes import Failure, Lanes, Report, dumps, failure
from rl.common.vec_env.main_module import import_main
from rl.common.vec_env.spinner import Spinner

__all__ = ["pack_failure", "work"]


def work(fd: int) -> NoReturn:
    """The life of a worker; never returns.

    Args:
        fd: The worker's end of the socket pair to the main process.
    """
    code = 1
    try:
        # Ctrl-C is the main process's business; so is the rest of what it may have installed under fork.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for signum in (signal.SIGTERM, signal.SIGIO, signal.SIGCHLD, signal.SIGPIPE):
            signal.signal(signum, signal.SIG_IGN if signum == signal.SIGPIPE else signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGIO})
        if os.getpgrp() != os.getpid():
            os.setpgid(0, 0)
        channel = Channel(socket.socket(fileno=fd))
        death, main, command, done = channel.receive_fds(4)
        _arm(death)
        _Worker(channel, main, command, done).run()
        code = 0
    except ChannelClosed:
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(code)


def _arm(death: int) -> None:
    """Let the kernel end this process, and what it starts in its group, when the main process ends.

    The main process holds the other end of this pipe and never writes: its end can only mean that the process is
    gone. The default action of SIGIO needs no cooperation of Python, so it works while native code hangs, too.
    """
    fcntl.fcntl(death, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(death, fcntl.F_SETFL, fcntl.fcntl(death, fcntl.F_GETFL) | os.O_ASYNC)
    poller = select.poll()
    poller.register(death, 0)
    if poller.poll(0):  # it was too late to be told
        raise ChannelClosed


def pack_failure(one: Failure) -> Failure:
    """A failure whose exception is replaced by its pickle, or by None where it would not come out the same."""
    error = one.error
    if isinstance(error, Exception):
        for pickler in (pickle, cloudpickle):
            try:
                data = pickler.dumps(error)
                twin = pickle.loads(data)
                if type(twin) is type(error) and str(twin) == one.message:
                    return one._replace(error=data)
            except Exception:  # noqa: S112 - whatever a __reduce__ can think of
                continue
    return one._replace(error=None)


class _Worker:
    def __init__(self, channel: Channel, main: int, command: int, done: int) -> None:
        self.channel = channel
        self.main = main
        self.command = command
        self.done = done
        self.poller = select.poll()
        for fd in (command, channel.fileno(), main):
            self.poller.register(fd, select.POLLIN)

    def wait(self, events: int) -> None:
        """Wait for the socket, or give up with the main process."""
        poller = select.poll()
        poller.register(self.channel.fileno(), events)
        poller.register(self.main, select.POLLIN)
        if any(fd == self.main for fd, _ in poller.poll()):
            raise ChannelClosed

    def reply(self, seq: int, kind: str, body: Any) -> None:
        self.channel.send(dumps((seq, kind, body)), self.wait)

    def run(self) -> None:
        seq, _, start = self.channel.receive(self.wait)
        lanes = self.lanes = Lanes(start["first"], start["autoreset_mode"], catch=(BaseException,))
        try:
            os.environ.clear()
            os.environ.update(start["environ"])
            sys.path[:] = start["sys_path"]
            sys.argv[:] = start["sys_argv"]
            if start["directory"] is not None:
                os.chdir(start["directory"])
            if start["main"] is not None:
                import_main(*start["main"])
            # Environments that use the global generators must not all draw the same, as forked ones would.
            random.seed()
            np.random.seed()
            env_fns = cloudpickle.loads(start["env_fns"])
            failures = lanes.build(env_fns)
            del env_fns, start
            if not failures:
                env = lanes.envs[0]
                description = {
                    "observation_spaces": [one.observation_space for one in lanes.envs],
                    "action_spaces": [one.action_space for one in lanes.envs],
                    "metadata": _portable(getattr(env, "metadata", None)),
                    "render_mode": _portable(getattr(env, "render_mode", None)),
                    "spec": _portable(getattr(env, "spec", None)),
                }
                message = dumps((seq, "made", description))
        except BaseException as error:
            failures = [failure(lanes.first + len(lanes.envs), error)]
        if failures:
            self.reply(seq, "failed", [pack_failure(one) for one in failures])
            # Wait to be dismissed: an end that is noticed before this message would hide the reason for it.
            with contextlib.suppress(ChannelClosed):
                self.channel.receive(self.wait)
            lanes.close()
            return
        self.channel.send(message, self.wait)
        try:
            self.serve()
        except ChannelClosed:
            lanes.close()
        else:
            failures = [pack_failure(one) for one in lanes.close()]
            with contextlib.suppress(ChannelClosed):
                self.reply(0, "closed", failures)

    def attach(self, body: dict[str, Any]) -> None:
        (fd,) = self.channel.receive_fds(1)
        observations, actions = SpaceTree(body["observation_space"]), SpaceTree(body["action_space"])
        arena = Arena(observations, actions, body["nb_lanes"], body["nb_groups"])
        memory = mmap.mmap(fd, arena.size)
        os.close(fd)
        self.lanes.attach(arena.attach(memory), observations, actions, body["group"])
        self.control = arena.control
        self.base = body["group"] * CONTROL_WORDS
        self.last = 0
        self.spinner = Spinner(body["spin_seconds"])

    def serve(self) -> None:
        """Obey until told to close."""
        command, main, sock = self.command, self.main, self.channel.fileno()
        poll, read, step = self.poller.poll, os.eventfd_read, self.step
        self.control = memoryview(bytearray(8 * CONTROL_WORDS)).cast("q")
        self.base, self.last, self.last_message = 0, 0, 0
        gc.freeze()  # what was imported and built lives as long as the worker: collections need not look at it
        while True:
            for fd, _ in poll():
                if fd == command:
                    read(command)
                elif fd == sock:
                    if not self.answer(*self.channel.receive(self.wait)):
                        return
                elif fd == main:
                    return
            # After messages, too: the first command may have been given before the arena was attached.
            while self.control[self.base + COMMAND] != self.last:
                step()

    def step(self) -> None:
        """Step all lanes with the actions in the arena, then wait a little for the next command."""
        if fence is not None:
            fence()
        control, base = self.control, self.base
        seq = self.last = control[base + COMMAND]
        self.finish(seq, *self.lanes.step(self.lanes.actions(0, len(self.lanes.envs)), 0, control[base + TARGET]))
        self.spinner.wait(control, base + COMMAND, seq, False)

    def finish(self, seq: int, ended: bool, report: Report | None) -> None:
        control, base = self.control, self.base
        control[base + ENDED] = ended
        control[base + MESSAGE] = report is not None
        if fence is not None:
            fence()
        control[base + DONE] = seq
        # Before the message, which may be larger than the socket takes: the main process must know to read it.
        os.eventfd_write(self.done, 1)
        if report is not None:
            self.reply(seq, "step", _pack(report))

    def answer(self, seq: int, kind: str, body: Any) -> bool:
        """Serve a message; returns whether to go on."""
        lanes = self.lanes
        if kind == "close":
            return False
        if kind == "attach":
            self.attach(body)
        elif kind == "step" and seq != self.last_message:  # actions that are Python objects
            actions, target = body
            self.last_message = seq
            self.finish(seq, *lanes.step(actions, 0, target))
        elif kind == "reset":
            jobs, target = body
            self.reply(seq, "reset", _pack(lanes.reset(jobs, target)))
        elif kind == "owe_reset":
            lanes.owe_reset(body)
            self.reply(seq, "owe_reset", None)
        elif kind == "ask":
            question, numbers, args = body
            try:
                answers = lanes.ask(question, numbers, pickle.loads(args))
            except BaseException as error:  # the arguments cannot be unpickled here
                answers = [failure(lanes.first + numbers[0], error)]
            self.reply(seq, "ask", [self.portable(one, lane) for one, lane in zip(answers, numbers, strict=False)])
        return True

    def portable(self, answer: Any, k: int) -> Any:
        if isinstance(answer, Failure):
            return pack_failure(answer)
        try:
            return dumps(answer)
        except Exception as error:
            kind = f"{type(answer).__module__}.{type(answer).__qualname__}"
            try:
                raise TypeError(
                    f"A value of type {kind} cannot leave the worker of environment {self.lanes.first + k}: {error}"
                ) from error
            except TypeError as wrapped:
                return pack_failure(failure(self.lanes.first + k, wrapped))


def _pack(report: Report) -> Report:
    if "failures" in report:
        report["failures"] = [pack_failure(one) for one in report["failures"]]
    return report


def _portable(value: Any) -> Any:
    """A value if it can be sent, else None: a spec may hold a function that nobody can pickle."""
    try:
        dumps(value)
    except Exception:
        return None
    return value
