"""Are the values of `stoker top --json` those of nvidia-smi while this machine's GPUs compute? Start it beside a run.

    PYTHONPATH=src python benchmarks/show_values.py [--seconds 60] [--json values.json]

nvidia-smi samples in a loop of its own. Each value that Stoker read must lie between the least and the largest that nvidia-smi
showed from one sample before it to one sample after it; whole units, as nvidia-smi rounds. Exit code 1: one did not.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import datetime

MIB, PERIOD = 1 << 20, 1.0
COMMAND = "import sys; from stoker.cli.main import main; sys.exit(main())"


@dataclass(frozen=True)
class Value:
    asked: str  # of nvidia-smi
    name: str  # of Stoker
    unit: float
    off: float  # units that rounding may make


VALUES = (
    Value("utilization.gpu", "utilization", 0.01, 0.5), Value("memory.used", "memory_used", MIB, 1.0), Value("temperature.gpu", "temperature", 1, 0.5),
    Value("power.draw", "power", 1, 0.5), Value("clocks.sm", "clock", 1e6, 0.5), Value("memory.total", "memory_total", MIB, 1.0),
    Value("power.limit", "power_limit", 1, 0.5),
)  # fmt: skip


def looked(seconds: float) -> list[tuple[float, float, list[dict[str, object]]]]:
    """(before, after, what Stoker read) of each look."""
    time.sleep(2 * PERIOD)
    ours, end = [], time.monotonic() + seconds
    while time.monotonic() < end:
        began = time.time()
        look = subprocess.run(
            [sys.executable, "-c", COMMAND, "top", "--json"], stdout=subprocess.PIPE, text=True, check=True
        )
        ours.append((began, time.time(), json.loads(look.stdout)["gpus"]))
        time.sleep(PERIOD)
    time.sleep(2 * PERIOD)
    return ours


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--json", default="")
    given = parser.parse_args()
    asked = ",".join(("timestamp", "index", *(value.asked for value in VALUES)))
    argv = ["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader,nounits", f"-lms={int(PERIOD * 50)}"]
    with tempfile.TemporaryFile("w+") as shown:  # a pipe that nobody reads holds 64 KB: nvidia-smi would stop
        smi = subprocess.Popen(argv, stdout=shown)
        ours = looked(given.seconds)
        smi.terminate()
        smi.wait()
        shown.seek(0)
        samples = [_sample(line) for line in shown if line.count(",") == len(VALUES) + 1]
    print(f"{len(ours)} looks of {len(ours[0][2])} GPUs, {len(samples)} lines of nvidia-smi")
    found = {value.name: _outside(value, ours, samples) for value in VALUES}
    for name, (outside, looks, least, most) in found.items():
        print(f"{name:14} {least:12.1f} to {most:12.1f}   outside: {outside} of {looks}")
    if given.json:
        with open(given.json, "w") as file:
            json.dump(found, file)
    return int(any(outside for outside, *_ in found.values()))


def _sample(line: str) -> tuple[float, int, dict[str, float | None]]:
    when, index, *values = (part.strip() for part in line.split(","))
    at = datetime.strptime(when, "%Y/%m/%d %H:%M:%S.%f").timestamp()
    return at, int(index), {value.asked: _number(text) for value, text in zip(VALUES, values, strict=True)}


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:  # [N/A]
        return None


def _outside(
    value: Value,
    ours: list[tuple[float, float, list[dict[str, object]]]],
    samples: list[tuple[float, int, dict[str, float | None]]],
) -> tuple[int, int, float, float]:
    """(looks outside, looks, least, most)."""
    outside, seen = 0, []
    for began, ended, gpus in ours:
        for gpu in gpus:
            read = gpu[value.name]
            near = [
                number
                for at, index, numbers in samples
                if index == gpu["index"] and began - PERIOD <= at <= ended + PERIOD
                if (number := numbers[value.asked]) is not None
            ]
            if not isinstance(read, (int, float)) or not near:
                outside += (read is None) != (not near)  # both say nothing, or one alone
                continue
            seen.append(read / value.unit)
            outside += not min(near) - value.off <= seen[-1] <= max(near) + value.off
    return outside, len(seen), min(seen, default=0.0), max(seen, default=0.0)


if __name__ == "__main__":
    sys.exit(main())
