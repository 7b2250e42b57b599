"""What benchmarks/pretrain.py compares and how it judges: shapes, one FLOP count, the parity gate, the table. Pure."""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any

SCHEMA = 1
PEERS = ("stoker", "stoker-fp8", "hf-tuned", "hf", "lightning", "loop")
REFERENCE = "hf-tuned"  # what the ratios are taken to
GATE = {"stoker-fp8": 0.02}  # largest difference of a step's loss
GATE_BF16 = 0.01


@dataclasses.dataclass(frozen=True)
class Size:
    family: str
    layers: int
    dim: int
    ff: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    micro: int
    steps: int
    warm: int
    parity: int  # steps that the gate compares
    context: int = 2048
    step_tokens: int = 262_144
    experts: int = 0  # of `ff` each; 0: one MLP
    experts_per_token: int = 1

    @property
    def rows(self) -> int:
        """Samples of a step."""
        return self.step_tokens // self.context

    @property
    def accumulation(self) -> int:
        return self.rows // self.micro

    @property
    def flops_per_token(self) -> int:
        """6·N_matmul + 12·L·heads·head_dim·T; the tied matrix counts once, as the head."""
        attention = self.dim * (2 * self.heads + 2 * self.kv_heads) * self.head_dim
        matmul = self.layers * (attention + 3 * self.dim * self.ff * self.experts_per_token)
        matmul += self.dim * (self.vocabulary + self.layers * self.experts)
        return 6 * matmul + 12 * self.layers * self.heads * self.head_dim * self.context


SIZES = {
    "S": Size("llama", 12, 768, 2048, 12, 12, 64, 50304, micro=32, steps=24, warm=6, parity=50),
    "M": Size("qwen3", 28, 1024, 3072, 16, 8, 128, 151936, micro=8, steps=8, warm=3, parity=10),
    "L": Size("llama", 16, 2048, 8192, 32, 8, 64, 128256, micro=8, steps=7, warm=3, parity=10),
    # Qwen3-30B-A3B's layers, 8 of 48: what fits on one card with AdamW in fp32.
    "E": Size(
        "qwen3_moe",
        8,
        2048,
        768,
        32,
        4,
        128,
        151936,
        micro=4,
        steps=7,
        warm=3,
        parity=5,
        experts=128,
        experts_per_token=8,
    ),
    "TE": Size(
        "qwen3_moe",
        2,
        64,
        32,
        4,
        2,
        16,
        512,
        micro=4,
        steps=8,
        warm=3,
        parity=8,
        context=64,
        step_tokens=1024,
        experts=8,
        experts_per_token=2,
    ),
    "T": Size(
        "qwen3", 2, 64, 128, 4, 2, 16, 512, micro=4, steps=8, warm=3, parity=20, context=64, step_tokens=1024
    ),  # for a machine without GPU
}


def finished(found: dict[str, Any], name: str, peer: str, turn: int, about: dict[str, Any]) -> dict[str, Any]:
    """One FLOP count and one product for all."""
    size = SIZES[name]
    timed = found["step_s"][size.warm - 1 :]  # step_s[0] is that of the second step
    rate = size.step_tokens / statistics.median(timed)
    tflops = rate * size.flops_per_token / 1e12
    return {
        "schema": SCHEMA,
        "size": name,
        "peer": peer,
        "round": turn,
        "micro": size.micro,
        "tok_s": round(rate, 1),
        "tok_s_mean": round(size.step_tokens / statistics.mean(timed), 1),
        "timed_steps": len(timed),
        "tflops": round(tflops, 3),
        "share": round(tflops / about["product_tflops"], 4) if about["product_tflops"] else None,
        "peak_gib": found["peak_gib"],
        "first_s": found["first_s"],
        "step_s": found["step_s"],
        "losses": found["losses"],
        "about": about,
    }


@dataclasses.dataclass(frozen=True)
class Parity:
    largest: float
    steps: int
    wanted: int
    gate: float

    @property
    def passed(self) -> bool:
        return self.steps >= self.wanted and self.largest <= self.gate  # no number is no pass

    def __str__(self) -> str:
        if self.steps < self.wanted and self.largest <= self.gate:
            return f"Δ {self.largest:.4f} in {self.steps} steps"
        return (
            f"{'pass' if self.passed else '**fail**'}: Δ {self.largest:.4f} in {self.steps} steps (gate {self.gate:g})"
        )


def compare(peer: str, losses: list[float], reference: list[float], wanted: int) -> Parity:
    """The largest difference of the first steps' losses."""
    count = min(len(losses), len(reference), wanted)
    differences = [abs(a - b) for a, b in zip(losses[:count], reference[:count], strict=True)]
    largest = float("nan") if any(one != one for one in differences) else max(differences)
    return Parity(largest, count, wanted, GATE.get(peer, GATE_BF16))


def parities(cells: list[dict[str, Any]]) -> dict[tuple[str, str], Parity]:
    """Of each size and peer, against transformers' own losses; the longest runs are compared."""
    longest: dict[tuple[str, str], list[float]] = {}
    for cell in cells:
        key = cell["size"], cell["peer"]
        if len(cell["losses"]) > len(longest.get(key, ())):
            longest[key] = cell["losses"]
    found = {}
    for (size, peer), losses in longest.items():
        reference = REFERENCE if (size, REFERENCE) in longest else "hf"
        if peer != reference and (size, reference) in longest:
            found[size, peer] = compare(peer, losses, longest[size, reference], SIZES[size].parity)
    return found


def later(cells: list[dict[str, Any]]) -> list[str]:
    """fp8 beside bf16 where both went further than the gate looks: the mean difference of ten steps at a time."""
    lines = []
    for size in dict.fromkeys(cell["size"] for cell in cells):
        plain, eight = (
            [cell["losses"] for cell in cells if cell["size"] == size and cell["peer"] == peer]
            for peer in ("stoker", "stoker-fp8")
        )
        count = min((len(max(some, key=len)) for some in (plain, eight) if some), default=0) if plain and eight else 0
        if count < 20:
            continue
        apart = [
            one - other for one, other in zip(max(eight, key=len)[:count], max(plain, key=len)[:count], strict=True)
        ]
        tens = [f"{at + 1}–{at + 10}: {statistics.mean(apart[at : at + 10]):+.4f}" for at in range(0, count - 9, 10)]
        lines.append(f"{size}: loss of fp8 less that of bf16, mean of steps {', '.join(tens)}")
    return lines


def table(cells: list[dict[str, Any]]) -> str:
    """Markdown: medians over the rounds; who measured what, when and how, above it."""
    lines = []
    for text in dict.fromkeys(described(cell["about"]) for cell in cells):
        lines += [text, ""]
    lines += [
        (
            "| size | peer | tok/s | × HF tuned | TFLOP/s | share of the product | peak GiB | × HF tuned | first step s"
            " | × HF tuned | loss parity |"
        ),
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    gates = parities(cells)
    for size in dict.fromkeys(cell["size"] for cell in cells):
        for peer in PEERS:
            rate, memory, first = (middle(cells, size, peer, key) for key in ("tok_s", "peak_gib", "first_s"))
            if rate is None:
                continue
            share, tflops = middle(cells, size, peer, "share"), middle(cells, size, peer, "tflops")
            ratios = [
                ratio(value, middle(cells, size, REFERENCE, key))
                for value, key in ((rate, "tok_s"), (memory, "peak_gib"), (first, "first_s"))
            ]
            parity = "the reference" if peer == REFERENCE else str(gates.get((size, peer), "–"))
            lines.append(
                f"| {size} | {peer} | {rate:,.0f} | {ratios[0]} | {number(tflops, 1)} | {number(share, 3)} |"
                f" {number(memory, 1)} | {ratios[1]} | {number(first, 1)} | {ratios[2]} | {parity} |"
            )
    return "\n".join(lines)


def described(about: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    product = f"; 8192³ bf16 product {about['product_tflops']:.0f} TFLOP/s" if about["product_tflops"] else ""
    return f"{about['date']}, commit {about['commit']}, {about['device']}{product}; {versions}\n`{about['command']}`"


def middle(cells: list[dict[str, Any]], size: str, peer: str, key: str) -> float | None:
    found = [cell[key] for cell in cells if cell["size"] == size and cell["peer"] == peer and cell[key] is not None]
    return statistics.median(found) if found else None


def ratio(value: float | None, reference: float | None) -> str:
    return f"{value / reference:.2f}" if value is not None and reference else "–"


def number(value: float | None, digits: int) -> str:
    return "n/a" if value is None else f"{value:.{digits}f}"
