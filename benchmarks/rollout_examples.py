"""What examples/calculator.py and examples/guessing.py learn: the mean reward of the first and the last steps, on a CPU.

    PYTHONPATH=src python benchmarks/rollout_examples.py --seeds 0 1 2
    PYTHONPATH=src python benchmarks/rollout_examples.py --model runs/speedrun-cpu/sft/hf

First the model is trained on example transcripts: half of them call the calculator, half guess the result; a guess of the game is
random, and in 7 of 10 cases not against what was said before. GRPO does the rest. Without --model it is a small Llama with byte
tokens that begins from scratch.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from stoker.training.model import hf
from stoker.training.model.config import ModelConfig
from stoker.training.model.decoder import Decoder
from stoker.training.tokenizer import chat
from stoker.training.tokenizer.tokenizer import bytes_tokenizer
from stoker.training.tokenizer.tokenizer import load as load_tokenizer

EXAMPLES = Path(__file__).parents[1] / "examples"
SHAPE = ModelConfig(layers=2, dim=64, heads=4, kv_heads=4, head_dim=16, ff=128, vocab_size=260)
CONTEXT = 256
Messages = list[tuple[str, bytes]]


def calculation(random_: random.Random) -> Messages:
    a, b = random_.randint(2, 9), random_.randint(2, 9)
    asked: Messages = [("user", f"{a}*{b}?".encode())]
    if random_.random() < 0.5:
        return [*asked, ("assistant", str(random_.randint(4, 81)).encode())]
    result = str(a * b).encode()
    return [*asked, ("assistant", f"calc {a}*{b}".encode()), ("tool", result), ("assistant", result)]


def game(random_: random.Random) -> Messages:
    secret, low, high = random_.randint(1, 7), 1, 7
    messages: Messages = [("user", b"Guess my number from 1 to 7.")]
    for _ in range(3):
        guess = random_.randint(low, high) if random_.random() < 0.7 else random_.randint(1, 7)
        messages.append(("assistant", str(guess).encode()))
        if guess == secret:
            return messages
        low, high = (max(low, guess + 1), high) if secret > guess else (low, min(high, guess - 1))
        messages.append(("user", b"higher" if secret > guess else b"lower"))
    return messages[:-1]


def rows_of(name: str) -> list[dict[str, object]]:
    if name == "guessing":
        return [{"secret": number} for number in range(1, 8)]
    return [{"prompt": f"{a}*{b}?", "answer": str(a * b)} for a in range(2, 10) for b in range(2, 10)]


STEPS = {"calculator": (800, 40), "guessing": (1500, 120)}  # of training on transcripts, and of GRPO
TRANSCRIPTS: dict[str, Callable[[random.Random], Messages]] = {"calculator": calculation, "guessing": game}


def make_model(
    folder: Path, name: str, seed: int, steps: int, dim: int = SHAPE.dim, start: str = "", rate: float = 3e-3
) -> None:
    """Train on transcripts, and write folder/hf and folder/rows.jsonl. `start`: a folder with a model; empty: from scratch."""
    torch.manual_seed(seed)
    random_ = random.Random(seed)
    if start:
        tokenizer = load_tokenizer(start)
        model = hf.opened(start, CONTEXT, torch.float32, torch.device("cpu"), lambda line: None)
    else:
        tokenizer = bytes_tokenizer()
        model = Decoder(
            ModelConfig(**{**vars(SHAPE), "dim": dim, "head_dim": dim // SHAPE.heads, "ff": 2 * dim}), CONTEXT
        )
        model.start(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = rate * min(1.0, 2 * (1 - step / steps))
        pairs = [chat.chat(tokenizer, TRANSCRIPTS[name](random_)) for _ in range(32)]
        longest = max(len(ids) for ids, _ in pairs)
        inputs = np.zeros((len(pairs), longest), dtype=np.int64)
        targets = np.full((len(pairs), longest), -100, dtype=np.int64)
        for row, (ids, mask) in enumerate(pairs):
            inputs[row, : len(ids)] = ids
            targets[row, : len(ids)] = np.where(mask != 0, ids.astype(np.int64), -100)
        count = int((targets[:, 1:] != -100).sum())
        loss = model(torch.from_numpy(inputs[:, :-1]), torch.from_numpy(targets[:, 1:].copy())) / count
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    tokenizer.save(str(folder / "tokenizer"))
    hf.save(model, str(folder / "hf"), tokenizer_folder=str(folder / "tokenizer"), say=lambda line: None)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows_of(name)))


def words_of(folder: Path, name: str, seed: int, steps: int, rate: float = 1e-3) -> list[str]:
    """Return the options of `stoker train grpo` for an example."""
    return [
        "--preset", "small", "--model.load", str(folder / "hf"), "--grpo.prompts", str(folder / "rows.jsonl"),
        "--grpo.rollout", f"{EXAMPLES / name}.py:rollout", "--context_length", str(CONTEXT), "--generate.new_tokens", "24",
        "--grpo.prompts_per_step", "7", "--grpo.group", "24", "--learning_rate", str(rate), "--warmup_ratio", "0", "--schedule",
        "constant", "--weight_decay", "0", "--batch.micro", "64", "--batch.tokens", "0", "--grpo.kl", "0.01", "--train.seed", str(seed),
        "--max-steps", str(steps), "--grpo.breaker_steps", "0", "--cache", str(folder / "cache"),
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--examples", nargs="+", default=list(TRANSCRIPTS))
    parser.add_argument("--model", default="", help="folder of a model to begin with (default: from scratch)")
    parser.add_argument("--sft-steps", type=int, default=0, help="on transcripts (default: by the example)")
    parser.add_argument("--sft-rate", type=float, default=3e-3)
    parser.add_argument("--steps", type=int, default=0, help="of GRPO (default: by the example)")
    parser.add_argument("--rate", type=float, default=1e-3, help="GRPO's learning rate")
    told = parser.parse_args()
    torch.set_num_threads(1)
    for name in told.examples:
        for seed in told.seeds:
            with tempfile.TemporaryDirectory() as made:
                folder = Path(made)
                sft_steps, steps = told.sft_steps or STEPS[name][0], told.steps or STEPS[name][1]
                make_model(folder, name, seed, sft_steps, start=told.model, rate=told.sft_rate)
                command = [
                    sys.executable,
                    "-m",
                    "stoker.training.recipes.grpo",
                    *words_of(folder, name, seed, steps, told.rate),
                ]
                environment = {
                    **os.environ, "STOKER_RUN_DIR": str(folder / "run"), "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0",
                    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(29571 + os.getpid() % 1000), "OMP_NUM_THREADS": "1",
                }  # fmt: skip
                done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True)
                if done.returncode:
                    sys.exit(done.stdout[-3000:] + done.stderr[-3000:])
                lines = list(map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines()))
                first, last = (sum(line["reward"] for line in some) / len(some) for some in (lines[:5], lines[-5:]))
                about = {name: round(lines[-1][name], 3) for name in ("turns", "masked", "rollouts_failed")}
                print(
                    f"{name} seed {seed}: reward {first:.3f} -> {last:.3f} in {steps} steps; {about}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
