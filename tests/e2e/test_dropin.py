"""torchrun's place: the same command lines through both launchers, compared for exit, files, environment and order.

The cases are those of PyTorch's own launcher tests, written anew. What differs must be in DIFFERENCES, which docs/torchrun.md shows row by row.
A few cases run always; `bash test.sh --all` runs all of them (torchrun takes 2 to 3 seconds to start).
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from conftest import EVERYTHING, Stoker, at_length, wait_for
from forked_ranks import free_port
from stoker.cli.run import build_parser, split
from stoker.control.plan.options import TORCHRUN_VARIABLES

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="no torch, so no torchrun to compare with"
)
PAGE = Path(__file__).parents[2] / "docs" / "torchrun.md"


class Difference(NamedTuple):
    what: str
    torchrun: str
    stoker: str
    test: str  # that shows it
    keys: tuple[str, ...] = ()  # of a comparison: these may differ


DIFFERENCES = (
    Difference("ranks without `--nproc-per-node`", "1", "`NPROC_PER_NODE`, else `NUM_GPUS`, else one per usable GPU, else 1", "test_dropin.py::test_the_number_of_ranks_by_default"),
    Difference("exit code of a failed job", "1", "the guilty rank's own; 128+n for signal n; 70 where that would be 0", "test_exit_codes.py::test_rank_1_ends_badly", ("code",)),
    Difference("exit code after SIGTERM, SIGINT, SIGHUP, SIGQUIT", "1", "128+n: 143, 130, 129, 131", "test_dropin.py::test_a_signal", ("code",)),
    Difference("exit code of a refused command", "1 with a traceback, or 2", "64 to 78, and one line that says what is wrong", "test_dropin.py::test_contradictions", ("code",)),
    Difference("a script that is missing or does not parse", "started, fails in every rank, and again with `--max-restarts`", "refused before anything starts: 66, 65", "test_refusals.py::test_bad_words"),
    Difference("`--max-restarts N`", "after any failure", "after failures that another attempt can survive: not an ImportError, not twice at the same place", "test_dropin.py::test_restarts"),
    Difference("`OMP_NUM_THREADS`, where it is not set", "1, with one rank not set", "cores divided by ranks", "test_dropin.py::test_a_script", ("env OMP_NUM_THREADS",)),
    Difference("`GOMP_SPINCOUNT` of ranks without a GPU, where neither it nor `OMP_WAIT_POLICY` is set", "not set: threads that wait for another spin for milliseconds", "1000: they sleep after about 25 µs, and the one that they wait for gets a core", "test_exit_codes.py::test_threads_of_a_cpu_rank_soon_sleep", ("env GOMP_SPINCOUNT",)),
    Difference("`MASTER_ADDR` without `--master-addr`", "`localhost`", "`127.0.0.1`", "test_dropin.py::test_a_script", ("env MASTER_ADDR",)),
    Difference("`TORCHELASTIC_USE_AGENT_STORE`", "`True`: the launcher holds the store", "`False`: rank 0 holds it, as without a launcher", "test_dropin.py::test_a_script", ("env TORCHELASTIC_USE_AGENT_STORE",)),
    Difference("`TORCHELASTIC_RUN_ID` on one machine", "a UUID, even with `--rdzv-id`", "`--rdzv-id`, else the run's id", "test_dropin.py::test_a_script", ("env TORCHELASTIC_RUN_ID",)),
    Difference("more variables for the ranks", "none", "`STOKER_RUN_ID`, `STOKER_RUN_DIR`, `STOKER_RUN_ORIGIN`, `GPU_RANK`; with GPUs `CUDA_DEVICE_ORDER=PCI_BUS_ID`", "test_dropin.py::test_a_script", ("env STOKER_RUN_ID", "env STOKER_RUN_DIR", "env STOKER_RUN_ORIGIN", "env GPU_RANK")),
    Difference("`NCCL_SOCKET_IFNAME`, `GLOO_SOCKET_IFNAME` with `--nnodes` or `--hosts`, where not set", "not set", "the interface of the route to the other machines", "test_dropin.py::test_ways_to_start", ("env NCCL_SOCKET_IFNAME", "env GLOO_SOCKET_IFNAME")),
    Difference("the ranks' output buffers", "`python -u`", "line by line, without `-u`: `sys.orig_argv` is the command as typed", "test_dropin.py::test_a_script", ("orig_argv",)),
    Difference("stdin", "every rank reads the launcher's", "rank 0 reads it, the others get end of file", "test_stopping.py::test_piped_stdin_reaches_rank_0"),
    Difference("lines on the console", "as printed; `[role0]:` before those of `--tee`", "whole, with `GPU0:` or `CPU0:` before them (`--prefix`, `--log-line-prefix-template`)", "test_dropin.py::test_prefixes", ("console",)),
    Difference("a console that is slower than the ranks", "the ranks wait", "whole lines are skipped on the console and counted; the record has them", "test_output.py::test_a_flood_blocks_nobody_and_loses_no_byte"),
    Difference("record of the job", "none; `/tmp/torchelastic_*` stays behind", "`runs/ID/` with every rank's output, verdict and events; elsewhere if that can't be written, and it says where", "test_dropin.py::test_an_unwritable_folder"),
    Difference("`error.json` and the launcher's `TORCHELASTIC_ERROR_FILE`", "only from a script with `@record`", "from every failure", "test_dropin.py::test_error_files_without_record"),
    Difference("`--signals-to-handle` without SIGTERM, SIGINT, SIGHUP or SIGQUIT", "that signal kills the launcher and leaves the ranks running", "the four always stop the run, and the ranks may save", "test_dropin.py::test_a_signal_that_is_not_listed"),
    Difference("a second signal while ranks save", "the 30 s start again", "the ranks are killed at once", "test_stopping.py::test_a_second_signal_ends_it_at_once"),
    Difference("`nohup`", "SIGHUP ends the job all the same", "SIGHUP is ignored", "test_stopping.py::test_nohup_is_respected"),
    Difference("after one rank failed, the others have", "30 s", "5 s, or `--grace`", "test_stopping.py::test_a_rank_that_ignores_sigterm_is_killed_after_its_grace"),
    Difference("a launcher that is killed (SIGKILL)", "leaves its ranks running", "leaves nothing", "test_stopping.py::test_kill_minus_nine_leaves_nothing"),
    Difference("helper processes that ranks leave behind", "stay", "are ended and reported", "test_stopping.py::test_helpers_left_by_a_good_run_are_ended_and_named"),
    Difference("more ranks than GPUs, or GPUs in use", "started", "refused with the reason: 69 (`--share-gpus`, `--wait`)", "test_gpus.py::test_refusal"),
    Difference("a job that makes no progress for 5 minutes", "runs on", "stopped with a verdict (`--hang-timeout`, 0: never)", "test_watch_real.py::test_a_sleeping_rank_is_named_with_its_line"),
    Difference("a loss that stays NaN or infinite", "runs on", "stopped with a verdict (`--on-nan warn`: not)", "test_watch_real.py::test_on_nan"),
    Difference("`--monitor-interval`, `--start-method`, `--run-path`, `--local-addr`, `--event-log-handler`, `--logs-specs default`, `--duplicate-*-filters`", "used", "accepted, without effect; a line reports it", "test_dropin.py::test_flags_without_effect"),
    Difference("`--numa-binding socket`, `exclusive`, `core-complex`", "different bindings", "taken as `node`", "test_dropin.py::test_flags_without_effect"),
    Difference("`--rdzv-backend etcd`, `etcd-v2`", "meet in etcd", "taken as c10d: the machines meet at `--rdzv-endpoint`", "test_dropin.py::test_flags_without_effect"),
)  # fmt: skip
ACCEPTED = {key for difference in DIFFERENCES for key in difference.keys}


def test_the_page_lists_what_the_tests_accept() -> None:
    text = PAGE.read_text()
    rows = [f"| {one.what} | {one.torchrun} | {one.stoker} |" for one in DIFFERENCES]
    start = text.index("| what | torchrun | stoker run |")
    shown = text[start:].split("\n\n")[0].splitlines()[2:]
    assert shown == rows
    for one in DIFFERENCES:
        file, name = one.test.split("::")
        (path,) = Path(__file__).parents[1].rglob(file)
        assert re.search(rf"^def {name}\w*\(", path.read_text(), re.M), one.test


# ---- both launchers ----

PROBE = """
import json, os, sys
if "--wait-for-signals" in sys.argv:
    import signal, time
    def save(number, frame):
        time.sleep(0.3)
        open(f"saved-{os.environ['RANK']}-{number}", "w").close()
        sys.exit(0)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1): signal.signal(number, save)
print("out", os.environ["RANK"], flush=True)
print("err", os.environ["RANK"], file=sys.stderr, flush=True)
seen = {"env": dict(os.environ), "argv": sys.argv, "orig_argv": sys.orig_argv[1:], "cwd": os.getcwd(), "main": __name__, "path": sys.path[0], "pid": os.getpid()}
with open("seen-%s.tmp" % os.environ["RANK"], "w") as file: json.dump(seen, file)
os.rename("seen-%s.tmp" % os.environ["RANK"], "seen-%s" % os.environ["RANK"])
if "--fail" in sys.argv: raise RuntimeError("asked to fail")
if "--wait-for-signals" in sys.argv: time.sleep(100)
"""
PROGRAM = '#!/bin/sh\nset -e\necho "creating $RANK"\n[ -n "$LOCAL_RANK" ] && [ -n "$WORLD_SIZE" ] && [ -n "$MASTER_PORT" ]\n: > "$1/touched-$RANK"\n'
# What no launcher decides, and what is the shell's.
_OWN = {"PWD", "OLDPWD", "SHLVL", "_", "STOKER_MACHINE", "LC_CTYPE"}
_FREE = {"env MASTER_PORT", "env TORCHELASTIC_ERROR_FILE"}  # another number or path each time


class Both:
    """One command line, in a folder for each launcher."""

    def __init__(self, stoker: Stoker) -> None:
        self._stoker = stoker
        self.env = {
            name: value
            for name, value in stoker.environment().items()
            if not name.startswith("TORCHELASTIC_") and name != "OMP_NUM_THREADS"
        }
        self.commands = {
            "torchrun": [sys.executable, "-m", "torch.distributed.run"],
            "stoker": [sys.executable, "-m", "stoker", "run"],
        }
        for name in self.commands:
            folder = self.folder(name)
            folder.mkdir()
            (folder / "probe.py").write_text(PROBE)
            (folder / "package").mkdir()
            (folder / "package" / "__init__.py").write_text("")
            (folder / "package" / "probe.py").write_text(PROBE)
            (folder / "program.sh").write_text(PROGRAM)
            (folder / "program.sh").chmod(0o755)

    def folder(self, name: str) -> Path:
        return self._stoker.cwd / name

    def script(self, name: str, text: str) -> str:
        for launcher in self.commands:
            (self.folder(launcher) / name).write_text(text)
        return name

    def start(self, name: str, *words: str, env: dict[str, str] | None = None, **more: Any) -> subprocess.Popen[bytes]:
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **more}
        return subprocess.Popen(
            [*self.commands[name], *words], cwd=self.folder(name), env={**self.env, **(env or {})}, **streams
        )

    def run(self, name: str, *words: str, env: dict[str, str] | None = None) -> dict[str, Any]:
        child = self.start(name, *words, env=env)
        out, err = child.communicate(timeout=120)
        return self.observed(name, child.returncode, out.decode(), err.decode())

    def __call__(self, *words: str, env: dict[str, str] | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
        return self.run("torchrun", *words, env=env), self.run("stoker", *words, env=env)

    def observed(self, name: str, code: int, out: str, err: str) -> dict[str, Any]:
        folder = self.folder(name)
        files = sorted(
            re.sub(r"/[^/]+_[a-z0-9_]{8}/", "/ID/", f"/{path.relative_to(folder)}")
            for path in folder.rglob("*")
            if path.is_file() and "runs" not in path.parts and "__pycache__" not in path.parts
        )
        ranks = {
            int(path.name[5:]): json.loads(path.read_text().replace(str(folder), "HERE"))
            for path in folder.glob("seen-?")
        }
        return {"code": code, "ok": code == 0, "files": files, "ranks": ranks, "out": out, "err": err}


@pytest.fixture
def both(stoker: Stoker) -> Both:
    return Both(stoker)


def differing(theirs: dict[str, Any], ours: dict[str, Any]) -> set[str]:
    """What the two do differently, less what is free."""
    found = {key for key in ("ok", "code", "files") if theirs[key] != ours[key]}
    assert sorted(theirs["ranks"]) == sorted(ours["ranks"])
    for rank, seen in theirs["ranks"].items():
        mine = ours["ranks"][rank]
        found |= {key for key in ("argv", "orig_argv", "cwd", "main", "path") if seen[key] != mine[key]}
        names = (set(seen["env"]) | set(mine["env"])) - _OWN
        found |= {f"env {name}" for name in names if seen["env"].get(name) != mine["env"].get(name)}
    return found - _FREE


def agree(theirs: dict[str, Any], ours: dict[str, Any]) -> set[str]:
    """They differ in nothing that is not listed. Returns what they differ in."""
    found = differing(theirs, ours)
    assert found <= ACCEPTED, f"{found - ACCEPTED}\n{theirs['err']}\n{ours['err']}"
    return found


# ---- flags ----

ASK_TORCHRUN = """
import json
from torch.distributed import argparse_util
from torch.distributed.run import get_args_parser
flags = [(action.dest, action.option_strings, isinstance(action, (argparse_util.env, argparse_util.check_env)), action.choices and list(action.choices), action.nargs) for action in get_args_parser()._actions]
print(json.dumps(flags))
"""


def test_every_flag_and_variable_of_torchruns() -> None:
    flags = json.loads(
        subprocess.run(
            [sys.executable, "-c", ASK_TORCHRUN], capture_output=True, text=True, check=True, timeout=120
        ).stdout
    )
    ours = build_parser()._option_string_actions
    named = {dest: strings for dest, strings, *_ in flags if strings and dest != "help"}
    assert not [
        string
        for strings in named.values()
        for string in strings
        if string not in ours or ours[string].dest not in named
    ]
    theirs = {f"PET_{dest.upper()}" for dest, _, variable, *_ in flags if variable}
    known = {name for name in TORCHRUN_VARIABLES if name.startswith("PET_")}
    assert theirs <= known and known - theirs <= {"PET_SHUTDOWN_TIMEOUT"}  # since torch 2.12
    for dest, strings, _, choices, nargs in flags:
        if dest in named:
            assert (ours[strings[-1]].nargs == 0) == (nargs == 0), dest
            assert not choices or set(choices) <= set(ours[strings[-1]].choices or choices), dest


# ---- starting ----


def test_a_script(both: Both) -> None:
    theirs, ours = both(
        "--nnodes=1",
        "--nproc-per-node=2",
        "--rdzv-id=job7",
        "--role=trainer",
        "--monitor-interval=1",
        "--start-method=spawn",
        "--signals-to-handle",
        "SIGTERM,SIGUSR1",
        "--max-restarts=3",
        "probe.py",
        "--lr",
        "3",
        "--local-rank=${local_rank}",
        env={"SENTINEL": "from the parent"},
    )
    assert theirs["ok"] and ours["ok"] and sorted(theirs["ranks"]) == [0, 1]
    assert theirs["ranks"][1]["argv"] == ["probe.py", "--lr", "3", "--local-rank=1"]
    assert (
        ours["ranks"][0]["env"]["TORCHELASTIC_SIGNALS_TO_HANDLE"] == "SIGTERM,SIGUSR1"
        and ours["ranks"][1]["env"]["SENTINEL"] == "from the parent"
    )
    by_version = {"env MASTER_ADDR", "env TORCHELASTIC_RUN_ID"}  # torchrun 2.11 has ours here
    assert agree(theirs, ours) | by_version == {
        "env OMP_NUM_THREADS",
        "env GOMP_SPINCOUNT",
        "env MASTER_ADDR",
        "env TORCHELASTIC_USE_AGENT_STORE",
        "env TORCHELASTIC_RUN_ID",
        "env STOKER_RUN_ID",
        "env STOKER_RUN_DIR",
        "env STOKER_RUN_ORIGIN",
        "env GPU_RANK",
        "orig_argv",
    }
    assert [seen["env"]["OMP_NUM_THREADS"] for seen in (theirs["ranks"][0], ours["ranks"][0])] == ["1", "4"]
    assert ours["ranks"][0]["env"]["TORCHELASTIC_RUN_ID"] == "job7"


@at_length
def test_a_program_from_variables(both: Both) -> None:
    """PET_* as defaults, those that torchrun knows and no others; and the program's own order of lines."""
    env = {
        "PET_NNODES": "1",
        "PET_NPROC_PER_NODE": "3",
        "PET_NO_PYTHON": "1",
        "PET_MODULE": "0",
        "PET_NAME": "rex",
        "PET_DRY_RUN": "1",
        "PET_GPUS": "9",
    }
    theirs, ours = both("./program.sh", ".", env=env)
    assert (
        theirs["ok"]
        and ours["ok"]
        and [name for name in ours["files"] if "touched" in name] == ["/touched-0", "/touched-1", "/touched-2"]
    )
    assert agree(theirs, ours) == set()
    (run,) = [path for path in (both.folder("stoker") / "runs").iterdir() if not path.is_symlink()]
    assert run.name.endswith("-program"), "PET_NAME is no variable of torchrun's"


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(["--standalone", "--nproc-per-node=4", "probe.py"], marks=at_length),
        pytest.param(["--run-path", "--nproc-per-node=2", "{here}/probe.py"], marks=at_length),
        pytest.param(
            ["--run-path", "--no-python", "--module", "--nproc-per-node=1", "{here}/probe.py"], marks=at_length
        ),
        pytest.param(["-m", "--nproc-per-node=2", "package.probe", "--x"], marks=at_length),
        pytest.param(
            ["--nproc_per_node=2", "--master-addr=localhost", "--master-port={port}", "--node-rank=0", "probe.py"],
            marks=at_length,
        ),
        pytest.param(
            [
                "--nnodes=1:2",
                "--nproc-per-node=2",
                "--rdzv-backend=c10d",
                "--rdzv-endpoint=localhost:{port}",
                "--rdzv-conf=join_timeout=5,last_call_timeout=1,timeout=5",
                "--rdzv-id=e1",
                "probe.py",
            ],
            marks=at_length,
        ),
        pytest.param(["--nnodes=1", "--no-python", "./program.sh", "."], marks=at_length),
        pytest.param(["--nproc-per-node=2", "--logs-specs=default", "probe.py"], marks=at_length),
    ],
)
def test_ways_to_start(both: Both, words: list[str]) -> None:
    seen = []
    for name in both.commands:
        port, here = str(free_port()), str(both.folder(name))
        seen.append(both.run(name, *(word.replace("{port}", port).replace("{here}", here) for word in words)))
    assert seen[0]["ok"] and seen[1]["ok"], seen[1]["err"]
    run_path = "--run-path" in words  # torchrun runs it in a process of multiprocessing's
    assert differing(*seen) - ACCEPTED <= ({"path", "argv", "main"} if run_path else set())


@pytest.mark.parametrize(
    "words",
    [
        ["--debug", "--init", "x", "--min=3", "--no", "-m", "--", "--gpus"],
        ["--help"],
        ["-x", "-q", "--nproc-per-node", "9"],
    ],
)
def test_the_scripts_arguments_are_its_own(both: Both, words: list[str]) -> None:
    """Also those that begin like a flag of ours."""
    for options in (["--nproc-per-node=1"], ["--nproc-per-node", "1", "-r", "0", "-r0", "--standalone"], ["-q", "--"]):
        ours = both.run("stoker", *options, "probe.py", *words)
        assert ours["ok"] and ours["ranks"][0]["argv"] == ["probe.py", *words], ours["err"]
    if EVERYTHING and words[0] != "--debug":  # torchrun refuses --no and --m, which two of its flags begin with
        theirs = both.run("torchrun", "probe.py", *words)
        assert theirs["ranks"][0]["argv"] == ["probe.py", *words]


DASHES = {
    ("s.py", "--", "--x"): ["--x"], ("s.py", "a", "--", "b"): ["a", "--", "b"], ("s.py", "--", "--", "b"): ["--", "b"], ("--", "s.py", "--", "b"): ["--", "b"],
    ("--", "s.py", "--", "--", "b"): ["--", "--", "b"], ("-m", "s.py", "--"): [], ("-r", "3", "-r3", "--standalone", "s.py", "-r"): ["-r"],
}  # fmt: skip


def test_two_dashes() -> None:
    """One -- is dropped, before the script or right behind it: torchrun's argparse does that."""
    ask = "import json, sys; from torch.distributed.run import parse_args; print(json.dumps([parse_args(words).training_script_args for words in json.loads(sys.argv[1])]))"
    theirs = subprocess.run(
        [sys.executable, "-c", ask, json.dumps(list(DASHES))], capture_output=True, text=True, check=True, timeout=120
    ).stdout
    assert json.loads(theirs) == list(DASHES.values()) == [split(list(words))[2] for words in DASHES]
    assert all(split(list(words))[1] == "s.py" for words in DASHES)


@at_length
def test_the_number_of_ranks_by_default(both: Both) -> None:
    theirs, ours = both("probe.py", env={"NUM_GPUS": "2"})
    assert (sorted(theirs["ranks"]), sorted(ours["ranks"])) == ([0], [0, 1])
    assert "OMP_NUM_THREADS" not in theirs["ranks"][0]["env"]


@pytest.mark.parametrize("script", [pytest.param("tcp", marks=at_length), pytest.param("env", marks=at_length)])
def test_process_groups(both: Both, script: str) -> None:
    both.script(
        "group.py",
        (
            "import sys, os, torch, torch.distributed as dist\n"
            "from torch.distributed import is_torchelastic_launched\n"
            "more = {'rank': int(os.environ['RANK']), 'world_size': int(os.environ['WORLD_SIZE'])} if sys.argv[1] != 'env://' else {}\n"
            "dist.init_process_group('gloo', init_method=sys.argv[1], **more)\n"
            "t = torch.tensor(dist.get_rank() + 1); dist.all_reduce(t); dist.destroy_process_group()\n"
            "open(f'sum-{t.item()}-{is_torchelastic_launched()}-{os.environ[\"RANK\"]}', 'w').close()\n"
        ),
    )
    seen = []
    for name in both.commands:
        port = free_port()
        method = "env://" if script == "env" else f"tcp://localhost:{port}"
        seen.append(
            both.run(
                name,
                "--nproc-per-node=4",
                "--master-addr=localhost",
                f"--master-port={port}",
                "group.py",
                method,
                env={"OMP_NUM_THREADS": "1"},
            )
        )
    assert agree(*seen) == set() and seen[1]["ok"] and sum("sum-10-True" in name for name in seen[1]["files"]) == 4


@at_length
def test_two_launchers_meet(both: Both) -> None:
    for name in both.commands:
        words = [
            "--nnodes=1:2",
            "--nproc-per-node=2",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint=localhost:{free_port()}",
            "--rdzv-id=m",
            "probe.py",
        ]
        children = [both.start(name, *words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for _ in range(2)]
        assert [child.wait(120) for child in children] == [0, 0]
        assert {path.name for path in both.folder(name).glob("seen-*")} == {f"seen-{rank}" for rank in range(4)}


# ---- refusals ----


@pytest.mark.parametrize(
    ("words", "env"),
    [
        (["--no-python", "--module", "probe.py"], {}),
        pytest.param(["probe.py"], {"PET_NO_PYTHON": "1", "PET_MODULE": "1"}, marks=at_length),
        pytest.param(["--logs-specs=DOES_NOT_EXIST", "probe.py"], {}, marks=at_length),
        pytest.param(["--start-method=thread", "probe.py"], {}, marks=at_length),
        pytest.param(["--event-log-handler=nope", "probe.py"], {}, marks=at_length),
        pytest.param(["--nproc-per-node=unknown", "probe.py"], {}, marks=at_length),
        pytest.param(["--nnodes=2:20:30", "probe.py"], {}, marks=at_length),
        pytest.param(["--nnodes=2:1", "probe.py"], {}, marks=at_length),
        pytest.param(["--max-restarts=-1", "probe.py"], {}, marks=at_length),
        pytest.param(["--redirects=5", "probe.py"], {}, marks=at_length),
        pytest.param(["--local-ranks-filter=a", "probe.py"], {}, marks=at_length),
        pytest.param(["--no-such-flag", "probe.py"], {}, marks=at_length),
        pytest.param(["--log-dir=probe.py", "probe.py"], {}, marks=at_length),
        pytest.param([], {}, marks=at_length),
    ],
)  # fmt: skip
def test_contradictions(both: Both, words: list[str], env: dict[str, str]) -> None:
    theirs, ours = both(*words, env=env)
    assert theirs["code"] in (1, 2) and 64 <= ours["code"] <= 78 and not theirs["ranks"] and not ours["ranks"], ours[
        "err"
    ]
    assert agree(theirs, ours) == {"code"} and ours["err"].count("\n") == 1


def test_flags_without_effect(stoker: Stoker) -> None:
    script = stoker.script("ok.py", "")
    flags = {
        "--monitor-interval": "1",
        "--start-method": "fork",
        "--local-addr": "x",
        "--event-log-handler": "console",
        "--logs-specs": "default",
        "--duplicate-stdout-filters": "a",
        "--duplicate-stderr-filters": "b",
    }
    done = stoker("run", "--run-path", *(word for pair in flags.items() for word in pair), script)
    assert done.code == 0 and all(f"{flag} has no effect here: " in done.err for flag in ("--run-path", *flags))
    done = stoker(
        "run", "--dry-run", "--nnodes", "2", "--rdzv-backend", "etcd", "--rdzv-endpoint", "127.0.0.1:29400", script
    )
    assert "--rdzv-backend etcd is treated as c10d" in done.out + done.err, done.err
    assert "--numa-binding exclusive is treated as node" in stoker("run", "--numa-binding", "exclusive", script).err


# ---- output ----


@at_length
def test_prefixes(both: Both) -> None:
    """torchrun puts its template before the lines of --tee; so do we, and before all others too."""
    env = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[${role_name} rank${rank} local${local_rank} ${other}]: "}
    theirs, ours = both("--nproc-per-node=2", "--redirect=3", "--tee=1", "probe.py", env=env)
    lines = [f"[default rank{rank} local{rank} ${{other}}]: out {rank}" for rank in (0, 1)]
    assert sorted(theirs["out"].splitlines()) == lines == sorted(ours["out"].splitlines())
    assert "err 0" not in theirs["err"] and "err 0" not in ours["err"]
    ours = both.run(
        "stoker", "--nproc-per-node=2", "--log-line-prefix-template=[${role_name}${local_rank}]:", "probe.py"
    )
    assert sorted(ours["out"].splitlines()) == ["[default0]:out 0", "[default1]:out 1"]


@at_length
def test_plain_tee_and_no_tee(both: Both) -> None:
    theirs, ours = both("--nproc-per-node=2", "probe.py")
    assert (sorted(theirs["out"].splitlines()), sorted(ours["out"].splitlines())) == (
        ["out 0", "out 1"],
        ["CPU0:out 0", "CPU1:out 1"],
    )
    theirs, ours = both("--nproc-per-node=2", "--tee=3", "--local-ranks-filter=1", "probe.py")
    assert (theirs["out"], ours["out"]) == ("[default1]:out 1\n", "CPU1:out 1\n")


@pytest.mark.parametrize(
    ("flags", "merged", "shown"),
    [
        ([], False, "a\nb"), (["--prefix=auto"], True, "CPU0:a\nCPU0:b\n"), (["--prefix=always"], False, "CPU0:a\nCPU0:b\n"), (["--tee=1"], False, "CPU0:a\nCPU0:b\n"),
        (["--prefix=never"], True, "a\nb\n"), (["--nproc-per-node=2", "--show=1"], False, "CPU1:a\nCPU1:b\n"),
        (["--nproc-per-node=2", "--show=1", "--prefix=never"], False, "a\nb\n"),
    ],
)  # fmt: skip
def test_who_gets_a_prefix(stoker: Stoker, flags: list[str], merged: bool, shown: str) -> None:
    """A single rank's stdout that has its own pipe is data, byte for byte."""
    run = stoker.start(
        "run",
        "--quiet",
        *flags,
        stoker.script("ab.py", "import sys; sys.stdout.write('a\\nb')"),
        stderr=subprocess.STDOUT if merged else subprocess.DEVNULL,
    )
    out = run.communicate(timeout=60)[0].decode()
    assert "".join(line for line in out.splitlines(keepends=True) if "✓" not in line) == shown


@pytest.mark.parametrize(
    "flags",
    [
        [],
        pytest.param(["-r", "3"], marks=at_length), pytest.param(["-t", "3"], marks=at_length), pytest.param(["-r", "0:1,1:2", "-t", "0:2"], marks=at_length),
        pytest.param(["-r", "3", "--local-ranks-filter", "0"], marks=at_length),
    ],
)  # fmt: skip
def test_log_dir(both: Both, flags: list[str]) -> None:
    """Alone it makes the ranks' folders; -r and -t say which streams are files there."""
    theirs, ours = both("--nproc-per-node=2", "--log-dir=logs", *flags, "probe.py")
    assert agree(theirs, ours) and theirs["ok"] and ours["ok"]
    texts = []
    for name in both.commands:
        (run,) = (both.folder(name) / "logs").iterdir()
        assert re.fullmatch(r".+_[a-z0-9_]{8}", run.name) and run.stat().st_mode & 0o777 == 0o700
        assert sorted(path.name for path in (run / "attempt_0").iterdir()) == ["0", "1"]
        texts.append({str(path.relative_to(run)): path.read_text() for path in run.rglob("*.log")})
    assert texts[0] == texts[1]


def test_the_log_files_are_there_from_the_start(stoker: Stoker) -> None:
    run = stoker.start(
        "run",
        "--nproc-per-node=2",
        "--log-dir=logs",
        "-r=1",
        "-t=2",
        stoker.script("quiet.py", "import time; time.sleep(60)"),
    )
    try:
        assert wait_for(
            lambda: True if len(list(stoker.cwd.glob("logs/*_????????/attempt_0/?/std???.log"))) == 4 else None, 20
        )
    finally:
        run.terminate()
        run.communicate(timeout=100)


def test_log_dir_dev_null(stoker: Stoker) -> None:
    assert stoker("run", "--log-dir=/dev/null", "--tee=3", stoker.script("ok.py", "print('ran')")).out == "CPU0:ran\n"


# ---- failures ----

RECORDED = """
import os, time
from torch.distributed.elastic.multiprocessing.errors import record
@record
def main():
    if os.environ["RANK"] == "1": raise ValueError("boom")
    time.sleep(100)
main()
"""


@at_length
def test_the_launchers_error_file(both: Both) -> None:
    both.script("recorded.py", RECORDED)
    told = []
    for name in both.commands:
        path = both.folder(name) / "launcher.json"
        seen = both.run(
            name, "--nproc-per-node=2", "--log-dir=logs", "recorded.py", env={"TORCHELASTIC_ERROR_FILE": str(path)}
        )
        assert (
            seen["code"] == 1
            and "/logs/ID/attempt_0/1/error.json" in seen["files"]
            and not any("0/0/error.json" in one for one in seen["files"])
        )
        told.append(
            [
                json.loads(path.read_text()),
                *(json.loads(one.read_text()) for one in both.folder(name).glob("logs/*/attempt_0/1/error.json")),
            ]
        )
        for one in told[-1]:
            assert int(one["message"]["extraInfo"].pop("timestamp")) > 0
            one["message"]["extraInfo"]["py_callstack"] = one["message"]["extraInfo"]["py_callstack"].replace(
                str(both.folder(name)), "HERE"
            )
    assert (
        told[0] == told[1]
        and told[1][0]["message"]["errorCode"] == 1
        and told[1][0]["message"]["message"] == "ValueError: boom"
    )


@pytest.mark.parametrize(
    ("code", "message", "number"),
    [
        ("raise KeyError('x')", "KeyError: 'x'", 1),
        ("import os; os.kill(os.getpid(), 9)", "SIGKILL", -9),
        ("raise SystemExit(5)", "exit code 5", 5),
    ],
)
def test_error_files_without_record(stoker: Stoker, code: str, message: str, number: int) -> None:
    done = stoker(
        "run", "--log-dir=logs", stoker.script("bad.py", code), env={"TORCHELASTIC_ERROR_FILE": "launcher.json"}
    )
    told = json.loads((stoker.cwd / "launcher.json").read_text())["message"]
    assert message in told["message"] and told["errorCode"] == number and int(told["extraInfo"]["timestamp"]) > 0, (
        told,
        done.err,
    )
    kept = list(stoker.cwd.glob("logs/*/attempt_0/0/error.json"))
    assert len(kept) == (1 if "KeyError" in code else 0) and all(
        json.loads(one.read_text())["message"]["message"] == message for one in kept
    )


def test_a_refusal_and_a_good_end_in_the_error_file(stoker: Stoker) -> None:
    env = {"TORCHELASTIC_ERROR_FILE": "launcher.json"}
    assert stoker("run", stoker.script("ok.py", ""), env=env).code == 0 and not (stoker.cwd / "launcher.json").exists()
    assert stoker("run", "absent.py", env=env).code == 66
    assert (
        "script absent.py does not exist"
        in json.loads((stoker.cwd / "launcher.json").read_text())["message"]["message"]
    )


def test_restarts(both: Both) -> None:
    """Both start again after a failure that may pass, and number the attempts alike; an ImportError does not pass."""
    both.script(
        "twice.py",
        "import os, sys\nn = os.environ['TORCHELASTIC_RESTART_COUNT']\nopen('began-' + n + os.environ['RANK'], 'w').close()\nprint('try', n, flush=True)\nif n == '0' and os.environ['RANK'] == '1': sys.exit(3)\n",
    )
    theirs, ours = both("--nproc-per-node=2", "--max-restarts=2", "--log-dir=logs", "-r=1", "twice.py")
    assert (
        agree(theirs, ours) == set()
        and ours["ok"]
        and "/logs/ID/attempt_1/1/stdout.log" in ours["files"]
        and "/began-11" in ours["files"]
    )
    both.script(
        "lacking.py",
        "import os\nopen('lacking-' + os.environ['TORCHELASTIC_RESTART_COUNT'], 'w').close()\nimport no_such_module\n",
    )
    ours = both.run("stoker", "--max-restarts=2", "lacking.py")
    assert ours["code"] == 1 and [name for name in ours["files"] if "lacking-" in name] == ["/lacking-0"]
    if EVERYTHING:
        theirs = both.run("torchrun", "--max-restarts=2", "lacking.py")
        assert [name for name in theirs["files"] if "lacking-" in name] == ["/lacking-0", "/lacking-1", "/lacking-2"]


@pytest.mark.parametrize(("how", "theirs", "ours"), [
    pytest.param("sys.exit(3)", 1, 3, marks=at_length), pytest.param("os.kill(os.getpid(), 9)", 1, 137, marks=at_length), pytest.param("raise ValueError", 1, 1, marks=at_length),
])  # fmt: skip
def test_exit_codes(both: Both, how: str, theirs: int, ours: int) -> None:
    both.script("ends.py", f"import os, sys, time\nif os.environ['RANK'] == '1': {how}\ntime.sleep(100)\n")
    assert [seen["code"] for seen in both("--nproc-per-node=2", "ends.py")] == [theirs, ours]


# ---- signals ----


def signalled(both: Both, name: str, signum: signal.Signals, *words: str) -> tuple[int, list[str]]:
    """(exit code, what the ranks saved) of a launcher that gets a signal when both ranks are there."""
    child = both.start(
        name,
        "--nproc-per-node=2",
        *words,
        "probe.py",
        "--wait-for-signals",
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    assert wait_for(lambda: True if len(list(both.folder(name).glob("seen-?"))) == 2 else None, 60)
    child.send_signal(signum)
    code = child.wait(60)
    return code, sorted(path.name for path in both.folder(name).glob("saved-*"))


@pytest.mark.parametrize(
    ("signum", "words"),
    [
        (signal.SIGTERM, []), pytest.param(signal.SIGINT, [], marks=at_length), pytest.param(signal.SIGQUIT, [], marks=at_length),
        pytest.param(signal.SIGUSR1, ["--signals-to-handle=SIGUSR1"], marks=at_length),
    ],
)  # fmt: skip
def test_a_signal(both: Both, signum: signal.Signals, words: list[str]) -> None:
    saved = [f"saved-{rank}-{int(signum)}" for rank in (0, 1)]
    assert signalled(both, "torchrun", signum, *words) == (1, saved)
    assert signalled(both, "stoker", signum, *words) == (128 + signum, saved)
    verdict = json.loads((both.folder("stoker") / "runs" / "latest" / "verdict.json").read_text())
    assert (verdict["status"], verdict["cause"]) == ("stopped", "launch.stopped") and signum.name in verdict["summary"]


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGQUIT, signal.SIGUSR1])
def test_a_signal_that_is_not_listed(both: Both, signum: signal.Signals) -> None:
    assert signalled(both, "stoker", signum, "--signals-to-handle=SIGUSR1") == (
        128 + signum,
        [f"saved-{rank}-{int(signum)}" for rank in (0, 1)],
    )
    verdict = json.loads((both.folder("stoker") / "runs" / "latest" / "verdict.json").read_text())
    assert (verdict["status"], verdict["exit_code"]) == ("stopped", 128 + signum)


def left_by_torchrun(both: Both, words: str = "probe.py") -> list[int]:
    """Ranks that live on; they are ended here."""
    pids = [json.loads(path.read_text())["pid"] for path in both.folder("torchrun").glob("seen-?")]
    alive = [
        pid
        for pid in pids
        if Path(f"/proc/{pid}/cmdline").exists() and words.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    for pid in alive:
        os.kill(pid, signal.SIGKILL)
    return alive


@at_length
@pytest.mark.parametrize(
    ("signum", "words", "left"), [(signal.SIGKILL, [], 2), (signal.SIGTERM, ["--signals-to-handle=SIGUSR1"], 2)]
)
def test_torchrun_leaves_its_ranks_running(both: Both, signum: signal.Signals, words: list[str], left: int) -> None:
    assert signalled(both, "torchrun", signum, *words) == (-signum, [])
    assert len(left_by_torchrun(both)) == left


@at_length
def test_torchrun_under_nohup_is_ended_by_a_hangup(both: Both) -> None:
    child = both.start(
        "torchrun",
        "--nproc-per-node=2",
        "probe.py",
        "--wait-for-signals",
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    )
    assert wait_for(lambda: True if len(list(both.folder("torchrun").glob("seen-?"))) == 2 else None, 60)
    child.send_signal(signal.SIGHUP)
    assert child.wait(60) == 1


@at_length
def test_torchrun_waits_and_leaves_helpers(both: Both) -> None:
    """30 s for the others after a failure; helpers stay; a reader that does not read holds the ranks up."""
    both.script(
        "mixed.py",
        "import os, signal, sys, time\nif os.environ['RANK'] == '1': time.sleep(1); sys.exit(5)\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(300)\n",
    )
    began = time.monotonic()
    assert both.run("torchrun", "--nproc-per-node=2", "mixed.py")["code"] == 1 and time.monotonic() - began > 30
    both.script(
        "leave.py",
        "import subprocess\nhelper = subprocess.Popen(['sleep', '100'], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)\nopen('helper', 'w').write(str(helper.pid))\n",
    )
    assert both.run("torchrun", "leave.py")["ok"]
    os.kill(int((both.folder("torchrun") / "helper").read_text()), signal.SIGKILL)  # raises where it is gone
    both.script(
        "flood.py", "import os\nfor _ in range(300): os.write(1, b'x' * 1000 + b'\\n')\nopen('flooded', 'w').close()\n"
    )
    child = both.start("torchrun", "flood.py")
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(100)
    assert not (both.folder("torchrun") / "flooded").exists()
    assert child.communicate(timeout=60)[0].count(b"\n") == 300 and child.returncode == 0


@at_length
def test_torchrun_after_a_second_signal(both: Both) -> None:
    both.script("stubborn.py", PROBE.replace("sys.exit(0)", "pass").replace("time.sleep(0.3)", "time.sleep(0.1)"))
    child = both.start(
        "torchrun",
        "--nproc-per-node=2",
        "stubborn.py",
        "--wait-for-signals",
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    assert wait_for(lambda: True if len(list(both.folder("torchrun").glob("seen-?"))) == 2 else None, 60)
    child.send_signal(signal.SIGTERM)
    assert wait_for(lambda: True if len(list(both.folder("torchrun").glob("saved-*"))) == 2 else None, 20)
    child.send_signal(signal.SIGTERM)
    began = time.monotonic()
    assert child.wait(90) == 1 and time.monotonic() - began > 29 and left_by_torchrun(both, "stubborn.py") == []


# ---- a folder that can't be written ----


def test_an_unwritable_folder(stoker: Stoker) -> None:
    """The run starts, says where its record is, and the other commands find it there."""
    (stoker.cwd / "ok.py").write_text("print('ran')")
    (stoker.cwd / "sleeps.py").write_text("import time; time.sleep(100)")
    home, temporary, closed = (stoker.cwd / name for name in ("home", "tmp", "closed"))
    for folder in (home, temporary, closed):
        folder.mkdir()
    closed.chmod(0o555)
    # Root without this capability is bound by a folder's mode like everybody else.
    bound = ["setpriv", "--bounding-set=-dac_override"] if os.geteuid() == 0 else []

    def ask(*words: str, home: Path = home) -> subprocess.CompletedProcess[str]:
        env = {**stoker.env, "HOME": str(home), "TMPDIR": str(temporary)}
        return subprocess.run(
            [*bound, sys.executable, "-m", "stoker", *words],
            cwd=closed,
            env=env,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    done = ask("run", str(stoker.cwd / "ok.py"))
    private = home / ".local" / "state" / "stoker" / "runs" / str(closed).strip("/").replace("/", "-")
    assert (
        done.returncode == 0
        and done.stdout == "ran\n"
        and f"{closed} can't be written, so the record goes to {private}" in done.stderr
    ), done.stderr
    assert (home / ".local" / "state" / "stoker").stat().st_mode & 0o777 == 0o700
    assert "completed" in ask("why").stdout and len(ask("runs").stdout.splitlines()) == 2
    started = ask("run", "--detach", "--name", "long", str(stoker.cwd / "sleeps.py"))
    assert started.returncode == 0 and "is stopped" in ask("stop", "long").stdout, started.stderr
    nowhere = Path("/proc/no-home")
    done = ask("run", str(stoker.cwd / "ok.py"), home=nowhere)
    base = temporary / f"stoker-runs-{os.geteuid()}"
    assert (
        done.returncode == 0
        and f"the record goes to {base}/runs/" in done.stderr
        and base.stat().st_mode & 0o777 == 0o700
    ), done.stderr
    assert "completed" in ask("why", home=nowhere).stdout
    base.chmod(0o777)
    for command in (("run", str(stoker.cwd / "ok.py")), ("runs",)):  # somebody else may have put it there
        refused = ask(*command, home=nowhere)
        assert refused.returncode == 73 and f"{base} can't be used" in refused.stderr
    assert ask("run", "--runs-dir", "runs", str(stoker.cwd / "ok.py")).returncode == 73, (
        "a folder that was named is used or refused"
    )
