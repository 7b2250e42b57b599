"""A process that runs a user's grpo.rollout: all rollouts of a rank in one event loop. No torch.

python -m stoker.training.rl.rollout_worker: JSON lines on stdin and stdout. The rank sends rollouts to start and completions;
this process sends prompts to sample, finished rollouts, and `idle` once every live rollout waits for a completion, so that the
rank can sample them in one batch.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import json
import math
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from stoker.contract.errors import Refusal
from stoker.rollout import Completion, ContextFull, Conversation, Message, Rollout, Turn
from stoker.training.rl.last_position import PositionWriter, first_line_of
from stoker.training.rl.reward_worker import TimeIsUp, described_error, end_with_the_rank, load_module
from stoker.training.tokenizer import chat, roles
from stoker.training.tokenizer.tokenizer import Tokenizer
from stoker.training.tokenizer.tokenizer import load as load_tokenizer

IDLE_TURNS = 5  # of the event loop without a new request, before all rollouts count as waiting
GRACE_S = 1.0  # without a new request: what is there is sampled, though some rollouts wait for something else
TICK_S = 0.25
ALIVE_S = 2.0  # between two words to the rank
CANCEL_S = 2.0  # after which a rollout that ignores its cancellation is no longer waited for
CURRENT: contextvars.ContextVar[int | None] = contextvars.ContextVar("rollout", default=None)


class BadRollout(Exception):
    """A line about what a user's function returned or asked for."""


class Live:
    """A rollout that is not finished."""

    def __init__(self, task: asyncio.Task[None]) -> None:
        self.task = task
        self.calls = 0
        self.waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}  # completions that are awaited, by call
        self.own_s = 0.0  # that its own code took
        self.timed_out_at = 0.0


class WorkerClient:
    """A stoker.rollout.Client. `seed`: of this rollout."""

    def __init__(self, worker: Worker, number: int) -> None:
        self._worker, self._number = worker, number
        self.context_length: int = worker.settings["context_length"]

    async def sample(
        self,
        prompt: str | Sequence[int] | Sequence[Message],
        *,
        seed: int | None = None,
        max_tokens: int | None = None,
        stop: str | Sequence[str] = (),
    ) -> Completion:
        ids = self._prompt_ids(prompt)
        wanted = self._worker.settings["new_tokens"] if max_tokens is None else max_tokens
        if isinstance(wanted, bool) or not isinstance(wanted, int) or wanted < 1:
            raise BadRollout(f"max_tokens {wanted!r} is not a whole number from 1 up")
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
            raise BadRollout(f"seed {seed!r} is not a whole number")
        stops = [stop] if isinstance(stop, str) else list(stop)
        if any(not isinstance(text, str) or not text for text in stops):
            raise BadRollout("stop is not a text or a list of texts")
        left = self.context_length - len(ids)
        if left < 1:
            raise ContextFull(f"the prompt has {len(ids)} tokens, and data.context_length is {self.context_length}")
        made = await self._worker.request(self._number, ids, seed, min(wanted, left), stops)
        return Completion(
            tuple(ids),
            tuple(made["ids"]),
            tuple(made["logprobs"]),
            made["text"],
            made["finish"],
            tuple(made["versions"]),
        )

    def _prompt_ids(self, prompt: str | Sequence[int] | Sequence[Message]) -> list[int]:
        if isinstance(prompt, str) or (prompt and isinstance(prompt[0], Mapping)):
            return self.render(prompt)  # type: ignore[arg-type]
        ids, vocab = list(prompt), self._worker.tokenizer.vocab_size
        if not ids or any(isinstance(one, bool) or not isinstance(one, int) or not 0 <= one < vocab for one in ids):
            raise BadRollout("the prompt of sample is empty, or not a list of the tokenizer's ids")
        return ids  # type: ignore[return-value]

    def render(self, messages: str | Sequence[Message], tools: Sequence[Any] = ()) -> list[int]:
        found, system = _pairs(messages), self._worker.settings["system"]
        if system and not any(role == "system" for role, _ in found):
            found.insert(0, ("system", system.encode("utf-8", "surrogatepass")))
        conversation = roles.Conversation(found)
        conversation.tools = tools
        return chat.prompt(self._worker.tokenizer, conversation)

    def follow(self, token_ids: Sequence[int], messages: str | Sequence[Message]) -> list[int]:
        tokenizer = self._worker.tokenizer
        # A short conversation shows what the template writes behind an assistant's turn, whatever was said before.
        head = chat.answered(tokenizer, [("user", b"x")], "y")
        whole = chat.prompt(tokenizer, [("user", b"x"), ("assistant", b"y"), *_pairs(messages)])
        if whole[: len(head)] != head:
            raise BadRollout("the chat template writes an assistant's turn differently once messages follow it")
        is_ended = bool(token_ids) and token_ids[-1] in tokenizer.stop_ids
        return whole[len(head) - (not is_ended) :]

    def encode(self, text: str) -> list[int]:
        return self._worker.tokenizer.encode(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._worker.tokenizer.decode(token_ids)

    def conversation(self, messages: str | Sequence[Message], tools: Sequence[Any] = ()) -> Conversation:
        return Conversation(self, messages, tools)


def _pairs(messages: str | Sequence[Message]) -> list[tuple[str, bytes]]:
    if isinstance(messages, str):
        return [("user", messages.encode("utf-8", "surrogatepass"))]
    found: list[tuple[str, bytes]] = []
    for message in messages:
        if not isinstance(message, Mapping) or message.get("role") not in chat.ROLES:
            raise BadRollout(f"a message needs a role ({', '.join(chat.ROLES)}) and a content, not {message!r:.100}")
        content = message.get("content") or ""
        if not isinstance(content, str):
            raise BadRollout(f"a message's content is not a text: {content!r:.100}")
        more = {name: message[name] for name in roles.MORE if message.get(name) is not None}
        data = content.encode("utf-8", "surrogatepass")
        found.append(roles.Turn(message["role"], data, more) if more else (message["role"], data))
    if not found:
        raise BadRollout("no messages")
    return found


def to_json(made: Any) -> dict[str, Any]:
    """Return a rollout as it is sent to the rank. Raises BadRollout if it is something else."""
    if not isinstance(made, Rollout):
        raise BadRollout(f"returned {type(made).__name__}; it must return a stoker.rollout.Rollout")
    reward = made.reward
    if reward is not None:
        reward = _number(reward, "reward")
    turns = []
    for number, turn in enumerate(made.turns, 1):
        if not isinstance(turn, Turn):
            raise BadRollout(f"turn {number} is {type(turn).__name__}; it must be a stoker.rollout.Turn")
        ids = list(turn.token_ids)
        if any(isinstance(one, bool) or not isinstance(one, int) for one in ids):
            raise BadRollout(f"turn {number} has token ids that are not whole numbers")
        learn = turn.learn if isinstance(turn.learn, bool) else [bool(one) for one in turn.learn]
        if not isinstance(learn, bool) and len(learn) != len(ids):
            raise BadRollout(f"turn {number} has {len(ids)} token ids, and learn has {len(learn)} values")
        text = None if turn.text is None else str(turn.text)
        turns.append({"ids": ids, "learn": learn, "text": text, "role": str(turn.role)})
    return {
        "turns": turns,
        "reward": reward,
        "parts": {str(name): _number(value, str(name)) for name, value in dict(made.parts).items()},
    }


def _number(value: Any, name: str) -> float:
    if isinstance(value, (str, bytes)) or not hasattr(type(value), "__float__"):
        raise BadRollout(f"returned {name} {value!r:.100}, which is not a number")
    number = float(value)
    if not math.isfinite(number):
        raise BadRollout(f"returned {name} {number}")
    return number


class Worker:
    def __init__(self, settings: dict[str, Any], from_rank: int, to_rank: int, position: PositionWriter) -> None:
        """`from_rank`, `to_rank`: descriptors. Raises Refusal, or what the user's file raises."""
        self.settings, self._from_rank, self._to_rank, self._position = settings, from_rank, to_rank, position
        self._limit: float = settings["seconds"]
        self._name, self._file = settings["name"], os.path.abspath(settings["file"])
        position.enter(0, None, self._file, 0)
        self.tokenizer: Tokenizer = load_tokenizer(settings["tokenizer"])
        self._function: Any = getattr(load_module(self._file), settings["function"], None)
        position.leave()
        called = getattr(self._function, "__call__", None)  # noqa: B004  an object with an async __call__
        if not inspect.iscoroutinefunction(self._function) and not inspect.iscoroutinefunction(called):
            raise BadRollout(f"{settings['function']} must be an async function: async def (client, row, seed)")
        self._line = first_line_of(self._function)
        self._live: dict[int, Live] = {}
        self._requests, self._idle_at = 0, 0  # requests so far, and when idle was sent
        self._grace: asyncio.TimerHandle | None = None
        self._rest = b""
        self._beat = self._alive = time.monotonic()

    def send(self, **line: Any) -> None:
        data = memoryview(json.dumps(line).encode() + b"\n")
        while data:
            data = data[os.write(self._to_rank, data) :]

    async def run(self) -> None:
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._from_rank, self._read, ended)
        signal.signal(signal.SIGALRM, self._alarm)
        ticking = loop.create_task(self._tick())
        await ended.wait()
        ticking.cancel()

    def _read(self, ended: asyncio.Event) -> None:
        data = os.read(self._from_rank, 1 << 20)
        if not data:
            ended.set()
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            told = json.loads(line)
            for one in told.get("start", ()):
                self._start(one["number"], one["row"], one["seed"])
            for one in told.get("completions", ()):
                live = self._live.get(one["number"])
                waiting = None if live is None else live.waiting.pop(one["call"], None)
                if waiting is not None and not waiting.done():
                    waiting.set_result(one)

    def _start(self, number: int, row: dict[str, Any], seed: int) -> None:
        context = contextvars.copy_context()
        context.run(CURRENT.set, number)
        task = asyncio.get_running_loop().create_task(self._one(number, row, seed), context=context)
        self._live[number] = Live(task)

    async def _one(self, number: int, row: dict[str, Any], seed: int) -> None:
        self._position.enter(0, number, self._file, self._line)
        outcome: dict[str, Any]
        try:
            outcome = {"rollout": to_json(await self._function(WorkerClient(self, number), row, seed))}
        except (BadRollout, chat.Unfit) as problem:
            outcome = {"failed": getattr(problem, "line", None) or str(problem)}
        except BaseException as problem:
            live = self._live.get(number)
            if live is not None and live.timed_out_at and not isinstance(problem, TimeIsUp):
                problem = TimeIsUp().with_traceback(problem.__traceback__)
            outcome = {"failed": described_error(problem, self._file, "grpo.rollout_timeout")}
        self._finish(number, outcome)

    def _finish(self, number: int, outcome: dict[str, Any]) -> None:
        if self._live.pop(number, None) is not None:
            self.send(type="done", number=number, **outcome)
            self._watch()

    async def request(
        self, number: int, ids: list[int], seed: int | None, max_tokens: int, stop: list[str]
    ) -> dict[str, Any]:
        live = self._live.get(number)
        if live is None:
            raise BadRollout("sample was called after the rollout ended")
        call, live.calls = live.calls, live.calls + 1
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        live.waiting[call] = future
        self._requests += 1
        self.send(type="sample", number=number, call=call, ids=ids, seed=seed, max_tokens=max_tokens, stop=stop)
        self._watch()
        try:
            return await future
        finally:
            live.waiting.pop(call, None)
            self._position.enter(0, number, self._file, self._line)

    def _watch(self) -> None:
        """Look whether all rollouts wait for completions, now and after the grace time."""
        loop = asyncio.get_running_loop()
        if self._grace is not None:
            self._grace.cancel()
        self._grace = loop.call_later(GRACE_S, self._send_idle)
        loop.call_soon(self._settle, self._requests, IDLE_TURNS)

    def _settle(self, requests: int, turns: int) -> None:
        if requests != self._requests or not all(live.waiting for live in self._live.values()):
            return
        if turns:
            asyncio.get_running_loop().call_soon(self._settle, requests, turns - 1)
        else:
            self._send_idle()

    def _send_idle(self) -> None:
        if self._idle_at != self._requests:
            self._idle_at = self._requests
            self.send(type="idle")

    async def _tick(self) -> None:
        while True:
            signal.setitimer(signal.ITIMER_REAL, self._limit)  # comes only where the loop is blocked for that long
            now = time.monotonic()
            # A loop that was blocked by one rollout does not cost the others their time.
            passed, self._beat = min(now - self._beat, 2 * TICK_S), now
            for number, live in list(self._live.items()):
                if live.waiting:
                    continue
                live.own_s += passed
                if live.timed_out_at:
                    if now - live.timed_out_at > CANCEL_S:
                        self._finish(number, {"failed": "it took longer than grpo.rollout_timeout, and does not end"})
                elif live.own_s > self._limit:
                    live.timed_out_at = now
                    live.task.cancel()
            if now - self._alive > ALIVE_S:
                self._alive = now
                self.send(type="alive")
            await asyncio.sleep(TICK_S)

    def _alarm(self, number: int, frame: Any) -> None:
        """Interrupt a rollout that has blocked the loop for as long as its time limit."""
        is_rollout = CURRENT.get() is not None
        signal.setitimer(signal.ITIMER_REAL, self._limit if is_rollout else TICK_S)
        if is_rollout:
            raise TimeIsUp


def main() -> None:
    end_with_the_rank()
    from_rank, to_rank = os.dup(0), os.dup(1)
    os.dup2(2, 1)  # what a rollout prints goes to the log
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    first = b""
    while not first.endswith(b"\n"):
        if not (piece := os.read(from_rank, 1)):
            return  # the rank is gone
        first += piece
    settings = json.loads(first)
    position = PositionWriter(settings["position"], CURRENT.get)
    position.sample()

    def send(**line: Any) -> None:
        os.write(to_rank, json.dumps(line).encode() + b"\n")

    try:
        worker = Worker(settings, from_rank, to_rank, position)
    except BadRollout as problem:
        send(type="refused", line=str(problem))
    except Refusal as problem:
        send(type="refused", line=problem.line)
    except (Exception, SystemExit, KeyboardInterrupt) as problem:
        send(type="refused", line=described_error(problem, os.path.abspath(settings["file"]), "the time limit"))
    else:
        worker.send(type="ready")
        asyncio.run(worker.run())
        os._exit(0)  # rollouts that ignore their cancellation are not waited for
    sys.exit(0)


if __name__ == "__main__":
    main()
