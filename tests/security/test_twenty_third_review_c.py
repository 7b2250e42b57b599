"""What the twenty-third review found: exports into a folder where other users may rename what is ours."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from localuser import ATTACKER, VICTIM, do_as, needs_root, start_as, wait

pytest.importorskip("torch")

from stoker.contract.names import Refusal
from stoker.training.model.hf_write import fresh_folder


@pytest.fixture
def team(public: Path) -> Path:
    """A folder as teams share them: everybody may write, and so rename what others made in it."""
    folder = public / "models"
    folder.mkdir()
    folder.chmod(0o777)
    return folder


def thesis(folder: Path) -> Path:
    """A folder of the victim's, with work in it."""
    made = folder / "thesis"
    do_as(VICTIM, lambda: (made.mkdir(0o755), (made / "chapter").write_text("all of it")))
    return made


def export(out: Path, meanwhile: Callable[[], object] = str, fails: bool = False) -> None:
    """By the victim. `meanwhile`: what the attacker does while it is being written; `fails`: then the disk is full."""
    begun, goes_on = os.pipe(), os.pipe()

    def write() -> None:
        with fresh_folder(str(out)) as fresh:
            os.write(begun[1], b".")
            os.read(goes_on[0], 1)
            for name in ("model.safetensors", "config.json"):
                with open(os.path.join(fresh, name), "w") as file:
                    file.write("weights")
            if fails:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def refused() -> None:
        try:
            write()
        except (Refusal, OSError):
            return

    victim = start_as(VICTIM, refused)
    os.close(begun[1])
    if os.read(begun[0], 1):  # else it was refused at once
        do_as(ATTACKER, meanwhile)
    os.write(goes_on[1], b".")
    assert wait(victim) == 0
    for end in (begun[0], *goes_on):
        os.close(end)


def test_nobody_leads_an_export_to_another_file(team: Path, public: Path) -> None:
    """With another folder in the place of the unfinished one, weights were written over any file of the victim's."""
    needs_root()
    diary = public / "diary"
    do_as(VICTIM, lambda: diary.write_text("private"))

    def exchange() -> None:
        unfinished = next(path for path in team.iterdir() if path.name.endswith(".tmp"))
        unfinished.rename(team / "moved")
        unfinished.mkdir()
        unfinished.chmod(0o777)
        (unfinished / "model.safetensors").symlink_to(diary)

    export(team / "out", exchange)
    assert diary.read_text() == "private"
    assert not (team / "out").exists()  # what stands in its place is not published as the model


@pytest.mark.parametrize("name", [f".out.{socket.gethostname()}-999999999.tmp", ".replaced-out"])
def test_an_export_removes_no_folder_that_others_renamed(team: Path, name: str) -> None:
    """Of those that look like what a killed export left."""
    needs_root()
    mine = thesis(team)
    do_as(ATTACKER, lambda: mine.rename(team / name))
    if name.startswith(".replaced"):
        do_as(VICTIM, (team / "out").mkdir)
    export(team / "out")
    assert [path.read_text() for path in team.rglob("chapter")] == ["all of it"]


def test_an_export_replaces_no_folder_that_others_put_there(team: Path) -> None:
    needs_root()
    mine = thesis(team)
    export(team / "out", lambda: mine.rename(team / "out"))
    assert (team / "out" / "chapter").read_text() == "all of it"


def test_a_failed_export_removes_no_folder_that_others_put_there(team: Path) -> None:
    needs_root()
    mine = thesis(team)

    def exchange() -> None:
        unfinished = next(path for path in team.iterdir() if path.name.endswith(".tmp"))
        unfinished.rename(team / "moved")
        mine.rename(unfinished)

    export(team / "out", exchange, fails=True)
    assert [path.read_text() for path in team.rglob("chapter")] == ["all of it"]


def test_an_export_goes_to_a_shared_folder_and_names_that_are_taken_keep_nobody_from_it(team: Path) -> None:
    needs_root()

    def take() -> None:
        for pid in range(os.getpid(), os.getpid() + 300):
            (team / f".out.{socket.gethostname()}-{pid}.tmp").mkdir()

    do_as(ATTACKER, take)
    export(team / "out")
    assert sorted(path.name for path in (team / "out").iterdir()) == ["config.json", "model.safetensors"]
    assert (team / "out").stat().st_uid == VICTIM
