"""What the twenty-third review found in files of strangers: a few KB that stood for any amount of memory."""

from __future__ import annotations

import json
from pathlib import Path

from stoker.control.show.web.folders import Folders
from stoker.control.show.web.pages import _json
from stoker.control.show.web.texts import rows

# ---- rows of a run that are no JSON for a browser; answers that no server sent ----


def test_rows_with_no_numbers_are_shown(tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "run.json").write_text("{}")
    (tmp_path / "r" / "rollouts.jsonl").write_text('{"reward": NaN, "parts": {"exact": [-Infinity, 1.5]}}\n')
    found = rows(Folders(str(tmp_path), everybody=True), "r", "rollouts.jsonl", 0)
    assert found["rows"] == [{"reward": "nan", "parts": {"exact": ["-inf", 1.5]}}]
    assert json.loads(_json(found).body)["rows"] == found["rows"]
