"""A job of several roles: each is a run of its own below the job's, with its own world, ranks, attempts and verdict. Here it is
decided who starts when, what happens when one ends, and when the job is over.
"""

from __future__ import annotations

import os
import re
import selectors
import signal
import socket
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from stoker.contract import layout, names, redact
from stoker.contract.names import EX_SOFTWARE, EX_UNAVAILABLE, EX_USAGE, Refusal
from stoker.contract.quantities import counted, span
from stoker.contract.shape import pick, replace, shape
from stoker.contract.shapes import Verdict
from stoker.contract.terminal import WARNING
from stoker.contract.wholefile import write_json
from stoker.control.agent.kernel import set_name
from stoker.control.agent.reservations import GpuLocks
from stoker.control.cluster.hosts import Hosts
from stoker.control.launch import description, detach
from stoker.control.launch.coordinator import Coordinator, Ended
from stoker.control.launch.plan import Place, Role, RunPlan
from stoker.control.launch.request import Request
from stoker.control.launch.runplace import RunPlace, abandon, find_place
from stoker.control.machine.lockfiles import JOB
from stoker.control.machine.model import Gpu
from stoker.control.record.writer import RunRecord
from stoker.control.roles.placing import Card, Seat, deal, numbered
from stoker.control.roles.role import ALWAYS, AUTO, NEVER, RoleSpec, in_order, program, variable
from stoker.control.roles.role import JOB as WITH_JOB
from stoker.control.roles.run import ENDED, STARTING, UP, WAITING, Given, RoleRun
from stoker.control.verdict import launch

TICK_S = 0.1
LONGEST_WAIT_S = 30.0
LIVED_S = 60.0  # one that lived as long was no crash loop
LOOP, LOOP_S = 5, 600.0  # the same failure so often within this time is a loop
_CHANCE = ("rank.killed", "rank.signal", "hang.stopped")  # somebody's doing from outside: no sign of a loop
_LOST = re.compile(
    r"(?i)connect|refused|reset by peer|timed? ?out|unreachable|broken pipe|max retries|\beof\b|disconnected"
)
BEFORE_S = 60.0  # a role that failed this long before one that waits for it is the cause


@shape
class Plan:
    """`share`: role -> another whose GPUs it uses, too."""

    specs: tuple[RoleSpec, ...]
    share: Mapping[str, str] = {}


@shape
class Found:
    """What there is to run on."""

    cards: tuple[Card, ...]  # GPUs that can be used
    lines: tuple[str, ...]  # what to say of them
    hosts: tuple[str, ...] = ("",)  # in rank order
    described: Hosts | None = None  # None: this machine


class JobCoordinator(Coordinator):
    """A coordinator whose run is a job: it starts no agent, but runs."""

    def __init__(
        self,
        request: Request,
        plan: Plan,
        found: Found,
        report: detach.Report | None,
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
            redact.learn(spec.env, spec.command)
        if self._found.described is not None:
            redact.learn(self._found.described.env)

    def _run(self) -> Verdict | None:
        specs = self._plan.specs
        found = self._found
        dealt = deal(specs, found.cards, self._plan.share, found.hosts)
        if self.options.max_restarts < 0:
            raise Refusal(f"--max-restarts {self.options.max_restarts}: give a number from 0 up", EX_USAGE)
        place = find_place(self.request, os.environ)
        try:
            ports = free_ports(specs, here=found.described is None)
            shown = planned(specs, dealt, found.lines, found.hosts)
            if self.options.dry_run:
                self._print_plan(shown, place)
                return None
            environment = self._lock(dealt, place)
            self._record = RunRecord(place.dir, os.uname().nodename, place.reopened)
            about = description.describe(self.request, shown, place, {}, self._began)
            notice = self._record.begin(about)
        except BaseException:
            abandon(place)
            raise
        said = (place.elsewhere, place.notice, notice, *found.lines, *order_lines(specs, dealt, ports))
        for line in filter(None, said):
            self._say(line)
        if self._report is not None:
            self._report.started(place.dir)
        roles = [self._role(spec, dealt[spec.name], ports.get(spec.name, 0), place) for spec in in_order(specs, "", 0)]
        verdict = Running(self, self._record, roles, environment, self._locks.handles, place).run()
        self._close_record(verdict, place)
        return verdict

    def _role(self, spec: RoleSpec, seats: tuple[Seat, ...], port: int, place: RunPlace) -> RoleRun:
        o = self.options
        options = ["--hang-timeout", f"{o.hang_timeout:f}", "--on-nan", o.on_nan, "--show", o.show]
        options += ["--grace", f"{o.grace:f}"] if o.grace is not None else []
        options += ["--python", o.python] if o.python is not None else []
        for name in ("stage", "ssh_option"):
            options += [f"--{name.replace('_', '-')}={word}" for word in getattr(o, name)]
        for name in ("quiet", "no_preflight", "share_gpus", "isolate", "sync"):
            options += [f"--{name.replace('_', '-')}"] if getattr(o, name) else []
        restarts = o.max_restarts if spec.restart == NEVER else 0
        root, described = os.path.join(place.dir, layout.ROLES), self._found.described
        reached = {"": "127.0.0.1"}
        file = ""
        if described is not None:
            reached = {host.name: host.address or host.target for host in described.hosts}
            file = os.path.join(root, f"{spec.name}.hosts.json")
            os.makedirs(root, 0o700, exist_ok=True)
            write_json(file, hosts_file(described, seats))
        variables = {} if described is None else described.env
        env = (*(f"{name}={value}" for name, value in variables.items()), *o.env)
        given = Given(seats, port, restarts, tuple(options), reached, env, file)
        return RoleRun(spec, given, root, self._console)

    def _lock(self, dealt: Mapping[str, Sequence[Seat]], place: RunPlace) -> dict[str, str]:
        """For the whole job: while a server is replaced nobody else takes its GPU. Returns the roles' environment. On other
        hosts each role's own agent locks them.
        """
        cards = (card for seats in dealt.values() for seat in seats for card in seat.cards)
        uuids = list(dict.fromkeys(card.uuid for card in cards))
        if not uuids or self.options.share_gpus or self._found.described is not None:
            return dict(os.environ)
        self._locks.run_id = place.id
        set_name(JOB.encode())
        refused = self._locks.take(uuids)
        if refused:
            who = "; ".join(f"GPU {uuid} by {holder}" for uuid, holder in refused.items())
            raise Refusal(f"the GPUs are in use: {who}", EX_UNAVAILABLE, cause="gpu.busy")
        for notice in self._locks.notices:
            self._say(f"stoker: {notice}")
        return {**os.environ, names.GPU_LENDER: str(os.getpid())}


def hosts_file(described: Hosts, seats: Sequence[Seat]) -> dict[str, Any]:
    """The hosts of one role, with its share of their GPUs. Without the file's `env`: that may hold secrets, and goes another
    way.
    """
    entries = []
    for host in described.hosts:
        mine = [seat for seat in seats if seat.host == host.name]
        if not mine:
            continue
        known = pick(host, "user", "port", "identity", "python", "workdir", "interface", "address")
        entry = {"host": host.target, **{key: value for key, value in known.items() if value is not None}}
        entry |= {"slots": len(mine), "local": host.here}
        cards = [card.uuid for seat in mine for card in seat.cards]
        entries.append({**entry, **({"gpus": ",".join(cards)} if cards else {})})
    top = {"ssh_config": described.ssh_config, "ssh_options": list(described.ssh_options)}
    return {**{key: value for key, value in top.items() if value}, "hosts": entries}


def planned(
    specs: Sequence[RoleSpec], dealt: Mapping[str, Sequence[Seat]], lines: Sequence[str], hosts: Sequence[str]
) -> RunPlan:
    """For the record: all roles' ranks, numbered through the job."""
    places: list[Place] = []
    roles = []
    for spec in specs:
        there = Counter(seat.host for seat in dealt[spec.name])
        for number, (seat, local) in enumerate(numbered(dealt[spec.name])):
            gpus = [Gpu(card.index, card.uuid) for card in seat.cards]
            label = (f"{seat.host}/" if seat.host else "") + (gpus[0].label if gpus else f"CPU{local}")
            world = there[seat.host]
            at = hosts.index(seat.host)
            first, more = (gpus[0], tuple(gpus[1:])) if gpus else (None, ())
            places.append(Place(len(places), local, world, at, seat.host, first, label, spec.name, number, more))
        shim = "--no-python" not in program(spec.command)[0]
        roles.append(Role(spec.name, spec.command, spec.count, shim, 0, spec.env))
    return RunPlan(tuple(places), tuple(roles), tuple(hosts), False, False, {}, tuple(lines), {})


def order_lines(specs: Sequence[RoleSpec], dealt: Mapping[str, Sequence[Seat]], ports: Mapping[str, int]) -> list[str]:
    found = []
    for spec in specs:
        seats = dealt[spec.name]
        where = ", ".join(card.label for seat in seats for card in seat.cards)
        where = where or ", ".join(dict.fromkeys(seat.host for seat in seats if seat.host)) or "CPU"
        port = f", port {ports[spec.name]}" if spec.name in ports else ""
        most = max(number for _, number in numbered(seats))
        more = f"-{ports[spec.name] + most}" if port and most else ""
        after = f", after {' and '.join(spec.after)}" if spec.after else ""
        found.append(f"role {spec.name}: {counted(spec.count, 'rank')} on {where}{port}{more}{after}")
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


class Running:
    """The job under way."""

    def __init__(
        self,
        owner: JobCoordinator,
        record: RunRecord,
        roles: Sequence[RoleRun],
        environment: Mapping[str, str],
        handles: Sequence[int],
        place: RunPlace,
    ) -> None:
        self._roles = {role.name: role for role in roles}
        self._record, self._place = record, place
        self._say, self._signals = owner._say, owner._signals
        self._most_restarts = owner.options.max_restarts
        self._environment, self._handles = dict(environment), tuple(handles)
        self._selector = selectors.DefaultSelector()
        self._restarts = 0  # of the whole job
        self._outcome: Verdict | None = None  # known; what still runs is being stopped
        self._again = ""  # the role for whose failure all are started again
        self._stop = 0  # a signal that we got

    def run(self) -> Verdict:
        while True:
            self._start_those_that_can()
            for key, _ in self._selector.select(TICK_S):
                if not key.data.read(key.fd):
                    self._selector.unregister(key.fd)
            self._heed_signals()
            for role in self._roles.values():
                self._look_at(role)
            if all(role.child is None for role in self._roles.values()) and (self._outcome or self._again):
                if self._outcome is not None:
                    return replace(self._outcome, run=self._place.id)
                self._begin_again()
            if self._outcome is not None or self._again or self._stop:
                self._stop_the_rest()

    # ---- starting ----

    def _start_those_that_can(self) -> None:
        if self._outcome is not None or self._again or self._stop:
            return
        now = time.time()
        for role in self._roles.values():
            if role.state != WAITING or role.start_at > now:
                continue
            if all(self._roles[name].is_ready for name in role.spec.after):
                self._start(role)

    def _start(self, role: RoleRun) -> None:
        environment = {**self._environment, names.JOB: self._place.id}
        for other in self._roles.values():
            if other is not role and other.addresses:
                environment[variable(other.name)] = ",".join(f"{host}:{port}" for host, port in other.addresses)
        if self._exchanged():
            return
        self._record.event("role-start", role=role.name, start=role.starts)
        try:
            role.start(environment, self._handles)
        except OSError as problem:
            self._fail(
                role, Verdict("failed", "launch.not-started", f"it could not be started: {problem}", EX_SOFTWARE)
            )
            return
        for pipe in role.pipes:
            self._selector.register(pipe, selectors.EVENT_READ, role)
        if role.spec.ready is not None:
            self._say(f"stoker: role {role.name} is started; waiting for {role.spec.ready.words}")

    def _exchanged(self) -> bool:
        """Somebody has put another folder in the place of the job's: nothing is started or believed there."""
        try:
            self._record.require_place()
        except Refusal as refusal:
            self._outcome = self._outcome or replace(launch.refused(refusal), status="failed")
            return True
        return False

    # ---- following ----

    def _look_at(self, role: RoleRun) -> None:
        if role.child is None:
            return
        watching = role.watching
        if watching is not None:
            if not watching.run_dir and (run := role.find_record()) is not None:
                watching.run_dir = run.dir
            if role.state == STARTING and watching.ready.is_set():
                role.state, role.was_ready = UP, True
                took = time.time() - role.began
                self._record.event("role-ready", role=role.name, seconds=round(took, 3))
                self._say(f"✓ role {role.name} is ready after {span(took)}")
            rule = role.spec.ready
            assert rule is not None
            if role.state == STARTING and not role.stopping and time.time() - role.began > rule.timeout:
                found = f": {watching.newest}" if watching.newest else ""
                role.why = f"it was not ready after {span(rule.timeout)}: no {_short(rule.words)}{found}"
                role.send(signal.SIGTERM)
            if watching.unhealthy and not role.stopping:
                role.why = f"it no longer answers: {watching.unhealthy}"
                role.send(signal.SIGTERM)
        if role.collect():
            self._ended(role)

    def _ended(self, role: RoleRun) -> None:
        verdict = role.verdict
        assert verdict is not None
        if role.why and verdict.status != "failed":  # it had not ended by itself
            cause = "role.unhealthy" if "no longer" in role.why else "role.not-ready"
            verdict = role.verdict = Verdict("failed", cause, role.why, EX_SOFTWARE, evidence=role.last_lines)
        told = {"cause": verdict.cause, "status": verdict.status, "exit_code": verdict.exit_code}
        self._record.event("role-end", role=role.name, **told, summary=verdict.summary)
        if self._exchanged() or self._outcome is not None or self._again or self._stop:
            self._settle()
            return
        if verdict.status == "completed" and role.spec.restart != ALWAYS:
            self._say(f"✓ role {role.name}: {verdict.summary}")
            self._settle()
            return
        self._fail(role, verdict)

    def _settle(self) -> None:
        """Is the job over?"""
        if self._outcome is not None or self._again:
            return
        needed = [role for role in self._roles.values() if role.spec.required]
        if self._stop:
            if all(role.child is None for role in self._roles.values()):
                self._outcome = self._stopped_verdict()
            return
        if all(role.state == ENDED and role.is_ready for role in needed):
            ended = " and ".join(role.name for role in needed)
            others = [role.name for role in self._roles.values() if not role.spec.required]
            rest = f"; {' and '.join(others)} stopped" if others else ""
            self._outcome = Verdict("completed", "completed", f"{ended} ended with 0{rest}", 0)

    def _fail(self, role: RoleRun, verdict: Verdict) -> None:
        rule, now = role.spec.restart, time.time()
        role.failures = [one for one in role.failures if now - one[0] < LOOP_S] + [(now, verdict)]
        same = 0 if verdict.cause in _CHANCE else sum(one.cause == verdict.cause for _, one in role.failures)
        if rule == ALWAYS and verdict.status != "refused" and same < LOOP:
            worked = role.was_ready if role.spec.ready is not None else now - role.began > LIVED_S
            role.quick = 0 if worked else role.quick + 1
            wait = 0.0 if role.quick < 2 else min(LONGEST_WAIT_S, 2.0 ** (role.quick - 2))
            then = f" in {wait:.0f} s" if wait else ""
            self._say(f"stoker: role {role.name}: {verdict.summary}; starting it again{then}", colour=WARNING)
            self._record.event("role-restart", role=role.name, cause=verdict.cause, wait_s=wait)
            role.state, role.start_at = WAITING, now + wait
            return
        if rule == WITH_JOB and verdict.status != "refused" and self._restarts < self._most_restarts:
            self._restarts += 1
            times = f"({self._restarts} of {self._most_restarts})"
            line = f"role {role.name}: {verdict.summary}; starting all roles again {times}"
            self._say(f"stoker: {line}", colour=WARNING)
            self._record.event("restart", role=role.name, cause=verdict.cause, attempt=self._restarts)
            self._again = role.name
            return
        self._outcome = self._failed_verdict(role, verdict, same if rule == ALWAYS else 0)

    def _failed_verdict(self, role: RoleRun, verdict: Verdict, same: int) -> Verdict:
        """Of the role that is to blame: one that failed just before, and that this one waits for, comes first."""
        where = f"the role's own record: `stoker why {self._place.id}/{role.name}`"
        for name in role.spec.after:
            when, cause = self._roles[name].failures[-1] if self._roles[name].failures else (0.0, verdict)
            if role.failures[-1][0] - when >= BEFORE_S:
                continue
            if _LOST.search(verdict.summary):
                echo = f"then role {role.name}: {verdict.summary}"
                return self._of_role(name, replace(cause, evidence=(*cause.evidence, echo, where)))
            before = f"role {name} had failed {span(role.failures[-1][0] - when)} before: {cause.summary}"
            verdict = replace(verdict, evidence=(*verdict.evidence, before))
        if same >= LOOP:
            line = f"it failed {same} times within {span(LOOP_S)}: {verdict.summary}"
            evidence = (f"cause of each: {verdict.cause}", *verdict.evidence, where)
            return self._of_role(
                role.name,
                Verdict("failed", "role.restart-loop", line, verdict.exit_code, evidence=evidence, fix=verdict.fix),
            )
        return self._of_role(role.name, replace(verdict, evidence=(*verdict.evidence, where)))

    def _of_role(self, name: str, verdict: Verdict) -> Verdict:
        code, log = verdict.exit_code or EX_SOFTWARE, f"stoker logs {self._place.id} --role {name}"
        fix = tuple(line.replace("stoker logs", log) for line in verdict.fix)
        return replace(
            verdict, status="failed", summary=f"role {name}: {verdict.summary}", exit_code=code, rank=None, fix=fix
        )

    # ---- stopping ----

    def _heed_signals(self) -> None:
        while signum := self._signals.take():
            if signum == signal.SIGTSTP:
                self._suspend()
                continue
            name = signal.Signals(signum).name
            again = bool(self._stop)
            self._stop = self._stop or signum
            self._record.event("stop", signal=name, now=again)
            if again or signum == signal.SIGKILL:
                self._say(f"stoker: {name}: killing the ranks now")
                for role in self._roles.values():
                    role.hurry()
                continue
            self._say(f"stoker: {name}: asking the roles to save and end; a second signal kills them")
            self._settle()

    def _suspend(self) -> None:
        for role in self._living():
            role.pause()
        signal.raise_signal(signal.SIGSTOP)
        for role in self._living():
            role.resume()

    def _living(self, required: bool | None = None) -> list[RoleRun]:
        found = [role for role in self._roles.values() if role.child is not None]
        return [role for role in found if required is None or role.spec.required == required]

    def _stop_the_rest(self) -> None:
        """Those that the job is about first: they may need the others to save."""
        failed = self._outcome is not None and self._outcome.status == "failed"
        mine = self._living() if failed or self._again else self._living(required=True) or self._living()
        for role in mine:
            if not role.stopping:
                role.send(self._stop or signal.SIGTERM)

    def _begin_again(self) -> None:
        self._again = ""
        for role in self._roles.values():
            role.state, role.start_at = WAITING, 0.0

    def _stopped_verdict(self) -> Verdict:
        name = signal.Signals(self._stop).name
        told = {role.name: role.verdict.summary for role in self._roles.values() if role.spec.required and role.verdict}
        parts = [f"{role}: {text.removeprefix(f'stopped by {name}').lstrip('; ')}" for role, text in told.items()]
        summary = "; ".join([f"stopped by {name}", *parts])
        return Verdict("stopped", "launch.stopped", summary, 128 + self._stop)


def _short(words: str) -> str:
    return words.removeprefix("its ").removeprefix("an ").removeprefix("a ").removeprefix("the ")
