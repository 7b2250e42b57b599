"""What `data.path` means: files, folders and globs of them, or a data set of the hub."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module

from stoker.contract.disk_space import DiskSpace
from stoker.contract.errors import EX_CONFIG, EX_DATAERR, EX_NOINPUT, EX_UNAVAILABLE, Refusal
from stoker.contract.frozen import frozen
from stoker.contract.safe_io import PRIVATE, AtomicFile
from stoker.contract.spelling import suggest_file
from stoker.contract.text import escape
from stoker.contract.units import format_bytes
from stoker.training.data.looks import check_head
from stoker.training.data.ours import OTHER_CACHE, digest_files, files_below
from stoker.training.data.rows import IN_PLACE, KINDS, as_line, counted_in, is_known, kind_of, rows
from stoker.training.data.unpack import open_unpacked, packing_of

# A data set of the hub, through `datasets`: streamed into a local file of rows once, then read like any other.

_HUB = re.compile(
    r"(?P<id>[\w-][\w.-]*/[\w.-]+)(:(?P<config>[\w.+-]*)(:(?P<split>[\w.+-]+))?)?(@(?P<revision>[\w./-]+))?"
)
_ARCHIVES = ("zip://", "tar://", "gzip://", "bz2://", "xz://", "lz4://", "zstd://")


def is_hub_id(path: str) -> bool:
    """What is here, could be a file's name, or lies in a folder of ours is a path."""
    here = os.path.exists(path) or os.path.isdir(os.path.dirname(path))
    return _HUB.fullmatch(path) is not None and not here and not is_known(path) and not packing_of(path)


def fetch(name: str, cache: str, say: Callable[[str], None]) -> str:
    """owner/name, owner/name:config, owner/name:config:split (else train), each also with @revision."""
    path = os.path.join(cache, "hub", re.sub(r"[^\w.-]", "--", name) + ".jsonl")
    if os.path.exists(path):
        say(f"{name}: using the copy in {path}; remove it to fetch it again")
        return path
    parts = _HUB.fullmatch(name)
    assert parts is not None, "who calls has looked"
    os.environ.setdefault(
        "HF_DATASETS_TRUST_REMOTE_CODE", "0"
    )  # before version 4, `datasets` can run a data set's own Python
    try:
        builder = import_module("datasets").load_dataset_builder(
            parts["id"], parts["config"] or None, revision=parts["revision"]
        )
        _refuse_files_of_ours(name, builder.config.data_files or {})
        dataset = builder.as_streaming_dataset(split=parts["split"] or "train")
        os.makedirs(os.path.dirname(path), 0o700, exist_ok=True)
        say(f"{name}: fetching from the hub")
        room = DiskSpace(cache, OTHER_CACHE)
        with AtomicFile(path, PRIVATE) as file:
            for row in dataset:
                data = as_line(row)
                room.take(len(data))
                file.write(data)
            size = file.tell()
    except ImportError as problem:
        raise Refusal(
            f"there is no file {name}; if it is a data set of the hub: `pip install datasets`", EX_UNAVAILABLE
        ) from problem
    except (
        OSError,
        ValueError,
        RuntimeError,
    ) as problem:  # what datasets and its HTTP layers raise: no such data set, no network, a gated one
        first = str(problem).strip().splitlines()[0] if str(problem).strip() else type(problem).__name__
        raise Refusal(
            f"{name}: no such file here, and it can't be fetched from the hub: {first[:200]}", EX_UNAVAILABLE
        ) from problem
    say(f"{name}: {format_bytes(size)} of rows in {path}")
    return path


def _refuse_files_of_ours(name: str, files: Mapping[str, Iterable[object]]) -> None:
    """The page of a data set says which files it has, and `datasets` takes a path of this machine for one of them."""
    for path in (str(one) for some in files.values() for one in some):
        *within, file = path.split("::")  # zip://rows.csv::hf://…; of another chain it may open any part
        if not file.startswith(("hf://", "https://")) or not all(part.startswith(_ARCHIVES) for part in within):
            line = f"{name}: its page names {escape(path, 200)} as one of its files, which is not a file of the hub"
            raise Refusal(line, EX_DATAERR)


# What many processes can't read from any place (packed files, json, csv, arrow) becomes one that they can, once.

UNFOLDED = 1  # raised when the same file would give other bytes


def unfold(path: str, cache: str, say: Callable[[str], None], room: DiskSpace) -> str:
    """`room`: of the cache, for all files that are read together."""
    assert cache, "the working directory is no cache"
    kind = kind_of(path)
    (digest,) = digest_files([path], cache, 1, say)
    ending = ".txt" if kind == "text" else ".jsonl"
    target = os.path.join(cache, "unpacked", f"{digest[:32]}-{kind}-{UNFOLDED}{ending}")
    if os.path.exists(target):
        return target
    os.makedirs(os.path.dirname(target), 0o700, exist_ok=True)
    with AtomicFile(target, PRIVATE) as file:
        for data in _unfolded(path, kind):
            room.take(len(data))
            file.write(data)
        size = file.tell()
    say(f"{path}: unpacked to {format_bytes(size)} in {target}")
    return target


def _unfolded(path: str, kind: str) -> Iterator[bytes]:
    if kind in ("text", "jsonl"):
        with open_unpacked(path) as stream:
            yield from iter(lambda: stream.read(1 << 20), b"")
        return
    for _, row in rows(path):
        yield as_line(row)


FORMS = KINDS  # the endings that a folder is read for; each may be followed by one of PACKED


@frozen
class Source:
    path: str
    form: str  # text, jsonl or parquet
    size: int
    name: str = ""  # what people call it, where `path` is an unpacked copy
    format: str = ""  # of its rows, where they are conversations (formats/table.py)
    mixed: bool = False  # rows of other formats are left out, not refused
    entry: int = 0  # which of `data.path` it is of, where these are weighted


def find_sources(
    paths: Sequence[str], cache: str, say: Callable[[str], None], what: str = "data.path"
) -> tuple[Source, ...]:
    """In the order given; what a folder or a glob holds is sorted. Refuses what can't be read before anything is done."""
    if not paths:
        raise Refusal(
            f"{what} is empty: name text, jsonl, json, csv, arrow or parquet files, folders of them, or a hub id (--data PATH)",
            EX_NOINPUT,
        )
    files = files_of(paths, cache, say)
    twice = (
        next((path for place, path in enumerate(files) if path in files[:place]), None) if len(files) < 10_000 else None
    )
    if twice:
        say(f"{twice} is given twice: it is read twice")
    room = DiskSpace(cache, OTHER_CACHE)
    return tuple(_source(path, cache, say, room) for path in files)


def _source(path: str, cache: str, say: Callable[[str], None], room: DiskSpace) -> Source:
    kind = kind_of(path)
    if os.path.splitext(path)[1].lower() == ".zip":
        raise Refusal(f"{path} is an archive of files: unpack it first, e.g. `unzip {path}`", EX_DATAERR)
    check_head(path, text=not packing_of(path) and kind not in ("parquet", "arrow"))
    if not packing_of(path) and kind in IN_PLACE:
        return Source(path, kind, os.path.getsize(path))
    copy = unfold(path, cache, say, room)
    if not os.path.getsize(copy):
        raise Refusal(f"{path} holds no {counted_in(path)}s", EX_DATAERR)
    if kind == "text":
        check_head(copy, text=True, name=path)
    return Source(copy, "text" if kind == "text" else "jsonl", os.path.getsize(copy), path)


def files_of(paths: Sequence[str], cache: str, say: Callable[[str], None]) -> list[str]:
    """The files that are meant, as they are; a hub's rows are fetched into the cache."""
    return [file for path in paths for file in _files(path, cache, say)]


def check_there(paths: Sequence[str]) -> None:
    """The same refusals, without asking the hub: for a look before anything is done."""
    for path in paths:
        _files(path, "", lambda line: None, hub=lambda *_: "")


def local_files(paths: Sequence[str]) -> list[str]:
    """Nothing where a path is a hub id: its rows are not here yet."""
    files = [list(_files(path, "", lambda line: None, hub=lambda *_: "")) for path in paths]
    return [] if [""] in files else [file for found in files for file in found]


def share_of(text: str) -> float | None:
    """What `data.validation` holds out of the data; None: it is a path."""
    try:
        share = float(text or "0")
    except ValueError:
        return None
    if not 0 <= share < 1:
        raise Refusal(
            f"data.validation is {text}: a share of the data is between 0 and 1 (0.01 is one percent), a path is not"
            " a number",
            EX_CONFIG,
        )
    return share


def _files(path: str, cache: str, say: Callable[[str], None], hub: Callable[..., str] = fetch) -> Iterable[str]:
    path = os.path.expanduser(path)
    if os.path.isdir(path):
        return _filled(_inside(path, say), path, say)
    if os.path.exists(path):
        return [path]
    if any(sign in path for sign in "*?["):
        found = sorted(one for one in glob.glob(path, recursive=True) if os.path.isfile(one))
        if not found:
            raise Refusal(f"no file matches {path}", EX_NOINPUT)
        return _filled(found, path, say)
    above = os.path.dirname(path)
    if is_hub_id(path):
        return [hub(path, cache, say)]
    near = os.listdir(above or ".") if os.path.isdir(above or ".") else []
    raise Refusal(f"{path} does not exist{suggest_file(path, near)}", EX_NOINPUT)


def _filled(files: list[str], where: str, say: Callable[[str], None]) -> list[str]:
    """Among many an empty one is left out: a writer that had nothing to write left it."""
    empty = {path: None for path in files if os.path.isfile(path) and not os.path.getsize(path)}
    named = ", ".join(list(empty)[:3]) + (f" and {len(empty) - 3} more" if len(empty) > 3 else "")
    if len(empty) == len(files):
        raise Refusal(f"{where} holds only empty files: {named}", EX_DATAERR)
    if empty:
        say(f"left out, because they are empty: {named}")
    return [path for path in files if path not in empty]


def _inside(folder: str, say: Callable[[str], None]) -> list[str]:
    found, others = [], set()
    for path in files_below(folder, say):
        if is_known(path):
            found.append(path)
        else:
            others.add(os.path.splitext(path)[1].lower() or os.path.basename(path))
    if not found:
        there = f"found {', '.join(sorted(others)[:8])}" if others else "it is empty"
        raise Refusal(f"folder {folder} holds no {', '.join(FORMS)} file: {there}", EX_NOINPUT)
    return sorted(found)
