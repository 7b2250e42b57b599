"""What a non-finite number causes; what nan.inject asks for, and whether a run can do it. No torch."""

from __future__ import annotations

import math
import re

from stoker.contract.errors import EX_CONFIG, Refusal
from stoker.contract.frozen import frozen, option
from stoker.contract.limits import text_option
from stoker.contract.options import suggest

GRAMMAR = re.compile(r"(?:(?P<kind>nan|inf|grad):)?(?P<where>[^@:\s]+)@(?P<step>\d+)(?:@(?P<rank>\d+))?")
_OUTSIDE = ("embed", "norm", "head")
_OF_LAYER = ("", ".attention_norm", ".attention", ".attention.qkv", ".attention.out", ".attention.q_norm", ".attention.k_norm",
             ".mlp_norm", ".mlp", ".mlp.gate_up", ".mlp.down")  # fmt: skip
_BARE = ("score", "trust")  # parameters that are in no module: the reward model's


@frozen
class NanConfig:
    check: bool = option("look at loss and gradient norm of every step, on the device, one step late", default=True)
    dump: bool = option("write nan_step_N/: parameters, gradients, bad activations, batch, verdict", default=True)
    inject: str = text_option("WHERE@STEP")(
        "inject a fault, to test: WHERE@STEP[@RANK], e.g. layers.1.attention@5@0 (a NaN in its output), grad:layers.0.mlp.down.weight@5"
        " (an Inf in a gradient)"
    )


@frozen
class Injection:
    where: str  # a module; of a gradient: a parameter
    step: int
    rank: int | None = None  # None: all of them
    value: float = math.nan
    gradient: bool = False
    text: str = ""  # as nan.inject has it


def parse(text: str) -> Injection | None:
    """`layers.1.attention@5@0`, `inf:layers.1.mlp@5`, `grad:layers.0.mlp.down.weight@5`; None: empty."""
    if not text:
        return None
    found = GRAMMAR.fullmatch(text.strip())
    if found is None:
        raise Refusal(
            f"nan.inject {text!r} is not WHERE@STEP[@RANK]; write layers.1.attention@5@0, inf:layers.1.mlp@5 or"
            " grad:head.weight@5",
            EX_CONFIG,
        )
    value = math.nan if found["kind"] in (None, "nan") else math.inf
    rank = int(found["rank"]) if found["rank"] else None
    return Injection(found["where"], int(found["step"]), rank, value, found["kind"] == "grad", text.strip())


def misplaced(told: Injection, layers: int) -> str:
    """Why no model of so many layers has that place; empty where it may have it."""
    numbered = re.match(r"layers\.(\d+)(?![^.])", told.where)
    if numbered and int(numbered[1]) >= layers:
        return f"there is no layer {numbered[1]}: the model's are 0 to {layers - 1}"
    known = [*_OUTSIDE, *(f"layers.{numbered[1] if numbered else 0}{part}" for part in _OF_LAYER)]
    if told.gradient:
        known = [*(f"{name}.weight" for name in known), *_BARE]
    if told.where in known:
        return ""
    return f"the model has no {'parameter' if told.gradient else 'module'} {told.where}{suggest(told.where, known)}"
