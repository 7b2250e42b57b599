"""JSON text is parsed with one kind of exception."""

from __future__ import annotations

import pytest

from stoker.contract.text import parse_json


def test_a_key_that_is_given_twice_is_refused_where_that_matters() -> None:
    text = '{"a": {"b": 1, "c": 2, "b": 3}}'
    assert parse_json(text) == {"a": {"b": 3, "c": 2}}
    with pytest.raises(ValueError, match="b appears twice"):
        parse_json(text, unique=True)


@pytest.mark.parametrize("text", ["", "{", b"\xff", "[" * 100_000, '{"a":' * 100_000, "\ufeff{}", "9" * 5000])
def test_whatever_is_wrong_is_a_value_error(text: str | bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_json(text)
