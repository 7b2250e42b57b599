"""What a second security review found: each test shows one way in, and that it is closed."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from stoker.control.cluster import listing

OTHER = 65534


def needs_root() -> None:
    if os.geteuid():
        pytest.skip("becoming a second user takes root")


# ---- git ----


def _checkout(folder: Path, planted: Path | None = None) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "code.py").write_text("")
    git = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"]):
        subprocess.run([*git, *words], check=True)
    if planted is not None:
        program = folder / "planted.sh"
        program.write_text(f"#!/bin/sh\ntouch '{planted}'\n")
        program.chmod(0o755)
        subprocess.run([*git, "config", "core.fsmonitor", str(program)], check=True)


@pytest.mark.parametrize("where", ["nested", "submodule", "outer"])
def test_a_copied_folder_runs_no_program_that_a_checkouts_config_names(tmp_path: Path, where: str) -> None:
    outer, planted = tmp_path / "outer", tmp_path / "planted"
    _checkout(outer, planted if where == "outer" else None)
    if where != "outer":
        _checkout(outer / "inner", planted)
    if where == "submodule":
        subprocess.run(["git", "-C", str(outer), "-c", "advice.addEmbeddedRepo=false", "add", "inner"], check=True)
    planted.unlink(missing_ok=True)  # git itself ran it just now
    paths = {entry.path for entry in listing.working_directory(str(outer)).entries}
    assert "code.py" in paths and (where == "outer" or "inner/code.py" in paths)
    assert not planted.exists()


def test_a_strangers_checkout_inside_ours_is_copied_without_asking_git(tmp_path: Path) -> None:
    """Git refuses a checkout of another user; ours is copied all the same."""
    needs_root()
    outer = tmp_path / "outer"
    _checkout(outer)
    _checkout(outer / "inner", tmp_path / "planted")
    for folder, folders, names in os.walk(outer / "inner"):
        for name in [".", *folders, *names]:
            os.chown(os.path.join(folder, name), OTHER, OTHER, follow_symlinks=False)
    assert "inner/code.py" in {entry.path for entry in listing.working_directory(str(outer)).entries}
    assert not (tmp_path / "planted").exists()
