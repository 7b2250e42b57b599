"""Decides a run's memory plan (micro-batch, recomputation, optimizer, strategy) from its configuration and the GPUs.

`stoker train` and `stoker fit` both call `plan_run`, so that the same job on the same GPUs gets the same numbers from both.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import Any

from stoker.contract.errors import Refusal
from stoker.contract.frozen import frozen, replace
from stoker.training.config.amount import Amount
from stoker.training.config.keys import values_of
from stoker.training.config.layers import Origin
from stoker.training.config.schema import Config
from stoker.training.data.shards import Prepared
from stoker.training.fit.cards import Card
from stoker.training.fit.plan import AUTO, DDP, DOCUMENT, FSDP, FULL, Plan, Wish
from stoker.training.fit.scorer import with_scorer
from stoker.training.fit.strategy import ONE, Decision, decide
from stoker.training.fit.terms import DPO, GRPO, REWARD, StageNeeds, asked_bits
from stoker.training.fit.text import summary
from stoker.training.model.config import OFF, ModelConfig
from stoker.training.model.hf_config import is_adapter, tokenizer_in
from stoker.training.parallel.config import recompute_word, recomputed_blocks
from stoker.training.rl.config import MICRO
from stoker.training.stages.registry import STAGES

TEXTS_PER_PAIR = {
    REWARD: 2,
    DPO: 4,
}  # documents that a pair adds to a packed row: both answers; for DPO, with their prompts
# Keys that the plan may decide where the user does not.
PLANNED_KEYS = (
    "batch.micro", "compute.recompute", "compute.embedding", "compute.activations", "optim.kind", "parallel.offload", "parallel.sharding",
    "generate.bits",
)  # fmt: skip
_CHECKPOINT = "checkpoint "  # how the origin of an optimizer begins that a checkpoint decided


@frozen
class RunInputs:
    """What the plan of a run is made from, besides its GPUs."""

    stage: str
    config: Config  # resolved, with the stage's derived defaults
    given: Mapping[str, Origin]  # keys that the user set: the plan keeps their values
    model: ModelConfig
    model_dir: str = ""  # of a loaded model
    ready: Prepared | None = None  # None: the data is not prepared
    amount: Amount | None = None


def plan_run(
    inputs: RunInputs, cards: list[Card], *, method: str = "", strategy: str = "", exclude: Collection[str] = ()
) -> Decision:
    """Return the decision for this run on these GPUs.

    `method` and `strategy` default to the configuration's; "auto" lets the plan choose. `exclude` lists strategies that the
    caller rules out.
    """
    wish = make_wish(inputs, len(cards), method)
    if inputs.stage != GRPO or inputs.config.batch.micro:
        return _decide(inputs, cards, wish, strategy, exclude)
    # Fewer completions per micro-batch cost less than activations in host memory or decoding from 4-bit weights.
    needs = wish.needs if wish.needs.bits else replace(wish.needs, bits=16)
    cheap = replace(wish, inputs_on_host=bool(wish.inputs_on_host), needs=needs)
    decision = _decide(inputs, cards, cheap, strategy, exclude)
    return decision if decision.plan.fits else _decide(inputs, cards, replace(wish, micro=0), strategy, exclude)


def plan_smallest(inputs: RunInputs, cards: list[Card], exclude: Collection[str] = ()) -> Decision:
    """Return the decision that needs the least memory: one sample per micro-batch, every block recomputed."""
    wish = make_wish(inputs, len(cards))
    needs = replace(wish.needs, length=wish.needs.length or wish.needs.new_tokens + 1)
    least = replace(wish, micro=0, recompute=None, mlp=0, needs=needs)
    return _decide(inputs, cards, least, "", exclude)


def _decide(inputs: RunInputs, cards: list[Card], wish: Wish, strategy: str, exclude: Collection[str]) -> Decision:
    parallel, excluded = inputs.config.parallel, set(exclude)
    if inputs.stage == GRPO or not inputs.config.batch.tokens:
        excluded.add(ONE)  # the samples of a step depend on the number of ranks
    # config/check.py refuses these together with FSDP.
    graphs_on = inputs.config.compute.cuda_graphs == "on"
    if parallel.balance != "off" or parallel.comm != "full" or graphs_on or wish.on_host:
        excluded.add(FSDP)
    strategy = strategy or (parallel.strategy if parallel.strategy in (DDP, FSDP) else AUTO)
    return decide(cards, wish, strategy, excluded)


def make_wish(inputs: RunInputs, world_size: int, method: str = "") -> Wish:
    """Return what the configuration asks of the plan. The plan decides whatever the user did not set."""
    config, given, stage, model = inputs.config, inputs.given, inputs.stage, inputs.model
    context, batch = config.data.context_length, config.batch
    recompute, mlp = None, 0
    if str(config.compute.recompute) != "auto":
        recompute, mlp = recomputed_blocks(str(config.compute.recompute), model.layers)
    # Without batch.tokens the micro-batch decides how many samples a step has: the plan may not change it.
    micro = batch.micro if "batch.micro" in given or not batch.tokens else 0
    samples = batch.tokens // context or max(batch.micro, 1) * batch.accumulation * world_size
    needs = _stage_needs(inputs, world_size)
    if stage == GRPO:
        micro, samples = batch.micro or MICRO, needs.answers
    kept = "optim.kind" in given and given["optim.kind"].words.startswith(_CHECKPOINT)
    return Wish(
        model,
        context,
        method or (FULL if config.adapter.method == OFF else config.adapter.method),
        config.adapter,
        AUTO if "optim.kind" not in given and config.optim.kind == "adamw" else config.optim.kind,
        recompute,
        micro,
        _host_or_free(config.compute.embedding, "compute.embedding", given),
        packed=stage in (REWARD, DPO) or (stage != GRPO and (config.data.kind == "chat" or config.data.documents)),
        documents=_documents_per_row(inputs),
        samples=samples,
        inputs_on_host=_host_or_free(config.compute.activations, "compute.activations", given),
        needs=needs,
        kept=kept,
        offload=config.parallel.offload if "parallel.offload" in given else None,
        sharding=config.parallel.sharding if "parallel.sharding" in given else None,
        mlp=mlp,
    )


def planned_values(config: Config, given: Collection[str], plan: Plan) -> dict[str, Any]:
    """Return the keys that the plan decides, with their values, where these differ from the configuration's."""
    s = plan.settings
    values: dict[str, Any] = {
        "parallel.offload": s.offload,
        "parallel.sharding": s.sharding,
        "optim.kind": s.optimizer,
    }
    if config.parallel.strategy == "auto":
        values["parallel.strategy"] = s.strategy
    if str(config.compute.recompute) == "auto" and s.saves:
        values["compute.recompute"] = recompute_word(s.recompute, s.mlp, plan.wish.layers)
    if s.on_host and "compute.embedding" not in given:
        values["compute.embedding"] = "host"
    if s.inputs_on_host:
        values["compute.activations"] = "host"
    if s.bits == 4 and config.generate.bits == "auto":
        values["generate.bits"] = "4"
    if "batch.micro" not in given and is_micro_planned(config, plan):
        values["batch.micro"] = s.micro
    if plan.wish.needs.stage == GRPO and not config.batch.micro and s.micro == MICRO:
        values.pop("batch.micro", None)  # the stage's own default
    current = values_of(config)
    return {key: value for key, value in values.items() if current[key] != value}


def is_micro_planned(config: Config, plan: Plan) -> bool:
    """Return whether ranks use the plan's micro-batch. Otherwise each run measures what fits before its first step: where
    ranks share a step by speed, where the micro-batch decides the size of a step, and where the plan is an estimate."""
    if plan.wish.needs.stage == GRPO:
        return True
    return plan.fits and not plan.about and config.parallel.balance == "off" and config.batch.tokens > 0


def summary_line(inputs: RunInputs, plan: Plan) -> str:
    """Return the line about the plan that `stoker train` and `stoker fit` both print."""
    is_measured = "batch.micro" not in inputs.given and not is_micro_planned(inputs.config, plan)
    how = " (without --micro the run measures its micro-batch at the start)" if is_measured else ""
    return f"{summary(plan)}{how}"


def _host_or_free(value: str, key: str, given: Collection[str]) -> bool | None:
    """Return whether host memory is used; None where the plan decides."""
    if value == "host":
        return True
    return False if key in given else None


def _documents_per_row(inputs: RunInputs) -> int:
    """Return how many documents a packed row has: counted where there is data, else of DOCUMENT tokens each."""
    ready, amount, texts = inputs.ready, inputs.amount, TEXTS_PER_PAIR.get(inputs.stage, 1)
    if ready is not None and ready.train_samples and ready.train_documents:
        return max(-(-ready.train_documents // ready.train_samples), 1)
    if amount is not None and amount.unit in ("conversations", "pairs"):
        return max(-(-amount.count // amount.samples), 1) * texts
    return max(inputs.config.data.context_length // DOCUMENT, 1) * texts


def _stage_needs(inputs: RunInputs, world_size: int) -> StageNeeds:
    config, stage = inputs.config, inputs.stage
    is_loaded = bool(config.adapter.continue_from) or (bool(inputs.model_dir) and is_adapter(inputs.model_dir))
    loaded = config.adapter.method != OFF and is_loaded
    if stage != GRPO:
        return StageNeeds(stage, likelihood=config.reward.likelihood, loaded=loaded)
    grpo, generate = config.grpo, config.generate
    needs = StageNeeds(
        GRPO,
        reference=grpo.kl > 0,
        loaded=loaded,
        rows=generate.rows,
        bits=asked_bits(generate.bits),
        new_tokens=generate.new_tokens,
        length=_longest_row(config, inputs.model_dir),
        answers=-(-grpo.prompts_per_step // world_size) * grpo.group * world_size,
        updates=grpo.updates,
    )
    return with_scorer(needs, grpo.reward_model) if grpo.reward_model else needs


def _longest_row(config: Config, model_dir: str) -> int:
    """Return the tokens of the longest prompt with its completion; 0 where the prompts can't be read here. The recipe leaves
    out prompts that are longer than the context."""
    count = STAGES[GRPO].lengths
    if count is None or not os.path.isfile(config.grpo.prompts):
        return 0
    from stoker.training.tokenizer.tokenizer import load as load_tokenizer  # imports numpy

    try:
        counted = count(config, load_tokenizer(config.tokenizer.path or tokenizer_in(model_dir)))
    except Refusal:
        return 0  # the recipe refuses them, and says why
    context = config.data.context_length
    return max((length for _, lengths in counted for length in lengths if length <= context), default=0)
