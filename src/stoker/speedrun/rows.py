"""Rows that can't be used, found before anything starts: counted, named, and left out only while they are few."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from stoker.contract.names import EX_DATAERR, EX_NOINPUT, Refusal
from stoker.contract.shape import shape
from stoker.contract.untrusted import lines_of, parse_json, read_json
from stoker.contract.wholefile import WholeFile, sync_folder, write_json
from stoker.training.data.parquet import open_parquet, read_rows
from stoker.training.data.read import MESSAGES, texts
from stoker.training.data.sources import find_sources
from stoker.training.data.units import split
from stoker.training.tokenizer.chat import LEARNED, ROLES

TOLERATED = 0.01
SCHEMA = 1
NAMED = 5  # lines that a message names
PARQUET, TEXT_KEY = ".parquet", "text"
MOST_SPANS = 256  # of 1 MB


@shape
class Checked:
    total: int
    bad: int
    why: str  # for people: how many of which kind, and the first lines


def chat_fault(row: dict[str, Any]) -> str:
    told = row.get(MESSAGES)
    if not isinstance(told, list) or not told:
        return "without messages"
    for one in told:
        if not isinstance(one, dict) or one.get("role") not in ROLES:
            return f"with the unknown role {one.get('role') if isinstance(one, dict) else one!r}"
        if not isinstance(one.get("content"), str):
            return "with a message that is no text"
    return "" if any(one["role"] == LEARNED for one in told) else f"without a turn of the {LEARNED}"


def pair_fault(row: dict[str, Any]) -> str:
    if not _asks(row.get("prompt")):
        return "without a prompt"
    if not all(isinstance(row.get(name), str) and row[name].strip() for name in ("chosen", "rejected")):
        return "without chosen and rejected as texts"
    return "with chosen and rejected alike" if row["chosen"].strip() == row["rejected"].strip() else ""


def prompt_fault(row: dict[str, Any]) -> str:
    if not _asks(row.get("prompt", row.get("question"))):
        return "without a prompt"
    answer = row.get("answer")
    return (
        ""
        if isinstance(answer, (str, int, float)) and not isinstance(answer, bool) and str(answer).strip()
        else "without an answer"
    )


def _asks(prompt: Any) -> bool:
    if isinstance(prompt, str):
        return bool(prompt.strip())
    return (
        isinstance(prompt, list)
        and bool(prompt)
        and all(isinstance(one, dict) and one.get("role") in ROLES for one in prompt)
    )


FAULTS: dict[str, Callable[[dict[str, Any]], str]] = {
    "midtrain": chat_fault,
    "sft": chat_fault,
    "pairs": pair_fault,
    "prompts": prompt_fault,
}


def rows_of(path: str, fault: Callable[[dict[str, Any]], str]) -> Iterator[tuple[int, bytes, str]]:
    """(line number, the line, what is wrong with it); a row of a parquet file is the line it would be."""
    if path.lower().endswith(PARQUET):
        for number, row in enumerate(_parquet(path), 1):
            yield number, json.dumps(row, ensure_ascii=False, default=str).encode("utf-8", "surrogatepass"), fault(row)
        return
    try:
        for number, line in enumerate(lines_of(path), 1):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if line.isspace() or not line:
                continue
            try:
                row = parse_json(line)
            except ValueError:
                yield number, line, "not JSON"
                continue
            yield number, line, fault(row) if isinstance(row, dict) else "not an object"
    except OSError as problem:
        raise Refusal(f"{path} can't be read: {problem.strerror}", EX_NOINPUT) from problem
    except ValueError as problem:
        raise Refusal(f"{path}: {problem}: is this a row per line?", EX_DATAERR) from problem


def _parquet(path: str) -> Iterator[dict[str, Any]]:
    table = open_parquet(path)
    for group in range(table.metadata.num_row_groups):
        for some in read_rows(path, table, group, table.schema_arrow.names):
            yield from some


def check_rows(role: str, path: str) -> Checked:
    """Refuses nothing: what is found is judged by `judge`, over all files of a role."""
    total, kinds, lines = 0, dict[str, int](), list[int]()
    for number, _, wrong in rows_of(path, FAULTS[role]):
        total += 1
        if wrong:
            kinds[wrong] = kinds.get(wrong, 0) + 1
            lines += [number] if len(lines) < NAMED else []
    bad = sum(kinds.values())
    counted = ", ".join(f"{count:,} {kind}" for kind, count in sorted(kinds.items(), key=lambda item: -item[1]))
    places = (
        f"{'row' if path.lower().endswith(PARQUET) else 'line'}{'s' if bad > 1 else ''}"
        f" {', '.join(map(str, lines))}{' …' if bad > len(lines) else ''}"
    )
    return Checked(total, bad, f"{counted}; {places}" if bad else "")


def judge(path: str, checked: Checked) -> str:
    """The line to be said about rows that are left out; empty where all are sound."""
    if not checked.total:
        raise Refusal(f"{path} has no rows", EX_DATAERR)
    if not checked.bad:
        return ""
    line = f"{path}: {checked.bad:,} of {checked.total:,} rows can't be used: {checked.why}"
    if checked.bad >= TOLERATED * checked.total:
        raise Refusal(f"{line}; below 1 % they would be left out: fix the file", EX_DATAERR)
    return f"{line}; left out"


def check_once(role: str, path: str, digest: str, cache: str) -> Checked:
    """Remembered by the file's bytes: a finished speedrun reads no data."""
    return _once(f"{digest}:{FAULTS[role].__name__}", lambda: check_rows(role, path), cache)


def _once(name: str, check: Callable[[], Checked], cache: str) -> Checked:
    index = os.path.join(cache, "checked-rows.json")
    known = _read(index)
    if name in known:
        return Checked(*known[name])
    found = check()
    os.makedirs(cache, exist_ok=True)
    write_json(index, {"schema": SCHEMA, "files": {**_read(index), name: [found.total, found.bad, found.why]}})
    return found


def check_text(path: str, digest: str, cache: str) -> None:
    """As the tokenizer will read it, where one wrong row is refused: all of it, or the beginning and the end of what is
    larger than 256 MB.
    """

    def check() -> Checked:
        spans, _ = split(find_sources((path,), cache, lambda line: None), 0.0)
        looked_at = spans if len(spans) <= MOST_SPANS else [*spans[: MOST_SPANS // 2], *spans[-MOST_SPANS // 2 :]]
        count = sum(1 for span in looked_at for text, _ in texts(span, TEXT_KEY) if text.strip())
        if not count:
            raise Refusal(f"{path} holds no text", EX_DATAERR)
        return Checked(count, 0, "")

    _once(f"{digest}:text", check, cache)


def check_questions(path: str, digest: str, cache: str) -> None:
    """As the evaluation will read them: what it would refuse after hours of training is refused now."""
    from stoker.training.evaluate.tasks import read_tasks

    _once(f"{digest}:questions", lambda: Checked(len(read_tasks((path,), 0)[0].questions), 0, ""), cache)


def _read(index: str) -> dict[str, Any]:
    try:
        told = read_json(index)
    except (OSError, ValueError):
        return {}  # it only saves reading: what it held is found again
    files = told.get("files") if isinstance(told, dict) and told.get("schema") == SCHEMA else None
    return files if isinstance(files, dict) else {}


def copy_usable(role: str, sources: Sequence[str], target: str) -> None:
    """The usable rows of all sources in one file: whole, or not there."""
    os.makedirs(os.path.dirname(target), exist_ok=True)
    with WholeFile(target) as file:
        for path in sources:
            file.writelines(line.rstrip(b"\r\n") + b"\n" for _, line, wrong in rows_of(path, FAULTS[role]) if not wrong)
    sync_folder(os.path.dirname(target))
