"""`stoker nan [DIR] [--rank R] [--tensor NAME]`: shows the dump that training wrote at the first NaN or Inf."""

from __future__ import annotations

import json
import os
from typing import Any

from stoker.contract import errors, layout
from stoker.contract.errors import EX_NOINPUT, Refusal
from stoker.contract.frozen import as_json, pick_fields
from stoker.contract.options import OptionParser
from stoker.contract.terminal import print_json, print_text
from stoker.control.record import run_index
from stoker.training.forensics import reading
from stoker.training.forensics.culprit import banner, decide, headline, table

_DESCRIPTION = (
    "Shows where a NaN or Inf came from: the first bad operation, its tensors, the gradients it affected, the samples."
)
_TENSOR = "show one tensor of the dump: output, input.self, a parameter's name, gradients/NAME, parameters/NAME"
MAX_TEXT = 300  # characters of a sample
_MAX_SAMPLES = 8


def build_parser() -> OptionParser:
    parser = OptionParser("stoker nan", _DESCRIPTION)
    dump = "a folder nan_step_N, a rank's folder in it, or a run's id, name or path (default: the newest run)"
    parser.option("dump", "DIR", dump, nargs="?")
    parser.option("--rank", "R", "which rank (default: the first with a bad operation)", int)
    parser.option("--tensor", "NAME", _TENSOR)
    parser.runs_dir()
    parser.switch("--json", "print the reports (or the tensor) as JSON")
    return parser


def main(argv: list[str]) -> int:
    args = build_parser().parse_args(argv)
    folder = _find_dump(args.dump, layout.runs_root(args.runs_dir, os.environ))
    with errors.parsing(folder):
        dumps = reading.ranks(folder)
        culprit = decide([dump.report for dump in dumps])
        rank = args.rank if args.rank is not None else next(iter(culprit.ranks), dumps[0].report.rank)
        dump = next((dump for dump in dumps if dump.report.rank == rank), None)
        if dump is None:
            ranks = ", ".join(str(dump.report.rank) for dump in dumps)
            raise Refusal(f"{folder} has no rank {rank}; there are {ranks}", EX_NOINPUT)
        if args.tensor:
            _print_tensor(reading.show(dump, args.tensor), args.json)
        elif args.json:
            reports = [other.report.to_json() for other in dumps if args.rank is None or other is dump]
            summary = pick_fields(culprit, "summary", "ranks")
            print_json({"schema": 1, "folder": folder, **summary, "reports": reports})
        else:
            _print_dump(dump, dumps, culprit.summary)
    return 0


def _find_dump(name: str | None, root: str) -> str:
    """Return the folder nan_step_N, or the rank's folder in it, that `name` selects. Raises Refusal if there is none."""
    path = None if name is None else run_index.through_latest(name)
    if path is not None and os.path.exists(os.path.join(path, reading.REPORT)):
        return path
    if path is not None and os.path.isdir(path) and not os.path.exists(os.path.join(path, layout.RUN)):
        run_dir = path  # the folder of a recipe that ran without `stoker train`
    else:
        run_dir = run_index.find_run(name, root).dir
    newest = reading.newest(run_dir)
    if newest is None:
        raise Refusal(f"{run_dir} has no nan_step_N: there was no NaN, or nan.dump was off", EX_NOINPUT)
    return newest


def _print_dump(dump: reading.RankDump, dumps: list[reading.RankDump], summary: str) -> None:
    print(banner(dump.report))
    for name, why in {**dump.cut, **dump.left_out}.items():
        print(f"incomplete: {name}: {why}")
    samples = reading.texts(dump)
    if samples:
        print("\nSamples:")
    for sample in samples[:_MAX_SAMPLES]:
        position = f"micro-batch {sample.get('micro_batch')}, {sample.get('targets')} targets"
        print(f"  {sample.get('id')} ({position}): {_quote_text(sample)}")
    others = [other for other in dumps if other is not dump]
    if others:
        print("\nOther ranks:")
    for other in others:
        print_text(f"  {headline(other.report)}")
    print_text(f"\n{summary}")
    print(f"files: {dump.folder}")


def _quote_text(sample: dict[str, Any]) -> str:
    text = sample.get("text")
    if text is None:
        return f"{len(sample.get('tokens') or ())} tokens, not decoded"
    return json.dumps(text[:MAX_TEXT], ensure_ascii=False) + ("…" if len(text) > MAX_TEXT else "")


def _print_tensor(tensor: reading.Shown, prints_json: bool) -> None:
    if prints_json:
        print_json({"schema": 1, **as_json(tensor)})
        return
    print("\n".join(table((tensor.stats,))))
    if tensor.cut:
        print(f"  only {tensor.cut}")
    for index, value in tensor.bad:
        print(f"  [{', '.join(map(str, index))}] = {value}")
    if tensor.stats.bad > len(tensor.bad):
        print(f"  … and {tensor.stats.bad - len(tensor.bad)} more")
    print(f"file: {tensor.file}")
