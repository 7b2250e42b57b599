"""`--data FOLDER`: which file plays which role, by its name and by what its first row holds."""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Sequence
from typing import Any

from stoker.contract.names import EX_DATAERR, EX_NOINPUT, Refusal
from stoker.contract.shape import shape
from stoker.contract.untrusted import lines_of, open_regular, parse_json, text_lines
from stoker.training.data.ours import files_below

TEXT, ROWS, PARQUET, CSV = (".txt", ".text", ".md"), (".jsonl", ".ndjson", ".json"), ".parquet", ".csv"
# A name that says a role must hold what the role needs; `test`, `train`, `val` only say which half of something it is.
_ROLES = {
    "base": "base", "pretrain": "base", "midtrain": "midtrain", "sft": "sft", "chat": "sft", "pair": "pairs", "preference": "pairs", "prompt": "prompts",
    "question": "questions",
}  # fmt: skip
_FORMS = {"base": ("text",), "midtrain": ("chat",), "sft": ("chat",), "pairs": ("pair",), "prompts": ("prompt", "problem"),
          "questions": ("prompt", "problem", "choice")}  # fmt: skip
_OF_FORM = {
    "text": "base",
    "chat": "sft",
    "pair": "pairs",
    "prompt": "prompts",
    "problem": "prompts",
    "choice": "questions",
}
_WORDS = {"text": "text", "chat": "messages", "pair": "prompt, chosen and rejected", "prompt": "prompt and answer", "problem": "question and answer",
          "choice": "question, choices and answer"}  # fmt: skip
_HELD = re.compile(r"held.?out|(^|[-_.])(valid\w*|val|dev|test|eval)([-_.]|$)")
_LOOKED_FOR = (
    "base* or *.txt or rows with text; sft* or chat* with messages; pairs* with prompt, chosen, rejected; prompts* or"
    " GSM8K's train.jsonl; questions* or test* (GSM8K, ARC, MMLU)"
)
HELD_OUT = "-held-out"
TRAIN, HALVES = (
    ("train", "auxiliary_train"),
    ("dev", "val", "valid", "validation"),
)  # beside test, of published questions
_PART = re.compile(rf"(^|[-_.])(test|{'|'.join((*TRAIN, *HALVES))})([-_.]|$)")
_SHARD = re.compile(r"-\d+-of-\d+$")  # of the hub
ARRAY = "array"


@shape
class Found:
    roles: dict[str, tuple[str, ...]]  # role, or role-held-out -> paths
    unused: tuple[str, ...]


def find(folder: str) -> Found:
    if not os.path.isdir(folder):
        raise Refusal(f"--data {folder}: there is no such folder", EX_NOINPUT)
    roles: dict[str, list[str]] = {}
    unused: list[str] = []
    tables: dict[str, list[str]] = {}
    for path in files_below(folder, lambda line: None):
        shown = os.path.relpath(path, folder)
        if path.lower().endswith(CSV):
            tables.setdefault(os.path.dirname(path), []).append(path)
            continue
        role = role_of(shown, form_of(path))
        if role is None:
            unused.append(shown)
        else:
            roles.setdefault(role, []).append(path)
    if "questions" in roles:
        asked = tested([os.path.relpath(path, folder) for path in roles["questions"]])
        unused += [shown for path in roles["questions"] if (shown := os.path.relpath(path, folder)) not in asked]
        roles["questions"] = [path for path in roles["questions"] if os.path.relpath(path, folder) in asked]
    for place, paths in tables.items():
        if os.path.basename(place).lower() in (*TRAIN, *HALVES) or not all(_is_mmlu(path) for path in paths):
            unused += [os.path.relpath(path, folder) for path in paths]
        else:  # one folder of many subjects is one task
            roles.setdefault("questions", []).append(place if len(paths) > 1 else paths[0])
    if not roles:
        there = f"found {', '.join(unused[:6])}{' …' if len(unused) > 6 else ''}" if unused else "it is empty"
        raise Refusal(f"--data {folder}: nothing usable; looked for {_LOOKED_FOR}; {there}", EX_DATAERR)
    return Found({role: tuple(paths) for role, paths in roles.items()}, tuple(unused))


def role_of(shown: str, form: str | None) -> str | None:
    """`shown`: the path inside the folder; `form`: what the first row holds. None: no role. Pure."""
    parts = [os.path.splitext(part)[0].lower() for part in reversed(shown.split(os.sep))]
    named = next(
        (role for part in parts for word, role in _ROLES.items() if re.match(rf"{word}s?([-_.\d]|$)", part)), None
    )
    if named is not None and form == ARRAY:
        fix = f"`jq -c '.[]' {shown} > {os.path.splitext(shown)[0]}.jsonl` makes it so"
        raise Refusal(f"--data: {shown} is one JSON array, and one object per line is needed: {fix}", EX_DATAERR)
    if named is not None and shown.lower().endswith((*TEXT, *ROWS, PARQUET)) and form not in _FORMS[named]:
        wanted = " or ".join(_WORDS[one] for one in _FORMS[named])
        raise Refusal(
            f"--data: {shown} is called {named} and its first row has no {wanted}; fix it, or give it another name",
            EX_DATAERR,
        )
    if form in (None, ARRAY) or (named is None and shown.lower().endswith(".md")):
        return None
    if named is None and form == "choice" and any((half := _PART.search(part)) and half[2] in TRAIN for part in parts):
        return None
    held = any(_HELD.search(part) for part in parts)
    role = named or ("questions" if held and form in _FORMS["questions"] else _OF_FORM[form])
    return role + HELD_OUT if held and role != "questions" else role


def tested(shown: Sequence[str]) -> set[str]:
    """Those files of questions that are asked: where there is a test half, its dev and validation are not. A name that
    says `questions` is believed. Pure.
    """
    halves = {one: half[2] for one in shown if not _named_questions(one) and (half := _PART.search(_whole(one)))}
    tests = {_PART.sub(r"\1*\3", _whole(one)) for one, half in halves.items() if half == "test"}
    return {one for one in shown if halves.get(one) not in HALVES or _PART.sub(r"\1*\3", _whole(one)) not in tests}


def _whole(shown: str) -> str:
    """The path with `.` between its parts, without an ending and the number of a shard."""
    return _SHARD.sub("", os.path.splitext(shown)[0].lower()).replace(os.sep, ".")


def _named_questions(shown: str) -> bool:
    return any(re.match(r"questions?([-_.\d]|$)", part) for part in shown.lower().split(os.sep))


def form_of(path: str) -> str | None:
    ending = os.path.splitext(path)[1].lower()
    if ending in TEXT:
        return "text"
    if ending == PARQUET:
        from stoker.training.data.parquet import open_parquet

        return form_of_row(dict.fromkeys(open_parquet(path).schema_arrow.names, ""))
    if ending in ROWS:
        return ARRAY if _begins_a_list(path) else form_of_row(_first_row(path))
    return None


def form_of_row(row: Any) -> str | None:
    if not isinstance(row, dict):
        return None
    for form, needed in (
        ("chat", ("messages",)),
        ("pair", ("chosen", "rejected")),
        ("choice", ("question", "choices")),
        ("problem", ("question", "answer")),
        ("prompt", ("prompt", "answer")),
        ("text", ("text",)),
    ):
        if all(name in row for name in needed):
            return form
    inside = row.get("question")
    return "choice" if isinstance(inside, dict) and "choices" in inside else None  # ARC as AI2 publishes it


def _begins_a_list(path: str) -> bool:
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            return file.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")
    except OSError as problem:
        raise Refusal(f"--data: {path} can't be read: {problem.strerror}", EX_NOINPUT) from problem


def _first_row(path: str) -> Any:
    try:
        for line in lines_of(path):
            if not line.isspace():
                return parse_json(line.removeprefix(b"\xef\xbb\xbf"))
    except OSError as problem:
        raise Refusal(f"--data: {path} can't be read: {problem.strerror}", EX_NOINPUT) from problem
    except ValueError:
        return None  # said as a file that is not used, or refused by its name
    return None


def _is_mmlu(path: str) -> bool:
    try:
        return len(next(csv.reader(text_lines(path)), [])) == 6
    except (OSError, ValueError, csv.Error) as problem:
        raise Refusal(f"--data: {path} can't be read: {problem}", EX_NOINPUT) from problem
