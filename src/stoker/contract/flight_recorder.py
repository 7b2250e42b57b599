"""What torch's flight recorder knows of a rank's collectives, made small: its last operations per process group."""

from __future__ import annotations

import math
from typing import Any

from stoker.contract.text import is_digits

HANDLERS = ("fr_trace_json", "dump_nccl_trace_json")  # of torch's worker server: NCCL has a recorder of its own
DUMPS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")  # the same from inside
RECENT = 24  # operations per group: ranks that wait for each other are never further apart than a step's buckets
# Operations whose sizes must agree between ranks.
_SAME_EVERYWHERE = ("all_reduce", "allreduce", "broadcast", "barrier")
_JUDGED = 8  # newest operations that are compared with the ones before them
_PAST = 512  # operations that comparison goes back: a few steps of a model with a hundred buckets
_LONG_ENOUGH = 32  # operations in a row that are the same as before: more proves nothing more
_SHORTEST = 4


def summarize_trace(trace: Any) -> list[dict[str, Any]]:
    """Per group: its ranks if torch says them, its newest operations, which are done, which the usual next one."""
    groups: dict[str, dict[str, Any]] = {}
    path: list[tuple[Any, dict[str, Any]]] = []  # all operations of this rank in their order, made comparable
    for entry in trace.get("entries") or ():
        name, about = (entry.get("process_group") or ["?", ""])[:2]
        backend = str(entry.get("profiling_name", "")).partition(":")[0]
        # One group may have a backend for each kind of device, each counting for itself.
        about = "" if about == "undefined" else about
        fresh: dict[str, Any] = {"name": name, "backend": backend, "about": about, "ops": []}
        group = groups.setdefault(f"{name}|{backend}", fresh)
        seq = entry.get("collective_seq_id") or 0
        if not entry.get("is_p2p") and group["ops"] and seq < group["ops"][-1]["seq"]:
            group["ops"] = []  # counted anew: the group was destroyed and made again under its old name
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
        path.append(((name, *operation_signature(op["name"], op["sizes"])), op))
    path.sort(key=lambda step: step[1]["order"])
    for number in range(max(0, len(path) - _JUDGED), len(path)):
        path[number][1]["usual"] = is_usual_next(
            [key for key, _ in path[max(0, number - _PAST) : number]], path[number][0]
        )
    for group in groups.values():
        pending = next((n for n, op in enumerate(group["ops"]) if not op["done"]), len(group["ops"]))
        first = max(0, min(pending, len(group["ops"]) - RECENT))
        group["ops"] = group["ops"][first : first + RECENT]
        told = (trace.get("pg_config") or {}).get(group["name"], {}).get("ranks", "")
        ranks = [int(word) for word in str(told).strip("[]").replace(",", " ").split() if is_digits(word)]
        if ranks:
            group["ranks"] = ranks
    return list(groups.values())


def is_usual_next(past: list[Any], key: Any) -> bool | None:
    """Is this what came next whenever the operations before were the same? None: they have not repeated yet."""
    longest, nearest = 0, 0
    followers: set[Any] = set()
    # past[then] followed on past[:then], whose end is compared with the end of the whole.
    for then in range(len(past) - 1, 0, -1):
        same = 0
        while same < min(then, _LONG_ENOUGH) and past[then - 1 - same] == past[-1 - same]:
            same += 1
        if same > longest:
            longest, nearest, followers = same, len(past) - then, set()
        if same and same == longest:
            followers.add(past[then])
    return key in followers if longest >= max(_SHORTEST, min(nearest, _LONG_ENOUGH)) else None


def merge_traces(traces: list[Any]) -> dict[str, Any]:
    """What the recorders of all backends know, as one trace."""
    found: dict[str, Any] = {"entries": [], "pg_config": {}}
    for trace in traces:
        found["entries"] += trace.get("entries") or []
        found["pg_config"].update(trace.get("pg_config") or {})
    return found


def operation_kind(op: str) -> str:
    """gloo:all_reduce, nccl:all_reduce_sparse … → all_reduce."""
    return op.partition(":")[2].partition(" ")[0] or op


def count_elements(sizes: Any) -> list[int]:
    """Return how many numbers each tensor has: these must agree between ranks, the shapes need not."""
    return [math.prod(shape) for shape in sizes]


def operation_signature(op: str, sizes: Any) -> tuple[str, tuple[int, ...]]:
    """What must be the same on all ranks of a group that enter one operation together."""
    return operation_kind(op), tuple(count_elements(sizes)) if sizes_must_agree(op) else ()


def sizes_must_agree(op: str) -> bool:
    return operation_kind(op).startswith(_SAME_EVERYWHERE)
