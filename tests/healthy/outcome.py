"""What Stoker made of a healthy run, read from its record."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Outcome:
    status: str
    summary: str
    stopped: bool  # Stoker ended a rank, or began the run again
    suspicions: tuple[str, ...]  # doubts about numbers too
    stragglers: tuple[str, ...]

    def wrong(self, straggler_is_right: bool) -> list[str]:
        """What must not have happened; nothing for a run treated well."""
        found = []
        if self.stopped:
            found.append("stopped")
        if self.status != "completed":
            found.append(f"blamed: {self.status}: {self.summary}")
        if self.stragglers and not straggler_is_right:
            found.append(f"straggler named where there is none: {self.stragglers[0]}")
        return found


def outcome(run_dir: Path) -> Outcome:
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    verdict_file = run_dir / "verdict.json"
    verdict: dict[str, Any] = (
        json.loads(verdict_file.read_text())
        if verdict_file.exists()
        else {"status": "none", "summary": "no verdict was written"}
    )
    return Outcome(
        verdict["status"],
        verdict["summary"],
        any(event["event"] == "restart" or (event["event"] == "rank-exit" and event["ours"]) for event in events),
        tuple(_text(event) for event in events if event["event"] in ("suspicion", "numbers")),
        tuple(_text(event) for event in events if event["event"] == "straggler"),
    )


def _text(event: dict[str, Any]) -> str:
    """Cause, rank and summary; an event without a summary is shown as it is."""
    if "summary" not in event:
        return json.dumps({key: value for key, value in event.items() if key not in ("schema", "time", "host")})
    return f"{event.get('cause')}, rank {event.get('rank')}: {event['summary']}"
