"""stoker fit MODEL [--stage S] [--data CHATS] [--method M] [--gpus 4x24GB] [--context N] [--json] [--probe]: what it takes, what fits"""

from __future__ import annotations

import argparse
import os

from stoker.cli.cards import Asked, cards_of
from stoker.contract import layout
from stoker.contract.names import EX_CONFIG, EX_USAGE, Refusal
from stoker.contract.quantities import counted
from stoker.contract.settings import Parser, suggest
from stoker.contract.shape import replace
from stoker.contract.terminal import say, tell
from stoker.contract.untrusted import json_text
from stoker.training.fit import pace, plan, strategy, text
from stoker.training.fit.footprint import STAGES
from stoker.training.fit.runs import contexts
from stoker.training.fit.scorer import with_scorer
from stoker.training.fit.terms import DPO, GRPO, REWARD, SFT, StageNeeds, asked_bits
from stoker.training.model import hf_config, hf_hub
from stoker.training.model.config import QLORA, AdapterConfig, ModelConfig
from stoker.training.parallel.config import EVERYTHING, NOTHING, OFFLOAD, read_recompute, recomputed_blocks

TYPE_CHECKING = False
if TYPE_CHECKING:
    from stoker.training.config.amount import Amount

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
_CONTEXT = 2048  # tokens, where nobody says
_KINDS = (plan.AUTO, "adamw", "adamw8bit", "muon")
_SAMPLES = 16  # of a step, where nobody says
_OF_STAGE = {"rows": GRPO, "bits": GRPO, "new_tokens": GRPO, "reward_model": GRPO, "kl": GRPO, "no_likelihood": REWARD}


def parser() -> Parser:
    made = Parser("stoker fit", _ABOUT, _EXAMPLES, allow_abbrev=False)
    made.option("model", "MODEL", "a model's folder (config.json is enough), or a hub id")
    made.option("--data", "PATH", "rows to train on: adds time and cost of an epoch", action="append", default=[])
    made.option("--stage", "STAGE", f"stage to plan for: {', '.join(STAGES)} (default: {SFT})", default=SFT)
    methods = (plan.AUTO, *plan.METHODS)
    made.add_argument("--method", choices=methods, default=plan.AUTO, help="auto: full, else lora, else qlora")
    gpus = "GPUs to plan for: 4x24GB, 2xH100, 12GB,8GB; or numbers of those here: 0,1 (default: all here)"
    made.option("--gpus", "GPUS", gpus, default="")
    ways = (plan.AUTO, *strategy.STRATEGIES)
    made.add_argument(
        "--parallel", choices=ways, default=plan.AUTO, help="auto: one card, ddp or fsdp, what is fastest"
    )
    made.add_argument(
        "--offload",
        choices=("auto", *OFFLOAD),
        default="auto",
        help="fsdp: what is kept in host memory; auto: what does not fit",
    )
    made.option("--hosts", "HOSTS", "a hosts file, or a,b,c: the GPUs of these hosts", default="")
    made.option("--machine", "FILE", "a machine that `stoker doctor --record` kept, instead of this one", default="")
    made.option("--context-length --context", "N", f"tokens of a sample (default: {_CONTEXT:,})", int, default=0)
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
    samples = f"samples of a step, all GPUs together (default: {_SAMPLES}; of grpo {answers} answers)"
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
    folder, model = _model(told)
    runs = layout.runs_root(told.runs_dir, os.environ)
    cards = cards_of(Asked(told.gpus, told.hosts, told.machine), contexts(runs), say)
    wish = _wish(told, model)
    rows = _amount(told, model, wish.context)
    if rows is not None and rows.unit in ("conversations", "pairs"):
        wish = replace(wish, documents=max(-(-rows.count // rows.samples), 1) * _texts(told.stage))
    decision = strategy.decide(cards, wish, told.parallel, () if told.embedding != "host" else (plan.FSDP,))
    found = decision.plan
    tokens, exact = (rows.tokens, rows.exact) if rows is not None else (0, True)
    rate = (
        (pace.measured(runs, found, (told.model, os.path.realpath(folder))) or pace.from_table(found))
        if found.fits
        else None
    )
    data = told.data[0] if told.data else ""
    if told.probe and found.fits:
        from stoker.cli.fit_probe import probe

        return probe(found, told.model, data, told.json)
    if told.json:
        print(json_text(text.as_dict(decision, told.model, data, rate, tokens, told.price)))
    else:
        for line in text.lines(found, told.model, data):
            tell(line)
        if decision.others:
            tell(f"parallel {decision.line()}")
        if found.fits:
            for line in text.pace_lines(rate, tokens, exact, told.price, len(found.shares), data=bool(told.data)):
                tell(line)
    return 0 if found.fits else 1


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
    if told.offload not in ("auto", NOTHING) and told.parallel not in (plan.AUTO, plan.FSDP):
        raise Refusal(f"--offload {told.offload} is for --parallel fsdp: it moves shards", EX_USAGE)
    if told.offload == EVERYTHING and told.stage == GRPO:
        raise Refusal(
            "--offload all: stage grpo writes answers by a copy on the GPU; use --offload optimizer", EX_USAGE
        )
    if told.probe and not told.data:
        raise Refusal("--probe trains five steps: it needs --data", EX_USAGE)


def _no_plan(stage: str) -> Refusal:
    from stoker.training.stages.registry import STAGES as ALL

    there = f"there is a plan for {', '.join(STAGES)}"
    if stage in ALL:
        return Refusal(f"--stage {stage}: that stage has no memory plan; {there}", EX_USAGE)
    return Refusal(f"--stage {stage[:80]}: no such stage{suggest(stage, STAGES)}; {there}", EX_USAGE)


def _texts(stage: str) -> int:
    """Documents of a packed row that belong to what people count: both answers of a pair; of DPO, their prompts apart."""
    return {REWARD: 2, DPO: 4}.get(stage, 1)


def _needs(told: argparse.Namespace, context: int, answers: int) -> StageNeeds:
    if told.stage != GRPO:
        return StageNeeds(told.stage, likelihood=not told.no_likelihood)
    default = StageNeeds(GRPO)
    new = told.new_tokens or min(default.new_tokens, context // 2)
    if new >= context:
        raise Refusal(f"--new-tokens {new} leaves no tokens for a prompt in --context-length {context}", EX_USAGE)
    found = replace(
        default, reference=told.kl != 0, rows=told.rows or default.rows, bits=asked_bits(told.bits), new_tokens=new,
        answers=answers,
    )  # fmt: skip
    return with_scorer(found, told.reward_model) if told.reward_model else found


def _model(told: argparse.Namespace) -> tuple[str, ModelConfig]:
    """(its folder, its shape)."""
    folder = hf_hub.config_of(told.model, say)
    asked = ModelConfig(load=told.model)
    return folder, hf_config.shape_for(asked, folder, planned=True)


def _wish(told: argparse.Namespace, model: ModelConfig) -> plan.Wish:
    context = told.context_length or min(_CONTEXT, model.longest or _CONTEXT)
    if model.longest and context > model.longest:
        say(f"note: {told.model} was trained with {counted(model.longest, 'token')} of context at most")
    again, mlp = recomputed_blocks(told.recompute, model.layers) if told.recompute else (None, 0)
    if told.method != plan.FULL and told.optimizer == "muon" and told.method != plan.AUTO:
        raise Refusal("--optimizer muon is for --method full: adapters learn with adamw or adamw8bit", EX_CONFIG)
    if model.engine == "transformers" and told.stage in (REWARD, GRPO):
        line = f"--stage {told.stage}: {told.model} runs in transformers, and that stage needs a model of one of Stoker's families"
        raise Refusal(f"{line} (`stoker docs families`)", EX_CONFIG)
    if told.embedding == "host" and told.stage == GRPO:
        raise Refusal("--embedding host: stage grpo writes answers with it on the GPU; leave it out", EX_CONFIG)
    if told.bits == "4" and told.method != QLORA:
        raise Refusal("--bits 4 is for --method qlora: only its weights are in 4 bits", EX_CONFIG)
    samples = told.samples or (StageNeeds().answers if told.stage == GRPO else _SAMPLES)
    return plan.Wish(
        model,
        context,
        told.method,
        AdapterConfig(lora_rank=told.lora_rank, lora_targets=told.lora_targets),
        told.optimizer,
        again,
        told.micro,
        {"auto": None, "device": False, "host": True}[told.embedding],
        packed=not told.unpacked and told.stage != GRPO,
        documents=max(context // plan.DOCUMENT, 1) * _texts(told.stage),
        samples=samples,
        inputs_on_host={"auto": None, "device": False, "host": True}[told.activations],
        needs=_needs(told, context, samples),
        offload=None if told.offload == "auto" else told.offload,
        mlp=mlp,
    )


def _amount(told: argparse.Namespace, model: ModelConfig, context: int) -> Amount | None:
    if not told.data:
        return None
    from stoker.training.config.amount import estimated, of_pairs
    from stoker.training.config.keys import DEFAULTS, config_of
    from stoker.training.data.sources import check_there
    from stoker.training.reward.config import DpoConfig

    check_there(told.data)
    if told.stage == GRPO:
        return None  # how long answers get is not known
    if told.stage in (REWARD, DPO):
        config = config_of("", {**DEFAULTS, "data.context_length": context})
        found = of_pairs(config, model.vocab_size, DpoConfig(pairs=told.data[0]))
        return replace(found, tokens=found.samples * context)
    kind = "stream" if told.unpacked else "chat"
    values = {**DEFAULTS, "data.path": tuple(told.data), "data.kind": kind, "data.context_length": context}
    return estimated(config_of("", values), model.vocab_size)
