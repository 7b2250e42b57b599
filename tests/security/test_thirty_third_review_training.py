"""The thirty-third review, of the training plane: runs and speedruns that came with a folder, and clients of a server."""

from __future__ import annotations

import os
from pathlib import Path


def sparse(path: Path, size: int) -> None:
    path.touch()
    os.truncate(path, size)


# ---- a run of GRPO that is continued ----
