"""What the twenty-second review found: files of the working directory that libraries read."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import Stoker

pytest.importorskip("torch")

SETTINGS = "figure.facecolor: red\naxes.facecolor: red\nlines.linewidth: 9\npatch.edgecolor: red\npatch.force_edgecolor: True\n"
RUN = """import json, os
with open(os.path.join(os.environ["STOKER_RUN_DIR"], "metrics.jsonl"), "w") as file:
    file.writelines(json.dumps({"schema": 1, "step": step, "loss": 5 - step}) + "\\n" for step in range(4))
"""


def test_a_picture_is_drawn_without_settings_of_the_working_directory(stoker: Stoker) -> None:
    """matplotlib reads a matplotlibrc there: a link to /dev/zero filled the memory at the end of every training."""
    pytest.importorskip("matplotlib")
    assert stoker("run", stoker.script("learns.py", RUN)).code == 0
    assert stoker("plot", "latest", "--png", "before.png").code == 0
    (stoker.cwd / "matplotlibrc").write_text(SETTINGS)
    assert stoker("plot", "latest", "--png", "behind.png").code == 0
    assert (stoker.cwd / "before.png").read_bytes() == (stoker.cwd / "behind.png").read_bytes()


def test_a_report_is_drawn_without_settings_of_the_working_directory(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    folder = tmp_path / "speedrun-cpu"
    folder.mkdir()
    rows = [
        {"name": name, "stage": name, "key": "1", "status": "done", "seconds": 60.0} for name in ("tokenizer", "base")
    ]
    (folder / "chain.json").write_text(json.dumps({"schema": 1, "stages": rows}))

    def drawn() -> bytes:
        command = [sys.executable, "-P", "-m", "stoker.speedrun.report", folder.name]
        subprocess.run(command, cwd=tmp_path, check=True)
        return (folder / "plots" / "time.svg").read_bytes()

    before = drawn()
    (tmp_path / "matplotlibrc").write_text(SETTINGS)
    assert drawn() == before
