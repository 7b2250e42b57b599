"""Attacks that a review found: each of them once worked."""

from __future__ import annotations

import time

import pytest

from stoker.control.watch.numbers import Losses

SOON = 5.0

# ---- texts that take long to search ----


@pytest.mark.parametrize("line", [b"loss" + b" " * 60_000 + b"x", b"loss " + b"1" * 60_000 + b"x", b"loss=1." + b"1" * 60_000 + b"x"], ids=["spaces", "digits", "decimals"])
def test_a_printed_line_does_not_hold_the_launcher_up(line: bytes) -> None:
    began = time.monotonic()
    assert Losses().read(0, line + b"\n") == []
    assert time.monotonic() - began < SOON


def test_a_step_of_five_thousand_digits_is_a_step_like_any_other() -> None:
    (bad,) = Losses().read(0, b"step " + b"9" * 5000 + b" loss nan\n")
    assert bad.kind == "loss"
