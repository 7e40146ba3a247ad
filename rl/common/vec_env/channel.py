"""Messages between the main process and a worker: length-prefixed pickles over a socket pair."""

from __future__ import annotations

import pickle
import select
import socket
import struct
from collections import deque
from collections.abc import Callable
from typing import Any

__all__ = ["Channel", "ChannelClosed"]

_HEADER = struct.Struct("<Q")


class ChannelClosed(Exception):
    """The other side has closed its end, or died."""


class Channel:
    """Sends and receives whole messages; what was sent or received in part survives timeouts and interrupts.

    Args:
        sock: A connected stream socket; it becomes non-blocking.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self._out: deque[memoryview] = deque()
        self._in = bytearray(_HEADER.size)
        self._got = 0
        self._has_header = False

    def fileno(self) -> int:
        """The socket's descriptor."""
        return self.sock.fileno()

    def send(self, message: bytes, wait: Callable[[int], None]) -> None:
        """Send a pickled message.

        Args:
            message: The pickle.
            wait: Called with the poll events that are needed; returns when they may have come, or raises.

        Raises:
            ChannelClosed: If nobody will read it.
        """
        self._out.append(memoryview(_HEADER.pack(len(message))))
        self._out.append(memoryview(message))
        self.flush(wait)

    def flush(self, wait: Callable[[int], None]) -> None:
        """Send what an interrupted `send` left."""
        while self._out:
            try:
                sent = self.sock.send(self._out[0])
            except BlockingIOError:
                wait(select.POLLOUT)
                continue
            except OSError as error:
                raise ChannelClosed from error
            if sent == len(self._out[0]):
                self._out.popleft()
            else:
                self._out[0] = self._out[0][sent:]

    def receive(self, wait: Callable[[int], None]) -> Any:
        """The next message.

        Args:
            wait: As for `send`.

        Raises:
            ChannelClosed: If there will be none.
        """
        while True:
            if self._got == len(self._in):
                if self._has_header:
                    message = self._in
                    self._in, self._got, self._has_header = bytearray(_HEADER.size), 0, False
                    return pickle.loads(message)
                (size,) = _HEADER.unpack(self._in)
                self._in, self._got, self._has_header = bytearray(size), 0, True
                continue
            try:
                got = self.sock.recv_into(memoryview(self._in)[self._got :])
            except BlockingIOError:
                wait(select.POLLIN)
                continue
            except OSError as error:
                raise ChannelClosed from error
            if got == 0:
                raise ChannelClosed
            self._got += got

    def send_fds(self, fds: list[int]) -> None:
        """Pass descriptors; the other side calls `receive_fds` at this point of the stream."""
        try:
            # One byte and a few descriptors: the buffer of a stream whose peer has answered so far has room.
            socket.send_fds(self.sock, [b"F"], fds)
        except OSError as error:
            raise ChannelClosed from error

    def receive_fds(self, count: int) -> list[int]:
        """The descriptors passed by `send_fds`."""
        while True:
            try:
                data, fds, _, _ = socket.recv_fds(self.sock, 1, count)
            except BlockingIOError:
                poll_forever(self.sock.fileno())
                continue
            if not data or len(fds) != count:
                raise ChannelClosed
            return fds

    def close(self) -> None:
        """Close this end."""
        self.sock.close()


def poll_forever(fd: int, events: int = select.POLLIN) -> None:
    """Wait without a limit for a descriptor."""
    poller = select.poll()
    poller.register(fd, events)
    poller.poll()
