"""oom.*: memory of the GPU and of the host."""

from __future__ import annotations

import signal

from stoker.control.verdict.catalogue import Case, Found, cause, entry

entry(
    "oom.ram-limit",
    "A rank's resident memory passed --ram-limit.",
    seen="the rank and its workers together hold more (PSS) than --ram-limit",
    contradicts="the sum of resident sizes is over but the proportional one is not: shared pages counted twice",
    fix=("fewer data-loader workers, a smaller batch, or a higher --ram-limit",),
)


@cause(
    "oom.host",
    seen="SIGKILL that Stoker did not send, and the cgroup's oom_kill counter rose or the kernel's log names the process",
    contradicts="neither of these: rank.killed, somebody sent it",
    fix=("fewer data-loader workers or ranks, or a machine with more memory", "--init-slots 1 loads models one after the other"),
)
def host(case: Case) -> Found | None:
    """The kernel killed a rank because the host, or the container, was out of memory."""
    end = case.end
    if end.code != -signal.SIGKILL or not end.oom_killed:
        return None
    steps = (f"it had reached step {end.steps}",) if end.steps else ()
    return Found(f"{case.who} was killed by the kernel: out of memory", ("wait status: killed by SIGKILL", *steps, "the cgroup's oom_kill counter went up"))
