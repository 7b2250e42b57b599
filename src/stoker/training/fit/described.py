"""A model as its memory sees it: what is stored in how many bits, what learns, what each block computes with."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property

from stoker.contract.frozen import frozen
from stoker.training.fit.block import HALF, WIDE, Block, Layer
from stoker.training.fit.memory import ADAPTERS, WEIGHTS, rounded
from stoker.training.model.config import OFF, QLORA, AdapterConfig, ModelConfig, gate_up_rows, tensors
from stoker.training.model.nf4_size import SECOND_BLOCK, storable, tensor_bytes
from stoker.training.model.targets import Target, extra, targets
from stoker.training.optim.config import blocks_of

_QUANTIZED = ("attention.qkv.weight", "attention.out.weight", "mlp.gate_up.weight", "mlp.down.weight")
KIND_ADAMW, KIND_8BIT, KIND_MUON = "adamw", "adamw8bit", "muon"


@frozen
class Learned:
    """A tensor that learns."""

    elements: int
    matrix: bool
    inside: bool  # of a block: Muon's
    shapes: tuple[tuple[int, ...], ...]  # of the maps joined in it


@frozen
class Described:
    config: ModelConfig
    adapter: AdapterConfig
    held: dict[str, int]  # bytes of weights and adapters
    learned: tuple[Learned, ...]
    blocks: tuple[Block, ...]  # kinds of them
    kinds: tuple[int, ...]  # of each layer, which
    embedding: int  # bytes of an element
    embedding_learns: bool
    head: int
    head_learns: bool
    dequantized: int  # bytes of the largest matrix that is dequantized
    stored: dict[str, int]  # bytes of an element of each tensor; 0: NF4

    @cached_property
    def _alike(self) -> Counter[Learned]:
        """Layers repeat each other: a plan asks hundreds of times what they take together."""
        return Counter(self.learned)

    @cached_property
    def gradients(self) -> int:
        return sum(many * rounded(WIDE * one.elements) for one, many in self._alike.items())

    @cached_property
    def adapted(self) -> tuple[Target, ...]:
        """The layers with adapters."""
        return () if self.adapter.method == OFF else tuple(targets(self.config, self.adapter))

    @property
    def can_be_on_host(self) -> bool:
        """The embedding: it does not learn, and is not the head, which every step needs whole."""
        return not self.embedding_learns and not self.config.tied

    @property
    def trained(self) -> int:
        return sum(one.elements for one in self.learned)

    def optimizer(self, kind: str) -> int:
        return sum(many * _states(one, kind) for one, many in self._alike.items())


def _states(one: Learned, kind: str) -> int:
    if kind == KIND_8BIT and one.matrix:
        numbers = one.shapes[0][-1]
        count, size = blocks_of(numbers)
        blocks = one.elements // numbers * count
        return 2 * rounded(blocks * size) + 2 * rounded(WIDE * blocks)
    if kind == KIND_MUON and one.matrix and one.inside:
        return rounded(WIDE * one.elements)
    return 2 * rounded(WIDE * one.elements) + rounded(WIDE)  # two moments and a count


def describe(c: ModelConfig, adapter: AdapterConfig) -> Described:
    whole = adapter.method == OFF
    extras = set() if whole else set(extra(c, adapter))
    beside = {} if whole else {target.name: target for target in targets(c, adapter)}
    held = {WEIGHTS: 0, ADAPTERS: 0}
    learned: list[Learned] = []
    layers: dict[str, Layer] = {}
    stored: dict[str, tuple[int, bool]] = {}
    biased = {name.removesuffix(".bias") for name, _ in tensors(c) if name.endswith(".bias")}
    for name, sizes in tensors(c):
        elements, matrix = sum(map(math.prod, sizes)), len(sizes[0]) == 2
        learns = whole or name in extras
        codes = adapter.method == QLORA and not learns and name.endswith(_QUANTIZED) and all(map(storable, sizes))
        width = HALF if matrix and not learns else WIDE
        if codes:
            width = 0
            held[WEIGHTS] += _codes([math.prod(part) for part in sizes])
        else:
            held[WEIGHTS] += rounded(width * elements)
        if learns:
            learned.append(Learned(elements, matrix, name.startswith("layers."), sizes))
        stored[name] = width, learns
        if matrix and name.endswith(_QUANTIZED):
            own = name.removesuffix(".weight")
            layers[own] = _layer(sizes, width, learns, beside.get(own), adapter, own in biased, whole)
    for target in beside.values():
        for elements, size in _adapters(target, adapter.lora_rank):
            held[ADAPTERS] += rounded(WIDE * elements)
            learned.append(Learned(elements, True, True, (size,)))
    for layer in layers.values():
        held[ADAPTERS] += sum(map(rounded, layer.copies))
    embedding, embedding_learns = stored["embed.weight"]
    head, head_learns = stored.get("head.weight", (embedding, embedding_learns))
    largest = max((HALF * one.rows * one.inputs for one in layers.values() if not one.stored), default=0)
    each = list(_blocks(c, layers, whole))
    blocks = tuple(dict.fromkeys(each))
    places = {block: place for place, block in enumerate(blocks)}
    return Described(
        c, adapter, held, tuple(learned), blocks, tuple(places[block] for block in each), embedding, embedding_learns, head,
        head_learns, largest, {name: width for name, (width, _) in stored.items()},
    )  # fmt: skip


def _codes(parts: Sequence[int]) -> int:
    """Bytes of a layer in NF4: its parts are joined where their blocks of scales end with them (model/nf4.py)."""
    each = [tensor_bytes(elements) for elements in parts]
    whole = all(scales % SECOND_BLOCK == 0 for _, scales, _, _ in each)
    joined = [tuple(map(sum, zip(*each, strict=True)))] if whole else each
    # The last of each four is the mean of a part's scales: it is kept by part, and once for each of their own scales.
    return sum(rounded(a) + rounded(b) + 2 * rounded(c) for a, b, c, _ in joined) + len(each) * rounded(4)


def _layer(
    sizes: Sequence[tuple[int, ...]], width: int, learns: bool, target: Target | None, adapter: AdapterConfig, bias: bool,
    whole: bool,
) -> Layer:  # fmt: skip
    parts = () if target is None else tuple(end - begin for begin, end in target.parts())
    rows = sum(size[0] for size in sizes)
    return Layer(rows, sizes[0][1], width, learns, bias, bias and whole, parts, adapter.lora_rank if parts else 0)


def _adapters(target: Target, rank: int) -> Iterator[tuple[int, tuple[int, int]]]:
    """Elements and shape of each tensor of a layer's adapter."""
    parts = target.parts()
    yield rank * len(parts) * target.inputs, (rank * len(parts), target.inputs)
    rows = sum(end - begin for begin, end in parts)
    yield rows * rank, (rows, rank)


def _blocks(c: ModelConfig, layers: dict[str, Layer], whole: bool) -> Iterator[Block]:
    plain = (c.activation, c.gated, c.mlp_bias) != ("silu", True, False)
    gates = len(gate_up_rows(c, 1))
    for at in range(c.layers):
        routed = c.routed(at)
        experts = c.experts * c.expert_ff * c.dim * (gates + 1) if routed else 0
        yield Block(
            layers[f"layers.{at}.attention.qkv"], layers[f"layers.{at}.attention.out"],
            layers.get(f"layers.{at}.mlp.gate_up"), layers.get(f"layers.{at}.mlp.down"),
            c.dim, c.heads, c.kv_heads, c.head_dim, c.expert_ff * c.experts_per_token if routed else c.ff,
            gated=c.gated, plain=plain, qk_norm=c.qk_norm, post_norms=c.norms == "both", flash=False, norm_learns=whole,
            experts=c.experts if routed else 0, experts_per_token=c.experts_per_token if routed else 0,
            expert_copies=HALF * experts if whole else 0, expert_gradients=WIDE * experts if whole else 0,
        )  # fmt: skip
