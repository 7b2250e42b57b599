"""nan.*: losses that are no numbers any more."""

from __future__ import annotations

from typing import Any

from stoker.contract.names import EX_SOFTWARE
from stoker.control.verdict.catalogue import CATALOGUE, entry

# Playbook 2.5 of the notes, in the order that finds it: isnan() on token ids is always False, and clipping before looking spreads a NaN everywhere.
_FIX = (
    "look at the step before it: the last good checkpoint still has sound weights",
    "check gradients for NaN and Inf before clip_grad_norm_, not after: clipping spreads one bad value to all layers",
    "a lower learning rate or a longer warm-up; max_grad_norm 1.0; bf16 rather than fp16",
    "labels out of range, an empty batch (0/0 in a mean), log or sqrt of 0 in the loss",
)

entry(
    "nan.loss", "The loss is NaN or infinite, and stays so.", seen="three losses in a row, from stoker.beat or from the step lines a rank prints",
    contradicts="the next loss is a number: one bad batch; validation losses are not read", fix=_FIX,
)  # fmt: skip
entry(
    "nan.exploding", "The loss has exploded.", seen="five losses in a row over 100 × the largest of the first ten, and that is 0.1 or more",
    contradicts="it comes back: a spike",
    fix=("a lower learning rate or a longer warm-up; max_grad_norm 1.0; `stable` settings", *_FIX[:2]),
)  # fmt: skip


def summary(kind: str, rank: int, label: str, step: int, value: str) -> str:
    at = f" at step {step}" if step else ""
    if kind == "exploding":
        return f"rank {rank} ({label}): the loss has exploded to {value}{at}"
    return f"rank {rank} ({label}): the loss is {value}{at}"


def trouble(kind: str, rank: int, label: str, step: int, value: str, source: str, line: str) -> dict[str, Any]:
    known = CATALOGUE[f"nan.{kind}"]
    seen = [f"told by stoker.beat: loss {value}"] if source == "beat" else [f"printed by rank {rank}: {line}"]
    return {
        "cause": known.id, "rank": rank, "exit_code": EX_SOFTWARE, "summary": summary(kind, rank, label, step, value) + ", and stays so",
        "evidence": [*seen, known.seen], "retryable": known.retryable, "fix": list(known.fix), "step": step,
    }  # fmt: skip
