"""The launcher of `stoker.launch`, in a process of its own: python -c ... CALLER REPORT [options] -- script

CALLER: the pid that waits; when it is gone the run ends. REPORT: a file for the run directory, or a refusal.
"""

from __future__ import annotations

import json
import signal
import sys

from stoker.cli import run
from stoker.contract.errors import Refusal
from stoker.control.agent.prctl import die_with_parent
from stoker.control.cluster import transport
from stoker.control.launch import background
from stoker.control.launch.children import restore_secret_options
from stoker.control.launch.run import launch


class CallersReport(background.StartReport):
    def __init__(self, path: str) -> None:
        super().__init__(-1)
        self._path = path

    def started(self, run_dir: str) -> None:
        self._write({"run_dir": run_dir})

    def refused(self, refusal: Refusal) -> None:
        self._write({"refused": refusal.line, "cause": refusal.cause, "code": refusal.code})

    def _write(self, data: dict[str, object]) -> None:
        with open(self._path, "w", encoding="utf-8") as file:
            json.dump(data, file)


def main(argv: list[str]) -> int:
    caller, path, *words = argv
    die_with_parent(int(caller), signal.SIGTERM)  # the ranks may save
    report = CallersReport(path)
    try:
        request = run.parse(restore_secret_options(words))
    except Refusal as refusal:
        print(f"stoker: {refusal.line}", file=sys.stderr)
        report.refused(refusal)
        return refusal.code
    return launch(request, transport.start_local_agent(-1), report)


def entry() -> None:
    sys.argv[0] = "stoker.launch"
    sys.exit(main(sys.argv[1:]))
