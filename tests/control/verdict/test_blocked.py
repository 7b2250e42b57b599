"""What a rank that hangs alone waits for, read from real processes: locks, children, file locks, pipes, sockets; and what can't be read."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import wait_for
from localuser import ATTACKER, do_as
from stoker.contract.env_vars import PY_SPY, STACK_SIGNAL
from stoker.contract.evidence import Stall
from stoker.contract.process import find_process
from stoker.control.agent.inspector import inspect
from stoker.control.agent.spawn import RankProcess
from stoker.control.verdict.hangs import make_stall_report
from stoker.control.watch import rank_inspection
from stoker.control.watch.culprit import find_culprit

Start = Callable[..., RankProcess]
ON_SIGNAL = f"import faulthandler, sys; faulthandler.register({STACK_SIGNAL}, file=open(sys.argv[1], 'w'))\n"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a script as a rank; it prints a line just before it blocks."""
    started: list[subprocess.Popen[str]] = []

    def start_rank(script: str, number: int = 0, stacks_on_signal: bool = False) -> RankProcess:
        path = tmp_path / f"train{number}.py"
        path.write_text((ON_SIGNAL if stacks_on_signal else "\n") + textwrap.dedent(script))
        base = str(tmp_path / f"0-{number}")
        spec = {"rank": number, "env": {}}
        asked = RankProcess(spec, find_process(os.getpid()), {}, base, 0.0).files["asked"]  # type: ignore[arg-type]
        child = subprocess.Popen(
            [sys.executable, str(path), asked], stdout=subprocess.PIPE, text=True, cwd=tmp_path, start_new_session=True
        )
        started.append(child)
        assert child.stdout is not None and child.stdout.readline(), "it ended before it blocked"
        me = find_process(child.pid)
        assert me is not None
        return RankProcess(spec, me, {}, base, 0.0)

    yield start_rank
    for child in started:
        os.killpg(child.pid, signal.SIGKILL)  # its session: what it started, too
        child.wait()


def look(*ranks: RankProcess, accused: int = 0) -> tuple[Stall, dict[str, Any]]:
    """Inspect them as an agent does, and return the stall and its report."""
    answer = json.loads(json.dumps(inspect({}, list(ranks))))
    seen = {int(number): rank_inspection.parse_inspection(int(number), data) for number, data in answer.items()}
    stall = find_culprit(seen, len(ranks), {}, {}, {accused: 4.0}, dict.fromkeys(seen, 20))
    assert stall is not None
    return stall, make_stall_report(stall, f"CPU{accused}", "the time is over")


def look_when(is_seen: Callable[[Stall], bool], *ranks: RankProcess, accused: int = 0) -> tuple[Stall, dict[str, Any]]:
    """Look until it blocks as expected: what a process prints comes before it blocks."""
    found: list[tuple[Stall, dict[str, Any]]] = []

    def seen() -> bool | None:
        found.append(look(*ranks, accused=accused))
        return is_seen(found[-1][0]) or None

    assert wait_for(seen, 30), found[-1]
    return found[-1]


TWO_LOCKS = """
import threading, time
class Stats:
    def __init__(self):
        self.values_lock, self.file_lock = threading.Lock(), threading.Lock()
        self.both = threading.Barrier(2)
    def add(self):
        with self.values_lock:
            self.both.wait()
            print("blocks", flush=True)
            with self.file_lock:
                pass  # the main thread waits one line above
    def flush(self):
        with self.file_lock:
            self.both.wait()
            with self.values_lock:
                pass
stats = Stats()
threading.Thread(target=stats.flush, name="flusher", daemon=True).start()
stats.add()
"""


@pytest.mark.parametrize("by_py_spy", [True, False])
def test_a_lock_cycle_names_both_threads_and_both_lines(
    start: Start, monkeypatch: pytest.MonkeyPatch, by_py_spy: bool
) -> None:
    if not by_py_spy:
        monkeypatch.setenv(PY_SPY, "")
    _, report = look_when(lambda stall: stall.waits_for == "lock-order", start(TWO_LOCKS, stacks_on_signal=True))
    summary = report["summary"]
    assert report["cause"] == "hang.lock" and "train0.py:12" in summary and "train0.py:17" in summary
    assert "self.file_lock" in summary and "self.values_lock" in summary and "main thread" in summary
    # Only py-spy sees that it is the same object, and the names of threads.
    assert ("flusher" in summary) == by_py_spy and ("seem" in summary) != by_py_spy
    assert "same order" in report["fix"][0]


def test_locks_of_other_objects_with_the_same_name_are_no_cycle(start: Start) -> None:
    rank = start("""
        import threading, time
        class Stats:
            def __init__(self):
                self.a, self.b = threading.Lock(), threading.Lock()
            def add(self):
                with self.a:
                    print("blocks", flush=True)
                    with self.b:
                        pass
            def flush(self):
                with self.b:
                    with self.a:
                        pass
        mine, other = Stats(), Stats()
        mine.b.acquire()
        other.a.acquire()
        threading.Thread(target=other.flush, name="flusher", daemon=True).start()
        mine.add()
    """)
    stall, report = look_when(lambda stall: "flusher" in stall.detail, rank)
    assert stall.kind == "lock" and stall.waits_for == "", report


def test_a_lock_that_another_thread_holds_names_that_thread_and_its_line(start: Start) -> None:
    rank = start("""
        import threading, time
        LOCK = threading.Lock()
        held = threading.Event()
        def upload():
            with LOCK:
                held.set()
                time.sleep(1000)
        threading.Thread(target=upload, name="uploader", daemon=True).start()
        held.wait()
        print("blocks", flush=True)
        with LOCK:
            pass
    """)
    _, report = look_when(lambda stall: stall.waits_for == "held-lock", rank)
    assert "seems" not in report["summary"]
    assert "uploader" in report["summary"] and "train0.py:9, in upload" in report["summary"]


def test_a_thread_that_takes_its_own_lock_again(start: Start) -> None:
    rank = start("""
        import threading
        class Cache:
            lock = threading.Lock()
            def get(self):
                with self.lock:
                    return self.load()
            def load(self):
                print("blocks", flush=True)
                with self.lock:
                    pass
        Cache().get()
    """)
    _, report = look_when(lambda stall: stall.waits_for == "own-lock", rank)
    assert "train0.py:11" in report["summary"] and "train0.py:8" in report["summary"]


def test_a_condition_that_is_waited_for_is_not_called_a_held_lock(start: Start) -> None:
    rank = start("""
        import threading
        CONDITION = threading.Condition()
        def produce():
            print("blocks", flush=True)
            with CONDITION:
                CONDITION.wait()
        threading.Thread(target=produce, name="producer", daemon=True).start()
        with CONDITION:
            CONDITION.wait()
    """)
    stall, report = look_when(lambda stall: "producer" in stall.detail, rank)
    assert stall.kind == "lock" and stall.waits_for == "event" and "Condition.wait" in report["summary"]
    assert "fork" not in " ".join(report["fix"])


CHILDREN = {
    "reads its input": ("sort = Popen(['sort'], stdin=PIPE)", "sort.wait()", "child-input", ("standard input", "sort")),
    "its output is full": (
        "yes = Popen(['yes'], stdout=PIPE)",
        "yes.wait()",
        "child-output",
        ("standard output", "the pipe is full", "yes"),
    ),
    "sleeps": ("sleep = Popen(['sleep', '1000'])", "sleep.wait()", "", ("(sleep 1000)", "which is sleeping")),
    "waits for its own child": (
        "shell = Popen(['sh', '-c', 'sleep 1000; true'])",
        "shell.wait()",
        "",
        ("(sh -c sleep 1000; true), which is waiting for", "(sleep 1000)"),
    ),
    "says nothing": ("quiet = Popen(['sleep', '1000'], stdout=PIPE)", "quiet.stdout.read()", "child-output", ("output of", "sleep 1000")),
    "is stopped": (
        "import os, signal; one = Popen(['sleep', '1000']); os.kill(one.pid, signal.SIGSTOP)",
        "one.wait()",
        "",
        ("which is stopped",),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CHILDREN)
def test_a_child_is_named_with_what_it_waits_for(start: Start, case: str) -> None:
    before, blocks, waits_for, words = CHILDREN[case]
    rank = start(
        f"from subprocess import PIPE, Popen\nPopen(['true']).wait(); other = Popen(['sleep', '999'])\n{before}\n"
        f"print('blocks', flush=True)\n{blocks}\n"
    )
    _, report = look_when(lambda stall: all(word in stall.detail for word in words), rank)
    assert report["cause"] == "hang.child" and "train0.py:6" in report["summary"]
    assert "999" not in report["summary"]
    stall, _ = look(rank)
    assert stall.waits_for == waits_for


def test_of_several_children_none_is_named_alone_where_the_rank_waits_for_any(start: Start) -> None:
    rank = start("""
        import os, subprocess
        children = [subprocess.Popen(["sleep", str(seconds)]) for seconds in (1001, 1002)]
        print("blocks", flush=True)
        os.wait()
    """)
    _, report = look_when(lambda stall: "1001" in stall.detail, rank)
    assert report["cause"] == "hang.child" and "2 are alive" in report["summary"] and "1002" in report["summary"]


HOLDS = """
import fcntl, time
file = open("cache.lock", "w")
fcntl.{lock}(file, fcntl.LOCK_EX)
print("holds", flush=True)
time.sleep(1000)
"""
WANTS = """
import fcntl
file = open("cache.lock", "w")
print("blocks", flush=True)
fcntl.{lock}(file, fcntl.LOCK_EX)
"""


@pytest.mark.parametrize("lock", ["flock", "lockf"])
def test_a_file_lock_names_the_file_and_the_rank_that_holds_it(start: Start, lock: str, tmp_path: Path) -> None:
    holder = start(HOLDS.format(lock=lock))
    waiter = start(WANTS.format(lock=lock), 1)
    _, report = look_when(lambda stall: stall.waits_for == "file-lock", holder, waiter, accused=1)
    summary = report["summary"]
    assert report["cause"] == "hang.io" and report["rank"] == 1
    assert str(tmp_path / "cache.lock") in summary and f"rank 0 (process {holder.pid}" in summary
    assert "train1.py:6" in summary and "train0.py:7" in summary


def test_a_file_lock_that_was_inherited_names_the_process_that_kept_it(start: Start) -> None:
    """Its taker has ended; flock() locks live as long as anybody has the file open."""
    script = """
        import fcntl, subprocess
        taker = "import fcntl, os, subprocess; f = open('cache.lock', 'w'); fcntl.flock(f, fcntl.LOCK_EX);" \\
                "subprocess.Popen(['sleep', '1000'], pass_fds=[f.fileno()])"
        import sys
        subprocess.run([sys.executable, "-c", taker])
        print("blocks", flush=True)
        fcntl.flock(open("cache.lock", "w"), fcntl.LOCK_EX)
    """
    _, report = look_when(lambda stall: stall.waits_for == "file-lock", start(script))
    assert "(sleep 1000)" in report["summary"]


def test_a_named_pipe_without_a_writer_is_named(start: Start, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "commands")
    rank = start("print('blocks', flush=True)\nopen('commands').read()\n")
    _, report = look_when(lambda stall: stall.waits_for == "fifo", rank)
    assert report["cause"] == "hang.io" and str(tmp_path / "commands") in report["summary"]
    assert "no process" in report["summary"] and "for writing" in report["summary"]


def test_a_name_that_is_no_text_is_shown_in_one_printable_line(start: Start, tmp_path: Path) -> None:
    os.mkfifo(os.fsencode(tmp_path) + b"/a\nb\xff")
    rank = start("print('blocks', flush=True)\nopen(b'a\\nb\\xff').read()\n")
    _, report = look_when(lambda stall: stall.waits_for == "fifo", rank)
    assert report["summary"].isprintable() and report["summary"].encode()


def test_a_child_in_python_is_named_with_its_line(start: Start, tmp_path: Path) -> None:
    (tmp_path / "prepare.py").write_text("import time\n\ntime.sleep(1000)\n")
    rank = start("""
        import subprocess, sys
        print("blocks", flush=True)
        subprocess.run([sys.executable, "prepare.py"])
    """)
    _, report = look_when(lambda stall: "which is sleeping at" in stall.detail, rank)
    assert "prepare.py:3" in report["summary"] and "train0.py:5" in report["summary"]


def test_an_event_loop_whose_future_nobody_finishes(start: Start) -> None:
    rank = start("""
        import asyncio
        async def main():
            print("blocks", flush=True)
            await asyncio.get_running_loop().create_future()
        asyncio.run(main())
    """)
    _, report = look_when(lambda stall: stall.waits_for == "coroutine", rank)
    assert report["cause"] == "hang.io" and "asyncio" in report["summary"]


def test_a_named_pipe_names_the_process_that_has_its_other_end(start: Start, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "commands")
    rank = start("print('blocks', flush=True)\nopen('commands').read()\n")
    with open(tmp_path / "commands", "w"):
        _, report = look_when(lambda stall: f"process {os.getpid()} " in stall.detail, rank)
    assert "to read from" in report["summary"] and str(tmp_path / "commands") in report["summary"]


def test_a_pipe_whose_other_end_only_the_rank_itself_has(start: Start) -> None:
    rank = start("""
        import os
        read, write = os.pipe()
        print("blocks", flush=True)
        os.read(read, 1)
    """)
    _, report = look_when(lambda stall: stall.waits_for == "pipe", rank)
    assert "only the rank itself" in report["summary"]


@pytest.mark.parametrize("timeout", ["None", "1000"])
def test_a_socket_names_its_peer_and_the_process_there(start: Start, timeout: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        rank = start(f"""
            import socket
            connection = socket.create_connection(("127.0.0.1", {port}), timeout={timeout})
            print("blocks", flush=True)
            connection.recv(1)
        """)
        accepted = lambda stall: f"127.0.0.1:{port}" in stall.detail and f"process {os.getpid()} " in stall.detail  # noqa: E731
        stall, report = look_when(accepted, rank)
        assert report["cause"] == "hang.io" and stall.waits_for == "socket" and "not accepted" in report["summary"]
        connection, _ = listener.accept()
        with connection:
            stall, report = look_when(accepted, rank)
            assert "not accepted" not in report["summary"] and "for data from" in report["summary"]


def test_a_stopped_rank_without_py_spy_says_that_its_stack_was_not_read(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PY_SPY, "")
    rank = start("print('runs', flush=True)\nimport time; time.sleep(1000)\n")
    os.kill(rank.pid, signal.SIGSTOP)
    _, report = look_when(lambda stall: stall.kind == "stopped", rank)
    (line,) = [line for line in report["evidence"] if "could not be read" in line]
    assert "stack of rank 0" in line and "stopped" in line and "py-spy" in line


def test_a_stack_that_nobody_can_read_is_said_once_with_both_reasons(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PY_SPY, "")
    rank = start("print('blocks', flush=True)\nimport time; time.sleep(1000)\n")
    _, report = look_when(lambda stall: stall.kind == "sleep", rank)
    (line,) = [line for line in report["evidence"] if "could not be read" in line]
    assert "no handler" in line and "py-spy is not installed" in line


def test_a_rank_of_another_user_is_less_evidence_and_says_so(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PY_SPY, "")
    rank = start("print('blocks', flush=True)\nimport os; read, write = os.pipe(); os.read(read, 1)\n")

    def body() -> None:
        _, report = look(rank)
        unread = [line for line in report["evidence"] if "could not be read" in line]
        assert len(unread) == 2 and "stack of rank 0" in unread[0], report
        assert "system call of rank 0" in unread[1] and "ermission" in unread[1], report

    do_as(ATTACKER, body)


def test_a_data_set_that_waits_in_the_rank_itself_gets_no_advice_about_loader_workers() -> None:
    """With num_workers=0 torch calls the data set in the rank."""
    loader = "/usr/lib/python3.11/site-packages/torch/utils/data"
    frames = [
        ["Condition.wait", "/usr/lib/python3.11/threading.py", 327],
        ["Images.__getitem__", "/home/user/train.py", 8],
        ["_MapDatasetFetcher.fetch", f"{loader}/_utils/fetch.py", 52],
        ["_SingleProcessDataLoaderIter._next_data", f"{loader}/dataloader.py", 757],
        ["<module>", "/home/user/train.py", 20],
    ]
    thread = {"main": True, "frames": frames}
    seen = rank_inspection.parse_inspection(
        0, {"state": "S", "syscall": "futex", "samples": [[thread], [thread]], "stacks_by": "py-spy"}
    )
    stall = find_culprit({0: seen}, 1, {}, {}, {0: 4.0}, {0: 20})
    assert stall is not None
    report = make_stall_report(stall, "CPU0", "the time is over")
    assert report["cause"] == "hang.lock" and "train.py:8" in report["summary"]
    text = " ".join([report["summary"], *report["fix"]]).replace("all ranks and their workers", "")
    assert "DataLoader" not in text and "worker" not in text and "fork" not in text
