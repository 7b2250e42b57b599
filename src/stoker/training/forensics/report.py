"""What an investigation found on one rank: shapes that cross from the rank to the record and to `stoker nan`. No torch here."""

from __future__ import annotations

import math
from typing import Any

from stoker.contract.shape import as_json, fields_of, shape

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


@shape
class TensorStats:
    """min, max and absmax are of the finite part; None where there is none."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    count: int
    nan: int
    inf: int
    min: float | None = None
    max: float | None = None
    absmax: float | None = None

    @property
    def bad(self) -> int:
        return self.nan + self.inf


@shape
class Report:
    step: int
    rank: int
    world: int
    label: str  # GPU 6, CPU 0
    loss: float
    grad_norm: float
    phase: str
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
    schema: int = SCHEMA

    def to_json(self) -> dict[str, Any]:
        """Strict JSON: a number that is none is written as a word."""
        found: dict[str, Any] = as_json(self)
        return {**found, "loss": _word(self.loss), "grad_norm": _word(self.grad_norm)}

    @staticmethod
    def from_json(data: dict[str, Any]) -> Report:
        """Raises KeyError, TypeError or ValueError on anything that is no report."""
        known = {name: value for name, value in data.items() if name in fields_of(Report)}
        for name in ("inputs", "gradients", "parameters"):
            known[name] = tuple(_stats(one) for one in known.get(name) or ())
        for name in ("sample_ids", "advice"):
            known[name] = tuple(known.get(name) or ())
        known["output"] = _stats(known["output"]) if known.get("output") else None
        known["loss"], known["grad_norm"] = float(known["loss"]), float(known["grad_norm"])
        return Report(**known)


def _word(value: float) -> float | str:
    return value if math.isfinite(value) else str(float(value))


def _stats(data: dict[str, Any]) -> TensorStats:
    known = {name: value for name, value in data.items() if name in fields_of(TensorStats)}
    return TensorStats(**{**known, "shape": tuple(known["shape"])})


def guilty(report: Report) -> bool:
    """It went wrong on this rank, whatever the others sent."""
    return report.phase not in (REDUCED, FAILED, CLEAN)
