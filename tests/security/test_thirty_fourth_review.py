"""The thirty-fourth review: other users of the machine, and clients of a server."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from localuser import ATTACKER, do_as
from stoker.control.record import finder


def made(root: Path, name: str) -> Path:
    (root / name / "hf").mkdir(parents=True)
    (root / name / "run.json").write_text(json.dumps({"schema": 1, "id": name, "name": name, "started": 1.0}))
    (root / name / "hf" / "config.json").write_text("{}")
    (root / name / "rollouts.jsonl").write_text("")
    (root / name / "nan_step_1").mkdir()
    return root / name


def nan_folder(path: str, root: str) -> str:
    from stoker.cli.nan import _folder

    return os.path.dirname(_folder(path, root))


def rollouts_folder(path: str, root: str) -> str:
    from stoker.cli.rollouts import _folder

    return _folder(path, root)


def model_folder(path: str, root: str) -> str:
    from stoker.training.generate.finding import find

    return os.path.dirname(find(path, None, root, lambda _: None).folder)


def setting(path: str, root: str) -> str:
    from stoker.training.config.resolve import _pinned

    return os.path.dirname(_pinned(f"{path}/hf"))


OPENED: dict[str, Callable[[str, str], str]] = {
    "stoker why": lambda path, root: finder.find(path, root).dir,
    "stoker chat": model_folder,
    "--model.load": setting,
    "stoker nan": nan_folder,
    "stoker rollouts": rollouts_folder,
}


@pytest.mark.parametrize("kind", ["folder", "link", "link to what was ours", "our link to what they made again"])
@pytest.mark.parametrize("command", OPENED)
def test_latest_of_another_user_is_our_newest_run_for_every_command(public: Path, command: str, kind: str) -> None:
    """A folder `latest` of theirs was taken for ours, and its model was exported, served and trained on."""
    made(public, "ours")

    def theirs() -> None:
        made(public, "latest" if kind == "folder" else "theirs")
        if kind == "link":
            (public / "latest").symlink_to("theirs")
        elif kind == "link to what was ours":
            (public / "latest").symlink_to("ours-of-long-ago")

    if kind == "link to what was ours":
        made(public, "ours-of-long-ago")
        about = {"schema": 1, "id": "ours-of-long-ago", "name": "ours-of-long-ago", "started": 0.5}
        (public / "ours-of-long-ago" / "run.json").write_text(json.dumps(about))
    if kind == "our link to what they made again":
        (public / "latest").symlink_to("theirs")
    do_as(ATTACKER, theirs)
    found = OPENED[command](f"{public}/latest", str(public))
    assert os.path.samefile(found, public / "ours"), found


def test_a_folder_called_latest_where_we_have_no_runs_is_what_was_named(public: Path) -> None:
    """A colleague's models/latest, say."""
    do_as(ATTACKER, lambda: made(public, "latest"))
    path = f"{public}/latest"
    assert model_folder(path, str(public)) == path == setting(path, str(public))
