"""Many clients at once, for minutes, on a CPU: is every answer the one that its request gets alone, and does memory stay flat?

    PYTHONPATH=src python benchmarks/serve_clients.py                       200 clients, 10 minutes
    PYTHONPATH=src python benchmarks/serve_clients.py --seconds 20 --clients 50

`stoker serve` with a small model of random weights in fp32. Each client asks one question after the other, of 400 with prompts,
lengths, seeds, temperatures, filters and stop ids of their own, whole or as a stream; what the engine writes to each of them alone
is computed before. A tenth of the streams is left in the middle. A 429 is asked again a moment later. `wrong`: other tokens, another
reason for the end, another status, or no whole answer. Memory is the server's resident set, once a second.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from stoker.training.model import hf
from stoker.training.model.config import ModelConfig
from stoker.training.model.decoder import Decoder
from stoker.training.serve.batch import BatchEngine
from stoker.training.tokenizer.tokenizer import bytes_tokenizer

CONTEXT, QUESTIONS, LEFT = 256, 400, 0.1
SHAPE = ModelConfig(
    layers=2, dim=32, heads=4, kv_heads=2, head_dim=8, ff=48, vocab_size=320, qk_norm=True, init_std=0.3
)
WORDS = bytes_tokenizer()
STOPS = {5, 6, WORDS.end_id}  # the last one by itself
PATIENCE_S = 120.0
Question = dict[str, Any]


def questions() -> list[Question]:
    draw, found = random.Random(0), list[Question]()
    beginnings = [[draw.randrange(256) for _ in range(length)] for length in (16, 40, 70)]
    for _ in range(QUESTIONS):
        own = [draw.randrange(256) for _ in range(draw.randint(1, 60))]
        body: Question = {
            "prompt": draw.choice([*beginnings, []]) + own, "max_tokens": draw.randint(1, 64), "seed": draw.randrange(1000),
            "n": draw.choice((1, 1, 1, 2)), "stop_token_ids": [5, 6], "return_token_ids": True,
        }  # fmt: skip
        body |= draw.choice(
            ({"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.7, "top_k": 9}, {"top_p": 0.8})
        )
        found.append(body)
    return found


def alone(model: Decoder, vocab: int, asked: list[Question]) -> list[list[list[int]]]:
    engine = BatchEngine(model, rows=1, length=CONTEXT, vocab=vocab)
    found = []
    for body in asked:
        how = {key: body[key] for key in ("temperature", "top_k", "top_p") if key in body}
        told = {"new_tokens": body["max_tokens"], "stop": STOPS, "seed": body["seed"]}
        found.append(
            [engine.generate([body["prompt"]], indexes=[index], **told, **how)[0] for index in range(body["n"])]
        )
    return found


class Load:
    def __init__(self, port: int, asked: list[Question], want: list[list[list[int]]], seconds: float) -> None:
        self._port, self._asked, self._want = port, asked, want
        self._until = time.monotonic() + seconds
        self.count: Counter[str] = Counter()
        self.tokens = 0
        self.first: list[str] = []  # wrong ones

    async def client(self, number: int) -> None:
        draw = random.Random(number)
        while time.monotonic() < self._until:
            which, streams = draw.randrange(len(self._asked)), draw.random() < 0.5
            leaves = streams and draw.random() < 2 * LEFT
            try:
                what = await asyncio.wait_for(self._ask(which, streams, leaves), PATIENCE_S)
            except (TimeoutError, OSError, ValueError, KeyError, IndexError, EOFError) as problem:
                what = f"{type(problem).__name__}: {problem}"
            if what in ("right", "left", "429"):
                self.count[what] += 1
            else:
                self.count["wrong"] += 1
                self.first = [*self.first, f"question {which}: {what}"][:5]
            if what == "429":
                await asyncio.sleep(0.05 + 0.2 * draw.random())

    async def _ask(self, which: int, streams: bool, leaves: bool) -> str:
        data = json.dumps({**self._asked[which], "stream": streams}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 22)
        try:
            writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
            await writer.drain()
            if leaves:
                await reader.read(200)
                return "left"
            text = await reader.read()
        finally:
            writer.close()
        top, _, body = text.partition(b"\r\n\r\n")
        status = top.split()[1].decode()
        if status != "200":
            return "429" if status == "429" else f"status {status}: {body[:200]!r}"
        if b"transfer-encoding: chunked" in top.lower():
            body = unchunked(body)
        return self._judged(which, body.decode(), streams)

    def _judged(self, which: int, body: str, streams: bool) -> str:
        want = self._want[which]
        found: list[list[int]] = [[] for _ in want]
        reasons = [""] * len(want)
        events = [json.loads(body)] if not streams else []
        if streams:
            lines = [line.removeprefix("data: ") for line in body.split("\n\n") if line]
            if lines[-1] != "[DONE]":
                return "a stream without its end"
            events = [json.loads(line) for line in lines[:-1]]
        for event in events:
            for choice in event.get("choices", ()):
                found[choice["index"]] += choice.get("token_ids") or []
                reasons[choice["index"]] = choice.get("finish_reason") or reasons[choice["index"]]
        ends = ["stop" if one[-1] in STOPS else "length" for one in want]
        if found != want or reasons != ends:
            return f"{found} {reasons} instead of {want} {ends}"
        self.tokens += sum(map(len, found))
        return "right"


def unchunked(data: bytes) -> bytes:
    """Return the body that the chunks hold. Raises ValueError where the last one is missing."""
    parts: list[bytes] = []
    while True:
        size, _, rest = data.partition(b"\r\n")
        length = int(size, 16)
        if not length:
            return b"".join(parts)
        parts.append(rest[:length])
        data = rest[length + 2 :]


def resident(pid: int) -> int:
    """Bytes."""
    line = next(one for one in Path(f"/proc/{pid}/status").read_text().splitlines() if one.startswith("VmRSS"))
    return int(line.split()[1]) << 10


async def run(load: Load, clients: int, pid: int) -> list[int]:
    sizes: list[int] = []

    async def watch() -> None:
        while True:
            sizes.append(resident(pid))
            await asyncio.sleep(1.0)

    watching = asyncio.create_task(watch())
    await asyncio.gather(*(load.client(number) for number in range(clients)))
    watching.cancel()
    return sizes


async def idle(port: int) -> bool:
    """Whether nothing is left of any request, within a while."""
    for _ in range(600):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        lines = (await reader.read()).decode().splitlines()
        writer.close()
        told = {line.rsplit(" ", 1)[0]: line.rsplit(" ", 1)[1] for line in lines if line.startswith("stoker_serve_")}
        if not any(float(told[f"stoker_serve_{name}"]) for name in ("running", "waiting", "blocks_held")):
            return True
        await asyncio.sleep(0.1)
    return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--queue", type=int, default=128)
    parser.add_argument("--json", default="")
    parser.add_argument("--commit", default="")
    told = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="serve-clients-") as place:
        WORDS.save(f"{place}/tokenizer")
        model = Decoder(SHAPE, CONTEXT)
        model.start(5)
        hf.save(model, f"{place}/hf", say=lambda _: None, tokenizer_folder=f"{place}/tokenizer")
        asked = questions()
        want = alone(model.eval(), WORDS.vocab_size, asked)
        command = [sys.executable, "-m", "stoker", "serve", f"{place}/hf", "--port", "0", "--context", str(CONTEXT)]
        command += ["--slots", str(told.slots), "--queue", str(told.queue), "--device", "cpu"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        try:
            assert server.stdout is not None
            port = int(server.stdout.readline().split()[0].split(":")[2].split("/")[0])
            load = Load(port, asked, want, told.seconds)
            begun = time.monotonic()
            sizes = asyncio.run(run(load, told.clients, server.pid))
            took = time.monotonic() - begun
            nothing_left = asyncio.run(idle(port))
        finally:
            server.send_signal(signal.SIGINT)
            code = server.wait(60)
    parts = [sizes[len(sizes) * part // 10 : len(sizes) * (part + 1) // 10] for part in range(10)]
    row = {
        "clients": told.clients, "s": round(took), **{key: load.count[key] for key in ("right", "left", "429", "wrong")},
        "tok_s": round(load.tokens / took), "mib_by_tenths": [round(statistics.median(part) / 2**20, 1) for part in parts if part],
        "mib_most": round(max(sizes) / 2**20, 1), "nothing_left": nothing_left, "code": code, "commit": told.commit,
    }  # fmt: skip
    print(json.dumps(row), flush=True)
    for line in load.first:
        print(line)
    if told.json:
        with open(told.json, "a") as file:
            file.write(json.dumps(row) + "\n")
    return int(bool(load.count["wrong"] or not load.count["right"] or not nothing_left or code))


if __name__ == "__main__":
    sys.exit(main())
