"""Follows growing files: the launcher's log, and what the ranks of each attempt printed."""

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
    """Return a rank's output with control codes escaped, because another user's output could contain any."""
    text = data.decode("utf-8", "replace").replace("\r\n", "\n").replace("\r", "\n")
    return escape_lines(text).encode()


class LogTail:
    """Reads what is new in one file, which may not exist yet."""

    def __init__(self, path: str, skip: int = 0) -> None:
        self.path = path
        self._offset = skip

    def read_new(self, limit: int = 1 << 20) -> bytes:
        """Return at most `limit` new bytes. Raises Refusal if the file can't be read."""
        try:
            with os.fdopen(open_regular(self.path, follow=False), "rb") as file:
                file.seek(self._offset)
                data = file.read(limit)
        except FileNotFoundError:
            return b""
        except OSError as problem:
            raise Refusal(f"{escape(self.path)} can't be read: {problem.strerror}", EX_NOINPUT) from problem
        self._offset += len(data)
        return data


def list_rank_logs(run: RunRecord) -> Iterator[tuple[int, int, str]]:
    """Yield (attempt, rank, path) of each log that exists, in this order."""
    for attempt in run.attempts:
        folder = layout.attempt_dir(run.dir, attempt)
        try:
            matches = [re.fullmatch(r"rank-(0|[1-9]\d{0,6})\.log", name) for name in os.listdir(folder)]
        except OSError as problem:
            raise Refusal(f"{escape(folder)} can't be read: {problem.strerror}", EX_NOINPUT) from problem
        for rank in sorted(int(match[1]) for match in matches if match):
            yield attempt, rank, layout.rank_log(run.dir, attempt, rank)


@frozen
class RunStart:
    """Describes one start of a run, which has several starts if it was started again under its name."""

    number: int = 1
    first_attempt: int = 0
    console_at: int = 0  # offset of its first line in the launcher's log, in bytes


def find_newest_start(run: RunRecord) -> RunStart:
    """Return the newest start, or the first one if the record has no details of starts."""
    starts = [event for event in run.events() if event["event"] == "run"]
    attempt, offset = (starts[-1].get("attempt"), starts[-1].get("console_at")) if starts else (None, None)
    if not isinstance(attempt, int) or not isinstance(offset, int) or attempt < 0 or offset < 0:
        return RunStart()  # written by an earlier version, or damaged
    return RunStart(len(starts), attempt, offset)


def read_rank_labels(run: RunRecord) -> dict[tuple[int, int], str]:
    """Return the labels of the started ranks by (attempt, rank). A rank may move to another host in the next attempt."""
    by_rank: dict[tuple[int, int], str] = {}
    for event in run.events():
        attempt, rank = event.get("attempt"), event.get("rank")
        if event["event"] == "rank-up" and isinstance(attempt, int) and isinstance(rank, int):
            by_rank[attempt, rank] = escape(str(event.get("label")), 80)
    return by_rank
