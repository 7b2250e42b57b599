"""The files that take longest come first: the workers then end at about the same time, not one of them minutes later."""

from __future__ import annotations

import pytest

SLOWEST = (
    "test_fit", "test_pretrain", "test_grpo", "test_chain_on_device", "test_stages_on_device", "test_speedrun", "test_sharded", "test_roles", "test_templates",
    "test_downloaded_data", "test_engine", "test_families", "test_grpo_server", "test_slurm", "test_multihost", "test_readme",
    "test_unreadable_files", "test_bad_input", "test_cluster_check", "test_dropin",
    "test_balance", "test_faults", "test_downloaded_models",
    "test_shared_server", "test_adapter_stages", "test_unmodified", "test_ports_and_pages", "test_forensics", "test_report", "test_train_config",
    "test_stages", "test_refusals", "test_watch_real", "test_wheel", "test_serve_engine",
    "test_generate", "test_adapter_folders", "test_data", "test_record", "test_endings", "test_show",
    "test_shared_caches", "test_checkpoint", "test_sft", "test_elastic", "test_copying",
    "test_clean", "test_serve_group", "test_samples", "test_stopping", "test_secrets", "test_metrics", "test_hf",
    "test_hosts", "test_netcluster", "test_adapters", "test_exports", "test_dialects", "test_formats",
    "test_who_is_signalled", "test_serve_weights", "test_fuzz", "test_chat", "test_top", "test_output",
    "test_modes", "test_adapter_refusals", "test_own_template_score", "test_web", "test_reward", "test_other_users_runs",
    "test_guide", "test_packed_files", "test_ladder", "test_site", "test_serve", "test_testing", "test_exit_codes", "test_dpo",
    "test_diversity", "test_catalogue", "test_workers", "test_burnin", "test_habits", "test_healthy",
    "test_rewards", "test_export_diff", "test_unlucky_moments", "test_reruns", "test_gguf", "test_host_kept", "test_notify",
    "test_calling", "test_style", "test_world", "test_doctor", "test_tokenizer", "test_packing",
    "test_optim", "test_ssh", "test_evaluate", "test_foreign_text",
    "test_shared_weights", "test_terminal", "test_rendezvous",
    "test_torch", "test_gate", "test_goodput_simulator", "test_model", "test_docs", "test_restarts",
)  # fmt: skip


def slowest_first(items: list[pytest.Item]) -> None:
    """workers.py hands out files in this order, and so does xdist with --no-loadscope-reorder."""
    places = {name: place for place, name in enumerate(SLOWEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))
