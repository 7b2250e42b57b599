"""A model as a folder that `transformers` opens and chats with: weights, tokenizer, template, tokens that end it."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from stoker import __version__
from stoker.contract.errors import EX_CANTCREAT, EX_DATAERR, EX_NOINPUT, EX_USAGE, Refusal, parsing
from stoker.contract.frozen import frozen, replace
from stoker.contract.masking import mask_text
from stoker.contract.safe_io import read_text, write_atomic
from stoker.contract.text import escape, parse_json
from stoker.contract.typed_values import read_fields
from stoker.contract.yaml_text import YamlError, parse_yaml
from stoker.control.record import run_record
from stoker.control.record.metrics_log import read_metrics
from stoker.training.checkpoint.reading import Checkpoint, open_checkpoint
from stoker.training.generate.finding import HF, RESULT, Found
from stoker.training.model import adapters, hf, outside
from stoker.training.model.config import AdapterConfig, ModelConfig, check_options
from stoker.training.model.hf_config import base_of, kept_text, shape_for, shape_of, tokenizer_in
from stoker.training.model.hf_files import places
from stoker.training.model.hf_read import Added, Source, added_by
from stoker.training.model.hf_write import (
    CARD,
    CARD_MARK,
    EXPORTED,
    SCORE,
    beside,
    refuse_existing,
    refuse_other_models,
)
from stoker.training.tokenizer.chat import write_template
from stoker.training.tokenizer.tokenizer import Tokenizer
from stoker.training.tokenizer.tokenizer import load as load_tokenizer

SETTINGS = "config.yaml"
_NUMBERS = ("step", "loss", "val_loss", "val_bits_per_byte", "val_right", "reward", "tokens")
_TOLD = ("model.load", "data.path", "data.validation", "grpo.prompts", "reward.pairs", "dpo.pairs", "tokenizer.path")


def card_of(run: str, stage: str = "") -> str:
    """Empty where the run has no settings: it was no `stoker train`."""
    path = os.path.join(run, SETTINGS)
    if not os.path.isfile(path):
        return ""
    try:
        text = read_text(path, inside=True)
        told = parse_yaml(text)
    except (OSError, YamlError, ValueError) as problem:
        raise Refusal(f"{path} can't be read: {getattr(problem, 'strerror', None) or problem}", EX_DATAERR) from problem
    rows = [f"| {key} | {shown} |" for key in _TOLD if (shown := _shown(told, key))]
    numbers: dict[str, object] = {}
    for line in read_metrics(run):
        numbers |= {key: line[key] for key in _NUMBERS if isinstance(line.get(key), (int, float))}
    results = [f"| {key} | {value} |" for key, value in numbers.items()]
    parts = [
        "---\nlibrary_name: transformers\ntags:\n- stoker\n---",
        CARD_MARK,
        f"# {_text(os.path.basename(os.path.abspath(run)))}",
        f"Trained with Stoker {__version__}{f', stage {_text(stage)}' if stage else ''}.",
        "## Data\n\n| | |\n|---|---|\n" + "\n".join(rows) if rows else "",
        "## Result\n\n| | at the last step that measured it |\n|---|---|\n" + "\n".join(results) if results else "",
        "## Settings\n\n```yaml\n" + text.replace("```", "` ` `").strip() + "\n```",
    ]
    return mask_text("\n\n".join(filter(None, parts))) + "\n"


def _shown(told: object, key: str) -> str:
    for name in key.split("."):
        told = told.get(name) if isinstance(told, dict) else None
    values = told if isinstance(told, list) else [told]
    return ", ".join(_text(str(value)) for value in values if value not in (None, ""))


def _text(value: str) -> str:
    """One line that Markdown takes for text: no table, no HTML, no link."""
    return re.sub(r"([|\[\]`])", r"\\\1", escape(value, 200)).replace("<", "&lt;")


Say = Callable[[str], None]
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def export(
    found: Found, out: str, dtype: str | None, tokenizer: str | None, say: Say, trust_remote_code: bool = False,
    merge: bool = False, overwrite: bool = True,
) -> None:  # fmt: skip
    """Write the model to the folder `out`, in transformers' format.

    `trust_remote_code` allows Python code of the folder that a checkpoint's model was loaded from. `merge` makes an adapter
    part of the weights. Without `overwrite` an earlier export in `out` is refused; other files always are.
    """
    refuse_other_models(out)
    _refuse_inputs(out, found.folder)  # --force would not help
    if not overwrite:
        refuse_existing(out)
    with parsing(found.folder):
        _export(found, out, dtype, tokenizer, say, trust_remote_code, merge)


def _export(
    found: Found, out: str, dtype: str | None, tokenizer: str | None, say: Say, trust_remote_code: bool, merge: bool
) -> None:
    if found.checkpoint:
        return _checkpoint(found.folder, out, dtype, tokenizer, say, trust_remote_code, merge)
    is_adapter = base_of(found.folder) != found.folder
    if is_adapter and not merge:
        raise Refusal(
            f"{found.folder} is an adapter, which peft can open as it is: add --merge to write the whole model with the adapter in"
            " its weights",
            EX_USAGE,
        )
    if merge and not is_adapter:
        raise Refusal(f"{found.folder} is a whole model: there is nothing to merge; leave --merge out", EX_USAGE)
    _folder(found.folder, out, dtype, tokenizer, say)


def _folder(folder: str, out: str, dtype: str | None, tokenizer: str | None, say: Say) -> None:
    base, scored = base_of(folder), os.path.exists(os.path.join(folder, SCORE))
    where = tokenizer or tokenizer_in(folder)
    _refuse_inputs(out, folder, base, where)
    c = replace(shape_of(folder), load=base)
    added = added_by(folder, c, scored, say) if base != folder else None
    words = load_tokenizer(where)

    def more(fresh: str) -> None:
        _beside(fresh, words, os.path.dirname(os.path.realpath(folder)), say)
        if scored:
            write_atomic(os.path.join(fresh, SCORE), beside(os.path.join(folder, SCORE)))
            say(
                f"a reward model: its score is in {SCORE}, for `--grpo.reward_model`; transformers opens the decoder"
                " without it"
            )

    context = c.longest or 2048
    ends = () if words.template else words.stop_ids  # ChatML's: a folder with its own template says where answers end
    how: dict[str, Any] = {"say": say, "dtype": _dtype(dtype, added), "tokenizer_folder": where, "end_ids": ends}
    source = Source(folder, c, added)
    hf.save_from(source.tensors(torch.float32), c, out, context_length=context, more=more, **how)


def _refuse_inputs(out: str, *inputs: str) -> None:
    """An export may be replaced, but not by what is made of it."""
    if os.path.realpath(out) in map(os.path.realpath, inputs):
        raise Refusal(f"{out} is the folder of the model or of its tokenizer: give another folder", EX_CANTCREAT)


def _dtype(asked: str | None, added: Added | None) -> torch.dtype | None:
    """None: as the loaded weights are."""
    if asked:
        return DTYPES[asked]
    return torch.bfloat16 if added else None


def _beside(folder: str, words: Tokenizer, run: str, say: Say) -> None:
    """`run`: its directory, or another folder that says nothing."""
    write_atomic(os.path.join(folder, EXPORTED), f"stoker {__version__}\n")
    if line := write_template(folder, words):
        say(line)
    stage = run_record.read_json(os.path.join(run, RESULT))
    card = card_of(run, str(stage.get("stage", "")) if isinstance(stage, dict) else "")
    if card:
        write_atomic(os.path.join(folder, CARD), card.encode("utf-8", "replace"))


def _checkpoint(
    path: str, out: str, dtype: str | None, tokenizer: str | None, say: Say, trust: bool, merge: bool
) -> None:
    opened = open_checkpoint(path)
    told, data = opened.meta.get("model"), opened.meta.get("data")
    context = data.get("context") if isinstance(data, dict) else None
    try:
        shape = ModelConfig(
            **read_fields({f"{name}?": kind for name, kind in ModelConfig.__annotations__.items()}, told)
        )
        if not isinstance(context, int):
            raise ValueError("no data.context")
        kept = parse_json(shape.kept or "{}")
        if not isinstance(kept, dict):
            raise ValueError("no config.json")
        shape = replace(shape, kept=kept_text(kept) if kept else "")
    except ValueError as problem:
        line = f"{path} has no valid description of its model ({problem}): `stoker train` did not write it"
        raise Refusal(line, EX_DATAERR) from problem
    check_options(shape, path)
    where = tokenizer or _tokenizer_of(opened)
    _refuse_inputs(out, path, where, *([shape.load, base_of(shape.load)] if shape.load else []))
    words = load_tokenizer(where)
    if not words.has_digest(opened.meta.get("tokenizer_digest")):
        raise Refusal(
            f"{path} was trained with another tokenizer than {where}: give that one with --tokenizer", EX_DATAERR
        )
    if "model.score" in opened.tensors:
        say(
            "this is a reward model's checkpoint: its decoder is exported without the score; hf/ of a finished run has both"
        )
    run = os.path.dirname(os.path.dirname(os.path.abspath(path)))
    files = _Files(where, lambda fresh: _beside(fresh, words, run, say))
    added = _adapter(opened, shape) if opened.meta.get("adapter") is not None else None
    if added is not None and shape.engine == "transformers":
        raise Refusal(
            f"{path} is an adapter's checkpoint that only peft can read: export hf/ of the finished run", EX_USAGE
        )
    if added is not None and not merge:
        told, base = added
        found = adapters.peft_tensors(shape, told, partial(_read, opened))
        return adapters.write(shape, told, base, out, files, say, found=found)
    if added is None and merge:
        raise Refusal(f"{path} holds whole weights: there is nothing to merge; leave --merge out", EX_USAGE)
    ends = words.stop_ids[:1] if words.template else words.stop_ids
    how: dict[str, Any] = {"say": say, "tokenizer_folder": where, "end_ids": ends, "more": files.write}
    if added is not None:
        told, base = added
        tensors = adapters.peft_tensors(shape, told, partial(_read, opened))
        joined = Added(shape, told, {name: partial(Tensor.clone, tensor) for name, tensor in tensors.items()})
        shape = replace(shape, load=base)
        how["dtype"], source = _dtype(dtype, joined), Source(base, shape, joined)
        return hf.save_from(source.tensors(torch.float32), shape, out, context_length=context, **how)
    how["dtype"] = _dtype(dtype, None)
    if shape.engine == "transformers":
        model = _module(opened, shape, context, say, trust)
        return outside.save(model, out, **how)
    hf.save_from(_tensors(opened, shape), shape, out, context_length=context, **how)


@frozen
class _Files:
    tokenizer: str
    write: Say


def _adapter(opened: Checkpoint, c: ModelConfig) -> tuple[AdapterConfig, str]:
    """(its settings, the folder of the weights beside it)."""
    told = opened.meta["adapter"]
    try:
        kinds = {f"{name}?": kind for name, kind in AdapterConfig.__annotations__.items()}
        own = {key: value for key, value in told.items() if key != "base"} if isinstance(told, dict) else told
        settings = AdapterConfig(**read_fields(kinds, own))
    except ValueError as problem:
        line = f"{opened.path} has no valid description of its adapter ({problem}): `stoker train` did not write it"
        raise Refusal(line, EX_DATAERR) from problem
    if not os.path.isdir(c.load):
        raise Refusal(
            f"{opened.path}: its model was loaded from {c.load}, which no longer exists: put it back", EX_NOINPUT
        )
    base = os.path.abspath(base_of(c.load))
    if adapters.base_digest(base) != told.get("base"):
        raise Refusal(f"{opened.path}: its adapter was not trained on the weights that are now in {base}", EX_DATAERR)
    return settings, base


def _read(opened: Checkpoint, name: str) -> Tensor:
    if f"model.{name}" not in opened.tensors:
        raise Refusal(f"{opened.path} has no {name}: it belongs to another kind of model", EX_DATAERR)
    return opened.read(f"model.{name}")


def _module(opened: Checkpoint, shape: ModelConfig, context: int, say: Say, trust: bool) -> outside.Outside:
    """Return transformers' module with the checkpoint's parameters; buffers come from the folder it was loaded from."""
    if not os.path.isdir(shape.load):
        raise Refusal(
            f"{opened.path}: its model was loaded from {shape.load}, which no longer exists: put it back", EX_NOINPUT
        )
    loaded = shape_for(ModelConfig(engine="transformers", trust_remote_code=trust), shape.load)
    model = outside.Outside(loaded, context)
    outside.load(model, shape.load, say)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            about = opened.tensors.get(f"model.{name}")
            if about is None or tuple(about.shape) != tuple(parameter.shape):
                raise Refusal(
                    f"{opened.path} has no {name} of this shape: it belongs to another kind of model", EX_DATAERR
                )
            parameter.copy_(opened.read(f"model.{name}"))
    return model


def _tensors(opened: Checkpoint, shape: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """One at a time."""
    stored = {
        name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", ""): name for name in opened.tensors
    }
    for place in places(shape):
        name = stored.get(f"model.{place.name}")
        if name is None:
            raise Refusal(f"{opened.path} has no {place.name}: it belongs to another kind of model", EX_DATAERR)
        wanted = (sum(part.shape[0] for part in place.parts), *place.parts[0].shape[1:])
        if tuple(opened.tensors[name].shape) != wanted:
            line = (
                f"{opened.path}: {place.name} is {list(opened.tensors[name].shape)}, and its model's is {list(wanted)}"
            )
            raise Refusal(line, EX_DATAERR)
        yield place.name, opened.read(name)


def _tokenizer_of(opened: Checkpoint) -> str:
    """The one with the checkpoint's digest: beside it, where it says, or in the cache of prepared data."""
    digest = opened.meta.get("tokenizer_digest")
    run = os.path.dirname(os.path.dirname(os.path.abspath(opened.path)))
    told = opened.meta.get("tokenizer")
    beside = [os.path.join(run, HF), *([told] if isinstance(told, str) else [])]
    near = [*beside, *sorted(glob.glob("cache/datasets/*/tokenizer")), *sorted(glob.glob("cache/tokenizers/*"))]
    for folder in near:
        if os.path.exists(os.path.join(folder, "tokenizer.json")) and load_tokenizer(folder).has_digest(digest):
            return folder
    raise Refusal(
        f"{opened.path}: its tokenizer is neither in {run} nor in cache/: name its folder with --tokenizer", EX_NOINPUT
    )
