"""The registry of checks. To add a check, write a function with `@check` in any file of checks/."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator

from stoker.contract.discovery import import_modules
from stoker.contract.env_vars import MACHINE
from stoker.contract.errors import EX_USAGE, Refusal
from stoker.contract.evidence import Finding
from stoker.contract.frozen import frozen, replace
from stoker.contract.options import suggest
from stoker.contract.text import escape
from stoker.control.machine.examination import KNOWN_VARIABLES, Examination, GpuHealth
from stoker.control.machine.model import Gpu

Body = Callable[..., Iterator[Finding]]
GpusWithHealth = list[tuple[Gpu, GpuHealth]]


@frozen
class Check:
    id: str
    needs: tuple[str, ...]  # parts of the examination: health, probes, torch, host, net, environment
    fast: bool  # takes milliseconds, so it also runs before every `stoker run`
    body: Body
    text: str  # its documentation


CHECKS: dict[str, Check] = {}
# Checks raise these for odd values of another host or a recorded machine. Such a check is reported as unknown.
_ODD_VALUE_ERRORS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
_OBSERVE_S = 3.0  # a driver that takes longer counts as not responding
LEVELS = ("fail", "warn", "unknown")


def check(id: str, fast: bool = False) -> Callable[[Body], Body]:
    """Register a generator of findings.

    The names of its parameters say what it gets: parts of the examination, `gpus` (each with its health), `missing` or
    the number of planned `ranks`.
    """

    def register(body: Body) -> Body:
        assert id not in CHECKS, id
        parts = ("health" if name == "gpus" else name for name in _parameters(body))
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
    """Import all checks and return them by id, in the order of their files."""
    files = {module.__name__: number for number, module in enumerate(import_modules("stoker.control.doctor.checks"))}
    ordered = sorted(CHECKS.values(), key=lambda check: files.get(check.body.__module__, len(files)))
    return {check.id: check for check in ordered}


def choose_checks(only: list[str], skip: list[str]) -> list[Check]:
    """Return the checks whose ids begin with a prefix in `only` (all if it is empty) and with none in `skip`."""
    checks = load_checks()
    for prefix in (*only, *skip):
        if not any(id.startswith(prefix) for id in checks):
            raise Refusal(
                f"there is no check {prefix!r}{suggest(prefix, checks)}; `stoker docs doctor` lists all checks",
                EX_USAGE,
            )
    return [
        check
        for check in checks.values()
        if (not only or check.id.startswith(tuple(only))) and not check.id.startswith(tuple(skip))
    ]


def run_checks(checks: list[Check], examination: Examination, ranks: int = 0) -> list[Finding]:
    """Run the checks. Return what is wrong and what could not be checked; a healthy machine has no findings."""
    findings: list[Finding] = []
    missing = examination.missing or {}
    health = examination.health or {}
    parts = {**examination.__dict__, "missing": missing, "ranks": ranks}
    parts["gpus"] = [(gpu, health[gpu.uuid]) for gpu in examination.machine.gpus if gpu.uuid in health]
    for check in checks:
        absent = [part for part in check.needs if parts[part] is None]
        if absent:
            reasons = [f"{part}: {missing.get(part) or missing.get('machine') or 'not examined'}" for part in absent]
            findings.append(Finding(check.id, "unknown", f"could not be checked ({'; '.join(reasons)})"))
            continue
        arguments = {name: parts[name] for name in _parameters(check.body)}
        try:
            findings += [replace(finding, id=check.id) for finding in check.body(**arguments)]
        except _ODD_VALUE_ERRORS as problem:
            reason = escape(f"{type(problem).__name__}: {problem}", 200)
            findings.append(Finding(check.id, "unknown", f"could not be checked ({reason})"))
    return findings


def exit_code(findings: list[Finding]) -> int:
    """Return 2 for a failure, 3 if something could not be checked, 1 for a warning, else 0."""
    levels = {finding.level for finding in findings}
    return next((code for level, code in (("fail", 2), ("unknown", 3), ("warn", 1)) if level in levels), 0)


def count_fast_findings(runs_dir: str) -> tuple[str, dict[tuple[str, str], int]]:
    """Run the fast checks and return (host, number of findings by check and level, including zeros).

    A child process queries the driver. If the driver hangs, this takes 3 s and all checks are unknown.
    """
    from stoker.control.machine.examine import observe_in_child
    from stoker.control.machine.host_limits import read_host_limits
    from stoker.control.machine.observe import read_recorded

    recorded = os.environ.get(MACHINE)
    try:
        machine = read_recorded(recorded) if recorded else observe_in_child(_OBSERVE_S)
    except Refusal as problem:
        machine = problem.line
    fast = [check for check in load_checks().values() if check.fast]
    counts = Counter({(check.id, level): 0 for check in fast for level in LEVELS})
    if isinstance(machine, str):
        counts.update((check.id, "unknown") for check in fast)
        return os.uname().nodename, dict(counts)
    environment = {name: os.environ[name] for name in KNOWN_VARIABLES if name in os.environ}
    examination = Examination(machine, host=read_host_limits(runs_dir), environment=environment)
    counts.update((finding.id, finding.level) for finding in run_checks(fast, examination))
    return machine.hostname, dict(counts)
