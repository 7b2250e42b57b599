"""gpu.*: what a program does wrong on a GPU that is sound."""

from __future__ import annotations

import re

from stoker.control.verdict.catalogue import Case, Found, Match, cause, steps
from stoker.control.verdict.lastwords import line_of, noticed
from stoker.control.verdict.rules.gpu import DEAD

ORDER = 35

_DEBUG = (
    "stoker run --debug-retry …   # runs it again with blocking launches: the line above is where the error was"
    " noticed, not where it happened"
)
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


@cause(
    "gpu.ordinal",
    said=r"invalid device ordinal",
    seen='"invalid device ordinal" (CUDA error 101): the script asked for a GPU number that this rank can\'t see',
    contradicts='"busy or unavailable" is not about the number: gpu.busy',
    fix=(
        "torch.cuda.set_device(int(os.environ['LOCAL_RANK'])), not RANK, and no fixed number",
        "with --isolate each rank sees one GPU, as device 0; without, all that it was given",
        "stoker run --nproc-per-node auto starts one rank per usable GPU; CUDA_VISIBLE_DEVICES may hide some",
    ),
)
def ordinal(case: Case, found: Match) -> Found:
    """The script asked for a GPU that is not there."""
    return Found(f"{case.who}: no GPU of the number asked for (invalid device ordinal)", noticed(case, line_of(found)))


@cause(
    "gpu.duplicate",
    said=r"Duplicate GPU detected : rank (\d+) and rank (\d+)[^\n]*",
    seen='NCCL\'s "Duplicate GPU detected : rank 0 and rank 1 both on CUDA device …"',
    fix=(
        "torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) before init_process_group and before the first .cuda()",
        "or stoker run --isolate: each rank sees its own GPU only, and `cuda:0` is right everywhere",
        "several ranks on one card on purpose: gloo can do that, NCCL can't",
    ),
)
def duplicate(case: Case, found: Match) -> Found:
    """Two ranks use the same GPU, and NCCL refuses that."""
    return Found(
        f"rank {found[1]} and rank {found[2]} are on the same GPU: the script does not choose by LOCAL_RANK",
        noticed(case, found[0]),
    )


@cause(
    "gpu.assert",
    said=r"device-side assert(?!ion)",  # "… to enable device-side assertions" is the footer of every CUDA error
    seen='"device-side assert triggered" (CUDA error 710); the assertion itself is among the lines the rank printed',
    contradicts="an address and not an assertion: gpu.illegal-access",
    fix=steps(f"""
    an index out of range: labels must be below the number of classes and token ids below the vocabulary \
    (len(tokenizer) against model.config.vocab_size; -100 is what the loss ignores, not -1)
    {_DEBUG}
    the same batch on the CPU names the index in a Python exception
    """),
)
def device_assert(case: Case, found: Match) -> Found:
    """A kernel's own check failed on the GPU: nearly always an index out of range."""
    asserted = re.search(r"Assertion `([^`]+?)` failed|Assertion `([^']+)' failed", case.words)
    condition = (asserted[1] or asserted[2]) if asserted else ""
    meaning = next((text for piece, text in _ASSERTIONS.items() if piece in condition), "")
    what = f": `{condition}` is false{meaning}" if condition else ", probably an index out of range"
    printed = (line_of(asserted),) if asserted else ()
    return Found(f"{case.who}: device-side assert{what}", (*printed, *noticed(case, line_of(found))))


@cause(
    "gpu.illegal-access",
    said=(
        r"illegal memory access|misaligned address|(?:CUDA|HIP) error: an illegal"
        r" instruction|CUDA_ERROR_ILLEGAL_ADDRESS"
    ),
    seen=(
        '"an illegal memory access was encountered" (CUDA error 700), "misaligned address" (716) or "illegal'
        ' instruction" (715)'
    ),
    contradicts="an assertion failed first: gpu.assert. An Xid of the hardware in the kernel's log: gpu.xid",
    fix=steps(f"""
    {_DEBUG}
    kernels that are not torch's (flash-attn, xformers, Triton, an extension of your own): do they fit this torch and \
    this GPU? without them, is it gone?
    compute-sanitizer python …   # names the kernel and the address, slowly
    always on the same card and never on another: stoker doctor, and leave it out (--gpus)
    """),
    retryable=True,
)
def illegal_access(case: Case, found: Match) -> Found:
    """A kernel touched memory that is not its own."""
    return Found(
        f"{case.who}: a GPU kernel touched memory that is not its own ({found[0]})", noticed(case, line_of(found))
    )


@cause(
    "gpu.launch-failure",
    said=r"unspecified launch failure|CUDA_ERROR_LAUNCH_FAILED",
    seen='"unspecified launch failure" (CUDA error 719)',
    contradicts="a hardware Xid in the kernel's log: gpu.xid, gpu.ecc, gpu.lost",
    fix=(_DEBUG, "compute-sanitizer python …", "stoker doctor --only gpu.   # is the card itself sound?", *DEAD),
    retryable=True,
)
def launch_failure(case: Case, found: Match) -> Found:
    """A GPU kernel broke off, and the driver does not say why."""
    return Found(f"{case.who}: a GPU kernel broke off (unspecified launch failure)", noticed(case, line_of(found)))


@cause(
    "gpu.timeout",
    said=r"launch timed out and was terminated",
    seen='"the launch timed out and was terminated" (CUDA error 702)',
    contradicts="a collective that timed out: nccl.timeout",
    fix=steps(f"""
    the card drives a display, whose watchdog ends kernels after seconds: train on another card (--gpus), or stop the \
    display server
    {_DEBUG}
    """),
)
def kernel_timeout(case: Case, found: Match) -> Found:
    """A GPU kernel ran longer than the display's watchdog allows."""
    return Found(f"{case.who}: a GPU kernel was ended by the display's watchdog", noticed(case, line_of(found)))


@cause(
    "gpu.arch",
    said=r"no kernel image is available",
    seen='"no kernel image is available for execution on the device" (CUDA error 209)',
    fix=steps("""
    python -c 'import torch; print(torch.__version__, torch.cuda.get_arch_list(), \
    torch.cuda.get_device_capability())'   # is the card in the list?
    a torch built for it: 50-series and B200 cards (sm_100, sm_120) need a build with CUDA 12.8 or newer; very old \
    cards an older torch
    an extension (flash-attn, a kernel of your own): build it with TORCH_CUDA_ARCH_LIST holding this card
    """),
)
def arch(case: Case, found: Match) -> Found:
    """This torch, or an extension, has no code for this GPU's architecture."""
    return Found(
        f"{case.who}: no code for this GPU's architecture (no kernel image is available)",
        noticed(case, line_of(found)),
    )


@cause(
    "gpu.not-initialized",
    said=r"(CUBLAS|CUDNN)_STATUS_(?:NOT_INITIALIZED|INTERNAL_ERROR)",
    seen="CUBLAS_STATUS_NOT_INITIALIZED, CUDNN_STATUS_NOT_INITIALIZED or CUDNN_STATUS_INTERNAL_ERROR",
    contradicts="CUBLAS_STATUS_ALLOC_FAILED says it is memory: oom.gpu",
    fix=(
        (
            "the card was nearly full when the library made its workspace: leave it room (a smaller micro-batch), and"
            " see what it held (MEM lines in the log)"
        ),
        "LD_LIBRARY_PATH must not bring in another cuDNN or cuBLAS than torch's own: unset it and try",
        f"an earlier error on the GPU (an index out of range) can end up here: {_DEBUG}",
    ),
)
def not_initialized(case: Case, found: Match) -> Found:
    """cuBLAS or cuDNN could not start on the GPU."""
    return Found(
        f"{case.who}: {'cuBLAS' if found[1] == 'CUBLAS' else 'cuDNN'} could not start on its GPU",
        noticed(case, line_of(found)),
    )
