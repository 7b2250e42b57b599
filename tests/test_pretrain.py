"""Pretraining end to end on CPUs: any number of ranks, resumed anywhere, killed, damaged, drilled. Real ranks, signals and files."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from conftest import EVERYTHING, Done, Stoker, at_length, at_length_but, wait_for
from forked_ranks import Server, program, server
from stoker.training.checkpoint.reading import open_checkpoint

# Whole epochs of 101 samples, 7 a step: 29 steps, the last one smaller than the others.
TINY = (
    "--tokenizer.path", "bytes", "--preset", "small", "--model.depth", "2", "--context_length", "32", "--batch.tokens", "224", "--batch.micro", "2",
    "--data.validation", "0", "--log_every", "1", "--export", "false", "--timeout", "60s", "--max_samples", "101", "--eval_every", "0",
)  # fmt: skip
EPOCHS = ("--epochs", "2")
STEPS = 29
STEPS_KILLED = 40
KILLED = ("--max-steps", str(STEPS_KILLED), "--deterministic", "true")
KILLS = 8 if EVERYTHING else 3
# STOKER_TEST_RANKS=16 adds 16 ranks, which take as long as all others together.
RANKS = (1, 5, *((2, 3, 7) if EVERYTHING else ()), *map(int, os.environ.get("STOKER_TEST_RANKS", "").split()))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    draw = random.Random(0)
    words = ["".join(draw.choice("abcdefghijklmnop") for _ in range(draw.randint(2, 7))) for _ in range(300)]
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text("\n".join(" ".join(draw.choice(words) for _ in range(12)) for _ in range(300)))
    return path


# ---- ranks as torchrun would start them, forked from one process that has torch already: a start costs tenths of a second ----

FORKS = program("""
import torch, torch._dynamo, torch.distributed.fsdp  # DDP imports the second when it is made
from stoker.training.recipes import pretrain, stage

def work(job, rank):
    return stage.run(pretrain.main, job["words"])
""")


class Trained:
    """What a job of forked ranks left in its folder."""

    def __init__(self, folder: Path, codes: list[int]) -> None:
        self.folder, self.codes = folder, codes

    @property
    def losses(self) -> dict[int, float]:
        return losses(self.run)

    @property
    def run(self) -> Path:
        return under_torchrun(self.folder)

    def said(self, rank: int = 0) -> str:
        return (self.folder / f"rank-{rank}.log").read_text()

    def ids(self) -> dict[int, list[int]]:
        """Step -> sample ids of all ranks."""
        found: dict[int, list[int]] = {}
        for path in self.run.glob("samples-rank-*.jsonl"):
            for line in map(json.loads, path.read_text().splitlines()):
                found.setdefault(line["step"], []).extend(line["ids"])
        return found


def under_torchrun(folder: Path) -> Path:
    """The run directory that the recipe makes by itself: one per configuration."""
    return next((folder / "runs").glob("torchrun-*"), folder / "none yet")


def losses(run: Path) -> dict[int, float]:
    lines = (
        map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if (run / "metrics.jsonl").exists() else ()
    )
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


class Forks:
    def __init__(self, ranks: Server, data: Path) -> None:
        self._ranks, self._data = ranks, data

    def __call__(
        self,
        ranks: int,
        folder: Path,
        *words: str,
        stop_after: int | None = None,
        meanwhile: Callable[[list[int]], None] | None = None,
    ) -> Trained:
        """`stop_after`: SIGTERM to all ranks once that step's line is written. `meanwhile`: what to do with the running ranks' pids."""
        given = ["--data", str(self._data), "--cache", str(self._data.parent / "cache"), *TINY, *words]
        pids = self._ranks.begin(ranks, folder, words=given)
        try:
            if stop_after is not None:
                assert wait_for(
                    lambda: True if max(losses_so_far(under_torchrun(folder)), default=-1) >= stop_after else None, 60
                ), (folder / "rank-0.log").read_text()
                send(signal.SIGTERM, pids)
            if meanwhile is not None:
                meanwhile(pids)
        except BaseException:
            send(signal.SIGKILL, pids)
            raise
        finally:
            codes = self._ranks.codes()
        return Trained(folder, codes)


def send(number: int, pids: list[int]) -> None:
    """Some may have ended already."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def command(*words: str, data: Path) -> tuple[str, ...]:
    return (
        "train",
        "pretrain",
        "--data",
        str(data),
        "--cache",
        str(data.parent / "cache"),
        *TINY,
        "--quiet",
        "--no-preflight",
        *words,
    )


def losses_so_far(run: Path) -> list[int]:
    """Steps in a file that is being written: its last line may be half there."""
    text = (run / "metrics.jsonl").read_text() if (run / "metrics.jsonl").exists() else ""
    return [json.loads(line)["step"] for line in text.split("\n")[:-1]]


@pytest.fixture(scope="module")
def forks(text: Path) -> Iterator[Forks]:
    with server(FORKS) as ranks:
        yield Forks(ranks, text)


def close(one: dict[int, float], other: dict[int, float], rel: float) -> None:
    assert one.keys() == other.keys()
    worst = max(one, key=lambda step: abs(one[step] - other[step]) / other[step])
    assert one[worst] == pytest.approx(other[worst], rel=rel), f"step {worst}"


@pytest.fixture(scope="module")
def whole(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """One rank, from the first step to the last."""
    found = forks(1, tmp_path_factory.mktemp("whole") / "job", *EPOCHS, "--log_samples", "true")
    assert found.codes == [0], found.said()
    return found


# ---- any number of ranks, and any change of it ----


def test_every_number_of_ranks_gives_the_same_loss_curve(forks: Forks, tmp_path: Path) -> None:
    """11 samples a step, or 22 where there are more ranks than that: uneven over all of them but one."""
    samples = 11 if max(RANKS) <= 11 else 22
    found = {}
    for ranks in RANKS:
        job = forks(ranks, tmp_path / f"{ranks}", "--batch.tokens", str(samples * 32), "--max-steps", "12")
        assert job.codes == [0] * ranks, job.said()
        found[ranks] = job.losses
        assert len(found[ranks]) == 12
        close(found[ranks], found[1], 1e-5)
    assert found[1][11] < found[1][0] - 0.5, "and it learns"


def test_four_ranks_then_three_then_one_see_each_sample_once_an_epoch(
    forks: Forks, whole: Trained, tmp_path: Path
) -> None:
    kept = str(tmp_path / "checkpoints")
    ids: dict[int, list[int]] = {}
    curve: dict[int, float] = {}
    for ranks, stop_after in ((4, 4), (3, 11), (1, None)):
        job = forks(
            ranks,
            tmp_path / f"{ranks}",
            *EPOCHS,
            "--log_samples",
            "true",
            "--checkpoint.folder",
            kept,
            stop_after=stop_after,
        )
        assert job.codes == [0] * ranks, job.said()
        assert not ids.keys() & job.ids().keys() and (ranks == 4) == ("resumes at step" not in job.said())
        ids |= job.ids()
        curve |= job.losses
    assert sorted(ids) == list(range(STEPS)) and {step: sorted(one) for step, one in ids.items()} == {
        step: sorted(one) for step, one in whole.ids().items()
    }
    seen = [one for step in sorted(ids) for one in ids[step]]
    assert sorted(seen) == sorted([*range(101)] * 2), "none twice in an epoch, none missed"
    assert all(len(one) == 7 for step, one in ids.items() if step < STEPS - 1) and len(ids[STEPS - 1]) == 6
    # The 15th step ends the first epoch and begins the second.
    assert set(Counter(one for step in range(14) for one in ids[step]).values()) == {1}
    close(curve, whole.losses, 1e-4)


@pytest.fixture(scope="module")
def base(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder."""
    found = forks(1, tmp_path_factory.mktemp("base") / "job", "--max-steps", "5", "--export", "true")
    assert found.codes == [0], found.said()
    return found.run / "hf"


@pytest.mark.parametrize("method", at_length_but(["--qlora"], ["--lora", "--qlora"]))
def test_adapters_on_four_ranks_then_two_then_one_learn_what_one_rank_learns(
    method: str, forks: Forks, base: Path, tmp_path: Path
) -> None:
    words = (
        "--model.load", str(base), method, "--lora_rank", "4", "--lora_targets", "q_proj,up_proj,down_proj",
        "--batch.tokens", str(11 * 32), "--max-steps", "12", "--learning_rate", "3e-3", "--log_samples", "true",
    )  # fmt: skip
    alone = forks(1, tmp_path / "alone", *words)
    assert alone.codes == [0], alone.said()
    kept, curve, ids = str(tmp_path / "checkpoints"), dict[int, float](), dict[int, list[int]]()
    for ranks, stop_after in ((4, 2), (2, 6), (1, None)):
        job = forks(ranks, tmp_path / f"{ranks}", *words, "--checkpoint.folder", kept, stop_after=stop_after)
        assert job.codes == [0] * ranks, job.said()
        assert not ids.keys() & job.ids().keys() and (ranks == 4) == ("resumes at step" not in job.said())
        ids |= job.ids()
        curve |= job.losses
    assert {step: sorted(one) for step, one in ids.items()} == {
        step: sorted(one) for step, one in alone.ids().items()
    }, "each sample once"
    close(curve, alone.losses, 1e-5)
    (last,) = Path(kept).glob("step-*12")
    saved = open_checkpoint(str(last))
    learned = [name for name in saved.tensors if name.startswith("model.")]
    assert learned and all(".adapter." in name for name in learned), "the frozen weights stay where they are"
    assert all(saved.read(name).any() for name in learned if name.endswith(".adapter.up")), "every B has moved"


@at_length  # test_checkpoint.py reads shards on other numbers of ranks
def test_ddp_goes_on_sharded_over_other_ranks_and_back(forks: Forks, whole: Trained, tmp_path: Path) -> None:
    kept = str(tmp_path / "checkpoints")
    curve: dict[int, float] = {}
    for number, (strategy, ranks, stop_after) in enumerate((("ddp", 2, 4), ("fsdp", 3, 11), ("ddp", 2, None))):
        job = forks(
            ranks,
            tmp_path / str(number),
            *EPOCHS,
            "--strategy",
            strategy,
            "--checkpoint.folder",
            kept,
            stop_after=stop_after,
        )
        assert job.codes == [0] * ranks, job.said()
        assert not curve.keys() & job.losses.keys()
        curve |= job.losses
    close(curve, whole.losses, 1e-4)


def test_damaged_checkpoints_are_refused_by_name_and_the_one_before_is_taken(
    forks: Forks, whole: Trained, tmp_path: Path
) -> None:
    kept = tmp_path / "checkpoints"
    every = ("--checkpoint.folder", str(kept), "--every_steps", "3", "--keep", "9")
    first = forks(2, tmp_path / "first", *EPOCHS, *every, stop_after=9)
    steps = sorted(kept.glob("step-*"))
    assert first.codes == [0, 0] and len(steps) >= 3, steps
    newest, before, good = reversed(steps[-3:])
    flipped = newest / "rank-00001.safetensors"
    data = bytearray(flipped.read_bytes())
    data[len(data) // 2] ^= 1
    flipped.write_bytes(data)
    cut = before / "rank-00000.safetensors"
    os.truncate(cut, cut.stat().st_size - 100)
    second = forks(2, tmp_path / "second", *EPOCHS, *every)
    assert second.codes == [0, 0], second.said()
    assert re.search(rf"{newest.name} is not a valid checkpoint: .*rank-00001.safetensors", second.said()), (
        second.said()
    )
    assert re.search(rf"{before.name} is not a valid checkpoint: .*rank-00000.safetensors", second.said()), (
        second.said()
    )
    step = int(good.name.removeprefix("step-"))
    assert f"resumes at step {step} from {good}" in second.said() and min(second.losses) == step
    close({**first.losses, **second.losses}, whole.losses, 1e-4)


def test_a_checkpoint_of_another_optimizer_is_one_line_of_a_rank(forks: Forks, tmp_path: Path) -> None:
    """Found in the ranks: what is in the run's own folder."""
    assert forks(1, tmp_path / "one", "--max-steps", "2", "--checkpoint.folder", str(tmp_path / "kept")).codes == [0]
    other = forks(
        1, tmp_path / "two", "--max-steps", "4", "--checkpoint.folder", str(tmp_path / "kept"), "--optimizer", "muon"
    )
    assert (
        other.codes == [78]
        and "has the state of optim.kind adamw, not muon" in other.said()
        and "Traceback" not in other.said()
    )


def test_three_ranks_go_on_bit_for_bit(forks: Forks, tmp_path: Path) -> None:
    """DDP rebuilds its buckets after its first backward: with three ranks the order of adding would show."""
    words = ("--max-steps", "16", "--deterministic", "true", "--model.dropout", "0.1")
    alone = forks(3, tmp_path / "alone", *words)
    kept = ("--checkpoint.folder", str(tmp_path / "kept"))
    first = forks(3, tmp_path / "first", *words, *kept, "--every_steps", "4", stop_after=4)
    second = forks(3, tmp_path / "second", *words, *kept)
    assert alone.codes == first.codes == second.codes == [0] * 3, second.said()
    assert min(second.losses) > 3 and {**first.losses, **second.losses} == alone.losses


def test_an_epoch_goes_on_with_another_batch_and_ends_where_it_ends(forks: Forks, tmp_path: Path) -> None:
    kept = ("--epochs", "1", "--log_samples", "true", "--checkpoint.folder", str(tmp_path / "kept"))
    first = forks(1, tmp_path / "first", *kept, stop_after=5)
    seen = [one for ids in first.ids().values() for one in ids]
    second = forks(2, tmp_path / "second", *kept, "--batch.tokens", "352")
    assert first.codes == [0] and second.codes == [0, 0], second.said()
    assert sorted(seen + [one for ids in second.ids().values() for one in ids]) == list(range(101)), (
        "none twice, none missed"
    )


def test_a_damaged_checkpoint_that_is_asked_for_is_refused_by_all_ranks(forks: Forks, tmp_path: Path) -> None:
    made = forks(1, tmp_path / "made", "--max-steps", "2", "--checkpoint.folder", str(tmp_path / "kept"))
    assert made.codes == [0]
    part = tmp_path / "kept" / "step-00000002" / "rank-00000.safetensors"
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.write_bytes(data)
    again = forks(2, tmp_path / "again", "--max-steps", "4", "--resume", str(part.parent))
    assert (
        again.codes == [65, 65]
        and "is damaged" in again.said()
        and "rank-00000.safetensors" in again.said()
        and "Traceback" not in again.said(1)
    )


def test_the_best_checkpoint_stays_and_auto_micro_batches_count_in_the_batch(forks: Forks, tmp_path: Path) -> None:
    words = (
        "--max-steps",
        "9",
        "--data.validation",
        "0.2",
        "--eval_every",
        "2",
        "--every_steps",
        "3",
        "--keep",
        "1",
        "--learning_rate",
        "0.02",
    )
    job = forks(1, tmp_path / "job", *words, "--batch.tokens", "0", "--batch.micro", "auto", "--accumulation", "2")
    assert job.codes == [0] and "16 a step" in job.said(), job.said()
    scores = {}
    for path in (job.run / "checkpoints").glob("step-*/manifest.json"):
        told = json.loads(path.read_text())
        scores[told["step"]] = told["score"]
    values = {
        line["step"] + 1: line["val_loss"]
        for line in map(json.loads, (job.run / "metrics.jsonl").read_text().splitlines())
        if "val_loss" in line
    }
    best = min(values, key=lambda step: values[step])
    assert (
        sorted(values) == [2, 4, 6, 8, 9]
        and scores[best] == values[best]
        and max(scores) == 9
        and len(scores) == len({best, 9})
    )


def test_a_second_signal_means_now(forks: Forks, tmp_path: Path) -> None:
    def twice(pids: list[int]) -> None:
        assert wait_for(lambda: True if losses_so_far(under_torchrun(tmp_path / "job")) else None, 60)
        os.kill(pids[0], signal.SIGSTOP)  # both are there when it wakes up
        for _ in range(2):
            os.kill(pids[0], signal.SIGINT)
            os.kill(pids[0], signal.SIGTERM)
        os.kill(pids[0], signal.SIGCONT)

    job = forks(1, tmp_path / "job", "--max-steps", "100000", meanwhile=twice)
    assert job.codes in ([-signal.SIGINT], [-signal.SIGTERM]), job.said()


def test_a_folder_whose_run_is_done_has_nothing_to_do(forks: Forks, tmp_path: Path) -> None:
    words = ("--max-steps", "2", "--checkpoint.folder", str(tmp_path / "kept"))
    assert forks(1, tmp_path / "one", *words).codes == [0]
    again = forks(2, tmp_path / "two", *words)
    assert again.codes == [0, 0] and "nothing to do: 2 of 2 steps are done" in again.said() and again.losses == {}


# ---- killed ----


@pytest.fixture(scope="module")
def unharmed(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of two ranks that nobody killed."""
    found = forks(2, tmp_path_factory.mktemp("unharmed") / "job", *KILLED)
    assert found.codes == [0, 0] and len(found.losses) == STEPS_KILLED, found.said()
    return found.losses


@at_length  # kills in the middle of saves: test_checkpoint.py; of a rank and of a whole job, bit for bit: the test below
def test_kills_during_saves_never_leave_a_damaged_checkpoint_and_lose_no_step(
    forks: Forks, unharmed: dict[int, float], tmp_path: Path
) -> None:
    """Of one rank and of all in turn; two more under the launcher below, two hundred in benchmarks/kills.py."""
    from stoker.training.checkpoint.reading import verify

    seed = os.getpid()
    draw = random.Random(seed)
    kept = tmp_path / "checkpoints"

    def steps() -> list[Path]:
        return [path for path in kept.glob("step-*") if path.suffix != ".tmp"]

    def kill(pids: list[int]) -> None:
        before = max((path.name for path in steps()), default="")

        def due() -> bool | None:  # on a fast machine the run may be over before all kills are done
            return (
                max((path.name for path in steps()), default="") > before
                or not any(Path(f"/proc/{pid}").exists() for pid in pids)
                or None
            )

        assert wait_for(due, 60), "no new checkpoint"
        time.sleep(draw.uniform(0, 0.03))
        wait_for(lambda: True if any(kept.glob("*.tmp")) else None, 0.2)
        if life % 2:
            send(signal.SIGKILL, [draw.choice(pids)])
            time.sleep(draw.uniform(0, 0.3))  # then a launcher ends the others
        send(signal.SIGKILL, pids)

    curve: dict[int, float] = {}
    resumed = []
    for life in range(KILLS + 1):
        job = forks(
            2,
            tmp_path / str(life),
            *KILLED,
            "--every_steps",
            "1",
            "--checkpoint.folder",
            str(kept),
            meanwhile=kill if life < KILLS else None,
        )
        assert (life < KILLS and -signal.SIGKILL in job.codes) or job.codes == [0, 0], (
            f"seed {seed}, life {life}: {job.said()}"
        )
        assert "not a valid checkpoint" not in job.said() and "not a complete checkpoint" not in job.said(), (
            f"seed {seed}: {job.said()}"
        )
        assert [wrong for path in steps() for wrong in verify(str(path))] == [], f"seed {seed}, life {life}"
        resumed.append(int((re.search(r"resumes at step (\d+) from", job.said()) or ["", "0"])[1]))
        curve |= job.losses
    assert resumed == sorted(resumed) and resumed[0] == 0 and resumed[-1] >= KILLS, (
        "each life began later than the one before"
    )
    assert curve == unharmed, f"seed {seed}: not the same bits"
    assert not list(kept.glob("*.tmp")), "what the dead left unfinished is swept"


STEP_LINE = re.compile(
    r"CPU0:INFO \| \[CPU 0\] Step \[\d+/40\] \| Loss: \d+\.\d{4} \| LR: \d\.\d\de-\d\d \| Grad Norm: \d+\.\d{4} \| ETA: (\?:\?\?|\d+:\d\d)"
)


@at_length
def test_a_killed_rank_a_stop_and_a_killed_job_end_in_the_run_that_nobody_touched(
    stoker: Stoker, text: Path, unharmed: dict[int, float]
) -> None:
    """One run under the launcher: rank 1 killed, restarted by the launcher; stopped by SIGTERM; all of it killed; then left alone."""
    words = command(
        *KILLED, "--every_steps", "1", "--nproc-per-node", "2", "--max-restarts", "5", "--name", "story", data=text
    )
    env = {"OMP_NUM_THREADS": "1"}

    def go() -> subprocess.Popen[bytes]:
        return stoker.start(*words, env=env, stdout=open(stoker.cwd / "out.txt", "ab"))

    def beyond(step: int) -> int:
        """Waits until more steps are done."""
        found = wait_for(
            lambda: (
                max(losses_so_far(stoker.latest), default=-1)
                if max(losses_so_far(stoker.latest), default=-1) >= step
                else None
            ),
            90,
        )
        assert found is not None, (stoker.cwd / "out.txt").read_text()
        return int(found)

    def ranks() -> dict[int, int]:
        up = [event for event in stoker.result().events if event["event"] == "rank-up"]
        return {event["rank"]: event["pid"] for event in up[-2:]}

    job = go()
    beyond(2)
    os.kill(ranks()[1], signal.SIGKILL)
    assert wait_for(lambda: True if (stoker.latest / "attempt-1" / "rank-0.log").exists() else None, 90)
    wait_for(lambda: True if b"resumes at step" in stoker.result().log(0, attempt=1) else None, 90)
    done = beyond(max(losses_so_far(stoker.latest), default=0) + 3)
    job.terminate()
    assert job.wait(60) == 143
    assert stoker.result().verdict["status"] == "stopped" and b"resumes at step" in stoker.result().log(0, attempt=1)
    last = max(losses(stoker.latest))
    assert (
        done <= last < STEPS_KILLED - 1
        and (stoker.latest / "checkpoints" / f"step-{last + 1:08d}" / "manifest.json").exists()
    ), "the stop saved what was done"

    job = go()
    beyond(last + 3)
    victims = [job.pid, *ranks().values()]
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    job.wait(100)
    assert f"resumes at step {last + 1} from".encode() in stoker.result().log(0, attempt=2)

    job = go()
    assert job.wait(90) == 0, (stoker.cwd / "out.txt").read_text()[-3000:]
    assert len(list((stoker.cwd / "runs").iterdir())) == 2, "one run, and the link to it"
    assert losses(stoker.latest) == unharmed, "not the same bits"
    out = (stoker.cwd / "out.txt").read_text()
    assert "not a valid checkpoint" not in out
    lines = [json.loads(line) for line in (stoker.latest / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(STEPS_KILLED)) and all(
        line["tokens"] == 224 * (line["step"] + 1) for line in lines
    )
    assert (
        all({"step", "loss", "tokens", "grad_norm", "lr", "tokens_per_s"} <= line.keys() for line in lines)
        and lines[-1]["tokens_per_s"] > 0
    )
    assert len(STEP_LINE.findall(out)) >= STEPS_KILLED // 2, out[:2000]  # a launcher that is killed takes some with it
    config = (stoker.latest / "config.yaml").read_text()
    assert f"  max_steps: {STEPS_KILLED}\n" in config and "  context_length: 32\n" in config


# ---- no number ----


def test_a_nan_in_one_ranks_attention_is_traced_by_the_run_the_record_and_the_command(
    stoker: Stoker, text: Path
) -> None:
    words = command(
        "--max-steps",
        "6",
        "--nproc-per-node",
        "2",
        "--nan.inject",
        "layers.1.attention@3@1",
        "--every_steps",
        "1",
        data=text,
    )
    done = stoker.torch(*words)
    assert (
        done.code == 1
        and done.verdict["cause"] == "nan.traced"
        and done.verdict["rank"] == 1
        and not done.verdict["retryable"]
    ), done.err
    for words_ in ("step 3: NaN first in ", "layers.1.attention", "(forward) on rank 1, sample"):
        assert words_ in done.verdict["summary"] and words_ in done.out
    dump = done.run_dir / "nan_step_3"
    assert {"report.json", "batch.json", "activations.safetensors", "gradients.safetensors"} <= {
        path.name for path in (dump / "rank-1").iterdir()
    }
    assert (dump / "rank-0" / "parameters.safetensors").exists() and "NaN ACTIVATION DETECTED [CPU 1]" in done.out
    kept = {path.name for path in (done.run_dir / "checkpoints").glob("step-*")}  # on a slow disk some are skipped
    assert kept and kept <= {f"step-{step:08d}" for step in (1, 2, 3)}, "the bad step is in no checkpoint"
    assert "step-00000003" in kept or "the one before is still being written" in done.out, done.out
    fix = done.verdict["fix"]
    assert "nan.inject layers.1.attention@3@1" in done.verdict["summary"] and "nan.inject" in fix[0]
    assert not any("--preset stable" in line for line in fix), "no advice for a real fault"
    shown = stoker("nan")
    assert "nothing to fix: nan.inject layers.1.attention@3@1" in shown.out and "--preset stable" not in shown.out
    assert shown.code == 0 and done.verdict["summary"] in shown.out and "rank 0 [CPU 0]: fine here" in shown.out
    report = json.loads(stoker("nan", "--json").out)["reports"][1]
    assert (report["step"], report["rank"], report["module"], report["phase"], report["what"]) == (
        3,
        1,
        "layers.1.attention",
        "forward",
        "NaN",
    )


def test_an_inf_in_one_gradient_is_traced_to_its_parameter_and_rank(forks: Forks, stoker: Stoker) -> None:
    for where, ranks in (
        ("grad:layers.0.mlp.down.weight@3@1", "on rank 1"),
        ("grad:layers.0.mlp.down.weight@3", "on rank 0 and all others"),
    ):
        job = forks(2, stoker.cwd / ranks, "--max-steps", "6", "--nan.inject", where)
        summary = rf"step 3: Inf first in the gradient of layers\.0\.mlp\.down\.weight \(\S+\) {ranks}"
        assert job.codes == [1, 1] and re.search(summary, job.said(1 if "@1" in where else 0)), job.said()
        assert sorted(job.losses) == [0, 1, 2]
        shown = stoker("nan", str(job.run / "nan_step_3"))
        assert shown.code == 0 and re.search(summary, shown.out), shown.out + shown.err


HOST = ("--model.depth", "3", "--recompute", "1", "--activations")  # one block of each kind


def test_activations_on_the_host_change_no_bit_of_a_run_nor_what_a_nan_is_traced_to(
    forks: Forks, tmp_path: Path
) -> None:
    """Two ranks, several micro-batches a step."""
    plain, moved = (forks(2, tmp_path / where, "--max-steps", "4", *HOST, where) for where in ("device", "host"))
    assert plain.codes == moved.codes == [0, 0] and len(moved.losses) == 4, moved.said()
    assert plain.losses == moved.losses and "copied within memory" in moved.said()
    job = forks(2, tmp_path / "nan", "--max-steps", "6", *HOST, "host", "--nan.inject", "layers.1.attention@3@1")
    assert job.codes == [1, 1] and "step 3: NaN first in " in job.said(1), job.said(1)
    assert re.search(r"layers\.1\.attention \(forward\) on rank 1", job.said(1)), job.said(1)


# ---- fp16 ----


def scales(job: Trained) -> list[float]:
    lines = map(json.loads, (job.run / "metrics.jsonl").read_text().splitlines())
    return [line["loss_scale"] for line in lines if "loss" in line]


HALF = ("--dtype", "fp16", "--deterministic", "true", "--max-steps", "10")
OVERFLOW = ("--nan.inject", "grad:layers.0.mlp.down.weight@3@0")


def test_fp16_learns_what_fp32_does(forks: Forks, tmp_path: Path) -> None:
    whole, half = (forks(2, tmp_path / dtype, *HALF[2:], "--dtype", dtype) for dtype in ("fp32", "fp16"))
    close(half.losses, whole.losses, rel=3e-3)
    assert scales(half) == [65536.0] * 10 and "float16 on 2" in half.said() and "float32 on 2" in whole.said()


@pytest.mark.parametrize("kind", ["adamw", *(pytest.param(kind, marks=at_length) for kind in ("adamw8bit", "muon"))])
def test_a_gradient_that_overflows_in_fp16_skips_one_update_and_a_resumed_run_has_the_same_bits(
    kind: str, forks: Forks, tmp_path: Path
) -> None:
    """The overflow is on one rank alone: both skip."""
    words = (*HALF, *OVERFLOW, "--optimizer", kind)
    job = forks(2, tmp_path / "whole", *words)
    assert job.codes == [0, 0] and scales(job) == [65536.0] * 4 + [32768.0] * 6, job.said()
    assert "step 3: a gradient overflowed in fp16; update skipped" in job.said() and "NaN" not in job.said()
    kept = ("--checkpoint.folder", str(tmp_path / "kept"), "--every_steps", "1")
    first = forks(2, tmp_path / "first", *words, *kept, stop_after=5)
    assert first.codes == [0, 0] and len(first.losses) < 10, first.said()
    rest = forks(2, tmp_path / "rest", *words, *kept)
    assert {**first.losses, **rest.losses} == job.losses, (rest.said(), job.losses)
    assert scales(rest)[-1] == 32768.0 and "resumes at step" in rest.said()


def test_a_loss_that_is_no_number_in_fp16_is_the_models_own(forks: Forks, tmp_path: Path) -> None:
    job = forks(2, tmp_path, *HALF, "--nan.inject", "layers.1.attention@3@1")
    assert job.codes == [1, 1] and "step 3: NaN first in " in job.said(1), job.said(1)


# ---- beside the launcher ----


@at_length
def test_plain_torchrun_a_profile_and_tensorboard(stoker: Stoker, text: Path) -> None:
    pytest.importorskip("tensorboard")
    words = (
        "--preset",
        "debug",
        "--data",
        str(text),
        "--cache",
        str(text.parent / "cache"),
        "--tokenizer.path",
        "bytes",
        "--context_length",
        "32",
    )
    argv = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "-m",
        "stoker.training.recipes.pretrain",
        *words,
    ]
    env = {**stoker.env, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    ran = subprocess.run(
        [*argv, "--profile", "--log-to", "tensorboard", "--export", "false"],
        cwd=stoker.cwd,
        env=env,
        capture_output=True,
        timeout=120,
        check=False,
    )
    done = Done(ran.returncode, ran.stdout, ran.stderr, stoker.cwd)
    run = under_torchrun(stoker.cwd)
    assert done.code == 0 or "terminate called without an active exception" in done.err, (
        done.err
    )  # torch 2.13's gloo at exit
    assert len(losses(run)) == 10 and "Validation after step 5" in done.out and (run / "config.yaml").exists()
    assert len(re.findall(r"Step \[\d+/10\]", done.out)) == 20, "each rank has its lines"
    trace = json.loads((run / "profile.json").read_text())
    assert any(event.get("name", "").startswith("aten::") for event in trace["traceEvents"])
    assert len(re.findall(r"\] +\d+\.\d% +\d+\.\d\d ms +\d+ × \S+", done.out)) == 10, done.out
    (events,) = (run / "tensorboard").glob("events.out.tfevents.*")
    assert events.stat().st_size > 500


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H200", 989.0),
        ("NVIDIA H20-3e", 148.0),
        ("NVIDIA RTX 6000 Ada Generation", 364.2),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA RTX A1000", None),
        ("NVIDIA RTX A3000", None),
        ("NVIDIA RTX A4000", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 3080 with Max-Q Design", None),
        ("NVIDIA GeForce RTX 3080 Ti", None),
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", None),
        ("Quadro P400", None),
    ],
)
def test_a_cards_peak_is_its_own_or_unknown(name: str, teraflops: float | None) -> None:
    from stoker.training.fit.cards import peak_of

    assert peak_of(name) == (None if teraflops is None else teraflops * 1e12)


# ---- what can't be trained ----


def test_a_micro_batch_that_is_the_whole_share_stays_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given as samples, not as tokens: the share is known, and cut into nothing smaller than it must be."""
    from types import SimpleNamespace

    from stoker.training.recipes.build import micro_batch

    monkeypatch.delenv("STOKER_MICRO_BATCH_HALVINGS", raising=False)
    group: Any = SimpleNamespace(world=2, strategy="ddp", smallest=lambda value: value)
    for micro, accumulation in ((48, 1), (96, 1), (100, 3), (7, 2)):
        batch = SimpleNamespace(tokens=0, micro=micro, accumulation=accumulation)
        data, parallel = SimpleNamespace(context_length=32), SimpleNamespace(balance="off")
        c: Any = SimpleNamespace(batch=batch, data=data, parallel=parallel)
        unused: Any = None
        assert micro_batch(c, unused, unused, group, unused, packed=False) == micro


def test_what_cannot_be_trained_is_one_line_before_any_rank_starts(stoker: Stoker, forks: Forks, text: Path) -> None:
    assert forks(1, stoker.cwd / "job", "--max-steps", "2", "--checkpoint.folder", str(stoker.cwd / "kept")).codes == [
        0
    ]
    stoker.script("empty.txt", "")
    stoker.script("short.txt", "twenty-one letters !!")
    kept = ("--checkpoint.folder", "kept")
    cases: list[tuple[list[str], int, str]] = [
        (["--lerning_rate", "1"], 64, "unknown option --lerning_rate (did you mean --learning_rate?)"),
        (["--data", "empty.txt"], 65, "empty.txt is empty"),
        (["--data", "short.txt"], 65, "data.context_length is 32, longer than the data"),
        (["--data", "absent.txt"], 66, "absent.txt does not exist"),
        (["--model.vocab_size", "100"], 64, "model.vocab_size 100 is too small for the tokenizer's 260 tokens"),
        ([*kept, "--model.depth", "3"], 78, "is of another model: model.layers is 2 there and 3 here"),
        ([*kept, "--tokenizer.path=", "--tokenizer.vocab_size", "300"], 78, "was trained with another tokenizer"),
        (
            [*kept, "--tokenizer.path=", "--tokenizer.vocab_size", "700"],
            78,
            "was trained with another tokenizer",
        ),  # and model.vocab_size is another, too
        (["--checkpoint.folder", "short.txt"], 73, "checkpoint.folder short.txt is a file"),
        ([*kept, "--optimizer", "muon"], 78, "has the state of optim.kind adamw, not muon"),
        (["--checkpoint.resume", "nowhere"], 66, "checkpoint.resume nowhere: there is no checkpoint"),
        (["--nan.inject", "layers.1"], 64, "is not WHERE@STEP"),
    ]
    for words, code, says in cases:
        data = Path(words[1]) if words[0] == "--data" else text
        done = stoker(*command("--max-steps", "4", *(words[2:] if words[0] == "--data" else words), data=data))
        lines = [line for line in done.err.splitlines() if line.startswith("stoker: ")]
        assert done.code == code and len(lines) == 1 and says in lines[0] and lines[0] == done.err.splitlines()[-1], (
            words,
            done.code,
            done.err,
        )
        assert not (stoker.cwd / "runs").exists(), words


def test_max_steps_that_the_checkpoint_has_passed_is_said_before_a_rank_starts(
    stoker: Stoker, forks: Forks, text: Path
) -> None:
    assert forks(1, stoker.cwd / "job", "--max-steps", "2", "--checkpoint.folder", str(stoker.cwd / "kept")).codes == [
        0
    ]
    for steps, says in ((1, "--max-steps 3 would make 1 more"), (2, "--max-steps 4 would make 2 more"), (3, "")):
        done = stoker(
            *command("--max-steps", str(steps), "--checkpoint.resume", "kept", "--nproc-per-node", "0", data=text)
        )
        said = [line for line in done.err.splitlines() if line.startswith("train.max_steps")]
        assert len(said) == bool(says) and says in "".join(said), done.err
