"""Hostile inputs for test_hostile_files.py: each makes files in an empty folder and returns the command that reads them."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stoker.training.model.config import ModelConfig
from stoker.training.model.hf_config import config_of
from stoker.training.model.hf_files import places
from stoker.training.tokenizer.tokenizer import bytes_tokenizer

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
    ".yaml an alias bomb": text(ALIAS_BOMB),
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
    ".json a number of 1,000 digits": text('{"max_restarts": ' + "9" * 1000 + "}"),
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
    ".yaml an alias bomb": text(ALIAS_BOMB),
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


# ---- stoker export: models ----

SHAPE = ModelConfig(layers=1, dim=16, heads=2, kv_heads=1, head_dim=8, ff=16, vocab_size=260, tied=True)


def header_of_model() -> tuple[dict[str, Any], int]:
    """Of a whole and valid model, and how many bytes of data follow."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for part in (part for place in places(SHAPE) for part in place.parts):
        size = 4
        for length in part.shape:
            size *= length
        header[part.name] = {"dtype": "F32", "shape": list(part.shape), "data_offsets": [end, end + size]}
        end += size
    return header, end


def write_weights(path: Path, header: bytes, data: int, length: int | None = None) -> None:
    path.write_bytes((len(header) if length is None else length).to_bytes(8, "little") + header + bytes(data))


def write_model(where: Path) -> None:
    where.mkdir(parents=True, exist_ok=True)
    (where / "config.json").write_text(json.dumps(config_of(SHAPE, 64, "float32")))
    header, data = header_of_model()
    write_weights(where / "model.safetensors", json.dumps(header).encode(), data)
    bytes_tokenizer().save(str(where))


def _export(path: Path) -> list[str]:
    return ["export", str(path.parent), str(path.parent.parent / "out")]


def _in_model(content: Callable[[Path], None], without: tuple[str, ...] = ()) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        write_model(path.parent)
        for name in without:
            (path.parent / name).unlink()
        path.unlink(missing_ok=True)
        content(path)

    return write


def _config(**changes: Any) -> Callable[[Path], None]:
    return _in_model(text(json.dumps({**config_of(SHAPE, 64, "float32"), **changes})))


def _weights(change: Callable[[dict[str, Any]], Any], data: int | None = None) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        header, whole = header_of_model()
        change(header)
        write_weights(path, json.dumps(header).encode(), whole if data is None else data)

    return _in_model(write)


NAME = "model.embed_tokens.weight"
INDEX = "model.safetensors.index.json"
_NO_WEIGHTS = ("model.safetensors",)
MODELS: dict[str, Callable[[Path], None]] = {
    "config.json deep": _in_model(text(DEEP_JSON)),
    "config.json a named pipe": lambda path: (write_model(path.parent), path.unlink(), os.mkfifo(path))[0],
    "config.json a list": _in_model(text("[1, 2]")),
    "config.json layers of 30 digits": _config(num_hidden_layers=10**29),
    "config.json layers of 9 digits": _config(num_hidden_layers=10**8),
    "config.json a width of 12 digits": _config(hidden_size=10**12),
    "config.json NaN": _config(rms_norm_eps=float("nan")),
    "config.json infinite": _config(rope_theta=float("inf")),
    "config.json an architecture that is a list": _config(architectures=[["LlamaForCausalLM"]]),
    "config.json an architecture with control codes": _config(architectures=["\x1b]0;owned\x07"]),
    "config.json a rotary embedding that is a list": _config(rope_scaling=[1], partial_rotary_factor={"a": 1}),
    "config.json a factor that is a list": _config(partial_rotary_factor=[1]),
    "model.safetensors a named pipe": _in_model(fifo),
    "model.safetensors a device": _in_model(zeros),
    "model.safetensors a folder": _in_model(folder),
    "model.safetensors an empty file": _in_model(text("")),
    "model.safetensors a header of 2^63 bytes": _in_model(lambda path: write_weights(path, b"{}", 0, 1 << 63)),
    "model.safetensors a header of 200 MB": _in_model(
        lambda path: (write_weights(path, b"{}", 0, 200 << 20), os.truncate(path, 1 << 30))[0]
    ),
    "model.safetensors a deep header": _in_model(lambda path: write_weights(path, DEEP_JSON.encode(), 0)),
    "model.safetensors a header that is a list": _in_model(lambda path: write_weights(path, b"[1]", 0)),
    "model.safetensors metadata that is a list": _weights(lambda header: header.update(__metadata__=[1])),
    "model.safetensors a tensor that is a number": _weights(lambda header: header.update({NAME: 3})),
    "model.safetensors an unknown dtype": _weights(_set(NAME, "dtype", to="F99")),
    "model.safetensors a dtype that is a list": _weights(_set(NAME, "dtype", to=["F32"])),
    "model.safetensors a shape below 0": _weights(_set(NAME, "shape", to=[-260, -16])),
    "model.safetensors a shape that is true": _weights(_set(NAME, "shape", to=[True, 16])),
    "model.safetensors a shape of 30 digits": _weights(_set(NAME, "shape", to=[10**29, 10**29])),
    "model.safetensors offsets below 0": _weights(_set(NAME, "data_offsets", to=[-16640, 0])),
    "model.safetensors offsets backwards": _weights(_set(NAME, "data_offsets", to=[16640, 0])),
    "model.safetensors offsets behind the end": _weights(_set(NAME, "data_offsets", to=[10**12, 10**12 + 16640])),
    "model.safetensors three offsets": _weights(_set(NAME, "data_offsets", to=[0, 1, 2])),
    "model.safetensors two tensors in the same bytes": _weights(_set("model.norm.weight", "data_offsets", to=[0, 64])),
    "model.safetensors bytes that are missing": _weights(lambda header: None, data=100),
    f"{INDEX} a shard outside": _in_model(
        text(json.dumps({"weight_map": {NAME: "../../../etc/passwd.safetensors"}})), _NO_WEIGHTS
    ),
    f"{INDEX} an absolute shard": _in_model(
        text(json.dumps({"weight_map": {NAME: "/etc/x.safetensors"}})), _NO_WEIGHTS
    ),
    f"{INDEX} a shard with a NUL": _in_model(text('{"weight_map": {"a": "x\\u0000.safetensors"}}'), _NO_WEIGHTS),
    f"{INDEX} a shard that is a list": _in_model(text('{"weight_map": {"a": ["x.safetensors"]}}'), _NO_WEIGHTS),
    f"{INDEX} no map": _in_model(text('{"weight_map": [1]}'), _NO_WEIGHTS),
    f"{INDEX} a list": _in_model(text("[1]"), _NO_WEIGHTS),
    f"{INDEX} deep": _in_model(text(DEEP_JSON), _NO_WEIGHTS),
    f"{INDEX} a named pipe": _in_model(fifo, _NO_WEIGHTS),
    "pytorch_model.bin a pickle": _in_model(text(b"\x80\x04."), _NO_WEIGHTS),
    "model.pt another pickle": _in_model(text(b"\x80\x04."), _NO_WEIGHTS),
    "tokenizer.json deep": _in_model(text(DEEP_LIST)),
    "tokenizer_config.json deep": _in_model(text(DEEP_JSON)),
}
for _what, _write in MODELS.items():
    _file, _, _label = _what.partition(" ")
    add("export", _export, "model/", {f"{_file} {_file}: {_label}": _write})

# ---- stoker why, stoker nan, scripts ----


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


def _nan(content: Callable[[Path], None]) -> Make:
    def make(where: Path) -> list[str]:
        dump = where / "nan_step_3" / "rank-0"
        dump.mkdir(parents=True)
        content(dump / "report.json")
        return ["nan", str(where / "nan_step_3")]

    return make


CASES |= {
    f"nan: report.json is {label}": _nan(write)
    for label, write in (("deep", text(DEEP_JSON)), ("a list", text("[]")), ("a device", zeros))
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
