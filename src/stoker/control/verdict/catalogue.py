"""The catalogue: every cause a verdict can name, one entry each. docs/verdicts.md is generated from it.

A cause is a text, and a function from a case (one rank's end, and the evidence around it) to what was found, or None;
one that a pattern and a sentence can find needs no function. Adding one is adding it to a file of rules/, new or old, and
its case to the tests. What Stoker finds by other means than a rank's end (a stall, a number, its own trouble) has none.
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
from stoker.control.verdict.exit_text import LINE, at, exit_code, find, first_line, line_of, path_in, place


@frozen
class Case:
    end: RankExit
    evidence: Evidence

    @property
    def who(self) -> str:
        return rank_name(self.end.rank, self.end.label)

    @property
    def message(self) -> str:
        """What the exception said; empty without one."""
        return self.end.error.message if self.end.error else ""

    @property
    def words(self) -> str:
        """Everything the rank said at its end: the exception, and the last lines it printed."""
        return self.message + "\n" + self.end.tail


@frozen
class CauseMatch:
    summary: str
    evidence: tuple[str, ...] = ()
    fix: tuple[str, ...] = ()  # instead of the entry's own
    retryable: bool | None = None  # instead of the entry's own


@frozen
class Cause:
    id: str
    says: str  # one sentence: what happened
    seen: str  # the evidence that makes it
    contradicts: str  # what would make it another cause
    fix: tuple[str, ...]
    retryable: bool
    summary: str  # a verdict's, where the text has one
    explain: Callable[..., CauseMatch | None] | None
    module: str


Match = re.Match[str]
Explanation = Callable[..., CauseMatch | None]  # of a case, and of the match where the cause says a pattern
Evidences = Callable[[Case, str], tuple[str, ...]]  # of a case, and of the line with the match
CATALOGUE: dict[str, Cause] = {}


class Family:
    """The causes of one module. Each is a text: its id (`, again` where another attempt may help) and what happened, what
    is `seen`, what makes it another cause (`unless`), each `fix`; other lines go on with the line before. `words`: what
    {NAME} stands for in it, perhaps several steps. `always`: the last step of each.
    """

    def __init__(
        self, module: str, evidence: Evidences | None = None, always: str = "", **words: str | tuple[str, ...]
    ) -> None:
        self._module = module
        self._evidence = evidence
        self._always = (always,) if always else ()
        self._words = {
            f"{{{name}}}": word if isinstance(word, str) else "\nfix: ".join(word) for name, word in words.items()
        }

    def entries(self, text: str) -> None:
        """Without a function. Of a rank's end: a pattern in its last words (`said`), a `summary`, the family's evidence."""
        for part in re.split(r"^(?=\S)", text.strip(), flags=re.M)[1:]:
            self._add(part)

    def cause(self, text: str) -> Callable[[Explanation], Explanation]:
        """Read off a rank's end by a function. With `said` it gets the match, or is not asked; with `perhaps` None, too."""

        def keep(function: Explanation) -> Explanation:
            self._add(text.strip(), function)
            return function

        return keep

    def _add(self, text: str, explain: Explanation | None = None) -> None:
        for name, word in self._words.items():
            text = text.replace(name, word)
        head, *rest = re.split(r"^ *(seen|unless|fix|said|perhaps|summary): ", text, flags=re.M)
        name, _, says = head.partition(": ")
        id, _, again = name.partition(", ")
        parts = [(key, _one_line(part)) for key, part in zip(rest[::2], rest[1::2], strict=True)]
        told = {"unless": "", "summary": "", **dict(parts)}
        if "said" in told:
            explain = _matching(told["said"], explain or self._explain_by(told["summary"]))
        if "perhaps" in told and explain:
            explain = _matching(told["perhaps"], explain, always=True)
        assert id not in CATALOGUE, id
        fix = (*(part for key, part in parts if key == "fix"), *self._always)
        about = (id, _one_line(says), told["seen"], told["unless"], fix, bool(again))
        CATALOGUE[id] = Cause(*about, told["summary"], explain, self._module)

    def _explain_by(self, summary: str) -> Explanation:
        assert self._evidence is not None
        evidence = self._evidence

        def explain(case: Case, found: Match) -> CauseMatch:
            line, path = line_of(found), path_in(line_of(found))
            error = case.end.error
            detail = error.message.partition(line + "\n")[2] if error is not None and line.endswith(":") else ""
            raised = f"{line} {first_line(detail)}" if detail else line
            raised = f"{error.type}: {raised}" if error is not None and error.type not in raised else raised
            words = {"who": case.who, "said": first_line(found[0]), "line": first_line(line), "at": at(case)}
            words["raised"] = first_line(raised)
            of_file = {"for_path": f" for {path}" if path else "", "at_path": f" at {path}" if path else ""}
            return CauseMatch(summary.format(*found.groups(), **words, **of_file), evidence(case, line))

        return explain


def _one_line(text: str) -> str:
    return re.sub(r"\s*\n\s*", " ", text.strip())


def _matching(pattern: str, function: Explanation, always: bool = False) -> Explanation:
    def explain(case: Case) -> CauseMatch | None:
        match = find(case, pattern.replace("| ", "|"))  # it was broken after a |
        return function(case, match) if match or always else None

    return explain


def report(id: str, summary: str, evidence: list[str], **more: Any) -> dict[str, Any]:
    """Why Stoker stops the job itself: what launch.trouble makes a verdict of. `more` adds to it, or stands instead."""
    known = named(id)
    return {
        "cause": id,
        "exit_code": EX_SOFTWARE,
        "summary": summary,
        "retryable": known.retryable,
        "evidence": evidence,
        "fix": list(known.fix),
        **more,
    }


def rules() -> list[Cause]:
    """Those read off a rank's end, by their file's ORDER, then as they stand: a reason before an exception or a signal."""
    families = sorted(modules_in("stoker.control.verdict.rules"), key=lambda module: getattr(module, "ORDER", 70))
    return [
        cause_
        for family in families
        for cause_ in CATALOGUE.values()
        if cause_.explain and cause_.module == family.__name__
    ]


def named(id: str) -> Cause:
    """A cause of any family, whether or not its file has been needed so far."""
    rules()
    return CATALOGUE[id]


# The line that raised is not the cause: a GPU's errors are noticed later than they happen (the evidence says "noticed at"), and a
# traced NaN is raised by the training loop that checks for it.
_RAISED_ELSEWHERE = ("gpu.", "oom.gpu", "nccl.", "nan.traced")


def _is_about(advice: str, printed: str) -> bool:
    """Return whether advice applies: a line that begins with a quoted message is only for that message."""
    quoted = re.match(r'"([^"]+)"', advice)
    return quoted is None or quoted[1] in printed


def verdict_of(cause_: Cause, case: Case, found: CauseMatch) -> Verdict:
    end = case.end
    where = place(end)
    printed = "\n".join((found.summary, *found.evidence, end.error.message if end.error else ""))
    fix = found.fix or tuple(
        line.replace("{rank}", str(end.rank)).replace("{place}", where)
        for line in cause_.fix
        if _is_about(line, printed)
    )
    summary = found.summary
    if end.error is not None and end.error.file and not cause_.id.startswith(_RAISED_ELSEWHERE):
        line = f"{end.error.file}:{end.error.line}"
        if not any(line in text for text in (summary, *fix)):
            summary += f" at {where}"
    return Verdict(
        "failed",
        cause_.id,
        summary,
        exit_code(end),
        rank=end.rank,
        host=end.host or None,
        gpu=end.label if "GPU" in end.label else None,
        evidence=tuple(line[:LINE] for line in found.evidence),
        retryable=cause_.retryable if found.retryable is None else found.retryable,
        fix=fix,
    )
