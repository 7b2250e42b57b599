"""The model that a run began with, as DPO and GRPO compare with it. Beside frozen weights it needs no second copy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from stoker.training.model.decoder import Decoder
from stoker.training.model.linear import Linear
from stoker.training.model.maps import Adapted, Adapter, Frozen, Map

Reference = Callable[[], AbstractContextManager[Decoder]]  # the model to compute with, within the block


def copied(model: Decoder) -> Reference:
    """One with weights of its own."""
    return lambda: nullcontext(model)


class Beginning:
    """The model that learns, computing as it did before the first step: fresh adapters are left out, loaded ones are as
    they were loaded, and so is what else learns. Made before a checkpoint is read.
    """

    def __init__(self, model: Decoder, *, loaded: bool) -> None:
        self._model = model
        layers = [module for module in model.modules() if isinstance(module, Linear) and module.adapter is not None]
        self._maps: list[tuple[Linear, Map]] = [
            (layer, Adapted(layer, _copy(layer.adapter)) if loaded and layer.adapter else Frozen(layer))
            for layer in layers
        ]
        inside = {id(parameter) for layer in layers if layer.adapter for parameter in layer.adapter.parameters()}
        self._values: list[tuple[Any, Tensor]] = [
            (parameter, parameter.detach().clone())
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and id(parameter) not in inside and name not in model.own
        ]

    @contextmanager
    def __call__(self) -> Iterator[Decoder]:
        """For a pass without gradients. Nothing is dropped in it."""
        model, training = self._model, self._model.training
        learning = [(layer, layer.map) for layer, _ in self._maps]
        now = [(parameter, parameter.data) for parameter, _ in self._values]
        model.eval()
        _put(self._maps, self._values)
        try:
            with torch.no_grad():
                yield model
        finally:
            _put(learning, now)
            model.train(training)


def _put(maps: list[tuple[Linear, Map]], values: list[tuple[Any, Tensor]]) -> None:
    for layer, kind in maps:
        layer.map = kind
    for parameter, value in values:
        parameter.data = value


def _copy(adapter: Adapter) -> Adapter:
    made = Adapter(adapter.a.shape[1], adapter.outputs, adapter.parts, adapter.rank, adapter.scale).to(adapter.a.device)
    made.load_state_dict(adapter.state_dict())
    return made.requires_grad_(False)
