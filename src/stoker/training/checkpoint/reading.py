"""Finding the newest valid checkpoint and reading it, at any world size, sharded or not."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from stoker.contract.errors import EX_DATAERR, EX_NOINPUT, Refusal
from stoker.contract.progress import Progress
from stoker.contract.safe_io import is_trusted, read_bytes, user_name
from stoker.training.checkpoint.folders import repair, steps_in
from stoker.training.checkpoint.manifest import (
    NAME,
    Entry,
    Manifest,
    Piece,
    decode,
    overlap,
    sizes_wrong_in,
    wrong_in,
)
from stoker.training.checkpoint.snapshot import DTYPES, Block, dtype_of, local_block

_ROWS_AT_ONCE = 64 << 20
_TORCH = {theirs: ours for ours, theirs in DTYPES.items()}


class Checkpoint:
    def __init__(self, path: str, manifest: Manifest) -> None:
        self.path, self.manifest = path, manifest
        self.step, self.world, self.meta, self.score = manifest.step, manifest.world, manifest.meta, manifest.score
        self.tensors = manifest.tensors

    def read(self, name: str) -> torch.Tensor:
        """One whole tensor, on the CPU."""
        entry = self._entry(name)
        tensor = torch.empty(entry.shape, dtype=_TORCH[entry.dtype])
        self._fill({name: tensor})
        return tensor

    def read_into(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copies the slices these tensors or DTensors need. Both sides must have the same; nothing is half done."""
        for name, tensor in tensors.items():
            entry = self._entry(name)
            if tuple(tensor.shape) != entry.shape:
                raise self._other_model(f"{name} has shape {list(entry.shape)} there and {list(tensor.shape)} here")
            if dtype_of(name, tensor) != entry.dtype:
                raise self._other_model(f"{name} is {entry.dtype} there and {dtype_of(name, tensor)} here")
        more = next((name for name in self.tensors if name not in tensors), None)
        if more is not None:
            raise self._other_model(f"it holds {more}, which is not here")
        self._fill(tensors)

    def _entry(self, name: str) -> Entry:
        if name not in self.tensors:
            raise self._other_model(f"it has no {name}")
        if self.tensors[name].dtype not in _TORCH:
            raise Refusal(
                f"{self.path}: {name} is of type {self.tensors[name].dtype!r}, which this torch ({torch.__version__})"
                " does not have",
                EX_DATAERR,
            )
        return self.tensors[name]

    def _other_model(self, what: str) -> Refusal:
        return Refusal(
            f"{self.path} is a checkpoint of another model or optimizer: {what}; resume with its own settings, or in"
            " another run",
            EX_DATAERR,
        )

    def _fill(self, tensors: Mapping[str, torch.Tensor]) -> None:
        work: dict[str, list[tuple[str, Piece, Block]]] = {}
        for name, tensor in tensors.items():
            block, _ = local_block(name, tensor)
            for piece in self.tensors[name].pieces:
                work.setdefault(piece.file, []).append((name, piece, block))
        with Progress("loading a checkpoint", sum(map(len, work.values())), unit="tensors") as progress:
            for file, items in work.items():
                try:
                    with safe_open(os.path.join(self.path, file), framework="pt", device="cpu") as opened:
                        for name, piece, block in items:
                            _copy(opened, piece, block, self.tensors[name])
                            progress.tick()
                except (SafetensorError, OSError, ValueError) as problem:
                    raise Refusal(f"{self.path}: {file} can't be read: {problem}", EX_DATAERR) from problem


def _copy(opened: Any, piece: Piece, block: Block, entry: Entry) -> None:
    source = opened.get_slice(piece.key)
    if tuple(source.get_shape()) != piece.shape or source.get_dtype() != entry.dtype:
        raise ValueError(
            f"{piece.key} is {source.get_dtype()} {source.get_shape()} instead of {entry.dtype} {list(piece.shape)}"
        )
    if not piece.shape:
        block.data.copy_(opened.get_tensor(piece.key))
        return
    both = overlap(piece.offset, piece.shape, block.offset, tuple(block.data.shape))
    if both is None:
        return
    start, stop = both
    row = block.data[:1].numel() * block.data.element_size()
    rows = max(1, _ROWS_AT_ONCE // max(row, 1))
    for low in range(start[0], stop[0], rows):
        begin, end = (low, *start[1:]), (min(low + rows, stop[0]), *stop[1:])
        there = tuple(slice(a - o, b - o) for a, b, o in zip(begin, end, piece.offset, strict=True))
        here = tuple(slice(a - o, b - o) for a, b, o in zip(begin, end, block.offset, strict=True))
        block.data[here].copy_(source[there])


def open_checkpoint(path: str) -> Checkpoint:
    """Manifest and sizes are checked, not the bytes: `verify` does that."""
    try:
        data = read_bytes(os.path.join(path, NAME))
    except OSError as problem:
        raise Refusal(f"{path} is not a complete checkpoint: {NAME}: {problem.strerror}", EX_NOINPUT) from problem
    try:
        manifest = decode(data)
    except ValueError as problem:
        raise Refusal(f"{path} is not a valid checkpoint: {NAME}: {problem}", EX_DATAERR) from problem
    wrong = sizes_wrong_in(path, manifest.files)
    if wrong:
        raise Refusal(f"{path} is not a valid checkpoint: {wrong[0]}", EX_DATAERR)
    return Checkpoint(path, manifest)


def verify(path: str) -> list[str]:
    """Reads every byte: what is wrong, one line per bad file; nothing when it is valid."""
    try:
        return wrong_in(path, open_checkpoint(path).manifest.files)
    except Refusal as problem:
        return [problem.line]


def find(folder: str, say: Callable[[str], None], of_run: str = "") -> Checkpoint | None:
    """The newest valid checkpoint; damaged ones are reported and passed over. `of_run`: only that run's own."""
    try:
        repair(folder)
    except OSError as problem:  # a folder that may only be read
        say(f"{problem.filename}: a checkpoint that was being replaced can't be put back: {problem.strerror}")
    for path in steps_in(folder).values():
        try:
            uid = os.lstat(path).st_uid
        except OSError as problem:  # another user's mount, or removed meanwhile
            say(f"{path} can't be read: {problem.strerror}; looking at the one before")
            continue
        if not is_trusted(uid, folder):
            say(f"{path} belongs to {user_name(uid)} and is not resumed from; looking at the one before")
            continue
        try:
            found = open_checkpoint(path)
        except Refusal as problem:
            say(f"{problem.line}; looking at the one before")
            continue
        if of_run and found.meta.get("run") != of_run:
            continue
        wrong = wrong_in(path, found.manifest.files)
        if not wrong:
            return found
        say(f"{path} is not a valid checkpoint: {'; '.join(wrong)}; looking at the one before")
    return None
