"""Direct Preference Optimisation: learning from pairs of answers, without a reward model."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from stoker.contract.quantities import number_at
from stoker.contract.shape import replace
from stoker.training.config.derived import Learning
from stoker.training.stages import estimate
from stoker.training.stages.blocks import Block, Cell, Heading, Table, Text
from stoker.training.stages.estimate import Estimate, Job
from stoker.training.stages.reward import by_kind, check, lengths
from stoker.training.stages.significance import marks, number, share_with_interval
from stoker.training.stages.stage import Metrics, Stage, joined, keys_of


def cost(job: Job) -> Estimate:
    """Training, and the reference: a forward pass, which is a third of a step, and its weights."""
    found = estimate.training(job)
    seconds = job.pace.start + (found.seconds - job.pace.start) * 4 / 3
    return replace(found, seconds=seconds, memory=found.memory + job.pace.width * job.size)


def headline(metrics: Metrics) -> str:
    return joined(
        ("better answer preferred in {:.1%} of held-out pairs", number_at(metrics, "accuracy")),
        ("margin {:.3f}", number_at(metrics, "reward_margin")),
    )


def report(metrics: Metrics) -> Iterator[Block]:
    yield Heading("DPO")
    right = marks(metrics).greedy
    of = f" of {right.total:,}" if right.total else ""
    yield Text(
        f"Training raised the better answer more than the worse one in {share_with_interval(right)}{of} held-out pairs;"
        " without training it would in 50 %."
    )
    rows = [
        (Cell(name), Cell(number(number_at(metrics, key))))
        for name, key in (
            ("Margin of the implicit reward", "reward_margin"),
            ("Log-probability of the better answer", "logp_chosen"),
            ("Log-probability of the worse answer", "logp_rejected"),
        )
    ]
    yield Table(("Mean over held-out pairs", "Value"), tuple(rows))
    yield from by_kind(metrics, "Better answer preferred", least=2)


STAGE = Stage(
    name="dpo",
    about="learning from preference pairs, without a reward model",
    sections=frozenset(("dpo",)),
    inputs=("model.load", "dpo.pairs"),
    outputs=("hf",),
    common=keys_of("dpo", "held_out beta loss length_normalised"),
    # 1e-6 for a billion parameters. Zephyr's 5e-7 at 7 billion is this rate and the fourth root of the size
    learning=Learning(rate=0.05, passes=1, samples=32, steps_a_pass=32),
    check=check,
    estimate=cost,
    headline=headline,
    report=report,
    lengths=partial(lengths, "dpo"),
)
