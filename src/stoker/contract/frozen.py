"""Cheap frozen dataclasses: `@frozen` reads and type-checks like @dataclass(frozen=True).

`dataclasses` costs 12 ms to import (inspect) and 0.9 ms per class (it compiles six methods) in the launcher, in each
agent and in each rank: a quarter of a launch. Here all classes share their methods, and nothing is compiled.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Container
    from typing import Any, TypeVar, dataclass_transform

    T = TypeVar("T")
else:

    def dataclass_transform(**_):
        return lambda function: function


class Option:
    """A field that is also an option: its flags, its help and how to parse it."""

    default: Any
    help: str
    flags: tuple[str, ...]
    parse: Callable[[str], Any] | None
    metavar: str | None
    choices: tuple[str, ...] | None
    many: bool
    group: str
    limit: Container[float] | None

    def __init__(self, **spec: Any) -> None:
        self.__dict__.update(spec)


class section:
    """A heading in --help for the options that follow it in their class."""

    def __init__(self, title: str) -> None:
        self.title = title


def option(
    help: str,
    metavar: str | None = None,
    *,
    default: Any,
    flags: tuple[str, ...] = (),
    parse: Callable[[str], Any] | None = None,
    choices: tuple[str, ...] | None = None,
    many: bool = False,
    group: str = "",
    limit: Container[float] | None = None,
) -> Any:
    """Declare a field of a frozen class as an option. With `many`, a repeated flag collects a tuple.

    `limit` is the range of a number (contract/limits.py).
    """
    return Option(**locals())


MISSING = object()  # the default of a field without one


@dataclass_transform(frozen_default=True, field_specifiers=(option,))
def frozen(cls: type[T]) -> type[T]:
    """Make a class with annotated fields a frozen dataclass."""
    fields: dict[str, Any] = {}
    for name in cls.__dict__.get("__annotations__", {}):  # noqa: RUF063  this file avoids inspect
        default = cls.__dict__.get(name, MISSING)
        fields[name] = default.default if isinstance(default, Option) else default
    heading = "options"
    for value in cls.__dict__.values():
        if isinstance(value, section):
            heading = value.title
        elif isinstance(value, Option) and not value.group:
            value.group = heading
    cls.__fields__ = fields  # type: ignore[attr-defined]
    cls.__options__ = {name: value for name, value in cls.__dict__.items() if isinstance(value, Option)}  # type: ignore[attr-defined]
    for name in cls.__options__:  # type: ignore[attr-defined]
        setattr(cls, name, fields[name])
    for method in (_init, _setattr, _eq, _hash, _repr):
        setattr(cls, f"__{method.__name__[1:]}__", method)
    return cls


def _init(self: Any, *args: Any, **kwargs: Any) -> None:
    fields = type(self).__fields__
    if len(args) > len(fields):
        raise TypeError(f"{type(self).__name__} takes {len(fields)} values, not {len(args)}")
    values = self.__dict__
    for name, value in zip(fields, args):  # noqa: B905  an agent's Python may be 3.9, without `strict`
        if name in kwargs:
            raise TypeError(f"{type(self).__name__}: {name} is given twice")
        values[name] = value
    for name, value in kwargs.items():
        if name not in fields:
            raise TypeError(f"{type(self).__name__} has no field {name!r}")
        values[name] = value
    for name, default in fields.items():
        if name not in values:
            if default is MISSING:
                raise TypeError(f"{type(self).__name__} needs {name!r}")
            values[name] = default


def _setattr(self: Any, name: str, value: Any) -> None:
    raise AttributeError(f"{type(self).__name__} is frozen: {name} can't be set")


def _values(self: Any) -> tuple[Any, ...]:
    return tuple(self.__dict__[name] for name in type(self).__fields__)


def _eq(self: Any, other: Any) -> Any:
    return _values(self) == _values(other) if type(other) is type(self) else NotImplemented


def _hash(self: Any) -> int:
    return hash(_values(self))


def _repr(self: Any) -> str:
    return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.__dict__.items())})"


def fields_of(cls: Any) -> dict[str, Any]:
    """Return the name and default of each field of a frozen class; MISSING stands for no default."""
    fields: dict[str, Any] = cls.__fields__
    return fields


def options_of(cls: Any) -> dict[str, Option]:
    """Return those fields of a frozen class that are options."""
    options: dict[str, Option] = cls.__options__
    return options


def as_json(value: Any) -> Any:
    """Return frozen objects, tuples and mappings as the lists and dicts that json.dumps accepts."""
    if hasattr(type(value), "__fields__"):
        return {name: as_json(getattr(value, name)) for name in type(value).__fields__}
    if isinstance(value, (list, tuple)):
        return [as_json(item) for item in value]
    if isinstance(value, dict):
        return {key: as_json(item) for key, item in value.items()}
    return value


def pick_fields(value: Any, *names: str) -> dict[str, Any]:
    """Return these fields of a frozen object, ready for JSON."""
    return {name: as_json(getattr(value, name)) for name in names}


def replace(value: T, **changes: Any) -> T:
    """Return a copy with these fields changed. Cached properties are not copied."""
    fields = {name: getattr(value, name) for name in fields_of(type(value))}
    return type(value)(**{**fields, **changes})
