"""Bad input: one clear line, an exit code of the documented band, nothing started, nothing half-written."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conftest import Stoker, gpu_json

OK = "print('ran')"


def refused(stoker: Stoker, *args: str, code: int, says: str, lines: int = 1, env: dict[str, str] | None = None) -> str:
    before = sorted(os.listdir(stoker.cwd))
    done = stoker(*args, env=env)
    assert done.code == code, done.err
    assert says in done.err and done.err.startswith("stoker: ") and "Traceback" not in done.err
    assert done.err.count("\n") == lines, done.err
    assert "ran" not in done.out and sorted(os.listdir(stoker.cwd)) == before
    return done.err


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["missing.py"], 66, "script missing.py does not exist"),
        (["okk.py"], 66, "did you mean ok.py?"),
        (["."], 66, ". is a folder"),
        (["-m", "no.such.module"], 66, "module no.such.module does not exist"),
        (["--no-python", "no-such-program"], 66, "the program 'no-such-program' is not on the PATH"),
        (["--nproc-per-node", "0", "ok.py"], 64, "from 1 up"),
        (["--nproc-per-node", "-1", "ok.py"], 64, "--nproc-per-node"),
        (["--nproc-per-node", "1e9", "ok.py"], 64, "must be a number of ranks"),
        (["--nproc-per-node", "1000000000", "ok.py"], 69, "processes"),
        (["--nproc-per-node", "gpu", "ok.py"], 69, "this machine has none"),
        (["--gpus", "9", "ok.py"], 69, "this machine has none"),
        (["--master-port", "80", "ok.py"], 64, "1024"),
        (["--master-port", "70000", "ok.py"], 64, "65535"),
        (["--master-port", "x", "ok.py"], 64, "not a whole number"),
        (["--rdzv-endpoint", "host:http", "ok.py"], 64, "HOST:PORT"),
        (
            ["--rdzv-endpoint", "host:99999", "ok.py"],
            64,
            "--rdzv-endpoint host:99999: the port must be from 1024 to 65535",
        ),
        (["--max-restarts", "-2", "ok.py"], 64, "must be 0 or more, got -2"),
        (["--nprc-per-node", "2", "ok.py"], 64, "did you mean --nproc-per-node?"),
        (["--nnodes", "2", "ok.py"], 64, "--hosts"),
        (["--nnodes", "x", "ok.py"], 64, "number of machines"),
        (["--ram-limit", "lots", "ok.py"], 64, "not a size"),
        (["--wait", "soon", "ok.py"], 64, "not a duration"),
        (["--init-slots", "0", "ok.py"], 64, "from 1 up"),
        (["--show", "5", "ok.py"], 64, "ranks from 0 to 0"),
        (["--redirects", "7", "ok.py"], 64, "--redirects and --tee must be"),
        (["--env", "1X=2", "ok.py"], 64, "NAME=VALUE"),
        (["--env", "NOT_SET_HERE", "ok.py"], 64, "not set here"),
        (["--name", "a/b", "ok.py"], 64, "name of a folder"),
        (["--signals-to-handle", "SIGNOPE", "ok.py"], 64, "signal 'SIGNOPE' does not exist"),
        (["--config", "absent.yaml", "ok.py"], 66, "absent.yaml does not exist\n"),
        (
            ["--config", "gsm8k_1GPU", "ok.py"],
            66,
            "gsm8k_1GPU does not exist; gsm8k_1GPU is a config of `stoker train`",
        ),
        (["--config", "broken.yaml", "ok.py"], 65, "is not YAML at line 3"),
        (["--config", "list.yaml", "ok.py"], 65, "holds a list"),
        (["--config", "typo.yaml", "ok.py"], 78, "unknown key 'max_restart' (did you mean max_restarts?)"),
        (["--config", "value.yaml", "ok.py"], 78, "max-restarts: 'many' is not a whole number"),
        (["--hosts", "a,a", "ok.py"], 64, "listed twice"),
        (["--hosts", "-oProxyCommand=x", "ok.py"], 64, "expected one argument"),
        (["--no-python", "--module", "ok.py"], 64, "--no-python and --module contradict each other"),
        (["--logs-specs", "nope", "ok.py"], 64, "invalid choice: 'nope' (choose from"),
        (["--start-method", "nope", "ok.py"], 64, "invalid choice: 'nope' (choose from"),
        (["--event-log-handler", "nope", "ok.py"], 64, "invalid choice: 'nope' (choose from"),
        (["--prefix", "sometimes", "ok.py"], 64, "invalid choice: 'sometimes' (choose from"),
        ([], 64, "the script is missing"),
    ],
)
def test_bad_words(stoker: Stoker, words: list[str], code: int, says: str) -> None:
    stoker.script("ok.py", OK)
    for name, text in (
        ("broken.yaml", "a: 1\nb: [1,\n"),
        ("list.yaml", "- 1\n"),
        ("typo.yaml", "max_restart: 3\n"),
        ("value.yaml", "max-restarts: many\n"),
    ):
        stoker.script(name, text)
    refused(stoker, "run", *words, code=code, says=says)


def test_a_syntax_error_is_shown_with_its_own_caret(stoker: Stoker) -> None:
    text = refused(
        stoker, "run", stoker.script("bad.py", "x = 1\ndef f(:\n    pass\n"), code=65, says="does not parse", lines=5
    )
    assert 'File "bad.py", line 2' in text and "    def f(:\n          ^\n" in text


def test_unknown_command_and_bare_call(stoker: Stoker) -> None:
    refused(stoker, "rnu", code=64, says="did you mean run?")
    assert stoker().code == 64 and "usage: stoker COMMAND" in stoker("--help").out


def test_config_file_flags_and_environment_in_order(stoker: Stoker) -> None:
    stoker.script("c.yaml", "nproc-per-node: 3\nname: from-file\n")
    script = stoker.script("ok.py", OK)
    assert len(stoker("run", "--config", "c.yaml", script).out.splitlines()) == 3
    assert len(stoker("run", "--config", "c.yaml", script, env={"PET_NPROC_PER_NODE": "2"}).out.splitlines()) == 2
    assert (
        len(
            stoker(
                "run", "--config", "c.yaml", "--nproc_per_node=1", script, env={"PET_NPROC_PER_NODE": "2"}
            ).out.splitlines()
        )
        == 1
    )
    assert "from-file" in stoker.latest.name


def test_torchrun_words_that_mean_nothing_here_are_said_so(stoker: Stoker) -> None:
    flags = [
        "--standalone",
        "--nnodes=1",
        "--rdzv_backend=c10d",
        "--monitor-interval",
        "5",
        "--start_method",
        "spawn",
        "--node_rank=0",
        "--nproc_per_node=2",
    ]
    done = stoker(
        "run",
        *flags,
        stoker.script("a.py", "import sys; print(sys.argv[1:])"),
        "--lr",
        "3",
        "--nproc-per-node",
        "9",
        "-m",
    )
    assert done.code == 0 and done.log(1) == b"['--lr', '3', '--nproc-per-node', '9', '-m']\n"
    assert done.err.count("--nproc-per-node comes after a.py, so it is passed to the script; put it before") == 1
    for flag in ("--rdzv-backend", "--monitor-interval", "--start-method", "--node-rank"):
        assert done.err.count(f"{flag} has no effect here: ") == 1
    assert "--standalone" not in done.err


def test_a_flag_after_the_script_is_said_unless_the_script_knows_it(stoker: Stoker) -> None:
    own = stoker.script(
        "own.py",
        "import argparse; p = argparse.ArgumentParser(); p.add_argument('--log-dir', dest='log_dir'); p.add_argument('--config')",
    )
    (stoker.cwd / "mod.py").write_text("")
    after = {
        (own, "--log-dir", "x", "--config=y", "3"): [],
        (own, "--nproc_per_node=2"): ["--nproc_per_node"],
        (own, "--gpus", "0", "--detach"): ["--gpus", "--detach"],
        ("-m", "mod", "--config", "y"): [],
        ("-m", "mod", "--nproc-per-node", "2"): ["--nproc-per-node"],
    }
    for words, said in after.items():
        lines = stoker("run", "--dry-run", *words).out.splitlines()
        assert [line.split()[0] for line in lines if "comes after" in line] == said, words


def test_a_port_that_is_taken(stoker: Stoker) -> None:
    script = stoker.script("port.py", "import os; print('port', os.environ['MASTER_PORT'])")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        text = refused(
            stoker,
            "run",
            "--master-port",
            str(port),
            script,
            code=69,
            says=f"port {port} is in use by pid {os.getpid()}",
        )
        assert os.path.basename(sys.executable) in text  # and what that process is
        done = stoker("run", script, env={"MASTER_PORT": str(port)})
        assert (
            done.code == 0
            and f"MASTER_PORT={port} is in use by pid {os.getpid()}" in done.err
            and done.log(0).split()[1] != str(port).encode()
        )
    done = stoker("run", "--master-port", str(port), script)
    assert done.log(0).split()[1] == str(port).encode()


def test_runs_dir_that_can_not_be_written(stoker: Stoker) -> None:
    script = stoker.script("ok.py", OK)
    stoker.script("afile", "")
    refused(stoker, "run", "--runs-dir", "afile/runs", script, code=73, says="can't be written: Not a directory")
    refused(stoker, "run", "--runs-dir", "/proc/nope", script, code=73, says="can't be written")


def test_a_full_disk(stoker: Stoker) -> None:
    full = stoker.cwd / "full"
    full.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=512k", "none", str(full)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no right to mount a small file system: {mounted.stderr.strip()}")
    try:
        (full / "filler").write_bytes(b"x" * 512 * 1024)
        refused(stoker, "run", "--runs-dir", "full", stoker.script("ok.py", OK), code=73, says="has 0 bytes free")
        refused(
            stoker, "run", "--no-preflight", "--runs-dir", "full", "ok.py", code=73, says="its disk or quota is full"
        )
        assert os.listdir(full) == ["filler"]
        (full / "filler").unlink()
        script = stoker.script("much.py", "print('x' * 600_000)\nprint('end')")
        done = stoker("run", "--no-preflight", "--runs-dir", "full", script)
        assert done.code == 0 and "could not be written: No space left on device" in done.err and "end" in done.out
    finally:
        subprocess.run(["umount", str(full)], check=True)


def test_a_dead_nvml_library(stoker: Stoker) -> None:
    """A file that is no library where the driver's library should be: a driver that does not answer, not a machine without GPUs."""
    (stoker.cwd / "libnvidia-ml.so.1").write_text("this is not a library\n")
    script = stoker.script("ok.py", OK)
    env = {"LD_LIBRARY_PATH": str(stoker.cwd), "STOKER_MACHINE": ""}
    refused(
        stoker,
        "run",
        script,
        code=69,
        says="the NVIDIA driver is not responding (libnvidia-ml.so.1 does not load",
        env=env,
    )
    done = stoker("run", "--nproc-per-node", "cpu", script, env=env)
    assert done.code == 0 and "CPU rank" in done.err


def test_gpus_end_to_end_on_a_recorded_machine(stoker: Stoker, box: Callable[..., dict[str, str]]) -> None:
    """Labels, GPU_RANK and visibility by physical number and UUID."""
    script = stoker.script(
        "g.py",
        "import os; e = os.environ; print(e['RANK'], e['LOCAL_RANK'], e['GPU_RANK'], e.get('CUDA_VISIBLE_DEVICES'), e['CUDA_DEVICE_ORDER'])",
    )
    uuids = [gpu_json(n)["uuid"] for n in range(4)]
    done = stoker("run", "--gpus", "1,3", script, env=box(4))
    assert sorted(done.out.splitlines()) == [
        f"GPU1:0 0 1 {uuids[1]},{uuids[3]} PCI_BUS_ID",
        f"GPU3:1 1 3 {uuids[1]},{uuids[3]} PCI_BUS_ID",
    ]
    assert "✓ Found 4 GPU(s), using 2 GPUs: GPU 1, GPU 3" in done.err
    done = stoker("run", "--gpus", "1,3", "--isolate", script, env=box(4))
    assert sorted(done.out.splitlines()) == [f"GPU1:0 0 1 {uuids[1]} PCI_BUS_ID", f"GPU3:1 0 3 {uuids[3]} PCI_BUS_ID"]
    done = stoker("run", script, env=box(2))
    assert sorted(done.out.splitlines()) == ["GPU0:0 0 0 None PCI_BUS_ID", "GPU1:1 1 1 None PCI_BUS_ID"]
    done = stoker(
        "run",
        "--nproc-per-node",
        "cpu",
        stoker.script("c.py", "import os; print(repr(os.environ['CUDA_VISIBLE_DEVICES']))"),
        env=box(2, cores=2),
    )
    assert sorted(done.out.splitlines()) == ["CPU0:''", "CPU1:''"]
    refused(
        stoker, "run", "--nproc-per-node", "3", script, code=69, says="3 ranks requested, but 2 GPUs usable", env=box(2)
    )


UNTIL_FOUR_RUN = """
import glob, os, time
print("on", os.environ["GPU_RANK"], flush=True)
open("up-" + os.environ["GPU_RANK"], "w").close()
while len(glob.glob("up-*")) < 4:
    time.sleep(0.05)
"""


def test_two_launches_never_share_a_gpu(stoker: Stoker, box: Callable[..., dict[str, str]]) -> None:
    script = stoker.script("hold.py", UNTIL_FOUR_RUN)
    unique = [gpu_json(n, uuid=f"GPU-test-{os.getpid()}-{n}") for n in range(4)]
    env = box(unique)
    runs = [
        stoker.start("run", "--gpus", "any:1", "--quiet", "--name", f"r{n}", script, env=env, stderr=subprocess.PIPE)
        for n in range(4)
    ]
    shown = [run.communicate(timeout=100)[0].decode() for run in runs]
    assert [run.returncode for run in runs] == [0] * 4
    assert sorted(text.split()[1] for text in shown) == ["0", "1", "2", "3"]


def test_waiting_for_a_gpu(stoker: Stoker, box: Callable[..., dict[str, str]]) -> None:
    unique = [gpu_json(0, uuid=f"GPU-wait-{os.getpid()}")]
    env = box(unique)
    hold = "import os, time; print('on', flush=True)\nwhile not os.path.exists('free'): time.sleep(0.05)"
    holder = stoker.start("run", "--name", "holder", stoker.script("h.py", hold), env=env)
    assert holder.stdout is not None
    while b"on" not in holder.stdout.readline():
        continue
    refused(stoker, "run", stoker.script("ok.py", OK), code=69, says="GPU 0 is in use by run ", env=env)
    short = stoker("run", "--wait", "1s", "ok.py", env=env)
    assert short.code == 75 and "waited 1.0 s" in short.err
    waiting = stoker.start("run", "--wait", "100s", "ok.py", env=env)
    assert waiting.stdout is not None
    while b"waiting for up to" not in (line := waiting.stdout.readline()):
        assert line, "it ended without waiting"
    stoker.script("free", "")
    assert b"GPU0:ran" in waiting.communicate(timeout=100)[0] and waiting.returncode == 0
    assert holder.wait(60) == 0


@pytest.mark.parametrize("text", ["{", "[]", '{"schema": 9}', json.dumps({"schema": 1, "hostname": "x", "colour": 1})])
def test_a_corrupt_recorded_machine(stoker: Stoker, text: str, tmp_path: Path) -> None:
    stoker.script("corrupt.json", text)
    done = stoker("run", stoker.script("ok.py", OK), env={"STOKER_MACHINE": str(tmp_path / "corrupt.json")})
    assert done.code in (65, 69) and "corrupt.json" in done.err and "Traceback" not in done.err


def test_help(stoker: Stoker) -> None:
    for command in ("run", "runs", "why", "logs", "attach", "stop", "docs", "completion"):
        done = stoker(command, "--help")
        assert done.code == 0 and f"stoker {command}" in done.out


def test_completion_without_its_package_is_one_line() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import sys; sys.modules['shtab'] = None; from stoker.cli.main import main; sys.exit(main(['completion', 'bash']))"],
        text=True,
        capture_output=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 69 and done.stderr.count("\n") == 1 and "pip install shtab" in done.stderr, done.stderr


def test_completion(stoker: Stoker) -> None:
    pytest.importorskip("shtab")
    script = stoker("completion", "bash").out
    done = subprocess.run(["bash"], input=script + "complete -p stoker\n", text=True, capture_output=True, check=False)
    assert done.returncode == 0 and "--nproc-per-node" in script
    assert "-o default" in done.stdout  # file names where it has no word of its own
    said = stoker("completion", "--help").out
    assert all(f"stoker completion {shell}" in said for shell in ("bash", "zsh", "tcsh"))


def test_dry_run_starts_and_writes_nothing(stoker: Stoker) -> None:
    script = stoker.script("ok.py", OK)
    before = sorted(os.listdir(stoker.cwd))
    done = stoker("run", "--dry-run", "--json", "--nproc-per-node", "2", script)
    plan: dict[str, Any] = json.loads(done.out)
    assert [place["label"] for place in plan["places"]] == ["CPU0", "CPU1"] and plan["argv"] == [
        sys.executable,
        "ok.py",
    ]
    assert "would start 1 rank of: " in stoker("run", "--dry-run", script).out
    assert "would start 2 ranks" in stoker("run", "--dry-run", "--nproc-per-node", "2", script).out
    assert sorted(os.listdir(stoker.cwd)) == before


def test_closed_standard_streams(stoker: Stoker) -> None:
    script = stoker.script("ok.py", OK)
    done = subprocess.run(
        ["sh", "-c", f"{sys.executable} -m stoker run --nproc-per-node 2 {script} <&- >&- 2>&-"],
        cwd=stoker.cwd,
        env=stoker.env,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0 and stoker.result().log(1) == b"ran\n"


def test_a_bad_log_dir_is_refused_before_the_start(stoker: Stoker) -> None:
    refused(
        stoker,
        "run",
        "--log-dir",
        "/proc/nope/x",
        stoker.script("ok.py", OK),
        code=73,
        says="--log-dir /proc/nope/x can't be written",
    )


def test_few_descriptors_are_made_enough(stoker: Stoker) -> None:
    script = stoker.script("n.py", "import resource; print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])")
    done = subprocess.run(
        ["sh", "-c", f"ulimit -Sn 64; {sys.executable} -m stoker run -q --nproc-per-node 40 {script}"],
        cwd=stoker.cwd,
        env=stoker.env,
        capture_output=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(b":64\n") == 40


def test_a_refusal_is_notified(stoker: Stoker) -> None:
    stoker("run", "--notify", "cat > told", "--gpus", "7", stoker.script("ok.py", OK))
    told = json.loads((stoker.cwd / "told").read_text())
    assert (told["status"], told["cause"], told["exit_code"]) == ("refused", "gpu.too-few", 69)


def test_module_glued_to_its_flag(stoker: Stoker) -> None:
    done = subprocess.run(
        [sys.executable, "-Bmstoker", "run", stoker.script("f.py", "import sys; print(sys.flags.dont_write_bytecode)")],
        cwd=stoker.cwd,
        env=stoker.env,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0 and done.stdout == b"1\n"


def test_preflight_warns_and_refuses(stoker: Stoker, box: Callable[..., dict[str, str]]) -> None:
    script = stoker.script("ok.py", OK)
    done = stoker("run", script, env={"CUDA_LAUNCH_BLOCKING": "1"})
    assert done.code == 0 and "! env.slow: CUDA_LAUNCH_BLOCKING=1 waits for every kernel" in done.err
    limited = ["sh", "-c", f"ulimit -v 60000000; {sys.executable} -m stoker run {script}"]
    done_limited = subprocess.run(
        limited, cwd=stoker.cwd, env={**stoker.env, **box(1)}, capture_output=True, text=True, timeout=60, check=False
    )
    assert done_limited.returncode == 69 and "host.address-space: RLIMIT_AS" in done_limited.stderr
    limited[2] = limited[2].replace(" run ", " run --no-preflight ")
    assert (
        subprocess.run(
            limited, cwd=stoker.cwd, env={**stoker.env, **box(1)}, capture_output=True, timeout=60, check=False
        ).returncode
        == 0
    )


def test_exclude_bad_leaves_a_dead_gpu_out(stoker: Stoker) -> None:
    dead = {"STOKER_MACHINE": str(Path(__file__).parents[1] / "machines" / "dead-gpu-0.json")}
    script = stoker.script("ok.py", OK)
    done = stoker("run", "--exclude-bad", "--share-gpus", script, env=dead)
    assert done.code == 0 and sorted(done.out.splitlines()) == ["GPU1:ran", "GPU2:ran", "GPU3:ran"]
    assert "using 3 GPUs: GPU 1, GPU 2, GPU 3; left out: GPU 0 is not responding: dead: error 999" in done.err
    refused(
        stoker,
        "run",
        "--exclude-bad",
        "--nproc-per-node",
        "4",
        script,
        code=69,
        says="4 ranks requested, but 3 GPUs usable",
        env=dead,
    )
    refused(
        stoker,
        "run",
        "--exclude-bad",
        "--legal-ranks",
        "1,2,4,8",
        script,
        code=69,
        says="the plan has 3 ranks, but --legal-ranks allows 1, 2, 4, 8; use --nproc-per-node 2",
        env=dead,
    )
