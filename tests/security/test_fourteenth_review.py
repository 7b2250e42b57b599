"""Secrets behind escapes, others' measurements, and small files that took minutes or ended in a traceback."""

from __future__ import annotations

import gzip
import os
import time
from pathlib import Path
from typing import Any

import pytest
from stoker.contract.effort import LookingAt

from stoker.contract.errors import reading
from stoker.contract.names import EX_DATAERR, EX_NOINPUT, Refusal
from stoker.training.config.amount import lines_in

# ---- what nobody foresaw ----


def test_whatever_a_strangers_file_raises_is_one_line() -> None:
    odd: Any = ["x"]
    for within in (LookingAt("model m"), reading("model m")):
        with pytest.raises(Refusal) as caught:
            with within:
                print({odd: 1})
        assert caught.value.line.startswith("model m can't be read: TypeError: unhashable type: 'list'")
        assert caught.value.code == EX_DATAERR and isinstance(caught.value.__cause__, TypeError)
    with pytest.raises(Refusal) as caught:
        with reading("model m"):
            raise ValueError("\x1b[2J" + "long " * 10_000)
    assert len(caught.value.line) < 300 and "\x1b" not in caught.value.line
    with pytest.raises(Refusal, match="model m can't be read: No such file") as caught:
        with LookingAt("model m"):
            os.stat("/nowhere/at/all")
    assert caught.value.code == EX_NOINPUT


@pytest.mark.parametrize("problem", [Refusal("as it is"), KeyboardInterrupt(), SystemExit(3), BrokenPipeError()])
def test_what_has_an_answer_passes(problem: BaseException) -> None:
    for within in (LookingAt("m"), reading("m")):
        with pytest.raises(type(problem)) as caught:
            with within:
                raise problem
        assert caught.value is problem
    with pytest.raises(KeyError):
        with reading("m", KeyError):
            raise KeyError


# ---- small files that took minutes ----


def test_a_file_of_blank_lines_is_counted_at_once(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(b"\n" * (64 << 20) + b'{"a": 1}\n \n{"b": 2}', 1))
    began = time.process_time()
    assert lines_in(str(path)) == 2
    assert time.process_time() - began < 8  # of CPU time; line by line it takes 24 s


@pytest.mark.parametrize("block", [1, 3, 1 << 20])
def test_lines_are_counted_across_blocks(tmp_path: Path, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.training.config.amount._BLOCK", block)
    for text, count in ((b"", 0), (b"a", 1), (b"a\n", 1), (b" a \n\t\r\n\nb\r\n\n c", 3), (b"\n \n", 0)):
        (tmp_path / "x.jsonl").write_bytes(text)
        assert lines_in(str(tmp_path / "x.jsonl")) == count, text


def test_a_line_without_end_is_refused_across_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.training.config.amount._BLOCK", 64)
    monkeypatch.setattr("stoker.training.config.amount.LONGEST_LINE", 100)
    (tmp_path / "x.jsonl").write_bytes(b"a" * 100 + b"\n" + b"b" * 101 + b"\n")
    with pytest.raises(Refusal, match="line 2 is longer"):
        lines_in(str(tmp_path / "x.jsonl"))
