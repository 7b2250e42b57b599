"""The GPUs of a whole chain: locked once, for the life of this process, and lent to each stage. Between two stages
another job could take them otherwise, and the next stage would fail at once.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping

from stoker.contract import names
from stoker.contract.names import EX_UNAVAILABLE, Refusal
from stoker.control.agent.reservations import GpuLocks, held
from stoker.control.launch.gpus import NotFree, choose
from stoker.control.launch.options import RunOptions
from stoker.control.machine.lockfiles import CHAIN
from stoker.control.machine.model import Machine
from stoker.control.machine.origin import run_we_are_in

_PR_SET_NAME = 15


class Reserved:
    """`environment` and `handles`: what each stage is started with. The handles keep the GPUs locked until the stage has
    ended, also where this process is killed.
    """

    def __init__(
        self, name: str, machine: Machine, ranks: str | None, environment: Mapping[str, str], say: Callable[[str], None]
    ) -> None:
        """`ranks`: of each stage, as --nproc-per-node has it."""
        self.environment: dict[str, str] = {}
        self._locks = GpuLocks(name)
        if run_we_are_in(environment):
            return  # that run holds them
        holders = held([gpu.uuid for gpu in machine.gpus])
        try:
            chosen = choose(RunOptions(nproc_per_node=ranks), environment, machine, holders).gpus
        except NotFree as busy:  # its last part names a flag of `stoker run`
            raise Refusal(
                f"{busy.line.rpartition('; ')[0]}; start again when they are free", busy.code, cause="gpu.busy"
            ) from busy
        uuids = list(dict.fromkeys(gpu.uuid for gpu in chosen))
        if not uuids:
            return
        refused = self._locks.take(uuids)
        if refused:
            who = "; ".join(f"GPU {uuid} is in use by {holder}" for uuid, holder in refused.items())
            raise Refusal(f"{who}: start again when it is free", EX_UNAVAILABLE, cause="gpu.busy")
        for notice in self._locks.notices:
            say(notice)
        ctypes.CDLL(None).prctl(_PR_SET_NAME, CHAIN.encode(), 0, 0, 0)  # so others are told that a run holds them
        self.environment = {names.GPU_LENDER: str(os.getpid())}
        if len(uuids) < len(machine.gpus):
            self.environment["CUDA_VISIBLE_DEVICES"] = ",".join(uuids)

    @property
    def handles(self) -> tuple[int, ...]:
        return self._locks.handles

    def close(self) -> None:
        self._locks.release()
