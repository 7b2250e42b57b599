"""stoker fit MODEL [--stage S] [--data CHATS] [--method M] [--gpus 4x24GB] [--context N] [--json] [--probe]: what it takes, what fits"""

from __future__ import annotations

import argparse
import os
import tempfile

from stoker.cli.cards import Asked, cards_of, machine_of
from stoker.contract import layout
from stoker.contract.errors import EX_CONFIG, EX_USAGE, Refusal
from stoker.contract.frozen import frozen, replace
from stoker.contract.options import OptionParser, suggest
from stoker.contract.terminal import print_json, print_status, print_text
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

_ABOUT = (
    "How much GPU memory training a model takes, term by term, and the settings that fit: from config.json alone, without"
    " torch and without a GPU."
)
_EXAMPLES = """exit codes: 0 it fits, 1 it does not, 64-78 a refusal

examples:
  stoker fit ./model-8b                                  on the GPUs that are here
  stoker fit ./model-8b --gpus 8GB --context-length 2048
  stoker fit ./model-14b --gpus 2xH100 --data chats.jsonl --price 2.5
  stoker fit ./model-8b --stage grpo --gpus 80GB --rows 32 --new-tokens 512
  stoker fit ./model-32b --gpus 4x24GB --method lora     one card, ddp or fsdp: what each would take
  stoker fit ./model-14b --machine box.json --json       for a machine that `stoker doctor --record` kept
  stoker fit ./model-14b --data chats.jsonl --probe      five real steps: planned against measured"""
_KINDS = (plan.AUTO, "adamw", "adamw8bit", "muon")
_SAMPLES = 16  # of a step without --data: with data, they follow from it
_OF_STAGE = {"rows": GRPO, "bits": GRPO, "new_tokens": GRPO, "reward_model": GRPO, "kl": GRPO, "no_likelihood": REWARD}


def parser() -> OptionParser:
    made = OptionParser("stoker fit", _ABOUT, _EXAMPLES, allow_abbrev=False)
    made.option(
        "model", "MODEL", "a model's folder (config.json is enough), a run (path, id, name or latest), or a hub id"
    )
    made.option("--data", "PATH", "rows to train on: adds time and cost of an epoch", action="append", default=[])
    made.option("--stage", "STAGE", f"stage to plan for: {', '.join(STAGES)} (default: {SFT})", default=SFT)
    methods = (plan.AUTO, *plan.METHODS)
    made.add_argument("--method", choices=methods, default=plan.AUTO, help="auto: full, else lora, else qlora")
    gpus = "GPUs to plan for: 4x24GB, 2xH100, 12GB,8GB; or numbers of those here: 0,1 (default: all here)"
    made.option("--gpus", "GPUS", gpus, default="")
    ways = (plan.AUTO, *strategy.STRATEGIES)
    made.add_argument(
        "--parallel",
        choices=ways,
        default="",
        help="auto: one GPU, ddp or fsdp, whichever is fastest (default: ddp as in `stoker train`, if it fits)",
    )
    made.add_argument(
        "--offload",
        choices=("auto", *OFFLOAD),
        default="auto",
        help="fsdp: what is kept in host memory; auto: what does not fit",
    )
    made.option("--hosts", "HOSTS", "a hosts file, or a,b,c: the GPUs of these hosts", default="")
    made.option("--machine", "FILE", "a machine that `stoker doctor --record` kept, instead of this one", default="")
    made.option(
        "--context-length --context",
        "N",
        "tokens of a sample (default: 2,048, or fewer if the model was trained for fewer)",
        int,
        default=0,
    )
    made.option("--micro", "N", "samples at once (default: what trains fastest)", int, default=0)
    made.option(
        "--recompute",
        "HOW|N",
        "blocks computed again: off, mlp (their MLP's first product), full, N, mlp:N or N+mlp (default: the least that fits)",
        default="",
    )
    made.add_argument("--optimizer", choices=_KINDS, default=plan.AUTO, help="auto: adamw, else adamw8bit")
    made.add_argument(
        "--embedding", choices=("auto", "device", "host"), default="auto", help="where a frozen embedding is kept"
    )
    made.add_argument(
        "--activations",
        choices=("auto", "device", "host"),
        default="auto",
        help="where saved activations wait for the backward pass",
    )
    made.option("--lora-rank", "N", "width of an adapter (default: 16)", int, default=16)
    made.option("--lora-targets", "NAMES", "which layers get one (default: all-linear)", default="all-linear")
    answers = StageNeeds().answers
    samples = f"samples of a step, all GPUs together (default: by the data as in `stoker train`, without --data {_SAMPLES}; of grpo {answers} answers)"
    made.option("--samples", "N", samples, int, default=0)
    made.option("--rows", "N", f"grpo: answers written at once (default: {StageNeeds().rows})", int, default=0)
    bits = "grpo with qlora: bits per weight while answers are written (default: 16, else 4)"
    made.add_argument("--bits", choices=("auto", "16", "4"), default="auto", help=bits)
    new = f"grpo: tokens of an answer at most (default: {StageNeeds().new_tokens})"
    made.option("--new-tokens", "N", new, int, default=0)
    made.option("--reward-model", "DIR", "grpo: the reward stage's model, which scores the answers", default="")
    made.option("--kl", "X", "grpo: weight of the divergence; 0 needs no reference (default: 0.02)", float)
    made.switch("--no-likelihood", "reward: without the answer's own log-probability (reward.likelihood false)")
    made.option("--price", "X", "price of a GPU hour: prints the cost of an epoch", float, default=0.0)
    made.switch("--unpacked", "rows are not packed with several texts (a stream of text)")
    made.switch("--probe", "five real steps with these settings: planned against measured")
    made.switch("--json", "everything as JSON")
    made.runs_dir()
    return made


def main(argv: list[str]) -> int:
    told = parser().parse_args(argv)
    _check(told)
    runs = layout.runs_root(told.runs_dir, os.environ)
    told.model = find_for_setting(told.model, runs, print_status)
    folder = hf_hub.config_of(told.model, print_status)
    model = hf_config.shape_for(ModelConfig(load=told.model), folder, planned=True)
    asked = Asked(told.gpus, told.hosts, told.machine)
    machine = machine_of(asked)
    cards = cards_of(asked, machine, contexts(runs), print_status)
    # `stoker train` derives its defaults for all GPUs of a machine, and leaves full ones out only when it starts.
    ranks: int | None = len(cards)
    if told.hosts:
        ranks = None
    elif machine is not None and not told.gpus:
        ranks = len(machine.gpus)
    config, given = _resolved(told, model)
    _check_run(told, config, model)
    rows = _rows(told, config, folder, model)
    block: list[str] = []
    if told.data:
        config, _, block = with_defaults(told.stage, config, given, Situation(model, rows.amount, ranks), on_cpu=False)
    inputs = RunInputs(told.stage, config, given, model, folder, rows.ready, rows.amount)
    decision = plan_run(inputs, cards, method=told.method, strategy=told.parallel or plan.AUTO)
    if not told.parallel:
        decision = decision.preferring(plan.DDP)  # the default of `stoker train`
    found = decision.plan
    tokens, exact = _epoch(rows.amount, config)
    models = (told.model, os.path.realpath(folder))
    rate = (pace.measured(runs, found, models) or pace.from_table(found)) if found.fits else None
    chosen = found.shares[0].card.label.removeprefix("GPU ")
    is_one_of_several = decision.way.strategy == strategy.ONE and len(cards) > 1
    command = text.Command(told.model, tuple(told.data), bool(told.samples), chosen if is_one_of_several else "")
    if told.probe and found.fits:
        from stoker.cli.fit_probe import probe

        return probe(found, command, told.json)
    if told.json:
        print_json(text.as_dict(decision, command, rate, tokens, told.price))
        return 0 if found.fits else 1
    for line in text.lines(found, command):
        print_text(line)
    if decision.others:
        print_text(f"parallel {decision.line()}")
    if not found.fits:
        return 1
    for line in block:
        print_text(line)
    print_text(summary_line(inputs, found))
    if not told.data and not told.samples and told.stage != GRPO:
        print_text(f"note: without --data a step is assumed to have {_SAMPLES} samples (--samples)")
    for line in text.pace_lines(rate, tokens, exact, told.price, len(found.shares), data=bool(told.data)):
        print_text(line)
    return 0


def _check(told: argparse.Namespace) -> None:
    if told.stage not in STAGES:
        raise _no_plan(told.stage)
    for name, stage in _OF_STAGE.items():
        if told.stage != stage and getattr(told, name) != parser().get_default(name):
            raise Refusal(f"--{name.replace('_', '-')} is for --stage {stage}, and this is {told.stage}", EX_USAGE)
    for name, least, most in (("context_length", 2, 1 << 24), ("micro", 1, 1 << 16), ("lora_rank", 1, 4096), ("samples", 1, 1 << 20), ("rows", 1, 1 << 16), ("new_tokens", 1, 1 << 20)):  # fmt: skip
        value = getattr(told, name)
        if value != parser().get_default(name) and not least <= value <= most:
            flag = f"--{name.replace('_', '-')}"
            raise Refusal(f"{flag} {value} is out of range: a whole number from {least} to {most}", EX_USAGE)
    if told.kl is not None and not 0 <= told.kl < 1e6:
        raise Refusal(f"--kl {told.kl:g} is not a weight: 0 or above", EX_USAGE)
    if not 0 <= told.price < 1e6:
        raise Refusal(f"--price {told.price:g} is not a price of a GPU hour", EX_USAGE)
    if told.recompute:
        try:
            known = read_recompute(told.recompute) not in ("auto", "selective")
        except ValueError:
            known = False
        if not known:
            line = f"--recompute {told.recompute}: give a number of blocks, off, mlp or full"
            raise Refusal(f"{line} (mlp:N and N+mlp: the MLP's first product)", EX_USAGE)
    if sum(bool(one) for one in (told.hosts, told.machine)) > 1:
        raise Refusal("--hosts and --machine: give one of them", EX_USAGE)
    if told.parallel == plan.FSDP and told.embedding == "host":
        raise Refusal("--embedding host: a model in shards has its embedding in shards, too; leave it out", EX_USAGE)
    if told.offload not in ("auto", NOTHING) and told.parallel not in ("", plan.AUTO, plan.FSDP):
        raise Refusal(f"--offload {told.offload} is for --parallel fsdp: it moves shards", EX_USAGE)
    if told.offload == EVERYTHING and told.stage == GRPO:
        raise Refusal(
            "--offload all: stage grpo writes answers by a copy on the GPU; use --offload optimizer", EX_USAGE
        )
    if told.stage in text.DATA_FLAGS and len(told.data) > 1:
        flag = text.DATA_FLAGS[told.stage]
        raise Refusal(f"--data: stage {told.stage} reads one file ({flag}), and {len(told.data)} were given", EX_USAGE)
    if told.probe and not told.data:
        raise Refusal("--probe trains five steps: it needs --data", EX_USAGE)


def _no_plan(stage: str) -> Refusal:
    there = f"there is a plan for {', '.join(STAGES)}"
    if stage in TRAIN_STAGES:
        return Refusal(f"--stage {stage}: that stage has no memory plan; {there}", EX_USAGE)
    return Refusal(f"--stage {stage[:80]}: no such stage{suggest(stage, STAGES)}; {there}", EX_USAGE)


_KEYS = {
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


def _resolved(told: argparse.Namespace, model: ModelConfig) -> tuple[Config, dict[str, Origin]]:
    """Return the configuration that `stoker train STAGE` would resolve for these flags, and the keys they set."""
    stage, defaults = told.stage, parser()
    words = [f"--model.load={told.model}"]
    for name, key in _KEYS.items():
        value = getattr(told, name)
        if value != defaults.get_default(name):
            words.append(f"--{key}={value}")
    if told.method in (LORA, QLORA):
        words.append(f"--adapter.method={told.method}")
    if told.no_likelihood:
        words.append("--reward.likelihood=false")
    if told.unpacked:
        words.append("--data.kind=stream")
    if told.samples and stage == GRPO:
        words.append(f"--grpo.prompts_per_step={-(-told.samples // text.GROUP)}")
    if told.data:
        words += [f"--{text.DATA_FLAGS.get(stage, 'data.path').removeprefix('--')}", *told.data]
    resolved = settle(gather(parse(words), os.environ), True, TRAIN_STAGES[stage].defaults)
    config, given = resolved.config, dict(resolved.given)
    config = within_context_of_model(stage, config, given, model.longest, print_status)
    samples = told.samples or (0 if told.data else _SAMPLES)
    if samples and stage != GRPO:
        values = values_of(config) | {"batch.tokens": samples * config.data.context_length}
        config = config_of(config.preset, values)
        given["batch.tokens"] = Origin("--samples", EX_USAGE)
    return config, given


def _check_run(told: argparse.Namespace, config: Config, model: ModelConfig) -> None:
    """Refuse what `stoker train` refuses of such a run."""
    if told.stage == GRPO and config.generate.new_tokens >= config.data.context_length:
        new, context = config.generate.new_tokens, config.data.context_length
        raise Refusal(f"--new-tokens {new} leaves no tokens for a prompt in --context-length {context}", EX_USAGE)
    if told.method != plan.FULL and told.optimizer == "muon" and told.method != plan.AUTO:
        raise Refusal("--optimizer muon is for --method full: adapters learn with adamw or adamw8bit", EX_CONFIG)
    if model.engine == "transformers" and told.stage in (REWARD, GRPO):
        line = f"--stage {told.stage}: {told.model} runs in transformers, and that stage needs a model of one of Stoker's families"
        raise Refusal(f"{line} (`stoker docs families`)", EX_CONFIG)
    if told.embedding == "host" and told.stage == GRPO:
        raise Refusal("--embedding host: stage grpo writes answers with it on the GPU; leave it out", EX_CONFIG)
    if told.bits == "4" and told.method != QLORA:
        raise Refusal("--bits 4 is for --method qlora: only its weights are in 4 bits", EX_CONFIG)


@frozen
class _Rows:
    """The data as `stoker train` would count it."""

    amount: Amount | None = None
    ready: Prepared | None = None  # None: the amount is estimated from the files


def _rows(told: argparse.Namespace, config: Config, folder: str, model: ModelConfig) -> _Rows:
    """Small data is tokenized, in a temporary folder: its count is that of `stoker train`. Other data is estimated."""
    if not told.data:
        return _Rows()
    from stoker.training.config import amount

    check_there(told.data)
    tokenizer = config.tokenizer.path or tokenizer_in(folder)
    if told.stage == GRPO:
        return _Rows(amount.of_prompts(config))
    if told.stage in (REWARD, DPO):
        here = os.path.isfile(os.path.join(tokenizer, hf_hub.TOKENIZER_FILES[0]))
        return _Rows(amount.of_pairs(config, told.stage, tokenizer if here else "", model.vocab_size))
    if not os.path.isfile(os.path.join(tokenizer, hf_hub.TOKENIZER_FILES[0])):
        return _Rows(amount.estimated(config, model.vocab_size))
    config = replace(config, tokenizer=replace(config.tokenizer, path=tokenizer))
    if not amount.is_small(config):
        return _Rows(amount.estimated(config, model.vocab_size))
    from stoker.training.data.prepare import prepare

    with tempfile.TemporaryDirectory(prefix="stoker-fit-") as cache:
        ready = prepare(replace(config.data, cache=cache), config.tokenizer, lambda line: None)
        return _Rows(amount.of_prepared(ready, config), ready)


def _epoch(amount: Amount | None, config: Config) -> tuple[int, bool]:
    """Return the tokens of a pass over the data, and whether they are counted. 0: they are not known."""
    if amount is None or amount.unit == "prompts":
        return 0, True  # how long completions get is not known
    if amount.unit == "pairs":
        return amount.samples * config.data.context_length, False  # padding takes as long as tokens
    return amount.tokens, amount.exact
