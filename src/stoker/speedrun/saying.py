"""What the console is told: a stage's headline number, its progress, how it failed. Pure but for reading a run's files."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from typing import Any

from stoker.contract import layout, redact
from stoker.contract.quantities import span
from stoker.contract.untrusted import parse_json
from stoker.control.record import reader
from stoker.speedrun.gather import number_at

_TAIL = 4096
_OURS = "stoker: "


def headline(stage: str, metrics: Mapping[str, Any]) -> str:
    """The one number of a stage; empty where it has none."""

    def at(*path: str) -> float | None:
        return number_at(metrics, *path)

    def joined(*parts: tuple[str, float | None]) -> str:
        return ", ".join(text.format(value) for text, value in parts if value is not None)

    if stage == "tokenizer":
        return joined(
            ("{:.2f} bytes per token", at("bytes_per_token")),
            ("a token per word would have {:.2f}", at("words_bytes_per_token")),
        )
    if stage in ("pretrain", "midtrain", "sft"):
        return joined(("{:.3f} bits per byte held out", at("val_bits_per_byte")), ("loss {:.3f}", at("val_loss")))
    if stage == "reward":
        return joined(("{:.1%} of held-out pairs right", at("accuracy")))
    if stage == "density":
        return joined(
            ("{:.0f} prompts", at("prompts")),
            ("weights from {:.2f}", at("weight_min")),
            ("to {:.2f}", at("weight_max")),
        )
    if stage == "grpo":
        return joined(("reward {:.3f} at first", at("reward_first")), ("{:.3f} at last", at("reward_last")))
    if stage == "evaluate":
        cut = at("all", "cut_accuracy") or None  # 0: nothing to report
        sampled = ("{:.1%} of sampled answers", at("all", "sampled_accuracy"))
        return joined(
            ("{:.1%} of held-out questions right", at("all", "accuracy")),
            sampled,
            ("{:.1%} cut at the token limit", cut),
        )
    verdict = metrics.get("verdict")
    return str(verdict) if stage == "diversity" and verdict else ""


def progress(run: str | None, steps: int) -> str:
    """The newest line of a run's metrics; empty before there is one."""
    if run is None:
        return ""
    try:
        with open(os.path.join(run, layout.METRICS), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL))
            lines = [line for line in file.read().split(b"\n")[:-1] if line.strip()]
    except FileNotFoundError:
        return ""
    if not lines:
        return ""
    try:
        row = parse_json(lines[-1])
    except ValueError:
        return ""  # longer than the tail
    done = number_at(row, "step")
    parts = [f"step {done + 1:.0f}{f' of {steps}' if steps else ''}"] if done is not None else []
    parts += [f"{name} {value:.3f}" for name in ("loss", "reward") if (value := number_at(row, name)) is not None]
    return ", ".join(parts)


def trouble(run: str | None, code: int, log: str, log_from: int) -> tuple[str, str]:
    """(how it failed, what to do), from its verdict, or its rank's own refusal; from the last line it said where there
    is none, as before the start.
    """
    said = reader.read_json(os.path.join(run, layout.VERDICT)) if run else None
    if isinstance(said, dict) and said.get("status") not in (None, "completed"):
        evidence = said.get("evidence")
        refusals = (
            [line for line in evidence if isinstance(line, str) and line.startswith(_OURS)]
            if isinstance(evidence, list)
            else []
        )
        if refusals:
            return refusals[-1].removeprefix(_OURS).strip(), ""
        fix = said.get("fix")
        return str(said.get("summary", "")), str(fix[0]) if isinstance(fix, list) and fix else ""
    if code > 128:
        return f"its launcher was ended by {_signal(code - 128)}, and no verdict was written", ""
    lines = [line for line in redact.whole(_tail(log, log_from)).splitlines() if line.strip()]
    named = [line for line in lines if line.startswith(_OURS)]
    return (named or lines or ["it ended without a word"])[-1].removeprefix(_OURS).strip(), ""


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _tail(path: str, begin: int) -> str:
    try:
        with open(path, "rb") as file:
            file.seek(max(begin, os.fstat(file.fileno()).st_size - _TAIL))
            return file.read().decode("utf-8", "replace")
    except FileNotFoundError:
        return ""


def rest(seconds: float) -> str:
    return f"the rest takes about {span(seconds)}" if seconds >= 1 else ""
