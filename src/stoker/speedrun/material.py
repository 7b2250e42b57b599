"""What the chain is fed: the built-in world, or `--data FOLDER` with the world for what is missing there. Which file plays
which role follows from its name and from what its first row holds.
"""

from __future__ import annotations

import csv
import hashlib
import itertools
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

from stoker.contract.errors import EX_DATAERR, EX_NOINPUT, Refusal
from stoker.contract.frozen import frozen
from stoker.contract.safe_io import read_text_lines
from stoker.contract.units import plural
from stoker.speedrun.rows import CHECKS, TEXT_KEY, check_once, check_questions, check_text, copy_usable, judge
from stoker.speedrun.stages import FILES, OUR_WORLD, Data, File, Place
from stoker.speedrun.state import COPIES
from stoker.training.data.formats.questions import LETTERS
from stoker.training.data.formats.table import recognise, recognise_any
from stoker.training.data.ours import digest_files, files_below
from stoker.training.data.rows import is_known, kind_of, rows
from stoker.training.data.unpack import packing_of, unpacked_name

CSV = ".csv"
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
# Formats whose rows are more than conversations.
_ASKING = {"prompt-answer": "prompt", "gsm8k": "problem", "arc": "choice", "mmlu": "choice"}
_WORDS = {"text": "text", "chat": "conversation (`stoker docs data` lists the formats)", "pair": "chosen and rejected", "prompt": "prompt and answer",
          "problem": "question and answer", "choice": "question, choices and answer"}  # fmt: skip
_HELD = re.compile(r"held.?out|(^|[-_.])(valid\w*|val|dev|test|eval)([-_.]|$)")
_LOOKED_FOR = (
    "base* or *.txt or rows with text; sft* or chat* with conversations (messages, ShareGPT, Alpaca …); pairs* with"
    " chosen and rejected; prompts* or GSM8K's train.jsonl; questions* or test* (GSM8K, ARC, MMLU)"
)
HELD_OUT = "-held-out"
TRAIN, HALVES = (
    ("train", "auxiliary_train"),
    ("dev", "val", "valid", "validation"),
)  # beside test, of published questions
_PART = re.compile(rf"(^|[-_.])(test|{'|'.join((*TRAIN, *HALVES))})([-_.]|$)")
_SHARD = re.compile(r"-\d+-of-\d+$")  # of the hub
_ONE_FILE = ("pairs", "prompts", *(name for name in FILES if name.endswith(HELD_OUT)))  # keys that name one path


@frozen
class Found:
    roles: dict[str, tuple[str, ...]]  # role, or role-held-out -> paths
    unused: tuple[str, ...]


def find(folder: str) -> Found:
    if not os.path.isdir(folder):
        raise Refusal(f"--data {folder}: no such folder", EX_NOINPUT)
    roles: dict[str, list[str]] = {}
    unused: list[str] = []
    tables: dict[str, list[str]] = {}
    for path in files_below(folder, lambda line: None):
        shown = os.path.relpath(path, folder)
        if path.lower().endswith(CSV) and _is_mmlu(path):
            tables.setdefault(os.path.dirname(path), []).append(path)
            continue
        role = role_of(shown, forms_of(path, shown))
        if role is None:
            unused.append(shown)
        else:
            roles.setdefault(role, []).append(path)
    if "questions" in roles:
        asked = tested([os.path.relpath(path, folder) for path in roles["questions"]])
        unused += [shown for path in roles["questions"] if (shown := os.path.relpath(path, folder)) not in asked]
        roles["questions"] = [path for path in roles["questions"] if os.path.relpath(path, folder) in asked]
    for place, paths in tables.items():
        if os.path.basename(place).lower() in (*TRAIN, *HALVES):
            unused += [os.path.relpath(path, folder) for path in paths]
        else:  # one folder of many subjects is one task
            roles.setdefault("questions", []).append(place if len(paths) > 1 else paths[0])
    if not roles:
        there = f"found {', '.join(unused[:6])}{' …' if len(unused) > 6 else ''}" if unused else "it is empty"
        raise Refusal(f"--data {folder}: nothing usable; looked for {_LOOKED_FOR}; {there}", EX_DATAERR)
    return Found({role: tuple(paths) for role, paths in roles.items()}, tuple(unused))


def role_of(shown: str, forms: Sequence[str]) -> str | None:
    """`shown`: the path inside the folder; `forms`: what the first row can be, most likely first. None: no role. Pure."""
    parts, named = _parts(shown), _named(shown)
    form = next((form for form in forms if named is None or form in _FORMS[named]), None)
    if named is not None and is_known(shown) and form is None:
        wanted = " or ".join(_WORDS[one] for one in _FORMS[named])
        raise Refusal(
            f"--data: {shown} is called {named} and its first row has no {wanted}; fix it, or give it another name",
            EX_DATAERR,
        )
    if form is None or (named is None and shown.lower().endswith(".md")):
        return None
    if named is None and form == "choice" and any((half := _PART.search(part)) and half[2] in TRAIN for part in parts):
        return None
    held = any(_HELD.search(part) for part in parts)
    role = named or ("questions" if held and form in _FORMS["questions"] else _OF_FORM[form])
    return role + HELD_OUT if held and role != "questions" else role


def _parts(shown: str) -> list[str]:
    return [os.path.splitext(unpacked_name(part))[0].lower() for part in reversed(shown.split(os.sep))]


def _named(shown: str) -> str | None:
    """The role that its name says."""
    return next(
        (role for part in _parts(shown) for word, role in _ROLES.items() if re.match(rf"{word}s?([-_.\d]|$)", part)),
        None,
    )


def tested(shown: Sequence[str]) -> set[str]:
    """Those files of questions that are asked: where there is a test half, its dev and validation are not. A name that
    says `questions` is believed. Pure.
    """
    halves = {one: half[2] for one in shown if not _named_questions(one) and (half := _PART.search(_whole(one)))}
    tests = {_PART.sub(r"\1*\3", _whole(one)) for one, half in halves.items() if half == "test"}
    return {one for one in shown if halves.get(one) not in HALVES or _PART.sub(r"\1*\3", _whole(one)) not in tests}


def _whole(shown: str) -> str:
    """The path with `.` between its parts, without an ending and the number of a shard."""
    return _SHARD.sub("", os.path.splitext(unpacked_name(shown))[0].lower()).replace(os.sep, ".")


def _named_questions(shown: str) -> bool:
    return any(re.match(r"questions?([-_.\d]|$)", part) for part in shown.lower().split(os.sep))


def forms_of(path: str, shown: str) -> tuple[str, ...]:
    if not is_known(path):
        return ()
    if kind_of(path) == "text":
        return ("text",)
    try:
        _, row = next(iter(rows(path)), (0, None))
    except Refusal:
        readable = kind_of(path) in ("jsonl", "json", "csv") and not packing_of(path)
        if _named(shown) is None and readable:  # no rows: reported as a file that is not used
            return ()
        raise
    except OSError as problem:
        raise Refusal(f"--data: {path} can't be read: {problem.strerror}", EX_NOINPUT) from problem
    return forms_of_row(row)


def forms_of_row(row: Any) -> tuple[str, ...]:
    """What it can be for, as `stoker data show` recognises it first; a question can be learned as a chat, too."""
    if not isinstance(row, dict):
        return ()
    found, made, chat = list[str](), recognise_any(row), recognise(row)
    if made is not None:
        found.append("pair" if made.preference is not None else _ASKING.get(made.name, "chat"))
    if isinstance(row.get(TEXT_KEY), str):
        found.append("text")
    return (*found, "chat") if chat is not None and "chat" not in found else tuple(found)


_FIRST_ROW = 1000  # lines, at most: of quotes that open as soon as they close a row of any length is made


def _is_mmlu(path: str) -> bool:
    try:
        cells = next(csv.reader(itertools.islice(read_text_lines(path), _FIRST_ROW)), [])
        return len(cells) == 6 and cells[-1].strip().upper() in (*LETTERS[:4], "ANSWER")
    except (OSError, ValueError, csv.Error) as problem:
        raise Refusal(f"--data: {path} can't be read: {problem}", EX_NOINPUT) from problem


@frozen
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
    listed = [path for path in paths if kind_of(path) != "text"] if kind in CHECKS else []
    said = {path: judge(path, check_once(kind, path, known[path], cache)) for path in listed}
    lines = [line for line in said.values() if line]
    others = [path for path in paths if path not in listed]
    if role in _ONE_FILE and len(paths) > 1 and (others or not listed):
        raise Refusal(
            f"--data: {plural(len(paths), 'file')} for {role} ({', '.join(map(os.path.basename, paths[:4]))}): make them one",
            EX_DATAERR,
        )

    def copy_of(sources: Sequence[str]) -> tuple[Copy, File]:
        digest = together([known[path] for path in sources])
        target = os.path.join(os.path.abspath(speedrun), COPIES, f"{role}-{digest[:12]}.jsonl")
        return Copy(kind, tuple(sources), target), File(target, digest)

    if role in _ONE_FILE and len(listed) > 1:
        _refuse_unlike(role, listed)
        copy, place = copy_of(listed)
        return (place,), [copy], lines
    # Rows that can't be used are left out here: a stage's held-out part may be so small that one is too many.
    as_lines = [path for path in listed if said[path] or (kind in ("pairs", "prompts") and not _is_plain(path))]
    copies = {path: copy_of([path]) for path in as_lines}
    places = tuple(copies[path][1] if path in copies else File(path, known[path]) for path in paths)
    return places, [copy for copy, _ in copies.values()], lines


def _is_plain(path: str) -> bool:
    """As the stages of pairs and prompts read it."""
    return kind_of(path) == "jsonl" and not packing_of(path)


def _refuse_unlike(role: str, paths: Sequence[str]) -> None:
    """Rows of one file have one format."""
    formats = {path: made.name if (made := recognise_any(row)) else "" for path in paths for _, row in _first(path)}
    names = list(dict.fromkeys(formats.values()))
    if len(names) > 1 and not set(names) <= set(_ASKING):
        of = ", ".join(f"{os.path.basename(path)}: {name}" for path, name in list(formats.items())[:4])
        raise Refusal(f"--data: the files for {role} have several formats ({of}): use one format", EX_DATAERR)


def _first(path: str) -> Sequence[tuple[int, dict[str, Any]]]:
    return list(itertools.islice(rows(path), 1))


def _summary(folder: str, found: Found) -> str:
    told = "; ".join(
        f"{role}:"
        f" {', '.join(os.path.relpath(path, folder) for path in paths[:3])}{f' and {len(paths) - 3} more' if len(paths) > 3 else ''}"
        for role, paths in found.roles.items()
    )
    unused = f"; not used: {', '.join(found.unused[:6])}{' …' if len(found.unused) > 6 else ''}" if found.unused else ""
    return f"data {folder}: {told}{unused}"
