"""Other users' runs in a shared folder: read like any other record, never taken for one's own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conftest import Stoker, Terminal
from localuser import ATTACKER, VICTIM, do_as, needs_root
from stoker.control.record import resume_command, run_index, run_record
from stoker.control.scheduler import slurm_job
from stoker.control.show.collector import SnapshotCollector

ESCAPES = "a title \x1b]0;owned\a\rand a bar\n✓ done\n"


def make_run(folder: Path, owner: int, **more: Any) -> Path:
    """Write the record of a failed run of two ranks, with 30 restarts, as `owner`'s."""
    (folder / "attempt-0").mkdir(parents=True)
    ranks = [{"rank": rank, "role": "train", "label": f"GPU{rank}", "host": "h"} for rank in range(2)]
    about = {"schema": 1, "name": folder.name, "started": 1e9, "plan": {"world_size": 2, "ranks": ranks}, **more}
    (folder / "run.json").write_text(json.dumps(about))
    verdict = {"status": "failed", "cause": "rank.exit", "summary": "s", "exit_code": 7}
    (folder / "verdict.json").write_text(json.dumps(verdict))
    events: list[dict[str, Any]] = [{"event": "run"}, {"event": "attempt", "attempt": 0}]
    events += [{"event": "restart", "cause": "rank.exit"}] * 30
    events += [{"event": "rank-up", "attempt": 0, "rank": rank, "pid": 5, "label": f"GPU{rank}"} for rank in range(2)]
    (folder / "events.jsonl").write_text("".join(json.dumps({**event, "time": 1e9}) + "\n" for event in events))
    lines = [{"step": step, "time": 1e9 + step, "loss": 9.0 - step} for step in range(5)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "stoker.log").write_text(ESCAPES)
    (folder / "attempt-0" / "rank-0.log").write_text(ESCAPES)
    for path in (folder, *folder.rglob("*")):
        os.chown(path, owner, owner)
    return folder


# ---- read like any other ----


def test_another_users_run_is_read_like_ones_own(stoker: Stoker) -> None:
    needs_root()
    runs = stoker.cwd / "runs"
    padding = {"padding": "z" * (3 << 20)}
    shown = {}
    for owner in (os.getuid(), ATTACKER):
        run = make_run(runs / f"run-{owner}", owner, **padding)
        why = stoker("why", str(run))
        assert why.code == 0 and "restarts: 30 (" in why.out, why.out + why.err
        curve = json.loads(stoker("plot", str(run), "--json").out)
        assert len(curve["runs"][0]["points"]) == 5
        row = SnapshotCollector(str(runs), everybody=True, machine=False).snapshot([run.name]).run(run.name)
        assert row is not None and row.mine == (owner != ATTACKER)
        shown[owner] = (row.state, row.step, row.loss, row.seconds, row.restarted, len(row.ranks), row.curve)
    assert shown[os.getuid()] == shown[ATTACKER]
    listed = json.loads(stoker("runs", "--all", "--json").out)
    assert len(listed["runs"]) == 2 and listed["others_left_out"] == 0
    listed = json.loads(stoker("runs", "--json").out)
    assert len(listed["runs"]) == 1 and listed["others_left_out"] == 1


def test_a_job_of_another_user_is_shown_with_its_roles(tmp_path: Path) -> None:
    needs_root()
    ranks = [{"rank": 0, "role": "a", "role_rank": 0}, {"rank": 1, "role": "b", "role_rank": 0}]
    job = make_run(tmp_path / "job", ATTACKER, plan={"world_size": 2, "ranks": ranks})
    make_run(job / "roles" / "a", ATTACKER)
    os.chown(job / "roles", ATTACKER, ATTACKER)
    run = run_record.read_run(str(job))
    assert run is not None and list(run_index.list_roles(run)) == ["a"] and not run_index.list_roles(run)["a"].mine
    row = SnapshotCollector(str(tmp_path), everybody=True, machine=False).snapshot(["job"]).run("job")
    assert row is not None and row.step == 5 and [role.name for role in row.roles] == ["a", "b"]


def test_what_another_users_ranks_printed_is_shown_without_control_codes(stoker: Stoker) -> None:
    needs_root()
    run = make_run(stoker.cwd / "20260101-000000-x", ATTACKER)
    done = stoker("attach", str(run))
    assert done.code == 7 and "\x1b" not in done.out and done.out.count("\\x1b]0;owned") == 2, done.out
    assert "✓ done" in done.out
    assert stoker("logs", str(run)).out == ESCAPES, "byte for byte where it is no terminal"
    terminal = Terminal(stoker, ["-m", "stoker", "logs", str(run)], (100, 40))
    assert terminal.wait(100) == 0 and b"\\x1b]0;owned" in terminal.shown and b"\x1b]0;" not in terminal.shown


def test_folders_that_we_may_not_read_are_counted_and_not_called_damaged(public: Path) -> None:
    needs_root()
    make_run(public / "open", ATTACKER)
    make_run(public / "closed", ATTACKER).chmod(0o700)

    def look() -> None:
        listing = run_index.list_runs(str(public), everybody=True)
        assert [run.id for run in listing.runs] == ["open"] and listing.others == 1 and not listing.damaged

    do_as(VICTIM, look)


def test_no_command_of_another_users_record_is_advised(tmp_path: Path) -> None:
    needs_root()
    plan = {"world_size": 1, "ranks": [{"rank": 0, "host": "gpu7"}]}
    for owner in (os.getuid(), ATTACKER):
        folder = make_run(tmp_path / str(owner), owner, plan=plan, apart={"gpu7": ["scp", "-r", "-oPort=22", "gpu7:"]})
        run = run_record.read_run(str(folder))
        assert run is not None
        assert resume_command.copy_command(run, "hf").startswith("scp -r -oPort=22 gpu7:") == (owner != ATTACKER)


# ---- entries that nobody but their owner can look at ----

_MOUNT = """
import ctypes, os, sys
libc, handle = ctypes.CDLL(None, use_errno=True), os.open("/dev/fuse", os.O_RDWR)
options = f"fd={handle},rootmode=40000,user_id=12345,group_id=12345".encode()
if libc.mount(b"theirs", sys.argv[1].encode(), b"fuse", 6, options):
    sys.exit(f"mount: {os.strerror(ctypes.get_errno())}")
os.set_inheritable(handle, True)
os.execvp(sys.argv[2], sys.argv[2:])
"""
_LOOK = """
import sys
from stoker.contract import checkpoints, safe_io
from stoker.control.doctor import stale_files
from stoker.control.record import private_folders, run_index
from stoker.speedrun.state import check_own
from stoker.contract.errors import Refusal
from stoker.training.checkpoint import folders, reading
from stoker.training.generate import finding
from stoker.training.model import hf_write

root, theirs = sys.argv[1:]
listing = run_index.list_runs(root)
assert listing.others == 1 and not listing.damaged, listing
assert not safe_io.is_own(theirs) and safe_io.is_own(root)
stale_files.FRESH_S = -1.0
assert [entry.name for entry, _ in stale_files._list_own_entries(root, stale_files.re.compile("step-.*"))] == ["step-00000001"]
assert list(folders.steps_in(root)) == [2, 1] and not folders.is_trusted(theirs)
folders.repair(root)
hf_write.sweep(root, "step-00000002")
lines = []
assert reading.find(root, lines.append) is None
assert "can't be read: Permission denied" in lines[0] and "step-00000001 is not a complete" in lines[1], lines
assert checkpoints._is_trusted(theirs, root, None) is False
assert private_folders.own_folder(root, "step-00000002") == theirs + "-0"
assert finding._models(root, "") == []
try:
    check_own(theirs)
except Refusal as refusal:
    assert "not a folder of yours" in refusal.line
else:
    raise AssertionError("not refused")
"""


def beside_anothers_mount(
    theirs: Path, *command: str, cwd: Path, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs the command where a user's FUSE file system is mounted: nobody else may look at it, not even root."""
    if os.getuid() or not os.path.exists("/dev/fuse"):
        pytest.skip("a mount of another user's takes root and /dev/fuse")
    theirs.mkdir(parents=True, exist_ok=True)
    mounting = ("unshare", "-m", sys.executable, "-c", _MOUNT, str(theirs), *command)
    done = subprocess.run(mounting, cwd=cwd, env=env, capture_output=True, text=True, timeout=300, check=False)
    if done.stderr.startswith(("mount:", "unshare:")):
        pytest.skip(f"no FUSE file system can be mounted here: {done.stderr.strip()}")
    return done


def test_what_only_its_owner_can_look_at_is_another_users(tmp_path: Path) -> None:
    root = tmp_path / "shared"
    (root / "step-00000001").mkdir(parents=True)
    theirs = root / "step-00000002"
    done = beside_anothers_mount(theirs, sys.executable, "-c", _LOOK, str(root), str(theirs), cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_anothers_mount_in_a_runs_folder_ends_no_command(stoker: Stoker) -> None:
    stoker.script("ok.py", "print('fine')\n")
    run = f"{sys.executable} -m stoker run --name mine --runs-dir runs --nproc-per-node 1 ok.py"
    looks = [f"{sys.executable} -m stoker {what} --runs-dir runs" for what in ("runs", "why", "why mine")]
    commands = " && ".join([run, *looks])
    done = beside_anothers_mount(
        stoker.cwd / "runs" / "theirs", "bash", "-c", commands, cwd=stoker.cwd, env=stoker.environment()
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Permission denied" not in done.stdout + done.stderr


# ---- names that somebody else took ----


def made(root: Path, name: str) -> Path:
    (root / name / "hf").mkdir(parents=True)
    (root / name / "run.json").write_text(json.dumps({"schema": 1, "id": name, "name": name, "started": 1.0}))
    (root / name / "hf" / "config.json").write_text("{}")
    (root / name / "rollouts.jsonl").write_text("")
    (root / name / "nan_step_1").mkdir()
    return root / name


def nan_folder(path: str, root: str) -> str:
    from stoker.cli.nan import _find_dump

    return os.path.dirname(_find_dump(path, root))


def rollouts_folder(path: str, root: str) -> str:
    from stoker.cli.rollouts import _find_rollouts

    return _find_rollouts(path, root)


def model_folder(path: str, root: str) -> str:
    from stoker.training.generate.finding import find

    return os.path.dirname(find(path, None, root, lambda _: None).folder)


def setting(path: str, root: str) -> str:
    from stoker.training.config.resolve import _pinned

    return os.path.dirname(_pinned(f"{path}/hf"))


OPENED: dict[str, Callable[[str, str], str]] = {
    "stoker why": lambda path, root: run_index.find_run(path, root).dir,
    "stoker chat": model_folder,
    "--model.load": setting,
    "stoker nan": nan_folder,
    "stoker rollouts": rollouts_folder,
}


@pytest.mark.parametrize("kind", ["folder", "link", "link to what was ours", "our link to what they made again"])
@pytest.mark.parametrize("command", OPENED)
def test_latest_of_another_user_is_our_newest_run_for_every_command(public: Path, command: str, kind: str) -> None:
    """A folder `latest` of theirs was taken for ours, and its model was exported, served and trained on."""
    made(public, "ours")

    def theirs() -> None:
        made(public, "latest" if kind == "folder" else "theirs")
        if kind == "link":
            (public / "latest").symlink_to("theirs")
        elif kind == "link to what was ours":
            (public / "latest").symlink_to("ours-of-long-ago")

    if kind == "link to what was ours":
        made(public, "ours-of-long-ago")
        about = {"schema": 1, "id": "ours-of-long-ago", "name": "ours-of-long-ago", "started": 0.5}
        (public / "ours-of-long-ago" / "run.json").write_text(json.dumps(about))
    if kind == "our link to what they made again":
        (public / "latest").symlink_to("theirs")
    do_as(ATTACKER, theirs)
    found = OPENED[command](f"{public}/latest", str(public))
    assert os.path.samefile(found, public / "ours"), found


def test_a_folder_called_latest_where_we_have_no_runs_is_what_was_named(public: Path) -> None:
    """A colleague's models/latest, say."""
    do_as(ATTACKER, lambda: made(public, "latest"))
    path = f"{public}/latest"
    assert model_folder(path, str(public)) == path == setting(path, str(public))


# ---- the name of another user's Slurm job ----

_JOB = (
    "JobId=12 JobName={} UserId=ann(12345) GroupId=ann(12345) Priority=1 Account=(null) QOS=normal JobState=FAILED"
    " Reason=NonZeroExitCode Dependency=(null) Requeue=1 Restarts=2 BatchFlag=1 Reboot=0 ExitCode=3:0 RunTime=00:00:01"
    " TimeLimit=01:00:00 ReqNodeList=(null) ExcNodeList=(null) NodeList=n[1-2] Command=/x WorkDir=/y Comment={}"
)


def test_a_jobs_own_words_are_read() -> None:
    job = slurm_job.parse_scontrol(_JOB.format("a b", "c"))
    assert job is not None
    assert (job.id, job.state, job.exit_code, job.restarts, job.nodes) == ("12", "FAILED", 3, 2, "n[1-2]")


@pytest.mark.parametrize("text", ["a JobState=COMPLETED", "a Restarts=x", "a\nJobId=12 JobState=COMPLETED\nJobId=12 b"])
@pytest.mark.parametrize("where", ["name", "comment"])
def test_a_jobs_name_says_nothing_about_its_state(text: str, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    line = _JOB.format(text, "c") if where == "name" else _JOB.format("b", text)
    answers = {"scontrol": line + "\n", "sacct": "12|FAILED|3:0|None|n[1-2]|01:00:00\n"}
    monkeypatch.setattr(slurm_job, "_run", lambda program, *_: answers[program])
    assert slurm_job.query_tasks("12") == []
    job = slurm_job.query_job("12")
    assert job is not None and job.state == "FAILED"
