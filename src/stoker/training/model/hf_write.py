"""A folder that `transformers` opens, written tensor by tensor: the host needs room for one, not for the model."""

from __future__ import annotations

import json
import math
import os
import shutil
import socket
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from stoker.contract.errors import EX_CANTCREAT, Refusal
from stoker.contract.safe_io import is_own, open_regular, read_bytes, sync_folder, write_atomic
from stoker.contract.tensor_header import pack_header
from stoker.contract.text import is_digits
from stoker.contract.units import format_bytes, plural
from stoker.training.checkpoint.folders import put_in_place, remove, repair
from stoker.training.model.config import ModelConfig
from stoker.training.model.families.family import CONFIG
from stoker.training.model.hf_config import GENERATION, INDEX, WEIGHTS
from stoker.training.model.hf_files import Part, places
from stoker.training.model.hf_hub import TOKENIZER_FILES

SHARD_BYTES = 5_000_000_000
DTYPES = {torch.float32: ("F32", "float32"), torch.bfloat16: ("BF16", "bfloat16"), torch.float16: ("F16", "float16")}
CARD, CARD_MARK = "README.md", "<!-- written by stoker -->"
SCORE = "score.safetensors"  # a reward model's head, beside the decoder's weights


ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
EXPORTED = ".stoker-export"  # in a folder that `stoker export` wrote: such a one may be replaced


def shards(c: ModelConfig, dtype: torch.dtype) -> list[list[Part]]:
    """In their order, each file up to SHARD_BYTES; a larger tensor has one of its own."""
    found: list[list[Part]] = [[]]
    room = SHARD_BYTES
    for part in (part for place in places(c) for part in place.parts):
        size = size_of(part, dtype)
        if found[-1] and size > room:
            found.append([])
            room = SHARD_BYTES
        found[-1].append(part)
        room -= size
    return found


def size_of(part: Part, dtype: torch.dtype) -> int:
    return math.prod(part.shape) * dtype.itemsize


@contextmanager
def fresh_folder(folder: str, size: int = 0) -> Iterator[str]:
    """Yield a temporary folder that takes the place of `folder` at the end; an exception leaves nothing. `size`: bytes it needs."""
    folder = os.path.abspath(folder)
    parent, name = os.path.split(folder)
    os.makedirs(parent, exist_ok=True)
    refuse_foreign_files(folder)
    sweep(parent, name)
    disk = os.statvfs(parent)
    free = disk.f_bavail * disk.f_frsize
    if disk.f_blocks and free < size:
        raise Refusal(
            f"no space left: {folder} needs {format_bytes(size)}, {format_bytes(free)} are free there", EX_CANTCREAT
        )
    fresh = os.path.join(parent, f".{name}.{socket.gethostname()}-{os.getpid()}-{os.urandom(4).hex()}.tmp")
    os.mkdir(fresh)
    try:
        yield fresh
        sync_folder(fresh)
        put_in_place(fresh, folder)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise


class Export:
    """The weights' files in a fresh folder. Shapes are known, so each file has its header at once, each tensor its place."""

    def __init__(self, fresh: str, folder: str, c: ModelConfig, dtype: torch.dtype) -> None:
        self._fresh, self._folder, self._dtype = fresh, folder, dtype
        self._places = {place.name: place for place in places(c)}
        self._waiting = set(self._places)
        self._spots: dict[str, tuple[str, int]] = {}  # of each part: its file, and where it begins there
        plan, kind, total = shards(c, dtype), DTYPES[dtype][0], 0
        for number, parts in enumerate(plan, 1):
            name = WEIGHTS if len(plan) == 1 else f"model-{number:05d}-of-{len(plan):05d}.safetensors"
            header = pack_header({part.name: (kind, part.stored) for part in parts}, {"format": "pt"})
            write_atomic(os.path.join(fresh, name), header)
            begin = len(header)
            for part in parts:
                self._spots[part.name] = (name, begin)
                begin += size_of(part, dtype)
            total += begin - len(header)
        if len(plan) > 1:
            where = {name: file for name, (file, _) in sorted(self._spots.items())}
            write_json(fresh, INDEX, {"metadata": {"total_size": total}, "weight_map": where})

    def put(self, name: str, whole: Tensor) -> None:
        """`name`: ours."""
        if name not in self._waiting:
            raise Refusal(f"{self._folder}: this model has no tensor {name}, or it was given twice")
        place = self._places[name]
        want = (sum(part.shape[0] for part in place.parts), *place.parts[0].shape[1:])
        if tuple(whole.shape) != want:
            raise Refusal(f"{self._folder}: {name} is {list(whole.shape)}, the configuration says {list(want)}")
        here = whole.detach().to(device="cpu", dtype=self._dtype).contiguous()
        for part, piece in zip(place.parts, torch.split(here, [part.shape[0] for part in place.parts]), strict=True):
            file_name, begin = self._spots[part.name]
            piece = piece.t().contiguous() if part.transposed else piece
            with open(os.path.join(self._fresh, file_name), "r+b") as file:
                file.seek(begin)
                file.write(piece.reshape(-1).view(torch.uint8).numpy().data)
        self._waiting.remove(name)

    def finish(self) -> None:
        if self._waiting:
            raise Refusal(
                f"{self._folder}: {plural(len(self._waiting), 'tensor')} of this model were not given, {min(self._waiting)} among"
                " them"
            )
        for name in {name for name, _ in self._spots.values()}:
            with open(os.path.join(self._fresh, name), "rb") as file:
                os.fsync(file.fileno())


def write_json(folder: str, name: str, value: Mapping[str, Any]) -> None:
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    write_atomic(os.path.join(folder, name), text)  # half of a surrogate pair stays as JSON spells it


def add_files(
    fresh: str, config: Mapping[str, Any], generation: Mapping[str, Any], copied: Iterable[tuple[str | None, str]]
) -> None:
    """What lies beside the weights. `copied`: (folder, name) of files, where there are such."""
    write_json(fresh, CONFIG, config)
    if generation:
        write_json(fresh, GENERATION, generation)
    for folder, name in copied:
        if folder and os.path.isfile(path := os.path.join(folder, name)):
            write_atomic(os.path.join(fresh, name), beside(path))


def beside(path: str) -> bytes:
    """A file of a model's folder; a link may lead within it or to the hub cache's blobs, and nowhere else."""
    try:
        return read_bytes(path, inside=True)
    except OSError as problem:
        raise Refusal(f"{path} {problem.strerror}", EX_CANTCREAT) from problem


def refuse_foreign_files(folder: str) -> None:
    """What is there will be replaced: only an earlier export may be."""
    if not os.path.lexists(folder):
        return
    if os.path.islink(folder):
        raise Refusal(f"{folder} is a symbolic link: give the folder itself, or another one", EX_CANTCREAT)
    if not os.path.isdir(folder):
        raise Refusal(f"{folder} is a file: give a folder for the model", EX_CANTCREAT)
    ours = (CONFIG, GENERATION, INDEX, SCORE, EXPORTED, *ADAPTER_FILES, *TOKENIZER_FILES)
    for name in sorted(os.listdir(folder)):
        path = os.path.join(folder, name)
        if name == CARD and _is_ours(path):
            continue
        known = name in ours or (name.startswith("model") and name.endswith(".safetensors"))
        if not known or os.path.isdir(path):
            raise Refusal(
                f"{folder} holds {name}, which no export wrote and a new one would remove: give another folder",
                EX_CANTCREAT,
            )


def refuse_other_models(folder: str) -> None:
    """Every model's folder has the same names: only the mark tells an export from a model that somebody saved or trained."""
    refuse_foreign_files(folder)
    if os.path.isdir(folder) and os.listdir(folder) and not os.path.isfile(os.path.join(folder, EXPORTED)):
        raise Refusal(
            f"{folder} holds files that no `stoker export` wrote, and a new one would remove them: give another folder, or"
            " remove it yourself",
            EX_CANTCREAT,
        )


def refuse_existing(out: str) -> None:
    """Raise Refusal if there is an earlier export at `out`. An empty folder is none."""
    if os.path.lexists(out) and not (os.path.isdir(out) and not os.listdir(out)):
        line = f"{out} already exists: give another name, or --force to replace it"
        raise Refusal(line, EX_CANTCREAT)


def _is_ours(card: str) -> bool:
    with os.fdopen(open_regular(card), "rb") as file:
        return CARD_MARK.encode() in file.read(1000)


def sweep(parent: str, name: str) -> None:
    """What exports that were killed left behind: the one that was being replaced comes back, unfinished ones go.

    In a folder that others may write to, what they left stays theirs.
    """
    repair(parent, only=name)
    host = socket.gethostname()
    for entry in os.listdir(parent):
        begin = f".{name}.{host}-"
        pid = entry.removeprefix(begin).removesuffix(".tmp").partition("-")[0]
        ours = entry.startswith(begin) and entry.endswith(".tmp") and is_own(os.path.join(parent, entry))
        if ours and is_digits(pid) and (int(pid) == os.getpid() or not _alive(int(pid))):
            remove(os.path.join(parent, entry))


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's
        return True
    return True
