"""Weights as one row of bytes that travels through a process group: which tensors, where each lies, and the process that moves them
(member.py). No torch.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import math
import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import stoker
from stoker.contract.frozen import frozen

BUCKET = 32 << 20  # bytes that are broadcast at once
ALIGNED = 64  # each tensor begins at a multiple of it
ITEM = {"F32": 4, "BF16": 2, "F16": 2}
_OF_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")


class MemberFailed(Exception):
    """A line: why the bytes did not travel."""


@frozen
class Entry:
    name: str
    dtype: str
    size: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.size) * ITEM[self.dtype]


@frozen
class Manifest:
    """`adapter`: peft's settings, of tensors that are one's; `base`: digest of the weights that it is for."""

    entries: tuple[Entry, ...]
    adapter: Mapping[str, Any] | None = None
    base: str = ""

    @property
    def places(self) -> Iterator[tuple[Entry, int]]:
        """Each tensor, and where it begins."""
        begin = 0
        for entry in self.entries:
            yield entry, begin
            begin += -(-entry.bytes // ALIGNED) * ALIGNED

    @property
    def total(self) -> int:
        return sum(-(-entry.bytes // ALIGNED) * ALIGNED for entry in self.entries)

    @property
    def body(self) -> dict[str, Any]:
        told: dict[str, Any] = {"tensors": [[one.name, one.dtype, list(one.size)] for one in self.entries]}
        return told if self.adapter is None else {**told, "adapter": dict(self.adapter), "base": self.base}

    def digest(self, of_bytes: str) -> str:
        """Of the version: of what its tensors are called, and of all their bytes."""
        return hashlib.sha256(f"{json.dumps(self.body)}\n{of_bytes}".encode()).hexdigest()[:32]


class Moving:
    """The process of a member, and memory that it shares with us. `more`: handles that it needs, too."""

    def __init__(self, size: int, host: str, more: tuple[int, ...] = ()) -> None:
        self.handle = os.memfd_create("stoker-weights", os.MFD_CLOEXEC)
        os.ftruncate(self.handle, size)
        root = os.path.dirname(os.path.dirname(os.path.abspath(stoker.__file__)))
        path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("STOKER_") and name not in _OF_RANKS
        }
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "stoker.training.serve.member", str(self.handle)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**_interfaces(host), **kept, "PYTHONPATH": path, "TORCH_CPP_LOG_LEVEL": "ERROR"},
            pass_fds=(self.handle, *more),
            text=True,
        )
        self._heard: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._heard.put(json.loads(line))
        self._heard.put({"problem": "its process has ended"})

    def tell(self, **order: Any) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
        except OSError:
            return  # `hear` says what became of it

    def hear(self, key: str, seconds: float) -> Any:
        """What it says under this key; the process gives up by itself, so `seconds` is for one that hangs."""
        try:
            told = self._heard.get(timeout=seconds)
        except queue.Empty:
            raise MemberFailed(f"nothing moved for {seconds:.0f} s") from None
        if key not in told:
            raise MemberFailed(str(told.get("problem", "it answers out of turn")))
        return told[key]

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self.handle)


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def own_address(others: Sequence[str]) -> str:
    """Under which these hosts reach us: loopback, where all of them are this machine."""
    far = [host for host in others if not is_loopback(host)]
    if not far:
        return "127.0.0.1"
    family, _, _, _, address = socket.getaddrinfo(far[0], 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as asking:  # sends nothing
        asking.connect(address)
        return str(asking.getsockname()[0])


def _interfaces(host: str) -> dict[str, str]:
    """gloo and NCCL listen on the interface that leads to this host, and on no other."""
    import fcntl
    import struct

    own = own_address([host])
    for _, name in socket.if_nameindex():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            try:
                told = fcntl.ioctl(asking, 0x8915, struct.pack("256s", name[:15].encode()))  # SIOCGIFADDR
            except OSError:
                continue  # it has no IPv4 address
        if socket.inet_ntoa(told[20:24]) == own:
            return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name}
    return {}
