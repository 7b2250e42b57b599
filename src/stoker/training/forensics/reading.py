"""Reads nan_step_N/ back, for `stoker nan`. No torch: a safetensors file is a JSON header and bytes."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from typing import Any, TypeVar

from stoker.contract import typed_values
from stoker.contract.errors import EX_DATAERR, EX_NOINPUT, Refusal, parsing
from stoker.contract.frozen import frozen
from stoker.contract.options import suggest
from stoker.contract.safe_io import read_json
from stoker.contract.tensor_header import Header, Tensor, read_header
from stoker.training.forensics.report import Report, TensorStats

REPORT, BATCH = "report.json", "batch.json"
PARAMETERS, GRADIENTS, ACTIVATIONS = "parameters.safetensors", "gradients.safetensors", "activations.safetensors"
_TENSORS = (ACTIVATIONS, GRADIENTS, PARAMETERS)
_SAMPLE = {
    "id": "int",
    "micro_batch?": "int | None",
    "targets?": "int | None",
    "tokens?": "list[int] | None",
    "text?": "str | None",
}
_PLAIN = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "<i1", "U8": "<u1",
    "BOOL": "<u1",
}  # fmt: skip
Read = TypeVar("Read")
_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@frozen
class RankDump:
    folder: str
    report: Report
    cut: dict[str, str]
    left_out: dict[str, str]


@frozen
class Shown:
    stats: TensorStats
    file: str
    bad: tuple[tuple[tuple[int, ...], str], ...]  # index and value of the first ones
    cut: str = ""


def step_folder(folder: str, step: int) -> str:
    return os.path.join(folder, f"nan_step_{step}")


def rank_folder(folder: str, step: int, rank: int) -> str:
    return os.path.join(step_folder(folder, step), f"rank-{rank}")


def newest(folder: str) -> str | None:
    """The step folder in it, or in a folder of it, that was written last; itself, if it is one."""
    if re.fullmatch(r"nan_step_\d+", os.path.basename(os.path.abspath(folder))):
        return folder
    found = []
    for above in (folder, *(entry.path for entry in os.scandir(folder) if entry.is_dir())):
        found += [
            entry.path for entry in os.scandir(above) if entry.is_dir() and re.fullmatch(r"nan_step_\d+", entry.name)
        ]
    return max(found, key=lambda path: (os.path.getmtime(path), path), default=None)


def ranks(folder: str) -> list[RankDump]:
    """Every rank's, in order. `folder` is a step's or one rank's."""
    if os.path.exists(os.path.join(folder, REPORT)):
        with parsing(folder):
            return [_dump(folder)]
    numbers = sorted(int(name[5:]) for name in os.listdir(folder) if re.fullmatch(r"rank-[0-9]+", name))
    if not numbers:
        raise Refusal(
            f"{folder} holds no rank's report; a NaN dump is a folder nan_step_N with rank-0, rank-1 …", EX_NOINPUT
        )
    with parsing(folder):
        return [_dump(os.path.join(folder, f"rank-{number}")) for number in numbers]


def _dump(folder: str) -> RankDump:
    path = os.path.join(folder, REPORT)
    data: Any = _read_with(read_json, path)
    try:
        found = typed_values.read_fields(
            {"report": "Any", "files?": {"cut?": "dict[str, str]", "left_out?": "dict[str, str]"}}, data
        )
        files = found.get("files", {})
        return RankDump(folder, Report.from_json(found["report"]), files.get("cut", {}), files.get("left_out", {}))
    except ValueError as problem:
        raise Refusal(f"{path} is not a report of this version: {problem}", EX_DATAERR) from problem


def texts(dump: RankDump) -> list[dict[str, Any]]:
    """The samples of the report, or all of the batch where it names none: id, tokens, text."""
    path = os.path.join(dump.folder, BATCH)
    if not os.path.exists(path):
        return []
    with parsing(path):
        data: Any = _read_with(read_json, path)
        try:
            samples = [
                typed_values.read_fields(_SAMPLE, sample)
                for sample in typed_values.read_fields({"samples": "list[Any]"}, data)["samples"]
            ]
        except ValueError as problem:
            raise Refusal(f"{path} is damaged: {problem}", EX_DATAERR) from problem
        wanted = set(dump.report.sample_ids)
        return [one for one in samples if not wanted or one.get("id") in wanted]


def _read_with(reader: Callable[[str], Read], path: str) -> Read:
    try:
        return reader(path)
    except FileNotFoundError as problem:
        raise Refusal(f"{path} does not exist", EX_NOINPUT) from problem
    except OSError as problem:
        raise Refusal(f"{path} can't be read: {problem.strerror}", EX_NOINPUT) from problem
    except ValueError as problem:
        raise Refusal(f"{path} is damaged: {problem}", EX_DATAERR) from problem


def show(dump: RankDump, name: str, most: int = 8) -> Shown:
    """A tensor by its name; `gradients/layers.0.mlp.down.weight` where several files have it."""
    with parsing(dump.folder):
        path, found, header = _found(dump, name)
    tensor = found.partition("/")[2]
    return _read(path, found, header.tensors[tensor], header.metadata.get(f"cut {tensor}", ""), most)


def _found(dump: RankDump, name: str) -> tuple[str, str, Header]:
    """(its file, the name with the file's, what the file says of itself)."""
    wanted, _, rest = name.partition("/")
    known: list[str] = []
    for file in _TENSORS:
        path = os.path.join(dump.folder, file)
        kind = file.removesuffix(".safetensors")
        if not os.path.exists(path):
            continue
        header = _read_with(read_header, path)
        known += [f"{kind}/{tensor}" for tensor in header.tensors]
        sought = rest if wanted == kind and rest else name
        if sought in header.tensors and (wanted == kind or not rest):
            return path, f"{kind}/{sought}", header
    raise Refusal(f"no tensor {name} in {dump.folder}{suggest(name, known)}", EX_NOINPUT)


def _read(path: str, name: str, tensor: Tensor, cut: str, most: int) -> Shown:
    import numpy as np

    dtype, sizes = tensor.dtype, tensor.shape
    if dtype not in _PLAIN and dtype != "BF16":
        raise Refusal(f"{name} is {dtype}, which can't be shown here; safetensors and torch read {path}", EX_DATAERR)
    count = math.prod(sizes)
    raw = (
        np.memmap(path, np.uint16 if dtype == "BF16" else np.dtype(_PLAIN[dtype]), "r", tensor.begin, (count,))
        if count
        else np.zeros(0)
    )
    nan = inf = 0
    low, high = math.inf, -math.inf
    bad: list[tuple[tuple[int, ...], str]] = []
    for begin in range(0, count, 1 << 24):
        piece = raw[begin : begin + (1 << 24)]
        values = (piece.astype(np.uint32) << 16).view(np.float32) if dtype == "BF16" else piece
        good = np.isfinite(values)
        nan, inf = nan + int(np.isnan(values).sum()), inf + int(np.isinf(values).sum())
        if good.any():
            low, high = min(low, float(values[good].min())), max(high, float(values[good].max()))
        for place in np.flatnonzero(~good)[: most - len(bad)]:
            bad.append(
                (tuple(int(one) for one in np.unravel_index(begin + int(place), sizes)), f"{float(values[place]):g}")
            )
    ends = (low, high, max(abs(low), abs(high))) if low <= high else (None, None, None)
    return Shown(
        TensorStats(name, sizes, _NAMES.get(dtype, dtype.lower()), count, nan, inf, *ends), path, tuple(bad), cut
    )
