"""Secrets behind escapes, others' measurements, and small files that took minutes or ended in a traceback."""

from __future__ import annotations

import os
from typing import Any

import pytest
from stoker.contract.effort import LookingAt

from stoker.contract.errors import reading
from stoker.contract.names import EX_DATAERR, EX_NOINPUT, Refusal

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
