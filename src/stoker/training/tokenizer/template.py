"""A conversation as the ids that a model's own chat template makes of it: those of `transformers`, but special tokens
that stand in a message stay text.

The template sees such a message with a character inside the special token that occurs nowhere else. In what it wrote,
whole special tokens are then its own. They get names that nobody can know, and the library finds these in the joined
text, so that all between two of them is encoded as one.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.contract.names import EX_DATAERR, Refusal
from stoker.contract.shape import shape
from stoker.contract.untrusted import parse_json
from stoker.training.tokenizer.confined import Confined, ConfinedTemplate
from stoker.training.tokenizer.definition import any_of
from stoker.training.tokenizer.encoders import Ids, Library, SpanEncoder

JINJA, OLD_JSON = "chat_template.jinja", "chat_template.json"
DEFAULT, WITH_TOOLS = "default", "tool_use"
NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
LAST = "last"  # only the last of the assistant's turns is learned
# What tokenizer/chat.py writes, in the templates' language.
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' +"
    " '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_PRIVATE = range(0x100000, 0x10FFFE)  # characters that mean nothing to anybody


class Unfit(Refusal):
    """A conversation that can't be written, and why."""

    def __init__(self, why: str) -> None:
        super().__init__(why, EX_DATAERR)


@shape
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
        library: Callable[[Mapping[str, str]], Library | Confined],
        where: str,
    ) -> None:
        """`library`: of the tokenizer with other names for its special tokens."""
        self._sources, self._special, self._library, self._where = sources, special, library, where
        self._pattern = any_of(special)
        self._process = ConfinedTemplate({"sources": sources, "names": names, "special": list(special)}, where)

    def prompt(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] = ()) -> list[int]:
        rendered, inside = self._rendered(messages, tools, prompt=True)
        ids, _, _ = self._ids(rendered["text"], inside)
        return list(map(int, ids))

    def conversation(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] = ()) -> Encoded:
        rendered, inside = self._rendered(messages, tools, prompt=False)
        ids, offsets, moved = self._ids(rendered["text"], inside)
        spans = [(moved(begin), moved(end)) for begin, end in rendered["learned"]]
        mask = np.zeros(len(ids), dtype=np.uint8)
        for begin, end in spans:
            mask |= (offsets[:, 0] < end) & (offsets[:, 1] > begin) & (offsets[:, 0] < offsets[:, 1])
        pieces = (rendered["text"][begin:end] for begin, end in rendered["learned"])
        size = sum(len(self._pattern.sub("", piece).replace(inside, "").encode("utf-8", "replace")) for piece in pieces)
        return Encoded(ids, mask, size, rendered["by"] == LAST)

    @cached_property
    def end_id(self) -> int | None:
        """The token that ends an answer: the first behind its words. None where the template writes none."""
        words = "\u7b54"
        try:
            rendered, _ = self._rendered(
                [{"role": "user", "content": "a"}, {"role": "assistant", "content": words}], (), prompt=False
            )
        except Unfit:
            return None
        end = self._pattern.search(rendered["text"], rendered["text"].rfind(words) + 1)
        return self._special[end[0]] if end and words in rendered["text"] else None

    def _rendered(self, messages: Sequence[Any], tools: Sequence[Any], prompt: bool) -> tuple[dict[str, Any], str]:
        """And the character that stands inside special tokens which are text; it occurs nowhere else."""
        texts = "\0".join(_texts([list(messages), list(tools)]))
        inside = next(chr(code) for code in _PRIVATE if chr(code) not in texts)
        if self._pattern.search(texts):
            messages, tools = self._as_text(list(messages), inside), self._as_text(list(tools), inside)
        name = WITH_TOOLS if tools and WITH_TOOLS in self._sources else DEFAULT
        if name not in self._sources:
            have = ", ".join(self._sources)
            raise Refusal(
                f"tokenizer {self._where}: no chat template is called {DEFAULT}; there are {have}", EX_DATAERR
            )
        request = {
            "template": name,
            "messages": messages,
            "tools": list(tools) or None,
            "prompt": prompt,
        }
        answer = self._process.render(request)
        if answer.get("unusable"):
            raise Refusal(f"tokenizer {self._where}: its chat template can't be used: {answer['problem']}", EX_DATAERR)
        if "problem" in answer:
            raise Unfit(f"the chat template of {self._where} can't write it: {answer['problem']}")
        return answer, inside

    def _as_text(self, value: Any, inside: str) -> Any:
        if isinstance(value, str):
            return self._pattern.sub(lambda match: match[0][0] + inside + match[0][1:], value)
        if isinstance(value, dict):
            return {self._as_text(key, inside): self._as_text(item, inside) for key, item in value.items()}
        if isinstance(value, list):
            return [self._as_text(item, inside) for item in value]
        return value

    def _ids(self, text: str, inside: str) -> tuple[Ids, Ids, Callable[[int], int]]:
        """Ids, which characters each stands for, and where a character of `text` is among those."""
        encode, doubles, to_special = self._encoder
        pieces: list[str] = []
        edges, shifts, place, shift = [0], [0], 0, 0
        escaped = json.dumps(inside)[1:-1]  # a template's own JSON may write it so
        unlike = re.compile(f"{self._pattern.pattern}|{inside}|{re.escape(escaped)}")
        for match in unlike.finditer(text):
            double = doubles.get(match[0], "")
            pieces += [text[place : match.start()], double]
            place = match.end()
            shift += len(double) - len(match[0])
            edges.append(place)
            shifts.append(shift)
        pieces.append(text[place:])
        ids, offsets = encode("".join(pieces))

        def moved(at: int) -> int:
            return at + shifts[int(np.searchsorted(edges, at, side="right")) - 1]

        return to_special[ids], offsets, moved

    @cached_property
    def _encoder(self) -> tuple[SpanEncoder, dict[str, str], Ids]:
        """The encoder, the secret names, and a table from its ids to those of the tokenizer."""
        secret = os.urandom(16).hex()
        doubles = {
            name: f"{chr(_PRIVATE[0])}{secret}-{place}{chr(_PRIVATE[1])}" for place, name in enumerate(self._special)
        }
        encode = self._library(doubles).span_encoder()
        ids = encode("".join(doubles.values()))[0]
        if len(ids) != len(doubles):
            raise Refusal(f"tokenizer {self._where}: its special tokens can't be told from text", EX_DATAERR)
        table = np.arange(1 + int(ids.max()), dtype=np.uint32)  # the library numbers what was added last as the last
        table[ids] = list(self._special.values())
        return encode, doubles, table


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [text for pair in value.items() for text in _texts(list(pair))]
    return [text for item in value for text in _texts(item)] if isinstance(value, list) else []
