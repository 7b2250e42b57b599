"""Only what Stoker started is signalled: real processes that look like a run's, and aren't, live on."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import stoker as package
from conftest import Stoker, wait_for
from stoker.contract import env_vars
from stoker.contract.process import find_process
from stoker.control.agent.sweep import take_over
from stoker.control.machine import procfs, run_origin
from stoker.control.scheduler import slurm_submit as submit

Start = Callable[..., subprocess.Popen[bytes]]
ROOT_ONLY = pytest.mark.skipif(os.getuid() != 0, reason="another user's processes and files need root to make")
NAP = "import time; print('up', flush=True); time.sleep(600)"


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a process in a session of its own; whatever of them is left at the end is ended."""
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


def record(folder: Path, victim: int, name: str = "forged") -> Path:
    """A record that names this process as its launcher."""
    about = find_process(victim)
    assert about is not None
    folder.mkdir(parents=True)
    who = {"pid": victim, "start": about.start, "host": os.uname().nodename, "uid": os.getuid()}
    (folder / "run.json").write_text(
        json.dumps({"schema": 1, "name": name, "started": 1.0, "launcher": who, "plan": {"world_size": 1}})
    )
    (folder / "events.jsonl").write_text("")
    return folder


# ---- whom a record names ----


@pytest.mark.parametrize(
    "words", [("stop", "forged"), ("stop",), ("stop", "--now", "runs/2026-forged"), ("stop", "2026-forged")]
)
def test_a_forged_record_has_no_process_signalled(stoker: Stoker, start: Start, words: tuple[str, ...]) -> None:
    victim = start(["sleep", "600"])
    record(stoker.cwd / "runs" / "2026-forged", victim.pid)
    done = stoker(*words)
    assert done.code == 0 and "lost" in done.out and done.err == ""
    assert victim.poll() is None


def test_a_forged_record_is_not_running_for_any_command(stoker: Stoker, start: Start) -> None:
    victim = start(["sleep", "600"])
    record(stoker.cwd / "runs" / "2026-forged", victim.pid)
    assert json.loads(stoker("runs", "--json").out)["runs"][0]["status"] == "lost"
    assert "launch.killed" in stoker("why").out
    assert stoker("attach").code == 70
    done = stoker("run", "--name", "forged", stoker.script("ok.py", "print('ok')"))
    assert done.code == 0 and "is running" not in done.err
    assert victim.poll() is None


def test_who_only_reads_a_record_is_not_its_launcher(stoker: Stoker, start: Start) -> None:
    folder = stoker.cwd / "runs" / "2026-forged"
    folder.mkdir(parents=True)
    (folder / "events.jsonl").touch()
    reading = start(["tail", "-f", str(folder / "events.jsonl")])
    other = start(
        [sys.executable, "-c", f"import time; f = open({str(stoker.cwd / 'events.jsonl')!r}, 'w'); time.sleep(600)"]
    )
    for victim in (reading, other):
        assert wait_for(
            lambda pid=victim.pid: True if any("events.jsonl" in path for path in _open_files(pid)) else None, 10
        )
        (folder / "run.json").unlink(missing_ok=True)
        about = find_process(victim.pid)
        assert about is not None
        who = {"pid": victim.pid, "start": about.start, "host": os.uname().nodename}
        (folder / "run.json").write_text(json.dumps({"name": "forged", "started": 1.0, "launcher": who}))
        assert "lost" in stoker("stop", "forged").out and victim.poll() is None


def _open_files(pid: int) -> list[str]:
    try:
        return [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
    except OSError:
        return []


@ROOT_ONLY
def test_another_users_record_of_our_own_launcher_stops_nothing(stoker: Stoker) -> None:
    """The launcher is real and ours; the record that names it is not. Not even that is believed."""
    done = stoker("run", "--detach", "--name", "mine", stoker.script("nap.py", NAP))
    real = json.loads((done.run_dir / "run.json").read_text())["launcher"]
    forged = record(stoker.cwd / "runs" / "2026-theirs", real["pid"], "theirs")
    (forged / "events.jsonl").unlink()
    os.link(done.run_dir / "events.jsonl", forged / "events.jsonl")  # the very file that the launcher writes to
    os.chown(forged, 12346, 12346)
    try:
        for words in (("stop", str(forged)), ("stop", "theirs"), ("stop", "2026-theirs"), ("stop", "runs/2026-theirs")):
            refused = stoker(*words)
            assert refused.code in (65, 66, 77) and "Traceback" not in refused.err, (
                words,
                refused.code,
                refused.out,
                refused.err,
            )
        assert json.loads(stoker("why", "mine", "--json").out)["status"] == "running"
    finally:
        assert stoker("stop", "mine").code == 0
    assert done.verdict["exit_code"] == 143


def test_a_run_is_stopped_though_its_folder_was_moved_and_its_events_removed(stoker: Stoker) -> None:
    done = stoker("run", "--detach", "--name", "moved", stoker.script("nap.py", NAP))
    here = done.run_dir
    assert wait_for(
        lambda: (
            True
            if "config_hash" in (here / "run.json").read_text() and (here / "attempt-0" / "rank-0.log").exists()
            else None
        ),
        20,
    )
    there = here.with_name("2026-moved-by-hand")
    here.rename(there)
    try:
        assert json.loads(stoker("runs", "--json").out)["runs"][0]["status"] == "running"
        (there / "events.jsonl").unlink()
        assert json.loads(stoker("runs", "--json").out)["runs"][0]["status"] == "running"
    finally:
        there.rename(here)
        assert stoker("stop", "moved").code == 0


def test_a_copy_of_a_living_runs_record_is_not_that_run(stoker: Stoker) -> None:
    done = stoker("run", "--detach", "--name", "real", stoker.script("nap.py", NAP))
    copy = done.run_dir.with_name("2026-copy")
    subprocess.run(["cp", "-a", str(done.run_dir), str(copy)], check=True)
    try:
        assert "lost" in stoker("stop", "2026-copy").out
        assert json.loads(stoker("why", done.run_dir.name, "--json").out)["status"] == "running"
    finally:
        assert stoker("stop", done.run_dir.name).code == 0


# ---- who has a run's environment ----


SCHEDULER = """
import json, socket, subprocess, sys
listening = socket.socket(socket.AF_UNIX)
listening.bind(sys.argv[1])
listening.listen()
print("ready", flush=True)
while True:
    client = listening.accept()[0]
    with client, client.makefile("rwb") as stream:
        env = json.loads(stream.readline())
        job = subprocess.Popen(["sleep", "600"], env=env, start_new_session=True, stdin=subprocess.DEVNULL)
        print(job.pid, flush=True)
        stream.write(b"submitted\\n")
        stream.flush()
"""


class Scheduler:
    """What sbatch, at and cron are: a daemon that starts a job with the environment that it was handed. One job here."""

    def __init__(self, path: Path, start: Start) -> None:
        self.path = path
        self._daemon = start([sys.executable, "-c", SCHEDULER, str(path)], stdout=subprocess.PIPE)
        assert self._daemon.stdout is not None and self._daemon.stdout.readline() == b"ready\n"
        self._job = 0

    @property
    def job(self) -> int:
        assert self._daemon.stdout is not None
        self._job = self._job or int(self._daemon.stdout.readline())
        return self._job

    @property
    def job_lives(self) -> bool:
        about = find_process(self.job)
        return about is not None and about.state != "Z"

    def end_job(self) -> None:
        os.kill(self.job, signal.SIGKILL)  # a zombie until the daemon ends: its number is nobody else's


SUBMIT = """
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as to:
    to.connect(os.environ["AT"])
    stream = to.makefile("rwb")
    stream.write(json.dumps(dict(os.environ)).encode() + b"\\n")
    stream.flush()
    assert stream.readline() == b"submitted\\n"
print("submitted", flush=True)
"""


@pytest.fixture
def scheduler(stoker: Stoker, start: Start) -> Iterator[Scheduler]:
    made = Scheduler(stoker.cwd / "at", start)
    yield made
    made.end_job()


@pytest.mark.parametrize("ending", ["0", "3", "stopped", "agent killed", "all killed"])
def test_a_job_that_a_rank_submits_outlives_the_run(stoker: Stoker, scheduler: Scheduler, ending: str) -> None:
    """All of the run's own goes at its end, however it ends; what a scheduler started with the run's environment does not."""
    helper = "import subprocess\nprint('helper', subprocess.Popen(['setsid', 'sleep', '601']).pid, flush=True)\n"
    rest = f"sys.exit({ending})" if ending.isdigit() else "import time; time.sleep(600)"
    run = stoker.start(
        "run",
        "--grace",
        "0",
        stoker.script("t.py", SUBMIT + helper + rest),
        env={"AT": str(scheduler.path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    log = stoker.cwd / "runs" / "latest" / "attempt-0" / "rank-0.log"
    assert wait_for(lambda: True if log.exists() and b"helper" in log.read_bytes() else None, 30)
    table = procfs.list_processes()
    keepers = [
        one.pid for one in table if one.pid in procfs.descendants(run.pid, table) and one.name.startswith("stoker-")
    ]
    if ending == "stopped":
        run.terminate()
    elif ending == "agent killed":
        os.kill(next(pid for pid in keepers if find_process(pid).name == "stoker-agent"), signal.SIGKILL)  # type: ignore[union-attr]
    elif ending == "all killed":
        for signum in (signal.SIGSTOP, signal.SIGKILL):
            for pid in (run.pid, *keepers):
                os.kill(pid, signum)
    run.wait(100)
    helper_pid = int(re.search(rb"helper (\d+)", log.read_bytes())[1])  # type: ignore[index]
    if ending == "all killed":
        told = stoker("clean", "--yes", "--json", "--runs-dir", "runs")
        said = json.loads(told.out)
        assert [entry["pid"] for entry in said["leftovers"]] == [helper_pid], said
        assert [entry["pid"] for entry in said["left_alone"]] == [
            scheduler.job
        ] and "another process started it" in said["left_alone"][0]["why"]
    assert wait_for(
        lambda: True if find_process(helper_pid) is None or find_process(helper_pid).state == "Z" else None, 10
    )  # type: ignore[union-attr]
    assert scheduler.job_lives
    assert procfs.read_run_tag(scheduler.job) is not None, (
        "the job has the run's environment: the test would prove nothing without"
    )


def test_daemons_and_tmux_servers_of_a_rank_end_with_the_run(stoker: Stoker) -> None:
    """Without a tag, in a session of their own, twice forked: they are below the agent all the same."""
    script = """
        import os, subprocess, sys, time
        bare = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")}
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.execve("/bin/sh", ["sh", "-c", "echo daemon $$; exec sleep 602"], bare)
            os._exit(0)
        os.wait()
        if os.path.exists("/usr/bin/tmux"):
            subprocess.run(["tmux", "-S", os.path.abspath("sock"), "-f", "/dev/null", "new-session", "-d", "sleep 603"], env=bare, check=True)
            asked = ["tmux", "-S", os.path.abspath("sock"), "display-message", "-p", "daemon #{pid}"]
            print(subprocess.run(asked, env=bare, capture_output=True, text=True, check=True).stdout, flush=True)
        time.sleep(0.5)
    """
    import textwrap

    done = stoker("run", "--grace", "0", stoker.script("d.py", textwrap.dedent(script)))
    pids = [int(pid) for pid in re.findall(rb"daemon (\d+)", done.log(0))]
    assert done.code == 0 and len(pids) == 2 if os.path.exists("/usr/bin/tmux") else len(pids) == 1, done.log(0)
    assert all(find_process(pid) is None or find_process(pid).state == "Z" for pid in pids)  # type: ignore[union-attr]


@pytest.mark.parametrize("ending", ["0", "3"])
def test_what_is_marked_to_be_kept_is_kept(stoker: Stoker, ending: str) -> None:
    script = (
        "import os, subprocess, sys\n"
        "env = {**os.environ, 'STOKER_KEEP': '1'}\n"
        "quiet = {'stdin': subprocess.DEVNULL, 'stdout': subprocess.DEVNULL, 'stderr': subprocess.DEVNULL, 'start_new_session': True}\n"
        "print('kept', subprocess.Popen(['sh', '-c', 'env -i sleep 604 & wait'], env=env, **quiet).pid, flush=True)\n"
        "print('swept', subprocess.Popen(['sleep', '605'], **quiet).pid, os.environ.get('STOKER_KEEP'), flush=True)\n"
        f"import time; time.sleep(0.5); sys.exit({ending})\n"
    )
    # Set outside the run it keeps nothing: not every rank of every run is meant.
    done = stoker(
        "run", "--grace", "0", "--env", "STOKER_KEEP=1", stoker.script("k.py", script), env={"STOKER_KEEP": "1"}
    )
    text = done.log(0).decode()
    kept, swept = (int(re.search(rf"{word} (\d+)", text)[1]) for word in ("kept", "swept"))  # type: ignore[index]
    below = procfs.descendants(kept, procfs.list_processes())
    try:
        assert done.code == int(ending) and text.rstrip().endswith("None")
        assert find_process(kept) is not None and len(below) == 1 and find_process(swept) is None
        told = json.loads(stoker("clean", "--yes", "--json", "--runs-dir", "runs").out)
        assert told["leftovers"] == told["left_alone"] == [] and find_process(kept) is not None
    finally:
        for pid in (kept, *below):
            os.kill(pid, signal.SIGKILL)
        wait_for(lambda: True if all(find_process(pid) is None for pid in (kept, *below)) else None, 5)


def tag(run_dir: Path, where: run_origin.RunOrigin) -> dict[str, str]:
    return {env_vars.RUN_ID: run_dir.name, env_vars.RUN_DIR: str(run_dir), env_vars.RUN_ORIGIN: where.text()}


@pytest.fixture
def here() -> run_origin.RunOrigin:
    """As if this process were the agent."""
    return run_origin.find_own_origin({})


def strangers(run_dir: Path, here: run_origin.RunOrigin, start: Start) -> dict[str, subprocess.Popen[bytes]]:
    """Each with the whole tag of the run, and started by somebody else."""
    from stoker.contract.frozen import replace

    broker = start(
        [
            sys.executable,
            "-c",
            "import subprocess, sys, time; p = subprocess.Popen(['sleep', '600']); print(p.pid, flush=True); time.sleep(600)",
        ]
    )
    elsewhere = replace(here, agent=broker.pid, ancestors=(1,))
    return {
        "it belongs to Slurm job 77": start(["sleep", "600"], {**tag(run_dir, here), "SLURM_JOB_ID": "77"}),
        "outside its run's Slurm job 5": start(["sleep", "600"], tag(run_dir, replace(here, job="5"))),
        "another service started it": start(
            ["sleep", "600"], tag(run_dir, replace(here, cgroup=":/system.slice/atd.service"))
        ),
        "it is older than its run": start(["sleep", "600"], tag(run_dir, replace(here, start=1 << 60))),
        "another process started it": start(["sleep", "600"], tag(run_dir, elsewhere)),
        "does not say where": start(["sleep", "600"], {env_vars.RUN_ID: run_dir.name, env_vars.RUN_DIR: str(run_dir)}),
        "does not say  where": start(["sleep", "600"], {**tag(run_dir, here), env_vars.RUN_ORIGIN: "a:b:c"}),
    }


def test_clean_leaves_alone_what_another_started(stoker: Stoker, start: Start, here: run_origin.RunOrigin) -> None:
    gone = stoker.cwd / "runs" / "2026-gone"
    ours = start(["sleep", "600"], tag(gone, here))
    others = strangers(gone, here, start)
    told = stoker("clean", "--yes", "--json", "--runs-dir", "runs")
    said = json.loads(told.out)
    assert [entry["pid"] for entry in said["leftovers"]] == [ours.pid] and ours.wait(100) == -signal.SIGTERM
    why = {entry["pid"]: entry["why"] for entry in said["left_alone"]}
    assert all(" ".join(reason.split()) in why[one.pid] and one.poll() is None for reason, one in others.items()), why
    for one in others.values():
        one.kill()
        one.wait()


def test_a_host_that_is_back_ends_only_what_its_run_left_there(
    tmp_path: Path, start: Start, here: run_origin.RunOrigin
) -> None:
    run_dir = tmp_path / "runs" / "2026-back"
    ours = start(["sleep", "600"], {**tag(run_dir, here), env_vars.HOST: "b"})
    other_host = start(["sleep", "600"], {**tag(run_dir, here), env_vars.HOST: "a"})
    kept = start(["sleep", "600"], {**tag(run_dir, here), env_vars.HOST: "b", env_vars.KEEP: "1"})
    others = strangers(run_dir, here, lambda argv, env=None: start(argv, {**env, env_vars.HOST: "b"} if env else None))
    assert take_over([], run_dir.name, str(run_dir), "b") == []
    assert ours.wait(100) == -signal.SIGKILL
    assert all(one.poll() is None for one in (other_host, kept, *others.values()))


@ROOT_ONLY
def test_another_control_group_is_another_service(tmp_path: Path, start: Start, here: run_origin.RunOrigin) -> None:
    place = next(
        (path for path in (Path("/sys/fs/cgroup/systemd"), Path("/sys/fs/cgroup")) if (path / "cgroup.procs").exists()),
        None,
    )
    group = place / f"stoker-test-{os.getpid()}" if place else None
    try:
        if group is None:
            pytest.skip("no control groups here")
        group.mkdir()
    except OSError as problem:
        pytest.skip(f"control groups can't be made here: {problem}")
    one = start(["sleep", "600"], tag(tmp_path / "runs" / "2026-x", here))
    me = find_process(one.pid)
    assert me is not None
    try:
        table = {entry.pid: entry for entry in procfs.list_processes()}
        assert run_origin.why_another_started_it(me, table) == ""
        (group / "cgroup.procs").write_text(str(one.pid))
        assert f"/stoker-test-{os.getpid()}" in run_origin.why_another_started_it(me, table)
    finally:
        one.kill()
        one.wait()
        assert wait_for(lambda: True if not (group / "cgroup.procs").read_text() else None, 5)
        group.rmdir()


def test_a_process_within_execve_shows_its_environment() -> None:
    """Between closing its files and copying the environment the kernel shows an empty one: once in four starts here."""
    for _ in range(100):
        child = subprocess.Popen(["sleep", "600"], env={"MINE": "1", "PATH": os.environ["PATH"]})
        try:
            assert procfs.read_environment(child.pid) == {"MINE": "1", "PATH": os.environ["PATH"]}
        finally:
            child.kill()
            child.wait()
    bare = subprocess.Popen(["/bin/sleep", "600"], env={})
    try:
        assert procfs.read_environment(bare.pid) == {}
    finally:
        bare.kill()
        bare.wait()
    assert procfs.read_environment(bare.pid) == {}


# ---- being in a rank ----


def test_a_run_in_a_rank_knows_it_and_a_job_with_its_environment_does_not(stoker: Stoker, scheduler: Scheduler) -> None:
    asks = "import os\nfrom stoker.control.machine.run_origin import find_current_run\nprint('in', find_current_run(os.environ) == os.environ['STOKER_RUN_ID'], flush=True)\n"
    done = stoker(
        "run",
        stoker.script(
            "r.py",
            asks
            + "import subprocess, sys; subprocess.run([sys.executable, '-c', open('r.py').read().split('import subprocess')[0]])\n"
            + SUBMIT,
        ),
        env={"AT": str(scheduler.path)},
    )
    assert done.log(0).count(b"in True\n") == 2
    with open(f"/proc/{scheduler.job}/environ", encoding="utf-8") as file:
        handed = dict(item.partition("=")[::2] for item in file.read().split("\0") if item)
    assert handed[env_vars.RUN_ID] == done.run_dir.name and run_origin.find_current_run(handed) == ""


def test_submit_hands_on_nothing_that_makes_a_rank(tmp_path: Path) -> None:
    (tmp_path / "sbatch").write_text('#!/bin/sh\nenv > "$(dirname "$0")/env"\necho 12\n')
    (tmp_path / "sbatch").chmod(0o755)
    script = submit.make_script(submit.SubmitOptions(), ["stoker", "run"], ["t.py"], "t", str(tmp_path), str(tmp_path))
    path = submit.write_script(script, str(tmp_path), "t")
    environ = {
        **dict.fromkeys(env_vars.RANK_VARIABLES, "x"),
        "STOKER_RUNS": "/shared",
        "MINE": "1",
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
    }
    before = os.environ["PATH"]
    os.environ["PATH"] = environ["PATH"]
    try:
        assert submit.submit(path, script, environ) == "12"
    finally:
        os.environ["PATH"] = before
    handed = {line.partition("=")[0] for line in (tmp_path / "env").read_text().splitlines()}
    assert not handed & set(env_vars.RANK_VARIABLES) and {"STOKER_RUNS", "MINE"} <= handed
    assert (
        f"\nunset {' '.join(env_vars.RANK_VARIABLES)}\n" in script.text
    )  # the script may be handed to sbatch by hand, in a rank


# ---- signalling itself ----


def test_every_place_that_signals_is_known() -> None:
    """All signals to others go through contract/process.py."""
    known = {
        "contract/process.py": 2,  # by pidfd; a child's group
        "training/loop/run.py": 1,  # itself
        "training/model/hf_write.py": 1,  # signal 0: is it there?
    }
    root = Path(package.__file__).parent
    found: dict[str, int] = {}
    for path in root.rglob("*.py"):
        if count := len(re.findall(r"\bos\.kill\(|\bkillpg\(|pidfd_send_signal\(", path.read_text())):
            found[str(path.relative_to(root))] = count
    assert found == known
