"""What the chain is fed: the built-in world, or `--data FOLDER` with the world for what is missing there. Which file plays
which role follows from its name and from what its first row holds.
"""

from __future__ import annotations

import csv
import hashlib
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

from stoker.contract.names import EX_DATAERR, EX_NOINPUT, Refusal
from stoker.contract.shape import shape
from stoker.contract.untrusted import lines_of, open_regular, parse_json, text_lines
from stoker.speedrun.rows import FAULTS, PARQUET, check_once, check_questions, check_text, copy_usable, judge
from stoker.speedrun.stages import FILES, OUR_WORLD, Data, File, Place
from stoker.training.data.ours import digest_files, files_below

TEXT, ROWS, CSV = (".txt", ".text", ".md"), (".jsonl", ".ndjson", ".json"), ".csv"
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
_ONE_FILE = ("pairs", "prompts", *(name for name in FILES if name.endswith(HELD_OUT)))  # keys that name one path


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


@shape
class Copy:
    """Usable rows that must be written before a stage reads them."""

    role: str
    sources: tuple[str, ...]
    target: str


def digest_of(path: str, cache: str) -> str:
    """Of a file by its bytes; of a folder by the names, sizes and times of what it holds."""
    if os.path.isdir(path):
        inside = sorted(os.path.join(place, name) for place, _, names in os.walk(path) for name in names)
        about = [(os.path.relpath(one, path), os.stat(one).st_size, os.stat(one).st_mtime_ns) for one in inside]
        return "folder " + together([repr(one) for one in about])
    return digest_files([path], cache, len(os.sched_getaffinity(0)), lambda line: None)[0]


def together(digests: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()


def material(folder: str, speedrun: str, cache: str) -> tuple[Data, Callable[[], None]]:
    """The data, and what writes the copies that stages will read. `speedrun`: the folder where these go."""
    found = find(folder)
    places: dict[str, tuple[Place, ...]] = {}
    copies: list[Copy] = []
    lines = []
    for role, paths in found.roles.items():
        places[role], copied, said = _role(role, [os.path.abspath(path) for path in paths], speedrun, cache)
        copies += copied
        lines += said
    lines = [_summary(folder, found), *lines]
    wanted = [role for role in FILES if not role.endswith(HELD_OUT)]
    missing = [role for role in wanted if role not in places]
    for role in missing:
        if role + HELD_OUT in places:
            unfit = ", ".join(os.path.relpath(path, folder) for path in found.roles[role + HELD_OUT])
            lines.append(
                f"not used: {unfit}, because the folder has no {role}: what is held out of the built-in world's goes"
                " with that"
            )
        places |= {one: OUR_WORLD.places[one] for one in (role, role + HELD_OUT) if one in FILES}
    if missing:
        lines.append(f"from the built-in world, because the folder has none: {', '.join(missing)}")

    def make_copies() -> None:
        for copy in copies:
            if not os.path.exists(copy.target):
                copy_usable(copy.role, copy.sources, copy.target)

    return Data(places, tuple(lines)), make_copies


def _role(role: str, paths: list[str], speedrun: str, cache: str) -> tuple[tuple[Place, ...], list[Copy], list[str]]:
    known = {path: digest_of(path, cache) for path in paths}
    kind = role.removesuffix(HELD_OUT)
    if kind == "questions":
        for path in paths:
            check_questions(path, known[path], cache)
    if kind == "base":
        for path in paths:
            check_text(path, known[path], cache)
    rows = [path for path in paths if path.lower().endswith((*ROWS, PARQUET))] if kind in FAULTS else []
    said = [line for path in rows if (line := judge(path, check_once(kind, path, known[path], cache)))]
    others = [path for path in paths if path not in rows]
    if role in _ONE_FILE and len(paths) > 1 and (others or not rows):
        raise Refusal(
            f"--data: {len(paths)} files for {role} ({', '.join(map(os.path.basename, paths[:4]))}): make them one",
            EX_DATAERR,
        )
    as_lines = kind in ("pairs", "prompts") and any(
        path.lower().endswith(PARQUET) for path in rows
    )  # their stages read jsonl
    if not said and not as_lines and not (role in _ONE_FILE and len(rows) > 1):
        return tuple(File(path, known[path]) for path in paths), [], []
    digest = together([known[path] for path in rows])
    copy = Copy(kind, tuple(rows), os.path.join(os.path.abspath(speedrun), "data", f"{role}-{digest[:12]}.jsonl"))
    return (File(copy.target, digest), *(File(path, known[path]) for path in others)), [copy], said


def _summary(folder: str, found: Found) -> str:
    told = "; ".join(
        f"{role}:"
        f" {', '.join(os.path.relpath(path, folder) for path in paths[:3])}{f' and {len(paths) - 3} more' if len(paths) > 3 else ''}"
        for role, paths in found.roles.items()
    )
    unused = f"; not used: {', '.join(found.unused[:6])}{' …' if len(found.unused) > 6 else ''}" if found.unused else ""
    return f"data {folder}: {told}{unused}"
