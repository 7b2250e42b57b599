"""Adapters: what they compute, who learns, and folders that peft and we both read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed: what weights are compared with")

import torch
import transformers
from torch import Tensor

from stoker.contract.errors import Refusal
from stoker.training.model import adapters, hf, nf4, ready
from stoker.training.model.config import AdapterConfig
from stoker.training.model.decoder import Decoder
from stoker.training.model.hf_config import shape_of
from stoker.training.model.targets import adapter_parameters, targets
from stoker.training.optim.config import OptimConfig
from stoker.training.optim.optimizer import Optimizer, gradient_norm
from stoker.training.parallel.config import ComputeConfig
from stoker.training.serve.batch import BatchEngine
from test_fused_options import kernels  # noqa: F401  a fixture

SIZE: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.3,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "phi3": ("Phi3", {"pad_token_id": 0}),
    "gpt2": ("GPT2", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}),
}
TOKENS = torch.randint(0, 96, (2, 24), generator=torch.Generator().manual_seed(1))
LORA = AdapterConfig(method="lora", lora_rank=4, lora_alpha=8.0)


def saved(kind: str, folder: Path) -> Any:
    """A model of transformers; its folder is `folder`."""
    name, keys = MODELS[kind]
    size = {"vocab_size": 96, "initializer_range": 0.3} if name == "GPT2" else SIZE
    torch.manual_seed(3)
    head = "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM"
    model = getattr(transformers, head)(getattr(transformers, f"{name}Config")(**{**size, **keys}))
    model.eval().save_pretrained(folder)
    return model


def opened(folder: Path, told: AdapterConfig = LORA, compute: ComputeConfig | None = None) -> Decoder:
    with torch.device("meta"):
        model = Decoder(shape_of(str(folder)), 64)
    adapters.freeze(model, told)
    ready.make_ready(model, compute or ComputeConfig(), torch.device("cpu"), lambda line: None)
    model.place(torch.device("cpu"))
    hf.load(model, str(folder), lambda line: None)
    adapters.attach(model, told, 0)
    return model


def stir(model: Decoder) -> None:
    """B is zero at the start: then nothing shows."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in adapters.learned(model).items():
            if name.endswith(".adapter.up"):
                parameter.normal_(0, 0.1, generator=generator)


@pytest.mark.parametrize("kind", MODELS)
def test_an_adapter_begins_as_nothing_and_is_the_only_thing_that_learns(kind: str, tmp_path: Path) -> None:
    theirs = saved(kind, tmp_path)
    model = opened(tmp_path)
    torch.testing.assert_close(model(TOKENS), theirs(TOKENS).logits, rtol=1e-4, atol=1e-4)
    named = adapters.learned(model)
    assert named and all(".adapter." in name for name in named)
    assert sum(parameter.numel() for parameter in named.values()) == adapter_parameters(model.config, LORA)
    stir(model)
    model(TOKENS, TOKENS).backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad, name


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("rslora", [False, True])
def test_peft_computes_the_same_from_our_folder_and_we_from_its(kind: str, rslora: bool, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="no peft here to compare with")
    base, ours, back = (tmp_path / name for name in ("base", "ours", "back"))
    theirs = saved(kind, base)
    told = AdapterConfig(method="lora", lora_rank=4, lora_alpha=8.0, rslora=rslora)
    model = opened(base, told)
    stir(model)
    adapters.save(model, told, str(base), str(ours), None, lambda line: None)
    wrapped = peft.PeftModel.from_pretrained(theirs, ours, is_trainable=True)
    found = wrapped(input_ids=TOKENS, labels=TOKENS)
    torch.testing.assert_close(model(TOKENS), found.logits, rtol=1e-4, atol=1e-4)
    found.loss.backward()
    goals = torch.cat([TOKENS[:, 1:], torch.full((2, 1), -100)], dim=1)
    model(TOKENS, goals, torch.tensor(1 / 46)).backward()
    theirs_by_name = {
        name.replace(".default", ""): one.grad for name, one in wrapped.named_parameters() if one.grad is not None
    }
    for target in targets(model.config, told):
        adapter = model.get_submodule(target.name).adapter
        assert isinstance(adapter, adapters.Adapter) and adapter.a.grad is not None and adapter.up.grad is not None
        of_b = torch.split(adapter.up.grad, [end - begin for begin, end in adapter.parts])
        for place, name in enumerate(target.names):
            rows = slice(place * 4, place * 4 + 4)
            full = f"base_model.model.{name}"
            torch.testing.assert_close(
                adapter.a.grad[rows], theirs_by_name[f"{full}.lora_A.weight"], rtol=1e-3, atol=1e-5
            )
            torch.testing.assert_close(of_b[place], theirs_by_name[f"{full}.lora_B.weight"], rtol=1e-3, atol=1e-5)
    wrapped.save_pretrained(back)
    again, named = adapters.settings_of(str(back), "lora")
    assert named == str(base) and (again.lora_rank, again.scale) == (4, told.scale)
    other = opened(base, again)
    adapters.load(other, again, str(back), lambda line: None)
    torch.testing.assert_close(other(TOKENS), model(TOKENS), rtol=1e-5, atol=1e-5)
    adapters.merge(other)
    assert not any(".adapter." in name for name, _ in other.named_parameters())
    torch.testing.assert_close(other(TOKENS), model(TOKENS), rtol=1e-3, atol=1e-3)


def test_what_else_learns_travels_with_the_adapter(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="no peft here to compare with")
    base, ours = tmp_path / "base", tmp_path / "ours"
    theirs = saved("llama", base)
    told = AdapterConfig(method="lora", lora_rank=2, lora_targets="q_proj,v_proj", also_train="lm_head,embed_tokens")
    model = opened(base, told)
    stir(model)
    assert {name for name in adapters.learned(model) if "adapter" not in name} == {"head.weight", "embed.weight"}
    with torch.no_grad():
        model.get_parameter("head.weight").mul_(1.5)
        model.get_parameter("embed.weight").mul_(0.5)
    adapters.save(model, told, str(base), str(ours), None, lambda line: None)
    wrapped = peft.PeftModel.from_pretrained(theirs, ours)
    torch.testing.assert_close(model(TOKENS), wrapped(TOKENS).logits, rtol=1e-4, atol=1e-4)
    again, _ = adapters.settings_of(str(ours), "lora")
    other = opened(base, again)
    adapters.load(other, again, str(ours), lambda line: None)
    torch.testing.assert_close(other(TOKENS), model(TOKENS), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "phi3", "gpt2"])
def test_qlora_computes_with_the_weights_that_nf4_keeps(kind: str, tmp_path: Path) -> None:
    theirs = saved(kind, tmp_path)
    told = AdapterConfig(method="qlora", lora_rank=4, lora_alpha=8.0)
    model = opened(tmp_path, told)
    assert adapters.held(model)["codes"] > 0
    skipped = {name for name, layer in model.named_modules() if getattr(layer, "quantized", ())}
    assert len(skipped) == 2 * 4, "every linear layer of the two blocks"
    with torch.no_grad():  # the same in transformers, which knows nothing of codes
        for name, parameter in theirs.named_parameters():
            if parameter.dim() == 2 and ("layers." in name or ".h." in name):
                turned = parameter.t().contiguous() if kind == "gpt2" else parameter
                near = nf4.dequantize(nf4.quantize(turned))
                parameter.copy_(near.t() if kind == "gpt2" else near)
    torch.testing.assert_close(model(TOKENS), theirs(TOKENS).logits, rtol=1e-4, atol=1e-4)
    stir(model)
    model(TOKENS, TOKENS).backward()
    assert all(parameter.grad is not None for parameter in adapters.learned(model).values())


@pytest.mark.parametrize("method", ["lora", "qlora"])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen2"])
def test_fused_blocks_compute_what_plain_ones_do(
    method: str,
    kind: str,
    tmp_path: Path,
    kernels: None,  # noqa: F811
) -> None:
    saved(kind, tmp_path)
    model = opened(tmp_path, AdapterConfig(method=method, lora_rank=4, lora_targets="q_proj,v_proj,up_proj,down_proj"))
    stir(model)
    found: list[tuple[Tensor, dict[str, Tensor]]] = []
    for fused in (False, True):
        model.fuse(fused)
        model.zero_grad()
        loss = model(TOKENS, TOKENS)
        loss.backward()
        found.append(
            (loss.detach(), {name: p.grad.clone() for name, p in adapters.learned(model).items() if p.grad is not None})
        )
    (plain, plain_gradients), (fast, fast_gradients) = found
    torch.testing.assert_close(fast, plain, rtol=1e-5, atol=1e-4)
    assert plain_gradients.keys() == fast_gradients.keys() and len(plain_gradients) == len(adapters.learned(model))
    for name, gradient in plain_gradients.items():
        torch.testing.assert_close(fast_gradients[name], gradient, rtol=1e-3, atol=1e-4, msg=name)


def test_some_blocks_computed_again_learn_the_same(tmp_path: Path, kernels: None) -> None:  # noqa: F811
    saved("llama", tmp_path)
    for fused in (False, True):
        found = [_once(tmp_path, recompute, fused) for recompute in ("off", "1", "full")]
        some, one, every = (size for size, _ in found)
        assert some > one > every, "each block that is computed again keeps less"
        for _, other in found[1:]:
            assert other.keys() == found[0][1].keys()
            for name, tensor in found[0][1].items():
                torch.testing.assert_close(other[name], tensor, rtol=1e-5, atol=1e-6, msg=name)


def _once(folder: Path, recompute: str, fused: bool) -> tuple[int, dict[str, Tensor]]:
    """(bytes kept for the backward pass, loss and gradients)."""
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.data_ptr()] = tensor.nbytes
        return tensor

    model = opened(folder, AdapterConfig(method="qlora", lora_rank=4), ComputeConfig(recompute=recompute))
    stir(model)
    model.fuse(fused)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(TOKENS, TOKENS)
    loss.backward()
    gradients = {name: p.grad for name, p in adapters.learned(model).items() if p.grad is not None}
    return sum(kept.values()), {"loss": loss.detach(), **gradients}


@pytest.mark.parametrize("kind", ["adamw", "adamw8bit"])
def test_a_step_of_the_optimizer_moves_what_is_computed(kind: str, tmp_path: Path) -> None:
    saved("llama", tmp_path)
    model = opened(tmp_path, AdapterConfig(method="qlora", lora_rank=4))
    optimizer = Optimizer(model, OptimConfig(kind=kind, learning_rate=1e-2))
    losses = []
    for _ in range(6):
        loss = model(TOKENS, TOKENS, torch.tensor(1 / TOKENS.numel()))
        loss.backward()
        optimizer.step(1.0, gradient_norm(optimizer.parameters), torch.zeros(()))
        optimizer.zero()
        losses.append(float(loss.detach()))
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0] - 0.1, losses


def test_an_embedding_on_the_host_gives_the_same_rows(tmp_path: Path) -> None:
    saved("llama", tmp_path)
    told = AdapterConfig(method="qlora", lora_rank=4)
    model, other = opened(tmp_path, told), opened(tmp_path, told)
    other.embed_on_host = True
    for tokens in (TOKENS, TOKENS[:1], TOKENS.flip(0)):
        assert torch.equal(model(tokens), other(tokens))


def test_dropout_reaches_the_adapter_alone(tmp_path: Path) -> None:
    saved("llama", tmp_path)
    model = opened(tmp_path, AdapterConfig(method="lora", lora_rank=4, lora_dropout=0.5))
    untouched = model.eval()(TOKENS)
    torch.testing.assert_close(model.train()(TOKENS), untouched, rtol=1e-5, atol=1e-5, msg="B is zero")
    stir(model)
    torch.manual_seed(0)
    assert not torch.allclose(model(TOKENS), model(TOKENS)), "another mask each time"
    assert torch.equal(model.eval()(TOKENS), model(TOKENS))


@pytest.mark.parametrize(
    ("told", "words"),
    [
        (AdapterConfig(method="lora", lora_targets="q_pro"), "q_proj"),
        (AdapterConfig(method="lora", lora_targets="wq,wk"), "no linear layer of this model is called that"),
        (AdapterConfig(method="lora", lora_targets=" , "), "adapter.lora_targets is empty"),
        (AdapterConfig(method="lora", also_train="lm_heat"), "lm_head"),
    ],
)
def test_names_that_match_nothing_are_refused_with_near_ones(told: AdapterConfig, words: str, tmp_path: Path) -> None:
    saved("llama", tmp_path)
    with pytest.raises(Refusal) as caught:
        opened(tmp_path, told)
    assert words in caught.value.line and "\n" not in caught.value.line


def test_a_folder_that_is_no_adapter_for_this_model_is_refused(tmp_path: Path) -> None:
    base, ours = tmp_path / "base", tmp_path / "ours"
    saved("llama", base)
    adapters.save(opened(base), LORA, str(base), str(ours), None, lambda line: None)
    other = tmp_path / "other"
    saved("gpt2", other)
    model = opened(other)
    with pytest.raises(Refusal, match=r"missing from its weights|no place for"):
        adapters.load(model, LORA, str(ours), lambda line: None)
    settings = json.loads((ours / adapters.SETTINGS).read_text())
    for key, value in {"use_dora": True, "peft_type": "LOHA", "r": 0, "lora_alpha": "x", "target_modules": 3}.items():
        (ours / adapters.SETTINGS).write_text(json.dumps({**settings, key: value}))
        with pytest.raises(Refusal) as caught:
            adapters.settings_of(str(ours), "lora")
        assert str(ours) in caught.value.line and "\n" not in caught.value.line
    (ours / adapters.SETTINGS).write_text("{")
    with pytest.raises(Refusal, match="is not JSON"):
        adapters.settings_of(str(ours), "lora")
    (ours / adapters.WEIGHTS).unlink()
    with pytest.raises(Refusal, match=r"it has no adapter_model\.safetensors"):
        adapters.load(model, LORA, str(ours), lambda line: None)


def test_a_bases_digest_tells_one_model_from_another_of_the_same_shape(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    theirs = saved("llama", one)
    assert adapters.base_digest(str(one)) == adapters.base_digest(str(one))
    with torch.no_grad():
        theirs.model.layers[0].mlp.up_proj.weight[0, 0] += 1
    theirs.save_pretrained(other)
    assert adapters.base_digest(str(one)) != adapters.base_digest(str(other))


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_a_folder_opened_in_4_bits_answers_by_its_codes_and_the_adapter_beside_them(kind: str, tmp_path: Path) -> None:
    base, own = tmp_path / "base", tmp_path / "own"
    saved(kind, base)
    told = AdapterConfig(method="qlora", lora_rank=4, lora_alpha=8.0)
    trained = opened(base, told)
    stir(trained)
    adapters.save(trained, told, str(base), str(own), None, lambda line: None)
    model = hf.opened_in_4_bits(str(own), 64, torch.float32, torch.device("cpu"), lambda line: None)
    assert all(layer.quantized and layer.adapter is not None for _, layer in adapters._layers(model))
    prompts = [TOKENS[0, :7].tolist(), TOKENS[1, :12].tolist()]
    ways = [
        BatchEngine(one, rows=2, length=40, codes=codes)
        for one, codes in ((trained, False), (trained, True), (model, True))
    ]
    answers = [way.generate(prompts, new_tokens=16, stop=(), temperature=0) for way in ways]
    assert answers[0] == answers[1] == answers[2]
    assert ways[0].merged_bytes and not ways[1].merged_bytes
    with torch.no_grad():
        for name, parameter in adapters.learned(trained).items():
            if name.endswith(".adapter.up"):
                parameter.neg_()
    for way in ways[:2]:
        way.refresh()
    moved = [way.generate(prompts, new_tokens=16, stop=(), temperature=0) for way in ways[:2]]
    assert moved[0] == moved[1] != answers[0]
