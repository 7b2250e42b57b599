"""A job of several roles, from its request to its verdict: each role is a run of its own below the job's, with its own world,
ranks, attempts and verdict.
"""

from __future__ import annotations

import os
import socket
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from stoker.contract import env_vars, layout
from stoker.contract.errors import EX_CONFIG, EX_DATAERR, EX_UNAVAILABLE, EX_USAGE, Refusal
from stoker.contract.evidence import Verdict
from stoker.contract.frozen import frozen, pick_fields, replace
from stoker.contract.masking import learn_secrets, mask_argv
from stoker.contract.safe_io import write_json
from stoker.contract.text import escape
from stoker.contract.units import plural
from stoker.control.agent.prctl import set_name
from stoker.control.cluster.hosts import NO_GPUS, Hosts
from stoker.control.launch import background
from stoker.control.launch.children import stoker_command
from stoker.control.launch.coordinator import Coordinator, Ended
from stoker.control.machine.gpu_lock import GpuLocks
from stoker.control.machine.model import Gpu
from stoker.control.plan import request, run_json
from stoker.control.plan.options import RunOptions
from stoker.control.plan.request import Request
from stoker.control.plan.run_changes import content_digests
from stoker.control.plan.run_dir import RunDir, discard_run_dir, open_run_dir
from stoker.control.plan.run_plan import RankPlan, RolePlan, RunPlan
from stoker.control.record.run_writer import RunWriter
from stoker.control.roles.gpu_sharing import GpuSharing
from stoker.control.roles.job import RunningJob
from stoker.control.roles.placement import GpuSlot, RankSlot, deal, numbered
from stoker.control.roles.role import AUTO, NEVER, RoleSpec, in_order, program, trains
from stoker.control.roles.role_process import RoleEnvironment, RoleRun


@frozen
class JobPlan:
    """`share`: role -> another whose GPUs it uses, too."""

    specs: tuple[RoleSpec, ...]
    share: Mapping[str, str] = {}


@frozen
class JobInputs:
    """What there is to run on."""

    cards: tuple[GpuSlot, ...]  # GPUs that can be used
    lines: tuple[str, ...]  # what to say of them
    hosts: tuple[str, ...] = ("",)  # in rank order
    described: Hosts | None = None  # None: this machine


class JobCoordinator(Coordinator):
    """A coordinator whose run is a job: it starts no agent, but runs."""

    def __init__(
        self,
        request: Request,
        plan: JobPlan,
        found: JobInputs,
        report: background.StartReport | None,
        ended: Ended | None,
    ) -> None:
        super().__init__(request, None, report, None, ended)
        self._plan, self._found = plan, found
        self._locks = GpuLocks("")

    def _open(self) -> None:
        pass  # every role has an agent of its own

    def _close(self) -> None:
        self._locks.release()

    def _learn_secrets(self) -> None:
        super()._learn_secrets()
        for spec in self._plan.specs:
            learn_secrets(spec.env, spec.command)
        if self._found.described is not None:
            learn_secrets(self._found.described.env)

    def _run(self) -> Verdict | None:
        specs = self._plan.specs
        found = self._found
        dealt = deal(specs, found.cards, self._plan.share, found.hosts)
        if self.options.max_restarts < 0:
            raise Refusal(f"--max-restarts {self.options.max_restarts}: give a number from 0 up", EX_USAGE)
        check_programs(specs, self.options, here=found.described is None)
        contents = (*(self.request.contents or ()), *_programs(specs, self.options))
        self.request = replace(self.request, contents=contents)
        place = open_run_dir(self.request, os.environ)
        try:
            ports = free_ports(specs, here=found.described is None)
            shown = planned(specs, dealt, found.lines, found.hosts)
            if self.options.dry_run:
                self._say_place(place)
                self._print_job(shown, place, order_lines(specs, dealt, ports))
                return None
            environment = self._lock(dealt, place)
            self._record = RunWriter(place.dir, os.uname().nodename, place.reopened)
            about = run_json.describe(self.request, shown, place, {}, self._began)
            notice = self._record.begin(about, place.first_attempt)
        except BaseException:
            discard_run_dir(place)
            raise
        said = (place.elsewhere, place.notice, notice, *found.lines, *order_lines(specs, dealt, ports))
        for line in filter(None, said):
            self._say(line)
        self._leave_shell(place)
        root = os.path.join(place.dir, layout.ROLES)
        seating = GpuSharing(
            specs, dealt, found.cards, found.hosts, self._plan.share, lambda spec, seats: self._write(root, spec, seats)
        )
        roles = [self._role(spec, seating, ports.get(spec.name, 0), root) for spec in in_order(specs, "", 0)]
        started_with = environment, self._locks.handles, self._console.terminal(2)
        running = RunningJob(
            roles, seating, self._record, place.id, self._signals, self._say, self.options.max_restarts, *started_with
        )
        verdict = running.run()
        self._close_record(verdict, place)
        return verdict

    def _print_job(self, plan: RunPlan, place: RunDir, order: Sequence[str]) -> None:
        if self.options.json:
            self._print_plan(plan, place)
            return
        lines = list(plan.lines)
        for role, line in zip(plan.roles, order, strict=True):
            lines.append(f"{line}: {' '.join(mask_argv(role.argv))}")
            for one in plan.places:
                if one.role == role.name:
                    cards = [gpu for gpu in (one.gpu, *one.more) if gpu is not None]
                    which = "; ".join(f"{gpu.name or 'GPU'} {gpu.uuid}" for gpu in cards)
                    lines.append(f"  rank {one.role_rank}  {one.label}{f'  {which}' if which else ''}")
        record = f"record: {os.path.relpath(place.dir, self._cwd)}"
        self._console.say(1, "\n".join(map(escape, (*lines, record))))

    def _role(self, spec: RoleSpec, seating: GpuSharing, port: int, root: str) -> RoleRun:
        o = self.options
        options = ["--hang-timeout", f"{o.hang_timeout:f}", "--busy-timeout", f"{o.busy_timeout:f}"]
        options += ["--on-nan", o.on_nan, "--show", o.show]
        options += ["--grace", f"{o.grace:f}"] if o.grace is not None else []
        options += ["--python", o.python] if o.python is not None else []
        for name in ("stage", "ssh_option"):
            options += [f"--{name.replace('_', '-')}={word}" for word in getattr(o, name)]
        for name in ("quiet", "no_preflight", "share_gpus", "isolate", "sync"):
            options += [f"--{name.replace('_', '-')}"] if getattr(o, name) else []
        restarts = o.max_restarts if spec.restart == NEVER else 0
        described = self._found.described
        reached = {"": "127.0.0.1"}
        if described is not None:
            reached = {host.name: host.address or host.target for host in described.hosts}
        variables = {} if described is None else described.env
        env = (*(f"{name}={value}" for name, value in variables.items()), *o.env)
        file = self._write(root, spec, seating.seats[spec.name])
        given = RoleEnvironment(port, restarts, tuple(options), reached, env, file)
        return RoleRun(spec, given, seating, root, self._console)

    def _write(self, root: str, spec: RoleSpec, seats: Sequence[RankSlot]) -> str:
        """Its hosts file; empty where it runs on this machine."""
        described = self._found.described
        if described is None:
            return ""
        path = os.path.join(root, f"{spec.name}.hosts.json")
        os.makedirs(root, 0o700, exist_ok=True)
        write_json(path, hosts_file(described, seats))
        return path

    def _lock(self, dealt: Mapping[str, Sequence[RankSlot]], place: RunDir) -> dict[str, str]:
        """For the whole job: while a server is replaced nobody else takes its GPU. Returns the roles' environment. On other
        hosts each role's own agent locks them.
        """
        cards = (card for seats in dealt.values() for seat in seats for card in seat.cards)
        uuids = list(dict.fromkeys(card.uuid for card in cards))
        if not uuids or self.options.share_gpus or self._found.described is not None:
            return dict(os.environ)
        self._locks.run_id = place.id
        set_name(b"stoker-job")  # shown to others as the holder
        refused = self._locks.take(uuids)
        if refused:
            who = "; ".join(f"GPU {uuid} by {holder}" for uuid, holder in refused.items())
            raise Refusal(f"the GPUs are in use: {who}", EX_UNAVAILABLE, cause="gpu.busy")
        for notice in self._locks.notices:
            self._say(f"stoker: {notice}")
        return {**os.environ, env_vars.GPU_LENDER: str(os.getpid())}


def check_programs(specs: Sequence[RoleSpec], options: RunOptions, here: bool) -> None:
    """Before anything starts: a trainer that is not there should not be known only when its server has loaded a model."""
    for spec in specs:
        if trains(spec.command):
            if spec.after and here:
                _check_training(spec)
            continue
        try:
            request.program(_role_request(spec, options))
        except Refusal as refusal:
            line, *more = refusal.line.removeprefix("--no-python: ").split("\n")
            raise Refusal(f"role {spec.name}: {line}", refusal.code, cause=refusal.cause, more=more) from refusal


def _role_request(spec: RoleSpec, options: RunOptions) -> Request:
    """Return a role's command as a request of its own. `options`: the job's."""
    flags, words = program(spec.command)
    python = flags[flags.index("--python") + 1] if "--python" in flags else options.python
    own = replace(options, no_python="--no-python" in flags, module="--module" in flags, python=python)
    return Request(own, words[0], tuple(words[1:]), frozenset())


def _programs(specs: Sequence[RoleSpec], options: RunOptions) -> tuple[tuple[str, str], ...]:
    """Return the digests of the roles' programs. A role that is a `stoker train` compares its own inputs when it starts."""
    programs = (_role_request(spec, options) for spec in specs if not trains(spec.command))
    return tuple(pair for request in programs for pair in content_digests(request))


def _check_training(spec: RoleSpec) -> None:
    """One that waits for others: a wrong flag or setting should not be known only when they are ready. What is missing may be
    made by them.
    """
    words = [*spec.command[1:], "--nproc-per-node", str(spec.count), "--dry-run"]
    done = subprocess.run(stoker_command(words), capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if done.returncode in (EX_USAGE, EX_DATAERR, EX_CONFIG):
        said = [line for line in done.stderr.splitlines() if line.startswith("stoker: ")]
        line = said[-1].removeprefix("stoker: ") if said else f"its dry run ended with {done.returncode}"
        raise Refusal(f"role {spec.name}: {line}", done.returncode)


def hosts_file(described: Hosts, seats: Sequence[RankSlot]) -> dict[str, Any]:
    """The hosts of one role, with its share of their GPUs. Without the file's `env`: that may hold secrets, and goes another
    way.
    """
    entries = []
    for host in described.hosts:
        mine = [seat for seat in seats if seat.host == host.name]
        if not mine:
            continue
        known = pick_fields(host, "user", "port", "identity", "python", "workdir", "interface", "address")
        entry = {"host": host.target, **{key: value for key, value in known.items() if value is not None}}
        entry |= {"slots": len(mine), "local": host.here}
        cards = [card.uuid for seat in mine for card in seat.cards]
        entries.append({**entry, "gpus": ",".join(cards) or NO_GPUS})
    top = {
        "ssh_config": described.ssh_config,
        "ssh_options": list(described.ssh_options),
        "scheduler": described.scheduler or None,
    }
    return {**{key: value for key, value in top.items() if value}, "hosts": entries}


def planned(
    specs: Sequence[RoleSpec], dealt: Mapping[str, Sequence[RankSlot]], lines: Sequence[str], hosts: Sequence[str]
) -> RunPlan:
    """For the record: all roles' ranks, numbered through the job."""
    places: list[RankPlan] = []
    roles = []
    for spec in specs:
        there = Counter(seat.host for seat in dealt[spec.name])
        for number, (seat, local) in enumerate(numbered(dealt[spec.name])):
            gpus = [Gpu(card.index, card.uuid, card.name) for card in seat.cards]
            label = (f"{seat.host}/" if seat.host else "") + (gpus[0].label if gpus else f"CPU{local}")
            world = there[seat.host]
            at = hosts.index(seat.host)
            first, more = (gpus[0], tuple(gpus[1:])) if gpus else (None, ())
            places.append(RankPlan(len(places), local, world, at, seat.host, first, label, spec.name, number, more))
        shim = "--no-python" not in program(spec.command)[0]
        roles.append(RolePlan(spec.name, spec.command, spec.count, shim, 0, spec.env))
    return RunPlan(tuple(places), tuple(roles), tuple(hosts), False, False, {}, tuple(lines), {})


def order_lines(
    specs: Sequence[RoleSpec], dealt: Mapping[str, Sequence[RankSlot]], ports: Mapping[str, int]
) -> list[str]:
    found = []
    for spec in specs:
        seats = dealt[spec.name]
        where = ", ".join(card.label for seat in seats for card in seat.cards)
        where = where or ", ".join(dict.fromkeys(seat.host for seat in seats if seat.host)) or "CPU"
        port = ""
        if spec.name in ports:
            first = ports[spec.name]
            last = first + max(number for _, number in numbered(seats))
            port = f", port {first}" if first == last else f", ports {first}-{last}"
        after = f", after {' and '.join(spec.after)}" if spec.after else ""
        found.append(f"role {spec.name}: {plural(spec.count, 'rank')} on {where}{port}{after}")
    return found


def free_ports(specs: Sequence[RoleSpec], here: bool = True) -> dict[str, int]:
    """Role -> the port of its first replica; the others have those that follow. Free now: nobody can promise more. Not `here`:
    what is free on other hosts is not known.
    """
    found: dict[str, int] = {}
    used: set[int] = set()
    for spec in specs:
        if not spec.port:
            continue
        wanted = _free(spec.count, used) if spec.port == AUTO else spec.port
        ports = set(range(wanted, wanted + spec.count))
        if max(ports) > 65535 or ports & used:
            raise Refusal(f"role {spec.name}: port {wanted} and the {spec.count - 1} after it can't be used", EX_USAGE)
        busy = [port for port in sorted(ports) if here and not _is_free(port)]
        if busy:
            fix = "write port: auto for a free one"
            line = f"role {spec.name}: port {busy[0]} is in use by another program; {fix}"
            raise Refusal(line, EX_UNAVAILABLE, cause="launch.port-in-use")
        used |= ports
        found[spec.name] = wanted
    return found


def _is_free(port: int) -> bool:
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # of a server that has just ended
        try:
            one.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _free(count: int, used: set[int]) -> int:
    """The first of so many in a row."""
    for _ in range(100):
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            first = int(one.getsockname()[1])
        ports = range(first, first + count)
        if ports[-1] <= 65535 and used.isdisjoint(ports) and all(map(_is_free, ports)):
            return first
    raise Refusal(f"no {count} free ports in a row", EX_UNAVAILABLE, cause="launch.port")
