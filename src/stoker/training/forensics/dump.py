"""Writes nan_step_N/rank-R/, whole or not at all: what an investigation found, and what one needs to go on."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from stoker.contract.wholefile import write_whole
from stoker.training.checkpoint.folders import put_in_place
from stoker.training.data.reader import IGNORED
from stoker.training.forensics.banner import banner
from stoker.training.forensics.reading import ACTIVATIONS, BATCH, GRADIENTS, PARAMETERS, REPORT, rank_folder
from stoker.training.forensics.replay import Investigation, Replay
from stoker.training.forensics.statistics import local
from stoker.training.forensics.trace import clean

_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
SPARE = 1 << 30  # bytes the disk keeps for the checkpoint that may follow

Decode = Callable[[list[int]], str]


def write(
    folder: str,
    found: Investigation,
    model: nn.Module,
    replay: Replay,
    *,
    decode: Decode | None = None,
    parameters: bool = True,
) -> str:
    """Gives the rank's folder. `parameters`: False where another rank writes the same ones."""
    report = found.report
    final = rank_folder(folder, report.step, report.rank)
    building = os.path.join(os.path.dirname(final), f".rank-{report.rank}.{os.getpid()}.tmp")
    os.makedirs(building)
    try:
        left_out: dict[str, str] = {} if parameters else {PARAMETERS: "the same on every rank: written by another one"}
        about = {"step": str(report.step), "rank": str(report.rank)}
        weights = {clean(name): one.detach() for name, one in model.named_parameters()} if parameters else {}
        gradients = {clean(name): one.grad for name, one in model.named_parameters() if one.grad is not None}
        write_tensors(
            os.path.join(building, ACTIVATIONS),
            found.tensors,
            {**about, **{f"cut {name}": cut for name, cut in found.cuts.items()}},
        )
        for name, tensors in ((GRADIENTS, gradients), (PARAMETERS, weights)):
            _write_if_room(os.path.join(building, name), tensors, about, left_out)
        write_whole(os.path.join(building, BATCH), json.dumps(_batch(replay, decode), indent=1))
        files = {"cut": dict(found.cuts), "left_out": left_out}
        write_whole(os.path.join(building, REPORT), json.dumps({"report": report.to_json(), "files": files}, indent=1))
        write_whole(os.path.join(building, "banner.txt"), banner(report, final) + "\n")
        put_in_place(building, final)  # a restarted attempt that fails at the same step replaces the one before
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise
    return final


def _write_if_room(path: str, tensors: dict[str, Tensor], about: dict[str, str], left_out: dict[str, str]) -> None:
    name = os.path.basename(path)
    if name in left_out:
        return
    need, have = bytes_of(tensors), shutil.disk_usage(os.path.dirname(path)).free
    if need + SPARE > have and need > SPARE // 16:  # small files are always worth a try
        left_out[name] = f"{need / 1e9:.1f} GB needed, {have / 1e9:.1f} GB free"
        return
    write_tensors(path, tensors, about)


def _batch(replay: Replay, decode: Decode | None) -> dict[str, Any]:
    samples: list[dict[str, Any]] = []
    for number, one in enumerate(replay.micro_batches):
        for position, sample in enumerate(one.sample_ids):
            tokens = _row(one.inputs, position, len(one.sample_ids)) or []
            wanted = _row(one.targets, position, len(one.sample_ids))
            samples.append(
                {
                    "micro_batch": number,
                    "id": int(sample),
                    "tokens": tokens,
                    "text": decode(tokens) if decode is not None and tokens else None,
                    "targets": None if wanted is None else sum(target != IGNORED for target in wanted),
                }
            )
    return {"schema": 1, "samples": samples}


def _row(table: Tensor | None, position: int, count: int) -> list[int] | None:
    return None if table is None else [int(token) for token in table.reshape(count, -1)[position].tolist()]


def bytes_of(tensors: Mapping[str, Tensor]) -> int:
    return sum(local(one).numel() * one.element_size() for one in tensors.values())


def write_tensors(path: str, tensors: Mapping[str, Tensor], about: Mapping[str, str]) -> None:
    """A safetensors file, one tensor after the other: the host needs room for the largest, not for all of them. Of a
    sharded tensor this rank's part; complex ones and other dtypes the format has no name for as fp32.
    """
    header: dict[str, object] = {"__metadata__": dict(about)} if about else {}
    end = 0
    for name, tensor in tensors.items():
        mine = local(tensor)
        size = 4 if mine.dtype not in _NAMES else mine.element_size()
        begin, end = end, end + mine.numel() * size
        header[name] = {"dtype": _NAMES.get(mine.dtype, "F32"), "shape": list(mine.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            mine = local(tensor)
            flat = (mine if mine.dtype in _NAMES else mine.to(torch.float32)).to("cpu").contiguous().reshape(-1)
            if flat.numel():
                file.write(flat.view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())
