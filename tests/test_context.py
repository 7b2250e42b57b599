"""The CUDA context that a rank makes while it imports torch."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from stoker.training.recipes import context
from test_real_gpu import WHY


class Driver:
    """libcuda's functions, as far as a context needs them."""

    def __init__(self, gpus: int, fails: str = "") -> None:
        self.asked: list[str] = []
        self._gpus, self._fails = gpus, fails

    def __getattr__(self, name: str) -> Any:
        def answer(*given: Any) -> int:
            self.asked.append(name)
            if name == "cuDeviceGetCount":
                given[0]._obj.value = self._gpus
            return int(name == self._fails)

        return answer


def test_a_rank_makes_the_context_of_its_own_gpu_only() -> None:
    driver = Driver(2)
    assert context.make(driver, 1)
    assert driver.asked == ["cuInit", "cuDeviceGetCount", "cuDeviceGet", "cuDevicePrimaryCtxRetain"]
    assert not context.make(beyond := Driver(1), 1) and "cuDevicePrimaryCtxRetain" not in beyond.asked
    assert not context.make(Driver(1, "cuInit"), 0)  # all GPUs are hidden, or the driver is broken: torch says so
    assert not context.make(Driver(1, "cuDevicePrimaryCtxRetain"), 0)  # somebody has it for himself
    begun = context.begin()
    begun.join(60)
    assert not begun.is_alive()


def test_what_a_rank_starts_makes_no_context() -> None:
    code = "import os, threading\nimport stoker.training.recipes\nprint(*sorted(os.environ.keys() & {'STOKER_EARLY_CONTEXT'}))"
    env = {**os.environ, "STOKER_EARLY_CONTEXT": "1", "CUDA_VISIBLE_DEVICES": ""}
    assert subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, check=True).stdout == b"\n"


FIRST = """
import ctypes, sys, threading
import stoker.training.recipes

for thread in threading.enumerate():
    if thread.name == "context":
        thread.join()
assert "torch" not in sys.modules
driver, flags, active = ctypes.CDLL("libcuda.so.1"), ctypes.c_uint(), ctypes.c_int()
assert driver.cuDevicePrimaryCtxGetState(0, ctypes.byref(flags), ctypes.byref(active)) == 0
import torch
assert float(torch.ones(8, device="cuda").sum()) == 8
current, own = ctypes.c_void_p(), ctypes.c_void_p()
assert driver.cuCtxGetCurrent(ctypes.byref(current)) == 0
assert driver.cuDevicePrimaryCtxRetain(ctypes.byref(own), 0) == 0
print(active.value, current.value == own.value)
"""


@pytest.mark.skipif(bool(WHY), reason=WHY)
def test_torch_uses_the_context_that_was_made_before_it() -> None:
    env = {**os.environ, "STOKER_EARLY_CONTEXT": "1", "LOCAL_RANK": "0"}
    done = subprocess.run([sys.executable, "-c", FIRST], env=env, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["1", "True"], done.stderr
