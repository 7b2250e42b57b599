"""A data set of the hub, through `datasets`: streamed into a local file of rows once, then read like any other."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from importlib import import_module

from stoker.contract.names import EX_UNAVAILABLE, Refusal
from stoker.contract.quantities import gb
from stoker.contract.wholefile import WholeFile


def fetch(name: str, cache: str, say: Callable[[str], None]) -> str:
    """owner/name or owner/name:subset; its train split."""
    path = os.path.join(cache, "hub", re.sub(r"[^\w.-]", "--", name) + ".jsonl")
    if os.path.exists(path):
        say(f"{name}: the copy in {path} is used; remove it to fetch it again")
        return path
    identity, _, subset = name.partition(":")
    os.environ.setdefault(
        "HF_DATASETS_TRUST_REMOTE_CODE", "0"
    )  # before version 4, `datasets` can run a data set's own Python
    try:
        rows = import_module("datasets").load_dataset(identity, subset or None, split="train", streaming=True)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        say(f"{name}: fetching from the hub")
        with WholeFile(path) as file:
            for row in rows:
                file.write((json.dumps(row, ensure_ascii=False, default=str) + "\n").encode())
            size = file.tell()
    except ImportError as problem:
        raise Refusal(
            f"{name} is not there; if it is a data set of the hub: `pip install datasets`", EX_UNAVAILABLE
        ) from problem
    except (
        OSError,
        ValueError,
        RuntimeError,
    ) as problem:  # what datasets and its HTTP layers raise: no such data set, no network, a gated one
        first = str(problem).strip().splitlines()[0] if str(problem).strip() else type(problem).__name__
        raise Refusal(
            f"{name}: no such file here, and the hub can't give it: {first[:200]}", EX_UNAVAILABLE
        ) from problem
    say(f"{name}: {gb(size)} of rows in {path}")
    return path
