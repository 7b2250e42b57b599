"""A plan for people: a line per term and GPU, in 80 columns; the settings as a command line. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Any

from stoker.contract.frozen import as_json, frozen
from stoker.contract.units import format_bytes, format_duration, plural
from stoker.training.fit.cards import NCCL, Card
from stoker.training.fit.memory import COMMUNICATION, CONTEXT, MARGIN, TERMS
from stoker.training.fit.pace import Pace
from stoker.training.fit.plan import FSDP, FULL, OFFLOADED_WORDS, Plan, Share, again_words, sharing
from stoker.training.fit.strategy import Decision
from stoker.training.fit.terms import DPO, GRPO, REWARD, StageNeeds
from stoker.training.model.config import LORA, QLORA, AdapterConfig
from stoker.training.parallel.config import NOTHING, OVER_ALL, recompute_word

SCHEMA = 1
BAR = 42
_ABOUT = {
    "work": "one block's working memory",
    "activations": "kept for the backward pass",
    "loss": "a chunk of logits",
    "buffers": "one dequantized matrix, cuBLAS",
    "gathered": "blocks that other ranks hold parts of",
    "reference": "the model as the run begins",
    "reward model": "in fp32",
    "answering copy": "16 bits, adapters merged",
    "cache": "keys and values of answers",
    "graphs": "a decoding step's, about",
    "context": "CUDA and its kernels",
    "communication": "NCCL",
    "margin": "pages and gaps of the allocator",
}


def tokens_a_step(plan: Plan) -> int:
    """Return the tokens of an optimizer step, all GPUs together; 0 for GRPO, whose steps are counted in completions."""
    return 0 if plan.wish.needs.stage == GRPO else plan.wish.samples * plan.wish.context


def tightest(plan: Plan) -> Share:
    """Return the share of the GPU with the least memory left."""
    return max(plan.shares, key=lambda share: share.needs - share.card.free)


def summary(plan: Plan) -> str:
    """Return the line that `stoker train` and `stoker fit` both print: memory, micro-batch and size of a step."""
    share = tightest(plan)
    card = f"{share.card.host}'s {share.card.label}" if share.card.host else share.card.label
    size = tokens_a_step(plan)
    step = f"{size:,} tokens a step" if size else f"{plan.wish.samples:,} completions a step"
    about = f" ({plan.about})" if plan.about else ""
    return (
        f"memory plan: {format_bytes(share.planned.total)} of tensors, {format_bytes(share.needs)} with the CUDA context and a margin,"
        f" of {format_bytes(share.card.free)} free on {card}, micro-batch {plan.settings.micro}, {step}{about}"
    )


def terms_of(share: Share, ranks: int) -> dict[str, int]:
    """With what is not torch's: the context, communication, and a margin for the allocator."""
    found = {**share.planned.terms, CONTEXT: share.card.takes, MARGIN: share.needs - share.planned.total}
    if ranks > 1:
        found[COMMUNICATION] = NCCL
    found[MARGIN] -= found[CONTEXT] + found.get(COMMUNICATION, 0)
    return {term: found[term] for term in TERMS if found.get(term)}


def lines(plan: Plan, given: Command) -> Iterator[str]:
    wish, s = plan.wish, plan.settings
    if plan.about:
        yield f"note: {plan.about}"
    shown: list[tuple[Any, ...]] = []
    for share in plan.shares:
        card = share.card
        about = (card.name, card.total, card.free, card.held, share.largest)
        if about in shown:  # four alike are shown once
            continue
        shown.append(about)
        alike = [other.card for other in plan.shares if _like(other, share)]
        yield from _card_lines(share, alike, len(plan.shares))
    if not plan.fits:
        yield ""
        yield f"does not fit: {_settings_words(plan)}"
        change = plan.change
        if change is not None:
            yield f"smallest change: {change.flags(train=False) or change.words}"
        return
    yield ""
    yield f"fits: {_settings_words(plan)}"
    for reason in plan.reasons:
        yield f"  {reason}"
    largest = [share.largest for share in plan.shares]
    each = f" ({', '.join(f'{share.card.label}: {share.largest}' for share in plan.shares)})" if _unlike(plan) else ""
    yield f"  largest micro-batch with these settings: {min(largest)}{each}"
    yield ""
    yield command(plan, given)
    if s.micro * wish.context < 256:
        yield "note: so few tokens at once leave a GPU idle most of the time"


def _like(one: Share, other: Share) -> bool:
    a, b = one.card, other.card
    return (a.name, a.total, a.free, a.held) == (b.name, b.total, b.free, b.held) and one.largest == other.largest


def _unlike(plan: Plan) -> bool:
    return len({share.largest for share in plan.shares}) > 1


def _card_lines(share: Share, cards: list[Card], ranks: int) -> Iterator[str]:
    card = share.card
    labels = cards[0].label if len(cards) == 1 else f"{cards[0].label} and {len(cards) - 1} like it"
    where = f"{card.host}: " if card.host else ""
    yield f"{where}{labels}: {card.name}, {format_bytes(card.total)}, {format_bytes(card.free)} free now"
    for holder in card.held:
        yield f"  held: {holder}"
    terms = terms_of(share, ranks)
    scale = max(card.total, sum(terms.values()))
    for term, size in terms.items():
        bar = "█" * round(BAR * size / scale) or "▏"
        about = f"  {_ABOUT[term]}" if term in _ABOUT and len(bar) < 14 else ""
        yield f"  {term:<14}{size / 2**30:8.2f} GiB  {bar}{about}"[:80]
    needs = share.needs
    free = card.free - needs
    left = f"{format_bytes(free)} left" if free >= 0 else f"{format_bytes(-free)} too much"
    yield f"  {'needed':<14}{needs / 2**30:8.2f} GiB, in {share.planned.phase}; {left}"
    if share.host_bytes:
        yield f"  {'host memory':<14}{share.host_bytes / 2**30:8.2f} GiB"


def _settings_words(plan: Plan) -> str:
    wish, s = plan.wish, plan.settings
    parts = [s.method, f"micro-batch {s.micro}", f"context {wish.context:,}", plan.dtype]
    if s.rows:
        parts.insert(2, f"{s.rows} answers at once" + (" by 4-bit weights" if s.bits == 4 else ""))
    parts.append(f"{again_words(s, wish.layers)} recomputed" if s.saves else "nothing recomputed")
    parts.append(s.optimizer)
    if s.on_host:
        parts.append("embedding in host memory")
    if s.inputs_on_host:
        parts.append("activations in host memory")
    if s.strategy == FSDP:
        among = len(sharing(s, [share.card for share in plan.shares]))
        parts.append(f"in {among} shards{' on each host' if among < len(plan.shares) else ''}")
    if s.offload != NOTHING:
        parts.append(f"{OFFLOADED_WORDS[s.offload]} in host memory")
    return ", ".join(parts)


DATA_FLAGS = {REWARD: "--reward.pairs", DPO: "--dpo.pairs", GRPO: "--grpo.prompts"}  # other stages: --data
PLACEHOLDER = "YOUR_DATA"
GROUP = 8  # completions of a prompt by default (rl/config.py)


@frozen
class Command:
    """What the command line of `stoker train` takes from that of `stoker fit`, besides the plan."""

    model: str
    data: tuple[str, ...] = ()
    sets_samples: bool = False  # --samples was given
    gpu: str = ""  # the one that was chosen of several


def command(plan: Plan, given: Command) -> str:
    wish, s = plan.wish, plan.settings
    stage = wish.needs.stage
    data = given.data or (PLACEHOLDER,)
    words = ["stoker", "train", stage, "--model.load", given.model, DATA_FLAGS.get(stage, "--data"), *data]
    words += _stage_words(plan)
    if given.sets_samples and stage != GRPO:
        words += ["--batch.tokens", str(tokens_a_step(plan))]
    if given.gpu:
        words += ["--gpus", given.gpu]
    words += {FULL: [], LORA: ["--lora"], QLORA: ["--qlora"]}[s.method]
    default = AdapterConfig()
    if s.method != FULL and wish.adapter.lora_rank != default.lora_rank:
        words += ["--lora-rank", str(wish.adapter.lora_rank)]
    if s.method != FULL and wish.adapter.lora_targets != default.lora_targets:
        words += ["--lora-targets", wish.adapter.lora_targets]
    own = _unlike(plan) and s.strategy != FSDP  # each card as much as it can take
    micro = "auto" if own else str(s.micro)
    words += ["--context-length", str(wish.context), "--micro", micro]
    words += ["--recompute", recompute_word(s.recompute, s.mlp, wish.layers)]
    if s.optimizer != "adamw":
        words += ["--optimizer", s.optimizer]
    if s.on_host:
        words += ["--compute.embedding", "host"]
    if s.inputs_on_host:
        words += ["--compute.activations", "host"]
    if s.strategy == FSDP:
        words += ["--parallel", FSDP]
    if s.sharding != OVER_ALL:
        words += ["--sharding", s.sharding]
    if s.offload != NOTHING:
        words += ["--offload", s.offload]
    if own:
        words += ["--balance", "auto"]
    return shlex.join(words)


def _stage_words(plan: Plan) -> list[str]:
    needs, default = plan.wish.needs, StageNeeds()
    words: list[str] = []
    if needs.stage == REWARD and not needs.likelihood:
        words += ["--reward.likelihood", "false"]
    if needs.stage != GRPO:
        return words
    if plan.wish.samples != default.answers:
        words += ["--grpo.prompts_per_step", str(-(-plan.wish.samples // GROUP))]
    if not needs.reference:
        words += ["--grpo.kl", "0"]
    if needs.reward_model:
        words += ["--grpo.reward_model", needs.reward_model]
    if needs.new_tokens != default.new_tokens:
        words += ["--new-tokens", str(needs.new_tokens)]
    if needs.rows != default.rows:
        words += ["--rows", str(needs.rows)]
    if plan.settings.bits == 4:
        words += ["--generate.bits", "4"]
    return words


def pace_lines(
    pace: Pace | None, tokens: int, exact: bool, price: float, gpus: int, *, data: bool = True
) -> Iterator[str]:
    """`data`: --data was given."""
    if pace is None:
        yield "speed: unknown (no run of this model was measured, and no table has this card or stage)"
        unknown = [what for what, given in (("time", data), ("cost", price)) if given]
        if unknown:
            yield f"without a speed the {' and '.join(unknown)} of an epoch {'is' if len(unknown) == 1 else 'are'} unknown"
        return
    yield f"speed: {pace.tokens_per_s:,.0f} tokens/s ({pace.source})"
    if not tokens:
        if price:
            why = "how long answers get is not known" if data else "the cost of an epoch needs --data"
            yield f"no cost of an epoch (--price): {why}"
        return
    seconds = tokens / pace.tokens_per_s
    cost = f", {gpus * seconds / 3600 * price:,.2f} at {price:g} per GPU hour" if price else ""
    about = "" if exact else "about "
    yield f"one epoch: {about}{plural(tokens, 'token')}, {format_duration(seconds)}{cost}"


def as_dict(decision: Decision, given: Command, pace: Pace | None, tokens: int, price: float) -> dict[str, Any]:
    plan = decision.plan
    ranks = len(plan.shares)
    gpus = [
        {
            "gpu": share.card.label, "host": share.card.host, "name": share.card.name, "total": share.card.total,
            "free": share.card.free, "held": list(share.card.held), "terms": terms_of(share, ranks),
            "planned_bytes": share.planned.total, "needs_bytes": share.needs, "phase": share.planned.phase,
            "phases": share.planned.phases, "largest_micro": share.largest, "host_bytes": share.host_bytes,
        }
        for share in plan.shares
    ]  # fmt: skip
    seconds = tokens / pace.tokens_per_s if pace and tokens else None
    return {
        "schema": SCHEMA,
        "model": given.model,
        "stage": plan.wish.needs.stage,
        "fits": plan.fits,
        "context": plan.wish.context,
        "settings": as_json(plan.settings),
        "reasons": list(plan.reasons),
        "change": None if plan.change is None else {"settings": plan.change.settings, "words": plan.change.words},
        "unavailable": [],  # of schema 1: levers that nothing here can pull
        "estimate": plan.about or None,
        "dtype": plan.dtype,
        "strategy": decision.way.strategy,
        "strategies": [
            {
                "strategy": way.strategy,
                "fits": way.plan.fits,
                "method": way.plan.settings.method,
                "needs_bytes": way.needs,
                "step_seconds": way.seconds,
            }
            for way in decision.ways
        ],
        "step": {"samples": plan.wish.samples, "tokens": tokens_a_step(plan) or None},
        "command": command(plan, given) if plan.fits else None,
        "gpus": gpus,
        "pace": None if pace is None else as_json(pace),
        "epoch": {"tokens": tokens or None, "seconds": seconds, "cost": _cost(seconds, price, ranks)},
    }


def _cost(seconds: float | None, price: float, gpus: int) -> float | None:
    return None if seconds is None or not price else round(gpus * seconds / 3600 * price, 4)
