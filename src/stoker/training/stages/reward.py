"""Learning from pairs of answers: a model that scores them, and Direct Preference Optimisation without one."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from stoker.contract.errors import EX_CONFIG, Refusal
from stoker.contract.frozen import replace
from stoker.contract.units import finite_number
from stoker.training.config.derived import Learning
from stoker.training.config.schema import Config
from stoker.training.data.formats.table import AUTO
from stoker.training.model.config import OFF
from stoker.training.stages import estimate
from stoker.training.stages.blocks import Block, Cell, Figure, Heading, Table, Text
from stoker.training.stages.estimate import Estimate, Job
from stoker.training.stages.significance import (
    Measured,
    Row,
    between,
    marks,
    number,
    percent,
    share_with_interval,
    shares_row,
)
from stoker.training.stages.stage import From, Link, Metrics, Reported, Rows, Stage, Words, joined, keys_of


def check(c: Config) -> None:
    if c.compute.attention in ("flash", "cudnn"):
        raise Refusal(f"compute.attention {c.compute.attention} does not take packed pairs: use auto", EX_CONFIG)
    if c.data.format not in (AUTO, "preference"):
        raise Refusal(
            f"data.format {c.data.format} has no pairs of answers: leave it out, or use preference", EX_CONFIG
        )


def lengths(section: str, c: Config, words: Words) -> list[tuple[str, list[int]]]:
    """Both answers of a pair lie in one row."""
    from stoker.training.reward.pairs import lengths_of

    given = getattr(c, section)
    files = [path for path in (given.pairs, given.held_out) if path]
    return [(f"pairs of {path} with both answers", lengths_of(path, words)) for path in files]


def by_kind(metrics: Metrics, right: str, least: int = 1) -> Iterator[Table]:
    """Where pairs of so many kinds were told apart."""
    kinds = metrics.get("by_kind")
    if isinstance(kinds, dict) and len(kinds) >= least:
        shares = [(kind, marks(value).greedy, finite_number(value, "total")) for kind, value in kinds.items()]
        cells = [
            (Cell(str(kind)), Cell(percent(share.value), between(share)), Cell(number(total)))
            for kind, share, total in shares
        ]
        yield Table(("Pairs", right, "Count"), tuple(cells))


def effects(link: Reported) -> Iterator[Row]:
    if link.metrics is not None:
        measure = "held-out pairs in the right order; before: a coin toss"
        yield shares_row("Reward model", measure, Measured(0.5, 0.5, 0.5), marks(link.metrics).greedy)


def worth_knowing(metrics: Metrics) -> Iterator[str]:
    right = marks(metrics).greedy.value
    if right is not None:
        yield f"Reward model: {percent(right)} of held-out pairs in the right order."


def report(metrics: Metrics) -> Iterator[Block]:
    yield Heading("Reward model")
    right = marks(metrics).greedy
    of = f" of {right.total:,}" if right.total else ""
    yield Text(
        f"It ranks the better answer first in {share_with_interval(right)}{of} held-out pairs; a coin toss would in"
        " 50 %."
    )
    for table in by_kind(metrics, "Right order"):
        yield table
        if set(metrics["by_kind"]) <= {"form", "right"}:
            yield Text(
                "right: a right answer against a wrong one in the same form. form: good form against poor form of the"
                " same answer."
            )
    yield Figure(
        "calibration",
        "How confident the reward model is of a pair, and how often it is right. On the dashed line both agree."
        " Numbers: pairs",
    )


REWARD = Stage(
    name="reward",
    about="a model that scores answers, from pairs",
    sections=frozenset(("reward", "adapter")),
    inputs=("model.load", "reward.pairs"),
    outputs=("hf",),
    common=("reward.held_out", "reward.likelihood", "adapter.method"),
    learning=Learning(rate=0.5, passes=1, samples=32, steps_a_pass=32),
    links=(
        Link(
            "reward",
            {
                "model.load": From("sft", "hf"),
                "reward.pairs": Rows("pairs"),
                "reward.held_out": Rows("pairs-held-out"),
            },
            "sft",
        ),
    ),
    check=check,
    estimate=estimate.training,
    headline=lambda metrics: joined(("{:.1%} of held-out pairs right", finite_number(metrics, "accuracy"))),
    report=report,
    effects=effects,
    worth_knowing=worth_knowing,
    lengths=partial(lengths, "reward"),
)


def _dpo_cost(job: Job) -> Estimate:
    """Training, and the reference: a forward pass, which is a third of a step, and its weights. Beside adapters it has none."""
    found = estimate.training(job)
    seconds = job.pace.start + (found.seconds - job.pace.start) * 4 / 3
    copy = job.pace.width * job.size if job.values["adapter.method"] == OFF else 0
    return replace(found, seconds=seconds, memory=found.memory + copy)


def _dpo_headline(metrics: Metrics) -> str:
    return joined(
        ("better answer preferred in {:.1%} of held-out pairs", finite_number(metrics, "accuracy")),
        ("margin {:.3f}", finite_number(metrics, "reward_margin")),
    )


def _dpo_report(metrics: Metrics) -> Iterator[Block]:
    yield Heading("DPO")
    right = marks(metrics).greedy
    of = f" of {right.total:,}" if right.total else ""
    yield Text(
        f"Training raised the better answer more than the worse one in {share_with_interval(right)}{of} held-out pairs;"
        " without training it would in 50 %."
    )
    rows = [
        (Cell(name), Cell(number(finite_number(metrics, key))))
        for name, key in (
            ("Margin of the implicit reward", "reward_margin"),
            ("Log-probability of the better answer", "logp_chosen"),
            ("Log-probability of the worse answer", "logp_rejected"),
        )
    ]
    yield Table(("Mean over held-out pairs", "Value"), tuple(rows))
    yield from by_kind(metrics, "Better answer preferred", least=2)


DPO = Stage(
    name="dpo",
    about="learning from preference pairs, without a reward model",
    sections=frozenset(("dpo", "adapter")),
    inputs=("model.load", "dpo.pairs"),
    outputs=("hf",),
    common=(*keys_of("dpo", "held_out beta loss length_normalised"), "adapter.method"),
    # 1e-6 for a billion parameters. Zephyr's 5e-7 at 7 billion is this rate and the fourth root of the size
    learning=Learning(rate=0.05, passes=1, samples=32, steps_a_pass=32),
    check=check,
    estimate=_dpo_cost,
    headline=_dpo_headline,
    report=_dpo_report,
    lengths=partial(lengths, "dpo"),
)
STAGES = (REWARD, DPO)
