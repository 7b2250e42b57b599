"""What the thirty-fourth review found in folders that strangers packed."""

from __future__ import annotations

import gzip
import os
import tarfile
import tracemalloc
from pathlib import Path

import pytest

from stoker.contract import layout
from stoker.contract.diskroom import DiskRoom
from stoker.contract.safe_io import read_json
from stoker.control.doctor import bundle
from stoker.control.machine.facts import Examination
from stoker.control.machine.model import Machine
from stoker.speedrun.rows import copy_usable
from stoker.training.data import sources


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


# ---- a cache that came with a folder ----


def test_an_index_of_holes_is_not_made_a_text_of(tmp_path: Path) -> None:
    """cache/digests.json of 1 GB with nothing stored and one emoji at its end took 6.3 GB of any `stoker train` or `prepare`."""
    index = tmp_path / "digests.json"
    with index.open("wb") as file:
        file.truncate(32 << 20)
        file.seek(0, os.SEEK_END)
        file.write("\U0001f600".encode())
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="zero bytes"):
            read_json(index)
        assert tracemalloc.get_traced_memory()[1] < 96 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("write", ["unpacked", "speedrun"])
def test_rows_of_a_private_file_stay_private_in_a_folder_that_is_open(tmp_path: Path, write: str) -> None:
    """`cache/unpacked` of a checkout has mode 0755: what Stoker unpacked there of a file of mode 0600 every user could read."""
    private, folder = tmp_path / "pairs.jsonl.gz", tmp_path / "cache" / "unpacked"
    folder.mkdir(parents=True)
    for place in (tmp_path / "cache", folder):
        place.chmod(0o755)
    private.write_bytes(gzip.compress(b'{"prompt": "hello", "completion": "there"}\n'))
    private.chmod(0o600)
    if write == "unpacked":
        made = sources.unfold(str(private), str(tmp_path / "cache"), print, 1, DiskRoom(str(folder), ""))
    else:
        made = str(folder / "sft-1.jsonl")
        copy_usable("sft", [str(private)], made, 1)
    assert "hello" in Path(made).read_text()
    assert os.stat(made).st_mode & 0o077 == 0
