"""Seconds from the start of the process to the end of the first optimizer step: `stoker train sft --qlora`, and transformers + bitsandbytes + peft.

    PYTHONPATH=src python benchmarks/qlora_first.py --json first.jsonl --commit $(git rev-parse --short HEAD)
    PYTHONPATH=src python benchmarks/qlora_first.py --size tiny --context 64       no GPU: shows that it works, measures nothing

Both read the same folder of random weights in bf16 (8B: 16 GB, written once), quantize to NF4 with double quantization and learn adapters of rank 16 on all linear
layers; a step is 4 × 2,048 tokens. A first round of each, not counted, fills the page cache, the caches of compiled kernels, and Stoker's of prepared chats. Then
they take turns. The peer loads with from_pretrained(load_in_4bit), prepare_model_for_kbit_training and gradient checkpointing; its tokens are random, ready on the GPU.
Stoker's seconds count from the command, with its launcher, plan, and chats; without sample answers before the first step (--samples 0), which the peer does not write.
`stoker-samples` is a run with them.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import qlora
from shapes import written

MARKS = {
    "POST-IMPORT": "imported",
    "weights from": "read and quantized",
    "] model:": "built",
    "first step after": "first step",
}
STOKER = "import sys; from stoker.cli.main import main; sys.exit(main())"
ROWS = 2000


def chats(folder: str) -> str:
    path = os.path.join(folder, "chats.jsonl")
    with open(path, "w") as file:
        for n in range(ROWS):
            asked, answered = f"Count to {n % 50}, please.", " ".join(map(str, range(n % 50 + 1)))
            messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
            file.write(json.dumps({"messages": messages}) + "\n")
    return path


def commands(given: argparse.Namespace, model: str, scratch: str) -> dict[str, list[str]]:
    train = [
        sys.executable, "-c", STOKER, "train", "sft", "--qlora", "--model.load", model, "--data", chats(scratch), "--context-length", str(given.context),
        "--batch.micro", str(given.micro), "--batch.accumulation", "1", "--max-steps", "1", "--log_every", "1", "--eval_tokens", "1",
    ]  # fmt: skip
    peer = [
        sys.executable,
        os.path.abspath(__file__),
        "--peer",
        model,
        "--micro",
        str(given.micro),
        "--context",
        str(given.context),
    ]
    return {"stoker": [*train, "--samples", "0"], "peft": peer, "stoker-samples": train}


def timed(argv: list[str], scratch: str) -> dict[str, Any]:
    """When each of its lines came."""
    begun, seen, said = time.monotonic(), dict[str, float](), list[str]()
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)  # it starts elsewhere: none may be relative
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in paths if path)}
    with subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=scratch, errors="replace", env=env
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            said.append(line.rstrip())
            for mark, name in MARKS.items():
                if mark in line:
                    seen.setdefault(name, round(time.monotonic() - begun, 2))
    found: dict[str, Any] = {"first_step_s": seen.get("first step"), "at_s": seen}
    words = [line[line.index("first step after") :] for line in said if "first step after" in line]
    if words and process.returncode == 0:
        return {**found, "said": words[0]}
    return {**found, "failed": process.returncode, "lines": "\n".join(said)}


def peer(model: str, micro: int, context: int) -> int:
    """As guides for QLoRA have it."""
    import torch

    transformers: Any = importlib.import_module("transformers")
    peft: Any = importlib.import_module("peft")
    print("POST-IMPORT", flush=True)
    where = "cuda" if torch.cuda.is_available() else "cpu"
    bits = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    net = transformers.AutoModelForCausalLM.from_pretrained(
        model, quantization_config=bits, dtype=torch.bfloat16, device_map={"": where}
    )
    print("weights from", flush=True)
    net = peft.prepare_model_for_kbit_training(net, use_gradient_checkpointing=True)
    settings = peft.LoraConfig(r=16, lora_alpha=32, target_modules=qlora.NAMES, task_type="CAUSAL_LM")
    net = peft.get_peft_model(net, settings)
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=2e-4, fused=where == "cuda")
    net.train()
    print("] model:", flush=True)
    inputs = torch.randint(0, net.config.vocab_size, (micro, context), device=where)
    with torch.autocast(where, torch.bfloat16):
        loss = net(input_ids=inputs, labels=inputs).loss
    loss.backward()
    optimizer.step()
    if where == "cuda":
        torch.cuda.synchronize()
    print(f"first step after all that: loss {float(loss.detach()):.4f}", flush=True)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="8b")
    parser.add_argument("--folder", default="", help="of the weights; written if it is not there")
    parser.add_argument("--micro", type=int, default=4)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--ways", default="stoker,peft,stoker-samples")
    parser.add_argument("--json", default="")
    parser.add_argument("--commit", default="")
    parser.add_argument("--peer", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.peer:
        return peer(given.peer, given.micro, given.context)
    begun = time.monotonic()
    found = qlora.apart([importlib.import_module("shapes").__file__ or "", given.size, given.folder])[1]
    model = os.path.abspath(written(given.size, given.folder))  # it is there by now
    print(f"{model}: {time.monotonic() - begun:.1f} s ({found.splitlines()[0][:200]})", flush=True)
    seconds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        ways = {name: argv for name, argv in commands(given, model, scratch).items() if name in given.ways.split(",")}
        for turn in range(given.rounds + 1):
            for name, argv in (list(ways.items()), list(ways.items())[::-1])[turn % 2]:
                if name == "stoker-samples" and turn != 1:
                    continue
                cell = timed(argv, scratch)
                lines = cell.pop("lines", "")
                qlora.keep({"way": name, "round": turn, "counts": turn > 0, **cell, "commit": given.commit}, given.json)
                if lines:
                    print(qlora.tail(lines), flush=True)
                elif turn:
                    seconds.setdefault(name, []).append(cell["first_step_s"])
    medians = {name: statistics.median(some) for name, some in seconds.items()}
    share = f": {medians['stoker'] / medians['peft']:.2f} × the peer's" if {"stoker", "peft"} <= medians.keys() else ""
    print(f"medians {json.dumps(medians)}{share}")
    return 0 if {"stoker", "peft"} <= medians.keys() else 1


if __name__ == "__main__":
    sys.exit(main())
