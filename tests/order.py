"""The files that take longest come first: the workers then end at about the same time, not one of them minutes later."""

from __future__ import annotations

import pytest

SLOWEST = (
    "test_faults", "test_watch_real", "test_pretrain", "test_elastic", "test_engine", "test_balance", "test_multihost", "test_slurm", "test_unmodified",
    "test_dpo", "test_grpo", "test_reward", "test_speedrun", "test_wheel", "test_checkpoint", "test_endings", "test_hosts", "test_dropin",
    "test_cluster_check", "test_unlucky_moments", "test_protocol", "test_families", "test_generate", "test_healthy", "test_readme", "test_evaluate",
    "test_forensics", "test_stopping", "test_rendezvous", "test_second_review",
)  # fmt: skip


def slowest_first(items: list[pytest.Item]) -> None:
    """xdist hands out files in this order, with --no-loadscope-reorder."""
    places = {name: place for place, name in enumerate(SLOWEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))
