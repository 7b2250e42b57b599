"""The memory plan of a run that is about to start: fills in what nobody set, and refuses what can't fit any card here."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Collection, Mapping
from typing import Any

from stoker.contract import layout
from stoker.contract.names import EX_CONFIG, EX_UNAVAILABLE, Refusal
from stoker.contract.shape import replace
from stoker.control.launch.differing import keys_in
from stoker.control.launch.options import RunOptions
from stoker.control.launch.request import Request
from stoker.control.launch.runplace import Complete, config_hash, find_place, other_settings
from stoker.control.machine.model import Machine
from stoker.training.config.keys import KEYS, config_of, values_of
from stoker.training.config.layers import Origin
from stoker.training.config.resolve import Resolved
from stoker.training.config.schema import Config
from stoker.training.fit.cards import Card
from stoker.training.fit.footprint import STAGES
from stoker.training.fit.terms import DPO, GRPO, REWARD, StageNeeds, asked_bits
from stoker.training.model.config import LORA, OFF, QLORA
from stoker.training.rl.config import MICRO

TYPE_CHECKING = False
if TYPE_CHECKING:
    from stoker.control.cluster.hosts import Host, Hosts
    from stoker.training.data.shards import Prepared
    from stoker.training.fit.plan import Plan, Wish
    from stoker.training.fit.strategy import Decision

_PLANNED_KINDS = ("adamw", "adamw8bit")  # optimizers that the plan chooses from
ONE = "one"  # of fit/strategy.py
_SURELY = 400 << 20  # bytes: no context was smaller. A refusal must be right
_RANK = 100 << 20  # bytes of a process that has imported torch, at the least
_MOMENTS = {"adamw": 2, "adamw8bit": 0, "muon": 1}  # that an optimizer keeps of each number, in its width at the least


def machines_to_plan(
    config: Config, options: RunOptions, machine: Machine, say: Callable[[str], None]
) -> dict[str, Machine]:
    """By host: this machine (""), or those that --hosts names, where the model may be cut into shards. Others are not asked."""
    if options.hosts is None:
        return {"": machine}
    if config.parallel.strategy == "ddp" or config.parallel.device == "cpu" or options.dry_run:
        return {}
    from stoker.cli.cards import machines_of

    def left_out(line: str) -> None:
        say(f"memory plan: without {line}")

    return machines_of(_hosts(options), left_out if options.min_hosts else None)


def _hosts(options: RunOptions) -> Hosts:
    """Those that --hosts names."""
    from stoker.control.launch.nodes import hosts_of

    _, hosts = hosts_of(Request(options, "", (), frozenset()), os.environ)
    assert hosts is not None
    return hosts


def refuse_too_large(stage: str, resolved: Resolved, options: RunOptions, machines: Mapping[str, Machine]) -> None:
    """Before data is prepared for hours: what can't fit, however little is computed at once."""
    cards = _cards(options, machines) if _known(stage, resolved.config, options) else []
    if not cards:
        return
    from stoker.training.fit import plan

    wish = _wish(stage, resolved, len(cards), None)
    kind = plan.AUTO if "optim.kind" not in resolved.given else wish.optimizer
    least = replace(wish.needs, length=wish.needs.length or wish.needs.new_tokens + 1)
    least_wish = replace(wish, micro=0, recompute=None, optimizer=kind, needs=least)
    found = _decided(cards, least_wish, resolved, options).plan
    tightest = max(found.shares, key=lambda share: share.needs - share.card.free)
    _refuse_shards(found, cards)
    # An estimate refuses nothing, and what is close may fit.
    if not found.fits and not found.about and tightest.planned.total + _SURELY > tightest.card.free:
        words = [*filter(None, [resolved.config.model.load]), *([] if stage == "sft" else ["--stage", stage])]
        line = f"{_too_much(found)} (`{shlex.join(['stoker', 'fit', *words])}` shows more)"
        raise Refusal(f"this does not fit: {line}", EX_UNAVAILABLE)


def refuse_beyond_memory(config: Config, ranks: int, memory: int, loaded: int = 0) -> None:
    """Of ranks on the CPU of a machine with so many bytes: what can't fit, however little is computed at once. A fresh model's
    size is a few characters of a config file, that of one which is `loaded` (its parameters) a file of holes, and both would
    fill the machine's memory."""
    from stoker.training.fit.plan import gib
    from stoker.training.model.config import parameters

    numbers = loaded if config.model.load else parameters(config.model)
    width = 4 if config.compute.dtype in ("auto", "fp32") else 2
    learned = width * (2 + _MOMENTS[config.optim.kind])  # weights, gradients and moments
    least = int(numbers * {LORA: 2, QLORA: 0.5}.get(config.adapter.method, learned))  # frozen: 16 or 4 bits
    needed = ranks * _RANK + least * (1 if config.parallel.strategy == "fsdp" else ranks)
    if needed > memory:
        what = f"{numbers:,} parameters" if least > _RANK else "what a rank takes by itself"
        line = f"{ranks} rank{'' if ranks == 1 else 's'} on the CPU with {what} need {gib(needed)} of memory or more"
        line = f"this does not fit: {line}, and this machine has {gib(memory)}"
        smaller = "an adapter (--lora, --qlora)" if config.model.load else "a smaller model (--model.depth)"
        raise Refusal(f"{line}; take {smaller}, or fewer ranks (--nproc-per-node)", EX_UNAVAILABLE)


def _refuse_shards(found: Plan, cards: list[Card]) -> None:
    """What no estimate of shards can be wrong about: a gathered block that is larger than a card, shards than the host."""
    from stoker.training.fit.memory import GATHERED
    from stoker.training.fit.plan import FSDP, gib

    if found.settings.strategy != FSDP or found.fits:
        return
    for share in found.shares:
        card, size = share.card, share.planned.terms.get(GATHERED, 0)
        if size + _SURELY > card.free:
            line = f"a gathered block and the buffer of the next take {gib(size)}, and {_named(card)} has {gib(card.free)} free"
            more = "" if found.settings.method == "qlora" else "; with --qlora they are a quarter of that"
            raise Refusal(f"this does not fit: {line}, however many ranks there are{more}", EX_UNAVAILABLE)
    for host, free in {card.host: card.host_free for card in cards}.items():
        needed = sum(share.host_bytes for share in found.shares if share.card.host == host)
        if free is not None and needed > free:
            there = f" on {host}" if host else ""
            line = f"parallel.offload {found.settings.offload} needs {gib(needed)} of host memory{there}, and {gib(free)} are available"
            raise Refusal(
                f"this does not fit: {line}; use fewer ranks of this host, or parallel.offload off", EX_UNAVAILABLE
            )


def kept_defaults(config: Config, derived: Collection[str], request_of: Callable[[Config], Request]) -> dict[str, Any]:
    """Return the defaults that the run which --name continues began with: an earlier version may have derived others.

    Empty where they make no difference, or where other settings differ, too: under that name there will be a new run. (An
    id is only continued, or refused for the settings that differ.)
    """
    run = other_settings(request_of(config), os.environ)
    began = keys_in(run.data.get("args")) if run is not None else {}
    try:
        kept = {name: KEYS[name].read(began[name]) for name in derived if name in began}
    except ValueError:  # a record of another version
        return {}
    same = config_of(config.preset, values_of(config) | kept)
    if run is None:
        return {}
    continued = run.data.get("config_hash") == config_hash(request_of(same))
    return kept if continued or request_of(config).options.name == run.id else {}


def with_kept_optimizer(resolved: Resolved, request: Request) -> Resolved:
    """Where a run resumes from a checkpoint, its optimizer, which a plan for another card may have chosen: no other can go on
    with its moments. Not where somebody set it. `request`: what will be started."""
    config = resolved.config
    if "optim.kind" in resolved.given or config.optim.kind not in _PLANNED_KINDS:
        return resolved
    from stoker.training.loop.resume import optimizer_of

    where = _checkpoint(config, request)
    kind = optimizer_of(where) if where is not None else None
    if where is None or kind not in _PLANNED_KINDS:
        return resolved
    given = {**resolved.given, "optim.kind": Origin(f"checkpoint {where}", EX_CONFIG)}
    return replace(resolved, config=config_of(config.preset, values_of(config) | {"optim.kind": kind}), given=given)


def _checkpoint(config: Config, request: Request) -> str | None:
    """The one that the run will resume from (loop/keeping.py), if that can be told here."""
    from stoker.training.loop.resume import located, newest_in

    told = config.checkpoint
    if told.folder:
        found = newest_in(told.folder) if told.resume == "auto" else None
    else:
        try:
            place = find_place(replace(request, options=replace(request.options, dry_run=True)), os.environ)
            found = newest_in(os.path.join(place.dir, layout.CHECKPOINTS)) if place.reopened else None
        except (Complete, Refusal):
            return None  # the start says it
    if found is not None or told.resume in ("auto", "never"):
        return found
    return located(told.resume)


def with_memory_plan(
    stage: str, resolved: Resolved, options: RunOptions, machines: Mapping[str, Machine], ready: Prepared | None,
    say: Callable[[str], None],
) -> tuple[Resolved, RunOptions]:  # fmt: skip
    """Where a model is loaded onto GPUs that are known: what nobody set, as the plan has it. Else as it was. The options with
    one GPU where parallel.strategy auto chose one card."""
    config = resolved.config
    cards = _cards(options, machines) if _known(stage, config, options) else []
    if not cards:
        return without_memory_plan(resolved, options, say), options
    from stoker.training.fit import plan

    def planned(wish: Wish) -> Decision:
        return _decided(cards, wish, resolved, options)

    wish = _wish(stage, resolved, len(cards), ready)
    if stage == GRPO and not config.batch.micro:
        # Fewer answers at once cost less than activations in host memory, or a decoding step by codes.
        found = planned(replace(wish, inputs_on_host=bool(wish.inputs_on_host), needs=_by_copy(wish.needs)))
        if not found.plan.fits:
            wish = replace(wish, micro=0)
            found = planned(wish)
    else:
        found = planned(wish)
    if not found.plan.fits and "optim.kind" not in resolved.given and wish.optimizer == "adamw":
        found = planned(replace(wish, optimizer=plan.AUTO))
    if config.parallel.strategy == "auto":
        say(f"parallel auto: {found.line()}")
    if not found.plan.fits:
        say(f"memory plan: this may not fit: {_too_much(found.plan)}")
    resolved = replace(resolved, config=_filled(config, resolved.given, found.plan, say))
    if found.way.strategy == ONE and len(cards) > 1:
        options = replace(options, gpus=found.plan.shares[0].card.label.removeprefix("GPU "))
    return resolved, options


def _decided(cards: list[Card], wish: Wish, resolved: Resolved, options: RunOptions) -> Decision:
    from stoker.training.fit.plan import DDP, FSDP
    from stoker.training.fit.strategy import decide

    config, given = resolved.config, resolved.given
    p, but = config.parallel, set[str]()
    # As config/check.py has it. One card is no choice where somebody says how many, or where a step's samples follow from that.
    if p.balance != "off" or p.comm != "full" or config.compute.cuda_graphs == "on" or wish.on_host:
        but.add(FSDP)
    counted = options.nproc_per_node or options.gpus or options.gpu or options.hosts or "parallel.balance" in given
    if counted or not config.batch.tokens or wish.needs.stage == GRPO:
        but.add(ONE)
    return decide(cards, wish, p.strategy if p.strategy in (DDP, FSDP) else "auto", but)


def without_memory_plan(resolved: Resolved, options: RunOptions, say: Callable[[str], None]) -> Resolved:
    """parallel.strategy auto is ddp there."""
    config = resolved.config
    if config.parallel.strategy != "auto" or options.dry_run:
        return resolved
    say(
        "parallel auto: ddp; there is no memory plan for this run (`stoker docs fit`); --parallel fsdp shards the model"
    )
    return replace(resolved, config=config_of(config.preset, values_of(config) | {"parallel.strategy": "ddp"}))


def _named(card: Card) -> str:
    return f"{card.host}'s {card.label}" if card.host else card.label


def _by_copy(needs: StageNeeds) -> StageNeeds:
    return needs if needs.bits else replace(needs, bits=16)


def _too_much(found: Plan) -> str:
    from stoker.training.fit.plan import again_words, gib

    tightest = max(found.shares, key=lambda share: share.needs - share.card.free)
    card, s = tightest.card, found.settings
    again = f", {again_words(s, found.wish.layers)} computed again" if s.saves else ""
    change = found.change
    words = "" if change is None else change.flags(train=True) or change.words
    return (
        f"{_named(card)} has {gib(card.free)} free, and {s.method} with {s.micro} sample{'' if s.micro == 1 else 's'} at"
        f" once{again} needs {gib(tightest.needs)}; smallest change: {words}"
    )


def _known(stage: str, config: Config, options: RunOptions) -> bool:
    here = options.nnodes == "1" and not options.dry_run
    compute = config.compute
    ours = config.parallel.device != "cpu" and compute.compile in ("auto", "fused")
    fused = compute.fp8 == "off" and compute.dtype != "fp32" and compute.recompute != "selective"
    there = bool(config.model.load) or (stage == "pretrain" and config.parallel.strategy != "ddp")
    return stage in STAGES and there and here and ours and fused


def _cards(options: RunOptions, machines: Mapping[str, Machine]) -> list[Card]:
    """Those that the run will get; none where it gets none, and says why itself."""
    from stoker.cli.cards import card_of
    from stoker.control.launch.plan import choose_on
    from stoker.training.fit.runs import contexts

    about: dict[str, Host | None] = {"": None}
    if options.hosts is not None:
        about = {host.name: host for host in _hosts(options).hosts}
    seen, cards = contexts(layout.runs_root(options.runs_dir, os.environ)), list[Card]()
    try:
        for host, machine in machines.items():
            gpus = choose_on(options, os.environ, machine, {}, about[host]).gpus
            cards += [card_of(gpu, host, seen, machine.memory_available) for gpu in gpus]
    except Refusal:
        return []
    if options.wait:  # until whoever holds the rest is gone
        cards = [replace(card, free=card.total) for card in cards]
    return cards if len({(card.host, card.label) for card in cards}) == len(cards) else []  # not those that share one


def _wish(stage: str, resolved: Resolved, world: int, ready: Prepared | None) -> Wish:
    from stoker.training.fit import plan
    from stoker.training.model import hf_config, hf_hub
    from stoker.training.model.config import with_rows
    from stoker.training.parallel.config import recomputed_blocks

    config, given = resolved.config, resolved.given
    values, context = values_of(config), config.data.context_length
    folder, model = "", with_rows(config.model, ready.vocab_size if ready is not None else 0)
    if config.model.load:
        folder = hf_hub.folder_of(config.model.load, lambda line: None, code=config.model.trust_remote_code)
        model = hf_config.shape_for(config.model, folder)
    told, batch = str(config.compute.recompute), config.batch
    again, mlp = (None, 0) if told == "auto" else recomputed_blocks(told, model.layers)
    packed = stage in (REWARD, DPO) or (stage != GRPO and (config.data.kind == "chat" or config.data.documents))
    # Both answers of a pair are texts; DPO's prompts, too.
    documents = max(context // plan.DOCUMENT, 1) * {REWARD: 2, DPO: 4}.get(stage, 1)
    if ready is not None and ready.train_samples and ready.train_documents:
        documents = max(-(-ready.train_documents // ready.train_samples), 1)
    host = {"host": True, "device": None if "compute.embedding" not in given else False}
    moved = {"host": True, "device": None if "compute.activations" not in given else False}
    needs = _needs(stage, config, folder, world)
    micro = batch.micro if "batch.micro" in given else 0
    samples = batch.tokens // context or max(batch.micro, 1) * batch.accumulation * world
    if stage == GRPO:
        micro, samples = batch.micro or MICRO, needs.answers
    return plan.Wish(
        model, context, plan.FULL if config.adapter.method == OFF else config.adapter.method, config.adapter,
        config.optim.kind, again, micro, host[values["compute.embedding"]] if "compute.embedding" in values else False,
        packed, documents, samples, moved[config.compute.activations], needs,
        offload=config.parallel.offload if "parallel.offload" in given else None,
        sharding=config.parallel.sharding if "parallel.sharding" in given else None,
        kept="optim.kind" in given and given["optim.kind"].words.startswith("checkpoint "), mlp=mlp,
    )  # fmt: skip


def _needs(stage: str, config: Config, folder: str, world: int) -> StageNeeds:
    """`folder`: of the model."""
    from stoker.training.fit.scorer import with_scorer
    from stoker.training.model.hf_config import is_adapter

    loaded = config.adapter.method != OFF and (bool(config.adapter.continue_from) or is_adapter(folder))
    if stage != GRPO:
        return StageNeeds(stage, likelihood=config.reward.likelihood, loaded=loaded)
    c, how = config.grpo, config.generate
    found = StageNeeds(
        GRPO, reference=c.kl > 0, loaded=loaded, rows=how.rows, bits=asked_bits(how.bits), new_tokens=how.new_tokens,
        length=_longest(config, folder), answers=-(-c.prompts_per_step // world) * c.group * world, updates=c.updates,
    )  # fmt: skip
    return with_scorer(found, c.reward_model) if c.reward_model else found


def _longest(config: Config, folder: str) -> int:
    """Tokens of the longest prompt with its answer; 0: the prompts can't be read here. Longer ones than the context are left
    out by the recipe."""
    from stoker.training.model.hf_config import tokenizer_in
    from stoker.training.stages.registry import STAGES as ALL
    from stoker.training.tokenizer.tokenizer import load

    count = ALL[GRPO].lengths
    if count is None or not os.path.isfile(config.grpo.prompts):
        return 0
    try:
        counted = count(config, load(config.tokenizer.path or tokenizer_in(folder)))
    except Refusal:
        return 0  # the recipe says what is wrong with them
    context = config.data.context_length
    return max((length for _, lengths in counted for length in lengths if length <= context), default=0)


def _filled(config: Config, given: Any, found: Plan, say: Callable[[str], None]) -> Config:
    """What nobody set, as the plan has it."""
    from stoker.training.fit.plan import gib
    from stoker.training.parallel.config import recompute_word

    s, layers = found.settings, found.wish.layers
    values, changed = values_of(config), dict[str, Any]()
    if config.parallel.strategy == "auto":
        changed["parallel.strategy"] = s.strategy
    if values["compute.recompute"] == "auto" and s.saves:
        changed["compute.recompute"] = recompute_word(s.recompute, s.mlp, layers)
    if s.optimizer != config.optim.kind:
        changed["optim.kind"] = s.optimizer
    if s.on_host and "compute.embedding" not in given:
        changed["compute.embedding"] = "host"
    if s.offload != config.parallel.offload:
        changed["parallel.offload"] = s.offload
    if s.sharding != config.parallel.sharding:
        changed["parallel.sharding"] = s.sharding
    if s.inputs_on_host and config.compute.activations != "host":
        changed["compute.activations"] = "host"
    if s.bits == 4 and config.generate.bits == "auto":
        changed["generate.bits"] = "4"
    default = config.batch.micro or (MICRO if found.wish.needs.stage == GRPO else 0)
    if "batch.micro" not in given and default > s.micro:
        changed["batch.micro"] = s.micro
    tightest = max(found.shares, key=lambda share: share.needs - share.card.free)
    about = f" ({found.about})" if found.about else ""
    named = {name: "optimizer" if name == "optim.kind" else KEYS[name].name for name in changed}
    words = ", ".join(f"{named[name]} {value}" for name, value in changed.items()) or "nothing to change"
    say(
        f"memory plan: {gib(tightest.planned.total)} of {gib(tightest.card.free)} free on {_named(tightest.card)} with"
        f" micro-batch {s.micro}{about}; {words}"
    )
    return config_of(config.preset, values | changed) if changed else config
