"""A conversation as the ids that a model's own chat template makes of it: those of `transformers`, but special tokens
that stand in a message stay text.

The template sees such a message with a character inside the special token that occurs nowhere else. In what it wrote,
whole special tokens are then its own. They get names that nobody can know, and the library finds these in the joined
text, so that all between two of them is encoded as one.
"""

from __future__ import annotations

import heapq
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.contract.errors import EX_DATAERR, Refusal
from stoker.contract.frozen import frozen
from stoker.contract.text import parse_json
from stoker.training.tokenizer.definition import any_of
from stoker.training.tokenizer.encoders import Ids, SpanEncoder
from stoker.training.tokenizer.render_process import LAST, NotRendered, Rendered, Renderer, RenderProcess, Unusable

JINJA, OLD_JSON = "chat_template.jinja", "chat_template.json"
DEFAULT, WITH_TOOLS = "default", "tool_use"
NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# What tokenizer/chat.py writes, in the templates' language.
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' +"
    " '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_PRIVATE = range(0x100000, 0x10FFFE)  # characters that mean nothing to anybody
_PRIVATE_CHARACTER = re.compile(f"[{chr(_PRIVATE[0])}-{chr(_PRIVATE[-1])}]")


class Unfit(Refusal):
    """A conversation that can't be written, and why."""

    def __init__(self, why: str) -> None:
        super().__init__(why, EX_DATAERR)


@frozen
class Encoded:
    ids: Ids
    mask: NDArray[np.uint8]  # 1: learned
    size: int  # bytes of learned text, special tokens left out
    only_last: bool = False  # earlier turns of the assistant are not learned, though they are there


def templates_of(config: Mapping[str, Any], files: Mapping[str, bytes], where: str) -> dict[str, str]:
    """By name. A file of its own counts more than the key in tokenizer_config.json."""
    found: Any = config.get("chat_template")
    try:
        if OLD_JSON in files:
            found = parse_json(files[OLD_JSON])["chat_template"]
        if JINJA in files:
            found = files[JINJA].decode()
    except (ValueError, KeyError, TypeError) as problem:
        raise Refusal(f"tokenizer {where}: its chat template can't be read: {problem}", EX_DATAERR) from problem
    if isinstance(found, list):
        found = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
    sources = found if isinstance(found, dict) else {DEFAULT: found}
    return {str(name): source for name, source in sources.items() if isinstance(source, str) and source}


class ChatTemplate:
    def __init__(
        self,
        sources: Mapping[str, str],
        names: Mapping[str, str],
        special: Mapping[str, int],
        span_encoder: Callable[[Mapping[str, str]], SpanEncoder],
        where: str,
        *,
        in_child: bool = False,
    ) -> None:
        """`span_encoder`: returns the tokenizer's encoder with other names for its special tokens; `in_child`: render under the
        time limit of render_process.py.
        """
        self.sources = sources  # by name
        self._names, self._special, self._span_encoder, self._where = names, special, span_encoder, where
        self._pattern = any_of(special)
        self._private = set(filter(_PRIVATE_CHARACTER.match, "".join(special)))
        self._in_child = in_child

    @cached_property
    def _renderer(self) -> Renderer:
        if self._in_child:
            return RenderProcess(self.sources, self._names, self._special)
        from stoker.training.tokenizer.rendering import Templates  # only here: jinja2 takes 50 ms

        return Templates(self.sources, self._names, self._special)

    def prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] = (),
        variables: Mapping[str, Any] | None = None,
        *,
        opens_turn: bool = True,
        continues: bool = False,
    ) -> list[int]:
        """Return the ids of the conversation so far and of the beginning of the assistant's turn. `variables`: names that the
        template may read; `opens_turn`: False leaves the beginning out; `continues`: the last message is not ended.
        """
        how = {"opens_turn": opens_turn, "continues": continues}
        rendered, inside = self._rendered(messages, tools, True, variables, how)
        ids, _, _ = self._ids(rendered.text, inside)
        return list(map(int, ids))

    def conversation(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] = ()) -> Encoded:
        rendered, inside = self._rendered(messages, tools, prompt=False)
        ids, offsets, moved = self._ids(rendered.text, inside)
        spans = moved(np.array(rendered.learned, dtype=np.int64).reshape(-1, 2))
        # Spans that begin before a token's end, without those that end before its begin: those that overlap with it.
        begun = np.searchsorted(np.sort(spans[:, 0]), offsets[:, 1], side="left")
        ended = np.searchsorted(np.sort(spans[:, 1]), offsets[:, 0], side="right")
        mask = ((begun > ended) & (offsets[:, 0] < offsets[:, 1])).astype(np.uint8)
        pieces = (self._pattern.sub("", rendered.text[begin:end]) for begin, end in rendered.learned)
        size = sum(len(piece.replace(inside, "").encode("utf-8", "replace")) for piece in pieces)
        return Encoded(ids, mask, size, rendered.by == LAST)

    @cached_property
    def end_id(self) -> int | None:
        """The token that ends an answer: the first behind its words. None where the template writes none."""
        words = "\u7b54"
        try:
            turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": words}]
            text = self._rendered(turns, (), prompt=False)[0].text
        except Unfit:
            return None
        end = self._pattern.search(text, text.rfind(words) + 1)
        return self._special[end[0]] if end and words in text else None

    def _rendered(
        self,
        messages: Sequence[Any],
        tools: Sequence[Any],
        prompt: bool,
        variables: Mapping[str, Any] | None = None,
        how: Mapping[str, bool] | None = None,
    ) -> tuple[Rendered, str]:
        """Return what the template makes of a conversation, and the character that stands inside special tokens which are
        text: it occurs nowhere else.
        """
        values = dict(variables or {})
        texts = "\0".join(_texts([list(messages), list(tools), values]))
        used = self._private | {match[0] for match in _PRIVATE_CHARACTER.finditer(texts)}
        inside = next((chr(code) for code in _PRIVATE if chr(code) not in used), "")
        if not inside:
            raise Unfit("it has every one of Unicode's private characters; one must be free to mark text with")
        if self._pattern.search(texts):
            messages, tools, values = (self._as_text(value, inside) for value in (list(messages), list(tools), values))
        name = WITH_TOOLS if tools and WITH_TOOLS in self.sources else DEFAULT
        if name not in self.sources:
            have = ", ".join(self.sources)
            raise Refusal(
                f"tokenizer {self._where}: no chat template is called {DEFAULT}; there are {have}", EX_DATAERR
            )
        request = {
            "template": name,
            "messages": list(messages),
            "tools": list(tools) or None,
            "variables": values,
            "how": how,
            "prompt": prompt,
            "inside": inside,
        }
        try:
            return self._renderer.render(request), inside
        except Unusable as problem:
            line = f"tokenizer {self._where}: its chat template can't be used: {problem}"
            raise Refusal(line, EX_DATAERR) from problem
        except NotRendered as problem:
            raise Unfit(f"the chat template of {self._where} can't write it: {problem}") from problem

    def _as_text(self, value: Any, inside: str) -> Any:
        if isinstance(value, str):
            return self._pattern.sub(lambda match: match[0][0] + inside + match[0][1:], value)
        if isinstance(value, dict):
            return {self._as_text(key, inside): self._as_text(item, inside) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._as_text(item, inside) for item in value]
        return value

    def _ids(self, text: str, inside: str) -> tuple[Ids, Ids, Callable[[NDArray[np.int64]], NDArray[np.int64]]]:
        """Ids, which characters each stands for, and where characters of the text are among those."""
        encode, doubles, to_special = self._encoder
        pieces: list[str] = []
        edges, shifts, place, shift = [0], [0], 0, 0
        for match in self._unlike(text, inside):
            if match.start() < place:
                continue
            double = doubles.get(match[0], "")
            pieces += [text[place : match.start()], double]
            place = match.end()
            shift += len(double) - len(match[0])
            edges.append(place)
            shifts.append(shift)
        joined = "".join([*pieces, text[place:]])
        ids, offsets = encode(joined)
        ends, moves = np.array(edges), np.array(shifts)
        return to_special[ids], offsets, lambda at: at + moves[np.searchsorted(ends, at, side="right") - 1]

    def _unlike(self, text: str, inside: str) -> Iterable[re.Match[str]]:
        """Where special tokens are, and the character that is not to stay, in order."""
        escaped = json.dumps(inside)[1:-1]  # a template's own JSON may write it so
        special = self._pattern.finditer(text)
        if inside not in text and escaped not in text:
            return special
        unwanted = re.finditer(f"{inside}|{re.escape(escaped)}", text)
        return heapq.merge(special, unwanted, key=lambda match: match.start())

    @cached_property
    def _encoder(self) -> tuple[SpanEncoder, dict[str, str], Ids]:
        """The encoder, the secret names, and a table from their ids to those of the tokenizer."""
        secret = os.urandom(16).hex()
        doubles = {
            name: f"{chr(_PRIVATE[0])}{secret}-{place}{chr(_PRIVATE[1])}" for place, name in enumerate(self._special)
        }
        encode = self._span_encoder(doubles)
        ids, _ = encode("".join(doubles.values()))
        if len(ids) != len(doubles):
            raise Refusal(f"tokenizer {self._where}: its special tokens can't be distinguished from text", EX_DATAERR)
        table = np.arange(1 + int(ids.max()), dtype=np.uint32)  # the library numbers what was added last as the last
        table[ids] = list(self._special.values())
        return encode, doubles, table


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [text for pair in value.items() for text in _texts(list(pair))]
    return [text for item in value for text in _texts(item)] if isinstance(value, (list, tuple)) else []
