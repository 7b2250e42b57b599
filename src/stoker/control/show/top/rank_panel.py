"""The tables of ranks and processes."""

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
)  # fmt: skip

RANK_ORDERS = {
    "s": Order("step", lambda rank: rank.step, down=False),
    "t": Order("step time", lambda rank: rank.step_s),
    "w": Order("waiting", lambda rank: rank.waiting),
    "m": Order("memory", lambda rank: rank.memory),
    "h": Order("host", lambda rank: (rank.host, rank.rank), down=False),
}
PROCESS_ORDERS = {
    "p": Order("pid", lambda pair: pair[1].pid, down=False),
    "m": Order("memory", lambda pair: pair[1].memory),
    "t": Order("time", lambda pair: pair[1].age),
    "u": Order("user", lambda pair: pair[1].user, down=False),
    "h": Order("host", lambda pair: (pair[0].host, pair[0].index), down=False),
}
_LATE_S = 30.0  # without a sign of progress


def ranks_panel(run: RunView | None, wish: PanelOptions) -> Panel:
    slow = {one.rank: one.cause for one in run.slow} if run is not None else {}
    ranks = run.ranks if run is not None else ()
    rows = (Row(str(rank.rank), rank, _rank_text(rank, slow.get(rank.rank, ""))) for rank in ranks)
    kept, hidden = filter_and_sort(rows, wish, RANK_ORDERS)
    empty = "no ranks are known of this run" if run is not None else "no run"
    if run is not None and run.verdict is not None and run.state != RUNNING:
        empty = "the run is over: it has no ranks any more"
    return Panel(RANKS, _rank_columns(slow, ranks), kept, empty, hidden)


def _rank_text(rank: RankView, cause: str) -> str:
    words = (f"rank {rank.rank}", rank.role, rank.label, rank.host, rank.state, rank.phase, cause)
    return escape_cell(" ".join(words)).lower()


def _rank_columns(slow: dict[int, str], ranks: tuple[RankView, ...]) -> tuple[Column, ...]:
    where = max((len(_where(rank)) for rank in ranks), default=4)
    roles = len({rank.role for rank in ranks}) > 1
    shown = [
        Column("RANK", 5, lambda rank, width: (str(rank.rank), BAD if rank.rank in slow else PLAIN), right=True),
        Column("GPU", max(5, min(where, 20)), lambda rank, width: (_where(rank), PLAIN), order=3),
        Column("STATE", 8, _rank_state, order=6),
        Column("STEP", 8, lambda rank, width: (NONE if rank.step is None else str(rank.step), PLAIN), 1, True),
        Column("STEP TIME", 9, lambda rank, width: (format_step_time(rank.step_s), _late(rank, slow)), 2, True),
        Column("WAIT", 5, lambda rank, width: (format_percent(rank.waiting), _waits(rank)), 2, True),
        Column("", 8, lambda rank, width: (draw_bar(rank.waiting, width), _waits(rank)), order=7),
        Column("PHASE", 15, lambda rank, width: _phase(rank, slow), order=4),
        Column("BEAT", 7, _beat, right=True, order=5),
        Column("MEMORY", 8, lambda rank, width: (_size(rank.memory), PLAIN), order=9, right=True),
        Column("STEP TIMES", 0, lambda rank, width: (draw_history(rank.recent.get("step_s", ()), width), ACCENT), 6),
    ]
    if roles:
        shown.insert(1, Column("ROLE", 10, lambda rank, width: (escape_cell(rank.role), PLAIN), order=3))
    return tuple(shown)


def _where(rank: RankView) -> str:
    """Labels of a run on several hosts begin with the host's name."""
    return escape_cell(rank.label or rank.host or NONE)


def _rank_state(rank: RankView, width: int) -> Piece:
    if rank.state == "failed":
        return f"exit {rank.exit_code}", BAD
    return escape_cell(rank.state), {"running": GOOD, "gone": DIM, "ended": DIM, "stopped": WARN}.get(rank.state, PLAIN)


def _late(rank: RankView, slow: dict[int, str]) -> str:
    return BAD if rank.rank in slow else PLAIN


def _waits(rank: RankView) -> str:
    return WARN if (rank.waiting or 0) >= 0.2 else PLAIN


def _phase(rank: RankView, slow: dict[int, str]) -> Piece:
    if rank.rank in slow:
        return f"◀ {escape_cell(slow[rank.rank])}", BAD
    return escape_cell(rank.phase), PLAIN


def _beat(rank: RankView, width: int) -> Piece:
    """The time since its last sign of progress."""
    age = rank.beat_age
    return (NONE, DIM) if age is None else (format_step_time(age), WARN if age > _LATE_S else DIM)


def _size(size: int | None) -> str:
    return NONE if size is None else format_bytes(size)


# ---- processes ----

Process = tuple[GpuGauges, Holder]


def processes_panel(index: SnapshotIndex, wish: PanelOptions) -> Panel:
    rows = (
        Row(f"{card.host}/{card.uuid}/{holder.pid}", (card, holder), _process_text(card, holder))
        for card, holder in index.snapshot.processes
    )
    kept, hidden = filter_and_sort(rows, wish, PROCESS_ORDERS)
    many = len(index.snapshot.hosts) > 1
    known = any(card.processes is not None for card in index.snapshot.gpus)
    empty = "no process has a GPU" if known or not index.snapshot.gpus else "the driver does not list processes"
    columns = (
        Column("PID", 8, lambda pair, width: (str(pair[1].pid), PLAIN), right=True),
        Column("USER", 10, lambda pair, width: (escape_cell(pair[1].user or NONE), PLAIN), order=2),
        Column("GPU", 16 if many else 6, lambda pair, width: (_card(pair[0], many), PLAIN), order=1),
        Column("GPU MEM", 8, lambda pair, width: (_size(pair[1].memory), PLAIN), right=True, order=1),
        Column("TIME", 12, lambda pair, width: _age(pair[1]), right=True, order=5),
        Column("RUN", 18, lambda pair, width: (escape_cell(pair[1].run or ""), ACCENT), order=4),
        Column("COMMAND", 0, lambda pair, width: _command(pair[1]), order=3, least=12),
    )
    return Panel(PROCESSES, columns, kept, empty, hidden)


def _process_text(card: GpuGauges, holder: Holder) -> str:
    words = (holder.pid, holder.user, card.host, card.label, holder.run, holder.command)
    return escape_cell(" ".join(str(word) for word in words if word is not None)).lower()


def _card(card: GpuGauges, many: bool) -> str:
    return escape_cell(f"{card.host}/{card.label}" if many else card.label)


def _age(holder: Holder) -> Piece:
    return (NONE, DIM) if holder.age is None else (format_duration(holder.age), PLAIN)


def _command(holder: Holder) -> Piece:
    """In a container the driver gives the host's pid, and nothing else is known of it."""
    if holder.command is None:
        return "not visible here: outside this container, or gone", DIM
    return escape_cell(holder.command), PLAIN
