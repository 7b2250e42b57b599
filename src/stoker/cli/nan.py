"""stoker nan [DIR] [--rank R] [--tensor NAME] [--json]"""

from __future__ import annotations

import argparse
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

_ABOUT = "Where a NaN or Inf came from: the first bad operation, its tensors, the gradients it spoiled, the samples."
_TENSOR = "show one tensor of the dump: output, input.self, a parameter's name, gradients/NAME, parameters/NAME"
TEXT = 300  # characters of a sample


def parser() -> OptionParser:
    made = OptionParser("stoker nan", _ABOUT)
    where = "a folder nan_step_N or a rank's in it, or a run's id, name or path (default: the newest run)"
    made.option("where", "DIR", where, nargs="?")
    made.option("--rank", "R", "which rank (default: the guilty one)", int)
    made.option("--tensor", "NAME", _TENSOR)
    made.runs_dir()
    made.switch("--json", "the reports (or the tensor) as JSON")
    return made


def main(argv: list[str]) -> int:
    told = parser().parse_args(argv)
    folder = _folder(told.where, layout.runs_root(told.runs_dir, os.environ))
    with errors.parsing(folder):
        return _show(folder, told)


def _show(folder: str, told: argparse.Namespace) -> int:
    dumps = reading.ranks(folder)
    guilty = decide([one.report for one in dumps])
    wanted = told.rank if told.rank is not None else next(iter(guilty.ranks), dumps[0].report.rank)
    dump = next((one for one in dumps if one.report.rank == wanted), None)
    if dump is None:
        there = ", ".join(str(one.report.rank) for one in dumps)
        raise Refusal(f"{folder} has no rank {wanted}; there are {there}", EX_NOINPUT)
    if told.tensor:
        _tensor(reading.show(dump, told.tensor), told.json)
    elif told.json:
        shown = [one for one in dumps if told.rank is None or one is dump]
        found = {"schema": 1, "folder": folder, **pick_fields(guilty, "summary", "ranks")}
        print_json({**found, "reports": [one.report.to_json() for one in shown]})
    else:
        _print(dump, dumps, guilty.summary)
    return 0


def _folder(where: str | None, root: str) -> str:
    """Return the folder nan_step_N, or the folder of a rank in it, that `where` names."""
    path = None if where is None else run_index.through_latest(where)
    if path is not None and os.path.exists(os.path.join(path, reading.REPORT)):
        return path
    if path is not None and os.path.isdir(path) and not os.path.exists(os.path.join(path, layout.RUN)):
        place = path  # a folder in which a recipe ran without `stoker train`
    else:
        place = run_index.find_run(where, root).dir
    found = reading.newest(place)
    if found is None:
        raise Refusal(f"no nan_step_N in {place}: it had no NaN, or nan.dump was off", EX_NOINPUT)
    return found


def _print(dump: reading.RankDump, dumps: list[reading.RankDump], summary: str) -> None:
    print(banner(dump.report))
    for name, why in {**dump.cut, **dump.left_out}.items():
        print(f"incomplete: {name}: {why}")
    samples = reading.texts(dump)
    if samples:
        print("\nSamples:")
    for sample in samples[:8]:
        about = f"micro-batch {sample.get('micro_batch')}, {sample.get('targets')} targets"
        print(f"  {sample.get('id')} ({about}): {_words(sample)}")
    others = [one for one in dumps if one is not dump]
    if others:
        print("\nOther ranks:")
    for one in others:
        print_text(f"  {headline(one.report)}")
    print_text(f"\n{summary}")
    print(f"files: {dump.folder}")


def _words(sample: dict[str, Any]) -> str:
    text = sample.get("text")
    if text is None:
        return f"{len(sample.get('tokens') or ())} tokens, not decoded"
    return json.dumps(text[:TEXT], ensure_ascii=False) + ("…" if len(text) > TEXT else "")


def _tensor(shown: reading.Shown, as_json_: bool) -> None:
    if as_json_:
        print_json({"schema": 1, **as_json(shown)})
        return
    print("\n".join(table((shown.stats,))))
    if shown.cut:
        print(f"  only {shown.cut}")
    for index, value in shown.bad:
        print(f"  [{', '.join(str(one) for one in index)}] = {value}")
    if shown.stats.bad > len(shown.bad):
        print(f"  … and {shown.stats.bad - len(shown.bad)} more")
    print(f"file: {shown.file}")
