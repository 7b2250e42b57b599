"""Inputs of test_unreadable_files.py: each makes files in an empty folder and returns the command that reads them."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

Make = Callable[[Path], list[str]]
CASES: dict[str, Make] = {}

DEEP_JSON = '{"a":' * 50_000 + "1" + "}" * 50_000
DEEP_LIST = "[" * 100_000
ALIAS_BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{here}: &{here} [{', '.join(['*' + before] * 9)}]\n" for before, here in zip("abcdefgh", "bcdefghi", strict=True)
)
NESTED_YAML = "".join("  " * level + "a:\n" for level in range(3000))


def fifo(path: Path) -> None:
    os.mkfifo(path)


def unix_socket(path: Path) -> None:
    before = os.getcwd()
    os.chdir(path.parent)  # the path of a socket has 107 bytes at most
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(before)


def zeros(path: Path) -> None:
    path.symlink_to("/dev/zero")


def folder(path: Path) -> None:
    path.mkdir()


def text(content: str | bytes) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass"))

    return write


def add(kind: str, command: Callable[[Path], list[str]], name: str, files: dict[str, Callable[[Path], None]]) -> None:
    for what, write in files.items():
        ending, _, label = what.partition(" ")

        def make(where: Path, ending: str = ending, write: Callable[[Path], None] = write) -> list[str]:
            path = where / (name + ending)
            path.parent.mkdir(parents=True, exist_ok=True)
            write(path)
            return command(path)

        CASES[f"{kind}: {label}"] = make


def _script(where: Path) -> str:
    path = where / "ok.py"
    path.write_text("print('started')\n")
    return str(path)


# ---- stoker run --config, stoker train --config ----

SETTINGS: dict[str, Callable[[Path], None]] = {
    ".json deep lists": text(DEEP_LIST),
    ".json deep objects": text(DEEP_JSON),
    ".yaml deep lists": text(DEEP_LIST),
    ".yaml deep objects in braces": text(DEEP_JSON),
    ".yaml deep blocks": text(NESTED_YAML),
    ".yaml an alias of itself": text("a: &a [*a]\n"),
    ".yaml a Python object": text("a: !!python/object/apply:os.system [touch owned]\n"),
    ".yaml a named pipe": fifo,
    ".yaml a socket": unix_socket,
    ".yaml a device": zeros,
    ".yaml a folder": folder,
    ".json a key twice": text('{"show": "all", "show": "none"}'),
    ".yaml a key twice": text("show: all\nshow: none\n"),
    ".yaml a number of 5,000 digits": text("a: " + "9" * 5000),
    ".yaml a number of 1,000 digits": text("a: " + "9" * 1000),
    ".json a number of 5,000 digits": text('{"a": ' + "9" * 5000 + "}"),
    ".yaml a date that is none": text("a: 2026-13-45\n"),
    ".yaml a superscript two": text("nproc_per_node: ²\n"),
    ".yaml a superscript port": text("master_port: ²\n"),
    ".yaml NUL bytes": text(b"show: \0\0\0\n"),
    ".json NUL in a value": text('{"name": "a\\u0000b"}'),
    ".yaml UTF-16": text("show: all\n".encode("utf-16")),
    ".yaml not UTF-8": text(b"show: \xff\xfe\xfa\n"),
    ".json comments without end": text("/*" * 250_000),
    ".json strings without end": text('"' + '\\"' * 250_000),
    ".yaml a key of 200 KB": text("k" * 200_000 + ": 1\n"),
    ".yaml an unhashable key": text("? {a: 1}\n: 2\n"),
    ".yaml a base-60 number": text("a: " + ":".join(["59"] * 2000) + "\n"),
    ".json not a number": text('{"shutdown_timeout": NaN}'),
    ".json infinite": text('{"max_restarts": 1e400}'),
}
add(
    "run --config", lambda path: ["run", "--dry-run", "--config", str(path), _script(path.parent)], "settings", SETTINGS
)
TRAIN: dict[str, Callable[[Path], None]] = {
    ".json deep objects": text(DEEP_JSON),
    ".json NaN": text('{"optim": {"learning_rate": NaN}}'),
    ".json infinity": text('{"optim": {"learning_rate": Infinity}}'),
    ".yaml a step count of 30 digits": text("train: {max_steps: " + "9" * 30 + "}\n"),
    ".yaml a width of 30 digits": text("model: {dim: " + "9" * 30 + "}\n"),
    ".yaml layers of 12 digits": text("model: {layers: " + "9" * 12 + "}\n"),
    ".yaml a superscript two": text("model: {layers: ²}\n"),
    ".yaml a list for a number": text("optim: {learning_rate: [1, [2]]}\n"),
    ".yaml keys that are numbers": text("1: 2\n3.5: {4: 5}\nnull: 1\n"),
    ".yaml a NUL in a path": text('tokenizer: {path: "a\\0b"}\n'),
    ".yaml a NUL in a path to be written": text('data: {cache: "a\\0b"}\n'),
    ".yaml a NUL in a run's folder": text('run: {runs_dir: "a\\0b"}\n'),
    ".yaml a NUL in a checkpoint's path": text('checkpoint: {resume: "a\\0b"}\n'),
    ".yaml a GPU called superscript two": text("device_id: ²\n"),
}


def _train(path: Path) -> list[str]:
    data = path.parent / "data.txt"
    data.write_text("some text to train on " * 400)
    return ["train", "pretrain", "--dry-run", "--data", str(data), "--config", str(path)]


add("train --config", _train, "settings", TRAIN)

# ---- stoker run --hosts ----

HOSTS: dict[str, Callable[[Path], None]] = {
    ".yaml deep lists": text("hosts: " + DEEP_LIST),
    ".json deep objects": text(DEEP_JSON),
    ".yaml an alias bomb": text(ALIAS_BOMB + "hosts: *i\n"),
    ".yaml a named pipe": fifo,
    ".yaml a device": zeros,
    ".yaml a folder": folder,
    ".yaml a key twice": text("hosts: [{host: a, slots: 1, slots: 2}]\n"),
    ".yaml slots of 30 digits": text("hosts: [{host: a, slots: " + "9" * 30 + "}]\n"),
    ".yaml a million slots": text("hosts: [{host: a, slots: 1000000}]\n"),
    ".yaml a superscript port": text("hosts: [{host: a, port: ²}]\n"),
    ".yaml control codes in a host's name": text('hosts: [{host: "a\\x1b]0;owned\\x07"}]\n'),
    ".yaml a line end in a host's name": text('hosts: [{host: "a\\nstoker: all is well"}]\n'),
    ".yaml a NUL in a path": text('hosts: [{host: a, workdir: "/a\\0b"}]\n'),
    ".yaml a NUL in a key's path": text('hosts: [{host: a, identity: "/a\\0b"}]\n'),
    ".yaml UTF-16": text("hosts: [a]\n".encode("utf-16")),
    ".yaml an empty file": text(""),
    ".yaml a host that is a list": text("hosts: [[a, b], {host: {x: y}}]\n"),
}
add("run --hosts", lambda path: ["run", "--dry-run", "--hosts", str(path), _script(path.parent)], "cluster", HOSTS)


def _set(*path: Any, to: Any) -> Callable[[dict[str, Any]], None]:
    def change(found: Any) -> None:
        for key in path[:-1]:
            found = found[key]
        found[path[-1]] = to

    return change


# ---- stoker why, scripts ----


def _run_json(content: Callable[[Path], None]) -> Make:
    def make(where: Path) -> list[str]:
        run = where / "runs" / "20260101-000000-x"
        run.mkdir(parents=True)
        content(run / "run.json")
        return ["why", "20260101-000000-x", "--runs-dir", str(where / "runs")]

    return make


CASES |= {
    f"why: run.json is {label}": _run_json(write)
    for label, write in (("deep", text(DEEP_JSON)), ("a named pipe", fifo), ("a device", zeros))
}


def _own_script(content: Callable[[Path], None]) -> Make:
    def make(where: Path) -> list[str]:
        content(where / "script.py")
        return ["run", "--dry-run", str(where / "script.py")]

    return make


CASES |= {
    "script: deep": _own_script(text("(" * 100_000)),
    "script: a sum of 100,000 terms": _own_script(text("a = " + "-" * 100_000 + "1\n")),
    "script: a named pipe": _own_script(fifo),
    "script: a device": _own_script(zeros),
    "script: NUL bytes": _own_script(text(b"print(1)\0\n")),
    "script: control codes in its name": lambda where: [
        "run",
        "--dry-run",
        str(where / "gone\x1b]0;owned\x07\nstoker: fine.py"),
    ],
    "script: a name that is not UTF-8": lambda where: [
        "run",
        "--dry-run",
        os.fsdecode(os.fsencode(where) + b"/gone\xff\xfe.py"),
    ],
    "doctor: a deep recorded machine": lambda where: (
        text(DEEP_JSON)(where / "m.json"),
        ["doctor", "--machine", str(where / "m.json")],
    )[1],
    "doctor: a machine that is a list": lambda where: (
        text("[1]")(where / "m.json"),
        ["doctor", "--machine", str(where / "m.json")],
    )[1],
    "doctor: a machine of other types": lambda where: (
        text('{"machine": {"gpus": 3}}')(where / "m.json"),
        ["doctor", "--machine", str(where / "m.json")],
    )[1],
}
