"""What `tokenizer.path` names. No numpy and no hub: a dry run asks, too."""

from __future__ import annotations

import os
import re

from stoker.contract.errors import EX_NOINPUT, Refusal

FILES = ("tokenizer.json", "tokenizer_config.json")
BYTES = "bytes"


def folder_here(path: str) -> str | None:
    """The folder of this machine that is meant; None: a hub id, or `bytes`. Refuses what is none of these."""
    if path == BYTES:
        return None
    if os.path.isdir(path) or os.path.isfile(path):
        folder = path if os.path.isdir(path) else os.path.dirname(path) or "."
        if not os.path.exists(os.path.join(folder, FILES[0])):
            raise Refusal(
                f"tokenizer {path}: there is no {FILES[0]} in it; found"
                f" {', '.join(sorted(os.listdir(folder))[:5]) or 'nothing'}",
                EX_NOINPUT,
            )
        return folder
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", path) or path.startswith("."):
        raise Refusal(
            f"tokenizer {path} does not exist; give a folder with tokenizer.json, a hub id (owner/name), or `bytes`",
            EX_NOINPUT,
        )
    return None
