"""stoker burnin [--minutes 5] [options]"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import stoker
from stoker.contract import layout
from stoker.contract.errors import EX_USAGE, Refusal
from stoker.contract.frozen import as_json, pick_fields
from stoker.contract.options import OptionParser
from stoker.contract.safe_io import read_json_lines
from stoker.contract.units import parse_duration, plural
from stoker.control.doctor import burnin_analysis as doctor
from stoker.control.plan.options import RunOptions, ranks_asked
from stoker.control.plan.request import Request
from stoker.control.record import run_index, run_record

SCHEMA = 1
COULD_NOT = 3

_HELP = """Trains the same small model from the same seed on every GPU, without any exchange, and compares losses and parameters
bit for bit: a card that computes something else is named, and one that is slow. With two ranks or more it then
proves the links: all-reduce sums and bus bandwidth, all together and pair by pair. Without GPUs it compares processes."""
_EXAMPLES = """examples:
  stoker burnin                        every usable GPU for 5 minutes; without GPUs every core
  stoker burnin --minutes 60 --gpus 0,3
  stoker burnin --steps 500 --json

exit codes: 0 fine, 1 something is slow, 2 something computes or adds up wrong, 3 could not be checked, 64 usage, 128+n stopped."""


def parser() -> OptionParser:
    made = OptionParser("stoker burnin", _HELP, _EXAMPLES)
    made.option("--minutes", "M", "how long the replicas train (default: 5, where --steps is not given)", float)
    made.option("--steps", "N", "how many steps they make", int)
    made.option(
        "--gpus",
        "WHICH",
        "which GPUs: 0,3 (as nvidia-smi counts), UUIDs, or any:2 for the two with the most free memory",
    )
    replicas = "replicas (default: one per usable GPU, or per core; cpu: leave GPUs alone)"
    made.option("--nproc-per-node --nproc_per_node", "N", replicas)
    made.switch("--share-gpus", "let several replicas, or another run, use one GPU: bits are compared, speed is not")
    made.option("--wait", "TIME", "wait this long for enough free GPUs, e.g. 10m", parse_duration)
    show = "the replicas' output: all, none, errors, or ranks (default: rank 0's on a terminal, else none)"
    made.option("--show", "WHAT", show)
    made.runs_dir()
    made.switch("--json", "the result as JSON")
    made.add_argument("--flip", help=argparse.SUPPRESS)  # RANK:STEP flips a bit there: shows that the burn-in finds it
    return made


def request_from(told: argparse.Namespace) -> Request:
    """The burn-in as a run: our own recipe, each rank alone with its GPU."""
    if told.minutes is not None and not (told.minutes > 0 and math.isfinite(told.minutes)):
        raise Refusal(f"--minutes {told.minutes:g}: give a number above 0", EX_USAGE)
    if told.steps is not None and told.steps < 1:
        raise Refusal(f"--steps {told.steps}: give a number from 1 up", EX_USAGE)
    if told.flip is not None and not re.fullmatch(r"\d+:\d+", told.flip):
        raise Refusal(f"--flip {told.flip}: write RANK:STEP", EX_USAGE)
    if told.json and told.show is not None:
        raise Refusal("--show and --json: with --json nothing but the result goes to stdout", EX_USAGE)
    minutes = 5.0 if told.minutes is None and told.steps is None else told.minutes
    args: list[str] = []
    for flag, value in (("--minutes", minutes), ("--steps", told.steps), ("--flip", told.flip)):
        args += [flag, str(value)] if value is not None else []
    # One per GPU, or per core: unless the environment says how many, as for `stoker run`.
    ranks = told.nproc_per_node or (None if ranks_asked(None, os.environ) else "auto")
    shown = told.show or ("0" if sys.stderr.isatty() and not told.json else "none")
    wanted: dict[str, Any] = {name: getattr(told, name) for name in ("share_gpus", "gpus", "wait", "runs_dir")}
    wanted |= {"isolate": True, "quiet": True, "show": shown, "nproc_per_node": ranks}
    given = {key: value for key, value in wanted.items() if value not in (None, False)}
    # By its place, not by import: this process stays without torch.
    script = os.path.join(os.path.dirname(stoker.__file__), "training", "recipes", "burnin.py")
    return Request(RunOptions(**given), script, tuple(args), frozenset(given))


def main(argv: list[str]) -> int:
    told = parser().parse_args(argv)
    request = request_from(told)
    from stoker.control.cluster import transport
    from stoker.control.launch import background

    link = transport.start_local_agent(0 if background.usable_stdin() else -1)
    from stoker.control.launch.run import launch

    code = launch(request, link, None)
    run = _own_run(layout.runs_root(told.runs_dir, os.environ))
    result = _Result(run, code)
    print(json.dumps(result.to_json(), indent=1) if told.json else "\n".join(result.lines()))
    return result.exit_code


def _own_run(root: str) -> run_record.RunRecord | None:
    """The run this process launched. Not runs/latest: somebody may have started another since."""
    me = os.getpid(), os.uname().nodename
    runs = [run for run in run_index.all_runs(root) if (run.launcher[0], run.launcher[2]) == me]
    return runs[-1] if runs else None


class _Result:
    def __init__(self, run: run_record.RunRecord | None, code: int) -> None:
        self.run = run
        self.status = run.verdict.status if run and run.verdict else "refused"
        folder = os.path.join(run.dir, "burnin") if run else ""
        ranks = run.data["plan"]["ranks"] if run else []
        shared = Counter(one["label"] for one in ranks)  # --share-gpus: GPU0#0 and GPU0#1
        self.replicas = []
        for one in ranks:
            name = one["label"] if shared[one["label"]] == 1 else f"{one['label']}#{one['rank']}"
            replica = doctor.replica_from(_records(os.path.join(folder, f"rank-{one['rank']}.jsonl")), name)
            self.replicas += [replica] if replica is not None else []
        self.links = doctor.links_from(_records(os.path.join(folder, "links.jsonl"))) if run else []
        self.judgement = doctor.judge(self.replicas, self.links, stopped=self.status == "stopped")
        used = {one["gpu"] for one in ranks}
        cards = [gpu for machine in run.data["hosts"].values() for gpu in machine["gpus"]] if run else []
        self.left_out = [f"GPU{gpu['index']}" for gpu in cards if gpu["uuid"] not in used] if any(used) else []
        levels = {finding.level for finding in self.judgement.findings}
        if "fail" in levels:
            self.exit_code = 2
        elif code == 0 and self.replicas:
            self.exit_code = 1 if "warn" in levels else 0
        else:
            self.exit_code = code if self.status == "stopped" or (run is None and code > 128) else COULD_NOT

    def to_json(self) -> dict[str, Any]:
        verdict = self.run.verdict if self.run else None
        return {
            "schema": SCHEMA,
            "run": self.run.id if self.run else None,
            "status": self.status,
            "summary": verdict.summary if verdict else None,
            "exit_code": self.exit_code,
            "replicas": [self._replica(one) for one in self.replicas],
            "left_out": self.left_out,
            "links": [pick_fields(link, "ranks", "backend", "bus_gbs", "wrong") for link in self.links],
            "findings": as_json(self.judgement.findings),
        }

    def _replica(self, replica: doctor.Replica) -> dict[str, Any]:
        opinion = self._opinion(replica)
        own = doctor.sheet(replica.card)
        return {
            **pick_fields(replica, "rank", "label", "card", "rounds", "step_s", "start", "end"),
            "uuid": replica.device,
            "steps": len(replica.steps),
            "sheet": {"tflops": own[0], "gbs": own[1]} if own else None,
            **pick_fields(opinion, "agrees", "twins"),
            "first_difference": opinion.first,
        }

    def _opinion(self, replica: doctor.Replica) -> doctor.Opinion:
        return next(one for one in self.judgement.opinions if one.rank == replica.rank)

    def lines(self) -> Iterator[str]:
        if self.replicas:
            columns = ("rank", "device", "card", "steps", "TFLOP/s", "GB/s", "agrees")
            yield from _table([columns, *map(self._row, self.replicas)])
        of = {one.rank: one for one in self.replicas}
        done = [link for link in self.links if link.bus_gbs is not None]
        for start in range(0, len(done), 6):
            head = f"links ({done[0].backend}, bus GB/s): " if not start else "  "
            rates = [f"{doctor.between(link, of)} {_number(link.bus_gbs)}" for link in done[start : start + 6]]
            yield head + " · ".join(rates)
        if self.left_out:
            yield f"not tried: {', '.join(self.left_out)} (in use, unusable or not asked for)"
        for finding in self.judgement.findings:
            yield f"{finding.level.upper()} {finding.id}: {finding.text}"
            yield f"  {finding.fix}"
        if self.exit_code == 0:
            yield f"✓ {self._summary()}"
        elif self.exit_code not in (1, 2):
            verdict = self.run.verdict if self.run else None
            yield f"could not be checked: {verdict.summary if verdict else 'the run was not started'}"

    def _summary(self) -> str:
        steps = min(len(one.steps) for one in self.replicas)
        alone = [one.label for one in self.replicas if not self._opinion(one).twins]
        if len(self.replicas) > 1 and not alone:
            links = "; every all-reduce is right" if self.links else ""
            return f"{len(self.replicas)} replicas agree bit for bit over {plural(steps, 'step')}{links}"
        return f"{plural(steps, 'step')}; without a twin, compared with its own rounds only: {', '.join(alone)}"

    def _row(self, replica: doctor.Replica) -> tuple[str, ...]:
        opinion, speed, own = self._opinion(replica), doctor.hot(replica), doctor.sheet(replica.card)
        figures = [(speed.tflops, own and own[0]), (speed.gbs, own and own[1])] if speed else []
        shown = [_number(mine) + (f" ({100 * mine / full:.0f} %)" if full else "") for mine, full in figures]
        shown = shown or ["n/a", "n/a"]
        if opinion.agrees is None:
            agrees = "n/a"
        elif opinion.agrees:
            agrees = "yes" if opinion.twins else "with itself"
        else:
            agrees = f"{'NO' if opinion.decided else 'disputed'}, step {opinion.first}"
        return str(replica.rank), replica.label, replica.card or "n/a", str(len(replica.steps)), *shown, agrees


def _number(value: float | None) -> str:
    if value is None:
        return "n/a"
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _table(rows: list[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]))]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _records(path: str) -> Iterator[dict[str, Any]]:
    return (record for _, record in read_json_lines(path))
