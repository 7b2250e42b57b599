"""Follows growing files: what a rank printed, whole lines at a time, attempt after attempt."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from stoker.contract import layout
from stoker.contract.errors import EX_NOINPUT, Refusal
from stoker.contract.frozen import frozen
from stoker.contract.safe_io import open_regular
from stoker.contract.text import escape, escape_lines
from stoker.control.record.run_record import RunRecord


def strip_control_codes(data: bytes) -> bytes:
    """Return what a rank printed as lines that a terminal only prints: another user's output may hold any control codes."""
    text = data.decode("utf-8", "replace").replace("\r\n", "\n").replace("\r", "\n")
    return escape_lines(text).encode()


class LogTail:
    """New bytes of one file since the last look. The file may not be there yet."""

    def __init__(self, path: str, skip: int = 0) -> None:
        self.path = path
        self._at = skip

    def new(self, limit: int = 1 << 20) -> bytes:
        try:
            with os.fdopen(open_regular(self.path, follow=False), "rb") as file:
                file.seek(self._at)
                data = file.read(limit)
        except FileNotFoundError:
            return b""
        except OSError as problem:
            raise Refusal(f"{escape(self.path)} can't be read: {problem.strerror}", EX_NOINPUT) from problem
        self._at += len(data)
        return data


def rank_logs(run: RunRecord) -> Iterator[tuple[int, int, str]]:
    """(attempt, rank, path) of every log there is now, in order."""
    for attempt in run.attempts:
        folder = layout.attempt_dir(run.dir, attempt)
        try:
            matches = [re.fullmatch(r"rank-(0|[1-9]\d{0,6})\.log", name) for name in os.listdir(folder)]
        except OSError as problem:
            raise Refusal(f"{escape(folder)} can't be read: {problem.strerror}", EX_NOINPUT) from problem
        for rank in sorted(int(match[1]) for match in matches if match):
            yield attempt, rank, layout.rank_log(run.dir, attempt, rank)


@frozen
class Start:
    """A run that is started again under its name has several."""

    number: int = 1
    first_attempt: int = 0
    console_at: int = 0  # bytes of the launcher's log that are of the starts before


def newest_start(run: RunRecord) -> Start:
    found = [event for event in run.events() if event["event"] == "run"]
    attempt, at = (found[-1].get("attempt"), found[-1].get("console_at")) if found else (None, None)
    if not isinstance(attempt, int) or not isinstance(at, int) or attempt < 0 or at < 0:
        return Start()  # of an earlier version, or damaged
    return Start(len(found), attempt, at)


def labels(run: RunRecord) -> dict[tuple[int, int], str]:
    """By attempt and rank, of those that have started: a lost host or card gives a rank to others in the next attempt."""
    by_rank: dict[tuple[int, int], str] = {}
    for event in run.events():
        attempt, rank = event.get("attempt"), event.get("rank")
        if event["event"] == "rank-up" and isinstance(attempt, int) and isinstance(rank, int):
            by_rank[attempt, rank] = escape(str(event.get("label")), 80)
    return by_rank
