"""Lines of the kernel's log accuse a GPU or a process only by how they begin."""

from __future__ import annotations

import pytest

from stoker.contract.evidence import Evidence, ExitContext, RankExit
from stoker.control.machine import examine_child, kernel_log
from stoker.control.verdict.judge import judge

CRASH = "{}[6542]: segfault at 0 ip 000000000040161e sp 00007ffea3d870e0 error 6 in {}[161e,401000+78000] likely on CPU 0 (core 0, socket 0)"


SICK = "NVRM: Xid (PCI:0000:3b:00): 79, x"


SPENT = "Out of memory: Killed process 4242 (python)"


REAL_XID = "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."


REAL_KILL = "Out of memory: Killed process 4242 (python) total-vm:98304kB, anon-rss:61440kB, UID:0"


def verdict_with(kernel: str, code: int) -> str:
    end = RankExit(0, "", "GPU 0", 4242, code, 1.0, tail="CUDA error: x\n", around=ExitContext(kernel=(kernel,)))
    return judge(Evidence(world_size=1, ends=(end,))).cause


@pytest.mark.parametrize("started_as", ["a", SICK[:15], SPENT[:15]])
def test_the_name_of_a_crashed_program_accuses_no_gpu(started_as: str, monkeypatch: pytest.MonkeyPatch) -> None:
    forged = [CRASH.format(started_as, name) for name in (SICK, f"a): 79 process 4242 {SICK}", f"{SPENT} {SICK}")]
    monkeypatch.setattr(kernel_log, "read_messages", lambda since=0.0: iter(forged))
    assert examine_child._read_kernel_xids() == {}
    assert {verdict_with(line, -6) for line in forged} == {verdict_with("", -6)}
    monkeypatch.setattr(kernel_log, "read_messages", lambda since=0.0: iter([REAL_XID]))
    assert examine_child._read_kernel_xids() == {"0000:3b:00": [79]}
    assert verdict_with(REAL_XID, -6) == "gpu.lost"


@pytest.mark.parametrize("started_as", ["a", SPENT[:15]])
def test_the_name_of_a_crashed_program_kills_nobody(started_as: str) -> None:
    assert verdict_with(CRASH.format(started_as, SPENT), -9) == verdict_with("", -9) != "oom.host"
    assert verdict_with(REAL_KILL, -9) == "oom.host"
