"""Files that are whole or not there."""

from __future__ import annotations

import json
import os
from typing import Any


def write_json(path: str, value: Any) -> None:
    temporary = f"{path}.{os.getpid()}.tmp"
    with open(temporary, "w", encoding="utf-8", errors="backslashreplace") as file:  # names that aren't UTF-8: \\udc80 is JSON
        file.write(json.dumps(value, indent=1, ensure_ascii=False) + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def sync_folder(path: str) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
