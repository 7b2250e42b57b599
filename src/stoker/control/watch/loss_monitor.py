"""Finds losses that are NaN or infinite, explode or never change, in beats and in the step lines a script prints.

One bad loss can come from one bad batch, which a gradient scaler skips. After three in a row the weights are no longer
finite. It does no I/O.
"""

from __future__ import annotations

import math
import re

from stoker.contract.evidence import BadNumber
from stoker.contract.frozen import replace

BAD_LOSSES_IN_A_ROW = 3
CONSTANT_READINGS = 20  # counted from the first reading: a loss that has converged may stay the same
BAD_NORMS_IN_A_ROW = 10  # more than for losses: a gradient scaler overflows in its first steps and skips them
EXPLODING_FACTOR = 100.0  # times the largest of the first losses: a new stage or another loss can cause a factor of 25
EXPLODING_IN_A_ROW = 5
MIN_FIRST_LOSS = 0.1  # smaller first losses are not a baseline: RL starts with a loss of 0
FIRST_LOSSES = 10
_MAX_QUOTE = 200  # characters of a line
MAX_CHUNK = 1 << 16  # bytes: larger chunks are skipped, because they are bulk output rather than step lines

# A number as scripts print it: 2.31, 'nan' (quoted by transformers 5), nan.0 (Lightning), tensor(nan, device=...).
_VALUE = (
    rb"['\"]?\s{0,40}[:=]?\s{0,40}(?:tensor\(|['\"])?"
    rb"(?P<value>nan(?:\.0)?|[-+]?inf(?:inity)?(?:\.0)?|[-+]?\d{1,40}\.?\d{0,40}(?:e[-+]?\d{1,4})?)(?![\w.])"
)
# "loss: 2.31", "loss=nan", "train_loss 1e9", "'loss': '0.5'"; not "no loss found". Evaluation and validation losses may
# be empty, so a line that mentions these before the loss is skipped. Other losses (a critic's may grow as it should) are
# only reported if they are not finite, and never stop the job. Every repetition is bounded: a line of 60,000 spaces or
# digits would otherwise take hours to search.
_LOSS = re.compile(rb"(?i)(?<![a-z])(?P<what>(?:[a-z]{1,40}[ _/-])?loss)" + _VALUE)
_NORM = re.compile(rb"(?i)(?<![a-z])grad(?:ient)?s?[ _-]?norm" + _VALUE)
_REWARD = re.compile(rb"(?i)(?<![a-z_])(?:mean[ _])?rewards?(?:[/_]mean)?(?![a-z_/])" + _VALUE)
_EVALUATION = re.compile(rb"(?i)(?<![a-z])(val|eval|evaluation|test|valid|validation|dev)(?![a-z])")
# The words directly before "loss" in lines that don't report a step's loss. "5 min | loss nan" does report one.
_NOT_TRAINING = (b"no", b"best", b"min", b"lowest", b"last", b"final")
_TRAINING = (b"", *b"train training lm total mean avg average running step batch ce".split())
_STEP = re.compile(rb"(?i)\b(?:global[ _]?step|step|iter|iteration)\W{0,3}(\d{1,18})")
_COUNTER = re.compile(rb"\d{1,18}/\d{1,18}")
# transformers' Trainer ends with the mean over all steps: in a dict with train_runtime, and in the table of log_metrics.
_MEAN = re.compile(rb"train_runtime|^  train_loss\s{1,80}=\s{1,80}\S{1,40}\s{0,80}$")
_CODES = re.compile(rb"\x1b\[[0-9;?]{0,40}[A-Za-z]")


class LossMonitor:
    """Follows the losses of all ranks of one attempt."""

    def __init__(self) -> None:
        self._first: dict[int, list[float]] = {}  # rank -> its first losses
        self._bad: dict[int, int] = {}  # rank -> losses in a row that are not finite
        self._bad_norms: dict[int, int] = {}  # rank -> gradient norms in a row that are not finite
        self._high: dict[int, int] = {}  # rank -> losses in a row that are exploding
        self._since: dict[int, int] = {}  # rank -> step of the first bad one in a row
        self._newest_bad: dict[int, BadNumber] = {}  # rank -> its newest loss, if that is not finite
        # ("loss" or "reward", rank) -> (value, number of readings with this value)
        self._constant: dict[tuple[str, int], tuple[float, int]] = {}
        self._reported: set[tuple[int, str, bool]] = set()
        self._beating: set[int] = set()  # ranks that report their loss with stoker.beat: their lines are not read
        self._printing: set[int] = set()  # ranks that print losses
        self._counters: dict[int, list[bytes]] = {}  # rank -> counters in its newest progress bar
        self._incomplete: dict[int, bytes] = {}  # rank -> the start of a line whose end has not arrived
        self.newest: dict[int, tuple[int, float]] = {}  # rank -> (step, loss) of its newest loss, good or bad

    def heard(self, rank: int, step: int, loss: float) -> BadNumber | None:
        """Take a loss that a rank reported with stoker.beat. Return what is wrong with it if that is to be reported, or None."""
        self._beating.add(rank)
        return self._check_loss(rank, step, loss, "beat", "")

    def heard_all(self, losses: list[tuple[int, int, float]]) -> list[BadNumber]:
        """Take (step, rank, loss) of several ranks, sorted by step: averaging spreads a NaN, and the first rank is reported."""
        reports = (self.heard(rank, step, loss) for step, rank, loss in sorted(losses, key=lambda entry: entry[:2]))
        return [bad for bad in reports if bad is not None]

    def read(self, rank: int, data: bytes) -> list[BadNumber]:
        """Find losses in a chunk of a rank's output. Only complete lines count; most chunks without a loss cost one search."""
        if rank in self._beating or len(data) > MAX_CHUNK:
            return []
        if b"oss" not in data and b"OSS" not in data and rank not in self._incomplete:
            return []
        text = self._incomplete.pop(rank, b"") + data
        end = max(text.rfind(b"\n"), text.rfind(b"\r")) + 1
        if len(text) - end and len(text) - end < 4096:
            self._incomplete[rank] = text[end:]
        reports = (self._read_line(rank, _CODES.sub(b"", line)) for line in text[:end].splitlines())
        return [replace(bad, shared=len(self._printing) == 1) for bad in reports if bad is not None]

    def unresolved(self) -> list[BadNumber]:
        """Return, at the end of a run, the newest losses that are not finite, of ranks with too few in a row to be certain."""
        return [bad for rank, bad in sorted(self._newest_bad.items()) if self._bad[rank] < BAD_LOSSES_IN_A_ROW]

    def _read_line(self, rank: int, line: bytes) -> BadNumber | None:
        match = _LOSS.search(line)
        if match is None or _EVALUATION.search(line[: match.end("what")]):
            return None
        prefix = match["what"].lower().partition(b"loss")[0].rstrip(b" _/-")
        counter = _COUNTER.findall(line)
        # Skip a progress bar that is redrawn with the same counters: it repeats the same loss.
        if prefix in _NOT_TRAINING or (counter and counter == self._counters.get(rank)):
            return None
        self._counters[rank] = counter
        self._printing.add(rank)
        step_match = _STEP.search(line)
        step, value = int(step_match[1]) if step_match else 0, _parse_number(match["value"])
        if prefix == b"train" and math.isfinite(value) and _MEAN.search(line):
            return None
        text = line.decode("utf-8", "replace").strip()[:_MAX_QUOTE]
        reward = _REWARD.search(line)
        if reward is not None:  # in RL a loss of 0 is normal, so watch the reward
            return self._check_constant("reward", rank, step, _parse_number(reward["value"]), "line", text)
        if prefix not in _TRAINING:
            if math.isfinite(value):
                return None
            return self._report_once("loss", rank, step, value, "line", text, firm=False, stops=False)
        norm_match = _NORM.search(line)
        norm = _parse_number(norm_match["value"]) if norm_match is not None else 0.0
        if math.isfinite(norm):
            self._bad_norms[rank] = 0
        elif value == 0.0:  # transformers' Trainer prints 0 for losses that are NaN (logging_nan_inf_filter)
            value = norm
        else:
            self._bad_norms[rank] = self._bad_norms.get(rank, 0) + 1
            if self._bad_norms[rank] == 1:
                self._since[rank] = step
            firm = self._bad_norms[rank] >= BAD_NORMS_IN_A_ROW
            return self._report_once("grad-norm", rank, self._since[rank], norm, "line", text, firm)
        return self._check_loss(rank, step, value, "line", text)

    def _check_loss(self, rank: int, step: int, loss: float, source: str, line: str) -> BadNumber | None:
        self.newest[rank] = step, loss
        if math.isfinite(loss):
            constant = self._check_constant("loss", rank, step, loss, source, line)
            if constant is not None:
                return constant
            self._bad[rank] = 0
            self._newest_bad.pop(rank, None)
            first = self._first.setdefault(rank, [])
            if len(first) < FIRST_LOSSES:
                first.append(abs(loss))
                return None
            is_high = max(first) >= MIN_FIRST_LOSS and abs(loss) > EXPLODING_FACTOR * max(first)
            self._high[rank] = self._high.get(rank, 0) + 1 if is_high else 0
            if not is_high:
                return None
            firm = self._high[rank] >= EXPLODING_IN_A_ROW
            return self._report_once("exploding", rank, step, loss, source, line, firm)
        self._bad[rank] = self._bad.get(rank, 0) + 1
        if self._bad[rank] == 1:
            self._since[rank] = step
        self._newest_bad[rank] = BadNumber("loss", rank, self._since[rank], f"{loss:g}", source, line)
        firm = self._bad[rank] >= BAD_LOSSES_IN_A_ROW
        return self._report_once("loss", rank, self._since[rank], loss, source, line, firm)

    def _check_constant(
        self, what: str, rank: int, step: int, value: float, source: str, line: str
    ) -> BadNumber | None:
        """Return a number that has been the same in all readings so far, once per run, or None."""
        before, count = self._constant.get((what, rank), (value, 0))
        if value != before:
            value, count = math.nan, 0  # NaN never equals the next value, so this number is never reported again
        self._constant[what, rank] = value, count + 1
        if count + 1 != CONSTANT_READINGS or any(kind == "constant" for _, kind, _ in self._reported):
            return None
        self._reported.add((rank, "constant", False))
        return BadNumber("constant", rank, step, f"{what} {value:g}", source, line, stops=False)

    def _report_once(
        self, kind: str, rank: int, step: int, value: float, source: str, line: str, firm: bool, stops: bool = True
    ) -> BadNumber | None:
        """Return a bad number when it is first seen and when it is certain (`firm`), else None.

        A NaN that is certain is reported for the rank that had one at the earliest step, because averaging spreads it.
        """
        if (rank, kind, firm) in self._reported or (kind == "exploding" and not firm):
            return None
        self._reported.add((rank, kind, firm))
        bad = BadNumber(kind, rank, step, f"{value:g}", source, line, firm, stops)
        if not firm or kind != "loss":
            return bad
        earlier = [other for other in self._newest_bad.values() if 0 < other.step < step and self._bad[other.rank]]
        first = min(earlier, key=lambda other: other.step, default=bad)
        return replace(bad, rank=first.rank, step=first.step, line=first.line)


def _parse_number(text: bytes) -> float:
    return float(text.lower().replace(b"nan.0", b"nan").replace(b"inf.0", b"inf"))
