"""nan.*: losses that are not finite, explode or never change."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from stoker.contract.evidence import BadNumber, RankExit
from stoker.contract.units import rank_name
from stoker.control.verdict.catalogue import Case, CauseMatch, Family, named, report
from stoker.control.verdict.exit_text import first_line

ORDER = 10

# In the order that finds it: isnan() on token ids is always False, and clipping before looking spreads a NaN.
_STEP_BEFORE = "look at the step before it: the last good checkpoint still has good weights"
_GRADIENTS = (
    "check gradients for NaN and Inf before clip_grad_norm_, not after: clipping spreads one bad value to all layers"
)
_THEN = (
    _GRADIENTS,
    "a lower learning rate or a longer warm-up; max_grad_norm 1.0; bf16 rather than fp16",
    "labels out of range, an empty batch (0/0 in a mean), log or sqrt of 0 in the loss",
)
family = Family(__name__, STEP_BEFORE=_STEP_BEFORE, GRADIENTS=_GRADIENTS, THEN=_THEN)
family.entries("""
nan.loss: The loss is NaN or infinite, and stays so.
  seen: three losses in a row, from stoker.beat or from the step lines a rank prints. A loss of 0 next to a gradient
      norm that is NaN counts: transformers' Trainer prints 0 for a NaN loss
  unless: the next loss is a number: one bad batch; validation losses are not read
  fix: {STEP_BEFORE}
  fix: {THEN}
nan.grad-norm: The gradient norm is NaN or infinite, and stays so.
  seen: ten step lines in a row with such a grad_norm, and a loss that is a number
  unless: the next one is a number: a gradient scaler (fp16) overflows now and then, and skips that step
  fix: fp16: the loss scale never settles; bf16 needs no scaler
  fix: {THEN}
nan.constant: The loss, or the reward, never changes. Reported once; the job keeps running.
  seen: the same value in the first 20 readings, from stoker.beat or from the step lines a rank prints
  unless: it changes once: a loss that has converged is not reported
  fix: are the trainable parameters in the optimizer, and do they get gradients? (requires_grad, frozen layers, detach())
  fix: is the learning rate 0, or still in a warm-up that begins at 0?
  fix: a loss of exactly 0: are all labels masked (-100)? a reward: does the reward function look at the completion?
nan.exploding: The loss has exploded.
  seen: five losses in a row over 100 × the largest of the first ten, and that is 0.1 or more
  unless: it comes back: a spike
  fix: a lower learning rate or a longer warm-up; max_grad_norm 1.0; `stable` settings
  fix: {STEP_BEFORE}
  fix: {GRADIENTS}
""")


@family.cause("""
nan.traced: A step's loss or gradient is NaN or infinite, and its replay shows where that began.
  seen: stoker's own training found a loss or a gradient that is not finite, replayed the step and named the first bad
      operation (NonFinite)
  unless: a script that reports or prints its losses and continues: nan.loss
  fix: stoker nan   # the first bad operation, its tensors, the samples; nan_step_N/ in the run directory has the
      files
  fix: a lower optim.learning_rate or a longer warm-up (optim.warmup_steps)
  fix: --preset stable: all cautious numbers at once
  fix: if the replay does not reproduce it: `stoker burnin` compares the cards bit for bit
""")
def traced(case: Case) -> CauseMatch | None:
    if not _is_traced(case.end):
        return None
    said = first_line(case.message, 500)
    injected = re.search(r"injected by nan\.inject \S+", said)
    fix = ("nothing to fix: nan.inject put this value there, to test; leave it out to train",) if injected else ()
    return CauseMatch(said, (f"said by rank {case.end.rank}, which all ranks agree on: {said}",), fix)


def _is_traced(end: RankExit) -> bool:
    own = ("NonFinite", "stoker.training.forensics.culprit")
    return end.error is not None and (end.error.type, end.error.module) == own


def named_by(ends: Sequence[RankExit]) -> RankExit | None:
    """All ranks raise the same finding at once: the guilty one is whom it names, not who was first to raise it."""
    for end in ends:
        if not _is_traced(end) or end.error is None:
            continue
        found = re.search(r"\bon ranks? (\d{1,9})", end.error.message)
        return next((one for one in ends if found and _is_traced(one) and one.rank == int(found[1])), None)
    return None


_WHAT = {"loss": "the loss is", "exploding": "the loss has exploded to", "grad-norm": "the gradient norm is"}


def summary(bad: BadNumber, label: str, world: int) -> str:
    """`shared`: a loss that one rank prints for all says nothing about whose it is."""
    if bad.kind == "constant":
        what, _, value = bad.value.rpartition(" ")
        return f"{rank_name(bad.rank, label)}: the {what} has been {value} in every reading since the start"
    at = f"{', seen after step' if bad.counted else ' at step'} {bad.step}" if bad.step else ""
    if bad.shared and world > 1:
        return f"{_WHAT[bad.kind]} {bad.value}{at} (printed by rank {bad.rank}, for all ranks)"
    return f"{rank_name(bad.rank, label)}: {_WHAT[bad.kind]} {bad.value}{at}"


def trouble(bad: BadNumber, label: str, world: int) -> dict[str, Any]:
    cause = f"nan.{bad.kind}"
    printed = f"printed by rank {bad.rank}: {bad.line}"
    seen = f"reported by stoker.beat: loss {bad.value}" if bad.source == "beat" else printed
    rank = None if bad.shared and world > 1 else bad.rank
    said = f"{summary(bad, label, world)}, and stays so"
    return report(cause, said, [seen, named(cause).seen], rank=rank, step=bad.step)
