"""Pickles functions and classes no other process can import: of a notebook, a REPL, `python - < x`; lambdas; nested.

Everything that can be imported goes by its name, as pickle does it. The rest goes by its code and by what that uses
(rank/call.py makes it again).
"""

from __future__ import annotations

import dataclasses
import dis
import enum
import importlib
import io
import marshal
import pickle
import sys
import types
from collections.abc import Iterator
from typing import Any

from stoker.control.rank.call import NoValue, fill_class, fill_function, make_class, make_function, make_mapping

_GLOBAL = ("LOAD_GLOBAL", "STORE_GLOBAL", "LOAD_NAME", "DELETE_GLOBAL")
_MADE_BY_PYTHON = ("__dict__", "__weakref__", "_abc_impl")


class NotSendable(ValueError):
    """It can't be made again in another process."""


def dumps(value: Any, main_has_a_file: bool) -> bytes:
    out = io.BytesIO()
    try:
        _Pickler(out, main_has_a_file).dump(value)
    except NotSendable:
        raise
    except Exception as problem:  # pickle raises whatever an object's own methods raise
        raise NotSendable(f"{problem}") from problem
    return out.getvalue()


class _Pickler(pickle.Pickler):
    def __init__(self, out: io.BytesIO, main_has_a_file: bool) -> None:
        super().__init__(out)
        self._main_has_a_file = main_has_a_file

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, types.FunctionType):
            return NotImplemented if self._importable(value) else self._function(value)
        if isinstance(value, type):
            return NotImplemented if self._importable(value) else self._class(value)
        if isinstance(value, types.ModuleType):
            return importlib.import_module, (value.__name__,)
        if isinstance(value, (staticmethod, classmethod)):
            return type(value), (value.__func__,)
        if isinstance(value, property):
            return property, (value.fget, value.fset, value.fdel, value.__doc__)
        if isinstance(value, types.MappingProxyType):
            return make_mapping, (dict(value),)
        if value is dataclasses.MISSING:  # compared by identity, as are the three kinds of fields
            return getattr, (dataclasses, "MISSING")
        if type(value).__module__ == "dataclasses" and type(value).__name__ == "_FIELD_BASE":
            return getattr, (dataclasses, value.name)
        return NotImplemented

    def _importable(self, value: types.FunctionType | type) -> bool:
        """By its name; what has no such place in a module at all (NoneType, say) is left to pickle, which knows a few."""
        if value.__module__ == "__main__" and not self._main_has_a_file:
            return False
        return not any(part.startswith("<") for part in value.__qualname__.split("."))  # <locals>, <lambda>

    def _function(self, function: types.FunctionType) -> Any:
        code, cells = function.__code__, function.__closure__ or ()
        home = function.__module__ if function.__module__ in sys.modules else "__main__"
        by_file = home != "__main__" or self._main_has_a_file  # its module has its globals there too
        wanted = {} if by_file else _globals(code)
        used = {name: function.__globals__[name] for name in wanted if name in function.__globals__}
        attributes = {
            name: getattr(function, name)
            for name in ("__defaults__", "__kwdefaults__", "__annotations__", "__doc__", "__name__", "__qualname__")
        }
        state = {
            "globals": used,
            "imports": list(_submodules(code, used)),
            "closure": [_content(cell) for cell in cells],
            "attributes": attributes,
            "dict": dict(function.__dict__),
        }
        return make_function, (marshal.dumps(code), home, len(cells)), state, None, None, fill_function

    def _class(self, cls: type) -> Any:
        if isinstance(cls, enum.EnumMeta):
            line = f"{cls.__name__} is an Enum that other processes can't import: put it into a .py file and import it"
            raise NotSendable(line)
        slots = cls.__dict__.get("__slots__", ())
        slots = (slots,) if isinstance(slots, str) else tuple(slots)
        made = {"__module__": cls.__module__, "__qualname__": cls.__qualname__} | (
            {"__slots__": slots} if "__slots__" in cls.__dict__ else {}
        )
        rest = {name: value for name, value in cls.__dict__.items() if name not in (*_MADE_BY_PYTHON, *made, *slots)}
        return make_class, (type(cls), cls.__name__, cls.__bases__, made), rest, None, None, fill_class


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return NoValue


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _globals(code: types.CodeType) -> dict[str, None]:
    """Names of module variables that it or a function in it uses, in order."""
    return {step.argval: None for part in _codes(code) for step in dis.get_instructions(part) if step.opname in _GLOBAL}


def _submodules(code: types.CodeType, used: dict[str, Any]) -> Iterator[str]:
    """`import xml.dom.minidom` leaves only `xml` in the globals: which modules below it the code goes through."""
    names = {name for part in _codes(code) for name in part.co_names}
    for module in used.values():
        if isinstance(module, types.ModuleType):
            below = module.__name__ + "."
            yield from (
                name
                for name in list(sys.modules)
                if name.startswith(below) and names.issuperset(name[len(below) :].split("."))
            )
