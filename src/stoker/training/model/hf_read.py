"""A folder's weights by our names, one at a time: as they are stored, made of 4 bits, or with an adapter added to them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from stoker.contract.errors import EX_DATAERR, Refusal, parsing
from stoker.contract.frozen import replace
from stoker.contract.units import plural
from stoker.training.model import adapters, nf4
from stoker.training.model.config import LORA, AdapterConfig, ModelConfig
from stoker.training.model.hf_files import Part, Place, check, places
from stoker.training.model.hf_stream import Stream, read_columns, read_stored, rows_of
from stoker.training.model.nf4_size import NF4_PARTS
from stoker.training.model.targets import extra, targets

Say = Callable[[str], None]


class Added:
    """An adapter that becomes part of the weights."""

    def __init__(self, c: ModelConfig, told: AdapterConfig, tensors: Mapping[str, Callable[[], Tensor]]) -> None:
        """`tensors`: by peft's names."""
        self._scale, self._tensors = told.scale, tensors
        self._targets = {f"{target.name}.weight": target for target in targets(c, told)}
        self._instead = set(extra(c, told))

    def to(self, place: Place, out: Tensor, first: int = 0) -> Tensor:
        """`out`: rows of the place's weight, from `first` on."""
        last = first + len(out)
        if place.name in self._instead:
            pieces = [(self._tensors[adapters.extra_name(part.name)](), part.transposed) for part in place.parts]
            out.copy_(torch.cat([piece.t() if turned else piece for piece, turned in pieces])[first:last])
        target = self._targets.get(place.name)
        for name, (begin, end) in zip(target.names, target.parts(), strict=True) if target else ():
            low, high = max(begin, first), min(end, last)
            if low < high:
                a, b = (self._tensors[one]().to(out.device).float() for one in adapters.pair_names(name))
                rows = out[low - first : high - first]
                rows.copy_(rows.float() + self._scale * (b[low - begin : high - begin] @ a))
        return out


def added_by(folder: str, c: ModelConfig, own: bool, say: Say, base: str = "") -> Added:
    """The adapter of that folder. `own`: a model with a score is filled; `base`: of the weights it is added to; empty: those
    that it names.
    """
    adapters.check_base(folder, base)
    told, _ = adapters.settings_of(folder, LORA)
    stored = adapters.checked(c, told, folder, scored=own)
    say(f"adapter from {folder}: rank {told.lora_rank}, {plural(len(stored), 'tensor')}, added to the weights")
    return Added(c, told, {name: lambda one=one: read_stored(one) for name, one in stored.items()})  # type: ignore[misc]


class Source:
    """Reads onto `device`: the closer to where a tensor is needed, the less is copied."""

    def __init__(
        self, folder: str, c: ModelConfig, added: Added | None = None, device: torch.device | None = None
    ) -> None:
        """`device`: none is the CPU."""
        self.stored = check(folder, c)
        self._folder, self._c, self._added, self._stream = folder, c, added, Stream(device or torch.device("cpu"))

    def close(self) -> None:
        self._stream.close()

    def codes(self, part: Part) -> nf4.Quantized | None:
        """None: this part has 16 bits or more."""
        if not self._has_codes(part):
            return None
        names = (part.name, *(f"{part.name}.{name}" for name in NF4_PARTS))
        tensors = {name: read_stored(self.stored[name]) for name in names if name in self.stored}
        with parsing(f"model {self._folder}: {part.name}"):
            found = nf4.from_tensors(tensors, part.name, self._folder)
        if found.size != part.shape:
            raise Refusal(
                f"model {self._folder}: {part.name} says it is {list(found.size)}, and this model needs {list(part.shape)}",
                EX_DATAERR,
            )
        return nf4.moved(found, self._stream.device)

    def _has_codes(self, part: Part) -> bool:
        return f"{part.name}.{NF4_PARTS[-1]}" in self.stored

    def rows(self, part: Part) -> Tensor:
        codes = self.codes(part)
        rows = self._stream.read(self.stored[part.name]) if codes is None else nf4.dequantize(codes)
        return rows.t() if part.transposed and rows.dim() == 2 else rows

    def elements(self, part: Part, begin: int, end: int) -> Tensor:
        """Some of a part's, in their order."""
        stored = self.stored[part.name]
        if part.transposed or stored.shape != part.shape:
            return self.rows(part).flatten()[begin:end]
        flat = replace(stored, shape=(math.prod(stored.shape),))
        return self._stream.read(rows_of(flat, begin, end))

    def fill(self, place: Place, out: Tensor, first: int = 0) -> Tensor:
        """Into `out`: as many of the weight's rows as it has, from `first` on. No others are read, where they lie apart."""
        last, begin = first + len(out), 0
        for part in place.parts:
            end = begin + part.shape[0]
            low, high = max(begin, first), min(end, last)
            if low < high:
                self._fill_part(part, low - begin, out[low - first : high - first])
            begin = end
        return out if self._added is None else self._added.to(place, out, first)

    def _fill_part(self, part: Part, low: int, out: Tensor) -> None:
        stored, high = self.stored[part.name], low + len(out)
        if self._has_codes(part) or (part.transposed and len(out) == part.shape[0]):
            out.copy_(self.rows(part)[low:high])
        elif part.transposed and len(stored.shape) == 2:
            out.copy_(read_columns(stored, low, high).t())
        else:
            there = max(min(high, stored.shape[0]), low)
            if there > low:
                self._stream.fill(rows_of(stored, low, there), out[: there - low])
            if there < high:  # padding, or added tokens: equal on all ranks, no louder than the others
                out[there - low :] = self.rows(part).cpu().mean(0, dtype=torch.float32)

    def whole(self, place: Place, dtype: torch.dtype) -> Tensor:
        size = (sum(part.shape[0] for part in place.parts), *place.parts[0].shape[1:])
        return self.fill(place, torch.empty(size, dtype=dtype, device=self._stream.device))

    @torch.no_grad()
    def tensors(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        for place in places(self._c):
            yield place.name, self.whole(place, dtype)
