"""Models in shards (FSDP2) over gloo: they learn what one process learns, and hold what the plan says."""

from __future__ import annotations

import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from safetensors.torch import load_file, save_file

from conftest import EVERYTHING, at_length, at_length_but
from forked_ranks import Server, program, server
from stoker.contract.evidence import Evidence, RankError, RankExit
from stoker.contract.frozen import replace
from stoker.control.verdict.judge import judge
from stoker.training.fit.accumulation import choose
from stoker.training.fit.footprint import Footprint
from stoker.training.fit.terms import Job
from stoker.training.model import adapters, hf, hf_stream, nf4
from stoker.training.model.config import AdapterConfig, ModelConfig, parameters
from stoker.training.model.decoder import Decoder
from stoker.training.model.hf_config import stored_in
from stoker.training.model.hf_files import places
from stoker.training.model.hf_read import Added, Source
from stoker.training.model.nf4_shards import UNIT, Codes

# What a rank counts while its recipe runs goes to counted-RANK.json.
PROGRAM = program("""
import ctypes
from importlib import import_module
import torch, torch._dynamo, torch.distributed.fsdp
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor
from stoker.training.optim import host
from stoker.training.recipes import stage

groups, counted = [], {"gradients": 0, "read": 0}

def unsharded(param):
    whole = getattr(param, "_unsharded_param", None)
    found = (None if whole is None else whole.grad, param.unsharded_accumulated_grad)
    return sum(one.nbytes for one in found if one is not None)

def live():
    params = [param for group in groups for param in group.fsdp_params]
    shards = sum(one.sharded_param.grad.to_local().nbytes for one in params if one.sharded_param.grad is not None)
    buffers = {id(state): state.reduce_scatter_input.nbytes for group in groups for state in states(group)}
    return shards + sum(map(unsharded, params)) + sum(buffers.values())

def states(group):
    found = getattr(group.comm_ctx, "reduce_scatter_states", None)  # torch before 2.13 keeps one
    return found if found is not None else [one for one in [group.comm_ctx.reduce_scatter_state] if one is not None]

def look(method):
    def looked(self, *args, **kwargs):
        counted["gradients"] = max(counted["gradients"], live())
        found = method(self, *args, **kwargs)
        counted["gradients"] = max(counted["gradients"], live())
        return found
    return looked

def read(method):
    def counting(*args):
        count = method(*args)
        counted["read"] += count
        return count
    return counting

def visits(method):
    def counting(*args, **kwargs):
        counted["visits"] += 1
        return method(*args, **kwargs)
    return counting

def work(job, rank):
    if "local" in job:  # ranks of a host
        os.environ.update(LOCAL_WORLD_SIZE=str(job["local"]), LOCAL_RANK=str(rank % job["local"]))
    if job.get("apart") and rank >= job["local"]:  # a disk of its own where rank 0's has the runs
        libc, runs = ctypes.CDLL(None, use_errno=True), os.path.join(job["folder"], "runs").encode()
        os.makedirs(runs, exist_ok=True)
        ways = (libc.unshare(0x20000), libc.mount(b"none", b"/", None, 0x44000, None), libc.mount(b"none", runs, b"tmpfs", 0, None))
        assert ways == (0, 0, 0), (ways, os.strerror(ctypes.get_errno()))
    os.preadv = read(os.preadv)
    def whole(self, *args, **kwargs):
        counted["whole"] += 1
        return full_tensor(self, *args, **kwargs)
    counted["whole"], full_tensor, DTensor.full_tensor = 0, DTensor.full_tensor, whole
    counted["visits"], host.Visit.bring = 0, visits(host.Visit.bring)
    made = FSDPParamGroup.__init__
    def init(self, *args, **kwargs):
        made(self, *args, **kwargs)
        groups.append(self)
    FSDPParamGroup.__init__ = init
    FSDPParamGroup.post_backward = look(FSDPParamGroup.post_backward)
    code = stage.run(import_module("stoker.training.recipes." + job["stage"]).main, job["words"])
    params = [param for group in groups for param in group.fsdp_params]
    counted["frozen"] = sum(one.sharded_param.to_local().nbytes for one in params if not one.sharded_param.requires_grad)
    counted["shard"] = sum(4 * one.sharded_param.to_local().numel() for one in params if one.sharded_param.requires_grad)
    sizes = [sum(4 * one.sharded_param.numel() for one in group.fsdp_params if one.sharded_param.requires_grad) for group in groups]
    counted["units"] = sorted(sizes)
    counted["offloads"] = bool(params) and all(one.offload_to_cpu for one in params)
    with open(f"counted-{rank}.json", "w") as file:
        json.dump(counted, file)
    return code
""")
# 7 samples a step, 2 at a time: micro-steps of unlike size, more on some ranks than others have samples for.
PRETRAIN = (
    "--tokenizer.path", "bytes", "--preset", "small", "--model.depth", "2", "--model.dim", "64", "--model.heads", "4",
    "--model.tied", "false", "--context_length", "32", "--batch.tokens", "224", "--batch.micro", "2", "--data.validation", "0", "--log_every", "1",
    "--export", "false", "--timeout", "60s", "--max_samples", "201", "--eval_every", "0", "--max-steps", "6", "--learning_rate", "3e-3",
    "--parallel.device", "cpu",
)  # fmt: skip


class Trained:
    def __init__(self, folder: Path, codes: list[int]) -> None:
        self.folder, self.codes = folder, codes

    @property
    def run(self) -> Path:
        return next((self.folder / "runs").glob("torchrun-*"))

    @property
    def losses(self) -> list[float]:
        lines = map(json.loads, (self.run / "metrics.jsonl").read_text().splitlines())
        return [line["loss"] for line in lines if "loss" in line and "val_loss" not in line]

    def said(self) -> str:
        return "".join(path.read_text() for path in sorted(self.folder.glob("rank-*.log")))

    def counted(self, rank: int) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / f"counted-{rank}.json").read_text())
        return found


class Ranks:
    def __init__(self, server: Server, data: Path) -> None:
        self._server, self._data = server, data

    def pretrain(self, ranks: int, folder: Path, *words: str, fails: bool = False, **job: Any) -> Trained:
        given = ["--data", str(self._data), "--cache", str(self._data.parent / "cache"), *PRETRAIN, *words]
        return self.stage("pretrain", ranks, folder, *given, fails=fails, **job)

    def stage(self, stage: str, ranks: int, folder: Path, *words: str, fails: bool = False, **job: Any) -> Trained:
        self._server.begin(ranks, folder, stage=stage, words=list(words), **job)
        found = Trained(folder, self._server.codes())
        assert fails or found.codes == [0] * ranks, found.said()
        return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    draw = random.Random(0)
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text(
        "\n".join(" ".join(draw.choice(("ab", "cde", "fgh", "ijkl")) for _ in range(12)) for _ in range(600))
    )
    with server(PROGRAM) as forked:
        yield Ranks(forked, path)


DEEP = ("--model.depth", "6", "--schedule", "constant", "--warmup_steps", "1")  # more than two blocks are most of it


@pytest.fixture(scope="module")
def alone(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of one process."""
    found = ranks.pretrain(1, tmp_path_factory.mktemp("alone") / "job", *DEEP).losses
    assert len(found) == 6 and found[-1] < found[0] - 0.5, "it learns"
    return found


FSDP = ("--strategy", "fsdp")


@pytest.mark.parametrize("kept", ["sharded", "whole"])
def test_gradients_between_micro_batches_are_the_shard_and_two_blocks_or_all(
    kept: str, ranks: Ranks, alone: list[float], tmp_path: Path
) -> None:
    job = ranks.pretrain(2, tmp_path, *DEEP, *FSDP, "--accumulate", kept, "--max-steps", "3")
    assert job.losses == pytest.approx(alone[:3], rel=1e-5)
    for rank in range(2):
        seen = job.counted(rank)
        norm, *blocks = seen["units"]  # the last norm's 64 numbers wait for the end of the backward pass
        every = norm + sum(blocks)
        if kept == "sharded":
            assert seen["gradients"] <= seen["shard"] + sum(blocks[-2:]) + norm < 0.85 * every
        else:
            assert seen["gradients"] >= every


@pytest.mark.parametrize(
    "kind", at_length_but(["adamw8bit"], ["adamw8bit", "muon"])
)  # muon's shards are in the next test
def test_optimizers_in_shards_make_the_steps_of_one_process_and_resume_anywhere(
    kind: str, ranks: Ranks, tmp_path: Path
) -> None:
    """Rows of 64 and 172 numbers, and 260, 192 and 344 rows over three ranks: nothing is even."""
    words = ("--optimizer", kind, "--model.ff", "172", "--schedule", "constant", "--warmup_steps", "1")
    kept = ("--checkpoint.folder", str(tmp_path / "kept"))
    one = ranks.pretrain(1, tmp_path / "1", *words)
    losses: list[float] = []
    for number, steps, more in ((2, "3", FSDP), (3, "5", FSDP), (1, "6", ())):
        losses += ranks.pretrain(number, tmp_path / f"to-{steps}", *words, *kept, "--max-steps", steps, *more).losses
    assert losses == pytest.approx(one.losses, rel=1e-5)


@pytest.mark.parametrize("kind", at_length_but(["muon"], ["adamw", "adamw8bit", "muon"]))
def test_shards_inside_hosts_that_hold_copies_learn_what_one_process_learns(
    kind: str, ranks: Ranks, tmp_path: Path
) -> None:
    """Four ranks as two hosts of two; then from their checkpoint on two ranks that share one model, and on one."""
    words = ("--optimizer", kind, "--schedule", "constant", "--warmup_steps", "1")
    kept, hosts = ("--checkpoint.folder", str(tmp_path / "kept")), ("--sharding", "host")
    one = ranks.pretrain(1, tmp_path / "1", *words)
    losses: list[float] = []
    for number, steps, more in ((4, "3", (*FSDP, *hosts)), (2, "4", FSDP), (4, "5", (*FSDP, *hosts)), (1, "6", ())):
        job = ranks.pretrain(
            number, tmp_path / f"to-{steps}", *words, *kept, "--max-steps", steps, *more, local=min(number, 2)
        )
        losses += job.losses
        if number == 4:
            shards = [job.counted(rank)["shard"] for rank in range(4)]
            assert sum(shards) == pytest.approx(2 * sum(shards[:2])) and max(shards) < 0.51 * sum(shards[:2])
    assert losses == pytest.approx(one.losses, rel=1e-5)


def test_hosts_that_hold_copies_need_as_many_ranks(ranks: Ranks, tmp_path: Path) -> None:
    job = ranks.pretrain(3, tmp_path, *FSDP, "--sharding", "host", fails=True, local=2)
    assert set(job.codes) == {64} and "needs as many ranks on every host" in job.said()


@pytest.mark.parametrize("kept", at_length_but(["all"], ["optimizer", "all"]))
@pytest.mark.parametrize("kind", at_length_but(["adamw8bit"], ["adamw", "adamw8bit"]))
def test_what_lives_on_the_host_learns_the_same_to_the_bit(
    kind: str, kept: str, ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("--optimizer", kind, *FSDP, "--schedule", "constant", "--warmup_steps", "1", "--max-steps")
    there = ranks.pretrain(2, tmp_path / "there", *words, "4")
    folder = ("--checkpoint.folder", str(tmp_path / "kept"))
    moved = ranks.pretrain(2, tmp_path / "moved", *words, "2", "--offload", kept, *folder)
    on = ranks.pretrain(3, tmp_path / "on", *words, "4", "--offload", kept, *folder)
    assert moved.losses == there.losses[:2] and on.losses == pytest.approx(there.losses[2:], rel=1e-6)
    assert moved.counted(0)["visits"] > 0 and there.counted(0)["visits"] == 0
    assert moved.counted(0)["offloads"] == (kept == "all")


@pytest.mark.parametrize("kind", at_length_but(["shape"], ["shape", "adapter", "dtype"]))
def test_a_checkpoint_of_another_model_ends_all_ranks_with_one_line(
    kind: str, ranks: Ranks, wide: Path, tmp_path: Path
) -> None:
    """What the launcher can't know before there are ranks: no rank waits for one that has gone."""
    kept = ("--checkpoint.folder", str(tmp_path / "kept"), *FSDP)
    first, then, says = {
        "shape": ((), ("--model.depth", "3"), "is of another model: model.layers is 2 there and 3 here"),
        "adapter": (
            ("--model.load", str(wide), "--lora", "--lora_rank", "4"),
            ("--model.load", str(wide), "--lora", "--lora_rank", "8"),
            "adapter.lora_rank is 4 there and 8 here",
        ),
        "dtype": (
            ("--optimizer", "adamw8bit"),
            ("--optimizer", "adamw"),
            "has the state of optim.kind adamw8bit, not adamw",
        ),
    }[kind]
    ranks.pretrain(2, tmp_path / "first", *kept, *first, "--max-steps", "2")
    job = ranks.pretrain(3, tmp_path / "then", *kept, *then, "--max-steps", "4", fails=True)
    assert set(job.codes) <= {65, 78} and len(job.codes) == 3, job.said()
    assert re.search(says, job.said()) and "Traceback" not in job.said(), job.said()


@pytest.mark.parametrize("number", at_length_but([4], [2, 3, 4]))
@pytest.mark.parametrize("method", at_length_but(["--qlora"], ["", "--lora", "--qlora"]))
def test_a_model_that_does_not_divide_learns_the_same(number: int, method: str, ranks: Ranks, tmp_path: Path) -> None:
    """Rows of 18, 22 and 6 over four ranks; the last of them may have none. Too few elements for units of 4 bits."""
    odd = ("--model.dim", "18", "--model.heads", "3", "--model.kv_heads", "1", "--model.ff", "22", "--model.depth", "2")
    words: tuple[str, ...] = (*odd, "--max-steps", "3")
    if method:
        base = ranks.pretrain(1, tmp_path / "base", *odd, "--export", "true", "--max-steps", "2").run / "hf"
        words = ("--model.load", str(base), method, "--lora_rank", "3", "--max-steps", "3")
    one, several = ranks.pretrain(1, tmp_path / "1", *words), ranks.pretrain(number, tmp_path / "n", *words, *FSDP)
    assert len(one.losses) == 3 and several.losses == pytest.approx(one.losses, rel=1e-5)


@pytest.mark.parametrize("method", at_length_but(["--qlora"], ["", "--lora", "--qlora"]))
def test_a_folder_of_mixed_dtypes_is_read_in_shards_as_by_one_process(
    method: str, ranks: Ranks, wide: Path, tmp_path: Path
) -> None:
    """Norms in fp32, every other matrix in fp16, the rest in bf16: FSDP2 would refuse to gather them together."""
    folder = tmp_path / "mixed"
    shutil.copytree(wide, folder)
    tensors = load_file(folder / "model.safetensors")
    kinds = (torch.bfloat16, torch.float16)
    mixed = {
        name: tensor.to(torch.float32 if tensor.dim() == 1 else kinds[at % 2])
        for at, (name, tensor) in enumerate(sorted(tensors.items()))
    }
    save_file(mixed, folder / "model.safetensors", metadata={"format": "pt"})
    words = ("--model.load", str(folder), "--max-steps", "3", *((method,) if method else ()))
    one, two = ranks.pretrain(1, tmp_path / "1", *words), ranks.pretrain(2, tmp_path / "2", *words, *FSDP)
    assert len(one.losses) == 3 and two.losses == pytest.approx(one.losses, rel=1e-5)


@pytest.fixture(scope="module")
def base(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder."""
    return ranks.pretrain(1, tmp_path_factory.mktemp("base") / "job", "--export", "true").run / "hf"


@pytest.mark.parametrize("hosts", ["one", "two"])
def test_an_export_is_collected_by_the_rank_that_writes_it(
    hosts: str, ranks: Ranks, base: Path, tmp_path: Path
) -> None:
    """Three ranks have uneven rows of 260; of two hosts the second sends nothing."""
    words = ("--model.load", str(base), "--max-steps", "2", "--export", "true")
    one = ranks.pretrain(1, tmp_path / "1", *words)
    number, more, job = (3, (), {}) if hosts == "one" else (4, ("--sharding", "host"), {"local": 2})
    several = ranks.pretrain(number, tmp_path / "several", *words, *FSDP, *more, **job)
    assert all(several.counted(rank)["whole"] == 0 for rank in range(number)), "no rank gathered a whole tensor"
    ours, theirs = (load_file(job.run / "hf" / "model.safetensors") for job in (several, one))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        # AdamW's first steps go by a gradient's sign: where it is nearly 0, rounding shows.
        torch.testing.assert_close(ours[name], tensor, rtol=1e-3, atol=1e-4)


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to give ranks a disk of their own")
def test_hosts_without_a_shared_folder_save_on_the_first_and_resume_with_all(
    ranks: Ranks, alone: list[float], tmp_path: Path
) -> None:
    """Rank 0 waited for files that lay on other machines: no checkpoint ever, and five minutes lost with each."""
    there = {"local": 1, "apart": True}
    steps = ("--checkpoint.every_steps", "2")
    job = ranks.pretrain(3, tmp_path, *DEEP, *steps, "--max-steps", "4", **there)
    assert "on rank 0's host alone" in job.said() and len(list(job.run.glob("checkpoints/step-*/manifest.json"))) >= 2
    first = job.run
    again = ranks.pretrain(
        3, tmp_path, *DEEP, *steps, "--max-steps", "6", "--checkpoint.resume", str(first), **there
    )  # fmt: skip
    (second,) = (path for path in (tmp_path / "runs").iterdir() if path != first)
    losses = [json.loads(line)["loss"] for line in (second / "metrics.jsonl").read_text().splitlines()]
    assert "resumes at step 4" in again.said() and losses == pytest.approx(alone[4:], rel=1e-5)
    refused = ranks.pretrain(3, tmp_path / "shards", *DEEP, *FSDP, "--max-steps", "4", fails=True, **there)
    assert all(refused.codes) and "only where all hosts see the same folder" in refused.said()


def test_a_rank_reads_its_part_of_the_weights(ranks: Ranks, base: Path, tmp_path: Path) -> None:
    words = ("--model.load", str(base), "--max-steps", "3")
    one, two = ranks.pretrain(1, tmp_path / "1", *words), ranks.pretrain(2, tmp_path / "2", *words, *FSDP)
    assert two.losses == pytest.approx(one.losses, rel=1e-5)
    total = sum(stored.size for stored in stored_in(str(base)).values())
    assert one.counted(0)["read"] == total
    read = [two.counted(rank)["read"] for rank in range(2)]
    assert sum(read) == total and max(read) < 0.51 * total, "260 rows and the norms are even, too"


# Of 4-bit weights: queries have one unit of 64 × 256 elements, keys half of one, gate and up four each.
WIDE = ("--model.dim", "128", "--model.kv_heads", "2", "--model.ff", "512", "--model.depth", "2")


@pytest.fixture(scope="module")
def wide(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ranks.pretrain(1, tmp_path_factory.mktemp("wide") / "job", *WIDE, "--export", "true").run / "hf"


@pytest.mark.parametrize("method", at_length_but(["--qlora"], ["--lora", "--qlora"]))
def test_adapters_in_shards_learn_what_one_process_learns(
    method: str, ranks: Ranks, wide: Path, tmp_path: Path
) -> None:
    words = (
        "--model.load", str(wide), method, "--lora_rank", "4", "--learning_rate", "2e-3", "--export", "true",
        "--schedule", "constant", "--warmup_steps", "1",
    )  # fmt: skip
    one = ranks.pretrain(1, tmp_path / "1", *words)
    kept = ("--checkpoint.folder", str(tmp_path / "kept"))
    two = ranks.pretrain(2, tmp_path / "2", *words, *FSDP, *kept, "--max-steps", "3")
    assert two.losses == pytest.approx(one.losses[:3], rel=1e-5)
    frozen = [two.counted(rank)["frozen"] for rank in range(2)]
    assert max(frozen) < 0.6 * sum(frozen), "the half unit of keys and values is the first rank's"
    three = ranks.pretrain(3, tmp_path / "3", *words, *FSDP, *kept)
    assert all(three.counted(rank)["whole"] == 0 for rank in range(3)), "no rank gathered a whole tensor"
    assert three.losses == pytest.approx(one.losses[3:], rel=1e-5) and one.losses[-1] < one.losses[0]
    ours, theirs = (load_file(run / "hf" / "adapter_model.safetensors") for run in (one.run, three.run))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(theirs[name], tensor, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("method", at_length_but(["--lora"], ["--lora", "--qlora"]))
def test_a_frozen_model_on_the_host_has_adapters_that_learn_the_same(
    method: str, ranks: Ranks, wide: Path, tmp_path: Path
) -> None:
    words = (
        "--model.load",
        str(wide),
        method,
        "--lora_rank",
        "4",
        *FSDP,
        "--optimizer",
        "adamw8bit",
        "--export",
        "true",
    )
    there = ranks.pretrain(2, tmp_path / "there", *words)
    moved = ranks.pretrain(2, tmp_path / "moved", *words, "--offload", "all")
    assert moved.losses == there.losses and moved.counted(0)["offloads"] and moved.losses[-1] < moved.losses[0]
    ours, theirs = (load_file(run / "hf" / "adapter_model.safetensors") for run in (moved.run, there.run))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


STAGES = [(stage, method) for stage in ("midtrain", "sft", "reward", "dpo") for method in ("", "--lora", "--qlora")]


def words_of(stage: str, method: str, wide: Path, tmp_path: Path) -> tuple[str, ...]:
    """Four steps of five samples each."""
    draw = random.Random(1)
    texts = [" ".join(draw.choice(("ab", "cde", "fgh")) for _ in range(draw.randint(1, 4))) for _ in range(120)]
    pairs = [{"prompt": one, "chosen": f"{one} yes", "rejected": f"no {one}"} for one in texts]
    chats = [{"messages": [{"role": "user", "content": one}, {"role": "assistant", "content": one}]} for one in texts]
    data, held_out = tmp_path / "data.jsonl", tmp_path / "other.jsonl"
    for path, some in ((data, slice(20, None)), (held_out, slice(20))):
        rows = chats[some]
        rows = pairs[some] if stage in ("reward", "dpo") else rows
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = ("--data", str(data), "--data.validation", str(held_out))
    if stage in ("reward", "dpo"):
        given = (f"--{stage}.pairs", str(data), f"--{stage}.held_out", str(held_out))
    return (
        *given, "--model.load", str(wide), "--tokenizer.path", "bytes", "--preset", "small", "--context_length", "128",
        "--batch.tokens", "640", "--batch.micro", "1", "--max-steps", "4", "--learning_rate", "1e-3", "--log_every", "1",
        "--parallel.device", "cpu", "--timeout", "60s", "--eval_every", "0", *((method,) if method else ()),
    )  # fmt: skip


@pytest.mark.parametrize("kind", at_length_but([("reward", "--lora")], STAGES), ids="".join)
def test_every_stage_learns_in_shards_what_one_process_learns(
    kind: tuple[str, str], ranks: Ranks, wide: Path, tmp_path: Path
) -> None:
    """Two ranks, at length three and four, too. Pretraining is above, GRPO in test_grpo.py."""
    stage, method = kind
    words = words_of(stage, method, wide, tmp_path)
    one = ranks.stage(stage, 1, tmp_path / "1", *words)
    assert len(one.losses) == 4
    for number in (2, 3, 4) if EVERYTHING else (2,):
        several = ranks.stage(stage, number, tmp_path / f"{number}", *words, *FSDP)
        assert several.losses == pytest.approx(one.losses, rel=1e-5)
        if stage in ("sft", "dpo"):
            one_says, they_say = ((job.run / "samples.jsonl").read_text() for job in (one, several))
            assert they_say == one_says and len(one_says.splitlines()) >= 2
        told = [json.loads((job.run / "result.json").read_text())["metrics"] for job in (one, several)]
        assert told[0].keys() == told[1].keys()
        assert told[1]["val_loss"] == pytest.approx(told[0]["val_loss"], rel=1e-5)
        assert sorted(os.listdir(several.run / "hf")) == sorted(os.listdir(one.run / "hf"))


@at_length
@pytest.mark.parametrize(
    "kind", [("pretrain", ""), ("pretrain", "--lora"), ("pretrain", "--qlora"), *STAGES], ids="".join
)
def test_a_run_goes_on_by_ddp_and_in_shards_of_any_number(
    kind: tuple[str, str], ranks: Ranks, wide: Path, tmp_path: Path
) -> None:
    """Two ranks that hold copies, then 4, 3 and 2 that hold shards, then one."""
    stage, method = kind
    kept = ("--checkpoint.folder", str(tmp_path / "kept"), "--schedule", "constant", "--warmup_steps", "1")
    words = words_of(stage, method, wide, tmp_path)
    if stage == "pretrain":
        words = (
            "--model.load",
            str(wide),
            *((method, "--lora_rank", "4") if method else ()),
            "--learning_rate",
            "1e-3",
        )

    def job(number: int, folder: str, *more: str) -> Trained:
        if stage == "pretrain":
            return ranks.pretrain(number, tmp_path / folder, *words, *more)
        return ranks.stage(stage, number, tmp_path / folder, *words, *more)

    one, losses = job(1, "alone", *kept[2:], "--max-steps", "5"), list[float]()
    for steps, (number, more) in enumerate(((2, ()), (4, FSDP), (3, FSDP), (2, FSDP), (1, ())), start=1):
        losses += job(number, f"to-{steps}", *kept, "--max-steps", str(steps), *more).losses
    assert len(one.losses) == 5 and losses == pytest.approx(one.losses, rel=1e-5)


@pytest.mark.parametrize("number", at_length_but([3], [2, 3]))
def test_an_evaluation_in_shards_finds_what_one_process_finds(
    number: int, ranks: Ranks, wide: Path, tmp_path: Path
) -> None:
    """Open questions, choices, sampled answers and text: no rank has all weights, and all make the same passes."""
    listed = [{"text": text, "label": label} for text, label in (("ab cde", "A"), ("fgh", "B"))]
    rows = [{"question": f"What follows {n}?", "answer": "ab" if n % 2 else "cde"} for n in range(7)]
    rows += [
        {"id": f"{n}", "question": {"stem": f"{n}?", "choices": listed}, "answerKey": "AB"[n % 2]} for n in range(5)
    ]
    tasks, texts = tmp_path / "tasks.jsonl", tmp_path / "texts.jsonl"
    for path, some in (
        (tasks, rows[:7]),
        (tmp_path / "choices.jsonl", rows[7:]),
        (texts, [{"text": "ab cde fgh " * 9}]),
    ):
        path.write_text("".join(json.dumps(row) + "\n" for row in some))
    words = (
        "--model.load", str(wide), "--tokenizer.path", "bytes", "--evaluate.tasks", str(tasks), "--evaluate.tasks",
        str(tmp_path / "choices.jsonl"), "--evaluate.texts", str(texts), "--evaluate.draws", "2", "--generate.new_tokens", "6",
        "--context_length", "128", "--parallel.device", "cpu", "--timeout", "60s",
    )  # fmt: skip
    one, several = (
        ranks.stage("evaluate", count, tmp_path / f"{count}", *words, *(FSDP if count > 1 else ()))
        for count in (1, number)
    )
    told = [json.loads((job.run / "result.json").read_text())["metrics"] for job in (one, several)]
    assert told[1]["tasks"] == told[0]["tasks"]
    assert told[1]["bits_per_byte"] == pytest.approx(told[0]["bits_per_byte"], rel=1e-5)
    texts_of = [(job.run / "completions.jsonl").read_text() for job in (one, several)]
    assert texts_of[0] == texts_of[1] and len(texts_of[0].splitlines()) == 12
    held = [several.counted(rank)["frozen"] for rank in range(number)]
    assert max(held) < 0.6 * sum(held) if number == 2 else max(held) < 0.45 * sum(held)


@pytest.mark.parametrize("kind", at_length_but(["density"], ["density", "diversity"]))
def test_density_and_diversity_in_shards_find_what_one_process_finds(
    kind: str, ranks: Ranks, wide: Path, tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    texts = [f"What follows {'ab cde '[: n % 7]} {n}?" for n in range(9)]
    prompts.write_text("".join(json.dumps({"question": text, "answer": "ab"}) + "\n" for text in texts))
    words: tuple[str, ...] = (
        "--model.load", str(wide), "--tokenizer.path", "bytes", f"--{kind}.prompts", str(prompts), f"--{kind}.clusters", "3",
        "--context_length", "128", "--parallel.device", "cpu", "--timeout", "60s",
    )  # fmt: skip
    written = "weights.jsonl"
    if kind == "diversity":
        other = ranks.pretrain(1, tmp_path / "other", *WIDE, "--export", "true", "--max-steps", "9").run / "hf"
        words += ("--diversity.baseline", str(wide), "--diversity.compared", str(other), "--diversity.answers", "2")
        words += ("--generate.new_tokens", "6", "--diversity.rounds", "50")
        written = "completions.jsonl"
    one, two = (
        ranks.stage(kind, count, tmp_path / f"{count}", *words, *(FSDP if count > 1 else ())) for count in (1, 2)
    )
    lines = [list(map(json.loads, (job.run / written).read_text().splitlines())) for job in (one, two)]
    assert len(lines[0]) == (9 if kind == "density" else 18)
    for ours, theirs in zip(*lines, strict=True):
        assert ours == (pytest.approx(theirs, rel=1e-4) if kind == "density" else theirs)
    held = [two.counted(rank)["frozen"] for rank in range(2)]
    assert max(held) < 0.6 * sum(held), "each has its part"


@pytest.mark.parametrize("sizes", [[(128, 128), (256, 64)], [(128, 128), (64, 128), (9, 64)]], ids=["joined", "apart"])
@pytest.mark.parametrize("given", ["elements", "codes"])
def test_codes_that_can_be_cut_are_those_of_the_whole(sizes: list[tuple[int, int]], given: str) -> None:
    draw = torch.Generator().manual_seed(0)
    weights = [torch.randn(size, generator=draw) for size in sizes]
    wholes = [nf4.quantize(weight) for weight in weights]
    codes = Codes(sizes, torch.float32)
    read = [lambda begin, end, one=one: one.flatten()[begin:end] for one in weights]
    codes.fill(read if given == "elements" else wholes)
    found, want = codes.joined(), nf4.join(wholes)[0]
    assert len(found) == len(want) == (1 if len(sizes) == 2 else 3)
    for one, other in zip(found, want, strict=True):
        for name in ("codes", "scales", "second", "offsets"):
            assert torch.equal(getattr(one, name), getattr(other, name)), name
        assert (one.size, one.dtype) == (other.size, other.dtype)
    assert all(parameter.shape[0] * UNIT >= math.prod(sizes[0]) for parameter in codes.parameters())


SMALL = ModelConfig(family="llama", layers=1, dim=16, heads=4, kv_heads=2, head_dim=4, ff=24, vocab_size=50, tied=False)
GPT2 = replace(
    SMALL, family="gpt2", kv_heads=4, ff=64, positions="learned", position_rows=64, norm_kind="layer", gated=False,
    activation="gelu_tanh", tied=True, qkv_bias=True, out_bias=True, mlp_bias=True,
)  # fmt: skip


@pytest.mark.parametrize("kind", ["rows", "columns", "added tokens", "adapter"])
def test_any_rows_of_a_weight_are_read_as_the_whole_has_them(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    c = GPT2 if kind == "columns" else SMALL
    model = Decoder(c, 32)
    model.start(1)
    hf.save(model, str(tmp_path / "hf"), say=lambda line: None)
    added, wanted = None, replace(c, vocab_size=57) if kind == "added tokens" else c
    if kind == "adapter":
        told = AdapterConfig(method="lora", lora_rank=2, also_train="norm")
        attached = Decoder(c, 32)
        adapters.freeze(attached, told)
        attached.start(2)
        adapters.attach(attached, told, 3)
        tensors = adapters.peft_tensors(c, told, attached.get_parameter)
        added = Added(c, told, {name: lambda one=one: one + 0.5 for name, one in tensors.items()})  # type: ignore[misc]
    counts: list[int] = []
    real = os.preadv
    monkeypatch.setattr(hf_stream.os, "preadv", lambda *args: counts.append(real(*args)) or counts[-1])
    source, draw = Source(str(tmp_path / "hf"), wanted, added), random.Random(0)
    for place in places(wanted):
        whole = source.whole(place, torch.float32)
        for _ in range(6):
            first, last = sorted((draw.randint(0, len(whole)), draw.randint(0, len(whole))))
            counts.clear()
            found = source.fill(place, torch.empty_like(whole[first:last]), first)
            assert torch.equal(found, whole[first:last])
            if kind != "added tokens":
                assert sum(counts) == found.nbytes


EIGHT = ModelConfig(
    family="llama", layers=32, dim=4096, heads=32, kv_heads=8, head_dim=128, ff=14336, vocab_size=128256, tied=False
)
GIB = 1 << 30


def test_the_plan_counts_the_gradients_that_will_be_there() -> None:
    footprint, job = Footprint(EIGHT, AdapterConfig()), Job(1, 2048, recomputed=32, world=8, shards=8)
    alone = footprint.planned(replace(job, world=1, shards=1)).terms
    sharded, whole = (footprint.planned(replace(job, whole=way)) for way in (False, True))
    assert sharded.terms["weights"] == pytest.approx(alone["weights"] / 8)
    assert sharded.terms["optimizer"] == pytest.approx(alone["optimizer"] / 8)
    each, every = 4 * parameters(EIGHT) // 8, 4 * parameters(EIGHT)
    block = 4 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    head = 4 * 4096 * 128256
    assert each < sharded.terms["gradients"] < each + 3.01 * max(block, head)
    assert whole.total - sharded.total == pytest.approx(every - each, rel=0.05)
    assert sharded.terms["gathered"] == pytest.approx(block, rel=0.01), "two blocks in 16 bits"
    unheard = footprint.planned(replace(job, whole=True, accumulates=False))
    assert unheard.total == pytest.approx(sharded.total, rel=0.01), "one micro-batch: nothing waits"


@pytest.mark.parametrize(
    ("room", "share", "micro", "whole", "why"),
    [
        (24, 16, 1, False, "whole ones need"),
        (141, 16, 1, True, "a step sends"),
        (141, 1, 1, False, "would not send less"),
        (141, 64, 0, False, "would not send less"),  # room for all samples at once
        (80, 4096, 0, True, "a step sends"),
        (56, 4096, 0, False, "would not send less"),  # micro-batches would be so small that they gather more often
    ],
)
def test_gradients_are_whole_where_that_sends_less_and_fits(
    room: int, share: int, micro: int, whole: bool, why: str
) -> None:
    job = Job(1, 2048, recomputed=32, world=8, shards=8)
    found = choose(Footprint(EIGHT, AdapterConfig()), job, room * GIB, share, micro)
    assert found.whole == whole and why in found.why, found


# An allocation fails inside FSDP2's own code, in each phase of a step; prints the tracebacks.
SHORT_OF_MEMORY = """
import json, traceback
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import _api

def short(*args, **kwargs):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 24.00 GiB of which 0.50 GiB is free. Of the allocated memory 22.00 GiB is allocated by PyTorch, and 0.10 GiB is reserved by PyTorch but unallocated.")

class Short(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        short()

def fails(phase, module, name, work):
    real = getattr(module, name)
    setattr(module, name, short)
    try:
        work()
    except torch.OutOfMemoryError:
        found.append((phase, traceback.format_exc()))
    finally:
        setattr(module, name, real)

def sharded():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)

def step(make):
    model = make()
    loss = model(x).sum()
    return model, loss

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
x, found = torch.randn(4, 8), []
model = sharded()
fails("gather", torch, "empty", lambda: model(x))
model, loss = step(sharded)
fails("backward", torch, "empty", loss.backward)  # of the buffer that gradients are reduced from
model, loss = step(sharded)
fails("in an operation", torch, "is_complex", Short.apply(loss).backward)
loss.backward()
optimizer = torch.optim.AdamW(model.parameters())
fails("optimizer", torch, "zeros_like", optimizer.step)
fails("save", _api.Redistribute, "apply", lambda: [p.full_tensor() for p in model.parameters()])
print(json.dumps(found))
"""
OWN = (
    "INFO | [GPU 0] ran out of GPU memory at 22.0 GiB in tensors of a model in 4 shards, 20.0 GiB were planned; no term"
)


@at_length
def test_out_of_memory_in_shards_names_the_phase_and_what_helps() -> None:
    done = subprocess.run([sys.executable, "-c", SHORT_OF_MEMORY], capture_output=True, text=True, check=True)
    traces = json.loads(done.stdout.splitlines()[-1])
    assert [phase for phase, _ in traces] == ["gather", "backward", "in an operation", "optimizer", "save"]
    words = {"gather": "weights were gathered", "optimizer": "in the optimizer step", "save": "the model was saved"}
    helps = {
        "gather": ("reshard_after_forward", "--compute.recompute full"),
        "optimizer": ("8-bit optimizer", "--optimizer adamw8bit"),
        "save": ("StateDictOptions", "one tensor at a time"),
    }
    for phase, trace in traces:
        message = trace.splitlines()[-1].partition(": ")[2]
        error = RankError("OutOfMemoryError", message, "train.py", 7, "main", trace, int(5e9), module="torch")
        theirs, ours = (
            judge(Evidence(2, (RankExit(0, "", "GPU0", 100, 1, 5.0, error=error, tail=tail),))) for tail in ("", OWN)
        )
        assert theirs.cause == ours.cause == "oom.gpu"
        for verdict in (theirs, ours):
            assert f"out of GPU memory {'' if phase != 'gather' and phase != 'save' else 'while '}" in verdict.summary
            assert words.get(phase, "in the backward pass") in verdict.summary, verdict.summary
        script, recipe = helps.get(phase, ("set_requires_gradient_sync", "--parallel.accumulate sharded"))
        assert recipe in ours.fix[0]
        if phase in ("gather", "backward", "save"):  # of others the traceback does not show that the model is in shards
            assert script in theirs.fix[0]
