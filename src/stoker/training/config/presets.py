"""Named starting points, below file, environment and flags. The dial makes the shape, so one more key fits in."""

from __future__ import annotations

from typing import Any

from stoker.training.config.keys import KEYS

ABOUT = {
    "debug": "2 layers, 10 steps, every check on",
    "small": "4 layers: what a laptop's CPU trains in minutes; the default without GPUs",
    "stable": "cautious numbers for a run that went NaN; give it the model's shape",
    "production": "32 layers, 1.5 billion parameters, 10,000 steps; the default with GPUs",
}
PRESETS: dict[str, dict[str, Any]] = {
    "debug": {
        "model.depth": 2, "tokenizer.vocab_size": 1024, "tokenizer.train_megabytes": 8, "data.context_length": 256, "batch.tokens": 512, "batch.micro": 2,
        "optim.learning_rate": 1e-3, "optim.warmup_ratio": 0.1, "compute.compile": "off", "compute.deterministic": True,
        "train.max_steps": 10, "train.log_every": 1, "train.eval_every": 5, "train.eval_tokens": 16_384, "train.log_samples": True, "train.debug": True, "train.samples": 0,
        "checkpoint.every_steps": 5, "grpo.prompts_per_step": 4, "grpo.group": 4, "generate.new_tokens": 32,
    },
    "small": {
        "model.depth": 4, "tokenizer.vocab_size": 4096, "tokenizer.train_megabytes": 32, "data.context_length": 256, "batch.tokens": 4096, "batch.micro": 8,
        "optim.learning_rate": 1e-3, "optim.warmup_ratio": 0.05, "train.max_steps": 500, "train.eval_every": 100, "train.eval_tokens": 65_536,
    },
    # Each of these alone has cured runs: a lower peak reached later, a smaller start, a tighter clip, queries and keys
    # that can't grow, no rounding to bf16.
    "stable": {
        "model.depth": 12, "model.qk_norm": True, "model.init_std": 0.01, "data.context_length": 1024, "batch.tokens": 131_072, "batch.micro": 4,
        "optim.learning_rate": 1e-4, "optim.warmup_ratio": 0.1, "optim.max_grad_norm": 0.5, "compute.dtype": "fp32",
        "train.max_steps": 10_000, "train.eval_every": 500,
    },
    "production": {
        "model.depth": 32, "data.context_length": 2048, "batch.tokens": 524_288, "batch.micro": 0,
        "optim.warmup_ratio": 0.02, "train.max_steps": 10_000, "train.eval_every": 500,
    },
}  # fmt: skip


def differing(dotted: str) -> str:
    """Where presets have another value than the key's default: `small 0.001, stable 0.0001`."""
    key = KEYS[dotted]
    return ", ".join(
        f"{name} {key.text(values[dotted])}"
        for name, values in PRESETS.items()
        if dotted in values and values[dotted] != key.default
    )
