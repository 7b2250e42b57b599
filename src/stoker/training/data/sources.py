"""What `data.path` means: files, folders and globs of them, or a data set of the hub."""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module

from stoker.contract.names import EX_CONFIG, EX_DATAERR, EX_NOINPUT, EX_UNAVAILABLE, Refusal
from stoker.contract.quantities import gb
from stoker.contract.shape import shape
from stoker.contract.spelling import suggest_file
from stoker.contract.wholefile import WholeFile
from stoker.training.data.looks import check_head
from stoker.training.data.ours import files_below

# A data set of the hub, through `datasets`: streamed into a local file of rows once, then read like any other.


def fetch(name: str, cache: str, say: Callable[[str], None]) -> str:
    """owner/name or owner/name:subset; its train split."""
    path = os.path.join(cache, "hub", re.sub(r"[^\w.-]", "--", name) + ".jsonl")
    if os.path.exists(path):
        say(f"{name}: the copy in {path} is used; remove it to fetch it again")
        return path
    identity, _, subset = name.partition(":")
    os.environ.setdefault(
        "HF_DATASETS_TRUST_REMOTE_CODE", "0"
    )  # before version 4, `datasets` can run a data set's own Python
    try:
        rows = import_module("datasets").load_dataset(identity, subset or None, split="train", streaming=True)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        say(f"{name}: fetching from the hub")
        with WholeFile(path) as file:
            for row in rows:
                file.write((json.dumps(row, ensure_ascii=False, default=str) + "\n").encode())
            size = file.tell()
    except ImportError as problem:
        raise Refusal(
            f"{name} is not there; if it is a data set of the hub: `pip install datasets`", EX_UNAVAILABLE
        ) from problem
    except (
        OSError,
        ValueError,
        RuntimeError,
    ) as problem:  # what datasets and its HTTP layers raise: no such data set, no network, a gated one
        first = str(problem).strip().splitlines()[0] if str(problem).strip() else type(problem).__name__
        raise Refusal(
            f"{name}: no such file here, and the hub can't give it: {first[:200]}", EX_UNAVAILABLE
        ) from problem
    say(f"{name}: {gb(size)} of rows in {path}")
    return path


FORMS = {
    ".txt": "text", ".text": "text", ".md": "text", ".rst": "text", ".tex": "text", ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl",
    ".parquet": "parquet",
}  # fmt: skip
PACKED = (".gz", ".zst", ".bz2", ".xz", ".zip")
_HUB = re.compile(r"[\w-][\w.-]*/[\w.-]+(:[\w.-]+)?")


@shape
class Source:
    path: str
    form: str  # text, jsonl or parquet
    size: int


def find_sources(
    paths: Sequence[str], cache: str, say: Callable[[str], None], what: str = "data.path"
) -> tuple[Source, ...]:
    """In the order given; what a folder or a glob holds is sorted. Refuses what can't be read before anything is done."""
    if not paths:
        raise Refusal(
            f"{what} is empty: name text, jsonl or parquet files, folders of them, or a hub id (--data PATH)",
            EX_NOINPUT,
        )
    files = [found for path in paths for found in _files(path, cache, say)]
    twice = (
        next((path for place, path in enumerate(files) if path in files[:place]), None) if len(files) < 10_000 else None
    )
    if twice:
        say(f"{twice} is named twice: it is read twice")
    return tuple(_source(path) for path in files)


def _source(path: str) -> Source:
    ending = os.path.splitext(path)[1].lower()
    if ending in PACKED:
        unpack = {".gz": "gunzip -k", ".zip": "unzip"}.get(ending, "unxz -k")
        raise Refusal(f"{path} is packed: unpack it first, e.g. `{unpack} {path}`", EX_DATAERR)
    form = FORMS.get(ending, "text")
    check_head(path, text=form != "parquet")
    if form == "jsonl":
        with open(path, "rb") as file:
            if file.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
                raise Refusal(
                    f"{path} is one JSON array, not a row per line; `jq -c '.[]' {path} > rows.jsonl` makes it so",
                    EX_DATAERR,
                )
    return Source(path, form, os.path.getsize(path))


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
            f"data.validation is {text}: a share of the data lies between 0 and 1 (0.01 is one percent), a path is not"
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
    if _HUB.fullmatch(path) and not os.path.isdir(above) and os.path.splitext(path)[1].lower() not in (*FORMS, *PACKED):
        return [hub(path, cache, say)]
    near = os.listdir(above or ".") if os.path.isdir(above or ".") else []
    raise Refusal(f"{path} is not there{suggest_file(path, near)}", EX_NOINPUT)


def _filled(files: list[str], where: str, say: Callable[[str], None]) -> list[str]:
    """Among many an empty one is left out: a writer that had nothing to write left it."""
    empty = {path: None for path in files if os.path.isfile(path) and not os.path.getsize(path)}
    named = ", ".join(list(empty)[:3]) + (f" and {len(empty) - 3} more" if len(empty) > 3 else "")
    if len(empty) == len(files):
        raise Refusal(f"{where} holds nothing but empty files: {named}", EX_DATAERR)
    if empty:
        say(f"left out, being empty: {named}")
    return [path for path in files if path not in empty]


def _inside(folder: str, say: Callable[[str], None]) -> list[str]:
    found, others = [], set()
    for path in files_below(folder, say):
        ending = os.path.splitext(path)[1].lower()
        if ending in FORMS:
            found.append(path)
        else:
            others.add(ending or os.path.basename(path))
    if not found:
        there = f"found {', '.join(sorted(others)[:8])}" if others else "it is empty"
        raise Refusal(f"folder {folder} holds no {', '.join(FORMS)} file: {there}", EX_NOINPUT)
    return sorted(found)
