"""How long a pass over the data takes: by a run that was measured, else by the card's table. Pure, but for `measured`."""

from __future__ import annotations

from typing import Any

from stoker.contract.quantities import number_at
from stoker.contract.shape import shape
from stoker.training.fit.cost import HALF_SPEED, flops_per_token
from stoker.training.fit.plan import PASSES, Plan
from stoker.training.fit.runs import recorded
from stoker.training.fit.terms import DPO, GRPO, SFT
from stoker.training.model.config import matmul_parameters

SLOWEST, FASTEST = 1e-3, 1e12  # tokens per second that are believed
SHARE = 0.4  # of a card's peak that training reaches, where nothing was measured


@shape
class Pace:
    tokens_per_s: float
    source: str  # where it comes from, in words


def from_table(plan: Plan) -> Pace | None:
    """None: a card that the table does not have, or a stage that writes answers."""
    wish, s = plan.wish, plan.settings
    if wish.needs.stage == GRPO:
        return None
    peaks = [share.card.peak for share in plan.shares]
    known = [peak for peak in peaks if peak]
    if len(known) < len(peaks):
        return None
    tokens = s.micro * wish.context
    full = SHARE / (1 + HALF_SPEED / tokens)
    work = flops_per_token(wish.model, wish.context, PASSES[s.method], s.recompute / wish.layers)
    if wish.needs.stage == DPO:  # and a forward pass of the reference
        work += 2 * matmul_parameters(wish.model)
    rate = sum(known) * full / work
    return Pace(rate, f"estimated from the card's table, {full:.0%} of its {plan.dtype} peak assumed")


def measured(runs: str, plan: Plan, model: tuple[str, ...]) -> Pace | None:
    """Of the newest run with this model, method, cards and context. `model`: its names, folder or hub id."""
    for name, told in recorded(runs):
        rate = number_at(told, "tokens_per_s")
        if rate and SLOWEST <= rate <= FASTEST and _same(told, plan, model):
            return Pace(rate, f"measured by run {name}")
    return None


def _same(told: dict[str, Any], plan: Plan, model: tuple[str, ...]) -> bool:
    cards = [share.card.name for share in plan.shares]
    wanted = {"method": plan.settings.method, "context": plan.wish.context, "cards": cards}
    stage = "stage" in told or plan.wish.needs.stage != SFT
    wanted |= {"stage": plan.wish.needs.stage} if stage else {}
    return told.get("model") in model and all(told.get(key) == value for key, value in wanted.items())
