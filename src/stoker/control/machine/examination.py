"""Types for the results of a thorough examination of a host. A field is None if it could not be read."""

from __future__ import annotations

from typing import Any

from stoker.contract.frozen import as_json, frozen, replace
from stoker.contract.typed_values import read_frozen, read_recorded
from stoker.control.machine.model import Machine, machine_from_json

SCHEMA = 1

# The environment variables that an examination keeps: those known to matter.
KNOWN_VARIABLES = (
    "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_DEVICE_ORDER", "CUDA_LAUNCH_BLOCKING", "CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME", "LD_PRELOAD",
    "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NCCL_ALGO", "NCCL_BLOCKING_WAIT", "NCCL_BUFFSIZE", "NCCL_DEBUG",
    "NCCL_IB_DISABLE", "NCCL_IB_TIMEOUT", "NCCL_MAX_NCHANNELS", "NCCL_MIN_NCHANNELS", "NCCL_NTHREADS", "NCCL_P2P_DISABLE", "NCCL_PROTO",
    "NCCL_SHM_DISABLE", "NCCL_SOCKET_IFNAME", "NCCL_TIMEOUT", "NPROC_PER_NODE", "NUM_GPUS", "OMP_NUM_THREADS", "PYTHONHOME",
    "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING", "RANK", "STOKER_RUN_ID", "TOKENIZERS_PARALLELISM", "TORCHELASTIC_USE_AGENT_STORE",
    "TORCH_DISTRIBUTED_DEBUG", "TORCH_NCCL_BLOCKING_WAIT", "TORCH_USE_CUDA_DSA", "WORLD_SIZE",
)  # fmt: skip


@frozen
class GpuHealth:
    """The health of one GPU. A field that the GPU doesn't have is None."""

    temperature: int | None = None
    temperature_slowdown: int | None = None
    power: float | None = None  # watts
    power_limit: float | None = None
    throttle: tuple[str, ...] | None = None
    pcie_generation: int | None = None
    pcie_generation_max: int | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    ecc_uncorrected: int | None = None  # since the driver was loaded
    pages_pending: bool | None = None
    rows_pending: bool | None = None
    rows_failed: bool | None = None
    recovery: str | None = None  # none, reset, reboot, drain, drain and reset
    nvlinks: tuple[bool, ...] | None = None  # whether each link is up
    display: bool | None = None
    capability: str | None = None  # 9.0
    xids: tuple[int, ...] = ()
    peers: dict[str, str] | None = None  # UUID -> "ok", or why this GPU can't read the other one's memory


@frozen
class TorchBuild:
    """The torch of the Python that runs the ranks."""

    version: str | None = None
    cuda: str | None = None  # version that torch was built for
    archs: tuple[str, ...] = ()
    nccl: str | None = None
    seconds: float | None = None  # the time of `import torch`
    error: str | None = None


@frozen
class HostState:
    """Disk, limits and processes of the host."""

    shm_total: int | None = None
    shm_free: int | None = None
    disk_free: int | None = None  # bytes on the disk that runs are written to
    disk_path: str | None = None
    files_soft: int | None = None
    files_hard: int | None = None
    address_space: int | None = None  # RLIMIT_AS in bytes, if there is one
    stuck: tuple[str, ...] = ()  # processes in D state, as "pid name"
    zombies: int = 0
    swap_used: int | None = None
    clock: float | None = None  # seconds since the epoch


@frozen
class NetworkState:
    """Names, interfaces and the port of rank 0's store."""

    hostname: str | None = None
    addresses: tuple[str, ...] = ()  # the addresses that the host's own name resolves to
    interfaces: tuple[str, ...] = ()  # the interfaces that are up, without loopback
    port: int | None = None
    port_holder: str | None = None
    error: str | None = None
    slow_lookups: bool = False  # looking up the host's own name or address took more than examine_child.SLOW_S
    silent_servers: tuple[str, ...] = ()  # name servers that are not responding


@frozen
class GpuProbe:
    """The result of using a GPU in a child process: make a context, allocate memory, compute and check a product."""

    outcome: str  # ok, busy, full, dead, hung, wrong, absent
    detail: str = ""
    seconds: float | None = None
    left: int | None = None  # bytes in use on the GPU after the child's end, above what was in use before


@frozen
class Examination:
    machine: Machine
    health: dict[str, GpuHealth] | None = None  # by uuid
    probes: dict[str, GpuProbe] | None = None  # by uuid
    torch: TorchBuild | None = None
    host: HostState | None = None
    net: NetworkState | None = None
    environment: dict[str, str] | None = None  # values of KNOWN_VARIABLES
    missing: dict[str, str] | None = None  # part -> why it could not be examined
    schema: int = SCHEMA

    def to_json(self) -> dict[str, Any]:
        return dict(as_json(self))


def read_part(kind: type[Any], data: Any) -> Any:
    """Return one of the types above from its JSON, or None for None. Raises ValueError for an unknown field or a wrong type."""
    return None if data is None else read_frozen(kind, data)


def examination_from_json(data: Any) -> Examination:
    """Return the examination that `to_json` wrote. Raises ValueError for any other value."""
    machine = machine_from_json(data.get("machine") if isinstance(data, dict) else None)
    return replace(read_recorded(Examination, data, SCHEMA), machine=machine)
