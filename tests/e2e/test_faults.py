"""A spread over tests/faults, for real; all of it with `bash test.sh --all`. benchmarks/faults.py runs all of them, beside torchrun."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import Done, Stoker, alone_on_the_card, at_length_but
from faults.around import cannot
from faults.cases import CASES, Case
from stoker.control.verdict import cause_docs
from stoker.control.verdict.catalogue import CATALOGUE

FAULTS = Path(__file__).parents[1] / "faults"
SHARED = ("__init__.py", "around.py", "cases.py", "mistakes.py", "moment.py", "training.py")
CHOSEN = [case for case in CASES if case.ci]


def launch(stoker: Stoker, case: Case) -> Done:
    """A fault that hangs is stopped by --hang-timeout 10s; nothing here takes a minute on its own."""
    pytest.importorskip("torch")
    reason = cannot(case.needs)
    if reason:
        pytest.skip(reason)
    if case.needs == "gpu":
        stoker.env.pop("STOKER_MACHINE")
    around = [sys.executable, str(FAULTS / "around.py"), *case.around] if case.around else []
    command = [
        sys.executable,
        "-m",
        "stoker",
        "run",
        "--nproc-per-node",
        str(case.ranks),
        *case.args,
        str(FAULTS / case.script),
        *case.script_args,
    ]
    with alone_on_the_card() if case.needs == "gpu" else contextlib.nullcontext():
        done = subprocess.run(
            [*around, *command],
            cwd=stoker.cwd,
            env=stoker.environment(),
            capture_output=True,
            timeout=90,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    return Done(done.returncode, done.stdout, done.stderr, stoker.cwd)


@pytest.mark.parametrize("case", at_length_but(CHOSEN, CASES), ids=[case.name for case in CASES])
def test_the_verdict_names_the_cause_and_the_rank(stoker: Stoker, case: Case) -> None:
    done = launch(stoker, case)
    told = done.verdict
    if case.kind == "slow":
        named = [(event["cause"], event["rank"]) for event in done.events if event["event"] == "straggler"]
        assert named and all(cause in case.cause and rank in case.rank for cause, rank in named), named
        assert told["status"] == "completed"
    else:
        assert told["cause"] in case.cause, told
        assert told["rank"] in case.rank, told
    assert done.code in case.exit_code and told["exit_code"] == done.code, done.err[-2000:]
    assert len(list(done.run_dir.glob("attempt-*"))) == case.attempts
    assert case.says in json.dumps(told)
    assert all(place in told["summary"] for place in case.places), (case.places, told["summary"])
    if case.kind == "hang":
        suspected = [event.get("rank") for event in done.events if event["event"] == "suspicion"]
        assert suspected and all(rank in case.rank for rank in suspected), done.events[-5:]


def test_each_family_has_a_case_here() -> None:
    assert {case.family for case in CHOSEN} == {case.family for case in CASES}
    assert len({case.name for case in CASES}) == len(CASES)


def test_each_expected_cause_is_in_the_catalogue_and_alone_or_explained() -> None:
    cause_docs.make_page()
    assert {cause for case in CASES for cause in case.cause} - CATALOGUE.keys() == set()
    assert [case.name for case in CASES if len(case.cause) > 1 and not case.reason] == []
    assert all(case.places for case in CASES if case.line)


def test_the_guilty_rank_is_rank_0_as_often_as_another() -> None:
    styles = [case for case in CASES if case.family == "style" and case.rank != (None,)]
    first = sum(case.rank == (0,) for case in styles)
    assert len(styles) >= 40 and 0.4 < first / len(styles) < 0.6, f"{first} of {len(styles)}"
    assert {case.ranks for case in styles} == {2, 3, 4}


def test_each_script_says_what_goes_wrong_and_is_in_the_table() -> None:
    scripts = {path.name for path in FAULTS.glob("*.py")} - set(SHARED)
    assert scripts == {case.script for case in CASES}
    assert len(scripts) >= 46
    for name in scripts:
        assert ast.get_docstring(ast.parse((FAULTS / name).read_text())), name


def test_a_small_disk_is_only_there_for_its_command(tmp_path: Path) -> None:
    reason = cannot("root")
    if reason:
        pytest.skip(reason)
    where = tmp_path / "disk"
    where.mkdir()
    write = f"open({str(where / 'file')!r}, 'wb').write(bytes(3_000_000))"
    done = subprocess.run(
        [sys.executable, FAULTS / "around.py", "mount", "1m", where, sys.executable, "-c", write],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1 and "No space left on device" in done.stderr
    assert os.listdir(where) == []
