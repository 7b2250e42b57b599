"""A panel: a table of one kind of thing, sorted and filtered; rows are drawn when they are seen."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from stoker.contract.frozen import frozen
from stoker.control.show.snapshot import GpuGauges, RankView, RunView, Snapshot
from stoker.control.show.top.cells import DIM, Column, Line, choose, drawn, titles

GPUS, RUN, RANKS, PROCESSES, RUNS = "gpus", "run", "ranks", "processes", "runs"
PANELS = (GPUS, RUN, RANKS, PROCESSES, RUNS)
TITLES = {GPUS: "GPUs", RUN: "Run", RANKS: "Ranks", PROCESSES: "Processes", RUNS: "Runs"}


@frozen
class Wish:
    """What the person at the keyboard wants of one panel."""

    sort: str = ""  # a letter of the panel's orders; empty: as they come
    reverse: bool = False
    filter: str = ""


@frozen
class Order:
    """`key`: of a row; None goes last, whichever way it is sorted."""

    title: str
    key: Callable[[Any], Any]
    down: bool = True  # the largest first


@frozen
class Row:
    key: str  # the same for the same thing in the next snapshot
    item: Any
    text: str  # what a filter looks into, in small letters
    draw: Callable[[Any, int], Line] | None = None  # where it is not drawn by the columns


@frozen
class Panel:
    name: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    empty: str  # what is shown where there are no rows
    hidden: int = 0  # rows that the filter leaves out

    def head(self, width: int) -> str:
        return titles(choose(self.columns, width))

    def lines(self, begin: int, end: int, width: int) -> list[Line]:
        if not self.rows:
            hidden = f"nothing matches the filter ({self.hidden} hidden)" if self.hidden else self.empty
            return [((hidden, DIM),)] if begin == 0 < end else []
        columns = choose(self.columns, width)
        return [
            row.draw(row.item, width) if row.draw is not None else drawn(columns, row.item)
            for row in self.rows[begin:end]
        ]


def ordered(rows: Iterable[Row], wish: Wish, orders: Mapping[str, Order]) -> tuple[tuple[Row, ...], int]:
    """(rows, how many the filter hides)."""
    every = list(rows)
    word = wish.filter.lower()
    kept = [row for row in every if word in row.text] if word else every
    order = orders.get(wish.sort)
    if order is not None:
        known = [(order.key(row.item), row) for row in kept]
        with_value = sorted(
            (pair for pair in known if pair[0] is not None),
            key=lambda pair: pair[0],
            reverse=order.down != wish.reverse,
        )
        kept = [row for _, row in with_value] + [row for value, row in known if value is None]
    elif wish.reverse:
        kept.reverse()
    return tuple(kept), len(every) - len(kept)


class Index:
    """What belongs together in a snapshot, looked up once a frame."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self.ranks_on: dict[tuple[str, str], list[tuple[RunView, RankView]]] = {}
        self.cards: dict[str, list[GpuGauges]] = {}
        for run in snapshot.runs:
            for rank in run.ranks if run.state == "running" else ():
                if rank.gpu is not None:
                    self.ranks_on.setdefault((rank.host, rank.gpu), []).append((run, rank))
        for card in snapshot.gpus:
            self.cards.setdefault(card.host, []).append(card)

    def owners(self, card: GpuGauges) -> Sequence[tuple[RunView, RankView]]:
        return self.ranks_on.get((card.host, card.uuid), ())
