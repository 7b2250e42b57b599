"""A cluster on one Linux machine: each host is a network namespace with its own address, sshd, home, working directory and hostname.

test ── bridge ─┬─ 10.x.y.1      The test is on the bridge too (10.x.y.254) and reaches every host by ssh.
                ├─ 10.x.y.2      All hosts share one hostname that resolves nowhere, as cloned images do.
                └─ 10.x.y.3      Faults are real ones: links go down, packets vanish, servers stop.
"""

from __future__ import annotations

import compileall
import contextlib
import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from conftest import wait_for
from stoker.control.cluster import agent_zip

SSHD = shutil.which("sshd") or shutil.which("sshd", path="/usr/sbin")
SSH_PORT = 22
HOSTNAME = "stk-clone"
_DRAW = random.SystemRandom()  # tests seed the shared one: two workers would build the same cluster
_SET_NAME = 'echo "$0" > /proc/sys/kernel/hostname && exec "$@"'


def why_not() -> str:
    """The reason why there can be no such cluster here; empty where there can."""
    if sys.platform != "linux" or os.getuid() != 0:
        return "network namespaces need Linux and root"
    for program in ("ip", "tc", "unshare", "ssh", "ssh-keygen"):
        if shutil.which(program) is None:
            return f"there is no {program}"
    if SSHD is None:
        return "there is no sshd"
    name = f"stk{os.getpid()}p"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if tried.returncode:
        return f"no network namespace may be made: {tried.stderr.strip()}"
    veth = subprocess.run(
        ["ip", "-n", name, "link", "add", "stk0", "type", "veth", "peer", "name", "stk1"],
        capture_output=True,
        text=True,
        check=False,
    )
    _run("ip", "netns", "del", name)
    return f"no veth pair may be made: {veth.stderr.strip()}" if veth.returncode else ""


def _run(*argv: str) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(argv)}: {done.stderr.strip()}"
    return done.stdout


def met_before(shared: Path) -> Path:
    """A home folder on which the agent has been before, made once for all workers of pytest. Meeting a host for the first time, it
    unpacks and compiles hundreds of files, on each of three hosts in a hundred tests; test_ssh.py and test_remote_agent.py see that.
    """
    packed = agent_zip.pack_agent()
    home = shared / f"met-{agent_zip.size_and_digest(packed).partition(':')[2][:32]}"
    if home.exists():
        return home
    made = Path(tempfile.mkdtemp(prefix="met-", dir=shared))
    argv = [sys.executable, "-I", "-S", "-c", agent_zip.unpack_code(), agent_zip.size_and_digest(packed), "-1"]
    subprocess.run(argv, input=packed, env={**os.environ, "HOME": str(made)}, check=True)
    (agent,) = (made / ".cache" / "stoker").iterdir()
    for part in ("contract", "control"):
        compileall.compile_dir(agent / "stoker" / part, quiet=1)
    with contextlib.suppress(OSError):  # another worker was faster
        made.rename(home)
    return home


class NetHost:
    """One host. `name` is its address: what a hosts file names it by, and what its peers reach it by."""

    def __init__(self, address: str, namespace: str, link: str, folder: Path) -> None:
        self.name = self.address = address
        self.namespace = namespace
        self.link = link  # the bridge's end of its cable
        self.folder = folder  # its host key, sshd's log
        self.home = folder / "home"
        self.workdir = folder / "work"
        self.env: dict[str, str] = {"HOME": str(self.home)}  # what sshd gives a session
        self.sshd_lines: list[str] = []  # more of its sshd_config
        self.server: subprocess.Popen[bytes] | None = None
        self.own: tuple[Path, Path] | None = None  # a folder of its own, and where it lies over one that all see

    def enter(self, argv: Sequence[str]) -> list[str]:
        """`ip netns exec` also gives it its own mounts, /sys/class/net, /etc/hosts and /etc/resolv.conf."""
        script = (
            _SET_NAME if self.own is None else f"{shlex.join(['mount', '--bind', *map(str, self.own)])} && {_SET_NAME}"
        )
        return ["ip", "netns", "exec", self.namespace, "unshare", "--uts", "sh", "-c", script, HOSTNAME, *argv]


class NetCluster:
    """`home`: what is in every host's home folder at the beginning."""

    def __init__(self, folder: Path, count: int = 3, home: Path | None = None) -> None:
        self.folder, self._home = folder, home
        folder.mkdir(parents=True, exist_ok=True)
        self.tag = f"stk{_DRAW.randrange(16**6):06x}"
        self.bridge = f"{self.tag}b"
        self.net = self._free_net()
        self.address = f"{self.net}.254"  # the test's own, on the bridge
        self._started: list[subprocess.Popen[bytes]] = []
        self._chains: set[tuple[str, str]] = set()  # nft's: (namespace, chain)
        self.hosts = [
            NetHost(f"{self.net}.{n + 1}", f"{self.tag}n{n}", f"{self.tag}v{n}", folder / f"host{n}")
            for n in range(count)
        ]
        self._key("id")
        self.identity = folder / "id"

    # ---- made and removed ----

    def _free_net(self) -> str:
        """A 10.x.y.0/24 that no interface here has."""
        taken = _run("ip", "-4", "-o", "addr", "show")
        while True:
            net = f"10.{_DRAW.randrange(180, 250)}.{_DRAW.randrange(1, 255)}"
            if f" {net}." not in taken:
                return net

    def _key(self, name: str) -> None:
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / name)], check=True)

    def build(self) -> None:
        _run("ip", "link", "add", self.bridge, "type", "bridge", "forward_delay", "0")
        _run("ip", "addr", "add", f"{self.address}/24", "dev", self.bridge)
        _run("ip", "link", "set", self.bridge, "up")
        Path("/run/sshd").mkdir(exist_ok=True)
        for host in self.hosts:
            self._build(host)
        lines = (f"{host.address} {(host.folder / 'host_key.pub').read_text()}" for host in self.hosts)
        (self.folder / "known_hosts").write_text("".join(lines))
        (self.folder / "ssh_config").write_text(
            f'Host *\n  UserKnownHostsFile "{self.folder}/known_hosts"\n  GlobalKnownHostsFile /dev/null\n  IdentitiesOnly yes\n  User root\n'
        )
        for n in range(len(self.hosts)):
            self.start_sshd(n)

    def _build(self, host: NetHost) -> None:
        for folder in (host.folder, host.workdir):
            folder.mkdir(parents=True)
        if self._home is None:
            host.home.mkdir()
        else:
            _run("cp", "-al", str(self._home), str(host.home))  # links: a tenth of what copying takes
        etc = Path("/etc/netns") / host.namespace  # what `ip netns exec` lays over /etc
        etc.mkdir(parents=True)
        (etc / "hosts").write_text("127.0.0.1 localhost\n")
        (etc / "resolv.conf").write_text("# no name server: an unknown name fails at once\n")
        _run("ip", "netns", "add", host.namespace)
        _run("ip", "link", "add", host.link, "type", "veth", "peer", "name", "eth0", "netns", host.namespace)
        _run("ip", "link", "set", host.link, "master", self.bridge, "up")
        _run("ip", "-n", host.namespace, "link", "set", "lo", "up")
        _run("ip", "-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", "eth0")
        _run("ip", "-n", host.namespace, "link", "set", "eth0", "up")
        self._key(f"{host.folder.name}/host_key")

    def close(self) -> None:
        for child in self._started:
            if child.poll() is None:
                child.kill()
                child.wait()
        for host in self.hosts:
            wait_for(
                lambda host=host: True if not self._kill_all(host) else None, 5
            )  # again: one may have forked meanwhile
            if host.server is not None:
                host.server.wait()
            # Forgiving: a cluster that could not be built, or is closed already, is removed as far as it stands.
            for argv in (["ip", "netns", "del", host.namespace], ["ip", "link", "del", host.link]):
                subprocess.run(argv, capture_output=True, check=False)
            shutil.rmtree(Path("/etc/netns") / host.namespace, ignore_errors=True)
        subprocess.run(["ip", "link", "del", self.bridge], capture_output=True, check=False)
        if any(namespace == "" for namespace, _ in self._chains):
            _run("nft", "delete", "table", "netdev", self.tag)
        self._chains.clear()

    def _kill_all(self, host: NetHost) -> list[int]:
        left = [*self._pids(host, sshd=True), *self._pids(host, sshd=False)]  # a zombie has no namespace any more
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return left

    # ---- using it ----

    def file(
        self,
        slots: Sequence[int | None] = (2, 1, 1),
        *,
        name: str = "cluster.yaml",
        per_host: Sequence[dict[str, Any]] = (),
        **extra: Any,
    ) -> Path:
        """A hosts file that reaches the first len(slots) hosts. `extra` goes to the defaults (workdir too), `per_host` to each host's own entry."""
        entries = []
        for n, (host, count) in enumerate(zip(self.hosts, slots, strict=False)):
            entry: dict[str, Any] = {"host": host.address}
            if count is not None:
                entry["slots"] = count
            if "workdir" not in extra:
                entry["workdir"] = str(host.workdir)
            entries.append({**entry, **(per_host[n] if n < len(per_host) else {})})
        defaults = {"port": SSH_PORT, "identity": str(self.identity), "python": sys.executable, **extra}
        path = self.folder / name
        path.write_text(
            json.dumps(
                {"ssh_config": str(self.folder / "ssh_config"), "defaults": defaults, "hosts": entries}, indent=1
            )
        )
        return path

    def run_in(self, i: int, argv: Sequence[str], **kw: Any) -> subprocess.CompletedProcess[str]:
        given = {"capture_output": True, "text": True, "timeout": 60, **kw}
        return subprocess.run(self.hosts[i].enter(argv), check=False, **given)

    def start_in(self, i: int, argv: Sequence[str], **kw: Any) -> subprocess.Popen[bytes]:
        child = subprocess.Popen(self.hosts[i].enter(argv), **{"stdin": subprocess.DEVNULL, **kw})
        self._started.append(child)
        return child

    def pids(self, i: int) -> list[int]:
        """What runs on host i, sshd apart."""
        return self._pids(self.hosts[i], sshd=False)

    def _pids(self, host: NetHost, sshd: bool) -> list[int]:
        try:
            mine = os.stat(f"/run/netns/{host.namespace}").st_ino
        except FileNotFoundError:
            return []
        found = []
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                try:
                    if (
                        os.stat(f"/proc/{entry}/ns/net").st_ino == mine
                        and Path(f"/proc/{entry}/comm").read_text().startswith("sshd") == sshd
                    ):
                        found.append(int(entry))
                except OSError:  # it ended meanwhile, or is not ours to look at and so not ours at all
                    continue
        return found

    # ---- sshd ----

    def start_sshd(self, i: int) -> None:
        host = self.hosts[i]
        given = " ".join(f'"{name}={value}"' for name, value in host.env.items())
        (host.folder / "sshd_config").write_text(
            f'Port {SSH_PORT}\nListenAddress {host.address}\nHostKey "{host.folder}/host_key"\nAuthorizedKeysFile "{self.identity}.pub"\nPidFile none\n'
            f"StrictModes no\nUsePAM no\nPermitRootLogin yes\nPasswordAuthentication no\nKbdInteractiveAuthentication no\nMaxStartups 100\nSetEnv {given}\n"
            "Subsystem sftp internal-sftp\n" + "".join(f"{line}\n" for line in host.sshd_lines)
        )
        assert SSHD is not None
        with open(host.folder / "sshd.log", "ab") as log:
            host.server = subprocess.Popen(
                host.enter([SSHD, "-D", "-e", "-f", str(host.folder / "sshd_config")]),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        listens = wait_for(lambda: True if self._sshd_listens(host) else None, 10)
        assert listens, (host.folder / "sshd.log").read_text()

    def _sshd_listens(self, host: NetHost) -> bool:
        """Looked up, not connected to: a half-open connection would count against MaxStartups, and a cut host must be startable too."""
        assert host.server is not None
        with contextlib.suppress(FileNotFoundError):
            rows = Path(f"/proc/{host.server.pid}/net/tcp").read_text().splitlines()[1:]
            if os.stat(f"/proc/{host.server.pid}/ns/net").st_ino == os.stat(f"/run/netns/{host.namespace}").st_ino:
                return any(row.split()[1].endswith(f":{SSH_PORT:04X}") and row.split()[3] == "0A" for row in rows)
        return False

    def give_own_folder(self, i: int, shared: Path) -> Path:
        """What new sessions on host i find at `shared` is its own, as on another disk. Returns where it is seen from here."""
        host = self.hosts[i]
        own = host.folder / "own"
        for folder in (own, shared):
            folder.mkdir(exist_ok=True)
        self.stop_sshd(i)
        host.own = (own, shared)
        self.start_sshd(i)
        return own

    def stop_sshd(self, i: int) -> None:
        """New connections are refused; those that stand go on."""
        server = self.hosts[i].server
        if server is not None:
            server.kill()
            server.wait()

    def change_host_key(self, i: int) -> None:
        """As after a new installation: known_hosts still has the old key."""
        self.stop_sshd(i)
        for name in ("host_key", "host_key.pub"):
            (self.hosts[i].folder / name).unlink()
        self._key(f"{self.hosts[i].folder.name}/host_key")
        self.start_sshd(i)

    def set_env(self, i: int, **env: str) -> None:
        """Variables of every session on host i from now on."""
        self.hosts[i].env |= env
        self.stop_sshd(i)
        self.start_sshd(i)

    def resolve(self, i: int, line: str) -> None:
        """A line of host i's /etc/hosts: "127.0.1.1 stk-clone" puts its hostname on loopback."""
        with open(f"/etc/netns/{self.hosts[i].namespace}/hosts", "a") as file:
            file.write(line + "\n")

    # ---- faults of the network ----

    def cut(self, i: int) -> None:
        _run("ip", "link", "set", self.hosts[i].link, "down")

    def repair(self, i: int) -> None:
        _run("ip", "link", "set", self.hosts[i].link, "up")

    def slow(self, i: int, mbit: float) -> None:
        """The cable of host i, both directions."""
        how = ["tbf", "rate", f"{int(mbit * 1000)}kbit", "burst", "32k", "latency", "200ms"]
        _run("tc", "qdisc", "replace", "dev", self.hosts[i].link, "root", *how)
        _run("tc", "-n", self.hosts[i].namespace, "qdisc", "replace", "dev", "eth0", "root", *how)

    def delay(self, i: int, ms: float) -> None:
        """What host i sends is late."""
        argv = [
            "tc",
            "-n",
            self.hosts[i].namespace,
            "qdisc",
            "replace",
            "dev",
            "eth0",
            "root",
            "netem",
            "delay",
            f"{ms}ms",
        ]
        tried = subprocess.run(argv, capture_output=True, text=True, check=False)
        if tried.returncode:
            pytest.skip(f"this kernel can't delay packets (netem): {tried.stderr.strip()}")

    def loss(self, i: int, percent: float) -> None:
        """So much of what is sent to host i vanishes."""
        self.nft_rule(i, f"numgen random mod 1000 < {int(percent * 10)} drop" if percent < 100 else "drop")

    def block(self, source: int | None, target: int, ports: str = "1024-65535") -> None:
        """Connections from source (None: the test itself) to these TCP ports of target vanish without a word. The other direction works."""
        address = self.address if source is None else self.hosts[source].address
        if shutil.which("nft"):
            self.nft_rule(target, f"ip saddr {address} tcp flags & (syn|ack) == syn tcp dport {ports} drop")
            return
        # Without nft the answers vanish instead: target's own connections from these local ports fail, too. `ip rule` takes no range up to 65535.
        reach = ports.replace("-65535", "-65534")
        _run(
            "ip",
            "-n",
            self.hosts[target].namespace,
            "rule",
            "add",
            "to",
            address,
            "ipproto",
            "tcp",
            "sport",
            reach,
            "blackhole",
        )

    def mtu_hole(self, i: int, mtu: int = 1400) -> None:
        """Packets longer than this vanish on host i's cable without ICMP, both directions; its interface still says 1500."""
        host = self.hosts[i]
        # A veth pair hands over 64 KB at once, to be cut never: only with one segment a packet is a length a length.
        _run("ip", "link", "set", host.link, "gso_max_segs", "1")
        _run("ip", "-n", host.namespace, "link", "set", "eth0", "gso_max_segs", "1")
        self.nft_rule(i, f"ip length > {mtu} drop")
        self.nft_rule(i, f"ip length > {mtu} drop", bridge_end=True)

    def nft_rule(self, i: int, rule: str, bridge_end: bool = False) -> None:
        """On arrival: at host i, or at the bridge's end of its cable. A drop where it is sent would tell the sender."""
        if shutil.which("nft") is None:
            pytest.skip("there is no nft to let packets vanish")
        host = self.hosts[i]
        inside = [] if bridge_end else ["ip", "netns", "exec", host.namespace]
        device, chain = (host.link, host.link) if bridge_end else ("eth0", "arriving")
        made = ("" if bridge_end else host.namespace, chain)
        if made not in self._chains:
            self._chains.add(made)
            _run(
                *inside,
                "nft",
                f"add table netdev {self.tag}; add chain netdev {self.tag} {chain} {{ type filter hook ingress device {device} priority 0; }}",
            )
        _run(*inside, "nft", f"add rule netdev {self.tag} {chain} {rule}")

    def heal(self, i: int) -> None:
        """No more loss, blocks, holes and limits on host i; its link is up."""
        host = self.hosts[i]
        if (host.namespace, "arriving") in self._chains:
            _run("ip", "netns", "exec", host.namespace, "nft", f"flush chain netdev {self.tag} arriving")
        if ("", host.link) in self._chains:
            _run("nft", f"flush chain netdev {self.tag} {host.link}")
        # Deleting fails where there is none of ours: that is what is wanted.
        subprocess.run(["tc", "qdisc", "del", "dev", host.link, "root"], capture_output=True, check=False)
        subprocess.run(
            ["tc", "-n", host.namespace, "qdisc", "del", "dev", "eth0", "root"], capture_output=True, check=False
        )
        self.repair(i)


def connects(cluster: NetCluster, source: int, target: int, port: int, seconds: float = 2.0) -> str:
    """ "yes", or the error of a TCP connection from one host to another."""
    script = "import socket, sys\ntry: socket.create_connection((sys.argv[1], int(sys.argv[2])), float(sys.argv[3])); print('yes')\nexcept OSError as e: print(e)\n"
    return cluster.run_in(
        source, [sys.executable, "-S", "-c", script, cluster.hosts[target].address, str(port), str(seconds)]
    ).stdout.strip()


@pytest.fixture
def netcluster(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NetCluster]:
    reason = why_not()
    if reason:
        pytest.skip(f"no test cluster here: {reason}")
    cluster = NetCluster(tmp_path / "net", home=met_before(tmp_path_factory.getbasetemp().parent))
    try:
        cluster.build()
        yield cluster
    finally:
        cluster.close()
