"""What OpenAI's, vLLM's and lm_eval's clients may send to `stoker serve`, and what the answers hold."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("tokenizers")

import torch

from stoker.training.model import hf
from stoker.training.tokenizer import chat
from stoker.training.tokenizer.tokenizer import Tokenizer, load
from test_serve import CONTEXT, Server, folder, pieces  # noqa: F401

TEXT = "she sells sea shells"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:  # noqa: F811
    with Server(folder, "--name", "org/small", "--slots", "4") as started:
        yield started


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:  # noqa: F811
    return load(str(folder))


@pytest.fixture(scope="module")
def logprobs(folder: Path, tokenizer: Tokenizer) -> torch.Tensor:  # noqa: F811
    """Of every token behind each token of TEXT."""
    model = hf.opened(str(folder), CONTEXT, torch.float32, torch.device("cpu"), lambda _: None)
    with torch.no_grad():
        logits = model(torch.tensor([tokenizer.encode(TEXT)]))[0, :, : tokenizer.vocab_size]
    return torch.log_softmax(logits.float(), -1)


def choice(server: Server, path: str = COMPLETIONS, **body: Any) -> dict[str, Any]:
    status, answer = server.ask(path, body)
    assert status == 200, answer
    (only,) = answer["choices"]
    return dict(only)


# ---- prompts that are scored ----


def test_lm_evals_loglikelihood_request_gets_what_it_reads(
    server: Server, tokenizer: Tokenizer, logprobs: torch.Tensor
) -> None:
    """Its local-completions model: a batch of token ids, one new token, and a look whether the best token is the prompt's."""
    ids = tokenizer.encode(TEXT)
    greedy = [*ids[:3], int(logprobs[2].argmax())]
    body = {
        "model": "org/small",
        "prompt": [ids, greedy],
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1234,
    }
    status, answer = server.ask(COMPLETIONS, {**body, "echo": True})
    assert status == 200 and [one["index"] for one in answer["choices"]] == [0, 1]
    sums, are_greedy = [], []
    for one in answer["choices"]:
        values, top = (one["logprobs"][key][3:-1] for key in ("token_logprobs", "top_logprobs"))
        sums.append(sum(values))
        are_greedy.append(all(value == max(likely.values()) for value, likely in zip(values, top, strict=True)))
    want = logprobs[range(2, len(ids) - 1), ids[3:]]
    assert sums == pytest.approx([float(want.sum()), float(logprobs[2].max())], abs=1e-3)
    assert are_greedy == [bool((logprobs[2:-1].argmax(-1) == torch.tensor(ids[3:])).all()), True]


def test_max_tokens_0_scores_the_prompt_and_writes_nothing(
    server: Server, tokenizer: Tokenizer, logprobs: torch.Tensor
) -> None:
    ids = tokenizer.encode(TEXT)
    status, answer = server.ask(COMPLETIONS, {"prompt": ids, "max_tokens": 0, "echo": True, "logprobs": 3})
    (only,) = answer["choices"]
    assert status == 200 and only["text"] == TEXT and only["finish_reason"] == "length"
    assert answer["usage"] == {"prompt_tokens": len(ids), "completion_tokens": 0, "total_tokens": len(ids)}
    scores = only["logprobs"]
    assert scores["token_logprobs"][0] is None and scores["top_logprobs"][0] is None
    assert scores["token_logprobs"][1:] == pytest.approx(logprobs[range(len(ids) - 1), ids[1:]].tolist(), abs=1e-4)
    for place, top in enumerate(scores["top_logprobs"][1:]):
        values, _ = logprobs[place].topk(3)
        assert sorted(top.values(), reverse=True)[:3] == pytest.approx(values.tolist(), abs=1e-4)
        assert scores["tokens"][place + 1] in top
    for token, offset in zip(scores["tokens"], scores["text_offset"], strict=True):
        assert TEXT[offset:].startswith(token)
    plain = choice(server, prompt=ids, max_tokens=0)
    assert plain["text"] == "" and plain["logprobs"] is None
    assert server.ask(CHAT, {"messages": [{"role": "user", "content": "x"}], "max_tokens": 0})[0] == 400


def test_prompt_logprobs_have_vllms_form(server: Server, tokenizer: Tokenizer, logprobs: torch.Tensor) -> None:
    ids = tokenizer.encode(TEXT)
    only = choice(server, prompt=ids, max_tokens=1, prompt_logprobs=2)
    assert only["prompt_logprobs"][0] is None and len(only["prompt_logprobs"]) == len(ids) and only["logprobs"] is None
    for place, (token, ranked) in enumerate(zip(ids[1:], only["prompt_logprobs"][1:], strict=True)):
        own = ranked[str(token)]
        assert own["logprob"] == pytest.approx(float(logprobs[place, token]), abs=1e-4)
        assert own["rank"] == 1 + int((logprobs[place] > logprobs[place, token]).sum())
        assert own["decoded_token"] == tokenizer.decode_bytes([token]).decode("utf-8", "replace")
        likely = logprobs[place].topk(2).indices.tolist()
        assert set(ranked) == {str(token), *map(str, likely)} and ranked[str(likely[1])]["rank"] == 2
    messages = [{"role": "user", "content": "hi"}]
    status, answer = server.ask(CHAT, {"messages": messages, "max_tokens": 1, "prompt_logprobs": 0})
    assert status == 200 and len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]


def test_text_offsets_are_places_in_the_text_streamed_or_not(server: Server) -> None:
    body = {"prompt": "→ é she", "max_tokens": 12, "seed": 4, "logprobs": 0, "echo": True, "temperature": 0.3}
    whole = choice(server, **body)
    offsets = whole["logprobs"]["text_offset"]
    assert offsets == sorted(offsets) and offsets[0] == 0 and len(offsets) == len(whole["logprobs"]["tokens"])
    for token, offset in zip(whole["logprobs"]["tokens"], offsets, strict=True):
        assert "\ufffd" in token or "<|" in token or whole["text"][offset:].startswith(token)
    streamed = pieces(server.ask(COMPLETIONS, {**body, "stream": True})[1])
    assert [one for part in streamed for one in part["choices"][0]["logprobs"]["text_offset"]] == offsets


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_begins_with_the_prompt_as_it_was_sent(server: Server, tokenizer: Tokenizer, stream: bool) -> None:
    """Not with the token that the server puts in front of a text."""
    ids = [*tokenizer.start, *tokenizer.encode(TEXT)]
    assert tokenizer.start
    body = {"max_tokens": 6, "seed": 2, "logprobs": 0, "return_token_ids": True, "skip_special_tokens": False}
    plain = choice(server, prompt=TEXT, **body)
    for prompt, shown in ((TEXT, TEXT), (ids, tokenizer.decode(ids))):
        status, answer = server.ask(COMPLETIONS, {**body, "prompt": prompt, "echo": True, "stream": stream})
        parts = [one["choices"][0] for one in pieces(answer)] if stream else [answer["choices"][0]]
        assert status == 200 and parts[0]["prompt_token_ids"] == ids
        assert "".join(part["text"] for part in parts) == shown + plain["text"]
        offsets = [one for part in parts for one in part["logprobs"]["text_offset"]]
        want = [len(shown) + offset for offset in plain["logprobs"]["text_offset"]]
        assert offsets[0] == 0 and offsets[len(ids) :] == want


# ---- models and tokens ----


def test_a_model_is_retrieved_by_its_name(server: Server) -> None:
    (listed,) = server.ask("/v1/models")[1]["data"]
    assert listed["id"] == "org/small" and listed["created"] > 1.7e9
    for path in ("/v1/models/org/small", "/v1/models/org%2Fsmall"):
        assert server.ask(path) == (200, listed)
    status, answer = server.ask("/v1/models/other")
    assert status == 404 and answer["error"]["code"] == "model_not_found"


def test_texts_become_tokens_and_tokens_texts(server: Server, tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.start, *tokenizer.encode(TEXT)]
    status, answer = server.ask("/tokenize", {"model": "org/small", "prompt": TEXT, "return_token_strs": True})
    assert status == 200 and (answer["count"], answer["max_model_len"], answer["tokens"]) == (len(ids), CONTEXT, ids)
    assert "".join(answer["token_strs"]).endswith(TEXT)
    assert server.ask("/detokenize", {"tokens": tokenizer.encode(TEXT)}) == (200, {"prompt": TEXT})
    messages = [{"role": "user", "content": "hi"}]
    _, answer = server.ask("/tokenize", {"messages": messages})
    assert answer["tokens"] == chat.prompt(tokenizer, [("user", b"hi")]) and answer["token_strs"] is None
    _, answer = server.ask("/tokenize", {"messages": messages, "add_generation_prompt": False})
    assert answer["tokens"] == chat.prompt(tokenizer, [("user", b"hi")], opens_turn=False)


# ---- how tokens are sampled ----


def test_a_bias_and_penalties_change_which_tokens_are_written(server: Server) -> None:
    greedy = {"prompt": TEXT, "max_tokens": 24, "temperature": 0, "return_token_ids": True, "ignore_eos": True}
    plain = choice(server, **greedy)["token_ids"]
    assert set(choice(server, **greedy, logit_bias={"70": 100})["token_ids"]) == {70}
    banned = choice(server, **greedy, logit_bias={str(token): -100 for token in set(plain)})["token_ids"]
    assert not set(banned) & set(plain)
    repeated = [len(plain) - len(set(plain))]
    for penalty in ({"frequency_penalty": 2}, {"presence_penalty": 2}, {"repetition_penalty": 20.0}):
        ids = choice(server, **greedy, **penalty)["token_ids"]
        repeated.append(len(ids) - len(set(ids)))
    assert repeated[0] > max(repeated[1:])
    neutral = {"frequency_penalty": 0, "presence_penalty": 0.0, "repetition_penalty": 1, "logit_bias": {}, "min_p": 0}
    assert choice(server, **greedy, **neutral)["token_ids"] == plain


def test_min_p_1_leaves_the_most_likely_token_and_top_k_minus_1_leaves_all(server: Server) -> None:
    hot = {
        "prompt": TEXT,
        "max_tokens": 12,
        "temperature": 1.5,
        "seed": 3,
        "return_token_ids": True,
        "ignore_eos": True,
    }
    assert choice(server, **hot, min_p=1)["token_ids"] == choice(server, **{**hot, "temperature": 0})["token_ids"]
    assert choice(server, **hot, top_k=-1)["token_ids"] == choice(server, **hot)["token_ids"]


def test_the_end_of_a_text_can_be_ignored_and_special_tokens_shown(server: Server, tokenizer: Tokenizer) -> None:
    end = str(tokenizer.end_id)
    body = {"prompt": TEXT, "max_tokens": 5, "logit_bias": {end: 100}, "return_token_ids": True}
    ended = choice(server, **body)
    assert ended["token_ids"] == [tokenizer.end_id] and ended["finish_reason"] == "stop"
    ignored = choice(server, **body, ignore_eos=True)
    assert (
        ignored["token_ids"] == [tokenizer.end_id] * 5 and ignored["finish_reason"] == "length" and not ignored["text"]
    )
    shown = choice(server, **body, ignore_eos=True, skip_special_tokens=False)
    assert shown["text"] == tokenizer.decode_bytes([tokenizer.end_id]).decode() * 5


# ---- conversations ----


def test_a_developer_is_the_system_and_keys_without_meaning_are_accepted(server: Server) -> None:
    body = {"seed": 5, "max_tokens": 8}
    asked = [{"role": "user", "content": "hi"}]
    texts = [
        choice(server, CHAT, messages=[{"role": role, "content": "be brief"}, *asked], **body, **more)["message"]["content"]
        for role, more in (
            ("system", {}),
            ("developer", {"metadata": {"a": "b"}, "user": "me", "store": True, "chat_template_kwargs": {"enable_thinking": False}}),
        )
    ]  # fmt: skip
    assert texts[0] == texts[1]


def test_the_last_message_can_be_continued(server: Server, tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "the quick"}]
    body = {"messages": messages, "seed": 5, "max_tokens": 8, "return_token_ids": True}
    assert server.ask(CHAT, body)[0] == 400
    continued = choice(server, CHAT, **body, continue_final_message=True, add_generation_prompt=False)
    want = [*chat.prompt(tokenizer, [("user", b"hi")]), *tokenizer.encode("the quick")]
    assert continued["prompt_token_ids"] == want
    same = choice(server, prompt=want, seed=5, max_tokens=8, return_token_ids=True)
    assert same["token_ids"][0] == continued["token_ids"][0]
    for wrong in (
        {"messages": messages[:1]},
        {"add_generation_prompt": True},
        {"chat_template_kwargs": {"messages": []}},
    ):
        assert server.ask(CHAT, {**body, "continue_final_message": True, **wrong})[0] == 400


def test_an_answer_that_the_sdk_read_can_be_sent_back(server: Server) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0)
    messages: list[Any] = [{"role": "user", "content": "hi"}]
    first = client.chat.completions.create(model="org/small", messages=messages, max_tokens=5, seed=1)
    messages += [first.choices[0].message, {"role": "user", "content": "and"}]
    second = client.chat.completions.create(model="org/small", messages=messages, max_tokens=5, logprobs=True)
    assert all(math.isfinite(one.logprob) for one in second.choices[0].logprobs.content)
    messages[1] = first.choices[0].message.model_dump()
    assert client.chat.completions.create(model="org/small", messages=messages, max_tokens=5).choices
    assert client.models.retrieve("org/small").id == "org/small"
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="org/small", prompt="x", temperature=-1)
    assert caught.value.param == "temperature" and caught.value.type == "invalid_request_error"


def test_what_is_wrong_is_named(server: Server) -> None:
    hi = [{"role": "user", "content": "hi"}]
    for path, body, param, part in (
        (CHAT, {"messages": hi, "stream": True, "stream_options": {"include_usag": True}}, "stream_options", "'include_usag'"),
        (CHAT, {"messages": hi, "stream": True, "stream_options": {"include_usage": 1}}, "stream_options", "include_usage"),
        (CHAT, {"messages": hi, "stream_options": {"include_usage": True}}, "stream_options", "stream: true"),
        (CHAT, {"messages": hi, "top_p": 0}, "top_p", "above 0"),
        (CHAT, {"messages": hi * 300}, "messages", "maximum context length is 256 tokens"),  # litellm looks for these words
        (CHAT, {"messages": hi, "max_tokens": 999}, "max_tokens", "maximum context length is 256 tokens"),
    ):  # fmt: skip
        status, answer = server.ask(path, body)
        assert (status, answer["error"]["param"]) == (400, param) and part in answer["error"]["message"], answer
    options = {"include_usage": True, "include_obfuscation": False}
    status, answer = server.ask(CHAT, {"messages": hi, "max_tokens": 2, "stream": True, "stream_options": options})
    assert status == 200 and pieces(answer)[-1]["usage"]["completion_tokens"] <= 2


def test_a_message_as_litellm_sends_it_back_is_accepted(server: Server) -> None:
    said = {"role": "assistant", "content": "yes", "function_call": None, "provider_specific_fields": {"refusal": None}}
    ask = [{"role": "user", "content": "hi"}]
    assert choice(server, CHAT, messages=[*ask, said, *ask], max_tokens=2)


# ---- structured output ----

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "ages": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
        "kind": {"enum": ["fox", "dog"]},
    },
    "required": ["name", "ages", "kind"],
    "additionalProperties": False,
}
AS_SCHEMA = {"type": "json_schema", "json_schema": {"name": "animal", "schema": SCHEMA, "strict": True}}


@pytest.mark.parametrize("stream", [False, True])
def test_answers_match_their_json_schema_and_change_no_other_answer(server: Server, stream: bool) -> None:
    """A model that was never trained writes valid JSON, beside requests that are not constrained."""
    pytest.importorskip("llguidance")
    messages = [{"role": "user", "content": "an animal"}]
    body = {"messages": messages, "n": 6, "seed": 2, "max_tokens": 120, "stream": stream}
    plain = {"prompt": TEXT, "max_tokens": 60, "seed": 1, "return_token_ids": True, "ignore_eos": True}
    alone = choice(server, **plain)["token_ids"]
    with ThreadPoolExecutor(4) as pool:
        beside = [pool.submit(choice, server, **plain) for _ in range(3)]
        status, answer = server.ask(CHAT, {**body, "response_format": AS_SCHEMA})
        assert [one.result()["token_ids"] for one in beside] == [alone] * 3
    assert status == 200
    texts, reasons = [""] * 6, [""] * 6
    for part in pieces(answer) if stream else [answer]:
        for one in part["choices"]:
            texts[one["index"]] += (one["delta"] if stream else one["message"])["content"]
            reasons[one["index"]] = one["finish_reason"] or reasons[one["index"]]
    assert reasons == ["stop"] * 6 and len(set(texts)) == 6
    for text in texts:
        animal = json.loads(text)
        assert set(animal) == {"name", "ages", "kind"} and animal["kind"] in ("fox", "dog") and len(animal["name"]) <= 8
        assert len(animal["ages"]) <= 3 and all(type(age) is int and 0 <= age <= 99 for age in animal["ages"])


def test_a_json_object_ends_where_it_is_complete_and_is_cut_at_max_tokens(server: Server) -> None:
    pytest.importorskip("llguidance")
    body = {"prompt": TEXT, "temperature": 0}
    only = choice(server, **body, max_tokens=60, response_format={"type": "json_object"})
    assert only["finish_reason"] == "stop" and isinstance(json.loads(only["text"]), dict)
    cut = choice(server, **body, max_tokens=3, response_format=AS_SCHEMA)
    assert cut["finish_reason"] == "length" and cut["text"].startswith('{"')


def test_a_schema_that_cant_be_compiled_is_refused_in_one_line(server: Server) -> None:
    pytest.importorskip("llguidance")
    for form in (
        {"type": "json_schema"}, {"type": "json_schema", "json_schema": {"name": "a", "schema": 5}}, {"type": "yaml"}, "json",
        {"type": "json_schema", "json_schema": {"schema": {"type": "strange"}}},
        {"type": "json_schema", "json_schema": {"schema": {"$ref": "#/nowhere"}}},
        {"type": "json_schema", "json_schema": {"schema": {"type": "string", "pattern": "(" }}},
        {"type": "json_object", "schema": SCHEMA}, {"type": "json_schema", "json_schema": {"schema": SCHEMA}, "strict": True},
    ):  # fmt: skip
        status, answer = server.ask(COMPLETIONS, {"prompt": TEXT, "response_format": form})
        assert status == 400 and answer["error"]["param"] == "response_format", form
        assert "\n" not in answer["error"]["message"] and "Traceback" not in answer["error"]["message"]
    for schema, why in (
        ({"type": "string", "pattern": "^(?=a)a$"}, "error: look-around"),
        ({"not": {"type": "string"}}, '["not"]'),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "use anyOf"),
    ):
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        message = server.ask(COMPLETIONS, {"prompt": TEXT, "response_format": form})[1]["error"]["message"]
        assert message.startswith("response_format: the schema can't be compiled: ") and why in message, message
    assert choice(server, prompt=TEXT, response_format={"type": "text"}, max_tokens=2)
