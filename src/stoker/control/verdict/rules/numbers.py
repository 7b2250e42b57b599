"""Causes nan.*: a loss or gradient norm is not finite, has exploded or never changes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from stoker.contract.evidence import BadNumber, RankExit
from stoker.contract.units import rank_name
from stoker.control.verdict.catalogue import Case, CauseMatch, Family, get_cause, make_report
from stoker.control.verdict.exit_text import first_line

ORDER = 10

_STEP_BEFORE = "look at the step before it: the last good checkpoint still has good weights"
_GRADIENTS = (
    "check gradients for NaN and Inf before clip_grad_norm_, not after: clipping spreads one bad value to all layers"
)
# In the order in which to try them. Checking token ids is no advice: isnan() of an integer is always False.
_THEN = (
    _GRADIENTS,
    "a lower learning rate or a longer warm-up; max_grad_norm 1.0; bf16 rather than fp16",
    "labels out of range, an empty batch (0/0 in a mean), log or sqrt of 0 in the loss",
)
family = Family(__name__, STEP_BEFORE=_STEP_BEFORE, GRADIENTS=_GRADIENTS, THEN=_THEN)
family.entries("""
nan.loss: The loss is NaN or infinite in several steps in a row.
  seen: three losses in a row, from stoker.beat or from the step lines that a rank prints. A loss of 0 next to a gradient
      norm that is NaN counts: transformers' Trainer prints 0 for a NaN loss
  unless: the next loss is finite: one bad batch; validation losses are ignored
  fix: {STEP_BEFORE}
  fix: {THEN}
nan.grad-norm: The gradient norm is NaN or infinite in several steps in a row.
  seen: ten step lines in a row with such a grad_norm, and a finite loss
  unless: the next one is finite: a gradient scaler (fp16) overflows now and then, and skips that step
  fix: fp16: the loss scale never settles; bf16 needs no scaler
  fix: {THEN}
nan.constant: The loss, or the reward, never changes. Reported once; the job keeps running.
  seen: the same value in the first 20 readings, from stoker.beat or from the step lines that a rank prints
  unless: it changes once: a loss that has converged is not reported
  fix: are the trainable parameters in the optimizer, and do they get gradients? (requires_grad, frozen layers, detach())
  fix: is the learning rate 0, or still in a warm-up that begins at 0?
  fix: a loss of exactly 0: are all labels masked (-100)? a reward: does the reward function look at the completion?
nan.exploding: The loss has exploded.
  seen: five losses in a row above 100 × the largest of the first ten, if that is 0.1 or more
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
  fix: --preset stable: cautious values for all of these settings
  fix: if the replay does not reproduce it: `stoker burnin` compares the GPUs bit for bit
""")
def match_traced_nan(case: Case) -> CauseMatch | None:
    error = case.end.error
    if error is None or not _is_traced(case.end):
        return None
    message = first_line(error.message, 500)
    injected = re.search(r"injected by nan\.inject \S+", message)
    fix = ("nothing to fix: nan.inject injected this value as a test; train without it",) if injected else ()
    evidence = f"reported by rank {case.end.rank}, and the same on all ranks: {message}"
    return CauseMatch(message, (evidence,), fix)


def _is_traced(end: RankExit) -> bool:
    non_finite = ("NonFinite", "stoker.training.forensics.culprit")
    return end.error is not None and (end.error.type, end.error.module) == non_finite


def find_named_rank(ends: Sequence[RankExit]) -> RankExit | None:
    """Return the rank that a traced NaN names, or None. All ranks raise the same error, so the first to fail need not be guilty."""
    for end in ends:
        if not _is_traced(end) or end.error is None:
            continue
        match = re.search(r"\bon ranks? (\d{1,9})", end.error.message)
        return next((other for other in ends if match and _is_traced(other) and other.rank == int(match[1])), None)
    return None


_VERBS = {"loss": "the loss is", "exploding": "the loss has exploded to", "grad-norm": "the gradient norm is"}


def summarize_bad_number(bad: BadNumber, label: str, world_size: int, lasting: bool = False) -> str:
    """Return one line about a bad number; `lasting` means that it has been bad for several steps.

    If only one rank prints losses (`bad.shared`), the line doesn't blame that rank: any rank may have the bad loss.
    """
    if bad.kind == "constant":
        name, _, value = bad.value.rpartition(" ")
        return f"{rank_name(bad.rank, label)}: the {name} has been {value} in every reading since the start"
    text, at = f"{_VERBS[bad.kind]} {bad.value}", " at step"
    if lasting and bad.kind != "exploding":
        text, at = text.replace(" is ", " has been ", 1), " since step"
    if bad.step:
        text += f"{', seen after step' if bad.counted else at} {bad.step}"
    if lasting and (bad.kind == "exploding" or not bad.step):
        text += ", for several steps"
    if bad.shared and world_size > 1:
        return f"{text} (printed by rank {bad.rank}, for all ranks)"
    return f"{rank_name(bad.rank, label)}: {text}"


def make_loss_report(bad: BadNumber, label: str, world_size: int) -> dict[str, Any]:
    """Return the report of a bad number for which Stoker stops the job."""
    cause_id = f"nan.{bad.kind}"
    source = f"printed by rank {bad.rank}: {bad.line}"
    if bad.source == "beat":
        source = f"reported by stoker.beat: loss {bad.value}"
    rank = None if bad.shared and world_size > 1 else bad.rank
    text = summarize_bad_number(bad, label, world_size, lasting=True)
    return make_report(cause_id, text, [source, get_cause(cause_id).seen], rank=rank, step=bad.step)
