"""torch.*: whether this torch fits the driver and the GPUs."""

from __future__ import annotations

from collections.abc import Iterator

from stoker.contract.evidence import Finding
from stoker.contract.text import is_digits
from stoker.contract.units import plural
from stoker.control.doctor.check import GpusWithHealth, check, fail, warn
from stoker.control.machine.examination import TorchBuild
from stoker.control.machine.model import Machine

# The oldest driver branch for each CUDA major version. Minor versions are compatible with each other.
_DRIVER_FOR_CUDA = {11: 450, 12: 525, 13: 580}
SLOW_IMPORT_S = 20.0


@check("torch.installed")
def installed(torch: TorchBuild) -> Iterator[Finding]:
    """Fails if torch can't be imported by the Python that will run the ranks."""
    if torch.error:
        text = f"`import torch` fails: {torch.error}"
        yield fail(text, "activate the right environment, or install it with pip install 'torch>=2.9'")


@check("torch.cuda-build")
def cuda_build(torch: TorchBuild, machine: Machine) -> Iterator[Finding]:
    """Fails if torch is built without CUDA although there are GPUs, or if the driver is too old for its CUDA."""
    if torch.error or not machine.gpus:
        return
    if torch.cuda is None:
        text = f"torch {torch.version} is built without CUDA and the machine has {plural(len(machine.gpus), 'GPU')}"
        yield fail(text, "install a CUDA build of torch")
        return
    required = _DRIVER_FOR_CUDA.get(int(torch.cuda.split(".")[0]))
    driver = machine.driver
    if required and driver and is_digits(driver.split(".")[0]) and int(driver.split(".")[0]) < required:
        text = (
            f"torch is built for CUDA {torch.cuda}, which needs driver {required} or newer; this machine has {driver}"
        )
        yield fail(text, "install a newer driver, or a torch built for an older CUDA")


@check("torch.arch")
def arch(torch: TorchBuild, gpus: GpusWithHealth) -> Iterator[Finding]:
    """Fails if torch has no code for a GPU: sm_120 (50-series) needs a build with CUDA 12.8 or newer."""
    for gpu, health in gpus if torch.archs else ():
        if health.capability is None:
            continue
        major, _, minor = health.capability.partition(".")
        if not _has_code_for(int(major), int(minor), torch.archs):
            available = f"torch {torch.version} has code for {', '.join(torch.archs)}"
            text = f"GPU {gpu.index} ({gpu.name}) is sm_{major}{minor}; {available}"
            yield fail(text, "install a torch built for this GPU", gpu.index)


def _has_code_for(major: int, minor: int, archs: tuple[str, ...]) -> bool:
    """Return whether a torch build with these archs runs on a GPU of this compute capability.

    Binary code needs the same major version and at most its minor version; PTX runs on anything newer.
    """
    for architecture in archs:
        kind, _, number = architecture.partition("_")
        digits = number.rstrip("af")
        if not is_digits(digits):
            continue
        have_major, have_minor = int(digits[:-1]), int(digits[-1])
        if kind == "sm" and have_major == major and have_minor <= minor:
            return True
        if kind == "compute" and (have_major, have_minor) <= (major, minor):
            return True
    return False


@check("torch.import-time")
def import_time(torch: TorchBuild) -> Iterator[Finding]:
    """Warns if `import torch` takes longer than 20 s: on a cold or remote disk every rank and every restart waits."""
    if torch.seconds is not None and torch.seconds > SLOW_IMPORT_S:
        yield warn(f"`import torch` takes {torch.seconds:.0f} s", "move the environment to a local disk")


@check("torch.nccl")
def nccl(torch: TorchBuild, machine: Machine) -> Iterator[Finding]:
    """Fails if there are several GPUs and torch has no NCCL."""
    if not torch.error and torch.cuda and len(machine.gpus) > 1 and torch.nccl is None:
        text = f"torch {torch.version} has no NCCL and the machine has {plural(len(machine.gpus), 'GPU')}"
        yield fail(text, "install the official build")
