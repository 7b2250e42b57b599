"""parallel.comm as a config says it. No torch here."""

from __future__ import annotations

from stoker.contract.untrusted import is_count

PLAIN = ("full", "bf16", "powersgd")


def comm(text: str) -> str:
    """full, bf16, powersgd, or local:N."""
    kind, _, number = text.partition(":")
    if text in PLAIN or (kind == "local" and is_count(number) and int(number) > 1):
        return text
    if kind == "local":
        raise ValueError(f"{text!r} does not say how many steps a rank goes alone: local:8, say, from local:2 up")
    raise ValueError(f"{text!r} is not one of {', '.join(PLAIN)}, local:N")


def local_steps(told: str) -> int:
    """N of local:N; 0 where gradients are exchanged in every step."""
    kind, _, number = told.partition(":")
    return int(number) if kind == "local" else 0
