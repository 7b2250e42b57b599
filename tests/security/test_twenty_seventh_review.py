"""What the twenty-seventh review found: files in a checkout's .git that have no end, an axis that has none,
and long lines that took any amount of memory to break."""

from __future__ import annotations

import json
import os
from pathlib import Path

from browser import browsing
from conftest import Stoker, Terminal
from localuser import ATTACKER, needs_root
from test_web import finished, web


def test_steps_beyond_whole_numbers_leave_the_page_alive(stoker: Stoker, tmp_path: Path) -> None:
    """Marks between 10 ** 16 and the next steps were counted up by one, which is no other number there: the tab crashed."""
    needs_root()
    run = finished(stoker, "theirs")
    lines = [{"schema": 1, "time": 1e9 + at, "step": 10**16 + 2 * at, "loss": 9.0 - at} for at in range(4)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for path in (run, *run.rglob("*")):
        os.chown(path, ATTACKER, ATTACKER, follow_symlinks=False)
    with web(stoker, "--all") as page, browsing(tmp_path) as chromium:
        chromium.open(page.printed)
        chromium.until("document.querySelectorAll('.row[data-run]').length === 1")
        chromium.click(".cell.name a")
        chromium.until("document.querySelector('canvas.chart')?.getAttribute('aria-label').includes('6')")
        chromium.js("await new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(drawn)))")


def test_a_long_line_of_another_user_is_broken_in_bounded_memory(stoker: Stoker) -> None:
    """Each gap in it was a step of a recursion that kept a list of all gaps: 900 KB took more than 9 GB."""
    needs_root()
    run = finished(stoker, "theirs")
    verdict = json.loads((run / "verdict.json").read_text())
    (run / "verdict.json").write_text(json.dumps({**verdict, "status": "failed", "summary": "a  " * 300_000 + "end"}))
    for path in (run, *run.rglob("*")):
        os.chown(path, ATTACKER, ATTACKER, follow_symlinks=False)
    room = "import resource; resource.setrlimit(resource.RLIMIT_DATA, (1 << 30, 1 << 30))"
    terminal = Terminal(
        stoker, ["-c", f"{room}; from stoker.cli.main import entry; entry()", "why", str(run)], (100, 40)
    )
    code = terminal.wait(100)
    assert b"Traceback" not in terminal.shown and b" end" in terminal.shown, (code, terminal.shown[-2000:])
