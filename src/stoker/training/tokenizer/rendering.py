"""A model's own chat template as text, the way `transformers` renders it, and which of its characters the assistant
wrote.

A template is a stranger's program: the sandbox keeps it from files and from Python itself, and the process that calls
this has limits of time and memory (confined.py).
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.utils
from jinja2.sandbox import ImmutableSandboxedEnvironment

from stoker.contract.quantities import counted
from stoker.contract.shape import shape
from stoker.training.tokenizer.definition import any_of

ASSISTANT = "assistant"
MARKS, TURNS, LAST = "marks", "turns", "last"  # what says which characters are learned
_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
_REASONING = ("reasoning_content", "thinking", "reasoning")
_CLOSED = (3, 1, 6)  # older ones of jinja2 let a template out of the sandbox; a host of --hosts may have any
LONGEST_TEXT = 4 << 20  # characters: `tokenizers` takes 60 bytes for each
MOST_SPANS = 10_000  # that the assistant wrote, apart from each other
Span = tuple[int, int]


@shape
class Rendered:
    text: str
    learned: tuple[Span, ...] = ()  # in characters of `text`
    by: str = TURNS
    messages: int = 0  # that `text` was made of


class NotRendered(Exception):
    """Why, in one line."""


class Unusable(NotRendered):
    """No conversation can be written with this template: it is no template, or it reaches for what it must not."""


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


class _Dict:
    """`dict` without a class whose attributes lead elsewhere."""

    def __call__(self, *pairs: Any, **named: Any) -> dict[Any, Any]:
        return dict(*pairs, **named)

    def fromkeys(self, *keys: Any) -> dict[Any, Any]:
        return dict.fromkeys(*keys)


class _Namespace(jinja2.utils.Namespace):
    """No name that begins with an underscore: those are Python's own."""

    def __init__(*args: Any, **named: Any) -> None:  # `self` may be one of the names
        values = dict(*args[1:], **named)
        for name in values:
            _Namespace._check(name)
        jinja2.utils.Namespace.__init__(args[0], values)

    def __setitem__(self, name: str, value: Any) -> None:
        _Namespace._check(name)  # `self` has no attributes but the template's
        super().__setitem__(name, value)

    @staticmethod
    def _check(name: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace has no {name}")


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
        environment.globals |= {
            "raise_exception": _raise,
            "strftime_now": _now,
            "dict": _Dict(),
            "namespace": _Namespace,
        }
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
        return Rendered(text[: _end_of_content(text, messages[-1])] if continues else text, messages=len(messages))

    def conversation(self, messages: Sequence[Any], tools: Any = None) -> Rendered:
        """What is learned: between the template's own marks, else what each of the assistant's turns adds. A template
        that writes earlier turns otherwise once later ones follow teaches the last one only.
        """
        whole = self.text(messages, tools)
        if self._marked:
            return Rendered(whole, _joined(self._environment.learned), MARKS, len(messages))
        spans = [
            self._turn(messages, place, tools, whole)
            for place, message in enumerate(messages)
            if message.get("role") == ASSISTANT
        ]
        if not spans:
            raise NotRendered("no message is the assistant's")
        if None not in spans:
            return Rendered(whole, _joined(span for span in spans if span), TURNS, len(messages))
        last = max(place for place, message in enumerate(messages) if message.get("role") == ASSISTANT)
        shorter = self.text(messages[: last + 1], tools)
        span = self._turn(messages[: last + 1], last, tools, shorter)
        if span is None:
            raise NotRendered("it writes the conversation before the assistant's turn otherwise once that turn follows")
        return Rendered(shorter, _joined([span]), LAST, last + 1)

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
        except Exception as problem:  # whatever a stranger's program comes to
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
    if len(joined) > MOST_SPANS:
        raise NotRendered(f"it marks {counted(len(joined), 'part')} as the assistant's; {MOST_SPANS:,} is the most")
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
    """For the process with limits: JSON in, JSON out."""

    def __init__(self, told: bytes) -> None:
        self._told = json.loads(told)
        self._special = any_of(self._told["special"])
        self._begins = any_of({name[:1] for name in self._told["special"]})
        self._made: dict[str, Template] = {}

    def answer(self, request: bytes) -> bytes:
        asked = json.loads(request)
        try:
            template = self._template(asked["template"])
            if asked["prompt"]:
                rendered = template.prompt(asked["messages"], asked["tools"], asked["variables"], **asked["how"])
            else:
                rendered = template.conversation(asked["messages"], asked["tools"])
            self._check(template, asked, rendered)
        except NotRendered as problem:
            return json.dumps({"problem": str(problem), "unusable": isinstance(problem, Unusable)}).encode()
        if len(rendered.text) > LONGEST_TEXT:
            return json.dumps({"problem": f"it is longer than {LONGEST_TEXT >> 20} million characters"}).encode()
        return json.dumps({"text": rendered.text, "learned": rendered.learned, "by": rendered.by}).encode()

    def _check(self, template: Template, asked: Any, rendered: Rendered) -> None:
        """A template that deletes a part of a message may join the rest to a special token. So the messages are rendered
        once more, with a character inside all that could become one: the special tokens must be the same.
        """
        messages = asked["messages"][: rendered.messages]
        given = messages, asked["tools"], asked["variables"]
        broken = self._broken(given[0], asked["inside"]), *(self._broken(one, asked["inside"]) for one in given[1:])
        if broken == given:
            return
        again = template.prompt(*broken, **asked["how"]).text if asked["prompt"] else template.text(*broken[:2])
        if self._special.findall(again) != self._special.findall(rendered.text):
            raise NotRendered("it makes a special token of a message's text")

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
        return [self._broken(item, inside) for item in value] if isinstance(value, list) else value

    def _template(self, name: str) -> Template:
        if name not in self._made:
            self._made[name] = Template(self._told["sources"][name], self._told["names"], self._special)
        return self._made[name]
