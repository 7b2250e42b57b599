"""env.*: environment variables that slow training down, are left over, or do nothing."""

from __future__ import annotations

from collections.abc import Iterator

from stoker.contract.evidence import Finding
from stoker.control.doctor.check import check, warn

_SLOW = {
    "CUDA_LAUNCH_BLOCKING": "waits for every kernel; use it only for debugging",
    "NCCL_P2P_DISABLE": "sends all traffic between GPUs through host memory",
    "NCCL_SHM_DISABLE": "sends traffic on one machine through the network",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "makes every allocation a driver call",
    "NCCL_ALGO": "overrides the choice of NCCL, which is measured",
    "NCCL_PROTO": "overrides the choice of NCCL, which is measured",
    "NCCL_MAX_NCHANNELS": "slows NVLink down if it is small",
    "NCCL_NTHREADS": "is clamped to 64 to 512, so a smaller value has no effect",
    "NCCL_BUFFSIZE": "slows large all-reduces down if it is small",
    "TORCH_DISTRIBUTED_DEBUG": "checks every collective on the host if it is DETAIL",
}
_NOTHING = {
    "TORCH_USE_CUDA_DSA": (
        "does nothing at run time; device-side assertions need a build of torch with PYTORCH_USE_CUDA_DSA"
    ),
    "NCCL_TIMEOUT": "does not exist; pass timeout= to init_process_group",
    "NCCL_IB_TIMEOUT": "is an exponent for InfiniBand, not a timeout in milliseconds",
    "NCCL_BLOCKING_WAIT": "is called TORCH_NCCL_BLOCKING_WAIT now",
}
_OFF = ("", "0", "false", "no", "off")


@check("env.slow", fast=True)
def slow(environment: dict[str, str]) -> Iterator[Finding]:
    """Warns if a variable is set that makes training slower."""
    for name, why in _SLOW.items():
        value = environment.get(name)
        if value is not None and value.lower() not in _OFF:
            yield warn(f"{name}={value} {why}", f"unset {name}")


@check("env.nothing", fast=True)
def nothing(environment: dict[str, str]) -> Iterator[Finding]:
    """Warns if a variable is set that does not do what its name says."""
    for name, why in _NOTHING.items():
        if name in environment:
            yield warn(f"{name} {why}", f"unset {name}")


@check("env.noisy", fast=True)
def noisy(environment: dict[str, str]) -> Iterator[Finding]:
    """Warns if NCCL_DEBUG is still INFO or TRACE, which prints thousands of lines per start."""
    value = environment.get("NCCL_DEBUG", "")
    if value.upper() in ("INFO", "TRACE"):
        yield warn(f"NCCL_DEBUG={value} prints thousands of lines", "unset NCCL_DEBUG, or NCCL_DEBUG=WARN")


@check("env.stale-rank", fast=True)
def stale_rank(environment: dict[str, str]) -> Iterator[Finding]:
    """Warns if RANK, WORLD_SIZE and the like are left over from another launcher: a script started by hand would wait
    for peers that never come.
    """
    stale_names = [name for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE") if name in environment]
    if stale_names and "STOKER_RUN_ID" not in environment:
        verb = "is" if len(stale_names) == 1 else "are"
        yield warn(f"{', '.join(stale_names)} {verb} set outside a run", f"unset {' '.join(stale_names)}")


@check("env.agent-store", fast=True)
def agent_store(environment: dict[str, str]) -> Iterator[Finding]:
    """Warns if TORCHELASTIC_USE_AGENT_STORE=True is left over from torchrun: ranks wait for a missing store."""
    if environment.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "true":
        text = "TORCHELASTIC_USE_AGENT_STORE=True is inherited: ranks started by hand would wait for torchrun's store"
        yield warn(text, "unset TORCHELASTIC_USE_AGENT_STORE")


@check("env.python", fast=True)
def python(environment: dict[str, str]) -> Iterator[Finding]:
    """Warns if PYTHONHOME is set, which breaks virtual environments, or LD_PRELOAD, which changes every process."""
    for name, why in (("PYTHONHOME", "breaks virtual environments"), ("LD_PRELOAD", "is loaded into every rank")):
        value = environment.get(name)
        if value:
            yield warn(f"{name}={value} {why}", f"unset {name}")
