"""What the GPUs have used since their driver was loaded, asked in a child with a deadline: a driver that hangs costs
seconds, not the chain.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

LIMIT_S = 5.0
# Millijoules of each card by its UUID; a card that does not count (before Volta) or does not answer is not in it.
_ASK = """
import json, pynvml as n
n.nvmlInit()
found = {}
for i in range(n.nvmlDeviceGetCount()):
    try:
        card = n.nvmlDeviceGetHandleByIndex(i)
        found[n.nvmlDeviceGetUUID(card)] = n.nvmlDeviceGetTotalEnergyConsumption(card)
    except n.NVMLError:
        pass
print(json.dumps(found))
"""


def millijoules() -> dict[str, int] | None:
    try:
        said = subprocess.run([sys.executable, "-P", "-c", _ASK], capture_output=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return None
    return json.loads(said.stdout) if said.returncode == 0 else None


def cards_of(run: dict[str, Any]) -> list[str]:
    """UUIDs of the cards a run's ranks had, of its run.json: on a shared box the others are somebody else's."""
    return sorted({rank["gpu"] for rank in (run.get("plan") or {}).get("ranks") or () if rank.get("gpu")})


def watt_hours(before: dict[str, int] | None, after: dict[str, int] | None, cards: list[str]) -> float | None:
    """Of these cards together. A counter begins again when the driver is loaded anew: then nobody knows; so where one
    of them does not count.
    """
    if (
        not cards
        or before is None
        or after is None
        or not all(card in before and after.get(card, -1) >= before[card] for card in cards)
    ):
        return None
    return sum(after[card] - before[card] for card in cards) / 3.6e6
