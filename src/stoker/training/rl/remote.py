"""Answers from `stoker serve`, or from servers that speak as dialects.py has it: prompts go as token ids, and ids come back with
their log-probabilities and the version of the weights that wrote each. Nothing is tokenized twice.

New weights are published as a folder, which every server is told to load before it is asked for answers that need it. Each
question names the oldest version that may answer it (versions.py): a server that was replaced, and has the weights of its
command line, refuses, is told the newest, and asked again. What comes all the same is checked token by token.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from urllib.parse import urlsplit

from stoker.contract.errors import EX_USAGE, Refusal
from stoker.contract.frozen import replace
from stoker.contract.text import escape
from stoker.contract.units import plural
from stoker.training.rl.asking import Patient, ServerFailed
from stoker.training.rl.dialects import Published, Question, Told, Wanted, dialect_of
from stoker.training.rl.kept import Kept
from stoker.training.rl.sampler import Ask, Written
from stoker.training.rl.versions import oldest_version, versions_kept
from stoker.training.rl.waiting import ServerWait, StopRequested
from stoker.training.serve.request import CONTINUE, FINISH

ROLE = "STOKER_ROLE_"
CONNECTIONS = 32  # of a rank
MOST_A_BODY = 16  # answers
MOST_BYTES, BYTES_A_TOKEN = 2 << 20, 200  # of a body's answer: the server closes on a client that is far behind
TRIES = 3  # with new weights published to it in between, before a server counts as one with other weights
KNOWN_S = 5.0  # another rank may have published just before this one knows of it
PROBE_S = 1.5  # between two looks whether the servers can be reached
MOST_REFUSALS = 20  # in a row for one question: a server that was replaced refuses until it has the newest weights


class Lacking(Exception):
    """A line: a server has not got the weights that were sent, and only all trainers together can send them again."""


class OtherWeights(Exception):
    """A line: the server answers with weights that nobody here published."""


def addresses_of(text: str, environment: Mapping[str, str]) -> tuple[str, ...]:
    """HOST:PORT of each server. `text`: URLs with commas between them, or the name of a role of this job."""
    if "://" not in text:
        found = environment.get(f"{ROLE}{text.upper().replace('-', '_')}", "")
        if not found:
            raise Refusal(f"grpo.server {escape(text)}: neither a URL (http://…) nor a role of this job", EX_USAGE)
        return tuple(found.split(","))
    return tuple(_address(one.strip()) for one in text.split(","))


def _address(url: str) -> str:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port or 80
    except ValueError:
        host, port = None, 0
    if not host or parts.scheme != "http" or parts.path.rstrip("/") not in ("", "/v1") or parts.query:
        raise Refusal(f"grpo.server {escape(url)}: write a URL such as http://127.0.0.1:8000", EX_USAGE)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class Servers:
    """A Sampler. `publish`: writes the weights of a version, all ranks together; `patience_s`: for an answer, or for a server
    that is being replaced; `staleness`: how many steps ahead answers are begun, and how old weights may be; `wait`: how this
    rank waits; `kept`: has what came before the trainers started again; `kind`: of the servers; `together`: every rank's
    word, on all ranks, where weights are sent and a server that was replaced can't load them by itself.
    """

    engine = None

    def __init__(
        self,
        addresses: Sequence[str],
        key: str,
        wanted: Wanted,
        publish: Callable[[int], Published],
        *,
        staleness: int,
        patience_s: float,
        wait: ServerWait | None = None,
        kept: Kept | None = None,
        kind: str = "stoker",
        together: Callable[[str], Sequence[str]] | None = None,
    ) -> None:
        self._addresses, self._wanted, self._publish = tuple(addresses), wanted, publish
        self.length = wanted.length
        self._wait, self._kept = wait or ServerWait(), kept
        self._staleness, self._dialect = staleness, dialect_of(kind, FINISH if staleness < 2 else CONTINUE)
        self._together, self._pushed = together, Future[None]()
        self._pushed.set_result(None)
        self._known: dict[int, Published] = {}
        self._newest: Published | None = None
        self._begun: dict[tuple[int, ...], Future[list[Future[list[Written]]]]] = {}
        self._problem: Exception | None = None
        self._resampled, self._counting = 0, threading.Lock()
        self._post = Patient(key, patience_s, self._wait)
        if self._wait.reports:
            threading.Thread(target=self._probe, name="probe", daemon=True).start()
        # One after the other: who asks behind new weights gets their answers, or newer ones'.
        self._in_order = ThreadPoolExecutor(1, "in-order")
        self._pool = ThreadPoolExecutor(CONNECTIONS, "answers")

    def refresh(self, version: int) -> None:
        """Publish the weights, all ranks together. Raises StopRequested and ServerFailed on all ranks."""
        if self._together is not None:
            with suppress(StopRequested):  # the others publish, and wait for this rank
                self._wait.result(self._pushed)  # a server has room for one version that is not in place
        published = self._publish(version)
        self._known[version] = self._newest = published
        for old in sorted(self._known)[: -versions_kept(self._staleness)]:
            del self._known[old]
        if self._kept is not None:
            self._kept.forget()
        self._pushed = self._in_order.submit(self._push_all)

    def begin(self, ask: Ask) -> None:
        if ask.seeds not in self._begun:
            self._begun[ask.seeds] = self._in_order.submit(self._send, ask)

    def take(self, ask: Ask) -> list[Written]:
        if self._together is None:
            return self._taken(ask)
        found: list[Written] | None = None
        for _ in range(TRIES):
            problem: Exception | None = None
            try:
                found = self._taken(ask) if found is None else found
            except (Lacking, ServerFailed, OtherWeights, StopRequested) as caught:
                problem = caught
            words = self._together("" if problem is None else type(problem).__name__)
            if set(words) - {"", Lacking.__name__}:
                break
            if not any(words):
                assert found is not None
                return found
            assert self._newest is not None
            self.refresh(self._newest.version)
        if found is not None:
            return found  # another rank has none, and all hear why
        assert problem is not None
        raise ServerFailed(str(problem)) if isinstance(problem, Lacking) else problem

    def complete(self, step: int, prompt: tuple[int, ...], seed: int, new_tokens: int, number: int) -> Written:
        """Sample one completion for a rollout of a step, with the weights published before it or newer ones.

        `number`: spreads rollouts over the servers. Waits in the calling thread; raises what `take` raises.
        """
        self._in_order.submit(lambda: None).result()
        if self._problem is not None:
            raise self._problem
        address = self._addresses[number % len(self._addresses)]
        asked = Question(prompt, seed, 0, 1, oldest_version(step, self._staleness))
        (written,) = self._written(address, asked, replace(self._wanted, new_tokens=new_tokens))
        return written

    def _taken(self, ask: Ask) -> list[Written]:
        self.begin(ask)
        parts = self._wait.result(self._begun.pop(ask.seeds))
        return [written for part in parts for written in self._wait.result(part)]

    @property
    def ready(self) -> int:
        sent = [future.result() for future in self._begun.values() if future.done() and future.exception() is None]
        parts = [part for parts in sent for part in parts if part.done() and part.exception() is None]
        return sum(len(part.result()) for part in parts)

    def take_resampled(self) -> int:
        with self._counting:
            count, self._resampled = self._resampled, 0
        return count

    def close(self) -> None:
        """Whoever waits for an answer stops waiting; the servers see clients that left."""
        for pool in (self._in_order, self._pool):
            pool.shutdown(wait=False, cancel_futures=True)
        self._post.close()

    def _probe(self) -> None:
        """Look until the end whether the servers can be reached: this rank may wait in a collective for one that waits for them."""
        while self._post.waits(PROBE_S):
            for address in self._addresses:
                self._post.probe(address)

    def _push_all(self) -> None:
        try:
            for address in self._addresses:
                with suppress(Lacking):  # it was replaced: whoever asks it next is told
                    self._push(address)
        except Exception as problem:  # whoever asks next is told
            self._problem = problem

    def _push(self, address: str) -> None:
        """Make the server load the newest weights: those of a step before may be gone by now."""
        while True:
            published = self._newest
            assert published is not None
            is_sent = bool(published.transfer)

            def is_fine(status: int, line: str, published: Published = published) -> bool:
                if published.transfer:
                    return status == 409
                is_gone = status in (404, 422) and published is not self._newest
                return is_gone or self._dialect.is_there(status, line)

            if self._post(address, *self._dialect.push(published), is_fine=is_fine) is not None:
                return
            if is_sent:
                raise Lacking(f"the server at {address} has not got the weights that were sent, again and again")
            if published is self._newest:
                return

    def _send(self, ask: Ask) -> list[Future[list[Written]]]:
        if self._problem is not None:
            raise self._problem
        step = ask.seeds[1]
        oldest = oldest_version(step, self._staleness)
        return [
            self._pool.submit(self._replayed, step, address, Question(prompt, ask.seed, first, count, oldest))
            for address, prompt, first, count in self._parts(ask)
        ]

    def _replayed(self, step: int, address: str, asked: Question) -> list[Written]:
        """As the server answered before the trainers started again, or as it answers now."""
        if self._kept is None:
            return self._written(address, asked)
        found = self._kept.find(asked.prompt, asked.seed, asked.first, asked.count)
        if found is not None and not all(self._is_young(one, asked.oldest) for one in found):
            self._count_resampled(asked.count)
            found = None
        if found is None:
            found = self._written(address, asked)
            self._kept.keep(step, asked.prompt, asked.seed, asked.first, found)
        return found

    def _parts(self, ask: Ask) -> Iterator[tuple[str, tuple[int, ...], int, int]]:
        """(server, prompt, place of the first answer, answers): equal prompts in a row go together, up to a limit."""
        wanted = self._wanted
        most = max(min(MOST_A_BODY, MOST_BYTES // (BYTES_A_TOKEN * wanted.new_tokens)), 1)
        begin = 0
        while begin < len(ask.places):
            end = begin + 1
            while end < len(ask.places) and end - begin < most and self._goes_on(ask, begin, end):
                end += 1
            first = ask.places[begin]
            address = self._addresses[first // most % len(self._addresses)]
            yield address, ask.prompts[begin], first, end - begin
            begin = end

    @staticmethod
    def _goes_on(ask: Ask, begin: int, end: int) -> bool:
        is_next = ask.places[end] == ask.places[begin] + end - begin
        return is_next and ask.prompts[end] == ask.prompts[begin]

    def _written(self, address: str, asked: Question, wanted: Wanted | None = None) -> list[Written]:
        """Sample completions until all of their tokens were written by weights that the trainers published, none of them older
        than `asked.oldest`. Others are discarded and sampled again with the same seed.
        """
        wanted = wanted or self._wanted
        accepted: dict[int, Written] = {}
        refusals = discards = 0
        while True:
            discarded: list[Told] = []
            for part in _missing(asked, accepted):
                newest = self._newest
                path, body = self._dialect.question(part, wanted, newest)
                text = self._post(address, path, body, is_fine=self._dialect.lacks_weights)
                if text is None:
                    refusals += 1
                    break
                for place, one in enumerate(self._read(address, path, text, part.count, newest, wanted), part.first):
                    if self._is_current(one, asked.oldest):
                        accepted[place] = one.written
                    else:
                        discarded.append(one)
            if len(accepted) == asked.count:
                return [accepted[place] for place in sorted(accepted)]
            if discarded:
                discards += 1
                self._count_resampled(len(discarded))
            if discards == TRIES:
                line = f"the server at {address} answers with other weights than the trainers'"
                oldest = [(min(one.version, *one.written.versions), one.digest) for one in discarded]
                shown = escape(
                    ", ".join(f"version {version} ({digest})" for version, digest in dict.fromkeys(oldest)), 300
                )
                raise OtherWeights(
                    f"{line}: {shown}, though it was told to load what they publish: does another run use it?"
                )
            if refusals == MOST_REFUSALS:
                raise ServerFailed(
                    f"the server at {address} lacked the weights that were pushed to it {refusals} times in a row: is it"
                    " restarted again and again, or does another run use it?"
                )
            if self._newest is not None:
                self._push(address)

    def _read(
        self, address: str, path: str, text: bytes, count: int, newest: Published | None, wanted: Wanted
    ) -> list[Told]:
        try:
            told = json.loads(text)
        except (ValueError, RecursionError) as problem:
            raise ServerFailed(f"the server at {address} did not send JSON from {path}") from problem
        try:
            found = self._dialect.read(told, wanted, newest)
            if len(found) != count:
                raise ValueError(f"{plural(len(found), 'answer')} instead of {count}")
        except (KeyError, TypeError, ValueError, IndexError, OverflowError) as problem:
            what = escape(f"{type(problem).__name__}: {problem}", 200)
            raise ServerFailed(f"the server at {address} sent an answer that can't be read: {what}") from problem
        return found

    def _is_current(self, told: Told, oldest: int) -> bool:
        """Whether every token was written by weights that the trainers published and that are not too old."""
        if not self._is_young(told.written, oldest) or told.version < oldest:
            return False
        return self._is_known(told.version, told.digest) and all(
            self._is_known(version) for version in set(told.written.versions)
        )

    @staticmethod
    def _is_young(written: Written, oldest: int) -> bool:
        return min(written.versions, default=oldest) >= oldest

    def _is_known(self, version: int, digest: str = "") -> bool:
        until = time.monotonic() + KNOWN_S
        while version not in self._known and version > max(self._known) and time.monotonic() < until:
            if not self._post.waits(0.05):
                break
        known = self._known.get(version)
        return known is not None and digest in ("", known.digest)

    def _count_resampled(self, count: int) -> None:
        with self._counting:
            self._resampled += count


def _missing(asked: Question, accepted: Mapping[int, Written]) -> list[Question]:
    """Return questions for the completions that are not accepted yet, those in a row together."""
    places = [place for place in range(asked.first, asked.first + asked.count) if place not in accepted]
    rows: list[list[int]] = []
    for place in places:
        if rows and rows[-1][-1] == place - 1:
            rows[-1].append(place)
        else:
            rows.append([place])
    return [replace(asked, first=row[0], count=len(row)) for row in rows]
