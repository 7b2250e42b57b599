"""Reads a YAML or JSON file of settings."""

from __future__ import annotations

import os
from typing import Any

from stoker.contract.names import EX_NOINPUT, Refusal
from stoker.contract.settings import from_mapping
from stoker.training.config.files import load, shipped


def read(settings: type[Any], path: str) -> dict[str, Any]:
    if not os.path.exists(path):
        named = f"; {path} is a config of `stoker train`" if path in shipped() else ""
        raise Refusal(f"config file {path} is not there{named}", EX_NOINPUT)
    return from_mapping(settings, load(path), f"config file {path}")
