"""Runs the programs of this folder under `stoker run` and scores how well the verdict names cause, rank and line.

    python tests/unseen/run.py --only path_ --out results.jsonl     # programs whose name contains path_
    python tests/unseen/run.py --only held_out_                     # the held-out set; --skip held_out_ runs the other one
    python tests/unseen/run.py --report results.jsonl               # print the tables of results again
    python tests/unseen/run.py --torchrun --repeats 3               # each program three times, and once under torchrun

The expected answer stands in a program's first docstring, as `key: value` lines:

    class             the class of faults, a row of the table
    kind              crash, hang, numbers, slow or healthy: decides the options of `stoker run` (OPTIONS)
    ranks, args       number of ranks; arguments of the program
    needs             libraries; without them the program is skipped
    outcome           fails, completes or any; default: completes for healthy and slow programs, else fails
    expect            accepted causes: ids, patterns of ids, or @FAMILY (FAMILIES)
    rank              accepted ranks; none: nobody is blamed; any: everything is right
    decidable         no: the ranks contradict each other, and nobody can say who is wrong
    line              required: one of the lines with a comment `# FAULT` or `# NEAR` (its caller, as good) is named; all: all lines
                      with `# FAULT`; none: no line can be known
    must-mention      texts that the summary or the advice has to hold; must-not-mention: texts that they must not hold

The expectations are written from what the program does and are not adapted to Stoker's answers. A run is scored as

    right             cause, rank and line
    half              the right cause, and nobody wrong is blamed, but a rank, a line or a text is missing
    wrong             another cause, or another rank is blamed
    undecided         no cause is named
    invalid           the program did not fail as its header says

A suspicion that is reported while the job runs does not count, unless the job completes; those that name a wrong rank are counted
in a column of their own. Standard library only.

A run's delay is the time from the last execution of a line marked `# FAULT` by a guilty rank to the first event (suspicion or verdict)
that names cause and rank correctly. For this the program that runs is a copy, in which each marked statement first sets the modification
time of a file.
"""

from __future__ import annotations

import argparse
import ast
import fnmatch
import importlib.util
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent

# Options of `stoker run`, the same for all programs of a kind. Only programs that hang get a shorter --hang-timeout than the default of 5 minutes.
OPTIONS = {
    "hang": ("--hang-timeout", "10s"),
    "crash": (),
    "numbers": (),
    "slow": (),
    "healthy": (),
}
LIMIT = 120.0  # seconds until the runner stops a run
TORCHRUN_LIMIT = 40.0
STOP_GRACE = 45.0

# A family accepts every cause that is a fair name for the fault, so that a cause may be split, merged or renamed.
FAMILIES = {
    "diverged": (
        "gloo.diverged",
        "gloo.shape",
        "gloo.unequal-batches",
        "hang.op-mismatch",
        "hang.shape-mismatch",
        "hang.rank-only",
        "collective.*",
        "p2p.*",
    ),
    "hang": (
        "hang.sleep",
        "hang.lock",
        "hang.io",
        "hang.child",
        "hang.spin",
        "hang.place",
        "hang.thread*",
        "hang.wait*",
        "hang.queue",
        "hang.pool",
    ),
    "numbers": ("nan.*", "numbers.*", "loss.*"),
    "flat": ("numbers.*", "loss.*", "*.constant*", "*.flat*", "*.zero*", "*.frozen*"),
    "slow": ("slow.*",),
    "raised": ("rank.exception", "torch.*"),
}
NAMES_NO_CAUSE = ("unknown", "hang.together", "gloo.timeout", "nccl.timeout", "none")
TORCH_ABORT = "terminate called without an active exception"  # a thread of gloo's, at the end of about one run in ten
SCORES = ("right", "half", "wrong", "undecided", "invalid")


@dataclass(frozen=True)
class Program:
    """A program and the answer that is expected for it."""

    name: str
    path: Path
    description: str
    group: str  # the class of faults
    kind: str  # a key of OPTIONS
    ranks: int
    causes: tuple[str, ...]  # patterns
    guilty: tuple[int | None, ...]  # accepted values of the verdict's rank; None: nobody in particular
    lines: str  # required | all | none
    decidable: bool
    outcome: str  # fails | completes | any
    mention: tuple[str, ...]
    no_mention: tuple[str, ...]
    args: tuple[str, ...]
    needs: tuple[str, ...]
    limit: float

    def marked(self, mark: str) -> list[str]:
        """Return `file.py:N` for each line that ends with the comment `# MARK`."""
        places = []
        for path in sorted(self.path.parent.glob("*.py")) if self.path.name == "train.py" else [self.path]:
            for number, text in enumerate(path.read_text().splitlines(), 1):
                if text.rstrip().endswith(f"# {mark}"):
                    places.append(f"{path.name}:{number}")
        return places

    def missing(self) -> str:
        """Return the first library that the program needs and that is not installed, or an empty string."""
        return next((name for name in self.needs if importlib.util.find_spec(name) is None), "")


@dataclass
class Verdict:
    """What Stoker recorded about a run."""

    status: str = "none"  # completed | failed | …; none: no verdict was written
    cause: str = "none"
    rank: int | None = None
    exit_code: int | None = None
    summary: str = ""
    fix: list[str] = field(default_factory=list)
    evidence: list[str] = field(default_factory=list)
    suspicions: list[dict[str, Any]] = field(default_factory=list)  # events: suspicion, numbers, straggler
    time: float = 0.0  # when the verdict was recorded, seconds since the epoch

    @property
    def text(self) -> str:
        """The summary and what to do, without the command that starts the run again: it repeats the program's arguments."""
        return "\n".join([self.summary, *(advice for advice in self.fix if not advice.startswith("stoker run "))])


def parse(path: Path, name: str) -> Program:
    """Read a program's header. Raises ValueError if a required key is missing or a value is unknown."""
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    description, _, rest = docstring.partition("\n\n")
    keys = dict(re.findall(r"^([a-z-]+): *(.*)$", rest, re.MULTILINE))

    def listed(key: str) -> tuple[str, ...]:
        return tuple(item.strip() for item in keys.get(key, "").split(",") if item.strip())

    causes: list[str] = []
    for item in listed("expect"):
        causes += FAMILIES[item[1:]] if item.startswith("@") else [item]
    kind, ranks = keys["kind"], int(keys["ranks"])
    if kind not in OPTIONS:
        raise ValueError(f"{path}: kind is {kind}, not one of {', '.join(OPTIONS)}")
    guilty: list[int | None] = []
    for item in listed("rank") or ("none",):
        if item == "any":
            guilty += [None, *range(ranks)]
        else:
            guilty.append(None if item == "none" else int(item))
    return Program(
        name=name,
        path=path,
        description=" ".join(description.split()),
        group=keys["class"],
        kind=kind,
        ranks=ranks,
        causes=tuple(causes),
        guilty=tuple(guilty),
        lines=keys.get("line", "none"),
        decidable=keys.get("decidable", "yes") == "yes",
        outcome=keys.get("outcome", "completes" if kind in ("healthy", "slow") else "fails"),
        mention=listed("must-mention"),
        no_mention=listed("must-not-mention"),
        args=tuple(keys.get("args", "").split()),
        needs=listed("needs"),
        limit=float(keys.get("limit", LIMIT)),
    )


def programs() -> list[Program]:
    """Return all programs: the scripts of this folder and of held_out/, and train.py of each folder in them.

    The names of the programs in held_out/ begin with `held_out_`, so that `--only held_out_` runs them alone.
    """
    found = []
    for folder, prefix in ((HERE, ""), (HERE / "held_out", "held_out_")):
        scripts = [path for path in folder.glob("*.py") if path.name not in ("run.py", "__init__.py")]
        found += [(path, prefix + path.stem) for path in scripts]
        found += [(path, prefix + path.parent.name) for path in folder.glob("*/train.py")]
    return [parse(path, name) for path, name in sorted(found, key=lambda item: item[1])]


def environment(folder: Path) -> dict[str, str]:
    """Return the environment of a run: one thread per rank, no network, temporary files in `folder`."""
    env = {
        name: value for name, value in os.environ.items() if not name.startswith(("STOKER_", "PET_", "TORCHELASTIC_"))
    }
    return env | {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(folder / "datasets"),
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONDONTWRITEBYTECODE": "1",
        "TMPDIR": str(folder),
    }


def run_limited(command: Sequence[str], cwd: Path, limit: float) -> tuple[int | None, float, str]:
    """Run a command; return its exit code (None if it was stopped at the limit), its seconds, and what it printed.

    At the limit it gets SIGTERM, and after a grace period its process group SIGKILL.
    """
    output = cwd / "console.txt"
    began = time.monotonic()
    with output.open("w") as console:
        process = subprocess.Popen(
            command,
            cwd=cwd,
            env=environment(cwd),
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        code: int | None
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
            process.terminate()
            try:
                process.wait(STOP_GRACE)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return code, time.monotonic() - began, output.read_text(errors="replace")


def read_verdict(runs: Path) -> Verdict:
    """Read verdict.json and the events of the newest run below `runs`."""
    verdict = Verdict()
    run = runs / "latest"
    if (run / "verdict.json").exists():
        content = json.loads((run / "verdict.json").read_text())
        for key in ("status", "cause", "rank", "exit_code", "summary", "fix", "evidence"):
            setattr(verdict, key, content.get(key))
    if (run / "events.jsonl").exists():
        for line in (run / "events.jsonl").read_text().splitlines():
            event = json.loads(line)
            if event["event"] in ("suspicion", "numbers", "straggler"):
                verdict.suspicions.append(
                    {key: event[key] for key in ("event", "time", "cause", "rank", "summary") if key in event}
                )
            elif event["event"] == "verdict":
                verdict.time = event["time"]
    return verdict


def insert_stamps(source: str, stamps: Path) -> str:
    """Return the program with an os.utime() of the rank's file in `stamps` before each statement marked `# FAULT`.

    The line numbers stay the same. Statements that start a block are left as they are.
    """
    lines = source.splitlines(keepends=True)
    simple = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, (ast.Expr, ast.Assign, ast.AugAssign, ast.Return, ast.Raise, ast.Assert, ast.Pass))
    ]
    stamp = f"__import__('os').utime({str(stamps)!r} + '/' + __import__('os').environ.get('RANK', '0')); "
    marked = [number for number, line in enumerate(lines, 1) if line.rstrip().endswith("# FAULT")]
    for start in {
        (node.lineno, node.col_offset)
        for node in simple
        for number in marked
        if node.lineno <= number <= (node.end_lineno or node.lineno)
    }:
        line, column = lines[start[0] - 1], start[1]
        if not line[:column].strip():  # the statement begins its line
            lines[start[0] - 1] = line[:column] + stamp + line[column:]
    return "".join(lines)


def copy_with_stamps(program: Program, folder: Path) -> Path:
    """Copy a program, with its siblings if it is a folder, into `folder` and insert the stamps; return the copy's path."""
    stamps = folder / "stamps"
    stamps.mkdir()
    for rank in range(program.ranks):
        (stamps / str(rank)).touch()
        os.utime(stamps / str(rank), (0, 0))
    copies = folder / "program"
    if program.path.name == "train.py":
        shutil.copytree(program.path.parent, copies)
    else:
        copies.mkdir()
        shutil.copy(program.path, copies)
    for path in copies.glob("*.py"):
        path.write_text(insert_stamps(path.read_text(), stamps))
    return copies / program.path.name


def delay(program: Program, verdict: Verdict, stamps: Path) -> float | None:
    """Return the seconds from the fault to the first event that names cause and rank, or None if either is unknown."""
    guilty = [rank for rank in program.guilty if rank is not None] or range(program.ranks)
    fault = max((stamps / str(rank)).stat().st_mtime for rank in guilty)
    events = [*verdict.suspicions]
    if verdict.status == "failed":
        events.append({"time": verdict.time, "cause": verdict.cause, "rank": verdict.rank})
    right = [
        event["time"]
        for event in events
        if event.get("rank") in program.guilty
        and any(fnmatch.fnmatchcase(str(event.get("cause")), pattern) for pattern in program.causes)
    ]
    if not fault or not right or min(right) < fault:
        return None
    return round(min(right) - fault, 1)


def names_line(place: str, text: str) -> bool:
    return re.search(rf"\b{re.escape(place)}(?!\d)", text) is not None


def score(program: Program, verdict: Verdict, code: int | None, console: str = "") -> tuple[str, str]:
    """Compare a verdict with the expected answer; return a score of SCORES and the reason for it."""
    if program.kind == "healthy":
        return score_healthy(verdict, code, console)
    if program.outcome == "completes" and verdict.status != "completed" and TORCH_ABORT in console:
        return "invalid", "torch aborted a process while it shut down, as it does under torchrun now and then"
    if program.outcome == "completes" or (program.outcome == "any" and verdict.status == "completed"):
        return score_suspicion(program, verdict)
    if verdict.status == "completed":
        return "invalid", "the program completed"
    if code is None:
        return "undecided", "no verdict within the limit"
    blamed, cause = verdict.rank, verdict.cause
    matches = any(fnmatch.fnmatchcase(cause, pattern) for pattern in program.causes)
    if cause == "rank.crash" and not matches and TORCH_ABORT in console:
        return "invalid", "torch aborted a process while it shut down, before the fault could be seen"
    if program.decidable and cause in NAMES_NO_CAUSE and not matches:
        return "undecided", f"{cause}: names no cause"
    if blamed is not None and blamed not in program.guilty:
        return "wrong", f"blames rank {blamed} ({cause})"
    if not matches:
        return "wrong", f"cause {cause}"
    gaps = []
    if blamed not in program.guilty:
        gaps.append("no rank blamed")
    gaps += text_gaps(program, verdict.text)
    return ("half", "; ".join(gaps)) if gaps else ("right", "")


def text_gaps(program: Program, text: str) -> list[str]:
    """Return what the text should name and does not, and what it should not mention and does."""
    fault, near = program.marked("FAULT"), program.marked("NEAR")
    gaps = []
    if program.lines == "all":
        gaps += [f"{place} not named" for place in fault if not names_line(place, text)]
    elif program.lines == "required" and not any(names_line(place, text) for place in fault + near):
        gaps.append(f"{' / '.join(fault)} not named")
    gaps += [f"does not mention {word!r}" for word in program.mention if word.lower() not in text.lower()]
    gaps += [f"mentions {word!r}" for word in program.no_mention if word.lower() in text.lower()]
    return gaps


def false_suspicions(program: Program, verdict: Verdict) -> list[dict[str, Any]]:
    """Return the suspicions and stragglers that name a rank which is not guilty; of a healthy program all that name a rank.

    Losses do not count: a NaN of one rank spreads to all.
    """
    guilty = program.guilty if program.kind != "healthy" else (None,)
    events = [event for event in verdict.suspicions if event["event"] != "numbers" and event.get("rank") is not None]
    return [event for event in events if event["rank"] not in guilty]


def score_healthy(verdict: Verdict, code: int | None, console: str) -> tuple[str, str]:
    if code is None:
        return "invalid", "not done within the limit"
    if code != 0 and TORCH_ABORT in console:
        return "invalid", "torch aborted a process while it shut down, as it does under torchrun now and then"
    if verdict.status == "completed":
        return "right", ""
    return "wrong", f"blamed: {verdict.cause}, rank {verdict.rank}: {verdict.summary}"


def score_suspicion(program: Program, verdict: Verdict) -> tuple[str, str]:
    """Score a program that completes: a suspicion or a straggler has to name its cause and its rank."""
    if verdict.status != "completed":
        return "wrong", f"did not complete: {verdict.cause}: {verdict.summary}"
    if not program.causes:
        return (
            ("right", "")
            if not any(event["event"] == "straggler" for event in verdict.suspicions)
            else ("wrong", "a rank is suspected")
        )
    named = [
        event
        for event in verdict.suspicions
        if any(fnmatch.fnmatchcase(str(event.get("cause")), pattern) for pattern in program.causes)
    ]
    if not named:
        return "undecided", "no suspicion with this cause"
    if any(event.get("rank") is not None and event.get("rank") not in program.guilty for event in named):
        return "wrong", f"suspects rank {named[0].get('rank')}"
    gaps = text_gaps(program, "\n".join(str(event.get("summary")) for event in named))
    if not any(event.get("rank") in program.guilty for event in named):
        gaps.append("no rank named")
    return ("half", "; ".join(gaps)) if gaps else ("right", "")


def ignore_sockets(folder: str, names: list[str]) -> list[str]:
    """Return the names in `folder` that shutil.copytree can't copy."""
    return [name for name in names if not (Path(folder, name).is_dir() or Path(folder, name).is_file())]


def run_program(program: Program, launcher: Sequence[str], keep: Path | None, with_torchrun: bool) -> dict[str, Any]:
    """Run one program under Stoker in a fresh folder and return its result."""
    folder = Path(tempfile.mkdtemp(prefix="unseen-"))
    try:
        command = [*launcher, "run", "--nproc-per-node", str(program.ranks), "--runs-dir", str(folder / "runs")]
        script = copy_with_stamps(program, folder)
        command += [*OPTIONS[program.kind], str(script), *program.args]
        code, seconds, console = run_limited(command, folder, program.limit)
        verdict = read_verdict(folder / "runs")
        points, reason = score(program, verdict, code, console)
        result: dict[str, Any] = {
            "program": program.name,
            "class": program.group,
            "kind": program.kind,
            "score": points,
            "reason": reason,
            "seconds": round(seconds, 1),
            "code": code,
            "delay": delay(program, verdict, folder / "stamps"),
            "verdict": asdict(verdict),
            "false_suspicions": false_suspicions(program, verdict),
            "console": console[-3000:],
        }
        if keep is not None:
            shutil.copytree(
                folder / "runs", keep / f"{program.name}-{folder.name}", symlinks=True, ignore=ignore_sockets
            )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if with_torchrun:
        folder = Path(tempfile.mkdtemp(prefix="unseen-torchrun-"))
        try:
            command = [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--nproc-per-node",
                str(program.ranks),
            ]
            code, seconds, console = run_limited([*command, str(program.path), *program.args], folder, TORCHRUN_LIMIT)
            result["torchrun"] = {"code": code, "seconds": round(seconds, 1), "console": console[-3000:]}
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    return result


def score_again(row: dict[str, Any], program: Program) -> dict[str, Any]:
    """Score a recorded verdict by the program's present header."""
    verdict = Verdict(**row["verdict"])
    points, reason = score(program, verdict, row["code"], row["console"])
    return {**row, "score": points, "reason": reason, "false_suspicions": false_suspicions(program, verdict)}


def table(results: Iterable[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of the table of scores per class, and of the list of what is not right."""
    rows = list(results)
    yield f"{'class':<20}{'runs':>6}" + "".join(f"{name:>11}" for name in SCORES) + "   falsely suspected"
    for group in [*dict.fromkeys(row["class"] for row in rows), None]:
        chosen = [row for row in rows if group is None or row["class"] == group]
        counts = "".join(f"{sum(row['score'] == name for row in chosen):>11}" for name in SCORES)
        suspected = sum(bool(row["false_suspicions"]) for row in chosen)
        yield f"{group or 'total':<20}{len(chosen):>6}{counts}{suspected:>20}"
    delays = sorted(row["delay"] for row in rows if row.get("delay") is not None)
    if delays:
        yield f"\nfirst right line after the fault: median {statistics.median(delays)} s, worst {delays[-1]} s, of {len(delays)} runs"
        slow = [f"{row['program']} {row['delay']} s" for row in rows if (row.get("delay") or 0.0) > 8.0]
        yield from ([f"    over 8 s: {', '.join(slow)}"] if slow else [])
    for row in rows:
        if row["score"] != "right" or row["false_suspicions"]:
            verdict = row["verdict"]
            yield f"\n{row['program']}: {row['score']}: {row['reason']}"
            yield f"    {verdict['status']}, {verdict['cause']}, rank {verdict['rank']}: {verdict['summary']}"
            for event in verdict["suspicions"]:
                yield f"    {event['event']}: {event.get('cause')}, rank {event.get('rank')}: {event.get('summary')}"


def stoker_command() -> list[str]:
    beside_python = Path(sys.executable).with_name("stoker")
    return [str(beside_python)] if beside_python.exists() else [sys.executable, "-m", "stoker"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", action="append", help="run programs whose name or class contains this; may be given several times"
    )
    parser.add_argument("--skip", default=None, help="skip programs whose name contains this, such as held_out_")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--at-once", type=int, default=1, help="run so many programs at the same time")
    parser.add_argument(
        "--torchrun",
        action="store_true",
        help=f"run each program once under torchrun too, for at most {TORCHRUN_LIMIT:.0f} s",
    )
    parser.add_argument("--out", type=Path, help="append each result to this file of JSON lines")
    parser.add_argument("--keep", type=Path, help="copy each run's record into this folder")
    parser.add_argument(
        "--report",
        type=Path,
        help="print the tables of this file, scored again by the present headers and lines, and run nothing; the newest result of a program counts",
    )
    parser.add_argument("--list", action="store_true", help="list the programs and run nothing")
    options = parser.parse_args()
    if options.report:
        newest = {row["program"]: row for row in map(json.loads, options.report.read_text().splitlines())}
        print(
            "\n".join(
                table(score_again(newest[program.name], program) for program in programs() if program.name in newest)
            )
        )
        return 0
    chosen = [
        p
        for p in programs()
        if (not options.only or any(word in p.name or word == p.group for word in options.only))
        and (not options.skip or options.skip not in p.name)
    ]
    if options.list:
        for program in chosen:
            print(f"{program.name:<44}{program.group:<16}{program.kind:<9}{program.ranks}  {program.description}")
        return 0
    results = []
    writing = threading.Lock()

    def run_and_report(repeat: int, program: Program) -> None:
        result = run_program(program, stoker_command(), options.keep, options.torchrun and repeat == 0)
        with writing:
            results.append(result)
            print(f"{program.name}: {result['score']} {result['reason']} ({result['seconds']} s)", flush=True)
            if options.out:
                with options.out.open("a") as out:
                    out.write(json.dumps(result) + "\n")

    for program in chosen:
        if missing := program.missing():
            print(f"{program.name}: skipped: {missing} is not installed", flush=True)
    jobs = [(repeat, program) for repeat in range(options.repeats) for program in chosen if not program.missing()]
    with ThreadPoolExecutor(options.at_once) as pool:
        for done in [pool.submit(run_and_report, *job) for job in jobs]:
            done.result()
    print()
    print("\n".join(table(results)))
    return 0 if all(row["score"] == "right" for row in results) else 1


if __name__ == "__main__":
    sys.exit(main())
