"""Encoding text: Stoker's tokenizer against the `tokenizers` library with the same tokenizer.json, on one core, in turn.

    python benchmarks/encode.py                          100 MB of made-up rows, kinds gemma, mistral and phi3, 3 rounds: about 20 minutes
    python benchmarks/encode.py --megabytes 5 --rounds 1
    python benchmarks/encode.py --text rows.txt          your own text, one row per line

Both sides get the same rows, one after the other, and return ids. Stoker's side is what a preparation worker calls for each row; the library's is
`encode` (and `encode_batch_fast`, which computes no offsets) with special tokens in the text kept as text. The kinds differ in how they write blanks and in their special tokens; each is
a BPE with byte fallback and 32,768 tokens, trained here on the rows' first 4 MB.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

os.environ["TOKENIZERS_PARALLELISM"] = "false"

import numpy as np
from data import made_up
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from stoker.training.tokenizer.tokenizer import load

VOCABULARY = 32768
TRAINING_BYTES = 4 << 20
BAR = 1.05
SPECIAL = {
    "gemma": ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"],
    "mistral": ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"],
    "phi3": ["<unk>", "<s>", "</s>", "<|endoftext|>", "<|user|>", "<|assistant|>", "<|end|>"],
}


def make_tokenizer(kind: str, rows: Sequence[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    replace = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = replace if kind == "gemma" else normalizers.Sequence([normalizers.Prepend("▁"), replace])
    if kind == "gemma":
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    special = [*SPECIAL[kind], *(f"<0x{byte:02X}>" for byte in range(256))]
    # Merges within words only, as sentencepiece learns them; the saved tokenizer has the kind's own splitter.
    splitter, tokenizer.pre_tokenizer = tokenizer.pre_tokenizer, pre_tokenizers.Split("▁", "merged_with_next")
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=special, show_progress=False)
    size, sample = 0, []
    for row in rows:
        sample.append(row)
        size += len(row)
        if size > TRAINING_BYTES:
            break
    tokenizer.train_from_iterator(sample, trainer)
    definition = json.loads(tokenizer.to_str())
    definition["added_tokens"] = [token for token in definition["added_tokens"] if token["content"] in SPECIAL[kind]]
    definition["pre_tokenizer"] = None
    tokenizer = Tokenizer.from_str(json.dumps(definition))
    if splitter is not None:
        tokenizer.pre_tokenizer = splitter
    tokenizer.encode_special_tokens = True
    return tokenizer


def seconds(encode: Callable[[str], object], rows: Sequence[str]) -> float:
    start = time.perf_counter()
    for row in rows:
        encode(row)
    return time.perf_counter() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=100.0)
    parser.add_argument("--text", help="a file with one row per line, instead of made-up rows")
    parser.add_argument("--kinds", default="gemma,mistral,phi3")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", default="", help="append the results to this file of JSON lines")
    args = parser.parse_args()
    if args.text:
        rows = Path(args.text).read_text().splitlines()
    else:
        rows = list(made_up(int(args.megabytes * 1e6)))
    size = sum(len(row.encode()) for row in rows)
    print(
        f"{size / 1e6:.1f} MB in {len(rows):,} rows; tokenizers {version('tokenizers')}; medians of {args.rounds} rounds in turn"
    )
    missed = False
    for kind in args.kinds.split(","):
        library = make_tokenizer(kind, rows)
        with tempfile.TemporaryDirectory() as folder:
            library.save(os.path.join(folder, "tokenizer.json"))
            ours = load(folder)
            ours.use(None)  # a plan for tiktoken would make it faster still; these kinds have none
            for row in rows[:50]:
                ids = library.encode(row, add_special_tokens=False).ids
                assert ours.encode(row) == ids, f"{kind}: other ids for {row[:60]!r}"
            ways: dict[str, Callable[[str], object]] = {
                "stoker": lambda row, ours=ours: ours.array(row.encode()),
                "encode": lambda row, library=library: np.array(library.encode(row, add_special_tokens=False).ids),
                "encode_batch_fast": lambda row, library=library: np.array(
                    library.encode_batch_fast([row], add_special_tokens=False)[0].ids
                ),
            }
            times: dict[str, list[float]] = {name: [] for name in ways}
            for _ in range(args.rounds):
                for name, encode in ways.items():
                    times[name].append(seconds(encode, rows))
        medians = {name: statistics.median(values) for name, values in times.items()}
        ratio = medians["stoker"] / medians["encode"]
        missed = missed or ratio > BAR
        shares = ", ".join(f"{name} {value:.1f} s" for name, value in medians.items())
        print(
            f"{kind}: {shares}; stoker takes {ratio:.2f} of encode's time, {medians['stoker'] / medians['encode_batch_fast']:.2f} of encode_batch_fast's"
        )
        if args.json:
            with open(args.json, "a") as file:
                file.write(json.dumps({"kind": kind, "bytes": size, "rounds": args.rounds, **medians}) + "\n")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
