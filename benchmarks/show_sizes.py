"""Seconds until large things are seen: a metrics file of 100,000 steps in `stoker plot` and on the page, 1,000 runs in `stoker runs` and on the page.

    python benchmarks/show_sizes.py [--rounds 3]

From starting the command to its end; of the page from opening its address in a fresh Chromium session until the curve, or the last run of the list, is there, by
the browser's own clock (`stoker web` has just started and has read nothing yet). Medians, beside the CPU seconds of Stoker's process. Without Chromium and its driver the page's rows are left out, and that is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]
STEPS, RUNS = 100_000, 1_000
COMMAND = [sys.executable, "-c", "import sys; from stoker.cli.main import main; sys.exit(main())"]
SCRIPT = "import stoker\nfor step in range(3):\n    stoker.beat(step=step, loss=1.0 / (step + 1))\n"
# Looked for before each picture that the browser draws; performance.now() counts from the opening, redirects included.
WATCH = "(() => { const look = () => { if (THERE) window.thereAt = performance.now(); else requestAnimationFrame(look); }; look(); })()"
CURVE = "document.querySelector('canvas.chart')?.getAttribute('aria-label').includes(': ')"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        one = prepared(folder)
        rows: dict[str, Callable[[], tuple[float, float]]] = {
            f"stoker plot, {STEPS:,} steps": lambda: command(folder / "one", "plot", one),
            f"stoker runs, {RUNS:,} runs": lambda: command(folder / "many", "runs", "--limit", str(RUNS)),
            f"page of a run, {STEPS:,} steps": lambda: page(folder / "one", f"#/run/{one}", CURVE),
            f"page of {RUNS:,} runs": lambda: page(
                folder / "many", "", f"document.querySelectorAll('.row[data-run]').length === {RUNS}"
            ),
        }
        for name, measure in rows.items():
            if name.startswith("page") and not (shutil.which("chromedriver") and shutil.which("chromium")):
                print(f"{name}: left out, no chromium with chromedriver here")
                continue
            seen = [measure() for _ in range(given.rounds)]
            walls, cpus = zip(*seen, strict=True)
            print(
                f"{name}: {statistics.median(walls):.2f} s ({min(walls):.2f} to {max(walls):.2f}), CPU {statistics.median(cpus):.2f} s",
                flush=True,
            )
    return 0


def prepared(folder: Path) -> str:
    """A run of 100,000 steps in one/runs, and 1,000 small ones in many/runs."""
    (folder / "train.py").write_text(SCRIPT)
    for name in ("one", "many"):
        (folder / name).mkdir()
    subprocess.run(
        [*COMMAND, "run", "--nproc-per-node", "1", "../train.py"],
        cwd=folder / "one",
        env=environment(),
        check=True,
        capture_output=True,
    )
    run_dir = next(path for path in (folder / "one" / "runs").iterdir() if path.is_dir() and not path.is_symlink())
    for number in range(RUNS):
        shutil.copytree(run_dir, folder / "many" / "runs" / f"copy-{number:04}")
    with open(run_dir / "metrics.jsonl", "w") as file:
        for step in range(STEPS):
            line = {
                "schema": 1, "time": 1e9 + step, "step": step, "total_steps": STEPS, "loss": 9.0 / (1 + step / 500), "lr": 1e-3,
                "grad_norm": 1.0, "tokens_per_s": 4e5, "step_s": 0.1,
            }  # fmt: skip
            file.write(json.dumps(line) + "\n")
    return run_dir.name


def environment() -> dict[str, str]:
    return {
        **{key: value for key, value in os.environ.items() if not key.startswith("STOKER_")},
        "PYTHONPATH": str(ROOT / "src"),
    }


def command(folder: Path, *words: str) -> tuple[float, float]:
    before, began = used(), time.monotonic()
    done = subprocess.run([*COMMAND, *words], cwd=folder, env=environment(), check=True, capture_output=True, text=True)
    assert done.stdout.count("\n") > 5, done.stdout
    return time.monotonic() - began, used() - before


def used() -> float:
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


def page(folder: Path, below: str, there: str) -> tuple[float, float]:
    sys.path.insert(0, str(ROOT / "tests"))
    from browser import browsing

    server = subprocess.Popen(
        [*COMMAND, "web", "--port", "0"], cwd=folder, env=environment(), stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        address = server.stdout.readline().strip()
        assert re.match(r"http://127\.0\.0\.1:\d+/\?token=", address), address
        with tempfile.TemporaryDirectory() as profile, browsing(Path(profile)) as browser:
            watch = WATCH.replace("THERE", there)
            browser.devtools("Page.addScriptToEvaluateOnNewDocument", {"source": watch})
            browser.open(address + below)
            seconds = browser.until("window.thereAt", seconds=60.0) / 1000
            with open(
                f"/proc/{server.pid}/stat"
            ) as file:  # before the browser ends: until then it looks again and again
                ticks = file.read().rsplit(")", 1)[1].split()
        return seconds, (int(ticks[11]) + int(ticks[12])) / os.sysconf("SC_CLK_TCK")
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    sys.exit(main())
