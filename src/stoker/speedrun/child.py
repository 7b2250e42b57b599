"""A stage's process: it gets our signals, ends when we are killed, and we end after it; the GPUs that the chain keeps
locked for its stages, and the energy they take.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from types import FrameType, TracebackType
from typing import Any

from stoker.contract import env_vars
from stoker.contract.errors import EX_CANTCREAT, EX_UNAVAILABLE, Refusal
from stoker.contract.safe_io import APPEND
from stoker.control.machine.gpu_lock import GpuLocks, find_held_gpus
from stoker.control.machine.model import Machine
from stoker.control.machine.run_origin import find_current_run
from stoker.control.plan.gpu_choice import GpusNotFree, choose_gpus
from stoker.control.plan.options import RunOptions

# The GPUs of a whole chain: locked once, for the life of this process, and lent to each stage. Between two stages
# another job could take them otherwise, and the next stage would fail at once.


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
        if find_current_run(environment):
            return  # that run holds them
        holders = find_held_gpus([gpu.uuid for gpu in machine.gpus])
        try:
            chosen = choose_gpus(RunOptions(nproc_per_node=ranks), environment, machine, holders).gpus
        except GpusNotFree as busy:  # its last part names a flag of `stoker run`
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
        ctypes.CDLL(None).prctl(_PR_SET_NAME, b"stoker-speedrun", 0, 0, 0)  # shown to others as the holder
        self.environment = {env_vars.GPU_LENDER: str(os.getpid())}
        if len(uuids) < len(machine.gpus):
            self.environment["CUDA_VISIBLE_DEVICES"] = ",".join(uuids)

    @property
    def handles(self) -> tuple[int, ...]:
        return self._locks.fds

    def close(self) -> None:
        self._locks.release()


# What the GPUs have used since their driver was loaded, asked in a child with a deadline: a driver that hangs costs
# seconds, not the chain.


LIMIT_S = 5.0
# Millijoules of each card by its UUID; a card that does not count (before Volta) or does not answer is not in it.
_ASK = """
import json, pynvml as n
n.nvmlInit()
found = {}
for i in range(n.nvmlDeviceGetCount()):
    try:
        card = n.nvmlDeviceGetHandleByIndex(i)
        found[n.nvmlDeviceGetUUID(card)] = n.nvmlDeviceGetTotalEnergyConsumption(card)
    except n.NVMLError:
        pass
print(json.dumps(found))
"""


def millijoules() -> dict[str, int] | None:
    try:
        said = subprocess.run([sys.executable, "-P", "-c", _ASK], capture_output=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return None
    return json.loads(said.stdout) if said.returncode == 0 else None


def cards_of(run: dict[str, Any]) -> list[str]:
    """UUIDs of the cards a run's ranks had, of its run.json: on a shared box the others are somebody else's."""
    return sorted({rank["gpu"] for rank in (run.get("plan") or {}).get("ranks") or () if rank.get("gpu")})


def watt_hours(before: dict[str, int] | None, after: dict[str, int] | None, cards: list[str]) -> float | None:
    """Of these cards together. A counter begins again when the driver is loaded anew: then nobody knows; so where one
    of them does not count.
    """
    if (
        not cards
        or before is None
        or after is None
        or not all(card in before and after.get(card, -1) >= before[card] for card in cards)
    ):
        return None
    return sum(after[card] - before[card] for card in cards) / 3.6e6


_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
LOOK_S = 0.5


class Children:
    """While it is entered, signals to stop reach the child; `stopped` says which came."""

    def __init__(self, handles: Sequence[int] = ()) -> None:
        """`handles`: open files that each child is given."""
        self.stopped = 0
        self._handles = handles
        self._child: subprocess.Popen[bytes] | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Children:
        for number in PASSED_ON:
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup's ignored SIGHUP stays ignored
                self._before[number] = signal.signal(number, self._heard)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _heard(self, number: int, frame: FrameType | None) -> None:
        self.stopped = self.stopped or number
        if self._child is not None and self._child.returncode is None:
            self._child.send_signal(number)

    def run(
        self, argv: Sequence[str], environment: Mapping[str, str], log: str | None, look: Callable[[], None]
    ) -> int:
        """Its exit code, 128+n for a signal. `log`: where it writes; None: here. `look` is called while it runs."""
        parent = os.getpid()

        def bound() -> None:
            # SIGTERM, not SIGKILL: the launcher still lets its ranks save. In the child, after fork: no threads here
            # that could hold a lock.
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
            if os.getppid() != parent:
                os._exit(1)

        where = _opened(log) if log is not None else None
        try:
            # A group of its own: Ctrl-C reaches us alone, and the child once, through us.
            self._child = subprocess.Popen(
                argv,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=where,
                stderr=where,
                process_group=0,
                pass_fds=self._handles,
                preexec_fn=bound,  # noqa: PLW1509
            )
        finally:
            if where is not None:
                os.close(where)
        if self.stopped:  # it came before there was a child to tell
            self._child.send_signal(self.stopped)
        while True:
            try:
                code = self._child.wait(LOOK_S)
                break
            except subprocess.TimeoutExpired:
                look()
        self._child = None
        return code if code >= 0 else 128 - code


def _opened(log: str) -> int:
    """Open a stage's log for appending. Raises Refusal if it can't be written."""
    try:
        return os.open(log, APPEND, 0o644)
    except OSError as problem:
        raise Refusal(f"the log {log} can't be written: {problem.strerror}", EX_CANTCREAT) from problem
