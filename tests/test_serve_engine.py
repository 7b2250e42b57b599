"""The paged engine: answers are those of one request alone, whatever comes and goes beside it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

pytest.importorskip("torch")

from pathlib import Path

import pytest
import torch

from conftest import at_length, at_length_but
from stoker.contract.errors import Refusal
from stoker.contract.frozen import replace
from stoker.training.generate.config import Sampling
from stoker.training.generate.sample import sample_token, uniforms
from stoker.training.model.config import ModelConfig
from stoker.training.model.decoder import Decoder
from stoker.training.serve import paged
from stoker.training.serve.engine import PagedEngine, Sizes, answers
from stoker.training.serve.request import (
    ABORTED,
    CONTINUE,
    FINISH,
    LENGTH,
    STOP,
    Answer,
    Event,
    LogitAdjustments,
    Request,
    answer_of,
)
from stoker.training.serve.text import Text

SMALL = ModelConfig(layers=2, dim=32, heads=4, kv_heads=2, head_dim=8, ff=48, vocab_size=96, init_std=0.3)
# Options of the block that change what a token sees or where it lies; which families have them is families/'s matter.
BLOCKS = {
    "plain": SMALL,
    "norms of queries and keys": replace(SMALL, qk_norm=True, kv_heads=1, head_dim=16, tied=False),
    "windows, caps and norms behind": replace(
        SMALL, windows=(7, 0), attention_cap=2.0, final_cap=3.0, norms="both", norm_offset=1.0,
        embedding_scale=5.0, attention_scale=0.3, window_theta=50.0,
    ),
    "a window in all layers": replace(SMALL, windows=(5, 5)),
    "learned positions": replace(
        SMALL, positions="learned", position_rows=64, norm_kind="layer", qkv_bias=True, out_bias=True, mlp_bias=True,
        gated=False, activation="gelu_tanh", kv_heads=4, unrotated=(0, 1),
    ),
    "experts": replace(SMALL, experts=4, experts_per_token=2, expert_ff=16, qk_norm=True),
    "one norm for all heads": replace(SMALL, qk_norm=True, qk_norm_whole=True, norms="post"),
}  # fmt: skip
STOPS = frozenset({5, 6})


def made(c: ModelConfig, seed: int = 3) -> Decoder:
    model = Decoder(c, 64)
    model.start(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.copy_(torch.linspace(0.5, 1.5, len(parameter)))
    return model.eval()


def prompts_of(draw: random.Random, count: int) -> list[tuple[int, ...]]:
    """Some are equal, some begin alike, some are a single token."""
    beginnings = [[draw.randrange(96) for _ in range(length)] for length in (9, 17, 16)]
    found: list[tuple[int, ...]] = []
    for _ in range(count):
        own = [draw.randrange(96) for _ in range(draw.randint(1, 14))]
        kind = draw.random()
        if found and kind < 0.3:
            found.append(draw.choice(found))
        else:
            found.append(tuple((draw.choice(beginnings) if kind < 0.7 else []) + own))
    return found


def requests_of(draw: random.Random, count: int, hows: Sequence[Sampling]) -> list[Request]:
    return [
        Request(str(number), prompt, draw.randint(1, 25), draw.choice(hows), seed=draw.randrange(5), stop=STOPS)
        for number, prompt in enumerate(prompts_of(draw, count))
    ]


def served(
    engine: PagedEngine, requests: Sequence[Request], draw: random.Random, between: Callable[[], None] = lambda: None
) -> tuple[dict[str, Answer], set[str]]:
    """They arrive at random, and some are given up."""
    events: dict[str, list[Event]] = {}
    to_come, given_up = list(requests), set[str]()
    while to_come or engine.busy:
        for _ in range(draw.choice((0, 0, 1, 1, 2, 9))):
            if to_come:
                request = to_come.pop(0)
                events[request.id] = []
                engine.add(request)
        if draw.random() < 0.05:
            name = draw.choice(list(events) or ["nobody"])
            if engine.abort(name):
                given_up.add(name)
        between()
        for event in engine.step():
            assert not events[event.id] or not events[event.id][-1].finish, "an answer goes on behind its end"
            events[event.id].append(event)
        tables = [writing.table for writing in engine.schedule.running if writing.table is not None]
        assert not list(engine.pool.problems(tables))
    assert engine.pool.held == 0
    return {name: answer_of(listed) for name, listed in events.items()}, given_up


def alone(model: Decoder, requests: Sequence[Request]) -> dict[str, tuple[int, ...]]:
    """By the model itself, without a cache, one at a time."""
    found = dict[tuple[Any, ...], tuple[int, ...]]()
    for request in requests:
        key = (request.prompt, request.new_tokens, request.sampling, request.seed)
        if key not in found:
            found[key] = tuple(without_a_cache(model, request))
    return {one.id: found[one.prompt, one.new_tokens, one.sampling, one.seed] for one in requests}


@torch.no_grad()
def without_a_cache(model: Decoder, request: Request, vocab: int = 96) -> list[int]:
    ids = list(request.prompt)
    for uniform in uniforms(request.seed, [request.index], request.new_tokens):
        logits = model(torch.tensor([ids], device=model.device))[:, -1, :vocab]
        ids.append(int(sample_token(logits, torch.from_numpy(uniform).to(model.device), request.sampling)))
        if ids[-1] in request.stop:
            break
    return ids[len(request.prompt) :]


ADJUSTMENTS = (
    None,
    None,
    LogitAdjustments(bias=((7, 100.0),)),
    LogitAdjustments(bias=tuple((token, -100.0) for token in range(0, 96, 2))),
    LogitAdjustments(frequency_penalty=1.5, presence_penalty=0.7),
    LogitAdjustments(repetition_penalty=1.8, min_p=0.1),
    LogitAdjustments(((11, 3.0),), 1.3, -0.5, 0.4, 0.02),
)


@torch.no_grad()
def adjusted_without_a_cache(model: Decoder, request: Request) -> list[int]:
    adjustments, prompt, ids = request.adjustments or LogitAdjustments(), request.prompt, list(request.prompt)
    for uniform in uniforms(request.seed, [request.index], request.new_tokens):
        logits = model(torch.tensor([ids]))[0, -1]
        for token, value in adjustments.bias:
            logits[token] += value
        for token in set(ids):
            times = ids[len(prompt) :].count(token)
            factor = adjustments.repetition_penalty
            logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
            logits[token] -= times * adjustments.frequency_penalty + bool(times) * adjustments.presence_penalty
        chances = torch.softmax(logits / (request.sampling.temperature or 1.0), -1)
        logits[chances < adjustments.min_p * chances.max()] = float("-inf")
        ids.append(int(sample_token(logits[None], torch.from_numpy(uniform), request.sampling)))
        if ids[-1] in request.stop:
            break
    return ids[len(prompt) :]


@pytest.mark.parametrize("turn", [1, 4])
def test_adjusted_logits_are_those_of_one_at_a_time_and_change_no_other_request(turn: int) -> None:
    """Requests with and without adjustments share slots, give way and are computed again."""
    model, draw = made(SMALL), random.Random(11)
    hows = (Sampling(0.0), Sampling(1.0), Sampling(0.7, top_k=9), Sampling(1.3, top_p=0.8))
    requests = [
        replace(request, adjustments=ADJUSTMENTS[number % len(ADJUSTMENTS)])
        for number, request in enumerate(requests_of(draw, 70, hows))
    ]
    engine = PagedEngine(model, Sizes(slots=6, length=64, memory=80, block=4, prompt_tokens=24, turn=turn))
    found, _ = served(engine, requests, draw)
    assert engine.schedule.preemptions > 5
    differ = 0
    for request in requests:
        answer, want = found[request.id], tuple(adjusted_without_a_cache(model, request))
        assert answer.tokens == want[: len(answer.tokens)], request
        assert answer.finish == ABORTED or answer.tokens == want
        differ += request.adjustments is not None and want != tuple(without_a_cache(model, request))
    assert differ > 20
    assert any(7 in found[request.id].tokens for request in requests if request.adjustments == ADJUSTMENTS[2])


def test_log_probabilities_are_those_before_adjustments() -> None:
    model = made(SMALL)
    request = Request("a", (3, 17, 40), 3, Sampling(0.0), adjustments=ADJUSTMENTS[2], logprobs=1)
    (answer,) = answers(PagedEngine(model, Sizes(slots=1, length=64, memory=64)), [request])
    assert answer.tokens == (7, 7, 7)
    with torch.no_grad():
        every = torch.log_softmax(model(torch.tensor([request.prompt + answer.tokens]))[0, 2:-1], -1)
    torch.testing.assert_close(torch.tensor(answer.logprobs), every[:, 7], rtol=1e-4, atol=1e-4)


MANY = [("windows, caps and norms behind", 70), *((block, 200) for block in BLOCKS)]


@pytest.mark.parametrize("case", at_length_but(MANY[:1], MANY), ids=str)
@pytest.mark.parametrize("turn", at_length_but([4], [1, 4]))
def test_answers_are_those_of_one_at_a_time_whatever_comes_and_goes(case: tuple[str, int], turn: int) -> None:
    """With memory for little more than one answer of full length: sequences give way and are computed again."""
    block, count = case
    model, draw = made(BLOCKS[block]), random.Random(7)
    hows = (Sampling(0.0), Sampling(0.0), Sampling(1.0), Sampling(0.7, top_k=9), Sampling(1.3, top_p=0.8))
    requests = requests_of(draw, count, hows)
    engine = PagedEngine(model, Sizes(slots=6, length=64, memory=80, block=4, prompt_tokens=24, turn=turn))
    found, given_up = served(engine, requests, draw)
    want = alone(model, requests)
    assert len(found) == count and 3 < len(given_up) < count / 2
    assert engine.schedule.preemptions > 5 and engine.schedule.shared_tokens > 200
    for request in requests:
        answer = found[request.id]
        if answer.finish == ABORTED:
            assert request.id in given_up and want[request.id][: len(answer.tokens)] == answer.tokens
        else:
            assert answer.tokens == want[request.id], request
            assert answer.finish == (STOP if answer.tokens[-1] in STOPS else LENGTH)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize(("turn", "turns"), [(1, 1), (4, 3)])
def test_answers_of_every_kind_of_block_are_those_of_one_at_a_time(block: str, turn: int, turns: int) -> None:
    model, draw = made(BLOCKS[block]), random.Random(2)
    requests = requests_of(draw, 14, (Sampling(0.0), Sampling(1.0)))
    sizes = Sizes(slots=4, length=64, memory=72, block=4, prompt_tokens=10, turn=turn, turns=turns)
    engine = PagedEngine(model, sizes)
    want = alone(model, requests)
    assert {answer.id: answer.tokens for answer in answers(engine, requests)} == want
    assert len({len(tokens) for tokens in want.values()}) > 3


@pytest.mark.parametrize("stops_at", [0, 9, 50])
def test_several_turns_at_once_end_soon_behind_the_last_answer(stops_at: int) -> None:
    """The host looks at a turn while the next one is computed: none begins behind that."""
    model, prompts = made(SMALL), [(3, 17, 40, 40, 8), (3, 17, 41)]
    alone = [answers(PagedEngine(model, Sizes(2, 64, 128)), [Request("a", one, 40)])[0].tokens for one in prompts]
    engine = PagedEngine(model, Sizes(slots=2, length=64, memory=128, turn=4, turns=10))
    one, steps = engine._paged._one, []

    def counted(*given: Any) -> None:
        steps.append(given)
        one(*given)

    engine._paged._one = counted  # type: ignore[method-assign]
    requests = [
        Request(str(number), prompt, 40, stop=frozenset(tokens[stops_at : stops_at + 1]))
        for number, (prompt, tokens) in enumerate(zip(prompts, alone, strict=True))
    ]
    found = answers(engine, requests)
    ends = [next((n + 1 for n, token in enumerate(tokens) if token in one.stop), 40) for one, tokens in zip(requests, alone, strict=True)]  # fmt: skip
    assert [answer.tokens for answer in found] == [tokens[:end] for tokens, end in zip(alone, ends, strict=True)]
    assert max(ends) - 1 <= len(steps) <= max(ends) + 3 + 4


@pytest.mark.parametrize("turn", [1, 4])
def test_log_probabilities_are_the_models_and_those_who_want_none_get_none(turn: int) -> None:
    model = made(SMALL)
    prompt = (3, 17, 40, 40, 8)
    hows = {"none": -1, "own": 0, "more": 4}
    engine = PagedEngine(model, Sizes(slots=3, length=64, memory=128, turn=turn))
    events: dict[str, list[Event]] = {name: [] for name in hows}
    for index, (name, logprobs) in enumerate(hows.items()):
        engine.add(Request(name, prompt, 8, Sampling(0.6), seed=1, index=index, logprobs=logprobs))
    while engine.busy:
        for event in engine.step():
            events[event.id].append(event)
    assert all(event.logprob is None and not event.alternatives for event in events["none"])
    for name in ("own", "more"):
        answer = answer_of(events[name])
        with torch.no_grad():
            ids = torch.tensor([prompt + answer.tokens])
            every = torch.log_softmax(model(ids)[0, len(prompt) - 1 : -1] / 0.6, -1)
        own = every[range(len(answer.tokens)), answer.tokens]
        torch.testing.assert_close(torch.tensor(answer.logprobs), own, rtol=1e-4, atol=1e-4)
        for event, row in zip(events[name], every, strict=True):
            values, ids = row.topk(hows[name])
            assert [token for token, _ in event.alternatives] == ids.tolist()
            torch.testing.assert_close(torch.tensor([v for _, v in event.alternatives]), values, rtol=1e-4, atol=1e-4)
    assert len({answer_of(listed).tokens for listed in events.values()}) == 3, "another index samples otherwise"


def test_a_prompts_own_log_probabilities_are_the_models_however_it_is_cut_and_shared() -> None:
    """Prompts that begin alike, in pieces of few tokens, with memory for little more than one."""
    model, draw = made(BLOCKS["windows, caps and norms behind"]), random.Random(4)
    requests = [replace(one, prompt_logprobs=3) for one in requests_of(draw, 12, (Sampling(0.0), Sampling(0.7)))]
    plain = [replace(one, id=f"plain {one.id}", prompt_logprobs=-1) for one in requests]
    engine = PagedEngine(model, Sizes(slots=4, length=64, memory=72, block=4, prompt_tokens=10))
    first: dict[str, Event] = {}
    tokens: dict[str, list[int | None]] = {}
    for pair in zip(plain, requests, strict=True):
        for request in pair:
            engine.add(request)
    while engine.busy:
        for event in engine.step():
            first.setdefault(event.id, event)
            tokens.setdefault(event.id, []).append(event.token)
            assert event is first[event.id] or not event.prompt
    assert engine.schedule.preemptions > 0
    for request in requests:
        with torch.no_grad():
            logits = model(torch.tensor([request.prompt]))[0, :-1] / (request.sampling.temperature or 1.0)
        want = torch.log_softmax(logits, -1)[range(len(request.prompt) - 1), request.prompt[1:]]
        scores = first[request.id].prompt
        torch.testing.assert_close(torch.tensor([score.logprob for score in scores]), want, rtol=1e-4, atol=1e-4)
        for score, token in zip(scores, request.prompt[1:], strict=True):
            values = [value for _, value in score.alternatives]
            assert len(values) == 3 and values == sorted(values, reverse=True)
            assert (score.rank == 1) == (score.logprob == values[0])
            assert (score.rank <= 3) == ((token, score.logprob) in score.alternatives)
        assert tokens[request.id] == tokens[f"plain {request.id}"] and not first[f"plain {request.id}"].prompt


@pytest.mark.parametrize("turn", [1, 4])
def test_an_answer_ends_where_a_stop_text_appears_whatever_tokens_it_is_made_of(turn: int) -> None:
    model = made(SMALL)

    def decode(token: int) -> bytes:
        return b"<%d>" % token

    engine = PagedEngine(
        model,
        Sizes(slots=2, length=64, memory=128, turn=turn),
        text_of=lambda asked: Text(decode, asked.stop_texts, hidden={5}),
    )
    (whole,) = answers(engine, [Request("whole", (8, 9), 30, Sampling(0.0))])
    assert whole.text == "".join(f"<{token}>" for token in whole.tokens if token != 5) and whole.finish == LENGTH
    texts = [f"<{token}>" for token in whole.tokens]
    middle = next(n for n in range(6, 20) if texts[n][1:] + texts[n + 1][:2] not in "".join(texts[:n]) + texts[n][:-1])
    stop = texts[middle][1:] + texts[middle + 1][:2]  # from within one token into the next
    (cut,) = answers(engine, [Request("cut", (8, 9), 30, Sampling(0.0), stop_texts=("never", stop))])
    assert cut.tokens == whole.tokens[: middle + 2] and cut.finish == STOP
    assert cut.text == "".join(texts[:middle]) + "<"
    last = whole.tokens[4]
    (ended,) = answers(engine, [Request("ended", (8, 9), 30, Sampling(0.0), stop=frozenset({last}))])
    assert ended.tokens == whole.tokens[: whole.tokens.index(last) + 1] and ended.finish == STOP
    assert ended.text == "".join(texts[: whole.tokens.index(last)]), "an id that ends an answer has no text"


@torch.no_grad()
def without_cache(models: Sequence[Decoder], prompt: Sequence[int], versions: Sequence[int]) -> tuple[int, ...]:
    """Greedy; each token by the model of its version, which computes everything before it, too."""
    ids = list(prompt)
    for version in versions:
        ids.append(int(models[version](torch.tensor([ids]))[0, -1].argmax()))
    return tuple(ids[len(prompt) :])


@pytest.mark.parametrize("turn", [1, 4])
def test_new_weights_wait_for_who_finishes_on_the_old_and_others_continue_with_them(turn: int) -> None:
    models = [made(SMALL, seed) for seed in (3, 4, 5, 6)]
    model, draw = made(SMALL, 3), random.Random(5)
    requests = [
        replace(request, on_update=draw.choice((FINISH, CONTINUE, CONTINUE, CONTINUE)))
        for request in requests_of(draw, 50, (Sampling(0.0),))
    ]
    engine = PagedEngine(model, Sizes(slots=5, length=64, memory=96, block=4, turn=turn))
    steps = changed = 0

    def between() -> None:
        nonlocal steps, changed
        steps += 1
        if steps % (20 if turn == 1 else 10) == 0 and changed < 3:
            changed += 1
            engine.update(lambda source=models[changed]: model.load_state_dict(source.state_dict()))

    found, _ = served(engine, requests, draw, between)
    assert engine.version == 3
    mixed = 0
    for request in requests:
        answer = found[request.id]
        assert list(answer.versions) == sorted(answer.versions)
        if request.on_update == FINISH:
            assert len(set(answer.versions)) <= 1
        mixed += len(set(answer.versions)) > 1
        assert answer.tokens == without_cache(models, request.prompt, answer.versions)
    assert mixed >= 3 and len({answer.versions[0] for answer in found.values() if answer.versions}) == 4


def test_a_group_is_computed_once_and_a_prompt_that_went_before_is_still_there() -> None:
    model = made(SMALL)
    engine = PagedEngine(model, Sizes(slots=8, length=64, memory=512, block=4))
    group = [Request(f"g{n}", tuple(range(10, 31)), 5, Sampling(1.0), index=n) for n in range(8)]
    found = answers(engine, group)
    assert engine.schedule.prompt_tokens == 21 + 7, "the last token again for each of the others"
    assert len({answer.tokens for answer in found}) > 4
    again = answers(engine, [replace(group[0], id="again", prompt=(*range(10, 31), *found[0].tokens, 50))])
    assert engine.schedule.prompt_tokens < 21 + 7 + 6, "the next turn of a conversation begins where the last ended"
    assert again[0].tokens == answers(PagedEngine(model, Sizes(8, 64, 512)), [replace(group[0], prompt=(*range(10, 31), *found[0].tokens, 50))])[0].tokens  # fmt: skip


def test_numbers_that_are_none_stay_with_the_request_they_belong_to() -> None:
    """A token whose embedding is NaN: blocks that had its keys are used again, and nobody else's answer changes."""
    model = made(SMALL)
    plain = [Request(str(n), (20 + n, 30), 12, Sampling(0.0)) for n in range(6)]
    with torch.no_grad():
        model.embed.weight[90] = float("nan")
    engine = PagedEngine(model, Sizes(slots=4, length=64, memory=64, block=4), vocab=90)
    answers(engine, [Request("bad", (90, 90, 90, 7, 7), 4, Sampling(0.0))])
    mixed = [Request("worse", (90, 4), 9, Sampling(0.0)), *plain]
    found = {answer.id: answer.tokens for answer in answers(engine, mixed)}
    for request in plain:
        assert found[request.id] == tuple(without_a_cache(model, request, 90))


def test_what_a_step_computes_before_it_is_captured_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's way, where a step of another width or kind runs once and is captured then; here without the graph."""
    captures = list[object]()

    def captured(step: Callable[[], None], pool: object) -> Callable[[], None]:
        step()
        captures.append(pool)
        return step

    monkeypatch.setattr(paged, "captured", captured)
    model, draw = made(SMALL), random.Random(8)
    requests = requests_of(draw, 30, (Sampling(0.0), Sampling(1.0), Sampling(1.0, top_k=5)))
    engine = PagedEngine(model, Sizes(slots=6, length=64, memory=256, block=4, turn=3))
    engine._paged._graphs = object()
    found, given_up = served(engine, requests, draw)
    want = alone(model, requests)
    assert len(captures) > 4
    assert all(answer.tokens == want[name] for name, answer in found.items() if name not in given_up)


def test_what_cannot_be_answered_is_refused_and_changes_nothing() -> None:
    model = made(SMALL)
    engine = PagedEngine(model, Sizes(slots=2, length=20, memory=40))
    good = Request("good", (1, 2), 5)
    engine.add(good)
    for request, words in (
        (good, "already"), (Request("a", (), 5), "at least 1"), (Request("a", (1,), 0), "at least 1"),
        (Request("a", (1,) * 16, 5), "more than the limit of 20"), (Request("a", (1, 96), 5), "id 96"),
        (Request("a", (-1, 3), 5), "id -1"), (Request("a", (1,), 5, stop_texts=("x",)), "tokenizer"),
        (Request("a", (1,), 5, logprobs=21), "at most 20"),
    ):  # fmt: skip
        with pytest.raises(Refusal, match=words):
            engine.add(request)
    for sizes in (Sizes(0, 20, 40), Sizes(1, 1, 40), Sizes(1, 20, 19), Sizes(1, 65, 100)):
        with pytest.raises(Refusal):
            PagedEngine(model, sizes)
    assert not engine.abort("a")
    while engine.busy:
        engine.step()
    assert engine.pool.held == 0 and not engine.abort("good")


@at_length
def test_a_wide_model_reads_fewer_tokens_at_once(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from stoker.training.model.config import ModelConfig
    from stoker.training.model.decoder import Decoder
    from stoker.training.serve.engine import PagedEngine, Sizes
    from stoker.training.serve.request import Request

    c = ModelConfig(layers=1, dim=8, heads=2, kv_heads=2, head_dim=8, ff=1 << 18, vocab_size=300)
    made = PagedEngine(Decoder(c, 4096), Sizes(1, 4096, 8192, prompt_tokens=8192))
    made.add(Request("a", tuple([7] * 2500), 1))
    made.step()
    assert made.schedule.prompt_tokens == 1024


@at_length
def test_capped_scores_of_many_heads_are_stored_for_few_tokens_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """2 MB of weights took 5 GB for a prompt of 300 tokens."""
    torch = pytest.importorskip("torch")
    from stoker.training.model.config import ModelConfig
    from stoker.training.model.decoder import Decoder
    from stoker.training.serve import engine
    from stoker.training.serve.batch import BatchEngine
    from stoker.training.serve.request import Request

    torch.manual_seed(1)
    sizes: dict[str, Any] = {"layers": 2, "dim": 16, "heads": 64, "kv_heads": 64, "head_dim": 8, "ff": 16}
    model = Decoder(ModelConfig(**sizes, vocab_size=300, attention_cap=50.0), 4096)
    made = engine.PagedEngine(model, engine.Sizes(1, 4096, 8192, prompt_tokens=8192))
    made.add(Request("a", tuple([7] * 2500), 1))
    made.step()
    assert made.schedule.prompt_tokens == 1024

    def answers() -> list[list[int]]:
        written = BatchEngine(model, rows=2, length=128)
        return written.generate([[7, 9, 11] * 20, [5] * 30], new_tokens=8, stop={1}, temperature=0.0)

    whole = answers()
    monkeypatch.setattr(engine, "_NUMBERS_AT_ONCE", 64 * 128 * 7)
    assert answers() == whole, "a prompt that is read in pieces is answered alike"


WORDS = tuple(7 * place % 61 for place in range(64))


GREEDY = Sampling(0.0, 0, 1.0)


def engine_of_a_gpu() -> PagedEngine:
    """It writes several tokens before the host looks at them, as `stoker serve` does on GPUs."""
    model = Decoder(ModelConfig(layers=2, dim=32, heads=2, kv_heads=1, head_dim=16, ff=64, vocab_size=64), 64)
    model.start(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(6 if parameter.dim() == 2 else 1)  # each token counts
    return PagedEngine(model.eval(), Sizes(slots=8, length=64, memory=512, turn=8))


def test_a_prompt_that_others_continue_does_not_end_the_server() -> None:
    """Where several tokens are written at once, as on every GPU: a prompt of whole blocks and a longer one that begins with
    it, both asked for again in one body, ended the engine, and with it the server.
    """
    engine = engine_of_a_gpu()

    def asked(again: str) -> list[tuple[int, ...]]:
        requests = [Request(f"{again}{count}", WORDS[:count], 12, sampling=GREEDY) for count in (16, 20)]
        return [tuple(one.tokens) for one in answers(engine, requests)]

    assert asked("first") == asked("second")


@pytest.mark.parametrize("count", [16, 32, 48])
def test_answers_of_one_token_leave_what_others_read_as_it_is(count: int) -> None:
    """A row whose answer had ended wrote on, over the last token of its prompt, until the others' turn was over: who began with
    the same block was answered by what stood there then.
    """
    engine, asked = engine_of_a_gpu(), WORDS[: count + 5]

    def logprobs(name: str) -> Sequence[float]:
        return answers(engine, [Request(name, asked, 3, sampling=GREEDY, logprobs=0)])[0].logprobs

    before = logprobs("before")
    engine.add(Request("long", (9, 8, 7), 40, sampling=GREEDY))
    engine.step()
    for seed in range(3):
        engine.add(Request(f"one {seed}", WORDS[:count], 1, sampling=Sampling(1000.0, 0, 1.0), seed=seed))
        engine.step()
    while engine.busy:
        engine.step()
    assert logprobs("after") == pytest.approx(before, abs=1e-4)
