"""A folder's model and tokenizer, ready to answer on this machine."""

from __future__ import annotations

from collections.abc import Callable

import torch

from stoker.contract.names import EX_UNAVAILABLE, EX_USAGE, Refusal
from stoker.training.generate.finding import told_by
from stoker.training.model import hf, ready
from stoker.training.model.decoder import Decoder
from stoker.training.model.hf_config import shape_of
from stoker.training.parallel.config import ComputeConfig
from stoker.training.tokenizer.tokenizer import Tokenizer
from stoker.training.tokenizer.tokenizer import load as load_tokenizer

CONTEXT = 4096  # at most, unless more is asked for: a cache of Qwen3's 40,960 tokens is 4.7 GB


def device_of(told: str) -> torch.device:
    if told == "cuda" and not torch.cuda.is_available():
        raise Refusal(
            "--device cuda: this machine has no GPU that torch can use; --device cpu works anywhere", EX_UNAVAILABLE
        )
    return torch.device("cuda" if told == "cuda" or (told == "auto" and torch.cuda.is_available()) else "cpu")


def context_of(folder: str, asked: int) -> int:
    """How many tokens a conversation may have: what the model was trained for, or less."""
    most = told_by(folder, "max_position_embeddings")
    trained = most if isinstance(most, int) and most > 1 else CONTEXT
    if asked > trained:
        raise Refusal(f"--context {asked}: the model in {folder} was trained for {trained}", EX_USAGE)
    return asked or min(trained, CONTEXT)


def opened(folder: str, context: int, device: torch.device, say: Callable[[str], None]) -> tuple[Decoder, Tokenizer]:
    compute = ComputeConfig()
    dtype = ready.dtype_of(compute, device)
    ready.arithmetic(compute, dtype)
    words = load_tokenizer(folder)
    shape = shape_of(folder)
    if shape.vocab_size < words.vocab_size:
        raise Refusal(
            f"{folder}: the model has {shape.vocab_size} rows of embedding and the tokenizer {words.vocab_size} tokens",
            EX_USAGE,
        )
    with torch.device(
        "meta"
    ):  # its numbers come from the folder: drawing others first would take longer than reading them
        model = Decoder(shape, context, dtype)
    model.place(device)
    hf.load(model, folder, say)
    return model.eval(), words
