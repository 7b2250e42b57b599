"""Four roles of toy programs on two hosts, each killed again and again: is it replaced or ended by its own rule, with its own
cause, and is nothing left behind?

    python benchmarks/roles.py               20 kills of each role: about 15 minutes on 2 cores
    python benchmarks/roles.py --kills 2     a try

The hosts are network namespaces with their own sshd (tests/netcluster.py; root only). A reward server and a judge (with a
port, ready when they answer), a logger (ready when it prints a line) and two trainers, one a host, that ask both:

    server   restart: always    it alone is replaced
    logger   restart: always    it alone is replaced
    judge    restart: job       all roles are started again
    trainer  restart: never     its ranks are started again, --max-restarts times; then, and with 0 at once, the job ends
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
for folder in (HERE, HERE.parent / "tests"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from conftest import Stoker, machine_json, wait_for  # noqa: E402  before netcluster, which stands on it
from netcluster import NetCluster, why_not  # noqa: E402

ORDER = ("server", "logger", "judge", "trainer")
LONG_S = 60.0  # for what takes seconds
SERVER = """
import http.server, os
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b"1.0")
    def log_message(self, *_): pass
http.server.ThreadingHTTPServer(("0.0.0.0", int(os.environ["STOKER_PORT"])), Answer).serve_forever()
"""
LOGGER = "import time\nprint('listening', flush=True)\nwhile True: time.sleep(0.1)\n"
TRAINER = """
import os, time, urllib.request
import stoker
step = 0
while not os.path.exists("enough"):
    for role in ("SERVER", "JUDGE"):
        try:
            urllib.request.urlopen("http://" + os.environ["STOKER_ROLE_" + role], timeout=5).read()
        except OSError:
            pass  # it is being replaced
    step += 1
    stoker.beat(step=step)
    with open("steps-" + os.environ["RANK"], "w") as file: file.write(str(os.getpid()) + " " + str(step))
    time.sleep(0.02)
"""
FAILS = "import sys\nbytearray(1 << 60) if sys.argv[1] == 'memory' else open('weights.bin')\n"
PROGRAMS = {"server.py": SERVER, "logger.py": LOGGER, "trainer.py": TRAINER, "fails.py": FAILS}
ROLES: dict[str, dict[str, Any]] = {
    "server": {"command": "server.py", "ready": {"http": "/"}, "restart": "always"},
    "logger": {"command": "logger.py", "ready": {"line": "listening"}, "restart": "always"},
    "judge": {"command": "server.py", "ready": {"http": "/"}, "restart": "job", "required": False},
    "trainer": {"command": "trainer.py", "count": 2},
}


@dataclass
class Row:
    """What became of one role's kills."""

    role: str
    rule: str
    kills: int = 0
    wrong: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)  # from the kill until it works again, or the job has ended


class Job:
    """`stoker run --roles` on the cluster, in a folder of its own."""

    def __init__(self, cluster: NetCluster, folder: Path, max_restarts: int, roles: dict[str, Any] = ROLES) -> None:
        folder.mkdir()
        self._cluster, self.roles = cluster, roles
        for name, text in PROGRAMS.items():
            (folder / name).write_text(text)
        (folder / "job.yaml").write_text(json.dumps({"roles": roles}))
        (folder / "machine.json").write_text(json.dumps(machine_json(0)))
        ours = ("STOKER_", "PET_", "CUDA_", "RANK", "WORLD_SIZE", "MASTER_")
        env = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        self.stoker = Stoker(folder, {**env, "STOKER_MACHINE": str(folder / "machine.json")})
        words = ("--hosts", str(cluster.file((1, 1), workdir=str(folder))), "--max-restarts", str(max_restarts))
        with open(folder / "console", "wb") as console:
            self._process = self.stoker.start("run", *words, "--roles", "job.yaml", stdout=console)

    def events(self, kind: str, role: str = "") -> list[dict[str, Any]]:
        try:
            lines = (self.stoker.latest / "events.jsonl").read_text().splitlines(keepends=True)
        except FileNotFoundError:
            return []
        found = [json.loads(line) for line in lines if line.endswith("\n")]
        return [one for one in found if one["event"] == kind and role in ("", one.get("role"))]

    def pids(self, role: str) -> list[int]:
        """Of its newest start: those that its ranks have now."""
        found: dict[int, int] = {}
        for path in sorted(self.stoker.latest.glob(f"roles/*-{role}/events.jsonl")):
            for line in path.read_text().splitlines(keepends=True):
                event = json.loads(line) if line.endswith("\n") else {}
                if event.get("event") == "rank-up":
                    found[event["rank"]] = event["pid"]
        return [found[rank] for rank in sorted(found)]

    def works(self, but: frozenset[int]) -> bool:
        """All roles are ready, none of their processes is one of these, and each trainer has made steps enough to count as
        one that worked.
        """
        running = {role: self.pids(role) for role in self.roles}
        alive = [pid for pids in running.values() for pid in pids if os.path.exists(f"/proc/{pid}")]
        if len(alive) < sum(about.get("count", 1) for about in self.roles.values()) or but & set(alive):
            return False
        if any(len(self.events("role-ready", role)) < len(self.events("role-start", role)) for role in ORDER[:3]):
            return False
        for rank, pid in enumerate(running["trainer"]):
            try:
                of, step = map(int, (self.stoker.cwd / f"steps-{rank}").read_text().split())
            except (FileNotFoundError, ValueError):
                return False
            if of != pid or step < 12:
                return False
        return True

    def begins_to_work(self, but: frozenset[int] = frozenset()) -> bool:
        return bool(wait_for(lambda: True if self.ended or self.works(but) else None, LONG_S)) and not self.ended

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    @property
    def code(self) -> int:
        return self._process.wait()

    @property
    def verdict(self) -> dict[str, Any]:
        return self.stoker.result().verdict

    def close(self) -> None:
        (self.stoker.cwd / "enough").touch()
        if not wait_for(lambda: True if self.ended else None, LONG_S):
            self._process.kill()
            self._process.wait()

    def left(self) -> list[int]:
        """Processes on the hosts, a while after its end."""
        hosts = range(len(self._cluster.hosts))
        wait_for(lambda: True if not any(self._cluster.pids(host) for host in hosts) else None, 15)
        return [pid for host in hosts for pid in self._cluster.pids(host)]


def in_order(job: Job) -> list[str]:
    """What is wrong with the order in which the roles were started."""
    happened = [one for kind in ("role-start", "role-ready") for one in job.events(kind)]
    ready: set[str] = set()
    wrong = []
    for event in sorted(happened, key=lambda one: one["time"]):
        role = event["role"]
        if event["event"] == "role-ready":
            ready.add(role)
            continue
        ready.discard(role)
        wanted = {one for one in ORDER[: ORDER.index(role)] if one != "trainer"}
        if not wanted <= ready:
            wrong.append(f"{role} was started before {' and '.join(sorted(wanted - ready))} was ready")
    return wrong


def replaced(job: Job, role: str, row: Row, number: int) -> None:
    """Kills a process of the role in a job that works, and sees what comes of it."""
    before = {name: job.pids(name) for name in ORDER}
    restarts = len(job.events("role-restart", role)) + len(job.events("restart"))
    starts = {name: len(job.events("role-start", name)) for name in ORDER}
    victim = before[role][number % len(before[role])]
    os.kill(victim, signal.SIGKILL)
    began = time.monotonic()
    row.kills += 1
    if not job.begins_to_work(frozenset((victim,))):
        row.wrong.append(f"kill {number}: it was not replaced (exit code {job.code if job.ended else 'none'})")
        return
    row.seconds.append(time.monotonic() - began)
    after = {name: job.pids(name) for name in ORDER}
    touched = {name for name in ORDER if before[name] != after[name]}
    wanted = set(ORDER) if role == "judge" else {role}
    if touched != wanted:
        row.wrong.append(f"kill {number}: {sorted(touched)} were started again, and not {sorted(wanted)}")
    if role == "trainer":  # by its own run
        grown = [name for name in ORDER if len(job.events("role-start", name)) != starts[name]]
        row.wrong += [f"kill {number}: the job started {name} again" for name in grown]
        return
    told = (job.events("restart") if role == "judge" else job.events("role-restart", role))[-1:]
    if len(job.events("role-restart", role)) + len(job.events("restart")) != restarts + 1 or not told:
        row.wrong.append(f"kill {number}: {restarts} restarts before, and not one more now")
    elif (told[0]["role"], told[0]["cause"]) != (role, "rank.killed"):
        row.wrong.append(f"kill {number}: {told[0]['role']}, {told[0]['cause']} was named")


def ended_by(job: Job, row: Row, number: int) -> None:
    """Kills a trainer of a job that may not start it again."""
    rank = number % 2
    os.kill(job.pids("trainer")[rank], signal.SIGKILL)
    began = time.monotonic()
    row.kills += 1
    if not wait_for(lambda: True if job.ended else None, LONG_S):
        row.wrong.append(f"kill {number}: the job goes on")
        return
    row.seconds.append(time.monotonic() - began)
    told = job.verdict
    if (job.code, told["cause"]) != (137, "rank.killed") or not told["summary"].startswith(
        f"role trainer: rank {rank} "
    ):
        row.wrong.append(f"kill {number}: exit code {job.code}, {told['cause']}: {told['summary']}")
    row.wrong += [f"kill {number}: process {pid} is left" for pid in job.left()]


def kill_roles(folder: Path, kills: int, say: Callable[[str], None], ends: int | None = None) -> list[Row]:
    """`ends`: so many jobs that end by the kill of a trainer, besides the first; None: as many as kills."""
    cluster = NetCluster(folder / "net", 2)
    rows = [Row(role, ROLES[role].get("restart", "never")) for role in ORDER]
    last = Row("trainer", "never, 0 restarts")
    try:
        cluster.build()
        job = Job(cluster, folder / "job", kills)
        try:
            for row in rows:
                for number in range(kills):
                    if not job.begins_to_work():
                        row.wrong.append(f"before kill {number} the job does not work")
                        break
                    replaced(job, row.role, row, number)
                say(f"{row.role}: {row.kills} kills, {len(row.wrong)} wrong")
            if job.begins_to_work():
                ended_by(job, last, 0)  # it has been started again as often as it may be
            rows[0].wrong += in_order(job)
        finally:
            job.close()
        for number in range(1, (kills if ends is None else ends + 1)):
            job = Job(cluster, folder / f"job-{number}", 0)
            try:
                if job.begins_to_work():
                    ended_by(job, last, number)
                last.wrong += in_order(job)
            finally:
                job.close()
        say(f"{last.role}, {last.rule}: {last.kills} kills, {len(last.wrong)} wrong")
    finally:
        cluster.close()
    return [*rows, last]


# ---- roles that can't start ----

LISTENS = (
    "import socket, time\nwith socket.create_server(('0.0.0.0', {port})): print('taken', flush=True); time.sleep(600)\n"
)


def cant_start(folder: Path) -> dict[str, dict[str, Any]]:
    """What is wrong -> the verdict of a job whose server can't start for that."""
    cluster = NetCluster(folder / "net", 2)
    port = 28123
    cases = {
        "port in use": {"command": "server.py", "ready": {"http": "/"}, "port": port},
        "memory": {"command": "fails.py memory", "ready": {"port": True}},
        "missing file": {"command": "fails.py file", "ready": {"port": True}},
        "missing program": {"command": "nothing-like-this --port 1", "ready": {"port": True}},
    }
    found = {}
    try:
        cluster.build()
        taken = cluster.start_in(0, [sys.executable, "-c", LISTENS.format(port=port)], stdout=-1)
        assert taken.stdout is not None and taken.stdout.readline() == b"taken\n"
        for number, (name, about) in enumerate(cases.items()):
            where = folder / f"no-{number}"
            roles = {**ROLES, "server": {**about, "restart": "never"}}
            job = Job(cluster, where, 0, roles)
            job.code  # noqa: B018  waits for its end
            found[name] = {**job.verdict, "started": [one["role"] for one in job.events("role-start")]}
            job.close()
        taken.kill()
        taken.wait()
    finally:
        cluster.close()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="of each role")
    told = parser.parse_args()
    reason = why_not()
    if reason:
        print(f"no test cluster here: {reason}")
        return 1
    with tempfile.TemporaryDirectory(prefix="stk-roles-") as folder:
        rows = kill_roles(Path(folder), told.kills, lambda line: print(line, flush=True))
        (Path(folder) / "refused").mkdir()
        refused = cant_start(Path(folder) / "refused")
    print(
        "\n| role | restart | kills | as its rule says | wrong | works again or ended after, median (max) |\n|---|---|---|---|---|---|"
    )
    for row in rows:
        took = f"{statistics.median(row.seconds):.1f} s ({max(row.seconds):.1f} s)" if row.seconds else "n/a"
        print(f"| {row.role} | {row.rule} | {row.kills} | {len(row.seconds)} | {len(row.wrong)} | {took} |")
    for row in rows:
        for line in row.wrong:
            print(f"{row.role}: {line}")
    print("\n| a server that can't start | cause | verdict |\n|---|---|---|")
    for name, verdict in refused.items():
        print(f"| {name} | {verdict['cause']} | {verdict['summary']} |")
    return 1 if any(row.wrong for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
