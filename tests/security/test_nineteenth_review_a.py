"""What the nineteenth review found: the history of another user's run played back, and bodies and answers of `stoker serve`."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from conftest import Stoker
from localuser import ATTACKER, needs_root
from security.test_viewers import make_run, members, moment
from stoker.control.record import history, reader
from stoker.control.show.top.player import Replay


def limited() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (5, 5))  # seconds of CPU time, of a command that takes half of one


def test_a_replay_reads_no_more_of_anothers_history_than_other_viewers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_root()
    monkeypatch.setattr(history, "MOST_OF_OTHERS", 10_000)
    lines = [line for n in range(1000) for line in (members(hosts=["h"]), moment(1e9 + n))]
    counts = {}
    for owner in (os.getuid(), ATTACKER):
        folder = make_run(tmp_path, f"run-{owner}", history=lines, owner=owner)
        older = folder / "history" / "minutes.jsonl"
        older.write_bytes((folder / "history" / "seconds.jsonl").read_bytes().replace(b"100000", b" 99990"))
        run = reader.read(str(folder))
        assert run is not None
        counts[owner] = len(Replay(run).moments)
    size = len((tmp_path / f"run-{ATTACKER}" / "history" / "seconds.jsonl").read_bytes()) / 1000
    assert counts[os.getuid()] == 2000
    assert 0 < counts[ATTACKER] <= 10_000 / size


def test_a_replay_finds_cards_without_looking_at_each(stoker: Stoker) -> None:
    """The last moment's 512 cards are none of the 16,000 of the 59 before it: 500 million comparisons a picture."""
    needs_root()
    gpus = {name: [(f"h{n % 64}", f"GPU-{name}{n}") for n in range(16_000)] for name in "ab"}
    hosts = [f"h{n}" for n in range(64)]
    lines = [members(gpus=gpus["a"], hosts=hosts), *(moment(1e9 + n) for n in range(59))]
    lines += [members(gpus=gpus["b"], hosts=hosts), moment(1e9 + 60)]
    folder = make_run(stoker.cwd / "runs", "theirs", history=lines, owner=ATTACKER)
    done = stoker("top", "--replay", str(folder), "--once", preexec_fn=limited)
    assert done.code == 0 and "theirs" in done.out, (done.code, done.err)
