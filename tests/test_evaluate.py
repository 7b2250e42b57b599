"""Questions and their marking, published files as they are, intervals, and the recipe on a small model: real files, one and two ranks."""

from __future__ import annotations

import csv
import gzip
import json
import math
import random
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")


from conftest import Stoker, at_length  # noqa: E402
from stoker.contract.errors import EX_DATAERR, EX_NOINPUT, EX_USAGE, Refusal  # noqa: E402
from stoker.training.data.formats.questions import Question  # noqa: E402
from stoker.training.evaluate.answering import Answerer, Written, mark, put  # noqa: E402
from stoker.training.evaluate.asking import Manner, answer_text, as_asked, prompt_ids, stop_ids  # noqa: E402
from stoker.training.evaluate.confidence import holm, p_value, wilson, wilson_of_draws  # noqa: E402
from stoker.training.evaluate.likelihood import bits_per_byte, log_likelihoods, windows  # noqa: E402
from stoker.training.evaluate.marking import Alternatives, alternatives, in_form, right, right_in_form, stated  # noqa: E402  # noqa: E402
from stoker.training.evaluate.tasks import prompts_of, read_tasks, spread  # noqa: E402
from stoker.training.generate.config import GenerateConfig  # noqa: E402
from stoker.training.model import hf  # noqa: E402
from stoker.training.model.config import ModelConfig  # noqa: E402
from stoker.training.model.decoder import Decoder  # noqa: E402
from stoker.training.recipes import evaluate as recipe  # noqa: E402
from stoker.training.recipes import stage  # noqa: E402
from stoker.training.tokenizer.chat import STOP, chat  # noqa: E402
from stoker.training.tokenizer.tokenizer import bytes_tokenizer  # noqa: E402

SHAPE = ModelConfig(layers=2, dim=32, heads=2, kv_heads=1, head_dim=16, ff=64, vocab_size=320, init_std=0.1)
COMMON = (
    "--preset",
    "debug",
    "--context_length",
    "160",
    "--parallel.device",
    "cpu",
    "--generate.new_tokens",
    "12",
    "--generate.rows",
    "8",
)


def rows(path: Path, *told: Any) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in told))
    return str(path)


def question(text: str, answer: str, kind: str = "sum") -> dict[str, str]:
    return {"prompt": text, "answer": answer, "kind": kind}


# ---- marking ----


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("The answer is 5.", "5"), ("3 + 4 = 7. The answer is 7.", "7"), ("the ANSWER IS Anna!", "anna"), ("She has 72.\n#### 72", "72"), ("so #### 1,234", "1234"),
        ("The answer is $1,234.50.", "1234.50"), ("The answer is: **72**.", "72"), ('"The answer is \'red\'."', "red"), ("The answer is 5.\nThe answer is 6.", "6"),
        ("The answer is\n 7\nand more", "7"), ("in the garden", "in the garden"), ("first line\nsecond", "first line"), ("The answer isn't known", "the answer isn't known"),
        ("", ""), ("####", ""), ("answer is -$5", "-5"), ("1,2,3", "1,2,3"), ("12,345,678 sheep", "12345678 sheep"),
    ],
)  # fmt: skip
def test_what_an_answer_states(text: str, said: str) -> None:
    assert stated(text) == said


@pytest.mark.parametrize(
    ("completion", "answer", "good"),
    [
        ("The answer is 72.", "… 48 + 24 = 72\n#### 72", True), ("72.0", "72", True), ("+5", "5", True), ("0.50", ".5", True), ("1,000", "1000", True),
        ("The answer is 7.", "17", False), ("17", "7", False), ("Anna", "anna", True), ("Anna and Ben", "Anna", False), ("", "", False), ("####", "#### 3", False),
        ("1e3", "1000", False), ("nan", "NaN", True), ("7 7", "77", False), ("The answer is 7. No, 8.", "7", False),
        (r"so the final answer is $\boxed{72}$", "#### 72", True), (r"\boxed{72} clips. The answer is 71.", "72", False), ("**Answer:** 72", "72", True),
        ("Answer: 72 clips", "#### 72", True), ("#### 72%", "72", True), ("The answer is 7 or 72", "7", False), ("72 and more", "72", False), ("blah 72", "72", False),
    ],
)  # fmt: skip
def test_an_answer_is_right_in_form_when_it_states_the_same(completion: str, answer: str, good: bool) -> None:
    """GRPO's reward."""
    assert right_in_form(completion, answer) is good
    assert not good or right(completion, answer), "by content, too"


SOUNDS = alternatives(("moo", "woof", "meow", "baa"))
NAMES = alternatives(("Anna", "Ben", "Clara"))
PLACES = alternatives(("garden", "park", "town hall", "kitchen"))
NONE = Alternatives()


@pytest.mark.parametrize(
    ("completion", "answer", "others"),
    [
        # The same content in other forms.
        ("The cow says moo.", "moo", SOUNDS), ("moo", "moo", SOUNDS), ("MOO!", "moo", SOUNDS), ("The sound of the cow is moo.", "moo", SOUNDS), ("**Moo**", "moo", SOUNDS),
        ("The cow says \"moo\".", "moo", SOUNDS), ("Every cow says moo.", "moo", NONE), ("The cow says moo. The dog says woof.", "moo", SOUNDS),
        ("The answer is: the cow says moo.", "moo", SOUNDS), ("woof? Let me think. The answer is that it says moo.", "moo", SOUNDS),
        ("Anna has the ball.", "Anna", NAMES), ("It is Anna.", "anna", NAMES), ("Yes, Anna has it.", "Anna", NAMES), ("Your name is Clara.", "Clara", NAMES),
        ("She is in the garden.", "the garden", PLACES), ("Garden", "the garden", PLACES), ("Ben is going to the town hall.", "town hall", PLACES), ("The garden.", "garden", PLACES),
        ("Yes, it is.", "yes", NONE), ("No, it is not.", "no", NONE), ("B", "b", NONE),
        # Numbers: the last one.
        ("Sam has 7 pears.", "7", NONE), ("It is 7.", "7", NONE), ("3 + 4 = 7.", "7", NONE), ("3 + 4: 1 4, 2 5, 3 6, 4 7.", "7", NONE), ("3 + 4: 1 4, 2 5, 3 6, 4 7. Sam has 7 pears.", "7", NONE),
        ("First 3.\nThen 4 more.\nThat makes 7 pears.", "7", NONE), ("It costs $1,234.50 in all.", "1234.5", NONE), ("Seven.", "7", NONE), ("She has seven pears.", "7", NONE), ("7", "seven", NONE),
        ("6 is more than 4.", "6", NONE), ("4 is less than 6.", "4", NONE), ("It is -5 degrees.", "-5", NONE), ("10-4=6", "6", NONE), ("The answer is 3 + 4 = 7.", "7", NONE),
        ("The 2nd one has 7.", "7", NONE), ("7 pears, not counting the 2nd basket", "7", NONE),
        # Lists: the last one.
        ("The order is 3, 5, 9.", "3, 5, 9", NONE), ("The order of 9, 3 and 5 is 3, 5, 9.", "3, 5, 9", NONE), ("3, 5 and 9", "3, 5, 9", NONE), ("3 < 5 < 9", "3, 5, 9", NONE),
    ],
)  # fmt: skip
def test_an_answer_in_another_form_is_right_by_content(completion: str, answer: str, others: Alternatives) -> None:
    assert right(completion, answer, others)


@pytest.mark.parametrize(
    ("completion", "answer", "others"),
    [
        # Babble, lists and hedges.
        ("moo woof meow baa", "moo", SOUNDS), ("The cow says moo and woof.", "moo", SOUNDS), ("moo or woof", "moo", NONE), ("moo, woof", "moo", NONE), ("moo and more", "moo", NONE),
        ("Anna and Ben have it.", "Anna", NONE), ("Anna, Ben, Clara", "Ben", NONE), ("Anna gave Ben the ball.", "Ben", NAMES), ("In the park and in the garden.", "garden", NONE),
        ("The cow says " + "na " * 20 + "moo.", "moo", NONE), ("It may be Anna/Ben.", "Anna", NONE), ("Maybe Anna.", "Anna", NAMES), ("Either Anna or Ben", "Ben", NONE),
        # The wrong one, a part of a word, a later sentence.
        ("The cow says woof.", "moo", SOUNDS), ("The cow is smooth.", "moo", NONE), ("The cow says mooo.", "moo", NONE), ("woof. The cow says moo.", "moo", SOUNDS),
        ("It is the hall of the town.", "town hall", PLACES), ("", "moo", SOUNDS), ("...", "moo", SOUNDS), ("The answer is woof. The cow says moo.", "moo", SOUNDS),
        # Denied, or taken back.
        ("The cow does not say moo.", "moo", NONE), ("It isn't Anna.", "Anna", NAMES), ("Not moo.", "moo", NONE), ("It is moo. No, it is woof.", "moo", SOUNDS),
        ("It is Anna. Wait, it is Ben.", "Anna", NAMES), ("Never moo.", "moo", NONE), ("No, yes.", "yes", NONE), ("Anna is in a garden", "a", NONE), ("A dog", "A", NONE),
        # Numbers that are not the last, not stated, or one of several.
        ("Sam has 7 pears and Tom has 9.", "7", NONE), ("7 or 8", "8", NONE), ("7 or 8", "7", NONE), ("5 to 8", "8", NONE), ("between 7 and 8", "8", NONE), ("not 8", "8", NONE),
        ("3 + 4", "4", NONE), ("10 - 4", "4", NONE), ("10-4", "4", NONE), ("the 8th", "8", NONE), ("6 is more than 4.", "4", NONE), ("17", "7", NONE), ("7.5", "7", NONE),
        ("1 2 3 4 5 6 7 8 9 10 11", "7", NONE), ("seven or eight", "8", NONE), ("Sam has pears.", "7", NONE), ("The answer is 7. No, 8.", "7", NONE), ("-5", "5", NONE),
        # Lists of another order or length.
        ("The order is 3, 9, 5.", "3, 5, 9", NONE), ("1, 3, 5, 9", "3, 5, 9", NONE), ("3, 5", "3, 5, 9", NONE), ("3, 5, 9, 11", "3, 5, 9", NONE),
    ],
)  # fmt: skip
def test_babble_hedges_and_other_answers_are_wrong_by_content(
    completion: str, answer: str, others: Alternatives
) -> None:
    assert not right(completion, answer, others)


def test_naming_every_answer_is_never_right() -> None:
    """Whatever the order: a model can't gain by saying all it knows."""
    answers, generator = ["moo", "woof", "meow", "baa", "oink"], random.Random(3)
    for _ in range(200):
        some = generator.sample(answers, generator.randint(2, 5))
        joined = generator.choice((" ", ", ", " and ", " or ", "/", "; ")).join(some)
        said = generator.choice(("{}", "The cow says {}.", "It is {}!")).format(joined)
        assert not any(right(said, answer, alternatives(answers)) for answer in answers), said
    numbers = [str(number) for number in range(20)]
    for _ in range(200):
        said = generator.choice((" ", ", ", ". ")).join(generator.sample(numbers, 6))
        assert sum(right(said, number) for number in numbers) <= 1, said


@pytest.mark.parametrize(
    ("text", "answer", "right_if_whole", "right_if_cut"),
    [
        ("Sam has 7", "7", True, False), ("3 + 4 = 7. The", "7", True, False), ("The answer is 7.", "7", True, True), ("The cow says moo", "moo", True, False),
        ("The cow says moo. The dog", "moo", True, True), ("The order is 3, 5, 9", "3, 5, 9", True, False), ("moo", "moo", True, True),
    ],
)  # fmt: skip
def test_a_cut_answer_has_no_last_number_and_a_cut_sentence_states_nothing(
    text: str, answer: str, right_if_whole: bool, right_if_cut: bool
) -> None:
    assert (right(text, answer), right(text, answer, cut=True)) == (right_if_whole, right_if_cut)


@pytest.mark.parametrize(
    ("text", "answer", "formed"),
    [
        ("The answer is woof.", "moo", True), ("Woof!", "moo", True), ("The cow says moo.", "moo", False), ("#### 12", "7", True), ("12 clips", "7", True), ("", "moo", False),
        ("The answer is 7 or 8.", "7", False), ("The answer is 3, 5, 9.", "3, 9, 5", True), ("3 + 4 = 7", "7", False), ("The answer is town hall.", "the garden", True),
    ],
)  # fmt: skip
def test_the_form_is_judged_whether_the_answer_is_right_or_wrong(text: str, answer: str, formed: bool) -> None:
    assert in_form(text, answer) is formed


def test_other_answers_of_the_kind_are_the_alternatives_where_a_file_names_none(tmp_path: Path) -> None:
    told = [
        question("What does the cow say?", "moo", "sound"),
        question("What does the dog say?", "woof", "sound"),
        question("Does the dog eat moo?", "meat", "food"),
        question("How many?", "7", "sound"),
        {**question("Who has 7 pears?", "Anna", "sound"), "alternatives": ["Ben"]},
    ]
    (task,) = read_tasks([rows(tmp_path / "q.jsonl", *told)], 0)

    def correct(place: int, text: str) -> bool:
        return mark(task, Written(text, cut=False), place).correct

    assert correct(0, "The cow says moo.") and not correct(0, "The cow says moo woof."), "woof is another's answer"
    assert correct(0, "All 7 cows say moo."), "a number contradicts no word"
    assert correct(2, "It does eat moo meat."), "moo stands in the question, and is of another kind"
    assert correct(4, "Anna says woof.") and not correct(4, "Anna asks Ben."), "the row names its own"


# ---- files ----


def test_published_files_are_read_as_they_are(tmp_path: Path) -> None:
    gsm = rows(tmp_path / "gsm8k" / "test.jsonl", {"question": "How many?", "answer": "2+2=<<2+2=4>>4\n#### 4"})
    listed = [{"text": "red", "label": "A"}, {"text": "blue", "label": "B"}, {"text": "old", "label": "C"}]
    ai2 = rows(
        tmp_path / "ARC-Easy-Test.jsonl",
        {"id": "x", "question": {"stem": "Which colour?", "choices": listed}, "answerKey": "B"},
    )
    hub = {
        "id": "x",
        "question": "Which?",
        "choices": {"text": ["red", "blue", "old", "new"], "label": ["1", "2", "3", "4"]},
        "answerKey": "3",
    }
    arc = rows(tmp_path / "arc" / "test.jsonl", hub)
    (tmp_path / "mmlu").mkdir()
    for name in ("law_test.csv", "art_test.csv"):
        with open(tmp_path / "mmlu" / name, "w", newline="") as file:
            csv.writer(file).writerows([["Of what, then,\nis it made?", "wood", "stone, mostly", "iron", "air", "B"]])
    ours = rows(
        tmp_path / "questions.jsonl",
        question("1 + 1?", "2"),
        {"prompt": [{"role": "user", "content": "Hi"}], "answer": "Hello", "kind": "talk"},
    )
    tasks = {task.name: task for task in read_tasks([gsm, ai2, arc, str(tmp_path / "mmlu"), ours], 0)}
    assert list(tasks) == ["gsm8k-test", "ARC-Easy-Test", "arc-test", "mmlu", "questions"] and not any(
        task.skipped for task in tasks.values()
    )
    (one,) = tasks["gsm8k-test"].questions
    assert (one.text, one.labels) == ("How many?", ()) and right("4", one.answer)
    assert (tasks["ARC-Easy-Test"].questions[0].choices, tasks["ARC-Easy-Test"].questions[0].answer) == (
        ("red", "blue", "old"),
        "B",
    )
    assert (tasks["arc-test"].questions[0].labels, tasks["arc-test"].questions[0].answer) == (("1", "2", "3", "4"), "3")
    assert [(one.kind, one.choices[1], one.answer, one.lettered) for one in tasks["mmlu"].questions] == [
        (kind, "stone, mostly", "B", True) for kind in ("art", "law")
    ]
    assert [one.kind for one in tasks["questions"].questions] == ["sum", "talk"]


def test_packed_files_arrays_and_arrow_are_asked_too(tmp_path: Path) -> None:
    gsm = {"question": "How many?", "answer": "#### 4"}
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress((json.dumps(gsm) + "\n").encode() * 3))
    (tmp_path / "b.json").write_text(json.dumps([gsm] * 2, indent=1))
    (tmp_path / "law_test.csv.gz").write_bytes(gzip.compress(b"Which?,w,x,y,z,C\n"))
    tasks = read_tasks([str(tmp_path / name) for name in ("a.jsonl.gz", "b.json", "law_test.csv.gz")], 0)
    assert [(task.name, len(task.questions)) for task in tasks] == [("a", 3), ("b", 2), ("law_test", 1)]
    assert tasks[2].questions[0].answer == "C" and tasks[2].questions[0].choices == ("w", "x", "y", "z")
    (tmp_path / "a.jsonl.gz").write_bytes(b"\x1f\x8b1")
    with pytest.raises(Refusal, match="is damaged"):
        read_tasks([str(tmp_path / "a.jsonl.gz")], 0)


def test_parquet_of_arc_and_mmlu_is_read_as_the_hub_has_it(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    arc = [
        {"id": "1", "question": "Which?", "choices": {"text": ["red", "blue"], "label": ["A", "B"]}, "answerKey": "A"}
    ]
    mmlu = [{"question": "Which?", "subject": "law", "choices": ["w", "x", "y", "z"], "answer": 2}]
    for name, told in (("arc", arc), ("mmlu", mmlu)):
        parquet.write_table(pyarrow.Table.from_pylist(told), tmp_path / f"{name}.parquet")
    first, second = read_tasks([str(tmp_path / "arc.parquet"), str(tmp_path / "mmlu.parquet")], 0)
    assert (first.questions[0].answer, second.questions[0].answer, second.questions[0].kind) == ("A", "C", "law")


def test_unusable_rows_are_named_and_skipped_only_below_one_percent(tmp_path: Path) -> None:
    good = [question(f"{n} + 1?", str(n + 1)) for n in range(200)]
    (task,) = read_tasks([rows(tmp_path / "a.jsonl", *good[:99], {"prompt": "", "answer": "3"}, *good[99:])], 0)
    assert (
        len(task.questions) == 200 and "1 of 201 rows" in task.skipped and "line 100: prompt is empty" in task.skipped
    )
    many = rows(
        tmp_path / "b.jsonl", "{not json", *good[:97], {"prompt": [{"role": "boss", "content": "x"}], "answer": "1"}
    )
    with pytest.raises(Refusal) as refused:
        read_tasks([many], 0)
    assert (
        refused.value.code == EX_DATAERR
        and "2 of 99 rows" in refused.value.line
        and "line 1: not JSON" in refused.value.line
    )
    assert "line 99" in refused.value.line and "'boss'" in refused.value.line


@pytest.mark.parametrize(
    ("name", "text", "code", "word"),
    [
        ("a.jsonl", '{"text": "no question"}\n', EX_DATAERR, "looked for prompt and answer"), ("a.jsonl", "", EX_NOINPUT, "has no rows"),
        ("a.csv", "question,A,B\n1,2,3\n", EX_DATAERR, "six"), ("a.jsonl", '{"question": "q", "choices": ["x", "y"], "answer": 5}\n', EX_DATAERR, "no row can be asked"),
        ("a.parquet", "not parquet", EX_DATAERR, "not a parquet file"), ("a.jsonl", None, EX_NOINPUT, "can't be read"),
    ],
)  # fmt: skip
def test_files_of_no_known_form_are_refused_in_one_line(
    tmp_path: Path, name: str, text: str | None, code: int, word: str
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(Refusal) as refused:
        read_tasks([str(tmp_path / name)], 0)
    assert refused.value.code == code and word in refused.value.line and "\n" not in refused.value.line


def test_legal_json_of_any_making_is_read(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    texts = [
        '{"prompt": "a\u2028b", "answer": 12}',
        '{"prompt": "half \\ud83d a pair", "answer": "x"}',
        '{"prompt": "whole \\ud83d\\ude00", "answer": "1.5"}',
    ]
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(texts).encode() + b"\n\n")
    (task,) = read_tasks([str(path)], 0)
    assert [one.text for one in task.questions] == ["a\u2028b", "half \ufffd a pair", "whole 😀"] and [
        one.answer for one in task.questions
    ] == ["12", "x", "1.5"]
    rows = stage.rows_of(str(path), "grpo.prompts")
    assert [row["prompt"] for row in rows] == [one.text for one in task.questions]


def test_a_few_questions_are_spread_over_the_file() -> None:
    assert spread(10, 0) == list(range(10)) and spread(3, 5) == [0, 1, 2] and spread(10, 4) == [0, 2, 5, 7]


def test_prompts_need_no_answer_and_keep_their_places(tmp_path: Path) -> None:
    found = prompts_of(
        rows(tmp_path / "p.jsonl", {"prompt": "a"}, "", {"question": "b", "answer": "#### 1"}), "density.prompts"
    )
    assert [one.text for one in found.questions] == ["a", "b"] and found.places == (0, 1) and found.rows == 2
    with pytest.raises(Refusal, match="is empty: name a jsonl file"):
        prompts_of("", "density.prompts")


# ---- asking ----


def test_a_plain_question_has_examples_of_its_kind_but_never_itself_and_ends_at_a_newline(tmp_path: Path) -> None:
    words = bytes_tokenizer()
    path = rows(
        tmp_path / "q.jsonl",
        question("1+1?", "2"),
        question("Who?", "Anna", "story"),
        question("2+2?", "2+2=<<2+2=4>>4\n#### 4"),
        question("3+3?", "6"),
    )
    (task,) = read_tasks([path], 0)
    asked = put(task, words, Manner(False, shots=2), 200, 8)
    texts = [words.decode_bytes(prompt[1:]).decode() for prompt in asked.prompts]
    assert texts[3] == "Question: 1+1?\nAnswer: 2\n\nQuestion: 2+2?\nAnswer: 2+2=4 #### 4\n\nQuestion: 3+3?\nAnswer:"
    assert (
        texts[0].startswith("Question: 2+2?") and texts[0].count("1+1?") == 1 and texts[1] == "Question: Who?\nAnswer:"
    )
    assert all(prompt[0] == words.end_id for prompt in asked.prompts)
    assert stop_ids(words, Manner(False)) == {ord("\n"), words.end_id}
    assert (
        answer_text(words, [*b" 7.\n"], Manner(False)) == "7."
        and answer_text(words, [*b"7", words.special[STOP]], Manner(True)) == "7"
    )


def test_a_chat_is_shown_the_choices_and_a_base_model_completes_each(tmp_path: Path) -> None:
    words = bytes_tokenizer()
    path = rows(
        tmp_path / "arc.jsonl",
        {"question": "Which?", "choices": {"text": ["red", "blue"], "label": ["A", "B"]}, "answerKey": "A"},
    )
    one = read_tasks([path], 0)[0].questions[0]
    assert b"Which?\nA. red\nB. blue\nAnswer with" in words.decode_bytes(prompt_ids(words, one, Manner(True)))
    assert words.decode_bytes(prompt_ids(words, one, Manner(False))[1:]) == b"Question: Which?\nAnswer:"


def test_questions_too_long_for_the_context_are_refused_unless_few(tmp_path: Path) -> None:
    short, long = [question(f"{n}?", "1") for n in range(150)], question("x" * 300, "1")
    words = bytes_tokenizer()
    asked = put(read_tasks([rows(tmp_path / "few.jsonl", *short, long)], 0)[0], words, Manner(True), 120, 8)
    assert len(asked.places) == 150
    with pytest.raises(Refusal, match=r"1 of 51 are longer than 120 tokens \(number 51 has"):
        put(read_tasks([rows(tmp_path / "many.jsonl", *short[:50], long)], 0)[0], words, Manner(True), 120, 8)


class Echo:
    """Writes the last letters of its prompt; a sampled answer also has the seed and its place in the call."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        new_tokens: int,
        stop: Collection[int],
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        told: Callable[[float], None] | None = None,
        seed: int = 0,
    ) -> list[list[int]]:
        self.calls.append(len(prompts))
        return [
            [*str(len(prompt)).encode(), *(f" {seed} {index}".encode() if temperature else b""), min(stop)]
            for index, prompt in enumerate(prompts)
        ]


def test_sampled_answers_do_not_depend_on_the_number_of_ranks(tmp_path: Path) -> None:
    words = bytes_tokenizer()
    (task,) = read_tasks([rows(tmp_path / "q.jsonl", *(question(f"{n}?", "1") for n in range(150)))], 0)
    asked = put(task, words, Manner(True), 120, 8)
    answerer = Answerer(Echo(), words, Manner(True), GenerateConfig())

    def sampled(world: int) -> dict[int, list[Written]]:
        parts = [
            answerer.sample(asked.prompts, 3, 5, lambda block, rank=rank: block % world == rank)
            for rank in range(world)
        ]
        assert sum(map(len, parts)) == 150, "each question once"
        return {place: texts for part in parts for place, texts in part.items()}

    alone = sampled(1)
    assert (
        sampled(2) == sampled(3) == alone
        and len({written.text for answers in alone.values() for written in answers}) == 450
    )
    assert not any(written.cut for answers in alone.values() for written in answers)
    said = answerer.write(asked, [0, 149])
    assert [one.greedy.completion for one in said] == [str(len(asked.prompts[0])), str(len(asked.prompts[149]))]


# ---- numbers ----


def test_the_interval_of_a_share_is_wilsons() -> None:
    ten = wilson(8, 10)
    assert (round(ten.low, 4), round(ten.high, 4)) == (0.4902, 0.9433), "the textbook's"
    assert wilson(0, 20).low == 0.0 and 0.1 < wilson(0, 20).high < 0.2 and wilson(20, 20).high == 1.0
    generator = random.Random(1)
    held = 0
    for _ in range(2000):
        found = wilson(sum(generator.random() < 0.3 for _ in range(40)), 40)
        held += found.low <= 0.3 <= found.high
    assert 0.93 < held / 2000 < 0.98


def test_draws_of_one_question_count_as_few_as_they_are_alike() -> None:
    alike, mixed = wilson_of_draws([4, 0] * 25, 4), wilson_of_draws([2] * 50, 4)
    assert math.isclose(alike.high - alike.low, wilson(25, 50).high - wilson(25, 50).low, rel_tol=0.02), (
        "all draws of a question equal: 50 answers"
    )
    assert math.isclose(mixed.high - mixed.low, wilson(100, 200).high - wilson(100, 200).low, rel_tol=1e-6), (
        "as independent ones"
    )
    assert wilson_of_draws([0] * 50, 4).high == wilson(0, 50).high


def test_holm_keeps_what_stands_among_many() -> None:
    assert (
        holm([0.001, 0.04, 0.03]) == [True, False, False]
        and holm([0.01, 0.04, 0.02]) == [True, True, True]
        and holm([0.2]) == [False]
    )
    assert p_value(0, 0) == 1.0 and p_value(1, 0) == 0.0 and math.isclose(p_value(1.959964, 1), 0.05, rel_tol=1e-4)


# ---- a model ----


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Taught for a second to answer "The answer is 7." to whatever is asked."""
    folder = tmp_path_factory.mktemp("model") / "hf"
    words = bytes_tokenizer()
    words.save(str(folder.parent / "words"))
    torch.manual_seed(0)
    model = Decoder(SHAPE, 160)
    model.start(0)
    ids, mask = chat(words, [("user", b"What is 3 + 4?"), ("assistant", b"It is 7.")])
    inputs, targets = torch.tensor(ids[:-1].astype("int64"))[None], torch.tensor(ids[1:].astype("int64"))[None]
    targets = targets.masked_fill(torch.tensor(mask[1:])[None] == 0, -100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        (model(inputs, targets) / 10).backward()
        optimizer.step()
    hf.save(model, str(folder), say=lambda line: None, tokenizer_folder=str(folder.parent / "words"))
    return folder


def opened(folder: Path) -> Decoder:
    model = Decoder(SHAPE, 160)
    hf.load(model, str(folder), lambda line: None)
    return model.eval()


@torch.no_grad()
def test_likelihoods_are_those_of_one_row_at_a_time(model_folder: Path) -> None:
    model = opened(model_folder)
    asked = [([1, 2, 3], [4, 5]), ([9], list(range(40, 70))), ([5, 6], [7])]
    for (given, words), found in zip(asked, log_likelihoods(model, asked), strict=True):
        logits = model(torch.tensor([[*given, *words[:-1]]])).log_softmax(-1)[0]
        alone = sum(float(logits[len(given) - 1 + place, word]) for place, word in enumerate(words))
        assert math.isclose(found, alone, rel_tol=1e-5)


def test_bits_per_byte_count_every_byte_once(model_folder: Path) -> None:
    words = bytes_tokenizer()
    texts = [b"a" * 100, b"hello", "größe".encode()]
    rows_, sizes = windows(words, [(text, True) for text in texts], 32, 0)
    assert sum(sizes) == sum(map(len, texts)) and sum(len(asked) for _, asked in rows_) == sum(sizes)
    assert [given for given, _ in rows_] == [[words.end_id], [97], [97], [97], [words.end_id], [words.end_id]]
    in_parts = [(b"a" * 50, False), (b"a" * 50, True), (b"hel", False), (b"lo", True), (texts[2], True)]
    assert windows(words, in_parts, 32, 0) == (rows_, sizes), "a text in parts is the same text"
    assert len(windows(words, in_parts, 32, 40)[0]) == 2, "it stops where enough is read"
    assert bits_per_byte(-math.log(256) * 10, 10) == pytest.approx(8)


def evaluated(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *words: str
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    run_dir = tmp_path / "run"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STOKER_RUN_DIR", str(run_dir))
    assert recipe.main(["--model.load", str(folder), *COMMON, *words]) == 0
    return json.loads((run_dir / "result.json").read_text()), [
        json.loads(line) for line in (run_dir / "completions.jsonl").read_text().splitlines()
    ]


def mixed(tmp_path: Path) -> str:
    told = [question(f"What is {n} + 4?", "It is 7." if n < 6 else "8", "sum" if n % 2 else "steps") for n in range(9)]
    return rows(tmp_path / "questions.jsonl", *told)


def test_the_recipe_writes_numbers_and_every_answer(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    choices = {"text": ["It is 7.", "xq zw"], "label": ["A", "B"]}
    arc = rows(tmp_path / "arc.jsonl", {"question": "What is 3 + 4?", "choices": choices, "answerKey": "A"})
    held = rows(tmp_path / "held.jsonl", {"text": "It is 7."}, {"text": "Nothing like it: zzzzzzzz"})
    words = (
        "--evaluate.tasks",
        mixed(tmp_path),
        "--evaluate.tasks",
        arc,
        "--evaluate.draws",
        "4",
        "--generate.temperature",
        "0.7",
        "--evaluate.texts",
        held,
    )
    result, completions = evaluated(model_folder, tmp_path, monkeypatch, *words)
    shown = capsys.readouterr().out
    assert shown.count(f"weights from {model_folder}") == 1, "questions, choices and texts share one load of the model"
    metrics = result["metrics"]
    assert (result["schema"], result["stage"], result["model"], set(metrics)) == (
        1,
        "evaluate",
        None,
        {"tasks", "kinds", "all", "bits_per_byte", "new_tokens"},
    )
    ours = metrics["tasks"]["questions"]
    assert ours["correct"] == 6 and ours["total"] == 9 and ours["sampled_total"] == 36, (
        "it says 7, greedily, and 8 was asked three times"
    )
    assert ours["low"] < 6 / 9 < ours["high"] and ours["sampled_low"] < ours["sampled_accuracy"] < ours["sampled_high"]
    assert set(metrics["kinds"]) == {"steps", "sum", "arc"} and metrics["tasks"]["arc"]["sampled_accuracy"] is None
    assert metrics["all"]["total"] == 10 == len(completions) and metrics["bits_per_byte"] > 0
    assert all(
        one["correct"] == right(one["completion"], one["answer"]) and len(one["sampled"]) == 4
        for one in completions
        if one["task"] == "questions"
    )
    assert [one["kind"] for one in result["samples"]] == ["steps"] * 3 + ["sum"] * 3 + ["arc"]
    assert (
        set(result["samples"][0]) == {"prompt", "answer", "completion", "correct", "in_form", "strict", "cut", "kind"}
        and result["samples"][0]["completion"] == "It is 7."
    )
    assert (
        "task questions: 9 open questions" in shown and "6/9" in shown and "66.7%" in shown and "bits per byte" in shown
    )


def test_answers_cut_at_the_token_limit_are_counted_and_reported(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (
        "--evaluate.tasks",
        rows(tmp_path / "q.jsonl", question("What is 3 + 4?", "7")),
        "--evaluate.draws",
        "3",
        "--generate.temperature",
        "0.01",
    )
    whole, _ = evaluated(model_folder, tmp_path, monkeypatch, *words)
    assert (
        whole["metrics"]["all"]["cut_correct"],
        whole["metrics"]["all"]["correct"],
        whole["metrics"]["new_tokens"],
    ) == (0, 1, 12)
    shown = capsys.readouterr().out
    assert (
        "cut at" not in shown and '\nin form: the answer stands alone or after a mark such as "The answer is"' in shown
    )
    short, completions = evaluated(model_folder, tmp_path, monkeypatch, *words, "--generate.new_tokens", "7")
    told = short["metrics"]["all"]
    assert (
        told["cut_correct"],
        told["cut_total"],
        told["sampled_cut_correct"],
        told["sampled_cut_total"],
        told["correct"],
    ) == (1, 1, 3, 3, 0)
    assert (
        completions[0]["completion"] == "It is 7"
        and completions[0]["cut"]
        and all(one["cut"] for one in completions[0]["sampled"])
    )
    assert "1 of 1 greedy answers were cut at 7 tokens: raise generate.new_tokens" in capsys.readouterr().out


def test_a_base_model_is_asked_in_plain_text(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (
        "--evaluate.tasks",
        mixed(tmp_path),
        "--evaluate.chat",
        "false",
        "--evaluate.shots",
        "1",
        "--evaluate.most",
        "4",
    )
    result, completions = evaluated(model_folder, tmp_path, monkeypatch, *words)
    assert (
        result["metrics"]["all"]["total"] == 4
        and result["metrics"]["all"]["sampled_accuracy"] is None
        and result["metrics"]["bits_per_byte"] is None
    )
    assert not any("\n" in one["completion"] for one in completions)


@at_length
def test_two_ranks_find_what_one_finds(
    stoker: Stoker, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = rows(
        tmp_path / "many.jsonl",
        *(question(f"What is {n} + 4?", "It is 7." if n < 40 else "8", "sum") for n in range(70)),
    )
    held = rows(tmp_path / "held.jsonl", {"text": "It is 7."}, {"text": "Nothing like it: zzzzzzzz"}, {"text": "more"})
    words = (
        "--evaluate.tasks",
        many,
        "--evaluate.texts",
        held,
        "--evaluate.draws",
        "2",
        "--generate.temperature",
        "1.5",
        "--generate.new_tokens",
        "6",
    )
    alone, completions = evaluated(model_folder, tmp_path, monkeypatch, *words)
    monkeypatch.delenv("STOKER_RUN_DIR")
    done = stoker.torch(
        "run",
        "--nproc-per-node",
        "2",
        "-m",
        "stoker.training.recipes.evaluate",
        "--model.load",
        str(model_folder),
        *COMMON,
        *words,
    )
    assert done.code == 0, done.out + done.err
    both = json.loads((done.run_dir / "result.json").read_text())
    assert both["metrics"]["tasks"] == alone["metrics"]["tasks"] and both["metrics"]["bits_per_byte"] == pytest.approx(
        alone["metrics"]["bits_per_byte"], rel=1e-6
    )
    again = [json.loads(line) for line in (done.run_dir / "completions.jsonl").read_text().splitlines()]
    assert again == completions and len({text["completion"] for one in again for text in one["sampled"]}) > 5


@pytest.mark.parametrize(
    ("words", "code", "line"),
    [
        ((), EX_USAGE, "nothing to evaluate"), (("--evaluate.tasks", "absent.jsonl"), EX_NOINPUT, "absent.jsonl can't be read"),
        (("--evaluate.texts", "absent.txt"), EX_NOINPUT, "absent.txt does not exist"), (("--evaluate.tasks", "q.jsonl", "--context_length", "24"), EX_DATAERR, "are longer than 24"),
    ],
)  # fmt: skip
def test_what_can_not_be_evaluated_is_refused(
    words: tuple[str, ...], code: int, line: str, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows(tmp_path / "q.jsonl", question("What is 1 + 1?", "2"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STOKER_RUN_DIR", str(tmp_path / "run"))
    with pytest.raises(Refusal) as refused:
        recipe.main(["--model.load", str(model_folder), *COMMON, *words])
    assert refused.value.code == code and line in refused.value.line and not (tmp_path / "run" / "result.json").exists()


class Counting(tuple[Question, ...]):
    """Questions that count how often they are looked at."""

    looks = 0

    def __iter__(self) -> Any:
        for one in super().__iter__():
            Counting.looks += 1
            yield one


def test_examples_are_looked_for_once(tmp_path: Path) -> None:
    """5 MB of short questions took hours to be asked with examples, before the first one was."""
    path = tmp_path / "q.jsonl"
    path.write_text("".join(f'{{"prompt": "{number}", "answer": "a"}}\n' for number in range(300)))
    (task,) = read_tasks([str(path)], 0)
    Counting.looks = 0
    as_asked(Counting(task.questions), bytes_tokenizer(), Manner(False, shots=4), 8)
    assert Counting.looks < 4 * 300


def test_no_more_of_a_text_is_encoded_than_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text of 32 MB took 1 GB in each rank for the 10,000 tokens that were asked for; one of 0.8 MB may unpack to 256 MB."""
    pytest.importorskip("torch")
    pytest.importorskip("tokenizers")
    from stoker.training.data.config import DataConfig
    from stoker.training.evaluate.likelihood import documents, windows
    from stoker.training.tokenizer.tokenizer import Tokenizer, bytes_tokenizer

    (tmp_path / "held-out.txt").write_bytes(b"she sells sea shells\n" * 400_000)
    encoded, array = [], Tokenizer.array

    def counted(words: Tokenizer, data: bytes) -> Any:
        encoded.append(len(data))
        return array(words, data)

    monkeypatch.setattr(Tokenizer, "array", counted)
    parts = documents(str(tmp_path / "held-out.txt"), DataConfig(cache=str(tmp_path / "cache")), lambda line: None)
    rows_, sizes = windows(bytes_tokenizer(), parts, 256, 10_000)
    assert sum(sizes) == 10_240 and len(rows_) == 40
    assert sum(encoded) < 1 << 20


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("5", "x" + ". " * 1_000_000),
        ("5", "1" * 200_000 + "~"),
        ("1, " * 50_000 + "x", "5"),
        ("more than 1 " * 50_000, "5"),
    ],
    ids=["nested stops", "digits", "numbers", "comparisons"],
)
def test_marking_takes_time_in_proportion_to_the_text(completion: str, answer: str) -> None:
    began = time.process_time()
    for mark_as in (in_form, right, right_in_form):
        assert mark_as(completion, answer) in (True, False)
    assert time.process_time() - began < 30  # below 3 s; in time that grows with the square of the text, minutes


def test_a_wide_parquet_file_is_read_by_the_columns_that_count(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="parquet files need pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet", reason="parquet files need pyarrow")
    columns = {f"c{number}": ["x"] for number in range(20_000)}
    wide, strange = tmp_path / "wide.parquet", tmp_path / "strange.parquet"
    parquet.write_table(pyarrow.table({**columns, "prompt": ["hi"], "answer": ["5"]}), wide, use_dictionary=False)
    assert read_tasks([str(wide)], 0)[0].questions[0].answer == "5"
    parquet.write_table(pyarrow.table({"first": ["x"], "second": ["y"]}), strange)
    with pytest.raises(Refusal, match=r"no row can be asked; looked for .*; its columns are first, second$"):
        read_tasks([str(strange)], 0)
