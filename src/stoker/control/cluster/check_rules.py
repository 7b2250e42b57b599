"""The between.* rules, which find problems between hosts. A rule is a function that reads the facts and yields findings.

Also compares the program files of the hosts, as the agents' `files` probe reports them.
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
# Rates in bytes per second.
_SLOW_RATE = 25e6  # 200 Mbit/s, a fifth of gigabit Ethernet: a slower pair is always reported
_FAST_RATE = 375e6  # 3 Gbit/s: pairs faster than this differ because of their CPUs, which is no problem
_SLOW_SHARE = 0.33  # a pair is slow below this share of the best pair's rate
_MAX_STREAM_RATE = 1.3e9  # 10 Gbit/s: a single connection can't fill a faster link
_POOR_SHARE = 0.5  # a rate is poor below this share of what the link can carry
_PLURAL = {"does not answer": "do not answer", "is refused": "are refused"}

Rule = Callable[[ClusterFacts], Iterator[Finding]]
CHECKS: dict[str, Rule] = {}


def register_rule(id: str) -> Callable[[Rule], Rule]:
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


@register_rule("between.host")
def host(facts: ClusterFacts) -> Iterator[Finding]:
    """Fails if a host can't be reached."""
    for host in facts.hosts:
        if host.error and host.hole is None:  # between.mtu reports a hole
            yield fail(f"{host.name}: {host.error}", host.fix)


@register_rule("between.route")
def route(facts: ClusterFacts) -> Iterator[Finding]:
    """Fails if a host has no interface with a route to the others."""
    for host in facts.reachable:
        if host.address is None and len(facts.reachable) > 1:
            text = f"{host.name}: none of its interfaces has a route to the other hosts"
            yield fail(text, "set address: in the hosts file to the address at which the others reach it")


@register_rule("between.same-host")
def same_host(facts: ClusterFacts) -> Iterator[Finding]:
    """Fails if a machine is listed twice, under two names."""
    addresses = [host.address for host in facts.reachable if host.address]
    for address in sorted({address for address in addresses if addresses.count(address) > 1}):
        names = [host.name for host in facts.reachable if host.address == address]
        text = f"{join_names(names)} are the same machine, {address}"
        yield fail(text, "name it once in the hosts file, with the sum of its slots")


@register_rule("between.port-blocked")
def port_blocked(facts: ClusterFacts) -> Iterator[Finding]:
    """Fails if a host can't connect to another on the store's port or on an ephemeral one, as NCCL and gloo do."""
    for name, error in {pair.source: pair.error for pair in facts.pairs if pair.error}.items():
        yield fail(f"{name}: {error}", "give --master-port a port that is free on that host, or leave the flag out")
    blocked = [pair for pair in facts.pairs if pair.closed]
    if blocked and len(blocked) == len(facts.pairs) > 2 and not any(map(_open_ports, blocked)):
        network = "a network that isolates its members (guest Wi-Fi, a cloud's security group)"
        text = f"no host reaches any other: {_describe_closed(blocked[0])}"
        yield fail(text, f"allow TCP between them: the cause is a firewall on all hosts, or {network}")
        return
    for pair in blocked:
        reverse = facts.pair(pair.target, pair.source)
        other_way = ""
        if reverse and not reverse.closed:
            other_way = " (the other direction works)"
        elif reverse and not _open_ports(reverse):
            other_way = " (the other direction does not work either)"
        open_ports = _open_ports(pair)
        works = f", while port {join_names(open_ports)} is open" if open_ports else ""
        rejects = " that rejects" if all(why == "is refused" for why in pair.closed.values()) else ""
        text = f"{pair.source} → {pair.target}: {_describe_closed(pair)}{works}{other_way}: a firewall{rejects}"
        source = next((host.address for host in facts.hosts if host.name == pair.source and host.address), pair.source)
        fix = f"on {pair.target}, allow TCP from {source} to ports 1024-65535"
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


@register_rule("between.mtu")
def mtu(facts: ClusterFacts) -> Iterator[Finding]:
    """Fails if full-size packets are lost: such jobs connect, and then hang in their first all-reduce."""
    for host in facts.hosts:
        if host.hole is not None:
            text = f"this machine → {host.name}: small packets arrive, full-size ones are lost without an error message: an MTU black hole"
            fix = f"ip link set dev IFACE mtu {host.hole.passes} on both, or find what drops ICMP between them"
            largest = f"packets of up to {host.hole.passes} bytes arrive"
            yield fail(f"{text}; {largest}", f"{fix}; then check again, because nothing else could be checked on it")
    for pair in facts.pairs:
        if pair.big is False:
            largest = f"; packets of up to {pair.passes} bytes arrive" if pair.passes else ""
            source = next((host for host in facts.hosts if host.name == pair.source), None)
            size = f" ({source.mtu} bytes)" if source and source.mtu else ""
            device = source.interface if source and source.interface else "eth0"
            text = f"{pair.source} → {pair.target}: small messages arrive, full-size packets{size} are lost without an error message"
            fix = f"ip link set dev {device} mtu {pair.passes or 1280} on {pair.source} and {pair.target}"
            yield fail(f"{text}: an MTU black hole{largest}", f"{fix}, or find what drops ICMP between them")


@register_rule("between.mtu-differs")
def mtu_differs(facts: ClusterFacts) -> Iterator[Finding]:
    """Warns if the hosts' interfaces have different MTUs: the jumbo frames of one side are lost on the other."""
    sizes = {host.name: host.mtu for host in facts.reachable if host.mtu}
    if len(set(sizes.values())) > 1:
        listing = ", ".join(f"{name} {size}" for name, size in sizes.items())
        fix = f"ip link set dev IFACE mtu {min(sizes.values())} on the hosts where it is larger"
        yield warn(f"the interfaces have different MTUs: {listing}", fix)


@register_rule("between.hostname")
def hostname(facts: ClusterFacts) -> Iterator[Finding]:
    """Notes hostnames that are shared, unknown or loopback. They do no harm here, because Stoker passes addresses."""
    hosts = [host for host in facts.reachable if host.hostname]
    names = [host.hostname or "" for host in hosts]
    shared = sorted({name for name in names if names.count(name) > 1})
    for name in shared:
        nowhere = ", which resolves on no host" if all(not _resolved(host, name) for host in hosts) else ""
        owners = join_names([host.name for host in hosts if host.hostname == name])
        fix = "run `hostnamectl set-hostname NAME` on all but one of them"
        yield _note(f"{owners} share the hostname {name}{nowhere}", fix)
    loopback = [host for host in hosts if _is_loopback(_resolved(host, host.hostname or ""))]
    if loopback:
        texts = []
        for host in loopback:
            addresses = join_names(list(_resolved(host, host.hostname or "")))
            texts.append(f"{host.name}'s hostname {host.hostname} resolves to {addresses}")
        fixes = "; ".join(map(_hosts_entry, loopback))
        loopback_names = join_names([host.name for host in loopback])
        yield _note(f"{join_names(texts)}, which is loopback", f"in /etc/hosts on {loopback_names}, write: {fixes}")
    unresolved: dict[str, list[str]] = {}  # hostname -> the hosts that can't resolve it
    for name in names:
        failing = [host.name for host in hosts if name in (host.resolves or {}) and not _resolved(host, name)]
        if failing and name not in shared:
            unresolved[name] = failing
    if unresolved:
        hosts_text = f"on {join_names(next(iter(unresolved.values())))}" if len(unresolved) == 1 else "on all hosts"
        if len(hosts) > 1 and all(len(failing) == len(hosts) for failing in unresolved.values()):
            hosts_text = "on any host"
        fixes = "; ".join(_hosts_entry(host) for host in hosts if host.hostname in unresolved)
        subject, verb = ("hostnames", "do") if len(unresolved) > 1 else ("hostname", "does")
        text = f"the {subject} {join_names(list(unresolved))} {verb} not resolve {hosts_text}"
        yield _note(text, f"in /etc/hosts on every host, write: {fixes}")


def _resolved(host: HostFacts, name: str) -> tuple[str, ...]:
    return (host.resolves or {}).get(name, ())


def _hosts_entry(host: HostFacts) -> str:
    """Return the host's line for /etc/hosts."""
    return f"{host.address or 'ADDRESS'} {host.hostname or 'NAME'}"


def _is_loopback(addresses: tuple[str, ...]) -> bool:
    return bool(addresses) and all(address.startswith("127.") or address == "::1" for address in addresses)


def _note(text: str, fix: str) -> Finding:
    harm = "`stoker run` passes addresses and is not affected, but torchrun and bare gloo look names up and fail"
    return Finding("", "ok", f"{text}; {harm}", fix)


@register_rule("between.clock")
def clock(facts: ClusterFacts) -> Iterator[Finding]:
    """Warns if a clock is off by more than 1 s: logs, checkpoints and certificates need the right time."""
    skews = {host.name: (host.skew, host.skew_error or 0.0) for host in facts.reachable if host.skew is not None}
    if not skews:
        return
    median = sorted(skew for skew, _ in skews.values())[len(skews) // 2]
    for name, (skew, error) in skews.items():
        # With one or two hosts there is no majority, so this machine's clock is the reference.
        off = skew - (median if len(skews) > 2 else 0.0)
        if abs(off) - error > MAX_CLOCK_SKEW_S:
            reference = "the other hosts'" if len(skews) > 2 else "this machine's"
            direction = "ahead of" if off > 0 else "behind"
            yield warn(
                f"{name}: its clock is {_format_skew(abs(off))} {direction} {reference}",
                "run `timedatectl set-ntp true` there",
            )


def _format_skew(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"


@register_rule("between.slow-link")
def slow_link(facts: ClusterFacts) -> Iterator[Finding]:
    """Warns if a host or pair is far slower than the others, than its link speed, or than gradients need."""
    rates = {(pair.source, pair.target): pair.rate for pair in facts.pairs if pair.rate}
    best = max(rates.values(), default=0.0)
    slow = {ends: rate for ends, rate in rates.items() if _is_slow(facts, ends, rate, best)}
    fix = "check cable, switch port, duplex, and Wi-Fi in place of the cable, with `ethtool IFACE` and `ip -s link`"
    if slow and len(slow) == len(rates):
        yield warn(
            f"all pairs are slow, {format_bandwidth(min(slow.values()))} at worst; every step waits for the slowest pair",
            fix,
        )
        return
    for host in facts.reachable:
        pairs = {ends for ends in rates if host.name in ends}
        if len(pairs) > 2 and pairs <= set(slow):
            others = [rate for ends, rate in rates.items() if ends not in pairs]
            compared = f", the other pairs {format_bandwidth(min(others))} or more" if others else ""
            worst = format_bandwidth(min(slow[ends] for ends in pairs))
            yield warn(f"{host.name}: all its traffic moves at {worst}{compared}; every step waits for it", fix)
            slow = {ends: rate for ends, rate in slow.items() if ends not in pairs}
    for (source, target), rate in slow.items():
        compared = f"{format_bandwidth(rate)}, the best pair {format_bandwidth(best)}"
        yield warn(f"{source} → {target}: {compared}; every step waits for it", fix)


def _is_slow(facts: ClusterFacts, ends: tuple[str, str], rate: float, best: float) -> bool:
    speeds = [host.speed for host in facts.hosts if host.name in ends and host.physical and host.speed]
    link_rate = min(speeds, default=0) * 1e6 / 8
    if link_rate and link_rate <= _MAX_STREAM_RATE and rate < _POOR_SHARE * link_rate:
        return True
    return rate < _SLOW_RATE or (rate < _SLOW_SHARE * best and rate < _FAST_RATE)


@register_rule("between.all-reduce")
def all_reduce(facts: ClusterFacts) -> Iterator[Finding]:
    """Fails if an all-reduce with the hosts' own torch fails. Warns if it is far slower than a single connection."""
    trial = facts.reduce
    if trial is None:
        if len(facts.reachable) > 1 and not facts.quick:
            yield unknown("no all-reduce was tried; fix the findings above first")
        return
    if trial.error:
        fix = "see the findings above, or set NCCL_DEBUG=INFO or TORCH_DISTRIBUTED_DEBUG=DETAIL for details"
        yield fail(f"a {trial.backend} all-reduce over {trial.world} hosts failed: {trial.error}", fix)
        return
    rates = [pair.rate for pair in facts.pairs if pair.rate]
    if trial.bus and rates and trial.bus < _POOR_SHARE * min(rates) and min(rates) < _MAX_STREAM_RATE:
        one_stream = f"a single connection reaches {format_bandwidth(min(rates))}"
        text = f"the all-reduce moves {format_bandwidth(trial.bus)} per link, {one_stream}"
        yield warn(text, "run `stoker cluster check --hosts FILE --tune`, which tries settings that may help")


# ---- rules for values that must be the same on every host; findings name the hosts that differ from most ----


def find_outliers(values: dict[str, str]) -> dict[str, str]:
    """Return the hosts whose value is not the most frequent one. If two are equally frequent, the first host's counts."""
    if not values:
        return {}
    common = _most_frequent(values)
    return {host: value for host, value in values.items() if value != common}


def _most_frequent(values: Mapping[str, str]) -> str:
    return Counter(values.values()).most_common(1)[0][0]  # keeps the order of the hosts for equal counts


def _describe_difference(subject: str, values: dict[str, str]) -> str:
    """Return "10.0.0.3 has torch 2.12.0; the other 2 have 2.13.0", or "" if all are the same."""
    different = find_outliers(values)
    if not different:
        return ""
    common = _most_frequent(values)
    agreeing = [host for host, value in values.items() if value == common]
    by_value: dict[str, list[str]] = {}
    for host, value in different.items():
        by_value.setdefault(value, []).append(host)
    parts = [f"{join_names(names)} {_have(names)} {subject} {value}" for value, names in by_value.items()]
    others = join_names(agreeing) if len(agreeing) < 4 else f"the other {len(agreeing)}"
    return f"{'; '.join(parts)}; {others} {_have(agreeing)} {common}"


def _have(names: list[str]) -> str:
    return "has" if len(names) == 1 else "have"


@register_rule("between.torch")
def torch(facts: ClusterFacts) -> Iterator[Finding]:
    """Fails if the hosts have different torch builds, which hang, crash or disagree. Toolkit and driver may differ."""
    builds = {host.name: host.torch_build for host in facts.reachable if host.torch_build}
    text = _describe_difference("torch", builds)
    if text:
        version = next(iter(builds.values())).partition(",")[0].split("+")[0]
        yield fail(text, f"run `pip install torch=={version}` on all hosts, from the same index")


@register_rule("between.torch-missing")
def torch_missing(facts: ClusterFacts) -> Iterator[Finding]:
    """Fails if a host's Python can't import torch."""
    for host in facts.reachable:
        if host.torch is not None and host.torch.error:
            text = f"{host.name}: import torch fails: {host.torch.error}"
            yield fail(text, "set python: or venv: in the hosts file to the environment that has torch")


@register_rule("between.python")
def python(facts: ClusterFacts) -> Iterator[Finding]:
    """Warns if the Python minor versions differ: objects pickled by one rank are read by another."""
    versions = {host.name: ".".join(host.python.split(".")[:2]) for host in facts.reachable if host.python}
    text = _describe_difference("Python", versions)
    if text:
        yield warn(
            text, "use one Python version on all hosts, because broadcast_object_list and checkpoints use pickle"
        )


@register_rule("between.program")
def program(facts: ClusterFacts) -> Iterator[Finding]:
    """Fails if the script, or a file that it imports from its folder, differs between hosts. Names those files."""
    for line in facts.program:
        text, _, fix = line.removeprefix("host ").rpartition("; ")
        yield fail(text or fix, fix if text else "")


@register_rule("between.files")
def files(facts: ClusterFacts) -> Iterator[Finding]:
    """Fails if data, model or tokenizer are missing on a host or differ between hosts."""
    names = [name for host in facts.reachable for name in host.files or {} if name.startswith(("data ", "model "))]
    for label in dict.fromkeys(names):  # such as "data PATH"
        digests = {host.name: host.files.get(label, "") for host in facts.reachable if host.files is not None}
        missing = [name for name, digest in digests.items() if not digest]
        fix = f"use --stage {label.partition(' ')[2]} to copy it to every host"
        if missing:
            yield fail(f"{label} does not exist on {join_names(missing)}", fix)
        text = _describe_difference(label, {name: digest[:8] for name, digest in digests.items() if digest})
        if text:
            yield fail(f"{text}; the contents differ", fix)


@register_rule("between.speed-differs")
def speed_differs(facts: ClusterFacts) -> Iterator[Finding]:
    """Warns if link speeds differ: a port that fell back to 100 Mbit/s slows the whole job."""
    speeds = {host.name: host.speed for host in facts.reachable if host.physical and host.speed}
    slowest, fastest = min(speeds.values(), default=0), max(speeds.values(), default=0)
    if slowest < fastest:
        names = join_names([name for name, speed in speeds.items() if speed == slowest])
        text = f"{names}: the link speed is {slowest} Mbit/s, on other hosts {fastest}; every step waits for it"
        yield warn(text, "check cable and switch port, or set interface: in the hosts file")


# ---- comparing the program files of the hosts ----

_MAX_NAMES = 3  # a finding names this many files of a host


def missing_program_fix(script: str, folder: str, synced: bool) -> str:
    """Return what to do about a host that lacks the script. --sync copies `folder`, and has copied it if `synced`."""
    if not synced:
        return "copy it with --sync, or set workdir:"
    if os.path.relpath(os.path.join(folder, script), folder).startswith(os.pardir + os.sep):
        return f"move it below {folder}, which --sync copies"
    if os.path.isabs(script):
        return f"give its path relative to {folder}, which --sync copies to workdir:"
    return "--sync does not copy it: git ignores it, or it is in an excluded folder"


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
    """Return a text that names the changed, missing and extra files. The arguments map file names to hashes."""
    changed = [name for name in hashes if name in expected and hashes[name] != expected[name]]
    missing = [name for name in expected if name not in hashes]
    extra = [name for name in hashes if name not in expected]
    parts = []
    if changed:
        parts.append(f"{_list_first(changed)} differ{'s' if len(changed) == 1 else ''} from host {reference}'s")
    if missing:
        parts.append(f"does not have {_list_first(missing)}")
    if extra:
        parts.append(f"also has {_list_first(extra)}")
    return ", ".join(parts)


def _list_first(names: list[str]) -> str:
    shown = ", ".join(names[:_MAX_NAMES])
    return f"{shown} and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else shown
