"""What other users leave in shared folders ends no command, and their records are read within bounds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import Stoker

ANOTHER = 12345

# ---- entries that nobody but their owner can look at ----

_MOUNT = """
import ctypes, os, sys
libc, handle = ctypes.CDLL(None, use_errno=True), os.open("/dev/fuse", os.O_RDWR)
options = f"fd={handle},rootmode=40000,user_id=12345,group_id=12345".encode()
if libc.mount(b"theirs", sys.argv[1].encode(), b"fuse", 6, options):
    sys.exit(f"mount: {os.strerror(ctypes.get_errno())}")
os.set_inheritable(handle, True)
os.execvp(sys.argv[2], sys.argv[2:])
"""
_LOOK = """
import sys
from stoker.contract import checkpoints, owners
from stoker.control.doctor import debris
from stoker.control.record import ownership, reader
from stoker.speedrun.state import check_own
from stoker.contract.names import Refusal
from stoker.training.checkpoint import folders, reading
from stoker.training.generate import finding
from stoker.training.model import hf_write

root, theirs = sys.argv[1:]
listing = reader.look(root)
assert listing.others == 1 and not listing.damaged, listing
assert not owners.is_own(theirs) and owners.is_own(root)
debris.FRESH_S = -1.0
assert [entry.name for entry, _ in debris._own_entries(root, debris.re.compile("step-.*"))] == ["step-00000001"]
assert list(folders.steps_in(root)) == [2, 1] and not folders.is_trusted(theirs)
folders.repair(root)
hf_write.sweep(root, "step-00000002")
lines = []
assert reading.find(root, lines.append) is None
assert "can't be read: Permission denied" in lines[0] and "step-00000001 is not a complete" in lines[1], lines
assert checkpoints._trusted(theirs, root, None) is False
assert ownership.own_folder(root, "step-00000002") == theirs + "-0"
assert finding._models(root, "") == []
try:
    check_own(theirs)
except Refusal as refusal:
    assert "not a folder of yours" in refusal.line
else:
    raise AssertionError("not refused")
"""


def beside_anothers_mount(
    theirs: Path, *command: str, cwd: Path, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs the command where a user's FUSE file system is mounted: nobody else may look at it, not even root."""
    if os.getuid() or not os.path.exists("/dev/fuse"):
        pytest.skip("a mount of another user's takes root and /dev/fuse")
    theirs.mkdir(parents=True, exist_ok=True)
    mounting = ("unshare", "-m", sys.executable, "-c", _MOUNT, str(theirs), *command)
    done = subprocess.run(mounting, cwd=cwd, env=env, capture_output=True, text=True, timeout=300, check=False)
    if done.stderr.startswith(("mount:", "unshare:")):
        pytest.skip(f"no FUSE file system can be mounted here: {done.stderr.strip()}")
    return done


def test_what_only_its_owner_can_look_at_is_another_users(tmp_path: Path) -> None:
    root = tmp_path / "shared"
    (root / "step-00000001").mkdir(parents=True)
    theirs = root / "step-00000002"
    done = beside_anothers_mount(theirs, sys.executable, "-c", _LOOK, str(root), str(theirs), cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_anothers_mount_in_a_runs_folder_ends_no_command(stoker: Stoker) -> None:
    stoker.script("ok.py", "print('fine')\n")
    run = f"{sys.executable} -m stoker run --name mine --runs-dir runs --nproc-per-node 1 ok.py"
    looks = [f"{sys.executable} -m stoker {what} --runs-dir runs" for what in ("runs", "why", "why mine")]
    commands = " && ".join([run, *looks])
    done = beside_anothers_mount(
        stoker.cwd / "runs" / "theirs", "bash", "-c", commands, cwd=stoker.cwd, env=stoker.environment()
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Permission denied" not in done.stdout + done.stderr
