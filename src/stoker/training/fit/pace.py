"""How long a step and a pass over the data take: by a run that was measured, else by the card's table. Pure, but for `measured`."""

from __future__ import annotations

from typing import Any

from stoker.contract.frozen import frozen, replace
from stoker.contract.units import finite_number
from stoker.training.fit.block import WIDE
from stoker.training.fit.cards import Card
from stoker.training.fit.cost import ASSUMED, HALF_SPEED, SHARE, exchange_seconds, flops_per_token, host_seconds
from stoker.training.fit.described import Described, describe
from stoker.training.fit.plan import FSDP, FULL, PASSES, Plan, sharing
from stoker.training.fit.runs import recorded
from stoker.training.fit.sharded import fetched, sent, visiting
from stoker.training.fit.terms import DPO, GRPO, SFT
from stoker.training.model.config import OFF, matmul_parameters, parameters

BACKWARD_SHARE = 2 / 3  # of a micro-batch's time: what an exchange of gradients can hide behind


@frozen
class Pace:
    tokens_per_s: float
    source: str  # where it comes from, in words


def _share_of_peak(plan: Plan) -> float:
    return SHARE / (1 + HALF_SPEED / (plan.settings.micro * plan.wish.context))


def step_seconds(plan: Plan) -> float | None:
    """With what ranks exchange. None: of a stage that writes answers."""
    wish, s, world = plan.wish, plan.settings, len(plan.shares)
    if wish.needs.stage == GRPO:
        return None
    work = flops_per_token(wish.model, wish.context, PASSES[s.method], s.again(wish))
    if wish.needs.stage == DPO:  # and a forward pass of the reference
        work += 2 * matmul_parameters(wish.model)
    rates = [(share.card.peak or ASSUMED) * _share_of_peak(plan) / work for share in plan.shares]
    # In shards ranks go at the pace of the slowest; else a faster one takes more samples (parallel.balance).
    computing = wish.samples * wish.context / (world * min(rates) if s.strategy == FSDP else sum(rates))
    if world == 1:
        return computing
    cards = [share.card for share in plan.shares]
    steps = -(-wish.share(world) // s.micro)
    described = _described(plan)
    trained = parameters(wish.model) if described is None else described.trained
    if s.strategy == FSDP and described is not None:  # with each micro-batch, while it computes
        among = sharing(s, cards)
        moved = steps * host_seconds(fetched(described, len(among), s.offload), cards)
        update = 2 * host_seconds(visiting(described, s.optimizer, len(among), s.offload), cards)
        computing = max(computing, steps * exchange_seconds(sent(described), among), moved)
        heads = (
            list({card.host: card for card in cards}.values()) if len(among) < world else []
        )  # hosts that hold copies
        return computing + update + _unhidden(trained, heads, computing / steps)
    return computing + _unhidden(trained, cards, computing / steps)


def _unhidden(trained: int, cards: list[Card], micro_batch: float) -> float:
    """Of exchanging all gradients, what the last micro-batch's backward pass does not hide."""
    if len(cards) < 2:
        return 0.0
    return max(exchange_seconds(2 * WIDE * trained, cards) - BACKWARD_SHARE * micro_batch, 0.0)


def _described(plan: Plan) -> Described | None:
    wish, method = plan.wish, plan.settings.method
    if wish.model.engine == "transformers":
        return None
    return describe(wish.model, replace(wish.adapter, method=OFF if method == FULL else method))


def from_table(plan: Plan) -> Pace | None:
    """None: a card that the table does not have, or a stage that writes answers."""
    seconds = step_seconds(plan)
    if seconds is None or any(share.card.peak is None for share in plan.shares):
        return None
    rate = plan.wish.samples * plan.wish.context / seconds
    full = _share_of_peak(plan)
    exchanged = ", less what ranks exchange" if len(plan.shares) > 1 else ""
    return Pace(rate, f"estimated from the card's table, {full:.0%} of its {plan.dtype} peak assumed{exchanged}")


def measured(runs: str, plan: Plan, model: tuple[str, ...]) -> Pace | None:
    """Of the newest run with this model, method, cards and context. `model`: its names, folder or hub id."""
    for name, told in recorded(runs):
        rate = finite_number(told, "tokens_per_s")
        if rate and rate > 0 and _same(told, plan, model):
            return Pace(rate, f"measured by run {name}")
    return None


def _same(told: dict[str, Any], plan: Plan, model: tuple[str, ...]) -> bool:
    cards = [share.card.name for share in plan.shares]
    wanted = {"method": plan.settings.method, "context": plan.wish.context, "cards": cards}
    stage = "stage" in told or plan.wish.needs.stage != SFT
    wanted |= {"stage": plan.wish.needs.stage} if stage else {}
    if "strategy" in told or plan.settings.strategy == FSDP:
        wanted["strategy"] = plan.settings.strategy
    return told.get("model") in model and all(told.get(key) == value for key, value in wanted.items())
