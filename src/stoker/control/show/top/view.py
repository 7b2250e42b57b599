"""Holds the state of the screen and changes it by keys and the mouse. Depends only on its arguments; returns an `Effect` for app.py."""

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
    GPUS: gpu_panel.GPU_ORDERS,
    RUN: {},
    RANKS: rank_panel.RANK_ORDERS,
    PROCESSES: rank_panel.PROCESS_ORDERS,
    RUNS: run_panel.RUN_ORDERS,
}


@frozen
class Effect:
    """An action for app.py to execute: quit, stop a run, or a command of a replay."""

    name: str  # QUIT, STOP, PAUSE, FASTER, SLOWER, BACK or FORTH
    run: str = ""  # id of the run to stop


@frozen
class View:
    """The user's choices: mode, focused panel, filter, order, cursors and run."""

    mode: str = BROWSE
    focus: str = GPUS
    filter: str = ""
    typed: str = ""  # the filter while the user edits it
    sorts: Mapping[str, tuple[str, bool]] = {}  # panel -> (letter, reversed)
    cursors: Mapping[str, str] = {}  # panel -> key of a row
    tops: Mapping[str, int] = {}  # panel -> first visible row
    run: str = ""  # id of the chosen run; if empty, the newest running one is shown
    run_to_stop: str = ""  # id of the run while the user must confirm to stop it
    note: str = ""  # a message, shown until the next key
    paused: bool = False
    replay: bool = False

    def options(self, panel: str) -> PanelOptions:
        letter, reverse = self.sorts.get(panel, ("", False))
        return PanelOptions(letter, reverse, self.typed if self.mode == FILTER else self.filter)


def find_chosen_run(snapshot: Snapshot, view: View) -> RunView | None:
    """Return the run to show: the chosen one, else the newest running one, else the newest, or None."""
    chosen = snapshot.run(view.run) if view.run else None
    if chosen is not None:
        return chosen
    newest_first = snapshot.runs[::-1]
    for state in (RUNNING, UNKNOWN):
        for run in newest_first:
            if run.state == state:
                return run
    return newest_first[0] if newest_first else None


def drop_deleted_run(view: View, snapshot: Snapshot) -> View:
    """If the chosen run was deleted, choose another one and add a note."""
    if not view.run or snapshot.problems or not snapshot.root or snapshot.run(view.run) is not None:
        return view
    other = find_chosen_run(snapshot, view)
    replacement = f"; showing {escape_cell(other.name or other.id)}" if other is not None else ""
    return replace(view, run="", note=f"run {escape_cell(view.run)} no longer exists{replacement}")


def build_panels(snapshot: Snapshot, view: View) -> dict[str, Panel]:
    """Build all panels except that of the run, which is not a table."""
    index, run = SnapshotIndex(snapshot), find_chosen_run(snapshot, view)
    return {
        GPUS: gpu_panel.make_gpus_panel(index, view.options(GPUS)),
        RANKS: rank_panel.make_ranks_panel(run, view.options(RANKS)),
        PROCESSES: rank_panel.make_processes_panel(index, view.options(PROCESSES)),
        RUNS: run_panel.make_runs_panel(index, view.options(RUNS), run.id if run is not None else ""),
    }


def handle_key(view: View, key: str, character: str, snapshot: Snapshot, page: int) -> tuple[View, Effect | None]:
    """Handle a key.

    `key` is its name in Textual, `character` the character that it types or "", and `page` the rows of the focused panel.
    """
    view = replace(view, note="")
    if view.mode == FILTER:
        return _edit_filter(view, key, character), None
    if view.mode == SORT:
        return _set_order(view, character), None
    if view.mode == CONFIRM:
        is_confirmed = character in ("y", "Y")
        effect = Effect(STOP, view.run_to_stop) if is_confirmed else None
        return replace(view, mode=BROWSE, run_to_stop="", note="" if is_confirmed else "not stopped"), effect
    if view.mode == HELP:
        return (view, Effect(QUIT)) if character in ("q", "Q") else (replace(view, mode=BROWSE), None)
    if key in ("q", "Q", "ctrl+c", "ctrl+q"):
        return view, Effect(QUIT)
    if key == "space":
        # The player pauses a replay, because seeking must still show snapshots while it is paused.
        return (view, Effect(PAUSE)) if view.replay else (replace(view, paused=not view.paused), None)
    if view.replay and key in ("left", "right"):
        return view, Effect(BACK if key == "left" else FORTH)
    if view.replay and character in ("+", "-"):
        return view, Effect(FASTER if character == "+" else SLOWER)
    return _handle_browse_key(view, key, character, snapshot, page), None


def _handle_browse_key(view: View, key: str, character: str, snapshot: Snapshot, page: int) -> View:
    if character in ("h", "H", "?") or key == "f1":
        return replace(view, mode=HELP)
    if character == "/":
        return replace(view, mode=FILTER, typed=view.filter)
    if character == "o" and ORDERS[view.focus]:
        return replace(view, mode=SORT)
    if character == "o":
        return replace(view, note="this panel can't be sorted; press Tab for another one")
    if key == "escape":
        return replace(view, filter="", typed="")
    if character in ("T", "x"):
        return _ask_to_stop(view, snapshot)
    if character and character in "12345":
        return replace(view, focus=PANELS[int(character) - 1])
    if key in ("tab", "right", "shift+tab", "left"):
        step = 1 if key in ("tab", "right") else -1
        return replace(view, focus=PANELS[(PANELS.index(view.focus) + step) % len(PANELS)])
    moves = {"up": -1, "down": 1, "k": -1, "j": 1, "pageup": -page, "pagedown": page, "home": -(10**9), "end": 10**9}
    return move_cursor(view, view.focus, moves[key], snapshot) if key in moves else view


def _edit_filter(view: View, key: str, character: str) -> View:
    if key == "enter":
        return replace(view, mode=BROWSE, filter=view.typed)
    if key == "escape":
        return replace(view, mode=BROWSE, typed=view.filter)
    if key in ("backspace", "ctrl+h"):
        return replace(view, typed=view.typed[:-1])
    if key == "ctrl+u":
        return replace(view, typed="")
    return append_to_filter(view, character)


def append_to_filter(view: View, text: str) -> View:
    """Append a typed character or pasted text."""
    return replace(view, typed=view.typed + "".join(letter for letter in text if letter.isprintable()))


def _set_order(view: View, character: str) -> View:
    """Sort the focused panel by the order with this letter. The same letter again reverses it; `n` removes it."""
    letter, reverse = view.sorts.get(view.focus, ("", False))
    new_letter = "" if character == "n" else character
    if character != "n" and character not in ORDERS[view.focus]:
        letters = ", ".join(["n", *ORDERS[view.focus]])
        return replace(view, mode=BROWSE, note=f"unknown sort letter; choose one of {letters}")
    new_reverse = not reverse if new_letter == letter else False
    return replace(view, mode=BROWSE, sorts={**view.sorts, view.focus: (new_letter, new_reverse)})


def _ask_to_stop(view: View, snapshot: Snapshot) -> View:
    run = find_chosen_run(snapshot, view)
    if run is None:
        return replace(view, note="no run to stop")
    if view.replay:
        return replace(view, note="a recording can't be stopped")
    if not run.mine:
        return replace(view, note=f"run {run.id} belongs to {run.user}, and only that user can stop it")
    if run.state not in (RUNNING, UNKNOWN):
        return replace(view, note=f"run {run.id} is not running: {run.state}")
    return replace(view, mode=CONFIRM, run_to_stop=run.id)


def move_cursor(view: View, panel: str, by: int, snapshot: Snapshot) -> View:
    """Move the cursor of a panel down by `by` rows. In the list of runs this chooses the run to show."""
    if panel == RUN:
        return view
    rows = build_panels(snapshot, view)[panel].rows
    if not rows:
        return view
    row = find_cursor_row(view, panel, [row.key for row in rows])
    # The first move down only shows the cursor, on the first row.
    new_row = row + by if panel in view.cursors else max(0, row + min(by, 0))
    return select_row(view, panel, rows[max(0, min(len(rows) - 1, new_row))].key)


def select_row(view: View, panel: str, key: str) -> View:
    view = replace(view, cursors={**view.cursors, panel: key})
    return replace(view, run=key) if panel == RUNS else view


def find_cursor_row(view: View, panel: str, keys: list[str]) -> int:
    """Return the index of the cursor's row, or 0 if that row does not exist any more."""
    key = view.cursors.get(panel)
    return keys.index(key) if key in keys else 0
