"""A stranger's tokenizer: whatever its patterns do, encoding ends with one line, and no process is left."""

from __future__ import annotations

import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tokenizers")
pytest.importorskip("tiktoken")

from conftest import EVERYTHING, Stoker, at_length
from stoker.contract.names import Refusal
from stoker.training.tokenizer import confined
from stoker.training.tokenizer.confined import Confined
from stoker.training.tokenizer.definition import GPT2, KNOWN_PATTERNS
from stoker.training.tokenizer.encoders import FastPlan, Library
from stoker.training.tokenizer.tokenizer import Tokenizer, bytes_tokenizer

LINE = "hello there my friend what a day "
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
# `tokenizers` needs a day for 64 KB, and looks at no signal meanwhile.
ENDLESS = r"[\s\S]*[a-z ]*\x01|[\s\S]"


def bent(**changes: Any) -> bytes:
    """A tokenizer that knows `aa`, and is no tokenizer of bytes."""
    told = json.loads(bytes_tokenizer().data)
    told["model"]["vocab"]["aa"], told["model"]["merges"] = 300, ["a a"]
    return json.dumps({**told, **changes}).encode()


def split_by(*patterns: str) -> dict[str, Any]:
    parts: list[dict[str, Any]] = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in patterns
    ]
    return {"type": "Sequence", "pretokenizers": [*parts, BYTE_LEVEL]}


def with_pattern(*patterns: str) -> Tokenizer:
    return Tokenizer(bent(pre_tokenizer=split_by(*patterns)), {}, "x")


def is_confined(tokenizer: Tokenizer) -> bool:
    tokenizer.encode("a")
    return isinstance(tokenizer._library, Confined)


def pid_of(tokenizer: Tokenizer) -> int:
    assert isinstance(tokenizer._library, Confined) and tokenizer._library._process is not None
    return tokenizer._library._process.pid


def is_gone(pid: int) -> bool:
    return not os.path.exists(f"/proc/{pid}")


@pytest.mark.parametrize("pattern", sorted(KNOWN_PATTERNS))
def test_known_patterns_are_used_here(pattern: str) -> None:
    tokenizer = with_pattern(pattern)
    texts = [
        LINE,
        "a" * 1000,
        " " * 1000 + "x",
        "A1" * 1000,
        "Straße ٣ 漢字 12345\r\n\n  x",
        "A" * 1000 + "\u0301" * 1000,
    ]
    if r"\p{N}" in pattern and r"\s" in pattern:  # the others match not everything, which tiktoken would leave out
        tokenizer.use(FastPlan())
        assert [tokenizer.decode(tokenizer.encode(text)) for text in texts[:4]] == texts[:4]
    tokenizer.use(None)
    assert [tokenizer.decode(tokenizer.encode(text)) for text in texts] == texts
    assert not is_confined(tokenizer)


def test_known_ways_to_split_are_used_here() -> None:
    digits = {"type": "Digits", "individual_digits": True}
    starcoder = {"type": "Sequence", "pretokenizers": [digits, {**BYTE_LEVEL, "use_regex": True}]}
    assert not is_confined(Tokenizer(bent(pre_tokenizer=starcoder), {}, "x"))
    deepseek = [r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+", next(one for one in KNOWN_PATTERNS if one.startswith("[!"))]
    assert not is_confined(with_pattern(*deepseek))


@pytest.mark.parametrize(
    "change",
    [
        {"pre_tokenizer": split_by(r"\w+|[\s\S]")},
        {"pre_tokenizer": split_by(GPT2, r"\w+|[\s\S]")},
        {"pre_tokenizer": split_by(*[GPT2] * 9)},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [split_by(r"\w+|[\s\S]")]}},
        {
            "pre_tokenizer": {
                "type": "Sequence",
                "pretokenizers": [{"type": "Punctuation", "behavior": "Isolated"}, BYTE_LEVEL],
            }
        },
    ],
)
def test_other_ways_are_confined_and_give_the_same_ids(change: dict[str, Any]) -> None:
    tokenizer = Tokenizer(bent(**change), {}, "x")
    for plan in (tokenizer.plan, None):
        if not isinstance(plan, str):
            tokenizer.use(plan)
            here = Library(tokenizer.told, tokenizer.data).encoder(plan)
            for text in (LINE * 4000, "Straße ٣ 漢字\r\n\n  x", "aaa"):
                assert tokenizer.encode(text)[:9000] == here(text).tolist()[:9000]
    assert is_confined(tokenizer)
    pid = pid_of(tokenizer)
    del tokenizer
    assert is_gone(pid)


WORD_PIECE = {"type": "WordPiece", "unk_token": "!", "continuing_subword_prefix": "##", "vocab": {"!": 0, "a": 1}}
UNIGRAM = {"type": "Unigram", "unk_id": 0, "vocab": [["!", 0.0], ["a", -1.0]]}
REPLACE = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
PLAIN = json.loads(bytes_tokenizer().data)["model"]


@pytest.mark.parametrize(
    "change",
    [
        *({"normalizer": {**REPLACE, "type": kind}} for kind in (None, "Replace")),
        {"normalizer": {"pattern": {"String": "a"}, "content": "aa"}},
        {"normalizer": {"normalizers": [REPLACE]}},
        {"normalizer": {"prepend": "a"}},
        {"normalizer": {}},
        {"normalizer": {"type": "NFC", "more": 1}},
        {"normalizer": {"type": "NFKD"}},
        {"normalizer": {"type": "Sequence", "normalizers": [REPLACE]}},
        {"model": {**WORD_PIECE, "max_input_chars_per_word": 10**9}},
        {"model": {**WORD_PIECE, "max_input_chars_per_word": 100}},
        {"model": UNIGRAM},
        {"model": {**PLAIN, "type": None}},
        {"model": {**PLAIN, "byte_fallback": True}},
        {"model": {**PLAIN, "continuing_subword_prefix": "##"}},
        {"model": {**PLAIN, "max_input_chars_per_word": 10**9}},
        {"pre_tokenizer": None},
        {"pre_tokenizer": {**BYTE_LEVEL, "type": None}},
        {"pre_tokenizer": {**BYTE_LEVEL, "use_regex": 1}},
        {"pre_tokenizer": {**BYTE_LEVEL, "more": 1}},
        {"pre_tokenizer": {"pretokenizers": [BYTE_LEVEL]}},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": []}},
        {"pre_tokenizer": split_by("")},
        {"more": 1},
    ],
    ids=lambda change: json.dumps(change)[:70],
)
def test_what_is_not_proven_harmless_is_not_known(change: dict[str, Any]) -> None:
    definition = {**json.loads(bent(pre_tokenizer=BYTE_LEVEL)), **change}
    tokenizer = Tokenizer(json.dumps(definition).encode(), {}, "x")
    assert not tokenizer.told.is_known and isinstance(tokenizer._library, Confined)


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": None},
        {"normalizer": {"type": "NFC"}},
        {"normalizer": {"type": "Sequence", "normalizers": []}},
        {"decoder": {"anything": 1}, "post_processor": BYTE_LEVEL},
        {
            "model": {
                key: value for key, value in PLAIN.items() if key not in ("type", "byte_fallback", "ignore_merges")
            }
        },
        {"model": {**PLAIN, "continuing_subword_prefix": "", "end_of_word_suffix": "", "unk_token": "!"}},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}},
    ],
    ids=lambda change: json.dumps(change)[:70],
)
def test_published_forms_are_known(change: dict[str, Any]) -> None:
    definition = {**json.loads(bent(pre_tokenizer=split_by(GPT2))), **change}
    tokenizer = Tokenizer(json.dumps(definition).encode(), {}, "x")
    assert tokenizer.told.is_known and not is_confined(tokenizer)


def test_a_normalizer_without_a_type_is_not_left_out() -> None:
    """`tokenizers` guesses its type; tiktoken would not know of it."""
    definition = json.loads(bent(pre_tokenizer=split_by(GPT2)))
    definition["normalizer"] = {"pattern": {"String": "x"}, "content": "aa"}
    tokenizer = Tokenizer(json.dumps(definition).encode(), {}, "x")
    assert tokenizer.encode("x") == [300] and not tokenizer.told.is_exact and isinstance(tokenizer.plan, str)


HASTY = """#!/bin/sh
exec "{python}" -c "from stoker.training.tokenizer import confined; confined.BURST_S = 1; confined.main()"
"""


def test_a_pattern_without_end_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not EVERYTHING:  # a second of CPU time in place of ten
        (tmp_path / "python").write_text(HASTY.format(python=sys.executable))
        (tmp_path / "python").chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    tokenizer = with_pattern(ENDLESS)
    tokenizer.use(None)
    assert tokenizer.encode("aab") == [97, 97, 98]
    pid = pid_of(tokenizer)
    with pytest.raises(
        Refusal, match=r"^tokenizer x: .*encoding 65,533 bytes that begin 'hello.*too slow.*--tokenizer.path$"
    ):
        tokenizer.encode(LINE * 2000)
    assert is_gone(pid)
    assert tokenizer.encode("aab") == [97, 97, 98], "the next text is encoded"


@at_length  # test_strangers_templates.py has the sum's limit with a smaller one: this takes all of its 10 s
def test_many_texts_of_which_each_is_slow_are_stopped() -> None:
    """Each stays below the limit of one text: what counts is the sum."""
    tokenizer = with_pattern(ENDLESS)
    tokenizer.use(None)
    with pytest.raises(Refusal, match="too slow"):
        for _ in range(10_000):
            tokenizer.encode(LINE * 40)


@at_length  # the same splitters in the workers of `stoker prepare` below
def test_a_row_of_splitters_that_double_a_text_is_stopped() -> None:
    tokenizer = Tokenizer(bent(pre_tokenizer={"type": "Sequence", "pretokenizers": [BYTE_LEVEL] * 34}), {}, "x")
    with pytest.raises(Refusal, match="more than the 2 GB of memory"):
        tokenizer.encode("a b")


@pytest.mark.parametrize(
    "pattern",
    [
        r"(?:.|.)+\x00",
        r"(?:.|.){21}\x00|x",
        r"(?=[\s\S]{5000})x",
        "(a+)+b",
        "a*a*a*b",
        r"(.*)\1x",
        "[[",
        "((a{999}){999}){9}",
    ],
)
def test_hostile_patterns_end_in_one_line_or_in_ids(pattern: str) -> None:
    for plan in (True, False):
        tokenizer = with_pattern(pattern)
        try:
            if not plan:
                tokenizer.use(None)
            text = "a" * 9000 + " hello there"
            assert tokenizer.decode(tokenizer.encode(text)) == text
        except Refusal as refusal:
            assert "\n" not in refusal.line and refusal.code == 65


def test_the_rest_of_the_file_is_not_compiled() -> None:
    replace = {"type": "Replace", "pattern": {"Regex": "("}, "content": ""}  # it would be refused if it were read
    for pattern in (GPT2, r"\w+|[\s\S]"):
        tokenizer = Tokenizer(bent(pre_tokenizer=split_by(pattern), decoder=replace, post_processor=replace), {}, "x")
        tokenizer.use(None)
        assert tokenizer.decode(tokenizer.encode("aab c")) == "aab c"


def test_long_tokens() -> None:
    told = json.loads(bent(pre_tokenizer=split_by(GPT2)))
    told["model"]["vocab"]["b" * (60 << 20)] = 302
    with pytest.raises(Refusal, match="a token has 62,914,560 characters; 1,024 is the most"):
        Tokenizer(json.dumps(told).encode(), {}, "x").encode("a")


def added_token(number: int, content: str) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    return {"id": 400 + number, "content": content, **flags}


@pytest.mark.parametrize(("length", "is_slow"), [(12, False), (1000, True)], ids=["short", "long"])
@pytest.mark.parametrize("where", ["added", "vocabulary"])
def test_many_long_tokens_are_confined(where: str, length: int, is_slow: bool) -> None:
    """Each is short enough; the sum is what takes time. 6,000 short ones are nothing unusual."""
    told = json.loads(bent(pre_tokenizer=split_by(GPT2)))
    if where == "added":
        told["added_tokens"] += [added_token(number, f"<{number:0{length - 2}}>") for number in range(6000)]
    else:
        told["model"]["vocab"] |= {f"<{number:0{length - 2}}>": 400 + number for number in range(9000)}
    assert Tokenizer(json.dumps(told).encode(), {}, "x").told.is_known is not is_slow


@at_length
def test_loading_is_limited_over_all_requests() -> None:
    """Each of these takes less than the limit."""
    script = """
import time
from stoker.training.tokenizer import confined
confined.MAKING_S = 2
budget = confined._Budget()
for _ in range(8):
    with budget.for_request(confined._MAKE, 0):
        end = time.process_time() + 1
        while time.process_time() < end:
            pass
"""
    assert subprocess.run([sys.executable, "-c", script], check=False, timeout=300).returncode == -signal.SIGXCPU


@at_length
def test_a_tokenizer_that_loads_for_minutes_is_stopped() -> None:
    """19,000 added tokens of 1,000 characters: 120 s and 1.8 GB."""
    told = json.loads(bent(pre_tokenizer=split_by(GPT2)))
    letters = random.Random(1)
    told["added_tokens"] += [
        added_token(number, "".join(letters.choices("abcdefgh", k=1000))) for number in range(19_000)
    ]
    tokenizer = Tokenizer(json.dumps(told).encode(), {}, "x")
    began = children_seconds()
    with pytest.raises(Refusal, match=r"loading it: (too slow: .*30 s to load|more than the 2 GB)"):
        tokenizer.encode("a")
    assert children_seconds() - began < 40


def children_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_an_interrupted_request_is_not_answered_later(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = with_pattern(r"\w+|[\s\S]")
    assert tokenizer.encode("aa") == [300]
    pid = pid_of(tokenizer)

    def interrupted(process: Any, size: int) -> bytes:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(confined, "_receive", interrupted)
        tokenizer.encode("b")
    assert tokenizer.encode("aa") == [300] and pid_of(tokenizer) != pid and is_gone(pid)


def test_a_fork_has_a_process_of_its_own() -> None:
    tokenizer = with_pattern(r"\w+|[\s\S]")
    assert tokenizer.encode("aa") == [300]
    reader, writer = os.pipe()
    if not (child := os.fork()):
        os.write(writer, json.dumps([tokenizer.encode("aab"), pid_of(tokenizer)]).encode())
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    ids, pid = json.loads(os.read(reader, 100))
    assert ids == [300, 98] and pid != pid_of(tokenizer) and tokenizer.encode("aa") == [300]
    deadline = time.monotonic() + 30
    while not is_gone(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert is_gone(pid), "it ends with who asked"


SLOW = split_by(ENDLESS, ENDLESS)  # two, which `tokenizers` has to do
LARGE = {"type": "Sequence", "pretokenizers": [BYTE_LEVEL] * 34}


@pytest.mark.parametrize(
    ("lines", "workers", "splitter", "why"),
    [
        pytest.param(20_000, 0, SLOW, "too slow", marks=at_length),
        pytest.param(400_000, 2, LARGE, "more than the 2 GB of memory", marks=at_length),
    ],
    ids=["in one process", "by workers"],
)
def test_preparing_ends_in_one_line_and_leaves_nothing(
    stoker: Stoker, lines: int, workers: int, splitter: dict[str, Any], why: str
) -> None:
    (stoker.cwd / "d.txt").write_text(LINE * lines)
    (stoker.cwd / "words").mkdir()
    (stoker.cwd / "words" / "tokenizer.json").write_bytes(bent(pre_tokenizer=splitter))
    argv = ["prepare", "--data", "d.txt", "--tokenizer.path", "words", "--data.context_length", "16"]
    done = stoker(*argv, "--data.num_workers", str(workers), timeout=300)
    assert done.code == 65 and "Traceback" not in done.err, done.err
    assert re.search(rf"\nstoker: tokenizer words: .*encoding .*{why}.*--tokenizer.path\n$", done.err), done.err
    left = [path.name for path in (stoker.cwd / "cache" / "datasets").iterdir() if not path.name.endswith(".lock")]
    assert not left


def test_every_other_path_encodes_through_a_tokenizer() -> None:
    """GRPO's prompts, chats, evaluation and the rest: no other code opens the libraries."""
    package = Path(confined.__file__).parents[1]
    users = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if re.search(r"import_module\(\"(tokenizers|tiktoken)\"|(import|from) (tokenizers|tiktoken)", path.read_text())
    }
    assert users == {"tokenizer/encoders.py", "data/learn.py"}
    makers = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if re.search(r"\b(slow_encoder|fast_encoder|plan_fast|Library)\(", path.read_text())
    }
    assert makers == {"tokenizer/encoders.py", "tokenizer/confined.py", "tokenizer/tokenizer.py"}
