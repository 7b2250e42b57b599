"""QLoRA beside peft + bitsandbytes from the same folder and the same first adapter: are 4-bit weights the same bits, losses and logits the same?

    PYTHONPATH=src python benchmarks/qlora_learning.py --json learning.jsonl --commit $(git rev-parse --short HEAD)
    PYTHONPATH=src python benchmarks/qlora_learning.py --size tiny --context 64 --micro 2       no GPU: shows that it works

weights   every linear layer as each side dequantizes it: elements whose bits differ
losses    30 steps of AdamW (no decay, no dropout, clipped at 1) on the same tokens, which repeat with noise and so can be learned: the largest difference, bar 0.01
from_fp32 logits before the first step against the same weights computed in fp32: each side's own rounding
logits    the adapter that one side trained, read by the other: difference of logits over their spread (RMS), beside what the adapter itself changed
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import tempfile
from typing import Any

import qlora
import torch
from shapes import device, written
from torch import Tensor
from torch.nn.functional import cross_entropy

from stoker.contract.frozen import replace
from stoker.training.model import adapters, hf, nf4, ready
from stoker.training.model.attention import kernels
from stoker.training.model.config import AdapterConfig
from stoker.training.model.decoder import Decoder
from stoker.training.model.hf_config import shape_of
from stoker.training.model.linear import Linear
from stoker.training.model.targets import targets
from stoker.training.optim.config import OptimConfig
from stoker.training.optim.optimizer import Optimizer, gradient_norm
from stoker.training.parallel.config import ComputeConfig

TOLD = AdapterConfig(method="qlora", lora_rank=16, lora_alpha=32.0)
KINDS = 200  # different tokens in the data
BAR = 0.01


def dtype() -> torch.dtype:
    return torch.bfloat16 if device().type == "cuda" else torch.float32


def tokens(steps: int, micro: int, context: int) -> Tensor:
    """Each token mostly follows from the one before it."""
    draw = torch.Generator().manual_seed(5)
    follows, size = torch.randperm(KINDS, generator=draw), (steps, micro, context + 1)
    noise = torch.randint(0, KINDS, size, generator=draw)
    surprises = torch.rand(size, generator=draw) < 0.2
    found = noise.clone()
    for at in range(1, context + 1):
        found[..., at] = torch.where(surprises[..., at], noise[..., at], follows[found[..., at - 1]])
    return found.to(device())


def ours(folder: str, context: int) -> Decoder:
    with torch.device("meta"):
        model = Decoder(shape_of(folder), context, dtype())
    adapters.freeze(model, TOLD)
    ready.make_ready(model, ComputeConfig(), device(), print)
    model.place(device())
    hf.load_named(model, hf.named(model), folder, print)
    adapters.attach(model, TOLD, 0)
    return model


@torch.no_grad()
def in_fp32(folder: str, context: int, first: str, inputs: Tensor) -> Tensor:
    """Logits of the same 4-bit weights and the same first adapter, everything between them in fp32."""
    with torch.device("meta"):
        model = Decoder(shape_of(folder), context, torch.float32)
    adapters.freeze(model, TOLD)
    ready.make_ready(model, ComputeConfig(dtype="fp32", compile="off"), device(), print)
    model.place(device())
    hf.load_named(model, hf.named(model), folder, print)
    for module in model.modules():
        if isinstance(module, Linear) and module.quantized:
            module.quantized = tuple(replace(part, dtype=dtype()) for part in module.quantized)
            module.settle()
    adapters.attach(model, TOLD, 0)
    adapters.load(model, TOLD, first, print)
    return torch.as_tensor(model(inputs)).float()


def theirs(folder: str) -> Any:
    transformers: Any = importlib.import_module("transformers")
    peft: Any = importlib.import_module("peft")
    bits = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype()
    )
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = load(folder, quantization_config=bits, dtype=dtype(), device_map={"": str(device())})
    return peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)


def weights(model: Decoder, other: Any) -> dict[str, Any]:
    functional: Any = importlib.import_module("bitsandbytes.functional")
    elements = differ = codes = tensors = 0
    for target in targets(model.config, TOLD):
        layer: Any = model.get_submodule(target.name)
        for name, part in zip(target.names, layer.quantized, strict=True):
            weight = other.get_submodule(name).weight
            own, found = nf4.dequantize(part), functional.dequantize_4bit(weight.data, weight.quant_state)
            elements, tensors = elements + own.numel(), tensors + 1
            codes += int((part.codes != weight.data.view(torch.uint8).flatten()).sum())
            differ += int((own != found.to(own.dtype).view_as(own)).sum())
    return {"tensors": tensors, "elements": elements, "codes_differ": codes, "differ": differ, "bit_equal": differ == 0}


def our_losses(model: Decoder, data: Tensor, rate: float) -> list[float]:
    optimizer = Optimizer(model, OptimConfig(learning_rate=rate, weight_decay=0.0, max_grad_norm=1.0))
    bad, scale = torch.zeros((), device=data.device), torch.tensor(1 / data[0, :, 1:].numel(), device=data.device)
    losses = []
    for rows in data:
        loss = model(rows[:, :-1].contiguous(), rows[:, 1:].contiguous(), scale)
        loss.backward()
        optimizer.step(1.0, gradient_norm(optimizer.parameters), bad)
        optimizer.zero()
        losses.append(float(loss.detach()))
    return losses


def their_logits(model: Any, inputs: Tensor) -> Tensor:
    with torch.autocast(inputs.device.type, torch.bfloat16, enabled=inputs.is_cuda):
        found = model(input_ids=inputs).logits
    return torch.as_tensor(found).float()


def their_losses(model: Any, data: Tensor, rate: float) -> list[float]:
    c = OptimConfig()
    learned = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(learned, lr=rate, betas=(c.beta1, c.beta2), eps=c.eps, weight_decay=0.0)
    model.train()
    losses = []
    for rows in data:
        loss: Any = cross_entropy(their_logits(model, rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(learned, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@torch.no_grad()
def apart(one: Tensor, other: Tensor) -> dict[str, float]:
    one, other = one.float(), other.float()
    spread = float(other.std())
    rms, most = float((one - other).square().mean().sqrt()) / spread, float((one - other).abs().max()) / spread
    return {
        "rms": round(rms, 5),
        "most": round(most, 5),
        "same_first": round(float((one.argmax(-1) == other.argmax(-1)).float().mean()), 4),
    }


def compared(folder: str, given: argparse.Namespace, scratch: str) -> dict[str, Any]:
    peft: Any = importlib.import_module("peft")
    first, our_end, their_end = (os.path.join(scratch, name) for name in ("first", "ours", "theirs"))
    data = tokens(given.steps, given.micro, given.context)
    inputs = tokens(1, given.micro, given.context)[0, :, :-1].contiguous()
    model, base = ours(folder, given.context), theirs(folder)
    found: dict[str, Any] = {"weights": weights(model, base)}
    adapters.save(model, TOLD, folder, first, None, print)
    other = peft.PeftModel.from_pretrained(base, first, is_trainable=True)
    with torch.no_grad():
        begun, exact = model(inputs).float(), in_fp32(folder, given.context, first, inputs)
        found["first_logits"] = apart(begun, their_logits(other.eval(), inputs))
        found["from_fp32"] = {"ours": apart(begun, exact), "peft": apart(their_logits(other, inputs), exact)}
    mine, other_losses = our_losses(model, data, given.rate), their_losses(other, data, given.rate)
    most = max(abs(a - b) for a, b in zip(mine, other_losses, strict=True))
    found["losses"] = {"most_apart": round(most, 5), "within": most <= BAR, "ours": mine, "peft": other_losses}
    adapters.save(model, TOLD, folder, our_end, None, print)
    other.save_pretrained(their_end)
    with torch.no_grad():
        of_ours, of_theirs = model(inputs).float(), their_logits(other.eval(), inputs)
        other.load_adapter(our_end, "ours")
        other.set_adapter("ours")
        found["ours_in_peft"] = apart(their_logits(other.eval(), inputs), of_ours)
        again, _ = adapters.settings_of(their_end, "qlora")
        adapters.load(model, again, their_end, print)
        found["theirs_in_ours"] = apart(model(inputs), of_theirs)
        found["learned"] = apart(begun, of_ours)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="1b")
    parser.add_argument("--folder", default="", help="of the weights; written if it is not there")
    parser.add_argument("--micro", type=int, default=4)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rate", type=float, default=2e-4)
    parser.add_argument("--json", default="")
    parser.add_argument("--commit", default="")
    given = parser.parse_args()
    ready.environment(print)
    folder = os.path.abspath(written(given.size, given.folder))
    with tempfile.TemporaryDirectory() as scratch, kernels("auto"):
        found = compared(folder, given, scratch)
    asked = {
        "size": given.size,
        "micro": given.micro,
        "context": given.context,
        "rate": given.rate,
        "commit": given.commit,
    }
    qlora.keep({**asked, **found}, given.json)
    ok = found["weights"]["bit_equal"] and found["losses"]["within"]
    print(
        f"weights {found['weights']['differ']} of {found['weights']['elements']:,} differ; losses at most {found['losses']['most_apart']} apart"
    )
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
