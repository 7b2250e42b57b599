"""The files that take longest come first: the workers then end at about the same time, not one of them minutes later."""

from __future__ import annotations

import pytest

SLOWEST = (
    "test_faults", "test_watch_real", "test_pretrain", "test_elastic", "test_slurm", "test_multihost", "test_cluster_check", "test_engine", "test_unmodified",
    "test_dropin", "test_strangers_tokenizers", "test_bad_input", "test_balance", "test_wheel", "test_stopping", "test_templates", "test_endings", "test_protocol",
    "test_speedrun", "test_hosts", "test_families", "test_ninth_review", "test_shared_runs", "test_readme", "test_healthy", "test_hostile_files", "test_generate",
    "test_grpo", "test_record", "test_dpo", "test_sft", "test_exports", "test_second_review", "test_refusals", "test_ladder", "test_remote_agent", "test_burnin",
    "test_unlucky_moments", "test_export_diff", "test_stages", "test_checkpoint", "test_forensics", "test_evaluate", "test_rendezvous",
)  # fmt: skip


def slowest_first(items: list[pytest.Item]) -> None:
    """xdist hands out files in this order, with --no-loadscope-reorder."""
    places = {name: place for place, name in enumerate(SLOWEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))
