"""gpu.*: a card that is sick or taken, and its driver. What a program does wrong on a sound card is in kernels.py."""

from __future__ import annotations

import re
import signal

from stoker.control.verdict.catalogue import Case, Found, Match, cause, steps
from stoker.control.verdict.lastwords import find, first_line, line_of, noticed

ORDER = 30

# NVIDIA's Xid catalogue, as the doctor has it: those of the hardware. What an application causes by itself (13, 31, 43)
# or what the driver has mended (63, 92) accuses no card.
_XIDS = {
    48: "double-bit ECC error", 62: "internal micro-controller halt", 64: "row remapping failed", 74: "NVLink error", 79: "GPU has fallen off the bus",
    94: "contained ECC error", 95: "uncontained ECC error", 119: "GSP firmware does not answer", 120: "GSP firmware error",
}  # fmt: skip
_CONTAINED = 94  # the driver took the page out of use: the mildest of them, named only where there is no other
# The causes below are tried again although the card is sick: the next attempt proves the cards first and leaves the bad
# one out.
DEAD = (
    "leave it out: stoker run --exclude-bad, or --gpus with the others",
    "restart the pod and not only the container: a driver's state outlives the container",
    "then ask the provider, with the file of `stoker doctor --bundle ticket.tar.gz` attached",
)


def _xids(case: Case) -> list[tuple[int, str]]:
    """Hardware Xids in the kernel's log since the rank's start. They count only if its end speaks of its GPU."""
    if "GPU" not in case.end.label:
        return []
    crashed = (
        case.end.error is None and case.end.code is not None and case.end.code < 0 and case.end.code != -signal.SIGKILL
    )
    if not crashed and not find(case, r"(?i)\b(?:cuda|nccl|hip|nvml|cublas|cudnn)"):
        return []
    found = [
        (int(seen[1]), line)
        for line in case.end.around.kernel
        if (seen := re.search(r"NVRM: Xid \([^)]*\): (\d+)", line))
    ]
    return [(number, line) for number, line in found if number in _XIDS]


@cause(
    "gpu.lost",
    seen="""Xid 79 in the kernel's log, "GPU is lost", "CUDA error: unknown error" (999), or NVML that can't find
    the card any more""",
    contradicts="the card answers and a kernel failed on it: gpu.launch-failure or gpu.illegal-access",
    fix=DEAD,
    retryable=True,
)
def lost(case: Case) -> Found | None:
    """The GPU is gone: it does not answer its driver any more."""
    off = [line for number, line in _xids(case) if number == 79]
    found = find(
        case, r"GPU is lost|(?:CUDA|HIP) error: unknown error|fallen off the bus|Unable to determine the device handle"
    )
    if not off and not found:
        return None
    said_so = noticed(case, line_of(found)) if found else ()
    return Found(
        f"{case.who}: its GPU is lost{' (Xid 79: it has fallen off the bus)' if off else ''}", (*said_so, *off)
    )


@cause(
    "gpu.ecc",
    seen='"uncorrectable ECC error encountered" (CUDA error 214), or Xid 48 or 95 in the kernel\'s log',
    contradicts="errors that were corrected: they are counted and harm nothing",
    fix=DEAD,
    retryable=True,
)
def ecc(case: Case) -> Found | None:
    """The GPU's memory returned an error that could not be corrected."""
    bad = [line for number, line in _xids(case) if number in (48, 95)]
    found = find(case, r"uncorrectable (?:NVLink|ECC) error|uncorrectable ECC")
    if not bad and not found:
        return None
    return Found(
        f"{case.who}: uncorrectable memory (ECC) error on its GPU",
        (*(noticed(case, line_of(found)) if found else ()), *bad),
    )


@cause(
    "gpu.xid",
    seen="""the kernel's log has an Xid of the hardware (48 62 64 74 79 95 119 120; 94 as one the driver contained)
    since the rank started, and the rank's end speaks of its GPU""",
    contradicts="Xid 13, 31, 43, 63 or 92: an application's own error, or one that was corrected",
    fix=steps("""
    nvidia-smi -q -d ECC,PAGE_RETIREMENT,ROW_REMAPPER   # shows the card's errors; reset it or reboot (nvidia-smi \
    --gpu-reset -i N, as root)
    """)
    + DEAD,
    retryable=True,
)
def xid(case: Case) -> Found | None:
    """The driver reported a fault of the GPU itself."""
    found = _xids(case)
    if not found:
        return None
    number = next((one for one, _ in found if one != _CONTAINED), _CONTAINED)
    return Found(
        f"{case.who}: the driver reported Xid {number} ({_XIDS[number]})", tuple(line for _, line in found[-4:])
    )


@cause(
    "gpu.busy",
    said=r"is/are busy or unavailable",
    seen='CUDA error 46: "CUDA-capable device(s) is/are busy or unavailable"',
    contradicts='a number of GPUs that does not fit says "invalid device ordinal": gpu.ordinal',
    fix=steps("""
    nvidia-smi --query-gpu=index,compute_mode --format=csv   # Exclusive_Process or Prohibited: nvidia-smi -i N -c \
    DEFAULT, as root
    stoker doctor --only gpu.   # who holds it, and whether a context can be made at all: if not, the card is sick
    """)
    + DEAD,
    retryable=True,
)
def busy(case: Case, found: Match) -> Found:
    """The GPU would not take the process: its compute mode, its memory, or a sick card."""
    held = [
        f"pid {one.get('pid')} ({one.get('command') or 'outside this container'}) is on the card"
        for one in case.end.around.holders
        if not one.get("ours")
    ]
    told = f"; {held[0]}" if held else "; nobody else is seen on it: its compute mode, or a sick card"
    return Found(
        f"{case.who}: its GPU is busy or unavailable (CUDA error 46){told}", (*noticed(case, line_of(found)), *held)
    )


@cause(
    "gpu.driver",
    said=(
        r"driver version is insufficient|driver on your system is too old|Found no NVIDIA driver|No CUDA GPUs are"
        r" available|No HIP GPUs are available|"
        r"Error 80[234]: |system not yet initialized|unsupported display driver|CUDA driver initialization failed"
    ),
    seen=(
        '"CUDA driver version is insufficient", "NVIDIA driver on your system is too old", "Found no NVIDIA driver",'
        ' "No CUDA GPUs are available", CUDA errors 802 to 804, or a driver that does not answer before the start'
    ),
    contradicts="torch itself was built without CUDA: env.cuda-build",
    fix=steps("""
    nvidia-smi   # does the driver answer, and which CUDA version does it allow? torch's build must not be newer
    a torch build for an older CUDA (pip install torch --index-url https://download.pytorch.org/whl/cu126), or a newer \
    driver on the host
    in a container: was it started with --gpus all (nvidia-container-toolkit)? is CUDA_VISIBLE_DEVICES empty or wrong?
    error 802 on an NVSwitch machine: the fabric manager is not running (systemctl status nvidia-fabricmanager, on the \
    host)
    """),
)
def driver(case: Case, found: Match) -> Found:
    """The NVIDIA driver is missing, too old, or shows no GPU."""
    return Found(f"{case.who}: {first_line(line_of(found))}", noticed(case, line_of(found)))
