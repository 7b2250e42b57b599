"""GPU locks on a machine with other users: what one of them puts in the way must not stop a run, lead it astray, or crash `stoker clean`."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import Stoker, gpu_json, wait_for
from localuser import ATTACKER, VICTIM, do_as, needs_root, start_as, wait
from stoker.control.agent import kernel
from stoker.control.agent.reservations import GpuLocks, held
from stoker.control.doctor import debris
from stoker.control.launch.live import LiveRun  # noqa: F401  all that a child of another user needs is imported here
from stoker.control.machine import lockfiles

UUID = gpu_json(0)["uuid"]
SOON = 5.0  # more than anything here may take beyond what a launch takes


@pytest.fixture(autouse=True)
def _as_root() -> None:
    needs_root()


@pytest.fixture
def locks(public: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the lock folder would be: in a folder that anybody may write to."""
    monkeypatch.setenv("STOKER_GPU_LOCKS", str(public / "locks"))
    return public / "locks"


@pytest.fixture
def victims(public: Path) -> Path:
    """A folder of ours that is nobody else's business."""
    folder = public / "private"
    folder.mkdir(mode=0o700)
    (folder / "notes.txt").write_text("keep me")
    return folder


# ---- what another user may put in the place of the folder ----


def a_link(locks: Path, victims: Path) -> None:
    locks.symlink_to(victims)


def a_dangling_link(locks: Path, victims: Path) -> None:
    locks.symlink_to(victims / "none")


def a_plain_file(locks: Path, victims: Path) -> None:
    locks.write_text("no folder")


def a_pipe(locks: Path, victims: Path) -> None:
    os.mkfifo(locks)
    locks.chmod(0o666)


def a_closed_folder(locks: Path, victims: Path) -> None:
    locks.mkdir(mode=0o700)


def a_read_only_folder(locks: Path, victims: Path) -> None:
    locks.mkdir(mode=0o755)


def a_folder_that_is_not_sticky(locks: Path, victims: Path) -> None:
    locks.mkdir()
    locks.chmod(0o777)


FOLDERS = [
    a_link,
    a_dangling_link,
    a_plain_file,
    a_pipe,
    a_closed_folder,
    a_read_only_folder,
    a_folder_that_is_not_sticky,
]
Plant = Callable[[Path, Path], None]


@pytest.mark.parametrize("plant", FOLDERS)
def test_a_run_goes_on_where_the_folder_is_not_one(
    stoker: Stoker, box: Callable[..., dict[str, str]], locks: Path, victims: Path, plant: Plant
) -> None:
    do_as(ATTACKER, lambda: plant(locks, victims))
    script = stoker.script("ok.py", "print('ran')\n")
    done = stoker(
        "run",
        "--nproc-per-node",
        "1",
        "--gpus",
        "0",
        script,
        env={**box(1), "STOKER_GPU_LOCKS": str(locks)},
        timeout=60,
    )
    assert done.code == 0 and "ran" in done.out, done.err
    assert "Traceback" not in done.err
    assert f"locking in {locks}-0: GPU locks keep out only your own runs" in done.err and str(ATTACKER) in done.err
    assert stat.S_IMODE(victims.stat().st_mode) == 0o700 and [path.name for path in victims.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("plant", FOLDERS)
def test_clean_reports_a_folder_that_is_not_one(stoker: Stoker, locks: Path, victims: Path, plant: Plant) -> None:
    do_as(ATTACKER, lambda: plant(locks, victims))
    done = stoker("clean", env={"STOKER_GPU_LOCKS": str(locks)})
    assert done.code in (0, 1, 3) and "Traceback" not in done.err, done.err
    assert str(locks) in done.out
    assert sum(str(locks) in line for line in done.out.splitlines()) == 1


@pytest.mark.parametrize("plant", FOLDERS)
@pytest.mark.parametrize("uid", [0, VICTIM])
def test_the_users_own_runs_still_exclude_each_other(locks: Path, victims: Path, plant: Plant, uid: int) -> None:
    do_as(ATTACKER, lambda: plant(locks, victims))

    def body() -> None:
        first, second = GpuLocks("first"), GpuLocks("second")
        assert first.take([UUID]) == {} and len(first.notices) == 1, first.notices
        assert UUID in second.take([UUID])  # another open file: as another process would have
        assert list(held([UUID])) == [UUID]
        assert stat.S_IMODE(os.stat(f"{locks}-{uid}").st_mode) == 0o700

    do_as(uid, body)


def test_where_every_folder_is_taken_the_run_starts_without_a_lock_and_says_so(locks: Path, victims: Path) -> None:
    def plant() -> None:
        locks.write_text("")
        Path(f"{locks}-{VICTIM}").symlink_to(victims)

    do_as(ATTACKER, plant)

    def body() -> None:
        mine = GpuLocks("r")
        assert mine.take([UUID]) == {}
        assert any("another run may pick it too" in line for line in mine.notices), mine.notices
        assert held([UUID]) == {}

    do_as(VICTIM, body)


def test_the_folder_is_made_for_all_and_nothing_else_is_changed(locks: Path) -> None:
    before = os.umask(0o077)
    try:
        mine = GpuLocks("r")
        assert mine.take([UUID]) == {} and mine.notices == []
        assert os.umask(0o077) == 0o077
    finally:
        os.umask(before)
    assert stat.S_IMODE(locks.stat().st_mode) == 0o1777
    assert stat.S_IMODE((locks / UUID).stat().st_mode) == 0o666
    locks.chmod(0o700)  # an administrator's choice stays
    assert GpuLocks("q").take(["GPU-other"]) == {} and stat.S_IMODE(locks.stat().st_mode) == 0o700


def test_two_users_share_a_folder(locks: Path, public: Path) -> None:
    def hold() -> None:
        kernel.set_name(b"stoker-agent")
        mine = GpuLocks("theirs")
        assert mine.take([UUID]) == {} and mine.notices == []
        (public / "ready").touch()
        time.sleep(60)

    holder = start_as(VICTIM, hold)
    try:
        assert wait_for(lambda: True if (public / "ready").exists() else None, SOON)
        expected = f"run theirs (agent pid {holder}, user {VICTIM})"
        assert held([UUID]) == {UUID: expected}

        def other() -> None:
            assert GpuLocks("mine").take([UUID]) == {UUID: expected}

        do_as(ATTACKER, other)
    finally:
        os.kill(holder, signal.SIGKILL)
        os.waitpid(holder, 0)
    assert GpuLocks("mine").take([UUID]) == {} and json.loads((locks / UUID).read_text())["run"] == "mine"


# ---- what another user may put in the place of a lock file ----


def file_pipe(place: Path, victims: Path) -> None:
    os.mkfifo(place)
    place.chmod(0o666)


def file_folder(place: Path, victims: Path) -> None:
    place.mkdir()


def file_link(place: Path, victims: Path) -> None:
    place.symlink_to(victims / "notes.txt")


def file_of_mode_600(place: Path, victims: Path) -> None:
    place.touch(mode=0o600)


FILES = [file_pipe, file_folder, file_link, file_of_mode_600]


@pytest.fixture
def folder(locks: Path) -> Path:
    locks.mkdir()
    locks.chmod(0o1777)
    return locks


@pytest.mark.parametrize("plant", FILES)
@pytest.mark.parametrize("uid", [0, VICTIM])
def test_what_is_no_lock_file_is_reported_and_goes_unused(folder: Path, victims: Path, plant: Plant, uid: int) -> None:
    do_as(ATTACKER, lambda: plant(folder / UUID, victims))

    def body() -> None:
        mine = GpuLocks("r")
        assert mine.take([UUID, "GPU-fine"]) == {}
        if plant is not file_of_mode_600 or uid:  # root may open that one
            assert (
                len(mine.notices) == 1
                and f"locking it in {folder}-{uid}" in mine.notices[0]
                and str(ATTACKER) in mine.notices[0]
            ), mine.notices
            assert UUID in GpuLocks("again").take([UUID])
        assert (folder / "GPU-fine").is_file()

    do_as(uid, body)
    assert (victims / "notes.txt").read_text() == "keep me"


def test_a_file_with_a_second_name_is_not_written_to(folder: Path, victims: Path) -> None:
    """As where fs.protected_hardlinks is 0: made by ourselves here, because this kernel may protect us."""
    os.link(victims / "notes.txt", folder / UUID)
    mine = GpuLocks("r")
    assert mine.take([UUID]) == {} and "several names" in mine.notices[0]
    assert (victims / "notes.txt").read_text() == "keep me"


NASTY = {
    "deep": b"[" * 100_000,
    "deep object": b'{"run":' * 5_000,
    "binary": bytes(range(256)) * 8,
    "empty": b"",
    "a number": b"7",
    "a list": b"[1, 2]",
    "null": b'{"run": null, "pid": null}',
    "a huge pid": b'{"run": "x", "pid": 99999999999999999999}',
    "a pid that is text": b'{"run": "x", "pid": "1"}',
    "true": b'{"run": "x", "pid": true}',
    "control codes": b'{"run": "\\u001b[2J\\u001b[31m", "pid": 1}',
    "pid 1": b'{"run": "x", "pid": 1}',
    "large": b'{"run": "' + b"x" * 1_000_000 + b'", "pid": 1}',
}


@pytest.fixture
def squatter(folder: Path, public: Path) -> Iterator[Callable[[bytes], int]]:
    """Another user's process that keeps the GPU's lock file locked, with these bytes in it."""
    pids: list[int] = []

    def start(content: bytes) -> int:
        def body() -> None:
            with open(folder / UUID, "wb") as file:
                file.write(content)
                file.flush()
                os.fchmod(file.fileno(), 0o666)
                fcntl.flock(file, fcntl.LOCK_EX)
                (public / "squats").touch()
                time.sleep(120)

        pids.append(start_as(ATTACKER, body))
        assert wait_for(lambda: True if (public / "squats").exists() else None, SOON)
        return pids[0]

    yield start
    for pid in pids:
        assert os.waitpid(pid, os.WNOHANG) == (0, 0), "a foreign process was ended"
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@pytest.mark.parametrize("content", NASTY.values(), ids=NASTY)
def test_whatever_a_lock_file_says_its_holder_is_named_by_the_kernel(
    squatter: Callable[[bytes], int], content: bytes
) -> None:
    pid = squatter(content)
    for found in (held([UUID]), GpuLocks("r").take([UUID])):
        assert list(found) == [UUID]
        assert (
            found[UUID].startswith(f"pid {pid} (")
            and f"user {ATTACKER}" in found[UUID]
            and "--share-gpus" in found[UUID]
        ), found
    listed, strange = debris.find_locks()
    assert [one.held for one in listed] == [True] and strange == [] and listed[0].who.isprintable()


@pytest.mark.parametrize("content", NASTY.values(), ids=NASTY)
def test_whatever_a_free_lock_file_says_it_can_be_locked(folder: Path, content: bytes) -> None:
    def plant() -> None:
        (folder / UUID).write_bytes(content)
        (folder / UUID).chmod(0o666)

    do_as(ATTACKER, plant)
    listed, _ = debris.find_locks()
    assert [one.held for one in listed] == [False] and listed[0].who.isprintable()
    assert held([UUID]) == {}

    def body() -> None:
        mine = GpuLocks("r")
        assert mine.take([UUID]) == {} and mine.notices == []

    do_as(VICTIM, body)
    assert json.loads((folder / UUID).read_text())["run"] == "r"


def test_a_squatter_is_named_and_share_gpus_is_the_way_out(
    stoker: Stoker, box: Callable[..., dict[str, str]], squatter: Callable[[bytes], int], folder: Path
) -> None:
    pid = squatter(b"[" * 50_000)
    script = stoker.script("ok.py", "print('ran')\n")
    env = {**box(1), "STOKER_GPU_LOCKS": str(folder)}
    done = stoker("run", "--nproc-per-node", "1", script, env=env, timeout=60)
    assert (
        done.code == 69
        and f"pid {pid} (" in done.err
        and f"user {ATTACKER}" in done.err
        and "--share-gpus" in done.err
        and "Traceback" not in done.err
    ), done.err
    done = stoker("run", "--nproc-per-node", "1", "--share-gpus", script, env=env, timeout=60)
    assert done.code == 0 and "ran" in done.out, done.err


def test_clean_with_everything_at_once(stoker: Stoker, folder: Path, victims: Path) -> None:
    def plant() -> None:
        for number, kind in enumerate(FILES):
            kind(folder / f"GPU-{number}", victims)
        for number, content in enumerate(NASTY.values()):
            (folder / f"GPU-nasty-{number}").write_bytes(content)
        (folder / "\x1b]0;owned\x07").touch()

    do_as(ATTACKER, plant)
    done = stoker("clean", env={"STOKER_GPU_LOCKS": str(folder)}, timeout=60)
    assert done.code in (0, 1, 3) and "Traceback" not in done.err and "\x1b" not in done.out, done.err
    assert "named pipe" in done.out and "a folder" in done.out and "a symbolic link" in done.out
    done = stoker("clean", "--json", env={"STOKER_GPU_LOCKS": str(folder)}, timeout=60)
    assert len(json.loads(done.out)["not_locks"]) >= 3
    assert (victims / "notes.txt").read_text() == "keep me" and len(list(folder.iterdir())) == len(FILES) + len(
        NASTY
    ) + 1


def test_a_folder_full_of_files_takes_no_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3000):
        (folder / f"x{number}").touch()
    monkeypatch.setattr(lockfiles, "names_in", lambda *_: pytest.fail("a launch lists the folder"))
    assert held([UUID]) == {} and GpuLocks("r").take([UUID]) == {}


@pytest.mark.parametrize("uuid", ["", ".", "..", "../../etc/x", "MIG-GPU-1/2/3", "a\0b", "x" * 5000, "\x1b[2J", "é"])
def test_any_name_of_a_gpu_stays_in_the_folder(folder: Path, uuid: str) -> None:
    mine: Any = GpuLocks("r")
    assert mine.take([uuid]) == {} and held([uuid]) in ({}, {uuid: held([uuid]).get(uuid)})
    assert all(path.parent == folder for path in folder.rglob("*")) and len(list(folder.iterdir())) <= 1


def test_wait_reports_what_does_not_end() -> None:
    with pytest.raises(AssertionError, match="did not end"):
        wait(start_as(ATTACKER, lambda: time.sleep(30)), 0.2)
