"""What one block allocates, tensor by tensor, in the order of model/fused.py and model/maps.py.

tests/memory_trace.py runs those on the meta device and counts: a change there that this does not follow fails a test.
"""

from __future__ import annotations

from collections.abc import Callable

from stoker.contract.shape import shape
from stoker.training.fit.memory import ACTIVATIONS, GRADIENTS, WORK, Held, Memory

PROGRAMS = 528  # of a norm's backward: each adds up its own share of the weight's gradient (model/fused_kernel.py)
HALF, WIDE = 2, 4  # bytes of bf16, of fp32


@shape
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
        own = (WIDE * self.rows * self.inputs,) if self.learns else ()
        bias = (WIDE * self.rows,) if self.bias_learns else ()
        a = (WIDE * self.ranks * self.inputs,) if self.adapted else ()
        return (*own, *bias, *a, *(WIDE * rows * self.rank for rows in self.adapted))


@shape
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


@shape
class Rows:
    """What a micro-batch has."""

    tokens: int
    documents: int  # offsets of flash attention, less one


Saved = dict[str, Held]


class Walk:
    """One block's passes with one micro-batch. `steals`: gradients stay where they were made, as the first ones of a step
    do; else they are added to those that are there."""

    def __init__(self, memory: Memory, block: Block, rows: Rows, *, steals: bool) -> None:
        self.memory, self.block, self.rows, self._steals = memory, block, rows, steals
        n = rows.tokens
        self._stream = HALF * n * block.width  # one tensor as wide as the residual stream
        self._rstd = WIDE * n
        self._queries = HALF * n * block.heads * block.head_dim
        self._qkv = self._queries + 2 * HALF * n * block.kv_heads * block.head_dim
        self._wide = HALF * n * block.ff * (2 if block.gated else 1)
        self._inner = HALF * n * block.ff

    def forward(self, *, first: bool, saves: bool) -> tuple[Saved, Held]:
        """(what stays for the backward pass, the result that is still to be added to the stream). Without `saves` nothing
        stays but the stream: local variables hold tensors until the block is done. `first`: nothing is to be added."""
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

        if not first:
            hold("stream", self._stream)
        normed = m.take(WORK, self._stream)
        hold("rstd", self._rstd, False)
        hold("qkv", self._qkv)
        self._product(b.qkv)
        m.give(normed)
        if b.qk_norm:
            hold("turned", self._both)
            hold("turned_rstd", WIDE * self.rows.tokens * (b.heads + b.kv_heads), False)
        hold("attended", self._queries)
        hold("sums", WIDE * self.rows.tokens * b.heads, False)
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

    def _product(self, layer: Layer) -> None:
        """What a product needs beside its input and output."""
        m, n = self.memory, self.rows.tokens
        copied = m.take(WORK, layer.copied)
        if layer.adapted:
            narrow = [m.take(WORK, HALF * layer.ranks * layer.inputs)]  # A in 16 bits
            narrow += [m.take(WORK, HALF * n * layer.ranks) for _ in range(2)]
            m.give(*narrow)
        m.give(copied)

    def _mlp(self, hold: Callable[..., None], saves: bool) -> Held:
        """Its result."""
        m, b = self.memory, self.block
        normed = m.take(WORK, self._stream)
        hold("middle_rstd", self._rstd, False)
        if b.gate_up is None or b.down is None:
            return self._mixture(normed, hold)
        if not b.plain:
            hold("wide", self._wide)
            self._product(b.gate_up)
            m.give(normed)
            inner = m.take(WORK, self._inner)
            result = m.take(WORK, self._stream)
            self._product(b.down)
            m.give(inner)
            return result
        wide = m.take(WORK, self._wide)
        self._product(b.gate_up)
        m.give(normed)
        kept_inner = self._plain(hold, saves)
        result = m.take(WORK, self._stream)
        self._product(b.down)
        m.give(kept_inner, wide)
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

    def again(self, *, first: bool) -> Saved:
        """The forward pass once more, in the backward pass."""
        saved, result = self.forward(first=first, saves=True)
        self.memory.give(result)
        return saved

    def backward(self, saved: Saved, gradient: Held) -> Held:
        """The gradient of the stream before the block, in place of that of the stream behind it."""
        m, b = self.memory, self.block
        inner_gradient = gradient
        if b.post_norms:
            inner_gradient = self._norm_backward(saved, "mlp")
        wide = self._mlp_backward(saved, inner_gradient, gradient)
        gradient = self._into_stream(saved, "middle", b.gate_up, wide, gradient)
        branch = gradient
        if b.post_norms:
            branch = self._norm_backward(saved, "attention")
        attended = m.take(WORK, self._queries)
        made = self._back(b.out)
        self._learned(b.out)
        m.give(*made)
        if branch is not gradient:
            m.give(branch)
        pieces = self._attention_backward(saved, attended)
        if b.qk_norm:
            pieces = self._turn_back(saved, pieces)
        else:
            joined = m.take(WORK, self._qkv)
            pieces = [*pieces, joined]
        return self._into_stream(saved, "stream", b.qkv, pieces, gradient)

    def _mlp_backward(self, saved: Saved, g: Held, onward: Held) -> list[Held]:
        """The gradient of what the norm before the MLP made of the stream."""
        m, b = self.memory, self.block
        if b.gate_up is None or b.down is None:
            return self._mixture_backward(saved)
        inner = m.take(WORK, self._inner)
        made = self._back(b.down)
        if b.plain:
            self._learned(b.down)
            m.give(*made, saved.pop("inner"))
            wide = self._plain_backward(saved, inner)
        else:
            wide, again = m.take(WORK, self._wide), m.take(WORK, self._inner)
            self._learned(b.down)
            m.give(inner, again, *made, saved.pop("wide"))
        if g is not onward:
            m.give(g)
        return [wide]

    def _plain_backward(self, saved: Saved, inner: Held) -> Held:
        m, b = self.memory, self.block
        in_fp32 = WIDE * self.rows.tokens * b.ff
        product = m.take(WORK, in_fp32)
        m.give(inner)
        if not b.gated:
            activated = m.take(WORK, in_fp32)
            m.give(product, saved.pop("gate"))
            wide = m.take(WORK, self._wide)
            m.give(activated)
            return wide
        gate, up = m.take(WORK, in_fp32), m.take(WORK, in_fp32)
        m.give(product, saved.pop("activated"), saved.pop("up"))
        half = m.take(WORK, self._inner)
        m.give(up)
        second = m.take(WORK, self._wide)  # the gradient of up, with zeros beside it
        m.give(half)
        activated = m.take(WORK, in_fp32)
        m.give(gate, saved.pop("gate"))
        half = m.take(WORK, self._inner)
        m.give(activated)
        first = m.take(WORK, self._wide)
        m.give(half)
        wide = m.take(WORK, self._wide)
        m.give(first, second)
        return wide

    def _mixture_backward(self, saved: Saved) -> list[Held]:
        m, b, n = self.memory, self.block, self.rows.tokens
        each = n * b.experts_per_token
        weighted = [m.take(WORK, WIDE * each * b.width) for _ in range(2)]
        m.give(*weighted, saved.pop("answers"))
        rows = m.take(WORK, HALF * each * b.width)
        in_fp32 = WIDE * n * b.ff
        pieces = [m.take(WORK, in_fp32) for _ in range(3)]
        pieces.append(m.take(WORK, self._wide))
        grown = m.take(GRADIENTS, b.expert_gradients)
        m.give(*pieces, rows, *(saved.pop(name) for name in ("inner", "gate", "activated", "up") if name in saved))
        if not self._steals:
            m.give(grown)
        found = [m.take(WORK, HALF * each * b.width), m.take(WORK, self._stream)]
        m.give(found[0], *(saved.pop(name) for name in ("sorted", "copies", "routed")))
        m.give(saved.pop("normed"))
        return [found[1]]

    def _norm_backward(self, saved: Saved, name: str) -> Held:
        """Through a norm behind attention or MLP."""
        m = self.memory
        found = [m.take(WORK, self._stream) for _ in range(2)]
        self._norm_gradient()
        m.give(found[1], saved.pop(f"{name}_branch"), saved.pop(f"{name}_rstd"))
        return found[0]

    def _norm_gradient(self) -> None:
        m, b = self.memory, self.block
        shares = m.take(WORK, WIDE * min(PROGRAMS, self.rows.tokens) * b.width)
        total = m.take(GRADIENTS if b.norm_learns else WORK, WIDE * b.width)
        m.give(shares)
        if not (b.norm_learns and self._steals):
            m.give(total)

    def _into_stream(self, saved: Saved, name: str, layer: Layer | None, g: list[Held], onward: Held) -> Held:
        """Through a product and the norm before it; what comes past the norm is added."""
        m = self.memory
        inner, made = None, list[Held]()
        if layer is not None:
            inner = m.take(WORK, self._stream)
            made = self._back(layer)
        found = [m.take(WORK, self._stream) for _ in range(2)]
        self._norm_gradient()
        if layer is not None:
            self._learned(layer)
        rstd = "rstd" if name == "stream" else f"{name}_rstd"
        m.give(inner, found[1], *made, *g, onward, saved.pop(rstd), saved.pop(name, None))
        return found[0]

    def _back(self, layer: Layer) -> list[Held]:
        """What the product of the gradient needs besides; what of it stays until the layer's own gradients are made."""
        m, n = self.memory, self.rows.tokens
        if not layer.adapted:
            m.give(m.take(WORK, layer.copied))
            return []
        pieces = [m.take(WORK, HALF * n * layer.rank) for _ in layer.adapted]
        joined = m.take(WORK, HALF * n * layer.ranks)
        narrow = m.take(WORK, HALF * n * layer.ranks)
        m.give(joined)
        m.give(m.take(WORK, HALF * layer.ranks * layer.inputs))
        m.give(*pieces)
        return [narrow]

    def _learned(self, layer: Layer) -> None:
        m, n = self.memory, self.rows.tokens
        narrow = [m.take(WORK, HALF * n * layer.ranks) for _ in range(2)] if layer.adapted else []
        m.give(*narrow[1:])
        grown = [m.take(GRADIENTS, size) for size in layer.gradients]
        m.give(*narrow[:1])
        if not self._steals:
            m.give(*grown)

    def _attention_backward(self, saved: Saved, attended: Held) -> list[Held]:
        """Gradients of queries, keys and values."""
        m, b = self.memory, self.block
        n, width = self.rows.tokens, b.heads * b.head_dim
        if b.flash:
            padded = n + 128 * self.rows.documents
            grain = 32 if b.head_dim <= 128 else 64
            work = [m.take(WORK, WIDE * b.heads * padded)]
            work.append(m.take(WORK, WIDE * padded * b.heads * (-(-b.head_dim // grain) * grain)))
            if b.heads != b.kv_heads:
                work += [m.take(WORK, HALF * n * width) for _ in range(2)]
        else:
            work = [m.take(WORK, WIDE * n * b.heads), m.take(WORK, WIDE * n * width)]
        keys = HALF * n * b.kv_heads * b.head_dim
        found = [m.take(WORK, size) for size in (self._queries, keys, keys)]
        m.give(*work, attended, saved.pop("attended"), saved.pop("sums"))
        m.give(saved.pop("turned") if b.qk_norm else saved.pop("qkv"))
        return found

    def _turn_back(self, saved: Saved, pieces: list[Held]) -> list[Held]:
        m, b = self.memory, self.block
        both = m.take(WORK, self._both)
        m.give(*pieces[:2])
        joined = m.take(WORK, self._qkv)
        shares = m.take(WORK, WIDE * min(2 * PROGRAMS, self.rows.tokens) * b.head_dim)
        m.give(shares, both, pieces[2], saved.pop("qkv"), saved.pop("turned_rstd"))
        return [joined]
