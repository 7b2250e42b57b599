"""GRPO on one GPU: tokens/s of generation beside transformers' `generate`, and seconds per step beside TRL's GRPOTrainer.

    python benchmarks/grpo.py --json cells.jsonl --commit $(git rev-parse --short HEAD)      both parts
    python benchmarks/grpo.py --parts generate --rounds 2
    python benchmarks/grpo.py --read cells.jsonl                                             the table of cells measured before
    python benchmarks/grpo.py --size T                                                       no GPU: shows that it works, measures nothing

generate    64 prompts of 64 tokens, 256 new tokens each, Qwen3-0.6B's shape with random weights, bf16, sampled at temperature 1 (grpo_generate.py)
step        the same shape, 8 prompts in groups of 8, against TRL's defaults (grpo_step.py)

Every cell is a process of its own; neighbours in time are different peers, and who goes first changes with the round. Medians of all repeats count.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from pretrain import chosen, end_session

HERE = Path(__file__).resolve().parent
PARTS, GENERATORS, STEPPERS = ("generate", "step"), ("stoker", "transformers"), ("stoker", "trl")
SCHEMA = 1
TAIL = 15  # lines of a failed cell


def environment() -> dict[str, str]:
    paths = [str(HERE.parent / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def cell(spec: dict[str, Any], folder: Path) -> dict[str, Any] | None:
    """What one process of grpo_generate.py found; None, and its last lines are printed, where it failed."""
    result, output = folder / "result.json", folder / "output"
    result.unlink(missing_ok=True)
    with output.open("wb") as log:
        process = subprocess.Popen(
            [
                sys.executable,
                str(HERE / "grpo_generate.py"),
                json.dumps({**spec, "weights": str(folder / "weights"), "result": str(result)}),
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment(),
            start_new_session=True,
        )
        try:
            process.wait()
        finally:
            end_session(process)
    if process.returncode == 0 and result.exists():
        found: dict[str, Any] = json.loads(result.read_text())
        return found
    print(f"{spec['peer']} failed:\n" + "\n".join(output.read_text(errors="replace").splitlines()[-TAIL:]), flush=True)
    return None


def generate(told: argparse.Namespace, about: dict[str, Any]) -> list[dict[str, Any]]:
    cells = []
    with tempfile.TemporaryDirectory(prefix="grpo-generate-") as work:
        if cell({"peer": "weights", "size": told.size}, Path(work)) is None:
            return []
        for turn in range(told.rounds):
            for peer in told.generators if turn % 2 == 0 else told.generators[::-1]:
                found = cell({"peer": peer, "size": told.size, "repeats": told.repeats}, Path(work))
                if found is not None:
                    cells.append({"schema": SCHEMA, "part": "generate", "round": turn, **found, **about})
                    _keep(cells[-1], told.json)
    return cells


def step(told: argparse.Namespace, about: dict[str, Any]) -> list[dict[str, Any]]:
    command = [
        sys.executable,
        str(HERE / "grpo_step.py"),
        "--size",
        told.size,
        "--peers",
        ",".join(told.steppers),
        "--commit",
        told.commit,
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment(), check=False)
    cells = [
        {"schema": SCHEMA, "part": "step", **json.loads(line), **about}
        for line in done.stdout.splitlines()
        if line.startswith("{")
    ]
    for one in cells:
        _keep(one, told.json)
    return cells


def _keep(one: dict[str, Any], path: str | None) -> None:
    print(json.dumps({key: value for key, value in one.items() if key != "greedy"}), flush=True)
    if path:
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(one) + "\n")


def table(cells: list[dict[str, Any]]) -> str:
    written = {peer: [one for one in cells if one["part"] == "generate" and one["peer"] == peer] for peer in GENERATORS}
    steps = [one for one in cells if one["part"] == "step" and "step_s" in one]
    return "\n\n".join(
        part for part in (generated({peer: some for peer, some in written.items() if some}), stepped(steps)) if part
    )


def generated(written: dict[str, list[dict[str, Any]]]) -> str:
    if not written:
        return ""
    seconds = {
        peer: statistics.median(value for one in some for value in one["seconds"]) for peer, some in written.items()
    }
    lines = [
        "| generation | tokens/s | ms a token step | first two calls, s | peak GiB | against transformers |",
        "|---|---|---|---|---|---|",
    ]
    for peer, some in written.items():
        memory = f"{max(one['memory'] for one in some) / 2**30:.1f}" if some[0]["memory"] else "n/a"
        ratio = f"{seconds['transformers'] / seconds[peer]:.1f} ×" if "transformers" in seconds else "n/a"
        first, speed = statistics.median(one["first_s"] for one in some), some[0]["tokens"] / seconds[peer]
        lines.append(
            f"| {peer} | {speed:,.0f} | {1e3 * seconds[peer] / some[0]['new']:.2f} | {first:.1f} | {memory} | {ratio} |"
        )
    if len(written) == 2:
        ours, theirs = (some[0]["greedy"] for some in written.values())
        same = sum(one == two for one, two in zip(ours, theirs, strict=True))
        lines.append(f"\ngreedy first tokens that are the same: {same} of {len(ours)}")
    return "\n".join(lines)


def stepped(steps: list[dict[str, Any]]) -> str:
    if not steps:
        return ""
    rows = [
        f"| {one['peer']} | {one['step_s']:.2f} | {one['tokens_per_s']:,.0f} | {one['peak_gib'] or 'n/a'} |"
        for one in steps
    ]
    return "\n".join(["| GRPO step | seconds | answers' tokens/s | peak GiB |", "|---|---|---|---|", *rows])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="generate,step", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--size", default="M", choices=("M", "T"))
    parser.add_argument("--generators", default=",".join(GENERATORS), help=f"of {', '.join(GENERATORS)}")
    parser.add_argument("--steppers", default=",".join(STEPPERS), help=f"of {', '.join(STEPPERS)}")
    parser.add_argument("--rounds", type=int, default=1, help="of the generation's cells")
    parser.add_argument("--repeats", type=int, default=3, help="timed calls in a cell")
    parser.add_argument("--json", metavar="OUT", help="each finished cell is appended to it at once")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--read", nargs="+", metavar="FILE", help="no measuring: the table of these files")
    told = parser.parse_args()  # exit code 1: a cell is missing
    if told.read:
        lines = [line for path in told.read for line in Path(path).read_text().splitlines() if line.startswith("{")]
        print(
            table([one for one in map(json.loads, lines) if one.get("schema") == SCHEMA and one.get("part") in PARTS])
        )
        return 0
    parts = chosen(told.parts, PARTS, "--parts")
    told.generators, told.steppers = (
        chosen(told.generators, GENERATORS, "--generators"),
        chosen(told.steppers, STEPPERS, "--steppers"),
    )
    about = {"command": "python " + " ".join(sys.argv), "commit": told.commit, "date": time.strftime("%Y-%m-%d")}
    cells: list[dict[str, Any]] = []
    wanted = 0
    if "generate" in parts:
        cells += generate(told, about)
        wanted += told.rounds * len(told.generators)
    if "step" in parts:
        cells += step(told, about)
        wanted += len(told.steppers)
    print("\n" + table(cells))
    return 0 if len(cells) == wanted else 1


if __name__ == "__main__":
    sys.exit(main())
