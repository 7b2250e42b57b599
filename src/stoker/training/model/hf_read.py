"""A folder's weights by our names, one at a time: as they are stored, made of 4 bits, or with an adapter added to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from stoker.contract.names import EX_DATAERR, Refusal
from stoker.training.model import adapters, nf4
from stoker.training.model.config import LORA, AdapterConfig, ModelConfig
from stoker.training.model.hf_config import NF4_PARTS, Stored
from stoker.training.model.hf_files import Part, Place, check, places
from stoker.training.model.targets import extra, targets

Say = Callable[[str], None]
_STORED = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "U8": torch.uint8,
}  # fmt: skip


def read_stored(one: Stored) -> Tensor:
    data = bytearray(one.size)
    with open(one.path, "rb") as file:
        file.seek(one.begin)
        if file.readinto(data) != one.size:
            raise Refusal(f"{one.path} became shorter while it was read", EX_DATAERR)
    if one.dtype not in _STORED:
        raise Refusal(f"{one.path} holds numbers of {one.dtype}, which are not read", EX_DATAERR)
    return torch.frombuffer(data, dtype=_STORED[one.dtype]).view(one.shape)


class Added:
    """An adapter that becomes part of the weights."""

    def __init__(self, c: ModelConfig, told: AdapterConfig, tensors: Mapping[str, Callable[[], Tensor]]) -> None:
        """`tensors`: by peft's names."""
        self._scale, self._tensors = told.scale, tensors
        self._targets = {f"{target.name}.weight": target for target in targets(c, told)}
        self._instead = set(extra(c, told))

    def to(self, place: Place, whole: Tensor) -> Tensor:
        if place.name in self._instead:
            pieces = [(self._tensors[adapters.extra_name(part.name)](), part.transposed) for part in place.parts]
            whole.copy_(torch.cat([piece.t() if turned else piece for piece, turned in pieces]))
        target = self._targets.get(place.name)
        for name, (begin, end) in zip(target.names, target.parts(), strict=True) if target else ():
            a, b = (self._tensors[one]().float() for one in adapters.pair_names(name))
            whole[begin:end] = whole[begin:end].float() + self._scale * (b @ a)
        return whole


def added_by(folder: str, c: ModelConfig, own: bool, say: Say) -> Added:
    """The adapter of that folder. `own`: a model with a score is filled."""
    adapters.check_base(folder)
    told, _ = adapters.settings_of(folder, LORA)
    stored = adapters.checked(c, told, folder, scored=own)
    say(f"adapter from {folder}: rank {told.lora_rank}, {len(stored)} tensors, added to the weights")
    return Added(c, told, {name: lambda one=one: read_stored(one) for name, one in stored.items()})  # type: ignore[misc]


class Source:
    def __init__(self, folder: str, c: ModelConfig, added: Added | None = None) -> None:
        self.stored = check(folder, c)
        self._folder, self._c, self._added = folder, c, added

    def codes(self, part: Part) -> nf4.Quantized | None:
        """None: this part has 16 bits or more."""
        names = (part.name, *(f"{part.name}.{name}" for name in NF4_PARTS))
        if names[-1] not in self.stored:
            return None
        tensors = {name: read_stored(self.stored[name]) for name in names if name in self.stored}
        found = nf4.from_tensors(tensors, part.name, self._folder)
        if found.size != part.shape:
            raise Refusal(
                f"model {self._folder}: {part.name} says it is {list(found.size)}, and this model needs {list(part.shape)}",
                EX_DATAERR,
            )
        return found

    def rows(self, part: Part) -> Tensor:
        codes = self.codes(part)
        rows = read_stored(self.stored[part.name]) if codes is None else nf4.dequantize(codes)
        return rows.t() if part.transposed and rows.dim() == 2 else rows

    def whole(self, place: Place, dtype: torch.dtype) -> Tensor:
        made = torch.empty(sum(part.shape[0] for part in place.parts), *place.parts[0].shape[1:], dtype=dtype)
        begin = 0
        for part in place.parts:
            rows = self.rows(part)
            made[begin : begin + len(rows)] = rows
            if len(rows) < part.shape[0]:  # padding, or added tokens: equal on all ranks, and no louder than the others
                made[begin + len(rows) : begin + part.shape[0]] = rows.mean(0, dtype=torch.float32)
            begin += part.shape[0]
        return made if self._added is None else self._added.to(place, made)

    @torch.no_grad()
    def tensors(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        for place in places(self._c):
            yield place.name, self.whole(place, dtype)
