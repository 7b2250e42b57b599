"""The thirty-fifth review: other users of the machine, hostile hosts, clients."""

from __future__ import annotations

import pytest

from stoker.control.launch.console import LineCutter
from stoker.control.launch.shortlines import OwnLines, RoleLines, ShortLines

# ---- 1. a host's line on the launcher's terminal, which shortens and folds what recipes print ----


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("begin", [b"stoker: ", b"INFO | [GPU 0] "])
def test_a_command_in_a_command_is_not_folded_without_end(begin: bytes) -> None:
    told = b"to continue: stoker run x " * 3000
    shown = LineCutter(b"GPU0:", ShortLines(b"GPU0:", steps=True)).feed(begin + told + b"\n")
    assert b"".join(shown.split()).count(b"stokerrunx") == 3000


def test_a_label_of_any_number_of_digits_is_no_rank() -> None:
    lines = RoleLines(b"[a] ", OwnLines(False, lambda: 0), recipe=False)
    told = b"GPU" + b"9" * 5000 + b": x"
    assert lines(told) == told
