"""Hosts: what a hosts file may say and what is refused, how a host is reached, and what is said of one that can't be."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import Stoker, at_length, machine_json, wait_for
from localuser import ATTACKER, do_as, needs_root
from netcluster import NetCluster
from stoker.contract.errors import EX_CONFIG, EX_NOINPUT, EX_USAGE, Refusal
from stoker.control.cluster import agent_zip, file_sync, hosts, hosts_writer, ssh


def _file(tmp_path: Path, text: str, name: str = "cluster.yaml") -> str:
    path = tmp_path / name
    path.write_text(text)
    return str(path)


# ---- the file ----


def test_a_hosts_file_with_defaults_and_overrides(tmp_path: Path) -> None:
    (tmp_path / "my config").write_text("")
    (tmp_path / "key").write_text("")
    path = _file(
        tmp_path,
        """
ssh_config: my config
ssh_options: [-oCompression=yes]
defaults: {user: train, python: ~/venv/bin/python, workdir: "~/my train's", identity: key}
env: {NCCL_ALGO: Ring, NCCL_NSOCKS_PERTHREAD: 4}
hosts:
  - {host: 192.0.2.100, slots: 2, address: 10.9.9.1}
  - {host: node-b, user: other, venv: /opt/it's here, interface: eth1, gpus: [0, 3], port: 2222}
  - other@node-c
  - {host: node-d, gpus: any:2, local: true}
""",
    )
    read = hosts.read_hosts_file(path, ("-v",))
    assert (
        read.ssh_config == str(tmp_path / "my config")
        and read.ssh_options == ("-v", "-oCompression=yes")
        and read.path == path
    )
    assert read.env == {"NCCL_ALGO": "Ring", "NCCL_NSOCKS_PERTHREAD": "4"} and read.names == (
        "192.0.2.100",
        "node-b",
        "node-c",
        "node-d",
    )
    a, b, c, d = read.hosts
    assert (a.target, a.user, a.slots, a.address, a.python, a.workdir) == (
        "192.0.2.100",
        "train",
        2,
        "10.9.9.1",
        "~/venv/bin/python",
        "~/my train's",
    )
    assert a.identity == str(tmp_path / "key") and not a.here and a.gpus is None
    assert (b.user, b.python, b.interface, b.gpus, b.port) == (
        "other",
        "/opt/it's here/bin/python",
        "eth1",
        "0,3",
        2222,
    )
    assert (c.user, c.name, d.gpus, d.here) == ("other", "node-c", "any:2", True)


def test_names_on_the_command_line() -> None:
    read = hosts.read_hosts_file("a, train@b ,fd00::1", ("-p2222",))
    assert [(host.name, host.user) for host in read.hosts] == [
        ("a", None),
        ("b", "train"),
        ("fd00::1", None),
    ] and read.ssh_options == ("-p2222",)


def test_this_very_machine_is_known_by_its_addresses(tmp_path: Path) -> None:
    assert [host.here for host in hosts.read_hosts_file("localhost,192.0.2.77").hosts] == [True, False]
    assert hosts.read_hosts_file("127.0.0.1").hosts[0].here
    assert not hosts.read_hosts_file("127.0.0.1", ("-p2222",)).hosts[0].here, "a forwarded port leads elsewhere"
    assert not hosts.read_hosts_file("somebody-else@localhost").hosts[0].here
    assert not hosts.read_hosts_file(_file(tmp_path, "hosts: [{host: localhost, local: false}]")).hosts[0].here


def test_the_test_cluster_is_not_this_machine_but_its_bridge_is(netcluster: NetCluster) -> None:
    assert [host.here for host in hosts.read_hosts_file(str(netcluster.file())).hosts] == [False, False, False]
    assert hosts.read_hosts_file(netcluster.address).hosts[0].here


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("hosts: [{host: a}]\ndefault: {user: x}", "unknown key 'default' (did you mean defaults?)"),
        ("hosts: [{host: a, slot: 2}]", "host a: unknown key 'slot' (did you mean slots?)"),
        ("hosts: [{host: a}]\ndefaults: {pyton: /x}", "defaults: unknown key 'pyton' (did you mean python?)"),
        ("hosts: [{host: a}]\ndefaults: {host: b}", "defaults: unknown key 'host'"),
        ("hosts: [{host: a}, b, {host: a}]", "host a is listed twice"),
        ("hosts: [x@a, y@a]", "host a is listed twice"),
        ("hosts: [localhost, 127.0.0.1]", "localhost and 127.0.0.1 are the same machine"),
        ("hosts: []", "hosts: must be a list of hosts, got []"),
        ("defaults: {user: a}", "hosts: must be a list of hosts, got nothing"),
        ("", "must have a key hosts: with a list of hosts, got nothing"),
        ("[a, b]", "got ['a', 'b']"),
        ("hosts: [{slots: 1}]", "host: is missing"),
        ("hosts: [{host: 10}]", "host 1: host: must be text, got 10; put it in quotes"),
        ("hosts: [a, no]", "host 2: must be a name or a mapping, got False; put the name in quotes"),
        ("hosts: ['192.168.1.100:22']", "host '192.168.1.100:22': write 192.168.1.100, and port: 22"),
        ("hosts: [{host: '[fe80::1]'}]", "host '[fe80::1]': write fe80::1 without brackets"),
        ("hosts: [{host: '[fe80::1]:2222'}]", "write fe80::1 without brackets, and port: 2222"),
        ("hosts: [{host: a, python: venv/bin/python}]", "host a: python: must be an absolute path, got venv/bin/python; begin it with / or ~/"),
        ("hosts: [a]\ndefaults: {venv: venv}", "host a: venv: must be an absolute path, got venv; begin it with / or ~/"),
        ("hosts: [{host: a, user: no}]", "user: must be text, got False; put it in quotes"),
        ("hosts: [{host: a, user: }]", "user: must have a value;"),
        ("hosts: [{host: a, slots: two}]", "slots: must be a whole number, got 'two'"),
        ("hosts: [{host: a, slots: true}]", "slots: must be a whole number, got True"),
        ("hosts: [{host: a, slots: 0}]", "slots: must be 1 or more, got 0"),
        ("hosts: [{host: a, port: 70000}]", "port: must be between 1 and 65535, got 70000"),
        ("hosts: [{host: a, gpus: {}}]", "gpus: must have the format of --gpus, got {}"),
        ("hosts: [{host: a, local: 1}]", "local: must be true or false, got 1"),
        ("hosts: [{host: a, workdir: train}]", "workdir: must be an absolute path, got train"),
        ("hosts: [{host: a, python: /p, venv: /v}]", "python and venv can't both be set"),
        ("hosts: [[a]]", "host 1: must be a name or a mapping, got ['a']; write {host: NAME}"),
        ("hosts: [{host: a}]\nenv: {BAD-NAME: 1}", "'BAD-NAME' is not a valid name"),
        ("hosts: [{host: a}]\nenv: {X: [1]}", "X: must be text, got [1]"),
        ("hosts: [{host: a}]\nssh_options: -v", "ssh_options: must be a list, got '-v'"),
        ("hosts:\n  - {host: a, slots: 1\n  - {host: b}\n", "line 3: not valid YAML"),
        ("hosts:\n  - host: a\n    slots: 1\n    slots: 2\n", "line 4: not valid YAML: the key slots appears twice"),
    ],
)  # fmt: skip
def test_what_a_hosts_file_may_not_say(tmp_path: Path, text: str, says: str) -> None:
    path = _file(tmp_path, text)
    with pytest.raises(Refusal) as refused:
        hosts.read_hosts_file(path)
    assert (
        says in refused.value.line
        and refused.value.line.startswith(path)
        and "\n" not in refused.value.line
        and refused.value.code == EX_CONFIG
    )


@pytest.mark.parametrize("user", ["-oProxyCommand=x", "a b", "a\nb", "a,b", "a/b"])
def test_what_is_no_name_is_refused(tmp_path: Path, user: str) -> None:
    for entry in ({"host": "a", "user": user}, {"host": user}):
        with pytest.raises(Refusal) as refused:
            hosts.read_hosts_file(_file(tmp_path, json.dumps({"hosts": [entry]})))
        assert repr(user) in refused.value.line and "\n" not in refused.value.line and refused.value.code == EX_CONFIG


@pytest.mark.parametrize(
    ("told", "says", "code"),
    [("", "has no host name", EX_USAGE), (" , ", "has no host name", EX_USAGE), ("a,,b", "a host name is empty", EX_USAGE), ("a,b,a", "host a is listed twice", EX_USAGE), ("-oX,b", "'-oX' is not a valid name", EX_USAGE),
     ("@a", "user: must not be empty", EX_USAGE), ("a:22", "write a, and its port in a hosts file (port: 22)", EX_USAGE), ("hosts/cluster.txt", "must end in .yaml", EX_USAGE), ("nowhere/cluster.yaml", "the hosts file nowhere/cluster.yaml does not exist", EX_NOINPUT)],
)  # fmt: skip
def test_what_the_flag_may_not_say(told: str, says: str, code: int) -> None:
    with pytest.raises(Refusal) as refused:
        hosts.read_hosts_file(told)
    assert says in refused.value.line and refused.value.code == code


def test_a_file_without_its_ending_is_not_taken_for_a_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hostfile").write_text("10.0.0.1 slots=2\n")
    with pytest.raises(Refusal) as refused:
        hosts.read_hosts_file("hostfile")
    assert "the name of a hosts file must end in .yaml" in refused.value.line and refused.value.code == EX_USAGE


def test_files_it_names_must_be_there(tmp_path: Path) -> None:
    for text, says in (
        ("ssh_config: /no/config\nhosts: [a]", "ssh_config: the file /no/config does not exist"),
        ("hosts: [{host: a, identity: key}]", f"host a: identity: the file {tmp_path}/key does not exist"),
    ):
        with pytest.raises(Refusal) as refused:
            hosts.read_hosts_file(_file(tmp_path, text))
        assert says in refused.value.line and refused.value.code == EX_NOINPUT


# ---- the way there ----


def test_words_arrive_as_they_are_through_any_shell(tmp_path: Path) -> None:
    words = ["printf", "%s\\0", "it's", "$(id)", "~/x", "a b", "new\nline", '"', "`id`", "!!", "\\", ""]
    for shell in ("sh", "bash", "dash"):
        out = subprocess.run([shell, "-c", ssh.remote_line(words)], capture_output=True, text=True, check=True).stdout
        assert out.split("\0")[:-1] == words[2:]
    program = tmp_path / "my venv's" / "run it"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho ran $1\n")
    program.chmod(0o755)
    line = ssh.remote_line(["~/my venv's/run it", "~/x"])
    assert (
        subprocess.run(
            ["sh", "-c", line],
            capture_output=True,
            text=True,
            check=True,
            env={"HOME": str(tmp_path), "PATH": os.environ["PATH"]},
        ).stdout
        == "ran ~/x\n"
    )


def test_the_agents_first_line_has_nothing_a_shell_acts_on() -> None:
    line = agent_zip.unpack_code()
    assert "\n" not in line and not set(line) & set('!\\$`"') and compile(line, "unpack", "exec")


@pytest.mark.skipif(shutil.which("ssh") is None, reason="no ssh here")
def test_ssh_is_given_what_was_told_and_ours_comes_last(tmp_path: Path) -> None:
    (tmp_path / "k").write_text("")
    read = hosts.read_hosts_file(
        _file(tmp_path, "hosts: [{host: b, user: u, port: 7, identity: k}]"), ("-oConnectTimeout=99",)
    )
    argv = ssh.ssh_command(read.hosts[0], read, ["true"])
    assert argv[-3:] == ["--", "b", "true"] and argv.index("-oConnectTimeout=99") < argv.index(
        f"-oConnectTimeout={ssh.CONNECT_S}"
    )
    asked = subprocess.run(
        [argv[0], "-G", *argv[1:-2], "b"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    for line in (
        "user u",
        "port 7",
        "connecttimeout 99",
        "batchmode yes",
        f"identityfile {tmp_path}/k",
        "identitiesonly yes",
        "controlmaster auto",
        "controlpersist 5",
    ):
        assert line in asked, line
    control = next(line for line in asked if line.startswith("controlpath ")).split()[1]
    assert os.stat(os.path.dirname(control)).st_mode & 0o777 == 0o700 and len(control) < 90


def test_one_connection_serves_every_command_of_a_host(netcluster: NetCluster) -> None:
    read = hosts.read_hosts_file(str(netcluster.file()))
    seen = []
    for words in (["sh", "-c", "echo $SSH_CONNECTION"], ["echo", "it's $(id)"], ["sh", "-c", "echo $SSH_CONNECTION"]):
        seen.append(
            subprocess.run(
                ssh.ssh_command(read.hosts[1], read, words), capture_output=True, text=True, check=True
            ).stdout.strip()
        )
    assert seen[0] == seen[2] and netcluster.hosts[1].address in seen[0] and seen[1] == "it's $(id)"


def test_a_folder_for_connections_that_is_not_ours_alone_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = hosts.read_hosts_file(_file(tmp_path, "hosts: [{host: b}]"))
    for name, says in (
        ("open", "belongs to another user or is open to others"),
        ("no/where", "can't be made (No such file or directory)"),
        ("own", ""),
    ):
        folder = tmp_path / name
        if name == "open":
            folder.mkdir(mode=0o755)
        monkeypatch.setattr(ssh, "_socket_dir", lambda folder=folder: str(folder))
        assert ssh.why_unshared() == (f"{folder} {says}" if says else "")
        assert ("-oControlPath=none" in ssh.ssh_command(read.hosts[0], read, ["true"])) == bool(says)


def test_banners_and_chatty_shells_do_no_harm(netcluster: NetCluster, tmp_path: Path) -> None:
    host = netcluster.hosts[0]
    (netcluster.folder / "banner").write_text("Authorised use only!\nSTOKER\n" * 20)
    host.sshd_lines.append(f'Banner "{netcluster.folder}/banner"')
    (host.home / ".bashrc").write_text('echo "Welcome, {\\"do\\": 1}"; echo "warning: something" >&2\n')
    netcluster.set_env(0, BASH_ENV=str(host.home / ".bashrc"))
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a.py").write_text("1")
    to = hosts.read_hosts_file(str(netcluster.file((1,))))
    file_sync.copy_to_hosts(to, file_sync.plan_sync(to, str(tmp_path / "src"), print), print)
    assert (host.workdir / "a.py").read_text() == "1"
    read = hosts.read_hosts_file(str(netcluster.file((1,))))
    said = subprocess.run(ssh.ssh_command(read.hosts[0], read, ["true"]), capture_output=True, text=True, check=True)
    assert "Welcome" in said.stdout, "the shell there is chatty"


def test_a_jump_host_of_the_ssh_config_leads_to_the_next(netcluster: NetCluster) -> None:
    near, far = netcluster.hosts[0], netcluster.hosts[1]
    config = netcluster.folder / "ssh_config"
    config.write_text(
        f'Host far\n  HostName {far.address}\n  ProxyJump {near.address}\n{config.read_text()}  IdentityFile "{netcluster.identity}"\n'
    )
    netcluster.block(None, 1, "22")
    read = hosts.parse_hosts({"ssh_config": str(config), "hosts": ["far"]}, str(netcluster.folder / "c.yaml"))
    done = subprocess.run(
        ssh.ssh_command(read.hosts[0], read, ["sh", "-c", "echo $SSH_CONNECTION"]),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split()[::2] == [near.address, far.address]


# ---- what is said of a host that can't be reached ----


@pytest.mark.parametrize(
    ("said", "code", "line"),
    [
        ("ssh: connect to host b port 22: Connection refused\n", 255, "connection refused: nothing listens on its ssh port; start sshd there, or fix the port"),
        ("ssh: connect to host b port 22: No route to host\n", 255, "no route to it: it is switched off"),
        ("ssh: connect to host b port 22: Network is unreachable\n", 255, "no route to it"),
        ("ssh: connect to host b port 22: Connection timed out\n", 255, "no answer: it is switched off, or a firewall"),
        ("Connection timed out during banner exchange\nConnection to 10.0.0.1 port 22 timed out\n", 255, "ssh connected, but no data came back"),
        ("ssh: Could not resolve hostname b: Name or service not known\n", 255, "unknown host (Name or service not known)"),
        ("@@@@\n@  WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!  @\n@@@\nOffending ED25519 key in /h/known_hosts:3\nHost key verification failed.\n", 255,
         "its host key changed since it was last known (/h/known_hosts, line 3); find out why; after a new installation, run ssh-keygen -R b"),
        ("Host key verification failed.\n", 255, "Host key verification failed: its key is not known here; connect once by hand (`ssh b`)"),
        ("u@b: Permission denied (publickey).\n", 255, "Permission denied (publickey): none of our keys is accepted for user u; ssh-copy-id"),
        ("@  WARNING: UNPROTECTED PRIVATE KEY FILE!  @\nPermissions 0644 for '/h/my key' are too open.\nLoad key \"/h/my key\": bad permissions\nu@b: Permission denied (publickey).\n", 255,
         "permission denied: the private key /h/my key has permissions 0644, so ssh does not use it; chmod 600 '/h/my key'"),
        ('Load key "/h/k": error in libcrypto\nu@b: Permission denied (publickey).\n', 255, "the private key /h/k can't be read (error in libcrypto)"),
        ("Received disconnect from 10.0.0.1 port 22:2: Too many authentication failures\nDisconnected\n", 255, "too many keys were offered; set identity: to the right one"),
        ("kex_exchange_identification: Connection closed by remote host\nConnection closed by 10.0.0.1 port 22\n", 255, "its sshd closed the connection"),
        ("Bad owner or permissions on /h/.ssh/config\n", 255, "ssh refuses to read /h/.ssh/config"),
        ("/h/c: line 3: Bad configuration option: foo\n/h/c: terminating, 1 bad configuration options\n", 255, "ssh can't read its settings: /h/c: line 3: Bad configuration option: foo"),
        ("bash: line 1: /no/such/python: No such file or directory\n", 127, "no Python: /no/such/python does not exist there; set python:, venv: or --python"),
        ("motd\nsh: 1: python3: not found\n", 127, "no Python: python3 does not exist there"),
        ("zsh:1: no such file or directory: /no/py\n", 127, "no Python: /no/py does not exist there"),
        ("bash: line 1: /etc: Is a directory\n", 126, "no Python: /etc can't be executed there"),
        (f"banner\n{agent_zip.TOO_OLD} 3.6\n", 1, "its Python is 3.6, too old; name a Python of 3.10 or later"),
        ("Unknown option: -I\nusage: python [option] ...\n", 2, "its Python is too old"),
        (f"{agent_zip.NOT_WRITTEN} /h/.cache: No space left on device\n", 1, "the agent's files can't be written there: /h/.cache: No space left on device; free disk space"),
        ("This account is currently not available.\n", 1, "its user may not log in"),
        ("a\nsomething odd\n", 3, "something odd (exit code 3)"),
        ("", 255, "it printed nothing (exit code 255)"),
        ("", None, "no agent answered"),
    ],
)  # fmt: skip
def test_what_ssh_said_becomes_one_line(said: str, code: int | None, line: str) -> None:
    told = ssh.explain_failure("b", said, code)
    assert told.startswith(f"host b: {line}") and "\n" not in told


def _fake_old_python(folder: Path) -> str:
    """A Python that says it is 3.6."""
    path = folder / "old python"
    code = "import sys; sys.version_info = (3, 6, 9, 'final', 0); exec(sys.argv.pop(1))"
    path.write_text(f'#!/bin/sh\nshift 3\nexec {shlex.quote(sys.executable)} -c {shlex.quote(code)} "$@"\n')
    path.chmod(0o755)
    return str(path)


@at_length
def test_each_host_that_fails_is_named_and_nothing_is_started(stoker: Stoker, netcluster: NetCluster) -> None:
    """Several faults in turn, on a host of their own each."""
    script = stoker.script("s.py", "print('ran')")

    def refused(path: Path, *more: str) -> str:
        done = stoker("run", "--hosts", str(path), *more, script)
        assert done.code == 69 and "Traceback" not in done.err and "ran" not in done.out, done.err
        assert not (stoker.cwd / "runs").exists()
        assert wait_for(lambda: True if not any(netcluster.pids(n) for n in range(3)) else None, 12), "an agent stays"
        return done.err

    def names(said: str, host: str, why: str) -> bool:
        return re.search(f"host {re.escape(host)}( can't be used)?: {re.escape(why)}", said) is not None

    a, b, c = netcluster.hosts
    netcluster.stop_sshd(1)
    assert names(refused(netcluster.file()), b.name, "connection refused")
    netcluster.start_sshd(1)
    netcluster.cut(2)
    assert names(refused(netcluster.file()), c.name, "no ")
    netcluster.repair(2)
    assert names(
        refused(netcluster.file(per_host=[{"python": "/no/such/python"}])),
        a.name,
        "no Python: /no/such/python does not exist there",
    )
    assert names(
        refused(netcluster.file(per_host=[{}, {"python": _fake_old_python(netcluster.folder)}])),
        b.name,
        "its Python is 3.6, too old",
    )
    key = netcluster.folder / "open"
    key.write_bytes(netcluster.identity.read_bytes())
    key.chmod(0o644)
    assert names(
        refused(netcluster.file(per_host=[{"identity": str(key)}])),
        a.name,
        f"permission denied: the private key {key} has permissions 0644",
    )
    netcluster.change_host_key(2)
    assert names(refused(netcluster.file()), c.name, "its host key changed")
    flags = [
        f"--ssh-option=-F{netcluster.folder}/ssh_config",
        f"--ssh-option=-i{netcluster.identity}",
        "--python",
        sys.executable,
    ]
    done = stoker("run", "--hosts", f"{a.name},no-such-host.invalid", *flags, script)
    assert done.code == 69 and names(done.err, "no-such-host.invalid", "unknown host")


# ---- stoker cluster init ----


def _reaching(cluster: NetCluster) -> list[str]:
    return ["--ssh-config", str(cluster.folder / "ssh_config"), "--identity", str(cluster.identity)]


def _fake_venv(home: Path, name: str, torch: str | None) -> None:
    """A Python of its own with, or without, a torch that is never imported."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home / name)], check=True)
    if torch:
        site = next((home / name / "lib").glob("python*")) / "site-packages"
        (site / "torch").mkdir()
        (site / "torch" / "__init__.py").write_text("raise SystemExit('imported')\n")
        (site / f"torch-{torch}.dist-info").mkdir()
        (site / f"torch-{torch}.dist-info" / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: torch\nVersion: {torch}\n"
        )


def test_init_asks_the_hosts_and_writes_a_file_that_reads_back(stoker: Stoker, netcluster: NetCluster) -> None:
    a, b, c = netcluster.hosts
    _fake_venv(a.home, "venv", "2.9.1")
    _fake_venv(b.home, "venv", None)
    _fake_venv(b.home, ".venv", "2.10.0")
    box = netcluster.folder / "box.json"
    box.write_text(json.dumps(machine_json(2)))
    for n, machine in enumerate((box, stoker.env["STOKER_MACHINE"], stoker.env["STOKER_MACHINE"])):
        netcluster.set_env(n, STOKER_MACHINE=str(machine))
    done = stoker(
        "cluster", "init", a.name, b.name, f"root@{c.name}", "--workdir", "~/my train", *_reaching(netcluster)
    )
    assert done.code == 0, done.err
    read = hosts.read_hosts_file(str(stoker.cwd / "cluster.yaml"))
    assert [(host.slots, host.interface, host.workdir) for host in read.hosts] == [
        (2, "eth0", "~/my train"),
        (1, "eth0", "~/my train"),
        (1, "eth0", "~/my train"),
    ]
    assert [host.python for host in read.hosts[:2]] == ["~/venv/bin/python", "~/.venv/bin/python"] and read.hosts[
        2
    ].user == "root"
    text = (stoker.cwd / "cluster.yaml").read_text()
    python3_has_torch = "no torch in python3" not in text  # of the machine that the tests run on
    assert (f"no torch on {c.name} (tried ~/venv/bin/python, " in done.err) is not python3_has_torch, done.err
    assert f"no torch on {a.name}" not in done.err
    assert "# 2 × NVIDIA A40, torch 2.9.1" in text and "# no GPU, one CPU rank, torch 2.10.0" in text
    again = stoker("cluster", "init", a.name, *_reaching(netcluster))
    assert (
        again.code == 73
        and "cluster.yaml already exists; use --force" in again.err
        and (stoker.cwd / "cluster.yaml").read_text() == text
    )
    (stoker.cwd / "sub").mkdir()
    for name in ("ssh_config", "id"):
        shutil.copy(netcluster.folder / name, stoker.cwd / name)
    beside = stoker("cluster", "init", a.name, "--ssh-config", "ssh_config", "--identity", "id", "--out", "sub/c.yaml")
    assert beside.code == 0 and hosts.read_hosts_file(str(stoker.cwd / "sub" / "c.yaml")).ssh_config == str(
        stoker.cwd / "ssh_config"
    ), beside.err
    forced = stoker("cluster", "init", a.name, "--force", "--python", sys.executable, *_reaching(netcluster))
    assert (
        forced.code == 0 and hosts.read_hosts_file(str(stoker.cwd / "cluster.yaml")).hosts[0].python == sys.executable
    ), forced.err


def test_init_names_every_host_that_does_not_answer_and_writes_nothing(stoker: Stoker, netcluster: NetCluster) -> None:
    a, b, c = netcluster.hosts
    netcluster.stop_sshd(1)
    netcluster.change_host_key(2)
    done = stoker("cluster", "init", a.name, b.name, c.name, *_reaching(netcluster))
    assert (
        done.code == 69
        and f"host {b.name}: connection refused" in done.err
        and f"host {c.name}: its host key changed" in done.err
    )
    assert not (stoker.cwd / "cluster.yaml").exists() and a.name not in done.err
    for words, says in (
        (["a", "a"], "host a is listed twice"),
        (["-x"], ""),
        (["a b"], "is not a valid name"),
        (["a", "--out", "no/where.yaml"], "does not exist"),
    ):
        refused = stoker("cluster", "init", *words)
        assert refused.code in (64, 73, 78) and says in refused.err and "Traceback" not in refused.err, refused.err


def test_a_written_file_quotes_what_yaml_would_misread() -> None:
    answer = hosts_writer.HostEntry("1e3", "no", (), None, "~/my venv: x/bin/python", "3.11.2", None, "eth0", "10.1")
    import yaml

    data = yaml.safe_load(
        hosts_writer.format_hosts_file([answer], {"workdir": "~/it's, {here}"}, {"ssh_config": "/a #b"})
    )
    assert data["hosts"] == [{"host": "1e3", "slots": 1, "user": "no", "interface": "eth0", "address": "10.1"}]
    assert (
        data["defaults"] == {"workdir": "~/it's, {here}", "python": "~/my venv: x/bin/python"}
        and data["ssh_config"] == "/a #b"
    )


# ---- the folder of shared connections ----


@pytest.mark.parametrize("kind", ["link", "folder"])
def test_a_folder_for_connections_that_another_user_put_there_is_not_used(
    public: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    needs_root()
    sockets = public / "sockets"
    monkeypatch.setattr(ssh, "_socket_dir", lambda: str(sockets))
    (public / "target").mkdir(mode=0o700)

    def plant() -> None:
        if kind == "link":
            sockets.symlink_to(public / "target")
        else:
            sockets.mkdir(mode=0o700)

    do_as(ATTACKER, plant)
    assert ssh.why_unshared() and ssh._sharing_options() == ["-oControlMaster=no", "-oControlPath=none"]


@pytest.mark.parametrize("text", ["x@" * 30_000, "line 1: bad\n" * 5000, "\x1b[2J\x07" * 100, "\n" * 60_000])
def test_whatever_a_login_prints_is_explained_in_printable_text(text: str) -> None:
    for code in (None, 0, 1, 126, 127, 255):
        assert ssh.explain_failure("far", text, code).isprintable()
