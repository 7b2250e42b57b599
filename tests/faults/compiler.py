"""torch without its compiler, which no script here uses.

The first DDP or optimizer of a process imports torch._dynamo: as many seconds as torch itself, in each rank. With
WITHOUT_COMPILER=1 they find the few names they ask for and nothing behind them; test_faults.py and test_healthy.py set it,
`bash test.sh --all` and the benchmarks do not. DDP and optimizers themselves are torch's own either way.
"""

from __future__ import annotations

import os
import sys
from types import ModuleType
from typing import Any

import torch


def leave_out() -> None:
    """Before the first DDP or optimizer, and before a process group is made."""
    if os.environ.get("WITHOUT_COMPILER") != "1" or "torch._dynamo" in sys.modules:
        return
    for name, members in (
        ("torch._dynamo", {"disable": _as_it_is, "graph_break": _nothing}),
        ("torch._dynamo.utils", {"get_optimize_ddp_mode": lambda: "ddp_optimizer"}),
        ("torch._dynamo.trace_rules", {"clear_lru_cache": _nothing}),
    ):
        sys.modules[name] = module = ModuleType(name)
        vars(module).update(members)
        parent = torch if name == "torch._dynamo" else sys.modules["torch._dynamo"]
        setattr(parent, name.rpartition(".")[2], module)


def _as_it_is(function: Any, *_words: object, **_more: object) -> Any:
    return function


def _nothing() -> None:
    pass
