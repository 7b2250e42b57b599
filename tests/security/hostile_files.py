"""Hostile inputs for test_hostile_files.py: each makes files in an empty folder and returns the command that reads them."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


def large(path: Path) -> None:
    with path.open("wb") as file:
        file.write(b"# ")
        file.truncate(3 << 30)


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
    ".yaml 3 GB": large,
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

# ---- stoker prepare: data ----


def _parquet(columns: Callable[[], dict[str, Any]], **options: Any) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.table(columns()), path, **options)

    return write


def _one_word_many_rows() -> dict[str, Any]:
    """A dictionary with one text of 8 MB, in a thousand rows: 8 GB from a few KB."""
    import pyarrow

    return {
        "text": pyarrow.DictionaryArray.from_arrays(
            pyarrow.array([0] * 1000, pyarrow.int32()), pyarrow.array(["x " * (4 << 20)])
        )
    }


def _data_folder(write: Callable[[Path], None]) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        path.mkdir()
        (path / "a.txt").write_text("fine text\n" * 100)
        write(path / "b.txt")

    return make


def _bent(path: Path) -> None:
    """A parquet file whose metadata is overwritten."""
    _parquet(lambda: {"text": ["some text " * 50] * 100})(path)
    data = bytearray(path.read_bytes())
    for place in range(len(data) - 400, len(data) - 12, 7):
        data[place] ^= 0x5A
    path.write_bytes(data)


DATA: dict[str, Callable[[Path], None]] = {
    ".txt a named pipe": fifo,
    ".jsonl a socket": unix_socket,
    ".txt a device": zeros,
    ".parquet a named pipe": fifo,
    " a folder with a named pipe in it": _data_folder(fifo),
    " a folder with a device in it": _data_folder(zeros),
    ".jsonl a deep row": text('{"text": ' + DEEP_LIST + "\n"),
    ".jsonl a row without end": text('{"text": "' + "a" * (65 << 20)),
    ".jsonl a row of ten million lists": text('{"text": [' + "[]," * 10_000_000 + "1]}\n"),
    ".jsonl a number of 5,000 digits": text('{"text": ' + "9" * 5000 + "}\n"),
    ".jsonl control codes in a key": text('{"\\u001b[31mtexts": "x", "b\\nc": 1}\n'),
    ".jsonl UTF-16": text('{"text": "x"}\n'.encode("utf-16")),
    ".jsonl not UTF-8": text(b'{"text": "\xff\xfe"}\n'),
    ".txt an empty file": text(""),
    ".txt a byte-order mark alone": text(b"\xef\xbb\xbf"),
    ".jsonl NaN for a text": text('{"text": NaN}\n'),
    ".parquet one text of 8 MB in 1,000 rows": _parquet(_one_word_many_rows, store_schema=False),
    ".parquet one text of 700 MB": _parquet(
        lambda: {"text": ["x" * (700 << 20)]}, use_dictionary=False, compression="zstd", write_statistics=False
    ),
    ".parquet bent metadata": _bent,
    ".parquet control codes in a column's name": _parquet(lambda: {"\x1b]0;owned\x07": ["x"]}),
    ".parquet another kind of column": _parquet(lambda: {"text": [[1, 2], [3]]}),
    ".gz a packed file": text(b"\x1f\x8b\x08\x00"),
    ".txt a pickle": text(b"\x80\x04\x95\x00\x00"),
}


def _prepare(path: Path, tokenizer: str = "bytes") -> list[str]:
    cache = path.parent / "cache"
    return [
        "prepare",
        "--data",
        str(path),
        "--tokenizer.path",
        tokenizer,
        "--data.cache",
        str(cache),
        "--data.context_length",
        "16",
        "--data.validation",
        "0",
    ]


add("prepare --data", _prepare, "data", DATA)

# ---- stoker prepare: tokenizer ----


def bent_tokenizer(change: Callable[[dict[str, Any]], None]) -> str:
    found = json.loads(bytes_tokenizer().data)
    change(found)
    return json.dumps(found)


def _set(*path: Any, to: Any) -> Callable[[dict[str, Any]], None]:
    def change(found: Any) -> None:
        for key in path[:-1]:
            found = found[key]
        found[path[-1]] = to

    return change


def _tokenizer(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    return text(bent_tokenizer(change))


TOKENIZERS: dict[str, Callable[[Path], None]] = {
    "tokenizer.json deep lists": text(DEEP_LIST),
    "tokenizer.json a named pipe": fifo,
    "tokenizer.json a device": zeros,
    "tokenizer.json a folder": folder,
    "tokenizer.json 3 GB": large,
    "tokenizer.json a list": text("[]"),
    "tokenizer.json an id of 12 digits": _tokenizer(_set("added_tokens", 0, "id", to=10**12)),
    "tokenizer.json an id below 0": _tokenizer(_set("added_tokens", 0, "id", to=-3)),
    "tokenizer.json an id that is true": _tokenizer(_set("model", "vocab", "a", to=True)),
    "tokenizer.json an id that is text": _tokenizer(_set("model", "vocab", "a", to="1")),
    "tokenizer.json a token that is a number": _tokenizer(_set("added_tokens", 0, "content", to=7)),
    "tokenizer.json merges that are numbers": _tokenizer(_set("model", "merges", to=[[1, 2]])),
    "tokenizer.json merges of unknown tokens": _tokenizer(_set("model", "merges", to=[["q", "zzzz"]])),
    "tokenizer.json a splitter that is a list": _tokenizer(_set("pre_tokenizer", to=[1])),
    "tokenizer.json a splitter without parts": _tokenizer(_set("pre_tokenizer", to={"type": "Sequence"})),
    "tokenizer.json a regex that is none": _tokenizer(
        lambda found: found.update(
            pre_tokenizer={"type": "Sequence", "pretokenizers": [{"type": "Split", "pattern": {"Regex": "(((("}, "behavior": "Isolated", "invert": False},
                                                                 {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}]},
            model={**found["model"], "vocab": {**found["model"]["vocab"], "ab": 300}, "merges": [["a", "b"]]},
        )
    ),
    "tokenizer.json a normalizer that is text": _tokenizer(_set("normalizer", to="NFC")),
}  # fmt: skip


def _prepare_with(path: Path) -> list[str]:
    data = path.parent.parent / "data.txt"
    data.write_text("some text to train on " * 400)
    return _prepare(data, str(path.parent))


add("tokenizer", _prepare_with, "words/", TOKENIZERS)


def _tokenizer_config(content: Callable[[Path], None]) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        content(path)
        bytes_tokenizer_file(path.parent)

    return write


def bytes_tokenizer_file(where: Path) -> None:
    (where / "tokenizer.json").write_bytes(bytes_tokenizer().data)


add(
    "tokenizer",
    _prepare_with,
    "words/",
    {
        "tokenizer_config.json config: deep": _tokenizer_config(text(DEEP_JSON)),
        "tokenizer_config.json config: a list": _tokenizer_config(text("[1]")),
        "tokenizer_config.json config: a device": _tokenizer_config(zeros),
    },
)

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
