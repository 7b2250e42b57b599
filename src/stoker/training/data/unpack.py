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
from stoker.contract.quantities import amount, counted
from stoker.contract.safe_io import open_regular

PACKED = (".gz", ".bz2", ".xz", ".zst")
MOST_TIMES = 200  # a packed file's size; text packs to a fifth, tables of numbers to a twentieth
ALWAYS = 256 << 20  # bytes that any packed file may unfold to
_WINDOW = 128 << 20  # bytes that a decompressor may look back: what `xz -9` and `zstd --long=27` need at most
_READ = 1 << 20
_PIECE = 1 << 13  # bytes that a frame gets at once: those behind its end are copied
_ZSTD_READ = 1 << 11  # 4 bytes of zstd unfold to 128 KB at most: 64 MB at once


def packing_of(path: str) -> str:
    """.gz of a.jsonl.gz; empty: it is not packed."""
    ending = os.path.splitext(path)[1].lower()
    return ending if ending in PACKED else ""


def most_unfolded(size: int, parts: int = 1) -> int:
    """Bytes that a file of `size` bytes may stand for, or one of so many parts of it, or of so many files that are read
    together: else a thousand of a few bytes each stand for a thousand times as much."""
    return max(ALWAYS // parts, MOST_TIMES * size)


def unfolds(path: str, size: int) -> Refusal:
    line = f"{path} unpacks to more than {MOST_TIMES} times its {amount(size)}: it may be an attack"
    return Refusal(f"{line}; unpack it yourself if it is not", EX_DATAERR)


def unpacked_name(path: str) -> str:
    return path[: len(path) - len(packing_of(path))]


@contextmanager
def open_unpacked(path: str, files: int = 1) -> Iterator[BinaryIO]:
    """The file's content, unpacked where its name says that it is packed. Whatever goes wrong within the block while
    unpacking is refused in one line. `files`: how many are read together.
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
        stream = _Bounded(_opened(path, packing, file), path, os.path.getsize(path), files)
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
        decompressor = zstandard.ZstdDecompressor(
            max_window_size=_WINDOW
        )  # one for all: making it takes longer than a frame
        return _Frames(file, lambda: _Zstandard(decompressor), _ZSTD_READ)
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
        self._at = 0  # what of the input the frames have got

    def read(self, size: int) -> bytes:
        while not self._output and self._more(size):
            continue
        data, self._output = self._output[:size], self._output[size:]
        return data

    def _more(self, size: int) -> bool:
        if self._frame.eof:
            self._at -= len(self._frame.unused_data)
            self._frame, self._begun = self._fresh(), False
        piece = b""
        if self._frame.needs_input:
            if self._at == len(self._input):
                self._input, self._at = self._file.read(self._block), 0
                if not self._input and self._begun:
                    raise EOFError("it ends in the middle")
                if not self._input:
                    return False
            piece = self._input[self._at : self._at + _PIECE]
            self._at += len(piece)
            if not self._begun:
                piece = piece.lstrip(b"\0")
                if not piece:
                    return True
        self._begun = True
        self._output = self._frame.decompress(piece, size)
        return True


class _Bounded(io.RawIOBase):
    """Every read names the file where its bytes are damaged, and counts what came out."""

    def __init__(self, stream: Any, path: str, size: int, files: int) -> None:
        self._stream, self._path, self._size, self._done = stream, path, size, 0
        self._most = most_unfolded(size, files)
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
            beyond = f" beyond its first {counted(self._done, 'byte')}" if self._done else ""
            line = f"{self._path} is damaged: it can't be unpacked{beyond} ({why})"
            raise Refusal(f"{line}; download it again", EX_DATAERR) from problem
        self._done += len(data)
        if self._done > self._most:
            raise unfolds(self._path, self._size)
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
