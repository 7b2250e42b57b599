"""A tokenizer trained on the data: on a share of it, spread evenly, and kept in cache/tokenizers/."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import import_module
from typing import Any

import stoker
from stoker.contract import host_memory
from stoker.contract.errors import EX_CONFIG, EX_DATAERR, EX_OSERR, EX_SOFTWARE, Refusal
from stoker.contract.host_memory import limit_memory, read_used_memory
from stoker.contract.progress import BYTES, Progress
from stoker.contract.units import format_bytes
from stoker.contract.units import format_duration as time_span
from stoker.training.data.build import Say, alone, whole
from stoker.training.data.config import DataConfig
from stoker.training.data.crew import ALONE
from stoker.training.data.read import Remark, Remarks, conversations, named, texts
from stoker.training.data.units import Span
from stoker.training.tokenizer.config import TokenizerConfig
from stoker.training.tokenizer.definition import OURS, SPECIAL
from stoker.training.tokenizer.place import FILES
from stoker.training.tokenizer.tokenizer import Tokenizer, load, segments

# Trains a byte-level BPE: the same texts give the same tokenizer.


VERSION = 1
# Characters. Each merge goes through all words that have the pair: in 6 MB of letters without a blank these are words of
# 64 KB, and nearly all of the text for each merge. Words of ordinary text are shorter.
LONGEST_WORD = 256
_SHORT_WORDS = OURS.replace("+", f"{{1,{LONGEST_WORD}}}").replace("*", f"{{0,{LONGEST_WORD}}}")
_WORDS = re.compile(r"[^\W\d_]+|(?:[^\w\s]|_)+")  # about those of OURS, which cuts digits by threes
_BLANKS = re.compile(rf"\s{{{LONGEST_WORD + 1}}}")


def check_size(vocab_size: int) -> None:
    least = 256 + len(SPECIAL)
    if vocab_size < least:
        raise Refusal(
            f"tokenizer.vocab_size is {vocab_size}: a vocabulary holds 256 bytes and {len(SPECIAL)} special tokens,"
            f" {least} at least",
            EX_CONFIG,
        )


def train(texts: Iterable[str], vocab_size: int, folder: str) -> Tokenizer:
    """A small text may give fewer tokens than asked for: `vocab_size` of the result says how many."""
    check_size(vocab_size)
    # Asked for: without it, a process that once forked trains on one core.
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    tokenizers = import_module("tokenizers")
    pre, decoders = tokenizers.pre_tokenizers, tokenizers.decoders
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    words = pre.Split(tokenizers.Regex(OURS), "isolated")
    short_words = pre.Split(tokenizers.Regex(_SHORT_WORDS), "isolated")
    as_bytes = pre.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = pre.Sequence([short_words, as_bytes])
    made.decoder = decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIAL),
        min_frequency=2,
        special_tokens=[],
        initial_alphabet=sorted(pre.ByteLevel.alphabet()),
        show_progress=False,
    )
    made.train_from_iterator(texts, trainer)
    made.pre_tokenizer = pre.Sequence([words, as_bytes])  # only training cuts long words
    if made.get_vocab_size() <= 256 < vocab_size - len(SPECIAL):
        raise Refusal(
            "too little text to train a tokenizer: no pair of bytes occurs twice; --tokenizer.path bytes needs no training",
            EX_DATAERR,
        )
    # The highest ids.
    made.add_special_tokens([tokenizers.AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    found = Tokenizer(made.to_str().encode(), {"eos_token": SPECIAL[0], "pad_token": SPECIAL[-1]}, folder)
    found.save(folder)
    return found


_SIZE = struct.Struct("<Q")  # of each text on the process's stdin
_PR_SET_PDEATHSIG = 1
_NO_MEMORY = (-signal.SIGKILL, -signal.SIGABRT)  # the kernel's way, and that of a library at the process's limit


def train_apart(texts: Iterable[str], vocab_size: int, folder: str) -> Tokenizer:
    """In a process of its own, with nine tenths of the memory that is free now. Each different word takes 650 bytes: text in which
    no word comes twice takes 110 times its own size, and only the library knows how many words there are.
    """
    room = host_memory.read_memory()[1] // 10 * 9
    root = os.path.dirname(os.path.dirname(os.path.abspath(stoker.__file__)))
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "stoker.training.data.learn", folder, str(vocab_size), str(room)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # what a library prints when it crashes
        env={**os.environ, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"},  # each would set 40 MB aside
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        with contextlib.suppress(BrokenPipeError), process.stdin as sink:  # else it has ended, and says why below
            for text in texts:
                data = text.encode()
                sink.write(_SIZE.pack(len(data)) + data)
        answer, code = process.stdout.read(), process.wait()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    if code in _NO_MEMORY:
        raise Refusal(
            f"training a tokenizer takes more than {format_bytes(room)} of memory, which is what is free here: this text has very"
            " many different words; lower tokenizer.train_megabytes, or name a tokenizer with --tokenizer.path",
            EX_OSERR,
        )
    if code:
        raise Refusal(f"training a tokenizer failed: its process ended with {code}", EX_SOFTWARE)
    told = json.loads(answer)
    if told:
        raise Refusal(told["refusal"], told["code"])
    return load(folder)


def _sent() -> Iterator[str]:
    while size := sys.stdin.buffer.read(_SIZE.size):
        yield sys.stdin.buffer.read(*_SIZE.unpack(size)).decode()


def main(argv: list[str]) -> None:
    # Who asked may be killed: nobody must go on writing into a folder that the next builder removes.
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group: who asked decides
    folder, vocab_size, room = argv
    limit_memory(read_used_memory() + int(room))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        train(_sent(), int(vocab_size), folder)
    except Refusal as refusal:
        print(json.dumps({"refusal": refusal.line, "code": refusal.code}))
    except MemoryError:
        os.abort()
    else:
        print("{}")


def trained(
    told: TokenizerConfig, learned_from: dict[str, Any], spans: Callable[[], Sequence[Span]], data: DataConfig, say: Say
) -> Tokenizer:
    check_size(told.vocab_size)
    parts = {**learned_from, "vocab_size": told.vocab_size, "megabytes": told.train_megabytes, "version": VERSION}
    key = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]
    folder = os.path.join(data.cache, "tokenizers", key)
    if not _sound(folder, say):
        with alone(folder, say):
            if not _sound(folder, lambda line: None):
                chosen = spread(spans(), told.train_megabytes * 1_000_000)
                limit = min(sum(span.size for span in chosen), told.train_megabytes * 1_000_000)
                say(f"training a tokenizer of {told.vocab_size} tokens on {format_bytes(limit)} of the data")
                began = time.monotonic()
                with whole(folder) as temporary, Progress("reading for the tokenizer", limit, unit=BYTES) as progress:
                    pieces = _counted(_announced(_pieces(chosen, data, limit), say), progress)
                    made = (train if limit <= ALONE else train_apart)(pieces, told.vocab_size, temporary)
                say(f"tokenizer of {made.vocab_size} tokens in {time_span(time.monotonic() - began)}: {folder}")
                if made.vocab_size < told.vocab_size:
                    say(f"too little text for tokenizer.vocab_size {told.vocab_size}: using {made.vocab_size} tokens")
    return load(folder)


def _counted(pieces: Iterable[str], progress: Progress) -> Iterator[str]:
    for piece in pieces:
        yield piece
        progress.tick(len(piece))
    progress.end()  # what follows, joining pairs of tokens, can't be measured


def _announced(pieces: Iterable[str], say: Say) -> Iterator[str]:
    announced = False
    for piece in pieces:
        if not announced and _has_long_word(piece):
            announced = True
            say(
                f"the data has runs of more than {LONGEST_WORD} letters, signs or blanks: training the tokenizer cuts them"
            )
        yield piece


def _has_long_word(text: str) -> bool:
    parts = (str.split, _WORDS.findall)  # in turn: the second is slow
    long = all(max(map(len, cut(text)), default=0) > LONGEST_WORD for cut in parts)
    return long or _BLANKS.search(text) is not None


def _sound(folder: str, say: Say) -> bool:
    """A cached tokenizer that a crash or a disk has damaged is made again, as shards are."""
    if not os.path.exists(os.path.join(folder, FILES[0])):
        return False
    try:
        load(folder)
    except Refusal as problem:
        say(f"{problem.line}: training it again")
        shutil.rmtree(folder)
        return False
    return True


def spread(spans: Sequence[Span], limit: int) -> list[Span]:
    """Evenly over the data, about `limit` bytes."""
    total = sum(span.size for span in spans)
    if total <= limit:
        return list(spans)
    chosen, place, wanted = [], 0, 0.0
    for span in spans:  # whenever the share that should have been taken is ahead of what was
        if wanted <= place * limit / total:
            chosen.append(span)
            wanted += span.size
        place += span.size
    return chosen


def _pieces(spans: Sequence[Span], data: DataConfig, limit: int) -> Iterator[str]:
    left = limit
    first_wrong: Remark | None = None
    for span in spans:
        wrong = Remarks()
        if data.kind == "chat":
            found = (content for messages, _ in conversations(span, wrong) for _, content in messages)
        else:
            found = (text for text, _ in texts(span, data.text_key))
        for text in found:
            for segment in segments(text):
                if left <= 0 and left != limit:
                    return
                left -= len(segment)
                yield segment.decode()
        first_wrong = first_wrong or next(iter(wrong.first), None)
    if first_wrong and left == limit:
        raise Refusal(named(first_wrong), EX_DATAERR)


if __name__ == "__main__":
    main(sys.argv[1:])
