"""Turns all evidence of an attempt into one verdict, without I/O.

A rank that lost its connection to a peer, or that Stoker stopped, is never guilty if another rank failed or left early.
Without any evidence the cause is `unknown`.
"""

from __future__ import annotations

import signal
from typing import Any

from stoker.contract.evidence import Evidence, RankExit, Stall, Verdict
from stoker.contract.frozen import replace
from stoker.contract.units import format_duration, format_ranks, plural, rank_name
from stoker.control.verdict import hangs, launch_failures
from stoker.control.verdict.catalogue import Case, load_exit_rules, make_verdict
from stoker.control.verdict.echo import (
    failure_time,
    is_collective_consequence,
    is_consequence,
    is_failure,
    is_size_mismatch,
)
from stoker.control.verdict.exit_text import exit_code
from stoker.control.verdict.rules import numbers

CONSEQUENCE_S = (
    5.0  # peers that lose a rank fail within this time of its exit: on a busy machine Python takes seconds to end
)
NOTICED_S = 1.0  # an agent may notice a rank's exit this long after its peers lost the connection
LEFT_S = 10.0  # a rank that exited this long before the stop left early: ranks that are done end within seconds of each other
_RULES = load_exit_rules()
# A rule raises one of these if a rank printed, or an agent reported, malformed numbers. Then it doesn't apply.
_MALFORMED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


def judge(evidence: Evidence) -> Verdict:
    """Return the verdict of an attempt: Stoker's own reason to stop it, a stall, a signal, success, or the guilty rank's exit."""
    if evidence.trouble:
        return _judge_stopped_by_stoker(evidence)
    guilty = _find_guilty(evidence)
    stall = evidence.stall
    is_explained = stall is not None and (stall.rank is not None or stall.parties)
    is_refuted = stall is not None and _was_not_stuck(stall, evidence)
    if (
        (stall is None or is_refuted)
        and not evidence.stop_signal
        and (report := _report_extra_call(evidence)) is not None
    ):
        return launch_failures.make_report_verdict(replace(evidence, trouble=(report,)))
    only_consequences = guilty is not None and not evidence.stop_signal and _all_failures_are_consequences(evidence)
    if stall is not None and is_explained and only_consequences and not is_refuted:
        accused = next((end for end in evidence.ends if end.rank == stall.rank), None)
        report = hangs.make_stall_report(
            stall, accused.label if accused else "", "the ranks that were waiting for it gave up"
        )
        if accused is not None and is_failure(accused, evidence.stopped_at):
            report["exit_code"] = exit_code(accused)
        return launch_failures.make_report_verdict(replace(evidence, trouble=(report,)))
    if evidence.stop_signal:
        if guilty is None or failure_time(guilty) >= evidence.stopped_at:
            return launch_failures.make_stop_verdict(evidence, *_find_problem_before_stop(evidence))
        return _add_later_signal(explain(guilty, evidence), evidence)
    all_ranks = f"all {evidence.world_size} ranks" if evidence.world_size > 1 else "the rank"
    if evidence.steps_reached and guilty is None:
        steps = plural(evidence.steps_reached, "step")
        return Verdict("completed", "completed", f"{all_ranks} made at least {steps}; stopped there as requested", 0)
    # If Stoker ended the ranks so that a host can join, exit code 0 means "saved and ended", not "done".
    asked_to_end = bool(evidence.regrouping) and any(end.ours for end in evidence.ends)
    all_ended = len(evidence.ends) == evidence.world_size and all(end.code == 0 for end in evidence.ends)
    if all_ended and not asked_to_end:
        return Verdict("completed", "completed", f"{all_ranks} ended with exit code 0", 0)
    if guilty is None and evidence.regrouping:
        return launch_failures.make_regroup_verdict(evidence.regrouping)
    if guilty is None:
        return launch_failures.make_unknown_verdict(evidence)
    return explain(guilty, evidence)


def _judge_stopped_by_stoker(evidence: Evidence) -> Verdict:
    """Return Stoker's own reason for stopping the job, unless the accused rank's exit is more specific."""
    verdict = launch_failures.make_report_verdict(evidence)
    reason = evidence.trouble[0]
    end = next((end for end in evidence.ends if end.rank == reason.get("rank")), None)
    raised_before_stop = end is not None and end.error is not None and failure_time(end) < evidence.stopped_at
    left_early = end is not None and end.script_end is not None and end.code == 0 and not end.ours
    if end is not None and reason["cause"].startswith("hang.") and raised_before_stop and not is_consequence(end):
        verdict = explain(end, evidence)  # the rank had raised an exception, and then its exit hung
    elif end is not None and reason["cause"] == "rank.early-exit" and left_early:
        exit_verdict = explain(end, evidence)  # its summary names the line at which the rank left
        lines = (*exit_verdict.evidence, *verdict.evidence)
        verdict = replace(exit_verdict, evidence=lines, exit_code=verdict.exit_code)
    return _add_later_signal(verdict, evidence) if evidence.stop_signal else verdict


def _add_later_signal(verdict: Verdict, evidence: Evidence) -> Verdict:
    received = f"then the launcher received {signal.Signals(evidence.stop_signal).name}"
    return replace(verdict, retryable=False, evidence=(*verdict.evidence, received))


def _find_problem_before_stop(evidence: Evidence) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """Return (summary, evidence, fixes) of what was wrong when a person stopped the run; all are empty if nothing was."""
    stall = evidence.stall
    if stall is not None:
        label = next((end.label for end in evidence.ends if end.rank == stall.rank), "")
        report = hangs.make_stall_report(stall, label, "")
        return report["summary"], stall.evidence, tuple(report["fix"])
    if evidence.notes:
        return evidence.notes[0], (), ()
    early_exits = [end for end in evidence.ends if end.code == 0 and evidence.stopped_at - end.time > LEFT_S]
    if not early_exits:
        return "", (), ()
    first = early_exits[0]
    elapsed = format_duration(evidence.stopped_at - first.time)
    return f"{rank_name(first.rank, first.label)} had exited with code 0, {elapsed} earlier", (), ()


def _all_failures_are_consequences(evidence: Evidence) -> bool:
    failures = [end for end in evidence.ends if is_failure(end, evidence.stopped_at)]
    return bool(failures) and all(is_collective_consequence(end) or is_size_mismatch(end) for end in failures)


def _was_not_stuck(stall: Stall, evidence: Evidence) -> bool:
    """Return whether the rank that seemed stuck exited with 0, and the others failed only because they lost it."""
    if stall.parties:
        return False
    failures = (failure_time(end) for end in evidence.ends if is_failure(end, evidence.stopped_at))
    first_failure = min(failures, default=0.0)
    return any(
        end.rank == stall.rank and end.code == 0 and not end.ours and end.time <= first_failure + NOTICED_S
        for end in evidence.ends
    )


def _report_extra_call(evidence: Evidence) -> dict[str, Any] | None:
    """Report a rank that lost the others in a call they did not enter because their scripts had returned.

    They had made as many steps, so this rank made one call too many, rather than the others one too few.
    """
    failed = [end for end in evidence.ends if is_failure(end, evidence.stopped_at)]
    done = [end for end in evidence.ends if end not in failed]
    if not failed or not done or len(evidence.ends) < evidence.world_size:
        return None
    returned = all(end.code == 0 and end.script_end is not None and end.script_end.how == "return" for end in done)
    same_steps = min(end.steps for end in done) >= max(end.steps for end in failed)
    call = failed[0].last_call
    same_call = call is not None and not call.repeated and len({end.last_call for end in failed}) == 1
    if call is None or not (returned and same_steps and same_call and all(map(is_collective_consequence, failed))):
        return None
    ranks, others = tuple(end.rank for end in failed), tuple(end.rank for end in done)
    stall = Stall("rank-only", ranks[0], ranks, others, call.where, call.condition, call.name, step=failed[0].steps)
    report = hangs.make_stall_report(stall, failed[0].label, f"the scripts of {format_ranks(others)} had returned")
    return {**report, "exit_code": exit_code(failed[0])}


def _find_guilty(evidence: Evidence) -> RankExit | None:
    """Return the exit that caused the end: the first failure that is not a consequence of another rank's, or None."""
    failures = sorted((end for end in evidence.ends if is_failure(end, evidence.stopped_at)), key=failure_time)
    causes = [end for end in failures if not is_consequence(end)]
    if causes and not (evidence.steps_reached and failure_time(causes[0]) >= evidence.stopped_at):
        return numbers.find_named_rank(causes) or causes[0]
    if not failures or evidence.steps_reached:
        return None
    # All failures come from losing a peer, so a rank that exited with 0 before them is the peer that they lost. A plain
    # ConnectionError may come from a web server: it counts only right after such a rank's exit.
    first = failures[0]
    latest_exit = failure_time(first) + CONSEQUENCE_S
    early_exits = sorted(
        (end for end in evidence.ends if end.code == 0 and not end.ours and end.time <= latest_exit),
        key=lambda end: end.time,
    )
    if not early_exits:
        return first
    is_builtin = first.error is not None and first.error.module == "builtins"
    is_right_after = is_builtin and failure_time(first) - early_exits[0].time <= CONSEQUENCE_S
    return early_exits[0] if is_collective_consequence(first) or is_right_after else first


def explain(end: RankExit, evidence: Evidence) -> Verdict:
    """Return the verdict of the first rule that matches the exit."""
    case = Case(end, evidence)
    for cause in _RULES:
        try:
            match = cause.explain(case) if cause.explain else None
        except _MALFORMED:
            continue
        if match is not None:
            return make_verdict(cause, case, match)
    raise AssertionError(f"rank {end.rank} ended with {end.code} and no rule matches")
