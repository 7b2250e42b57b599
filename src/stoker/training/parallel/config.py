"""How ranks share the work, and on what. No torch here."""

from __future__ import annotations

from stoker.contract import limits
from stoker.contract.quantities import duration
from stoker.contract.shape import option, shape
from stoker.contract.untrusted import is_count

PLAIN = ("full", "bf16", "powersgd")


def read_comm(text: str) -> str:
    """full, bf16, powersgd, or local:N."""
    kind, _, number = text.partition(":")
    if text in PLAIN or (kind == "local" and is_count(number) and int(number) > 1):
        return text
    if kind == "local":
        raise ValueError(f"{text!r} does not say how many steps a rank goes alone: local:8, say, from local:2 up")
    raise ValueError(f"{text!r} is not one of {', '.join(PLAIN)}, local:N")


def local_steps(told: str) -> int:
    """N of local:N; 0 where gradients are exchanged in every step."""
    kind, _, number = told.partition(":")
    return int(number) if kind == "local" else 0


@shape
class ParallelConfig:
    strategy: str = option(
        "ddp: every rank holds the model; fsdp: sharded (FSDP2)", default="ddp", choices=("ddp", "fsdp")
    )
    device: str = option("auto: GPUs where there are some; cuda; cpu", default="auto", choices=("auto", "cuda", "cpu"))
    balance: str = option(
        "auto: a faster rank takes more of a step's samples, planned anew when imbalance stays; off: equal shares",
        default="off",
        choices=("off", "auto"),
    )
    comm: str = option(
        "how gradients travel: full, bf16 (half the bytes), powersgd (low-rank parts), or local:N (N steps alone, then"
        " the mean of the weights)",
        default="full",
        parse=read_comm,
        metavar="HOW",
    )
    timeout: float = option(
        "a collective that takes longer has failed",
        default=600.0,
        parse=duration,
        metavar="TIME",
        limit=limits.POSITIVE,
    )


@shape
class ComputeConfig:
    dtype: str = option(
        "auto (bf16 on GPUs that have it, fp32 else), bf16 or fp32; weights and optimizer are always fp32",
        default="auto",
        choices=("auto", "bf16", "fp32"),
    )
    compile: str = option(
        "how a block runs: auto (on GPUs fused, with fp8 compiled), fused (our own kernels, nothing to compile), on"
        " (compiled), off (plain torch)",
        default="auto",
        choices=("auto", "on", "fused", "off"),
    )
    recompute: str = option(
        "activation checkpointing: auto (compiled blocks keep what products and attention made), off, selective (the"
        " same without a compiler), full",
        default="auto",
        choices=("auto", "off", "selective", "full"),
    )
    fp8: str = option(
        "off, or tensorwise: the blocks' matrix products in 8 bits (Hopper and later)",
        default="off",
        choices=("off", "tensorwise"),
    )
    loss: str = option(
        "auto, chunked (head and loss in pieces), liger (its fused kernel), or plain",
        default="auto",
        choices=("auto", "chunked", "liger", "plain"),
    )
    attention: str = option(
        "auto (cuDNN where it works, then flash), cudnn, flash, or math",
        default="auto",
        choices=("auto", "cudnn", "flash", "math"),
    )
    cuda_graphs: str = option(
        "replay a whole micro-step as one graph: auto (small models on one rank), on, off",
        default="auto",
        choices=("auto", "on", "off"),
    )
    deterministic: bool = option("only kernels that give the same bits each time: slower", default=False)
