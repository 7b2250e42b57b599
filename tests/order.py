"""The files that take longest come first: the workers then end at about the same time, not one of them minutes later."""

from __future__ import annotations

import pytest

SLOWEST = (
    "test_pretrain", "test_grpo", "test_roles", "test_sharded", "test_faults", "test_fit", "test_multihost", "test_cluster_check",
    "test_slurm", "test_watch_real", "test_unmodified", "test_templates", "test_engine", "test_balance", "test_dropin", "test_speedrun",
    "test_bad_input", "test_shared_runs", "test_families", "test_ninth_review", "test_strangers_tokenizers", "test_readme", "test_viewers",
    "test_copying", "test_eleventh_review", "test_elastic", "test_protocol", "test_forensics", "test_adapter_stages",
    "test_hostile_files", "test_stages", "test_sft", "test_refusals", "test_second_review", "test_secrets", "test_data", "test_locks",
    "test_review", "test_strangers_templates", "test_wheel", "test_train_config", "test_record", "test_exports", "test_endings",
    "test_checkpoint", "test_stopping", "test_report", "test_remote_agent", "test_burnin", "test_serve_engine", "test_evaluate",
    "test_samples", "test_generate", "test_adapter_folders", "test_show", "test_clean", "test_fuzz", "test_web", "test_hosts",
    "test_twelfth_review", "test_adapter_refusals", "test_ladder", "test_serve", "test_restarts",
)  # fmt: skip


def slowest_first(items: list[pytest.Item]) -> None:
    """workers.py hands out files in this order, and so does xdist with --no-loadscope-reorder."""
    places = {name: place for place, name in enumerate(SLOWEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))
