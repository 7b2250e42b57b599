"""`stoker web`: who may ask, what is answered, and the page itself in a real browser."""

from __future__ import annotations

import http.client
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import pytest

from browser import Browser, browsing
from conftest import EVERYTHING, Stoker, at_length, gpu_json, machine_json, wait_for
from localuser import ATTACKER, needs_root
from netcluster import NetCluster
from stoker.control.record import run_record
from stoker.control.record.history import HistoryPoint, Members
from stoker.control.show.http_server import HttpRequest, parse_request
from stoker.control.show.top.sources import demo_snapshot
from stoker.control.show.web.page_data import diff_states, make_rank_rows, make_shared_state
from stoker.control.show.web.rank_timeline import RankTimeline, choose_letters

BEATS = "import stoker, sys\nfor step in range(int(sys.argv[1])):\n    stoker.beat(step)\nprint(open('said.txt').read() if len(sys.argv) > 2 else 'done')\n"  # fmt: skip
FOREIGN = (
    "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">\x1b[31mred\x1b]0;title\x07"
)


class Page:
    """The server, and one who has its cookie."""

    def __init__(self, address: str, token: str, child: subprocess.Popen[bytes]) -> None:
        self.address, self.token, self.child = address, token, child
        self.run = ""  # the id of a run that the page shows
        self.port = int(address.rsplit(":", 1)[1].strip("/"))
        status, headers, _ = self.get(f"/?token={token}", cookie="")
        assert status == 303
        self.cookie = headers["Set-Cookie"].partition(";")[0]
        self.base = headers["Location"].partition("#")[0]

    @property
    def home(self) -> str:
        return self.address[:-1] + self.base

    @property
    def printed(self) -> str:
        return f"{self.address}?token={self.token}"

    def get(self, path: str, cookie: str | None = None, method: str = "GET", body: bytes = b"", **headers: str) -> tuple[int, Any, bytes]:  # fmt: skip
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        sent = {"Cookie": self.cookie if cookie is None else cookie, **{name.replace("_", "-"): value for name, value in headers.items()}}  # fmt: skip
        try:
            below = path if path.startswith("/?token") else self.base[:-1] + path
            connection.request(method, below, body, {name: value for name, value in sent.items() if value})
            answer = connection.getresponse()
            return answer.status, answer.headers, answer.read()
        finally:
            connection.close()

    def ask(self, what: str, **query: Any) -> Any:
        status, _, body = self.get(f"/api/{what}?{urlencode(query)}")
        assert status == 200, (status, body)
        return json.loads(body)


@contextmanager
def web(stoker: Stoker, *words: str, **more: Any) -> Iterator[Page]:
    child = stoker.start("web", "--port", "0", "--interval", "0.5", *words, **more)
    assert child.stdout is not None
    try:
        line = child.stdout.readline().decode()
        found = re.fullmatch(r"(http://127\.0\.0\.1:\d+/)\?token=([\w-]{40,})\n", line)
        assert found, line + child.stdout.read().decode()
        assert b"ssh -N -L" in child.stdout.readline()
        yield Page(found[1], found[2], child)
    finally:
        child.send_signal(signal.SIGTERM)
        assert child.wait(100) == 0
        left = child.stdout.read().decode()
        child.stdout.close()
        assert "failed" not in left, left


def finished(stoker: Stoker, name: str, *words: str) -> Path:
    script = stoker.script("train.py", BEATS)
    assert stoker("run", "--nproc-per-node", "2", "--name", name, script, "3", *words).code == 0
    return stoker.latest


def losses(run_dir: Path, count: int, first: float = 9.0, **more: Any) -> None:
    with open(run_dir / "metrics.jsonl", "w") as file:
        for step in range(count):
            loss: Any = first / (1 + step / 50)
            line = {"schema": 1, "time": 1e9 + step, "step": step, "loss": loss, "lr": 1e-3, **more}
            file.write(json.dumps(line) + "\n")


# ---- pure ----


def test_a_request_is_taken_whole_or_refused() -> None:
    head = b"POST /a/%2e%2e?x=%41&y= HTTP/1.1\r\nHost: Localhost:80\r\nContent-Length: 2\r\n\r\n"
    assert parse_request(head) is None and parse_request(head + b"o") is None
    made = parse_request(head + b"ok more")
    assert isinstance(made, HttpRequest) and (made.method, made.path, made.body, made.host) == ("POST", "/a/%2e%2e", b"ok", "localhost")  # fmt: skip
    assert made.query == {"x": "A", "y": ""}
    for bad, status in (
        (b"GET / HTTP/1.1\r\nContent-Length: -1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nContent-Length: 5000\r\n\r\n", 413),
        (b"GET / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (b"GET /?a=%ff HTTP/1.1\r\n\r\n", 400),
        (b"x" * 9000, 431),
    ):
        assert parse_request(bad) == status, bad[:60]


def test_only_what_changed_travels() -> None:
    """16 hosts of 8 GPUs, 128 ranks, every two seconds."""
    before, now = (demo_snapshot(5000.0 + at, 1000.0, 16, 8) for at in (0.0, 2.0))
    states = [{**make_shared_state(one), "ranks": make_rank_rows(one.runs[-1])} for one in (before, now)]
    changed, gone = diff_states(states[0], states[1])
    sent = len(json.dumps(changed, separators=(",", ":")))
    assert not gone and changed["ranks"]["3"].keys() <= {"step", "step_s", "waiting", "phase", "beat_age", "memory"}
    assert sent / 2 < 50_000, f"{sent / 2:.0f} bytes a second"
    rebuilt = {part: {key: {**row} for key, row in rows.items()} for part, rows in states[0].items()}
    for part, rows in changed.items():
        for key, row in rows.items():
            rebuilt[part].setdefault(key, {}).update(row)
    assert rebuilt == states[1]
    del states[1]["gpus"][next(iter(states[1]["gpus"]))]
    assert diff_states(states[0], states[1])[1].keys() == {"gpus"}
    print(f"{sent} bytes of {len(json.dumps(states[1]))}")


def test_a_letter_for_each_moment_of_a_rank() -> None:
    columns: dict[str, tuple[Any, ...]] = {
        "waiting": (0.0, 0.52, 1.0, None, None, None, 0.9),
        "collective_age": (None, None, None, None, 30.0, None, None),
        "beat_age": (0.1, 0.1, 0.1, 60.0, 60.0, 60.0, 0.1),
        "phase": ("", "step", "", "", "", "eval", None),
        "step": (1, 1, 1, 1, 1, 1, None),
    }
    moment = HistoryPoint(1.0, 0, Members(tuple(range(7))), columns, {}, {})
    assert "".join(choose_letters(moment)) == "AFKswpJ"


# ---- who may ask ----


@pytest.fixture(scope="module")
def shared_page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Page, Path]]:
    """A server for the tests that only ask: three runs, one of them with foreign texts everywhere."""
    folder = tmp_path_factory.mktemp("web")
    (folder / "machine.json").write_text(json.dumps(machine_json(2)))
    env = {key: value for key, value in os.environ.items() if not key.startswith("STOKER_")}
    env |= {"STOKER_MACHINE": str(folder / "machine.json"), "STOKER_GPU_LOCKS": str(folder / "locks")}
    stoker = Stoker(folder, env)
    losses(finished(stoker, "exp1"), 400)
    second = finished(stoker, "exp2")
    losses(second, 300, 12.0, grad_norm=1.0)
    (second / "config.yaml").write_text("optim:\n  learning_rate: 0.5\n")
    third = finished(stoker, "foreign")
    said = FOREIGN + "\nneedle in the middle\n" + "hay\n" * 3000 + "Needle again ü"
    (third / "attempt-0" / "rank-0.log").write_text(said)
    losses(third, 3, **{"<b>bold</b>": 1.0})
    with open(third / "metrics.jsonl", "a") as file:
        file.write('{"step": 3, "loss": "nan"}\n{"step": 4, "loss": NaN}\nnot json\n{"step": 5, "lo')
    (third / "report.html").write_text(f"<h1>report</h1>{FOREIGN}")
    (third / "samples.jsonl").write_text(json.dumps({"prompt": FOREIGN, "answer": "42"}) + "\nhalf a li")
    (third / "notes.txt").write_text(FOREIGN)
    (third / "escape.txt").symlink_to("/etc/hostname")
    (third / "out").symlink_to("/etc")
    (third / "checkpoints" / "step-2").mkdir(parents=True)
    (third / "checkpoints" / "step-2" / "manifest.json").write_text('{"files": {}}')
    (folder / "runs" / "linked").symlink_to(third)
    (folder / "secret.txt").write_text("secret")
    with web(stoker) as page:
        yield page, folder


def run_id(folder: Path, name: str) -> str:
    return next(path.name for path in (folder / "runs").iterdir() if path.name.endswith(name) and not path.is_symlink())


def test_no_path_leads_out_of_a_run(shared_page: tuple[Page, Path]) -> None:
    page, folder = shared_page
    run = run_id(folder, "foreign")
    assert page.get(f"/file?run={run}&path=notes.txt")[2] == FOREIGN.encode()
    up = ("../../secret.txt", "..%2f..%2fsecret.txt", "%2e%2e/%2e%2e/secret.txt", "/etc/passwd", "//etc/passwd", "a/../../../secret.txt", "./notes.txt", "escape.txt", "out/hostname", "notes.txt%00", "%00", "", "attempt-0/../notes.txt", "x" * 3000)  # fmt: skip
    for path in up:
        assert page.get(f"/file?run={run}&path={path}")[0] == 404, path
        assert page.get(f"/api/rows?run={run}&path={path}")[0] == 404, path
    for name in (
        "..",
        ".",
        "",
        "linked",
        "latest",
        "%2e%2e",
        "..%2fsecret.txt",
        "secret.txt",
        f"../runs/{run}",
        "a%00b",
    ):
        for question in ("curves", "ranks", "log", "ending", "files", "settings"):
            status, _, body = page.get(f"/api/{question}?run={name}&names=loss")
            assert status == 404 and b"secret" not in body, (question, name, body)
        assert page.get(f"/file?run={name}&path=notes.txt")[0] == 404, name
    for path in ("/../secret.txt", "/%2e%2e/secret.txt", "/assets/main.js", "/style.css/..", "//main.js", "/pages.py"):
        assert page.get(path)[0] == 404, path
    assert page.ask("sparks", runs="..\nlinked\n../x") == {"..": [], "linked": [], "../x": []}


def test_what_a_run_wrote_is_closed_in(shared_page: tuple[Page, Path]) -> None:
    page, folder = shared_page
    run = run_id(folder, "foreign")
    for path, kind in (("report.html", "text/html"), ("notes.txt", "text/plain"), ("samples.jsonl", "text/plain")):
        status, headers, _ = page.get(f"/file?run={run}&path={path}")
        assert status == 200 and headers["Content-Type"].startswith(kind)
        assert headers["Content-Security-Policy"].startswith("sandbox; default-src 'none'")
    said = page.ask("log", run=run, rank=0)
    assert said["end"] == said["size"] and "\x1b" not in said["text"] and "\\x1b[31mred" in said["text"]
    assert "<script>" in said["text"], "text stays text"
    found = page.ask("log", run=run, rank=0, find="NEEDLE")
    assert [one["text"] for one in found["matches"]] == ["needle in the middle", "Needle again ü"]
    there = page.ask("log", run=run, rank=0, **{"from": found["matches"][0]["at"]})
    assert there["text"].startswith("needle in the middle\n")
    assert page.ask("rows", run=run, path="samples.jsonl")["rows"][0]["answer"] == "42"
    listed = page.ask("files", run=run)
    kinds = {one["path"]: one["kind"] for one in listed["files"]}
    assert kinds["report.html"] == "report" and kinds["samples.jsonl"] == "rows" and "escape.txt" not in kinds
    assert [one["name"] for one in listed["checkpoints"]] == ["step-2"] and listed["checkpoints"][0]["newest"]


def test_curves_are_thinned_zoomed_smoothed_and_continued(shared_page: tuple[Page, Path]) -> None:
    page, folder = shared_page
    run = run_id(folder, "exp1")
    whole = page.ask("curves", run=run, names="loss\nlr\nnone", most=100)
    assert whole["names"] == ["loss", "lr"] and whole["curves"]["loss"]["count"] == 400
    assert len(whole["curves"]["loss"]["steps"]) <= 134 and whole["curves"]["none"]["steps"] == []
    part = page.ask("curves", run=run, names="loss", first=100, last=110)["curves"]["loss"]
    assert part["steps"] == list(range(99, 112))
    rest = page.ask("curves", run=run, names="loss", since=398)["curves"]["loss"]
    assert rest["steps"] == [398, 399]
    smooth = page.ask("curves", run=run, names="loss", smooth=10, first=200, last=200)["curves"]["loss"]
    assert smooth["values"][1] == pytest.approx(sum(9 / (1 + step / 50) for step in range(191, 201)) / 10, rel=1e-4)
    odd = page.ask("curves", run=run_id(folder, "foreign"), names="loss")["curves"]["loss"]
    assert odd["values"][-2:] == ["nan", "nan"] and odd["bad"] == 2
    both = page.ask("compare", runs=f"{run}\n{run_id(folder, 'exp2')}")
    assert dict((key, values) for key, values in both["settings"])["optim.learning_rate"] == ["n/a", "0.5"]
    assert both["noise"]["beyond"] is True


def malformed(seed: int, base: bytes, cookie: str) -> bytes:
    """Bytes that are no request, and requests that are well formed and senseless."""
    chance = random.Random(seed)
    head = f"Host: 127.0.0.1\r\nCookie: {cookie}\r\n".encode()
    junk = bytes(chance.choice(b"%./\\?&=#\0\xff\n\r ;'\"<a0") for _ in range(chance.randrange(1, 80)))
    word = quote(junk).encode()
    path = chance.choice([b"/api/curves", b"/api/ranks", b"/api/log", b"/api/rows", b"/api/files", b"/file", b"/api/compare", b"/", b"/events/x"])  # fmt: skip
    path = chance.choice([base, base, b""]) + path
    kinds = [
        lambda: chance.randbytes(chance.randrange(1, 300)),
        lambda: b"GET " + junk + b" HTTP/1.1\r\n" + head + b"\r\n",
        lambda: (
            b"GET "
            + path
            + b"?run="
            + word
            + b"&path="
            + word
            + b"&names="
            + word
            + b"&from="
            + word
            + b" HTTP/1.1\r\n"
            + head
            + b"\r\n"
        ),
        lambda: b"GET " + path + b"?" + junk.replace(b" ", b"") + b" HTTP/1.1\r\n" + head + b"\r\n",
        lambda: b"GET " + path + b"?run=" + b"a" * 9000 + b" HTTP/1.1\r\n" + head + b"\r\n",
        lambda: b"POST " + base + b"/api/stop HTTP/1.1\r\n" + head + b"Content-Length: 9\r\n\r\n" + chance.randbytes(9),
        lambda: b"POST " + base + b"/api/stop HTTP/1.1\r\n" + head + b"Content-Length: 99999999999\r\n\r\n",
        lambda: b"GET / HTTP/1.1\r\nHost: " + junk + b"\r\nCookie: " + junk + b"\r\nOrigin: " + junk + b"\r\n\r\n",
        lambda: b"GET /?token=" + word + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        lambda: b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 3000,
        lambda: b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        lambda: b"",
    ]
    return chance.choice(kinds)()


def raw(port: int, request: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
        try:
            client.sendall(request)
            if b"\n\r\n" not in request and b"\n\n" not in request:
                client.shutdown(socket.SHUT_WR)  # nothing more: it would wait for the rest
            answer = b""
            while data := client.recv(65536):
                answer += data
            return answer
        except OSError:
            return b""  # it hung up within our request


def grpo_run(stoker: Stoker, name: str, steps: int) -> Path:
    """A run with rewards and rollouts: four completions of one prompt in each step, one of them foreign."""
    run_dir = finished(stoker, name)
    losses(run_dir, steps, reward=0.5, kl=0.01, entropy=2.0, length=9.0, cut=0.25)
    with open(run_dir / "rollouts.jsonl", "w") as file:
        for step in range(steps):
            for number in range(4):
                answer = (FOREIGN, "4", "five", "x" * 100_000)[number]
                about = {
                    "step": step,
                    "weights": step,
                    "row": 7,
                    "prompt": f"<b>2+2</b> in step {step}?",
                    "answer": answer,
                }
                marks = {
                    "reward": number / 4,
                    "parts": {"exact": 1.0},
                    "correct": number == 1,
                    "tokens": 3,
                    "cut": number == 3,
                }
                file.write(json.dumps({"schema": 1, **about, **marks}) + "\n")
        file.write('{"half a line')
    return run_dir


def test_rollouts_come_newest_first_in_pages_of_bounded_size(stoker: Stoker) -> None:
    grpo_run(stoker, "grpo", 20)
    plain = finished(stoker, "plain").name
    with web(stoker) as page:
        run = run_id(stoker.cwd, "grpo")
        newest = page.ask("rollouts", run=run)
        assert [one["step"] for one in newest["rollouts"]] == [step for step in range(19, 11, -1) for _ in range(4)]
        one = newest["rollouts"][1]
        assert (one["completion"], one["reward"], one["correct"], one["cut"]) == ("4", 0.25, True, False)
        assert "\x1b" not in newest["rollouts"][0]["completion"], "control characters are escaped"
        assert len(newest["rollouts"][3]["completion"]) < 5000
        pages = [newest]
        while pages[-1]["begin"]:
            pages.append(page.ask("rollouts", run=run, before=pages[-1]["begin"]))
        assert sorted(one["step"] for page in pages for one in page["rollouts"]) == sorted([*range(20)] * 4)
        status, _, body = page.get(f"/api/rollouts?run={plain}")
        assert status == 404 and b"no rollouts" in body


def test_a_grpo_run_shows_its_reward_first_and_its_rollouts_as_text(chromium: Browser, stoker: Stoker) -> None:
    run = grpo_run(stoker, "grpo", 20).name
    with web(stoker) as page:
        chromium.open(page.printed)
        chromium.until_text("0.5", ".cell.loss[data-name=reward]")
        chromium.js("location.hash = arguments[0]", f"run/{run}/curves")
        facts = "[...document.querySelectorAll('.facts dt')].map(one => one.textContent)"
        chromium.until(f"{facts}.includes('reward')")
        shown = chromium.js(f"return {facts}")
        assert shown[:7] == ["step", "reward", "KL", "entropy", "length", "truncated", "loss"]
        chromium.until("document.querySelectorAll('figure b').length === 6")
        assert chromium.js("return document.querySelector('figure b').textContent") == "reward"
        chromium.click(".tabs a[href$=rollouts]")
        chromium.until_text("<b>2+2</b> in step 19?", ".rollouts")
        assert "<script>document.title='owned'</script>" in chromium.text(".rollouts")
        assert chromium.js("return document.querySelectorAll('.rollouts .badge.good').length") == 8
        chromium.click("#older")
        chromium.until_text("in step 11?", ".rollouts")
        assert chromium.js("return document.title") != "owned" and chromium.log() == []


def test_malformed_requests_leave_it_alive(shared_page: tuple[Page, Path]) -> None:
    page, _ = shared_page
    for seed in range(10_000 if EVERYTHING else 500):
        request = malformed(seed, page.base[:-1].encode(), page.cookie)
        if b"Content-Length: 99999999999" not in request and request.startswith(b"POST"):
            assert raw(page.port, request).startswith(b"HTTP/1.1 403 ")
            continue
        answer = raw(page.port, request)
        assert not answer or re.match(rb"HTTP/1\.1 (200|303|400|403|404|405|413|431) ", answer), (request, answer[:200])
        assert b"Traceback" not in answer and page.token.encode() not in answer
    assert page.get("/")[0] == 200


def test_other_users_runs_only_with_all(stoker: Stoker) -> None:
    needs_root()
    run = finished(stoker, "theirs")
    losses(run, 5)
    (run / "notes.txt").write_text("theirs")
    (run / "leak.txt").symlink_to(stoker.cwd / "machine.json")
    for path in (run, *run.rglob("*")):
        os.chown(path, ATTACKER, ATTACKER, follow_symlinks=False)
    with web(stoker) as page:
        for question in ("curves?names=loss", "log?rank=0", "files?", "ending?"):
            assert page.get(f"/api/{question}&run={run.name}")[0] == 404
        assert page.get(f"/file?run={run.name}&path=notes.txt")[0] == 404
        assert first_event(page)["set"].get("runs", {}) == {}
    with web(stoker, "--all") as page:
        event = first_event(page)
        assert event["set"]["runs"][run.name]["mine"] is False
        assert page.ask("curves", run=run.name, names="loss")["curves"]["loss"]["count"] == 5
        assert page.get(f"/file?run={run.name}&path=notes.txt")[2] == b"theirs"
        assert page.get(f"/file?run={run.name}&path=leak.txt")[0] == 404
        own, body = f"http://127.0.0.1:{page.port}", json.dumps({"run": run.name}).encode()
        status, _, answer = page.get("/api/stop", method="POST", body=body, Origin=own, Content_Type="application/json")
        assert status == 409 and b"belongs to another user" in answer


def first_event(page: Page, run: str = "") -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", page.port, timeout=60)
    connection.request("GET", f"{page.base}events?run={run}", headers={"Cookie": page.cookie})
    answer = connection.getresponse()
    assert answer.status == 200 and answer.headers["Content-Type"].startswith("text/event-stream")
    try:
        while not (line := answer.readline()).startswith(b"data: "):
            pass
        return json.loads(line.removeprefix(b"data: "))
    finally:
        connection.close()


# ---- the command ----


def test_a_port_in_use_names_its_holder_and_refusals_are_one_line(stoker: Stoker) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        refused = stoker("web", "--port", str(port))
    assert refused.code == 69 and f"port {port} is in use by pid {os.getpid()}" in refused.err
    for words, code, says in (
        (["--port", "70000"], 64, "0 to 65535"),
        (["--interval", "0.1s"], 64, "--interval must be at least 0.25s"),
        (["nosuch"], 66, "no run"),
        (["--save", "nosuch", "x.html"], 66, "no run"),
    ):
        done = stoker("web", *words)
        assert (done.code, done.err.count("\n")) == (code, 1) and says in done.err, done.err


def test_damaged_and_vanishing_runs_are_shown_as_they_are(stoker: Stoker) -> None:
    run = finished(stoker, "exp")
    broken = stoker.cwd / "runs" / "broken"
    broken.mkdir()
    (broken / "run.json").write_text('{"started": ')
    with web(stoker) as page:
        rows = first_event(page)["set"]["runs"]
        assert rows["broken"]["state"] == "damaged" and "not JSON" in rows["broken"]["problem"]
        assert page.get("/api/curves?run=broken&names=loss")[0] == 404
        (run / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"st')
        assert page.ask("curves", run=run.name, names="loss")["curves"]["loss"]["steps"] == [1]
        shutil.rmtree(run)
        assert page.get(f"/api/curves?run={run.name}&names=loss")[0] == 404
        assert run.name not in first_event(page)["set"]["runs"]


@at_length
def test_a_long_metrics_file_is_thinned_out_here(stoker: Stoker) -> None:
    run = finished(stoker, "long")
    losses(run, 100_000, **{f"metric{n}": n / 7 for n in range(8)})
    with web(stoker) as page:
        before = cpu_of(page.child.pid)
        answer = page.ask("curves", run=run.name, names="loss")
        took = cpu_of(page.child.pid) - before
        assert answer["curves"]["loss"]["count"] == 100_000 and len(json.dumps(answer)) < 50_000
        print(f"100,000 lines with 10 metrics: {took:.2f} s of CPU")


def cpu_of(pid: int) -> float:
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


# ---- in a browser ----


HANGS = """import os, time, stoker
for step in range(100000):
    time.sleep(0.05)
    stoker.beat(step)
    print(f"step {step} loss {9 / (1 + step / 20):.4f}", flush=True)
    if os.environ["RANK"] == "1" and os.path.exists("hang"):
        time.sleep(600)
"""


@pytest.fixture(scope="module")
def one_chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browsing(tmp_path_factory.mktemp("chromium")) as browser:
        yield browser


@pytest.fixture
def chromium(one_chromium: Browser) -> Browser:
    """With nothing open: the page of an earlier test misses its server."""
    one_chromium.open("about:blank")
    one_chromium.log()
    one_chromium.size(1280, 900)
    return one_chromium


def test_what_a_change_of_network_cut_off_is_asked_again(chromium: Browser, shared_page: tuple[Page, Path]) -> None:
    page, folder = shared_page
    chromium.open(page.printed)
    chromium.until("document.querySelectorAll('.row[data-run]').length === 3")
    conditions = {"latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
    chromium.devtools("Network.enable", {})
    chromium.devtools("Network.emulateNetworkConditions", {**conditions, "offline": True})
    chromium.js("location.hash = arguments[0]", f"run/{run_id(folder, 'exp1')}/settings")
    chromium.until("performance.getEntriesByType('resource').some(one => one.name.includes('api/settings'))")
    chromium.devtools("Network.emulateNetworkConditions", {**conditions, "offline": False})
    chromium.until("[...document.querySelectorAll('main td')].some(cell => cell.textContent === 'ranks')")
    assert any("ERR_INTERNET_DISCONNECTED" in line for line in chromium.log()), "it was cut off"


def test_the_page_shows_zooms_compares_and_runs_no_foreign_text(
    chromium: Browser, shared_page: tuple[Page, Path]
) -> None:
    page, folder = shared_page
    chromium.open(page.printed)
    assert chromium.url == page.home, "the token is gone from the address"
    chromium.until("document.querySelectorAll('.row[data-run]').length === 3")
    chromium.until("[...document.querySelectorAll('canvas.spark')].filter(c => c.width > 1).length === 3")
    chromium.type("#filter", "exp1")
    chromium.until("document.querySelectorAll('.row[data-run]').length === 1")
    chromium.click(".cell.name a")
    chromium.until("document.querySelectorAll('canvas.chart').length === 2")
    chromium.until("document.querySelector('canvas.chart').getAttribute('aria-label').includes('1.')")
    before = chromium.js("return document.querySelector('canvas.chart').toDataURL()")
    chromium.drag("canvas.chart", 0.4, 0.6)
    chromium.until("!document.getElementById('reset').disabled")
    assert chromium.js("return document.querySelector('canvas.chart').toDataURL()") != before
    chromium.click("#log")
    chromium.click("#reset")
    chromium.until("document.getElementById('reset').disabled")
    foreign = run_id(folder, "foreign")
    for tab, words in (("log", "Needle again"), ("why", "completed"), ("files", "report.html"), ("settings", "ranks"), ("ranks", "rank")):  # fmt: skip
        chromium.js("location.hash = arguments[0]", f"run/{foreign}/{tab}")
        chromium.until_text(words, "main")
    chromium.js("location.hash = arguments[0]", f"run/{foreign}/log")
    chromium.until_text("Needle again", "pre.log")
    assert "<script>document.title='owned'</script>" in chromium.text("pre.log") and "\\x1b[31m" in chromium.text(
        "pre.log"
    )
    chromium.type("#find", "needle in\n")
    chromium.until_text("1 line", ".found")
    chromium.click(".match")
    chromium.until("document.querySelector('pre.log mark')?.textContent === 'needle in the middle'")
    chromium.js("location.hash = arguments[0]", f"compare/{run_id(folder, 'exp1')}/{run_id(folder, 'exp2')}")
    chromium.until_text("optim.learning_rate", "#difference")
    chromium.until_text("more than noise", "#difference")
    assert chromium.log() == [], "nothing was refused by the policy, no script failed"
    chromium.open(f"{page.home}file?run={foreign}&path=report.html")
    assert chromium.text("h1") == "report" and chromium.js("return document.title") != "owned"
    with pytest.raises(RuntimeError, match="sandboxed"):
        chromium.js("return document.cookie")


def test_a_run_is_followed_hangs_is_explained_and_stopped(chromium: Browser, stoker: Stoker) -> None:
    script = stoker.script("hangs.py", HANGS)
    job = stoker.start("run", "--nproc-per-node", "2", "--name", "live", script, stdout=subprocess.DEVNULL)
    try:
        with web(stoker) as page:
            assert wait_for(lambda: first_event(page)["set"].get("runs") or None, 30)
            (run,) = first_event(page)["set"]["runs"]
            chromium.open(page.printed)
            chromium.until_text("running", ".row[data-run]")
            chromium.open(f"{page.home}#run/{run}/curves")
            chromium.until("document.querySelector('canvas.chart')")
            shown = "Number(document.querySelector('.facts dd')?.textContent || 0)"
            first = chromium.until(shown)
            chromium.until(f"{shown} > {first} + 20")
            (stoker.cwd / "hang").touch()
            chromium.until_text("rank 1", ".alerts", seconds=60)
            chromium.js("location.hash = arguments[0]", f"run/{run}/why")
            chromium.until_text("has made no progress", ".ending")
            chromium.until_text("hangs.py", "pre.stack")
            chromium.js("location.hash = arguments[0]", f"run/{run}/ranks")
            chromium.until("document.querySelector('canvas.heat')?.clientHeight > 20")
            chromium.click("#stop")
            chromium.click("#ask-no")
            assert job.poll() is None
            chromium.click("#stop")
            chromium.click("#ask-yes")
            chromium.until_text("stopped", ".title")
            assert job.wait(60) == 128 + signal.SIGTERM
            chromium.until("document.getElementById('stop').hidden")
            chromium.until_text("at its end", ".ranks")
            drawn = "document.querySelector('canvas.heat').toDataURL()"
            whole = chromium.js(f"return {drawn}")
            chromium.drag("canvas.heat", 0.3, 0.8)
            chromium.until("!document.getElementById('all-times').disabled")
            chromium.until(f"{drawn} !== arguments[0]", whole)
            zoomed = chromium.js(f"return {drawn}")
            chromium.click("#all-times")
            chromium.until(f"document.getElementById('all-times').disabled && {drawn} !== arguments[0]", zoomed)
            assert chromium.log() == []
    finally:
        job.terminate()
        job.wait(60)


def test_a_rank_reported_as_busy_is_among_the_events(stoker: Stoker) -> None:
    run = finished(stoker, "works")
    when = json.loads((run / "events.jsonl").read_text().splitlines()[-1])["time"]
    seen = {"rank": 1, "cause": "rank.busy", "summary": "rank 1 computes since step 2", "evidence": ["42 s of CPU"]}
    with open(run / "events.jsonl", "a") as file:
        file.write(json.dumps({"schema": 1, "time": when, "event": "busy", "attempt": 0, **seen}) + "\n")
    with web(stoker) as page:
        (mark,) = [one for one in page.ask("ranks", run=run.name)["marks"] if one["kind"] == "busy"]
        assert mark["rank"] == 1 and mark["text"] == seen["summary"]
        (told,) = [one for one in page.ask("ending", run=run.name)["told"] if one["kind"] == "busy"]
        assert told["text"] == seen["summary"] and told["evidence"] == seen["evidence"]


def test_save_takes_the_newest_run_where_none_is_named(stoker: Stoker) -> None:
    for name in ("old", "new"):
        finished(stoker, name)
    for words, name in (
        (["--save", "a.html"], "new"),
        (["old", "--save", "b.html"], "old"),
        (["--save", "old", "c.html"], "old"),
    ):
        done = stoker("web", *words)
        (run,) = (stoker.cwd / "runs").glob(f"*-{name}")
        text = (stoker.cwd / words[-1]).read_text()
        other = {"new": "old", "old": "new"}[name]
        assert done.code == 0 and run.name in text and f"-{other}" not in text, done.err
    for words in (["--save", "old", "new", "d.html"], ["old", "--save", "new", "d.html"]):
        done = stoker("web", *words)
        assert done.code == 64 and done.err.count("\n") == 1 and not (stoker.cwd / "d.html").exists(), done.err


def test_a_saved_run_needs_no_server(chromium: Browser, stoker: Stoker) -> None:
    (stoker.cwd / "said.txt").write_text(FOREIGN + "</script><script>document.title='owned'</script>\nlast line")
    losses(finished(stoker, "kept", "x"), 5000)
    done = stoker("web", "--save", "kept", "kept.html")
    assert done.code == 0 and "wrote kept.html" in done.out, done.err
    text = (stoker.cwd / "kept.html").read_text()
    assert "http://" not in text.replace("http://www.w3.org", "") and "src=" not in text.split("<script", 1)[0]
    chromium.open(f"file://{stoker.cwd}/kept.html")
    chromium.until_text("completed", ".title")
    chromium.until("document.querySelector('canvas.chart')?.getAttribute('aria-label').includes('loss')")
    chromium.drag("canvas.chart", 0.2, 0.4)
    chromium.until("!document.getElementById('reset').disabled")
    for tab, words in (("log", "last line"), ("why", "completed"), ("files", "metrics.jsonl"), ("settings", "ranks"), ("ranks", "nothing recorded")):  # fmt: skip
        chromium.js("location.hash = arguments[0]", f"run/x/{tab}")
        chromium.until_text(words, "main")
    assert chromium.js("return document.title") != "owned" and chromium.js(
        "return document.getElementById('stop').hidden"
    )
    assert chromium.log() == []


@at_length
def test_a_run_is_followed_for_a_minute(chromium: Browser, stoker: Stoker) -> None:
    script = stoker.script("hangs.py", HANGS)
    job = stoker.start("run", "--nproc-per-node", "2", "--name", "live", script, stdout=subprocess.DEVNULL)
    try:
        with web(stoker) as page:
            assert wait_for(lambda: first_event(page)["set"].get("runs") or None, 30)
            (run,) = first_event(page)["set"]["runs"]
            chromium.open(page.printed)
            chromium.open(f"{page.home}#run/{run}/curves")
            shown = "Number(document.querySelector('.facts dd')?.textContent || 0)"
            chromium.until("document.querySelector('canvas.chart')")
            before, grown = chromium.until(shown), 0
            ends = time.monotonic() + 60
            while time.monotonic() < ends:
                before = chromium.until(f"{shown} > {before} && {shown}")
                grown += 1
            assert grown > 10 and "live" in chromium.text("#status"), (grown, chromium.text("#status"))
            last = chromium.js("return document.querySelector('canvas.chart').getAttribute('aria-label')")
            assert float(last.rsplit(" ", 1)[1]) < 1.0, last  # the loss at the end, drawn without a reload
            assert chromium.log() == []
    finally:
        job.terminate()
        job.wait(60)


@at_length
def test_hosts_are_watched_and_a_lost_one_is_offline(chromium: Browser, stoker: Stoker, netcluster: NetCluster) -> None:
    for number in range(3):
        path = stoker.cwd / f"host{number}.json"
        path.write_text(json.dumps(machine_json([gpu_json(0, utilization=10 * number)])))
        netcluster.set_env(number, STOKER_MACHINE=str(path))
    names = [host.name for host in netcluster.hosts]
    with web(stoker, "--hosts", str(netcluster.file())) as page:
        chromium.open(page.printed)
        chromium.open(f"{page.home}#gpus")
        chromium.until("document.querySelectorAll('.gpu').length === 3", seconds=40)
        netcluster.cut(1)
        chromium.until_text("OFFLINE", "main", seconds=40)
        assert names[1] in chromium.text("main")
        chromium.until("document.querySelectorAll('.gpu').length === 2")
        netcluster.heal(1)
        chromium.until("document.querySelectorAll('.gpu').length === 3", seconds=60)


def test_steps_beyond_whole_numbers_leave_the_page_alive(stoker: Stoker, tmp_path: Path) -> None:
    """Marks between 10 ** 16 and the next steps were counted up by one, which is no other number there: the tab crashed."""
    run = finished(stoker, "exp")
    lines = [{"schema": 1, "time": 1e9 + at, "step": 10**16 + 2 * at, "loss": 9.0 - at} for at in range(4)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with web(stoker) as page, browsing(tmp_path) as chromium:
        chromium.open(page.printed)
        chromium.until("document.querySelectorAll('.row[data-run]').length === 1")
        chromium.click(".cell.name a")
        chromium.until("document.querySelector('canvas.chart')?.getAttribute('aria-label').includes('6')")
        chromium.js("await new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(drawn)))")


def test_a_page_that_is_open_for_weeks_drops_the_oldest_moments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stoker.control.show.web.rank_timeline._MAX_CELLS", 1000)
    record = run_record.RunRecord(str(tmp_path), "exp", {}, None, os.getuid(), mine=True)
    timeline = RankTimeline(record)
    (tmp_path / "history").mkdir()
    with open(tmp_path / "history" / "seconds.jsonl", "w") as file:
        file.write(json.dumps({"schema": 1, "time": 0, "members": {"ranks": [0, 1], "gpus": [], "hosts": []}}) + "\n")
        for now in range(2000):
            moment = {"attempt": 0, "ranks": {"step": [now, now]}, "gpus": {}, "hosts": {}}
            file.write(json.dumps({"schema": 1, "time": float(now), **moment}) + "\n")
    answer = timeline.to_json(-1.0)
    assert len(timeline._columns) == 500 and answer["times"][-1] == 1999.0 and answer["ranks"] == [0, 1]
