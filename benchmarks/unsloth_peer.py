"""Unsloth's QLoRA step, for benchmarks/qlora.py: its own loading, patches, adapters and gradient checkpointing, from a folder on disk.

benchmarks/carry_peers.sh gathers what has to be on PYTHONPATH. Packages that unsloth and trl import and this step never calls (datasets, pyarrow, pandas, …) are
replaced by empty ones where they are missing.

unsloth          as its guides have it: from_pretrained in 4 bits, gradient checkpointing "unsloth" (inputs of blocks go to host memory)
unsloth-small    its loss in chunks of at most 0.25 GiB, as ours (its own limit is 4)
unsloth-plain    gradient checkpointing of torch instead
unsloth-direct   a model of transformers and bitsandbytes, built without a folder and then patched: what is left if from_pretrained does not work here
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Iterable, Sequence
from typing import Any

import qlora

# Names that are imported and not called, and a version that those who import them accept.
ABSENT = {
    "datasets": "4.3.0", "pyarrow": "21.0.0", "pandas": "2.3.3", "requests": "2.32.5", "tyro": "0.9.35", "msgspec": "0.19.0", "hf_transfer": "0.1.9",
    "torchvision": "0.26.0", "PIL": "12.0.0", "regex": "2026.1.1",
}  # fmt: skip


class _Anything(type):
    def __getattr__(cls, name: str) -> Any:
        return _named(name)


def _named(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Anything(name, (), {"__init__": lambda self, *args, **more: None})


class _Empty(types.ModuleType):
    __version__ = "0"

    def __getattr__(self, name: str) -> Any:
        setattr(self, name, _named(name))
        return self.__dict__[name]


class _Said(importlib.metadata.Distribution):
    def __init__(self, name: str) -> None:
        self._text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {ABSENT[name]}\n"

    def read_text(self, filename: str) -> str | None:
        return self._text if filename == "METADATA" else None

    def locate_file(self, path: Any) -> Any:
        return path


class _Stubs(importlib.metadata.DistributionFinder, importlib.abc.Loader):
    """The last to be asked: what is here is used."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(names)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        own = fullname.partition(".")[0] in self._names
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if own else None

    def find_distributions(
        self, context: importlib.metadata.DistributionFinder.Context | None = None
    ) -> list[importlib.metadata.Distribution]:
        wanted = context.name if context is not None else None
        return [_Said(name) for name in self._names if wanted in (None, name)]

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def replace_absent() -> list[str]:
    missing = [name for name in ABSENT if importlib.util.find_spec(name) is None]
    sys.meta_path.append(_Stubs(missing))
    return missing


def run(cell: qlora.Cell, peer: str, steps: int) -> dict[str, Any]:
    scratch = os.path.join(tempfile.gettempdir(), "stoker-unsloth")
    os.environ |= {"HF_HUB_OFFLINE": "1", "UNSLOTH_COMPILE_LOCATION": scratch, "UNSLOTH_DISABLE_STATISTICS": "1"}
    if peer == "unsloth-small":
        os.environ["UNSLOTH_CE_LOSS_TARGET_GB"] = "0.25"
    folder = "" if peer == "unsloth-direct" else written(cell.size)
    begun = time.monotonic()
    print(f"replaced by empty modules: {', '.join(replace_absent()) or 'none'}", flush=True)
    unsloth: Any = importlib.import_module("unsloth")  # before torch and transformers, which it changes
    torch: Any = importlib.import_module("torch")
    imported = time.monotonic() - begun
    how = True if peer == "unsloth-plain" else "unsloth"
    fast = unsloth.FastLanguageModel
    if folder:
        model, _ = fast.from_pretrained(
            folder, max_seq_length=cell.context, dtype=torch.bfloat16, load_in_4bit=True, local_files_only=True,
            use_gradient_checkpointing=how,
        )  # fmt: skip
    else:
        model = patched(cell)
    model = fast.get_peft_model(
        model, r=cell.rank, lora_alpha=2 * cell.rank, lora_dropout=0, bias="none", target_modules=qlora.NAMES,
        use_gradient_checkpointing=how, random_state=0, max_seq_length=cell.context,
    )  # fmt: skip
    fast.for_training(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-4, fused=True)
    vocabulary, shape = model.config.vocab_size, (cell.micro, cell.context)
    print(f"4 bits: {sum('4bit' in type(m).__name__ for m in model.modules())} layers", flush=True)

    def step() -> float:
        inputs = torch.randint(0, vocabulary, shape, device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(input_ids=inputs, labels=inputs).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    versions = {"unsloth": unsloth.__version__, "imported_s": round(imported, 1)}
    return {**qlora.measured(step, cell.micro * cell.context, steps, begun), **versions}


def written(size: str) -> str:
    """The folder of random weights; by a process of its own, since unsloth wants to be imported first."""
    script = os.path.join(os.path.dirname(os.path.abspath(__file__)), "shapes.py")
    done = subprocess.run([sys.executable, script, size], stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.splitlines()[-1]


def patched(cell: qlora.Cell) -> Any:
    """As FastLlamaModel.from_pretrained does around transformers' own loading."""
    llama: Any = importlib.import_module("unsloth.models.llama")
    llama.FastLlamaModel.pre_patch()
    model = qlora.transformers_model(cell.size)
    qlora.quantize_by_bitsandbytes(model)
    model, _ = llama.FastLlamaModel.post_patch(model, None)
    inner = model
    while hasattr(inner, "model"):
        inner.max_seq_length, inner = cell.context, inner.model
    inner.max_seq_length = model.max_seq_length = cell.context
    model._saved_temp_tokenizer = model.model._saved_temp_tokenizer = types.SimpleNamespace()
    trainer: Any = importlib.import_module("transformers.trainer").Trainer
    trainer._inner_training_loop.__name__ = "_fast_inner_training_loop"  # it asks for its own, which is not used here
    return model
