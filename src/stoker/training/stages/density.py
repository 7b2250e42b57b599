"""Weights of prompts by how crowded their neighbourhood is."""

from __future__ import annotations

from stoker.contract.units import finite_number
from stoker.training.stages import estimate
from stoker.training.stages.stage import From, Link, Metrics, Rows, Stage, joined, keys_of


def headline(metrics: Metrics) -> str:
    least, most = (finite_number(metrics, f"weight_{which}") for which in ("min", "max"))
    spread = (
        "" if least is None or most is None else f"weights from {least:.2f} to {most:.2f} (rare prompts count more)"
    )
    return ", ".join(part for part in (joined(("{:.0f} prompts", finite_number(metrics, "prompts"))), spread) if part)


STAGE = Stage(
    name="density",
    about="weights of prompts by how crowded their neighbourhood is",
    sections=frozenset(("density",)),
    inputs=("model.load", "density.prompts"),
    outputs=("weights.jsonl",),
    common=(*keys_of("density", "neighbours power most clusters"), "evaluate.chat", "generate.system"),
    links=(Link("density", {"model.load": From("sft", "hf"), "density.prompts": Rows("prompts")}, "reward"),),
    estimate=estimate.asking,
    headline=headline,
)
