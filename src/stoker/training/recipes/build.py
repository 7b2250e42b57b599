"""The parts of a run that learns from rows, each built by a function that returns it finished."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, cast

import torch

import stoker
from stoker.contract import env_vars
from stoker.contract.errors import EX_CONFIG, Refusal, parsing
from stoker.contract.frozen import replace
from stoker.contract.units import format_bytes, plural
from stoker.training.balance import comm
from stoker.training.balance.comm import StepClock
from stoker.training.balance.plan import Plans
from stoker.training.checkpoint.reading import Checkpoint
from stoker.training.config.schema import Config
from stoker.training.data.order import Order
from stoker.training.fit.terms import SFT
from stoker.training.forensics.config import parse
from stoker.training.forensics.replay import Drill
from stoker.training.loop import resume
from stoker.training.loop.feeder import Course, Material
from stoker.training.loop.learner import Learner
from stoker.training.loop.say import Voice
from stoker.training.loop.step import Parts
from stoker.training.loop.supervised import Start
from stoker.training.model import adapters, hf, hf_config, hf_hub, outside, outside_adapters, ready
from stoker.training.model.attention import FLEX_BLOCK, documents, packed_kernel
from stoker.training.model.config import OFF, ModelConfig, with_rows
from stoker.training.model.decoder import Decoder
from stoker.training.model.reference import Beginning
from stoker.training.optim.host import locked
from stoker.training.optim.loss_scale import scale_for
from stoker.training.optim.muon import local
from stoker.training.optim.optimizer import Optimizer, gradient_norm
from stoker.training.parallel.config import local_steps
from stoker.training.parallel.group import Group, even_micro, no_sync
from stoker.training.parallel.sharded import shard
from stoker.training.recipes import memory

GRAPH_PARAMETERS = 60_000_000  # below this a step is bound by launches, not by arithmetic: a CUDA graph pays
WITHOUT_GPU = 8
MANY = 1024  # samples a micro-batch may have where no batch.tokens limits it


def parts_of(
    c: Config, material: Material, learner: Learner, group: Group, voice: Voice, found: Checkpoint | None,
    stage_name: str = SFT,
) -> Parts:  # fmt: skip
    """Model, optimizer, micro-batch and the exchange between ranks. `found`: the checkpoint that the run resumes from."""
    dtype = dtype_of(c, group)
    ready.arithmetic(c.compute, dtype)
    spoils = parse(c.nan.inject)
    if spoils:
        if c.compute.compile != "off" and group.device.type == "cuda":
            voice.say_once("nan.inject: blocks run as plain torch, so that a fault can be injected")
        c = replace(c, compute=replace(c.compute, compile="off", cuda_graphs="off"))
    own = adapters_of(c, voice)
    if own is None and c.compute.embedding == "host":
        raise Refusal(
            "compute.embedding host is for adapters (--lora, --qlora): here the embedding learns; use compute.embedding"
            " device",
            EX_CONFIG,
        )
    model = model_of(c, material.vocab_size, learner, dtype, group, voice, own, fresh=found is None)
    optimizer = Optimizer(model, c.optim, group.visited)
    lock_memory(model, optimizer, group, voice)
    packed, share = material.train.packed, share_of(c, group)
    held = memory.Holding(group, model, optimizer, min(c.batch.micro, share))
    each = memory.exchanges_each(c, held, stage_name, share, voice, packed=packed)
    own_micro = micro_batch(c, model, optimizer, group, voice, packed=packed, each=each)
    fits = group.all(own_micro)
    micro = min(fits)
    if len(set(fits)) > 1:
        voice.say_once(f"micro-batches of {', '.join(map(str, fits))} samples at most fit the ranks")
    batch = samples_per_step(c, micro, group.world, found)
    warn_of_idle_ranks(batch, "row", "batch.tokens", group, voice)
    every = local_steps(c.parallel.comm) if group.world > 1 else 0
    return Parts(
        group=group,
        material=material,
        learner=learner,
        model=model,
        wrapped=comm.wrapped(model, group, c.parallel.comm),
        optimizer=optimizer,
        own_micro=own_micro,
        micro=micro,
        batch=batch,
        plans=Plans(batch, group.world) if balanced(c, group) else None,
        meeting=comm.Meeting(group, every) if every else None,
        clock=StepClock(model, group.device) if group.world > 1 and group.strategy == "ddp" else None,
        drill=Drill(spoils, model, group.rank),
        graph=graphed(c, model, group, voice, packed=material.train.packed),
        adapters=own,
        loss_scale=scale_for(dtype, group.device),
        exchange_each=each,
    )


def warn_of_idle_ranks(count: int, noun: str, key: str, group: Group, voice: Voice) -> None:
    """Say so if a step has fewer samples than there are ranks: the others compute nothing that counts."""
    if count < group.world:
        idle = f"{group.world - count} of {group.world} ranks"
        voice.say_once(
            f"warning: a step has {plural(count, noun)}, so {idle} have nothing to compute; raise {key} to use them"
        )


def lock_memory(model: Decoder, optimizer: Optimizer, group: Group, voice: Voice) -> None:
    """Of what lives on the host (parallel.offload)."""
    if group.device.type == "cuda" and group.visited is not None:
        kept = [local(p.detach()) for p in model.parameters()] + [tensor for _, tensor, _ in optimizer.state()]
        locked(kept, voice.say_once)


def dtype_of(c: Config, group: Group) -> torch.dtype:
    """One for all ranks: where a card has no bf16, the others scale their losses, too, or gradients would be of unlike size."""
    found = group.all(ready.dtype_of(c.compute, group.device))
    dtype = torch.float16 if torch.float16 in found else found[group.rank]
    if dtype == torch.float16 and c.parallel.comm == "powersgd":
        raise Refusal(
            "parallel.comm powersgd does not work with fp16: an overflow would stay in its error feedback for ever;"
            " use parallel.comm full or bf16",
            EX_CONFIG,
        )
    return cast(torch.dtype, dtype)


def model_of(
    c: Config, vocab_size: int, learner: Learner, dtype: torch.dtype, group: Group, voice: Voice,
    own: adapters.Beside | None, *, fresh: bool,
) -> Decoder:  # fmt: skip
    """On its device, ready to run there. `fresh`: with the weights it begins with; a checkpoint has others."""
    weights, shape = model_shape(c.model, vocab_size, voice, c.adapter.method)
    sharded = group.strategy == "fsdp"
    if shape.engine == "transformers":
        return _outside(c, shape, learner, dtype, group, voice, own)
    if own is not None:
        policy: Any = adapted(c, own, shape, learner.kind, dtype, group, voice)
        if learner.compares:
            check_beginning(own, sharded)
            policy.begun = Beginning(policy, loaded=own.loaded)
        return cast(Decoder, policy)
    with torch.device("meta" if sharded else group.device):  # sharded: no rank ever holds the whole model
        model = learner.kind(shape, c.data.context_length, dtype)
    ready.make_ready(model, c.compute, group.device, voice.say_once)
    if sharded:
        shard(model, group, dtype)
    model.place(group.device, group.home)
    if fresh:
        model.start(c.train.seed)
        if weights:
            learner.load(model, weights, voice.say_once)
    return model


def adapters_of(c: Config, voice: Voice) -> adapters.Beside | None:
    """None: all weights learn."""
    if c.adapter.method == OFF:
        return None
    return adapters.beside(c.adapter, hf_hub.folder_of(c.model.load, voice.say_once))


def adapted(
    c: Config,
    own: adapters.Beside,
    shape: ModelConfig,
    kind: type[Decoder],
    dtype: torch.dtype,
    group: Group,
    voice: Voice,
    entry: str = "forward",
) -> Decoder:
    """Frozen weights in 16 or 4 bits, with adapters that learn. A checkpoint has the adapters only. `entry`: of `shard`."""
    if c.model.vocab_size not in (0, hf_config.shape_of(own.base).vocab_size):
        raise Refusal(
            f"adapter.method {c.adapter.method} does not support a new model.vocab_size yet: leave it out", EX_CONFIG
        )
    told = own.settings
    with torch.device("meta"):
        model = kind(shape, c.data.context_length, dtype)
    for line in adapters.freeze(model, told):
        voice.say_once(line)
    ready.make_ready(model, c.compute, group.device, voice.say_once)
    if c.compute.embedding == "host":
        _embed_on_host(model)
    if told.lora_dropout and model.fused:
        voice.say_once("adapter.lora_dropout: blocks run as plain torch; without it they are fused, and faster")
        model.fuse(False)
    sharded = group.strategy == "fsdp"
    if sharded:  # no rank ever holds all of it
        adapters.cut_codes(model)
        adapters.add(model, told, torch.device("meta"))
        shard(model, group, None, entry)
    model.place(group.device, group.home)
    hf.load_named(model, hf.named(model), own.base, voice.say_once)
    model.begin_own(told.continue_from or own.base)
    if not sharded:
        adapters.add(model, told, group.device)
    adapters.start(model, told, c.train.seed)
    if told.continue_from:
        adapters.check_base(told.continue_from, own.base)
        adapters.load(model, told, told.continue_from, voice.say_once)
    bytes_of = adapters.held(model)
    voice.say_once(
        f"adapter: {told.method}, rank {told.lora_rank}, {sum(p.numel() for p in adapters.learned(model).values()):,} numbers"
        f" learn; frozen weights take {format_bytes(bytes_of['frozen'] + bytes_of['codes'])}"
    )
    return model


def check_beginning(own: adapters.Beside, sharded: bool) -> None:
    """What was before the first step is swapped in for the reference; FSDP2 gathers what it has."""
    what = "adapter.also_train" if own.settings.also_train else "an adapter that is trained on"
    if sharded and (own.loaded or own.settings.also_train):
        raise Refusal(
            f"parallel.strategy fsdp does not support {what} in a stage that compares with the model it began with (dpo, grpo with a kl): use ddp",
            EX_CONFIG,
        )


def _embed_on_host(model: Decoder) -> None:
    why = ""
    if model.head is None:
        why = "this model's head is its embedding, and every step needs all of it"
    elif model.embed.weight.requires_grad:
        why = "adapter.also_train names the embedding, which learns then"
    if why:
        raise Refusal(f"compute.embedding host: {why}; use compute.embedding device", EX_CONFIG)
    model.embed_on_host = True


def _outside(
    c: Config, shape: ModelConfig, learner: Learner, dtype: torch.dtype, group: Group, voice: Voice,
    own: adapters.Beside | None,
) -> Decoder:  # fmt: skip
    """A module of transformers. It stands in for a decoder wherever rows are learned."""
    asked = {
        "parallel.strategy fsdp": group.strategy == "fsdp",
        "optim.kind muon": c.optim.kind == "muon",
        "a reward model": learner.outside is None,
        "compute.activations host": c.compute.activations == "host",
        "a new model.vocab_size": c.model.vocab_size not in (0, outside.rows(shape)),
    }
    for what in (what for what, yes in asked.items() if yes):
        raise Refusal(
            f"model.engine transformers does not support {what}: leave it out, or load a model of a family (`stoker docs families`)",
            EX_CONFIG,
        )
    hf_config.check_adapters_outside(c.adapter.method)
    assert learner.outside is not None
    voice.say_once(outside.notice(shape))
    with torch.device(group.device):
        model = learner.outside(shape, c.data.context_length, dtype)
    ready.make_ready(model, c.compute, group.device, voice.say_once)
    model.place(group.device)
    outside.load(model, own.base if own else shape.load, voice.say_once)  # a checkpoint has no buffers
    if own is not None:
        _adapted_outside(model, own, learner, c.train.seed, voice)
    return cast(Decoder, model)


def _adapted_outside(model: Any, own: adapters.Beside, learner: Learner, seed: int, voice: Voice) -> None:
    told = own.settings
    outside_adapters.attach(model, told, seed)
    if own.loaded:
        adapters.check_base(told.continue_from, own.base)
        outside_adapters.fill(model, told, told.continue_from, voice.say_once)
    if learner.compares and own.loaded:
        raise Refusal(
            "model.engine transformers does not support DPO that begins with an adapter: its reference is the model without one",
            EX_CONFIG,
        )
    if learner.compares:
        model.begun = outside_adapters.begun(model)
    count = sum(parameter.numel() for parameter in adapters.learned(model).values())
    voice.say_once(f"adapter: {told.method} by peft, rank {told.lora_rank}, {plural(count, 'number')} learn")


def model_shape(c: ModelConfig, vocab_size: int, voice: Voice, method: str = OFF) -> tuple[str, ModelConfig]:
    """(folder of the weights to begin with or nothing, shape). `method`: of adapter.method."""
    if not c.load:
        return "", with_rows(c, vocab_size)
    weights = hf_hub.folder_of(c.load, voice.say_once, code=c.trust_remote_code)
    hf_config.check_trainable(weights, method)
    loaded = hf_config.shape_for(c, weights)
    given = replace(loaded, vocab_size=c.vocab_size or loaded.vocab_size, dropout=c.dropout)
    return weights, with_rows(given, vocab_size)


def balanced(c: Config, group: Group) -> bool:
    return c.parallel.balance == "auto" and group.world > 1


def _announce_mask(model: Decoder, context: int, device: torch.device, voice: Voice) -> None:
    """Packed rows without a kernel that knows where documents begin: memory grows with the square of the context."""
    shape = model.config
    kernel = packed_kernel(device, model.dtype, shape.head_dim, dropout=shape.dropout, cap=shape.attention_cap)
    size = context * context * model.dtype.itemsize
    blocks = kernel == "flex" and context % FLEX_BLOCK
    if (kernel == "bias" or blocks) and (device.type == "cuda" or size > 1 << 24):
        voice.say_once(
            f"packed rows: attention uses a mask of {context} x {context} numbers per row ({format_bytes(size)}); without"
            f" one: a GPU from Ampere on, torch 2.10, 16 bits, no dropout and a multiple of {FLEX_BLOCK} tokens"
        )


def share_of(c: Config, group: Group) -> int:
    """Samples of the rank that has most of a step; where they depend on what fits: as many as are tried."""
    tokens, micro = c.batch.tokens, c.batch.micro
    if tokens:
        return -(-(tokens // c.data.context_length) // group.world)
    return micro * c.batch.accumulation or MANY


def micro_batch(
    c: Config, model: Decoder, optimizer: Optimizer, group: Group, voice: Voice, *, packed: bool, each: bool = False
) -> int:
    """Before DDP is around the model: a trial that runs out of memory would leave its exchange half done. `each`: gradients
    in shards are exchanged with each micro-batch."""
    micro, share = c.batch.micro, share_of(c, group)
    halvings = int(os.environ.get(env_vars.MICRO_BATCH_HALVINGS, "0"))
    sharded = group.strategy == "fsdp"
    if packed and isinstance(model, Decoder):
        _announce_mask(model, c.data.context_length, group.device, voice)
    if not micro:
        again = halvings if sharded else 0
        micro = largest_micro(c, model, optimizer, group, voice, share=share, packed=packed, each=each, halvings=again)
        if group.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(group.device)  # the trials' peaks are not those of training
    if halvings:
        micro = max(micro >> halvings, 1) if c.batch.micro or not sharded else micro
        voice.say_once(f"micro-batch halved {halvings} time(s) after running out of GPU memory: {micro}")
    if not balanced(c, group):  # else a plan makes it even for the share it gives; this is the most that fits here
        micro = group.smallest(even_micro(share, min(micro, share)))
    if micro > 1:
        stoker.mark("CAN-HALVE-MICRO-BATCH")
    return micro


def largest_micro(
    c: Config,
    model: Decoder,
    optimizer: Optimizer,
    group: Group,
    voice: Voice,
    *,
    share: int,
    packed: bool,
    each: bool,
    halvings: int,
) -> int:
    """micro_batch: auto. The most samples whose worst case fits: full context, gradients kept, an optimizer step. Two small
    trials give the bytes per sample, a third proves the guess, which shrinks until it fits. All ranks try the same
    numbers and take what the smallest can; balanced, each what it can itself. Sharded, a rank that ran out of memory
    alone can't take the others back: it fails, and the launcher starts again with `halvings` of the guess.
    """
    device = group.device
    sharded = group.strategy == "fsdp" and group.world > 1
    agreed = (lambda value: value) if balanced(c, group) else group.smallest
    if device.type != "cuda":
        found = even_micro(share, min(share, WITHOUT_GPU))
        voice.say_once(f"micro-batch auto: {found} (no GPU to fill)")
        return found

    def peak(micro: int) -> int | None:
        try:
            found = _trial(c, model, optimizer, device, micro, packed=packed, each=each)
        except torch.OutOfMemoryError:
            if sharded:
                raise
            found = 0
        optimizer.zero()
        torch.cuda.empty_cache()
        return found if agreed(found) else None

    if sharded:
        stoker.mark("CAN-HALVE-MICRO-BATCH")
    one = peak(1)
    if one is None:
        raise torch.OutOfMemoryError(
            "one sample does not fit: shorten data.context_length, set compute.recompute full, or use parallel.strategy"
            " fsdp"
        )
    two = peak(2) if share > 1 else None
    if two is None:
        return 1
    room = memory.room_on(device)
    guess = agreed(min(share, max(2, int((room - one) // max(two - one, 1)) + 1)))
    guess = even_micro(share, max(guess >> halvings, 1))
    while guess > 2 and peak(guess) is None:
        guess = even_micro(share, max(guess * 7 // 8, 2))
    a_sample = f"{format_bytes(two - one)} a sample"
    voice.say_once(f"micro-batch auto: {guess} ({a_sample}, {format_bytes(room)} free)")
    return guess


def random_micro_batch(c: Config, model: Decoder, device: torch.device, micro: int, *, packed: bool) -> None:
    """Forward and backward."""
    inputs = torch.randint(0, model.config.vocab_size, (micro, c.data.context_length), device=device)
    whole = documents(torch.zeros(inputs.shape, dtype=torch.int32) if packed else None, device)
    # None is left out, and a reward model's targets are places in their row.
    targets = inputs % inputs.shape[1]
    model(inputs, targets, torch.zeros((), device=device), whole).backward()


def _trial(
    c: Config, model: Decoder, optimizer: Optimizer, device: torch.device, micro: int, *, packed: bool, each: bool
) -> int:
    torch.cuda.reset_peak_memory_stats(device)
    for last in (False, True):  # the second with the gradients of the first
        with no_sync(model, last or each, last):
            random_micro_batch(c, model, device, micro, packed=packed)
    optimizer.step(0.0, gradient_norm(optimizer.parameters), torch.ones((), device=device))  # "bad": it moves nothing
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device)


def samples_per_step(c: Config, micro: int, world: int, found: Checkpoint | None) -> int:
    """With micro auto and no tokens it stays what fitted at the first start, whatever is halved or fuller now."""
    b = c.batch
    if b.tokens or b.micro:
        return b.tokens // c.data.context_length if b.tokens else b.micro * b.accumulation * world
    stored = found.meta.get("batch") if found is not None else None
    if isinstance(stored, list) and len(stored) == 2 and stored[1] == world:
        if type(stored[0]) is not int or stored[0] < 1:
            assert found is not None
            raise Refusal(
                f"checkpoint {found.path} says {ascii(stored[0])[:40]} samples a step, which is not possible: it is damaged",
                EX_CONFIG,
            )
        return stored[0]
    return (micro << int(os.environ.get(env_vars.MICRO_BATCH_HALVINGS, "0"))) * b.accumulation * world


def graphed(c: Config, model: Decoder, group: Group, voice: Voice, *, packed: bool) -> str:
    """Whether a micro-step becomes one CUDA graph: off, on, or auto (if launching it takes longer than computing it)."""
    asked, lora_dropout = c.compute.cuda_graphs, c.adapter.lora_dropout if c.adapter.method else 0.0
    # Before torch 2.10 or so the random state that dropout needs again in a recomputation can't be asked for in a
    # capture.
    dropped_again = (model.config.dropout or lora_dropout) and c.compute.recompute not in ("auto", "off")
    hindrances = {
        "several ranks": group.world > 1,
        "fsdp": group.strategy != "ddp",
        "packed documents that attention masks": packed and not _packs_by_offsets(model),
        "dropout that is recomputed": bool(dropped_again),
        "model.engine transformers": model.config.engine == "transformers",
        "experts": bool(model.config.experts),  # a grouped product may look at its counts on the host
        "compute.activations host": c.compute.activations == "host",  # its copies run on a stream of their own
        "compute.embedding host": c.compute.embedding == "host",  # its rows are looked up by the host
        "liger's loss": model.loss == "liger",  # counts its labels on the host, which no capture can hold
    }
    hindered = [name for name, is_so in hindrances.items() if is_so]
    if group.device.type != "cuda" or asked == "off":
        return "off"
    if hindered and asked == "on":
        voice.say_once(f"compute.cuda_graphs on: not with {', '.join(hindered)}; steps are launched kernel by kernel")
    if hindered or asked == "on":
        return "off" if hindered else "on"
    small = ready.parameters(model) < GRAPH_PARAMETERS and not packed
    return "on" if small else "auto"


def _packs_by_offsets(model: Decoder) -> bool:
    """A plain decoder whose attention finds documents by their offsets, without a mask of each batch's own."""
    if type(model) is not Decoder or not model.fused:
        return False
    c = model.config
    kernels = {
        packed_kernel(model.device, model.dtype, c.head_dim, window=window, dropout=c.dropout, cap=c.attention_cap)
        for window in model.windows
    }
    return kernels == {"varlen"}


def start_of(
    c: Config, parts: Parts, order: Order, tensors: dict[str, torch.Tensor], found: Checkpoint | None, voice: Voice
) -> Start:
    """The first step; or the weights and the step of the checkpoint."""
    data = resume.Data(parts.material.key, c.data.seed, c.data.context_length, order.count)
    position = resume.Position(0, 0, 0, None)
    if found is not None:
        resume.check(found.meta, found.path, parts.model.config, parts.material.tokenizer_digest, c.optim.kind)
        adapters.check_same(found.meta.get("adapter"), parts.adapters, found.path)
        position, line = resume.position(found.meta, data)
        voice.say_once(f"resumes at step {position.step} from {found.path}")
        if line:
            voice.say_once(line)
        with parsing(f"checkpoint {found.path}"):
            planned = parts.plans is not None and parts.plans.go_on(found.meta.get("balance"))
            if parts.loss_scale is not None:
                parts.loss_scale.go_on(found.meta.get("loss_scale"))
        if planned:
            assert parts.plans is not None
            shares = ", ".join(map(str, parts.plans.at(position.step).shares))
            voice.say_once(f"balance: continuing with {shares} of {parts.batch} samples")
        found.read_into(tensors)
        parts.optimizer.set_count(position.step - position.skipped)
    total = 0 if c.train.max_steps else max(round(c.train.epochs * order.count), 1)
    left = max(total - position.samples, 0)
    steps = c.train.max_steps or position.step + -(-left // parts.batch)
    return Start(position, data, Course(parts.batch, position.samples, total), steps)


def settle(c: Config, parts: Parts) -> None:
    """DDP rebuilds its buckets after the first backward: without two, a resume would add in another order."""
    group = parts.group
    if not c.compute.deterministic or group.world < 3 or group.strategy != "ddp":
        return
    inputs = torch.zeros(parts.micro, c.data.context_length, dtype=torch.int64, device=group.device)
    for _ in range(2):
        parts.wrapped(inputs, inputs, torch.zeros((), device=group.device)).backward()
    parts.optimizer.zero()


def debug_line(model: Decoder, voice: Voice) -> Callable[[int], None]:
    """train.debug: where the largest gradient and weight are, at every step. It waits for the GPU."""
    named = dict(model.named_parameters())

    def largest(of: Callable[[Any], torch.Tensor]) -> str:
        found = {name: float(of(p).abs().max()) for name, p in named.items() if p.grad is not None and of(p).numel()}
        name = max(found, key=lambda one: found[one])
        return f"{found[name]:.3e} in {name}"

    def look(step: int) -> None:
        voice.say(
            f"Debug [{step}] | largest gradient {largest(lambda p: local(p.grad))} | largest weight"
            f" {largest(lambda p: local(p.detach()))}"
        )

    return look
