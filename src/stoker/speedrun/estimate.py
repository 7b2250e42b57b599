"""About how long, how much memory and how much disk a stage takes, from its shape and its tokens. Pure; always said
with "about".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stoker.contract.shape import options_of, replace, shape
from stoker.speedrun.stages import REPORT, WORLD, File, From, Stage
from stoker.training.config.resolve import combine
from stoker.training.model.config import ModelConfig
from stoker.training.model.rows import parameters as parameters_of


@shape
class Pace:
    """What one rank's hardware gets done in such training, not what its sheet promises."""

    flops: float  # a second
    bandwidth: float  # bytes a second: what writing one more token for a batch of answers reads
    start: float  # seconds until a stage's first step
    step: float  # seconds that no step goes below
    words: str = ""  # what hardware that is
    width: int = 2  # bytes of an activation


CORE = Pace(2.2e10, 1e10, 6.0, 0.01, width=4)
CARDS = {"H200": Pace(3.6e14, 3.5e12, 20.0, 0.02), "H100": Pace(3.4e14, 2.5e12, 20.0, 0.02), "A100": Pace(1.4e14, 1.5e12, 20.0, 0.02),
         "B200": Pace(7e14, 6e12, 20.0, 0.02), "4090": Pace(8e13, 8e11, 20.0, 0.02), "A40": Pace(6e13, 6e11, 20.0, 0.02)}  # fmt: skip
OTHER_CARD = Pace(4e13, 5e11, 20.0, 0.02)

WORLD_SECONDS, WORLD_BYTES = 4.0, 16e6  # of size 1
REPORT_SECONDS = 6.0
ANSWER = 0.4  # of `new_tokens` that answers have on average
QUESTIONS = 600  # where a file's own number is not known before it is made
TOKENIZER_BYTES_PER_S = 4e6
MOMENTS = {"adamw": 8, "adamw8bit": 2}  # bytes a parameter


@shape
class Estimate:
    seconds: float
    memory: float = 0.0  # bytes of each rank
    disk: float = 0.0  # what stays when it is done
    parameters: int = 0
    tokens: int = 0
    spare: float = 0.0  # bytes of disk that it may take besides, until it is done


def pace_of(cards: Sequence[str | None], cores: int, ranks: int, gpus: bool) -> Pace:
    """Of one rank; CPU ranks share the cores."""
    if not gpus:
        return replace(CORE, flops=CORE.flops * cores / ranks, words=f"{cores} CPU core{'s' if cores > 1 else ''}")
    name = next((name for name in cards if name), "") or ""
    return replace(
        next((pace for word, pace in CARDS.items() if word in name), OTHER_CARD),
        words=name or "GPUs of an unknown kind",
    )


def estimates(stages: Sequence[Stage], pace: Pace, ranks: int) -> dict[str, Estimate]:
    """Of every stage. What loads the chain's model has base's shape."""
    values = {stage.name: _values(stage) for stage in stages if stage.stage not in (WORLD, REPORT)}
    vocabulary = values["tokenizer"]["tokenizer.vocab_size"]
    shape_of_base = {name: value for name, value in values["base"].items() if name.startswith("model.")}
    size = next((float(stage.keys["size"]) for stage in stages if stage.stage == WORLD), 0.0)
    found: dict[str, Estimate] = {}
    for stage in stages:
        if stage.stage == WORLD:
            found[stage.name] = Estimate(WORLD_SECONDS * size, disk=WORLD_BYTES * size)
        elif stage.stage == REPORT:
            found[stage.name] = Estimate(REPORT_SECONDS)
        else:
            found[stage.name] = _estimate(stage, {**values[stage.name], **shape_of_base}, vocabulary, pace, ranks)
    return found


def _values(stage: Stage) -> dict[str, Any]:
    plain = {name: value for name, value in stage.keys.items() if not isinstance(value, (From, File, tuple))}
    return combine(stage.below, [plain])


def parameters(values: Mapping[str, Any], vocabulary: int) -> int:
    shape = ModelConfig(**{name: values[f"model.{name}"] for name in options_of(ModelConfig)})
    return parameters_of(replace(shape, vocab_size=vocabulary))


def _estimate(stage: Stage, values: Mapping[str, Any], vocabulary: int, pace: Pace, ranks: int) -> Estimate:
    if stage.stage == "tokenizer":
        return Estimate(pace.start + values["tokenizer.train_megabytes"] * 1e6 / TOKENIZER_BYTES_PER_S / 4, disk=2e6)
    size = parameters(values, vocabulary)
    context, steps = int(values["data.context_length"]), int(values["train.max_steps"])
    per_token = 6 * size + 6 * int(values["model.layers"]) * int(values["model.dim"]) * context
    saved = _checkpoint(values, size, vocabulary)
    stays, spare = (
        int(values["checkpoint.keep"]) * saved + 4 * size,
        2 * saved,
    )  # with the exported weights; besides, the best one and one under way
    prompt, answer = context / 3, ANSWER * values["generate.new_tokens"]
    if stage.stage in ("pretrain", "midtrain", "sft", "reward"):
        tokens = steps * (int(values["batch.tokens"]) or int(values["batch.micro"] or 8) * context * ranks)
        seconds = max(per_token * tokens / pace.flops / ranks, steps * pace.step)
        return Estimate(pace.start + seconds, _memory(values, size, vocabulary), stays, size, tokens, spare)
    if stage.stage == "grpo":
        answers = steps * values["grpo.prompts_per_step"] * values["grpo.group"]
        tokens = int(answers * (prompt + answer))
        learning = (per_token + 2 * size) * tokens / pace.flops / ranks  # and the model it began with, forward
        seconds = max(learning, steps * pace.step) + _writing(answers, answer, size, values, pace, ranks)
        rows = min(
            int(values["generate.rows"]), -(-int(values["grpo.prompts_per_step"]) // ranks) * int(values["grpo.group"])
        )
        memory = (
            _memory(values, size, vocabulary) + (4 + pace.width) * size + _writes(values, size, rows, pace)
        )  # and the reward model, and where it began
        return Estimate(pace.start + seconds, memory, stays, size, tokens, spare)
    if stage.stage == "evaluate":
        asked = (values["evaluate.most"] or QUESTIONS) * (1 + values["evaluate.draws"])
    elif stage.stage == "diversity":
        asked = 2 * values["diversity.most"] * values["diversity.answers"]
    else:
        asked = 0
    reading = 2 * size * (asked or 4000) * prompt / pace.flops / ranks
    memory = 4 * size + (_writes(values, size, int(values["generate.rows"]), pace) if asked else 0)
    seconds = pace.start + reading + _writing(asked, answer, size, values, pace, ranks)
    return Estimate(seconds, memory, 1e6, size, int(asked * (prompt + answer)))


def _writing(answers: float, length: float, size: int, values: Mapping[str, Any], pace: Pace, ranks: int) -> float:
    """A step of a batch of answers reads all weights once, computes 2 FLOPs per weight and row, and starts its kernels."""
    rows = min(max(answers / ranks, 1), float(values["generate.rows"]))
    a_step = max(4 * size / pace.bandwidth, 2 * size * rows / (pace.flops / 3), 0.0005 * values["model.layers"])
    return float(answers / ranks / rows * length * a_step)


def _writes(values: Mapping[str, Any], size: int, rows: int, pace: Pace) -> float:
    """Keys and values of so many answers at once, and the weights as they are read for each token."""
    layers, shared, width, context = (
        int(values[name]) for name in ("model.layers", "model.kv_heads", "model.head_dim", "data.context_length")
    )
    return float(pace.width * (2 * rows * context * layers * shared * width + size))


def _memory(values: Mapping[str, Any], size: int, vocabulary: int) -> float:
    """Weights, gradients and two moments in fp32; a block's activations are some 17 widths per token in 2 bytes; a
    piece of the logits.
    """
    tokens = int(values["batch.micro"] or 8) * int(values["data.context_length"])
    kept = tokens * int(values["model.layers"]) * int(values["model.dim"]) * 34
    return 16 * size + kept + min(tokens, 8192) * vocabulary * 8


def _checkpoint(values: Mapping[str, Any], size: int, vocabulary: int) -> float:
    """Weights in fp32 and two moments; Muon has one, of all but the embeddings."""
    if values["optim.kind"] == "muon":
        embeddings = vocabulary * int(values["model.dim"]) * (1 if values["model.tied"] else 2)
        return 8 * size + 4 * embeddings
    return (4 + MOMENTS[values["optim.kind"]]) * size


def room(found: Sequence[Estimate]) -> float:
    """Bytes of disk that stages need, one after the other."""
    return sum(one.disk for one in found) + max((one.spare for one in found), default=0.0)


def left(estimated: Mapping[str, float], took: Mapping[str, float], waiting: Sequence[str]) -> float:
    """Seconds that the waiting stages take, corrected by how the done ones compare with their estimates."""
    known = [(took[name], estimated[name]) for name in took if estimated.get(name, 0) > 0]
    ratio = sum(one for one, _ in known) / sum(one for _, one in known) if known else 1.0
    return sum(estimated.get(name, 0.0) for name in waiting) * ratio
