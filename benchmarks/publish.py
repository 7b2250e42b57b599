"""New weights for a server, from "the step is done" to an answer of the new version, by each way of grpo.publish.

    PYTHONPATH=src python benchmarks/publish.py --millions 50 --json publish.jsonl --commit $(git rev-parse --short HEAD)

A process as a trainer of one rank has a Llama of so many parameters in fp32 and publishes it again and again, changed each time,
ways in turn; `stoker serve` beside it, on the same machine, takes it and is asked for one token. Medians. `write`: until the
weights are where the server gets them from; `answer`: until its answer carries the new version. Bytes that went to a disk are the
kernel's count of both processes (write_bytes of /proc/PID/io).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

import torch

from stoker.contract.env_vars import API_KEY
from stoker.training.model import hf
from stoker.training.model.config import ModelConfig
from stoker.training.model.decoder import Decoder
from stoker.training.parallel.config import ParallelConfig
from stoker.training.parallel.group import Group
from stoker.training.rl.asking import Patient
from stoker.training.rl.dialects import Stoker
from stoker.training.rl.publish import Publisher, To
from stoker.training.rl.sending import Sender
from stoker.training.rl.waiting import ServerWait
from stoker.training.tokenizer.tokenizer import bytes_tokenizer

KEY = "benchmark"


def model_of(millions: int) -> Decoder:
    layers = max(1, round((millions * 1e6 - 2 * 260 * 768) / (12 * 768 * 768)))
    c = ModelConfig(layers=layers, dim=768, heads=12, kv_heads=12, head_dim=64, ff=2048, vocab_size=260)
    model = Decoder(c, 128)
    model.start(0)
    return model


def written(pids: list[int]) -> int:
    total = 0
    for pid in pids:
        with open(f"/proc/{pid}/io") as file:
            total += next(int(line.split()[1]) for line in file if line.startswith("write_bytes"))
    return total


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ways", default="folder,memory,group")
    parser.add_argument("--json", default="")
    parser.add_argument("--commit", default="")
    told = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=os.curdir, prefix="publish-") as place:
        model = model_of(told.millions)
        size = sum(p.numel() for p in model.parameters()) * 4
        tokenizer = bytes_tokenizer()
        tokenizer.save(os.path.join(place, "tokenizer"))
        base = os.path.join(place, "hf")
        hf.save(model, base, say=lambda _: None, tokenizer_folder=os.path.join(place, "tokenizer"))
        flags = [
            "--port",
            "0",
            "--context",
            "64",
            "--slots",
            "2",
            "--weights-from",
            place,
            "--weights-group",
            "127.0.0.1",
        ]
        server = subprocess.Popen(
            [sys.executable, "-m", "stoker", "serve", base, *flags],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env={**os.environ, API_KEY: KEY},
        )  # fmt: skip
        assert server.stdout is not None
        address = server.stdout.readline().split()[0].removeprefix("http://").partition("/")[0]
        group, ask, ways = (
            Group(ParallelConfig(device="cpu", strategy="ddp")),
            Patient(KEY, 60.0, 1 << 20),
            dict[str, Publisher | Sender](),
        )
        for way in told.ways.split(","):
            to = To((address,), way, 0, ask, ServerWait(), lambda line: print(line, file=sys.stderr))
            if way == "group":
                ways[way] = Sender(model, None, group, to, 60.0)
            else:
                ways[way] = Publisher(model, None, os.path.join(place, way), group, to)
        found: dict[str, list[tuple[float, float, int]]] = {way: [] for way in ways}
        version = 0
        for number in range(told.rounds + 1):
            for way, publish in ways.items():
                version += 1
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.add_(1e-3)
                before, begun = written([os.getpid(), server.pid]), time.monotonic()
                published = publish(version)
                there = time.monotonic() - begun
                ask(address, *Stoker("finish").push(published))
                text = ask(address, "/v1/completions", {"prompt": [65, 66], "max_tokens": 1})
                answered = time.monotonic() - begun
                assert json.loads(text or b"")["choices"][0]["weights"] == {
                    "version": version, "digest": published.digest,
                }  # fmt: skip
                if number:  # the first of each is not counted
                    found[way].append((there, answered, written([os.getpid(), server.pid]) - before))
        for way, publish in ways.items():
            publish.close()
            row = {
                "way": way, "bytes": size, "write_s": statistics.median(one[0] for one in found[way]),
                "answer_s": statistics.median(one[1] for one in found[way]),
                "disk_bytes": statistics.median(one[2] for one in found[way]), "commit": told.commit,
            }  # fmt: skip
            print(json.dumps(row))
            if told.json:
                with open(told.json, "a") as file:
                    file.write(json.dumps(row) + "\n")
        server.terminate()
        server.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
