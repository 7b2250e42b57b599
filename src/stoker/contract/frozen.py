"""Frozen dataclasses without their bill: `@shape` reads like @dataclass(frozen=True) and type-checks as one.

`dataclasses` imports inspect and compiles six methods per class: 0.9 ms a class and 12 ms at once, in the launcher, in
each agent and in each rank, together a quarter of the whole launch. Here every class shares one __init__, nothing is
compiled.
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
    """A field that is also a setting: its flag, its help, how to read it."""

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
    """In a class of options: the heading, in --help, of the options that follow."""

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
    """`many`: may be given several times, collects a tuple. `limit`: the numbers it may be (contract/limits.py)."""
    return Option(**locals())


MISSING = object()  # no default


@dataclass_transform(frozen_default=True, field_specifiers=(option,))
def frozen(cls: type[T]) -> type[T]:
    fields: dict[str, Any] = {}
    for name in cls.__dict__.get("__annotations__", {}):  # noqa: RUF063  inspect is what this file avoids
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
    own = self.__dict__
    for name, value in zip(fields, args):  # noqa: B905  strict is of Python 3.10: an agent's may be 3.9
        if name in kwargs:
            raise TypeError(f"{type(self).__name__}: {name} is given twice")
        own[name] = value
    for name, value in kwargs.items():
        if name not in fields:
            raise TypeError(f"{type(self).__name__} has no field {name!r}")
        own[name] = value
    for name, default in fields.items():
        if name not in own:
            if default is MISSING:
                raise TypeError(f"{type(self).__name__} needs {name!r}")
            own[name] = default


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
    """Name -> default (MISSING where there is none)."""
    found: dict[str, Any] = cls.__fields__
    return found


def options_of(cls: Any) -> dict[str, Option]:
    found: dict[str, Option] = cls.__options__
    return found


def as_json(value: Any) -> Any:
    """Shapes, tuples and mappings become what json.dumps takes."""
    if hasattr(type(value), "__fields__"):
        return {name: as_json(getattr(value, name)) for name in type(value).__fields__}
    if isinstance(value, (list, tuple)):
        return [as_json(item) for item in value]
    if isinstance(value, dict):
        return {key: as_json(item) for key, item in value.items()}
    return value


def pick_fields(value: Any, *names: str) -> dict[str, Any]:
    """Some of its fields, as JSON has them."""
    return {name: as_json(getattr(value, name)) for name in names}


def replace(value: T, **changes: Any) -> T:
    """What a cached property computed of the old one stays there."""
    kept = {name: getattr(value, name) for name in fields_of(type(value))}
    return type(value)(**{**kept, **changes})
