"""A server that several people use: nobody's run, lock, cache or folder is taken for another's (threat model, lines 2 and 3)."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import EVERYTHING, Done, Stoker, forget_verdict, gpu_json, machine_json, tagged, wait_for
from localuser import ATTACKER, VICTIM, do_as, start_as
from stoker.contract import process, safe_io
from stoker.contract.errors import Refusal
from stoker.contract.process import find_process, send_signal
from stoker.control.agent.probes import host
from stoker.control.doctor import stale_files
from stoker.control.machine.gpu_lock import GpuLocks, find_held_gpus
from stoker.control.plan.run_dir import RunDir, discard_run_dir
from stoker.control.record import private_folders, run_index
from stoker.control.scheduler import slurm_job

ROOT_ONLY = pytest.mark.skipif(os.getuid() != 0, reason="two real users need root to become them")


ANN, BOB, TEAM = 12345, 12346, 12347


ESC = "\x1b]0;owned\x07\x1b[2J\u202e"

VERDICT = {"status": "failed", "cause": "rank.exit", "summary": "s", "exit_code": 1, "evidence": ["e"], "fix": ["f"]}


class User:
    """Runs stoker as this uid, in a folder that both share."""

    def __init__(self, uid: int, cwd: Path, env: dict[str, str]) -> None:
        self.uid, self.cwd, self.env = uid, cwd, env

    def command(self, *words: str) -> list[str]:
        # This Python may lie in a folder that only root may enter: to read is allowed, to write and to signal is not.
        reads = ("--inh-caps", "+dac_read_search", "--ambient-caps", "+dac_read_search")
        return [
            "setpriv",
            "--reuid",
            str(self.uid),
            "--regid",
            str(self.uid),
            "--groups",
            str(TEAM),
            *reads,
            "--",
            *words,
        ]

    def __call__(self, *words: str) -> Done:
        argv = self.command(sys.executable, "-m", "stoker", *words)
        done = subprocess.run(
            argv, cwd=self.cwd, env=self.env, capture_output=True, timeout=60, check=False, stdin=subprocess.DEVNULL
        )
        return Done(done.returncode, done.stdout, done.stderr, self.cwd)

    def python(self, code: str) -> str:
        return subprocess.run(
            self.command(sys.executable, "-c", code),
            cwd=self.cwd,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout

    def runs(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = json.loads(self("runs", "--json").out)["runs"]
        return rows


FOR_GROUPS_TOO = (
    "test_each_user_sees_and_continues_their_own_runs",
    "test_a_planted_record_is_neither_listed_continued_nor_signalled",
)


@pytest.fixture(params=[0o1777, 0o3770], ids=["all", "group"])
def users(request: pytest.FixtureRequest) -> Iterator[tuple[User, User]]:
    if request.param == 0o3770 and not EVERYTHING and request.function.__name__ not in FOR_GROUPS_TOO:
        pytest.skip("runs with: bash test.sh --all")
    if shutil.which("setpriv") is None:
        pytest.skip("setpriv (util-linux) is not installed")
    folder = Path(tempfile.mkdtemp(prefix="shared-", dir="/tmp"))
    folder.chmod(0o755)
    (folder / "runs").mkdir()
    os.chown(folder / "runs", 0, TEAM)
    (folder / "runs").chmod(request.param)
    (folder / "machine.json").write_text(json.dumps(machine_json(0)))
    (folder / "ok.py").write_text("print('fine')\n")
    (folder / "nap.py").write_text("import time\nprint('up', flush=True)\ntime.sleep(600)\n")
    (folder / "fail.py").write_text("raise SystemExit(3)\n")
    bare = {key: value for key, value in os.environ.items() if not key.startswith(("STOKER_", "SLURM_"))}
    env = {**bare, "HOME": str(folder), "STOKER_MACHINE": str(folder / "machine.json"), "PYTHONDONTWRITEBYTECODE": "1"}
    yield User(ANN, folder, env), User(BOB, folder, env)
    left = wait_for(lambda: [] if not tagged(folder) else None, 3.0)
    shutil.rmtree(folder)
    assert left == []


@ROOT_ONLY
def test_each_user_sees_and_continues_their_own_runs(users: tuple[User, User]) -> None:
    ann, bob = users
    assert ann("run", "--name", "exp", "fail.py").code == 3
    done = bob("run", "--name", "exp", "fail.py")
    assert done.code == 3 and "going on with" not in done.err, done.err  # a name of Ann's is no name of Bob's
    assert done.err.count("could not be updated") == 1
    assert [run["user"] for run in ann.runs()] == [f"uid {ANN}"] and [run["user"] for run in bob.runs()] == [
        f"uid {BOB}"
    ]
    again = ann("run", "--name", "exp", "fail.py")
    assert again.code == 3 and "starting run" in again.err and len(ann.runs()) == len(bob.runs()) == 1
    both = json.loads(bob("runs", "--json", "--all").out)["runs"]
    assert sorted(row["user"] for row in both) == [f"uid {ANN}", f"uid {BOB}"]
    table = bob("runs", "--all").out
    assert f"uid {ANN}" in table and f"uid {BOB}" in table and "1 folder of other users" in bob("runs").out
    for user in (ann, bob):
        own = user.runs()[0]["run"]
        for words in (("why",), ("why", "latest"), ("why", "runs/latest"), ("why", "exp"), ("why", own)):
            assert user(*words).out.startswith(f"run {own}: failed, exit code 3"), (user.uid, words)
    theirs = ann.runs()[0]
    refused = bob("why", theirs["run"]) if theirs["run"] != bob.runs()[0]["run"] else bob("why", "nothing")
    assert refused.code in (66, 77) and refused.err.count("\n") == 1


@ROOT_ONLY
def test_nobody_stops_anothers_run(users: tuple[User, User]) -> None:
    ann, bob = users
    assert ann("run", "--detach", "--name", "nap", "nap.py").code == 0
    row = ann.runs()[0]
    assert row["status"] == "running"
    for words in (
        ("stop", row["dir"]),
        ("stop", row["run"]),
        ("stop", "nap"),
        ("stop",),
        ("stop", "--now", f"runs/{row['run']}"),
    ):
        refused = bob(*words)
        assert refused.code in (66, 77) and refused.err.count("\n") == 1, (words, refused.out, refused.err)
    # Root could, and does not by mistake: it is not root's run either.
    done = subprocess.run(
        [sys.executable, "-m", "stoker", "stop", row["dir"]],
        cwd=ann.cwd,
        env=ann.env,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 77 and f"belongs to uid {ANN}" in done.stderr
    listed = next(run for run in json.loads(bob("runs", "--all", "--json").out)["runs"] if run["user"] == f"uid {ANN}")
    assert listed["status"] == "unknown" and ann.runs()[0]["status"] == "running"
    assert bob("run", "--name", "nap", "ok.py").code == 0  # no collision
    assert "is running" in ann("run", "--name", "nap", "ok.py").err
    assert ann("stop", "nap").code == 0


@ROOT_ONLY
def test_a_planted_record_is_neither_listed_continued_nor_signalled(users: tuple[User, User]) -> None:
    """Bob plants records that name Ann's processes, with the name that Ann uses, and a link `latest` to one."""
    ann, bob = users
    victim = subprocess.Popen(ann.command("sleep", "600"), start_new_session=True)
    try:
        assert wait_for(lambda: True if process.process_owner(victim.pid) == ANN else None, 5)
        with open(f"/proc/{victim.pid}/stat", "rb") as file:
            start = int(file.read().rpartition(b")")[2].split()[19])
        for name in ("exp", "2026-planted"):
            folder = bob.cwd / "runs" / name
            folder.mkdir()
            who = {"pid": victim.pid, "start": start, "host": os.uname().nodename, "uid": ANN}
            (folder / "run.json").write_text(
                json.dumps({"name": "exp", "started": 9e9, "launcher": who, "config_hash": "x"})
            )
            (folder / "events.jsonl").write_text("")
            for path in (folder, *folder.iterdir()):
                os.chown(path, BOB, BOB)
        (bob.cwd / "runs" / "latest").symlink_to("exp")
        os.lchown(bob.cwd / "runs" / "latest", BOB, BOB)
        for words in (
            ("stop",),
            ("stop", "exp"),
            ("stop", "runs/exp"),
            ("stop", "--now", str(bob.cwd / "runs" / "2026-planted")),
        ):
            assert ann(*words).code in (66, 77), words
        done = ann("run", "--name", "exp", "ok.py")
        assert done.code == 0 and [run["name"] for run in ann.runs()] == ["exp"] and "is running" not in done.err
        assert ann("why").out.startswith(f"run {ann.runs()[0]['run']}: completed")
        assert ann("clean", "--yes", "--runs-dir", "runs").code == 0
        assert victim.poll() is None
        # A link of Bob's to a run of Ann's own is Bob's word, too.
        own = ann.runs()[0]["run"]
        os.symlink(own, bob.cwd / "runs" / "alias")
        os.lchown(bob.cwd / "runs" / "alias", BOB, BOB)
        assert ann("why", "alias").code == 77 and ann("why", own).code == 0
    finally:
        victim.kill()
        victim.wait()


@ROOT_ONLY
def test_what_anothers_record_says_is_only_printed(users: tuple[User, User]) -> None:
    """By its path it may be read: cleaned of control codes, and no file elsewhere is opened for it."""
    ann, bob = users
    assert bob("run", "--name", "bobs", "fail.py").code == 3
    folder = next(path for path in (bob.cwd / "runs").iterdir() if path.name.endswith("-bobs"))
    secret = ann.cwd / "secret"
    secret.write_text("do not print\n")
    verdict = {
        **VERDICT,
        "summary": f"{ESC}summary",
        "evidence": [f"a\n{ESC}b"],
        "fix": [ESC],
        "host": ESC,
        "cause": ESC,
    }
    (folder / "verdict.json").write_text(json.dumps(verdict))
    (folder / "events.jsonl").write_text(
        json.dumps({"event": "restart", "time": 1.0, "cause": ESC})
        + "\n"
        + json.dumps({"event": "rank-up", "time": 2.0, "rank": [], "label": ESC})
        + "\n"
    )
    log = folder / "attempt-0" / "rank-0.log"
    log.unlink()
    log.symlink_to(secret)
    done = ann("why", str(folder))
    assert (
        done.code == 0
        and f"(of uid {BOB})" in done.out
        and "\x1b" not in done.out
        and "\u202e" not in done.out
        and "\\x1b" in done.out
    )
    for words in (("logs", str(folder)), ("attach", str(folder))):
        done = ann(*words)
        assert "do not print" not in done.out and done.code == 66 and done.err.count("\n") == 1, (
            words,
            done.out,
            done.err,
        )
    shutil.rmtree(folder / "attempt-0")
    (folder / "attempt-0").symlink_to(ann.cwd)
    (ann.cwd / "rank-0.log").write_text("do not print\n")
    assert "do not print" not in ann("logs", str(folder)).out + ann("attach", str(folder)).out
    forget_verdict(folder)
    (folder / "verdict.json").symlink_to(secret)
    assert "do not print" not in ann("why", str(folder)).out


@ROOT_ONLY
def test_a_run_directory_of_anothers_is_never_written(users: tuple[User, User]) -> None:
    ann = users[0]
    theirs = ann.cwd / "theirs"
    theirs.mkdir()
    os.chown(theirs, BOB, BOB)
    theirs.chmod(0o777)
    link = ann.cwd / "runs" / "link"
    link.symlink_to(theirs)
    for path in (theirs, link):
        told = ann.python(
            "from stoker.control.record.run_writer import RunWriter\nfrom stoker.contract.errors import Refusal\n"
            f"try: RunWriter({str(path)!r}, 'h', True)\nexcept Refusal as refusal: print(refusal.code, refusal.line)\n"
        )
        assert told.startswith("77 ") and list(theirs.iterdir()) == []


@ROOT_ONLY
def test_each_user_submits_from_a_shared_folder(users: tuple[User, User]) -> None:
    ann, bob = users
    tools = ann.cwd / "tools"
    tools.mkdir()
    (tools / "sbatch").write_text("#!/bin/sh\necho 12\n")
    (tools / "sbatch").chmod(0o755)
    for user, name in ((ann, "slurm"), (bob, f"slurm-{BOB}")):
        user.env = {**user.env, "PATH": f"{tools}:{user.env['PATH']}"}
        done = user("submit", "--no-follow", "--", "ok.py")
        assert done.code == 0 and (user.cwd / "runs" / name / "12.json").stat().st_uid == user.uid, done.err
        assert f"/{name}/%j.out" in next((user.cwd / "runs" / name).glob("*.sh")).read_text()


@ROOT_ONLY
def test_a_path_through_latest_is_ones_own_run(users: tuple[User, User]) -> None:
    ann, bob = users
    assert ann("run", "--name", "a", "ok.py").code == 0 and bob("run", "--name", "b", "ok.py").code == 0
    code = "from stoker.training.config.resolve import _pinned; print(_pinned('runs/latest/hf'))"
    for user, name in ((ann, "a"), (bob, "b")):
        assert user.python(code).strip().endswith(f"-{name}/hf"), user.uid


def test_where_the_file_system_names_us_otherwise_runs_are_still_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS makes nobody of root: what we make there is not ours by number, and still ours."""
    about = tmp_path.stat()
    assert safe_io.is_own_uid(about.st_uid, str(tmp_path)) and not safe_io.is_own_uid(about.st_uid + 1, str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: about.st_uid + 7)
    monkeypatch.setattr(safe_io, "_own_uids", {})
    assert safe_io.is_own_uid(about.st_uid, str(tmp_path)) and not safe_io.is_own_uid(about.st_uid + 1, str(tmp_path))


# ---- folders and files that another user made ----


def give(path: Path, uid: int = ATTACKER) -> None:
    os.chown(path, uid, uid, follow_symlinks=False)


@ROOT_ONLY
@pytest.mark.parametrize(
    ("uid", "mode", "reason"),
    [
        (ATTACKER, 0o1777, "belongs to"),
        (ATTACKER, 0o755, "belongs to"),
        (0, 0o777, "all users can write"),
        (0, 0o775, "its group"),
        (0, 0o1777, ""),
        (0, 0o1770, ""),
        (0, 0o755, ""),
    ],
)
def test_no_run_is_started_where_others_can_exchange_it(stoker: Stoker, uid: int, mode: int, reason: str) -> None:
    runs = stoker.cwd / "runs"
    runs.mkdir()
    os.chown(runs, uid, ATTACKER)
    runs.chmod(mode)
    done = stoker("run", stoker.script("ok.py", "print('fine')\n"))
    if reason:
        assert done.code == 73 and reason in done.err and "--runs-dir" in done.err and not list(runs.iterdir())
    else:
        assert done.code == 0 and stat.S_IMODE(done.run_dir.stat().st_mode) == 0o700, done.err
    assert stoker("runs").code == 0  # to look at it is harmless


@ROOT_ONLY
def test_a_link_that_somebody_else_made_is_not_the_runs_folder(stoker: Stoker) -> None:
    (stoker.cwd / "mine").mkdir(mode=0o700)
    (stoker.cwd / "runs").symlink_to("mine")
    give(stoker.cwd / "runs")
    done = stoker("run", stoker.script("ok.py", ""))
    assert done.code == 73 and "belongs to" in done.err and not list((stoker.cwd / "mine").iterdir())


@ROOT_ONLY
@pytest.mark.parametrize("kind", ["folder", "link", "file", "runs folder"])
def test_a_host_refuses_a_run_directory_that_somebody_else_made(tmp_path: Path, kind: str) -> None:
    runs = tmp_path / "runs"
    runs.mkdir()
    run_dir = runs / "20260101-000000-exp"
    if kind == "link":
        (tmp_path / "theirs").mkdir(mode=0o777)
        run_dir.symlink_to(tmp_path / "theirs")
    elif kind == "file":
        run_dir.write_text("")
    elif kind == "folder":
        run_dir.mkdir()
    give(runs if kind == "runs folder" else run_dir)
    answer = host.ready(str(tmp_path), sys.executable, str(run_dir), ".shared-x")
    assert len(answer["problems"]) == 1 and not answer["shared"], answer


def test_a_host_takes_a_run_directory_of_ones_own_again(tmp_path: Path) -> None:
    run_dir = tmp_path / "runs" / "20260101-000000-exp"
    for _ in range(2):
        answer = host.ready(str(tmp_path), sys.executable, str(run_dir), ".shared-x")
        assert answer == {"problems": [], "shared": False, "unwritable": ""}


@ROOT_ONLY
@pytest.mark.parametrize("place", [".", "stoker", "stoker/compile"])
@pytest.mark.parametrize("how", ["theirs", "open to all"])
def test_code_is_not_loaded_from_a_cache_that_others_can_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, how: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    lines: list[str] = []
    own = private_folders.private_cache("compile", lines.append)
    assert own == str(tmp_path / "stoker" / "compile") and lines == []
    if how == "theirs":
        give(tmp_path / place)
    else:
        (tmp_path / place).chmod(0o777)
    fresh = private_folders.private_cache("compile", lines.append)
    assert not fresh.startswith(str(tmp_path)) and own in lines[0]
    os.rmdir(fresh)


@ROOT_ONLY
def test_in_a_folder_of_another_user_ones_own_name_is_taken(tmp_path: Path) -> None:
    """Of a shared, sticky folder; what is not sticky, others could exchange."""
    tmp_path.chmod(0o1777)
    assert private_folders.own_folder(str(tmp_path), "slurm") == str(tmp_path / "slurm")
    (tmp_path / "slurm").mkdir()
    give(tmp_path / "slurm")
    assert private_folders.own_folder(str(tmp_path), "slurm") == str(tmp_path / "slurm-0")
    (tmp_path / "slurm-0").symlink_to(tmp_path)
    with pytest.raises(Refusal, match="choose another folder"):
        private_folders.own_folder(str(tmp_path), "slurm")


@ROOT_ONLY
def test_a_containers_root_trusts_the_user_whose_folder_it_works_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bind mount shows files with their owner's uid on the host. Without a container that user may be at work here."""
    monkeypatch.setattr(safe_io, "_CONTAINER_MARKS", (str(tmp_path / "mark"),))
    monkeypatch.chdir(tmp_path)
    nobody = 65534
    for uid, without_mark in ((ATTACKER, True), (nobody, False)):  # only one of them has an account
        give(tmp_path, uid)
        assert safe_io.is_trusted(uid, str(tmp_path)) == without_mark
        assert not safe_io.is_trusted(uid + 1, str(tmp_path))
    (tmp_path / "mark").touch()
    assert safe_io.is_trusted(nobody, str(tmp_path))
    tmp_path.chmod(0o777)
    assert not safe_io.is_trusted(nobody, str(tmp_path))


@ROOT_ONLY
@pytest.mark.parametrize("kind", ["pipe", "theirs", "link"])
def test_the_doctor_writes_a_new_file_whatever_lies_there(stoker: Stoker, kind: str) -> None:
    path, precious = stoker.cwd / "out", stoker.cwd / "precious"
    precious.write_text("kept")
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to(precious)
    else:
        path.write_text("")
        path.chmod(0o666)
        give(path)
    recorded = Path(__file__).parents[1] / "machines" / "laptop.json"  # looking at this one would import torch
    done = stoker("doctor", "--only", "host.disk", "--machine", str(recorded), "--bundle", "out", timeout=60)
    about = path.lstat()
    assert done.code in (0, 1) and about.st_uid == os.geteuid() and stat.S_IMODE(about.st_mode) == 0o600, done.err
    assert stat.S_ISREG(about.st_mode) and about.st_size and precious.read_text() == "kept"


# ---- `latest`, and mounts that only their owner can look at ----


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


_MOUNT = """
import ctypes, os, sys
libc, handle = ctypes.CDLL(None, use_errno=True), os.open("/dev/fuse", os.O_RDWR)
options = f"fd={handle},rootmode=40000,user_id=12345,group_id=12345".encode()
if libc.mount(b"theirs", sys.argv[1].encode(), b"fuse", 6, options):
    sys.exit(f"mount: {os.strerror(ctypes.get_errno())}")
os.set_inheritable(handle, True)
os.execvp(sys.argv[2], sys.argv[2:])
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


@ROOT_ONLY
def test_what_cant_be_removed_hides_no_refusal(public: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (public / "closed").mkdir(0o755)
    root = public / "closed" / "runs"
    (root / "x").mkdir(parents=True)
    for folder in (root, root / "x"):
        os.chown(folder, VICTIM, VICTIM)
    place = RunDir(str(root / "x"), "x", "x", 0, False, created=True, created_root=True)
    do_as(VICTIM, lambda: discard_run_dir(place))
    assert not (root / "x").exists()
    assert capfd.readouterr().err == f"stoker: {root} can't be removed: Permission denied\n"


def test_where_others_could_exchange_notes_of_jobs_runs_are_explained_without(tmp_path: Path) -> None:
    (tmp_path / "slurm").mkdir()
    (tmp_path / "slurm" / "12.json").write_text('{"submitted": 5.0}')
    assert slurm_job.read_job_note(str(tmp_path), "12") == {"submitted": 5.0}
    tmp_path.chmod(0o777)
    assert slurm_job.read_job_note(str(tmp_path), "12") == {} and slurm_job.run_of(str(tmp_path), "12") is None
    with pytest.raises(Refusal, match="could replace your folders"):
        slurm_job.log_path(str(tmp_path), "12")


# ---- signals ----


@ROOT_ONLY
def test_another_users_process_is_not_signalled() -> None:
    pid = start_as(ATTACKER, lambda: time.sleep(600))
    try:
        assert wait_for(lambda: True if process.process_owner(pid) == ATTACKER else None, SOON)
        about = find_process(pid)
        assert about is not None and not send_signal(about, signal.SIGKILL)
        assert os.waitpid(pid, os.WNOHANG) == (0, 0)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


# ---- GPU locks: what another user puts in the place of the folder or of a file ----

UUID = gpu_json(0)["uuid"]
SOON = 5.0


@pytest.fixture
def locks(public: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the lock folder would be: in a folder that anybody may write to."""
    monkeypatch.setenv("STOKER_GPU_LOCKS", str(public / "locks"))
    return public / "locks"


@pytest.fixture
def precious(public: Path) -> Path:
    """A file of ours in a folder that is closed to others."""
    folder = public / "private"
    folder.mkdir(mode=0o700)
    (folder / "notes.txt").write_text("keep me")
    return folder / "notes.txt"


def is_link(path: Path, precious: Path) -> None:
    path.symlink_to(precious.parent if path.name == "locks" else precious)


def is_file(path: Path, precious: Path) -> None:
    path.write_text("no folder")


def is_pipe(path: Path, precious: Path) -> None:
    os.mkfifo(path)
    path.chmod(0o666)


def is_closed(path: Path, precious: Path) -> None:
    path.mkdir(mode=0o700)


def is_not_sticky(path: Path, precious: Path) -> None:
    path.mkdir()
    path.chmod(0o777)


FOLDERS = [is_link, is_file, is_pipe, is_closed, is_not_sticky]
Plant = Callable[[Path, Path], None]


@ROOT_ONLY
@pytest.mark.parametrize("plant", FOLDERS)
def test_a_run_starts_where_the_lock_folder_is_none(
    stoker: Stoker, box: Callable[..., dict[str, str]], locks: Path, precious: Path, plant: Plant
) -> None:
    do_as(ATTACKER, lambda: plant(locks, precious))
    env = {**box(1), "STOKER_GPU_LOCKS": str(locks)}
    script = stoker.script("ok.py", "print('ran')\n")
    done = stoker("run", "--nproc-per-node", "1", "--gpus", "0", script, env=env, timeout=60)
    assert done.code == 0 and "ran" in done.out and "Traceback" not in done.err, done.err
    assert f"{locks}-0" in done.err and str(ATTACKER) in done.err
    assert [path.name for path in precious.parent.iterdir()] == ["notes.txt"]
    cleaned = stoker("clean", env={"STOKER_GPU_LOCKS": str(locks)})
    assert cleaned.code in (0, 1, 3) and sum(str(locks) in line for line in cleaned.out.splitlines()) >= 1


@ROOT_ONLY
@pytest.mark.parametrize("plant", FOLDERS)
@pytest.mark.parametrize("uid", [0, VICTIM])
def test_ones_own_runs_still_exclude_each_other(locks: Path, precious: Path, plant: Plant, uid: int) -> None:
    do_as(ATTACKER, lambda: plant(locks, precious))

    def body() -> None:
        first, second = GpuLocks("first"), GpuLocks("second")
        assert first.take([UUID]) == {} and len(first.notices) == 1, first.notices
        assert UUID in second.take([UUID])  # another open file: as another process would have
        assert list(find_held_gpus([UUID])) == [UUID]
        assert stat.S_IMODE(os.stat(f"{locks}-{uid}").st_mode) == 0o700

    do_as(uid, body)


@ROOT_ONLY
def test_where_every_lock_folder_is_taken_the_run_starts_without_a_lock_and_says_so(
    locks: Path, precious: Path
) -> None:
    def plant() -> None:
        locks.write_text("")
        Path(f"{locks}-{VICTIM}").symlink_to(precious.parent)

    do_as(ATTACKER, plant)

    def body() -> None:
        mine = GpuLocks("r")
        assert mine.take([UUID]) == {}
        assert any("another run may pick it too" in line for line in mine.notices), mine.notices
        assert find_held_gpus([UUID]) == {}

    do_as(VICTIM, body)


@ROOT_ONLY
def test_two_users_exclude_each_other(locks: Path, public: Path) -> None:
    def hold() -> None:
        mine = GpuLocks("theirs")
        assert mine.take([UUID]) == {} and mine.notices == []
        (public / "ready").touch()
        time.sleep(60)

    holder = start_as(VICTIM, hold)
    try:
        assert wait_for(lambda: True if (public / "ready").exists() else None, SOON)
        expected = f"run theirs (agent pid {holder}, user {VICTIM})"
        assert find_held_gpus([UUID]) == {UUID: expected}

        def other() -> None:
            assert GpuLocks("mine").take([UUID]) == {UUID: expected}

        do_as(ATTACKER, other)
    finally:
        os.kill(holder, signal.SIGKILL)
        os.waitpid(holder, 0)
    assert GpuLocks("mine").take([UUID]) == {} and json.loads((locks / UUID).read_text())["run"] == "mine"


@pytest.fixture
def folder(locks: Path) -> Path:
    locks.mkdir()
    locks.chmod(0o1777)
    return locks


@ROOT_ONLY
@pytest.mark.parametrize("plant", [is_pipe, is_closed, is_link])
@pytest.mark.parametrize("uid", [0, VICTIM])
def test_what_is_no_lock_file_is_reported_and_goes_unused(folder: Path, precious: Path, plant: Plant, uid: int) -> None:
    do_as(ATTACKER, lambda: plant(folder / UUID, precious))

    def body() -> None:
        mine = GpuLocks("r")
        assert mine.take([UUID, "GPU-fine"]) == {}
        (notice,) = mine.notices
        assert f"{folder}-{uid}:" in notice and str(ATTACKER) in notice
        assert UUID in GpuLocks("again").take([UUID])
        assert (folder / "GPU-fine").is_file()

    do_as(uid, body)
    assert precious.read_text() == "keep me"
    _, strange = stale_files.find_locks()
    assert any(UUID in line for line in strange)


LIES = {
    "deep": b"[" * 100_000,
    "binary": bytes(range(256)) * 8,
    "empty": b"",
    "a huge pid": b'{"run": "x", "pid": 99999999999999999999}',
    "control codes": b'{"run": "\\u001b[2J\\u001b[31m", "pid": 1}',
    "pid 1": b'{"run": "x", "pid": 1}',
}


@ROOT_ONLY
@pytest.mark.parametrize("content", LIES.values(), ids=LIES)
def test_whatever_a_lock_file_says_its_holder_is_named_by_the_kernel(
    folder: Path, public: Path, stoker: Stoker, box: Callable[..., dict[str, str]], content: bytes
) -> None:
    def squat() -> None:
        with open(folder / UUID, "wb") as file:
            file.write(content)
            file.flush()
            os.fchmod(file.fileno(), 0o666)
            fcntl.flock(file, fcntl.LOCK_EX)
            (public / "squats").touch()
            time.sleep(120)

    pid = start_as(ATTACKER, squat)
    try:
        assert wait_for(lambda: True if (public / "squats").exists() else None, SOON)
        for holders in (find_held_gpus([UUID]), GpuLocks("r").take([UUID])):
            assert list(holders) == [UUID]
            assert holders[UUID].startswith(f"pid {pid} (") and f"user {ATTACKER}" in holders[UUID]
            assert "--share-gpus" in holders[UUID]  # the way out
        listed, strange = stale_files.find_locks()
        assert [lock.held for lock in listed] == [True] and strange == [] and listed[0].who.isprintable()
        if content == LIES["pid 1"]:  # whole commands
            script = stoker.script("ok.py", "print('ran')\n")
            env = {**box(1), "STOKER_GPU_LOCKS": str(folder)}
            done = stoker("run", "--nproc-per-node", "1", script, env=env, timeout=60)
            assert done.code == 69 and f"pid {pid} (" in done.err and "--share-gpus" in done.err
            assert stoker("run", "--nproc-per-node", "1", "--share-gpus", script, env=env, timeout=60).code == 0
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    listed, _ = stale_files.find_locks()
    assert [lock.held for lock in listed] == [False] and listed[0].who.isprintable()
    assert GpuLocks("r").take([UUID]) == {} and json.loads((folder / UUID).read_text())["run"] == "r"
