"""The settings that name a model, and a run to resume from: names of runs become folders. No torch."""

from __future__ import annotations

import os
from collections.abc import Callable

from stoker.control.record import run_index
from stoker.training.config.keys import config_of, values_of
from stoker.training.config.resolve import MODEL_KEYS
from stoker.training.config.schema import Config
from stoker.training.generate.finding import find_for_setting


def with_models(
    config: Config, root: str, say: Callable[[str], None], own_name: str | None, remote: bool
) -> tuple[Config, dict[str, str]]:
    """Return the configuration with folders for the runs that it names, and the values that changed (old -> new).

    `root`: the runs folder. `own_name`: the --name of the run that is started, whose own model `latest` does not mean.
    `remote`: the ranks are on other hosts; a path that does not exist here is left to them.
    """
    values, changed = values_of(config), dict[str, str]()

    def is_run(value: str) -> bool:
        if os.path.isdir(value) or run_index.is_latest(value):
            return run_index.is_latest(value)
        return any(value in (run.id, run.name) for run in run_index.own_runs(root))

    for key in MODEL_KEYS:
        value = values[key]
        if not value:
            continue
        # A tokenizer may be `bytes` or a folder without weights. What exists nowhere is refused later, or on its host.
        if (key == "tokenizer.path" or (remote and not os.path.exists(value))) and not is_run(value):
            continue
        found = find_for_setting(value, root, say, own_name or "", scores=key == "grpo.reward_model")
        if found != value:
            values[key] = changed[value] = found
    resume = config.checkpoint.resume
    if resume not in ("auto", "never") and not os.path.exists(resume) and is_run(resume):
        values["checkpoint.resume"] = changed[resume] = os.path.relpath(run_index.find_run(resume, root, say=say).dir)
    return config_of(config.preset, values), changed
