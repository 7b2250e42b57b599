"""A token's products by NF4 codes: our fused kernel against bf16 weights, against dequantizing first, and bitsandbytes.

    python benchmarks/nf4_decode.py [--sweep]

Matrices of a Llama-3.1-8B block (joined as the engine has them), 1 and 2 tokens. Microseconds, medians of CUDA graphs that
go through eight copies of the matrix, so that no cache holds it. `--sweep` tries sizes of the kernel's tiles.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable

import torch
import torch.nn.functional as F

from stoker.training.model import maps, nf4, nf4_kernel

SHAPES = {"qkv": (6144, 4096), "out": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
COPIES = 8


def timed(work: Callable[[int], object]) -> float:
    """Microseconds of work(0), work(1) …, each."""
    for number in range(COPIES):
        work(number)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(COPIES):
            work(number)
    found = []
    for _ in range(15):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) * 1000 / COPIES)
    return statistics.median(found)


TILES = tuple(itertools.product((8, 16, 32), (4, 8, 16), (4, 8)))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sweep", action="store_true")
    told = parser.parse_args()
    try:
        from bitsandbytes import functional
    except Exception as problem:
        functional = None
        print(f"bitsandbytes: not here ({type(problem).__name__}: {problem})")
    print(torch.cuda.get_device_name(), torch.__version__)
    for name, (rows, columns) in SHAPES.items():
        weight = (torch.randn(rows, columns, device="cuda") * 0.02).bfloat16()
        groups = [nf4.join([nf4.quantize(weight)])[0] for _ in range(COPIES)]
        whole = [weight.clone() for _ in range(COPIES)]
        for tokens in (1, 2):
            x = torch.randn(tokens, columns, device="cuda").bfloat16()
            row = {
                "bf16": timed(lambda n, x=x, whole=whole: F.linear(x, whole[n])),
                "dequantize": timed(lambda n, x=x, groups=groups: x @ maps.dequantized(groups[n], x.dtype).t()),
                "ours": timed(lambda n, x=x, groups=groups: maps.by_codes(groups[n], x)),
            }
            if functional is not None and tokens == 1:
                codes, state = functional.quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
                held = [codes.clone() for _ in range(COPIES)]
                row["bitsandbytes"] = timed(
                    lambda n, x=x, held=held, state=state: functional.gemv_4bit(x, held[n].t(), state=state)
                )
            speed = nf4.BITS / 8 * rows * columns / row["ours"] / 1e6
            print(
                f"{name:8} {tokens:3}", *(f"{key} {value:7.1f} us" for key, value in row.items()), f"{speed:.2f} TB/s"
            )
            if told.sweep and tokens == 1:
                sweep(x, groups, rows)


def sweep(x: torch.Tensor, groups: list[tuple[nf4.Joined, ...]], rows: int) -> None:
    levels, second = nf4._on(nf4.LEVELS, x.device), nf4._on(nf4.second_levels(), x.device)
    out, found = x.new_empty(rows), []
    for how in TILES:

        def work(n: int, how: tuple[int, int, int] = how) -> None:
            q = groups[n][0]
            nf4_kernel.product(x, q.codes, q.scales, q.second, q.offsets, levels, second, out, how)

        try:
            found.append((timed(work), how))
        except Exception as problem:  # more registers or shared memory than there are
            print(f"           {how}: {type(problem).__name__}")
    print("          ", "  ".join(f"{how} {time:.1f}" for time, how in sorted(found)[:5]))


if __name__ == "__main__":
    main()
