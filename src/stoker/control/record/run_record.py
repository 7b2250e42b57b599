"""Reads run directories while they are written, after a crash, or damaged.

Another user's record is read like any other, but only runs with `RunRecord.mine` are resumed or signalled.
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
from stoker.contract.process import find_process, process_owner, read_kernel_lines
from stoker.contract.text import escape


class DamagedRecord(Exception):
    """Raised for a record that can't be read; the message is one printable line."""


@frozen
class RunRecord:
    dir: str
    id: str
    data: dict[str, Any]  # run.json, checked by _check_types
    verdict: Verdict | None
    uid: int
    mine: bool  # this user's

    @property
    def name(self) -> str:
        return str(self.data.get("name") or "")

    @property
    def started(self) -> float:
        return float(self.data.get("started") or 0.0)

    @property
    def launcher(self) -> tuple[int, int, str]:
        """The recorded (pid, start time in ticks, host) of the process that runs it."""
        launcher = self.data.get("launcher") or {}
        return launcher.get("pid") or 0, launcher.get("start") or 0, launcher.get("host") or ""

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
    """Return the value of a JSON file, or None if the file is missing or incomplete."""
    try:
        return safe_io.read_json(path)
    except (OSError, ValueError):
        return None


def load_run(run_dir: str) -> RunRecord | None:
    """Return the run's record, or None if there is none or it is damaged."""
    try:
        return read_run(run_dir)
    except DamagedRecord:
        return None


def read_run(run_dir: str) -> RunRecord | None:
    """Return the run's record, or None if there is none. Raises DamagedRecord."""
    try:
        with parsing("it", DamagedRecord):
            return _read_record(run_dir)
    except errors.Refusal as problem:
        raise DamagedRecord(problem.line) from problem


def _read_record(run_dir: str) -> RunRecord | None:
    try:
        uid = os.stat(run_dir).st_uid
        data = _read_json_file(run_dir, layout.RUN)
    except FileNotFoundError:
        return None
    except OSError as problem:
        raise DamagedRecord(f"can't be read: {problem.strerror}") from problem
    _check_types(data)
    try:
        os.close(_open_file(run_dir, layout.EVENTS))
    except FileNotFoundError:
        pass  # the run is starting, or the file was removed
    verdict: Verdict | None
    try:
        verdict = Verdict.from_json(_read_json_file(run_dir, layout.VERDICT))
    except (FileNotFoundError, TypeError, DamagedRecord):
        verdict = _read_verdict_from_events(run_dir)  # there is none yet, it is of another version, or damaged
    mine = safe_io.is_own_uid(uid, os.path.dirname(run_dir))
    return RunRecord(run_dir, os.path.basename(run_dir), data, verdict, uid, mine)


def _read_verdict_from_events(run_dir: str) -> Verdict | None:
    """Return the verdict in the last event, for a run whose verdict.json could not be written.

    Returns None if there is none, or if a newer start or attempt follows it.
    """
    newest: dict[str, Any] | None = None
    for event in read_events(run_dir, tail=1 << 16):
        if event["event"] in ("run", "attempt"):
            newest = None
        elif event["event"] == "verdict":
            newest = event
    if newest is None:
        return None
    fields = ("status", "cause", "summary", "exit_code", "rank")
    try:
        verdict = Verdict.from_json({name: newest[name] for name in fields if name in newest})
    except TypeError:
        return None
    return replace(verdict, evidence=("from events.jsonl: there is no verdict.json",))


def _read_json_file(run_dir: str, name: str) -> Any:
    """Return the value of a JSON file of the record. Raises FileNotFoundError or DamagedRecord."""
    with os.fdopen(_open_file(run_dir, name), "rb", buffering=0) as file:
        data = file.read()
    try:
        return text.parse_json(data)
    except ValueError as problem:
        raise DamagedRecord(f"{name} is not JSON: {escape(str(problem), 80)}") from problem


def _open_file(run_dir: str, name: str) -> int:
    """Open a file of the record. Raises FileNotFoundError, or DamagedRecord if it is a link, a named pipe or the like."""
    try:
        return safe_io.open_below(run_dir, name)
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name) from None
    except OSError as problem:
        why = "is a symbolic link" if problem.errno == errno.ELOOP else escape(problem.strerror or str(problem))
        raise DamagedRecord(f"{name} {why}") from problem


def _check_types(data: Any) -> None:
    """Raise DamagedRecord if a value of run.json that Stoker reads is present and has the wrong type."""
    if not isinstance(data, dict):
        raise DamagedRecord(f"{layout.RUN} is not a JSON object")
    for name in ("launcher", "plan", "environment", "hosts", "versions", "request"):
        if not isinstance(data.get(name), (dict, type(None))):
            raise DamagedRecord(f"{layout.RUN}: {name} is not an object")
    launcher, plan = data.get("launcher") or {}, data.get("plan") or {}
    for values, name in ((data, "name"), (data, "config_hash"), (launcher, "host")):
        if not isinstance(values.get(name), (str, type(None))):
            raise DamagedRecord(f"{layout.RUN}: {name} is not a string")
    launcher_numbers = ((launcher, "pid", 1 << 22), (launcher, "start", 1 << 62))
    for values, name, maximum in ((data, "started", 1e11), (plan, "world_size", 1e7), *launcher_numbers):
        value = values.get(name)
        is_integer = isinstance(value, int) and not isinstance(value, bool)
        is_number = is_integer or (name == "started" and isinstance(value, float))
        if value is not None and not (is_number and 0 <= value <= maximum):
            raise DamagedRecord(f"{layout.RUN}: {name} is not a number from 0 to {maximum:g}")


def size_of(path: str) -> int:
    """Return the size of a file in bytes, or 0 if it is missing."""
    try:
        return os.lstat(path).st_size
    except OSError:
        return 0


def read_events(run_dir: str, tail: int = 0) -> Iterator[dict[str, Any]]:
    """Yield the run's events, each with "event" and "time". Incomplete lines are left out.

    With `tail`, read only that many bytes at the end of the file.
    """
    try:
        fd = safe_io.open_below(run_dir, layout.EVENTS)
    except OSError:
        return  # there are none yet
    with os.fdopen(fd, "rb") as file:
        if tail and os.fstat(fd).st_size > tail:
            file.seek(-tail, os.SEEK_END)
            file.readline()
        for line in file:
            event = _parse_event(line)
            if event is not None:
                yield event


def read_last_event_time(run_dir: str) -> float | None:
    """Return the time of the newest event, or None."""
    try:
        with os.fdopen(safe_io.open_below(run_dir, layout.EVENTS), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - (1 << 16)))
            lines = file.read(1 << 16).splitlines(keepends=True)
    except OSError:
        return None
    return next((float(event["time"]) for event in map(_parse_event, reversed(lines)) if event is not None), None)


def _parse_event(line: bytes) -> dict[str, Any] | None:
    if not line.endswith(b"\n"):
        return None
    try:
        event = text.parse_json(line)
    except ValueError:
        return None
    if not isinstance(event, dict) or not isinstance(event.get("event"), str):
        return None
    time = event.setdefault("time", 0.0)
    return event if isinstance(time, (int, float)) and not isinstance(time, bool) and 0 <= time <= 1e11 else None


def is_alive(run: RunRecord) -> bool | None:
    """Return whether the run's launcher is alive and still writes its record, or None if only another host or user can tell."""
    pid, start, host = run.launcher
    if not run.mine or (host and host != os.uname().nodename):
        return None
    process = find_process(pid) if pid > 0 else None
    if process is None or process.start != start or process.state == "Z" or process_owner(pid) != os.getuid():
        return False
    return has_open_for_writing(pid, os.path.join(run.dir, layout.EVENTS))


def has_open_for_writing(pid: int, path: str) -> bool | None:
    """Return whether a process has a file open for writing, or None without permission. A record can't fake this."""
    folder, name = os.path.split(path)
    folder = os.path.realpath(folder)
    try:
        fds = os.listdir(f"/proc/{pid}/fd")
    except PermissionError:
        return None
    except OSError:
        return False
    for fd in fds:
        link = f"/proc/{pid}/fd/{fd}"
        try:
            target = os.readlink(link).removesuffix(" (deleted)")
            if os.path.basename(target) != name:
                continue
            info = read_kernel_lines(f"/proc/{pid}/fdinfo/{fd}")
            flags = next((int(line.split()[1], 8) for line in info if line.startswith("flags:")), 0)
            if flags & os.O_ACCMODE == os.O_RDONLY:
                continue
            # The name counts even if the file was removed: its launcher is alive. The inode counts where a mount shows
            # the file under another path.
            if os.path.dirname(target) == folder or os.path.samestat(
                os.stat(link), os.stat(os.path.join(folder, name))
            ):
                return True
        except (OSError, ValueError):
            continue  # closed meanwhile
    return False


def is_over(run: RunRecord) -> bool:
    """Return whether the run has ended; a run on another host has ended once it has a verdict."""
    status = run_status(run)
    if status == "unknown":
        status = run_status(load_run(run.dir) or run)
    return status not in ("running", "unknown")


def run_status(run: RunRecord) -> str:
    """Return the verdict's status, or running, unknown (on another host) or lost (its launcher is gone)."""
    alive = is_alive(run)
    if run.verdict is not None and not alive:
        return run.verdict.status
    return {True: "running", None: "unknown", False: "lost"}[alive]
