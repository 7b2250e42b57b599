"""The decoder made ready for its device: fp8, activation checkpointing, compilation. Each fallback is reported."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from stoker.contract.errors import EX_CONFIG, EX_UNAVAILABLE, Refusal
from stoker.control.record.private_folders import private_cache
from stoker.training.model import linear
from stoker.training.model.config import ModelConfig, unfusable
from stoker.training.model.decoder import Decoder
from stoker.training.model.experts import ungrouped
from stoker.training.model.host_kept import HostKept, Input
from stoker.training.model.outside import Outside
from stoker.training.optim.muon import has_bf16
from stoker.training.parallel.config import MLP_AGAIN, RECOMPUTED, ComputeConfig, block_kinds, recomputed_blocks

# What selective recomputation keeps.
PRODUCTS = (
    "aten.mm", "aten.addmm", "aten._grouped_mm", "aten._scaled_mm", "aten._scaled_dot_product", "varlen_attn",
)  # fmt: skip
FP8_KEPT = 8  # one in so many blocks stays in bf16 at each end
# each is a process that imports torch: sixteen take 5 s longer to a first step than four (H200 box, 16 cores)
COMPILE_THREADS = 4


def environment(say: Callable[[str], None]) -> None:
    """Before CUDA and the compiler start. What the user has set stays."""
    if "TORCHINDUCTOR_CACHE_DIR" not in os.environ or "TRITON_CACHE_DIR" not in os.environ:
        here = private_cache("compile", say)
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.join(here, "inductor"))
        os.environ.setdefault("TRITON_CACHE_DIR", os.path.join(here, "triton"))
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(min(COMPILE_THREADS, len(os.sched_getaffinity(0)))))
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ and "PYTORCH_ALLOC_CONF" not in os.environ:
        # fragments don't add up over evaluations and restarts
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"


def arithmetic(c: ComputeConfig, dtype: torch.dtype) -> None:
    if c.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        if torch.cuda.is_available() or c.compile == "on":
            torch.use_deterministic_algorithms(True, warn_only=True)
        else:  # the same but for the compiler's own setting: that alone would load the compiler, 1 s
            torch.set_deterministic_debug_mode("warn")
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # 15 % of a small step, and we read nothing unwritten
    torch.set_float32_matmul_precision("highest" if c.deterministic or dtype == torch.float32 else "high")


def attention(c: ComputeConfig, device: torch.device) -> str:
    """cuDNN's backward adds in any order."""
    return "deterministic" if c.deterministic and c.attention == "auto" and device.type == "cuda" else c.attention


def warm_compiler() -> threading.Thread:
    """Starts the compiler (3 s and more) while data and model are made ready; joined before it compiles."""

    def load() -> None:
        importlib.import_module("torch._inductor.compile_fx")
        importlib.import_module("torch._inductor.async_compile")  # starts its pool

    thread = threading.Thread(target=load, name="compiler", daemon=True)
    thread.start()
    return thread


def dtype_of(c: ComputeConfig, device: torch.device) -> torch.dtype:
    """compute.dtype; auto is what the card computes fast."""
    if c.dtype != "auto":
        return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[c.dtype]
    if device.type != "cuda":
        return torch.float32
    return torch.bfloat16 if has_bf16(device) else torch.float16


def fused(c: ComputeConfig, model: ModelConfig, device: torch.device, say: Callable[[str], None]) -> bool:
    """Blocks by our own kernels."""
    if c.compile == "fused" and device.type != "cuda":
        raise Refusal("compute.compile fused needs a GPU: its kernels are Triton's", EX_UNAVAILABLE)
    wanted = c.compile == "fused" or (c.compile == "auto" and device.type == "cuda" and c.fp8 == "off")
    why = unfusable(model)
    if wanted and why:
        say(f"{why}; using the plain one, compiled")
    return wanted and not why


def compiled(c: ComputeConfig, device: torch.device, model: ModelConfig | None = None) -> bool:
    if c.compile in ("auto", "fused") and device.type == "cuda":
        return c.fp8 != "off" or (model is not None and bool(unfusable(model)))
    return c.compile == "on"


def make_ready(model: Decoder | Outside, c: ComputeConfig, device: torch.device, say: Callable[[str], None]) -> None:
    if isinstance(model, Outside):
        return model.make_ready(c, say)
    model.loss = _loss(c, model.config)
    if c.fp8 != "off":
        _use_fp8(model, device, say)
    compile_it = compiled(c, device, model.config)
    why = ungrouped(model.config, device) if model.config.experts and device.type == "cuda" else ""
    if not why and model.config.experts and device.type == "cuda" and model.dtype != torch.bfloat16:
        why = "grouped products need bf16"
    if why:
        say(f"{why}; experts are computed one by one" + (", and blocks are not compiled" if compile_it else ""))
        compile_it = False  # how many tokens an expert gets is not known while a graph is traced
    model.fuse(fused(c, model.config, device, say))
    selective, layers = c.recompute == "selective", model.config.layers
    host = _host_kept(c, layers, compile_it, device, say)
    again, mlp = (layers, 0) if selective else recomputed_blocks(c.recompute, layers)
    if mlp and compile_it:
        raise Refusal(
            f"compute.recompute {c.recompute}: blocks are compiled here; use a number of blocks, full, off or auto",
            EX_CONFIG,
        )
    keep_by_kind(model, block_kinds(layers, again, host, mlp), say if host else None, selective)
    if not compile_it:
        return
    _keep_products_only(c.recompute != "off")
    for part in (*model.layers, model.norm):
        part.compile(fullgraph=True, dynamic=False)


def _host_kept(
    c: ComputeConfig, layers: int, compile_it: bool, device: torch.device, say: Callable[[str], None]
) -> bool:
    """compute.activations."""
    if c.activations != "host":
        return False
    if compile_it or c.recompute == "selective" or "mlp" in c.recompute:
        why = "blocks are compiled here" if compile_it else f"recompute {c.recompute} keeps parts of blocks"
        raise Refusal(
            f"compute.activations host: {why}; use compute.compile fused or off, recompute off, full or a number",
            EX_CONFIG,
        )
    if layers < 2:
        say("compute.activations host: nothing to move, because the model has one block")
        return False
    if device.type != "cuda":
        say("compute.activations host: no GPU here, so what blocks keep is copied within memory, and none is saved")
    return True


def keep_by_kind(
    model: Decoder, kinds: Sequence[str], host: Callable[[str], None] | None = None, selective: bool = False
) -> None:
    """`kinds`: of each block (parallel/config.py). `host`: what they keep goes to host memory; prints what is wrong there."""
    kept = None if host is None else HostKept(kinds, host)
    for place, (block, kind) in enumerate(zip(model.layers, kinds, strict=True)):
        if kind == RECOMPUTED:
            keep = None if kept is None else functools.partial(kept.input, place=place)
            checkpoint_block(block, selective, model.config.dropout > 0, keep)
        elif kind == MLP_AGAIN:
            _recompute_mlp(block)
        elif kept is not None:
            block.forward = functools.partial(_offloaded, block, block.forward, kept, place)


def _recompute_mlp(block: Any) -> None:
    """compute.recompute mlp."""
    gated = block.mlp is not None and block.mlp.activation is None
    if block.fused and not gated:
        raise Refusal(
            "compute.recompute mlp is for blocks with SwiGLU, and this model has others: use a number of blocks, full or off",
            EX_CONFIG,
        )
    if block.fused:
        block.lean = True
    elif block.mlp is not None:
        block.mlp.forward = functools.partial(checkpoint, block.mlp.forward, use_reentrant=False)


def _loss(c: ComputeConfig, model: ModelConfig) -> str:
    if c.loss == "liger" and model.final_cap:
        raise Refusal("compute.loss liger has no soft cap of logits here: use compute.loss chunked", EX_UNAVAILABLE)
    if c.loss == "liger" and importlib.util.find_spec("liger_kernel") is None:
        raise Refusal(
            "compute.loss liger: liger-kernel is not installed here; pip install liger-kernel, or compute.loss chunked",
            EX_UNAVAILABLE,
        )
    # Ours takes larger chunks (liger's are 1,024 tokens for a vocabulary of 50 K) and needs no package; liger is for
    # those who ask for it.
    return "chunked" if c.loss == "auto" else c.loss


def _use_fp8(model: Decoder, device: torch.device, say: Callable[[str], None]) -> None:
    if not linear.has_fp8(device):
        raise Refusal(
            "compute.fp8 tensorwise needs a GPU of compute capability 8.9 or later (Ada, Hopper, Blackwell): use"
            " compute.fp8 off",
            EX_UNAVAILABLE,
        )
    # All 16 blocks of a 1.2 B model in fp8: the loss is 0.10 above bf16's after 30 steps; without the first and last
    # two 0.02, at 97 % of the speed.
    kept = len(model.layers) // FP8_KEPT
    blocks = list(model.layers)[kept : len(model.layers) - kept]
    linears = [module for block in blocks for module in block.modules() if isinstance(module, linear.Linear)]
    small = 0
    for module in linears:
        module.fp8 = linear.fits_fp8(module.in_features, module.out_features)
        small += not module.fp8
    if kept:
        say(f"fp8: {len(blocks)} of {len(model.layers)} blocks; the first and the last {kept} stay in bf16")
    if small:
        say(f"fp8: {small} of {len(linears)} matrices are too small to gain by it and stay in bf16")


def _keep_products_only(yes: bool) -> None:
    """The compiler may recompute in the backward pass what is cheap though written to memory: norms, rotations."""
    import torch._functorch.config as functorch

    if hasattr(functorch, "ban_recompute_materialized_backward"):
        functorch.ban_recompute_materialized_backward = not yes
    import torch._dynamo.config as dynamo

    for limit in ("recompile_limit", "cache_size_limit"):  # by version: each micro-batch that is tried is a graph
        if hasattr(dynamo, limit):
            setattr(dynamo, limit, 64)


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = any(word in str(operation) for word in PRODUCTS)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def checkpoint_block(block: Any, selective: bool, random: bool, keep: Callable[[Tensor], Input] | None = None) -> None:
    """`keep`: puts its input into host memory."""
    block.products_kept = selective
    block.forward = functools.partial(_checkpointed, block.forward, selective, random, keep)


def unfuse(model: Decoder) -> None:
    """For a look at operations. Plain blocks keep twice what fused ones do, on a full card: so these keep nothing."""
    if model.fused:
        for block in model.layers:
            how = getattr(block.forward, "func", None)
            if how is not _checkpointed:
                if how is _offloaded:
                    del block.forward  # the class's own
                checkpoint_block(block, False, model.config.dropout > 0)
    model.fuse(False)


def _checkpointed(
    forward: Callable[..., Any], selective: bool, random: bool, keep: Callable[[Tensor], Input] | None, x: Tensor,
    cos: Tensor, sin: Tensor, seen: Any, delta: Tensor | None = None, *counted: Tensor | None,
) -> Any:  # fmt: skip
    """A fused block is given what is still to be added to x: added before, one tensor is kept instead of two."""
    if delta is not None and not selective:
        x, delta = x + delta.view_as(x), None
    args: tuple[Any, ...] = (x, cos, sin, seen, delta, *counted)
    if not torch.is_grad_enabled():
        return forward(*args)
    more: dict[str, Any] = (
        {"context_fn": functools.partial(create_selective_checkpoint_contexts, _policy)} if selective else {}
    )
    if keep is not None:  # not an argument, which would be kept: the recomputation asks for it
        kept = keep(x)
        forward, args = functools.partial(_with_input, forward, kept), args[1:]
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=random, **more)


def _with_input(forward: Callable[..., Any], kept: Input, *args: Any) -> Any:
    return forward(kept.read(), *args)


def _offloaded(
    block: nn.Module, forward: Callable[..., Any], host: HostKept, place: int, x: Tensor, cos: Tensor, sin: Tensor,
    seen: Any, delta: Tensor | None = None, *counted: Tensor | None,
) -> Any:  # fmt: skip
    if not torch.is_grad_enabled():
        return forward(x, cos, sin, seen, delta, *counted)
    others = (cos, sin, seen, counted, list(block.parameters()), list(block.buffers()))
    stays = {one.untyped_storage()._cdata for one in tree_leaves(others) if isinstance(one, Tensor)}
    with host.saved(place, x.device, stays):
        return forward(x, cos, sin, seen, delta, *counted)


def parameters(model: nn.Module) -> int:
    """Those in 4 bits, too."""
    codes = (part for module in model.modules() for part in getattr(module, "quantized", ()))
    return sum(p.numel() for p in model.parameters()) + sum(int(math.prod(part.size)) for part in codes)
