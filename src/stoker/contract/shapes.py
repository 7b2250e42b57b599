"""Shapes that cross rooms and reach the disk: event, evidence of a rank's end, finding, verdict."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

SCHEMA = 1


@dataclass(frozen=True)
class RankError:
    """What the shim wrote when an exception ended the script."""

    type: str
    message: str
    file: str = ""
    line: int = 0
    function: str = ""
    traceback: str = ""
    time_ns: int = 0
    import_name: str = ""  # the module an ImportError could not find


@dataclass(frozen=True)
class RankEnd:
    """How one rank ended, as its agent saw it. `code` is a wait status: negative for a signal."""

    rank: int
    host: str
    label: str
    pid: int
    code: int | None  # None: still running when the attempt was judged
    time: float
    ours: bool = False  # it got a signal from us before it ended
    error: RankError | None = None
    tail: str = ""  # last lines it printed
    steps: int = 0
    stack: str = ""  # what faulthandler wrote on a fatal signal
    oom_killed: bool = False
    core: bool = False


@dataclass(frozen=True)
class Evidence:
    """Everything an attempt left behind for the judge."""

    world_size: int
    ends: tuple[RankEnd, ...]
    stop_signal: int = 0  # a signal the launcher received
    stop_now: bool = False
    trouble: tuple[dict[str, Any], ...] = ()  # what Stoker itself stopped the job for: {"cause", "rank", "summary", "fix"}


@dataclass(frozen=True)
class Finding:
    id: str
    level: str  # ok | warn | fail | unknown
    text: str
    fix: str = ""


@dataclass(frozen=True)
class Verdict:
    status: str  # completed | failed | stopped | refused | lost
    cause: str
    summary: str
    exit_code: int
    rank: int | None = None
    host: str | None = None
    gpu: str | None = None
    evidence: tuple[str, ...] = ()
    retryable: bool = False
    fix: tuple[str, ...] = ()
    detected_s: float | None = None
    run: str = ""
    attempt: int = 0
    schema: int = field(default=SCHEMA)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> Verdict:
        known = {k: v for k, v in data.items() if k in Verdict.__dataclass_fields__}
        for name in ("evidence", "fix"):
            known[name] = tuple(known.get(name) or ())
        return Verdict(**known)
