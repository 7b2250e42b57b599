"""Causes env.*: problems of the software environment in which the script runs."""

from __future__ import annotations

import itertools
import os
import re
import sys

from stoker.contract.stack_traces import is_library
from stoker.control.verdict.catalogue import Case, CauseMatch, Family, Match
from stoker.control.verdict.exit_text import (
    at_location,
    first_line,
    line_evidence,
    line_of,
    location,
    traceback_evidence,
)

ORDER = 55

_RIGHT_PYTHON = "check the Python environment: the ranks use the one that runs Stoker"
# Packages that training scripts import. A file next to the script with the same name hides the package.
_PACKAGES = ("accelerate", "datasets", "deepspeed", "lightning", "numpy", "peft", "tokenizers", "torch", "torchvision", "transformers", "triton", "trl", "wandb")  # fmt: skip
_FRAME = re.compile(r'^  File "([^"\n]+)", line (\d+), in (\S+)', re.MULTILINE)
_KNOWN_MODULES = frozenset(sys.stdlib_module_names).union(_PACKAGES)
family = Family(__name__, line_evidence, RIGHT_PYTHON=_RIGHT_PYTHON)


family.entries("""
env.cuda-build: This torch was built without CUDA.
  said: Torch not compiled with CUDA enabled|Distributed package doesn't have NCCL built in
  summary: {who}: {said}: torch is a build without CUDA{at}
  seen: "Torch not compiled with CUDA enabled", or "Distributed package doesn't have NCCL built in"
  unless: torch has CUDA and finds no GPU or no driver: gpu.driver
  fix: python -c 'import torch; print(torch.__version__, torch.version.cuda)'   # +cpu or None: a build without CUDA
  fix: pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu128   # or another CUDA version that
      the driver allows (nvidia-smi)
  fix: to run without a GPU: backend gloo (or none), and .to('cpu')
""")


@family.cause(r"""
env.version: Two packages have incompatible versions.
  said: undefined symbol: \w+|version `(?:GLIBC|GLIBCXX|CXXABI)_[\d.]+' not found|
      [\w./+-]+\.so[\d.]*: cannot open shared object file|compiled using NumPy 1\.x|
      numpy\.core\.multiarray failed to import|Numpy is not available|numpy\.dtype size changed|
      compiled with different CUDA|operator torchvision::\w+ does not exist|
      is required for a normal functioning of this module|\b(?:requires?|needs) [^\n]{0,60}?(?:version v?\d|
      [<>=]=? ?v?\d+\.\d)
  seen: an "undefined symbol", a library or GLIBC version that is not found, a module built for another NumPy or CUDA,
      or a package that names the version it needs
  unless: a module that does not exist at all: env.import. A symbol of NCCL: nccl.version
  fix: pip check   # lists incompatible packages
  fix: reinstall the package that the message names, for this torch: extensions (flash-attn, xformers, torchvision) are
      built for one torch version each
  fix: GLIBC: the wheel needs a newer system; use an older wheel or a newer image
  fix: LD_LIBRARY_PATH may point to the wrong library: unset it and try again
""")
def match_version(case: Case, match: Match) -> CauseMatch:
    summary = f"{case.rank_name}: incompatible versions: {first_line(line_of(match))}{at_location(case)}"
    return CauseMatch(summary, traceback_evidence(case.end) or (line_of(match),))


def install_advice(module: str) -> tuple[str, ...]:
    """Return the command that installs a missing module, or (). Stoker isn't on PyPI: the package of that name is a different one."""
    if module == "stoker":
        return ("pip install .   # in Stoker's clone, or the path of its wheel, with the Python that runs the ranks",)
    return (f"pip install {module}   # the package may have another name",) if module.isidentifier() else ()


@family.cause("""
env.shadowed: A file in the script's folder hides a module of the same name.
  seen: an ImportError or AttributeError about a module that Python found next to the script, while the standard library or
      an installed package has that name, too
  unless: this is the only module of that name: env.import
  fix: rename the file (and delete its __pycache__): Python looks into the script's folder first
""")
def match_shadowed_module(case: Case) -> CauseMatch | None:
    error = case.end.error
    file = _find_shadowing_file(error.traceback) or error.module_file if error is not None else ""
    if error is None or not file or is_library(file):
        return None
    name = _module_name(file)
    if name not in _KNOWN_MODULES and "not a package" not in error.message:
        return None
    hidden = "standard library's" if name in sys.stdlib_module_names else "installed"
    importer = next((f"{path}:{line}" for path, line, _ in _FRAME.findall(error.traceback) if not is_library(path)), "")
    imported = f", which {importer} imports" if importer and importer != f"{error.file}:{error.line}" else ""
    raised = f"{first_line(error.message)} at {location(case.end)}"
    summary = f"{case.rank_name}: {file} hides the {hidden} module {name}{imported}: {raised}"
    fix = (f"rename {file}: Python looks into the script's folder first", "delete the __pycache__ folder next to it")
    return CauseMatch(summary, traceback_evidence(case.end), fix)


def _find_shadowing_file(traceback: str) -> str:
    """Return the user's file that a library imported instead of the module of that name, or ""."""
    frames = [frame for frame in _FRAME.findall(traceback) if not frame[0].startswith("<frozen")]
    file: str
    for (importer, _, _), (file, _, function) in itertools.pairwise(frames):
        if function != "<module>" or not is_library(importer) or is_library(file):
            continue
        if _module_name(file) in _KNOWN_MODULES:
            return file
    return ""


def _module_name(file: str) -> str:
    return os.path.basename(os.path.dirname(file) if file.endswith("/__init__.py") else file).removesuffix(".py")


@family.cause("""
env.import: A module that the script imports does not exist, or lacks the imported name.
  seen: an ImportError or ModuleNotFoundError ended the rank
  unless: the module exists and its code raised an exception: then that is the cause
  fix: {RIGHT_PYTHON}
""")
def match_missing_module(case: Case) -> CauseMatch | None:
    error = case.end.error
    if error is None or error.type not in ("ImportError", "ModuleNotFoundError"):
        return None
    missing = error.import_name.partition(".")[0] if error.type == "ModuleNotFoundError" else ""
    summary = f"{case.rank_name}: {first_line(error.message)} at {location(case.end)}"
    return CauseMatch(summary, traceback_evidence(case.end), (*install_advice(missing), _RIGHT_PYTHON))


@family.cause("""
env.syntax: The script, or a file it imports, is not valid for this Python.
  seen: a SyntaxError, IndentationError or TabError ended the rank
  fix: fix {place}
""")
def match_syntax_error(case: Case) -> CauseMatch | None:
    error = case.end.error
    if error is None or error.type not in ("SyntaxError", "IndentationError", "TabError"):
        return None
    summary = f"{case.rank_name}: {error.type}: {first_line(error.message)}"
    return CauseMatch(summary, tuple(error.traceback.strip().splitlines()[-6:]), (f"fix {error.file}:{error.line}",))
