"""`stoker ladder`: imports one by one, then 1, half and all ranks; stops at the first rung that fails. Real processes."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conftest import Done, Stoker, at_length, tagged, wait_for
from stoker.contract.options import build_options
from stoker.control.launch import import_check, ladder
from stoker.control.launch.ladder import (
    LadderPlan,
    RungResult,
    compute_scaling,
    list_rungs,
    make_arguments,
    make_rung_arguments,
    parse_ladder_variables,
)
from stoker.control.plan.options import RunOptions
from stoker.control.plan.request import Request

STEP = (
    "import os, sys, time, stoker\ntime.sleep(0.1)\nfor i in range(10**6):\n    time.sleep(0.02); stoker.beat(step=i)\n"
)
# Through the real entry, whether or not the command is listed there yet.
COMMAND = "import sys\nfrom stoker.cli import main\nmain.COMMANDS.setdefault('ladder', '')\nsys.exit(main.main(['ladder', *sys.argv[1:]]))"
BEFORE = (
    "import sys\nfrom stoker.cli import ladder, run\nfrom stoker.contract.errors import Refusal\n"
    "try: sys.exit(ladder.before_run(run.parse(sys.argv[2:]), set(sys.argv[1].split(',')), 5))\n"
    "except Refusal as refusal: print('stoker:', refusal.line, file=sys.stderr); sys.exit(refusal.code)\n"
)


def drive(stoker: Stoker, code: str, *args: str, env: dict[str, str] | None = None) -> Done:
    done = subprocess.run(
        [sys.executable, "-c", code, *args],
        cwd=stoker.cwd,
        env={**stoker.env, **(env or {})},
        capture_output=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    return Done(done.returncode, done.stdout, done.stderr, stoker.cwd)


def climb(stoker: Stoker, *args: str, env: dict[str, str] | None = None) -> Done:
    return drive(stoker, COMMAND, *args, env=env)


def records(stoker: Stoker) -> list[str]:
    return (
        [path.name.split("-", 2)[2] for path in sorted((stoker.cwd / "runs").glob("2*"))]
        if (stoker.cwd / "runs").exists()
        else []
    )


# ---- planning ----


@pytest.mark.parametrize(
    ("world", "expected"), [(1, (1,)), (2, (1, 2)), (3, (1, 3)), (4, (1, 2, 4)), (5, (1, 2, 5)), (8, (1, 4, 8))]
)
def test_rungs(world: int, expected: tuple[int, ...]) -> None:
    assert list_rungs(world) == expected


def test_wanted_by_environment() -> None:
    assert (
        parse_ladder_variables({})
        == set()
        == parse_ladder_variables({"RUN_IMPORT_TEST": "0", "RUN_SINGLE_GPU_TEST": ""})
    )
    assert parse_ladder_variables({"RUN_IMPORT_TEST": "1"}) == {"imports"}
    assert parse_ladder_variables({"RUN_IMPORT_TEST": "true", "RUN_SINGLE_GPU_TEST": "1"}) == {"imports", "single"}


def test_imports_are_read_from_the_text() -> None:
    found = import_check.parse_imports(
        "from __future__ import annotations\nimport os, json, torch, numpy as np\nfrom torch import nn\nfrom torch.optim import AdamW\nfrom torch.optim import SGD\n"
        "from . import sibling\nfrom .other import x\n"
        "try:\n    import flash_attn\nexcept ImportError:\n    import fallback\n"
        "if TYPE_CHECKING:\n    import types_only\ndef later():\n    import lazy\n"
        "if __name__ == '__main__':\n    import at_last\nsys.path.insert(0, 'x')\nimport behind\nraise SystemExit('never executed')\n"
    )
    assert [(one.name, one.line, one.statements, one.optional) for one in found] == [
        ("torch", 2, ("import torch", "from torch import nn"), ""),
        ("numpy", 2, ("import numpy",), ""),
        ("torch.optim", 4, ("from torch.optim import AdamW", "from torch.optim import SGD"), ""),
        ("flash_attn", 9, ("import flash_attn",), "it is in a try or with block"),
        ("at_last", 17, ("import at_last",), ""),
        ("behind", 19, ("import behind",), "the script changes sys.path first"),
    ]


def test_options_survive_being_written_as_flags() -> None:
    from stoker.cli.run import parse

    words = [
        "--grace",
        "1m30s",
        "--ram-limit",
        "1.5GB",
        "--ssh-option=-p2222",
        "--env",
        "A=b c",
        "--env=B=--x",
        "--isolate",
        "-m",
        "--nproc-per-node",
        "2",
        "pkg.mod",
        "--",
        "--",
        "-x",
    ]
    asked = parse(words)
    again = parse(
        make_arguments({name: getattr(asked.options, name) for name in asked.given}, asked.script, asked.args)
    )
    assert (
        again == asked
        and again.options.grace == 90.0
        and again.options.env == ("A=b c", "B=--x")
        and again.args == ("--", "-x")
    )


def test_a_rung_is_a_short_run_of_its_own_on_the_same_cards() -> None:
    told = {
        "gpus": "any:4",
        "detach": True,
        "notify": "mail",
        "max_restarts": 3,
        "json": True,
        "name": "exp",
        "isolate": True,
        "env": ("A=1",),
    }
    request = Request(build_options(RunOptions, told), "t.py", ("--lr", "1"), frozenset(told))
    words = make_rung_arguments(request, LadderPlan(4, ("GPU-a", "GPU-b", "GPU-c", "GPU-d"), False), 2, 20, "now")
    flags = set(words[: words.index("--")])
    assert words[-4:] == ["--", "t.py", "--lr", "1"]
    assert flags == {
        "--gpus=GPU-a,GPU-b",
        "--nproc-per-node=2",
        "--stop-after-steps=20",
        "--name=exp-ladder-2",
        "--show=none",
        "--quiet",
        "--isolate",
        "--env=A=1",
        "--env=STOKER_LADDER=now",
    }


def test_what_scales() -> None:
    one = RungResult(1, 0, steps_per_s=10.0, rss=10**9, rss_all=10**9, host_used=3 * 10**9, host_total=16 * 10**9)
    good = compute_scaling(
        (
            one,
            RungResult(
                4, 0, steps_per_s=9.0, rss=10**9, rss_all=35 * 10**8, host_used=55 * 10**8, host_total=16 * 10**9
            ),
        ),
        4,
    )
    assert (good.throughput, good.memory, good.memory_needed, good.memory_others) == (
        "scales",
        "scales",
        35 * 10**8,
        2 * 10**9,
    )
    assert good.efficiency == pytest.approx(0.9)
    foretold = compute_scaling((one, RungResult(4, 137)), 15)
    assert (foretold.efficiency, foretold.memory, foretold.memory_needed) == (None, "does not scale", 15 * 10**9)
    assert (
        ladder.format_memory_need(foretold, 15)
        == "memory does not scale: 15 ranks will need 14.0 GiB of 14.9 GiB host memory, and other processes use 1.9 GiB"
    )
    assert compute_scaling((one, RungResult(2, 0, steps_per_s=7.9)), 2).throughput == "does not scale"
    assert compute_scaling((RungResult(1, 0),), 4) == ladder.Scaling()


# ---- climbing ----


def test_all_rungs_hold(stoker: Stoker) -> None:
    stoker.script("mine.py", "import os\nprint('noise')\nblob = bytearray(os.urandom(1 << 20)) * 30\n")
    done = climb(
        stoker,
        "--nproc-per-node",
        "4",
        "--steps",
        "5",
        "--json",
        stoker.script("t.py", "import mine, yaml\n" + STEP),
        "--",
        "--steps",
        "99",
    )
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert (found["schema"], found["status"], found["rungs"], found["steps"], found["world_size"]) == (
        1,
        "passed",
        [1, 2, 4],
        5,
        4,
    )
    mine, yaml, _ = found["imports"]
    assert (
        (mine["name"], yaml["name"]) == ("mine", "yaml")
        and 30e6 < mine["grew"] < 60e6
        and yaml["rss"] > mine["rss"]
        and mine["seconds"] > 0
    )
    for rung, ranks in zip(found["climbed"], (1, 2, 4), strict=True):
        run = json.loads((Path(stoker.cwd, rung["dir"]) / "run.json").read_text())
        assert (rung["ranks"], run["name"], run["plan"]["world_size"], run["args"]) == (
            ranks,
            f"t-ladder-{ranks}",
            ranks,
            ["--steps", "99"],
        )
        assert rung["steps"] >= 5 and rung["first_step_s"] > 0.1 and 0 < rung["steps_per_s"] < 51
        assert rung["rss"] > 30e6 and rung["rss_all"] >= ranks * 30e6 and rung["gpu"] is None
    assert (
        found["scaling"]["memory"] == "scales" and found["scaling"]["memory_needed"] == found["climbed"][2]["rss_all"]
    )
    assert "noise" not in done.err and "rung 2 of 3: 2 ranks, 5 steps" in done.err


def test_the_table_and_one_rank_alone(stoker: Stoker) -> None:
    done = climb(stoker, "--steps", "5", stoker.script("t.py", STEP.replace("import os", "import yaml, os")))
    assert done.code == 0 and records(stoker) == ["t-ladder-1"]
    lines = done.out.splitlines()
    assert any(line.split()[:1] == ["yaml"] and line.count("MiB") == 2 for line in lines)
    row = lines[next(n for n, line in enumerate(lines) if line.startswith("RUNG")) + 1].split()
    assert row[:2] == ["1", "1"] and "100%" in row
    assert "1 rank will need" in done.out and lines[-1] == "✓ ladder passed: 2 imports and 1 rank"
    again = climb(stoker, "--steps", "5", "t.py")
    assert again.code == 0 and len(records(stoker)) == 2, "a record of its own each time"


def test_a_script_that_never_steps_runs_to_its_end(stoker: Stoker) -> None:
    done = climb(stoker, "--nproc-per-node", "2", stoker.script("t.py", "print('done')"))
    assert done.code == 0 and records(stoker) == ["t-ladder-1", "t-ladder-2"] and "throughput: not measured" in done.out


def test_the_first_rung_that_fails_ends_it(stoker: Stoker) -> None:
    script = stoker.script(
        "t.py",
        STEP.replace(
            "time.sleep(0.1)", "if os.environ['WORLD_SIZE'] == '2' and os.environ['RANK'] == '1': sys.exit(9)", 1
        ),
    )
    done = climb(stoker, "--nproc-per-node", "4", "--steps", "5", "--max-restarts", "2", script)
    assert done.code == 9 and records(stoker) == ["t-ladder-1", "t-ladder-2"]
    assert done.verdict["cause"] == "rank.exit" and done.verdict["rank"] == 1
    end = done.out[done.out.index("✗") :]
    assert (
        "with 2 ranks: rank.exit, exit code 9" in end
        and done.verdict["summary"] in end
        and all(fix in end for fix in done.verdict["fix"])
        and "stoker why" in end
    )
    assert "4 ranks will need" in done.out


@pytest.mark.parametrize(
    ("module", "code", "says"),
    [
        ("import nowhere_to_be_found", 1, "No module named 'nowhere_to_be_found'"),
        ("from yaml import no_such_name", 1, "ImportError: cannot import name 'no_such_name'"),
        ("raise OSError('libfoo.so: cannot open')", 1, "OSError: libfoo.so"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", 139, "kills the process: SIGSEGV"),
        ("import os; os._exit(0)", 70, "ends the process with exit code 0"),
    ],
)
def test_an_import_that_fails(stoker: Stoker, module: str, code: int, says: str) -> None:
    stoker.script("bad.py", module + "\n")
    done = climb(stoker, "--json", stoker.script("t.py", "import yaml\nimport bad\nimport never\n" + STEP))
    found = json.loads(done.out)
    assert (done.code, found["status"], found["verdict"]["cause"], records(stoker)) == (
        code,
        "failed",
        "env.import",
        [],
    )
    assert (
        "import bad" in found["verdict"]["summary"]
        and "t.py:2" in found["verdict"]["summary"]
        and says in found["verdict"]["summary"]
    )
    assert found["verdict"]["fix"] and [one["name"] for one in found["imports"]] == ["yaml"] and found["climbed"] == []


def test_an_import_that_hangs_is_named_and_leaves_nothing(stoker: Stoker, monkeypatch: pytest.MonkeyPatch) -> None:
    stoker.script(
        "slow.py",
        "import subprocess, time\nchild = subprocess.Popen(['sleep', '60'])\nopen('pid', 'w').write(str(child.pid))\ntime.sleep(60)\n",
    )
    stoker.script("t.py", "import slow\n")
    monkeypatch.chdir(stoker.cwd)
    monkeypatch.setattr(import_check, "IMPORT_S", 1.0)
    said: list[str] = []
    verdict = import_check.try_imports(
        Request(RunOptions(), "t.py", (), frozenset()), [], [], said.append, lambda: False
    )
    assert (
        verdict is not None and verdict.exit_code == 70 and "import slow at t.py:1 has not finished" in verdict.summary
    )
    pid = int((stoker.cwd / "pid").read_text())
    assert wait_for(lambda: True if _gone(pid) else None, 5)


def _gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_optional_imports_and_the_scripts_own_path(stoker: Stoker) -> None:
    (stoker.cwd / "lib").mkdir()
    (stoker.cwd / "lib" / "hidden.py").write_text("import sys\nassert sys.argv[1:] == ['--x']\n")
    text = "try:\n    import nope_a\nexcept ImportError: pass\nimport sys\nsys.path.insert(0, 'lib')\nimport hidden\n"
    done = climb(stoker, "--env", "PYTHONPATH=elsewhere", stoker.script("t.py", text), "--x")
    assert (
        done.code == 0
        and "nope_a" in done.out
        and "it is in a try or with block" in done.out
        and "the script changes sys.path first" in done.out
    )


def test_gpus_are_those_of_the_whole_run(stoker: Stoker, box: Callable[..., dict[str, str]]) -> None:
    env = box(4)
    script = stoker.script("t.py", "import os\nprint(os.environ.get('CUDA_VISIBLE_DEVICES'), os.environ['GPU_RANK'])")
    done = climb(stoker, "--gpus", "any:2", "--notify", "touch told", script, env={**env, "PET_MAX_RESTARTS": "3"})
    assert done.code == 0, done.out
    assert records(stoker) == ["t-ladder-1", "t-ladder-2"] and not (stoker.cwd / "told").exists()
    first, last = (
        stoker.cwd / "runs" / name for name in sorted(os.listdir(stoker.cwd / "runs")) if name.startswith("2")
    )
    assert (first / "attempt-0/rank-0.log").read_text().count("GPU-") == 1 and (
        last / "attempt-0/rank-1.log"
    ).read_text().count("GPU-") == 2
    cpu = climb(stoker, "--nproc-per-node", "cpu", "--dry-run", "--json", script, env=env)
    assert json.loads(cpu.out) == {"schema": 1, "imports": [], "rungs": [1, 4, 8], "steps": 20}
    few = climb(stoker, "--nproc-per-node", "9", script, env=env)
    assert few.code == 69 and "9 ranks requested" in few.out


def test_cpu_ranks_where_there_are_gpus(stoker: Stoker, box: Callable[..., dict[str, str]]) -> None:
    (stoker.cwd / "o.yaml").write_text("nproc_per_node: cpu\n")
    done = climb(
        stoker,
        "--config",
        "o.yaml",
        stoker.script("t.py", "import os\nprint(repr(os.environ['CUDA_VISIBLE_DEVICES']))"),
        env=box(2, cores=2),
    )
    assert done.code == 0 and records(stoker) == ["t-ladder-1", "t-ladder-2"]
    assert done.log(1) == b"''\n"


def test_before_a_run(stoker: Stoker) -> None:
    stoker.script("t.py", "import yaml\n" + STEP)
    only = drive(stoker, BEFORE, "imports", "t.py")
    assert only.code == 0 and records(stoker) == [] and "yaml" in only.err and not only.out
    single = drive(
        stoker,
        BEFORE,
        "single",
        "--nproc-per-node",
        "4",
        "--stop-after-steps",
        "3",
        "t.py",
        env={"RUN_SINGLE_GPU_TEST": "1"},
    )
    assert (
        single.code == 0
        and records(stoker) == ["t-ladder-1"]
        and "4 ranks will need" in single.err
        and "yaml" not in single.err
        and not single.out
    )
    assert "3 steps" in single.err
    missing = drive(stoker, BEFORE, "all", "--name", "x", "nothere.py")
    assert missing.code == 66 and "script nothere.py does not exist" in missing.err


@pytest.mark.parametrize(("words", "code", "says"), [
    (["--steps", "0", "t.py"], 64, "--steps must be 1 or more, got 0"), (["--stepz", "2", "t.py"], 64, "did you mean --steps"), ([], 64, "the script is missing"),
    (["--hosts", "a,b", "t.py"], 64, "one machine"), (["--detach", "t.py"], 64, "foreground"),
])  # fmt: skip
def test_refusals(stoker: Stoker, words: list[str], code: int, says: str) -> None:
    stoker.script("t.py", STEP)
    done = climb(stoker, *words)
    assert done.code == code and says in done.err and done.err.count("\n") == 1


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_stopped_on_the_way_leaves_nothing(stoker: Stoker, signum: int) -> None:
    stoker.script("t.py", "import time\nopen('up', 'w').close()\ntime.sleep(600)")
    run = subprocess.Popen(
        [sys.executable, "-c", COMMAND, "--nproc-per-node", "2", "t.py"],
        cwd=stoker.cwd,
        env=stoker.env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert wait_for(lambda: True if (stoker.cwd / "up").exists() else None, 20)
    run.send_signal(signum)
    out, _ = run.communicate(timeout=100)
    assert run.returncode == (130 if signum == signal.SIGINT else -signum)
    if signum == signal.SIGINT:
        assert b"stopped by SIGINT" in out and records(stoker) == ["t-ladder-1"]
    assert wait_for(lambda: True if not tagged(stoker.cwd) else None, 10)


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="no torch here")
@at_length
def test_a_torch_script(stoker: Stoker) -> None:
    text = (
        "import torch, time\nfrom torch import nn\nw = nn.Linear(8, 8)\no = torch.optim.SGD(w.parameters(), 0.1)\n"
        "while True:\n    w(torch.ones(8)).sum().backward(); o.step(); time.sleep(0.01)\n"
    )
    done = climb(stoker, "--steps", "5", "--json", stoker.script("t.py", text))
    assert done.code == 0, done.err
    found: dict[str, Any] = json.loads(done.out)
    assert [one["name"] for one in found["imports"]] == ["torch"] and found["imports"][0]["grew"] > 50e6
    assert all(rung["steps_per_s"] > 0 and rung["rss"] > 50e6 for rung in found["climbed"])
