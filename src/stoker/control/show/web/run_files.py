"""Texts and files of a run: logs with search, the verdict with its stacks, reports, rollouts, checkpoints.

Control characters are escaped here; the page puts texts in as text. So a log full of HTML and terminal codes is read, not run.
"""

from __future__ import annotations

import math
import os
import re
import stat
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

from stoker.contract import checkpoints, layout, safe_io
from stoker.contract.evidence import Verdict
from stoker.contract.safe_io import open_below
from stoker.contract.text import escape, escape_lines, parse_json, truncate_json
from stoker.control.record import log_tail, run_index, run_record
from stoker.control.record import rollouts_log as rollout_records
from stoker.control.show.job_view import open_run_tail
from stoker.control.show.run_tail import RunTail
from stoker.control.show.web.rank_timeline import RankTimeline

pass

LOG_BYTES = 96 << 10  # of one answer
_SEARCHED = 64 << 20  # bytes at the end of a log: logs of weeks have gigabytes
_MATCHES = 300
_STACK_BYTES = 128 << 10
_MOST_TEXTS = 20
_MAX_FILES = 1000  # that are listed
_DEPTH = 3
_ROWS = 40
_ROW_BYTES = 64 << 10
_ROLLOUTS = 32  # completions of one answer
_ROLLOUT_BYTES = 2 * rollout_records.MAX_LINE  # of the file that one answer looks at
_ROLLOUT_TEXT = 4000  # characters of a prompt or a completion
_ROLLOUT_PARTS = 20  # of a reward
MAX_SERVED = 32 << 20  # bytes of a file: it is held in memory until the browser has it
# Anything else is shown as plain text, and a page is closed in (guard.SANDBOX).
TYPES = {".html": "text/html; charset=utf-8", ".png": "image/png"}
_TEXT = (".md", ".txt", ".json", ".jsonl", ".yaml", ".yml", ".log", ".csv", ".svg", ".py")
_OWN = (layout.RUN, layout.EVENTS, layout.VERDICT, layout.METRICS, layout.CONSOLE, layout.RESERVE, "config.yaml")

Explain = Callable[[run_record.RunRecord], Verdict | None]


def escape_output(data: bytes) -> str:
    """A rank's output as lines: a progress bar's carriage return ends one, everything else is escaped."""
    return log_tail.strip_control_codes(data).decode()


# ---- logs ----


def _log_path(attempt: int | None, rank: int | None) -> str:
    return layout.CONSOLE if rank is None else f"attempt-{attempt}/rank-{rank}.log"


def read_log(folders: RunFolders, run: str, attempt: int | None, rank: int | None, begin: int | None) -> dict[str, Any]:
    """`rank`: None for Stoker's own lines. `begin`: from this byte on; None: the end."""
    record = folders.record(run)
    logs = [(number, which) for number, which, _ in log_tail.rank_logs(record)]
    attempts = sorted({number for number, _ in logs})
    attempt = attempt if attempt is not None else max(attempts, default=0)
    answer: dict[str, Any] = {
        "attempts": attempts,
        "attempt": attempt,
        "ranks": [which for number, which in logs if number == attempt],
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
        cut = data.find(b"\n") + 1
        start, data = start + cut, data[cut:]
    data = _without_half(data)
    return {**answer, "text": escape_output(data), "begin": start, "end": start + len(data), "size": size}


def _without_half(data: bytes) -> bytes:
    """Without a character, or an end of line, whose second half is still to come."""
    for back in range(1, min(4, len(data)) + 1):
        sign = data[-back]
        if sign < 0x80:
            return data[:-1] if data.endswith(b"\r") else data
        if sign >= 0xC0:
            length = 2 + (sign >= 0xE0) + (sign >= 0xF0)
            return data[:-back] if length > back else data
    return data


def search_log(folders: RunFolders, run: str, attempt: int | None, rank: int | None, words: str) -> dict[str, Any]:
    """Lines that hold it, in any case; newest last. Of a long log the last 64 MB."""
    record = folders.record(run)
    attempt = attempt if attempt is not None else max(record.attempts, default=0)
    try:
        with os.fdopen(open_below(record.dir, _log_path(attempt, rank)), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            start = max(0, size - _SEARCHED)
            file.seek(start)
            data = file.read(_SEARCHED)
    except OSError as problem:
        raise PageNotFound(f"this log can't be read: {problem.strerror}") from None
    found, count = [], 0
    wanted = re.compile(re.escape(words.encode("utf-8", "replace")), re.IGNORECASE)
    at = 0
    while match := wanted.search(data, at):
        begin = data.rfind(b"\n", 0, match.start()) + 1
        end = data.find(b"\n", match.end())
        end = len(data) if end < 0 else end
        found.append((begin, data[begin : min(end, begin + 2000)]))
        count += 1
        found = found[-_MATCHES:] if len(found) > 2 * _MATCHES else found
        at = end + 1
        if at >= len(data):
            break
    lines = [{"at": start + begin, "text": escape_output(line)} for begin, line in found[-_MATCHES:]]
    return {"count": count, "matches": lines, "searched": len(data), "size": size}


# ---- how it ended ----


def read_ending(folders: RunFolders, run: str, explain: Explain) -> dict[str, Any]:
    record = folders.record(run)
    verdict = explain(record)
    suspicions = []
    for event in record.events():
        if event["event"] in ("suspicion", "busy", "straggler", "straggler-over", "numbers", "relief", "restart"):
            evidence = event.get("evidence")
            lines = [escape(str(line), 2000) for line in evidence[:50]] if isinstance(evidence, list) else []
            suspicions.append(
                {
                    "time": event["time"],
                    "kind": event["event"],
                    "rank": event.get("rank") if type(event.get("rank")) is int else None,
                    "text": escape(str(event.get("summary") or event.get("cause") or ""), 1000),
                    "evidence": lines,
                }
            )
    return {
        "verdict": _shown_deep(verdict.to_json() if verdict is not None else None),
        "told": suspicions[-100:],
        "stacks": list(_stacks(record)),
    }


def _shown_deep(value: Any) -> Any:
    if isinstance(value, str):
        return escape_lines(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has none, and a browser reads no other
    if isinstance(value, dict):
        return {key: _shown_deep(one) for key, one in value.items()}
    return [_shown_deep(one) for one in value] if isinstance(value, (list, tuple)) else value


def _stacks(record: run_record.RunRecord) -> Iterator[dict[str, Any]]:
    """Of the newest attempt: all ranks' stacks of the last suspicion, and each rank's own last words."""
    for attempt in record.attempts[-1:]:
        folder = f"attempt-{attempt}"
        try:
            names = sorted(os.listdir(os.path.join(record.dir, folder)))
        except OSError:
            return
        wanted = [name for name in names if name == "stacks.txt" or name.endswith((".stack.txt", ".error.json"))]
        for name in sorted(wanted, key=lambda name: name != "stacks.txt")[:_MOST_TEXTS]:
            try:
                with os.fdopen(open_below(record.dir, f"{folder}/{name}"), "rb") as file:
                    text = escape_output(file.read(_STACK_BYTES))
            except OSError as problem:
                text = f"can't be read: {problem.strerror}"
            yield {"name": escape(f"{folder}/{name}", 200), "text": text}


# ---- files ----


def list_files(folders: RunFolders, run: str) -> dict[str, Any]:
    place = folders.place(run)
    files = [one for one in _walk(place, "") if one["kind"] != "checkpoint"]
    newest = checkpoints.find_newest_checkpoint(place)
    saved = []
    try:
        with os.scandir(os.path.join(place, layout.CHECKPOINTS)) as entries:
            steps = sorted(entries, key=lambda entry: entry.name)
        for entry in steps:
            about = entry.stat(follow_symlinks=False)
            inside = entry.is_dir(follow_symlinks=False)
            size = sum(one["size"] for one in _walk(entry.path, "")) if inside else about.st_size
            is_newest = newest is not None and os.path.basename(newest.path) == entry.name
            name = escape(entry.name, 200)
            saved.append({"name": name, "size": size, "time": about.st_mtime, "newest": is_newest})
    except OSError:
        pass  # it has none
    return {"files": sorted(files, key=lambda one: str(one["path"]))[:_MAX_FILES], "checkpoints": saved}


def _walk(place: str, below: str, depth: int = 0) -> Iterator[dict[str, Any]]:
    try:
        with os.scandir(os.path.join(place, below)) as scanned:
            entries = list(scanned)
    except OSError:
        return
    for entry in entries:
        path = f"{below}{entry.name}"
        try:
            about = entry.stat(follow_symlinks=False)
        except OSError:
            continue  # gone meanwhile
        if stat.S_ISDIR(about.st_mode) and depth < _DEPTH:
            yield from _walk(place, path + "/", depth + 1)
        elif stat.S_ISREG(about.st_mode):
            kind = "" if escape(path) != path else kind_of(path)
            yield {"path": escape(path, 300), "size": about.st_size, "time": about.st_mtime, "kind": kind}


def kind_of(path: str) -> str:
    """report, picture, rows (rollouts, samples, answers), record, text, checkpoint, or empty: it is not shown."""
    name = os.path.basename(path)
    ending_ = os.path.splitext(name)[1]
    if path.startswith(f"{layout.CHECKPOINTS}/"):
        return "checkpoint"
    if ending_ == ".html" or name in ("report.md", "diversity_report.md"):
        return "report"
    if ending_ == ".png":
        return "picture"
    if name in _OWN or path.startswith(("attempt-", "history/")):
        return "record" if ending_ in _TEXT else ""
    if ending_ == ".jsonl":
        return "rows"
    return "text" if ending_ in _TEXT else ""


def read_file(folders: RunFolders, run: str, path: str) -> tuple[bytes, str]:
    """(bytes, content type) of a file of the run, by no link."""
    place = folders.place(run)
    parts = path.split("/")
    if any(part in ("", ".", "..") or "\0" in part for part in parts) or not kind_of(path):
        raise PageNotFound("no such file")
    try:
        with os.fdopen(open_below(place, path), "rb") as file:
            data = file.read(MAX_SERVED + 1)
    except (OSError, ValueError):
        raise PageNotFound("no such file") from None
    if len(data) > MAX_SERVED:
        raise PageNotFound(f"this file is larger than {MAX_SERVED >> 20} MB: {escape(path, 200)}")
    return data, TYPES.get(os.path.splitext(path)[1], "text/plain; charset=utf-8")


def read_rows(folders: RunFolders, run: str, path: str, begin: int) -> dict[str, Any]:
    """Lines of a JSON lines file from a byte on, as they stand there."""
    place = folders.place(run)
    if kind_of(path) != "rows" or any(part in ("", ".", "..") for part in path.split("/")):
        raise PageNotFound("no such file")
    lines: list[str] = []
    try:
        with os.fdopen(open_below(place, path), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, min(begin, size)))
            while len(lines) < _ROWS and (line := file.readline(_ROW_BYTES)):
                lines.append(line.decode("utf-8", "replace"))
            end = file.tell()
    except (OSError, ValueError):
        raise PageNotFound("no such file") from None
    return {"rows": [_json_or_text(line) for line in lines], "begin": begin, "end": end, "size": size}


def _json_or_text(line: str) -> Any:
    try:
        return _shown_deep(truncate_json(parse_json(line), 16_000))
    except ValueError:
        return escape(line.rstrip("\n"), 4000)


def read_rollouts(folders: RunFolders, run: str, before: int | None) -> dict[str, Any]:
    """Return the newest completions of a GRPO run, or those before the byte `before`: the newest step first.

    Texts are cut and escaped. `begin` is where the next, older page ends; 0: this is the oldest.
    """
    place = folders.place(run)
    path = run_index.find_file(place, layout.ROLLOUTS)
    if path is None:
        raise PageNotFound("no rollouts yet: stage grpo writes them, unless grpo.rollouts_mb is 0")
    try:
        with os.fdopen(open_below(place, path), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            end = size if before is None else max(0, min(before, size))
            begin = max(0, end - _ROLLOUT_BYTES)
            file.seek(begin)
            data = file.read(end - begin)
    except (OSError, ValueError):
        raise PageNotFound("the rollouts can't be read") from None
    if begin:  # the first line is cut
        begin += data.find(b"\n") + 1
        data = data[data.find(b"\n") + 1 :]
    lines = data[: data.rfind(b"\n") + 1].splitlines(keepends=True)
    begin += sum(map(len, lines[:-_ROLLOUTS]))
    found = [shown for line in lines[-_ROLLOUTS:] if (shown := _shown_rollout(line)) is not None]
    found.sort(key=lambda one: -one["step"])  # those of one step stay in the file's order
    return {"rollouts": found, "begin": begin, "size": size}


def _shown_rollout(line: bytes) -> dict[str, Any] | None:
    try:
        data = parse_json(line.decode("utf-8", "replace"))
    except ValueError:
        return None
    rollout = rollout_records.parse_rollout(data) if isinstance(data, dict) else None
    if rollout is None:
        return None
    numbers = {name: getattr(rollout, name) for name in ("step", "row", "reward", "correct", "tokens", "cut")}
    parts = {escape(name, 60): value for name, value in list(rollout.parts.items())[:_ROLLOUT_PARTS]}
    texts = {"prompt": _limited(_prompt_text(rollout.prompt)), "completion": _limited(rollout.answer)}
    return {**numbers, "parts": parts if len(rollout.parts) > 1 else {}, **texts}


def _prompt_text(prompt: Any) -> str:
    """Return a prompt as text; of several messages each with its role."""
    messages = [one for one in prompt if isinstance(one, dict)] if isinstance(prompt, list) else []
    if not messages:
        return prompt if isinstance(prompt, str) else str(prompt)
    if len(messages) == 1:
        return str(messages[0].get("content"))
    return "\n\n".join(f"{one.get('role')}: {one.get('content')}" for one in messages)


def _limited(text: str) -> str:
    """Return the beginning of a text without control codes, and how long it is if that is not all."""
    shown = str(truncate_json(text, _ROLLOUT_TEXT + 64))
    return escape_lines(shown) + (f" … ({len(text):,} characters)" if len(shown) < len(text) else "")


def list_reports(folders: RunFolders) -> dict[str, Any]:
    """Reports of chains of stages, which stand beside the runs."""
    found = []
    try:
        names = sorted(os.listdir(folders.root), reverse=True)
    except OSError:
        names = []
    for name in names:
        try:
            place = folders.place(name)
            about = os.lstat(os.path.join(place, "report.html"))
        except (PageNotFound, OSError):
            continue
        if stat.S_ISREG(about.st_mode) and escape(name) == name:
            found.append({"run": name, "time": about.st_mtime})
    return {"reports": found[:50]}


_MAX_OPEN = 8  # runs whose curves and timelines stay in memory


class PageNotFound(Exception):
    """One line for the page."""


class RunFolders:
    """`everybody`: other users' runs, too, as far as the system lets us read them."""

    def __init__(self, root: str, everybody: bool = False) -> None:
        self.root, self._everybody = root, everybody
        self._open: OrderedDict[str, tuple[RunTail, RankTimeline]] = OrderedDict()

    def place(self, name: str) -> str:
        """The path of a folder that is ours to show: no link, no way out of the runs folder."""
        path = os.path.join(self.root, name)
        if not name or "/" in name or "\0" in name or name in (".", ".."):
            raise PageNotFound("no such run")
        try:
            about = os.lstat(path)
        except (OSError, ValueError):
            raise PageNotFound("this run does not exist, or no longer does") from None
        mine = safe_io.is_own_uid(about.st_uid, self.root)
        if not stat.S_ISDIR(about.st_mode) or not (mine or self._everybody):
            raise PageNotFound("no such run")
        return path

    def record(self, name: str) -> run_record.RunRecord:
        path = self.place(name)
        try:
            run = run_record.read_run(path)
        except (run_record.Damaged, OSError) as problem:
            raise PageNotFound(escape(f"the record of this run is damaged: {problem}", 300)) from None
        if run is None:
            raise PageNotFound("there is no run in this folder")
        return run

    def watched(self, name: str) -> tuple[RunTail, RankTimeline]:
        """With all that is new in its files."""
        record = self.record(name)
        known = self._open.pop(record.dir, None)
        folder, timeline = known if known is not None else (open_run_tail(record), RankTimeline(record))
        folder.record = record
        folder.run(time.time(), watched=True)
        trainer = folder.training.record
        if timeline.dir != trainer.dir:  # a job has no history of its own: its trainer has
            timeline = RankTimeline(trainer, record if folder.training is not folder else None, folder.first_rank)
        self._open[record.dir] = folder, timeline
        while len(self._open) > _MAX_OPEN:
            self._open.popitem(last=False)
        return folder, timeline
