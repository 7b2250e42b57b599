"""One rank's signs of progress, and how long it may be silent before somebody should look. Pure.

Times are the coordinator's own monotonic clock at the moment of hearing: no clock of another host is compared.
"""

from __future__ import annotations

from collections import deque

from stoker.contract.env_vars import WAITING_PHASE

FLOOR_S = 3.0  # between steps of a training that runs
K = 5.0  # times the rolling p99 of its own gaps
FIRST_STEPS_S = 30.0  # while it compiles: the second and third step may do it again
PHASE_S = 60.0  # in an announced phase (eval, save ...)
IDLE_S = 6.0  # before the first step, for a job in which nothing at all happens
START_S = 120.0  # before the first step, for a rank that is idle while others work
ACTIVE_CPU = 0.02  # of a core: more than this, or bytes moved, is work
ACTIVE_BYTES = 65536
_TRAINING = ("", "train", "training")


class RankProgress:
    def __init__(self, now: float) -> None:
        self.steps = 0
        self.heard = now  # of anything that is progress
        self.began = now
        self.shown = now  # a line it printed or other evidence of work: life, if not a step
        self.worked = now  # evidence of work other than lines
        self.doing = ""  # the newest evidence: "it computes"
        self.active = now  # CPU or I/O
        self.phase = ""
        self._phase_steps = 0  # it had made when the phase was said
        self.state = "?"
        self.stopped_since = 0.0
        self._gaps: deque[float] = deque(maxlen=200)
        self._work: tuple[float, int, float] | None = None

    def beat(self, steps: int, longest: float, now: float) -> None:
        self.steps = steps
        self.heard = self.shown = self.active = now
        if steps > 3:
            self._gaps.append(longest)
        if not self.training and steps >= self._phase_steps + 3:
            self.phase = ""  # it trains again, whether it said so or not
        self.stopped_since = 0.0

    def printed(self, now: float) -> None:
        self.active = self.shown = now
        self.doing = "it prints"
        if not self.steps:
            self.heard = now

    def works(self, doing: str, now: float) -> None:
        self.shown = self.worked = self.active = now
        self.doing = doing

    def said(self, now: float) -> None:
        """A mark or a phase: the script itself says that it keeps running."""
        self.heard = self.shown = self.active = now

    def enter(self, phase: str) -> None:
        self.phase, self._phase_steps = phase, self.steps

    def beatless(self, now: float) -> None:
        """Its beats can no longer be read: from here on it is one that never steps."""
        self.steps = 0
        self._gaps.clear()
        self.said(now)

    def vitals(self, state: str, cpu: float, moved: int, now: float) -> None:
        self.stopped_since = (self.stopped_since or now) if state == "T" else 0.0
        if state == "t":  # a debugger holds it: somebody is looking already
            self.said(now)
        self.state = state
        if self._work is not None:
            took = max(now - self._work[2], 0.5)
            if (cpu - self._work[0]) / took > ACTIVE_CPU or moved - self._work[1] > ACTIVE_BYTES:
                self.active = now
                if not self.steps:
                    self.heard = now
        self._work = cpu, moved, now

    @property
    def no_step_since(self) -> float:
        return self.heard if self.steps else self.began

    @property
    def training(self) -> bool:
        return self.phase.lower() in _TRAINING

    def waits_for_server(self, now: float) -> bool:
        """Return whether the rank has announced recently that it waits for a server."""
        return self.phase.startswith(WAITING_PHASE) and now - self.heard < PHASE_S

    @property
    def usual(self) -> float:
        """The p99 of its gaps between steps: one long pause in a hundred looks does not count."""
        if not self._gaps:
            return 0.0
        ordered = sorted(self._gaps)
        return ordered[min(len(ordered) - 1, int(len(ordered) * 0.99) - (1 if len(ordered) >= 100 else 0))]

    @property
    def median(self) -> float:
        return sorted(self._gaps)[len(self._gaps) // 2] if self._gaps else 0.0

    @property
    def patience(self) -> float:
        """Seconds of silence after which it is worth a look. Only for a rank that has stepped."""
        if not self.training:
            return max(PHASE_S, K * self.usual)
        return max(FIRST_STEPS_S if self.steps < 4 else FLOOR_S, K * self.usual)
