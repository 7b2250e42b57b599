"""YAML of users: what can't be used is one line with its place, and nothing that they wrote is too large."""

from __future__ import annotations

import pytest

from stoker.contract.yaml_text import YamlError, parse_yaml


@pytest.mark.parametrize(
    ("text", "problem", "line"),
    [
        ("a: 1\nb: {c: 2,\n    c: 3}\n", "c appears twice (first in line 2)", 3),
        ("a: 1\na: 2\n", "a appears twice (first in line 1)", 2),
        ("- [1\n- 2\n", "", 3),
        ("a: &x [*x]\n", "an alias contains itself", 1),
        ("[" * 2000, "nested too deeply", 0),
        ("? {a: 1}\n: 2\n", "", 1),
        ("a: 2026-13-45\n", "month", 0),
        ("a: !!python/object/apply:os.system [ls]\n", "", 1),
    ],
)
def test_what_cant_be_used_is_one_line_with_its_place(text: str, problem: str, line: int) -> None:
    with pytest.raises(YamlError) as raised:
        parse_yaml(text)
    assert problem in raised.value.problem and "\n" not in raised.value.problem
    assert raised.value.line == line


def test_what_a_user_wrote_has_no_limits() -> None:
    assert parse_yaml("a: " + "1" * 200) == {"a": int("1" * 200)}
    assert parse_yaml("b: &b {x: 1}\nc: {<<: *b, y: 2}\nd: [*b, *b]\n")["c"] == {"x": 1, "y": 2}
    text = "".join(f"key{number}: {number}\n" for number in range(5000))
    assert len(parse_yaml(text)) == 5000
    assert parse_yaml("") is None
