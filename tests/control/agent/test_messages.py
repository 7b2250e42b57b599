"""Messages of agents: what is none is a ProtocolError, and a host whose agent is broken or of another version is lost in one line."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conftest import Done, Stoker, at_length_but
from stoker.contract import protocol, typed_values
from stoker.contract.protocol import SENTINEL, Decoder, ProtocolError, encode_message
from stoker.control.cluster.probes import check_answer, read_answer, read_partial_answer
from stoker.control.launch.attempt import read_error, read_exit_context
from stoker.control.machine.examination import examination_from_json
from stoker.control.machine.model import machine_from_json

# ---- the decoder ----

NO_MESSAGES = {
    "deep list": b"[" * 100_000,
    "deep object": b'{"is":' * 100_000,
    "not JSON": b"hello",
    "nothing": b"",
    "a list": b"[]",
    "null": b"null",
    "not UTF-8": b'{"is":"\xff\xfe"}',
    "truncated": b'{"is":"exit","rank":0,"sta',
    "two in a line": b'{"is":"x"} {"is":"y"}',
    "size -1": b'{"is":"out","size":-1}',
    "size true": b'{"is":"out","size":true}',
    "size 1.5": b'{"is":"out","size":1.5}',
    "size text": b'{"is":"out","size":"7"}',
    "size null": b'{"is":"out","size":null}',
}


@pytest.mark.parametrize("line", NO_MESSAGES.values(), ids=NO_MESSAGES)
def test_what_is_no_message_is_a_protocol_error(line: bytes) -> None:
    with pytest.raises(ProtocolError) as refused:
        list(Decoder(expect_sentinel=True).feed(SENTINEL + line + b"\n"))
    assert str(refused.value).isprintable() and len(str(refused.value)) < 500


def test_large_messages_pass_in_pieces() -> None:
    stack, payload = "x" * 20_000_000, os.urandom(70_000_000)
    stream = encode_message({"is": "exit", "stack": stack}) + encode_message({"is": "inspection", "ask": 1}, payload)
    decoder = Decoder()
    heard = [one for at in range(0, len(stream), 1 << 20) for one in decoder.feed(stream[at : at + (1 << 20)])]
    assert heard[0][0]["stack"] == stack and heard[1][1] == payload


EXIT = {"is": "exit", "rank": 0, "code": -9, "time": 1, "ours": False, "error": None, "elastic": None, "stack": "", "steps": 0, "core": False,
        "calls": [], "script_end": None, "oom_killed": False, "around": {}}  # fmt: skip
GOOD: list[dict[str, Any]] = [
    {"is": "ping"}, {"is": "up", "rank": 0, "pid": 5, "time": 1.5}, {"is": "out", "rank": 0, "fd": 1}, {"is": "mark", "rank": 0, "name": "x"},
    {"is": "beats", "ranks": {"0": [1, 2, 3, 0.5, [[1, "2.5"], [2, "nan"]]]}}, {"is": "vitals", "ranks": {"0": ["S", 0.1, 3]}},
    {"is": "mem", "rank": 0, "at": "x", "note": "", "rss": None, "host_used": 1, "host_total": 2, "gpu": [1, 2]}, EXIT,
    {"is": "finished", "stopped": [], "gpus_held": [], "stuck": [{"pid": 1, "name": "x", "state": "D"}]},
    {"is": "lock", "rank": 0, "what": "waiting", "holders": [1], "seconds": 2.0}, {"is": "probe", "ask": "a", "what": "route"},
    {"is": "refused", "line": "no", "code": 71}, {"is": "locked", "refused": {}, "notices": []}, {"is": "port", "port": 29500},
]  # fmt: skip


@pytest.mark.parametrize("message", GOOD, ids=lambda message: str(message["is"]))
def test_what_agents_say_passes(message: dict[str, Any]) -> None:
    assert protocol.check_message({**message, "size": 3, "unknown": 1})["is"] == message["is"]


BAD: list[dict[str, Any]] = [
    {}, {"is": 7}, {"is": ["exit"]}, {"is": "dance"}, {"is": "up", "rank": 0}, {"is": "out", "rank": "0", "fd": 1}, {**EXIT, "code": "0"},
    {**EXIT, "time": float("nan")}, {"is": "beats", "ranks": [1]}, {"is": "vitals", "ranks": {"0": []}},
    {"is": "finished", "stopped": 1, "gpus_held": {}, "stuck": 7}, {"is": "port", "port": "22"}, {"is": "refused"},
]  # fmt: skip


@pytest.mark.parametrize("message", BAD, ids=range(len(BAD)))
def test_a_message_with_a_missing_field_or_another_type_is_a_protocol_error(message: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError) as refused:
        protocol.check_message(message)
    assert str(refused.value).isprintable()


# ---- what messages hold ----

ANSWERS = [
    b"[" * 100_000, b"[]", b"7", b"\xff", b"{", b"", b"{}", b'{"routes": {"a": {"interface": []}}, "addresses": {}, "hostname": "x", "reached_at": null}',
    b'{"time": NaN}', b'{"problems": [1], "shared": 1, "unwritable": ""}', b'{"gpus": [], "gpu_error": null, "pythons": [[]]}',
    b'{"machine": {"schema": 1}, "schema": 1}', b'{"hostname": "x", "resolves": {}, "torch": null}', b'{"resolves": {}, "links": {"eth0": {}}}',
]  # fmt: skip


@pytest.mark.parametrize("what", ["builds", "clock", "examine", "files", "names", "ready", "route", "setup"])
@pytest.mark.parametrize("payload", ANSWERS, ids=range(len(ANSWERS)))
def test_an_answer_that_does_not_fit_is_an_error_of_that_host(what: str, payload: bytes) -> None:
    try:
        answer = read_answer(what, payload)
    except ProtocolError as problem:
        assert str(problem).isprintable()
        return
    assert set(answer) == {"error"} and answer["error"].isprintable(), answer


def test_texts_in_answers_are_printable() -> None:
    ready = {"problems": ["\x1b[2Jgone\n"], "shared": False, "unwritable": "\u202eabc"}
    answer = read_answer("ready", json.dumps(ready).encode())
    assert answer["problems"] == ["\\x1b[2Jgone\\n"] and answer["unwritable"].isprintable()
    wrong = check_answer({"ports": "tuple[int, int]"}, read_partial_answer(b'{"ports": [1]}'), "ports")
    assert wrong["error"].startswith("its answer about ports can't be used")


MACHINE = {"schema": 1, "hostname": "x", "cores": 1, "memory_total": 1, "memory_available": 1}
BAD_MACHINES: list[Any] = [
    None, [], {}, {"schema": 1}, {**MACHINE, "schema": 2}, {**MACHINE, "cores": "many"}, {**MACHINE, "cores": True}, {**MACHINE, "hostname": ["x"]},
    {**MACHINE, "gpus": 7}, {**MACHINE, "gpus": [7]}, {**MACHINE, "gpus": [{"index": 0, "uuid": 1}]},
    {**MACHINE, "gpus": [{"index": 0, "uuid": "x", "holders": [1]}]}, {**MACHINE, "surprise": 1},
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
    assert read_exit_context(report).rss == () and read_exit_context({"rss": "x", "kernel": 1}).kernel == ()


def test_types_are_read_as_they_are_written() -> None:
    assert typed_values.read_value("dict[str, tuple[int, str | None]]", {"a": [1, None]}) == {"a": (1, None)}
    assert (
        typed_values.read_value("tuple[float, ...] | None", [1, 2.5]) == (1, 2.5)
        and typed_values.read_value("float", 3) == 3
    )
    wrong: list[tuple[str, Any]] = [
        ("int", True), ("int", 1.0), ("float", float("nan")), ("float", "1"), ("str", b"x"), ("bool", 1), ("list[int]", (1, "x")),
        ("tuple[int, int]", [1]), ("dict[str, int]", []), ("None", 0), ("int", 1 << 64),
    ]  # fmt: skip
    for kind, value in wrong:
        with pytest.raises(ValueError, match=r"expected .*, found"):
            typed_values.read_value(kind, value)


# ---- a whole run and a whole check with a broken agent ----


@pytest.fixture
def fake(stoker: Stoker, tmp_path: Path) -> Callable[..., Done]:
    """A command with one host, reached by a program that only looks like ssh. At the order `at` its agent says `data`."""
    folder = tmp_path / "bin"
    folder.mkdir()
    agent = Path(__file__).parents[2] / "fake_agent.py"
    (folder / "ssh").write_text(f"#!{sys.executable} -IS\nimport runpy\nrunpy.run_path({str(agent)!r}, run_name='x')\n")
    (folder / "ssh").chmod(0o755)
    stoker.script("ok.py", "print('ran')\n")

    def run(at: str, data: bytes, *words: str, **more: str) -> Done:
        (tmp_path / "said").write_bytes(data)
        env = {"PATH": f"{folder}:{stoker.env['PATH']}", "FAKE_AT": at, "FAKE_FILE": str(tmp_path / "said"), **more}
        command = words or ("run", "--hosts", "far.example", "--nproc-per-node", "1", "--no-preflight", "ok.py")
        done = stoker(*command, env=env, timeout=90)
        assert "Traceback" not in done.err and "far.example" in done.out + done.err, done.err
        return done

    return run


AT_START = {
    "a truncated message": b'{"is":"exit","rank":0,"sta\n',
    "text between the messages": b"Warning: something prints to stdout\n",
    "a kind that nobody knows": b'{"is": "dance"}\n',
    "a missing field": b'{"is": "exit", "rank": 0}\n',
    "a field of another type": encode_message({**EXIT, "code": "0"}),
}


@pytest.mark.parametrize("name", at_length_but(["a truncated message", "a missing field"], AT_START))
def test_a_host_whose_agent_is_broken_is_lost_in_one_line(fake: Callable[..., Done], name: str) -> None:
    done = fake("start", AT_START[name])
    assert done.code == 70 and "it sent an invalid message: " in done.err, done.err


def test_an_agent_that_ends_in_the_middle_of_a_message_is_lost(fake: Callable[..., Done]) -> None:
    done = fake("start", b'{"is":"exit","rank":0,"sta', FAKE_ENDS="1")
    assert done.code == 70 and "its agent ended with exit code 1" in done.err, done.err


BEFORE = {
    "a machine with fields of another version": (
        "open",
        encode_message({"is": "host", "machine": {"schema": 9}, "held": {}}),
    ),
    "no machine": ("open", b'{"is": "host"}\n'),
    "an answer that is none": ("probe-ready", b'{"is": "probe", "ask": "%ASK%", "what": "ready", "size": 2}\n[]'),
    "a port that is text": ("reserve", b'{"is": "port", "port": "22"}\n'),
}


@pytest.mark.parametrize(("at", "data"), BEFORE.values(), ids=BEFORE)
def test_a_host_whose_agent_is_broken_before_the_start_is_refused(
    fake: Callable[..., Done], at: str, data: bytes
) -> None:
    assert fake(at, data).code in (69, 71)


def test_an_agent_of_another_version_is_refused_in_one_line(fake: Callable[..., Done]) -> None:
    done = fake("none", b"", FAKE_VERSION="99")
    assert done.code == 69 and "use one version of Stoker on all hosts" in done.err and "\n" not in done.err.strip(), (
        done.err
    )


def test_what_a_host_refuses_reaches_the_terminal_without_control_codes(fake: Callable[..., Done]) -> None:
    done = fake("open", encode_message({"is": "refused", "line": "\x1b[31mno\x07\nstoker: all is well", "code": 71}))
    assert done.code == 71 and "\x1b" not in done.err and "\x07" not in done.err
    assert not any(line.startswith("stoker: all is well") for line in done.err.splitlines())


@pytest.mark.parametrize(("at", "payload"), [("probe-route", b"[]"), ("probe-builds", b'{"hostname": "x", "resolves": [], "torch": 1}'),
                                             ("probe-examine", b'{"machine": {"schema": 1}, "schema": 1}')])  # fmt: skip
def test_a_check_of_a_host_whose_answer_does_not_fit_goes_on(
    fake: Callable[..., Done], at: str, payload: bytes
) -> None:
    what = at.partition("-")[2].encode()
    message = b'{"is": "probe", "ask": "%%ASK%%", "what": "%s", "size": %d}\n' % (what, len(payload)) + payload
    assert fake(at, message, "cluster", "check", "--hosts", "far.example", "--quick").code in (1, 2, 3)
