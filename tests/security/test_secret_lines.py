"""Secrets whose name or beginning stands elsewhere: on another line of a log, in another string of a list, around a mapping."""

from __future__ import annotations

import base64
import json
import random
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from conftest import Stoker, at_length
from stoker.contract import redact
from stoker.contract.redact import HIDDEN

VALUE, WORD = "k3yOf9Somebody21", "correcthorse"
KIND = "PRIVATE " + "KEY"
BODY = textwrap.wrap(base64.b64encode(random.Random(7).randbytes(600)).decode(), 64)
KEY = [f"-----BEGIN {KIND}-----", *BODY, f"-----END {KIND}-----"]


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redact, "_known", [])


def _seen(shown: str) -> list[str]:
    return [line for line in BODY if any(line[at : at + 12] in shown for at in range(0, len(line) - 12, 4))]


BEFORE = {
    "a rank": "[Rank 0] ", "a long one": "2024-01-01T00:00:00.000000Z stdout F [pod/train-0/container] [rank3] INFO:__main__: ", "a difference": "-",
    "a tab": "7\t", "dots": "...", "a quote": '"',
}  # fmt: skip


@pytest.mark.parametrize("before", BEFORE.values(), ids=list(BEFORE))
@pytest.mark.parametrize("between", ["", "\n[r1] step 5 loss 1.25"], ids=["alone", "another rank between"])
def test_lines_of_a_key_that_is_cut(before: str, between: str) -> None:
    for lines in (KEY, KEY[:-1], KEY[1:], [KEY[0], "Proc-Type: 4,ENCRYPTED", "", *BODY]):
        text = "\n".join(before + line + between for line in lines)
        for written in (text, text.replace("\n", "\r\n"), json.dumps(text), repr(text)):
            shown = redact.whole(written)
            assert not _seen(shown) and redact.whole(shown) == shown
    assert (
        redact.whole(KEY[0] + "\nstep 100 at /data/Runs1/x is well") == HIDDEN + "\nstep 100 at /data/Runs1/x is well"
    )


def test_a_list_of_lines_and_of_words() -> None:
    for lines in (KEY, KEY[:-1], KEY[1:]):
        assert not _seen(json.dumps(redact.data({"evidence": lines})))
    for texts in (
        ["deploy", "--password", WORD, "-v"], ["curl", "-u", f"me:{WORD}"], ["password: |", f"  {WORD}"], ['{"name": "HF_TOKEN",', f' "value": "{WORD}"}}'],
        ["HF_TOKEN", VALUE], ["authorization", f"Bearer {WORD}"], ["HF_TOKEN=\\", VALUE],
    ):  # fmt: skip
        shown = json.dumps(redact.data({"said": texts, "deep": [{"said": tuple(texts)}]}))
        assert WORD not in shown and VALUE not in shown
    for readable in (
        ["token", "loss"],
        ["--token-file", "x"],
        ["Enter password:", "Traceback (most recent call last):"],
        ["key", "value", "-v"],
    ):
        assert redact.data(readable) == readable


def test_names_in_data() -> None:
    shown = redact.data({f"https://me:{WORD}@host/": 1, "hf_" + VALUE: [1], 5: "x", "train/loss": 0.5})
    assert WORD not in str(shown) and VALUE not in str(shown) and shown[5] == "x" and shown["train/loss"] == 0.5


MAPPINGS: list[dict[str, Any]] = [
    {"passwords": {"db": WORD}}, {"api_keys": {"first": VALUE, "second": WORD}}, {"hf_token": {"desc": None, "value": VALUE}},
    {"secrets": {"production": {"db": WORD, "pins": [VALUE]}}}, {"credentials": {"user": "me", "value": WORD}},
]  # fmt: skip
OPEN: list[dict[str, Any]] = [
    {"tokens": {"train": 5, "val": "x"}}, {"token": {"content": "<s>", "lstrip": False}}, {"credentials": {"user": "me", "region": "eu", "type": "file"}},
    {"secretKeyRef": {"name": "hub", "optional": True}}, {"cookies": {"max_age": 3600, "path": "/"}}, {"auth": {"mode": "oauth", "retries": 3}},
    {"sort_keys": {"a": "b"}}, {"passwords": {}}, {"secrets": {"enabled": True, "db": None, "where": "${DB}"}},
]  # fmt: skip


def _yaml(value: dict[str, Any], indent: str = "") -> str:
    rows = [
        f"{indent}{key}:\n{_yaml(item, indent + '  ')}"
        if isinstance(item, dict)
        else f"{indent}{key}: {json.dumps(item)}\n"
        for key, item in value.items()
    ]
    return "".join(rows)


def test_mappings_under_a_secret_name() -> None:
    for value in MAPPINGS:
        texts = (
            json.dumps(value),
            json.dumps(value, indent=1),
            repr(value),
            json.dumps(json.dumps(value)),
            _yaml(value),
            "\n".join(f"[Rank 0] {line}" for line in _yaml(value).split("\n")),
        )
        for shown in (str(redact.data(value)), *map(redact.whole, texts)):
            assert WORD not in shown and VALUE not in shown and HIDDEN in shown, shown
    for value in OPEN:
        assert redact.data(value) == value
        for text in (json.dumps(value), json.dumps(value, indent=1), repr(value), _yaml(value)):
            assert redact.whole(text) == text
    assert WORD not in redact.whole(f"passwords: {{db: {WORD}, user: me}}\n") and "user: me" in redact.whole(
        f"passwords: {{db: {WORD}, user: me}}\n"
    )


@pytest.mark.parametrize(
    "text",
    [
        "[Rank 0] password: |\n[Rank 0]   VALUE\n[Rank 0] b: 1", "[Rank 0] password:\n[Rank 0]   VALUE\n", '[r0] {\n[r0]   "password":\n[r0]     "VALUE"\n[r0] }',
        "1: api_keys:\n2:   - q\n3:   - VALUE\n", "password: first\n  VALUE\nb: 1", "password: !!binary |\n  VALUE\nb: 1", "password = <<EOF\nVALUE\nEOF\n",
        "[db]\npassword = two VALUE\nport = 1", "export HF_TOKEN=\\\n  VALUE", "curl \\\n  -u \\\n  me:VALUE \\\n  https://host", "{'password': 'first'\n             'VALUE'}",
        'api_key = "first" + "VALUE"', "get(url, auth=('me', 'VALUE'))", "password = ('first'\n   'VALUE')", "- value: VALUE\n  name: HF_TOKEN", '{"value": "VALUE", "name": "HF_TOKEN"}',
        '{"name": "HF_TOKEN", "type": "plain", "value": "VALUE"}', "- name: HF_TOKEN\n  # a comment\n  value: VALUE", "DRIVER=x;UID=me;PWD=VALUE;", "client-key-data: VALUE",
        "url: /services/T0000000/B0000000/VALUEVALUE (Caused by x)", "url: /api/webhooks/123456789/VALUEVALUE", "<password type='x'>VALUE</password>", "<a:password>VALUE</a:password>",
        "<password><![CDATA[VALUE]]></password>", "wandb login VALUEVALUE", "openssl rsa -passin pass:VALUE", "unzip -P VALUE a.zip", "az login -u a -p VALUE",
    ],
)  # fmt: skip
def test_a_value_apart_from_its_name(text: str) -> None:
    written = text.replace("VALUE", VALUE)
    for around in (written, f"first\n{written}\nlast line stays"):
        shown = redact.whole(around)
        assert VALUE not in shown and redact.whole(shown) == shown
        assert ("last line stays" in shown) == ("last line stays" in around)


def test_numbers_of_every_kind() -> None:
    for number in ("-12345678", "12345.678", "987654"):
        assert number not in redact.whole(f'{{"password": {number}}}')


@pytest.mark.parametrize(
    "text",
    [
        "[Rank 0] tokens:\n[Rank 0]   train: 5\n", "[Rank 0] step 1\n[Rank 0] key: loss\n", "secretKeyRef:\n  name: hub\n  key: hf-token\n", "PWD=/home/me/project; run",
        "password: ''\n  # nothing yet\nb: 1", "auth=(user, word)", "token: (optional) str", "name: max_tokens\nvalue: 512", "value: 512\nname: max_tokens", "wandb login --relogin", "zip -r a.zip x",
    ],
)  # fmt: skip
def test_what_only_looks_like_it(text: str) -> None:
    assert redact.whole(text) == text


def test_a_failed_import_shows_no_key(stoker: Stoker) -> None:
    """Its last lines are evidence: a key's, without its first."""
    (stoker.cwd / "settings_of_mine.py").write_text(f"raise ValueError('bad key:\\n' + {chr(10).join(KEY)!r})")
    done = stoker("ladder", "--json", stoker.script("train.py", "import settings_of_mine"))
    assert '"env.import"' in done.out and not _seen(done.out + done.err)
    assert not [path for path in Path(stoker.cwd, "runs").rglob("*.json") if _seen(path.read_text())]


HOSTILE = (
    "passwords: {", "passwords: {a: ", "secrets:\n  a: ", 'password: {"', "value: a name: ", "name: HF_TOKEN a: b ", "\n[r0] password: ", "password=<<EOF\n", "<password a", "password='a'\n'", "password: a\n  b",
    "\n" + "[a] " * 6, f"-----BEGIN {KIND}-----aA1aA1aA1aA1aA1aA1 ", f"aA1aA1aA1aA1aA1aA1 -----END {KIND}-----", "secrets:\n", "password=(\"", "password:“x \n#", "/services/T", "password=a\\\n",
)  # fmt: skip


@at_length
def test_hostile_lines_take_no_longer_than_they_are() -> None:
    size = 1 << 16
    for piece in HOSTILE:
        began = time.process_time()
        redact.whole(piece * (size // len(piece)))
        redact.data([piece] * (size // len(piece) // 4))
        assert time.process_time() - began < 4, piece
