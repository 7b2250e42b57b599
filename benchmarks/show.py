"""What `stoker top` and `stoker web` cost: CPU of a frame, CPU and memory of the viewer, of a run with recorded GPUs and ranks.

    python benchmarks/show.py                      both sizes, 30 s each
    python benchmarks/show.py --seconds 10         a try; --only top, --only web

The viewer measured is the real one, in a pseudo-terminal of 160 x 50. It watches a run directory whose history this script
writes every two seconds, as a coordinator does: 1 host of 8 GPUs, then 16 hosts of 8 with 128 ranks. CPU is the process's own
(user and system), after its first five seconds; memory is its resident set at the end. Of `stoker web` the server is measured,
with one client that keeps the stream of the run open and asks what the page's view of ranks and curves asks at each message.
"""

from __future__ import annotations

import argparse
import fcntl
import http.client
import json
import os
import pty
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from stoker.contract import layout
from stoker.contract.frozen import replace
from stoker.contract.process import find_process
from stoker.control.record.history import HistoryPoint, Members
from stoker.control.record.run_writer import RunWriter
from stoker.control.show.snapshot import Snapshot
from stoker.control.show.top.frame import make_frame
from stoker.control.show.top.sources import demo_snapshot
from stoker.control.show.top.view import View

WIDTH, HEIGHT = 160, 50
TICKS = os.sysconf("SC_CLK_TCK")
WARM_S = 5.0
FRAME_MS, MOST_MB = 50.0, 100.0
PAGE_CPU, PAGE_BYTES = 0.05, 100e3
SIZES = {"1 host, 8 GPUs, 8 ranks": (1, 8, 0.01), "16 hosts, 128 GPUs, 128 ranks": (16, 8, 0.05)}
_RANK = ("step", "step_s", "waiting", "phase", "beat_age", "memory")
_GPU = ("utilization", "memory_used", "memory_total", "temperature", "power", "throttle")
_HOST = (
    "cores",
    "load",
    "cpu",
    "memory_total",
    "memory_available",
    "disk_free",
    "disk_total",
    "received",
    "sent",
    "link",
)


@dataclass(frozen=True)
class Cost:
    size: str
    frame_ms: float
    cpu: float  # of one core
    most_cpu: float
    mb: float
    bytes_per_s: float  # to the terminal

    @property
    def fits(self) -> bool:
        return self.frame_ms <= FRAME_MS and self.cpu <= self.most_cpu and self.mb <= MOST_MB


class Recording:
    """A run directory that this process writes, as a launcher would."""

    def __init__(self, root: Path, hosts: int, gpus: int) -> None:
        self._begun, self._size = time.time() - 600.0, (hosts, gpus)
        self.dir = root / "measured"
        self.dir.mkdir(parents=True)
        me = find_process(os.getpid())
        assert me is not None
        snapshot = self._now()
        ranks = snapshot.runs[-1].ranks
        self.record = RunWriter(str(self.dir), os.uname().nodename, False)
        self.record.record_start(
            {
                "name": "measured",
                "started": self._begun,
                "launcher": {"pid": me.pid, "start": me.start, "host": os.uname().nodename},
                "command": ["train.py"],
                "plan": {
                    "world_size": len(ranks),
                    "ranks": [
                        {"rank": one.rank, "label": one.label, "host": one.host, "gpu": one.gpu} for one in ranks
                    ],
                },
                "hosts": {
                    host.name: {
                        "gpus": [
                            {
                                "uuid": card.uuid,
                                "index": card.index,
                                "name": card.name,
                                "memory_total": card.memory_total,
                            }
                            for card in snapshot.gpus
                            if card.host == host.name
                        ]
                    }
                    for host in snapshot.hosts
                },
            }
        )
        self.record.event("attempt", attempt=0)
        for one in ranks:
            self.record.event("rank-up", rank=one.rank, pid=one.pid)
        with open(self.dir / layout.METRICS, "w") as file:
            for step, loss in snapshot.runs[-1].curve:
                line = {
                    "schema": 1,
                    "time": self._begun,
                    "step": step,
                    "loss": loss,
                    "tokens_per_s": 4e5,
                    "total_steps": 20000,
                }
                file.write(json.dumps(line) + "\n")
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._write, daemon=True)
        self._thread.start()

    def _now(self) -> Snapshot:
        return demo_snapshot(time.time(), self._begun, *self._size)

    def _write(self) -> None:
        while not self._ending.wait(2.0):
            self.record.write_history_point(moment_of(self._now()))

    def close(self) -> None:
        self._ending.set()
        self._thread.join()


def moment_of(snapshot: Snapshot) -> HistoryPoint:
    ranks = snapshot.runs[-1].ranks
    members = Members(
        tuple(one.rank for one in ranks),
        tuple((card.host, card.uuid) for card in snapshot.gpus),
        tuple(host.name for host in snapshot.hosts),
    )
    columns = [
        {name: tuple(getattr(one, name) for one in things) for name in names}
        for things, names in ((ranks, _RANK), (snapshot.gpus, _GPU), (snapshot.hosts, _HOST))
    ]
    return HistoryPoint(snapshot.time, 0, members, *columns)


def frame_ms(hosts: int, gpus: int, times: int = 50) -> float:
    """CPU of a frame; snapshots differ, as they do in life."""
    made = [demo_snapshot(2000.0 + 2 * n, 1000.0, hosts, gpus) for n in range(5)]
    view = View()
    begun = time.process_time()
    for n in range(times):
        view = replace(make_frame(made[n % 5], view, WIDTH, HEIGHT).view)
    return (time.process_time() - begun) / times * 1000.0


def viewer(root: Path, seconds: float) -> tuple[float, float, float]:
    """(CPU of a core, MB resident, bytes a second to the terminal)"""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", HEIGHT, WIDTH, 0, 0))
    written, first = [0], bytearray()

    def drain() -> None:
        try:
            while data := os.read(master, 1 << 16):
                written[0] += len(data)
                if len(first) < 1 << 20:
                    first.extend(data)
        except OSError:
            return  # the viewer has ended

    child = subprocess.Popen(
        [sys.executable, "-m", "stoker", "top", "--runs-dir", str(root)],
        stdin=slave, stdout=slave, stderr=slave, env={**os.environ, "TERM": "xterm-256color"}, start_new_session=True,
    )  # fmt: skip
    os.close(slave)
    threading.Thread(target=drain, daemon=True).start()
    try:
        time.sleep(WARM_S)
        begun, before, bytes_before = time.monotonic(), cpu_of(child.pid), written[0]
        time.sleep(seconds)
        took = time.monotonic() - begun
        used, sent = cpu_of(child.pid) - before, written[0] - bytes_before
        resident = int(Path(f"/proc/{child.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        os.write(master, b"q")
        child.wait(20)
    finally:
        if child.poll() is None:
            child.kill()
            child.wait()
        os.close(master)
    if b"RUN measured" not in first or b"running" not in first:
        raise RuntimeError(f"the viewer did not show the run: {bytes(first[-2000:])!r}")
    return used / took, resident / 1e6, sent / took


def page(root: Path, seconds: float) -> tuple[float, float, float, int]:
    """(CPU of a core, MB resident, bytes a second to the client, bytes of the first message)"""
    child = subprocess.Popen(
        [sys.executable, "-m", "stoker", "web", "--port", "0", "--runs-dir", str(root)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    try:
        address, _, token = child.stdout.readline().strip().partition("?token=")
        port = int(address.strip("/").rsplit(":", 1)[1])
        given = _ask(port, f"/?token={token}", "")[0]
        cookie, base = given.partition(";")[0], given.partition("Path=")[2].partition(";")[0]
        stream = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        stream.request("GET", f"{base}events?run=measured", headers={"Cookie": cookie})
        answer = stream.getresponse()
        first = received = 0
        since, begun, before = 0.0, 0.0, 0.0
        started = time.monotonic()
        while not begun or time.monotonic() < begun + seconds:
            line = answer.readline()
            if not line.startswith(b"data: "):
                continue
            received += len(line)
            first = first or len(line)
            ranks = _ask(port, f"{base}api/ranks?run=measured&since={since}", cookie)[1]
            since = (json.loads(ranks)["times"] or [since])[-1]
            curve = _ask(port, f"{base}api/curves?run=measured&names=loss&since=400", cookie)[1]
            received += len(ranks) + len(curve)
            if not begun and time.monotonic() > started + WARM_S:
                begun, before, received = time.monotonic(), cpu_of(child.pid), 0
        took = time.monotonic() - begun
        used = cpu_of(child.pid) - before
        resident = int(Path(f"/proc/{child.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return used / took, resident / 1e6, received / took, first
    finally:
        child.terminate()
        child.wait(20)


def _ask(port: int, path: str, cookie: str) -> tuple[str, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("GET", path, headers={"Cookie": cookie} if cookie else {})
        answer = connection.getresponse()
        return answer.headers.get("Set-Cookie") or "", answer.read()
    finally:
        connection.close()


def cpu_of(pid: int) -> float:
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / TICKS


def measure(size: str, seconds: float) -> Cost:
    hosts, gpus, most = SIZES[size]
    with tempfile.TemporaryDirectory() as folder:
        recording = Recording(Path(folder), hosts, gpus)
        try:
            cpu, mb, sent = viewer(Path(folder), seconds)
        finally:
            recording.close()
    return Cost(size, frame_ms(hosts, gpus), cpu, most, mb, sent)


def measure_page(size: str, seconds: float) -> bool:
    hosts, gpus, _ = SIZES[size]
    with tempfile.TemporaryDirectory() as folder:
        recording = Recording(Path(folder), hosts, gpus)
        try:
            cpu, mb, sent, first = page(Path(folder), seconds)
        finally:
            recording.close()
    share = f"{cpu:.2%} (of {PAGE_CPU:.0%})"
    print(f"{size:<32}{share:>22}{mb:>7.0f} MB{sent / 1e3:>9.1f} kB/s{first / 1e3:>9.1f} kB at first")
    return cpu <= PAGE_CPU and mb <= MOST_MB and sent <= PAGE_BYTES


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--only", choices=("top", "web"))
    told = parser.parse_args()
    fits = True
    if told.only != "web":
        print(f"{'stoker top':<32}{'frame':>10}{'CPU of a core':>22}{'memory':>10}{'terminal':>14}")
        for cost in [measure(size, told.seconds) for size in SIZES]:
            cpu = f"{cost.cpu:.2%} (of {cost.most_cpu:.0%})"
            print(
                f"{cost.size:<32}{cost.frame_ms:>7.1f} ms{cpu:>22}{cost.mb:>7.0f} MB{cost.bytes_per_s / 1e3:>9.1f} kB/s"
            )
            fits = fits and cost.fits
    if told.only != "top":
        print(f"{'stoker web':<32}{'CPU of a core':>22}{'memory':>10}{'to the page':>14}")
        fits = all([measure_page(size, told.seconds) for size in SIZES]) and fits
    return 0 if fits else 1


if __name__ == "__main__":
    sys.exit(main())
