"""SHA-256 digests of the files that a run reads, to notice that a file has changed since an earlier start."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable

from stoker.contract.safe_io import open_regular

_SAMPLES, _SAMPLE_BYTES = 64, 1 << 16
_WEIGHTS = (".safetensors", ".gguf", ".bin")


def digest_file(path: str) -> str:
    """Return the SHA-256 of a file. For weights above 4 MiB it hashes the size, first MiB and 64 blocks of 64 KiB."""
    digest = hashlib.sha256()
    with os.fdopen(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if not path.endswith(_WEIGHTS) or size <= _SAMPLES * _SAMPLE_BYTES:
            while block := file.read(1 << 20):
                digest.update(block)
            return digest.hexdigest()
        digest.update(str(size).encode())
        digest.update(file.read(1 << 20))
        for sample in range(_SAMPLES):
            file.seek(sample * (size - _SAMPLE_BYTES) // (_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def digest_path(path: str) -> str:
    """Return the digest of a file, or of a folder's files except hidden ones, Markdown and subfolders."""
    if not os.path.isdir(path):
        return digest_file(path)
    names = [name for name in sorted(os.listdir(path)) if not name.startswith(".") and not name.endswith(".md")]
    files = [(name, os.path.join(path, name)) for name in names]
    return combine_digests((name, digest_file(file)) for name, file in files if os.path.isfile(file))


def combine_digests(digests: Iterable[tuple[str, str]]) -> str:
    """Return one digest for several files, given the name and digest of each."""
    return hashlib.sha256("\n".join(f"{name} {digest}" for name, digest in digests).encode()).hexdigest()
