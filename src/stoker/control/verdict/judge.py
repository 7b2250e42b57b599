"""The judge: all evidence of an attempt in, one verdict out. Pure.

Cause before consequence: a peer that lost its connection, or a rank we stopped, is never the guilty one while another
rank failed by itself or left early. Without evidence the verdict says so.
"""

from __future__ import annotations

import signal
from typing import Any

from stoker.contract.evidence import Evidence, RankExit, Stall, Verdict
from stoker.contract.frozen import replace
from stoker.contract.units import format_duration, format_ranks, plural, rank_name
from stoker.control.verdict import hangs, launch_failures
from stoker.control.verdict.catalogue import Case, rules, verdict_of
from stoker.control.verdict.echo import failure_time, is_collectives, is_consequence, is_failure, is_mismatch
from stoker.control.verdict.exit_text import exit_code
from stoker.control.verdict.rules import numbers

AT_ONCE_S = 5.0  # between a rank's end and what its peers say of it: on a busy machine Python takes seconds to end
NOTICED_S = 1.0  # the agent may notice a rank's end that much after its peers lost the connection
LEFT_S = 10.0  # between the end of one rank and a stop of the others: longer than ranks take to end one after another
_RULES = rules()
# Of numbers and shapes in what a rank printed or a host told: such a text is no cause's, and ends no launcher.
_NO_SENSE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


def judge(evidence: Evidence) -> Verdict:
    if evidence.trouble:
        known = launch_failures.trouble(evidence)
        raised, left = _raised_before(evidence), _left_before(evidence)
        if raised is not None:
            known = explain(raised, evidence)
        elif left is not None:
            ended = explain(left, evidence)
            known = replace(ended, evidence=(*ended.evidence, *known.evidence), exit_code=known.exit_code)
        return _then_stopped(known, evidence) if evidence.stop_signal else known
    guilty = _guilty(evidence)
    stall = evidence.stall
    explained = stall is not None and (stall.rank is not None or stall.parties)
    refuted = stall is not None and _was_not_stuck(stall, evidence)
    if (stall is None or refuted) and not evidence.stop_signal and (alone := _waited_alone(evidence)) is not None:
        return launch_failures.trouble(replace(evidence, trouble=(alone,)))
    echoes = guilty is not None and not evidence.stop_signal and _only_echoes(evidence)
    if stall is not None and explained and echoes and not refuted:
        accused = next((end for end in evidence.ends if end.rank == stall.rank), None)
        told = hangs.trouble(stall, accused.label if accused else "", "the ranks that waited for it gave up")
        if accused is not None and is_failure(accused, evidence.stopped_at):
            told["exit_code"] = exit_code(accused)
        return launch_failures.trouble(replace(evidence, trouble=(told,)))
    if evidence.stop_signal:
        if guilty is None or failure_time(guilty) >= evidence.stopped_at:
            return launch_failures.stopped(evidence, *_known_by_then(evidence))
        return _then_stopped(explain(guilty, evidence), evidence)
    if evidence.steps_reached and guilty is None:
        made = (
            f"{_everybody(evidence)} made at least {plural(evidence.steps_reached, 'step')}; stopped there as requested"
        )
        return Verdict("completed", "completed", made, 0)
    # Then 0 means "saved and left", not "done".
    told_to = bool(evidence.regrouping) and any(end.ours for end in evidence.ends)
    if all(end.code == 0 for end in evidence.ends) and len(evidence.ends) == evidence.world_size and not told_to:
        return Verdict("completed", "completed", f"{_everybody(evidence)} ended with exit code 0", 0)
    if guilty is None and evidence.regrouping:
        return launch_failures.regrouped(evidence.regrouping)
    if guilty is None:
        return launch_failures.unknown(evidence)
    return explain(guilty, evidence)


def _then_stopped(verdict: Verdict, evidence: Evidence) -> Verdict:
    received = f"then the launcher received {signal.Signals(evidence.stop_signal).name}"
    return replace(verdict, retryable=False, evidence=(*verdict.evidence, received))


def _raised_before(evidence: Evidence) -> RankExit | None:
    """The rank stopped for standing still, if it had reported its own exception before: its exit hung."""
    if not evidence.trouble[0]["cause"].startswith("hang."):
        return None
    end = next((end for end in evidence.ends if end.rank == evidence.trouble[0]["rank"]), None)
    own = end is not None and end.error is not None and not is_consequence(end) and failure_time(end) < evidence.stopped_at
    return end if own else None


def _left_before(evidence: Evidence) -> RankExit | None:
    """Return the rank for whose early exit the job was stopped: its own end names the line, if it is known."""
    if evidence.trouble[0]["cause"] != "rank.early-exit":
        return None
    end = next((end for end in evidence.ends if end.rank == evidence.trouble[0]["rank"]), None)
    return end if end is not None and end.code == 0 and not end.ours and end.script_end is not None else None


def _known_by_then(evidence: Evidence) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """What was wrong when somebody stopped the run: (in one line, its evidence, what to do)."""
    stall = evidence.stall
    if stall is not None:
        label = next((end.label for end in evidence.ends if end.rank == stall.rank), "")
        suspected = hangs.trouble(stall, label, "")
        return suspected["summary"], stall.evidence, tuple(suspected["fix"])
    if evidence.notes:
        return evidence.notes[0], (), ()
    left = [end for end in evidence.ends if end.code == 0 and evidence.stopped_at - end.time > LEFT_S]
    if not left:
        return "", (), ()
    before = format_duration(evidence.stopped_at - left[0].time)
    return f"{rank_name(left[0].rank, left[0].label)} had ended with exit code 0 {before} before", (), ()


def _everybody(evidence: Evidence) -> str:
    return f"all {evidence.world_size} ranks" if evidence.world_size > 1 else "the rank"


def _only_echoes(evidence: Evidence) -> bool:
    bad = [end for end in evidence.ends if is_failure(end, evidence.stopped_at)]
    return bool(bad) and all(is_collectives(end) or is_mismatch(end) for end in bad)


def _was_not_stuck(stall: Stall, evidence: Evidence) -> bool:
    """Return whether the rank that seemed stuck ended by itself with 0 before the others failed: they lost it."""
    if stall.parties:
        return False
    first_failure = min((failure_time(end) for end in evidence.ends if is_failure(end, evidence.stopped_at)), default=0.0)
    return any(
        end.rank == stall.rank and end.code == 0 and not end.ours and end.time <= first_failure + NOTICED_S
        for end in evidence.ends
    )


def _waited_alone(evidence: Evidence) -> dict[str, Any] | None:
    """Report a rank that lost the others in a call to which they did not come: their scripts had returned.

    They had made as many steps, so the call is one too many, and not theirs one too few.
    """
    lost = [end for end in evidence.ends if is_failure(end, evidence.stopped_at)]
    done = [end for end in evidence.ends if end not in lost]
    if not lost or not done or len(evidence.ends) < evidence.world_size:
        return None
    returned = all(end.code == 0 and end.script_end is not None and end.script_end.how == "return" for end in done)
    calls = {end.last_call for end in lost}
    call = lost[0].last_call
    same_steps = min(end.steps for end in done) >= max(end.steps for end in lost)
    if not (
        returned
        and same_steps
        and call is not None
        and not call.repeated
        and len(calls) == 1
        and all(map(is_collectives, lost))
    ):
        return None
    ranks, others = tuple(end.rank for end in lost), tuple(end.rank for end in done)
    stall = Stall("rank-only", ranks[0], ranks, others, call.where, call.condition, call.name, step=lost[0].steps)
    trouble = hangs.trouble(stall, lost[0].label, f"the scripts of {format_ranks(others)} had returned")
    return {**trouble, "exit_code": exit_code(lost[0])}


def _guilty(evidence: Evidence) -> RankExit | None:
    bad = sorted((end for end in evidence.ends if is_failure(end, evidence.stopped_at)), key=failure_time)
    causes = [end for end in bad if not is_consequence(end)]
    if causes and not (evidence.steps_reached and failure_time(causes[0]) >= evidence.stopped_at):
        return numbers.named_by(causes) or causes[0]
    if not bad or evidence.steps_reached:
        return None
    # Every failure is a lost peer's: a rank that left with 0 before them is what they lost. But a connection that is
    # none of torch's may be a web server's: it is a peer's where the system's own error comes at once after that rank.
    first = bad[0]
    latest = failure_time(first) + AT_ONCE_S
    gone = (end for end in evidence.ends if end.code == 0 and not end.ours and end.time <= latest)
    left = sorted(gone, key=lambda end: end.time)
    plain = first.error is not None and first.error.module == "builtins"
    at_once = plain and bool(left) and failure_time(first) - left[0].time <= AT_ONCE_S
    return left[0] if left and (is_collectives(first) or at_once) else first


def explain(end: RankExit, evidence: Evidence) -> Verdict:
    """The first cause of the catalogue that the end fits."""
    case = Case(end, evidence)
    for cause in _RULES:
        try:
            found = cause.explain(case) if cause.explain else None
        except _NO_SENSE:
            continue
        if found is not None:
            return verdict_of(cause, case, found)
    raise AssertionError(f"rank {end.rank} ended with {end.code} and no family took it")
