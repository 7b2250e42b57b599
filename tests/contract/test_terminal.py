"""What people see on a terminal: one bar and no rest of it, short step lines, colours. Files and pipes have none of that."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import Stoker, Terminal, at_length, wait_for
from stoker.contract import progress
from stoker.contract.progress import BYTES, ProgressState
from stoker.control.launch.console import LineCutter
from stoker.control.launch.short_lines import LauncherLines, RoleLines, ShortLines, shorten_step_line

# A program that works for as long as it is left to, with lines in between.
WORK = """
import sys, time
from stoker.contract import progress, terminal
progress.AFTER_S, progress.SAY_S = 0.0, 0.2
with terminal.masked_output(), progress.Progress("hashing", 50e6, unit="B", say=terminal.print_status) as bar:
    for block in range(50 if sys.argv[1] == "whole" else 100_000):
        bar.tick(1e6)
        if block == 20:
            print("half a way")
        time.sleep(0.02)
print("done")
"""


def test_a_bar_is_gone_at_the_end_and_between_lines(stoker: Stoker) -> None:
    stoker.script("work.py", WORK)
    whole = Terminal(stoker, ["work.py", "whole"], (80, 24))
    assert whole.wait() == 0 and "hashing [██".encode() in whole.shown and b"MiB/s | ETA 0:" in whole.shown
    assert [line for line in whole.lines if line] == ["half a way", "done"]
    stopped = Terminal(stoker, ["work.py", "on"], (80, 24))
    assert wait_for(lambda: (b"half a way" in stopped.shown and stopped.shown.rfind(b"ETA") > 2000) or None, 60)
    stopped.keys(b"\x03")
    assert stopped.wait() != 0 and not any("ETA" in line for line in stopped.lines), stopped.lines


def test_a_pipe_gets_lines_and_no_codes(stoker: Stoker) -> None:
    script = stoker.script("work.py", WORK)
    done = subprocess.run(
        [sys.executable, script, "whole"], cwd=stoker.cwd, env=stoker.env, capture_output=True, check=True
    )
    assert done.stdout == b"half a way\ndone\n" and b"\x1b" not in done.stderr and b"\r" not in done.stderr
    assert re.match(rb"stoker: hashing: [\d.]+/47\.7 MiB, [\d.]+ MiB/s, \d+ %, ETA 0:0\d\n", done.stderr), done.stderr


@pytest.mark.parametrize("columns", [20, 40, 60, 80, 100])
def test_a_bar_fits_and_has_the_time_left(columns: int) -> None:
    for state in (
        ProgressState("training", 1200, 10_000, note="loss 2.1234", left=4000.0),
        ProgressState("x", 1, 0, BYTES),
    ):
        assert len(state.bar(columns)) <= max(columns, 31) and "ETA" in state.bar(columns)


STEP = "Step [100/2000] | Loss: 3.2564 | LR: 1.00e-03 | Grad Norm: 1.0072 | ETA: 1:12 | 13,409 tok/s | MFU: 41.2% | Mem: 61.3 GiB"


@pytest.mark.parametrize(
    ("line", "room", "shown"),
    [
        (STEP, 100, "Step 100/2000 | Loss 3.2564 | LR 1.00e-03 | Grad 1.0072 | 13,409 tok/s | MFU 41.2% | ETA 1:12"),
        (STEP, 70, "Step 100/2000 | Loss 3.2564 | Grad 1.0072 | 13,409 tok/s | ETA 1:12"),
        (STEP, 20, "Step 100/2000 | Loss 3.2564 | 13,409 tok/s | ETA 1:12"),
        ("Step [0/9] | Loss: nan | LR: 1.00e-05 | ETA: ?:?? | ? tok/s | MFU: n/a | Mem: n/a | right: 0.5000", 60, "Step 0/9 | Loss nan | LR 1.00e-05 | ? tok/s | ETA ?:??"),
        ("Step [0/9] | Reward: 0.123 | Right: 12% | Loss: 0.1234 | KL: n/a | Entropy: 1.234 | Length: 9.0 | Cut: 0% | LR: 1.00e-05 | Grad Norm: 1.2345 | ETA: 1:05:30", 94, "Step 0/9 | Reward 0.123 | Right 12% | Loss 0.1234 | LR 1.00e-05 | Grad 1.2345 | ETA 1:05:30"),
        ("Step [0/100000] | Reward: 0.123 | Right: 12% | Loss: 0.1234 | KL: n/a | ETA: 21:05:30", 64, "Step 0/100000 | Reward 0.123 | Right 12% | ETA 21:05:30"),
    ],
)  # fmt: skip
def test_a_step_line_fits(line: str, room: int, shown: str) -> None:
    assert shorten_step_line(line, room) == shown


def test_lines_of_a_recipe_name_the_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    first, second = (LineCutter(name, ShortLines(name, steps=name == b"GPU0:")) for name in (b"GPU0:", b"GPU1:"))
    step = f"INFO | [GPU 0] {STEP}\n".encode()
    assert first.feed(step) == b"GPU0: Step 100/2000 | Loss 3.2564 | Grad 1.0072 | 13,409 tok/s | ETA 1:12\n"
    assert second.feed(step.replace(b"GPU 0", b"GPU 1")) == b""
    assert second.feed(b"INFO | [GPU 1] non-finite loss\nits own\n") == b"GPU1: non-finite loss\nGPU1:its own\n"
    # A line that comes in pieces is shortened as a whole; a prompt is shown at once.
    assert first.feed(b"INFO | [GPU 0] model") + first.partial() == b"" and first.feed(b": x\n") == b"GPU0: model: x\n"
    assert first.feed(b"(Pdb) ") + first.partial() == b"GPU0:(Pdb) " and first.feed(b"n\nnext\n") == b"n\nGPU0:next\n"
    # Behind a bar, which is redrawn with \r.
    assert first.feed(b"bar 1\r\r") == b"GPU0:bar 1\r" and first.feed(step).startswith(b"\rGPU0:\x1b[K Step 100/2000")
    assert first.feed(b"bar 2\r\r" + step).startswith(b"GPU0:bar 2\r\rGPU0:\x1b[K Step 100/2000")
    bare = LineCutter(b"", ShortLines(b"", steps=True))
    assert bare.feed(step).startswith(b"GPU0: Step 100/2000 | ")


def test_a_path_that_is_too_long_is_shown_from_here(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    here = tmp_path_factory.mktemp("here")
    monkeypatch.chdir(here)
    shorten = ShortLines(b"10.94.0.1/CPU0:", steps=True)
    saved = f"{here}/runs/20261117-214701-pretrain/checkpoints/step-00000016"
    assert shorten(f"INFO | [CPU 0] stopped: 16 of 200 steps; saved {saved}".encode()) == (
        b" stopped: 16 of 200 steps; saved\n   runs/20261117-214701-pretrain/checkpoints/step-00000016"
    )
    assert shorten(b"INFO | [CPU 0] read %s/x" % bytes(here)) == b" read %s/x" % bytes(here), "it fits"


def test_the_launchers_log_on_a_terminal() -> None:
    line, own = b"[Rank 0] MEM:START RAM 12 MB (rank) 6.2/25.3 GB (host)", LauncherLines(True, lambda: 40)
    folded = b"[Rank 0] MEM:START RAM 12 MB (rank)\n  6.2/25.3 GB (host)"
    assert own(line) == folded and own("✓ ok".encode()) == "\x1b[32m✓ ok\x1b[0m".encode()


def test_a_roles_lines_are_shown_as_those_of_a_run_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    own = LauncherLines(False, lambda: 80 - len("[trainer] "))
    cutter = LineCutter(b"[trainer] ", RoleLines(b"[trainer] ", own, recipe=True, hosts=["b", "a"]))
    step = f"INFO | [GPU 0] {STEP}\n".encode()
    assert cutter.feed(b"b/GPU0:weights from x\n") == b"[trainer] b/GPU0:weights from x\n"
    assert (
        cutter.feed(b"b/GPU0:" + step) == b"[trainer] b/GPU0: Step 100/2000 | Loss 3.2564 | 13,409 tok/s | ETA 1:12\n"
    )
    assert cutter.feed(b"a/GPU0:" + step) == b"", "one rank's are enough"
    row = b"  length         141 steps, 3 passes over your 199 conversations  sft's default; --epochs or --max-steps\n"
    assert cutter.feed(row).split(b"\n") == [
        b"[trainer]   length         141 steps, 3 passes over your 199 conversations",
        b"[trainer]                  sft's default; --epochs or --max-steps",
        b"",
    ]
    server = LineCutter(b"[server] ", RoleLines(b"[server] ", own, recipe=False))
    words = b"stoker: " + b"word " * 14
    assert server.feed(b"CPU0:" + words + b"\n").count(b"\n[server] CPU0:  word") == 1
    assert server.feed(b"CPU0:" + b"word " * 20 + b"\n") == b"[server] CPU0:" + b"word " * 20 + b"\n", "its own"


def test_a_progress_file_of_others_is_data(tmp_path: Path) -> None:
    path = tmp_path / "progress.json"
    for text in ("", "{", "[]", '{"schema": 2}', '{"schema": 1, "what": 5}', '{"schema": 1, "what": "x", "more": 1}'):
        path.write_text(text)
        assert progress.read_progress(str(tmp_path)) is None
    path.write_text(json.dumps({"schema": 1, "what": "x", "done": 1, "total": 4, "left": 5.5}))
    assert progress.read_progress(str(tmp_path)) == ProgressState("x", 1, 4, left=5.5)


@pytest.mark.parametrize(("where", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_errors_are_red(stoker: Stoker, where: dict[str, str], coloured: bool) -> None:
    for command in (["-m", "stoker", "run", "nowhere.py"], ["-m", "stoker", "rnu"]):
        seen = Terminal(stoker, command, (80, 24), where)
        assert seen.wait() in (64, 66) and (b"\x1b[31mstoker: " in seen.shown) == coloured, seen.shown
        piped = stoker(*command[2:])
        assert "\x1b" not in piped.out + piped.err


@at_length
def test_a_training_on_a_terminal_its_attach_and_its_stop(stoker: Stoker) -> None:
    (stoker.cwd / "book.txt").write_text(
        "".join(f"line {n}: the dog jumps {n * 7919 % 1000} times\n" for n in range(4000))
    )
    sizes = [
        "--model.layers",
        "1",
        "--model.dim",
        "32",
        "--model.heads",
        "2",
        "--data.context_length",
        "32",
        "--batch.tokens",
        "64",
    ]
    data = [
        "--data",
        "book.txt",
        "--tokenizer.path",
        "bytes",
        "--checkpoint.every",
        "0",
        "--log-every",
        "50",
        "--max-steps",
        "1000000",
    ]
    argv = ["-m", "stoker", "train", "pretrain", *data, *sizes, "--nproc-per-node", "2"]
    run = Terminal(stoker, argv, (100, 30), {"OMP_NUM_THREADS": "1"})
    bar = "training [·".encode()
    assert wait_for(lambda: (run.shown.count(b" Step ") > 2 and run.shown.count(bar) > 3) or None, 120), run.lines
    attached = Terminal(stoker, ["-m", "stoker", "attach"], (80, 24))
    assert wait_for(lambda: (bar in attached.shown and b" Step " in attached.shown) or None, 60), attached.lines
    attached.keys(b"\x03")
    assert attached.wait() == 0 and run.process.poll() is None
    assert attached.lines[-3].startswith("left run ") and not any("training [" in line for line in attached.lines)
    run.keys(b"\x03")
    assert run.wait() == 130
    assert not any("training [" in line or "^C" in line for line in run.lines), run.lines
    steps = [line for line in run.lines if " Step " in line]
    assert steps and all(re.match(r"CPU0: Step \d+/1000000 \| Loss \d", line) and len(line) <= 100 for line in steps)
    assert any(re.search(r"MEM:POST-IMPORT RAM \d{2,3} MB \(rank\)", line) for line in run.lines)
    assert b"\x1b[33mstoker: stopped by SIGINT" in run.shown and "\x1b[32m✓ ".encode() in run.shown
    # The files have what the field notes have, and no control codes.
    folder = stoker.latest
    for rank in (0, 1):
        log = (folder / "attempt-0" / f"rank-{rank}.log").read_bytes()
        line = rb"INFO \| \[CPU %d\] Step \[0/1000000\] \| Loss: [\d.]+ \| LR: [\d.e-]+ \| Grad Norm: [\d.]+ \| ETA: "
        assert re.search(line % rank, log) and b"\x1b" not in log and b"\r" not in log and b"training [" not in log
    own = (folder / "stoker.log").read_bytes()
    assert re.search(rb"\[Rank 0\] MEM:POST-IMPORT RAM \d{2,3} MB \(rank\) ", own) and b"\x1b" not in own
    assert not os.path.exists(folder / "progress.json")


def test_a_terminal_that_knows_no_codes_gets_none(stoker: Stoker) -> None:
    seen = Terminal(stoker, ["-m", "stoker", "run", "--no-python", "false"], (80, 24), {"TERM": "dumb"})
    assert seen.wait() == 1 and b"stoker: failed after" in seen.shown and b"\x1b" not in seen.shown, seen.shown


def test_json_of_a_row_with_a_secret_stays_json(stoker: Stoker) -> None:
    """The value is masked before it becomes text: a masked text may lack a quote."""
    (stoker.cwd / "rows.jsonl").write_text(json.dumps({"text": 'set api_key = "abc123def'}) + "\n")
    done = stoker("data", "show", "rows.jsonl", "--json")
    assert done.code == 0 and "abc123def" not in done.out
    assert json.loads(done.out)["schema"] == 1
