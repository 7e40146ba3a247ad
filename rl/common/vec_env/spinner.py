"""Looking for an answer a little while before sleeping until it comes."""

from __future__ import annotations

import os
import time
from typing import Any

__all__ = ["Spinner"]

MAX_PAUSE = 255


class Spinner:
    """Spins politely, and only as long as that pays off.

    To wake a process that sleeps on an idle core takes longer than to step some cheap environments. Between two looks
    the core is offered to whoever else wants it, another worker for instance, so spinning does no harm with more
    processes than cores. Where it fails, as the answer takes longer or somebody else does want the core, the
    next 1, 3, 7, ... 255 waits go without it.

    Args:
        seconds: How long to look. 0: never.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._misses = 0
        # Never, or not for the next so many waits.
        self._pause: float = 0 if seconds > 0 else float("inf")

    def wait(self, words: Any, at: int, value: int, equal: bool) -> None:
        """Look until `words[at] == value` is `equal`, or for `seconds`, or not at all.

        Args:
            words: Shared memory of integers.
            at: Which one.
            value: What it is compared with.
            equal: Whether to wait for this value, or for any other.
        """
        if self._pause:
            self._pause -= 1
            return
        clock, offer = time.perf_counter, os.sched_yield
        end = clock() + self.seconds
        while (words[at] == value) is not equal:
            offer()
            if clock() > end:
                self._misses = min(2 * self._misses + 1, MAX_PAUSE)
                self._pause = self._misses
                return
        self._misses = 0
