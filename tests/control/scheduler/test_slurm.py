"""Slurm as the engine, against a real slurmctld and slurmd: two "nodes" on this machine (tests/slurmcluster.py)."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import stoker as package
from conftest import Done, Stoker, forget_verdict, gpu_json, tagged, wait_for
from forked_ranks import free_port
from slurmcluster import SlurmCluster
from stoker.contract.errors import Refusal
from stoker.contract.evidence import Verdict
from stoker.contract.process import find_process
from stoker.contract.slurm_job import SlurmJob
from stoker.control.machine.run_origin import RunOrigin
from stoker.control.scheduler import slurm as engine
from stoker.control.scheduler import slurm_job
from stoker.control.scheduler.slurm_submit import SubmitOptions, make_script, parse_seeds, parse_time_limit, slurm_time
from stoker.control.verdict import slurm_ends as words

ALL_REDUCE = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(total)
print("sum", total.item(), "of", dist.get_world_size(), "on", os.environ["SLURMD_NODENAME"], flush=True)
dist.destroy_process_group()
"""
# Saves when it is asked to stop, and goes on from there: what a training script does, without its torch.
SAVES = """
import os, pathlib, signal, sys, time
saved = pathlib.Path(os.environ["STOKER_RUN_DIR"], f"saved-{os.environ['RANK']}")
if saved.exists():
    print("goes on from", saved.read_text(), flush=True)
    sys.exit(0)
def stop(*_):
    saved.write_text("step 41")
    print("saved", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
print("begins", flush=True)
time.sleep(100)
"""
WAITS = "import time\nprint('begins', flush=True)\ntime.sleep(100)\n"


def submit(stoker: Stoker, slurm: SlurmCluster, *args: str, code: int = 0) -> Done:
    done = stoker("submit", *args, env=slurm.env, timeout=60)
    assert done.code == code, done.out + done.err
    return done


def begun(stoker: Stoker, ranks: int, attempt: int = 0) -> None:
    logs = f"runs/2*/attempt-{attempt}/rank-*.log"
    assert wait_for(
        lambda: True if sum(b"begins" in log.read_bytes() for log in stoker.cwd.glob(logs)) == ranks else None, 30
    ), _printed(stoker)


def number(stoker: Stoker) -> str:
    return str(wait_for(lambda: next((path.stem for path in stoker.cwd.glob("runs/slurm/*.json")), None), 20))


def _printed(stoker: Stoker) -> str:
    return "\n".join(path.read_text() for path in stoker.cwd.glob("runs/slurm/*.out"))


# ---- through a real Slurm ----


def test_two_ranks_on_two_nodes_through_srun(stoker: Stoker, slurm: SlurmCluster) -> None:
    script = stoker.script("train.py", ALL_REDUCE)
    done = stoker.torch("submit", "--nodes", "2", "--time", "5m", "--", script, env=slurm.env)
    assert done.code == 0, done.out + done.err
    assert "node1/CPU0:sum 3.0 of 2 on node1" in done.out and "node2/CPU0:sum 3.0 of 2 on node2" in done.out
    assert "RUNNING on node[1-2]" in done.err and "COMPLETED" in done.err
    assert done.verdict["cause"] == "completed" and done.verdict["run"].endswith(f"train-{number(stoker)}")


def test_a_recipe_of_ours_trains_on_two_nodes(stoker: Stoker, slurm: SlurmCluster) -> None:
    stoker.script("book.txt", "It was a dark night, and the rain fell in torrents. " * 400)
    words = (
        "--preset",
        "debug",
        "--data",
        "book.txt",
        "--tokenizer.path",
        "bytes",
        "--context_length",
        "32",
        "--batch.tokens",
        "256",
        "--max-steps",
        "3",
    )
    done = stoker.torch(
        "submit",
        "--nodes",
        "2",
        "--time",
        "5m",
        "--",
        "train",
        "pretrain",
        *words,
        "--parallel.device",
        "cpu",
        env=slurm.env,
    )
    assert done.code == 0 and "on 2 × cpu" in done.out and (done.run_dir / "hf" / "config.json").exists(), (
        done.out + done.err
    )


def test_roles_are_spread_over_the_nodes(stoker: Stoker, slurm: SlurmCluster) -> None:
    """The server on the first node, the trainers' own world on both; a killed server is replaced there."""
    serve = (
        "import http.server, os, sys\n"
        "class Answer(http.server.BaseHTTPRequestHandler):\n"
        "    def do_GET(self):\n        self.send_response(200); self.end_headers(); self.wfile.write(b'fine')\n"
        "        if self.path == '/end': os.kill(os.getpid(), 9)\n"
        "    def log_message(self, *_): pass\n"
        "print('serves on', os.environ['SLURMD_NODENAME'], flush=True)\n"
        "http.server.HTTPServer(('127.0.0.1', int(os.environ['STOKER_PORT'])), Answer).serve_forever()\n"
    )
    train = (
        "import os, time, urllib.request\n"
        "def ask(path): return urllib.request.urlopen(f'http://{os.environ[\"STOKER_ROLE_SERVER\"]}/{path}').read()\n"
        "if os.environ['RANK'] == '0':\n    ask('end')\n"
        "    while True:\n        time.sleep(0.1)\n"
        "        try: ask('')\n        except OSError: continue\n        break\n"
        "print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'], 'on', os.environ['SLURMD_NODENAME'], flush=True)\n"
    )
    stoker.script("serve.py", serve)
    stoker.script("train.py", train)
    roles = {
        "server": {"command": "serve.py", "ready": {"http": "/"}, "restart": "always"},
        "trainer": {"command": "train.py", "count": 3, "min_hosts": 1},
    }
    job = stoker.script("job.yaml", json.dumps({"roles": roles}))
    done = submit(stoker, slurm, "--nodes", "2", "--time", "5m", "--", "--roles", job)
    assert done.out.count("[server] node1/CPU0:serves on node1") == 2 or done.out.count("serves on node1") == 2, (
        done.out
    )
    for rank, node in enumerate(("node1", "node2", "node2")):
        assert f"rank {rank} of 3 on {node}" in done.out, done.out + done.err
    assert done.verdict["summary"] == "trainer ended with exit code 0; server stopped"
    refused = stoker("submit", "--nodes", "2", "--", "--roles", job, "train.py", env=slurm.env)
    assert refused.code == 64 and "a multi-role job takes no script" in refused.err


def test_the_guilty_ranks_exit_code_is_the_jobs_and_the_commands(stoker: Stoker, slurm: SlurmCluster) -> None:
    script = stoker.script("fails.py", "import os, sys\nsys.exit(7 if os.environ['RANK'] == '1' else 0)\n")
    done = submit(stoker, slurm, "--nodes", "2", "--", script, code=7)
    job = number(stoker)
    assert (done.verdict["cause"], done.verdict["rank"], done.verdict["host"]) == ("rank.exit", 1, "node2")
    assert "ExitCode=7:0" in slurm.ask("scontrol", "show", "job", job) and slurm.state(job) == "FAILED"
    why = stoker("why", f"slurm:{job}", env=slurm.env)
    assert "cause: rank.exit, rank 1 on host node2" in why.out and f"Slurm: job {job} is FAILED" in why.out


def test_a_job_that_a_rank_submits_has_its_own_nodes_and_outlives_the_run(stoker: Stoker, slurm: SlurmCluster) -> None:
    """By plain sbatch, which hands the rank's whole environment on: the job is neither a rank of that run nor stopped with it."""
    inner = "import os, time\nprint('inner', os.environ['RANK'], os.environ['SLURMD_NODENAME'], flush=True)\ntime.sleep(5)\n"
    outer = "import os, subprocess\nif os.environ['RANK'] == '0': print(subprocess.run(['sbatch', '--parsable', 'job.sh'], capture_output=True, text=True, check=True).stdout, flush=True)\n"
    stoker.script("inner.py", inner)
    stoker.script(
        "job.sh",
        f"#!/bin/bash\n#SBATCH --nodes=2 --ntasks-per-node=1 --output=job.out\nexec {sys.executable} -m stoker run --name inner inner.py\n",
    )
    done = stoker("run", "--name", "outer", stoker.script("outer.py", outer), env=slurm.env)
    assert done.code == 0, done.err
    job = next(stoker.cwd.glob("runs/*-outer/attempt-0/rank-0.log")).read_text().split()[0]
    assert (
        wait_for(lambda: slurm.state(job) if slurm.state(job) not in ("PENDING", "RUNNING", "COMPLETING") else None, 60)
        == "COMPLETED"
    ), (stoker.cwd / "job.out").read_text()
    logs = sorted(path.read_text() for path in stoker.cwd.glob("runs/*-inner/attempt-0/rank-*.log"))
    assert logs == ["inner 0 node1\n", "inner 1 node2\n"], (stoker.cwd / "job.out").read_text()


def test_a_cancelled_job_leaves_nothing_and_its_verdict_says_who_ended_it(stoker: Stoker, slurm: SlurmCluster) -> None:
    run = stoker.start(
        "submit", "--nodes", "2", "--name", "long", "--", stoker.script("waits.py", WAITS), env=slurm.env
    )
    begun(stoker, 2)
    job = number(stoker)
    slurm.ask("scancel", job)
    out, _ = run.communicate(timeout=100)
    assert run.returncode == 143, out.decode()
    assert f"Slurm job {job} was cancelled" in out.decode()
    assert wait_for(lambda: True if not tagged(stoker.cwd) else None, 12)
    for which in ("long", f"slurm:{job}"):
        told = json.loads(stoker("why", which, "--json", env=slurm.env).out)
        assert (told["cause"], told["status"], told["exit_code"]) == ("slurm.cancelled", "stopped", 143), told
        assert any(f"Slurm: job {job} is CANCELLED" in line for line in told["evidence"])
    # Slurm forgets a job within minutes: what was kept of it is enough.
    told = json.loads(stoker("why", "long", "--json", env={"PATH": str(stoker.cwd)}).out)
    assert told["cause"] == "slurm.cancelled"


def test_a_requeued_job_goes_on_with_the_same_run(stoker: Stoker, slurm: SlurmCluster) -> None:
    run = stoker.start(
        "submit", "--nodes", "2", "--requeue", "--name", "long", "--", stoker.script("saves.py", SAVES), env=slurm.env
    )
    begun(stoker, 2)
    job = number(stoker)
    slurm.ask("scancel", "--batch", "--signal=USR1", job)  # what Slurm itself sends so long before the end
    out, _ = run.communicate(timeout=60)
    said = out.decode()
    assert run.returncode == 0, said
    assert "Restarts=1" in slurm.ask("scontrol", "show", "job", job) and slurm.state(job) == "COMPLETED"
    (run_dir,) = stoker.cwd.glob("runs/2*")
    for rank in (0, 1):
        assert (run_dir / "attempt-0" / f"rank-{rank}.log").read_text() == "begins\nsaved\n"
        assert (run_dir / "attempt-1" / f"rank-{rank}.log").read_text() == "goes on from step 41\n"
    assert "requeueing it" in said and "restart 1" in said and f"starting run {run_dir.name} again" in said
    assert stoker.result().verdict["cause"] == "completed"


def test_a_notice_without_requeue_stops_the_run_and_the_verdict_says_why(stoker: Stoker, slurm: SlurmCluster) -> None:
    run = stoker.start(
        "submit", "--name", "long", "--time", "10m", "--", stoker.script("saves.py", SAVES), env=slurm.env
    )
    begun(stoker, 1)
    slurm.ask("scancel", "--batch", "--signal=USR1", number(stoker))
    out, _ = run.communicate(timeout=100)
    assert run.returncode == 143 and b"CPU0:saved" in out, out.decode()
    told = json.loads(stoker("why", "long", "--json", env=slurm.env).out)
    assert (told["cause"], told["status"], told["exit_code"]) == (
        "slurm.notice",
        "stopped",
        143,
    ) and "(time limit 00:10:00)" in told["summary"]


def test_an_array_of_seeds_is_a_run_each(stoker: Stoker, slurm: SlurmCluster) -> None:
    script = stoker.script(
        "seeded.py",
        "import os, sys\nprint('seed', os.environ['SEED'], flush=True)\nsys.exit(5 if os.environ['SEED'] == '4' else 0)\n",
    )
    done = submit(stoker, slurm, "--array-seeds", "3-4", "--name", "sweep", "--", script, code=5)
    assert "seed 3: CPU0:seed 3" in done.out and "seed 4: CPU0:seed 4" in done.out
    found = {
        path.name[16:]: json.loads((path / "verdict.json").read_text())["exit_code"]
        for path in stoker.cwd.glob("runs/2*")
    }
    assert found == {"sweep-seed3": 0, "sweep-seed4": 5}
    assert "cause: rank.exit" in stoker("why", f"slurm:{number(stoker)}_4", env=slurm.env).out


def test_a_job_cancelled_in_the_queue_has_a_verdict_without_a_run(stoker: Stoker, slurm: SlurmCluster) -> None:
    said = stoker.cwd / "said"
    with said.open("wb") as out:
        run = stoker.start(
            "submit", "--sbatch-option=--hold", "--", stoker.script("waits.py", WAITS), env=slurm.env, stdout=out
        )
    job = number(stoker)
    assert wait_for(lambda: True if b"PENDING (JobHeldUser)" in said.read_bytes() else None, 60), (
        said.read_bytes().decode()
    )
    slurm.ask("scancel", job)
    assert run.wait(60) == 143, said.read_bytes().decode()
    why = stoker("why", f"slurm:{job}", env=slurm.env)
    assert why.code == 0 and "cause: slurm.cancelled" in why.out


def test_ctrl_c_leaves_the_job_and_follow_takes_it_up_again(stoker: Stoker, slurm: SlurmCluster) -> None:
    run = stoker.start("submit", "--", stoker.script("waits.py", WAITS), env=slurm.env)
    begun(stoker, 1)
    job = number(stoker)
    run.send_signal(signal.SIGINT)
    out, _ = run.communicate(timeout=100)
    assert run.returncode == 0 and f"left job {job}; it keeps running. `stoker submit --follow {job}`".encode() in out
    assert slurm.state(job) == "RUNNING"
    again = stoker.start("submit", "--follow", job, env=slurm.env)
    slurm.ask("scancel", job)
    out, _ = again.communicate(timeout=100)
    assert again.returncode == 143 and b"CPU0:begins" in out


def test_in_sallocs_shell_a_plain_run_uses_the_whole_allocation(stoker: Stoker, slurm: SlurmCluster) -> None:
    script = stoker.script(
        "where.py",
        "import os, sys, time\nrank = os.environ['RANK']\nprint(rank, os.environ['SLURMD_NODENAME'], os.environ['WORLD_SIZE'], flush=True)\n"
        "open(f'said-{rank}', 'w').close()\nuntil = time.time() + 60\n"
        "while rank == '2' and time.time() < until and not all(os.path.exists(f'said-{one}') for one in range(4)): time.sleep(0.05)\n"
        "sys.exit(9 if rank == '2' else 0)\n",
    )
    done = _inside(stoker, slurm, ["salloc", "--quiet", "-N2", "--ntasks-per-node=2"], "run", "--grace", "10s", script)
    assert done.code == 9, done.err
    assert [done.log(rank) for rank in range(4)] == [b"0 node1 4\n", b"1 node1 4\n", b"2 node2 4\n", b"3 node2 4\n"]
    assert (done.verdict["rank"], done.verdict["host"]) == (2, "node2")


def test_in_a_job_the_cluster_check_asks_its_nodes(stoker: Stoker, slurm: SlurmCluster) -> None:
    done = _inside(stoker, slurm, ["salloc", "--quiet", "-N2"], "cluster", "check", "--quick", "--json")
    report = json.loads(done.out)
    hosts = report["facts"]["hosts"]
    assert [one["name"] for one in hosts] == ["node1", "node2"] and all(
        one["examination"] and not one["error"] for one in hosts
    ), done.out
    assert [one["text"] for one in report["findings"] if one["id"] == "between.same-host"] == [
        f"node1 and node2 are the same machine, {hosts[0]['address']}"
    ], "as here they are"
    refused = _inside(stoker, slurm, ["salloc", "--quiet", "-N2"], "cluster", "check", "--tune")
    assert refused.code == 64 and "a Slurm job has none" in refused.err


def test_one_node_needs_no_srun(stoker: Stoker, slurm: SlurmCluster) -> None:
    script = stoker.script(
        "where.py", "import os\nprint(os.environ['SLURM_JOB_ID'], os.environ.get('SLURM_STEP_ID', 'no step'))\n"
    )
    job = stoker.cwd / "job.sh"
    job.write_text(f"#!/bin/sh\nexec {sys.executable} -m stoker run {script}\n")
    said = slurm.ask(
        "sbatch", "--parsable", "-N1", "--ntasks-per-node=2", f"--chdir={stoker.cwd}", "--output=out", str(job)
    ).strip()
    assert wait_for(lambda: True if slurm.state(said) == "COMPLETED" else None, 30), (stoker.cwd / "out").read_text()
    done = stoker.result()
    assert [done.log(rank).split(b" ", 1)[1] for rank in (0, 1)] == [b"no step\n"] * 2


def test_each_node_uses_the_gpus_slurm_gave_it_and_no_others(stoker: Stoker, slurm: SlurmCluster, box) -> None:  # type: ignore[no-untyped-def]
    """Both made with one GPU per task: an srun of one task would get one GPU only, and the nodes have four cards as NVML sees them."""
    stoker.env.update(box(4))
    script = stoker.script("where.py", "print('ran')\n")
    for asked, ranks in (
        (["-N2", "--ntasks-per-node=2", "--gpus-per-task=1"], ["node1/GPU0", "node1/GPU1", "node2/GPU0", "node2/GPU1"]),
        (["-N2", "-G3"], ["node1/GPU0", "node1/GPU1", "node2/GPU0"]),
    ):
        done = _inside(stoker, slurm, ["salloc", "--quiet", *asked], "run", "--dry-run", "--json", script)
        assert done.code == 0, done.err
        assert [place["label"] for place in json.loads(done.out)["places"]] == ranks


def test_roles_share_the_gpus_slurm_gave(stoker: Stoker, slurm: SlurmCluster, box) -> None:  # type: ignore[no-untyped-def]
    """Of three: one serves and two train; a role on the CPU sees none. Shared: both nodes are this machine."""
    stoker.env.update(box(4))
    show = "import os\nprint('sees', os.environ['CUDA_VISIBLE_DEVICES'] or 'none', os.environ['SLURMD_NODENAME'])\n"
    stoker.script("see.py", show)
    roles = {name: {"command": "see.py", **more} for name, more in (("server", {}), ("trainer", {"count": 2}), ("log", {"gpus": 0}))}  # fmt: skip
    job = stoker.script("job.yaml", json.dumps({"roles": roles}))
    words = ("run", "--share-gpus", "--no-preflight", "--roles", job)
    done = _inside(stoker, slurm, ["salloc", "--quiet", "-N2", "-G3"], *words)
    assert done.code == 0, done.out + done.err
    cards = [gpu_json(number)["uuid"] for number in range(2)]
    assert f"[server] GPU0:sees {cards[0]} node1" in done.out, done.out
    assert f"[trainer] node1/GPU1:sees {cards[1]} node1" in done.out
    assert f"[trainer] node2/GPU0:sees {cards[0]} node2" in done.out
    assert "[log] CPU0:sees none node" in done.out


def test_started_once_per_task_it_refuses_in_one_line(stoker: Stoker, slurm: SlurmCluster) -> None:
    done = _inside(stoker, slurm, ["srun", "--quiet", "-N2", "-n2"], "run", stoker.script("ok.py", "print('ran')\n"))
    ours = [line for line in done.err.splitlines() if line.startswith("stoker: ")]
    assert done.code == 64 and len(ours) == 2 and all("once per task (2 times)" in line for line in ours), done.err
    assert not (stoker.cwd / "runs").exists()


def test_outside_its_job_a_run_is_refused_in_one_line(stoker: Stoker, slurm: SlurmCluster) -> None:
    """A shell may outlive its job, and a variable a shell."""
    over = slurm.ask("sbatch", "--parsable", "--output=/dev/null", "--wrap", "true").strip()
    assert wait_for(lambda: True if slurm.state(over) == "COMPLETED" else None, 20)
    for job, says in ((over, "that job is COMPLETED"), ("99999", "Slurm does not know that job")):
        done = stoker(
            "run",
            stoker.script("ok.py", "print('ran')\n"),
            env={**slurm.env, "SLURM_JOB_ID": job, "SLURM_JOB_NODELIST": "node[1-2]"},
        )
        assert (done.code, done.err.count("\n")) == (69, 1) and says in done.err and "unset SLURM_JOB_ID" in done.err, (
            done.err
        )
    assert not (stoker.cwd / "runs").exists()


def test_a_killed_launcher_leaves_nothing_on_any_node(stoker: Stoker, slurm: SlurmCluster) -> None:
    run = stoker.start(
        "submit", "--nodes", "2", "--name", "long", "--", stoker.script("waits.py", WAITS), env=slurm.env
    )
    begun(stoker, 2)
    (run_dir,) = stoker.cwd.glob("runs/2*")
    os.kill(json.loads((run_dir / "run.json").read_text())["launcher"]["pid"], signal.SIGKILL)
    out, _ = run.communicate(timeout=100)
    assert run.returncode == 137, out.decode()
    assert wait_for(lambda: True if not tagged(stoker.cwd) else None, 12)
    assert json.loads(stoker("why", "long", "--json", env=slurm.env).out)["cause"] == "launch.killed"


def test_with_torchruns_flags_each_task_is_a_machine_of_a_run_by_hand(stoker: Stoker, slurm: SlurmCluster) -> None:
    script = stoker.script(
        "where.py", "import os\nprint(os.environ['RANK'], os.environ['WORLD_SIZE'], os.environ['SLURMD_NODENAME'])\n"
    )
    port = free_port()
    line = f"exec {sys.executable} -m stoker run --runs-dir runs-$SLURM_PROCID --nnodes 2 --node-rank $SLURM_PROCID --master-addr 127.0.0.1 --master-port {port} {script}"
    done = subprocess.run(
        ["srun", "--quiet", "-N2", "-n2", "sh", "-c", line],
        cwd=stoker.cwd,
        env={**stoker.env, **slurm.env},
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    logs = sorted(path.read_text() for path in stoker.cwd.glob("runs-*/2*/attempt-0/rank-*.log"))
    assert logs == ["0 2 node1\n", "1 2 node2\n"]


def test_what_sbatch_refuses_is_said_in_its_words_and_leaves_no_script(stoker: Stoker, slurm: SlurmCluster) -> None:
    done = submit(stoker, slurm, "--partition", "gold", "--", stoker.script("ok.py", "print('ran')\n"), code=69)
    assert (
        done.err.count("\n") == 1
        and "sbatch refused the job" in done.err
        and "invalid partition specified: gold" in done.err
    )
    assert list((stoker.cwd / "runs" / "slurm").iterdir()) == []


def _inside(stoker: Stoker, slurm: SlurmCluster, around: list[str], *args: str) -> Done:
    done = subprocess.run(
        [*around, sys.executable, "-m", "stoker", *args],
        cwd=stoker.cwd,
        env={**stoker.env, **slurm.env},
        capture_output=True,
        timeout=60,
        check=False,
    )
    return Done(done.returncode, done.stdout, done.stderr, stoker.cwd)


# ---- what needs no Slurm ----


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (["--nodse", "2", "--", "ok.py"], 64, "unknown option --nodse (did you mean --nodes?)"),
        (["--nodes", "0", "--", "ok.py"], 64, "--nodes must be 1 or more, got 0"),
        (["--gpus-per-node", "many", "--", "ok.py"], 64, "--gpus-per-node must be a number from 1 up, or a type"),
        (["--time", "soon", "--", "ok.py"], 64, "--time soon is not a time; write it like 30m"),
        (["--mem", "lots", "--", "ok.py"], 64, "--mem must be a size"),
        (
            ["--time", "1m", "--signal-before", "2m", "--", "ok.py"],
            64,
            "--signal-before 120s must be shorter than --time 1m",
        ),
        (
            ["--time", "1:00", "--requeue", "--", "ok.py"],
            64,
            "--signal-before 60s must be shorter than --time 1:00",
        ),
        (["--array-seeds", "a-b", "--", "ok.py"], 64, "--array-seeds must be seeds like"),
        (
            ["--array-seeds", "1,3-1", "--", "ok.py"],
            64,
            "--array-seeds: a range must go from the lower to the higher seed with a step from 1 up, got 1,3-1",
        ),
        (
            ["--array-seeds", "1-3:0", "--", "ok.py"],
            64,
            "--array-seeds: a range must go from the lower to the higher seed with a step from 1 up, got 1-3:0",
        ),
        (["--name", "a b;c", "--", "ok.py"], 64, "--name 'a b;c'"),
        (["--partition", "x\ny", "--", "ok.py"], 64, "--partition"),
        (["ok.py"], 64, "put -- before the script"),
        (["--"], 64, "the script is missing"),
        (["--", "okay.py"], 66, "script okay.py does not exist (did you mean ok.py?)"),
        (["--", "--nproc-per-host", "2", "ok.py"], 64, "did you mean --nproc-per-node?"),
        (["--", "--name", "x", "ok.py"], 64, "--name must be before the --"),
        (["--", "train", "pretrain", "--runs_dir=x"], 64, "--runs-dir must be before the --"),
        (["--", "ok.py"], 69, "needs Slurm's sbatch, which is not on the PATH"),
    ],
)
def test_what_can_not_be_submitted_is_refused_in_one_line(
    stoker: Stoker, args: list[str], code: int, says: str
) -> None:
    stoker.script("ok.py", "print('ran')\n")
    done = stoker("submit", *args, env={"PATH": str(stoker.cwd)})
    assert (done.code, done.err.count("\n")) == (code, 1) and says in done.err, done.err
    assert not (stoker.cwd / "runs").exists()


def test_a_programs_own_arguments_are_its_own(stoker: Stoker) -> None:
    """Though they are named as ours are, and though no script ends in .py."""
    stoker.script("prog.py", "print('ran')\n")
    own = stoker("submit", "--dry-run", "--", "-m", "prog", "--name", "foo", "--min-hosts", "2", "--detach")
    assert own.code == 0 and "-m prog --name foo --min-hosts 2 --detach" in own.out and "--no-kill" not in own.out, (
        own.err
    )
    ours = stoker("submit", "--dry-run", "--nodes", "2", "--", "--min-hosts", "1", "-m", "prog")
    assert ours.code == 0 and "#SBATCH --no-kill" in ours.out, ours.err


def test_a_job_without_slurms_programs_is_refused(stoker: Stoker) -> None:
    done = stoker(
        "run",
        stoker.script("ok.py", "print('ran')\n"),
        env={"PATH": str(stoker.cwd), "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "a,b"},
    )
    assert done.code == 69 and "scontrol is not on the PATH" in done.err and done.err.count("\n") == 1


def test_a_job_script_holds_no_secret_and_quotes_what_a_shell_would_act_on(tmp_path: Path) -> None:
    words = [
        "--env",
        "HF_TOKEN=tell-nobody",
        "it's $(here)/train.py",
        "--api-key",
        "s3cret-value",
        "--note",
        'a; rm -rf "$HOME"',
    ]
    folder = str(tmp_path / "a folder")
    made = make_script(
        SubmitOptions(requeue=True, array_seeds="0-4", gpus_per_node="a100:2"),
        ["stoker", "run"],
        words,
        "train",
        folder,
        folder,
    )
    assert "tell-nobody" not in made.text and "s3cret" not in made.text
    assert sorted(made.secrets.values()) == ["s3cret-value", "tell-nobody"]
    path = tmp_path / "job.sh"
    path.write_text(made.text.replace("\nstoker run ", "\nprintf '%s\\n' "))
    env = {
        **made.secrets,
        "SLURM_ARRAY_JOB_ID": "12",
        "SLURM_ARRAY_TASK_ID": "3",
        "SLURM_JOB_ID": "15",
        "PATH": os.environ["PATH"],
    }
    done = subprocess.run(["bash", str(path)], env=env, capture_output=True, text=True, check=True, timeout=20)
    assert done.stdout.splitlines() == [
        "--name",
        "train-12-seed3",
        "--runs-dir",
        folder,
        "--env",
        "SEED=3",
        "--env",
        "HF_TOKEN",
        *words[2:],
    ]
    assert f"#SBATCH --chdir='{folder}'" in made.text and "#SBATCH --gpus-per-node=a100:2" in made.text


def test_a_requeued_job_goes_on_although_its_first_start_was_on_another_node(stoker: Stoker) -> None:
    """Whether a launcher on another host lives can't be told from here; that Slurm runs a job in one place at a time can."""
    step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    script = stoker.script("fails.py", "import sys\nsys.exit(3)\n")
    assert stoker("run", "--name", "x", script, env=step).code == 3
    (run_dir,) = stoker.cwd.glob("runs/2*")
    about = json.loads((run_dir / "run.json").read_text())
    about["launcher"]["host"] = "elsewhere"
    (run_dir / "run.json").write_text(json.dumps(about))
    forget_verdict(run_dir)
    other = stoker("run", "--name", "x", script, env={**step, "SLURM_JOB_ID": "8"})
    assert other.code == 69 and "was started on host elsewhere and may be running there" in other.err
    assert stoker("run", "--name", "x", script, env=step).code == 3
    assert list(stoker.cwd.glob("runs/2*")) == [run_dir] and (run_dir / "attempt-1").is_dir()


def test_the_words_slurm_uses_are_read() -> None:
    assert engine.parse_tasks_per_node("2(x3),1") == [2, 2, 2, 1]
    assert engine.parse_gres_lines(
        "   JOB_GRES=gpu:3\n     Nodes=node1 CPU_IDs=0 Mem=0 GRES=gpu:2(IDX:0-1)\n     Nodes=node[2-3] CPU_IDs=0 Mem=0 GRES=\n"
    ) == [("node1", "gpu:2(IDX:0-1)"), ("node[2-3]", "")]
    assert [
        engine.count_gpus(held)
        for held in ("gpu:2(IDX:0-1)", "gpu:a100:4(IDX:0-3),gpu:h100:1(IDX:4)", "gpu:8", "shard:3(IDX:0)", "")
    ] == [2, 5, 8, 0, 0]
    assert [slurm_time(text) for text in ("90m", "2d", "30s", "1-12:00:00", "15")] == [
        "90",
        "2880",
        "1",
        "1-12:00:00",
        "15",
    ]
    spelled = {
        "90": 5400,
        "1:00": 60,
        "1:30:00": 5400,
        "1-2": 93600,
        "1-2:30": 95400,
        "1-2:30:15": 95415,
        "0": 0,
        "UNLIMITED": None,
    }
    assert {text: parse_time_limit(text) for text in spelled} == spelled
    assert parse_seeds("0-4") == [0, 1, 2, 3, 4] and parse_seeds("1,7,10-14:2%2") == [1, 7, 10, 12, 14]
    job = slurm_job.parse_sacct("12|CANCELLED by 1000|0:15|None|node[1-2]|01:00:00")
    assert job == SlurmJob("12", "CANCELLED", "", 0, 15, 0, "node[1-2]", "01:00:00", "1000")


_PARENT = find_process(os.getppid())
assert _PARENT is not None
IN_A_RANK = RunOrigin(_PARENT.pid, _PARENT.start, "7", (1,), "").text()
NOT_BELOW_IT = RunOrigin(_PARENT.pid, _PARENT.start - 1, "7", (1,), "").text()


@pytest.mark.parametrize(
    ("given", "whole"),
    [
        ({}, True),  # the job script
        ({"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"}, True),  # salloc's shell on the first node
        ({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PTY_PORT": "4711"}, True),  # srun --pty bash
        ({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"}, False),  # srun -n1: its own share, on its own node
        ({"STOKER_RUN_ID": "20260101-x", "STOKER_RUN_ORIGIN": IN_A_RANK}, False),
        (
            {"STOKER_RUN_ID": "20260101-x", "STOKER_RUN_ORIGIN": NOT_BELOW_IT},
            True,
        ),  # a rank's sbatch handed its environment on
        ({"STOKER_RUN_ID": "20260101-x"}, True),
    ],
)
def test_who_asks_decides_whether_the_whole_job_is_meant(
    given: dict[str, str], whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = {
        "hostnames": "a\nb\n",
        "job": "",
        "node": "NodeName=a NodeAddr=10.0.0.1\nNodeName=b NodeAddr=10.0.0.2\n",
        "config": "TaskPlugin = task/affinity\n",
    }
    monkeypatch.setattr(
        engine, "run_slurm_command", lambda *argv: answers[next(word for word in argv if word in answers)]
    )
    found = engine.find_allocation(
        {
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "[a-b]",
            "SLURM_TASKS_PER_NODE": "2,1",
            "SLURMD_NODENAME": "a",
            **given,
        }
    )
    if not whole:
        assert found is None
        return
    assert found is not None
    assert [(host.name, host.address, host.slots, host.here) for host in found.hosts] == [
        ("a", "10.0.0.1", 2, True),
        ("b", "10.0.0.2", 1, False),
    ]
    step = found.transports["b"].python(found.hosts[1], found, ["-V"])
    assert "--cpu-bind=none" in step and "--nodelist=b" in step and step[-2:] == [sys.executable, "-V"]


def test_a_step_of_many_tasks_is_not_a_run_each() -> None:
    with pytest.raises(Refusal, match="once per task"):
        engine.find_allocation(
            {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "2"}
        )


@pytest.mark.parametrize(
    ("state", "own", "cause", "status"),
    [
        ("CANCELLED", "launch.stopped", "slurm.cancelled", "stopped"),
        ("TIMEOUT", "launch.killed", "slurm.timeout", "stopped"),
        ("PREEMPTED", "launch.stopped", "slurm.preempted", "stopped"),
        ("NODE_FAIL", "host.lost", "slurm.node-fail", "failed"),
        ("OUT_OF_MEMORY", "rank.killed", "slurm.out-of-memory", "failed"),
        ("OUT_OF_MEMORY", "oom.host", "oom.host", "failed"),  # Stoker knows the rank
        ("FAILED", "rank.exception", "rank.exception", "failed"),
        ("CANCELLED", "rank.exception", "rank.exception", "failed"),  # it had failed before somebody cancelled it
        ("COMPLETED", "completed", "completed", "completed"),
    ],
)
def test_slurms_act_is_the_cause_and_a_runs_own_cause_stays(state: str, own: str, cause: str, status: str) -> None:
    verdict = Verdict("completed" if own == "completed" else "failed", own, "as the run saw it", 143, rank=1)
    told = words.refine_verdict(verdict, SlurmJob("12", state, limit="01:00:00", nodes="node[1-2]"))
    assert (told.cause, told.status, told.exit_code) == (cause, status, 143)
    assert any(f"Slurm: job 12 is {state}" in line for line in told.evidence)
    assert (told.rank is None) == (cause != own)


def test_a_job_back_in_the_queue_says_so() -> None:
    told = words.refine_verdict(
        Verdict("stopped", "launch.stopped", "stopped by SIGTERM", 143),
        SlurmJob("12", "PENDING", "BeginTime", restarts=1),
    )
    assert told.cause == "slurm.requeued" and told.retryable and "in the queue again (BeginTime)" in told.summary


# ---- the scheduler's own files ----


def test_slurm_is_named_in_its_own_files_only() -> None:
    """Adding a scheduler touches its own files and one line of contract/schedulers.py."""
    allowed = {
        "contract/schedulers.py": "the line that makes it known",
        "contract/slurm_job.py": "its job, as it describes it",
        "control/scheduler/slurm.py": "its allocation, and the transport srun",
        "control/scheduler/slurm_job.py": "follows a job and the runs in it",
        "control/scheduler/slurm_submit.py": "its job script, and handing that to sbatch",
        "control/verdict/slurm_ends.py": "its causes",
        "cli/submit.py": "the command for it: help texts, and sbatch's options",
        "cli/main.py": "the help text of that command",
    }
    root = Path(package.__file__).parent
    named = {
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        if re.search("slurm|srun|sbatch", path.read_text(), re.IGNORECASE)
    }
    assert named == set(allowed)
