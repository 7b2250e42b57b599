"""One job: spans in, a part file of tokens out. Runs in a process of its own, or here for a few megabytes.

python -m stoker.training.data.work: one JSON line on stdin says what the work is, then a line per job; a line per job
comes back.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.contract.disk_space import DiskSpace
from stoker.contract.errors import EX_OSERR, Refusal
from stoker.contract.frozen import as_json, frozen
from stoker.contract.host_memory import limit_memory, read_used_memory
from stoker.contract.units import plural
from stoker.training.data.ours import OTHER_CACHE
from stoker.training.data.read import NAMED, Remark, Remarks, conversations, remark, texts
from stoker.training.data.units import Span, span_from
from stoker.training.tokenizer import chat
from stoker.training.tokenizer.encoders import FastPlan
from stoker.training.tokenizer.tokenizer import Tokenizer, load

LEARN, BEGIN = 1, 2  # bits of a chat's mask: this token is learned; a conversation (or the padding) begins here
_PR_SET_PDEATHSIG = 1
MAX_MEMORY = 6 << 30  # bytes that a worker may take besides its tokenizer: a row of 1 GB takes about as much


@frozen
class Work:
    tokenizer: str  # the folder of its copy
    tokenizer_named: str  # as the user knows it
    unreachable: tuple[int, ...] | None  # of the plan for tiktoken; None: tokenizers does it
    kind: str
    text_key: str
    dtype: str
    longest: int  # a conversation is cut to so many tokens


@frozen
class Part:
    """What a job made: tokens at `path`; for chats masks and lengths beside it."""

    path: str
    tokens: int = 0
    bytes: int = 0  # of text; for chats, of learned text
    documents: int = 0
    inked: bool = False  # there was something besides blanks
    learned: int = 0
    cut: int = 0  # conversations that were too long
    dropped: int = 0  # conversations with nothing to learn
    wrong: int = 0  # rows that are no conversations
    first_wrong: tuple[Remark, ...] = ()
    first_cut: tuple[Remark, ...] = ()
    entry: int = 0  # of `data.path`
    only_last: int = 0  # conversations of which only the last of the assistant's turns is learned


def mask_path(path: str) -> str:
    return path + ".mask"


def lengths_path(path: str) -> str:
    return path + ".lengths"


def prepared_tokenizer(work: Work) -> Tokenizer:
    tokenizer = load(work.tokenizer)
    tokenizer.where = work.tokenizer_named
    tokenizer.use(None if work.unreachable is None else FastPlan(work.unreachable))
    return tokenizer


def do(tokenizer: Tokenizer, work: Work, spans: list[Span], path: str) -> Part:
    return _chats(tokenizer, work, spans, path) if work.kind == "chat" else _stream(tokenizer, work, spans, path)


def _stream(tokenizer: Tokenizer, work: Work, spans: list[Span], path: str) -> Part:
    end = np.array([tokenizer.end_id], dtype=work.dtype).tobytes()
    begin = np.array(tokenizer.begin, dtype=work.dtype).tobytes()
    tokens = size = documents = 0
    inked = False
    room = DiskSpace(os.path.dirname(path), OTHER_CACHE)  # a row group of any size is one part
    with open(path, "wb", buffering=1 << 20) as file:
        for span in spans:
            for text, ends in texts(span, work.text_key):
                if begin and text and (span.form != "text" or span.begin == 0):
                    file.write(begin)
                    tokens += len(tokenizer.begin)
                for segment in tokenizer.segments(text):
                    ids = tokenizer.array(segment)
                    file.write(ids.astype(work.dtype).tobytes())
                    tokens += len(ids)
                    room.take(len(end) * (len(tokenizer.begin) + len(ids)))
                size += len(text)
                inked = inked or not text.isspace()
                if ends and text:
                    file.write(end)
                    tokens += 1
                    documents += 1
    return Part(path, tokens, size, documents, inked and size > 0, entry=spans[0].entry)


def _chats(tokenizer: Tokenizer, work: Work, spans: list[Span], path: str) -> Part:
    lengths: list[int] = []
    learned = size = cut = dropped = only_last = 0
    wrong = Remarks()
    first_cut: list[Remark] = []
    room = DiskSpace(os.path.dirname(path), OTHER_CACHE)
    with open(path, "wb", buffering=1 << 20) as file, open(mask_path(path), "wb", buffering=1 << 20) as beside:
        for span in spans:
            for messages, place in conversations(span, wrong):
                try:
                    encoded = chat.encoded(tokenizer, messages)
                except chat.Unfit as problem:
                    wrong.add(place, f": {problem.line}")
                    continue
                ids, mask = encoded.ids, encoded.mask
                only_last += encoded.only_last
                if len(ids) > work.longest:
                    cut += 1
                    first_cut += [remark(place, f" has {plural(len(ids), 'token')}")] if len(first_cut) < NAMED else []
                ids, mask = ids[: work.longest], mask[: work.longest]
                mine = ids[mask != 0]
                if not len(mine):
                    dropped += 1
                    continue
                bits: NDArray[np.uint8] = mask * np.uint8(LEARN)
                bits[0] |= BEGIN
                file.write(ids.astype(work.dtype).tobytes())
                beside.write(bits.tobytes())
                room.take(len(ids) * (np.dtype(work.dtype).itemsize + 1))
                lengths.append(len(ids))
                learned += len(mine)
                size += encoded.size if len(ids) == len(encoded.ids) else _text_bytes(tokenizer, mine)
    np.array(lengths, dtype="<i8").tofile(lengths_path(path))
    return Part(
        path,
        sum(lengths),
        size,
        len(lengths),
        bool(lengths),
        learned,
        cut,
        dropped,
        wrong.count,
        tuple(wrong.first),
        tuple(first_cut),
        spans[0].entry,
        only_last,
    )


def _text_bytes(tokenizer: Tokenizer, ids: NDArray[np.uint32]) -> int:
    return int(tokenizer.lengths[ids[~np.isin(ids, list(tokenizer.special.values()))]].sum())


def files_in(spans: Sequence[Span]) -> str:
    """By the names that people know."""
    names = list(dict.fromkeys(span.shown for span in spans))
    return ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")


def too_much_memory(spans: Sequence[Span]) -> Refusal:
    line = f"preparing data: {files_in(spans)} needs more memory than there is, or more than the {MAX_MEMORY >> 30} GB of a worker"
    return Refusal(f"{line}: cut its longest rows, or write smaller row groups", EX_OSERR)


def main() -> None:
    # Who asked may be killed: nobody must go on writing into a folder that the next builder removes.
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group: who asked decides
    answers = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)  # a library that prints must not speak here
    told = json.loads(sys.stdin.readline())
    unreachable = told.pop("unreachable")
    work = Work(**told, unreachable=None if unreachable is None else tuple(unreachable))
    tokenizer = prepared_tokenizer(work)
    limit_memory(read_used_memory() + MAX_MEMORY)
    for line in sys.stdin:
        job = json.loads(line)
        spans = [span_from(one) for one in job["spans"]]
        answer: dict[str, Any]
        try:
            answer = as_json(do(tokenizer, work, spans, job["path"]))
        except Refusal as refusal:
            answer = {"refusal": refusal.line, "code": refusal.code}
        except OSError as problem:
            answer = {"refusal": f"preparing data: {problem}", "code": EX_OSERR}
        except MemoryError:
            too_much = too_much_memory(spans)
            answer = {"refusal": too_much.line, "code": too_much.code}
        print(json.dumps(answer), file=answers)


if __name__ == "__main__":
    main()
