"""What the nineteenth review found: secrets below their names, a server's impossible numbers, frames behind the report of a NaN."""

from __future__ import annotations

import json

import pytest

from stoker.contract import redact

SECRET = "Qw7xR2pLm9" + "Kd4TzVb8Ns"
ABOVE = ("Password:\n", "Enter password:\n", "token =\n", "HF_TOKEN=\n", "api_key:\r\n", "client_secret: \n")


def printed_by_a_rank(text: str) -> str:
    return "\n".join(f"[rank0]: {line}" for line in text.split("\n"))


@pytest.mark.parametrize("above", ABOVE)
@pytest.mark.parametrize("value", [SECRET, f"'{SECRET}'", f"{SECRET[:9]}/+{SECRET[9:]}=="])
def test_a_value_below_its_name_is_hidden(above: str, value: str) -> None:
    """It was where it was indented."""
    text = f"{above}{value}\nnext\n"
    for written in (text, text.rstrip(), repr(text), json.dumps(text), repr(repr(text)), printed_by_a_rank(text)):
        shown = redact.whole(written)
        assert SECRET[-9:] not in shown and redact.HIDDEN in shown, shown


@pytest.mark.parametrize(
    "text",
    [
        "password:\nTraceback (most recent call last):\n", "token:\nstep-00000500\n", "missing token:\n/usr/lib/python3.11/site.py\n",
        "password:\nusername: me\n", "token =\nint(x)\n", "api_key:\nrequired\n", "next token:\ntoken_id_12345\n", "password=\nHOME=/root\n",
        "token=\nmodel.layers.0.mlp\n", "the token:\nlayers.0.attention.qkv.weight\n", "HF_TOKEN:\nRANK0=12345678\n", "tokens:\n1234567890123\n",
        "token:\nsrc/a1/b2/c3/d4e5f6\n", "sort_keys:\nabc123def456ghi789jk\n", "password:\nNone\n",
    ],
)  # fmt: skip
def test_a_line_below_a_name_that_is_no_value_stays(text: str) -> None:
    assert redact.whole(text) == text
