"""Where the tokens come from, and how they lie."""

from __future__ import annotations

from stoker.contract import limits
from stoker.contract.shape import option, shape


@shape
class DataConfig:
    path: tuple[str, ...] = option(
        "text, jsonl or parquet files, folders and globs of these, or a hub id; several: one after the other. Of a"
        " folder, what ends in .txt .text .md .rst .tex .jsonl .ndjson .json .parquet is read",
        default=(),
        metavar="PATH",
        many=True,
    )
    validation: str = option(
        "what is held out: a share of the end of the data (0.01), a path like `data.path`, or 0 for nothing",
        default="0.01",
    )
    context_length: int = option("tokens a sample has", default=1024, limit=limits.FROM_TWO)
    text_key: str = option(
        "the field of a jsonl or parquet row that holds its text; rows with `messages` are chats", default="text"
    )
    kind: str = option(
        "stream: one text after the other; chat: whole conversations, best-fit packed, the assistant's words learned",
        default="stream",
        choices=("stream", "chat"),
    )
    max_samples: int = option("train on the first so many samples only (0: all)", default=0, limit=limits.LARGE)
    cache: str = option("where prepared data and trained tokenizers are kept", default="cache", metavar="DIR")
    num_workers: int = option("processes that prepare data (0: one per core)", default=0, limit=limits.COUNT)
    seed: int = option("order of the samples", default=0, limit=limits.SEED)
