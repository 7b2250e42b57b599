"""GPU locks of one user: two launches never have the same GPU."""

from __future__ import annotations

import contextlib
import os
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest

from stoker.control.machine.gpu_lock import GpuLocks, find_held_gpus


@pytest.fixture
def locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the lock folder will be."""
    monkeypatch.setenv("STOKER_GPU_LOCKS", str(tmp_path / "locks"))
    return tmp_path / "locks"


def test_a_run_gets_all_of_its_gpus_or_none(locks: Path) -> None:
    first, second = GpuLocks("first"), GpuLocks("second")
    assert first.take(["GPU-1", "GPU-2"]) == {} and first.take(["GPU-1"]) == {}
    refused = second.take(["GPU-0", "GPU-2"])
    assert refused == {"GPU-2": f"run first (agent pid {os.getpid()})"}
    assert list(find_held_gpus(["GPU-0", "GPU-1", "GPU-2"])) == ["GPU-1", "GPU-2"]
    first.release()
    assert find_held_gpus(["GPU-1", "GPU-2"]) == {} and second.take(["GPU-0", "GPU-2"]) == {}


def test_a_lock_ends_with_the_process_that_holds_it_or_its_heir(locks: Path) -> None:
    mine = GpuLocks("r")
    assert mine.take(["GPU-1"]) == {}
    with subprocess.Popen(["sleep", "600"], pass_fds=mine.fds) as heir:
        mine.release()
        assert list(find_held_gpus(["GPU-1"])) == ["GPU-1"]
        heir.kill()
    assert find_held_gpus(["GPU-1"]) == {}


def test_the_folder_is_made_for_all_users_and_nothing_else_is_changed(locks: Path) -> None:
    before = os.umask(0o077)
    try:
        mine = GpuLocks("r")
        assert mine.take(["GPU-1"]) == {} and mine.notices == []
        assert os.umask(0o077) == 0o077
    finally:
        os.umask(before)
    assert stat.S_IMODE(locks.stat().st_mode) == 0o1777
    assert stat.S_IMODE((locks / "GPU-1").stat().st_mode) == 0o666
    locks.chmod(0o700)  # an administrator's choice stays
    assert GpuLocks("q").take(["GPU-2"]) == {} and stat.S_IMODE(locks.stat().st_mode) == 0o700


def test_a_file_with_a_second_name_is_not_written_to(locks: Path, tmp_path: Path) -> None:
    """As where fs.protected_hardlinks is 0."""
    locks.mkdir()
    locks.chmod(0o1777)
    (tmp_path / "notes.txt").write_text("keep me")
    os.link(tmp_path / "notes.txt", locks / "GPU-1")
    mine = GpuLocks("r")
    assert mine.take(["GPU-1"]) == {} and "several names" in mine.notices[0]
    assert (tmp_path / "notes.txt").read_text() == "keep me"


@pytest.mark.parametrize("uuid", ["", ".", "..", "../../etc/x", "MIG-GPU-1/2/3", "a\0b", "x" * 5000, "\x1b[2J", "é"])
def test_any_name_of_a_gpu_stays_in_the_folder(locks: Path, uuid: str) -> None:
    mine: Any = GpuLocks("r")
    assert mine.take([uuid]) == {} and len(find_held_gpus([uuid])) == len(mine.fds)
    assert all(path.parent == locks for path in locks.rglob("*")) and len(list(locks.iterdir())) <= 1


def test_a_full_disk_does_not_keep_a_gpu_from_being_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user can fill /tmp; the lock itself needs no room."""
    if os.getuid() != 0:
        pytest.skip("a file system of its own takes root")
    mount = ["mount", "-t", "tmpfs", "-o", "size=4k,mode=1777", "none", str(tmp_path)]
    if subprocess.run(mount, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        (tmp_path / "locks").mkdir()
        (tmp_path / "locks").chmod(0o1777)
        (tmp_path / "locks" / "GPU-1").touch(0o666)
        with (tmp_path / "full").open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(b"x" * 4096):
                pass
        monkeypatch.setenv("STOKER_GPU_LOCKS", str(tmp_path / "locks"))
        locks, second = GpuLocks("run"), GpuLocks("second")
        assert locks.take(["GPU-1"]) == {}
        assert list(second.take(["GPU-1"])) == ["GPU-1"]
        locks.release()
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)
