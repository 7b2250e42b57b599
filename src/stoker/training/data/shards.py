"""Shards: raw little-endian tokens of one width, 100 million to a file, and a manifest with their checksums.

CRC-32, because zlib's runs at 3.3 GB/s a core (SHA-256: 1.0): a second call can check a gigabyte in a third of a
second.
"""

from __future__ import annotations

import os
import re
import stat
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from stoker.contract import typed_values
from stoker.contract.disk_space import DiskSpace
from stoker.contract.errors import EX_NOINPUT, Refusal
from stoker.contract.frozen import frozen
from stoker.contract.progress import BYTES, Progress
from stoker.contract.safe_io import file_kind, read_json, write_json
from stoker.training.data.ours import OTHER_CACHE

SCHEMA = 1
SHARD_TOKENS = 100_000_000
MANIFEST = "manifest.json"
CHECKED = "checked.json"
_SHARD = re.compile(r"[A-Za-z0-9_-]+\.bin")
SMALL = 1 << 30  # below this, checksums are taken at every call


def dtype_for(vocab_size: int) -> str:
    return "<u2" if vocab_size <= 1 << 16 else "<u4"


class ShardWriter:
    """Tokens one after the other into as many files as it takes."""

    def __init__(self, folder: str, stem: str, width: int) -> None:
        self.folder, self.stem, self.width = folder, stem, width
        self.files: list[dict[str, Any]] = []
        self._room = DiskSpace(folder, OTHER_CACHE)
        self._file: Any = None
        self._left = 0

    def put(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            if not self._left:
                self._open()
            piece = view[: self._left]
            self._room.take(len(piece))
            self._file.write(piece)
            about = self.files[-1]
            about["crc32"] = zlib.crc32(piece, about["crc32"])
            about["bytes"] += len(piece)
            self._left -= len(piece)
            view = view[len(piece) :]

    def put_file(self, path: str) -> None:
        with open(path, "rb") as file:
            while data := file.read(8 << 20):
                self.put(data)

    def _open(self) -> None:
        self._finish()
        name = f"{self.stem}-{len(self.files):05d}.bin"
        self._file = open(os.path.join(self.folder, name), "wb")  # noqa: SIM115  closed by _finish
        self._left = SHARD_TOKENS * self.width
        self.files.append({"file": name, "bytes": 0, "crc32": 0})

    def _finish(self) -> None:
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None

    def close(self) -> list[dict[str, Any]]:
        self._finish()
        return [{**about, "tokens": about["bytes"] // self.width} for about in self.files]


_SPLIT = {
    "tokens": "int", "bytes": "int", "documents": "int", "shards": "list[Any]", "masks?": "list[Any]", "samples?": "int | None",
    "fill?": "float | None", "cut?": "int", "dropped?": "int",
}  # fmt: skip
_MANIFEST = {
    "key": "str", "kind": "str", "context": "int | None", "tokenizer_digest": "str", "vocab_size": "int", "end_id": "int",
    "seconds": "float", "splits": {"train": _SPLIT, "validation": _SPLIT},
}  # fmt: skip


def read_manifest(folder: str) -> dict[str, Any] | None:
    """None where there is none, or one of another schema."""
    try:
        told = read_json(os.path.join(folder, MANIFEST))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError:
        return None  # damaged: built again, like a damaged shard
    return told if isinstance(told, dict) and told.get("schema") == SCHEMA and _plain(told) else None


def _plain(manifest: dict[str, Any]) -> bool:
    """Its shards are files of its own folder, with sizes and sums. One of somebody's cache may name anything."""
    try:
        splits: dict[str, Any] = typed_values.read_fields(_MANIFEST, manifest)["splits"]
    except ValueError:
        return False
    parts = [part for split in splits.values() for part in (split.get("shards"), split.get("masks", []))]
    return all(isinstance(part, list) and all(_is_shard(about) for about in part) for part in parts)


def _is_shard(about: Any) -> bool:
    if not isinstance(about, dict):
        return False
    name, sizes = about.get("file"), (about.get("bytes"), about.get("crc32"))
    return (
        isinstance(name, str)
        and _SHARD.fullmatch(name) is not None
        and all(isinstance(size, int) and size >= 0 for size in sizes)
    )


def shard_files(manifest: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for split in manifest["splits"].values():
        yield from split["shards"]
        yield from split.get("masks", ())


def _cores() -> int:
    return max(1, len(os.sched_getaffinity(0)))


def damage(folder: str, manifest: dict[str, Any], verify: bool) -> str | None:
    """What is wrong with the first damaged shard, or None. Sums are taken if asked for, if small, or if changed."""
    files = list(shard_files(manifest))
    stats: dict[str, list[int]] = {}
    for about in files:
        path = os.path.join(folder, about["file"])
        try:
            found = os.lstat(path)
        except FileNotFoundError:
            return f"{path} is missing"
        if not stat.S_ISREG(found.st_mode):
            return f"{path} is {file_kind(found.st_mode)}"
        if found.st_size != about["bytes"]:
            return f"{path} has {found.st_size} bytes instead of {about['bytes']}"
        stats[about["file"]] = [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]
    total = sum(about["bytes"] for about in files)
    beside = os.path.join(folder, CHECKED)
    known = _known(beside)
    to_check = (
        files
        if verify or total < SMALL
        else [about for about in files if known.get(about["file"]) != stats[about["file"]]]
    )
    sums = []
    size = sum(about["bytes"] for about in to_check)
    with Progress("checking shards", size, unit=BYTES) as progress, ThreadPoolExecutor(_cores()) as pool:
        paths = (os.path.join(folder, about["file"]) for about in to_check)
        for about, found_sum in zip(to_check, pool.map(_checksum, paths), strict=True):
            sums.append(found_sum)
            progress.tick(about["bytes"])
    for about, found_sum in zip(to_check, sums, strict=True):
        if found_sum != about["crc32"]:
            return f"{os.path.join(folder, about['file'])} does not match its checksum"
    if known != stats and os.access(folder, os.W_OK):
        write_json(beside, stats)
    return None


def _known(path: str) -> dict[str, list[int]]:
    try:
        found = read_json(path)
    except (FileNotFoundError, ValueError):
        return {}  # nothing is known: all is checked
    return found if isinstance(found, dict) else {}


def _checksum(path: str) -> int:
    found = 0
    with open(path, "rb", buffering=0) as file:
        while data := file.read(8 << 20):
            found = zlib.crc32(data, found)
    return found


TOKENIZER = "tokenizer"  # the folder beside the shards: what made them


@frozen
class Prepared:
    folder: str
    key: str
    kind: str
    context: int | None  # of chats, which are packed for one context; None for a stream
    tokenizer: str  # its folder
    tokenizer_digest: str
    vocab_size: int
    end_id: int
    train_tokens: int
    train_bytes: int
    train_documents: int
    validation_tokens: int
    validation_bytes: int
    validation_documents: int
    train_samples: int | None  # packed rows of chats; of a stream, the context decides
    validation_samples: int | None
    fill: float | None  # share of the packed rows that is not padding
    cut: int  # conversations that were too long
    dropped: int  # conversations with nothing to learn
    shards: int
    seconds: float  # that making it took
    fresh: bool = False  # made by this call


def open_prepared(folder: str) -> Prepared:
    """From a folder below cache/datasets/, without looking at its shards."""
    told = read_manifest(folder)
    if told is None:
        raise Refusal(f"{folder} holds no prepared data (no manifest.json); `stoker prepare` makes it", EX_NOINPUT)
    return from_manifest(folder, told)


def from_manifest(folder: str, told: dict[str, Any], fresh: bool = False) -> Prepared:
    splits = {name: told["splits"][name] for name in ("train", "validation")}
    counted = {
        f"{name}_{key}": about.get(key)
        for name, about in splits.items()
        for key in ("tokens", "bytes", "documents", "samples")
    }
    train = splits["train"]
    return Prepared(
        folder=folder,
        tokenizer=os.path.join(folder, TOKENIZER),
        fresh=fresh,
        fill=train.get("fill"),
        cut=train.get("cut", 0),
        dropped=train.get("dropped", 0),
        shards=sum(len(about["shards"]) for about in splits.values()),
        **counted,
        **{key: told[key] for key in ("key", "kind", "context", "tokenizer_digest", "vocab_size", "end_id", "seconds")},
    )
