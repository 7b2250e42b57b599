"""The report as people read it: the field notes' banner, with the origin first and its consequences after. Pure."""

from __future__ import annotations

import math

from stoker.training.forensics import report as phases
from stoker.training.forensics.culprit import samples
from stoker.training.forensics.report import Report, TensorStats

_WIDE, _NARROW = "=" * 80, "=" * 40
_LISTED = 8


def banner(report: Report, where: str = "") -> str:
    lines = [
        _WIDE,
        f"{_title(report)} [{report.label}]",
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


def _title(report: Report) -> str:
    if math.isfinite(report.grad_norm):
        return f"{_kind(report.loss)} LOSS DETECTED"
    return f"{_kind(report.grad_norm)} GRADIENT DETECTED"


def _kind(value: float) -> str:
    return "Inf" if math.isinf(value) else "NaN"


def _number(value: float) -> str:
    return f"{value:.4f}" if 1e-3 <= abs(value) < 1e6 or value == 0 else f"{value:g}"


def _bad(stats: tuple[TensorStats, ...]) -> tuple[TensorStats, ...]:
    return tuple(one for one in stats if one.bad)


def _section(title: str, stats: tuple[TensorStats, ...]) -> list[str]:
    if not stats:
        return []
    word = "NaN" if any(one.nan for one in stats) else "Inf"
    lines = [f"⚠️  {title} with {word} ({len(stats)} layers):"]
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
