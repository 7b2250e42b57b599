"""Files that cost far more than their bytes: one line, whichever reader they come to, and a limit behind all readers."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("numpy", reason="numpy is not installed")

from stoker.contract.effort import LookingAt, looking_at_file

from conftest import at_length
from stoker.contract.names import Refusal
from stoker.control.launch.console import LogLines


def spin(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        try:
            sum(range(1000))
        except Exception:  # what interrupts it is none
            pytest.fail("the limit was taken for a problem of the code's own")


def test_time_and_memory_are_limited() -> None:
    def look() -> None:
        with pytest.raises(Refusal, match="a file takes too much memory"), LookingAt("a file", room=64 << 20):
            bytearray(2 << 30)  # more than a process that has run many tests may hold without using it
        done.append(True)

    done: list[bool] = []
    with pytest.raises(Refusal, match="a file takes more than 0 s of CPU time"), LookingAt("a file", 0.2):
        spin(60)
    look()
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert len(done) == 2
    assert len(bytearray(256 << 20)) == 256 << 20, "the limit is gone"


def test_other_threads_time_does_not_count() -> None:
    thread = threading.Thread(target=spin, args=(1.0,))
    begun = time.process_time()
    with LookingAt("a file", 0.4):
        thread.start()
        thread.join()
    assert time.process_time() - begun > 0.9, "the other thread took more than this one may"


def test_a_limit_that_ends_in_time_leaves_nothing_behind() -> None:
    """Bodies that end about when their time does: whatever comes, comes as a refusal, and nothing afterwards."""
    before = signal.getsignal(signal.SIGPROF)
    refused = 0
    for body in [0.1] * 12 + [1.0]:
        try:
            with LookingAt("outer", 0.1), LookingAt("inner", 0.1):
                until = time.thread_time() + body
                while time.thread_time() < until:
                    sum(range(200))
        except Refusal:
            refused += 1
    assert signal.getsignal(signal.SIGPROF) is before and signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)
    until = time.thread_time() + 0.5
    while time.thread_time() < until:
        sum(range(1000))
    assert refused, "the last body takes ten times what it may"


@at_length
def test_a_limit_of_a_generator_ends_though_its_body_takes_long_to_free() -> None:
    @contextmanager
    def limited() -> Iterator[None]:
        with LookingAt("a file", 0.4):
            yield

    for _ in range(3):
        with pytest.raises(Refusal, match="a file takes more"), limited():
            [[] for _ in iter(int, 1)]
        assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)


def test_a_limit_within_a_limit_leaves_the_outer_one() -> None:
    with pytest.raises(Refusal, match="outer takes more"), LookingAt("outer", 0.5):
        with LookingAt("inner", 5):
            spin(0.1)
        spin(60)
    with LookingAt("outer", 5), pytest.raises(Refusal, match="inner takes more"), LookingAt("inner", 0.2):
        spin(60)


def test_other_problems_are_one_line_and_sleeping_costs_nothing(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="a file can't be read: KeyError"), LookingAt("a file", 0.1):
        time.sleep(0.3)
        raise KeyError
    with pytest.raises(Refusal, match="No such file"), looking_at_file("a file", str(tmp_path / "none")):
        (tmp_path / "none").read_bytes()


def test_a_long_line_with_a_control_code_takes_its_time_once() -> None:
    for text in (b"x" * (8 << 20) + b"\x1b[0m\n", b"x" * (4 << 20) + b"\r\n" * 3, b"\r" * (1 << 20) + b"\x1b[0mend\n"):
        begun = time.thread_time()
        LogLines().feed(text)
        assert time.thread_time() - begun < 5, "38 s for a line of 256 KB, once"
