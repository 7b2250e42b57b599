"""Retired phrases stay out of what people read."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "stoker"
MADE = {"verdicts.md", "doctor.md", "cli.md"}  # from the texts of the code
EVERYWHERE, PAGES_ONLY = (
    [line for line in part.splitlines() if line and not line.startswith("#")]
    for part in (ROOT / "tests/retired_phrases.txt").read_text().split("[pages]\n")
)


def pattern(phrases: list[str]) -> re.Pattern[str]:
    """Phrases over line breaks, too."""
    choices = (r"\s+".join(map(re.escape, phrase.split())) for phrase in phrases)
    return re.compile(rf"(?<!\w)(?:{'|'.join(choices)})(?!\w)", re.I)


def pages() -> Iterator[tuple[str, str]]:
    for path in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "setup.sh", ROOT / "speedrun.sh"):
        if path.name not in MADE | {"writing.md"}:  # writing.md shows them
            yield str(path.relative_to(ROOT)), path.read_text()


def texts() -> Iterator[tuple[str, str]]:
    """Of the code, but for docstrings: those are not shown."""
    for path in SOURCE.rglob("*.py"):
        tree = ast.parse(path.read_text())
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        docstrings = {id(n.body[0].value) for n in ast.walk(tree) if isinstance(n, documented) and ast.get_docstring(n)}  # type: ignore[attr-defined]
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                yield f"{path.relative_to(ROOT)}:{node.lineno}", node.value


def found(where: Iterator[tuple[str, str]], phrases: list[str]) -> list[str]:
    retired = pattern(phrases)
    return [f"{place}: {match[0]!r}" for place, text in where for match in retired.finditer(text)]


def test_the_list_is_in_order_and_long_enough() -> None:
    for phrases in (EVERYWHERE, PAGES_ONLY):
        assert phrases == sorted(set(phrases), key=str.lower)
    assert len(EVERYWHERE) + len(PAGES_ONLY) >= 180
    assert pattern(["goes on with"]).search("it goes\n  on with X") and not pattern(["anew"]).search("renew")


def test_no_page_has_a_retired_phrase() -> None:
    assert found(pages(), EVERYWHERE + PAGES_ONLY) == []


def test_no_message_has_a_retired_phrase() -> None:
    assert found(texts(), EVERYWHERE) == []
