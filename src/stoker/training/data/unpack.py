"""Packed files (.gz .bz2 .xz .zst) as streams in bounded memory. A damaged one, or one that unfolds without end, is one
refusal.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, BinaryIO

from stoker.contract.names import EX_DATAERR, EX_NOINPUT, EX_UNAVAILABLE, Refusal
from stoker.contract.quantities import amount
from stoker.contract.untrusted import open_regular

PACKED = (".gz", ".bz2", ".xz", ".zst")
MOST_TIMES = 200  # a packed file's size; text packs to a fifth, tables of numbers to a twentieth
ALWAYS = 256 << 20  # bytes that any packed file may unfold to
_WINDOW = 128 << 20  # bytes that a decompressor may look back: what `xz -9` and `zstd --long=27` need at most
_READ = 1 << 20
_ZSTD_READ = 1 << 11  # 4 bytes of zstd unfold to 128 KB at most: 64 MB at once


def packing_of(path: str) -> str:
    """.gz of a.jsonl.gz; empty: it is not packed."""
    ending = os.path.splitext(path)[1].lower()
    return ending if ending in PACKED else ""


def unpacked_name(path: str) -> str:
    return path[: len(path) - len(packing_of(path))]


@contextmanager
def open_unpacked(path: str) -> Iterator[BinaryIO]:
    """The file's content, unpacked where its name says that it is packed. Whatever goes wrong within the block while
    unpacking is refused in one line.
    """
    try:
        handle = open_regular(path)
    except OSError as problem:
        raise Refusal(f"{path} can't be read: {problem.strerror}", EX_NOINPUT) from problem
    packing = packing_of(path)
    with os.fdopen(handle, "rb") as file:
        if not packing:
            yield file
            return
        stream = _Bounded(_opened(path, packing, file), path, os.fstat(handle).st_size)
        with io.BufferedReader(stream, _READ) as buffered:
            yield buffered


def _opened(path: str, packing: str, file: BinaryIO) -> Any:
    if packing == ".gz":
        return gzip.GzipFile(fileobj=file, mode="rb")
    if packing == ".bz2":
        return bz2.BZ2File(file)
    if packing == ".xz":  # lzma.LZMAFile has no limit on its memory
        return _Frames(file, lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=2 * _WINDOW), _READ)
    return _zstd(path, file)


def _zstd(path: str, file: BinaryIO) -> Any:
    try:
        zstandard = import_module("zstandard")
        return _Frames(file, lambda: _Zstandard(zstandard.ZstdDecompressor(max_window_size=_WINDOW)), _ZSTD_READ)
    except ImportError:
        pass
    try:
        zstd = import_module("compression.zstd")  # Python 3.14 and later
    except ImportError as problem:
        line = f"{path} needs a package to unpack it: `pip install zstandard`, or `unzstd {path}`"
        raise Refusal(line, EX_UNAVAILABLE) from problem
    longest = {zstd.DecompressionParameter.window_log_max: _WINDOW.bit_length() - 1}
    return _Frames(file, lambda: zstd.ZstdDecompressor(options=longest), _READ)


class _Zstandard:
    """The package's frame with the methods of the standard library's. It gives all that its input unfolds to at once."""

    needs_input = True

    def __init__(self, decompressor: Any) -> None:
        self._frame = decompressor.decompressobj()

    def decompress(self, data: bytes, size: int) -> bytes:
        found: bytes = self._frame.decompress(data)
        return found

    @property
    def eof(self) -> bool:
        return bool(self._frame.eof)

    @property
    def unused_data(self) -> bytes:
        return bytes(self._frame.unused_data)


class _Frames:
    """Compressed frames one after the other, with zeros between. One that does not end is damaged: a reader that
    ignores that would lose rows silently.
    """

    def __init__(self, file: BinaryIO, fresh: Callable[[], Any], block: int) -> None:
        self._file, self._fresh, self._block = file, fresh, block
        self._frame, self._begun = fresh(), False
        self._input = self._output = b""

    def read(self, size: int) -> bytes:
        while not self._output and self._more(size):
            continue
        data, self._output = self._output[:size], self._output[size:]
        return data

    def _more(self, size: int) -> bool:
        if self._frame.eof:
            self._input, self._begun = self._frame.unused_data, False
            self._frame = self._fresh()
        if not self._begun:
            self._input = self._input.lstrip(b"\0")
        if not self._input and self._frame.needs_input:
            self._input = self._file.read(self._block)
            if not self._input and self._begun:
                raise EOFError("it ends in the middle")
            return bool(self._input)
        self._begun = True
        self._output, self._input = self._frame.decompress(self._input, size), b""
        return True


class _Bounded(io.RawIOBase):
    """Every read names the file where its bytes are damaged, and counts what came out."""

    def __init__(self, stream: Any, path: str, size: int) -> None:
        self._stream, self._path, self._size, self._done = stream, path, size, 0
        self._errors: tuple[type[BaseException], ...] = (
            OSError,
            EOFError,
            ValueError,
            zlib.error,
            lzma.LZMAError,
            *_zstd_errors(),
        )

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            data = self._stream.read(min(len(buffer), _READ))
        except self._errors as problem:
            why = str(problem).splitlines()[0][:120] if str(problem) else type(problem).__name__
            beyond = f" beyond its first {self._done:,} bytes" if self._done else ""
            line = f"{self._path} is damaged: it can't be unpacked{beyond} ({why})"
            raise Refusal(f"{line}; download it again", EX_DATAERR) from problem
        self._done += len(data)
        if self._done > max(ALWAYS, MOST_TIMES * self._size):
            line = f"{self._path} unfolds to more than {MOST_TIMES} times its {amount(self._size)}: it may be an attack"
            raise Refusal(f"{line}; unpack it yourself if it is not", EX_DATAERR)
        buffer[: len(data)] = data
        return len(data)


def _zstd_errors() -> tuple[type[BaseException], ...]:
    found = []
    for module in ("zstandard", "compression.zstd"):
        try:
            found.append(import_module(module).ZstdError)
        except ImportError:
            continue  # then it raises nothing
    return tuple(found)
