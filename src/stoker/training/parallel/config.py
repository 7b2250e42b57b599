"""How ranks share the work, and on what. No torch here."""

from __future__ import annotations

from stoker.contract import limits
from stoker.contract.frozen import frozen, option
from stoker.contract.limits import choice
from stoker.contract.text import is_digits
from stoker.contract.units import parse_duration

PLAIN = ("full", "bf16", "powersgd")
ACCUMULATE = ("auto", "sharded", "whole")
SHARDING = OVER_ALL, IN_HOST = ("all", "host")
OFFLOAD = NOTHING, MOMENTS, EVERYTHING = ("off", "optimizer", "all")


def read_comm(text: str) -> str:
    """full, bf16, powersgd, or local:N."""
    kind, _, number = text.partition(":")
    if text in PLAIN or (kind == "local" and is_digits(number) and int(number) > 1):
        return text
    if kind == "local":
        raise ValueError(f"{text!r} needs the number of steps between exchanges, 2 or more; write local:8")
    raise ValueError(f"{text!r} is not one of {', '.join(PLAIN)}, local:N")


def local_steps(told: str) -> int:
    """N of local:N; 0 where gradients are exchanged in every step."""
    kind, _, number = told.partition(":")
    return int(number) if kind == "local" else 0


RECOMPUTE = ("auto", "off", "selective", "mlp", "full")


def read_recompute(text: str) -> str:
    """One of RECOMPUTE, N, mlp:N or N+mlp."""
    if (
        text in RECOMPUTE
        or is_digits(text)
        or is_digits(text.removeprefix("mlp:"))
        or is_digits(text.removesuffix("+mlp"))
    ):
        return text
    raise ValueError(
        f"{text!r} is not one of {', '.join(RECOMPUTE)}, nor a number of blocks (N in full, mlp:N their MLP's first product,"
        " N+mlp both)"
    )


def recomputed_blocks(told: str, layers: int) -> tuple[int, int]:
    """(blocks that are computed again in full, blocks of which only the MLP's first product is)."""
    whole, plus, _ = told.partition("+")
    full = min(int(whole), layers) if is_digits(whole) else 0
    full = layers if told == "full" else full
    kind, _, number = told.partition(":")
    narrow = min(int(number), layers) if number else layers
    return full, narrow - full if kind == "mlp" or plus else 0


def recompute_word(full: int, mlp: int, layers: int) -> str:
    """What `read_recompute` takes for these; blocks beside full ones are all or none of the second kind."""
    if full and mlp:
        return f"{full}+mlp"
    if mlp:
        return "mlp" if mlp == layers else f"mlp:{mlp}"
    return {0: "off", layers: "full"}.get(full, str(full))


# What a block has for its backward pass: its input, from which it is computed again; all that autograd saves but for the MLP's
# first product, half of it; all, in host memory; the same on the GPU.
RECOMPUTED, MLP_AGAIN, OFFLOADED, KEPT = "recomputed", "mlp", "offloaded", "kept"
HOST_LEAST = 1 << 20  # bytes: a smaller tensor stays on the GPU


def block_kinds(layers: int, recomputed: int, host: bool, mlp: int = 0) -> tuple[str, ...]:
    """Of each block. The first ones are recomputed: the last are the first to be freed in the backward pass. With
    compute.activations host those that are not, but for the last one, are spread evenly: the copy of what one keeps takes longer
    than its forward pass."""
    if not host or recomputed >= layers:
        return (RECOMPUTED,) * recomputed + (MLP_AGAIN,) * mlp + (KEPT,) * (layers - recomputed - mlp)
    others = layers - 1
    moved = others - recomputed
    passed = [(at * moved + others // 2) // max(others, 1) for at in range(layers)]
    spread = (OFFLOADED if passed[at + 1] > passed[at] else RECOMPUTED for at in range(others))
    return (*spread, KEPT)


def host_slab(size: int, pieces: int) -> tuple[int, int]:
    """(bytes, pieces that lie in them): how host memory is taken for what blocks keep, `size` bytes each. Torch's pinned
    allocator rounds up to a power of two; of the next few this is the one that wastes least."""
    least = (size - 1).bit_length()
    slabs = ((1 << power, (1 << power) // size) for power in range(least, least + 4))
    return min(slabs, key=lambda slab: -(-pieces // slab[1]) * slab[0])


def host_bytes(size: int, pieces: int) -> int:
    """All of it."""
    slab, count = host_slab(size, pieces)
    return -(-pieces // count) * slab


@frozen
class ParallelConfig:
    strategy: str = choice("ddp", "fsdp", "auto")(
        "ddp: each rank holds the model; fsdp: in shards (FSDP2); auto: by the memory plan"
    )
    device: str = choice("auto", "cuda", "cpu")("auto: GPUs where there are some; cuda; cpu")
    balance: str = choice("off", "auto")(
        "auto: a faster rank takes more of a step's samples, planned again when imbalance stays; off: equal shares"
    )
    accumulate: str = choice(*ACCUMULATE)(
        "fsdp: gradients between the micro-batches of a step: sharded (exchanged after each), whole (exchanged once a step; every"
        " rank holds all of them), auto (what takes less network time and fits, by the memory plan)"
    )
    sharding: str = choice(*SHARDING)(
        "fsdp: over which ranks the model is cut: all, or host (those of a host: each host holds all of it, and hosts exchange"
        " gradients only)"
    )
    offload: str = choice(*OFFLOAD)(
        "fsdp: what is in host memory: off (nothing), optimizer (moments, which visit the GPU for an update), all (weights and"
        " gradients in shards, too: a block is on the GPU while it computes)"
    )
    comm: str = option(
        "how gradients travel: full, bf16 (half the bytes), powersgd (low-rank parts), or local:N (N steps alone, then"
        " the mean of the weights)",
        default="full",
        parse=read_comm,
        metavar="HOW",
    )
    timeout: float = limits.POSITIVE(
        "a collective that takes longer has failed", 600.0, parse=parse_duration, metavar="TIME"
    )


@frozen
class ComputeConfig:
    dtype: str = choice("auto", "bf16", "fp16", "fp32")(
        "auto: bf16, fp16 on GPUs without it, fp32 on CPUs; what learns is always fp32"
    )
    compile: str = choice("auto", "on", "fused", "off")(
        "how a block runs: auto (on GPUs fused, with fp8 compiled), fused (our own kernels, nothing to compile), on"
        " (compiled), off (plain torch)"
    )
    recompute: str = option(
        "activation checkpointing: auto (compiled blocks keep what products and attention made), off, selective (the"
        " same without a compiler), mlp (the MLP's first product is made again: the half of what fused blocks keep that is"
        " cheapest), full; or in how many blocks: N in full, mlp:N, N+mlp (N in full, mlp in the others)",
        default="auto",
        parse=read_recompute,
        metavar="HOW|N",
    )
    fp8: str = choice("off", "tensorwise")(
        "off, or tensorwise: the blocks' matrix products in 8 bits (Hopper and later)"
    )
    loss: str = choice("auto", "chunked", "liger", "plain")(
        "auto, chunked (head and loss in pieces), liger (its fused kernel), or plain"
    )
    embedding: str = choice("device", "host")(
        "where a frozen embedding is kept: device, or host (adapters only: the GPU gets the rows it needs)"
    )
    activations: str = choice("device", "host")(
        "where saved activations wait for the backward pass (inputs of recomputed blocks, all that others save): device, or host"
        " (the GPU holds that of two blocks)"
    )
    attention: str = choice("auto", "cudnn", "flash", "math")(
        "auto (cuDNN where it works, then flash), cudnn, flash, or math"
    )
    cuda_graphs: str = choice("auto", "on", "off")(
        "replay a whole micro-step as one graph: auto (on one rank, if launching its kernels takes longer than computing"
        " them), on, off"
    )
    deterministic: bool = option("only kernels that give the same bits each time: slower", default=False)
