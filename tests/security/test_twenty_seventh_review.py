"""What the twenty-seventh review found: files in a checkout's .git that have no end, an axis that has none,
and long lines that took any amount of memory to break."""

from __future__ import annotations

import resource
import subprocess
from pathlib import Path

from conftest import Stoker
from stoker.contract.names import EX_NOINPUT


def test_git_is_not_given_all_memory_by_a_checkouts_own_files(stoker: Stoker, tmp_path: Path) -> None:
    """git reads .git/commondir to its end, and an archive may hold it as a link to /dev/zero."""
    checkout = tmp_path / "checkout"
    subprocess.run(["git", "init", "-q", str(checkout)], check=True)
    (checkout / "t.py").write_text("print(1)\n")
    (checkout / ".git" / "commondir").symlink_to("/dev/zero")
    hosts = tmp_path / "hosts.yaml"
    hosts.write_text(f"hosts:\n  - {{host: localhost, workdir: {tmp_path / 'far'}, slots: 1, gpus: none}}\n")

    def at_most() -> None:  # so that a failure of this test does not fill the machine
        resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))

    stoker.cwd = checkout
    done = stoker("run", "--hosts", str(hosts), "--sync", "t.py", preexec_fn=at_most)
    assert done.code == EX_NOINPUT and "needs more than 1 GB of memory" in done.err, done.err
    assert not (tmp_path / "far").exists()
