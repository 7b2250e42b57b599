"""Whatever a parser raises becomes one line that names the file."""

from __future__ import annotations

import os
from typing import Any

import pytest

from stoker.contract.errors import EX_DATAERR, Refusal, parsing


def test_whatever_a_parser_raises_is_one_line() -> None:
    unhashable: Any = ["x"]
    with pytest.raises(Refusal) as caught:
        with parsing("model m"):
            print({unhashable: 1})
    assert caught.value.line.startswith("model m can't be read: TypeError: unhashable type: 'list'")
    assert caught.value.code == EX_DATAERR and isinstance(caught.value.__cause__, TypeError)
    with pytest.raises(Refusal) as caught:
        with parsing("model m"):
            raise ValueError("\x1b[2J" + "long " * 10_000)
    assert len(caught.value.line) < 300 and "\x1b" not in caught.value.line


@pytest.mark.parametrize(
    "problem", [Refusal("as it is"), KeyboardInterrupt(), SystemExit(3), BrokenPipeError(), MemoryError()]
)
def test_what_the_caller_answers_passes(problem: BaseException) -> None:
    with pytest.raises(type(problem)) as caught:
        with parsing("model m"):
            raise problem
    assert caught.value is problem


def test_the_systems_errors_and_named_exceptions_pass() -> None:
    with pytest.raises(FileNotFoundError), parsing("model m"):
        os.stat("/nowhere/at/all")
    with pytest.raises(KeyError), parsing("model m", KeyError):
        raise KeyError
