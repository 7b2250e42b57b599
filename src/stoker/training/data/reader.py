"""Samples from prepared data, by id, in batches of numpy arrays: memory-mapped, nothing is read that is not asked for."""

from __future__ import annotations

import os

import numpy as np
from numpy.typing import NDArray

from stoker.contract.errors import EX_CONFIG, EX_DATAERR, Refusal
from stoker.contract.frozen import frozen
from stoker.training.data.shards import Prepared, dtype_for, read_manifest
from stoker.training.data.work import BEGIN, LEARN

IGNORED = -100  # a target that is not learned


@frozen
class Batch:
    inputs: NDArray[np.int64]  # [n, T]
    targets: NDArray[np.int64]  # [n, T]
    segments: NDArray[np.int32] | None  # [n, T]: which document of its row a token belongs to; None: a row is one


class Samples:
    """Stream: sample i is tokens[i*T : i*T + T + 1], the last of validation may be shorter. Chat: it is row i.
    `documents`: data.documents.
    """

    def __init__(self, prepared: Prepared | str, split: str, context_length: int, documents: bool = False) -> None:
        folder = prepared if isinstance(prepared, str) else prepared.folder
        told = read_manifest(folder)
        if told is None:
            raise Refusal(f"{folder} holds no prepared data; `stoker prepare` makes it", EX_DATAERR)
        if told["kind"] == "chat" and told["context"] != context_length:
            raise Refusal(
                f"{folder} is packed for a context of {told['context']}, not {context_length}: prepare it again",
                EX_CONFIG,
            )
        self.split, self.context = split, context_length
        self.chat = told["kind"] == "chat"
        self.packed = self.chat or documents
        self.end_id = int(told["end_id"])
        about = told["splits"][split]
        self.tokens = int(about["tokens"])
        self._entries = [int(number) for number in about.get("entries", ())]
        self.bytes_per_target = int(about["bytes"]) / max(
            int(about.get("learned") or self.tokens) if self.chat else self.tokens, 1
        )
        self._shards = [
            _map(folder, one["file"], dtype_for(told["vocab_size"]), one["bytes"]) for one in about["shards"]
        ]
        self._masks = [_map(folder, one["file"], "u1", one["bytes"]) for one in about.get("masks", ())]
        self._starts = np.cumsum([0, *(len(one) for one in self._shards)], dtype=np.int64)
        if self.chat:
            self.count = int(about["samples"])
        elif split == "train":
            self.count = max(self.tokens - 1, 0) // context_length
        else:
            self.count = -(-max(self.tokens - 1, 0) // context_length)

    @property
    def entries(self) -> list[int]:
        """Samples of each entry of `data.path`; of a stream, of the entry that a sample begins in."""
        if self.chat:
            return self._entries
        ends = np.minimum(-(-np.cumsum(self._entries, dtype=np.int64) // self.context), self.count)
        return [int(count) for count in np.diff(ends, prepend=0)]

    def __len__(self) -> int:
        return self.count

    def batch(self, ids: NDArray[np.int64]) -> Batch:
        width = self.context + 1
        step = width if self.chat else self.context
        begins = np.asarray(ids, dtype=np.int64) * step
        if len(begins) and not 0 <= int(begins.min()) <= int(begins.max()) < self.count * step:
            raise IndexError(f"sample {int(np.max(ids))} of {self.count}")
        rows = np.empty((len(begins), width), dtype=np.int64)
        for row, begin in zip(rows, begins.tolist(), strict=True):
            self._fill(row, begin, self._shards, self.end_id)
        inputs, targets = rows[:, :-1].copy(), rows[:, 1:].copy()
        if not self.chat:
            if self.split != "train":
                short = begins + width - self.tokens  # positions past the end, of the last sample only
                for place in np.flatnonzero(short > 0).tolist():
                    targets[place, -int(short[place]) :] = IGNORED
            return Batch(inputs, targets, self._documents(inputs) if self.packed else None)
        bits = np.empty((len(begins), width), dtype=np.uint8)
        for mask, begin in zip(bits, begins.tolist(), strict=True):
            self._fill(mask, begin, self._masks, 0)
        targets[(bits[:, 1:] & LEARN) == 0] = IGNORED
        segments = np.cumsum((bits[:, :-1] & BEGIN) != 0, axis=1, dtype=np.int32) - 1
        return Batch(inputs, targets, segments.astype(np.int32))

    def _documents(self, inputs: NDArray[np.int64]) -> NDArray[np.int32]:
        """Of a stream: the token that ends a document is its last one."""
        ends = np.cumsum(inputs == self.end_id, axis=1, dtype=np.int32)
        return np.pad(ends[:, :-1], ((0, 0), (1, 0)))

    def _fill(
        self, row: NDArray[np.int64] | NDArray[np.uint8], begin: int, files: list[NDArray[np.generic]], rest: int
    ) -> None:
        """One slice of one shard, but for the few samples that cross an edge."""
        done = 0
        file = int(np.searchsorted(self._starts, begin, side="right")) - 1
        while done < len(row):
            if file >= len(files):
                row[done:] = rest
                return
            within = begin + done - int(self._starts[file])
            piece = files[file][within : within + len(row) - done]
            row[done : done + len(piece)] = piece
            done += len(piece)
            file += 1


def _map(folder: str, name: str, dtype: str, size: int) -> NDArray[np.generic]:
    path = os.path.join(folder, name)
    try:
        found: NDArray[np.generic] = np.memmap(path, dtype=np.dtype(dtype), mode="r")
    except (OSError, ValueError) as problem:
        raise Refusal(
            f"{path} can't be opened: {problem}; `stoker prepare --verify` finds damage and prepares again", EX_DATAERR
        ) from problem
    if found.nbytes != size:
        raise Refusal(
            f"{path} has {found.nbytes} bytes instead of {size}; `stoker prepare --verify` prepares it again",
            EX_DATAERR,
        )
    return found
