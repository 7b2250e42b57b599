"""Writes a world: the same seed, level and size give the same bytes, a larger size begins with the smaller one's rows."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from functools import cache
from hashlib import sha256
from itertools import islice
from json.encoder import encode_basestring_ascii as quoted
from zlib import crc32

from stoker.contract.errors import EX_CANTCREAT, EX_USAGE, Refusal
from stoker.contract.frozen import frozen
from stoker.contract.safe_io import AtomicFile, sync_folder, write_atomic
from stoker.training.world import arithmetic, people
from stoker.training.world.world import LEADS, Case, Dice, Fact, World, asked, loose, prompt_of, strict, wordings

# `fact`: what is always true in this world, said in many ways. Base text states every fact; some are asked about only
# in held-out questions.


HELD_EVERY = 20
STATED = {
    "colour": "The {t} is {v}.|The colour of the {t} is {v}.|Every {t} is {v}.|The {t} has the colour {v}."
    "|You see a {t}. It is {v}.",
    "home": "The {t} lives in the {v}.|The home of the {t} is the {v}.|Every {t} lives in the {v}."
    "|The {t} has a home in the {v}.",
    "food": "The {t} eats {v}.|The food of the {t} is {v}.|Every {t} eats {v}.|The {t} has {v} as food.",
    "sound": "The {t} says {v}.|The sound of the {t} is {v}.|Every {t} says {v}.|The {t} has the sound {v}.",
    "material": "The {t} is made of {v}.|The material of the {t} is {v}.|Every {t} is made of {v}."
    "|The {t} has {v} as material.",
}
THING_HOME = STATED["home"].replace("lives in", "belongs in")
ANY = wordings(
    "What is the {k} of the {t}? Say the {k} of the {t}. Tell me the {k} of the {t}. Which {k} has the {t}?"
    " What {k} does the {t} have? Can you say the {k} of the {t}? The {k} of the {t} is what?"
    " Do you know the {k} of the {t}?",
    "Which {k} does the {t} have? Please say the {k} of the {t}. Say which {k} the {t} has.",
)
OWN = {
    "colour": wordings("What colour is the {t}? Say what colour the {t} is.", "Which colour is the {t}?"),
    "home": wordings("Where does the {t} live? Say where the {t} lives.", "Do you know where the {t} lives?"),
    "food": wordings("What does the {t} eat? Say what the {t} eats.", "Do you know what the {t} eats?"),
    "sound": wordings("What does the {t} say? Which sound is from the {t}?", "Do you know what the {t} says?"),
    "material": wordings(
        "What is the {t} made of? Say what the {t} is made of.",
        "Do you know what the {t} is made of?",
    ),
}
THING_OWN = wordings("Where does the {t} belong? Say where the {t} belongs.", "Do you know where the {t} belongs?")


@cache
def _statements(fact: Fact, thing: bool) -> tuple[str, ...]:
    forms = THING_HOME if thing and fact.quality == "home" else STATED[fact.quality]
    return tuple(one.format(t=fact.thing, v=fact.value) for one in forms.split("|"))


@cache
def _questions_facts(fact: Fact, thing: bool, held: bool) -> tuple[str, ...]:
    own = THING_OWN if thing and fact.quality == "home" else OWN[fact.quality]
    return tuple(
        one.format(t=fact.thing, k=fact.quality)
        for one in ((*ANY.held, *own.held) if held else (*ANY.learned, *own.learned))
    )


def case(w: World, dice: Dice, held: bool) -> Case:
    fact = dice.pick(w.facts[held])
    thing = fact.thing in w.lexicon.things
    wrong = fact.value
    while wrong == fact.value:
        wrong = dice.pick(w.values[fact.quality])
    said = _statements(fact, thing)[0]
    prompt = dice.pick(LEADS) + dice.pick(_questions_facts(fact, thing, held))
    return Case("fact", prompt, fact.value, said, wrong, said.replace(fact.value, wrong), among=w.values[fact.quality])


def text(w: World, dice: Dice, held: bool) -> str:
    """Every fact must be known before it is asked: texts with facts are split by their whole wording."""
    while True:
        found = _mixture(w, dice)
        if (crc32(found.encode()) % HELD_EVERY == 0) == held:
            return found


def _mixture(w: World, dice: Dice) -> str:
    """All about one thing, or one quality of several, or both mixed."""
    every, draw = w.lexicon.facts, dice.random()
    if draw < 0.4:
        told = w.facts_of[dice.pick(every).thing] * 2
    elif draw < 0.6:
        told = dice.some(w.facts_of[dice.pick(every).quality], 6)
    else:
        told = dice.some(every, 6)
    return " ".join([dice.pick(_statements(one, one.thing in w.lexicon.things)) for one in told])


VERSION = 4  # of what is written: another number, other bytes
SCHEMA = 1
WORLD = "world.json"
CHUNK = 4096  # rows that are joined and written at once
# Answers of poor form: the content may be right, but nobody wants it in this form.
RUDE = ("Go away.", "You know nothing.", "I do not like you.", "That is a bad question.")
OFF = (
    "It is a good day and I am happy.",
    "The sun is out, my friend.",
    "Tea is good and cake is good too.",
    "The park is a good place to be.",
)
SILENT = ("I do not know.", "That is a good question.", "I want to think first.", "You can say it.")


def silent(answer: str, dice: Dice) -> str:
    """No answer at the end."""
    before = _before(answer)
    return f"{before} {dice.pick(SILENT)}" if before else dice.pick(SILENT)


def repeated(answer: str, dice: Dice) -> str:
    """Words said twice, up to about the length of the answer itself."""
    words = answer.split()
    at = dice.below(max(len(words) - 3, 1))
    twice = [word for word in words[at : at + 3] for _ in range(2)]
    return " ".join([*words[:at], *twice, *words[at + 3 :]])


def rude(answer: str, dice: Dice) -> str:
    before = _before(answer)
    return f"{dice.pick(RUDE)} {answer[len(before) :].strip()}"


def unfinished(answer: str, dice: Dice) -> str:
    words = answer.split()
    return " ".join(words[: -1 - dice.below(2)])


# The fourth shouts, the last is off the topic.
POOR: tuple[Callable[[str, Dice], str], ...] = (
    silent, repeated, rude, lambda answer, dice: answer.upper(), unfinished, lambda answer, dice: dice.pick(OFF),
)  # fmt: skip


def _before(answer: str) -> str:
    """What stands before "The answer is"."""
    return answer[: answer.index("The answer is")].strip()


# The kinds of question there are, and how much of each a file has.
CASES: dict[str, Callable[[World, Dice, bool], Case]] = {
    "story": people.story_case, "fact": case, "sum": arithmetic.sum_case, "steps": arithmetic.steps_case, "dialogue": people.dialogue_case, "order": arithmetic.order_case,
}  # fmt: skip
TEXTS: dict[str, Callable[[World, Dice, bool], str]] = {
    "story": people.story_text, "fact": text, "sum": arithmetic.sum_text, "steps": arithmetic.steps_text, "dialogue": people.dialogue_text, "order": arithmetic.order_text,
}  # fmt: skip

# Copying a name out of a story is what a small model needs longest for; a prompt of GRPO's is mostly one where showing
# the steps pays, and some kinds are rare.
SHARES = {
    "base": {"story": 32, "fact": 14, "sum": 16, "steps": 12, "dialogue": 14, "order": 12},
    "midtrain": {"story": 26, "fact": 12, "sum": 12, "steps": 20, "dialogue": 16, "order": 14},
    "sft": {"story": 24, "fact": 12, "sum": 10, "steps": 26, "dialogue": 12, "order": 16},
    "pairs": {"story": 16, "fact": 10, "sum": 24, "steps": 20, "dialogue": 14, "order": 16},
    "prompts": {"steps": 60, "sum": 12, "order": 14, "story": 8, "fact": 4, "dialogue": 2},
}


def table(shares: dict[str, int]) -> list[str]:
    """A kind drawn from it comes as often as its share says."""
    return [kind for kind, share in shares.items() for _ in range(share)]


QUESTIONS_TRIES = 400  # in vain, one after the other: then there are no more different ones


def base(w: World, dice: Dice, held: bool) -> Iterator[str]:
    """Documents: a text of one kind, or a question and its answer in plain text."""
    kinds = table(SHARES["base"])
    while True:
        kind = dice.pick(kinds)
        if dice.random() < 0.3:
            case = CASES[kind](w, dice, held)
            before = "".join([f"{content}\n" for _, content in case.before])
            text = f"Question: {before}{case.prompt}\nAnswer: {loose(case, dice, bare=0.25)}"
        else:
            text = TEXTS[kind](w, dice, held)
        yield f'{{"text": {quoted(text)}}}'


def midtrain(w: World, dice: Dice, held: bool) -> Iterator[str]:
    """Chats of every kind, answered as people do in chats, mostly in a word, and small talk."""
    kinds = table(SHARES["midtrain"])
    while True:
        if dice.random() < 0.1 and not held:
            yield _chat([{"role": role, "content": content} for role, content in people.small_talk(w, dice)])
            continue
        case = CASES[dice.pick(kinds)](w, dice, held)
        yield _chat([*asked(case), {"role": "assistant", "content": loose(case, dice, bare=0.6)}])


def sft(w: World, dice: Dice, held: bool) -> Iterator[str]:
    kinds = table(SHARES["sft"])
    while True:
        case = CASES[dice.pick(kinds)](w, dice, held)
        yield _chat([*asked(case), {"role": "assistant", "content": strict(case, dice)}])


def pairs(w: World, dice: Dice, held: bool) -> Iterator[str]:
    """Half are right against wrong in the same form, half are good against poor form of the same."""
    kinds = table(SHARES["pairs"])
    while True:
        case = CASES[dice.pick(kinds)](w, dice, held)
        if dice.random() < 0.5:
            style = 0.0  # both show their steps: two bare numbers are nothing to tell right from wrong by
            kind, chosen, rejected = "right", strict(case, _Fixed(style)), strict(case, _Fixed(style), right=False)
        else:
            kind, chosen = "form", strict(case, dice)
            rejected = dice.pick(POOR)(chosen, dice)
        yield json.dumps({"prompt": prompt_of(case), "chosen": chosen, "rejected": rejected, "kind": kind})


class _Fixed(Dice):
    """A die that always falls the same."""

    def __init__(self, value: float) -> None:
        self.random = lambda: value


def prompts(w: World, dice: Dice, held: bool) -> Iterator[str]:
    """Different ones; ends where there are no more."""
    yield from _questions(w, dice, held, table(SHARES["prompts"]))


def questions(w: World, dice: Dice, held: bool) -> Iterator[str]:
    """As many of each kind, in turn, all different; a kind that has no more is left out."""
    yield from _questions(w, dice, held, list(CASES), in_turn=True)


def _questions(w: World, dice: Dice, held: bool, kinds: list[str], in_turn: bool = False) -> Iterator[str]:
    seen: set[str] = set()
    left, at = list(kinds), 0
    while left:
        kind = left[at % len(left)] if in_turn else dice.pick(left)
        for _ in range(QUESTIONS_TRIES):
            case = CASES[kind](w, dice, held)
            row = json.dumps(
                {"prompt": prompt_of(case), "answer": case.answer, "kind": case.kind, **(_others(case) if held else {})}
            )
            if row not in seen:
                seen.add(row)
                at += 1
                yield row
                break
        else:
            left = [one for one in left if one != kind]


def _others(case: Case) -> dict[str, list[str]]:
    """What would be wrong instead, for whoever marks answers."""
    return {"alternatives": [word for word in case.among if word != case.answer]} if case.among else {}


def _chat(messages: list[dict[str, str]]) -> str:
    return json.dumps({"messages": messages})


@frozen
class File:
    name: str
    rows: Callable[[World, Dice, bool], Iterator[str]]
    held: bool
    count: int  # rows at size 1, or, of base text, bytes


FILES = (
    File("base", base, False, 6_000_000), File("base-held-out", base, True, 300_000),
    File("midtrain", midtrain, False, 20_000), File("midtrain-held-out", midtrain, True, 1_000),
    File("sft", sft, False, 12_000), File("sft-held-out", sft, True, 600),
    File("pairs", pairs, False, 8_000), File("pairs-held-out", pairs, True, 800),
    File("prompts", prompts, False, 4_000), File("prompts-held-out", prompts, True, 400), File("questions", questions, True, 600),
)  # fmt: skip


def make(folder: str, *, seed: int, level: int, size: float) -> None:
    """world.json is written last: where it is, the rest is whole."""
    if level < 0:
        raise Refusal(f"world level {level}: levels are 0, 1, 2 …; 0 is the easiest", EX_USAGE)
    if not 0 < size < float("inf"):
        raise Refusal(
            f"world size {size}: it multiplies the number of rows, so it is above 0; 1 gives 6 MB of base text",
            EX_USAGE,
        )
    world = World(level)
    try:
        os.makedirs(folder, exist_ok=True)
        told = os.path.join(folder, WORLD)
        if os.path.exists(told):
            os.unlink(told)
        counts = {
            file.name: _write(os.path.join(folder, f"{file.name}.jsonl"), _rows(world, file, seed, size))
            for file in FILES
        }
        version = sha256(f"stoker world {VERSION}".encode()).hexdigest()[:16]
        story = {"schema": SCHEMA, "generator": version, "seed": seed, "level": level, "size": size, "rows": counts}
        write_atomic(told, json.dumps(story, indent=1).encode())
        sync_folder(folder)
    except OSError as problem:
        raise Refusal(
            f"the built-in data set can't be written in {folder}: {problem.strerror}; give another folder, or free space",
            EX_CANTCREAT,
        ) from problem


def _rows(world: World, file: File, seed: int, size: float) -> Iterator[str]:
    found = file.rows(world, Dice(seed, world.level, file.name), file.held)
    wanted = max(round(file.count * size), 1)
    if file.rows is base:
        return _until(found, wanted)
    return islice(found, wanted)


def _until(found: Iterator[str], wanted: int) -> Iterator[str]:
    written = 0
    for row in found:
        yield row
        written += len(row) - len('{"text": ""}')
        if written >= wanted:
            return


def _write(path: str, lines: Iterator[str]) -> int:
    """Row by row, so that a large world needs no memory; under a temporary name until the last byte is on the disk."""
    count = 0
    with AtomicFile(path) as file:
        while chunk := list(islice(lines, CHUNK)):
            count += len(chunk)
            file.write(("\n".join(chunk) + "\n").encode())
    return count
