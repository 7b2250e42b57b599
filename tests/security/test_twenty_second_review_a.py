"""What the twenty-second review found: files of the working directory that libraries read, and names that others take first."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import Stoker, at_length
from localuser import ATTACKER, VICTIM, do_as, needs_root

pytest.importorskip("torch")

from stoker.control.record.ownership import own_folder
from stoker.training.data.ours import own_cache

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


def test_taken_names_keep_nobody_from_a_folder_of_their_own(public: Path) -> None:
    """A hundred folders in a shared cache, with names that can be told in advance, kept another user from training there."""
    needs_root()
    name = f"user-{VICTIM}"

    def take() -> None:
        for number in range(1, 200):
            for taken in (name, f"{name}-{VICTIM}", f"{name}-{VICTIM}-{number}"):
                (public / taken).mkdir(exist_ok=True)

    def look() -> None:
        own = Path(own_cache(str(public), lambda line: None))
        about = own.stat()
        assert own.parent == public and (about.st_uid, about.st_mode & 0o777) == (VICTIM, 0o700)
        assert own_folder(str(public), name) == str(own)  # found again

    do_as(ATTACKER, take)
    do_as(VICTIM, look)
    do_as(VICTIM, look)
    assert sum(path.stat().st_uid == VICTIM for path in public.iterdir()) == 1
