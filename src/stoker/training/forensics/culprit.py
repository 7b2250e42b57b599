"""A rank's verdict line and advice; and all ranks' reports as one line: where it began, on which rank. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from stoker.contract.frozen import frozen, replace
from stoker.contract.units import plural
from stoker.training.forensics import report as phases
from stoker.training.forensics.report import PHASES, Report, TensorStats, guilty

_GENTLER = (
    "a lower optim.learning_rate, a longer warm-up (optim.warmup_steps), or all cautious numbers at once: --preset"
    " stable"
)
_SAMPLES = "look at the samples' text in batch.json: broken encoding, one token repeated, a length nothing else has"
_DROP = "drop samples without a target when the data is prepared: chats without an assistant's turn, or cut before it"
_MASKED = (
    "a row of attention scores is masked from end to end: softmax over -inf only is NaN; let each position see at least"
    " itself"
)
_UNSEEN = "; no operation that torch's dispatcher saw made it: a Triton or C++ kernel, or a hook"
_BURNIN = "`stoker burnin` compares the cards bit for bit and names one that computes something else"
_LAST_GOOD = (
    "a checkpoint from before this step, if there is one, still has good weights: checkpoint.resume takes its folder"
)


class NonFinite(RuntimeError):
    """A step's loss or gradient is no number. Its message is the summary that all ranks agree on."""


@frozen
class Culprits:
    ranks: tuple[int, ...]  # empty: nobody's replay went wrong
    summary: str


def decide(reports: Sequence[Report]) -> Culprits:
    """A bad forward comes before a bad backward, and that before what only came in through the reduction."""
    ordered = sorted(reports, key=lambda one: one.rank)
    step = ordered[0].step
    worst = min((PHASES.index(one.phase) for one in ordered if guilty(one)), default=None)
    if worst is None:
        return Culprits((), f"step {step}: {_nobody(ordered)}")
    first = [one for one in ordered if PHASES.index(one.phase) == worst]
    ranks = tuple(one.rank for one in first)
    line = f"step {step}: {_what(first[0])} {_ranks(ranks, ordered[0].world)}{_ids(first)}{_others(first)}"
    injected = next((one.injected for one in first if one.injected), "")
    if injected:
        line += f"; injected by nan.inject {injected}, to test"
    return Culprits(ranks, line)


def _what(one: Report) -> str:
    if one.phase == phases.TARGETS:
        return "every target is masked, the loss is a mean over no tokens"
    if one.phase == phases.NORM:
        return f"the gradient norm overflows though every gradient is finite, the largest is in {one.parameter},"
    return f"{one.what} first in {place(one)}"


def _ranks(ranks: tuple[int, ...], world: int) -> str:
    if len(ranks) == world and world > 1:
        return f"on rank {ranks[0]} and all others"
    return f"on rank {ranks[0]}" if len(ranks) == 1 else f"on ranks {', '.join(str(rank) for rank in ranks)}"


def _ids(first: list[Report]) -> str:
    told = [(one.rank, samples(one.sample_ids)) for one in first if one.sample_ids]
    if len(first) == 1 and told:
        return f", {told[0][1]}"
    return "".join(f"{';' if number else ','} {words} (rank {rank})" for number, (rank, words) in enumerate(told[:4]))


def _others(first: list[Report]) -> str:
    """The same kind of failure elsewhere, on another rank: said once, for the first that differs."""
    places = [(one.op, one.module, one.parameter) for one in first]
    other = next((one for one, at in zip(first, places, strict=True) if at != places[0]), None)
    if other is None or other.phase in (phases.TARGETS, phases.NORM):
        return ""
    return f"; on rank {other.rank} in {place(other)}"


def _nobody(reports: list[Report]) -> str:
    one = reports[0]
    numbers = f"loss {one.loss:.6g}, gradient norm {one.grad_norm:.6g}"
    raised = [report for report in reports if report.phase == phases.FAILED]
    if raised:
        return f"{numbers}, and the replay failed on rank {raised[0].rank}: {_last_line(raised[0].problem)}"
    return (
        f"{numbers}, not reproduced in the replay: a transient hardware error, a nondeterministic kernel or the"
        " compiled code"
    )


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
    if report.phase in (phases.FORWARD, phases.BACKWARD):
        backward = report.phase == phases.BACKWARD
        where = f"the backward of {report.module}" if backward else f"{report.module}, forward"
        source = f"; it came from {report.source}" if report.source else ""
        return f"first {report.what}: {report.op} in {where}{batch}{source}"
    if report.phase == phases.GRADIENT:
        how = f" by {report.op}" if report.op else _UNSEEN
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
        return f"the replay raised before anything bad was seen: {_last_line(report.problem)}"
    elsewhere = ", or another rank" if report.world > 1 else ""
    return (
        "not reproduced, the replay came out finite: a transient hardware error, a nondeterministic kernel or the"
        f" compiled code{elsewhere}"
    )


def _last_line(problem: str) -> str:
    return problem.strip().splitlines()[-1] if problem.strip() else "no message"


def advice(report: Report) -> tuple[str, ...]:
    if report.injected:
        return (f"nothing to fix: nan.inject {report.injected} put this value there, to test; leave it out to train",)
    if report.phase == phases.PARAMETERS:
        return (_LAST_GOOD, _GENTLER, "if it is there at the first step: the loaded weights are damaged")
    if report.phase == phases.TARGETS:
        return (_DROP, _SAMPLES)
    softmax = report.phase == phases.FORWARD and report.op.endswith("softmax")
    if softmax and any(one.inf and not one.nan for one in report.inputs):
        return (_MASKED, _SAMPLES)
    if report.phase in (phases.FORWARD, phases.BACKWARD, phases.GRADIENT, phases.NORM):
        dtype = report.output.dtype if report.output is not None else ""
        half = ("fp16 ends at 65504: compute.dtype bf16 has fp32's range",) if dtype == "float16" else ()
        return (*half, _GENTLER, *((_SAMPLES,) if report.sample_ids else ()), _LAST_GOOD)
    if report.phase == phases.REDUCED:
        return ("look at the rank the summary names",)
    if report.phase == phases.FAILED:
        return (
            "the traceback is in report.json",
            "the eager replay needs more memory than the compiled step: use a smaller batch.micro",
        )
    return (_BURNIN, "compute.compile off and compute.deterministic: does the same step fail again?", _LAST_GOOD)


def worded(report: Report) -> Report:
    return replace(report, verdict=verdict(report), advice=advice(report))


_WIDE, _NARROW = "=" * 80, "=" * 40
_LISTED = 8


# What the banner's head names, by the phase in which the first bad number was made.
_HEADS = {phases.PARAMETERS: "WEIGHT", phases.TARGETS: "LOSS", phases.FORWARD: "ACTIVATION"}


def banner(report: Report, where: str = "") -> str:
    bad, of = (report.loss, "LOSS") if math.isfinite(report.grad_norm) else (report.grad_norm, "GRADIENT")
    kind = "Inf" if math.isinf(bad) else "NaN"
    if report.phase in _HEADS:  # where it began, not where it was noticed
        kind, of = report.what.lstrip("-") or kind, _HEADS[report.phase]
    lines = [
        _WIDE,
        f"{kind} {of} DETECTED [{report.label}]",
        _WIDE,
        f"Step: {report.step}",
        f"Loss: {_number(report.loss)}",
        f"Gradient Norm: {_number(report.grad_norm)}",
        "",
        _NARROW,
        "ORIGIN:",
        _NARROW,
        report.verdict,
    ]
    if report.sample_ids:
        lines.append(f"  from {samples(report.sample_ids)}")
    if report.output is not None:
        lines += ["", *table((report.output, *report.inputs))]
    lines += [
        "",
        _NARROW,
        "PROBLEMATIC TENSORS:",
        _NARROW,
        *_section("Parameters", report.parameters),
        *_section("Gradients", _bad(report.gradients)),
    ]
    if not report.parameters and not _bad(report.gradients):
        lines.append("no parameter and no gradient of this rank is bad")
    lines += [_NARROW, "", "What to do:", *(f"  {number}. {line}" for number, line in enumerate(report.advice, 1))]
    if where:
        lines += ["", f"Debug tensors saved: {where}", f"Look at them: stoker nan {where}"]
    return "\n".join(lines)


def _number(value: float) -> str:
    return f"{value:.4f}" if 1e-3 <= abs(value) < 1e6 or value == 0 else f"{value:g}"


def _bad(stats: tuple[TensorStats, ...]) -> tuple[TensorStats, ...]:
    return tuple(one for one in stats if one.bad)


def _section(title: str, stats: tuple[TensorStats, ...]) -> list[str]:
    if not stats:
        return []
    word = "NaN" if any(one.nan for one in stats) else "Inf"
    lines = [f"⚠️  {title} with {word} ({plural(len(stats), 'layer')}):"]
    for one in stats[:_LISTED]:
        lines.append(f"  • {one.name} (shape: {list(one.shape)}, {one.dtype})")
        if one.nan or not one.inf:
            lines.append(f"    NaN count: {one.nan}/{one.count}")
        if one.inf:
            lines.append(f"    Inf count: {one.inf}/{one.count}")
    if len(stats) > _LISTED:
        lines.append(f"  … and {len(stats) - _LISTED} more")
    names = ", ".join(one.name for one in stats[:2]) + (", ..." if len(stats) > 2 else "")
    return [*lines, "", f"Total layers with {word} {title.lower()}: {len(stats)}", f"Affected layers: [{names}]"]


def table(stats: tuple[TensorStats, ...]) -> list[str]:
    """One line per tensor; the range is of what is finite."""
    rows: list[tuple[str, ...]] = [("tensor", "shape", "dtype", "NaN", "Inf", "min", "max", "absmax")]
    for one in stats:
        shown = [f"{value:.4g}" if value is not None else "n/a" for value in (one.min, one.max, one.absmax)]
        size = "×".join(map(str, one.shape)) or "scalar"
        rows.append((one.name, size, one.dtype, str(one.nan), str(one.inf), *shown))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def headline(report: Report) -> str:
    """One rank among several: its verdict, shortly."""
    fine = report.phase in (phases.CLEAN, phases.REDUCED)
    return f"rank {report.rank} [{report.label}]: {'fine here' if fine else report.verdict}"
