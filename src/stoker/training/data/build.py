"""Builds prepared data in a temporary folder and puts it in place whole; one builder at a time, the others wait and use
what it made.
"""

from __future__ import annotations

import fcntl
import glob
import itertools
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.contract.disk_space import DiskSpace
from stoker.contract.errors import EX_CANTCREAT, Refusal
from stoker.contract.frozen import frozen
from stoker.contract.progress import BYTES, Progress
from stoker.contract.safe_io import open_lock_file, sync_folder, write_json
from stoker.contract.text import escape
from stoker.training.data import shards
from stoker.training.data.crew import Crew
from stoker.training.data.ours import OTHER_CACHE
from stoker.training.data.read import NAMED, Remark, named
from stoker.training.data.units import Span, jobs_of
from stoker.training.data.work import BEGIN, Part, Work, lengths_path, mask_path

# Best-fit-decreasing: whole conversations into rows, the longest first, each into the fullest row that still has
# room.


@frozen
class Packing:
    rows: int
    row: NDArray[np.int64]  # of each conversation
    start: NDArray[np.int64]  # where it begins in its row
    fill: float  # share of the rows that is not padding


def best_fit(lengths: NDArray[np.int64], capacity: int) -> Packing:
    """A Python integer is the set of free sizes: finding the best fit is one shift. A million take two seconds."""
    assert len(lengths) > 0 and int(lengths.min()) > 0 and int(lengths.max()) <= capacity
    row = np.empty(len(lengths), dtype=np.int64)
    start = np.empty(len(lengths), dtype=np.int64)
    open_rows: list[list[int]] = [[] for _ in range(capacity + 1)]  # free size -> rows
    free = 0
    rows = 0
    for place in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[place])
        fitting = free >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            mine = open_rows[room].pop()
            if not open_rows[room]:
                free &= ~(1 << room)
        else:
            room, mine, rows = capacity, rows, rows + 1
        row[place], start[place] = mine, capacity - room
        left = room - length
        if left:
            open_rows[left].append(mine)
            free |= 1 << left
    return Packing(rows, row, start, float(lengths.sum()) / (rows * capacity))


def packed(entries: Sequence[NDArray[np.int64]], capacity: int) -> tuple[Packing, list[int]]:
    """No row holds conversations of two entries: each can be weighted. Also the rows of each entry."""
    each = [best_fit(lengths, capacity) if len(lengths) else None for lengths in entries]
    counts = [made.rows if made is not None else 0 for made in each]
    row = [made.row + sum(counts[:place]) for place, made in enumerate(each) if made is not None]
    start = [made.start for made in each if made is not None]
    fill = float(sum(int(lengths.sum()) for lengths in entries)) / (sum(counts) * capacity)
    return Packing(sum(counts), np.concatenate(row), np.concatenate(start), fill), counts


Say = Callable[[str], None]
POLL_S = 0.1
REMIND_S = 60.0


@contextmanager
def alone(folder: str, say: Say) -> Iterator[None]:
    """Holds the lock of a folder that is to be made. A killed holder's lock is free at once; what it left is removed."""
    os.makedirs(os.path.dirname(folder), exist_ok=True)
    with os.fdopen(open_lock_file(folder + ".lock"), "r+", encoding="utf-8") as lock:
        reported = -REMIND_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() - reported >= REMIND_S:
                    lock.seek(0)
                    holder = escape(lock.read(200).strip()) or "another process"
                    say(f"{holder} is preparing {folder}: waiting for it; another folder: --data.cache DIR")
                    reported = time.monotonic()
                time.sleep(POLL_S)
        lock.seek(0)
        lock.truncate()
        lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        lock.flush()
        for left in glob.glob(glob.escape(folder) + ".*.tmp"):
            shutil.rmtree(left)
        yield


@contextmanager
def whole(folder: str) -> Iterator[str]:
    """A temporary folder that takes its place when all went well, and is gone when not. The caller holds the lock."""
    temporary = f"{folder}.{os.getpid()}.tmp"
    try:
        os.makedirs(temporary, 0o700)  # of files that others may not read, perhaps
    except OSError as problem:
        raise Refusal(f"{temporary} can't be made: {problem.strerror} (data.cache)", EX_CANTCREAT) from problem
    try:
        yield temporary
        sync_folder(temporary)
        if os.path.exists(folder):  # damaged: whoever still reads it keeps its mapped files
            os.rename(folder, f"{folder}.{os.getpid()}.old.tmp")
        os.rename(temporary, folder)
        sync_folder(os.path.dirname(folder))
    finally:
        for left in (temporary, f"{folder}.{os.getpid()}.old.tmp"):
            shutil.rmtree(left, ignore_errors=True)


def build(
    folder: str, splits: dict[str, Sequence[Span]], work: Work, workers: int, pad: int, about: dict[str, Any], say: Say
) -> None:
    """Tokens of each split into `folder`, the manifest last."""
    began = time.monotonic()
    parts_folder = os.path.join(folder, "parts")
    os.makedirs(parts_folder)
    total = sum(span.size for spans in splits.values() for span in spans)
    made: dict[str, Any] = {}
    with Progress("preparing", total, unit=BYTES, say=say) as progress, Crew(work, workers) as crew:
        for name, spans in splits.items():
            jobs = jobs_of(spans)
            path = os.path.join(parts_folder, f"{name}-%07d")
            parts = _with_disk_room(crew.run(jobs, path.__mod__, progress.tick), parts_folder)
            made[name] = (
                _chat(folder, name, list(parts), work, pad)
                if work.kind == "chat"
                else _stream(folder, name, parts, work)
            )
    shutil.rmtree(parts_folder)
    write_json(
        os.path.join(folder, shards.MANIFEST),
        {"schema": shards.SCHEMA, **about, "splits": made, "seconds": round(time.monotonic() - began, 3)},
    )


def _with_disk_room(parts: Iterator[Part], folder: str) -> Iterator[Part]:
    """Yield the parts. Raises Refusal before they fill the disk that `folder` is on."""
    room = DiskSpace(folder, OTHER_CACHE)
    for part in parts:
        room.take(os.path.getsize(part.path))
        yield part


def _stream(folder: str, name: str, parts: Iterator[Part], work: Work) -> dict[str, Any]:
    writer = shards.ShardWriter(folder, name, np.dtype(work.dtype).itemsize)
    told: dict[str, Any] = {"tokens": 0, "bytes": 0, "documents": 0, "inked": False}
    entries: dict[int, int] = {}
    for part in parts:  # in order, while later ones are still made
        writer.put_file(part.path)
        os.unlink(part.path)
        told["tokens"] += part.tokens
        told["bytes"] += part.bytes
        told["documents"] += part.documents
        told["inked"] = told["inked"] or part.inked
        entries[part.entry] = entries.get(part.entry, 0) + part.tokens
    return {**told, "entries": list(entries.values()), "shards": writer.close()}


def _chat(folder: str, name: str, parts: list[Part], work: Work, pad: int) -> dict[str, Any]:
    told: dict[str, Any] = {
        key: sum(getattr(part, key) for part in parts)
        for key in ("bytes", "documents", "learned", "cut", "dropped", "wrong", "only_last")
    }
    told["first_wrong"] = _first(remark for part in parts for remark in part.first_wrong)
    told["first_cut"] = _first(remark for part in parts for remark in part.first_cut)
    apart: dict[int, list[NDArray[np.int64]]] = {}
    for part in parts:
        apart.setdefault(part.entry, []).append(np.fromfile(lengths_path(part.path), dtype="<i8"))
    each = [np.concatenate(some) for some in apart.values()]
    lengths = np.concatenate(each) if each else np.empty(0, np.int64)
    if not len(lengths):
        return {**told, "tokens": 0, "samples": 0, "fill": 0.0, "inked": False, "shards": [], "masks": []}
    capacity = work.longest
    packing, samples = packed(each, capacity)
    tokens = _joined([part.path for part in parts], work.dtype)
    masks = _joined([mask_path(part.path) for part in parts], "u1")
    begins = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    order = np.lexsort((packing.start, packing.row))
    writers = (
        shards.ShardWriter(folder, name, np.dtype(work.dtype).itemsize),
        shards.ShardWriter(folder, f"{name}-mask", 1),
    )
    block = max(1, (1 << 22) // capacity)  # rows made at once: a few megabytes
    edges = np.searchsorted(packing.row[order], np.arange(0, packing.rows + block, block))
    for number, first_row in enumerate(range(0, packing.rows, block)):
        rows = min(block, packing.rows - first_row)
        out, bits = np.full((rows, capacity), pad, dtype=work.dtype), np.zeros((rows, capacity), dtype=np.uint8)
        for one in order[edges[number] : edges[number + 1]].tolist():
            row, start, begin, length = packing.row[one] - first_row, packing.start[one], begins[one], lengths[one]
            out[row, start : start + length] = tokens(begin, length)
            bits[row, start : start + length] = masks(begin, length)
            if start + length < capacity:
                # Of what follows: the next conversation says so itself, the padding can't.
                bits[row, start + length] = BEGIN
        writers[0].put(out.tobytes())
        writers[1].put(bits.tobytes())
    return {
        **told,
        "tokens": packing.rows * capacity,
        "samples": packing.rows,
        "entries": samples,
        "fill": round(packing.fill, 4),
        "inked": True,
        "shards": writers[0].close(),
        "masks": writers[1].close(),
    }


def _first(remarks: Iterable[Remark]) -> list[str]:
    return [named(remark) for remark in itertools.islice(remarks, NAMED)]


def _joined(paths: list[str], dtype: str) -> Callable[[int, int], Any]:
    """Files of items as one run of items: (begin, length) -> array. A conversation never crosses files."""
    maps = [np.memmap(path, dtype=dtype, mode="r") if os.path.getsize(path) else np.empty(0, dtype) for path in paths]
    starts = np.concatenate([[0], np.cumsum([len(one) for one in maps])])

    def take(begin: int, length: int) -> Any:
        file = int(np.searchsorted(starts, begin, side="right")) - 1
        return maps[file][begin - starts[file] : begin - starts[file] + length]

    return take
