"""Reads a world's files back and says what of the held-out part stands in a training file: contents, wordings of
questions, whole rows.

The reader knows the words but none of the templates: what it finds does not depend on how the text was made.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stoker.training.world.world import VERBS, Lexicon, chain_held, fact_held, lexicon, order_held, pair_held, sum_held

Content = tuple[
    str | int, ...
]  # ("pair", person, noun), ("fact", thing, quality), ("sum", a, b, sign), ("order", low, high), ("chain", 8, 3, -4)
_SENTENCE = re.compile(r"(?<=[.?!])\s+|\n+")
_SUM = re.compile(r"\d+(?: [+-] \d+)+")
_NUMBER = re.compile(r"\d+")
_ASKS = re.compile(r".*\?$|(?:Say|Tell|Please|Count|Put|Can|Do)\b")
_SELF = re.compile(r"\b(?:I|[Mm]y|me|You|Your)\b")
_CUES = {
    "colour": r"\bcolour\b",
    "home": r"\bhome\b|\blives?\b|\bbelongs?\b",
    "food": r"\bfood\b|\beats?\b",
    "material": r"\bmaterial\b|\bmade\b",
}
_SOUND = r"\bsound\b|\bthe {} says?\b"


def sentences(text: str) -> list[str]:
    return [one for one in _SENTENCE.split(text) if one]


def core(sentence: str) -> str:
    """Without "Tell me: " and the like."""
    return sentence.rpartition(": ")[2]


class Reader:
    def __init__(self, lex: Lexicon) -> None:
        self.things = {fact.thing: [one.quality for one in lex.facts if one.thing == fact.thing] for fact in lex.facts}
        self.nouns = {*lex.places, *lex.things, *lex.dishes}
        self.names = set(lex.names)
        name, item = "|".join(lex.names), "|".join(lex.items)
        self.speaker = re.compile(rf"\b(?:(?:My name is|I am) ({name})\b|({name}) says:)")
        self.counted = re.compile(
            rf"\b(?:({name}) (?:has|with) (\d+) (?:{item})|({name})|({'|'.join(VERBS['+'])})"
            rf" (\d+)|({'|'.join(VERBS['-'])}) (\d+))\b"
        )
        classes = {
            "N": lex.names,
            "L": lex.places,
            "T": list(self.things),
            "I": lex.items,
            "D": lex.dishes,
            "K": [*_CUES, "sound"],
            "M": ["more", "less"],
        }
        self.masks = {word: mark for mark, words in classes.items() for word in words}

    def skeleton(self, sentence: str) -> str:
        """The sentence with its contents taken out."""
        plain = _NUMBER.sub("#", _SUM.sub("X", core(sentence)))
        return re.sub(r"[A-Za-z]+", lambda word: self.masks.get(word[0], word[0]), plain)

    def contents(self, text: str) -> set[Content]:
        """All that is said, asked or worked out in one document or conversation."""
        found: set[Content] = set()
        speaker = ""
        had: dict[str, list[int]] = {}  # what each has: the count at first, and each change
        for sentence in sentences(text):
            words = set(re.findall(r"[A-Za-z]+", sentence))
            introduced = self.speaker.search(sentence)
            if introduced:
                speaker = introduced[1] or introduced[2]
            people = words & self.names | ({speaker} if speaker and _SELF.search(sentence) else set())
            found |= {("pair", person, noun) for person in people for noun in words & self.nouns}
            found.update(self._asked(sentence, words))
            found.update(self._sums(sentence, had))
            found.update(_orders(sentence, words, had))
        return found

    def _asked(self, sentence: str, words: set[str]) -> Iterator[Content]:
        if not _ASKS.match(core(sentence)):
            return
        for thing in words & self.things.keys():
            for quality in self.things[thing]:
                if re.search(_CUES.get(quality) or _SOUND.format(thing), sentence):
                    yield "fact", thing, quality

    def _sums(self, sentence: str, had: dict[str, list[int]]) -> Iterator[Content]:
        for chain in _SUM.findall(sentence):
            number, *rest = chain.split()
            yield from _steps(
                [int(number), *[int(sign + other) for sign, other in zip(rest[::2], rest[1::2], strict=True)]]
            )
        person = ""
        for has, count, name, _, more, _, less in self.counted.findall(sentence):
            if has:
                had.pop(has, None)  # so that the last two are the ones told of last
                had[has] = [int(count)]
            person = has or name or person
            if (more or less) and person in had:
                had[person].append(int(more) if more else -int(less))
                yield from _steps(had[person])
        if (
            re.search(r"\b[Tt]ogether\b|^Count the|: Count the", sentence)
            and len(had) > 1
            and (" and " in sentence or "there" in sentence)
        ):
            first, second = _last_two(had)
            yield from _steps([first, second])


def _steps(numbers: list[int]) -> Iterator[Content]:
    """A count and its changes: each sum on the way, and the way itself."""
    value = numbers[0]
    for at, change in enumerate(numbers[1:], 1):
        if change < 0:
            yield "sum", value, -change, "-"
        else:
            yield "sum", min(value, change), max(value, change), "+"
        value += change
        if at > 1:
            yield "chain", *numbers[: at + 1]


def _last_two(had: dict[str, list[int]]) -> tuple[int, int]:
    first, second = list(had.values())[-2:]
    return sum(first), sum(second)


def _orders(sentence: str, words: set[str], had: dict[str, list[int]]) -> Iterator[Content]:
    numbers = [int(one) for one in _NUMBER.findall(sentence)]
    compares = words & {"more", "less"}
    if numbers and ("order" in words or "numbers" in words or (compares and words & {"or", "than"})):
        for at, one in enumerate(numbers):
            for other in numbers[:at]:
                if other != one:
                    yield "order", min(one, other), max(one, other)
    if compares and not numbers and len(had) > 1:
        first, second = _last_two(had)
        yield "order", min(first, second), max(first, second)


TRAINING = ("base", "midtrain", "sft", "pairs", "prompts")
HELD = ("midtrain-held-out", "sft-held-out", "pairs-held-out", "prompts-held-out", "questions")


def leaks(folder: str) -> list[str]:
    """One line for each; none: nothing leaks."""
    reader = Reader(lexicon(int(json.loads((Path(folder) / "world.json").read_text())["level"])))
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
    """Every text of a row, in order; of a bare answer only the words. Alternatives are not part of it."""
    told: list[str] = []
    for value in [value for key, value in row.items() if key != "alternatives"]:
        told += [value] if isinstance(value, str) else [str(one["content"]) for one in value]
    return "\n".join(told)


def _rows(folder: str, name: str) -> Iterator[tuple[int, dict[str, Any]]]:
    with (Path(folder) / f"{name}.jsonl").open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            yield number, json.loads(line)
