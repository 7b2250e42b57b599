"""Two models' answers compared: is one more varied than the other?"""

from __future__ import annotations

from collections.abc import Iterator

from stoker.contract.errors import EX_CONFIG, Refusal
from stoker.training.config.schema import Config
from stoker.training.stages import estimate
from stoker.training.stages.blocks import Block, Cell, Figure, Heading, Table, Text
from stoker.training.stages.evaluate import lengths_of_prompts
from stoker.training.stages.significance import ABSENT, measured, number_and_interval
from stoker.training.stages.stage import From, Link, Metrics, Rows, Stage, Words, keys_of

LEAST_ROUNDS = 50  # a standard error from fewer is off by more than a tenth


def check(c: Config) -> None:
    if not c.generate.temperature:
        raise Refusal(
            "generate.temperature 0 writes the same answer every time: there is no variety to measure; give 1.0",
            EX_CONFIG,
        )
    if c.diversity.rounds < LEAST_ROUNDS:
        raise Refusal(
            f"diversity.rounds {c.diversity.rounds} are too few to tell a difference from chance: at least"
            f" {LEAST_ROUNDS}",
            EX_CONFIG,
        )


def lengths(c: Config, words: Words) -> list[tuple[str, list[int]]]:
    return lengths_of_prompts(c, words, c.diversity.prompts, "diversity.prompts", chat=c.evaluate.chat)


def headline(metrics: Metrics) -> str:
    return str(metrics.get("verdict") or "")


def report(metrics: Metrics) -> Iterator[Block]:
    yield Heading("Diversity: does density sampling make answers more varied?")
    verdict = metrics.get("verdict")
    text = _by_name(verdict)
    sentence = f"{text[:1].upper()}{text[1:]}" + ("" if text.endswith(".") else ".")
    yield Text(sentence if verdict else f"Verdict: {ABSENT}", lead=True)
    differences = metrics.get("difference")
    names = list(differences) if isinstance(differences, dict) else []
    varied = [name for name in names if measures_variety(name)]
    head = ("Measure, verdict", "Uniform", "Density", "Difference")
    if varied:
        yield Text(f"{len(varied)} measures of variety, each with its 95 % interval:")
        yield Table(head, tuple(_row(metrics, name) for name in varied))
    others = [name for name in names if name not in varied]
    if others:
        yield Text("Not a measure of variety, for comparison:")
        yield Table(head, tuple(_row(metrics, name) for name in others))
    yield Figure(
        "diversity",
        "Density compared with uniform, in percent of uniform's value, with 95 % intervals. Diamond: the interval does"
        " not contain 0. Tables and figure judge each measure by itself; the verdict on top corrects for the number of"
        " measures of variety (Holm)",
    )


def _row(metrics: Metrics, name: str) -> tuple[Cell, ...]:
    value = metrics["difference"][name]
    judgement = value.get("verdict") if isinstance(value, dict) else None
    sides = (measured(metrics.get(side), name) for side in ("baseline", "compared", "difference"))
    return (
        Cell(name.replace("_", " "), _by_name(judgement or ABSENT)),
        *(Cell(*number_and_interval(side)) for side in sides),
    )


def measures_variety(name: str) -> bool:
    """The verdict counts these and no others."""
    from stoker.training.diversity.metrics import METRICS

    return name not in METRICS or METRICS[name].varied != 0


def _by_name(verdict: object) -> str:
    """The stage compares any two models; in the chain it is known which."""
    return str(verdict).replace("baseline", "uniform").replace("compared", "density")


STAGE = Stage(
    name="diversity",
    about="two models' answers compared",
    sections=frozenset(("generate", "diversity")),
    inputs=("model.load", "diversity.prompts", "diversity.baseline", "diversity.compared"),
    outputs=("diversity_report.md",),
    common=(
        *keys_of("diversity", "most answers clusters rounds"),
        *keys_of("generate", "new_tokens temperature rows"),
        "evaluate.chat",
    ),
    links=(
        Link(
            "diversity",
            {
                "model.load": From("sft", "hf"),
                "diversity.prompts": Rows("prompts"),
                "diversity.baseline": From("grpo-uniform", "hf"),
                "diversity.compared": From("grpo-density", "hf"),
            },
            "grpo-density",
        ),
    ),
    check=check,
    estimate=estimate.diversity,
    headline=headline,
    report=report,
    lengths=lengths,
)
