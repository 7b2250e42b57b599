"""Every fault of tests/faults under stoker and under torchrun: who notices, how soon, and do they say what was wrong?

    python benchmarks/faults.py                                   all that can be made here: about an hour, most of it torchrun not noticing
    python benchmarks/faults.py --only hang_sleep-2 crash_import  some
    python benchmarks/faults.py --kind hang --no-torchrun
    python benchmarks/faults.py --gpu                             only those that need a GPU
    python benchmarks/faults.py --family style --repeat 3         programs in the styles of HF Trainer, Lightning and others, three times

Seconds are counted from the fault itself, whose time the script leaves in a file right before it breaks: to the explanation (a hang: the suspicion
that names the right rank; else the verdict; of torchrun: its error report) and to clean (the launcher has ended and no process is left).
torchrun gets 40 s after the fault, then everything of it is killed. Prints Markdown for docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import platform
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

FAULTS = Path(__file__).resolve().parent.parent / "tests" / "faults"
sys.path.insert(0, str(FAULTS))

from around import cannot  # noqa: E402
from cases import CASES, Case  # noqa: E402

TAG = "FAULTS_TAG"
STOKER, TORCHRUN = "stoker", "torchrun"
PATIENCE_S = {STOKER: 90.0, TORCHRUN: 40.0}  # after the fault
START_S = 180.0  # until the fault: four ranks that import transformers on a busy machine
LEFT_AFTER_S = 1.0  # a process that is still there this long after its launcher's end was left behind
_TOLD = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "OMP_NUM_THREADS",
    "NPROC_PER_NODE",
    "NUM_GPUS",
    "FAULTS_DIR",
)
_NAMING = ("exception", "rank-exit", "suspicion", "straggler", "verdict")
_PREFIXES = ("STOKER_", "PET_", "TORCHELASTIC_", "ROLE_", "GROUP_")


@dataclass(frozen=True)
class Result:
    """What one launcher made of one case. Seconds from the fault; None: it never came to that."""

    case: str
    ranks: int
    kind: str
    way: str
    noticed_s: float | None = (
        None  # the first event that names a right rank; the verdict waits until everything has ended
    )
    explained_s: float | None = None
    clean_s: float | None = None
    right_rank: bool = False
    right_cause: bool | None = None  # None: this launcher names no causes
    right_line: bool | None = None  # None: the case has no line to name, or this launcher names none
    verdict: str = ""  # cause and rank, to compare repetitions
    code: int | None = None  # None: it had to be killed
    right_code: bool = False
    leftovers: int = 0
    found: str = ""  # what it said
    wrong: str = ""  # what the case asked for and did not get
    gpu_gb: float = 0.0  # memory of the card that did not come back

    @property
    def right(self) -> bool:
        return self.right_rank and self.right_cause is not False and not self.wrong


# ---- one job ----


def attempt(case: Case, way: str, keep: Path | None) -> Result:
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    tag = f"{TAG}={folder.name}-{os.getpid()}".encode()
    used = _gpu_used() if case.needs == "gpu" else 0.0
    try:
        launcher = _start(case, way, folder, tag)
        code = _wait(launcher, folder, PATIENCE_S[way])
        ended = time.time()
        if code is None:
            _kill(tag)
            launcher.wait()
        clean = _gone(tag, ended)
        left = _alive(tag)
        _kill(tag)
        known = _fault_time(folder)
        result = Result(
            case.name,
            case.ranks,
            case.kind,
            way,
            code=code,
            right_code=code in case.exit_code,
            leftovers=len(left) if code is not None else 0,
        )
        if known is None:
            return dataclasses.replace(result, wrong="the fault did not happen:\n" + _tail(folder))
        card = _not_back(used) if case.needs == "gpu" else 0.0
        result = dataclasses.replace(
            result, clean_s=clean - known if code is not None and not left else None, gpu_gb=card
        )
        return (_heard_from_stoker if way == STOKER else _heard_from_torchrun)(case, result, folder, known, ended)
    finally:
        _kill(tag)
        if keep is not None:
            kept = keep / f"{case.name}-{way}"
            if kept.exists():
                shutil.rmtree(kept)
            shutil.copytree(folder, kept, symlinks=True)
        shutil.rmtree(folder)


def _start(case: Case, way: str, folder: Path, tag: bytes) -> subprocess.Popen[bytes]:
    around = [sys.executable, str(FAULTS / "around.py"), *case.around] if case.around else []
    if way == STOKER:
        command = [sys.executable, "-m", "stoker", "run", "--nproc-per-node", str(case.ranks), *case.args]
    else:
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(case.ranks),
            *case.torchrun_args,
        ]
    kept = {name: value for name, value in os.environ.items() if name not in _TOLD and not name.startswith(_PREFIXES)}
    cards = {} if case.needs == "gpu" else {"CUDA_VISIBLE_DEVICES": ""}
    name, _, value = tag.decode().partition("=")
    env = {**kept, **cards, name: value, "FAULTS_DIR": str(folder), "STOKER_RUNS": str(folder / "runs")}
    with open(folder / "output", "wb") as output:
        return subprocess.Popen(
            [*around, *command, str(FAULTS / case.script), *case.script_args],
            cwd=folder,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _wait(launcher: subprocess.Popen[bytes], folder: Path, patience: float) -> int | None:
    """Its exit code as a shell would give it; None when it is still there `patience` seconds after the fault."""
    deadline = time.time() + START_S
    handle = os.pidfd_open(launcher.pid)
    try:
        while not select.select([handle], [], [], 0.2)[0]:
            known = _fault_time(folder)
            if time.time() > (deadline if known is None else known + patience):
                return None
    finally:
        os.close(handle)
    code = launcher.wait()
    return 128 - code if code < 0 else code


def _fault_time(folder: Path) -> float | None:
    """Of the last attempt that had a fault, the first rank's."""
    marks = [path for path in folder.glob("fault-*") if path.stat().st_size]
    last = max((path.name.split("-")[1] for path in marks), default="")
    return min((float(path.read_text()) for path in marks if path.name.split("-")[1] == last), default=None)


def _tail(folder: Path) -> str:
    return (folder / "output").read_text(errors="replace")[-1500:]


# ---- processes, by the tag in their environment ----


def _alive(tag: bytes) -> list[int]:
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            try:
                if tag in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0"):  # empty for a zombie
                    found.append(int(entry))
            except OSError:  # ended meanwhile, or another user's: none of ours
                continue
    return found


def _gone(tag: bytes, ended: float) -> float:
    """When the last process was seen gone; now, if some are left when the time for that is over."""
    while _alive(tag) and time.time() < ended + LEFT_AFTER_S:
        time.sleep(0.01)
    return time.time()


def _kill(tag: bytes) -> None:
    deadline = time.monotonic() + 15
    while left := _alive(tag):
        for pid in left:
            try:
                handle = os.pidfd_open(pid)
            except ProcessLookupError:
                continue
            try:
                if pid in _alive(tag):  # the pidfd holds on to this very process: nobody else can get the signal
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
            except ProcessLookupError:
                pass  # ended by itself between the look and the signal
            finally:
                os.close(handle)
        if time.monotonic() > deadline:
            raise SystemExit(f"faults.py: processes {left} survive SIGKILL")
        time.sleep(0.05)


def _gpu_used() -> float:
    """GB of the first card."""
    told = subprocess.run(
        ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", "0"],
        capture_output=True,
        text=True,
        check=True,
    )
    return float(told.stdout) * 2**20 / 1e9


def _not_back(before: float) -> float:
    deadline = time.monotonic() + 2
    while (over := _gpu_used() - before) > 0.2 and time.monotonic() < deadline:
        time.sleep(0.1)
    return over if over > 0.2 else 0.0


# ---- what the launchers said ----


def _heard_from_stoker(case: Case, result: Result, folder: Path, fault: float, _ended: float) -> Result:
    latest = folder / "runs" / "latest"
    events = [json.loads(line) for line in _lines(latest / "events.jsonl") if line.endswith("}")]
    verdict = _verdict(latest, folder)
    cause, rank = verdict.get("cause"), verdict.get("rank")
    wrong = []
    if case.kind == "slow":
        named = [event for event in events if event["event"] == "straggler"]
        right = [event for event in named if event.get("rank") in case.rank]
        cause, rank = (named[0].get("cause"), named[0].get("rank")) if named else (None, None)
        when = right[0]["time"] if right else None
        wrong += [] if verdict.get("status") == "completed" else [f"the job ended as {verdict.get('cause')}"]
    else:
        told = [
            event["time"] for event in events if event["event"] in ("restart", "verdict") and event["time"] >= fault
        ]
        when = told[0] if told else time.time() if verdict else None  # the latter: `stoker why` has just said it
        if case.kind == "hang":
            suspected = [
                event["time"]
                for event in events
                if event["event"] == "suspicion" and event.get("rank") in case.rank and event["time"] >= fault
            ]
            when = suspected[0] if suspected else when if rank in case.rank else None
    seen = [
        event["time"]
        for event in events
        if event["event"] in _NAMING and event.get("rank") in case.rank and event["time"] >= fault
    ]
    count = len(list(latest.glob("attempt-*")))
    wrong += [] if count == case.attempts else [f"{count} attempts, not {case.attempts}"]
    wrong += [] if case.says in json.dumps(verdict) else [f"the verdict does not say {case.says!r}"]
    return dataclasses.replace(
        result,
        noticed_s=seen[0] - fault if seen else None,
        explained_s=when - fault if when is not None else None,
        right_rank=rank in case.rank,
        right_cause=cause in case.cause,
        right_line=all(place in verdict.get("summary", "") for place in case.places) if case.line else None,
        verdict=f"{cause} rank {rank}",
        found=f"{cause} rank {rank}: {verdict.get('summary', '')[:400]}" if cause else "",
        wrong="; ".join(wrong),
    )


def _verdict(latest: Path, folder: Path) -> dict[str, Any]:
    """verdict.json; where the launcher was killed, what `stoker why` makes of the rest."""
    if (latest / "verdict.json").exists():
        return dict(json.loads((latest / "verdict.json").read_text()))
    why = [sys.executable, "-m", "stoker", "why", "--json", "--runs-dir", str(folder / "runs")]
    done = subprocess.run(
        why,
        cwd=folder,
        env={**os.environ, "STOKER_RUNS": str(folder / "runs")},
        capture_output=True,
        text=True,
        check=False,
    )
    return dict(json.loads(done.stdout)) if done.stdout.startswith("{") else {}


def _heard_from_torchrun(case: Case, result: Result, folder: Path, fault: float, ended: float) -> Result:
    """Its report at the end names the rank of the first failure it observed. No report, no explanation."""
    text = (folder / "output").read_text(errors="replace")
    report = re.search(
        r"Root Cause \(first observed failure\):.*?rank\s*: (\d+) \(local_rank.*?exitcode\s*: (-?\d+)", text, re.S
    )
    if result.code is None:
        return dataclasses.replace(result, found=f"nothing for {PATIENCE_S[TORCHRUN]:.0f} s")
    if report is None:
        healed = None in case.rank and result.code == 0
        return dataclasses.replace(result, right_rank=healed, found=f"no report, exit code {result.code}")
    rank = int(report[1])
    return dataclasses.replace(
        result, explained_s=ended - fault, right_rank=rank in case.rank, found=f"rank {rank}, exitcode {report[2]}"
    )


def _lines(path: Path) -> list[str]:
    return path.read_text(errors="replace").splitlines() if path.exists() else []


# ---- the table ----


def table(results: list[Result]) -> str:
    head = [
        "case",
        "ranks",
        "stoker: explained",
        "clean",
        "right rank",
        "right cause",
        "right line",
        "exit code",
        "left",
    ]
    head += ["torchrun: explained", "clean", "right rank", "exit code", "left"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for name in dict.fromkeys(result.case for result in results):
        ours, theirs = (
            _worst([one for one in results if one.case == name and one.way == way]) for way in (STOKER, TORCHRUN)
        )
        one = ours or theirs
        assert one is not None
        lines.append(
            f"| {name} | {one.ranks} | {' | '.join(_cells(ours, True))} | {' | '.join(_cells(theirs, False))} |"
        )
    return "\n".join(lines)


def _worst(repeated: list[Result]) -> Result | None:
    """Of a case's repetitions: one that is wrong, else the slowest."""
    return max(repeated, key=lambda one: (not one.right, one.right_line is False, one.explained_s or 0.0), default=None)


def _cells(one: Result | None, causes: bool) -> list[str]:
    if one is None:
        return ["–"] * (7 if causes else 5)
    left = f"{one.leftovers}" + (f", {one.gpu_gb:.1f} GB" if one.gpu_gb else "")
    code = (
        f"killed after {PATIENCE_S[one.way]:.0f} s"
        if one.code is None
        else f"{one.code}" + ("" if one.right_code or not causes else " ✗")
    )
    cause = (
        [_yes(one.right_cause is True and not one.wrong), "–" if one.right_line is None else _yes(one.right_line)]
        if causes
        else []
    )
    return [_seconds(one.explained_s), _seconds(one.clean_s), _yes(one.right_rank), *cause, code, left]


def _seconds(value: float | None) -> str:
    return "never" if value is None else f"{value:.2f} s" if value < 10 else f"{value:.1f} s"


def _yes(right: bool) -> str:
    return "✓" if right else "✗"


def totals(results: list[Result]) -> str:
    lines = []
    for way in (STOKER, TORCHRUN):
        mine = [one for one in results if one.way == way]
        if not mine:
            continue
        rank, both = sum(one.right_rank for one in mine), sum(one.right for one in mine)
        hangs = [one for one in mine if one.kind == "hang"]
        told = f"right rank {rank} of {len(mine)}"
        if way == STOKER:
            codes = sum(one.right_code for one in mine)
            lines_ = [one.right_line for one in mine if one.right_line is not None]
            told = (
                f"right cause and rank {both} of {len(mine)} ({both / len(mine):.1%}), {told}, right exit code {codes}"
                f" of {len(mine)}"
            )
            told += f", right line {sum(lines_)} of {len(lines_)} ({sum(lines_) / len(lines_):.1%})" if lines_ else ""
            verdicts = {name: {one.verdict for one in mine if one.case == name} for name in {one.case for one in mine}}
            if len(mine) > len(verdicts):
                told += (
                    f"; the same verdict every time in {sum(len(each) == 1 for each in verdicts.values())} of"
                    f" {len(verdicts)} cases"
                )
        explained, left = sum(one.explained_s is not None for one in hangs), sum(one.leftovers for one in mine)
        lines.append(f"- **{way}**: {told}; hangs explained {explained} of {len(hangs)}; left behind: {left} processes")
        slowest = {"notice": _slowest(mine, "noticed_s"), "explanation": _slowest(mine, "explained_s")}
        lines += [f"  - slowest {what}: {told}" for what, told in slowest.items() if told]
    return "\n".join(lines)


def _slowest(results: list[Result], field: str) -> str:
    """Per kind, the case that took longest."""
    timed = [(one.kind, getattr(one, field), one.case) for one in results if getattr(one, field) is not None]
    worst = [max(entry for entry in timed if entry[0] == kind) for kind in dict.fromkeys(kind for kind, _, _ in timed)]
    return ", ".join(f"{kind} {_seconds(value)} ({case})" for kind, value, case in worst)


def setting(skipped: dict[str, str]) -> str:
    """Where, when, with what."""
    model = next(
        (line.partition(":")[2].strip() for line in _lines(Path("/proc/cpuinfo")) if line.startswith("model name")),
        platform.machine(),
    )
    cards = _said("nvidia-smi", "--query-gpu=name", "--format=csv,noheader").replace("\n", "; ") or "none"
    commit = _said("git", "-C", str(FAULTS), "rev-parse", "--short", "HEAD") or "unknown"
    dirty = " + uncommitted changes" if _said("git", "-C", str(FAULTS), "status", "--porcelain") else ""
    lines = [
        f"Hardware: {model}, {len(os.sched_getaffinity(0))} cores, GPU: {cards}  ",
        (
            f"Software: Linux {platform.release()}, Python {platform.python_version()}, torch"
            f" {metadata.version('torch')}  "
        ),
        f"Commit: {commit}{dirty}, {datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC  ",
        f"Command: `{shlex.join([os.path.basename(sys.executable), *sys.argv])}`  ",
        *(f"Not made here: {name} ({why})  " for name, why in skipped.items()),
    ]
    return "\n".join(lines)


def _said(*argv: str) -> str:
    if shutil.which(argv[0]) is None:
        return ""
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
    return done.stdout.strip() if done.returncode == 0 else ""


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only",
        nargs="+",
        choices=[case.name for case in CASES],
        metavar="NAME",
        help="some cases; their names are in tests/faults/cases.py",
    )
    kinds = sorted({case.kind for case in CASES})
    parser.add_argument("--kind", nargs="+", choices=kinds, metavar="KIND", help=", ".join(kinds))
    families = sorted({case.family for case in CASES})
    parser.add_argument("--family", nargs="+", choices=families, metavar="FAMILY", help=", ".join(families))
    parser.add_argument(
        "--repeat", type=int, default=1, metavar="N", help="each case N times under stoker, and once under torchrun"
    )
    parser.add_argument("--gpu", action="store_true", help="the cases that need a GPU, and only those")
    parser.add_argument("--no-torchrun", action="store_true")
    parser.add_argument(
        "--torchrun-once",
        action="store_true",
        help="each script once under torchrun: a hang on 4 ranks is not waited for like that on 2",
    )
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="the report, as printed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="every result, and what was said")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep each job's output and run directory there")
    return parser.parse_args()


def _chosen(asked: argparse.Namespace) -> Iterable[Case]:
    for case in CASES:
        if asked.only:
            if case.name in asked.only:
                yield case
        elif (
            (case.needs == "gpu") == asked.gpu
            and (not asked.kind or case.kind in asked.kind)
            and (not asked.family or case.family in asked.family)
        ):
            yield case


def main() -> int:
    asked = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the jobs are cleaned up then too
    reasons = {needs: cannot(needs) for needs in {case.needs for case in CASES}}
    chosen = list(_chosen(asked))
    skipped = {case.name: reasons[case.needs] for case in chosen if reasons[case.needs]}
    results: list[Result] = []
    under_torchrun: set[str] = set()
    try:
        for number, case in enumerate(chosen):
            if case.name in skipped:
                continue
            for way in (*(STOKER,) * asked.repeat, TORCHRUN):
                if way == TORCHRUN and (
                    asked.no_torchrun or not case.torchrun or (asked.torchrun_once and case.script in under_torchrun)
                ):
                    continue
                if way == TORCHRUN:
                    under_torchrun.add(case.script)
                one = attempt(case, way, asked.keep)
                results.append(one)
                good = (
                    one.right
                    and one.right_line is not False
                    and (one.right_code or way == TORCHRUN)
                    and not one.leftovers
                )
                sign = "✓" if good else "✗"
                said = f"{one.found}{' – ' + one.wrong if one.wrong else ''}"
                told = f"{_seconds(one.explained_s)}, code {one.code}, {one.leftovers} left; {said}"
                print(f"{number + 1}/{len(chosen)} {sign} {case.name} {way}: {told}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        return 130
    finally:
        if results or skipped:
            report = "\n\n".join([setting(skipped), table(results), totals(results)])
            print(report)
            if asked.markdown:
                asked.markdown.write_text(report + "\n")
            if asked.json:
                data = {"schema": 1, "skipped": skipped, "results": [dataclasses.asdict(one) for one in results]}
                asked.json.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
