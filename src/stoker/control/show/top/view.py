"""What is looked at, and how keys and the mouse change it. Pure: what must happen outside is an `Effect`."""

from __future__ import annotations

from collections.abc import Mapping

from stoker.contract.frozen import frozen, replace
from stoker.control.show.snapshot import RUNNING, UNKNOWN, RunView, Snapshot
from stoker.control.show.top import gpu_panel, rank_panel, run_panel
from stoker.control.show.top.table import (
    GPUS,
    PANELS,
    PROCESSES,
    RANKS,
    RUN,
    RUNS,
    Order,
    Panel,
    PanelOptions,
    SnapshotIndex,
    escape_cell,
)

BROWSE, FILTER, SORT, HELP, CONFIRM = "browse", "filter", "sort", "help", "confirm"
QUIT, STOP, PAUSE, FASTER, SLOWER, BACK, FORTH = "quit", "stop", "pause", "faster", "slower", "back", "forth"
ORDERS: Mapping[str, Mapping[str, Order]] = {
    GPUS: gpu_panel.ORDERS, RUN: {}, RANKS: rank_panel.RANK_ORDERS, PROCESSES: rank_panel.PROCESS_ORDERS, RUNS: run_panel.RUN_ORDERS,
}  # fmt: skip


@frozen
class Effect:
    what: str
    run: str = ""  # its id


@frozen
class View:
    mode: str = BROWSE
    focus: str = GPUS
    filter: str = ""
    typed: str = ""  # the filter that is being typed
    sorts: Mapping[str, tuple[str, bool]] = {}  # panel -> letter, reversed
    cursors: Mapping[str, str] = {}  # panel -> key of a row
    tops: Mapping[str, int] = {}  # panel -> first row that is seen
    run: str = ""  # chosen; empty: the newest that is running
    asked: str = ""  # the run that a confirmation is about
    note: str = ""  # one line for the person at the keyboard, until the next key
    paused: bool = False
    replay: bool = False

    def wish(self, panel: str) -> PanelOptions:
        letter, reverse = self.sorts.get(panel, ("", False))
        return PanelOptions(letter, reverse, self.typed if self.mode == FILTER else self.filter)


def chosen_run(snapshot: Snapshot, view: View) -> RunView | None:
    """The run that is shown: the one chosen, else the newest that is running, else the newest."""
    found = snapshot.run(view.run) if view.run else None
    if found is not None:
        return found
    newest = snapshot.runs[::-1]
    for state in (RUNNING, UNKNOWN):
        for run in newest:
            if run.state == state:
                return run
    return newest[0] if newest else None


def drop_deleted_run(view: View, snapshot: Snapshot) -> View:
    """Where the run that was chosen has been deleted, another one is shown, and that is reported."""
    if not view.run or snapshot.problems or not snapshot.root or snapshot.run(view.run) is not None:
        return view
    other = chosen_run(snapshot, view)
    shown = f"; this is {escape_cell(other.name or other.id)}" if other is not None else ""
    return replace(view, run="", note=f"run {escape_cell(view.run)} no longer exists{shown}")


def build_panels(snapshot: Snapshot, view: View) -> dict[str, Panel]:
    """The tables; the run itself is none."""
    index, run = SnapshotIndex(snapshot), chosen_run(snapshot, view)
    return {
        GPUS: gpu_panel.gpus_panel(index, view.wish(GPUS)),
        RANKS: rank_panel.ranks_panel(run, view.wish(RANKS)),
        PROCESSES: rank_panel.processes_panel(index, view.wish(PROCESSES)),
        RUNS: run_panel.runs_panel(index, view.wish(RUNS), run.id if run is not None else ""),
    }


def press(view: View, key: str, sign: str, snapshot: Snapshot, page: int) -> tuple[View, Effect | None]:
    """`key`: Textual's name of it; `sign`: the character it prints, if any. `page`: rows of the panel in focus."""
    view = replace(view, note="")
    if view.mode == FILTER:
        return _type(view, key, sign), None
    if view.mode == SORT:
        return _sort(view, sign), None
    if view.mode == CONFIRM:
        sure = sign in ("y", "Y")
        done = replace(view, mode=BROWSE, asked="", note="" if sure else "not stopped")
        return done, Effect(STOP, view.asked) if sure else None
    if view.mode == HELP:
        return (view, Effect(QUIT)) if sign in ("q", "Q") else (replace(view, mode=BROWSE), None)
    if key in ("q", "Q", "ctrl+c", "ctrl+q"):
        return view, Effect(QUIT)
    if key == "space":
        # A recording is held where it is played: seeking still shows what is there.
        return (view, Effect(PAUSE)) if view.replay else (replace(view, paused=not view.paused), None)
    if view.replay and key in ("left", "right"):
        return view, Effect(BACK if key == "left" else FORTH)
    if view.replay and sign in ("+", "-"):
        return view, Effect(FASTER if sign == "+" else SLOWER)
    return _browse(view, key, sign, snapshot, page), None


def _browse(view: View, key: str, sign: str, snapshot: Snapshot, page: int) -> View:
    if sign in ("h", "H", "?") or key == "f1":
        return replace(view, mode=HELP)
    if sign == "/":
        return replace(view, mode=FILTER, typed=view.filter)
    if sign == "o" and ORDERS[view.focus]:
        return replace(view, mode=SORT)
    if sign == "o":
        return replace(view, note="the run can't be sorted: Tab goes to another panel")
    if key == "escape":
        return replace(view, filter="", typed="")
    if sign in ("T", "x"):
        return _ask_to_stop(view, snapshot)
    if sign and sign in "12345":
        return replace(view, focus=PANELS[int(sign) - 1])
    if key in ("tab", "right", "shift+tab", "left"):
        step = 1 if key in ("tab", "right") else -1
        return replace(view, focus=PANELS[(PANELS.index(view.focus) + step) % len(PANELS)])
    moves = {"up": -1, "down": 1, "k": -1, "j": 1, "pageup": -page, "pagedown": page, "home": -(10**9), "end": 10**9}
    return move_cursor(view, view.focus, moves[key], snapshot) if key in moves else view


def _type(view: View, key: str, sign: str) -> View:
    if key == "enter":
        return replace(view, mode=BROWSE, filter=view.typed)
    if key == "escape":
        return replace(view, mode=BROWSE, typed=view.filter)
    if key in ("backspace", "ctrl+h"):
        return replace(view, typed=view.typed[:-1])
    if key == "ctrl+u":
        return replace(view, typed="")
    return append_to_filter(view, sign)


def append_to_filter(view: View, text: str) -> View:
    """A character, or what was pasted."""
    added = "".join(sign for sign in text if sign.isprintable())
    return replace(view, typed=view.typed + added)


def _sort(view: View, sign: str) -> View:
    """`n`: as they come. The letter in use: the other way round."""
    before, reverse = view.sorts.get(view.focus, ("", False))
    letter = "" if sign == "n" else sign
    if (not letter and sign != "n") or (letter and letter not in ORDERS[view.focus]):
        known = ", ".join(["n", *ORDERS[view.focus]])
        return replace(view, mode=BROWSE, note=f"no order of that letter; there are {known}")
    turned = not reverse if letter == before else False
    return replace(view, mode=BROWSE, sorts={**view.sorts, view.focus: (letter, turned)})


def _ask_to_stop(view: View, snapshot: Snapshot) -> View:
    run = chosen_run(snapshot, view)
    if run is None:
        return replace(view, note="there is no run to stop")
    if view.replay:
        return replace(view, note="this is a recording: nothing to stop")
    if not run.mine:
        return replace(view, note=f"run {run.id} belongs to {run.user}, and only that user can stop it")
    if run.state not in (RUNNING, UNKNOWN):
        return replace(view, note=f"run {run.id} is not running: {run.state}")
    return replace(view, mode=CONFIRM, asked=run.id)


def move_cursor(view: View, panel: str, by: int, snapshot: Snapshot) -> View:
    """The cursor of a panel goes up or down; in the list of runs that chooses the run."""
    if panel == RUN:
        return view
    rows = build_panels(snapshot, view)[panel].rows
    if not rows:
        return view
    at = cursor_at(view, panel, [row.key for row in rows])
    # The first move shows the cursor where it is.
    to = max(0, min(len(rows) - 1, at + by if panel in view.cursors else max(0, at + min(by, 0))))
    return select_row(view, panel, rows[to].key)


def select_row(view: View, panel: str, key: str) -> View:
    made = replace(view, cursors={**view.cursors, panel: key})
    return replace(made, run=key) if panel == RUNS else made


def cursor_at(view: View, panel: str, keys: list[str]) -> int:
    key = view.cursors.get(panel)
    return keys.index(key) if key in keys else 0
