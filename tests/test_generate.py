"""Batched generation: what a plain loop without a cache writes, whatever the batch; and what transformers writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import pytest
import torch

from conftest import at_length
from devices import needs_gpu
from stoker.contract import host_memory
from stoker.contract.errors import Refusal
from stoker.contract.frozen import replace
from stoker.training.model import hf
from stoker.training.model.config import ModelConfig
from stoker.training.model.decoder import Decoder
from stoker.training.serve.batch import BatchEngine
from stoker.training.serve.paged import Paged

LLAMA = ModelConfig(
    layers=2,
    dim=32,
    heads=4,
    kv_heads=4,
    head_dim=8,
    ff=48,
    vocab_size=96,
    rope_theta=500.0,
    norm_eps=1e-5,
    init_std=0.3,
)
SHAPES = {
    "llama": LLAMA,
    "qwen3": replace(LLAMA, qk_norm=True, kv_heads=2, head_dim=16, tied=False, rope_theta=1e6),
    "llama with one key head": replace(LLAMA, kv_heads=1, tied=False),
}
STOP = {5, 6, 7}
LENGTHS = (3, 9, 1, 30, 9, 5, 7)


def made(c: ModelConfig, dtype: torch.dtype = torch.float32, seed: int = 3, device: str = "cpu") -> Decoder:
    with torch.device(device):
        model = Decoder(c, 192, dtype)
    model.start(seed)
    with torch.no_grad():
        for parameter in model.parameters():  # norms that are all one would hide one taken for another
            if parameter.dim() == 1:
                parameter.copy_(torch.linspace(0.5, 1.5, len(parameter)))
    return model.eval()


def prompts(lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 96, (length,), generator=generator).tolist() for length in lengths]


@torch.no_grad()
def without_cache(model: Decoder, prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    while len(ids) < len(prompt) + count:
        ids.append(int(model(torch.tensor([ids], device=model.embed.weight.device))[0, -1].argmax()))
        if ids[-1] in STOP:
            break
    return ids[len(prompt) :]


@pytest.mark.parametrize("c", SHAPES.values(), ids=SHAPES)
def test_the_likeliest_tokens_are_those_of_a_loop_without_a_cache(c: ModelConfig) -> None:
    model = made(c)
    want = [without_cache(model, prompt, 40) for prompt in prompts()]
    assert len({len(answer) for answer in want}) > 2, "answers that all end together show nothing"
    for rows in (1, 4, 16):
        assert (
            BatchEngine(model, rows=rows, length=70).generate(prompts(), new_tokens=40, stop=STOP, temperature=0)
            == want
        )
    exact = BatchEngine(model, rows=4, length=35).generate(prompts(), new_tokens=5, stop=STOP, temperature=0)
    assert exact == [answer[:5] for answer in want], "no token more than there is room for"


def test_an_answer_ends_with_its_stop_token_or_has_all_its_tokens() -> None:
    answers = BatchEngine(made(LLAMA), rows=4, length=192).generate(prompts(), new_tokens=40, stop=STOP, seed=3)
    assert any(answer[-1] in STOP for answer in answers)
    for answer in answers:
        assert not STOP & set(answer[:-1])
        assert answer[-1] in STOP or len(answer) == 40


@pytest.mark.parametrize("how", [{}, {"temperature": 0.6}, {"top_k": 5}, {"top_p": 0.7}], ids=str)
def test_drawn_answers_depend_on_seed_and_index_and_not_on_the_batch(how: dict[str, Any]) -> None:
    model = made(SHAPES["qwen3"])
    alone, together = (
        BatchEngine(model, rows=rows, length=100).generate(prompts(), new_tokens=40, stop=STOP, seed=21, **how)
        for rows in (1, 7)
    )
    assert alone == together
    assert BatchEngine(model, rows=7, length=100).generate(prompts(), new_tokens=40, stop=STOP, seed=22, **how) != alone


@at_length
def test_a_prompt_asked_several_times_is_computed_once_and_answered_the_same() -> None:
    """Groups in a row, as GRPO asks; and the same prompts mixed, where copies lie between others."""
    model, lengths = made(SHAPES["qwen3"]), (9, 3, 30, 14)
    in_a_row = [p for p in prompts(lengths) for _ in range(4)]
    for asked in (in_a_row, prompts(lengths) * 4):
        engine = BatchEngine(model, rows=16, length=70)
        ours = engine.generate(asked, new_tokens=30, stop=STOP, seed=5)
        assert engine.prompt_tokens == sum(lengths) + 12, "once for a group, and its last token for each of the others"
        apart = [
            BatchEngine(model, rows=1, length=70).generate([one], new_tokens=30, stop=STOP, seed=5, indexes=[index])[0]
            for index, one in enumerate(asked)
        ]
        assert apart == ours and len(set(map(tuple, ours))) > 8
        again = engine.generate(asked, new_tokens=30, stop=STOP, seed=5)
        assert again == ours and engine.prompt_tokens < 2 * (sum(lengths) + 12)
    few = BatchEngine(model, rows=6, length=70)  # a group whose members don't all run at once
    assert few.generate(in_a_row, new_tokens=30, stop=STOP, seed=5) == BatchEngine(model, rows=16, length=70).generate(
        in_a_row, new_tokens=30, stop=STOP, seed=5
    )


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_kept_log_probabilities_are_those_of_the_model(temperature: float) -> None:
    model = made(SHAPES["qwen3"])
    asked = prompts()
    engine = BatchEngine(model, rows=4, length=70, logprobs=True)
    answers = engine.generate(asked, new_tokens=20, stop=STOP, seed=3, temperature=temperature)
    assert len({len(answer) for answer in answers}) > 2
    for prompt, answer, kept in zip(asked, answers, engine.logprobs, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + answer]))[0, len(prompt) - 1 : -1] / temperature
        wanted = torch.log_softmax(logits, -1)[range(len(answer)), answer]
        torch.testing.assert_close(torch.tensor(kept), wanted, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="plain sampling only"):
        engine.generate(asked, new_tokens=2, stop=STOP, top_k=3)


def test_a_stream_is_the_same_answer_token_by_token() -> None:
    engine = BatchEngine(made(LLAMA), rows=2, length=100)
    (whole,) = engine.generate(prompts((6,)), new_tokens=40, stop=STOP, seed=4)
    assert list(engine.stream(prompts((6,))[0], new_tokens=40, stop=STOP, seed=4)) == whole


def test_tokens_are_drawn_as_often_as_their_probabilities_say() -> None:
    model, count, prompt = made(LLAMA), 4000, [17, 3]
    with torch.no_grad():
        logits = model(torch.tensor([prompt]))[0, -1]
    engine = BatchEngine(model, rows=500, length=8)
    for how, kept in (
        ({"temperature": 1.0}, 96),
        ({"temperature": 2.0}, 96),
        ({"temperature": 1.0, "top_k": 3}, 3),
        ({"temperature": 1.0, "top_p": 0.5}, None),
    ):
        chance = torch.softmax(logits / how["temperature"], -1)
        order = chance.argsort(descending=True)
        kept = kept or int((chance[order].cumsum(0) < 0.5).sum()) + 1
        chance[order[kept:]] = 0
        chance /= chance.sum()
        drawn = torch.tensor(engine.generate([prompt] * count, new_tokens=1, stop=(), seed=5, **how)).flatten()
        often = torch.bincount(drawn, minlength=96) / count
        assert ((often - chance).abs() <= 5 * (chance * (1 - chance) / count).sqrt() + 1e-9).all(), how


def test_answers_that_ended_leave_their_places_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    model, rows = made(LLAMA), list[int]()
    real = Paged.step

    def counted(paged: Paged, some: Any, kind: Any, count: int, ended: Any) -> Any:
        rows.append(len(some))
        assert count == 1, "on a CPU"
        return real(paged, some, kind, count, ended)

    monkeypatch.setattr(Paged, "step", counted)
    engine, shares = BatchEngine(model, rows=4, length=150), list[float]()
    answers = engine.generate(prompts((5,) * 16), new_tokens=100, stop=STOP, seed=2, told=shares.append)
    tokens = [len(answer) for answer in answers]
    assert sum(rows) == sum(tokens) - len(answers), "a prompt's pass writes its first token; nobody computes for nobody"
    in_batches = sum(max(tokens[begin : begin + 4]) for begin in range(0, 16, 4))
    assert max(rows) == 4 and len(rows) < 0.8 * in_batches, "a batch of four would wait for its longest"
    assert shares == sorted(shares) and shares[-1] == pytest.approx(16)


def test_whoever_stops_listening_leaves_nothing_behind() -> None:
    engine = BatchEngine(made(LLAMA), rows=1, length=100)
    told: dict[str, Any] = {"new_tokens": 40, "stop": STOP, "seed": 4}
    (whole,) = engine.generate(prompts((6,)), **told)
    stream = engine.stream(prompts((6,))[0], **told)
    assert next(stream) == whole[0]
    stream.close()  # type: ignore[attr-defined]
    assert engine.generate(prompts((6,)), **told) == [whole]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_after_a_refresh_the_new_weights_write(dtype: torch.dtype) -> None:
    model, other = made(SHAPES["qwen3"], dtype), made(SHAPES["qwen3"], dtype, seed=8)
    engine = BatchEngine(model, rows=4, length=100)
    told: dict[str, Any] = {"new_tokens": 20, "stop": STOP, "temperature": 0}
    before = engine.generate(prompts(), **told)
    with torch.no_grad():
        for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
            ours.copy_(theirs)
    if dtype != torch.float32:  # in fp32 the parameters themselves are used
        assert engine.generate(prompts(), **told) == before
    engine.refresh()
    after = engine.generate(prompts(), **told)
    assert after == BatchEngine(other, rows=4, length=100).generate(prompts(), **told) != before
    for parameter in model.parameters():  # weights that were put elsewhere
        parameter.data = parameter.data.clone()
    with torch.no_grad():
        made_again = made(SHAPES["qwen3"], dtype)
        for ours, theirs in zip(model.parameters(), made_again.parameters(), strict=True):
            ours.copy_(theirs)
    engine.refresh()
    assert engine.generate(prompts(), **told) == before


def test_ids_beyond_the_vocabulary_are_never_written() -> None:
    answers = BatchEngine(made(LLAMA), rows=4, length=100, vocab=20).generate(
        prompts(), new_tokens=50, stop=(), temperature=3.0
    )
    assert max(max(answer) for answer in answers) == 19


def test_what_cannot_be_is_refused_in_one_line() -> None:
    model = made(LLAMA)
    engine = BatchEngine(model, rows=2, length=20)
    for given, told, words in (
        (
            [[1] * 15],
            {"new_tokens": 6},
            "prompt 0 has 15 tokens; with an answer of 6 that is more than the limit of 20",
        ),
        ([[1], []], {"new_tokens": 6}, "prompt 1 is empty"),
        ([[1, 96]], {"new_tokens": 6}, "id 96"),
        ([[1]], {"new_tokens": 0}, "new_tokens 0"),
        ([[1]], {"new_tokens": 2, "temperature": -1.0}, "temperature -1"),
        ([[1]], {"new_tokens": 2, "top_p": 0.0}, "top_p 0"),
    ):
        with pytest.raises(Refusal, match=words):
            engine.generate(given, stop=(), **told)  # type: ignore[arg-type]
    with pytest.raises(Refusal, match="opened for 192"):
        BatchEngine(model, rows=2, length=193)
    assert engine.generate([], new_tokens=5, stop=()) == []


@pytest.fixture
def one_rank() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_a_sharded_model_writes_by_a_copy_that_follows_it(one_rank: None) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, other = made(LLAMA), made(LLAMA)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    engine = BatchEngine(model, rows=4, length=100)
    how: dict[str, Any] = {"new_tokens": 25, "stop": STOP, "temperature": 0}
    for _ in range(2):
        want = BatchEngine(other, rows=4, length=100).generate(prompts(), **how)
        assert engine.generate(prompts(), **how) == want
        with torch.no_grad():
            for parameter in (*model.parameters(), *other.parameters()):
                parameter.mul_(-0.7)
        engine.refresh()


@pytest.mark.parametrize("c", SHAPES.values(), ids=SHAPES)
def test_transformers_writes_the_same(c: ModelConfig, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = made(c)
    hf.save(model, str(tmp_path / "hf"), say=lambda _: None)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    ours = BatchEngine(model, rows=4, length=100).generate(prompts(), new_tokens=25, stop=STOP, temperature=0)
    for prompt, answer in zip(prompts(), ours, strict=True):
        ids = torch.tensor([prompt])
        whole = theirs.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=25,
            do_sample=False,
            eos_token_id=sorted(STOP),
            pad_token_id=0,
        )
        assert whole[0, len(prompt) :].tolist() == answer


@at_length  # a script of benchmarks/, which loads two engines: nothing that a user runs
def test_the_benchmark_of_generation_runs(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    program = Path(__file__).resolve().parent.parent / "benchmarks" / "grpo.py"
    command = [
        sys.executable,
        str(program),
        "--size",
        "T",
        "--parts",
        "generate",
        "--repeats",
        "1",
        "--json",
        str(tmp_path / "cells.jsonl"),
    ]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    ours, theirs = (json.loads(line) for line in (tmp_path / "cells.jsonl").read_text().splitlines())
    assert (ours["peer"], theirs["peer"]) == ("stoker", "transformers") and ours["greedy"] == theirs["greedy"]
    assert "| stoker |" in done.stdout and "16 of 16" in done.stdout


KERNELS = """
import torch
from stoker.training.generate import kernel, plain
from stoker.training.generate.cached import whole_heads as angles
from stoker.training.generate.config import Sampling
from stoker.training.generate.sample import sample_token
if torch.cuda.is_available(): torch.set_default_device("cuda")
torch.manual_seed(0)
R, H, KV, L, D = 3, 4, 2, 160, 16
def near(a, b, within): assert (a.float() - b.float()).abs().max() <= within, (a.float() - b.float()).abs().max()
for dtype, within in ((torch.float32, 1e-5), (torch.float16, 1e-2)):  # the interpreter multiplies bf16's bits: no products of it
    kv = torch.randn(2, R, KV, L, D).to(dtype)
    slot = torch.tensor([130])
    cos, sin = angles(torch.randn(6, D // 2), torch.randn(6, D // 2))
    for norm in (None, torch.rand(H + KV, D)):
        for tokens, at in ((1, slot), (2, 0)):
            qkv = torch.randn(R * tokens, (H + 2 * KV) * D).to(dtype)
            one, two = kv.clone(), kv.clone()
            told = (qkv, cos[: R * tokens], sin[: R * tokens], norm, H, 1e-6)
            near(kernel.turn(*told, two, at, tokens), plain.turn(*told, one, at, tokens), within)
            near(one, two, within)
    x, delta, gate_up = torch.randn(5, 48).to(dtype), torch.randn(5, 48).to(dtype), torch.randn(5, 96).to(dtype)
    weight = torch.rand(48)
    for ours, theirs in zip(kernel.add_norm(x, delta, weight, 1e-6), plain.add_norm(x, delta, weight, 1e-6)): near(ours, theirs, within)
    near(kernel.swiglu(gate_up), plain.swiglu(gate_up), within)
logits = (torch.randn(40, 2500) * 3).to(torch.bfloat16)
uniform = torch.cat([torch.rand(38), torch.tensor([0.0, 1 - 2.0**-24])])
assert (kernel.sample_token(logits, uniform, 0.8) == sample_token(logits, uniform, Sampling(0.8))).sum() >= 39  # a sum rounded otherwise may move one
temperatures, logits = torch.tensor([0.0, 0.8] * 20), logits.round()
mixed, drawn = kernel.sample_token(logits, uniform, temperatures), kernel.sample_token(logits, uniform, 0.8)
assert (logits == logits.amax(-1, keepdim=True)).sum() > 40, "some have their highest number twice: the first counts"
assert (mixed[::2] == logits[::2].argmax(-1)).all() and (mixed[1::2] == drawn[1::2]).all()
logits[0] = logits[1] = float("nan")
assert (kernel.sample_token(logits, uniform, temperatures) < 2500).all()
print("as plain")
"""


def test_the_kernels_compute_what_plain_torch_does() -> None:
    """On a GPU as they are; without one in Triton's interpreter."""
    pytest.importorskip("triton")
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
        **({} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}),
    }
    done = subprocess.run(
        [sys.executable, "-c", KERNELS], env=env, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.stdout == "as plain\n", done.stdout + done.stderr


WIDE = {
    "llama": replace(LLAMA, head_dim=16),
    "qwen3": SHAPES["qwen3"],
    "no power of two": replace(SHAPES["qwen3"], head_dim=24),
    "what the kernels have": replace(
        LLAMA, head_dim=16, qkv_bias=True, out_bias=True, mlp_bias=True, norm_offset=0.5, activation="gelu_tanh", attention_scale=0.3, embedding_scale=3.0,
        final_cap=4.0, rope_kind="linear", rope_factor=2.0, unrotated=(1,),
    ),
    "what they lack": replace(LLAMA, head_dim=16, norms="both", attention_cap=2.0, windows=(0, 9), rope_share=0.5, qk_norm=True, qk_norm_whole=True),
}  # fmt: skip


@needs_gpu
@pytest.mark.parametrize("c", WIDE.values(), ids=WIDE)
def test_graphs_write_what_a_loop_without_a_cache_does(c: ModelConfig) -> None:
    torch.set_float32_matmul_precision("highest")
    model = made(c, device="cuda")
    engine = BatchEngine(model, rows=4, length=192)
    want = [without_cache(model, prompt, 150) for prompt in prompts()]
    assert engine.generate(prompts(), new_tokens=150, stop=STOP, temperature=0) == want
    one, two = (engine.generate(prompts(), new_tokens=60, stop=STOP, seed=seed) for seed in (1, 2))
    assert one != two and one == engine.generate(prompts(), new_tokens=60, stop=STOP, seed=1)
    there = made(c)
    there.load_state_dict(model.state_dict())
    assert one == BatchEngine(there, rows=4, length=192).generate(prompts(), new_tokens=60, stop=STOP, seed=1), (
        "the CPU draws the same"
    )


@needs_gpu
def test_graphs_see_refreshed_weights_in_bf16() -> None:
    model, other = (
        made(SHAPES["qwen3"], torch.bfloat16, device="cuda"),
        made(SHAPES["qwen3"], torch.bfloat16, seed=8, device="cuda"),
    )
    engine = BatchEngine(model, rows=4, length=192)
    told: dict[str, Any] = {"new_tokens": 40, "stop": STOP, "temperature": 0}
    before = engine.generate(prompts(), **told)
    with torch.no_grad():
        for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
            ours.copy_(theirs)
    engine.refresh()
    assert (
        engine.generate(prompts(), **told)
        == BatchEngine(other, rows=4, length=192).generate(prompts(), **told)
        != before
    )


def small_model(folder: Path, **changed: int) -> None:
    """Weights of some MB."""
    import torch

    from stoker.training.model import hf
    from stoker.training.model.config import ModelConfig
    from stoker.training.model.decoder import Decoder
    from stoker.training.tokenizer.tokenizer import bytes_tokenizer

    sizes: dict[str, Any] = {
        "layers": 1,
        "dim": 8,
        "heads": 2,
        "kv_heads": 2,
        "head_dim": 8,
        "ff": 16,
        "vocab_size": 300,
    }
    torch.manual_seed(1)
    hf.save(Decoder(ModelConfig(**{**sizes, **changed}), 4096), str(folder), say=lambda line: None)
    bytes_tokenizer().save(str(folder))


def test_keys_and_values_beyond_the_memory_that_is_free_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model of 17 MB kept 9 GB of them for `stoker chat`."""
    torch = pytest.importorskip("torch")
    from stoker.training.generate.conversation import opened
    from stoker.training.serve.batch import BatchEngine

    small_model(tmp_path / "deep", layers=64, heads=512, kv_heads=512)
    model, words = opened(str(tmp_path / "deep"), 4096, torch.device("cpu"), lambda line: None)
    total, free = 8 << 30, 1 << 30
    monkeypatch.setattr(host_memory, "read_memory", lambda: (total, free, None))
    with pytest.raises(Refusal, match=r"keys and values of 4,\d\d\d tokens take 8.* and 1.* is free"):
        BatchEngine(model, rows=1, length=4096, vocab=words.vocab_size)
    BatchEngine(model, rows=1, length=128, vocab=words.vocab_size)
