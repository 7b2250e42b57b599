"""Writes a run directory. Every file survives a crash at any byte: JSON is replaced, JSON lines are appended whole.

Text is masked (contract/masking.py) when it is written, but not what ranks print: their logs are kept as they came.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import time
from typing import Any

from stoker.contract import errors, layout, safe_io
from stoker.contract.evidence import Verdict
from stoker.contract.frozen import frozen, pick_fields
from stoker.contract.masking import mask_json, mask_text
from stoker.contract.safe_io import APPEND, temporary_name, write_json
from stoker.contract.text import escape

TYPE_CHECKING = False
if TYPE_CHECKING:
    from stoker.control.record.history import HistoryPoint, HistoryWriter

FULL = (errno.ENOSPC, errno.EDQUOT)
VERDICT_ROOM = 1 << 16
EVENTS_ROOM = 1 << 16


@frozen
class Lost:
    """What could not be written to one file, and why."""

    bytes: int
    why: str


class RunWriter:
    """The run directory's one writer, the coordinator's. What can't be written is counted, and the run goes on."""

    def __init__(self, run_dir: str, host: str, reopened: bool) -> None:
        self.dir = run_dir
        self._host = host
        self._logs: dict[str, int] = {}
        self._lost: dict[str, Lost] = {}
        self._history: HistoryWriter | None = None
        root = os.path.dirname(run_dir)
        try:
            # Held open to the end: another folder under the same name is not this run's.
            self._folder = _open_own(run_dir)
            if reopened:
                self._put_verdict_aside()
            self._events = os.open(os.path.join(run_dir, layout.EVENTS), APPEND, 0o644)
            self._console = os.open(os.path.join(run_dir, layout.CONSOLE), APPEND, 0o644)
            self._reserve = _reserve(os.path.join(run_dir, layout.RESERVE))
        except OSError as problem:
            raise cannot_write(root, problem) from problem

    def begin(self, run: dict[str, Any], first_attempt: int) -> str:
        """run.json, first event, link to the newest run. The last chance to refuse a full disk. Returns a notice."""
        try:
            data = {"schema": layout.SCHEMA, **mask_json(run)}
            write_json(os.path.join(self.dir, layout.RUN), data, durable=False)  # ranks wait for this one
            at = os.fstat(self._console).st_size  # where the launcher's lines of this start begin
            start = {"began": run["started"], "attempt": first_attempt, "console_at": at}
            os.write(self._events, self._line("run", start))
        except OSError as problem:
            raise cannot_write(os.path.dirname(self.dir), problem) from problem
        return self._point_latest()

    def _point_latest(self) -> str:
        """Why the link was not set: another user's, or a file system without links. Nothing depends on it."""
        link = os.path.join(os.path.dirname(self.dir), layout.LATEST)
        temporary = temporary_name(link)
        try:
            os.symlink(os.path.basename(self.dir), temporary)
            try:
                os.replace(temporary, link)
            except OSError:
                os.unlink(temporary)
                raise
        except OSError as problem:
            newest = "commands without a RUN take your newest run all the same"
            return f"{escape(link)} stays as it is: {problem.strerror}; {newest}"
        return ""

    def _put_verdict_aside(self) -> None:
        """The verdict of the attempts before is not this start's: kept under another name."""
        old = os.path.join(self.dir, layout.VERDICT)
        if os.path.exists(old):
            os.replace(old, os.path.join(self.dir, f"verdict-before-{int(time.time())}.json"))

    def _line(self, kind: str, more: dict[str, Any]) -> bytes:
        event = {"schema": layout.SCHEMA, "time": round(time.time(), 6), "event": kind, "host": self._host}
        event |= mask_json(more)
        return json.dumps(event, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"

    def event(self, kind: str, **more: Any) -> None:
        self._append(self._events, self._line(kind, more), layout.EVENTS)

    def say(self, line: str) -> None:
        self._append(self._console, mask_text(line).encode("utf-8", "backslashreplace") + b"\n", layout.CONSOLE)

    def _is_in_place(self) -> bool:
        """Whether the run directory is still the one that this run began in."""
        try:
            return os.path.samestat(os.fstat(self._folder), os.lstat(self.dir))
        except OSError:
            return False

    def require_place(self) -> None:
        """Refused where ranks would find another run directory, and resume from what lies in that."""
        if not self._is_in_place():
            moved = f"the run directory {escape(self.dir)} was moved or replaced during the run"
            fix = "start the run again with --runs-dir and a folder that is yours alone"
            line = f"{moved}: no ranks are started there; {fix}"
            raise errors.Refusal(line, errors.EX_CANTCREAT, cause="launch.runs-dir")

    def attempt(self, number: int) -> None:
        """Its folder."""
        self.require_place()
        try:
            folder = layout.attempt_dir(self.dir, number)
            os.makedirs(folder, exist_ok=True)
            self._forget_progress()
        except OSError as problem:
            raise cannot_write(self.dir, problem) from problem

    def _forget_progress(self) -> None:
        """Of a rank that was killed in the middle of something."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(layout.PROGRESS, dir_fd=self._folder)

    def output(self, path: str, data: bytes) -> None:
        """A rank's bytes, to its file, as they came."""
        handle = self._logs.get(path)
        if handle is None:
            try:
                handle = os.open(path, APPEND, 0o644)
            except OSError as problem:
                self._lose(path, len(data), problem)
                return
            self._logs[path] = handle
        self._append(handle, data, path)

    def close_logs(self) -> None:
        for handle in self._logs.values():
            os.close(handle)
        self._logs.clear()

    def moment(self, moment: HistoryPoint) -> None:
        """Of the run's history."""
        if self._history is None:
            from stoker.control.record.history import HistoryWriter  # no launch waits for it

            self._history = HistoryWriter(self._folder, self._lose)
        self._history.write(moment)

    def close_history(self) -> None:
        """At the end of an attempt: the next one goes on in the same files."""
        if self._history is not None:
            self._history.close()
            self._history = None

    def _append(self, handle: int, data: bytes, name: str) -> None:
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(handle, view) :]
            except OSError as problem:
                if handle == self._events and problem.errno in FULL and self._give_up_reserve():
                    continue
                self._lose(name, len(view), problem)
                return

    def _lose(self, name: str, count: int, problem: OSError) -> None:
        before = self._lost[name].bytes if name in self._lost else 0
        self._lost[name] = Lost(before + count, problem.strerror or str(problem))

    def _give_up_reserve(self) -> bool:
        """Frees the reserved space beyond the verdict's part, once: room for the last events."""
        if os.fstat(self._reserve).st_size <= VERDICT_ROOM:
            return False
        os.ftruncate(self._reserve, VERDICT_ROOM)
        return True

    def lost(self) -> dict[str, Lost]:
        """What could not be written since the last call, by file."""
        gone, self._lost = self._lost, {}
        return gone

    def save(self, path: str, data: Any, durable: bool = True) -> None:
        if not self._is_in_place():
            self._lose(path, 1, OSError(errno.ESTALE, "the run directory was moved or replaced"))
            return
        try:
            if isinstance(data, str):
                handle = os.open(path, (APPEND & ~os.O_APPEND) | os.O_TRUNC, 0o644)
                with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
                    file.write(mask_text(data))
            else:
                write_json(path, mask_json(data), durable)
        except OSError as problem:
            self._lose(path, 1, problem)

    def verdict(self, verdict: Verdict) -> None:
        """Into space that was reserved at the start: a disk that is full by now must not cost the run its ending."""
        path = os.path.join(self.dir, layout.VERDICT)
        text = json.dumps(mask_json(verdict.to_json()), indent=1, ensure_ascii=False)
        data = text.encode("utf-8", "backslashreplace") + b"\n"
        if len(data) > VERDICT_ROOM:
            self.save(path, verdict.to_json())
        else:
            try:
                os.pwrite(self._reserve, data, 0)
                os.ftruncate(self._reserve, len(data))
                os.fsync(self._reserve)
                os.rename(layout.RESERVE, layout.VERDICT, src_dir_fd=self._folder, dst_dir_fd=self._folder)
            except OSError as problem:
                self._lose(path, len(data), problem)
        with contextlib.suppress(OSError):  # a disk that is read-only by now: the run is over all the same
            self._forget_progress()
        self.event("verdict", **pick_fields(verdict, "status", "cause", "rank", "exit_code", "summary"))


def _open_own(run_dir: str) -> int:
    """A descriptor of a run directory that is a real folder and ours."""
    try:
        handle = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as problem:
        if problem.errno not in (errno.ELOOP, errno.ENOTDIR):  # a link, a file
            raise
    else:
        if safe_io.is_own_uid(os.fstat(handle).st_uid, os.path.dirname(run_dir)):
            return handle
        os.close(handle)
    line = f"the run directory {escape(run_dir)} is not a folder of yours; choose another with --name"
    raise errors.Refusal(line, errors.EX_NOPERM)


def _reserve(path: str) -> int:
    """With blocks allocated now, for the verdict and last events; where the file system can't, nothing is kept."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    try:
        os.posix_fallocate(handle, 0, VERDICT_ROOM + EVENTS_ROOM)
    except OSError as problem:
        if problem.errno in FULL:
            os.close(handle)
            os.unlink(path)
            raise
    return handle


def make_private(root: str) -> None:
    """The folder of private runs (layout.private_runs)."""
    base = os.path.dirname(os.path.dirname(root))
    os.makedirs(base, mode=0o700, exist_ok=True)
    problem = safe_io.why_shared(base)
    if problem:
        raise PermissionError(errno.EACCES, f"{base} can't be used: {problem}")
    os.makedirs(root, mode=0o700, exist_ok=True)


def cannot_write(folder: str, problem: OSError) -> errors.Refusal:
    full = problem.errno in FULL
    why = "its disk or quota is full" if full else problem.strerror or str(problem)
    line = f"the runs folder {folder} can't be written: {why}; {'make room, or ' if full else ''}choose another with --runs-dir"
    return errors.Refusal(line, errors.EX_CANTCREAT, cause="launch.no-space" if full else "launch.runs-dir")
