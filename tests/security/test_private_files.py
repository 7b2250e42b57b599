"""Files that Stoker writes: through no link, and closed to others where they must be."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from conftest import Stoker
from localuser import ATTACKER, VICTIM, do_as, start_as, wait
from stoker.contract import layout
from stoker.contract.errors import Refusal
from stoker.contract.safe_io import read_json
from stoker.control.doctor import support_bundle
from stoker.control.machine.examination import Examination
from stoker.control.machine.model import Machine
from stoker.control.record.run_writer import RunWriter
from stoker.control.scheduler import slurm_submit as submit
from stoker.training.data import ours as digests

ROOT = Path(__file__).resolve().parents[2]


def test_the_record_is_not_written_through_links(public: Path) -> None:
    """The attacker owns the runs folder, so he may rename what others have in it."""
    runs, precious, swapped = public / "runs", public / "precious", public / "swapped"
    run_dir = runs / "20260101-000000-x"

    def share_a_folder() -> None:
        runs.mkdir()
        runs.chmod(0o1777)

    def swap() -> None:
        run_dir.rename(runs / "stolen")
        for folder in (run_dir, run_dir / "attempt-0"):
            folder.mkdir()
            folder.chmod(0o777)
        for name in ("rank-0.log", "rank-0.stack.txt"):
            (run_dir / "attempt-0" / name).symlink_to(precious)

    def run_there() -> None:
        precious.write_text("precious")
        run_dir.mkdir(0o700)
        record = RunWriter(str(run_dir), "host", reopened=False)
        while not swapped.exists():
            time.sleep(0.01)
        try:
            record.create_attempt_dir(0)
        except Refusal as refusal:
            assert "moved or replaced" in refusal.line
        else:
            raise AssertionError("ranks would be started in the attacker's folder")
        record.append_output(layout.rank_log(str(run_dir), 0, 0), b"a line\n")
        record.save(layout.rank_stack(str(run_dir), 0, 0), "a stack")
        assert precious.read_text() == "precious"
        assert len(record.pop_lost_output()) == 2

    do_as(ATTACKER, share_a_folder)
    victim = start_as(VICTIM, run_there)
    deadline = time.monotonic() + 10.0
    while not (run_dir / layout.RESERVE).exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    do_as(ATTACKER, swap)
    swapped.touch()
    assert wait(victim) == 0


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
    path = submit.write_script(script, str(tmp_path / "runs"), "a")
    Path(path).write_text("#!/bin/sh\ntouch planted\n")
    assert submit.submit(path, script, os.environ) == "12"
    assert (tmp_path / "got").read_text() == script.text


def test_a_folder_of_the_path_that_may_not_be_entered_costs_no_bundle(tmp_path: Path) -> None:
    """A program that may not be run gives another error than one that is missing."""
    for name in ("nvidia-smi", "dmesg"):
        (tmp_path / name).write_text("")
        (tmp_path / name).chmod(0o644)
    code = "from stoker.control.doctor.support_bundle import _run_command; print(_run_command(['nvidia-smi', '-q']))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and "nvidia-smi can't be started: Permission denied" in done.stdout, done.stderr


def test_the_lock_of_known_hashes_is_not_written_through_a_link(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("kept")
    (tmp_path / "index.json.lock").symlink_to(precious)
    with pytest.raises(Refusal, match="lock file"):
        digests._remember(str(tmp_path / "index.json"), {})
    assert precious.read_text() == "kept"


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


def test_a_bundle_takes_the_end_of_a_runs_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`stoker doctor --bundle` read all of it: of 1 GB, 8.4 GB of memory, and no end in 100 s."""
    run = tmp_path / "20260101-000000-a"
    run.mkdir()
    (run / layout.RUN).write_text('{"schema": 1, "name": "a"}')
    log = run / layout.CONSOLE
    log.write_bytes(b"x" * (5 << 20) + b"\nthe last line\n")
    monkeypatch.setattr(support_bundle, "COMMANDS", {})
    monkeypatch.setattr(support_bundle, "_list_processes", lambda: "")
    support_bundle.write_bundle(str(tmp_path / "b.tgz"), Examination(Machine("here", 1, 1, 1)), [], str(tmp_path))
    with tarfile.open(tmp_path / "b.tgz") as archive:
        kept = archive.extractfile(f"stoker-doctor/latest-run/{layout.CONSOLE}")
        assert kept is not None
        assert kept.read() == b"(its last 4 MB)\nthe last line\n"


def test_files_of_the_hubs_cache_are_read_and_others_beside_it_are_not(tmp_path: Path) -> None:
    entry = tmp_path / "models--a--b"
    snapshot, blobs = entry / "snapshots" / "0123", entry / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "abc").write_text("{}")
    (tmp_path / "private").write_text("{}")
    (snapshot / "config.json").symlink_to("../../blobs/abc")
    assert read_json(snapshot / "config.json", inside=True) == {}
    (blobs / "more").symlink_to(tmp_path / "private")
    (snapshot / ".git").mkdir()
    (snapshot / ".git" / "config").write_text("{}")
    for target in ("../../../private", "../../blobs/more", "/proc/self/environ", ".git/config"):
        (snapshot / "other.json").unlink(missing_ok=True)
        (snapshot / "other.json").symlink_to(target)
        with pytest.raises(OSError, match="leads out of its folder"):
            read_json(snapshot / "other.json", inside=True)
