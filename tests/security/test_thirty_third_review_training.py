"""The thirty-third review, of the training plane: runs and speedruns that came with a folder, and clients of a server."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from stoker.speedrun.gather import gather  # noqa: E402
from stoker.training.generate.config import Sampling  # noqa: E402
from stoker.training.model.config import ModelConfig  # noqa: E402
from stoker.training.model.decoder import Decoder  # noqa: E402
from stoker.training.parallel.config import ParallelConfig  # noqa: E402
from stoker.training.parallel.group import Group  # noqa: E402
from stoker.training.rl.kept import FOLDER, Kept  # noqa: E402
from stoker.training.rl.publish import Publisher, To  # noqa: E402
from stoker.training.rl.sampler import Written  # noqa: E402
from stoker.training.rl.waiting import ServerWait  # noqa: E402
from stoker.training.serve.engine import PagedEngine, Sizes, answers  # noqa: E402
from stoker.training.serve.request import Request  # noqa: E402


def sparse(path: Path, size: int) -> None:
    path.touch()
    os.truncate(path, size)


# ---- a run of GRPO that is continued ----


def test_published_weights_are_not_put_where_a_link_leads(tmp_path: Path) -> None:
    """In RUN/published of a run directory that came with a folder."""
    model = Decoder(ModelConfig(layers=1, dim=16, heads=1, kv_heads=1, head_dim=16, ff=32, vocab_size=260), 8)
    model.start(0)
    to = To((), "folder", 0, None, ServerWait(), print)  # type: ignore[arg-type]
    group = Group(ParallelConfig(device="cpu", strategy="ddp"))
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    run.mkdir()
    (elsewhere / "version-1.0").mkdir(parents=True)
    (run / "published").mkdir()
    (run / "published" / "version-1").symlink_to(elsewhere)
    made = Publisher(model, None, str(run), group, to)
    assert os.path.exists(os.path.join(made(7).folder, "config.json"))
    made.close()
    assert not (run / "published").exists() and (elsewhere / "version-1.0").exists()


def test_answers_of_a_continued_run_take_no_memory_for_holes(tmp_path: Path) -> None:
    """A file of 3 GB of holes took 6.5 GB in each rank: all of it was read at once."""
    kept = Kept(str(tmp_path), 0, "s")
    kept.keep(1, [1, 2], 7, 0, [Written((3,), (-0.5,), (0,))])
    sparse(tmp_path / FOLDER / "step-00000002-rank-0.jsonl", 1 << 40)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    again = Kept(str(tmp_path), 0, "s")
    assert again.count == 1 and again.find([1, 2], 7, 0, 1) == [Written((3,), (-0.5,), (0,))]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < (256 << 20) >> 10


# ---- the report of a speedrun that came with a folder ----


def chain_of(folder: Path, runs: list[str]) -> None:
    rows = [{"name": f"s{number}", "stage": "pretrain", "run": run} for number, run in enumerate(runs)]
    (folder / "chain.json").write_text(json.dumps({"schema": 1, "stages": rows}))


def test_a_report_reads_a_run_of_many_names_once(tmp_path: Path) -> None:
    """2.4 MB of metrics under 50 names took 1.3 GB; 240 MB under 100 would have taken 250 GB."""
    run = tmp_path / "stages" / "run"
    run.mkdir(parents=True)
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    for number in range(3):
        (tmp_path / "stages" / f"link-{number}").symlink_to("run")
    chain_of(tmp_path, ["stages/run", *(f"stages/link-{number}" for number in range(3))])
    assert list(gather(str(tmp_path)).stages) == ["s0"]


GATHERED = """
import sys
from stoker.contract import effort
from stoker.contract.names import Refusal
from stoker.speedrun.gather import gather
effort.ROOM = 32 << 20
try:
    print(len(gather(sys.argv[1]).stages["s1"].steps))
except Refusal as refusal:
    print(refusal.line)
"""


def test_a_report_has_the_room_of_the_files_that_are_stored(tmp_path: Path) -> None:
    """The same by hard links, which no path tells. In a process of its own: one that has freed much grows by nothing."""
    line = json.dumps({f"a{number}": 1.5 for number in range(100)}) + "\n"
    first = tmp_path / "stages" / "run-0" / "metrics.jsonl"
    for number in range(30):
        run = tmp_path / "stages" / f"run-{number}"
        run.mkdir(parents=True)
        if number:
            os.link(first, run / "metrics.jsonl")
        else:
            first.write_text(line * 400)

    def gathered(runs: int) -> str:
        chain_of(tmp_path, [f"stages/run-{number}" for number in range(runs)])
        command = [sys.executable, "-c", GATHERED, str(tmp_path)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    assert gathered(2) == "400\n"
    assert "takes too much memory to look at" in gathered(30)


# ---- clients of stoker serve ----

WORDS = tuple(7 * place % 61 for place in range(64))
GREEDY = Sampling(0.0, 0, 1.0)


def engine_of_a_gpu() -> PagedEngine:
    """It writes several tokens before the host looks at them, as `stoker serve` does on GPUs."""
    model = Decoder(ModelConfig(layers=2, dim=32, heads=2, kv_heads=1, head_dim=16, ff=64, vocab_size=64), 64)
    model.start(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(6 if parameter.dim() == 2 else 1)  # each token counts
    return PagedEngine(model.eval(), Sizes(slots=8, length=64, memory=512, turn=8))


def test_a_prompt_that_others_continue_does_not_end_the_server() -> None:
    """Where several tokens are written at once, as on every GPU: a prompt of whole blocks and a longer one that begins with
    it, both asked for again in one body, ended the engine, and with it the server.
    """
    engine = engine_of_a_gpu()

    def asked(again: str) -> list[tuple[int, ...]]:
        requests = [Request(f"{again}{count}", WORDS[:count], 12, sampling=GREEDY) for count in (16, 20)]
        return [tuple(one.tokens) for one in answers(engine, requests)]

    assert asked("first") == asked("second")


@pytest.mark.parametrize("count", [16, 32, 48])
def test_answers_of_one_token_leave_what_others_read_as_it_is(count: int) -> None:
    """A row whose answer had ended wrote on, over the last token of its prompt, until the others' turn was over: who began with
    the same block was answered by what stood there then.
    """
    engine, asked = engine_of_a_gpu(), WORDS[: count + 5]

    def logprobs(name: str) -> Sequence[float]:
        return answers(engine, [Request(name, asked, 3, sampling=GREEDY, logprobs=0)])[0].logprobs

    before = logprobs("before")
    engine.add(Request("long", (9, 8, 7), 40, sampling=GREEDY))
    engine.step()
    for seed in range(3):
        engine.add(Request(f"one {seed}", WORDS[:count], 1, sampling=Sampling(1000.0, 0, 1.0), seed=seed))
        engine.step()
    while engine.busy:
        engine.step()
    assert logprobs("after") == pytest.approx(before, abs=1e-4)
