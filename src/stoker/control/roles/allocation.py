"""The allocation grammar: `sglang.d1t1p1+d3t1p1`, `vllm:d2t2+fsdp:d4`, `sglang[rollout]:d2+fsdp[actor]:d4|fsdp[critic]:d4`. Pure.

`+` puts parts on GPUs of their own, `|` on the same ones and binds tighter. d replicas, t tensor, p pipeline, c context, e
expert parallel; a part has d x t x p x c GPUs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from stoker.contract.errors import EX_UNAVAILABLE, EX_USAGE, Refusal
from stoker.contract.frozen import frozen
from stoker.contract.options import suggest
from stoker.contract.text import escape
from stoker.contract.units import plural

SERVING = ("sglang", "vllm", "stoker")
TRAINING = ("fsdp", "ddp", "megatron")
ENGINES = (*SERVING, *TRAINING)
DIMENSIONS = {"d": "replicas", "t": "tensor", "p": "pipeline", "c": "context", "e": "expert"}
_PART = re.compile(r"(?:(?P<engine>[A-Za-z_][A-Za-z0-9_]*)(?:\[(?P<name>[^\]]*)\])?(?:[.:]|$))?(?P<sizes>.*)")
_SIZE = re.compile(r"([A-Za-z])(\d+)")
_MOST = 1 << 16


@frozen
class AllocationPart:
    engine: str  # empty: a trainer of your own
    name: str
    sizes: tuple[tuple[str, int], ...]
    group: int  # parts of one share their GPUs

    def size(self, dimension: str) -> int:
        return dict(self.sizes).get(dimension, 1)

    @property
    def serves(self) -> bool:
        return self.engine in SERVING

    @property
    def world(self) -> int:
        return math.prod(self.size(dimension) for dimension in "dtpc")

    @property
    def replicas(self) -> int:
        """Processes that are started: a server is one process for all GPUs of a replica, a trainer one for each GPU."""
        return self.size("d") if self.serves else self.world

    @property
    def gpus(self) -> int:
        """Of each of them."""
        return self.world // self.replicas

    @property
    def text(self) -> str:
        named = f"[{self.name}]" if self.name else ""
        return f"{self.engine or 'fsdp'}{named}:" + "".join(f"{d}{n}" for d, n in self.sizes)


def parse_allocation(text: str) -> tuple[AllocationPart, ...]:
    found: list[AllocationPart] = []
    pieces = [group.split("|") for group in text.strip().split("+")]
    for group, parts in enumerate(pieces):
        for part in parts:
            found.append(_part(part.strip(), text, group))
        worlds = {part.world for part in found if part.group == group}
        if len(worlds) > 1:
            sizes = " and ".join(str(part.world) for part in found if part.group == group)
            raise _wrong(text, f"parts joined by | share their GPUs, and these have {sizes}")
    names = [part.name for part in found if part.name]
    if len(set(names)) < len(names):
        raise _wrong(text, "two parts have one name")
    if len(found) > 2 and len(names) < len(found):
        raise _wrong(text, "three parts or more need names, such as fsdp[actor]:d4")
    return tuple(found)


def _part(word: str, text: str, group: int) -> AllocationPart:
    if not word:
        raise _wrong(text, "a part is empty")
    bare = re.fullmatch(r"(?:[A-Za-z]\d+)+", word)
    match = None if bare else _PART.fullmatch(word)
    engine, name, sizes = (
        ("", "", word) if match is None else (match["engine"] or "", match["name"] or "", match["sizes"])
    )
    if engine and engine not in ENGINES:
        raise _wrong(
            text, f"unknown engine {engine!r}{suggest(engine, ENGINES) or '; there are ' + ', '.join(ENGINES)}"
        )
    if match is not None and match["name"] is not None and not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]{0,39}", name):
        raise _wrong(text, f"{name!r} can't be a name")
    pairs = _SIZE.findall(sizes)
    if not pairs or "".join(f"{d}{n}" for d, n in pairs) != sizes:
        raise _wrong(text, f"{word!r} has no sizes such as d2t1")
    for dimension, number in pairs:
        if dimension not in DIMENSIONS:
            known = ", ".join(f"{d} ({word})" for d, word in DIMENSIONS.items())
            raise _wrong(text, f"unknown dimension {dimension!r}; there are {known}")
        if len(number) > 6 or not 1 <= int(number) <= _MOST:
            raise _wrong(text, f"{dimension}{number[:12]}: from 1 to {_MOST}")
    if len({d for d, _ in pairs}) < len(pairs):
        raise _wrong(text, f"{word!r} gives a dimension twice")
    part = AllocationPart(engine, name, tuple((d, int(n)) for d, n in pairs), group)
    if engine == "stoker" and part.world != part.size("d"):
        raise _wrong(text, f"stoker serves each replica on one GPU: write stoker:d{part.world}, or vllm:{sizes}")
    return part


def _wrong(text: str, why: str) -> Refusal:
    return Refusal(f"--allocation {escape(text, 200)}: {why}", EX_USAGE)


def needed(parts: Sequence[AllocationPart]) -> int:
    """GPUs of all parts together."""
    return sum({part.group: part.world for part in parts}.values())


def check(text: str, parts: Sequence[AllocationPart], gpus: int) -> None:
    """Against the usable GPUs."""
    total = needed(parts)
    if total > gpus:
        other = smaller(parts, gpus)
        held = [dict(one.sizes) | {"d": 1} for one in parts] != [dict(one.sizes) | {"d": 1} for one in _of(other)]
        advice = f"; {other} would fit{', if the model fits so few GPUs' * held}" if other else ""
        line = f"--allocation {text} needs {plural(total, 'GPU')} and {gpus} can be used{advice}"
        raise Refusal(line, EX_UNAVAILABLE, cause="gpu.too-few")


def _of(text: str) -> tuple[AllocationPart, ...]:
    return parse_allocation(text) if text else ()


def smaller(parts: Sequence[AllocationPart], gpus: int) -> str:
    """The same with fewer replicas, the trainers' first, that fits; where one of each does not fit, each on fewer GPUs. Empty:
    nothing does.
    """
    made = list(parts)
    while sum(_step(made, group) for group in _groups(made)) > gpus:
        halved = _halved(made)
        if halved is None:
            return ""
        made = halved
    while needed(made) > gpus:
        groups = sorted(_groups(made), key=lambda group: _weight(made, group), reverse=True)
        group = next((one for one in groups if _world(made, one) > _step(made, one)), None)
        if group is None:
            return ""
        made = _grown(made, group, -1)
    for group in sorted(_groups(made), key=lambda group: _weight(made, group), reverse=True):
        while _world(made, group) < _world(parts, group) and needed(grown := _grown(made, group, 1)) <= gpus:
            made = grown
    by_group: dict[int, list[str]] = {}
    for part in made:
        by_group.setdefault(part.group, []).append(part.text)
    return "+".join("|".join(texts) for texts in by_group.values())


def _halved(parts: Sequence[AllocationPart]) -> list[AllocationPart] | None:
    """The replicas that have the most GPUs, with half of them: fewer pipeline stages, context shares, tensor shares."""
    group = max(_groups(parts), key=lambda one: _step(parts, one))
    made = []
    for part in parts:
        dimension = next((one for one in "pct" if part.size(one) % 2 == 0), "")
        if part.group == group and not dimension:
            return None
        made.append(_with(part, dimension, part.size(dimension) // 2) if part.group == group else part)
    return made


def _grown(parts: Sequence[AllocationPart], group: int, steps: int) -> list[AllocationPart]:
    world = _world(parts, group) + steps * _step(parts, group)
    return [_with(part, "d", world // _each(part)) if part.group == group else part for part in parts]


def _groups(parts: Sequence[AllocationPart]) -> list[int]:
    return sorted({part.group for part in parts})


def _each(part: AllocationPart) -> int:
    """GPUs of one replica, d."""
    return part.world // part.size("d")


def _world(parts: Sequence[AllocationPart], group: int) -> int:
    return next(part.world for part in parts if part.group == group)


def _step(parts: Sequence[AllocationPart], group: int) -> int:
    """By so many GPUs a group can shrink: parts that share them keep whole replicas."""
    return math.lcm(*(_each(part) for part in parts if part.group == group))


def _weight(parts: Sequence[AllocationPart], group: int) -> tuple[bool, int]:
    mine = [part for part in parts if part.group == group]
    return not mine[0].serves, mine[0].world


def _with(part: AllocationPart, dimension: str, size: int) -> AllocationPart:
    sizes = tuple((d, size if d == dimension else n) for d, n in part.sizes)
    return AllocationPart(part.engine, part.name, sizes, part.group)
