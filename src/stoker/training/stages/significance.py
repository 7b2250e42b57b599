"""Is a difference more than noise? Shares with 95 % intervals, the test of two, and how both are written. Pure."""

from __future__ import annotations

import math
from typing import Any

from stoker.contract.frozen import frozen
from stoker.contract.units import finite_number
from stoker.training.evaluate.confidence import wilson
from stoker.training.stages.blocks import Cell, tone_of

ABSENT = "n/a"
Row = tuple[Cell, ...]  # of the table "Did each stage help?"


@frozen
class Measured:
    """A number with its 95 % interval. None: it was not measured."""

    value: float | None = None
    low: float | None = None
    high: float | None = None
    total: int | None = None  # questions or pairs behind it


@frozen
class Change:
    """From `before` to `after`; low and high are None where a side has no interval to test by."""

    difference: float | None
    low: float | None = None
    high: float | None = None

    @property
    def tested(self) -> bool:
        return self.low is not None and self.high is not None

    @property
    def beyond_noise(self) -> bool:
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)


def share(correct: float, total: float) -> Measured:
    """Counts that can't be, as a damaged file may have them, measure nothing."""
    if total <= 0 or not 0 <= correct <= total:
        return Measured()
    return Measured(correct / total, *wilson(correct, total), int(total))


def change(before: Measured, after: Measured) -> Change:
    """The two-proportion test as an interval of the difference (Newcombe's), beyond the noise where it leaves out 0. It also
    takes other intervals than Wilson's: of sampled answers, which are not independent. Where both sides answer the same
    questions it is cautious.
    """
    if before.value is None or after.value is None:
        return Change(None)
    difference = after.value - before.value
    if before.low is None or before.high is None or after.low is None or after.high is None:
        return Change(difference)
    down = math.hypot(after.value - after.low, before.high - before.value)
    up = math.hypot(after.high - after.value, before.value - before.low)
    return Change(difference, difference - down, difference + up)


def judged(found: Change, higher_is_better: bool = True) -> str:
    """better, worse or no significant difference; up or down where there is no interval to test by."""
    if found.difference is None:
        return ABSENT
    if found.tested and not found.beyond_noise:
        return "no significant difference"
    if found.difference == 0:
        return "no difference"
    hoped = (found.difference > 0) == higher_is_better
    if not found.tested:
        return f"{'up' if found.difference > 0 else 'down'}, {'as hoped' if hoped else 'not as hoped'} (not tested)"
    return f"{'better' if hoped else 'worse'} (significant)"


def percent(value: float | None) -> str:
    return ABSENT if value is None else f"{100 * value:.1f} %"


def between(measured: Measured) -> str:
    """The interval of a share, in percent: 58.6–65.5. Empty where there is none."""
    if measured.low is None or measured.high is None:
        return ""
    return f"{100 * measured.low:.1f}–{100 * measured.high:.1f}"


def share_with_interval(measured: Measured) -> str:
    inside = between(measured)
    return percent(measured.value) + (f" ({inside})" if inside and measured.value is not None else "")


def points(found: Change) -> str:
    """A difference of shares: +12.3 points (+8.1 to +16.5)."""
    if found.difference is None:
        return ABSENT
    said = f"{100 * found.difference:+.1f} points"
    if found.low is None or found.high is None:
        return said
    return f"{said} ({100 * found.low:+.1f} to {100 * found.high:+.1f})"


def number(value: float | None, digits: int = 3) -> str:
    """Three significant digits, thousands apart."""
    if value is None or not math.isfinite(value):
        return ABSENT
    if abs(value) >= 10 ** (digits - 1) or value == int(value):
        return f"{value:,.0f}"
    return f"{value:#.{digits}g}"


def number_and_interval(measured: Measured) -> tuple[str, str]:
    """Both with the decimals of the largest: 0.0200 and 0.0080 to 0.0320."""
    value, low, high = measured.value, measured.low, measured.high
    if value is None or low is None or high is None:
        return number(value), ""
    largest = max(abs(value), abs(low), abs(high))
    decimals = max(0, 2 - math.floor(math.log10(largest))) if largest else 0
    return f"{value:,.{decimals}f}", f"{low:,.{decimals}f} to {high:,.{decimals}f}"


def random_guess(metrics: Any) -> float | None:
    """Bits per byte of a model to which all tokens of this tokenizer are equally likely."""
    size, packed = finite_number(metrics, "vocab_size"), finite_number(metrics, "bytes_per_token")
    return math.log2(size) / packed if size and size > 0 and packed else None


def untested_row(stage: str, what: str, before: float | None, after: float | None, *, higher_is_better: bool) -> Row:
    """Two numbers without intervals."""
    verdict = judged(change(Measured(before), Measured(after)), higher_is_better)
    return Cell(stage, what), Cell(f"{number(before)} → {number(after)}"), Cell(verdict, tone=tone_of(verdict))


def shares_row(stage: str, what: str, before: Measured, after: Measured) -> Row:
    found = change(before, after)
    verdict = judged(found)
    shares = Cell(f"{percent(before.value)} → {percent(after.value)}")
    return Cell(stage, what), shares, Cell(verdict, points(found), tone_of(verdict))


@frozen
class Marks:
    greedy: Measured = Measured()  # right by content, as `sampled`
    sampled: Measured = Measured()
    strict: Measured = Measured()  # right in the expected form
    form: Measured = Measured()  # in that form, right or wrong
    cut: Measured = Measured()  # at the token limit
    sampled_cut: Measured = Measured()


def marks(data: Any) -> Marks:
    return Marks(*(_measured(data, prefix) for prefix in ("", "sampled_", "strict_", "form_", "cut_", "sampled_cut_")))


def _measured(data: Any, prefix: str) -> Measured:
    value, low, high = (finite_number(data, prefix + key) for key in ("accuracy", "low", "high"))
    right, total = finite_number(data, prefix + "correct"), finite_number(data, prefix + "total")
    if right is not None and total and (value is None or low is None or high is None):
        return share(right, total)
    return Measured(value, low, high, None if total is None else int(total))


def measured(data: Any, key: str) -> Measured:
    """{"value", "low", "high"} under a metric's name."""
    inside = data.get(key) if isinstance(data, dict) else None
    return Measured(finite_number(inside, "value"), finite_number(inside, "low"), finite_number(inside, "high"))
