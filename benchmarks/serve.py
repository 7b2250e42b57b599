"""Answers of many lengths: the engine, and transformers' generate in padded batches, on one load.

    PYTHONPATH=src python benchmarks/serve.py --json serve.jsonl --commit $(git rev-parse --short HEAD)
    PYTHONPATH=src python benchmarks/serve.py --only step-8b
    PYTHONPATH=src python benchmarks/serve.py --only equal     answers of one length, as GRPO has them
    PYTHONPATH=src python benchmarks/serve.py --shape tiny --requests 12 --slots 4 --shorter 16       no GPU: shows that it works, measures nothing

The load: prompts of 64 to 256 tokens, answers of 32 to 1,024 (lognormal, seed 0), no end token, all there at the start, plain
sampling at temperature 1. Tokens a second count those that were asked for. `generate` takes requests as they come, 64 at once, each
batch lasts as long as its longest answer, and it is measured on the first --peer-requests. A first pass of each, not counted, compiles and captures. `step-8b`: a token step of 64 answers of a Llama-3.1-8B
shape beside what reading its weights and cache takes at the bandwidth measured in the same run. `equal`: --slots prompts of 128
tokens in groups of 8 with 256 new tokens each.
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from shapes import SHAPES

from stoker.contract.frozen import replace
from stoker.training.generate.config import Sampling
from stoker.training.model.config import ModelConfig
from stoker.training.model.decoder import Decoder
from stoker.training.serve.batch import BatchEngine
from stoker.training.serve.engine import PagedEngine, Sizes, answers
from stoker.training.serve.request import Request

TINY = ModelConfig(layers=2, dim=64, heads=4, kv_heads=2, head_dim=16, ff=96, vocab_size=512)
LONGEST = 256 + 1024
Load = list[tuple[list[int], int]]


def load_of(count: int, vocab: int, shorter: int) -> Load:
    draw = random.Random(0)
    top = min(100_000, vocab)
    return [
        (
            [draw.randrange(5, top) for _ in range(draw.randint(64, 256) // shorter)],
            max(32, min(1024, int(draw.lognormvariate(5.3, 0.8)))) // shorter,
        )
        for _ in range(count)
    ]


def model_of(c: ModelConfig, device: torch.device) -> Decoder:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with torch.device(device):
        model = Decoder(c, LONGEST + 16, dtype)
    model.place(device)
    model.start(0)
    return model.eval()


def equal(engine: BatchEngine, slots: int, shorter: int, vocab: int) -> Callable[[], int]:
    draw = random.Random(1)
    groups = [[draw.randrange(5, vocab) for _ in range(128 // shorter)] for _ in range(-(-slots // 8))]
    prompts = [group for group in groups for _ in range(8)][:slots]
    seeds = iter(range(1000))

    def run() -> int:
        made = engine.generate(prompts, new_tokens=256 // shorter, stop=(), temperature=1.0, seed=next(seeds))
        engine.refresh()
        return sum(map(len, made))

    return run


def paged(model: Decoder, load: Load, slots: int, turn: int) -> Callable[[], int]:
    memory = min(slots * LONGEST, sum(len(prompt) + new for prompt, new in load) + LONGEST)
    engine = PagedEngine(model, Sizes(slots=slots, length=LONGEST, memory=memory, prompt_tokens=8192, turn=turn))
    passes = iter(range(1000))

    def run() -> int:
        turn = next(passes)
        asked = [
            Request(f"{turn}-{number}", tuple(prompt), new, Sampling(1.0), seed=turn, index=number)
            for number, (prompt, new) in enumerate(load)
        ]
        return sum(len(answer.tokens) for answer in answers(engine, asked))

    return run


def generate(c: ModelConfig, device: torch.device, load: Load) -> Callable[[], int]:
    """As its users pad: on the left, to the longest of the batch."""
    transformers: Any = importlib.import_module("transformers")
    told = transformers.Qwen3Config(
        vocab_size=c.vocab_size, hidden_size=c.dim, intermediate_size=c.ff, num_hidden_layers=c.layers,
        num_attention_heads=c.heads, num_key_value_heads=c.kv_heads, head_dim=c.head_dim, max_position_embeddings=4096,
        tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(device):
        net = transformers.Qwen3ForCausalLM(told).eval().to(torch.bfloat16 if device.type == "cuda" else torch.float32)

    @torch.inference_mode()
    def run() -> int:
        got = 0
        for begin in range(0, len(load), 64):
            some = load[begin : begin + 64]
            width, longest = max(len(prompt) for prompt, _ in some), max(new for _, new in some)
            ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt, _ in some], device=device)
            seen = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p, _ in some], device=device)
            made = net.generate(
                ids, attention_mask=seen, max_new_tokens=longest, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
                eos_token_id=None, pad_token_id=0,
            )  # fmt: skip
            got += sum(min(made.shape[1] - width, new) for _, new in some)
        return got

    return run


def timed(run: Callable[[], int], rounds: int, warm: bool = True) -> tuple[float, int]:
    """(seconds, median; tokens)."""
    if warm:
        run()
    found, tokens = list[float](), 0
    for _ in range(rounds):
        _wait()
        begun = time.perf_counter()
        tokens = run()
        _wait()
        found.append(time.perf_counter() - begun)
    return statistics.median(found), tokens


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def step_8b(rows: int, context: int, turn: int) -> dict[str, Any]:
    """Of 64 answers in the middle of their way: the step on the device, with the host, and by bytes."""
    c = SHAPES["llama-3.1-8b"]
    device = torch.device("cuda")
    model = model_of(c, device)
    engine = PagedEngine(model, Sizes(slots=rows, length=LONGEST, memory=rows * LONGEST, prompt_tokens=8192, turn=turn))
    draw = random.Random(0)
    for number in range(rows):
        prompt = tuple(draw.randrange(5, 100_000) for _ in range(context))
        engine.add(Request(str(number), prompt, 700, Sampling(1.0), index=number))
    while len(engine.schedule.running) < rows or any(one.left > 1 for one in engine.schedule.running):
        engine.step()
    for _ in range(3):
        engine.turn()
    times = []
    for _ in range(20):
        begun = time.perf_counter()
        tokens = max(len(run.tokens) for run in engine.turn())
        times.append((time.perf_counter() - begun) / tokens)
    ((_, replay),) = list(engine._paged._steps.items())[-1:]
    on_device = []
    for _ in range(30):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        engine._paged._at.zero_()  # it writes to the place of the first token again
        begin.record()
        replay()
        end.record()
        end.synchronize()
        on_device.append(begin.elapsed_time(end) / 1000)
    mean = statistics.mean(len(one.tokens) for one in engine.schedule.running)
    weights = 2 * (sum(p.numel() for p in model.parameters()) - model.embed.weight.numel())
    cache = rows * mean * c.layers * 2 * c.kv_heads * c.head_dim * 2
    floor = (weights + cache) / bandwidth()
    return {
        "way": "step-8b", "rows": rows, "context": round(mean), "step_ms": round(1000 * statistics.median(times), 2),
        "device_ms": round(1000 * statistics.median(on_device), 2), "floor_ms": round(1000 * floor, 2),
        "share": round(floor / statistics.median(times), 3), "device_share": round(floor / statistics.median(on_device), 3),
    }  # fmt: skip


def bandwidth() -> float:
    """Bytes a second that a sum over 8 GB reads."""
    numbers = torch.zeros(1 << 32, dtype=torch.bfloat16, device="cuda").view(torch.int32)
    found = []
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        numbers.amax()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) / 1000)
    return numbers.nbytes / min(found)


def way_of(way: str, model: Decoder, load: Load, given: argparse.Namespace) -> Callable[[], int]:
    slots, shorter, vocab = given.slots, given.shorter, model.config.vocab_size
    if way == "paged":
        return paged(model, load, slots, given.turn)
    return equal(BatchEngine(model, rows=slots, length=(128 + 256) // shorter), slots, shorter, vocab)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-0.6b", help="of shapes.py, or tiny")
    parser.add_argument("--requests", type=int, default=1024)
    parser.add_argument("--peer-requests", type=int, default=64)
    parser.add_argument("--slots", type=int, default=256)
    parser.add_argument("--shorter", type=int, default=1, help="lengths are divided by this")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--turn", type=int, default=16, help="tokens between two looks of the host")
    parser.add_argument("--only", default="paged,equal,generate,step-8b")
    parser.add_argument("--json", default="")
    parser.add_argument("--commit", default="")
    given = parser.parse_args(argv)
    gpu = torch.cuda.is_available()
    device = torch.device("cuda" if gpu else "cpu")
    c = TINY if given.shape == "tiny" else replace(SHAPES[given.shape])
    load, ways = load_of(given.requests, c.vocab_size, given.shorter), given.only.split(",")
    rates: dict[str, float] = {}
    rows: list[dict[str, Any]] = []

    def keep(row: dict[str, Any]) -> None:
        row = {**row, "device": torch.cuda.get_device_name() if gpu else "CPU", "commit": given.commit}
        rows.append(row)
        print(json.dumps(row), flush=True)
        if given.json:
            with open(given.json, "a") as file:
                file.write(json.dumps(row) + "\n")

    ours = [way for way in ("paged", "equal") if way in ways]
    if ours:
        model = model_of(c, device)
        for way in ours:
            made = way_of(way, model, load, given)
            seconds, tokens = timed(made, given.rounds)
            rates[way] = tokens / seconds
            keep(
                {
                    "way": way,
                    "requests": given.slots if way == "equal" else len(load),
                    "tokens": tokens,
                    "s": round(seconds, 2),
                    "tok_s": round(rates[way]),
                }
            )
        del model, made
    if "generate" in ways:
        some = load[: given.peer_requests]
        seconds, tokens = timed(generate(c, device, some), 1, warm=False)
        rates["generate"] = tokens / seconds
        row = {"way": "generate", "requests": len(some), "tokens": tokens, "s": round(seconds, 2)}
        keep({**row, "tok_s": round(rates["generate"])})
    if "paged" in rates and "generate" in rates:
        print(f"paged: {rates['paged'] / rates['generate']:.2f} × generate")
    if "step-8b" in ways and gpu:
        torch.cuda.empty_cache()
        keep(step_8b(64, 512, given.turn))
    elif "step-8b" in ways:
        print("step-8b: needs a GPU")
    return 0 if rows else 1


if __name__ == "__main__":
    sys.exit(main())
