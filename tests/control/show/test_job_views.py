"""A running RL job in every viewer, and the counters and means that viewers show."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import Stoker, wait_for
from stoker.control.record import serving_log
from stoker.control.record.serving_log import ServerLog, ServerRates, ServerSample, compute_rates, read_samples
from stoker.control.show.curves import Curve, MetricsTail, average_curve, read_newest_line
from stoker.control.show.job_view import compute_server_curves, open_run_tail
from stoker.control.show.run_tail import compute_server_load
from stoker.control.show.snapshot import RUNNING

INTERVAL = 3
COMPANIONS = ["reward", "kl", "entropy", "length", "cut", "staleness", "weights_version"]


def sample(when: float, requests: int = 0, tokens: int = 0, version: int = 0) -> ServerSample:
    return ServerSample(when, requests, 10 * requests, tokens, 1, 0, version)


def test_counters_go_on_where_the_replaced_server_stopped(tmp_path: Path) -> None:
    ServerLog(str(tmp_path), 0).write(sample(100.0, 5, 50, 3))
    after = ServerLog(str(tmp_path), 0)  # a new process counts from 0
    after.write(sample(104.0, 1, 8))
    ServerLog(str(tmp_path), 1).write(sample(104.0, 2, 2))
    with open(tmp_path / "serving" / "rank-0.jsonl", "a") as file:
        file.write('{"time": 1, "requests": "many"}\nno JSON\n{"schema": 1, "time": 106.0, "reque')  # torn by a crash
    read = read_samples(str(tmp_path))
    assert [(one.requests, one.prompt_tokens, one.tokens, one.weights_version) for one in read[0]] == [
        (5, 50, 50, 3),
        (6, 60, 58, 0),
    ]
    assert [one.requests for one in read[1]] == [2]


def test_a_long_file_of_counters_is_thinned_and_keeps_its_totals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving_log, "MAX_BYTES", 40_000)
    log = ServerLog(str(tmp_path), 0)
    for number in range(2000):
        log.write(sample(2.0 * number, number, 3 * number))
    assert (tmp_path / "serving" / "rank-0.jsonl").stat().st_size <= 40_000
    read = read_samples(str(tmp_path))[0]
    assert read[0].requests == 0 and read[-1].requests == 1999 and all(one.tokens == 3 * one.requests for one in read)
    assert [one.requests for one in read[-30:]] == [*range(1970, 2000)], "the newest are all there"


def test_rates_are_differences_over_the_last_half_minute() -> None:
    samples = [sample(float(when), 2 * when, 100 * when) for when in range(0, 61, 2)]
    assert compute_rates(samples, 61.0) == ServerRates(2.0, 100.0)
    idle = [*samples, *(sample(float(when), 120, 6000) for when in range(62, 102, 2))]
    assert compute_rates(idle, 101.0) == ServerRates(0.0, 0.0)
    assert compute_rates(samples, 80.0) == ServerRates(), "a server that writes no more is gone, or hangs"
    assert compute_rates(samples[:1], 1.0) == ServerRates()
    load = compute_server_load("server", [samples, [sample(60.0, 7, 9, 4)]], 61.0, True)
    assert (load.requests, load.tokens, load.weights_version) == (127, 6009, 0)
    assert (load.requests_per_s, load.tokens_per_s, load.running) == (2.0, 100.0, 2)
    assert compute_server_load("server", [samples], 61.0, False).tokens_per_s is None, "the job is over"


def test_a_servers_curve_is_its_rate_at_the_trainers_steps() -> None:
    clock = Curve()
    for step in range(10):
        clock.add(step, 100.0 + 2 * step)
    first = [sample(99.0, 0, 0), sample(109.0, 10, 100), sample(115.0, 40, 400)]
    curves = compute_server_curves(clock, [first, [sample(90.0), sample(130.0)]], 2)
    requests = curves["server_requests_per_s"]
    assert [*requests.steps] == [*range(1, 8)], "no value before the first difference, none behind the last count"
    assert [*requests.values][:3] == pytest.approx([1.0, 1.0, 1.0]) and requests.values[-1] == pytest.approx(5.0)
    assert [*curves["server_tokens_per_s"].values] == pytest.approx([10 * value for value in requests.values])
    assert not compute_server_curves(clock, [], 2)["server_tokens_per_s"].steps


def test_a_curve_of_means_keeps_what_is_no_number() -> None:
    curve = Curve()
    for step, value in enumerate([1.0, 3.0, float("nan"), 5.0, 7.0]):
        curve.add(step, value)
    means = average_curve(curve, 2)
    assert [*means.steps] == [0, 1, 2, 3, 4]
    assert str([*means.values]) == "[1.0, 2.0, nan, 4.0, 6.0]"
    assert average_curve(curve, 1) is curve


@pytest.mark.parametrize("lines", [20, 5000])
def test_newest_values_are_means_over_the_logging_interval(tmp_path: Path, lines: int) -> None:
    rows = [
        {"schema": 1, "time": 1e9 + step, "step": step, "log_every": 4, "loss": 1.0, "reward": step % 4, "tokens": step}
        for step in range(lines)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tail = MetricsTail(str(tmp_path))
    assert tail.read_new() and tail.interval == 4 and "log_every" not in tail.curves
    newest = read_newest_line(str(tmp_path))
    assert (newest["reward"], newest["tokens"], newest["step"]) == (1.5, lines - 1, lines - 1)


torch = pytest.importorskip("torch")

from forked_ranks import server  # noqa: E402
from test_grpo import FORKS, Forks, model_that_answers_with_a_digit  # noqa: E402


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("given")
    model_that_answers_with_a_digit(folder)
    return folder


@pytest.fixture(scope="module")
def forks(given: Path) -> Iterator[Forks]:
    with server(FORKS) as ranks:
        yield Forks(ranks, given)


def test_the_console_has_means_over_the_logging_interval_and_metrics_every_step(forks: Forks, tmp_path: Path) -> None:
    job = forks(1, tmp_path, "--max-steps", "7", "--log_every", str(INTERVAL))
    assert job.codes == [0], job.said()
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [*range(7)] and {row["log_every"] for row in rows} == {INTERVAL}
    printed = re.findall(r"Step \[(\d+)/7\] \| Reward: ([\d.]+) .* Entropy: ([\d.]+)", job.said())
    assert [int(step) for step, _, _ in printed] == [0, 3, 6]
    for step, reward, entropy in printed:
        part = rows[max(0, int(step) - INTERVAL + 1) : int(step) + 1]
        assert float(reward) == pytest.approx(sum(row["reward"] for row in part) / len(part), abs=6e-4)
        assert float(entropy) == pytest.approx(sum(row["entropy"] for row in part) / len(part), abs=6e-4)


def test_every_viewer_shows_a_running_rl_job(stoker: Stoker, forks: Forks) -> None:
    stoker.script("rewards.py", "import random\ndef score(completion):\n    return random.random()\n")
    words = forks.words("--max-steps", "100000", "--log_every", str(INTERVAL), "--grpo.reward", "rewards.py:score")
    words += ["--grpo.breaker_steps", "0", "--grpo.breaker_kl", "0", "--grpo.breaker_entropy", "0"]
    env = {"OMP_NUM_THREADS": "1"}
    job = stoker.start("train", "grpo", "--allocation", "stoker:d1+ddp:d1", "--name", "rl", *words, env=env)
    try:
        see_running(stoker, job)
    finally:
        job.send_signal(signal.SIGINT)
        job.communicate(timeout=240)
    (row,) = json.loads(stoker("runs", "--json").out)["runs"]
    assert row["status"] == "stopped" and row["reward"] is not None
    (load,) = row["servers"]
    assert load["requests"] > 0 and load["requests_per_s"] is None and load["running"] is None
    means = {"reward": 0.0, "entropy": 0.0}
    (trainer,) = stoker.latest.glob("roles/*-trainer")
    rows = [json.loads(line) for line in (trainer / "metrics.jsonl").read_text().splitlines()]
    for name in means:
        assert row[name] == pytest.approx(sum(one[name] for one in rows[-INTERVAL:]) / INTERVAL)
    check_page(stoker)


def see_running(stoker: Stoker, job: subprocess.Popen[bytes]) -> None:
    """The viewers of the job while it runs."""

    def is_under_way() -> bool | None:
        """Enough steps and enough counts between them."""
        folders = [*stoker.cwd.glob("runs/2*-rl/roles/2*")]
        steps = sum(
            (folder / "metrics.jsonl").read_bytes().count(b"\n")
            for folder in folders
            if (folder / "metrics.jsonl").exists()
        )
        counts = [one.requests for folder in folders for one in read_samples(str(folder)).get(0, ())]
        return True if steps > 3 * INTERVAL and len([one for one in counts if one]) > 2 else None

    assert wait_for(is_under_way, 240), job.poll()

    (row,) = json.loads(stoker("runs", "--json").out)["runs"]
    assert row["status"] == RUNNING and row["step"] > 3 * INTERVAL and row["total_steps"] == 100_000
    assert all(row[name] is not None for name in COMPANIONS), row
    (load,) = row["servers"]
    assert load["role"] == "server" and load["requests"] > 0 and load["tokens"] > 0
    assert load["requests_per_s"] > 0 and load["tokens_per_s"] > 0 and load["weights_version"] > 0
    titles = stoker("runs").out.splitlines()[0].split()
    assert titles[titles.index("REWARD") :][:7] == [
        "REWARD", "KL", "ENTROPY", "LENGTH", "TRUNCATED", "STALENESS", "WEIGHTS",
    ]  # fmt: skip
    assert titles.count("SRV") == 2

    (shown,) = json.loads(stoker("top", "--json").out)["runs"]
    phases = {rank["role"]: (rank["step"], rank["phase"]) for rank in shown["ranks"]}
    assert phases["server"][0] is None and re.fullmatch(r"[\d,]+ requests?, [\d,]+ tokens?", phases["server"][1])
    assert phases["trainer"][0] > 3 * INTERVAL and len(shown["curve"]) > 3 * INTERVAL
    narrow = stoker("top", "--once", env={"COLUMNS": "60"}).out
    facts = " ".join(line for line in narrow.splitlines() if not line.startswith("runn"))
    places = [
        facts.index(fact) for fact in ("step ", "reward ", "KL ", "staleness ", "weights ", "requests/s", "tokens/s")
    ]
    assert places == sorted(places), narrow

    drawn = stoker("plot", env={"PYTHONIOENCODING": "utf-8"}).out
    assert drawn.startswith("reward\n") and re.search(r"^server tokens/s +\S+ [\d.]+ to [\d.]+$", drawn, re.M), drawn

    exported = stoker("metrics", "--once").out
    assert re.search(r'^stoker_server_generated_tokens_total\{run="[^"]+",role="server"\} [1-9]', exported, re.M)
    assert re.search(r'^stoker_training_step\{run="[^"]+"\} [1-9]', exported, re.M)


def check_page(stoker: Stoker) -> None:
    """The page's answers about the job, and the same saved as a file."""
    from stoker.control.show.web import page_data, run_files
    from stoker.control.show.web.run_files import RunFolders

    folders, run = RunFolders(str(stoker.cwd / "runs")), stoker.latest.resolve().name
    answer = page_data.read_curves(folders, run, ["reward", "server_requests_per_s"], max_points=600, smooth=INTERVAL)
    assert answer["names"][: len(COMPANIONS)] == COMPANIONS and answer["interval"] == INTERVAL
    assert {"server_requests_per_s", "server_tokens_per_s", "loss"} <= {*answer["names"]}
    folder, timeline = folders.open(run)
    points = folder.training.curve("reward").values[-INTERVAL:]
    assert answer["curves"]["reward"]["values"][-1] == pytest.approx(sum(points) / INTERVAL, rel=1e-4)
    assert answer["curves"]["server_requests_per_s"]["values"]
    assert len(page_data.read_sparklines(folders, [run])[run]) > 3
    assert ["grpo.group", "8"] in page_data.read_settings(folders, run)["settings"]
    over_time = page_data.read_timeline(folders, run, 0.0)
    assert over_time["ranks"] == [1] and "stop" in {mark["kind"] for mark in over_time["marks"]}
    found = run_files.read_rollouts(folders, run, None)["rollouts"]
    assert found and found[0]["prompt"] and found[0]["step"] >= found[-1]["step"]
    assert stoker("web", "--save", run, "job.html").code == 0
    assert open_run_tail(folder.record).record.id == run and timeline.dir == folder.training.record.dir
