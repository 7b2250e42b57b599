"""What a stage would refuse when its turn comes, refused before the first one starts. Pure but for a look whether files
are there.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

from stoker.contract.names import EX_NOINPUT, EX_USAGE, Refusal
from stoker.contract.untrusted import is_count
from stoker.speedrun.options import SpeedrunOptions
from stoker.speedrun.overrides import PATHS
from stoker.speedrun.stages import REPORT, WORLD, Stage, config_of_stage
from stoker.training.config.check import check, check_ranks
from stoker.training.config.layers import Origin
from stoker.training.stages.registry import STAGES

_OR_OF_THE_HUB = ("model.load", "tokenizer.path", "grpo.reward_model", "diversity.baseline", "diversity.compared")
_WRITTEN = ("checkpoint.resume", "checkpoint.folder")  # may be words, or folders that are made


def check_options(options: SpeedrunOptions) -> None:
    ranks, price = options.nproc_per_node, options.price_per_hour
    if (
        ranks is not None
        and ranks.strip().lower() not in ("gpu", "cpu", "auto")
        and not (is_count(ranks) and int(ranks) > 0)
    ):
        raise Refusal(f"--nproc-per-node {ranks}: give a whole number of ranks from 1 up, or gpu, cpu, auto", EX_USAGE)
    if price is not None and not 0 <= price < math.inf:
        raise Refusal(f"--price-per-hour {price:g}: give what an hour costs, from 0 up", EX_USAGE)


def check_stages(stages: Sequence[Stage], ranks: int | None, on_cpu: bool) -> None:
    """`ranks`: of each stage; None where nobody knows yet."""
    for stage in stages:
        if stage.stage in (WORLD, REPORT):
            continue
        config, given = config_of_stage(stage), dict.fromkeys(stage.keys, Origin(f"stage {stage.name}", EX_USAGE))
        check(config, given, True if on_cpu else None)
        if ranks is not None and not STAGES[stage.stage].one_process:
            check_ranks(config, ranks, given)
        try:
            STAGES[stage.stage].check(config)
            for key, value in stage.keys.items():
                _there(key, value)
        except Refusal as refusal:
            raise Refusal(f"stage {stage.name}: {refusal.line}", refusal.code) from refusal


def _there(key: str, value: Any) -> None:
    """Places are there, or will be made; a text is what `--set` gave and is no file."""
    texts = [item for item in (value if isinstance(value, tuple) else (value,)) if isinstance(item, str) and item]
    if key in _WRITTEN or key not in PATHS or not texts:
        return
    if key in ("data.path", "data.validation"):
        if key == "data.path" or not _is_number(texts[0]):
            from stoker.training.data.sources import check_there

            check_there(texts)
        return
    missing = next(
        (text for text in texts if key not in _OR_OF_THE_HUB or text.startswith(("/", "./", "../", "~"))), None
    )
    if missing is not None and not os.path.exists(os.path.expanduser(missing)):
        raise Refusal(f"{key} {missing}: there is no such file or folder", EX_NOINPUT)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
