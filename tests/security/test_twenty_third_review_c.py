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

import torch

from stoker.contract.names import Refusal
from stoker.training.checkpoint.reading import open_checkpoint
from stoker.training.checkpoint.saver import Saver
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
    try:
        if os.read(begun[0], 1):  # else it was refused at once
            do_as(ATTACKER, meanwhile)
    finally:
        os.write(goes_on[1], b".")
        ended = wait(victim)
        for end in (begun[0], *goes_on):
            os.close(end)
    assert ended == 0


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


def save_twice(folder: Path, between: Callable[[], object]) -> list[str]:
    """Checkpoints of steps 1 and 2, by the victim. `between`: what the attacker does. What the run printed."""
    saved, goes_on = os.pipe(), os.pipe()
    said = folder.parent.parent / "said"

    def run() -> None:
        with open(said, "a") as lines:
            saver = Saver(str(folder), rank=0, world=1, token="new", say=lambda line: print(line, file=lines))
            saver.save(1, {"weights": torch.zeros(4)}, {}, wait=True)
            os.write(saved[1], b".")
            os.read(goes_on[0], 1)
            saver.save(2, {"weights": torch.zeros(4)}, {}, wait=True)
            saver.close()

    victim = start_as(VICTIM, run)
    os.close(saved[1])
    try:
        assert os.read(saved[0], 1)
        do_as(ATTACKER, between)
    finally:
        os.write(goes_on[1], b".")
        ended = wait(victim, 60)
        for end in (saved[0], *goes_on):
            os.close(end)
    assert ended == 0
    return said.read_text().splitlines()


@pytest.fixture
def earlier(public: Path) -> Path:
    """The victim's checkpoints of another run, in a place where nobody else may write."""
    folder = public / "private" / "checkpoints"

    def make() -> None:
        folder.parent.mkdir()
        saver = Saver(str(folder), rank=0, world=1, token="old", say=print)
        saver.save(2, {"weights": torch.ones(4)}, {}, wait=True)
        saver.close()

    needs_root()
    do_as(VICTIM, make)
    return folder


@pytest.mark.parametrize("how", ["link", "folder"])
def test_a_checkpoint_folder_that_others_exchanged_is_not_written_to(team: Path, earlier: Path, how: str) -> None:
    """Who may rename it, in the folder above, led checkpoints over those of another run."""
    folder, moved = team / "checkpoints", team / "moved"

    def exchange() -> None:
        folder.rename(moved)
        if how == "link":
            folder.symlink_to(earlier)
        else:
            folder.mkdir(mode=0o777)
            folder.chmod(0o777)

    said = save_twice(folder, exchange)
    assert open_checkpoint(str(earlier / "step-00000002")).manifest.token == "old"
    assert not list(folder.glob("step-*new*")) and not (how == "folder" and list(folder.iterdir()))
    assert any("step 2 was not written" in line for line in said)


def test_another_folder_of_checkpoints_that_others_put_there_is_not_written_to(team: Path) -> None:
    needs_root()
    folder, other = team / "checkpoints", team / "other"

    def make() -> None:
        saver = Saver(str(other), rank=0, world=1, token="old", say=print)
        saver.save(2, {"weights": torch.ones(4)}, {}, wait=True)
        saver.close()

    do_as(VICTIM, make)
    said = save_twice(folder, lambda: (folder.rename(team / "moved"), other.rename(folder)))
    assert open_checkpoint(str(folder / "step-00000002")).manifest.token == "old"
    assert any("step 2 was not written" in line for line in said)


def test_a_save_that_is_given_up_removes_no_folder_that_others_put_there(team: Path) -> None:
    """Under the name that the save would have had."""
    needs_root()
    folder, mine = team / "checkpoints", thesis(team)
    do_as(VICTIM, lambda: mine.chmod(0o777))  # as the team's folder is; else nobody could move it into another one

    def exchange() -> None:
        folder.rename(team / "moved")
        folder.mkdir()
        folder.chmod(0o777)
        mine.rename(folder / "step-00000002.new-2.tmp")

    save_twice(folder, exchange)
    assert (folder / "step-00000002.new-2.tmp" / "chapter").read_text() == "all of it"
