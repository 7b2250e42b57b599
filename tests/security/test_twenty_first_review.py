"""What the twenty-first review found: folders of logs and checkpoints in which another user puts links."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from conftest import Stoker, wait_for
from localuser import ATTACKER, do_as, needs_root
from stoker.control.roles.ready import Watching
from stoker.control.roles.role import Ready

FAILS = """import pathlib, time
print("what only its user may read", flush=True)
pathlib.Path("started").touch()
ready = pathlib.Path("ready")
while not ready.exists():
    time.sleep(0.01)
raise RuntimeError("boom")
"""


def test_logs_go_to_no_folder_that_another_user_put_there(stoker: Stoker, public: Path) -> None:
    """Where they could write to --log-dir, they led the next attempt's files into any folder of ours, and read our logs."""
    needs_root()
    logs, private = public / "logs", stoker.cwd / "private"
    logs.mkdir()
    logs.chmod(0o777)
    private.mkdir(0o700)
    for name in ("stdout.log", "error.json"):
        (private / name).write_text("precious")

    def exchange() -> None:
        (folder,) = logs.iterdir()
        folder.rename(logs / "theirs-now")
        folder.mkdir()
        (folder / "attempt_1").mkdir()
        (folder / "attempt_1" / "0").symlink_to(private)

    run = stoker.start(
        "run", "--log-dir", str(logs), "-r", "3", "--max-restarts", "1", stoker.script("fails.py", FAILS)
    )
    assert wait_for(lambda: True if (stoker.cwd / "started").exists() else None, 60)
    do_as(ATTACKER, exchange)
    (stoker.cwd / "ready").touch()
    run.communicate(timeout=100)
    assert [path.read_text() for path in sorted(private.iterdir())] == ["precious", "precious"]
    kept = logs / "theirs-now"
    assert kept.stat().st_uid == os.getuid() and kept.stat().st_mode & 0o777 == 0o700
    assert "only its user" in (kept / "attempt_1" / "0" / "stdout.log").read_text()
    assert "boom" in json.dumps(json.loads((kept / "attempt_1" / "0" / "error.json").read_text()))


def test_a_second_name_for_a_file_of_ours_makes_no_role_ready(stoker: Stoker, public: Path) -> None:
    """Another user can give one to any file of ours that all may write, as a GPU's lock is."""
    needs_root()
    lock = public / "lock"
    lock.touch()
    lock.chmod(0o666)
    os.utime(lock, (time.time() + 1000,) * 2)
    do_as(ATTACKER, lambda: os.link(lock, public / "ready"))
    waiting = Watching(Ready("file", str(public / "ready")), (), time.time(), 1)
    try:
        assert wait_for(lambda: waiting.looks or None, 20) and "several names" in waiting.newest
        assert not waiting.ready.is_set()
        (public / "ready").unlink()
        (public / "ready").touch()
        assert waiting.ready.wait(20)
    finally:
        waiting.close()
