"""The thirty-third review, of the training plane: runs and speedruns that came with a folder, and clients of a server."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from stoker.control.record.rollouts import LARGEST, Rollouts


def sparse(path: Path, size: int) -> None:
    path.touch()
    os.truncate(path, size)


# ---- a run of GRPO that is continued ----


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
