"""The only retry in these tests: a test that starts real processes may fail once, is run again, and is listed at the end.

What such a test measures in seconds, a machine without a free core can break; torch 2.13's gloo can also deadlock or abort
when a rank exits, with no launcher involved (docs/log.md). More than BUDGET reruns fail the whole run: then it is no accident.
"""

from __future__ import annotations

import pytest

BUDGET = 3
DELAY_S = 5

# Fixtures that start launchers, ranks, sshd or slurmd.
REAL = {"stoker", "netcluster", "slurm", "host", "start", "alone", "one_agent", "forks", "job", "speedrun", "installed"}

_reruns: list[str] = []  # node ids, in the process that prints the summary


def may_run_again(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.pluginmanager.hasplugin("rerunfailures"):
        return
    for item in items:
        if REAL & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.flaky(reruns=1, reruns_delay=DELAY_S))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.outcome == "rerun":  # type: ignore[comparison-overlap]  # pytest-rerunfailures' own
        _reruns.append(report.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if len(_reruns) > BUDGET and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.section(f"reruns: {len(_reruns)}, at most {BUDGET} allowed")
    for nodeid in _reruns:
        terminalreporter.write_line(f"rerun: {nodeid}")
    if len(_reruns) > BUDGET:
        terminalreporter.write_line(f"FAILED: {len(_reruns)} reruns, more than {BUDGET}: fix these tests", red=True)
