"""What a step's gradients cost here: 2(n-1)/n of their bytes cross each link (ring), by its bandwidth."""

from __future__ import annotations

import os
from math import prod

from stoker.contract.frozen import frozen
from stoker.contract.tensor_header import read_header

LORA_SHARE = 1_126_400 / 1.1e9  # rank 8 on q and v of a 1.1 B Llama; other ranks and modules in proportion
FORMULA = "2(n-1)/n × bytes / bandwidth"


@frozen
class Price:
    what: str
    bytes: int
    seconds: float


def seconds_per_step(count_bytes: float, world: int, bandwidth: float) -> float:
    return 2 * (world - 1) / world * count_bytes / bandwidth if world > 1 else 0.0


def prices(parameters: float, world: int, bandwidth: float) -> tuple[Price, ...]:
    lora = parameters * LORA_SHARE
    made = ((f"{counted(parameters)} bf16 gradients", 2 * parameters), (f"LoRA ({counted(lora)}, fp32)", 4 * lora))
    return tuple(Price(what, int(size), seconds_per_step(size, world, bandwidth)) for what, size in made)


def sentence(parameters: float, world: int, bandwidth: float) -> str:
    """1.1 B bf16 gradients over 0.94 Gbit/s: 25 s/step; LoRA (1.1 M, fp32): 0.05 s"""
    full, lora = prices(parameters, world, bandwidth)
    return f"{full.what} over {gigabits(bandwidth)}: {short(full.seconds)}/step; {lora.what}: {short(lora.seconds)}"


def short(seconds: float) -> str:
    if seconds < 0.01:
        return f"{seconds * 1000:.2g} ms"
    if seconds < 1:
        return f"{seconds:.2g} s"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"


def counted(parameters: float) -> str:
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if parameters >= size:
            return f"{parameters / size:.3g} {letter}"
    return f"{parameters:.0f}"


def gigabits(bytes_per_second: float) -> str:
    bits = bytes_per_second * 8
    return f"{bits / 1e9:.3g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.3g} Mbit/s"


def parse_count(text: str) -> float:
    """1.1B, 350M, 124000000."""
    word = text.strip().replace("_", "").replace(" ", "")
    size = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}.get(word[-1:].lower(), 1.0)
    number = word[:-1] if size != 1.0 else word
    try:
        found = float(number) * size
    except ValueError:
        found = 0.0
    if not 0 < found < 1e15:
        raise ValueError(f"{text!r} is not a number of parameters: write 1.1B or 350M")
    return found


# ---- how many parameters a folder holds, from the heads of its safetensors files ----


def parameters(folder: str) -> int:
    """0 where there is nothing to count here."""
    try:
        files = [os.path.join(folder, name) for name in sorted(os.listdir(folder)) if name.endswith(".safetensors")]
        return sum(prod(tensor.shape) for file in files for tensor in read_header(file).tensors.values())
    except (OSError, ValueError):  # not a folder, or not weights that can be read
        return 0
