"""Rollouts by a user's grpo.rollout: the rank's side of rollout_worker.py.

The worker asks for completions. Inside the trainer they are sampled in one batch whenever all rollouts wait; with servers each
request goes out when it comes. What was sampled is recorded, and a rollout may learn nothing else.
"""

from __future__ import annotations

import json
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Protocol

import stoker
from stoker.contract.env_vars import WAITING_PHASE
from stoker.contract.errors import EX_DATAERR, Refusal
from stoker.contract.frozen import frozen
from stoker.contract.text import escape
from stoker.rollout import Rollout as PublicRollout
from stoker.rollout import Turn
from stoker.training.generate.config import GenerateConfig, Sampling, checked
from stoker.training.parallel.group import Group, split
from stoker.training.rl.asking import ServerFailed
from stoker.training.rl.config import GrpoConfig
from stoker.training.rl.last_position import PositionFile
from stoker.training.rl.parts import rollout_function
from stoker.training.rl.remote import Lacking, Servers
from stoker.training.rl.rollout import FAILURES, Answer, Prompt, answer_of, learned_flags, number_from, without_stop
from stoker.training.rl.sampler import InTrainer, Sampler, Written
from stoker.training.rl.scoring import GRACE_S, LONGEST, WARM_UP_S, RewardFailed
from stoker.training.rl.waiting import POLL_S, STOP_S, StopRequested
from stoker.training.serve.request import LENGTH, STOP, Request
from stoker.training.tokenizer.tokenizer import Tokenizer

CONNECTIONS = 256  # requests to servers at once, of a rank
SILENT_S = 30.0  # beyond the rollouts' time limit: code that no signal reaches
WAITING_S = 20.0  # between two words of a rank that waits
PIPE_BYTES = 4096  # that a pipe which is ready takes without waiting
SHOWN_FAILURES = 3  # lines about failed rollouts, of a step and rank


@frozen
class SampleRequest:
    """A completion that a rollout waits for."""

    step: int  # that learns from it
    number: int  # of the rollout
    call: int  # of the rollout's calls of sample
    prompt: tuple[int, ...]
    seed: int
    max_tokens: int
    stop: tuple[str, ...]


@frozen
class Sampled:
    """What was sampled for a rollout."""

    prompt: tuple[int, ...]
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]


class LiveRollout:
    """A rollout that was started: what was sampled for it, and how it ended."""

    def __init__(self, step: int, number: int, place: int, prompt: Prompt, seed: int) -> None:
        """`number`: among all of this process; `place`: among all of the step."""
        self.step, self.number, self.place, self.prompt, self.seed = step, number, place, prompt, seed
        self.sampled: list[Sampled] = []
        self.rollout: PublicRollout | None = None
        self.failed = ""
        self.is_done = False


class Backend(Protocol):
    """Samples completions, and hands each batch to `deliver`."""

    def add(self, request: SampleRequest) -> None: ...

    def idle(self) -> None:
        """All rollouts wait."""
        ...

    def work(self) -> bool:
        """Sample what is to be sampled in the calling thread; False: nothing was."""
        ...

    def close(self) -> None: ...


Deliver = Callable[[Sequence[tuple[SampleRequest, Written, str]]], None]  # the last: finish reason, empty if not known


class EngineBackend:
    """Samples inside the trainer, in the thread that learns."""

    def __init__(
        self, sampler: InTrainer, sampling: Sampling, stop: Collection[int], deliver: Deliver, is_live: Callable[[int], bool]
    ) -> None:  # fmt: skip
        """`is_live`: whether a rollout still waits for what it asked."""
        self._sampler, self._sampling, self._stop, self._deliver = sampler, sampling, frozenset(stop), deliver
        self._is_live = is_live
        self._waiting: list[SampleRequest] = []
        self._is_idle, self._lock = False, threading.Lock()

    def add(self, request: SampleRequest) -> None:
        with self._lock:
            self._waiting.append(request)

    def idle(self) -> None:
        with self._lock:
            self._is_idle = True

    def work(self) -> bool:
        with self._lock:
            if not self._is_idle:
                return False
            # In an order that does not depend on when they came.
            batch, self._waiting, self._is_idle = sorted(self._waiting, key=lambda r: (r.number, r.call)), [], False
        batch = [request for request in batch if self._is_live(request.number)]
        if not batch:
            return False
        keeps = 0 if self._sampler.engine.keeps_logprobs else -1
        made = self._sampler.engine.complete(
            [
                Request("", one.prompt, one.max_tokens, self._sampling, one.seed, 0, self._stop, one.stop, keeps)
                for one in batch
            ]
        )
        self._deliver(
            [
                (one, Written(answer.tokens, answer.logprobs), answer.finish)
                for one, answer in zip(batch, made, strict=True)
            ]
        )
        return True

    def close(self) -> None:
        """It holds nothing."""


class ServerBackend:
    """Sends each request to a server when it comes."""

    def __init__(self, servers: Servers, deliver: Deliver, failed: Callable[[Exception], None]) -> None:
        self._servers, self._deliver, self._failed = servers, deliver, failed
        self._pool = ThreadPoolExecutor(CONNECTIONS, "rollouts")

    def add(self, request: SampleRequest) -> None:
        with suppress(RuntimeError):  # closed: nobody waits for it
            self._pool.submit(self._sample, request)

    def idle(self) -> None:
        """Requests have gone out already."""

    def work(self) -> bool:
        return False

    def _sample(self, request: SampleRequest) -> None:
        try:
            written = self._servers.complete(
                request.step, request.prompt, request.seed, request.max_tokens, request.number
            )
            self._deliver([(request, written, "")])
        except Lacking as problem:
            self._failed(ServerFailed(str(problem)))
        except Exception as problem:  # whoever takes the rollouts raises it
            self._failed(problem)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


class RolloutHook:
    """As rl/rollout.py's Rollout: this rank's rollouts to a step's prompts, made by the user's function."""

    def __init__(
        self, sampler: Sampler, tokenizer: Tokenizer, tokenizer_path: str, c: GrpoConfig, ranks: Group,
        rows: Sequence[Mapping[str, Any]], generate: GenerateConfig, say: Callable[[str], None],
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:  # fmt: skip
        """`rows`: of the prompts' file, which the function is given. `should_stop`: whether this rank was told to stop, asked
        while it waits for rollouts. Raises Refusal if the file can't be loaded.
        """
        self._should_stop: Callable[[], bool] = lambda: False  # until the run's loop exists
        self.sampler, self._tokenizer, self._stop = sampler, tokenizer, frozenset(tokenizer.stop_ids)
        self._group, self._ranks, self._rows, self._say = c.group, ranks, rows, say
        self._seconds, self._ahead = c.rollout_timeout, c.staleness > 0
        file, function = rollout_function(c)
        self._name = f"{os.path.basename(file)}:{function}"
        self._live: dict[int, LiveRollout] = {}
        self._begun: dict[tuple[int, ...], list[LiveRollout]] = {}
        self._count = 0
        self._events: queue.SimpleQueue[None] = queue.SimpleQueue()  # a word for every line that was read
        self._problem: Exception | None = None
        self._heard, self._lock = time.monotonic(), threading.Lock()
        how = checked(**generate.sampling)
        self._backend: Backend
        if isinstance(sampler, InTrainer):
            self._backend = EngineBackend(sampler, how, self._stop, self._deliver, self._is_live)
        else:
            assert isinstance(sampler, Servers)
            self._backend = ServerBackend(sampler, self._deliver, self._fail)
        self._position = PositionFile()
        root = os.path.dirname(os.path.dirname(os.path.abspath(stoker.__file__)))
        path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "stoker.training.rl.rollout_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
            bufsize=0,
            pass_fds=(self._position.descriptor,),
        )
        self._is_ready = False
        self._refused = ""
        self._reader = threading.Thread(target=self._read, name="rollouts", daemon=True)
        self._reader.start()
        try:
            self._send(
                name=self._name, file=os.path.abspath(file), function=function, tokenizer=tokenizer_path, system=generate.system,
                seconds=c.rollout_timeout, context_length=sampler.length, new_tokens=generate.new_tokens,
                position=self._position.descriptor,
            )  # fmt: skip
            self._wait(lambda: self._is_ready or bool(self._refused), WARM_UP_S)
        except RewardFailed as problem:
            self._refused = str(problem)
        if self._refused:
            line = escape(self._refused, LONGEST)
            self.close()
            raise Refusal(f"grpo.rollout {self._name}: {line}", EX_DATAERR)
        self._should_stop = should_stop

    def begin(self, prompts: Sequence[Prompt], *seeds: int) -> None:
        """Start rollouts of a step ahead, where servers sample while the trainers learn."""
        if isinstance(self.sampler, Servers) and seeds not in self._begun:
            self._begun[seeds] = self._start(prompts, seeds, None)

    def __call__(self, prompts: Sequence[Prompt], *seeds: int, only: Collection[int] | None = None) -> list[Answer]:
        """This rank's rollouts to the step's prompts, `group` in a row to each. `only`: to those at these places.

        Raises RewardFailed if the worker died; a rollout that failed is an Answer with its line.
        """
        live = self._begun.pop(seeds, None) or self._start(prompts, seeds, only)
        self._wait(lambda: all(one.is_done for one in live))
        answers = [self._answer(one) for one in live]
        with self._lock:
            for one in live:
                del self._live[one.number]
        self._report([answer for answer in answers if answer.failed])
        return answers

    def close(self) -> None:
        self._backend.close()
        self._process.kill()
        self._process.wait()
        self._reader.join(GRACE_S)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._position.close()

    def _start(
        self, prompts: Sequence[Prompt], seeds: tuple[int, ...], only: Collection[int] | None
    ) -> list[LiveRollout]:
        share = split(len(prompts), self._ranks.world, self._ranks.rank, 1, False)
        asked_here = [number for number in range(share.begin, share.end) if only is None or number in only]
        live = []
        for number in asked_here:
            for place in range(number * self._group, (number + 1) * self._group):
                seed = number_from("rollout", *seeds, place) % 2**31
                live.append(LiveRollout(seeds[1], self._count, place, prompts[number], seed))
                self._count += 1
        with self._lock:
            self._live |= {one.number: one for one in live}
        self._send(
            start=[{"number": one.number, "row": dict(self._rows[one.prompt.row]), "seed": one.seed} for one in live]
        )
        return live

    def _is_live(self, number: int) -> bool:
        live = self._live.get(number)
        return live is not None and not live.is_done

    def _answer(self, live: LiveRollout) -> Answer:
        failed = live.failed
        if live.rollout is not None:
            try:
                rollout, versions = self._verified(live.rollout, live.sampled)
                return answer_of(live.place, live.prompt, rollout, self._tokenizer, self._stop, versions)
            except ValueError as problem:
                failed = str(problem)
        line = escape(f"rollout {self._name}, prompt {live.prompt.row + 1}: {failed}", LONGEST)
        return Answer(live.place, live.prompt, (), "", False, failed=line)

    def _verified(self, rollout: PublicRollout, sampled: Sequence[Sampled]) -> tuple[PublicRollout, tuple[int, ...]]:
        """Return it with the recorded log-probabilities, and the versions of its sampled tokens. Raises ValueError if it
        learns what was not sampled for it.
        """
        before: tuple[int, ...] = ()
        turns, versions = list[Turn](), list[int]()
        for number, turn in enumerate(rollout.turns, 1):
            ids, logprobs = tuple(turn.token_ids), tuple[float, ...]()
            if any(one < 0 or one >= self._tokenizer.vocab_size for one in ids):
                raise ValueError(f"turn {number} has token ids that are not the tokenizer's")
            if any(learned_flags(turn)):
                record = _record_of(before, ids, sampled)
                if record is None:
                    raise ValueError(
                        f"turn {number} learns {len(ids)} tokens that were not sampled for this rollout behind the"
                        f" {len(before)} tokens before them"
                    )
                logprobs = record.logprobs[: len(ids)]
                versions += record.versions[: len(ids)]
                if not before:
                    raise ValueError(f"turn {number} learns without a prompt before it")
            turns.append(Turn(ids, turn.learn, logprobs, turn.text, turn.role))
            before += ids
        if not any(any(learned_flags(turn)) for turn in turns):
            raise ValueError("it learns no token")
        if len(before) > self.sampler.length:
            raise ValueError(f"it has {len(before)} tokens, and data.context_length is {self.sampler.length}")
        return PublicRollout(turns, rollout.reward, rollout.parts), tuple(versions)

    def _report(self, failed: Sequence[Answer]) -> None:
        for answer in failed[:SHOWN_FAILURES]:
            self._say(f"{answer.failed}; left out of the step")
        if len(failed) > SHOWN_FAILURES:
            self._say(f"rollout {self._name}: {len(failed) - SHOWN_FAILURES} more of this step failed and are left out")

    def _wait(self, is_done: Callable[[], bool], more: float = 0.0) -> None:
        """Sample for the worker until something is the case. Raises what ended the worker or the sampling, or StopRequested."""
        is_waiting, told, self._heard = False, time.monotonic(), time.monotonic()
        limit, stop_seen = self._seconds + more + SILENT_S, None
        while not is_done():
            if self._problem is not None:
                raise self._problem
            if self._should_stop():
                stop_seen = stop_seen or time.monotonic()
                if time.monotonic() - stop_seen > STOP_S:
                    raise StopRequested("stopped while it waited for rollouts")
            if self._backend.work():
                self._heard = told = time.monotonic()
                continue
            with suppress(queue.Empty):
                self._events.get(timeout=POLL_S)
            now = time.monotonic()
            if now - self._heard > limit:
                raise self._blocked(limit)
            if now - told > WAITING_S:
                is_waiting, told = True, now
                stoker.phase(f"{WAITING_PHASE}rollouts")
        if is_waiting:
            stoker.phase("train")

    def _send(self, **told: Any) -> None:
        assert self._process.stdin is not None
        data, pipe = memoryview(json.dumps(told, default=str).encode() + b"\n"), self._process.stdin.fileno()
        ready, deadline = select.poll(), time.monotonic() + self._seconds + SILENT_S
        ready.register(pipe, select.POLLOUT)
        with suppress(BrokenPipeError), self._lock:  # the reader says why
            while data:
                if ready.poll(1000):
                    data = data[os.write(pipe, data[:PIPE_BYTES]) :]
                    continue
                # _wait raises what ends the sending, where all ranks hear of it: nothing follows half a line.
                if self._problem is None and self._should_stop():
                    self._fail(StopRequested("stopped while it waited for rollouts"))
                elif time.monotonic() > deadline:
                    self._fail(self._blocked(self._seconds + SILENT_S))
                if self._problem is not None:
                    return

    def _blocked(self, seconds: float) -> RewardFailed:
        return RewardFailed(f"rollout {self._name} blocked its process for {seconds:.0f} s{self._where()}")

    def _deliver(self, made: Sequence[tuple[SampleRequest, Written, str]]) -> None:
        """Record completions and send them to the worker."""
        lines = []
        for request, written, finish in made:
            live = self._live.get(request.number)
            if live is None:
                continue
            ids, text, is_stopped = self._cut(written.ids, request.stop)
            count = len(ids)
            live.sampled.append(Sampled(request.prompt, ids, written.logprobs[:count], written.versions[:count]))
            reason = STOP if is_stopped or ids[-1] in self._stop else finish or LENGTH
            lines.append(
                {
                    "number": request.number, "call": request.call, "ids": ids, "logprobs": written.logprobs[:count],
                    "versions": written.versions[:count], "text": text, "finish": reason,
                }
            )  # fmt: skip
        self._send(completions=lines)

    def _cut(self, ids: tuple[int, ...], stops: Sequence[str]) -> tuple[tuple[int, ...], str, bool]:
        """Return the tokens up to the one that completes a stop text, the text before it, and whether there is one."""
        text = self._tokenizer.decode(without_stop(ids, self._stop))
        ends = [at for stop in stops if (at := text.find(stop)) >= 0]
        if not ends:
            return ids, text, False
        count = next(
            n for n in range(1, len(ids) + 1) if any(stop in self._tokenizer.decode(ids[:n]) for stop in stops)
        )
        return ids[:count], text[: min(ends)], True

    def _fail(self, problem: Exception) -> None:
        if not isinstance(problem, FAILURES):
            problem = RewardFailed(f"rollout {self._name}: sampling failed: {type(problem).__name__}: {problem}")
        self._problem = self._problem or problem
        self._events.put(None)

    def _read(self) -> None:
        """Take the worker's lines, in a thread of its own, so that it never waits for the rank."""
        assert self._process.stdout is not None
        with self._process.stdout as pipe:
            rest = b""
            while data := pipe.read(1 << 20):
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    self._take(json.loads(line))
                self._heard = time.monotonic()
                self._events.put(None)
        self._fail(self._died())

    def _take(self, told: dict[str, Any]) -> None:
        kind = told["type"]
        if kind == "ready":
            self._is_ready = True
        elif kind == "refused":
            self._refused = told["line"]
        elif kind == "idle":
            self._backend.idle()
        elif kind == "sample" and (live := self._live.get(told["number"])) is not None:
            prompt = tuple(told["ids"])
            # A seed of the user's own gives the same completion to the same prompt, and unrelated ones to others.
            given = (live.seed, told["call"]) if told["seed"] is None else ("own", told["seed"], *prompt)
            request = SampleRequest(
                live.step,
                told["number"],
                told["call"],
                prompt,
                number_from("sample", *given),
                told["max_tokens"],
                tuple(told["stop"]),
            )
            self._backend.add(request)
        elif kind == "done" and (live := self._live.get(told["number"])) is not None:
            live.failed = told.get("failed", "")
            live.rollout = _parsed(told["rollout"]) if "rollout" in told else None
            live.is_done = True

    def _died(self) -> RewardFailed:
        try:
            code = self._process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        how += " (out of memory?)" if code == -signal.SIGKILL else ""
        return RewardFailed(
            f"rollout {self._name} failed: its process {how}{self._where()}; what it printed is in the log"
        )

    def _where(self) -> str:
        """Return where the worker was last, as ` in game.py, line 3, prompt 7`; empty if it is not known."""
        position = self._position.read()
        if position is None or not position.line:
            return ""
        live = self._live.get(-1 if position.item is None else position.item)
        prompt = "" if live is None else f", prompt {live.prompt.row + 1}"
        return f" in {os.path.basename(position.file)}, line {position.line}{prompt}"


def _record_of(before: tuple[int, ...], ids: tuple[int, ...], sampled: Sequence[Sampled]) -> Sampled | None:
    """Return what was sampled behind these tokens and begins with those."""
    for record in sampled:
        if record.ids[: len(ids)] == ids and record.prompt == before:
            return record
    return None


def _parsed(told: dict[str, Any]) -> PublicRollout:
    turns = [Turn(tuple(one["ids"]), one["learn"], (), one["text"], one["role"]) for one in told["turns"]]
    return PublicRollout(turns, told["reward"], told["parts"])


def prompts_of(rows: Sequence[Mapping[str, Any]], path: str, lacking: Callable[[str | None], str]) -> list[Prompt]:
    """Return the rows as prompts without token ids: the user's function decides what is asked.

    Raises Refusal for a row whose answer a built-in reward can't use.
    """
    found = []
    for number, row in enumerate(rows):
        answer = row.get("answer")
        if isinstance(answer, (int, float)) and not isinstance(answer, bool):
            answer = str(answer)
        if not isinstance(answer, str) or not answer.strip():
            answer = None
        if problem := lacking(answer):
            raise Refusal(f"grpo.prompts {path}: row {number + 1} is {problem}", EX_DATAERR)
        asked = row.get("prompt", row.get("question"))
        text = asked if asked is not None else json.dumps(dict(row), ensure_ascii=False, default=str)
        found.append(Prompt(number, text, (), answer))
    return found
