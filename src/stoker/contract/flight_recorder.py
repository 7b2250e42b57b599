"""Summarizes torch's flight recorder: the newest collectives of a rank in each of its process groups."""

from __future__ import annotations

import math
from typing import Any

from stoker.contract.text import is_digits

HANDLERS = ("fr_trace_json", "dump_nccl_trace_json")  # of torch's worker server; NCCL has its own recorder
DUMPS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")  # the same, called inside the rank
RECENT = 24  # operations per group: ranks that wait for each other are at most a step's buckets apart
# Operations whose sizes must agree between ranks.
_SAME_ON_ALL_RANKS = ("all_reduce", "allreduce", "broadcast", "barrier")
_COMPARED = 8  # newest operations that are compared with the ones before them
_MAX_PAST = 512  # operations that this comparison goes back: a few steps of a model with a hundred buckets
_MAX_MATCH = 32  # consecutive equal operations: a longer match proves nothing more
_MIN_MATCH = 4


def summarize_trace(trace: Any) -> list[dict[str, Any]]:
    """Return for each group its ranks (if torch knows them) and its newest operations.

    `done` says whether an operation has finished, `usual` whether it is the one that usually comes next.
    """
    groups: dict[str, dict[str, Any]] = {}
    history: list[tuple[Any, dict[str, Any]]] = []  # all operations of this rank with a signature, oldest first
    for entry in trace.get("entries") or ():
        name, description = (entry.get("process_group") or ["?", ""])[:2]
        description = "" if description == "undefined" else description
        # A group may have a backend for each kind of device; each numbers its own operations.
        backend = str(entry.get("profiling_name", "")).partition(":")[0]
        new_group: dict[str, Any] = {"name": name, "backend": backend, "about": description, "ops": []}
        group = groups.setdefault(f"{name}|{backend}", new_group)
        seq = entry.get("collective_seq_id") or 0
        if not entry.get("is_p2p") and group["ops"] and seq < group["ops"][-1]["seq"]:
            group["ops"] = []  # the numbers restart: the group was destroyed and created again under its old name
        op: dict[str, Any] = {
            "seq": seq,
            "p2p": (entry.get("p2p_seq_id") or 0) if entry.get("is_p2p") else 0,
            "name": entry.get("profiling_name") or "?",
            "sizes": entry.get("input_sizes") or [],
            "done": bool(entry.get("retired")) or entry.get("state") == "completed",
            "order": entry.get("time_created_ns") or 0,
            "usual": None,
        }
        group["ops"].append(op)
        history.append(((name, *operation_signature(op["name"], op["sizes"])), op))
    history.sort(key=lambda item: item[1]["order"])
    signatures = [signature for signature, _ in history]
    for number in range(max(0, len(history) - _COMPARED), len(history)):
        past = signatures[max(0, number - _MAX_PAST) : number]
        history[number][1]["usual"] = is_usual_next(past, signatures[number])
    for group in groups.values():
        pending = next((n for n, op in enumerate(group["ops"]) if not op["done"]), len(group["ops"]))
        first = max(0, min(pending, len(group["ops"]) - RECENT))
        group["ops"] = group["ops"][first : first + RECENT]
        ranks_text = str((trace.get("pg_config") or {}).get(group["name"], {}).get("ranks", ""))
        ranks = [int(rank) for rank in ranks_text.strip("[]").replace(",", " ").split() if is_digits(rank)]
        if ranks:
            group["ranks"] = ranks
    return list(groups.values())


def is_usual_next(past: list[Any], operation: Any) -> bool | None:
    """Return whether `operation` followed when the end of `past` occurred before, or None if it has not repeated yet."""
    longest, distance = 0, 0
    followers: set[Any] = set()
    # past[end] followed past[:end]: compare the end of past[:end] with the end of past.
    for end in range(len(past) - 1, 0, -1):
        length = 0
        while length < min(end, _MAX_MATCH) and past[end - 1 - length] == past[-1 - length]:
            length += 1
        if length > longest:
            longest, distance, followers = length, len(past) - end, set()
        if length and length == longest:
            followers.add(past[end])
    return operation in followers if longest >= max(_MIN_MATCH, min(distance, _MAX_MATCH)) else None


def merge_traces(traces: list[Any]) -> dict[str, Any]:
    """Return the traces of all backends' recorders as one trace."""
    merged: dict[str, Any] = {"entries": [], "pg_config": {}}
    for trace in traces:
        merged["entries"] += trace.get("entries") or []
        merged["pg_config"].update(trace.get("pg_config") or {})
    return merged


def operation_kind(op: str) -> str:
    """Return the plain name of an operation: gloo:all_reduce, nccl:all_reduce_sparse … → all_reduce."""
    return op.partition(":")[2].partition(" ")[0] or op


def count_elements(sizes: Any) -> list[int]:
    """Return how many elements each tensor has: these must agree between ranks, the shapes need not."""
    return [math.prod(shape) for shape in sizes]


def operation_signature(op: str, sizes: Any) -> tuple[str, tuple[int, ...]]:
    """Return an operation's name and sizes, which must be equal on all ranks that enter it together."""
    return operation_kind(op), tuple(count_elements(sizes)) if sizes_must_agree(op) else ()


def sizes_must_agree(op: str) -> bool:
    return operation_kind(op).startswith(_SAME_ON_ALL_RANKS)
