"""What this host makes of the others' names, what its interfaces say of themselves, and its clock."""

from __future__ import annotations

import os
import socket
import time
from typing import Any


def names(of: list[str], interfaces: list[str]) -> Any:
    """`of`: hosts' names -> the addresses they have, seen from here; [] where one does not resolve."""
    return {"resolves": {name: resolve(name) for name in of}, "links": {name: link(name) for name in interfaces}}


def clock() -> Any:
    return {"time": time.time()}


def resolve(name: str) -> list[str]:
    try:
        return sorted({str(entry[4][0]) for entry in socket.getaddrinfo(name, None)})
    except (OSError, UnicodeError):  # a name that is none: too long, or an empty label
        return []


def link(interface: str) -> dict[str, Any]:
    """Megabits a second as the driver states them; a virtual interface's figure means nothing."""
    folder = os.path.join("/sys/class/net", interface)
    stated = None
    try:
        with open(os.path.join(folder, "speed"), encoding="ascii") as file:
            stated = int(file.read())
    except (OSError, ValueError):
        stated = None  # wireless, tunnels and interfaces that are down have none
    return {
        "speed": stated if stated is not None and stated > 0 else None,
        "physical": os.path.exists(os.path.join(folder, "device")),
    }
