"""What the thirty-first review found: words of hosts and of files in commands that are advised, names of other users' programs in
the kernel's log, other users' events in viewers' memory.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from stoker.control.doctor.checks import net
from stoker.control.machine.facts import Net

# ---- words of a host, or of a recorded machine, in a command to copy ----

TRAPS = [
    "203.0.113.9; touch trapped",
    "$(touch trapped)",
    "10.0.0.2%eth0;touch${IFS}trapped",
    "x' ; touch trapped ; echo '",
]


def typed(line: str, folder: Path) -> list[str]:
    """The words that a shell makes of a line whose first one is a program; what else it runs can leave a file."""
    program = line.split()[0]
    argv = ["bash", "-c", f"{program}() {{ printf '%s\\n' \"$@\"; }}; {line}"]
    done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, check=True)
    assert not [*folder.iterdir()], line
    return done.stdout.splitlines()


@pytest.mark.parametrize("trap", TRAPS)
def test_a_recorded_machines_name_is_one_word_of_a_command(trap: str, tmp_path: Path) -> None:
    (found,) = net.hostname(Net(trap, (), ("eth0",), None, None, "no such name"))
    assert typed(found.fix.partition(" >> ")[0], tmp_path) == [f"127.0.1.1 {trap}"]


# ---- what a viewer keeps of another user's events ----
