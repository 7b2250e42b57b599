"""`stoker fit MODEL`: the GPU memory that training a model takes, and the settings that fit. --probe measures five steps."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import tempfile

from stoker.cli.machines import GpuFlags, select_cards, select_machine
from stoker.contract import layout
from stoker.contract.errors import EX_CONFIG, EX_SOFTWARE, EX_UNAVAILABLE, EX_USAGE, Refusal
from stoker.contract.frozen import frozen, replace
from stoker.contract.options import OptionParser, suggest
from stoker.contract.safe_io import read_json
from stoker.contract.terminal import print_json, print_status, print_text
from stoker.contract.units import finite_number, format_bytes
from stoker.training.config.amount import Amount
from stoker.training.config.derived import Situation
from stoker.training.config.flags import parse
from stoker.training.config.keys import config_of, values_of
from stoker.training.config.layers import Origin, gather
from stoker.training.config.resolve import settle
from stoker.training.config.schema import Config
from stoker.training.data.shards import Prepared
from stoker.training.data.sources import check_there
from stoker.training.fit import pace, plan, strategy, text
from stoker.training.fit.footprint import STAGES
from stoker.training.fit.runs import contexts
from stoker.training.fit.terms import DPO, GRPO, REWARD, SFT, StageNeeds
from stoker.training.generate.finding import find_for_setting
from stoker.training.model import hf_config, hf_hub
from stoker.training.model.config import LORA, QLORA, ModelConfig
from stoker.training.model.hf_config import tokenizer_in
from stoker.training.parallel.config import EVERYTHING, NOTHING, OFFLOAD, read_recompute
from stoker.training.stages.registry import STAGES as TRAIN_STAGES
from stoker.training.stages.run_plan import RunInputs, plan_run, summary_line
from stoker.training.stages.situation import with_defaults, within_context_of_model

_DESCRIPTION = (
    "Shows how much GPU memory training a model takes, term by term, and which settings fit. Reads only config.json; needs"
    " neither torch nor a GPU."
)
_EXAMPLES = """exit codes: 0 it fits, 1 it does not, 64-78 a refusal

examples:
  stoker fit ./model-8b                                  on the GPUs of this machine
  stoker fit ./model-8b --gpus 8GB --context-length 2048
  stoker fit ./model-14b --gpus 2xH100 --data chats.jsonl --price 2.5
  stoker fit ./model-8b --stage grpo --gpus 80GB --rows 32 --new-tokens 512
  stoker fit ./model-32b --gpus 4x24GB --method lora     one GPU, ddp or fsdp: what each would take
  stoker fit ./model-14b --machine box.json --json       for a machine recorded by `stoker doctor --record`
  stoker fit ./model-14b --data chats.jsonl --probe      five real steps: planned against measured"""
_OPTIMIZERS = (plan.AUTO, "adamw", "adamw8bit", "muon")
_DEFAULT_SAMPLES = 16  # samples per step without --data; with --data they follow from it
PROBE_STEPS = 5
_NO_MEASUREMENT = "the probe measured no GPU memory; `stoker doctor` shows whether there is a GPU"
# Flags that apply to one stage only.
_STAGE_OF_FLAG = {
    "rows": GRPO,
    "bits": GRPO,
    "new_tokens": GRPO,
    "reward_model": GRPO,
    "kl": GRPO,
    "no_likelihood": REWARD,
}
_RANGES = {
    "context_length": (2, 1 << 24),
    "micro": (1, 1 << 16),
    "lora_rank": (1, 4096),
    "samples": (1, 1 << 20),
    "rows": (1, 1 << 16),
    "new_tokens": (1, 1 << 20),
}
# Flags that set a key of the configuration of `stoker train`.
_KEY_OF_FLAG = {
    "context_length": "data.context_length",
    "micro": "batch.micro",
    "recompute": "compute.recompute",
    "embedding": "compute.embedding",
    "activations": "compute.activations",
    "offload": "parallel.offload",
    "optimizer": "optim.kind",
    "rows": "generate.rows",
    "bits": "generate.bits",
    "new_tokens": "generate.new_tokens",
    "reward_model": "grpo.reward_model",
    "kl": "grpo.kl",
    "lora_rank": "adapter.lora_rank",
    "lora_targets": "adapter.lora_targets",
}


def build_parser() -> OptionParser:
    parser = OptionParser("stoker fit", _DESCRIPTION, _EXAMPLES, allow_abbrev=False)
    model = "a model's folder (config.json is enough), a run (path, id, name or latest), or a hub id"
    parser.option("model", "MODEL", model)
    parser.option("--data", "PATH", "training data: adds time and cost of an epoch", action="append", default=[])
    parser.option("--stage", "STAGE", f"stage to plan for: {', '.join(STAGES)} (default: {SFT})", default=SFT)
    methods = (plan.AUTO, *plan.METHODS)
    parser.add_argument("--method", choices=methods, default=plan.AUTO, help="auto: full, else lora, else qlora")
    gpus = "GPUs to plan for: 4x24GB, 2xH100, 12GB,8GB; or numbers of GPUs here: 0,1 (default: all here)"
    parser.option("--gpus", "GPUS", gpus, default="")
    strategies = (plan.AUTO, *strategy.STRATEGIES)
    parallel = "auto: one GPU, ddp or fsdp, whichever is fastest (default: ddp as in `stoker train`, if it fits)"
    parser.add_argument("--parallel", choices=strategies, default="", help=parallel)
    offload = "fsdp: what is kept in host memory; auto: what does not fit"
    parser.add_argument("--offload", choices=("auto", *OFFLOAD), default="auto", help=offload)
    parser.option("--hosts", "HOSTS", "a hosts file, or a,b,c: the GPUs of these hosts", default="")
    parser.option(
        "--machine", "FILE", "a machine recorded by `stoker doctor --record`, instead of this one", default=""
    )
    context = "tokens per sample (default: 2,048, or fewer if the model was trained for fewer)"
    parser.option("--context-length --context", "N", context, int, default=0)
    parser.option("--micro", "N", "samples in a micro-batch (default: what trains fastest)", int, default=0)
    recompute = "blocks to recompute in the backward pass: off, mlp (only the first product of their MLP), full, N, mlp:N or N+mlp (default: as few as fit)"
    parser.option("--recompute", "HOW|N", recompute, default="")
    parser.add_argument("--optimizer", choices=_OPTIMIZERS, default=plan.AUTO, help="auto: adamw, else adamw8bit")
    places = ("auto", "device", "host")
    parser.add_argument("--embedding", choices=places, default="auto", help="where a frozen embedding is kept")
    activations = "where saved activations wait for the backward pass"
    parser.add_argument("--activations", choices=places, default="auto", help=activations)
    parser.option("--lora-rank", "N", "rank of an adapter (default: 16)", int, default=16)
    parser.option("--lora-targets", "NAMES", "layers that get an adapter (default: all-linear)", default="all-linear")
    completions = StageNeeds().answers
    samples = f"samples per step, all GPUs together (default: from the data as in `stoker train`; without --data {_DEFAULT_SAMPLES}, for grpo {completions} completions)"
    parser.option("--samples", "N", samples, int, default=0)
    rows = f"grpo: completions generated in a batch (default: {StageNeeds().rows})"
    parser.option("--rows", "N", rows, int, default=0)
    bits = "grpo with qlora: bits per weight during generation (default: 16, else 4)"
    parser.add_argument("--bits", choices=("auto", "16", "4"), default="auto", help=bits)
    new_tokens = f"grpo: maximum tokens of a completion (default: {StageNeeds().new_tokens})"
    parser.option("--new-tokens", "N", new_tokens, int, default=0)
    parser.option("--reward-model", "DIR", "grpo: the reward stage's model, which scores the completions", default="")
    parser.option("--kl", "X", "grpo: weight of the KL divergence; 0 needs no reference model (default: 0.02)", float)
    parser.switch("--no-likelihood", "reward: without the answer's own log-probability (reward.likelihood false)")
    parser.option("--price", "X", "price of a GPU hour: prints the cost of an epoch", float, default=0.0)
    parser.switch("--unpacked", "read the data as a stream of text instead of packed rows")
    parser.switch("--probe", "train five real steps with these settings: planned against measured")
    parser.switch("--json", "print everything as JSON")
    parser.runs_dir()
    return parser


def main(argv: list[str]) -> int:
    args = build_parser().parse_args(argv)
    _check_flags(args)
    runs_root = layout.runs_root(args.runs_dir, os.environ)
    args.model = find_for_setting(args.model, runs_root, print_status)
    folder = hf_hub.config_of(args.model, print_status)
    model = hf_config.shape_for(ModelConfig(load=args.model), folder, planned=True)
    gpu_flags = GpuFlags(args.gpus, args.hosts, args.machine)
    machine = select_machine(gpu_flags)
    cards = select_cards(gpu_flags, machine, contexts(runs_root), print_status)
    # Count all GPUs of a machine, as `stoker train` does for its defaults: it skips full ones only when it starts.
    ranks: int | None = len(cards)
    if args.hosts:
        ranks = None
    elif machine is not None and not args.gpus:
        ranks = len(machine.gpus)
    config, given = _resolve_config(args, model)
    _check_settings(args, config, model)
    counted = _count_data(args, config, folder, model)
    derived_lines: list[str] = []
    if args.data:
        situation = Situation(model, counted.amount, ranks)
        config, _, derived_lines = with_defaults(args.stage, config, given, situation, on_cpu=False)
    inputs = RunInputs(args.stage, config, given, model, folder, counted.ready, counted.amount)
    decision = plan_run(inputs, cards, method=args.method, strategy=args.parallel or plan.AUTO)
    if not args.parallel:
        decision = decision.preferring(plan.DDP)  # the default of `stoker train`
    chosen = decision.plan
    tokens, exact = _count_epoch_tokens(counted.amount, config)
    models = (args.model, os.path.realpath(folder))
    rate = (pace.measured(runs_root, chosen, models) or pace.from_table(chosen)) if chosen.fits else None
    gpu = ""
    if decision.way.strategy == strategy.ONE and len(cards) > 1:
        gpu = chosen.shares[0].card.label.removeprefix("GPU ")
    command = text.Command(args.model, tuple(args.data), bool(args.samples), gpu)
    if args.probe and chosen.fits:
        return _run_probe(chosen, command, args.json)
    if args.json:
        print_json(text.as_dict(decision, command, rate, tokens, args.price))
        return 0 if chosen.fits else 1
    for line in text.lines(chosen, command):
        print_text(line)
    if decision.others:
        print_text(f"parallel {decision.line()}")
    if not chosen.fits:
        return 1
    for line in derived_lines:
        print_text(line)
    print_text(summary_line(inputs, chosen))
    if not args.data and not args.samples and args.stage != GRPO:
        print_text(f"note: without --data a step is assumed to have {_DEFAULT_SAMPLES} samples (--samples)")
    for line in text.pace_lines(rate, tokens, exact, args.price, len(chosen.shares), data=bool(args.data)):
        print_text(line)
    return 0


def _check_flags(args: argparse.Namespace) -> None:
    """Raise Refusal for values that are out of range and flags that can't be combined."""
    parser = build_parser()
    if args.stage not in STAGES:
        problem = "has no memory plan" if args.stage in TRAIN_STAGES else f"is unknown{suggest(args.stage, STAGES)}"
        raise Refusal(f"--stage {args.stage[:80]} {problem}; use one of {', '.join(STAGES)}", EX_USAGE)
    for name, stage in _STAGE_OF_FLAG.items():
        if args.stage != stage and getattr(args, name) != parser.get_default(name):
            raise Refusal(
                f"--{name.replace('_', '-')} applies only to --stage {stage}, got --stage {args.stage}", EX_USAGE
            )
    for name, (low, high) in _RANGES.items():
        value = getattr(args, name)
        if value != parser.get_default(name) and not low <= value <= high:
            flag = f"--{name.replace('_', '-')}"
            raise Refusal(f"{flag} must be a whole number from {low} to {high}, got {value}", EX_USAGE)
    if args.kl is not None and not 0 <= args.kl < 1e6:
        raise Refusal(f"--kl must be at least 0 and below 1,000,000, got {args.kl:g}", EX_USAGE)
    if not 0 <= args.price < 1e6:
        raise Refusal(f"--price must be at least 0 and below 1,000,000, got {args.price:g}", EX_USAGE)
    if args.recompute:
        try:
            is_planned = read_recompute(args.recompute) not in ("auto", "selective")
        except ValueError:
            is_planned = False
        if not is_planned:
            expected = "a number of blocks, off, mlp, full, mlp:N or N+mlp"
            raise Refusal(f"--recompute must be {expected}, got {args.recompute}", EX_USAGE)
    if args.hosts and args.machine:
        raise Refusal("--hosts can't be combined with --machine", EX_USAGE)
    if args.parallel == plan.FSDP and args.embedding == "host":
        raise Refusal(
            "--embedding host can't be combined with --parallel fsdp, which shards the embedding; leave it out",
            EX_USAGE,
        )
    if args.offload not in ("auto", NOTHING) and args.parallel not in ("", plan.AUTO, plan.FSDP):
        raise Refusal(f"--offload {args.offload} needs --parallel fsdp: it moves shards to host memory", EX_USAGE)
    if args.offload == EVERYTHING and args.stage == GRPO:
        line = "stage grpo can't use --offload all, since it generates with a copy of the model on the GPU; use --offload optimizer"
        raise Refusal(line, EX_USAGE)
    if args.stage in text.DATA_FLAGS and len(args.data) > 1:
        flag = text.DATA_FLAGS[args.stage]
        raise Refusal(f"--data must name one file for stage {args.stage} ({flag}), got {len(args.data)}", EX_USAGE)
    if args.probe and not args.data:
        raise Refusal("--probe trains five steps and needs data; add --data", EX_USAGE)


def _resolve_config(args: argparse.Namespace, model: ModelConfig) -> tuple[Config, dict[str, Origin]]:
    """Return the configuration that `stoker train STAGE` would resolve for these flags, and the keys they set."""
    stage, parser = args.stage, build_parser()
    flags = [f"--model.load={args.model}"]
    for name, key in _KEY_OF_FLAG.items():
        value = getattr(args, name)
        if value != parser.get_default(name):
            flags.append(f"--{key}={value}")
    if args.method in (LORA, QLORA):
        flags.append(f"--adapter.method={args.method}")
    if args.no_likelihood:
        flags.append("--reward.likelihood=false")
    if args.unpacked:
        flags.append("--data.kind=stream")
    if args.samples and stage == GRPO:
        flags.append(f"--grpo.prompts_per_step={-(-args.samples // text.GROUP)}")
    if args.data:
        flags += [f"--{text.DATA_FLAGS.get(stage, 'data.path').removeprefix('--')}", *args.data]
    resolved = settle(gather(parse(flags), os.environ), True, TRAIN_STAGES[stage].defaults)
    config, given = resolved.config, dict(resolved.given)
    config = within_context_of_model(stage, config, given, model.longest, print_status)
    samples = args.samples or (0 if args.data else _DEFAULT_SAMPLES)
    if samples and stage != GRPO:
        values = values_of(config) | {"batch.tokens": samples * config.data.context_length}
        config = config_of(config.preset, values)
        given["batch.tokens"] = Origin("--samples", EX_USAGE)
    return config, given


def _check_settings(args: argparse.Namespace, config: Config, model: ModelConfig) -> None:
    """Raise Refusal for settings that `stoker train` refuses, too."""
    if args.stage == GRPO and config.generate.new_tokens >= config.data.context_length:
        new, context = config.generate.new_tokens, config.data.context_length
        raise Refusal(f"--new-tokens {new} leaves no tokens for a prompt in --context-length {context}", EX_USAGE)
    if args.method != plan.FULL and args.optimizer == "muon" and args.method != plan.AUTO:
        raise Refusal("--optimizer muon needs --method full; adapters train with adamw or adamw8bit", EX_CONFIG)
    if model.engine == "transformers" and args.stage in (REWARD, GRPO):
        line = f"--stage {args.stage} needs a model of one of Stoker's families, and {args.model} runs in transformers"
        raise Refusal(f"{line}; `stoker docs families` lists them", EX_CONFIG)
    if args.embedding == "host" and args.stage == GRPO:
        raise Refusal(
            "stage grpo can't use --embedding host, since it generates with the embedding on the GPU; leave it out",
            EX_CONFIG,
        )
    if args.bits == "4" and args.method != QLORA:
        raise Refusal("--bits 4 needs --method qlora: other methods keep 16-bit weights", EX_CONFIG)


@frozen
class DataCount:
    """The size of the data as `stoker train` would count it."""

    amount: Amount | None = None
    ready: Prepared | None = None  # None if the amount is estimated from the files


def _count_data(args: argparse.Namespace, config: Config, folder: str, model: ModelConfig) -> DataCount:
    """Count the data: tokenize small data in a temporary folder, exactly as `stoker train` does, and estimate larger data."""
    if not args.data:
        return DataCount()
    from stoker.training.config import amount

    check_there(args.data)
    tokenizer = config.tokenizer.path or tokenizer_in(folder)
    if args.stage == GRPO:
        return DataCount(amount.of_prompts(config))
    has_tokenizer = os.path.isfile(os.path.join(tokenizer, hf_hub.TOKENIZER_FILES[0]))
    if args.stage in (REWARD, DPO):
        return DataCount(amount.of_pairs(config, args.stage, tokenizer if has_tokenizer else "", model.vocab_size))
    config_here = replace(config, tokenizer=replace(config.tokenizer, path=tokenizer)) if has_tokenizer else config
    if not has_tokenizer or not amount.is_small(config_here):
        return DataCount(amount.estimated(config_here, model.vocab_size))
    from stoker.training.data.prepare import prepare

    with tempfile.TemporaryDirectory(prefix="stoker-fit-") as cache:
        ready = prepare(replace(config_here.data, cache=cache), config_here.tokenizer, lambda line: None)
        return DataCount(amount.of_prepared(ready, config_here), ready)


def _count_epoch_tokens(amount: Amount | None, config: Config) -> tuple[int, bool]:
    """Return the tokens of one pass over the data, or 0 if unknown, and whether they are counted exactly."""
    if amount is None or amount.unit == "prompts":
        return 0, True  # the length of completions is unknown
    if amount.unit == "pairs":
        return amount.samples * config.data.context_length, False  # padding takes as long as other tokens
    return amount.tokens, amount.exact


def _run_probe(chosen: plan.Plan, command: text.Command, as_json: bool) -> int:
    """Train PROBE_STEPS real steps with the plan's settings in a temporary runs folder; print planned against measured."""
    import subprocess

    from stoker.control.launch.children import stoker_command

    if any(share.card.host for share in chosen.shares):
        raise Refusal("--probe trains on this machine; leave --hosts out", EX_UNAVAILABLE)
    words = shlex.split(text.command(chosen, command))[1:]
    words += ["--max-steps", str(PROBE_STEPS), "--eval-every", "0"]
    words += ["--checkpoint.export", "false", "--checkpoint.at_end", "false"]
    if chosen.wish.samples and chosen.wish.needs.stage != GRPO:
        words += ["--batch.tokens", str(chosen.wish.samples * chosen.wish.context)]
    gpus = ",".join(share.card.label.removeprefix("GPU ") for share in chosen.shares)
    with tempfile.TemporaryDirectory(prefix="stoker-probe-") as runs_dir:
        words += ["--runs-dir", runs_dir, "--gpus", gpus]
        print_status(f"probe: {shlex.join(['stoker', *words])}")
        train = subprocess.run(stoker_command(words), check=False, stdout=sys.stderr.fileno())
        measured = _read_measurement(runs_dir)
    if train.returncode:
        raise Refusal(f"the probe failed with exit code {train.returncode}; see its output above", train.returncode)
    planned_bytes = chosen.shares[0].planned.total
    peak_bytes, rate = finite_number(measured, "peak_bytes"), finite_number(measured, "tokens_per_s")
    if not peak_bytes:
        raise Refusal(_NO_MEASUREMENT, EX_SOFTWARE)
    if as_json:
        print_json({"schema": text.SCHEMA, "planned_bytes": planned_bytes, "measured": measured})
        return 0
    error = peak_bytes / planned_bytes - 1
    comparison = f"{abs(error):.1%} {'above' if error > 0 else 'below'} the plan"
    print(f"planned {format_bytes(planned_bytes)}, measured {format_bytes(peak_bytes)} ({comparison})")
    if rate:
        print(f"speed: {rate:,.0f} tokens/s (measured over {PROBE_STEPS} steps)")
    return 0


def _read_measurement(runs_dir: str) -> object:
    for run in sorted(os.listdir(runs_dir), reverse=True):
        path = os.path.join(runs_dir, run, layout.MEMORY)
        if os.path.isfile(path):
            return read_json(path)
    raise Refusal(_NO_MEASUREMENT, EX_SOFTWARE)
