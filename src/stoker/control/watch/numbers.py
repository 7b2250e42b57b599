"""Losses that are no numbers any more, or explode: from beats, and from the step lines a script prints. Pure.

One bad loss can be one bad batch, and a scaler skips it. Three in a row are weights that are gone.
"""

from __future__ import annotations

import math
import re

from stoker.contract import redact
from stoker.contract.shape import shape

IN_A_ROW = 3
EXPLODING = 100.0  # times the largest of the first losses; a change of stage or of loss may be 25
SUBSTANTIAL = 0.1  # first losses below this are no measure: RL begins with a loss of 0
EXPLODING_IN_A_ROW = 5
FIRST = 10
_QUOTED = 200  # characters of a line
LONGEST = 1 << 16  # a chunk larger than this is a flood, not step lines

# "loss: 2.31", "loss=nan", "train_loss 1e9", "'loss': 0.5"; not "no loss found". Evaluation and validation losses may be empty: a line that speaks of
# them before is not read. Of other losses (a critic's may grow as it should) it is said that they are no number, and nothing is ended for it.
# Every repetition has a bound: a line of 60,000 spaces or digits would otherwise be searched for hours.
_LOSS = re.compile(
    rb"(?i)(?<![a-z])(?P<what>(?:[a-z]{1,40}[ _/-])?loss)['\"]?\s{0,40}[:=]?\s{0,40}"
    rb"(?P<value>nan|[-+]?inf(?:inity)?|[-+]?\d{1,40}\.?\d{0,40}(?:e[-+]?\d{1,4})?)(?![\w.])"
)
_EVALUATION = re.compile(rb"(?i)(?<![a-z])(val|eval|evaluation|test|valid|validation|dev)(?![a-z])")
_NOT_TRAINING = (b"no", b"best", b"min", b"lowest", b"last", b"final")  # of "loss" itself: "5 min | loss nan" is a step's line
_TRAINING = (b"", b"train", b"training", b"lm", b"total", b"mean", b"avg", b"average", b"running", b"step", b"batch", b"ce")
_STEP = re.compile(rb"(?i)\bstep\W{0,3}(\d{1,18})")


@shape
class BadNumber:
    kind: str  # loss | exploding
    rank: int
    step: int
    value: str
    source: str  # beat | line
    line: str = ""
    firm: bool = False  # it stays so: not one bad batch
    stops: bool = True  # if it stays so the job ends; else it is only said


class Losses:
    """One run's losses, by rank."""

    def __init__(self) -> None:
        self._first: dict[int, list[float]] = {}
        self._bad: dict[int, int] = {}
        self._high: dict[int, int] = {}
        self._since: dict[int, int] = {}  # rank -> the step of the first bad one in a row
        self._said: set[tuple[int, str, bool]] = set()
        self._beaten: set[int] = set()  # ranks that tell their loss themselves: their lines are not read
        self._rest: dict[int, bytes] = {}

    def heard(self, rank: int, step: int, loss: float) -> BadNumber | None:
        self._beaten.add(rank)
        return self._take(rank, step, loss, "beat", b"")

    def heard_all(self, told: list[tuple[int, int, float]]) -> list[BadNumber]:
        """(step, rank, loss) of several ranks, in the order of their steps: averaging spreads a NaN, and the first to have it is the one."""
        return [bad for bad in (self.heard(rank, step, loss) for step, rank, loss in sorted(told, key=lambda one: one[:2])) if bad is not None]

    def read(self, rank: int, data: bytes) -> list[BadNumber]:
        """A chunk of what a rank printed. Only whole lines count; most chunks hold no loss and cost one search."""
        if rank in self._beaten or len(data) > LONGEST:
            return []
        if b"oss" not in data and b"OSS" not in data and rank not in self._rest:
            return []
        whole = self._rest.pop(rank, b"") + data
        cut = max(whole.rfind(b"\n"), whole.rfind(b"\r")) + 1
        if len(whole) - cut and len(whole) - cut < 4096:
            self._rest[rank] = whole[cut:]
        found = []
        for line in whole[:cut].splitlines():
            match = _LOSS.search(line)
            if match is None or _EVALUATION.search(line[: match.end("what")]):
                continue
            which = match["what"].lower().partition(b"loss")[0].rstrip(b" _/-")
            if which in _NOT_TRAINING:
                continue
            step = _STEP.search(line)
            try:
                value = float(match["value"])
            except ValueError:
                continue
            number = int(step[1]) if step else 0
            if which in _TRAINING:
                one = self._take(rank, number, value, "line", line)
            else:
                one = None if math.isfinite(value) else self._once("loss", rank, number, value, "line", line, firm=False, stops=False)
            if one is not None:
                found.append(one)
        return found

    def _take(self, rank: int, step: int, loss: float, source: str, line: bytes) -> BadNumber | None:
        if math.isfinite(loss):
            self._bad[rank] = 0
            first = self._first.setdefault(rank, [])
            if len(first) < FIRST:
                first.append(abs(loss))
                return None
            high = max(first) >= SUBSTANTIAL and abs(loss) > EXPLODING * max(first)
            self._high[rank] = self._high.get(rank, 0) + 1 if high else 0
            return self._once("exploding", rank, step, loss, source, line, self._high[rank] >= EXPLODING_IN_A_ROW) if high else None
        self._bad[rank] = self._bad.get(rank, 0) + 1
        if self._bad[rank] == 1:
            self._since[rank] = step
        return self._once("loss", rank, self._since[rank], loss, source, line, self._bad[rank] >= IN_A_ROW)

    def _once(self, kind: str, rank: int, step: int, loss: float, source: str, line: bytes, firm: bool, stops: bool = True) -> BadNumber | None:
        """Said when it is first seen and when it is certain, not for every step between."""
        if (rank, kind, firm) in self._said or (kind == "exploding" and not firm):
            return None
        self._said.add((rank, kind, firm))
        return BadNumber(kind, rank, step, f"{loss:g}", source, redact.whole(line.decode("utf-8", "replace"))[:_QUOTED], firm, stops)
