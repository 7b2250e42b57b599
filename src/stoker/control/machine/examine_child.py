"""The parts of an examination. Each runs in a separate child, so that a driver call that never returns blocks nothing else.

python -I -S -c BOOT <folder of stoker> <folder of nvidia-ml-py> PART [argument]        prints one JSON object
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import json
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from stoker.contract import kernel_messages
from stoker.contract.frozen import as_json, replace
from stoker.contract.process import find_process, read_kernel_file
from stoker.control.machine import examination, kernel_log, ports, procfs
from stoker.control.machine.host_limits import read_host_limits
from stoker.control.machine.observe import Observer

BOOT = (
    "import sys; sys.path += sys.argv[1:3]; from stoker.control.machine.examine_child import main; main(sys.argv[3:])"
)

# Runs in the Python of the ranks, with its site-packages. It never makes a CUDA context.
TORCH = """
import json, sys, time
began = time.perf_counter()
try:
    import torch
    seconds = time.perf_counter() - began
    flags = getattr(torch._C, "_cuda_getArchFlags", lambda: None)() or ""
    try: nccl = ".".join(map(str, torch.cuda.nccl.version()))
    except Exception: nccl = None
    print(json.dumps({"version": torch.__version__, "cuda": torch.version.cuda, "archs": flags.split(), "nccl": nccl, "seconds": round(seconds, 2)}))
except ImportError as problem:
    print(json.dumps({"error": str(problem) if problem.name == "torch" else f"{type(problem).__name__}: {problem}"}))
"""


def main(argv: list[str]) -> None:
    part, *arguments = argv
    parts: dict[str, Callable[..., Any]] = {
        "machine": _examine_machine,
        "health": _examine_health,
        "host": _examine_host,
        "net": _examine_net,
        "probe": _probe_gpu,
    }
    json.dump(parts[part](*arguments), sys.stdout)
    sys.stdout.flush()
    os._exit(0)  # skip the interpreter's shutdown, because a driver's library is loaded


def _examine_machine() -> Any:
    return Observer().observe().to_json()


def _examine_health() -> Any:
    nvml = Observer().nvml
    return (
        {}
        if nvml is None
        else {uuid: as_json(health) for uuid, health in nvml.read_health(_read_kernel_xids()).items()}
    )


def _read_kernel_xids() -> dict[str, list[int]]:
    """Return PCI address -> Xid numbers in the kernel's log, where we may read it."""
    numbers: dict[str, list[int]] = {}
    for line in kernel_log.read_messages():
        xid = kernel_messages.parse_xid(line)
        if xid is not None:
            numbers.setdefault(xid[0], []).append(xid[1])
    return numbers


def _examine_host(runs_dir: str) -> Any:
    blocked = [process for process in procfs.list_processes() if process.state == "D"]
    if blocked:
        time.sleep(0.5)  # a process in state D may just be reading a disk; it is stuck if it is in D again
    stuck = tuple(
        f"{process.pid} ({process.name})"
        for process in blocked
        if (now := find_process(process.pid)) and now.state == "D" and now.start == process.start
    )
    zombies = sum(1 for process in procfs.list_processes() if process.state == "Z")
    return as_json(replace(read_host_limits(runs_dir), stuck=stuck, zombies=zombies))


def _examine_net(port: str) -> Any:
    hostname = socket.gethostname()
    interfaces = tuple(sorted(name for name in os.listdir("/sys/class/net") if name != "lo" and _is_up(name)))
    own_address = next((address for address in map(_read_interface_address, interfaces) if address), None)
    forward = _Lookup(lambda: sorted({str(entry[4][0]) for entry in socket.getaddrinfo(hostname, None)}))
    lookups = [forward]
    if own_address is not None:
        lookups.append(_Lookup(functools.partial(socket.getnameinfo, (own_address, 0), 0)))
    deadline = time.monotonic() + SLOW_S
    for lookup in lookups:
        lookup.thread.join(max(0.0, deadline - time.monotonic()))
    is_slow = any(lookup.thread.is_alive() for lookup in lookups)
    number = int(port)
    return as_json(
        examination.NetworkState(
            hostname=hostname,
            addresses=tuple(forward.answer),
            interfaces=interfaces,
            port=number or None,
            port_holder=ports.find_listener(number) if number else None,
            error=forward.error,
            slow_lookups=is_slow,
            silent_servers=_find_silent_name_servers() if is_slow else (),
        )
    )


def _is_up(interface: str) -> bool:
    return read_kernel_file(f"/sys/class/net/{interface}/operstate").strip() in ("up", "unknown")


# ---- name lookups: torch looks up the host's own name and address for each new connection ----
#
# With a name server that is not responding, each lookup takes 5 to 30 s, but none fails.

SLOW_S = 1.5  # a lookup that takes longer delays connections; a distant server answers in 0.3 s
SERVER_S = 0.7  # limit for the reply of a name server
_SIOCGIFADDR = 0x8915
# A DNS query for the root's name servers, which every server can answer or forward.
_QUESTION = struct.pack("!6H", 0x5354, 0x0100, 1, 0, 0, 0) + b"\0" + struct.pack("!2H", 2, 1)


class _Lookup:
    """A lookup in a thread, because it can't be stopped. The process ends by os._exit() without waiting for it."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self.answer: Any = ()
        self.error: str | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.answer = self._function()
        except OSError as problem:
            self.error = str(problem)


def _read_interface_address(interface: str) -> str | None:
    """Return the first IPv4 address of an interface, or None."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            answer = fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, struct.pack("256s", os.fsencode(interface)[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


def _find_silent_name_servers() -> tuple[str, ...]:
    """Query all name servers at the same time. Return those that send no reply within SERVER_S."""
    lines = (line.split() for line in read_kernel_file("/etc/resolv.conf").splitlines())
    servers = [words[1] for words in lines if len(words) > 1 and words[0] == "nameserver"]
    questions = [
        (server, _Lookup(functools.partial(_query_name_server, server))) for server in servers[:3]
    ]  # the C library uses 3
    for _, question in questions:
        question.thread.join(SERVER_S + 0.3)
    return tuple(server for server, question in questions if not question.answer)


def _query_name_server(server: str) -> bytes:
    with socket.socket(socket.AF_INET6 if ":" in server else socket.AF_INET, socket.SOCK_DGRAM) as connection:
        connection.settimeout(SERVER_S)
        connection.connect((server.partition("%")[0], 53))
        connection.send(_QUESTION)
        return connection.recv(4096)


# ---- the context probe: calls libcuda directly, in a child that sees one GPU ----

N = 64
BLOCK_BYTES = 64 << 20
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
# What the driver's error codes mean for a user. Other codes are "dead", with the driver's own text.
_OUTCOMES = {2: "full", 46: "busy", 100: "absent", 101: "absent"}


class CudaError(Exception):
    def __init__(self, code: int, text: str, function: str) -> None:
        super().__init__(f"error {code} ({text}) in {function}")
        self.code = code


class _Cuda:
    """Calls functions of libcuda by name. Raises CudaError."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")

    def __call__(self, function: str, *args: Any) -> None:
        code = getattr(self._library, function)(*args)
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(code, ctypes.byref(text))
            raise CudaError(code, (text.value or b"?").decode(), function)


def _probe_gpu() -> dict[str, Any]:
    """Use the GPU. Return the fields of examination.GpuProbe."""
    started_at = time.monotonic()
    try:
        cuda = _Cuda()
    except OSError as problem:
        return {"outcome": "absent", "detail": f"libcuda.so.1 does not load: {problem}"}
    try:
        wrong = _count_wrong_results(cuda)
        outcome, detail = ("wrong", f"{wrong} of {N * N} results are wrong") if wrong else ("ok", "")
    except CudaError as problem:
        outcome, detail = _OUTCOMES.get(problem.code, "dead"), str(problem)
    return {"outcome": outcome, "detail": detail, "seconds": round(time.monotonic() - started_at, 3)}


def _count_wrong_results(cuda: _Cuda) -> int:
    """Return how many elements of a matrix product the GPU computes wrong.

    Makes a context, allocates memory, and multiplies two matrices of integers, whose product is exact in float32.
    """
    device, context, module, kernel = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    cuda("cuInit", 0)
    cuda("cuDeviceGet", ctypes.byref(device), 0)
    cuda("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    cuda("cuCtxSetCurrent", context)
    blocks = [ctypes.c_uint64() for _ in range(3)]
    for block in blocks:
        cuda("cuMemAlloc_v2", ctypes.byref(block), ctypes.c_size_t(BLOCK_BYTES))
    a = [float((i * 5 + k * 3) % 11) for i in range(N) for k in range(N)]
    b = [float((k * 7 + j) % 13) for k in range(N) for j in range(N)]
    size = ctypes.c_size_t(4 * N * N)
    array = ctypes.c_float * (N * N)
    for block, values in zip(blocks[:2], (a, b), strict=True):
        cuda("cuMemcpyHtoD_v2", block, array(*values), size)
    cuda("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(_PTX))
    cuda("cuModuleGetFunction", ctypes.byref(kernel), module, b"product")
    count = ctypes.c_uint32(N)
    pointers = (ctypes.cast(ctypes.byref(value), ctypes.c_void_p) for value in (*blocks, count))
    arguments = (ctypes.c_void_p * 4)(*pointers)
    grid, threads = (N, 1, 1), (N, 1, 1)
    cuda("cuLaunchKernel", kernel, *grid, *threads, 0, None, arguments, None)
    cuda("cuCtxSynchronize")
    product = array()
    cuda("cuMemcpyDtoH_v2", product, blocks[2], size)
    rows, columns = [a[i * N : (i + 1) * N] for i in range(N)], [b[j::N] for j in range(N)]
    expected = [sum(x * y for x, y in zip(row, column, strict=True)) for row in rows for column in columns]
    return sum(1 for actual, correct in zip(product, expected, strict=True) if actual != correct)
