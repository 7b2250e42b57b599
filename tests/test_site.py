"""The pages of docs/ as a site: every link leads somewhere, every page is in the navigation, what is generated is current."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stoker.cli import docs
from stoker.training.config.schema import SECTIONS

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
SITE = tomllib.loads((ROOT / "zensical.toml").read_text())


def without_code(text: str) -> str:
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))


def anchors(page: Path) -> set[str]:
    """As GitHub and the site make them of headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    titles = re.findall(r"^#+ (.+?)\s*$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", re.sub(r"\[(.*?)\]\(.*?\)", r"\1", title).lower()).replace(" ", "-") for title in titles}  # fmt: skip


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    dead = []
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            dead.append(link)
    assert dead == []


def pages_of(nav: list[Any]) -> Iterator[str]:
    for entry in nav:
        for value in entry.values():
            yield from [value] if isinstance(value, str) else pages_of(value)


def test_every_page_is_in_the_navigation_once() -> None:
    assert sorted(pages_of(SITE["project"]["nav"])) == sorted(path.name for path in (ROOT / "docs").glob("*.md"))


def test_the_command_line_reference_is_current() -> None:
    made = "\n".join(docs.render_reference()).rstrip("\n") + "\n"
    assert (ROOT / "docs" / "cli.md").read_text() == made, "python -m stoker.cli.docs > docs/cli.md"


def test_the_settings_page_has_every_section() -> None:
    listed = re.findall(r"^\| (`.+?`) ?(?:\(.*?\) )?\|", (ROOT / "docs" / "settings.md").read_text(), re.M)
    named = {name for row in listed for name in re.findall(r"`(\w+)`", row)}
    assert named == {*SECTIONS, "run"}


def test_the_glossary_is_short() -> None:
    rows = re.findall(r"^\| (?!word |---)(.+?) \|", (ROOT / "docs" / "glossary.md").read_text(), re.M)
    assert 10 <= len(rows) <= 15 and rows == sorted(rows)


def test_the_site_builds_strictly(tmp_path: Path) -> None:
    pytest.importorskip("zensical", reason="no zensical here: bash setup.sh --test installs it")
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copy(ROOT / "zensical.toml", tmp_path)
    command = [sys.executable, "-m", "zensical", "build", "--strict"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for page in (tmp_path / "docs").glob("*.md"):
        assert (tmp_path / "site" / page.stem.replace("index", ".") / "index.html").exists(), page


def test_words_are_spelled_right() -> None:
    pytest.importorskip("codespell_lib", reason="no codespell here: bash setup.sh --test installs it")
    command = [
        sys.executable,
        "-m",
        "codespell_lib",
        "docs",
        "src",
        "benchmarks",
        "deploy",
        *map(str, ROOT.glob("*.md")),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
