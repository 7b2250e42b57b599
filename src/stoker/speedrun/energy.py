"""What the GPUs have used since their driver was loaded, asked in a child with a deadline: a driver that hangs costs seconds, not the chain."""

from __future__ import annotations

import subprocess
import sys

LIMIT_S = 5.0
# Millijoules of all cards together; a card that does not count (before Volta) makes the sum unknown.
_ASK = (
    "import pynvml as n; n.nvmlInit(); "
    "print(sum(n.nvmlDeviceGetTotalEnergyConsumption(n.nvmlDeviceGetHandleByIndex(i)) for i in range(n.nvmlDeviceGetCount())))"
)


def millijoules() -> int | None:
    try:
        said = subprocess.run([sys.executable, "-c", _ASK], capture_output=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return None
    text = said.stdout.strip()
    return int(text) if said.returncode == 0 and text.isdigit() else None


def watt_hours(before: int | None, after: int | None) -> float | None:
    """The counter begins again when the driver is loaded anew: then nobody knows."""
    return (after - before) / 3.6e6 if before is not None and after is not None and after >= before else None
