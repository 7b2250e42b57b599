"""A job of several roles, as one run: the ranks of all its roles, the curves of the one that trains."""

from __future__ import annotations

import os

from stoker.contract import layout
from stoker.contract.quantities import counted
from stoker.contract.shape import replace
from stoker.control.record import finder, reader
from stoker.control.show.curves import Curve
from stoker.control.show.folder import RunFolder, roles_of
from stoker.control.show.snapshot import RUNNING, UNKNOWN, Rank, Run, whole

_LOOK_S = 1.0  # between two looks for roles that have been started
_TOLD = (
    "step",
    "total_steps",
    "loss",
    "tokens_per_s",
    "mfu",
    "grad_norm",
    "lr",
    "eta_s",
    "phase",
    "metrics",
    "problem",
)


def folder_of(record: reader.Run, whole_curves: bool = True) -> RunFolder:
    """As the run is: a job of roles, or a plain one."""
    made = JobFolder if record.mine and len(_planned(record)) > 1 else RunFolder
    return made(record, whole_curves)


def _planned(record: reader.Run) -> dict[str, int]:
    """Role -> the number that its first rank has in the job."""
    ranks = (record.data.get("plan") or {}).get("ranks")
    found: dict[str, int] = {}
    for one in ranks if isinstance(ranks, list) else ():
        if isinstance(one, dict) and isinstance(one.get("role"), str) and type(one.get("rank")) is int:
            found.setdefault(one["role"], one["rank"])
    return found


class JobFolder(RunFolder):
    def __init__(self, record: reader.Run, whole_curves: bool = True) -> None:
        super().__init__(record, whole_curves)
        self._roles: dict[str, RunFolder] = {}
        self._looked = 0.0

    def run(self, now: float, watched: bool) -> Run:
        made = super().run(now, watched)
        if now - self._looked >= _LOOK_S or now < self._looked:
            self._looked = now
            self._look()
        parts = {name: folder.run(now, watched) for name, folder in self._roles.items()}
        main = self._main
        if main is not None:
            learned = parts[main.record.name]
            made = replace(made, **{name: getattr(learned, name) for name in _TOLD}, curve=learned.curve)
        started = 1 + sum(made.restarts.values()) if parts else 0  # all roles together
        made = replace(made, attempts=max([started, *(part.attempts for part in parts.values())]))
        restarts = dict(made.restarts)
        for cause, count in ((cause, count) for part in parts.values() for cause, count in part.restarts.items()):
            restarts[cause] = restarts.get(cause, 0) + count
        doubts = [part.suspicion for part in parts.values() if part.suspicion is not None]
        going = made.state in (RUNNING, UNKNOWN)
        made = replace(made, restarts=restarts, suspicion=doubts[0] if doubts and going else None)
        if not watched:
            return made
        ranks = tuple(rank for rank in (self._rank_of(one, parts) for one in made.ranks))
        return replace(made, ranks=ranks, roles=roles_of(ranks))

    def _rank_of(self, planned: Rank, parts: dict[str, Run]) -> Rank:
        """With what its role's own run knows of it."""
        part = parts.get(planned.role)
        known = next((one for one in part.ranks if one.rank == planned.role_rank), None) if part is not None else None
        if known is None:
            return planned
        known = replace(known, rank=planned.rank, role=planned.role, role_rank=planned.role_rank)
        return known if known.phase else replace(known, phase=self._served(planned.role, planned.role_rank))

    def _served(self, role: str, replica: int) -> str:
        """A server makes no steps: what it has answered is how far it is."""
        counts = self.events.served.get(role, [])
        done = counts[replica] if 0 <= replica < len(counts) else None
        numbers = [whole(done.get(key)) for key in ("requests", "tokens")] if isinstance(done, dict) else []
        if not numbers or any(number is None or not 0 <= number < 10**18 for number in numbers):
            return ""
        requests, tokens = (number or 0 for number in numbers)
        return f"{counted(requests, 'request')}, {counted(tokens, 'token')}"

    def _look(self) -> None:
        for record in finder.look(os.path.join(self.record.dir, layout.ROLES)).runs:
            known = self._roles.get(record.name)
            if known is None or known.record.dir != record.dir:
                self._roles[record.name] = known = RunFolder(record, self._whole_curves)
            known.record = record

    @property
    def _main(self) -> RunFolder | None:
        """The role whose curves are the job's: one that makes steps."""
        found = [folder for folder in self._roles.values() if folder.trains]
        return found[0] if found else None

    def curve(self, name: str) -> Curve:
        main = self._main
        return main.curve(name) if main is not None else super().curve(name)
