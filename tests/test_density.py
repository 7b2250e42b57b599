"""Sparse prompts get more weight: planted clusters, exact neighbours, caps, and the recipe on a small model."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402

from conftest import Stoker, at_length  # noqa: E402
from stoker.contract.errors import Refusal  # noqa: E402
from stoker.training.density.points import (  # noqa: E402  # noqa: E402
    Vectors,
    centred,
    clusters,
    evenness,
    gini,
    unit,
)
from stoker.training.evaluate.likelihood import embed  # noqa: E402
from stoker.training.model import hf  # noqa: E402
from stoker.training.model.config import ModelConfig  # noqa: E402
from stoker.training.model.decoder import Decoder  # noqa: E402
from stoker.training.recipes import density  # noqa: E402
from stoker.training.recipes import density as recipe  # noqa: E402
from stoker.training.recipes.density import (  # noqa: E402
    densities,
    distances,
    weights,
)
from stoker.training.tokenizer.tokenizer import bytes_tokenizer  # noqa: E402

SHAPE = ModelConfig(layers=2, dim=32, heads=2, kv_heads=1, head_dim=16, ff=64, vocab_size=320, init_std=0.1)


def planted(crowd: int = 80, alone: int = 12, width: int = 24) -> Vectors:
    """A dense cluster, and points that are far from it and from each other."""
    draw = np.random.default_rng(0)
    middle = draw.normal(size=width)
    near = middle + 0.05 * draw.normal(size=(crowd, width))
    return unit(np.concatenate([near, 3 * draw.normal(size=(alone, width))]).astype(np.float32))


def test_isolated_points_get_more_weight_than_a_crowd() -> None:
    """The sign: a prompt that stands alone is drawn more often, one of many alike less."""
    for vectors in (planted(), centred(planted())):
        found = weights(densities(vectors, 8), power=1.0, most=5.0)
        assert found[80:].min() > 2 * found[:80].max() and found[:80].max() < 1 < found[80:].min()
        assert found.mean() == pytest.approx(1.0, abs=1e-12) and found.max() <= 5.0 + 1e-12


def test_more_power_leans_further_and_none_makes_all_alike() -> None:
    density = densities(planted(), 8)
    assert (weights(density, 0.0, 5.0) == 1.0).all()
    shares = [weights(density, power, 50.0)[80:].sum() for power in (0.0, 0.5, 1.0, 2.0)]
    assert shares == sorted(shares) and shares[0] < shares[-1]


def test_no_weight_is_above_the_cap_and_the_mean_stays_one() -> None:
    density = np.array([1.0] * 95 + [1e-3, 1e-4, 1e-5, 1e-150, 1e-300])
    for power, most in ((1.0, 2.0), (1.0, 5.0), (3.0, 5.0), (1.0, 10 / 3), (0.3, 1.5)):
        found = weights(density, power, most)
        assert found.max() <= most * (1 + 1e-12) and found.min() >= 0 and found.mean() == pytest.approx(1.0, abs=1e-12)
        assert (np.diff(found[94:]) >= 0).all(), "sparser never has less"
    assert (weights(density, 1.0, 1.0) == 1.0).all()


def test_neighbours_are_exact_whatever_the_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    vectors = planted(40, 20)
    similar = vectors.astype(np.float64) @ vectors.T.astype(np.float64)
    np.fill_diagonal(similar, -9)
    expected = 1 - np.sort(similar, axis=1)[:, -5:].mean(1)
    assert np.allclose(distances(vectors, 5), expected, atol=1e-6)
    monkeypatch.setattr("stoker.training.recipes.density.CHUNK", 60 * 7)
    assert np.allclose(distances(vectors, 5), expected, atol=1e-6)
    assert np.allclose(distances(vectors, 500), 1 - np.sort(similar, axis=1)[:, 1:].mean(1), atol=1e-6), (
        "all others, where k is more than there are"
    )
    assert (densities(vectors[:1], 5) == 1).all() and (densities(np.repeat(vectors[:1], 5, 0), 3) == 1).all(), (
        "one point, or copies of one: all alike"
    )


def test_copies_are_dense_but_keep_a_weight() -> None:
    vectors = np.concatenate([np.repeat(planted(1, 0), 30, 0), planted(0, 30)])
    found = weights(densities(vectors, 4), 1.0, 10.0)
    assert 0 < found[:30].max() < found[30:].min()


def test_clusters_are_found_and_the_same_every_time() -> None:
    draw = np.random.default_rng(3)
    middles = draw.normal(size=(4, 16)) * 5
    vectors = unit((np.repeat(middles, 25, 0) + 0.1 * draw.normal(size=(100, 16))).astype(np.float32))
    found = clusters(vectors, 4, seed=1)
    assert [len(set(found[begin : begin + 25])) for begin in range(0, 100, 25)] == [1] * 4 and len(set(found)) == 4
    assert (found == clusters(vectors, 4, seed=1)).all()
    assert sorted(Counter(clusters(vectors[:3], 16, seed=1)).values()) == [1, 1, 1], "more clusters than points"
    assert set(clusters(np.repeat(vectors[:1], 9, 0), 4, seed=0)) == {0}, "copies of one point"


def test_gini_is_zero_for_equal_shares_and_largest_for_one() -> None:
    for k in (1, 2, 3, 7, 16):
        assert gini([5] * k) == 0.0 and gini([0.1] * k) == 0.0
        assert gini([0] * (k - 1) + [12]) == pytest.approx((k - 1) / k)
        assert evenness([3] * k) == pytest.approx(1.0)
    assert evenness([0, 0, 4]) == 0.0 and 0 < gini([1, 2, 3]) < gini([0, 1, 5]) and gini([1, 3]) == pytest.approx(0.25)


@torch.no_grad()
def test_embeddings_are_the_mean_over_a_rows_own_tokens() -> None:
    model = Decoder(SHAPE, 48)
    model.start(1)
    rows = [[1, 2, 3], list(range(40)), [7], [1, 2, 3], list(range(60))]
    found = embed(model.eval(), rows)
    for row, vector in zip(rows, found, strict=True):
        alone = model.hidden(torch.tensor([row[:48]]))[0].mean(0)
        assert np.allclose(vector, (alone / alone.norm()).numpy(), atol=1e-5)
    assert (found[0] == found[3]).all(), "equal rows are the same point, to the bit"
    assert np.allclose(np.linalg.norm(found, axis=1), 1, atol=1e-5) and np.allclose(
        np.linalg.norm(centred(found), axis=1), 1, atol=1e-5
    )
    assert np.allclose(centred(np.repeat(found[:1], 4, 0)) @ centred(np.repeat(found[:1], 4, 0)).T, 1), (
        "where all are alike there are no random directions"
    )


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "hf"
    bytes_tokenizer().save(str(folder.parent / "words"))
    model = Decoder(SHAPE, 160)
    model.start(0)
    hf.save(model, str(folder), say=lambda line: None, tokenizer_folder=str(folder.parent / "words"))
    return folder


def prompts(path: Path) -> str:
    told: list[dict[str, Any]] = [
        {"prompt": f"How much is {n} and 4, Anna?", "answer": str(n + 4), "kind": "sum"} for n in range(150)
    ]
    told += [
        {"prompt": [{"role": "user", "content": text}], "answer": "x", "kind": "odd"}
        for text in ("ZZZZ!!!", "?", "~~~~ ~~~~ ~~~~", "{[()]}", "QWXYQWXY")
    ]
    path.write_text("".join(json.dumps(one) + "\n" for one in told))
    return str(path)


COMMON = (
    "--preset",
    "debug",
    "--context_length",
    "160",
    "--parallel.device",
    "cpu",
    "--density.clusters",
    "4",
    "--density.neighbours",
    "4",
)


def read(run_dir: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    return json.loads((run_dir / "result.json").read_text()), [
        json.loads(line) for line in (run_dir / "weights.jsonl").read_text().splitlines()
    ]


@at_length
def test_the_recipe_gives_rare_prompts_more_weight_on_one_rank_and_on_two(
    stoker: Stoker, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("--model.load", str(model_folder), "--density.prompts", prompts(tmp_path / "prompts.jsonl"), *COMMON)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STOKER_RUN_DIR", str(tmp_path / "run"))
    assert recipe.main([*words]) == 0
    result, lines = read(tmp_path / "run")
    assert (result["stage"], result["model"]) == ("density", None) and {
        "prompts",
        "clusters",
        "gini",
        "weight_min",
        "weight_max",
    } <= result["metrics"].keys()
    assert [one["index"] for one in lines] == list(range(155)) and np.mean(
        [one["weight"] for one in lines]
    ) == pytest.approx(1)
    assert min(one["weight"] for one in lines[150:]) > 1.5 > np.mean([one["weight"] for one in lines[:150]])
    assert (
        result["metrics"]["weight_max"] == max(one["weight"] for one in lines) and result["metrics"]["prompts"] == 155
    )

    monkeypatch.delenv("STOKER_RUN_DIR")
    done = stoker.torch("run", "--nproc-per-node", "2", "-m", "stoker.training.recipes.density", *words)
    assert done.code == 0, done.out + done.err
    _, again = read(done.run_dir)
    assert np.allclose([one["weight"] for one in again], [one["weight"] for one in lines], rtol=1e-3)


def test_a_row_that_can_not_be_asked_has_the_weight_zero_and_many_are_refused(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = prompts(tmp_path / "prompts.jsonl")
    lines = Path(path).read_text().splitlines()
    Path(path).write_text("\n".join([*lines[:3], '{"answer": "5"}', *lines[3:]]) + "\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STOKER_RUN_DIR", str(tmp_path / "run"))
    assert recipe.main(["--model.load", str(model_folder), "--density.prompts", path, *COMMON]) == 0
    _, found = read(tmp_path / "run")
    assert (
        found[3] == {"index": 3, "weight": 0.0, "density": None, "cluster": None}
        and len(found) == 156
        and all(one["weight"] for one in found if one["index"] != 3)
    )
    assert "line 4: a row without prompt: it has answer" in capsys.readouterr().out
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n')
    for given, word in (
        (str(tmp_path / "bad.jsonl"), "1 of 1 rows can't be used"),
        ("absent.jsonl", "can't be read"),
        ("", "density.prompts is empty"),
    ):
        with pytest.raises(Refusal, match=word):
            recipe.main(["--model.load", str(model_folder), f"--density.prompts={given}", *COMMON])


def test_neighbours_of_many_prompts_are_looked_for_among_some(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 400,000 prompts, 10 MB, all pairs were compared."""
    monkeypatch.setattr(density, "MOST_OTHERS", 50)
    draw = np.random.default_rng(0)
    vectors = draw.normal(size=(173, 8)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    others = np.arange(50) * 173 // 50
    similar = vectors @ vectors[others].T
    similar[others, np.arange(50)] = -np.inf
    expected = 1 - np.sort(similar, axis=1)[:, -5:].mean(1)
    assert np.allclose(density.distances(vectors, 5), expected, atol=1e-6)


def test_prompts_of_the_density_stage_are_kept_as_far_as_they_are_read() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("tokenizers")
    from stoker.training.data.formats.questions import Question
    from stoker.training.evaluate.asking import Manner
    from stoker.training.recipes import density
    from stoker.training.tokenizer.tokenizer import bytes_tokenizer

    questions = [Question((("user", "a" * 1000),), "", "")] * 10
    found = density.shortened(questions, bytes_tokenizer(), Manner(chat=False), 100)
    assert [len(row) for row in found] == [100] * 10 and memoryview(found[0]).nbytes == 400  # type: ignore[arg-type]
