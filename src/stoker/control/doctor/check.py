"""The register of checks. Adding one: a function with `@check` in a file of checks/, new or old, and a test."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from stoker.contract.discovery import modules_in
from stoker.contract.errors import EX_USAGE, Refusal
from stoker.contract.evidence import Finding
from stoker.contract.frozen import frozen, replace
from stoker.contract.options import suggest
from stoker.contract.text import escape
from stoker.control.machine.examination import Examination, Health
from stoker.control.machine.model import Gpu

Body = Callable[..., Iterator[Finding]]
Cards = list[tuple[Gpu, Health]]


@frozen
class Check:
    id: str
    needs: tuple[str, ...]  # parts of the examination: health, probes, torch, host, net, environment
    fast: bool  # also run before every `stoker run`: needs no more than a look
    body: Body
    text: str


CHECKS: dict[str, Check] = {}
# Of values that another host, or a recorded machine, told: one check less, and the others count.
_NO_SENSE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


def check(id: str, fast: bool = False) -> Callable[[Body], Body]:
    """A generator's parameters: parts of the examination, `cards` (each with its health), or the `ranks` planned."""

    def register(body: Body) -> Body:
        assert id not in CHECKS, id
        parts = ("health" if name == "cards" else name for name in _parameters(body))
        needs = tuple(part for part in parts if part not in ("machine", "missing", "ranks"))
        CHECKS[id] = Check(id, needs, fast, body, (body.__doc__ or "").strip())
        return body

    return register


def _parameters(body: Body) -> tuple[str, ...]:
    return body.__code__.co_varnames[: body.__code__.co_argcount]


def warn(text: str, fix: str = "", gpu: int | None = None) -> Finding:
    return Finding("", "warn", text, fix, gpu)


def fail(text: str, fix: str = "", gpu: int | None = None) -> Finding:
    return Finding("", "fail", text, fix, gpu)


def unknown(text: str) -> Finding:
    return Finding("", "unknown", text)


def load_checks() -> dict[str, Check]:
    """All checks, in the order of their files, whichever of these was imported first."""
    places = {module.__name__: place for place, module in enumerate(modules_in("stoker.control.doctor.checks"))}
    ordered = sorted(CHECKS.values(), key=lambda check: places.get(check.body.__module__, len(places)))
    return {check.id: check for check in ordered}


def choose(only: list[str], skip: list[str]) -> list[Check]:
    checks = load_checks()
    for word in (*only, *skip):
        if not any(id.startswith(word) for id in checks):
            raise Refusal(f"no check {word!r}{suggest(word, checks)}; `stoker docs doctor` lists them", EX_USAGE)
    chosen = [one for one in checks.values() if not only or one.id.startswith(tuple(only))]
    return [one for one in chosen if not (skip and one.id.startswith(tuple(skip)))]


def run_checks(checks: list[Check], found: Examination, ranks: int = 0) -> list[Finding]:
    """What is wrong, and what could not be checked. A healthy machine gives nothing."""
    findings: list[Finding] = []
    missing = found.missing or {}
    known = {**found.__dict__, "missing": missing, "ranks": ranks}
    health = found.health or {}
    known["cards"] = [(gpu, health[gpu.uuid]) for gpu in found.machine.gpus if gpu.uuid in health]
    for one in checks:
        lacking = [
            f"{part}: {missing.get(part) or missing.get('machine') or 'not asked'}"
            for part in one.needs
            if known[part] is None
        ]
        if lacking:
            findings.append(Finding(one.id, "unknown", f"could not be checked ({'; '.join(lacking)})"))
        else:
            given = {name: known[name] for name in _parameters(one.body)}
            try:
                findings += [replace(finding, id=one.id) for finding in one.body(**given)]
            except _NO_SENSE as problem:
                why = f"{type(problem).__name__}: {problem}"
                findings.append(Finding(one.id, "unknown", f"could not be checked ({escape(why, 200)})"))
    return findings


def exit_code(findings: list[Finding]) -> int:
    """2 failure, 3 something could not be checked, 1 warning, 0 fine."""
    levels = {finding.level for finding in findings}
    return next((code for level, code in (("fail", 2), ("unknown", 3), ("warn", 1)) if level in levels), 0)
