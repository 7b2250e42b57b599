"""What a second security review found: each test shows one way in, and that it is closed."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from conftest import Stoker, wait_for
from stoker.contract.names import Refusal
from stoker.control.agent import probe_net
from stoker.control.agent import receiving as receiving_end
from stoker.control.cluster import listing
from stoker.control.machine import processes
from stoker.control.scheduler import slurm_submit as submit
from stoker.training.config import files
from stoker.training.data import ours as digests

OTHER = 65534


def needs_root() -> None:
    if os.geteuid():
        pytest.skip("becoming a second user takes root")


# ---- git ----


def _checkout(folder: Path, planted: Path | None = None) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "code.py").write_text("")
    git = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"]):
        subprocess.run([*git, *words], check=True)
    if planted is not None:
        program = folder / "planted.sh"
        program.write_text(f"#!/bin/sh\ntouch '{planted}'\n")
        program.chmod(0o755)
        subprocess.run([*git, "config", "core.fsmonitor", str(program)], check=True)


@pytest.mark.parametrize("where", ["nested", "submodule", "outer"])
def test_a_copied_folder_runs_no_program_that_a_checkouts_config_names(tmp_path: Path, where: str) -> None:
    outer, planted = tmp_path / "outer", tmp_path / "planted"
    _checkout(outer, planted if where == "outer" else None)
    if where != "outer":
        _checkout(outer / "inner", planted)
    if where == "submodule":
        subprocess.run(["git", "-C", str(outer), "-c", "advice.addEmbeddedRepo=false", "add", "inner"], check=True)
    planted.unlink(missing_ok=True)  # git itself ran it just now
    paths = {entry.path for entry in listing.working_directory(str(outer)).entries}
    assert "code.py" in paths and (where == "outer" or "inner/code.py" in paths)
    assert not planted.exists()


@pytest.mark.parametrize("place", [".gitignore", "deep/er/.gitignore", ".git/info/exclude", ".git/config"])
def test_a_named_pipe_that_git_would_wait_for_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    _checkout(tmp_path)
    (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / place).unlink(missing_ok=True)
    os.mkfifo(tmp_path / place)
    monkeypatch.setattr(listing, "SLOW_S", 0.5)
    monkeypatch.setattr(listing, "GIT_S", 250.0)
    with pytest.raises(Refusal, match=f"{re.escape(place)}, a named pipe: remove it"):
        listing.working_directory(str(tmp_path))


def test_a_slow_git_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _checkout(tmp_path / "checkout")
    real = shutil.which("git")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "git").write_text(f'#!/bin/sh\nsleep 0.3\nexec {real} "$@"\n')
    (tmp_path / "bin" / "git").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setattr(listing, "SLOW_S", 0.05)
    assert "code.py" in {entry.path for entry in listing.working_directory(str(tmp_path / "checkout")).entries}


def test_a_strangers_checkout_inside_ours_is_copied_without_asking_git(tmp_path: Path) -> None:
    """Git refuses a checkout of another user; ours is copied all the same."""
    needs_root()
    outer = tmp_path / "outer"
    _checkout(outer)
    _checkout(outer / "inner", tmp_path / "planted")
    for folder, folders, names in os.walk(outer / "inner"):
        for name in [".", *folders, *names]:
            os.chown(os.path.join(folder, name), OTHER, OTHER, follow_symlinks=False)
    assert "inner/code.py" in {entry.path for entry in listing.working_directory(str(outer)).entries}
    assert not (tmp_path / "planted").exists()


def _give(path: Path, uid: int = OTHER) -> None:
    os.chown(path, uid, uid, follow_symlinks=False)


# ---- files of the working directory ----


@pytest.mark.parametrize("key", ["python", "ssh_options"])
def test_a_hosts_file_that_lies_here_is_not_obeyed_unasked(stoker: Stoker, key: str) -> None:
    owned, program = stoker.cwd / "owned", stoker.cwd / "planted.sh"
    program.write_text(f"#!/bin/sh\ntouch '{owned}'\n")
    program.chmod(0o755)
    hosts = {
        "python": f"hosts: [{{host: localhost, python: {program}}}]\n",
        "ssh_options": f"ssh_options: ['-oProxyCommand={program}']\nhosts: [nowhere.example]\n",
    }
    (stoker.cwd / "cluster.yaml").write_text(hosts[key])
    done = stoker("cluster", "check", "--quick")
    assert done.code == 64 and "--hosts cluster.yaml" in done.err, done.err
    assert not owned.exists()
    stoker("cluster", "check", "--quick", "--hosts", "cluster.yaml")  # the test is real: asked, it is obeyed
    assert owned.exists() or (key == "ssh_options" and not shutil.which("ssh"))


def test_a_config_by_name_is_ours_whatever_lies_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = files.shipped()[0]
    (tmp_path / name).write_text("{planted: true}\n")
    monkeypatch.chdir(tmp_path)
    assert "planted" not in files.load(name) and files.load(f"./{name}") == {"planted": True}


def test_a_run_directory_that_is_replaced_gets_no_further_attempt(stoker: Stoker) -> None:
    """As the owner of a folder above can do it: another one with their checkpoint lies there when the ranks restart."""
    stoker.script(
        "a.py",
        "import os, stoker\n"
        "place = os.environ['STOKER_RUN_DIR']\n"
        "print('attempt', os.environ['TORCHELASTIC_RESTART_COUNT'], stoker.resume(), flush=True)\n"
        "os.rename(place, place + '.away')\n"
        "os.makedirs(place + '/checkpoints/theirs')\n"
        "raise SystemExit(3)\n",
    )
    done = stoker("run", "--max-restarts", "2", "a.py")
    assert done.code == 73 and "was moved or replaced during the run" in done.err, done.err
    assert done.out.count("attempt") == 1
    (kept,) = (stoker.cwd / "runs").glob("*.away")
    assert json.loads((kept / "verdict.json").read_text())["cause"] == "launch.runs-dir"
    (there,) = (path for path in (stoker.cwd / "runs").iterdir() if path.name[0] == "2" and path != kept)
    assert sorted(path.name for path in there.iterdir()) == ["checkpoints"]


def test_sbatch_gets_the_script_that_was_made_whatever_lies_in_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "sbatch"
    tool.write_text(
        f'#!/bin/sh\n[ -z "$2" ] || cat "$2" > {tmp_path}/got\n[ -n "$2" ] || cat > {tmp_path}/got\necho 12\n'
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    script = submit.make_script(submit.SubmitOptions(), ["stoker", "run"], ["a.py"], "a", str(tmp_path), "/", False)
    path = submit.write(script, str(tmp_path / "runs"), "a")
    Path(path).write_text("#!/bin/sh\ntouch planted\n")
    assert submit.submit(path, script, os.environ) == "12"
    assert (tmp_path / "got").read_text() == script.text


# ---- command lines ----


@pytest.mark.parametrize(("words", "shown"), [(["x" * 5000], "…"), (["a b " + "x" * 5000], "a b …")])
def test_a_word_is_not_cut_within(words: list[str], shown: str) -> None:
    with subprocess.Popen([*words, "600"], executable="/bin/sleep") as child:
        try:
            assert wait_for(lambda: processes.command(child.pid), 10.0) == shown  # empty for a moment after exec
        finally:
            child.kill()


# ---- files that the doctor writes ----


def test_a_folder_of_the_path_that_may_not_be_entered_costs_no_bundle(tmp_path: Path) -> None:
    """A program that may not be run gives another error than one that is missing."""
    for name in ("nvidia-smi", "dmesg"):
        (tmp_path / name).write_text("")
        (tmp_path / name).chmod(0o644)
    code = "from stoker.control.doctor.bundle import _said; print(_said(['nvidia-smi', '-q']))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and "nvidia-smi can't be started: Permission denied" in done.stdout, done.stderr


# ---- others' records without end ----


# ---- ports that anybody can reach ----


def _connect(port: int, source: str = "127.0.0.1") -> socket.socket:
    made = socket.socket()
    made.settimeout(10.0)
    made.bind((source, 0))
    made.connect(("127.0.0.1", port))
    return made


def test_strangers_use_up_no_threads_of_a_network_check_and_it_outlives_a_lack_of_descriptors() -> None:
    code = (
        "import resource, threading\n"
        "from stoker.control.agent import probe_net\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))\n"
        "probe_net.MOST_STRANGERS = int(input())\n"
        "listener = probe_net._listen('127.0.0.1', (0,))\n"
        "threading.Thread(target=probe_net._serve, args=(listener, b'k' * 16, []), daemon=True).start()\n"
        "print(listener.getsockname()[1], flush=True)\n"
        "while input() != 'end': print(threading.active_count(), flush=True)\n"
    )
    for most in (20, 1000):  # turned away one by one; and so many that the descriptors run out first
        with subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        ) as child:
            assert child.stdin is not None and child.stdout is not None
            child.stdin.write(f"{most}\n")
            port = int(child.stdout.readline())
            flood = [_connect(port) for _ in range(150)]
            try:
                if most > 100:
                    time.sleep(0.5)  # it meets the lack of descriptors
                    for way in flood:
                        way.close()
                assert probe_net._reach("127.0.0.1", port, b"k" * 16) == ""
                child.stdin.write("count\n")
                assert int(child.stdout.readline()) <= (60 if most == 20 else 200)
            finally:
                for way in flood:
                    way.close()
                child.stdin.write("end\n")


# ---- imports, and lists of what may be removed ----


def test_a_copy_removes_nothing_that_anothers_list_names(tmp_path: Path) -> None:
    needs_root()
    (tmp_path / "mine").write_text("precious")
    digest = hashlib.sha256(b"precious").hexdigest()
    for uid, left in ((OTHER, True), (0, False)):
        manifest = tmp_path / ".stoker-sync.json"
        manifest.unlink(missing_ok=True)
        manifest.write_text(json.dumps({"schema": 2, "origins": {"here": {"mine": digest}}}))
        _give(manifest, uid)
        receiver = receiving_end.Receiver()
        assert receiver.offer(str(tmp_path), "inside", [], "here") == []
        finished = receiver.finish()
        assert (tmp_path / "mine").exists() == left and finished["removed"] == (0 if left else 1)
        assert ("is ignored" in finished["ignored"]) == left


def test_nothing_is_copied_into_anothers_folder(tmp_path: Path) -> None:
    needs_root()
    folder = tmp_path / "work"
    folder.mkdir()
    folder.chmod(0o777)
    _give(folder)
    for manifest, advice in (("inside", "workdir:"), ("", "--stage PATH=REMOTE")):
        with pytest.raises(receiving_end.Refused, match=f"belongs to .*; name another with {advice}"):
            receiving_end.Receiver().offer(str(folder), manifest, [], "here")


def test_the_lock_of_known_hashes_is_not_written_through_a_link(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("kept")
    (tmp_path / "index.json.lock").symlink_to(precious)
    with pytest.raises(Refusal, match="lock file"):
        digests._remember(str(tmp_path / "index.json"), {})
    assert precious.read_text() == "kept"
