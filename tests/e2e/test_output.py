"""What ranks print: every byte in the file, whole lines on the console, nobody held up."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys

import pytest

from conftest import Stoker, screen_of, wait_for
from measuring import measured


def test_every_byte_arrives_in_order(stoker: Stoker) -> None:
    """stdout and stderr interleaved, a progress bar, bytes that are no text, a 10 MB line, no last newline. Of the bar the file has its last state."""
    no_text = bytes(code for code in range(256) if code not in b"\r\x1b")
    script = stoker.script(
        "bytes.py",
        f"import os, sys\nw = os.write\nBYTES = {no_text!r}\n"
        "w(1, b'out 1\\n'); w(2, b'err 1\\n'); w(1, b'out 2\\n'); w(2, b'err 2\\n')\n"
        "for i in range(0, 101, 10): w(2, b'\\r%3d%%|' % i + b'#' * (i // 10))\n"
        "w(2, b'\\n'); w(1, BYTES + b'\\n'); w(1, b'L' * 10_000_000 + b'\\n'); w(1, b'the end')\n",
    )
    with open(stoker.cwd / "console", "wb") as console:
        run = stoker.start("run", "--nproc-per-node", "2", "--quiet", script, stdout=console, stderr=console)
        assert run.wait(60) == 0
    want = b"out 1\nerr 1\nout 2\nerr 2\n100%|" + b"#" * 10 + b"\n" + no_text + b"\n" + b"L" * 10_000_000 + b"\nthe end"
    done = stoker.result()
    assert done.log(0) == want and done.log(1) == want
    shown = (stoker.cwd / "console").read_bytes()
    for rank in (b"CPU0:", b"CPU1:"):
        assert rank + b"L" * 10_000_000 + b"\n" in shown
        assert rank + b"the end\n" in shown and rank + b"err 2\n" in shown
        assert b"\r" + rank + b" 10%|#\r" in shown


BAR = """
import os, sys, time
for i in range(1, 8):
    sys.stderr.write(f"\\r\\x1b[32m{i * 10}%\\x1b[0m|{'#' * i}")
    if i == 4:
        sys.stderr.write("\\r" + " " * 20 + "\\r{'loss': '2.1'}\\n")
    sys.stderr.flush()
    time.sleep(0.1)
os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("where", ["terminal", "file"])
def test_our_lines_begin_on_a_fresh_line_when_a_bar_is_drawn(stoker: Stoker, where: str, ranks: int) -> None:
    """A rank is killed with its progress bar half way. The bar is not in its log, and on a terminal it is cleared."""
    script = stoker.script("bar.py", BAR)
    if where == "terminal":
        ours, console = os.openpty()
    else:
        console = os.open(stoker.cwd / "console", os.O_RDWR | os.O_CREAT)
    run = stoker.start("run", "--nproc-per-node", str(ranks), script, stdout=console, stderr=console)
    shown = b""
    if where == "terminal":
        os.close(console)
        with contextlib.suppress(OSError):  # a terminal whose last user is gone
            while data := os.read(ours, 1 << 16):
                shown += data
        os.close(ours)
    assert run.wait(60) == 137
    if where == "file":
        os.close(console)
        shown = (stoker.cwd / "console").read_bytes()
    screen = (
        screen_of(shown) if where == "terminal" else shown.replace(b"\r\n", b"\n").replace(b"\r", b"\n").splitlines()
    )
    ended = [line for line in screen if b"was killed with SIGKILL" in line or b"stoker: failed" in line]
    assert len(ended) >= 2 and all(line.startswith(b"stoker: ") for line in ended), shown
    if where == "file":
        assert b"\rstoker: " not in shown
    else:
        assert not any(b"70%" in line for line in screen), "a bar that is over stays on the screen"
    log = stoker.result().log(0)
    assert log.startswith(b"{'loss': '2.1'}\n") and log.count(b"%") <= 1 and b"\r" not in log and b"\x1b" not in log


def test_stdout_and_stderr_stay_apart_where_the_caller_keeps_them_apart(stoker: Stoker) -> None:
    done = stoker("run", stoker.script("two.py", "import sys\nprint('to out')\nprint('to err', file=sys.stderr)\n"))
    assert done.out == "to out\n" and "CPU0:to err\n" in done.err and "to err" not in done.out


@pytest.mark.parametrize(
    ("flags", "out", "err"),
    [
        (["--show", "0"], {"0 out"}, {"0 err"}),
        (["--show", "errors"], set(), {"0 err", "1 err"}),
        (["--show", "none"], set(), set()),
        (["--local-ranks-filter", "1"], {"1 out"}, {"1 err"}),
        (["--redirects", "1"], set(), {"0 err", "1 err"}),
        (["-r", "0:3"], {"1 out"}, {"1 err"}),
        (["--tee", "3"], {"0 out", "1 out"}, {"0 err", "1 err"}),
    ],
)
def test_what_the_console_gets(stoker: Stoker, flags: list[str], out: set[str], err: set[str]) -> None:
    script = stoker.script(
        "say.py", "import os, sys\nr = os.environ['RANK']\nprint(r, 'out')\nprint(r, 'err', file=sys.stderr)\n"
    )
    done = stoker("run", "--nproc-per-node", "2", *flags, script)
    assert {line.partition(":")[2] for line in done.out.splitlines()} == out
    assert {line.partition(":")[2] for line in done.err.splitlines() if line.startswith("CPU")} == err
    assert all(sorted(done.log(rank).splitlines()) == [b"%d err" % rank, b"%d out" % rank] for rank in (0, 1))


def test_unbuffered_streams_are_not_torn_in_the_file(stoker: Stoker) -> None:
    """print() writes piece by piece with PYTHONUNBUFFERED; two pipes must not mix the pieces of two lines."""
    script = stoker.script(
        "u.py",
        "import sys\nfor i in range(300): print('out', i, 'of', 300); print('err', i, 'of', 300, file=sys.stderr)\n",
    )
    done = stoker("run", "--nproc-per-node", "2", "--tee", "3", script, env={"PYTHONUNBUFFERED": "1"})
    for rank in (0, 1):
        lines = done.log(rank).decode().splitlines()
        assert sorted(lines) == sorted(f"{word} {i} of 300" for word in ("out", "err") for i in range(300))


def test_log_dir_has_torchruns_layout(stoker: Stoker) -> None:
    script = stoker.script("say.py", "import sys\nprint('out')\nprint('err', file=sys.stderr)\n")
    done = stoker("run", "--nproc-per-node", "2", "--log-dir", "logs", "--redirects", "0:2", "--tee", "1:1", script)
    (base,) = (stoker.cwd / "logs").glob(f"{done.run_dir.name}_????????/attempt_0")
    found = {str(path.relative_to(base)): path.read_text() for path in base.rglob("*.log")}
    assert found == {"0/stderr.log": "err\n", "1/stdout.log": "out\n"}


def test_a_flood_blocks_nobody_and_loses_no_byte(stoker: Stoker) -> None:
    """Rank 0 prints 60 MB into a console that reads nothing; rank 1 must not notice, and the file must be whole."""
    script = stoker.script(
        "flood.py",
        "import os, time\n"
        "if os.environ['RANK'] == '0':\n"
        "    line = b'x' * 99 + b'\\n'\n    block = line * 10_000\n"
        "    for _ in range(60):\n        sent = 0\n        while sent < len(block): sent += os.write(1, block[sent:])\n"
        "else:\n    for i in range(20): print('tick', i, time.time(), flush=True); time.sleep(0.05)\n",
    )
    read, write = os.pipe()
    try:
        run = stoker.start("run", "--nproc-per-node", "2", script, stdout=write, stderr=write)
        os.close(write)
        logs = [stoker.cwd / f"runs/latest/attempt-0/rank-{rank}.log" for rank in (0, 1)]

        def whole() -> bool | None:
            """Before the run's end: it waits 2 s for a console that reads nothing."""
            if not all(log.exists() for log in logs):
                return None
            return (logs[0].stat().st_size >= 60 * 10_000 * 100 and logs[1].read_bytes().count(b"tick") == 20) or None

        assert wait_for(whole, 60)
        shown = b""
        while data := os.read(read, 1 << 20):
            shown += data
        assert run.wait(100) == 0 and logs[0].stat().st_size == 60 * 10_000 * 100
    finally:
        os.close(read)
    lines = [line for line in shown.split(b"\n") if b"CPU0:" in line]
    torn = [line for line in lines if line != b"CPU0:" + b"x" * 99]
    assert not torn, "torn lines on the console"
    skipped = [int(line.split()[1]) for line in shown.split(b"\n") if b"lines skipped here" in line]
    assert sum(skipped) + len(lines) + shown.count(b"CPU1:") == 600_020


def test_a_dead_console_does_not_end_the_run(stoker: Stoker) -> None:
    script = stoker.script(
        "many.py", "import time\nfor i in range(200): print('line', i, flush=True); time.sleep(0.005)\n"
    )
    command = f"{sys.executable} -m stoker run {script} 2>/dev/null | head -1"
    done = subprocess.run(
        ["sh", "-c", command], cwd=stoker.cwd, env=stoker.env, capture_output=True, timeout=60, check=True
    )
    assert done.stdout == b"line 0\n"
    assert wait_for(lambda: True if (stoker.cwd / "runs/latest/verdict.json").exists() else None, 20)
    assert stoker.result().verdict["status"] == "completed"
    assert stoker.result().log(0).count(b"\n") == 200


def test_output_is_seen_while_it_is_printed(stoker: Stoker) -> None:
    script = stoker.script("slow.py", "import time\nprint('early')\ntime.sleep(600)\n")
    run = stoker.start("run", "--quiet", script)
    assert run.stdout is not None
    while b"early" not in run.stdout.readline():
        continue
    run.terminate()
    assert run.wait(100) == 143


@pytest.mark.parametrize("end", ["\\n", "\\r"])
def test_a_line_of_100_mb_does_not_fill_the_launchers_memory(stoker: Stoker, end: str) -> None:
    """A script that prints an array, or a progress bar that is never redrawn."""
    lines = f"import sys\nfor _ in range(100):\n    sys.stdout.write('x' * 1_000_000)\nsys.stdout.write('{end}')\n"
    script = stoker.script("long.py", lines)
    argv = [sys.executable, "-m", "stoker", "run", "--nproc-per-node", "2", "--show", "0", script]
    done = subprocess.run(
        measured(argv), cwd=stoker.cwd, env=stoker.environment({}), capture_output=True, timeout=120, check=False
    )
    code, _, kilobytes = json.loads(done.stdout)
    assert code == 0, done.stderr
    assert kilobytes < 250_000
    assert stoker.result().log(1).count(b"x") == 100_000_000
