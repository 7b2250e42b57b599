"""Parses lines of the kernel's log that name a faulty GPU or a killed process.

Only the beginning of a line counts: the rest may quote anything, such as the name of a program that crashed.
"""

from __future__ import annotations

import re

_XID = r"NVRM: Xid \(PCI:([0-9A-Fa-f:.]{1,40})\): ?([0-9]{1,9})(?:,|$)"
_KILLED = r"(?:Memory cgroup o|O)ut of memory(?: \([a-z_]{1,40}\))?: Killed process ([0-9]{1,9})\b"


def parse_xid(line: str) -> tuple[str, int] | None:
    """Return (PCI address, number) of an Xid error of the NVIDIA driver, or None for any other line."""
    match = re.match(_XID, line)
    return (match[1].lower(), int(match[2])) if match else None


def parse_oom_kill(line: str) -> str:
    """Return the pid of a process that the kernel killed for its memory, or "" for any other line."""
    match = re.match(_KILLED, line)
    return match[1] if match else ""
