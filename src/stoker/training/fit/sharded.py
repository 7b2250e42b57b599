"""What a rank of a model in shards (FSDP2) holds besides its shard. Pure.

Weights are gathered in units: blocks, the embedding, the head; what is left (the last norm, an embedding that is the head)
stays gathered from the first block to the end of the backward pass. Two units' weights are there at a time: the one that
computes, and the buffer of its own gather (forward) or of the next unit's (backward). A unit's gradients are reduced from
one fp32 buffer, which lives until the next unit's are.
"""

from __future__ import annotations

import math
from functools import cache

from stoker.contract.frozen import frozen, replace
from stoker.training.fit.block import HALF, WIDE, Block, Layer
from stoker.training.fit.described import Described
from stoker.training.fit.memory import GATHERED, GRADIENTS, rounded
from stoker.training.model.config import OFF, tensors
from stoker.training.model.nf4_size import stored_bytes
from stoker.training.parallel.config import EVERYTHING, NOTHING

UNITS = 2  # of weights, gathered at a time
GATHERS = 2  # of each weight, with each micro-batch: forward and backward


@frozen
class Gathered:
    """Bytes."""

    root: int  # of weights that stay
    block: int  # of the largest block's
    head: int  # of a head that is no embedding
    exchanged: int  # of the largest unit's gradients, as they are reduced
    embedding: int  # of the embedding's, the same
    waiting: int  # of the gradient that an embedding has as the head, while blocks go backward

    def every(self, layers: int) -> int:
        """Of all weights, once."""
        return self.root + 2 * self.head + layers * self.block

    def forward(self) -> dict[str, int]:
        return {GATHERED: self.root + UNITS * self.block}

    def backward(self) -> dict[str, int]:
        return {**self.forward(), GRADIENTS: self.exchanged + self.waiting}

    @property
    def loss(self) -> int:
        """What the head has more than a block."""
        return max(UNITS * (self.head - self.block), 0)


def gathered(d: Described) -> Gathered:
    c, whole = d.config, d.adapter.method == OFF
    weights, learned = dict[str, int](), dict[str, int]()  # of each unit

    def unit(name: str) -> str:
        if name.startswith("layers."):
            return name.split(".")[1]
        return name if not c.tied and name in ("embed.weight", "head.weight") else ""

    def count(name: str, size: int, learns: int) -> None:
        weights[unit(name)] = weights.get(unit(name), 0) + size
        learned[unit(name)] = learned.get(unit(name), 0) + learns

    for name, sizes in tensors(c):
        elements, width = sum(map(math.prod, sizes)), d.stored[name]
        if width == 0:
            count(name, sum(stored_bytes(math.prod(size)) for size in sizes), 0)
        else:
            count(name, elements * (HALF if whole else width), elements if whole else 0)
    for target in d.adapted:
        rows = sum(end - begin for begin, end in target.parts())
        elements = d.adapter.lora_rank * (len(target.parts()) * target.inputs + rows)
        count(target.name, WIDE * elements, elements)
    table = c.vocab_size * c.dim
    if d.head_learns and not whole:  # adapter.also_train
        learned[unit("head.weight")] += table
    return Gathered(
        weights.get("", 0), max(weights[str(at)] for at in range(c.layers)), weights.get("head.weight", 0),
        WIDE * max(size for name, size in learned.items() if name), WIDE * table if d.embedding_learns else 0,
        HALF * table if c.tied and d.head_learns else 0,
    )  # fmt: skip


def sent(d: Described) -> int:
    """Bytes of all weights and gradients that go around with a micro-batch."""
    return GATHERS * gathered(d).every(d.config.layers) + WIDE * d.trained


def fetched(d: Described, shards: int, offload: str) -> int:
    """Bytes that a rank brings from host memory with a micro-batch: its shards, as they are stored."""
    return GATHERS * -(-sum(d.held.values()) // shards) if offload == EVERYTHING else 0


def visiting(d: Described, optimizer: str, shards: int, offload: str) -> int:
    """Bytes that go to the device and back for an update: moments, and with weights on the host those and their gradients."""
    if offload == NOTHING:
        return 0
    weights = WIDE * d.trained * 3 // 2 if offload == EVERYTHING else 0  # gradients one way only
    return -(-(d.optimizer(optimizer) + weights) // shards)


def kept_copies(d: Described) -> int:
    """Bytes of adapters' 16-bit copies, which every rank has of all blocks."""
    layers = ((block.qkv, block.out, block.gate_up, block.down) for block in d.blocks)
    each = [sum(rounded(size) for one in some if one is not None for size in one.copies) for some in layers]
    return sum(each[kind] for kind in d.kinds)


@cache
def _as_gathered(block: Block) -> Block:
    def layer(one: Layer | None) -> Layer | None:
        return None if one is None else replace(one, stored=min(one.stored, HALF))

    qkv, out = layer(block.qkv), layer(block.out)
    assert qkv is not None and out is not None
    return replace(block, qkv=qkv, out=out, gate_up=layer(block.gate_up), down=layer(block.down), expert_copies=0)


def as_computed(d: Described) -> Described:
    """With weights as blocks see them: gathered in 16 bits, where all of them learn."""
    if d.adapter.method != OFF:
        return d
    return replace(d, blocks=tuple(map(_as_gathered, d.blocks)), embedding=HALF, head=HALF)
