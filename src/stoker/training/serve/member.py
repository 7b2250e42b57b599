"""A process that is a member of the group through which weights travel. It has the bytes in memory that it shares with the
trainer or the server that started it, and speaks JSON lines with that one.

A process of its own: torch's groups can hang in a call that nobody can interrupt, NCCL's ends its process when a peer is lost, and
gloo's can't be taken down safely (docs/log.md). Whatever happens to this one, it is killed and replaced; and
torch.distributed is used as it is documented, with the one group of a process.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import queue
import signal
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

JOIN_S = 300.0  # until all members are there: each imports torch, perhaps from a network disk
IDLE_S = 60.0  # a broadcast that moves nothing for so long has failed
HASHING = 4  # threads


def say(**told: Any) -> None:
    print(json.dumps(told), flush=True)


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for whoever started it
    orders: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(orders,), daemon=True).start()
    try:
        told = orders.get()
        member = Member(int(sys.argv[1]), told)
        say(joined=True)
        while True:
            told = orders.get()
            if "move" in told:
                member.move(*told["move"])
                say(moved=told["move"][0])
            elif "receive" in told:
                member.receive(told["receive"])
                say(digest=member.digest())
            else:
                say(digest=member.digest())
    except Exception as problem:
        say(problem=f"{type(problem).__name__}: {str(problem).splitlines()[0] if str(problem) else ''}"[:300])
        return 1


def _listen(orders: queue.SimpleQueue[dict[str, Any]]) -> None:
    for line in sys.stdin:
        orders.put(json.loads(line))
    os._exit(0)  # whoever started it has ended


class Member:
    """Rank 0 sends. `handle`: of the memory; `told`: host, port, rank, size, backend, device, bucket, and of rank 0 the handle of a
    socket that listens there.
    """

    def __init__(self, handle: int, told: dict[str, Any]) -> None:
        import torch
        import torch.distributed as dist

        self._handle, self._bucket, self._rank = handle, told["bucket"], told["rank"]
        limit = timedelta(seconds=JOIN_S)
        # Rank 0 is given a socket that listens: a store that makes one by itself listens on all interfaces.
        more = {"is_master": True, "master_listen_fd": told["listening"]} if self._rank == 0 else {"is_master": False}
        store = dist.TCPStore(told["host"], told["port"], timeout=limit, wait_for_workers=False, **more)  # type: ignore[attr-defined]
        store.set(f"here/{self._rank}", "")
        store.wait([f"here/{rank}" for rank in range(told["size"])], limit)
        self._device = torch.device(told["device"])
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        dist.init_process_group(
            told["backend"], store=store, rank=self._rank, world_size=told["size"], timeout=timedelta(seconds=IDLE_S)
        )
        on_gpu = told["backend"] == "nccl"
        self._staging = torch.empty(self._bucket, dtype=torch.uint8, device=self._device) if on_gpu else None
        self._pool = ThreadPoolExecutor(HASHING)
        self._digests: list[Future[bytes]] = []
        self._memory: Any = None

    def move(self, begin: int, size: int) -> None:
        self._map(2 * self._bucket)
        piece = self._memory[begin : begin + size]
        digest = self._pool.submit(_digest, piece)
        self._digests.append(digest)
        self._broadcast(piece)
        digest.result()  # the slot is filled anew

    def receive(self, total: int) -> None:
        self._map(total)
        for begin in range(0, total, self._bucket):
            piece = self._memory[begin : begin + self._bucket]
            self._broadcast(piece)
            self._digests.append(self._pool.submit(_digest, piece))

    def digest(self) -> str:
        """Of all bytes since the last one, bucket by bucket, so that several threads can share the work."""
        found, self._digests = self._digests, []
        return hashlib.sha256(b"".join(one.result() for one in found)).hexdigest()

    def _map(self, size: int) -> None:
        import torch

        if self._memory is None or len(self._memory) != size:
            self._memory = torch.frombuffer(mmap.mmap(self._handle, size), dtype=torch.uint8)

    def _broadcast(self, piece: Any) -> None:
        import torch.distributed as dist

        if self._staging is None:
            dist.broadcast(piece, 0)
            return
        staged = self._staging[: len(piece)]
        if self._rank == 0:
            staged.copy_(piece)
        dist.broadcast(staged, 0)
        if self._rank != 0:
            piece.copy_(staged)


def _digest(piece: Any) -> bytes:
    return hashlib.sha256(piece.numpy().data).digest()


if __name__ == "__main__":
    os._exit(main())  # gloo's destructor can wait for ever
