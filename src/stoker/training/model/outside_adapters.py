"""Adapters on transformers' own modules: peft computes them; folders are read and written as those of our decoder."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from stoker.contract.errors import EX_CONFIG, EX_UNAVAILABLE, Refusal, parsing
from stoker.contract.units import plural
from stoker.training.model import adapters
from stoker.training.model.config import EVERY, LORA, AdapterConfig
from stoker.training.model.hf_stream import read_stored
from stoker.training.model.outside import Outside
from stoker.training.model.outside_folder import first_line

Say = Callable[[str], None]


def _library() -> Any:
    try:
        return import_module("peft")
    except ImportError as problem:
        raise Refusal(
            f"adapters with model.engine transformers: peft can't be imported here: {problem}", EX_UNAVAILABLE
        ) from problem


def attach(model: Outside, told: AdapterConfig, seed: int) -> None:
    """Nothing else learns. B is zero: the model begins as it was."""
    peft = _library()
    wanted = [one.strip() for one in told.lora_targets.split(",") if one.strip()]
    also = [one.strip() for one in told.also_train.split(",") if one.strip()]
    config = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=told.lora_rank,
        lora_alpha=told.lora_alpha,
        lora_dropout=told.lora_dropout,
        use_rslora=told.rslora,
        target_modules=EVERY if wanted == [EVERY] else wanted,
        modules_to_save=also or None,
    )
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model.module = peft.get_peft_model(model.module, config)
    except ValueError as problem:
        raise Refusal(f"adapter.lora_targets {told.lora_targets}: {first_line(problem)}", EX_CONFIG) from problem


@torch.no_grad()
def fill(model: Outside, told: AdapterConfig, folder: str, say: Say) -> None:
    """The adapters that `attach` made, from a folder of peft's."""
    with parsing(f"adapter {folder}"):
        stored = adapters.stored_tensors(folder)
    wanted = _tensors(model)
    for name, tensor in wanted.items():
        adapters.refuse_misfit(stored.get(name), name, tuple(tensor.shape), folder)
    left = sorted(stored.keys() - wanted.keys())
    if left:
        raise Refusal(f"adapter {folder}: this model has no place for {left[0]}", EX_CONFIG)
    found = _library().set_peft_model_state_dict(model.module, {name: read_stored(stored[name]) for name in wanted})
    assert not found.unexpected_keys, f"{found.unexpected_keys[0]} has its place"
    say(f"adapter from {folder}: rank {told.lora_rank}, {plural(len(wanted), 'tensor')}")


def _tensors(model: Outside) -> dict[str, Tensor]:
    found: dict[str, Tensor] = _library().get_peft_model_state_dict(model.module, save_embedding_layers=False)
    return found


def merge(model: Outside, folder: str, say: Say) -> None:
    """An adapter's folder becomes part of a model that answers."""
    adapters.check_base(folder)
    told, _ = adapters.settings_of(folder, LORA)
    attach(model, told, 0)
    fill(model, told, folder, say)
    model.module = model.module.merge_and_unload()


def save(model: Outside, told: AdapterConfig, base: str, folder: str, files: adapters.Files | None, say: Say) -> None:
    tensors = {name: tensor.detach().float().cpu().contiguous() for name, tensor in _tensors(model).items()}
    config = model.module.peft_config["default"]
    names = {key: sorted(getattr(config, key) or ()) for key in ("target_modules", "modules_to_save")}
    own = {**names, "modules_to_save": names["modules_to_save"] or None, "fan_in_fan_out": bool(config.fan_in_fan_out)}
    adapters.write_folder(tensors, adapters.settings_json(told, base, **own), os.path.abspath(base), folder, files, say)


def begun(model: Outside) -> Callable[[], Any]:
    """The model without its adapters, for a pass without gradients."""

    @contextmanager
    def block() -> Iterator[Outside]:
        training = model.training
        model.eval()
        try:
            with model.module.disable_adapter(), torch.no_grad():
                yield model
        finally:
            model.train(training)

    return block
