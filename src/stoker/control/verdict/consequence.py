"""Is a failure the echo of another rank's? Words that torch, gloo and NCCL use when a peer is gone."""

from __future__ import annotations

import re

from stoker.contract.shapes import RankEnd

_LOST_PEER = re.compile(
    r"Connection (reset|closed|aborted|refused) by peer|Connection reset|Broken pipe|Connection closed|"
    r"\[.*gloo/transport/.*\]|Application timeout caused pair closure|"
    r"failed to recv, got 0 bytes|recvValue failed|sendBytes failed|Failed to recv|wait timeout after|Timed out after \d+ seconds waiting for clients|"
    r"Socket Timeout|socket timeout|The client socket has (failed|timed out)|store->(get|wait)|"
    r"ncclRemoteError|remote process exited or there was a network error|NCCL communicator was aborted|"
    r"Watchdog caught collective operation timeout|collective operation timeout|Some NCCL operations have failed or timed out",
    re.IGNORECASE,
)
_TORCH_TYPES = {"DistBackendError", "DistNetworkError", "DistStoreError"}


def is_consequence(end: RankEnd) -> bool:
    if end.error is not None:
        text = end.error.message
        if "EADDRINUSE" in text or "address already in use" in text.lower():
            return False
        return bool(_LOST_PEER.search(text)) or (end.error.type in _TORCH_TYPES and end.error.module.startswith("torch"))
    # torch's NCCL watchdog aborts the process without a Python exception; its last words are in the log.
    return end.code == -6 and bool(_LOST_PEER.search(end.tail))
