"""The doctor's examination of this host; its checks run on the coordinator's side."""

from __future__ import annotations

from typing import Any

from stoker.control.machine.examine import examine as look


def examine(runs_dir: str, port: int, parts: list[str]) -> Any:
    return look(runs_dir, port, frozenset(parts)).to_json()
