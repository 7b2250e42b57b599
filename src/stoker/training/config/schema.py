"""The whole configuration of a training run: one frozen shape of each part's own settings. No torch here."""

from __future__ import annotations

from typing import Any, get_type_hints

from stoker.contract import limits
from stoker.contract.frozen import frozen
from stoker.contract.units import parse_bytes
from stoker.training.checkpoint.config import CheckpointConfig
from stoker.training.data.config import DataConfig
from stoker.training.evaluate.config import DensityConfig, DiversityConfig, EvaluateConfig
from stoker.training.forensics.config import NanConfig
from stoker.training.generate.config import GenerateConfig
from stoker.training.loop.config import TrainConfig
from stoker.training.model.config import AdapterConfig, ModelConfig
from stoker.training.optim.config import BatchConfig, OptimConfig
from stoker.training.parallel.config import ComputeConfig, ParallelConfig
from stoker.training.reward.config import DpoConfig, RewardConfig
from stoker.training.rl.config import GrpoConfig
from stoker.training.tokenizer.config import TokenizerConfig


@frozen
class NeedsConfig:
    gpus: int = limits.COUNT("refuse to start on a machine with fewer GPUs", 0)
    vram: int = limits.NOT_NEGATIVE(
        "refuse to start where GPUs with this much memory are missing, e.g. 40GB", 0, parse=parse_bytes, metavar="SIZE"
    )


@frozen
class Config:
    preset: str
    model: ModelConfig
    adapter: AdapterConfig
    tokenizer: TokenizerConfig
    data: DataConfig
    batch: BatchConfig
    optim: OptimConfig
    parallel: ParallelConfig
    compute: ComputeConfig
    train: TrainConfig
    checkpoint: CheckpointConfig
    nan: NanConfig
    reward: RewardConfig
    dpo: DpoConfig
    generate: GenerateConfig
    density: DensityConfig
    grpo: GrpoConfig
    evaluate: EvaluateConfig
    diversity: DiversityConfig
    needs: NeedsConfig


SECTIONS: dict[str, type[Any]] = {name: part for name, part in get_type_hints(Config).items() if name != "preset"}
ABOUT = {
    "model": "the decoder's shape", "adapter": "small matrices that learn beside frozen weights", "tokenizer": "text to tokens", "data": "where the tokens come from", "batch": "how many tokens a step has",
    "optim": "optimizer and schedule", "parallel": "how ranks share the work", "compute": "precision, kernels, memory", "train": "how long, and what is reported",
    "checkpoint": "what is kept, and where a run resumes from", "nan": "NaN and Inf",
    "reward": "stage reward: which of two answers is the better", "dpo": "stage dpo: learning from preference pairs",
    "generate": "how answers are written",
    "density": "stage density: weights of prompts", "grpo": "stage grpo: learning from rewards", "evaluate": "stage evaluate: questions with answers",
    "diversity": "stage diversity: two models' answers compared",
    "needs": "what a machine must have: refused before the start otherwise",
}  # fmt: skip
