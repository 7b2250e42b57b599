"""`stoker metrics` and --metrics-port: what is exported, the server, and what Prometheus's own tools say of it."""

from __future__ import annotations

import http.client
import json
import math
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import yaml

pytest.importorskip("prometheus_client", reason="no prometheus-client")

from prometheus_client.parser import text_string_to_metric_families

from conftest import Stoker, at_length, gpu_json, machine_json, wait_for
from netcluster import NetCluster
from stoker.contract.evidence import Verdict
from stoker.control.machine.model import GpuGauges, HostGauges
from stoker.control.show import http_server
from stoker.control.show.metrics import metric_docs, metric_table, metrics_exporter
from stoker.control.show.metrics.metrics_exporter import MetricsCollector
from stoker.control.show.metrics.metrics_page import CONTENT_TYPE, ENDED_S, CollectionStatus, DoctorFindings, render
from stoker.control.show.snapshot import OFFLINE, RankView, RunView, ServerLoad, SlowRank, Snapshot, Suspicion

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
NOW = 1_800_000_000.0
UNITS = ("none", "short", "percentunit", "bytes", "Bps", "s", "celsius", "watt", "hertz")  # Grafana's ids
DONE = CollectionStatus(True, NOW, 0.01)

promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool (Debian's package prometheus)")

Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


def series(page: bytes) -> Series:
    found: Series = {}
    for family in text_string_to_metric_families(page.decode()):
        for sample in family.samples:
            # To prometheus-client a counter ends in _total; DCGM's end in _TOTAL, or do not.
            name = sample.name if sample.name in metric_table.ALL else sample.name.removesuffix("_total")
            key = name, frozenset(sample.labels.items())
            assert key not in found, f"twice: {key}"
            found[key] = sample.value
    return found


def value(page: bytes, name: str, **labels: str) -> float | None:
    matching = [
        number for (one, told), number in series(page).items() if one == name and labels.items() <= dict(told).items()
    ]
    assert len(matching) <= 1, f"{name} {labels}: {matching}"
    return matching[0] if matching else None


def a_run(**more: Any) -> RunView:
    told: dict[str, Any] = {
        "id": "r1", "name": "exp", "dir": "/runs/r1", "user": "me", "mine": True, "state": "running", "started": NOW - 100, "updated": NOW,
    }  # fmt: skip
    return RunView(**{**told, **more})


def everything() -> Snapshot:
    """With a value for every metric."""
    ranks = tuple(
        RankView(
            rank,
            "train",
            rank,
            f"GPU{rank}",
            "box",
            f"GPU-{rank}",
            state="running",
            step=41,
            step_s=0.5,
            waiting=0.25,
            phase="eval",
            collective_age=1.5,
            beat_age=2.0,
            memory=10**9,
            loss=2.5,
        )
        for rank in (0, 1)
    )
    running = a_run(
        world=2,
        attempts=2,
        restarts={"gpu.oom": 1},
        step=41,
        total_steps=100,
        loss=2.5,
        tokens_per_s=1000.0,
        mfu=0.4,
        grad_norm="inf",
        lr=1e-4,
        eta_s=30.0,
        metrics={"loss": 2.5, "tokens": 41000, "val_loss": "nan", "seconds_per_step": 0.5},
        suspicion=Suspicion(NOW - 5, "suspicion", "hang.lock", "no progress"),
        ranks=ranks,
        servers=(ServerLoad("server", 2, 1204, 350_112, 90_000, 3, 1, 7, 12.5, 3500.0),),
        slow=(SlowRank(1, "GPU1", "box", "GPU-1", "slow.throttle", "hot", 0.9, 2.0, NOW, "rank 1 is slow"),),
    )
    ended = a_run(id="r2", state="failed", verdict=Verdict("failed", "rank.exception", "boom", 3, run="r2"))
    host = HostGauges(
        "box",
        NOW,
        cores=8,
        load=(1.0, 2.0, 3.0),
        cpu=0.5,
        memory_total=10**11,
        memory_available=10**10,
        swap_used=0,
        disk_path="runs",
        disk_free=10**9,
        disk_total=10**12,
        disk_read=1.0,
        disk_written=2.0,
        received=3.0,
        sent=4.0,
        link=1.25e9,
        pressure_cpu=0.1,
        pressure_io=0.2,
        pressure_memory=0.3,
        driver="580.65",
    )
    card = GpuGauges(
        index=0,
        uuid="GPU-0",
        name="NVIDIA A40",
        pci="00000000:01:00.0",
        host="box",
        utilization=0.34,
        memory_used=3 << 30,
        memory_total=48 << 30,
        temperature=81,
        temperature_slowdown=95,
        power=250.5,
        power_limit=300.0,
        clock=1.41e9,
        clock_max=1.74e9,
        memory_clock=7.2e9,
        throttle=("hardware thermal slowdown",),
        pcie_width=8,
        pcie_width_max=16,
        ecc_corrected=4,
        ecc_uncorrected=1,
        energy=123456.0,
        xids=((0.0, 13), (NOW - 60, 79)),
        processes=(),
    )
    gone = HostGauges("away", NOW, OFFLINE, "no word", cores=64)
    return Snapshot(NOW, (host, gone), (card,), (running, ended), "runs", others=2)


def test_every_metric_is_exported_and_documented() -> None:
    examined = DoctorFindings("box", NOW, {("host.shm", "fail"): 1})
    pages = [render(everything(), DONE, examined, dialect) for dialect in ("classic", "4.9")]
    exported = {name for page in pages for name, _ in series(page)}
    assert exported == set(metric_table.ALL)
    assert (ROOT / "docs" / "metrics.md").read_text() == metric_docs.page(), (
        "run: python -m stoker.control.show.metrics.metric_docs > docs/metrics.md"
    )
    labels = {label for row in metric_table.ALL.values() for label in row.labels}
    assert not labels & {"step", "pid", "loss", "time"}


def test_values_and_units() -> None:
    page = render(everything(), DONE, None, "classic")
    assert value(page, "stoker_training_loss", run="r1") == 2.5
    assert value(page, "stoker_training_gradient_norm", run="r1") == math.inf
    assert math.isnan(value(page, "stoker_training_metric", run="r1", metric="val_loss") or 0.0)
    assert value(page, "stoker_training_tokens_total", run="r1") == 41000
    assert value(page, "stoker_run_restarts_total", run="r1", cause="gpu.oom") == 1
    assert value(page, "stoker_run_state", run="r2", state="failed") == 1
    assert value(page, "stoker_run_verdict_info", run="r2", cause="rank.exception") == 1
    assert value(page, "stoker_rank_slow_wait_seconds", run="r1", rank="1", cause="slow.throttle") == 0.9
    assert value(page, "stoker_gpu_clock_hertz", gpu="0") == 1.41e9
    assert value(page, "stoker_gpu_throttled", reason="hardware thermal slowdown") == 1
    assert value(page, "stoker_gpu_throttled", reason="power cap") == 0
    assert value(page, "stoker_gpu_xid_timestamp_seconds", xid="79") == NOW - 60
    assert value(page, "stoker_gpu_last_xid") == 79
    assert value(page, "DCGM_FI_DEV_GPU_UTIL", Hostname="box", UUID="GPU-0") == 34
    assert value(page, "DCGM_FI_DEV_FB_USED") == 3072 and value(page, "DCGM_FI_DEV_FB_FREE") == 45 * 1024
    assert (
        value(page, "DCGM_FI_DEV_SM_CLOCK") == 1410 and value(page, "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION") == 123456e3
    )
    assert value(page, "gpu_memory_used_mb", node="box") == 3072 and value(page, "gpu_utilization_percent") == 34
    assert value(page, "training_loss", rank="0") == 2.5
    assert value(page, "stoker_host_up", host="away") == 0 and value(page, "stoker_host_cpu_cores", host="away") is None
    new = render(everything(), DONE, None, "4.9")
    assert value(new, "DCGM_FI_DEV_GPU_UTIL_RATIO", hostname="box") == 0.34
    assert value(new, "DCGM_FI_DEV_FB_CAPACITY_BYTES") == 48 << 30
    assert b"DCGM" not in render(everything(), DONE, None, "off")


def test_a_run_that_ended_long_ago_has_no_series() -> None:
    old = a_run(state="completed", updated=NOW - ENDED_S - 1)
    page = render(Snapshot(NOW, runs=(old, a_run(id="bad", state="damaged", problem="torn"))), DONE)
    assert not [name for name, _ in series(page) if name.startswith(("stoker_training_", "stoker_rank_"))]
    assert value(page, "stoker_runs", state="completed") == 1 and value(page, "stoker_runs", state="damaged") == 1
    assert value(page, "stoker_run_info", run="r1") is None and value(page, "stoker_run_info", run="bad") is None


HOSTILE = 'x"} 1\nstoker_training_loss{run="y\\\udc80\x1b[31m'


def test_whatever_a_run_writes_the_page_stays_a_page() -> None:
    """Names that would end a label, numbers that are none, the same rank twice."""
    rank = RankView(0, HOSTILE, 0, HOSTILE, HOSTILE, HOSTILE, state="running", phase=HOSTILE)
    run = a_run(
        id=HOSTILE,
        name=HOSTILE,
        restarts={HOSTILE: 1},
        loss="-inf",
        metrics={HOSTILE: 10**400, "tokens": "nan", **{f"m{number}": number for number in range(1000)}},
        ranks=(rank, rank),
    )
    cards = tuple(GpuGauges(index=0, uuid="", error="lost") for _ in range(2))
    page = render(Snapshot(NOW, (HostGauges(HOSTILE), HostGauges(HOSTILE)), cards, (run, run)), DONE)
    found = series(page)
    assert [number for (name, _), number in found.items() if name in ("stoker_training_loss", "stoker_gpu_up")] == [
        -math.inf,
        0,
    ]


def test_a_collection_that_fails_leaves_the_old_values_and_says_so() -> None:
    snapshots: list[Any] = [
        everything(),
        RuntimeError("the driver is gone"),
        RuntimeError("the driver is gone"),
        everything(),
    ]
    told: list[str] = []

    def gather() -> Snapshot:
        one = snapshots.pop(0)
        if isinstance(one, Exception):
            raise one
        return one

    collector = MetricsCollector(gather, lambda: DoctorFindings("box", NOW, {}), "classic", told.append)
    pages = []
    for _ in range(4):
        collector.collect()
        assert collector.page is not None
        pages.append(collector.page)
    assert [value(page, "stoker_last_collect_success") for page in pages] == [1, 0, 0, 1]
    assert {value(page, "stoker_last_collect_timestamp_seconds") for page in pages} == {NOW}
    assert value(pages[1], "stoker_training_loss", run="r1") == 2.5
    assert len(told) == 1 and "the driver is gone" in told[0]


# ---- what Prometheus's own tools say ----


def tool(*words: str, text: bytes = b"") -> str:
    done = subprocess.run(["promtool", *words], input=text, capture_output=True, check=False)
    said = (done.stdout + done.stderr).decode()
    assert done.returncode == 0, said
    return said


@promtool
def test_promtool_accepts_the_metrics() -> None:
    examined = DoctorFindings("box", NOW, {("host.shm", "fail"): 1})
    page = render(everything(), DONE, examined, "off").decode()
    # The field note's abbreviated unit is the note's.
    kept = [line for line in page.splitlines() if "gpu_memory_used_mb" not in line]
    tool("check", "metrics", text=("\n".join(kept) + "\n").encode())


@promtool
def test_each_alert_fires_from_its_fault() -> None:
    tool("check", "config", str(DEPLOY / "prometheus.yml"))
    tool("check", "rules", str(DEPLOY / "alerts.yml"))
    tool("test", "rules", str(DEPLOY / "alerts_test.yml"))


def check_dashboard(board: dict[str, Any]) -> None:
    """What Grafana's schema asks of one with version 39, as far as this one uses it."""
    assert board["schemaVersion"] == 39 and re.fullmatch(r"[\w-]{1,40}", board["uid"]) and board["title"]
    variables = {one["name"] for one in board["templating"]["list"]}
    own = {"type": "prometheus", "uid": "${datasource}"}
    panels = board["panels"]
    assert "datasource" in variables and len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place, targets = panel["gridPos"], panel["targets"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert place["x"] + place["w"] <= 24 and not cells & taken, panel["title"]
        taken |= cells
        assert panel["type"] in ("stat", "timeseries", "table") and panel["title"] and panel["datasource"] == own
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS and panel["fieldConfig"]["overrides"] == []
        assert targets and len({target["refId"] for target in targets}) == len(targets)
        for target in targets:
            assert target["expr"] and target["datasource"] == own
            assert set(re.findall(r"\$(\w+)", target["expr"])) <= variables
            assert (panel["type"] == "table") == (target.get("format") == "table" and target.get("instant") is True)


def test_alerts_and_dashboards_name_what_is_exported() -> None:
    rules, tests = ((DEPLOY / name).read_text() for name in ("alerts.yml", "alerts_test.yml"))
    alerts = set(re.findall(r"alert: (\w+)", rules))
    assert alerts == {word for word in re.findall(r'alertname="(\w+)"', tests)}
    boards = {path: path.read_text() for path in (DEPLOY / "grafana").glob("*.json")}
    assert len(boards) == 2
    for text in (rules, tests, *boards.values()):
        assert {word for word in re.findall(r"\bstoker_\w+", text)} <= set(metric_table.ALL)
    for text in boards.values():
        check_dashboard(json.loads(text))
    assert len({json.loads(text)["uid"] for text in boards.values()}) == 2
    for group in yaml.safe_load(rules)["groups"]:
        for rule in group["rules"]:
            assert re.search(r"\bLook\b|\blook\b|\bDo:", rule["annotations"]["description"]), rule["alert"]


# ---- the server ----


@contextmanager
def served(page: bytes | None = b"stoker_up 1\n") -> Iterator[int]:
    listening = http_server.listen("127.0.0.1", 0)
    port = listening.getsockname()[1]
    over = threading.Event()
    made = metrics_exporter.MetricsServer(listening, lambda: page, CONTENT_TYPE)
    thread = threading.Thread(target=made.serve, args=(over.is_set, 0.05))
    thread.start()
    try:
        yield port
    finally:
        over.set()
        thread.join(100)
        assert not thread.is_alive()


def get(port: int, path: str = "/metrics", **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def raw(port: int, request: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
        try:
            client.sendall(request)
            client.shutdown(socket.SHUT_WR)
            answer = b""
            while data := client.recv(65536):
                answer += data
            return answer
        except OSError:
            return b""  # it hung up within our request


def test_only_two_pages_by_get() -> None:
    with served() as port:
        assert get(port) == (200, b"stoker_up 1\n") and get(port, "/metrics?x=1")[0] == 200
        assert get(port, "/")[0] == 200
        for path in ("/metrics/", "/../etc/passwd", "//metrics", "/%6detrics", "/favicon.ico"):
            assert get(port, path)[0] == 404, path
        assert get(port, Host="localhost:1234")[0] == 200 and get(port, Host="evil.example:9911")[0] == 403
        for method in (b"POST", b"HEAD", b"PUT", b"OPTIONS", b"get"):
            answer = raw(port, method + b" /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 405 ") and b"Allow: GET" in answer
    with served(None) as port:
        assert get(port)[0] == 503


def malformed(seed: int) -> bytes:
    chance = random.Random(seed)
    kinds = [
        lambda: chance.randbytes(chance.randrange(1, 300)),
        lambda: b"GET /metrics\r\n\r\n",
        lambda: b"GET /metrics HTTP/9\r\n\r\n",
        lambda: b"GET " + b"/" * 20000 + b" HTTP/1.1\r\n\r\n",
        lambda: b"GET /metrics HTTP/1.1\r\nHost\r\n\r\n",
        lambda: b"GET /metrics HTTP/1.1\r\n: x\r\n\r\n",
        lambda: b"GET /metrics HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        lambda: b"GET /met\0rics HTTP/1.1\r\n\r\n",
        lambda: b"GET /metrics HTTP/1.1\r\nX: " + chance.randbytes(200).replace(b"\n", b"") + b"\x00\r\n\r\n",
        lambda: b"GET /metrics HTTP/1.1\r\n" + b"A: b\r\n" * 3000,
        lambda: b"\r\n\r\n",
        lambda: b"GET http://127.0.0.1/metrics HTTP/1.1\r\n\r\n",
        lambda: b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
        lambda: b"",
    ]
    return chance.choice(kinds)()


def test_a_thousand_malformed_requests_leave_it_alive() -> None:
    with served() as port:
        for seed in range(1000):
            answer = raw(port, malformed(seed))
            assert not answer or re.match(rb"HTTP/1\.1 (200|400|403|404|431) ", answer), (malformed(seed), answer)
        assert get(port) == (200, b"stoker_up 1\n")


def test_clients_that_never_finish_keep_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "IDLE_S", 0.5)
    with served() as port:
        idle = [socket.create_connection(("127.0.0.1", port), timeout=30) for _ in range(http_server.MAX_CLIENTS + 10)]
        for client in idle:
            client.sendall(b"GET /metrics HTTP/1.1\r\n")
        assert get(port)[0] == 200
        for client in idle:
            client.close()


# ---- the command ----


@contextmanager
def exporter(stoker: Stoker, *words: str, **more: Any) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    child = stoker.start("metrics", "--port", "0", "--interval", "0.25", *words, **more)
    assert child.stdout is not None
    try:
        line = child.stdout.readline().decode()
        found = re.search(r"http://127\.0\.0\.1:(\d+)/metrics", line)
        assert found, line
        port = int(found[1])
        assert wait_for(lambda: get(port)[0] == 200 or None, 10)
        yield port, child
    finally:
        child.send_signal(signal.SIGTERM)
        assert child.wait(100) == 0, child.stdout.read()
        child.stdout.close()


def test_damaged_and_vanishing_runs(stoker: Stoker, box: Any) -> None:
    script = stoker.script("s.py", "import stoker\nstoker.beat(step=3, loss=float('nan'))")
    stoker("run", "--on-nan", "warn", "--name", "first", script)
    runs = stoker.cwd / "runs"
    for name, files in {
        "empty": {},
        "junk": {"run.json": b"not json"},
        "list": {"run.json": b"[1, 2]"},
        "deep": {"run.json": b"[" * 100_000},
        "binary": {"run.json": bytes(range(256)) * 10, "events.jsonl": b"\0" * 1000},
    }.items():
        (runs / name).mkdir()
        for file, data in files.items():
            (runs / name / file).write_bytes(data)
    torn = shutil.copytree(runs / "latest", runs / "torn", symlinks=False)
    (torn / "events.jsonl").write_bytes(b'{"event": "attempt", "attempt": {}}\n{"time": 1e400}\n{"event": "verdi')
    (torn / "metrics.jsonl").write_bytes(b'{"step": 1, "loss": NaN}\n{"step": "x"}\n\xff\xfe\n{"loss":')
    with exporter(stoker, env=box(8)) as (port, _):
        page = get(port)[1]
        assert value(page, "stoker_last_collect_success") == 1 and value(page, "stoker_host_gpus") == 8
        assert (value(page, "stoker_runs", state="damaged") or 0) >= 2
        shutil.rmtree(runs)
        assert wait_for(lambda: value(get(port)[1], "stoker_runs", state="damaged") == 0 or None, 10)
        assert value(get(port)[1], "stoker_last_collect_success") == 1


def test_a_port_in_use_names_its_holder(stoker: Stoker) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for words in (("metrics", "--port", port), ("run", "--metrics-port", port, stoker.script("s.py", ""))):
            done = stoker(*words)
            assert done.code == 69 and done.err.count("\n") == 1, done.err
            assert f"port {port} is in use by pid {os.getpid()} (" in done.err
    assert not list((stoker.cwd / "runs").glob("*-s"))
    for words in (
        ("metrics", "--port", "70000"),
        ("run", "--metrics-port", "-1", "s.py"),
        ("metrics", "--interval", "0.1s"),
    ):
        assert stoker(*words).code == 64


def test_once_prints_and_ends(stoker: Stoker, box: Any) -> None:
    cards = [gpu_json(0, utilization=50), gpu_json(1, error="GPU is lost")]
    done = stoker("metrics", "--once", "--dcgm", "4.9", env=box(cards))
    assert done.code == 0 and not done.err
    assert value(done.out_bytes, "stoker_gpu_utilization_ratio", gpu="0") == 0.5
    assert value(done.out_bytes, "stoker_gpu_up", gpu="1") == 0 and value(done.out_bytes, "stoker_host_gpus") == 1
    assert value(done.out_bytes, "stoker_doctor_findings", check="gpu.driver", level="fail") is not None
    broken = stoker("metrics", "--once", env={"STOKER_MACHINE": "nowhere.json"})
    assert (
        broken.code == 0 and value(broken.out_bytes, "stoker_doctor_findings", check="gpu.held", level="unknown") == 1
    )


LONG = "import stoker, time\nfor step in range(1000):\n    stoker.beat(step=step, loss=1.5)\n    time.sleep(0.05)"


def test_a_run_serves_its_metrics_while_it_runs(stoker: Stoker, box: Any) -> None:
    run = stoker.start(
        "run", "--metrics-port", "0", "--name", "exp", "--nproc-per-node", "2", stoker.script("l.py", LONG), env=box(2)
    )
    assert run.stdout is not None
    lines = iter(run.stdout.readline, b"")
    port = next(int(found[1]) for line in lines if (found := re.search(rb"metrics at http://127.0.0.1:(\d+)/", line)))
    drain = threading.Thread(target=run.stdout.read)
    drain.start()

    def steps() -> float | None:
        return value(get(port)[1], "stoker_rank_step", rank="1") if get(port)[0] == 200 else None

    try:
        assert wait_for(steps, 30)
        page = get(port)[1]
        assert value(page, "training_loss", rank="0") == 1.5 and value(page, "stoker_rank_up", rank="1") == 1
        assert value(page, "stoker_runs", state="running") == 1
    finally:
        run.send_signal(signal.SIGKILL)  # even so: nothing is left running
        run.wait()
    assert wait_for(lambda: _refused(port) or None, 10)
    drain.join()
    run.stdout.close()


def _refused(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except ConnectionRefusedError:
        return True
    return False


def test_the_exporter_ends_with_its_run(stoker: Stoker) -> None:
    done = stoker("run", "--metrics-port", "0", stoker.script("s.py", "print('ok')"))
    found = re.search(r"metrics at http://127\.0\.0\.1:(\d+)/", done.err)
    assert done.code == 0 and found and _refused(int(found[1])), done.err
    assert "exporter of --metrics-port" not in done.err


def test_a_launcher_that_is_not_asked_loads_nothing_of_it(stoker: Stoker) -> None:
    """Its start and its memory are those of before."""
    look = (
        "import sys\nfrom stoker.cli.main import main\nmain(['run', 's.py'])\nprint([one for one in sys.modules if"
        " one.startswith(('prometheus_client', 'stoker.control.show', 'http', 'urllib.request', 'email'))"
        " or one.endswith(('launch.notify', 'launch.exporter'))])"
    )
    stoker.script("s.py", "")
    done = subprocess.run(
        [sys.executable, "-c", look],
        cwd=stoker.cwd,
        env=stoker.environment(),
        capture_output=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.decode().strip().endswith("[]"), done.stdout


needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="no prometheus (Debian's package prometheus)"
)


@contextmanager
def prometheus(folder: Path, port: int) -> Iterator[Callable[..., list[Any] | None]]:
    """A real one that scrapes this port. Gives a function that asks it; None: no data (yet)."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        own = free.getsockname()[1]
    config = (DEPLOY / "prometheus.yml").read_text().replace("127.0.0.1:9911", f"127.0.0.1:{port}")
    config = config.replace("scrape_interval: 5s", "scrape_interval: 1s")
    (folder / "prometheus.yml").write_text(config.replace("alerts.yml", str(DEPLOY / "alerts.yml")))
    flags = ("--config.file=prometheus.yml", "--storage.tsdb.path=data", f"--web.listen-address=127.0.0.1:{own}")
    with (folder / "prometheus.log").open("wb") as log:
        child = subprocess.Popen(["prometheus", *flags], cwd=folder, stdout=log, stderr=log)

    def ask(query: str, path: str = "query", **more: Any) -> list[Any] | None:
        words = "".join(f"&{name}={quote(str(text))}" for name, text in more.items())
        try:
            status, text = get(own, f"/api/v1/{path}?query={quote(query)}{words}")
        except OSError:
            return None
        assert status != 400, text  # it does not parse
        data = json.loads(text)["data"] if status == 200 else []
        return (data["result"] if isinstance(data, dict) else data) or None

    try:
        assert wait_for(lambda: ask('up{job="stoker"} == 1'), 60), (folder / "prometheus.log").read_text()[-2000:]
        yield ask
    finally:
        child.terminate()
        child.wait(100)


@needs_prometheus
def test_a_real_prometheus_scrapes_it(stoker: Stoker, box: Any) -> None:
    with (
        exporter(stoker, env=box([gpu_json(0, utilization=70), gpu_json(1)])) as (port, _),
        prometheus(stoker.cwd, port) as ask,
    ):
        found = ask('stoker_gpu_utilization_ratio{gpu="0"}')
        assert found and found[0]["value"][1] == "0.7" and found[0]["metric"]["host"] == "box"
        assert ask("count(DCGM_FI_DEV_GPU_UTIL)")


@needs_prometheus
@at_length
def test_every_panel_of_the_dashboards_has_data(tmp_path: Path) -> None:
    """As Grafana asks: variables replaced by all their values, panels over time by range, tables at one time."""
    examined = DoctorFindings("box", NOW, {("host.shm", "fail"): 1})
    with served(render(everything(), DONE, examined, "classic")) as port, prometheus(tmp_path, port) as ask:
        assert wait_for(lambda: ask("increase(stoker_gpu_ecc_errors_total[1h])"), 30)
        for path in (DEPLOY / "grafana").glob("*.json"):
            board = json.loads(path.read_text())
            values = {}
            for one in board["templating"]["list"]:
                if one["type"] == "query":
                    name, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", one["definition"]).groups()  # type: ignore[union-attr]
                    assert one["query"]["query"] == one["definition"]
                    known = ask("", f"label/{label}/values", **{"match[]": name})
                    assert known, one
                    values[one["name"]] = f"({'|'.join(known)})"
            for panel in board["panels"]:
                for target in panel["targets"]:
                    query = target["expr"]
                    for name, text in values.items():
                        query = query.replace(f"${name}", text)
                    if target.get("instant"):
                        found = ask(query)
                    else:
                        now = time.time()
                        found = ask(query, "query_range", start=now - 60, end=now, step=1)
                    assert found, f"{path.name}, {panel['title']}: {query}"
                    named = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
                    assert named <= found[0]["metric"].keys(), (panel["title"], found[0]["metric"])


@at_length
def test_several_hosts_from_one_endpoint(stoker: Stoker, netcluster: NetCluster) -> None:
    for number in range(3):
        path = stoker.cwd / f"host{number}.json"
        path.write_text(json.dumps(machine_json([gpu_json(0, utilization=10 * number), gpu_json(1)])))
        netcluster.set_env(number, STOKER_MACHINE=str(path))
    names_ = [host.name for host in netcluster.hosts]
    with exporter(stoker, "--hosts", str(netcluster.file())) as (port, _):

        def ups() -> list[float | None]:
            return [value(get(port)[1], "stoker_host_up", host=name) for name in names_]

        assert wait_for(lambda: ups() == [1, 1, 1] or None, 20), ups()
        page = get(port)[1]
        used = [value(page, "stoker_gpu_utilization_ratio", host=name, gpu="0") for name in names_]
        assert used == [0, 0.1, 0.2] and value(page, "stoker_host_gpus", host=names_[2]) == 2
        netcluster.cut(1)
        assert wait_for(lambda: ups() == [1, 0, 1] or None, 20), ups()
        assert value(get(port)[1], "stoker_gpu_utilization_ratio", host=names_[1], gpu="0") is None
        netcluster.heal(1)
        assert wait_for(lambda: ups() == [1, 1, 1] or None, 30), ups()


@promtool
def test_an_alerts_commands_have_no_word_of_another_users_run_that_a_shell_reads(tmp_path: Path) -> None:
    program = shutil.which("promtool")
    assert program is not None
    rules = ROOT / "deploy" / "alerts.yml"
    series = """stoker_run_suspicion_info{run="a; touch trapped $(id)", kind="suspicion", cause="x"}"""
    asked = {"eval_time": "10m", "alertname": "StokerRunHangs", "exp_alerts": []}
    case = {"interval": "1m", "input_series": [{"series": series, "values": "1x20"}], "alert_rule_test": [asked]}
    told = {"rule_files": [str(rules)], "evaluation_interval": "1m", "tests": [case]}
    (tmp_path / "case.yml").write_text(json.dumps(told))
    words = [program, "test", "rules", str(tmp_path / "case.yml")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert "`stoker why a??touch?trapped???id?`" in done.stdout + done.stderr, "promtool prints what it did not expect"
    for command in re.findall(r"`stoker [^`]*`", rules.read_text()):
        assert "{{ $labels.run }}" not in command
