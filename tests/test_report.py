"""The report of a speedrun: what it says, that it is made from whatever is there, and that nothing in the data becomes markup."""

from __future__ import annotations

import json
import math
import random
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import EVERYTHING, at_length
from stoker.contract.errors import Refusal
from stoker.contract.frozen import replace
from stoker.speedrun import gather, plots, report
from stoker.speedrun.report_chain import hardware_lines
from stoker.training.diversity import metrics as comparing
from stoker.training.diversity.metrics import METRICS, Counted
from stoker.training.diversity.metrics import report as diversity_report
from stoker.training.evaluate.confidence import wilson
from stoker.training.stages.blocks import Figure
from stoker.training.stages.significance import (
    Measured,
    change,
    judged,
    number,
    number_and_interval,
    points,
    share,
    share_with_interval,
)

KINDS = ("facts", "stories", "sums", "dialogue")
RIGHT = {
    "base": (3, 11, 2, 0),
    "midtrain": (22, 31, 9, 12),
    "sft": (71, 66, 48, 74),
    "grpo-uniform": (76, 70, 69, 78),
    "grpo-density": (78, 69, 72, 77),
}  # of 100 each
SAMPLES = (
    ("Tom has 3 apples. He gets 4 more. How many?", "7", "sums"), ("What colour is the house of Mia?", "red", "facts"), ("Who found the key?", "Anna", "stories"),
)  # fmt: skip
NASTY = '<script>alert("x")</script> | **bold** [link](http://example.org) & `code`\n![pic](http://example.org/a.png) $x_1$ \ud800\x00'


def marks(right: int, total: int, draws: int = 4, cut: int = 0) -> dict[str, Any]:
    low, high = wilson(right, total)
    sampled = int(right * draws * 0.9)
    sampled_low, sampled_high = wilson(
        sampled / draws, total
    )  # answers to one question are not independent: wider than their count says
    shares = {"": right, "strict_": right * 4 // 5, "form_": right, "cut_": cut, "sampled_cut_": 0}
    found = {
        prefix + key: value
        for prefix, count in shares.items()
        for key, value in zip(
            ("correct", "total", "accuracy", "low", "high"),
            (count, total, count / total, *wilson(count, total)),
            strict=True,
        )
    }
    return found | {
        "sampled_correct": sampled,
        "sampled_total": total * draws,
        "sampled_accuracy": sampled / total / draws,
        "sampled_low": sampled_low,
        "sampled_high": sampled_high,
        "low": low,
        "high": high,
    }


def evaluation(name: str) -> dict[str, Any]:
    right = RIGHT[name]
    kinds = {kind: marks(count, 100) for kind, count in zip(KINDS, right, strict=True)}
    samples = []
    for at, (prompt, answer, kind) in enumerate(SAMPLES):
        good = right[0] > 25 * (at + 1)
        asked: Any = f"Question: {prompt}\nAnswer:" if name == "base" else [{"role": "user", "content": prompt}]
        samples.append(
            {
                "prompt": asked,
                "answer": answer,
                "completion": f"The answer is {answer}." if good else "the the house",
                "correct": good,
                "kind": kind,
            }
        )
    if name == "sft":
        samples[1]["completion"] = NASTY
    metrics = {
        "tasks": {"questions": marks(sum(right), 400)},
        "kinds": kinds,
        "all": marks(sum(right), 400),
        "bits_per_byte": {"base": 0.912}.get(name, 0.97),
        "new_tokens": 96,
    }
    return {"metrics": metrics, "model": None, "samples": samples}


def trained(
    seed: int, first: float, last: float, steps: int, bits: float
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    draw, lines = random.Random(seed), []
    for step in range(0, steps, 10):
        loss = last + (first - last) * math.exp(-4 * step / steps) + draw.gauss(0, 0.03)
        lines.append(
            {
                "schema": 1,
                "time": 1.0,
                "step": step,
                "loss": loss,
                "lr": 3e-3,
                "grad_norm": 0.8,
                "tokens_per_s": 41000.0,
                "tokens": step * 4096,
            }
        )
        if step % 100 == 0:
            lines.append(
                {**lines[-1], "val_loss": loss + 0.05, "val_bits_per_byte": (loss + 0.05) * bits / (last + 0.05)}
            )
    end = {
        "loss": last,
        "val_loss": last + 0.05,
        "val_bits_per_byte": bits,
        "tokens": steps * 4096,
        "steps": steps,
        "seconds": 61.2,
    }
    return {"metrics": end, "model": "hf"}, lines


def grpo(seed: int, gain: float) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    draw = random.Random(seed)
    lines = [
        {
            "step": step,
            "loss": 0.01,
            "reward": 0.62 + gain * (1 - math.exp(-step / 20)) + draw.gauss(0, 0.03),
            "correct": 0.6,
            "reward_std": 0.4,
            "kl": 0.0012 * step + abs(draw.gauss(0, 0.004)),
            "entropy": 0.42 - 0.003 * step + draw.gauss(0, 0.01),
            "length": 21 - 0.05 * step + draw.gauss(0, 0.6),
            "tokens": 5000,
            "grad_norm": 0.5,
            "lr": 1e-4,
            "tokens_per_s": 9000.0,
        }
        for step in range(60)
    ]
    end = {
        "steps": 60,
        "reward_first": 0.63,
        "reward_last": 0.62 + gain,
        "kl_last": 0.07,
        "entropy_last": 0.24,
        "length_last": 18.1,
        "stopped": None,
    }
    return {"metrics": end, "model": "hf"}, lines


def diversity() -> dict[str, Any]:
    values = {
        "distinct_1": (0.21, 0.02, 0.012),
        "distinct_2": (0.44, 0.03, 0.02),
        "distinct_3": (0.58, 0.01, 0.03),
        "self_bleu": (0.47, -0.04, 0.03),
        "spread": (0.31, 0.004, 0.01),
        "vendi": (6.2, 0.5, 0.4),
        "gini": (0.38, -0.02, 0.05),
        "entropy": (0.81, 0.01, 0.02),
        "vocabulary": (312, 14, 20),
        "length": (18.2, 0.3, 0.9),
    }
    spread = {name: {"value": base, "low": base * 0.95, "high": base * 1.05} for name, (base, _, _) in values.items()}
    moved = {
        name: {"value": base + up, "low": (base + up) * 0.95, "high": (base + up) * 1.05}
        for name, (base, up, _) in values.items()
    }
    apart = {
        name: {
            "value": up,
            "low": up - half,
            "high": up + half,
            "verdict": "no difference" if abs(up) < half else "compared higher" if up > 0 else "baseline higher",
        }
        for name, (_, up, half) in values.items()
    }
    verdict = (
        "the compared model's answers are more varied by distinct_1, distinct_2 (2 of 9 measures, Holm-corrected, 5 %)"
    )
    return {"metrics": {"baseline": spread, "compared": moved, "difference": apart, "verdict": verdict}, "model": None}


def results() -> dict[str, tuple[str, dict[str, Any], list[dict[str, Any]]]]:
    """Name -> recipe, result.json, metrics.jsonl, in the chain's order."""
    low, high = wilson(376, 400)
    bins = [
        (0.5, 0.6, 0.55, 0.56, 34),
        (0.6, 0.7, 0.65, 0.7, 41),
        (0.7, 0.8, 0.75, 0.79, 62),
        (0.8, 0.9, 0.86, 0.9, 90),
        (0.9, 1.0, 0.96, 0.99, 173),
    ]
    reward = {
        "accuracy": 0.94,
        "low": low,
        "high": high,
        "total": 400,
        "loss": 0.21,
        "by_kind": {
            kind: {"accuracy": right / 100, "low": wilson(right, 100)[0], "high": wilson(right, 100)[1], "total": 100}
            for kind, right in zip(KINDS, (97, 95, 90, 94), strict=True)
        },
        "calibration": [dict(zip(("low", "high", "predicted", "observed", "count"), row, strict=True)) for row in bins],
    }
    made = {
        "tokenizer": (
            "tokenizer",
            {"metrics": {"bytes_per_token": 3.41, "words_bytes_per_token": 5.12, "vocab_size": 768}, "model": None},
            [],
        ),
        "base": ("pretrain", *trained(0, 6.6, 1.6, 600, 0.912)),
        "midtrain": ("midtrain", *trained(1, 2.4, 1.2, 300, 0.61)),
        "sft": ("sft", *trained(2, 1.5, 0.5, 300, 0.22)),
        "reward": ("reward", {"metrics": reward, "model": "hf"}, []),
        "density": (
            "density",
            {
                "metrics": {"prompts": 2000, "clusters": 16, "gini": 0.42, "weight_min": 0.31, "weight_max": 4.8},
                "model": None,
            },
            [],
        ),
        "grpo-density": ("grpo", *grpo(3, 0.19)),
        "grpo-uniform": ("grpo", *grpo(4, 0.16)),
    }
    made |= {f"eval-{name}": ("evaluate", evaluation(name), []) for name in RIGHT}
    return {**made, "diversity": ("diversity", diversity(), [])}


def put(path: Path, data: Any) -> None:
    path.write_text(json.dumps(data))


def put_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def speedrun(folder: Path, until: str = "") -> Path:
    """A speedrun directory after the stage `until` (all of them: empty); sft was restarted once."""
    stages = []
    for name, (recipe, result, lines) in results().items():
        run = folder / "stages" / f"{name}-1a2b3c4d"
        run.mkdir(parents=True)
        put(run / "result.json", {"schema": 1, "stage": recipe, **result})
        put(
            run / "run.json",
            {"schema": 1, "name": name, "versions": {"stoker": "0.1.0", "python": "3.11.9", "torch": "2.13.0"}},
        )
        put(
            run / "verdict.json",
            {
                "schema": 1,
                "status": "completed",
                "cause": "completed",
                "summary": "1 rank ended with exit code 0",
                "exit_code": 0,
            },
        )
        events = [
            {"schema": 1, "time": 1.0, "event": "run", "host": "box"},
            {"schema": 1, "time": 1.1, "event": "attempt", "attempt": 0},
        ]
        again = [{"time": 9.0, "attempt": 1, "cause": "rank.killed", "rank": 0}] if name == "sft" else []
        events += [{"schema": 1, "event": "restart", "wait_s": 1.0, "env": [], **one} for one in again]
        put_lines(run / "events.jsonl", events)
        if lines:
            put_lines(run / "metrics.jsonl", lines)
        stages.append(
            {
                "name": name,
                "stage": recipe,
                "key": "1a2b3c4d" * 8,
                "run": f"stages/{run.name}",
                "status": "done",
                "seconds": 12.0 + 8 * len(lines) ** 0.5,
                "attempts": 2 if name == "sft" else 1,
                "energy_wh": None,
                "cost": 0.004,
                "restarts": again,
                "began": None,
                "trouble": "",
            }
        )
        if name == until:
            break
    stages += [
        {**stages[-1], "name": name, "run": "", "status": "waiting", "seconds": 0.0, "attempts": 0, "cost": None}
        for name in list(results())[len(stages) :]
    ]
    stages.append(
        {
            "name": "report",
            "stage": "report",
            "key": "ab" * 32,
            "run": "",
            "status": "running",
            "seconds": 0.0,
            "attempts": 0,
            "restarts": [],
        }
    )
    hardware = {"hostname": "box", "cores": 2, "memory_total": 8 * 10**9, "gpus": []}
    put(folder / "chain.json", {"schema": 1, "preset": "cpu", "seed": 0, "hardware": hardware, "stages": stages})
    return folder


class Page(HTMLParser):
    """Tags, attributes and text of a page, as a browser sees them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = speedrun(tmp_path_factory.mktemp("speedrun"))
    report.write(str(folder))
    return folder


def test_the_report_says_the_main_numbers_first(whole: Path) -> None:
    text = (whole / "report.md").read_text()
    head = text.split("##")[0]
    for said in ("Preset cpu, seed 0: 7 min", "on 2 CPU cores", "| Base | 4.0 % |", "| SFT | 64.8 %<br>▲ +46.2 |"):
        assert said in head, said
    assert text.index("## Worth knowing") < text.index("## Did each stage help?"), "before all details"
    for said in (
        "uniform +8.5 points, better (significant)",
        "94.0 % of held-out pairs in the right order",
        "Nothing was forgotten",
    ):
        assert said in text, said
    assert "Not finished" not in text


def test_each_stage_is_judged_by_its_own_measure(whole: Path) -> None:
    rows = [
        line.split("|")[1:4]
        for line in (whole / "report.md").read_text().splitlines()
        if line.startswith("| ") and line.count("|") == 4
    ]
    judged_as = {stage.split(";")[0].strip(): (numbers.strip(), verdict.strip()) for stage, numbers, verdict in rows}
    assert judged_as["Tokenizer<br>bytes per token"] == ("reference 5.12, this one 3.41", "66.6 % of the reference")
    assert judged_as["Base<br>bits per byte of held-out text, lower is better"] == (
        "2.81 → 0.912",
        "down, as hoped (not tested)",
    )
    assert judged_as["SFT<br>questions right, greedy"] == (
        "18.5 % → 64.8 %",
        "better (significant)<br>+46.2 points (+39.9 to +52.0)",
    )
    assert judged_as["GRPO uniform<br>questions right, sampled"][1].startswith("better (significant)")
    assert judged_as["Density or uniform<br>questions right, greedy"][1].startswith("no significant difference")
    assert judged_as["Reward model<br>held-out pairs in the right order"] == (
        "50.0 % → 94.0 %",
        "better (significant)<br>+44.0 points (+41.2 to +45.9)",
    )


def test_tables_samples_restarts_and_the_way_on_are_there(whole: Path) -> None:
    text = (whole / "report.md").read_text()
    for said in (
        "| sums questions | 2.0 %<br>0.6–7.0 |",
        "Gini 0.42",
        "The density model's answers are more varied",
        "| gini<br>no difference |",
        "restarted as attempt 1 after rank.killed (rank 0)",
        "stages/grpo-density-1a2b3c4d/hf",
        "stoker speedrun --preset gpu",
        "torch 2.13.0",
        "| all | 7 min",
        "| base | 1 min",
    ):
        assert said in text, said
    assert text.count("restarted as") == 1
    asked = text[text.index("Who found the key?") :]
    assert [title in asked for title in ("| Base |", "| SFT |", "| GRPO density |")] == [
        True
    ] * 3  # one table though the base model's prompt is worded otherwise


def forgetful(folder: Path) -> Path:
    """SFT lost the facts, and a third of uniform's answers were cut."""
    speedrun(folder)
    for name, facts, cut in (
        ("base", 68, 0),
        ("midtrain", 37, 0),
        ("sft", 21, 0),
        ("grpo-uniform", 22, 130),
        ("grpo-density", 66, 0),
    ):
        path = folder / "stages" / f"eval-{name}-1a2b3c4d" / "result.json"
        told = json.loads(path.read_text())
        told["metrics"]["kinds"]["facts"] = marks(facts, 100)
        told["metrics"]["all"] |= {
            key: value for key, value in marks(0, 400, cut=cut).items() if key.startswith("cut_")
        }
        told["metrics"]["bits_per_byte"] = {"base": 0.44, "midtrain": 0.9, "sft": 2.43}.get(name, 2.4)
        put(path, told)
    return folder


def test_what_a_stage_forgot_is_named_at_the_top_and_marked_in_the_table(tmp_path: Path) -> None:
    text = report.markdown(report.TITLE, tuple(report.contents(gather.gather(str(forgetful(tmp_path))))), {})
    top = text[: text.index("## Did each stage help?")]
    assert (
        "Forgotten, facts questions: 68.0 % right after Base, but 37.0 % after Midtrain, 21.0 % after SFT, 22.0 % after GRPO uniform."
        in top
    )
    assert "Nothing was forgotten" not in text and top.count("Forgotten, ") == 1
    (row,) = [line for line in text.splitlines() if line.startswith("| facts questions |")]
    cells = [cell.strip() for cell in row.split("|")[2:-1]]
    assert [cell.startswith("▼") for cell in cells] == [False, True, True, True, False] and "below Base" in cells[2]
    page = report.page(report.TITLE, tuple(report.contents(gather.gather(str(tmp_path)))), {})
    assert '<td class="bad">▼ 21.0&nbsp;%<small>' in page


def test_cut_answers_and_rising_bits_per_byte_are_explained_where_they_are_shown(tmp_path: Path) -> None:
    text = report.markdown(report.TITLE, tuple(report.contents(gather.gather(str(forgetful(tmp_path))))), {})
    top = text[: text.index("## Did each stage help?")]
    assert "Answers cut at 96 tokens: 32.5 % after GRPO uniform. " in top
    below = text[text.index("| bits per byte of plain text") :]
    assert "rises from 0.440 (Base) to 2.43 (SFT)" in below[:1500] and "A random guess would need 2.81." in below[:1500]


def test_a_first_table_has_five_numbers_at_most_and_comes_before_everything_else(whole: Path) -> None:
    lines = (whole / "report.md").read_text().splitlines()
    head = next(line for line in lines if line.startswith("|"))
    assert head.startswith("| After stage |") and head.count("|") - 2 <= 5 and lines.index(head) < 8


def test_the_report_shows_as_many_measures_as_the_verdict_counts(tmp_path: Path) -> None:
    """Both from the same table of measures, by the real comparison."""
    counted = Counted(
        [["a b c", "a b d"], ["x y", "z z"]], [np.eye(2, 4, dtype=np.float32)] * 2, [np.array([0, 1])] * 2, 2, 0
    )
    found = comparing.told(comparing.compare(counted, counted, 50, 0))
    folder = speedrun(tmp_path)
    path = folder / "stages" / "diversity-1a2b3c4d" / "result.json"
    put(path, {**json.loads(path.read_text()), "metrics": found})
    text = report.markdown(report.TITLE, tuple(report.contents(gather.gather(str(folder)))), {})
    in_verdict = int(re.search(r"none of (\d+) measures of variety", text)[1])  # type: ignore[index]
    section = text[text.index("## Diversity") :]
    shown = section[section.index("measures of variety, each") : section.index("Not a measure of variety")]
    rows = [line for line in shown.splitlines() if line.startswith("| ") and not line.startswith("| Measure")]
    assert (
        in_verdict
        == len(rows)
        == len([metric for metric in METRICS.values() if metric.varied])
        == int(re.search(r"(\d+) measures of variety, each", text)[1])
    )  # type: ignore[index]
    own = diversity_report(found, ["p", "q"], [["a"]] * 2, [["b"]] * 2, ("one", "two"), 50)
    table = own[own.index("measures of variety:") : own.index("Not a measure")]
    assert (
        f"{in_verdict} measures of variety:" in own
        and sum(line.startswith("| ") for line in table.splitlines()) - 1 == in_verdict
    )


def test_every_figure_is_drawn_named_in_the_text_and_wide_enough_to_read(whole: Path) -> None:
    text = (whole / "report.md").read_text()
    for name in ("accuracy", "kinds", "losses", "rewards", "calibration", "diversity", "time"):
        png = (whole / "plots" / f"{name}.png").read_bytes()
        assert png.startswith(b"\x89PNG") and int.from_bytes(png[16:20], "big") > 700
        assert (whole / "plots" / f"{name}.svg").read_text().rstrip().endswith("</svg>")
        assert f"(plots/{name}.png)" in text


def test_the_page_fetches_nothing_and_shows_every_figure(whole: Path) -> None:
    text = (whole / "report.html").read_text()
    page = Page(text)
    assert page.tags.count("svg") == 7 and not {"script", "link", "img", "iframe"} & set(page.tags)
    assert all((value or "").startswith("#") for key, value in page.attributes if key in ("src", "href", "xlink:href"))
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", text)) and "@import" not in text
    ids = [value for key, value in page.attributes if key == "id"]
    assert len(ids) == len(set(ids))
    asked = {(value or "")[1:] for key, value in page.attributes if key == "xlink:href"} | set(
        re.findall(r"url\(#([^)]*)\)", text)
    )
    assert asked and asked <= set(ids)
    assert "prefers-color-scheme: dark" in text and "@media print" in text and "var(--blue)" in text


def test_what_a_model_said_is_text_in_the_page_and_in_markdown(whole: Path) -> None:
    page = Page((whole / "report.html").read_text())
    assert '<script>alert("x")</script> | **bold** [link](http://example.org) & `code`' in page.text
    assert "script" not in page.tags and "strong" not in page.tags and "a" not in page.tags
    text = (whole / "report.md").read_text()
    assert "<script" not in text and "\\*\\*bold\\*\\*" in text and "\\!\\[pic\\]" in text
    row = next(line for line in text.splitlines() if "alert" in line)
    assert len(re.findall(r"(?<!\\)\|", row)) == 4 and "<br>" in row


@at_length
def test_the_same_chain_gives_the_same_bytes(whole: Path) -> None:
    def made() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in whole.rglob("*") if path.suffix in (".md", ".html", ".svg", ".png")}

    before = made()
    report.write(str(whole))
    assert before == made() and len(before) == 16


@pytest.mark.parametrize("until", ["tokenizer", "base", "grpo-density"])
def test_a_chain_that_is_not_finished_has_a_report_that_says_so(tmp_path: Path, until: str) -> None:
    report.write(str(speedrun(tmp_path, until)))
    head = (tmp_path / "report.md").read_text().split("##")[0]
    assert (
        "Not finished" in head and "diversity" in head and f" {until} (" not in head and "diversity (waiting)" in head
    )
    assert "continues where this stopped" in (tmp_path / "report.html").read_text()


def test_steps_are_whole_and_the_legend_covers_no_point(tmp_path: Path) -> None:
    chain = gather.gather(str(speedrun(tmp_path)))
    short = replace(
        chain,
        stages={
            name: replace(one, steps=tuple({**row, "step": at} for at, row in enumerate(one.steps[:4])))
            for name, one in chain.stages.items()
        },
    )
    for made in (plots.rewards(short), plots.losses(short)):
        assert made is not None
        made.draw_without_rendering()
        assert all(tick == int(tick) for axes in made.axes for tick in axes.get_xticks())
    figure = plots.calibration(chain)
    assert figure is not None
    figure.draw_without_rendering()
    (axes,) = figure.axes
    legend = axes.get_legend()
    assert legend is not None and legend.get_window_extent().y0 >= axes.get_window_extent().y1


def test_the_first_line_and_the_first_figure_count_the_same_questions(tmp_path: Path) -> None:
    """GRPO's prompts are held out in a file of their own: neither of them counts those."""
    folder = speedrun(tmp_path)
    for path in folder.glob("**/result.json"):
        result = json.loads(path.read_text())
        if "tasks" in result["metrics"]:
            tasks = {"questions": marks(300, 400), "prompts": marks(10, 100)}
            result["metrics"] |= {"tasks": tasks, "all": marks(310, 500)}
            put(path, result)
    chain = gather.gather(str(folder))
    text = report.markdown(report.TITLE, tuple(report.contents(chain)), {})
    assert "answers 75.0 % of 400 held-out questions" in text
    figure = plots.accuracy(chain)
    assert figure is not None
    greedy = figure.axes[0].containers[0][0].get_ydata()
    assert list(greedy) == [pytest.approx(75.0)] * len(chain.evaluations)
    captions = [block.caption for block in report.contents(chain) if isinstance(block, Figure)]
    assert any("the 400 held-out questions" in caption for caption in captions)


def test_an_empty_chain_has_a_report(tmp_path: Path) -> None:
    put(tmp_path / "chain.json", {})
    report.write(str(tmp_path))
    assert "No stage was started" in (tmp_path / "report.md").read_text() and list((tmp_path / "plots").iterdir()) == []


def test_a_failed_stage_and_a_tripped_breaker_are_told(tmp_path: Path) -> None:
    folder = speedrun(tmp_path, "grpo-uniform")
    run = folder / "stages" / "grpo-uniform-1a2b3c4d"
    (run / "result.json").unlink()
    put(
        run / "verdict.json",
        {
            "schema": 1,
            "status": "failed",
            "cause": "host.disk",
            "summary": "the disk is full",
            "exit_code": 1,
            "fix": ["free 2 GB"],
        },
    )
    tripped = folder / "stages" / "grpo-density-1a2b3c4d" / "result.json"
    told = json.loads(tripped.read_text())
    told["metrics"]["stopped"] = "reward was 0 for 10 steps"
    put(tripped, told)
    put(
        tripped.parent / "verdict.json",
        {
            "schema": 1,
            "status": "failed",
            "cause": "grpo.broken",
            "summary": "reward was 0 for 10 steps",
            "exit_code": 70,
        },
    )
    chain = json.loads((folder / "chain.json").read_text())
    failed = next(row for row in chain["stages"] if row["name"] == "grpo-uniform")
    failed |= {"status": "failed", "trouble": "the disk is full"}
    put(folder / "chain.json", chain)
    text = report.markdown(report.TITLE, tuple(report.contents(gather.gather(str(folder)))), {})
    for said in (
        "grpo-uniform (failed)",
        "failed: the disk is full",
        "what to do: free 2 GB",
        "reward was 0 for 10 steps",
    ):
        assert said in text, said
    assert (
        text.count("the disk is full") == 1 == text.count("reward was 0 for 10 steps")
        and "Not finished: grpo-uniform" in text
        and "grpo-density (" in text
    )
    put(
        run / "verdict.json",
        {
            "schema": 1,
            "status": "failed",
            "cause": "rank.exit",
            "summary": "rank 0 ended with exit code 65",
            "exit_code": 65,
        },
    )
    assert "failed: the disk is full" in report.markdown(
        report.TITLE, tuple(report.contents(gather.gather(str(folder)))), {}
    )
    (run / "verdict.json").unlink()
    put_lines(run / "events.jsonl", [{"event": "run"}, {"event": "run"}])
    text = report.markdown(report.TITLE, tuple(report.contents(gather.gather(str(folder)))), {})
    assert "grpo-uniform: failed: the disk is full" in text and "run again once" in text


def test_gpus_are_named_and_counted() -> None:
    card = {"index": 0, "name": "NVIDIA H200", "memory_total": 150 * 10**9}
    assert hardware_lines({"gpus": [card, card], "cores": 16, "driver": None}) == (
        "2 × NVIDIA H200 (139.7 GiB)",
        "16 CPU cores",
    )


def test_fields_that_are_missing_or_of_another_type_are_not_available(tmp_path: Path) -> None:
    """Each value of each file in turn is gone or nonsense: there is always a report."""
    folder = speedrun(tmp_path)
    for path in folder.rglob("*.jsonl"):
        path.write_text(
            path.read_text()[:-7] + '\n[1]\n{"step": "x"}\n{"step": 3, "loss": "nan", "reward": null}\n{"cut'
        )
    whole = {path: json.loads(path.read_text()) for path in sorted(folder.rglob("*.json"))}
    for seed in range(20 if EVERYTHING else 8):
        draw = random.Random(seed)
        for path, data in whole.items():
            put(
                path,
                mangled(data, draw)
                if path.name != "chain.json"
                else {
                    **data,
                    "hardware": "a laptop",
                    "seed": None,
                    "stages": [mangled(row, draw) for row in data["stages"]] + [3, None],
                },
            )
        text = report.markdown(report.TITLE, tuple(report.contents(gather.gather(str(folder)))), {})
        assert "n/a" in text
    report.write(str(folder))


def mangled(data: Any, draw: random.Random) -> Any:
    if draw.random() < 0.15:
        return draw.choice([None, "?", -1, [], {}, True, "nan"])
    if isinstance(data, dict):
        return {key: value if key in ("name", "run", "stage") else mangled(value, draw) for key, value in data.items()}
    return [mangled(value, draw) for value in data] if isinstance(data, list) else data


def test_completions_stand_in_for_samples(tmp_path: Path) -> None:
    folder = speedrun(tmp_path)
    run = folder / "stages" / "eval-sft-1a2b3c4d"
    told = json.loads((run / "result.json").read_text())
    put_lines(run / "completions.jsonl", [{**told["samples"][0], "completion": f"draw {n}"} for n in range(5)])
    put(run / "result.json", {**told, "samples": []})
    found = gather.gather(str(folder)).evaluation("sft")
    assert found is not None and [one.completion for one in found.samples] == ["draw 0", "draw 1"]


def test_a_folder_that_is_no_speedrun_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match=r"chain\.json"):
        report.write(str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-m", "stoker.speedrun.report", str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 66 and done.stderr.count("\n") == 1 and not (tmp_path / "report.md").exists()


def test_without_matplotlib_the_report_is_made_and_says_what_to_install(tmp_path: Path) -> None:
    folder = speedrun(tmp_path)
    code = f"import sys; sys.modules['matplotlib'] = None\nfrom stoker.speedrun import report\nreport.write({str(folder)!r})\nassert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (
        "pip install matplotlib" in (folder / "report.html").read_text()
        and "plots/" not in (folder / "report.md").read_text()
    )


@pytest.mark.parametrize(
    "right, total, low, high",
    [
        (0, 10, 0.0, 0.2775),
        (10, 10, 0.7225, 1.0),
        (50, 100, 0.4038, 0.5962),
        (81, 263, 0.2553, 0.3662),
    ],  # the last: Newcombe 1998, table I
)
def test_wilsons_interval(right: int, total: int, low: float, high: float) -> None:
    assert wilson(right, total) == pytest.approx((low, high), abs=1e-4)


@pytest.mark.parametrize(
    "before, after, low, high, verdict",
    [
        ((48, 80), (56, 70), 0.0524, 0.3339, "better (significant)"),  # Newcombe 1998, method 10: 56/70 - 48/80
        ((56, 70), (48, 80), -0.3339, -0.0524, "worse (significant)"),
        ((7, 34), (9, 10), 0.3, 1.0, "better (significant)"),
        ((50, 100), (55, 100), -0.09, 0.19, "no significant difference"),
        ((0, 20), (0, 20), -0.17, 0.17, "no significant difference"),
    ],
)  # fmt: skip
def test_two_proportions(
    before: tuple[int, int], after: tuple[int, int], low: float, high: float, verdict: str
) -> None:
    found = change(share(*before), share(*after))
    assert found.low is not None and found.high is not None and judged(found) == verdict
    if verdict.startswith(("better", "worse")) and before[1] >= 70:
        assert (found.low, found.high) == pytest.approx((low, high), abs=1e-4)
    else:
        assert low - 0.02 <= found.low <= found.high <= high + 0.02


def test_false_alarms_are_as_rare_as_promised() -> None:
    draw = random.Random(1)
    alarms = sum(
        change(
            share(sum(draw.random() < 0.6 for _ in range(80)), 80),
            share(sum(draw.random() < 0.6 for _ in range(80)), 80),
        ).beyond_noise
        for _ in range(1000)
    )
    assert 20 <= alarms <= 75


def test_lower_is_better_where_it_is_and_no_interval_means_no_test() -> None:
    assert judged(change(Measured(2.5), Measured(0.9)), higher_is_better=False) == "down, as hoped (not tested)"
    assert (
        judged(change(Measured(), Measured(0.9))) == "n/a"
        and judged(change(Measured(1.0), Measured(1.0))) == "no difference"
    )
    assert judged(change(Measured(0.5, 0.5, 0.5), share(94, 100))) == "better (significant)"


def test_numbers_are_written_for_people() -> None:
    assert [number(value) for value in (None, 0, 3, 0.0012345, 3.4, 312.4, 1234567.8, float("nan"))] == [
        "n/a",
        "0",
        "3",
        "0.00123",
        "3.40",
        "312",
        "1,234,568",
        "n/a",
    ]
    assert number_and_interval(Measured(0.02, 0.008, 0.032)) == ("0.0200", "0.0080 to 0.0320") and number_and_interval(
        Measured(312.0)
    ) == ("312", "")
    assert share_with_interval(share(50, 100)) == "50.0 % (40.4–59.6)" and share_with_interval(Measured()) == "n/a"
    assert (
        points(change(share(48, 80), share(56, 70))) == "+20.0 points (+5.2 to +33.4)"
        and points(change(Measured(0.5), Measured(0.25))) == "-25.0 points"
    )
