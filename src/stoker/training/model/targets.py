"""Which layers of a model get adapters, by the names in its folder, and what they take. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from stoker.contract.names import EX_CONFIG, Refusal
from stoker.contract.settings import suggest
from stoker.contract.shape import shape
from stoker.training.model.config import EVERY, AdapterConfig, ModelConfig, tensors
from stoker.training.model.families import family_of

_LAYERS = ("attention.qkv", "attention.out", "mlp.gate_up", "mlp.down")  # of a block, that may have one


@shape
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
    whole = wanted == [EVERY]
    for name in wanted if not whole else ():
        if not any(_meant(name, theirs) for target in every for theirs in target.theirs):
            near = suggest(name, [*known, EVERY])
            raise Refusal(
                f"adapter.lora_targets {name}: no linear layer of this model is called that{near or '; there are ' + ', '.join(known)}",
                EX_CONFIG,
            )
    if not wanted:
        raise Refusal(f"adapter.lora_targets is empty: name layers ({', '.join(known)}), or {EVERY}", EX_CONFIG)
    found = []
    for target in every:
        chosen = tuple(whole or any(_meant(name, theirs) for name in wanted) for theirs in target.theirs)
        if any(chosen):
            found.append(Target(target.name, target.inputs, target.rows, target.theirs, chosen))
    return found


def _meant(name: str, theirs: str) -> bool:
    """As peft decides: the name, or its end after a dot."""
    return theirs == name or theirs.endswith("." + name)


def extra(c: ModelConfig, told: AdapterConfig) -> list[str]:
    """Our names of parameters that learn besides."""
    wanted = [one.strip() for one in told.also_train.split(",") if one.strip()]
    family = family_of(c)
    theirs = {name: [one.rpartition(".")[0] for one in family.tensor(name, c)] for name, _ in tensors(c)}
    chosen: list[str] = []
    for name in wanted:
        mine = [ours for ours, names in theirs.items() if any(_meant(name, one) for one in names)]
        if not mine:
            near = suggest(name, sorted({one.rsplit(".", 1)[-1] for names in theirs.values() for one in names}))
            raise Refusal(f"adapter.also_train {name}: nothing in this model is called that{near}", EX_CONFIG)
        chosen += [one for one in mine if one not in chosen]
    return chosen


def adapter_parameters(c: ModelConfig, told: AdapterConfig) -> int:
    """Numbers in all adapters."""
    return sum(
        told.lora_rank * (target.inputs + end - begin) for target in targets(c, told) for begin, end in target.parts()
    )
