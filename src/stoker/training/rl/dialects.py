"""What servers of answers are asked, and how their answers are read: `stoker serve`, sglang's and vLLM's own HTTP.

Prompts go as token ids and answers come as token ids with log-probabilities. New weights are a folder that the server loads:
whole ones, or an adapter; vLLM takes adapters alone, each version by a name of its own. The last two have no server of theirs
in the tests, but one that speaks as they do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from stoker.contract.frozen import frozen
from stoker.contract.units import plural
from stoker.training.rl.sampler import Written

KINDS = ("stoker", "sglang", "vllm")
Body = dict[str, Any]
_LARGEST_SEED = 1 << 63


@frozen
class Published:
    version: int
    folder: str  # empty: it was sent
    digest: str
    transfer: str = ""  # its name, where it was sent through a process group


@frozen
class Wanted:
    """Of every answer."""

    new_tokens: int
    temperature: float
    stop: frozenset[int]
    vocab: int
    length: int  # tokens of the longest prompt and its answer

    @property
    def settings(self) -> str:
        """What an answer depends on beside its prompt, seed and place."""
        return f"{self.new_tokens} {self.temperature:g} {self.vocab} {sorted(self.stop)}"


@frozen
class Question:
    prompt: tuple[int, ...]
    seed: int
    first: int  # place of the first answer
    count: int
    oldest: int = 0  # version of the weights that may write them


class Told(NamedTuple):
    """An answer, and the weights that wrote its last token. No digest: the server tells none."""

    written: Written
    version: int
    digest: str


class Dialect(Protocol):
    def push(self, published: Published) -> tuple[str, Body]:
        """The path and the body that make a server load it."""
        ...

    def is_there(self, status: int, line: str) -> bool:
        """Whether a refusal to load means that it is loaded already."""
        ...

    def question(self, asked: Question, wanted: Wanted, newest: Published | None) -> tuple[str, Body]: ...

    def lacks_weights(self, status: int, line: str) -> bool:
        """Whether a refusal to answer means that it has not loaded the weights that are asked for, or newer ones."""
        ...

    def read(self, told: Any, wanted: Wanted, newest: Published | None) -> list[Told]:
        """Raises KeyError, TypeError, ValueError or IndexError for what is no answer."""
        ...


class Stoker:
    """`policy`: what happens to answers that are being written when weights change."""

    def __init__(self, policy: str) -> None:
        self._policy = policy

    def push(self, published: Published) -> tuple[str, Body]:
        what = {"transfer": published.transfer} if published.transfer else {"folder": published.folder}
        return "/v1/weights", {**what, "version": published.version, "digest": published.digest}

    def is_there(self, status: int, line: str) -> bool:
        return False

    def question(self, asked: Question, wanted: Wanted, newest: Published | None) -> tuple[str, Body]:
        return "/v1/completions", {
            "prompt": list(asked.prompt), "n": asked.count, "seed": asked.seed, "first_index": asked.first,
            "max_tokens": wanted.new_tokens, "temperature": wanted.temperature, "stop_token_ids": sorted(wanted.stop),
            "logprobs": 0, "return_token_ids": True, "on_update": self._policy, "min_weight_version": asked.oldest,
        }  # fmt: skip

    def lacks_weights(self, status: int, line: str) -> bool:
        return status == 409

    def read(self, told: Any, wanted: Wanted, newest: Published | None) -> list[Told]:
        found = []
        for choice in sorted(told["choices"], key=lambda choice: int(choice["index"])):
            logprobs = choice["logprobs"]["token_logprobs"]
            written = checked(choice["token_ids"], logprobs, choice["versions"], wanted)
            found.append(Told(written, int(choice["weights"]["version"]), str(choice["weights"]["digest"])))
        return found


class Sglang:
    """Its own /generate. Weights change between answers: it waits for those that are being written."""

    def push(self, published: Published) -> tuple[str, Body]:
        return "/update_weights_from_disk", {"model_path": published.folder, "weight_version": str(published.version)}

    def is_there(self, status: int, line: str) -> bool:
        return False

    def question(self, asked: Question, wanted: Wanted, newest: Published | None) -> tuple[str, Body]:
        how = {
            "n": asked.count, "max_new_tokens": wanted.new_tokens, "temperature": wanted.temperature,
            "stop_token_ids": sorted(wanted.stop), "skip_special_tokens": False, "no_stop_trim": True,
        }  # fmt: skip
        return "/generate", {"input_ids": list(asked.prompt), "sampling_params": how, "return_logprob": True}

    def lacks_weights(self, status: int, line: str) -> bool:
        return False

    def read(self, told: Any, wanted: Wanted, newest: Published | None) -> list[Told]:
        found = []
        for answer in told if isinstance(told, list) else [told]:
            about = answer["meta_info"]
            if about["finish_reason"]["type"] not in ("stop", "length"):
                raise ValueError(f"an answer that ended by {str(about['finish_reason']['type'])!r:.40}")
            pairs = [(one[0], one[1]) for one in about["output_token_logprobs"]]
            text = str(about["weight_version"])  # "default": those it was started with
            version = int(text) if text.isascii() and text.isdigit() else -1
            ids = [token for _, token in pairs]
            written = checked(ids, [value for value, _ in pairs], [max(version, 0)] * len(ids), wanted)
            found.append(Told(written, version, ""))
        return found


class Vllm:
    """Adapters, each version under a name of its own: an answer is of the version it was asked of."""

    def push(self, published: Published) -> tuple[str, Body]:
        return "/v1/load_lora_adapter", {"lora_name": name_of(published), "lora_path": published.folder}

    def is_there(self, status: int, line: str) -> bool:
        return status == 400 and "already" in line

    def question(self, asked: Question, wanted: Wanted, newest: Published | None) -> tuple[str, Body]:
        assert newest is not None, "weights are published before anything is asked"
        return "/v1/completions", {
            "model": name_of(newest), "prompt": list(asked.prompt), "n": asked.count, "max_tokens": wanted.new_tokens,
            "seed": (asked.seed + asked.first) % _LARGEST_SEED, "temperature": wanted.temperature,
            "stop_token_ids": sorted(wanted.stop), "logprobs": 0, "return_token_ids": True,
        }  # fmt: skip

    def lacks_weights(self, status: int, line: str) -> bool:
        return status == 404

    def read(self, told: Any, wanted: Wanted, newest: Published | None) -> list[Told]:
        version = int(str(told["model"]).removeprefix(_PREFIX))
        found = []
        for choice in sorted(told["choices"], key=lambda choice: int(choice["index"])):
            ids = choice["token_ids"]
            written = checked(ids, choice["logprobs"]["token_logprobs"], [version] * len(ids), wanted)
            found.append(Told(written, version, ""))
        return found


_PREFIX = "stoker-"


def name_of(published: Published) -> str:
    return f"{_PREFIX}{published.version}"


def dialect_of(kind: str, policy: str) -> Dialect:
    others: Mapping[str, type[Sglang] | type[Vllm]] = {"sglang": Sglang, "vllm": Vllm}
    return others[kind]() if kind in others else Stoker(policy)


def checked(ids: Sequence[Any], logprobs: Sequence[Any], versions: Sequence[Any], wanted: Wanted) -> Written:
    if not 0 < len(ids) <= wanted.new_tokens or not len(ids) == len(versions) == len(logprobs):
        raise ValueError(f"{plural(len(ids), 'token')}, {len(versions)} versions and {len(logprobs)} log-probabilities")
    if any(type(one) is not int or not 0 <= one < wanted.vocab for one in ids):
        raise ValueError("ids that are not the tokenizer's")
    if any(type(one) is not int or one < 0 for one in versions):
        raise ValueError("versions that are not whole numbers of 0 or more")
    numbers = tuple(math.nan if one is None else float(one) for one in logprobs)
    return Written(tuple(ids), numbers, tuple(versions))
