"""--sync and --stage through real ssh to three hosts with a disk folder each, and the comparison that stands in for them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import Stoker, wait_for
from localuser import ATTACKER, needs_root
from netcluster import NetCluster
from stoker.contract import progress, protocol
from stoker.contract.errors import Refusal
from stoker.control.agent.file_receiver import CopyError, FileReceiver, serve
from stoker.control.agent.probes.files import files
from stoker.control.cluster import agent_zip, check_rules, file_list, file_sync, hosts, ssh
from stoker.control.machine.file_hash import FileHashes, sha256_of

ODD = [
    'a b/it\'s "quoted".py',
    "new\nline.txt",
    "-rf",
    "$(id) `x`;&",
    "ümlaut.txt",
    b"caf\xe9.bin".decode("utf-8", "surrogateescape"),
]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache-home"))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A checkout with ignored, untracked, odd and deleted files."""
    root = tmp_path / "my train's"
    root.mkdir()
    for path in (
        *ODD,
        "train.py",
        "pkg/__init__.py",
        "gone.py",
        "runs/log",
        "big/ignored.bin",
        ".venv/x",
        "__pycache__/x.pyc",
        "run.sh",
    ):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(f"content of {path.encode('utf-8', 'surrogateescape')!r}\n")
    (root / "run.sh").chmod(0o755)
    (root / "link").symlink_to("pkg/__init__.py")
    (root / ".gitignore").write_text("big/\n")
    git = ["git", "-C", str(root), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "train.py", "gone.py", ".gitignore"], ["commit", "-qm", "x"]):
        subprocess.run([*git, *words], check=True)
    (root / "gone.py").unlink()
    return root


WANTED = {*ODD, "train.py", "pkg/__init__.py", "run.sh", "link", ".gitignore"}


def _tree(root: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for folder, folders, names in os.walk(root):
        for name in [*names, *(one for one in folders if os.path.islink(os.path.join(folder, one)))]:
            path = os.path.join(folder, name)
            found[os.path.relpath(path, root)] = os.readlink(path) if os.path.islink(path) else Path(path).read_bytes()
    found.pop(".stoker-sync.json", None)
    return found


def _read(cluster: NetCluster, **extra: Any) -> hosts.Hosts:
    return hosts.read_hosts_file(str(cluster.file(**extra)))


class Said(list[str]):
    def __call__(self, line: str) -> None:
        self.append(line)


def _sync(to: hosts.Hosts, source: str, say: Said) -> None:
    file_sync.copy_to_hosts(to, file_sync.plan_sync(to, source, say), say)


def _stage(to: hosts.Hosts, arguments: list[str], say: Said) -> None:
    for argument in arguments:
        file_sync.copy_to_hosts(to, file_sync.plan_stage(to, argument, say), say)


# ---- what is copied ----


def test_a_checkout_gives_what_git_does_not_ignore(source: Path) -> None:
    found = file_list.list_working_directory(str(source))
    assert {entry.path for entry in found.entries} == WANTED
    assert {entry.path: (entry.kind, entry.target) for entry in found.entries}["link"] == ("link", "pkg/__init__.py")
    inner = source / "inner"
    subprocess.run(["git", "init", "-q", str(inner)], check=True)
    (inner / "mine.py").write_text("")
    assert "inner/mine.py" in {entry.path for entry in file_list.list_working_directory(str(source)).entries}
    assert {entry.path for entry in file_list.list_working_directory(str(source / "pkg")).entries} == {"__init__.py"}


def test_a_plain_folder_gives_all_but_what_is_made_anew(source: Path) -> None:
    shutil.rmtree(source / ".git")
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(source / "sock"))
        found = file_list.list_working_directory(str(source))
    assert {entry.path for entry in found.entries} == WANTED | {"big/ignored.bin"} and found.skipped == (
        ("sock", "it is neither a file nor a link"),
    )


def _git(folder: Path, *words: str) -> str:
    settings = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "protocol.file.allow=always")
    return subprocess.run(["git", *settings, *words], cwd=folder, check=True, capture_output=True, text=True).stdout


def test_a_submodule_that_was_not_fetched_is_left_out(tmp_path: Path) -> None:
    for name in ("checkout", "inner"):
        (tmp_path / name).mkdir()
        _git(tmp_path / name, "init", "-q")
        (tmp_path / name / "part.py").write_text("pass\n")
        _git(tmp_path / name, "add", "part.py")
        _git(tmp_path / name, "commit", "-qm", "a")
    _git(tmp_path / "checkout", "submodule", "add", str(tmp_path / "inner"), "inner")
    _git(tmp_path / "checkout", "commit", "-qm", "a")
    _git(tmp_path, "clone", "-q", "checkout", "clone")
    clone = str(tmp_path / "clone")
    assert {entry.path for entry in file_list.list_working_directory(clone).entries} == {".gitmodules", "part.py"}
    _git(tmp_path / "clone", "submodule", "update", "--init")
    assert "inner/part.py" in {entry.path for entry in file_list.list_working_directory(clone).entries}


def test_a_checkout_of_another_user_inside_ours_is_copied_without_asking_its_git(tmp_path: Path) -> None:
    needs_root()
    for folder in (tmp_path, tmp_path / "inner"):
        folder.mkdir(exist_ok=True)
        (folder / "code.py").write_text("")
        _git(folder, "init", "-q")
    for path in (tmp_path / "inner", *(tmp_path / "inner").rglob("*")):
        os.chown(path, ATTACKER, ATTACKER, follow_symlinks=False)
    assert "inner/code.py" in {entry.path for entry in file_list.list_working_directory(str(tmp_path)).entries}


def test_a_folder_that_became_a_link_is_copied_as_a_link_and_what_git_knows_behind_it_is_named(
    tmp_path: Path,
) -> None:
    """As where somebody moved data to a larger disk and committed nothing."""
    root, larger, said = tmp_path / "repo", tmp_path / "larger", Said()
    for name in ("train.py", "data/a.txt", "data/b.txt"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    _git(root, "init", "-q")
    _git(root, "add", ".")
    (root / "data").rename(larger)
    (root / "data").symlink_to(larger)
    far = hosts.parse_hosts({"hosts": [{"host": "far.example", "workdir": "/there"}]}, "cluster.yaml", written=False)
    load = file_sync.plan_sync(far, str(root), said)
    assert [(entry.path, entry.kind) for entry in load.files.entries] == [("data", "link"), ("train.py", "file")]
    assert said == [f"not copying data/{name}.txt: git tracks it, but data is a symbolic link" for name in "ab"]


# ---- sync ----


def test_sync_brings_every_host_the_same_files_and_only_what_changed(
    netcluster: NetCluster, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, said = _read(netcluster), Said()
    with monkeypatch.context() as at_once:
        at_once.setattr(progress, "AFTER_S", 0.0)
        at_once.setattr(progress, "SAY_S", 0.0)
        _sync(read, str(source), said)
    assert re.match(rf"copying .* to {len(netcluster.hosts)} hosts: [\d.]+/[\d.]+ MiB.*, \d+ %, ETA [\d?]", said[0]), (
        said
    )
    here = {path: content for path, content in _tree(source).items() if path in WANTED}
    for host in netcluster.hosts:
        assert _tree(host.workdir) == here
        assert os.access(host.workdir / "run.sh", os.X_OK) and not os.access(host.workdir / "train.py", os.X_OK)
    assert "copied the working directory to" in said[-1] and all(host.name in said[-1] for host in netcluster.hosts)
    before = {host.name: (host.workdir / "train.py").stat().st_ino for host in netcluster.hosts}
    _sync(read, str(source), said)
    assert said[-1] == "the working directory is already the same on all hosts"
    (netcluster.hosts[1].workdir / "train.py").write_text("edited there")
    _sync(read, str(source), said)
    assert said[-1].startswith(f"copied the working directory to {netcluster.hosts[1].name} (1 file, ") and said[
        -1
    ].endswith("2 already had it")
    assert [(host.workdir / "train.py").stat().st_ino == before[host.name] for host in netcluster.hosts] == [
        True,
        False,
        True,
    ]
    assert _tree(netcluster.hosts[1].workdir) == here


def test_what_is_gone_here_goes_there_only_if_sync_brought_it(netcluster: NetCluster, source: Path) -> None:
    read, said = _read(netcluster), Said()
    there = netcluster.hosts[0].workdir
    (there / "theirs.txt").write_text("not ours")
    (there / "pkg").mkdir()
    (there / "pkg" / "__init__.py").write_bytes((source / "pkg" / "__init__.py").read_bytes())
    _sync(read, str(source), said)
    (there / "ümlaut.txt").write_text("edited there since")
    for path in ('a b/it\'s "quoted".py', "pkg/__init__.py", "ümlaut.txt", "link"):
        (source / path).unlink()
    _sync(read, str(source), said)
    assert not (there / "a b").exists() and not (there / "link").is_symlink()
    assert (there / "theirs.txt").exists() and (there / "ümlaut.txt").exists(), "never brought, or changed since"
    assert (there / "pkg" / "__init__.py").exists() and not (netcluster.hosts[1].workdir / "pkg").exists(), (
        "was there before the first copy"
    )


def test_what_another_folder_brought_to_the_same_workdir_stays(
    netcluster: NetCluster, source: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for name in ("train.py", "b.py"):
        (other / name).write_text(f"{name} of the other")
    said = Said()
    read = _read(netcluster)
    _sync(read, str(source), said)
    _sync(read, str(other), said)
    there = netcluster.hosts[0].workdir
    left = f"{there} also has {len(WANTED) - 1} files that --sync copied from {os.uname().nodename}:{source}; to separate them, set another workdir: for each source"
    assert f"host {netcluster.hosts[0].name}: {left}" in said and not any("removed" in line for line in said)
    assert _tree(there).keys() == {*WANTED, "b.py"} and (there / "train.py").read_text() == "train.py of the other"
    (source / "run.sh").unlink()
    (source / "train.py").unlink()
    _sync(read, str(source), said)
    assert _tree(there).keys() == {*WANTED, "b.py"} - {"run.sh"}, "its own is removed, but for what the other has, too"
    (other / "b.py").unlink()
    _sync(read, str(other), said)
    assert not (there / "b.py").exists() and (there / "pkg" / "__init__.py").exists()


def test_a_folder_in_the_way_of_a_file_is_named(netcluster: NetCluster, source: Path) -> None:
    (netcluster.hosts[2].workdir / "train.py").mkdir()
    (netcluster.hosts[2].workdir / "train.py" / "x").write_text("")
    (netcluster.hosts[1].workdir / "elsewhere").mkdir()
    (netcluster.hosts[1].workdir / "pkg").symlink_to("elsewhere")
    with pytest.raises(Refusal) as refused:
        _sync(_read(netcluster), str(source), Said())
    second, third = refused.value.line.splitlines()
    assert (
        second
        == f"host {netcluster.hosts[1].name}: {netcluster.hosts[1].workdir}/pkg is in the way: it is not a folder"
    )
    assert (
        third
        == f"host {netcluster.hosts[2].name}: {netcluster.hosts[2].workdir}/train.py is in the way: it is a folder that is not empty"
    )


def test_sync_finds_the_home_there_and_makes_the_workdir(netcluster: NetCluster, source: Path) -> None:
    _sync(_read(netcluster, workdir="~/new/my train's"), str(source), Said())
    for host in netcluster.hosts:
        assert (host.home / "new" / "my train's" / "train.py").exists()


def test_this_very_machine_is_not_copied_onto_itself(tmp_path: Path, source: Path) -> None:
    read = hosts.parse_hosts({"hosts": [{"host": "localhost"}]}, str(tmp_path / "c.yaml"))
    _sync(read, str(source), Said())
    assert not (source / ".stoker-sync.json").exists()
    read = hosts.parse_hosts(
        {"hosts": [{"host": "localhost", "workdir": str(tmp_path / "elsewhere")}]}, str(tmp_path / "c.yaml")
    )
    _sync(read, str(source), Said())
    assert set(_tree(tmp_path / "elsewhere")) == WANTED


@pytest.fixture
def small_disk(netcluster: NetCluster) -> Iterator[Path]:
    """Host 1's working directory on a disk of 24 MB."""
    where = netcluster.hosts[1].workdir
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(where)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no small disk may be mounted: {mounted.stderr.strip()}")
    # A mount made after sshd's own namespace reaches it only where mounts are shared; its server starts anew to see it.
    netcluster.stop_sshd(1)
    netcluster.start_sshd(1)
    yield where
    netcluster.stop_sshd(1)
    subprocess.run(["umount", "-l", str(where)], check=True)


def test_a_full_disk_is_named_and_nothing_half_written_stays(
    netcluster: NetCluster, source: Path, small_disk: Path
) -> None:
    (source / "weights.bin").write_bytes(os.urandom(12 << 20))
    with pytest.raises(Refusal) as refused:
        _sync(_read(netcluster), str(source), Said())
    assert (
        refused.value.line.startswith(
            f"host {netcluster.hosts[1].name}: the disk of {small_disk} is full: 12.0 MiB to copy, "
        )
        and "\n" not in refused.value.line
    )
    assert os.listdir(small_disk) == []


def test_hosts_that_fail_are_named_by_their_own_reasons(netcluster: NetCluster, source: Path) -> None:
    netcluster.stop_sshd(0)
    read = _read(netcluster, per_host=[{}, {"python": "/no/python"}, {"workdir": "/proc/nowhere"}])
    with pytest.raises(Refusal) as refused:
        _sync(read, str(source), Said())
    first, second, third = refused.value.line.splitlines()
    assert first.startswith(f"host {netcluster.hosts[0].name}: connection refused") and refused.value.code == 69
    assert second.startswith(f"host {netcluster.hosts[1].name}: no Python: /no/python does not exist there")
    assert third.startswith(f"host {netcluster.hosts[2].name}: /proc/nowhere: ")


def test_a_host_cut_off_in_the_middle_is_named_and_the_rest_have_it(
    netcluster: NetCluster, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_sync, "SILENCE_S", 5.0)
    (source / "weights.bin").write_bytes(os.urandom(20 << 20))
    netcluster.slow(0, 20)
    first = netcluster.hosts[0].workdir

    def begun() -> bool | None:
        with contextlib.suppress(FileNotFoundError):  # a small file, and whole by now
            return any(part.stat().st_size > 1 << 20 for part in first.glob(".stoker-part-*")) or None
        return None

    def cut_in_the_middle() -> None:
        wait_for(begun, 60)
        netcluster.cut(0)

    cut = threading.Thread(target=cut_in_the_middle)
    cut.start()
    said = Said()
    with pytest.raises(Refusal) as refused:
        _sync(_read(netcluster), str(source), said)
    cut.join()
    assert (
        refused.value.line.startswith(
            f"host {netcluster.hosts[0].name}: the connection was lost in the middle of the copy"
        )
        and "\n" not in refused.value.line
    )
    assert any("copying the working directory to 3 hosts: " in line for line in said), said
    assert (netcluster.hosts[1].workdir / "weights.bin").exists() and not (
        netcluster.hosts[0].workdir / "weights.bin"
    ).exists()
    assert wait_for(
        lambda: (
            True if not netcluster.pids(0) and not list(netcluster.hosts[0].workdir.glob(".stoker-part-*")) else None
        ),
        30,
    ), "the far end notices, too"


# ---- stage ----


def test_stage_brings_data_once_and_follows_links(netcluster: NetCluster, tmp_path: Path) -> None:
    store, model = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b" / "snapshots" / "model=7b"
    store.mkdir(parents=True)
    (model / "snapshot").mkdir(parents=True)
    (store / "blob").write_bytes(os.urandom(5 << 20))
    (model / "snapshot" / "weights").symlink_to("../../../blobs/blob")
    (model / "config.json").write_text("{}")
    read, said = _read(netcluster), Said()
    remote = f"{model}=~/its models/7b"
    _stage(read, [remote], said)
    for host in netcluster.hosts:
        there = host.home / "its models" / "7b"
        assert (there / "snapshot" / "weights").read_bytes() == (store / "blob").read_bytes() and not (
            there / "snapshot" / "weights"
        ).is_symlink()
        assert sorted(os.listdir(there)) == ["config.json", "snapshot"], "nothing of ours among the data"
    _stage(read, [remote], said)
    assert said[-1].endswith("is already the same on all hosts")
    damaged = netcluster.hosts[2].home / "its models" / "7b" / "snapshot" / "weights"
    with open(damaged, "r+b") as file:
        file.seek(1 << 20)
        file.write(b"rot")
    (model / "config.json").unlink()
    _stage(read, [remote], said)
    assert damaged.read_bytes() == (store / "blob").read_bytes()
    assert not (netcluster.hosts[0].home / "its models" / "7b" / "config.json").exists()


def test_stage_of_one_file_and_of_what_is_not_there(netcluster: NetCluster, tmp_path: Path) -> None:
    (tmp_path / "tok.json").write_text("{}")
    _stage(_read(netcluster), [f"{tmp_path}/tok.json=data/tok.json"], Said())
    assert all((host.workdir / "data" / "tok.json").read_text() == "{}" for host in netcluster.hosts)
    for told, says in (
        (f"{tmp_path}/nope", "does not exist"),
        (f"{tmp_path}/tok.json=data/other.json", "REMOTE must end with the name of the file, got other.json"),
    ):
        with pytest.raises(Refusal) as refused:
            _stage(_read(netcluster), [told], Said())
        assert says in refused.value.line


@pytest.mark.parametrize("kind", ["folder", "file", "deep", "relative", "root"])
def test_a_link_out_of_a_staged_folder_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    model, keys = tmp_path / "model", tmp_path / "home" / ".ssh"
    for folder in (model / "inner", keys):
        folder.mkdir(parents=True)
    (keys / "id_rsa").write_text("private")
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
        file_list.list_staged(str(model))
    leads_to = os.path.realpath(model / link)
    assert (
        f"the link {model / link} leads out of the folder, to {leads_to}; stage that path separately"
        in refused.value.line
    )
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
    entries = file_list.list_staged(str(_hub_entry(tmp_path) / path)).entries
    assert any(entry.path.endswith("model.onnx") for entry in entries)
    assert all((entry.kind, entry.size) == ("file", len("weights")) for entry in entries)


def test_a_link_out_of_the_hubs_entry_is_refused(tmp_path: Path) -> None:
    entry = _hub_entry(tmp_path)
    (tmp_path / "private").write_text("private")
    (entry / "blobs" / "0c1d").unlink()
    (entry / "blobs" / "0c1d").symlink_to(tmp_path / "private")
    with pytest.raises(Refusal, match="leads out of the folder"):
        file_list.list_staged(str(entry / "snapshots" / "rev"))


def test_a_path_that_is_a_link_itself_is_staged(tmp_path: Path) -> None:
    snapshot = _hub_entry(tmp_path) / "snapshots" / "rev"
    (tmp_path / "mine").symlink_to(snapshot)
    for named in (tmp_path / "mine", snapshot / "model.safetensors"):
        assert "model.safetensors" in [entry.path for entry in file_list.list_staged(str(named)).entries]


def test_a_link_without_an_end_is_named(tmp_path: Path) -> None:
    data = tmp_path / "data"
    for name in ("a", "b"):
        (data / name).mkdir(parents=True)
        (data / name / "x.bin").write_text(name)
    (data / "a" / "same").symlink_to("../b")
    assert [entry.path for entry in file_list.list_staged(str(data)).entries] == [
        "a/same/x.bin",
        "a/x.bin",
        "b/x.bin",
    ], "twice the same is no cycle"
    for link, target, says in (
        ("self", ".", f"leads back to {data}, which contains it"),
        ("b/other", "../a", f" leads back to {data}/"),
        ("loop", "loop", "/loop leads to itself"),
    ):
        (data / link).symlink_to(target)
        with pytest.raises(Refusal) as refused:
            file_list.list_staged(str(data))
        assert refused.value.line.startswith(f"--stage {data}: the link {data}/") and says in refused.value.line
        (data / link).unlink()


def test_a_host_that_comes_late_is_offered_what_the_others_got(
    netcluster: NetCluster, source: Path, tmp_path: Path
) -> None:
    """A log that grows in the working directory does no harm; staged data that is another by now does not travel."""
    read = _read(netcluster)
    first, late = netcluster.hosts[:2]
    data = tmp_path / "tokens"
    data.mkdir()
    (data / "a.bin").write_text("old")
    loads = [file_sync.plan_sync(read, str(source), Said()), file_sync.plan_stage(read, f"{data}=data", Said())]
    (source / "train.py").write_text("edited")
    (data / "a.bin").write_text("new")
    copy = file_sync.LateCopy(read.hosts[1], read, loads)
    assert wait_for(lambda: copy.is_over or None, 30)
    assert copy.failure == f"{data} could not be copied: {data}/a.bin has changed here since the run began"
    # The half-written file stays there until its end notices that the connection is gone.
    assert wait_for(lambda: True if _tree(late.workdir).keys() == WANTED else None, 30), _tree(late.workdir).keys()
    assert (late.workdir / "train.py").read_text() == "edited" and not _tree(first.workdir)
    (data / "a.bin").write_text("old")
    copy = file_sync.LateCopy(read.hosts[1], read, loads)
    assert wait_for(lambda: copy.is_over or None, 30) and not copy.failure
    assert (
        late.workdir / "data" / "a.bin"
    ).read_text() == "old" and f"copied {data} to {late.name} (1 file, " in copy.summary


def test_a_remembered_hash_does_not_survive_a_change(tmp_path: Path) -> None:
    big = tmp_path / "big"
    big.write_bytes(bytes(5 << 20))
    os.utime(big, (1, 1))
    memory = FileHashes()
    first = memory.of(str(big))
    memory.save()
    assert FileHashes().of(str(big)) == first and str(big) in json.loads(
        (tmp_path / "cache-home" / "stoker" / "hashes.json").read_text()
    )
    with open(big, "r+b") as file:
        file.write(b"x")
    assert FileHashes().of(str(big)) != first


@pytest.mark.parametrize("content", [b"[" * 100_000, b"7", b'{"a": [1, 2]}', b"\xff", b""])
def test_a_damaged_memory_of_hashes_is_made_again(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "hashes.json").write_bytes(content)
    (tmp_path / "big").write_bytes(b"x" * (5 << 20))
    assert FileHashes(str(tmp_path / "hashes.json")).of(str(tmp_path / "big")) == sha256_of(str(tmp_path / "big"))


# ---- the receiving end ----


def test_nothing_is_changed_or_removed_behind_a_link(tmp_path: Path) -> None:
    root, larger = tmp_path / "root", tmp_path / "larger"
    for folder in (root, larger):
        folder.mkdir()
    (larger / "x").write_text("hello")
    (larger / "x").chmod(0o600)
    digest = sha256_of(str(larger / "x"))
    manifest = {"schema": 2, "root": str(root), "origins": {"here": {"data/x": digest}}}
    (root / ".stoker-sync.json").write_text(json.dumps(manifest))
    (root / "data").symlink_to(larger)  # its user has moved what a copy brought
    assert FileReceiver().offer(str(root), "inside", [("data/x", "file", 0o755, 5, digest)], "here") == []
    assert stat.S_IMODE((larger / "x").stat().st_mode) == 0o600
    receiver = FileReceiver()
    receiver.offer(str(root), "inside", [], "here")
    assert receiver.finish()["removed"] == 0 and (larger / "x").read_text() == "hello"


@pytest.mark.parametrize("content", [b"[" * 100_000, b"7", b'{"schema": 2}', b'{"schema": 2, "origins": 7}', b'{"schema": 2, "origins": {"a": {"x": 1}}}',
                                     b"\xff", b""])  # fmt: skip
def test_a_damaged_list_of_earlier_copies_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / ".stoker-sync.json").write_bytes(content)
    with pytest.raises(CopyError, match=r"stoker-sync\.json can't be read"):
        FileReceiver().offer(str(tmp_path), "inside", [])


@pytest.mark.parametrize("name", ["../precious", "/precious", "a/../../precious"])
def test_a_list_of_earlier_copies_names_nothing_outside_its_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / ".stoker-sync.json").write_text(json.dumps({"schema": 2, "origins": {"here": {name: "0" * 64}}}))
    with pytest.raises(CopyError, match=r"stoker-sync\.json can't be read .*outside the folder"):
        FileReceiver().offer(str(tmp_path), "inside", [], "here")


@pytest.mark.skipif(os.getuid() != 0, reason="files of another user take root")
def test_another_users_list_of_earlier_copies_is_not_believed(tmp_path: Path) -> None:
    (tmp_path / ".stoker-sync.json").write_text(json.dumps({"schema": 2, "origins": {"here": {}}}))
    os.chown(tmp_path / ".stoker-sync.json", 12345, 12345)
    with pytest.raises(CopyError, match="belongs to another user"):
        FileReceiver().offer(str(tmp_path), "inside", [], "here")


ORDERS = [
    b"{}\n", b'{"do": "dance"}\n', b'{"do": "offer"}\n', b'{"do": "begin", "path": 7, "mode": 420}\n', b"\xff\n", b'{"do": "data", "size": -1}\n',
    b'{"do": "offer", "root": "%ROOT%", "manifest": "inside", "origin": "", "silence": 5, "size": 1}\n[',
    b'{"do": "offer", "root": "%ROOT%", "manifest": "inside", "origin": "", "silence": 5, "size": 7}\n[["a"]]',
]  # fmt: skip


@pytest.mark.parametrize("orders", ORDERS, ids=range(len(ORDERS)))
def test_orders_that_can_not_be_read_are_refused(tmp_path: Path, orders: bytes) -> None:
    read, write = os.pipe()
    os.write(write, orders.replace(b"%ROOT%", str(tmp_path / "root").encode()))
    os.close(write)
    answers = os.open(tmp_path / "answers", os.O_RDWR | os.O_CREAT)
    assert serve(read, answers) == 1
    said = (tmp_path / "answers").read_bytes()
    assert said.startswith(protocol.SENTINEL) and b'"refused"' in said
    os.close(read)
    os.close(answers)


# ---- the sending end, with a receiver that is broken ----


def _copied(source: Path, there: Path, monkeypatch: pytest.MonkeyPatch, far_end: list[str]) -> str:
    """Return why a copy failed. `far_end`: the command that answers instead of the receiver."""
    source.mkdir()
    (source / "a.bin").write_bytes(b"a" * (4 << 20))
    far = hosts.parse_hosts({"hosts": [{"host": "far.example", "workdir": "/there"}]}, "cluster.yaml", written=False)
    load = file_sync.plan_sync(far, str(source), Said())
    monkeypatch.setattr(ssh, "ssh_command", lambda *_: far_end)
    one_copy = file_sync._Copy(far.hosts[0], far, load, str(there))
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
    monkeypatch.setattr(file_sync, "SILENCE_S", 1.0)
    monkeypatch.setattr(file_sync, "GREETING_S", 2.0)
    failure = _copied(tmp_path / "source", tmp_path / "there", monkeypatch, ["sh", "-c", says])
    assert "it sent nothing for" in failure and failure.isprintable(), failure


@pytest.mark.parametrize(
    "says",
    [
        """printf '{"is": "need", "size": 1}\\n7'""",
        """printf '{"is": "ne\\n'""",
        """printf '{"is": "refused", "line": "\\\\u001b[2J\\\\nstoker: all is well"}\\n'""",
        "true",
    ],
    ids=["needs a number", "a truncated message", "a refusal with control codes", "ends"],
)
def test_a_receiver_that_answers_nonsense_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: str
) -> None:
    monkeypatch.setattr(file_sync, "SILENCE_S", 2.0)
    failure = _copied(tmp_path / "source", tmp_path / "there", monkeypatch, ["sh", "-c", f"{GREETED}; {says}"])
    assert failure and failure.isprintable() and "Error" not in failure, failure


def test_a_login_that_complains_at_length_does_not_hold_a_copy_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chatter = "cat >/dev/null & head -c 8000000 /dev/zero | tr '\\0' x >&2; echo the last word >&2; exit 3"
    failure = _copied(tmp_path / "source", tmp_path / "there", monkeypatch, ["sh", "-c", chatter])
    assert failure and len(failure) < 2000, failure


SLOW = """
import os, sys, time
from stoker.control.agent import file_receiver

left = int(sys.argv[1])  # the agent's zip, which this one does not need
while left:
    left -= len(os.read(0, left))
offer = file_receiver.FileReceiver.offer
file_receiver.FileReceiver.offer = lambda *given: time.sleep(4.0) or offer(*given)
sys.exit(file_receiver.serve(0, 1))
"""


def test_a_host_that_takes_its_time_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It hashes for longer than it may stay silent."""
    monkeypatch.setattr(file_sync, "SILENCE_S", 3.0)
    far_end = [sys.executable, "-c", SLOW, str(len(agent_zip.pack_agent()))]
    assert _copied(tmp_path / "source", tmp_path / "there", monkeypatch, far_end) == ""
    assert (tmp_path / "there" / "a.bin").stat().st_size == 4 << 20


# ---- agreement ----


def test_the_program_is_compared_file_by_file(tmp_path: Path) -> None:
    answers = {}
    for n in range(3):
        folder = tmp_path / str(n)
        (folder / "pkg").mkdir(parents=True)
        for name in ("train.py", "pkg/__init__.py", "pkg/net.py", "notes.txt"):
            (folder / name).write_text(name)
        (folder / "notes.txt").write_text(str(n))
        answers[f"h{n}"] = files(str(folder), "train.py", paths=["notes.txt", "pkg", "nowhere"])
    assert check_rules.program_differences(answers) == [] and set(answers["h0"]["names"]) == {
        "train.py",
        "pkg/__init__.py",
        "pkg/net.py",
    }
    assert (
        answers["h0"]["paths"]["notes.txt"] != answers["h1"]["paths"]["notes.txt"]
        and answers["h0"]["paths"]["pkg"] == answers["h1"]["paths"]["pkg"]
    )
    assert answers["h0"]["paths"]["nowhere"] == ""
    (tmp_path / "0" / "train.py").write_text("other")
    (tmp_path / "0" / "more.py").write_text("")
    (tmp_path / "0" / "pkg" / "net.py").unlink()
    answers["h0"] = files(str(tmp_path / "0"), "train.py")
    assert check_rules.program_differences(answers) == [
        "host h0: train.py differs from host h1's, does not have pkg/net.py, also has more.py; copy it with --sync"
    ]
    answers["h2"] = files(str(tmp_path / "2"), "absent.py")
    answers["h1"] = {"error": "no answer"}
    lacking = check_rules.missing_program_fix("../sy/q.py", "/home/me/train", True)
    assert check_rules.program_differences({"h2": answers["h2"]}, "../sy/q.py", lacking) == [
        "host h2: ../sy/q.py does not exist there; move it below /home/me/train, which --sync copies"
    ]
    assert check_rules.missing_program_fix("/home/me/train/q.py", "/home/me/train", True).startswith(
        "give its path relative to /home/me/train"
    )
    assert check_rules.missing_program_fix("big/q.py", "/home/me/train", True).startswith(
        "--sync does not copy it: git ignores it"
    )
    assert check_rules.program_differences(answers, "train.py") == [
        "host h1: train.py could not be compared: no answer",
        "host h2: train.py does not exist there; copy it with --sync, or set workdir:",
    ]
    assert check_rules.program_differences(dict.fromkeys(("h1", "h2", "h3"), answers["h2"]), "train.py") == [
        "hosts h1, h2, h3: train.py does not exist there; copy it with --sync, or set workdir:"
    ]
    module = files(str(tmp_path / "1"), "pkg.net", module=True)
    assert set(module["names"]) == {"pkg/__init__.py", "pkg/net.py"} and module["script"] is None
    installed = files(str(tmp_path / "1"), "pytest", module=True, python=sys.executable)
    assert "pytest/__init__.py" in installed["names"]
    assert files(str(tmp_path / "1"), "no_such_module", module=True, python=sys.executable)["package"] is None


# ---- in a run ----


def test_a_run_with_sync_runs_what_was_copied_and_without_it_names_what_differs(
    stoker: Stoker, netcluster: NetCluster
) -> None:
    stoker.script("s.py", "import os, part\nprint('ran in', os.getcwd(), part.VALUE)\n")
    stoker.script("part.py", "VALUE = 7\n")
    path, (first, second) = str(netcluster.file((1, 1))), netcluster.hosts[:2]
    refused = stoker("run", "--hosts", path, "s.py")
    assert (
        refused.code != 0
        and "s.py does not exist there" in refused.err
        and all(host.name in refused.err for host in (first, second))
    ), refused.err
    done = stoker("run", "--hosts", path, "--sync", "s.py")
    assert done.code == 0, done.err
    assert [done.log(n).decode() for n in range(2)] == [f"ran in {host.workdir} 7\n" for host in (first, second)]
    (second.workdir / "part.py").write_text("VALUE = 8\n")
    refused = stoker("run", "--hosts", path, "s.py")
    assert refused.code != 0 and f"host {second.name}: part.py differs from host {first.name}'s" in refused.err, (
        refused.err
    )
    assert len(list((stoker.cwd / "runs").glob("2*"))) == 1, "nothing was started"
