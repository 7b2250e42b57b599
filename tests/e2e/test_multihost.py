"""`stoker run` on several hosts, on the test cluster: unlike slots, one hostname for all that resolves nowhere, everything named by host and rank."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from conftest import Stoker, at_length, wait_for
from netcluster import NetCluster

TELL = """
import json, os, sys, time
names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "WORLD_SIZE", "MASTER_ADDR", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "OMP_NUM_THREADS",
         "NCCL_X", "HF_TOKEN", "MY_OWN", "CUDA_VISIBLE_DEVICES", "STOKER_MEMORY_PLAN")
print(json.dumps({"cwd": os.getcwd(), **{name: os.environ.get(name) for name in names}}), flush=True)
if "MEET" in os.environ:
    open(os.path.join(os.environ["MEET"], os.environ["RANK"]), "w").close()
if os.environ["RANK"] == os.environ.get("MY_OWN"):
    while len(os.listdir(os.environ["MEET"])) < int(os.environ["WORLD_SIZE"]):  # ended before it printed, a rank would have told nothing
        time.sleep(0.05)
    sys.exit(5)
"""

# The curve of one process on the whole batch is what ranks must give on its parts, which DDP or the script itself averages:
# the first DDP or optimizer of a process imports torch's compiler, as many seconds as torch itself.
TRAIN = """
import json, os, sys
import torch, torch.distributed as dist
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)).double()
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
if world > 1:
    dist.init_process_group("gloo")
ddp = "ddp" in sys.argv
if ddp:
    model = torch.nn.parallel.DistributedDataParallel(model)
losses = []
for step in range(12):
    x = torch.randn(24, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
    y = x.sum(1, keepdim=True).sin()
    loss = ((model(x[rank::world]) - y[rank::world]) ** 2).mean()
    model.zero_grad()
    loss.backward()
    for parameter in model.parameters():
        if world > 1 and not ddp:
            dist.all_reduce(parameter.grad)
            parameter.grad /= world
        parameter.data -= 0.1 * parameter.grad
    whole = loss.detach().clone()
    if world > 1:
        dist.all_reduce(whole)
        whole /= world
    losses.append(float(whole))
if rank == 0:
    print("LOSSES", json.dumps(losses), flush=True)
if world > 1:
    dist.barrier()
    os._exit(0)  # torch 2.13 can abort in its own shutdown of gloo, with no launcher at all
"""


def losses(text: str) -> Any:
    return json.loads(next(line for line in text.splitlines() if "LOSSES" in line).partition("LOSSES")[2])


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The curve of one process."""
    script = tmp_path_factory.mktemp("alone") / "train.py"
    script.write_text(TRAIN)
    return losses(subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True).stdout)


@at_length
def test_hosts_with_unlike_slots_give_the_one_process_loss_curve(
    stoker: Stoker, netcluster: NetCluster, alone: Any
) -> None:
    script = stoker.script("train.py", TRAIN)
    done = stoker.torch("run", "--hosts", str(netcluster.file((2, 1), workdir=str(stoker.cwd))), script, "ddp")
    assert done.code == 0, done.err
    first, second = (host.name for host in netcluster.hosts[:2])
    assert [
        event["label"] for event in sorted((e for e in done.events if e["event"] == "rank-up"), key=lambda e: e["rank"])
    ] == [f"{first}/CPU0", f"{first}/CPU1", f"{second}/CPU0"]
    assert losses(done.log(0).decode()) == pytest.approx(alone, rel=1e-9)
    names = {netcluster.run_in(n, ["hostname"]).stdout.strip() for n in range(3)}
    assert len(names) == 1 and netcluster.run_in(1, ["getent", "hosts", *names]).returncode != 0, (
        "one name for all, which resolves nowhere"
    )


def test_a_run_whose_files_are_on_another_host_says_so_and_continues_there(
    stoker: Stoker, netcluster: NetCluster
) -> None:
    stoker.script("book.txt", "It was a dark night, and the rain fell in torrents. " * 400)
    there = netcluster.give_own_folder(0, stoker.cwd / "runs")
    hosts = str(netcluster.file((1,), workdir=str(stoker.cwd)))
    words = ("--preset", "debug", "--data", "book.txt", "--tokenizer.path", "bytes", "--context_length", "32")
    sizes = ("--batch.tokens", "256", "--max-steps", "400", "--name", "rem")
    env = {"OMP_NUM_THREADS": "1"}
    run = stoker.start("train", "pretrain", "--hosts", hosts, *words, *sizes, env=env)
    files = there.glob
    assert wait_for(
        lambda: True if any(path.read_bytes().count(b"\n") > 2 for path in files("*/metrics.jsonl")) else None, 90
    )
    run.send_signal(signal.SIGINT)
    said = run.communicate(timeout=120)[0].decode()
    host, name = netcluster.hosts[0].name, stoker.latest.name
    step = max(path.name for path in there.glob("*/checkpoints/step-*"))
    assert f"metrics.jsonl, config.yaml and checkpoints/ are on host {host}, in {stoker.latest}\n" in said, said
    assert f"stoker: to continue: stoker train pretrain --hosts {hosts}" in said, said
    command = shlex.split(said.partition("to continue: stoker ")[2].splitlines()[0])
    early = stoker.torch("export", "runs/latest", "early").err  # no model is there yet
    assert f"it is not complete, and what it saved is on host {host}" in early, early
    assert "to copy them: scp -r -F " in early and f"/{name}/checkpoints runs/{name}/" in early, early
    again = stoker(*command, env=env)
    head = f"starting run {name} again: its checkpoints are on host {host}, and it resumes from the newest if rank 0 is there"
    assert again.code == 0 and head in again.err and "from the beginning" not in again.err, again.err
    assert f"resumes at step {int(step.removeprefix('step-'))}" in again.out + again.err

    copy = next(line for line in again.err.splitlines() if "to copy the model: " in line)
    assert f"hf/ (the model), metrics.jsonl, config.yaml and checkpoints/ are on host {host}" in copy
    copy = copy.partition("to copy the model: ")[2]
    assert f"  {copy}   # hf/ (the model), " in stoker("why").out
    for words in (("chat", "runs/latest", "--prompt", "x"), ("export", "runs/latest", "out")):
        found = stoker.torch(*words).err
        assert f"has no model here: its files are on host {host}; to copy the model: {copy}" in found
    subprocess.run(shlex.split(copy), cwd=stoker.cwd, check=True)
    assert stoker.torch("export", "runs/latest", "out").code == 0 and (stoker.cwd / "out" / "config.json").exists()


def test_our_recipes_run_on_the_hosts_with_the_coordinators_own_stoker(stoker: Stoker, netcluster: NetCluster) -> None:
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
        "4",
    )
    done = stoker.torch(
        "train",
        "pretrain",
        "--hosts",
        str(netcluster.file((1, 1), workdir=str(stoker.cwd))),
        *words,
        "--balance",
        "auto",
        "--parallel.device",
        "cpu",
    )
    assert done.code == 0, done.err
    assert (done.run_dir / "hf" / "config.json").exists() and len(
        (done.run_dir / "metrics.jsonl").read_text().splitlines()
    ) >= 4
    assert f"{netcluster.hosts[1].name}/CPU0:" in done.out and "on 2 × cpu" in done.out
    script = stoker.script(
        "where.py",
        "from stoker import balance\nimport stoker.training\nprint(balance.__file__, stoker.training.__file__)",
    )
    done = stoker("run", "--no-preflight", "--hosts", str(netcluster.file((1, 1), workdir=str(stoker.cwd))), script)
    assert done.code == 0 and done.out.count("/.cache/stoker/agent-") == 4, done.out + done.err


@at_length
def test_each_host_prepares_its_own_data_and_the_start_tells_what_it_needs(
    stoker: Stoker, netcluster: NetCluster
) -> None:
    stoker.script("book.txt", "It was a dark night, and the rain fell in torrents. " * 400)
    hosts = str(netcluster.file((1, 1)))
    words = ("--preset", "debug", "--data", "book.txt", "--tokenizer.path", "bytes", "--parallel.device", "cpu")
    small = ("--context_length", "32", "--batch.tokens", "256", "--max-steps", "2")
    told = "each host prepares its copy of the data, unless cache there has it already: it needs book.txt under the same path"
    missing = stoker.torch("train", "pretrain", "--hosts", hosts, *words, *small)
    assert missing.code != 0 and f"{told} (in a shared folder, or copied with --sync or --stage PATH)" in missing.err
    done = stoker.torch("train", "pretrain", "--hosts", hosts, "--sync", *words, *small)
    assert done.code == 0 and f"{told} (--sync copies what git does not ignore)" in done.err, done.err
    for host in netcluster.hosts[:2]:
        assert len(list(host.workdir.glob("cache/datasets/*/manifest.json"))) == 1, host.name


@at_length
def test_a_run_of_several_hosts_continues_on_one_machine_with_the_batch_it_began_with(
    stoker: Stoker, netcluster: NetCluster
) -> None:
    """A larger batch than the default, as versions derived it whose defaults grew with the number of ranks."""
    stoker.script("book.txt", "It was a dark night, and the rain fell in torrents. " * 400)
    sizes = ("--model.layers", "1", "--model.dim", "32", "--model.heads", "2", "--tokenizer.path", "bytes")
    words = ("--name", "rem", "--data", "book.txt", "--preset", "small", "--max-steps", "4000", *sizes)
    hosts = ("--hosts", str(netcluster.file((1, 1), workdir=str(stoker.cwd))))
    start = ["train", "pretrain", *words, "--parallel.device", "cpu"]
    alone = stoker.torch("train", "pretrain", "--dry-run", *words[2:], "--parallel.device", "cpu")
    assert "4,096 tokens a step" not in alone.err, alone.err

    def stopped_after(steps: int, *more: str) -> str:
        run = stoker.start(*start, *more, env={"OMP_NUM_THREADS": "1"})
        files = lambda: stoker.cwd.glob("runs/2*/metrics.jsonl")  # noqa: E731
        assert wait_for(lambda: sum(path.read_text().count("\n") for path in files()) >= steps or None, 90)
        run.send_signal(signal.SIGINT)
        out, err = run.communicate(timeout=120)
        assert run.returncode == 130
        return (out + (err or b"")).decode()

    told = stopped_after(2, *hosts, "--batch.tokens", "4096")
    batch = next(line for line in told.splitlines() if "tokens a step" in line)
    assert "4,096 tokens a step" in batch and "you set it; --batch.tokens" in batch
    other = stoker.torch(*start, "--name", stoker.latest.name, "--learning-rate", "0.002")
    assert other.code == 64, other.err
    assert (
        "was started with other settings (optim.learning_rate: 0.001 then, 0.002 now); use its command, " in other.err
    )
    metrics = (stoker.latest / "metrics.jsonl").read_text().count("\n")
    told = stopped_after(metrics + 2)
    batch = next(line for line in told.splitlines() if "tokens a step" in line)
    assert "4,096 tokens a step" in batch and "as this run began; --batch.tokens" in batch
    assert "resumes at step" in told and len(list(stoker.cwd.glob("runs/2*"))) == 1, told


def test_every_rank_is_given_its_hosts_own_and_a_failure_names_host_and_rank(
    stoker: Stoker, netcluster: NetCluster
) -> None:
    del stoker.env["OMP_NUM_THREADS"]
    for host in netcluster.hosts:
        (host.workdir / "tell.py").write_text(TELL)
    file = netcluster.file(per_host=[{}, {"interface": "lo"}, {}])
    env = {"NCCL_X": "travels", "HF_TOKEN": "hf_secretsecretsecretsecret", "CUDA_VISIBLE_DEVICES": ""}
    env["STOKER_MEMORY_PLAN"] = '{"micro": 4}'  # as `stoker train` leaves it for its ranks
    (meet := stoker.cwd / "meet").mkdir()
    done = stoker(
        "run", "--no-preflight", "--hosts", str(file), "--env", "MY_OWN=2", "--env", f"MEET={meet}", "tell.py", env=env
    )
    second = netcluster.hosts[1].name
    assert done.code == 5, done.err
    assert (done.verdict["rank"], done.verdict["host"], done.verdict["cause"], done.verdict["exit_code"]) == (
        2,
        second,
        "rank.exit",
        5,
    )
    told = [json.loads(done.log(rank)) for rank in range(4)]
    assert [one["cwd"] for one in told] == [str(netcluster.hosts[n].workdir) for n in (0, 0, 1, 2)]
    assert [(one["LOCAL_RANK"], one["LOCAL_WORLD_SIZE"], one["GROUP_RANK"]) for one in told] == [
        ("0", "2", "0"),
        ("1", "2", "0"),
        ("0", "1", "1"),
        ("0", "1", "2"),
    ]
    assert {one["MASTER_ADDR"] for one in told} == {netcluster.hosts[0].address}
    assert (
        [one["GLOO_SOCKET_IFNAME"] for one in told]
        == ["eth0", "eth0", "lo", "eth0"]
        == [one["NCCL_SOCKET_IFNAME"] for one in told]
    )
    assert [one["OMP_NUM_THREADS"] for one in told] == ["4", "4", "8", "8"], (
        "8 cores, shared by the ranks of the same host"
    )
    assert {(one["NCCL_X"], one["HF_TOKEN"], one["MY_OWN"], one["CUDA_VISIBLE_DEVICES"]) for one in told} == {
        ("travels", "hf_secretsecretsecretsecret", "2", None)
    }
    assert {one["STOKER_MEMORY_PLAN"] for one in told} == {'{"micro": 4}'}
    assert f"{second}/CPU0:" in done.out
    assert "hf_secret" not in (done.run_dir / "run.json").read_text()


def test_hosts_that_cant_be_used_are_named_together_and_nothing_starts(stoker: Stoker, netcluster: NetCluster) -> None:
    netcluster.stop_sshd(1)
    netcluster.change_host_key(2)
    done = stoker(
        "run", "--hosts", str(netcluster.file(workdir=str(stoker.cwd))), stoker.script("s.py", "print('ran')")
    )
    assert done.code == 69 and not (stoker.cwd / "runs").exists()
    last = done.err.splitlines()[-1]
    assert (
        last.startswith("stoker: 2 of 3 hosts can't be used: ")
        and "connection refused" in last
        and "its host key changed" in last
    ), done.err
    assert netcluster.hosts[1].name in last and netcluster.hosts[2].name in last and "ran" not in done.out


def test_with_min_hosts_a_run_starts_without_a_host_that_is_down(stoker: Stoker, netcluster: NetCluster) -> None:
    netcluster.stop_sshd(0)
    file = netcluster.file(workdir=str(stoker.cwd))
    done = stoker("run", "--no-preflight", "--min-hosts", "2", "--hosts", str(file), stoker.script("tell.py", TELL))
    assert done.code == 0, done.err
    assert "starting with 2 of 3 hosts" in done.err and netcluster.hosts[0].name in done.err
    assert f"✓ {netcluster.hosts[1].name}: No GPU found" in done.err
    told = [json.loads(done.log(rank)) for rank in range(2)]
    assert {(one["WORLD_SIZE"], one["MASTER_ADDR"]) for one in told} == {("2", netcluster.hosts[1].address)}


def test_what_a_host_lacks_is_named_before_any_rank_starts(stoker: Stoker, netcluster: NetCluster) -> None:
    stoker.script("s.py", "print('ran')")
    netcluster.hosts[0].workdir.joinpath("s.py").write_text("print('ran')")
    netcluster.hosts[1].workdir.joinpath("s.py").write_text("print('ran another')")
    missing = str(netcluster.hosts[2].folder / "nowhere")
    done = stoker("run", "--hosts", str(netcluster.file(per_host=[{}, {}, {"workdir": missing}])), "s.py")
    assert (
        done.code == 69
        and f"host {netcluster.hosts[2].name}: the ranks' folder {missing} does not exist" in done.err
        and not (stoker.cwd / "runs").exists()
    )
    missing = str(stoker.cwd / "nowhere")
    done = stoker("run", "--hosts", str(netcluster.file(workdir=missing)), "s.py")
    names = ", ".join(host.name for host in netcluster.hosts)
    assert f"hosts {names}: the ranks' folder {missing} does not exist; copy this folder there with --sync" in done.err
    assert done.err.count(missing) == 1, done.err
    done = stoker("run", "--hosts", str(netcluster.file(slots=(1, 1))), "s.py")
    assert done.code == 69 and f"host {netcluster.hosts[1].name}: s.py differs" in done.err and "ran" not in done.out


def by_hand(stoker: Stoker, cluster: NetCluster, script: str, flags: list[list[str]], nodes: str = "") -> list[Path]:
    """`stoker run` on each machine; their run directories. `nodes`: for --nnodes, where it is not just their number."""
    runs = []
    for n, more in enumerate(flags):
        argv = [
            sys.executable,
            "-m",
            "stoker",
            "run",
            "--nnodes",
            nodes or str(len(flags)),
            *more,
            "--name",
            f"n{n}",
            script,
        ]
        with open(stoker.cwd / f"console{n}", "wb") as out:
            runs.append(cluster.start_in(n, argv, cwd=stoker.cwd, env=stoker.env, stdout=out, stderr=out))
    assert [run.wait(120) for run in runs] == [0] * len(flags), "".join(
        (stoker.cwd / f"console{n}").read_text() for n in range(len(flags))
    )
    return [next((stoker.cwd / "runs").glob(f"*-n{n}")) / "attempt-0" for n in range(len(flags))]


@at_length
def test_started_by_hand_on_each_machine_with_node_ranks(stoker: Stoker, netcluster: NetCluster, alone: Any) -> None:
    where = ["--master-addr", netcluster.hosts[0].address, "--master-port", "29511"]
    first, second = by_hand(
        stoker, netcluster, stoker.script("train.py", TRAIN), [["--node-rank", str(n), *where] for n in range(2)]
    )
    assert losses((first / "rank-0.log").read_text()) == pytest.approx(alone, rel=1e-9)
    assert (second / "rank-1.log").exists() and not (second / "rank-0.log").exists(), (
        "ranks have the whole job's numbers"
    )


@at_length
def test_started_by_hand_a_rank_that_dies_has_all_machines_start_again(
    stoker: Stoker, netcluster: NetCluster, alone: Any
) -> None:
    dies = "if rank == 1 and len(losses) == 3 and os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n        os._exit(3)\n    losses.append"
    script = stoker.script("dies.py", TRAIN.replace("losses.append", dies))
    where = ["--max-restarts", "1", "--master-addr", netcluster.hosts[0].address, "--master-port", "29513"]
    folders = by_hand(stoker, netcluster, script, [["--node-rank", str(n), *where] for n in range(2)])
    assert losses((folders[0].parent / "attempt-1" / "rank-0.log").read_text()) == pytest.approx(alone, rel=1e-9)
    assert "rank 1 (CPU 0) ended with exit code 3; starting again (1 of 1)" in (stoker.cwd / "console1").read_text()


def test_machines_that_meet_at_an_endpoint_are_numbered_there(stoker: Stoker, netcluster: NetCluster) -> None:
    where = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{netcluster.hosts[1].address}:29512", "--rdzv-id", "job"]
    found = by_hand(
        stoker, netcluster, stoker.script("tell.py", TELL), [["--nproc-per-node", str(n + 1), *where] for n in range(3)]
    )
    told = sorted(
        (json.loads(log.read_text()) for folder in found for log in folder.glob("rank-*.log")),
        key=lambda one: int(one["RANK"]),
    )
    assert [one["RANK"] for one in told] == [str(rank) for rank in range(6)] and {
        one["WORLD_SIZE"] for one in told
    } == {"6"}
    assert [one["GROUP_RANK"] for one in told][:2] == ["0", "0"], "who owns the address is number 0, with its two ranks"
    assert {one["MASTER_ADDR"] for one in told} == {netcluster.hosts[1].address} and {
        one["GLOO_SOCKET_IFNAME"] for one in told
    } == {"eth0"}


@at_length
def test_machines_of_which_one_would_do_meet_all_the_same(stoker: Stoker, netcluster: NetCluster, alone: Any) -> None:
    """Two that train alone, each believing to be the job, would write one checkpoint."""
    where = [
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        f"{netcluster.hosts[0].address}:29514",
        "--rdzv-conf",
        "last_call_timeout=60",
    ]
    first, _ = by_hand(stoker, netcluster, stoker.script("train.py", TRAIN), [where, where], "1:2")
    assert losses((first / "rank-0.log").read_text()) == pytest.approx(alone, rel=1e-9)
    assert "machine 1 of 2: ranks 1 to 1 of 2" in (stoker.cwd / "console1").read_text()


def test_a_python_below_the_home_of_a_host_is_its_venvs(stoker: Stoker, netcluster: NetCluster) -> None:
    venv = netcluster.hosts[1].home / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    (netcluster.hosts[1].home / "work").mkdir()
    script = stoker.script("where.py", "import sys; print('prefix', sys.prefix, sys.argv[1:])")
    hosts = netcluster.file((1, 1), per_host=[{}, {"python": "~/venv/bin/python", "workdir": "~/work"}])
    done = stoker("run", "--no-preflight", "--sync", "--hosts", str(hosts), script, "~/stays")
    assert done.code == 0 and f"prefix {venv} ['~/stays']" in done.out, done.out + done.err


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--nnodes", "2:1", "--rdzv-endpoint", "10.0.0.1:29400"], "--nnodes must be a number of machines or MIN:MAX, got 2:1"),
        (["--nnodes", "1:2", "--rdzv-endpoint", "10.0.0.1:29400", "--rdzv-conf", "last_call_timeout=soon"], "must be a number of seconds"),
        (["--nnodes", "2"], "--nnodes 2 needs the address of machine 0"),
        (["--nnodes", "2", "--master-addr", "10.0.0.1"], "add --node-rank, from 0 to 1"),
        (["--nnodes", "2", "--node-rank", "2", "--master-addr", "10.0.0.1"], "--node-rank must be from 0 to 1, got 2"),
        (["--nnodes", "two"], "--nnodes must be a number of machines or MIN:MAX, got two"),
        (["--node-rank", "1"], "--node-rank must be 0 on one machine, got 1"),
        (["--nnodes", "2", "--standalone"], "contradict each other"),
        (["--min-hosts", "2"], "name them with --hosts"),
        (["--hosts", "127.0.0.1,10.99.0.1", "--min-hosts", "3"], "--min-hosts must be from 1 to 2"),
        (["--hosts", "127.0.0.1,10.99.0.1", "--nnodes", "2"], "leave --nnodes and --node-rank out"),
    ],
)  # fmt: skip
def test_machines_that_dont_add_up_are_refused_in_one_line(stoker: Stoker, flags: list[str], says: str) -> None:
    done = stoker("run", *flags, stoker.script("s.py", "print('ran')"))
    assert done.code == 64 and says in done.err and len(done.err.splitlines()) == 1 and "ran" not in done.out, done.err


def test_a_killed_coordinator_leaves_nothing_on_any_host(stoker: Stoker, netcluster: NetCluster) -> None:
    script = stoker.script(
        "s.py",
        "import subprocess, time\nsubprocess.Popen(['setsid', 'sleep', '100'])\nprint('ready', flush=True)\ntime.sleep(100)\n",
    )
    run = stoker.start("run", "--no-preflight", "--hosts", str(netcluster.file(workdir=str(stoker.cwd))), script)
    assert wait_for(
        lambda: (
            True
            if sum(b"ready" in log.read_bytes() for log in Path(stoker.cwd).glob("runs/2*/attempt-0/*.log")) == 4
            else None
        ),
        30,
    )
    os.kill(run.pid, 9)
    run.wait()
    assert wait_for(lambda: True if not any(netcluster.pids(n) for n in range(3)) else None, 15), [
        netcluster.pids(n) for n in range(3)
    ]


def test_what_a_host_is_asked_before_its_ranks_start(tmp_path: Path) -> None:
    from stoker.control.agent.probes.host import ready

    shared, apart = tmp_path / "shared", tmp_path / "apart" / "deep"
    shared.mkdir()
    (shared / "token").touch()
    assert ready(str(tmp_path), sys.executable, str(shared), "token") == {
        "problems": [],
        "shared": True,
        "unwritable": "",
    }
    found = ready(str(tmp_path / "no"), "no-such-python", str(apart), "token")
    assert (
        not found["shared"]
        and apart.is_dir()
        and len(found["problems"]) == 2
        and "folder" in found["problems"][0]
        and "program" in found["problems"][1]
    )
    (tmp_path / "file").touch()
    assert "Not a directory" in ready(str(tmp_path), "sh", str(tmp_path / "file" / "x"), "token")["unwritable"]


@pytest.mark.parametrize(
    ("connection", "address"),
    [("10.0.0.1 50000 10.0.0.2 22", "10.0.0.2"), ("UNKNOWN 65535 UNKNOWN 65535", None), ("", None)],
)
def test_the_address_that_ssh_came_to_is_found(
    monkeypatch: pytest.MonkeyPatch, connection: str, address: str | None
) -> None:
    """An sshd that a ProxyCommand started knows none."""
    from stoker.control.agent.probes import network

    monkeypatch.setenv("SSH_CONNECTION", connection)
    assert network.route([])["reached_at"] == address


def route(*ways: tuple[str, str | None], reached: str | None = None) -> dict[str, Any]:
    return {
        "routes": {
            to: {"interface": name, "source": "10.0.0.9"} if name else {"error": "No route to host"}
            for to, name in ways
        },
        "reached_at": reached,
    }


def test_addresses_and_interfaces_are_found_without_names() -> None:
    from stoker.contract.errors import Refusal
    from stoker.control.cluster.hosts import Host
    from stoker.control.launch import host_setup

    hosts = [
        Host("here", "localhost", here=True),
        Host("10.0.0.2", "10.0.0.2"),
        Host("alias", "alias"),
        Host("told", "told", "10.0.0.4", interface="ib0"),
    ]
    known = host_setup.list_known_addresses(hosts)
    assert known == {"10.0.0.2": "10.0.0.2", "told": "10.0.0.4"}, "a name is no address, and loopback none for others"
    known = host_setup.add_reached_addresses(known, {"alias": route(reached="10.0.0.3"), "here": route()})
    answers = {host.name: route(*((to, "eth0") for to in known.values())) for host in hosts}
    whole = host_setup.add_source_addresses(known, hosts, answers)
    assert whole == {**known, "alias": "10.0.0.3", "here": "10.0.0.9"}
    answers = {host.name: route(*((to, "eth0") for to in whole.values())) for host in hosts}
    assert host_setup.choose_interfaces(hosts, answers, whole) == {
        "here": "eth0",
        "10.0.0.2": "eth0",
        "alias": "eth0",
        "told": "ib0",
    }
    answers["alias"] = route(("10.0.0.9", None))
    with pytest.raises(Refusal, match=r"alias has no route to 10.0.0.9 \(No route to host\)"):
        host_setup.choose_interfaces(hosts, answers, whole)


def test_one_machine_under_two_names_is_refused(stoker: Stoker, netcluster: NetCluster) -> None:
    first = netcluster.hosts[0].address
    with open(netcluster.folder / "ssh_config", "a") as file:
        file.write(f"Host gpua\n  HostName {first}\n")
    done = stoker(
        "run",
        "--hosts",
        str(netcluster.file((1, 1), per_host=[{}, {"host": "gpua"}], workdir=str(stoker.cwd))),
        stoker.script("t.py", "print('ran')"),
    )
    assert (done.code, done.out) == (
        69,
        "",
    ) and f"{first} and gpua are the same machine, {first}; name it once in the hosts file" in done.err, done.err
