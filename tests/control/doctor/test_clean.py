"""`stoker clean` with real processes: it ends what dead runs left, and never anybody else's work."""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import pty
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import Stoker, gpu_json, wait_for
from stoker.cli import clean as command
from stoker.contract.frozen import replace
from stoker.contract.process import find_process, send_signal
from stoker.control.doctor import cleanup, leftovers, stale_caches, stale_files
from stoker.control.machine import examine_child, procfs, run_origin
from stoker.control.machine.model import Machine, machine_from_json
from stoker.control.machine.nvml import DriverError, NoDriver, Nvml
from stoker.training.data.ours import tag

Start = Callable[..., subprocess.Popen[bytes]]
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(600)"


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a process in a session of its own, as ranks are; whatever of them is left at the end is ended."""
    started: list[subprocess.Popen[bytes]] = []

    def begin(argv: list[str], env: dict[str, str] | None = None, **more: Any) -> subprocess.Popen[bytes]:
        bare = {key: value for key, value in os.environ.items() if not key.startswith("STOKER_")}
        more = {"stdout": subprocess.DEVNULL, "start_new_session": True, **more}
        started.append(subprocess.Popen(argv, env={**bare, **(env or {})}, stdin=subprocess.DEVNULL, **more))
        return started[-1]

    yield begin
    for one in started:
        one.kill()
        one.wait()


def dead_run(root: Path, name: str = "20260101-000000-dead", **launcher: Any) -> dict[str, str]:
    """A run whose launcher is gone, as its processes know it."""
    gone = subprocess.Popen(["sleep", "60"])
    before = find_process(gone.pid)
    assert before is not None
    gone.kill()
    gone.wait()
    folder = root / "runs" / name
    folder.mkdir(parents=True)
    who = {"pid": gone.pid, "start": before.start, "host": os.uname().nodename, "uid": os.getuid(), **launcher}
    (folder / "run.json").write_text(json.dumps({"schema": 1, "name": name, "started": 1.0, "launcher": who}))
    return tag_of(name, folder)


def tag_of(name: str, folder: Path) -> dict[str, str]:
    """As an agent gives it to its ranks; the agent is this process."""
    return {
        "STOKER_RUN_ID": name,
        "STOKER_RUN_DIR": str(folder),
        "STOKER_RUN_ORIGIN": run_origin.find_own_origin(os.environ).text(),
    }


def alive(one: subprocess.Popen[bytes]) -> bool:
    return one.poll() is None


def look(stoker: Stoker, *args: str) -> tuple[int, dict[str, Any]]:
    """Only this test's runs: others share the machine."""
    done = stoker("clean", "--json", "--runs-dir", "runs", *args)
    assert done.err == "", done.err
    return done.code, json.loads(done.out)


def begin_run(stoker: Stoker) -> subprocess.Popen[bytes]:
    stoker.script("train.py", "import os, time\nprint('up', os.getpid(), flush=True)\ntime.sleep(600)\n")
    run = stoker.start("run", "--nproc-per-node", "2", "train.py")
    assert wait_for(lambda: True if len(ranks_of(stoker)) == 2 else None, 30)
    return run


def ranks_of(stoker: Stoker) -> list[int]:
    path = stoker.cwd / "runs" / "latest" / "events.jsonl"
    events = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [event["pid"] for event in events if event["event"] == "rank-up"]


def test_leftovers_are_shown_and_then_stopped(stoker: Stoker, start: Start) -> None:
    tag = dead_run(stoker.cwd)
    one = start(["sleep", "600"], tag)
    stopped = start(["sleep", "601"], tag)
    stopped.send_signal(signal.SIGSTOP)
    code, said = look(stoker)
    assert code == 1 and said["schema"] == 1 and said["dry_run"] is True and said["stopped"] is None
    assert {entry["pid"] for entry in said["leftovers"]} == {one.pid, stopped.pid} and alive(one) and alive(stopped)
    entry = next(entry for entry in said["leftovers"] if entry["pid"] == one.pid)
    assert (
        entry["command"] == "sleep 600"
        and entry["run"] == tag["STOKER_RUN_ID"]
        and entry["rss"] > 0
        and 0 <= entry["age"] < 60
    )
    assert "is dead" in entry["why"] and entry["start"] == find_process(one.pid).start  # type: ignore[union-attr]

    plain = stoker("clean", "--runs-dir", "runs")
    assert plain.code == 1 and "left behind by dead runs" in plain.out and "--yes" in plain.out and alive(one)

    code, said = look(stoker, "--yes")
    assert code == 0 and said["stopped"]["survivors"] == [] and said["stopped"]["killed"] == []
    assert one.wait(100) == -signal.SIGTERM and stopped.wait(100) == -signal.SIGTERM
    assert look(stoker)[0] == 0
    assert "nothing to clean" in stoker("clean", "--runs-dir", "runs").out


def test_ignored_sigterm_and_children_without_a_tag(stoker: Stoker, start: Start) -> None:
    tag = dead_run(stoker.cwd)
    stubborn = start([sys.executable, "-c", STUBBORN], tag, stdout=subprocess.PIPE)
    family = start(["sh", "-c", "env -i sleep 600 & echo $!; wait"], tag, stdout=subprocess.PIPE)
    assert stubborn.stdout is not None and family.stdout is not None and stubborn.stdout.readline()
    child = int(family.stdout.readline())
    assert wait_for(
        lambda: True if (procfs.read_command_line(child) or "").startswith("sleep") else None, 5
    )  # env has become sleep
    code, said = look(stoker, "--yes", "--grace", "0.5")
    why = {entry["pid"]: entry["why"] for entry in said["leftovers"]}
    assert why[child] == f"started by pid {family.pid}"
    assert code == 0 and said["stopped"]["killed"] == [stubborn.pid] and said["stopped"]["seconds"] >= 0.5
    assert stubborn.wait(100) == -signal.SIGKILL and family.wait(100) == -signal.SIGTERM
    assert find_process(child) is None or find_process(child).state == "Z"  # type: ignore[union-attr]


def test_run_directory_gone(stoker: Stoker, start: Start) -> None:
    gone = start(["sleep", "600"], tag_of("20260101-gone", stoker.cwd / "runs" / "20260101-gone"))
    code, said = look(stoker, "--yes")
    assert code == 0 and said["leftovers"][0]["why"] == "its run directory is gone"
    assert gone.wait(100) == -signal.SIGTERM


def test_what_a_real_run_leaves_when_all_its_keepers_die(stoker: Stoker) -> None:
    """kill -9 of launcher, guardian and agent in one instant: a helper in a session of its own is nobody's then."""
    helper = "import subprocess, time\nprint('helper', subprocess.Popen(['sleep', '600'], start_new_session=True).pid, flush=True)\ntime.sleep(600)\n"
    run = stoker.start("run", stoker.script("train.py", helper), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    log = stoker.cwd / "runs" / "latest" / "attempt-0" / "rank-0.log"
    assert wait_for(lambda: True if log.exists() and log.read_text().startswith("helper ") else None, 30)
    left = int(log.read_text().split()[1])
    keepers = [
        run.pid,
        *(
            one.pid
            for one in procfs.list_processes()
            if one.pid in procfs.descendants(run.pid, procfs.list_processes()) and one.name.startswith("stoker-")
        ),
    ]
    assert len(keepers) == 3
    assert look(stoker, "--yes")[0] == 0 and find_process(left) is not None  # nothing of a living run
    for signum in (signal.SIGSTOP, signal.SIGKILL):
        for pid in keepers:
            os.kill(pid, signum)
    run.wait(100)
    assert wait_for(lambda: True if all(find_process(pid) is None for pid in keepers[1:]) else None, 5)
    code, said = look(stoker, "--yes")
    assert code == 0 and left in {entry["pid"] for entry in said["leftovers"]} and not said["stopped"]["survivors"]
    assert wait_for(lambda: True if find_process(left) is None else None, 2)


@pytest.mark.parametrize(
    ("launcher", "why"),
    [
        ({"host": "elsewhere"}, "on host elsewhere"),
        ({"pid": 0}, "does not say"),
        ({"start": 0}, "does not say"),
        ({"pid": "?"}, "pid is not a number"),
    ],
)
def test_what_cannot_be_told_is_left_alone(stoker: Stoker, start: Start, launcher: dict[str, Any], why: str) -> None:
    unsure = start(["sleep", "600"], dead_run(stoker.cwd, **launcher))
    code, said = look(stoker, "--yes")
    assert code == 3 and said["leftovers"] == [] and why in said["left_alone"][0]["why"] and alive(unsure)
    unsure.kill()
    unsure.wait()


def test_whom_an_agent_looks_after_is_left_alone(stoker: Stoker, start: Start) -> None:
    """A run that was started from another host has its directory there: its agent here is the proof that it lives."""
    (stoker.cwd / "stoker-agent").symlink_to("/bin/sh")
    tag = tag_of("20260101-far", stoker.cwd / "runs" / "20260101-far")
    agent = start(
        [
            str(stoker.cwd / "stoker-agent"),
            "-c",
            'env "$@" sleep 600 & echo $!; wait',
            "x",
            *(f"{k}={v}" for k, v in tag.items()),
        ],
        stdout=subprocess.PIPE,
    )
    assert agent.stdout is not None
    rank = int(agent.stdout.readline())
    assert wait_for(lambda: True if procfs.read_run_tag(rank) else None, 5)
    code, said = look(stoker, "--yes")
    assert code == 3 and said["leftovers"] == [] and f"its agent (pid {agent.pid})" in said["left_alone"][0]["why"]
    refused = stoker("clean", "--pid", str(rank), "--yes")
    assert refused.code == 69 and "agent" in refused.err
    agent.kill()  # now it is an orphan
    agent.wait()
    code, said = look(stoker, "--yes")
    assert code == 0 and [entry["pid"] for entry in said["leftovers"]] == [rank]


def test_never_itself_nor_its_parents(stoker: Stoker, start: Start) -> None:
    """A shell that a rank had opened, its run dead since: `stoker clean --yes | cat` typed there ends none of the three."""
    tag = dead_run(stoker.cwd)
    other = start(["sleep", "600"], tag)
    line = f"{sys.executable} -m stoker clean --json --runs-dir runs --yes | cat; echo; echo still here"
    done = subprocess.run(
        ["setsid", "--wait", "sh", "-c", line],
        cwd=stoker.cwd,
        env={**stoker.env, **tag},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0 and done.stdout.endswith("still here\n"), done
    said = json.loads(done.stdout.removesuffix("still here\n"))
    assert [entry["pid"] for entry in said["leftovers"]] == [other.pid] and other.wait(100) == -signal.SIGTERM
    assert {"this command runs inside it"} <= {entry["why"] for entry in said["left_alone"]}


def foreigners(
    root: Path, dead: dict[str, str], living: dict[str, str], count: int
) -> Iterator[tuple[list[str], dict[str, str], dict[str, Any]]]:
    """Processes that look like ours and aren't: names, tags of the living, halves of tags, the whole tag with another user."""
    rng = random.Random(3)
    named = []
    for name in ("stoker-agent", "stoker-guard", "stoker", "python", "torchrun", "sleep"):
        (root / name).symlink_to("/bin/sleep")
        named.append(str(root / name))
    tags: list[dict[str, str]] = [
        {},
        living,
        {"STOKER_RUN_ID": dead["STOKER_RUN_ID"]},
        {"STOKER_RUN_DIR": dead["STOKER_RUN_DIR"]},
        {**dead, "STOKER_KEEP": "1"},
        {**dead, "STOKER_RUN_ID": living["STOKER_RUN_ID"]},
        {**dead, "STOKER_RUN_DIR": living["STOKER_RUN_DIR"]},
        {**dead, "STOKER_RUN_DIR": "runs/" + dead["STOKER_RUN_ID"]},
        {**dead, "STOKER_RUN_DIR": ""},
        {"STOKER_RUN_ID": "", "STOKER_RUN_DIR": ""},
        {"TORCHELASTIC_RUN_ID": dead["STOKER_RUN_ID"], "RANK": "0", "WORLD_SIZE": "2"},
        {"MY_" + key: value for key, value in dead.items()},
        {"NOTE": f"STOKER_RUN_ID={dead['STOKER_RUN_ID']}\nSTOKER_RUN_DIR={dead['STOKER_RUN_DIR']}"},
    ]
    for n in range(count):
        words = [
            rng.choice(
                ("sleep", "stoker-agent", "python train.py", "stoker run train.py", "python -m torch.distributed.run")
            ),
            "600",
        ]
        more: dict[str, Any] = {"executable": rng.choice(named)}
        if os.getuid() == 0 and n % 20 == 19:
            yield words, dead, {"user": 65534, "group": 65534, "extra_groups": [], "executable": "/bin/sleep"}
        else:
            yield words, rng.choice(tags), more


def test_200_strangers_and_a_living_run_survive(stoker: Stoker, start: Start) -> None:
    run = begin_run(stoker)
    try:
        ranks = ranks_of(stoker)
        tag = procfs.read_run_tag(ranks[0])
        assert tag is not None
        living = {"STOKER_RUN_ID": tag[0], "STOKER_RUN_DIR": tag[1]}
        dead = dead_run(stoker.cwd)
        strangers = [start(words, env, **more) for words, env, more in foreigners(stoker.cwd, dead, living, 200)]
        inner = start(["sleep", "600"], dead)  # the one that is ours
        code, said = look(stoker, "--yes", "--grace", "1")
        assert (
            code == 0
            and [entry["pid"] for entry in said["leftovers"]] == [inner.pid]
            and inner.wait(100) == -signal.SIGTERM
        )
        assert all(alive(one) for one in strangers) and len(strangers) == 200
        assert run.poll() is None and all(procfs.read_run_tag(pid) == tag for pid in ranks)
        refused = stoker("clean", "--yes", "--pid", str(ranks[1]))
        assert refused.code == 69 and f"`stoker stop {tag[0]}`" in refused.err and refused.err.count("\n") == 1
        assert stoker("clean", "--yes", "--pid", str(run.pid)).code == 69
        for one in strangers:
            one.kill()
            one.wait()
    finally:
        run.terminate()
        run.communicate(timeout=100)


def test_a_reused_pid_is_not_hit(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    one = start(["sleep", "600"])
    me = find_process(one.pid)
    assert me is not None
    another = replace(me, start=me.start - 1)  # what was listed; its pid is somebody else's by now
    assert not send_signal(another, signal.SIGKILL)
    assert cleanup.stop_processes([another], 0.1).survivors == () and alive(one)
    with monkeypatch.context() as patch:
        patch.setattr("stoker.contract.process.process_owner", lambda pid: 12345)
        assert not send_signal(me, signal.SIGKILL)
    assert alive(one)
    assert send_signal(me, signal.SIGKILL) and one.wait(100) == -signal.SIGKILL
    assert not send_signal(me, signal.SIGKILL)


def test_the_ladder_asks_parents_first(start: Start, tmp_path: Path) -> None:
    """A worker that went before its rank would spoil the save."""
    script = (
        "import os, signal, sys, time\n"
        "r, w = os.pipe()\n"
        "child = os.fork()\n"
        "if child == 0:\n    os.write(w, b'x'); time.sleep(600)\n"
        "os.read(r, 1)\n"
        "def save(*_):\n    time.sleep(0.3); open(sys.argv[1], 'w').write(str(os.waitpid(child, os.WNOHANG)[0])); os._exit(0)\n"
        "signal.signal(signal.SIGTERM, save); print(child, flush=True); time.sleep(600)"
    )
    rank = start([sys.executable, "-c", script, str(tmp_path / "saved")], stdout=subprocess.PIPE)
    assert rank.stdout is not None
    child = int(rank.stdout.readline())
    both = [one for one in (find_process(child), find_process(rank.pid)) if one]
    assert cleanup.stop_processes(both, 5.0).killed == ()
    assert (tmp_path / "saved").read_text() == "0" and not leftovers.is_running(both[0])


def test_named_pids(stoker: Stoker, start: Start) -> None:
    one, two = start(["sleep", "600"]), start(["sleep", "600"])
    refused = stoker("clean", "--pid", str(one.pid))
    assert refused.code == 64 and "--yes" in refused.err and "sleep 600" in refused.out and alive(one)
    done = stoker("clean", "--json", "--pid", str(one.pid))
    assert done.code == 1 and json.loads(done.out)["named"][0]["pid"] == one.pid and alive(one)
    done = stoker("clean", "--yes", "--pid", str(one.pid), "--pid", str(two.pid))
    assert done.code == 0 and one.wait(100) == two.wait(100) == -signal.SIGTERM
    for pid, code, word in (
        (one.pid, 66, "no such process"),
        (1, 64, "init"),
        (os.getpid(), 64, "parents"),
        (-5, 66, "no such process"),
    ):
        three = start(["sleep", "600"])
        refused = stoker("clean", "--yes", "--pid", str(three.pid), f"--pid={pid}")
        assert refused.code == code and word in refused.err and refused.err.count("\n") == 1 and refused.out == ""
        assert alive(three)  # all or none
    if os.getuid() == 0:
        theirs = start(["sleep", "600"], user=65534, group=65534, extra_groups=[])
        refused = stoker("clean", "--yes", "--pid", str(theirs.pid))
        assert refused.code == 77 and "belongs to" in refused.err and alive(theirs)


@pytest.mark.parametrize(("typed", "code"), [(b"y\n", 0), (b"n\n", 1), (b"\n", 1)])
def test_named_pids_are_confirmed_at_a_terminal(stoker: Stoker, start: Start, typed: bytes, code: int) -> None:
    one = start(["sleep", "600"])
    mine, theirs = pty.openpty()
    asking = stoker.start(
        "clean", "--pid", str(one.pid), stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    )
    os.close(theirs)
    said = b""
    while b"[y/N]" not in said:
        said += os.read(mine, 4096)
    assert alive(one)
    os.write(mine, typed)
    assert asking.wait(100) == code
    os.close(mine)
    assert alive(one) == (code != 0)


def old(path: Path, seconds: float = 3600) -> Path:
    """As if it had been made an hour ago, as far as one may say so: the kernel keeps ctime."""
    then = time.time() - seconds
    os.utime(path, (then, then), follow_symlinks=False)
    return path


@pytest.fixture
def an_hour_later(monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 3600)


@pytest.mark.usefixtures("an_hour_later")
def test_shared_memory_of_the_dead(tmp_path: Path, start: Start) -> None:
    shm, tmp = Path("/dev/shm"), tmp_path
    mark = f"cleantest{os.getpid()}"
    gone = start(["true"])
    gone.wait()
    dead = [shm / f"torch_{gone.pid}_{os.getpid()}_0", shm / f"nccl-{mark}"]
    kept = [
        shm / f"torch_{os.getpid()}_1_0",
        shm / f"nccl-{mark}_open",
        shm / f"nccl-{mark}_mapped",
        shm / f"{mark}",
        shm / f"nccl-{mark}_link",
    ]
    kept.append(shm / f"psm_{mark}")  # Python's: nothing says whose it is
    try:
        for path in (*dead, *kept[:4], kept[5]):
            path.write_bytes(b"x" * 8192)
        kept[4].symlink_to(dead[0])
        holding = kept[1].open("rb")
        with kept[2].open("r+b") as file:
            mapping = mmap.mmap(file.fileno(), 0)
        found = [
            one
            for one in stale_files.find_debris(str(tmp), str(shm))
            if one.path in {str(path) for path in (*dead, *kept)}
        ]
        assert {one.path for one in found} == {str(path) for path in dead} and all(
            one.size >= 8192 and one.age > 3000 for one in found
        )
        reopened = dead[1].open("rb")  # between showing and removing
        stays = cleanup.remove_debris(found)
        assert [one.path for one, _ in stays] == [str(dead[1])]
        assert [path.exists() for path in dead] == [False, True] and all(os.path.lexists(path) for path in kept)
        for handle in (holding, mapping, reopened):
            handle.close()
    finally:
        for path in (*dead, *kept):
            path.unlink(missing_ok=True)


def test_a_lease_sees_what_proc_does_not(tmp_path: Path) -> None:
    """A container that shares /dev/shm with another sees none of its processes: the kernel's lease does."""
    path = Path(f"/dev/shm/nccl-lease{os.getpid()}")
    path.write_bytes(b"x")
    try:
        with path.open("rb"):
            assert not cleanup.unlink_unused(str(path), os.lstat(path)) and path.exists()
        assert cleanup.unlink_unused(str(path), os.lstat(path)) and not path.exists()
    finally:
        path.unlink(missing_ok=True)


@pytest.mark.usefixtures("an_hour_later")
def test_folders_of_dead_agents(tmp_path_factory: pytest.TempPathFactory, start: Start) -> None:
    import tempfile

    with tempfile.TemporaryDirectory(prefix="cl", dir="/tmp") as short:  # a socket's path has 107 bytes
        tmp = Path(short)
        folders = {
            name: tmp / f"stoker-{name}"
            for name in ("deadbeef", "emptyold", "alive_00", "notes_00", "standing", "writing_", "gpu-locks")
        }
        for folder in folders.values():
            folder.mkdir(mode=0o700)
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        listening.bind(str(folders["alive_00"] / "s"))
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as dead:
            dead.bind(str(folders["deadbeef"] / "s"))
        (folders["deadbeef"] / "0-1.stack").touch()
        (folders["notes_00"] / "thesis.txt").write_text("the user's own")
        (folders["writing_"] / "0-0.stack").touch()
        start(["sleep", "600"], cwd=folders["standing"])
        (tmp / "stoker-linked_0").symlink_to(folders["deadbeef"])
        with (folders["writing_"] / "0-0.stack").open("w"):
            found = stale_files.find_debris(str(tmp), str(tmp / "no-shm"))
        assert {Path(one.path).name for one in found} == {"stoker-deadbeef", "stoker-emptyold"}
        assert cleanup.remove_debris(found) == []
        assert {path.name for path in tmp.iterdir()} == {
            "stoker-" + n for n in ("alive_00", "notes_00", "standing", "writing_", "gpu-locks", "linked_0")
        }
        listening.close()


def test_many_files_of_a_kind_are_summed_up(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    many = [stale_files.Debris("agent's folder", f"/tmp/stoker-{n}", 2_000_000, 3600.0) for n in range(13)]
    monkeypatch.setattr(
        stale_files,
        "find_debris",
        lambda: [*many[:12], stale_files.Debris("shared memory", "/dev/shm/x", 0, 3600.0), many[12]],
    )
    command.main([])
    said = capsys.readouterr().out
    assert (
        said.count("  agent's folder, 1.9 MiB") == 10
        and "and 3 more (agent's folder), 5.7 MiB; --json lists them all\n" in said
        and "/dev/shm/x  shared" in said
    )
    command.main(["--json"])
    assert len(json.loads(capsys.readouterr().out)["files"]) == 14


def test_young_files_stay(tmp_path: Path) -> None:
    path = Path(f"/dev/shm/nccl-young{os.getpid()}")
    path.write_bytes(b"x")
    (tmp_path / "stoker-young_00").mkdir()
    old(path)  # a file may claim any age; its inode's change time does not lie
    try:
        assert not {str(path), str(tmp_path / "stoker-young_00")} & {
            one.path for one in stale_files.find_debris(str(tmp_path))
        }
    finally:
        path.unlink()


def test_locks_are_listed_and_never_unlinked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "locks"
    monkeypatch.setenv("STOKER_GPU_LOCKS", str(folder))
    assert stale_files.find_locks() == ([], [])
    folder.mkdir()
    folder.chmod(0o1777)
    for name in ("GPU-free", "GPU-held", "GPU-torn"):
        (folder / name).write_text(json.dumps({"run": "r1", "pid": 7}) if name != "GPU-torn" else '{"run"')
    with (folder / "GPU-held").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        found, strange = stale_files.find_locks()
    assert [(one.gpu, one.held) for one in found] == [
        ("GPU-free", False),
        ("GPU-held", True),
        ("GPU-torn", False),
    ] and strange == []
    assert found[0].who == "run r1 (agent pid 7)" and found[2].who == "unknown"
    assert (
        found[1].who.startswith(f"pid {os.getpid()} (") and "not a Stoker run" in found[1].who
    )  # the kernel's word, not the file's
    assert len(list(folder.iterdir())) == 3


def test_who_else_is_on_the_gpus(stoker: Stoker, box: Callable[..., dict[str, str]]) -> None:
    holders = [
        {"pid": 31, "memory": 5 * 10**9, "command": None, "user": None, "run": None},
        {"pid": 32, "memory": None, "command": "python serve.py", "user": "alice", "run": None},
        {"pid": 1, "memory": 10**9, "command": "python mine.py", "user": procfs.user_name(os.getuid()), "run": None},
        {"pid": 34, "memory": 10**7, "command": "/usr/lib/xorg/Xorg :0", "user": "root", "run": None},
    ]
    done = stoker(
        "clean", "--json", "--runs-dir", "runs", "--yes", env=box([gpu_json(0, holders=holders), gpu_json(1)])
    )
    advice = {
        entry["pid"]: (entry["gpu"], entry["memory"], entry["advice"]) for entry in json.loads(done.out)["others"]
    }
    assert done.code == 0 and set(advice) == {31, 32, 1, 34} and all(gpu == "GPU0" for gpu, _, _ in advice.values())
    assert "outside this container" in advice[31][2] and advice[31][1] == 5 * 10**9
    assert "ask alice" in advice[32][2] and advice[32][1] is None
    assert "`stoker clean --pid 1`" in advice[1][2] and "a service of this machine" in advice[34][2]
    assert "ask alice" in stoker("clean", "--runs-dir", "runs", env=box([gpu_json(0, holders=holders)])).out


def test_a_driver_that_never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examine_child, "BOOT", "import time; time.sleep(60)")
    began = time.monotonic()
    assert leftovers.observe_gpus(None, 0.3) == "NVML did not respond within 0 s" and time.monotonic() - began < 50
    monkeypatch.setattr(examine_child, "BOOT", "1 // 0")
    assert "ZeroDivisionError" in str(leftovers.observe_gpus(None))


def test_waiting_for_the_memory() -> None:
    def machine(used: int, *pids: int) -> Machine:
        holders = [{"pid": pid, "memory": 50 * 10**9, "command": "x"} for pid in pids]
        return machine_from_json(
            {
                "schema": 1,
                "hostname": "",
                "cores": 1,
                "memory_total": 1,
                "memory_available": 1,
                "gpus": [gpu_json(0, memory_used=used, holders=holders), gpu_json(1)],
            }
        )

    looks = iter([machine(100 * 10**9, 5, 6), machine(50 * 10**9, 5), "NVML stopped", machine(10**9)])
    back = cleanup.wait_for_memory(machine(100 * 10**9, 5, 6), {5, 6}, lambda: next(looks))
    assert [(one.gpu, one.freed, one.whole) for one in back] == [("GPU0", 99 * 10**9, True)]
    late = cleanup.wait_for_memory(machine(100 * 10**9, 5), {5}, lambda: machine(100 * 10**9, 5), 0.1)
    assert [(one.freed, one.whole) for one in late] == [(0, False)]
    assert cleanup.wait_for_memory(machine(10**9), {5}, lambda: "no") == []


def entry(name: str, size: int, idle: float, kept: str = "") -> stale_caches.Cache:
    return stale_caches.Cache("data", "/c", f"/c/{name}", size, idle, kept)


@pytest.mark.parametrize(
    ("older_than", "max_size", "gone"),
    [
        (None, None, ""),
        (50.0, None, "cd"),
        (0.0, None, "abcd"),
        (None, 30, "dcb"),
        (None, 35, "dc"),
        (None, 1000, ""),
        (50.0, 30, "cdb"),
        (None, 0, "dcba"),
    ],
)
def test_what_is_pruned(older_than: float | None, max_size: int | None, gone: str) -> None:
    some = [
        entry("a", 10, 1),
        entry("b", 20, 10),
        entry("c", 30, 100),
        entry("d", 40, 1000),
        entry("e", 5, 5000, "in use"),
    ]
    assert [one.path[-1] for one in stale_caches.choose_to_prune(some, older_than, max_size)] == list(gone)


def test_caches(stoker: Stoker, start: Start) -> None:
    home, data = stoker.cwd / "home", stoker.cwd / "cache" / "datasets"
    triton = home / ".triton" / "cache"
    treasure = stoker.cwd / "treasure"
    link, new, aged, used = (data / (digit * 32) for digit in "0123")  # what prepared data is called
    tag(str(data.parent))
    for folder in (
        aged,
        new,
        used,
        triton / "ABC",
        home / ".cache" / "stoker" / "other",
        treasure,
    ):
        folder.mkdir(parents=True)
        (folder / "shard").write_bytes(b"x" * 100_000)
    link.symlink_to(treasure)
    (aged / "link").symlink_to(treasure)
    for path in (aged, used, link, triton / "ABC"):
        for one in (*path.glob("*"), path):
            old(one, 40 * 86400)
    env = {"HOME": str(home)}
    start(["sleep", "600"], cwd=used)
    ours = [str(path) for path in (link, new, aged, used, triton / "ABC")]

    def caches(*args: str) -> tuple[int, dict[str, Any]]:
        done = stoker("clean", "--cache", "--json", *args, env=env)
        said = json.loads(done.out)
        return done.code, said

    code, said = caches()
    found = {one["path"]: one for one in said["caches"] if one["path"].startswith(str(stoker.cwd))}
    assert (
        code == 0
        and sorted(found) == sorted(ours)
        and found[ours[2]]["size"] >= 100_000
        and found[ours[2]]["idle"] > 39 * 86400
    )
    assert (
        found[ours[0]]["kept"].startswith("a symbolic link")
        and found[ours[3]]["kept"] == "in use"
        and found[ours[1]]["idle"] < 600
    )
    assert stoker("clean", "--cache", env=env).out.count("\n") >= 6

    code, said = caches("--older-than", "30d")
    assert code == 1 and [path for path in said["to_prune"] if path in ours] == [ours[2], ours[4]] and aged.exists()
    if set(said["to_prune"]) <= set(
        ours
    ):  # /tmp/torchinductor_* is everybody's here: never prune what this test did not make
        code, said = caches("--older-than", "30d", "--yes")
        assert code == 0 and said["kept"] == []
        assert sorted(data.iterdir()) == [link, new, used] and not (triton / "ABC").exists()
    assert (treasure / "shard").exists() and link.is_symlink()


def test_pruning_follows_no_link(tmp_path: Path) -> None:
    treasure, root = tmp_path / "treasure", tmp_path / "root"
    for folder in (treasure, root / "a"):
        folder.mkdir(parents=True)
    (treasure / "gold").touch()
    (root / "a" / "out").symlink_to(treasure)
    (tmp_path / "planted").symlink_to(treasure)
    assert stale_caches.find_caches([("compile", str(tmp_path / "planted"), ".*")]) == []
    found = stale_caches.find_caches([("compile", str(root), ".*")])
    (root / "b").mkdir()
    assert (
        cleanup.remove_caches(found) == []
        and [path.name for path in root.iterdir()] == ["b"]
        and (treasure / "gold").exists()
    )
    (root / "b").rmdir()
    (root / "b").symlink_to(treasure)  # swapped after it was listed
    assert (
        cleanup.remove_caches([stale_caches.Cache("compile", str(root), str(root / "b"), 1, 1.0)]) == []
        and (treasure / "gold").exists()
    )


@pytest.mark.parametrize(
    ("args", "word"),
    [(["--older-than", "3d"], "--cache"), (["--cache", "--yes"], "--older-than"), (["--cache", "--pid", "5"], "--pid"), (["--pid", "x"], "--pid"),
     (["--cache", "--max-size", "big"], "--max-size"), (["--pid", "5", "--runs-dir", "runs"], "--runs-dir"), (["--grace", "soon"], "--grace"), (["run1"], "run1")],
)  # fmt: skip
def test_refusals(stoker: Stoker, args: list[str], word: str) -> None:
    done = stoker("clean", *args)
    assert done.code == 64 and word in done.err and done.err.count("\n") == 1 and done.out == ""


HOLD = """
import ctypes, sys, time
cuda = ctypes.CDLL("libcuda.so.1")
def check(code): assert code == 0, code
check(cuda.cuInit(0)); context = ctypes.c_void_p(); check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)); check(cuda.cuCtxSetCurrent(context))
memory = ctypes.c_uint64(); check(cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(int(float(sys.argv[1]) * 1e9))))
print("holding", flush=True)
time.sleep(600)
"""


def test_memory_of_a_real_gpu_comes_back(stoker: Stoker, start: Start) -> None:
    try:
        gpu = Nvml().read_gpus()[0]
    except (NoDriver, DriverError, IndexError) as problem:
        pytest.skip(f"no GPU here: {str(problem) or 'no NVIDIA driver'}")
    stoker.env.pop("STOKER_MACHINE")
    much = 100 if (gpu.memory_free or 0) > 110e9 else 1
    script = stoker.script("hold.py", HOLD)
    ours = start([sys.executable, script, str(much)], dead_run(stoker.cwd), cwd=stoker.cwd, stdout=subprocess.PIPE)
    stranger = start([sys.executable, script, "0.5"], cwd=stoker.cwd, stdout=subprocess.PIPE)
    for one in (ours, stranger):
        assert one.stdout is not None and one.stdout.readline() == b"holding\n"
    began = time.monotonic()
    code, said = look(stoker, "--yes")
    assert code == 0 and ours.wait(100) == -signal.SIGTERM and time.monotonic() - began < 5
    listed = {entry["pid"]: entry for entry in said["others"]}
    assert alive(stranger) and stranger.pid in listed and f"--pid {stranger.pid}" in listed[stranger.pid]["advice"]
    assert [entry["pid"] for entry in said["leftovers"]] == [ours.pid]
    if said["leftovers"][0]["gpu_memory"] is not None:  # None where NVML gives the host's pids
        assert said["leftovers"][0]["gpu_memory"] > much * 0.9e9
        assert (
            said["memory_back"][0]["whole"]
            and said["memory_back"][0]["freed"] > much * 0.9e9
            and said["memory_back"][0]["seconds"] < 2
        )
