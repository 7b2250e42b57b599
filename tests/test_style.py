"""Rules of the house that no linter has."""

from __future__ import annotations

import ast
from pathlib import Path

import stoker

SOURCE = Path(stoker.__file__).parent


def test_no_conditional_expression_stands_in_another() -> None:
    nested = []
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.IfExp) and any(
                isinstance(part, ast.IfExp) for part in (node.test, node.body, node.orelse)
            ):
                nested.append(f"{path.relative_to(SOURCE)}:{node.lineno}")
    assert nested == []
