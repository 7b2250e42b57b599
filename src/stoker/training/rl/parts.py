"""What an answer is worth, as settings name it: `--grpo.reward rewards.py:score=1.0 --grpo.reward length=0.1`. No torch.

A part is NAME, NAME:ARGUMENT or FILE.py:FUNCTION, with =WEIGHT behind it where it isn't 1. An answer's reward is the
weighted sum of its parts.
"""

from __future__ import annotations

import ast
import itertools
import json
import math
import os
import re
from collections.abc import Callable, Collection, Sequence

from stoker.contract.errors import EX_DATAERR, EX_NOINPUT, EX_USAGE, Refusal
from stoker.contract.frozen import frozen
from stoker.contract.options import suggest
from stoker.contract.safe_io import read_text
from stoker.contract.text import escape, is_digits
from stoker.training.data.rows import rows
from stoker.training.evaluate.marking import marked_part, right_in_form, right_number, states_number
from stoker.training.evaluate.mathematics import same_value
from stoker.training.rl.config import GrpoConfig

EXACT, NUMBER, MATH, REGEX, FORMAT, LENGTH, MODEL, CODE, ROLLOUT = (
    "exact", "number", "math", "regex", "format", "length", "model", "code", "rollout",
)  # fmt: skip
MARKED = (EXACT, NUMBER, MATH)  # these compare with the row's answer
NAMES = {
    EXACT: "1 if the answer is right and in the expected form (the default)",
    NUMBER: "1 if the last number is that of the row's answer",
    MATH: "1 if the stated value is that of the row's answer: fractions, roots, LaTeX",
    REGEX: "regex:PATTERN, 1 if it is found",
    FORMAT: "format:think, format:boxed, format:stated or format:json",
    LENGTH: "shorter is better; length:N: 1 up to N tokens, 0 from 2 N on",
    MODEL: "the reward model's score (grpo.reward_model)",
}
_THINK = re.compile(r"\s*<think>(.+?)</think>\s*(\S.*)", re.DOTALL)
_LOOKED_AT = 100_000  # rows of the prompts whose columns a function may ask for


@frozen
class RewardPart:
    kind: str
    argument: str  # of code: the function's name
    weight: float
    label: str  # in metrics and rollouts
    file: str = ""  # of code

    @property
    def apart(self) -> bool:
        """It runs in a process of its own: a user's code, and patterns that may search without end."""
        return self.kind in (CODE, REGEX)


def parts_of(c: GrpoConfig) -> tuple[RewardPart, ...]:
    """Return the parts in the order given, the reward model's last; `exact` alone where nothing is given.

    With grpo.rollout what it returns comes first, and `exact` only where it is given.
    """
    found = [RewardPart(ROLLOUT, "", 1.0, ROLLOUT)] if c.rollout else []
    for text in c.reward or (() if c.rollout else (EXACT,)):
        found.append(_part(text, {part.label for part in found}, c))
    if any(part.kind == MODEL for part in found) and not c.reward_model:
        raise Refusal("grpo.reward model needs a reward model: name its folder with grpo.reward_model", EX_USAGE)
    if c.reward_model and not any(part.kind == MODEL for part in found):
        found.append(RewardPart(MODEL, "", c.reward_weight, MODEL))
    return tuple(found)


def _part(text: str, taken: Collection[str], c: GrpoConfig) -> RewardPart:
    name, weight = _weighted(text)
    kind, _, argument = name.partition(":")
    if kind.endswith(".py"):
        if not argument.isidentifier():
            raise Refusal(f"grpo.reward {text!r}: add the function's name: {kind}:score", EX_USAGE)
        return RewardPart(CODE, argument, 1.0 if weight is None else weight, _free(argument, taken), kind)
    if kind not in NAMES:
        there = f"{suggest(kind, NAMES)}; there are {', '.join(NAMES)}, or your own function: FILE.py:FUNCTION"
        raise Refusal(f"grpo.reward {text!r}: no such reward{there}", EX_USAGE)
    _check_argument(text, kind, argument)
    if weight is None:
        weight = c.reward_weight if kind == MODEL else 1.0
    return RewardPart(kind, argument, weight, _free(kind, taken))


def _weighted(text: str) -> tuple[str, float | None]:
    """The last =NUMBER is the weight; of a pattern that ends so, write =1 behind it."""
    name, sign, number = text.strip().rpartition("=")
    try:
        weight = float(number) if sign else math.nan
    except ValueError:
        weight = math.nan
    if sign and not math.isnan(weight) and math.isfinite(weight):
        return name, weight
    if sign and name.partition(":")[0] not in (REGEX,):
        raise Refusal(f"grpo.reward {text!r}: {number!r} is not a number; write {name}=0.5", EX_USAGE)
    return text.strip(), None


def _free(label: str, taken: Collection[str]) -> str:
    if label not in taken:
        return label
    return next(name for number in range(2, len(taken) + 3) if (name := f"{label}_{number}") not in taken)


def _check_argument(text: str, kind: str, argument: str) -> None:
    problem = ""
    if kind == REGEX:
        try:
            re.compile(argument)
        except (re.error, OverflowError, RecursionError) as error:
            problem = f"not a valid pattern: {error}"
        problem = problem if argument else "no pattern after regex:"
    elif kind == FORMAT and argument not in FORMATS:
        problem = f"{f'no format {argument!r}' if argument else 'no format given'}; there are {', '.join(FORMATS)}"
    elif kind == LENGTH and argument and not (is_digits(argument) and int(argument)):
        problem = f"{argument!r} is not a number of tokens; write length:200"
    elif argument and kind not in (REGEX, FORMAT, LENGTH):
        problem = f"{kind} takes nothing after a colon"
    if problem:
        raise Refusal(f"grpo.reward {text!r}: {problem}", EX_USAGE)


def check(c: GrpoConfig) -> None:
    """Before anything is started: names, weights, files, their syntax. Nothing of a file is executed here."""
    for part in parts_of(c):
        if part.kind == CODE:
            _check_parameters(part, _checked_code(part.file, part.argument, "grpo.reward"), c.prompts)
    if c.rollout:
        _checked_code(*rollout_function(c), "grpo.rollout")


def rollout_function(c: GrpoConfig) -> tuple[str, str]:
    """Return (file, name of the function) of grpo.rollout."""
    file, _, name = c.rollout.strip().rpartition(":")
    if not file.endswith(".py") or not name.isidentifier():
        example = file if file.endswith(".py") else "rollouts.py"
        raise Refusal(f"grpo.rollout {c.rollout!r}: name a file and a function, such as {example}:rollout", EX_USAGE)
    return file, name


def _checked_code(file: str, name: str, key: str) -> ast.Module:
    """Parse a user's file. Raises Refusal if it has no such function."""
    where = f"{key} {file}"
    try:
        tree = ast.parse(read_text(file))
    except OSError as problem:
        raise Refusal(f"{where} can't be read: {problem.strerror or problem}", EX_NOINPUT) from problem
    except SyntaxError as problem:
        raise Refusal(f"{where}, line {problem.lineno}: {problem.msg}", EX_DATAERR) from problem
    except (ValueError, RecursionError, MemoryError) as problem:
        raise Refusal(f"{where} is not valid Python: {problem or type(problem).__name__}", EX_DATAERR) from problem
    names = set(_names(tree))
    if name not in names and "*" not in names:
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
        functions = sorted(node.name for node in tree.body if isinstance(node, kinds))
        listed = f"its functions are {escape(', '.join(functions), 200)}" if functions else "it has no functions"
        there = suggest(name, names) or f"; {listed}"
        raise Refusal(f"{where} has no function {name!r}{there}", EX_DATAERR)
    return tree


def _check_parameters(part: RewardPart, tree: ast.Module, prompts: str) -> None:
    """Of a plain function: what it asks for is passed to every reward, or is a column of the prompts. Others are judged when
    they are loaded."""
    from stoker.training.rl.reward_worker import BATCH, PASSED

    made = [node for node in tree.body if getattr(node, "name", None) == part.argument]
    if len(made) != 1 or not isinstance(made[0], (ast.FunctionDef, ast.AsyncFunctionDef)) or made[0].decorator_list:
        return
    asked = made[0].args
    names = [argument.arg for argument in (*asked.posonlyargs, *asked.args)]
    required = names[: len(names) - len(asked.defaults)]
    pairs = zip(asked.kwonlyargs, asked.kw_defaults, strict=True)
    required += [argument.arg for argument, default in pairs if default is None]
    known = PASSED[BATCH in (*names, *(argument.arg for argument in asked.kwonlyargs))]
    unknown = [name for name in required if name not in known]
    if not unknown or not os.path.isfile(prompts):
        return
    columns: dict[str, None] = {}
    try:
        for _, row in itertools.islice(rows(prompts), _LOOKED_AT):
            columns |= dict.fromkeys(map(str, row))
            if all(name in columns for name in unknown):
                return
    except Refusal:
        return  # the recipe says what is wrong with them
    name, there = next(name for name in unknown if name not in columns), list(dict.fromkeys((*known, *columns)))[:20]
    raise Refusal(
        f"grpo.reward {shown(part)} has an unknown parameter {escape(name, 80)!r}{suggest(name, there)}; there are"
        f" {escape(', '.join(there), 400)}",
        EX_DATAERR,
    )


def _names(tree: ast.Module) -> list[str]:
    """All that a module's code may bind, in whatever branch: what is no function is refused when it is loaded."""
    found: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.append(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found += [alias.asname or alias.name for alias in node.names]
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.append(node.id)
    return found


def lacking(parts: Sequence[RewardPart]) -> Callable[[str | None], str]:
    """What is wrong with a row's answer, in words; empty: nothing. None: it has no answer."""
    kinds = {part.kind for part in parts}

    def problem(answer: str | None) -> str:
        if answer is None:
            return "without an answer" if kinds & set(MARKED) else ""
        if NUMBER in kinds and not states_number(answer):
            return "whose answer is not a number, which reward number needs"
        return ""

    return problem


def largest_reward(parts: Sequence[RewardPart]) -> float | None:
    """Return the most that answers can be paid on average; None where a user's function decides."""
    if any(part.kind in (CODE, ROLLOUT) for part in parts):
        return None
    # The model's part compares a prompt's answers with each other: their mean is about a half, however good they are.
    return sum(max(part.weight, 0.0) * (0.5 if part.kind == MODEL else 1.0) for part in parts)


# What these rewards pay 1 for, given a completion, the row's answer, and whether the token limit cut the completion.
# Whether a completion counts as correct is decided elsewhere (evaluate/grading.py).
MARKERS: dict[str, Callable[[str, str, bool], bool]] = {
    EXACT: lambda text, answer, cut: right_in_form(text, answer),
    NUMBER: lambda text, answer, cut: right_number(text, answer, cut=cut),
    MATH: lambda text, answer, cut: same_value(text, answer, cut=cut),
}


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


FORMATS: dict[str, Callable[[str], bool]] = {
    "think": lambda text: _THINK.fullmatch(text) is not None and text.count("<think>") == 1,
    "boxed": lambda text: "\\boxed" in text and marked_part(text) is not None,
    "stated": lambda text: marked_part(text) is not None,
    "json": _is_json,
}


def length_reward(tokens: int, argument: str, new_tokens: int) -> float:
    """`length`: 1 − tokens ÷ generate.new_tokens. `length:N`: 1 up to N tokens, falling to 0 at 2 N."""
    if not argument:
        return max(1 - tokens / new_tokens, 0.0)
    most = int(argument)
    return min(max(2 - tokens / most, 0.0), 1.0)


def shown(part: RewardPart) -> str:
    """For lines about it."""
    if part.kind == CODE:
        return f"{os.path.basename(part.file)}:{part.argument}"
    return f"{part.kind}:{part.argument}" if part.argument else part.kind
