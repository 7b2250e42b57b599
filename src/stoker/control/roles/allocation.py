"""Parses allocations: `sglang.d1t1p1+d3t1p1`, `vllm:d2t2+fsdp:d4`, `sglang[rollout]:d2+fsdp[actor]:d4|fsdp[critic]:d4`. Pure.

`+` puts parts on separate GPUs, `|` on the same ones; `|` binds tighter. Sizes: d replicas, t tensor, p pipeline,
c context, e expert parallel. A part has d x t x p x c GPUs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from stoker.contract.errors import EX_UNAVAILABLE, EX_USAGE, Refusal
from stoker.contract.frozen import frozen, replace
from stoker.contract.options import suggest
from stoker.contract.text import escape
from stoker.contract.units import plural

SERVING = ("sglang", "vllm", "stoker")
TRAINING = ("fsdp", "ddp", "megatron")
ENGINES = (*SERVING, *TRAINING)
DIMENSIONS = {"d": "replicas", "t": "tensor", "p": "pipeline", "c": "context", "e": "expert"}
_PART = re.compile(r"(?:(?P<engine>[A-Za-z_][A-Za-z0-9_]*)(?:\[(?P<name>[^\]]*)\])?(?:[.:]|$))?(?P<sizes>.*)")
_SIZE = re.compile(r"([A-Za-z])(\d+)")
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,39}")
_MAX_SIZE = 1 << 16


@frozen
class AllocationPart:
    """One engine of an allocation. Parts of one group share their GPUs."""

    engine: str  # "" for a trainer of the user
    name: str
    sizes: tuple[tuple[str, int], ...]
    group: int

    def size(self, dimension: str) -> int:
        return dict(self.sizes).get(dimension, 1)

    @property
    def is_server(self) -> bool:
        return self.engine in SERVING

    @property
    def gpu_count(self) -> int:
        """The number of its GPUs."""
        return math.prod(self.size(dimension) for dimension in "dtpc")

    @property
    def replicas(self) -> int:
        """The number of its processes: a server has one for all GPUs of a replica, a trainer one for each GPU."""
        return self.size("d") if self.is_server else self.gpu_count

    @property
    def gpus_per_process(self) -> int:
        """The number of GPUs of each process."""
        return self.gpu_count // self.replicas

    @property
    def gpus_per_d(self) -> int:
        """The number of GPUs of each of the d replicas."""
        return self.gpu_count // self.size("d")

    @property
    def text(self) -> str:
        name = f"[{self.name}]" if self.name else ""
        return f"{self.engine or 'fsdp'}{name}:" + "".join(f"{dimension}{size}" for dimension, size in self.sizes)

    def resize(self, dimension: str, size: int) -> AllocationPart:
        sizes = tuple((other, size if other == dimension else old) for other, old in self.sizes)
        return replace(self, sizes=sizes)


def parse_allocation(text: str) -> tuple[AllocationPart, ...]:
    parts: list[AllocationPart] = []
    for group, group_text in enumerate(text.strip().split("+")):
        group_parts = [_parse_part(part_text.strip(), text, group) for part_text in group_text.split("|")]
        if len({part.gpu_count for part in group_parts}) > 1:
            sizes = " and ".join(str(part.gpu_count) for part in group_parts)
            raise _refusal(text, f"parts joined by | share GPUs and must have equally many, got {sizes}")
        parts += group_parts
    names = [part.name for part in parts if part.name]
    if len(set(names)) < len(names):
        raise _refusal(text, "two parts have the same name")
    if len(parts) > 2 and len(names) < len(parts):
        raise _refusal(text, "three parts or more need names, such as fsdp[actor]:d4")
    return tuple(parts)


def _parse_part(part_text: str, text: str, group: int) -> AllocationPart:
    """Parse a part of the allocation `text`."""
    if not part_text:
        raise _refusal(text, "a part is empty")
    engine, name, sizes_text = "", "", part_text
    match = None if re.fullmatch(r"(?:[A-Za-z]\d+)+", part_text) else _PART.fullmatch(part_text)
    if match is not None:
        engine, name, sizes_text = match["engine"] or "", match["name"] or "", match["sizes"]
    if engine and engine not in ENGINES:
        hint = suggest(engine, ENGINES) or f"; there are {', '.join(ENGINES)}"
        raise _refusal(text, f"unknown engine {engine!r}{hint}")
    if match is not None and match["name"] is not None and not _NAME.fullmatch(name):
        raise _refusal(text, f"{name!r} is not a valid name")
    sizes = _SIZE.findall(sizes_text)
    if not sizes or "".join(f"{dimension}{size}" for dimension, size in sizes) != sizes_text:
        raise _refusal(text, f"{part_text!r} has no sizes such as d2t1")
    for dimension, size in sizes:
        if dimension not in DIMENSIONS:
            known = ", ".join(f"{letter} ({meaning})" for letter, meaning in DIMENSIONS.items())
            raise _refusal(text, f"unknown dimension {dimension!r}; there are {known}")
        if len(size) > 6 or not 1 <= int(size) <= _MAX_SIZE:
            raise _refusal(text, f"{dimension} must be from 1 to {_MAX_SIZE}, got {size[:12]}")
    if len({dimension for dimension, _ in sizes}) < len(sizes):
        raise _refusal(text, f"{part_text!r} gives a dimension twice")
    part = AllocationPart(engine, name, tuple((dimension, int(size)) for dimension, size in sizes), group)
    if engine == "stoker" and part.gpu_count != part.size("d"):
        line = f"stoker serves each replica on one GPU: write stoker:d{part.gpu_count}, or vllm:{sizes_text}"
        raise _refusal(text, line)
    return part


def _refusal(text: str, problem: str) -> Refusal:
    return Refusal(f"--allocation {escape(text, 200)}: {problem}", EX_USAGE)


# ---- fitting an allocation to the GPUs ----


def count_gpus(parts: Sequence[AllocationPart]) -> int:
    """Return the number of GPUs of all parts together."""
    return sum({part.group: part.gpu_count for part in parts}.values())


def check_fit(text: str, parts: Sequence[AllocationPart], gpus: int) -> None:
    """Refuse an allocation that needs more than the usable GPUs, and name a smaller one."""
    total = count_gpus(parts)
    if total <= gpus:
        return
    advice = ""
    smaller_parts = shrink(parts, gpus)
    if smaller_parts is not None:
        advice = f"; {_format(smaller_parts)} would fit"
        if [part.resize("d", 1).sizes for part in smaller_parts] != [part.resize("d", 1).sizes for part in parts]:
            advice += ", if the model fits on so few GPUs"  # a replica has fewer GPUs than before
    line = f"--allocation {text} needs {plural(total, 'GPU')}, but {gpus} can be used{advice}"
    raise Refusal(line, EX_UNAVAILABLE, cause="gpu.too-few")


def _format(parts: Sequence[AllocationPart]) -> str:
    by_group: dict[int, list[str]] = {}
    for part in parts:
        by_group.setdefault(part.group, []).append(part.text)
    return "+".join("|".join(texts) for texts in by_group.values())


def shrink(parts: Sequence[AllocationPart], gpus: int) -> list[AllocationPart] | None:
    """Return the same parts with fewer replicas, the trainers' first, so that they fit, or None if nothing fits.

    If one replica of each does not fit, the largest replicas are halved.
    """
    shrunk = list(parts)
    while sum(_compute_group_step(shrunk, group) for group in _list_groups(shrunk)) > gpus:
        halved = _halve_largest(shrunk)
        if halved is None:
            return None
        shrunk = halved
    while count_gpus(shrunk) > gpus:
        groups = (
            group
            for group in _sort_groups_by_weight(shrunk)
            if _count_group_gpus(shrunk, group) > _compute_group_step(shrunk, group)
        )
        group = next(groups, None)
        if group is None:
            return None
        shrunk = _resize_group(shrunk, group, -1)
    for group in _sort_groups_by_weight(shrunk):
        while _count_group_gpus(shrunk, group) < _count_group_gpus(parts, group):
            grown = _resize_group(shrunk, group, 1)
            if count_gpus(grown) > gpus:
                break
            shrunk = grown
    return shrunk


def _halve_largest(parts: Sequence[AllocationPart]) -> list[AllocationPart] | None:
    """Halve the GPUs of the largest replicas: pipeline stages first, then context and tensor shares. Returns None if it can't."""
    group = max(_list_groups(parts), key=lambda number: _compute_group_step(parts, number))
    halved = []
    for part in parts:
        if part.group == group:
            dimension = next((letter for letter in "pct" if part.size(letter) % 2 == 0), "")
            if not dimension:
                return None
            part = part.resize(dimension, part.size(dimension) // 2)
        halved.append(part)
    return halved


def _resize_group(parts: Sequence[AllocationPart], group: int, steps: int) -> list[AllocationPart]:
    world = _count_group_gpus(parts, group) + steps * _compute_group_step(parts, group)
    return [part.resize("d", world // part.gpus_per_d) if part.group == group else part for part in parts]


def _list_groups(parts: Sequence[AllocationPart]) -> list[int]:
    return sorted({part.group for part in parts})


def _sort_groups_by_weight(parts: Sequence[AllocationPart]) -> list[int]:
    """Return the groups, those of trainers first and then the larger ones."""

    def weight(group: int) -> tuple[bool, int]:
        first = next(part for part in parts if part.group == group)
        return not first.is_server, first.gpu_count

    return sorted(_list_groups(parts), key=weight, reverse=True)


def _count_group_gpus(parts: Sequence[AllocationPart], group: int) -> int:
    return next(part.gpu_count for part in parts if part.group == group)


def _compute_group_step(parts: Sequence[AllocationPart], group: int) -> int:
    """Return by how many GPUs a group can shrink: parts that share them keep whole replicas."""
    return math.lcm(*(part.gpus_per_d for part in parts if part.group == group))
