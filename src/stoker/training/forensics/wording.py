"""How a finding is said: one verdict line, and what to do about it. Pure."""

from __future__ import annotations

from stoker.contract.shape import replace
from stoker.training.forensics import report as phases
from stoker.training.forensics.report import Report

_GENTLER = (
    "a lower optim.learning_rate, a longer warm-up (optim.warmup_steps), or all cautious numbers at once: --preset"
    " stable"
)
_SAMPLES = "look at the samples' text in batch.json: broken encoding, one token repeated, a length nothing else has"
_BURNIN = "`stoker burnin` compares the cards bit for bit: one that computes something else is named"
_LAST_GOOD = "the newest checkpoint from before this step still has sound weights: checkpoint.resume takes its folder"


def place(report: Report) -> str:
    """aten.bmm of layers.3.attention (forward); where there is no operation: what was bad."""
    if report.phase == phases.PARAMETERS:
        return f"parameter {report.parameter}, which held it before the step began"
    if report.phase == phases.GRADIENT:
        return f"the gradient of {report.parameter or 'a parameter'}" + (f" ({report.op})" if report.op else "")
    return f"{report.op} of {report.module} ({report.phase})"


def samples(ids: tuple[int, ...], most: int = 8) -> str:
    if not ids:
        return ""
    more = f" and {len(ids) - most} more" if len(ids) > most else ""
    return f"{'sample' if len(ids) == 1 else 'samples'} {', '.join(str(one) for one in ids[:most])}{more}"


def verdict(report: Report) -> str:
    batch = f", micro-batch {report.micro_batch}" if report.micro_batch is not None else ""
    if report.phase == phases.PARAMETERS:
        return (
            f"parameter {report.parameter} already held {report.what} when the step began: an earlier step or the"
            " checkpoint put it there"
        )
    if report.phase == phases.TARGETS:
        return f"every target is masked{batch}, {samples(report.sample_ids)}: the loss is a mean over no tokens (0/0)"
    if report.phase == phases.FORWARD:
        return f"first {report.what}: {report.op} in {report.module}, forward{batch}" + (
            f"; it came from {report.source}" if report.source else ""
        )
    if report.phase == phases.BACKWARD:
        return f"first {report.what}: {report.op} in the backward of {report.module}{batch}" + (
            f"; it came from {report.source}" if report.source else ""
        )
    if report.phase == phases.GRADIENT:
        how = (
            f" by {report.op}"
            if report.op
            else "; no operation that torch's dispatcher saw made it: a Triton or C++ kernel, or a hook"
        )
        return f"first {report.what}: in the gradient of {report.parameter or 'a parameter'}{how}{batch}"
    if report.phase == phases.NORM:
        top = report.gradients[0] if report.gradients else None
        largest = (
            f"; the largest is {top.absmax:.3g} in {top.name}" if top is not None and top.absmax is not None else ""
        )
        return f"every gradient is finite, but the sum of their squares overflows float32{largest}"
    if report.phase == phases.REDUCED:
        return "finite on this rank until another rank's values came in: theirs were bad"
    if report.phase == phases.FAILED:
        return (
            "the replay raised before anything bad was seen:"
            f" {report.problem.strip().splitlines()[-1] if report.problem.strip() else 'no message'}"
        )
    elsewhere = ", or another rank" if report.world > 1 else ""
    return (
        "not reproduced, the replay came out finite: a transient hardware error, a nondeterministic kernel or the"
        f" compiled code{elsewhere}"
    )


def advice(report: Report) -> tuple[str, ...]:
    if report.phase == phases.PARAMETERS:
        return (_LAST_GOOD, _GENTLER, "if it is there at the first step: the loaded weights are damaged")
    if report.phase == phases.TARGETS:
        return (
            (
                "drop samples without a target when the data is prepared: chats without an assistant's turn, or cut"
                " before it"
            ),
            _SAMPLES,
        )
    if (
        report.phase == phases.FORWARD
        and report.op.endswith("softmax")
        and any(one.inf and not one.nan for one in report.inputs)
    ):
        return (
            (
                "a row of attention scores is masked from end to end: softmax over -inf only is NaN; let each position"
                " see at least itself"
            ),
            _SAMPLES,
        )
    if report.phase in (phases.FORWARD, phases.BACKWARD, phases.GRADIENT, phases.NORM):
        dtype = report.output.dtype if report.output is not None else ""
        half = ("fp16 ends at 65504: compute.dtype bf16 has fp32's range",) if dtype == "float16" else ()
        return (*half, _GENTLER, *((_SAMPLES,) if report.sample_ids else ()), _LAST_GOOD)
    if report.phase == phases.REDUCED:
        return ("look at the rank the summary names",)
    if report.phase == phases.FAILED:
        return (
            "the traceback is in report.json",
            "the eager replay needs more memory than the compiled step: a smaller batch.micro leaves room for it",
        )
    return (_BURNIN, "compute.compile off and compute.deterministic: does the same step fail again?", _LAST_GOOD)


def worded(report: Report) -> Report:
    return replace(report, verdict=verdict(report), advice=advice(report))
