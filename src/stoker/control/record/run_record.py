"""Reads run directories while they are written, after a crash, or damaged: what can't be read is `Damaged`, in one line.

Another user's record is read like any other. `Run.mine` says whose it is: only our own runs are resumed or signalled.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from typing import Any

from stoker.contract import errors, layout, safe_io, text
from stoker.contract.errors import parsing
from stoker.contract.evidence import Verdict
from stoker.contract.frozen import frozen, replace
from stoker.contract.process import find_process, process_owner
from stoker.contract.text import escape
from stoker.control.record import ownership


class Damaged(Exception):
    """A run's record that can't be read, and why: one line, printable."""


@frozen
class RunRecord:
    dir: str
    id: str
    data: dict[str, Any]  # run.json, checked (_check)
    verdict: Verdict | None
    uid: int
    mine: bool

    @property
    def name(self) -> str:
        return str(self.data.get("name") or "")

    @property
    def started(self) -> float:
        return float(self.data.get("started") or 0.0)

    @property
    def launcher(self) -> tuple[int, int, str]:
        """(pid, start ticks, host) of the process that runs it, as the record has it."""
        who = self.data.get("launcher") or {}
        return who.get("pid") or 0, who.get("start") or 0, who.get("host") or ""

    @property
    def ranks(self) -> int:
        return int((self.data.get("plan") or {}).get("world_size") or 0)

    @property
    def user(self) -> str:
        return safe_io.user_name(self.uid)

    def events(self) -> Iterator[dict[str, Any]]:
        return read_events(self.dir)

    @property
    def attempts(self) -> list[int]:
        try:
            with os.scandir(self.dir) as entries:
                folders = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        except OSError:
            return []
        return sorted(int(match[1]) for name in folders if (match := re.fullmatch(r"attempt-(0|[1-9]\d{0,5})", name)))


def read_json(path: str) -> Any:
    """None when it isn't there or isn't whole."""
    try:
        return safe_io.read_json(path)
    except (OSError, ValueError):
        return None


def load_run(run_dir: str) -> RunRecord | None:
    """None where there is no record, or a damaged one."""
    try:
        return read_run(run_dir)
    except Damaged:
        return None


def read_run(run_dir: str) -> RunRecord | None:
    """Return the run's record, or None where there is none. Raises Damaged."""
    try:
        with parsing("it", Damaged):
            return _read(run_dir)
    except errors.Refusal as problem:
        raise Damaged(problem.line) from problem


def _read(run_dir: str) -> RunRecord | None:
    try:
        uid = os.stat(run_dir).st_uid
        data = _json_file(run_dir, layout.RUN)
    except FileNotFoundError:
        return None
    except OSError as problem:
        raise Damaged(f"can't be read: {problem.strerror}") from problem
    _check(data)
    try:
        os.close(_open(run_dir, layout.EVENTS))
    except FileNotFoundError:
        pass  # the run has not begun, or somebody has tidied up
    verdict: Verdict | None
    try:
        verdict = Verdict.from_json(_json_file(run_dir, layout.VERDICT))
    except (FileNotFoundError, TypeError, Damaged):
        verdict = _verdict_in_events(run_dir)  # none yet, of another version, or damaged: the run is listed without it
    mine = safe_io.is_own_uid(uid, os.path.dirname(run_dir))
    return RunRecord(run_dir, os.path.basename(run_dir), data, verdict, uid, mine)


def _verdict_in_events(run_dir: str) -> Verdict | None:
    """Where verdict.json could not be written: the last event, unless a newer start or attempt follows it."""
    last: dict[str, Any] | None = None
    for event in read_events(run_dir, tail=1 << 16):
        if event["event"] in ("run", "attempt"):
            last = None
        elif event["event"] == "verdict":
            last = event
    if last is None:
        return None
    fields = ("status", "cause", "summary", "exit_code", "rank")
    try:
        told = Verdict.from_json({name: last[name] for name in fields if name in last})
    except TypeError:
        return None
    return replace(told, evidence=("from events.jsonl: there is no verdict.json",))


def _json_file(run_dir: str, name: str) -> Any:
    """Return the value of a JSON file of the record. Raises FileNotFoundError or Damaged."""
    with os.fdopen(_open(run_dir, name), "rb", buffering=0) as file:
        data = file.read()
    try:
        return text.parse_json(data)
    except ValueError as problem:
        raise Damaged(f"{name} is not JSON: {escape(str(problem), 80)}") from problem


def _open(run_dir: str, name: str) -> int:
    """Open a file of the record. Raises FileNotFoundError, or Damaged if it is a link, a named pipe or the like."""
    try:
        return safe_io.open_below(run_dir, name)
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name) from None
    except OSError as problem:
        why = "is a symbolic link" if problem.errno == errno.ELOOP else escape(problem.strerror or str(problem))
        raise Damaged(f"{name} {why}") from problem


def _check(data: Any) -> None:
    """Of run.json: what Stoker reads again has its type, or is missing."""
    if not isinstance(data, dict):
        raise Damaged(f"{layout.RUN} is not a JSON object")
    for name in ("launcher", "plan", "environment", "hosts", "versions", "request"):
        if not isinstance(data.get(name), (dict, type(None))):
            raise Damaged(f"{layout.RUN}: {name} is not an object")
    launcher, plan = data.get("launcher") or {}, data.get("plan") or {}
    for where, name in ((data, "name"), (data, "config_hash"), (launcher, "host")):
        if not isinstance(where.get(name), (str, type(None))):
            raise Damaged(f"{layout.RUN}: {name} is not a text")
    of_launcher = ((launcher, "pid", 1 << 22), (launcher, "start", 1 << 62))
    for where, name, most in ((data, "started", 1e11), (plan, "world_size", 1e7), *of_launcher):
        value = where.get(name)
        whole = isinstance(value, int) and not isinstance(value, bool)
        fits = whole or (name == "started" and isinstance(value, float))
        if value is not None and not (fits and 0 <= value <= most):
            raise Damaged(f"{layout.RUN}: {name} is not a number from 0 to {most:g}")


def size_of(path: str) -> int:
    try:
        return os.lstat(path).st_size
    except OSError:
        return 0


def read_events(run_dir: str, tail: int = 0) -> Iterator[dict[str, Any]]:
    """Yield the run's events, each with a kind and a time; a line that is half written is left out.

    `tail`: only those in so many bytes at the end.
    """
    try:
        handle = safe_io.open_below(run_dir, layout.EVENTS)
    except OSError:
        return  # there is none yet
    with os.fdopen(handle, "rb") as file:
        if tail and os.fstat(handle).st_size > tail:
            file.seek(-tail, os.SEEK_END)
            file.readline()
        for line in file:
            event = _event(line)
            if event is not None:
                yield event


def last_time(run_dir: str) -> float | None:
    """Of its newest event."""
    try:
        with os.fdopen(safe_io.open_below(run_dir, layout.EVENTS), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - (1 << 16)))
            lines = file.read(1 << 16).splitlines(keepends=True)
    except OSError:
        return None
    return next((float(event["time"]) for event in map(_event, reversed(lines)) if event is not None), None)


def _event(line: bytes) -> dict[str, Any] | None:
    if not line.endswith(b"\n"):
        return None
    try:
        event = text.parse_json(line)
    except ValueError:
        return None
    if not isinstance(event, dict) or not isinstance(event.get("event"), str):
        return None
    when = event.setdefault("time", 0.0)
    return event if isinstance(when, (int, float)) and not isinstance(when, bool) and 0 <= when <= 1e11 else None


def is_alive(run: RunRecord) -> bool | None:
    """Is its launcher there: the process in the record, if ours and writing that record. None: can't be told."""
    pid, start, host = run.launcher
    if not run.mine or (host and host != os.uname().nodename):
        return None
    now = find_process(pid) if pid > 0 else None
    if now is None or now.start != start or now.state == "Z" or process_owner(pid) != os.getuid():
        return False
    return ownership.writes_to(pid, os.path.join(run.dir, layout.EVENTS))


def is_over(run: RunRecord) -> bool:
    """Nothing more will come of it. Of one on another host nobody here knows: it is over with its verdict."""
    said = run_status(run)
    if said == "unknown":
        said = run_status(load_run(run.dir) or run)
    return said not in ("running", "unknown")


def run_status(run: RunRecord) -> str:
    living = is_alive(run)
    if run.verdict is not None and not living:
        return run.verdict.status
    return {True: "running", None: "unknown", False: "lost"}[living]
