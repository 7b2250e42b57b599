"""Settings that fit the cards: the fewest blocks that are computed again, the micro-batch, the method. Pure.

Levers, in this order: the loss in chunks (always), micro-batch and recomputed blocks together, 8-bit moments, the embedding
in host memory, what blocks keep there, too, GRPO's answers by 4-bit weights, the method (auto: full, else lora, else qlora).
What is left is named, not done: fewer answers at once, a shorter context, another card. What blocks keep also goes to host
memory where that is faster than computing them again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from stoker.contract.errors import parsing
from stoker.contract.frozen import frozen, replace
from stoker.contract.units import format_bytes
from stoker.training.fit.block import HALF
from stoker.training.fit.cards import LINK_ELSE, Card
from stoker.training.fit.cost import (
    ASSUMED,
    HALF_SPEED,
    HOST_LINKS,
    SHARE,
    Copies,
    exchange_seconds,
    flops_per_token,
    host_seconds,
    mlp_share,
)
from stoker.training.fit.footprint import Footprint
from stoker.training.fit.sharded import fetched, sent
from stoker.training.fit.terms import GRPO, Job, Planned, StageNeeds, reserved
from stoker.training.model.config import LORA, OFF, QLORA, AdapterConfig, ModelConfig
from stoker.training.parallel.config import EVERYTHING, MOMENTS, NOTHING, OVER_ALL

AUTO, FULL = "auto", "full"
METHODS = (FULL, LORA, QLORA)
DDP, FSDP = "ddp", "fsdp"  # parallel.strategy
OFFLOADED_WORDS = {MOMENTS: "moments", EVERYTHING: "weights, gradients and moments"}
SHARDS_ABOUT = "this plan for several GPUs is an estimate: FSDP was not measured on them"
DOCUMENT = 512  # tokens of a text in packed rows, where nobody counted
SHORTEST = 128  # tokens of context that a plan proposes
CONTEXT_FLAG = "context-length"
HOST_SHARE = 0.75  # of the host memory that is available: processes and the page cache need some
STEP = 64  # a proposed context is a multiple of it
MOST = 1024  # samples that are looked at as one micro-batch
PASSES = {FULL: 3, LORA: 2, QLORA: 2}  # products of each weight: one of them is computed again with a block
_WIDE_IN_GAPS = 3
GAIN = 0.97  # of the time without: what copies to the host have to come to before a plan makes them for speed alone


@frozen
class Wish:
    """What is asked for. auto, 0 and None: the plan decides."""

    model: ModelConfig
    context: int
    method: str = AUTO
    adapter: AdapterConfig = AdapterConfig()
    optimizer: str = AUTO
    recompute: int | None = None
    micro: int = 0
    on_host: bool | None = None
    packed: bool = True
    documents: int = 1  # in a packed row
    samples: int = 16  # of a step, all cards together; of GRPO, answers
    inputs_on_host: bool | None = None  # what blocks keep
    needs: StageNeeds = StageNeeds()
    kept: bool = False  # the optimizer is that of a checkpoint: no other can go on with it
    strategy: str = DDP
    offload: str | None = None  # shards: what lives in host memory
    sharding: str | None = None  # shards: over which ranks; None: decide (fit/strategy.py)
    mlp: int = 0  # where `recompute` is given: blocks beside those of which the MLP's first product alone is made again

    @property
    def layers(self) -> int:
        return self.model.layers

    def share(self, world: int) -> int:
        """Samples of one card between two optimizer steps."""
        return max(-(-self.samples // (world * self.needs.updates)), 1)


@frozen
class Settings:
    method: str
    optimizer: str
    recompute: int  # blocks
    on_host: bool
    micro: int  # that every card takes
    inputs_on_host: bool = False
    rows: int = 0  # GRPO: answers that are written at once
    bits: int = 0  # GRPO: of a weight meanwhile
    strategy: str = DDP
    offload: str = NOTHING
    sharding: str = OVER_ALL
    mlp: int = 0  # blocks beside `recompute` of which the MLP's first product is made again

    def again(self, wish: Wish) -> float:
        """Share of the blocks' forward passes that is computed once more."""
        part = self.mlp * mlp_share(wish.model, wish.context) if self.mlp else 0.0
        return (self.recompute + part) / wish.layers

    @property
    def saves(self) -> bool:
        """Whether anything is computed again."""
        return bool(self.recompute or self.mlp)


@frozen
class Share:
    """One card's part."""

    card: Card
    planned: Planned
    needs: int  # bytes that have to be free, with context and communication
    largest: int  # micro-batch that fits; 0: none
    host_bytes: int = 0  # of host memory that its rank takes for what is moved there


@frozen
class Change:
    """After which it fits. Without settings only `words` say what would help."""

    settings: dict[str, str]
    words: str

    def flags(self, train: bool) -> str:
        """As `stoker fit` takes them, or `stoker train`."""
        found = []
        for name, value in self.settings.items():
            if train and name == "method":
                found.append("--adapter off" if value == FULL else f"--{value}")
            else:
                found.append(f"--{name} {value}")
        return " ".join(found)


@frozen
class Plan:
    wish: Wish
    fits: bool
    settings: Settings
    shares: tuple[Share, ...]
    reasons: tuple[str, ...]
    change: Change | None = None  # where it does not fit: the smallest one after which it does
    about: str = ""  # why the numbers are an estimate
    dtype: str = "bf16"  # of products and activations


def sharing(s: Settings, cards: Sequence[Card]) -> list[Card]:
    """The cards among which a model is cut: all, or those of one host."""
    return [card for card in cards if s.sharding == OVER_ALL or card.host == cards[0].host]


def again_words(s: Settings, layers: int) -> str:
    """What is computed again, as people say it."""
    parts = [f"{s.recompute} of {layers} blocks"] if s.recompute else []
    if s.mlp:
        where = "in all blocks" if s.mlp == layers else f"in {s.mlp} of {layers} blocks"
        where = "in the others" if s.recompute else where
        parts.append(f"the MLP's first product {where}")
    return " and ".join(parts)


class Search:
    def __init__(self, cards: list[Card], wish: Wish) -> None:
        self._cards, self._wish, self._world = cards, wish, len(cards)
        self._footprints: dict[str, Footprint] = {}
        self._tightest = min(cards, key=lambda card: card.room(self._world))

    def plan(self) -> Plan:
        """The first way that fits, with the settings that train fastest; else the most frugal one, and what to change."""
        ways = list(self._ways(self._wish))
        for settings in ways:
            if self._fits(settings, self._tightest):
                return self._made(self._faster(settings), True)
        return self._made(ways[-1], False, self._change(ways[-1]))

    def _ways(self, wish: Wish) -> Iterator[Settings]:
        """What can be had, each at its most frugal. Host memory comes last: a smaller method on the card is faster than a larger
        one that waits for copies, unless that one is asked for."""
        if wish.method != AUTO:
            yield from self._of_method(wish, wish.method, on_host=True)
            return
        for method in METHODS:
            yield from self._of_method(wish, method, on_host=False)
        yield from self._of_method(wish, METHODS[-1], on_host=True)

    def _of_method(self, wish: Wish, method: str, *, on_host: bool) -> Iterator[Settings]:
        """`on_host`: also with more in host memory than is asked for."""
        recompute, mlp = (wish.layers, 0) if wish.recompute is None else (min(wish.recompute, wish.layers), wish.mlp)
        kinds: tuple[str, ...] = ("adamw", "adamw8bit") if wish.optimizer == AUTO else (wish.optimizer,)
        if method != FULL:
            kinds = tuple(kind for kind in kinds if kind != "muon") or ("adamw",)
        moved = bool(wish.inputs_on_host)
        for bits in self._bits(method):
            mlp = mlp if self._footprint(method).can_keep_less() else 0
            s = Settings(method, kinds[-1], recompute, bool(wish.on_host), max(wish.micro, 1), moved)
            kept = (wish.offload or NOTHING) if wish.strategy == FSDP else NOTHING
            s = self._written(
                replace(s, strategy=wish.strategy, offload=kept, sharding=wish.sharding or OVER_ALL, mlp=mlp), bits
            )
            for kind in kinds:
                yield replace(s, optimizer=kind)
            if not on_host:
                continue
            for what in self._offloads(s):
                yield replace(s, offload=what)
            if wish.on_host is None and method != FULL and self._can_be_on_host(s):
                s = replace(s, on_host=True)
                yield s
            if wish.inputs_on_host is None and self._can_move_kept(s):
                yield replace(s, inputs_on_host=True)

    def _bits(self, method: str) -> tuple[int, ...]:
        """Of a weight while answers are written, what is asked for or fastest first; 0: none are."""
        needs = self._wish.needs
        if needs.stage != GRPO:
            return (0,)
        if method != QLORA:
            return (16,)
        return (needs.bits,) if needs.bits else (16, 4)

    def can_shard(self, method: str) -> bool:
        """Not what transformers computes."""
        return self._footprint(method).described is not None

    def _written(self, s: Settings, bits: int) -> Settings:
        """With so many bits of a weight while answers are written."""
        return replace(s, bits=bits, rows=self._wish.needs.rows) if bits else s

    def _offloads(self, s: Settings) -> tuple[str, ...]:
        """More that can live in host memory, least first."""
        if s.strategy != FSDP or self._wish.offload is not None or s.optimizer == "muon":
            return ()
        return (MOMENTS,) if self._wish.needs.stage == GRPO else (MOMENTS, EVERYTHING)

    def _can_be_on_host(self, s: Settings) -> bool:
        return s.strategy == DDP and self._footprint(s.method).can_be_on_host()

    def _can_move_kept(self, s: Settings) -> bool:
        """Autograd saves a block's gathered weights, too, where it is in shards: they would go to the host with the rest."""
        return s.strategy == DDP and self._footprint(s.method).can_move_kept()

    def _footprint(self, method: str) -> Footprint:
        if method not in self._footprints:
            adapter = replace(self._wish.adapter, method=OFF if method == FULL else method)
            self._footprints[method] = Footprint(self._wish.model, adapter, self._wish.needs.stage)
        return self._footprints[method]

    def _job(self, s: Settings, card: Card, context: int = 0) -> Job:
        wish = self._wish
        needs = replace(wish.needs, rows=s.rows, bits=s.bits) if s.rows else wish.needs
        # A micro-batch that is measured at the start, and a step that became a CUDA graph, add gradients to gradients.
        accumulates = needs.stage != GRPO or wish.share(self._world) > s.micro
        return Job(
            s.micro, context or wish.context, s.optimizer, wish.packed, wish.documents, s.recompute, self._world,
            accumulates, card.capability, s.on_host, s.inputs_on_host, needs,
            len(sharing(s, self._cards)) if s.strategy == FSDP else 1, offload=s.offload, mlp=s.mlp,
        )  # fmt: skip

    def _needs(self, s: Settings, card: Card, context: int = 0) -> int:
        job = self._job(s, card, context)
        return reserved(self._footprint(s.method).planned(job).total) + self._gaps(job)

    def _gaps(self, job: Job) -> int:
        """What blocks keep fills the place of the wide products that are made again, which then find none: 0.5 GiB beside 14.8 with
        8B and 4,096 tokens, 0.7 beside 22 in shards of 32B (an H200). That is why no plan chooses `mlp` by itself."""
        return _WIDE_IN_GAPS * 2 * HALF * job.tokens * self._wish.model.ff if job.mlp else 0

    def _fits(self, s: Settings, card: Card, context: int = 0) -> bool:
        return self._needs(s, card, context) <= card.room(self._world) and self._host_has(s, card, context)

    def _host_has(self, s: Settings, card: Card, context: int = 0) -> bool:
        """Every host: memory for what all its cards move there. True where nobody knows how much there is."""
        if not (s.inputs_on_host or s.offload != NOTHING):
            return True
        each, hosts = self._host_bytes(s, card, context), {one.host: one for one in self._cards}
        return all(
            self._beside(one) * each <= HOST_SHARE * one.host_free
            for one in hosts.values()
            if one.host_free is not None
        )

    def _host_bytes(self, s: Settings, card: Card, context: int = 0) -> int:
        return self._footprint(s.method).host_bytes(self._job(s, card, context))

    def _largest(self, s: Settings, card: Card) -> int:
        if not self._fits(replace(s, micro=1), card):
            return 0
        return last(1, MOST, lambda micro: self._fits(replace(s, micro=micro), card))

    def _fewest(self, s: Settings) -> Settings | None:
        """With as little computed again as this micro-batch needs; None: all blocks are not enough."""
        card, asked = self._tightest, self._wish.recompute
        if not self._fits(s, card):
            return None
        if asked is not None or (s.inputs_on_host and not self._peaks_known):
            return s  # inputs alone are copied in the time of any card's arithmetic
        if s.inputs_on_host:  # memory is about the same for all numbers of them
            ways = [replace(s, recompute=again) for again in range(s.recompute + 1)]
            return next(one for one in sorted(ways, key=self._cost) if self._fits(one, card))
        kept = last(0, self._wish.layers, lambda keep: self._fits(replace(s, recompute=s.recompute - keep), card))
        return replace(s, recompute=s.recompute - kept)

    def _cost(self, s: Settings) -> float:
        """Time of a token, by that of one without recomputing in a large micro-batch."""
        wish, passes = self._wish, PASSES[s.method]
        tokens, again = s.micro * wish.context, s.again(wish)
        slower = 1 + HALF_SPEED / tokens
        if s.strategy == FSDP:
            speed = SHARE * min(card.peak or ASSUMED for card in self._cards)
            alone = tokens * flops_per_token(wish.model, wish.context, passes) / speed
            described = self._footprint(s.method).described
            assert described is not None
            among = sharing(s, self._cards)
            moved = host_seconds(fetched(described, len(among), s.offload), self._cards)
            return max((1 + again / passes) * slower, max(exchange_seconds(sent(described), among), moved) / alone)
        if not s.inputs_on_host or not self._peaks_known:
            return (1 + again / passes) * slower
        work = tokens * flops_per_token(wish.model, wish.context, passes) * slower
        worst = 0.0
        for card in self._cards:
            assert card.peak is not None
            link = min(card.link or LINK_ELSE, HOST_LINKS / self._beside(card))
            moved = self._footprint(s.method).moved_bytes(self._job(s, card))
            worst = max(worst, Copies(moved, link, work, card.peak).time(1 / passes, again))
        return worst * slower

    @property
    def _peaks_known(self) -> bool:
        return all(card.peak is not None for card in self._cards)

    def _beside(self, card: Card) -> int:
        """Cards of its host, with it."""
        return sum(other.host == card.host for other in self._cards)

    def _faster(self, s: Settings) -> Settings:
        """As fast as it gets; what blocks keep is in host memory where that is sure to be faster."""
        found = self._fastest(s)
        sure = self._peaks_known and all(card.link is not None for card in self._cards)
        if s.inputs_on_host or self._wish.inputs_on_host is not None or not sure or not self._can_move_kept(s):
            return found
        frugal = replace(s, inputs_on_host=True)
        if not found.saves or not self._fits(frugal, self._tightest):
            return found
        moved = self._fastest(frugal)
        return moved if self._cost(moved) < GAIN * self._cost(found) else found

    def _fastest(self, s: Settings) -> Settings:
        """The micro-batch, with as few recomputed blocks as it needs, that takes the least time for a token."""
        wish = self._wish
        share = wish.share(self._world)
        sizes = [wish.micro] if wish.micro else _sizes(min(share, MOST))
        found: list[Settings] = []
        for micro in sizes:
            one = self._fewest(replace(s, micro=micro))
            if one is None:
                break
            found.append(one)
        return min(found, key=self._cost)

    def _made(self, s: Settings, fits: bool, change: Change | None = None) -> Plan:
        shares = []
        for card in self._cards:
            planned = self._footprint(s.method).planned(self._job(s, card))
            needs = self._needs(s, card) + card.free - card.room(self._world)
            shares.append(Share(card, planned, needs, self._largest(s, card), self._host_bytes(s, card)))
        reasons = tuple(self._reasons(s)) if fits else ()
        about = self._footprint(s.method).why_about or (SHARDS_ABOUT if s.strategy == FSDP else "")
        if self.dtype == "fp16":
            about = about or "no card before Ampere was measured: an estimate"
        return Plan(self._wish, fits, s, tuple(shares), reasons, change, about, self.dtype)

    @property
    def dtype(self) -> str:
        """All ranks compute with what the oldest card has."""
        return "fp16" if any(card.dtype == "fp16" for card in self._cards) else "bf16"

    def _reasons(self, s: Settings) -> Iterator[str]:
        wish, card = self._wish, self._tightest
        room = format_bytes(card.room(self._world))
        if wish.method == AUTO:
            before = METHODS[: METHODS.index(s.method)]
            needs = [f"{name} needs {format_bytes(self._needs(self._frugal(name), card))}" for name in before]
            yield f"method {s.method}: " + (
                f"{', '.join(needs)}, and {room} can be used" if needs else "all weights fit"
            )
        if self.dtype == "fp16":
            old = next(card for card in self._cards if card.dtype == "fp16")
            yield f"fp16 with loss scaling: {old.name} has no bf16"
        if s.optimizer == "adamw8bit" and wish.optimizer == AUTO:
            yield "8-bit optimizer: with moments in fp32 it does not fit"
        if s.on_host and wish.on_host is None:
            yield "embedding in host memory: on the card it does not fit"
        if s.offload != NOTHING and wish.offload is None:
            yield f"{OFFLOADED_WORDS[s.offload]} in host memory: on the card they do not fit"
        if s.inputs_on_host and wish.inputs_on_host is None:
            yield f"activations in host memory: {self._why_host(s)}"
        if s.bits == 4 and not wish.needs.bits:
            yield "answers by 4-bit weights: a copy of them in 16 bits does not fit"
        if wish.recompute is None:
            if s.recompute:
                yield f"recompute {s.recompute} of {wish.layers} blocks: {self._why_again(s)}"
            elif s.inputs_on_host:
                yield "recompute off: computing takes longer than copies to host memory"
            else:
                yield "recompute off: every block's activations fit"
        if not wish.micro:
            yield f"micro-batch {s.micro}: {self._why_micro(s)}"

    def _why_host(self, s: Settings) -> str:
        if not self._fits(replace(s, inputs_on_host=False, recompute=self._wish.layers), self._tightest):
            return "on the card what recomputed blocks keep does not fit"
        return "copies take less time than computing more blocks again"

    def _why_again(self, s: Settings) -> str:
        if not self._fits(replace(s, recompute=s.recompute - 1), self._tightest):
            return "with one less it does not fit"
        if not self._peaks_known:
            return "copies of more than their inputs may take longer on a card whose speed is not known"
        return "with one less, copies to host memory would take longer than computing"

    def _why_micro(self, s: Settings) -> str:
        if s.micro == self._wish.share(self._world):
            return f"a step of {self._wish.samples} samples has no more for a card"
        all_again = self._wish.layers if self._wish.recompute is None else s.recompute
        most = replace(s, micro=s.micro + 1, recompute=all_again, mlp=0 if self._wish.recompute is None else s.mlp)
        if not self._fits(most, self._tightest):
            return "no more fit"
        return "more would need more recomputing than it gains"

    def _frugal(self, method: str) -> Settings:
        frugal = Settings(method, "adamw8bit", self._wish.layers, False, 1)
        return self._written(
            replace(frugal, strategy=self._wish.strategy, sharding=self._wish.sharding or OVER_ALL),
            self._bits(method)[-1],
        )

    def _change(self, s: Settings) -> Change:
        """One change that is enough, the smallest first; then a card that is."""
        for change, fewer in self._smaller(s):
            if self._fits(fewer, self._tightest):
                return Change(change, "")
        enough = [card for card in self._cards if self._fits(s, card)]
        if enough and not any(card.host for card in enough):
            return Change({"gpus": ",".join(card.label.removeprefix("GPU ") for card in enough)}, "")
        for method in METHODS[METHODS.index(s.method) :]:
            other, method_too = (s, {}) if method == s.method else (self._frugal(method), {"method": method})
            if method_too and self._fits(other, self._tightest):
                return Change(method_too, "")
            context = self._longest(other)
            if context:
                return Change({**method_too, CONTEXT_FLAG: str(context)}, "")
        return Change({}, self._larger_card())

    def _larger_card(self) -> str:
        card = self._tightest
        frugal = self._frugal(QLORA if self._wish.method == AUTO else self._wish.method)
        if frugal.strategy == FSDP:
            frugal = replace(frugal, offload=(self._wish.offload or NOTHING, *self._offloads(frugal))[-1])
        needs = self._needs(replace(frugal, on_host=self._can_be_on_host(frugal)), card)
        missing = needs - card.room(self._world)
        if card.held_bytes >= missing:
            who = f" ({card.held[0]})" if card.held else ""
            return (
                f"free {format_bytes(missing)} on {card.label}, where others hold {format_bytes(card.held_bytes)}{who}"
            )
        total = needs + card.free - card.room(self._world)
        return f"use a GPU with {format_bytes(total)} free ({card.label} has {format_bytes(card.free)})"

    def _smaller(self, s: Settings) -> Iterator[tuple[dict[str, str], Settings]]:
        layers = self._wish.layers
        one, again = {"micro": "1"}, {"recompute": "full"}
        if s.micro > 1:
            yield one, replace(s, micro=1)
        if s.recompute < layers:
            yield again, replace(s, recompute=layers, mlp=0)
        if s.micro > 1 and s.recompute < layers:
            yield one | again, replace(s, micro=1, recompute=layers, mlp=0)
        if s.strategy == DDP and self._world > 1 and self.can_shard(s.method):
            yield {"parallel": FSDP}, replace(s, strategy=FSDP, on_host=False, inputs_on_host=False)
        if s.optimizer != "adamw8bit" and not self._wish.kept:
            yield {"optimizer": "adamw8bit"}, replace(s, optimizer="adamw8bit")
        for what in self._offloads(s):
            if s.offload == NOTHING:
                yield {"offload": what}, replace(s, offload=what)
        if not s.on_host and self._can_be_on_host(s):
            yield {"embedding": "host"}, replace(s, on_host=True)
        if not s.inputs_on_host and self._can_move_kept(s):
            yield {"activations": "host"}, replace(s, inputs_on_host=True)
        if s.inputs_on_host:  # what the host has no memory for
            yield {"activations": "device"}, replace(s, inputs_on_host=False)
        if s.bits == 16 and s.method == QLORA:
            yield {"bits": "4"}, replace(s, bits=4)
        rows = s.rows // 2
        while rows:
            yield {"rows": str(rows)}, replace(s, rows=rows)
            rows //= 2

    def _longest(self, s: Settings) -> int:
        """The longest context that fits; 0: none that is worth it."""
        most = (self._wish.context - 1) // STEP
        least = SHORTEST // STEP
        if most < least or not self._fits(s, self._tightest, least * STEP):
            return 0
        return STEP * last(least, most, lambda steps: self._fits(s, self._tightest, steps * STEP))


def last(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """The largest number up to `high` for which it holds; it does for `low`."""
    while low < high:
        middle = (low + high + 1) // 2
        if holds(middle):
            low = middle
        else:
            high = middle - 1
    return low


def _sizes(share: int) -> list[int]:
    """Micro-batches that a share of a step splits into evenly, smallest first."""
    return sorted({-(-share // parts) for parts in range(1, share + 1)})


def make(cards: list[Card], wish: Wish) -> Plan:
    with parsing(f"model {wish.model.load}"):
        return Search(cards, wish).plan()
