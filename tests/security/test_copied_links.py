"""Attacks of the tenth review on copies: --sync and --stage."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from stoker.contract import protocol
from stoker.contract.names import Refusal
from stoker.control.cluster import agentzip, copying, farend, listing, ssh
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


# ---- --stage: links out of the folder ----


@pytest.mark.parametrize("kind", ["folder", "file", "deep", "relative", "root"])
def test_a_link_out_of_a_staged_folder_is_refused_by_name(tmp_path: Path, keys: Path, kind: str) -> None:
    model = tmp_path / "model"
    (model / "inner").mkdir(parents=True)
    (model / "config.json").write_text("{}")
    link, target = {
        "folder": ("extra", str(keys)),
        "file": ("weights", str(keys / "id_rsa")),
        "deep": ("inner/extra", str(keys)),
        "relative": ("extra", "../home/.ssh"),
        "root": ("extra", "/"),
    }[kind]
    (model / link).symlink_to(target)
    with pytest.raises(Refusal) as refused:
        listing.tree(str(model))
    leads_to = os.path.realpath(model / link)
    assert f"the link {model / link} leads out of it, to {leads_to}; stage that by itself" in refused.value.line
    assert "\n" not in refused.value.line


def _hub_entry(tmp_path: Path) -> Path:
    entry = tmp_path / "hub" / "models--a--b"
    (entry / "blobs").mkdir(parents=True)
    (entry / "blobs" / "0c1d").write_text("weights")
    (entry / "snapshots" / "rev" / "onnx").mkdir(parents=True)
    (entry / "snapshots" / "rev" / "model.safetensors").symlink_to("../../blobs/0c1d")
    (entry / "snapshots" / "rev" / "onnx" / "model.onnx").symlink_to("../../../blobs/0c1d")
    return entry


@pytest.mark.parametrize("path", ["", "snapshots", "snapshots/rev", "snapshots/rev/onnx"])
def test_the_hubs_own_links_are_followed(tmp_path: Path, path: str) -> None:
    found = listing.tree(str(_hub_entry(tmp_path) / path))
    assert any(entry.path.endswith("model.onnx") for entry in found.entries)
    for entry in found.entries:
        handle = found.opened(entry.path)
        assert entry.kind == "file" and os.read(handle, 100) == b"weights"
        os.close(handle)


def test_a_path_that_is_a_link_itself_is_staged(tmp_path: Path) -> None:
    snapshot = _hub_entry(tmp_path) / "snapshots" / "rev"
    (tmp_path / "mine").symlink_to(snapshot)
    for named, path in (
        (tmp_path / "mine", "model.safetensors"),
        (snapshot / "model.safetensors", "model.safetensors"),
    ):
        found = listing.tree(str(named))
        os.close(found.opened(path))
        assert path in [entry.path for entry in found.entries]


@pytest.mark.parametrize("forged", ["blobs", "blobs/0c1d"])
def test_a_forged_hub_entry_leads_nowhere(tmp_path: Path, keys: Path, forged: str) -> None:
    entry = _hub_entry(tmp_path)
    (keys / "0c1d").write_text("secret-51c2")
    os.rename(entry / forged, tmp_path / "away")
    (entry / forged).symlink_to(keys if forged == "blobs" else keys / "id_rsa")
    with pytest.raises(Refusal, match="leads out of it"):
        listing.tree(str(entry / "snapshots" / "rev"))


def test_a_staged_link_that_leads_out_later_is_not_followed(tmp_path: Path, keys: Path) -> None:
    entry = _hub_entry(tmp_path)
    found = listing.tree(str(entry / "snapshots" / "rev"))
    (entry / "blobs" / "0c1d").unlink()
    (entry / "blobs" / "0c1d").symlink_to(keys / "id_rsa")
    with pytest.raises(OSError, match="leads out of"):
        found.opened("model.safetensors")


# ---- a host that stays silent ----


def _copied(source: Path, there: Path, monkeypatch: pytest.MonkeyPatch, far_end: list[str]) -> str:
    """Why it failed. `far_end`: the command that answers instead of the receiver."""
    source.mkdir()
    (source / "a.bin").write_bytes(b"a" * (4 << 20))
    hosts = _hosts()
    load = copying.sync_load(hosts, str(source), lambda line: None)
    monkeypatch.setattr(ssh, "ssh_command", lambda *_: far_end)
    one_copy = copying._Copy(hosts.hosts[0], hosts, load, str(there))
    thread = threading.Thread(target=one_copy.run, daemon=True)
    thread.start()
    thread.join(30.0)
    waits_still = thread.is_alive()
    one_copy.stop()
    thread.join(10.0)
    return "it waits still" if waits_still else one_copy.failure


GREETED = f"printf '{protocol.SENTINEL.decode().strip()}\\n'"
NEED = """printf '{"is":"need","size":9}\\n["a.bin"]'"""


@pytest.mark.parametrize(
    "says",
    [
        f"{GREETED}; cat > /dev/null; sleep 600",
        f"{GREETED}; exec sleep 600",
        f"{GREETED}; {NEED}; exec sleep 600",
        "exec sleep 600",
    ],
    ids=["listens", "reads nothing", "stops in the middle", "never greets"],
)
def test_a_host_that_stays_silent_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: str) -> None:
    monkeypatch.setattr(copying, "SILENCE_S", 1.0)
    monkeypatch.setattr(farend, "GREETING_S", 2.0)
    failure = _copied(tmp_path / "source", tmp_path / "there", monkeypatch, ["sh", "-c", says])
    assert "nothing was heard from it for" in failure and failure.isprintable(), failure


SLOW = """
import os, sys, time
from stoker.control.agent import receiving

left = int(sys.argv[1])  # the agent's zip, which this one does not need
while left:
    left -= len(os.read(0, left))
offer = receiving.Receiver.offer
receiving.Receiver.offer = lambda *given: time.sleep(4.0) or offer(*given)
sys.exit(receiving.serve(0, 1))
"""


def test_a_host_that_takes_its_time_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It hashes for longer than it may stay silent."""
    monkeypatch.setattr(copying, "SILENCE_S", 3.0)
    far_end = [sys.executable, "-c", SLOW, str(len(agentzip.pack()))]
    assert _copied(tmp_path / "source", tmp_path / "there", monkeypatch, far_end) == ""
    assert (tmp_path / "there" / "a.bin").stat().st_size == 4 << 20
