"""Checks values from elsewhere (JSON of an agent, a rank, a recorded machine) against the types they must have.

A type is written as an annotation: "int", "str | None", "tuple[str, ...]", "list[Gpu]", "dict[str, float]" (or
"Mapping"), "Any", or the name of a frozen class. Objects with their own fields are written as {"name": type}. Lists
become tuples if the type is a tuple. Numbers must be finite and fit 64 bits: larger ones break arithmetic far from
here.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")
Reader = Callable[[Any], Any]

_BIG = 1 << 63
_LARGEST = sys.float_info.max
Count = int  # at least 0
Real = float  # any finite number, such as a tensor's values; "float" must fit 64 bits
_readers: dict[tuple[str, str], Reader] = {}


def read_value(kind: str, value: Any, module: str = __name__) -> Any:
    """Return the value as this type. Raises ValueError. Frozen classes are looked up in `module`."""
    reader = _readers.get((kind, module))
    if reader is None:
        reader = _readers[kind, module] = _make_reader(kind, module)
    return reader(value)


def read_fields(fields: Mapping[str, Any], value: Any, module: str = __name__) -> dict[str, Any]:
    """Return the fields of an object. `fields` maps each name to its type or to a mapping of the same kind.

    A name that ends in ? is optional, and "*" stands for all names that are not listed; without it they are left out.
    """
    if not isinstance(value, dict):
        raise _mismatch("an object", value)
    if "*" in fields:
        unlisted = dict.fromkeys((name for name in value if name not in fields), fields["*"])
        fields = {**unlisted, **{name: kind for name, kind in fields.items() if name != "*"}}
    values = {}
    for name, kind in fields.items():
        name, optional = (name[:-1], True) if name.endswith("?") else (name, False)
        if name not in value:
            if optional:
                continue
            raise ValueError(f"the field {name!r} is missing")
        try:
            read: Any = read_value if isinstance(kind, str) else read_fields
            values[name] = read(kind, value[name], module)
        except ValueError as problem:
            raise ValueError(f"{name}: {problem}") from None
    return values


def read_frozen(cls: type[T], value: Any) -> T:
    """Return the object that as_json turned into this value. Raises ValueError, also for an unknown field."""
    kinds = cls.__dict__["__annotations__"]  # noqa: RUF063  as in frozen.py
    if getattr(cls, "as_list", False) and isinstance(value, list):
        value = dict(zip(kinds, value))  # noqa: B905  an agent's Python may be 3.9
    if not isinstance(value, dict):
        raise _mismatch(f"a {cls.__name__}", value)
    unknown = [name for name in value if name not in kinds]
    if unknown:
        raise ValueError(f"unknown field {unknown[0][:40]!r} of {cls.__name__}")
    fields = read_fields({name: kinds[name] for name in value}, value, cls.__module__)
    try:
        return cls(**fields)
    except TypeError as problem:
        raise ValueError(str(problem)) from None


def read_known_fields(cls: type[Any], value: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a frozen class that the value has with the right type, and leave out the others."""
    fields = {}
    for name, kind in cls.__dict__["__annotations__"].items():  # noqa: RUF063  as in frozen.py
        if name in value:
            with contextlib.suppress(ValueError):
                fields[name] = read_value(kind, value[name], cls.__module__)
    return fields


def read_recorded(cls: type[T], value: Any, schema: int) -> T:
    """Return a recorded machine or examination. Raises ValueError for another schema, unknown fields or wrong types."""
    if not isinstance(value, dict) or value.get("schema") != schema:
        raise ValueError(f"not a recorded machine: expected an object of schema {schema}")
    try:
        return read_frozen(cls, value)
    except ValueError as problem:
        raise ValueError(f"not a recorded machine: {problem}") from None


def _mismatch(expected: str, value: Any) -> ValueError:
    return ValueError(f"expected {expected}, found {_describe(value)}")


def _describe(value: Any) -> str:
    if isinstance(value, (dict, list, tuple)):
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, int) and not -_BIG <= value < _BIG:
        return "a huge number"
    text = ascii(value[:40] if isinstance(value, str) else value)
    return text if len(text) <= 60 else text[:59] + "…"


def _make_reader(kind: str, module: str) -> Reader:
    kind = kind.strip()
    alternatives = _split(kind, "|")
    if len(alternatives) > 1:
        return _make_union_reader(kind, [_make_reader(part, module) for part in alternatives])
    container, bracket, inner = kind.partition("[")
    if bracket:
        return _make_container_reader(kind, container, _split(inner[:-1], ","), module)
    if kind in _PLAIN:
        return _PLAIN[kind]
    cls = getattr(sys.modules.get(module), kind, None)
    assert cls is not None and hasattr(cls, "__fields__"), f"no type {kind!r} in {module}"
    return lambda value: read_frozen(cls, value)


def _split(text: str, separator: str) -> list[str]:
    """Split a type at a separator, but not within its brackets."""
    parts, depth, start = [], 0, 0
    for position, character in enumerate(text):
        depth += (character == "[") - (character == "]")
        if character == separator and depth == 0:
            parts.append(text[start:position].strip())
            start = position + 1
    return [*parts, text[start:].strip()]


def _make_union_reader(kind: str, readers: list[Reader]) -> Reader:
    def read(value: Any) -> Any:
        for reader in readers:
            try:
                return reader(value)
            except ValueError as problem:
                last = problem
        raise last if isinstance(value, (dict, list)) else _mismatch(kind, value)

    return read


def _make_container_reader(kind: str, container: str, inner: list[str], module: str) -> Reader:
    if container in ("dict", "Mapping"):
        assert inner[0] == "str", kind
        read_item = _make_reader(inner[1], module)

        def read_mapping(value: Any) -> Any:
            if not isinstance(value, dict):
                raise _mismatch("an object", value)
            return {str(name): read_item(item) for name, item in value.items()}

        return read_mapping
    assert container in ("tuple", "list"), kind
    make = tuple if container == "tuple" else list
    readers = [_make_reader(part, module) for part in inner if part != "..."]
    any_length = container == "list" or inner[-1] == "..."

    def read_sequence(value: Any) -> Any:
        if not isinstance(value, (list, tuple)):
            raise _mismatch("a list", value)
        if any_length:
            return make(readers[0](item) for item in value)
        if len(value) != len(readers):
            raise _mismatch(f"a list of {len(readers)}", value)
        return make(reader(item) for reader, item in zip(readers, value))  # noqa: B905  an agent's Python may be 3.9

    return read_sequence


def _make_plain_reader(expected: str, fits: Callable[[Any], bool]) -> Reader:
    def read(value: Any) -> Any:
        if not fits(value):
            raise _mismatch(expected, value)
        return value

    return read


# These comparisons also refuse NaN, which is neither below nor above any bound.
_read_real = _make_plain_reader(
    "a finite number", lambda value: type(value) in (int, float) and -_LARGEST <= value <= _LARGEST
)
_PLAIN: dict[str, Reader] = {
    "int": _make_plain_reader("a whole number", lambda value: type(value) is int and -_BIG <= value < _BIG),
    "Count": _make_plain_reader("a whole number of at least 0", lambda value: type(value) is int and 0 <= value < _BIG),
    "float": _make_plain_reader("a number", lambda value: type(value) in (int, float) and -_BIG <= value < _BIG),
    "Real": lambda value: float(_read_real(value)),
    "str": _make_plain_reader("text", lambda value: isinstance(value, str)),
    "bool": _make_plain_reader("true or false", lambda value: isinstance(value, bool)),
    "None": _make_plain_reader("null", lambda value: value is None),
    "Any": lambda value: value,
}
