"""Forward and backward of a micro-batch; for small models as one CUDA graph: thousands of kernels of a few µs each are
bound by their launches.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from stoker.training.loop.feeder import MicroBatch
from stoker.training.model.attention import documents
from stoker.training.optim.optimizer import Optimizer

WARM_UP = 3  # eager calls before the capture: compilation, cuBLAS and autograd must have settled


class MicroStep:
    def __init__(self, wrapped: nn.Module, scale: Tensor, graph_with: Optimizer | None) -> None:
        self._wrapped, self._scale, self._optimizer = wrapped, scale, graph_with
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: Tensor | None = None
        self._targets: Tensor | None = None
        self._loss: Tensor | None = None
        self._calls = 0

    @property
    def graphed(self) -> bool:
        """Gradients keep their place from now on."""
        return self._optimizer is not None

    def eager(self, micro: MicroBatch) -> Tensor:
        device = self._scale.device
        packed = documents(micro.segments, device) if micro.segments is not None else None
        loss = self._wrapped(
            micro.inputs.to(device, non_blocking=True),
            micro.targets.to(device, non_blocking=True),
            self._scale,
            packed,
        )
        loss.backward()
        found: Tensor = loss.detach()
        return found

    def __call__(self, micro: MicroBatch) -> Tensor:
        if self._optimizer is None or micro.segments is not None:
            return self.eager(micro)
        self._calls += 1
        if self._calls <= WARM_UP:
            return self.eager(micro)
        if self._inputs is None or self._targets is None:
            self._inputs = micro.inputs.to(self._scale.device)
            self._targets = micro.targets.to(self._scale.device)
        else:
            self._inputs.copy_(micro.inputs, non_blocking=True)
            self._targets.copy_(micro.targets, non_blocking=True)
        if self._graph is None:
            self._capture()
        assert self._graph is not None and self._loss is not None
        self._graph.replay()
        return self._loss

    def _capture(self) -> None:
        """The gradients of the eager calls are the buffers the graph adds to."""
        assert self._inputs is not None
        dice = (
            torch.cuda.get_rng_state()
        )  # a drawn number here would make other dropout than the replay of this step draws
        kept = [p.grad.clone() if p.grad is not None else None for p in self._wrapped.parameters()]
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # once on the stream of the capture, for its workspaces
            self._wrapped(self._inputs, self._targets, self._scale, None).backward()
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):  # other threads pin memory meanwhile
            loss = self._wrapped(self._inputs, self._targets, self._scale, None)
            loss.backward()
            self._loss = loss.detach()
        for parameter, before in zip(self._wrapped.parameters(), kept, strict=True):
            if parameter.grad is not None:
                parameter.grad.zero_() if before is None else parameter.grad.copy_(before)
        torch.cuda.set_rng_state(dice)
