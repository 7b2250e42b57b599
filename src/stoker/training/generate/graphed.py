"""A decoding step as one CUDA graph: launched by hand its 300 kernels take ten times as long."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch


def captured(step: Callable[[], None], pool: Any) -> Callable[[], None]:
    """The step as one CUDA graph. It runs once before: what it reads must be valid."""
    beside = _beside()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):  # compiles kernels, gives cuBLAS its workspace: a capture may do neither
        step()
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    # thread_local: NCCL's watchdog and loaders that pin memory go on meanwhile
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        step()
    return graph.replay


@cache
def _beside() -> Any:
    """One for all captures: a stream keeps the memory that was used on it."""
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]
