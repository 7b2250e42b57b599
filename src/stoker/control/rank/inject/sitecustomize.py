"""Loaded by the rank's interpreter before the script, because the agent put this folder first in PYTHONPATH.

The interpreter then runs the script itself, so that `__main__`, sys.argv, tracebacks, -X options, pickling and
multiprocessing work as without Stoker. This file removes its own traces and imports the site's own sitecustomize, if any.
"""

import os
import sys
from _frozen_importlib_external import PathFinder  # importing it from importlib.machinery costs every rank 1 ms

TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec


def _install_shim() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if entry != here]
    sys.path_importer_cache.pop(here, None)
    original = os.environ.pop("STOKER_SHIM_PYTHONPATH", None)
    if original is None:
        os.environ.pop("PYTHONPATH", None)
    else:
        os.environ["PYTHONPATH"] = original
    root = here
    for _ in range(4):  # stoker/control/rank/inject -> the folder that holds stoker
        root = os.path.dirname(root)
    finder = _StokerFinder(root)
    sys.meta_path.insert(0, finder)
    try:
        from stoker.control.rank import shim
    finally:
        sys.meta_path.remove(finder)
    shim.install()


class _StokerFinder:
    """Finds `stoker` in its folder and nothing else: the other packages beside it must not shadow the script's."""

    def __init__(self, root: str) -> None:
        self._root = root

    def find_spec(self, name: str, path: object = None, target: object = None) -> "ModuleSpec | None":
        return PathFinder.find_spec(name, [self._root]) if name == "stoker" else None


def _import_site_customization() -> None:
    """Import the site's own sitecustomize. If there is none, `site` ignores the ImportError, as it does without Stoker."""
    sys.modules.pop(__name__, None)
    import sitecustomize  # type: ignore[import-not-found]  # noqa: F401


if "STOKER_SHIM_SOCKET" in os.environ:
    _install_shim()
    _import_site_customization()
