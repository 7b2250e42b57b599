"""Runs a course: one stage after the other, each a child, until all are done or one fails."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stoker.contract import env_vars, terminal
from stoker.contract.errors import EX_DATAERR, EX_SOFTWARE, EX_TEMPFAIL, Refusal
from stoker.contract.frozen import frozen, replace
from stoker.contract.progress import read_progress
from stoker.contract.safe_io import write_json
from stoker.contract.units import format_duration
from stoker.control.record import run_record
from stoker.speedrun import child, state
from stoker.speedrun.child import Children
from stoker.speedrun.course import Course
from stoker.speedrun.estimate import left
from stoker.speedrun.keys import run_name
from stoker.speedrun.options import command
from stoker.speedrun.stages import REPORT, WORLD, File, Stage, config_of_stage, dependents
from stoker.speedrun.state import DONE, FAILED, PARTIAL, RUNNING, STOPPED
from stoker.training.config.keys import KEYS
from stoker.training.config.schema import Config
from stoker.training.stages.registry import STAGES
from stoker.training.stages.stage import From

TOKENIZER = "tokenizer"  # the folder with one, in a run directory
STILL_ENDING_S = 60.0  # a launcher whose speedrun was killed: 30 s for its ranks to save, and a little
VARIABLES = "STOKER_TRAIN_"
TOLERATED = 0.01  # of the rows may be too long: the stage leaves them out


def make_world(folder: str, keys: Mapping[str, Any]) -> None:
    from stoker.training.world.make import make

    make(folder, seed=keys["seed"], level=keys["level"], size=keys["size"])


@frozen
class TooLong:
    what: str
    long: int
    total: int
    longest: int  # tokens, with the answer
    config: Config

    def line(self, recipe: str) -> str:
        """With the flags that would make room."""
        context = self.config.data.context_length
        enough = 1 << (self.longest - 1).bit_length()
        flags = f"--set {recipe}:data.context_length={enough}"
        if self.config.batch.tokens % enough:
            flags += f" --set {recipe}:batch.tokens={enough}"
        long = f"{self.long} of {self.total} {self.what} are longer than {context} tokens"
        return f"{long}, the longest has {self.longest}: {flags}"


def too_long(stage: str, config: Config, tokenizer: str) -> TooLong | None:
    """Rows that the stage would refuse, hours later; fewer are left out there."""
    from stoker.training.tokenizer.tokenizer import load

    lengths_of = STAGES[stage].lengths
    for what, lengths in lengths_of(config, load(tokenizer)) if lengths_of is not None else ():
        long = sum(length > config.data.context_length for length in lengths)
        if long and long >= TOLERATED * len(lengths):
            return TooLong(what, long, len(lengths), max(lengths), config)
    return None


@frozen
class Tools:
    """What does the work; tests put others in their place."""

    train: tuple[str, ...] = (sys.executable, "-P", "-m", "stoker", "train")
    report: tuple[str, ...] = (sys.executable, "-P", "-m", "stoker.speedrun.report")
    world: Callable[[str, Mapping[str, Any]], None] = make_world
    too_long: Callable[[str, Config, str], TooLong | None] = too_long


class Drive:
    def __init__(
        self,
        course: Course,
        tools: Tools,
        environment: Mapping[str, str],
        say: Callable[[str], None],
        argv: Sequence[str] = (),
        handles: Sequence[int] = (),
    ) -> None:
        """`argv`: as it was typed, for the commands that are said. `handles`: open files that each stage is given."""
        self.course, self.tools, self.say, self._argv = course, tools, say, argv
        self.entries = dict(course.entries)
        kept = {name: text for name, text in environment.items() if not name.startswith(VARIABLES)}
        self._environment = {env_vars.PLOTS: "0", **kept}  # the report has every curve
        self._handles = handles
        self._took: dict[str, float] = {}
        self._estimated = {name: about.seconds for name, about in course.estimates.items()}
        self._tokenizer = next(stage.name for stage in course.stages if TOKENIZER in stage.outputs)
        self._bar = terminal.shows_bars() and not course.options.verbose

    def run(self) -> int:
        course = self.course
        if course.as_recorded:
            return self._report_as_recorded()
        again = course.options.only == REPORT
        failed: dict[str, int] = {}
        looked = False
        waiting = [
            stage
            for stage in course.stages
            if stage.name in course.selected and (again or not self.entries[stage.name].done)
        ]
        self._took = {name: entry.seconds for name, entry in self.entries.items() if entry.done and entry.seconds}
        before = [name for name in course.selected if self.entries[name].done and not again]
        if before:
            self.say(f"done before: {', '.join(before)}")
        course.prepare()
        self._write()
        with Children(self._handles) as children:
            for place, stage in enumerate(waiting):
                if not looked and self.entries[self._tokenizer].done:
                    self._look_at_lengths(waiting[place:])
                    looked = True
                code = self._stage(stage, children, [one.name for one in waiting[place + 1 :]])
                if children.stopped or (code and self._needed(stage)):
                    return self._ended_early(stage, waiting[place + 1 :], code, children.stopped)
                if code:
                    failed[stage.name] = code
        if failed:
            self.say(
                f"failed: {', '.join(failed)}; no later stage needs {'it' if len(failed) == 1 else 'them'}; the same"
                " command tries again"
            )
        elif waiting and all(entry.done for entry in self.entries.values()):
            self._farewell()
        return next(iter(failed.values()), 0)

    def _farewell(self) -> None:
        """Of a whole chain: how long it took, how good the last model is, what to type next."""
        took, folder = sum(entry.seconds for entry in self.entries.values()), _shown(self.course.folder)
        result = ""
        for stage in self.course.stages:
            kind = STAGES.get(stage.stage)
            if kind is None or not kind.measures or "model.load" not in stage.keys:
                continue
            run = self._run_of(stage)
            found = state.result_of(run) if run is not None else None
            if headline := kind.headline((found or {}).get("metrics") or {}):
                result = f" | {stage.name}: {headline}"
        self.say(f"all {len(self.entries)} stages are done, in {format_duration(took)}{result}")
        report = os.path.join(folder, "report.html")
        self.say(f"next: `stoker chat {folder}` | {report} | `stoker export {folder} my-model` for transformers")

    def _needed(self, stage: Stage) -> bool:
        """Others are built on it, or it is all that was wanted; an evaluation is only measured by."""
        return stage.stage == REPORT or bool(dependents(self.course.stages, stage.name))

    def _look_at_lengths(self, waiting: Sequence[Stage]) -> None:
        """Of what stages will ask, in the chain's own tokens. What would end the chain there ends it now, the rest is
        said.
        """
        in_its_tokens = dependents(self.course.stages, self._tokenizer)
        found: dict[str, list[Stage]] = {}
        for stage in (one for one in waiting if one.name in in_its_tokens and STAGES[one.stage].lengths is not None):
            config, words = config_of_stage(stage, self._asked_path), self._path(From(self._tokenizer, TOKENIZER))
            told = self.tools.too_long(stage.stage, config, words)
            if told is not None:
                found.setdefault(told.line(stage.stage), []).append(stage)
        lines = {
            f"{', '.join(stage.name for stage in stages)} will fail: {line}": any(map(self._needed, stages))
            for line, stages in found.items()
        }
        for line in (line for line, needed in lines.items() if not needed):
            self.say(line)
        if any(lines.values()):
            raise Refusal("; ".join(line for line, needed in lines.items() if needed), EX_DATAERR)

    def _asked_path(self, place: From | File) -> str:
        """Of files that are there from the beginning; what stages make is not opened here."""
        return self._path(place) if isinstance(place, File) or place.stage == WORLD else place.path

    def _stage(self, stage: Stage, children: Children, after: Sequence[str]) -> int:
        name, options = stage.name, self.course.options
        number = f"[{[one.name for one in self.course.stages].index(name) + 1}/{len(self.course.stages)}]"
        self.say(f"{number} {name} … about {format_duration(left(self._estimated, self._took, [name]))}")
        self._await_end_of_former(stage)
        used = child.millijoules() if self.course.machine.gpus else None
        began, clock = time.time(), time.monotonic()
        self._note(name, status=RUNNING, began=began, trouble="")
        log = os.path.join(self.course.folder, state.LOGS, f"{run_name(name, self.course.keys)}.log")
        log_from = os.path.getsize(log) if os.path.exists(log) else 0
        if stage.stage == WORLD:
            code = self._world(stage)
        else:
            where = None if options.verbose else log
            code = children.run(self._command(stage), self._environment, where, lambda: self._draw(stage, clock))
        terminal.clear_bar()
        seconds = round(self.entries[name].seconds + time.monotonic() - clock, 2)
        run, spent = self._run_of(stage), None
        recorded = run_record.load_run(run) if run is not None and used is not None else None
        if recorded is not None:
            spent = child.watt_hours(used, child.millijoules(), child.cards_of(recorded.data))
        spent = None if spent is None else round(spent + (self.entries[name].energy_wh or 0.0), 3)
        cost = round(seconds / 3600 * options.price_per_hour, 4) if options.price_per_hour is not None else None
        self._note(
            name, seconds=seconds, energy_wh=spent, cost=cost, began=None, run=state.relative(run, self.course.folder)
        )
        self.entries[name] = state.seen(self.course.folder, self.entries[name])
        return self._judge(stage, run, code, log, log_from, children.stopped, number, after)

    def _judge(
        self,
        stage: Stage,
        run: str | None,
        code: int,
        log: str,
        log_from: int,
        stopped: int,
        number: str,
        after: Sequence[str],
    ) -> int:
        """Exit code 0 alone proves nothing: a stage that was asked to stop saves and ends well, too."""
        name = stage.name
        result = state.result_of(run) if run is not None else None
        if stage.stage == REPORT and code == 0:
            whole = all(entry.done for one, entry in self.entries.items() if one != name)
            self._note(name, status=DONE if whole else PARTIAL)
            page = os.path.join(_shown(self.course.folder), stage.outputs[0])
            self.say(f"{number} {name} ✓ {format_duration(self.entries[name].seconds)} | {page}")
            return 0
        if result is not None and (code == 0 or stopped):
            self._note(name, status=DONE)
            self._took[name] = self.entries[name].seconds
            headline = STAGES[stage.stage].headline(result.get("metrics") or {}) if stage.stage in STAGES else ""
            rest = left(self._estimated, self._took, after)
            parts = [
                f"{number} {name} ✓ {format_duration(self.entries[name].seconds)}",
                *([headline] if headline else []),
            ]
            parts += [f"the rest takes about {format_duration(rest)}"] if rest >= 1 else []
            self.say(" | ".join(parts))
            return 0
        if stopped:
            self._note(name, status=STOPPED)
            return code or 128 + stopped
        line, fix = state.trouble(run, code, log, log_from)
        if code == 0:
            line, fix = f"it ended with exit code 0 and left no {state.RESULT}", ""
        self._note(name, status=FAILED, trouble=line)
        line += f"; {fix}" if fix else ""
        line += "" if self.course.options.verbose else f"; log: {_shown(log)}"
        self.say(f"{number} {name} ✗ after {format_duration(self.entries[name].seconds)}: {line}")
        return code or EX_SOFTWARE

    def _ended_early(self, stage: Stage, unreached: Sequence[Stage], code: int, stopped: int) -> int:
        if stopped:
            where = f" in stage {stage.name}" if code else ""
            again = shlex.join(["stoker", "speedrun", *self._argv])
            self.say(f"stopped{where}; the same command resumes it: {again}")
            return code or 128 + stopped
        hindered = dependents(self.course.stages, stage.name)
        others = [one.name for one in unreached if one.name not in hindered and one.name != REPORT]
        in_vain = [one.name for one in unreached if one.name in hindered]
        if in_vain:
            why = "it needs" if len(in_vain) == 1 else "they need"
            self.say(f"not run, because {why} {stage.name}: {', '.join(in_vain)}")
        if others:
            why = "it does" if len(others) == 1 else "they do"
            self.say(f"not reached, though {why} not need {stage.name}: {', '.join(others)} (--only STAGE runs one)")
        self.say(f"the same command resumes it; `{command(self._argv, '--only', REPORT)}` reports on what there is")
        return code

    def _command(self, stage: Stage) -> list[str]:
        if stage.stage == REPORT:
            return [*self.tools.report, self.course.folder]
        options = self.course.options
        words = [*self.tools.train, stage.stage, "--preset", stage.below]
        run = self._run_of(stage)
        former = run_record.load_run(run) if run is not None else None
        ended = former.verdict if former is not None else None
        name = run_name(stage.name, self.course.keys)
        if former is not None and ended is not None and ended.is_stop_rule:
            name = former.id  # resumes the stage; its name would only repeat the verdict
        words += ["--runs-dir", state.runs_root(self.course.folder), "--name", name]
        words += ["--max-restarts", str(options.max_restarts)]
        ranks = "1" if STAGES[stage.stage].one_process else self.course.nproc_per_node
        words += ["--nproc-per-node", ranks] if ranks is not None else []
        words += [] if options.verbose else ["--quiet", "--show", "none"]
        if ended is not None and ended.status == "completed":
            # Complete, and without a result all the same: it would only say that there is nothing to do.
            words.append("--again")
        for key, value in stage.keys.items():
            for item in value if isinstance(value, tuple) else (value,):
                text = self._path(item) if isinstance(item, (From, File)) else KEYS[key].text(item)
                words.append(f"--{key}={text}")
        return words

    def _path(self, place: From | File) -> str:
        if isinstance(place, File):
            return place.word
        stage = next(one for one in self.course.stages if one.name == place.stage)
        run = self._run_of(stage)
        found = os.path.join(run, place.path) if run is not None else ""
        if not os.path.exists(found):
            where = _shown(run) if run is not None else stage.name
            raise Refusal(
                f"stage {stage.name} is done and its {place.path} is gone: remove {where}, and the same command makes"
                " it again",
                EX_SOFTWARE,
            )
        return found

    def _run_of(self, stage: Stage) -> str | None:
        return state.run_of(self.course.folder, stage, self.course.keys)

    def _report_as_recorded(self) -> int:
        folder, options = self.course.folder, self.course.options
        self.say(f"{_shown(folder)} was run with other settings or other code: this is a report on it as it is")
        if options.price_per_hour is not None:
            state.note_price(folder, options.price_per_hour)
        log = os.path.join(folder, state.LOGS, f"{REPORT}.log")
        log_from = os.path.getsize(log) if os.path.exists(log) else 0
        with Children(self._handles) as children:
            where = None if options.verbose else log
            code = children.run([*self.tools.report, folder], self._environment, where, lambda: None)
        if code:
            self.say(f"{REPORT} ✗ {state.trouble(None, code, log, log_from)[0]}; log: {_shown(log)}")
        else:
            self.say(f"{REPORT} ✓ {os.path.join(_shown(folder), 'report.md')}")
        return code

    def _world(self, stage: Stage) -> int:
        folder = self._run_of(stage)
        assert folder is not None
        os.makedirs(folder, exist_ok=True)
        self.tools.world(folder, stage.keys)
        result = {"schema": 1, "stage": WORLD, "metrics": dict(stage.keys), "model": None}
        write_json(os.path.join(folder, state.RESULT), result)
        return 0

    def _await_end_of_former(self, stage: Stage) -> None:
        """Its launcher gets SIGTERM when a speedrun is killed, and may still be letting its ranks save."""
        path = self._run_of(stage) if stage.stage != WORLD else None
        former = run_record.load_run(path) if path is not None else None
        if former is None or not run_record.is_alive(former):
            return
        self.say(f"stage {stage.name}: its former launcher (pid {former.launcher[0]}) is still ending: waiting for it")
        deadline = time.monotonic() + STILL_ENDING_S
        while run_record.is_alive(former):
            if time.monotonic() > deadline:
                raise Refusal(
                    f"stage {stage.name} is running under another launcher (pid {former.launcher[0]}): `stoker stop"
                    f" {former.name}` in its folder ends it: --runs-dir {_shown(state.runs_root(self.course.folder))}",
                    EX_TEMPFAIL,
                )
            time.sleep(0.1)

    def _note(self, name: str, **changes: Any) -> None:
        self.entries[name] = replace(self.entries[name], **changes)
        self._write()

    def _write(self) -> None:
        state.write_chain(self.course.folder, self.course.about(), self.entries)

    def _draw(self, stage: Stage, began: float) -> None:
        if not self._bar:
            return
        run = self._run_of(stage)
        state_of_rank = read_progress(run) if run is not None else None
        steps = stage.keys.get("train.max_steps", 0)
        progress = (
            state_of_rank.bar(terminal.bar_width() - len(stage.name) - 20)
            if state_of_rank is not None
            else state.progress(run, steps)
        )
        terminal.draw_bar(
            f"  {stage.name} {format_duration(time.monotonic() - began)}{f' | {progress}' if progress else ''}"
        )


def _shown(path: str) -> str:
    near = os.path.relpath(path)
    return path if near.startswith("..") else near
