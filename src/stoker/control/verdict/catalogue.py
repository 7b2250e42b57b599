"""The catalogue of causes: every cause that a verdict can name, one entry each. docs/verdicts.md is generated from it.

An entry is a text, with a function that takes a case (one rank's exit and the evidence around it) and returns a match or
None; a cause that a pattern and a sentence can describe needs no function. A cause is added by writing an entry in a file of
rules/, new or existing, and its case in the tests. Causes that are not read off a rank's exit (a stall, a bad number, a
failure of Stoker itself) have neither pattern nor function.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from stoker.contract.discovery import modules_in
from stoker.contract.errors import EX_SOFTWARE
from stoker.contract.evidence import Evidence, RankExit, Verdict
from stoker.contract.frozen import frozen
from stoker.contract.units import rank_name
from stoker.control.verdict.exit_text import (
    MAX_EVIDENCE_LINE,
    at_location,
    exit_code,
    find_in_output,
    first_line,
    line_of,
    location,
    path_in,
)


@frozen
class Case:
    """A rank's exit, with the evidence of the whole attempt."""

    end: RankExit
    evidence: Evidence

    @property
    def rank_name(self) -> str:
        return rank_name(self.end.rank, self.end.label)

    @property
    def output(self) -> str:
        """Return the exception's message and the last lines the rank printed."""
        return (self.end.error.message if self.end.error else "") + "\n" + self.end.tail


@frozen
class CauseMatch:
    summary: str
    evidence: tuple[str, ...] = ()
    fix: tuple[str, ...] = ()  # replaces the entry's own
    retryable: bool | None = None  # replaces the entry's own


@frozen
class Cause:
    id: str
    description: str  # one sentence: what happened
    seen: str  # the evidence for it
    unless: str  # what would make it another cause
    fix: tuple[str, ...]
    retryable: bool
    summary: str  # template of a verdict's summary, if the entry has one
    explain: Callable[..., CauseMatch | None] | None  # None: it is not read off a rank's exit
    module: str


Match = re.Match[str]
Explanation = Callable[..., CauseMatch | None]  # takes a case, and the match if the entry has a pattern
EvidenceFunction = Callable[[Case, str], tuple[str, ...]]  # takes a case and the line with the match
CATALOGUE: dict[str, Cause] = {}


class Family:
    """The causes of one module.

    An entry is a text: the id (`, again` if another attempt may help) and what happened; then, each on its own lines, what is
    `seen`, what would make it another cause (`unless`) and each `fix`. `texts` gives what {NAME} stands for in an entry: a
    text, or several fixes. `always` is added to each entry as the last fix.
    """

    def __init__(
        self, module: str, evidence: EvidenceFunction | None = None, always: str = "", **texts: str | tuple[str, ...]
    ) -> None:
        self._module = module
        self._evidence = evidence
        self._always = (always,) if always else ()
        self._texts = {
            f"{{{name}}}": text if isinstance(text, str) else "\nfix: ".join(text) for name, text in texts.items()
        }

    def entries(self, text: str) -> None:
        """Add entries without a function.

        Those for a rank's exit have a pattern that its last output must match (`said`) and a `summary`; their evidence comes
        from the family's evidence function.
        """
        for entry in re.split(r"^(?=\S)", text.strip(), flags=re.M)[1:]:
            self._add(entry)

    def cause(self, text: str) -> Callable[[Explanation], Explanation]:
        """Add one entry with the decorated function.

        With a `said` pattern the function is only called for a match, and gets it; with `perhaps` it gets the match or None.
        """

        def register(function: Explanation) -> Explanation:
            self._add(text.strip(), function)
            return function

        return register

    def _add(self, entry: str, explain: Explanation | None = None) -> None:
        for name, text in self._texts.items():
            entry = entry.replace(name, text)
        head, *rest = re.split(r"^ *(seen|unless|fix|said|perhaps|summary): ", entry, flags=re.M)
        name, _, description = head.partition(": ")
        id, _, again = name.partition(", ")
        parts = [(key, _one_line(part)) for key, part in zip(rest[::2], rest[1::2], strict=True)]
        fields = {"unless": "", "summary": "", **dict(parts)}
        if "said" in fields:
            explain = _make_matcher(fields["said"], explain or self._explain_by(fields["summary"]))
        if "perhaps" in fields and explain:
            explain = _make_matcher(fields["perhaps"], explain, always=True)
        assert id not in CATALOGUE, id
        fix = (*(part for key, part in parts if key == "fix"), *self._always)
        CATALOGUE[id] = Cause(
            id, _one_line(description), fields["seen"], fields["unless"], fix, bool(again), fields["summary"], explain,
            self._module,
        )  # fmt: skip

    def _explain_by(self, summary: str) -> Explanation:
        """Return an explanation that fills the summary's placeholders from the match."""
        assert self._evidence is not None
        evidence = self._evidence

        def explain(case: Case, match: Match) -> CauseMatch:
            line, path = line_of(match), path_in(line_of(match))
            error = case.end.error
            detail = error.message.partition(line + "\n")[2] if error is not None and line.endswith(":") else ""
            raised = f"{line} {first_line(detail)}" if detail else line
            raised = f"{error.type}: {raised}" if error is not None and error.type not in raised else raised
            text = summary.format(
                *match.groups(),
                who=case.rank_name,
                said=first_line(match[0]),
                line=first_line(line),
                at=at_location(case),
                raised=first_line(raised),
                for_path=f" for {path}" if path else "",
                at_path=f" at {path}" if path else "",
            )
            return CauseMatch(text, evidence(case, line))

        return explain


def _one_line(text: str) -> str:
    return re.sub(r"\s*\n\s*", " ", text.strip())


def _make_matcher(pattern: str, function: Explanation, always: bool = False) -> Explanation:
    """Return an explanation that calls `function` for a match, or `always` with the match or None."""

    def explain(case: Case) -> CauseMatch | None:
        match = find_in_output(case, pattern.replace("| ", "|"))  # a pattern may be broken into lines after a |
        return function(case, match) if match or always else None

    return explain


def make_report(id: str, summary: str, evidence: list[str], **fields: Any) -> dict[str, Any]:
    """Return why Stoker stops the job itself, for launch_failures.trouble. `fields` add to the report or replace its own."""
    cause = get_cause(id)
    return {
        "cause": id,
        "exit_code": EX_SOFTWARE,
        "summary": summary,
        "retryable": cause.retryable,
        "evidence": evidence,
        "fix": list(cause.fix),
        **fields,
    }


def load_exit_rules() -> list[Cause]:
    """Return the causes read off a rank's exit, by their module's ORDER, then as they are written.

    Specific reasons come before a mere exception or signal.
    """
    families = sorted(modules_in("stoker.control.verdict.rules"), key=lambda module: getattr(module, "ORDER", 70))
    return [
        cause
        for family in families
        for cause in CATALOGUE.values()
        if cause.explain and cause.module == family.__name__
    ]


def get_cause(id: str) -> Cause:
    """Return a cause of any module, importing all of rules/ first."""
    load_exit_rules()
    return CATALOGUE[id]


# The line that raised is not where the cause is: GPU errors are noticed later than they happen (the evidence says "noticed
# at"), and a traced NaN is raised by the training loop that checks for it.
_RAISED_ELSEWHERE = ("gpu.", "oom.gpu", "nccl.", "nan.traced")


def _applies(advice: str, printed: str) -> bool:
    """Return whether a fix applies: one that begins with a quoted message is only for that message."""
    quoted = re.match(r'"([^"]+)"', advice)
    return quoted is None or quoted[1] in printed


def make_verdict(cause: Cause, case: Case, match: CauseMatch) -> Verdict:
    """Make a verdict of a match. The summary names the line that raised, unless that is not where the cause is."""
    end = case.end
    where = location(end)
    printed = "\n".join((match.summary, *match.evidence, end.error.message if end.error else ""))
    fix = match.fix or tuple(
        line.replace("{rank}", str(end.rank)).replace("{place}", where) for line in cause.fix if _applies(line, printed)
    )
    summary = match.summary
    if end.error is not None and end.error.file and not cause.id.startswith(_RAISED_ELSEWHERE):
        line = f"{end.error.file}:{end.error.line}"
        if not any(line in text for text in (summary, *fix)):
            summary += f" at {where}"
    return Verdict(
        "failed",
        cause.id,
        summary,
        exit_code(end),
        rank=end.rank,
        host=end.host or None,
        gpu=end.label if "GPU" in end.label else None,
        evidence=tuple(line[:MAX_EVIDENCE_LINE] for line in match.evidence),
        retryable=cause.retryable if match.retryable is None else match.retryable,
        fix=fix,
    )
