"""What a training step of the fused decoder allocates on a GPU, found without one.

The real modules and autograd functions run on the meta device; kernels are replaced by functions that allocate what they
allocate and compute nothing. A dispatch mode counts storages while they live, each rounded up as CUDA's allocator does.
"""

from __future__ import annotations

import importlib
import sys
import types
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._meta_registrations import activate_meta  # noqa: F401  # lighter_torch.py leaves it until it is asked for
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PROGRAMS = 528


class Trace(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.peaks: dict[str, int] = {}
        self._known: set[int] = set()
        self._phase = ""

    def phase(self, name: str) -> None:
        self._phase = name
        self.peaks[name] = max(self.peaks.get(name, 0), self.now)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, Tensor):
                self.count(tensor)
        return found

    def count(self, tensor: Tensor) -> None:
        if tensor.device.type != "meta":
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        size = -(-storage.nbytes() // 512) * 512
        self._known.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        if self._phase:
            self.peaks[self._phase] = max(self.peaks[self._phase], self.now)
        weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def _empty(*size: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(size, dtype=dtype, device="meta")


def _kernels() -> types.ModuleType:
    """As fused_kernel.py allocates."""

    def add_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        out = torch.empty_like(x) if delta is not None else x
        return out, torch.empty_like(x), _empty(x.shape[0], dtype=torch.float32)

    def norm_backward(g: Tensor, x: Tensor, rstd: Tensor, weight: Tensor, onward: Tensor | None) -> Any:
        dx, normed = torch.empty_like(x), torch.empty_like(x)
        dweight = _empty(min(PROGRAMS, x.shape[0]), x.shape[1], dtype=torch.float32)
        return dx, normed, dweight.sum(0)

    def swiglu(gate_up: Tensor) -> Tensor:
        return _empty(gate_up.shape[0], gate_up.shape[1] // 2, dtype=gate_up.dtype)

    def swiglu_backward(g: Tensor, gate_up: Tensor) -> tuple[Tensor, Tensor]:
        return torch.empty_like(gate_up), torch.empty_like(g)

    def norm_rotate(qkv: Tensor, cos: Any, sin: Any, q: Tensor, k: Any, heads: int, kv_heads: int, eps: float) -> Any:
        both = heads + kv_heads
        out = _empty(qkv.shape[0], both * q.shape[0], dtype=qkv.dtype)
        return out, _empty(qkv.shape[0], both, dtype=torch.float32)

    def norm_rotate_backward(
        g: Tensor, qkv: Tensor, cos: Any, sin: Any, q: Tensor, *rest: Any
    ) -> tuple[Tensor, Tensor]:
        programs = min(2 * PROGRAMS, qkv.shape[0])
        found = []
        for _ in range(2):
            dweight = _empty(programs, q.shape[0], dtype=torch.float32)
            found.append(dweight.sum(0))
        return found[0], found[1]

    module = types.ModuleType("stoker.training.model.fused_kernel")
    for function in (add_norm, norm_backward, swiglu, swiglu_backward, norm_rotate, norm_rotate_backward):
        setattr(module, function.__name__, function)
    module.rotate_in_place = lambda *args: None  # type: ignore[attr-defined]
    module.gradient_in_place = lambda *args: None  # type: ignore[attr-defined]
    return module


class _Attention(torch.autograd.Function):
    """As cuDNN's, or flash attention's where rows are packed or have a window."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, flash: bool) -> Tensor:
        out = _empty(*q.shape, dtype=q.dtype)
        lse = _empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.flash = flash
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        q, k, v, _, _ = ctx.saved_tensors
        B, T, H, D = q.shape
        held = [_empty(B, T, H, dtype=torch.float32), _empty(B, T, H, D, dtype=torch.float32)]
        if ctx.flash:
            rounded = -(-D // 32) * 32
            held = [_empty(H, B * T + 128 * B, dtype=torch.float32)]
            held.append(_empty(B * T + 128 * B, H, rounded, dtype=torch.float32))
            if k.shape[2] != H:
                held += [_empty(B, T, H, D, dtype=q.dtype) for _ in range(2)]
        found = tuple(_empty(*x.shape, dtype=x.dtype) for x in (q, k, v))
        return (*found, None)


@contextmanager
def pretended() -> Iterator[None]:
    """Kernels that only allocate, in place of the real ones."""
    from stoker.training.model import attention, host_kept, loss, maps, nf4
    from stoker.training.optim import muon

    package = sys.modules["stoker.training.model"]
    before = [(key, sys.modules.pop(f"{package.__name__}.{key}", None)) for key in ("fused_kernel", "fused")]
    kernels = sys.modules[f"{package.__name__}.fused_kernel"] = package.fused_kernel = _kernels()
    fused = importlib.import_module(f"{package.__name__}.fused")
    assert fused.kernel is kernels

    def attend(q: Tensor, k: Tensor, v: Tensor, seen: Any, dropout: float, scale: Any, cap: float = 0.0) -> Tensor:
        found: Tensor = _Attention.apply(q, k, v, seen.documents is not None)
        return found

    def weight_gradient(g: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return _empty(g.shape[1], x.shape[1], dtype=weight.dtype)

    orthogonal = muon.orthogonal
    patched: list[tuple[Any, str, Any]] = [
        (muon, "orthogonal", lambda x, dtype: orthogonal(x, torch.bfloat16)),
        (attention, "packed_kernel", lambda *args, **kwargs: "varlen"),
        (fused, "attend", attend),
        (host_kept, "copy", lambda to, of: None),
        (maps, "weight_gradient", weight_gradient),
        (maps, "_scaled_gradient", lambda *args: None),
        (nf4, "expand", lambda joined, out: out),
        (loss, "_gradient_in_place", lambda *args: None),
        (loss, "accumulate", lambda *args: None),
        (maps.Adapter, "start", lambda adapter, generator: None),
        (torch, "_fused_adamw_", lambda *args, **kwargs: None),
    ]
    originals = [(place, key, getattr(place, key)) for place, key, _ in patched]
    for place, key, value in patched:
        setattr(place, key, value)
    maps.BUFFERS._held.clear()
    try:
        yield
    finally:
        for place, key, value in originals:
            setattr(place, key, value)
        maps.BUFFERS._held.clear()
        for key, module in before:
            sys.modules.pop(f"{package.__name__}.{key}")
            delattr(package, key)
            if module is not None:
                sys.modules[f"{package.__name__}.{key}"] = module
                setattr(package, key, module)


def _built(kind: Any, shape: Any, adapter: Any, context: int, recompute: int, host: bool = False, mlp: int = 0) -> Any:
    """A model of this class, as recipes/build.py makes one."""
    from stoker.training.model import adapters, nf4, ready
    from stoker.training.parallel.config import block_kinds

    meta = torch.device("meta")
    with meta:
        model = kind(shape, context, torch.bfloat16)
    for name in model.own:
        setattr(model, name, torch.nn.Parameter(getattr(model, name).to(meta)))
    if adapter.method != "off":
        adapters.freeze(model, adapter)
    model.tables = [(cos.to(meta), sin.to(meta)) for cos, sin in model.tables]
    if adapter.method == "qlora":
        for _, layer in adapters._layers(model):
            if layer.weight is None:
                layer.quantized = tuple(
                    nf4.Quantized(*_codes(rows * layer.in_features), (rows, layer.in_features), torch.bfloat16)
                    for rows in layer.parts
                )
                layer.settle()
    if adapter.method != "off":
        adapters.attach(model, adapter, 0)
    model.fuse(True)
    ready.keep_by_kind(model, block_kinds(shape.layers, recompute, host, mlp), print if host else None)
    return model


def _optimizer(model: Any, optim: Any) -> Any:
    from stoker.training.optim.config import OptimConfig
    from stoker.training.optim.optimizer import EightBit, Optimizer

    optimizer = Optimizer(model, optim or OptimConfig())
    for rule in optimizer.rules:
        if isinstance(rule, EightBit):
            rule._run = lambda *args: None  # compiled: one kernel
    return optimizer


def _update(trace: Trace, optimizer: Any) -> None:
    from stoker.training.optim.optimizer import gradient_norm

    trace.phase("step")
    optimizer.step(0.0, gradient_norm(optimizer.parameters), torch.ones((), device="meta"))


def _steps(trace: Trace, model: Any, optimizer: Any, size: tuple[int, int], packed: bool, steps: int) -> None:
    from stoker.training.model.attention import documents

    meta = torch.device("meta")
    inputs = torch.zeros(size, dtype=torch.int64, device=meta)
    trace.phase("held")
    for _ in range(steps):
        segments = torch.zeros(size, dtype=torch.int32) if packed else None
        trace.phase("forward")
        loss = model(inputs, inputs, torch.zeros((), device=meta), documents(segments, meta))
        trace.phase("backward")
        loss.backward()
        del loss
    _update(trace, optimizer)


def traced(
    shape: Any,
    adapter: Any,
    context: int,
    *,
    micro: int = 1,
    packed: bool = False,
    recompute: int = 0,
    host: bool = False,
    optim: Any = None,
    steps: int = 2,
    mlp: int = 0,
) -> Trace:
    """Peaks by phase of `steps` micro-steps with an optimizer step behind: of the last, gradients are there already."""
    from stoker.training.model.decoder import Decoder

    with pretended(), Trace() as trace:
        model = _built(Decoder, shape, adapter, context, recompute, host, mlp)
        _steps(trace, model, _optimizer(model, optim), (micro, context), packed, steps)
        return trace


def traced_pairs(
    shape: Any, adapter: Any, context: int, *, likelihood: bool | None, micro: int = 1, recompute: int = 0,
    optim: Any = None, steps: int = 2, loaded: bool = False, mlp: int = 0,
) -> Trace:  # fmt: skip
    """The same of stage reward, with `reward.likelihood` or without; None: of stage dpo. `loaded`: DPO that begins with an
    adapter."""
    from stoker.training.model.config import AdapterConfig
    from stoker.training.model.reference import Beginning
    from stoker.training.recipes import dpo
    from stoker.training.reward import model as reward
    from stoker.training.reward.config import DpoConfig

    with pretended(), Trace() as trace:
        if likelihood is not None:
            kind = reward.learner(likelihood).kind
        elif adapter.method == "off":
            reference = _built(dpo.Reference, shape, AdapterConfig(), context, recompute).to(torch.bfloat16)
            kind = dpo.learner(reference.requires_grad_(False).eval(), DpoConfig()).kind
        else:
            kind = dpo.learner(None, DpoConfig()).kind
        model = _built(kind, shape, adapter, context, recompute, mlp=mlp)
        if likelihood is None and adapter.method != "off":
            model.begun = Beginning(model, loaded=loaded)
        optimizer = _optimizer(model, optim)
        _steps(trace, model, optimizer, (micro, context), True, steps)
        return trace


def traced_grpo(
    shape: Any, adapter: Any, context: int, *, micro: int = 4, prompt: int = 100, new_tokens: int = 60, rows: int = 8,
    answers: int = 8, recompute: int = 0, optim: Any = None, kl: float = 0.02, codes: bool = False, host: bool = False,
) -> Trace:  # fmt: skip
    """One step of stage grpo: answers by the paged engine with kernels that only allocate, their copy made anew, and the update."""
    from stoker.training.generate.config import PREFILL_TOKENS, TURN, kernels_lack
    from stoker.training.model.config import AdapterConfig
    from stoker.training.model.decoder import Decoder
    from stoker.training.model.reference import Beginning, copied
    from stoker.training.rl import update
    from stoker.training.rl.update import Policy, Row, arrange, logprobs
    from stoker.training.serve import engine as serving
    from stoker.training.serve import paged
    from stoker.training.serve.batch import sizes_for
    from stoker.training.serve.request import Request

    meta = torch.device("meta")
    with pretended(), Trace() as trace:
        model = _built(Decoder, shape, adapter, context, recompute, host)
        reference: Any = Beginning(model, loaded=False)
        if adapter.method == "off":
            copy = _built(Decoder, shape, AdapterConfig(), context, recompute).to(torch.bfloat16)
            reference = copied(copy.requires_grad_(False))
        optimizer = _optimizer(model, optim)
        kernels = None if kernels_lack(shape, prompt + new_tokens) else _writing_kernels()
        replaced = [
            (serving, "_kernels", lambda model, length: paged.Kernels(kernels, kernels) if kernels else None),
            (paged, "attend", lambda q, *rest: _empty(*q.shape, dtype=q.dtype)),
            # no numbers are here to be read
            (paged.Paged, "_read", lambda self, slots, kind, count: paged.Written([[1] * count] * len(slots), [], [])),
        ]
        originals = [(place, key, getattr(place, key)) for place, key, _ in replaced]
        try:
            for place, key, value in replaced:
                setattr(place, key, value)
            sizes = sizes_for(rows, prompt + new_tokens, PREFILL_TOKENS, TURN)
            engine = serving.PagedEngine(model, sizes, codes=codes)
            trace.phase("held")
            trace.phase("answers")
            for row in range(rows):  # equal prompts would be computed once
                engine.add(Request(str(row), (row, *[1] * (prompt - 1)), 8, index=row))
            while engine.busy:
                engine.step()
            trace.phase("merging")
            engine.refresh()
        finally:
            for place, key, value in originals:
                setattr(place, key, value)
        policy = Policy(model, temperature=1.0, clip_ratio=0.2, kl=kl)
        trace.phase("compared")
        some = [Row((1,) * prompt, (1,) * new_tokens, 1.0)] * answers
        batches = []
        for batch in arrange(some, micro, context, meta):
            if kl:
                with torch.no_grad(), reference() as model_then:
                    batch = update.replace(batch, reference=logprobs(model_then, batch, 1.0)[0])
            batches.append(batch)
        for batch in batches:
            trace.phase("forward")
            loss, seen = policy(batch, 1.0)
            trace.phase("backward")
            loss.backward()
            del loss, seen
        _update(trace, optimizer)
        return trace


def traced_scores(shape: Any, rows: int, length: int, *, likelihood: bool) -> tuple[int, int]:
    """(bytes of a reward model as GRPO opens it, its pass's highest point above them)."""
    from stoker.training.model import decoder
    from stoker.training.model.decoder import Decoder
    from stoker.training.reward.model import learner

    meta, attend = torch.device("meta"), decoder.attend
    decoder.attend = lambda q, *rest: _empty(*q.shape, dtype=q.dtype)
    try:
        with Trace() as trace, torch.no_grad():
            with meta:
                model: Any = learner(likelihood).kind(shape, length, torch.bfloat16)
            assert isinstance(model, Decoder)
            for name in model.own:
                setattr(model, name, torch.nn.Parameter(getattr(model, name).to(meta)))
            model.tables = [(cos.to(meta), sin.to(meta)) for cos, sin in model.tables]
            held = trace.now
            trace.phase("scores")
            model.parts(torch.zeros(rows, length, dtype=torch.int64, device=meta), None)
            return held, trace.peaks["scores"] - held
    finally:
        decoder.attend = attend


def _writing_kernels() -> Any:
    """As generate/kernel.py allocates."""

    def add_norm(x: Tensor, delta: Tensor | None, weight: Any, eps: float) -> tuple[Tensor, Tensor]:
        out, normed, _ = sys.modules["stoker.training.model.fused_kernel"].add_norm(x, delta, weight, eps)
        return out, normed

    def turn(qkv: Tensor, cos: Any, sin: Any, norm: Any, heads: int, eps: float, kv: Tensor, *rest: Any) -> Tensor:
        return _empty(qkv.shape[0], heads, kv.shape[4], dtype=qkv.dtype)

    def attend(q: Tensor, *rest: Any) -> Tensor:
        return _empty(q.shape[0], q.shape[1] * q.shape[2], dtype=q.dtype)

    def sample_token(logits: Tensor, uniform: Tensor, temperature: float) -> Tensor:
        rows, width = logits.shape
        peaks = _empty(2, rows, -(-width // 1024), dtype=torch.float32)
        found = _empty(rows, dtype=torch.int64)
        del peaks
        return found

    swiglu = sys.modules["stoker.training.model.fused_kernel"].swiglu
    return types.SimpleNamespace(add_norm=add_norm, turn=turn, attend=attend, sample_token=sample_token, swiglu=swiglu)


def _codes(elements: int) -> tuple[Tensor, ...]:
    blocks = -(-elements // 64)
    second = -(-blocks // 256)
    sizes = ((elements // 2, torch.uint8), (blocks, torch.uint8), (second, torch.float32))
    return *(_empty(size, dtype=kind) for size, kind in sizes), _empty(dtype=torch.float32)
