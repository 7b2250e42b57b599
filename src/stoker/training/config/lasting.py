"""What makes a run the same run when it is started again, and what belongs to it though nobody said it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from stoker.contract import layout
from stoker.contract.shape import replace
from stoker.control.record import ownership, reader
from stoker.training.config.keys import DEFAULTS, config_of, values_of
from stoker.training.config.schema import Config
from stoker.training.model import hf_hub

# A run started again with another of these goes on: they change what is said and kept, or how the work is cut, not what
# is learned.
PASSING = ("train.log_every", "train.log_to", "train.profile", "train.profile_steps", "train.eval_every", "train.eval_first", "train.eval_tokens",
           "checkpoint.every_steps", "checkpoint.every", "checkpoint.keep", "checkpoint.keep_best", "checkpoint.resume", "data.num_workers", "data.cache",
           "parallel.timeout", "parallel.strategy", "parallel.balance", "batch.micro", "compute.compile", "compute.recompute", "compute.cuda_graphs",
           "needs.gpus", "needs.vram")  # fmt: skip


def lasting(c: Config) -> Config:
    values = values_of(c)
    return config_of(c.preset, {**values, **{name: DEFAULTS[name] for name in PASSING}})


def pinned(c: Config) -> Config:
    """A path through `runs/latest` as the run that is latest now: the new run will be it before its ranks look."""
    return config_of(c.preset, {name: _pinned(value) for name, value in values_of(c).items()})


def _pinned(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_pinned(one) for one in value)
    if not isinstance(value, str) or layout.LATEST not in value.split("/"):
        return value
    parts = value.split("/")
    link = "/".join(parts[: parts.index(layout.LATEST) + 1])
    if not os.path.islink(link):
        return value
    root = os.path.dirname(link)
    rest = parts[parts.index(layout.LATEST) + 1 :]
    # Of another user, in a folder that several share.
    if os.path.exists(link) and not ownership.is_mine(os.stat(link).st_uid, root):
        return os.path.join(reader.find(None, root or ".").dir, *rest)
    return os.path.join(root, os.readlink(link), *rest)


def with_tokenizer(c: Config, say: Callable[[str], None]) -> Config:
    """Loaded weights bring their own tokenizer."""
    return replace(c, tokenizer=replace(c.tokenizer, path=hf_hub.tokenizer_of(c.model.load, say)))
