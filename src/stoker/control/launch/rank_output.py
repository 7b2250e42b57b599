"""Writes the ranks' output to their logs in the record, to torchrun's log folder (--log-dir) and to the console."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from typing import Any

from stoker.contract import layout
from stoker.contract.errors import EX_USAGE, Refusal
from stoker.contract.masking import mask_text
from stoker.control.launch.console import SMALL, Console, LineCutter, LogLines
from stoker.control.launch.torchrun_files import TorchrunLogs, make_torch_report
from stoker.control.plan.options import RunOptions
from stoker.control.plan.run_plan import RankPlan, RunPlan
from stoker.control.record.run_writer import RunWriter

_TAIL = 8192  # bytes of the newest output that are kept for verdicts
_LINE_WAIT_S = 0.2  # an unfinished line waits this long for its end before it is written to the log
_MAX_WAITING_LINE = 1 << 16  # bytes; a longer one does not wait


def parse_streams(text: str | None, ranks: Iterable[int]) -> dict[int, int]:
    """Parse torchrun's --redirects and --tee: 3 for every rank, or 0:1,1:2 by rank (1 stdout, 2 stderr, 3 both)."""
    if text is None:
        return {}
    try:
        if ":" not in text:
            return dict.fromkeys(ranks, _parse_stream(text))
        pairs = [item.split(":") for item in text.split(",")]
        return {int(rank): _parse_stream(stream) for rank, stream in pairs}
    except ValueError as problem:
        raise Refusal(
            f"--redirects and --tee must be 0, 1, 2, 3 or RANK:STREAM,..., got {text!r}", EX_USAGE
        ) from problem


def _parse_stream(text: str) -> int:
    stream = int(text)
    if stream not in (0, 1, 2, 3):
        raise ValueError(text)
    return stream


def needs_separate_pipes(options: RunOptions) -> bool:
    """Return whether stdout and stderr need separate pipes. One pipe for both keeps their order exactly."""
    if options.redirects or options.tee or options.show == "errors":
        return True
    return not options.detach and _has_two_targets()


def _has_two_targets() -> bool:
    """Return whether our stdout and stderr go to different places."""
    out, err = os.fstat(1), os.fstat(2)
    return (out.st_dev, out.st_ino) != (err.st_dev, err.st_ino)


def make_line_prefix(options: RunOptions, rank: RankPlan) -> bytes:
    if options.log_line_prefix_template:
        from string import Template

        template = Template(options.log_line_prefix_template)
        text = template.safe_substitute(role_name=options.role, rank=rank.rank, local_rank=rank.local_rank)
        return text.encode()
    return f"{rank.label}:".encode()


class RankOutput:
    """The output of all ranks of a run."""

    def __init__(
        self, options: RunOptions, plan: RunPlan, run_id: str, console: Console, is_recipe: bool = False
    ) -> None:
        """`is_recipe`: the script is one of Stoker's recipes, whose lines can be shortened."""
        self._options = options
        self._console = console
        self._is_recipe = is_recipe
        has_logs = options.log_dir not in (None, "", os.devnull)
        self._logs = TorchrunLogs(options.log_dir or "", options.rdzv_id or run_id) if has_logs else None
        # Only the ranks write to a stdout that is a separate pipe or file.
        self._only_ranks_on_stdout = not options.detach and not os.isatty(1) and _has_two_targets()
        self._attempt = 0
        # By rank and stream.
        self._cutters: dict[tuple[int, int], LineCutter] = {}
        self._log_lines: dict[tuple[int, int], LogLines] = {}
        self._unfinished_since: dict[tuple[int, int], float] = {}
        self._tails: dict[int, bytes] = {}
        self.replan(plan)

    def replan(self, plan: RunPlan) -> None:
        """Use a new plan: an excluded GPU changes the labels of ranks, and a lost host removes ranks."""
        options = self._options
        self._local_ranks = {rank.rank: rank.local_rank for rank in plan.places}
        self._redirects = self._streams_by_rank(options.redirects)
        self._tee = self._streams_by_rank(options.tee)
        self._only_errors = options.show == "errors"
        if options.show == "all" and options.local_ranks_filter:
            shown_local_ranks = {int(rank) for rank in options.local_ranks_filter.split(",")}
            shown = {rank for rank, local_rank in self._local_ranks.items() if local_rank in shown_local_ranks}
        elif options.show in ("all", "errors"):
            shown = set(plan.ranks)
        elif options.show == "none":
            shown = set()
        else:
            shown = {int(rank) for rank in options.show.split(",")}
        self._shown = frozenset(shown)
        self._has_several_hosts = len({rank.host for rank in plan.places}) > 1
        self._is_alone = len(plan.places) == 1
        prefixed = plan.places if options.prefix != "never" else ()
        self._prefixes = {rank.rank: make_line_prefix(options, rank) for rank in prefixed}
        # A single rank's stdout that goes to a separate pipe or file is data (`| jq`), so it is passed on unchanged.
        no_prefix = options.prefix == "never" or (
            options.prefix == "auto" and not self._tee.get(plan.ranks.start, 0) & 1
        )
        self._stdout_is_raw = self._is_alone and self._only_ranks_on_stdout and no_prefix

    def _streams_by_rank(self, text: str | None) -> dict[int, int]:
        """Read --redirects or --tee. They count local ranks, as in torchrun."""
        streams = parse_streams(text, set(self._local_ranks.values()))
        return {rank: streams.get(local_rank, 0) for rank, local_rank in self._local_ranks.items()}

    def begin(self, attempt: int) -> None:
        """Forget the output of the previous attempt."""
        self._attempt = attempt
        for state in (self._cutters, self._tails, self._log_lines, self._unfinished_since):
            state.clear()
        if self._logs is not None:
            dir_names = {
                rank: str(rank if self._has_several_hosts else local_rank)
                for rank, local_rank in self._local_ranks.items()
            }
            streams = {rank: self._redirects.get(rank, 0) | self._tee.get(rank, 0) for rank in self._local_ranks}
            self._logs.begin(dir_names, streams)

    def shows(self, rank: int) -> bool:
        return rank in self._shown

    def take(self, record: RunWriter, rank: int, stream: int, data: bytes) -> None:
        """Write what a rank has printed. Stream 0 is a pipe for both."""
        self._write_to_log(record, rank, stream, data)
        if self._logs is not None:
            self._logs.write(record, rank, stream, data)
        if rank not in self._shown or (self._only_errors and stream == 1):
            return
        if stream and self._redirects.get(rank, 0) & ~self._tee.get(rank, 0) & stream:
            return
        self._write_to_console(rank, stream, data)

    def settle(self, record: RunWriter) -> None:
        """Write unfinished lines that have waited long enough to the logs."""
        now = time.monotonic()
        for key, since in list(self._unfinished_since.items()):
            if now - since > _LINE_WAIT_S:
                del self._unfinished_since[key]
                self._append(record, key[0], self._log_lines[key].partial())

    def ended(self, record: RunWriter, rank: int) -> None:
        """Write the lines that a rank did not finish before it exited."""
        for key, lines in self._log_lines.items():
            if key[0] == rank:
                self._unfinished_since.pop(key, None)
                self._append(record, rank, lines.flush())
        for (owner, stream), cutter in list(self._cutters.items()):
            if owner == rank:
                self._console.put(2 if stream == 2 else 1, cutter.flush())

    def tail(self, rank: int) -> str:
        """Return the end of a rank's output, masked, for verdicts that quote it. A line that is cut is left out."""
        tail = self._tails.get(rank, b"")
        if len(tail) == _TAIL:
            tail = tail[max(tail.find(b"\n"), tail.find(b"\r")) + 1 :]
        return mask_text(tail.decode("utf-8", "replace"))

    def write_error(self, record: RunWriter, rank: int, rank_error: dict[str, Any]) -> None:
        """Write a rank's exception, as the record has it, to torchrun's log folder."""
        report = make_torch_report(rank_error) if self._logs is not None else None
        if self._logs is not None and report is not None:
            self._logs.write_error(record, rank, report)

    def _write_to_log(self, record: RunWriter, rank: int, stream: int, data: bytes) -> None:
        """Write to the rank's log. Two streams are merged by lines, so an unfinished line waits a moment for its end."""
        key = rank, stream
        lines = self._log_lines.get(key)
        if lines is None:
            lines = self._log_lines[key] = LogLines()
        text = lines.feed(data)
        self._unfinished_since.pop(key, None)
        if stream == 0 or lines.unfinished > _MAX_WAITING_LINE:
            text += lines.partial()
        elif lines.unfinished:
            self._unfinished_since[key] = time.monotonic()
        self._append(record, rank, text)

    def _append(self, record: RunWriter, rank: int, text: bytes) -> None:
        if text:
            self._tails[rank] = (self._tails.get(rank, b"") + text[-_TAIL:])[-_TAIL:]
            record.append_output(layout.rank_log(record.dir, self._attempt, rank), text)

    def _write_to_console(self, rank: int, stream: int, data: bytes) -> None:
        target = 2 if stream == 2 else 1
        if self._stdout_is_raw and target == 1:
            self._console.put(target, data)
            return
        cutter = self._cutters.get((rank, stream))
        if cutter is None:
            cutter = self._cutters[rank, stream] = self._make_cutter(rank, target)
        if self._console.is_full and len(data) > SMALL:  # skip and count whole lines
            cut = data.rfind(b"\n") + 1
            if cut:
                self._console.skip(target, data.count(b"\n"))
                cutter.drop()
                data = data[cut:]
        self._console.put(target, cutter.feed(data))
        if self._is_alone:
            self._console.put(target, cutter.partial())

    def _make_cutter(self, rank: int, target: int) -> LineCutter:
        prefix = self._prefixes.get(rank, b"")
        if not self._is_recipe or not self._console.is_terminal(target):
            return LineCutter(prefix)
        from stoker.control.launch.short_lines import ShortLines

        return LineCutter(prefix, ShortLines(prefix, steps=rank == min(self._shown)))
