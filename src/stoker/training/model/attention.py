"""Rotary embedding, masks, and causal attention by the best kernel there is: cuDNN's on Hopper is 1.3-2 times flash 2."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from stoker.training.model.config import ModelConfig

_KERNELS = {
    "cudnn": [SDPBackend.CUDNN_ATTENTION], "flash": [SDPBackend.FLASH_ATTENTION], "math": [SDPBackend.MATH],
    "deterministic": [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH],
    "auto": [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH],
}  # fmt: skip
FLEX_BLOCK = 128  # tokens; for rows shorter than this torch 2.11 finds no kernel
_without_bias = True  # packed rows by a kernel that knows documents, where there is one


_varlen_known: frozenset[str] | None = None  # asked for once, outside of what is compiled


def _varlen_options() -> frozenset[str]:
    """The parameters of this torch's varlen_attn: is_causal in 2.10, window_size from 2.11; empty where it has none."""
    global _varlen_known
    if _varlen_known is None:
        try:
            from torch.nn.attention.varlen import varlen_attn  # 1.3 s: only who packs rows on a GPU imports it

            _varlen_known = frozenset(inspect.signature(varlen_attn).parameters)
        except ImportError:
            _varlen_known = frozenset()
    return _varlen_known


@contextmanager
def kernels(which: str) -> Iterator[None]:
    """In this order; around everything that traces or runs the model."""
    global _without_bias
    before, _without_bias = _without_bias, which != "math"
    try:
        with sdpa_kernel(_KERNELS[which], set_priority=True):
            yield
    finally:
        _without_bias = before


def rotary_table(length: int, c: ModelConfig, theta: float = 0.0) -> tuple[Tensor, Tensor]:
    """cos and sin, [T, half of what is turned of a head], in fp32 throughout as transformers computes them: an exacter
    table would make other logits than theirs. `theta`: another base, unstretched.
    """
    turned = int(c.head_dim * c.rope_share)
    frequency = 1.0 / (
        (theta or c.rope_theta) ** (torch.arange(0, turned, 2, dtype=torch.float32, device="cpu") / turned)
    )
    if not theta:
        frequency = _stretched(frequency, length, c)
    angle = torch.outer(torch.arange(length, dtype=torch.float32, device="cpu"), frequency)
    if theta or c.rope_attention == 1.0:
        return angle.cos(), angle.sin()
    return angle.cos() * c.rope_attention, angle.sin() * c.rope_attention


def _stretched(frequency: Tensor, length: int, c: ModelConfig) -> Tensor:
    if c.rope_kind == "longrope":
        factors = c.rope_long if length > c.rope_original else c.rope_short
        return frequency / torch.tensor(factors, dtype=torch.float32, device="cpu")
    if c.rope_factor == 1.0:
        return frequency
    if c.rope_kind == "linear":
        return frequency / c.rope_factor
    if c.rope_kind == "yarn":
        kept = 1 - _ramp(len(frequency), c)
        return frequency / c.rope_factor * (1 - kept) + frequency * kept
    turns = c.rope_original * frequency / (2 * math.pi)
    kept = ((turns - c.rope_low) / (c.rope_high - c.rope_low)).clamp(0, 1)
    return (1 - kept) * frequency / c.rope_factor + kept * frequency


def _ramp(count: int, c: ModelConfig) -> Tensor:
    """Yarn: 0 for the frequencies that stay, 1 for those that are divided, linear in between."""
    turned = 2 * count

    def dimension(turns: float) -> float:
        """Where the frequency makes so many turns in `rope_original` tokens."""
        return turned * math.log(c.rope_original / (turns * 2 * math.pi)) / (2 * math.log(c.rope_theta))

    first, last = dimension(c.rope_high), dimension(c.rope_low)
    if c.rope_truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, turned - 1)
    if first == last:
        last += 0.001
    return ((torch.arange(count, dtype=torch.float32, device="cpu") - first) / (last - first)).clamp(0, 1)


def rotate(x_BTHD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE as transformers lays it out: the first half of what is turned of a head turns with the second."""
    turned = 2 * cos.shape[-1]
    if turned < x_BTHD.shape[-1]:
        return torch.cat([rotate(x_BTHD[..., :turned], cos, sin), x_BTHD[..., turned:]], dim=-1)
    first, second = x_BTHD.float().chunk(2, dim=-1)
    cos, sin = cos[..., None, :], sin[..., None, :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x_BTHD.dtype)


class Documents(NamedTuple):
    """Where the documents of packed rows lie. Made on the host, so that no kernel is waited for."""

    segments: Tensor  # [B, T]: which document of its row a token belongs to
    offsets: Tensor  # [N + 1], int32: where each begins in the flattened batch; those that are left over are empty
    longest: int  # tokens, rounded up


def documents(segments: Tensor | None, device: torch.device) -> Documents | None:
    """Sizes are rounded up to powers of two: a compiled model meets few of them. None: a row is one."""
    if segments is None:
        return None
    starts = begins(segments).flatten().nonzero().flatten()
    total = segments.numel()
    longest = int(torch.diff(starts, append=starts.new_tensor([total])).max())
    offsets = torch.full((1 + (1 << len(starts).bit_length()),), total, dtype=torch.int32, device=starts.device)
    offsets[: len(starts)] = starts
    rounded = min(segments.shape[1], 1 << (longest - 1).bit_length())
    return Documents(segments.to(device, non_blocking=True), offsets.to(device, non_blocking=True), rounded)


def begins(segments: Tensor) -> Tensor:
    """[B, T]: whether a token is the first of its document."""
    return F.pad(segments[:, 1:] != segments[:, :-1], (1, 0), value=True)


class Seen(NamedTuple):
    """All tokens before (all empty); or a window; or the document, by offsets, by a block mask or by a bias."""

    window: int = 0
    documents: Documents | None = None
    blocks: Any = None  # flex attention's
    bias: Tensor | None = None  # [B or 1, 1, T, T]


def seen_by(
    packed: Documents | None,
    window: int,
    x_BTD: Tensor,
    *,
    head_dim: int,
    dropout: float = 0.0,
    cap: float = 0.0,
    compiled: bool = True,
) -> Seen:
    """What comes before in the document, at most `window` tokens (0: all). `compiled`: kernels for it may be."""
    rows, length, device = x_BTD.shape[0], x_BTD.shape[1], x_BTD.device
    window = window if 0 < window < length else 0
    if packed is None and not window and not cap:
        return Seen()
    kernel = packed_kernel(device, x_BTD.dtype, head_dim, window=window, dropout=dropout, cap=cap)
    if kernel == "varlen":
        return Seen(window, packed or _whole_rows(rows, length, device))
    if kernel == "flex" and compiled and length % FLEX_BLOCK == 0:
        return Seen(window, packed, blocks=_block_mask(packed, window, length, device))
    allowed = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    allowed = (allowed.triu(1 - window) if window else allowed)[None, None]
    if packed is not None:
        allowed = allowed & (packed.segments[:, :, None] == packed.segments[:, None, :])[:, None]
    return Seen(window, bias=_bias(allowed, x_BTD))


def seen_behind(before: int, window: int, x_BTD: Tensor) -> Seen:
    """What tokens see that follow `before` others of the same text, whose keys and values are known."""
    length = x_BTD.shape[1]
    allowed = torch.ones(length, before + length, dtype=torch.bool, device=x_BTD.device).tril(before)
    allowed = (allowed.triu(before + 1 - window) if window else allowed)[None, None]
    return Seen(window, bias=_bias(allowed, x_BTD))


def _bias(allowed: Tensor, x_BTD: Tensor) -> Tensor:
    bias = torch.zeros(allowed.shape, dtype=x_BTD.dtype, device=allowed.device)
    return bias.masked_fill_(~allowed, float("-inf"))


def _whole_rows(rows: int, length: int, device: torch.device) -> Documents:
    offsets = torch.arange(0, (rows + 1) * length, length, dtype=torch.int32, device=device)
    return Documents(torch.zeros(rows, length, dtype=torch.int32, device=device), offsets, length)


def packed_kernel(
    device: torch.device, dtype: torch.dtype, head_dim: int, *, window: int = 0, dropout: float = 0.0, cap: float = 0.0
) -> str:
    """Within documents: varlen (flash, by offsets), flex (caps, and windows it lacks), or a bias of T x T per row."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16) or dropout or not _without_bias:
        return "bias"
    if torch.cuda.get_device_capability(device)[0] < 8:
        return "bias"
    known = _varlen_options()
    if known and not cap and head_dim % 8 == 0 and head_dim <= 256 and (not window or "window_size" in known):
        return "varlen"
    return "flex" if head_dim & (head_dim - 1) == 0 else "bias"


def _varlen(q: Tensor, k: Tensor, v: Tensor, seen: Seen, scale: float | None) -> Tensor:
    """[B, T, H, D]."""
    from torch.nn.attention.varlen import varlen_attn

    packed, known = seen.documents, _varlen_known
    assert packed is not None and known is not None
    options: dict[str, Any] = {"enable_gqa": q.shape[2] != k.shape[2]} if "enable_gqa" in known else {}
    if "scale" in known:
        options["scale"] = scale
    elif scale is not None:  # the kernel's own is 1 / sqrt(D)
        q = q * (scale * q.shape[-1] ** 0.5)
    if "window_size" in known:
        options["window_size"] = (seen.window - 1 if seen.window else -1, 0)
    else:
        options["is_causal"] = True
    q_, k_, v_ = (x.flatten(0, 1) for x in (q, k, v))
    call: Any = varlen_attn
    found: Tensor = call(q_, k_, v_, packed.offsets, packed.offsets, packed.longest, packed.longest, **options)
    return found.view_as(q)


def _block_mask(packed: Documents | None, window: int, length: int, device: torch.device) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    def allowed(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = query >= key
        if window:
            seen = seen & (query - key < window)
        if packed is not None:
            seen = seen & (packed.segments[batch, query] == packed.segments[batch, key])
        return seen

    rows = None if packed is None else packed.segments.shape[0]
    return create_block_mask(allowed, rows, None, length, length, device=str(device))


@cache
def _compiled_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)  # not compiled it computes all of T x T


def _flex(q: Tensor, k: Tensor, v: Tensor, blocks: Any, scale: float | None, cap: float) -> Tensor:
    """[B, H, T, D]."""

    def capped(score: Tensor, *place: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    found: Tensor = _compiled_flex()(
        q, k, v, block_mask=blocks, scale=scale, score_mod=capped if cap else None, enable_gqa=q.shape[1] != k.shape[1]
    )
    return found


def attend(
    q_BTHD: Tensor,
    k_BTHD: Tensor,
    v_BTHD: Tensor,
    seen: Seen,
    dropout: float = 0.0,
    scale: float | None = None,
    cap: float = 0.0,
) -> Tensor:
    """[B, T, H, D]. Grouped heads stay grouped: no copies of keys and values."""
    if seen.documents is not None and seen.blocks is None:
        return _varlen(q_BTHD, k_BTHD, v_BTHD, seen, scale)
    grouped = q_BTHD.shape[2] != k_BTHD.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q_BTHD, k_BTHD, v_BTHD))
    if seen.blocks is not None:
        return _flex(q, k, v, seen.blocks, scale, cap).transpose(1, 2)
    if cap:
        return capped_attention(q, k, v, seen.bias, dropout, scale, cap).transpose(1, 2)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=seen.bias, is_causal=seen.bias is None, enable_gqa=grouped, dropout_p=dropout, scale=scale
    ).transpose(1, 2)


def capped_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, scale: float | None, cap: float
) -> Tensor:
    """[B, H, T, D]: scores are bounded softly before the mask, which no fused kernel of torch does."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = (q @ k.transpose(-1, -2)).float() * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = cap * torch.tanh(scores / cap)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    return F.dropout(scores.softmax(-1), dropout).to(v.dtype) @ v
