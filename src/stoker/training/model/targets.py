"""Which layers of a model get adapters, by the names in its folder, and what they take. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from stoker.contract.errors import EX_CONFIG, Refusal
from stoker.contract.frozen import frozen
from stoker.contract.options import suggest
from stoker.training.model.config import EVERY, AdapterConfig, ModelConfig, tensors
from stoker.training.model.families import family_of

_LAYERS = ("attention.qkv", "attention.out", "mlp.gate_up", "mlp.down")  # of a block, that may have one


@frozen
class Target:
    name: str  # ours: layers.3.attention.qkv
    inputs: int
    rows: tuple[int, ...]  # of the maps that the folder stores apart
    theirs: tuple[str, ...]  # their names, without .weight
    chosen: tuple[bool, ...]  # which of them get an adapter

    def parts(self) -> list[tuple[int, int]]:
        """(first row, row behind the last) of those that get one."""
        ends = [sum(self.rows[: place + 1]) for place in range(len(self.rows))]
        return [(end - rows, end) for end, rows, yes in zip(ends, self.rows, self.chosen, strict=True) if yes]

    @property
    def names(self) -> list[str]:
        return [name for name, yes in zip(self.theirs, self.chosen, strict=True) if yes]


def linears(c: ModelConfig) -> Iterator[Target]:
    """Every linear layer inside the blocks, none chosen. Experts are stacked, and none of these."""
    family = family_of(c)
    for name, sizes in tensors(c):
        layer = name.removesuffix(".weight")
        if not layer.endswith(_LAYERS) or not name.endswith(".weight"):
            continue
        theirs = tuple(one.removesuffix(".weight") for one in family.tensor(name, c))
        rows = tuple(size[0] for size in sizes)
        if len(theirs) != len(rows):
            rows = (sum(rows),)
        yield Target(layer, sizes[0][1], rows, theirs, (False,) * len(theirs))


def targets(c: ModelConfig, told: AdapterConfig) -> list[Target]:
    """The layers that get adapters."""
    every = list(linears(c))
    wanted = [one.strip() for one in told.lora_targets.split(",") if one.strip()]
    known = sorted({name.rsplit(".", 1)[-1] for target in every for name in target.theirs})
    whole = set(wanted) == {EVERY}
    if EVERY in wanted and not whole:
        raise Refusal(f"adapter.lora_targets: {EVERY} names every layer already; give it alone", EX_CONFIG)
    there = {end for target in every for theirs in target.theirs for end in _ends(theirs)}
    for name in wanted if not whole else ():
        if name not in there:
            near = suggest(name, [*known, EVERY])
            raise Refusal(
                f"adapter.lora_targets {name}: no linear layer of this model is called that{near or '; there are ' + ', '.join(known)}",
                EX_CONFIG,
            )
    if not wanted:
        raise Refusal(f"adapter.lora_targets is empty: name layers ({', '.join(known)}), or {EVERY}", EX_CONFIG)
    found, names = [], set(wanted)
    for target in every:
        chosen = tuple(whole or not names.isdisjoint(_ends(theirs)) for theirs in target.theirs)
        if any(chosen):
            found.append(Target(target.name, target.inputs, target.rows, target.theirs, chosen))
    return found


def _ends(theirs: str) -> Iterator[str]:
    """What names it, as peft decides: the whole name, or its end after a dot."""
    yield theirs
    at = theirs.find(".")
    while at >= 0:
        yield theirs[at + 1 :]
        at = theirs.find(".", at + 1)


def extra(c: ModelConfig, told: AdapterConfig) -> list[str]:
    """Our names of parameters that learn besides."""
    wanted = [one.strip() for one in told.also_train.split(",") if one.strip()]
    family = family_of(c)
    if not wanted:
        return []
    called: dict[str, dict[str, None]] = {}  # what names them -> ours, in order
    for ours, _ in tensors(c):
        for theirs in family.tensor(ours, c):
            for end in _ends(theirs.rpartition(".")[0]):
                called.setdefault(end, {})[ours] = None
    chosen: dict[str, None] = {}
    for name in wanted:
        if name not in called:
            near = suggest(name, sorted({end for end in called if "." not in end}))
            raise Refusal(f"adapter.also_train {name}: nothing in this model is called that{near}", EX_CONFIG)
        chosen |= called[name]
    return list(chosen)


def adapter_parameters(c: ModelConfig, told: AdapterConfig) -> int:
    """Numbers in all adapters."""
    return sum(
        told.lora_rank * (target.inputs + end - begin) for target in targets(c, told) for begin, end in target.parts()
    )
