"""Names that hide behind other names, and texts and indexes that made work multiply."""

from __future__ import annotations

from pathlib import Path

import pytest

from conftest import machine_json
from stoker.contract.safe_io import read_json
from stoker.control.launch.console import LogLines


def test_a_line_without_end_behind_a_carriage_return_is_written() -> None:
    lines, written = LogLines(), 0
    for turn in range(64):
        lines.feed((b"" if turn else b"\r") + b"y" * 60_000)
        if lines.unfinished > 1 << 20:
            written += len(lines.partial())
    assert written > 1 << 20


def test_files_of_the_hubs_cache_are_read_and_others_beside_it_are_not(tmp_path: Path) -> None:
    entry = tmp_path / "models--a--b"
    snapshot, blobs = entry / "snapshots" / "0123", entry / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "abc").write_text("{}")
    (tmp_path / "private").write_text("{}")
    (snapshot / "config.json").symlink_to("../../blobs/abc")
    assert read_json(snapshot / "config.json", inside=True) == {}
    (blobs / "more").symlink_to(tmp_path / "private")
    (snapshot / ".git").mkdir()
    (snapshot / ".git" / "config").write_text("{}")
    for target in ("../../../private", "../../blobs/more", "/proc/self/environ", ".git/config"):
        (snapshot / "other.json").unlink(missing_ok=True)
        (snapshot / "other.json").symlink_to(target)
        with pytest.raises(OSError, match="leads out of its folder"):
            read_json(snapshot / "other.json", inside=True)


def test_a_recorded_machine_of_many_cards_or_words_is_checked_once() -> None:
    from stoker.control.doctor.checks.gpu import count
    from stoker.control.machine.model import machine_from_json

    words = ",".join(str(number) for number in range(100_000))
    (finding,) = count({"CUDA_VISIBLE_DEVICES": words}, machine_from_json(machine_json(2)), 0)
    assert len(finding.text) < 600
