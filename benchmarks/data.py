"""Preparing data: tokens/s of `stoker prepare` against `datasets.map` with the same tokenizer, on the same cores; and the second call.

    python benchmarks/data.py                     100 MB of made-up text as jsonl, 3 rounds, both ways in turn: about 5 minutes on 2 cores
    python benchmarks/data.py --megabytes 20      shorter
    python benchmarks/data.py --text book.txt     your own text, a paragraph per row

`datasets` as people use it: load_dataset("json"), then .map(batched=True, num_proc=cores) with a PreTrainedTokenizerFast around the same
tokenizer.json, the end of text appended. Its time is that of .map alone; ours is the whole command, from the start of Python to shards on disk
with checksums. The made-up text has a Zipf vocabulary of 100,000 words, so that a cache of words does not flatter anybody, punctuation and numbers.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
BAR, SECOND_S = 2.0, 1.0
ROW_BYTES = 3000
VOCABULARY = 32768


def words(count: int, random: np.random.Generator) -> list[str]:
    pieces = [a + b for a in "bcdfghjklmnprstvwz" for b in "aeiou"] + ["th", "st", "ing", "er", "al", "on", "en"]
    found: dict[str, None] = {}
    while len(found) < count:
        found["".join(pieces[place] for place in random.integers(0, len(pieces), random.integers(1, 6)))] = None
    return list(found)


def made_up(size: int) -> Iterator[str]:
    random = np.random.default_rng(0)
    known = words(100_000, random)
    random.shuffle(known)
    weights = 1 / np.arange(3, len(known) + 3) ** 1.05
    weights /= weights.sum()
    made = 0
    while made < size:
        row: list[str] = []
        length = int(random.exponential(ROW_BYTES / 6.5)) + 10
        for place, dice in zip(
            random.choice(len(known), length, p=weights).tolist(), random.random(length).tolist(), strict=True
        ):
            word = known[place]
            if dice < 0.05:
                word += ","
            elif dice < 0.12:
                word += "."
            elif dice < 0.14:
                word = str(int(dice * 1e9) % 100_000)
            elif dice < 0.15:
                word += ".\n"
            elif dice < 0.22:
                word = word.capitalize()
            row.append(word)
        text = " ".join(row)
        made += len(text)
        yield text


def write_rows(path: Path, size: int, text: str | None) -> tuple[int, int]:
    rows: Iterator[str] | list[str] = (
        made_up(size) if text is None else [part for part in Path(text).read_text().split("\n\n") if part.strip()]
    )
    count = total = 0
    with path.open("w") as file:
        for row in rows:
            file.write(json.dumps({"text": row}) + "\n")
            count, total = count + 1, total + len(row.encode())
    return count, total


def child(way: str, rows: str, tokenizer: str, cores: int, work: str) -> None:
    began = time.perf_counter()
    if way == "stoker":
        from stoker.training.data.config import DataConfig
        from stoker.training.data.prepare import prepare
        from stoker.training.tokenizer.config import TokenizerConfig

        made = prepare(
            DataConfig(path=(rows,), validation="0", cache=work, num_workers=cores),
            TokenizerConfig(path=tokenizer),
            lambda line: None,
        )
        print(json.dumps({"tokens": made.train_tokens, "seconds": time.perf_counter() - began}))
        return
    import datasets
    from transformers import PreTrainedTokenizerFast

    datasets.disable_progress_bars()
    encode = PreTrainedTokenizerFast(
        tokenizer_file=os.path.join(tokenizer, "tokenizer.json"), eos_token="<|endoftext|>"
    )
    found = datasets.load_dataset("json", data_files=rows, split="train", cache_dir=work)
    loaded = time.perf_counter()
    end = encode.eos_token_id

    def tokens(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        return {"input_ids": [[*ids, end] for ids in encode(batch["text"], add_special_tokens=False)["input_ids"]]}

    mapped = found.map(tokens, batched=True, num_proc=cores, remove_columns=found.column_names)
    done = time.perf_counter()
    count = sum(len(column) for column in mapped.with_format("numpy").iter(1000) for column in column["input_ids"])
    print(json.dumps({"tokens": count, "seconds": done - loaded, "load": loaded - began}))


def trial(way: str, rows: Path, tokenizer: Path, cores: int, work: Path) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", way, str(rows), str(tokenizer), str(cores), str(work)]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "src"),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    began = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    whole = time.perf_counter() - began
    if done.returncode:
        raise SystemExit(f"{way} failed:\n{done.stderr}")
    return {**json.loads(done.stdout.splitlines()[-1]), "whole": whole}


def train_tokenizer(rows: Path, folder: Path) -> None:
    from stoker.training.data.learn import train

    with rows.open() as file:
        texts, size = [], 0
        for line in file:
            texts.append(json.loads(line)["text"])
            size += len(line)
            if size > 20_000_000:
                break
    train(texts, VOCABULARY, str(folder))


def row(name: str, rates: list[float], bar: str) -> str:
    return f"| {name} | {statistics.median(rates):,.0f} ({min(rates):,.0f} – {max(rates):,.0f}) | {bar} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--text", help="use this text instead")
    parser.add_argument("--cores", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--child", nargs=5, help=argparse.SUPPRESS)
    told = parser.parse_args()
    if told.child:
        way, rows, tokenizer, cores, work = told.child
        return child(way, rows, tokenizer, int(cores), work)
    with tempfile.TemporaryDirectory() as place:
        measure(Path(place), told)


def measure(place: Path, told: argparse.Namespace) -> None:
    rows, tokenizer = place / "rows.jsonl", place / "tokenizer"
    count, size = write_rows(rows, told.megabytes * 1_000_000, told.text)
    train_tokenizer(rows, tokenizer)
    ours: list[dict[str, Any]] = []
    theirs: list[dict[str, Any]] = []
    second: list[float] = []
    for number in range(told.rounds):
        print(f"round {number + 1}/{told.rounds}", file=sys.stderr)
        work = place / f"ours-{number}"
        ours.append(trial("stoker", rows, tokenizer, told.cores, work))
        second.append(trial("stoker", rows, tokenizer, told.cores, work)["whole"])
        shutil.rmtree(work)
        work = place / f"theirs-{number}"
        theirs.append(trial("datasets", rows, tokenizer, told.cores, work))
        shutil.rmtree(work)
    assert ours[0]["tokens"] == theirs[0]["tokens"], (
        f"not the same tokens: {ours[0]['tokens']} and {theirs[0]['tokens']}"
    )
    tokens = ours[0]["tokens"]
    fast, slow = [tokens / one["whole"] for one in ours], [tokens / one["seconds"] for one in theirs]
    ratio = statistics.median(fast) / statistics.median(slow)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    command = " ".join([os.path.relpath(__file__), *sys.argv[1:]])
    versions = ", ".join(
        f"{name} {version(name)}" for name in ("tokenizers", "tiktoken", "datasets", "transformers", "pyarrow", "numpy")
    )
    print(
        f"{size / 1e6:.0f} MB of {'made-up ' if told.text is None else ''}text in {count:,} jsonl rows, {tokens:,}"
        f" tokens both ways, {told.cores} cores."
    )
    print(f"Python {sys.version.split()[0]}, {versions}.")
    print(f"\nCommit {commit}, {time.strftime('%Y-%m-%d')}. `python {command}`, medians (min – max) of {told.rounds}\n")
    print("| | tokens/s | bar |\n|---|---|---|")
    print(
        row(
            f"datasets .map, num_proc={told.cores} (its load_dataset not counted:"
            f" {statistics.median(one['load'] for one in theirs):.1f} s)",
            slow,
            "–",
        )
    )
    print(
        row(
            f"stoker prepare, start of Python to checked shards: {ratio:.1f}×",
            fast,
            f"≥ {BAR:g}× {'✓' if ratio >= BAR else '✗'}",
        )
    )
    late = statistics.median(second)
    print(
        f"| stoker's second call, whole process | {late:.2f} s ({min(second):.2f} – {max(second):.2f}) | ≤ {SECOND_S:g}"
        f" s {'✓' if late <= SECOND_S else '✗'} |"
    )


if __name__ == "__main__":
    main()
