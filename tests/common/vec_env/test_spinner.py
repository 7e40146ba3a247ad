"""Spinning pays off or stops."""

import threading
import time

import pytest

from rl.common.vec_env.spinner import MAX_PAUSE, Spinner


class Words:
    """Counts how often it is looked at; shows `change` from look number `at` on."""

    def __init__(self, at=10**9, change=1):
        self.at, self.change, self.looks = at, change, 0

    def __getitem__(self, index):
        self.looks += 1
        return self.change if self.looks >= self.at else 0


def test_never():
    spinner, words = Spinner(0), Words()
    for _ in range(1000):
        spinner.wait(words, 0, 1, True)
    assert words.looks == 0


@pytest.mark.parametrize(("value", "equal"), [(1, True), (0, False)])
def test_looks_until_the_value_is_there(value, equal):
    spinner, words = Spinner(10), Words(at=5)
    for _ in range(3):
        spinner.wait(words, 0, value, equal)
    assert words.looks == 7


def test_gives_up_in_time_and_then_less_and_less_often():
    spinner, tried = Spinner(1e-5), []
    for i in range(1500):
        words = Words()
        begun = time.perf_counter()
        spinner.wait(words, 0, 1, True)
        assert time.perf_counter() - begun < 1
        if words.looks:
            tried.append(i)
    gaps = [b - a for a, b in zip(tried[:-1], tried[1:], strict=True)]
    assert gaps[:8] == [2, 4, 8, 16, 32, 64, 128, 256] and set(gaps[8:]) == {MAX_PAUSE + 1}


def test_a_success_makes_up_for_failures():
    spinner = Spinner(1e-5)
    for _ in range(20):
        spinner.wait(Words(), 0, 1, True)
    while True:  # until it tries again
        words = Words(at=1)
        spinner.wait(words, 0, 1, True)
        if words.looks:
            break
    tried = []
    for i in range(8):
        words = Words()
        spinner.wait(words, 0, 1, True)
        if words.looks:
            tried.append(i)
    assert tried == [0, 2, 6]


def test_sees_what_another_thread_writes():
    words = memoryview(bytearray(16)).cast("q")
    threading.Timer(0.05, words.__setitem__, (1, 7)).start()
    begun = time.perf_counter()
    Spinner(5).wait(words, 1, 7, True)
    assert words[1] == 7 and time.perf_counter() - begun < 4
