"""The files that take longest come first: the workers then end at about the same time, not one of them minutes later."""

from __future__ import annotations

import pytest

SLOWEST = (
    "test_pretrain", "test_faults", "test_watch_real", "test_balance", "test_engine", "test_eleventh_review", "test_elastic", "test_slurm", "test_multihost",
    "test_strangers_tokenizers", "test_templates", "test_dropin", "test_bad_input", "test_unmodified", "test_readme", "test_speedrun", "test_cluster_check",
    "test_grpo", "test_hostile_files", "test_families", "test_sft", "test_adapter_stages", "test_exports", "test_forensics", "test_protocol",
    "test_ninth_review", "test_refusals", "test_checkpoint", "test_adapter_refusals", "test_wheel", "test_stopping", "test_endings", "test_strangers_templates",
    "test_shared_runs", "test_remote_agent", "test_hosts", "test_strangers_caches", "test_adapter_folders", "test_stages", "test_healthy", "test_fuzz",
    "test_generate", "test_review", "test_locks", "test_twelfth_review", "test_strangers_records", "test_chat", "test_second_review", "test_ladder",
    "test_burnin", "test_record", "test_dpo", "test_export_diff", "test_unlucky_moments", "test_evaluate", "test_rendezvous",
)  # fmt: skip


def slowest_first(items: list[pytest.Item]) -> None:
    """xdist hands out files in this order, with --no-loadscope-reorder."""
    places = {name: place for place, name in enumerate(SLOWEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))
