"""Follows growing files: what a rank printed, whole lines at a time, attempt after attempt."""

from __future__ import annotations

import os
from collections.abc import Iterator

from stoker.contract import layout
from stoker.contract.untrusted import is_count
from stoker.control.record.reader import Run, events


class Tail:
    """New bytes of one file since the last look. The file may not be there yet."""

    def __init__(self, path: str, skip: int = 0) -> None:
        self.path = path
        self._at = skip

    def new(self, limit: int = 1 << 20) -> bytes:
        try:
            with open(self.path, "rb") as file:
                file.seek(self._at)
                data = file.read(limit)
        except FileNotFoundError:
            return b""
        self._at += len(data)
        return data


def rank_logs(run: Run) -> Iterator[tuple[int, int, str]]:
    """(attempt, rank, path) of every log there is now, in order."""
    for attempt in run.attempts:
        folder = layout.attempt_dir(run.dir, attempt)
        ranks = sorted(int(name[5:-4]) for name in os.listdir(folder) if name.startswith("rank-") and name.endswith(".log") and is_count(name[5:-4]))
        for rank in ranks:
            yield attempt, rank, layout.rank_log(run.dir, attempt, rank)


def labels(run: Run, attempt: int) -> dict[int, str]:
    """Of the ranks that have started: a lost host or card gives them to others in the next attempt."""
    return {int(one["rank"]): str(one["label"]) for one in events(run.dir) if one.get("event") == "rank-up" and one.get("attempt") == attempt}
