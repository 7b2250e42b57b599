"""between.*, second half: what must be the same on every host. The odd ones out are named, not merely "they differ"."""

from __future__ import annotations

from collections.abc import Iterator

from stoker.contract.shapes import Finding
from stoker.control.cluster.between import between, listed
from stoker.control.cluster.facts import Facts, OneHost
from stoker.control.doctor.check import fail, warn


def usual(values: list[str]) -> str:
    """The value most hosts have; among equals the first host's."""
    return max(values, key=lambda value: (values.count(value), -values.index(value)))


def odd(values: dict[str, str]) -> dict[str, str]:
    """The hosts whose value is not the usual one."""
    if not values:
        return {}
    common = usual(list(values.values()))
    return {host: value for host, value in values.items() if value != common}


def _differ(what: str, values: dict[str, str]) -> str:
    """'10.0.0.3 has torch 2.12.0; the other 2 have torch 2.13.0'; empty where all agree."""
    strange = odd(values)
    if not strange:
        return ""
    common = usual(list(values.values()))
    rest = [host for host, value in values.items() if value == common]
    groups: dict[str, list[str]] = {}
    for host, value in strange.items():
        groups.setdefault(value, []).append(host)
    said = "; ".join(
        f"{listed(hosts)} {'has' if len(hosts) == 1 else 'have'} {what} {value}" for value, hosts in groups.items()
    )
    return (
        f"{said}; {listed(rest) if len(rest) < 4 else f'the other {len(rest)}'} {'has' if len(rest) == 1 else 'have'}"
        f" {common}"
    )


def build(host: OneHost) -> str:
    """What must match of a torch: version, CUDA build and NCCL."""
    torch = host.torch
    if torch is None or not torch.version:
        return ""
    parts = [torch.version, f"CUDA {torch.cuda}" if torch.cuda else "", f"NCCL {torch.nccl}" if torch.nccl else ""]
    return ", ".join(part for part in parts if part)


@between("between.torch")
def torch(facts: Facts) -> Iterator[Finding]:
    """One torch everywhere: unlike builds hang, crash or disagree. CUDA toolkit and driver may differ."""
    said = _differ("torch", {host.name: build(host) for host in facts.there if build(host)})
    if said:
        first = next(host for host in facts.there if build(host))
        yield fail(
            said,
            f"pip install torch=={(first.torch.version or '').split('+')[0] if first.torch else ''} on all, from the"
            " same index",
        )


@between("between.torch-missing")
def torch_missing(facts: Facts) -> Iterator[Finding]:
    """Every host's own Python imports torch."""
    for host in facts.there:
        if host.torch is not None and host.torch.error:
            text = f"{host.name}: import torch fails: {host.torch.error}"
            yield fail(text, "python: or venv: in the hosts file names the environment that has it")


@between("between.python")
def python(facts: Facts) -> Iterator[Finding]:
    """One Python minor version: objects pickled by one rank are read by another."""
    said = _differ("Python", {host.name: ".".join(host.python.split(".")[:2]) for host in facts.there if host.python})
    if said:
        yield warn(said, "one Python on all hosts; broadcast_object_list and checkpoints pickle")


@between("between.program")
def program(facts: Facts) -> Iterator[Finding]:
    """The script and what it imports from its folder have the same bytes everywhere; the files that differ are named."""
    for line in facts.program:
        said, _, fix = line.removeprefix("host ").rpartition("; ")
        yield fail(said or fix, fix if said else "")


@between("between.files")
def files(facts: Facts) -> Iterator[Finding]:
    """Data, model and tokenizer have the same bytes everywhere."""
    for what in dict.fromkeys(
        name for host in facts.there for name in host.files or {} if name.startswith(("data ", "model "))
    ):
        digests = {host.name: (host.files or {}).get(what, "") for host in facts.there if host.files is not None}
        missing = [name for name, digest in digests.items() if not digest]
        stage = f"--stage {what.partition(' ')[2]} copies it to every host"
        if missing:
            yield fail(f"{what} is not on {listed(missing)}", stage)
        said = _differ(what, {name: digest[:8] for name, digest in digests.items() if digest})
        if said:
            yield fail(f"{said}: not the same bytes", stage)


@between("between.speed-differs")
def speed_differs(facts: Facts) -> Iterator[Finding]:
    """Interfaces of one speed: a port that fell back to 100 Mbit/s slows the whole job."""
    stated = {host.name: f"{host.speed} Mbit/s" for host in facts.there if host.physical and host.speed}
    slowest = min((host.speed for host in facts.there if host.physical and host.speed), default=0)
    fast = max((host.speed for host in facts.there if host.physical and host.speed), default=0)
    if slowest < fast:
        slow = [name for name, value in stated.items() if value == f"{slowest} Mbit/s"]
        said = f"{listed(slow)}: the interface states {slowest} Mbit/s, others {fast}: every step waits for it"
        yield warn(said, "cable, switch port; interface: in the hosts file")
