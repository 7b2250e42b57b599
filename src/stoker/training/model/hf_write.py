"""A folder that `transformers` opens, written tensor by tensor: the host needs room for one, not for the model."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import socket
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from stoker.contract.names import EX_CANTCREAT, Refusal
from stoker.contract.quantities import amount, counted
from stoker.contract.safe_io import (
    is_own,
    is_trusted,
    open_regular,
    read_bytes,
    user_name,
    why_not_ours_alone,
    write_whole,
)
from stoker.contract.tensorheader import pack_header
from stoker.contract.text import is_count
from stoker.training.checkpoint.folders import put_in_place, remove, repair
from stoker.training.model.config import ModelConfig
from stoker.training.model.families.family import CONFIG
from stoker.training.model.hf_config import GENERATION, INDEX, WEIGHTS
from stoker.training.model.hf_files import Part, places
from stoker.training.model.hf_hub import TOKENIZER_FILES

SHARD_BYTES = 5_000_000_000
DTYPES = {torch.float32: ("F32", "float32"), torch.bfloat16: ("BF16", "bfloat16"), torch.float16: ("F16", "float16")}
LONGEST_BESIDE = 256 << 20  # bytes of a file that is copied from a model's folder
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
    """Beside the final one, which it becomes at the end; an exception leaves nothing. `size`: bytes it needs.

    Given by its descriptor: where others may write to the folder above, they can move it, and not lead what is written to it
    elsewhere. There nothing is removed by its name either: they could put any folder of ours under it.
    """
    folder = os.path.abspath(folder)
    parent, name = os.path.split(folder)
    os.makedirs(parent, exist_ok=True)
    refuse_foreign_files(folder)
    others = _who_could_rename(parent)
    if others:
        _refuse_to_replace(folder, others)
    else:
        sweep(parent, name)
    disk = os.statvfs(parent)
    free = disk.f_bavail * disk.f_frsize
    if disk.f_blocks and free < size:
        raise Refusal(f"no space left: {folder} needs {amount(size)}, {amount(free)} are free there", EX_CANTCREAT)
    fresh = os.path.join(parent, f".{name}.{socket.gethostname()}-{os.getpid()}-{os.urandom(4).hex()}.tmp")
    os.mkdir(fresh)
    handle = os.open(fresh, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{handle}"
        os.fsync(handle)
        if not os.path.samestat(os.fstat(handle), os.lstat(fresh)):
            raise OSError(errno.ESTALE, f"{fresh} was moved or replaced", fresh)
        if others:
            _refuse_to_replace(folder, others)
        put_in_place(fresh, folder, replace=not others)
    except BaseException:
        _remove_held(handle, fresh)
        raise
    finally:
        os.close(handle)


def _who_could_rename(parent: str) -> str:
    """Others, in words, who may put another folder of ours under a name in this one. Empty: nobody. Pods mount their volumes
    open to all, as root's.
    """
    if os.geteuid() == os.stat(parent).st_uid == 0:
        return ""
    return why_not_ours_alone(parent, sticky=True)


def _refuse_to_replace(folder: str, others: str) -> None:
    if os.path.lexists(folder):
        line = f"{folder} is there, and others could exchange it ({os.path.dirname(folder)}: {others})"
        raise Refusal(f"{line}: give another name, or remove it first", EX_CANTCREAT)


def _remove_held(handle: int, path: str) -> None:
    """What is in it by its descriptor, whatever its name leads to by now."""
    with os.scandir(handle) as entries:
        inside = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    for name, is_folder in inside:
        if is_folder:
            shutil.rmtree(name, dir_fd=handle)
        else:
            os.unlink(name, dir_fd=handle)
    with suppress(OSError):  # moved, or somebody else's by now
        os.rmdir(path)


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
            write_whole(os.path.join(fresh, name), header)
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
                f"{self._folder}: {counted(len(self._waiting), 'tensor')} of this model were not given, {min(self._waiting)} among"
                " them"
            )
        for name in {name for name, _ in self._spots.values()}:
            with open(os.path.join(self._fresh, name), "rb") as file:
                os.fsync(file.fileno())


def write_json(folder: str, name: str, value: Mapping[str, Any]) -> None:
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    write_whole(os.path.join(folder, name), text)  # half of a surrogate pair stays as JSON spells it


def add_files(
    fresh: str, config: Mapping[str, Any], generation: Mapping[str, Any], copied: Iterable[tuple[str | None, str]]
) -> None:
    """What lies beside the weights. `copied`: (folder, name) of files, where there are such."""
    write_json(fresh, CONFIG, config)
    if generation:
        write_json(fresh, GENERATION, generation)
    for folder, name in copied:
        if folder and os.path.isfile(path := os.path.join(folder, name)):
            write_whole(os.path.join(fresh, name), beside(path))


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
    if os.path.lexists(folder):
        refuse_anothers(folder)
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


def refuse_anothers(path: str) -> None:
    """An export that bears our mark may be another user's, which root could replace."""
    owner = os.lstat(path).st_uid
    if not is_trusted(owner, os.path.dirname(os.path.abspath(path))):
        line = f"{path} belongs to {user_name(owner)}: give another name, or remove it first"
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
        if ours and is_count(pid) and (int(pid) == os.getpid() or not _alive(int(pid))):
            remove(os.path.join(parent, entry))


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's
        return True
    return True
