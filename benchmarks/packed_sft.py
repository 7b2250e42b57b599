"""SFT with packed conversations on one GPU: tokens/s and peak memory of Stoker and of TRL's SFTTrainer, and of Stoker with whole rows.

    python benchmarks/packed_sft.py --contexts 8192,32768 --json cells.jsonl --commit $(git rev-parse --short HEAD)
    python benchmarks/packed_sft.py --size T --contexts 128        no GPU: shows that it works, measures nothing

stoker         `stoker train sft`'s recipe, bf16, packed conversations: attention by document offsets
stoker-whole   the same with one conversation of exactly the context's length a row: what the same tokens cost unpacked
trl-flex       SFTTrainer, packing (best fit), liger kernels, bf16, no recomputation, flex attention
trl-sdpa       the same with torch's scaled_dot_product_attention: transformers makes a T × T mask of the positions
trl-...-save   with gradient checkpointing, for lengths that don't fit without it

All read the same file of conversations with the same tokenizer and template, start from the same random weights of Qwen3-0.6B's shape, and learn
with AdamW. Lengths are log-normal, median 400 tokens, at most 4,096 or the context. Only the assistant's tokens are learned. Every cell is a process of
its own with an empty compile cache. A step's end is a CUDA event; the median of the steps after the warm-up counts, times the tokens that are
not padding. A cell that runs out of memory says so.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

PEERS = ("stoker", "stoker-whole", "trl-flex", "trl-sdpa", "trl-flex-save", "trl-sdpa-save")
MARKS = ("<|begin|>", "<|end|>")
TEMPLATE = (
    "{% for m in messages %}{{ '<|begin|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '<|end|>' }}{% endgeneration %}"
    "{% else %}{{ m['content'] + '<|end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|begin|>assistant\n' }}{% endif %}"
)
MEDIAN, SPREAD, LONGEST = 400, 1.0, 4096  # tokens of a conversation
TAIL = 12  # lines of a failed cell


@dataclasses.dataclass(frozen=True)
class Size:
    layers: int
    dim: int
    ff: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    step_tokens: int
    steps: int
    warm: int


SIZES = {
    "M": Size(28, 1024, 3072, 16, 8, 128, 151936, step_tokens=131_072, steps=9, warm=3),
    "T": Size(2, 64, 128, 4, 2, 16, 600, step_tokens=512, steps=4, warm=1),
}


def sized(name: str, steps: int | None) -> Size:
    return dataclasses.replace(SIZES[name], steps=steps) if steps else SIZES[name]


def words(count: int, draw: random.Random) -> str:
    """Each is one token: a blank and a letter pair of the tokenizer's."""
    return "".join(" " + draw.choice("abcdefghijklmnop") for _ in range(count))


def prepare(folder: Path, size: Size, contexts: list[int]) -> None:
    import torch
    import transformers
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = ["Ġ" + letter for letter in "abcdefghijklmnop"]
    vocabulary = {token: place for place, token in enumerate([*alphabet, *pairs])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("Ġ", letter) for letter in "abcdefghijklmnop"]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    from tokenizers import decoders

    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in MARKS])
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=MARKS[1], pad_token=MARKS[1])
    fast.chat_template = TEMPLATE
    config = transformers.Qwen3Config(
        vocab_size=size.vocabulary,
        hidden_size=size.dim,
        intermediate_size=size.ff,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.head_dim,
        max_position_embeddings=max(contexts),
        tie_word_embeddings=True,
        eos_token_id=fast.eos_token_id,
    )
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = transformers.Qwen3ForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder / "model")
    fast.save_pretrained(folder / "model")
    for context in contexts:
        draw = random.Random(context)
        overhead = len(fast.apply_chat_template(chat("", ""), return_dict=False))
        rows, total = list[Any](), 0
        while total < 1.15 * size.steps * size.step_tokens:
            length = round(min(max(draw.lognormvariate(0, SPREAD) * MEDIAN, overhead + 8), LONGEST, context))
            rows.append({"messages": chat(words(4, draw), words(length - overhead - 4, draw))})
            total += length
        write(folder / f"chats-{context}.jsonl", rows)
        count = 1 + size.steps * size.step_tokens // context
        whole = [{"messages": chat(words(4, draw), words(context - overhead - 4, draw))} for _ in range(count)]
        write(folder / f"whole-{context}.jsonl", whole)


def chat(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def write(path: Path, rows: list[Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


class Marks:
    """When steps end, by the GPU's own clock: nobody waits."""

    def __init__(self) -> None:
        self.ends = list[Any]()
        self.fill = 1.0  # of the rows' places, by tokens that are not padding

    def step_ends(self) -> None:
        import torch

        if torch.cuda.is_available():
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.ends.append(event)
        else:
            self.ends.append(time.perf_counter())

    def seconds(self) -> list[float]:
        import torch

        pairs = zip(self.ends[:-1], self.ends[1:], strict=True)
        if not torch.cuda.is_available():
            return [after - before for before, after in pairs]
        torch.cuda.synchronize()
        return [before.elapsed_time(after) / 1e3 for before, after in pairs]


def stoker(told: dict[str, Any], size: Size, marks: Marks, whole: bool) -> list[float]:
    from stoker.training.data.shards import MANIFEST
    from stoker.training.loop.step import Pending, Stepper
    from stoker.training.recipes import sft as recipe
    from stoker.training.recipes import supervised

    class Marked(Stepper):
        def step(self, batch: Any, *args: Any, **more: Any) -> Pending:
            pending = super().step(batch, *args, **more)
            marks.step_ends()
            return pending

    folder, context = Path(told["folder"]), told["context"]
    keys = {
        "model.load": folder / "model",
        "data.path": folder / f"{'whole' if whole else 'chats'}-{context}.jsonl",
        "data.cache": Path(told["work"]) / "cache",
        "data.validation": "0",
        "data.context_length": context,
        "batch.tokens": size.step_tokens,
        "batch.micro": told["micro"],
        "optim.learning_rate": 1e-5,
        "optim.schedule": "constant",
        "optim.warmup_steps": 0,
        "optim.warmup_ratio": 0,
        "compute.dtype": "bf16",
        "compute.recompute": "off",
        "train.max_steps": size.steps,
        "train.log_every": 1,
        "train.eval_every": 0,
        "checkpoint.every": 0,
        "checkpoint.at_end": "false",
        "checkpoint.export": "false",
        "checkpoint.resume": "never",
    }
    with patch.object(supervised, "Stepper", Marked):
        code = recipe.main(["--preset", "production", *(f"--{name}={value}" for name, value in keys.items())])
    if code:
        raise SystemExit(code)
    manifest = json.loads(next((Path(told["work"]) / "cache").rglob(MANIFEST)).read_text())
    marks.fill = manifest["splits"]["train"]["fill"]
    lines = (Path(os.environ["STOKER_RUN_DIR"]) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def trl(told: dict[str, Any], size: Size, marks: Marks, attention: str, save: bool) -> list[float]:
    import torch
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    folder, context = Path(told["folder"]), told["context"]
    losses: list[Any] = []
    lengths: list[int] = []

    class Mark(TrainerCallback):
        def on_step_end(self, *args: Any, **more: Any) -> None:
            marks.step_ends()

    class Counted(SFTTrainer):
        def training_step(self, model: Any, inputs: Any, *args: Any, **more: Any) -> Any:
            lengths.append(inputs["input_ids"].numel())  # padding-free: the documents lie end to end
            loss = super().training_step(model, inputs, *args, **more)
            losses.append(loss.detach())
            return loss

    cuda = torch.cuda.is_available()
    kind = {"flex": "flex_attention", "sdpa": "sdpa"}[attention]
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32, attn_implementation=kind)
    arguments = SFTConfig(
        output_dir=str(Path(told["work"]) / "trl"),
        per_device_train_batch_size=told["micro"],
        gradient_accumulation_steps=size.step_tokens // context // told["micro"],
        max_steps=size.steps,
        max_length=context,
        packing=True,
        padding_free=True,
        assistant_only_loss=True,
        use_liger_kernel=cuda,
        bf16=cuda,
        gradient_checkpointing=save,
        learning_rate=1e-5,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused" if cuda else "adamw_torch",
        dataloader_num_workers=4 if cuda else 0,
        logging_steps=1000,
        logging_nan_inf_filter=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=not cuda,
    )
    data = load_dataset(
        "json", data_files=str(folder / f"chats-{context}.jsonl"), split="train", cache_dir=told["work"]
    )
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    trainer = Counted(model, arguments, train_dataset=data, processing_class=tokenizer, callbacks=[Mark()])
    trainer.train()
    marks.fill = sum(lengths) / (size.steps * size.step_tokens)
    found = torch.stack([loss.double().cpu() for loss in losses]).view(size.steps, -1).sum(1)
    return [float(loss) for loss in found]


def cell(told: dict[str, Any]) -> dict[str, Any]:
    import torch

    torch.set_float32_matmul_precision("high")
    size, marks, (peer, *how) = sized(told["size"], told["steps"]), Marks(), told["peer"].split("-")
    try:
        if peer == "stoker":
            losses = stoker(told, size, marks, "whole" in how)
        else:
            losses = trl(told, size, marks, how[0], "save" in how)
    except torch.OutOfMemoryError as problem:
        return {"fits": False, "why": str(problem).split(". ")[0]}
    seconds = marks.seconds()[size.warm - 1 :]
    rate = marks.fill * size.step_tokens / statistics.median(seconds)
    peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None
    return {
        "fits": True, "tok_s": round(rate, 1), "fill": round(marks.fill, 4), "step_s": [round(one, 4) for one in seconds],
        "peak_gib": peak and round(peak, 2), "losses": [round(one, 4) for one in losses],
    }  # fmt: skip


def child(spec: dict[str, Any], folder: Path) -> dict[str, Any]:
    work = tempfile.mkdtemp(prefix="cell-", dir=folder)
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(
            [str(Path(__file__).resolve().parent.parent / "src"), os.environ.get("PYTHONPATH", "")]
        ).rstrip(os.pathsep),
        "TORCHINDUCTOR_CACHE_DIR": work + "/inductor",
        "TRITON_CACHE_DIR": work + "/triton",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "STOKER_RUN_DIR": work + "/run",
    }
    told = {**spec, "folder": str(folder), "work": work, "result": work + "/result.json"}
    began = time.monotonic()
    ran = subprocess.run(
        [sys.executable, __file__, "--cell", json.dumps(told)], check=False, env=env, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, errors="replace",
    )  # fmt: skip
    if os.path.exists(told["result"]):
        return {**json.loads(Path(told["result"]).read_text()), "cell_s": round(time.monotonic() - began, 1)}
    return {"fits": False, "why": f"exit code {ran.returncode}:\n" + "\n".join(ran.stdout.splitlines()[-TAIL:])}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="M")
    parser.add_argument("--contexts", default="8192,32768")
    parser.add_argument("--peers", default="stoker,stoker-whole,trl-flex,trl-sdpa")
    parser.add_argument("--micro", type=int, default=1, help="rows of a micro-batch, for all")
    parser.add_argument("--steps", type=int, help="instead of the size's own number; the first 3 are not counted")
    parser.add_argument("--json", help="append one line per cell to this file")
    parser.add_argument("--commit", default="")
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.cell:
        told = json.loads(options.cell)
        Path(told["result"]).write_text(json.dumps(cell(told)))
        return 0
    contexts, peers = [int(one) for one in options.contexts.split(",")], options.peers.split(",")
    unknown = sorted(set(peers) - set(PEERS))
    if unknown:
        raise SystemExit(f"--peers: {', '.join(unknown)} is not one of {', '.join(PEERS)}")
    about = {
        "date": time.strftime("%Y-%m-%d"),
        "commit": options.commit,
        **{
            name: importlib.metadata.version(name)
            for name in ("torch", "transformers", "trl", "liger-kernel")
            if has(name)
        },
    }
    with tempfile.TemporaryDirectory(prefix="packed-") as folder:
        prepare(Path(folder), sized(options.size, options.steps), contexts)
        for context in contexts:
            for peer in peers:
                told = {
                    "size": options.size,
                    "steps": options.steps,
                    "context": context,
                    "peer": peer,
                    "micro": options.micro,
                }
                found = {**told, **child(told, Path(folder)), "about": about}
                if options.json:
                    with open(options.json, "a") as file:
                        file.write(json.dumps(found) + "\n")
                print(json.dumps({key: value for key, value in found.items() if key != "about"}), flush=True)
    return 0


def has(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
