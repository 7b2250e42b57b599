"""The register of checks. Adding one: a function with `@check` in a file of checks/, new or old, and a test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

from stoker.contract.discovery import modules_in
from stoker.contract.names import EX_USAGE, Refusal
from stoker.contract.settings import suggest
from stoker.contract.shape import replace, shape
from stoker.contract.shapes import Finding
from stoker.control.machine.facts import Examination


@shape
class Asked:
    """What the run that is being prepared wants; zero where nothing is asked for."""

    ranks: int = 0
    runs_dir: str = "runs"


Part = TypeVar("Part")
Body = Callable[[Examination, Asked], Iterator[Finding]]


@shape
class Check:
    id: str
    needs: tuple[str, ...]  # parts of the examination: health, probes, torch, host, net, environment
    fast: bool  # also run before every `stoker run`: needs no more than a look
    body: Body
    text: str


CHECKS: dict[str, Check] = {}


def check(id: str, *needs: str, fast: bool = False) -> Callable[[Body], Body]:
    def register(body: Body) -> Body:
        assert id not in CHECKS, id
        CHECKS[id] = Check(id, needs, fast, body, (body.__doc__ or "").strip())
        return body

    return register


def known(part: Part | None) -> Part:
    """A part of the examination that the check needs: without it the check is not made."""
    assert part is not None
    return part


def warn(text: str, fix: str = "", gpu: int | None = None) -> Finding:
    return Finding("", "warn", text, fix, gpu)


def fail(text: str, fix: str = "", gpu: int | None = None) -> Finding:
    return Finding("", "fail", text, fix, gpu)


def unknown(text: str) -> Finding:
    return Finding("", "unknown", text)


def load() -> dict[str, Check]:
    """All checks, in the order of their files."""
    modules_in("stoker.control.doctor.checks")
    return CHECKS


def choose(only: list[str], skip: list[str]) -> list[Check]:
    checks = load()
    for word in (*only, *skip):
        if not any(id.startswith(word) for id in checks):
            raise Refusal(f"no check {word!r}{suggest(word, checks)}; `stoker docs doctor` lists them", EX_USAGE)
    chosen = [one for one in checks.values() if not only or one.id.startswith(tuple(only))]
    return [one for one in chosen if not (skip and one.id.startswith(tuple(skip)))]


def run(checks: list[Check], found: Examination, asked: Asked) -> list[Finding]:
    """What is wrong, and what could not be checked. A healthy machine gives nothing."""
    findings: list[Finding] = []
    missing = found.missing or {}
    for one in checks:
        lacking = [
            f"{part}: {missing.get(part) or missing.get('machine') or 'not asked'}"
            for part in one.needs
            if getattr(found, part) is None
        ]
        if lacking:
            findings.append(Finding(one.id, "unknown", f"could not be checked ({'; '.join(lacking)})"))
        else:
            findings += [replace(finding, id=one.id) for finding in one.body(found, asked)]
    return findings


def exit_code(findings: list[Finding]) -> int:
    """2 failure, 3 something could not be checked, 1 warning, 0 fine."""
    levels = {finding.level for finding in findings}
    return next((code for level, code in (("fail", 2), ("unknown", 3), ("warn", 1)) if level in levels), 0)
