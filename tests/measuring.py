"""What a program took: its exit code, CPU time and memory."""

from __future__ import annotations

import sys
from collections.abc import Sequence

# By way of a small process: a child's largest size counts what its parent had when it was made, and a test's process may have gigabytes.
_MEASURE = """
import json, os, subprocess, sys
process = subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL)
_, status, used = os.wait4(process.pid, 0)
print(json.dumps([os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime, used.ru_maxrss]))
"""


def measured(argv: Sequence[str]) -> list[str]:
    """argv of a program that runs this one, without its output, and prints [exit code, CPU seconds, kilobytes] as JSON."""
    return [sys.executable, "-I", "-S", "-c", _MEASURE, *argv]
