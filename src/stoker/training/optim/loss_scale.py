"""What the loss is multiplied by where products have fp16: its gradients begin at 6e-8 and end at 65504.

The scale is halved when a gradient overflows, and that update is left out; it is doubled after many steps without one. It
lives on the device: a step needs no word from the GPU. What overflows at the smallest scale is no matter of scaling.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stoker.contract.typed_values import read_fields

START, SMALLEST, LARGEST = 65536.0, 1.0, 2.0**24
GROWS_AFTER = 2000  # steps


class LossScale:
    def __init__(self, device: torch.device) -> None:
        self.value = torch.full((), START, device=device)
        self._good = torch.zeros((), dtype=torch.int32, device=device)  # steps since it changed

    def lasting(self, overflowed: Tensor) -> Tensor:
        """Where it overflowed though the scale can't be smaller."""
        return overflowed * (self.value <= SMALLEST)

    def update(self, overflowed: Tensor, bad: Tensor) -> None:
        """After a step. Once one is `bad` it stays, so that a replay computes the same."""
        before = self.value.clone(), self._good.clone()
        torch._amp_update_scale_(self.value, self._good, overflowed, 2.0, 0.5, GROWS_AFTER)
        self.value.clamp_(SMALLEST, LARGEST)
        for now, old in zip((self.value, self._good), before, strict=True):
            now.copy_(torch.where(bad > 0, old, now))

    def to_json(self) -> dict[str, float]:
        """For a checkpoint; waits for the device."""
        return {"value": float(self.value), "good": int(self._good)}

    def go_on(self, told: Any) -> None:
        """As a checkpoint has it; one of a run without a scale says nothing. ValueError: it is no scale."""
        if told is not None:
            kept = read_fields({"value": "float", "good": "Count"}, told)
            self.value.fill_(min(max(kept["value"], SMALLEST), LARGEST))
            self._good.fill_(min(kept["good"], GROWS_AFTER))


def scale_for(dtype: torch.dtype, device: torch.device) -> LossScale | None:
    """None: gradients of that dtype have fp32's range."""
    return LossScale(device) if dtype == torch.float16 else None
