"""Values from elsewhere (JSON of an agent, a rank, a recorded machine) held against the types they must have.

A type is written as in an annotation: "int", "str | None", "tuple[str, ...]", "list[Gpu]", "dict[str, float]" (or "Mapping"), "Any",
or the name of a shape. Objects with fields of their own are written as {"name": type}. Lists become tuples where a
tuple is asked for. Numbers must be finite and fit 64 bits: what is larger breaks arithmetic far from here.
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
Count = int  # from 0 up
Real = float  # any finite number: a tensor's values; "float" must fit 64 bits
_readers: dict[tuple[str, str], Reader] = {}


def read_value(kind: str, value: Any, module: str = __name__) -> Any:
    """The value, as that type; ValueError says what was found. `module`: where shapes are looked up."""
    reader = _readers.get((kind, module))
    if reader is None:
        reader = _readers[kind, module] = _reader(kind, module)
    return reader(value)


def read_fields(fields: Mapping[str, Any], value: Any, module: str = __name__) -> dict[str, Any]:
    """Fields: name -> type or mapping; with ? one may be missing; "*": all that are not written. Others are left out."""
    if not isinstance(value, dict):
        raise _wrong("an object", value)
    found = {}
    if "*" in fields:
        fields = {
            **dict.fromkeys((name for name in value if name not in fields), fields["*"]),
            **{name: kind for name, kind in fields.items() if name != "*"},
        }
    for name, kind in fields.items():
        name, optional = (name[:-1], True) if name.endswith("?") else (name, False)
        if name not in value:
            if optional:
                continue
            raise ValueError(f"no {name!r}")
        try:
            reader: Any = read_value if isinstance(kind, str) else read_fields
            found[name] = reader(kind, value[name], module)
        except ValueError as problem:
            raise ValueError(f"{name}: {problem}") from None
    return found


def read_frozen(shape: type[T], value: Any) -> T:
    """One shape back from what as_json made of it. An unknown field is an error: half understood would be worse."""
    kinds = shape.__dict__["__annotations__"]  # noqa: RUF063  as in shape.py
    if getattr(shape, "as_list", False) and isinstance(value, list):
        value = dict(zip(kinds, value))  # noqa: B905  an agent's Python may be 3.9
    if not isinstance(value, dict):
        raise _wrong(f"a {shape.__name__}", value)
    unknown = [name for name in value if name not in kinds]
    if unknown:
        raise ValueError(f"unknown field {unknown[0][:40]!r} of {shape.__name__}")
    given = read_fields({name: kinds[name] for name in value}, value, shape.__module__)
    try:
        return shape(**given)
    except TypeError as problem:
        raise ValueError(str(problem)) from None


def known_fields(shape: type[Any], value: Mapping[str, Any]) -> dict[str, Any]:
    """Of its fields those that are there and have their type: what is wrong is as if it were missing."""
    found = {}
    for name, kind in shape.__dict__["__annotations__"].items():  # noqa: RUF063  as in shape.py
        if name in value:
            with contextlib.suppress(ValueError):
                found[name] = read_value(kind, value[name], shape.__module__)
    return found


def read_recorded(shape: type[T], value: Any, schema: int) -> T:
    """Strict: a field we don't know, or of another type, is refused, not half understood."""
    if not isinstance(value, dict) or value.get("schema") != schema:
        raise ValueError(f"not a recorded machine of schema {schema}")
    try:
        return read_frozen(shape, value)
    except ValueError as problem:
        raise ValueError(f"not a recorded machine: {problem}") from None


def _wrong(wanted: str, value: Any) -> ValueError:
    return ValueError(f"{wanted} is expected, found {_shown(value)}")


def _shown(value: Any) -> str:
    if isinstance(value, (dict, list, tuple)):
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, int) and not -_BIG <= value < _BIG:
        return "a huge number"
    shown = ascii(value[:40] if isinstance(value, str) else value)
    return shown if len(shown) <= 60 else shown[:59] + "…"


def _reader(kind: str, module: str) -> Reader:
    kind = kind.strip()
    either = _split(kind, "|")
    if len(either) > 1:
        return _union(kind, [_reader(part, module) for part in either])
    head, bracket, rest = kind.partition("[")
    if bracket:
        return _container(kind, head, _split(rest[:-1], ","), module)
    if kind in _PLAIN:
        return _PLAIN[kind]
    shape = getattr(sys.modules.get(module), kind, None)
    assert shape is not None and hasattr(shape, "__fields__"), f"no type {kind!r} in {module}"
    return lambda value: read_frozen(shape, value)


def _split(text: str, sign: str) -> list[str]:
    parts, depth, start = [], 0, 0
    for at, found in enumerate(text):
        depth += (found == "[") - (found == "]")
        if found == sign and depth == 0:
            parts.append(text[start:at].strip())
            start = at + 1
    return [*parts, text[start:].strip()]


def _union(kind: str, readers: list[Reader]) -> Reader:
    def reader(value: Any) -> Any:
        for one in readers:
            try:
                return one(value)
            except ValueError as problem:
                last = problem
        raise last if isinstance(value, (dict, list)) else _wrong(kind, value)

    return reader


def _container(kind: str, head: str, inner: list[str], module: str) -> Reader:
    if head in ("dict", "Mapping"):
        assert inner[0] == "str", kind
        of = _reader(inner[1], module)

        def mapping(value: Any) -> Any:
            if not isinstance(value, dict):
                raise _wrong("an object", value)
            return {str(name): of(one) for name, one in value.items()}

        return mapping
    assert head in ("tuple", "list"), kind
    make = tuple if head == "tuple" else list
    readers = [_reader(part, module) for part in inner if part != "..."]
    any_number = head == "list" or inner[-1] == "..."

    def sequence(value: Any) -> Any:
        if not isinstance(value, (list, tuple)):
            raise _wrong("a list", value)
        if any_number:
            return make(readers[0](one) for one in value)
        if len(value) != len(readers):
            raise _wrong(f"a list of {len(readers)}", value)
        return make(reader(one) for reader, one in zip(readers, value))  # noqa: B905  an agent's Python may be 3.9

    return sequence


def _plain(wanted: str, fits: Callable[[Any], bool]) -> Reader:
    def reader(value: Any) -> Any:
        if not fits(value):
            raise _wrong(wanted, value)
        return value

    return reader


# NaN is neither below nor above any bound.
_real = _plain("a finite number", lambda value: type(value) in (int, float) and -_LARGEST <= value <= _LARGEST)
_PLAIN: dict[str, Reader] = {
    "int": _plain("a whole number", lambda value: type(value) is int and -_BIG <= value < _BIG),
    "Count": _plain("a whole number from 0 up", lambda value: type(value) is int and 0 <= value < _BIG),
    "float": _plain("a number", lambda value: type(value) in (int, float) and -_BIG <= value < _BIG),
    "Real": lambda value: float(_real(value)),
    "str": _plain("a text", lambda value: isinstance(value, str)),
    "bool": _plain("true or false", lambda value: isinstance(value, bool)),
    "None": _plain("null", lambda value: value is None),
    "Any": lambda value: value,
}
