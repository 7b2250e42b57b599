"""`stoker docs`, and messages that name its topics and no file."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from conftest import Stoker

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "stoker"
PAGES = {path.stem: path for path in sorted((ROOT / "docs").iterdir()) if path.is_file()}
# Modules that write the pages of docs/ say where to: a developer reads them, in a checkout.
WRITERS = {
    "training/model/hf_write.py",
    "training/config/docs.py",
    "training/config/table.py",
    "control/doctor/check_docs.py",
    "control/verdict/cause_docs.py",
}


def test_topics_are_listed_and_shown(stoker: Stoker) -> None:
    listed = stoker("docs")
    assert listed.code == 0
    titles = dict(re.findall(r"^(\w+) +(\S.*)$", listed.out, re.M))
    assert list(titles) == list(PAGES) and titles["slurm"] == "Slurm"
    for topic in ("verdicts", "config"):
        shown = stoker("docs", topic)
        assert (shown.code, shown.out_bytes) == (0, PAGES[topic].read_bytes())


def test_a_topic_that_is_not_there_is_one_line(stoker: Stoker) -> None:
    for word in ("verdict", "../pyproject", "/etc/passwd", ""):
        done = stoker("docs", word)
        assert done.code == 66 and done.err.count("\n") == 1 and not done.out, done.err
    assert "did you mean verdicts" in stoker("docs", "verdict").err
    assert stoker("docs", "docs/launching.md").out == stoker("docs", "launching").out != "", "as links name it"


def test_every_command_guesses_what_a_misspelt_flag_means(stoker: Stoker) -> None:
    for words, flag, meant in (
        (["chat"], "--temprature", "--temperature"),
        (["why"], "--jsno", "--json"),
        (["export", "a", "b"], "--mrege", "--merge"),
    ):
        done = stoker(*words, flag)
        assert (done.code, done.err) == (64, f"stoker: unknown option {flag} (did you mean {meant}?)\n")
    assert stoker("why", "--nothing-alike").err.endswith("; `stoker why --help` lists the options\n")


def test_every_topic_that_code_or_readme_names_is_there() -> None:
    texts = [path.read_text() for path in (*SOURCE.rglob("*.py"), ROOT / "README.md", *(ROOT / "docs").glob("*.md"))]
    named = {topic for text in texts for topic in re.findall(r"`stoker docs ([a-z]+)`", text)}
    assert len(named) >= 4 and named <= PAGES.keys()


def test_no_message_points_to_a_file_that_a_wheel_lacks() -> None:
    wrong = []
    points = re.compile(r"docs/\w|[A-Z]{3,}\.md|\b(setup|test|speedrun)\.sh")
    for path in SOURCE.rglob("*.py"):
        source = path.read_text()
        if str(path.relative_to(SOURCE)) in WRITERS or not points.search(source):
            continue
        tree = ast.parse(source)
        texts = {id(node) for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
        for node in ast.walk(tree):  # a docstring's reader has the source
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
                texts.discard(id(node.body[0].value))  # type: ignore[attr-defined]
        for node in ast.walk(tree):
            if id(node) in texts and points.search(node.value):  # type: ignore[attr-defined]
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}")  # type: ignore[attr-defined]
    assert wrong == []
