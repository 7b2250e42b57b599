"""Parses YAML of users (config and hosts files) with one kind of exception that has line numbers."""

from __future__ import annotations

from typing import Any


class YamlError(ValueError):
    """The text is not usable YAML. `line` counts from 1; it is 0 if the problem has no line."""

    def __init__(self, problem: str, line: int = 0, column: int = 0) -> None:
        super().__init__(problem)
        self.problem = problem
        self.line = line
        self.column = column

    @property
    def where(self) -> str:
        return f" at line {self.line}, column {self.column}" if self.line else ""


def parse_yaml(text: str) -> Any:
    """Return the value of a YAML text. Raises YamlError for bad input, also for a repeated key."""
    import yaml  # 25 ms, only paid for a YAML file

    try:
        loader = yaml.SafeLoader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None
            _refuse_odd_nodes(node, set(), set())
            return loader.construct_document(node)
        finally:
            loader.dispose()
    except yaml.YAMLError as problem:
        mark = getattr(problem, "problem_mark", None)
        message = getattr(problem, "problem", None) or str(problem).splitlines()[0]
        raise YamlError(str(message), mark.line + 1 if mark else 0, mark.column + 1 if mark else 0) from problem
    except RecursionError:
        raise YamlError("nested too deeply") from None
    except YamlError:
        raise
    except (TypeError, ValueError, OverflowError) as problem:  # unhashable keys, dates such as 2026-13-45
        raise YamlError(str(problem)) from problem


def _refuse_odd_nodes(node: Any, parents: set[int], checked: set[int]) -> None:
    """Refuse repeated keys, of which YAML readers silently take the last, and an alias that contains itself."""
    import yaml

    if id(node) in parents:
        raise YamlError("an alias contains itself", node.start_mark.line + 1, node.start_mark.column + 1)
    if id(node) in checked or not isinstance(node, yaml.CollectionNode):
        return
    checked.add(id(node))
    parents.add(id(node))
    if isinstance(node, yaml.MappingNode):
        _refuse_repeated_keys(node)
        for key, value in node.value:
            _refuse_odd_nodes(key, parents, checked)
            _refuse_odd_nodes(value, parents, checked)
    else:
        for item in node.value:
            _refuse_odd_nodes(item, parents, checked)
    parents.discard(id(node))


def _refuse_repeated_keys(node: Any) -> None:
    first_lines: dict[str, int] = {}
    for key, _ in node.value:
        if isinstance(key.value, str):
            if key.value in first_lines and key.value != "<<":
                mark = key.start_mark
                problem = f"the key {key.value} appears twice (first in line {first_lines[key.value]})"
                raise YamlError(problem, mark.line + 1, mark.column + 1)
            first_lines[key.value] = key.start_mark.line + 1
