"""In a rank of `stoker.launch`: makes the caller's function again, calls it and leaves its result for the caller.

The files are in a folder that only this user can read, made by the process that started this run: its own pickles.
"""

from __future__ import annotations

import importlib
import json
import marshal
import os
import pickle
import sys
import types
from typing import Any

from stoker.contract.safe_io import write_atomic

CALL, MAIN = "call.pickle", "main.json"
importing_main = False  # the caller's script is being imported again: a stoker.launch in it must not start another run


class NoValue:
    """Of a variable that a closure names and that is not set yet."""


def result_file(folder: str, restarts: int, rank: int) -> str:
    return os.path.join(folder, f"result-{restarts}-{rank}.pickle")


def main(folder: str) -> None:
    with open(os.path.join(folder, MAIN), encoding="utf-8") as file:
        _prepare(json.load(file))
    with open(os.path.join(folder, CALL), "rb") as pickled:
        function, args = pickle.load(pickled)
    result = function(*args)
    path = result_file(folder, int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"]))
    try:
        data = pickle.dumps(result)
    except Exception as problem:
        line = f"the result of {function.__qualname__} can't be sent back to the caller: {problem}"
        raise TypeError(line) from problem
    write_atomic(path, data, durable=False)


def _prepare(caller: dict[str, Any]) -> None:
    """The caller's sys.path, and its __main__ as __mp_main__ if it has a file: as for a spawned process."""
    global importing_main
    from multiprocessing import spawn

    importing_main = True
    try:
        spawn.prepare(caller)
    finally:
        importing_main = False


# What calling.py makes of functions and classes that no process can import.


def make_function(code: bytes, module: str, cells: int) -> types.FunctionType:
    home = sys.modules["__main__"] if module == "__main__" else importlib.import_module(module)
    return types.FunctionType(marshal.loads(code), home.__dict__, closure=tuple(types.CellType() for _ in range(cells)))


def fill_function(function: types.FunctionType, state: dict[str, Any]) -> None:
    for name in state["imports"]:
        importlib.import_module(name)
    for name, value in state["globals"].items():
        function.__globals__.setdefault(name, value)
    for cell, value in zip(function.__closure__ or (), state["closure"]):  # noqa: B905  strict is of Python 3.10
        if value is not NoValue:
            cell.cell_contents = value
    for name, value in state["attributes"].items():
        setattr(function, name, value)
    function.__dict__.update(state["dict"])


def make_mapping(content: dict[Any, Any]) -> types.MappingProxyType[Any, Any]:
    return types.MappingProxyType(content)


def make_class(metaclass: type, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> type:
    made: type = metaclass(name, bases, dict(namespace))
    if namespace["__module__"] == "__main__":
        sys.modules["__main__"].__dict__.setdefault(name, made)  # a result of this class goes back by that name
    return made


def fill_class(cls: type, namespace: dict[str, Any]) -> None:
    for name, value in namespace.items():
        setattr(cls, name, value)
