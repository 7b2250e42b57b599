"""Parses and formats quantities: bytes, durations, counts with their noun, lists of ranks."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable
from typing import Any

_MAX_NUMBER = 60  # characters: the time of the search for parts grows with their number squared
_SIZE = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_MAX_SECONDS = 1e11  # seconds
_TIME = {"ms": 0.001, "s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def parse_bytes(text: str) -> int:
    """Return a number of bytes. GB is 10^9 and GiB is 2^30, as in nvidia-smi and vendors' data sheets."""
    match = None if len(text) > _MAX_NUMBER else re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([kmgt]?i?)b?\s*", text.lower())
    if not match or match[2] == "i":
        raise ValueError(f"{text!r} is not a size; write it like 20GB, 512MB or 1.5GiB")
    return int(float(match[1]) * _SIZE[match[2]])


def parse_duration(text: str) -> float:
    """Return a duration in seconds. A bare number is seconds."""
    stripped = text.strip().lower()
    if len(stripped) > _MAX_NUMBER:
        raise ValueError(f"{text[:_MAX_NUMBER]!r}… is not a duration; write it like 30s, 10m or 1h30m")
    if re.fullmatch(r"[0-9]*\.?[0-9]+", stripped):
        return float(stripped)
    stripped = stripped.replace(" ", "")
    parts = re.findall(r"([0-9]*\.?[0-9]+)(ms|sec|s|min|m|h|d)", stripped)
    if not parts or "".join(number + unit for number, unit in parts) != stripped:
        raise ValueError(f"{text!r} is not a duration; write it like 30s, 10m or 1h30m")
    return float(sum(float(number) * _TIME[unit] for number, unit in parts))


def format_bytes(count: float) -> str:
    """Return a number of bytes as torch and nvidia-smi write it, in powers of 1024: 3.2 GiB, 15.0 MiB, 576 bytes."""
    for power, unit in ((5, "PiB"), (4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if count >= 1024**power:
            return f"{count / 1024**power:.1f} {unit}"
    return f"{count:.0f} bytes"


def format_used(used: int, total: int) -> str:
    """Return how much of a memory or disk is used, in GiB: 0.5/139.8 GiB."""
    return f"{used / 2**30:.1f}/{total / 2**30:.1f} GiB"


def format_clock(seconds: float | None) -> str:
    """Return a remaining time as a clock shows it: 5:30, 1:05:30, or ?:?? if it is unknown."""
    if seconds is None:
        return "?:??"
    minutes, seconds = divmod(max(int(seconds), 0), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def format_duration(seconds: float) -> str:
    """Return a duration for people: 0.3 s, 42 s, 5 min 3 s, 2 h 10 min."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if not seconds < _MAX_SECONDS:  # also infinity and NaN, which int() refuses
        return "thousands of years"
    minutes, seconds = divmod(int(seconds), 60)
    if minutes == 0:
        return f"{seconds} s"
    if minutes < 60:
        return f"{minutes} min" + (f" {seconds} s" if seconds else "")
    return f"{minutes // 60} h" + (f" {minutes % 60} min" if minutes % 60 else "")


def plural(count: int, noun: str) -> str:
    """Return the number with its noun: 1 row, 2 rows, 12,000 tokens, 2 processes, 3 entries."""
    if count == 1:
        return f"1 {noun}"
    if noun.endswith(("s", "x", "ch", "sh")):
        return f"{count:,} {noun}es"
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return f"{count:,} {noun[:-1]}ies"
    return f"{count:,} {noun}s"


def rank_name(rank: int | None, label: str) -> str:
    """Return a rank with its device, as all messages write it: rank 1 (GPU 1), rank 9 (node2 GPU 1)."""
    device = re.sub(r"(?<![A-Za-z])(CPU|GPU)([0-9])", r"\1 \2", label)
    return f"rank {rank} ({device})"


def format_ranks(ranks: Iterable[int]) -> str:
    """Return a list of ranks: rank 3, ranks 0-3, 5, 6."""
    ranks = sorted(ranks)
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    parts: list[str] = []
    for _, consecutive in itertools.groupby(enumerate(ranks), lambda pair: pair[1] - pair[0]):
        first, *others = (str(rank) for _, rank in consecutive)
        parts += [f"{first}-{others[-1]}"] if len(others) > 1 else [first, *others]
    return f"ranks {', '.join(parts)}"


def finite_number(data: Any, *path: str) -> float | None:
    """Return the finite number at this path of keys, or None. metrics.jsonl has NaN as a string."""
    for key in path:
        data = data.get(key) if isinstance(data, dict) else None
    if isinstance(data, bool) or not isinstance(data, (int, float)):
        return None
    return float(data) if math.isfinite(data) else None
