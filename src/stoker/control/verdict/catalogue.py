"""The catalogue of causes: every cause that a verdict can name, one entry each. docs/verdicts.md is generated from it.

An entry is a text, usually with a function that takes a case (one rank's exit and the evidence of the attempt) and returns
a match or None. A cause that a pattern and a summary describe needs no function. To add a cause, write an entry in a file of
rules/ and a case in the tests. Causes that are not read off a rank's exit (a stall, a bad number, a failure of Stoker
itself) have neither pattern nor function.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from stoker.contract.discovery import import_modules
from stoker.contract.errors import EX_SOFTWARE
from stoker.contract.evidence import Evidence, ExitContext, RankExit, Verdict
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
    def context(self) -> ExitContext:
        """Return what the agent measured when the rank ended."""
        return self.end.around

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
    seen: str  # the evidence that proves it
    unless: str  # the evidence that would prove another cause
    fix: tuple[str, ...]
    retryable: bool
    summary: str  # template of a verdict's summary, or ""
    explain: Callable[..., CauseMatch | None] | None  # None if the cause is not read off a rank's exit
    module: str


Match = re.Match[str]
Explanation = Callable[..., CauseMatch | None]  # takes a case, and the match if the entry has a pattern
EvidenceFunction = Callable[[Case, str], tuple[str, ...]]  # takes a case and the line with the match
CATALOGUE: dict[str, Cause] = {}


class Family:
    """The causes of one module.

    An entry is a text: the id (`, again` if another attempt may help) and what happened; then, each on its own lines, the
    evidence (`seen`), the evidence that would prove another cause (`unless`) and each `fix`. `texts` maps NAME to the text,
    or the fixes, that replace {NAME} in an entry. `always` is added to each entry as the last fix.
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

        An entry for a rank's exit has a `summary` and a pattern that the rank's last output must match (`said`). Its evidence
        comes from the family's evidence function.
        """
        for entry in re.split(r"^(?=\S)", text.strip(), flags=re.M)[1:]:
            self._add(entry)

    def cause(self, text: str) -> Callable[[Explanation], Explanation]:
        """Add one entry with the decorated function.

        With a `said` pattern the function is only called with a match; with `perhaps` it is called with the match or None.
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
        cause_id, _, again = name.partition(", ")
        parts = [(key, _one_line(part)) for key, part in zip(rest[::2], rest[1::2], strict=True)]
        fields = {"unless": "", "summary": "", **dict(parts)}
        if "said" in fields:
            explain = _make_matcher(fields["said"], explain or self._explain_by(fields["summary"]))
        if "perhaps" in fields and explain:
            explain = _make_matcher(fields["perhaps"], explain, always=True)
        assert cause_id not in CATALOGUE, cause_id
        fix = (*(part for key, part in parts if key == "fix"), *self._always)
        CATALOGUE[cause_id] = Cause(
            cause_id, _one_line(description), fields["seen"], fields["unless"], fix, bool(again), fields["summary"], explain,
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


def make_report(cause_id: str, summary: str, evidence: list[str], **fields: Any) -> dict[str, Any]:
    """Report why Stoker stops the job, for launch_failures.make_report_verdict. `fields` extend or replace those of the report."""
    cause = get_cause(cause_id)
    return {
        "cause": cause_id,
        "exit_code": EX_SOFTWARE,
        "summary": summary,
        "retryable": cause.retryable,
        "evidence": evidence,
        "fix": list(cause.fix),
        **fields,
    }


def load_exit_rules() -> list[Cause]:
    """Return the causes read off a rank's exit, by the ORDER of their modules, then in the order of the file.

    Specific causes come before a mere exception or signal.
    """
    families = sorted(import_modules("stoker.control.verdict.rules"), key=lambda module: getattr(module, "ORDER", 70))
    return [
        cause
        for family in families
        for cause in CATALOGUE.values()
        if cause.explain and cause.module == family.__name__
    ]


def get_cause(cause_id: str) -> Cause:
    """Return a cause of any module, importing all of rules/ first."""
    load_exit_rules()
    return CATALOGUE[cause_id]


# The summaries of these causes don't name the line that raised: GPU errors are noticed later than they happen (the evidence
# has the line as "noticed at"), and a traced NaN is raised by the training loop that checks for it.
_RAISED_ELSEWHERE = ("gpu.", "oom.gpu", "nccl.", "nan.traced")


def _applies(advice: str, printed: str) -> bool:
    """Return whether a fix applies. A fix that begins with a quoted message applies only if the rank printed that message."""
    quoted = re.match(r'"([^"]+)"', advice)
    return quoted is None or quoted[1] in printed


def make_verdict(cause: Cause, case: Case, match: CauseMatch) -> Verdict:
    """Make the verdict of a match. The summary names the line that raised, except for causes in _RAISED_ELSEWHERE."""
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
