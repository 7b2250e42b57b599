"""train.log_samples: which samples a rank learned at which step, to prove that none is missed and none comes twice."""

from __future__ import annotations

import json
import os

from stoker.contract.wholefile import APPEND


class SampleLog:
    def __init__(self, folder: str, rank: int, resumed_at: int) -> None:
        os.makedirs(folder, exist_ok=True)
        handle = os.open(os.path.join(folder, f"samples-rank-{rank}.jsonl"), APPEND, 0o644)
        self._file = os.fdopen(handle, "a", encoding="utf-8", buffering=1)
        self._from = resumed_at

    def write(self, step: int, ids: list[int]) -> None:
        """`from`: the step this attempt began at; of a step that was made twice, the line with the larger `from`
        counts.
        """
        self._file.write(json.dumps({"step": step, "from": self._from, "ids": ids}) + "\n")

    def close(self) -> None:
        self._file.close()
