"""The last line of a doctor's visit: how many GPUs to use, and the command for it. Pure."""

from __future__ import annotations

from stoker.contract.shapes import Finding
from stoker.control.machine.facts import Examination


def usable(found: Examination, findings: list[Finding]) -> list[int]:
    """Cards nothing failed on, with room for a context."""
    failed = {finding.gpu for finding in findings if finding.level == "fail"}
    cards = dict.fromkeys(gpu.index for gpu in found.machine.gpus if gpu.memory_free is None or gpu.memory_free > 10**9)
    return [index for index in cards if index not in failed]


def advice(found: Examination, findings: list[Finding]) -> str:
    failed = {finding.id for finding in findings if finding.level == "fail" and finding.gpu is None}
    for id, line in (
        ("torch.installed", "torch does not import"),
        ("torch.cuda-build", "this torch can't use the GPUs"),
        ("gpu.count", "CUDA_VISIBLE_DEVICES is wrong"),
    ):
        if id in failed:
            return f"{line}: mend that first"
    if found.machine.gpu_error:
        return "the driver does not answer: `stoker run --nproc-per-node cpu train.py` runs without GPUs"
    cards = list(dict.fromkeys(gpu.index for gpu in found.machine.gpus))
    if not cards:
        return f"no GPU: `stoker run train.py` runs one CPU rank ({found.machine.cores} cores)"
    good = usable(found, findings)
    if not good:
        return f"none of the {len(cards)} GPUs can be used now: `stoker run --wait 10m train.py` waits for one"
    if good == cards:
        return f"use {'the GPU' if len(cards) == 1 else f'all {len(cards)} GPUs'}: `stoker run train.py`"
    return f"use {len(good)} of {len(cards)} GPUs: `stoker run --gpus {','.join(map(str, good))} train.py`"
