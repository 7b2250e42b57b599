"""Stopping: by signal, by failure, by losing the launcher. Nothing is left, and nobody else is touched."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from conftest import Stoker, tagged, wait_for

SLEEPER = """
import os, signal, sys, time
if "ignore" in sys.argv: signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.signal(signal.SIGINT, signal.SIG_IGN)
def save(signum, frame):
    time.sleep(0.3); print("saved", os.environ["RANK"], signum, flush=True); sys.exit(0)
if "save" in sys.argv:
    for s in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP): signal.signal(s, save)
print("ready", flush=True)
time.sleep(250)
"""
# Data-loader workers that ignore SIGTERM, a helper in a session of its own, a daemon that forked twice.
FAMILY = """
import multiprocessing, os, signal, subprocess, sys, time
def work():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(100)
if __name__ == "__main__":
    for context in ("fork", "spawn"):
        for _ in range(2):
            multiprocessing.get_context(context).Process(target=work, daemon=True).start()
    subprocess.Popen(["setsid", "sleep", "100"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    subprocess.Popen(["sh", "-c", "(setsid sleep 100 >/dev/null 2>&1 &) &"])
    print("ready", flush=True)
    time.sleep(100)
"""


def ready(stoker: Stoker, ranks: int = 2) -> bool | None:
    logs = list(stoker.cwd.glob("runs/2*/attempt-*/rank-*.log"))
    return True if sum(b"ready" in log.read_bytes() for log in logs) == ranks else None


def said(stoker: Stoker, event: str) -> bool | None:
    return True if any(f'"{event}"' in path.read_text() for path in stoker.cwd.glob("runs/2*/events.jsonl")) else None


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_a_signal_is_passed_on_and_the_ranks_may_save(stoker: Stoker, signum: signal.Signals, code: int) -> None:
    run = stoker.start("run", "--nproc-per-node", "2", stoker.script("s.py", SLEEPER), "save")
    assert wait_for(lambda: ready(stoker), 20)
    run.send_signal(signum)
    assert run.wait(100) == code
    done = stoker.result()
    assert all(f"saved {rank} {int(signum)}".encode() in done.log(rank) for rank in (0, 1))
    assert (done.verdict["status"], done.verdict["cause"], done.verdict["exit_code"]) == (
        "stopped",
        "launch.stopped",
        code,
    )
    assert ("--detach" in " ".join(done.verdict["fix"])) == (signum == signal.SIGHUP), done.verdict["fix"]


def test_a_second_signal_ends_it_at_once(stoker: Stoker) -> None:
    run = stoker.start("run", "--grace", "250s", "--nproc-per-node", "2", stoker.script("s.py", SLEEPER), "ignore")
    assert wait_for(lambda: ready(stoker), 20)
    run.send_signal(signal.SIGINT)
    assert wait_for(lambda: True if any(event["event"] == "stop" for event in stoker.result().events) else None, 5)
    run.send_signal(signal.SIGINT)
    assert run.wait(100) == 130


def test_a_rank_that_ignores_sigterm_is_killed_after_its_grace(stoker: Stoker) -> None:
    script = stoker.script(
        "mixed.py",
        "import os\nif os.environ['RANK'] == '1':\n    import time; time.sleep(1); raise SystemExit(5)\n" + SLEEPER,
    )
    done = stoker("run", "--nproc-per-node", "2", "--grace", "0.5s", script, "ignore")
    assert done.code == 5 and done.verdict["rank"] == 1


def test_a_stop_that_had_to_kill_says_so(stoker: Stoker) -> None:
    run = stoker.start("run", "--nproc-per-node", "2", "--grace", "0.5s", stoker.script("s.py", SLEEPER), "ignore")
    assert wait_for(lambda: ready(stoker), 20)
    run.send_signal(signal.SIGTERM)
    assert run.wait(100) == 143
    verdict = stoker.result().verdict
    assert (
        "rank 0, 1 did not end within the grace period and were killed" in verdict["summary"]
        and "--grace" in verdict["fix"][1]
    )


@pytest.mark.parametrize("victim", ["launcher", "agent", "guardian"])
def test_kill_minus_nine_leaves_nothing(stoker: Stoker, victim: str) -> None:
    run = stoker.start("run", "--nproc-per-node", "2", stoker.script("family.py", FAMILY))
    assert wait_for(lambda: ready(stoker), 30)
    assert len(tagged(stoker.cwd)) >= 2 * 7
    guardian = int(subprocess.check_output(["pgrep", "-P", str(run.pid)]).split()[0])
    agent = int(subprocess.check_output(["pgrep", "-P", str(guardian)]).split()[0])
    os.kill({"launcher": run.pid, "agent": agent, "guardian": guardian}[victim], signal.SIGKILL)
    assert wait_for(lambda: True if not tagged(stoker.cwd) else None, 3.0), tagged(stoker.cwd)
    code = run.wait(100)
    if victim == "launcher":
        assert code == -9
        told = json.loads(stoker("why", "--json").out)
        assert (told["status"], told["cause"]) == ("lost", "launch.killed")
    else:
        assert code == 70
        assert stoker.result().verdict["cause"] == "host.agent-lost"


def test_a_stopped_launcher_is_taken_for_dead(stoker: Stoker) -> None:
    """A SIGSTOP closes no pipe: 8 s of silence are the proof."""
    run = stoker.start("run", "--nproc-per-node", "1", stoker.script("s.py", SLEEPER))
    assert wait_for(lambda: ready(stoker, 1), 20)
    run.send_signal(signal.SIGSTOP)
    try:
        assert wait_for(lambda: True if not tagged(stoker.cwd) else None, 15.0)
    finally:
        run.send_signal(signal.SIGCONT)
    assert run.wait(100) == 70


def test_helpers_left_by_a_good_run_are_ended_and_named(stoker: Stoker) -> None:
    script = stoker.script("leave.py", "import subprocess\nsubprocess.Popen(['setsid', 'sleep', '100'])\n")
    done = stoker("run", "--nproc-per-node", "1", "--grace", "0.3s", script)
    assert done.code == 0 and "stopped 1 helper process the ranks left behind" in done.err and "sleep" in done.err


def test_a_strangers_process_is_not_touched(stoker: Stoker, tmp_path: Path) -> None:
    """Same user, same script, a name like ours, even our run's id in its environment without the folder: not ours."""
    script = stoker.script("s.py", SLEEPER)
    strangers = [
        subprocess.Popen(
            [sys.executable, str(stoker.cwd / script), "stranger"], stdout=subprocess.DEVNULL, cwd=tmp_path
        ),
        subprocess.Popen(
            [sys.executable, str(stoker.cwd / script)],
            env={**os.environ, "STOKER_RUN_ID": "other", "STOKER_RUN_DIR": "/elsewhere"},
            stdout=subprocess.DEVNULL,
        ),
    ]
    try:
        done = stoker("run", "--nproc-per-node", "2", stoker.script("f.py", "raise SystemExit(2)"))
        assert done.code == 2
        assert [stranger.poll() for stranger in strangers] == [None, None]
    finally:
        for stranger in strangers:
            stranger.kill()
            stranger.wait()


def test_nohup_is_respected(stoker: Stoker) -> None:
    run = stoker.start(
        "run",
        "--nproc-per-node",
        "1",
        stoker.script("s.py", SLEEPER),
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    )
    assert wait_for(lambda: ready(stoker, 1), 20)
    rank = next(event["pid"] for event in stoker.result().events if event["event"] == "rank-up")
    assert (
        int(
            next(
                line for line in Path(f"/proc/{rank}/status").read_text().splitlines() if line.startswith("SigIgn")
            ).split()[1],
            16,
        )
        & 1
    )
    run.send_signal(signal.SIGHUP)
    time.sleep(0.5)
    assert run.poll() is None
    run.send_signal(signal.SIGTERM)
    assert run.wait(100) == 143


def test_suspending_the_launcher_suspends_the_ranks(stoker: Stoker) -> None:
    run = stoker.start("run", "--nproc-per-node", "1", stoker.script("s.py", SLEEPER))
    assert wait_for(lambda: ready(stoker, 1), 20)
    rank = next(event["pid"] for event in stoker.result().events if event["event"] == "rank-up")

    def state(pid: int) -> str:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]

    run.send_signal(signal.SIGTSTP)
    assert wait_for(lambda: True if state(run.pid) == "T" and state(rank) == "T" else None, 5)
    time.sleep(9)  # longer than the silence that would mean death
    assert state(rank) == "T"
    run.send_signal(signal.SIGCONT)
    assert wait_for(lambda: True if state(rank) != "T" else None, 5)
    run.send_signal(signal.SIGTERM)
    assert run.wait(100) == 143


def test_breakpoint_works_with_one_rank(stoker: Stoker) -> None:
    """A real terminal: the prompt appears without a newline, what is typed reaches the rank."""
    script = stoker.script("b.py", "value = 41\nbreakpoint()\nprint('value is', value + 1)\n")
    master, slave = pty.openpty()
    run = stoker.start("run", script, stdin=slave, stdout=slave, stderr=slave, env={"TERM": "dumb"})
    os.close(slave)
    seen = b""

    def read_until(word: bytes) -> None:
        nonlocal seen
        deadline = time.monotonic() + 20
        while word not in seen:
            assert time.monotonic() < deadline, seen
            seen += os.read(master, 4096)

    read_until(b"(Pdb) ")
    os.write(master, b"value = 99\n")
    seen = b""
    read_until(b"(Pdb) ")
    os.write(master, b"c\n")
    read_until(b"value is 100")
    os.set_blocking(master, True)
    assert run.wait(100) == 0
    os.close(master)


def test_piped_stdin_reaches_rank_0(stoker: Stoker, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("hello from a pipe\n")
    with open(tmp_path / "in.txt", "rb") as source:
        done = stoker(
            "run",
            "--nproc-per-node",
            "2",
            stoker.script("r.py", "import sys; print('got', sys.stdin.read().strip())"),
            stdin=source,
        )
    assert done.log(0) == b"got hello from a pipe\n" and done.log(1) == b"got \n"


def test_a_closing_terminal_leaves_the_grace_to_save(stoker: Stoker) -> None:
    """The kernel and the shell both send SIGHUP: two of them at once are one."""
    run = stoker.start("run", "--nproc-per-node", "1", stoker.script("s.py", SLEEPER), "save")
    assert wait_for(lambda: ready(stoker, 1), 20)
    run.send_signal(signal.SIGHUP)
    run.send_signal(signal.SIGHUP)
    assert run.wait(100) == 129 and b"saved 0 1" in stoker.result().log(0)


def test_a_signal_while_sweeping_prevents_the_restart(stoker: Stoker) -> None:
    script = stoker.script(
        "fin.py",
        "import subprocess, sys, time\n"
        "subprocess.Popen([sys.executable, '-c', 'import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); open(\"up\", \"w\").close(); time.sleep(100)'])\n"
        "import os\nwhile not os.path.exists('up'): time.sleep(0.01)\nos.kill(os.getpid(), 9)\n",
    )
    run = stoker.start("run", "--max-restarts", "5", script)
    assert wait_for(lambda: said(stoker, "rank-exit"), 20)
    run.send_signal(signal.SIGTERM)
    assert run.wait(100) == 137
    assert len(list(stoker.latest.glob("attempt-*"))) == 1


def test_a_failure_before_the_signal_stays_the_cause(stoker: Stoker) -> None:
    script = stoker.script(
        "fs.py",
        "import os, signal, time\nif os.environ['RANK'] == '1':\n    time.sleep(0.5)\n    raise ValueError('first')\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(60)\n",
    )
    run = stoker.start("run", "--nproc-per-node", "2", script)
    assert wait_for(lambda: said(stoker, "rank-exit"), 20)
    time.sleep(0.3)
    run.send_signal(signal.SIGINT)
    code = run.wait(100)
    verdict = stoker.result().verdict
    assert (
        code == 1
        and verdict["cause"] == "rank.exception"
        and verdict["rank"] == 1
        and "SIGINT" in verdict["evidence"][-1]
    )


def test_a_chain_of_forks_does_not_escape(stoker: Stoker) -> None:
    script = stoker.script(
        "comet.py",
        "import os, time\nif os.fork() == 0:\n    end = time.time() + 60\n    while time.time() < end:\n        if os.fork(): os._exit(0)\n        open('alive', 'w').write(str(time.time()))\n    os._exit(0)\ntime.sleep(0.3)\n",
    )
    done = stoker("run", "--grace", "0.2s", script)
    assert done.code == 0
    last = (stoker.cwd / "alive").read_text()
    time.sleep(0.5)
    assert (stoker.cwd / "alive").read_text() == last
