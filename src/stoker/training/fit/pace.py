"""How long a pass over the data takes: by a run that was measured, else by the card's table. Pure, but for `measured`."""

from __future__ import annotations

from typing import Any

from stoker.contract.quantities import number_at
from stoker.contract.shape import shape
from stoker.training.fit.plan import AGAIN, FULL, HALF_SPEED, Plan
from stoker.training.fit.runs import recorded
from stoker.training.model.config import ModelConfig, matmul_parameters

SLOWEST, FASTEST = 1e-3, 1e12  # tokens per second that are believed
SHARE = 0.4  # of a card's peak that training reaches, where nothing was measured


@shape
class Pace:
    tokens_per_s: float
    source: str  # where it comes from, in words


def flops_per_token(c: ModelConfig, context: int, method: str, recompute: int) -> float:
    """Frozen weights have no gradient of their own: two products of three."""
    products = 2 * matmul_parameters(c)
    attention = 4 * c.layers * c.heads * c.head_dim * context / 2  # causal: half of all pairs
    passes = 3 if method == FULL else 2
    again = AGAIN[method] * passes * recompute / c.layers
    return (passes + again) * products + (3 + recompute / c.layers) * attention


def from_table(plan: Plan) -> Pace | None:
    """None: a card that the table does not have."""
    wish, s = plan.wish, plan.settings
    peaks = [share.card.peak for share in plan.shares]
    known = [peak for peak in peaks if peak]
    if len(known) < len(peaks):
        return None
    tokens = s.micro * wish.context
    full = SHARE / (1 + HALF_SPEED / tokens)
    rate = sum(known) * full / flops_per_token(wish.model, wish.context, s.method, s.recompute)
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
    return told.get("model") in model and all(told.get(key) == value for key, value in wanted.items())
