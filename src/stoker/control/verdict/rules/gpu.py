"""gpu.*: a card that is sick or taken, its driver, and what a program does wrong on a healthy card."""

from __future__ import annotations

import re
import signal

from stoker.contract import kernel_messages
from stoker.control.verdict.catalogue import Case, CauseMatch, Family, Match
from stoker.control.verdict.exit_text import find, line_of, noticed

ORDER = 30

# NVIDIA's Xid catalogue, as the doctor has it: those of the hardware. What an application causes by itself (13, 31, 43)
# or what the driver has repaired (63, 92) accuses no card.
_XIDS = {
    48: "double-bit ECC error", 62: "internal micro-controller halt", 64: "row remapping failed", 74: "NVLink error", 79: "GPU has fallen off the bus",
    94: "contained ECC error", 95: "uncontained ECC error", 119: "GSP firmware does not answer", 120: "GSP firmware error",
}  # fmt: skip
_CONTAINED = 94  # the driver took the page out of use: the mildest of them, named only where there is no other
# Tried again although the card is sick: the next attempt proves the cards first and leaves the bad one out.
_DEAD = (
    "leave it out: stoker run --exclude-bad, or --gpus with the others",
    "restart the pod and not only the container: a driver's state outlives the container",
    "then ask the provider, with the file of `stoker doctor --bundle ticket.tar.gz` attached",
)
_NOTICED = "the line above is where the error was noticed, not where it happened"
_DEBUG = f"stoker run --debug-retry …   # runs it again with blocking launches: {_NOTICED}"
family = Family(__name__, noticed, DEAD=_DEAD, DEBUG=_DEBUG)


def _xids(case: Case) -> list[tuple[int, str]]:
    """Hardware Xids in the kernel's log since the rank's start. They count only if its end speaks of its GPU."""
    if "GPU" not in case.end.label:
        return []
    crashed = (
        case.end.error is None and case.end.code is not None and case.end.code < 0 and case.end.code != -signal.SIGKILL
    )
    if not crashed and not find(case, r"(?i)\b(?:cuda|nccl|hip|nvml|cublas|cudnn)"):
        return []
    lines = ((kernel_messages.parse_xid(line), line) for line in case.end.around.kernel)
    return [(told[1], line) for told, line in lines if told is not None and told[1] in _XIDS]


@family.cause("""
gpu.lost, again: The GPU no longer answers its driver.
  perhaps: GPU is lost|(?:CUDA|HIP) error: unknown error|fallen off the bus|Unable to determine the device handle
  seen: Xid 79 in the kernel's log, "GPU is lost", "CUDA error: unknown error" (999), or NVML that can't find the card
      any more
  unless: the card answers and a kernel failed on it: gpu.launch-failure or gpu.illegal-access
  fix: {DEAD}
""")
def lost(case: Case, found: Match | None) -> CauseMatch | None:
    off = [line for number, line in _xids(case) if number == 79]
    if not off and not found:
        return None
    said_so = noticed(case, line_of(found)) if found else ()
    summary = f"{case.who}: its GPU is lost{' (Xid 79: it has fallen off the bus)' if off else ''}"
    return CauseMatch(summary, (*said_so, *off))


@family.cause("""
gpu.ecc, again: The GPU's memory returned an error that could not be corrected.
  perhaps: uncorrectable (?:NVLink|ECC) error|uncorrectable ECC
  seen: "uncorrectable ECC error encountered" (CUDA error 214), or Xid 48 or 95 in the kernel's log
  unless: errors that were corrected: they are counted and harm nothing
  fix: {DEAD}
""")
def ecc(case: Case, found: Match | None) -> CauseMatch | None:
    bad = [line for number, line in _xids(case) if number in (48, 95)]
    if not bad and not found:
        return None
    summary = f"{case.who}: uncorrectable memory (ECC) error on its GPU"
    return CauseMatch(summary, (*(noticed(case, line_of(found)) if found else ()), *bad))


@family.cause("""
gpu.xid, again: The driver reported a fault of the GPU itself.
  seen: the kernel's log has an Xid of the hardware (48 62 64 74 79 95 119 120; 94 as one the driver contained) since
      the rank started, and the rank's end speaks of its GPU
  unless: Xid 13, 31, 43, 63 or 92: an application's own error, or one that was corrected
  fix: nvidia-smi -q -d ECC,PAGE_RETIREMENT,ROW_REMAPPER   # shows the card's errors; reset it or reboot (nvidia-smi
      --gpu-reset -i N, as root)
  fix: {DEAD}
""")
def xid(case: Case) -> CauseMatch | None:
    found = _xids(case)
    if not found:
        return None
    number = next((one for one, _ in found if one != _CONTAINED), _CONTAINED)
    summary = f"{case.who}: the driver reported Xid {number} ({_XIDS[number]})"
    return CauseMatch(summary, tuple(line for _, line in found[-4:]))


@family.cause("""
gpu.busy, again: The GPU refused the process: its compute mode, its memory, or a faulty card.
  said: is/are busy or unavailable
  seen: CUDA error 46: "CUDA-capable device(s) is/are busy or unavailable"
  unless: a number of GPUs that does not fit says "invalid device ordinal": gpu.ordinal
  fix: nvidia-smi --query-gpu=index,compute_mode --format=csv   # Exclusive_Process or Prohibited: nvidia-smi -i N -c
      DEFAULT, as root
  fix: stoker doctor --only gpu.   # who holds it, and whether a context can be made at all: if not, the card is faulty
  fix: {DEAD}
""")
def busy(case: Case, found: Match) -> CauseMatch:
    others = [one for one in case.end.around.holders if not one.get("ours")]
    commands = [one.get("command") or "outside this container" for one in others]
    held = [f"pid {one.get('pid')} ({word}) is on the card" for one, word in zip(others, commands, strict=True)]
    told = f"; {held[0]}" if held else "; no other process is seen on it: its compute mode, or a faulty card"
    summary = f"{case.who}: its GPU is busy or unavailable (CUDA error 46){told}"
    return CauseMatch(summary, (*noticed(case, line_of(found)), *held))


family.entries("""
gpu.driver: The NVIDIA driver is missing, too old, or shows no GPU.
  said: driver version is insufficient|driver on your system is too old|Found no NVIDIA driver|
      No CUDA GPUs are available|No HIP GPUs are available|Error 80[234]: |system not yet initialized|
      unsupported display driver|CUDA driver initialization failed
  summary: {who}: {line}
  seen: "CUDA driver version is insufficient", "NVIDIA driver on your system is too old", "Found no NVIDIA driver", "No
      CUDA GPUs are available", CUDA errors 802 to 804, or a driver that does not answer before the start
  unless: torch itself was built without CUDA: env.cuda-build
  fix: nvidia-smi   # does the driver answer, and which CUDA version does it allow? torch's build must not be newer
  fix: a torch build for an older CUDA (pip install torch --index-url https://download.pytorch.org/whl/cu126), or a
      newer driver on the host
  fix: in a container: was it started with --gpus all (nvidia-container-toolkit)? is CUDA_VISIBLE_DEVICES empty or
      wrong?
  fix: error 802 on an NVSwitch machine: the fabric manager is not running (systemctl status nvidia-fabricmanager, on
      the host)
""")


# ---- what a program does wrong on a healthy GPU ----

_ASSERTIONS = {
    "n_classes": " (a label is not below the number of classes)",
    "srcSelectDimSize": (
        " (an index is not below the size of the table: a token id beyond the vocabulary, a position beyond the"
        " context)"
    ),
    "vocab": " (a token id beyond the vocabulary)",
    "index out of bounds": " (an index is out of bounds)",
    "probability tensor": " (sampling from probabilities that are NaN, infinite or negative)",
}


family.entries("""
gpu.ordinal: The script asked for a GPU that does not exist.
  said: invalid device ordinal
  summary: {who}: the requested GPU number does not exist (invalid device ordinal)
  seen: "invalid device ordinal" (CUDA error 101): the script asked for a GPU number that this rank can't see
  unless: "busy or unavailable" is not about the number: gpu.busy
  fix: torch.cuda.set_device(int(os.environ['LOCAL_RANK'])), not RANK, and no fixed number
  fix: with --isolate each rank sees one GPU, as device 0; without, all that it was given
  fix: stoker run --nproc-per-node auto starts one rank per usable GPU; CUDA_VISIBLE_DEVICES may hide some
""")


@family.cause(r"""
gpu.duplicate: Two ranks use the same GPU, and NCCL refuses that.
  said: Duplicate GPU detected : rank (\d+) and rank (\d+)[^\n]*
  seen: NCCL's "Duplicate GPU detected : rank 0 and rank 1 both on CUDA device …"
  fix: torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) before init_process_group and before the first .cuda()
  fix: or stoker run --isolate: each rank sees its own GPU only, and `cuda:0` is right everywhere
  fix: several ranks on one card on purpose: gloo can do that, NCCL can't
""")
def duplicate(case: Case, found: Match) -> CauseMatch:
    summary = f"rank {found[1]} and rank {found[2]} are on the same GPU: the script does not choose by LOCAL_RANK"
    return CauseMatch(summary, noticed(case, found[0]))


# Not of "device-side assertions", which the footer of every CUDA error names.
@family.cause("""
gpu.assert: A kernel's own check failed on the GPU: nearly always an index out of range.
  said: device-side assert(?!ion)
  seen: "device-side assert triggered" (CUDA error 710); the assertion itself is among the lines the rank printed
  unless: an address and not an assertion: gpu.illegal-access
  fix: an index out of range: labels must be below the number of classes and token ids below the vocabulary
      (len(tokenizer) against model.config.vocab_size; -100 is what the loss ignores, not -1)
  fix: {DEBUG}
  fix: the same batch on the CPU names the index in a Python exception
""")
def device_assert(case: Case, found: Match) -> CauseMatch:
    asserted = re.search(r"Assertion `([^`]+?)` failed|Assertion `([^']+)' failed", case.words)
    condition = (asserted[1] or asserted[2]) if asserted else ""
    meaning = next((text for piece, text in _ASSERTIONS.items() if piece in condition), "")
    what = f": `{condition}` is false{meaning}" if condition else ", probably an index out of range"
    printed = (line_of(asserted),) if asserted else ()
    return CauseMatch(f"{case.who}: device-side assert{what}", (*printed, *noticed(case, line_of(found))))


family.entries("""
gpu.illegal-access, again: A kernel accessed memory that is not its own.
  said: illegal memory access|misaligned address|(?:CUDA|HIP) error: an illegal instruction|CUDA_ERROR_ILLEGAL_ADDRESS
  summary: {who}: a GPU kernel accessed memory that is not its own ({said})
  seen: "an illegal memory access was encountered" (CUDA error 700), "misaligned address" (716) or "illegal instruction"
      (715)
  unless: an assertion failed first: gpu.assert. An Xid of the hardware in the kernel's log: gpu.xid
  fix: {DEBUG}
  fix: kernels that are not torch's (flash-attn, xformers, Triton, an extension of your own): are they built for this torch
      and this GPU? does the error occur without them?
  fix: compute-sanitizer python …   # names the kernel and the address, slowly
  fix: always on the same card and never on another: stoker doctor, and leave it out (--gpus)
gpu.launch-failure, again: A GPU kernel failed, and the driver gives no reason.
  said: unspecified launch failure|CUDA_ERROR_LAUNCH_FAILED
  summary: {who}: a GPU kernel failed (unspecified launch failure)
  seen: "unspecified launch failure" (CUDA error 719)
  unless: a hardware Xid in the kernel's log: gpu.xid, gpu.ecc, gpu.lost
  fix: {DEBUG}
  fix: compute-sanitizer python …
  fix: stoker doctor --only gpu.   # is the card itself healthy?
  fix: {DEAD}
gpu.timeout: A GPU kernel ran longer than the display's watchdog allows.
  said: launch timed out and was terminated
  summary: {who}: a GPU kernel was ended by the display's watchdog
  seen: "the launch timed out and was terminated" (CUDA error 702)
  unless: a collective that timed out: nccl.timeout
  fix: the card drives a display, whose watchdog ends kernels after seconds: train on another card (--gpus), or stop the
      display server
  fix: {DEBUG}
gpu.arch: This torch, or an extension, has no code for this GPU's architecture.
  said: no kernel image is available
  summary: {who}: no code for this GPU's architecture (no kernel image is available)
  seen: "no kernel image is available for execution on the device" (CUDA error 209)
  fix: python -c 'import torch; print(torch.__version__, torch.cuda.get_arch_list(),
      torch.cuda.get_device_capability())'   # is the card in the list?
  fix: a torch built for it: 50-series and B200 cards (sm_100, sm_120) need a build with CUDA 12.8 or newer; very old
      cards an older torch
  fix: an extension (flash-attn, a kernel of your own): build it with TORCH_CUDA_ARCH_LIST holding this card
""")


@family.cause("""
gpu.not-initialized: cuBLAS or cuDNN could not start on the GPU.
  said: (CUBLAS|CUDNN)_STATUS_(?:NOT_INITIALIZED|INTERNAL_ERROR)
  seen: CUBLAS_STATUS_NOT_INITIALIZED, CUDNN_STATUS_NOT_INITIALIZED or CUDNN_STATUS_INTERNAL_ERROR
  unless: CUBLAS_STATUS_ALLOC_FAILED says it is memory: oom.gpu
  fix: the card was nearly full when the library made its workspace: leave it more memory (a smaller micro-batch), and
      look at the MEM lines in the log
  fix: LD_LIBRARY_PATH must not bring in another cuDNN or cuBLAS than torch's own: unset it and try
  fix: an earlier error on the GPU (an index out of range) can end up here: {DEBUG}
""")
def not_initialized(case: Case, found: Match) -> CauseMatch:
    summary = f"{case.who}: {'cuBLAS' if found[1] == 'CUBLAS' else 'cuDNN'} could not start on its GPU"
    return CauseMatch(summary, noticed(case, line_of(found)))
