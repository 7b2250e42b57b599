"""A Slurm cluster of our own: munged, slurmctld and two slurmd "nodes" on this machine's loopback, from the distribution's packages.

Its own configuration, keys, ports and folders; every process is ended by its own handle. Nothing of a Slurm that may be installed for real is touched.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from conftest import wait_for
from forked_ranks import free_port

_PATH = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
PROGRAMS = {
    name: shutil.which(name, path=_PATH)
    for name in ("munged", "slurmctld", "slurmd", "slurmstepd", "sbatch", "srun", "scontrol", "scancel")
}
GPUS = 2  # on each node, as far as Slurm knows: character devices stand in for cards


def reason_to_skip() -> str:
    missing = [name for name, path in PROGRAMS.items() if path is None]
    if missing:
        return f"slurm-wlm and munge are not installed (no {', '.join(missing)})"
    return "" if os.getuid() == 0 else "slurmd starts other users' jobs: it needs root"


class SlurmCluster:
    nodes = ("node1", "node2")

    def __init__(self, home: Path) -> None:
        self.home = home
        self.env = {"SLURM_CONF": str(home / "slurm.conf")}
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        home = self.home
        (home / "munge.key").write_bytes(os.urandom(128))
        (home / "munge.key").chmod(0o400)
        self._configure([free_port() for _ in range(3)])
        self._spawn(
            "munged",
            "--foreground",
            "--force",
            f"--key-file={home}/munge.key",
            f"--socket={home}/munge.sock",
            f"--pid-file={home}/munged.pid",
            f"--log-file={home}/munged.log",
            f"--seed-file={home}/munged.seed",
            "--num-threads=2",
        )
        self._until((home / "munge.sock").exists, "munged")
        self._spawn("slurmctld", "-D", "-i", "-f", self.env["SLURM_CONF"])
        for node in self.nodes:
            self._spawn("slurmd", "-D", "-N", node, "-f", self.env["SLURM_CONF"], log=node)
        self._until(
            lambda: self.ask("sinfo", "--noheader", "-o", "%T %D").split() == ["idle", str(len(self.nodes))],
            "the nodes",
        )

    def _configure(self, ports: list[int]) -> None:
        home = self.home
        nodes = "\n".join(
            f"NodeName={node} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} CPUs=4 RealMemory=4000 Gres=gpu:{GPUS} State=UNKNOWN"
            for node, port in zip(self.nodes, ports[1:], strict=True)
        )
        for folder in ("state", *(f"spool/{node}" for node in self.nodes)):
            (home / folder).mkdir(parents=True)
        (home / "gres.conf").write_text(f"Name=gpu File=/dev/tty[0-{GPUS - 1}]\n")
        # cred_expire, of which 5 s is the least Slurm takes, is also how long a requeued job waits before it starts again.
        (home / "slurm.conf").write_text(f"""
ClusterName=stk
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={home}/munge.sock,cred_expire=5
StateSaveLocation={home}/state
SlurmdSpoolDir={home}/spool/%n
SlurmctldPidFile={home}/slurmctld.pid
SlurmdPidFile={home}/slurmd-%n.pid
SlurmctldLogFile={home}/slurmctld.log
SlurmdLogFile={home}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
KillWait=10
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0
GresTypes=gpu
{nodes}
PartitionName=main Nodes={",".join(self.nodes)} Default=YES MaxTime=INFINITE State=UP
""")

    def _spawn(self, program: str, *args: str, log: str = "") -> None:
        with open(self.home / f"{log or program}.out", "wb") as out:
            self._processes.append(
                subprocess.Popen(
                    [str(PROGRAMS[program]), *args],
                    env={**os.environ, **self.env, "PATH": _PATH},
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                )
            )

    def _until(self, ready: Callable[[], bool], what: str) -> None:
        said = "".join(f"\n{path.name}: {path.read_text(errors='replace')[-800:]}" for path in self.home.glob("*.out"))
        assert wait_for(lambda: True if ready() else None, 30), f"{what} did not come up{said}"

    def ask(self, *argv: str) -> str:
        """What one of Slurm's programs prints; empty where it fails."""
        done = subprocess.run(
            argv, env={**os.environ, **self.env}, capture_output=True, text=True, check=False, timeout=30
        )
        return done.stdout if done.returncode == 0 else ""

    def state(self, job: str) -> str:
        return next(
            (
                word[9:]
                for word in self.ask("scontrol", "--oneliner", "show", "job", job).split()
                if word.startswith("JobState=")
            ),
            "",
        )

    def cancel_all(self) -> None:
        """Between two tests: nothing of the one before is left in the queue or on a node."""
        jobs = self.ask("squeue", "--noheader", "--format=%A").split()
        if jobs:
            self.ask("scancel", *jobs)
        assert wait_for(
            lambda: True if not self.ask("squeue", "--noheader", "--states=all", "--format=%T").count("ING") else None,
            30,
        ), "a job does not end"

    def stop(self) -> None:
        """slurmstepd processes are slurmd's own and outlive it: with no job left there are none."""
        for process in reversed(self._processes):
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in reversed(self._processes):
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@pytest.fixture(scope="module")
def slurm_cluster() -> Iterator[SlurmCluster]:
    """One for all tests of a file: it takes seconds to come up."""
    why = reason_to_skip()
    if why:
        pytest.skip(why)
    home = Path(tempfile.mkdtemp(prefix="stk-slurm-"))  # short: a Unix socket's path has 107 bytes
    home.chmod(0o755)
    cluster = SlurmCluster(home)
    try:
        cluster.start()
        yield cluster
        cluster.cancel_all()
    finally:
        cluster.stop()
        shutil.rmtree(home, ignore_errors=True)


@pytest.fixture
def slurm(slurm_cluster: SlurmCluster) -> Iterator[SlurmCluster]:
    yield slurm_cluster
    slurm_cluster.cancel_all()
