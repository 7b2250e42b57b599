"""Refuses numbers out of range and combinations that exclude each other. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NoReturn

from stoker.contract import limits, options
from stoker.contract.errors import EX_CONFIG, EX_DATAERR, EX_UNAVAILABLE, Refusal
from stoker.contract.frozen import frozen
from stoker.contract.units import format_bytes, plural
from stoker.training.config.keys import KEYS, values_of
from stoker.training.config.layers import Origin
from stoker.training.config.schema import Config, NeedsConfig
from stoker.training.forensics.config import GRAMMAR, misplaced, parse
from stoker.training.model.config import OFF

_NUMBER = re.compile(r"[-+]?((\d+\.?\d*|\.\d+)(e[-+]?\d+)?|nan|inf)", re.IGNORECASE)
_PERCENT = re.compile(r"\s*(\d+\.?\d*|\.\d+)\s*%\s*")
_DOTTED = re.compile(r"[a-z]+\.[a-z0-9_]+")
MOST_EPOCHS_A_STEP = 100
LOGS_TO = ("tensorboard", "wandb", "trackio", "mlflow")


@frozen
class _Checking:
    config: Config
    given: Mapping[str, Origin]

    def refuse(self, line: str, *names: str) -> NoReturn:
        """Blames the first key that was given, of `names`, or of those in the line."""
        origin = next((self.given[name] for name in names or _DOTTED.findall(line) if name in self.given), None)
        raise Refusal(
            f"{origin.words if origin else f'preset {self.config.preset}'}: {line}",
            origin.code if origin else EX_CONFIG,
        )


def check(config: Config, given: Mapping[str, Origin] | None = None, on_cpu: bool | None = None) -> None:
    """`given`: where keys were said, for the refusal's words and code. `on_cpu`: None where nobody knows yet."""
    checking = _Checking(config, given or {})
    for name, value in values_of(config).items():
        if outside := options.explain_limit(KEYS[name].spec, value, KEYS[name].text(value)):
            checking.refuse(f"{name} {outside}", name)
    if not config.model.load:
        _shape(checking)
    _adapter(checking)
    _run_length_and_batch(checking)
    _words(checking)
    _drill(checking)
    _combinations(checking, on_cpu)


def _adapter(checking: _Checking) -> None:
    config, method = checking.config, checking.config.adapter.method
    if method == OFF:
        return
    if not config.model.load:
        checking.refuse(
            f"adapter.method {method} needs a model to adapt: name its folder or hub id with --model.load",
            "adapter.method",
        )
    impossible = {
        "parallel.strategy fsdp with compute.embedding host": config.parallel.strategy == "fsdp"
        and config.compute.embedding == "host",
        "optim.kind muon": config.optim.kind == "muon",
        "compute.fp8 tensorwise": config.compute.fp8 != "off",
    }
    for what in (what for what, yes in impossible.items() if yes):
        checking.refuse(
            f"adapter.method {method} does not support {what} yet: leave it out", what.split()[0], "adapter.method"
        )


def _shape(checking: _Checking) -> None:
    model = checking.config.model
    if model.head_dim == 0:
        names = ("model.heads", "model.dim", "model.depth")
        fits = [count for count in range(1, min(model.dim, 1024) + 1) if model.dim % (2 * count) == 0]
        if not fits:
            checking.refuse(
                f"model.dim {model.dim} is odd, and heads need an even width: give an even number, or model.head_dim",
                *names,
            )
        near = ", ".join(map(str, sorted(sorted(fits, key=lambda count: abs(count - model.heads))[:4])))
        checking.refuse(
            f"model.heads {model.heads} does not divide model.dim {model.dim}: heads of {near} do, or give"
            " model.head_dim",
            *names,
        )
    if model.head_dim % 2:
        checking.refuse(
            f"model.head_dim {model.head_dim} is odd (dim {model.dim}, heads {model.heads}): the rotary embedding turns"
            " pairs",
            "model.head_dim",
            "model.heads",
            "model.dim",
        )
    if model.heads % model.kv_heads:
        legal = ", ".join(str(count) for count in range(1, min(model.heads, 1024) + 1) if model.heads % count == 0)
        checking.refuse(f"model.kv_heads {model.kv_heads} does not divide model.heads {model.heads}: {legal} do")


def _run_length_and_batch(checking: _Checking) -> None:
    train, batch, context = checking.config.train, checking.config.batch, checking.config.data.context_length
    if not train.max_steps and not train.epochs:
        checking.refuse("neither train.max_steps nor train.epochs says how long to train")
    if batch.tokens % context:
        low = batch.tokens // context * context
        legal = f"{low} or {low + context}" if low else f"{context}"
        checking.refuse(f"batch.tokens {batch.tokens} is not a multiple of data.context_length {context}: {legal} is")


def _words(checking: _Checking) -> None:
    log_to, share = checking.config.train.log_to, checking.config.data.validation
    unknown = [word for word in log_to.replace(" ", "").split(",") if word and word not in LOGS_TO]
    if unknown:
        checking.refuse(f"train.log_to {unknown[0]!r} is not one of {', '.join(LOGS_TO)}", "train.log_to")
    percent = _PERCENT.fullmatch(share)
    if percent:
        checking.refuse(f"data.validation {share} is a percentage: write the share, {float(percent[1]) / 100:g}")
    if _NUMBER.fullmatch(share) and float(share) not in limits.FRACTION_BELOW_ONE:
        checking.refuse(f"data.validation {share} is not a share of the data from 0 to below 1, nor a path")


def _drill(checking: _Checking) -> None:
    """A drill that would never come is no drill."""
    text, train, model = checking.config.nan.inject, checking.config.train, checking.config.model
    if text and not GRAMMAR.fullmatch(text.strip()):
        checking.refuse(f"nan.inject {text!r} is not WHERE@STEP or WHERE@STEP@RANK", "nan.inject")
    told = parse(text)
    if told is None:
        return
    if train.max_steps and told.step >= train.max_steps:
        checking.refuse(
            f"nan.inject {text}: there is no step {told.step}: the run's are 0 to {train.max_steps - 1}",
            "nan.inject",
            "train.max_steps",
        )
    problem = "" if model.load else misplaced(told, model.layers)
    if problem:
        checking.refuse(f"nan.inject {text}: {problem}", "nan.inject")


def _combinations(checking: _Checking, on_cpu: bool | None) -> None:
    config = checking.config
    compute, parallel, kind = config.compute, config.parallel, config.optim.kind
    if parallel.strategy == "fsdp":
        _sharded(checking)
    elif parallel.sharding != "all":
        line = f"parallel.sharding {parallel.sharding} needs parallel.strategy fsdp: ddp does not shard"
        checking.refuse(line, "parallel.sharding", "parallel.strategy")
    elif parallel.offload != "off":
        line = f"parallel.offload {parallel.offload} needs parallel.strategy fsdp: it moves shards"
        checking.refuse(line, "parallel.offload", "parallel.strategy")
    if compute.compile == "fused" and compute.fp8 != "off":
        checking.refuse(
            f"compute.compile fused and compute.fp8 {compute.fp8} exclude each other: the fused kernels do not support"
            " fp8; use compute.compile auto"
        )
    if parallel.comm.startswith("local") and kind == "adamw8bit":
        checking.refuse(
            f"parallel.comm {parallel.comm} does not work with optim.kind adamw8bit, whose 8-bit moments can't be averaged:"
            " use adamw or muon"
        )
    packed = config.data.kind == "chat" or config.data.documents
    if compute.attention in ("flash", "cudnn") and (compute.dtype == "fp32" or packed):
        line = f"compute.attention {compute.attention} takes neither fp32 nor packed documents: use auto"
        checking.refuse(line, "compute.attention", "compute.dtype", "data.kind", "data.documents")
    only_gpu = {"fp8": "tensorwise", "cuda_graphs": "on", "loss": "liger", "attention": "cudnn"}
    for name, value in only_gpu.items():
        if on_cpu and getattr(compute, name) == value:
            line = f"compute.{name} {value} needs a GPU, and this would train on the CPU"
            checking.refuse(line, f"compute.{name}", "parallel.device")


def _sharded(checking: _Checking) -> None:
    compute, parallel = checking.config.compute, checking.config.parallel
    if compute.cuda_graphs == "on":
        checking.refuse(
            "compute.cuda_graphs on and parallel.strategy fsdp exclude each other: a graph can't hold fsdp's gathers"
        )
    if parallel.balance != "off":
        checking.refuse(
            "parallel.balance auto needs parallel.strategy ddp: fsdp's ranks wait for each other inside each"
            " step, so their own speed can't be measured"
        )
    if parallel.offload != "off" and checking.config.optim.kind == "muon":
        line = f"parallel.offload {parallel.offload} does not work with optim.kind muon: use adamw8bit"
        checking.refuse(line, "parallel.offload", "optim.kind")
    if parallel.comm != "full":
        checking.refuse(
            f"parallel.comm {parallel.comm} needs parallel.strategy ddp: fsdp exchanges weights and gradients in its"
            " own way"
        )


def check_drill(config: Config, ranks: int, given: Mapping[str, Origin] | None = None) -> None:
    """`ranks`: the most that may start."""
    told = parse(config.nan.inject)
    if told is not None and told.rank is not None and told.rank >= ranks:
        there = f"the run's are 0 to {ranks - 1}" if ranks > 1 else "the run has one, 0"
        line = f"nan.inject {config.nan.inject}: there is no rank {told.rank}: {there}"
        _Checking(config, given or {}).refuse(line, "nan.inject")


def check_data(
    config: Config,
    train_tokens: int,
    vocab_size: int,
    given: Mapping[str, Origin] | None = None,
    packed: int | None = None,
) -> None:
    """What only the prepared data can tell. `packed`: samples of chats; of a stream, the context decides."""
    checking = _Checking(config, given or {})
    context, rows = config.data.context_length, config.model.vocab_size
    if train_tokens < context + 1:
        raise Refusal(
            f"data.context_length {context} is longer than the data: {train_tokens} tokens to train on; give more data"
            " or a shorter context",
            EX_DATAERR,
        )
    if rows and rows < vocab_size:
        checking.refuse(
            f"model.vocab_size {rows} is too small for the tokenizer's {vocab_size} tokens: leave it out, or give that"
            " many"
        )
    _check_step(checking, (train_tokens - 1) // context if packed is None else packed)


def _check_step(checking: _Checking, samples: int) -> None:
    """A batch that somebody asked for, and that passes over tiny data again and again within one step. A preset's may."""
    batch, data = checking.config.batch, checking.config.data
    samples = max(min(samples, data.max_samples or samples), 1)
    a_step = batch.tokens // data.context_length or max(batch.micro, 1) * batch.accumulation
    names = ("batch.tokens",) if batch.tokens else ("batch.micro", "batch.accumulation")
    if a_step > MOST_EPOCHS_A_STEP * samples and any(name in checking.given for name in names):
        checking.refuse(
            f"a step of {a_step:,} samples or more is {a_step // samples:,} epochs of the data's {samples:,}: at most"
            f" {MOST_EPOCHS_A_STEP} make sense; give a smaller batch",
            *names,
        )


def check_needs(needs: NeedsConfig, cards: Sequence[int | None], given: Mapping[str, Origin] | None = None) -> None:
    """`cards`: the memory of each GPU of the machine; None where the driver does not say."""
    origins = given or {}

    def blame(name: str) -> str:
        return f"{origins[name].words}: " if name in origins else ""

    anyway = f"--needs.gpus 0{' --needs.vram 0' if needs.vram else ''} starts it anyway"
    if len(cards) < needs.gpus:
        raise Refusal(
            f"{blame('needs.gpus')}{plural(needs.gpus, 'GPU')} needed, this machine has {len(cards) or 'none'}; {anyway}",
            EX_UNAVAILABLE,
            cause="gpu.too-few",
        )
    count = max(needs.gpus, 1)
    large = [memory for memory in cards if memory is None or memory >= needs.vram]
    if needs.vram and len(large) < count:
        largest = sorted((memory for memory in cards if memory is not None), reverse=True)[:count]
        found = (
            f"the largest here have {', '.join(format_bytes(memory) for memory in largest)}"
            if cards
            else "this machine has none"
        )
        wanted = f"{count} GPUs" if count > 1 else "a GPU"
        raise Refusal(
            f"{blame('needs.vram')}{wanted} with {format_bytes(needs.vram)} of memory needed, {found}; {anyway}",
            EX_UNAVAILABLE,
            cause="gpu.too-few",
        )
