"""Every tensor of a model is on the device that computes.

No GPU is needed: the meta device stands for it. Under FakeTensorMode an operation on tensors of two devices raises
an error, as on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed")

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from devices import needs_gpu
from stoker.contract.frozen import replace
from stoker.training.evaluate.likelihood import embed, log_likelihoods
from stoker.training.generate.cached import Weights
from stoker.training.model import adapters, hf
from stoker.training.model.attention import Documents, documents
from stoker.training.model.config import OFF, AdapterConfig
from stoker.training.model.decoder import Decoder
from stoker.training.model.linear import Linear
from stoker.training.model.reference import Beginning
from stoker.training.recipes.dpo import DpoModel, Reference, learner
from stoker.training.reward.config import DpoConfig
from stoker.training.reward.model import RewardModel, score_ids
from stoker.training.reward.model import learner as reward_learner
from stoker.training.reward.model import load as load_reward
from stoker.training.rl.update import Policy, arrange, logprobs
from stoker.training.rl.update import Row as Answer
from test_dpo import CONTEXT, SMALL

SHAPE = replace(SMALL, dim=64, heads=4, kv_heads=2, head_dim=16, ff=128, tied=False)
GPU = torch.device("meta")  # stands for one
MODE = FakeTensorMode(
    allow_non_fake_inputs=True
)  # one for all tests: constants that are cached per device belong to it
DPO = DpoConfig(beta=0.3)
KINDS: dict[str, type[Decoder]] = {
    "policy": Decoder,
    "reward model": RewardModel,
    "reward model without likelihood": reward_learner(False).kind,
    "dpo policy": learner(None, DPO).kind,
    "dpo reference": Reference,
}
METHODS = (OFF, "lora", "qlora")
DEVICE_MISMATCH = r"two (different )?devices"  # the type and the rest of the message differ between versions of torch


def build(kind: type[Decoder], method: str, built_on: str = "meta", mode: FakeTensorMode | None = None) -> Decoder:
    """Build the model as the recipes do: empty on a device, frozen for adapters, placed, then with adapters."""
    config = AdapterConfig(method=method, lora_rank=4)
    with torch.device(built_on):
        model = kind(SHAPE, CONTEXT)
    if method != OFF:
        adapters.freeze(model, config)
    with mode or nullcontext():
        model.place(GPU)
        for layer in model.modules():
            if isinstance(layer, Linear) and layer.weight is None:
                sizes = [(rows, layer.in_features) for rows in layer.parts]
                adapters.quantize(layer, [torch.zeros(size, device=GPU) for size in sizes])
        if method != OFF:
            adapters.attach(model, config, seed=0)
    return model


def tensors_of(model: Decoder) -> dict[str, Tensor]:
    """Return all tensors that the model computes with, also those that are neither parameter nor buffer."""
    tensors: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for number, pair in enumerate(model.tables):
        tensors |= {f"tables.{number}.{part}": tensor for part, tensor in zip(("cos", "sin"), pair, strict=True)}
    for name, layer in model.named_modules():
        for number, part in enumerate(getattr(layer, "quantized", ())):
            for key in ("codes", "scales", "second", "offset"):
                tensors[f"{name}.{number}.{key}"] = getattr(part, key)
    return tensors


@contextmanager
def reads_a_value() -> Iterator[None]:
    """Expect the block to get as far as a number that is copied from the device, which a tensor without data has not."""
    with pytest.raises(Exception) as raised:
        yield
    error = raised.value
    assert isinstance(error, DataDependentOutputException) or ".numpy()" in str(error), repr(error)


def packed_rows(rows: int = 2, length: int = 32) -> Documents:
    """Return rows of two documents each. Where they begin is computed on the host, where it is a number."""
    packed = documents(torch.arange(length).ge(length // 2).int().expand(rows, -1), torch.device("cpu"))
    assert packed is not None
    with MODE:
        return Documents(packed.segments.to(GPU), packed.offsets.to(GPU), packed.longest)


def token_ids(rows: int = 2, length: int = 32) -> Tensor:
    return torch.zeros(rows, length, dtype=torch.int64, device=GPU)


def test_the_simulated_device_refuses_a_tensor_of_another_one() -> None:
    with MODE, pytest.raises(Exception, match=DEVICE_MISMATCH):
        torch.ones(3) @ torch.ones(3, device=GPU)


@pytest.mark.parametrize("built_on", ["meta", "cpu"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", KINDS)
def test_placing_moves_every_tensor_of_a_model(kind: str, method: str, built_on: str) -> None:
    model = build(KINDS[kind], method, built_on)
    elsewhere = {name: str(tensor.device) for name, tensor in tensors_of(model).items() if tensor.device != GPU}
    assert not elsewhere and model.device == GPU


@pytest.mark.parametrize("kind", KINDS)
def test_placing_leaves_memory_that_can_be_filled(kind: str) -> None:
    with torch.device("meta"):
        model = KINDS[kind](SHAPE, CONTEXT)
    model.place(torch.device("cpu"))
    model.start(3)
    assert all(tensor.isfinite().all() for tensor in tensors_of(model).values())


@pytest.mark.parametrize("built_on", ["meta", "cpu"])
def test_an_embedding_in_host_memory_stays_there(built_on: str) -> None:
    with torch.device(built_on):
        model = RewardModel(SHAPE, CONTEXT)
    model.embed_on_host = True
    model.place(GPU)
    elsewhere = [name for name, tensor in tensors_of(model).items() if tensor.device != GPU]
    assert elsewhere == ["embed.weight"] and model.embed.weight.device.type == "cpu"


def test_weights_that_are_kept_in_host_memory_stay_there_and_tables_move() -> None:
    with torch.device("meta"):
        model = RewardModel(SHAPE, CONTEXT)
    model.place(GPU, torch.device("cpu"))
    assert {tensor.device.type for tensor in model.parameters()} == {"cpu"} and model.device == GPU


@pytest.mark.parametrize("method", METHODS)
def test_an_engine_computes_where_the_model_does_whose_weights_are_in_host_memory(method: str) -> None:
    """Its copies are on that device, and no weight in host memory is used by itself (parallel.offload)."""
    model, config = Decoder(SHAPE, CONTEXT), AdapterConfig(method=method, lora_rank=4)
    if method != OFF:
        adapters.freeze(model, config)
    for layer in model.modules():
        if isinstance(layer, Linear) and layer.weight is None:
            sizes = [(rows, layer.in_features) for rows in layer.parts]
            adapters.quantize(layer, [torch.zeros(size) for size in sizes])
    if method != OFF:
        adapters.attach(model, config, seed=0)
    model.place(GPU, torch.device("cpu"))
    weights = Weights(model, SHAPE.vocab_size)
    (layer, *_) = weights.layers
    used = [weights.embed, weights.head, weights.norm, layer.attention_norm, layer.mlp_norm]
    used += [product.weight for product in (layer.qkv, layer.out, layer.gate_up, layer.down)]  # type: ignore[union-attr]
    assert {tensor.device for tensor in used if tensor is not None} == {GPU}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.startswith("dpo")])
def test_a_training_step_mixes_no_devices(kind: str, method: str) -> None:
    model, packed = build(KINDS[kind], method, mode=MODE), packed_rows()
    with MODE:
        ids = token_ids()
        loss = model(ids, ids, torch.ones((), device=GPU), packed)
        loss.backward()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert loss.device == GPU and gradients and all(gradient.device == GPU for gradient in gradients)


@pytest.mark.parametrize("method", METHODS)
def test_a_step_of_dpo_mixes_no_devices(method: str) -> None:
    reference = build(Reference, OFF, mode=MODE).requires_grad_(False) if method == OFF else None
    model, packed = build(learner(reference, DPO).kind, method, mode=MODE), packed_rows()
    with MODE:
        if reference is None:
            model.begun = Beginning(model, loaded=False)  # type: ignore[assignment]
        ids = token_ids()
        loss = model.train()(ids, ids, torch.ones((), device=GPU), packed)
        loss.backward()
        numbers = DpoModel.numbers(model)  # type: ignore[arg-type]
    assert loss.device == GPU and numbers and {number.device for number in numbers.values()} == {GPU}


@pytest.mark.parametrize("method", METHODS)
def test_an_update_of_grpo_mixes_no_devices(method: str) -> None:
    model, copy = build(Decoder, method, mode=MODE), build(Decoder, OFF, mode=MODE)
    with MODE:
        (batch,) = arrange([Answer((1, 2, 3), (4, 5), 0.5), Answer((1, 2), (6,), -0.5)], 2, CONTEXT, GPU)
        reference = logprobs(copy, batch, 1.0)[0].detach()
        policy = Policy(model, temperature=1.0, clip_ratio=0.2, kl=0.1)
        loss, sums = policy(replace(batch, reference=reference), 1.0)
        loss.backward()
    assert loss.device == sums.device == GPU


def model_folder(parent: Path) -> str:
    model = Decoder(SHAPE, CONTEXT)
    model.start(3)
    hf.save(model, str(parent / "base"), say=lambda line: None)
    return str(parent / "base")


@pytest.mark.parametrize("kind", ["reward model", "reward model without likelihood"])
def test_a_reward_model_is_opened_on_the_device_that_scores(kind: str, tmp_path: Path) -> None:
    """`opened` is how GRPO opens its reward model. No weights are read: a tensor without data can't hold them."""
    folder, kept = model_folder(tmp_path), KINDS[kind]
    model = hf.opened(folder, CONTEXT, torch.float32, GPU, lambda line: None, kept, load=lambda model, path, say: None)
    assert {tensor.device for tensor in tensors_of(model).values()} == {GPU}


@pytest.mark.parametrize("kind", ["reward model", "reward model without likelihood"])
def test_scoring_completions_mixes_no_devices(kind: str) -> None:
    model = build(KINDS[kind], OFF, mode=MODE)
    assert isinstance(model, RewardModel)
    with MODE, reads_a_value():
        score_ids(model, [((1, 2, 3), 1), ((1, 2), 1)], GPU)


@pytest.mark.parametrize(
    "measure",
    [
        pytest.param(lambda model: log_likelihoods(model, [((1, 2), (3,)), ((1,), (2, 3))]), id="evaluation"),
        pytest.param(lambda model: embed(model, [(1, 2, 3), (1, 2)]), id="density"),
    ],
)
def test_measuring_a_model_mixes_no_devices(measure: Callable[[Decoder], object]) -> None:
    model = build(Decoder, OFF, mode=MODE)
    with MODE, reads_a_value():
        measure(model)


@needs_gpu
@pytest.mark.parametrize("kind", ["reward model", "reward model without likelihood"])
def test_a_gpu_scores_as_a_cpu_does(kind: str, tmp_path: Path) -> None:
    folder, rows = model_folder(tmp_path), [((1, 2, 3), 1), ((1, 2, 5, 7), 2)]
    scores = []
    for device in (torch.device("cpu"), torch.device("cuda")):
        model = hf.opened(folder, CONTEXT, torch.float32, device, lambda line: None, KINDS[kind], load=load_reward)
        assert isinstance(model, RewardModel)
        model.begin_own("")
        with torch.no_grad():
            model.score.copy_(torch.linspace(-1, 1, SHAPE.dim))
        scores.append(score_ids(model, rows, device))
    assert scores[1] == pytest.approx(scores[0], rel=2e-2, abs=2e-2)
