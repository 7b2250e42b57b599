"""Long and odd lines of ranks on the console."""

from __future__ import annotations

import time

import pytest

from stoker.control.launch.console import MAX_LINE, LineCutter, LogLines
from stoker.control.launch.short_lines import LauncherLines, RoleLines, ShortLines
from stoker.control.watch.loss_monitor import LossMonitor

SOON = 5.0


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")


@pytest.mark.parametrize(
    "line",
    [b"loss" + b" " * 60_000 + b"x", b"loss " + b"1" * 60_000 + b"x", b"loss=1." + b"1" * 60_000 + b"x"],
    ids=["spaces", "digits", "decimals"],
)
def test_a_printed_line_does_not_hold_the_launcher_up(line: bytes) -> None:
    began = time.process_time()
    assert LossMonitor().read(0, line + b"\n") == []
    assert time.process_time() - began < SOON


def test_a_step_of_five_thousand_digits_is_a_step_like_any_other() -> None:
    (bad,) = LossMonitor().read(0, b"step " + b"9" * 5000 + b" loss nan\n")
    assert bad.kind == "loss"


def test_a_line_without_end_behind_a_carriage_return_is_written() -> None:
    lines, written = LogLines(), 0
    for turn in range(64):
        lines.feed((b"" if turn else b"\r") + b"y" * 60_000)
        if lines.unfinished > 1 << 20:
            written += len(lines.partial())
    assert written > 1 << 20


def test_a_line_without_end_is_shown_in_pieces_however_it_begins() -> None:
    """One that began as a recipe's was kept for its end, whatever its length: a hostile host's rank filled the launcher."""
    cutter = LineCutter(b"rank 1:", lambda line: line)
    shown = cutter.feed(b"INFO | [")
    piece = b"x" * (1 << 20)
    for _ in range(MAX_LINE // len(piece)):
        shown += cutter.feed(piece)
    assert shown.startswith(b"rank 1:INFO | [x") and len(shown) > MAX_LINE
    assert cutter.feed(b"y\nz\n") == b"y\nrank 1:z\n"


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("begin", [b"stoker: ", b"INFO | [GPU 0] "])
def test_a_command_in_a_command_is_not_folded_without_end(begin: bytes) -> None:
    told = b"to continue: stoker run x " * 3000
    shown = LineCutter(b"GPU0:", ShortLines(b"GPU0:", steps=True)).feed(begin + told + b"\n")
    assert b"".join(shown.split()).count(b"stokerrunx") == 3000


def test_a_label_of_any_number_of_digits_is_no_rank() -> None:
    lines = RoleLines(b"[a] ", LauncherLines(False, lambda: 0), recipe=False)
    told = b"GPU" + b"9" * 5000 + b": x"
    assert lines(told) == told
