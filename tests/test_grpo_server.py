"""GRPO whose answers a server writes: the same run as without it, and a bounded number of steps behind where that is asked for."""

from __future__ import annotations

import http.server
import json
import os
import re
import shlex
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file  # noqa: E402

from conftest import Stoker, Terminal, at_length, at_length_but, wait_for  # noqa: E402
from forked_ranks import program, server  # noqa: E402
from stoker.cli import train  # noqa: E402
from stoker.contract.errors import EX_SOFTWARE, EX_USAGE, Refusal  # noqa: E402
from stoker.control.record.rollouts_log import read_rollouts  # noqa: E402
from stoker.training.checkpoint.reading import open_checkpoint  # noqa: E402
from stoker.training.model import hf  # noqa: E402
from stoker.training.model.decoder import Decoder  # noqa: E402
from stoker.training.rl.dialects import Wanted  # noqa: E402
from stoker.training.rl.kept import FOLDER, Kept  # noqa: E402
from stoker.training.rl.remote import addresses_of  # noqa: E402
from stoker.training.rl.rollout import in_epochs, number_from, read  # noqa: E402
from stoker.training.rl.sampler import Written  # noqa: E402
from stoker.training.tokenizer.tokenizer import bytes_tokenizer  # noqa: E402
from test_grpo import SHAPE, Forks, Job, model_that_answers_with_a_digit  # noqa: E402
from test_roles import events  # noqa: E402

KEY = "a-key-for-tests"
AGES = {"staleness", "staleness_max", "weights_version", "queue", "resampled_stale", "sampler_kl", "cap_rate"}
FORKS = program(f"""
import torch, torch._dynamo
from stoker.training.recipes import grpo, stage

torch.set_num_threads(1)

def work(job, rank):
    os.environ["STOKER_RUN_DIR"] = os.path.join(job["folder"], "run")
    os.environ["STOKER_API_KEY"] = {KEY!r}
    return stage.run(grpo.main, job["words"])
""")


SERVER = program("""
import torch
from stoker.cli.main import main

torch.set_num_threads(1)

def work(job, rank):
    os.environ["STOKER_API_KEY"] = job["key"]
    sys.argv = ["stoker", *job["words"]]
    return main()
""")


class Serving:
    """`stoker serve` on a port of its own, which it keeps when it is replaced."""

    def __init__(self, folder: Path, weights_from: Path) -> None:
        self._words = ["serve", str(folder), "--context", "48", "--slots", "16", "--weights-from", str(weights_from)]
        self._words += ["--weights-group", "127.0.0.1"]
        self._held = ExitStack()
        self._forks = self._held.enter_context(server(SERVER))
        self._log = Path(self._held.enter_context(tempfile.TemporaryDirectory())) / "rank-0.log"
        self.port = 0
        self.start()

    def start(self) -> None:
        self._log.unlink(missing_ok=True)
        words = [*self._words, "--port", str(self.port)]
        (self._pid,) = self._forks.begin(1, self._log.parent, words=words, key=KEY)
        listens = wait_for(lambda: re.search(r"^http://127.0.0.1:(\d+)/", self._said(), re.M), 60)
        if not listens:
            self.close()
        assert listens, self._said()
        self.port = int(listens[1])

    def _said(self) -> str:
        return self._log.read_text() if self._log.exists() else ""

    def kill(self) -> None:
        os.kill(self._pid, signal.SIGKILL)
        self._forks.codes()
        self._pid = 0

    def close(self) -> None:
        with self._held:
            if self._pid:
                self.kill()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("given")
    model_that_answers_with_a_digit(folder)
    return folder


@pytest.fixture(scope="module")
def forks(given: Path) -> Iterator[Forks]:
    with server(FORKS) as ranks:
        yield Forks(ranks, given)


@pytest.fixture(scope="module")
def serving(given: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    made = Serving(given / "hf", tmp_path_factory.getbasetemp())
    yield made
    made.close()


STEPS = ("--max-steps", "6", "--every_steps", "2")


@pytest.fixture(scope="module")
def alone(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Job:
    job = forks(1, tmp_path_factory.mktemp("alone"), *STEPS)
    assert job.codes == [0], job.said()
    return job


def without_ages(metrics: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in line.items() if key not in AGES} for line in metrics]


def shared_folder(job: Job) -> Path:
    """Where it published, in shared memory."""
    (line,) = [line for line in job.said().splitlines() if "through shared memory" in line]
    return Path(line.split(": ")[-1])


@pytest.mark.parametrize("way", ["folder", "memory", "group"])
def test_with_no_staleness_a_server_makes_the_run_that_the_trainers_make_alone(
    forks: Forks, serving: Serving, alone: Job, tmp_path: Path, way: str
) -> None:
    job = forks(1, tmp_path, *STEPS, "--grpo.server", serving.url, "--grpo.publish", way)
    assert job.codes == [0], job.said()
    assert without_ages(job.metrics) == alone.metrics
    assert all(line["staleness"] == line["staleness_max"] == line["queue"] == 0 for line in job.metrics)
    assert all(line["weights_version"] == line["step"] for line in job.metrics)
    assert (job.run / "rollouts.jsonl").read_bytes() == (alone.run / "rollouts.jsonl").read_bytes()
    ours, theirs = (load_file(one.run / "hf" / "model.safetensors") for one in (job, alone))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs), "bit for bit"
    assert not (job.run / "published").exists() and "could not be checked" not in job.said()
    assert ("through shared memory" in job.said()) == (way == "memory")
    assert way != "memory" or not shared_folder(job).exists()


@pytest.mark.parametrize(
    "how", at_length_but([("auto", "--lora")], [("auto", "--lora"), ("group", "--lora"), ("group",)])
)
def test_ranks_in_shards_publish_adapters_alone_or_whole_weights(
    forks: Forks, serving: Serving, tmp_path: Path, how: tuple[str, ...]
) -> None:
    way, *method = how
    more = ("--max-steps", "3", *method)
    one = forks(1, tmp_path / "1", *more)
    server = ("--grpo.server", serving.url, "--grpo.publish", way)
    two = forks(2, tmp_path / "2", *more, "--strategy", "fsdp", *server, "--every_steps", "1")
    assert one.codes == [0] and two.codes == [0, 0], two.said()
    for name in ("loss", "reward", "kl", "entropy", "grad_norm"):
        ours, theirs = ([line[name] for line in job.metrics] for job in (two, one))
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("staleness", at_length_but([1], [1, 3]))
def test_answers_are_so_many_steps_behind_at_most_and_the_model_learns(
    forks: Forks, serving: Serving, tmp_path: Path, staleness: int
) -> None:
    more = ("--max-steps", "20", "--export", "false", "--grpo.server", serving.url, "--grpo.staleness", str(staleness))
    job = forks(2, tmp_path, *more, "--grpo.publish", "auto" if staleness == 1 else "group")
    assert job.codes == [0, 0], job.said()
    ages = [line["staleness_max"] for line in job.metrics]
    assert ages[0] == 0 and 0 < max(ages) <= staleness, ages
    assert all(0 <= line["staleness"] <= line["staleness_max"] and 0 <= line["cap_rate"] < 1 for line in job.metrics)
    rewards = [line["reward"] for line in job.metrics]
    assert sum(rewards[:3]) / 3 < 0.25 and sum(rewards[-3:]) / 3 > 0.4, rewards
    steps = [one.step for one in read_rollouts(str(job.run))]
    assert all(steps.count(step) == 24 for step in range(20)), "rank 0's half, each once"


def test_an_old_answer_is_weighed_by_the_weights_that_learn_over_those_that_wrote_it(
    forks: Forks, serving: Serving, given: Path, tmp_path: Path
) -> None:
    """A step's loss and gradient, again from its checkpoints and the answers it kept, by the formula written plainly."""
    more = ("--max-steps", "9", "--every_steps", "1", "--checkpoint.keep", "9", "--grpo.server", serving.url)
    job = forks(1, tmp_path, *more, "--grpo.staleness", "1", stop_after=3, by=signal.SIGKILL)
    assert job.codes == [-signal.SIGKILL]
    tokenizer = bytes_tokenizer()
    wanted = Wanted(4, 1.0, frozenset(tokenizer.stop_ids), tokenizer.vocab_size, 48)
    kept = Kept(str(job.run), 0, wanted.settings)
    rows = [json.loads(line) for line in (given / "prompts.jsonl").read_text().splitlines()]
    prompts, _ = read(rows, tokenizer, 44, "prompts.jsonl")
    rewarded = list(read_rollouts(str(job.run)))
    models, furthest = {0: weights_of(given / "hf")}, 0.0
    for step in (1, 2):
        models[step] = weights_of(given / "hf", job.run / "checkpoints" / f"step-{step:08d}")
        asked = [prompts[index] for index in in_epochs(len(prompts), step, 0, 6)]
        found = [kept.find(one.ids, number_from("answers", 0, step), 8 * n, 8) for n, one in enumerate(asked)]
        answers = [(one.ids, written) for one, some in zip(asked, found, strict=True) for written in some or ()]
        rewards = torch.tensor([one.reward for one in rewarded if one.step == step], dtype=torch.float64).view(6, 8)
        above = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, unbiased=False, keepdim=True) + 1e-4)
        losses, weights = [], []
        for (prompt, written), advantage in zip(answers, above.flatten().tolist(), strict=True):
            (version,) = set(written.versions)
            now = logprobs_of(models[step], prompt, written.ids)
            with torch.no_grad():
                then, first = (logprobs_of(models[n], prompt, written.ids) for n in (version, 0))
            assert written.logprobs == pytest.approx(then.tolist(), abs=1e-4), "of the version that it names"
            weights.append(torch.exp(now.detach() - then))
            surrogate = torch.exp(now - now.detach()) * advantage * weights[-1].clamp(max=2.0)
            losses.append(0.02 * (torch.exp(first - now) - (first - now) - 1) - surrogate)
        loss = torch.cat(losses).mean()
        loss.backward()
        norm = sum(float(one.grad.square().sum()) for one in models[step].parameters() if one.grad is not None) ** 0.5
        line, every = job.metrics[step], torch.cat(weights)
        assert line["loss"] == pytest.approx(loss.item(), rel=1e-3, abs=1e-5)
        assert line["grad_norm"] == pytest.approx(norm, rel=1e-3)
        assert line["sampler_kl"] == pytest.approx(-float(every.log().mean()), rel=1e-3, abs=1e-5)
        assert line["cap_rate"] == pytest.approx(float((every > 2).double().mean()), abs=1e-9)
        furthest = max(furthest, float((every - 1).abs().max()))
    assert furthest > 0.05, "weights that can be told from 1"


def weights_of(folder: Path, checkpoint: Path | None = None) -> Decoder:
    model = Decoder(SHAPE, 48)
    hf.load(model, str(folder), lambda line: None)
    if checkpoint is not None:
        found = open_checkpoint(str(checkpoint))
        model.load_state_dict({name: found.read(f"model.{name}") for name, _ in model.named_parameters()})
    return model


def logprobs_of(model: Decoder, prompt: Sequence[int], answer: tuple[int, ...]) -> torch.Tensor:
    logits = model(torch.tensor([[*prompt, *answer]]))[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits.float(), -1)[range(len(answer)), list(answer)]


@pytest.mark.parametrize("way", ["auto", "group"])
def test_a_server_that_is_killed_and_replaced_gets_the_newest_weights_and_the_run_is_the_same(
    forks: Forks, given: Path, alone: Job, tmp_path: Path, way: str
) -> None:
    mine = Serving(given / "hf", tmp_path)
    try:
        ranks = forks._ranks
        ranks.begin(1, tmp_path / "job", words=forks.words(*STEPS, "--grpo.server", mine.url, "--grpo.publish", way))
        metrics = tmp_path / "job" / "run" / "metrics.jsonl"
        for lines in (1, 3):
            assert wait_for(
                lambda lines=lines: (metrics.exists() and metrics.read_text().count("\n") >= lines) or None, 60
            )
            mine.kill()
            mine.start()
        job = Job(tmp_path / "job", ranks.codes())
    finally:
        mine.close()
    assert job.codes == [0], job.said()
    assert without_ages(job.metrics) == alone.metrics
    assert (job.run / "rollouts.jsonl").read_bytes() == (alone.run / "rollouts.jsonl").read_bytes()


def test_trainers_that_are_killed_go_on_and_learn_each_sample_once(
    forks: Forks, serving: Serving, alone: Job, tmp_path: Path
) -> None:
    more = (*STEPS, "--grpo.server", serving.url)
    part = forks(1, tmp_path, *more, stop_after=3, by=signal.SIGKILL)
    assert part.codes == [-signal.SIGKILL]
    left = shared_folder(part)
    rest = forks(1, tmp_path, *more)
    assert rest.codes == [0] and without_ages(rest.metrics) == alone.metrics, rest.said()
    assert not left.exists(), "what was killed is swept"


def test_trainers_that_start_again_take_the_answers_that_had_come(
    forks: Forks, serving: Serving, tmp_path: Path
) -> None:
    """Those of steps ahead, too. They are replaced by others on the way: what is learned from shows where it is from."""
    more = (*STEPS, "--grpo.server", serving.url, "--grpo.staleness", "2", "--grpo.importance_cap", "2")
    part = forks(2, tmp_path, *more, stop_after=2, by=signal.SIGKILL)
    assert part.codes == [-signal.SIGKILL] * 2
    last = sorted((part.run / "checkpoints").glob("step-*"))[-1]
    first = int(last.name.removeprefix("step-"))
    replaced = dict[int, int]()
    files = sorted((part.run / "answers").glob("step-*-rank-0.jsonl"))
    for file in files:
        oldest = max(int(file.name[5:13]) - 2, 0)  # version that may have written them
        seven = [[55, bytes_tokenizer().end_id], [-1.0, -1.0], [oldest, oldest]]
        lines = [json.loads(line) for line in file.read_text().splitlines() if line]
        for line in lines:
            line["answers"] = [seven] * len(line["answers"])
        replaced[int(file.name[5:13])] = sum(len(line["answers"]) for line in lines)
        file.write_text("".join(f"{json.dumps(line)}\n" for line in lines) + '{"key": "half a li')
    assert first in replaced and min(replaced) >= 0, replaced
    rest = forks(2, tmp_path, *more)
    assert rest.codes == [0, 0], rest.said()
    assert "answers that came before are here" in rest.said()
    right = [one.step for one in read_rollouts(str(rest.run)) if one.answer == "7"]
    for step in range(first, 6):
        assert right.count(step) >= replaced.get(step, 0), (step, replaced)
    assert right.count(first) == replaced[first] == 24, "all of rank 0's half, as they were kept"
    assert not (rest.run / "answers").exists(), "nobody starts again behind the end"


def test_what_a_server_refuses_ends_the_run_with_its_sentence(
    forks: Forks, serving: Serving, given: Path, tmp_path: Path
) -> None:
    other = Serving(given / "hf", given)  # takes weights from elsewhere
    try:
        more = ("--max-steps", "2", "--grpo.server", other.url, "--grpo.publish", "folder")
        job = forks(2, tmp_path / "403", *more)
    finally:
        other.close()
    assert job.codes == [EX_SOFTWARE] * 2
    for rank in (0, 1):
        assert "refused /v1/weights with status 403" in job.said(rank) and "Traceback" not in job.said(rank)
    gone = forks(1, tmp_path / "gone", "--max-steps", "2", "--grpo.server", other.url, "--grpo.server_timeout", "1s")
    assert gone.codes == [EX_SOFTWARE] and "did not answer /v1/weights for 1.0 s" in gone.said()
    assert "Connection refused" in gone.said() and "Traceback" not in gone.said()


class Liar(http.server.BaseHTTPRequestHandler):
    """Takes all weights, and answers with others'."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        told: dict[str, Any] = {}
        if self.path == "/v1/completions":
            one = {"token_ids": [55], "versions": [0], "logprobs": {"token_logprobs": [-1.0]}}
            weights = {"version": 0, "digest": "0" * 32}
            told = {"choices": [{**one, "index": number, "weights": weights} for number in range(asked["n"])]}
        body = json.dumps(told).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


def test_a_server_that_answers_with_other_weights_ends_the_run(forks: Forks, tmp_path: Path) -> None:
    liar = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Liar)
    thread = threading.Thread(target=liar.serve_forever)
    thread.start()
    try:
        job = forks(2, tmp_path, "--max-steps", "2", "--grpo.server", f"http://127.0.0.1:{liar.server_address[1]}")
    finally:
        liar.shutdown()
        thread.join()
        liar.server_close()
    assert job.codes == [EX_SOFTWARE] * 2
    for rank in (0, 1):
        assert "GRPO stopped itself: the server at" in job.said(rank) and "Traceback" not in job.said(rank)
        assert "answers with other weights than the trainers'" in job.said(rank)


def test_servers_are_urls_or_a_role_of_the_job() -> None:
    assert addresses_of("http://a:1, http://127.0.0.1:8000/v1/", {}) == ("a:1", "127.0.0.1:8000")
    assert addresses_of("my-server", {"STOKER_ROLE_MY_SERVER": "x:1,y:2"}) == ("x:1", "y:2")
    for text in ("server", "https://a:1", "http://", "http://a:x", "http://a:1/other"):
        with pytest.raises(Refusal) as refused:
            addresses_of(text, {})
        assert refused.value.code == EX_USAGE and "grpo.server" in refused.value.line


def test_one_command_starts_the_server_and_the_trainers(stoker: Stoker, given: Path, forks: Forks) -> None:
    words = forks.words("--max-steps", "3")
    done = stoker(
        "train", "grpo", "--allocation", "stoker:d1+ddp:d2", *words, "--name", "job",
        env={"STOKER_API_KEY": KEY, "OMP_NUM_THREADS": "1"}, timeout=600,
    )  # fmt: skip
    assert done.code == 0, done.out + done.err
    (trainer,) = (stoker.latest / "roles").glob("*-trainer")
    metrics = [json.loads(line) for line in (trainer / "metrics.jsonl").read_text().splitlines()]
    assert len(metrics) == 3 and all(line["staleness_max"] <= 1 for line in metrics)
    assert (trainer / "hf" / "model.safetensors").exists() and not (trainer / "published").exists()
    assert "trainer ended with exit code 0; server stopped" in done.out + done.err
    files = [path for path in stoker.latest.rglob("*") if path.is_file()]
    assert len(files) > 15 and not [path for path in files if KEY.encode() in path.read_bytes()], (
        "the key is in no record"
    )


@at_length
def test_a_job_on_a_terminal_looks_as_a_run_alone_does(stoker: Stoker, forks: Forks) -> None:
    words = [
        "train",
        "grpo",
        "--allocation",
        "stoker:d1+ddp:d2",
        *forks.words("--max-steps", "100000", "--name", "job"),
    ]
    env = {"STOKER_API_KEY": KEY, "OMP_NUM_THREADS": "1"}
    seen = Terminal(stoker, ["-m", "stoker", *words], (80, 24), env)
    bar = "[trainer] training [·".encode()
    shown = wait_for(lambda: (seen.shown.count(b" Step ") > 2 and bar in seen.shown) or None, 120)
    attached = Terminal(stoker, ["-m", "stoker", "attach"], (80, 24))
    there = wait_for(lambda: (b" Step " in attached.shown and b"training [" in attached.shown) or None, 60)
    attached.keys(b"\x03")
    attached.wait()
    seen.keys(b"\x03")
    assert seen.wait(120) == 130 and shown and there, (seen.lines, attached.lines)
    assert (
        seen.shown.count(b"new weights from") == 1 and b"[server] CPU0:stoker: new weights: version 2\r" in seen.shown
    )
    for terminal in (seen, attached):
        assert not any("training [" in line for line in terminal.lines), "the bar is gone"
        text = re.sub(rb"\x1b\[[0-?]*[ -/]*[@-~]|[^\n]*\r(?=[^\n])", b"", terminal.shown).decode()
        lines = [line.rstrip("\r") for line in text.splitlines()]
        steps = [line for line in lines if " Step " in line]
        assert steps and all(re.match(r"\[trainer\] CPU0: Step \d+/100000 \| Reward \d", line) for line in steps)
        alone = r"\[\w+\] (CPU\d:\s*\S+$|CPU0:weights from )"  # one word, or what a rank prints by itself
        commands = [line for line in lines if line.startswith("  stoker train ")]  # whole, to be pasted
        assert [line for line in lines if len(line) > 80 and not re.match(alone, line)] == commands


def test_a_stopped_job_without_a_key_of_its_users_own_resumes(stoker: Stoker, forks: Forks) -> None:
    """Each start makes a new key for the server: that is no other setting of the trainer's run."""
    words = forks.words("--max-steps", "40", "--grpo.breaker_steps", "0")
    alone = {"OMP_NUM_THREADS": "1", "STOKER_API_KEY": ""}
    job = stoker.start("train", "grpo", "--allocation", "stoker:d1+ddp:d1", *words, env=alone)

    def steps() -> int:
        return sum(path.read_text().count("\n") for path in stoker.cwd.glob("runs/2*/roles/*-trainer/metrics.jsonl"))

    assert wait_for(lambda: True if steps() >= 2 else None, 240)
    job.send_signal(signal.SIGINT)
    said = job.communicate(timeout=240)[0].decode()
    (trainer,) = (stoker.latest / "roles").glob("*-trainer")
    (saved,) = (path.name for path in (trainer / "checkpoints").glob("step-*"))
    assert job.returncode == 130 and f"saved: checkpoints/{saved}" in said, said
    command = shlex.split(said.partition("to continue: stoker ")[2].splitlines()[0])
    assert command[:2] == ["train", "grpo"] and command[2:4] == ["--name", stoker.latest.name], said
    again = stoker(*command, env=alone, timeout=600)
    assert again.code == 0 and f"resumes at step {int(saved.removeprefix('step-'))}" in again.out + again.err
    model = f"runs/{stoker.latest.name}/roles/{trainer.name}"
    assert f"stoker: the model of role trainer is {model}/hf\n" in again.err, again.err
    chat = stoker.torch("chat", "runs/latest", "--prompt", "1 + 1 =", "--max-tokens", "2")
    assert chat.code == 0 and f"using the model of run {model} (stage grpo)\n" in chat.err
    assert stoker.torch("chat", "--prompt", "1 + 1 =", "--max-tokens", "2").code == 0, "the newest model is a role's"
    assert stoker.torch("export", "runs/latest", "out").code == 0
    kept, exported = (load_file(folder / "model.safetensors") for folder in (trainer / "hf", stoker.cwd / "out"))
    assert kept.keys() == exported.keys() and all(torch.equal(kept[name], exported[name]) for name in kept)
    assert "from the beginning" not in again.err and f"{trainer.name}/checkpoints/{saved}" in again.err, again.err
    assert list((stoker.latest / "roles").glob("*-trainer")) == [trainer], "it is the same run"


@at_length
def test_a_job_that_stops_itself_is_continued_by_its_printed_command_alone(stoker: Stoker, forks: Forks) -> None:
    stoker.script("rewards.py", "def score(completion):\n    return 0.0\n")
    words = forks.words("--max-steps", "4", "--grpo.reward", "rewards.py:score", "--grpo.breaker_steps", "2")
    command = ("train", "grpo", "--allocation", "stoker:d1+ddp:d1", "--name", "zero", "--every_steps", "1", *words)
    env = {"OMP_NUM_THREADS": "1"}
    done = stoker(*command, env=env, timeout=600)
    job = stoker.latest
    assert done.verdict["cause"] == "grpo.no-signal" and "the last good checkpoint is" in done.err, done.err
    by_id = [job.name if word == "zero" else word for word in command]
    assert done.err.endswith(f"stoker: to continue: {shlex.join(['stoker', *by_id])}\n"), done.err
    assert f"  {shlex.join(['stoker', *by_id])}   # to continue\n" in stoker("why", "zero").out

    same = stoker(*command, env=env)
    assert same.code == EX_SOFTWARE and done.verdict["summary"] in same.err, same.err
    assert len(events(stoker, "role-start")) == 2, "the same command has started no role"
    stoker.script("rewards.py", "def score(completion):\n    return float('7' in completion)\n")
    resumed = stoker(*by_id, env=env, timeout=600)
    assert resumed.code == 0 and "resumes at step 2" in resumed.out + resumed.err, resumed.out + resumed.err
    assert stoker.latest == job


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("grpo", "--allocation", "vllm:d1+fsdp:d3"), "serves with stoker only"),
        (("grpo", "--allocation", "fsdp:d3"), "must have one part that serves and one that trains"),
        (("grpo", "--allocation", "stoker:d1+fsdp:d2t2"), "write fsdp:d4"),
        (("grpo", "--allocation", "stoker:d1+fsdp:d1", "--grpo.server", "http://a:1"), "leave grpo.server out"),
        (("grpo", "--allocation", "stoker:d1+fsdp:d1", "--hosts", "h.yaml"), "stoker run --roles"),
        (("grpo", "--allocation", "stoker:d1+fsdp:d1", "--nproc-per-node", "2"), "--nproc-per-node does not apply to a multi-role job"),
        (("grpo", "--allocation", "stoker:d1+fsdp:d1"), "needs a model"),
        (("sft", "--allocation", "stoker:d1+fsdp:d1"), "stage sft has only one role"),
    ],
)  # fmt: skip
def test_allocations_that_cannot_be_are_refused(words: tuple[str, ...], said: str) -> None:
    with pytest.raises(Refusal) as refused:
        train.main(list(words))
    assert said in refused.value.line and refused.value.code == EX_USAGE


def test_stale_answers_and_4_bits_are_refused_where_they_cannot_be(forks: Forks, tmp_path: Path) -> None:
    for more, said in (
        (("--grpo.staleness", "1"), "grpo.staleness 1 needs grpo.server"),
        (("--grpo.server", "http://a:1", "--qlora"), "use --lora"),
        (("--grpo.server", "nobody"), "neither a URL"),
        (
            ("--grpo.server", "http://a:1", "--grpo.server_kind", "sglang", "--grpo.publish", "memory"),
            "sglang loads folders",
        ),
    ):
        job = forks(1, tmp_path / more[-1].strip("-"), "--max-steps", "1", *more)
        assert job.codes == [EX_USAGE] and said in job.said() and "Traceback" not in job.said()


def ranks_of(job: Path, word: bytes) -> list[int]:
    """The pids of processes that are ranks of that job's and have the word on their command line."""
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            words = Path(f"/proc/{entry}/cmdline").read_bytes().split(b"\0")
            variables = Path(f"/proc/{entry}/environ").read_bytes().split(b"\0")
        except OSError:
            continue  # another user's, or it has just ended
        run = next((one for one in variables if one.startswith(b"STOKER_RUN_DIR=")), b"")
        if word in words and str(job).encode() in run and any(one.startswith(b"RANK=") for one in variables):
            found.append(int(entry))
    return sorted(found)


@at_length
def test_trainers_whose_launcher_is_killed_while_the_server_hangs_save_and_the_same_command_continues(
    stoker: Stoker, forks: Forks
) -> None:
    words = forks.words("--max-steps", "12", "--every_steps", "1000", "--learning_rate", "1e-5")
    words += ["--allocation", "stoker:d1+ddp:d2", "--name", "job", "--grpo.breaker_steps", "0"]
    command, env = ("train", "grpo", *words), {"OMP_NUM_THREADS": "1"}
    job = stoker.start(*command, env=env, stdout=subprocess.DEVNULL)

    def steps() -> int:
        files = list(stoker.cwd.glob("runs/2*/roles/*-trainer/metrics.jsonl"))
        return files[0].read_text().count("\n") if files else 0

    assert wait_for(lambda: steps() > 1 or job.poll() is not None or None, 120)
    hung = ranks_of(stoker.latest, b"serve")
    for pid in hung:
        os.kill(pid, signal.SIGSTOP)
    job.kill()
    job.wait()
    again = stoker(*command, env=env, timeout=600)
    (run,) = (stoker.latest / "roles").glob("*-trainer")
    assert hung and again.code == 0, again.out + again.err
    assert re.search(r"resumes at step [1-9]", again.out + again.err), again.out
    assert [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()] == list(range(12))
    assert not ranks_of(stoker.latest, b"serve") and not ranks_of(stoker.latest, b"stoker.training.recipes.grpo")


@at_length
def test_server_and_trainers_are_killed_again_and_again_and_no_sample_is_lost_or_learned_twice(
    stoker: Stoker, forks: Forks
) -> None:
    words = forks.words(
        "--max-steps", "60", "--every_steps", "3", "--learning_rate", "3e-4", "--grpo.breaker_steps", "0"
    )
    more = ("--allocation", "stoker:d1+ddp:d1", "--name", "killed", "--max-restarts", "9")
    job = stoker.start("train", "grpo", *more, *words, env={"OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)

    def steps() -> int:
        files = list(stoker.cwd.glob("runs/*-killed/roles/*-trainer/metrics.jsonl"))
        return files[0].read_text().count("\n") if files else 0

    killed = 0
    while job.poll() is None and killed < 8:
        at = 3 + 6 * killed
        if not wait_for(lambda at=at: steps() >= at or job.poll() is not None or None, 120):
            break
        word = (b"serve", b"stoker.training.recipes.grpo")[killed % 2]
        pids = wait_for(lambda word=word: ranks_of(stoker.latest, word) or None, 120)
        assert pids, "there is one to kill"
        os.kill(pids[-1], signal.SIGKILL)
        killed += 1
    assert killed == 8 and job.wait(600) == 0
    (run,) = (stoker.latest / "roles").glob("*-trainer")
    rows = [one.step for one in read_rollouts(str(run))]
    assert [rows.count(step) for step in range(60)] == [48] * 60


@pytest.mark.parametrize(
    "line",
    [
        "[" * 100_000,
        '{"key": "k", "first": 0, "answers": [[[1e999], [0], [0]]]}',
        '{"key": "k", "first": 1e999, "answers": []}',
    ],
)
def test_answers_that_are_none_are_asked_for_again(tmp_path: Path, line: str) -> None:
    kept = Kept(str(tmp_path), 0, "s")
    kept.keep(1, [1, 2], 7, 0, [Written((3,), (-0.5,), (0,))])
    with (tmp_path / FOLDER / "step-00000001-rank-0.jsonl").open("a") as file:
        file.write(f"\n{line}\n")
    again = Kept(str(tmp_path), 0, "s")
    assert again.count == 1 and again.find([1, 2], 7, 0, 1) == [Written((3,), (-0.5,), (0,))]
