"""A runs folder that several users share, and records that are damaged or hostile: nobody is blocked, nobody's run is taken for another's."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import EVERYTHING, Done, Stoker, forget_verdict, machine_json, tagged, wait_for
from stoker.contract import names, owners
from stoker.contract.safe_io import write_json
from stoker.contract.shapes import Verdict
from stoker.control.record import finder, follow, ownership, reader

ROOT_ONLY = pytest.mark.skipif(os.getuid() != 0, reason="two real users need root to become them")
ANN, BOB, TEAM = 12345, 12346, 12347
HANGS_S = 100
ESC = "\x1b]0;owned\x07\x1b[2J\u202e"
GOOD: dict[str, Any] = {
    "schema": 1,
    "name": "x",
    "started": 5.0,
    "launcher": {"pid": 1, "start": 1, "host": os.uname().nodename},
    "plan": {"world_size": 1},
}


def _text(data: Any) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        (folder / "run.json").write_text(data if isinstance(data, str) else json.dumps(data))

    return make


def _with(**changes: Any) -> Callable[[Path], None]:
    return _text({**GOOD, **changes})


def _fifo(name: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        _text(GOOD)(folder)
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return make


def _link(name: str, target: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        _text(GOOD)(folder)
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)

    return make


def _folder(folder: Path) -> None:
    (folder / "run.json").mkdir()


def _binary(folder: Path) -> None:
    (folder / "run.json").write_bytes(bytes(range(256)) * 4)


def _wrong_verdict(folder: Path) -> None:
    _text(GOOD)(folder)
    (folder / "verdict.json").write_text('{"status": [], "cause": 1}')


def _huge_attempt(folder: Path) -> None:
    _text(GOOD)(folder)
    (folder / "attempt-99999999999999").mkdir()


def _socket(folder: Path) -> None:
    import socket

    before = os.getcwd()
    os.chdir(folder)  # a socket's path has 107 bytes
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind("run.json")
    finally:
        os.chdir(before)


# What the record says, and a word of what is reported; "": it is read as far as it goes.
DAMAGED: dict[str, tuple[Callable[[Path], None], str]] = {
    "empty": (_text(""), "not JSON"),
    "torn": (_text('{"name": "x", "star'), "not JSON"),
    "binary": (_binary, "not JSON"),
    "not an object": (_text("[1, 2]"), "not a JSON object"),
    "null": (_text("null"), "not a JSON object"),
    "deeply nested": (_text("[" * 200_000), "not JSON"),
    "endless number": (_text('{"started": ' + "9" * 10_000 + "}"), "not JSON"),
    "a named pipe": (_fifo("run.json"), "named pipe"),
    "a folder": (_folder, "folder"),
    "a socket": (_socket, "No such device"),
    "a link elsewhere": (_link("run.json", "/etc/passwd"), "symbolic link"),
    "a link to itself": (_link("run.json", "run.json"), "symbolic link"),
    "a link to a device": (_link("run.json", "/dev/zero"), "symbolic link"),
    "started is text": (_with(started="x"), "started"),
    "started is NaN": (_text('{"started": NaN}'), "started"),
    "started is infinite": (_text('{"started": Infinity}'), "started"),
    "started before time": (_with(started=-1e300), "started"),
    "started is true": (_with(started=True), "started"),
    "launcher is a list": (_with(launcher=[]), "launcher"),
    "launcher is text": (_with(launcher="1"), "launcher"),
    "pid is text": (_with(launcher={"pid": "1"}), "pid"),
    "pid is negative": (_with(launcher={"pid": -1, "start": 0}), "pid"),
    "pid is huge": (_with(launcher={"pid": 1 << 80}), "pid"),
    "start is a list": (_with(launcher={"pid": 1, "start": [1]}), "start"),
    "host is a number": (_with(launcher={"pid": 1, "start": 1, "host": 7}), "host"),
    "name is a number": (_with(name=5), "name"),
    "name is a list": (_with(name=["x"]), "name"),
    "plan is a number": (_with(plan=3), "plan"),
    "world size is text": (_with(plan={"world_size": "many"}), "world_size"),
    "environment is a list": (_with(environment=["SLURM_JOB_ID"]), "environment"),
    "events are a named pipe": (_fifo("events.jsonl"), "named pipe"),
    "events are a link to themselves": (_link("events.jsonl", "events.jsonl"), "symbolic link"),
    "events are a device": (_link("events.jsonl", "/dev/zero"), "symbolic link"),
    "verdict is a named pipe": (_fifo("verdict.json"), ""),
    "verdict of wrong types": (_wrong_verdict, ""),
    "an attempt with a huge number": (_huge_attempt, ""),
    "an attempt that is a link": (_link("attempt-0", "/etc"), ""),
    "name with escapes": (_with(name=ESC), ""),
    "nothing but a name": (_text({"name": "x"}), ""),
}


@pytest.fixture
def in_time() -> Iterator[None]:
    """What hangs is ended: a test that waits for ever would prove nothing."""

    def late(*_: object) -> None:
        raise TimeoutError(f"longer than {HANGS_S} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(HANGS_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def damage(root: Path, kind: str) -> Path:
    folder = root / f"20260101-000000-{kind.replace(' ', '-')}"
    folder.mkdir(parents=True)
    DAMAGED[kind][0](folder)
    return folder


@pytest.mark.usefixtures("in_time")
@pytest.mark.parametrize("kind", DAMAGED)
def test_one_damaged_record_is_skipped_and_reported(tmp_path: Path, kind: str) -> None:
    folder = damage(tmp_path, kind)
    (tmp_path / "2026-good").mkdir()
    write_json(str(tmp_path / "2026-good" / "run.json"), {**GOOD, "name": "good"})
    listing = finder.look(str(tmp_path))
    word = DAMAGED[kind][1]
    assert [run.id for run in listing.runs if run.name == "good"] == ["2026-good"] and len(listing.runs) == (
        1 if word else 2
    )
    assert word in listing.skipped and "\n" not in listing.skipped and listing.skipped.isprintable(), listing.skipped
    assert finder.find("good", str(tmp_path)).id == "2026-good"
    for run in listing.runs:
        assert reader.status(run) == "lost" and reader.over(run)
        assert run.attempts == [] and list(reader.events(run.dir)) == [] and reader.last_time(run.dir) is None
        assert list(follow.rank_logs(run)) == [] and follow.labels(run) == {}
    if word:
        with pytest.raises(names.Refusal, match="damaged"):
            finder.find(str(folder), str(tmp_path))
        with pytest.raises(names.Refusal, match="damaged"):
            finder.find(folder.name, str(tmp_path))


def test_every_command_gets_past_all_of_them(stoker: Stoker) -> None:
    root = stoker.cwd / "runs"
    for kind in DAMAGED:
        damage(root, kind)
    (root / "latest").symlink_to("latest")  # a loop
    script = stoker.script("ok.py", "print('fine')")
    good = stoker("run", "--name", "good", script)
    assert good.code == 0 and good.run_dir.name.endswith("-good") and good.err.count("damaged") == 1
    for words in (
        ("runs",),
        ("runs", "--json"),
        ("runs", "--all"),
        ("why", "good"),
        ("why",),
        ("logs", "good"),
        ("attach", "good"),
        ("stop", "good"),
        ("stop",),
        ("clean", "--runs-dir", "runs"),
        ("run", "--again", "--name", "good", script),
        ("run", "--name", "x", script),
    ):
        done = stoker(*words, timeout=HANGS_S)
        assert done.code == 0 and "Traceback" not in done.err and "\x1b" not in done.out + done.err, (
            words,
            done.code,
            done.err,
        )
        by_link = words in (("why",), ("stop",)) or words[0] == "clean"  # they had no need to look at all of them
        assert done.err.count("damaged") == (0 if by_link else 1), (words, done.err)
    (root / "latest").unlink()
    assert "good" in stoker("why").out or "x" in stoker("why").out
    for kind in DAMAGED:
        for command in ("why", "logs", "stop", "attach"):
            if DAMAGED[kind][1]:
                done = stoker(command, f"runs/20260101-000000-{kind.replace(' ', '-')}")
                assert done.code == 65 and done.err.count("\n") == 1 and "Traceback" not in done.err, (
                    kind,
                    command,
                    done.err,
                )
                break  # one path for all four: finder.find


VERDICT = {"status": "failed", "cause": "rank.exit", "summary": "s", "exit_code": 1, "evidence": ["e"], "fix": ["f"]}


@pytest.mark.parametrize(
    "wrong",
    [{"status": 5}, {"cause": None}, {"summary": ["x"]}, {"exit_code": "1"}, {"exit_code": True}, {"exit_code": 1 << 90}, {"rank": "0"}, {"host": 3}, {"gpu": []},
     {"evidence": "text"}, {"evidence": [1]}, {"evidence": {"a": 1}}, {"fix": [None]}, {"retryable": "no"}, {"detected_s": "soon"}, {"detected_s": float("nan")},
     {"run": 7}, {"attempt": None}, {"schema": "1"}],
)  # fmt: skip
def test_a_verdict_of_wrong_types_is_none(wrong: dict[str, Any]) -> None:
    assert Verdict.from_json(VERDICT).to_json() == Verdict.from_json(Verdict.from_json(VERDICT).to_json()).to_json()
    with pytest.raises(TypeError):
        Verdict.from_json({**VERDICT, **wrong})
    with pytest.raises(TypeError):
        Verdict.from_json(["status"])  # type: ignore[arg-type]


# ---- what is in the folder besides ----


@pytest.mark.parametrize("there", ["a folder", "a file", "stale", "dangling", "loop"])
def test_the_link_to_the_newest_run_is_best_effort(stoker: Stoker, there: str) -> None:
    root = stoker.cwd / "runs"
    root.mkdir()
    if there == "a folder":
        (root / "latest").mkdir()
        (root / "latest" / "mine.txt").touch()
    elif there == "a file":
        (root / "latest").touch()
    elif there == "stale":
        for pid in range(1, 5000):
            (root / f"latest.{pid}.tmp").symlink_to("nowhere")
    else:
        (root / "latest").symlink_to("nowhere" if there == "dangling" else "latest")
    done = stoker("run", stoker.script("ok.py", "print('fine')"))
    assert done.code == 0 and done.err.count("stays as it is") == (1 if there == "a folder" else 0)
    assert "completed" in stoker("why").out
    assert not [path for path in root.iterdir() if path.name.endswith(".tmp")] or there == "stale"


def test_a_temporary_file_that_lies_there_is_neither_used_nor_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("kept")
    (tmp_path / f"x.json.{os.getpid()}.tmp").symlink_to(precious)
    write_json(str(tmp_path / "x.json"), {"a": 1})
    assert precious.read_text() == "kept" and json.loads((tmp_path / "x.json").read_text()) == {"a": 1}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["precious", "x.json", f"x.json.{os.getpid()}.tmp"]


# ---- two users ----


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


# Who sees, continues and is signalled, in a folder that a group shares as well as in one that is everybody's.
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
    assert done.err.count("stays as it is") == 1
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
        assert wait_for(lambda: True if ownership_of(victim.pid) == ANN else None, 5)
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


def ownership_of(pid: int) -> int | None:
    from stoker.contract.process import owner

    return owner(pid)


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
            "from stoker.control.record.writer import RunRecord\nfrom stoker.contract.names import Refusal\n"
            f"try: RunRecord({str(path)!r}, 'h', True)\nexcept Refusal as refusal: print(refusal.code, refusal.line)\n"
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
    assert ownership.is_mine(about.st_uid, str(tmp_path)) and not ownership.is_mine(about.st_uid + 1, str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: about.st_uid + 7)
    monkeypatch.setattr(owners, "_given", {})
    assert ownership.is_mine(about.st_uid, str(tmp_path)) and not ownership.is_mine(about.st_uid + 1, str(tmp_path))
