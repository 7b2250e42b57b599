"""Loaded by the rank's interpreter before the script, because the agent put this folder first in PYTHONPATH.

The interpreter then runs the script itself, so `__main__`, sys.argv, tracebacks, -X options, pickling and
multiprocessing are the real thing and not an imitation. This file removes its own traces and hands over to the site's
own sitecustomize, if any.
"""

import os
import sys


def _enter() -> None:
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
    sys.path.insert(0, root)
    try:
        from stoker.control.rank import shim
    finally:
        sys.path.remove(root)
    shim.install()


def _hand_over() -> None:
    """Imports the site's own sitecustomize. There being none is an ImportError that `site` knows and ignores, as
    without us.
    """
    sys.modules.pop(__name__, None)
    import sitecustomize  # type: ignore[import-not-found]  # noqa: F401


if "STOKER_SHIM_SOCKET" in os.environ:
    _enter()
    _hand_over()
