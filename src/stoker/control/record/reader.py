"""Reads run directories, while written or after a crash. They may be damaged or another's: nothing is trusted."""

from __future__ import annotations

import errno
import itertools
import os
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from stoker.contract import layout, names, safe_io, text
from stoker.contract.errors import reading
from stoker.contract.process import owner, process
from stoker.contract.shape import replace, shape
from stoker.contract.shapes import Verdict
from stoker.contract.text import printable
from stoker.control.record import ownership

_MOST = 16 << 20  # bytes of run.json: a run on 500 hosts has 2 MB
_MOST_OF_OTHERS = 2 << 20  # the same of another user's
_MOST_EVENTS = 256 << 20
_EVENTS_OF_OTHERS = 1 << 20  # the last bytes of events.jsonl that are read of another user's run
_MOST_ENTRIES = 10_000  # of a run directory
_LONGEST_EVENT = 1 << 20


class Damaged(Exception):
    """A run's record that can't be read, and why: one line, printable."""


@shape
class Run:
    dir: str
    id: str
    data: dict[str, Any]  # run.json, checked (_check); of another user's run only what is checked
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
        return ownership.user_name(self.uid)

    def events(self) -> Iterator[dict[str, Any]]:
        """Of another user's run the last only: `shows_last_events_only` says so."""
        return events(self.dir, tail=0 if self.mine else _EVENTS_OF_OTHERS)

    @property
    def shows_last_events_only(self) -> bool:
        return not self.mine and size_of(os.path.join(self.dir, layout.EVENTS)) > _EVENTS_OF_OTHERS

    @property
    def attempts(self) -> list[int]:
        try:
            with os.scandir(self.dir) as entries:
                some = itertools.islice(entries, _MOST_ENTRIES)
                folders = [entry.name for entry in some if entry.is_dir(follow_symlinks=False)]
        except OSError:
            return []
        return sorted(int(match[1]) for name in folders if (match := re.fullmatch(r"attempt-(0|[1-9]\d{0,5})", name)))


def read_json(path: str) -> Any:
    """None when it isn't there or isn't whole."""
    try:
        return safe_io.read_json(path)
    except (OSError, ValueError):
        return None


def load(run_dir: str) -> Run | None:
    """None where there is no record, or a damaged one."""
    try:
        return read(run_dir)
    except Damaged:
        return None


def read(run_dir: str, most_of_others: int = _MOST_OF_OTHERS) -> Run | None:
    """None where there is no record."""
    try:
        with reading("it", Damaged):
            return _read(run_dir, most_of_others)
    except names.Refusal as problem:
        raise Damaged(problem.line) from problem


def of_others(run: Run) -> AbstractContextManager[None]:
    """Within it, another user's record is made sense of: what nobody foresaw in it is one line. Our own is no stranger's."""
    return nullcontext() if run.mine else reading(f"run {run.id} of {run.user}")


def _read(run_dir: str, most_of_others: int) -> Run | None:
    try:
        about = os.stat(run_dir)
        mine = ownership.is_mine(about.st_uid, os.path.dirname(run_dir))
        most = _MOST if mine else most_of_others
        data = _part(run_dir, layout.RUN, about.st_uid, most)
    except FileNotFoundError:
        return None
    except OSError as problem:
        raise Damaged(f"can't be read: {problem.strerror}") from problem
    _check(data)
    try:
        _part(run_dir, layout.EVENTS, about.st_uid, 0)
    except FileNotFoundError:
        pass  # the run has not begun, or somebody has tidied up
    verdict: Verdict | None
    try:
        verdict = Verdict.from_json(_part(run_dir, layout.VERDICT, about.st_uid, most))
    except (FileNotFoundError, TypeError, Damaged):
        verdict = _verdict_in_events(run_dir)  # none yet, of another version, or damaged: the run is listed without it
    return Run(run_dir, os.path.basename(run_dir), data if mine else _checked_part(data), verdict, about.st_uid, mine)


def _verdict_in_events(run_dir: str) -> Verdict | None:
    """Where verdict.json could not be written: the last event, unless a newer start or attempt follows it."""
    last: dict[str, Any] | None = None
    for event in events(run_dir, tail=1 << 16):
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


def open_in(run_dir: str, *names_: str) -> int:
    """A descriptor of a regular file in the run directory, by no symbolic link: a record opens no file elsewhere."""
    if len(names_) == 1:  # half the calls: a thousand runs are listed in a fraction of a second
        return safe_io.open_regular(os.path.join(run_dir, names_[0]), follow=False)
    handle = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for folder in names_[:-1]:
            below = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=handle)
            os.close(handle)
            handle = below
        return safe_io.open_regular(names_[-1], dir_fd=handle, follow=False)
    finally:
        os.close(handle)


def _part(run_dir: str, name: str, uid: int, most: int) -> Any:
    """A JSON file of the record, of at most so many bytes; 0: it is not read. FileNotFoundError, or Damaged."""
    try:
        with os.fdopen(open_in(run_dir, name), "rb", buffering=0) as file:
            about = os.fstat(file.fileno())
            if about.st_uid != uid:
                theirs, folders = ownership.user_name(about.st_uid), ownership.user_name(uid)
                raise Damaged(f"{name} belongs to {theirs}, and its folder to {folders}")
            # Python makes room for all that is asked for: 16 MB for each of a thousand small files take 0.2 s.
            data = file.read(min(most, about.st_size) + 1) if most else b""
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name) from None
    except OSError as problem:
        why = "is a symbolic link" if problem.errno == errno.ELOOP else printable(problem.strerror or str(problem))
        raise Damaged(f"{name} {why}") from problem
    if not most:
        return None
    if len(data) > most:
        limit = f"{most >> 20} MiB" if most >> 20 else f"{most >> 10} KiB"
        raise Damaged(f"{name} is larger than {limit}")
    try:
        return text.parse_json(data)
    except ValueError as problem:
        raise Damaged(f"{name} is not JSON: {printable(str(problem), 80)}") from problem


def _check(data: Any) -> None:
    """Of run.json: what Stoker reads again has its type, or is missing."""
    if not isinstance(data, dict):
        raise Damaged(f"{layout.RUN} is not a JSON object")
    for name in ("launcher", "plan", "environment", "hosts", "versions", "request"):
        if not isinstance(data.get(name), (dict, type(None))):
            raise Damaged(f"{layout.RUN}: {name} is not an object")
    launcher, plan = data.get("launcher") or {}, data.get("plan") or {}
    for where, name in ((data, "name"), (data, "config_hash"), (launcher, "host")):
        if not isinstance(where.get(name), (str, type(None))) or len(where.get(name) or "") > 255:
            raise Damaged(f"{layout.RUN}: {name} is not a short text")
    of_launcher = ((launcher, "pid", 1 << 22), (launcher, "start", 1 << 62))
    for where, name, most in ((data, "started", 1e11), (plan, "world_size", 1e7), *of_launcher):
        value = where.get(name)
        whole = isinstance(value, int) and not isinstance(value, bool)
        fits = whole or (name == "started" and isinstance(value, float))
        if value is not None and not (fits and 0 <= value <= most):
            raise Damaged(f"{layout.RUN}: {name} is not a number from 0 to {most:g}")


def _checked_part(data: dict[str, Any]) -> dict[str, Any]:
    """What _check looked at: a listing of many users' runs keeps no more of each."""
    known = {"launcher": ("pid", "start", "host"), "plan": ("world_size",)}
    kept = {part: {name: (data.get(part) or {}).get(name) for name in fields} for part, fields in known.items()}
    return {**kept, **{name: data.get(name) for name in ("name", "config_hash", "started")}}


def size_of(path: str) -> int:
    try:
        return os.lstat(path).st_size
    except OSError:
        return 0


def events(run_dir: str, tail: int = 0) -> Iterator[dict[str, Any]]:
    """Whole lines only, each with a kind and a time: the last may be half written. `tail`: of so many bytes."""
    try:
        handle = open_in(run_dir, layout.EVENTS)
    except OSError:
        return  # none yet; or a damaged record, which read() reports
    with os.fdopen(handle, "rb") as file:
        if tail and os.fstat(handle).st_size > tail:
            file.seek(-tail, os.SEEK_END)
            file.readline(_LONGEST_EVENT)
        most = file.tell() + (tail or _MOST_EVENTS)  # it may grow faster than we read
        while file.tell() < most and (line := file.readline(_LONGEST_EVENT)):
            event = _event(line)
            if event is not None:
                yield event


def last_time(run_dir: str) -> float | None:
    """Of its newest event."""
    try:
        with os.fdopen(open_in(run_dir, layout.EVENTS), "rb") as file:
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


def alive(run: Run) -> bool | None:
    """Is its launcher there: the process in the record, if ours and writing that record. None: can't be told."""
    pid, start, host = run.launcher
    if not run.mine or (host and host != os.uname().nodename):
        return None
    now = process(pid) if pid > 0 else None
    if now is None or now.start != start or now.state == "Z" or owner(pid) != os.getuid():
        return False
    return ownership.writes_to(pid, os.path.join(run.dir, layout.EVENTS))


def over(run: Run) -> bool:
    """Nothing more will come of it. Of one on another host nobody here knows: it is over with its verdict."""
    said = status(run)
    if said == "unknown":
        said = status(load(run.dir) or run)
    return said not in ("running", "unknown")


def status(run: Run) -> str:
    living = alive(run)
    if run.verdict is not None and not living:
        return run.verdict.status
    return {True: "running", None: "unknown", False: "lost"}[living]
