"""Healthy burn-ins, again and again: how many raise an alarm (none should), and how long one takes.

python benchmarks/burnin_repeat.py [--times 20] [--steps 80] [-- more options of stoker burnin]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time


def once(words: list[str]) -> tuple[int, float, dict[str, object], str]:
    """(exit code, seconds, the result, stderr)."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "stoker", "burnin", "--json", *words],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, time.monotonic() - began, json.loads(done.stdout) if done.stdout else {}, done.stderr


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("more", nargs="*", help="options of stoker burnin, after --")
    told = parser.parse_args()
    results = [once(["--steps", str(told.steps), *told.more]) for _ in range(told.times)]
    alarms = [found["findings"] for code, _, found, _ in results if found.get("findings")]
    for code, _, found, err in results:
        if code:
            print(f"exit code {code}: {found.get('findings') or err.strip()}", file=sys.stderr)
    replicas = results[0][2].get("replicas") or []
    assert isinstance(replicas, list)
    cards = ", ".join(dict.fromkeys(one["card"] or "CPU core" for one in replicas))
    seconds = [took for _, took, _, _ in results]
    print(
        "| replicas | steps | burn-ins | alarms | could not be checked | one takes, median (max)"
        " |\n|---|---|---|---|---|---|"
    )
    print(
        f"| {len(replicas)} × {cards or 'n/a'} | {told.steps} | {told.times} | {len(alarms)} |"
        f" {sum(code > 2 for code, _, _, _ in results)} | {statistics.median(seconds):.1f} s ({max(seconds):.1f} s) |"
    )
    sys.exit(1 if any(code for code, _, _, _ in results) else 0)


if __name__ == "__main__":
    main()
