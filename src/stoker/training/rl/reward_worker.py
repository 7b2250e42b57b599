"""A process that computes a user's rewards: what they do, take or break is not the rank's.

python -m stoker.training.rl.reward_worker: a JSON line on stdin says which functions there are, then one per call; a line
per call comes back. Standard library only: the user's file decides what else is imported.

Arguments are passed by name. A function with a parameter `completions` gets all answers at once: prompts, completions,
rows, and each column as a list; any other gets one: prompt, completion, row, and the columns of its row. A completion is a
text, or a list of messages where its prompt is one. None instead of a number: the reward does not apply.
"""

from __future__ import annotations

import asyncio
import ctypes
import functools
import importlib.util
import inspect
import json
import math
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from stoker.contract.units import plural
from stoker.training.rl.last_position import PositionWriter, first_line_of

_PR_SET_PDEATHSIG = 1
SHOWN = 160  # characters of a prompt or an answer in a line
BATCH = "completions"
# What every function may ask for, by whether it gets all answers at once.
PASSED = {False: ("prompt", "completion", "row"), True: ("prompts", BATCH, "rows")}


class Failed(Exception):
    """One line about a reward."""


class TimeIsUp(BaseException):
    """No Exception: a function that catches everything must not catch this."""


class Call:
    """One step's answers. `of`: for each completion, the place of its prompt and row."""

    def __init__(self, told: dict[str, Any]) -> None:
        self.completions: list[Any] = told["completions"]
        self.prompts = [told["prompts"][place] for place in told["of"]]
        self.rows: list[dict[str, Any]] = [told["rows"][place] for place in told["of"]]

    def about(self, place: int) -> str:
        return f"prompt {_shown(self.prompts[place])}, answer {_shown(text_of(self.completions[place]))}"


def text_of(completion: Any) -> str:
    """Return what the assistant said last, of a completion that is a text or messages."""
    if isinstance(completion, str):
        return completion
    said = [message.get("content") for message in completion if message.get("role") == "assistant"]
    return str(said[-1]) if said and said[-1] is not None else ""


class Function:
    def __init__(self, name: str, function: Callable[..., Any], columns: Sequence[str], file: str = "") -> None:
        self.name, self.function, self.file = name, function, file
        self.at: int | None = None  # the answer that is being judged
        self.entered: Callable[[int | None], None] = lambda place: None  # told which answer that is
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError) as problem:
            raise Failed(f"reward {name} can't be called: {problem}") from problem
        self.batch = any(parameter.name == BATCH for parameter in parameters)
        self._all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        given = (
            parameter
            for parameter in parameters
            if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        )
        self._names = []
        known = PASSED[self.batch]
        for parameter in given:
            if parameter.kind is parameter.POSITIONAL_ONLY:
                raise Failed(f"reward {name}: {parameter.name!r} is positional-only, and arguments are passed by name")
            if parameter.name in (*known, *columns):
                self._names.append(parameter.name)
            elif parameter.default is parameter.empty:
                there = ", ".join([*known, *(column for column in columns if column not in known)][:20])
                raise Failed(f"reward {name} has an unknown parameter {parameter.name!r}; there are {there}")

    def __call__(self, call: Call) -> list[float | None]:
        is_async = inspect.iscoroutinefunction(self.function)
        self.entered(None)
        if self.batch:
            self.at = None
            made = self.function(**self._of_all(call))
            return self._numbers(asyncio.run(made) if is_async else made, call)
        if is_async:
            return asyncio.run(self._together(call))
        found = []
        for place in range(len(call.completions)):
            self.at = place
            self.entered(place)
            found.append(self._number(self.function(**self._of_one(call, place)), call, place))
        return found

    async def _together(self, call: Call) -> list[float | None]:
        async def one(place: int) -> float | None:
            try:
                made = await self.function(**self._of_one(call, place))
            except Exception:
                self.at = place
                raise
            return self._number(made, call, place)

        self.at = None
        return list(await asyncio.gather(*(one(place) for place in range(len(call.completions)))))

    def _of_one(self, call: Call, place: int) -> dict[str, Any]:
        row = call.rows[place]
        return self._some({**row, "prompt": call.prompts[place], "completion": call.completions[place], "row": row})

    def _of_all(self, call: Call) -> dict[str, Any]:
        names = dict.fromkeys(name for row in call.rows for name in row) | dict.fromkeys(self._names)
        columns: dict[str, Any] = {name: [row.get(name) for row in call.rows] for name in names}
        return self._some({**columns, "prompts": call.prompts, "completions": call.completions, "rows": call.rows})

    def _some(self, given: dict[str, Any]) -> dict[str, Any]:
        return given if self._all else {name: given.get(name) for name in self._names}

    def _numbers(self, made: Any, call: Call) -> list[float | None]:
        count = len(call.completions)
        if hasattr(made, "tolist"):
            made = made.tolist()  # an array or a tensor
        if not isinstance(made, (list, tuple)):
            raise Failed(
                f"reward {self.name} returned {_kind(made)}; it must return a list of {count} numbers, one for each answer"
            )
        if len(made) != count:
            raise Failed(
                f"reward {self.name} returned {plural(len(made), 'number')} for {count} answers; it must return one for each"
            )
        return [self._number(value, call, place) for place, value in enumerate(made)]

    def _number(self, value: Any, call: Call, place: int) -> float | None:
        if value is None:
            return None
        if isinstance(value, (str, bytes)) or not hasattr(type(value), "__float__"):
            hint = ""
            if isinstance(value, (list, tuple)):
                hint = f"; a function that gets all answers at once has a parameter called {BATCH}"
            raise Failed(f"reward {self.name} returned {_kind(value)}, not a number{hint}; {call.about(place)}")
        number = float(value)
        if not math.isfinite(number):
            raise Failed(f"reward {self.name} returned {number}; {call.about(place)}")
        return number


def _kind(value: Any) -> str:
    if value is None:
        return "None"
    shown = _shown(value)
    return f"{shown} ({type(value).__name__})"


def _shown(value: Any) -> str:
    try:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=repr)
    except (TypeError, ValueError, RecursionError):
        text = object.__repr__(value)
    return repr(text if len(text) <= SHOWN else text[: SHOWN - 1] + "…")


def described_error(problem: BaseException, file: str, limit: str) -> str:
    """Return one line: where in the user's file, and what. `limit`: the setting that TimeIsUp means."""
    frames = traceback.extract_tb(problem.__traceback__)
    own = [frame for frame in frames if os.path.abspath(frame.filename) == file] or [
        frame for frame in frames if frame.filename != __file__
    ]
    line = f"{os.path.basename(own[-1].filename)}, line {own[-1].lineno}: " if own else ""
    text = " ".join(str(problem).split())
    kind = f"it took longer than {limit}" if isinstance(problem, TimeIsUp) else type(problem).__name__
    text = "" if isinstance(problem, TimeIsUp) else text[:400]
    return f"{line}{kind}{f': {text}' if text else ''}"


def failure(problem: BaseException, name: str, file: str, about: str) -> str:
    """Return one line: where in the user's file, what, and for which prompt."""
    line = described_error(problem, file, "grpo.reward_timeout")
    return f"reward {name} failed: {line}{f'; {about}' if about else ''}"


def load(told: dict[str, Any], columns: Sequence[str]) -> Function:
    if "pattern" in told:
        pattern = re.compile(told["pattern"])
        return Function(told["name"], lambda completion: pattern.search(text_of(completion)) is not None, columns)
    file = os.path.abspath(told["file"])
    module = load_module(file)
    function = getattr(module, told["function"], None)
    if not callable(function):
        raise Failed(f"reward {told['name']}: {told['function']} is {_kind(function)} there, not a function")
    return Function(told["name"], function, columns, file)


def load_module(file: str) -> ModuleType:
    """Import a user's file, once; files in its folder can be imported from it."""
    folder = os.path.dirname(file)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(os.path.splitext(os.path.basename(file))[0], file)
    assert spec is not None and spec.loader is not None
    module = sys.modules.get(spec.name)
    if module is None or getattr(module, "__file__", None) != file:
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    return module


def answer(work: Callable[[], Any], seconds: float, about: Callable[[BaseException], str]) -> dict[str, Any]:
    """Within the time limit. The alarm is raised in the middle of the user's code, so that the line is known."""
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        return {"made": work()}
    except Failed as problem:
        return {"failed": str(problem)}
    except TimeIsUp as problem:
        return {"failed": about(problem)}
    except (Exception, SystemExit, KeyboardInterrupt) as problem:
        return {"failed": about(problem)}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _time_is_up(number: int, frame: Any) -> None:
    raise TimeIsUp


def end_with_the_rank() -> None:
    """Let the kernel end this process with the rank that started it, whatever the user's code is doing."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # The rank was told to stop, and ends its step first. No SIG_IGN: what a reward starts would inherit it.
        signal.signal(number, lambda number, frame: None)


def main() -> None:
    end_with_the_rank()
    signal.signal(signal.SIGALRM, _time_is_up)
    answers = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    questions = os.fdopen(os.dup(0), "r", encoding="utf-8")
    os.dup2(2, 1)  # what a reward prints goes to the log
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    told = json.loads(questions.readline())
    seconds: float = told["seconds"]
    functions: list[Function] = []

    position = PositionWriter(told["position"])
    position.sample()

    def load_all() -> bool:
        for number, one in enumerate(told["functions"]):
            file = os.path.abspath(one["file"]) if "file" in one else ""
            position.enter(number, None, file, 0)
            function = load(one, told["columns"])
            first = first_line_of(function.function)
            function.entered = functools.partial(position.enter, number, file=file, line=first)
            functions.append(function)
        position.leave()
        return True

    def while_loading(problem: BaseException) -> str:
        one = told["functions"][len(functions)]
        return failure(problem, one["name"], os.path.abspath(one.get("file", "")), "")

    print(json.dumps(answer(load_all, seconds + told["loading_seconds"], while_loading)), file=answers)
    for line in questions:
        asked = json.loads(line)
        function, call = functions[asked["function"]], Call(asked)

        def about(problem: BaseException, function: Function = function, call: Call = call) -> str:
            few = f"one of {len(call.completions)} answers at once, the first: " if function.at is None else ""
            return failure(problem, function.name, function.file, few + call.about(function.at or 0))

        made = answer(lambda f=function, c=call: f(c), seconds, about)  # type: ignore[misc]
        position.leave()
        print(json.dumps(made), file=answers)


if __name__ == "__main__":
    main()
