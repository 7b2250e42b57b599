"""torchrun's log folder: LOG_DIR/ID_XXXXXXXX/attempt_N/LOCAL_RANK/ with stdout.log, stderr.log and error.json, all
there from the start for `tail -f`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from stoker.contract.names import EX_CANTCREAT, Refusal
from stoker.control.record.writer import RunRecord

_FILES = {1: "stdout.log", 2: "stderr.log"}


class TorchrunLogs:
    """`streams`, per rank: 1 stdout, 2 stderr, 3 both. `folders`: each rank's, its local rank where all are on one
    machine.
    """

    def __init__(self, log_dir: str, run_id: str) -> None:
        self._log_dir = os.path.abspath(log_dir)
        self._run_id = run_id.replace(os.sep, "_")
        self._folder = ""
        self._restarts = -1
        self._ranks: dict[int, str] = {}
        self._streams: Mapping[int, int] = {}
        try:
            os.makedirs(self._log_dir, exist_ok=True)
        except OSError as problem:
            raise _cannot_write(log_dir, problem) from problem

    def begin(self, folders: Mapping[int, str], streams: Mapping[int, int]) -> None:
        """The next attempt's folders, and the files that will be written, empty."""
        self._restarts += 1
        self._streams = streams
        try:
            if not self._folder:
                import tempfile

                self._folder = tempfile.mkdtemp(prefix=f"{self._run_id}_", dir=self._log_dir)
            self._ranks = {
                rank: os.path.join(self._folder, f"attempt_{self._restarts}", name) for rank, name in folders.items()
            }
            for rank, folder in self._ranks.items():
                os.makedirs(folder, exist_ok=True)
                for path in self._paths(rank).values():
                    open(path, "ab").close()
        except OSError as problem:
            raise _cannot_write(self._log_dir, problem) from problem

    def _paths(self, rank: int) -> dict[int, str]:
        return {
            stream: os.path.join(self._ranks[rank], name)
            for stream, name in _FILES.items()
            if self._streams.get(rank, 0) & stream
        }

    def write(self, record: RunRecord, rank: int, stream: int, data: bytes) -> None:
        path = self._paths(rank).get(stream)
        if path is not None:
            record.output(path, data)

    def error(self, record: RunRecord, rank: int, report: dict[str, Any]) -> None:
        """`report`: in torch's form (errorfile.py)."""
        record.save(os.path.join(self._ranks[rank], "error.json"), report)


def _cannot_write(folder: str, problem: OSError) -> Refusal:
    return Refusal(f"--log-dir {folder} can't be written: {problem.strerror}", EX_CANTCREAT)
