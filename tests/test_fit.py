"""`stoker fit`: the memory plan against what the real modules allocate, settings that fit, and the command."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conftest import Stoker, gpu_json, machine_json
from stoker.contract.names import Refusal
from stoker.contract.shape import replace
from stoker.contract.shapes import Evidence, RankEnd, RankError
from stoker.control.verdict.judge import judge
from stoker.training.fit import block, terms
from stoker.training.fit.cards import Card, written
from stoker.training.fit.described import describe
from stoker.training.fit.footprint import Footprint
from stoker.training.fit.plan import METHODS, Plan, Search, Wish, make
from stoker.training.fit.terms import Job, predict
from stoker.training.fit.text import lines
from stoker.training.model.config import AdapterConfig, ModelConfig, parameters
from stoker.training.model.hf_config import config_of

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


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("adapter", [OFF, LORA, QLORA], ids=lambda one: one.method)
def test_the_plan_is_what_the_modules_allocate(
    kind: str, adapter: AdapterConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real decoder and its autograd functions run without a GPU (tests/memory_trace.py): each tensor is counted."""
    pytest.importorskip("torch", reason="torch is not installed")
    from memory_trace import traced
    from stoker.training.model import nf4
    from stoker.training.optim.config import OptimConfig

    if not hasattr(nf4, "expand"):
        pytest.skip("the modules here still keep other tensors: adapters of one product, blocks that keep one tensor")
    monkeypatch.setattr(terms, "HANDLES", 0)  # cuBLAS's workspace is none of torch's tensors
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


def test_constants_of_the_kernels_are_those_of_the_plan() -> None:
    """Triton can't be imported without a GPU: their texts are compared."""
    text = (Path(block.__file__).parents[1] / "model" / "fused_kernel.py").read_text()
    assert f"PROGRAMS = {block.PROGRAMS}\n" in text
    pytest.importorskip("torch", reason="torch is not installed")
    from stoker.training.model import loss
    from stoker.training.optim import optimizer

    assert loss.CHUNK_BYTES == terms.CHUNK_BYTES
    assert all(loss.chunk_rows(n, v, 2) == terms.chunk_rows(n, v) for n in (100, 5000, 10**6) for v in (999, 262144))
    assert optimizer.BLOCK == 256


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
    return list(lines(plan, "model", "chats.jsonl"))


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


def test_exit_code_1_and_the_smallest_change_where_it_does_not_fit(stoker: Stoker, folder: Path) -> None:
    done = stoker("fit", str(folder), "--gpus", "24GB", "--method", "full")
    assert done.code == 1 and "smallest change: --method lora" in done.out


def test_a_machine_that_was_recorded_shows_who_holds_its_cards(stoker: Stoker, folder: Path) -> None:
    machine = Path(__file__).parent / "machines" / "container-foreign-holders.json"
    done = stoker("fit", str(folder), "--machine", str(machine))
    assert done.code == 0 and "left out: GPU 0" in done.err
    assert "held: 8.5 GB by pid 412 (root: python -m sglang.launch_server" in done.out
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
    run.mkdir(parents=True)
    told = {"model": str(folder), "method": "lora", "context": 2048, "cards": ["H100"], "tokens_per_s": 4321.0}
    (run / "memory.json").write_text(json.dumps(told))
    done = stoker(*words)
    assert "4,321 tokens/s (measured by run 20990101-000000-sft)" in done.out, done.out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--gpus", "2xQuantum9000"), "no GPU that is known"), (("--gpus", "0GB"), "too small"), (("--gpus", "0,1"), "no GPU '0' here"),
        (("--gpus", "24GB", "--machine", "x.json"), "give one of them"), (("--machine", "x.json"), "no such file"), ((), "no GPU here"),
        (("--gpus", "8GB", "--lora-rank", "0"), "--lora-rank 0 is out of range"), (("--gpus", "8GB", "--context", "1"), "out of range"),
        (("--gpus", "8GB", "--recompute", "some"), "give a number of blocks"), (("--gpus", "8GB", "--price", "-1"), "--price -1"),
        (("--gpus", "8GB", "--method", "lora", "--lora-targets", "q_prj"), "no linear layer of this model is called that; did you mean"),
        (("--gpus", "8GB", "--method", "lora", "--optimizer", "muon"), "--optimizer muon is for --method full"),
        (("--gpus", "8GB", "--probe"), "it needs --data"), (("--gpus", "8GB", "--data", "nowhere.jsonl"), "nowhere.jsonl"),
        (("--method", "dora"), "invalid choice"), (("--gpu", "8GB"), "unrecognized arguments"),
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
    assert done.code == 69 and "this can't fit: GPU 0 has 1.0 GiB free, and full" in done.err, done.err
    assert "smallest change: --lora" in done.err and not (tmp_path / "runs").exists()


def test_train_takes_from_the_plan_what_nobody_set(tmp_path: Path, small: Path) -> None:
    from stoker.cli.train_fit import with_memory_plan
    from stoker.control.launch.options import RunOptions
    from stoker.control.machine.model import machine_from_json
    from stoker.training.config.flags import parse
    from stoker.training.config.layers import gather
    from stoker.training.config.resolve import settle

    def planned(total: int, *flags: str) -> tuple[Any, list[str]]:
        machine = machine_from_json(machine_json([gpu_json(0, memory_total=total, memory_used=0)]))
        lines: list[str] = []
        resolved = settle(gather(parse([f"--{flag}" for flag in flags]), {}), True)
        found = with_memory_plan("sft", resolved, RunOptions(runs_dir=str(tmp_path)), machine, None, lines.append)
        return found.config, lines

    load = f"model.load={small}"
    config, lines = planned(80 * GIB, load, "data.kind=chat")
    assert config.compute.recompute == "auto" and "nothing to change" in lines[0]
    config, lines = planned(2600 * MIB, load, "data.kind=chat", "data.context_length=8192")
    assert config.compute.recompute not in ("auto", "off") and "recompute" in lines[0], lines
    config, lines = planned(2600 * MIB, load, "data.kind=chat", "data.context_length=8192", "compute.recompute=off")
    assert config.compute.recompute == "off"


def test_the_verdict_names_the_term_that_was_underestimated() -> None:
    said = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 24.00 GiB of which 0.50 GiB is free."
    said += " Of the allocated memory 22.00 GiB is allocated by PyTorch, and 0.10 GiB is reserved by PyTorch but unallocated."
    error = RankError("OutOfMemoryError", said, "train.py", 7, "main", "", int(5e9), module="torch")
    line = "INFO | [GPU 0] ran out of GPU memory at 22.0 GiB in tensors, 20.0 GiB were planned; underestimated: activations"
    line += " and working memory, by 2.0 GiB so far"
    found = judge(Evidence(2, (RankEnd(0, "", "GPU0", 100, 1, 5.0, error=error, tail=line),)))
    assert found.cause == "oom.gpu" and "the memory plan underestimated activations and working memory" in found.summary
    assert any("20.0 GiB were planned" in evidence for evidence in found.evidence)


def test_a_target_that_matches_nothing_is_refused_by_the_plan() -> None:
    with pytest.raises(Refusal, match="did you mean"):
        describe(LLAMA, replace(LORA, lora_targets="q_prj"))
