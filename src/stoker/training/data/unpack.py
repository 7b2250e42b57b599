"""Packed files (.gz .bz2 .xz .zst) as streams. A damaged one is one refusal."""

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

from stoker.contract.errors import EX_DATAERR, EX_NOINPUT, EX_UNAVAILABLE, Refusal
from stoker.contract.safe_io import open_regular
from stoker.contract.units import plural

PACKED = (".gz", ".bz2", ".xz", ".zst")
_READ = 1 << 20
_PIECE = 1 << 13  # bytes that a frame gets at once: those behind its end are copied


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
        with io.BufferedReader(_Unpacked(_opened(path, packing, file), path), _READ) as buffered:
            yield buffered


def _opened(path: str, packing: str, file: BinaryIO) -> Any:
    if packing == ".gz":
        return gzip.GzipFile(fileobj=file, mode="rb")
    if packing == ".bz2":
        return bz2.BZ2File(file)
    if packing == ".xz":  # lzma.LZMAFile ignores a damaged second stream
        return _Frames(file, lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ))
    return _zstd(path, file)


def _zstd(path: str, file: BinaryIO) -> Any:
    try:
        zstandard = import_module("zstandard")
        decompressor = zstandard.ZstdDecompressor()  # one for all: making it takes longer than a frame
        return _Frames(file, lambda: _Zstandard(decompressor))
    except ImportError:
        pass
    try:
        zstd = import_module("compression.zstd")  # Python 3.14 and later
    except ImportError as problem:
        line = f"{path} needs a package to unpack it: `pip install zstandard`, or `unzstd {path}`"
        raise Refusal(line, EX_UNAVAILABLE) from problem
    return _Frames(file, zstd.ZstdDecompressor)


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

    def __init__(self, file: BinaryIO, fresh: Callable[[], Any]) -> None:
        self._file, self._fresh = file, fresh
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
                self._input, self._at = self._file.read(_READ), 0
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


class _Unpacked(io.RawIOBase):
    """Every read names the file where its bytes are damaged."""

    def __init__(self, stream: Any, path: str) -> None:
        self._stream, self._path, self._done = stream, path, 0
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
            beyond = f" beyond its first {plural(self._done, 'byte')}" if self._done else ""
            line = f"{self._path} is damaged: it can't be unpacked{beyond} ({why})"
            raise Refusal(f"{line}; download it again", EX_DATAERR) from problem
        self._done += len(data)
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
