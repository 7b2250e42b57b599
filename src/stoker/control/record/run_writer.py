"""Writes a run directory. Every file survives a crash at any byte: JSON files are replaced, lines are appended whole.

Secrets are masked (contract/masking.py) in all text except what ranks print: their logs are not changed.
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
VERDICT_RESERVE = 1 << 16  # bytes of disk space reserved at the start
EVENTS_RESERVE = 1 << 16


@frozen
class LostOutput:
    """Counts the bytes of one file that could not be written, and says why."""

    bytes: int
    why: str


class RunWriter:
    """The only writer of a run directory, owned by the launcher. If a write fails, it counts the lost bytes and goes on."""

    def __init__(self, run_dir: str, host: str, reopened: bool) -> None:
        self.dir = run_dir
        self._host = host
        self._logs: dict[str, int] = {}
        self._lost: dict[str, LostOutput] = {}
        self._history: HistoryWriter | None = None
        try:
            # Stays open until the end, to notice when another folder takes this one's name.
            self._folder = _open_own_dir(run_dir)
            if reopened:
                # Keep the previous start's verdict under another name: it would be taken for this start's.
                verdict = os.path.join(run_dir, layout.VERDICT)
                if os.path.exists(verdict):
                    os.replace(verdict, os.path.join(run_dir, f"verdict-before-{int(time.time())}.json"))
            self._events = os.open(os.path.join(run_dir, layout.EVENTS), APPEND, 0o644)
            self._console = os.open(os.path.join(run_dir, layout.CONSOLE), APPEND, 0o644)
            self._reserve = _reserve_space(os.path.join(run_dir, layout.RESERVE))
        except OSError as problem:
            raise cannot_write(os.path.dirname(run_dir), problem) from problem

    def record_start(self, run: dict[str, Any], first_attempt: int) -> str:
        """Write run.json and the first event, and link `latest` to the run.

        Returns a line to print if the link could not be set, else "". Raises Refusal if the disk is full.
        """
        root = os.path.dirname(self.dir)
        try:
            data = {"schema": layout.SCHEMA, **mask_json(run)}
            write_json(os.path.join(self.dir, layout.RUN), data, durable=False)  # fsync would delay the ranks
            offset = os.fstat(self._console).st_size  # where the launcher's lines of this start begin
            start = {"began": run["started"], "attempt": first_attempt, "console_at": offset}
            os.write(self._events, self._event_line("run", start))
        except OSError as problem:
            raise cannot_write(root, problem) from problem
        link = os.path.join(root, layout.LATEST)
        temporary = temporary_name(link)
        try:
            os.symlink(os.path.basename(self.dir), temporary)
            try:
                os.replace(temporary, link)
            except OSError:
                os.unlink(temporary)
                raise
        except OSError as problem:  # another user's link, or a file system without links
            effect = "commands without a RUN still use your newest run"
            return f"{escape(link)} could not be updated: {problem.strerror}; {effect}"
        return ""

    def _event_line(self, kind: str, fields: dict[str, Any]) -> bytes:
        event = {"schema": layout.SCHEMA, "time": round(time.time(), 6), "event": kind, "host": self._host}
        event |= mask_json(fields)
        return json.dumps(event, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"

    def event(self, kind: str, **fields: Any) -> None:
        """Append an event to events.jsonl."""
        self._append(self._events, self._event_line(kind, fields), layout.EVENTS)

    def write_console_line(self, line: str) -> None:
        """Append one of the launcher's lines to its log."""
        self._append(self._console, mask_text(line).encode("utf-8", "backslashreplace") + b"\n", layout.CONSOLE)

    def _is_in_place(self) -> bool:
        """Return whether the path still leads to the run directory that was opened."""
        try:
            return os.path.samestat(os.fstat(self._folder), os.lstat(self.dir))
        except OSError:
            return False

    def require_unmoved(self) -> None:
        """Raise Refusal if the run directory was replaced, because ranks would resume from the files of another one."""
        if not self._is_in_place():
            moved = f"the run directory {escape(self.dir)} was moved or replaced during the run"
            fix = "start it again with --runs-dir and a folder that only you can write to"
            line = f"{moved}, so its ranks are not started; {fix}"
            raise errors.Refusal(line, errors.EX_CANTCREAT, cause="launch.runs-dir")

    def create_attempt_dir(self, number: int) -> None:
        """Create the folder of an attempt."""
        self.require_unmoved()
        try:
            os.makedirs(layout.attempt_dir(self.dir, number), exist_ok=True)
            self._remove_progress()
        except OSError as problem:
            raise cannot_write(self.dir, problem) from problem

    def _remove_progress(self) -> None:
        """Remove the progress file, which a killed rank leaves."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(layout.PROGRESS, dir_fd=self._folder)

    def append_output(self, path: str, data: bytes) -> None:
        """Append a rank's output, unchanged, to its log."""
        fd = self._logs.get(path)
        if fd is None:
            try:
                fd = os.open(path, APPEND, 0o644)
            except OSError as problem:
                self._count_lost(path, len(data), problem)
                return
            self._logs[path] = fd
        self._append(fd, data, path)

    def close_logs(self) -> None:
        for fd in self._logs.values():
            os.close(fd)
        self._logs.clear()

    def write_history_point(self, point: HistoryPoint) -> None:
        """Append a point to the run's history."""
        if self._history is None:
            from stoker.control.record.history import HistoryWriter  # the launch does not need it

            self._history = HistoryWriter(self._folder, self._count_lost)
        self._history.write(point)

    def close_history(self) -> None:
        """Close the history at the end of an attempt; the next attempt appends to the same files."""
        if self._history is not None:
            self._history.close()
            self._history = None

    def _append(self, fd: int, data: bytes, name: str) -> None:
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(fd, view) :]
            except OSError as problem:
                if fd == self._events and problem.errno in FULL and self._free_events_reserve():
                    continue
                self._count_lost(name, len(view), problem)
                return

    def _count_lost(self, name: str, count: int, problem: OSError) -> None:
        before = self._lost[name].bytes if name in self._lost else 0
        self._lost[name] = LostOutput(before + count, problem.strerror or str(problem))

    def _free_events_reserve(self) -> bool:
        """Free the space that is reserved for the last events. Return False if it was freed before."""
        if os.fstat(self._reserve).st_size <= VERDICT_RESERVE:
            return False
        os.ftruncate(self._reserve, VERDICT_RESERVE)
        return True

    def pop_lost_output(self) -> dict[str, LostOutput]:
        """Return what could not be written since the last call, by file."""
        lost, self._lost = self._lost, {}
        return lost

    def save(self, path: str, data: Any, durable: bool = True) -> None:
        """Replace a file with a text, or with a value as JSON, both masked."""
        if not self._is_in_place():
            self._count_lost(path, 1, OSError(errno.ESTALE, "the run directory was moved or replaced"))
            return
        try:
            if isinstance(data, str):
                fd = os.open(path, (APPEND & ~os.O_APPEND) | os.O_TRUNC, 0o644)
                with os.fdopen(fd, "w", encoding="utf-8", errors="backslashreplace") as file:
                    file.write(mask_text(data))
            else:
                write_json(path, mask_json(data), durable)
        except OSError as problem:
            self._count_lost(path, 1, problem)

    def write_verdict(self, verdict: Verdict) -> None:
        """Write the verdict into the space that was reserved at the start: the disk may be full by now."""
        path = os.path.join(self.dir, layout.VERDICT)
        text = json.dumps(mask_json(verdict.to_json()), indent=1, ensure_ascii=False)
        data = text.encode("utf-8", "backslashreplace") + b"\n"
        if len(data) > VERDICT_RESERVE:
            self.save(path, verdict.to_json())
        else:
            try:
                os.pwrite(self._reserve, data, 0)
                os.ftruncate(self._reserve, len(data))
                os.fsync(self._reserve)
                os.rename(layout.RESERVE, layout.VERDICT, src_dir_fd=self._folder, dst_dir_fd=self._folder)
            except OSError as problem:
                self._count_lost(path, len(data), problem)
        with contextlib.suppress(OSError):  # the disk may be read-only by now; the run is over in any case
            self._remove_progress()
        self.event("verdict", **pick_fields(verdict, "status", "cause", "rank", "exit_code", "summary"))


def _open_own_dir(run_dir: str) -> int:
    """Return a descriptor of a run directory. Raises Refusal if it is a link or another user's."""
    try:
        fd = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as problem:
        if problem.errno not in (errno.ELOOP, errno.ENOTDIR):  # a link, a file
            raise
    else:
        if safe_io.is_own_uid(os.fstat(fd).st_uid, os.path.dirname(run_dir)):
            return fd
        os.close(fd)
    line = f"the run directory {escape(run_dir)} is a link, a file or another user's folder; choose another name with --name"
    raise errors.Refusal(line, errors.EX_NOPERM)


def _reserve_space(path: str) -> int:
    """Open a file and reserve disk blocks in it for the verdict and the last events. Return its descriptor.

    If the file system can't reserve blocks, the file is empty. Raises OSError if the disk or the quota is full.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    try:
        os.posix_fallocate(fd, 0, VERDICT_RESERVE + EVENTS_RESERVE)
    except OSError as problem:
        if problem.errno in FULL:
            os.close(fd)
            os.unlink(path)
            raise
    return fd


def make_private(root: str) -> None:
    """Create the folder of private runs (layout.private_runs_root). Raises PermissionError if another user could write to it."""
    base = os.path.dirname(os.path.dirname(root))
    os.makedirs(base, mode=0o700, exist_ok=True)
    problem = safe_io.why_shared(base)
    if problem:
        raise PermissionError(errno.EACCES, f"{base} can't be used: {problem}")
    os.makedirs(root, mode=0o700, exist_ok=True)


def cannot_write(folder: str, problem: OSError) -> errors.Refusal:
    """Return the refusal for a runs folder that can't be written."""
    is_full = problem.errno in FULL
    why = "its disk or quota is full" if is_full else problem.strerror or str(problem)
    fix = f"{'make room, or ' if is_full else ''}choose another with --runs-dir"
    line = f"the runs folder {folder} can't be written: {why}; {fix}"
    return errors.Refusal(line, errors.EX_CANTCREAT, cause="launch.no-space" if is_full else "launch.runs-dir")
