"""Several programs as one run: toy servers and trainers, really started, killed and replaced."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from conftest import Stoker, at_length, at_length_but, gpu_json, machine_json, tagged, wait_for
from netcluster import NetCluster, why_not
from stoker.cli.roles import apply_allocation
from stoker.contract.errors import Refusal
from stoker.control.roles import allocation, role
from stoker.control.roles.placement import GpuSlot, move_role, place_roles
from stoker.control.roles.ready_check import ReadyWatch, ServedCounts, parse_served_counts
from stoker.control.roles.role import ReadyRule, RoleSpec

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))
import roles

SERVER = """
import http.server, os, signal, sys
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if os.path.exists("deaf"): return
        self.send_response(200); self.end_headers(); self.wfile.write(b"fine")
    def log_message(self, *_): pass
port = int(sys.argv[1]) if len(sys.argv) > 1 else int(os.environ["STOKER_PORT"])
print("serves", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], flush=True)
http.server.HTTPServer((os.environ.get("LISTEN", "127.0.0.1"), port), Answer).serve_forever()
"""
TRAINER = """
import os, sys, time, urllib.request
asked = failed = 0
while not os.path.exists("done"):
    address = os.environ["STOKER_ROLE_SERVER"].split(",")[0]
    try:
        told = urllib.request.urlopen(f"http://{address}/", timeout=5).read()
        asked += told == b"fine"  # killed in the middle of it: nothing
        if asked == 1: open(f"asked-{address}", "w")
    except OSError as problem:
        failed += 1
        if "strict" in sys.argv: raise
    time.sleep(0.05)
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], "asked", asked, "failed", failed)
"""


def file_of(stoker: Stoker, **roles: dict[str, Any]) -> str:
    stoker.script("server.py", SERVER)
    stoker.script("trainer.py", TRAINER)
    return stoker.script("job.yaml", json.dumps({"roles": roles}))


def rules(**more: Any) -> dict[str, Any]:
    return {"command": "python server.py", "ready": {"http": "/health", "check": "0.2s"}, "restart": "always", **more}


def events(stoker: Stoker, kind: str) -> list[dict[str, Any]]:
    try:
        return [event for event in stoker.result().events if event["event"] == kind]
    except FileNotFoundError:
        return []


def pids(stoker: Stoker, name: str) -> list[int]:
    found = []
    for path in sorted(stoker.latest.glob(f"roles/*-{name}/events.jsonl")):
        lines = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
        found += [event["pid"] for event in lines if event["event"] == "rank-up"]
    return found


def ready(stoker: Stoker, times: int) -> bool:
    found = wait_for(lambda: True if len(events(stoker, "role-ready")) >= times else None, 60)
    return bool(found)


@pytest.mark.parametrize("kills", at_length_but([2], [2, 20]))
def test_a_dead_server_is_replaced_alone_and_the_trainers_go_on(stoker: Stoker, kills: int) -> None:
    job = stoker.start("run", "--roles", file_of(stoker, server=rules(), trainer={"command": "trainer.py", "count": 2}))
    for number in range(kills):
        assert ready(stoker, number + 1)
        assert wait_for(lambda: True if len(pids(stoker, "trainer")) == 2 else None, 60)
        os.kill(pids(stoker, "server")[-1], signal.SIGKILL)
    assert ready(stoker, kills + 1)
    stoker.script("done", "")
    said = job.communicate(timeout=120)[0].decode()
    done = stoker.result(job.returncode)
    assert (done.code, done.verdict["summary"]) == (0, "trainer ended with exit code 0; server stopped"), said
    assert len(pids(stoker, "trainer")) == 2, "the trainers were not started again"
    assert len(pids(stoker, "server")) == kills + 1
    assert {event["cause"] for event in events(stoker, "role-restart")} == {"rank.killed"}
    assert "[server] CPU0:serves 0 of 1" in said and "[trainer] CPU1:rank 1 of 2 asked" in said
    order = [event["role"] for event in events(stoker, "role-start")][:2]
    assert order == ["server", "trainer"] and "✓ role server is ready" in said
    shown = stoker("logs", "--role", "trainer", "--rank", "1")
    assert shown.code == 0 and shown.out.startswith("rank 1 of 2 asked")
    assert "is a multi-role job; choose a role with --role server or trainer" in stoker("logs").err
    assert "trainer" in stoker("why", f"{done.run_dir.name}/trainer").out


def test_a_trainer_that_fails_ends_the_job_with_its_own_code(stoker: Stoker) -> None:
    stoker.script("bad.py", "import sys, time\ntime.sleep(0.5)\nraise ValueError('no such column')\n")
    done = stoker("run", "--roles", file_of(stoker, server=rules(), trainer={"command": "bad.py"}))
    verdict = done.verdict
    assert (done.code, verdict["cause"], verdict["status"]) == (1, "rank.exception", "failed"), done.err
    assert verdict["summary"].startswith("role trainer: rank 0 (CPU 0): ValueError: no such column at ")
    assert any("--role trainer" in line for line in verdict["fix"]), verdict["fix"]
    assert f"stoker why {done.run_dir.name}/trainer" in "".join(verdict["evidence"])


def test_what_a_trainer_fails_of_because_its_server_died_is_the_servers_failure(stoker: Stoker) -> None:
    path = file_of(stoker, server=rules(restart="never"), trainer={"command": "trainer.py strict"})
    job = stoker.start("run", "--roles", path)
    assert ready(stoker, 1) and wait_for(lambda: pids(stoker, "trainer") or None, 60)
    os.kill(pids(stoker, "server")[-1], signal.SIGKILL)
    said = job.communicate(timeout=120)[0].decode()
    verdict = stoker.result(job.returncode).verdict
    assert (job.returncode, verdict["cause"]) == (137, "rank.killed"), said
    assert verdict["summary"].startswith("role server: rank 0 (CPU 0) was killed")


# A reward that makes 0 of a lost connection, and the stop rule of stoker's own GRPO.
REWARDED = """
import os, time, urllib.request
zeros = 0
while zeros < 10:
    try:
        text = urllib.request.urlopen(f"http://{os.environ['STOKER_ROLE_SERVER']}/", timeout=0.2).read()
    except OSError:
        text = b""
    zeros = 0 if text == b"fine" else zeros + 1
    with open("steps", "a") as steps: steps.write(f"{zeros}\\n")
    time.sleep(0.05)
print("GRPO stopped itself: the reward was exactly 0 for every answer for 10 steps", flush=True)
raise SystemExit(70)
"""


@pytest.mark.parametrize(
    "end",
    at_length_but(
        ["killed", "stopped", "ended with exit code 0"],
        ["killed", "killed for good", "stopped", "ended with exit code 0"],
    ),
)
def test_zero_reward_after_the_servers_end_stops_within_ten_steps_and_names_the_server(
    stoker: Stoker, end: str
) -> None:
    stoker.script("rewarded.py", REWARDED)
    loads = "import os, time\nif os.path.exists('loads'): time.sleep(600)\n"
    quits = "import signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n"
    path = file_of(
        stoker,
        server=rules(
            command="slow.py",
            restart="always" if end == "killed for good" else "never",
            required=False,
            ready={"http": "/health", "check": "1m", "answer": "2s"},
        ),
        trainer={"command": "rewarded.py"},
    )
    stoker.script("slow.py", loads + quits + SERVER)
    job = stoker.start("run", "--roles", path)
    steps = stoker.cwd / "steps"
    assert ready(stoker, 1) and wait_for(lambda: True if steps.exists() else None, 60)
    stoker.script("loads", "")
    server = pids(stoker, "server")[-1]
    os.kill(server, {"stopped": signal.SIGSTOP, "ended with exit code 0": signal.SIGTERM}.get(end, signal.SIGKILL))
    said = job.communicate(timeout=120)[0].decode()
    verdict = stoker.result(job.returncode).verdict
    assert int(steps.read_text().split()[-1]) <= 10
    wanted = {
        "killed": (137, "rank.killed", "role server: rank 0 (CPU 0) was killed"),
        "killed for good": (137, "rank.killed", "role server: rank 0 (CPU 0) was killed"),
        "stopped": (70, "role.unhealthy", "role server: it no longer responds: 127.0.0.1:"),
        "ended with exit code 0": (
            70,
            "role.ended",
            "role server: it ended with exit code 0 while trainer still needed it",
        ),
    }[end]
    assert (job.returncode, verdict["cause"]) == wanted[:2] and verdict["summary"].startswith(wanted[2]), said
    echo = "then role trainer: the reward was exactly 0 for every answer for 10 steps"
    assert end == "killed" or echo in verdict["evidence"], verdict


def test_a_role_that_never_becomes_ready_is_named_with_its_last_lines(stoker: Stoker) -> None:
    stoker.script("slow.py", "import time\nprint('loading shard 3 of 9', flush=True)\ntime.sleep(600)\n")
    slow = {"command": "slow.py", "ready": {"port": True, "timeout": "6s"}}
    done = stoker("run", "--roles", file_of(stoker, server=slow, trainer={"command": "trainer.py"}))
    verdict = done.verdict
    assert (done.code, verdict["cause"]) == (70, "role.not-ready"), done.err
    assert "role server: it was not ready after 6.0 s: no port to accept connections: 127.0.0.1:" in verdict["summary"]
    assert any("loading shard 3 of 9" in line for line in verdict["evidence"])
    assert [event["role"] for event in events(stoker, "role-start")] == ["server"], "the trainer waited for it"


def test_a_server_that_no_longer_answers_is_replaced(stoker: Stoker) -> None:
    job = stoker.start("run", "--roles", file_of(stoker, server=rules(), trainer={"command": "trainer.py"}))
    assert ready(stoker, 1)
    stoker.script("deaf", "")
    assert wait_for(lambda: True if events(stoker, "role-restart") else None, 200)
    (stoker.cwd / "deaf").unlink()
    assert ready(stoker, 2)
    stoker.script("done", "")
    assert job.communicate(timeout=120) and job.returncode == 0
    assert [event["cause"] for event in events(stoker, "role-restart")] == ["role.unhealthy"]


@at_length
def test_a_server_that_fails_at_once_again_and_again_is_a_loop(stoker: Stoker) -> None:
    stoker.script("broken.py", "raise SystemExit(9)\n")
    broken = rules(command="broken.py")
    done = stoker("run", "--roles", file_of(stoker, server=broken, trainer={"command": "trainer.py"}))
    assert (done.code, done.verdict["cause"]) == (9, "role.restart-loop"), done.err
    assert "role server: it failed 5 times within 10 min" in done.verdict["summary"]
    assert len(events(stoker, "role-start")) == 5


def test_a_failure_starts_the_whole_job_again(stoker: Stoker) -> None:
    text = "import os, time\nif os.path.exists('second'): open('done', 'w')\nelse: open('second', 'w'); raise SystemExit(4)\n"
    stoker.script("once.py", text)
    job = file_of(stoker, server=rules(), trainer={"command": "once.py", "restart": "job"})
    done = stoker("run", "--max-restarts", "1", "--roles", job)
    assert done.code == 0, done.err
    assert [event["role"] for event in events(stoker, "role-start")] == ["server", "trainer", "server", "trainer"]
    assert "starting all roles again (1 of 1)" in done.err


def test_ctrl_c_ends_the_trainers_first_and_nothing_is_left(stoker: Stoker) -> None:
    job = stoker.start("run", "--roles", file_of(stoker, server=rules(), trainer={"command": "trainer.py"}))
    assert ready(stoker, 1) and wait_for(lambda: pids(stoker, "trainer") or None, 60)
    job.send_signal(signal.SIGINT)
    said = job.communicate(timeout=120)[0].decode()
    assert job.returncode == 130 and stoker.result().verdict["status"] == "stopped", said
    assert [event["role"] for event in events(stoker, "role-end")] == ["trainer", "server"]
    assert "to start it again: the same command with --name" in said or "to start it again: stoker run" in said


def test_a_stopped_job_continues_from_the_checkpoints_of_its_roles(stoker: Stoker) -> None:
    saves = (
        "import os, signal, stoker, sys, time\n"
        "def stop(*_):\n"
        "    folder = os.path.join(os.environ['STOKER_RUN_DIR'], 'checkpoints')\n"
        "    os.makedirs(folder)\n"
        "    open(os.path.join(folder, 'step-7.pt'), 'w').close()\n"
        "    sys.exit(0)\n"
        "if (saved := stoker.resume()):\n"
        "    print('resumed', os.path.basename(saved)); sys.exit(0)\n"
        "signal.signal(signal.SIGINT, stop)\n"
        "open('there', 'w')\n"
        "time.sleep(300)\n"
    )
    trainer = {"command": stoker.script("saves.py", saves), "env": {"GREETING": "hello"}}
    job = stoker.start("run", "--roles", file_of(stoker, server=rules(), trainer=trainer), "--name", "mine")
    assert wait_for(lambda: True if (stoker.cwd / "there").exists() else None, 60)
    job.send_signal(signal.SIGINT)
    said = job.communicate(timeout=120)[0].decode()
    command = "stoker run --roles job.yaml --name mine"
    assert "saved: checkpoints/step-7.pt" in said and f"stoker: to continue: {command}\n" in said, said
    assert stoker.result().verdict["fix"][0] == f"{command}   # to continue"
    (folder,) = stoker.latest.glob("roles/*-trainer")
    again = stoker("run", "--roles", "job.yaml", "--name", "mine")
    head = f"starting run {stoker.latest.name} again; its newest checkpoint: of role trainer"
    assert (
        again.code == 0 and f"{head} runs/{stoker.latest.name}/roles/{folder.name}/checkpoints/step-7.pt" in again.err
    )
    assert "CPU0:resumed step-7.pt" in again.out and "from the beginning" not in again.err


def test_a_role_that_does_not_continue_says_why(stoker: Stoker) -> None:
    trainer = {"command": stoker.script("fails.py", "raise SystemExit(3)\n"), "env": {"GREETING": "hello"}}
    assert stoker("run", "--name", "mine", "--roles", file_of(stoker, trainer=trainer)).code == 3
    other = file_of(stoker, trainer={**trainer, "env": {"GREETING": "good-bye"}})
    again = stoker("run", "--name", "mine", "--roles", other)
    assert again.code == 3 and len(list(stoker.latest.glob("roles/*-trainer*"))) == 2
    why = "was started with other settings (--env: GREETING=hello then, GREETING=good-bye now); this is a new run"
    assert f"is unfinished but {why} of that name" in again.err, again.err


def test_the_attempts_of_a_job_are_listed(stoker: Stoker) -> None:
    stoker.script(
        "once.py", "import os\nif not os.path.exists('tried'): open('tried', 'w').close(); raise SystemExit(3)\n"
    )
    stoker.script("short.py", "")
    for name, scripts, options, attempts in (
        ("plain", ("short.py", "short.py"), (), 1),
        ("again", ("short.py", "once.py"), ("--max-restarts", "1"), 2),
    ):
        roles = [word for at, script in enumerate(scripts) for word in ("--role", f"part{at}:1:{script}")]
        assert stoker("run", "--name", name, *options, *roles).code == 0
        row = json.loads(stoker("runs", "--json", "--filter", f"name={name}").out)["runs"][0]
        assert row["status"] == "completed" and row["attempts"] == attempts, row


def test_a_killed_job_takes_its_roles_with_it(stoker: Stoker) -> None:
    job = stoker.start("run", "--roles", file_of(stoker, server=rules(), trainer={"command": "trainer.py"}))
    assert ready(stoker, 1) and wait_for(lambda: pids(stoker, "trainer") or None, 60)
    job.kill()
    job.wait()
    assert wait_for(lambda: True if not tagged(stoker.cwd) else None, 30)


def test_the_command_of_a_killed_job_waits_for_roles_that_still_save(stoker: Stoker) -> None:
    """They were told to end when the job's launcher died. `may-end`: they have saved."""
    stoker.script(
        "saver.py",
        """
import os, signal, time
def save(*_):
    open("saves", "w").close()
    while not os.path.exists("may-end"): time.sleep(0.05)
    open("checkpoint", "w").close()
    raise SystemExit(0)
signal.signal(signal.SIGTERM, save)
open("runs-now", "w").close()
while not os.path.exists("checkpoint"): time.sleep(0.05)
""",
    )
    words = ("run", "--name", "job", "--roles", file_of(stoker, one={"command": "saver.py"}))
    job = stoker.start(*words)
    assert wait_for(lambda: (stoker.cwd / "runs-now").exists() or None, 60)
    job.kill()
    job.wait()
    assert wait_for(lambda: (stoker.cwd / "saves").exists() or None, 60)
    log = stoker.cwd / "again.log"
    with open(log, "wb") as output:
        again = stoker.start(*words, stdout=output, stderr=output)
    waits = wait_for(lambda: "is still saving; waiting for its end" in log.read_text() or None, 60)
    (stoker.cwd / "may-end").touch()
    assert again.wait(120) == 0 and waits, log.read_text()


def test_a_line_a_mark_and_a_file_make_ready(stoker: Stoker) -> None:
    waits = "import time, os\nwhile not os.path.exists('done'): time.sleep(0.05)\n"
    # in two pieces, as a busy machine reads it at times
    pieces = "import os, time\nos.write(1, b'server ')\ntime.sleep(0.5)\nos.write(1, b'started\\n')\n"
    stoker.script("a.py", pieces + waits)
    stoker.script("b.py", "import stoker\nstoker.mark('READY')\n" + waits)
    stoker.script("c.py", "open('there', 'w')\n" + waits)
    stoker.script("d.py", "open('done', 'w')\n")
    parts = {
        "a": {"command": "a.py", "ready": {"line": "server started"}, "required": True},
        "b": {"command": "b.py", "count": 2, "ready": {"mark": "READY"}, "required": True},
        "c": {"command": "c.py", "ready": {"file": "there"}, "required": False},
        "d": {"command": "d.py"},
    }
    done = stoker("run", "--roles", file_of(stoker, **parts))
    assert done.code == 0 and [event["role"] for event in events(stoker, "role-ready")] == ["a", "b", "c"], done.err
    assert done.verdict["summary"].startswith("a and b and d ended with exit code 0")


def test_a_job_that_waits_for_a_server_without_end_says_so(stoker: Stoker) -> None:
    stoker.script("short.py", "")
    stoker.script("long.py", "import os, time\nwhile not os.path.exists('done'): time.sleep(0.05)\n")
    job = stoker.start("run", "--role", "server:1:long.py", "--role", "trainer:1:short.py")
    line = "the job continues until server has ended, too; a server is not waited for if it listens on STOKER_PORT"
    log = stoker.cwd / "runs" / "latest" / "stoker.log"
    assert wait_for(lambda: True if log.exists() and line in log.read_text() else None, 60)
    stoker.script("done", "")
    assert job.communicate(timeout=60) and job.returncode == 0


def test_roles_that_end_one_after_the_other_print_no_claim_about_the_rest(stoker: Stoker) -> None:
    stoker.script("short.py", "")
    stoker.script("next.py", "import os, time\nwhile not os.path.exists('done'): time.sleep(0.05)\n")
    job = stoker.start("run", "--role", "first:1:short.py", "--role", "second:1:next.py")
    assert wait_for(lambda: events(stoker, "role-end") or None, 60)
    stoker.script("done", "")
    said = job.communicate(timeout=60)[0].decode()
    assert job.returncode == 0 and "first and second ended with exit code 0" in said
    assert "continues until" not in said, said


# As people write them: the standard library's server in a process of its own, on the port that the role was given.
SERVE = """
import os, subprocess, sys
subprocess.run([sys.executable, "-m", "http.server", sys.argv[1], "--bind", "127.0.0.1"], check=True)
"""
STEPS = """
import os, time
while not os.path.exists("done"): time.sleep(0.05)
print("rank", os.environ["RANK"], "trained")
"""


def service_reason(stoker: Stoker, name: str) -> str:
    found = wait_for(lambda: [event for event in events(stoker, "role-service") if event["role"] == name] or None, 60)
    return str(found[0]["reason"]) if found else ""


@pytest.mark.parametrize("by", ["port", "mark"])
def test_an_inline_server_is_stopped_when_the_trainers_have_ended(stoker: Stoker, by: str) -> None:
    stoker.script("serve.py", SERVE)
    stoker.script("marks.py", "import stoker, time\nstoker.mark('READY')\ntime.sleep(600)\n")
    stoker.script("train.py", STEPS)
    server = {"port": "python serve.py ${port}", "mark": "marks.py"}[by]
    job = stoker.start("run", "--role", f"server:1:{server}", "--role", "trainer:2:train.py")
    assert by in service_reason(stoker, "server")
    stoker.script("done", "")
    said = job.communicate(timeout=120)[0].decode()
    done = stoker.result(job.returncode)
    assert (done.code, done.verdict["status"]) == (0, "completed"), said
    assert done.verdict["summary"] == "trainer ended with exit code 0; server stopped"
    ends = [(event["role"], event["status"]) for event in events(stoker, "role-end")]
    assert ends == [("trainer", "completed"), ("server", "stopped")]
    assert wait_for(lambda: True if not tagged(stoker.cwd) else None, 30), "nothing is left"


def test_a_trainer_that_ended_before_the_server_listened_ends_the_job_too(stoker: Stoker) -> None:
    stoker.script("serve.py", "import os, time\nwhile not os.path.exists('over'): time.sleep(0.05)\n" + SERVE)
    stoker.script("train.py", "")
    job = stoker.start("run", "--role", "server:1:python serve.py ${port}", "--role", "trainer:1:train.py")
    assert wait_for(lambda: events(stoker, "role-end") or None, 60)
    stoker.script("over", "")
    said = job.communicate(timeout=120)[0].decode()
    assert job.returncode == 0 and "trainer ended with exit code 0; server stopped" in said


def test_an_inline_server_that_dies_before_the_trainers_end_fails_the_job(stoker: Stoker) -> None:
    stoker.script("serve.py", SERVE)
    stoker.script("train.py", STEPS)
    job = stoker.start("run", "--role", "server:1:serve.py ${port}", "--role", "trainer:1:train.py")
    assert service_reason(stoker, "server")
    os.kill(pids(stoker, "server")[-1], signal.SIGKILL)
    said = job.communicate(timeout=120)[0].decode()
    verdict = stoker.result(job.returncode).verdict
    assert (job.returncode, verdict["cause"], verdict["status"]) == (137, "rank.killed", "failed"), said
    assert verdict["summary"].startswith("role server: ")
    assert wait_for(lambda: True if not tagged(stoker.cwd) else None, 30), "nothing is left"


def test_a_role_that_listens_on_another_port_is_waited_for(stoker: Stoker) -> None:
    stoker.script(
        "other.py",
        "import os, socket, time\none = socket.create_server(('127.0.0.1', 0))\n"
        "assert str(one.getsockname()[1]) != os.environ['STOKER_PORT']\n"
        "open('listens', 'w').close()\nwhile not os.path.exists('done'): time.sleep(0.05)\n",
    )
    stoker.script("train.py", "import os, time\nwhile not os.path.exists('listens'): time.sleep(0.05)\ntime.sleep(5)\n")
    job = stoker.start("run", "--role", "server:1:other.py", "--role", "trainer:1:train.py")
    assert wait_for(lambda: events(stoker, "role-end") or None, 60)
    assert job.poll() is None and not events(stoker, "role-service"), "five seconds of listening made it no service"
    stoker.script("done", "")
    said = job.communicate(timeout=60)[0].decode()
    assert job.returncode == 0 and "server and trainer ended with exit code 0" in said


def test_a_job_of_services_only_says_that_it_has_no_end_and_runs_until_it_is_stopped(stoker: Stoker) -> None:
    stoker.script("serve.py", SERVE)
    job = stoker.start("run", "--role", "a:1:serve.py ${port}", "--role", "b:1:serve.py ${port}")
    assert service_reason(stoker, "a") and service_reason(stoker, "b")
    log = stoker.cwd / "runs" / "latest" / "stoker.log"
    assert wait_for(lambda: True if "every role is a service" in log.read_text() else None, 60)
    assert job.poll() is None
    job.send_signal(signal.SIGINT)
    said = job.communicate(timeout=120)[0].decode()
    assert job.returncode == 130, said
    assert wait_for(lambda: True if not tagged(stoker.cwd) else None, 30), "nothing is left"


def test_required_in_the_file_overrides_what_a_role_turns_out_to_be(stoker: Stoker) -> None:
    stoker.script("both.py", "import stoker\nstoker.mark('READY')\n" + STEPS)
    stoker.script("train.py", "")
    parts = {"server": {"command": "both.py", "required": True}, "trainer": {"command": "train.py"}}
    job = stoker.start("run", "--roles", file_of(stoker, **parts))
    log = stoker.cwd / "runs" / "latest" / "stoker.log"
    assert wait_for(lambda: True if log.exists() and "continues until server" in log.read_text() else None, 60)
    stoker.script("done", "")
    said = job.communicate(timeout=60)[0].decode()
    assert (
        job.returncode == 0
        and "server and trainer ended with exit code 0" in said
        and not events(stoker, "role-service")
    )


def test_a_role_with_a_ready_rule_is_a_service_unless_the_file_requires_it(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(
        "roles: {a: {command: x, ready: {file: f}}, b: {command: x, ready: {file: f}, required: true},"
        " c: {command: x, restart: always}, d: {command: x, required: false}, e: {command: x}}"
    )
    assert [spec.name for spec in role.read_roles_file(str(path)) if spec.is_service] == ["a", "c", "d"]


def test_a_program_that_is_not_there_is_refused_before_anything_starts(stoker: Stoker) -> None:
    stoker.script("bad.py", "def f(:\n")
    for command, code, line in (
        ("trianer.py", 66, "stoker: role trainer: script trianer.py does not exist (did you mean trainer.py?)"),
        ("nothing-like-this --x", 66, "stoker: role trainer: the program 'nothing-like-this' is not on the PATH"),
        ("python -m nothing_like_this", 66, "stoker: role trainer: module nothing_like_this does not exist"),
        ("bad.py", 65, "stoker: role trainer: bad.py does not parse; nothing was started"),
        (
            "stoker train sft --max-stpes 3",
            64,
            "stoker: role trainer: unknown option --max-stpes (did you mean --max-steps",
        ),
    ):
        done = stoker("run", "--roles", file_of(stoker, server=rules(), trainer={"command": command}))
        assert done.code == code and done.err.startswith(line), done.err
    assert not (stoker.cwd / "runs").exists()


def test_a_port_in_use_is_refused_before_anything_starts(stoker: Stoker) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        done = stoker("run", "--roles", file_of(stoker, server=rules(port=port), trainer={"command": "trainer.py"}))
    assert done.code == 69 and f"role server: port {port} is in use" in done.err and not (stoker.cwd / "runs").exists()


@at_length  # each rule on one host: the tests above; on two hosts: the next one
@pytest.mark.parametrize("kills", [1, 5])
def test_four_roles_on_two_hosts_are_each_replaced_or_ended_by_their_own_rule(tmp_path: Path, kills: int) -> None:
    """Twenty times each in benchmarks/roles.py."""
    if reason := why_not():
        pytest.skip(f"no test cluster here: {reason}")
    rows = roles.kill_roles(tmp_path, kills, print, ends=0)
    assert [line for row in rows for line in row.wrong] == []
    assert [(row.role, row.kills, len(row.seconds)) for row in rows] == [
        *((name, kills, kills) for name in ("server", "logger", "judge", "trainer")),
        ("trainer", 1, 1),
    ]


@at_length
def test_a_role_on_a_host_that_cant_start_reports_its_own_reason(tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(f"no test cluster here: {reason}")
    found = roles.cant_start(tmp_path)
    assert {name: verdict["cause"] for name, verdict in found.items()} == {
        "port in use": "net.port-in-use",
        "memory": "oom.host-allocation",
        "missing file": "data.file-missing",
        "missing program": "launch.refused",
    }
    assert "its port is 28123; set port: auto for a free one" in found["port in use"]["evidence"]
    assert "weights.bin does not exist" in found["missing file"]["summary"]
    assert "no program nothing-like-this" in found["missing program"]["summary"]
    for verdict in found.values():
        assert verdict["summary"].startswith("role server: ") and verdict["started"] == ["server"], verdict


@at_length
def test_a_role_whose_host_is_lost_moves_and_its_trainers_learn_the_new_address(
    stoker: Stoker, netcluster: NetCluster
) -> None:
    second = netcluster.hosts[1].name
    parts = {"server": rules(env={"LISTEN": "0.0.0.0"}), "trainer": {"command": "trainer.py"}}
    hosts = str(netcluster.file((1, 1), workdir=str(stoker.cwd)))
    job = stoker.start("run", "--hosts", hosts, "--roles", file_of(stoker, **parts))
    assert ready(stoker, 1) and wait_for(lambda: pids(stoker, "trainer") or None, 60)
    netcluster.cut(0)
    again = wait_for(lambda: list(stoker.cwd.glob(f"asked-{second}:*")) or None, 120)
    stoker.script("done", "")
    said = job.communicate(timeout=120)[0].decode()
    assert again and job.returncode == 0, said
    assert [(event["role"], event["hosts"]) for event in events(stoker, "role-moved")] == [("server", [second])]
    assert f"[server] {second}/CPU0:serves 0 of 1" in said or "[server] CPU0:serves 0 of 1" in said
    assert "role trainer is started again: server has other addresses now" in said
    starts = [event["role"] for event in events(stoker, "role-start")]
    assert starts == ["server", "trainer", "server", "trainer"], "the trainer waits until the server is ready"
    assert "rank 0 of 1 asked" in said
    assert wait_for(lambda: True if not netcluster.pids(0) and not netcluster.pids(1) else None, 60), "nothing is left"


@at_length
@pytest.mark.parametrize("rule", ["min_hosts", "job"])
def test_trainers_go_on_without_a_lost_host(stoker: Stoker, netcluster: NetCluster, rule: str) -> None:
    """With min_hosts by their own run, on fewer ranks; with restart: job all roles anew, as many ranks as before."""
    second = netcluster.hosts[1].name
    own = {"min_hosts": 1} if rule == "min_hosts" else {"restart": "job"}
    parts = {"server": rules(env={"LISTEN": "0.0.0.0"}), "trainer": {"command": "trainer.py", "count": 3, **own}}
    words = ("--hosts", str(netcluster.file((1, 1), workdir=str(stoker.cwd))), "--max-restarts", "1")
    job = stoker.start("run", *words, "--roles", file_of(stoker, **parts))
    assert ready(stoker, 1) and wait_for(lambda: True if len(pids(stoker, "trainer")) == 3 else None, 60)
    netcluster.cut(1)
    ranks = 4 if rule == "min_hosts" else 6
    again = wait_for(lambda: True if len(pids(stoker, "trainer")) == ranks else None, 120)
    stoker.script("done", "")
    said = job.communicate(timeout=120)[0].decode()
    assert again and job.returncode == 0, said
    starts = [event["role"] for event in events(stoker, "role-start")]
    if rule == "min_hosts":
        assert (
            starts == ["server", "trainer"] and "continuing with 1 of 2 hosts" in said and "rank 0 of 1 asked" in said
        )
    else:
        assert starts == ["server", "trainer"] * 2 and f"host {second} is lost" in said and "rank 2 of 3 asked" in said
        assert len(pids(stoker, "server")) == 2
    assert wait_for(lambda: True if not netcluster.pids(0) and not netcluster.pids(1) else None, 60), "nothing is left"


@at_length
def test_a_role_that_finds_no_other_host_ends_the_job_and_says_so(stoker: Stoker, netcluster: NetCluster) -> None:
    """One GPU on each of two hosts, both in use. Shared: on this machine both hosts' are one."""
    (stoker.cwd / "box.json").write_text(json.dumps(machine_json([gpu_json(0)])))
    parts = {"server": rules(env={"LISTEN": "0.0.0.0"}), "trainer": {"command": "trainer.py"}}
    words = ("--hosts", str(netcluster.file((1, 1), workdir=str(stoker.cwd))), "--roles", file_of(stoker, **parts))
    job = stoker.start(
        "run", "--no-preflight", "--share-gpus", *words, env={"STOKER_MACHINE": str(stoker.cwd / "box.json")}
    )
    assert ready(stoker, 1) and wait_for(lambda: pids(stoker, "trainer") or None, 60), job.kill() or job.communicate()
    netcluster.cut(0)
    said = job.communicate(timeout=120)[0].decode()
    verdict = stoker.result(job.returncode).verdict
    assert (job.returncode, verdict["cause"]) == (70, "host.lost"), said
    lost = f"role server: the agent on host {netcluster.hosts[0].name} was lost: "
    assert verdict["summary"].startswith(lost) and "none of the 1 other host has free GPUs for it" in verdict["summary"]
    assert [event["role"] for event in events(stoker, "role-start")] == ["server", "trainer", "server"]


# ---- GPUs and the allocation grammar ----


def box(stoker: Stoker, dead: tuple[int, ...] = ()) -> dict[str, str]:
    cards = [gpu_json(n, **({"error": "Unable to determine the device handle"} if n in dead else {})) for n in range(4)]
    (stoker.cwd / "box.json").write_text(json.dumps(machine_json(cards)))
    return {"STOKER_MACHINE": str(stoker.cwd / "box.json")}


def test_the_notes_allocation_on_four_cards_of_which_one_is_dead(stoker: Stoker) -> None:
    words = ("--role", "server:python server.py", "--role", "trainer:train.py --lr 1e-5")
    stoker.script("train.py", "")
    stoker.script("server.py", "")
    done = stoker("run", "--dry-run", "--allocation", "sglang.d1t1p1+d3t1p1", *words, env=box(stoker))
    assert done.code == 0, done.err
    assert re.search(r"role server: 1 rank on GPU0, port \d+: python server\.py\n", done.out), done.out
    trainer = r"role trainer: 3 ranks on GPU1, GPU2, GPU3, ports (\d+)-\d+: train\.py --lr 1e-5\n  rank 0  GPU1  NVIDIA A40 GPU-1"
    assert re.search(trainer, done.out), done.out
    dead = box(stoker, dead=(0,))
    done = stoker("run", "--dry-run", "--allocation", "sglang.d1t1p1+d3t1p1", *words, env=dead)
    assert done.code == 69 and "needs 4 GPUs, but 3 can be used; sglang:d1t1p1+fsdp:d2t1p1 would fit" in done.err
    done = stoker("run", "--dry-run", "--json", "--allocation", "sglang:d1t2+fsdp:d1", *words, env=dead)
    places = json.loads(done.out)["places"]
    assert [(one["role"], one["gpu"]["index"], len(one["more"])) for one in places] == [
        ("server", 1, 1),
        ("trainer", 3, 0),
    ]


def test_a_server_sees_all_its_gpus_and_each_trainer_its_own(stoker: Stoker) -> None:
    show = "import os; print('sees', os.environ['CUDA_VISIBLE_DEVICES'], os.environ['LOCAL_RANK'])\n"
    stoker.script("see.py", show)
    words = ("--role", "server:see.py", "--role", "trainer:see.py", "--allocation", "vllm:d1t2+fsdp:d2")
    done = stoker("run", *words, env=box(stoker))
    cards = [gpu_json(n)["uuid"] for n in range(4)]
    assert done.code == 0, done.err
    assert f"[server] GPU0:sees {cards[0]},{cards[1]} 0" in done.out
    assert f"[trainer] GPU2:sees {cards[2]},{cards[3]} 0" in done.out
    assert f"[trainer] GPU3:sees {cards[2]},{cards[3]} 1" in done.out


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("foo:d1+d2", "unknown engine 'foo'"),
        ("sglng:d1+d2", "did you mean sglang"),
        ("sglang:x1+d2", "unknown dimension 'x'"),
        ("sglang.d0+d2", "d must be from 1 to 65536, got 0"),
        ("sglang.d1d2", "gives a dimension twice"),
        ("sglang.+d2", "has no sizes"),
        ("+d2", "a part is empty"),
        ("stoker:d1t2+d2", "write stoker:d2, or vllm:d1t2"),
        ("vllm:d1+fsdp:d4|fsdp:d2", "must have equally many, got 4 and 2"),
        ("vllm:d1+fsdp:d2+fsdp:d2", "need names"),
        ("vllm[a]:d1+fsdp[a]:d2", "two parts have the same name"),
        ("vllm[a b]:d1+fsdp:d2", "is not a valid name"),
    ],
)
def test_allocations_that_make_no_sense(text: str, said: str) -> None:
    with pytest.raises(Refusal) as refused:
        allocation.parse_allocation(text)
    assert said in refused.value.line and text in refused.value.line


def test_allocations_in_both_spellings() -> None:
    old, new = allocation.parse_allocation("sglang.d1t1p1+d3t1p1"), allocation.parse_allocation("sglang:d1+fsdp:d3")
    assert [(part.is_server, part.gpu_count, part.replicas, part.gpus_per_process) for part in old] == [
        (True, 1, 1, 1),
        (False, 3, 3, 1),
    ]
    assert [part.gpu_count for part in new] == [1, 3]
    three = allocation.parse_allocation("sglang[rollout]:d2+fsdp[actor]:d4|fsdp[critic]:d4")
    assert allocation.count_gpus(three) == 6 and [part.group for part in three] == [0, 1, 1]
    specs = [RoleSpec(name, ("x",)) for name in ("critic", "rollout", "actor")]
    plan = apply_allocation(specs, "sglang[rollout]:d2+fsdp[actor]:d4|fsdp[critic]:d4")
    assert plan.share == {"actor": "critic"} and [spec.count for spec in plan.specs] == [4, 2, 4]
    uneven = [RoleSpec("s", ("x",)), RoleSpec("t", ("x",), batch=12)]
    assert apply_allocation(uneven, "sglang:d5+fsdp:d2t4").specs[1].count == 8, "8 processes, 2 replicas"
    with pytest.raises(Refusal, match=r"role t: 12 samples a step \(batch\) can.t be divided among 8 replicas; use 6"):
        apply_allocation(uneven, "sglang:d1+fsdp:d8")
    with pytest.raises(Refusal, match="unknown role 'rollout'"):
        apply_allocation([RoleSpec("a", ("x",)), RoleSpec("b", ("x",))], "sglang[rollout]:d1+fsdp:d1")


@pytest.mark.parametrize(
    ("text", "gpus", "fits"),
    [
        ("sglang.d1t1p1+d3t1p1", 3, "sglang:d1t1p1+fsdp:d2t1p1"),
        ("vllm:d2t2+fsdp:d4", 4, "vllm:d1t2+fsdp:d2"),
        ("vllm:d1t8+d2", 4, "vllm:d1t2+fsdp:d2 would fit, if the model fits on so few GPUs"),
        ("vllm:d1t2p2+d2", 4, "vllm:d1t2p1+fsdp:d2 would fit, if"),
        ("vllm:d3t2|fsdp:d6", 5, "vllm:d2t2|fsdp:d4"),
        ("sglang[a]:d2+fsdp[b]:d4|fsdp[c]:d4", 4, "sglang[a]:d2+fsdp[b]:d2|fsdp[c]:d2"),
        ("vllm:d1t3+d2", 3, ""),
    ],
)
def test_an_allocation_that_does_not_fit_is_refused_with_one_that_does(text: str, gpus: int, fits: str) -> None:
    with pytest.raises(Refusal) as refused:
        allocation.check_fit(text, allocation.parse_allocation(text), gpus)
    assert (f"; {fits}" in refused.value.line) if fits else refused.value.line.endswith("can be used")
    if fits:
        other = allocation.parse_allocation(fits.split()[0])
        allocation.check_fit(fits, other, gpus)


def test_gpus_are_dealt_once_each() -> None:
    cards = [GpuSlot(f"u{n}", f"GPU{n}", n) for n in range(4)]
    specs = [RoleSpec("s", ("x",), 1, 2), RoleSpec("t", ("x",), 2), RoleSpec("log", ("x",), 1, 0)]
    dealt = place_roles(specs, cards)
    indices = {name: [[gpu.index for gpu in seat.gpus] for seat in seats] for name, seats in dealt.items()}
    assert indices == {"s": [[0, 1]], "t": [[2], [3]], "log": [[]]}
    with pytest.raises(Refusal, match=r"the roles need 4 GPUs \(s 2, t 2\), but 3 can be used"):
        place_roles(specs, cards[:3])
    far = [GpuSlot(f"u{n}", f"{host}/GPU{n}", n, host) for host in "ab" for n in range(3)]
    two = [RoleSpec("s", ("x",), 2, 2), RoleSpec("t", ("x",), 2)]
    dealt = place_roles(two, far, hosts=("a", "b"))
    assert [seat.host for seat in dealt["s"]] == ["a", "b"], "two GPUs of one process are on one host"
    assert [(seat.host, seat.gpus[0].index) for seat in dealt["t"]] == [("a", 2), ("b", 2)]
    with pytest.raises(Refusal, match="each process needs its GPUs on one host"):
        place_roles([RoleSpec("s", ("x",), 3, 2)], far, hosts=("a", "b"))
    assert move_role(two[0], dealt, far[3:], ("b",)) is None, "host b has one GPU that is free of s, and t has it"
    one = place_roles([RoleSpec("s", ("x",), 2)], far, hosts=("a", "b"))
    assert [seat.host for seat in one["s"]] == ["a", "a"]
    seats = move_role(RoleSpec("s", ("x",), 2), one, far[3:], ("b",))
    assert seats is not None and [(seat.host, seat.gpus[0].uuid) for seat in seats] == [("b", "u0"), ("b", "u1")]
    spread = place_roles([RoleSpec("s", ("x",)), RoleSpec("t", ("x",), 3)], [], hosts=("a", "b"))
    assert {name: [seat.host for seat in seats] for name, seats in spread.items()} == {"s": ["a"], "t": ["a", "b", "b"]}


# ---- what can't be a job ----


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["a:x"], "write NAME:COUNT:'COMMAND'"),
        (["a:0:x"], "'0' is not a number of replicas"),
        (["a:1:x", "a:1:y"], "two roles are named a"),
        (["1a:1:x"], "can't be a role's name"),
        (["../a:1:x"], "can't be a role's name"),
        (["a:1:'x"], "No closing quotation"),
        (["a:1: "], "the command is empty"),
    ],
)
def test_words_that_name_no_role(words: list[str], said: str) -> None:
    with pytest.raises(Refusal) as refused:
        role.parse_role_flags(words)
    assert said in refused.value.line


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x: 1", "must have the key roles:"),
        ("roles: []", "must have the key roles:"),
        ("roles: {a: {command: x}, b: {command: y, after: [c]}}", "b waits for 'c', but there is no such role"),
        ("roles: {a: {command: x, after: [b]}, b: {command: y, after: [a]}}", "no role can start first: a waits for b, b waits for a"),
        ("roles: {a: {comand: x}}", "unknown key 'comand' (did you mean command"),
        ("roles: {a: {command: x, count: -1}}", "count: -1 is not a whole number"),
        ("roles: {a: {command: x, count: true}}", "count: True is not a whole number"),
        ("roles: {a: {command: x, restart: often}}", "'often' is not one of always, never, job"),
        ("roles: {a: {command: x, ready: {http: health}}}", "is not a path such as /health"),
        ("roles: {a: {command: x, ready: {http: /a, file: b}}}", "give one of port, http, file, line, mark"),
        ("roles: {a: {command: x, ready: {http: /a}, port: 0}}", "ready: http needs a port"),
        ("roles: {a: {command: x, ready: {file: b, timeout: soon}}}", "timeout: "),
        ("roles: {a: {command: x, ready: {port: true, answer: 3s}}}", "answer belong to http"),
        ("roles: {a: {command: x, ready: {http: /a, answer: 0}}}", "answer must be more than 0 s"),
        ("roles: {a: {command: x, port: 70000}}", "port: 70000 is not auto"),
        ("roles: {a: {command: x, ready: {http: /a, body: {b: 2020-01-01}}}}", "body: "),
        ("roles: {a: {command: x, env: {1: b}}}", "1 is not a variable's name"),
        ("roles: {a: {command: x, restart: always}}", "no role is required"),
        ("roles: {a: {}}", "command: is missing"),
        ("roles: {a: [", "not YAML"),
        ("roles: {1: x}", "the name of a role must be a text"),
    ],
)  # fmt: skip
def test_files_that_describe_no_job(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    with pytest.raises(Refusal) as refused:
        role.read_roles_file(str(path))
    assert said in refused.value.line and "\n" not in refused.value.line


def test_options_that_a_job_does_not_take(stoker: Stoker) -> None:
    stoker.script("uneven.yaml", "roles: {t: {command: train.py, count: 3, batch: 256}}")
    for words, said in (
        (["--role", "a:1:x", "--nnodes", "2"], "--nnodes does not apply to a multi-role job"),
        (["--role", "a:1:x", "train.py"], "a multi-role job takes no script, got train.py"),
        (["--roles", "none.yaml"], "roles file none.yaml does not exist"),
        (["--roles", "uneven.yaml"], "role t: 256 samples a step (batch) can't be divided among 3 replicas; use 2"),
        (["--roles", "none.yaml", "--role", "a:1:x"], "can't be combined with --role"),
        (["--role", "a:2:stoker train grpo --nproc-per-node 2"], "a: leave --nproc-per-node out of its command"),
        (["--allocation", "d1+d2", "--role", "a:x"], "must have one part per role (a), got 2 parts"),
    ):
        done = stoker("run", *words)
        assert done.code in (64, 66, 78) and said in done.err and done.err.count("\n") == 1, done.err


def test_a_run_that_a_role_starts_is_a_run_of_its_own(stoker: Stoker) -> None:
    stoker.script("inner.py", "print('inner')\n")
    stoker.script(
        "outer.py",
        "import subprocess, sys\nsubprocess.run([sys.executable, '-m', 'stoker', 'run', 'inner.py'], check=True)\n",
    )
    done = stoker("run", "--role", "a:1:outer.py")
    assert done.code == 0 and "the rank ended with exit code 0 in " in done.out + done.err, "it says how it ended"


def test_a_role_alone_is_a_plain_run(stoker: Stoker) -> None:
    done = stoker("run", "--role", "worker", stoker.script("a.py", "import os; print(os.environ['ROLE_NAME'])\n"))
    assert done.code == 0 and b"worker" in done.log(0) and not (done.run_dir / "roles").exists()


def test_a_plain_run_loads_nothing_of_roles(stoker: Stoker) -> None:
    """Launch time and memory of one program are what they were before there were roles."""
    stoker.script("a.py", "")
    code = (
        "import sys\nfrom stoker.cli.main import main\nassert main(['run', *sys.argv[1:]]) == 0\n"
        "print([one for one in sys.modules if 'roles' in one.split('.') or one == 'stoker.control.cluster.hosts'])\n"
    )
    for words in ((), ("--role", "worker")):
        done = subprocess.run(
            [sys.executable, "-c", code, *words, "a.py"],
            cwd=stoker.cwd, env=stoker.environment(), capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.stdout.splitlines()[-1] == "[]", done.stdout + done.stderr


def test_a_roles_variables_are_on_no_command_line_and_in_no_record(stoker: Stoker) -> None:
    """Command lines are visible to all users, and what a rank prints is quoted in verdicts."""
    secret = "quietwombat88squared"
    look = (
        "import glob, os\n"
        "for path in glob.glob('/proc/[0-9]*/cmdline'):\n"
        "    try: text = open(path).read()\n"
        "    except OSError: continue\n"
        f"    assert {secret[:8]!r} + {secret[8:]!r} not in text, path\n"
        "print('I have', os.environ['DB_PASSWORD'], flush=True)\n"
        "raise SystemExit(3)\n"
    )
    stoker.script("look.py", look)
    job = file_of(stoker, server={"command": "look.py", "env": {"DB_PASSWORD": secret}})
    done = stoker("run", "--roles", job)
    assert done.code == 3 and secret in done.out, done.err
    own = [path for path in stoker.latest.rglob("*") if path.is_file() and path.suffix == ".json"]
    assert own and not [path for path in own if secret in path.read_text()]
    assert secret not in (stoker.latest / "events.jsonl").read_text() + stoker("why").out


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to be two users")
def test_another_users_server_or_file_makes_no_role_ready(stoker: Stoker, tmp_path: Path) -> None:
    def listen() -> None:
        os.setuid(65534)
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            other.listen()
            os.write(told[1], str(other.getsockname()[1]).encode())
            signal.pause()

    told = os.pipe()
    pid = os.fork()
    if pid == 0:
        listen()
    try:
        port = int(os.read(told[0], 10))
        watching = ReadyWatch(ReadyRule("port", ""), [("127.0.0.1", port)], 0.0, 1)
        assert wait_for(lambda: watching.problem or None, 10) == f"port {port} is in use by nobody"
        assert not watching.ready.is_set()
        watching.close()
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    file = tmp_path / "there"
    file.symlink_to("/tmp")
    os.chown(file, 65534, 65534, follow_symlinks=False)
    watching = ReadyWatch(ReadyRule("file", str(file)), [], 0.0, 1)
    assert wait_for(lambda: watching.problem or None, 10) == f"{file} belongs to nobody" and not watching.ready.is_set()
    watching.close()


def test_a_job_whose_folder_was_exchanged_starts_no_more_roles(stoker: Stoker) -> None:
    job = stoker.start("run", "--roles", file_of(stoker, server=rules(), trainer={"command": "trainer.py"}))
    assert ready(stoker, 1) and wait_for(lambda: pids(stoker, "trainer") or None, 60)
    folder, server = stoker.latest, pids(stoker, "server")[-1]
    folder.rename(folder.with_name("moved"))
    folder.mkdir()
    os.kill(server, signal.SIGKILL)
    said = job.communicate(timeout=120)[0].decode()
    assert job.returncode == 73 and "was moved or replaced during the run" in said, said
    assert not list(folder.iterdir())


COUNTS = """
import http.server, os, sys
asked = 0
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        global asked
        self.send_response(200); self.end_headers()
        if self.path == "/metrics":
            page = '# TYPE vllm:request_success_total counter\\n' + ''.join(
                f'vllm:request_success_total{{finished_reason="{why}"}} {asked}.0\\n' for why in ("stop", "length"))
            self.wfile.write((page + f"vllm:generation_tokens_total {asked * 7}\\nother 5\\n").encode())
        else:
            asked += 1
            self.wfile.write(b"fine")
    def log_message(self, *_): pass
http.server.HTTPServer(("127.0.0.1", int(os.environ["STOKER_PORT"])), Answer).serve_forever()
"""


def test_a_servers_progress_is_its_requests_and_tokens(stoker: Stoker) -> None:
    told = file_of(
        stoker,
        server=rules(command="python counts.py", ready={"http": "/health", "check": "0.2s", "metrics": "/metrics"}),
        trainer={"command": "trainer.py"},
    )
    stoker.script("counts.py", COUNTS)
    job = stoker.start("run", "--roles", told, "--name", "rl")
    assert wait_for(lambda: True if len(events(stoker, "role-served")) > 2 else None, 200)
    top = json.loads(stoker("top", "--json").out)
    phases = {rank["role"]: rank["phase"] for run in top["runs"] for rank in run["ranks"]}
    stoker.script("done", "")
    assert job.communicate(timeout=120) and job.returncode == 0
    assert re.fullmatch(r"[\d,]+ requests, [\d,]+ tokens", phases["server"]) and phases["trainer"] == ""
    newest = events(stoker, "role-served")[-1]["replicas"][0]
    assert newest["requests"] > 2 and newest["tokens"] * 2 == newest["requests"] * 7


@pytest.mark.parametrize(
    ("page", "found"),
    [
        ("", None),
        ("# requests_total 5\nnothing\n", None),
        ("requests_total 5\r\nrequests_total{a=\"b c} 1\"} 2 1700000000\n", ServedCounts(7, 0)),
        ("sglang:generation_tokens_total{model=\"x\"} 1.5e3\n", ServedCounts(0, 1500)),
        ("requests_total NaN\nrequests_total -1\nrequests_total +Inf\nrequests_total 1e99\ngenerated_tokens_total 3", ServedCounts(0, 3)),
    ],
)  # fmt: skip
def test_what_a_page_of_metrics_counts(page: str, found: ServedCounts | None) -> None:
    assert parse_served_counts(page) == found
