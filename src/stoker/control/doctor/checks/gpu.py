"""gpu.*: whether each GPU is there, free, healthy, and as fast as it should be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from stoker.contract.evidence import Finding
from stoker.contract.text import escape
from stoker.contract.units import format_bytes, format_duration, plural
from stoker.control.doctor.check import GpusWithHealth, check, fail, unknown, warn
from stoker.control.machine.examination import GpuProbe
from stoker.control.machine.model import Holder, Machine

DEAD = (
    "leave it out (stoker run --exclude-bad, or --gpus with the others), and restart the pod, not only the container; "
    "if that doesn't help, send the provider the file of `stoker doctor --bundle`"
)
# NVIDIA's Xid catalogue: meaning and recommended action.
XIDS = {
    48: ("double-bit ECC error", "reset the GPU or reboot; if it comes back, replace the GPU"),
    62: ("internal micro-controller halt", "reset the GPU or reboot"),
    64: ("row remapping failed", "replace the GPU"),
    74: ("NVLink error", "check the links; reset, then replace if it comes back"),
    79: ("GPU has fallen off the bus", "reboot the machine; then check the GPU's seat, power and riser"),
    95: ("uncontained ECC error", "reset the GPU before anything else uses it"),
    119: ("GSP firmware is not responding", "reset the GPU or reboot; a newer driver may help"),
    120: ("GSP firmware error", "reset the GPU or reboot; a newer driver may help"),
}
XID_WARN = {94: ("contained ECC error", "the job that had it must be restarted; watch for more")}


@check("gpu.driver", fast=True)
def driver(machine: Machine, missing: dict[str, str]) -> Iterator[Finding]:
    """Fails if the driver can't be used, or can't read a GPU."""
    if "machine" in missing:
        yield unknown(f"the NVIDIA driver could not be queried: {missing['machine']}")
    elif machine.gpu_error:
        text = f"the NVIDIA driver can't be used: {machine.gpu_error}"
        yield fail(text, "run nvidia-smi; if it reports the same, reboot or reinstall the driver")
    for gpu in machine.gpus:
        if gpu.error:
            yield fail(f"GPU {gpu.index} is not responding: {gpu.error}", DEAD, gpu=gpu.index)


@check("gpu.count", fast=True)
def count(environment: dict[str, str], machine: Machine, ranks: int) -> Iterator[Finding]:
    """Fails if CUDA_VISIBLE_DEVICES names a GPU that does not exist, or if there are fewer GPUs than ranks."""
    if not machine.gpus:  # the machine has no GPU, or its driver can't be used, which gpu.driver reports
        return
    existing = {str(gpu.index) for gpu in machine.gpus} | {gpu.uuid for gpu in machine.gpus}
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    names = [name.strip() for name in visible.split(",")] if visible and visible.strip() != "-1" else []
    for name in names:
        is_uuid_prefix = name.startswith(("GPU-", "MIG-")) and any(gpu.uuid.startswith(name) for gpu in machine.gpus)
        if name not in existing and not is_uuid_prefix:
            setting = f"CUDA_VISIBLE_DEVICES={escape(visible or '', 200)}"
            text = f"{setting}: there is no GPU {escape(name, 80)}; CUDA ignores it and all after it"
            yield fail(text, "unset CUDA_VISIBLE_DEVICES")
            break
    usable = len(names) if names else len(machine.gpus)
    if ranks and machine.gpus and ranks > usable:
        text = f"{plural(ranks, 'rank')} requested, {plural(usable, 'GPU')} found (invalid device ordinal)"
        yield fail(text, f"stoker run --nproc-per-node {usable} ...")


@check("gpu.compute-mode", fast=True)
def compute_mode(machine: Machine) -> Iterator[Finding]:
    """Warns if a GPU is in exclusive compute mode, where a second process gets CUDA error 46, "busy or unavailable".
    Fails if it is in prohibited mode.
    """
    for gpu in machine.gpus:
        if gpu.compute_mode == "prohibited":
            yield fail(
                f"GPU {gpu.index} is in prohibited mode: no process can use it",
                f"nvidia-smi -i {gpu.index} -c DEFAULT   # needs root",
                gpu=gpu.index,
            )
        elif gpu.compute_mode not in (None, "default"):
            yield warn(
                f"GPU {gpu.index} is in {gpu.compute_mode} mode: only one process can use it",
                f"nvidia-smi -i {gpu.index} -c DEFAULT   # needs root",
                gpu=gpu.index,
            )


def _describe_holder(holder: Holder) -> str:
    if holder.command is None:
        return f"pid {holder.pid}, held from outside this container"
    age = f", {format_duration(holder.age)} old" if holder.age is not None else ""
    run = f", run {holder.run}" if holder.run else ""
    return f"pid {holder.pid} ({holder.user}{age}{run}: {holder.command[:60]})"


@check("gpu.held", fast=True)
def held(machine: Machine) -> Iterator[Finding]:
    """Warns if other processes, also outside this container, hold memory of the GPU. Fails if less than 1 GB is free."""
    for gpu in machine.gpus:
        if gpu.memory_used is None or gpu.memory_total is None:
            continue
        share = gpu.memory_used / gpu.memory_total
        names = [_describe_holder(holder) for holder in gpu.holders or ()]
        if gpu.holders is not None and not gpu.holders and gpu.memory_used > 2 * 10**9:
            names = ["processes that are not visible here: a desktop, or processes outside this container"]
        if names and share > 0.02:
            fix = "ask the owner, or use --gpus any:N for the freest GPUs"
            if any(holder.run for holder in gpu.holders or ()):
                fix = "run `stoker clean` to see the processes of Stoker's runs"
            level = fail if gpu.memory_total - gpu.memory_used < 10**9 else warn
            amounts = f"{format_bytes(gpu.memory_used)} of {format_bytes(gpu.memory_total)}"
            text = f"GPU {gpu.index}: {amounts} in use by {'; '.join(names)}"
            yield level(text, fix, gpu=gpu.index)


@check("gpu.context")
def context(probes: dict[str, GpuProbe], machine: Machine) -> Iterator[Finding]:
    """Fails if a short-lived child can't create a CUDA context, allocate memory and compute a correct product."""
    for gpu in machine.gpus:
        probe = probes.get(gpu.uuid)
        if probe is None or probe.outcome == "ok":
            if probe is not None and (probe.left or 0) > 2 * 10**8:
                text = f"GPU {gpu.index}: {format_bytes(probe.left or 0)} more in use after the probe had ended"
                yield warn(text, "check whether another process has started; else the driver is slow", gpu=gpu.index)
            continue
        if probe.outcome == "busy":
            why = "its mode is default, so it is faulty or held by the driver"
            if gpu.compute_mode not in (None, "default"):
                why = f"it is in {gpu.compute_mode} mode"
            yield fail(
                f"GPU {gpu.index} is busy or unavailable (error 46): {why}",
                f"nvidia-smi -i {gpu.index} -c DEFAULT" if "mode" in why and "default" not in why else DEAD,
                gpu=gpu.index,
            )
        elif probe.outcome == "full":
            text = f"GPU {gpu.index} is full: {probe.detail}"
            yield fail(text, "`stoker doctor --only gpu.held` names the processes that hold it", gpu=gpu.index)
        elif probe.outcome == "hung":
            yield fail(f"GPU {gpu.index} hangs while a CUDA context is made: {probe.detail}", DEAD, gpu=gpu.index)
        elif probe.outcome == "wrong":
            yield fail(f"GPU {gpu.index} computes wrong results: {probe.detail}", DEAD, gpu=gpu.index)
        else:
            yield fail(f"GPU {gpu.index} is dead: {probe.detail}", DEAD, gpu=gpu.index)


@check("gpu.ecc")
def ecc(gpus: GpusWithHealth) -> Iterator[Finding]:
    """Fails if a GPU has uncorrected memory errors or a faulty row. Warns if rows or pages wait to be retired."""
    for gpu, health in gpus:
        if health.rows_failed:
            yield fail(f"GPU {gpu.index}: a faulty memory row could not be remapped", "replace the GPU", gpu=gpu.index)
        if health.ecc_uncorrected:
            text = f"GPU {gpu.index}: {health.ecc_uncorrected} uncorrected memory errors since the driver was loaded"
            yield fail(text, "reset the GPU, then watch it", gpu=gpu.index)
        if health.rows_pending or health.pages_pending:
            text = f"GPU {gpu.index}: memory is waiting to be taken out of use"
            yield warn(text, "reset the GPU or reboot when no process uses it", gpu=gpu.index)


@check("gpu.recovery")
def recovery(gpus: GpusWithHealth) -> Iterator[Finding]:
    """Fails if the driver requests a reset or a reboot."""
    for gpu, health in gpus:
        if health.recovery not in (None, "none"):
            text = f"GPU {gpu.index}: the driver requests this action: {health.recovery}"
            yield fail(text, "reset it (nvidia-smi --gpu-reset, needs root) or restart the pod", gpu=gpu.index)


@check("gpu.xid")
def xid(gpus: GpusWithHealth) -> Iterator[Finding]:
    """Fails or warns if the kernel's log has an Xid error of the driver, with NVIDIA's advice. Ignores Xids that an
    application causes (13, 31, 43 ...).
    """
    for gpu, health in gpus:
        for number, count in sorted(Counter(health.xids).items()):
            times = f", {count} times" if count > 1 else ""
            if number in XIDS:
                yield fail(f"GPU {gpu.index}: Xid {number} ({XIDS[number][0]}){times}", XIDS[number][1], gpu=gpu.index)
            elif number in XID_WARN:
                text = f"GPU {gpu.index}: Xid {number} ({XID_WARN[number][0]}){times}"
                yield warn(text, XID_WARN[number][1], gpu=gpu.index)


@check("gpu.throttle")
def throttle(gpus: GpusWithHealth) -> Iterator[Finding]:
    """Warns if heat or the power brake lowers the clock, or if the GPU is within 2 °C of its slowdown temperature."""
    for gpu, health in gpus:
        reasons = [reason for reason in health.throttle or () if reason != "power cap"]
        if reasons:
            heat = f" at {health.temperature} °C" if health.temperature is not None else ""
            text = f"GPU {gpu.index} is slowed down: {', '.join(reasons)}{heat}"
            yield warn(text, "check its fans, airflow and power cables", gpu=gpu.index)
        elif (
            health.temperature is not None
            and health.temperature_slowdown
            and health.temperature >= health.temperature_slowdown - 2
        ):
            text = f"GPU {gpu.index} is at {health.temperature} °C; it slows down at {health.temperature_slowdown} °C"
            yield warn(text, "check its fans and airflow", gpu=gpu.index)


@check("gpu.pcie")
def pcie(gpus: GpusWithHealth) -> Iterator[Finding]:
    """Warns if the GPU has fewer PCIe lanes than it and its slot support, or a lower generation under load. An idle GPU
    lowers the generation to save power.
    """
    for gpu, health in gpus:
        if health.pcie_width and health.pcie_width_max and health.pcie_width < health.pcie_width_max:
            text = f"GPU {gpu.index} runs with PCIe x{health.pcie_width} and supports x{health.pcie_width_max}"
            yield warn(text, "reseat the GPU; check the riser and the slot's lanes", gpu=gpu.index)
        generation, best = health.pcie_generation, health.pcie_generation_max
        if generation and best and generation < best and (gpu.utilization or 0) > 50:
            text = f"GPU {gpu.index} runs with PCIe generation {generation} under load and supports {best}"
            yield warn(text, "check the BIOS's PCIe setting", gpu=gpu.index)


@check("gpu.nvlink")
def nvlink(gpus: GpusWithHealth) -> Iterator[Finding]:
    """Warns if an NVLink is down while others of the GPU are up."""
    for gpu, health in gpus:
        links = health.nvlinks or ()
        if any(links) and not all(links):
            down = [str(n) for n, up in enumerate(links) if not up]
            text = f"GPU {gpu.index}: NVLink {', '.join(down)} of {len(links)} is down"
            yield warn(text, "run nvidia-smi nvlink -s, then reset the fabric or the bridge", gpu=gpu.index)


@check("gpu.p2p")
def p2p(gpus: GpusWithHealth, machine: Machine) -> Iterator[Finding]:
    """Warns if GPUs can't read each other's memory: traffic between ranks then goes through the host."""
    blocked = {
        frozenset((gpu.index, other.index)): why
        for gpu, health in gpus
        for other in machine.gpus
        if (why := (health.peers or {}).get(other.uuid)) not in (None, "ok", "unknown")
    }
    if blocked:
        pairs = ", ".join("-".join(str(n) for n in sorted(pair)) for pair in sorted(blocked, key=sorted))
        fix = "ignore this on consumer GPUs, which don't support it"
        if any("registry" in str(why) for why in blocked.values()):
            fix = "a driver setting forbids it: look for NVreg_RegistryDwords in /etc/modprobe.d"
        through = f"({next(iter(blocked.values()))}): all-reduce goes through host memory"
        yield warn(f"GPUs {pairs} can't use peer-to-peer {through}", fix)


@check("gpu.mig", fast=True)
def mig(machine: Machine) -> Iterator[Finding]:
    """Warns if a GPU is divided into MIG slices: NCCL can't join slices of one GPU, and a process sees only one slice."""
    sliced = sorted({gpu.index for gpu in machine.gpus if gpu.mig is not None})
    if sliced:
        verb = "is" if len(sliced) == 1 else "are"
        text = f"GPU {', '.join(map(str, sliced))} {verb} divided into MIG slices: NCCL can't join slices of one GPU"
        yield warn(text, "start one rank per slice, or turn MIG off with nvidia-smi -mig 0")


@check("gpu.display")
def display(gpus: GpusWithHealth) -> Iterator[Finding]:
    """Warns if the GPU drives a display: long kernels make the desktop stutter, and the desktop takes memory."""
    for gpu, health in gpus:
        if health.display:
            text = f"GPU {gpu.index} drives a display"
            yield warn(text, "leave it out for long runs, or expect a slow desktop", gpu=gpu.index)
