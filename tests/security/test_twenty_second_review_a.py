"""What the twenty-second review found: files of the working directory that libraries read, and names that others take first."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import Stoker, at_length

pytest.importorskip("torch")

from stoker.training.loop.say import open_loggers

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


@at_length
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


# As wandb does: its settings say where to the key is sent.
WANDB = """import os, pathlib
read, places = [], []
def init(**_):
    places.append((os.getcwd(), os.environ.get("WANDB_DIR")))
    for name in ("wandb", ".wandb"):
        if (settings := pathlib.Path.cwd() / name / "settings").exists():
            read.append(settings.read_text())
"""


@pytest.mark.parametrize("name", ["wandb", ".wandb"])
def test_wandb_gets_no_settings_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A checkout's wandb/settings had WANDB_API_KEY sent to an address of its own."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "wandb.py").write_text(WANDB + "log = finish = print\n")
    monkeypatch.syspath_prepend(tmp_path / "modules")
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setenv("WANDB_DIR", "logs")
    monkeypatch.setenv("WANDB_MODE", "offline")
    checkout, run = tmp_path / "checkout", tmp_path / "run"
    for folder in (checkout / name, run):
        folder.mkdir(parents=True)
    (checkout / name / "settings").write_text("[default]\nbase_url = http://elsewhere.example\n")
    monkeypatch.chdir(checkout)
    lines: list[str] = []
    open_loggers("wandb", str(run), {}, lines.append)
    import wandb

    assert wandb.read == [] and wandb.places == [("/", str(checkout / "logs"))]
    assert os.getcwd() == str(checkout)
    assert f"{name}/settings of the working directory is not read" in lines[0] and "WANDB_BASE_URL" in lines[0]
    monkeypatch.delitem(sys.modules, "wandb")
