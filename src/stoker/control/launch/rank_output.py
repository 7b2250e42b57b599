"""Where a rank's output goes: its file in the record always, torchrun's log folder if asked, the console as chosen."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from typing import Any

from stoker.contract import layout
from stoker.contract.errors import EX_USAGE, Refusal
from stoker.contract.masking import mask_text
from stoker.control.launch.console import SMALL, Console, LineCutter, LogLines
from stoker.control.launch.torchrun_files import TorchrunLogs, rank_report
from stoker.control.plan.options import RunOptions
from stoker.control.plan.run_plan import RankPlan, RunPlan
from stoker.control.record.run_writer import RunWriter

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
    if options.redirects or options.tee or options.show == "errors":
        return True
    return not options.detach and _kept_apart()


def _kept_apart() -> bool:
    """Our stdout and stderr go to different places."""
    here = [os.fstat(handle) for handle in (1, 2)]
    return (here[0].st_dev, here[0].st_ino) != (here[1].st_dev, here[1].st_ino)


def line_prefix(options: RunOptions, place: RankPlan) -> bytes:
    if options.log_line_prefix_template:
        from string import Template

        text = Template(options.log_line_prefix_template)
        return text.safe_substitute(role_name=options.role, rank=place.rank, local_rank=place.local_rank).encode()
    return f"{place.label}:".encode()


class RankOutput:
    def __init__(self, options: RunOptions, plan: RunPlan, run_id: str, console: Console, recipe: bool = False) -> None:
        """`recipe`: it is one of ours that runs."""
        self._console = console
        self._recipe = recipe
        self._options = options
        wanted = options.log_dir not in (None, "", os.devnull)
        self._logs = TorchrunLogs(options.log_dir or "", options.rdzv_id or run_id) if wanted else None
        # Nobody but the ranks writes there.
        self._own_stdout = not options.detach and not os.isatty(1) and _kept_apart()
        self._cutters: dict[tuple[int, int], LineCutter] = {}
        self._tails: dict[int, bytes] = {}
        self._lines: dict[tuple[int, int], LogLines] = {}
        self._since: dict[tuple[int, int], float] = {}  # unfinished lines, and since when
        self._attempt = 0
        self.replan(plan)

    def replan(self, plan: RunPlan) -> None:
        """Whose output is whose: a card that was left out moves the others, a lost host takes ranks away."""
        options = self._options
        self._locals = {place.rank: place.local_rank for place in plan.places}
        # torchrun's own flags count local ranks, ours the whole job's.
        maps = [std_map(told, set(self._locals.values())) for told in (options.redirects, options.tee)]
        found = [{rank: streams.get(local, 0) for rank, local in self._locals.items()} for streams in maps]
        self._redirects, self._tee = found
        show = options.show
        self._only_errors = show == "errors"
        shown = set(plan.ranks) if show in ("all", "errors") else set()
        if show not in ("all", "errors", "none"):
            shown = {int(word) for word in show.split(",")}
        if show == "all" and options.local_ranks_filter:
            wanted = {int(word) for word in options.local_ranks_filter.split(",")}
            shown = {rank for rank, local in self._locals.items() if local in wanted}
        self._shown = frozenset(shown)
        self._several = len({place.host for place in plan.places}) > 1
        self._alone = len(plan.places) == 1
        prefixed = plan.places if options.prefix != "never" else ()
        self._prefixes = {place.rank: line_prefix(options, place) for place in prefixed}
        # A single rank's stdout that goes to a pipe or file of its own is data (`| jq`): as it is, unless prefixed.
        clean = options.prefix == "never" or (options.prefix == "auto" and not self._tee.get(plan.ranks.start, 0) & 1)
        self._raw = self._alone and self._own_stdout and clean

    def begin(self, attempt: int) -> None:
        self._attempt = attempt
        for state in (self._cutters, self._tails, self._lines, self._since):
            state.clear()
        if self._logs is not None:
            folders = {rank: str(rank if self._several else local) for rank, local in self._locals.items()}
            streams = {rank: self._redirects.get(rank, 0) | self._tee.get(rank, 0) for rank in self._locals}
            self._logs.begin(folders, streams)

    def shows(self, rank: int) -> bool:
        return rank in self._shown

    def take(self, record: RunWriter, rank: int, fd: int, data: bytes) -> None:
        self._keep(record, rank, fd, data)
        if self._logs is not None:
            self._logs.write(record, rank, fd, data)
        if self._goes_to_console(rank, fd):
            self._show(rank, fd, data)

    def _keep(self, record: RunWriter, rank: int, fd: int, data: bytes) -> None:
        """To the rank's file. Separate streams join there by lines: an unfinished one waits a moment for its end."""
        lines = self._lines.get((rank, fd))
        if lines is None:
            lines = self._lines[rank, fd] = LogLines()
        text = lines.feed(data)
        self._since.pop((rank, fd), None)
        if fd == 0 or lines.unfinished > _PATIENT:
            text += lines.partial()
        elif lines.unfinished:
            self._since[rank, fd] = time.monotonic()
        self._write(record, rank, text)

    def _write(self, record: RunWriter, rank: int, text: bytes) -> None:
        if text:
            self._tails[rank] = (self._tails.get(rank, b"") + text[-_TAIL:])[-_TAIL:]
            record.output(layout.rank_log(record.dir, self._attempt, rank), text)

    def settle(self, record: RunWriter) -> None:
        """Writes unfinished lines that have waited long enough."""
        now = time.monotonic()
        for key, since in list(self._since.items()):
            if now - since > _HOLD_S:
                del self._since[key]
                self._write(record, key[0], self._lines[key].partial())

    def keep_error(self, record: RunWriter, rank: int, kept: dict[str, Any]) -> None:
        """`kept`: what the record holds of the rank's exception."""
        report = rank_report(kept) if self._logs is not None else None
        if self._logs is not None and report is not None:
            self._logs.error(record, rank, report)

    def _goes_to_console(self, rank: int, fd: int) -> bool:
        if rank not in self._shown or (self._only_errors and fd == 1):
            return False
        return not (fd and self._redirects.get(rank, 0) & ~self._tee.get(rank, 0) & fd)

    def _show(self, rank: int, fd: int, data: bytes) -> None:
        stream = 2 if fd == 2 else 1
        if self._raw and stream == 1:
            self._console.put(stream, data)
            return
        cutter = self._cutters.get((rank, fd))
        if cutter is None:
            cutter = self._cutters[rank, fd] = self._cutter(rank, stream)
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

    def _cutter(self, rank: int, stream: int) -> LineCutter:
        prefix = self._prefixes.get(rank, b"")
        if not self._recipe or not self._console.terminal(stream):
            return LineCutter(prefix)
        from stoker.control.launch.short_lines import ShortLines

        return LineCutter(prefix, ShortLines(prefix, steps=rank == min(self._shown)))

    def ended(self, record: RunWriter, rank: int) -> None:
        """The rank is gone: show and keep the line it did not finish."""
        for key, lines in self._lines.items():
            if key[0] == rank:
                self._since.pop(key, None)
                self._write(record, rank, lines.flush())
        for (owner, fd), cutter in list(self._cutters.items()):
            if owner == rank:
                self._console.put(2 if fd == 2 else 1, cutter.flush())

    def tail(self, rank: int) -> str:
        """Return what a rank printed last, masked, for verdicts that quote lines of it; a line that is cut is left out."""
        last = self._tails.get(rank, b"")
        if len(last) == _TAIL:
            last = last[max(last.find(b"\n"), last.find(b"\r")) + 1 :]
        return mask_text(last.decode("utf-8", "replace"))
