"""What a second security review found: each test shows one way in, and that it is closed."""

from __future__ import annotations

import hashlib
import json
import os
import re
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
from stoker.contract import process
from stoker.contract.names import Refusal
from stoker.control.agent import probe_net, probe_ready
from stoker.control.agent import receiving as receiving_end
from stoker.control.cluster import listing
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


# ---- git ----


def _checkout(folder: Path, planted: Path | None = None) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "code.py").write_text("")
    git = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"]):
        subprocess.run([*git, *words], check=True)
    if planted is not None:
        program = folder / "planted.sh"
        program.write_text(f"#!/bin/sh\ntouch '{planted}'\n")
        program.chmod(0o755)
        subprocess.run([*git, "config", "core.fsmonitor", str(program)], check=True)


@pytest.mark.parametrize("where", ["nested", "submodule", "outer"])
def test_a_copied_folder_runs_no_program_that_a_checkouts_config_names(tmp_path: Path, where: str) -> None:
    outer, planted = tmp_path / "outer", tmp_path / "planted"
    _checkout(outer, planted if where == "outer" else None)
    if where != "outer":
        _checkout(outer / "inner", planted)
    if where == "submodule":
        subprocess.run(["git", "-C", str(outer), "-c", "advice.addEmbeddedRepo=false", "add", "inner"], check=True)
    planted.unlink(missing_ok=True)  # git itself ran it just now
    paths = {entry.path for entry in listing.working_directory(str(outer)).entries}
    assert "code.py" in paths and (where == "outer" or "inner/code.py" in paths)
    assert not planted.exists()


@pytest.mark.parametrize("place", [".gitignore", "deep/er/.gitignore", ".git/info/exclude", ".git/config"])
def test_a_named_pipe_that_git_would_wait_for_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    _checkout(tmp_path)
    (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / place).unlink(missing_ok=True)
    os.mkfifo(tmp_path / place)
    monkeypatch.setattr(listing, "SLOW_S", 0.5)
    monkeypatch.setattr(listing, "GIT_S", 250.0)
    with pytest.raises(Refusal, match=f"{re.escape(place)}, a named pipe: remove it"):
        listing.working_directory(str(tmp_path))


def test_a_slow_git_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _checkout(tmp_path / "checkout")
    real = shutil.which("git")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "git").write_text(f'#!/bin/sh\nsleep 0.3\nexec {real} "$@"\n')
    (tmp_path / "bin" / "git").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setattr(listing, "SLOW_S", 0.05)
    assert "code.py" in {entry.path for entry in listing.working_directory(str(tmp_path / "checkout")).entries}


def test_a_strangers_checkout_inside_ours_is_copied_without_asking_git(tmp_path: Path) -> None:
    """Git refuses a checkout of another user; ours is copied all the same."""
    needs_root()
    outer = tmp_path / "outer"
    _checkout(outer)
    _checkout(outer / "inner", tmp_path / "planted")
    for folder, folders, names in os.walk(outer / "inner"):
        for name in [".", *folders, *names]:
            os.chown(os.path.join(folder, name), OTHER, OTHER, follow_symlinks=False)
    assert "inner/code.py" in {entry.path for entry in listing.working_directory(str(outer)).entries}
    assert not (tmp_path / "planted").exists()


# ---- a run directory that somebody else made ----


def _give(path: Path, uid: int = OTHER) -> None:
    os.chown(path, uid, uid, follow_symlinks=False)


@pytest.mark.parametrize("kind", ["folder", "link", "file", "runs folder"])
def test_a_host_refuses_a_run_directory_that_somebody_else_made(tmp_path: Path, kind: str) -> None:
    needs_root()
    runs = tmp_path / "runs"
    runs.mkdir()
    run_dir = runs / "20260101-000000-exp"
    if kind == "link":
        (tmp_path / "theirs").mkdir(mode=0o777)
        run_dir.symlink_to(tmp_path / "theirs")
    elif kind == "file":
        run_dir.write_text("")
    elif kind == "folder":
        run_dir.mkdir()
        run_dir.chmod(0o777)
        (run_dir / f".shared-{os.getpid()}").write_text("")  # a name that was to be guessed
    _give(runs if kind == "runs folder" else run_dir)
    answer = probe_ready.ready(str(tmp_path), sys.executable, str(run_dir), f".shared-{os.urandom(8).hex()}")
    assert len(answer["problems"]) == 1 and not answer["shared"], answer
    assert "--runs-dir" in answer["problems"][0] or "--name" in answer["problems"][0]


def test_a_host_takes_a_run_directory_of_ones_own_again(tmp_path: Path) -> None:
    run_dir = tmp_path / "runs" / "20260101-000000-exp"
    for _ in range(2):
        answer = probe_ready.ready(str(tmp_path), sys.executable, str(run_dir), ".shared-x")
        assert answer == {"problems": [], "shared": False, "unwritable": "", "stranger": ""}


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


def test_strangers_use_up_no_threads_of_a_network_check_and_it_outlives_a_lack_of_descriptors() -> None:
    code = (
        "import resource, threading\n"
        "from stoker.control.agent import probe_net\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))\n"
        "probe_net.MOST_STRANGERS = int(input())\n"
        "listener = probe_net._listen('127.0.0.1', (0,))\n"
        "threading.Thread(target=probe_net._serve, args=(listener, b'k' * 16, []), daemon=True).start()\n"
        "print(listener.getsockname()[1], flush=True)\n"
        "while input() != 'end': print(threading.active_count(), flush=True)\n"
    )
    for most in (20, 1000):  # turned away one by one; and so many that the descriptors run out first
        with subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        ) as child:
            assert child.stdin is not None and child.stdout is not None
            child.stdin.write(f"{most}\n")
            port = int(child.stdout.readline())
            flood = [_connect(port) for _ in range(150)]
            try:
                if most > 100:
                    time.sleep(0.5)  # it meets the lack of descriptors
                    for way in flood:
                        way.close()
                assert probe_net._reach("127.0.0.1", port, b"k" * 16) == ""
                child.stdin.write("count\n")
                assert int(child.stdout.readline()) <= (60 if most == 20 else 200)
            finally:
                for way in flood:
                    way.close()
                child.stdin.write("end\n")


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


@pytest.mark.parametrize("path", ["/nowhere:", ":/nowhere", "."])
def test_an_empty_entry_of_pythonpath_is_not_the_working_directory(tmp_path: Path, path: str) -> None:
    (tmp_path / "planted.py").write_text("print('planted')\n")
    done = subprocess.run(
        [sys.executable, "-c", process.NOT_FROM_HERE + "import planted"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "ModuleNotFoundError" in done.stderr and not done.stdout


def test_a_working_directory_that_is_gone_ends_no_question(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    code = f"import os, subprocess, sys; os.rmdir({str(gone)!r}); sys.exit(subprocess.run([sys.executable, '-c', sys.argv[1]]).returncode)"
    assert (
        subprocess.run(
            [sys.executable, "-c", code, process.NOT_FROM_HERE + "print(1)"], cwd=gone, check=False
        ).returncode
        == 0
    )


def test_a_copy_removes_nothing_that_anothers_list_names(tmp_path: Path) -> None:
    needs_root()
    (tmp_path / "mine").write_text("precious")
    digest = hashlib.sha256(b"precious").hexdigest()
    for uid, left in ((OTHER, True), (0, False)):
        manifest = tmp_path / ".stoker-sync.json"
        manifest.unlink(missing_ok=True)
        manifest.write_text(json.dumps({"schema": 2, "origins": {"here": {"mine": digest}}}))
        _give(manifest, uid)
        receiver = receiving_end.Receiver()
        assert receiver.offer(str(tmp_path), "inside", [], "here") == []
        finished = receiver.finish()
        assert (tmp_path / "mine").exists() == left and finished["removed"] == (0 if left else 1)
        assert ("is ignored" in finished["ignored"]) == left


def test_nothing_is_copied_into_anothers_folder(tmp_path: Path) -> None:
    needs_root()
    folder = tmp_path / "work"
    folder.mkdir()
    folder.chmod(0o777)
    _give(folder)
    for manifest, advice in (("inside", "workdir:"), ("", "--stage PATH=REMOTE")):
        with pytest.raises(receiving_end.Refused, match=f"belongs to .*; name another with {advice}"):
            receiving_end.Receiver().offer(str(folder), manifest, [], "here")


def test_the_lock_of_known_hashes_is_not_written_through_a_link(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("kept")
    (tmp_path / "index.json.lock").symlink_to(precious)
    with pytest.raises(Refusal, match="lock file"):
        digests._remember(str(tmp_path / "index.json"), {})
    assert precious.read_text() == "kept"
