"""Run directories, jobs and folders of speedruns are closed to other users."""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path

import pytest

from conftest import Stoker

# ---- modes ----


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("umask", [0o000, 0o022])
def test_run_directories_are_private(stoker: Stoker, umask: int) -> None:
    script = stoker.script(
        "scratch.py",
        "import os\nfolder = os.path.dirname(os.environ['TORCHELASTIC_ERROR_FILE'])\nprint(oct(os.stat(folder).st_mode & 0o777))\nprint(oct(os.umask(0)))",
    )
    done = stoker("run", "--log-dir", "logs", script, umask=umask)
    assert (
        done.code == 0
        and done.out.splitlines()[-2].endswith("0o700")
        and done.out.splitlines()[-1].endswith(oct(umask))
    )
    assert _mode(done.run_dir) == 0o700 and _mode(done.run_dir.parent) == 0o700
    (folder,) = (stoker.cwd / "logs").iterdir()
    assert folder.name.startswith(done.run_dir.name) and _mode(folder) == 0o700
    assert _mode(done.run_dir / "run.json") == 0o666 & ~umask  # so that `chmod` of the folder alone shares a run


def test_what_is_there_keeps_its_mode(stoker: Stoker) -> None:
    runs = stoker.cwd / "runs"
    runs.mkdir()
    runs.chmod(0o775)
    script = stoker.script("fails.py", "raise SystemExit(3)")
    done = stoker("run", "--name", "shared", script)
    assert _mode(runs) == 0o775 and _mode(done.run_dir) == 0o700
    done.run_dir.chmod(0o755)
    again = stoker("run", "--name", "shared", script)
    assert again.run_dir == done.run_dir and _mode(done.run_dir) == 0o755


@pytest.mark.skipif(os.getuid() != 0, reason="becoming another user takes root")
@pytest.mark.parametrize("umask", [0o000, 0o022])
def test_another_user_reads_nothing_until_the_owner_says_so(stoker: Stoker, umask: int, tmp_path: Path) -> None:
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.getuid() and folder != Path("/") and not _mode(folder) & 0o001:
            folder.chmod(_mode(folder) | 0o011)  # the way there is open
    runs = stoker.cwd / "runs"
    runs.mkdir()
    runs.chmod(0o1777)
    done = stoker("run", stoker.script("ok.py", "print('ok')"), umask=umask)
    read = ["setpriv", "--reuid", "12345", "--regid", "12345", "--clear-groups", "cat"]
    files = [str(done.run_dir / name) for name in ("run.json", "events.jsonl", "stoker.log", "attempt-0/rank-0.log")]
    for path in files:
        assert subprocess.run([*read, path], capture_output=True, check=False).returncode
    done.run_dir.chmod(0o755)
    assert all(subprocess.run([*read, path], capture_output=True, check=False).returncode == 0 for path in files)


def test_folders_of_speedruns_and_jobs_are_private(tmp_path: Path) -> None:
    from stoker.control.scheduler import slurm_submit as submit
    from stoker.speedrun import state

    before = os.umask(0)
    try:
        os.close(state.hold(str(tmp_path / "runs" / "speedrun-x")))
        path = submit.write_script(submit.JobScript("#!/bin/bash\n", "x", {}), str(tmp_path / "jobs"), "x")
    finally:
        os.umask(before)
    assert (
        _mode(tmp_path / "runs" / "speedrun-x") == 0o700
        and _mode(Path(path).parent) == 0o700
        and _mode(tmp_path / "jobs") == 0o700
    )
