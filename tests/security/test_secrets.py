"""What is a secret and what only looks like one; and that looking costs no more than the text is long."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from urllib.parse import quote

import pytest

from conftest import EVERYTHING
from security.shapes import HARMLESS, NAMES, SENTENCES, body_of, shapes
from stoker.contract import redact, secretnames
from stoker.contract.redact import HIDDEN

BODY, SHAPES = body_of("here"), shapes("here")
LONG = SHAPES["github"][1]
AROUND = {
    "alone": "{}", "within a sentence": "ValueError: it said {} and ended", "in quotes": "run 'sh -c \"{}\"' failed",
    "behind escapes": "a\\n{}\\n", "behind a double escape": "a\\\\t{}\\\\n", "in escaped quotes": "\\u0022{}\\u0022", "behind %3D": "q%3D{}%26b",
    "behind %2520": "a%2520{}", "in colour": "\x1b[1;31m{}\x1b[0m", "in escaped colour": "\\x1b[31m{}\\x1b[0m", "in colour without ESC": "[31m{}[0m",
    "in a line of several": "first line\n{}\nlast line", "in brackets": "[1] ({})", "as a list's repr": "['a', '{}', 'b']",
}  # fmt: skip


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redact, "_known", [])


@pytest.mark.parametrize("place", AROUND)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_is_hidden_in_a_text(shape: str, place: str) -> None:
    text, secret = SHAPES[shape]
    shown = redact.whole(AROUND[place].format(text))
    assert secret not in shown and HIDDEN in shown
    assert redact.whole(shown) == shown, "a record that is read and written again must not change"


@pytest.mark.parametrize("name", NAMES)
def test_names_are_read_behind_escapes(name: str) -> None:
    for place in AROUND.values():
        for equals in ("=", ": ", "%3D", "%253D", "\\u003d", "\x1b[0m=\x1b[35m"):
            assert "hunter2" not in redact.whole(place.format(f"{name}{equals}hunter2xyz")), (place, equals)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_is_hidden_in_what_is_escaped_as_a_whole(shape: str) -> None:
    text, secret = SHAPES[shape]
    for escaped in (repr(f"x\n{text}\n"), json.dumps(f"x\n{text}"), json.dumps(json.dumps(text)), quote(text, safe="")):
        assert secret not in redact.whole(escaped), escaped


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_is_hidden_as_a_value(shape: str) -> None:
    text, secret = SHAPES[shape]
    shown = [
        *redact.environment({"SETTINGS": text}).values(),
        *redact.arguments(["train.py", text]),
        *redact.arguments(["train.py", f"--setting={text}"]),
        *redact.arguments(["train.py", "--setting", text]),
        str(redact.data({"setting": [{"deep": text}]})),
        redact.command(f"python train.py {text}"),
        *redact.arguments([f"--env=SETTINGS={text}"]),
        *(redact.arguments(text.split()) if "\n" not in text else ()),
    ]
    assert not [line for line in shown if secret in line]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", ["hunter2", "12345678", BODY, "two words", "/not/a/path", "-starts-with-a-dash"])
def test_any_value_is_hidden_under_a_secret_name(name: str, value: str) -> None:
    assert redact.environment({name: value}) == {name: HIDDEN}
    flag = f"--{name.lower()}"
    for line, shown in (
        ([f"{name}={value}"], [f"{name}={HIDDEN}"]),
        ([f"--env={name}={value}"], [f"--env={name}={HIDDEN}"]),
        ([f"{flag}={value}"], [f"{flag}={HIDDEN}"]),
        (["--env", f"{name}={value}"], ["--env", f"{name}={HIDDEN}"]),
    ):
        assert redact.arguments(line) == shown
    if not value.startswith("-"):
        assert redact.arguments([flag, value]) == [flag, HIDDEN]
    assert redact.data({name: value, "other": {name: [value]}}) == {name: HIDDEN, "other": {name: [HIDDEN]}}
    assert value not in redact.whole(f'{{"{name}": "{value}"}}')


def test_numbers_and_switches_under_secret_names() -> None:
    assert redact.data({"password": 47110815, "token": 123, "pin": 9081}) == dict.fromkeys(
        ("password", "token", "pin"), HIDDEN
    )
    readable = {
        "use_auth_token": True,
        "token": None,
        "password": "",
        "secret": "false",
        "pad_token_id": 50256,
        "key": 5,
        "max_tokens": 512,
    }
    assert redact.data(readable) == readable


@pytest.mark.parametrize("text", HARMLESS)
def test_look_alikes_stay_readable(text: str) -> None:
    assert redact.whole(text) == text and redact.whole(f"first\n{text}\nlast") == f"first\n{text}\nlast"
    assert redact.arguments(text.split()) == text.split() and redact.command(text) == text
    name, equals, value = text.partition("=")
    if equals and name.isidentifier():
        assert redact.environment({name: value}) == {name: value} and redact.data({name: value}) == {name: value}


@pytest.mark.parametrize("text", SENTENCES)
def test_sentences_and_source_code_stay_readable(text: str) -> None:
    assert redact.whole(text) == text and redact.whole(f"first\n    {text}\nlast") == f"first\n    {text}\nlast"


def test_every_verdict_and_every_page_stays_readable() -> None:
    """What Stoker itself says has no secret in it."""
    from pathlib import Path

    for page in ("verdicts.md", "doctor.md", "cluster.md"):
        text = (Path(__file__).parents[2] / "docs" / page).read_text()
        assert redact.whole(text) == text, page


def test_our_own_names_are_not_taken_for_secrets() -> None:
    from stoker.contract.shape import options_of
    from stoker.control.launch.options import RunOptions
    from stoker.training.config.keys import KEYS

    for name in (*KEYS, *options_of(RunOptions)):
        assert (
            secretnames.rate(name) == secretnames.NO and secretnames.rate(name.replace("_", "-")) == secretnames.NO
        ), name


@pytest.mark.parametrize("name, words", [
    ("AWSAccessKeyId2", "aws access key id 2"), ("api_key", "api key"), ("--max-tokens", "max tokens"), ("optim.learningRate", "optim learning rate"),
    ("HFToken", "hf token"), ("_authToken", "auth token"), ("", ""), ("___", ""), ("X", "x"),
])  # fmt: skip
def test_words_of_a_name(name: str, words: str) -> None:
    assert secretnames.words_of(name) == words.split()


def test_what_a_process_was_given_is_hidden_wherever_it_turns_up() -> None:
    odd, quoted, many = "swordfish-of-no-shape", 'with "quotes" & spaces/и', f"first {BODY}\nsecond {LONG}"
    redact.learn(
        {
            "MY_PASSWORD": odd,
            "DB_PASS": quoted,
            "CA_SECRET": many,
            "COUNT_TOKEN": "1234567",
            "TOKEN": "true",
            "SHELL": "/bin/sh-and-more",
        },
        ["train.py", "--notify", f"curl -u me:{BODY}x https://x", "--api-key", "argumentsvalue"],
    )
    text = f"{odd} {quoted!r} {quoted} second {LONG} and {BODY}x and argumentsvalue, 1234567 true /bin/sh-and-more with%20%22quotes%22%20%26%20spaces%2F%D0%B8"
    shown = redact.whole(text)
    for secret in (odd, quoted, LONG, f"{BODY}x", "argumentsvalue", "%22quotes%22"):
        assert secret not in shown, shown
    assert "1234567 true /bin/sh-and-more" in shown  # short, a switch, and not a secret's name


def test_a_path_to_a_secret_is_none() -> None:
    redact.learn({"API_TOKEN": sys.executable})
    assert redact.whole(f"no file {sys.executable}") == f"no file {sys.executable}"


def test_a_text_is_cut_after_its_secrets_are_out() -> None:
    shown = redact.text("x " * 4090 + "ghp_" + LONG * 3)
    assert LONG not in shown and "ghp_" not in shown
    assert len(redact.text("x" * 20_000)) < 9_000 < len(redact.whole("x" * 20_000))


def test_deep_data_ends() -> None:
    deep: object = "hf_" + "a" * 20
    for _ in range(200):
        deep = {"a": [deep]}
    assert "hf_" not in str(redact.data(deep))


HOSTILE = (
    "://", "://a/", "://a:b", "://a@", "://hooks.slack.com/services/", "eyJ", "eyJ.", "eyJa.b", "hf_", "sk-", "sk-a-", "password=", "password=true ",
    f"password={HIDDEN}", 'password="', "password='\\'", 'password=\\"', "key=", "key=a,", "token: ", "a", "a.", "-", "_", "=", ":", '"', "\\", '\\"', "'", "`",
    " ", "\n", "@", "\\n", "\\u00", "%", "%25", "%253D", "%5C", "\x1b[", "[1;", "[0m", "%26api_key%3D", "a:b@", "Bearer ", "Basic YTpi", "authorization: ", "Cookie: true ", "<a>", "<password>", "</", "-----BEGIN " + "PRIVATE KEY-----",
    "-----BEGIN " + "PRIVATE KEY-----\n", "-----END " + "PRIVATE KEY-----", "curl -u ", "login x password ", "docker login -p x ", "--password ", "123456:", "M-",
    "M" * 25 + ".", "secret.x:1/", "a.b:1,", "aB", "AbC=", "$A=", "password=$A", "\npassword: a b", "password=,a", "password=),;&", "é", "\ud800", "AKIA", "?sig=1&",
    "ntfy://", "ntfy://a/", '"api_keys": ["a",', "password: |\n x\n", '("token", "', "name: a value: ", "Authorization: Digest a=", "\n[r] " + "A" * 20, "%22+",
    'password="a\\', "password='\"'\"'", "password=\"\"\"\n", "password='x''", 'api_keys: ["a\\"', "api_keys: [a(", "password: |\n\n", '"password":\n ', "password=a(b)", 'Cookie: a="x"; ',
    "&quot;password&quot;:", "%2526password%253D",
)  # fmt: skip
SIZE = 1 << (20 if EVERYTHING else 16)
ENOUGH_S = 20 * SIZE / (1 << 20)


def _hostile() -> Iterator[str]:
    for piece in HOSTILE:
        yield piece * (SIZE // len(piece))
    for head in (
        "password=",
        'password="',
        "Authorization: ",
        "://",
        "eyJ",
        "-----BEGIN " + "PRIVATE KEY-----\n",
        "<password>",
        "curl -u a:",
        '"api_keys": [',
        "password: |\n",
    ):
        for piece in ("a", " ", "\n", "=", '"', "\\", "/", "A1", "@"):
            yield head + piece * (SIZE // 16 // len(piece))


def test_hostile_text_takes_no_longer_than_it_is() -> None:
    """Of processor time, not of the clock. What is quadratic takes minutes here, and hours with --all."""
    for text in _hostile():
        began = time.process_time()
        redact.whole(text)
        assert time.process_time() - began < ENOUGH_S, text[:40]


def test_a_long_command_line_is_read_once() -> None:
    for piece in ("curl -u ", " ", "--password ", "docker login -p x "):
        began = time.process_time()
        redact.command(piece * (SIZE // 16 // len(piece)))
        assert time.process_time() - began < ENOUGH_S, piece


_PEM = "-----BEGIN " + "PRIVATE KEY-----"
_LINES = [_PEM, *[LONG + LONG] * 3]
SPREAD = {
    "json, a line each": '{\n "password":\n  "%s"\n}', "json, padded": '{"password"        :        "%s"}', "ini, padded": "password          =          %s",
    "json, a list": '{"api_keys": ["first-of-them", "%s"]}', "python, a list": "client(api_keys=['%s', 'another-one'])", "yaml, a block": "password: |\n  %s\n",
    "yaml, folded": "  db_password: >-\n    two\n    %s\n", "yaml, a list": "api_keys:\n  - one\n  - %s\n", "kubernetes": "- name: HF_TOKEN\n  value: %s",
    "kubernetes, json": '{"name": "HF_TOKEN", "value": "%s"}', "a pair": "('password', '%s')", "xml": '<add key="ApiKey" value="%s"/>',
    "digest": 'Authorization: Digest username="me", realm="x", response="%s"', "curl -su": "curl -su me:%s https://example.org",
    "curl --user=": "curl --user=me:%s https://example.org", "a command in an exception": "RuntimeError(\"curl -u 'me:%s' https://x\")",
    "netrc": "machine x password %s login me", "a url with #": "postgres://me:p#%s@db/x", "a url with ?": "postgres://me:p?%s@db/x",
    "a form": "q=%%7B%%22token%%22%%3A+%%22%s%%22%%7D", "runpod": "rpa_%s", "kaggle": "KGAT_%s", "pinecone": "pcsk_%s",
}  # fmt: skip
KEYS = {
    "cut": "\n".join(f"[rank0] {line}" for line in _LINES), "quoted": "\n".join(f"> {line}" for line in _LINES),
    "with times": "\r\n".join(f"2026-01-01 00:00:00 {line}" for line in _LINES), "its end": "\n".join(f"[rank0] {line}" for line in [*_LINES[1:], _PEM.replace("BEGIN", "END")]),
    "in an exception": repr(RuntimeError("\n".join(f"> {line}" for line in _LINES))),
}  # fmt: skip


@pytest.mark.parametrize("shape", SPREAD)
def test_a_value_apart_from_its_name_is_hidden(shape: str) -> None:
    shown = redact.whole(SPREAD[shape] % LONG)
    assert LONG not in shown and HIDDEN in shown
    assert redact.whole(shown) == shown
    assert LONG not in redact.whole(repr(SPREAD[shape] % LONG))


def test_json_within_json_within_json_is_read() -> None:
    text = json.dumps({"password": BODY})
    for _ in range(5):
        assert BODY not in redact.whole(text)
        text = json.dumps({"body": text})


@pytest.mark.parametrize("key", KEYS)
def test_a_private_key_with_something_before_each_line_is_hidden(key: str) -> None:
    shown = redact.whole(f"{KEYS[key]}\nthe next line stays")
    assert LONG not in shown and "the next line stays" in shown


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "max_tokens", "value": "512"}', "('token', 'tokens')", '["api_key", "password", "username"]', '{"tokens": ["a", "b2345678"]}',
        'special_tokens = ["<s>", "</s>", "<|im_end|>"]', "stop_tokens:\n  - <|im_end|>\n", "text_key        =        content", '"sort_keys": [1, 2]',
        "name: pad_token, value: <pad>", "name=lr value=3e-4", "https://host:8080?x=a@b", "https://host:8080#a@b", "tokens:\n  - a\n", "keys: |\n  a\n",
        '{"name": "tokenizer", "value": "models/gpt2-x1"}', "curl -sS https://example.org/a:b", "rpa_test", "glc_context", "ntn_layers=12", "('text_key', 'content12')",
    ],
)  # fmt: skip
def test_what_only_stands_apart_stays(text: str) -> None:
    assert redact.whole(text) == text


def test_importing_it_compiles_no_pattern() -> None:
    """Every launch and every agent imports it."""
    code = (
        "import re\nreal = re._compiler.compile if hasattr(re, '_compiler') else None\ncount = []\n"
        "old = re.compile\nre.compile = lambda *a, **k: (count.append(a), old(*a, **k))[1]\nimport stoker.contract.redact\nprint(len(count))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "0\n"
