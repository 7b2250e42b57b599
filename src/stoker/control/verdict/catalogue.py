"""The catalogue: every cause a verdict can name, one entry each. docs/verdicts.md is generated from it.

An entry is a function from a case (one rank's end, and the evidence around it) to what was found, or None. Adding a
cause is adding one decorated function to a file of rules/, new or old, and its case to the tests. Causes Stoker finds
by other means than a rank's end (a stall, a number, its own trouble) are entries without a function.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from stoker.contract.discovery import modules_in
from stoker.contract.names import EX_SOFTWARE
from stoker.contract.shape import replace, shape
from stoker.contract.shapes import Evidence, RankEnd, Verdict
from stoker.control.verdict.lastwords import LINE, exit_code, find, place


@shape
class Case:
    end: RankEnd
    evidence: Evidence

    @property
    def who(self) -> str:
        return f"rank {self.end.rank} ({self.end.label})"

    @property
    def message(self) -> str:
        """What the exception said; empty without one."""
        return self.end.error.message if self.end.error else ""

    @property
    def words(self) -> str:
        """Everything the rank said at its end: the exception, and the last lines it printed."""
        return self.message + "\n" + self.end.tail


@shape
class Found:
    summary: str
    evidence: tuple[str, ...] = ()
    fix: tuple[str, ...] = ()  # instead of the entry's own
    retryable: bool | None = None  # instead of the entry's own


@shape
class Cause:
    id: str
    says: str  # one sentence: what happened
    seen: str  # the evidence that makes it
    contradicts: str  # what would make it another cause
    fix: tuple[str, ...]
    retryable: bool
    explain: Callable[[Case], Found | None] | None = None
    family: str = ""  # the module of its function


Match = re.Match[str]
Explanation = Callable[..., Found | None]  # of a case, and of the match where the cause says a pattern
CATALOGUE: dict[str, Cause] = {}


def steps(text: str) -> tuple[str, ...]:
    """What to do, one step a line. A line that ends in a backslash goes on in the next."""
    return tuple(re.sub(r" {4,}", " ", line.strip()) for line in text.splitlines() if line.strip())


def _one_line(text: str) -> str:
    return " ".join(text.split())


def entry(
    id: str, says: str, *, seen: str, contradicts: str = "", fix: tuple[str, ...] = (), retryable: bool = False
) -> Cause:
    """A cause that is not read off a rank's end."""
    assert id not in CATALOGUE, id
    CATALOGUE[id] = made = Cause(id, _one_line(says), _one_line(seen), _one_line(contradicts), fix, retryable)
    return made


def cause(
    id: str, *, seen: str, said: str = "", contradicts: str = "", fix: tuple[str, ...] = (), retryable: bool = False
) -> Callable[[Explanation], Explanation]:
    """A cause read off a rank's end. The function's docstring is the sentence that says what happened.

    `said`: a pattern in the rank's last words. The function gets the match, and is not asked where there is none.
    """

    def keep(function: Explanation) -> Explanation:
        def explain_match(case: Case) -> Found | None:
            match = find(case, said)
            return function(case, match) if match else None

        made = entry(id, function.__doc__ or "", seen=seen, contradicts=contradicts, fix=fix, retryable=retryable)
        CATALOGUE[id] = replace(made, explain=explain_match if said else function, family=function.__module__)
        return function

    return keep


def report(cause_: Cause, summary: str, evidence: list[str], **more: Any) -> dict[str, Any]:
    """Why Stoker stops the job itself: what launch.trouble makes a verdict of. `more` adds to it, or stands instead."""
    return {
        "cause": cause_.id,
        "exit_code": EX_SOFTWARE,
        "summary": summary,
        "retryable": cause_.retryable,
        "evidence": evidence,
        "fix": list(cause_.fix),
        **more,
    }


def rules() -> list[Cause]:
    """The causes that are read off a rank's end, in the order in which they are tried: by their file's ORDER, then as
    they stand in it. What names a reason comes before what only names an exception or a signal.
    """
    families = sorted(modules_in("stoker.control.verdict.rules"), key=lambda module: getattr(module, "ORDER", 70))
    return [cause_ for family in families for cause_ in CATALOGUE.values() if cause_.family == family.__name__]


def named(id: str) -> Cause:
    """A cause of any family, whether or not its file has been needed so far."""
    rules()
    return CATALOGUE[id]


def verdict_of(cause_: Cause, case: Case, found: Found) -> Verdict:
    end = case.end
    where = place(end)
    fix = found.fix or tuple(line.replace("{rank}", str(end.rank)).replace("{place}", where) for line in cause_.fix)
    return Verdict(
        "failed",
        cause_.id,
        found.summary,
        exit_code(end),
        rank=end.rank,
        host=end.host or None,
        gpu=end.label if "GPU" in end.label else None,
        evidence=tuple(line[:LINE] for line in found.evidence),
        retryable=cause_.retryable if found.retryable is None else found.retryable,
        fix=fix,
    )
