"""What the sixteenth review found: folders and files of other programs, bent checkpoints, secrets in other clothes."""

from __future__ import annotations

import html
import json
import shlex
import time
import urllib.parse
from pathlib import Path

import pytest

from conftest import at_length
from stoker.cli import rollouts
from stoker.contract import redact
from stoker.contract.names import Refusal
from stoker.training.rl.config import names_code


@at_length
def test_a_flood_of_empty_lines_among_rollouts_costs_little(tmp_path: Path) -> None:
    (tmp_path / "rollouts.jsonl").write_bytes(b"\n" * (9 << 20))
    begun = time.process_time()
    with pytest.raises(Refusal, match="has no answers"):
        rollouts.main([str(tmp_path)])
    assert time.process_time() - begun < 30, "it took a minute"


@pytest.mark.parametrize(
    "text",
    [
        "password:\n    VALUE",
        "a: 1\npassword:\n  VALUE\nb: 2",
        "api_keys: [x8Jq2, VALUE]",
        "- name: HF_TOKEN\n  value: |\n    VALUE",
    ],
)
def test_values_that_yaml_puts_elsewhere(text: str) -> None:
    assert "k3yOf9Somebody21" not in redact.whole(text.replace("VALUE", "k3yOf9Somebody21"))


@pytest.mark.parametrize(
    "text",
    [
        "password:\n    min_length: 8",
        "tokens: [eos, bos]",
        "token:\n\nnext paragraph",
        "keys: [loss, step]",
    ],
)
def test_look_alikes_stay(text: str) -> None:
    assert redact.whole(text) == text


def test_a_known_secret_in_other_clothes() -> None:
    secret = "wJalr/XUtn&FEM'I <K7>MDENG== pässwört"
    redact.learn({"SVC_PASSWORD": secret})
    worn = [
        urllib.parse.quote(secret), urllib.parse.quote(secret, safe=""), urllib.parse.quote_plus(secret),
        json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1], html.escape(secret), repr(secret),
        ascii(secret), repr(secret.encode()), shlex.quote(secret), html.escape(secret).replace("&#x27;", "&#39;"),
    ]  # fmt: skip
    for text in worn:
        assert "MDENG" not in redact.whole(f"failed with {text} there"), text


def test_learning_a_secret_again_adds_nothing() -> None:
    """An agent learns at each attempt: forms of forms grew tenfold each time, 225 MB at the ninth."""
    secret = {"SVC_PASSWORD": "wJalr\\XUtn&FEM'I%<K7>MDENG \"=="}
    redact.learn(secret)
    once = list(redact._known or ())
    for _ in range(3):
        redact.learn(secret)
    assert redact._known == once


@pytest.mark.parametrize("reward", ["rewards.py:score", "a=b.py:score=1", "lang=en/r.py:score=1", "r.py:score=0.5"])
def test_a_config_file_names_no_code(reward: str) -> None:
    """However a weight is cut off it."""
    assert names_code([reward]) and names_code((reward,)) and names_code(reward)
    assert not names_code(["exact", "regex:a.py=1", "length=0.1"])
