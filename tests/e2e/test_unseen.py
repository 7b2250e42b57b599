"""Verdicts on programs that the rules were not written for: tests/unseen/ holds them with the expected answers, benchmarks of the verdict."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from conftest import GPU_HERE, at_length_but
from unseen.run import SCORES, Program, Verdict, programs, run_program, score

PROGRAMS = {program.name: program for program in programs()}
DEFAULT = {"path_rank0_gather", "inside_child_sleeps", "crash_collate_key", "healthy_constant_by_design"}


# The held-out programs are scored by tests/unseen/run.py alone, so that no rule is written to make them pass.
NOT_HELD_OUT = [name for name in PROGRAMS if not name.startswith("held_out_")]


@pytest.mark.skipif(GPU_HERE, reason="the programs ask for more ranks than this machine has GPUs")
@pytest.mark.parametrize("name", at_length_but(DEFAULT, NOT_HELD_OUT))
def test_the_verdict_names_cause_rank_and_line(name: str) -> None:
    program = PROGRAMS[name]
    if missing := program.missing():
        pytest.skip(f"{missing} is not installed")
    result = run_program(program, [sys.executable, "-m", "stoker"], keep=None, with_torchrun=False)
    assert result["score"] == "right", f"{result['reason']}\n{result['verdict']}\n{result['console']}"


def test_every_class_of_faults_has_several_programs_and_every_marked_line_exists() -> None:
    groups = [program.group for program in PROGRAMS.values() if program.kind != "healthy"]
    assert len(groups) >= 64
    assert all(groups.count(group) >= 4 for group in groups)
    for program in PROGRAMS.values():
        assert program.lines == "none" or program.marked("FAULT"), program.name
        assert all(rank is None or rank < program.ranks for rank in program.guilty), program.name


@pytest.fixture
def program(tmp_path: Path) -> Program:
    path = tmp_path / "train.txt"
    path.write_text("a\nb  # FAULT\nc  # NEAR\n")
    return replace(PROGRAMS["path_rank0_gather"], path=path, mention=("boom",), causes=("hang.*",), guilty=(1,))


@pytest.mark.parametrize(
    ("verdict", "expected"),
    [
        (Verdict("failed", "hang.lock", 1, 70, "boom at train.txt:2, in f"), "right"),
        (Verdict("failed", "hang.lock", 1, 70, "boom", ["look at train.txt:3, in g"]), "right"),
        (Verdict("failed", "hang.lock", 1, 70, "boom at train.txt:22, in f"), "half"),
        (Verdict("failed", "hang.lock", 1, 70, "at train.txt:2, in f"), "half"),
        (Verdict("failed", "hang.lock", None, 70, "boom at train.txt:2, in f"), "half"),
        (Verdict("failed", "hang.lock", 0, 70, "boom at train.txt:2, in f"), "wrong"),
        (Verdict("failed", "rank.exception", 1, 1, "boom at train.txt:2, in f"), "wrong"),
        (Verdict("failed", "unknown", None, 70, "boom"), "undecided"),
        (Verdict("completed", "completed", None, 0, "done"), "invalid"),
    ],
)
def test_a_verdict_is_scored_by_cause_rank_and_line(program: Program, verdict: Verdict, expected: str) -> None:
    assert expected in SCORES
    assert score(program, verdict, verdict.exit_code)[0] == expected
