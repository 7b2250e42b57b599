"""Console lines: whole, prefixed, whatever the pieces they come in."""

from __future__ import annotations

import random

import pytest

from stoker.control.launch.console import LineCutter, LogLines


def cut(data: bytes, sizes: random.Random | None = None) -> bytes:
    cutter, shown, at = LineCutter(b"G0:"), b"", 0
    while at < len(data):
        step = sizes.randint(1, 7) if sizes else len(data)
        shown += cutter.feed(data[at : at + step])
        at += step
    return shown + cutter.flush()


@pytest.mark.parametrize(
    ("printed", "shown"),
    [
        (b"", b""),
        (b"a\nb\n", b"G0:a\nG0:b\n"),
        (b"no newline", b"G0:no newline\n"),
        (b"\n\n", b"G0:\nG0:\n"),
        (b"dos\r\nline\r\n", b"G0:dos\r\nG0:line\r\n"),
        (b"\r 10%\r 20%\rdone\n", b"\rG0: 10%\rG0: 20%\rG0:done\n"),
        (b"bad \xff\xfe bytes\0\n", b"G0:bad \xff\xfe bytes\0\n"),
        (b"bar 50%\r", b"G0:bar 50%\r"),
    ],
)
def test_lines(printed: bytes, shown: bytes) -> None:
    assert cut(printed) == shown
    for seed in range(40):
        assert cut(printed, random.Random(seed)) == shown, f"cut with seed {seed}"


@pytest.mark.parametrize(
    ("printed", "kept"),
    [
        (b"a\nb\n", b"a\nb\n"),
        (b"no newline", b"no newline"),
        (b"dos\r\nline\r\n", b"dos\r\nline\r\n"),
        (b"\r 10%\r 20%\rdone\n", b"done\n"),
        (b"\r 10%|#\r 20%|##\r      \r{'loss': 2}\n\r 20%|##\r 30%|###", b"{'loss': 2}\n 30%|###"),
        (b"bar 50%\r", b"bar 50%"),
        (b"\x1b[1;31mred\x1b[0m \x1b]0;title\x07text\n", b"red text\n"),
        (b"bad \xff\xfe bytes\0\n", b"bad \xff\xfe bytes\0\n"),
    ],
)
def test_a_log_has_no_bars_and_no_codes(printed: bytes, kept: bytes) -> None:
    for seed in (None, *range(40)):
        lines, written, at, sizes = LogLines(), b"", 0, random.Random(seed)
        while at < len(printed):
            step = sizes.randint(1, 7) if seed is not None else len(printed)
            written += lines.feed(printed[at : at + step])
            at += step
        assert written + lines.flush() == kept, f"cut with seed {seed}"


def test_what_is_in_the_log_already_can_not_be_overwritten() -> None:
    lines = LogLines()
    assert lines.feed(b"Loading: 5%") + lines.partial() == b"Loading: 5%"
    assert lines.feed(b"\rLoading: 10%") + lines.partial() == b""
    assert lines.feed(b"\rdone\nnext\n") == b"\ndone\nnext\n"


def test_a_prompt_is_shown_at_once_and_its_line_goes_on_without_a_second_prefix() -> None:
    cutter = LineCutter(b"G0:")
    assert cutter.feed(b"hello\n(Pdb) ") + cutter.partial() == b"G0:hello\nG0:(Pdb) "
    assert cutter.feed(b"answer\nnext\n") == b"answer\nG0:next\n"


def test_a_long_line_costs_no_more_than_its_length() -> None:
    cutter = LineCutter(b"G0:")
    for _ in range(2000):
        assert cutter.feed(b"x" * 5000) == b""
    assert len(cutter.feed(b"\n")) == 2000 * 5000 + 4
