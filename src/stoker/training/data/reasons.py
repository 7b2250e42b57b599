"""Rows that can't be used: how many for which reason, and which."""

from __future__ import annotations

from stoker.contract.frozen import frozen
from stoker.contract.text import escape

NAMED = 5  # rows that a line names for each reason
TOLERATED = 0.01  # a smaller share of rows that can't be used is left out
MOST_REASONS, OTHERS = 1000, "other reasons"  # a reason may quote the row: each row may have its own
MOST_LONG = 0.5  # a larger share of pairs that are too long is refused


@frozen
class Reason:
    why: str
    count: int
    rows: tuple[int, ...]  # their numbers; all of them, or the first


class Reasons:
    def __init__(self, most: int = NAMED) -> None:
        """`most`: rows that are remembered for each reason."""
        self._most = most
        self._rows: dict[str, list[int]] = {}
        self._counts: dict[str, int] = {}
        self.largest = 0

    def add(self, why: str, row: int, size: int = 0) -> None:
        why = escape(why, 300)
        if why not in self._counts and len(self._counts) >= MOST_REASONS:
            why = OTHERS
        self._counts[why] = self._counts.get(why, 0) + 1
        rows = self._rows.setdefault(why, [])
        if len(rows) < self._most:
            rows.append(row)
        self.largest = max(self.largest, size)

    @property
    def count(self) -> int:
        return sum(self._counts.values())

    @property
    def all(self) -> list[Reason]:
        """The most frequent first."""
        ordered = sorted(self._counts, key=lambda why: -self._counts[why])
        return [Reason(why, self._counts[why], tuple(self._rows[why])) for why in ordered]

    def __str__(self) -> str:
        return "; ".join(words(reason) for reason in self.all[:NAMED]) + (" …" if len(self._counts) > NAMED else "")


def words(reason: Reason) -> str:
    shown = ", ".join(map(str, reason.rows[:NAMED])) + (" …" if reason.count > min(len(reason.rows), NAMED) else "")
    return f"{reason.why} ({f'{reason.count:,} rows: ' if reason.count > 1 else 'row '}{shown})"
