"""GRPO with `stoker serve`: do generation and learning overlap, and does the model learn as well from answers that are one step old?

    python benchmarks/serve_overlap.py --only time           a step's seconds with 8 + 8 cores: about 2 minutes on 16 cores
    python benchmarks/serve_overlap.py --only time --device cuda   the same where both share one GPU, in bf16: their times, and no bar
    python benchmarks/serve_overlap.py --only accuracy       held-out accuracy of five seeds, staleness 0 and 1, with standard errors: about 35 minutes on 2 cores
    python benchmarks/serve_overlap.py --steps 4 --seeds 1 --only time --base FOLDER   a try; FOLDER keeps the model that all runs begin with

The task: sums of two numbers of up to three digits, worked out digit by digit ("7+8=15;3+4+1=8;85"), by a model of 0.8 million weights that a little supervised
training has taught to be right now and then. Server and trainer have half of the cores each (taskset, OMP_NUM_THREADS). Ways of a run: "alone", the trainer
writes its answers with its half of the cores; "server 0" and "server 1", the server writes them, at staleness 0 and 1. Generation and learning are those of
"alone" (answers_s and learn_s of metrics.jsonl, medians of all steps but the first three): the longer of both is what a step takes at least.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stoker.training.model import hf
from stoker.training.model.config import ModelConfig
from stoker.training.model.decoder import Decoder
from stoker.training.serve.batch import BatchEngine
from stoker.training.tokenizer import chat
from stoker.training.tokenizer.tokenizer import Tokenizer, bytes_tokenizer

HERE = Path(__file__).resolve().parent
SHAPE = ModelConfig(layers=4, dim=128, heads=4, kv_heads=4, head_dim=32, ff=352, vocab_size=260)
LENGTH, NEW_TOKENS, HELD_OUT = 96, 48, 512
WARM_UP = 3  # steps
WAYS = ("alone", "server 0", "server 1")


def worked(first: int, second: int) -> str:
    """The sum, digit by digit from the right."""
    parts, carry = [], 0
    for place in range(max(len(str(first)), len(str(second)))):
        digits = [first // 10**place % 10, second // 10**place % 10] + [carry] * bool(carry)
        parts.append(f"{'+'.join(map(str, digits))}={sum(digits)}")
        carry = sum(digits) // 10
    return ";".join([*parts, str(first + second)])


def pairs(seed: int, count: int) -> list[tuple[int, int]]:
    draw = random.Random(seed)
    return [(draw.randrange(1000), draw.randrange(1000)) for _ in range(count)]


def make_base(folder: Path, steps: int) -> None:
    """A model that is right now and then, its tokenizer, prompts to learn from and others to be asked at the end."""
    torch.manual_seed(0)
    tokenizer, draw = bytes_tokenizer(), random.Random(1)
    tokenizer.save(str(folder / "tokenizer"))
    model = Decoder(SHAPE, LENGTH)
    model.start(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(1.0, (step + 1) / 50)
        ids, targets = batch(tokenizer, [(draw.randrange(1000), draw.randrange(1000)) for _ in range(64)])
        loss = model(ids, targets) / (targets >= 0).sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 49:
            print(f"  base: step {step + 1}, loss {loss.item():.3f}", flush=True)
    hf.save(model, str(folder / "hf"), tokenizer_folder=str(folder / "tokenizer"), say=lambda line: None)
    rows = [{"prompt": f"{a}+{b}", "answer": str(a + b)} for a, b in pairs(2, 2048)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def batch(tokenizer: Tokenizer, asked: list[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    rows = []
    for a, b in asked:
        turns = [("user", f"{a}+{b}".encode()), ("assistant", worked(a, b).encode())]
        ids, learned = chat.chat(tokenizer, turns)
        rows.append((ids.astype(np.int64), learned))
    longest = max(len(ids) for ids, _ in rows)
    every = np.zeros((len(rows), longest), dtype=np.int64)
    targets = np.full((len(rows), longest), -100, dtype=np.int64)
    for row, (ids, learned) in enumerate(rows):
        every[row, : len(ids)] = ids
        targets[row, : len(ids)] = np.where(learned, ids, -100)
    return torch.from_numpy(every[:, :-1]), torch.from_numpy(targets[:, 1:])


def accuracy(folder: Path) -> float:
    """Share of held-out sums whose greedy answer ends with the right one."""
    tokenizer, model = bytes_tokenizer(), Decoder(SHAPE, LENGTH)
    hf.load(model, str(folder), lambda line: None)
    asked = [pair for pair in pairs(3, 2 * HELD_OUT) if pair not in set(pairs(2, 2048))][:HELD_OUT]
    prompts = [chat.prompt(tokenizer, [("user", f"{a}+{b}".encode())]) for a, b in asked]
    engine = BatchEngine(model, rows=128, length=LENGTH)
    written = engine.generate(prompts, new_tokens=NEW_TOKENS, stop=tokenizer.stop_ids, temperature=0.0)
    texts = [tokenizer.decode([token for token in ids if token not in tokenizer.stop_ids]) for ids in written]
    right = [text.rpartition(";")[2].strip() == str(a + b) for text, (a, b) in zip(texts, asked, strict=True)]
    return sum(right) / len(right)


class Cores:
    """Half of them each."""

    def __init__(self, device: str) -> None:
        self.device = device
        mine = sorted(os.sched_getaffinity(0))
        half = max(len(mine) // 2, 1)
        self.server, self.trainer = mine[:half], mine[half:] or mine
        self.said = f"{len(self.server)} + {len(self.trainer)}"


def started(
    words: list[str], cores: list[int], device: str, folder: Path, log: str, **more: str
) -> subprocess.Popen[bytes]:
    paths = os.pathsep.join([str(HERE.parent / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "OMP_NUM_THREADS": str(len(cores)), "PYTHONPATH": paths, "HOME": str(folder), **more}
    environment |= {"STOKER_RUNS": str(folder / "runs")}
    if device == "cpu":
        environment |= {"CUDA_VISIBLE_DEVICES": ""}
    command = ["taskset", "-c", ",".join(map(str, cores)), sys.executable, "-m", "stoker", *words]
    with open(folder / log, "wb") as file:
        return subprocess.Popen(command, cwd=folder, env=environment, stdout=file, stderr=subprocess.STDOUT)


def address_of(server: subprocess.Popen[bytes], log: Path) -> str:
    while server.poll() is None:
        for word in log.read_text(errors="replace").split():
            if word.startswith("http://127.0.0.1:"):
                return word.split("/v1")[0].rstrip("/")
        time.sleep(0.1)
    raise SystemExit(f"the server ended:\n{log.read_text(errors='replace')[-3000:]}")


def learn(base: Path, folder: Path, way: str, seed: int, steps: int, cores: Cores) -> Path:
    """The run's directory."""
    name = f"{way.replace(' ', '-')}-{seed}"
    words = [
        "train",
        "grpo",
        "--name",
        name,
        "--preset",
        "small",
        "--parallel.device",
        cores.device,
        "--compute.dtype",
        "fp32" if cores.device == "cpu" else "bf16",
    ]
    words += ["--model.load", str(base / "hf"), "--grpo.prompts", str(base / "prompts.jsonl"), "--grpo.reward", f"{HERE / 'scripts' / 'last_number.py'}:score"]  # fmt: skip
    words += ["--context_length", str(LENGTH), "--generate.new_tokens", str(NEW_TOKENS), "--generate.rows", "128", "--grpo.prompts_per_step", "16"]  # fmt: skip
    words += ["--grpo.group", "8", "--learning_rate", "1e-4", "--warmup_ratio", "0.1", "--schedule", "constant", "--weight_decay", "0"]  # fmt: skip
    words += ["--log_every", "1", "--batch.micro", "32", "--batch.tokens", "0", "--grpo.breaker_steps", "0", "--max-steps", str(steps), "--train.seed", str(seed)]  # fmt: skip
    words += ["--cache", str(folder / "cache")]
    server = None
    more = {}
    try:
        if way != "alone":
            more = {"STOKER_API_KEY": secrets.token_hex(16)}
            serve = ["serve", str(base / "hf"), "--context", str(LENGTH), "--slots", "128", "--port", "0", "--device", cores.device]  # fmt: skip
            serve += ["--weights-from", str(folder / "runs")]
            (folder / "runs").mkdir(exist_ok=True)
            server = started(serve, cores.server, cores.device, folder, f"{name}.server.log", **more)
            words += ["--grpo.server", address_of(server, folder / f"{name}.server.log"), "--grpo.staleness", way.split()[1]]  # fmt: skip
        trainer = started(words, cores.trainer, cores.device, folder, f"{name}.log", **more)
        if trainer.wait() != 0:
            raise SystemExit(f"{name} failed:\n{(folder / f'{name}.log').read_text(errors='replace')[-4000:]}")
    finally:
        if server is not None:
            server.terminate()
            server.wait()
    (found,) = (path for path in (folder / "runs").glob(f"*-{name}") if not path.is_symlink())
    return found


def seconds(run: Path) -> dict[str, float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [after["time"] - before["time"] for before, after in pairwise(rows)][WARM_UP:]
    found = {"step_s": statistics.median(steps)}
    for name in ("answers_s", "learn_s"):
        found[name] = statistics.median(row[name] for row in rows[WARM_UP:])
    return {name: round(value, 3) for name, value in found.items()}


def timed(base: Path, folder: Path, told: argparse.Namespace, cores: Cores) -> dict[str, Any]:
    found = {way: seconds(learn(base, folder, way, 0, told.steps, cores)) for way in WAYS}
    alone = found["alone"]
    longer = max(alone["answers_s"], alone["learn_s"])
    return {
        "device": cores.device,
        "cores": cores.said,
        **found,
        "step_to_longer": round(found["server 1"]["step_s"] / longer, 3),
    }


def learned(base: Path, folder: Path, told: argparse.Namespace, cores: Cores) -> dict[str, Any]:
    found: dict[str, Any] = {"held_out": HELD_OUT, "steps": told.steps, "before": round(accuracy(base / "hf"), 4)}
    for way in ("server 0", "server 1"):
        found[way] = []
        for seed in range(told.seeds):
            found[way].append(round(accuracy(learn(base, folder, way, seed, told.steps, cores) / "hf"), 4))
            print(f"  {way}, seed {seed}: {found[way][-1]:.1%}", flush=True)
    fresh, old = found["server 0"], found["server 1"]
    # Of the same seed: the same prompts in the same order.
    lower = [one - other for one, other in zip(fresh, old, strict=True)]
    for name, values in (("mean 0", fresh), ("mean 1", old), ("lower by", lower)):
        found[name] = mean_and_error(values)
    return found


def mean_and_error(values: list[float]) -> list[float | None]:
    """With its standard error, where there are two or more."""
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
    return [round(statistics.mean(values), 4), None if error is None else round(error, 4)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("time", "accuracy"))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--base-steps", type=int, default=300, help="of supervised training")
    parser.add_argument(
        "--base", type=Path, help="a folder with the model that all begin with; made where it is missing"
    )
    parser.add_argument("--commit", default="unknown")
    told = parser.parse_args()
    about = {"command": "python " + " ".join(sys.argv), "commit": told.commit, "date": time.strftime("%Y-%m-%d")}
    cores = Cores(told.device)
    with tempfile.TemporaryDirectory(prefix="serve-overlap-") as place:
        folder = Path(place)
        base = told.base or folder / "base"
        if not (base / "prompts.jsonl").exists():
            base.mkdir(parents=True, exist_ok=True)
            make_base(base, told.base_steps)
        for part, work in (("time", timed), ("accuracy", learned)):
            if told.only in (None, part):
                print(json.dumps({"part": part, **work(base, folder, told, cores), **about}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
