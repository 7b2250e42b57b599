"""An architecture that no family knows, computed by transformers' own module behind the interface of our Decoder.

It trains, resumes, exports and chats. The cost is reported once (COSTS): no fused kernels, the logits of a whole
micro-batch in memory, one row for each packed text. What it has not is refused: sharding, fp8, other stages.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stoker.contract.errors import EX_CANTCREAT, EX_CONFIG, EX_DATAERR, EX_UNAVAILABLE, Refusal
from stoker.contract.units import plural
from stoker.training.model.attention import Documents, begins
from stoker.training.model.config import ModelConfig
from stoker.training.model.hf_config import base_of, config_of, kept_of
from stoker.training.model.hf_files import refuse_beyond_memory
from stoker.training.model.hf_hub import TOKENIZER_FILES
from stoker.training.model.hf_write import DTYPES, add_files, fresh_folder
from stoker.training.model.loss import IGNORED
from stoker.training.model.outside_folder import first_line, only_weights
from stoker.training.parallel.config import ComputeConfig

Say = Callable[[str], None]
COSTS = "slower, no fused kernels, whole logits in memory; no fsdp, fp8, reward, grpo or evaluate"


def notice(c: ModelConfig) -> str:
    name = json.loads(c.kept)["architectures"][0]
    return f"model.engine transformers: {name} is computed by transformers' own module ({COSTS})"


def rows(c: ModelConfig) -> int:
    """Of the folder's embedding."""
    return int(json.loads(c.kept).get("vocab_size", c.vocab_size))


class Outside(nn.Module):
    """forward as of Decoder."""

    layers: tuple[nn.Module, ...] = ()  # no blocks of ours
    fused = False
    head = None

    def __init__(self, c: ModelConfig, context_length: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        refuse_beyond_memory(c.load, c.stored, torch.float32.itemsize)  # transformers reads them there, for a GPU, too
        self.config, self.context_length, self.dtype, self.loss = c, context_length, dtype, "plain"
        self.module = _built(c)

    def place(self, device: torch.device) -> None:
        self.to(device)

    def start(self, seed: int) -> None:
        """Its weights come from its folder."""

    def fuse(self, yes: bool) -> None:
        assert not yes, "ready refuses it"

    def hidden(self, inputs: Tensor, packed: Documents | None = None) -> Tensor:
        raise Refusal(
            "model.engine transformers gives logits only; this stage needs a model of one of Stoker's families (`stoker docs families`)",
            EX_UNAVAILABLE,
        )

    def logits(self, inputs: Tensor, packed: Documents | None = None) -> Tensor:
        return self._run(inputs, packed)[0]

    def _run(self, inputs: Tensor, packed: Documents | None) -> tuple[Tensor, Tensor | None]:
        with torch.autocast(inputs.device.type, self.dtype, enabled=self.dtype != torch.float32):
            return self._whole(inputs) if packed is None else self._apart(inputs, packed)

    def forward(
        self,
        inputs: Tensor,
        targets: Tensor | None = None,
        scale: Tensor | None = None,
        packed: Documents | None = None,
    ) -> Tensor:
        logits, aux = self._run(inputs, packed)
        if targets is None:
            return logits
        goals = targets.flatten()
        loss = F.cross_entropy(logits.flatten(0, 1).float(), goals, ignore_index=IGNORED, reduction="sum")
        if aux is not None and self.training:
            loss = loss + aux * (goals != IGNORED).sum()
        return loss if scale is None else loss * scale

    def _whole(self, inputs: Tensor, **more: Tensor) -> tuple[Tensor, Tensor | None]:
        """(logits, the load-balancing loss where its config.json asks for one)."""
        out = self.module(input_ids=inputs, use_cache=False, **more)
        aux = getattr(out, "aux_loss", None)
        weight = getattr(self.module.config, "router_aux_loss_coef", 0.0) or 0.0
        return out.logits, weight * aux if isinstance(aux, Tensor) and weight else None

    def _apart(self, inputs: Tensor, packed: Documents) -> tuple[Tensor, Tensor | None]:
        """Each packed text in a row of its own: a module may do more with its neighbours than attend to them."""
        new = begins(packed.segments).flatten()
        starts = new.nonzero()[:, 0]
        lengths = torch.diff(starts, append=starts.new_tensor([new.numel()]))
        place = torch.arange(int(lengths.max()), device=inputs.device)
        inside = place < lengths[:, None]
        rows = inputs.flatten()[(starts[:, None] + place).clamp(max=new.numel() - 1)]
        logits, aux = self._whole(torch.where(inside, rows, 0), attention_mask=inside.long())
        return logits[inside].view(*inputs.shape, -1), aux

    def next_logits(self, ids: Tensor, cache: Any) -> tuple[Tensor, Any]:
        """(logits after the last of `ids`, the module's cache; None: it has none, and takes all tokens again)."""
        with torch.autocast(ids.device.type, self.dtype, enabled=self.dtype != torch.float32):
            out = self.module(input_ids=ids, use_cache=True, **({} if cache is None else {"past_key_values": cache}))
        return out.logits[:, -1].float(), getattr(out, "past_key_values", None)

    def make_ready(self, c: ComputeConfig, say: Say) -> None:
        for key, value, free in (("compile", c.compile, ("auto", "off")), ("fp8", c.fp8, ("off",))):
            if value not in free:
                raise Refusal(
                    f"compute.{key} {value} does not work with model.engine transformers: use {free[0]}", EX_CONFIG
                )
        if c.recompute not in ("auto", "off", "0"):
            self.module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            if c.recompute != "full":
                say(f"compute.recompute {c.recompute}: transformers recomputes all blocks in full")


def _library() -> Any:
    try:
        library = import_module("transformers")
        import_module("transformers.utils.logging").disable_progress_bar()
        # 0: it never asks on the terminal whether to run a folder's code. --trust-remote-code says it before.
        code: Any = import_module("transformers.dynamic_module_utils")
        code.TIME_OUT_REMOTE_CODE = 0
        return library
    except ImportError as problem:
        raise Refusal(f"model.engine transformers: it can't be imported here: {problem}", EX_UNAVAILABLE) from problem


def _built(c: ModelConfig) -> Any:
    """Return the module with fresh weights. Its dropout rates become model.dropout, which a replay repeats."""
    library, keys = _library(), json.loads(c.kept)
    model_type, where = keys.get("model_type"), f"model {c.load}: transformers {library.__version__}"
    own_code = _runs_own_code(c)
    if not own_code and model_type not in library.CONFIG_MAPPING:
        line = f"{where} does not know the architecture {keys['architectures'][0]} (model_type {model_type!r})"
        raise Refusal(f"{line}; if it is new: pip install --upgrade transformers", EX_DATAERR)
    try:
        if own_code:
            config = library.AutoConfig.from_pretrained(base_of(c.load), trust_remote_code=True)
        else:
            config = library.CONFIG_MAPPING[model_type].from_dict(keys)
        for name, value in vars(config).items():
            if name.endswith(("dropout", "pdrop")) and isinstance(value, (int, float)):
                setattr(config, name, c.dropout)
        return library.AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=own_code)
    except Exception as problem:  # whatever a library raises for a config.json that makes no sense
        raise Refusal(f"{where} can't build {model_type!r}: {first_line(problem)}", EX_DATAERR) from problem


def _runs_own_code(c: ModelConfig) -> bool:
    return bool(c.trust_remote_code and json.loads(c.kept).get("auto_map"))


def opened(c: ModelConfig, context_length: int, dtype: torch.dtype, device: torch.device, say: Say) -> Outside:
    """The folder's model on its device."""
    with torch.device(device):
        model = Outside(c, context_length, dtype)
    model.place(device)
    load(model, c.load, say)
    return model


@torch.no_grad()
def load(model: Outside, folder: str, say: Say) -> None:
    """Weights and buffers of the folder; of an adapter's, with the adapter in them."""
    adapter, folder = folder, base_of(folder)
    c, own_code = model.config, _runs_own_code(model.config)
    how: dict[str, Any] = {"dtype": torch.float32, "use_safetensors": True, "output_loading_info": True}
    how |= {"trust_remote_code": True} if own_code else {"trust_remote_code": False, "config": model.module.config}
    library = _library()
    try:
        with torch.device("cpu"), nullcontext(folder) if own_code else only_weights(folder) as place:
            stored, about = library.AutoModelForCausalLM.from_pretrained(place, **how)
    except Refusal:
        raise
    except Exception as problem:  # the library's own, those of safetensors, and of code that comes with the folder
        raise Refusal(f"model {folder}: transformers can't open it: {first_line(problem)}", EX_DATAERR) from problem
    if missing := sorted(about["missing_keys"]):
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise Refusal(f"model {folder}: its weights have no {missing[0]}{more}: the folder is not complete", EX_DATAERR)
    model.module.load_state_dict(stored.state_dict())
    say(f"weights from {folder}: {plural(c.stored, 'parameter')}, by transformers")
    if adapter != folder:
        import_module("stoker.training.model.outside_adapters").merge(model, adapter, say)  # it imports this module


def save(
    model: Outside, folder: str, *, say: Say, dtype: torch.dtype | None = None, tokenizer_folder: str | None = None,
    end_ids: Iterable[int] = (), write: bool = True, more: Callable[[str], None] | None = None,
) -> None:  # fmt: skip
    """As save_pretrained lays it out; there when it is complete."""
    if not write:
        return
    c, folder = model.config, os.path.abspath(folder)
    kept = kept_of(c, say)
    dtype = dtype or (torch.bfloat16 if kept.is_half else torch.float32)
    config = config_of(c, kept.context(model.context_length), DTYPES[dtype][1])
    config, generation = kept.changed(config, tuple(end_ids), tokenizer_folder)
    # config.json as the model came with it, the code it needs, the tokenizer.
    code = [name for name in os.listdir(c.load) if name.endswith(".py")] if config.get("auto_map") else []
    copied = [*((c.load, name) for name in code), *((tokenizer_folder, name) for name in TOKENIZER_FILES)]
    try:
        with fresh_folder(folder) as fresh:
            weights = {name: tensor.to(dtype) for name, tensor in model.module.state_dict().items()}
            model.module.save_pretrained(fresh, state_dict=weights)
            add_files(fresh, config, generation, copied)
            if more is not None:
                more(fresh)
    except OSError as problem:
        raise Refusal(f"{folder}: the model can't be written: {problem.strerror or problem}", EX_CANTCREAT) from problem
    say(f"wrote {folder}: {DTYPES[dtype][1]} as {config['architectures'][0]}")
