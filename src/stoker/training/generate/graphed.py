"""A batch on a GPU. A decoding step is one CUDA graph: launched by hand its 300 kernels take ten times as long.

Everything a step reads or writes has a fixed place. Every LOOK tokens the host looks, one look late, for rows alive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from stoker.training.generate import plain
from stoker.training.generate.cached import Blocks, Cache, Prompts, Weights, as_mask, distinct, padded, seen
from stoker.training.generate.config import BUCKET, PREFILL_TOKENS, ROUND, Sampling, slots
from stoker.training.generate.sample import sample_token, token_logprobs, uniforms

LOOK = 16


class Graphed:
    """`kernels`: our Triton kernels, or None for plain torch. On a CPU the steps run as they are, for tests."""

    def __init__(self, w: Weights, rows: int, length: int, kernels: Any = None, logprobs: bool = False) -> None:
        self._weights, self._kernels, self._blocks = w, kernels, Blocks(w, kernels or plain)
        self._step_blocks = Blocks(w, kernels or plain, captured=True)
        device = w.embed.device
        # Prompts are filled up past `length` at times: what is there is turned by any angle, and seen by nobody.
        self._angles = self._blocks.angles(lambda table: torch.cat([table[:length], table[:1].expand(ROUND, -1)]))
        self.cache = Cache(w, rows, slots(length))
        self._steps: dict[tuple[int, Sampling], Callable[[], None]] = {}
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self._looking = _Looking(device)
        self.prompt_tokens = 0

        def buffer(*size: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        self._ids, self._lengths, self._positions = buffer(rows), buffer(rows), buffer(rows)
        self._alive, self._stop = buffer(rows, dtype=torch.bool), buffer(len(w.head), dtype=torch.bool)
        self._answers_from, self._slot, self._place = buffer(1), buffer(1), buffer(1)
        self._noise, self._written = buffer(length, rows, dtype=torch.float32), buffer(rows, length)
        self._slots = torch.arange(self.cache.length, device=device)
        self._keeps, kept = logprobs, length if logprobs else 0
        self.logprobs, self._logprob = buffer(rows, kept, dtype=torch.float32), buffer(rows, dtype=torch.float32)

    def forget(self) -> None:
        """The weights lie elsewhere."""
        self._steps.clear()

    def run(
        self, prompts: Prompts, indexes: Sequence[int], new_tokens: int, stop: Tensor, how: Sampling, seed: int
    ) -> Iterator[Tensor]:
        """After each token: what is written so far, [rows, so many]; on the device, and maybe still being computed."""
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        begin = -(-int(lengths.max()) // ROUND) * ROUND
        # captured before there is a state to spoil
        steps = [self._step(self._end(begin + place), how) for place in range(new_tokens - 1)]
        logits = self._start(prompts, lengths, begin, stop, uniforms(seed, indexes, new_tokens))
        self._write(logits, how, len(prompts))
        for place in range(new_tokens):
            yield self._written[: len(prompts), : place + 1]
            if place + 1 == new_tokens or ((place + 1) % LOOK == 0 and not self._looking.any(self._alive)):
                return
            steps[place]()

    def _end(self, slot: int) -> int:
        return self.cache.length if self._kernels else -(-(slot + 1) // BUCKET) * BUCKET

    def _start(self, prompts: Prompts, lengths: Tensor, begin: int, stop: Tensor, noise: Any) -> Tensor:
        rows = len(prompts)
        different, of = distinct(prompts)
        self.prompt_tokens += sum(map(len, different))
        ids = padded(different, begin)
        self._looking.begin()
        if not self._kernels:
            # slots ahead are read and weighed 0, and what an earlier batch left there may be NaN
            self.cache.kv.zero_()
        self._lengths.fill_(1)  # rows nobody asked for see one slot of whatever was there
        self._lengths[:rows] = lengths.to(self._lengths.device)
        self._positions.copy_(self._lengths - 1)
        self._alive.copy_(torch.arange(len(self._alive)) < rows)
        self._answers_from.fill_(begin)
        self._slot.fill_(begin - 1)
        self._place.zero_()
        self._stop.copy_(stop)
        self._noise[: len(noise), :rows] = torch.from_numpy(noise).to(self._noise.device)
        device = self._ids.device
        ids, own = ids.to(device), torch.tensor([len(prompt) for prompt in different], device=device)
        logits = self._blocks.prefill(ids, own, self._angles, self.cache.kv, PREFILL_TOKENS)
        if len(different) == rows:
            return logits
        self.cache.spread(of, begin)
        return logits[torch.tensor(of, device=device)]

    def _write(self, logits: Tensor, how: Sampling, rows: int) -> None:
        """Samples a token for each of the first `rows`, writes it, and goes one place on."""
        uniform = self._noise.index_select(0, self._place)[0, :rows]
        if self._kernels and how.plain and not how.greedy:
            token = self._kernels.sample_token(logits, uniform, how.temperature)
        else:
            token = sample_token(logits, uniform, how)
        token = torch.where(self._alive[:rows], token, 0)
        if self._keeps:
            self._logprob[:rows].copy_(token_logprobs(logits, token, how.temperature))
            self.logprobs.index_copy_(1, self._place, self._logprob[:, None])
        self._ids[:rows].copy_(token)
        self._written.index_copy_(1, self._place, self._ids[:, None])
        self._alive[:rows].logical_and_(~self._stop[token])
        for counter in (self._place, self._slot, self._positions):
            counter += 1

    def _one(self, end: int, how: Sampling) -> None:
        c, kernels = self._weights.config, self._kernels
        cached, scale = self.cache.kv[:, :, :, :, :end], c.attention_scale or None
        if kernels:

            def attention(q: Tensor, kv: Tensor, view: int) -> Tensor:
                y: Tensor = kernels.attend(q, kv, self._lengths, self._answers_from, self._slot, self._alive, scale)
                return y
        else:
            told = (self._slots[:end], self._lengths, self._answers_from, self._slot)
            masks = [as_mask(seen(*told, window), cached.dtype) for window in self._weights.windows]

            def attention(q: Tensor, kv: Tensor, view: int) -> Tensor:
                return plain.attend(q, kv, masks[view], scale, c.attention_cap)

        x, delta = self._step_blocks.run(self._ids, self._positions, self._angles, cached, self._slot, 1, attention)
        self._write(self._step_blocks.logits(x, delta), how, len(self._ids))

    def _step(self, end: int, how: Sampling) -> Callable[[], None]:
        if (end, how) not in self._steps:
            self._steps[end, how] = self._captured(end, how)
        return self._steps[end, how]

    def _captured(self, end: int, how: Sampling) -> Callable[[], None]:
        def step() -> None:
            self._one(end, how)

        if self._pool is None:
            return step
        for counter in (self._ids, self._positions, self._slot, self._place, self._answers_from):
            counter.zero_()
        self._lengths.fill_(1)
        return captured(step, self._pool)


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


class _Looking:
    """Whether any row was alive one look, 16 tokens, before: so the GPU never waits for the host."""

    def __init__(self, device: torch.device) -> None:
        cuda = device.type == "cuda"
        self._flags = torch.zeros(2, dtype=torch.bool, pin_memory=cuda)
        self._events = [torch.cuda.Event() for _ in range(2)] if cuda else []  # type: ignore[no-untyped-call]
        self._count = 0

    def begin(self) -> None:
        self._count = 0

    def any(self, alive: Tensor) -> bool:
        now, before = self._count % 2, (self._count + 1) % 2
        self._flags[now].copy_(alive.any(), non_blocking=True)
        if self._events:
            self._events[now].record()
        self._count += 1
        if self._count == 1:
            return True
        if self._events:
            self._events[before].synchronize()
        return bool(self._flags[before])
