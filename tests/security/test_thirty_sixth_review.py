"""What the thirty-sixth review found."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hostile_files import bytes_tokenizer_file

from stoker.contract import diskroom
from stoker.contract.names import Refusal
from stoker.training.data import sources, work
from stoker.training.tokenizer.tokenizer import load

ROOT = Path(__file__).resolve().parents[2]

# ---- setup.sh ----


@pytest.mark.parametrize("before", [None, 0o644])
def test_the_lock_of_a_setup_is_closed_to_who_may_only_read(tmp_path: Path, before: int | None) -> None:
    """Another user's flock on a file that they can read had `bash setup.sh` wait without end."""
    for name in ("setup.sh", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    lock = tmp_path / ".venv.lock"
    if before is not None:
        lock.touch()
        lock.chmod(before)
    held = tmp_path / "held"  # the setup ends at its first step behind the lock
    (tmp_path / "flock").write_text(f"#!/bin/sh\nstat -L -c %a /proc/self/fd/9 > {held}\nkill $PPID\n")
    (tmp_path / "flock").chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": sys.executable}
    subprocess.run(["bash", "-c", "umask 022 && exec bash setup.sh"], cwd=tmp_path, env=env, check=False, timeout=60)
    assert held.read_text() == "600\n"


# ---- data sets of the hub ----


@pytest.mark.parametrize("named", ["file://{table}::https://example.org/a", "{table}::hf://datasets/owner/name@main/a", "zip://rows.csv::{packed}::https://example.org/a"])  # fmt: skip
def test_a_chain_of_addresses_has_no_file_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    """Of file:///PATH::https://… `datasets` opens the path, and of zip://ROWS::PATH::https://… the archive here."""
    datasets, arrow, parquet = map(pytest.importorskip, ("datasets", "pyarrow", "pyarrow.parquet"))
    table, packed, page = tmp_path / "table.parquet", tmp_path / "packed.zip", tmp_path / "name" / "README.md"
    parquet.write_table(arrow.table({"text": ["private"]}), table)
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("rows.csv", "text\nprivate\n")
    page.parent.mkdir()
    path = named.format(table=table, packed=packed)
    page.write_text(f"---\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n    path: {path}\n---\n")
    real = datasets.load_dataset_builder

    def builder(name: str, config: str | None, revision: str | None) -> object:
        return real(str(page.parent), config, cache_dir=str(tmp_path / "hf"))  # as if it had been downloaded

    monkeypatch.setattr(datasets, "load_dataset_builder", builder)
    with pytest.raises(Refusal, match="as one of its files, which is not a file of the hub"):
        sources.fetch("owner/name", str(tmp_path / "cache"), lambda line: None)
    assert not (tmp_path / "cache" / "hub").exists()


# ---- a disk that is nearly full ----


@pytest.mark.parametrize("kind", ["stream", "chat"])
def test_one_part_of_prepared_data_leaves_some_of_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A row group of any size is one part, and the disk was looked at behind each part only."""
    bytes_tokenizer_file(tmp_path)
    texts = [(b"some words", True)] * 100
    said = [([("user", b"some"), ("assistant", b"words")], "here")] * 100
    monkeypatch.setattr(work, "texts", lambda span, key: iter(texts))
    monkeypatch.setattr(work, "conversations", lambda span, wrong: iter(said))
    monkeypatch.setattr(diskroom, "_BETWEEN", 64)
    monkeypatch.setattr(os, "statvfs", lambda folder: SimpleNamespace(f_bavail=1, f_frsize=4096, f_blocks=1000))
    told = SimpleNamespace(kind=kind, dtype="<u2", text_key="text", longest=512)
    span = SimpleNamespace(form="jsonl", begin=0, entry=0)
    with pytest.raises(Refusal, match="stay free"):
        work.do(load(str(tmp_path)), cast(Any, told), [cast(Any, span)], str(tmp_path / "part"))
