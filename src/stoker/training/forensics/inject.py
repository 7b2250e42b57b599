"""A drill: one NaN or Inf, put where and when it is asked for, so that anybody can see the report before it is needed."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from stoker.contract.names import EX_CONFIG, Refusal
from stoker.contract.settings import suggest
from stoker.training.forensics.config import Injection
from stoker.training.forensics.statistics import local


class Drill:
    """Set `step` before each step, and before its replay: what is injected depends on nothing else."""

    def __init__(self, injection: Injection | None, model: nn.Module, rank: int) -> None:
        self.step = -1
        self._injection = injection if injection is not None and injection.rank in (None, rank) else None
        self._parameter: nn.Parameter | None = None
        if self._injection is None:
            return
        if self._injection.gradient:
            self._parameter = _named(dict(model.named_parameters()), self._injection.where, "parameter")
            if not self._parameter.requires_grad:
                raise Refusal(f"nan.inject: parameter {self._injection.where} is frozen and has no gradient", EX_CONFIG)
        else:
            modules = {name: module for name, module in model.named_modules() if name}
            _named(modules, self._injection.where, "module").register_forward_hook(self._spoil)

    def _due(self) -> bool:
        return self._injection is not None and self.step == self._injection.step

    def _spoil(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        if not self._due() or self._injection is None:
            return None
        first, *rest = output if isinstance(output, (tuple, list)) else (output,)
        spot = torch.zeros_like(first, dtype=torch.bool)
        spot[(0,) * spot.dim()] = True
        spoiled = first.masked_fill(spot, self._injection.value)
        return type(output)((spoiled, *rest)) if isinstance(output, (tuple, list)) else spoiled

    def spoil_gradients(self) -> None:
        """After the backward, before the norm."""
        if self._parameter is None or not self._due() or self._injection is None or self._parameter.grad is None:
            return
        mine = local(self._parameter.grad)
        if mine.numel():  # an uneven shard may be empty
            mine[(0,) * mine.dim()] += self._injection.value


def _named(known: dict[str, Any], name: str, kind: str) -> Any:
    if name not in known:
        raise Refusal(f"nan.inject: the model has no {kind} {name}{suggest(name, known)}", EX_CONFIG)
    return known[name]
