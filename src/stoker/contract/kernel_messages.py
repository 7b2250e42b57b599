"""Reads lines of the kernel's log that accuse a GPU or a process.

Only how a line begins counts: further on it may quote anything, such as the name of a program that crashed.
"""

from __future__ import annotations

import re

_XID = r"NVRM: Xid \(PCI:([0-9A-Fa-f:.]{1,40})\): ?([0-9]{1,9})(?:,|$)"
_KILLED = r"(?:Memory cgroup o|O)ut of memory(?: \([a-z_]{1,40}\))?: Killed process ([0-9]{1,9})\b"


def parse_xid(line: str) -> tuple[str, int] | None:
    """(PCI address, number) of an NVIDIA driver's complaint."""
    told = re.match(_XID, line)
    return (told[1].lower(), int(told[2])) if told else None


def parse_oom_kill(line: str) -> str:
    """The number of a process that was killed for its memory; empty where the line says no such thing."""
    told = re.match(_KILLED, line)
    return told[1] if told else ""
