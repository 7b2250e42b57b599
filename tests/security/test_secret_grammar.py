"""Values that are hard to read, written as programs write them: none of their parts may be seen.

Every value begins with FIRST and ends in LAST; what is between them ends a careless reading.
"""

from __future__ import annotations

import html
import json
import shlex
from collections.abc import Callable, Iterator
from itertools import product
from urllib.parse import quote, quote_plus, urlencode

import pytest

from stoker.contract import redact
from stoker.contract.redact import HIDDEN

FIRST, LAST = "N0rthern", "S0uthern"
VALUES = [
    FIRST + between + LAST
    for between in ("", "-", " two, ", '"', " it's ", '\\', '\\" ', "(1)", "[x].", "; b=", "&c=", ": ", "#", " ='", "<&>", "%s")
]  # fmt: skip
ONE_WORD = [
    FIRST + between + LAST for between in ("", "-", "'", "(1)", "(", ")", ".", "..", "/", "@", "!", "$", "+", "~", "é", "((a)b)", "%s", "()=")
]  # fmt: skip


def _yaml_quoted(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"


Writer = Callable[[str], str]
# What writes any value.
QUOTED: dict[str, Writer] = {
    "json": lambda value: json.dumps({"a": 1, "password": value, "b": "x"}),
    "json, a line each": lambda value: json.dumps({"api_key": value, "b": "x"}, indent=1),
    "json, its value below": lambda value: '{"password":\n   ' + json.dumps(value) + "}",
    "json in json": lambda value: json.dumps({"body": json.dumps({"client_secret": value, "b": 1})}),
    "json in json in json": lambda value: json.dumps([json.dumps({"body": json.dumps({"token": value})})]),
    "json, a list": lambda value: json.dumps({"api_keys": ["q", 'a"b', value, "[", value], "b": 1}),
    "json, a list, a line each": lambda value: json.dumps({"passwords": [value, value]}, indent=2),
    "json, named": lambda value: json.dumps([{"name": "HF_TOKEN", "value": value}]),
    "json, named, a line each": lambda value: json.dumps({"Key": "DB_PASSWORD", "Value": value}, indent=2),
    "json in html": lambda value: f"<pre>{html.escape(json.dumps({'password': value}))}</pre>",
    "json in html in json": lambda value: json.dumps({"page": html.escape(json.dumps({"password": value}))}),
    "json in html, twice": lambda value: html.escape(html.escape(json.dumps({"password": value}))),
    "json in a url": lambda value: "https://host/?q=" + quote(json.dumps({"password": value}), safe=""),
    "json in a form": lambda value: "q=" + quote_plus(json.dumps({"password": value})),
    "json in a shell": lambda value: f"curl -d {shlex.quote(json.dumps({'password': value}))} https://host",
    "a form": lambda value: "a=b&" + urlencode({"password": value}) + "&b=c",
    "a dict's repr": lambda value: repr({"a": 1, "password": value, "b": "x"}),
    "a repr's repr": lambda value: repr(repr({"password": value})),
    "a bytes' repr": lambda value: repr({"password": value.encode()}),
    "an argument's repr": lambda value: f"login(user='me', password={value!r}, host='x')",
    "a list's repr": lambda value: f"Client(api_keys={['q', value]!r})",
    "a tuple's repr": lambda value: repr([("user", "me"), ("password", value)]),
    "an exception's repr": lambda value: repr(RuntimeError(f"bad settings: {({'secret_key': value})!r}")),
    "three quotes": lambda value: f"password = '''{value}\n{value} '''",
    "a shell's word": lambda value: f"export DB_PASSWORD={shlex.quote(value)} b=1",
    "a shell's word in a shell's word": lambda value: "sh -c " + shlex.quote(f"PASSWORD={shlex.quote(value)} run"),
    "a flag's word": lambda value: f"deploy --password={shlex.quote(value)} --fast",
    "a flag and a word": lambda value: f"deploy --password {json.dumps(value)} --fast",
    "curl": lambda value: f"curl -u {json.dumps('me:' + value)} https://host",
    "toml": lambda value: f"[db]\npassword = {json.dumps(value)}\nport = 1",
    "toml, a list": lambda value: f"api_keys = [\n  'q',\n  {json.dumps(value)},\n]\nb = 1",
    "yaml, double": lambda value: f"a: 1\npassword: {json.dumps(value)}\nb: 2",
    "yaml, single": lambda value: f"a: 1\npassword: {_yaml_quoted(value)}\nb: 2",
    "yaml, below": lambda value: f"db:\n  password:\n    {_yaml_quoted(value)}\nb: 2",
    "yaml, a block": lambda value: f"password: |\n  {value}\n\n  {value}\nb: 2",
    "yaml, folded": lambda value: f"- password: >-  # kept\n\n    {value}\n\n    {value}\n  b: 2",
    "yaml, a list": lambda value: f"api_keys:\n  - q\n\n  - {_yaml_quoted(value)}\n  - |\n    {value}\nb: 2",
    "yaml, a flow": lambda value: f"api_keys: [q, {_yaml_quoted(value)}, {json.dumps(value)}]\nb: 2",
    "yaml, named": lambda value: f"- name: HF_TOKEN\n  value: {_yaml_quoted(value)}\n- name: b",
    "yaml, named, a block": lambda value: f"- name: HF_TOKEN\n  value: |\n    {value}\n\n    {value}\n- name: b",
    "xml": lambda value: f"<password>{html.escape(value)}</password>",
    "xml, an attribute": lambda value: f'<add key="ApiKey" value="{html.escape(value)}"/>',
    "xml, its own attribute": lambda value: f'<db user="me" password="{html.escape(value)}" port="1"/>',
    "a cookie": lambda value: f'Cookie: a="x"; sid={json.dumps(value)}; b=1',
    "a header of json": lambda value: json.dumps({"headers": {"Cookie": f'a="x"; sid={json.dumps(value)}'}}),
    "a digest": lambda value: f'Authorization: Digest username="me", response={json.dumps(value)}, b="x"',
    "settings in a variable": lambda value: f"CONNECTION_STRING=Server=x;Password={json.dumps(value)};Port=1",
}  # fmt: skip
# What writes words without quotes.
BARE: dict[str, Writer] = {
    "ini": "[db]\npassword = {}\nport = 1".format,
    "a variable": "DB_PASSWORD={} run".format,
    "an argument": "login(password={}, b=1)".format,
    "a flag": "deploy --password {} --fast".format,
    "yaml": "a: 1\npassword: {}\nb: 2".format,
    "yaml, a quoted name": '"password":\n  {}\n'.format,
    "yaml, a list": 'password: ["q", {}]'.format,
    "a header": "Authorization: Bearer {}".format,
    "a cookie": "Set-Cookie: a=\"x\"; sid={}; Path=/".format,
    "a cookie of a shell": "curl -H 'Cookie: a=\"x\"; sid={}' https://host".format,
    "a url": "https://host/?a=b&api_key={}&c=d".format,
    "a sentence": "it said password={}, then it ended".format,
}  # fmt: skip
AROUND: dict[str, Writer] = {
    "alone": str,
    "in a log": lambda text: f"first\n{text}\nlast line stays",
    "as a string": repr,
    "in json": lambda text: json.dumps({"log": text, "b": 1}),
    "in html": lambda text: f"<p>{html.escape(text)}</p>",
    "in a url": lambda text: f"https://host/?q={quote(text)}",
}


def written() -> Iterator[tuple[str, str, str]]:
    for writers, values in ((QUOTED, VALUES), (BARE, ONE_WORD)):
        for (shape, writer), value, (place, around) in product(writers.items(), values, AROUND.items()):
            yield f"{shape}, {place}", value, around(writer(value))


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redact, "_known", [])


def test_no_part_of_a_value_is_seen() -> None:
    leaks = []
    for shape, value, text in written():
        shown = redact.whole(text)
        if FIRST in shown or LAST in shown or HIDDEN not in shown or redact.whole(shown) != shown:
            leaks.append(f"{shape}: {value}: {text!r} -> {shown!r}")
        elif "last line stays" in text and "last line stays" not in shown:
            leaks.append(f"too much of {shape}: {text!r} -> {shown!r}")
    assert not leaks, f"{len(leaks)} of {len(list(written()))}:\n" + "\n".join(leaks[:40])


@pytest.mark.parametrize(
    "text",
    [
        'password="two words, VALUE"', "redis(password='a, b VALUE')", 'name=HF_TOKEN value="two words, VALUE"', '("password", "two words, VALUE")',
        'curl -u "me:two words, VALUE" https://host', "password=$'two words, VALUE'", "password=“two words, VALUE”", 'password="two\nwords, VALUE"',
        '"password": ["a\\"b", "VALUE"]', 'api_keys=["q", VALUE]', 'password: ["q", VALUE]', "password: |\n  one\n\n  VALUE\nx: 1", "password: >\n\n  VALUE\nx: 1",
        '"password":\n  VALUE\n', '{"password":\n  VALUE}', 'Cookie: a="x"; sid=VALUE', '"Cookie": "a=\\"x\\"; sid=VALUE"', "password=ab(1)VALUE", "password=ab(1VALUE",
        "password=ab(1).VALUE", "password: ab[1]VALUE", "&quot;password&quot;: &quot;VALUE&quot;", "&#34;password&#34;:&#34;two VALUE&#34;", "password=it's-VALUE",
        "CONNECTION_STRING=Server=x;Password=\"a VALUE\";Port=1", "deploy --password -VALUE", 'Authorization: Bearer "VALUE"', "password=two\\ words\\ VALUE",
    ],
)  # fmt: skip
def test_what_the_eighteenth_review_found(text: str) -> None:
    shown = redact.whole(text.replace("VALUE", "k3yOf9Somebody21"))
    assert "k3yOf9Somebody21" not in shown and redact.whole(shown) == shown


def test_a_name_beside_a_value_in_data_and_in_arguments() -> None:
    data = {"env": [{"name": "HF_TOKEN", "value": "abc"}, {"Key": "DB_PASSWORD", "Value": ["x y"]}]}
    assert redact.data(data) == {
        "env": [{"name": "HF_TOKEN", "value": HIDDEN}, {"Key": "DB_PASSWORD", "Value": [HIDDEN]}]
    }
    readable = [{"name": "max_tokens", "value": 512}, {"name": "HF_TOKEN", "value": None}, {"name": "HF_TOKEN"}]
    assert redact.data(readable) == readable
    assert redact.arguments(["--password", "-Zx7f00Lk9Qw", "-v"]) == ["--password", HIDDEN, "-v"]
    for words in (["--use-auth-token", "--fp16-full-eval"], ["--token", "-v"], ["--password", "--max-length=5"]):
        assert redact.arguments(words) == words
    assert "words" not in redact.command("run pass='two words' now")


@pytest.mark.parametrize(
    "text",
    [
        "sorted(rows, key=itemgetter(1))", "secret = os.urandom(16).hex()", "token = secrets.token_hex(16)", "token = tokens[0]", "key: init(x)[0],", "token: list[int]", "passwords = []",
        "f'{self.url}?token={self.token}'", ":param cookies: (optional) Dict", "return {key: [row for row in rows if key in row] for key in names}", "a &lt; b &amp;&amp; c",
        "('Authorization', 'Basic ' + auth)", "the 'token': see below\n  for more", "sort_keys: [loss, step]", 'if password == "":',
    ],
)  # fmt: skip
def test_source_code_stays_readable(text: str) -> None:
    assert redact.whole(text) == text
