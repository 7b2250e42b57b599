"""Pretraining end to end on CPUs: any number of ranks, resumed anywhere, killed, damaged, drilled. Real ranks, signals and files."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from conftest import Done, Stoker, wait_for  # noqa: E402

HERE = Path(__file__).parent
# Whole epochs of 201 samples, 7 a step: 58 steps, the last one smaller than some numbers of ranks.
TINY = (
    "--tokenizer.path", "bytes", "--preset", "small", "--model.depth", "2", "--context_length", "32", "--batch.tokens", "224", "--batch.micro", "2",
    "--data.validation", "0", "--log_every", "1", "--export", "false", "--timeout", "60s", "--max_samples", "201", "--eval_every", "0",
)  # fmt: skip
EPOCHS = ("--epochs", "2")
DETERMINISTIC = ("--deterministic", "true")
STEPS = 58
# 16 ranks take as long as all others together: STOKER_TEST_RANKS=16 adds them.
RANKS = (1, 2, 3, 5, 7, *map(int, os.environ.get("STOKER_TEST_RANKS", "").split()))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    draw = random.Random(0)
    words = ["".join(draw.choice("abcdefghijklmnop") for _ in range(draw.randint(2, 7))) for _ in range(300)]
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text("\n".join(" ".join(draw.choice(words) for _ in range(12)) for _ in range(300)))
    return path


# ---- ranks as torchrun would start them, forked from one process that has torch already: a start costs tenths of a second ----

FORKS = """
import json, os, sys, traceback
import torch, torch._dynamo, torch.distributed.fsdp  # DDP imports the second when it is made
from stoker.training.recipes import pretrain

for line in sys.stdin:
    job = json.loads(line)
    pids = []
    for rank in range(job["ranks"]):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.chdir(job["folder"])
                log = os.open(f"rank-{rank}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
                os.dup2(log, 1)
                os.dup2(log, 2)
                os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(job["ranks"]), LOCAL_WORLD_SIZE=str(job["ranks"]))
                os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(job["port"]))
                code = pretrain.main(job["words"])
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        pids.append(pid)
    print(json.dumps(pids), flush=True)
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]), flush=True)
"""


class Trained:
    """What a job of forked ranks left in its folder."""

    def __init__(self, folder: Path, codes: list[int]) -> None:
        self.folder, self.codes = folder, codes

    @property
    def losses(self) -> dict[int, float]:
        return losses(self.folder / "runs" / "torchrun")

    def said(self, rank: int = 0) -> str:
        return (self.folder / f"rank-{rank}.log").read_text()

    def ids(self) -> dict[int, list[int]]:
        """Step -> sample ids of all ranks."""
        found: dict[int, list[int]] = {}
        for path in (self.folder / "runs" / "torchrun").glob("samples-rank-*.jsonl"):
            for line in map(json.loads, path.read_text().splitlines()):
                found.setdefault(line["step"], []).extend(line["ids"])
        return found


def losses(run: Path) -> dict[int, float]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if (run / "metrics.jsonl").exists() else ()
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


class Forks:
    def __init__(self, process: subprocess.Popen[str], data: Path) -> None:
        self._process, self._data = process, data

    def __call__(self, ranks: int, folder: Path, *words: str, stop_after: int | None = None) -> Trained:
        """`stop_after`: SIGTERM to all ranks once that step's line is written."""
        assert self._process.stdin is not None and self._process.stdout is not None
        folder.mkdir(parents=True)
        with socket.socket() as held:
            held.bind(("127.0.0.1", 0))
            port = held.getsockname()[1]
        given = ["--data", str(self._data), "--cache", str(self._data.parent / "cache"), *TINY, *words]
        self._process.stdin.write(json.dumps({"ranks": ranks, "folder": str(folder), "words": given, "port": port}) + "\n")
        self._process.stdin.flush()
        pids = json.loads(self._process.stdout.readline())
        if stop_after is not None:
            run = folder / "runs" / "torchrun"
            assert wait_for(lambda: True if max(losses_so_far(run), default=-1) >= stop_after else None, 60), (folder / "rank-0.log").read_text()
            for pid in pids:
                os.kill(pid, signal.SIGTERM)
        return Trained(folder, json.loads(self._process.stdout.readline()))


def losses_so_far(run: Path) -> list[int]:
    """Steps in a file that is being written: its last line may be half there."""
    text = (run / "metrics.jsonl").read_text() if (run / "metrics.jsonl").exists() else ""
    return [json.loads(line)["step"] for line in text.split("\n")[:-1]]


@pytest.fixture(scope="module")
def forks(text: Path) -> Iterator[Forks]:
    env = {key: value for key, value in os.environ.items() if not key.startswith(("STOKER_", "RANK", "WORLD_SIZE", "MASTER_", "CUDA_"))}
    process = subprocess.Popen(
        [sys.executable, "-c", FORKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**env, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    )
    yield Forks(process, text)
    assert process.stdin is not None
    process.stdin.close()
    process.wait(30)


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
    """11 samples a step: uneven over 2, 3, 5, 7 and, some of them empty-handed never being an option, 16 get 22."""
    samples = 11 if max(RANKS) <= 11 else 22
    found = {}
    for ranks in RANKS:
        job = forks(ranks, tmp_path / f"{ranks}", "--batch.tokens", str(samples * 32), "--max-steps", "12")
        assert job.codes == [0] * ranks, job.said()
        found[ranks] = job.losses
        assert len(found[ranks]) == 12
        close(found[ranks], found[1], 1e-5)
    assert found[1][11] < found[1][0] - 0.5, "and it learns"


def test_four_ranks_then_three_then_one_see_each_sample_once_an_epoch(forks: Forks, whole: Trained, tmp_path: Path) -> None:
    kept = str(tmp_path / "checkpoints")
    ids: dict[int, list[int]] = {}
    curve: dict[int, float] = {}
    for ranks, stop_after in ((4, 9), (3, 24), (1, None)):
        job = forks(ranks, tmp_path / f"{ranks}", *EPOCHS, "--log_samples", "true", "--checkpoint.folder", kept, stop_after=stop_after)
        assert job.codes == [0] * ranks, job.said()
        assert not ids.keys() & job.ids().keys() and (ranks == 4) == ("resumes at step" not in job.said())
        ids |= job.ids()
        curve |= job.losses
    assert sorted(ids) == list(range(STEPS)) and {step: sorted(one) for step, one in ids.items()} == {step: sorted(one) for step, one in whole.ids().items()}
    seen = [one for step in sorted(ids) for one in ids[step]]
    assert sorted(seen) == sorted([*range(201)] * 2), "none twice in an epoch, none missed"
    assert all(len(one) == 7 for step, one in ids.items() if step < STEPS - 1) and len(ids[STEPS - 1]) == 3
    # The 29th step ends the first epoch and begins the second.
    assert set(Counter(one for step in range(28) for one in ids[step]).values()) == {1}
    close(curve, whole.losses, 1e-4)


def test_ddp_goes_on_sharded_over_other_ranks_and_back(forks: Forks, whole: Trained, tmp_path: Path) -> None:
    kept = str(tmp_path / "checkpoints")
    curve: dict[int, float] = {}
    for number, (strategy, ranks, stop_after) in enumerate((("ddp", 2, 9), ("fsdp", 3, 24), ("ddp", 2, None))):
        job = forks(ranks, tmp_path / str(number), *EPOCHS, "--strategy", strategy, "--checkpoint.folder", kept, stop_after=stop_after)
        assert job.codes == [0] * ranks, job.said()
        assert not curve.keys() & job.losses.keys()
        curve |= job.losses
    close(curve, whole.losses, 1e-4)


def test_damaged_checkpoints_are_refused_by_name_and_the_one_before_is_taken(forks: Forks, whole: Trained, tmp_path: Path) -> None:
    kept = tmp_path / "checkpoints"
    every = ("--checkpoint.folder", str(kept), "--every_steps", "4", "--keep", "9")
    first = forks(2, tmp_path / "first", *EPOCHS, *every, stop_after=20)
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
    assert re.search(rf"{newest.name} is not a sound checkpoint: .*rank-00001.safetensors", second.said()), second.said()
    assert re.search(rf"{before.name} is not a sound checkpoint: .*rank-00000.safetensors", second.said()), second.said()
    step = int(good.name.removeprefix("step-"))
    assert f"resumes at step {step} from {good}" in second.said() and min(second.losses) == step
    close({**first.losses, **second.losses}, whole.losses, 1e-4)


def test_a_checkpoint_of_another_optimizer_or_sharded_rules_that_have_no_shards_are_one_line_of_a_rank(forks: Forks, tmp_path: Path) -> None:
    """Found in the ranks: what is in the run's own folder, and what only the wrapped model tells."""
    muon = forks(2, tmp_path / "muon", "--max-steps", "2", "--optimizer", "muon", "--strategy", "fsdp")
    assert set(muon.codes) == {78} and "stoker: optim.kind muon needs whole matrices on each rank" in muon.said() and "Traceback" not in muon.said()
    assert forks(1, tmp_path / "one", "--max-steps", "2", "--checkpoint.folder", str(tmp_path / "kept")).codes == [0]
    other = forks(1, tmp_path / "two", "--max-steps", "4", "--checkpoint.folder", str(tmp_path / "kept"), "--optimizer", "muon")
    assert other.codes == [78] and "has the state of optim.kind adamw, not muon" in other.said() and "Traceback" not in other.said()
