"""Tokens per second, MFU, memory, time left; the time until the first step; and --profile."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from stoker.training.fit.cards import peak_of


class Speed:
    """Over the last steps whose numbers have come. The very first rate holds the compilation."""

    def __init__(self, flops_per_token: int, ranks: int, device: torch.device, window: int = 20) -> None:
        self._flops, self._ranks, self._device = flops_per_token, ranks, device
        self._peak = peak_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
        self._seen: deque[tuple[float, int]] = deque(maxlen=window + 1)
        self._tokens = 0

    def begin(self) -> None:
        """From here on it is training: after the start, or after a validation."""
        self._seen.clear()
        self._seen.append((time.perf_counter(), self._tokens))

    def step(self, tokens: int, when: float | None) -> None:
        """`when` it was done; None: just now."""
        self._tokens += tokens
        self._seen.append((time.perf_counter() if when is None else when, self._tokens))

    @property
    def tokens_per_s(self) -> float | None:
        if len(self._seen) < 2:
            return None
        (begin, before), (end, after) = self._seen[0], self._seen[-1]
        return (after - before) / max(end - begin, 1e-9)

    @property
    def seconds_per_step(self) -> float | None:
        return (self._seen[-1][0] - self._seen[0][0]) / (len(self._seen) - 1) if len(self._seen) >= 2 else None

    @property
    def mfu(self) -> float | None:
        rate = self.tokens_per_s
        return rate * self._flops / (self._peak * self._ranks) if rate and self._peak else None

    def memory(self) -> int | None:
        """Peak bytes of this rank's GPU; None on CPUs."""
        return torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else None


class Startup:
    """Where the seconds before the first step went. Counted from the start of this process: Python and its imports are part of it."""

    def __init__(self) -> None:
        self._last = self._began = os.stat("/proc/self").st_ctime
        self._parts: list[tuple[str, float]] = []

    def done(self, name: str) -> None:
        now = time.time()
        self._parts.append((name, now - self._last))
        self._last = now

    def said(self) -> str:
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self._parts)
        return f"{self._last - self._began:.1f} s: {parts}"


WARM_UP = 3


class Profile:
    """On rank 0. Steps are counted by `step()`; does nothing when not asked for."""

    def __init__(self, steps: int, folder: str, device: torch.device, say: Callable[[str], None]) -> None:
        self._left, self._wait = steps, WARM_UP
        self._folder, self._device, self._say = folder, device, say
        self._profiler: Any = None

    def step(self) -> None:
        if self._wait > 0:
            self._wait -= 1
            if self._wait == 0 and self._left:
                kinds = [torch.profiler.ProfilerActivity.CPU] + (
                    [torch.profiler.ProfilerActivity.CUDA] if self._device.type == "cuda" else []
                )
                self._profiler = torch.profiler.profile(activities=kinds)
                self._profiler.__enter__()
            return
        if self._profiler is None:
            return
        self._left -= 1
        if self._left == 0:
            self.close()

    def close(self) -> None:
        if self._profiler is None:
            if self._left and self._wait:
                self._say(f"profile: the run was over before its {WARM_UP} steps of warm-up: nothing was traced")
            return
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        profiler, self._profiler = self._profiler, None
        profiler.__exit__(None, None, None)
        path = os.path.join(self._folder, "profile.json")
        profiler.export_chrome_trace(path)
        gpu = self._device.type == "cuda"
        rows = sorted(profiler.key_averages(), key=lambda row: -_cost(row, gpu))
        whole = sum(_cost(row, gpu) for row in rows) or 1.0
        self._say(
            f"profile: {path} (open it in ui.perfetto.dev); the ten costliest, by {'GPU' if gpu else 'CPU'} time:"
        )
        for row in rows[:10]:
            self._say(
                f"  {_cost(row, gpu) / whole:6.1%} {_cost(row, gpu) / 1e3:10.2f} ms {row.count:7d} × {row.key[:100]}"
            )


def _cost(row: Any, gpu: bool) -> float:
    return float(row.self_device_time_total if gpu else row.self_cpu_time_total)
