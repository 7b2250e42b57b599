"""Two host failures at random moments, five with --all, for real; two hundred in benchmarks/host_failures.py. And: the benchmark would see what must not happen."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from conftest import at_length
from netcluster import why_not

pytest.importorskip("torch")
sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
import host_failures

SEED = 7


@at_length  # each kind alone: test_elastic.py, test_multihost.py
@pytest.mark.parametrize("failures", [2, 5])
def test_host_failures_end_in_finished_runs_or_true_verdicts_and_leave_nothing_running(
    tmp_path: Path, failures: int
) -> None:
    reason = why_not()
    if reason:
        pytest.skip(f"no test cluster here: {reason}")
    found, endings = host_failures.fail_hosts(tmp_path, failures=failures, per_run=failures, seed=SEED, say=print)
    assert len(found) == failures and len({one.kind for one in found}) == failures
    assert [line for one in endings for line in one.wrong] == []
    assert any(one.status == "completed" and one.steps for one in endings)


def made(*attempts: range) -> list[dict[str, Any]]:
    curve = host_failures.reference(100)
    return [
        {"attempt": n, "step": step, "ids": curve[step][0], "loss": curve[step][1], "time": 0.0}
        for n, steps in enumerate(attempts)
        for step in steps
    ]


class Ended:
    """A run as host_failures.Run shows it, with a record we make up."""

    def __init__(self, lines: list[dict[str, Any]], code: int = 0, **verdict: Any) -> None:
        self._lines, self.code = lines, code
        self._verdict = verdict or {"status": "completed", "cause": "completed", "summary": ""}

    def lines(self, _name: str) -> list[dict[str, Any]]:
        return json.loads(json.dumps(self._lines))

    def verdict(self) -> dict[str, Any]:
        return self._verdict

    def console(self) -> str:
        return ""


GOOD = made(range(13), range(10, 20))
LOST = {"status": "failed", "cause": "host.lost", "host": "b", "summary": "host b is lost"}


@pytest.mark.parametrize(
    ("run", "says"),
    [
        (Ended(GOOD), ""),
        (Ended(GOOD, 70, **LOST), ""),
        (
            Ended(
                GOOD,
                137,
                **{
                    **LOST,
                    "cause": "rank.killed",
                    "summary": "rank 1 was killed; then 1 of 3 hosts left, and --min-hosts is 2",
                },
            ),
            "",
        ),
        (
            Ended(GOOD, 137, **{**LOST, "cause": "rank.killed", "summary": "rank 1 was killed"}),
            "the verdict is rank.killed",
        ),
        (Ended([*GOOD[:5], {**GOOD[5], "loss": GOOD[5]["loss"] * 1.00001}, *GOOD[6:]]), "a lone process has"),
        (Ended([*GOOD[:5], {**GOOD[5], "ids": GOOD[4]["ids"]}, *GOOD[6:]]), "a lone process has"),
        (Ended([*GOOD[:5], GOOD[4], *GOOD[5:]]), "step 4 after step 4"),
        (Ended([*GOOD, {**GOOD[11], "attempt": 0}]), "two halves trained"),
        (Ended(made(range(13), range(15, 20))), "began at step 15"),
        (Ended([]), "without all of its steps"),
        (Ended(GOOD, 70, **{**LOST, "host": "a"}), "hurt were ['b', 'c']"),
        (Ended(GOOD, 1, **{**LOST, "cause": "rank.exception"}), "the verdict is rank.exception"),
    ],
)
def test_what_must_not_happen_is_seen(run: Any, says: str) -> None:
    found = list(host_failures.faults_in(run, {"b", "c"}))
    assert not found if not says else len(found) >= 1 and says in found[0]
