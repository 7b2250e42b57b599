"""Attacks of the tenth review on copies: --sync and --stage."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from stoker.control.cluster import copying, listing
from stoker.control.cluster.hosts import Hosts, from_mapping


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache-home"))


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """The launching user's own folder, beside what came from a stranger."""
    folder = tmp_path / "home" / ".ssh"
    folder.mkdir(parents=True)
    (folder / "id_rsa").write_text("secret-51c2")
    return folder


def _hosts() -> Hosts:
    return from_mapping({"hosts": [{"host": "far.example", "workdir": "/there"}]}, "cluster.yaml", written=False)


# ---- --sync: an index that names files behind a link ----


def _checkout(root: Path, link_to: Path, *names: str) -> Path:
    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", str(root), *words], check=True, capture_output=True, text=True).stdout

    root.mkdir()
    (root / "train.py").write_text("print(1)\n")
    git("init", "-q")
    git("add", "train.py")
    blob = git("hash-object", "-w", "train.py").strip()
    for name in names:
        git("update-index", "--add", "--cacheinfo", f"100644,{blob},link/{name}")
    (root / "link").symlink_to(link_to)
    (root / ".git" / "info" / "exclude").write_text("link\n")
    return root


def test_a_file_behind_a_link_that_the_index_names_is_left_out_and_named(tmp_path: Path, keys: Path) -> None:
    root, lines = _checkout(tmp_path / "repo", keys, "id_rsa"), []
    load = copying.sync_load(_hosts(), str(root), lines.append)
    assert [entry.path for entry in load.listing.entries] == ["train.py"]
    assert lines == ["link/id_rsa is not copied: git names it, but link is a symbolic link"]


def test_a_folder_behind_a_link_that_the_index_names_is_not_walked(tmp_path: Path, keys: Path) -> None:
    found = listing.working_directory(str(_checkout(tmp_path / "repo", keys.parent, ".ssh")))
    assert [entry.path for entry in found.entries] == ["train.py"] and found.behind_links == (("link/.ssh", "link"),)


@pytest.mark.parametrize("exchanged", ["sub", "sub/id_rsa"])
def test_a_link_that_comes_after_the_listing_is_not_followed(tmp_path: Path, keys: Path, exchanged: str) -> None:
    root = tmp_path / "work"
    (root / "sub").mkdir(parents=True)
    (root / "sub" / "id_rsa").write_text("mine")
    found = listing.working_directory(str(root))
    os.rename(root / exchanged, tmp_path / "away")
    (root / exchanged).symlink_to(keys if exchanged == "sub" else keys / "id_rsa")
    with pytest.raises(OSError):
        found.opened("sub/id_rsa")
