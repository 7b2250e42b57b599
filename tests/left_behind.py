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
_PYTESTS_SIGNALS = (signal.SIGALRM,)  # of pytest-timeout


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
    torch = sys.modules.get("torch")
    return {
        **{
            f"${name}": value
            for name, value in os.environ.items()
            if name not in _PYTESTS_NAMES and not name.startswith(_LIBRARIES)
        },
        "the working directory": os.getcwd(),
        "the umask": oct(umask),
        "the default timeout of sockets": socket.getdefaulttimeout(),
        "sys.path": list(sys.path),
        "sys.executable": sys.executable,
        **{
            f"the handler of {one.name}": signal.getsignal(one) for one in signal.Signals if one not in _PYTESTS_SIGNALS
        },
        "checks from outside": _foreign("stoker.control.doctor.check", "CHECKS"),
        "causes from outside": _foreign("stoker.control.verdict.catalogue", "CATALOGUE"),
        "families from outside": _foreign("stoker.training.model.families", "_registered"),
        "torch's default type": str(torch.get_default_dtype()) if torch else "torch.float32",
        "torch's determinism": torch.are_deterministic_algorithms_enabled() if torch else False,
    }


@pytest.fixture(scope="module", autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    before = state()
    yield
    after = state()
    changed = [
        f"{name} was {before.get(name)!r} and is {after.get(name)!r}"
        for name in sorted({*before, *after})
        if before.get(name) != after.get(name)
    ]
    assert not changed, f"this file left behind: {'; '.join(changed)}"
