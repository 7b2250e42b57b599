"""The thirty-third review, of the training plane: run directories and speedruns that came with a folder."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path

import pytest

from stoker.contract.names import Refusal
from stoker.control.record.rollouts import LARGEST, Rollouts
from stoker.training.rl.kept import FOLDER, Kept
from stoker.training.rl.sampler import Written


def sparse(path: Path, size: int) -> None:
    path.touch()
    os.truncate(path, size)


# ---- a run of GRPO that is continued ----


def test_answers_of_a_continued_run_take_no_memory_for_holes(tmp_path: Path) -> None:
    """A file of 3 GB of holes took 6.5 GB in each rank: all of it was read at once."""
    kept = Kept(str(tmp_path), 0, "s")
    kept.keep(1, [1, 2], 7, 0, [Written((3,), (-0.5,), (0,))])
    sparse(tmp_path / FOLDER / "step-00000002-rank-0.jsonl", 1 << 40)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    again = Kept(str(tmp_path), 0, "s")
    assert again.count == 1 and again.find([1, 2], 7, 0, 1) == [Written((3,), (-0.5,), (0,))]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < (256 << 20) >> 10


def test_answers_of_a_continued_run_are_not_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / FOLDER).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Refusal, match="is a link"):
        Kept(str(tmp_path), 0, "s")


def test_rollouts_of_a_continued_run_that_no_run_writes_are_not_read(tmp_path: Path) -> None:
    """All lines of a file of any size were held at once."""
    lines = b'{"step": 0}\n'
    (tmp_path / "rollouts.jsonl").write_bytes(lines)
    sparse(tmp_path / "rollouts.jsonl", LARGEST + 1)
    with pytest.raises(ValueError, match="no run writes such a file"):
        Rollouts(str(tmp_path), 1, 1 << 20)
    (tmp_path / "rollouts.jsonl").write_bytes(lines)
    Rollouts(str(tmp_path), 1, 1 << 20).close()
    assert json.loads((tmp_path / "rollouts.jsonl").read_text()) == {"step": 0}
