"""Does a checkout compute what another one did? Runs every stage at debug sizes on the CPU with fixed seeds, and writes
one JSON of sha256 sums: loss curves, exported folders, the last checkpoints' tensors, evaluation answers.

    python benchmarks/identical.py --out before.json                          # this checkout
    python benchmarks/identical.py --tree ../other --out after.json --against before.json

`--out` also keeps half-way checkpoints beside the JSON (before.d/). With `--against` a run goes on from those, and its
curve must be that of the run which was never stopped: old checkpoints resume in the new code.
Exit code 1 where something differs. About 3 minutes on two cores.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

TIMES = (
    "time",
    "tokens_per_s",
    "mfu",
    "memory",
    "seconds_per_step",
    "resumed_at",
    "planned_bytes",
    "peak_bytes",
    "answers_s",
    "learn_s",
)
FIXED = ("--preset", "debug", "--parallel.device", "cpu", "--train.log_samples", "false", "--train.debug", "false")
SHAPE = ("--model.depth", "0", "--model.layers", "2", "--model.dim", "64", "--model.heads", "2", "--model.ff", "128")
SHORT = ("--data.context_length", "128", "--batch.micro", "4")
ANSWERS = ("--generate.new_tokens", "24", "--data.context_length", "192")
HALF = ("pretrain-1", "sft-2", "grpo-density-2")  # a checkpoint half-way is kept of these


class Tree:
    """One checkout's commands, and the folder its runs go to."""

    def __init__(self, source: Path, folder: Path) -> None:
        self.source, self.folder = source, folder
        kept = {name: text for name, text in os.environ.items() if not name.startswith(("STOKER", "TORCHELASTIC"))}
        self.environment = {
            **kept, "PYTHONPATH": str(source / "src"), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1",
            "HOME": str(folder), "PYTHONHASHSEED": "0", "STOKER_RUNS": str(folder / "runs"),
        }  # fmt: skip

    def call(self, name: str, *words: str) -> None:
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-P", *words],
            check=False,
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise SystemExit(f"{name} failed with {done.returncode}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
        print(f"{name}: {time.monotonic() - began:.1f} s", flush=True)

    def train(self, name: str, stage: str, *words: str, ranks: int = 1) -> Path:
        run = ("--nproc-per-node", str(ranks), "--name", name, "--quiet")
        self.call(name, "-m", "stoker", "train", stage, *FIXED, *run, *words)
        return self.run(name)

    def run(self, name: str) -> Path:
        (found,) = (path for path in (self.folder / "runs").glob(f"*-{name}") if not path.is_symlink())
        return found


def digest(parts: Iterable[bytes]) -> str:
    found = hashlib.sha256()
    for part in parts:
        found.update(len(part).to_bytes(8, "little") + part)
    return found.hexdigest()


def curve(run: Path, first: int = 0) -> str:
    """Every metrics line from step `first` on, times left out."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    plain = [{key: value for key, value in row.items() if key not in TIMES} for row in rows if row["step"] >= first]
    return digest(json.dumps(row, sort_keys=True).encode() for row in plain)


def files(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): digest([path.read_bytes()])
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "README.md"  # the model card: it names the run's folders
    }


def checkpoint(folder: Path) -> str:
    """The tensors' bytes, whichever files they are in."""
    from safetensors import safe_open

    parts: list[bytes] = []
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(str(path), framework="np") as opened:
            for key in sorted(opened.keys()):
                parts += [key.encode(), opened.get_tensor(key).tobytes()]
    assert parts, f"no tensors in {folder}"
    return digest(parts)


def steps_of(run: Path) -> list[Path]:
    return sorted((run / "checkpoints").glob("step-*"))


def trained(run: Path, *, export: bool = True) -> dict[str, Any]:
    kept = json.loads((run / "result.json").read_text())["metrics"]
    found = {"curve": curve(run), "checkpoint": checkpoint(steps_of(run)[-1]), "result": digest([_sorted(kept)])}
    return found | ({"hf": files(run / "hf")} if export else {})


def answered(run: Path, *names: str) -> dict[str, Any]:
    kept = json.loads((run / "result.json").read_text())["metrics"]
    return {"result": digest([_sorted(kept)]), **{name: digest([(run / name).read_bytes()]) for name in names}}


def _sorted(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True).encode()


def grpo_words(folder: Path, *more: str) -> tuple[str, ...]:
    return (
        "--model.load", "sft/hf", "--grpo.prompts", str(folder / "world/prompts.jsonl"), *ANSWERS, "--train.max_steps", "6",
        "--grpo.prompts_per_step", "4", "--grpo.group", "4", "--batch.micro", "8", "--checkpoint.every_steps", "3",
        "--grpo.breaker_steps", "0", "--grpo.breaker_entropy", "0", "--grpo.breaker_length", "0", "--optim.learning_rate", "1e-3", "--grpo.reward_model", "reward/hf", *more,
    )  # fmt: skip


def measure(tree: Tree) -> dict[str, Any]:
    """Two chains at a time: the machine this was made for has two cores."""
    folder = tree.folder
    world = folder / "world"
    make = f"from stoker.training.world.make import make; make({str(world)!r}, seed=0, level=0, size=0.05)"
    tree.call("world", "-c", make)
    found: dict[str, Any] = {"world": files(world)}
    text = ("--data", str(world / "base.jsonl"), "--data.validation", str(world / "base-held-out.jsonl"))
    chats = ("--data", str(world / "sft.jsonl"), "--data.validation", str(world / "sft-held-out.jsonl"))
    tokenizer = tree.train("tokenizer", "tokenizer", *text, "--tokenizer.vocab_size", "512")
    found["tokenizer"] = files(tokenizer / "tokenizer") | answered(tokenizer)
    words = (*text, *SHAPE, *SHORT, "--tokenizer.path", str(tokenizer / "tokenizer"))
    load = lambda name, as_: os.symlink(tree.run(name), folder / as_)  # noqa: E731

    def text_runs() -> None:
        found["pretrain-1"] = trained(tree.train("pretrain-1", "pretrain", *words))
        load("pretrain-1", "base")
        found["midtrain-1"] = trained(
            tree.train("midtrain-1", "midtrain", "--model.load", "base/hf", *chats, *SHORT, "--optim.kind", "muon")
        )

    def ranks_run() -> None:
        more = ("--model.dropout", "0.1", "--batch.tokens", "1536", "--train.max_steps", "8")
        found["pretrain-2"] = trained(tree.train("pretrain-2", "pretrain", *words, *more, ranks=2))

    def together(*parts: Any) -> None:
        with ThreadPoolExecutor(2) as pool:
            for part in [pool.submit(part) for part in parts]:
                part.result()

    together(text_runs, ranks_run)
    found["sft-2"] = trained(
        tree.train("sft-2", "sft", "--model.load", "base/hf", *chats, *SHORT, "--train.eval_first", "true", ranks=2)
    )
    load("sft-2", "sft")

    def reward() -> None:
        pairs = ("--reward.pairs", str(world / "pairs.jsonl"), "--reward.held_out", str(world / "pairs-held-out.jsonl"))
        long = ("--data.context_length", "384", "--batch.micro", "4")
        found["reward-1"] = trained(tree.train("reward-1", "reward", "--model.load", "sft/hf", *pairs, *long))
        load("reward-1", "reward")

    def density() -> None:
        prompts = ("--density.prompts", str(world / "prompts.jsonl"), "--density.neighbours", "4")
        run = tree.train("density-1", "density", "--model.load", "sft/hf", *prompts)
        found["density-1"] = answered(run, "weights.jsonl")
        load("density-1", "density")

    together(reward, density)

    def uniform() -> None:
        run = tree.train("grpo-uniform-1", "grpo", *grpo_words(folder, "--grpo.updates", "2"))
        found["grpo-uniform-1"] = trained(run)

    def weighted() -> None:
        more = ("--grpo.weights", "density/weights.jsonl")
        found["grpo-density-2"] = trained(tree.train("grpo-density-2", "grpo", *grpo_words(folder, *more), ranks=2))

    together(uniform, weighted)

    def evaluate() -> None:
        tasks = ("--evaluate.tasks", str(world / "questions.jsonl"), "--evaluate.draws", "2", "--evaluate.most", "8")
        texts = ("--evaluate.texts", str(world / "base-held-out.jsonl"))
        run = tree.train("evaluate-2", "evaluate", "--model.load", "sft/hf", *tasks, *texts, *ANSWERS, ranks=2)
        found["evaluate-2"] = answered(run, "completions.jsonl")

    def diversity() -> None:
        models = ("--diversity.baseline", "sft/hf", "--diversity.compared", str(tree.run("grpo-uniform-1") / "hf"))
        few = ("--diversity.prompts", str(world / "prompts.jsonl"), "--diversity.most", "4", "--diversity.answers", "2")
        run = tree.train("diversity-1", "diversity", "--model.load", "sft/hf", *models, *few, *ANSWERS)
        found["diversity-1"] = answered(run, "completions.jsonl")

    def export() -> None:
        for name in ("pretrain-1", "grpo-density-2"):
            where = folder / "exported" / name
            tree.call(f"export {name}", "-m", "stoker", "export", str(steps_of(tree.run(name))[-1]), str(where))
            found[f"export-{name}"] = files(where)

    together(evaluate, diversity, export)
    return found


def goes_on(tree: Tree, kept: Path) -> dict[str, Any]:
    """The second half of a run, from another checkout's checkpoint of its first half."""
    world = tree.folder / "world"
    text = ("--data", str(world / "base.jsonl"), "--data.validation", str(world / "base-held-out.jsonl"))
    chats = ("--data", str(world / "sft.jsonl"), "--data.validation", str(world / "sft-held-out.jsonl"))
    words = {
        "pretrain-1": ("pretrain", 1, (*text, *SHAPE, *SHORT, "--tokenizer.path", str(tree.run("tokenizer") / "tokenizer"))),
        "sft-2": ("sft", 2, ("--model.load", "base/hf", *chats, *SHORT)),
        "grpo-density-2": (
            "grpo", 2, grpo_words(tree.folder, "--grpo.weights", "density/weights.jsonl"),
        ),
    }  # fmt: skip
    found = {}
    for name, (stage, ranks, given) in words.items():
        (half,) = (kept / name).glob("step-*")
        run = tree.train(f"resumed_{name}", stage, *given, "--checkpoint.resume", str(half), ranks=ranks)
        first = int(half.name.removeprefix("step-"))
        own = curve(run, first)
        found[name] = {"same as never stopped": own == curve(tree.run(name), first), "curve": own}
    return found


def differences(before: Any, after: Any, where: str = "") -> list[str]:
    if isinstance(before, dict) and isinstance(after, dict):
        names = sorted({*before, *after})
        return [
            line
            for name in names
            for line in differences(before.get(name), after.get(name), f"{where}/{name}".strip("/"))
        ]
    return [] if before == after else [f"{where}: {before} before, {after} now"]


def main() -> int:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--tree", type=Path, default=Path(__file__).resolve().parents[1], help="the checkout to run")
    asked.add_argument("--out", type=Path, help="where the JSON goes, and the half-way checkpoints beside it")
    asked.add_argument("--against", type=Path, help="an earlier JSON: differences are listed")
    told = asked.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="identical-") as folder:
        tree = Tree(told.tree.resolve(), Path(folder))
        found = measure(tree)
        if told.out is not None:
            told.out.write_text(json.dumps({"schema": 1, "sums": found}, indent=1, sort_keys=True) + "\n")
            kept = told.out.with_suffix(".d")
            shutil.rmtree(kept, ignore_errors=True)
            for name in HALF:
                half = steps_of(tree.run(name))[0]
                shutil.copytree(half, kept / name / half.name)
        lines: list[str] = []
        if told.against is not None:
            before = json.loads(told.against.read_text())
            lines = differences(before["sums"], found)
            resumed = goes_on(tree, told.against.with_suffix(".d").resolve())
            lines += [
                f"resumed {name}: another curve" for name, one in resumed.items() if not one["same as never stopped"]
            ]
    print(f"{time.monotonic() - began:.0f} s", flush=True)
    for line in lines:
        print(f"DIFFERS {line}")
    if told.against is not None and not lines:
        print(f"identical: {len(found)} results, and {len(HALF)} old checkpoints resume")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
