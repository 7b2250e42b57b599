"""Models, checkpoints, caches and job folders that came from somebody else: no link is followed out of them, no number makes us compute for hours."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from localuser import ATTACKER, VICTIM, do_as
from stoker.contract.names import Refusal
from stoker.control.agent import receiving
from stoker.control.launch.runplace import RunPlace, abandon
from stoker.control.record.ownership import own_folder
from stoker.control.scheduler import slurm_runs
from stoker.training.data import build, ours, shards

OTHER = 65534


def needs_root() -> None:
    if os.geteuid():
        pytest.skip("giving a folder to another user takes root")


@pytest.mark.parametrize("mode", [0o777, 0o755])
def test_a_job_script_goes_to_a_folder_of_ones_own(tmp_path: Path, mode: int) -> None:
    needs_root()
    for name in ("slurm", f"slurm-{os.geteuid()}"):
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(mode)
        os.chown(tmp_path / name, OTHER, OTHER)
    assert own_folder(str(tmp_path), "slurm") == str(tmp_path / f"slurm-{os.geteuid()}-2")


def test_a_job_folder_that_others_may_write_in_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "slurm").mkdir()
    (tmp_path / "slurm").chmod(0o777)
    assert own_folder(str(tmp_path), "slurm") == str(tmp_path / f"slurm-{os.geteuid()}")
    (tmp_path / f"slurm-{os.geteuid()}").symlink_to(tmp_path)
    assert own_folder(str(tmp_path), "slurm") == str(tmp_path / f"slurm-{os.geteuid()}-2")


@pytest.mark.parametrize("kind", ["link", "hard link", "pipe"])
def test_a_caches_lock_that_is_something_else_is_not_written_through(tmp_path: Path, kind: str) -> None:
    (tmp_path / "victim").write_text("mine")
    lock = tmp_path / "key.lock"
    {
        "link": lambda: lock.symlink_to(tmp_path / "victim"),
        "hard link": lambda: lock.hardlink_to(tmp_path / "victim"),
        "pipe": lambda: os.mkfifo(lock),
    }[kind]()
    with pytest.raises(OSError), build.alone(str(tmp_path / "key"), print):
        pass
    assert (tmp_path / "victim").read_text() == "mine"


@pytest.mark.parametrize("file", ["/dev/zero", "../x.bin", "a/b.bin", "", 5, None])
def test_a_cache_that_names_files_elsewhere_is_no_cache(tmp_path: Path, file: object) -> None:
    manifest = {"schema": shards.SCHEMA, "splits": {"train": {"shards": [{"file": file, "bytes": 0, "crc32": 0}]}}}
    (tmp_path / shards.MANIFEST).write_text(json.dumps(manifest))
    assert shards.read_manifest(str(tmp_path)) is None


def test_a_shard_that_is_a_link_is_damage(tmp_path: Path) -> None:
    (tmp_path / "train-00000.bin").symlink_to("/dev/zero")
    split = {"tokens": 0, "bytes": 0, "documents": 0, "shards": [{"file": "train-00000.bin", "bytes": 0, "crc32": 0}]}
    about = {"key": "k", "kind": "stream", "context": None, "tokenizer_digest": "d", "vocab_size": 9, "end_id": 1}
    splits = {"train": split, "validation": {**split, "shards": []}}
    manifest = {"schema": shards.SCHEMA, **about, "seconds": 0.1, "splits": splits}
    (tmp_path / shards.MANIFEST).write_text(json.dumps(manifest))
    found = shards.read_manifest(str(tmp_path))
    assert found is not None and "is a symbolic link" in (shards.damage(str(tmp_path), found, verify=True) or "")


def test_what_cant_be_removed_hides_no_refusal(public: Path, capfd: pytest.CaptureFixture[str]) -> None:
    needs_root()
    (public / "closed").mkdir(0o755)
    root = public / "closed" / "runs"
    (root / "x").mkdir(parents=True)
    for folder in (root, root / "x"):
        os.chown(folder, VICTIM, VICTIM)
    place = RunPlace(str(root / "x"), "x", "x", 0, False, made=True, made_root=True)
    do_as(VICTIM, lambda: abandon(place))
    assert not (root / "x").exists()
    assert capfd.readouterr().err == f"stoker: {root} can't be removed: Permission denied\n"


def test_a_cache_that_is_a_link_to_nowhere_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cache").symlink_to(tmp_path / "absent")
    with pytest.raises(
        Refusal, match=r"cache is a link to .*absent, which does not exist: create it, or remove the link"
    ):
        ours.own_cache(str(tmp_path / "cache"), print)
    (tmp_path / "absent").mkdir()
    assert ours.own_cache(str(tmp_path / "cache"), print) == str(tmp_path / "cache")


def test_where_others_could_exchange_notes_of_jobs_runs_are_explained_without(tmp_path: Path) -> None:
    (tmp_path / "slurm").mkdir()
    (tmp_path / "slurm" / "12.json").write_text('{"submitted": 5.0}')
    assert slurm_runs.read_note(str(tmp_path), "12") == {"submitted": 5.0}
    tmp_path.chmod(0o777)
    assert slurm_runs.read_note(str(tmp_path), "12") == {} and slurm_runs.run_of(str(tmp_path), "12") is None
    with pytest.raises(Refusal, match="could replace your folders"):
        slurm_runs.log_path(str(tmp_path), "12")


# ---- where --sync and --stage copy to ----


def _copy(user: int, root: Path, cache: Path, manifest: str = "inside") -> str:
    """What that user reads when a copy to `root` is offered; empty: it is taken."""
    answer = cache / f"answer-{time.monotonic_ns()}"

    def offer() -> None:
        os.environ["XDG_CACHE_HOME"] = str(cache / f"home-{user}")
        line = ""
        try:
            receiving.Receiver().offer(str(root), manifest, [], "here")
        except receiving.Refused as refused:
            line = str(refused)
        answer.write_text(line)

    do_as(user, offer)
    return answer.read_text()


def _open_folder(path: Path) -> None:
    path.mkdir()
    path.chmod(0o777)


def _link(path: Path, target: Path) -> None:
    path.symlink_to(target)


def test_nothing_is_copied_below_a_folder_that_others_can_exchange(public: Path) -> None:
    do_as(ATTACKER, lambda: _open_folder(public / "train"))
    for manifest in ("inside", ""):  # of --sync, of --stage
        line = _copy(VICTIM, public / "train" / "job", public, manifest)
        assert "others could put another folder in the place of" in line and "belongs to uid 12345" in line, line
    assert os.listdir(public / "train") == [], "nothing is made there"
    do_as(VICTIM, (public / "train" / "mine").mkdir)
    assert "belongs to uid 12345" in _copy(VICTIM, public / "train" / "mine", public)
    assert "belongs to uid 12345" in _copy(0, public / "train" / "roots", public)

    do_as(VICTIM, lambda: _open_folder(public / "own"))
    assert _copy(VICTIM, public / "own", public) == "", "a folder of one's own may be open, as pods' volumes are"
    assert "all users can write there" in _copy(VICTIM, public / "own" / "job", public)


def test_nothing_is_copied_through_a_link_of_another_user(public: Path) -> None:
    """They lead it to the victim's own folder, and elsewhere once the code is there."""
    needs_root()
    (public / "own" / "job").mkdir(parents=True)
    do_as(ATTACKER, lambda: _link(public / "link", public / "own"))
    _link(public / "over", public / "link" / "job")
    for root in (public / "link", public / "link" / "job", public / "over"):
        assert "belongs to uid 12345" in _copy(0, root, public)
    _link(public / "way", public / "own")
    assert _copy(0, public / "way" / "job", public) == "", "a link of one's own is fine"


def test_what_a_copy_makes_is_closed_to_others_whatever_the_umask(public: Path) -> None:
    umask = os.umask(0)
    try:
        assert _copy(VICTIM, public / "a" / "b" / "job", public) == ""
    finally:
        os.umask(umask)
    assert not any((public / path).stat().st_mode & 0o022 for path in ("a", "a/b", "a/b/job"))


def test_root_copies_to_a_pods_open_volume(public: Path) -> None:
    """/workspace of a rented pod: root's, mode 777, no sticky bit."""
    needs_root()
    _open_folder(public / "workspace")
    assert _copy(0, public / "workspace" / "train", public) == ""
    assert "all users can write there" in _copy(VICTIM, public / "workspace" / "mine", public)
