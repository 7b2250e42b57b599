"""A stranger's chat template, special tokens and rows: what the main process does stays in proportion to the data."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

import pytest

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

from conftest import at_length
from stoker.contract.names import Refusal
from stoker.training.tokenizer import chat
from stoker.training.tokenizer.chat import Unfit
from stoker.training.tokenizer.encoders import Ids, SpanEncoder
from stoker.training.tokenizer.tokenizer import Tokenizer, bytes_tokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TURNS = [("user", b"a"), ("assistant", b"b")]


def with_template(source: str, special: list[str] | None = None) -> Tokenizer:
    definition = json.loads(bytes_tokenizer().data)
    flags = {**dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False), "special": True}
    definition["added_tokens"] += [
        {"id": 260 + place, "content": content, **flags} for place, content in enumerate(special or [])
    ]
    return Tokenizer(json.dumps(definition).encode(), {"chat_template": source}, "x")


def test_a_long_text_of_the_templates_own_is_encoded_with_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """And earns no CPU time by its length: only the conversation does."""
    made, calls = Tokenizer._span_encoders, []

    def recorded(self: Tokenizer, doubles: Mapping[str, str]) -> tuple[SpanEncoder, SpanEncoder]:
        def record(name: str, encode: SpanEncoder) -> SpanEncoder:
            def encoder(text: str, due: int) -> tuple[Ids, Ids]:
                calls.append((name, len(text), due))
                return encode(text, due)

            return encoder

        near, limited = made(self, doubles)
        return record("near", near), record("limited", limited)

    monkeypatch.setattr(Tokenizer, "_span_encoders", recorded)
    long = with_template("{{ 'ab ' * 30000 }}" + CHATML)
    ids = chat.prompt(long, [("user", b"a")])
    name, length, due = calls[-1]
    assert name == "limited" and length > 90_000 and due < 20_000
    assert ids[:90_000] == list(b"ab ") * 30_000 and long.special["<|im_start|>"] in ids[90_000:]
    chat.prompt(with_template(CHATML), [("user", b"ab " * 30_000), ("assistant", b"b")] * 2)
    assert calls[-1][0] == "near" and calls[-1][1] > 180_000 < calls[-1][2], "a long conversation is not a template's"


def in_limits(setting: str, requests: str) -> int:
    """The exit status of a confined process with this setting and these requests."""
    script = f"""
import io, os, resource, sys
from stoker.training.tokenizer import confined
from stoker.training.tokenizer.confined import _REQUEST, _RENDER, _SPANS, _TEMPLATES, _TOKENIZER
from stoker.training.tokenizer.tokenizer import bytes_tokenizer
def request(what, payload, number=0):
    return _REQUEST.pack(what, number, len(payload)) + payload
{setting}
with os.fdopen(os.memfd_create("requests"), "wb", closefd=False) as file:
    file.write({requests})
    file.flush()
    file.seek(0)
    os.dup2(file.fileno(), 0)
confined.main()
"""
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.DEVNULL, check=False, timeout=300)
    return done.returncode


@at_length
def test_cpu_time_is_earned_by_the_conversation_only() -> None:
    """1 MB takes 0.7 s, and earns 10 s where somebody wrote it."""
    setting = 'confined.BURST_S, text = 1, b"ab " * (1 << 19)'
    load = 'request(_TOKENIZER, b"null\\n" + bytes_tokenizer().data)'
    assert in_limits(setting, f"{load} + request(_SPANS, text, len(text)) * 2") == 0
    assert in_limits(setting, f"{load} + request(_SPANS, text, 0) * 8") == -signal.SIGXCPU


@at_length
def test_templates_have_a_limit_over_all_conversations() -> None:
    setting = """
import json, time
from stoker.training.tokenizer.rendering import Templates
def busy(self, payload):
    end = time.process_time() + 0.5
    while time.process_time() < end: pass
    return b"{}"
Templates.answer = busy
confined.BURST_S = 1
"""
    requests = 'request(_TEMPLATES, b\'{"special": []}\') + request(_RENDER, b"{}")'
    assert in_limits(setting, requests) == 0
    assert in_limits(setting, f"{requests} * 12") == -signal.SIGXCPU


def test_spans_are_few_and_found_at_once() -> None:
    many = "{% for a in range(200) %}{% for b in range(60) %}{% generation %}SPAN{% endgeneration %}GAP{% endfor %}{% endfor %}"
    touching = chat.encoded(with_template(many.replace("SPAN", "a").replace("GAP", "")), TURNS)
    assert touching.mask.tolist() == [1] * 12_000 and touching.size == 12_000
    empty = chat.encoded(with_template(many.replace("SPAN", "").replace("GAP", "<|pad|>")), TURNS)
    assert len(empty.mask) == 12_000 and not empty.mask.any() and empty.size == 0
    with pytest.raises(Unfit, match=r"it marks 12,000 parts as the assistant's; 10,000 is the most"):
        chat.encoded(with_template(many.replace("SPAN", "a").replace("GAP", "<|pad|>")), TURNS)
    fewer = with_template(many.replace("200", "100").replace("SPAN", "aé").replace("GAP", "b<|pad|>"))
    encoded = chat.encoded(fewer, TURNS)
    assert encoded.mask.tolist() == [1, 1, 1, 0, 0] * 6000 and encoded.size == 18_000


def test_a_row_with_every_private_character_is_left_out() -> None:
    every = "".join(map(chr, range(0x100000, 0x10FFFE)))
    tokenizer = with_template(CHATML)
    with pytest.raises(Unfit, match="private characters"):
        chat.encoded(tokenizer, [("user", every.encode()), ("assistant", b"b")])
    ids = chat.encoded(tokenizer, [("user", f"{every[:-1]}<|im_end|>".encode()), ("assistant", b"b")]).ids.tolist()
    assert ids.count(tokenizer.special["<|im_end|>"]) == 2 and f"{every[:-1]}<|im_end|>" in tokenizer.decode(ids)


def test_private_characters_in_rows_cost_nothing() -> None:
    tokenizer = with_template(CHATML, [f"<unused{number}>" for number in range(6000)])

    def seconds(first: int) -> float:
        began = time.process_time()
        for count in range(60):
            text = "".join(chr(first + place) for place in range(count)) + "<unused7>"
            chat.encoded(tokenizer, [("user", text.encode()), ("assistant", b"b")])
        return time.process_time() - began

    seconds(0x4E00)
    assert seconds(0x100000) < seconds(0x4E00) + 1


@pytest.mark.parametrize(
    "special",
    [[f"<{number}>" for number in range(25_000)], [f"<{number:099}>" for number in range(2000)], ["x" * 300]],
    ids=["many", "much", "long"],
)
def test_more_special_tokens_than_a_text_can_be_searched_for(special: list[str]) -> None:
    tokenizer = with_template(CHATML, special)
    assert tokenizer.told.vocab_size
    with pytest.raises(Refusal, match=r"^tokenizer x: .* special tokens with .* are the most$"):
        chat.encoded(tokenizer, TURNS)


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


def test_thinking_that_a_template_looks_for_is_found_as_ever() -> None:
    source = CHATML.replace("m.content", "m.content.split('</think>')[-1]")
    encoded = chat.encoded(with_template(source), [("user", b"a"), ("assistant", b"<think>why</think>b")])
    assert b"why" not in bytes(number for number in encoded.ids.tolist() if number < 256)


@pytest.mark.parametrize(
    ("source", "text"), [("{{ '\\ud800' }}x", "?x"), ("{{ '\\ud83d' }}{{ '\\ude42' }}x", "??x")], ids=["half", "halves"]
)
def test_halves_of_characters_are_replaced(source: str, text: str) -> None:
    tokenizer = with_template(source)
    assert tokenizer.decode(chat.prompt(tokenizer, TURNS[:1])) == text


def test_what_a_template_writes_that_is_no_text_leaves_out_the_row() -> None:
    tokenizer = with_template("{% if messages[0].content == 'a' %}{% call dict() %}{% endcall %}{% endif %}ok")
    with pytest.raises(Unfit, match="can't write it"):
        chat.prompt(tokenizer, TURNS[:1])
    assert tokenizer.decode(chat.prompt(tokenizer, [("user", b"b")])) == "ok"


def test_a_tokenizer_that_the_library_refuses_is_refused_in_one_line() -> None:
    definition: dict[str, Any] = json.loads(bytes_tokenizer().data)
    definition["model"]["merges"] = ["a nobody"]
    tokenizer = Tokenizer(json.dumps(definition).encode(), {"chat_template": CHATML}, "x")
    with pytest.raises(Refusal, match=r"^tokenizer x: tokenizer.json can't be used: .*nobody"):
        chat.prompt(tokenizer, TURNS[:1])
