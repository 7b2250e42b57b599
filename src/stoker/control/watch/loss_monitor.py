"""Losses that are no numbers any more, or explode: from beats, and from the step lines a script prints. Pure.

One bad loss can be one bad batch, and a scaler skips it. Three in a row are weights that are gone.
"""

from __future__ import annotations

import math
import re

from stoker.contract.evidence import BadNumber
from stoker.contract.frozen import replace

IN_A_ROW = 3
CONSTANT_FOR = 20  # readings, from the first on: a loss may well stay the same when it has converged
NORMS_IN_A_ROW = 10  # a gradient scaler begins with steps that overflow, and skips them; the loss is fine then
EXPLODING = 100.0  # times the largest of the first losses; a change of stage or of loss may be 25
SUBSTANTIAL = 0.1  # first losses below this are no measure: RL begins with a loss of 0
EXPLODING_IN_A_ROW = 5
FIRST = 10
_QUOTED = 200  # characters of a line
LONGEST = 1 << 16  # a chunk larger than this is a flood, not step lines

# A number as scripts print it: 2.31, 'nan' (transformers 5 quotes), nan.0 (Lightning), tensor(nan, device=...).
_VALUE = (
    rb"['\"]?\s{0,40}[:=]?\s{0,40}(?:tensor\(|['\"])?"
    rb"(?P<value>nan(?:\.0)?|[-+]?inf(?:inity)?(?:\.0)?|[-+]?\d{1,40}\.?\d{0,40}(?:e[-+]?\d{1,4})?)(?![\w.])"
)
# "loss: 2.31", "loss=nan", "train_loss 1e9", "'loss': '0.5'"; not "no loss found". Evaluation and validation losses may
# be empty: a line that speaks of them before is not read. Of other losses (a critic's may grow as it should) it is said
# that they are no number, and nothing is ended for it. Every repetition has a bound: a line of 60,000 spaces or digits
# would otherwise be searched for hours.
_LOSS = re.compile(rb"(?i)(?<![a-z])(?P<what>(?:[a-z]{1,40}[ _/-])?loss)" + _VALUE)
_NORM = re.compile(rb"(?i)(?<![a-z])grad(?:ient)?s?[ _-]?norm" + _VALUE)
_REWARD = re.compile(rb"(?i)(?<![a-z_])(?:mean[ _])?rewards?(?:[/_]mean)?(?![a-z_/])" + _VALUE)
_EVALUATION = re.compile(rb"(?i)(?<![a-z])(val|eval|evaluation|test|valid|validation|dev)(?![a-z])")
# Of "loss" itself: "5 min | loss nan" is a step's line.
_NOT_TRAINING = (b"no", b"best", b"min", b"lowest", b"last", b"final")
_TRAINING = (b"", *b"train training lm total mean avg average running step batch ce".split())
_STEP = re.compile(rb"(?i)\b(?:global[ _]?step|step|iter|iteration)\W{0,3}(\d{1,18})")
_COUNTER = re.compile(rb"\d{1,18}/\d{1,18}")
# transformers' Trainer ends with the mean over all steps: in a dict with train_runtime, and in the table of log_metrics.
_MEAN = re.compile(rb"train_runtime|^  train_loss\s{1,80}=\s{1,80}\S{1,40}\s{0,80}$")
_CODES = re.compile(rb"\x1b\[[0-9;?]{0,40}[A-Za-z]")


class LossMonitor:
    """One run's losses, by rank."""

    def __init__(self) -> None:
        self._first: dict[int, list[float]] = {}
        self._bad: dict[int, int] = {}
        self._norms: dict[int, int] = {}  # rank -> gradient norms in a row that are no numbers
        self._high: dict[int, int] = {}
        self._since: dict[int, int] = {}  # rank -> the step of the first bad one in a row
        self._newest: dict[int, BadNumber] = {}  # rank -> the newest loss it printed, where that is no number
        self._same: dict[tuple[str, int], tuple[float, int]] = {}  # (loss or reward, rank) -> value, readings so far
        self._reported: set[tuple[int, str, bool]] = set()
        self._beaten: set[int] = set()  # ranks that tell their loss themselves: their lines are not read
        self._printing: set[int] = set()  # ranks that print losses
        self._counters: dict[int, list[bytes]] = {}  # rank -> of the progress bar it drew last
        self._rest: dict[int, bytes] = {}
        self.newest: dict[int, tuple[int, float]] = {}  # rank -> (step, loss) it told last, whatever it is

    def heard(self, rank: int, step: int, loss: float) -> BadNumber | None:
        self._beaten.add(rank)
        return self._take(rank, step, loss, "beat", "")

    def heard_all(self, told: list[tuple[int, int, float]]) -> list[BadNumber]:
        """(step, rank, loss) of several ranks, by step: averaging spreads a NaN, and who had it first is the one."""
        found = (self.heard(rank, step, loss) for step, rank, loss in sorted(told, key=lambda one: one[:2]))
        return [bad for bad in found if bad is not None]

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
        read = (self._read_line(rank, _CODES.sub(b"", line)) for line in whole[:cut].splitlines())
        return [replace(bad, shared=len(self._printing) == 1) for bad in read if bad is not None]

    def unresolved(self) -> list[BadNumber]:
        """Newest losses of a run that is over that are no numbers, too few in a row to be sure of."""
        return [bad for rank, bad in sorted(self._newest.items()) if self._bad[rank] < IN_A_ROW]

    def _read_line(self, rank: int, line: bytes) -> BadNumber | None:
        match = _LOSS.search(line)
        if match is None or _EVALUATION.search(line[: match.end("what")]):
            return None
        which = match["what"].lower().partition(b"loss")[0].rstrip(b" _/-")
        counter = _COUNTER.findall(line)
        # A bar that is drawn again shows the same loss.
        if which in _NOT_TRAINING or (counter and counter == self._counters.get(rank)):
            return None
        self._counters[rank] = counter
        self._printing.add(rank)
        found = _STEP.search(line)
        step, value = int(found[1]) if found else 0, _number(match["value"])
        if which == b"train" and math.isfinite(value) and _MEAN.search(line):
            return None
        text = line.decode("utf-8", "replace").strip()[:_QUOTED]
        reward = _REWARD.search(line)
        if reward is not None:  # RL: a loss of 0 is normal there
            return self._constant("reward", rank, step, _number(reward["value"]), "line", text)
        if which not in _TRAINING:
            if math.isfinite(value):
                return None
            return self._once("loss", rank, step, value, "line", text, firm=False, stops=False)
        norm = _NORM.search(line)
        if norm is None or math.isfinite(_number(norm["value"])):
            self._norms[rank] = 0
        elif value == 0.0:  # transformers' Trainer prints 0 for losses that are NaN (logging_nan_inf_filter)
            value = _number(norm["value"])
        else:
            return self._bad_norm(rank, step, _number(norm["value"]), text)
        return self._take(rank, step, value, "line", text)

    def _bad_norm(self, rank: int, step: int, norm: float, line: str) -> BadNumber | None:
        self._norms[rank] = self._norms.get(rank, 0) + 1
        if self._norms[rank] == 1:
            self._since[rank] = step
        return self._once("grad-norm", rank, self._since[rank], norm, "line", line, self._norms[rank] >= NORMS_IN_A_ROW)

    def _take(self, rank: int, step: int, loss: float, source: str, line: str) -> BadNumber | None:
        self.newest[rank] = step, loss
        if math.isfinite(loss):
            constant = self._constant("loss", rank, step, loss, source, line)
            if constant is not None:
                return constant
            self._bad[rank] = 0
            self._newest.pop(rank, None)
            first = self._first.setdefault(rank, [])
            if len(first) < FIRST:
                first.append(abs(loss))
                return None
            high = max(first) >= SUBSTANTIAL and abs(loss) > EXPLODING * max(first)
            self._high[rank] = self._high.get(rank, 0) + 1 if high else 0
            if not high:
                return None
            return self._once("exploding", rank, step, loss, source, line, self._high[rank] >= EXPLODING_IN_A_ROW)
        self._bad[rank] = self._bad.get(rank, 0) + 1
        if self._bad[rank] == 1:
            self._since[rank] = step
        self._newest[rank] = BadNumber("loss", rank, self._since[rank], f"{loss:g}", source, line)
        return self._once("loss", rank, self._since[rank], loss, source, line, self._bad[rank] >= IN_A_ROW)

    def _constant(self, what: str, rank: int, step: int, value: float, source: str, line: str) -> BadNumber | None:
        """Report once a run that a number has been the same in all readings so far."""
        before, count = self._same.get((what, rank), (value, 0))
        if value != before:
            value, count = math.nan, 0  # never equal again: it does change
        self._same[what, rank] = value, count + 1
        if count + 1 != CONSTANT_FOR or any(kind == "constant" for _, kind, _ in self._reported):
            return None
        self._reported.add((rank, "constant", False))
        return BadNumber("constant", rank, step, f"{what} {value:g}", source, line, stops=False)

    def _first_rank(self, bad: BadNumber) -> BadNumber:
        """Return the one that had its first bad loss at an earlier step than `bad`, if a rank had: averaging spreads a NaN."""
        others = [one for rank, one in self._newest.items() if 0 < one.step < bad.step and self._bad[rank]]
        first = min(others, key=lambda one: one.step, default=bad)
        return replace(bad, rank=first.rank, step=first.step, line=first.line)

    def _once(
        self, kind: str, rank: int, step: int, value: float, source: str, line: str, firm: bool, stops: bool = True
    ) -> BadNumber | None:
        """Reported when it is first seen and when it is certain, not for every step between."""
        if (rank, kind, firm) in self._reported or (kind == "exploding" and not firm):
            return None
        self._reported.add((rank, kind, firm))
        bad = BadNumber(kind, rank, step, f"{value:g}", source, line, firm, stops)
        return self._first_rank(bad) if firm and kind == "loss" else bad


def _number(text: bytes) -> float:
    return float(text.lower().replace(b"nan.0", b"nan").replace(b"inf.0", b"inf"))
