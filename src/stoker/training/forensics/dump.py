"""Writes nan_step_N/rank-R/: what an investigation found, and all that is needed to look further. All of it is there,
or nothing.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from stoker.training.forensics import tensorfile
from stoker.training.forensics.banner import banner
from stoker.training.forensics.reading import ACTIVATIONS, BATCH, GRADIENTS, PARAMETERS, REPORT, rank_folder
from stoker.training.forensics.replay import Investigation, Replay
from stoker.training.forensics.trace import clean

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
    """Gives the rank's folder. `parameters`: False where another rank writes the same ones. The banner lies beside as
    banner.txt.
    """
    report = found.report
    final = rank_folder(folder, report.step, report.rank)
    building = os.path.join(os.path.dirname(final), f".rank-{report.rank}.{os.getpid()}.tmp")
    os.makedirs(building)
    try:
        left_out: dict[str, str] = {} if parameters else {PARAMETERS: "the same on every rank: written by another one"}
        about = {"step": str(report.step), "rank": str(report.rank)}
        weights = {clean(name): one.detach() for name, one in model.named_parameters()} if parameters else {}
        gradients = {clean(name): one.grad for name, one in model.named_parameters() if one.grad is not None}
        tensorfile.write(
            os.path.join(building, ACTIVATIONS),
            found.tensors,
            {**about, **{f"cut {name}": cut for name, cut in found.cuts.items()}},
        )
        for name, tensors in ((GRADIENTS, gradients), (PARAMETERS, weights)):
            _write_if_room(os.path.join(building, name), tensors, about, left_out)
        _write_text(os.path.join(building, BATCH), json.dumps(_batch(replay, decode), indent=1))
        files = {"cut": dict(found.cuts), "left_out": left_out}
        _write_text(os.path.join(building, REPORT), json.dumps({"report": report.to_json(), "files": files}, indent=1))
        _write_text(os.path.join(building, "banner.txt"), banner(report, final) + "\n")
        _into_place(building, final)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise
    return final


def _write_if_room(path: str, tensors: dict[str, Tensor], about: dict[str, str], left_out: dict[str, str]) -> None:
    name = os.path.basename(path)
    if name in left_out:
        return
    need, have = tensorfile.bytes_of(tensors), shutil.disk_usage(os.path.dirname(path)).free
    if need + SPARE > have and need > SPARE // 16:  # small files are always worth a try
        left_out[name] = f"{need / 1e9:.1f} GB needed, {have / 1e9:.1f} GB free"
        return
    tensorfile.write(path, tensors, about)


def _batch(replay: Replay, decode: Decode | None) -> dict[str, Any]:
    samples: list[dict[str, Any]] = []
    for number, one in enumerate(replay.micro_batches):
        rows = one.inputs.reshape(len(one.sample_ids), -1).tolist() if one.inputs is not None and one.sample_ids else []
        wanted = (
            one.targets.reshape(len(one.sample_ids), -1).tolist() if one.targets is not None and one.sample_ids else []
        )
        for position, sample in enumerate(one.sample_ids):
            tokens = [int(token) for token in rows[position]] if rows else []
            samples.append(
                {
                    "micro_batch": number,
                    "id": int(sample),
                    "tokens": tokens,
                    "text": decode(tokens) if decode is not None and tokens else None,
                    "targets": sum(1 for target in wanted[position] if target != replay.ignore_index)
                    if wanted
                    else None,
                }
            )
    return {"schema": 1, "samples": samples}


def _write_text(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8", errors="backslashreplace") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _into_place(building: str, final: str) -> None:
    """A restarted attempt that fails at the same step replaces the one before."""
    parent = os.path.dirname(final)
    old = building + ".old"
    if os.path.exists(final):
        os.rename(final, old)
    os.rename(building, final)
    handle = os.open(parent, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
    if os.path.exists(old):
        shutil.rmtree(old)
