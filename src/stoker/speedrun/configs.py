"""A stage's keys as the configuration its recipe will have. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stoker.speedrun.stages import File, From, Place, Stage
from stoker.training.config.keys import config_of
from stoker.training.config.resolve import combine
from stoker.training.config.schema import Config
from stoker.training.config.stages import STAGES


def config_of_stage(
    stage: Stage, path: Callable[[Place], str] = lambda place: place.word if isinstance(place, File) else place.path
) -> Config:
    """`path`: where a place is."""

    def plain(value: Any) -> Any:
        if isinstance(value, (From, File)):
            return path(value)
        return tuple(plain(item) for item in value) if isinstance(value, tuple) else value

    return config_of(
        stage.below,
        combine(stage.below, [STAGES[stage.stage].defaults, {key: plain(value) for key, value in stage.keys.items()}]),
    )
