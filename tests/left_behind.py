"""A file of tests leaves its process as it found it: the next file in the same worker would be the one that fails."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Iterator, Mapping

import pytest

_PYTESTS_NAMES = ("PYTEST_CURRENT_TEST",)
# Of variables for libraries, which they read once, and which they or Stoker set for good when they are first used.
_LIBRARIES = (
    "ACCELERATE_", "ARROW_", "CUBLAS_", "HF_", "KINETO_", "KMP_", "MPL", "OMP_", "PYTORCH_", "TOKENIZERS_", "TORCH",
    "TRANSFORMERS_", "TRITON_",
)  # fmt: skip
_OF_RANKS = ("STOKER_EARLY_CONTEXT", "STOKER_MEMORY_PLAN", "CUDA_VISIBLE_DEVICES")
_NOT_RESTORED = (signal.SIGALRM, signal.SIGKILL, signal.SIGSTOP)  # pytest-timeout's, and those that nobody sets


def _foreign(module: str, table: str) -> list[str]:
    """Names in a table of Stoker's whose entries come from outside of the package. One that was never imported has none."""
    entries: Mapping[str, object] = getattr(sys.modules.get(module), table, {})
    return sorted(name for name, entry in entries.items() if not _home(entry).startswith("stoker."))


def _home(entry: object) -> str:
    """The module that an entry was made in: a check's function, a cause's own word, the class of anything else."""
    body = getattr(entry, "body", None)
    return str(getattr(body, "__module__", None) or getattr(entry, "module", None) or type(entry).__module__)


def state() -> dict[str, object]:
    umask = os.umask(0o077)
    os.umask(umask)
    return {
        **{f"${name}": value for name, value in os.environ.items() if not _is_restored(name)},
        "the working directory": os.getcwd(),
        "the umask": oct(umask),
        "the default timeout of sockets": socket.getdefaulttimeout(),
        "sys.path": list(sys.path),
        "sys.executable": sys.executable,
        "checks from outside": _foreign("stoker.control.doctor.check", "CHECKS"),
        "causes from outside": _foreign("stoker.control.verdict.catalogue", "CATALOGUE"),
        "families from outside": _foreign("stoker.training.model.families", "_registered"),
    }


def _is_restored(name: str) -> bool:
    """What a command that runs in the tests' own process sets for good, as in a process of its own: it is put back below."""
    return name in _PYTESTS_NAMES or name.startswith(_LIBRARIES + _OF_RANKS)


@pytest.fixture(scope="module", autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    before, variables = state(), dict(os.environ)
    handlers = {one: signal.getsignal(one) for one in signal.Signals if one not in _NOT_RESTORED}
    yield
    for one, handler in handlers.items():
        if handler is not None and signal.getsignal(one) is not handler:
            signal.signal(one, handler)
    torch = sys.modules.get("torch")
    if torch is not None and torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(False)
    after = state()
    for name in [name for name in os.environ if name.startswith(_OF_RANKS) and name not in variables]:
        del os.environ[name]
    changed = [
        f"{name} was {before.get(name)!r} and is {after.get(name)!r}"
        for name in sorted({*before, *after})
        if before.get(name) != after.get(name)
    ]
    assert not changed, f"this file left behind: {'; '.join(changed)}"
