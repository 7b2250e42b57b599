"""Files that attack their reader. Each ends in one clear line and an exit code from 64 to 78: no traceback, no hang, no memory without end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hostile_files import CASES

from conftest import machine_json
from stoker.cli.main import main

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def no_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "machine.json").write_text(json.dumps(machine_json(0)))
    monkeypatch.setenv("STOKER_MACHINE", str(tmp_path / "machine.json"))
    monkeypatch.chdir(tmp_path)


def check_refusal(code: int, err: str) -> None:
    assert 64 <= code <= 78, (code, err[-2000:])
    assert "Traceback" not in err and "\x1b" not in err and "\x07" not in err, err[-2000:]
    *before, last = err.splitlines() or [""]
    assert last.startswith("stoker: ") or any(line.startswith("stoker: ") for line in before), err[-2000:]
    assert len(last) < 5000 and sum(line.startswith("stoker: ") for line in err.splitlines()) <= 3, err[-2000:]


@pytest.mark.parametrize("case", CASES)
def test_a_hostile_file_is_refused_in_one_line(case: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    where = tmp_path / "hostile"
    where.mkdir()
    argv = CASES[case](where)
    if argv[0] == "export":
        import stoker.training.generate.exporting  # noqa: F401  torch alone takes 20 s on a busy machine
    began = time.monotonic()
    code = main(argv)
    took = time.monotonic() - began
    check_refusal(code, capfd.readouterr().err)
    assert took < 20, f"{took:.1f} s"
