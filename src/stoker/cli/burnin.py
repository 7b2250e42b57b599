"""`stoker burnin [--minutes 5]`: trains same-seed replicas on all GPUs to find one that computes wrong results or is slow."""

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
from stoker.control.doctor import burnin_analysis as analysis
from stoker.control.plan.options import RunOptions, requested_ranks
from stoker.control.plan.request import Request
from stoker.control.record import run_index, run_record

SCHEMA = 1
NOT_CHECKED = 3  # exit code
_LINKS_PER_LINE = 6

_DESCRIPTION = """Trains the same small model from the same seed on every GPU, without communication, and compares losses and parameters
bit for bit: this finds a GPU that computes something else, and one that is slow. With two ranks or more it then
checks the links: all-reduce sums and bus bandwidth, all together and pair by pair. Without GPUs it compares processes."""
_EXAMPLES = """examples:
  stoker burnin                        every usable GPU for 5 minutes; without GPUs every core
  stoker burnin --minutes 60 --gpus 0,3
  stoker burnin --steps 500 --json

exit codes: 0 fine, 1 something is slow, 2 a result is wrong, 3 could not be checked, 64 usage, 128+n stopped by a signal."""


def build_parser() -> OptionParser:
    parser = OptionParser("stoker burnin", _DESCRIPTION, _EXAMPLES)
    parser.option("--minutes", "M", "how long the replicas train (default: 5, unless --steps is given)", float)
    parser.option("--steps", "N", "how many steps they train", int)
    gpus = "which GPUs: 0,3 (numbered as by nvidia-smi), UUIDs, or any:2 for the two with the most free memory"
    parser.option("--gpus", "WHICH", gpus)
    replicas = "replicas (default: one per usable GPU, or per core; cpu: use no GPU)"
    parser.option("--nproc-per-node --nproc_per_node", "N", replicas)
    share = "let several replicas, or another run, use one GPU: bits are compared, speed is not"
    parser.switch("--share-gpus", share)
    parser.option("--wait", "TIME", "wait this long for enough free GPUs, e.g. 10m", parse_duration)
    show = "the replicas' output: all, none, errors, or ranks (default: rank 0's on a terminal, else none)"
    parser.option("--show", "WHAT", show)
    parser.runs_dir()
    parser.switch("--json", "print the result as JSON")
    parser.add_argument("--flip", help=argparse.SUPPRESS)  # RANK:STEP: flip a bit there, to test the burn-in itself
    return parser


def main(argv: list[str]) -> int:
    args = build_parser().parse_args(argv)
    request = make_request(args)
    from stoker.control.cluster import transport
    from stoker.control.launch import background

    link = transport.start_local_agent(0 if background.has_usable_stdin() else -1)
    from stoker.control.launch.run import launch

    code = launch(request, link, None)
    # Find the run that this process launched: runs/latest may be a run that was started since.
    launcher = os.getpid(), os.uname().nodename
    runs = run_index.own_runs(layout.runs_root(args.runs_dir, os.environ))
    own_runs = [run for run in runs if (run.launcher[0], run.launcher[2]) == launcher]
    report = BurninReport(own_runs[-1] if own_runs else None, code)
    print(json.dumps(report.to_json(), indent=1) if args.json else "\n".join(report.format_lines()))
    return report.exit_code


def make_request(args: argparse.Namespace) -> Request:
    """Make the request of a run of Stoker's burn-in recipe, in which each rank sees only its GPU."""
    if args.minutes is not None and not (args.minutes > 0 and math.isfinite(args.minutes)):
        raise Refusal(f"--minutes must be above 0, got {args.minutes:g}", EX_USAGE)
    if args.steps is not None and args.steps < 1:
        raise Refusal(f"--steps must be at least 1, got {args.steps}", EX_USAGE)
    if args.flip is not None and not re.fullmatch(r"\d+:\d+", args.flip):
        raise Refusal(f"--flip must be RANK:STEP, got {args.flip}", EX_USAGE)
    if args.json and args.show is not None:
        raise Refusal("--show can't be combined with --json, which prints only the result on stdout", EX_USAGE)
    minutes = 5.0 if args.minutes is None and args.steps is None else args.minutes
    recipe_args: list[str] = []
    for flag, value in (("--minutes", minutes), ("--steps", args.steps), ("--flip", args.flip)):
        recipe_args += [flag, str(value)] if value is not None else []
    # auto starts one rank per GPU, or per core without GPUs. The environment may set a number, as for `stoker run`.
    ranks = args.nproc_per_node or (None if requested_ranks(None, os.environ) else "auto")
    show = args.show or ("0" if sys.stderr.isatty() and not args.json else "none")
    options: dict[str, Any] = {name: getattr(args, name) for name in ("share_gpus", "gpus", "wait", "runs_dir")}
    options |= {"isolate": True, "quiet": True, "show": show, "nproc_per_node": ranks}
    given = {key: value for key, value in options.items() if value not in (None, False)}
    # Name the recipe by its path: importing it would load torch, which takes seconds.
    script = os.path.join(os.path.dirname(stoker.__file__), "training", "recipes", "burnin.py")
    return Request(RunOptions(**given), script, tuple(recipe_args), frozenset(given))


class BurninReport:
    """The result of a burn-in, read from its run."""

    def __init__(self, run: run_record.RunRecord | None, code: int) -> None:
        self.run = run
        self.status = run.verdict.status if run and run.verdict else "refused"
        folder = os.path.join(run.dir, "burnin") if run else ""
        ranks = run.data["plan"]["ranks"] if run else []
        ranks_per_gpu = Counter(rank["label"] for rank in ranks)  # --share-gpus: GPU0#0 and GPU0#1
        self.replicas = []
        for rank in ranks:
            name = rank["label"] if ranks_per_gpu[rank["label"]] == 1 else f"{rank['label']}#{rank['rank']}"
            replica = analysis.parse_replica(_read_records(os.path.join(folder, f"rank-{rank['rank']}.jsonl")), name)
            self.replicas += [replica] if replica is not None else []
        self.links = analysis.parse_links(_read_records(os.path.join(folder, "links.jsonl"))) if run else []
        self.judgement = analysis.judge(self.replicas, self.links, stopped=self.status == "stopped")
        used = {rank["gpu"] for rank in ranks}
        gpus = [gpu for machine in run.data["hosts"].values() for gpu in machine["gpus"]] if run else []
        self.left_out = [f"GPU{gpu['index']}" for gpu in gpus if gpu["uuid"] not in used] if any(used) else []
        levels = {finding.level for finding in self.judgement.findings}
        if "fail" in levels:
            self.exit_code = 2
        elif code == 0 and self.replicas:
            self.exit_code = 1 if "warn" in levels else 0
        else:
            self.exit_code = code if self.status == "stopped" or (run is None and code > 128) else NOT_CHECKED

    def to_json(self) -> dict[str, Any]:
        verdict = self.run.verdict if self.run else None
        return {
            "schema": SCHEMA,
            "run": self.run.id if self.run else None,
            "status": self.status,
            "summary": verdict.summary if verdict else None,
            "exit_code": self.exit_code,
            "replicas": [self._replica_to_json(replica) for replica in self.replicas],
            "left_out": self.left_out,
            "links": [pick_fields(link, "ranks", "backend", "bus_gbs", "wrong") for link in self.links],
            "findings": as_json(self.judgement.findings),
        }

    def _replica_to_json(self, replica: analysis.Replica) -> dict[str, Any]:
        opinion = self._opinion_of(replica)
        sheet = analysis.find_data_sheet(replica.card)
        return {
            **pick_fields(replica, "rank", "label", "card", "rounds", "step_s", "start", "end"),
            "uuid": replica.device,
            "steps": len(replica.steps),
            "sheet": {"tflops": sheet[0], "gbs": sheet[1]} if sheet else None,
            **pick_fields(opinion, "agrees", "twins"),
            "first_difference": opinion.first,
        }

    def _opinion_of(self, replica: analysis.Replica) -> analysis.Opinion:
        return next(opinion for opinion in self.judgement.opinions if opinion.rank == replica.rank)

    def format_lines(self) -> Iterator[str]:
        if self.replicas:
            rows = [
                ("rank", "device", "card", "steps", "TFLOP/s", "GB/s", "agrees"),
                *map(self._make_row, self.replicas),
            ]
            widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
            for row in rows:
                yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        by_rank = {replica.rank: replica for replica in self.replicas}
        measured = [link for link in self.links if link.bus_gbs is not None]
        for start in range(0, len(measured), _LINKS_PER_LINE):
            prefix = f"links ({measured[0].backend}, bus GB/s): " if not start else "  "
            links = measured[start : start + _LINKS_PER_LINE]
            yield prefix + " · ".join(
                f"{analysis.link_name(link, by_rank)} {_format_number(link.bus_gbs)}" for link in links
            )
        if self.left_out:
            yield f"not tested: {', '.join(self.left_out)} (in use, unusable or not selected)"
        for finding in self.judgement.findings:
            yield f"{finding.level.upper()} {finding.id}: {finding.text}"
            yield f"  {finding.fix}"
        if self.exit_code == 0:
            yield f"✓ {self._summarize()}"
        elif self.exit_code not in (1, 2):
            verdict = self.run.verdict if self.run else None
            yield f"could not be checked: {verdict.summary if verdict else 'the run was not started'}"

    def _summarize(self) -> str:
        steps = min(len(replica.steps) for replica in self.replicas)
        unmatched = [replica.label for replica in self.replicas if not self._opinion_of(replica).twins]
        if len(self.replicas) > 1 and not unmatched:
            links = "; every all-reduce is correct" if self.links else ""
            return f"{len(self.replicas)} replicas agree bit for bit over {plural(steps, 'step')}{links}"
        return f"{plural(steps, 'step')}; only compared with itself, since no GPU is identical: {', '.join(unmatched)}"

    def _make_row(self, replica: analysis.Replica) -> tuple[str, ...]:
        opinion, speed, sheet = (
            self._opinion_of(replica),
            analysis.hot_speed(replica),
            analysis.find_data_sheet(replica.card),
        )
        figures = [(speed.tflops, sheet and sheet[0]), (speed.gbs, sheet and sheet[1])] if speed else []
        speeds = [
            _format_number(measured) + (f" ({100 * measured / peak:.0f} %)" if peak else "")
            for measured, peak in figures
        ]
        if opinion.agrees is None:
            agrees = "n/a"
        elif opinion.agrees:
            agrees = "yes" if opinion.twins else "with itself"
        else:
            agrees = f"{'NO' if opinion.decided else 'disputed'}, step {opinion.first}"
        card, steps = replica.card or "n/a", str(len(replica.steps))
        return str(replica.rank), replica.label, card, steps, *(speeds or ["n/a", "n/a"]), agrees


def _format_number(value: float | None) -> str:
    if value is None:
        return "n/a"
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _read_records(path: str) -> Iterator[dict[str, Any]]:
    return (record for _, record in read_json_lines(path))
