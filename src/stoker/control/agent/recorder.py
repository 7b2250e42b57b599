"""Asks a rank's worker server what torch's flight recorders know. It answers in a thread of its own, with the GIL held
too.
"""

from __future__ import annotations

import os
from typing import Any

from stoker.contract import collectives
from stoker.contract.untrusted import parse_json

ASK_S = 1.0


def flight_recorder(path: str) -> tuple[list[dict[str, Any]], str]:
    """(the digest of its collectives, why there is none)."""
    trace, why = _ask_server(path)
    return (collectives.digest(trace), "") if trace is not None else ([], why)


def timings(path: str) -> list[list[Any]]:
    """[group, number, when it was entered] of its newest collectives: who comes late, and how late."""
    trace, _ = _ask_server(path)
    found: dict[str, list[list[Any]]] = {}
    for entry in (trace or {}).get("entries") or []:
        group, seq = (entry.get("process_group") or ["?"])[0], entry.get("collective_seq_id") or 0
        mine = found.setdefault(group, [])
        if mine and seq < mine[-1][1]:
            mine.clear()  # made anew under its old name
        if not entry.get("is_p2p"):
            mine.append(
                [group, seq, entry.get("time_created_ns") or 0, str(entry.get("profiling_name", "")).partition(":")[0]]
            )
    return sorted((entry for entries in found.values() for entry in entries), key=lambda entry: entry[2])[-400:]


def _ask_server(path: str) -> tuple[dict[str, Any] | None, str]:
    if not os.path.exists(path):
        return None, "no worker server in this rank"
    answers = [_ask_handler(path, name) for name in collectives.HANDLERS]
    traces = [trace for trace, _ in answers if trace is not None]
    return (collectives.joined(traces), "") if traces else (None, answers[0][1])


def _ask_handler(path: str, name: str) -> tuple[dict[str, Any] | None, str]:
    import socket

    parts: list[bytes] = []
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(ASK_S)
        connection.connect(path)
        connection.sendall(
            f"POST /handler/{name} HTTP/1.1\r\nHost: rank\r\nConnection: close\r\nContent-Length: 0\r\n\r\n".encode()
        )
        while data := connection.recv(1 << 18):
            parts.append(data)
    except OSError as problem:
        return None, f"the worker server does not answer: {problem}"
    finally:
        connection.close()
    head, _, body = b"".join(parts).partition(b"\r\n\r\n")
    if b" 200 " not in head.partition(b"\r\n")[0]:
        return None, f"the worker server says {head.partition(chr(13).encode())[0].decode('ascii', 'replace')}"
    try:
        found = parse_json(body)
    except ValueError as problem:
        return None, f"the flight recorder's answer can't be read: {problem}"
    return (found, "") if isinstance(found, dict) else (None, "the flight recorder's answer is no trace")
