"""Every way to end a run × (your own script, `stoker train`): what was saved, what is printed, what `stoker why` says. docs/endings.md is this table in words."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import Done, Stoker, at_length, at_length_but, on_terminal, wait_for

SAVES = """
import os, signal, sys, time
folder = os.path.join(os.environ["STOKER_RUN_DIR"], "checkpoints")
os.makedirs(folder, exist_ok=True)
def save(step):
    with open(f"{folder}/step-{step}.pt.tmp", "w") as file: file.write("x")
    os.rename(f"{folder}/step-{step}.pt.tmp", f"{folder}/step-{step}.pt")
def stop(signum, frame):
    save(20); print("got", signum, flush=True); sys.exit(0)
if "earlier" in sys.argv: save(10)
if "saves" in sys.argv: signal.signal(signal.SIGTERM, stop); signal.signal(signal.SIGINT, stop)
print("ready", flush=True)
time.sleep(float(os.environ.get("SECONDS_TO_RUN", 100)))
"""


def is_ready(stoker: Stoker) -> bool | None:
    return (
        True if any(b"ready" in log.read_bytes() for log in stoker.cwd.glob("runs/2*/attempt-*/rank-*.log")) else None
    )


def own_script(stoker: Stoker, *args: str) -> list[str]:
    return ["run", "--nproc-per-node", "1", stoker.script("own.py", SAVES), *args]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "book.txt"
    path.write_text(
        "".join(f"line {n}: the quick brown fox jumps over the lazy dog {n * 7919 % 1000} times\n" for n in range(4000))
    )
    return path


def training(text: Path, steps: int = 100_000) -> list[str]:
    sizes = [
        "--model.layers",
        "2",
        "--model.dim",
        "32",
        "--model.heads",
        "2",
        "--data.context_length",
        "64",
        "--batch.tokens",
        "512",
    ]
    return [
        "train",
        "pretrain",
        "--data",
        str(text),
        "--max-steps",
        str(steps),
        "--tokenizer.vocab_size",
        "512",
        "--checkpoint.every",
        "0",
        *sizes,
    ]


def why(stoker: Stoker) -> dict[str, Any]:
    return json.loads(stoker("why", "--json").out)


def stopped_with(stoker: Stoker, command: list[str], *signals: signal.Signals) -> tuple[int, str]:
    run = stoker.start(*command, env={"OMP_NUM_THREADS": "1"})
    ready = (lambda: is_ready(stoker)) if command[0] == "run" else (lambda: _trains(stoker))
    assert wait_for(ready, 90), run.stdout and run.stdout.read1()  # type: ignore[attr-defined]
    for number, signum in enumerate(signals):
        if number:
            assert wait_for(
                lambda: True if any(event["event"] == "stop" for event in stoker.result().events) else None, 10
            )
        run.send_signal(signum)
    out, _ = run.communicate(timeout=120)
    return run.returncode, out.decode()


def _trains(stoker: Stoker) -> bool | None:
    metrics = [path for path in stoker.cwd.glob("runs/2*/metrics.jsonl") if path.read_text().count("\n") >= 2]
    return True if metrics else None


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_an_own_script_that_saves(stoker: Stoker, signum: signal.Signals, code: int) -> None:
    returned, said = stopped_with(stoker, own_script(stoker, "saves", "earlier"), signum)
    assert returned == code
    assert f"stopped by {signum.name} gracefully; saved: checkpoints/step-20.pt" in said
    assert f"to continue: stoker run --name {stoker.latest.name} --nproc-per-node 1 own.py saves earlier" in said
    assert why(stoker)["summary"] == f"stopped by {signum.name} gracefully; saved: checkpoints/step-20.pt"
    again = stoker(*continuing(said), env={"SECONDS_TO_RUN": "0"})
    assert (
        again.code == 0 and "its newest checkpoint" in again.err and len(list(stoker.cwd.glob("runs/2*"))) == 1
    )  # the printed command continues that run


def continuing(said: str) -> list[str]:
    """The words of the command that was printed, without `stoker`."""
    return shlex.split(said.partition("to continue: stoker ")[2].splitlines()[0])


def test_the_printed_command_continues_that_run_whatever_came_after(stoker: Stoker) -> None:
    """A run without a name takes that of its script, and so does the next one: the command has to say more than the name."""
    code, said = stopped_with(stoker, own_script(stoker, "saves"), signal.SIGTERM)
    stopped, quickly = stoker.latest, {"SECONDS_TO_RUN": "0"}
    newer = stoker("run", "own.py", "other", env=quickly)
    assert code == 143 and newer.code == 0 and newer.run_dir != stopped
    command = f"stoker run --name {stopped.name} --nproc-per-node 1 own.py saves"
    done = stoker("run", "--name", "own", "own.py", "other", env=quickly)  # the newest of that name, and complete
    assert done.code == 0 and "nothing to do" in done.err and f"is unfinished; to continue it: {command}" in done.err
    other = stoker("run", "--name", "own", "own.py", "third", env=quickly)
    assert "this is a new run of that name" in other.err and f"to continue it: {command}" in other.err
    changed = stoker("run", "--name", stopped.name, "own.py", "fourth", env=quickly)
    assert changed.code == 64 and command in changed.err
    which = "--nproc-per-node: 1 then, not set now; arguments: saves then, fourth now"
    assert f"was started with other settings ({which}); use its command, " in changed.err, changed.err

    assert shlex.join(["stoker", *continuing(said)]) == command
    before = set(stoker.cwd.glob("runs/2*"))
    again = stoker(*continuing(said), env=quickly)
    assert again.code == 0 and f"starting run {stopped.name} again; its newest checkpoint" in again.err, again.err
    assert set(stoker.cwd.glob("runs/2*")) == before and (stopped / "attempt-1").is_dir()
    assert json.loads((stopped / "run.json").read_text())["name"] == "own"
    assert "is complete" in stoker(*continuing(said)).err, "by its id it is known to be complete, too"


def test_a_name_of_ones_own_continues_the_run_with_these_settings(stoker: Stoker) -> None:
    """`--name exp` stopped, then `--name exp` with other settings: the first command still means the first run."""
    command = ["run", "--name", "exp", *own_script(stoker, "saves")[1:]]
    _, said = stopped_with(stoker, command, signal.SIGTERM)
    stopped = stoker.latest
    assert continuing(said) == command
    assert stoker("run", "--name", "exp", "own.py", "other", env={"SECONDS_TO_RUN": "0"}).code == 0
    newer = stoker.latest
    assert newer != stopped
    told = json.loads(stoker("why", stopped.name, "--json").out)["fix"][0]
    assert told.startswith(f"stoker run --name {stopped.name} --nproc-per-node 1 own.py saves"), told
    again = stoker(*command, env={"SECONDS_TO_RUN": "0"})
    assert again.code == 0 and f"starting run {stopped.name} again" in again.err and newer.name in again.err
    assert (stopped / "attempt-1").is_dir()


def test_a_killed_run_says_how_to_continue_it(stoker: Stoker) -> None:
    run = stoker.start(*own_script(stoker, "earlier"))
    assert wait_for(lambda: is_ready(stoker), 30)
    run.kill()
    run.communicate(timeout=60)
    killed = stoker.latest
    assert wait_for(lambda: True if why(stoker)["status"] == "lost" else None, 30)
    command = f"stoker run --name {killed.name} --nproc-per-node 1 own.py earlier"
    assert why(stoker)["fix"][0] == f"{command}   # to continue"
    assert stoker(*shlex.split(command)[1:], env={"SECONDS_TO_RUN": "0"}).code == 0 and (killed / "attempt-1").is_dir()


@pytest.mark.parametrize(("args", "purpose"), [(("earlier",), "to continue"), ((), "to start it again")])
def test_a_run_that_fails_ends_with_the_command_that_starts_it_again(
    stoker: Stoker, args: tuple[str, ...], purpose: str
) -> None:
    own_script(stoker)
    stoker.script("own.py", (stoker.cwd / "own.py").read_text() + "\nassert os.environ.get('FIXED')\n")
    failed = stoker("run", "--nproc-per-node", "1", "own.py", *args, env={"SECONDS_TO_RUN": "0"})
    command = shlex.join(["stoker", "run", "--name", stoker.latest.name, "--nproc-per-node", "1", "own.py", *args])
    assert failed.code == 1 and failed.err.endswith(f"stoker: {purpose}: {command}\n"), failed.err
    assert "look at " in why(stoker)["fix"][0] and why(stoker)["fix"][-1] == f"{command}   # {purpose}"
    again = stoker(*shlex.split(command)[1:], env={"SECONDS_TO_RUN": "0", "FIXED": "1"})
    assert again.code == 0 and len(list(stoker.cwd.glob("runs/2*"))) == 1


def test_a_killed_run_without_a_checkpoint_says_how_to_start_it_again(stoker: Stoker) -> None:
    run = stoker.start(*own_script(stoker))
    assert wait_for(lambda: is_ready(stoker), 30)
    run.kill()
    run.communicate(timeout=60)
    assert wait_for(lambda: True if why(stoker)["status"] == "lost" else None, 30)
    command = f"stoker run --name {stoker.latest.name} --nproc-per-node 1 own.py"
    assert why(stoker)["fix"][0] == f"{command}   # to start it again"


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
def test_an_own_script_without_a_handler_is_not_called_graceful(stoker: Stoker, signum: signal.Signals) -> None:
    _, said = stopped_with(stoker, own_script(stoker, "earlier"), signum)
    assert "gracefully" not in said and "have no handler for it and ended without saving" in said
    assert (
        "nothing was saved at the stop, the newest checkpoint is checkpoints/step-10.pt" in said
        and "to continue: " in said
    )


def test_nothing_saved_is_said_so_and_nothing_is_resumed(stoker: Stoker) -> None:
    _, said = stopped_with(stoker, own_script(stoker), signal.SIGTERM)
    assert (
        "no checkpoint was seen" in said
        and f"to start it again: stoker run --name {stoker.latest.name}" in said
        and "gracefully" not in said
    )
    again = stoker("run", "--name", "own", "--nproc-per-node", "1", "own.py", env={"SECONDS_TO_RUN": "0"})
    assert "esuming" not in again.err and "again from the beginning" in again.err


def test_a_second_ctrl_c_kills(stoker: Stoker) -> None:
    slow = SAVES.replace("def stop(signum, frame):", "def stop(signum, frame):\n    time.sleep(60)")
    command = ["run", "--nproc-per-node", "1", stoker.script("own.py", slow), "saves"]
    code, said = stopped_with(stoker, command, signal.SIGINT, signal.SIGINT)
    assert code == 130 and "the ranks were killed at once" in said and "gracefully" not in said


def test_stoker_stop_saves(stoker: Stoker) -> None:
    run = stoker.start(*own_script(stoker, "saves"))
    assert wait_for(lambda: is_ready(stoker), 30)
    assert stoker("stop").code == 0
    assert run.wait(100) == 143 and "gracefully; saved" in why(stoker)["summary"]


def test_a_killed_launcher_is_called_lost_with_its_checkpoint(stoker: Stoker) -> None:
    run = stoker.start(*own_script(stoker, "saves", "earlier"))
    assert wait_for(lambda: is_ready(stoker), 30)
    run.kill()
    run.wait()
    verdict = why(stoker)
    assert (verdict["status"], verdict["cause"]) == ("lost", "launch.killed")
    assert "the newest checkpoint is checkpoints/step-10.pt" in verdict["evidence"]


def test_a_killed_agent_is_a_failure_of_its_own(stoker: Stoker) -> None:
    from stoker.control.machine import procfs

    run = stoker.start(*own_script(stoker, "saves", "earlier"))
    assert wait_for(lambda: is_ready(stoker), 30)
    table = procfs.list_processes()
    agents = [one for one in table if one.name == "stoker-agent" and one.pid in procfs.descendants(run.pid, table)]
    assert len(agents) == 1
    os.kill(agents[0].pid, signal.SIGKILL)
    run.communicate(timeout=60)
    assert why(stoker)["cause"] == "host.agent-lost" and run.returncode != 0


# ---- closed terminals ----


def test_a_closed_terminal_saves(stoker: Stoker) -> None:
    run, terminal = on_terminal(stoker, ["-m", "stoker", *own_script(stoker, "saves")])
    assert wait_for(lambda: is_ready(stoker), 30)
    os.close(terminal)
    assert (
        run.wait(100) == 129 and why(stoker)["summary"] == "stopped by SIGHUP gracefully; saved: checkpoints/step-20.pt"
    )


def test_on_hangup_detach_continues(stoker: Stoker) -> None:
    run, terminal = on_terminal(
        stoker, ["-m", "stoker", "run", "--on-hangup", "detach", *own_script(stoker, "saves")[1:]]
    )
    assert wait_for(lambda: is_ready(stoker), 30)
    os.close(terminal)
    assert wait_for(lambda: True if any(event["event"] == "hangup" for event in stoker.result().events) else None, 10)
    assert run.poll() is None
    assert stoker("stop").code == 0 and run.wait(100) == 143


def test_a_running_job_can_be_detached(stoker: Stoker) -> None:
    run, terminal = on_terminal(stoker, ["-m", "stoker", *own_script(stoker, "saves")])
    assert wait_for(lambda: is_ready(stoker), 30)
    done = stoker("detach")
    assert done.code == 0 and "continues when its terminal closes" in done.out
    assert wait_for(lambda: True if any(event["event"] == "detach" for event in stoker.result().events) else None, 10)
    os.close(terminal)
    assert wait_for(lambda: True if any(event["event"] == "hangup" for event in stoker.result().events) else None, 10)
    assert run.poll() is None
    assert stoker("stop").code == 0 and run.wait(100) == 143


def test_a_closed_tmux_saves(stoker: Stoker) -> None:
    if shutil.which("tmux") is None:
        pytest.skip("tmux is not installed")
    tmux = ["tmux", "-L", f"stoker-test-{os.getpid()}"]
    command = [sys.executable, "-m", "stoker", *own_script(stoker, "saves")]
    subprocess.run([*tmux, "new-session", "-d", "-c", str(stoker.cwd), *command], env=stoker.env, check=True)
    assert wait_for(lambda: is_ready(stoker), 30)
    subprocess.run([*tmux, "kill-server"], check=True)
    assert wait_for(lambda: True if (stoker.latest / "verdict.json").exists() else None, 30)
    assert why(stoker)["summary"] == "stopped by SIGHUP gracefully; saved: checkpoints/step-20.pt"


# ---- stoker train ----


@at_length
def test_the_command_that_continues_names_the_run_that_was_the_latest_before(stoker: Stoker, text: Path) -> None:
    """As it was typed it would name the stopped run itself."""
    before = stoker.cwd / "runs" / "1-before"
    before.mkdir(parents=True)
    shutil.copy(text, before / "text.txt")
    (stoker.cwd / "runs" / "latest").symlink_to(before.name)
    code, said = stopped_with(stoker, training(Path("runs/latest/text.txt")), signal.SIGTERM)
    continues = next(line for line in said.splitlines() if "to continue: " in line)
    assert code == 143 and "--data runs/1-before/text.txt" in continues and "latest" not in continues


@pytest.mark.parametrize("signum", at_length_but([signal.SIGTERM], [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]))
def test_training_saves_and_continues(stoker: Stoker, text: Path, signum: signal.Signals) -> None:
    code, said = stopped_with(stoker, training(text), signum)
    assert code == 128 + signum
    step = sorted((stoker.latest / "checkpoints").glob("step-*"))[-1].name
    assert f"stopped by {signum.name} gracefully; saved: checkpoints/{step}" in said and "; saved " in said
    assert f"to continue: stoker train pretrain --name {stoker.latest.name} --data" in said
    listed = json.loads(stoker("runs", "--json").out)["runs"][0]
    assert f"stopped: {listed['step']} of 100000 steps" in said and step == f"step-{listed['step']:08d}"
    if signum is signal.SIGHUP:
        first = stoker.latest
        run = stoker.start(*continuing(said), env={"OMP_NUM_THREADS": "1"})
        log = first / "attempt-1" / "rank-0.log"
        assert wait_for(lambda: True if log.exists() and b"Step [" in log.read_bytes() else None, 90)
        run.send_signal(signal.SIGTERM)
        out, _ = run.communicate(timeout=120)
        assert (
            stoker.latest == first
            and f"resuming run {first.name} from" in out.decode()
            and f"{step}" in log.read_text()
        )


def test_training_that_is_killed_says_what_is_lost(stoker: Stoker, text: Path) -> None:
    run = stoker.start(*training(text), env={"OMP_NUM_THREADS": "1"})
    assert wait_for(lambda: _trains(stoker), 90)
    assert stoker("stop", "--now").code == 0
    out, _ = run.communicate(timeout=60)
    assert (
        run.returncode == 143
        and b"killed at once" in out
        and b"no checkpoint was seen" in out
        and b"gracefully" not in out
    )


# ---- disks ----


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place)], capture_output=True, check=False
    )
    if made.returncode:
        pytest.skip(f"mounting a small disk takes root: {made.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def fill(place: Path) -> None:
    with open(place / "filler", "wb", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError:
                continue


def on_disk(stoker: Stoker, place: Path, *command: str, **more: Any) -> Done:
    done = stoker(*command, "--runs-dir", str(place / "runs"), **more)
    return done


FILLS = """
import os, sys, time
def fill():
    with open(os.environ["DISK"] + "/filler", "wb", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            try:
                while True: file.write(b"x" * size)
            except OSError: pass
if "full" in sys.argv: fill()
print("some output", flush=True)
if "fails" in sys.argv: raise ValueError("boom")
if "writes" in sys.argv: open(os.environ["DISK"] + "/more", "w").write("y" * 100000)
"""


@pytest.mark.parametrize(
    ("how", "code", "status", "cause"),
    [
        ("ends", 0, "completed", "completed"),
        ("fails", 1, "failed", "rank.exception"),
        ("writes", 1, "failed", "data.no-space"),
    ],
)
def test_a_disk_that_fills_during_the_run(
    stoker: Stoker, small_disk: Path, how: str, code: int, status: str, cause: str
) -> None:
    runs = ["--runs-dir", str(small_disk / "runs")]
    done = stoker(
        "run",
        "--no-preflight",
        *runs,
        "--name",
        "x",
        "--nproc-per-node",
        "1",
        stoker.script("own.py", FILLS),
        "full",
        how,
        env={"DISK": str(small_disk)},
    )
    assert done.code == code
    verdict = json.loads(stoker("why", "x", *runs, "--json").out)
    assert (verdict["status"], verdict["cause"], verdict["exit_code"]) == (status, cause, code)
    if how == "ends":
        again = stoker(
            "run",
            "--no-preflight",
            *runs,
            "--name",
            "x",
            "--nproc-per-node",
            "1",
            "own.py",
            "full",
            how,
            env={"DISK": str(small_disk)},
        )
        assert again.code == 0 and "nothing to do" in again.err  # never runs again because of it


def test_a_disk_that_is_full_before_the_start(stoker: Stoker, small_disk: Path) -> None:
    fill(small_disk)
    done = stoker(
        "run",
        "--no-preflight",
        "--runs-dir",
        str(small_disk / "runs"),
        "--nproc-per-node",
        "1",
        stoker.script("own.py", FILLS),
    )
    assert done.code == 73 and "disk or quota is full" in done.err and "Traceback" not in done.err


def test_a_full_disk_and_a_stop(stoker: Stoker, small_disk: Path) -> None:
    runs = ["--runs-dir", str(small_disk / "runs")]
    run = stoker.start(
        "run",
        "--no-preflight",
        *runs,
        "--nproc-per-node",
        "1",
        stoker.script("own.py", SAVES.replace("save(20); ", "")),
        "saves",
    )
    assert wait_for(
        lambda: (
            True
            if any(b"ready" in log.read_bytes() for log in small_disk.glob("runs/2*/attempt-0/rank-0.log"))
            else None
        ),
        30,
    )
    fill(small_disk)
    run.send_signal(signal.SIGTERM)
    out, _ = run.communicate(timeout=100)
    assert run.returncode == 143 and b"gracefully" not in out
    assert json.loads(stoker("why", *runs, "--json").out)["summary"].startswith("stopped by SIGTERM")


def test_a_checkpoint_that_does_not_fit(stoker: Stoker, small_disk: Path, text: Path) -> None:
    fill(small_disk)
    folder = small_disk / "filler"
    os.truncate(folder, folder.stat().st_size - 300_000)
    done = stoker(*training(text, steps=3), "--checkpoint.folder", str(small_disk / "c"), env={"OMP_NUM_THREADS": "1"})
    assert (
        done.code == 73
        and done.verdict["cause"] == "data.no-space"
        and "no space left: rank-00000.safetensors needs " in done.err + done.out
    )


def test_a_read_only_disk(stoker: Stoker, small_disk: Path) -> None:
    runs = ["--runs-dir", str(small_disk / "runs")]
    run = stoker.start(
        "run",
        "--no-preflight",
        *runs,
        "--nproc-per-node",
        "1",
        stoker.script("own.py", SAVES),
        env={"SECONDS_TO_RUN": "3"},
    )
    assert wait_for(
        lambda: (
            True
            if any(b"ready" in log.read_bytes() for log in small_disk.glob("runs/2*/attempt-0/rank-0.log"))
            else None
        ),
        30,
    )
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=False, capture_output=True)
    out, _ = run.communicate(timeout=60)
    assert run.returncode == 0 and b"Traceback" not in out


def test_a_runs_folder_that_is_deleted(stoker: Stoker) -> None:
    run = stoker.start(*own_script(stoker), env={"SECONDS_TO_RUN": "3"})
    assert wait_for(lambda: is_ready(stoker), 30)
    shutil.rmtree(stoker.cwd / "runs")
    out, _ = run.communicate(timeout=60)
    said = out.decode()
    assert (
        run.returncode == 0
        and "verdict.json could not be written: No such file or directory" in said
        and "Traceback" not in said
    )
