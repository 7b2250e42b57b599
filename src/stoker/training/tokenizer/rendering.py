"""A model's own chat template as text, the way `transformers` renders it, and which of its characters the assistant
wrote. A template is somebody else's program: jinja2's sandbox keeps it from files and from Python itself.

python -m stoker.training.tokenizer.rendering: the child of render_process.py.
"""

from __future__ import annotations

import ctypes
import datetime
import json
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from stoker.training.tokenizer.definition import any_of
from stoker.training.tokenizer.render_process import LAST, MARKS, TURNS, NotRendered, Rendered, Span, Unusable

ASSISTANT = "assistant"
_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
_REASONING = ("reasoning_content", "thinking", "reasoning")
_CLOSED = (3, 1, 6)  # older ones of jinja2 let a template out of the sandbox; a host of --hosts may have any
_PR_SET_PDEATHSIG = 1


class _Generation(jinja2.ext.Extension):
    """{% generation %}: what the assistant wrote stands between this and {% endgeneration %}."""

    tags = {"generation"}  # noqa: RUF012  jinja2's own name and type

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        environment.extend(learned=[], written=[], length=0)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> str:
        text = caller()
        tracked: Any = self.environment
        tracked.learned.append((tracked.length, tracked.length + len(text)))
        return text


def _no_files(name: str) -> None:
    raise jinja2.exceptions.SecurityError(f"it reads the file {name!r}")


def _raise(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


class Template:
    """One template. `names`: what it may call bos_token, eos_token and so on; `special`: finds special tokens."""

    def __init__(self, source: str, names: Mapping[str, str], special: re.Pattern[str]) -> None:
        if tuple(map(int, re.findall(r"\d+", jinja2.__version__)[:3])) < _CLOSED:
            least = ".".join(map(str, _CLOSED))
            raise Unusable(f"jinja2 {jinja2.__version__} has holes in its sandbox; install {least} or later")
        environment: Any = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, jinja2.ext.loopcontrols],
            loader=jinja2.FunctionLoader(_no_files),
        )
        environment.filters["tojson"] = _tojson
        environment.globals |= {"raise_exception": _raise, "strftime_now": _now}
        self._environment, self._names = environment, dict(names)
        self._special, self._marked = special, _MARKED.search(source) is not None
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as problem:
            raise Unusable(f"line {problem.lineno}: {problem.message}") from problem
        except (jinja2.TemplateError, RecursionError, ValueError, TypeError) as problem:
            raise Unusable(_line(problem)) from problem

    def prompt(
        self,
        messages: Sequence[Any],
        tools: Any = None,
        variables: Mapping[str, Any] | None = None,
        opens_turn: bool = True,
        continues: bool = False,
    ) -> Rendered:
        """Render the conversation so far and the beginning of the assistant's turn. `continues`: up to the end of the last
        message's text instead, which the assistant continues.
        """
        text = self.text(messages, tools, opens_turn and not continues, variables)
        return Rendered(text[: _end_of_content(text, messages[-1])] if continues else text)

    def conversation(self, messages: Sequence[Any], tools: Any = None) -> tuple[Rendered, int]:
        """Return the text with what is learned, and how many of the messages it holds. Learned is what stands between the
        template's own marks, else what each of the assistant's turns adds. A template that writes earlier turns otherwise once
        later ones follow teaches the last one only.
        """
        whole = self.text(messages, tools)
        if self._marked:
            return Rendered(whole, _joined(self._environment.learned), MARKS), len(messages)
        spans = [
            self._turn(messages, place, tools, whole)
            for place, message in enumerate(messages)
            if message.get("role") == ASSISTANT
        ]
        if not spans:
            raise NotRendered("no message is the assistant's")
        if None not in spans:
            return Rendered(whole, _joined(span for span in spans if span), TURNS), len(messages)
        last = max(place for place, message in enumerate(messages) if message.get("role") == ASSISTANT)
        shorter = self.text(messages[: last + 1], tools)
        span = self._turn(messages[: last + 1], last, tools, shorter)
        if span is None:
            raise NotRendered("it writes the conversation before the assistant's turn otherwise once that turn follows")
        return Rendered(shorter, _joined([span]), LAST), last + 1

    def _turn(self, messages: Sequence[Any], place: int, tools: Any, whole: str) -> Span | None:
        """What this turn adds to what stands before it; None where these are not beginnings of the whole."""
        try:
            before = self.text(messages[:place], tools)
            asked = self.text(messages[:place], tools, True)
            done = whole if place + 1 == len(messages) else self.text(messages[: place + 1], tools)
        except Unusable:
            raise
        except NotRendered:
            return None
        if not whole.startswith(done):
            return None
        if done.startswith(asked):
            begin = len(asked)
        elif done.startswith(before):  # it begins an answer with what an answer of the past has not: <think>
            common = next((at for at, (one, two) in enumerate(zip(asked, done, strict=False)) if one != two), len(done))
            ends = [match.end() for match in self._special.finditer(done, len(before)) if match.end() <= common]
            begin = ends[-1] if ends else len(before)
        else:
            return None
        return begin, self._end(done, begin)

    def _end(self, text: str, begin: int) -> int:
        """Blanks behind the token that ends the turn belong to the template."""
        ends = [match.end() for match in self._special.finditer(text, begin)]
        return ends[-1] if ends and not text[ends[-1] :].strip() else len(text)

    def text(
        self, messages: Sequence[Any], tools: Any, prompt: bool = False, variables: Mapping[str, Any] | None = None
    ) -> str:
        environment = self._environment
        environment.learned.clear()
        environment.written.clear()
        environment.length = 0
        told = {"documents": None, **(variables or {}), "messages": list(_aliased(messages)), "tools": tools}
        told |= self._names
        try:
            for block in self._template.generate(add_generation_prompt=prompt, **told):
                environment.written.append(block)
                environment.length += len(block)
            text = "".join(environment.written)
        except MemoryError:
            raise
        except jinja2.exceptions.SecurityError as problem:
            raise Unusable(_line(problem)) from problem
        except Exception as problem:  # whatever somebody else's program raises
            raise NotRendered(_line(problem)) from problem
        return text.encode("utf-8", "replace").decode()  # a half of a surrogate pair is no character


def _end_of_content(text: str, message: Mapping[str, Any]) -> int:
    """Return where the message's own text ends in a rendered conversation: behind it the template ends the turn."""
    content = str(message.get("content") or "").strip()
    begin = text.rfind(content) if content else -1
    if begin < 0:
        raise NotRendered("it does not write the text of the last message, which is to be continued")
    whole = str(message["content"]).lstrip()  # some templates strip the text of a message
    return begin + len(whole if text.startswith(whole, begin) else content)


def _joined(spans: Iterable[Span]) -> tuple[Span, ...]:
    """In order, without empty ones; those that touch are one."""
    joined: list[Span] = []
    for begin, end in sorted(span for span in spans if span[0] < span[1]):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((begin, end))
    return tuple(joined)


def _aliased(messages: Sequence[Any]) -> Iterator[Any]:
    """Templates read a turn's thinking by one of several names."""
    for message in messages:
        reasoning = next((message[key] for key in _REASONING if message.get(key) is not None), None)
        named = {} if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}
        yield named or dict(message)


def _line(problem: BaseException) -> str:
    first = next(iter(str(problem).splitlines()), "")
    return f"{type(problem).__name__}: {first}"[:300] if first else type(problem).__name__


class Templates:
    """The templates of a tokenizer, by name. `names`: what they may call bos_token, eos_token and so on; `special`: its
    special tokens.
    """

    def __init__(self, sources: Mapping[str, str], names: Mapping[str, str], special: Collection[str]) -> None:
        self._sources, self._names = sources, names
        self._special = any_of(special)
        self._begins = any_of({name[:1] for name in special})
        self._compiled: dict[str, Template] = {}
        self._lock = threading.Lock()  # a template's environment holds what is being written

    def render(self, request: Mapping[str, Any]) -> Rendered:
        """Return the conversation of `request` (template.py). Raises NotRendered."""
        with self._lock:
            return self._render(request)

    def _render(self, request: Mapping[str, Any]) -> Rendered:
        name, messages, tools, variables = (request[key] for key in ("template", "messages", "tools", "variables"))
        if name not in self._compiled:
            self._compiled[name] = Template(self._sources[name], self._names, self._special)
        template = self._compiled[name]
        if request["prompt"]:
            rendered = template.prompt(messages, tools, variables, **request["how"])
        else:
            rendered, count = template.conversation(messages, tools)
            messages = messages[:count]
        # A template that deletes a part of a message may join the rest to a special token. So the messages are rendered
        # once more, with a character inside all that could become one: the special tokens must be the same.
        inside = request["inside"]
        broken = self._broken(messages, inside), self._broken(tools, inside), self._broken(variables, inside)
        if broken != (messages, tools, variables):
            again = template.prompt(*broken, **request["how"]).text if request["prompt"] else template.text(*broken[:2])
            if self._special.findall(again) != self._special.findall(rendered.text):
                raise NotRendered("it makes a special token of a message's text")
        return rendered

    def _broken(self, value: Any, inside: str) -> Any:
        """Roles and names of fields stay: templates ask for them."""
        if isinstance(value, str):
            return self._begins.sub(lambda match: match[0] + inside, value)
        if isinstance(value, dict):
            return {
                key if key.isidentifier() else self._broken(key, inside): item
                if key == "role"
                else self._broken(item, inside)
                for key, item in value.items()
            }
        return [self._broken(item, inside) for item in value] if isinstance(value, (list, tuple)) else value


def main() -> None:
    """Render one conversation per line of stdin: JSON in, JSON out. The first line holds the templates."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # a loop sees no end of stdin
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group: the parent decides
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    templates = Templates(**json.loads(sys.stdin.buffer.readline()))
    answer: dict[str, Any] = {}
    while True:
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()
        line = sys.stdin.buffer.readline()
        if not line:
            return
        try:
            rendered = templates.render(json.loads(line))
            answer = {"text": rendered.text, "learned": rendered.learned, "by": rendered.by}
        except NotRendered as problem:
            answer = {"problem": str(problem), "is_unusable": isinstance(problem, Unusable)}
        except MemoryError:
            answer = {"problem": "it takes more memory than there is", "is_unusable": False}


if __name__ == "__main__":
    main()
