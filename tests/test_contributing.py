"""CONTRIBUTING.md names what exists, and all packages."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "stoker"
TEXT = (ROOT / "CONTRIBUTING.md").read_text()


def test_every_file_and_function_exists() -> None:
    section = TEXT[TEXT.index("## Where a run passes") :]
    named = re.findall(r"`((?:\w+/)+\w+\.py)(?::(\w+))?`", section)
    assert len(named) > 20
    for file, name in named:
        path = ROOT / file if file.startswith("tests/") else SOURCE / file
        assert path.is_file(), f"{file} is not there"
        if name:
            tree = ast.parse(path.read_text())
            defined = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.ClassDef)}
            assert name in defined, f"{file} has no {name}"


def test_the_package_map_has_every_package_and_no_other() -> None:
    listed: set[Path] = set()
    for row in re.findall(r"^\| (`src/.*?) \|", TEXT, re.M):
        first, *others = re.findall(r"`(.+?)/`", row)
        listed |= {ROOT / first, *((ROOT / first).parent / other for other in others)}
    groups = {SOURCE / "control", SOURCE / "training"}  # hold packages, and no code of their own
    packages = {path.parent for path in SOURCE.rglob("__init__.py")} - {SOURCE} - groups
    top = {path for path in packages if path.parent in {SOURCE, *groups}}
    assert listed == top
