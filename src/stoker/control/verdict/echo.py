"""Is a failure the echo of another rank's? Words that torch, gloo and NCCL use when a peer is gone."""

from __future__ import annotations

import re

from stoker.contract.evidence import RankError, RankExit
from stoker.contract.frozen import replace
from stoker.contract.stack_traces import is_library

_LOST_PEER = (
    r"(?i)Connection (reset|closed|aborted|refused) by peer|Connection reset|Broken pipe|Connection closed|"
    r"\[[^\]\n]{0,400}gloo/transport/|Application timeout caused pair closure|"
    r"failed to recv, got 0 bytes|recvValue failed|sendBytes failed|Failed to recv|wait timeout after|Timed out after"
    r" \d+ seconds waiting for clients|"
    r"Socket Timeout|socket timeout|The client socket has (failed|timed out)|store->(get|wait)|"
    r"ncclRemoteError|remote process exited or there was a network error|NCCL communicator was aborted|"
    r"Watchdog caught collective operation timeout|collective operation timeout|Some NCCL operations have failed or"
    r" timed out"
)
# Said in the same words and the same files, and yet the rank's own: a peer's end can't cause these.
_OWN = (
    r"EADDRINUSE|(?i:address already in use)|ncclUnhandledCudaError|unhandled cuda error|Cuda failure|CUDA error|HIP"
    r" error|out of memory|ncclInvalidUsage|"
    r"ncclInvalidArgument|no socket interface found|shared memory segment|Unable to find (address|interface)"
    r" for|op\.preamble\.length <= op\.nbytes"
)
_SIZES = r"op\.preamble\.length <= op\.nbytes|Received data size doesn't match expected size"
_BROKEN_PIPES = {
    "EOFError", "ConnectionResetError", "ConnectionRefusedError", "ConnectionAbortedError", "BrokenPipeError", "FileNotFoundError", "UnpicklingError",
}  # fmt: skip
_TORCH_TYPES = {"DistBackendError", "DistNetworkError", "DistStoreError"}


def is_consequence(end: RankExit) -> bool:
    if end.error is not None:
        text = end.error.message
        if re.search(_OWN, text) or lost_worker(end.error):
            return False
        return bool(re.search(_LOST_PEER, text)) or _is_torchs(end.error)
    # NCCL's watchdog and gloo's threads abort without a Python exception; their last words are in the log.
    return end.code == -6 and not re.search(_OWN, end.tail) and bool(re.search(_LOST_PEER, end.tail))


def lost_worker(error: RankError) -> bool:
    """The pipe to a data-loader worker broke during a batch: the worker is gone, and torch has not noticed yet."""
    handing_over = (
        r"torch/multiprocessing/reductions\.py|multiprocessing/(?:connection|resource_sharer|reduction|queues)\.py"
    )
    if error.type not in _BROKEN_PIPES or "Original Traceback" in error.message:
        return False
    return "torch/utils/data/dataloader.py" in error.traceback and bool(re.search(handing_over, error.traceback))


def _is_torchs(error: RankError) -> bool:
    return error.type in _TORCH_TYPES and error.module.startswith("torch")


def is_collectives(end: RankExit) -> bool:
    """An echo out of a collective: gloo's RuntimeError, torch's own types. A ConnectionError may be a tracker's."""
    return is_consequence(end) and (end.error is None or end.error.type == "RuntimeError" or _is_torchs(end.error))


def is_mismatch(end: RankExit) -> bool:
    """gloo found other sizes than its own: it ends the rank that received them, and another rank sent them."""
    text = end.tail if end.code == -6 else ""
    if end.error is not None:
        text = end.error.message
    return bool(re.search(_SIZES, text))


def is_failure(end: RankExit, stopped_at: float = 0.0) -> bool:
    """It ended badly by itself: not by our signal, nor in answer to it."""
    if end.code == 0 or (end.code is None and end.error is None):
        return False
    answered = end.error is None or (stopped_at > 0 and failure_time(end) >= stopped_at)
    return not (end.ours and answered)


def failure_time(end: RankExit) -> float:
    return end.error.time_ns / 1e9 if end.error and end.error.time_ns else end.time


_FRAME = re.compile(r'^ *File "([^"\n]+)", line (\d{1,9}), in ([^\n]+)', re.M)
_LAST = re.compile(r"^(?P<type>[A-Za-z_][\w.]*)(?:: (?P<message>.*))?\Z", re.M | re.S)
_WRAPPERS = ("ProcessRaisedException",)  # their own type says nothing: the quoted one does


def unquoted(error: RankError) -> RankError:
    """With the place inside the quoted traceback and what was said there; of a mere wrapper also with the type there."""
    _, quotes, quoted = error.message.rpartition("Traceback (most recent call last):\n")
    frames = _FRAME.findall(quoted) if quotes else []
    if not frames:
        return error
    file, line, function = next((frame for frame in reversed(frames) if not is_library(frame[0])), frames[-1])
    placed = replace(error, file=file, line=int(line), function=function)
    ended = _LAST.search(quoted.rstrip()[_after_frames(quoted) :])
    if ended is None:
        return placed
    kind = ended["type"].rpartition(".")[2] if error.type in _WRAPPERS else error.type
    which = re.search(r"Process (\d+) terminated|in (DataLoader worker process \d+)", error.message)
    where = "a process that it started" if which is None else which[2] or f"process {which[1]} that it started"
    first = (ended["message"] or "").partition("\n")[0]
    return replace(placed, type=kind, message=f"{first} (in {where})\n{error.message.strip()}")


def _after_frames(quoted: str) -> int:
    """Where the last line begins that is not indented: the exception's own."""
    lines = quoted.rstrip().splitlines(keepends=True)
    for number in range(len(lines) - 1, -1, -1):
        if lines[number].startswith("  "):
            return sum(len(line) for line in lines[: number + 1])
    return 0
