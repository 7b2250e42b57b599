"""Rows that can't be used, found before anything starts: counted, named, and left out only while they are few."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from stoker.contract.disk_space import DiskSpace
from stoker.contract.errors import EX_DATAERR, Refusal
from stoker.contract.frozen import frozen
from stoker.contract.safe_io import PRIVATE, AtomicFile, read_json, sync_folder, write_json
from stoker.training.data.formats.format import Format, Unusable
from stoker.training.data.formats.preferences import preference
from stoker.training.data.formats.table import recognise
from stoker.training.data.read import key_names, texts, turns_in
from stoker.training.data.reasons import TOLERATED, Reasons
from stoker.training.data.rows import Row, as_line, counted_in, rows
from stoker.training.data.sources import find_sources
from stoker.training.data.units import split
from stoker.training.tokenizer.chat import ROLES

Check = Callable[[int, Row], None]  # of a row's number and the row
SCHEMA = 1
RULES = 2  # raised when the same rows would be judged otherwise
TEXT_KEY = "text"
MOST_SPANS = 256  # of 1 MB


@frozen
class Checked:
    total: int
    bad: int
    why: str  # for people: the reasons, how many rows each has, and which


def _chats(path: str) -> Check:
    """By the format of the first row that has one, as training reads the file."""
    chosen: list[Format] = []

    def check(number: int, row: Row) -> None:
        made = chosen[0] if chosen else recognise(row)
        if made is None:
            raise Unusable(f"no known format of conversations; its keys: {key_names(row)}")
        chosen[:] = [made]
        turns_in(row, made, lambda: f"{path}, {counted_in(path)} {number}")

    return check


def _pairs(path: str) -> Check:
    def check(number: int, row: Row) -> None:
        preference(row)

    return check


def _prompts(path: str) -> Check:
    def check(number: int, row: Row) -> None:
        if not _asks(row.get("prompt", row.get("question"))):
            raise Unusable("without a prompt")
        answer = row.get("answer")
        if isinstance(answer, bool) or not isinstance(answer, (str, int, float)) or not str(answer).strip():
            raise Unusable("without an answer")

    return check


def _asks(prompt: Any) -> bool:
    if isinstance(prompt, str):
        return bool(prompt.strip())
    return (
        isinstance(prompt, list)
        and bool(prompt)
        and all(isinstance(one, dict) and one.get("role") in ROLES for one in prompt)
    )


# Of each role: what judges a file's rows. It raises Unusable.
CHECKS: dict[str, Callable[[str], Check]] = {
    "midtrain": _chats,
    "sft": _chats,
    "pairs": _pairs,
    "prompts": _prompts,
}


def rows_of(role: str, path: str) -> Iterator[tuple[int, Row, str]]:
    """(number, row, why it can't be used)."""
    check = CHECKS[role](path)
    for number, row in rows(path):
        try:
            check(number, row)
        except Unusable as problem:
            yield number, row, str(problem)
        else:
            yield number, row, ""


def check_rows(role: str, path: str) -> Checked:
    """What is found is judged by `judge`. A file that is no JSON or has rows of two formats is refused at once."""
    total, wrong = 0, Reasons()
    for number, _, why in rows_of(role, path):
        total += 1
        if why:
            wrong.add(why, number)
    return Checked(total, wrong.count, str(wrong))


def judge(path: str, checked: Checked) -> str:
    """The line about rows that are left out; empty where all can be used."""
    if not checked.total:
        raise Refusal(f"{path} has no rows", EX_DATAERR)
    if not checked.bad:
        return ""
    line = f"{path}: {checked.bad:,} of {checked.total:,} rows can't be used: {checked.why}"
    if checked.bad >= TOLERATED * checked.total:
        raise Refusal(f"{line}; that is 1 % or more: fix the file", EX_DATAERR)
    return f"{line}; left out"


def check_once(role: str, path: str, digest: str, cache: str) -> Checked:
    """Remembered by the file's bytes: a finished speedrun reads no data."""
    return _once(f"{digest}:{role}:{RULES}", lambda: check_rows(role, path), cache)


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
    room = DiskSpace(os.path.dirname(target), "--runs-dir names another place")
    with AtomicFile(target, PRIVATE) as file:
        for path in sources:
            for _, row, wrong in rows_of(role, path):
                if not wrong:
                    data = as_line(row)
                    room.take(len(data))
                    file.write(data)
    sync_folder(os.path.dirname(target))
