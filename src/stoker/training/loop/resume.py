"""What a checkpoint says of its run, and whether this run can resume from it. No torch."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

from stoker.contract import env_vars, layout, safe_io
from stoker.contract.errors import EX_CANTCREAT, EX_CONFIG, EX_NOINPUT, EX_NOPERM, Refusal
from stoker.contract.frozen import as_json, frozen, replace
from stoker.contract.options import suggest
from stoker.contract.safe_io import read_bytes
from stoker.training.checkpoint import folders, manifest
from stoker.training.checkpoint.config import CheckpointConfig
from stoker.training.data.shards import Prepared
from stoker.training.model.config import OPTIONS, ModelConfig, with_rows

# What makes another model; the rest (dropout, init_std, load, depth) only says how it came to be.
_SHAPE = ("layers", "dim", "heads", "kv_heads", "head_dim", "ff", "vocab_size",
          "rope_theta", "rope_factor", "rope_low", "rope_high", "rope_original", "norm_eps", "qk_norm", "tied", *OPTIONS)  # fmt: skip


@frozen
class Data:
    """What a sample's global index counts in."""

    key: str
    seed: int
    context: int
    count: int  # samples an epoch has


@frozen
class Position:
    step: int  # optimizer steps that are done
    samples: int  # global index of the next sample
    tokens: int  # learned so far
    best: float | None  # lowest validation loss so far
    waited: int = 0  # validations since that one
    skipped: int = 0  # steps that updated nothing: a gradient overflowed in fp16


def meta(position: Position, data: Data, model: ModelConfig, tokenizer: str, optimizer: str) -> dict[str, Any]:
    """`tokenizer`: its digest."""
    return {
        **as_json(position),
        "data": as_json(data),
        "model": as_json(replace(model, trust_remote_code=False)),  # for one run, not for whoever reads the checkpoint
        "tokenizer_digest": tokenizer,
        "optimizer": optimizer,
    }


def run_of(folder: str) -> str:
    """Which run's a checkpoint is: several may save into one folder."""
    return os.environ.get(env_vars.RUN_ID) or os.path.basename(os.path.abspath(folder))


def check(found: Mapping[str, Any], where: str, model: ModelConfig, tokenizer: str, optimizer: str) -> None:
    """One line per mismatch would be a list; the first is enough to know."""
    if found.get("tokenizer_digest") not in (None, tokenizer):  # before the shape: it decides on vocab_size
        hint = "name that one with tokenizer.path, or start from scratch (checkpoint.resume never)"
        raise Refusal(f"checkpoint {where} was trained with another tokenizer: {hint}", EX_CONFIG)
    theirs, mine = found.get("model", {}), as_json(model)
    if not isinstance(theirs, dict):
        raise Refusal(f"checkpoint {where} is damaged: its model is a {type(theirs).__name__}", EX_CONFIG)
    for key in _SHAPE:
        if key in theirs and theirs[key] != mine[key]:
            raise Refusal(
                f"checkpoint {where} is of another model: model.{key} is {theirs[key]} there and {mine[key]} here",
                EX_CONFIG,
            )
    if found.get("optimizer") not in (None, optimizer):
        raise Refusal(
            f"checkpoint {where} has the state of optim.kind {found['optimizer']}, not {optimizer}", EX_CONFIG
        )


def located(told: str) -> str:
    """A checkpoint's folder; of a run directory or its checkpoints/, the newest in it."""
    if os.path.exists(os.path.join(told, "manifest.json")):
        if not folders.is_trusted(told):
            whose = safe_io.user_name(os.lstat(told).st_uid)
            line = f"checkpoint.resume {told} belongs to {whose}, who may change it: copy it, and name the copy"
            raise Refusal(line, EX_NOPERM)
        return told
    for folder in (told, os.path.join(told, layout.CHECKPOINTS)):
        steps = {step: path for step, path in folders.steps_in(folder).items() if folders.is_trusted(path)}
        if steps:
            return steps[max(steps)]
    near = suggest(told, ("auto", "never")) if os.sep not in told else ""
    raise Refusal(
        f"checkpoint.resume {told}: there is no"
        f" checkpoint{near or '; name a run directory (runs/ID), a step-N folder, auto or never'}",
        EX_NOINPUT,
    )


def check_before_launch(told: CheckpointConfig, model: ModelConfig, optimizer: str, made: Prepared) -> int | None:
    """Refuses a checkpoint to resume from that does not fit. `model`: its shape, of a model that is loaded that of its folder.
    Gives the checkpoint's step, None where that is not known here."""
    if told.folder:
        try:
            os.makedirs(told.folder, exist_ok=True)
        except FileExistsError as problem:
            raise Refusal(
                f"checkpoint.folder {told.folder} is a file: name a folder, or a place for a new one", EX_CANTCREAT
            ) from problem
        except OSError as problem:
            raise Refusal(
                f"checkpoint.folder {told.folder} can't be made: {problem.strerror}", EX_CANTCREAT
            ) from problem
    if told.resume == "never" or (told.resume == "auto" and not told.folder):
        return None
    where = told.resume if told.resume == "auto" else located(told.resume)
    if where == "auto":
        newest = newest_in(told.folder)
        if newest is None:
            return None
        where = newest
    try:
        found = manifest.decode(read_bytes(os.path.join(where, manifest.NAME)))
    except (OSError, ValueError) as problem:
        if told.resume == "auto":
            return None  # damaged: the ranks say so and take the one before
        raise Refusal(f"checkpoint.resume {where} is not a checkpoint: {problem}", EX_NOINPUT) from problem
    if model.engine != "transformers":  # else its module knows
        check(found.meta, where, with_rows(model, made.vocab_size), made.tokenizer_digest, optimizer)
    step = found.meta.get("step")
    return step if isinstance(step, int) else None


def optimizer_of(where: str) -> str | None:
    """Whose state a checkpoint has; None: it can't be read here, and the ranks say why."""
    try:
        found = manifest.decode(read_bytes(os.path.join(where, manifest.NAME)))
    except (OSError, ValueError):
        return None
    kind = found.meta.get("optimizer")
    return kind if isinstance(kind, str) else None


def newest_in(folder: str) -> str | None:
    """The newest checkpoint in a folder of them, as the ranks choose it, but for damage."""
    steps = {step: path for step, path in folders.steps_in(folder).items() if folders.is_trusted(path)}
    return steps[max(steps)] if steps else None


def nothing_left(step: int, max_steps: int) -> str:
    """A line for somebody who may have meant `max_steps` more steps; empty where steps are left."""
    if not max_steps or step < max_steps:
        return ""
    more = f"--max-steps {step + max_steps} would make {max_steps} more"
    return f"train.max_steps {max_steps} counts from the beginning, and the checkpoint is at step {step}: {more}"


def position(found: Mapping[str, Any], data: Data) -> tuple[Position, str]:
    """(where to go on, a line to say or nothing)."""
    best = found.get("best")
    theirs, mine = found.get("data", {}), as_json(data)
    counts = [found.get(key) for key in ("step", "samples", "tokens")]
    told = best is None or (type(best) in (int, float) and math.isfinite(best))
    waited, skipped = (found[key] if type(found.get(key)) is int else 0 for key in ("waited", "skipped"))
    whole = all(type(one) is int and one >= 0 for one in (*counts, waited, skipped))
    if not isinstance(theirs, dict) or not told or not whole or skipped > found["step"]:
        raise Refusal("the checkpoint has no step number: another program wrote it", EX_CONFIG)
    other = [key for key in mine if theirs.get(key) != mine[key]]
    words = {"key": "the data", "seed": "its order", "context": "the context length", "count": "the number of samples"}
    lowest = float(best) if best is not None else None
    if not other:
        return Position(found["step"], found["samples"], found["tokens"], lowest, waited, skipped), ""
    changed = ", ".join(words[key] for key in other)
    line = f"{changed} differs from the checkpoint's: the data begins at its first sample"
    return Position(found["step"], 0, found["tokens"], lowest, waited, skipped), line
