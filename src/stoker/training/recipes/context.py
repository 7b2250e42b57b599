"""The CUDA context of a rank's GPU, made by a thread while Python imports torch. Each takes about a second, and nothing of one waits
for the other.
"""

from __future__ import annotations

import ctypes
import os
import threading
from typing import Any

_LIBRARY = "libcuda.so.1"  # the driver's


def begin() -> threading.Thread:
    """Of the GPU that this rank will use. What goes wrong here goes wrong again when torch asks for it, and is reported then."""
    made = threading.Thread(target=_make, args=(int(os.environ.get("LOCAL_RANK", "0")),), name="context", daemon=True)
    made.start()
    return made


def _make(number: int) -> None:
    try:
        driver = ctypes.CDLL(_LIBRARY)
    except OSError:  # no driver here
        return
    make(driver, number)


def make(driver: Any, number: int) -> bool:
    """The context that CUDA's runtime, and with it torch, uses by itself; False: there is none. ctypes lets other threads run."""
    count, device, context = ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or number >= count.value:
        return False
    if driver.cuDeviceGet(ctypes.byref(device), number):
        return False
    return not driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
