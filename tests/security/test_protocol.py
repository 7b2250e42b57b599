"""What a hostile or broken host may send: it is given up, in one line. The launcher goes on, and writes nothing outside its run directory."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conftest import Stoker, at_length_but
from measuring import measured
from stoker.contract import protocol, typed
from stoker.contract.protocol import SENTINEL, Decoder, ProtocolError, encode
from stoker.control.cluster.asking import fitting, read_answer, read_word
from stoker.control.launch.attempt import read_around, read_error
from stoker.control.machine.facts import examination_from_json
from stoker.control.machine.model import machine_from_json

SOON = 5.0  # seconds of processor time

# ---- the decoder ----

HEADERS = {
    "deep list": b"[" * 100_000,
    "deep object": b'{"is":' * 100_000,
    "deep value": b'{"is":"x","v":' + b"[" * 200 + b"]" * 200 + b"}",
    "not JSON": b"hello",
    "nothing": b"",
    "a list": b"[]",
    "a text": b'"is"',
    "a number": b"1",
    "null": b"null",
    "not UTF-8": b'{"is":"\xff\xfe"}',
    "half a surrogate": b'{"is":"\xed\xa0\x80"}',
    "NUL": b"\0\0\0",
    "a huge number": b'{"is":' + b"9" * 5000 + b"}",
    "size -1": b'{"is":"out","size":-1}',
    "size true": b'{"is":"out","size":true}',
    "size 1.5": b'{"is":"out","size":1.5}',
    "size text": b'{"is":"out","size":"7"}',
    "size list": b'{"is":"out","size":[7]}',
    "size null": b'{"is":"out","size":null}',
    "size NaN": b'{"is":"out","size":NaN}',
    "size Infinity": b'{"is":"out","size":Infinity}',
    "size 1e9": b'{"is":"out","size":1e9}',
    "size of a terabyte": b'{"is":"out","size":1099511627776}',
    "size of 30 digits": b'{"is":"out","size":' + b"9" * 30 + b"}",
    "size just too large": b'{"is":"out","size":%d}' % (protocol.PAYLOAD_LIMIT + 1),
    "trailing text": b'{"is":"x"} {"is":"y"}',
    "single quotes": b"{'is':'x'}",
    "an open text": b'{"is":"x',
    "a control code": b'{"is":"\x1b"}',
    "two colons": b'{"is"::1}',
    "a byte order mark": b'\xef\xbb\xbf{"is":"x"}',
}


@pytest.mark.parametrize("line", HEADERS.values(), ids=HEADERS)
@pytest.mark.parametrize("sentinel", [False, True])
def test_what_is_no_message_is_a_protocol_error(line: bytes, sentinel: bool) -> None:
    decoder = Decoder(expect_sentinel=sentinel)
    began = time.process_time()
    with pytest.raises(ProtocolError) as refused:
        list(decoder.feed((SENTINEL if sentinel else b"") + line + b"\n"))
    assert time.process_time() - began < SOON and str(refused.value).isprintable() and len(str(refused.value)) < 500


@pytest.mark.parametrize("piece", [b"x" * 65536, b"[" * 65536, b"\0" * 65536])
def test_a_message_without_end_takes_bounded_memory_and_time(piece: bytes) -> None:
    decoder = Decoder(expect_sentinel=True)
    assert list(decoder.feed(SENTINEL)) == []
    fed = 0
    began = time.process_time()
    with pytest.raises(ProtocolError, match="does not end"):
        while fed < 1 << 30:
            fed += len(piece)
            assert list(decoder.feed(piece)) == []
    assert fed <= protocol.LINE_LIMIT + 2 * len(piece) and time.process_time() - began < SOON


def test_a_whole_line_that_is_too_long_is_refused_as_well() -> None:
    with pytest.raises(ProtocolError, match="does not end"):
        list(Decoder().feed(b'{"is":"' + b"x" * protocol.LINE_LIMIT + b'"}\n'))


def test_large_messages_still_pass() -> None:
    stack, payload = "x" * 2_000_000, os.urandom(5_000_000)
    stream = encode({"is": "exit", "stack": stack}) + encode({"is": "inspection", "ask": 1}, payload)
    decoder = Decoder()
    heard = [one for at in range(0, len(stream), 65536) for one in decoder.feed(stream[at : at + 65536])]
    assert heard[0][0]["stack"] == stack and heard[1][1] == payload


def mutated(rng: random.Random, data: bytes) -> bytes:
    out = bytearray(data)
    for _ in range(rng.randint(1, 8)):
        at = rng.randrange(len(out) + 1)
        kind = rng.randrange(6)
        if kind == 0 and at < len(out):
            out[at] = rng.randrange(256)
        elif kind == 1:
            out[at:at] = rng.choice(
                [
                    b"[",
                    b"{",
                    b'"',
                    b"\n",
                    b"\0",
                    b"\xff",
                    b"-",
                    b"9" * 40,
                    b"null",
                    b"1e999",
                    b"[" * 2000,
                    b'{"a":' * 300,
                ]
            )
        elif kind == 2:
            del out[at : at + rng.randint(1, 20)]
        elif kind == 3:
            out[at:at] = out[: rng.randint(0, 60)]
        elif kind == 4:
            out = out.replace(b'"size":', rng.choice([b'"size":-', b'"size":1', b'"size":"', b'"x":']), 1)
        else:
            out = out.replace(b'"rank":', rng.choice([b'"rank":-', b'"rank":"../', b'"rank":[', b'"rnk":']), 1)
    return bytes(out)


GOOD: list[dict[str, Any]] = [
    {"is": "ping"}, {"is": "up", "rank": 0, "pid": 5, "time": 1.5}, {"is": "out", "rank": 0, "fd": 1}, {"is": "mark", "rank": 0, "name": "x"},
    {"is": "beats", "ranks": {"0": [1, 2, 3, 0.5, [[1, "2.5"], [2, "nan"]]]}}, {"is": "vitals", "ranks": {"0": ["S", 0.1, 3]}},
    {"is": "mem", "rank": 0, "at": "x", "note": "", "rss": None, "host_used": 1, "host_total": 2, "gpu": [1, 2]},
    {"is": "exit", "rank": 0, "code": -9, "time": 1, "ours": False, "error": None, "elastic": None, "stack": "", "steps": 0, "core": False,
     "calls": [], "script_end": None, "oom_killed": False, "around": {}},
    {"is": "finished", "stopped": [], "gpus_held": [], "stuck": [{"pid": 1, "name": "x", "state": "D"}]},
    {"is": "lock", "rank": 0, "what": "waiting", "holders": [1], "seconds": 2.0}, {"is": "probe", "ask": "a", "what": "route"},
    {"is": "refused", "line": "no", "code": 71}, {"is": "locked", "refused": {}, "notices": []}, {"is": "port", "port": 29500},
]  # fmt: skip


@pytest.mark.parametrize("message", GOOD, ids=lambda message: str(message["is"]))
def test_what_agents_say_passes(message: dict[str, Any]) -> None:
    assert protocol.read({**message, "size": 3, "unknown": 1})["is"] == message["is"]


@pytest.mark.parametrize("seed", range(40))
def test_fuzzed_streams_end_in_messages_or_a_protocol_error(seed: int) -> None:
    """Whatever comes out fits contract/protocol.py: nothing else may be raised, and nothing may take long."""
    rng = random.Random(seed)
    began = time.process_time()
    for _ in range(60):
        decoder = Decoder(expect_sentinel=True)
        stream = SENTINEL + b"".join(encode(rng.choice(GOOD), os.urandom(rng.choice([0, 0, 20]))) for _ in range(6))
        stream = mutated(rng, stream)
        try:
            at = 0
            while at < len(stream):
                step = rng.randint(1, 400)
                for message, payload in decoder.feed(stream[at : at + step]):
                    typed_message = protocol.read(message)
                    assert typed_message["is"] in protocol.KINDS and isinstance(payload, bytes)
                at += step
        except ProtocolError:
            continue
    assert time.process_time() - began < SOON


# ---- answers ----

ANSWERS = [
    b"[" * 100_000, b"[]", b"7", b"null", b"\xff", b"{", b'{"a":' * 5000, b'"x"', b"", b"{}", b'{"error": 7}', b'{"error": null}', b'{"error": {"a": 1}}',
    b'{"routes": 1, "addresses": {}, "hostname": "x", "reached_at": null}', b'{"routes": {"a": 1}, "addresses": {}, "hostname": "x", "reached_at": null}',
    b'{"routes": {"a": {"interface": []}}, "addresses": {}, "hostname": "x", "reached_at": null}', b'{"time": NaN}', b'{"time": "1"}', b'{"time": 1e400}',
    b'{"problems": "many", "shared": true, "unwritable": ""}', b'{"problems": [1], "shared": 1, "unwritable": ""}', b'{"names": {"a": 1}}',
    b'{"gpus": [1], "gpu_error": null, "pythons": []}', b'{"gpus": [], "gpu_error": null, "pythons": [[]]}', b'{"machine": 1, "schema": 1}',
    b'{"machine": {"schema": 1}, "schema": 1}', b'{"hostname": 1, "resolves": {}, "torch": {}}', b'{"hostname": "x", "resolves": {"a": "b"}, "torch": {}}',
    b'{"hostname": "x", "resolves": {}, "torch": null}', b'{"resolves": {}, "links": {"eth0": {}}}',
]  # fmt: skip


@pytest.mark.parametrize("what", ["builds", "clock", "examine", "files", "names", "ready", "route", "setup"])
@pytest.mark.parametrize("payload", ANSWERS, ids=range(len(ANSWERS)))
def test_an_answer_that_does_not_fit_is_an_error_of_that_host(what: str, payload: bytes) -> None:
    try:
        found = read_answer(what, payload)
    except ProtocolError as problem:
        assert str(problem).isprintable()
        return
    assert set(found) == {"error"} and isinstance(found["error"], str) and found["error"].isprintable(), found


def test_texts_in_answers_are_printable() -> None:
    found = read_answer(
        "ready",
        json.dumps({"problems": ["\x1b[2Jgone\n"], "shared": False, "unwritable": "\u202eabc"}).encode(),
    )
    assert (
        found["problems"] == ["\\x1b[2Jgone\\n"]
        and found["unwritable"].isprintable()
        and "\u202e" not in found["unwritable"]
    )
    assert fitting({"ports": "tuple[int, int]"}, read_word(b'{"ports": [1]}'), "ports")["error"].startswith(
        "its answer about ports can't be used"
    )


BAD_MACHINES: list[Any] = [
    None, 1, [], {}, {"schema": 2}, {"schema": 1}, {"schema": 1, "hostname": "x", "cores": "many", "memory_total": 1, "memory_available": 1},
    {"schema": 1, "hostname": ["x"], "cores": 1, "memory_total": 1, "memory_available": 1},
    {"schema": 1, "hostname": "x", "cores": 1, "memory_total": 1, "memory_available": 1, "gpus": 7},
    {"schema": 1, "hostname": "x", "cores": 1, "memory_total": 1, "memory_available": 1, "gpus": [7]},
    {"schema": 1, "hostname": "x", "cores": 1, "memory_total": 1, "memory_available": 1, "gpus": [{"index": "../..", "uuid": "x"}]},
    {"schema": 1, "hostname": "x", "cores": 1, "memory_total": 1, "memory_available": 1, "gpus": [{"index": 0, "uuid": 1}]},
    {"schema": 1, "hostname": "x", "cores": 1, "memory_total": 1, "memory_available": 1, "gpus": [{"index": 0, "uuid": "x", "holders": [1]}]},
    {"schema": 1, "hostname": "x", "cores": 10**30, "memory_total": 1, "memory_available": 1}, {"schema": 1, "hostname": "x", "cores": True},
    {"schema": 1, "hostname": "x", "cores": 1, "memory_total": 1, "memory_available": 1, "surprise": 1},
]  # fmt: skip


@pytest.mark.parametrize("data", BAD_MACHINES, ids=range(len(BAD_MACHINES)))
def test_a_machine_with_wrong_types_is_refused(data: Any) -> None:
    for read in (machine_from_json, lambda one: examination_from_json({"schema": 1, "machine": one})):
        with pytest.raises(ValueError, match="not a recorded machine"):
            read(data)


@pytest.mark.parametrize("report", [None, 1, [], {}, {"type": 1, "message": "x"}, {"type": "x", "message": []}, {"type": "x", "message": "y", "line": "z"},
                                    {"type": "x", "message": "y", "collectives": [1]}, {"type": "x", "message": "y", "traceback": None}])  # fmt: skip
def test_a_report_of_a_rank_with_wrong_types_is_none(report: Any) -> None:
    assert read_error(report) is None
    assert read_around(report).rss == () and read_around({"rss": "x", "kernel": 1}).kernel == ()


def test_types_are_read_as_they_are_written() -> None:
    assert typed.read("dict[str, tuple[int, str | None]]", {"a": [1, None]}) == {"a": (1, None)}
    assert typed.read("tuple[float, ...] | None", [1, 2.5]) == (1, 2.5) and typed.read("float", 3) == 3
    for kind, value in (
        ("int", True),
        ("int", 1.0),
        ("float", float("nan")),
        ("float", "1"),
        ("str", b"x"),
        ("bool", 1),
        ("list[int]", (1, "x")),
        ("tuple[int, int]", [1]),
        ("dict[str, int]", []),
        ("None", 0),
        ("int", 1 << 64),
    ):
        with pytest.raises(ValueError, match="is expected, found"):
            typed.read(kind, value)


# ---- a whole run with a hostile host ----


@pytest.fixture
def evil(stoker: Stoker, tmp_path: Path) -> Any:
    """`stoker run` on one host, reached by a program that only looks like ssh."""
    folder = tmp_path / "bin"
    folder.mkdir()
    ssh = folder / "ssh"
    ssh.write_text(
        f"#!{sys.executable} -IS\nimport runpy\nrunpy.run_path({str(Path(__file__).with_name('hostile_agent.py'))!r}, run_name='x')\n"
    )
    ssh.chmod(0o755)
    work = tmp_path / "work"
    work.mkdir()
    content = tmp_path / "hostile"

    def run(
        at: str, data: bytes, *more: str, through: Callable[[list[str]], list[str]] = list, **env: str
    ) -> tuple[subprocess.CompletedProcess[bytes], float]:
        content.write_bytes(data)
        (work / "ok.py").write_text("print('ran')\n")
        given = {
            **stoker.env,
            "PATH": f"{folder}:{stoker.env['PATH']}",
            "HOSTILE_AT": at,
            "HOSTILE_FILE": str(content),
            **env,
        }
        began = time.monotonic()
        argv = [
            sys.executable,
            "-m",
            "stoker",
            "run",
            "--hosts",
            "evil.example",
            "--nproc-per-node",
            "1",
            "--no-preflight",
        ]
        done = subprocess.run(
            through([*argv, *more, "ok.py"]),
            cwd=work,
            env=given,
            capture_output=True,
            timeout=60,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        outside = [
            path
            for path in tmp_path.rglob("*")
            if work not in (path, *path.parents) and path not in (content, folder, ssh, tmp_path / "machine.json")
        ]
        assert outside == [], outside
        assert {path.name for path in work.iterdir()} <= {"ok.py", "runs", "__pycache__"}
        return done, time.monotonic() - began

    return run


def line(**message: Any) -> bytes:
    return json.dumps(message).encode() + b"\n"


EXIT = {"is": "exit", "rank": 0, "code": 0, "time": 1.0, "ours": False, "error": None, "elastic": None, "stack": "", "steps": 0, "core": False,
        "calls": [], "script_end": None, "oom_killed": False, "around": {}}  # fmt: skip
AT_START = {
    "a file beside the record": encode({"is": "out", "rank": "../../../../owned", "fd": 0}, b"x"),
    "an absolute path": encode({"is": "out", "rank": "/tmp/owned", "fd": 0}, b"x"),
    "rank -1": encode({"is": "out", "rank": -1, "fd": 0}, b"x"),
    "rank 1": encode({"is": "out", "rank": 1, "fd": 0}, b"x"),
    "rank true": encode({"is": "out", "rank": True, "fd": 0}, b"x"),
    "rank 10^30": line(**{**EXIT, "rank": 10**30}),
    "stream 7": encode({"is": "out", "rank": 0, "fd": 7}, b"x"),
    "a rank of nobody": line(**{**EXIT, "rank": 9}),
    "an error file elsewhere": line(**{**EXIT, "rank": "../../x", "elastic": {"a": 1}}),
    "a stack elsewhere": line(**{**EXIT, "rank": "../../x", "stack": "x"}),
    "an exit without a code": line(is_="exit", rank=0).replace(b'"is_"', b'"is"'),
    "exit code 10^9": line(**{**EXIT, "code": 10**9}),
    "exit code -10^9": line(**{**EXIT, "code": -(10**9)}),
    "exit code text": line(**{**EXIT, "code": "0"}),
    "exit at NaN": line(**{**EXIT, "time": float("nan")}),
    "no kind": b"{}\n",
    "an unknown kind": b'{"is": "dance"}\n',
    "a kind that is a list": b'{"is": ["exit"]}\n',
    "a private method": b'{"is": "_check_ranks"}\n',
    "a deep list": b"[" * 100_000 + b"\n",
    "a deep message": b'{"is":"note","rank":0,"text":' + b"[" * 5000 + b"\n",
    "not UTF-8": b'{"is": "\xff"}\n',
    "a negative size": b'{"is":"out","rank":0,"fd":1,"size":-5}\n',
    "a terabyte": b'{"is":"out","rank":0,"fd":1,"size":1099511627776}\n',
    "mem without numbers": b'{"is":"mem","rank":0}\n',
    "a lock for ever": line(**{"is": "lock", "rank": 0, "what": "waiting", "holders": [1], "seconds": 9e18}),
    "helpers for ever": line(**{"is": "helpers", "names": "all", "seconds": "x"}),
    "beats of a stranger": line(**{"is": "beats", "ranks": {"5": [1, 1, 1, 1.0, []]}}),
    "beats elsewhere": line(**{"is": "beats", "ranks": {"../x": [1, 1, 1, 1.0, []]}}),
    "beats of a list": line(**{"is": "beats", "ranks": [1]}),
    "vitals of nothing": line(**{"is": "vitals", "ranks": {"0": []}}),
    "an inspection of a stranger": encode({"is": "inspection", "ask": 1}, b'{"7": {}}'),
    "a deep inspection": encode({"is": "inspection", "ask": 1}, b"[" * 50_000),
    "an inspection that is a list": encode({"is": "inspection", "ask": 1}, b"[]"),
    "finished with what": line(**{"is": "finished", "stopped": 1, "gpus_held": {}, "stuck": 7}),
    "stuck without a name": line(**{"is": "finished", "stopped": [], "gpus_held": [], "stuck": [{}]}),
    "a machine of nonsense": line(**{"is": "host", "machine": {"schema": 1, "gpus": 7}, "held": {}}),
}


# Others of the same kind of message, with another wrong value in the same place.
ALIKE = {
    "an absolute path", "rank -1", "rank true", "rank 10^30", "a stack elsewhere", "exit code -10^9", "exit code text", "no kind",
    "a kind that is a list", "a deep message", "not UTF-8", "a terabyte", "beats elsewhere", "an inspection that is a list",
    "stuck without a name",
}  # fmt: skip


@pytest.mark.parametrize("name", at_length_but(AT_START.keys() - ALIKE, AT_START))
def test_a_host_that_sends_nonsense_is_given_up(evil: Any, name: str) -> None:
    done, took = evil("start", AT_START[name])
    err = done.stderr.decode()
    assert b"Traceback" not in done.stderr and b"Traceback" not in done.stdout, err
    assert done.returncode == 70 and "evil.example" in err and "it is broken: " in err, err
    assert "\x1b" not in err and took < 45


BEFORE = {
    "a machine of nonsense": ("open", line(**{"is": "host", "machine": {"schema": 1}, "held": {}})),
    "a machine that is text": ("open", line(**{"is": "host", "machine": "x", "held": {}})),
    "no machine": ("open", line(**{"is": "host"})),
    "locks of nonsense": ("open", line(**{"is": "host", "machine": {}, "held": [1]})),
    "a deep answer": ("probe-ready", encode({"is": "probe", "ask": "%ASK%", "what": "ready"}, b"[" * 100_000)),
    "a refusal that says 0": (
        "open",
        line(**{"is": "refused", "line": "\x1b[31mno\x07\nstoker: all is well", "code": 0}),
    ),
    "a refusal of nothing": ("open", line(**{"is": "refused"})),
    "a port out of range": ("reserve", line(**{"is": "port", "port": 70000})),
    "a port that is text": ("reserve", line(**{"is": "port", "port": "22"})),
    "a port that is none": ("reserve", line(**{"is": "port"})),
    "a greeting again": ("open", b"STOKER-AGENT 1\n"),
}


@pytest.mark.parametrize(("at", "data"), BEFORE.values(), ids=BEFORE)
def test_a_host_that_sends_nonsense_before_the_start_is_refused(evil: Any, at: str, data: bytes) -> None:
    done, _ = evil(at, data)
    err = done.stderr.decode()
    assert b"Traceback" not in done.stderr, err
    assert done.returncode in (69, 71), (done.returncode, err)
    assert (
        "\x1b" not in err
        and "\x07" not in err
        and not any(text.startswith("stoker: all is well") for text in err.splitlines())
    )


@pytest.mark.parametrize("data", [b"x" * 65536, b'{"is":"ping"' * 5000, b"\0" * 65536])
def test_a_host_that_never_stops_talking_takes_bounded_memory(evil: Any, data: bytes) -> None:
    done, took = evil("start", data, through=measured, HOSTILE_ENDLESS="1")
    code, _, kilobytes = json.loads(done.stdout)
    assert b"Traceback" not in done.stderr and code == 70 and took < 45, done.stderr
    assert kilobytes < 400_000


@pytest.mark.parametrize("seed", at_length_but(range(3), range(6)))
def test_a_host_that_sends_fuzz(evil: Any, seed: int) -> None:
    rng = random.Random(seed)
    data = mutated(rng, b"".join(encode(rng.choice(GOOD[:-4])) for _ in range(10))) + b"{not json\n"
    done, _ = evil("start", data)
    assert b"Traceback" not in done.stderr and done.returncode == 70, done.stderr.decode()


PROBES = [
    ("probe-route", b"[]"), ("probe-route", b"[" * 50_000), ("probe-route", b'{"routes": 7}'), ("probe-route", b'{"routes": {}, "addresses": {}, "hostname": 7}'),
    ("probe-builds", b'{"hostname": "x", "resolves": [], "torch": 1}'), ("probe-builds", b'{"hostname": "x", "resolves": {}, "torch": {"version": []}}'),
    ("probe-examine", b'{"machine": {"schema": 1}, "schema": 1}'), ("probe-clock", b'{"time": "now"}'), ("probe-names", b'{"links": {"a": 1}, "resolves": 2}'),
]  # fmt: skip


@pytest.mark.parametrize(("at", "payload"), PROBES, ids=range(len(PROBES)))
def test_a_check_of_a_host_that_answers_nonsense(stoker: Stoker, tmp_path: Path, at: str, payload: bytes) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "ssh").write_text(
        f"#!{sys.executable} -IS\nimport runpy\nrunpy.run_path({str(Path(__file__).with_name('hostile_agent.py'))!r}, run_name='x')\n"
    )
    (folder / "ssh").chmod(0o755)
    what = at.partition("-")[2]
    (tmp_path / "hostile").write_bytes(
        b'{"is": "probe", "ask": "%%ASK%%", "what": "%s", "size": %d}\n' % (what.encode(), len(payload)) + payload
    )
    env = {"PATH": f"{folder}:{stoker.env['PATH']}", "HOSTILE_AT": at, "HOSTILE_FILE": str(tmp_path / "hostile")}
    done = stoker("cluster", "check", "--hosts", "evil.example", "--quick", env=env, timeout=90)
    assert "Traceback" not in done.err and done.code in (1, 2, 3), done.err
    assert "evil.example" in done.out
