"""The between.* rules: problems that only show between hosts. Facts in, Findings out; a new rule is a function and its test.

Also compares the program of the hosts from the answers of the agents' `files` probe.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from stoker.contract.evidence import Finding
from stoker.contract.frozen import replace
from stoker.control.cluster.check_facts import ClusterFacts, HostFacts, PairFacts, format_bandwidth
from stoker.control.doctor.check import fail, unknown, warn

MAX_CLOCK_SKEW_S = 1.0
_SLOW = 25e6  # bytes per second: 200 Mbit/s, a fifth of the slowest wire still sold
_FAST = 375e6  # 3 Gbit/s: above it pairs differ because of their CPUs, which is no problem
_SLOW_SHARE = 0.33  # of the best pair
_ONE_STREAM = 1.3e9  # 10 Gbit/s: one connection can't fill a faster wire
_POOR_SHARE = 0.5  # of what the wire can carry
_PLURAL = {"does not answer": "do not answer", "is refused": "are refused"}

Rule = Callable[[ClusterFacts], Iterator[Finding]]
CHECKS: dict[str, Rule] = {}


def between(id: str) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        assert id not in CHECKS, id
        CHECKS[id] = rule
        return rule

    return register


def run_rules(facts: ClusterFacts, only: tuple[str, ...] = ()) -> list[Finding]:
    """Return the findings of all rules, or of those in `only`."""
    return [replace(finding, id=id) for id, rule in CHECKS.items() if not only or id in only for finding in rule(facts)]


def join_names(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


@between("between.host")
def host(facts: ClusterFacts) -> Iterator[Finding]:
    """Every host answers."""
    for host in facts.hosts:
        if host.error and host.hole is None:  # between.mtu explains a hole
            yield fail(f"{host.name}: {host.error}", host.fix)


@between("between.route")
def route(facts: ClusterFacts) -> Iterator[Finding]:
    """Every host has an interface that leads to the others."""
    for host in facts.there:
        if host.address is None and len(facts.there) > 1:
            text = f"{host.name}: none of its interfaces leads to the other hosts"
            yield fail(text, "set address: in the hosts file to where the others reach it")


@between("between.same-host")
def same_host(facts: ClusterFacts) -> Iterator[Finding]:
    """No machine is listed twice, under two names."""
    addresses = [host.address for host in facts.there if host.address]
    for address in sorted({address for address in addresses if addresses.count(address) > 1}):
        names = [host.name for host in facts.there if host.address == address]
        text = f"{join_names(names)} are one machine, {address}"
        yield fail(text, "name it once in the hosts file, with the sum of its slots")


@between("between.port-blocked")
def port_blocked(facts: ClusterFacts) -> Iterator[Finding]:
    """Each host reaches each other on the store's port and on an ephemeral one: NCCL and gloo use any above 1024."""
    for name, error in {pair.source: pair.error for pair in facts.pairs if pair.error}.items():
        yield fail(f"{name}: {error}", "--master-port with a port that is free there, or none")
    blocked = [pair for pair in facts.pairs if pair.closed]
    if blocked and len(blocked) == len(facts.pairs) > 2 and not any(map(_open_ports, blocked)):
        network = "a network that isolates its members (guest Wi-Fi, a cloud's security group)"
        text = f"no host reaches any other: {_describe_closed(blocked[0])}"
        yield fail(text, f"a firewall on all of them, or {network}")
        return
    for pair in blocked:
        reverse = facts.pair(pair.target, pair.source)
        other_way = ""
        if reverse and not reverse.closed:
            other_way = " (the other direction works)"
        elif reverse and not _open_ports(reverse):
            other_way = " (nor does the other direction)"
        open_ports = _open_ports(pair)
        works = f", while port {join_names(open_ports)} does" if open_ports else ""
        rejects = " that rejects" if all(why == "is refused" for why in pair.closed.values()) else ""
        text = f"{pair.source} → {pair.target}: {_describe_closed(pair)}{works}{other_way}: a firewall{rejects}"
        source = next((host.address for host in facts.hosts if host.name == pair.source and host.address), pair.source)
        fix = f"on {pair.target}, let TCP from {source} in on ports 1024-65535"
        yield fail(text, f"{fix}:   ufw allow proto tcp from {source}")


def _open_ports(pair: PairFacts) -> list[str]:
    return [str(port) for port in sorted(port for port, why in pair.ports.items() if not why)]


def _describe_closed(pair: PairFacts) -> str:
    """Return a text such as "ports 29500 and 41234 do not answer"."""
    closed = dict(sorted(pair.closed.items()))  # answers arrive in any order
    reasons = list(closed.values())
    if len(set(reasons)) > 1:
        return join_names([f"port {port} {why}" for port, why in closed.items()])
    ports = f"port{'s' if len(reasons) > 1 else ''} {join_names([str(port) for port in closed])}"
    if reasons[0] not in _PLURAL:
        return f"{ports}: {reasons[0]}"
    return f"{ports} {_PLURAL[reasons[0]] if len(reasons) > 1 else reasons[0]}"


@between("between.mtu")
def mtu(facts: ClusterFacts) -> Iterator[Finding]:
    """Full-size packets arrive too: where they are lost, jobs connect and then hang in their first all-reduce."""
    for host in facts.hosts:
        if host.hole is not None:
            text = f"this machine → {host.name}: small packets pass, full-size ones vanish without an error message: an MTU hole"
            fix = f"ip link set dev IFACE mtu {host.hole.passes} on both, or find what drops ICMP between them"
            passing = f"packets of up to {host.hole.passes} bytes pass"
            yield fail(f"{text}; {passing}", f"{fix}; nothing else could be checked on it")
    for pair in facts.pairs:
        if pair.big is False:
            largest = f"; packets of up to {pair.passes} bytes pass" if pair.passes else ""
            source = next((host for host in facts.hosts if host.name == pair.source), None)
            size = f" ({source.mtu} bytes)" if source and source.mtu else ""
            device = source.interface if source and source.interface else "eth0"
            text = f"{pair.source} → {pair.target}: small messages pass, full-size packets{size} vanish without an error message"
            fix = f"ip link set dev {device} mtu {pair.passes or 1280} on {pair.source} and {pair.target}"
            yield fail(f"{text}: an MTU hole{largest}", f"{fix}, or find what drops ICMP between them")


@between("between.mtu-differs")
def mtu_differs(facts: ClusterFacts) -> Iterator[Finding]:
    """The interfaces that lead to the others have one MTU: jumbo frames of one side are lost on the other."""
    sizes = {host.name: host.mtu for host in facts.there if host.mtu}
    if len(set(sizes.values())) > 1:
        listing = ", ".join(f"{name} {size}" for name, size in sizes.items())
        fix = f"ip link set dev IFACE mtu {min(sizes.values())} where it is larger"
        yield warn(f"the interfaces have different MTUs: {listing}", fix)


@between("between.hostname")
def hostname(facts: ClusterFacts) -> Iterator[Finding]:
    """Each hostname resolves to an address of its own. Only noted, because Stoker passes addresses, not names."""
    hosts = [host for host in facts.there if host.hostname]
    names = [host.hostname or "" for host in hosts]
    shared = sorted({name for name in names if names.count(name) > 1})
    for name in shared:
        nowhere = ", which resolves nowhere" if all(not _resolved(host, name) for host in hosts) else ""
        owners = join_names([host.name for host in hosts if host.hostname == name])
        fix = "hostnamectl set-hostname NAME on all but one of them"
        yield _note(f"{owners} share the hostname {name}{nowhere}", fix)
    loopback = [host for host in hosts if _is_loopback(_resolved(host, host.hostname or ""))]
    if loopback:
        texts = []
        for host in loopback:
            addresses = join_names(list(_resolved(host, host.hostname or "")))
            texts.append(f"{host.name}'s hostname {host.hostname} resolves to {addresses}")
        fixes = "; ".join(map(_hosts_entry, loopback))
        yield _note(f"{join_names(texts)}, which is loopback", f"in /etc/hosts there: {fixes}")
    unresolved: dict[str, list[str]] = {}  # hostname -> the hosts that can't resolve it
    for name in names:
        failing = [host.name for host in hosts if name in (host.resolves or {}) and not _resolved(host, name)]
        if failing and name not in shared:
            unresolved[name] = failing
    if unresolved:
        where = f"on {join_names(next(iter(unresolved.values())))}" if len(unresolved) == 1 else "on all hosts"
        if len(hosts) > 1 and all(len(failing) == len(hosts) for failing in unresolved.values()):
            where = "on any host"
        fixes = "; ".join(_hosts_entry(host) for host in hosts if host.hostname in unresolved)
        subject, verb = ("hostnames", "do") if len(unresolved) > 1 else ("hostname", "does")
        text = f"the {subject} {join_names(list(unresolved))} {verb} not resolve {where}"
        yield _note(text, f"in every /etc/hosts: {fixes}")


def _resolved(host: HostFacts, name: str) -> tuple[str, ...]:
    return (host.resolves or {}).get(name, ())


def _hosts_entry(host: HostFacts) -> str:
    """Return the host's line for /etc/hosts."""
    return f"{host.address or 'ADDRESS'} {host.hostname or 'NAME'}"


def _is_loopback(addresses: tuple[str, ...]) -> bool:
    return bool(addresses) and all(address.startswith("127.") or address == "::1" for address in addresses)


def _note(text: str, fix: str) -> Finding:
    harm = "no harm to `stoker run`, which passes addresses; torchrun and bare gloo look names up and fail"
    return Finding("", "ok", f"{text}: {harm}", fix)


@between("between.clock")
def clock(facts: ClusterFacts) -> Iterator[Finding]:
    """The clocks agree, as logs, checkpoints and certificates require. They are measured as NTP does."""
    skews = {host.name: (host.skew, host.skew_error or 0.0) for host in facts.there if host.skew is not None}
    if not skews:
        return
    median = sorted(skew for skew, _ in skews.values())[len(skews) // 2]
    for name, (skew, error) in skews.items():
        off = skew - (median if len(skews) > 2 else 0.0)  # of two hosts neither is the reference: this machine is
        if abs(off) - error > MAX_CLOCK_SKEW_S:
            reference = "the other hosts'" if len(skews) > 2 else "this machine's"
            direction = "ahead of" if off > 0 else "behind"
            yield warn(
                f"{name}: its clock is {_format_skew(abs(off))} {direction} {reference}", "timedatectl set-ntp true"
            )


def _format_skew(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"


@between("between.slow-link")
def slow_link(facts: ClusterFacts) -> Iterator[Finding]:
    """No host and no pair is far slower than the others, than its interface states, or than gradients need."""
    rates = {(pair.source, pair.target): pair.rate for pair in facts.pairs if pair.rate}
    best = max(rates.values(), default=0.0)
    slow = {ends: rate for ends, rate in rates.items() if _is_slow(facts, ends, rate, best)}
    fix = "cable, switch port, duplex, Wi-Fi instead of the wire: `ethtool IFACE`, `ip -s link`"
    if slow and len(slow) == len(rates):
        yield warn(
            f"all pairs are slow, {format_bandwidth(min(slow.values()))} at worst: every step waits for that", fix
        )
        return
    for host in facts.there:
        pairs = {ends for ends in rates if host.name in ends}
        if len(pairs) > 2 and pairs <= set(slow):
            others = [rate for ends, rate in rates.items() if ends not in pairs]
            compared = f", the other pairs {format_bandwidth(min(others))} or more" if others else ""
            worst = format_bandwidth(min(slow[ends] for ends in pairs))
            yield warn(f"{host.name}: all its traffic moves at {worst}{compared}: every step waits for it", fix)
            slow = {ends: rate for ends, rate in slow.items() if ends not in pairs}
    for (source, target), rate in slow.items():
        compared = f"{format_bandwidth(rate)}, the best pair {format_bandwidth(best)}"
        yield warn(f"{source} → {target}: {compared}: every step waits for it", fix)


def _is_slow(facts: ClusterFacts, ends: tuple[str, str], rate: float, best: float) -> bool:
    speeds = [host.speed for host in facts.hosts if host.name in ends and host.physical and host.speed]
    wire = min(speeds, default=0) * 1e6 / 8
    if wire and wire <= _ONE_STREAM and rate < _POOR_SHARE * wire:
        return True
    return rate < _SLOW or (rate < _SLOW_SHARE * best and rate < _FAST)


@between("between.all-reduce")
def all_reduce(facts: ClusterFacts) -> Iterator[Finding]:
    """An all-reduce with the hosts' own torch finishes, and uses what the link carries."""
    trial = facts.reduce
    if trial is None:
        if len(facts.there) > 1 and not facts.quick:
            yield unknown("no all-reduce was tried: fix the findings above first")
        return
    if trial.error:
        fix = "the findings above may say why; NCCL_DEBUG=INFO or TORCH_DISTRIBUTED_DEBUG=DETAIL says more"
        yield fail(f"a {trial.backend} all-reduce over {trial.world} hosts fails: {trial.error}", fix)
        return
    rates = [pair.rate for pair in facts.pairs if pair.rate]
    if trial.bus and rates and trial.bus < _POOR_SHARE * min(rates) and min(rates) < _ONE_STREAM:
        one_stream = f"a single connection {format_bandwidth(min(rates))}"
        text = f"the all-reduce moves {format_bandwidth(trial.bus)} a link, {one_stream}"
        yield warn(text, "stoker cluster check --hosts FILE --tune tries what may help")


# ---- what must be the same on every host; findings name the hosts that differ from most ----


def unusual(values: dict[str, str]) -> dict[str, str]:
    """Return the hosts whose value is not the most frequent one; among equally frequent ones the first host's counts."""
    if not values:
        return {}
    common = _most_frequent(values)
    return {host: value for host, value in values.items() if value != common}


def _most_frequent(values: Mapping[str, str]) -> str:
    return Counter(values.values()).most_common(1)[0][0]  # equal counts stay in the order of the hosts


def _describe_difference(what: str, values: dict[str, str]) -> str:
    """Return "10.0.0.3 has torch 2.12.0; the other 2 have 2.13.0", or "" if all are the same."""
    different = unusual(values)
    if not different:
        return ""
    common = _most_frequent(values)
    rest = [host for host, value in values.items() if value == common]
    by_value: dict[str, list[str]] = {}
    for host, value in different.items():
        by_value.setdefault(value, []).append(host)
    parts = [f"{join_names(names)} {_have(names)} {what} {value}" for value, names in by_value.items()]
    others = join_names(rest) if len(rest) < 4 else f"the other {len(rest)}"
    return f"{'; '.join(parts)}; {others} {_have(rest)} {common}"


def _have(names: list[str]) -> str:
    return "has" if len(names) == 1 else "have"


@between("between.torch")
def torch(facts: ClusterFacts) -> Iterator[Finding]:
    """All hosts have the same torch: different builds hang, crash or disagree. CUDA toolkit and driver may differ."""
    builds = {host.name: host.torch_build for host in facts.there if host.torch_build}
    text = _describe_difference("torch", builds)
    if text:
        version = next(iter(builds.values())).partition(",")[0].split("+")[0]
        yield fail(text, f"pip install torch=={version} on all, from the same index")


@between("between.torch-missing")
def torch_missing(facts: ClusterFacts) -> Iterator[Finding]:
    """Every host's own Python imports torch."""
    for host in facts.there:
        if host.torch is not None and host.torch.error:
            text = f"{host.name}: import torch fails: {host.torch.error}"
            yield fail(text, "python: or venv: in the hosts file names the environment that has it")


@between("between.python")
def python(facts: ClusterFacts) -> Iterator[Finding]:
    """All hosts have the same Python minor version: objects pickled by one rank are read by another."""
    versions = {host.name: ".".join(host.python.split(".")[:2]) for host in facts.there if host.python}
    text = _describe_difference("Python", versions)
    if text:
        yield warn(text, "one Python on all hosts; broadcast_object_list and checkpoints pickle")


@between("between.program")
def program(facts: ClusterFacts) -> Iterator[Finding]:
    """The script and what it imports from its folder have the same bytes everywhere; the files that differ are named."""
    for line in facts.program:
        text, _, fix = line.removeprefix("host ").rpartition("; ")
        yield fail(text or fix, fix if text else "")


@between("between.files")
def files(facts: ClusterFacts) -> Iterator[Finding]:
    """Data, model and tokenizer have the same bytes everywhere."""
    names = [name for host in facts.there for name in host.files or {} if name.startswith(("data ", "model "))]
    for what in dict.fromkeys(names):
        digests = {host.name: host.files.get(what, "") for host in facts.there if host.files is not None}
        missing = [name for name, digest in digests.items() if not digest]
        fix = f"--stage {what.partition(' ')[2]} copies it to every host"
        if missing:
            yield fail(f"{what} is not on {join_names(missing)}", fix)
        text = _describe_difference(what, {name: digest[:8] for name, digest in digests.items() if digest})
        if text:
            yield fail(f"{text}: not the same bytes", fix)


@between("between.speed-differs")
def speed_differs(facts: ClusterFacts) -> Iterator[Finding]:
    """All interfaces have one speed: a port that fell back to 100 Mbit/s slows the whole job."""
    speeds = {host.name: host.speed for host in facts.there if host.physical and host.speed}
    slowest, fastest = min(speeds.values(), default=0), max(speeds.values(), default=0)
    if slowest < fastest:
        names = join_names([name for name, speed in speeds.items() if speed == slowest])
        text = f"{names}: the interface states {slowest} Mbit/s, others {fastest}: every step waits for it"
        yield warn(text, "cable, switch port; interface: in the hosts file")


# ---- is the program the same on all hosts ----

_MAX_NAMES = 3  # files named per host


def missing_program_fix(script: str, folder: str, synced: bool) -> str:
    """Return what to do about a host that lacks the script. `folder` is what --sync copies, and did copy if `synced`."""
    if not synced:
        return "copy it with --sync, or set workdir:"
    if os.path.relpath(os.path.join(folder, script), folder).startswith(os.pardir + os.sep):
        return f"it is not below {folder}, which --sync copies"
    if os.path.isabs(script):
        return f"name it by its path below {folder}, which --sync copies to workdir:"
    return "--sync leaves it out: git ignores it, or it is in a folder that is not copied"


def program_differences(
    answers: Mapping[str, Mapping[str, Any]], script: str = "the script", missing_fix: str = ""
) -> list[str]:
    """Return a line for each host whose files differ from those of most hosts, and one for all that lack the script.

    `answers`: host -> answer of the `files` probe.
    """
    lines = [
        f"host {host}: {script} could not be compared: {answer['error']}"
        for host, answer in answers.items()
        if "error" in answer
    ]
    compared = {host: answer for host, answer in answers.items() if "error" not in answer}
    missing = [host for host, answer in compared.items() if not answer["names"]]
    if missing:
        names = f"host{'s' if len(missing) > 1 else ''} {', '.join(missing)}"
        fix = missing_fix or missing_program_fix(script, "", False)
        lines.append(f"{names}: {script} does not exist there; {fix}")
    digests = {host: answer["package"] for host, answer in compared.items() if host not in missing}
    if not digests:
        return lines
    common = _most_frequent(digests)
    reference = next(host for host, digest in digests.items() if digest == common)
    for host, digest in digests.items():
        if digest != common:
            difference = _file_differences(compared[host]["names"], compared[reference]["names"], reference)
            lines.append(f"host {host}: {difference}; copy it with --sync")
    return lines


def _file_differences(hashes: Mapping[str, str], expected: Mapping[str, str], reference: str) -> str:
    """Name the files that changed, are missing, or are extra. The arguments map file names to hashes."""
    changed = [name for name in hashes if name in expected and hashes[name] != expected[name]]
    missing = [name for name in expected if name not in hashes]
    extra = [name for name in hashes if name not in expected]
    parts = []
    if changed:
        parts.append(f"{_first(changed)} differ{'s' if len(changed) == 1 else ''} from host {reference}'s")
    if missing:
        parts.append(f"lacks {_first(missing)}")
    if extra:
        parts.append(f"has {_first(extra)} besides")
    return ", ".join(parts)


def _first(names: list[str]) -> str:
    shown = ", ".join(names[:_MAX_NAMES])
    return f"{shown} and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else shown
