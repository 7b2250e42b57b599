"""In which phase of a step a rank ran out of GPU memory, by its traceback, and what helps there where the model is in shards. Pure."""

from __future__ import annotations

import re

from stoker.contract.shape import shape
from stoker.contract.shapes import RankEnd

GATHER, BACKWARD, OPTIMIZER, SAVE = "gather", "backward", "optimizer", "save"
_FRAME = re.compile(r'^ *File "([^"\n]{1,400})", line \d+, in ([^\n]{1,200})$', re.MULTILINE)
# Files and functions, innermost last; the first kind that a traceback has decides: a save gathers, a backward pass gathers, too.
_FILES = {
    SAVE: r"torch/distributed/checkpoint/|_state_dict_utils|state_dict_utils|torch/serialization|safetensors/|"
    r"stoker/training/checkpoint/|stoker/training/model/(?:hf_write|hf_stream|pieces)",
    OPTIMIZER: r"torch/optim/|stoker/training/optim/|bitsandbytes/optim/",
}
_FUNCTIONS = {
    SAVE: r"full_tensor|(?:get_|_)?(?:model_|optimizer_|full_)?state_dict|save(?:_pretrained|_model|_checkpoint)?",
    GATHER: r"(?:pre_|wait_for_|_)?unshard|foreach_all_gather\w*|all_gather_\w+|init_all_gather_outputs|alloc_all_gather_outputs|"
    r"_all_gather_flat_param|_alloc_padded_unsharded_flat_param",
    BACKWARD: r"_engine_run_backward|post_backward|foreach_reduce",
}
_SHARDED = re.compile(r"torch/distributed/fsdp/|torch/distributed/tensor/|deepspeed/")
_OWN = re.compile(r"ran out of GPU memory at [^\n]{0,60} of a model in (\d+) shards")  # recipes/memory.py
_WORDS = {
    GATHER: "while weights were gathered",
    BACKWARD: "in the backward pass",
    OPTIMIZER: "in the optimizer step",
    SAVE: "while the model was saved",
}
# Of `stoker train`, and of anybody's script.
_HELPS = {
    GATHER: (
        "--compute.recompute full, or a smaller --batch.micro: activations and two gathered blocks are there at a time; with"
        " --qlora a gathered block is a quarter of its 16-bit size, with --parallel.offload all shards are in host memory",
        "fully_shard every block, the embedding and the head by itself, with reshard_after_forward=True: what is one unit is"
        " gathered at once; then activation checkpointing",
    ),
    BACKWARD: (
        "--parallel.accumulate sharded (no rank holds whole gradients between micro-batches), then --compute.recompute full",
        "don't set_requires_gradient_sync(False) while accumulating: every rank then holds whole gradients; then activation"
        " checkpointing",
    ),
    OPTIMIZER: (
        "--optimizer adamw8bit: 2 bytes of moments a number instead of 8; or --parallel.offload optimizer: moments in host memory",
        "an 8-bit optimizer, or fully_shard(..., offload_policy=CPUOffloadPolicy()): moments in host memory",
    ),
    SAVE: (
        "more room between step and card: --compute.recompute full, or a smaller --batch.micro; a save puts one tensor at a time"
        " together",
        "get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)), or"
        " torch.distributed.checkpoint.save, which keeps shards; on every rank",
    ),
}  # fmt: skip


@shape
class Phase:
    name: str
    helps: str  # nothing: the model is not known to be in shards

    @property
    def words(self) -> str:
        return _WORDS[self.name]


def phase_of(end: RankEnd) -> Phase | None:
    """None: the forward pass, or nobody knows."""
    trace = end.error.traceback if end.error is not None else ""
    frames = _FRAME.findall(trace)
    ours = _OWN.search(end.tail)
    name = next((name for name in (SAVE, GATHER, OPTIMIZER, BACKWARD) if _is_in(name, frames)), None)
    if name is None:
        return None
    if name == GATHER and not any(_SHARDED.search(file) for file, _ in frames):
        return None  # somebody's own all_gather
    sharded = ours is not None or any(_SHARDED.search(file) for file, _ in frames)
    return Phase(name, _HELPS[name][0 if ours is not None else 1] if sharded else "")


def _is_in(name: str, frames: list[tuple[str, str]]) -> bool:
    files, functions = _FILES.get(name), _FUNCTIONS.get(name)
    return any(
        (files is not None and re.search(files, file)) or (functions is not None and re.fullmatch(functions, function))
        for file, function in frames
    )
