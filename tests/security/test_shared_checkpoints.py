"""Checkpoints and exports in folders that several users share: others' are never resumed from, counted, replaced or removed."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed")

import torch

from conftest import Stoker
from localuser import ATTACKER, VICTIM, do_as
from stoker.contract import checkpoints
from stoker.contract.errors import Refusal
from stoker.training.checkpoint import folders
from stoker.training.checkpoint.config import CheckpointConfig
from stoker.training.checkpoint.saver import Saver
from stoker.training.loop.resume import check_before_launch, located
from stoker.training.model import hf_write
from stoker.training.model.config import ModelConfig


def test_a_checkpoint_folders_lock_that_is_a_link_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / folders.LOCK).symlink_to(tmp_path / "victim")
    with pytest.raises(Refusal):
        folders.hold(str(tmp_path / "c"), print)
    assert (tmp_path / "victim").read_text() == "mine"


def test_another_users_checkpoints_are_not_counted_removed_or_put_back(public: Path) -> None:
    """In a folder that several users share."""
    names = ("step-00000003", ".replaced-step-00000002", ".gone-x", "step-00000001.other-0.tmp")
    do_as(ATTACKER, lambda: [(public / name).mkdir() for name in names])

    def save() -> None:
        said: list[str] = []
        saver = Saver(str(public), rank=0, world=1, token="t", say=said.append, keep=2, keep_best=True)
        for step in (1, 2, 4, 5):
            saver.save(step, {}, {"step": step}, float(step), wait=True)
        saver.close()
        assert not said, said

    do_as(VICTIM, save)
    ours = {".writer", "step-00000001", "step-00000004", "step-00000005"}  # the best one, and the newest two
    assert sorted(os.listdir(public)) == sorted({*names, *ours})


def test_another_users_checkpoint_is_not_checked_before_the_launch(public: Path) -> None:
    """The ranks do not take it, so it refuses nothing."""
    made: Any = SimpleNamespace(tokenizer_digest="ours", vocab_size=9)

    def save(step: int, digest: str) -> None:
        saver = Saver(str(public), rank=0, world=1, token="t", say=print, keep=2, keep_best=True)
        saver.save(step, {}, {"step": step, "tokenizer_digest": digest}, 1.0, wait=True)
        saver.close()

    def begins() -> int | None:
        return check_before_launch(CheckpointConfig(folder=str(public)), ModelConfig(), "adamw", made)

    do_as(ATTACKER, lambda: save(9, "theirs"))
    (public / folders.LOCK).unlink()

    def launch() -> None:
        assert begins() is None
        save(3, "ours")
        assert begins() == 3

    do_as(VICTIM, launch)


def saver(folder: Path, said: list[str], **more: Any) -> Saver:
    return Saver(str(folder), rank=0, world=1, token=os.urandom(4).hex(), say=said.append, keep=1, **more)


def test_what_is_no_checkpoint_of_ours_stays(tmp_path: Path) -> None:
    """A folder of another program may have a checkpoint's name, or that of one that is being deleted."""
    for name in ("step-00000001", "step-00000002", ".gone-holiday"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "thesis.tex").write_text("a year of work")
    said: list[str] = []
    one = saver(tmp_path, said, keep_best=False)
    for step in (2, 3, 4, 5):
        one.save(step, {"w": torch.ones(3)}, {}, None, wait=True)
    one.close()
    assert all(
        (tmp_path / name / "thesis.tex").exists() for name in ("step-00000001", "step-00000002", ".gone-holiday")
    )
    assert "step-00000002 already exists and is not a checkpoint" in "\n".join(said)
    assert sorted(folders.steps_in(str(tmp_path))) == [1, 2, 5], "and ours are kept and removed as asked"


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to be two users")
def test_a_checkpoint_of_another_user_is_not_replaced(tmp_path: Path) -> None:
    said: list[str] = []
    one = saver(tmp_path, said)
    one.save(2, {"w": torch.ones(3)}, {}, None, wait=True)
    one.close()
    theirs = tmp_path / "step-00000002"
    os.chown(theirs, 65534, 65534)
    before = (theirs / "manifest.json").read_bytes()
    two = saver(tmp_path, said)
    two.save(2, {"w": torch.zeros(3)}, {}, None, wait=True)
    two.close()
    assert theirs.stat().st_uid == 65534 and (theirs / "manifest.json").read_bytes() == before
    assert "step-00000002 already exists and is another user's" in "\n".join(said)


def test_a_run_that_continues_no_other_leaves_its_checkpoints_alone(tmp_path: Path) -> None:
    said: list[str] = []
    for run, steps in (("a", (10, 20)), ("b", (30, 40))):
        one = saver(tmp_path, said, only=run, keep_best=False)
        for step in steps:
            one.save(step, {"w": torch.ones(3)}, {"run": run}, None, wait=True)
        one.close()
    assert sorted(folders.steps_in(str(tmp_path))) == [20, 40]


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to be two users")
def test_a_checkpoint_of_another_user_is_not_resumed_from_by_name(tmp_path: Path) -> None:
    said: list[str] = []
    one = saver(tmp_path, said)
    one.save(9, {"w": torch.ones(3)}, {}, None, wait=True)
    one.close()
    theirs = tmp_path / "step-00000009"
    os.chown(theirs, 65534, 65534)
    with pytest.raises(Refusal, match="belongs to nobody, who may change it"):
        located(str(theirs))
    with pytest.raises(Refusal, match="there is no checkpoint"):
        located(str(tmp_path))


def test_what_a_stranger_left_in_a_shared_folder_ends_no_export(tmp_path: Path) -> None:
    if os.geteuid():
        pytest.skip("becoming a second user takes root")
    tmp_path.chmod(0o1777)
    for above in tmp_path.parents:
        if above != Path("/"):
            above.chmod(above.stat().st_mode | 0o011)
    theirs = tmp_path / f".model.{socket.gethostname()}-999999.tmp"
    mine = tmp_path / f".model.{socket.gethostname()}-999998.tmp"
    for folder, uid in ((theirs, 12345), (mine, 65534)):
        folder.mkdir()
        os.chown(folder, uid, uid)
    child = os.fork()
    if not child:
        try:
            os.setuid(65534)
            hf_write.sweep(str(tmp_path), "model")
            os._exit(0)
        except BaseException:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert theirs.exists() and not mine.exists()


OTHER = 65534


def needs_root() -> None:
    if os.geteuid():
        pytest.skip("becoming a second user takes root")


def test_a_checkpoint_of_another_user_is_not_resumed_from(stoker: Stoker) -> None:
    needs_root()
    stoker.script(
        "a.py",
        "import os, stoker\n"
        "folder = os.path.join(os.environ['STOKER_RUN_DIR'], 'checkpoints')\n"
        "os.mkdir(folder)\n"
        "for step in (1, 2): open(f'{folder}/step-{step}.pt', 'w').close()\n"
        f"os.chown(f'{{folder}}/step-2.pt', {OTHER}, {OTHER})\n"
        "print('resumed', os.path.basename(stoker.resume()))\n"
        f"os.chown(folder, {OTHER}, {OTHER})\n"
        "print('resumed', stoker.resume())\n",
    )
    done = stoker("run", "--nproc-per-node", "1", "a.py")
    assert done.code == 0 and "resumed step-1.pt" in done.out and "resumed None" in done.out, done.out + done.err
    assert "step-2.pt belongs to" in done.err + done.out
    folder = stoker.latest / "checkpoints"
    assert checkpoints.find_newest_checkpoint(str(stoker.latest)) is None
    os.chown(folder, 0, 0)
    saved = checkpoints.find_newest_checkpoint(str(stoker.latest))
    assert saved is not None and saved.path.endswith("step-1.pt")


def test_checkpoints_go_into_a_folder_that_others_may_write_to(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    said: list[str] = []
    one = saver(tmp_path, said)
    assert one.save(1, {"w": torch.ones(3)}, {}, None, wait=True)
    one.close()
    assert located(str(tmp_path)) == str(tmp_path / "step-00000001") and not said
