"""`Interrupts`: Ctrl-C without a step half done."""

from __future__ import annotations

import signal
import threading
from typing import Any

__all__ = ["Interrupts"]


class Interrupts:
    """Turns the first Ctrl-C into a flag, read between steps, so that no step is half done; the second one raises."""

    def __enter__(self) -> Interrupts:
        self.pressed = False
        self._previous: Any = None
        if threading.current_thread() is threading.main_thread():
            previous = signal.getsignal(signal.SIGINT)
            if callable(previous):  # not where SIGINT is ignored, as in a shell's background job
                self._previous = previous
                signal.signal(signal.SIGINT, self._press)
        return self

    def _press(self, signum: int, frame: Any) -> None:
        if self.pressed:
            raise KeyboardInterrupt
        self.pressed = True

    def __exit__(self, *error: Any) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)
            outer = getattr(self._previous, "__self__", None)
            if self.pressed and isinstance(outer, Interrupts):
                outer.pressed = True  # a `test` inside a `fit`: the user wants out of both
