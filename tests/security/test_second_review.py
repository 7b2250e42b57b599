"""What a second security review found: each test shows one way in, and that it is closed."""

from __future__ import annotations

import json
import os
import resource
import shutil
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from conftest import Stoker, at_length, wait_for
from stoker.contract import checkpoints
from stoker.contract.names import Refusal
from stoker.control.launch import rendezvous
from stoker.control.launch.nodes import Meeting
from stoker.control.machine import processes
from stoker.control.scheduler import slurm_submit as submit
from stoker.training.config import files
from stoker.training.data import ours as digests

OTHER = 65534


def needs_root() -> None:
    if os.geteuid():
        pytest.skip("becoming a second user takes root")


# ---- a run directory that somebody else made ----


def _give(path: Path, uid: int = OTHER) -> None:
    os.chown(path, uid, uid, follow_symlinks=False)


def test_a_checkpoint_of_another_user_is_not_resumed_from(stoker: Stoker) -> None:
    needs_root()
    stoker.script(
        "a.py",
        "import os, stoker\n"
        "folder = os.path.join(os.environ['STOKER_RUN_DIR'], 'checkpoints')\n"
        "os.mkdir(folder)\n"
        "for step in (1, 2): open(f'{folder}/step-{step}.pt', 'w').close()\n"
        f"os.chown(f'{{folder}}/step-2.pt', {OTHER}, {OTHER})\n"
        "print('resumed', os.path.basename(stoker.resume()))\n"
        f"os.chown(folder, {OTHER}, {OTHER})\n"
        "print('resumed', stoker.resume())\n",
    )
    done = stoker("run", "--nproc-per-node", "1", "a.py")
    assert done.code == 0 and "resumed step-1.pt" in done.out and "resumed None" in done.out, done.out + done.err
    assert "step-2.pt belongs to" in done.err + done.out
    folder = stoker.latest / "checkpoints"
    assert checkpoints.newest(str(stoker.latest)) is None
    os.chown(folder, 0, 0)
    saved = checkpoints.newest(str(stoker.latest))
    assert saved is not None and saved.path.endswith("step-1.pt")


# ---- files of the working directory ----


@pytest.mark.parametrize("key", ["python", "ssh_options"])
def test_a_hosts_file_that_lies_here_is_not_obeyed_unasked(stoker: Stoker, key: str) -> None:
    owned, program = stoker.cwd / "owned", stoker.cwd / "planted.sh"
    program.write_text(f"#!/bin/sh\ntouch '{owned}'\n")
    program.chmod(0o755)
    hosts = {
        "python": f"hosts: [{{host: localhost, python: {program}}}]\n",
        "ssh_options": f"ssh_options: ['-oProxyCommand={program}']\nhosts: [nowhere.example]\n",
    }
    (stoker.cwd / "cluster.yaml").write_text(hosts[key])
    done = stoker("cluster", "check", "--quick")
    assert done.code == 64 and "--hosts cluster.yaml" in done.err, done.err
    assert not owned.exists()
    stoker("cluster", "check", "--quick", "--hosts", "cluster.yaml")  # the test is real: asked, it is obeyed
    assert owned.exists() or (key == "ssh_options" and not shutil.which("ssh"))


def test_a_config_by_name_is_ours_whatever_lies_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = files.shipped()[0]
    (tmp_path / name).write_text("{planted: true}\n")
    monkeypatch.chdir(tmp_path)
    assert "planted" not in files.load(name) and files.load(f"./{name}") == {"planted": True}


# ---- a runs folder where somebody else can exchange run directories ----


@pytest.mark.parametrize(
    ("uid", "mode", "reason"),
    [
        (OTHER, 0o1777, "belongs to"),
        (OTHER, 0o755, "belongs to"),
        (0, 0o777, "all users can write"),
        (0, 0o775, "its group"),
        (0, 0o1777, ""),
        (0, 0o1770, ""),
        (0, 0o755, ""),
    ],
)
def test_no_run_is_started_where_others_can_exchange_it(stoker: Stoker, uid: int, mode: int, reason: str) -> None:
    needs_root()
    runs = stoker.cwd / "runs"
    runs.mkdir()
    os.chown(runs, uid, OTHER)
    runs.chmod(mode)
    stoker.script("ok.py", "print('fine')\n")
    for words in (["run", "ok.py"], ["run", "--runs-dir", str(runs), "ok.py"]):
        done = stoker(*words)
        if reason:
            assert done.code == 73 and reason in done.err and "--runs-dir" in done.err and not list(runs.iterdir())
        else:
            assert done.code == 0, done.err
    assert stoker("runs").code == 0  # to look at it is harmless


def test_a_link_that_somebody_else_made_is_not_the_runs_folder(stoker: Stoker) -> None:
    needs_root()
    (stoker.cwd / "mine").mkdir(mode=0o700)
    (stoker.cwd / "runs").symlink_to("mine")
    _give(stoker.cwd / "runs")
    done = stoker("run", stoker.script("ok.py", ""))
    assert done.code == 73 and "belongs to" in done.err and not list((stoker.cwd / "mine").iterdir())


def test_a_run_directory_that_is_replaced_gets_no_further_attempt(stoker: Stoker) -> None:
    """As the owner of a folder above can do it: another one with their checkpoint lies there when the ranks restart."""
    stoker.script(
        "a.py",
        "import os, stoker\n"
        "place = os.environ['STOKER_RUN_DIR']\n"
        "print('attempt', os.environ['TORCHELASTIC_RESTART_COUNT'], stoker.resume(), flush=True)\n"
        "os.rename(place, place + '.away')\n"
        "os.makedirs(place + '/checkpoints/theirs')\n"
        "raise SystemExit(3)\n",
    )
    done = stoker("run", "--max-restarts", "2", "a.py")
    assert done.code == 73 and "was moved or replaced during the run" in done.err, done.err
    assert done.out.count("attempt") == 1
    (kept,) = (stoker.cwd / "runs").glob("*.away")
    assert json.loads((kept / "verdict.json").read_text())["cause"] == "launch.runs-dir"
    (there,) = (path for path in (stoker.cwd / "runs").iterdir() if path.name[0] == "2" and path != kept)
    assert sorted(path.name for path in there.iterdir()) == ["checkpoints"]


def test_sbatch_gets_the_script_that_was_made_whatever_lies_in_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "sbatch"
    tool.write_text(
        f'#!/bin/sh\n[ -z "$2" ] || cat "$2" > {tmp_path}/got\n[ -n "$2" ] || cat > {tmp_path}/got\necho 12\n'
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    script = submit.make_script(submit.SubmitOptions(), ["stoker", "run"], ["a.py"], "a", str(tmp_path), "/", False)
    path = submit.write(script, str(tmp_path / "runs"), "a")
    Path(path).write_text("#!/bin/sh\ntouch planted\n")
    assert submit.submit(path, script, os.environ) == "12"
    assert (tmp_path / "got").read_text() == script.text


# ---- a command line without end ----

_HUGE = """
import ctypes, mmap, os, struct, sys, time
size = int(sys.argv[1]) << 20
area = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
area.write(b"python\\0--token\\0sk-not-to-be-shown-0123456789\\0" + b"word\\0" * ((size - 64) // 5))
begin = ctypes.addressof(ctypes.c_char.from_buffer(area))
stat = open("/proc/self/stat").read().rpartition(")")[2].split()
code, data, brk, stack = stat[23:25], stat[42:44], stat[44], stat[25]
libc = ctypes.CDLL(None, use_errno=True)
libc.sbrk.restype = ctypes.c_long
now = libc.sbrk(0)
fields = [*map(int, code), *map(int, data), int(brk), now, int(stack), begin, begin + size, begin, begin]
packed = ctypes.create_string_buffer(struct.pack("=11QQIi", *fields, 0, 0, -1))
if libc.prctl(35, 14, ctypes.byref(packed), len(packed) - 1, 0):
    sys.exit(os.strerror(ctypes.get_errno()))
print("up", flush=True)
time.sleep(600)
"""


@at_length
def test_a_command_line_of_half_a_gigabyte_is_cut_before_it_is_read(tmp_path: Path) -> None:
    """Any user's process can do that to itself."""
    with subprocess.Popen(
        [sys.executable, "-c", _HUGE, "512"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as child:
        try:
            assert child.stdout is not None and child.stderr is not None
            if child.stdout.readline() != b"up\n":
                pytest.skip(f"this kernel does not let a process do that: {child.stderr.read().decode()[-200:]}")
            began = time.process_time()
            line = processes.command(child.pid)
            assert time.process_time() - began < 1.0
            assert line is not None and line.startswith("python --token <redacted> word") and line.endswith("word …")
            assert len(line) < 5000
            processes.environment(child.pid)
        finally:
            child.kill()


@pytest.mark.parametrize(("words", "shown"), [(["x" * 5000], "…"), (["a b " + "x" * 5000], "a b …")])
def test_a_word_is_not_cut_within(words: list[str], shown: str) -> None:
    with subprocess.Popen([*words, "600"], executable="/bin/sleep") as child:
        try:
            assert wait_for(lambda: processes.command(child.pid), 10.0) == shown  # empty for a moment after exec
        finally:
            child.kill()


# ---- files that the doctor writes ----


@pytest.mark.parametrize(
    ("kind", "flag"),
    [
        ("pipe", "--bundle"),
        ("theirs", "--record"),
        ("link", "--bundle"),
        pytest.param("pipe", "--record", marks=at_length),
        pytest.param("theirs", "--bundle", marks=at_length),
        pytest.param("link", "--record", marks=at_length),
    ],
)
def test_the_doctor_writes_a_new_file_whatever_lies_there(stoker: Stoker, flag: str, kind: str) -> None:
    path, precious = stoker.cwd / "out", stoker.cwd / "precious"
    precious.write_text("kept")
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to(precious)
    else:
        needs_root()
        path.write_text("")
        path.chmod(0o666)
        _give(path)
    recorded = Path(__file__).parents[1] / "machines" / "laptop.json"  # looking at this one would import torch
    done = stoker("doctor", "--only", "host.disk", "--machine", str(recorded), flag, "out", timeout=60)
    about = path.lstat()
    assert done.code in (0, 1) and about.st_uid == os.geteuid() and stat.S_IMODE(about.st_mode) == 0o600, done.err
    assert stat.S_ISREG(about.st_mode) and about.st_size and precious.read_text() == "kept"


def test_a_folder_of_the_path_that_may_not_be_entered_costs_no_bundle(tmp_path: Path) -> None:
    """A program that may not be run gives another error than one that is missing."""
    for name in ("nvidia-smi", "dmesg"):
        (tmp_path / name).write_text("")
        (tmp_path / name).chmod(0o644)
    code = "from stoker.control.doctor.bundle import _said; print(_said(['nvidia-smi', '-q']))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and "nvidia-smi can't be started: Permission denied" in done.stdout, done.stderr


# ---- others' records without end ----


def test_listing_all_users_runs_takes_bounded_memory_and_time(stoker: Stoker) -> None:
    needs_root()
    runs = stoker.cwd / "runs"
    runs.mkdir()
    base = {"schema": 1, "name": "x", "started": 5.0, "launcher": {}, "plan": {"world_size": 1}}
    large = json.dumps({**base, "filling": [[i] for i in range(180_000)]})
    assert len(large) < 2 << 20
    event = json.dumps({"event": "filling", "time": 7.0, "x": "y" * 1000}) + "\n"
    for number in range(130):
        folder = runs / f"20260101-000000-{number:03}"
        folder.mkdir()
        padding = "z" * (3 << 20) if 105 < number <= 110 else ""
        (folder / "run.json").write_text(large if number > 110 else json.dumps({**base, "padding": padding}))
        if number > 127 or number == 105:
            (folder / "events.jsonl").write_text(event * 20_000)
        for path in (*folder.iterdir(), folder):
            _give(path)
    limit = "import resource, sys; resource.setrlimit(resource.RLIMIT_AS, (700 << 20, 700 << 20));"
    code = f"{limit} sys.argv[1:] = ['runs', '--all', '--json']; from stoker.cli.main import entry; entry()"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=stoker.cwd, env=stoker.env, capture_output=True, text=True, check=False
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr[-500:]
    assert after.ru_utime - before.ru_utime < 20.0
    listing = json.loads(done.stdout)
    assert len(listing["runs"]) == 100 and listing["others_left_out"] == 30
    assert {row["seconds"] for row in listing["runs"]} == {2.0, None}
    assert "damaged" not in done.stderr
    assert "30 folders of other users left out: very many runs" in stoker("runs", "--all").out


# ---- ports that anybody can reach ----


def _connect(port: int, source: str = "127.0.0.1") -> socket.socket:
    made = socket.socket()
    made.settimeout(10.0)
    made.bind((source, 0))
    made.connect(("127.0.0.1", port))
    return made


def test_a_flood_does_not_push_out_who_is_about_to_prove_the_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_RDZV_SECRET", "a secret that both sides know")
    secret = rendezvous.find_secret(os.environ)
    assert secret is not None
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        own.listen(1024)
        port = own.getsockname()[1]
        meeting = Meeting(2, None, "127.0.0.1", port, "job", 0)
        lines: list[str] = []
        flood: list[socket.socket] = []
        with rendezvous._Receiving(meeting, 1, own, secret, lines.append) as receiving:
            guest = _connect(port, "127.0.0.2")
            hello = {"job": "job", "count": 2, "ranks": 1, "nonce": secret.nonce()}
            guest.sendall(json.dumps(hello).encode() + b"\n")
            wait_for(lambda: (receiving._welcome(), receiving._guests)[1], 5.0)
            (there,) = receiving._guests.values()
            receiving._hear(there)
            challenge = json.loads(guest.makefile().readline())["challenge"]
            for number in range(300):  # some say hello, too
                flood.append(_connect(port, "127.0.0.3"))
                if number % 2:
                    flood[-1].sendall(json.dumps(hello).encode() + b"\n")
                receiving._welcome()
            guest.sendall(json.dumps({"proof": secret.proof(rendezvous.GUEST, hello, challenge)}).encode() + b"\n")
            receiving.wait(time.monotonic() + 10.0, lambda: None)
            assert [one.address for one in receiving._accepted] == ["127.0.0.2"]
            for way in (guest, *flood):
                way.close()


# ---- imports, and lists of what may be removed ----


def test_the_lock_of_known_hashes_is_not_written_through_a_link(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("kept")
    (tmp_path / "index.json.lock").symlink_to(precious)
    with pytest.raises(Refusal, match="lock file"):
        digests._remember(str(tmp_path / "index.json"), {})
    assert precious.read_text() == "kept"
