"""between.*: what only shows between hosts. Facts in, Findings out; adding a check is adding a function and its test."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from stoker.contract.evidence import Finding
from stoker.contract.frozen import replace
from stoker.control.cluster.all_reduce_cost import gigabits
from stoker.control.cluster.check_facts import Facts, OneHost, Pair
from stoker.control.doctor.check import fail, unknown, warn

CLOCK_S = 1.0
SLOW_RATE = 25e6  # bytes a second: 200 Mbit/s, a fifth of the slowest wire anybody still sells
FAST_RATE = 375e6  # 3 Gbit/s: above it unlike pairs are no alarm, the processors make them so
SLOW_SHARE = 0.33  # of the best pair
FILLED = 1.3e9  # 10 Gbit/s: one connection can't fill a faster wire
_MANY = {"does not answer": "do not answer", "is refused": "are refused"}
POOR_SHARE = 0.5  # of what the link can carry, for the all-reduce

Body = Callable[[Facts], Iterator[Finding]]
CHECKS: dict[str, Body] = {}


def between(id: str) -> Callable[[Body], Body]:
    def register(body: Body) -> Body:
        assert id not in CHECKS, id
        CHECKS[id] = body
        return body

    return register


def findings(facts: Facts, only: tuple[str, ...] = ()) -> list[Finding]:
    return [replace(finding, id=id) for id, body in CHECKS.items() if not only or id in only for finding in body(facts)]


def listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


@between("between.host")
def host(facts: Facts) -> Iterator[Finding]:
    """Every host answers."""
    for one in facts.hosts:
        if one.error and one.hole is None:  # between.mtu knows better
            yield fail(f"{one.name}: {one.error}", one.fix)


@between("between.route")
def route(facts: Facts) -> Iterator[Finding]:
    """Every host knows an interface that leads to the others."""
    for one in facts.there:
        if one.address is None and len(facts.there) > 1:
            text = f"{one.name}: no interface of it leads to the other hosts"
            yield fail(text, "set address: in the hosts file to where the others reach it")


@between("between.same-host")
def same_host(facts: Facts) -> Iterator[Finding]:
    """No machine is in the list twice, under two names."""
    addresses = [one.address for one in facts.there if one.address]
    for address in sorted({address for address in addresses if addresses.count(address) > 1}):
        owners = [one.name for one in facts.there if one.address == address]
        text = f"{listed(owners)} are one machine, {address}"
        yield fail(text, "name it once in the hosts file, with the sum of its slots")


@between("between.port-blocked")
def port_blocked(facts: Facts) -> Iterator[Finding]:
    """Each host reaches each other on the store's and an ephemeral port: NCCL and gloo use any above 1024."""
    for name, error in {pair.source: pair.error for pair in facts.pairs if pair.error}.items():
        yield fail(f"{name}: {error}", "--master-port with a port that is free there, or none")
    shut = [pair for pair in facts.pairs if pair.closed]
    if shut and len(shut) == len(facts.pairs) > 2 and all(not _open(pair) for pair in shut):
        apart = "a network that keeps its members apart (guest Wi-Fi, a cloud's security group)"
        yield fail(f"no host reaches any other: {_how(shut[0])}", f"a firewall on all of them, or {apart}")
        return
    for pair in shut:
        back = facts.pair(pair.target, pair.source)
        way = ""
        if back and not back.closed:
            way = " (the other direction works)"
        elif back and not _open(back):
            way = " (nor does the other direction)"
        some = ", while port " + listed([str(port) for port in _open(pair)]) + " does" if _open(pair) else ""
        refused = all(why == "is refused" for why in pair.closed.values())
        address = _address(facts, pair.source)
        let = f"on {pair.target}, let TCP from {address} in on ports 1024-65535"
        text = f"{pair.source} → {pair.target}: {_how(pair)}{some}{way}: a firewall"
        yield fail(text + (" that rejects" if refused else ""), f"{let}:   ufw allow proto tcp from {address}")


def _open(pair: Pair) -> list[int]:
    return sorted(port for port, why in pair.ports.items() if not why)


def _how(pair: Pair) -> str:
    """ports 29500 and 41234 do not answer"""
    closed = dict(sorted(pair.closed.items()))  # answers come in any order
    whys = list(closed.values())
    if len(set(whys)) > 1:
        return listed([f"port {port} {why}" for port, why in closed.items()])
    ports = f"port{'s' if len(whys) > 1 else ''} {listed([str(port) for port in closed])}"
    if whys[0] not in _MANY:
        return f"{ports}: {whys[0]}"
    return f"{ports} {_MANY[whys[0]] if len(whys) > 1 else whys[0]}"


def _address(facts: Facts, name: str) -> str:
    return next((one.address for one in facts.hosts if one.name == name and one.address), name)


@between("between.mtu")
def mtu(facts: Facts) -> Iterator[Finding]:
    """Full-size packets arrive too: where they vanish, jobs connect and then hang in their first all-reduce."""
    for one in facts.hosts:
        if one.hole is not None:
            text = f"this machine → {one.name}: small packets pass, full-size ones vanish without an error message: an MTU hole"
            fix = f"ip link set dev IFACE mtu {one.hole.passes} on both, or find what drops ICMP between them"
            passing = f"packets of up to {one.hole.passes} bytes pass"
            yield fail(f"{text}; {passing}", f"{fix}; nothing else of it could be checked")
    for pair in facts.pairs:
        if pair.big is False:
            largest = f"; packets of up to {pair.passes} bytes pass" if pair.passes else ""
            source = next((one for one in facts.hosts if one.name == pair.source), None)
            full = f" ({source.mtu} bytes)" if source and source.mtu else ""
            device = source.interface if source and source.interface else "eth0"
            text = f"{pair.source} → {pair.target}: small messages pass, full-size packets{full} vanish without an error message"
            fix = f"ip link set dev {device} mtu {pair.passes or 1280} on {pair.source} and {pair.target}"
            yield fail(f"{text}: an MTU hole{largest}", f"{fix}, or find what drops ICMP between them")


@between("between.mtu-differs")
def mtu_differs(facts: Facts) -> Iterator[Finding]:
    """One MTU on all interfaces that lead to the others: jumbo frames on one side only are lost on the other."""
    sizes = {one.mtu for one in facts.there if one.mtu}
    if len(sizes) > 1:
        found = ", ".join(f"{one.name} {one.mtu}" for one in facts.there if one.mtu)
        text = f"the interfaces have different MTUs: {found}"
        yield warn(text, f"ip link set dev IFACE mtu {min(sizes)} where it is larger")


@between("between.hostname")
def hostname(facts: Facts) -> Iterator[Finding]:
    """Each hostname resolves to an address of its own. Only noted: Stoker passes addresses, not names."""
    there = [one for one in facts.there if one.hostname]
    names = [one.hostname or "" for one in there]
    shared = sorted({name for name in names if names.count(name) > 1})
    for name in shared:
        nowhere = ", which resolves nowhere" if all(not (one.resolves or {}).get(name) for one in there) else ""
        owners = listed([one.name for one in there if one.hostname == name])
        text = f"{owners} share the hostname {name}{nowhere}"
        yield _note(text, "hostnamectl set-hostname NAME on all but one of them")
    loops = [one for one in there if _loopback((one.resolves or {}).get(one.hostname or "", ()))]
    if loops:
        loopback = {one.name: listed(list((one.resolves or {})[one.hostname or ""])) for one in loops}
        said = listed([f"{one.name}'s hostname {one.hostname} resolves to {loopback[one.name]}" for one in loops])
        fixes = "; ".join(map(_entry, loops))
        yield _note(f"{said}, which is loopback", f"in /etc/hosts there: {fixes}")
    lost = {
        name: [one.name for one in there if name in (one.resolves or {}) and not (one.resolves or {})[name]]
        for name in names
        if name not in shared
    }
    lost = {name: seekers for name, seekers in lost.items() if seekers}
    if lost:
        everywhere = all(len(seekers) == len(there) for seekers in lost.values()) and len(there) > 1
        where = f"on {listed(next(iter(lost.values())))}" if len(lost) == 1 else "on all hosts"
        if everywhere:
            where = "on any host"
        fixes = "; ".join(_entry(one) for one in there if one.hostname in lost)
        many = len(lost) > 1
        text = f"the hostname{'s' if many else ''} {listed(list(lost))} {'do' if many else 'does'} not resolve {where}"
        yield _note(text, f"in every /etc/hosts: {fixes}")


def _entry(one: OneHost) -> str:
    """Return the host's line for /etc/hosts."""
    return f"{one.address or 'ADDRESS'} {one.hostname or 'NAME'}"


def _loopback(addresses: tuple[str, ...]) -> bool:
    return bool(addresses) and all(address.startswith("127.") or address == "::1" for address in addresses)


def _note(text: str, fix: str) -> Finding:
    harm = "no harm to `stoker run`, which passes addresses; torchrun and bare gloo look names up and fail"
    return Finding("", "ok", f"{text}: {harm}", fix)


@between("between.clock")
def clock(facts: Facts) -> Iterator[Finding]:
    """The clocks agree: logs, checkpoints and certificates go by them. Measured as NTP does it."""
    known = [one for one in facts.there if one.skew is not None]
    if not known:
        return
    middle = sorted(one.skew or 0.0 for one in known)[len(known) // 2]
    for one in known:
        off = (one.skew or 0.0) - (middle if len(known) > 2 else 0.0)
        if abs(off) - (one.skew_error or 0.0) > CLOCK_S:
            than = "the other hosts'" if len(known) > 2 else "this machine's"
            text = f"{one.name}: its clock is {_span(abs(off))} {'ahead of' if off > 0 else 'behind'} {than}"
            yield warn(text, "timedatectl set-ntp true")


def _span(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"


@between("between.slow-link")
def slow_link(facts: Facts) -> Iterator[Finding]:
    """No host and no pair is far slower than the others, than its interface says, or than gradients can bear."""
    known = [pair for pair in facts.pairs if pair.rate]
    best = max((pair.rate or 0.0 for pair in known), default=0.0)
    slow = {(pair.source, pair.target): pair.rate or 0.0 for pair in known if _is_slow(facts, pair, best)}
    fix = "cable, switch port, duplex, Wi-Fi instead of the wire: `ethtool IFACE`, `ip -s link`"
    if slow and len(slow) == len(known):
        yield warn(f"all pairs are slow, {gigabits(min(slow.values()))} at worst: every step waits for that", fix)
        return
    for one in facts.there:
        mine = {ends for ends in ((pair.source, pair.target) for pair in known) if one.name in ends}
        if len(mine) > 2 and mine <= set(slow):
            rest = [pair.rate or 0.0 for pair in known if (pair.source, pair.target) not in mine]
            others = f", the other pairs {gigabits(min(rest))} or more" if rest else ""
            moves = f"all that goes from and to it moves at {gigabits(min(slow[ends] for ends in mine))}"
            yield warn(f"{one.name}: {moves}{others}: every step waits for it", fix)
            slow = {ends: rate for ends, rate in slow.items() if ends not in mine}
    for (source, target), rate in slow.items():
        rates = f"{gigabits(rate)}, the best pair {gigabits(best)}"
        yield warn(f"{source} → {target}: {rates}: every step waits for it", fix)


def _is_slow(facts: Facts, pair: Pair, best: float) -> bool:
    rate = pair.rate or 0.0
    ends = [one for one in facts.hosts if one.name in (pair.source, pair.target) and one.physical and one.speed]
    wire = min((one.speed or 0 for one in ends), default=0) * 1e6 / 8
    if wire and wire <= FILLED and rate < POOR_SHARE * wire:
        return True
    return rate < SLOW_RATE or (rate < SLOW_SHARE * best and rate < FAST_RATE)


@between("between.all-reduce")
def all_reduce(facts: Facts) -> Iterator[Finding]:
    """An all-reduce with the hosts' own torch ends, and uses what the link carries."""
    reduce = facts.reduce
    if reduce is None:
        if len(facts.there) > 1 and not facts.quick:
            yield unknown("no all-reduce was tried: fix the findings above first")
        return
    if reduce.error:
        more = "the findings above may say why; NCCL_DEBUG=INFO or TORCH_DISTRIBUTED_DEBUG=DETAIL says more"
        yield fail(f"a {reduce.backend} all-reduce over {reduce.world} hosts fails: {reduce.error}", more)
        return
    rates = [pair.rate for pair in facts.pairs if pair.rate]
    if reduce.bus and rates and reduce.bus < POOR_SHARE * min(rates) and min(rates) < FILLED:
        said = f"the all-reduce moves {gigabits(reduce.bus)} a link, a single connection {gigabits(min(rates))}"
        yield warn(said, "stoker cluster check --hosts FILE --tune tries what may help")


# ---- what must be the same on every host: the odd ones out are named, not merely "they differ" ----


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
    others = listed(rest) if len(rest) < 4 else f"the other {len(rest)}"
    return f"{said}; {others} {'has' if len(rest) == 1 else 'have'} {common}"


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
        version = (first.torch.version or "").split("+")[0] if first.torch else ""
        yield fail(said, f"pip install torch=={version} on all, from the same index")


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
