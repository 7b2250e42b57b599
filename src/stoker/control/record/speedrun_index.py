"""Speedruns in a folder of runs: each keeps the runs of its stages in a folder of its own, with chain.json beside it."""

from __future__ import annotations

import os
import shlex
import stat

from stoker.contract import safe_io
from stoker.contract.frozen import frozen
from stoker.contract.process import process_owner
from stoker.contract.safe_io import read_json, read_text
from stoker.contract.text import escape, is_digits
from stoker.control.record import ownership

CHAIN, STAGES, LOCK = "chain.json", "stages", ".lock"


@frozen
class Speedrun:
    dir: str
    state: str  # completed, running, failed or unfinished
    stages: int
    done: int
    stage: str  # the one that is under way, failed, or comes next; empty where all are done

    @property
    def runs_dir(self) -> str:
        return os.path.join(self.dir, STAGES)

    @property
    def line(self) -> str:
        at = f" at stage {self.stage}" if self.stage else ""
        count = f"{self.done} of {self.stages} stages done" if self.stages else "no stage has begun"
        how = f"`stoker runs --runs-dir {escape(shlex.quote(self.runs_dir))}` lists the runs of its stages"
        return f"{escape(self.dir)} is a speedrun, {self.state}{at}: {count}; {how}"


def list_speedruns(root: str) -> list[Speedrun]:
    """One's own, by name."""
    try:
        names = sorted(os.listdir(root))
    except OSError:
        return []
    found = (speedrun_at(os.path.join(root, name)) for name in names)
    return [one for one in found if one is not None]


def speedrun_at(path: str) -> Speedrun | None:
    try:
        about, inside = os.lstat(path), os.lstat(os.path.join(path, STAGES))
    except OSError:
        return None
    folders = stat.S_ISDIR(about.st_mode) and stat.S_ISDIR(inside.st_mode)
    if not folders or not safe_io.is_own_uid(about.st_uid, os.path.dirname(path) or "."):
        return None
    try:
        chain = read_json(os.path.join(path, CHAIN))
    except (OSError, ValueError):
        chain = None
    rows = chain.get("stages") if isinstance(chain, dict) else None
    known = rows if isinstance(rows, list) else []
    stages = [(str(row.get("name")), row.get("status")) for row in known if isinstance(row, dict)]
    left = [(escape(name, 60), status) for name, status in stages if status != "done"]
    state, stage = "completed" if stages else "unfinished", ""
    if left:
        failed = [name for name, status in left if status == "failed"]
        state, stage = ("failed", failed[0]) if failed else ("unfinished", left[0][0])
    if _is_running(path):
        state, stage = "running", next((name for name, status in left if status == "running"), stage)
    return Speedrun(path, state, len(stages), len(stages) - len(left), stage)


def _is_running(path: str) -> bool:
    """The process in its lock file is ours and has that file open."""
    lock = os.path.join(path, LOCK)
    try:
        pid = read_text(lock).strip()
    except (OSError, ValueError):
        return False
    return is_digits(pid) and process_owner(int(pid)) == os.getuid() and bool(ownership.writes_to(int(pid), lock))
