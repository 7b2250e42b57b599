"""YAML from a user's config or hosts file, parsed with one kind of exception and line numbers."""

from __future__ import annotations

from typing import Any


class YamlError(ValueError):
    """The text is not usable YAML. `line` counts from 1; 0 where no single line is to blame."""

    def __init__(self, problem: str, line: int = 0, column: int = 0) -> None:
        super().__init__(problem)
        self.problem = problem
        self.line = line
        self.column = column

    @property
    def where(self) -> str:
        return f" at line {self.line}, column {self.column}" if self.line else ""


def parse_yaml(text: str) -> Any:
    """Return the value of a YAML text. Raises NotYaml for bad input, also for a key that is given twice."""
    import yaml  # 25 ms: only who has a YAML file pays for it

    try:
        loader = yaml.SafeLoader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None
            _check(node, set(), set())
            return loader.construct_document(node)
        finally:
            loader.dispose()
    except yaml.YAMLError as problem:
        mark = getattr(problem, "problem_mark", None)
        words = getattr(problem, "problem", None) or str(problem).splitlines()[0]
        raise YamlError(str(words), mark.line + 1 if mark else 0, mark.column + 1 if mark else 0) from problem
    except RecursionError:
        raise YamlError("nested too deeply") from None
    except YamlError:
        raise
    except (TypeError, ValueError, OverflowError) as problem:  # unhashable keys, dates such as 2026-13-45
        raise YamlError(str(problem)) from problem


def _check(node: Any, above: set[int], checked: set[int]) -> None:
    """Refuse keys that are given twice, of which YAML readers silently take the last, and an alias that contains itself."""
    import yaml

    if id(node) in above:
        raise YamlError("an alias that contains itself", node.start_mark.line + 1, node.start_mark.column + 1)
    if id(node) in checked or not isinstance(node, yaml.CollectionNode):
        return
    checked.add(id(node))
    above.add(id(node))
    if isinstance(node, yaml.MappingNode):
        _refuse_repeated_keys(node)
        for key, value in node.value:
            _check(key, above, checked)
            _check(value, above, checked)
    else:
        for item in node.value:
            _check(item, above, checked)
    above.discard(id(node))


def _refuse_repeated_keys(node: Any) -> None:
    first_lines: dict[str, int] = {}
    for key, _ in node.value:
        if isinstance(key.value, str):
            if key.value in first_lines and key.value != "<<":
                mark = key.start_mark
                line = f"the key {key.value} appears twice (first in line {first_lines[key.value]})"
                raise YamlError(line, mark.line + 1, mark.column + 1)
            first_lines[key.value] = key.start_mark.line + 1
