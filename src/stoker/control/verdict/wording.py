"""How a verdict on one rank is put: its exit code, its place, its first line."""

from __future__ import annotations

from stoker.contract.names import EX_SOFTWARE
from stoker.contract.shapes import RankEnd, Verdict

LINE = 500  # of one line of evidence: the log has the rest


def exit_code(end: RankEnd) -> int:
    """The guilty rank's own; 128 + n for a signal; 70 where that would be 0 or was our doing."""
    if not end.code or (end.ours and (end.error is None or end.code < 0)):
        return EX_SOFTWARE
    return end.code if end.code > 0 else 128 - end.code


def base(end: RankEnd, cause: str, summary: str, *, retryable: bool, evidence: list[str], fix: list[str]) -> Verdict:
    gpu = end.label if "GPU" in end.label else None
    return Verdict(
        "failed", cause, summary, exit_code(end), rank=end.rank, host=end.host or None, gpu=gpu, evidence=tuple(line[:LINE] for line in evidence),
        retryable=retryable, fix=tuple(fix),
    )  # fmt: skip


def place(end: RankEnd) -> str:
    error = end.error
    return f"{error.file}:{error.line}, in {error.function}" if error and error.file else "no place known"


def first_line(text: str, limit: int = 200) -> str:
    line = text.strip().splitlines()[0] if text.strip() else ""
    return line if len(line) <= limit else line[: limit - 1] + "…"
