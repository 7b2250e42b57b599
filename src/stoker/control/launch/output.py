"""Where a rank's output goes: its file in the record always, torchrun's log folder if asked, the console as chosen."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable

from stoker.contract import layout
from stoker.contract.names import EX_CANTCREAT, EX_USAGE, Refusal
from stoker.control.launch.console import SMALL, Console
from stoker.control.launch.lines import LineCutter, LogLines
from stoker.control.launch.options import RunOptions
from stoker.control.launch.plan import RunPlan
from stoker.control.record.writer import RunRecord

_TAIL = 8192
_HOLD_S = 0.2
_PATIENT = 1 << 16


def std_map(text: str | None, ranks: Iterable[int]) -> dict[int, int]:
    """torchrun's stream notation: 3 for every rank, or 0:1,1:2 rank by rank (1 stdout, 2 stderr, 3 both)."""
    if text is None:
        return {}
    try:
        if ":" not in text:
            return dict.fromkeys(ranks, _std(text))
        pairs = [item.split(":") for item in text.split(",")]
        return {int(rank): _std(std) for rank, std in pairs}
    except ValueError as problem:
        raise Refusal(f"{text!r} names no streams: write 0, 1, 2, 3 or RANK:STREAM,...", EX_USAGE) from problem


def _std(text: str) -> int:
    value = int(text)
    if value not in (0, 1, 2, 3):
        raise ValueError(text)
    return value


def wants_split(options: RunOptions) -> bool:
    """One pipe for both streams keeps their order exactly; two are needed only where somebody tells them apart."""
    if options.redirects or options.tee or options.log_dir or options.show == "errors":
        return True
    if options.detach:
        return False
    here = [os.fstat(handle) for handle in (1, 2)]
    return (here[0].st_dev, here[0].st_ino) != (here[1].st_dev, here[1].st_ino)


def _make_log_dir(folder: str, run_id: str) -> str:
    try:
        os.makedirs(os.path.join(folder, run_id), exist_ok=True)
    except OSError as problem:
        raise Refusal(f"--log-dir {folder} can't be written: {problem.strerror}", EX_CANTCREAT) from problem
    return os.path.join(folder, run_id)


class Output:
    def __init__(self, options: RunOptions, plan: RunPlan, run_id: str, console: Console) -> None:
        self._console = console
        self._options = options
        self._log_dir = _make_log_dir(os.path.abspath(options.log_dir), run_id) if options.log_dir else None
        self._all_streams = options.tee is None and options.redirects is None
        self._cutters: dict[tuple[int, int], LineCutter] = {}
        self._tails: dict[int, bytes] = {}
        self._logs: dict[tuple[int, int], LogLines] = {}
        self._since: dict[tuple[int, int], float] = {}  # unfinished lines, and since when
        self._attempt = 0
        self.replan(plan)

    def replan(self, plan: RunPlan) -> None:
        """Whose output is whose: a card that was left out moves the others, a lost host takes ranks away."""
        options = self._options
        self._labels = {place.rank: place.label for place in plan.places}
        self._locals = {place.rank: place.local_rank for place in plan.places}
        # torchrun's own flags count local ranks, ours the whole job's.
        redirects, tee = (std_map(told, tuple(sorted(set(self._locals.values())))) for told in (options.redirects, options.tee))
        self._redirects, self._tee = ({rank: of.get(local, 0) for rank, local in self._locals.items()} for of in (redirects, tee))
        show = options.show
        self._only_errors = show == "errors"
        shown = set(plan.ranks if show in ("all", "errors") else () if show == "none" else {int(word) for word in show.split(",")})
        if show == "all" and options.local_ranks_filter:
            wanted = {int(word) for word in options.local_ranks_filter.split(",")}
            shown = {rank for rank, local in self._locals.items() if local in wanted}
        self._shown = frozenset(shown)
        self._several = len({place.host for place in plan.places}) > 1
        self._alone = len(plan.places) == 1

    def begin(self, attempt: int) -> None:
        self._attempt = attempt
        self._cutters.clear()
        self._tails.clear()
        self._logs.clear()
        self._since.clear()

    def shows(self, rank: int) -> bool:
        return rank in self._shown

    def take(self, record: RunRecord, rank: int, fd: int, data: bytes) -> None:
        self._keep(record, rank, fd, data)
        if self._log_dir is not None and fd:
            wanted = 3 if self._all_streams else self._redirects.get(rank, 0) | self._tee.get(rank, 0)
            if wanted & fd:
                self._write_torchrun_log(record, rank, fd, data)
        if self._goes_to_console(rank, fd):
            self._show(rank, fd, data)

    def _keep(self, record: RunRecord, rank: int, fd: int, data: bytes) -> None:
        """To the rank's file. Where its streams come apart they join there line by line: an unfinished one waits a moment for its end."""
        lines = self._logs.get((rank, fd))
        if lines is None:
            lines = self._logs[rank, fd] = LogLines()
        text = lines.feed(data)
        self._since.pop((rank, fd), None)
        if fd == 0 or lines.unfinished > _PATIENT:
            text += lines.partial()
        elif lines.unfinished:
            self._since[rank, fd] = time.monotonic()
        self._write(record, rank, text)

    def _write(self, record: RunRecord, rank: int, text: bytes) -> None:
        if text:
            self._tails[rank] = (self._tails.get(rank, b"") + text[-_TAIL:])[-_TAIL:]
            record.output(layout.rank_log(record.dir, self._attempt, rank), text)

    def settle(self, record: RunRecord) -> None:
        """Writes unfinished lines that have waited long enough."""
        now = time.monotonic()
        for key, since in list(self._since.items()):
            if now - since > _HOLD_S:
                del self._since[key]
                self._write(record, key[0], self._logs[key].partial())

    def _write_torchrun_log(self, record: RunRecord, rank: int, fd: int, data: bytes) -> None:
        assert self._log_dir is not None
        folder = os.path.join(self._log_dir, f"attempt_{self._attempt}", str(rank if self._several else self._locals[rank]))
        path = os.path.join(folder, "stdout.log" if fd == 1 else "stderr.log")
        if not os.path.isdir(folder):
            os.makedirs(folder, exist_ok=True)
        record.output(path, data)

    def _goes_to_console(self, rank: int, fd: int) -> bool:
        if rank not in self._shown or (self._only_errors and fd == 1):
            return False
        return not (fd and self._redirects.get(rank, 0) & ~self._tee.get(rank, 0) & fd)

    def _show(self, rank: int, fd: int, data: bytes) -> None:
        stream = 2 if fd == 2 else 1
        cutter = self._cutters.get((rank, fd))
        if cutter is None:
            cutter = self._cutters[rank, fd] = LineCutter(f"{self._labels[rank]}:".encode())
        if self._console.full and len(data) > SMALL:
            # Too far behind to show anything: count the lines instead of cutting them.
            cut = data.rfind(b"\n") + 1
            if cut:
                self._console.skip(stream, data.count(b"\n"))
                cutter.drop()
                data = data[cut:]
        self._console.put(stream, cutter.feed(data))
        if self._alone:
            self._console.put(stream, cutter.partial())

    def ended(self, record: RunRecord, rank: int) -> None:
        """The rank is gone: show and keep the line it did not finish."""
        for key, lines in self._logs.items():
            if key[0] == rank:
                self._since.pop(key, None)
                self._write(record, rank, lines.flush())
        for (owner, fd), cutter in list(self._cutters.items()):
            if owner == rank:
                self._console.put(2 if fd == 2 else 1, cutter.flush())

    def tail(self, rank: int) -> str:
        return self._tails.get(rank, b"").decode("utf-8", "replace")
