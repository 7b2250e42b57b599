"""The true exit code and the guilty rank, from real ranks that die in every way."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import pytest

from conftest import Stoker
from stoker.contract.evidence import Evidence, RankError, RankExit
from stoker.control.verdict.judge import judge

# A job without torch: ranks meet over a socket and lose each other as gloo's would.
PAIR = """
import os, socket, sys, time, signal
rank, how = int(os.environ["RANK"]), sys.argv[1]
addr = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
if rank == 0:
    store = socket.socket(); store.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1); store.bind(addr); store.listen()
    peer, _ = store.accept()
else:
    deadline = time.time() + 20
    while True:
        try:
            peer = socket.create_connection(addr); break
        except ConnectionRefusedError:
            assert time.time() < deadline; time.sleep(0.01)
for step in range(100):
    if rank == 1 and step == 20:
        if how == "raise": raise ValueError("boom " + "x" * 3)
        if how == "exit3": sys.exit(3)
        if how == "exit0": os._exit(0)
        if how == "kill": os.kill(os.getpid(), signal.SIGKILL)
        if how == "segv": os.kill(os.getpid(), signal.SIGSEGV)
        if how == "term": os.kill(os.getpid(), signal.SIGTERM)
        if how == "import": import no_such_module_at_all
    peer.send(b"x")
    if not peer.recv(1): raise ConnectionResetError("Connection closed by peer")
print("done", rank)
"""


@pytest.mark.parametrize(
    ("how", "code", "cause", "retryable"),
    [
        ("raise", 1, "rank.exception", True),
        ("exit3", 3, "rank.exit", True),
        ("exit0", 70, "rank.early-exit", True),
        ("kill", 137, "rank.killed", True),
        ("segv", 139, "rank.crash", True),
        ("term", 143, "rank.signal", True),
        ("import", 1, "env.import", False),
    ],
)
def test_rank_1_ends_badly(stoker: Stoker, how: str, code: int, cause: str, retryable: bool) -> None:
    done = stoker("run", "--nproc-per-node", "2", stoker.script("pair.py", PAIR), how)
    assert done.code == code
    told = json.loads(stoker("why", "--json").out)
    assert (told["cause"], told["rank"], told["exit_code"], told["retryable"], told["schema"]) == (
        cause,
        1,
        code,
        retryable,
        1,
    )
    assert "stoker: rank 1 (CPU 1)" in done.err
    if how == "raise":
        assert "ValueError: boom xxx" in told["summary"] and "pair.py:17" in told["summary"]
        assert json.loads((done.run_dir / "attempt-0/rank-1.error.json").read_text())["time_ns"] > 0
    if how == "segv":
        assert "pair.py" in (done.run_dir / "attempt-0/rank-1.stack.txt").read_text()


def test_a_crash_after_the_script_ended_is_told_as_that(stoker: Stoker) -> None:
    """As torch's gloo does after a sys.exit() without destroy_process_group()."""
    script = "import atexit, ctypes, os, sys, time\nif os.environ['RANK'] == '0': time.sleep(60)\n"
    script += "print('terminate called without an active exception', file=sys.stderr, flush=True)\n"
    script += "atexit.register(ctypes.CDLL(None).abort)\nsys.exit(0)\n"
    done = stoker("run", "--nproc-per-node", "2", stoker.script("ends.py", script))
    assert (done.code, done.verdict["cause"], done.verdict["rank"]) == (134, "rank.crash", 1)
    assert done.verdict["summary"].endswith("while its process was ending: its script had already ended")
    assert "it printed: terminate called without an active exception" in done.verdict["evidence"]
    assert "look for sys.exit()" in done.verdict["fix"][0] and "destroy_process_group()" in done.verdict["fix"][1]


def test_all_good_is_zero(stoker: Stoker) -> None:
    done = stoker("run", "--nproc-per-node", "2", stoker.script("pair.py", PAIR), "none")
    assert done.code == 0 and done.verdict["status"] == "completed"
    assert sorted(done.out.splitlines()) == ["CPU0:done 0", "CPU1:done 1"]


def test_the_environment_is_torchruns(stoker: Stoker) -> None:
    del stoker.env["OMP_NUM_THREADS"]
    script = stoker.script("env.py", "import os, json, sys; print(json.dumps(dict(os.environ)))")
    done = stoker(
        "run",
        "--nproc-per-node",
        "2",
        "--max-restarts",
        "2",
        "--rdzv-id",
        "job7",
        "--role",
        "trainer",
        "--env",
        "MINE=1",
        script,
    )
    envs = [json.loads(done.log(rank)) for rank in (0, 1)]
    for rank, env in enumerate(envs):
        want = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "ROLE_RANK": str(rank),
            "ROLE_WORLD_SIZE": "2",
            "ROLE_NAME": "trainer",
            "MASTER_ADDR": "127.0.0.1",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "2",
            "TORCHELASTIC_RUN_ID": "job7",
            "TORCHELASTIC_USE_AGENT_STORE": "False",
            "GPU_RANK": str(rank),
            "MINE": "1",
            "OMP_NUM_THREADS": "4",
            "GOMP_SPINCOUNT": "1000",
            "STOKER_RUN_ID": done.run_dir.name,
            "STOKER_RUN_DIR": str(done.run_dir),
        }
        assert {key: env.get(key) for key in want} == want
        assert not [key for key in env if key.startswith("STOKER_SHIM")]
    assert envs[0]["MASTER_PORT"] == envs[1]["MASTER_PORT"]


def test_threads_of_a_cpu_rank_soon_sleep(stoker: Stoker) -> None:
    """What the OpenMP library that torch brings has made of the rank's environment, in its own words."""
    script = stoker.script("threads.py", "import torch")
    done = stoker("run", "--nproc-per-node", "1", script, env={"OMP_DISPLAY_ENV": "verbose"})
    assert re.findall(rb"GOMP_SPINCOUNT = '(\d+)'", done.log(0)) == [b"1000"], done.log(0)


def test_how_threads_wait_is_the_users_where_set(stoker: Stoker, box: Callable[..., dict[str, str]]) -> None:
    names = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    script = stoker.script("waits.py", f"import os; print(*map(os.environ.get, {names}))")

    def given(*flags: str, **env: str) -> str:
        return stoker("run", "--nproc-per-node", "1", *flags, script, env=env).log(0).decode().strip()

    assert given() == "None 1000"
    assert given(GOMP_SPINCOUNT="7") == given("--env", "GOMP_SPINCOUNT=7") == "None 7"
    assert given(OMP_WAIT_POLICY="passive") == given("--env", "OMP_WAIT_POLICY=passive") == "passive None"
    assert given(**box(1)) == "None None", "a rank with a GPU waits as its library does"


def test_restart_with_a_fresh_port_and_the_attempts_apart(stoker: Stoker) -> None:
    script = stoker.script(
        "flaky.py",
        "import os, sys, signal\nn = int(os.environ['TORCHELASTIC_RESTART_COUNT'])\nprint('try', n, os.environ['MASTER_PORT'])\n"
        "if n < 2 and os.environ['RANK'] == '1': os.kill(os.getpid(), signal.SIGKILL)\n",
    )
    done = stoker("run", "--nproc-per-node", "2", "--max-restarts", "3", "--notify", "cat >> notified", script)
    assert done.code == 0
    ports = [done.log(1, attempt).split()[2] for attempt in range(3)]
    assert len(set(ports)) == 3
    assert [event["cause"] for event in done.events if event["event"] == "restart"] == ["rank.killed", "rank.killed"]
    notified = (stoker.cwd / "notified").read_text()
    assert notified.count('"rank.killed"') == 2 and '"completed"' in notified


@pytest.mark.parametrize(
    ("text", "attempts"),
    [("import nowhere_to_be_found", 1), ("raise KeyError('same')", 2), ("import sys; sys.exit(4)", 2)],
)
def test_what_can_not_succeed_is_not_tried_again(stoker: Stoker, text: str, attempts: int) -> None:
    done = stoker("run", "--nproc-per-node", "2", "--max-restarts", "5", stoker.script("bad.py", text))
    assert done.code in (1, 4)
    assert len(list(done.run_dir.glob("attempt-*"))) == attempts
    assert attempts == 1 or "deterministic" in done.verdict["evidence"][-1]


def end(rank: int, code: int | None, time: float, error: RankError | None = None, **more: object) -> RankExit:
    return RankExit(rank, "", f"CPU{rank}", 100 + rank, code, time, error=error, **more)  # type: ignore[arg-type]


LOST = RankError(
    "RuntimeError",
    "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1",
    "t.py",
    3,
    "f",
    "",
    5_000_000_000,
)
REAL = RankError("ValueError", "boom", "t.py", 9, "f", "", 6_000_000_000)
NCCL = "[rank0]: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=6, OpType=ALLREDUCE)"


@pytest.mark.parametrize(
    ("ends", "rank", "cause"),
    [
        # the victim is seen first, but its failure is the echo of rank 1's
        ([end(0, 1, 5.0, LOST), end(1, 1, 6.0, REAL)], 1, "rank.exception"),
        # rank 1 reported its exception and was then stopped by us
        ([end(0, 1, 5.0, LOST), end(1, -15, 6.0, REAL, ours=True)], 1, "rank.exception"),
        ([end(0, 1, 5.0, LOST), end(1, 0, 4.9)], 1, "rank.early-exit"),
        ([end(0, -6, 9.0, tail=NCCL), end(1, -9, 4.0)], 1, "rank.killed"),
        ([end(0, -6, 9.0, tail=NCCL), end(1, 0, 4.0)], 1, "rank.early-exit"),
        ([end(0, -15, 9.0, ours=True), end(1, 3, 4.0)], 1, "rank.exit"),
        ([end(0, 1, 5.0, LOST), end(1, 1, 5.1, LOST)], 0, "rank.exception"),
        ([end(0, -9, 5.0, oom_killed=True), end(1, 1, 5.1, LOST)], 0, "oom.host"),
        (
            [
                end(0, 1, 5.0, RankError("DistNetworkError", "EADDRINUSE: port: 29500 address already in use")),
                end(1, 1, 5.1, LOST),
            ],
            0,
            "net.port-in-use",
        ),
        # our own SIGTERM, answered with an exit code or an exception, is nobody's cause
        ([end(0, 1, 5.0, LOST), end(1, 1, 6.0, ours=True)], 0, "rank.exception"),
        (
            [
                end(0, 1, 5.0, REAL),
                end(1, 1, 9.0, RankError("RuntimeError", "in the handler", time_ns=9_000_000_000), ours=True),
            ],
            0,
            "rank.exception",
        ),
        # an EOFError of the script's own is not the echo of a rank that was done before
        (
            [
                end(0, 0, 3.0),
                end(1, 1, 6.0, RankError("EOFError", "Ran out of input", module="builtins", time_ns=6_000_000_000)),
            ],
            1,
            "rank.exception",
        ),
        # a rank that finished first is not guilty of what another did by itself
        ([end(0, 0, 3.0), end(1, 1, 6.0, REAL)], 1, "rank.exception"),
    ],
)
def test_cause_before_consequence(ends: list[RankExit], rank: int, cause: str) -> None:
    verdict = judge(Evidence(len(ends), tuple(ends), stopped_at=6.5))
    assert (verdict.rank, verdict.cause) == (rank, cause)


def test_no_evidence_is_said_to_be_unknown() -> None:
    verdict = judge(Evidence(2, (end(0, -15, 1.0, ours=True),)))
    assert verdict.cause == "unknown" and verdict.exit_code == 70 and not verdict.retryable


@pytest.mark.parametrize(
    ("ranks", "summary"), [(1, "the rank ended with exit code 0"), (2, "all 2 ranks ended with exit code 0")]
)
def test_one_rank_is_not_all_ranks(ranks: int, summary: str) -> None:
    assert judge(Evidence(ranks, tuple(end(rank, 0, 1.0) for rank in range(ranks)))).summary == summary


def test_ranks_that_were_ended_after_their_steps_made_at_least_so_many() -> None:
    verdict = judge(Evidence(1, (end(0, -15, 7.0, ours=True),), stopped_at=6.5, steps_reached=2))
    assert verdict.exit_code == 0 and verdict.summary == "the rank made at least 2 steps; stopped there as requested"
