"""How much there is to learn from: exact once the data is prepared, before that from file sizes. No numpy."""

from __future__ import annotations

import os

from stoker.contract.names import EX_DATAERR, EX_NOINPUT, Refusal
from stoker.contract.shape import shape
from stoker.contract.untrusted import lines_of
from stoker.training.config.schema import Config
from stoker.training.data.prepared import Prepared
from stoker.training.data.sources import FORMS, local_files, share_of

COUNTED = 1 << 28  # bytes of a file whose lines are counted; a longer one is taken to go on as it began
# Bytes per token of English: 2.85 measured with 768 tokens, 4.4 with 65,536.
SMALL_VOCABULARY, ITS_BYTES, OTHERS_BYTES = 8192, 3.0, 4.0
PARQUET = 2.5  # times as large once it is unpacked
CHAT_TEXT = 0.75  # of a chat's row is text, the rest JSON
FILL = 0.95  # of packed rows is not padding
PAIR_TOKENS = 1.2  # a pair's row has its prompt once, and the model reads it twice


@shape
class Amount:
    """One pass over the data."""

    samples: int  # what a step counts in: rows of `data.context_length` tokens; of GRPO, prompts
    count: int  # what people count
    unit: str  # tokens, conversations, pairs or prompts
    tokens: int = 0  # 0: nobody counted them
    exact: bool = True


def of_prepared(ready: Prepared, config: Config) -> Amount:
    context = config.data.context_length
    whole = ready.train_samples if ready.train_samples is not None else (ready.train_tokens - 1) // context
    samples = max(min(whole, config.data.max_samples or whole), 1)
    kept = samples / max(whole, 1)  # data.max_samples
    tokens = round(ready.train_tokens * kept)
    if ready.kind == "chat":
        return Amount(samples, round(ready.train_documents * kept), "conversations", tokens)
    return Amount(samples, tokens, "tokens", tokens)


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
    size = sum(os.path.getsize(path) * (PARQUET if _form(path) == "parquet" else 1.0) for path in files) * (
        1 - held_out
    )
    tokens = int(size * (CHAT_TEXT if chat else 1.0) / _bytes_per_token(config, vocabulary))
    context = config.data.context_length
    samples = max(int(tokens / context / (FILL if chat else 1.0)), 1)
    limit = config.data.max_samples
    if limit and limit < samples:
        tokens, samples = tokens * limit // samples, limit
    if not chat:
        return Amount(samples, tokens, "tokens", tokens, exact=False)
    rows = round(sum(lines_in(path) for path in files if _form(path) == "jsonl") * (1 - held_out))
    return Amount(samples, rows or tokens, "conversations" if rows else "tokens", tokens, exact=False)


def of_pairs(config: Config, vocabulary: int) -> Amount:
    """The pairs are counted; how many rows they fill is estimated."""
    path, context = config.reward.pairs, config.data.context_length
    pairs = max(lines_in(path), 1)
    trained = pairs if config.reward.held_out else pairs - max(pairs // 10, 1)
    tokens = os.path.getsize(path) * trained / pairs * PAIR_TOKENS / _bytes_per_token(config, vocabulary)
    return Amount(max(int(tokens / context), 1), max(trained, 1), "pairs", exact=False)


def of_prompts(config: Config) -> Amount:
    rows = lines_in(config.grpo.prompts)
    count = max(min(rows, config.data.max_samples or rows), 1)
    return Amount(count, count, "prompts")


def lines_in(path: str) -> int:
    """That are not blank."""
    count = read = 0
    try:
        for line in lines_of(path):
            count += not line.isspace()
            read += len(line)
            if read >= COUNTED:
                break
    except OSError as problem:
        raise Refusal(f"{path} can't be read: {problem.strerror}", EX_NOINPUT) from problem
    except ValueError as problem:
        raise Refusal(f"{path}: {problem}: is this a row per line?", EX_DATAERR) from problem
    return round(count * os.path.getsize(path) / read) if read else 0


def _form(path: str) -> str:
    return FORMS.get(os.path.splitext(path)[1].lower(), "text")


def _bytes_per_token(config: Config, vocabulary: int) -> float:
    if config.tokenizer.path == "bytes":
        return 1.0
    return ITS_BYTES if vocabulary < SMALL_VOCABULARY else OTHERS_BYTES
