"""A stored tensor's numbers into memory, on a GPU or not. For a GPU, threads read pieces of the file into pinned memory
while earlier pieces travel: one thread that reads and then copies reaches a tenth of what the bus carries.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import cycle, islice
from typing import BinaryIO

import torch
from torch import Tensor

from stoker.contract.errors import EX_DATAERR, Refusal
from stoker.contract.frozen import replace
from stoker.training.model.hf_config import Stored

PIECE = 8 << 20  # bytes
CONVERTED = 64 << 20  # bytes that are converted at once
SLOTS = 8  # pieces that are being read, or travel
STORED = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "U8": torch.uint8,
}  # fmt: skip


def dtype_of(one: Stored) -> torch.dtype:
    if one.dtype not in STORED:
        raise Refusal(f"{one.path} holds numbers of {one.dtype}, which are not read", EX_DATAERR)
    return STORED[one.dtype]


def read_stored(one: Stored) -> Tensor:
    dtype, data = dtype_of(one), bytearray(one.size)
    if not data:  # torch makes nothing of nothing
        return torch.empty(one.shape, dtype=dtype)
    with open(one.path, "rb") as file:
        _read(file, one, one.begin, memoryview(data))
    return torch.frombuffer(data, dtype=dtype).view(one.shape)


def rows_of(one: Stored, low: int, high: int) -> Stored:
    """Rows `low` to `high` of it."""
    size = one.size // one.shape[0]
    return replace(one, shape=(high - low, *one.shape[1:]), begin=one.begin + low * size, size=(high - low) * size)


def read_columns(one: Stored, low: int, high: int) -> Tensor:
    """Columns `low` to `high` of a matrix."""
    dtype, (rows, columns) = dtype_of(one), one.shape
    width = (high - low) * dtype.itemsize
    data = memoryview(bytearray(rows * width))
    with open(one.path, "rb") as file:
        for row in range(rows):
            _read(file, one, one.begin + (row * columns + low) * dtype.itemsize, data[row * width : (row + 1) * width])
    return torch.frombuffer(data, dtype=dtype).view(rows, high - low)


def _read(file: BinaryIO, one: Stored, at: int, into: memoryview) -> None:
    done = 0
    while done < len(into):
        count = os.preadv(file.fileno(), [into[done:]], at + done)
        if count == 0:
            raise Refusal(f"{one.path} became shorter while it was read", EX_DATAERR)
        done += count


class Stream:
    def __init__(self, device: torch.device, staged: bool | None = None) -> None:
        """`staged`: in pieces, by threads; None: for a GPU."""
        gpu = device.type == "cuda"
        # As tensors name it: one without a number is equal to none of theirs.
        self.device = torch.device("cuda", torch.cuda.current_device()) if gpu and device.index is None else device
        self._staged = gpu if staged is None else staged
        count = SLOTS if self._staged else 0
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="weights") if self._staged else None
        self._slots = [torch.empty(PIECE, dtype=torch.uint8, pin_memory=gpu) for _ in range(count)]
        self._free: list[torch.cuda.Event | None] = [None] * count

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # the slots are given back

    def read(self, one: Stored) -> Tensor:
        """As it is stored."""
        if not self._staged:
            return read_stored(one)
        return self.fill(one, torch.empty(one.shape, dtype=dtype_of(one), device=self.device))

    def fill(self, one: Stored, out: Tensor) -> Tensor:
        """Into `out`, which has as many numbers, perhaps of another dtype, and is on any device."""
        dtype = dtype_of(one)
        if out.device.type == "cpu" and dtype == out.dtype and out.is_contiguous() and one.size:
            with open(one.path, "rb") as file:
                _read(file, one, one.begin, memoryview(out.detach().view(-1).view(torch.uint8).numpy()))  # type: ignore[arg-type]
            return out
        if not self._staged or out.device != self.device or not out.is_contiguous():
            return self._converted(one, out)
        flat = out.view(-1)
        for begin, piece in self._pieces(one, dtype.itemsize):
            numbers, first = piece.view(dtype), begin // dtype.itemsize
            part = flat[first : first + len(numbers)]
            if dtype == out.dtype:
                part.copy_(numbers, non_blocking=True)
            else:  # converted there: here it would be done by one core
                part.copy_(numbers.to(self.device, non_blocking=True))
        return out

    def _converted(self, one: Stored, out: Tensor) -> Tensor:
        """Some rows at a time: all of them in the file's dtype would be half as much memory again, or more."""
        if not one.size or not one.shape or out.shape != one.shape:
            return out.copy_(read_stored(one).view(out.shape))
        rows = one.shape[0]
        at_once = max(1, CONVERTED * rows // one.size)
        for begin in range(0, rows, at_once):
            end = min(rows, begin + at_once)
            out[begin:end].copy_(read_stored(rows_of(one, begin, end)))
        return out

    def _pieces(self, one: Stored, itemsize: int) -> Iterator[tuple[int, Tensor]]:
        """(where it begins, bytes in pinned memory), in order. A piece may be used until the next is asked for."""
        threads = self._threads
        assert threads is not None and PIECE % itemsize == 0
        with open(one.path, "rb") as file:
            waiting = list[tuple[int, int, Tensor, Future[None]]]()
            slots, begins = cycle(range(SLOTS)), iter(range(0, one.size, PIECE))

            def start(begin: int) -> None:
                slot = next(slots)
                if (event := self._free[slot]) is not None:
                    event.synchronize()
                piece = self._slots[slot][: min(PIECE, one.size - begin)]
                future = threads.submit(_read, file, one, one.begin + begin, memoryview(piece.numpy()))  # type: ignore[arg-type]
                waiting.append((begin, slot, piece, future))

            try:
                for begin in islice(begins, SLOTS):
                    start(begin)
                while waiting:
                    begin, slot, piece, future = waiting.pop(0)
                    future.result()
                    yield begin, piece
                    if self.device.type == "cuda":
                        self._free[slot] = travelled = torch.cuda.Event()  # type: ignore[no-untyped-call]
                        travelled.record(torch.cuda.current_stream(self.device))
                    for following in begins:
                        start(following)
                        break
            finally:
                for *_, future in waiting:  # before the file is closed
                    future.cancel() or future.exception()
