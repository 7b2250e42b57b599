"""One rank's part of a checkpoint: its safetensors file, checksummed as it is written, and the note that it is there.
Rank 0 waits for all parts, writes the manifest and renames. No collective anywhere.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from stoker.contract import safe_io
from stoker.contract.frozen import as_json, frozen, replace
from stoker.contract.safe_io import read_json, sync_folder, write_atomic
from stoker.contract.tensor_header import pack_header
from stoker.contract.typed_values import read_frozen
from stoker.contract.units import format_bytes, format_duration
from stoker.training.checkpoint import manifest
from stoker.training.checkpoint.folders import is_checkpoint, put_in_place
from stoker.training.checkpoint.manifest import Entry, Manifest, Piece, SummedFile, Sums, sizes_wrong_in

if TYPE_CHECKING:
    from stoker.training.checkpoint.snapshot import Buffers, Source


class GivenUp(Exception):
    """This checkpoint will not be; `own` when it is this rank's own trouble, which it should say."""

    def __init__(self, line: str, own: bool = True) -> None:
        super().__init__(line)
        self.own = own


@frozen
class Part:
    rank: int
    files: dict[str, Sums]
    tensors: dict[str, Entry]


DATA, NOTE, FAILURE = "safetensors", "json", "failed"  # how the names of a rank's files end


def name_of(rank: int, kind: str) -> str:
    return f"rank-{rank:05d}.{kind}"


def write_part(
    folder: str, rank: int, step: int, placed: Sequence[Source], buffers: Buffers, stopped: Callable[[], bool]
) -> Part:
    """Leaves nothing of its own behind when it fails."""
    name, size = name_of(rank, DATA), max((one.stop for one in placed), default=0)
    _room_for(folder, name, size)
    entries = {one.name: _entry(one, name) for one in placed}
    files: dict[str, Sums] = {}
    try:
        if size:
            files[name] = _write_tensors(os.path.join(folder, name), step, placed, buffers, size, stopped)
        part = Part(rank, files, entries)
        write_atomic(os.path.join(folder, name_of(rank, NOTE)), json.dumps(as_json(part)).encode())
        sync_folder(folder)
    except BaseException:
        for left in (name, name_of(rank, NOTE)):
            if os.path.exists(os.path.join(folder, left)):
                os.unlink(os.path.join(folder, left))
        raise
    return part


def read_part(folder: str, rank: int) -> Part:
    part = read_frozen(Part, read_json(os.path.join(folder, name_of(rank, NOTE))))
    manifest.check_files(part.files)
    return part


def note_failure(folder: str, rank: int, why: str) -> None:
    """So that rank 0 need not wait. Where not even this can be written, rank 0's own deadline ends the waiting."""
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, name_of(rank, FAILURE))
    try:
        with open(path + ".part", "w", encoding="utf-8") as file:
            file.write(why)
    finally:  # under its name only with its words in it; on a full disk without
        if os.path.exists(path + ".part"):
            os.rename(path + ".part", path)


def _room_for(folder: str, name: str, size: int) -> None:
    """Too little room is refused before a byte is written: a full disk takes logs and metrics down as well."""
    disk = os.statvfs(folder)
    free = disk.f_bavail * disk.f_frsize
    if disk.f_blocks and free < size:
        raise GivenUp(
            f"no space left: {name} needs {format_bytes(size)}, {format_bytes(free)} are free in {os.path.dirname(folder)}"
        )


def _entry(source: Source, file: str) -> Entry:
    pieces = (Piece(file, source.name, source.block.offset, tuple(source.block.data.shape)),) if source.block else ()
    return Entry(source.whole, source.dtype, pieces)


def _write_tensors(
    path: str, step: int, placed: Sequence[Source], buffers: Buffers, size: int, stopped: Callable[[], bool]
) -> Sums:
    def between(fd: int) -> None:
        if stopped():
            raise GivenUp("the run ended while it was being written")
        if os.fstat(fd).st_nlink == 0:
            raise GivenUp("rank 0 gave it up", own=False)

    sizes = {one.name: (one.dtype, tuple(one.block.data.shape)) for one in placed if one.block}
    out = SummedFile(path, between)
    try:
        out.write(pack_header(sizes, {"format": "pt", "step": str(step)}))
        for view in buffers.read(size):
            out.write(view)
        return out.finish()
    finally:
        out.close()


def gather(folder: str, ranks: Sequence[int], patience: float, pause: Callable[[float], bool]) -> list[Part]:
    """The parts of these ranks, once they are there. `pause(seconds)` waits and says whether to stop."""
    deadline = time.monotonic() + patience
    wait = 0.005
    while True:
        there = set(os.listdir(folder))
        for rank in ranks:
            if name_of(rank, FAILURE) in there:
                with open(os.path.join(folder, name_of(rank, FAILURE)), encoding="utf-8") as file:
                    raise GivenUp(f"rank {rank} could not write its part: {file.read() or 'no reason given'}")
        missing = [rank for rank in ranks if name_of(rank, NOTE) not in there]
        if not missing:
            return [read_part(folder, rank) for rank in ranks]
        if time.monotonic() > deadline:
            raise GivenUp(
                f"the part of rank {missing[0]} did not come within {format_duration(patience)}; all hosts must see the same"
                f" {os.path.dirname(folder)}"
            )
        if pause(wait):
            raise GivenUp("the run ended before all ranks had written their parts")
        wait = min(wait * 1.5, 0.2)


def merge(parts: Sequence[Part]) -> tuple[dict[str, Sums], dict[str, Entry]]:
    files: dict[str, Sums] = {}
    tensors: dict[str, Entry] = {}
    for part in parts:
        files |= part.files
        for name, entry in part.tensors.items():
            known = tensors.get(name)
            if known is None:
                tensors[name] = entry
            elif (known.shape, known.dtype) != (entry.shape, entry.dtype):
                raise GivenUp(
                    f"rank {part.rank} has {name} as {entry.dtype} {list(entry.shape)}, others as {known.dtype}"
                    f" {list(known.shape)}"
                )
            else:
                tensors[name] = replace(known, pieces=known.pieces + entry.pieces)
    return files, tensors


def commit(unfinished: str, final: str, parts: Sequence[Part], wanted: Manifest) -> None:
    """`wanted`: the manifest, but for what the parts say."""
    files, tensors = merge(parts)
    wrong = sizes_wrong_in(unfinished, files)
    problem = wrong[0] if wrong else manifest.disagreement(files, tensors)
    if problem:
        raise GivenUp(problem)
    whole = manifest.encode(replace(wanted, files=files, tensors=tensors))
    write_atomic(os.path.join(unfinished, manifest.NAME), whole)
    for part in parts:
        os.unlink(os.path.join(unfinished, name_of(part.rank, NOTE)))  # the manifest has what they said
    sync_folder(unfinished)
    if os.path.lexists(final) and not (is_checkpoint(final) and safe_io.is_own(final)):
        what = "is another user's" if is_checkpoint(final) else "is not a checkpoint"
        raise GivenUp(f"{final} already exists and {what}: move it away, or give another --checkpoint.folder")
    put_in_place(unfinished, final)
