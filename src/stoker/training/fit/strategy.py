"""One card, DDP or FSDP: each one's plan, how long a step of it takes with what ranks exchange, and which is best. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from stoker.contract.errors import EX_CONFIG, Refusal, parsing
from stoker.contract.frozen import frozen, replace
from stoker.contract.units import format_bytes
from stoker.training.fit.cards import Card
from stoker.training.fit.cost import ASSUMED
from stoker.training.fit.pace import step_seconds
from stoker.training.fit.plan import AUTO, DDP, FSDP, METHODS, Plan, Search, Wish
from stoker.training.parallel.config import IN_HOST

ONE = "one"
STRATEGIES = (DDP, FSDP, ONE)  # in this order where nothing else decides
PROMISED = 0.9  # of the time of the way before it: links are guessed, and every rank's own copy waits for nobody
_WORDS = {ONE: "one card", DDP: "ddp", FSDP: "fsdp"}


@frozen
class Way:
    strategy: str
    plan: Plan
    seconds: float | None  # of a step; None: nobody knows, as of answers' length

    @property
    def needs(self) -> int:
        """Bytes of the card that needs most."""
        return max(share.needs for share in self.plan.shares)


@frozen
class Decision:
    way: Way
    others: tuple[Way, ...]  # that were looked at, too

    @property
    def plan(self) -> Plan:
        return self.way.plan

    @property
    def ways(self) -> tuple[Way, ...]:
        return tuple(sorted((self.way, *self.others), key=lambda way: STRATEGIES.index(way.strategy)))

    def preferring(self, strategy: str) -> Decision:
        """Return the decision for `strategy` if that fits with the method chosen here, else this one."""
        if self.way.strategy == strategy or not self.plan.fits:
            return self
        method = self.plan.settings.method
        for way in self.others:
            if way.strategy == strategy and way.plan.fits and way.plan.settings.method == method:
                return Decision(way, tuple(other for other in self.ways if other is not way))
        return self

    def line(self) -> str:
        """Each one's memory and time."""
        auto = self.plan.wish.method == AUTO
        parts = []
        for way in self.ways:
            method = f" {way.plan.settings.method}" if auto else ""
            inside = " inside hosts" if way.plan.settings.sharding == IN_HOST else ""
            time = "" if way.seconds is None else f", {way.seconds:.3g} s a step"
            time = time if way.plan.fits else ", does not fit"
            parts.append(
                f"{_WORDS[way.strategy]}{inside}{method} {format_bytes(way.needs)}{' a card' if way.strategy != ONE else ''}{time}"
            )
        unknown = any(share.card.peak is None for way in self.ways for share in way.plan.shares)
        timed = unknown and any(way.seconds is not None and way.plan.fits for way in self.ways)
        about = f" (for cards of {ASSUMED / 1e12:.0f} TFLOP/s: theirs is not known)" if timed else ""
        return f"{_WORDS[self.way.strategy]}: {'; '.join(parts)}{about}"


def decide(cards: list[Card], wish: Wish, asked: str = AUTO, but: Collection[str] = ()) -> Decision:
    """`asked`: auto, or one of STRATEGIES; `but`: those that can't be had."""
    with parsing(f"model {wish.model.load}"):
        names = [name for name in STRATEGIES if asked in (AUTO, name) and (asked == name or name not in but)]
        if len(cards) == 1:
            names = [ONE]
        ways = [way for name in names if (way := _way(name, cards, wish)) is not None]
        if not ways:
            line = f"parallel {asked}: {wish.model.load} runs in transformers and can't be sharded"
            raise Refusal(f"{line}; use ddp, or a model of a family (`stoker docs families`)", EX_CONFIG)
        best = _best(ways)
        return Decision(best, tuple(way for way in ways if way is not best))


def _way(name: str, cards: list[Card], wish: Wish) -> Way | None:
    if name == ONE:
        unlike = dict[tuple[str, int, int], Card]()
        for card in cards:
            unlike.setdefault((card.name, card.total, card.free), card)
        return _best([_made(ONE, Search([card], replace(wish, strategy=DDP)).plan()) for card in unlike.values()])
    search = Search(cards, replace(wish, strategy=name))
    if name == FSDP and not search.can_shard(METHODS[0] if wish.method == AUTO else wish.method):
        return None
    found = _made(name, search.plan())
    if name == FSDP and wish.sharding is None and _alike(cards):
        inside = _made(name, Search(cards, replace(wish, strategy=name, sharding=IN_HOST)).plan())
        found = _best([found, inside])
    return found


def _alike(cards: list[Card]) -> bool:
    """Several hosts of as many cards each, more than one."""
    counts = Counter(card.host for card in cards)
    return len(counts) > 1 and len(set(counts.values())) == 1 and counts[cards[0].host] > 1


def _made(name: str, plan: Plan) -> Way:
    return Way(name, plan, step_seconds(plan))


def _best(ways: list[Way]) -> Way:
    """What fits before what does not; with --method auto the first method that does; then the fastest, where it saves enough."""
    fitting = [way for way in ways if way.plan.fits]
    if not fitting:
        return min(ways, key=lambda way: way.needs - max(share.card.free for share in way.plan.shares))
    first = min(METHODS.index(way.plan.settings.method) for way in fitting)
    best, *others = (way for way in fitting if METHODS.index(way.plan.settings.method) == first)
    for way in others:
        if way.seconds is not None and best.seconds is not None and way.seconds < PROMISED * best.seconds:
            best = way
    return best
