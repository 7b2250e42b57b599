"""The built-in world: the same from the same seed, right in every answer, and nothing held out stands in a training file."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from stoker.contract.errors import Refusal
from stoker.training.evaluate.marking import right_in_form
from stoker.training.world.make import make
from stoker.training.world.world import chain_held, fact_held, lexicon, order_held, pair_held, sum_held
from world_leaks import leaks

SIZE = 0.04
KINDS = {"story", "fact", "sum", "steps", "dialogue", "order"}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("world")
    make(str(folder), seed=1, level=0, size=SIZE)
    return folder


def rows(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def said(row: dict[str, Any]) -> str:
    """What the user says in a row."""
    messages = row.get("messages", row.get("prompt"))
    return (
        messages if isinstance(messages, str) else " ".join(one["content"] for one in messages if one["role"] == "user")
    )


# A second opinion on every answer, from the text alone.


def solve(kind: str, text: str, truths: dict[tuple[str, str], str]) -> str:
    if kind in ("sum", "steps"):
        return str(counted(text))
    question = re.split(r"(?<=[.?!]) ", text)[-1]
    if kind == "story":
        return lived(text.removesuffix(question), question)
    if kind == "fact":
        quality = next(
            (
                name
                for name, cue in (
                    ("colour", "colour"),
                    ("home", "home|live|belong"),
                    ("food", "food|eat"),
                    ("material", "material|made"),
                )
                if re.search(cue, question)
            ),
            "sound",
        )
        return truths[
            re.findall(r"the (\w+)", question)[-1 if f"the {quality}" in question or quality in question else 0],
            quality,
        ]
    if kind == "order":
        return ordered(text, question)
    return talked(text.removesuffix(question), question)


def counted(text: str) -> int:
    bare = re.search(r"\d+(?: [+-] \d+)+", text)
    if bare:
        return sum(int(sign + number) for sign, number in re.findall(r"([+-]?) ?(\d+)", bare[0]))
    held = [int(one) for one in re.findall(r"(?:has|with) (\d+)", text)]
    if len(held) == 2:
        return sum(held)
    return held[0] + sum(
        (1 if verb in ("gets", "finds", "buys", "wins") else -1) * int(number)
        for verb, number in re.findall(r"(\w+s) (\d+) ", text)
        if verb != "has"
    )


def shown(text: str) -> list[int]:
    """The results of the sums a text shows, `5 + 3 = 8` or counted as `5 + 3: 1 6, 2 7, 3 8`: each is right, and each count goes on by one."""
    found = []
    for sum_, result, count in re.findall(r"(\d+ [+-] \d+)(?: = (\d+)|: ([\d, ]+))\.", text):
        if count:
            a, sign, b = sum_.split()
            way = [tuple(map(int, one.split())) for one in count.split(", ")]
            assert way == [(at, int(a) + at if sign == "+" else int(a) - at) for at in range(1, int(b) + 1)], text
        found.append(counted(sum_))
        assert not result or found[-1] == int(result), text
    return found


def lived(story: str, question: str) -> str:
    where: dict[str, str] = {}
    has: dict[str, str] = {}
    for person, verb, rest in re.findall(
        r"(\w+) (went|walked|ran|came|took|found|got|gave) (?:to )?the ([\w ]+)\.", story
    ):
        if verb in ("went", "walked", "ran", "came"):
            where[person] = rest
        elif verb == "gave":
            thing, _, other = rest.partition(" to ")
            assert has[thing] == person
            has[thing] = other
        else:
            has[rest] = person
    if re.search(r"\b(?:where|place)\b", question, re.IGNORECASE):
        return next(
            where[name] for name in where if name in question.split(": ")[-1].replace("?", "").replace(".", "").split()
        )
    if re.search(r"\bwho\b", question, re.IGNORECASE):
        return next(holder for thing, holder in has.items() if re.search(rf"\b{thing}\b", question))
    return next(thing for thing, holder in has.items() if re.search(rf"\b{holder}\b", question))


def ordered(text: str, question: str) -> str:
    best = max if "more" in question else min
    if re.search(r"\bwho\b", question, re.IGNORECASE):
        holders = {int(number): name for name, number in re.findall(r"(\w+) has (\d+)", text)}
        return holders[best(holders)]
    numbers = [int(one) for one in re.findall(r"\d+", question)]
    return str(best(numbers)) if len(numbers) == 2 else ", ".join(map(str, sorted(numbers)))


def talked(text: str, question: str) -> str:
    if re.search(r"my name|who I am|Who am I", question):
        return re.findall(r"(?:My name is|I am) ([A-Z]\w+)", text)[0]
    speakers = re.split(r"(\w+) says: ", text)[1:]
    if speakers:
        text = next(
            words
            for name, words in zip(speakers[::2], speakers[1::2], strict=True)
            if name in re.findall(r"\w+", question)
        )
    return re.findall(r"(?:I like|I love|food is|to the|have the|found the) (\w+)", text)[0]


def truths_of(folder: Path) -> dict[tuple[str, str], str]:
    text = "\n".join(row["text"] for row in rows(folder, "base"))
    found: dict[tuple[str, str], str] = {}
    for quality, thing, value in re.findall(
        r"The (colour|home|food|sound|material) of the (\w+) is (?:the )?(\w+)\.", text
    ):
        assert found.setdefault((thing, quality), value) == value
    return found


def test_the_same_arguments_give_the_same_bytes_and_another_seed_others(world: Path, tmp_path: Path) -> None:
    make(str(tmp_path / "again"), seed=1, level=0, size=SIZE)
    assert contents(tmp_path / "again") == contents(world)
    make(str(tmp_path / "other"), seed=2, level=0, size=SIZE)
    assert all(data != contents(world)[name] for name, data in contents(tmp_path / "other").items())


def test_a_larger_world_begins_with_the_smaller_one(world: Path, tmp_path: Path) -> None:
    make(str(tmp_path), seed=1, level=0, size=SIZE / 2)
    for name, data in contents(tmp_path).items():
        if name != "world.json":
            assert contents(world)[name].startswith(data)
            assert 1.8 < len(contents(world)[name]) / len(data) < 2.2


def test_the_files_have_the_rows_that_were_asked_for(world: Path) -> None:
    told = json.loads((world / "world.json").read_text())
    assert (told["schema"], told["seed"], told["level"], told["size"]) == (1, 1, 0, SIZE)
    assert told["rows"] == {path.stem: len(path.read_text().splitlines()) for path in world.glob("*.jsonl")}
    assert {name: round(count / SIZE) for name, count in told["rows"].items() if not name.startswith("base")} == {
        "midtrain": 20000,
        "midtrain-held-out": 1000,
        "sft": 12000,
        "sft-held-out": 600,
        "pairs": 8000,
        "pairs-held-out": 800,
        "prompts": 4000,
        "prompts-held-out": 400,
        "questions": 600,
    }
    assert 5.9e6 * SIZE <= sum(len(row["text"]) for row in rows(world, "base")) < 6.1e6 * SIZE


@pytest.mark.parametrize("level", [0, 1, 2])
def test_every_question_has_the_right_answer(world: Path, tmp_path: Path, level: int) -> None:
    if level:
        world = tmp_path
        make(str(world), seed=7, level=level, size=0.1)
    truths = truths_of(world)
    asked = rows(world, "prompts") + rows(world, "questions")
    assert {row["kind"] for row in asked} == KINDS
    unknown = 0
    for row in asked:
        try:
            found = solve(row["kind"], said(row), truths)
        except KeyError:
            assert row["kind"] == "fact"  # this small a base may not have said it in the one wording that is looked for
            unknown += 1
            continue
        assert found == row["answer"], row
    assert unknown < 0.04 * len(asked)


def test_every_strict_answer_ends_with_the_answer_and_its_steps_add_up(world: Path) -> None:
    for row in rows(world, "sft") + rows(world, "sft-held-out"):
        answer = row["messages"][-1]["content"]
        stated = re.fullmatch(r"(.*?) ?The answer is ([\w, ]+)\.", answer)
        assert stated and right_in_form(answer, stated[2]), answer
        last = shown(stated[1])
        assert not last or last[-1] == int(stated[2])
        if re.search(r"\b(?:how many|number of|count the)\b|[+-]", said(row), re.IGNORECASE):
            assert str(counted(said(row))) == stated[2]


def test_half_of_the_many_step_answers_show_their_steps(world: Path) -> None:
    answers = [row["messages"][-1]["content"] for row in rows(world, "sft")]
    direct, worked = sum(one.startswith("The answer") for one in answers), sum(len(shown(one)) == 2 for one in answers)
    assert 0.35 < worked / (direct + worked) < 0.65


def test_numbers_in_base_text_are_right(world: Path) -> None:
    text = "\n".join(row["text"] for row in rows(world, "base") + rows(world, "base-held-out"))
    assert len(shown(text)) > 1000 and re.search(r"\d: 1 ", text)
    assert all(
        (int(a) > int(b)) == (word == "more") for a, word, b in re.findall(r"(\d+) is (more|less) than (\d+)", text)
    )


def test_base_text_states_every_fact(world: Path) -> None:
    text = "\n".join(row["text"] for row in rows(world, "base"))
    for fact in lexicon(0).facts:
        assert re.search(
            rf"[Tt]he {fact.thing} [\w ]*{fact.value}|Every {fact.thing} [\w ]*{fact.value}|of the {fact.thing} is [\w ]*{fact.value}|a {fact.thing}\. It is {fact.value}",
            text,
        ), fact


@pytest.mark.parametrize("level", [0, 1])
def test_nothing_leaks(world: Path, tmp_path: Path, level: int) -> None:
    if level:
        world = tmp_path
        make(str(world), seed=3, level=level, size=0.02)
    assert leaks(str(world)) == []


def first_held() -> dict[str, Any]:
    lex, numbers = lexicon(0), range(2, 10)
    return {
        "pair": next((name, place) for name in lex.names for place in lex.places if pair_held(name, place)),
        "dish": next((name, dish) for name in lex.names for dish in lex.dishes if pair_held(name, dish)),
        "fact": next(one for one in lex.facts if fact_held(one.thing, one.quality)),
        "sum": next((a, b) for a in numbers for b in numbers if sum_held(a, "+", b)),
        "chain": next(
            (a, b, c)
            for a in numbers
            for b in numbers
            for c in range(2, a + b)
            if chain_held(a, b, -c) and not sum_held(a, "+", b) and not sum_held(a + b, "-", c)
        ),
        "less": next((a, b) for a in range(20) for b in range(a) if sum_held(a, "-", b)),
        "order": next((a, b) for a in numbers for b in numbers if order_held(a, b)),
    }


HELD = first_held()
PLANTED = {
    "a story's pair": ("base", {"text": f"Then {HELD['pair'][0]} went to the {HELD['pair'][1]}."}, "with"),
    "a pair said by oneself": (
        "midtrain",
        {
            "messages": [
                {"role": "user", "content": f"Hello. I am {HELD['dish'][0]}."},
                {"role": "user", "content": f"I like {HELD['dish'][1]}."},
            ]
        },
        "with",
    ),
    "a pair in a rejected answer": (
        "pairs",
        {
            "prompt": "Where?",
            "chosen": "No.",
            "rejected": f"{HELD['pair'][0]} is in the {HELD['pair'][1]}.",
            "kind": "right",
        },
        "with",
    ),
    "a fact's question": (
        "prompts",
        {"prompt": f"What is the {HELD['fact'].quality} of the {HELD['fact'].thing}?", "answer": "x", "kind": "fact"},
        "question for",
    ),
    "a sum": ("base", {"text": "{1} + {0} = 7.".format(*HELD["sum"])}, "the sum"),
    "a sum told": (
        "prompts",
        {
            "prompt": "Anna has {} pears. Ben has {} pears. How many pears are there together?".format(*HELD["sum"]),
            "answer": "1",
            "kind": "sum",
        },
        "the sum",
    ),
    "a sum that is a step": (
        "sft",
        {
            "messages": [
                {
                    "role": "user",
                    "content": f"Anna has 1 nuts. Anna gets {HELD['less'][0] - 1} nuts. Then Anna drops {HELD['less'][1]} nuts. How many?",
                }
            ]
        },
        "the sum",
    ),
    "a problem of known sums": (
        "base",
        {"text": "Anna has {} nuts and wins {} more. Anna drops {} nuts.".format(*HELD["chain"])},
        "the problem",
    ),
    "a bare problem": (
        "prompts",
        {"prompt": "What is {} + {} - {}?".format(*HELD["chain"]), "answer": "1", "kind": "steps"},
        "the problem",
    ),
    "a comparison": ("base", {"text": "{1} is more than {0}.".format(*HELD["order"])}, "the order"),
    "a comparison of people": (
        "sft",
        {
            "messages": [
                {
                    "role": "user",
                    "content": "Anna has {} nuts. Ben has {} nuts. Who has more nuts?".format(*HELD["order"]),
                }
            ]
        },
        "the order",
    ),
}


@pytest.mark.parametrize("what", PLANTED)
def test_a_planted_leak_is_found(tmp_path: Path, what: str) -> None:
    make(str(tmp_path), seed=1, level=0, size=0.005)
    name, row, word = PLANTED[what]
    with open(tmp_path / f"{name}.jsonl", "a") as file:
        file.write(json.dumps(row) + "\n")
    line = len(rows(tmp_path, name))
    found = leaks(str(tmp_path))
    assert any(one.startswith(f"{name}.jsonl line {line}: ") and word in one for one in found), found


def test_a_held_out_wording_with_another_content_is_found(tmp_path: Path) -> None:
    make(str(tmp_path), seed=1, level=0, size=0.005)
    sentence = next(said(row) for row in rows(tmp_path, "questions") if row["kind"] == "fact").split(": ")[-1]
    held = next(one.thing for one in lexicon(0).facts if one.thing in sentence)
    with open(tmp_path / "midtrain.jsonl", "a") as file:
        file.write(json.dumps({"messages": [{"role": "user", "content": sentence.replace(held, "cup")}]}) + "\n")
    assert any(
        "the wording" in one and f"line {len(rows(tmp_path, 'midtrain'))}:" in one for one in leaks(str(tmp_path))
    )


def test_a_held_out_row_put_among_the_training_rows_is_found(tmp_path: Path) -> None:
    make(str(tmp_path), seed=1, level=0, size=0.005)
    with open(tmp_path / "base.jsonl", "a") as file:
        file.write((tmp_path / "base-held-out.jsonl").read_text().splitlines()[0] + "\n")
    assert any("the whole row is also held out" in one for one in leaks(str(tmp_path)))


def test_the_words_are_few_and_questions_use_no_others_than_base_text(world: Path) -> None:
    def words(*names: str) -> set[str]:
        return set(re.findall(r"[a-z0-9]+", "\n".join((world / f"{name}.jsonl").read_text() for name in names).lower()))

    everything = words("base", "midtrain", "sft", "pairs", "prompts", "questions") - {
        "text",
        "n",
        "messages",
        "role",
        "content",
        "kind",
        "prompt",
        "chosen",
        "rejected",
    }
    assert len(everything) <= 350
    asked = set(re.findall(r"[a-z0-9]+", " ".join(said(row) for row in rows(world, "questions")).lower()))
    assert asked - words("base") <= set()


def test_words_of_different_classes_do_not_collide() -> None:
    for level in (0, 1, 2):
        lex = lexicon(level)
        for classes in (
            [lex.names, lex.places, lex.things, lex.animals, lex.items],
            [lex.names, lex.dishes, lex.places, lex.things],
        ):
            every = [word.lower() for words in classes for word in words]
            assert [word for word, count in Counter(every).items() if count > 1] == []
    assert lexicon(1).most > lexicon(0).most and len(lexicon(2).names) > len(lexicon(1).names) > 24


def test_pairs_differ_and_their_length_tells_nothing(world: Path) -> None:
    found = rows(world, "pairs") + rows(world, "pairs-held-out")
    assert all(row["chosen"] != row["rejected"] for row in found)
    assert 0.4 < sum(row["kind"] == "right" for row in found) / len(found) < 0.6
    for kind in ("right", "form"):
        chosen, rejected = (
            sum(len(row[side].split()) for row in found if row["kind"] == kind) for side in ("chosen", "rejected")
        )
        assert 0.85 < chosen / rejected < 1.15
    stated = [(row["chosen"], row["rejected"]) for row in found if row["kind"] == "right"]
    assert all(not right_in_form(wrong, good) for good, wrong in stated)


def test_prompts_are_mostly_many_step_problems_and_questions_evenly_of_all_kinds(world: Path) -> None:
    prompts = Counter(row["kind"] for row in rows(world, "prompts"))
    assert 0.5 < prompts["steps"] / prompts.total() < 0.7 and prompts["dialogue"] < prompts["sum"] / 3
    questions = Counter(row["kind"] for row in rows(world, "questions"))
    assert set(questions) == KINDS and max(questions.values()) == min(questions.values())
    for name in ("prompts", "questions"):
        lines = (world / f"{name}.jsonl").read_text().splitlines()
        assert len(set(lines)) == len(lines)


def test_a_world_is_made_without_torch(tmp_path: Path) -> None:
    script = f"""
import sys
from stoker.training.world.make import make
make({str(tmp_path)!r}, seed=1, level=0, size=0.001)
sys.exit("torch" in sys.modules or "numpy" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
    assert (tmp_path / "world.json").exists()


def test_a_level_or_size_that_cannot_be_is_refused(tmp_path: Path) -> None:
    for level, size, word in ((-1, 1.0, "level"), (0, 0.0, "size"), (0, float("nan"), "size")):
        with pytest.raises(Refusal, match=word):
            make(str(tmp_path / "world"), seed=1, level=level, size=size)
    assert not (tmp_path / "world").exists()


def test_a_world_that_could_not_be_written_whole_has_no_world_json(tmp_path: Path) -> None:
    make(str(tmp_path), seed=1, level=0, size=0.001)
    (tmp_path / "sft.jsonl").unlink()
    (tmp_path / "sft.jsonl").mkdir()
    with pytest.raises(Refusal, match="can't be written"):
        make(str(tmp_path), seed=2, level=0, size=0.001)
    assert not (tmp_path / "world.json").exists() and not list(tmp_path.glob("*.part"))
