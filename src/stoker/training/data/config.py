"""Where the tokens come from, and how they lie."""

from __future__ import annotations

from stoker.contract import limits
from stoker.contract.frozen import frozen, option
from stoker.training.data.formats.table import AUTO, NAMES


@frozen
class DataConfig:
    path: tuple[str, ...] = option(
        "files, folders, globs, or a hub id (owner/name:config:split@revision); several: one after the other. Of a folder:"
        " .txt .text .md .rst .tex .jsonl .ndjson .json .parquet .arrow .feather .csv .tsv, also with .gz .bz2 .xz .zst",
        default=(),
        metavar="PATH",
        many=True,
    )
    mixture: tuple[str, ...] = option(
        "how much of the training each path of `data.path` gets, e.g. 3 1: three samples of the first for one of the"
        " second (empty: each sample once a pass)",
        default=(),
        metavar="SHARE",
        many=True,
    )
    format: str = option(
        f"format of the rows (`stoker data show PATH` prints it): {', '.join(NAMES)}; auto: recognised from them",
        metavar="FORMAT",
        default=AUTO,
        choices=NAMES,
    )
    validation: str = option(
        "what is held out: a share of the end of the data (0.01), a path like `data.path`, or 0 for nothing",
        default="0.01",
    )
    context_length: int = option("tokens per sample", default=1024, limit=limits.FROM_TWO)
    text_key: str = option("the field of a row that holds its text, where `data.kind` is stream", default="text")
    kind: str = limits.choice("stream", "chat")(
        "stream: one text after the other; chat: whole conversations, best-fit packed, the assistant's words learned"
    )
    documents: bool = option(
        "of a stream: a token sees only its own document, not the ones before it in the same sample (chats are always"
        " learned so)",
        default=False,
    )
    max_samples: int = limits.LARGE("train only on the first N samples (0: all)", 0)
    cache: str = option("where prepared data and trained tokenizers are kept", default="cache", metavar="DIR")
    num_workers: int = option("processes that prepare data (0: one per core)", default=0, limit=limits.COUNT)
    seed: int = option("seed of the order of samples", default=0, limit=limits.SEED)
