"""Weights in shared memory: for their user alone, gone with the process that made them, and on the disk where they don't fit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from localuser import VICTIM, start_as, wait
from stoker.contract import shared_weights
from stoker.control.doctor import cleanup, stale_files


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """In the place of /dev/shm, which the other tests use at the same time. Other users can reach it."""
    with tempfile.TemporaryDirectory(prefix="shm-", dir="/tmp") as made:
        os.chmod(made, 0o1777)
        monkeypatch.setattr(shared_weights, "SHM", made)
        yield Path(made)


KILLED = """
import os, signal, sys
from stoker.contract import shared_weights
shared_weights.SHM = sys.argv[1]
made = shared_weights.SharedFolder()
os.mkdir(f"{made.path}/version-00000001")
with open(f"{made.path}/version-00000001/model.safetensors", "wb") as file:
    file.write(bytes(8192))
worker = os.fork()  # of the trainer's: it must not keep the folder alive
if worker:
    print(worker, flush=True)
signal.pause()
"""


def test_what_a_killed_process_left_is_swept_and_what_lives_stays(place: Path) -> None:
    trainer = subprocess.Popen([sys.executable, "-c", KILLED, str(place)], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    worker = int(trainer.stdout.readline())
    try:
        (top,) = place.iterdir()
        assert top.stat().st_mode & 0o777 == 0o700
        mine = shared_weights.SharedFolder()
        assert not list(shared_weights.find_dead_folders()), "both live"
        trainer.kill()
        trainer.wait()
        assert list(shared_weights.find_dead_folders()) == [str(top)]
        (found,) = stale_files.find_debris(str(place / "no-tmp"), str(place))
        assert (found.kind, found.path) == (stale_files.WEIGHTS, str(top)) and found.size >= 8192
        assert cleanup.remove_debris([found]) == [] and not top.exists() and Path(mine.path).exists()
    finally:
        os.kill(worker, signal.SIGKILL)
        trainer.kill()
        trainer.communicate()
    mine.remove()
    assert not list(place.iterdir())


def test_the_next_trainer_sweeps_before_it_begins(place: Path) -> None:
    text = KILLED.replace("worker = os.fork()", "os.kill(os.getpid(), signal.SIGKILL)")
    done = subprocess.run([sys.executable, "-c", text, str(place)], check=False)
    assert done.returncode == -signal.SIGKILL and len(list(place.iterdir())) == 1
    mine = shared_weights.SharedFolder()
    assert [str(one) for one in place.iterdir()] == [mine.path]
    mine.remove()


def test_only_closed_folders_of_ones_own_user_count(place: Path) -> None:
    def made(name: str, mode: int = 0o700) -> Path:
        (place / name / "version-1").mkdir(parents=True)
        (place / name).chmod(mode)
        return place / name / "version-1"

    good = made("stoker-weights-a")
    assert shared_weights.is_shared_folder(str(good))
    (place / "stoker-weights-link").symlink_to(good.parent)
    others = [made("stoker-weights-b", 0o755), made("other"), place / "stoker-weights-link" / "version-1", good.parent]
    others += [good / ".." / ".." / "other", Path("/etc/passwd")]
    assert not any(shared_weights.is_shared_folder(str(path)) for path in others)
    if os.geteuid() == 0:
        pid = start_as(VICTIM, lambda: shared_weights.SharedFolder() and None)
        assert wait(pid) == 0
        (theirs,) = [one for one in place.iterdir() if one.stat().st_uid == VICTIM]
        assert not shared_weights.is_shared_folder(str(theirs / "version-1")) and str(theirs) not in list(
            shared_weights.find_dead_folders()
        )
        read = start_as(VICTIM, lambda: os.listdir(good))
        assert wait(read) == 1, "closed to others"
    place.chmod(0o777)
    assert not shared_weights.is_shared_folder(str(good)), "others could put theirs in its place"


FILLED = """
import os, sys
import torch
from stoker.contract import shared_weights
from stoker.contract.errors import Refusal
from stoker.training.model.config import ModelConfig
from stoker.training.model.decoder import Decoder
from stoker.training.parallel.config import ParallelConfig
from stoker.training.parallel.group import Group
from stoker.training.rl.publish import Publisher, To
from stoker.training.rl.waiting import ServerWait

model = Decoder(ModelConfig(layers=2, dim=64, heads=4, kv_heads=2, head_dim=16, ff=96, vocab_size=260), 32)
model.start(0)
group = Group(ParallelConfig(device="cpu", strategy="ddp"))

def publisher(run, staleness):
    return Publisher(model, None, run, group, To((), "auto", staleness, None, ServerWait(), lambda line: print(line, flush=True)))

def fill(left):
    room = os.statvfs("/dev/shm")
    with open("/dev/shm/other", "wb") as file:
        file.write(bytes(room.f_bavail * room.f_frsize - left))

def elsewhere(how):
    ask = lambda *_: b'{"version": 0, "digest": "", "shared_memory": "of another machine"}'
    return Publisher(model, None, "elsewhere", group, To(("a:1",), how, 0, ask, ServerWait(), print))

try:
    elsewhere("memory")(0)
except Refusal as refused:
    print(refused.line)
print(elsewhere("auto")(0).folder)
first, second = publisher("first", 0), publisher("second", 1)
print(first(0).folder, second(0).folder)
fill(300_000)
print(first(1).folder)
shared_weights.why_too_large = lambda size: ""  # it looked well, and then somebody was faster
os.unlink("/dev/shm/other")
fill(100_000)
print(second(1).folder, os.listdir("second/published"), os.listdir("/dev/shm"))
"""


def test_weights_go_to_the_disk_once_shared_memory_is_full(tmp_path: Path) -> None:
    """A real one of 5 MB, in a mount namespace of its own; somebody else fills it while the run is under way."""
    mount = 'mount -t tmpfs -o size=5m,mode=1777 tmpfs /dev/shm && exec "$@"'
    command = ["unshare", "-rm", "sh", "-c", mount, "sh", sys.executable, "-c", FILLED]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    if done.stderr.startswith(("mount:", "unshare:")):
        pytest.skip(f"no mount namespace here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stdout + done.stderr
    other, auto, *lines = done.stdout.splitlines()
    assert "the server at a:1 does not share memory with the trainers" in other
    assert auto == f"{tmp_path}/elsewhere/published/version-00000000"
    assert [line.count("/dev/shm/stoker-weights-") for line in lines[:3]] == [1, 1, 2], lines
    goes = f"new weights go to {tmp_path}/first/published, not to shared memory: /dev/shm has "
    assert lines[3].startswith(goes) and lines[4] == f"{tmp_path}/first/published/version-00000001", lines
    assert "No space left on device" in lines[5] or "no space left" in lines[5], lines
    assert lines[6] == f"{tmp_path}/second/published/version-00000001 ['version-00000001'] ['other']"
