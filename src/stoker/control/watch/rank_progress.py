"""Follows one rank's signs of progress, and decides how long it may be silent before it is inspected.

All times are those of the launcher's monotonic clock when a message arrives: clocks of other hosts are never compared.
"""

from __future__ import annotations

from collections import deque

from stoker.contract.env_vars import WAITING_PHASE

FLOOR_S = 3.0  # a rank in training is inspected after this many seconds of silence at the earliest
PATIENCE_FACTOR = 5.0  # a rank may be silent for this many times the p99 of its gaps between steps
FIRST_STEPS_S = 30.0  # replaces FLOOR_S in the first three steps, each of which may compile
PHASE_S = 60.0  # replaces FLOOR_S in an announced phase (eval, save ...)
IDLE_S = 6.0  # before the first step, ranks are inspected if all have been idle for this long
START_S = 120.0  # before the first step, a rank is inspected if it has been idle for this long while others work
ACTIVE_CPU = 0.02  # cores: a rank that uses more is not idle
ACTIVE_BYTES = 65536  # between two reports: a rank that reads and writes more is not idle
_TRAINING_PHASES = ("", "train", "training")


class RankProgress:
    def __init__(self, now: float) -> None:
        self.steps = 0
        self.last_progress_at = now  # newest step, mark or phase
        self.started_at = now
        self.last_sign_at = now  # newest progress, printed line or evidence of work
        self.last_work_at = now  # newest evidence of work, without printed lines
        self.last_work = ""  # newest evidence: "it is computing"
        self.last_activity_at = now  # newest CPU use or I/O
        self.phase = ""
        self._phase_steps = 0  # steps made when the phase was announced
        self.state = "?"
        self.stopped_since = 0.0
        self._gaps: deque[float] = deque(maxlen=200)
        self._usage: tuple[float, int, float] | None = None  # newest (CPU seconds, bytes moved, time)

    def note_steps(self, steps: int, longest: float, now: float) -> None:
        """Note finished steps. `longest` is the longest gap between them, in seconds."""
        self.steps = steps
        self.last_progress_at = self.last_sign_at = self.last_activity_at = now
        if steps > 3:
            self._gaps.append(longest)
        if not self.is_training and steps >= self._phase_steps + 3:
            self.phase = ""  # steps show that it trains again, even if it did not announce that
        self.stopped_since = 0.0

    def note_output(self, now: float) -> None:
        self.last_activity_at = self.last_sign_at = now
        self.last_work = "it is printing"
        if not self.steps:
            self.last_progress_at = now

    def note_work(self, doing: str, now: float) -> None:
        """Note evidence of work found by an inspection."""
        self.last_sign_at = self.last_work_at = self.last_activity_at = now
        self.last_work = doing

    def note_mark(self, now: float) -> None:
        """Note a mark or a phase, by which the script itself reports progress."""
        self.last_progress_at = self.last_sign_at = self.last_activity_at = now

    def enter_phase(self, phase: str) -> None:
        self.phase, self._phase_steps = phase, self.steps

    def note_unreadable_beats(self, now: float) -> None:
        """Note that its steps can no longer be read: from now on it counts as a rank without a first step."""
        self.steps = 0
        self._gaps.clear()
        self.note_mark(now)

    def note_vitals(self, state: str, cpu: float, moved: int, now: float) -> None:
        """Note its process state, CPU seconds and bytes read and written so far."""
        self.stopped_since = (self.stopped_since or now) if state == "T" else 0.0
        if state == "t":  # a person is debugging it, so don't report it as stuck
            self.note_mark(now)
        self.state = state
        if self._usage is not None:
            last_cpu, last_moved, last_time = self._usage
            elapsed = max(now - last_time, 0.5)
            if (cpu - last_cpu) / elapsed > ACTIVE_CPU or moved - last_moved > ACTIVE_BYTES:
                self.last_activity_at = now
                if not self.steps:
                    self.last_progress_at = now
        self._usage = cpu, moved, now

    @property
    def last_step_at(self) -> float:
        return self.last_progress_at if self.steps else self.started_at

    @property
    def is_training(self) -> bool:
        return self.phase.lower() in _TRAINING_PHASES

    def waits_for_server(self, now: float) -> bool:
        """Return whether the rank has announced recently that it waits for a server."""
        return self.phase.startswith(WAITING_PHASE) and now - self.last_progress_at < PHASE_S

    @property
    def usual_gap_s(self) -> float:
        """Return about the p99 of the gaps between its steps, in seconds. One long pause in a hundred does not count."""
        if not self._gaps:
            return 0.0
        ordered = sorted(self._gaps)
        return ordered[min(len(ordered) - 1, int(len(ordered) * 0.99) - (1 if len(ordered) >= 100 else 0))]

    @property
    def max_silence_s(self) -> float:
        """Return the seconds of silence after which the rank is inspected. Call it only for a rank that has made a step."""
        if not self.is_training:
            return max(PHASE_S, PATIENCE_FACTOR * self.usual_gap_s)
        return max(FIRST_STEPS_S if self.steps < 4 else FLOOR_S, PATIENCE_FACTOR * self.usual_gap_s)
