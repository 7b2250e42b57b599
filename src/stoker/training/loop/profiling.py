"""--profile: a trace of a few steps, and the ten costliest items."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

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
