"""NaN forensics: the replay names the first bad operation, its module and its samples, in the forward and in the backward; the dump and `stoker nan`."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conftest import Stoker, at_length
from stoker.contract.errors import Refusal
from stoker.contract.evidence import Evidence, RankError, RankExit
from stoker.control.verdict.judge import judge
from stoker.training.forensics.config import parse
from stoker.training.forensics.culprit import NonFinite, banner, decide, worded
from stoker.training.forensics.report import Report, TensorStats

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from stoker.training.forensics import reading, statistics  # noqa: E402
from stoker.training.forensics.replay import (  # noqa: E402
    Drill,
    Investigation,
    MicroBatch,
    Replay,
    investigate,
    write_dump,
)
from stoker.training.forensics.trace import scope  # noqa: E402

torch.set_num_threads(1)  # the tensors are tiny

VOCAB, DIM, HEADS, LAYERS, LENGTH = 48, 16, 2, 3, 8
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]),
]


class Attention(nn.Module):
    def __init__(self, eager: bool) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.q_norm, self.k_norm = nn.RMSNorm(DIM // HEADS), nn.RMSNorm(DIM // HEADS)
        self.eager, self.blind = eager, False

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        q, k = self.q_norm(q), self.k_norm(k)
        if not self.eager:
            return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        mask = torch.full((x.shape[1], x.shape[1]), -math.inf, device=x.device, dtype=x.dtype).triu(
            0 if self.blind else 1
        )
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) + mask
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Linear(DIM, 4 * DIM, bias=False), nn.Linear(2 * DIM, DIM, bias=False)
        self.trick: Callable[[Tensor], Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        inner = F.silu(gate) * up
        return self.down(self.trick(inner) if self.trick is not None else inner)


class Block(nn.Module):
    def __init__(self, eager: bool) -> None:
        super().__init__()
        self.attention_norm, self.attention, self.mlp_norm, self.mlp = (
            nn.RMSNorm(DIM),
            Attention(eager),
            nn.RMSNorm(DIM),
            Mlp(),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Model(nn.Module):
    def __init__(self, eager: bool = False, recompute: bool = False) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(VOCAB, DIM), nn.ModuleList(Block(eager) for _ in range(LAYERS))
        self.norm, self.head, self.recompute = nn.RMSNorm(DIM), nn.Linear(DIM, VOCAB, bias=False), recompute

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        return self.head(self.norm(x))


class Loss(torch.autograd.Function):
    """As the fused losses do it: the gradient is made in the forward."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, tokens: Tensor) -> Tensor:
        wide = logits.float()
        kept = (targets != -100).unsqueeze(-1)
        ctx.save_for_backward(
            ((wide.softmax(-1) - F.one_hot(targets.clamp(min=0), VOCAB)) * kept / tokens).to(logits.dtype)
        )
        return -(wide.log_softmax(-1).gather(-1, targets.clamp(min=0).unsqueeze(-1)) * kept).sum() / tokens

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] * ctx.saved_tensors[0], None, None


def made(dtype: Any = torch.float32, device: str = "cpu", **more: bool) -> Model:
    torch.manual_seed(0)
    return Model(**more).to(device=device, dtype=dtype)


def batches(
    model: Model,
    count: int = 2,
    samples: int = 3,
    masked: tuple[int, ...] = (),
    spoil: Callable[[Tensor], Tensor] | None = None,
) -> Replay:
    """Sample ids 10, 11, 12 | 20, 21, 22 | …"""
    device = next(model.parameters()).device
    made_ = []
    for number in range(count):
        tokens = torch.randint(0, VOCAB, (samples, LENGTH), generator=torch.Generator().manual_seed(number)).to(device)
        targets = tokens.roll(-1, 1) if number not in masked else torch.full_like(tokens, -100)

        def run(tokens: Tensor = tokens, targets: Tensor = targets) -> Tensor:
            logits = model(tokens)
            with scope("loss"):
                loss = Loss.apply(spoil(logits) if spoil else logits, targets, (targets != -100).sum().float())
            loss.backward()
            return loss

        made_.append(MicroBatch(run, tuple(10 * (number + 1) + one for one in range(samples)), tokens, targets))
    return Replay(tuple(made_))


def look(model: Model, replay: Replay | None = None, **more: Any) -> Investigation:
    given = {"step": 12, "rank": 0, "world": 1, "label": "CPU 0", "loss": math.nan, "grad_norm": math.nan, **more}
    return investigate(model, replay or batches(model), Report(**given))


def report_of(model: Model, replay: Replay | None = None, **more: Any) -> Report:
    return look(model, replay, **more).report


def one_nan(tensor: Tensor, sample: int = 1) -> Tensor:
    """0/0 in one element."""
    hole = torch.ones_like(tensor)
    hole[sample, 2, 0] = 0
    return tensor * hole / hole


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_a_sound_step_has_no_origin_whatever_its_masks(dtype: Any, eager: bool, recompute: bool, device: str) -> None:
    found = report_of(made(dtype, device, eager=eager, recompute=recompute))
    assert found.phase == "clean" and found.op == "" and found.gradients == ()
    assert "not reproduced" in found.verdict and any("stoker burnin" in line for line in found.advice)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_the_first_bad_operation_of_the_forward_is_named_with_module_and_sample(
    dtype: Any, eager: bool, recompute: bool, device: str
) -> None:
    model = made(dtype, device, eager=eager, recompute=recompute)
    model.layers[1].mlp.trick = one_nan
    found = look(model)
    said = found.report
    assert (said.phase, said.op, said.module, said.micro_batch, said.what) == (
        "forward",
        "aten.div",
        "layers.1.mlp",
        0,
        "NaN",
    )
    assert said.sample_ids == (11,)
    assert said.verdict == "first NaN: aten.div in layers.1.mlp, forward, micro-batch 0"
    assert said.output is not None and (said.output.nan, said.output.inf) == (1, 0)
    assert said.output.shape == (3, LENGTH, 2 * DIM) and said.output.dtype == str(dtype).removeprefix("torch.")
    assert [(one.name, one.bad) for one in said.inputs] == [("self", 0), ("other", 0)]
    assert {one.name for one in said.gradients} >= {"embed.weight", "layers.1.mlp.down.weight"}
    assert set(found.tensors) == {"output", "input.self", "input.other"} and bool(
        found.tensors["output"][1, 2, 0].isnan()
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_overflow_is_an_inf_at_the_exponential_not_a_nan_further_on(dtype: Any) -> None:
    model = made(dtype)
    model.layers[2].mlp.trick = lambda x: (x * 0 + 200).exp() * 0
    said = report_of(model)
    assert (said.what, said.op, said.module) == ("Inf", "aten.exp", "layers.2.mlp")
    assert said.inputs[0].absmax == 200


def test_an_inf_that_is_taken_out_again_is_not_the_origin() -> None:
    model = made()
    model.layers[0].mlp.trick = lambda x: torch.where(torch.ones_like(x, dtype=torch.bool), x, 1 / (x.detach() * 0))
    assert report_of(model).phase == "clean"
    model.layers[1].mlp.trick = one_nan
    assert report_of(model).module == "layers.1.mlp"


def test_a_row_that_is_masked_from_end_to_end_is_found_in_its_softmax() -> None:
    model = made(eager=True)
    model.layers[1].attention.blind = True
    said = report_of(model)
    assert (said.op, said.module, said.what) == ("aten._softmax", "layers.1.attention", "NaN")
    assert said.inputs[0].inf > 0 and "masked from end to end" in said.advice[0]


class Loud(torch.autograd.Function):
    """Finite forward, a gradient of 1e30."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0].sign() * 1e30


class Steep(torch.autograd.Function):
    """Finite forward; its gradient is 1e30 times as large, twice: infinite."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return (grads[0].sign() * 1e30) * 1e30


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recompute", [False, True])
def test_a_gradient_that_only_overflows_is_named_by_the_backward_of_its_module(
    dtype: Any, recompute: bool, device: str
) -> None:
    model = made(dtype, device, recompute=recompute)
    model.layers[1].mlp.trick = Steep.apply
    said = report_of(model, loss=3.2)
    assert (said.phase, said.op, said.module, said.what) == ("backward", "aten.mul", "layers.1.mlp", "Inf")
    assert "in the backward of layers.1.mlp" in said.verdict and said.sample_ids == (10, 11, 12)
    assert "layers.2.mlp.down.weight" not in {one.name for one in said.gradients}


def test_a_matrix_product_of_the_backward_belongs_to_the_linear_it_is_of() -> None:
    model = made()
    linear = model.layers[1].attention.qkv
    with torch.no_grad():
        linear.weight.mul_(1e12)
    linear.register_forward_pre_hook(lambda module, inputs: inputs[0] * 1e-12)
    linear.register_forward_hook(lambda module, inputs, output: Loud.apply(output))
    said = report_of(model, loss=3.2)
    assert (said.phase, said.op, said.module) == ("backward", "aten.mm", "layers.1.attention.qkv"), said.verdict


def test_a_sum_of_gradients_that_overflows_names_the_parameter() -> None:
    model = made()
    model.layers[0].mlp.down.weight.register_hook(lambda gradient: torch.full_like(gradient, 2e38))
    said = report_of(model, loss=3.2)
    assert (said.phase, said.op, said.parameter, said.micro_batch) == (
        "gradient",
        "aten.add_",
        "layers.0.mlp.down.weight",
        1,
    )
    assert [one.name for one in said.gradients] == ["layers.0.mlp.down.weight"]
    assert said.inputs[0].absmax == pytest.approx(2e38) and said.inputs[0].bad == 0


def test_gradients_that_are_finite_and_whose_norm_is_not() -> None:
    model = made()
    model.head.weight.register_hook(lambda gradient: gradient.sign() * 1e20)
    said = report_of(model, loss=3.2, grad_norm=math.inf)
    assert (said.phase, said.parameter) == ("norm", "head.weight") and "overflows float32" in said.verdict
    assert decide([said]).ranks == (0,)


@pytest.mark.parametrize("masked", [(0, 1), (1,)])
def test_a_batch_whose_targets_are_all_masked_is_called_that(masked: tuple[int, ...]) -> None:
    model = made()
    said = report_of(model, batches(model, masked=masked))
    ids = (10, 11, 12) if masked[0] == 0 else (20, 21, 22)
    assert (said.phase, said.sample_ids, said.micro_batch) == ("targets", ids, masked[0])
    assert "every target is masked" in said.verdict and "samples" in decide([said]).summary


def test_a_bad_logit_in_a_batch_with_targets_is_no_matter_of_masks() -> None:
    model = made()
    said = report_of(model, batches(model, spoil=lambda logits: logits / (logits * 0)))
    assert (said.phase, said.op, said.module) == ("forward", "aten.div", "loss")


def test_weights_that_were_bad_before_the_step_are_named_first() -> None:
    model = made()
    with torch.no_grad():
        model.layers[2].mlp.gate_up.weight[0, 0] = math.nan
    said = report_of(model)
    assert (said.phase, said.parameter, said.what) == ("parameters", "layers.2.mlp.gate_up.weight", "NaN")
    assert said.parameters[0].nan == 1 and "earlier step" in said.verdict


def test_values_that_no_operation_made_are_said_to_come_from_outside() -> None:
    model = made()
    outside = torch.full((3, LENGTH, 2 * DIM), math.nan)
    model.layers[0].mlp.trick = lambda x: x + outside
    said = report_of(model)
    assert (said.op, said.module) == ("aten.add", "layers.0.mlp") and "no operation seen here" in said.source


def test_a_replay_that_raises_still_gives_a_report() -> None:
    model = made()

    def broken() -> Tensor:
        raise ValueError("the batch is gone")

    said = report_of(model, Replay((MicroBatch(broken, (1,)),)))
    assert said.phase == "failed" and "ValueError: the batch is gone" in said.verdict
    assert "ValueError" in decide([said]).summary

    model.layers[1].mlp.trick = one_nan
    sound = batches(model, count=1).micro_batches[0]

    def raises_on_nan() -> Tensor:
        assert bool(model(sound.inputs).isfinite().all()), "logits"
        raise AssertionError("unreachable")

    said = report_of(model, Replay((MicroBatch(raises_on_nan, sound.sample_ids, sound.inputs),)))
    assert (said.op, said.module) == ("aten.div", "layers.1.mlp") and "AssertionError" in said.problem


def test_nothing_is_left_behind_by_an_investigation() -> None:
    model = made()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    report_of(model)
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())
    assert scope("loss") is scope("anything")  # free again


def test_the_replays_gradients_are_those_of_the_plain_step() -> None:
    model = made()
    replay = batches(model)
    report_of(model, replay)
    traced = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    for one in replay.micro_batches:
        one.run()
    assert all(torch.equal(old, new.grad) for old, new in zip(traced, model.parameters(), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_statistics_count_exactly_and_leave_the_bad_out_of_the_range(dtype: Any) -> None:
    tensor = torch.arange(-4.0, 8.0).to(dtype).reshape(3, 4)
    tensor[0, 0], tensor[1, 1], tensor[2, 2], tensor[2, 3] = math.nan, math.inf, -math.inf, math.nan
    found = statistics.describe("x", tensor.t())
    assert (found.shape, found.nan, found.inf, found.min, found.max, found.absmax, found.count) == (
        (4, 3),
        2,
        2,
        -3,
        5,
        5,
        12,
    )
    empty = statistics.describe("x", torch.full((2,), math.nan))
    assert (empty.min, empty.absmax) == (None, None)


# -- drills


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("layers.1.attention@5@0", ("layers.1.attention", 5, 0, False)),
        ("inf:layers.1.mlp@7", ("layers.1.mlp", 7, None, False)),
        ("grad:layers.0.mlp.down.weight@5", ("layers.0.mlp.down.weight", 5, None, True)),
    ],
)
def test_a_drill_is_read(text: str, expected: tuple[Any, ...]) -> None:
    found = parse(text)
    assert found is not None and (found.where, found.step, found.rank, found.gradient) == expected
    assert math.isnan(found.value) == (":" not in text)


def test_a_drill_that_makes_no_sense_is_refused() -> None:
    assert parse("") is None
    for text in ("layers.1", "layers.1@x", "@5", "bad:layers.1@5", "a b@5"):
        with pytest.raises(Refusal, match="WHERE@STEP"):
            parse(text)
    with pytest.raises(Refusal, match=r"did you mean layers\.1\.attention"):
        Drill(parse("layers.1.atention@5"), made(), 0)
    with pytest.raises(Refusal, match="no parameter"):
        Drill(parse("grad:layers.0.mlp@5"), made(), 0)


@pytest.mark.parametrize(
    ("dtype", "kind", "where"),
    [
        (torch.float32, "", "layers.1.attention"), (torch.bfloat16, "", "layers.1.attention"), (torch.bfloat16, "inf:", "layers.1.attention"),
        (torch.float32, "inf:", "layers.2.mlp.down"), (torch.float32, "", "embed"), (torch.float32, "inf:", "layers.0.attention.q_norm"),
    ],
)  # fmt: skip
def test_an_injected_value_is_found_where_it_was_put_and_only_at_its_step_and_rank(
    dtype: Any, kind: str, where: str
) -> None:
    model = made(dtype)
    drill = Drill(parse(f"{kind}{where}@12@0"), model, 0)
    assert report_of(model).phase == "clean"
    drill.step = 12
    said = report_of(model)
    assert (said.phase, said.module, said.what, said.step) == ("forward", where, "Inf" if kind else "NaN", 12), (
        said.verdict
    )
    other = made(dtype)
    elsewhere = Drill(parse(f"{kind}{where}@12@0"), other, 1)
    elsewhere.step = 12
    assert report_of(other).phase == "clean" and not elsewhere.injected
    assert drill.injected == f"{kind}{where}@12@0"


def test_an_injected_fault_is_called_that_and_gets_no_advice_for_a_real_one() -> None:
    real, injected = told(2, "forward"), worded(told(2, "forward", injected="layers.3.attention@12"))
    assert "nan.inject" not in decide([real]).summary and "nan.inject" not in " ".join(worded(real).advice)
    assert "injected by nan.inject layers.3.attention@12" in decide([told(1, "clean"), injected]).summary
    assert len(injected.advice) == 1 and "nan.inject layers.3.attention@12" in injected.advice[0]
    later = told(2, "parameters", parameter="head.weight", what="NaN")
    assert "nan.inject" not in decide([later]).summary
    assert Report.from_json(injected.to_json()).injected == injected.injected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_injected_gradient_names_the_parameter(dtype: Any) -> None:
    model = made(dtype)
    drill = Drill(parse("grad:layers.0.mlp.down.weight@5"), model, 0)
    sound = batches(model)
    drill.step = 5
    said = report_of(
        model, Replay(sound.micro_batches, after=drill.spoil_gradients), step=5, loss=3.2, grad_norm=math.inf
    )
    assert (said.phase, said.parameter, said.what) == ("gradient", "layers.0.mlp.down.weight", "Inf"), said.verdict
    assert [(one.name, one.inf) for one in said.gradients] == [("layers.0.mlp.down.weight", 1)]
    assert decide([said]).summary.startswith("step 5: Inf first in the gradient of layers.0.mlp.down.weight")


# -- which rank


def told(rank: int, phase: str, **more: Any) -> Report:
    given = (
        {"op": "aten.bmm", "module": "layers.3.attention", "what": "NaN", "sample_ids": (17, 18)}
        if phase in ("forward", "backward")
        else {}
    )
    return Report(
        **{
            "step": 12,
            "rank": rank,
            "world": 4,
            "label": f"GPU {rank}",
            "loss": math.nan,
            "grad_norm": math.nan,
            "phase": phase,
            **given,
            **more,
        }
    )


def test_the_rank_whose_forward_went_bad_is_the_guilty_one() -> None:
    found = decide([told(0, "clean"), told(1, "reduced"), told(2, "forward"), told(3, "backward")])
    assert found.ranks == (2,)
    assert found.summary == "step 12: NaN first in aten.bmm of layers.3.attention (forward) on rank 2, samples 17, 18"


def test_several_guilty_ranks_are_all_named() -> None:
    found = decide(
        [
            told(3, "forward", sample_ids=(40,), module="head", op="aten.mm"),
            told(0, "clean"),
            told(1, "forward"),
            told(2, "gradient"),
        ]
    )
    assert found.ranks == (1, 3)
    assert (
        "on ranks 1, 3, samples 17, 18 (rank 1); sample 40 (rank 3); on rank 3 in aten.mm of head (forward)"
        in found.summary
    )
    everybody = decide([told(rank, "parameters", parameter="head.weight", what="NaN") for rank in range(4)])
    assert (
        everybody.summary
        == "step 12: NaN first in parameter head.weight, which held it before the step began on rank 0 and all others"
    )


def test_a_step_nobody_can_reproduce_is_said_to_be_that() -> None:
    found = decide([told(rank, "clean") for rank in range(4)])
    assert found.ranks == () and "not reproduced" in found.summary and "hardware" in found.summary


def test_a_report_survives_json_strictly() -> None:
    one = told(
        2,
        "forward",
        output=TensorStats("output", (2, 3), "bfloat16", 6, 1, 0, -1.0, 2.0, 2.0),
        inputs=(TensorStats("self", (2,), "float32", 2, 2, 0),),
    )
    text = json.dumps(one.to_json(), allow_nan=False)
    back = Report.from_json(json.loads(text))
    assert math.isnan(back.loss) and back.to_json() == one.to_json() and back.output == one.output


def ended(rank: int, message: str, time: float) -> RankExit:
    error = RankError("NonFinite", message, "loop.py", 9, "train", "", int(time * 1e9), module=NonFinite.__module__)
    return RankExit(rank, "", f"GPU{rank}", 100 + rank, 1, time, error=error)


def test_the_verdict_is_the_summary_and_its_rank_the_one_it_names() -> None:
    message = decide([told(0, "clean"), told(1, "clean"), told(2, "forward")]).summary
    found = judge(Evidence(3, tuple(ended(rank, message, 5.0 + rank) for rank in range(3))))
    assert (found.cause, found.rank, found.gpu, found.retryable, found.summary) == (
        "nan.traced",
        2,
        "GPU2",
        False,
        message,
    )
    assert "stoker nan" in found.fix[0] and any("--preset stable" in line for line in found.fix)
    nobody = judge(Evidence(2, (ended(1, decide([told(0, "clean")]).summary, 5.0), ended(0, "x", 6.0))))
    assert (nobody.cause, nobody.rank) == ("nan.traced", 1)


# -- the dump, and `stoker nan`


def dumped(folder: Path, dtype: Any = torch.bfloat16, **more: Any) -> str:
    model = made(dtype)
    model.layers[1].mlp.trick = one_nan
    replay = batches(model)
    found = look(model, replay, label="GPU 6", **more)
    return write_dump(
        str(folder), found, model, replay, decode=lambda tokens: "".join(chr(97 + token % 26) for token in tokens)
    )


def test_the_dump_can_be_read_by_safetensors_and_holds_what_was_bad(tmp_path: Path) -> None:
    load = pytest.importorskip("safetensors.torch").load_file
    where = Path(dumped(tmp_path))
    assert where == tmp_path / "nan_step_12" / "rank-0" and [one.name for one in where.parent.iterdir()] == ["rank-0"]
    model = made(torch.bfloat16)
    weights, gradients, kept = (
        load(where / f"{name}.safetensors") for name in ("parameters", "gradients", "activations")
    )
    assert weights.keys() == gradients.keys() == {name for name, _ in model.named_parameters()}
    assert all(
        torch.equal(weights[name], parameter) and weights[name].dtype == torch.bfloat16
        for name, parameter in model.named_parameters()
    )
    assert bool(gradients["embed.weight"].isnan().any()) and bool(kept["output"][1, 2, 0].isnan())
    batch = json.loads((where / "batch.json").read_text())
    assert [one["id"] for one in batch["samples"]] == [10, 11, 12, 20, 21, 22] and len(
        batch["samples"][0]["tokens"]
    ) == len(batch["samples"][0]["text"]) == LENGTH
    assert (
        json.loads((where / "report.json").read_text(), parse_constant=pytest.fail)["report"]["module"]
        == "layers.1.mlp"
    )


def test_a_second_dump_of_the_same_step_replaces_the_first_and_a_failed_one_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = Path(dumped(tmp_path))
    first = (where / "report.json").stat().st_ino
    dumped(tmp_path)
    assert (where / "report.json").stat().st_ino != first

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("stoker.training.forensics.replay.write_tensors", full)
    with pytest.raises(OSError, match="No space"):
        dumped(tmp_path)
    assert [one.name for one in where.parent.iterdir()] == ["rank-0"] and (where / "parameters.safetensors").exists()


def test_parameters_are_left_out_and_that_is_said_where_the_disk_has_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stoker.training.forensics.replay.SPARE", 1 << 62)
    monkeypatch.setattr("stoker.training.forensics.replay.bytes_of", lambda tensors: 1 << 60)
    where = dumped(tmp_path)
    (found,) = reading.ranks(where)
    assert (
        set(found.left_out) == {"parameters.safetensors", "gradients.safetensors"}
        and "iB free" in found.left_out["parameters.safetensors"]
    )


def test_a_large_tensor_is_cut_around_its_first_bad_value() -> None:
    tensor = torch.zeros(100, 100)
    tensor[50, 7] = math.nan
    kept, cut = statistics.shortened(tensor, limit=4000)
    assert kept.numel() == 1000 and bool(kept.isnan().any()) and "of 10000, shape [100, 100]" in cut
    whole, nothing = statistics.shortened(tensor)
    assert whole.shape == (100, 100) and nothing == ""


def test_the_banner_has_the_notes_layout_and_the_origin_before_its_consequences(tmp_path: Path) -> None:
    where = Path(dumped(tmp_path))
    text = (where / "banner.txt").read_text()
    lines = text.splitlines()
    assert lines[:6] == [
        "=" * 80,
        "NaN ACTIVATION DETECTED [GPU 6]",
        "=" * 80,
        "Step: 12",
        "Loss: nan",
        "Gradient Norm: nan",
    ]
    assert (
        text.index("first NaN: aten.div in layers.1.mlp")
        < text.index("PROBLEMATIC TENSORS:")
        < text.index("Total layers with NaN gradients:")
    )
    assert f"Debug tensors saved: {where}" in text


@pytest.mark.parametrize(
    ("report", "head"),
    [
        (told(0, "forward"), "NaN ACTIVATION"),
        (told(0, "forward", what="-Inf"), "Inf ACTIVATION"),
        (told(0, "parameters", what="NaN"), "NaN WEIGHT"),
        (told(0, "targets"), "NaN LOSS"),
        (told(0, "backward"), "NaN GRADIENT"),
        (told(0, "norm", loss=1.0, grad_norm=math.inf), "Inf GRADIENT"),
        (told(0, "clean", loss=math.inf, grad_norm=1.0), "Inf LOSS"),
    ],
)
def test_the_banner_is_headed_by_what_was_bad_first(report: Report, head: str) -> None:
    assert banner(report).splitlines()[1] == f"{head} DETECTED [GPU 0]"


def run_with(folder: Path, name: str) -> Path:
    run = folder / "runs" / name
    run.mkdir(parents=True)
    (run / "run.json").write_text(json.dumps({"schema": 1, "name": "trial", "started": 1.0}))
    return run


def test_stoker_nan_prints_the_origin_the_tensors_and_the_text(stoker: Stoker) -> None:
    run = run_with(stoker.cwd, "20260101-trial")
    where = dumped(run)
    for words in (("trial",), (), (str(run / "nan_step_12"),), (where,), (str(run), "--rank", "0")):
        done = stoker("nan", *words)
        assert done.code == 0, done.err
        assert (
            "first NaN: aten.div in layers.1.mlp, forward, micro-batch 0" in done.out
            and "NaN ACTIVATION DETECTED [GPU 6]" in done.out
        )
    sample = json.loads((Path(where) / "batch.json").read_text())["samples"][1]
    assert f'11 (micro-batch 0, 8 targets): "{sample["text"]}"' in done.out and "  12 (micro" not in done.out
    assert "step 12: NaN first in aten.div of layers.1.mlp (forward) on rank 0, sample 11" in done.out
    found = json.loads(stoker("nan", "trial", "--json").out)
    assert found["ranks"] == [0] and found["reports"][0]["op"] == "aten.div"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stoker_nan_shows_a_tensor_and_its_first_bad_places(stoker: Stoker, dtype: Any) -> None:
    dumped(stoker.cwd, dtype)
    done = stoker("nan", "nan_step_12", "--tensor", "output")
    assert done.code == 0 and "[1, 2, 0] = nan" in done.out, done.err
    exact = json.loads(stoker("nan", "nan_step_12", "--tensor", "gradients/embed.weight", "--json").out)["stats"]
    (held,) = [
        one for one in reading.ranks(str(stoker.cwd / "nan_step_12"))[0].report.gradients if one.name == "embed.weight"
    ]
    assert (exact["nan"], exact["inf"], exact["min"], exact["max"]) == (held.nan, held.inf, held.min, held.max)
    sound = json.loads(stoker("nan", "nan_step_12", "--tensor", "parameters/head.weight", "--json").out)
    weight = made(dtype).head.weight.detach().float()
    assert (sound["stats"]["min"], sound["stats"]["max"], sound["bad"]) == (
        float(weight.min()),
        float(weight.max()),
        [],
    )


def test_stoker_nan_refuses_what_is_not_there_or_damaged(stoker: Stoker) -> None:
    run = run_with(stoker.cwd, "20260101-trial")
    assert "no nan_step_N" in stoker("nan", "trial").err
    where = Path(dumped(run))
    assert (done := stoker("nan", "trial", "--rank", "3")).code == 66 and "no rank 3" in done.err
    assert "did you mean gradients/head.weight" in stoker("nan", "trial", "--tensor", "gradients/head.weigt").err
    assert stoker("nan", "nothing-here").code == 66
    data = (where / "activations.safetensors").read_bytes()
    (where / "activations.safetensors").write_bytes(data[:-10])
    assert (done := stoker("nan", "trial", "--tensor", "output")).code == 65 and "cut off" in done.err
    (where / "report.json").write_text('{"report": {"step"')
    assert (done := stoker("nan", "trial")).code == 65 and "damaged" in done.err and "Traceback" not in done.err


RANKS = """
import os, sys
sys.path.insert(0, sys.argv[1])
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from test_forensics import NonFinite, Steep, batches, decide, look, made, reading, write_dump

dist.init_process_group("gloo")
rank = dist.get_rank()
model = made()
for part in (*model.layers, model):
    fully_shard(part, mesh=init_device_mesh("cpu", (2,)))
if rank == 1:
    model.layers[1].mlp.trick = Steep.apply
replay = batches(model)
write_dump(os.environ["STOKER_RUN_DIR"], look(model, replay, rank=rank, world=2), model, replay)
dist.barrier()
summary = decide([one.report for one in reading.ranks(reading.step_folder(os.environ["STOKER_RUN_DIR"], 12))]).summary
dist.destroy_process_group()
raise NonFinite(summary)
"""


@at_length
def test_ranks_that_share_a_sharded_model_agree_on_whose_gradient_overflowed(stoker: Stoker) -> None:
    """Under FSDP the reduction spreads an Inf to every rank inside the backward: only one of them made it."""
    done = stoker.torch("run", "--nproc-per-node", "2", stoker.script("train.py", RANKS), str(Path(__file__).parent))
    summary = "step 12: Inf first in aten.mul of layers.1.mlp (backward) on rank 1, samples 10, 11, 12"
    assert (done.verdict["cause"], done.verdict["rank"], done.verdict["summary"]) == ("nan.traced", 1, summary), (
        done.out[-3000:]
    )
    shown = stoker("nan").out
    assert (
        "first Inf: aten.mul in the backward of layers.1.mlp" in shown
        and "rank 0 [CPU 0]: fine here" in shown
        and summary in shown
    )
    halves = [
        json.loads(stoker("nan", "--rank", rank, "--tensor", "parameters/head.weight", "--json").out)["stats"]["shape"]
        for rank in "01"
    ]
    assert halves == [[VOCAB // 2, DIM], [VOCAB // 2, DIM]]


@pytest.mark.parametrize("told", [{"tied": True}, {"tied": False, "qk_norm": True}])
def test_every_place_of_a_real_model_is_known_before_there_is_one(told: dict[str, bool]) -> None:
    from stoker.training.forensics.config import Injection, misplaced
    from stoker.training.model.config import ModelConfig
    from stoker.training.reward.model import RewardModel

    model = RewardModel(ModelConfig(layers=2, dim=8, heads=2, kv_heads=2, head_dim=4, ff=8, vocab_size=16, **told), 8)
    for name, module in model.named_modules():
        assert not name or isinstance(module, nn.ModuleList) or misplaced(Injection(name, 0), 2) == ""
    for name, _ in model.named_parameters():
        assert misplaced(Injection(name, 0, gradient=True), 2) == ""


def test_stoker_nan_and_a_drill_are_read_without_torch() -> None:
    code = "import sys; import stoker.cli.nan, stoker.training.forensics.config as i; i.parse('a@1'); sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


STATS = TensorStats("output", (2, 3), "float32", 6, 1, 0, -1.0, 3e38, 3e38)


REPORT = Report(
    3,
    0,
    2,
    "CPU 0",
    float("nan"),
    float("inf"),
    "forward",
    "NaN",
    "aten.bmm",
    "layers.0",
    sample_ids=(4, 5),
    output=STATS,
    inputs=(STATS,),
    advice=("lower it",),
)


def test_a_report_comes_back_as_it_was() -> None:
    back = Report.from_json(json.loads(json.dumps(REPORT.to_json())))
    assert back.to_json() == REPORT.to_json() and type(back.output) is TensorStats


_ENDS = """
import sys
from stoker.training.forensics.culprit import NonFinite
from stoker.training.recipes import stage

def main(argv):
    raise NonFinite("step 0: NaN first in parameter norm.weight")

sys.exit(stage.run(main, []))
"""


def test_a_models_nan_ends_in_its_line_and_in_no_frames() -> None:
    """A folder whose weights hold one makes it at the first step."""
    done = subprocess.run([sys.executable, "-c", _ENDS], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "Traceback" not in done.stderr and 'File "' not in done.stderr, done.stderr
    assert done.stderr.endswith("culprit.NonFinite: step 0: NaN first in parameter norm.weight\n")
