"""Seconds per GRPO step on one GPU: Stoker's parts (stage grpo's engine, loss and update) and TRL's GRPOTrainer with its defaults, one process each.

    python benchmarks/grpo_step.py --peers stoker,trl --json cells.jsonl --commit $(git rev-parse --short HEAD)
    python benchmarks/grpo_step.py --size T --peers stoker,trl           no GPU: shows that it works, measures nothing
    python benchmarks/grpo_step.py --peers stoker --prompt 256           longer prompts: what computing a group's prompt once saves

Both start from the same random weights of Qwen3-0.6B's shape (one folder, bf16), take 8 prompts of 64 bytes a step, write 8 answers of up to 256
tokens to each at temperature 1, reward the length of the text modulo 7, and learn with AdamW at 1e-6 in bf16. TRL's default has no reference
model (beta 0); neither has ours, unless --kl gives it one. A step counts from the end of the one before; the first is reported by itself and the
median of the others counts. One JSON line per cell.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PEERS = ("stoker", "trl")
LEARNING_RATE = 1e-6
END = 256  # the id behind the bytes
TAIL = 15  # lines of a failed cell


@dataclasses.dataclass(frozen=True)
class Size:
    layers: int
    dim: int
    ff: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    prompt: int  # bytes
    new: int  # tokens of an answer
    prompts: int  # a step
    group: int


SIZES = {
    "M": Size(
        layers=28,
        dim=1024,
        ff=3072,
        heads=16,
        kv_heads=8,
        head_dim=128,
        vocabulary=151936,
        prompt=64,
        new=256,
        prompts=8,
        group=8,
    ),
    "T": Size(
        layers=2,
        dim=64,
        ff=128,
        heads=4,
        kv_heads=2,
        head_dim=16,
        vocabulary=512,
        prompt=16,
        new=16,
        prompts=4,
        group=4,
    ),
}


def texts(size: Size) -> list[str]:
    draw = random.Random(0)
    return ["".join(draw.choice("abcdefgh ") for _ in range(size.prompt)) for _ in range(512)]


def reward(text: str) -> float:
    return float(len(text) % 7)


def make_weights(folder: Path, size: Size) -> None:
    import torch

    from stoker.training.model import hf
    from stoker.training.model.config import ModelConfig
    from stoker.training.model.decoder import Decoder

    shape = ModelConfig(
        layers=size.layers,
        dim=size.dim,
        ff=size.ff,
        heads=size.heads,
        kv_heads=size.kv_heads,
        head_dim=size.head_dim,
        vocab_size=size.vocabulary,
        rope_theta=1e6,
        qk_norm=True,
        tied=True,
    )
    model = Decoder(shape, size.prompt + size.new)  # on the CPU: the cells have the card to themselves
    model.start(0)
    hf.save(model, str(folder), say=lambda line: None, dtype=torch.bfloat16, end_ids=(END,))


def stoker(folder: Path, size: Size, told: argparse.Namespace) -> Iterator[dict[str, float]]:
    """Gives each step's parts, in seconds, as soon as it is over."""
    import torch

    from stoker.contract.frozen import replace
    from stoker.training.generate.config import GenerateConfig
    from stoker.training.model import hf, ready
    from stoker.training.model.decoder import Decoder
    from stoker.training.optim.config import OptimConfig
    from stoker.training.optim.optimizer import Optimizer
    from stoker.training.parallel.config import ComputeConfig, ParallelConfig
    from stoker.training.parallel.group import Group
    from stoker.training.rl.config import GrpoConfig
    from stoker.training.rl.rollout import Prompt, Rollout
    from stoker.training.rl.sampler import InTrainer
    from stoker.training.rl.update import Updater, advantages
    from stoker.training.serve.batch import BatchEngine
    from stoker.training.tokenizer.tokenizer import Tokenizer, bytes_tokenizer

    class Bytes(Tokenizer):
        def decode(self, ids: Any) -> str:
            """Most of the vocabulary has no text in this model."""
            return bytes(one for one in ids if one < END).decode("utf-8", "replace")

    compute, group = ComputeConfig(dtype="bf16" if torch.cuda.is_available() else "fp32"), Group(ParallelConfig())
    dtype = ready.dtype_of(compute, group.device)
    ready.arithmetic(compute, dtype)

    def opened() -> Decoder:
        with torch.device(group.device):
            model = Decoder(hf.shape_of(str(folder)), size.prompt + size.new, dtype)
        hf.load(model, str(folder), lambda line: None)
        ready.make_ready(model, compute, group.device, lambda line: print(line, file=sys.stderr))
        return model

    c = replace(GrpoConfig(), prompts_per_step=size.prompts, group=size.group, kl=told.kl)
    model = opened()
    reference = opened().to(dtype).requires_grad_(False) if told.kl else None
    optimizer = Optimizer(model, replace(OptimConfig(), learning_rate=LEARNING_RATE, weight_decay=0.0))
    updater = Updater(
        model,
        reference,
        optimizer,
        group,
        c,
        temperature=1.0,
        micro=told.micro,
        attention=ready.attention(compute, group.device),
    )
    answers_a_step = size.prompts * size.group
    engine = BatchEngine(model, rows=answers_a_step, length=size.prompt + size.new)
    bare = bytes_tokenizer()
    sampler = InTrainer(engine, size.new, {END}, GenerateConfig(new_tokens=size.new).sampling)
    rollout = Rollout(sampler, Bytes(bare.data, bare.config, bare.where), {END}, size.group, group)
    prompts = [Prompt(number, text, tuple(text.encode()), "") for number, text in enumerate(texts(size))]

    def now() -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()

    for step in range(told.steps):
        began = now()
        answers = rollout([prompts[(step * size.prompts + n) % len(prompts)] for n in range(size.prompts)], 0, step)
        written = now()
        rewards = [reward(answer.text) for answer in answers]
        lengths = [len(answer.ids) for answer in answers]
        above = advantages(torch.tensor(rewards, dtype=torch.float64).view(-1, size.group), True).flatten().tolist()
        learned = updater.learn(answers, above, lengths, 1.0)
        engine.refresh()
        assert learned.finite, "a loss that is no number"
        ended = now()
        yield {
            "step_s": ended - began,
            "generate_s": written - began,
            "learn_s": ended - written,
            "tokens": float(sum(lengths)),
        }


def trl(folder: Path, size: Size, told: argparse.Namespace) -> Iterator[dict[str, float]]:
    import torch
    from datasets import Dataset
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {
        **{character: number for number, character in enumerate(alphabet)},
        "<|eos|>": END,
        "<|pad|>": END + 1,
    }
    plain = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain, eos_token="<|eos|>", pad_token="<|pad|>", padding_side="left"
    )
    gpu = torch.cuda.is_available()
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.bfloat16 if gpu else torch.float32)
    model.config.pad_token_id = END + 1
    ends: list[tuple[float, float]] = []
    written: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *args: Any, **more: Any) -> None:
            if gpu:
                torch.cuda.synchronize()
            ends.append((time.perf_counter(), written[-1]))

    def rewards(completions: list[str], completion_ids: list[list[int]], **more: Any) -> list[float]:
        written.append(float(sum(map(len, completion_ids))))
        return [reward(text) for text in completions]

    with tempfile.TemporaryDirectory() as work:
        config = GRPOConfig(
            output_dir=work,
            per_device_train_batch_size=size.prompts * size.group,
            num_generations=size.group,
            max_completion_length=size.new,
            bf16=gpu,
            max_steps=told.steps,
            report_to=[],
            save_strategy="no",
            logging_steps=100,
            disable_tqdm=True,
            gradient_checkpointing=False,
            learning_rate=LEARNING_RATE,
            beta=told.kl,
            use_cpu=not gpu,
        )
        data = Dataset.from_list([{"prompt": text} for text in texts(size)])
        trainer = GRPOTrainer(
            model=model,
            processing_class=tokenizer,
            reward_funcs=rewards,
            args=config,
            train_dataset=data,
            callbacks=[Clock()],
        )
        began = time.perf_counter()
        trainer.train()
    for ended, tokens in ends:
        yield {"step_s": ended - began, "tokens": tokens}
        began = ended


def sized(told: argparse.Namespace) -> Size:
    size = SIZES[told.size]
    return dataclasses.replace(size, prompt=told.prompt or size.prompt)


def cell(told: argparse.Namespace) -> dict[str, Any]:
    import torch

    run = {"stoker": stoker, "trl": trl}[told.cell]
    steps = list(run(Path(told.folder), sized(told), told))
    later = steps[1:] or steps
    medians = {key: round(statistics.median(step[key] for step in later), 4) for key in steps[0]}
    gpu = torch.cuda.is_available()
    return {
        "peer": told.cell,
        "size": told.size,
        "device": torch.cuda.get_device_name() if gpu else f"CPU, {len(os.sched_getaffinity(0))} cores",
        **medians,
        "tokens_per_s": round(medians["tokens"] / medians["step_s"], 1),
        "steps_s": [round(step["step_s"], 4) for step in steps],
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1) if gpu else None,
        "kl": told.kl,
        "prompt": sized(told).prompt,
        "micro": told.micro if told.cell == "stoker" else None,
        "versions": {
            name: importlib.metadata.version(name)
            for name in ("torch", "transformers", "trl")
            if importlib.util.find_spec(name)
        },
        "commit": told.commit,
        "date": time.strftime("%Y-%m-%d"),
        "command": told.command,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SIZES), default="M")
    parser.add_argument("--peers", default="stoker,trl")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument(
        "--micro", type=int, default=32, help="answers Stoker learns from at once; TRL's default takes all 64"
    )
    parser.add_argument(
        "--kl", type=float, default=0.0, help="with a reference model on both sides where it is above 0"
    )
    parser.add_argument("--prompt", type=int, default=0, help="bytes of a prompt; 0: as the size has them")
    parser.add_argument("--json", help="append the lines to this file, too")
    parser.add_argument("--commit", default="")
    parser.add_argument("--cell", choices=PEERS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--command", default=" ".join(["python", *sys.argv]), help=argparse.SUPPRESS)
    told = parser.parse_args()
    if told.cell:
        print(json.dumps(cell(told)), flush=True)
        return 0
    peers = told.peers.split(",")
    unknown = [peer for peer in peers if peer not in PEERS]
    if unknown:
        raise SystemExit(f"--peers: {unknown[0]} is not one of {', '.join(PEERS)}")
    failed = 0
    with tempfile.TemporaryDirectory(prefix="grpo-step-") as work:
        weights = Path(work) / "weights"
        make_weights(weights, sized(told))
        for peer in peers:
            if peer == "trl" and importlib.util.find_spec("trl") is None:
                print(json.dumps({"peer": peer, "size": told.size, "skipped": "trl is not installed here"}), flush=True)
                continue
            more = [
                "--cell",
                peer,
                "--folder",
                str(weights),
                "--command",
                told.command,
                *(word for word in sys.argv[1:] if word),
            ]
            done = subprocess.run([sys.executable, __file__, *more], capture_output=True, text=True, check=False)
            if done.returncode:
                failed += 1
                print(
                    f"{peer} failed:\n" + "\n".join((done.stdout + done.stderr).splitlines()[-TAIL:]),
                    file=sys.stderr,
                    flush=True,
                )
                continue
            line = done.stdout.strip().splitlines()[-1]
            print(line, flush=True)
            if told.json:
                with open(told.json, "a", encoding="utf-8") as file:
                    file.write(line + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
