"""YAML from a user or a stranger, within bounds: no duplicate key, no alias bomb, no nesting without end."""

from __future__ import annotations

from typing import Any

LONGEST = 1 << 18  # PyYAML reads about 150 KB a second
MOST_NODES = 100_000  # with every alias written out
DEPTH = 64
LONGEST_NUMBER = 40  # digits
_LONGEST_INT = 1000  # characters of one, as it is written


class NotYaml(ValueError):
    """`line` counts from 1; 0 where no single line is to blame."""

    def __init__(self, problem: str, line: int = 0, column: int = 0) -> None:
        super().__init__(problem)
        self.problem = problem
        self.line = line
        self.column = column

    @property
    def where(self) -> str:
        return f" at line {self.line}, column {self.column}" if self.line else ""


def parse_yaml(text: str) -> Any:
    import yaml  # 25 ms: only who has a YAML file pays for it

    if len(text) > LONGEST:
        raise NotYaml(f"longer than {LONGEST >> 10} KiB")
    if _open_brackets(text) > 4 * DEPTH:
        raise NotYaml(f"nested more than {DEPTH} levels deep")
    try:
        loader = yaml.SafeLoader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None
            _bounded(node)
            return _checked(loader.construct_document(node))
        finally:
            loader.dispose()
    except yaml.YAMLError as problem:
        mark = getattr(problem, "problem_mark", None)
        words = getattr(problem, "problem", None) or str(problem).splitlines()[0]
        raise NotYaml(str(words), mark.line + 1 if mark else 0, mark.column + 1 if mark else 0) from problem
    except RecursionError:
        raise NotYaml(f"nested more than {DEPTH} levels deep") from None
    except (TypeError, ValueError, OverflowError) as problem:
        # Unhashable keys, 2026-13-45, base-60 numbers without end.
        if isinstance(problem, NotYaml):
            raise
        raise NotYaml(str(problem)) from problem


def _open_brackets(text: str) -> int:
    """At most at once, texts and comments too. PyYAML's time grows with their square: 25 s for 100,000."""
    import re

    most = now = 0
    for bracket in re.findall(r"[\[\]{}]", text):
        now = now + 1 if bracket in "[{" else max(now - 1, 0)
        most = max(most, now)
    return most


def _bounded(root: Any) -> None:
    """Counts what the document becomes when every alias is written out, and refuses a key that is given twice."""
    import yaml

    sizes: dict[int, int] = {}
    open_nodes: set[int] = set()

    def size(node: Any, depth: int) -> int:
        if id(node) in sizes:
            return sizes[id(node)]
        line = node.start_mark.line + 1
        if id(node) in open_nodes:
            raise NotYaml("an alias that contains itself", line, node.start_mark.column + 1)
        if depth > DEPTH:
            raise NotYaml(f"nested more than {DEPTH} levels deep", line, node.start_mark.column + 1)
        open_nodes.add(id(node))
        total = 1
        if isinstance(node, yaml.MappingNode):
            _no_key_twice(node)
            total += sum(size(key, depth + 1) + size(value, depth + 1) for key, value in node.value)
        elif (
            isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:int" and len(node.value) > _LONGEST_INT
        ):
            # 1:1:1… takes seconds.
            raise NotYaml(f"a whole number of {len(node.value)} characters", line, node.start_mark.column + 1)
        elif isinstance(node, yaml.SequenceNode):
            total += sum(size(item, depth + 1) for item in node.value)
        open_nodes.discard(id(node))
        if total > MOST_NODES:
            many = f"more than {MOST_NODES:,} values once its aliases are written out"
            raise NotYaml(many, line, node.start_mark.column + 1)
        sizes[id(node)] = total
        return total

    size(root, 0)


def _checked(found: Any) -> Any:
    """Whole numbers that fit a float, and texts that can be written as UTF-8. Everything is small and finite by now."""
    if isinstance(found, dict):
        for key, value in found.items():
            _checked(key)
            _checked(value)
    elif isinstance(found, list):
        for item in found:
            _checked(item)
    elif isinstance(found, str) and not found.isascii() and any("\ud800" <= sign <= "\udfff" for sign in found):
        raise NotYaml("half of a surrogate pair, which is not a character")
    elif isinstance(found, int) and abs(found) >= 10**LONGEST_NUMBER:
        raise NotYaml(f"a whole number of more than {LONGEST_NUMBER} digits")
    return found


def _no_key_twice(node: Any) -> None:
    """YAML readers take the last of two equal keys without a word."""
    seen: dict[str, int] = {}
    for key, _ in node.value:
        if isinstance(key.value, str):
            if key.value in seen and key.value != "<<":
                mark = key.start_mark
                line = f"the key {key.value} appears twice (first in line {seen[key.value]})"
                raise NotYaml(line, mark.line + 1, mark.column + 1)
            seen[key.value] = key.start_mark.line + 1
