"""micro_batch: auto. The largest number of samples whose worst case fits: full context, gradients kept, with the
optimizer's step.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import stoker
from stoker.training.optim.optimizer import Optimizer, gradient_norm
from stoker.training.parallel.group import Group
from stoker.training.parallel.split import even_micro

SPARE = 0.92  # of what is free: fragments, NCCL's buffers, an evaluation
WITHOUT_GPU = 8


def largest_micro(
    forward_backward: Callable[[Tensor], None],
    optimizer: Optimizer,
    group: Group,
    *,
    share: int,
    context: int,
    vocabulary: int,
    say: Callable[[str], None],
    own: bool = False,
    halvings: int = 0,
) -> int:
    """Two small trials give the bytes per sample, a third proves the guess; one that runs out of memory is made smaller
    until it fits.

    All ranks try the same numbers and agree on each outcome: unlike cards take what the smallest can. `own`: each takes
    what it can itself. Sharded, a trial exchanges weights: a rank that ran out of memory alone can't take the others
    back, so it fails, and the launcher starts again with `halvings` of the guess.
    """
    device = group.device
    sharded = group.strategy == "fsdp" and group.world > 1
    agreed = (lambda value: value) if own else group.smallest
    if device.type != "cuda":
        found = even_micro(share, min(share, WITHOUT_GPU))
        say(f"micro-batch auto: {found} (no GPU to fill)")
        return found

    def peak(micro: int) -> int | None:
        found = 0
        try:
            found = _trial(forward_backward, optimizer, micro, context, vocabulary, device)
        except torch.OutOfMemoryError:
            if sharded:
                raise
            found = 0
        optimizer.zero()
        torch.cuda.empty_cache()
        return found if agreed(found) else None

    if sharded:
        stoker.mark("CAN-HALVE-MICRO-BATCH")
    one = peak(1)
    if one is None:
        raise torch.OutOfMemoryError(
            "one sample does not fit: shorten data.context_length, set compute.recompute full, or use parallel.strategy"
            " fsdp"
        )
    two = peak(2) if share > 1 else None
    if two is None:
        return 1
    free, _ = torch.cuda.mem_get_info(device)
    room = (free + torch.cuda.memory_reserved(device)) * SPARE
    guess = agreed(min(share, max(2, int((room - one) // max(two - one, 1)) + 1)))
    guess = even_micro(share, max(guess >> halvings, 1))
    while guess > 2 and peak(guess) is None:
        guess = even_micro(share, max(guess * 7 // 8, 2))
    say(f"micro-batch auto: {guess} ({(two - one) / 2**30:.2f} GiB a sample, {room / 2**30:.0f} GiB of room)")
    return guess


def _trial(
    forward_backward: Callable[[Tensor], None],
    optimizer: Optimizer,
    micro: int,
    context: int,
    vocabulary: int,
    device: torch.device,
) -> int:
    torch.cuda.reset_peak_memory_stats(device)
    for _ in range(2):  # the second with the gradients of the first
        forward_backward(torch.randint(0, vocabulary, (micro, context), device=device))
    optimizer.step(0.0, gradient_norm(optimizer.parameters), torch.ones((), device=device))  # "bad": it moves nothing
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device)
