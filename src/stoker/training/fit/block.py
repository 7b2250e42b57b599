"""What one block allocates, tensor by tensor, in the order of model/fused.py and model/maps.py.

tests/memory_trace.py runs those on the meta device and counts: a change there that this does not follow fails a test.
"""

from __future__ import annotations

from collections.abc import Callable

from stoker.contract.frozen import frozen
from stoker.training.fit.memory import ACTIVATIONS, WORK, Held, Memory

PROGRAMS = 528  # of a norm's backward: each adds up its own share of the weight's gradient (model/fused_kernel.py)
HALF, WIDE = 2, 4  # bytes of bf16, of fp32


@frozen
class Layer:
    """A linear layer, as its map computes it."""

    rows: int
    inputs: int
    stored: int  # bytes of an element; 0: NF4, dequantized into the shared buffer
    learns: bool = False
    bias: bool = False
    bias_learns: bool = False
    adapted: tuple[int, ...] = ()  # rows of each part that has an adapter
    rank: int = 0

    @property
    def ranks(self) -> int:
        return self.rank * len(self.adapted)

    @property
    def copied(self) -> int:
        """Bytes of the 16-bit copy that each product makes of an fp32 weight."""
        return HALF * self.rows * self.inputs if self.stored == WIDE else 0

    @property
    def gradients(self) -> tuple[int, ...]:
        """Bytes of each gradient that it makes."""
        own = (self.stored * self.rows * self.inputs,) if self.learns else ()
        bias = (WIDE * self.rows,) if self.bias_learns else ()
        adapter = (WIDE * self.ranks * self.inputs, WIDE * sum(self.adapted) * self.rank) if self.adapted else ()
        return (*own, *bias, *adapter)

    @property
    def copies(self) -> tuple[int, ...]:
        """Bytes of the 16-bit copies that an adapter keeps: A, and B with zeros where a part meets another's A."""
        return (HALF * self.ranks * self.inputs, HALF * self.rows * self.ranks) if self.adapted else ()


@frozen
class Block:
    qkv: Layer
    out: Layer
    gate_up: Layer | None  # None: experts
    down: Layer | None
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    ff: int  # of experts: all that a token is given, together
    gated: bool = True
    plain: bool = False  # the activation is not SwiGLU: torch's own operations, in fp32
    qk_norm: bool = False
    post_norms: bool = False
    flash: bool = False  # by offsets of documents or windows: flash attention; else cuDNN's
    norm_learns: bool = False
    experts: int = 0
    experts_per_token: int = 0
    expert_copies: int = 0  # bytes of the 16-bit copies of their weights, which autograd keeps
    expert_gradients: int = 0


@frozen
class Rows:
    """What a micro-batch has."""

    tokens: int
    documents: int  # offsets of flash attention, less one


Saved = dict[str, Held]


class Forward:
    """One block's forward pass with one micro-batch. `lean`: the MLP's first product does not stay."""

    def __init__(self, memory: Memory, block: Block, rows: Rows, *, lean: bool = False) -> None:
        self.memory, self.block, self.rows, self.lean = memory, block, rows, lean
        n = rows.tokens
        self._stream = HALF * n * block.width  # one tensor as wide as the residual stream
        self._rstd = WIDE * n
        self._queries = HALF * n * block.heads * block.head_dim
        self._qkv = self._queries + 2 * HALF * n * block.kv_heads * block.head_dim
        self._wide = HALF * n * block.ff * (2 if block.gated else 1)
        self._inner = HALF * n * block.ff

    def forward(self, *, whole: bool, saves: bool) -> tuple[Saved, Held]:
        """(what stays for the backward pass, the result that is still to be added to the stream). Without `saves` nothing
        stays but the stream: local variables hold tensors until the block is done. `whole`: nothing is to be added to it."""
        m, b = self.memory, self.block
        saved: Saved = {}
        frame: list[Held] = []

        def hold(name: str, size: int, local: bool = True) -> None:
            held = m.take(ACTIVATIONS, size)
            if saves:
                saved[name] = held
            elif local:
                frame.append(held)
            else:
                m.give(held)

        if not whole:
            hold("stream", self._stream)
        normed = m.take(WORK, self._stream)
        hold("rstd", self._rstd, False)
        hold("qkv_narrow", self._narrow(b.qkv), False)
        hold("qkv", self._qkv)
        self._product(b.qkv)
        m.give(normed)
        if b.qk_norm:
            hold("turned", self._both)
            hold("turned_rstd", WIDE * self.rows.tokens * (b.heads + b.kv_heads), False)
        hold("attended", self._queries)
        hold("sums", WIDE * self.rows.tokens * b.heads, False)
        hold("out_narrow", self._narrow(b.out), False)
        branch = m.take(WORK, self._stream)
        self._product(b.out)
        if b.post_norms:
            branch = self._post_norm("attention", branch, hold, m)
        hold("middle", self._stream)  # the stream after attention
        result = self._mlp(hold, saves)
        m.give(branch)
        if b.post_norms:
            result = self._post_norm("mlp", result, hold, m)
        m.give(*frame)
        if not saves:
            saved["middle"] = m.take(ACTIVATIONS, self._stream)
        return saved, result

    @property
    def _both(self) -> int:
        """Queries and keys."""
        return (self._queries + self._qkv) // 2

    def _post_norm(self, name: str, branch: Held, hold: Callable[..., None], m: Memory) -> Held:
        """What goes into the norm is saved; what comes out goes on."""
        normed = m.take(WORK, self._stream)
        hold(f"{name}_rstd", self._rstd, False)
        m.give(branch)
        hold(f"{name}_branch", self._stream)
        return normed

    def _narrow(self, layer: Layer) -> int:
        """Bytes between the two matrices of a layer's adapters."""
        return HALF * self.rows.tokens * layer.ranks

    def _product(self, layer: Layer) -> None:
        """What a product needs beside its input and output."""
        self.memory.give(self.memory.take(WORK, layer.copied))

    def _mlp(self, hold: Callable[..., None], saves: bool) -> Held:
        """Its result."""
        m, b = self.memory, self.block
        normed = m.take(WORK, self._stream)
        hold("middle_rstd", self._rstd, False)
        if b.gate_up is None or b.down is None:
            return self._mixture(normed, hold)
        if self.lean:
            return self._lean_mlp(b.gate_up, b.down, normed, hold)
        hold("wide_narrow", self._narrow(b.gate_up), False)
        if not b.plain:
            hold("wide", self._wide)
            self._product(b.gate_up)
            m.give(normed)
            inner = m.take(WORK, self._inner)
            hold("down_narrow", self._narrow(b.down), False)
            result = m.take(WORK, self._stream)
            self._product(b.down)
            m.give(inner)
            return result
        wide = m.take(WORK, self._wide)
        self._product(b.gate_up)
        m.give(normed)
        kept_inner = self._plain(hold, saves)
        hold("down_narrow", self._narrow(b.down), False)
        result = m.take(WORK, self._stream)
        self._product(b.down)
        m.give(kept_inner, wide)
        return result

    def _lean_mlp(self, gate_up: Layer, down: Layer, normed: Held, hold: Callable[..., None]) -> Held:
        m = self.memory
        narrow, wide = m.take(WORK, self._narrow(gate_up)), m.take(WORK, self._wide)
        self._product(gate_up)
        m.give(normed, narrow)
        inner = m.take(WORK, self._inner)
        m.give(wide)
        hold("down_narrow", self._narrow(down), False)
        result = m.take(WORK, self._stream)
        self._product(down)
        m.give(inner)
        return result

    def _plain(self, hold: Callable[..., None], saves: bool) -> Held | None:
        """An activation in fp32, by torch's own operations; what of it lives until the next product is done."""
        m, b = self.memory, self.block
        in_fp32 = WIDE * self.rows.tokens * b.ff
        names = ("gate", "activated", "up") if b.gated else ("gate",)
        for name in names:
            hold(name, in_fp32, False)
        pieces = [] if saves else [m.take(WORK, in_fp32) for _ in names[1:]]
        product = m.take(WORK, in_fp32)
        m.give(*pieces)
        hold("inner", self._inner, False)
        inner = None if saves else m.take(WORK, self._inner)
        m.give(product)
        return inner

    def _mixture(self, normed: Held, hold: Callable[..., None]) -> Held:
        """Experts, in torch's own operations (model/experts.py): about what autograd keeps of them."""
        m, b, n = self.memory, self.block, self.rows.tokens
        each = n * b.experts_per_token
        m.give(normed)
        hold("normed", self._stream)
        hold("copies", b.expert_copies)
        hold("routed", n * b.experts * (WIDE + HALF) + each * 3 * 8)
        hold("sorted", HALF * each * b.width)
        in_fp32 = WIDE * n * b.ff
        wide = m.take(WORK, self._wide)
        hold("gate", in_fp32)
        if b.gated:
            hold("activated", in_fp32)
            hold("up", in_fp32)
        hold("inner", self._inner)
        m.give(wide)
        answers = m.take(WORK, 2 * HALF * each * b.width)
        hold("answers", WIDE * each * b.width)
        weighted = m.take(WORK, WIDE * each * b.width)
        result = m.take(WORK, self._stream)
        m.give(answers, weighted)
        return result
