"""The same run through a real sshd on loopback: nothing installed on the other side, greetings and all."""

from __future__ import annotations

import getpass
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import Stoker, tagged, wait_for
from forked_ranks import free_port

SSHD = shutil.which("sshd") or shutil.which("sshd", path="/usr/sbin")


@pytest.fixture
def host(tmp_path: Path) -> Iterator[list[str]]:
    """ssh options that reach a server of our own: own host key, own client key, own known_hosts, a login that prints a greeting."""
    if SSHD is None or shutil.which("ssh") is None:
        pytest.skip("openssh-server and openssh-client are not installed")
    home = tmp_path / "ssh"
    home.mkdir(mode=0o700)
    for key in ("host_key", "id"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(home / key)], check=True)
    shutil.copy(home / "id.pub", home / "authorized_keys")
    port = free_port()
    (home / "known_hosts").write_text(f"[127.0.0.1]:{port} " + (home / "host_key.pub").read_text())
    (home / "greet.sh").write_text('#!/bin/sh\necho "Welcome to this host, {}"\nexec sh -c "$SSH_ORIGINAL_COMMAND"\n')
    (home / "greet.sh").chmod(0o755)
    (home / "sshd_config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {home}/host_key\nAuthorizedKeysFile {home}/authorized_keys\nPidFile none\nStrictModes no\n"
        f"UsePAM no\nPasswordAuthentication no\nKbdInteractiveAuthentication no\nForceCommand {home}/greet.sh\n"
    )
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)
    with open(home / "log", "wb") as log:
        server = subprocess.Popen([SSHD, "-D", "-e", "-f", str(home / "sshd_config")], stderr=log)
    try:
        assert wait_for(lambda: True if _listens(port) else None, 10), (home / "log").read_text()
        options = [
            f"-p{port}",
            f"-i{home}/id",
            f"-oUserKnownHostsFile={home}/known_hosts",
            "-oGlobalKnownHostsFile=/dev/null",
            f"-l{getpass.getuser()}",
        ]
        yield [word for option in options for word in (f"--ssh-option={option}",)]
    finally:
        server.terminate()
        server.wait()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_a_run_through_ssh(stoker: Stoker, host: list[str]) -> None:
    script = stoker.script(
        "s.py",
        "import os, sys\nprint('here', os.environ['RANK'], os.environ['NCCL_X'], sys.argv[1:])\nsys.exit(int(sys.argv[1]) if os.environ['RANK'] == '1' else 0)\n",
    )
    flags = ["run", "--hosts", "127.0.0.1", *host, "--python", sys.executable, "--nproc-per-node", "2"]
    done = stoker(*flags, script, "0", 'it\'s; $(a) "path" with spaces', env={"NCCL_X": "travels"})
    assert done.code == 0, done.err
    assert done.log(1) == b"""here 1 travels ['0', 'it\\'s; $(a) "path" with spaces']\n"""
    done = stoker(*flags, script, "4", env={"NCCL_X": ""})
    assert done.code == 4 and (done.verdict["rank"], done.verdict["host"], done.verdict["cause"]) == (
        1,
        "127.0.0.1",
        "rank.exit",
    )


def test_a_killed_ssh_connection_leaves_nothing_there(stoker: Stoker, host: list[str]) -> None:
    script = stoker.script(
        "s.py",
        "import subprocess, time\nsubprocess.Popen(['setsid', 'sleep', '100'])\nprint('ready', flush=True)\ntime.sleep(100)\n",
    )
    run = stoker.start(
        "run", "--hosts", "127.0.0.1", *host, "--python", sys.executable, "--nproc-per-node", "2", script
    )
    assert wait_for(
        lambda: (
            True
            if sum(b"ready" in log.read_bytes() for log in stoker.cwd.glob("runs/2*/attempt-0/*.log")) == 2
            else None
        ),
        30,
    )
    client = int(subprocess.check_output(["pgrep", "-P", str(run.pid)]).split()[0])
    os.kill(client, signal.SIGKILL)
    assert wait_for(lambda: True if not tagged(stoker.cwd) else None, 12)
    assert run.wait(100) == 70 and stoker.result().verdict["cause"] == "host.agent-lost"


@pytest.mark.parametrize(
    ("change", "says"),
    [(["--ssh-option=-oIdentityFile=/nonexistent", "--ssh-option=-oIdentitiesOnly=yes"], "Permission denied"), (["--ssh-option=-oUserKnownHostsFile=/dev/null"], "Host key verification failed")],
)  # fmt: skip
def test_a_host_that_refuses_is_named(stoker: Stoker, host: list[str], change: list[str], says: str) -> None:
    keep = [
        word
        for word in host
        if not (says == "Permission denied" and "=-i" in word)
        and not (says.startswith("Host key") and "UserKnown" in word)
    ]
    done = stoker("run", "--hosts", "127.0.0.1", *keep, *change, stoker.script("ok.py", "print('ran')"))
    assert (
        done.code == 69
        and says in done.err
        and "host 127.0.0.1 can't be used: " in done.err
        and not (stoker.cwd / "runs").exists()
    )


def test_a_host_without_python_is_named(stoker: Stoker, host: list[str]) -> None:
    done = stoker(
        "run", "--hosts", "127.0.0.1", *host, "--python", "/no/such/python", stoker.script("ok.py", "print('ran')")
    )
    assert done.code == 69 and "/no/such/python" in done.err


def python_of(version: str) -> str:
    """Return an interpreter of that version, from pyenv or the PATH. Skips the test if there is none."""
    root = os.environ.get("PYENV_ROOT", os.path.expanduser("~/.pyenv"))
    installed = sorted(str(path) for path in Path(root, "versions").glob(f"{version}.*/bin/python"))
    program = installed[-1] if installed else shutil.which(f"python{version}")
    if program is None:
        pytest.skip(f"Python {version} is not installed")
    return program


def test_the_oldest_python_runs_the_agent_its_ranks_and_a_check(stoker: Stoker, host: list[str]) -> None:
    python = python_of("3.10")
    script = stoker.script(
        "s.py",
        "import os, sys, stoker\nprint('ran with', sys.version_info[:2], flush=True)\nstoker.phase('evaluation')\n"
        "sys.exit(int(sys.argv[1]))\n",
    )
    flags = ["run", "--hosts", "127.0.0.1", *host, "--python", python, "--nproc-per-node", "2", script]
    done = stoker(*flags, "0")
    assert done.code == 0 and done.log(1) == b"ran with (3, 10)\n", done.err
    done = stoker(*flags, "3")
    assert done.code == 3 and (done.verdict["host"], done.verdict["cause"]) == ("127.0.0.1", "rank.exit")
    (stoker.cwd / "cluster.yaml").write_text(f"hosts: [{{host: 127.0.0.1, python: {python}}}]\n")
    checked = stoker("cluster", "check", "--quick", "--hosts", "cluster.yaml", *host)
    assert "3.10" in checked.out and "Traceback" not in checked.err, checked.out + checked.err


def test_an_older_python_is_refused_in_one_line(stoker: Stoker, host: list[str]) -> None:
    script = stoker.script("ok.py", "print('ran')")
    done = stoker("run", "--hosts", "127.0.0.1", *host, "--python", python_of("3.9"), script)
    assert done.code == 69 and "too old" in done.err and "Traceback" not in done.err, done.err
