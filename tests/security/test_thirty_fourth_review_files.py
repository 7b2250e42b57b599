"""What the thirty-fourth review found in folders that strangers packed."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from stoker.contract import layout
from stoker.control.doctor import bundle
from stoker.control.machine.facts import Examination
from stoker.control.machine.model import Machine


def test_a_bundle_takes_the_end_of_a_runs_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`stoker doctor --bundle` read all of it: of 1 GB, 8.4 GB of memory, and no end in 100 s."""
    run = tmp_path / "20260101-000000-a"
    run.mkdir()
    (run / layout.RUN).write_text('{"schema": 1, "name": "a"}')
    log = run / layout.CONSOLE
    log.write_bytes(b"x" * (5 << 20) + b"\nthe last line\n")
    monkeypatch.setattr(bundle, "COMMANDS", {})
    monkeypatch.setattr(bundle, "_processes", lambda: "")
    bundle.write_bundle(str(tmp_path / "b.tgz"), Examination(Machine("here", 1, 1, 1)), [], str(tmp_path))
    with tarfile.open(tmp_path / "b.tgz") as archive:
        kept = archive.extractfile(f"stoker-doctor/latest-run/{layout.CONSOLE}")
        assert kept is not None
        assert kept.read() == b"(its last 4 MB)\nthe last line\n"
