"""How long a rank computes in a step, and how long it then waits for the gradients of the others.

Compute ends when the model's first parameter has its gradient: backward reaches it last, and only then does DDP wait.
No host sync: on GPUs events are recorded on the stream and read two steps later, when the loop has heard the step they
belong to.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import torch
from torch import nn

Marks = tuple[Any, Any, Any]  # begin, own work done, exchange done


class StepClock:
    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._device, self._cuda = device, device.type == "cuda"
        self.lag = 2 if self._cuda else 0  # steps between a time and the step that carries it to the others
        self._begin = self._computed = None
        self._done: deque[Marks] = deque(maxlen=self.lag + 1)
        first = next(one for one in model.parameters() if one.requires_grad)
        first.register_post_accumulate_grad_hook(self._own_work_done)  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        self._begin = now(self._device)

    def _own_work_done(self, parameter: torch.Tensor) -> None:
        self._computed = now(self._device)  # of the last micro-step, in the end

    def end(self) -> None:
        self._done.append((self._begin, self._computed, now(self._device)))

    def read(self) -> tuple[float, float]:
        """Seconds (computing, waiting) of the step `lag` before the newest; zeros where there was none."""
        if len(self._done) <= self.lag:
            return 0.0, 0.0
        begin, computed, done = self._done[0]
        if begin is None or computed is None:
            return 0.0, 0.0
        if self._cuda:
            return begin.elapsed_time(computed) / 1000, computed.elapsed_time(done) / 1000
        return computed - begin, done - computed


def now(device: torch.device) -> Any:
    """Seconds; on a GPU an event on its stream."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
