"""Sources and a tokenizer become prepared data, once: a second call finds it by the bytes it was made from."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from stoker.contract.errors import EX_CANTCREAT, EX_CONFIG, EX_DATAERR, Refusal
from stoker.contract.frozen import frozen, replace
from stoker.contract.text import escape
from stoker.contract.units import format_bytes
from stoker.training.data import shards
from stoker.training.data.build import alone, build, whole
from stoker.training.data.config import DataConfig
from stoker.training.data.crew import ALONE, cores, run_interruptibly
from stoker.training.data.formats.format import Format
from stoker.training.data.formats.table import AUTO, FORMATS, TEXT, known, recognise
from stoker.training.data.learn import trained
from stoker.training.data.order import Mixture, mixture_of
from stoker.training.data.ours import OTHER_CACHE, digest_files, own_cache, tag
from stoker.training.data.read import MESSAGES, NAMED, Remarks, at, conversations, key_names, rows, texts
from stoker.training.data.reasons import TOLERATED
from stoker.training.data.shards import TOKENIZER, Prepared, from_manifest
from stoker.training.data.sources import Source, find_sources, share_of
from stoker.training.data.units import PACKING, Span, check_unchanged, jobs_of, split, split_each
from stoker.training.data.work import Work
from stoker.training.tokenizer import chat
from stoker.training.tokenizer.config import TokenizerConfig
from stoker.training.tokenizer.tokenizer import Tokenizer, load

LOOK = 100  # rows: the first that any format recognises decides
_COLUMNS = tuple(dict.fromkeys(column for made in FORMATS.values() for column in made.columns))


FORMAT = "data format: "  # what a line about formats begins with


def with_formats(sources: Sequence[Source], data: DataConfig, say: Callable[[str], None]) -> tuple[Source, ...]:
    """Of sources of conversations; a stream's rows have a text and no format."""
    if data.kind != "chat":
        if data.format not in (AUTO, TEXT):
            line = f"data.format {data.format} is for conversations: set data.kind chat, or leave data.format out"
            raise Refusal(line, EX_CONFIG)
        if any(source.form != "text" for source in sources):
            say(f"{FORMAT}text (the column {data.text_key})")
        return tuple(sources)
    if data.format == TEXT:
        raise Refusal(f"data.format text has no turns to learn from; use {known()} (`stoker docs data`)", EX_CONFIG)
    if data.format != AUTO:
        return tuple(replace(source, format=data.format, mixed=True) for source in sources)
    found = [replace(source, format=_format(source).name) for source in sources]
    say(f"{FORMAT}{'; '.join(_named(found))}")
    return tuple(found)


def _format(source: Source) -> Format:
    if source.form == "text":
        shown = source.name or source.path
        raise Refusal(f"{shown} is plain text; chats need rows: {known()} (`stoker docs data`)", EX_DATAERR)
    begin = next(iter(split([source], 0.0)[0]), None)
    first = None
    for row, place in itertools.islice(rows(begin, _COLUMNS), LOOK) if begin is not None else ():
        made = recognise(row)
        if made is not None:
            return made
        first = (
            first
            or f"{at(place)}: no known format of conversations; its keys: {key_names(row)}; known: {known()} (`stoker docs data`)"
        )
    if first is None:
        raise Refusal(f"{source.name or source.path} has no rows", EX_DATAERR)
    raise Refusal(escape(first, 1000), EX_DATAERR)


def _named(sources: Sequence[Source]) -> list[str]:
    by_format: dict[str, list[str]] = {}
    for source in sources:
        by_format.setdefault(source.format, []).append(source.name or source.path)
    return [
        f"{name} ({FORMATS[name].about}) in {files[0] if len(files) == 1 else f'{len(files):,} files'}"
        for name, files in by_format.items()
    ]


Say = Callable[[str], None]
PROBES, PROBE_BYTES = 16, 1 << 14


@frozen
class Given:
    """The sources, known by their bytes."""

    train: tuple[Source, ...]
    held: tuple[Source, ...]  # validation that is a path of its own
    share: float  # of `train` that is held out
    digests: tuple[str, ...]
    held_digests: tuple[str, ...]
    mixture: Mixture | None = None

    def spans(self) -> dict[str, Sequence[Span]]:
        train, held = (split if self.mixture is None else split_each)(self.train, self.share)
        return {"train": train, "validation": held + split(self.held, 0.0)[0]}


def prepare(data: DataConfig, tokenizer: TokenizerConfig, say: Say, verify: bool = False) -> Prepared:
    try:
        return _prepare(data, tokenizer, say, verify)
    except OSError as problem:
        where = f" {problem.filename}" if problem.filename else ""
        place = f"the cache is in {data.cache} ({_room(data.cache)}); {OTHER_CACHE}"
        line = f"preparing data failed: {problem.strerror or problem}{where}; {place}"
        raise Refusal(line, EX_CANTCREAT) from problem


def _room(folder: str) -> str:
    try:
        return f"{format_bytes(shutil.disk_usage(folder).free)} free"
    except OSError as problem:
        return f"not usable: {problem.strerror}"


def _prepare(data: DataConfig, tokenizer: TokenizerConfig, say: Say, verify: bool) -> Prepared:
    if data.context_length < 1:
        raise Refusal(f"data.context_length is {data.context_length}: a sample has at least one token", EX_CONFIG)
    data = replace(data, cache=own_cache(data.cache, say))
    workers = data.num_workers or cores()
    share = share_of(data.validation)
    mixture = mixture_of(data)
    train = find_sources(data.path, data.cache, say) if mixture is None else _entries(data, say)
    held = find_sources((data.validation,), data.cache, say, "data.validation") if share is None else ()
    every = with_formats((*train, *held), data, say)
    train, held = every[: len(train)], every[len(train) :]
    tag(data.cache)
    found = digest_files([source.path for source in (*train, *held)], data.cache, workers, say)
    given = Given(train, held, share or 0.0, tuple(found[: len(train)]), tuple(found[len(train) :]), mixture)
    learned_from = {
        **_formats(every),
        "digests": given.digests,
        "text_key": data.text_key,
        "kind": data.kind,
        "share": given.share,
        "packing": PACKING,
    }
    if tokenizer.path:
        words = load(tokenizer.path)
    else:
        words = trained(tokenizer, learned_from, lambda: given.spans()["train"], data, say)
    about = _about(data, words, given)
    folder = os.path.join(data.cache, "datasets", about["key"])
    told = _usable(folder, verify, say)
    fresh = False
    if told is None:
        with alone(folder, say):
            told = _usable(folder, verify, lambda line: None)  # somebody may have made it meanwhile
            if told is None:
                fresh = True
                told = _make(folder, about, data, words, given, workers, say)
    _check(told, data, say)
    return from_manifest(folder, told, fresh)


def _entries(data: DataConfig, say: Say) -> tuple[Source, ...]:
    """Each entry of `data.path` on its own: they are weighted."""
    found = [find_sources((path,), data.cache, say) for path in data.path]
    return tuple(replace(source, entry=entry) for entry, some in enumerate(found) for source in some)


def _formats(sources: Sequence[Source]) -> dict[str, Any]:
    """What the result depends on, where rows are not `messages`."""
    formats = [(source.format, source.mixed) for source in sources]
    return {"formats": formats} if set(formats) - {("", False), (MESSAGES, False)} else {}


def _about(data: DataConfig, words: Tokenizer, given: Given) -> dict[str, Any]:
    """What the result depends on, all of it, by content: no name, no path."""
    context = data.context_length if data.kind == "chat" else None
    rows = [source.form for source in (*given.train, *given.held)]
    parts = {
        "packing": PACKING,
        "schema": shards.SCHEMA,
        "tokenizer": words.digest,
        "sources": given.digests,
        "forms": rows,
        "held": given.held_digests,
        "share": given.share,
        "kind": data.kind,
        "text_key": data.text_key if set(rows) - {"text"} and data.kind == "stream" else None,
        "context": context,
        **_formats((*given.train, *given.held)),
        **({"entries": [source.entry for source in given.train]} if given.mixture is not None else {}),
        **words.besides_digest(data.kind == "chat"),
    }
    key = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]
    return {"key": key, "kind": data.kind, "context": context, "packing": PACKING, "tokenizer_digest": words.digest}


def _usable(folder: str, verify: bool, say: Say) -> dict[str, Any] | None:
    told = shards.read_manifest(folder)
    if told is None:
        if os.path.exists(folder):
            say(f"{os.path.join(folder, shards.MANIFEST)} is damaged or missing: preparing again")
        return None
    wrong = shards.damage(folder, told, verify)
    if wrong:
        say(f"{wrong}: preparing again")
        return None
    return told


def _make(
    folder: str, about: dict[str, Any], data: DataConfig, words: Tokenizer, given: Given, workers: int, say: Say
) -> dict[str, Any]:
    spans = given.spans()
    pad = words.end_id
    if data.kind == "chat":
        chat.check(words)
        pad = chat.pad_id(words)
    with whole(folder) as temporary:
        words.save(os.path.join(temporary, TOKENIZER))
        unreachable = _plan(words, spans["train"], data, say)
        work = Work(
            os.path.join(temporary, TOKENIZER),
            words.where,
            unreachable,
            data.kind,
            data.text_key,
            shards.dtype_for(words.vocab_size),
            data.context_length + 1,
        )
        total = sum(source.size for source in (*given.train, *given.held))
        jobs = sum(len(jobs_of(of)) for of in spans.values())
        count = 0 if total < ALONE and data.num_workers <= 1 else min(workers, jobs)
        about = {**about, "vocab_size": words.vocab_size, "end_id": words.end_id, "dtype": work.dtype}
        build(temporary, spans, work, count, pad, about, say)
        check_unchanged((*given.train, *given.held))
        told = shards.read_manifest(temporary)
        assert told is not None
        _check_content(told, data, given, say)
    return told


def _plan(words: Tokenizer, spans: Sequence[Span], data: DataConfig, say: Say) -> tuple[int, ...] | None:
    """For tiktoken, if it gives the ids of tokenizers here: proved for merges, probed on texts from all the data."""
    if words.is_bytes or (data.kind == "chat" and words.template is not None):  # a template's text needs places
        return None
    if not words.told.is_exact:
        say(
            f"tokenizer {words.where}: it normalizes text ({words.told.kind}); bits per byte count the text's own bytes"
        )
    if isinstance(words.plan, str):
        say(f"tokenizer {words.where}: {words.plan}; `tokenizers` encodes, some 8 times slower than tiktoken")
        return None
    slow = words.encoder_by(None)
    for text in _probes(spans, data):
        by_tiktoken = run_interruptibly(partial(words.array, text))
        by_tokenizers = run_interruptibly(partial(words.guard_library, partial(slow, text.decode())))
        if by_tiktoken.tolist() != by_tokenizers.tolist():
            say(
                f"tokenizer {words.where}: tiktoken and tokenizers differ on {text[:60]!r}; `tokenizers` encodes, some"
                " 8 times slower"
            )
            return None
    return words.plan.unreachable


def _probes(spans: Sequence[Span], data: DataConfig) -> Iterator[bytes]:
    for span in spans[:: max(1, len(spans) // PROBES)][:PROBES]:
        if data.kind == "chat":
            text = next((content for messages, _ in conversations(span, Remarks()) for _, content in messages), b"")
        else:
            text = next((text for text, _ in texts(span, data.text_key)), b"")
        yield text[:PROBE_BYTES].decode("utf-8", "ignore").encode()


def _check_content(told: dict[str, Any], data: DataConfig, given: Given, say: Say) -> None:
    names = ", ".join(source.name or source.path for source in given.train[:3]) + (
        f" and {len(given.train) - 3} more" if len(given.train) > 3 else ""
    )
    train = told["splits"]["train"]
    parts = list(told["splits"].values())
    # Held out of the same files, they are judged together: the last 1 % alone has few rows.
    for together in [[part] for part in parts] if given.held else [parts]:
        _tolerate(together, say)
    for part in parts:
        if part.get("cut"):
            more = " …" if part["cut"] > len(part["first_cut"]) else ""
            say(
                f"{part['cut']:,} of {part['documents'] + part['dropped']:,} conversations are longer than"
                f" data.context_length {data.context_length} and are cut: {'; '.join(part['first_cut'])}{more}"
            )
    if train.get("only_last"):
        say(
            f"{train['only_last']:,} of {train['documents'] + train['dropped']:,} conversations: the model's chat template"
            " rewrites earlier turns, only the last answer is learned"
        )
    if train.get("dropped") and not train["documents"]:
        raise Refusal(
            f"{names}: no conversation has words of the assistant within {data.context_length} tokens: nothing to"
            " learn",
            EX_DATAERR,
        )
    if not train["tokens"] and told["splits"]["validation"]["tokens"]:
        raise Refusal(
            f"{names}: all of it is held out by data.validation={data.validation}; it is too small for that share:"
            " data.validation=0",
            EX_DATAERR,
        )
    if not train["inked"]:
        raise Refusal(f"{names}: there is no text in it", EX_DATAERR)


def _tolerate(splits: Sequence[dict[str, Any]], say: Say) -> None:
    """Rows that are no conversations are left out while they are few."""
    wrong = sum(split.get("wrong", 0) for split in splits)
    if not wrong:
        return
    rows = wrong + sum(split["documents"] + split.get("dropped", 0) for split in splits)
    named = [line for split in splits for line in split.get("first_wrong", ())][:NAMED]
    line = f"{wrong:,} of {rows:,} rows can't be used: {'; '.join(named)}{' …' if wrong > len(named) else ''}"
    if wrong >= TOLERATED * rows:
        raise Refusal(f"{line}; that is 1 % or more: fix the file", EX_DATAERR)
    say(f"{line}; left out")


def _check(told: dict[str, Any], data: DataConfig, say: Say) -> None:
    """What depends on the context, which is no part of a stream's key."""
    train, held = told["splits"]["train"], told["splits"]["validation"]
    if told["kind"] == "stream" and train["tokens"] <= data.context_length:
        raise Refusal(
            f"data.context_length is {data.context_length}, longer than the data, which has {train['tokens']:,} tokens"
            f" to train on: at most {max(train['tokens'] - 1, 0)}, or more data",
            EX_DATAERR,
        )
    if data.validation not in ("", "0") and held["tokens"] < 2:
        say(f"data.validation={data.validation} holds nothing out: the data is too small; a larger share (0.1) would")
