"""serving/rank-N.jsonl: what a server has done, a line of totals every two seconds. `stoker serve` writes it into its run
directory, viewers read it: they need no API key. Rates are differences of totals.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from stoker.contract import layout
from stoker.contract.frozen import as_json, fields_of, frozen
from stoker.contract.safe_io import APPEND, PRIVATE, open_below, write_atomic
from stoker.contract.text import parse_json
from stoker.contract.typed_values import Real, known_fields

EVERY_S = 2.0  # between two lines
RATE_S = 30.0  # rates are means over so long
STALE_S = 15.0  # without a line: the server is gone or hangs, and nothing is known of its rate
MAX_BYTES = 1 << 20  # beyond that every second line is dropped: of totals nothing but resolution is lost
_RECENT = 64  # lines that are never dropped
_TAIL_BYTES = 1 << 14


@frozen
class ServerSample:
    """Totals since the run began, and what is under way, at one moment."""

    time: Real
    requests: int  # completions that ended
    prompt_tokens: int
    tokens: int  # generated
    running: int
    waiting: int
    weights_version: int


TOTALS = ("requests", "prompt_tokens", "tokens")


@frozen
class ServerRates:
    requests: Real | None = None  # a second
    tokens: Real | None = None  # generated a second


class ServerLog:
    """Appends a server's samples. Totals go on from those of the server that this one replaces."""

    def __init__(self, run_dir: str, rank: int) -> None:
        folder = os.path.join(run_dir, layout.SERVING)
        os.makedirs(folder, 0o700, exist_ok=True)
        self._path = os.path.join(folder, _name(rank))
        before = read_samples(run_dir, _TAIL_BYTES).get(rank, ())
        self._before = {name: getattr(before[-1], name) if before else 0 for name in TOTALS}
        self._size = os.path.getsize(self._path) if os.path.exists(self._path) else 0

    def write(self, sample: ServerSample) -> None:
        totals = {name: self._before[name] + getattr(sample, name) for name in TOTALS}
        handle = os.open(self._path, APPEND, PRIVATE)
        try:
            self._size += os.write(handle, _line({**as_json(sample), **totals}))
        finally:
            os.close(handle)
        if self._size > MAX_BYTES:
            self._thin()

    def _thin(self) -> None:
        with open(self._path, "rb") as file:
            lines = file.read().splitlines(keepends=True)
        data = b"".join([*lines[:-_RECENT:2], *lines[-_RECENT:]])
        write_atomic(self._path, data, durable=False)
        self._size = len(data)


def read_samples(run_dir: str, most: int = 2 * MAX_BYTES) -> dict[int, tuple[ServerSample, ...]]:
    """Return the samples of each replica by its rank, oldest first: those in the last `most` bytes of its file."""
    try:
        names = os.listdir(os.path.join(run_dir, layout.SERVING))
    except OSError:
        return {}
    ranks = sorted(int(match[1]) for name in names if (match := _FILE.fullmatch(name)))
    samples = {rank: _samples_in(run_dir, rank, most) for rank in ranks}
    return {rank: found for rank, found in samples.items() if found}


def recent_samples(run_dir: str) -> dict[int, tuple[ServerSample, ...]]:
    """Return the samples that rates need."""
    return read_samples(run_dir, _TAIL_BYTES)


def rates(samples: Sequence[ServerSample], now: float) -> ServerRates:
    """Return requests and generated tokens a second over the last half minute; None where that is not known."""
    newest = samples[-1]
    first = next(one for one in samples if one.time >= newest.time - RATE_S)
    seconds = newest.time - first.time
    if seconds <= 0 or now - newest.time > STALE_S:
        return ServerRates()
    return ServerRates(
        max(0, newest.requests - first.requests) / seconds, max(0, newest.tokens - first.tokens) / seconds
    )


def _name(rank: int) -> str:
    return f"rank-{rank}.jsonl"


_FILE = re.compile(r"rank-([0-9]{1,6})\.jsonl")


def _line(values: Mapping[str, Any]) -> bytes:
    return json.dumps({"schema": layout.SCHEMA, **values}).encode() + b"\n"


def _samples_in(run_dir: str, rank: int, most: int) -> tuple[ServerSample, ...]:
    """Return the samples of a file, without lines that are torn or of another kind."""
    try:
        with os.fdopen(open_below(run_dir, f"{layout.SERVING}/{_name(rank)}"), "rb") as file:
            skipped = max(0, os.fstat(file.fileno()).st_size - most)
            file.seek(skipped)
            lines = file.read(most).split(b"\n")[bool(skipped) : -1]
    except OSError:
        return ()
    found: list[ServerSample] = []
    for line in lines:
        try:
            values = parse_json(line)
        except ValueError:
            continue
        known = known_fields(ServerSample, values) if isinstance(values, dict) else {}
        if len(known) == len(fields_of(ServerSample)) and (not found or known["time"] > found[-1].time):
            found.append(ServerSample(**known))
    return tuple(found)
