"""Reads a world's files and says what of the held-out part stands in a training file: contents, wordings of questions,
whole rows.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from stoker.contract.names import EX_DATAERR, EX_NOINPUT, Refusal
from stoker.contract.untrusted import parse_json, read_json
from stoker.training.world.lexicon import lexicon
from stoker.training.world.reading import Content, Reader, sentences
from stoker.training.world.splits import chain_held, fact_held, order_held, pair_held, sum_held

TRAINING = ("base", "midtrain", "sft", "pairs", "prompts")
HELD = ("midtrain-held-out", "sft-held-out", "pairs-held-out", "prompts-held-out", "questions")


def leaks(folder: str) -> list[str]:
    """One line for each; none: nothing leaks."""
    reader = Reader(lexicon(_level(folder)))
    asked = [(name, number, _asked(row)) for name in HELD for number, row in _rows(folder, name)]
    wordings = {reader.skeleton(sentences(text)[-1]) for _, _, text in asked}
    whole = {_all(row) for name in ("base-held-out", *HELD) for _, row in _rows(folder, name)}
    known: set[Content] = set()
    found: list[str] = []
    for name in TRAINING:
        for number, row in _rows(folder, name):
            text, at = _all(row), f"{name}.jsonl line {number}"
            contents = reader.contents(text)
            known |= contents
            found += [f"{at}: {_told(one)} is held out" for one in sorted(contents, key=str) if _held(one)]
            found += [
                f"{at}: the wording {one!r} is held out"
                for one in sorted({reader.skeleton(one) for one in sentences(text)} & wordings)
            ]
            if text in whole:
                found.append(f"{at}: the whole row is also held out")
    found += [
        f"{name}.jsonl line {number}: nothing in it is new"
        for name, number, text in asked
        if not reader.contents(text) - known
    ]
    return found


def _held(content: Content) -> bool:
    rest: Any = content[1:]
    match content[0]:
        case "sum":
            return sum_held(rest[0], rest[2], rest[1])
        case "chain":
            return chain_held(*rest)
        case "order":
            return order_held(*rest)
        case "fact":
            return fact_held(*rest)
        case _:
            return pair_held(*rest)


def _told(content: Content) -> str:
    if content[0] == "sum":
        return f"the sum {content[1]} {content[3]} {content[2]}"
    if content[0] == "chain":
        return f"the problem {' '.join([str(content[1]), *[f'{one:+}' for one in content[2:]]])}"
    return {"pair": "{} with {}", "fact": "the question for {}'s {}", "order": "the order of {} and {}"}[
        str(content[0])
    ].format(*content[1:])


def _asked(row: dict[str, Any]) -> str:
    """What the user said."""
    messages = row.get("messages", row.get("prompt"))
    if isinstance(messages, str):
        return messages
    return "\n".join([str(one["content"]) for one in messages or () if one["role"] == "user"])


def _all(row: dict[str, Any]) -> str:
    """Every text of a row, in order; of a bare answer only the words. Alternatives are nothing that is said."""
    told: list[str] = []
    for value in [value for key, value in row.items() if key != "alternatives"]:
        told += [value] if isinstance(value, str) else [str(one["content"]) for one in value]
    return "\n".join(told)


def _rows(folder: str, name: str) -> Iterator[tuple[int, dict[str, Any]]]:
    path = os.path.join(folder, f"{name}.jsonl")
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                yield number, parse_json(line)
    except OSError as problem:
        raise Refusal(f"{path} can't be read: {problem.strerror}; make the world again", EX_NOINPUT) from problem
    except ValueError as problem:
        raise Refusal(f"{path} is not jsonl: {problem}; make the world again", EX_DATAERR) from problem


def _level(folder: str) -> int:
    path = os.path.join(folder, "world.json")
    try:
        return int(read_json(path)["level"])
    except OSError as problem:
        raise Refusal(
            f"{path} can't be read: {problem.strerror}; a world that was made whole has it", EX_NOINPUT
        ) from problem
    except (ValueError, KeyError, TypeError) as problem:
        raise Refusal(
            f"{path} does not say the world's level ({problem}); make the world again", EX_DATAERR
        ) from problem
