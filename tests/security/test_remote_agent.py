"""The agent on another host, and copies to it: nothing runs there that was not sent, nothing is written outside the folder that was named, on either side.

There is no other host here: a program that stands in for ssh runs the command in a shell of this machine, with a home of its own.
"""

from __future__ import annotations

import json
import os
import shlex
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conftest import Done, Stoker, at_length_but
from localuser import ATTACKER, do_as, needs_root
from stoker.contract import protocol
from stoker.control.agent.receiving import Receiver, Refused, serve
from stoker.control.cluster import agentzip, copying, ssh
from stoker.control.cluster.ssh import explain
from stoker.control.machine.hashing import Hashes, sha256_of

SSH = """#!/bin/sh
for word; do last=$word; done
cd {home} && exec env -i HOME={home} PATH="$PATH" sh -c "$last"
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    folder = tmp_path / "home"
    folder.mkdir(mode=0o700)
    return folder


@pytest.fixture
def far(stoker: Stoker, tmp_path: Path, home: Path) -> Callable[..., Done]:
    """`stoker run` with one other host."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "ssh").write_text(SSH.format(home=shlex.quote(str(home))))
    (folder / "ssh").chmod(0o755)
    stoker.env["PATH"] = f"{folder}:{stoker.env['PATH']}"
    script = stoker.script(
        "ok.py", "import os, stoker\nprint('ran from', os.path.dirname(os.path.dirname(stoker.__file__)))\n"
    )

    def run(*more: str, **env: str) -> Done:
        flags = ("--hosts", "far.example", "--python", sys.executable, "--nproc-per-node", "1", "--no-preflight", *more)
        return stoker("run", *flags, script, env=env, timeout=60)

    return run


def agents(home: Path) -> list[Path]:
    return sorted((home / ".cache" / "stoker").glob("agent-*"))


def test_a_kept_agent_is_private_and_used_again(far: Callable[..., Done], home: Path) -> None:
    done = far()
    (base,) = agents(home)
    assert done.code == 0 and f"ran from {base}" in done.out, done.err
    assert (
        stat.S_IMODE(base.stat().st_mode) == 0o700
        and stat.S_IMODE((home / ".cache" / "stoker").stat().st_mode) == 0o700
    )
    before = base.stat().st_ino
    assert far().code == 0 and [path.stat().st_ino for path in agents(home)] == [before]


def a_changed_file(base: Path) -> None:
    path = base / "stoker" / "control" / "agent" / "guardian.py"
    path.write_bytes(path.read_bytes().replace(b"import os", b"import os; open('owned', 'w')", 1))


def of_the_same_size(base: Path) -> None:
    path = base / "stoker" / "contract" / "names.py"
    path.write_bytes(path.read_bytes().replace(b"STOKER_RUN_ID", b"STOKER_RUN_IE", 1))


def a_missing_file(base: Path) -> None:
    (base / "stoker" / "control" / "agent" / "spawn.py").unlink()


def a_file_too_many(base: Path) -> None:
    (base / "json.py").write_text("open('owned', 'w')\n")


def a_folder_too_many(base: Path) -> None:
    (base / "selectors").mkdir()
    (base / "selectors" / "__init__.py").write_text("open('owned', 'w')\n")


def a_link_in_it(base: Path) -> None:
    path = base / "stoker" / "contract"
    path.rename(base.parent / "elsewhere")
    path.symlink_to(base.parent / "elsewhere")


def open_to_others(base: Path) -> None:
    base.chmod(0o777)
    a_changed_file(base)


def half_a_one(base: Path) -> None:
    import shutil

    shutil.rmtree(base / "stoker" / "control")


@pytest.mark.parametrize(
    "spoil",
    at_length_but(
        [of_the_same_size, a_file_too_many, a_link_in_it, open_to_others],
        [
            a_changed_file,
            of_the_same_size,
            a_missing_file,
            a_file_too_many,
            a_folder_too_many,
            a_link_in_it,
            open_to_others,
            half_a_one,
        ],
    ),
)
def test_an_agent_that_is_not_what_was_sent_is_replaced_before_it_runs(
    far: Callable[..., Done], home: Path, tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    assert far().code == 0
    (base,) = agents(home)
    spoil(base)
    done = far()
    assert done.code == 0 and f"ran from {base}" in done.out, done.err
    assert agents(home) == [base] and stat.S_IMODE(base.stat().st_mode) == 0o700
    assert not list(tmp_path.rglob("owned"))


def test_a_link_in_the_place_of_the_agent_is_refused(far: Callable[..., Done], home: Path) -> None:
    assert far().code == 0
    (base,) = agents(home)
    base.rename(home / "elsewhere")
    base.symlink_to(home / "elsewhere")
    done = far()
    assert (
        done.code == 69
        and "the agent's folder there is not safe" in done.err
        and "is not a folder" in done.err
        and "Traceback" not in done.err
    ), done.err


def test_another_users_folder_in_the_place_of_the_agent_is_refused(far: Callable[..., Done], home: Path) -> None:
    needs_root()
    assert far().code == 0
    (base,) = agents(home)
    for path in (base, *base.rglob("*")):
        os.chown(path, ATTACKER, ATTACKER)
    done = far()
    assert done.code == 69 and f"belongs to uid {ATTACKER}" in done.err and "Traceback" not in done.err, done.err


def test_a_folder_that_others_can_write_to_is_closed(far: Callable[..., Done], home: Path) -> None:
    (home / ".cache" / "stoker").mkdir(parents=True)
    (home / ".cache" / "stoker").chmod(0o777)
    assert far().code == 0 and stat.S_IMODE((home / ".cache" / "stoker").stat().st_mode) == 0o700


@pytest.mark.parametrize(
    "change", [lambda data: data[:-1], lambda data: data[:1000] + b"x" + data[1001:], lambda data: b""]
)
def test_what_did_not_arrive_whole_does_not_run(home: Path, change: Callable[[bytes], bytes]) -> None:
    packed = agentzip.pack()
    argv = [
        sys.executable,
        "-I",
        "-S",
        "-c",
        agentzip.unpack("stoker.control.agent.receiving"),
        agentzip.announced(packed),
    ]
    done = subprocess.run(
        argv, input=change(packed), env={"HOME": str(home)}, capture_output=True, timeout=30, check=False
    )
    assert done.returncode == 1 and agentzip.DAMAGED in done.stderr.decode() and not (home / ".cache").exists()
    assert "did not arrive whole" in explain("far", done.stderr.decode(), 1)


def test_exactly_these_variables_travel(far: Callable[..., Done], stoker: Stoker) -> None:
    """As docs/cluster.md lists them."""
    travel = ["NCCL_X", "GLOO_X", "TORCH_X", "PYTORCH_X", "CUDA_X", "HF_TOKEN", "OMP_X"]
    stay = [
        "CUDA_VISIBLE_DEVICES",
        "WANDB_API_KEY",
        "AWS_SECRET_ACCESS_KEY",
        "STOKER_RDZV_SECRET",
        "PYTHONPATH",
        "LD_PRELOAD",
        "HUGGING_FACE_HUB_TOKEN",
        "MINE",
    ]
    stoker.script("ok.py", "import os\nprint(*sorted(name for name, value in os.environ.items() if value == 'mark'))\n")
    done = far(
        "--env",
        "GIVEN=mark",
        **dict.fromkeys(
            [*travel, *(name for name in stay if name not in ("PYTHONPATH", "LD_PRELOAD", "CUDA_VISIBLE_DEVICES"))],
            "mark",
        ),
    )
    assert done.code == 0 and done.out.removeprefix("CPU0:").split() == sorted([*travel, "GIVEN"]), done.out + done.err


# ---- what a host prints before its agent ----


@pytest.mark.parametrize(
    "text",
    [
        "@" * 60_000,
        "x@" * 30_000,
        "a" * 60_000,
        "line 1: bad\n" * 5000,
        "\x1b[2J\x07" * 100,
        "Permission denied (" * 5000,
        "\n" * 60_000,
    ],
)
def test_what_a_login_prints_is_explained_in_no_time_and_printable(text: str) -> None:
    import time

    began = time.process_time()
    for code in (None, 0, 1, 126, 127, 255):
        assert explain("far", text, code).isprintable()
    assert time.process_time() - began < 5


# ---- the shared connection's folder ----


@pytest.mark.parametrize("kind", ["link", "file", "pipe", "foreign", "open"])
def test_a_folder_for_connections_that_is_not_ours_is_not_used(
    public: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    needs_root()
    place = public / "sockets"
    monkeypatch.setattr(ssh, "_sockets", lambda: str(place))
    (public / "target").mkdir(mode=0o700)

    def plant() -> None:
        if kind == "link":
            place.symlink_to(public / "target")
        elif kind == "file":
            place.touch()
        elif kind == "pipe":
            os.mkfifo(place)
        else:
            place.mkdir(mode=0o700)

    do_as(0 if kind == "open" else ATTACKER, plant)
    if kind == "open":
        place.chmod(0o777)
    assert ssh.unshared() and ssh._shared() == ["-oControlMaster=no", "-oControlPath=none"]


# ---- copies: the far end ----


def offer(receiver: Receiver, root: Path, *entries: list[Any]) -> list[str]:
    return receiver.offer(str(root), "inside", list(entries))


@pytest.mark.parametrize("path", ["../x", "a/../../x", "/etc/x", "", "..", "a/..", "a\0b", "a/../b"])
@pytest.mark.parametrize("kind", ["file", "link"])
def test_a_path_that_leads_out_is_refused(tmp_path: Path, path: str, kind: str) -> None:
    root = tmp_path / "root"
    with pytest.raises(Refused, match="leads out of"):
        offer(Receiver(), root, [path, kind, 0o644, 1, "x"])
    assert [one.name for one in tmp_path.iterdir()] == ["root"]


@pytest.mark.parametrize(
    "entries",
    [None, 1, {}, "x", [1], [[]], [["a"]], [["a", "file", 0o644, "1", "x"]], [["a", "file", 0o644, -1, "x"]], [["a", "device", 0, 1, "x"]], [[1, "file", 0, 1, "x"]],
     [["a", "file", True, 1, "x"]], [["a", "file", 0, 1, None]], [["a", "file", 0, 10**30, "x"]]],
)  # fmt: skip
def test_an_offer_of_another_shape_is_refused(tmp_path: Path, entries: Any) -> None:
    with pytest.raises(Refused, match="can't be read"):
        Receiver().offer(str(tmp_path), "inside", entries)


def test_only_what_was_offered_is_taken_and_no_program_becomes_setuid(tmp_path: Path) -> None:
    receiver = Receiver()
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert offer(receiver, tmp_path / "root", ["a", "file", 0o6755, 0, empty]) == ["a"]
    with pytest.raises(Refused, match="was not offered"):
        receiver.begin("b", 0o644)
    receiver.begin("a", 0o6755)
    receiver.end(empty)
    assert stat.S_IMODE((tmp_path / "root" / "a").stat().st_mode) == 0o755


def test_nothing_is_changed_or_removed_behind_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    root.mkdir()
    elsewhere.mkdir()
    for folder in (root / "data", elsewhere):
        folder.mkdir(exist_ok=True)
        (folder / "x").write_text("hello")
        (folder / "x").chmod(0o600)
    digest = sha256_of(str(elsewhere / "x"))
    (root / ".stoker-sync.json").write_text(
        json.dumps({"schema": 2, "root": str(root), "origins": {"here": {"data/x": digest}}})
    )
    (root / "data" / "x").unlink()
    (root / "data").rmdir()
    (root / "data").symlink_to(elsewhere)  # its user has moved it
    receiver = Receiver()
    assert receiver.offer(str(root), "inside", [["data/x", "file", 0o755, 5, digest]], "here") == []
    assert stat.S_IMODE((elsewhere / "x").stat().st_mode) == 0o600
    receiver = Receiver()
    receiver.offer(str(root), "inside", [], "here")
    assert receiver.finish()["removed"] == 0 and (elsewhere / "x").read_text() == "hello"


@pytest.mark.parametrize("content", [b"[" * 100_000, b"7", b'{"schema": 2}', b'{"schema": 2, "origins": 7}', b'{"schema": 2, "origins": {"a": [1]}}',
                                     b'{"schema": 2, "origins": {"a": {"x": 1}}}', b"\xff", b""])  # fmt: skip
def test_a_manifest_that_is_none_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / ".stoker-sync.json").write_bytes(content)
    with pytest.raises(Refused, match=r"stoker-sync\.json can't be read"):
        offer(Receiver(), tmp_path)


def test_a_manifest_that_names_files_elsewhere_removes_none(tmp_path: Path) -> None:
    (tmp_path / "keep").write_text("x")
    root = tmp_path / "root"
    root.mkdir()
    names = {"../keep": sha256_of(str(tmp_path / "keep"))}
    (root / ".stoker-sync.json").write_text(json.dumps({"schema": 2, "root": str(root), "origins": {"": names}}))
    receiver = Receiver()
    offer(receiver, root)
    with pytest.raises(Refused, match="leads out of"):
        receiver.finish()
    assert (tmp_path / "keep").exists()


def test_a_pipe_where_a_file_was_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x")
    (tmp_path / ".stoker-sync.json").write_text(
        json.dumps({"schema": 2, "root": str(tmp_path), "origins": {"": {"x": "0" * 64}}})
    )
    receiver = Receiver()
    offer(receiver, tmp_path)
    assert receiver.finish()["removed"] == 0


ORDERS = [
    b"{}\n", b'{"do": 7}\n', b'{"do": ["offer"]}\n', b'{"do": "dance"}\n', b'{"do": "offer"}\n', b'{"do": "offer", "root": 1, "manifest": "", "origin": "", "silence": 1}\n',
    b'{"do": "begin"}\n', b'{"do": "begin", "path": "x", "mode": 420}\n', b"[" * 50_000 + b"\n", b"\xff\n", b'{"do": "data", "size": -1}\n',
    b'{"do": "offer", "root": "%ROOT%", "manifest": "inside", "origin": "", "silence": 5, "size": 1}\n[',
    b'{"do": "offer", "root": "%ROOT%", "manifest": "inside", "origin": "", "silence": 5, "size": 40000}\n' + b"[" * 40_000,
]  # fmt: skip


@pytest.mark.parametrize("orders", ORDERS, ids=range(len(ORDERS)))
def test_the_far_end_refuses_orders_it_can_not_read(tmp_path: Path, orders: bytes) -> None:
    read, write = os.pipe()
    answers = os.open(tmp_path / "answers", os.O_RDWR | os.O_CREAT)
    os.write(write, orders.replace(b"%ROOT%", str(tmp_path / "root").encode())[:60_000])
    os.close(write)
    assert serve(read, answers) == 1
    said = (tmp_path / "answers").read_bytes()
    assert said.startswith(protocol.SENTINEL) and b'"refused"' in said
    os.close(read)
    os.close(answers)


# ---- copies: our end ----


def test_sync_through_the_stand_in(far: Callable[..., Done], home: Path, stoker: Stoker) -> None:
    (stoker.cwd / "more.txt").write_text("more")
    (stoker.cwd / "cluster.yaml").write_text(
        f"hosts: [{{host: far.example, workdir: {home}/work, python: {sys.executable}}}]\n"
    )
    done = stoker(
        "run", "--hosts", "cluster.yaml", "--sync", "--nproc-per-node", "1", "--no-preflight", "ok.py", timeout=60
    )
    assert done.code == 0 and (home / "work" / "more.txt").read_text() == "more", done.err


HOSTILE = {
    "what it needs is a number": b'{"is": "need", "size": 1}\n7',
    "what it needs is deep": b'{"is": "need", "size": 40000}\n' + b"[" * 40_000,
    "what it needs is nested": b'{"is": "need", "size": 4}\n[[]]',
    "it needs too much": b'{"is": "need", "size": 1000000000}\n',
    "it needs what it was not offered": b'{"is": "need", "size": 18}\n["../../etc/passwd"]'.replace(b"18", b"20"),
    "no kind": b"{}\n",
    "a deep line": b"[" * 50_000 + b"\n",
    "a refusal without a reason": b'{"is": "refused"}\n',
    "a refusal with control codes": b'{"is": "refused", "line": "\\u001b[2J\\nstoker: all is well"}\n',
    "nothing": b"",
}


@pytest.mark.parametrize("answer", HOSTILE.values(), ids=HOSTILE)
def test_a_host_that_answers_nonsense_gets_nothing_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: bytes
) -> None:
    """The whole sender, with a far end that says this and then goes."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "a.txt").write_text("a" * 100)
    (tmp_path / "secret.txt").write_text("only-here-8c1f")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    says = tmp_path / "says"
    says.write_bytes(protocol.SENTINEL + answer)
    heard = tmp_path / "heard"
    monkeypatch.setattr(
        ssh,
        "ssh_command",
        lambda *_: ["sh", "-c", f"cat {shlex.quote(str(says))}; cat > {shlex.quote(str(heard))}"],
    )
    from stoker.control.cluster.hosts import from_mapping

    hosts = from_mapping({"hosts": [{"host": "far.example", "workdir": "/there"}]}, "cluster.yaml", written=False)
    load = copying.sync_load(hosts, str(source), lambda line: None)
    one = copying._Copy(hosts.hosts[0], hosts, load, "/there")
    import threading

    thread = threading.Thread(target=one.run, daemon=True)
    thread.start()
    thread.join(2.0)
    one.stop()
    thread.join(100)
    assert not thread.is_alive() and one.failure and one.failure.isprintable(), one.failure
    assert not heard.exists() or b"only-here-8c1f" not in heard.read_bytes()


# ---- caches of hashes ----


@pytest.mark.parametrize(
    "content",
    [b"[" * 100_000, b"7", b'{"a": 1}', b'{"a": [1, 2]}', b'{"a": [1, 2, 3, 4]}', b"\xff", b"", b'{"a":' * 3000],
)
def test_a_memory_of_hashes_that_is_none_is_read_again(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "hashes.json").write_bytes(content)
    (tmp_path / "big").write_bytes(b"x" * (5 << 20))
    assert Hashes(str(tmp_path / "hashes.json")).of(str(tmp_path / "big")) == sha256_of(str(tmp_path / "big"))


def test_a_memory_of_hashes_that_is_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "hashes.json")
    (tmp_path / "x").write_text("x")
    assert Hashes(str(tmp_path / "hashes.json")).of(str(tmp_path / "x"))
