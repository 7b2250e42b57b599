"""Two sets of answers: every measure points the right way, equal sets show no difference, and the recipe on small models."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402

from stoker.contract.errors import EX_CONFIG, EX_DATAERR, EX_NOINPUT, Refusal  # noqa: E402
from stoker.training.density.points import (  # noqa: E402
    centred,
    clusters,
    unit,
)
from stoker.training.diversity.metrics import (  # noqa: E402  # noqa: E402  # noqa: E402  # noqa: E402
    METRICS,
    SAME,
    Counted,
    compare,
    distinct,
    overall,
    report,
    self_bleu,
    spread,
    told,
    vendi,
    words,
)
from stoker.training.model import hf  # noqa: E402
from stoker.training.model.config import ModelConfig  # noqa: E402
from stoker.training.model.decoder import Decoder  # noqa: E402
from stoker.training.recipes import diversity as recipe  # noqa: E402
from stoker.training.tokenizer.tokenizer import bytes_tokenizer  # noqa: E402

WORDS = [f"{a}{b}" for a in "bdfgklmnprst" for b in ("al", "el", "in", "or", "us", "ap")]
Set = list[list[str]]


def varied(seed: int, prompts: int = 40, answers: int = 6, vocabulary: Sequence[str] = WORDS) -> Set:
    draw = random.Random(seed)
    return [
        [" ".join(draw.choice(vocabulary) for _ in range(draw.randint(6, 10))) for _ in range(answers)]
        for _ in range(prompts)
    ]


def counted(first: Set, second: Set, k: int = 8) -> tuple[Counted, Counted]:
    """Embedded by counting letters: texts alike are points alike."""
    texts = [text for answers in (first, second) for one in answers for text in one]
    table = unit(
        np.array([[1 + text.count(chr(97 + letter)) for letter in range(26)] for text in texts], dtype=np.float32)
    )
    vectors = centred(table).reshape(2, len(first), len(first[0]), -1)
    labels = clusters(vectors.reshape(len(texts), -1), k, 0).reshape(2, len(first), -1)
    one, other = (
        Counted(answers, list(vectors[which]), list(labels[which]), k, 0)
        for which, answers in enumerate((first, second))
    )
    return one, other


def test_equal_sets_show_no_difference() -> None:
    same = varied(1)
    found = told(compare(*counted(same, same), 200, 0))
    assert {one["verdict"] for one in found["difference"].values()} == {SAME} and found["verdict"].startswith(SAME)
    assert all(one["value"] == 0 for one in found["difference"].values())
    nothing = [["the same"] * 4 for _ in range(10)]
    assert told(compare(*counted(nothing, nothing), 100, 0))["verdict"].startswith(SAME)


def test_sets_from_one_source_seldom_show_a_difference() -> None:
    """Corrected for the number of measures, a false alarm comes at most one time in twenty: of twelve comparisons one may be."""
    verdicts = [overall(compare(*counted(varied(2 * seed), varied(2 * seed + 1)), 100, seed)) for seed in range(12)]
    assert sum(not line.startswith(SAME) for line in verdicts) <= 2


def test_every_answer_the_same_is_less_varied_by_every_measure() -> None:
    dull = [["we all say this one thing today again"] * 6 for _ in range(40)]
    found = told(compare(*counted(dull, varied(1)), 200, 0))
    for name, metric in METRICS.items():
        if metric.varied:
            assert found["difference"][name]["verdict"] == (
                "compared higher" if metric.varied > 0 else "baseline higher"
            ), name
    assert (
        "more varied by" in found["verdict"]
        and "less varied" not in found["verdict"]
        and "10 of 10" in found["verdict"]
    )
    turned = told(compare(*counted(varied(1), dull), 200, 0))
    assert "less varied by" in turned["verdict"] and "more varied" not in turned["verdict"]
    assert found["baseline"]["self_bleu"]["value"] == pytest.approx(1) and found["baseline"]["vendi"][
        "value"
    ] == pytest.approx(1)
    assert found["baseline"]["gini"]["value"] == pytest.approx(7 / 8) and found["baseline"]["spread"][
        "value"
    ] == pytest.approx(0, abs=1e-6)


def test_vocabularies_of_one_source_differ_by_as_much_as_is_said() -> None:
    """Rare words: half of what a set has stands in one prompt's answers alone. Rounds that leave a third of the prompts out vary too little."""
    rare = [f"word{number}" for number in range(2000)]
    chances = [1 / (number + 1) for number in range(2000)]
    off = []
    for seed in range(20):
        sets = []
        for which in range(2):
            draw = random.Random(2 * seed + which)
            sets.append([[" ".join(draw.choices(rare, chances, k=10)) for _ in range(4)] for _ in range(30)])
        table = [np.zeros((4, 1), dtype=np.float32)] * 30, [np.zeros(4, dtype=np.int64)] * 30
        one = next(
            found
            for found in compare(*(Counted(answers, *table, 1, 0) for answers in sets), 50, seed)
            if found.name == "vocabulary"
        )
        off.append(one.difference / one.error)
    assert 0.6 < float(np.std(off)) < 1.3, off


def test_a_smaller_vocabulary_is_found_and_intervals_hold_the_values() -> None:
    found = told(compare(*counted(varied(1), varied(2, vocabulary=WORDS[:30])), 200, 0))
    assert (
        found["difference"]["vocabulary"]["verdict"] == "baseline higher"
        and found["compared"]["vocabulary"]["value"] == 30
    )
    for which in ("baseline", "compared", "difference"):
        assert all(one["low"] <= one["value"] <= one["high"] for one in found[which].values())
    assert found["difference"]["length"]["verdict"] == SAME


def test_measures_of_words() -> None:
    a, b = words("The cat sat on the mat."), words("Two dogs ran away quickly!")
    assert a == ["the", "cat", "sat", "on", "the", "mat", "."]
    assert self_bleu([a, a, a]) == pytest.approx(1.0) and self_bleu([a, b]) == 0.0 and self_bleu([["x"], ["x"]]) == 1.0
    assert (
        0 < self_bleu([a, words("The cat sat on the sofa.")]) < 1
        and self_bleu([[], []]) == 1.0
        and self_bleu([[], a]) == 0.0
    )
    assert self_bleu([a] * 30) == pytest.approx(1.0), "more than eight others: some are drawn"
    assert self_bleu([words("a b c d"), words("a b c x")]) == pytest.approx((3 / 4 * 3 / 4 * 2 / 3 * 1 / 2) ** 0.25)
    assert distinct([a], 1) == 6 / 7 and distinct([a, a], 2) == 0.5 and distinct([["x"]], 2) == 0.0


def test_measures_of_meaning() -> None:
    eye = np.eye(5, dtype=np.float32)
    assert (
        vendi(eye) == pytest.approx(5)
        and vendi(np.repeat(eye[:1], 5, 0)) == pytest.approx(1)
        and vendi(eye[[0, 0, 1, 1]]) == pytest.approx(2)
    )
    assert (
        spread(eye) == pytest.approx(1)
        and spread(np.repeat(eye[:1], 5, 0)) == pytest.approx(0)
        and spread(eye[[0, 0, 1]]) == pytest.approx(2 / 3)
    )
    assert spread(np.stack([eye[0], -eye[0]])) == pytest.approx(2)


def test_the_report_is_a_table_that_no_answer_can_break() -> None:
    first, second = [["a | b\n# no *heading*", "x"]] * 3, [["", "<b>y</b>"]] * 3
    text = report(
        told(compare(*counted(first, second, 2), 60, 0)), ["why?\nhow?"] * 3, first, second, ("one/hf", "two/hf"), 60
    )
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert len(table) == 2 * 2 + len(METRICS) and len({line.count("|") for line in table}) == 1
    assert (
        "**why? how?**" in text
        and r"- baseline: a \| b \# no \*heading\*" in text
        and "- compared: (nothing)" in text
        and "Only 3 prompts" in text
    )


SHAPE = ModelConfig(layers=2, dim=32, heads=2, kv_heads=1, head_dim=16, ff=64, vocab_size=320, init_std=0.1)
COMMON = ("--preset", "debug", "--context_length", "96", "--parallel.device", "cpu", "--generate.new_tokens", "8", "--generate.rows", "32",
          "--diversity.answers", "4", "--diversity.clusters", "4", "--diversity.rounds", "100")  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A model that writes anything, and one whose every next letter is nearly certain."""
    place = tmp_path_factory.mktemp("models")
    bytes_tokenizer().save(str(place / "words"))
    for name, factor in (("wild", 1.0), ("tame", 30.0)):
        model = Decoder(SHAPE, 96)
        model.start(0)
        with torch.no_grad():
            model.norm.weight.mul_(factor)
        hf.save(model, str(place / name), say=lambda line: None, tokenizer_folder=str(place / "words"))
    return {name: str(place / name) for name in ("wild", "tame")}


def prompts(tmp_path: Path, count: int = 30) -> str:
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        "".join(json.dumps({"prompt": f"Tell me of {n}.", "answer": "1", "kind": "talk"}) + "\n" for n in range(count))
    )
    return str(path)


def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[dict[str, Any], Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STOKER_RUN_DIR", str(tmp_path / "run"))
    assert recipe.main([*COMMON, *words]) == 0
    return json.loads((tmp_path / "run" / "result.json").read_text()), tmp_path / "run"


def named(folders: dict[str, str], baseline: str, compared: str, path: str) -> list[str]:
    return [
        "--model.load",
        folders["wild"],
        "--diversity.baseline",
        folders[baseline],
        "--diversity.compared",
        folders[compared],
        "--diversity.prompts",
        path,
    ]


def test_the_recipe_tells_a_tame_model_from_a_wild_one(
    folders: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result, run_dir = run(
        tmp_path, monkeypatch, *named(folders, "wild", "tame", prompts(tmp_path)), "--diversity.most", "20"
    )
    assert (result["schema"], result["stage"], result["model"], set(result["metrics"])) == (
        1,
        "diversity",
        None,
        {"baseline", "compared", "difference", "verdict"},
    )
    assert (
        result["metrics"]["difference"]["vendi"]["verdict"] == "baseline higher"
        and "less varied by" in result["metrics"]["verdict"]
    )
    answers = [json.loads(line) for line in (run_dir / "completions.jsonl").read_text().splitlines()]
    assert len(answers) == 40 and all(len(one["answers"]) == 4 for one in answers)
    text = (run_dir / "diversity_report.md").read_text()
    assert result["metrics"]["verdict"][1:] in text and "20 prompts, 4 answers" in text


def test_the_recipe_finds_no_difference_between_a_model_and_itself(
    folders: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result, run_dir = run(tmp_path, monkeypatch, *named(folders, "wild", "wild", prompts(tmp_path)))
    assert (
        result["metrics"]["verdict"].startswith(SAME)
        and "No difference" in (run_dir / "diversity_report.md").read_text()
    )


def test_a_prompt_too_long_for_the_context_is_left_out_while_such_are_few(
    folders: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(prompts(tmp_path, 150))
    rows = path.read_text().splitlines()
    path.write_text(
        "\n".join([json.dumps({"prompt": "x" * 200, "answer": "1"}), *rows])
    )  # the first: one that `most` would choose
    _, run_dir = run(tmp_path, monkeypatch, *named(folders, "wild", "wild", str(path)), "--diversity.most", "8")
    assert "1 of 151 are longer than 88 tokens and are left out" in capsys.readouterr().out
    answers = [json.loads(line) for line in (run_dir / "completions.jsonl").read_text().splitlines()]
    assert len(answers) == 16 and all("xxx" not in one["prompt"] for one in answers)


@pytest.mark.parametrize(
    ("words", "code", "line"),
    [
        (("--generate.temperature", "0"), EX_CONFIG, "the same answer every time"), (("--diversity.rounds", "2"), EX_CONFIG, "too few"),
        (("--diversity.baseline=",), EX_CONFIG, "diversity.baseline is empty"), (("--diversity.prompts", "absent.jsonl"), EX_NOINPUT, "absent.jsonl can't be read"),
        (("--diversity.most", "1"), EX_DATAERR, "at least 2"), (("--generate.new_tokens", "90"), EX_DATAERR, "raise data.context_length"),
    ],
)  # fmt: skip
def test_what_can_not_be_compared_is_refused(
    words: tuple[str, ...],
    code: int,
    line: str,
    folders: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(Refusal) as refused:
        run(tmp_path, monkeypatch, *named(folders, "wild", "tame", prompts(tmp_path)), *words)
    assert refused.value.code == code and line in refused.value.line and not (tmp_path / "run" / "result.json").exists()
