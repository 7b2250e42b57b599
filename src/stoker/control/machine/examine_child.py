"""The gatherers: each finds out one thing, in a child of its own: a driver that never answers holds up nobody else.

python -I -S -c BOOT <folder of stoker> <folder of nvidia-ml-py> KIND [argument]        prints one JSON object
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import sys
import time
from typing import Any

from stoker.contract import kernel_messages, process
from stoker.contract.frozen import as_json, replace
from stoker.contract.process import read_kernel_file
from stoker.control.machine import examination, kernel_log, ports, procfs
from stoker.control.machine.host_limits import quick_host
from stoker.control.machine.name_lookups import look_up
from stoker.control.machine.observe import Observer

BOOT = "import sys; sys.path += sys.argv[1:3]; from stoker.control.machine.examine_child import main; main(sys.argv[3:])"

# Runs in the Python that will run the ranks, with its site-packages; never makes a CUDA context.
TORCH = """
import json, sys, time
began = time.perf_counter()
try:
    import torch
    took = time.perf_counter() - began
    flags = getattr(torch._C, "_cuda_getArchFlags", lambda: None)() or ""
    try: nccl = ".".join(map(str, torch.cuda.nccl.version()))
    except Exception: nccl = None
    print(json.dumps({"version": torch.__version__, "cuda": torch.version.cuda, "archs": flags.split(), "nccl": nccl, "seconds": round(took, 2)}))
except ImportError as problem:
    print(json.dumps({"error": str(problem) if problem.name == "torch" else f"{type(problem).__name__}: {problem}"}))
"""


def main(argv: list[str]) -> None:
    kind, *more = argv
    gatherers: dict[str, Any] = {"machine": _machine, "health": _health, "host": _host, "net": _net, "probe": probe}
    json.dump(gatherers[kind](*more), sys.stdout)
    sys.stdout.flush()
    os._exit(0)  # no interpreter shutdown with a driver's library loaded


def _machine() -> Any:
    return Observer().look().to_json()


def _health() -> Any:
    nvml = Observer().nvml
    return {} if nvml is None else {uuid: as_json(one) for uuid, one in nvml.health(_kernel_xids()).items()}


def _kernel_xids() -> dict[str, list[int]]:
    """PCI address -> Xid numbers in the kernel's log, where we may read it."""
    found: dict[str, list[int]] = {}
    for line in kernel_log.lines():
        one = kernel_messages.parse_xid(line)
        if one is not None:
            found.setdefault(one[0], []).append(one[1])
    return found


def _host(disk: str) -> Any:
    first = {one.pid: one for one in procfs.all_processes() if one.state == "D"}
    if first:
        time.sleep(0.5)  # D for a moment is disk at work; D twice in a row is stuck
    stuck = tuple(
        f"{pid} ({one.name})"
        for pid, one in first.items()
        if (now := process.find_process(pid)) and now.state == "D" and now.start == one.start
    )
    zombies = sum(1 for one in procfs.all_processes() if one.state == "Z")
    return as_json(replace(quick_host(disk), stuck=stuck, zombies=zombies))


def _net(port: str) -> Any:
    name = socket.gethostname()
    interfaces = tuple(sorted(entry for entry in os.listdir("/sys/class/net") if entry != "lo" and _up(entry)))
    number = int(port)
    holder = ports.listener(number) if number else None
    seen = look_up(name, interfaces)
    net = examination.Net(
        name, seen.addresses, interfaces, number or None, holder, seen.error, seen.slow, seen.silent_servers
    )
    return as_json(net)


def _up(interface: str) -> bool:
    return read_kernel_file(f"/sys/class/net/{interface}/operstate").strip() in ("up", "unknown")


# ---- the context probe: talks to libcuda itself, in a child that sees one GPU ----

N = 64
BLOCK = 64 << 20
_PTX = b"""
.version 6.0
.target sm_50
.address_size 64
.visible .entry product(.param .u64 pa, .param .u64 pb, .param .u64 pc, .param .u32 pn)
{
  .reg .pred %p<3>; .reg .b32 %r<12>; .reg .f32 %f<4>; .reg .b64 %d<10>;
  ld.param.u64 %d1, [pa]; ld.param.u64 %d2, [pb]; ld.param.u64 %d3, [pc]; ld.param.u32 %r1, [pn];
  cvta.to.global.u64 %d1, %d1; cvta.to.global.u64 %d2, %d2; cvta.to.global.u64 %d3, %d3;
  mov.u32 %r2, %ctaid.x; mov.u32 %r3, %ntid.x; mov.u32 %r4, %tid.x; mad.lo.s32 %r5, %r2, %r3, %r4;
  mul.lo.s32 %r6, %r1, %r1; setp.ge.u32 %p1, %r5, %r6; @%p1 bra DONE;
  div.u32 %r7, %r5, %r1; rem.u32 %r8, %r5, %r1; mov.f32 %f1, 0f00000000; mov.u32 %r9, 0;
LOOP:
  setp.ge.u32 %p2, %r9, %r1; @%p2 bra STORE;
  mad.lo.s32 %r10, %r7, %r1, %r9; mul.wide.u32 %d4, %r10, 4; add.s64 %d5, %d1, %d4; ld.global.f32 %f2, [%d5];
  mad.lo.s32 %r11, %r9, %r1, %r8; mul.wide.u32 %d6, %r11, 4; add.s64 %d7, %d2, %d6; ld.global.f32 %f3, [%d7];
  fma.rn.f32 %f1, %f2, %f3, %f1; add.u32 %r9, %r9, 1; bra LOOP;
STORE:
  mul.wide.u32 %d8, %r5, 4; add.s64 %d9, %d3, %d8; st.global.f32 [%d9], %f1;
DONE:
  ret;
}
"""
# What a code of the driver's means for a user; the rest is "dead" with the driver's own words.
_OUTCOMES = {2: "full", 46: "busy", 100: "absent", 101: "absent"}


class CudaError(Exception):
    def __init__(self, code: int, text: str, during: str) -> None:
        super().__init__(f"error {code} ({text}) in {during}")
        self.code = code


class _Cuda:
    def __init__(self) -> None:
        self._lib = ctypes.CDLL("libcuda.so.1")

    def __call__(self, name: str, *args: Any) -> None:
        code = getattr(self._lib, name)(*args)
        if code:
            text = ctypes.c_char_p()
            self._lib.cuGetErrorString(code, ctypes.byref(text))
            raise CudaError(code, (text.value or b"?").decode(), name)


def probe() -> dict[str, Any]:
    began = time.monotonic()
    try:
        cuda = _Cuda()
    except OSError as problem:
        return {"outcome": "absent", "detail": f"libcuda.so.1 does not load: {problem}"}
    try:
        wrong = _product(cuda)
        outcome, detail = ("wrong", f"{wrong} of {N * N} results are wrong") if wrong else ("ok", "")
    except CudaError as problem:
        outcome, detail = _OUTCOMES.get(problem.code, "dead"), str(problem)
    return {"outcome": outcome, "detail": detail, "seconds": round(time.monotonic() - began, 3)}


def _product(cuda: _Cuda) -> int:
    """A context, three blocks of memory, a product of integers that floats hold exactly. How many results are wrong."""
    device, context, module, kernel = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    cuda("cuInit", 0)
    cuda("cuDeviceGet", ctypes.byref(device), 0)
    cuda("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    cuda("cuCtxSetCurrent", context)
    blocks = [ctypes.c_uint64() for _ in range(3)]
    for block in blocks:
        cuda("cuMemAlloc_v2", ctypes.byref(block), ctypes.c_size_t(BLOCK))
    a = [float((i * 5 + k * 3) % 11) for i in range(N) for k in range(N)]
    b = [float((k * 7 + j) % 13) for k in range(N) for j in range(N)]
    size = ctypes.c_size_t(4 * N * N)
    array = ctypes.c_float * (N * N)
    for block, values in zip(blocks[:2], (a, b)):  # noqa: B905  strict is of Python 3.10: an agent's may be 3.9
        cuda("cuMemcpyHtoD_v2", block, array(*values), size)
    cuda("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(_PTX))
    cuda("cuModuleGetFunction", ctypes.byref(kernel), module, b"product")
    count = ctypes.c_uint32(N)
    pointers = (ctypes.cast(ctypes.byref(value), ctypes.c_void_p) for value in (*blocks, count))
    arguments = (ctypes.c_void_p * 4)(*pointers)
    grid, threads = (N, 1, 1), (N, 1, 1)
    cuda("cuLaunchKernel", kernel, *grid, *threads, 0, None, arguments, None)
    cuda("cuCtxSynchronize")
    result = array()
    cuda("cuMemcpyDtoH_v2", result, blocks[2], size)
    columns = [b[j::N] for j in range(N)]
    want = [sum(x * y for x, y in zip(a[i * N : (i + 1) * N], columns[j])) for i in range(N) for j in range(N)]  # noqa: B905
    return sum(1 for got, expected in zip(result, want) if got != expected)  # noqa: B905
