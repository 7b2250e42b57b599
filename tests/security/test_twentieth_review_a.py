"""What the twentieth review found: logs of another user's run that are followed, and lines without end that begin as a recipe's."""

from __future__ import annotations

import json
import os
import resource

from conftest import Stoker
from localuser import ATTACKER, needs_root
from security.test_viewers import make_run
from stoker.control.launch.console import LONGEST, LineCutter

MEMORY = 256 << 20


def limited() -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))


def test_logs_of_another_users_run_fill_no_memory(stoker: Stoker) -> None:
    """128,000 names of two files, each 64 KB without an end of line, took 8 GB."""
    needs_root()
    folder = make_run(stoker.cwd / "runs", "theirs")
    (folder / "attempt-0").mkdir()
    (folder / "attempt-0" / "base").write_bytes(b"x" * (1 << 16))
    for rank in range(6000):
        os.link(folder / "attempt-0" / "base", folder / "attempt-0" / f"rank-{rank}.log")
    verdict = {"schema": 1, "status": "completed", "cause": "completed", "summary": "done", "exit_code": 0}
    (folder / "verdict.json").write_text(json.dumps(verdict))
    for path in (folder, *folder.iterdir()):
        os.chown(path, ATTACKER, ATTACKER)
    done = stoker("attach", str(folder), preexec_fn=limited)
    assert done.code == 0 and "512 of them are followed" in done.err, (done.code, done.err)
    assert [f"rank {rank}:x" in done.out for rank in (0, 511, 512)] == [True, True, False]


def test_a_line_without_end_is_shown_in_pieces_however_it_begins() -> None:
    """One that began as a recipe's was kept for its end, whatever its length: a hostile host's rank filled the launcher."""
    cutter = LineCutter(b"rank 1:", lambda line: line)
    shown = cutter.feed(b"INFO | [")
    piece = b"x" * (1 << 20)
    for _ in range(LONGEST // len(piece)):
        shown += cutter.feed(piece)
    assert shown.startswith(b"rank 1:INFO | [x") and len(shown) > LONGEST
    assert cutter.feed(b"y\nz\n") == b"y\nrank 1:z\n"
