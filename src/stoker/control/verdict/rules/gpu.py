"""Causes gpu.*: GPUs that are faulty or in use, problems of the driver, and errors of a program on a healthy GPU."""

from __future__ import annotations

import re
import signal

from stoker.contract import kernel_messages
from stoker.control.verdict.catalogue import Case, CauseMatch, Family, Match
from stoker.control.verdict.exit_text import find_in_output, line_of, noticed_evidence

ORDER = 30

# The hardware errors of NVIDIA's Xid catalogue, the same as in the doctor. Xids that an application causes (13, 31, 43) and
# those that the driver has repaired (63, 92) are left out: they don't mean that a GPU is faulty.
_XIDS = {
    48: "double-bit ECC error", 62: "internal micro-controller halt", 64: "row remapping failed", 74: "NVLink error", 79: "GPU has fallen off the bus",
    94: "contained ECC error", 95: "uncontained ECC error", 119: "GSP firmware is not responding", 120: "GSP firmware error",
}  # fmt: skip
_CONTAINED = 94  # the mildest Xid (the driver has retired the page): it is named only if there is no other
# Causes with this advice are retried although the GPU is faulty: the next attempt tests the GPUs and excludes the bad one.
_DEAD = (
    "exclude it: stoker run --exclude-bad, or --gpus with the others",
    "restart the pod and not only the container: a driver's state outlives the container",
    "then ask the provider, with the file of `stoker doctor --bundle ticket.tar.gz` attached",
)
_NOTICED = "the line above is where the error was noticed, not where it happened"
_DEBUG = f"stoker run --debug-retry …   # runs it again with blocking launches: {_NOTICED}"
family = Family(__name__, noticed_evidence, DEAD=_DEAD, DEBUG=_DEBUG)


def _find_hardware_xids(case: Case) -> list[tuple[int, str]]:
    """Return (number, line) of hardware Xids in the kernel's log since the rank's start, if its exit is about its GPU."""
    if "GPU" not in case.end.label:
        return []
    code = case.end.code
    crashed = case.end.error is None and code is not None and code < 0 and code != -signal.SIGKILL
    if not crashed and not find_in_output(case, r"(?i)\b(?:cuda|nccl|hip|nvml|cublas|cudnn)"):
        return []
    lines = ((kernel_messages.parse_xid(line), line) for line in case.context.kernel)
    return [(xid[1], line) for xid, line in lines if xid is not None and xid[1] in _XIDS]


@family.cause("""
gpu.lost, again: The GPU is no longer responding to its driver.
  perhaps: GPU is lost|(?:CUDA|HIP) error: unknown error|fallen off the bus|Unable to determine the device handle
  seen: Xid 79 in the kernel's log, "GPU is lost", "CUDA error: unknown error" (999), or NVML that can't find the GPU
      any more
  unless: the GPU responds and a kernel failed on it: gpu.launch-failure or gpu.illegal-access
  fix: {DEAD}
""")
def match_lost_gpu(case: Case, match: Match | None) -> CauseMatch | None:
    off_bus_lines = [line for number, line in _find_hardware_xids(case) if number == 79]
    if not off_bus_lines and not match:
        return None
    noticed = noticed_evidence(case, line_of(match)) if match else ()
    summary = f"{case.rank_name}: its GPU is lost{' (Xid 79: it has fallen off the bus)' if off_bus_lines else ''}"
    return CauseMatch(summary, (*noticed, *off_bus_lines))


@family.cause("""
gpu.ecc, again: The GPU's memory returned an error that could not be corrected.
  perhaps: uncorrectable (?:NVLink|ECC) error|uncorrectable ECC
  seen: "uncorrectable ECC error encountered" (CUDA error 214), or Xid 48 or 95 in the kernel's log
  unless: errors that were corrected: they are counted and do no harm
  fix: {DEAD}
""")
def match_ecc(case: Case, match: Match | None) -> CauseMatch | None:
    xids = [line for number, line in _find_hardware_xids(case) if number in (48, 95)]
    if not xids and not match:
        return None
    summary = f"{case.rank_name}: uncorrectable memory (ECC) error on its GPU"
    return CauseMatch(summary, (*(noticed_evidence(case, line_of(match)) if match else ()), *xids))


@family.cause("""
gpu.xid, again: The driver reported a fault of the GPU itself.
  seen: the kernel's log has a hardware Xid (48 62 64 74 79 95 119 120; 94 is one that the driver contained) since
      the rank started, and the rank's exit is about its GPU
  unless: Xid 13, 31, 43, 63 or 92: an application's own error, or one that was corrected
  fix: nvidia-smi -q -d ECC,PAGE_RETIREMENT,ROW_REMAPPER   # shows the GPU's errors; reset it or reboot (nvidia-smi
      --gpu-reset -i N, as root)
  fix: {DEAD}
""")
def match_xid(case: Case) -> CauseMatch | None:
    xids = _find_hardware_xids(case)
    if not xids:
        return None
    number = next((number for number, _ in xids if number != _CONTAINED), _CONTAINED)
    summary = f"{case.rank_name}: the driver reported Xid {number} ({_XIDS[number]})"
    return CauseMatch(summary, tuple(line for _, line in xids[-4:]))


@family.cause("""
gpu.busy, again: The GPU refused the process because of its compute mode or its memory, or because it is faulty.
  said: is/are busy or unavailable
  seen: CUDA error 46: "CUDA-capable device(s) is/are busy or unavailable"
  unless: a GPU number that does not exist gives "invalid device ordinal": gpu.ordinal
  fix: nvidia-smi --query-gpu=index,compute_mode --format=csv   # Exclusive_Process or Prohibited: nvidia-smi -i N -c
      DEFAULT, as root
  fix: stoker doctor --only gpu.   # which process uses it, and whether a context can be created: if not, the GPU is faulty
  fix: {DEAD}
""")
def match_busy_gpu(case: Case, match: Match) -> CauseMatch:
    holders = [holder for holder in case.context.holders if not holder.get("ours")]
    in_use = [
        f"pid {holder.get('pid')} ({holder.get('command') or 'outside this container'}) is on the GPU"
        for holder in holders
    ]
    reason = in_use[0] if in_use else "no other process was found on it: check its compute mode; the GPU may be faulty"
    summary = f"{case.rank_name}: its GPU is busy or unavailable (CUDA error 46); {reason}"
    return CauseMatch(summary, (*noticed_evidence(case, line_of(match)), *in_use))


family.entries("""
gpu.driver: The NVIDIA driver is missing, too old, or shows no GPU.
  said: driver version is insufficient|driver on your system is too old|Found no NVIDIA driver|
      No CUDA GPUs are available|No HIP GPUs are available|Error 80[234]: |system not yet initialized|
      unsupported display driver|CUDA driver initialization failed
  summary: {who}: {line}
  seen: "CUDA driver version is insufficient", "NVIDIA driver on your system is too old", "Found no NVIDIA driver", "No
      CUDA GPUs are available", CUDA errors 802 to 804, or a driver that is not responding before the start
  unless: torch itself was built without CUDA: env.cuda-build
  fix: nvidia-smi   # does the driver respond, and which CUDA version does it allow? torch's build must not be newer
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
  fix: with --isolate each rank sees one GPU, as device 0; without it, all GPUs of the run
  fix: stoker run --nproc-per-node auto starts one rank per usable GPU; CUDA_VISIBLE_DEVICES may hide some
""")


@family.cause(r"""
gpu.duplicate: Two ranks use the same GPU, and NCCL refuses that.
  said: Duplicate GPU detected : rank (\d+) and rank (\d+)[^\n]*
  seen: NCCL's "Duplicate GPU detected : rank 0 and rank 1 both on CUDA device …"
  fix: torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) before init_process_group and before the first .cuda()
  fix: or stoker run --isolate: each rank sees its own GPU only, and `cuda:0` is right everywhere
  fix: several ranks on one GPU on purpose: gloo can do that, NCCL can't
""")
def match_duplicate_gpu(case: Case, match: Match) -> CauseMatch:
    summary = f"rank {match[1]} and rank {match[2]} are on the same GPU: the script does not choose by LOCAL_RANK"
    return CauseMatch(summary, noticed_evidence(case, match[0]))


# The pattern excludes "device-side assertions", because the footer of every CUDA error mentions them.
@family.cause("""
gpu.assert: A kernel's own check failed on the GPU: nearly always an index out of range.
  said: device-side assert(?!ion)
  seen: "device-side assert triggered" (CUDA error 710); the assertion itself is among the lines the rank printed
  unless: an address and not an assertion: gpu.illegal-access
  fix: an index out of range: labels must be below the number of classes and token ids below the vocabulary
      (len(tokenizer) against model.config.vocab_size; the loss ignores -100, not -1)
  fix: {DEBUG}
  fix: the same batch on the CPU names the index in a Python exception
""")
def match_device_assert(case: Case, match: Match) -> CauseMatch:
    asserted = re.search(r"Assertion `([^`]+?)` failed|Assertion `([^']+)' failed", case.output)
    condition = (asserted[1] or asserted[2]) if asserted else ""
    meaning = next((text for piece, text in _ASSERTIONS.items() if piece in condition), "")
    failure = f": `{condition}` is false{meaning}" if condition else ", probably an index out of range"
    printed = (line_of(asserted),) if asserted else ()
    summary = f"{case.rank_name}: device-side assert{failure}"
    return CauseMatch(summary, (*printed, *noticed_evidence(case, line_of(match))))


family.entries("""
gpu.illegal-access, again: A kernel accessed memory that does not belong to it.
  said: illegal memory access|misaligned address|(?:CUDA|HIP) error: an illegal instruction|CUDA_ERROR_ILLEGAL_ADDRESS
  summary: {who}: a GPU kernel accessed memory that does not belong to it ({said})
  seen: "an illegal memory access was encountered" (CUDA error 700), "misaligned address" (716) or "illegal instruction"
      (715)
  unless: an assertion failed first: gpu.assert. A hardware Xid in the kernel's log: gpu.xid
  fix: {DEBUG}
  fix: kernels other than torch's (flash-attn, xformers, Triton, your own extension): are they built for this torch
      and this GPU? does the error occur without them?
  fix: compute-sanitizer python …   # names the kernel and the address, slowly
  fix: always on the same GPU and never on another: stoker doctor, and exclude it (--gpus)
gpu.launch-failure, again: A GPU kernel failed, and the driver gives no reason.
  said: unspecified launch failure|CUDA_ERROR_LAUNCH_FAILED
  summary: {who}: a GPU kernel failed (unspecified launch failure)
  seen: "unspecified launch failure" (CUDA error 719)
  unless: a hardware Xid in the kernel's log: gpu.xid, gpu.ecc, gpu.lost
  fix: {DEBUG}
  fix: compute-sanitizer python …
  fix: stoker doctor --only gpu.   # is the GPU itself healthy?
  fix: {DEAD}
gpu.timeout: A GPU kernel ran longer than the display's watchdog allows.
  said: launch timed out and was terminated
  summary: {who}: a GPU kernel was ended by the display's watchdog
  seen: "the launch timed out and was terminated" (CUDA error 702)
  unless: a collective that timed out: nccl.timeout
  fix: the GPU drives a display, whose watchdog ends kernels after seconds: train on another GPU (--gpus), or stop the
      display server
  fix: {DEBUG}
gpu.arch: This torch, or an extension, has no code for this GPU's architecture.
  said: no kernel image is available
  summary: {who}: no code for this GPU's architecture (no kernel image is available)
  seen: "no kernel image is available for execution on the device" (CUDA error 209)
  fix: python -c 'import torch; print(torch.__version__, torch.cuda.get_arch_list(),
      torch.cuda.get_device_capability())'   # is the GPU in the list?
  fix: a torch built for it: 50-series and B200 GPUs (sm_100, sm_120) need a build with CUDA 12.8 or newer; very old
      GPUs an older torch
  fix: an extension (flash-attn, your own kernel): build it with a TORCH_CUDA_ARCH_LIST that contains this GPU
""")


@family.cause("""
gpu.not-initialized: cuBLAS or cuDNN could not start on the GPU.
  said: (CUBLAS|CUDNN)_STATUS_(?:NOT_INITIALIZED|INTERNAL_ERROR)
  seen: CUBLAS_STATUS_NOT_INITIALIZED, CUDNN_STATUS_NOT_INITIALIZED or CUDNN_STATUS_INTERNAL_ERROR
  unless: CUBLAS_STATUS_ALLOC_FAILED means that memory ran out: oom.gpu
  fix: the GPU was nearly full when the library made its workspace: leave it more memory (a smaller micro-batch), and
      look at the MEM lines in the log
  fix: LD_LIBRARY_PATH must not point to another cuDNN or cuBLAS than torch's own: unset it and try again
  fix: an earlier error on the GPU (an index out of range) can end up here: {DEBUG}
""")
def match_not_initialized(case: Case, match: Match) -> CauseMatch:
    library = "cuBLAS" if match[1] == "CUBLAS" else "cuDNN"
    summary = f"{case.rank_name}: {library} could not start on its GPU"
    return CauseMatch(summary, noticed_evidence(case, line_of(match)))
