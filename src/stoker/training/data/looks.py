"""What a file looks like from its first bytes, and where it stops being text."""

from __future__ import annotations

import errno
import os

from stoker.contract.errors import EX_DATAERR, EX_NOINPUT, Refusal
from stoker.contract.safe_io import open_regular

_BEGINNINGS = (
    (b"\x1f\x8b", "gzip"), (b"PK\x03\x04", "a zip archive"), (b"PAR1", "parquet"), (b"\x89PNG", "a PNG image"), (b"\xff\xd8\xff", "a JPEG image"),
    (b"%PDF", "a PDF"), (b"\x7fELF", "a program"), (b"\x28\xb5\x2f\xfd", "zstd"), (b"BZh", "bzip2"), (b"\xfd7zXZ", "xz"), (b"\x80\x02", "a pickle"),
    (b"\x80\x04", "a pickle"), (b"\x93NUMPY", "a numpy array"), (b"SQLite format 3", "an SQLite database"), (b"ARROW1", "an Arrow file"),
    (b"\xff\xfe", "UTF-16"), (b"\xfe\xff", "UTF-16"),
)  # fmt: skip
_CONTROL = bytes([*range(0x00, 0x09), *range(0x0E, 0x1B), *range(0x1C, 0x20), 0x7F])
HEAD = 1 << 16
CONTROL_SHARE = 0.05


def refuse_binary(path: str, head: bytes, at: int = 0) -> None:
    """NUL bytes or many control bytes are no text."""
    kind = next((name for beginning, name in _BEGINNINGS if at == 0 and head.startswith(beginning)), None)
    if kind == "UTF-16":
        raise Refusal(f"{path} is UTF-16, not UTF-8: `iconv -f UTF-16 -t UTF-8` converts it", EX_DATAERR)
    zero = head.find(b"\0")
    control = len(head) - len(head.translate(None, _CONTROL))
    if kind and (zero >= 0 or control > 0 or not _is_text(head)):
        raise Refusal(f"{path} is not text: it looks like {kind}", EX_DATAERR)
    if zero >= 0:
        raise Refusal(f"{path} is binary, not text: a NUL byte at offset {at + zero}", EX_DATAERR)
    if control > CONTROL_SHARE * len(head):
        raise Refusal(
            f"{path} is binary, not text: {control} of {len(head)} bytes at offset {at} are control characters",
            EX_DATAERR,
        )


def _is_text(head: bytes) -> bool:
    try:
        head.decode()
    except UnicodeDecodeError as problem:
        return problem.start > len(head) - 4  # the end cuts a character
    return True


def check_head(path: str, text: bool, name: str = "") -> None:
    """Cheap, before any work: it is readable, holds something, is no picture. `name`: what people call `path`."""
    shown = name or path
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            head = file.read(HEAD)
            size = os.fstat(file.fileno()).st_size
    except OSError as problem:
        if problem.errno in (errno.EINVAL, errno.EISDIR):
            raise Refusal(f"{shown} {problem.strerror}", EX_DATAERR) from problem
        raise Refusal(f"{shown} can't be read: {problem.strerror}", EX_NOINPUT) from problem
    if not size:
        raise Refusal(f"{shown} is empty", EX_DATAERR)
    if text:
        refuse_binary(shown, head)
        if size <= HEAD and not head.strip():
            raise Refusal(f"{shown} holds only whitespace", EX_DATAERR)


def as_text(path: str, data: bytes, at: int) -> None:
    """Refuses what is not UTF-8, with its place in the file."""
    try:
        data.decode()
    except UnicodeDecodeError as problem:
        byte = data[problem.start]
        guess = "latin-1" if byte >= 0xA0 else "windows-1252"
        raise Refusal(
            f"{path} is not UTF-8: byte 0x{byte:02x} at offset {at + problem.start}; if it is {guess}, `iconv -f"
            f" {guess} -t UTF-8` converts it",
            EX_DATAERR,
        ) from problem
