"""torch as it is, but for parts that are loaded when something first asks for them: what only its compiler and exporter need, and
what torch imports for nobody here.

Importing torch takes 1.5 s of a core, and the first optimizer or DDP of a process imports torch._dynamo for as long again. The tests
start hundreds of such processes, and no test here compiles on a CPU. So these modules are empty until one of their names is
asked for; then it is loaded, after those that torch imports by itself. A few names of torch._dynamo, which optimizers and DDP call
to say that they are not to be compiled, are answered without it.

interpreter.py has every process of the tests import this file when it starts. `bash test.sh --all` uses torch unchanged.
"""

from __future__ import annotations

import gc
import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

TYPE_CHECKING = False  # importing typing would cost every process that has no torch
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any


def _as_it_is(function: Any = None, *_words: object, **_more: object) -> Any:
    """torch._dynamo.disable: of a function, or of what a decorator is given."""
    return _as_it_is if function is None else function


def _nothing(*_words: object) -> None:
    pass


class _Stance:
    """torch._dynamo.set_stance, as a context: how to treat what was compiled, where nothing was."""

    def __init__(self, *_words: object, **_more: object) -> None:
        pass

    __enter__ = __exit__ = _nothing


# Of these only what is asked for is loaded, and its package.
APART = (
    "torch._dynamo", "torch._inductor", "torch._export",
    "numpy._core._add_newdocs", "numpy._core._add_newdocs_scalars", "pynvml", "torchgen.model",
)  # fmt: skip
# In torch's own order. What each of them answers before it is loaded.
DEFERRED: dict[str, dict[str, Any]] = {
    "numpy._core._add_newdocs": {},
    "numpy._core._add_newdocs_scalars": {},
    "pynvml": {},
    "torchgen.model": {},
    "torch.masked": {},
    "torch.export": {},
    "torch.distributed._meta_registrations": {},
    "torch._meta_registrations": {},
    "torch._export": {},
    "torch._export.wrappers": {
        "allow_in_pre_dispatch_graph": _as_it_is,
        "mark_subclass_constructor_exportable_experimental": _as_it_is,
    },
    "torch._dynamo": {
        "allow_in_graph": _as_it_is,
        "assume_constant_result": _as_it_is,
        "disable": _as_it_is,
        "graph_break": _nothing,
        "set_stance": _Stance,
    },
    "torch._dynamo.utils": {"get_optimize_ddp_mode": lambda: "ddp_optimizer"},
    "torch._dynamo.trace_rules": {"clear_lru_cache": _nothing},
    "torch._inductor": {},
    "torch._inductor.config": {},  # torch.use_deterministic_algorithms sets one of its names
}

# These need nothing of their package. Recomputing a block asks for the first, a model of transformers for the other.
ALONE = ("torch._dynamo.config", "torch._dynamo._trace_wrapped_higher_order_op")

GARBAGE = 20_000  # objects between two looks for it, in place of 700: a fifth of importing transformers was that


class Deferred(ModuleType):
    """A module whose file has not run yet."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked of every module by inspect, warnings and pickle
            raise AttributeError(name)
        if f"{self.__name__}.{name}" in (*DEFERRED, *ALONE):
            return _imported(f"{self.__name__}.{name}")
        load(self.__name__)
        return getattr(self, name)


def _imported(name: str) -> ModuleType:
    __import__(name)
    return sys.modules[name]


_ran: set[str] = set()  # names of deferred modules that were loaded


def load(wanted: str) -> None:
    """First all that torch imports by itself; of what is apart only what is wanted, and its package."""
    for name in DEFERRED:
        module = sys.modules.get(name)
        needed = not name.startswith(APART) or f"{wanted}.".startswith(f"{name}.")
        if type(module) is Deferred and needed:
            _ran.add(name)
            module.__class__ = ModuleType
            given = {
                key: value
                for key, value in vars(module).items()
                if key not in DEFERRED[name] and not key.startswith("__")
            }
            spec = _spec(name)
            assert spec is not None and spec.loader is not None, name
            module.__spec__, module.__loader__ = spec, spec.loader
            spec.loader.exec_module(module)
            for key, value in given.items():
                setattr(module, key, value)


def _spec(name: str) -> ModuleSpec | None:
    """Of the real module."""
    package = name.rpartition(".")[0]
    return PathFinder.find_spec(name, sys.modules[package].__path__ if package else None)


class _Later:
    """Loads a deferred module: it is there, and empty."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return Deferred(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(DEFERRED[module.__name__])


class _There:
    """Loads a module that is there already."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, _spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec


def bind_generator(torch: Any) -> None:
    """torch 2.13 gives torch.Generator its metaclass in a module that torch._meta_registrations imports; without it none can be made."""
    bind = getattr(torch._C, "_set_generator_metaclass", None)
    if bind is not None:
        from torch._opaque_base import OpaqueBaseMeta

        bind(OpaqueBaseMeta)


def compile_when_called(torch: Any) -> None:
    """bitsandbytes compiles functions as it is imported, and no test calls those: torch.compile loads the compiler with the first call."""
    compiles = torch.compile

    def compiled(model: Any = None, **options: Any) -> Any:
        if "torch._dynamo" in _ran or isinstance(model, torch.nn.Module):
            return compiles(model, **options)
        if model is None:
            return lambda function: compiled(function, **options)

        def call(*words: Any, **more: Any) -> Any:
            nonlocal made
            made = made or compiles(model, **options)
            return made(*words, **more)

        made = None
        return call

    torch.compile = compiled


def module_of_a_frame(otherwise: Any) -> Any:
    """inspect.getmodule, which compares a frame's file with those of all modules: a tenth of importing torch was that."""

    def found(thing: Any, filename: str | None = None) -> Any:
        frame = hasattr(thing, "f_globals")
        return sys.modules.get(thing.f_globals["__name__"]) if frame else otherwise(thing, filename)

    return found


class _Uncollected:
    """Loads torch itself: hundreds of thousands of objects, none of them garbage, now or at the end of the process."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def exec_module(self, module: ModuleType) -> None:
        import inspect

        collects, searches = gc.isenabled(), inspect.getmodule
        gc.disable()
        inspect.getmodule = module_of_a_frame(searches)
        try:
            self._loader.exec_module(module)
            bind_generator(module)
            compile_when_called(module)
        finally:
            inspect.getmodule = searches
            gc.freeze()
            gc.set_threshold(GARBAGE, *gc.get_threshold()[1:])
            if collects:
                gc.enable()


class Finder:
    """In front of Python's own."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, _target: ModuleType | None = None) -> ModuleSpec | None:
        if name == "torch":
            spec = PathFinder.find_spec(name, path)
            if spec is not None and spec.loader is not None:
                spec.loader = _Uncollected(spec.loader)
            return spec
        parent = name.rpartition(".")[0]
        if name in DEFERRED and parent not in _ran:
            real = _spec(name)
            if real is None:
                return None
            spec = ModuleSpec(name, _Later(), origin=real.origin)  # type: ignore[arg-type]
            spec.submodule_search_locations = real.submodule_search_locations
            spec.has_location = True
            return spec
        if type(sys.modules.get(parent)) is Deferred and name not in ALONE:
            load(parent)
            if name in sys.modules:  # its parent imported it: a second copy would be another module
                return ModuleSpec(name, _There(sys.modules[name]))  # type: ignore[arg-type]
        return None


sys.meta_path.insert(0, Finder)
