"""docs/benchmarks.md: one table per claim, with its source; what the contents and the README claim is in that table."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NUMBER = re.compile(r"\d[\d.,]*\d|\d")
FIGURE = re.compile(rf"(?:{NUMBER.pattern})(?: of (?:{NUMBER.pattern})| min \d+ s)?")
COMMIT = re.compile(r"\b(?=[0-9a-f]*\d)[0-9a-f]{7,8}\b|commit not recorded")
CLAIM = re.compile(r"([^()|\n]*(?:\([^()\n]*\)[^()|\n]*)*)\(\[[^]]*\]\((?:docs/)?benchmarks\.md#([^)]+)\)\)")


def sections() -> dict[str, str]:
    """By their anchors."""
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    parts = re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", text, re.M | re.S)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-"): body for title, body in parts}


SECTIONS = sections()
HEADLINES = {
    anchor: figure
    for figure, anchor in re.findall(r"^\| .+? \| (.+?) \| \[.+?\]\(#(.+?)\) \|$", SECTIONS.pop("contents"), re.M)
}


def missing(figures: list[str], text: str) -> list[str]:
    """Figures that the text does not have as whole numbers."""
    return [one for one in figures if not re.search(rf"(?<![\d.,]){re.escape(one)}(?![.,]?\d)", text)]


def test_the_contents_have_every_section_once_and_in_order() -> None:
    assert list(HEADLINES) == list(SECTIONS)
    assert len(SECTIONS) >= 50


@pytest.mark.parametrize("anchor", SECTIONS)
def test_a_section_has_one_table_its_source_and_its_headline(anchor: str) -> None:
    section = SECTIONS[anchor]
    tables = re.findall(r"(?:^\|.*\n)+", section, re.M)
    assert len(tables) == 1
    (source,) = re.findall(r"^Measured: .*(?:\n.+)*", section, re.M)
    assert re.search(r"2026-\d\d-\d\d", source), "a date"
    assert re.search(r"\bcores?\b|H200|Xeon|box|hardware", source), "hardware"
    assert re.search(r"`.+?`|command not recorded|commands in the table", source), "a command"
    assert COMMIT.search(source) or ("in the table" in source and COMMIT.search(tables[0]))
    figures = FIGURE.findall(HEADLINES[anchor])
    assert figures and missing(figures, tables[0]) == []


@pytest.mark.parametrize(("page", "least"), [("README.md", 7), ("docs/launching.md", 1)])
def test_a_page_claims_the_figures_of_the_contents(page: str, least: int) -> None:
    claims = [(claim, anchor) for claim, anchor in CLAIM.findall((ROOT / page).read_text()) if NUMBER.search(claim)]
    assert len(claims) >= least
    for claim, anchor in claims:
        assert NUMBER.findall(claim) == NUMBER.findall(HEADLINES[anchor]), f"{claim.strip()!r} is not {anchor}'s"


def test_a_changed_figure_is_noticed() -> None:
    assert missing(["0.126", "79 of 79", "9 min 31 s"], "| 0.126 s | 79 of 79 | 9 min 31 s |") == []
    text = "| 0.1264 s | 179 of 79 | 9 min 32 s | 1,0.126 |"
    assert missing(["0.126", "79 of 79", "9 min 31 s"], text) == ["0.126", "79 of 79", "9 min 31 s"]
