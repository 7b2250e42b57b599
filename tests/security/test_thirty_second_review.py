"""What the thirty-second review found."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from stoker.speedrun import state
from stoker.training.checkpoint import folders
from stoker.training.data import build, ours


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


# As wandb does: settings of the working directory say where to the key is sent.
