"""Who takes part in a run with several hosts: which are lost, which are back, and whether enough are left. Lost ones
are tried again in the background, by a new connection each time; an agent that answers gets what --sync and --stage
brought the others, and waits for the next attempt.
"""

from __future__ import annotations

import os
import time
from typing import Any

from stoker.contract import layout
from stoker.contract.checkpoints import find_newest_checkpoint
from stoker.contract.errors import Refusal
from stoker.contract.evidence import Verdict
from stoker.contract.frozen import replace
from stoker.contract.terminal import WARNING
from stoker.contract.text import escape
from stoker.control.cluster.agent_pool import AgentClient, UnusableHosts, short_reason
from stoker.control.launch.attempt import Attempt
from stoker.control.launch.restart import Restart
from stoker.control.plan.run_dir import RunDir

TYPE_CHECKING = False
if TYPE_CHECKING:
    from stoker.control.cluster.file_sync import LateCopy
    from stoker.control.launch.host_setup import HostSetup
    from stoker.control.launch.live import LiveRun

AGAIN_S = 3.0
LONGEST_S = 60.0
ASK_S = 20.0
SAY_S = 2.0  # a copy that takes longer is mentioned
_MAX_FORMER = 64  # processes of 32 lives that are remembered: a host may come and go for weeks


class Lost:
    """A host that is out, and our tries to get it back."""

    def __init__(self, why: str, former: list[list[int]]) -> None:
        self.why = why
        self.former = former  # who may still be there of its former lives
        self.next_try = 0.0
        self.member: AgentClient | None = None  # the new life, on its way or waiting
        self.bringing: LateCopy | None = None
        self.mention_at = 0.0  # say then that a copy takes its time; 0: no more
        self.asked = False
        self.back = False  # it has answered, and is fit
        self.unfit = ""  # what was last wrong with it

    @property
    def ready(self) -> bool:
        return self.back and self.member is not None and not self.member.gone

    def remember(self, selves: list[list[int]]) -> None:
        """Remember the processes of its new life, too. The oldest have ended long ago, by the silence rule."""
        self.former = [*self.former, *selves][-_MAX_FORMER:]

    def part(self, next_try: float) -> None:
        """From its new life, which was none."""
        if self.bringing is not None:
            self.bringing.stop()
        self.member, self.bringing, self.back, self.asked, self.next_try = None, None, False, False, next_try


def _again(run_dir: str, who: str) -> str:
    """How the next attempt goes on, and from where. Only what is seen from here: hosts may have disks of their own."""
    saved = find_newest_checkpoint(run_dir)
    if saved is not None:
        return f"continuing with {who}; newest checkpoint: {escape(os.path.basename(saved.path))}"
    folder = escape(os.path.relpath(os.path.join(run_dir, layout.CHECKPOINTS)))
    own = "from the beginning unless your script loads a file of its own"
    how = "how a script saves and resumes: `stoker docs python`"
    return f"starting again with {who}, {own}: no complete checkpoint is seen in {folder} ({how})"


class Membership:
    def __init__(self, run: LiveRun, network: HostSetup) -> None:
        self._agents = run.agents
        self._members = run.agents.members
        self._network = network
        self._say = run.say
        self._tell = run.tell
        self._order = list(run.agents.by_name)
        self._least = run.options.min_hosts  # as it was asked for
        self._rejoins = run.options.rejoin != "never"
        self.lost: dict[str, Lost] = {}
        self.saves = False  # rank 0 has said that a checkpoint was saved
        self.joined: list[str] = []  # by the newest `settle`
        self._times: dict[str, int] = {}  # how often a host was lost: one that comes and goes is asked ever less often

    def meet(self, place: RunDir) -> None:
        """All must answer; with --min-hosts so many, and the others may come later."""
        try:
            self._agents.meet(place)
        except UnusableHosts as missing:
            if not self.start_without(missing):
                raise

    def start_without(self, missing: UnusableHosts) -> bool:
        """False: too few would be left, or all are wanted."""
        self.lose(missing)
        if not self._least or not self.enough:
            return False
        self.settle()
        for host, why in missing.hosts.items():
            self._say(
                f"stoker: host {host} can't be used: {short_reason(why)}; starting with {self.here}", colour=WARNING
            )
        return True

    def lose(self, gone: UnusableHosts) -> None:
        for member in self._members.all:
            if member.host in gone.hosts:
                member.lose(short_reason(gone.hosts[member.host]))

    @property
    def enough(self) -> bool:
        there = sum(not member.gone for member in self._members.all)
        return there + sum(one.ready for one in self.lost.values()) >= (self._least or len(self._order))

    @property
    def returned(self) -> str:
        """A host that waits to join; empty where there is none."""
        return next((name for name, one in self.lost.items() if one.ready), "")

    @property
    def here(self) -> str:
        return f"{len(self._members.all)} of {len(self._order)} hosts"

    def settle(self) -> bool:
        """Between attempts: who is gone is out, who is back is in (`joined`). Whether anything changed."""
        before = list(self._members.all)
        self.joined = []
        for member in before:
            if member.gone:
                self.give_up(member)
        for name in self._members.join([name for name, one in self.lost.items() if one.back], self._order):
            del self.lost[name]
            self.joined.append(name)
            self._tell("host-joined", on=name)
        return before != self._members.all

    def send_back(self, why: str) -> None:
        """Who joined just now: with them there is no plan. A returning host must not end a run that works without."""
        for member in [one for one in self._members.all if one.host in self.joined]:
            self.lost[member.host] = Lost(why, member.selves)
            self.lost[member.host].next_try = time.monotonic() + LONGEST_S
            self._members.drop(member)
            self._say(f"stoker: host {member.host} is back and stays out: {why}", colour=WARNING)
            self._tell("host-unfit", on=member.host, why=why)
        self.joined = []

    def give_up(self, member: AgentClient) -> None:
        why = short_reason(member.gone)
        times = self._times[member.host] = self._times.get(member.host, 0) + 1
        self.lost[member.host] = Lost(why, member.selves)
        if times > 1:
            self.lost[member.host].next_try = time.monotonic() + min(LONGEST_S, AGAIN_S * 2.0 ** min(times - 2, 8))
        self._members.drop(member)
        self._tell("host-lost", on=member.host, why=why)

    def regroup(self, verdict: Verdict, attempt: Attempt, run_dir: str) -> Restart | None:
        """The next attempt costs no restart where a host was lost and enough are left, or where one is to join."""
        if attempt.stop_signal:
            return None
        if verdict.cause == "launch.regroup":
            return Restart(_again(run_dir, f"host {attempt.regrouping}"))
        if verdict.cause == "host.lost" and self.enough:
            left = sum(not member.gone for member in self._members.all)
            hosts = f"{left} of {len(self._order)} hosts"
            return Restart(f"{verdict.summary}; {_again(run_dir, hosts)}")
        return None

    def too_few(self, verdict: Verdict) -> Verdict:
        rule = f"--min-hosts is {self._least}" if self._least else "without --min-hosts all are needed"
        left = f"{self.here} left, and {rule}"
        lost = "; ".join(f"{name}: {one.why}" for name, one in self.lost.items())
        fix = tuple(step for step in verdict.fix if not (self._least and step.startswith("--min-hosts ")))
        verdict = replace(verdict, retryable=False, evidence=(*verdict.evidence, lost), fix=fix)
        if verdict.cause != "host.lost":
            return replace(verdict, summary=f"{verdict.summary}; then {left}")
        if len(self.lost) == len(self._order) > 1:
            summary = f"all {len(self._order)} hosts are lost at once: is this machine's own network down?"
            return replace(verdict, host=None, summary=summary)
        return replace(verdict, summary=f"{verdict.summary}; {left}")

    def tend(self) -> None:
        """Called often. Starts what is due and returns at once."""
        if not self._rejoins:
            return
        now = time.monotonic()
        for name, one in self.lost.items():
            if one.member is None:
                if now >= one.next_try:
                    self._try(name, one)
            elif one.member.gone:
                one.remember(one.member.selves)
                self._members.drop(one.member)
                if one.back:
                    self._say(f"stoker: host {name} is lost again: {short_reason(one.member.gone)}", colour=WARNING)
                one.part(now + AGAIN_S)
            elif not one.back and "host" in one.member.answers:
                self._examine(name, one, one.member)

    def _try(self, name: str, one: Lost) -> None:
        one.next_try = time.monotonic() + AGAIN_S
        try:
            one.member = AgentClient(self._agents.reach(self._agents.by_name[name], again=True))
        except (OSError, Refusal):  # no process or descriptor to be had for a moment: the next try may
            return
        self._members.add(one.member, self._members.waiting)
        one.member.say(self._agents.open_order(name, one.former))

    def _examine(self, name: str, one: Lost, member: AgentClient) -> None:
        """It answers: has it what the others have? Back without its disk, it must not end a run that works."""
        if self._network.copies and not self._carried(name, one):
            return
        wrong = one.bringing.failure if one.bringing is not None else ""
        wanted = {} if wrong else self._network.fitness(name)
        if not one.asked:
            one.asked = True
            for what, args in wanted.items():
                member.say({"do": "probe", "ask": f"join-{what}", "what": what, "args": args, "seconds": ASK_S})
        if not set(wanted) <= set(member.probed):
            return
        wrong = wrong or self._network.unfit(member.probed)
        if not wrong:
            one.back, one.unfit = True, ""
            self._welcome(name, member.answers["host"])
            return
        if wrong != one.unfit:
            one.unfit = wrong
            self._say(f"stoker: host {name} is back and stays out: {wrong}", colour=WARNING)
            self._tell("host-unfit", on=name, why=wrong)
        one.remember(member.selves)
        self._members.drop(member)
        one.part(time.monotonic() + LONGEST_S / 4)

    def _carried(self, name: str, one: Lost) -> bool:
        """Is the copy to it over, well or not?"""
        if one.bringing is None:
            one.bringing, one.mention_at = self._network.copy_late(name), time.monotonic() + SAY_S
        if not one.bringing.over:
            if one.mention_at and time.monotonic() > one.mention_at:
                one.mention_at = 0.0
                self._say(f"stoker: host {name} answers; it gets what --sync and --stage brought the others")
            return False
        if one.bringing.brought and not one.asked:
            self._say(f"stoker: {one.bringing.brought}")
        return True

    def _welcome(self, name: str, answer: dict[str, Any]) -> None:
        found = answer.get("found") or []
        was = f" (there, {' and '.join(found)}: ended)" if found else ""
        self._tell("host-back", on=name, found=found)
        when = "at the next checkpoint or attempt"
        if not self.saves:
            when = (
                'at the next attempt, or once rank 0 has called stoker.mark("CHECKPOINT"), which it has not done so far'
            )
        self._say(f"stoker: host {name} is back{was}; it joins {when}")
