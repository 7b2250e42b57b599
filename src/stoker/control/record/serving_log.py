"""Writes and reads serving/rank-N.jsonl: a server's totals, one line every two seconds.

`stoker serve` writes the file into its run directory, and viewers read it without an API key. They compute rates from
differences of totals.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence

from stoker.contract import layout
from stoker.contract.frozen import as_json, fields_of, frozen
from stoker.contract.safe_io import APPEND, PRIVATE, open_below, write_atomic
from stoker.contract.text import parse_json
from stoker.contract.typed_values import Real, read_known_fields

EVERY_S = 2.0  # between lines
RATE_S = 30.0  # rates are means over this time
STALE_S = 15.0  # after this time without a line the server hangs or has ended, and its rates are unknown
MAX_BYTES = 1 << 20  # beyond it every second line is dropped: since lines are totals, only resolution is lost
_RECENT_LINES = 64  # never dropped
_TAIL_BYTES = 1 << 14
_FILE_NAME = re.compile(r"rank-([0-9]{1,6})\.jsonl")


@frozen
class ServerSample:
    """Totals since the run began, and the requests in progress, at one point in time."""

    time: Real
    requests: int  # finished completions
    prompt_tokens: int
    tokens: int  # generated
    running: int
    waiting: int
    weights_version: int


TOTALS = ("requests", "prompt_tokens", "tokens")


@frozen
class ServerRates:
    requests: Real | None = None  # per second
    tokens: Real | None = None  # generated tokens per second


class ServerLog:
    """Appends a server's samples. Totals continue from those of the server that this one replaces."""

    def __init__(self, run_dir: str, rank: int) -> None:
        folder = os.path.join(run_dir, layout.SERVING)
        os.makedirs(folder, 0o700, exist_ok=True)
        self._path = os.path.join(folder, _file_name(rank))
        previous = read_samples(run_dir, _TAIL_BYTES).get(rank, ())
        self._initial = {name: getattr(previous[-1], name) if previous else 0 for name in TOTALS}
        self._size = os.path.getsize(self._path) if os.path.exists(self._path) else 0

    def write(self, sample: ServerSample) -> None:
        totals = {name: self._initial[name] + getattr(sample, name) for name in TOTALS}
        line = json.dumps({"schema": layout.SCHEMA, **as_json(sample), **totals})
        fd = os.open(self._path, APPEND, PRIVATE)
        try:
            self._size += os.write(fd, line.encode() + b"\n")
        finally:
            os.close(fd)
        if self._size > MAX_BYTES:
            with open(self._path, "rb") as file:
                lines = file.read().splitlines(keepends=True)
            data = b"".join([*lines[:-_RECENT_LINES:2], *lines[-_RECENT_LINES:]])
            write_atomic(self._path, data, durable=False)
            self._size = len(data)


def read_samples(run_dir: str, max_bytes: int = 2 * MAX_BYTES) -> dict[int, tuple[ServerSample, ...]]:
    """Return each replica's samples by its rank, oldest first: those in the last `max_bytes` of its file."""
    try:
        names = os.listdir(os.path.join(run_dir, layout.SERVING))
    except OSError:
        return {}
    ranks = sorted(int(match[1]) for name in names if (match := _FILE_NAME.fullmatch(name)))
    by_rank = {rank: _read_file(run_dir, rank, max_bytes) for rank in ranks}
    return {rank: samples for rank, samples in by_rank.items() if samples}


def read_recent_samples(run_dir: str) -> dict[int, tuple[ServerSample, ...]]:
    """Return the samples that `compute_rates` needs."""
    return read_samples(run_dir, _TAIL_BYTES)


def compute_rates(samples: Sequence[ServerSample], now: float) -> ServerRates:
    """Return the rates over the last RATE_S seconds. A rate is None if it is unknown."""
    newest = samples[-1]
    oldest = next(sample for sample in samples if sample.time >= newest.time - RATE_S)
    seconds = newest.time - oldest.time
    if seconds <= 0 or now - newest.time > STALE_S:
        return ServerRates()
    requests, tokens = newest.requests - oldest.requests, newest.tokens - oldest.tokens
    return ServerRates(max(0, requests) / seconds, max(0, tokens) / seconds)


def _file_name(rank: int) -> str:
    return f"rank-{rank}.jsonl"


def _read_file(run_dir: str, rank: int, max_bytes: int) -> tuple[ServerSample, ...]:
    """Return the samples of a file, without incomplete lines and lines of another kind."""
    try:
        with os.fdopen(open_below(run_dir, f"{layout.SERVING}/{_file_name(rank)}"), "rb") as file:
            skipped = max(0, os.fstat(file.fileno()).st_size - max_bytes)
            file.seek(skipped)
            lines = file.read(max_bytes).split(b"\n")[bool(skipped) : -1]
    except OSError:
        return ()
    samples: list[ServerSample] = []
    for line in lines:
        try:
            values = parse_json(line)
        except ValueError:
            continue
        fields = read_known_fields(ServerSample, values) if isinstance(values, dict) else {}
        if len(fields) == len(fields_of(ServerSample)) and (not samples or fields["time"] > samples[-1].time):
            samples.append(ServerSample(**fields))
    return tuple(samples)
