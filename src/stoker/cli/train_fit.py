"""The memory plan of a run that is about to start: fills in what nobody set, and refuses what can't fit any card here."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Collection, Mapping
from typing import Any

from stoker.contract import layout
from stoker.contract.errors import EX_CONFIG, EX_UNAVAILABLE, Refusal
from stoker.contract.frozen import replace
from stoker.contract.units import format_bytes, plural
from stoker.control.machine.model import Machine
from stoker.control.plan.options import RunOptions
from stoker.control.plan.request import Request
from stoker.control.plan.run_changes import parse_key_values
from stoker.control.plan.run_dir import AlreadyEnded, config_hash, find_run_with_other_settings, open_run_dir
from stoker.training.config.keys import KEYS, config_of, values_of
from stoker.training.config.layers import Origin
from stoker.training.config.resolve import Resolved
from stoker.training.config.schema import Config
from stoker.training.fit.cards import Card
from stoker.training.fit.footprint import STAGES
from stoker.training.model.config import LORA, QLORA

TYPE_CHECKING = False
if TYPE_CHECKING:
    from stoker.control.cluster.hosts import Host, Hosts
    from stoker.training.config.amount import Amount
    from stoker.training.data.shards import Prepared
    from stoker.training.fit.plan import Plan
    from stoker.training.stages.run_plan import RunInputs

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
    from stoker.control.plan.targets import resolve_hosts

    _, hosts = resolve_hosts(Request(options, "", (), frozenset()), os.environ)
    assert hosts is not None
    return hosts


def refuse_too_large(stage: str, resolved: Resolved, options: RunOptions, machines: Mapping[str, Machine]) -> None:
    """Refuse a run that can't fit however little is computed at once, before its data is prepared for hours."""
    cards = _cards(options, machines) if _known(stage, resolved.config, options) else []
    if not cards:
        return
    from stoker.training.fit.text import tightest
    from stoker.training.stages.run_plan import plan_smallest

    plan = plan_smallest(_inputs(stage, resolved, None, None), cards, _excluded(resolved, options)).plan
    _refuse_shards(plan, cards)
    share = tightest(plan)
    # An estimate refuses nothing, and what is close may fit.
    if not plan.fits and not plan.about and share.planned.total + _SURELY > share.card.free:
        words = [*filter(None, [resolved.config.model.load]), *([] if stage == "sft" else ["--stage", stage])]
        line = f"{_too_much(plan)} (`{shlex.join(['stoker', 'fit', *words])}` shows more)"
        raise Refusal(f"this does not fit: {line}", EX_UNAVAILABLE)


def refuse_beyond_memory(config: Config, ranks: int, memory: int, loaded: int = 0) -> None:
    """Refuse ranks on the CPU whose weights, gradients and optimizer state exceed the machine's `memory` in bytes.

    `loaded`: parameters of the model that is loaded.
    """
    from stoker.training.model.config import parameters

    numbers = loaded if config.model.load else parameters(config.model)
    width = 4 if config.compute.dtype in ("auto", "fp32") else 2
    learned = width * (2 + _MOMENTS[config.optim.kind])  # weights, gradients and moments
    least = int(numbers * {LORA: 2, QLORA: 0.5}.get(config.adapter.method, learned))  # frozen: 16 or 4 bits
    needed = ranks * _RANK + least * (1 if config.parallel.strategy == "fsdp" else ranks)
    if needed > memory:
        what = f"{plural(numbers, 'parameter')}" if least > _RANK else "what a rank takes by itself"
        line = f"{ranks} rank{'' if ranks == 1 else 's'} on the CPU with {what} need {format_bytes(needed)} of memory or more"
        line = f"this does not fit: {line}, and this machine has {format_bytes(memory)}"
        smaller = "an adapter (--lora, --qlora)" if config.model.load else "a smaller model (--model.depth)"
        raise Refusal(f"{line}; take {smaller}, or fewer ranks (--nproc-per-node)", EX_UNAVAILABLE)


def _refuse_shards(found: Plan, cards: list[Card]) -> None:
    """What no estimate of shards can be wrong about: a gathered block that is larger than a card, shards than the host."""
    from stoker.training.fit.memory import GATHERED
    from stoker.training.fit.plan import FSDP

    if found.settings.strategy != FSDP or found.fits:
        return
    for share in found.shares:
        card, size = share.card, share.planned.terms.get(GATHERED, 0)
        if size + _SURELY > card.free:
            line = f"a gathered block and the buffer of the next take {format_bytes(size)}, and {_named(card)} has {format_bytes(card.free)} free"
            more = "" if found.settings.method == "qlora" else "; with --qlora they are a quarter of that"
            raise Refusal(f"this does not fit: {line}, however many ranks there are{more}", EX_UNAVAILABLE)
    for host, free in {card.host: card.host_free for card in cards}.items():
        needed = sum(share.host_bytes for share in found.shares if share.card.host == host)
        if free is not None and needed > free:
            there = f" on {host}" if host else ""
            line = f"parallel.offload {found.settings.offload} needs {format_bytes(needed)} of host memory{there}, and {format_bytes(free)} are available"
            raise Refusal(
                f"this does not fit: {line}; use fewer ranks of this host, or parallel.offload off", EX_UNAVAILABLE
            )


def kept_defaults(config: Config, derived: Collection[str], request_of: Callable[[Config], Request]) -> dict[str, Any]:
    """Return the defaults that the run which --name continues began with: an earlier version may have derived others.

    Empty where they make no difference, or where other settings differ, too: under that name there will be a new run. (An
    id is only continued, or refused for the settings that differ.)
    """
    run = find_run_with_other_settings(request_of(config), os.environ)
    began = parse_key_values(run.data.get("args")) if run is not None else {}
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
            place = open_run_dir(replace(request, options=replace(request.options, dry_run=True)), os.environ)
            found = newest_in(os.path.join(place.dir, layout.CHECKPOINTS)) if place.reopened else None
        except (AlreadyEnded, Refusal):
            return None  # the start says it
    if found is not None or told.resume in ("auto", "never"):
        return found
    return located(told.resume)


def with_memory_plan(
    stage: str,
    resolved: Resolved,
    options: RunOptions,
    machines: Mapping[str, Machine],
    ready: Prepared | None,
    say: Callable[[str], None],
    amount: Amount | None = None,
) -> tuple[Resolved, RunOptions, Plan | None]:
    """Return the settings with the plan's values for whatever the user did not set, where the GPUs of the run are known.

    The options name one GPU if parallel.strategy auto chose one. The plan is None where there is none for this run.
    """
    config = resolved.config
    cards = _cards(options, machines) if _known(stage, config, options) else []
    if not cards:
        return without_memory_plan(resolved, options, say), options, None
    from stoker.training.stages.run_plan import plan_run, planned_values, summary_line

    inputs = _inputs(stage, resolved, ready, amount)
    decision = plan_run(inputs, cards, exclude=_excluded(resolved, options))
    plan = decision.plan
    if config.parallel.strategy == "auto":
        say(f"parallel auto: {decision.line()}")
    if not plan.fits:
        say(f"memory plan: this may not fit: {_too_much(plan)}")
    changed = planned_values(config, resolved.given, plan)
    named = {name: "optimizer" if name == "optim.kind" else KEYS[name].name for name in changed}
    words = ", ".join(f"{named[name]} {value}" for name, value in changed.items() if name != "batch.micro")
    say(f"{summary_line(inputs, plan)}; {words or 'nothing to change'}")
    resolved = replace(resolved, config=config_of(config.preset, values_of(config) | changed))
    if decision.way.strategy == ONE and len(cards) > 1:
        options = replace(options, gpus=plan.shares[0].card.label.removeprefix("GPU "))
    return resolved, options, plan


def _excluded(resolved: Resolved, options: RunOptions) -> set[str]:
    """Return the strategies that the user's options rule out: one GPU, where they say how many there are."""
    counted = options.nproc_per_node or options.gpus or options.gpu or options.hosts
    return {ONE} if counted or "parallel.balance" in resolved.given else set()


def _inputs(stage: str, resolved: Resolved, ready: Prepared | None, amount: Amount | None) -> RunInputs:
    from stoker.training.model import hf_config, hf_hub
    from stoker.training.model.config import with_rows
    from stoker.training.stages.run_plan import RunInputs

    model = resolved.config.model
    if not model.load:
        shape = with_rows(model, ready.vocab_size if ready is not None else 0)
        return RunInputs(stage, resolved.config, resolved.given, shape, "", ready, amount)
    folder = hf_hub.folder_of(model.load, lambda line: None, code=model.trust_remote_code)
    shape = hf_config.shape_for(model, folder)
    return RunInputs(stage, resolved.config, resolved.given, shape, folder, ready, amount)


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


def _too_much(found: Plan) -> str:
    from stoker.training.fit.plan import again_words
    from stoker.training.fit.text import tightest

    share = tightest(found)
    card, s = share.card, found.settings
    again = f", {again_words(s, found.wish.layers)} computed again" if s.saves else ""
    change = found.change
    words = "" if change is None else change.flags(train=True) or change.words
    return (
        f"{_named(card)} has {format_bytes(card.free)} free, and {s.method} with {s.micro} sample{'' if s.micro == 1 else 's'} at"
        f" once{again} needs {format_bytes(share.needs)}; smallest change: {words}"
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
    from stoker.control.plan.run_plan import choose_gpus_on
    from stoker.training.fit.runs import contexts

    about: dict[str, Host | None] = {"": None}
    if options.hosts is not None:
        about = {host.name: host for host in _hosts(options).hosts}
    seen, cards = contexts(layout.runs_root(options.runs_dir, os.environ)), list[Card]()
    try:
        for host, machine in machines.items():
            gpus = choose_gpus_on(options, os.environ, machine, {}, about[host]).gpus
            cards += [card_of(gpu, host, seen, machine.memory_available) for gpu in gpus]
    except Refusal:
        return []
    if options.wait:  # until whoever holds the rest is gone
        cards = [replace(card, free=card.total) for card in cards]
    return cards if len({(card.host, card.label) for card in cards}) == len(cards) else []  # not those that share one
