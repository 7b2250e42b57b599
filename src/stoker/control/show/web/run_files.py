"""Reads the texts and files of runs for the page: logs, the verdict with its stacks, rollouts, checkpoints, reports.

This module escapes control characters and the page inserts texts as text nodes, so HTML and terminal codes in a log are
shown and not interpreted.
"""

from __future__ import annotations

import math
import os
import re
import stat
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import IO, Any

from stoker.contract import checkpoints, layout, safe_io
from stoker.contract.evidence import Verdict
from stoker.contract.safe_io import open_below
from stoker.contract.text import escape, escape_lines, parse_json, truncate_json
from stoker.control.record import log_tail, rollouts_log, run_index, run_record
from stoker.control.show.job_view import open_run_tail
from stoker.control.show.run_tail import RunTail
from stoker.control.show.web.rank_timeline import RankTimeline

_MAX_OPEN = 8  # runs whose curves and timelines stay in memory
LOG_BYTES = 96 << 10  # in one answer
_MAX_SEARCHED = 64 << 20  # bytes at the end of a log that a search reads; a run of weeks writes gigabytes
_MAX_MATCHES = 300
_STACK_BYTES = 128 << 10
_MAX_STACKS = 20  # files of stacks that are shown
_MAX_FILES = 1000  # in the list
_MAX_DEPTH = 3  # levels of folders that are listed
_ROWS = 40  # lines of a JSON-lines file in one answer
_ROW_BYTES = 64 << 10  # longer lines are cut
_ROLLOUTS = 32  # completions in one answer
_ROLLOUT_BYTES = 2 * rollouts_log.MAX_LINE  # read for one answer
_ROLLOUT_TEXT = 4000  # characters of a prompt or a completion
_ROLLOUT_PARTS = 20  # parts of a reward that are shown
MAX_SERVED = 32 << 20  # bytes; a file is held in memory until the browser has received it
# Files of other types are served as plain text. HTML gets the sandbox policy of access.py.
TYPES = {".html": "text/html; charset=utf-8", ".png": "image/png"}
_TEXT = (".md", ".txt", ".json", ".jsonl", ".yaml", ".yml", ".log", ".csv", ".svg", ".py")
_RECORD = (layout.RUN, layout.EVENTS, layout.VERDICT, layout.METRICS, layout.CONSOLE, layout.RESERVE, "config.yaml")

Explain = Callable[[run_record.RunRecord], Verdict | None]


class PageNotFound(Exception):
    """A request can't be answered; the text is one line for the page."""


class RunFolders:
    """Finds the runs that the page may read, by name. They lie directly in the runs folder and are not links.

    With `everybody` it includes the runs of other users that this process may read.
    """

    def __init__(self, root: str, everybody: bool = False) -> None:
        self.root, self._everybody = root, everybody
        self._open: OrderedDict[str, tuple[RunTail, RankTimeline]] = OrderedDict()

    def path(self, name: str) -> str:
        """Return the path of a run. Raises PageNotFound for links, other users' folders and anything outside the root."""
        path = os.path.join(self.root, name)
        if not name or "/" in name or "\0" in name or name in (".", ".."):
            raise PageNotFound("no such run")
        try:
            status = os.lstat(path)
        except (OSError, ValueError):
            raise PageNotFound("this run does not exist or was deleted") from None
        is_ours = safe_io.is_own_uid(status.st_uid, self.root)
        if not stat.S_ISDIR(status.st_mode) or not (is_ours or self._everybody):
            raise PageNotFound("no such run")
        return path

    def record(self, name: str) -> run_record.RunRecord:
        path = self.path(name)
        try:
            record = run_record.read_run(path)
        except (run_record.DamagedRecord, OSError) as problem:
            raise PageNotFound(escape(f"the record of this run is damaged: {problem}", 300)) from None
        if record is None:
            raise PageNotFound("this folder contains no run")
        return record

    def open(self, name: str) -> tuple[RunTail, RankTimeline]:
        """Return a run's tail, after reading what is new, and its timeline. The newest _MAX_OPEN stay in memory."""
        record = self.record(name)
        cached = self._open.pop(record.dir, None)
        tail, timeline = cached if cached is not None else (open_run_tail(record), RankTimeline(record))
        tail.record = record
        tail.view(time.time(), watched=True)
        trainer = tail.training.record
        if timeline.dir != trainer.dir:  # a multi-role job has no history, so show its trainer's
            timeline = RankTimeline(trainer, record if tail.training is not tail else None, tail.first_rank)
        self._open[record.dir] = tail, timeline
        while len(self._open) > _MAX_OPEN:
            self._open.popitem(last=False)
        return tail, timeline


def escape_output(data: bytes) -> str:
    """Return a rank's output as lines. Carriage returns of progress bars end a line; control characters are escaped."""
    return log_tail.strip_control_codes(data).decode()


def escape_json(value: Any) -> Any:
    """Escape all strings in a JSON value. Numbers that are not finite become strings, because browsers reject them."""
    if isinstance(value, str):
        return escape_lines(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: escape_json(item) for key, item in value.items()}
    return [escape_json(item) for item in value] if isinstance(value, (list, tuple)) else value


# ---- logs ----


def _log_path(attempt: int | None, rank: int | None) -> str:
    """Return the path of a rank's log in the run directory. Rank None selects the log of Stoker's lines."""
    return layout.CONSOLE if rank is None else f"attempt-{attempt}/rank-{rank}.log"


def read_log(folders: RunFolders, run: str, attempt: int | None, rank: int | None, begin: int | None) -> dict[str, Any]:
    """Return part of a log, from byte `begin` on, or its end if `begin` is None. Rank None selects the log of Stoker's lines."""
    record = folders.record(run)
    logs = [(log_attempt, log_rank) for log_attempt, log_rank, _ in log_tail.list_rank_logs(record)]
    attempts = sorted({log_attempt for log_attempt, _ in logs})
    attempt = attempt if attempt is not None else max(attempts, default=0)
    answer: dict[str, Any] = {
        "attempts": attempts,
        "attempt": attempt,
        "ranks": [log_rank for log_attempt, log_rank in logs if log_attempt == attempt],
    }
    try:
        with os.fdopen(open_below(record.dir, _log_path(attempt, rank)), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            start = max(0, size - LOG_BYTES) if begin is None else max(0, min(begin, size))
            file.seek(start)
            data = file.read(LOG_BYTES)
    except FileNotFoundError:
        return {**answer, "text": "", "begin": 0, "end": 0, "size": 0}
    except OSError as problem:
        raise PageNotFound(f"this log can't be read: {problem.strerror}") from None
    if begin is None and start:
        first_line = data.find(b"\n") + 1
        start, data = start + first_line, data[first_line:]
    data = _drop_incomplete_character(data)
    return {**answer, "text": escape_output(data), "begin": start, "end": start + len(data), "size": size}


def _drop_incomplete_character(data: bytes) -> bytes:
    """Drop an incomplete UTF-8 character or CR LF at the end; the next read gets it whole."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte < 0x80:
            return data[:-1] if data.endswith(b"\r") else data
        if byte >= 0xC0:
            length = 2 + (byte >= 0xE0) + (byte >= 0xF0)
            return data[:-back] if length > back else data
    return data


def search_log(folders: RunFolders, run: str, attempt: int | None, rank: int | None, text: str) -> dict[str, Any]:
    """Return the lines that contain `text`, ignoring case, newest last. Searches only the last 64 MB of a long log."""
    record = folders.record(run)
    attempt = attempt if attempt is not None else max(record.attempts, default=0)
    try:
        with os.fdopen(open_below(record.dir, _log_path(attempt, rank)), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            start = max(0, size - _MAX_SEARCHED)
            file.seek(start)
            data = file.read(_MAX_SEARCHED)
    except OSError as problem:
        raise PageNotFound(f"this log can't be read: {problem.strerror}") from None
    matches: list[tuple[int, bytes]] = []
    count = position = 0
    pattern = re.compile(re.escape(text.encode("utf-8", "replace")), re.IGNORECASE)
    while position < len(data) and (match := pattern.search(data, position)):
        begin = data.rfind(b"\n", 0, match.start()) + 1
        end = data.find(b"\n", match.end())
        end = len(data) if end < 0 else end
        matches.append((begin, data[begin : min(end, begin + 2000)]))
        count += 1
        if len(matches) > 2 * _MAX_MATCHES:
            del matches[:-_MAX_MATCHES]
        position = end + 1
    lines = [{"at": start + begin, "text": escape_output(line)} for begin, line in matches[-_MAX_MATCHES:]]
    return {"count": count, "matches": lines, "searched": len(data), "size": size}


# ---- how a run ended ----


def read_ending(folders: RunFolders, run: str, explain: Explain) -> dict[str, Any]:
    """Return the verdict, the watch's reports during the run, and the stacks."""
    record = folders.record(run)
    verdict = explain(record)
    reports = []
    for event in record.events():
        if event["event"] in ("suspicion", "busy", "straggler", "straggler-over", "numbers", "relief", "restart"):
            evidence = event.get("evidence")
            lines = [escape(str(line), 2000) for line in evidence[:50]] if isinstance(evidence, list) else []
            reports.append(
                {
                    "time": event["time"],
                    "kind": event["event"],
                    "rank": event.get("rank") if type(event.get("rank")) is int else None,
                    "text": escape(str(event.get("summary") or event.get("cause") or ""), 1000),
                    "evidence": lines,
                }
            )
    return {
        "verdict": escape_json(verdict.to_json() if verdict is not None else None),
        "told": reports[-100:],
        "stacks": list(_read_stacks(record)),
    }


def _read_stacks(record: run_record.RunRecord) -> Iterator[dict[str, Any]]:
    """Yield the stack files of the newest attempt: first all ranks' stacks at the last suspicion, then the files of each rank."""
    for attempt in record.attempts[-1:]:
        folder = f"attempt-{attempt}"
        try:
            names = sorted(os.listdir(os.path.join(record.dir, folder)))
        except OSError:
            return
        names = [name for name in names if name == "stacks.txt" or name.endswith((".stack.txt", ".error.json"))]
        for name in sorted(names, key=lambda name: name != "stacks.txt")[:_MAX_STACKS]:
            try:
                with os.fdopen(open_below(record.dir, f"{folder}/{name}"), "rb") as file:
                    text = escape_output(file.read(_STACK_BYTES))
            except OSError as problem:
                text = f"can't be read: {problem.strerror}"
            yield {"name": escape(f"{folder}/{name}", 200), "text": text}


# ---- files ----


def list_files(folders: RunFolders, run: str) -> dict[str, Any]:
    run_dir = folders.path(run)
    files = sorted(
        (file for file in _walk(run_dir, "") if file["kind"] != "checkpoint"), key=lambda file: str(file["path"])
    )
    newest = checkpoints.find_newest_checkpoint(run_dir)
    saved = []
    try:
        with os.scandir(os.path.join(run_dir, layout.CHECKPOINTS)) as entries:
            steps = sorted(entries, key=lambda entry: entry.name)
        for entry in steps:
            status = entry.stat(follow_symlinks=False)
            is_dir = entry.is_dir(follow_symlinks=False)
            size = sum(file["size"] for file in _walk(entry.path, "")) if is_dir else status.st_size
            is_newest = newest is not None and os.path.basename(newest.path) == entry.name
            name = escape(entry.name, 200)
            saved.append({"name": name, "size": size, "time": status.st_mtime, "newest": is_newest})
    except OSError:
        pass  # the run has saved no checkpoint
    return {"files": files[:_MAX_FILES], "checkpoints": saved}


def _walk(root: str, below: str, depth: int = 0) -> Iterator[dict[str, Any]]:
    """Yield the regular files below the folder `below`, a path in `root` that is empty or ends with a slash."""
    try:
        with os.scandir(os.path.join(root, below)) as scan:
            entries = list(scan)
    except OSError:
        return
    for entry in entries:
        path = f"{below}{entry.name}"
        try:
            status = entry.stat(follow_symlinks=False)
        except OSError:
            continue  # the file was deleted in the meantime
        if stat.S_ISDIR(status.st_mode) and depth < _MAX_DEPTH:
            yield from _walk(root, path + "/", depth + 1)
        elif stat.S_ISREG(status.st_mode):
            kind = "" if escape(path) != path else kind_of(path)
            yield {"path": escape(path, 300), "size": status.st_size, "time": status.st_mtime, "kind": kind}


def kind_of(path: str) -> str:
    """Return the kind of a file: report, picture, rows (rollouts, samples, answers), record, text, checkpoint, or "" if hidden."""
    name = os.path.basename(path)
    extension = os.path.splitext(name)[1]
    if path.startswith(f"{layout.CHECKPOINTS}/"):
        return "checkpoint"
    if extension == ".html" or name in ("report.md", "diversity_report.md"):
        return "report"
    if extension == ".png":
        return "picture"
    if name in _RECORD or path.startswith(("attempt-", "history/")):
        return "record" if extension in _TEXT else ""
    if extension == ".jsonl":
        return "rows"
    return "text" if extension in _TEXT else ""


def _open_file(folders: RunFolders, run: str, path: str) -> IO[bytes]:
    """Open a file of a run without following links. Raises PageNotFound for hidden files and for paths outside the run."""
    run_dir = folders.path(run)
    if any(part in ("", ".", "..") or "\0" in part for part in path.split("/")) or not kind_of(path):
        raise PageNotFound("no such file")
    try:
        return os.fdopen(open_below(run_dir, path), "rb")
    except (OSError, ValueError):
        raise PageNotFound("no such file") from None


def read_file(folders: RunFolders, run: str, path: str) -> tuple[bytes, str]:
    """Return (bytes, content type) of a file of the run."""
    try:
        with _open_file(folders, run, path) as file:
            data = file.read(MAX_SERVED + 1)
    except OSError:
        raise PageNotFound("no such file") from None
    if len(data) > MAX_SERVED:
        raise PageNotFound(f"this file is larger than {MAX_SERVED >> 20} MB: {escape(path, 200)}")
    return data, TYPES.get(os.path.splitext(path)[1], "text/plain; charset=utf-8")


def read_rows(folders: RunFolders, run: str, path: str, begin: int) -> dict[str, Any]:
    """Return lines of a JSON-lines file from byte `begin` on. A line that is not JSON is returned as text."""
    if kind_of(path) != "rows":
        raise PageNotFound("no such file")
    lines: list[str] = []
    try:
        with _open_file(folders, run, path) as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, min(begin, size)))
            while len(lines) < _ROWS and (line := file.readline(_ROW_BYTES)):
                lines.append(line.decode("utf-8", "replace"))
            end = file.tell()
    except OSError:
        raise PageNotFound("no such file") from None
    return {"rows": [_json_or_text(line) for line in lines], "begin": begin, "end": end, "size": size}


def _json_or_text(line: str) -> Any:
    try:
        return escape_json(truncate_json(parse_json(line), 16_000))
    except ValueError:
        return escape(line.rstrip("\n"), 4000)


# ---- rollouts and reports ----


def read_rollouts(folders: RunFolders, run: str, before: int | None) -> dict[str, Any]:
    """Return the newest completions of a GRPO run, or older ones that end at byte `before`, the newest step first.

    Texts are cut and escaped. `begin` in the answer is the `before` of the next page, or 0 if this is the oldest.
    """
    run_dir = folders.path(run)
    path = run_index.find_file(run_dir, layout.ROLLOUTS)
    if path is None:
        raise PageNotFound("no rollouts yet: stage grpo writes them, unless grpo.rollouts_mb is 0")
    try:
        with os.fdopen(open_below(run_dir, path), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            end = size if before is None else max(0, min(before, size))
            begin = max(0, end - _ROLLOUT_BYTES)
            file.seek(begin)
            data = file.read(end - begin)
    except (OSError, ValueError):
        raise PageNotFound("the rollouts can't be read") from None
    if begin:  # the first line is incomplete
        first_line = data.find(b"\n") + 1
        begin, data = begin + first_line, data[first_line:]
    lines = data[: data.rfind(b"\n") + 1].splitlines(keepends=True)
    begin += sum(map(len, lines[:-_ROLLOUTS]))
    rollouts = [rollout for line in lines[-_ROLLOUTS:] if (rollout := _rollout_to_json(line)) is not None]
    rollouts.sort(key=lambda rollout: -rollout["step"])  # stable: rollouts of one step keep the file's order
    return {"rollouts": rollouts, "begin": begin, "size": size}


def _rollout_to_json(line: bytes) -> dict[str, Any] | None:
    try:
        data = parse_json(line.decode("utf-8", "replace"))
    except ValueError:
        return None
    rollout = rollouts_log.parse_rollout(data) if isinstance(data, dict) else None
    if rollout is None:
        return None
    numbers = {name: getattr(rollout, name) for name in ("step", "row", "reward", "correct", "tokens", "cut")}
    parts = {escape(name, 60): value for name, value in list(rollout.parts.items())[:_ROLLOUT_PARTS]}
    texts = {"prompt": _cut_text(_format_prompt(rollout.prompt)), "completion": _cut_text(rollout.answer)}
    return {**numbers, "parts": parts if len(rollout.parts) > 1 else {}, **texts}


def _format_prompt(prompt: Any) -> str:
    """Return a prompt as text. If it has several messages, each begins with its role."""
    messages = [message for message in prompt if isinstance(message, dict)] if isinstance(prompt, list) else []
    if not messages:
        return prompt if isinstance(prompt, str) else str(prompt)
    if len(messages) == 1:
        return str(messages[0].get("content"))
    return "\n\n".join(f"{message.get('role')}: {message.get('content')}" for message in messages)


def _cut_text(text: str) -> str:
    """Escape a text, or its beginning with the length of the whole if it is too long."""
    beginning = str(truncate_json(text, _ROLLOUT_TEXT + 64))
    return escape_lines(beginning) + (f" … ({len(text):,} characters)" if len(beginning) < len(text) else "")


def list_reports(folders: RunFolders) -> dict[str, Any]:
    """Return the newest reports of speedruns, whose folders are in the runs folder."""
    reports = []
    try:
        names = sorted(os.listdir(folders.root), reverse=True)
    except OSError:
        names = []
    for name in names:
        try:
            status = os.lstat(os.path.join(folders.path(name), "report.html"))
        except (PageNotFound, OSError):
            continue
        if stat.S_ISREG(status.st_mode) and escape(name) == name:
            reports.append({"run": name, "time": status.st_mtime})
    return {"reports": reports[:50]}
