"""How much there is to learn from: exact once the data is prepared, before that from file sizes. No numpy."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Sequence

from stoker.contract.errors import Refusal, parsing
from stoker.contract.frozen import frozen
from stoker.contract.progress import Progress
from stoker.training.config.schema import Config
from stoker.training.data.formats.table import TEXT
from stoker.training.data.rows import kind_of, rows
from stoker.training.data.shards import Prepared
from stoker.training.data.sources import local_files, share_of
from stoker.training.data.unpack import open_unpacked, packing_of
from stoker.training.reward.config import DpoConfig, RewardConfig

COUNTED = 1 << 28  # bytes of a file whose lines are counted; a longer one is taken to go on as it began
COUNTED_ROWS = 1_000_000
ENCODED_PAIRS = 1 << 24  # bytes of a file of pairs that are all tokenized before the start: about 7 s
SAMPLED_PAIRS = 4000  # of a larger one, spread over all of it
ENCODED = 1 << 21  # bytes of all files that the tokenizer reads before the start: a second or two
_BLOCK = 1 << 20
_MARKS = bytes(sign if sign == 10 else ord(".") for sign in range(256))  # every byte of a line becomes a point
# Bytes per token of English: 2.85 measured with 768 tokens, 4.4 with 65,536.
SMALL_VOCABULARY, ITS_BYTES, OTHERS_BYTES = 8192, 3.0, 4.0
UNPACKED = {".gz": 4.0, ".bz2": 5.0, ".xz": 5.0, ".zst": 4.0}  # times as large once it is unpacked
PARQUET = 2.5
PARQUET_ROW = 500  # bytes of the file for a row, where nobody counts them
CHAT_TEXT = 0.75  # of a chat's row is text, the rest JSON
FILL = 0.95  # of packed rows is not padding


@frozen
class Amount:
    """One pass over the data."""

    samples: int  # what a step counts in: rows of `data.context_length` tokens; of GRPO, prompts
    count: int  # what people count
    unit: str  # tokens, conversations, pairs or prompts
    tokens: int = 0  # 0: nobody counted them
    exact: bool = True
    held_out: int | None = None  # tokens of a validation; None: nobody counted them
    how: str = ""  # an estimate was made, in words


def of_prepared(ready: Prepared, config: Config) -> Amount:
    context = config.data.context_length
    whole = ready.train_samples if ready.train_samples is not None else (ready.train_tokens - 1) // context
    samples = max(min(whole, config.data.max_samples or whole), 1)
    kept = samples / max(whole, 1)  # data.max_samples
    tokens = round(ready.train_tokens * kept)
    if ready.kind == "chat":
        count = round(ready.train_documents * kept)
        return Amount(samples, count, "conversations", tokens, held_out=ready.validation_tokens)
    return Amount(samples, tokens, "tokens", tokens, held_out=ready.validation_tokens)


GUESSED = "a guess from the size of the files"
ENCODED_ALL, ENCODED_TEXT = "the tokenizer counted all {rows:,} rows", "the tokenizer counted the whole text"


def estimated(config: Config, vocabulary: int) -> Amount | None:
    """Of `data.path`, before it is prepared. None: it is not on this machine yet."""
    try:
        files = local_files(config.data.path)
    except Refusal:
        return None
    if not files:
        return None
    chat = config.data.kind == "chat"
    held_out = share_of(config.data.validation) or 0.0
    size = sum(_unpacked(path) for path in files)
    seen = _encoded(config, files) if size <= ENCODED else None
    all_tokens, how = size * (CHAT_TEXT if chat else 1.0) / _bytes_per_token(config, vocabulary), GUESSED
    if seen is not None:
        all_tokens, how = seen[0], ENCODED_ALL.format(rows=seen[1]) if seen[1] else ENCODED_TEXT
    tokens = int(all_tokens * (1 - held_out))
    context = config.data.context_length
    samples = max(int(tokens / context / (FILL if chat else 1.0)), 1)
    share = share_of(config.data.validation)
    aside = None if share is None else int(tokens * share / (1 - share))
    limit = config.data.max_samples
    if limit and limit < samples:
        tokens, samples = tokens * limit // samples, limit
    if not chat:
        return Amount(samples, tokens, "tokens", tokens, exact=False, held_out=aside, how=how)
    count = round(sum(lines_in(path) for path in files if kind_of(path) in ("jsonl", "json", "csv")) * (1 - held_out))
    unit = "conversations" if count else "tokens"
    return Amount(samples, count or tokens, unit, tokens, exact=False, held_out=aside, how=how)


def is_small(config: Config) -> bool:
    """Return whether the files of `data.path` are here, and so few that tokenizing them takes a second or two."""
    try:
        files = local_files(config.data.path)
    except Refusal:
        return False
    return sum(_unpacked(path) for path in files) <= ENCODED


def _encoded(config: Config, files: Sequence[str]) -> tuple[int, int] | None:
    """(tokens, rows) by the tokenizer. None: it is not on this machine, or preparing the data will say what is wrong."""
    folder = config.tokenizer.path
    if folder != "bytes" and not os.path.isdir(folder):
        return None
    from stoker.training.data.show import Ask, show
    from stoker.training.tokenizer.tokenizer import load

    try:
        data, words = config.data, load(folder)
        as_rows = data.format if data.kind == "chat" else TEXT
        ask = Ask(words, data.context_length, as_rows, data.text_key)
        shown = [show(path, ask, lambda line: None) for path in files]
    except Refusal:
        return None
    return sum(one.tokens for one in shown), sum(one.rows for one in shown)


def of_pairs(config: Config, stage: str, tokenizer: str, vocabulary: int) -> Amount:
    """Count the pairs of stage `reward` or `dpo` and the rows that they fill, as training packs them.

    Of a large file a sample is counted. `tokenizer` is a folder or `bytes`. If it is empty, the tokens are a guess from the length of the texts.
    Raises Refusal where training would refuse the files.
    """
    from stoker.training.reward.pairs import pack_in_order, pair_sizes

    given: RewardConfig | DpoConfig = getattr(config, stage)
    context, every, how = config.data.context_length, 1, ""
    if tokenizer:
        from stoker.training.tokenizer.tokenizer import load

        files = [path for path in (given.pairs, given.held_out) if path]
        counts = {path: lines_in(path) for path in files}
        steps = {path: _sampling_step(path, counts[path]) for path in files}
        every = steps[given.pairs]
        total = sum(counts[path] // steps[path] for path in files)
        with Progress("tokenizing pairs", total, unit="pairs") as progress:
            train, held_out = pair_sizes(
                given.pairs, given.held_out, load(tokenizer), context, stage, progress.tick, steps
            )
        aside: int | None = sum(held_out) * steps.get(given.held_out, every)
        if every > 1:
            how = f"from {len(train) + (0 if given.held_out else len(held_out)):,} of its {counts[given.pairs]:,} pairs"
    else:
        train, how = _guessed_pair_sizes(given.pairs, config, vocabulary), GUESSED
        count = 0 if given.held_out else max(len(train) // 10, 1)
        train, held_out = train[: len(train) - count], train[len(train) - count :]
        aside = None if given.held_out else sum(held_out)
    rows = pack_in_order(train, context)
    share = min(config.data.max_samples / (len(rows) * every), 1.0) if config.data.max_samples and rows else 1.0
    rows = rows[: math.ceil(share * len(rows))]
    used = train[: sum(len(row) for row in rows)]
    samples = len(rows) * every
    if config.data.max_samples:
        samples = min(samples, config.data.max_samples)
    exact = bool(tokenizer) and every == 1
    return Amount(max(samples, 1), max(len(used) * every, 1), "pairs", sum(used) * every, exact, aside, how)


def _sampling_step(path: str, count: int) -> int:
    """Return 1 if all pairs of a file are tokenized before the start, else the distance between those that are."""
    return 1 if _unpacked(path) <= ENCODED_PAIRS else max(count // SAMPLED_PAIRS, 1)


def _guessed_pair_sizes(path: str, config: Config, vocabulary: int) -> list[int]:
    """Return about how many tokens each pair has that fits the context length: both answers, each with the prompt."""
    from stoker.training.data.formats.format import Unusable
    from stoker.training.data.formats.preferences import preference

    sizes = []
    for _, row in rows(path):
        try:
            pair = preference(row)
        except Unusable:
            continue
        texts = [text for _, text in (*pair.prompt, *pair.chosen, *pair.prompt, *pair.rejected)]
        sizes.append(round(sum(len(text.encode()) for text in texts) / _bytes_per_token(config, vocabulary)))
    return [size for size in sizes if size <= config.data.context_length]


def of_prompts(config: Config) -> Amount:
    prompts = lines_in(config.grpo.prompts)
    count = max(min(prompts, config.data.max_samples or prompts), 1)
    return Amount(count, count, "prompts")


def lines_in(path: str) -> int:
    """Rows, by the lines that are not blank; of a file that has no lines, about."""
    if kind_of(path) in ("parquet", "arrow"):
        return max(os.path.getsize(path) // PARQUET_ROW, 1)
    with parsing(path):
        if kind_of(path) in ("json", "csv"):  # a row may have many lines, or all rows one
            return sum(1 for _ in itertools.islice(rows(path), COUNTED_ROWS))
        count, read = _counted(path)
    return count if read < COUNTED else round(count * _unpacked(path) / read)


def _counted(path: str) -> tuple[int, int]:
    """(lines that are not blank, bytes read). A block at a time: ten times as fast as line by line."""
    count = read = 0
    begun = b""  # of the line that a block ends in, whether it is not blank
    with open_unpacked(path) as file:
        while read < COUNTED and (block := file.read(_BLOCK)):
            marks = begun + block.translate(_MARKS, b" \t\r\v\f")
            count += marks.count(b".\n")
            begun = b"." if marks.endswith(b".") else b""
            read += len(block)
    return count + len(begun), read


def _unpacked(path: str) -> float:
    times = PARQUET if kind_of(path) == "parquet" else UNPACKED.get(packing_of(path), 1.0)
    return os.path.getsize(path) * times


def _bytes_per_token(config: Config, vocabulary: int) -> float:
    if config.tokenizer.path == "bytes":
        return 1.0
    return ITS_BYTES if vocabulary < SMALL_VOCABULARY else OTHERS_BYTES
