"""What one block's backward pass allocates, tensor by tensor, in the order of model/fused.py and model/maps.py."""

from __future__ import annotations

from stoker.training.fit.block import HALF, PROGRAMS, WIDE, Block, Forward, Layer, Rows, Saved
from stoker.training.fit.memory import GRADIENTS, WORK, Held, Memory


class Walk(Forward):
    """Both passes. `steals`: gradients stay where they were made, as the first ones of a step do; else they are added to
    those that are there."""

    def __init__(self, memory: Memory, block: Block, rows: Rows, *, steals: bool, lean: bool = False) -> None:
        super().__init__(memory, block, rows, lean=lean)
        self._steals = steals

    def again(self) -> Saved:
        """The forward pass once more, in the backward pass."""
        saved, result = self.forward(whole=True, saves=True)
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
        m.give(*made, saved.pop("out_narrow"))
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
        if self.lean:
            normed, rstd = m.take(WORK, self._stream), m.take(WORK, self._rstd)
            saved["wide_narrow"], saved["wide"] = m.take(WORK, self._narrow(b.gate_up)), m.take(WORK, self._wide)
            self._product(b.gate_up)
            m.give(normed, rstd)
        inner = m.take(WORK, self._inner)
        made = self._back(b.down)
        if b.plain:
            self._learned(b.down)
            m.give(*made, saved.pop("inner"), saved.pop("down_narrow"))
            wide = self._plain_backward(saved, inner)
        else:
            wide, again = m.take(WORK, self._wide), m.take(WORK, self._inner)
            self._learned(b.down)
            m.give(inner, again, *made, saved.pop("wide"), saved.pop("down_narrow"))
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
        rstd, narrow = ("rstd", "qkv_narrow") if name == "stream" else (f"{name}_rstd", "wide_narrow")
        m.give(inner, found[1], *made, *g, onward, saved.pop(rstd), saved.pop(narrow, None), saved.pop(name, None))
        return found[0]

    def _back(self, layer: Layer) -> list[Held]:
        """What the product of the gradient needs besides; what of it stays until the layer's own gradients are made."""
        m = self.memory
        m.give(m.take(WORK, layer.copied))
        return [m.take(WORK, self._narrow(layer))] if layer.adapted else []

    def _learned(self, layer: Layer) -> None:
        grown = [self.memory.take(GRADIENTS, size) for size in layer.gradients]
        if not self._steals:
            self.memory.give(*grown)

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
