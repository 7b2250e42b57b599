"""What the thirty-third review found in the control plane."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stoker.contract.names import Refusal
from stoker.speedrun import state
from stoker.speedrun.child import Children

# ---- a speedrun folder that came with a checkout ----


def test_a_stages_log_is_not_written_through_a_link(tmp_path: Path) -> None:
    """`runs/speedrun-cpu/logs/tokenizer-5ff96c38.log` of a checkout led to ~/.bashrc: the stage's output was appended there."""
    theirs, log = tmp_path / "bashrc", tmp_path / "tokenizer-5ff96c38.log"
    theirs.write_text("alias ll='ls -l'\n")
    log.symlink_to(theirs)
    with pytest.raises(Refusal, match="symbolic link"):
        Children().run(["echo", "hello"], os.environ, str(log), lambda: None)
    assert theirs.read_text() == "alias ll='ls -l'\n"


def test_a_stages_log_that_is_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    log = tmp_path / "stage.log"
    os.mkfifo(log)
    with pytest.raises(Refusal, match="can't be written"):
        Children().run(["echo", "hello"], os.environ, str(log), lambda: None)


def test_a_stages_log_grows(tmp_path: Path) -> None:
    log = tmp_path / "stage.log"
    for _ in range(2):
        assert Children().run(["echo", "hello"], os.environ, str(log), lambda: None) == 0
    assert log.read_text() == "hello\nhello\n"


def test_the_progress_of_a_stage_is_not_read_from_elsewhere(tmp_path: Path) -> None:
    elsewhere, run = tmp_path / "elsewhere.jsonl", tmp_path / "run"
    run.mkdir()
    elsewhere.write_text('{"step": 3, "loss": 1.0}\n')
    (run / "metrics.jsonl").symlink_to(elsewhere)
    assert state.progress(str(run), 10) == ""
    (run / "metrics.jsonl").unlink()
    elsewhere.rename(run / "metrics.jsonl")
    assert state.progress(str(run), 10) == "step 4 of 10, loss 1.000"
