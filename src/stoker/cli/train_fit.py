"""Plans the memory of a run that is about to start: chooses settings that the user did not set, and refuses impossible ones."""

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

_PLANNED_OPTIMIZERS = ("adamw", "adamw8bit")  # the plan chooses one of these
ONE = "one"  # the strategy of fit/strategy.py
# A refusal must be certain, so these are lower bounds.
_MIN_CONTEXT = 400 << 20  # bytes of a CUDA context
_MIN_RANK = 100 << 20  # bytes of a process that has imported torch
_MIN_MOMENTS = {"adamw": 2, "adamw8bit": 0, "muon": 1}  # numbers that an optimizer keeps per parameter


def machines_to_plan(
    config: Config, options: RunOptions, machine: Machine, say: Callable[[str], None]
) -> dict[str, Machine]:
    """Return the machines of the run by host: this one (""), or those of --hosts if the model may be sharded.

    Other hosts are examined only if the plan needs them; else the result is {}.
    """
    if options.hosts is None:
        return {"": machine}
    if config.parallel.strategy == "ddp" or config.parallel.device == "cpu" or options.dry_run:
        return {}
    from stoker.cli.machines import observe_hosts

    def report_skipped(line: str) -> None:
        say(f"memory plan: skipping {line}")

    return observe_hosts(_resolve_hosts(options), report_skipped if options.min_hosts else None)


def _resolve_hosts(options: RunOptions) -> Hosts:
    """Return the hosts that --hosts names."""
    from stoker.control.plan.targets import resolve_hosts

    _, hosts = resolve_hosts(Request(options, "", (), frozenset()), os.environ)
    assert hosts is not None
    return hosts


def refuse_too_large(stage: str, resolved: Resolved, options: RunOptions, machines: Mapping[str, Machine]) -> None:
    """Raise Refusal if a run can't fit even with its smallest settings, since preparing its data may take hours."""
    cards = _planned_cards(stage, resolved.config, options, machines)
    if not cards:
        return
    from stoker.training.fit.text import tightest
    from stoker.training.stages.run_plan import plan_smallest

    plan = plan_smallest(_run_inputs(stage, resolved, None, None), cards, _excluded_strategies(resolved, options)).plan
    _refuse_impossible_shards(plan, cards)
    share = tightest(plan)
    # Don't refuse an estimated plan (plan.about) or one that is close to fitting: it may fit.
    if not plan.fits and not plan.about and share.planned.total + _MIN_CONTEXT > share.card.free:
        model = [resolved.config.model.load] if resolved.config.model.load else []
        command = shlex.join(["stoker", "fit", *model, *([] if stage == "sft" else ["--stage", stage])])
        raise Refusal(f"this does not fit: {_describe_excess(plan)} (`{command}` shows more)", EX_UNAVAILABLE)


def refuse_beyond_memory(config: Config, ranks: int, memory: int, loaded: int = 0) -> None:
    """Raise Refusal if weights, gradients and optimizer state of ranks on the CPU exceed the machine's `memory` in bytes.

    `loaded` is the number of parameters of a loaded model.
    """
    from stoker.training.model.config import parameters

    count = loaded if config.model.load else parameters(config.model)
    width = 4 if config.compute.dtype in ("auto", "fp32") else 2
    trained = width * (2 + _MIN_MOMENTS[config.optim.kind])  # bytes per parameter: weights, gradients and moments
    model_bytes = int(
        count * {LORA: 2, QLORA: 0.5}.get(config.adapter.method, trained)
    )  # frozen weights take 16 or 4 bits
    needed = ranks * _MIN_RANK + model_bytes * (1 if config.parallel.strategy == "fsdp" else ranks)
    if needed > memory:
        size = plural(count, "parameter")
        if model_bytes <= _MIN_RANK:
            size = f"{format_bytes(_MIN_RANK)} per rank for torch alone"
        verb = "needs" if ranks == 1 else "need"
        line = f"{plural(ranks, 'rank')} on the CPU with {size} {verb} {format_bytes(needed)} of memory or more"
        smaller = "an adapter (--lora, --qlora)" if config.model.load else "a smaller model (--model.depth)"
        line = f"this does not fit: {line}, and this machine has {format_bytes(memory)}"
        raise Refusal(f"{line}; use {smaller}, or fewer ranks (--nproc-per-node)", EX_UNAVAILABLE)


def _refuse_impossible_shards(plan: Plan, cards: list[Card]) -> None:
    """Raise Refusal if a gathered block is larger than a GPU, or if offloaded shards are larger than host memory."""
    from stoker.training.fit.memory import GATHERED
    from stoker.training.fit.plan import FSDP

    if plan.settings.strategy != FSDP or plan.fits:
        return
    for share in plan.shares:
        card, size = share.card, share.planned.terms.get(GATHERED, 0)
        if size + _MIN_CONTEXT > card.free:
            line = f"a gathered block and the buffer of the next take {format_bytes(size)}, and {_name_card(card)} has {format_bytes(card.free)} free"
            hint = "" if plan.settings.method == "qlora" else "; with --qlora they take a quarter of that"
            raise Refusal(f"this does not fit: {line}, however many ranks there are{hint}", EX_UNAVAILABLE)
    for host, free in {card.host: card.host_free for card in cards}.items():
        needed = sum(share.host_bytes for share in plan.shares if share.card.host == host)
        if free is not None and needed > free:
            on_host = f" on {host}" if host else ""
            line = f"parallel.offload {plan.settings.offload} needs {format_bytes(needed)} of host memory{on_host}, and {format_bytes(free)} are available"
            fix = "use fewer ranks of this host, or parallel.offload off"
            raise Refusal(f"this does not fit: {line}; {fix}", EX_UNAVAILABLE)


def kept_defaults(
    config: Config, derived: Collection[str], make_request: Callable[[Config], Request]
) -> dict[str, Any]:
    """Return the derived defaults of the run that --name continues, since an earlier version may have derived others.

    Returns {} if they are the same, or if other settings differ, too: these start a new run of that name. A run named by
    its id never starts a new one, so its defaults are returned in any case.
    """
    run = find_run_with_other_settings(make_request(config), os.environ)
    if run is None:
        return {}
    recorded = parse_key_values(run.data.get("args"))
    try:
        kept = {name: KEYS[name].read(recorded[name]) for name in derived if name in recorded}
    except ValueError:  # another version recorded values that this one can't read
        return {}
    earlier = config_of(config.preset, values_of(config) | kept)
    continues = run.data.get("config_hash") == config_hash(make_request(earlier))
    return kept if continues or make_request(config).options.name == run.id else {}


def with_kept_optimizer(resolved: Resolved, request: Request) -> Resolved:
    """Use the optimizer of the checkpoint that the run resumes from, unless the user set one.

    A plan for another GPU may have chosen that optimizer, and another optimizer can't use its moments.
    """
    config = resolved.config
    if "optim.kind" in resolved.given or config.optim.kind not in _PLANNED_OPTIMIZERS:
        return resolved
    from stoker.training.loop.resume import optimizer_of

    checkpoint = _find_resume_checkpoint(config, request)
    kind = optimizer_of(checkpoint) if checkpoint is not None else None
    if checkpoint is None or kind not in _PLANNED_OPTIMIZERS:
        return resolved
    given = {**resolved.given, "optim.kind": Origin(f"checkpoint {checkpoint}", EX_CONFIG)}
    return replace(resolved, config=config_of(config.preset, values_of(config) | {"optim.kind": kind}), given=given)


def _find_resume_checkpoint(config: Config, request: Request) -> str | None:
    """Return the checkpoint that the run will resume from, or None if there is none or only the start will tell."""
    from stoker.training.loop.resume import located, newest_in

    cfg = config.checkpoint
    if cfg.folder:
        newest = newest_in(cfg.folder) if cfg.resume == "auto" else None
    else:
        try:
            run_dir = open_run_dir(replace(request, options=replace(request.options, dry_run=True)), os.environ)
            newest = newest_in(os.path.join(run_dir.dir, layout.CHECKPOINTS)) if run_dir.reopened else None
        except (AlreadyEnded, Refusal):
            return None  # the start reports it
    if newest is not None or cfg.resume in ("auto", "never"):
        return newest
    return located(cfg.resume)


def with_memory_plan(
    stage: str,
    resolved: Resolved,
    options: RunOptions,
    machines: Mapping[str, Machine],
    ready: Prepared | None,
    say: Callable[[str], None],
    amount: Amount | None = None,
) -> tuple[Resolved, RunOptions, Plan | None]:
    """Plan the memory and return the settings with the plan's values for keys that the user did not set.

    Also returns the options, which select one GPU if parallel.strategy auto chose one, and the plan, or None if the run's
    GPUs are not known or the stage has no plan.
    """
    config = resolved.config
    cards = _planned_cards(stage, config, options, machines)
    if not cards:
        return without_memory_plan(resolved, options, say), options, None
    from stoker.training.stages.run_plan import plan_run, planned_values, summary_line

    inputs = _run_inputs(stage, resolved, ready, amount)
    decision = plan_run(inputs, cards, exclude=_excluded_strategies(resolved, options))
    plan = decision.plan
    if config.parallel.strategy == "auto":
        say(f"parallel auto: {decision.line()}")
    if not plan.fits:
        say(f"memory plan: this may not fit: {_describe_excess(plan)}")
    changed = planned_values(config, resolved.given, plan)
    labels = {name: "optimizer" if name == "optim.kind" else KEYS[name].name for name in changed}
    changes = ", ".join(f"{labels[name]} {value}" for name, value in changed.items() if name != "batch.micro")
    say(f"{summary_line(inputs, plan)}; {changes or 'nothing to change'}")
    resolved = replace(resolved, config=config_of(config.preset, values_of(config) | changed))
    if decision.way.strategy == ONE and len(cards) > 1:
        options = replace(options, gpus=plan.shares[0].card.label.removeprefix("GPU "))
    return resolved, options, plan


def without_memory_plan(resolved: Resolved, options: RunOptions, say: Callable[[str], None]) -> Resolved:
    """Return the settings of a run without a plan, in which parallel.strategy auto becomes ddp."""
    config = resolved.config
    if config.parallel.strategy != "auto" or options.dry_run:
        return resolved
    say(
        "parallel auto: ddp, since there is no memory plan for this run (`stoker docs fit`); --parallel fsdp shards the model"
    )
    return replace(resolved, config=config_of(config.preset, values_of(config) | {"parallel.strategy": "ddp"}))


def _excluded_strategies(resolved: Resolved, options: RunOptions) -> set[str]:
    """Return the strategies that the user's options exclude: one GPU, if they set the number of ranks or GPUs."""
    sets_gpus = options.nproc_per_node or options.gpus or options.gpu or options.hosts
    return {ONE} if sets_gpus or "parallel.balance" in resolved.given else set()


def _run_inputs(stage: str, resolved: Resolved, ready: Prepared | None, amount: Amount | None) -> RunInputs:
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


def _name_card(card: Card) -> str:
    return f"{card.host}'s {card.label}" if card.host else card.label


def _describe_excess(plan: Plan) -> str:
    """Describe for the fullest GPU how much a plan needs, how much is free, and the smallest change that helps."""
    from stoker.training.fit.plan import again_words
    from stoker.training.fit.text import tightest

    share = tightest(plan)
    card, settings, change = share.card, plan.settings, plan.change
    recomputed = f", {again_words(settings, plan.wish.layers)} recomputed," if settings.saves else ""
    fix = "" if change is None else change.flags(train=True) or change.words
    return (
        f"{_name_card(card)} has {format_bytes(card.free)} free, and {settings.method} with a micro-batch of"
        f" {plural(settings.micro, 'sample')}{recomputed} needs {format_bytes(share.needs)}; smallest change: {fix}"
    )


def _planned_cards(stage: str, config: Config, options: RunOptions, machines: Mapping[str, Machine]) -> list[Card]:
    """Return the GPUs that the run will get, or [] if it has no memory plan or no GPU (the start then reports why)."""
    compute = config.compute
    has_model = bool(config.model.load) or (stage == "pretrain" and config.parallel.strategy != "ddp")
    on_gpus = config.parallel.device != "cpu" and compute.compile in ("auto", "fused")
    is_fused = compute.fp8 == "off" and compute.dtype != "fp32" and compute.recompute != "selective"
    starts_here = options.nnodes == "1" and not options.dry_run
    if not (stage in STAGES and has_model and on_gpus and is_fused and starts_here):
        return []
    from stoker.cli.machines import make_card
    from stoker.control.plan.run_plan import choose_gpus_on
    from stoker.training.fit.runs import contexts

    hosts: dict[str, Host | None] = {"": None}
    if options.hosts is not None:
        hosts = {host.name: host for host in _resolve_hosts(options).hosts}
    measured, cards = contexts(layout.runs_root(options.runs_dir, os.environ)), list[Card]()
    try:
        for host, machine in machines.items():
            gpus = choose_gpus_on(options, os.environ, machine, {}, hosts[host]).gpus
            cards += [make_card(gpu, host, measured, machine.memory_available) for gpu in gpus]
    except Refusal:
        return []
    if options.wait:  # the run starts when the GPUs are free
        cards = [replace(card, free=card.total) for card in cards]
    share_gpus = len({(card.host, card.label) for card in cards}) < len(cards)
    return [] if share_gpus else cards
