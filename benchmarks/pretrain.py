"""Pretraining on one GPU: tokens/s, memory and seconds to the first step of Stoker and of what one would pick instead, with a loss-parity gate.

    python benchmarks/pretrain.py --sizes S,M,L --peers stoker,hf-tuned --json cells.jsonl --commit $(git rev-parse --short HEAD)
    python benchmarks/pretrain.py --sizes S --peers stoker,hf-tuned,hf,lightning,loop --parity --rounds 3
    python benchmarks/pretrain.py --read cells.jsonl more.jsonl          the table of cells measured before
    python benchmarks/pretrain.py --sizes T --peers stoker,hf,hf-tuned,lightning,loop --parity     no GPU: shows that it works, measures nothing

stoker      `stoker train pretrain`'s recipe as it is, bf16; stoker-fp8 the same with compute.fp8 tensorwise
hf          transformers' Trainer, bf16=True, its other defaults
hf-tuned    the same with torch_compile, 4 workers, pinned memory, rare logging, no NaN filter
lightning   bf16-mixed, compiled, fused AdamW
loop        a hand-written loop on the transformers module, compiled, autocast: the floor of what such loops reach

Every cell is a process of its own with an empty compile cache. All of them start from the same weights (made once, loaded from safetensors), see the
same tokens in the same order, 262,144 a step, the same micro-batch, AdamW at 3e-4 constant (0.9, 0.95, 1e-8, decay 0.1 of matrices), clipped at 1.0.
A row has T inputs and T targets for everybody (transformers takes them as `shift_labels`). The tokens are Zipf's, half of them told by the one
before, so that the loss falls and a wrong gradient shows. A step's end is a CUDA event, read when all is done; the median of the steps after
the warm-up counts. The first step is waited for, counted from the start of the process. Losses are kept on the device: nobody syncs for them.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from pretrain_score import PEERS, SCHEMA, SIZES, finished, later, parities, table

HERE = Path(__file__).resolve().parent
TAIL = 15  # lines of a failed cell
PREPARING_S = 240.0  # weights and tokens of all sizes; far below a minute on an H200's machine


def chosen(text: str, known: Any, what: str) -> list[str]:
    found = [one.strip() for one in text.split(",") if one.strip()]
    unknown = [one for one in found if one not in known]
    if unknown or not found:
        raise SystemExit(f"{what}: {', '.join(unknown) or 'nothing'} is not one of {', '.join(known)}")
    return found


def end_session(process: subprocess.Popen[bytes]) -> None:
    """The cell and what it started: loaders and compilers are processes of their own."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # nothing of it is left
    process.wait()


def child(program: str, spec: dict[str, Any], folder: Path, limit: float | None) -> tuple[dict[str, Any] | None, str]:
    """(what the process found, or None; its output)."""
    work = Path(tempfile.mkdtemp(prefix="cell-", dir=folder))
    paths = [str(HERE.parent / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "TORCHINDUCTOR_CACHE_DIR": str(work / "inductor"),
        "TRITON_CACHE_DIR": str(work / "triton"),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        "STOKER_RUN_DIR": str(work / "run"),
    }
    told = {
        **spec,
        "folder": str(folder),
        "work": str(work),
        "result": str(work / "result.json"),
        "started": time.time(),
    }
    with (work / "output").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, str(HERE / program), json.dumps(told)],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=env,
            cwd=work,
            start_new_session=True,
        )
        try:
            process.wait(limit)
            ended = f"exit code {process.returncode}"
        except subprocess.TimeoutExpired:
            ended = "cut off: the budget is over"
        finally:
            end_session(process)
    text = (work / "output").read_text(errors="replace") + ended
    result = work / "result.json"
    found = json.loads(result.read_text()) if result.exists() else None
    shutil.rmtree(work)
    return found, text


def measure(told: argparse.Namespace, command: str) -> tuple[list[dict[str, Any]], bool]:
    """The cells that were finished, and whether these are all."""
    began = time.monotonic()
    sizes, peers = chosen(told.sizes, SIZES, "--sizes"), chosen(told.peers, PEERS, "--peers")

    def left() -> float | None:
        return told.budget - (time.monotonic() - began) if told.budget else None

    steps = {name: max(told.steps, SIZES[name].steps, SIZES[name].parity if told.parity else 0) for name in sizes}
    folder = Path(tempfile.mkdtemp(prefix="pretrain-", dir=told.scratch))
    cells: list[dict[str, Any]] = []
    try:
        room = left()
        machine, text = child(
            "pretrain_prepare.py",
            {"sizes": sizes, "steps": told.steps},
            folder,
            min(PREPARING_S, room) if room else PREPARING_S,
        )
        if machine is None:
            raise SystemExit("preparing failed:\n" + "\n".join(text.splitlines()[-TAIL:]))
        print(f"prepared in {time.monotonic() - began:.0f} s on {machine['device']}", file=sys.stderr, flush=True)
        about = {**machine, "command": command, "commit": told.commit, "date": time.strftime("%Y-%m-%d")}
        # Neighbours in time are different peers, and who goes first changes with the round.
        plan = [
            (turn, name, peer)
            for turn in range(told.rounds)
            for name in sizes
            for peer in (peers if turn % 2 == 0 else peers[::-1])
        ]
        for place, (turn, name, peer) in enumerate(plan):
            room = left()
            if room is not None and room < told.least:
                skipped = ", ".join(f"{one}/{other}" for _, one, other in plan[place:])
                print(f"the budget of {told.budget:.0f} s is over ({room:.0f} s left): skipped {skipped}", flush=True)
                break
            start = time.monotonic()
            found, text = child(
                "pretrain_cells.py",
                {"peer": peer, "size": name, "steps": steps[name], "compile": told.compile},
                folder,
                room,
            )
            if found is None:
                print(f"{name}/{peer} failed:\n" + "\n".join(text.splitlines()[-TAIL:]), flush=True)
                continue
            cell = finished(found, name, peer, turn, about) | {"cell_s": round(time.monotonic() - start, 1)}
            cells.append(cell)
            print(json.dumps({key: value for key, value in cell.items() if key not in ("about", "step_s")}), flush=True)
            if told.json:
                with open(told.json, "a", encoding="utf-8") as file:
                    file.write(json.dumps(cell) + "\n")
    finally:
        shutil.rmtree(folder)
    return cells, len(cells) == len(plan)


def read(paths: list[str]) -> list[dict[str, Any]]:
    cells = [json.loads(line) for path in paths for line in Path(path).read_text().splitlines() if line.startswith("{")]
    return [cell for cell in cells if cell.get("schema") == SCHEMA and "losses" in cell]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="S,M,L")
    parser.add_argument("--peers", default="stoker,hf-tuned", help=f"of {', '.join(PEERS)}")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--parity", action="store_true", help="enough steps for the gate (50 on S, 10 on M and L)")
    parser.add_argument(
        "--steps", type=int, default=0, metavar="N", help="at least so many: how far losses part later on"
    )
    parser.add_argument("--json", metavar="OUT", help="each finished cell is appended to it at once")
    parser.add_argument(
        "--budget", type=float, default=0.0, metavar="SECONDS", help="no cell goes on after this (0: no limit)"
    )
    parser.add_argument(
        "--least", type=float, default=25.0, metavar="SECONDS", help="with less of the budget left no cell is begun"
    )
    parser.add_argument(
        "--compile", default="auto", choices=("auto", "on", "off"), help="of the peers that compile: auto, on GPUs only"
    )
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--scratch", metavar="DIR", help="where weights and compile caches go (L takes 3 GB)")
    parser.add_argument("--read", nargs="+", metavar="FILE", help="no measuring: the table of these files")
    told = parser.parse_args()  # exit code 1: a cell is missing, or the gate did not pass
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that a cell does not outlive us
    cells, complete = (read(told.read), True) if told.read else measure(told, "python " + " ".join(sys.argv))
    if not cells:
        print("no cell was finished")
        return 1
    print("\n" + table(cells))
    gates = parities(cells)
    for (size, peer), parity in gates.items():
        print(f"parity {size}/{peer}: {parity}".replace("**", ""))
    for line in later(cells):
        print(line)
    failed = told.parity and any(not parity.passed for (_, peer), parity in gates.items() if peer.startswith("stoker"))
    return 1 if failed or not complete else 0


if __name__ == "__main__":
    sys.exit(main())
