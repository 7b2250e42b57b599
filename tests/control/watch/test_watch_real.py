"""Watching real ranks, with less to see: no py-spy, no rights, no flight recorder, handlers and streams replaced, beats overwritten."""

from __future__ import annotations

import os
import re
import signal
import stat
import time
from pathlib import Path
from typing import Any

import pytest

from conftest import Stoker, at_length, wait_for

TRAIN = """
import os, sys, time
{before}
import torch, torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
{model}
def stuck():
    {stuck}
for n in range(1, {steps}):
    step(n)
    {each}
    if n == 20 and rank == 1:
        stuck()
time.sleep(0.3)
dist.destroy_process_group()
"""


DDP = """
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
def step(n):
    time.sleep(0.03)
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
# Without DDP and an optimizer, and so without torch's compiler, which they import.
ALL_REDUCE = """
import stoker
def step(n):
    time.sleep(0.03)
    dist.all_reduce(torch.ones(8))
    stoker.beat(step=n)
"""


def script(
    stoker: Stoker,
    stuck: str = "time.sleep(1000)",
    before: str = "",
    each: str = "pass",
    steps: int = 2000,
    model: str = ALL_REDUCE,
) -> str:
    return stoker.script("train.py", TRAIN.format(stuck=stuck, before=before, each=each, steps=steps, model=model))


def hang(stoker: Stoker, name: str, **more: Any) -> Any:
    done = stoker.torch("run", "--nproc-per-node", "2", "--hang-timeout", "5s", name, **more)
    return done, next(event for event in done.events if event["event"] == "suspicion")


@at_length
def test_a_sleeping_rank_is_named_with_its_line(stoker: Stoker) -> None:
    done, seen = hang(stoker, script(stoker, model=DDP))
    assert (done.verdict["cause"], done.verdict["rank"], done.code) == ("hang.sleep", 1, 70)
    assert (seen["cause"], seen["rank"], seen["waiting"]) == ("hang.sleep", 1, [0])
    assert seen["silent_s"] < 10
    assert "train.py:18, in stuck" in done.verdict["summary"] and "gloo:all_reduce" in done.verdict["summary"]
    assert "--hang-timeout of 5 s is over" in " ".join(done.verdict["evidence"])
    stacks = (done.run_dir / "attempt-0" / "stacks.txt").read_text()
    assert "in stuck" in stacks and "_engine_run_backward" in stacks and "not done" in stacks
    told = stoker("why").out
    assert "hang.sleep" in told and f"their workers: {done.run_dir.resolve()}/attempt-0/stacks.txt\n" in told, told
    noticed, stopped = (
        re.search(words, told)
        for words in (r"first noticed after (\S+) s without progress", r"stopped after (\S+) s without")
    )
    assert noticed and stopped and float(noticed[1]) < float(stopped[1]), told


def test_a_loop_that_never_ends_is_stopped_at_the_busy_timeout_and_is_no_hang(stoker: Stoker) -> None:
    """Its stack moves, so it may be an evaluation: only --busy-timeout ends it, and another attempt would do the same."""
    loop = "while True: [len(str(n)) for n in range(100)]"
    limits = ("--hang-timeout", "4s", "--busy-timeout", "14s", "--max-restarts", "1")
    done = stoker.torch("run", "--nproc-per-node", "2", *limits, script(stoker, loop))
    assert (done.verdict["cause"], done.verdict["rank"], done.code) == ("rank.busy", 1, 70), done.err
    assert "train.py:" in done.verdict["summary"] and "--busy-timeout of 14 s" in " ".join(done.verdict["evidence"])
    busy = [event for event in done.events if event["event"] == "busy"]
    assert [(event["rank"], event["waiting"]) for event in busy] == [(1, [0])] and 4 <= busy[0]["silent_s"] < 14
    assert not [event for event in done.events if event["event"] in ("suspicion", "restart")]


def test_a_rank_that_failed_is_not_suspected_as_well(stoker: Stoker) -> None:
    """Two ranks in different collectives: both end with an error, one of them seconds after the other."""
    odd = "dist.all_reduce(torch.ones(3)) if not (n == 20 and rank == 1) else None"
    late = "import atexit; atexit.register(time.sleep, 4)"
    done = stoker.torch("run", "--nproc-per-node", "2", script(stoker, "pass", late, odd, model=DDP))
    assert done.code == 1 and done.verdict["cause"] == "gloo.diverged", done.err
    suspicions = [event["cause"] for event in done.events if event["event"] == "suspicion"]
    assert not [cause for cause in suspicions if cause.startswith("hang.")], done.err
    assert "keeps running" not in done.err, done.err


@at_length
def test_without_py_spy(stoker: Stoker) -> None:
    done, seen = hang(stoker, script(stoker), env={"STOKER_PY_SPY": ""})
    assert (seen["cause"], seen["rank"]) == ("hang.sleep", 1) and "in stuck" in seen["where"]
    assert any("faulthandler (py-spy is not installed)" in line for line in seen["evidence"])
    assert done.verdict["rank"] == 1


@at_length
def test_py_spy_without_rights(stoker: Stoker, tmp_path: Path) -> None:
    refused = tmp_path / "py-spy"
    refused.write_text(
        "#!/bin/sh\necho 'Error: Permission Denied: Try running again with elevated permissions' >&2\nexit 1\n"
    )
    refused.chmod(refused.stat().st_mode | stat.S_IXUSR)
    _, seen = hang(stoker, script(stoker), env={"STOKER_PY_SPY": str(refused)})
    assert (seen["cause"], seen["rank"]) == ("hang.sleep", 1) and "in stuck" in seen["where"]
    assert any("may not read the ranks" in line for line in seen["evidence"])


@at_length
def test_without_a_flight_recorder(stoker: Stoker) -> None:
    """Its socket can't be made; the ranks say so, and the stacks alone tell who is missing."""
    taken = 'shim = sys.modules["stoker.control.rank.shim"]; open(shim._files["server"], "w").close()'
    done, seen = hang(stoker, script(stoker, before=taken))
    assert "worker server does not start" in done.out + done.err
    assert (seen["cause"], seen["rank"], seen["waiting"]) == ("hang.sleep", 1, [0])
    assert any("no flight recorder" in line for line in seen["evidence"])


@at_length
def test_replaced_handlers_hook_and_streams(stoker: Stoker) -> None:
    before = """
import io, signal, sys
for number in set(range(1, 65)) - {9, 17, 19, 32, 33}:
    signal.signal(number, lambda *_: None)
sys.excepthook = lambda *_: None
sys.stdout = sys.stderr = io.StringIO()
"""
    done, seen = hang(stoker, script(stoker, before=before), env={"STOKER_PY_SPY": ""})
    assert (seen["cause"], seen["rank"]) == ("hang.sleep", 1)
    assert (done.verdict["rank"], done.code) == (1, 70)


@at_length
def test_overwritten_beats(stoker: Stoker) -> None:
    """The page is the script's memory too. Without it a rank is not accused of standing still, and nothing crashes."""
    each = 'if n == 5: memory = sys.modules["stoker.control.rank.shim"]._beat_writer._memory; memory[:] = os.urandom(len(memory))'
    done = stoker.torch("run", "--nproc-per-node", "2", script(stoker, stuck="pass", each=each, steps=60))
    assert (done.verdict["status"], done.code) == ("completed", 0)
    assert "its beats are unreadable" in done.out + done.err


def test_a_forked_childs_steps_are_not_its_ranks(stoker: Stoker) -> None:
    """It inherits the optimizer, the hook and the page of beats."""
    name = stoker.script(
        "job.py",
        """
import os, torch
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(1, 2)).sum().backward()
for n in range(3): optimizer.step()
if os.fork() == 0:
    for n in range(50): optimizer.step()
    os._exit(0)
os.wait()
for n in range(4): optimizer.step()
""",
    )
    done = stoker("run", "--nproc-per-node", "1", name)
    assert [event["steps"] for event in done.events if event["event"] == "rank-exit"] == [7]


@at_length
def test_a_stopped_rank_is_named_and_goes_on_when_continued(stoker: Stoker) -> None:
    """A suspicion is not a verdict: continued in time, the run completes and nobody is blamed."""
    name = script(stoker, stuck="open('pid', 'w').write(str(os.getpid()))", steps=150)
    launcher = stoker.start("run", "--nproc-per-node", "2", name)
    assert wait_for(lambda: ((stoker.cwd / "pid").exists() and (stoker.cwd / "pid").read_text()) or None, 60)
    pid = int((stoker.cwd / "pid").read_text())
    os.kill(pid, signal.SIGSTOP)
    seen = wait_for(
        lambda: next((event for event in stoker.result().events if event["event"] == "suspicion"), None), 20
    )
    assert (seen["cause"], seen["rank"], seen["proof"]) == ("hang.stopped", 1, False)
    assert wait_for(
        lambda: f"`kill -CONT {pid}` continues it" in (stoker.cwd / "runs/latest/stoker.log").read_text() or None, 10
    )
    told = stoker("why").out
    assert "no verdict yet" in told and "its process is stopped" in told, told
    os.kill(pid, signal.SIGCONT)
    out, _ = launcher.communicate(timeout=60)
    assert b"makes progress again, after" in out
    assert launcher.returncode == 0 and stoker.result().verdict["status"] == "completed"


def test_a_run_that_its_user_stops_keeps_what_was_suspected(stoker: Stoker) -> None:
    launcher = stoker.start("run", "--nproc-per-node", "2", script(stoker))
    assert wait_for(
        lambda: (
            (
                (stoker.latest / "events.jsonl").exists()
                and any(event["event"] == "suspicion" for event in stoker.result().events)
            )
            or None
        ),
        90,
    )
    launcher.send_signal(signal.SIGINT)
    out, _ = launcher.communicate(timeout=60)
    assert launcher.returncode == 130 and b"the job keeps running" in out and b"--hang-timeout" in out
    told = stoker("why").out
    assert (
        "stopped by SIGINT" in told
        and "Before the stop: rank 1 (CPU 1) has made no progress since step 20: it is sleeping at" in told
    ), told
    assert "rank 1 was ended by SIGINT" in told, told
    assert "train.py:16, in stuck" in told and "--grace" not in told


def test_suspending_the_whole_run_is_no_stall(stoker: Stoker) -> None:
    launcher = stoker.start(
        "run", "--nproc-per-node", "2", script(stoker, stuck="pass", steps=200), start_new_session=True
    )
    assert wait_for(
        lambda: (
            (
                (stoker.cwd / "runs/latest/events.jsonl").exists()
                and "first-step" in (stoker.cwd / "runs/latest/events.jsonl").read_text()
            )
            or None
        ),
        60,
    )
    os.kill(launcher.pid, signal.SIGTSTP)
    time.sleep(6)  # longer than the patience with a step, which is what is tested
    os.kill(launcher.pid, signal.SIGCONT)
    out, _ = launcher.communicate(timeout=60)
    assert launcher.returncode == 0, out.decode()
    assert not [event for event in stoker.result().events if event["event"] in ("suspicion", "relief")]


def test_a_torch_timeout_blames_the_one_who_was_waited_for(stoker: Stoker) -> None:
    """The script's own timeout is shorter than anybody's patience: its exception is an echo."""
    name = stoker.script(
        "train.py",
        TRAIN.replace(
            'init_process_group("gloo")',
            'init_process_group("gloo", timeout=__import__("datetime").timedelta(seconds=6))',
        ).format(
            stuck="print('stuck', flush=True); time.sleep(1000)", before="", each="pass", steps=2000, model=ALL_REDUCE
        ),
    )
    done = stoker.torch("run", "--nproc-per-node", "2", name)
    if b"stuck" not in done.log(1):
        pytest.skip(
            "this machine is too busy for a script with a timeout of 6 s: it was over before the rank stood still"
        )
    assert (done.verdict["cause"], done.verdict["rank"]) == ("hang.sleep", 1), done.verdict
    assert "in stuck" in done.verdict["summary"]


@pytest.mark.parametrize("kind", ["warn", "stop"])
def test_on_nan(stoker: Stoker, kind: str) -> None:
    beats = stoker.script(
        "beats.py",
        "import stoker, time\nfor n in range(1, 60):\n    time.sleep(0.03)\n"
        "    stoker.beat(step=n, loss=float('nan') if n > 20 else 1.0 / n)\n",
    )
    done = stoker("run", "--nproc-per-node", "2", "--on-nan", kind, beats)
    assert next(event["cause"] for event in done.events if event["event"] == "numbers") == "nan.loss"
    if kind == "stop":
        assert (done.verdict["cause"], done.code) == ("nan.loss", 70) and "step 21" in done.verdict["summary"]
    else:
        assert (done.verdict["status"], done.code) == ("completed", 0)
        assert any("stayed so" in line for line in done.verdict["evidence"])


def test_the_same_crash_twice_is_deterministic(stoker: Stoker) -> None:
    name = stoker.script(
        "job.py", "import os, time\nif os.environ['RANK'] == '1': raise ValueError('no')\ntime.sleep(60)\n"
    )
    done = stoker("run", "--nproc-per-node", "2", "--max-restarts", "3", name)
    assert sum(event["event"] == "attempt" for event in done.events) == 2
    assert "deterministic" in done.verdict["summary"] and not done.verdict["retryable"]


def test_a_complete_run_is_not_run_again(stoker: Stoker) -> None:
    name = stoker.script("job.py", "print('worked')")
    assert stoker("run", "--nproc-per-node", "1", "--name", "job", name).code == 0
    again = stoker("run", "--nproc-per-node", "1", "--name", "job", name)
    assert again.code == 0 and "is complete" in again.err and "worked" not in again.out
    assert "worked" in stoker("run", "--nproc-per-node", "1", "--name", "job", "--again", name).out
    other = stoker("run", "--nproc-per-node", "1", "--name", "job", name, "--lr", "2")
    assert "worked" in other.out, "other settings are another run"


def test_back_off_and_a_stop_while_it_waits(stoker: Stoker) -> None:
    """Different failures each time, none getting anywhere: at once, then after 1 s, 2 s, 4 s."""
    name = stoker.script("job.py", "import os, sys; sys.exit(10 + int(os.environ['TORCHELASTIC_RESTART_COUNT']))")
    launcher = stoker.start("run", "--nproc-per-node", "1", "--max-restarts", "9", name)
    assert wait_for(lambda: b"x" if len([e for e in _events(stoker) if e["event"] == "restart"]) >= 4 else None, 30)
    launcher.send_signal(signal.SIGTERM)
    out, _ = launcher.communicate(timeout=100)
    waits = [event["wait_s"] for event in stoker.result().events if event["event"] == "restart"]
    assert waits[:4] == [0.0, 1.0, 2.0, 4.0], waits
    assert launcher.returncode == 143 and "between two attempts" in stoker.result().verdict["summary"], out.decode()


def test_a_watcher_that_fails_does_not_end_the_job(stoker: Stoker, tmp_path: Path) -> None:
    """A fault of our own, put in from outside: said, recorded, and the run completes."""
    broken = tmp_path / "site"
    broken.mkdir()
    (broken / "sitecustomize.py").write_text(
        "import sys\nif 'stoker' in ' '.join(sys.orig_argv):\n    import stoker.control.watch.watcher as watcher\n    watcher.Watcher.next_actions = lambda self, now: 1 / 0\n"
    )
    done = stoker(
        "run",
        "--nproc-per-node",
        "1",
        stoker.script("job.py", "import time; time.sleep(0.5)"),
        env={"PYTHONPATH": str(broken)},
    )
    assert (done.code, done.verdict["status"]) == (0, "completed")
    assert "watching failed (ZeroDivisionError" in done.err
    assert [event["event"] for event in done.events].count("watch-failed") == 1


def _events(stoker: Stoker) -> list[dict[str, Any]]:
    return stoker.result().events if (stoker.cwd / "runs/latest/events.jsonl").exists() else []
