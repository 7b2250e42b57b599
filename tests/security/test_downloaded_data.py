"""Downloaded tokenizers, chat templates and data: a damaged or odd file is one line, a template can't leave its sandbox or hold up
`stoker chat` and `stoker serve`, and special tokens written in data stay text.
"""

from __future__ import annotations

import bz2
import gc
import gzip
import json
import lzma
import os
import re
import signal
import socket
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numpy", reason="numpy is not installed")
pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

import jinja2
import tokenizers

from conftest import Stoker
from stoker.cli.main import main
from stoker.contract.errors import EX_DATAERR, Refusal
from stoker.training.config.amount import lines_in
from stoker.training.data import crew, sources
from stoker.training.data.config import DataConfig
from stoker.training.data.ours import digest_files
from stoker.training.data.prepare import prepare
from stoker.training.data.rows import rows
from stoker.training.tokenizer import chat, render_process
from stoker.training.tokenizer.chat import Unfit
from stoker.training.tokenizer.config import TokenizerConfig
from stoker.training.tokenizer.definition import GPT2
from stoker.training.tokenizer.rendering import Template, Unusable
from stoker.training.tokenizer.tokenizer import Tokenizer, bytes_tokenizer, load

Write = Callable[[Path], None]

# ---- files ----


def content(data: str | bytes) -> Write:
    return lambda path: (path.write_bytes(data if isinstance(data, bytes) else data.encode()), None)[1]


def fifo(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def unix_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        before = os.getcwd()
        os.chdir(path.parent)  # the path of a socket has 107 bytes at most
        try:
            listener.bind(path.name)
        finally:
            os.chdir(before)


def parquet_file(columns: dict[str, Any]) -> Write:
    def write(path: Path) -> None:
        arrow = pytest.importorskip("pyarrow", reason="parquet files need pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet", reason="parquet files need pyarrow")
        parquet.write_table(arrow.table(columns), path)

    return write


def bent_footer(path: Path) -> None:
    parquet_file({"text": ["some text " * 50] * 100})(path)
    data = bytearray(path.read_bytes())
    for place in range(len(data) - 400, len(data) - 12, 7):
        data[place] ^= 0x5A
    path.write_bytes(data)


DEEP = "[" * 100_000
ROW = '{"text": "some words"}\n'

# ---- damaged data ----

DATA: dict[str, tuple[str, Write]] = {
    "a named pipe": ("a.txt", fifo),
    "a socket": ("a.jsonl", unix_socket),
    "a device": ("a.txt", device),
    "a named pipe for parquet": ("a.parquet", fifo),
    "a deep row": ("a.jsonl", content(f'{{"text": {DEEP}\n')),
    "a number of 5,000 digits": ("a.jsonl", content(f'{{"text": {"9" * 5000}}}\n')),
    "a row that ends in the middle": ("a.jsonl", content(f'{ROW}{{"text": "some')),
    "a key twice": ("a.jsonl", content(f'{ROW}{{"text": "a", "text": "b"}}\n')),
    "control codes in a key": ("a.jsonl", content('{"\\u001b[31mtexts": "x", "b\\nc": 1}\n')),
    "UTF-16": ("a.jsonl", content(ROW.encode("utf-16"))),
    "not UTF-8": ("a.jsonl", content(b'{"text": "\xff\xfe"}\n')),
    "NaN for a text": ("a.jsonl", content('{"text": NaN}\n')),
    "json that ends in the middle": ("a.json", content(f"[{ROW},{ROW}")),
    "json that is damaged": ("a.json", content(f"[{ROW},{{oops}},{ROW}]")),
    "csv with a row that is too short": ("a.csv", content("text,more\na,b\nc\n")),
    "csv whose quote is never closed": ("a.csv", content('text,more\n"a,b\nc,d\n')),
    "an empty file": ("a.txt", content("")),
    "a pickle": ("a.txt", content(b"\x80\x04\x95\x00\x00")),
    "a cut gzip file": ("a.jsonl.gz", content(gzip.compress(ROW.encode() * 1000)[:-20])),
    "a cut xz file": ("a.jsonl.xz", content(lzma.compress(ROW.encode() * 1000)[:-20])),
    "a cut bz2 file": ("a.jsonl.bz2", content(bz2.compress(ROW.encode() * 1000)[:-20])),
    "a bent footer": ("a.parquet", bent_footer),
    "control codes in a column's name": ("a.parquet", parquet_file({"\x1b]0;owned\x07": ["x"]})),
    "another kind of column": ("a.parquet", parquet_file({"text": [[1, 2], [3]]})),
    "no arrow file": ("a.arrow", content(b"some text that is no table")),
}


def check_one_line(code: int, err: str) -> str:
    assert 64 <= code <= 78, (code, err[-2000:])
    assert "Traceback" not in err and "\x1b" not in err and "\x07" not in err, err[-2000:]
    lines = [line for line in err.splitlines() if line.startswith("stoker: ")]
    assert lines and len(lines[-1]) < 20_000, err[-2000:]
    return lines[-1]


def prepared(path: Path, tokenizer: str = "bytes") -> int:
    cache = str(path.parent / "cache")
    more = ["--data.cache", cache, "--data.context_length", "16", "--data.validation", "0"]
    return main(["prepare", "--data", str(path), "--tokenizer.path", tokenizer, *more])


@pytest.mark.parametrize("kind", DATA)
def test_a_damaged_data_file_is_one_line_that_names_it(
    kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    name, write = DATA[kind]
    write(tmp_path / name)
    assert name in check_one_line(prepared(tmp_path / name), capfd.readouterr().err)


@pytest.mark.parametrize(("name", "number"), [("a.jsonl", 2), ("a.json", 2), ("a.csv", 2)])
def test_a_damaged_row_is_named_by_its_number(name: str, number: int, tmp_path: Path) -> None:
    text = {"a.jsonl": f"{ROW}oops\n", "a.json": f"[{ROW},oops]", "a.csv": "text,more\na,b\nc\n"}[name]
    (tmp_path / name).write_text(text)
    with pytest.raises(Refusal, match=rf"a\.\w+, (row|line) {number} "):
        list(rows(str(tmp_path / name)))


def test_a_damaged_json_file_is_refused_where_it_is_damaged(tmp_path: Path) -> None:
    """Rows are longer than a block that is read at once, and the rest of a damaged file is not read into memory."""
    long = json.dumps({"text": "ä\u2028\\" * (1 << 20)}, ensure_ascii=False)
    (tmp_path / "fine.json").write_text(f"[{long}, {long}]")
    assert [len(row["text"]) for _, row in rows(str(tmp_path / "fine.json"))] == [3 << 20] * 2
    with (tmp_path / "bad.json").open("wb") as file:
        file.write(f"[{long}, {{oops}}, ".encode())
        file.truncate(64 << 30)
    with pytest.raises(Refusal, match="row 2 is not JSON"):
        list(rows(str(tmp_path / "bad.json")))


@pytest.mark.parametrize("name", ["q.jsonl", "q.csv", "q.arrow", "q.parquet"])
def test_a_named_pipe_is_refused_wherever_rows_are_read(name: str, tmp_path: Path) -> None:
    from stoker.training.evaluate import tasks

    path = tmp_path / name
    os.mkfifo(path)
    for read in (lambda: list(rows(str(path))), lambda: tasks.read_tasks([str(path)], 0)):
        with pytest.raises(Refusal):
            read()
    if name in ("q.jsonl", "q.csv"):  # rows of the others are not counted before the start
        with pytest.raises((Refusal, OSError), match="named pipe"):
            lines_in(str(path))
    with pytest.raises(OSError, match="named pipe"):
        digest_files([str(path)], str(tmp_path), 1, lambda line: None)


GREEDY = """
from stoker.training.data import work
work.MAX_MEMORY = 128 << 20
def do(*more):
    {what}
work.do = do
work.main()
"""


@pytest.mark.parametrize("what", ["bytearray(1 << 30)", "import os; os.abort()"])
def test_a_worker_at_its_memory_limit_is_one_line_that_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    (tmp_path / "work.py").write_text(GREEDY.format(what=what))
    launch = subprocess.Popen
    monkeypatch.setattr(
        crew.subprocess, "Popen", lambda argv, **how: launch([argv[0], str(tmp_path / "work.py")], **how)
    )
    (tmp_path / "a.txt").write_text("hello world\n" * 1000)
    data = DataConfig(path=(str(tmp_path / "a.txt"),), cache=str(tmp_path / "cache"), num_workers=2, context_length=8)
    with pytest.raises(Refusal, match=r"preparing data.*a\.txt.*memory"):
        prepare(data, TokenizerConfig(path="bytes"), lambda line: None)
    assert not [name for name in os.listdir(tmp_path / "cache" / "datasets") if not name.endswith(".lock")]


@pytest.mark.parametrize(
    "named",
    ["{table}", "file://{table}::https://example.org/a", "{table}::hf://datasets/owner/name@main/a",
     "zip://rows.csv::{packed}::https://example.org/a"],
)  # fmt: skip
def test_a_data_set_of_the_hub_has_no_files_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    """Its page may name a path, and `datasets` would read it: rows of a private file would be learned."""
    datasets = pytest.importorskip("datasets")
    table, packed, page = tmp_path / "table.parquet", tmp_path / "packed.zip", tmp_path / "name" / "README.md"
    parquet_file({"text": ["private"]})(table)
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("rows.csv", "text\nprivate\n")
    page.parent.mkdir()
    path = named.format(table=table, packed=packed)
    page.write_text(f"---\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n    path: {path}\n---\n")
    real = datasets.load_dataset_builder

    def builder(name: str, config: str | None, revision: str | None) -> object:
        return real(str(page.parent), config, cache_dir=str(tmp_path / "hf"))  # as if it had been downloaded

    monkeypatch.setattr(datasets, "load_dataset_builder", builder)
    with pytest.raises(Refusal, match="as one of its files, which is not a file of the hub"):
        sources.fetch("owner/name", str(tmp_path / "cache"), lambda line: None)
    assert not (tmp_path / "cache" / "hub").exists()


# ---- damaged tokenizers ----


def bent(change: Callable[[dict[str, Any]], object]) -> Write:
    definition = json.loads(bytes_tokenizer().data)
    change(definition)
    return content(json.dumps(definition))


def with_regex(pattern: str) -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, BYTE_LEVEL]}


BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
PLAIN = json.loads(bytes_tokenizer().data)["model"]
PAIRS = {**PLAIN, "vocab": {**PLAIN["vocab"], "aa": 300}, "merges": ["a a"]}  # not a tokenizer of bytes alone
TOKENIZERS: dict[str, tuple[str, Write]] = {
    "a named pipe": ("tokenizer.json", fifo),
    "a device": ("tokenizer.json", device),
    "a folder": ("tokenizer.json", Path.mkdir),
    "deep lists": ("tokenizer.json", content(DEEP)),
    "cut in the middle": ("tokenizer.json", content(bytes_tokenizer().data[:2000])),
    "a list": ("tokenizer.json", content("[]")),
    "an id of 12 digits": ("tokenizer.json", bent(lambda told: told["added_tokens"][0].update(id=10**12))),
    "an id below 0": ("tokenizer.json", bent(lambda told: told["added_tokens"][0].update(id=-3))),
    "an id that is true": ("tokenizer.json", bent(lambda told: told["model"]["vocab"].update(a=True))),
    "an id that is text": ("tokenizer.json", bent(lambda told: told["model"]["vocab"].update(a="1"))),
    "a token that is a number": ("tokenizer.json", bent(lambda told: told["added_tokens"][0].update(content=7))),
    "merges that are numbers": ("tokenizer.json", bent(lambda told: told["model"].update(merges=[[1, 2]]))),
    "merges of unknown tokens": ("tokenizer.json", bent(lambda told: told["model"].update(merges=[["q", "zzzz"]]))),
    "a splitter that is a list": ("tokenizer.json", bent(lambda told: told.update(pre_tokenizer=[1]))),
    "a splitter without parts": ("tokenizer.json", bent(lambda told: told.update(pre_tokenizer={"type": "Sequence"}))),
    "a regex that is none": ("tokenizer.json", bent(lambda told: told.update(pre_tokenizer=with_regex("(((("), model=PAIRS))),
    "a normalizer that is text": ("tokenizer.json", bent(lambda told: told.update(normalizer="NFC"))),
    "a deep config": ("tokenizer_config.json", content('{"a":' * 50_000)),
    "a config that is a list": ("tokenizer_config.json", content("[1]")),
    "a config that is a device": ("tokenizer_config.json", device),
}  # fmt: skip


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_damaged_tokenizer_is_one_line(kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("some text to train on " * 400)
    name, write = TOKENIZERS[kind]
    folder = tmp_path / "words"
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes(bytes_tokenizer().data)
    (folder / name).unlink(missing_ok=True)
    write(folder / name)
    check_one_line(prepared(tmp_path / "a.txt", str(folder)), capfd.readouterr().err)


def test_a_tokenizer_whose_library_panics_on_a_text_is_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("hello " * 40 + "x" * 40)  # more tries than the regex engine makes
    folder = tmp_path / "words"
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes(definition(pre_tokenizer=with_regex(r"(?:x+x+)+y|[\s\S]")))
    code = prepared(tmp_path / "a.txt", str(folder))
    errors = capfd.readouterr().err
    # The library prints its panic to stderr by itself, before the exception.
    refusals = [line for line in errors.splitlines() if line.startswith("stoker: tokenizer")]
    assert code == EX_DATAERR and len(refusals) == 1 and "retry-limit" in refusals[0] and "Traceback" not in errors


def test_ctrl_c_works_while_a_library_works_on_one_text() -> None:
    program = """
import hashlib, os, signal, threading
from stoker.training.data.crew import run_interruptibly
threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
run_interruptibly(lambda: hashlib.pbkdf2_hmac("sha256", b"x", b"y", 2**31 - 1))  # minutes without the GIL
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=120, check=False)
    assert done.returncode == -signal.SIGINT and b"KeyboardInterrupt" in done.stderr


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json"])  # fmt: skip
def test_a_tokenizers_file_that_leads_out_of_its_folder_is_not_read(name: str, tmp_path: Path) -> None:
    folder, private = tmp_path / "folder", tmp_path / "id_rsa"
    bytes_tokenizer().save(str(folder))
    private.write_text((folder / name).read_text() if (folder / name).exists() else "{}")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(private)
    with pytest.raises(Refusal, match="leads out of its folder"):
        load(str(folder))
    (folder / name).unlink()
    (folder / f"real-{name}").write_text(private.read_text())
    (folder / name).symlink_to(f"real-{name}")
    load(str(folder))


def definition(**changes: Any) -> bytes:
    return json.dumps({**json.loads(bytes_tokenizer().data), "model": PAIRS, **changes}).encode()


@pytest.mark.parametrize(
    "change",
    [
        {"pre_tokenizer": with_regex(r"\w+|[\s\S]")},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, BYTE_LEVEL]}},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Punctuation", "behavior": "Isolated"}, BYTE_LEVEL]}},
        {"pre_tokenizer": with_regex(GPT2), "normalizer": {"pattern": {"String": "x"}, "content": "aa"}},  # without a type
        {"pre_tokenizer": with_regex(GPT2), "normalizer": {"type": "Replace", "pattern": {"String": "x"}, "content": "aa"}},
        {"pre_tokenizer": BYTE_LEVEL, "normalizer": {"type": "NFKD"}},
    ],
    ids=lambda change: json.dumps(change)[:70],
)  # fmt: skip
def test_unusual_tokenizers_give_the_ids_of_the_library(change: dict[str, Any]) -> None:
    data = definition(**change)
    tokenizer, theirs = Tokenizer(data, {}, "x"), tokenizers.Tokenizer.from_str(data.decode())
    for text in ("hello there my friend aa 12 " * 400, "Straße ٣ 漢字\r\n\n  x", "xaaax", "<|im_end"):
        want = theirs.encode(text, add_special_tokens=False).ids
        if not isinstance(tokenizer.plan, str):
            tokenizer.use(tokenizer.plan)
            assert tokenizer.encode(text) == want
        tokenizer.use(None)
        assert tokenizer.encode(text) == want


def test_only_the_parts_that_encoding_needs_are_compiled() -> None:
    broken = {"type": "Replace", "pattern": {"Regex": "("}, "content": ""}
    tokenizer = Tokenizer(definition(pre_tokenizer=with_regex(GPT2), decoder=broken, post_processor=broken), {}, "x")
    tokenizer.use(None)
    assert tokenizer.decode(tokenizer.encode("aab c")) == "aab c"


# ---- chat templates ----

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
TURNS = [("user", b"a"), ("assistant", b"b")]


def with_template(source: str) -> Tokenizer:
    return Tokenizer(bytes_tokenizer().data, {"chat_template": source}, "a folder")


BAD_TEMPLATES = {
    "counts": ("{% for a in range(10 ** 9) %}{% endfor %}", "Range too big"),
    "reads a file": ("{% include '/etc/passwd' %}", "reads the file '/etc/passwd'"),
    "imports": ("{% from 'os' import system %}", "reads the file 'os'"),
    "reads attributes": ("{{ messages.__class__.__mro__[1].__subclasses__() }}", "unsafe|Security"),
    "reads attributes by a filter": ("{{ (''|attr('__class__')).x }}", "unsafe|Security|undefined|Undefined"),
    "reads attributes by a format": ("{{ '{0.__class__.__init__.__globals__}'.format(messages) }}", "unsafe|Security"),
    "reads a function's globals": ("{{ raise_exception.__globals__['json'] }}", "unsafe|Security"),
    "reads a class": ("{{ dict.__subclasses__() }}{{ dict.mro() }}", "unsafe|Security"),
    "changes the messages": ("{{ messages.clear() }}", "unsafe|not safely callable|Security"),
    "has an error": ("{% for a in %}{{ }}", "line 1"),
    "refuses": ("{{ raise_exception('only users here') }}", "only users here"),
    "recurses": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "Recursion|recursion"),
    "writes no text": ("{% call dict() %}{% endcall %}", "can't write it"),
}


@pytest.mark.parametrize("in_child", [False, True])
@pytest.mark.parametrize("kind", BAD_TEMPLATES)
def test_a_template_that_cant_be_used_is_one_line(kind: str, in_child: bool) -> None:
    source, says = BAD_TEMPLATES[kind]
    tokenizer = with_template(source)
    tokenizer.renders_in_child = in_child
    with pytest.raises(Refusal, match=says) as refused:
        chat.encoded(tokenizer, TURNS)
    assert "\n" not in refused.value.line and "a folder" in refused.value.line and len(refused.value.line) < 500


@pytest.mark.parametrize(("version", "works"), [("3.1.5", False), ("3.0", False), ("3.1.6", True), ("3.1.10", True), ("4.0.0rc1", True)])  # fmt: skip
def test_templates_are_rendered_by_a_sandbox_without_known_holes_only(
    version: str, works: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jinja2, "__version__", version)
    if works:
        assert Template("{{ 1 }}", {}, re.compile("x")).text([], None) == "1"
    else:
        with pytest.raises(Unusable, match=r"install 3\.1\.6 or later"):
            Template("{{ 1 }}", {}, re.compile("x"))


@pytest.mark.parametrize(
    "source", [LOOP, "{% set n = 9 * messages | length %}{{ n ** (n ** n) }}"], ids=["a loop", "one long operation"]
)
def test_a_template_without_end_is_one_line_and_the_next_conversation_is_rendered(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(render_process, "RENDER_S", 1.0)
    tokenizer = with_template(f"{{% if messages[0].content == 'x' %}}{source}{{% endif %}}ok")
    tokenizer.renders_in_child = True
    assert tokenizer.decode(chat.prompt(tokenizer, [("user", b"a")])) == "ok"
    began = time.monotonic()
    with pytest.raises(Unfit, match="more than 1 s"):
        chat.prompt(tokenizer, [("user", b"x")])
    assert time.monotonic() - began < 30
    assert tokenizer.decode(chat.prompt(tokenizer, [("user", b"a")])) == "ok"


def test_the_child_renders_what_this_process_renders_and_ends_with_its_owner() -> None:
    here, apart = with_template(CHATML), with_template(CHATML)
    apart.renders_in_child = True
    for turns in (TURNS, [("user", "ü<|im_end|>\ud83d".encode("utf-8", "surrogatepass")), *TURNS], TURNS * 200):
        one, other = chat.encoded(here, turns), chat.encoded(apart, turns)
        assert one.ids.tolist() == other.ids.tolist() and one.mask.tolist() == other.mask.tolist()
    assert here.stop_ids == apart.stop_ids
    assert apart.template is not None
    renderer = apart.template._renderer
    assert isinstance(renderer, render_process.RenderProcess) and renderer._child is not None
    pid = renderer._child.pid
    del apart, renderer
    gc.collect()  # a tokenizer and its template refer to each other
    assert not os.path.exists(f"/proc/{pid}")


def test_an_interrupted_rendering_is_not_taken_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = with_template("{{ messages[0].content }}")
    tokenizer.renders_in_child = True
    assert tokenizer.decode(chat.prompt(tokenizer, [("user", b"a")])) == "a"

    def interrupted(child: object, seconds: float) -> bytes:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(render_process, "_read_line", interrupted)
        chat.prompt(tokenizer, [("user", b"b")])
    assert tokenizer.decode(chat.prompt(tokenizer, [("user", b"c")])) == "c"


@pytest.fixture
def looping_model(tmp_path: Path) -> Path:
    """A model whose template loops for the message `loop`."""
    pytest.importorskip("torch", reason="torch is not installed")
    from stoker.training.model import hf
    from stoker.training.model.config import ModelConfig
    from stoker.training.model.decoder import Decoder

    model = Decoder(ModelConfig(layers=1, dim=32, heads=2, kv_heads=2, head_dim=16, ff=32, vocab_size=300), 256)
    model.start(1)
    bytes_tokenizer().save(str(tmp_path / "words"))
    folder = tmp_path / "model"
    hf.save(model, str(folder), say=lambda line: None, tokenizer_folder=str(tmp_path / "words"))
    (folder / "chat_template.jinja").write_text(f"{{% if messages[0].content == 'loop' %}}{LOOP}{{% endif %}}{CHATML}")
    return folder


def test_a_looping_template_is_one_line_in_chat(
    looping_model: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(render_process, "RENDER_S", 2.0)
    more = ["--device", "cpu", "--max-tokens", "2"]
    assert main(["chat", str(looping_model), "--prompt", "fine", *more]) == 0
    capfd.readouterr()
    line = check_one_line(main(["chat", str(looping_model), "--prompt", "loop", *more]), capfd.readouterr().err)
    assert "more than 2 s" in line
    (looping_model / "chat_template.jinja").write_text(LOOP)
    line = check_one_line(main(["chat", str(looping_model), "--prompt", "fine", *more]), capfd.readouterr().err)
    assert "more than 2 s" in line


def test_a_looping_template_is_an_http_error_in_serve_and_the_server_goes_on(looping_model: Path) -> None:
    from test_serve import Server

    path, body = "/v1/chat/completions", {"max_tokens": 2}
    with Server(looping_model, "--name", "m") as server, ThreadPoolExecutor(1) as pool:
        began = time.monotonic()
        looping = pool.submit(server.ask, path, {**body, "messages": [{"role": "user", "content": "loop"}]})
        status, answer = server.ask("/health")
        assert status == 200, answer
        status, answer = looping.result()
        assert 400 <= status < 600 and "more than 10 s" in json.dumps(answer), answer
        assert time.monotonic() - began < 60
        status, answer = server.ask(path, {**body, "messages": [{"role": "user", "content": "fine"}]})
        assert status == 200 and answer["choices"], answer


# ---- special tokens in data stay text ----


def test_a_template_that_deletes_text_makes_no_special_token_of_the_rest() -> None:
    """As SmolLM3 deletes /think from a system message."""
    tokenizer = with_template(CHATML.replace("m.content", "m.content.replace('/think', '')"))

    def count(text: str) -> int:
        ids = chat.encoded(tokenizer, [("user", text.encode()), ("assistant", b"b")]).ids.tolist()
        return ids.count(tokenizer.special["<|im_end|>"])

    assert count("x /think y") == count("a <b>/think</b> [c] <|x") == count("<|im_end|>") == 2
    with pytest.raises(Unfit, match="it makes a special token of a message's text"):
        count("x<|im_/thinkend|>y")
    with pytest.raises(Unfit, match="it makes a special token"):
        chat.prompt(tokenizer, [("user", b"x<|im_/thinkend|>y")])
    two_fields = with_template("{{ messages[0].content }}{{ messages[1].content }}<|im_end|>")
    with pytest.raises(Unfit, match="it makes a special token"):
        chat.prompt(two_fields, [("user", b"<|im_"), ("user", b"end|>")])


def test_a_row_with_every_private_character_is_left_out() -> None:
    every = "".join(map(chr, range(0x100000, 0x10FFFE)))
    tokenizer = with_template(CHATML)
    with pytest.raises(Unfit, match="private characters"):
        chat.encoded(tokenizer, [("user", every.encode()), ("assistant", b"b")])
    ids = chat.encoded(tokenizer, [("user", f"{every[:-1]}<|im_end|>".encode()), ("assistant", b"b")]).ids.tolist()
    assert ids.count(tokenizer.special["<|im_end|>"]) == 2 and f"{every[:-1]}<|im_end|>" in tokenizer.decode(ids)


def test_special_tokens_in_a_tools_arguments_stay_text() -> None:
    """Parquet has tuples for the pairs of a map."""
    tokenizer = with_template(
        "{% for m in messages %}{{ m.content }}{{ m.get('tool_calls', '') | tojson }}<|im_end|>{% endfor %}"
    )
    call = chat.Turn("assistant", b"b", {"tool_calls": [{"arguments": [("key", "x<|im_end|>y")]}]})
    ids = chat.prompt(tokenizer, [("user", b"a"), call])
    assert ids.count(tokenizer.special["<|im_end|>"]) == 2 and "x<|im_end|>y" in tokenizer.decode(ids)


@pytest.mark.parametrize("workers", [0, 2])
def test_special_tokens_in_prepared_text_stay_text(workers: int, stoker: Stoker) -> None:
    text = "a text<|im_end|> with <|endoftext|> in it\n"
    (stoker.cwd / "a.jsonl").write_text((json.dumps({"text": text}) + "\n") * 50)
    words = ["--tokenizer.vocab_size", "300", "--data.context_length", "16", "--data.num_workers", str(workers)]
    done = stoker("prepare", "--data", "a.jsonl", "--data.validation", "0", *words, "--json", timeout=300)
    assert done.code == 0, done.err
    import numpy as np

    folder = json.loads(done.out)["folder"]
    tokenizer = load(os.path.join(folder, "tokenizer"))
    ids = np.fromfile(next(Path(folder).glob("train-*.bin")), dtype="<u2").tolist()
    assert ids.count(tokenizer.special["<|im_end|>"]) == 0 and ids.count(tokenizer.end_id) == 50
    assert tokenizer.decode(ids[: ids.index(tokenizer.end_id)]) == text


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield
