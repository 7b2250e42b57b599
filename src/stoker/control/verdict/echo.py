"""Tells a rank's own failure from the consequence of another rank's, by the messages of torch, gloo and NCCL."""

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
# These messages are similar, but report the rank's own failure: a peer's exit can't cause them.
_OWN_FAILURE = (
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
    """Return whether the rank failed because it lost a peer."""
    if end.error is not None:
        text = end.error.message
        if re.search(_OWN_FAILURE, text) or lost_loader_worker(end.error):
            return False
        return bool(re.search(_LOST_PEER, text)) or _is_torch_distributed(end.error)
    # NCCL's watchdog and gloo's threads abort the process without a Python exception, so search the last lines it printed.
    return end.code == -6 and not re.search(_OWN_FAILURE, end.tail) and bool(re.search(_LOST_PEER, end.tail))


def lost_loader_worker(error: RankError) -> bool:
    """Return whether the pipe to a data-loader worker broke during a batch: the worker died before torch noticed."""
    transfer = (
        r"torch/multiprocessing/reductions\.py|multiprocessing/(?:connection|resource_sharer|reduction|queues)\.py"
    )
    if error.type not in _BROKEN_PIPES or "Original Traceback" in error.message:
        return False
    return "torch/utils/data/dataloader.py" in error.traceback and bool(re.search(transfer, error.traceback))


def _is_torch_distributed(error: RankError) -> bool:
    return error.type in _TORCH_TYPES and error.module.startswith("torch")


def is_collective_consequence(end: RankExit) -> bool:
    """Return whether the rank lost a peer in a collective: gloo's RuntimeError or torch's own types.

    A ConnectionError may come from elsewhere, such as an experiment tracker.
    """
    return is_consequence(end) and (
        end.error is None or end.error.type == "RuntimeError" or _is_torch_distributed(end.error)
    )


def is_size_mismatch(end: RankExit) -> bool:
    """Return whether gloo ended the rank because it received another size than its own from another rank."""
    text = end.tail if end.code == -6 else ""
    if end.error is not None:
        text = end.error.message
    return bool(re.search(_SIZES, text))


def is_failure(end: RankExit, stopped_at: float = 0.0) -> bool:
    """Return whether the rank failed, and neither from a signal that Stoker sent nor in response to one."""
    if end.code == 0 or (end.code is None and end.error is None):
        return False
    is_response = end.error is None or (stopped_at > 0 and failure_time(end) >= stopped_at)
    return not (end.ours and is_response)


def failure_time(end: RankExit) -> float:
    return end.error.time_ns / 1e9 if end.error and end.error.time_ns else end.time


_FRAME = re.compile(r'^ *File "([^"\n]+)", line (\d{1,9}), in ([^\n]+)', re.M)
_LAST = re.compile(r"^(?P<type>[A-Za-z_][\w.]*)(?:: (?P<message>.*))?\Z", re.M | re.S)
_WRAPPERS = ("ProcessRaisedException",)  # the type of the exception that they quote is more specific


def unquote_traceback(error: RankError) -> RankError:
    """Return the error with the location and message of the traceback that it quotes from another process.

    If the error is only a wrapper, its type comes from the quoted traceback, too. An error without one is returned unchanged.
    """
    _, quotes, quoted = error.message.rpartition("Traceback (most recent call last):\n")
    frames = _FRAME.findall(quoted) if quotes else []
    if not frames:
        return error
    file, line, function = next((frame for frame in reversed(frames) if not is_library(frame[0])), frames[-1])
    located = replace(error, file=file, line=int(line), function=function)
    exception = _LAST.search(quoted.rstrip()[_find_end_of_frames(quoted) :])
    if exception is None:
        return located
    kind = exception["type"].rpartition(".")[2] if error.type in _WRAPPERS else error.type
    match = re.search(r"Process (\d+) terminated|in (DataLoader worker process \d+)", error.message)
    process = "a process that it started" if match is None else match[2] or f"process {match[1]} that it started"
    first_line = (exception["message"] or "").partition("\n")[0]
    return replace(located, type=kind, message=f"{first_line} (in {process})\n{error.message.strip()}")


def _find_end_of_frames(quoted: str) -> int:
    """Return the offset of the line with the exception's type: it follows the last indented line."""
    lines = quoted.rstrip().splitlines(keepends=True)
    for number in range(len(lines) - 1, -1, -1):
        if lines[number].startswith("  "):
            return sum(len(line) for line in lines[: number + 1])
    return 0
