"""Runs in a rank of `stoker.launch`: rebuilds the caller's function, calls it and writes its result for the caller.

It unpickles only files that the caller's process wrote into a folder that only this user can read.
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
is_importing_main = False  # True while `main` imports the caller's script: a stoker.launch in it must not start a run


class NoValue:
    """Stands for the value of a closure variable that is not set yet."""


def result_file(folder: str, restarts: int, rank: int) -> str:
    """Return the path of a rank's result in the attempt after this number of restarts."""
    return os.path.join(folder, f"result-{restarts}-{rank}.pickle")


def main(folder: str) -> None:
    """Call the function that is pickled in a folder, and write its result there."""
    global is_importing_main
    from multiprocessing import spawn

    with open(os.path.join(folder, MAIN), encoding="utf-8") as file:
        caller = json.load(file)
    # Set the caller's sys.path, and import its script, if it has one, as __mp_main__, as a spawned process does.
    is_importing_main = True
    try:
        spawn.prepare(caller)
    finally:
        is_importing_main = False
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


# calling.py pickles functions and classes that no process can import as calls of the functions below.


def make_function(code: bytes, module: str, cells: int) -> types.FunctionType:
    owner = sys.modules["__main__"] if module == "__main__" else importlib.import_module(module)
    return types.FunctionType(
        marshal.loads(code), owner.__dict__, closure=tuple(types.CellType() for _ in range(cells))
    )


def fill_function(function: types.FunctionType, state: dict[str, Any]) -> None:
    for name in state["imports"]:
        importlib.import_module(name)
    for name, value in state["globals"].items():
        function.__globals__.setdefault(name, value)
    for cell, value in zip(function.__closure__ or (), state["closure"]):  # noqa: B905  strict needs Python 3.10
        if value is not NoValue:
            cell.cell_contents = value
    for name, value in state["attributes"].items():
        setattr(function, name, value)
    function.__dict__.update(state["dict"])


def make_mapping(content: dict[Any, Any]) -> types.MappingProxyType[Any, Any]:
    return types.MappingProxyType(content)


def make_class(metaclass: type, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> type:
    cls: type = metaclass(name, bases, dict(namespace))
    if namespace["__module__"] == "__main__":
        sys.modules["__main__"].__dict__.setdefault(name, cls)  # results of this class are pickled by that name
    return cls


def fill_class(cls: type, namespace: dict[str, Any]) -> None:
    for name, value in namespace.items():
        setattr(cls, name, value)
