"""`stoker fit`: the memory plan against what the real modules allocate, settings that fit, and the command."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conftest import Stoker, at_length, at_length_but, gpu_json, machine_json
from localuser import needs_root
from small_model import SHAPE, write_model
from stoker.cli import run, train
from stoker.contract.errors import Refusal
from stoker.contract.evidence import Evidence, RankError, RankExit
from stoker.contract.frozen import replace
from stoker.contract.units import format_bytes
from stoker.control.verdict.judge import judge
from stoker.training.fit import answers, block, terms
from stoker.training.fit.cards import Card, written
from stoker.training.fit.described import describe
from stoker.training.fit.footprint import Footprint
from stoker.training.fit.pace import step_seconds
from stoker.training.fit.pairs import COMPARED
from stoker.training.fit.plan import METHODS, Plan, Search, Wish, make
from stoker.training.fit.runs import MAX_RUNS, recorded
from stoker.training.fit.strategy import Decision, decide
from stoker.training.fit.terms import BACKWARD, DPO, FORWARD, GRPO, REWARD, STEP, Job, StageNeeds, predict
from stoker.training.fit.text import Command, lines
from stoker.training.model.config import AdapterConfig, ModelConfig, parameters
from stoker.training.model.hf_config import config_of
from stoker.training.tokenizer.tokenizer import bytes_tokenizer

GIB, MIB = 1 << 30, 1 << 20
LLAMA = ModelConfig(
    family="llama", layers=6, dim=2048, heads=32, kv_heads=4, head_dim=64, ff=5632, vocab_size=32000, tied=False
)
QWEN2 = replace(
    LLAMA, family="qwen2", dim=896, heads=14, kv_heads=2, ff=4864, vocab_size=151936, tied=True, qkv_bias=True
)
QWEN3 = replace(
    QWEN2, family="qwen3", dim=1024, heads=16, kv_heads=8, head_dim=128, ff=3072, qkv_bias=False, qk_norm=True
)
GEMMA3 = replace(
    QWEN3, family="gemma3_text", dim=1152, heads=4, kv_heads=1, head_dim=256, ff=6912, norms="both", norm_offset=1.0,
    activation="gelu_tanh", attention_scale=0.0625, embedding_scale=34.0, windows=(512, 512, 512, 0, 512, 512),
    window_theta=10000.0, vocab_size=65536,
)  # fmt: skip
MISTRAL = replace(LLAMA, family="mistral", windows=(1024,) * 6)
EIGHT = replace(LLAMA, layers=32, dim=4096, heads=32, kv_heads=8, head_dim=128, ff=14336, vocab_size=128256)
OFF, LORA, QLORA = (AdapterConfig(method=method) for method in ("off", "lora", "qlora"))
SHAPES = {"llama": LLAMA, "qwen2": QWEN2, "qwen3": QWEN3, "gemma3": GEMMA3, "mistral": MISTRAL}
# micro-batch, context, packed, recomputed blocks, what blocks keep on the host, optimizer, micro-steps of which the last adds to
# gradients
WAYS = (
    (1, 1024, False, 0, False, "adamw", 2), (2, 2048, False, 3, False, "adamw", 2), (4, 2048, True, 6, False, "adamw", 2),
    (2, 1024, False, 6, True, "adamw8bit", 1), (1, 8192, True, 1, False, "adamw", 1), (2, 2048, True, 2, True, "adamw", 2),
    (1, 1024, False, 0, True, "adamw", 1),
)  # fmt: skip


# Each shape once, each method with a shape of other terms: tied or not, biases, norms of queries and keys, windows.
SHAPES_AND_METHODS = [(kind, method) for method in ("off", "lora", "qlora") for kind in SHAPES]
FEW_OF_THEM = [("llama", "off"), ("qwen2", "lora"), ("qwen3", "off"), ("gemma3", "qlora"), ("mistral", "off")]


@pytest.mark.parametrize("case", at_length_but(FEW_OF_THEM, SHAPES_AND_METHODS), ids="-".join)
def test_the_plan_is_what_the_modules_allocate(case: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The real decoder and its autograd functions run without a GPU (tests/memory_trace.py): each tensor is counted."""
    pytest.importorskip("torch", reason="torch is not installed")
    from memory_trace import traced
    from stoker.training.model import nf4
    from stoker.training.optim.config import OptimConfig

    if not hasattr(nf4, "expand"):
        pytest.skip("the modules here still keep other tensors: adapters of one product, blocks that keep one tensor")
    monkeypatch.setattr(terms, "HANDLES", 0)  # cuBLAS's workspace is none of torch's tensors
    kind, adapter = case[0], AdapterConfig(method=case[1])
    described = describe(SHAPES[kind], adapter)
    for micro, context, packed, again, host, optimizer, steps in WAYS:
        seen = traced(
            SHAPES[kind], adapter, context, micro=micro, packed=packed, recompute=again, steps=steps, host=host,
            optim=OptimConfig(kind=optimizer),
        )  # fmt: skip
        peak = max(seen.peaks[phase] for phase in ("forward", "backward", "step"))
        job = Job(micro, context, optimizer, packed, 1, again, 1, steps > 1, inputs_on_host=host)
        planned = predict(described, job).total
        assert peak - MIB <= planned <= 1.01 * peak, (micro, context, packed, again, optimizer, host, planned / peak)


# micro-batch, context, packed, blocks in full, blocks with their MLP's first product, micro-steps
LEAN_WAYS = (
    (1, 1024, False, 0, 6, 2),
    (2, 2048, True, 0, 3, 2),
    (4, 2048, False, 2, 4, 1),
    (1, 2048, True, 5, 1, 2),
    (2, 1024, False, 0, 1, 1),
)


@pytest.mark.parametrize("case", at_length_but([("llama", "qlora")], [(k, m) for k, m in SHAPES_AND_METHODS if k != "gemma3"]), ids="-".join)  # fmt: skip
def test_blocks_that_make_their_mlps_first_product_again_allocate_what_is_planned(
    case: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    from memory_trace import traced, traced_pairs

    monkeypatch.setattr(terms, "HANDLES", 0)
    shape, adapter = SHAPES[case[0]], AdapterConfig(method=case[1])
    less = predict(describe(shape, adapter), Job(4, 2048, mlp=6)).total
    assert less < 0.8 * predict(describe(shape, adapter), Job(4, 2048)).total or case[1] == "off"
    for micro, context, packed, again, mlp, steps in LEAN_WAYS:
        seen = traced(shape, adapter, context, micro=micro, packed=packed, recompute=again, steps=steps, mlp=mlp)
        peak = max(seen.peaks[phase] for phase in ("forward", "backward", "step"))
        job = Job(micro, context, "adamw", packed, 1, again, 1, steps > 1, mlp=mlp)
        planned = predict(describe(shape, adapter), job)
        told = (micro, context, packed, again, mlp, planned.total / peak, planned.phases, seen.peaks)
        assert peak - MIB <= planned.total <= 1.01 * peak, told
    pairs = traced_pairs(shape, adapter, 1024, likelihood=None, micro=2, recompute=1, mlp=3).peaks
    needs = StageNeeds(DPO)
    told_job = Job(2, 1024, "adamw", True, 1, 1, 1, True, needs=needs, mlp=3)
    found = Footprint(shape, adapter, DPO).planned(told_job).total
    peak = max(pairs[phase] for phase in ("forward", "backward", "step"))
    assert peak - MIB <= found <= 1.01 * peak, found / peak


# reward.likelihood; None: stage dpo
@pytest.mark.parametrize("likelihood", [None, True, False], ids=["dpo", "reward", "reward-plain"])
@pytest.mark.parametrize("adapter", at_length_but([OFF, QLORA], [OFF, LORA, QLORA]), ids=lambda one: one.method)
def test_the_plan_of_pairs_is_what_the_modules_allocate(
    likelihood: bool | None, adapter: AdapterConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    from memory_trace import traced_pairs

    monkeypatch.setattr(terms, "HANDLES", 0)
    needs = StageNeeds(DPO) if likelihood is None else StageNeeds(REWARD, likelihood)
    for kind, micro, context, again, steps in (
        ("llama", 1, 1024, 0, 2),
        ("qwen2", 2, 1024, 6, 1),
        ("gemma3", 4, 2048, 3, 2),
    ):
        seen = traced_pairs(
            SHAPES[kind], adapter, context, likelihood=likelihood, micro=micro, recompute=again, steps=steps
        ).peaks
        job = Job(micro, context, "adamw", True, 1, again, 1, steps > 1, needs=needs)
        found = Footprint(SHAPES[kind], adapter, needs.stage).planned(job)
        peak = max(seen[phase] for phase in ("forward", "backward", "step"))
        assert peak - MIB <= found.total <= 1.01 * peak, (kind, micro, context, again, found.total / peak)
        # No phase is missed where another one is higher.
        forward = max(found.phases[FORWARD], found.phases.get(COMPARED, 0))
        for planned, phase in (
            (forward, "forward"),
            (found.phases[BACKWARD], "backward"),
            (found.phases[STEP], "step"),
        ):
            assert seen[phase] - MIB <= planned <= 1.01 * seen[phase], (kind, phase, planned / seen[phase])


def test_a_reference_that_begins_with_an_adapter_keeps_it_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    from memory_trace import traced_pairs

    monkeypatch.setattr(terms, "HANDLES", 0)
    told = replace(LORA, also_train="norm")
    seen = traced_pairs(LLAMA, told, 1024, likelihood=None, micro=2, loaded=True).peaks
    job = Job(2, 1024, packed=True, needs=StageNeeds(DPO, loaded=True))
    found = Footprint(LLAMA, told, DPO).planned(job)
    peak = max(seen[phase] for phase in ("forward", "backward", "step"))
    assert peak - MIB <= found.total <= 1.01 * peak and found.terms["reference"] > 0, found.total / peak


UNEVEN = replace(LLAMA, ff=5648)  # the codes of `down` have blocks that go from one row into the next


GRPO_WAYS = {"off": (OFF, 16), "lora": (LORA, 16), "qlora": (QLORA, 16), "qlora-codes": (QLORA, 4)}


@pytest.mark.parametrize("way", at_length_but(["qlora-codes"], list(GRPO_WAYS)))
def test_the_plan_of_grpo_is_what_the_modules_allocate(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers by the engine, with kernels and without; merging; the reference; a step. Graphs have no tensors here."""
    pytest.importorskip("torch", reason="torch is not installed")
    from memory_trace import traced_grpo

    monkeypatch.setattr(terms, "HANDLES", 0)
    monkeypatch.setattr(answers, "HANDLES", 0)
    adapter, bits = GRPO_WAYS[way]
    for kind, micro, prompt, new_tokens, again, host in (
        ("llama", 4, 400, 1000, 3, True),
        ("qwen3", 4, 500, 12, 6, False),
        ("gemma3", 8, 560, 60, 0, False),
    ):
        rows, context, model = 8, prompt + new_tokens, SHAPES[kind] if kind != "llama" or bits == 16 else UNEVEN
        seen = traced_grpo(
            model, adapter, context, micro=micro, prompt=prompt, new_tokens=new_tokens, rows=rows, answers=rows,
            recompute=again, codes=bits == 4, host=host,
        ).peaks  # fmt: skip
        needs = StageNeeds(GRPO, rows=rows, bits=bits, new_tokens=new_tokens, answers=rows)
        job = Job(micro, context, recomputed=again, accumulates=rows > micro, inputs_on_host=host, needs=needs)
        found = Footprint(model, adapter, GRPO).planned(job)
        graphs = found.terms["graphs"]
        phases = {name: size - graphs for name, size in found.phases.items()}
        written = max(seen["answers"], seen["merging"])
        for planned, peak in (
            (phases[answers.ANSWERS], written), (phases[COMPARED], seen["compared"]), (phases[FORWARD], seen["forward"]),
            (phases[BACKWARD], seen["backward"]), (phases[STEP], seen["step"]), (found.total - graphs, max(seen.values())),
        ):  # fmt: skip
            # An adapter's copies in 16 bits are there from the first step on, and here only in its own pass.
            assert 0.998 * peak <= planned <= 1.012 * peak + MIB, (kind, planned / peak, found.phases, seen)


def test_the_reward_models_pass_is_about_what_its_modules_allocate() -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    from memory_trace import traced_scores

    for kind in ("llama", "gemma3"):
        for likelihood in (True, False):
            held, work = traced_scores(SHAPES[kind], 4, 1024, likelihood=likelihood)
            assert held == pytest.approx(answers.scorer_bytes(SHAPES[kind], 1024), rel=0.001)
            assert work == pytest.approx(answers.scoring(SHAPES[kind], 4 * 1024, likelihood), rel=0.05)


def test_phases_are_compared_not_added_and_answers_can_be_the_highest() -> None:
    def planned(**more: Any) -> terms.Planned:
        needs = StageNeeds(GRPO, **{"rows": 64, "new_tokens": 128, **more})
        return Footprint(LLAMA, LORA, GRPO).planned(Job(1, 2048, recomputed=6, needs=needs))

    found = planned()
    assert found.phase == answers.ANSWERS and found.total == max(found.phases.values())
    assert planned(reference=False).phases.get(COMPARED) is None
    more = planned(rows=128).phases[answers.ANSWERS] - found.phases[answers.ANSWERS]
    cache = 64 * 2 * 2 * LLAMA.layers * LLAMA.kv_heads * LLAMA.head_dim * 2064
    assert more == pytest.approx(cache, rel=0.02)
    assert planned(scorer=QWEN2).total - found.total == pytest.approx(4 * parameters(QWEN2), rel=0.01)
    assert not Footprint(LLAMA, LORA, GRPO).can_be_on_host() and Footprint(LLAMA, LORA, DPO).can_be_on_host()


def test_constants_of_the_kernels_are_those_of_the_plan() -> None:
    """Triton can't be imported without a GPU: their texts are compared."""
    text = (Path(block.__file__).parents[1] / "model" / "fused_kernel.py").read_text()
    assert f"PROGRAMS = {block.PROGRAMS}\n" in text
    pytest.importorskip("torch", reason="torch is not installed")
    from stoker.training.model import loss

    assert loss.CHUNK_BYTES == terms.CHUNK_BYTES
    assert all(loss.chunk_rows(n, v, 2) == terms.chunk_rows(n, v) for n in (100, 5000, 10**6) for v in (999, 262144))
    from stoker.training.rl import update

    assert all(loss.chunk_rows(n, v, 4) == terms.chunk_rows(n, v, 4) for n in (100, 5000) for v in (999, 262144))
    assert update.MULTIPLE == answers.MULTIPLE
    sampling = (Path(block.__file__).parents[1] / "generate" / "kernel.py").read_text()
    assert f"CHUNK = {answers.CHUNK} " in sampling


def test_a_mixture_of_experts_and_other_engines_get_a_labelled_estimate() -> None:
    routed = replace(LLAMA, family="mixtral", experts=8, experts_per_token=2, expert_ff=5632)
    outside = ModelConfig(engine="transformers", stored=10**9, layers=24, dim=2048, heads=16, ff=8192, vocab_size=50000)
    for model in (routed, outside, replace(GEMMA3, attention_cap=50.0)):
        for adapter in (OFF, LORA, QLORA):
            found = Footprint(model, adapter)
            small, large = (found.planned(Job(micro, 1024)).total for micro in (1, 4))
            assert "estimate" in found.why_about and 0 < small < large
        assert Footprint(model, OFF).planned(Job(1, 1024)).total > 14 * parameters(model)
    assert Footprint(LLAMA, OFF).why_about == ""


def cards(text: str) -> list[Card]:
    found = written(text)
    assert found is not None
    return found


def held(plan: Plan) -> bool:
    return all(share.needs <= share.card.free for share in plan.shares)


CASES = [
    ("8GB", EIGHT, 2048), ("24GB", EIGHT, 2048), ("24GB", EIGHT, 512), ("2x24GB", EIGHT, 4096), ("H200", EIGHT, 2048), ("12GB,8GB,8GB", LLAMA, 2048),
    ("16GB", GEMMA3, 4096), ("8GB", QWEN2, 1024), ("12GB", replace(EIGHT, layers=60), 1024), ("4GB", EIGHT, 2048), ("80GB", QWEN3, 8192),
]  # fmt: skip


@pytest.mark.parametrize(("gpus", "model", "context"), CASES)
@pytest.mark.parametrize("method", ["auto", *METHODS])
def test_settings_fill_the_card_but_never_overfill_it(gpus: str, model: ModelConfig, context: int, method: str) -> None:
    wish = Wish(model, context, method)
    plan = make(cards(gpus), wish)
    assert plan.fits == held(plan) == (plan.change is None)
    if not plan.fits:
        return
    s = plan.settings
    assert all(share.largest >= s.micro for share in plan.shares)
    if s.recompute:  # one block less does not fit
        fixed = replace(wish, method=s.method, micro=s.micro, optimizer=s.optimizer, on_host=s.on_host)
        fixed = replace(fixed, inputs_on_host=s.inputs_on_host)
        assert not make(cards(gpus), replace(fixed, recompute=s.recompute - 1)).fits
    smallest = min(share.largest for share in plan.shares)
    one_more = replace(
        wish, method=s.method, micro=smallest + 1, recompute=s.recompute, optimizer=s.optimizer, samples=9999
    )
    assert (
        smallest == 1024
        or not make(cards(gpus), replace(one_more, on_host=s.on_host, inputs_on_host=s.inputs_on_host)).fits
    )


@pytest.mark.parametrize(("gpus", "model", "context"), CASES)
@pytest.mark.parametrize("method", METHODS)
def test_the_change_that_is_proposed_makes_it_fit(gpus: str, model: ModelConfig, context: int, method: str) -> None:
    for wish in (Wish(model, context, method), Wish(model, context, method, optimizer="adamw", recompute=0, micro=64)):
        plan = make(cards(gpus), wish)
        if plan.fits or plan.change is None or not plan.change.settings:
            continue
        told = dict(plan.change.settings)
        free = {"micro": 0, "recompute": None, "optimizer": "auto"} if "method" in told else {}
        changed = replace(
            wish,
            **free,
            **({"micro": int(told["micro"])} if "micro" in told else {}),
            **({"recompute": model.layers} if "recompute" in told else {}),
            **({"context": int(told["context-length"])} if "context-length" in told else {}),
            **{key: told[key] for key in ("method", "optimizer") if key in told},
            **({"on_host": True} if "embedding" in told else {}),
            **({"inputs_on_host": True} if "activations" in told else {}),
        )
        left = cards(gpus)
        if "gpus" in told:
            left = [card for card in left if card.label.removeprefix("GPU ") in told["gpus"].split(",")]
        assert make(left, changed).fits, (told, plan.settings)


def test_activations_go_to_the_host_before_the_context_shrinks() -> None:
    wish = Wish(EIGHT, 6144, "qlora")
    plan = make(cards("8GB"), wish)
    s, (share,) = plan.settings, plan.shares
    assert plan.fits and s.inputs_on_host and s.on_host and s.optimizer == "adamw8bit"
    inputs = (s.recompute - 1) * s.micro * 6144 * EIGHT.dim * 2
    embedding = EIGHT.vocab_size * EIGHT.dim * 2
    assert inputs <= share.host_bytes - embedding <= 1.3 * inputs
    assert "--compute.activations host" in " ".join(text_lines(plan)) and "host memory" in " ".join(text_lines(plan))
    without = make(cards("8GB"), replace(wish, inputs_on_host=False))
    assert not without.fits and without.change is not None and without.change.settings == {"activations": "host"}
    assert not make(cards("8GB"), replace(wish, model=replace(EIGHT, attention_cap=50.0))).settings.inputs_on_host


def test_a_host_without_the_memory_gets_no_activations() -> None:
    wish = Wish(EIGHT, 6144, "qlora")
    needs = make(cards("8GB"), wish).shares[0].host_bytes
    for host_free, fits in ((2 * needs, True), (needs, False)):
        plan = make([replace(card, host_free=host_free) for card in cards("8GB")], wish)
        assert plan.fits == fits and (fits or "context-length" in plan.change.settings)  # type: ignore[union-attr]
    both = [replace(card, host_free=2 * needs) for card in cards("2x8GB")]
    assert not make(both, replace(wish, samples=2)).fits, "two ranks on one host"
    forced = make([replace(card, host_free=1) for card in cards("24GB")], replace(wish, inputs_on_host=True))
    assert not forced.fits and forced.change is not None and forced.change.settings == {"activations": "device"}


def test_copies_to_the_host_replace_recomputing_as_far_as_arithmetic_hides_them() -> None:
    wish = Wish(EIGHT, 2048, "qlora", packed=False, micro=4, optimizer="adamw", on_host=True)
    search = Search(cards("H100 9GB"), wish)
    s = search.plan().settings
    assert s.inputs_on_host and 8 <= s.recompute <= 24
    costs = [search._cost(replace(s, recompute=again)) for again in range(33)]
    assert min(costs) == costs[s.recompute] < costs[32] < costs[0], "all of them would wait for the copies"
    assert "would take longer than computing" in " ".join(text_lines(search.plan()))
    for gpus, free, moved in (("H100", None, False), ("H100 12GB", 64 * GIB, True), ("H100 12GB", 2 * GIB, False)):
        there = [replace(card, host_free=free) for card in cards(gpus)]
        assert make(there, wish).settings.inputs_on_host is moved, (
            "not where all fits, nor where the host has no memory"
        )
    assert not make(cards("RTX 4090 12GB"), wish).settings.inputs_on_host, "it may be in any slot"
    asked = replace(wish, inputs_on_host=True)
    slow, fast, unknown = (make(cards(gpus), asked).settings for gpus in ("RTX 4090", "H100", "24GB"))
    assert slow.recompute < fast.recompute < unknown.recompute == 32


def text_lines(plan: Plan) -> list[str]:
    return list(lines(plan, Command("model")))


def test_a_card_without_bf16_computes_in_fp16_and_so_do_those_beside_it() -> None:
    for gpus, dtype in (
        ("T4", "fp16"),
        ("V100 32GB", "fp16"),
        ("RTX 3090,T4", "fp16"),
        ("RTX 3090", "bf16"),
        ("16GB", "bf16"),
    ):
        plan = make(cards(gpus), Wish(EIGHT, 1024, "qlora"))
        told = text_lines(plan)
        assert (
            plan.fits and plan.dtype == dtype and any(line.startswith("fits: qlora") and dtype in line for line in told)
        )
        assert any("fp16 with loss scaling" in line for line in told) == (dtype == "fp16")
        assert bool(plan.about) == (dtype == "fp16"), "none was measured"
    assert [Card(name, GIB, GIB).dtype for name in ("Tesla T4", "NVIDIA GeForce RTX 2080 Ti", "NVIDIA A10")] == [
        "fp16",
        "fp16",
        "bf16",
    ]


def test_a_larger_card_never_gets_a_more_frugal_method() -> None:
    order = {"full": 0, "lora": 1, "qlora": 2}
    plans = [make(cards(f"{size}GB"), Wish(EIGHT, 2048)) for size in (6, 8, 12, 16, 24, 40, 80, 140)]
    assert [plan.fits for plan in plans] == [False, True, True, True, True, True, True, True]
    methods = [order[plan.settings.method] for plan in plans]
    assert methods == sorted(methods, reverse=True) and methods[-1] == 0


def test_what_others_hold_is_named_where_it_decides() -> None:
    total = 24 * GIB
    full = Card("NVIDIA A10", total, 3 * GIB, "GPU 0", held=("20 GB by pid 7 (eve: train.py)",), held_bytes=21 * GIB)
    plan = make([full], Wish(EIGHT, 2048, "qlora"))
    assert not plan.fits and plan.change is not None and "pid 7 (eve: train.py)" in plan.change.words
    both = make([full, replace(full, free=total, label="GPU 1")], Wish(EIGHT, 2048, "qlora"))
    assert both.change is not None and both.change.settings == {"gpus": "1"}


# ---- one card, DDP or FSDP ----


THIRTY_TWO = replace(
    EIGHT, family="qwen2", layers=64, dim=5120, heads=40, ff=27648, vocab_size=152064, qkv_bias=True
)  # fmt: skip


def decided(gpus: str, wish: Wish, asked: str = "auto") -> Decision:
    found = decide(cards(gpus), wish, asked)
    assert found.plan.fits == held(found.plan)
    return found


def test_shards_are_chosen_where_nothing_else_fits() -> None:
    found = decided("4x24GB", Wish(THIRTY_TWO, 2048, "lora"))
    assert found.way.strategy == "fsdp" and found.plan.fits
    by = {way.strategy: way for way in found.ways}
    assert not by["ddp"].plan.fits and not by["one"].plan.fits and by["ddp"].needs > 2.5 * by["fsdp"].needs
    line = found.line()
    assert line.startswith("fsdp: ddp 6") and line.count("does not fit") == 2 and line.endswith("theirs is not known)")
    told = text_lines(found.plan)
    assert any("gathered" in one for one in told) and "--parallel fsdp" in " ".join(told)
    ddp = make(cards("4x24GB"), Wish(THIRTY_TWO, 2048, "lora"))
    assert ddp.change is not None and ddp.change.settings == {"parallel": "fsdp"}, "a plan for ddp says so"


def test_the_fastest_way_is_chosen_where_several_fit() -> None:
    small = replace(EIGHT, layers=8)
    assert decided("4xH100", Wish(small, 2048, "full")).way.strategy == "ddp"
    slow = decided("2xRTX 3090", Wish(small, 256, "lora", samples=2))
    assert slow.way.strategy == "ddp", "adapters are little to exchange"
    far = [replace(card, host=f"host-{at}") for at, card in enumerate(cards("2xH100"))]
    found = decide(far, Wish(small, 512, "full", samples=2))
    by = {way.strategy: way.seconds or 0 for way in found.ways}
    assert found.way.strategy == "one" and by["one"] < 0.2 * by["ddp"], "10 Gbit/s between hosts"
    near = decide(cards("2xH100"), Wish(small, 512, "full", samples=2))
    assert {way.strategy: way.seconds or 0 for way in near.ways}["ddp"] < 0.1 * by["ddp"]


@at_length
def test_shards_go_to_the_host_where_they_do_not_fit_the_cards() -> None:
    found = decided("4x24GB", Wish(EIGHT, 2048, "full"))
    s, share = found.plan.settings, found.plan.shares[0]
    assert (found.way.strategy, s.offload, s.optimizer) == ("fsdp", "optimizer", "adamw8bit")
    assert "optimizer" not in share.planned.terms and share.host_bytes == pytest.approx(
        2 * parameters(EIGHT) / 4, rel=0.05
    )
    off = decided("4x24GB", Wish(EIGHT, 2048, "full", offload="off"))
    assert not off.plan.fits and off.plan.change is not None
    lora = decided("2x24GB", Wish(THIRTY_TWO, 2048, "lora"))
    share = lora.plan.shares[0]
    assert lora.plan.settings.offload == "all" and "weights" not in share.planned.terms
    assert share.host_bytes == pytest.approx(2 * parameters(THIRTY_TWO) / 2, rel=0.05)
    assert "--offload all" in " ".join(text_lines(lora.plan))
    small = [replace(card, host_free=48 * GIB) for card in cards("2x24GB")]
    assert not decide(small, Wish(THIRTY_TWO, 2048, "lora")).plan.fits, "the host has no memory for it"
    assert all(way.plan.settings.offload == "off" for way in decided("4xH100", Wish(EIGHT, 2048, "lora")).ways)
    by = decided("4x24GB", Wish(THIRTY_TWO, 2048, "lora", offload="all")).ways
    assert {way.strategy: way.plan.settings.offload for way in by} == {"ddp": "off", "fsdp": "all", "one": "off"}


def test_a_method_nobody_asked_for_does_not_wait_for_host_memory() -> None:
    asked = decided("2x24GB", Wish(EIGHT, 2048, "full"))
    assert asked.plan.fits and asked.plan.settings.offload == "all", "it can be had"
    s = decided("2x24GB", Wish(EIGHT, 2048)).plan.settings
    assert (s.method, s.offload, s.inputs_on_host, s.on_host) == ("lora", "off", False, False)
    last = make(cards("1x8GB"), Wish(EIGHT, 6000)).settings
    assert last.method == "qlora" and last.inputs_on_host, "where nothing else is left"


@at_length
def test_hosts_far_apart_hold_copies_where_these_fit() -> None:
    far = [replace(card, host=f"host-{at // 4}") for at, card in enumerate(cards("8xH100"))]
    found = decide(far, Wish(EIGHT, 2048, "full", samples=64), "fsdp")
    s, share = found.plan.settings, found.plan.shares[0]
    assert s.sharding == "host" and share.planned.terms["weights"] == pytest.approx(4 * parameters(EIGHT) / 4, rel=0.01)
    assert "fsdp inside hosts 7" in found.line() and "in 4 shards on each host" in " ".join(text_lines(found.plan))
    assert "--parallel fsdp --sharding host" in " ".join(text_lines(found.plan))
    over = make(far, Wish(EIGHT, 2048, "full", samples=64, strategy="fsdp"))
    assert (step_seconds(over) or 0) > 1.5 * (found.way.seconds or 0), "weights over 10 Gbit/s, with each micro-batch"
    assert decide(cards("8xH100"), Wish(EIGHT, 2048, "full"), "fsdp").plan.settings.sharding == "all"
    assert decide(far[:7], Wish(EIGHT, 2048, "full"), "fsdp").plan.settings.sharding == "all", "hosts of 4 and 3"


def test_a_card_that_others_fill_is_left_out() -> None:
    free, full = cards("2x24GB")
    found = decide([replace(full, free=2 * GIB), free], Wish(EIGHT, 2048, "qlora"))
    assert found.way.strategy == "one" and found.plan.fits and found.plan.shares[0].card.label == free.label


def test_grpo_in_shards_has_a_copy_of_every_weight() -> None:
    wish = Wish(EIGHT, 1024, "lora", needs=StageNeeds("grpo", rows=8), samples=32)
    by = {way.strategy: way.plan.shares[0].planned.terms for way in decided("4xH100", wish).ways}
    assert by["fsdp"]["weights"] < 0.3 * by["ddp"]["weights"]
    assert by["fsdp"]["answering copy"] == pytest.approx(2 * parameters(EIGHT), rel=0.01)
    assert by["fsdp"]["answering copy"] > by["ddp"]["answering copy"]


# ---- the command ----


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "8b").mkdir()
    (tmp_path / "8b" / "config.json").write_text(json.dumps(config_of(EIGHT, 8192, "bfloat16")))
    return tmp_path / "8b"


def test_it_plans_from_config_json_without_torch_and_without_numpy(folder: Path, tmp_path: Path) -> None:
    program = (
        "import sys; from stoker.cli.main import main; code = main(sys.argv[1:]);"
        "assert not {'torch', 'numpy', 'transformers'} & set(sys.modules), 'heavy'; sys.exit(code)"
    )
    command = [sys.executable, "-c", program, "fit", str(folder), "--gpus", "8GB"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "fits: qlora" in done.stdout and "GPU 0: 8GB card" in lines[0]
    assert all(len(line) <= 80 for line in lines if "GiB  " in line)
    assert "stoker train sft --model.load" in done.stdout and "--qlora" in done.stdout


def test_json_has_each_gpu_with_its_terms(stoker: Stoker, folder: Path) -> None:
    done = stoker("fit", str(folder), "--gpus", "2x24GB", "--context", "1024", "--json")
    told = json.loads(done.out)
    assert done.code == 0 and told["fits"] and told["schema"] == 1 and len(told["gpus"]) == 2
    for gpu in told["gpus"]:
        assert sum(gpu["terms"].values()) == gpu["needs_bytes"] <= gpu["free"]
        assert gpu["planned_bytes"] == max(gpu["phases"].values())


def test_several_cards_get_a_line_with_each_way(stoker: Stoker, folder: Path) -> None:
    words = ("fit", str(folder), "--gpus", "8x24GB", "--method", "full")
    done = stoker(*words)
    (line,) = [line for line in done.out.splitlines() if line.startswith("parallel ")]
    assert done.code == 0 and line.startswith("parallel fsdp: ddp ") and "; one card " in line
    told = json.loads(stoker(*words, "--json").out)
    assert told["strategy"] == "fsdp" and "--parallel fsdp" in told["command"]
    assert {way["strategy"]: way["fits"] for way in told["strategies"]} == {"ddp": False, "fsdp": True, "one": False}
    assert all(way["needs_bytes"] > 0 for way in told["strategies"])
    ddp = stoker(*words, "--parallel", "ddp")
    assert ddp.code == 1 and "smallest change: --parallel fsdp" in ddp.out and "\nparallel " not in ddp.out
    refused = stoker(*words, "--parallel", "fsdp", "--embedding", "host")
    assert refused.code == 64 and refused.err.count("\n") == 1


@pytest.mark.parametrize(
    ("stage", "words"),
    [
        ("reward", "stoker train reward --model.load {model} --reward.pairs YOUR_DATA --qlora"),
        ("dpo", "stoker train dpo --model.load {model} --dpo.pairs YOUR_DATA --qlora"),
        (
            "grpo",
            "stoker train grpo --model.load {model} --grpo.prompts YOUR_DATA --new-tokens 64 --rows 16 --qlora",
        ),
        ("midtrain", "stoker train midtrain --model.load {model} --data YOUR_DATA --qlora"),
    ],
)
def test_each_stage_has_its_terms_and_its_command(stoker: Stoker, folder: Path, stage: str, words: str) -> None:
    more = ("--rows", "16", "--new-tokens", "64") if stage == "grpo" else ()
    given = ("fit", str(folder), "--stage", stage, "--gpus", "40GB", "--method", "qlora", "--context", "512", *more)
    done = stoker(*given)
    assert done.code == 0 and words.format(model=folder) in done.out, done.out
    assert all(len(line) <= 80 for line in done.out.splitlines() if "GiB  " in line)
    told = json.loads(stoker(*given, "--json").out)
    named = {"answering copy", "cache", "graphs"}
    assert told["stage"] == stage and (named <= set(told["gpus"][0]["terms"])) == (stage == "grpo")
    assert ("answers" in told["gpus"][0]["phases"]) == (stage == "grpo")
    assert told["gpus"][0]["planned_bytes"] == max(told["gpus"][0]["phases"].values())
    full = json.loads(stoker(*given, "--gpus", "400GB", "--method", "full", "--json").out)
    copy = full["gpus"][0]["terms"].get("reference", 0)
    assert (copy > 15e9) == (stage in ("dpo", "grpo")), (
        "a second copy where all weights learn, and none beside adapters"
    )


def test_fewer_answers_at_once_are_proposed_where_the_cache_is_too_large(stoker: Stoker, folder: Path) -> None:
    words = ("fit", str(folder), "--stage", "grpo", "--gpus", "24GB", "--method", "qlora")
    done = stoker(*words)
    assert done.code == 1 and "smallest change: --rows " in done.out, done.out
    change = done.out.rpartition("smallest change: ")[2].split()
    assert stoker(*words, *change).code == 0


def test_answers_are_written_by_codes_where_a_copy_does_not_fit(stoker: Stoker, folder: Path) -> None:
    words = (
        "fit",
        str(folder),
        "--stage",
        "grpo",
        "--gpus",
        "16GB",
        "--method",
        "qlora",
        "--rows",
        "8",
        "--context",
        "512",
    )
    done = stoker(*words)
    assert done.code == 0 and "8 answers at once by 4-bit weights" in done.out, done.out
    assert "answers by 4-bit weights: a copy of them in 16 bits does not fit" in done.out
    assert "--rows 8 --generate.bits 4 --qlora" in done.out
    done = stoker(*words, "--bits", "16")
    assert done.code == 1 and "smallest change: --bits 4" in done.out, done.out
    larger = json.loads(stoker(*words, "--gpus", "40GB", "--json").out)
    assert larger["settings"]["bits"] == 16 and larger["gpus"][0]["terms"]["answering copy"] > 13e9
    asked = json.loads(stoker(*words, "--gpus", "40GB", "--bits", "4", "--json").out)
    assert asked["settings"]["bits"] == 4 and "answering copy" not in asked["gpus"][0]["terms"]


def test_pairs_are_counted_for_time_and_cost(stoker: Stoker, folder: Path, tmp_path: Path) -> None:
    row = {"prompt": "hi " * 50, "chosen": "ho " * 200, "rejected": "hu " * 100}
    (tmp_path / "pairs.jsonl").write_text((json.dumps(row) + "\n") * 500)
    data = ("--data", str(tmp_path / "pairs.jsonl"))
    done = stoker("fit", str(folder), "--stage", "dpo", "--gpus", "H100", *data)
    assert done.code == 0 and "one epoch: about" in done.out and "pairs.jsonl" in done.out, done.out
    done = stoker("fit", str(folder), "--stage", "grpo", "--gpus", "H100", "--method", "qlora", *data)
    assert done.code == 0 and "speed: unknown" in done.out and "--grpo.prompts" in done.out
    assert "without a speed the time of an epoch is unknown" in done.out
    done = stoker("fit", str(folder), "--stage", "dpo", "--gpus", "H100", "--price", "2")
    assert done.code == 0 and "no cost of an epoch (--price): the cost of an epoch needs --data" in done.out, done.out


def test_the_summary_names_both_memory_needs(stoker: Stoker, folder: Path, tmp_path: Path) -> None:
    row = {"prompt": "hi " * 50, "chosen": "ho " * 200, "rejected": "hu " * 100}
    (tmp_path / "pairs.jsonl").write_text((json.dumps(row) + "\n") * 50)
    given = ("fit", str(folder), "--stage", "dpo", "--gpus", "H100", "--data", str(tmp_path / "pairs.jsonl"))
    (gpu,) = json.loads(stoker(*given, "--json").out)["gpus"]
    (line,) = [line for line in stoker(*given).out.splitlines() if line.startswith("memory plan: ")]
    assert (
        f"{format_bytes(gpu['planned_bytes'])} of tensors" in line
        and f"{format_bytes(gpu['needs_bytes'])} with the CUDA context" in line
    ), line


def test_exit_code_1_and_the_smallest_change_where_it_does_not_fit(stoker: Stoker, folder: Path) -> None:
    done = stoker("fit", str(folder), "--gpus", "24GB", "--method", "full")
    assert done.code == 1 and "smallest change: --method lora" in done.out


def test_a_machine_that_was_recorded_shows_who_holds_its_cards(stoker: Stoker, folder: Path) -> None:
    machine = Path(__file__).parent / "machines" / "container-foreign-holders.json"
    done = stoker("fit", str(folder), "--machine", str(machine))
    assert done.code == 0 and "skipping GPU 0" in done.err
    assert "held: 7.9 GiB by pid 412 (root: python -m sglang.launch_server" in done.out
    done = stoker("fit", str(folder), "--machine", str(machine), "--gpus", "2")
    assert done.code == 0 and "GPU 2: NVIDIA A40" in done.out and "GPU 1" not in done.out
    assert "estimated from the card's table" in done.out


def test_an_epochs_time_and_cost_and_where_the_speed_comes_from(stoker: Stoker, folder: Path, tmp_path: Path) -> None:
    row = {"messages": [{"role": "user", "content": "hi " * 50}, {"role": "assistant", "content": "ho " * 200}]}
    (tmp_path / "chats.jsonl").write_text((json.dumps(row) + "\n") * 2000)
    words = ("fit", str(folder), "--gpus", "H100", "--data", str(tmp_path / "chats.jsonl"), "--price", "3")
    done = stoker(*words)
    assert done.code == 0 and "one epoch: about" in done.out and "at 3 per GPU hour" in done.out
    run = tmp_path / "runs" / "20990101-000000-sft"
    (run / "hf").mkdir(parents=True)
    whole_run = stoker("fit", str(run), "--gpus", "H100")
    assert whole_run.code == 66 and f"{run}: it has no config.json; use {run}/hf" in whole_run.err
    told = {"model": str(folder), "method": "lora", "context": 2048, "cards": ["H100"], "tokens_per_s": 4321.0}
    (run / "memory.json").write_text(json.dumps(told))
    done = stoker(*words)
    assert "4,321 tokens/s (measured by run 20990101-000000-sft)" in done.out, done.out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--gpus", "2xQuantum9000"), "is not a known GPU"), (("--gpus", "0GB"), "too small"), (("--gpus", "0,1"), "GPU '0'"),
        (("--gpus", "24GB", "--machine", "x.json"), "can't be combined with --machine"), (("--machine", "x.json"), "does not exist"), ((), "no usable GPU"),
        (("--gpus", "8GB", "--lora-rank", "0"), "--lora-rank must be a whole number from 1 to 4096, got 0"), (("--gpus", "8GB", "--context", "1"), "--context-length must be a whole number from 2"),
        (("--gpus", "8GB", "--recompute", "some"), "--recompute must be a number of blocks"), (("--gpus", "8GB", "--price", "-1"), "--price must be at least 0"),
        (("--gpus", "8GB", "--method", "lora", "--lora-targets", "q_prj"), "no linear layer of this model is called that (did you mean"),
        (("--gpus", "8GB", "--method", "lora", "--optimizer", "muon"), "--optimizer muon needs --method full"),
        (("--gpus", "8GB", "--probe"), "add --data"), (("--gpus", "8GB", "--data", "nowhere.jsonl"), "nowhere.jsonl"),
        (("--gpus", "8GB", "--stage", "tokenizer"), "--stage tokenizer has no memory plan"), (("--gpus", "8GB", "--stage", "evaluate"), "use one of pretrain, midtrain, sft"),
        (("--gpus", "8GB", "--stage", "dop"), "is unknown (did you mean dpo?)"), (("--gpus", "8GB", "--stage", ""), "is unknown"),
        (("--gpus", "8GB", "--rows", "4"), "--rows applies only to --stage grpo, got --stage sft"), (("--gpus", "8GB", "--stage", "grpo", "--rows", "-1"), "--rows must be a whole number"),
        (("--gpus", "8GB", "--bits", "4"), "--bits applies only to --stage grpo"), (("--gpus", "8GB", "--stage", "grpo", "--bits", "4", "--method", "lora"), "--bits 4 needs --method qlora"),
        (("--gpus", "8GB", "--stage", "grpo", "--new-tokens", "2048"), "leaves no tokens for a prompt"), (("--gpus", "8GB", "--stage", "grpo", "--kl", "-1"), "--kl must be at least 0"),
        (("--gpus", "8GB", "--stage", "grpo", "--reward-model", "nowhere"), "nowhere"), (("--gpus", "8GB", "--stage", "dpo", "--no-likelihood"), "applies only to --stage reward"),
        (("--gpus", "8GB", "--stage", "grpo", "--embedding", "host"), "stage grpo can't use --embedding host"),
        (("--method", "dora"), "invalid choice"), (("--gpu", "8GB"), "unknown option --gpu (did you mean --gpus?)"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(stoker: Stoker, folder: Path, words: tuple[str, ...], says: str) -> None:
    done = stoker("fit", str(folder), *words)
    assert 64 <= done.code <= 78 and done.err.count("\n") == 1 and says in done.err, (done.code, done.err)


def test_a_folder_without_config_json_is_one_line(stoker: Stoker, tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nothing"):
        done = stoker("fit", str(path), "--gpus", "8GB")
        assert 64 <= done.code <= 78 and done.err.count("\n") == 1 and "Traceback" not in done.err, done.err


def test_an_unknown_architecture_gets_an_estimate(stoker: Stoker, tmp_path: Path) -> None:
    keys = {"architectures": ["NobodysForCausalLM"], "model_type": "nobodys", "hidden_size": 2048, "num_hidden_layers": 24,
            "num_attention_heads": 16, "intermediate_size": 8192, "vocab_size": 50000}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(keys))
    done = stoker("fit", str(tmp_path), "--gpus", "24GB", "--json")
    assert done.code == 0 and "estimate" in json.loads(done.out)["estimate"], done.err


# ---- stoker train ----


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A model with weights, of which a card can be too small."""
    pytest.importorskip("torch", reason="torch is not installed")
    from stoker.training.model import hf
    from stoker.training.model.decoder import Decoder
    from stoker.training.tokenizer.tokenizer import bytes_tokenizer

    bytes_tokenizer().save(str(tmp_path / "tokenizer"))
    shape = ModelConfig(layers=4, dim=1024, heads=8, kv_heads=8, head_dim=128, ff=4096, vocab_size=272)
    model = Decoder(shape, 128)
    model.start(3)
    hf.save(model, str(tmp_path / "model"), say=lambda line: None, tokenizer_folder=str(tmp_path / "tokenizer"))
    return tmp_path / "model"


def test_train_refuses_before_it_starts_what_can_not_fit(
    stoker: Stoker, small: Path, tmp_path: Path, box: Callable[..., dict[str, str]]
) -> None:
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}))  # fmt: skip
    tiny = box([gpu_json(0, memory_total=1024 * MIB, memory_used=0)])
    words = (
        "train",
        "sft",
        "--model.load",
        str(small),
        "--data",
        str(tmp_path / "chats.jsonl"),
        "--data.validation",
        "0",
    )
    done = stoker(*words, "--max-steps", "1", env=tiny)
    assert done.code == 69 and "this does not fit: GPU 0 has 1.0 GiB free, and full" in done.err, done.err
    assert "smallest change: --lora" in done.err and not (tmp_path / "runs").exists()


JOBS = {
    "pretrain": ("pretrain", ()),
    "sft": ("sft", ()),
    "sft-lora": ("sft", ("lora",)),
    "sft-qlora": ("sft", ("qlora",)),
    "midtrain": ("midtrain", ()),
    "dpo": ("dpo", ()),
    "reward": ("reward", ()),
    "grpo": ("grpo", ()),
    "grpo-qlora": ("grpo", ("qlora",)),
}


def rows_for(stage: str, folder: Path) -> tuple[str, Path]:
    """Write rows that this stage reads, and return the flag of `stoker train` that names them, and their file."""
    question, reply = "how many are one and one? " * 3, "two, I think. " * 20
    rows: dict[str, tuple[str, dict[str, Any]]] = {
        "pretrain": ("--data", {"text": question + reply}),
        "dpo": ("--dpo.pairs", {"prompt": "1 + 1?", "chosen": "two", "rejected": "two or three"}),
        "reward": ("--reward.pairs", {"prompt": "1 + 1?", "chosen": "two", "rejected": "two or three"}),
        "grpo": ("--grpo.prompts", {"prompt": question, "answer": "2"}),
    }
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": reply}]
    flag, row = rows.get(stage, ("--data", {"messages": messages}))
    path = folder / f"{stage}.jsonl"
    path.write_text((json.dumps(row) + "\n") * 400)
    return flag, path


ALONE = [(job, "1x3GB") for job in JOBS]


@pytest.mark.parametrize(
    "case", at_length_but([*ALONE, ("sft", "2x24GB")], [*ALONE, *((job, "2x24GB") for job in JOBS)]), ids="-".join
)
def test_fit_and_train_print_the_same_numbers_for_the_same_job(
    tmp_path: Path, small: Path, stoker: Stoker, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
    case: tuple[str, str],
) -> None:  # fmt: skip
    """`stoker train` runs up to where its ranks would start, on a recorded machine with the GPUs that fit is told of."""
    from stoker.cli import run, train
    from stoker.control.machine.model import machine_from_json
    from stoker.control.plan.request import Request
    from stoker.training.config.flags import parse
    from stoker.training.config.layers import gather
    from stoker.training.config.resolve import settle
    from stoker.training.fit.launch_plan import launch_plan

    gpus, (stage, method) = case[1], JOBS[case[0]]
    flag, path = rows_for(stage, tmp_path)
    monkeypatch.chdir(tmp_path)
    described = [gpu_json(at, name=card.name, memory_total=card.total, memory_used=0) for at, card in enumerate(cards(gpus))]  # fmt: skip
    monkeypatch.setattr(train, "observe_machine", lambda: machine_from_json(machine_json(described)))
    started: list[Request] = []
    monkeypatch.setattr(run, "start", lambda request, ended: started.append(request) or 0)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    words = [stage, "--model.load", str(small), flag, str(path), *(f"--{name}" for name in method)]
    assert train.main(words) == 0
    printed = capfd.readouterr().err.splitlines()
    config = settle(gather(parse(started[0].args), {}), True).config
    before = launch_plan(os.environ)
    assert before is not None

    asked = (
        "fit",
        str(small),
        "--stage",
        stage,
        "--data",
        str(path),
        "--gpus",
        gpus,
        "--method",
        *(method or ("full",)),
    )
    fit = json.loads(stoker(*asked, "--json").out)
    lines = stoker(*asked).out.splitlines()
    assert fit["fits"]
    (tightest, *_) = fit["gpus"]
    assert before.planned.total == tightest["planned_bytes"] == max(tightest["phases"].values())
    assert before.planned.terms.items() <= tightest["terms"].items()
    assert before.micro == fit["settings"]["micro"]
    assert (config.batch.micro or 16) == fit["settings"]["micro"], "the ranks use the plan's micro-batch"
    assert config.optim.kind == fit["settings"]["optimizer"]
    assert config.parallel.strategy == fit["settings"]["strategy"]
    assert config.data.context_length == fit["context"]
    assert (str(config.compute.recompute) != "auto") == (fit["settings"]["recompute"] > 0)
    if stage == "grpo":
        assert fit["step"] == {"samples": config.grpo.prompts_per_step * config.grpo.group, "tokens": None}
    else:
        assert fit["step"]["tokens"] == config.batch.tokens == fit["step"]["samples"] * fit["context"]

    # Parameters, counted data, rate, batch, length and validation; then memory, micro-batch and tokens of a step.
    begin = next(at for at, line in enumerate(printed) if line.startswith(f"{stage}: "))
    block = [line for line in printed[begin:] if line.startswith((f"{stage}: ", "  "))]
    assert len(block) > 5 and set(block) <= set(lines), (block, lines)
    (plan,) = [line.partition(";")[0] for line in printed if line.startswith("memory plan: ")]
    assert plan in lines, (plan, lines)

    # The command that fit proposes is the same job.
    proposed = shlex.split(fit["command"])
    assert proposed[:2] == ["stoker", "train"] and train.main(proposed[2:]) == 0
    again = launch_plan(os.environ)
    assert again is not None and (again.planned.total, again.micro) == (before.planned.total, before.micro)


def test_train_takes_from_the_plan_what_nobody_set(tmp_path: Path, small: Path) -> None:
    from stoker.cli.train_fit import with_memory_plan
    from stoker.control.machine.model import machine_from_json
    from stoker.control.plan.options import RunOptions
    from stoker.training.config.flags import parse
    from stoker.training.config.layers import gather
    from stoker.training.config.resolve import settle

    def planned(total: int, *flags: str) -> tuple[Any, list[str]]:
        machine = machine_from_json(machine_json([gpu_json(0, memory_total=total, memory_used=0)]))
        lines: list[str] = []
        resolved = settle(gather(parse([f"--{flag}" for flag in flags]), {}), True)
        found, *_ = with_memory_plan(
            "sft", resolved, RunOptions(runs_dir=str(tmp_path)), {"": machine}, None, lines.append
        )
        return found.config, lines

    load = f"model.load={small}"
    config, lines = planned(80 * GIB, load, "data.kind=chat")
    assert config.compute.recompute == "auto" and "nothing to change" in lines[0]
    config, lines = planned(2600 * MIB, load, "data.kind=chat", "data.context_length=8192")
    assert config.compute.recompute not in ("auto", "off") and "recompute" in lines[0], lines
    config, lines = planned(2600 * MIB, load, "data.kind=chat", "data.context_length=8192", "compute.recompute=off")
    assert config.compute.recompute == "off"


def test_train_takes_the_strategy_from_the_plan(tmp_path: Path, small: Path, folder: Path) -> None:
    from stoker.cli.train_fit import refuse_too_large, with_memory_plan
    from stoker.control.machine.model import machine_from_json
    from stoker.control.plan.options import RunOptions
    from stoker.training.config.flags import parse
    from stoker.training.config.layers import gather
    from stoker.training.config.resolve import settle

    def planned(total: int, *flags: str, host: int = 0, **options: Any) -> tuple[Any, Any, list[str]]:
        gpus = [gpu_json(at, memory_total=total, memory_used=0) for at in range(4)]
        machine = machine_from_json(machine_json(gpus))
        machine = replace(machine, memory_available=host) if host else machine
        given = (f"model.load={small}", "data.kind=chat", "data.context_length=512", "batch.tokens=8192", *flags)
        resolved = settle(gather(parse([f"--{flag}" for flag in given]), {}), True)
        lines, asked = list[str](), RunOptions(runs_dir=str(tmp_path), **options)
        refuse_too_large("sft", resolved, asked, {"": machine})
        found, run, _ = with_memory_plan("sft", resolved, asked, {"": machine}, None, lines.append)
        return found.config.parallel.strategy, run.gpus, lines

    strategy, gpus, lines = planned(2150 * MIB, "parallel=auto", "optim.kind=adamw")
    assert strategy == "fsdp" and lines[0].startswith("parallel auto: fsdp: ddp ") and "does not fit" in lines[0]
    strategy, gpus, lines = planned(2150 * MIB, "parallel=auto", "compute.compile=on")
    assert strategy == "ddp" and "there is no memory plan for this run" in lines[0]
    strategy, gpus, lines = planned(2150 * MIB, "optim.kind=adamw")
    assert strategy == "ddp" and "may not fit" in lines[0] and lines[0].endswith("smallest change: --parallel fsdp")
    assert planned(80 * GIB, "parallel=auto", "lora")[0] == "ddp"
    with pytest.raises(
        Refusal, match=r"does not fit: a gathered block and the buffer .* however many ranks .* --qlora"
    ):
        planned(1400 * MIB, "parallel=fsdp", f"model.load={folder}")
    with pytest.raises(
        Refusal, match=r"does not fit: parallel.offload all needs .* of host memory, and [\d.]+ MiB are"
    ):
        planned(2150 * MIB, "parallel=fsdp", "offload=all", host=64 << 20)
    # 1.3 GB of gradients over PCIe take longer than 512 tokens: one card, unless somebody says how many.
    strategy, gpus, lines = planned(80 * GIB, "parallel=auto", "batch.tokens=2048")
    assert (strategy, gpus) == ("ddp", "0") and lines[0].startswith("parallel auto: one card: "), lines
    strategy, gpus, lines = planned(80 * GIB, "parallel=auto", "batch.tokens=2048", gpus="0,1")
    assert gpus == "0,1" and "one card" not in lines[0]


# In place of ssh: starts the agent here, as on a host whose machine was recorded in HOST.json.
SSH = """#!/bin/sh
while [ "$1" != "--" ]; do shift; done
[ -e "{folder}/$2.json" ] || {{ echo "ssh: connect to host $2 port 22: No route to host" >&2; exit 255; }}
export STOKER_MACHINE="{folder}/$2.json" HOME="{folder}"
exec sh -c "$3"
"""


@at_length
def test_train_takes_the_strategy_of_several_hosts_from_what_they_say(
    tmp_path: Path, small: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stoker.cli.train_fit import machines_to_plan, refuse_too_large, with_memory_plan
    from stoker.control.machine.model import machine_from_json
    from stoker.control.plan.options import RunOptions
    from stoker.training.config.flags import parse
    from stoker.training.config.layers import gather
    from stoker.training.config.resolve import settle

    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ssh").write_text(SSH.format(folder=tmp_path))
    (tmp_path / "bin" / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")

    here = machine_from_json(machine_json(0))

    def planned(
        totals: dict[str, int], *flags: str, hosts: str = "a,b", host: dict[str, int] | None = None, **options: Any
    ) -> tuple[Any, list[str]]:
        for path in tmp_path.glob("[ab].json"):
            path.unlink()
        for name, total in totals.items():
            machine = machine_json([gpu_json(at, memory_total=total, memory_used=0) for at in range(2)])
            machine["memory_available"] = (host or {}).get(name, machine["memory_available"])
            (tmp_path / f"{name}.json").write_text(json.dumps(machine))
        given = (f"model.load={small}", "data.kind=chat", "data.context_length=512", "batch.tokens=8192", *flags)
        resolved = settle(gather(parse([f"--{flag}" for flag in given]), {}), True)
        lines, asked = list[str](), RunOptions(runs_dir=str(tmp_path), hosts=hosts, python=sys.executable, **options)
        machines = machines_to_plan(resolved.config, asked, here, lines.append)
        refuse_too_large("sft", resolved, asked, machines)
        found, run, _ = with_memory_plan("sft", resolved, asked, machines, None, lines.append)
        assert run.gpus is None
        return found.config.parallel, lines

    both = {"a": 2150 * MIB, "b": 2150 * MIB}
    chosen, lines = planned(both, "parallel=auto", "optim.kind=adamw")
    assert chosen.strategy == "fsdp" and lines[0].startswith("parallel auto: fsdp: ddp ") and "does not fit" in lines[0]
    assert "one card" not in lines[0], "hosts were named: all of them take part"
    large = dict.fromkeys(both, 80 * GIB)
    chosen, lines = planned(large, "parallel=fsdp")
    assert (chosen.sharding, chosen.offload) == ("host", "off") and "sharding host" in lines[-1], lines
    assert planned(large, "parallel=fsdp", "sharding=all")[0].sharding == "all"
    assert planned(large, "parallel=auto", "lora")[0].strategy == "ddp"
    assert planned({}, "optim.kind=adamw")[0].strategy == "ddp", "nobody asked the hosts"
    with pytest.raises(Refusal, match="host b: no route to it"):
        planned({"a": 80 * GIB}, "parallel=auto")
    chosen, lines = planned({"a": 80 * GIB}, "parallel=auto", min_hosts=1)
    assert lines[0].startswith("memory plan: skipping host b: no route") and lines[1].startswith("parallel auto: ")
    # The second host's memory and card, not the first's.
    with pytest.raises(Refusal, match=r"offload all needs .* of host memory on b, and [\d.]+ MiB are available"):
        planned(both, "parallel=fsdp", "offload=all", host={"b": 64 << 20})
    with pytest.raises(Refusal, match=r"a gathered block .* b's GPU 0 has 1\.4 GiB free, however many ranks"):
        planned({"a": 80 * GIB, "b": 1400 * MIB}, "parallel=fsdp", f"model.load={folder}")


def test_train_plans_pairs_and_prompts_too(tmp_path: Path, small: Path) -> None:
    from stoker.cli.train_fit import refuse_too_large, with_memory_plan
    from stoker.control.machine.model import machine_from_json
    from stoker.control.plan.options import RunOptions
    from stoker.training.config.flags import parse
    from stoker.training.config.layers import gather
    from stoker.training.config.resolve import settle

    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "one and one? " * 8, "answer": "2"}) + "\n")

    def planned(stage: str, total: int, *flags: str) -> tuple[Any, str]:
        machine = machine_from_json(machine_json([gpu_json(0, memory_total=total, memory_used=0)]))
        lines: list[str] = []
        resolved = settle(gather(parse([f"--{flag}" for flag in (f"model.load={small}", *flags)]), {}), True)
        options = RunOptions(runs_dir=str(tmp_path))
        refuse_too_large(stage, resolved, options, {"": machine})
        found, *_ = with_memory_plan(stage, resolved, options, {"": machine}, None, lines.append)
        return found.config, lines[0]

    for stage in ("reward", "dpo"):
        config, line = planned(stage, 80 * GIB)
        assert config.compute.recompute == "auto" and "nothing to change" in line
        config, line = planned(stage, 2700 * MIB, "data.context_length=8192")
        assert config.compute.recompute not in ("auto", "off") and "recompute" in line, line
    with pytest.raises(Refusal, match=r"this does not fit: .*smallest change: --lora .*--stage dpo` shows more"):
        planned("dpo", 1100 * MIB)
    asked = (f"grpo.prompts={prompts}", "data.context_length=4096", "generate.new_tokens=2048")
    config, line = planned("grpo", 80 * GIB, *asked)
    assert config.batch.micro == 0 and "micro-batch 16" in line and "nothing to change" in line
    config, line = planned("grpo", 3600 * MIB, *asked, "lora", "generate.rows=4")
    assert config.compute.recompute not in ("auto", "off") or 0 < config.batch.micro < 16, line
    # The prompts are short: a cache for the whole context would not fit, and none is made.
    config, line = planned("grpo", 3000 * MIB, f"grpo.prompts={prompts}", "data.context_length=65536", "lora")
    assert "may not fit" not in line, line
    short = (f"grpo.prompts={prompts}", "data.context_length=1024", "qlora", "generate.rows=64")
    for total, bits in ((8192, "auto"), (1425, "4")):
        config, line = planned("grpo", total * MIB, *short)
        assert config.generate.bits == bits and ("bits 4" in line) == (bits == "4"), line
    config, line = planned("grpo", 1425 * MIB, *short, "generate.bits=16")
    assert config.generate.bits == "16" and "may not fit" in line, line
    with pytest.raises(Refusal, match=r"this does not fit: .*smallest change: --rows \d+"):
        planned("grpo", 2400 * MIB, *asked, "lora", "generate.rows=64")


@at_length
def test_a_resume_keeps_the_optimizer_that_a_plan_chose_whatever_the_card_is_now(
    tmp_path: Path, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stoker.cli import run, train
    from stoker.control.machine.model import machine_from_json
    from stoker.control.plan.request import Request
    from stoker.control.plan.run_dir import config_hash, open_run_dir
    from stoker.training.checkpoint.manifest import Manifest, encode

    monkeypatch.chdir(tmp_path)
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    (tmp_path / "chats.jsonl").write_text((json.dumps(row) + "\n") * 20)
    started: list[Request] = []
    monkeypatch.setattr(run, "start", lambda request, ended: started.append(request) or 0)

    def request(total: int, *more: str) -> Request:
        machine = machine_from_json(machine_json([gpu_json(0, memory_total=total, memory_used=0)]))
        monkeypatch.setattr(train, "observe_machine", lambda: machine)
        words = ["sft", "--model.load", str(small), "--data", "chats.jsonl", "--data.validation", "0", "--name", "kept"]
        assert train.main([*words, "--max-steps", "3", "--context-length", "256", *more]) == 0
        return started[-1]

    def kind(request: Request) -> str:
        words = request.args
        return words[words.index("--optim.kind") + 1] if "--optim.kind" in words else "adamw"

    large, full = request(80 * GIB), request(1700 * MIB)
    assert (kind(large), kind(full)) == ("adamw", "adamw8bit")
    assert config_hash(large) == config_hash(full), "what a plan chose for a card makes no other run"
    assert config_hash(request(80 * GIB, "--optimizer", "muon")) != config_hash(large)

    unfinished = tmp_path / "runs" / "20990101-000000-kept"
    (unfinished / "checkpoints" / "step-00000002").mkdir(parents=True)
    told = {
        "schema": 1,
        "id": unfinished.name,
        "name": "kept",
        "config_hash": config_hash(full),
        "launcher": {"pid": 0},
    }
    (unfinished / "run.json").write_text(json.dumps(told))
    (unfinished / "checkpoints" / "step-00000002" / "manifest.json").write_bytes(
        encode(Manifest(2, 1, "token", {}, {}, {"optimizer": "adamw8bit"}))
    )
    again = request(80 * GIB)
    assert kind(again) == "adamw8bit" and open_run_dir(again, {}).dir == str(unfinished)
    assert kind(request(80 * GIB, "--optimizer", "adamw")) == "adamw", "who sets it means it"
    elsewhere = request(80 * GIB, "--checkpoint.resume", str(unfinished), "--name", "other")
    assert kind(elsewhere) == "adamw8bit"


def test_a_run_compares_what_it_used_with_the_plan_made_before_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from types import SimpleNamespace

    from stoker.training.config.keys import DEFAULTS
    from stoker.training.config.keys import config_of as configured
    from stoker.training.fit.launch_plan import LaunchPlan
    from stoker.training.recipes.memory import Holding, MemoryRecord, MemoryUse, usage_line

    before = LaunchPlan.of(make(cards("24GB"), Wish(EIGHT, 2048, "qlora", samples=2)))
    for name, value in before.to_environment().items():
        monkeypatch.setenv(name, value)
    lines: list[str] = []
    group = SimpleNamespace(device=torch.device("cpu"), all=lambda value: [value], first=True, strategy="ddp", shards=1)
    voice = SimpleNamespace(say_once=lines.append, say=lines.append)
    held = Holding(group, None, None, before.micro + 1)  # type: ignore[arg-type]
    later = predict(
        describe(EIGHT, QLORA), Job(before.micro + 1, 2048)
    )  # as a rank would plan with its own micro-batch
    assert later.total != before.planned.total
    record = MemoryRecord(configured("", DEFAULTS), "sft", held, (later, ""), str(tmp_path), voice)  # type: ignore[arg-type]
    record.begin()
    assert record.planned_bytes == before.planned.total
    assert json.loads((tmp_path / "memory.json").read_text())["planned_bytes"] == before.planned.total

    # More than planned is reported as that, also where CUDA graphs took it: 1.9 % more, reserved and device total apart.
    planned = before.planned.total
    use = MemoryUse(int(1.019 * planned), int(0.019 * planned), 2 * planned, 2 * planned + GIB)
    line = usage_line(before, before.micro, use)
    assert "1.9% above the plan" in line and f"{format_bytes(int(0.019 * planned))} of it by CUDA graphs" in line
    for size in (planned, 1.019 * planned, 2 * planned, 2 * planned + GIB):
        assert f"{size / GIB:.1f} GiB" in line, line
    assert "below the plan" in usage_line(before, before.micro, replace(use, allocated=planned // 2, graphs=0))
    hidden = usage_line(before, before.micro + 1, replace(use, device=None))
    assert "unknown" in hidden and f"for micro-batch {before.micro}, and it was {before.micro + 1}" in hidden


def test_the_verdict_names_the_term_that_was_underestimated() -> None:
    said = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 24.00 GiB of which 0.50 GiB is free."
    said += " Of the allocated memory 22.00 GiB is allocated by PyTorch, and 0.10 GiB is reserved by PyTorch but unallocated."
    error = RankError("OutOfMemoryError", said, "train.py", 7, "main", "", int(5e9), module="torch")
    line = "INFO | [GPU 0] ran out of GPU memory at 22.0 GiB in tensors, 20.0 GiB were planned; underestimated: activations"
    line += " and working memory, by 2.0 GiB so far"
    found = judge(Evidence(2, (RankExit(0, "", "GPU0", 100, 1, 5.0, error=error, tail=line),)))
    assert found.cause == "oom.gpu" and "the memory plan underestimated activations and working memory" in found.summary
    assert any("20.0 GiB were planned" in evidence for evidence in found.evidence)


def test_a_target_that_matches_nothing_is_refused_by_the_plan() -> None:
    with pytest.raises(Refusal, match="did you mean"):
        describe(LLAMA, replace(LORA, lora_targets="q_prj"))


ASKS = {
    "width": "model: {layers: 2, dim: 4194304, heads: 32768}",
    "layers": "model: {layers: 10000, dim: 65536, heads: 512}",
    "ranks": "model: {layers: 1, dim: 64, heads: 1}\nbatch: {tokens: 80000000}\nrun: {nproc_per_node: 1000000}",
}


@pytest.mark.parametrize("asks", ASKS.values(), ids=ASKS)
def test_a_config_file_cant_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asks: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("some text to learn " * 400)
    bytes_tokenizer().save(str(tmp_path / "tokenizer"))
    given = "data: {path: [text.txt], context_length: 64}\ntokenizer: {path: tokenizer}\ntrain: {max_steps: 1}\nparallel: {device: cpu}"
    (tmp_path / "c.yaml").write_text(f"{given}\n{asks}\n")
    started: list[Any] = []
    monkeypatch.setattr(run, "start", lambda *told: started.append(told) or 0)
    with pytest.raises(Refusal, match=r"this does not fit: .* on the CPU with .* and this machine has"):
        train.main(["pretrain", "--config", "c.yaml"])
    assert not started


@pytest.mark.parametrize(
    ("flag", "width"), [((), 16), (("--lora",), 2), (("--qlora",), 0.5)], ids=["all", "lora", "qlora"]
)
def test_no_rank_is_started_for_weights_that_the_memory_cant_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flag: tuple[str, ...], width: float
) -> None:
    write_model(tmp_path / "m")
    data = tmp_path / "chats.jsonl"
    turns = [{"role": "user", "content": "cow?"}, {"role": "assistant", "content": "moo"}]
    data.write_text(json.dumps({"messages": turns}) + "\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    started: list[Any] = []
    monkeypatch.setattr("stoker.cli.run.start", lambda *request: started.append(request) or 0)
    words = ["sft", "--device", "cpu", "--model.load", "m", "--data", "chats.jsonl", "--validation", "0", *flag]
    here, least = train.observe_machine(), (100 << 20) + int(width * parameters(SHAPE))
    monkeypatch.setattr(train, "observe_machine", lambda: replace(here, memory_total=least))
    assert train.main(words) == 0 and len(started) == 1
    monkeypatch.setattr(train, "observe_machine", lambda: replace(here, memory_total=least - 1))
    with pytest.raises(Refusal, match="this does not fit: 1 rank on the CPU with"):
        train.main(words)
    assert len(started) == 1


BOB = 12346


def _measured(runs: Path, name: str, rate: float) -> Path:
    (runs / name).mkdir(parents=True)
    told = {"model": "m", "method": "full", "context": 128, "cards": ["H100"], "tokens_per_s": rate}
    (runs / name / "memory.json").write_text(json.dumps(told))
    return runs / name


@pytest.mark.skipif(os.getuid() != 0, reason="two real users need root to become them")
def test_only_ones_own_runs_steer_a_plan(tmp_path: Path) -> None:
    needs_root()
    for number in range(MAX_RUNS + 5):  # so many that one's own would not be looked at
        name = f"2099-{number:03}"
        os.chown(_measured(tmp_path, name, 1e-320), BOB, BOB)
    _measured(tmp_path, "2020-own", 4321.0)
    assert [name for name, _ in recorded(str(tmp_path))] == ["2020-own"]
