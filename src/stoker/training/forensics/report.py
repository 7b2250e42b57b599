"""What an investigation found on one rank, for the record and `stoker nan`. No torch."""

from __future__ import annotations

import math
from typing import Any

from stoker.contract.frozen import as_json, frozen, replace
from stoker.contract.text import escape
from stoker.contract.typed_values import Real, read_frozen, read_value

SCHEMA = 1

# Report.phase, in the order of guilt: what went wrong earlier in a step explains what went wrong later, on any rank.
PARAMETERS = "parameters"  # weights that were no numbers before the step began
TARGETS = "targets"  # nothing to learn from: every target of the batch is masked
FORWARD = "forward"
BACKWARD = "backward"
GRADIENT = "gradient"  # a parameter's gradient, when it was summed up or after that
NORM = "norm"  # every gradient is a number, the sum of their squares is not
REDUCED = "reduced"  # fine here until another rank's values came in, by a reduction or a gather
FAILED = "failed"  # the replay itself raised
CLEAN = "clean"  # the replay came out finite
PHASES = (PARAMETERS, TARGETS, FORWARD, BACKWARD, GRADIENT, NORM, REDUCED, FAILED, CLEAN)


@frozen
class TensorStats:
    """min, max and absmax are of the finite part; None where there is none."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    count: int
    nan: int
    inf: int
    min: Real | None = None
    max: Real | None = None
    absmax: Real | None = None

    @property
    def bad(self) -> int:
        return self.nan + self.inf


@frozen
class Report:
    step: int
    rank: int
    world: int
    label: str  # GPU 6, CPU 0
    loss: float
    grad_norm: float
    phase: str = CLEAN
    what: str = ""  # NaN | Inf | -Inf: the first bad value
    op: str = ""  # aten.bmm
    module: str = ""  # layers.3.attention
    parameter: str = ""  # whose gradient, or which weight
    source: str = ""  # where a bad input came from that no operation of the replay made
    micro_batch: int | None = None
    sample_ids: tuple[int, ...] = ()  # of the bad rows where they can be told, else of the micro-batch
    output: TensorStats | None = None
    inputs: tuple[TensorStats, ...] = ()
    gradients: tuple[TensorStats, ...] = ()  # those with NaN or Inf
    parameters: tuple[TensorStats, ...] = ()  # those with NaN or Inf
    verdict: str = ""
    advice: tuple[str, ...] = ()
    problem: str = ""  # the traceback of a replay that raised
    injected: str = ""  # the value of nan.inject, where it put a bad value into this step on this rank
    schema: int = SCHEMA

    def to_json(self) -> dict[str, Any]:
        """Strict JSON: a number that is none is written as a word."""
        found: dict[str, Any] = as_json(self)
        return {**found, "loss": _word(self.loss), "grad_norm": _word(self.grad_norm)}

    @staticmethod
    def from_json(data: dict[str, Any]) -> Report:
        """Raises ValueError on anything that is no report."""
        if not isinstance(data, dict):
            raise ValueError(f"an object is expected, found a {type(data).__name__}")
        numbers = {name: _number(data[name]) for name in ("loss", "grad_norm") if name in data}
        report = replace(read_frozen(Report, {**data, **dict.fromkeys(numbers, 0.0)}), **numbers)
        if report.phase not in PHASES:
            raise ValueError(f"phase: {escape(report.phase, 40)!r} is not one of {', '.join(PHASES)}")
        if report.schema != SCHEMA:
            raise ValueError(f"schema: {report.schema} instead of {SCHEMA}")
        return report


def _word(value: float) -> float | str:
    return value if math.isfinite(value) else str(float(value))


def _number(value: Any) -> float:
    """A number or the word for one that JSON has not."""
    if value in ("nan", "inf", "-inf"):
        return float(value)
    number: float = read_value("Real", value)
    return number


def guilty(report: Report) -> bool:
    """It went wrong on this rank, whatever the others sent."""
    return report.phase not in (REDUCED, FAILED, CLEAN)
