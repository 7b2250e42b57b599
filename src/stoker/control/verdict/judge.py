"""The judge: all evidence of an attempt in, one verdict out. Pure.

Cause before consequence: a peer that lost its connection, or a rank we stopped, is never the guilty one while another rank
failed by itself or left early. Without evidence the verdict says so.
"""

from __future__ import annotations

import signal

from stoker.contract.names import EX_SOFTWARE
from stoker.contract.shapes import Evidence, RankEnd, Verdict
from stoker.control.verdict import launch, rank
from stoker.control.verdict.consequence import is_consequence

_STOPS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGKILL}


def failed(end: RankEnd) -> bool:
    """It ended badly by itself: a signal from us does not count, an exception it reported before does."""
    if end.code is None:
        return end.error is not None
    if end.code == 0:
        return False
    return end.error is not None or not (end.ours and -end.code in _STOPS)


def judge(evidence: Evidence) -> Verdict:
    if evidence.trouble:
        return launch.trouble(evidence)
    if evidence.stop_signal:
        return launch.stopped(evidence)
    if evidence.steps_reached and not any(failed(end) and not is_consequence(end) for end in evidence.ends):
        return Verdict("completed", "completed", f"all {evidence.world_size} ranks made {evidence.steps_reached} steps; ended as asked for", 0)
    if all(end.code == 0 for end in evidence.ends) and len(evidence.ends) == evidence.world_size:
        return Verdict("completed", "completed", f"all {evidence.world_size} ranks ended with 0", 0)
    guilty = _guilty(evidence)
    if guilty is None:
        return launch.unknown(evidence)
    return rank.explain(guilty, evidence)


def _when(end: RankEnd) -> float:
    return end.error.time_ns / 1e9 if end.error and end.error.time_ns else end.time


def _guilty(evidence: Evidence) -> RankEnd | None:
    bad = sorted((end for end in evidence.ends if failed(end)), key=_when)
    causes = [end for end in bad if not is_consequence(end)]
    if causes:
        return causes[0]
    if not bad:
        return None
    # Every failure is a lost peer's: a rank that left with 0 before them, or whose end we don't have, is what they lost.
    left = sorted((end for end in evidence.ends if end.code == 0 and end.time <= _when(bad[0]) + 1.0), key=lambda end: end.time)
    return left[0] if left else bad[0]


def exit_code(end: RankEnd) -> int:
    """The guilty rank's own; 128 + n for a signal; 70 where that would be 0 or was our doing."""
    if end.code is None or end.code == 0 or (end.ours and end.error is None):
        return EX_SOFTWARE
    if end.ours and end.code < 0:
        return EX_SOFTWARE
    return end.code if end.code > 0 else 128 - end.code
