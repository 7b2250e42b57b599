"""The files that take longest come first: four workers then end at about the same time, not one of them minutes later."""

from __future__ import annotations

import pytest

SLOWEST = (
    "test_watch_real", "test_faults", "test_multihost", "test_pretrain", "test_grpo", "test_speedrun", "test_slurm", "test_elastic", "test_wheel",
    "test_unmodified", "test_dropin", "test_checkpoint", "test_readme", "test_balance", "test_evaluate", "test_hosts", "test_unlucky_moments",
    "test_healthy", "test_forensics", "test_reward", "test_dpo", "test_engine", "test_families", "test_cluster_check", "test_endings", "test_stopping", "test_rendezvous", "test_protocol",
)  # fmt: skip


def slowest_first(items: list[pytest.Item]) -> None:
    """xdist hands out files in this order, with --no-loadscope-reorder."""
    places = {name: place for place, name in enumerate(SLOWEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))
