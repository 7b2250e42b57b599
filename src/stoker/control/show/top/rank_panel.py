"""Draws the panels of ranks and of processes on GPUs."""

from __future__ import annotations

from stoker.contract.units import format_bytes, format_duration
from stoker.control.show.snapshot import RUNNING, GpuGauges, Holder, RankView, RunView
from stoker.control.show.top.table import (
    ACCENT,
    BAD,
    DIM,
    GOOD,
    NONE,
    PLAIN,
    PROCESSES,
    RANKS,
    WARN,
    Column,
    Order,
    Panel,
    PanelOptions,
    Piece,
    Row,
    SnapshotIndex,
    draw_bar,
    draw_history,
    escape_cell,
    filter_and_sort,
    format_percent,
    format_step_time,
    gpu_label,
)

RANK_ORDERS = {
    "s": Order("step", lambda rank: rank.step, down=False),
    "t": Order("step time", lambda rank: rank.step_s),
    "w": Order("waiting", lambda rank: rank.waiting),
    "m": Order("memory", lambda rank: rank.memory),
    "h": Order("host", lambda rank: (rank.host, rank.rank), down=False),
}
# Rows of the process panel are pairs (GPU, process on it).
PROCESS_ORDERS = {
    "p": Order("pid", lambda pair: pair[1].pid, down=False),
    "m": Order("memory", lambda pair: pair[1].memory),
    "t": Order("time", lambda pair: pair[1].age),
    "u": Order("user", lambda pair: pair[1].user, down=False),
    "h": Order("host", lambda pair: (pair[0].host, pair[0].index), down=False),
}
_LATE_S = 30.0  # the age of the last sign of progress is highlighted from here on


# ---- ranks ----


def make_ranks_panel(run: RunView | None, options: PanelOptions) -> Panel:
    causes = {slow.rank: slow.cause for slow in run.slow} if run is not None else {}  # of slow ranks
    ranks = run.ranks if run is not None else ()
    rows, hidden = filter_and_sort(
        (Row(str(rank.rank), rank, _searchable_rank_text(rank, causes.get(rank.rank, ""))) for rank in ranks),
        options,
        RANK_ORDERS,
    )
    empty = "no ranks are known for this run" if run is not None else "no run is selected"
    if run is not None and run.verdict is not None and run.state != RUNNING:
        empty = "the run has ended and has no ranks"
    return Panel(RANKS, _make_rank_columns(causes, ranks), rows, empty, hidden)


def _searchable_rank_text(rank: RankView, cause: str) -> str:
    fields = (f"rank {rank.rank}", rank.role, rank.label, rank.host, rank.state, rank.phase, cause)
    return escape_cell(" ".join(fields)).lower()


def _make_rank_columns(causes: dict[int, str], ranks: tuple[RankView, ...]) -> tuple[Column, ...]:
    def slow_style(rank: RankView) -> str:
        return BAD if rank.rank in causes else PLAIN

    def draw_phase(rank: RankView, width: int) -> Piece:
        if rank.rank in causes:
            return f"◀ {escape_cell(causes[rank.rank])}", BAD
        return escape_cell(rank.phase), PLAIN

    label_width = max((len(_rank_label(rank)) for rank in ranks), default=4)
    columns = [
        Column("RANK", 5, lambda rank, width: (str(rank.rank), slow_style(rank)), right=True),
        Column("GPU", max(5, min(label_width, 20)), lambda rank, width: (_rank_label(rank), PLAIN), order=3),
        Column("STATE", 8, _draw_state, order=6),
        Column("STEP", 8, lambda rank, width: (NONE if rank.step is None else str(rank.step), PLAIN), 1, True),
        Column("STEP TIME", 9, lambda rank, width: (format_step_time(rank.step_s), slow_style(rank)), 2, True),
        Column("WAIT", 5, lambda rank, width: (format_percent(rank.waiting), _waiting_style(rank)), 2, True),
        Column("", 8, lambda rank, width: (draw_bar(rank.waiting, width), _waiting_style(rank)), order=7),
        Column("PHASE", 15, draw_phase, order=4),
        Column("BEAT", 7, _draw_beat_age, right=True, order=5),
        Column("MEMORY", 8, lambda rank, width: (_format_size(rank.memory), PLAIN), order=9, right=True),
        Column("STEP TIMES", 0, lambda rank, width: (draw_history(rank.recent.get("step_s", ()), width), ACCENT), 6),
    ]
    if len({rank.role for rank in ranks}) > 1:
        columns.insert(1, Column("ROLE", 10, lambda rank, width: (escape_cell(rank.role), PLAIN), order=3))
    return tuple(columns)


def _rank_label(rank: RankView) -> str:
    """Return the rank's label, which begins with the host if the run has several."""
    return escape_cell(rank.label or rank.host or NONE)


def _draw_state(rank: RankView, width: int) -> Piece:
    if rank.state == "failed":
        return f"exit {rank.exit_code}", BAD
    styles = {"running": GOOD, "gone": DIM, "ended": DIM, "stopped": WARN}
    return escape_cell(rank.state), styles.get(rank.state, PLAIN)


def _waiting_style(rank: RankView) -> str:
    return WARN if (rank.waiting or 0) >= 0.2 else PLAIN


def _draw_beat_age(rank: RankView, width: int) -> Piece:
    """Return the time since the rank's last sign of progress."""
    age = rank.beat_age
    return (NONE, DIM) if age is None else (format_step_time(age), WARN if age > _LATE_S else DIM)


def _format_size(size: int | None) -> str:
    return NONE if size is None else format_bytes(size)


# ---- processes ----


def make_processes_panel(index: SnapshotIndex, options: PanelOptions) -> Panel:
    snapshot = index.snapshot
    rows, hidden = filter_and_sort(
        (
            Row(f"{gpu.host}/{gpu.uuid}/{process.pid}", (gpu, process), _searchable_process_text(gpu, process))
            for gpu, process in snapshot.processes
        ),
        options,
        PROCESS_ORDERS,
    )
    with_host = len(snapshot.hosts) > 1
    is_listed = any(gpu.processes is not None for gpu in snapshot.gpus)
    empty = "no process uses a GPU" if is_listed or not snapshot.gpus else "the driver does not list processes"
    columns = (
        Column("PID", 8, lambda pair, width: (str(pair[1].pid), PLAIN), right=True),
        Column("USER", 10, lambda pair, width: (escape_cell(pair[1].user or NONE), PLAIN), order=2),
        Column("GPU", 16 if with_host else 6, lambda pair, width: (gpu_label(pair[0], with_host), PLAIN), order=1),
        Column("GPU MEM", 8, lambda pair, width: (_format_size(pair[1].memory), PLAIN), right=True, order=1),
        Column("TIME", 12, lambda pair, width: _draw_age(pair[1]), right=True, order=5),
        Column("RUN", 18, lambda pair, width: (escape_cell(pair[1].run or ""), ACCENT), order=4),
        Column("COMMAND", 0, lambda pair, width: _draw_command(pair[1]), order=3, min_width=12),
    )
    return Panel(PROCESSES, columns, rows, empty, hidden)


def _searchable_process_text(gpu: GpuGauges, process: Holder) -> str:
    fields = (process.pid, process.user, gpu.host, gpu.label, process.run, process.command)
    return escape_cell(" ".join(str(field) for field in fields if field is not None)).lower()


def _draw_age(process: Holder) -> Piece:
    return (NONE, DIM) if process.age is None else (format_duration(process.age), PLAIN)


def _draw_command(process: Holder) -> Piece:
    """Return the command. It is unknown in a container, where the driver reports pids of the host."""
    if process.command is None:
        return "not visible: outside this container, or already ended", DIM
    return escape_cell(process.command), PLAIN
