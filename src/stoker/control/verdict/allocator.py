"""torch's out-of-memory message as numbers. Its wording, from torch 2.9 on (CUDA, HIP and XPU):

CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 139.80 GiB of which 1.00 GiB is free.
Process 727 has 100.51 GiB memory in use. Including non-PyTorch memory, this process has 38.10 GiB memory in use. 130.00
GiB allowed; Of the allocated memory 30.00 GiB is allocated by PyTorch, with 1.00 GiB allocated in private pools (e.g.,
CUDA Graphs), and 7.00 GiB is reserved by PyTorch but unallocated.
"""

from __future__ import annotations

import re

from stoker.contract.shape import shape

_SIZE = r"([\d.]+) (bytes|[KMGT]iB)"
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


@shape
class Refused:
    """An allocation that did not fit. What the message leaves out is None."""

    needed: int
    total: int | None
    free: int | None
    own: int | None  # of this process, context included
    others: tuple[tuple[int, int], ...]  # pid, bytes
    allowed: int | None  # torch.cuda.set_per_process_memory_fraction
    allocated: int | None
    unused: int | None  # reserved by torch's allocator and not handed out

    @property
    def cached(self) -> int:
        """All that torch's allocator holds."""
        return (self.allocated or 0) + (self.unused or 0)


def read(text: str) -> Refused | None:
    head = re.search(rf"(?:CUDA|HIP|XPU) out of memory\. Tried to allocate {_SIZE}", text)
    if head is None:
        return None
    text = text[head.start() :]
    others = tuple(
        (int(pid), _bytes(count, unit))
        for pid, count, unit in re.findall(rf"Process (\d+) has {_SIZE} memory in use", text)
    )
    allocated, unused = (
        _one(text, rf"Of the allocated memory {_SIZE}"),
        _one(text, rf"{_SIZE} is reserved by PyTorch but unallocated"),
    )
    own = _one(text, rf"this process has {_SIZE} memory in use")
    if own is None and allocated is not None:
        # In a container the driver knows us by the host's pid, and torch takes its own process for another one.
        mine = min(
            (pair for pair in others if pair[1] >= allocated + (unused or 0)), key=lambda pair: pair[1], default=None
        )
        if mine is not None:
            own = mine[1]
            others = tuple(pair for pair in others if pair != mine)
    return Refused(
        _bytes(head[1], head[2]),
        _one(text, rf"total capacity of {_SIZE}"),
        _one(text, rf"of which {_SIZE} is free"),
        own,
        others,
        _one(text, rf"{_SIZE} allowed;"),
        allocated,
        unused,
    )


def _one(text: str, pattern: str) -> int | None:
    found = re.search(pattern, text)
    return _bytes(found[1], found[2]) if found else None


def _bytes(count: str, unit: str) -> int:
    return int(float(count) * _UNITS[unit])
