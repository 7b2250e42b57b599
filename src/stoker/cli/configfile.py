"""Reads a YAML or JSON file of settings."""

from __future__ import annotations

from typing import Any

from stoker.contract.settings import from_mapping
from stoker.training.config.files import load


def read(settings: type[Any], path: str) -> dict[str, Any]:
    return from_mapping(settings, load(path), f"config file {path}")
