"""What a second security review found: each test shows one way in, and that it is closed."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import Stoker, wait_for
from stoker.contract.names import Refusal
from stoker.control.machine import processes
from stoker.control.scheduler import slurm_submit as submit
from stoker.training.config import files
from stoker.training.data import ours as digests

OTHER = 65534


def needs_root() -> None:
    if os.geteuid():
        pytest.skip("becoming a second user takes root")


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


# ---- imports, and lists of what may be removed ----


def test_the_lock_of_known_hashes_is_not_written_through_a_link(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("kept")
    (tmp_path / "index.json.lock").symlink_to(precious)
    with pytest.raises(Refusal, match="lock file"):
        digests._remember(str(tmp_path / "index.json"), {})
    assert precious.read_text() == "kept"
