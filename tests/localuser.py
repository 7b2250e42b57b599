"""Other users of this machine, for tests that need two: what they do is done in a forked child with their uid. No account is needed."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ATTACKER, VICTIM = 12345, 12346


def needs_root() -> None:
    if sys.platform != "linux" or os.getuid() != 0:
        pytest.skip("a second user takes Linux and root")


def start_as(uid: int, body: Callable[[], object]) -> int:
    """Runs `body` as that user, in a child; its pid. Exit code 0: it returned; 1: it raised. Import first what it needs: it may not be allowed to read it."""
    needs_root()
    import pwd  # noqa: F401

    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
        body()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def wait(pid: int, seconds: float = 10.0) -> int:
    """Its exit code; fails where it does not end in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    raise AssertionError(f"what user {os.getuid()} started did not end within {seconds} s")


def do_as(uid: int, body: Callable[[], object]) -> None:
    assert wait(start_as(uid, body)) == 0, "the other user's part failed: see stderr"


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder as /tmp is: anybody may make files in it, and only remove their own."""
    folder = Path(tempfile.mkdtemp(prefix="stk-public-", dir="/tmp"))
    folder.chmod(0o1777)
    yield folder
    shutil.rmtree(folder)
