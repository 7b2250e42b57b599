"""About how long, how much memory and disk a stage takes, from its shape and tokens. Pure; said with "about"."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stoker.contract.frozen import frozen, options_of, replace
from stoker.training.model.config import ModelConfig
from stoker.training.model.config import parameters as parameters_of

ANSWER = 0.4  # of `new_tokens` that answers have on average
QUESTIONS = 600  # where a file's own number is not known before it is made
TOKENIZER_BYTES_PER_S = 4e6
MOMENTS = {"adamw": 8, "adamw8bit": 2}  # bytes a parameter


@frozen
class Pace:
    """What one rank's hardware gets done in such training, not what its sheet promises."""

    flops: float  # a second
    bandwidth: float  # bytes a second: what writing one more token for a batch of answers reads
    start: float  # seconds until a stage's first step
    step: float  # seconds that no step goes below
    words: str = ""  # what hardware that is
    width: int = 2  # bytes of an activation


@frozen
class Estimate:
    seconds: float
    memory: float = 0.0  # bytes of each rank
    disk: float = 0.0  # what stays when it is done
    parameters: int = 0
    tokens: int = 0
    spare: float = 0.0  # bytes of disk that it may take besides, until it is done


@frozen
class Job:
    """A stage with its settings, on some hardware."""

    values: Mapping[str, Any]  # every key's; model.* are those of the model it loads
    vocabulary: int
    pace: Pace
    ranks: int

    @property
    def size(self) -> int:
        """Parameters."""
        shape = ModelConfig(**{name: self.values[f"model.{name}"] for name in options_of(ModelConfig)})
        return parameters_of(replace(shape, vocab_size=self.vocabulary))

    @property
    def per_token(self) -> int:
        """FLOPs of learning one."""
        values, context = self.values, int(self.values["data.context_length"])
        return 6 * self.size + 6 * int(values["model.layers"]) * int(values["model.dim"]) * context

    @property
    def disk(self) -> tuple[float, float]:
        """(what stays, with the exported weights; what it may take besides: the best checkpoint and one under way)."""
        values, kind = self.values, self.values["optim.kind"]
        # Weights in fp32 and two moments; Muon has one, of all but the embeddings.
        embeddings = self.vocabulary * int(values["model.dim"]) * (1 if values["model.tied"] else 2)
        saved = 8 * self.size + 4 * embeddings if kind == "muon" else (4 + MOMENTS[kind]) * self.size
        return int(self.values["checkpoint.keep"]) * saved + 4 * self.size, 2 * saved


def tokenizer(job: Job) -> Estimate:
    seconds = job.values["tokenizer.train_megabytes"] * 1e6 / TOKENIZER_BYTES_PER_S / 4
    return Estimate(job.pace.start + seconds, disk=2e6)


def training(job: Job) -> Estimate:
    """Of a stage that learns from rows."""
    values, pace, ranks, size = job.values, job.pace, job.ranks, job.size
    context, steps = int(values["data.context_length"]), int(values["train.max_steps"])
    tokens = steps * (int(values["batch.tokens"]) or int(values["batch.micro"] or 8) * context * ranks)
    seconds = max(job.per_token * tokens / pace.flops / ranks, steps * pace.step)
    stays, spare = job.disk
    return Estimate(pace.start + seconds, _memory(values, size, job.vocabulary), stays, size, tokens, spare)


def grpo(job: Job) -> Estimate:
    values, pace, ranks, size = job.values, job.pace, job.ranks, job.size
    steps, (prompt, answer) = int(values["train.max_steps"]), _lengths(values)
    answers = steps * values["grpo.prompts_per_step"] * values["grpo.group"]
    tokens = int(answers * (prompt + answer))
    learning = (job.per_token + 2 * size) * tokens / pace.flops / ranks  # and the model it began with, forward
    seconds = max(learning, steps * pace.step) + _writing(answers, answer, size, values, pace, ranks)
    share = -(-int(values["grpo.prompts_per_step"]) // ranks) * int(values["grpo.group"])
    rows = min(int(values["generate.rows"]), share)
    memory = _memory(values, size, job.vocabulary)
    memory += (4 + pace.width) * size + _writes(values, size, rows, pace)  # the reward model, and where it began
    stays, spare = job.disk
    return Estimate(pace.start + seconds, memory, stays, size, tokens, spare)


def asking(job: Job, asked: int = 0) -> Estimate:
    """Of a stage that reads prompts. `asked`: answers that it writes to them."""
    values, pace, ranks, size = job.values, job.pace, job.ranks, job.size
    prompt, answer = _lengths(values)
    reading = 2 * size * (asked or 4000) * prompt / pace.flops / ranks
    memory = 4 * size + (_writes(values, size, int(values["generate.rows"]), pace) if asked else 0)
    seconds = pace.start + reading + _writing(asked, answer, size, values, pace, ranks)
    return Estimate(seconds, memory, 1e6, size, int(asked * (prompt + answer)))


def evaluate(job: Job) -> Estimate:
    return asking(job, (job.values["evaluate.most"] or QUESTIONS) * (1 + job.values["evaluate.draws"]))


def diversity(job: Job) -> Estimate:
    return asking(job, 2 * job.values["diversity.most"] * job.values["diversity.answers"])


def _lengths(values: Mapping[str, Any]) -> tuple[float, float]:
    """Tokens of a prompt and of an answer."""
    return int(values["data.context_length"]) / 3, ANSWER * values["generate.new_tokens"]


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
    """Weights, gradients, two moments in fp32; activations: 17 widths per token in 2 bytes; some logits."""
    tokens = int(values["batch.micro"] or 8) * int(values["data.context_length"])
    kept = tokens * int(values["model.layers"]) * int(values["model.dim"]) * 34
    return 16 * size + kept + min(tokens, 8192) * vocabulary * 8
