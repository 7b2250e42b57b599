"""A folder that `transformers` opens, written tensor by tensor in any order: the host needs room for one of them, not
for the model.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import IO, Any

import torch
from torch import Tensor

from stoker.contract.names import EX_CANTCREAT, Refusal
from stoker.contract.quantities import amount
from stoker.contract.shape import shape
from stoker.contract.untrusted import is_count, open_regular
from stoker.contract.wholefile import sync_folder, write_whole
from stoker.training.checkpoint.folders import put_in_place, remove, repair
from stoker.training.model.config import ModelConfig
from stoker.training.model.hf_config import CONFIG, GENERATION
from stoker.training.model.hf_files import BYTES, INDEX, WEIGHTS, Part, places
from stoker.training.model.hf_hub import TOKENIZER_FILES

SHARD_BYTES = 5_000_000_000
DTYPES = {torch.float32: ("F32", "float32"), torch.bfloat16: ("BF16", "bfloat16"), torch.float16: ("F16", "float16")}
LONGEST_BESIDE = 256 << 20  # bytes of a file that is copied from a model's folder
CARD, CARD_MARK = "README.md", "<!-- written by stoker -->"
SCORE = "score.safetensors"  # a reward model's head, beside the decoder's weights


@shape
class Spot:
    file: str
    begin: int


def shards(parts: Sequence[Part], itemsize: int) -> list[list[Part]]:
    """In their order, each file up to SHARD_BYTES; a larger tensor has one of its own."""
    found: list[list[Part]] = [[]]
    room = SHARD_BYTES
    for part in parts:
        size = _size(part, itemsize)
        if found[-1] and size > room:
            found.append([])
            room = SHARD_BYTES
        found[-1].append(part)
        room -= size
    return found


def _size(part: Part, itemsize: int) -> int:
    return torch.Size(part.shape).numel() * itemsize


class Export:
    """Everything goes to a folder beside the final one; `finish` renames it. Left without that, it leaves nothing."""

    def __init__(self, folder: str, c: ModelConfig, dtype: torch.dtype) -> None:
        self.folder, self.dtype = os.path.abspath(folder), dtype
        self._places = {place.name: place for place in places(c)}
        self._waiting = set(self._places)
        self._spots: dict[str, Spot] = {}
        self._files: dict[str, IO[bytes]] = {}
        parts = [part for place in self._places.values() for part in place.parts]
        self.bytes = sum(_size(part, dtype.itemsize) for part in parts)
        parent, name = os.path.split(self.folder)
        os.makedirs(parent, exist_ok=True)
        refuse_foreign_files(self.folder)
        sweep(parent, name)
        self._room(parent)
        self._fresh = os.path.join(parent, f".{name}.{socket.gethostname()}-{os.getpid()}.tmp")
        os.mkdir(self._fresh)
        try:
            self._begin(shards(parts, dtype.itemsize))
        except BaseException:
            self.__exit__(None, None, None)
            raise

    def __enter__(self) -> Export:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._files.values():
            file.close()
        if os.path.isdir(self._fresh):
            shutil.rmtree(self._fresh)

    def _room(self, parent: str) -> None:
        disk = os.statvfs(parent)
        free = disk.f_bavail * disk.f_frsize
        if disk.f_blocks and free < self.bytes:
            raise Refusal(
                f"no space left: {self.folder} needs {amount(self.bytes)}, {amount(free)} are free there", EX_CANTCREAT
            )

    def _begin(self, plan: list[list[Part]]) -> None:
        """The shapes are known, so each file gets its header at once and each tensor has its place in it."""
        names = (
            [WEIGHTS]
            if len(plan) == 1
            else [f"model-{number:05d}-of-{len(plan):05d}.safetensors" for number in range(1, len(plan) + 1)]
        )
        kind = DTYPES[self.dtype][0]
        for name, parts in zip(names, plan, strict=True):
            header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
            end = 0
            for part in parts:
                begin, end = end, end + _size(part, BYTES[kind])
                header[part.name] = {"dtype": kind, "shape": list(part.stored), "data_offsets": [begin, end]}
            text = json.dumps(header, separators=(",", ":")).encode()
            text += b" " * (-len(text) % 8)
            self._files[name] = file = open(os.path.join(self._fresh, name), "wb")  # noqa: SIM115  __exit__ closes them
            file.write(len(text).to_bytes(8, "little") + text)
            self._spots |= {
                part.name: Spot(name, 8 + len(text) + header[part.name]["data_offsets"][0]) for part in parts
            }
        if len(names) > 1:
            index = {
                "metadata": {"total_size": self.bytes},
                "weight_map": {name: spot.file for name, spot in sorted(self._spots.items())},
            }
            self._json(INDEX, index)

    def put(self, name: str, whole: Tensor) -> None:
        """`name`: ours."""
        if name not in self._waiting:
            raise Refusal(f"{self.folder}: this model has no tensor {name}, or it was given twice")
        place = self._places[name]
        want = (sum(part.shape[0] for part in place.parts), *place.parts[0].shape[1:])
        if tuple(whole.shape) != want:
            raise Refusal(f"{self.folder}: {name} is {list(whole.shape)}, the configuration says {list(want)}")
        here = whole.detach().to(device="cpu", dtype=self.dtype).contiguous()
        row = 0
        for part in place.parts:
            spot = self._spots[part.name]
            self._files[spot.file].seek(spot.begin)
            piece = here[row : row + part.shape[0]]
            piece = piece.t().contiguous() if part.transposed else piece
            self._files[spot.file].write(piece.reshape(-1).view(torch.uint8).numpy().data)
            row += part.shape[0]
        self._waiting.remove(name)

    def finish(
        self,
        config: Mapping[str, Any],
        generation: Mapping[str, Any],
        tokenizer_folder: str | None,
        more: Callable[[str], None] | None = None,
    ) -> None:
        """`more` may put files of its own beside the weights."""
        if self._waiting:
            raise Refusal(
                f"{self.folder}: {len(self._waiting)} tensors of this model were not given, {min(self._waiting)} among"
                " them"
            )
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        self._json(CONFIG, config)
        if generation:
            self._json(GENERATION, generation)
        for name in TOKENIZER_FILES if tokenizer_folder else ():
            path = os.path.join(str(tokenizer_folder), name)
            if os.path.isfile(path):
                write_whole(os.path.join(self._fresh, name), beside(str(tokenizer_folder), path))
        if more is not None:
            more(self._fresh)
        sync_folder(self._fresh)
        put_in_place(self._fresh, self.folder)

    def _json(self, name: str, value: Mapping[str, Any]) -> None:
        write_whole(os.path.join(self._fresh, name), (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


def beside(folder: str, path: str) -> bytes:
    """A file of a model's folder. A link may lead within it or to the hub cache's blobs; what lies elsewhere was not
    meant to be exported.
    """
    real = os.path.realpath(path)
    home = os.path.realpath(folder)
    blobs = os.path.join(os.path.dirname(os.path.dirname(home)), "blobs")
    if os.path.dirname(real) not in (home, blobs):
        raise Refusal(
            f"{path} is a link to {real}, outside the model's folder: copy that file into the folder if it belongs"
            " there",
            EX_CANTCREAT,
        )
    with os.fdopen(open_regular(real), "rb") as file:
        data = file.read(LONGEST_BESIDE + 1)
    if len(data) > LONGEST_BESIDE:
        raise Refusal(f"{path} has more than {LONGEST_BESIDE >> 20} MiB: no tokenizer is so large", EX_CANTCREAT)
    return data


def refuse_foreign_files(folder: str) -> None:
    """What is there will be replaced: only an earlier export may be."""
    if not os.path.lexists(folder):
        return
    if not os.path.isdir(folder):
        raise Refusal(f"{folder} is a file: give a folder for the model", EX_CANTCREAT)
    ours = (CONFIG, GENERATION, INDEX, SCORE, *TOKENIZER_FILES)
    for name in sorted(os.listdir(folder)):
        if name == CARD and _is_ours(os.path.join(folder, name)):
            continue
        if name not in ours and not (name.startswith("model") and name.endswith(".safetensors")):
            raise Refusal(
                f"{folder} holds {name}, which no export wrote and a new one would remove: give another folder",
                EX_CANTCREAT,
            )


def _is_ours(card: str) -> bool:
    with os.fdopen(open_regular(card), "rb") as file:
        return CARD_MARK.encode() in file.read(1000)


def sweep(parent: str, name: str) -> None:
    """What exports that were killed left behind: the one that was being replaced comes back, unfinished ones go."""
    repair(parent, only=name)
    host = socket.gethostname()
    for entry in os.listdir(parent):
        pid = entry.removeprefix(f".{name}.{host}-").removesuffix(".tmp")
        if entry == f".{name}.{host}-{pid}.tmp" and is_count(pid) and (int(pid) == os.getpid() or not _alive(int(pid))):
            remove(os.path.join(parent, entry))


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's
        return True
    return True
