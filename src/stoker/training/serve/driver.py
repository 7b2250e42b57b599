"""The engine in a thread of its own: requests go in from any thread, their events come out in the engine's."""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from stoker.contract.errors import Refusal
from stoker.control.record.serving_log import EVERY_S, ServerLog, ServerSample
from stoker.training.serve.engine import PagedEngine
from stoker.training.serve.request import ABORTED, LENGTH, STOP, Event, Request

Sink = Callable[[Event], None]
Failed = Callable[[str, bool], None]  # a line, and whether the client is to blame


class _Sent(NamedTuple):
    sink: Sink
    failed: Failed


class Driver:
    """`most`: requests that run or wait at a time; more are turned away. `died` is called in the engine's thread when it fails."""

    def __init__(self, engine: PagedEngine, most: int) -> None:
        self.engine, self.most = engine, most
        self.died: Callable[[], None] = lambda: None
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._sent: dict[str, _Sent] = {}
        self._lock = threading.Lock()
        self._count = 0
        self.failure = ""  # why nothing is answered any more
        self.finished: Counter[str] = Counter()
        self.tokens = 0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """What is open is dropped."""
        self._commands.put(None)
        self._thread.join()

    @property
    def count(self) -> int:
        return self._count

    def reserve(self, count: int) -> bool:
        """Reserve places for so many requests, which the following `send` uses up; False: there are not enough."""
        with self._lock:
            if self.failure or self._count + count > self.most:
                return False
            self._count += count
            return True

    def _give_back(self, count: int) -> None:
        with self._lock:
            self._count -= count

    def send(self, requests: Sequence[Request], sink: Sink, failed: Failed) -> None:
        """For whom places are reserved. After `failed`, which is called once at most, only aborts may follow."""
        self._commands.put(lambda: self._add(requests, _Sent(sink, failed)))

    def abort(self, requests: Sequence[Request]) -> None:
        self._commands.put(lambda: self._abort(requests))

    def update(
        self, change: Callable[[], None], version: int | None, digest: str, applied: Callable[[int], None]
    ) -> None:
        """As the engine's, in whose thread both are called."""
        self._commands.put(lambda: self.engine.update(change, version, digest, applied))

    def _add(self, requests: Sequence[Request], sent: _Sent) -> None:
        for place, request in enumerate(requests):
            try:
                self.engine.add(request)
            except Refusal as refusal:
                self._abort(requests[:place])  # their events give their places back
                self._give_back(len(requests) - place)
                sent.failed(refusal.line, True)
                return
            self._sent[request.id] = sent

    def _abort(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self.engine.abort(request.id)

    def _run(self) -> None:
        try:
            while self._take_commands():
                if self.engine.busy:
                    for event in self.engine.step():
                        self._pass_on(event)
        except Exception as problem:  # whoever waits must hear of it, and the process ends
            self.failure = f"{type(problem).__name__}: {problem}"
            for sent in {id(sent): sent for sent in self._sent.values()}.values():
                sent.failed("the engine failed; see the server's log", False)
            self.died()

    def _take_commands(self) -> bool:
        """False: it is over. Waits where there is nothing to compute."""
        wait = not self.engine.busy
        while wait or not self._commands.empty():
            command = self._commands.get()
            if command is None:
                return False
            command()
            wait = wait and not self.engine.busy
        return True

    def _pass_on(self, event: Event) -> None:
        sent = self._sent[event.id]
        self.tokens += event.token is not None
        if event.finish:
            self.finished[event.finish] += 1
            del self._sent[event.id]
            self._give_back(1)
        sent.sink(event)


def sample(driver: Driver) -> ServerSample:
    """Return what has been done so far, and what is under way. Any thread may ask."""
    engine, schedule = driver.engine, driver.engine.schedule
    prompt_tokens = schedule.prompt_tokens + schedule.shared_tokens
    ended, under_way = driver.finished.total(), (len(schedule.running), len(schedule.waiting))
    return ServerSample(time.time(), ended, prompt_tokens, driver.tokens, *under_way, engine.version)


class CounterLog(threading.Thread):
    """Writes the driver's counters into the run directory while the server runs."""

    def __init__(self, driver: Driver, run_dir: str, rank: int, log: Callable[[str], None]) -> None:
        super().__init__(name="counters", daemon=True)
        self._driver, self._run_dir, self._rank, self._log = driver, run_dir, rank, log
        self._is_over = threading.Event()

    def run(self) -> None:
        try:
            file = ServerLog(self._run_dir, self._rank)
            while True:
                is_last = self._is_over.is_set()
                file.write(sample(self._driver))
                if is_last:
                    return
                self._is_over.wait(EVERY_S)
        except OSError as problem:  # a full disk must not end the server
            self._log(f"the counters that viewers show are no longer written: {problem.strerror}")

    def close(self) -> None:
        """Write the last line."""
        self._is_over.set()
        self.join()


def metrics(driver: Driver, turned_away: int) -> str:
    """As Prometheus reads them."""
    return "\n".join(_lines(driver, turned_away)) + "\n"


def _lines(driver: Driver, turned_away: int) -> Iterator[str]:
    engine, schedule = driver.engine, driver.engine.schedule
    for name, kind, text, value in (
        ("running", "gauge", "answers being written", len(schedule.running)),
        ("waiting", "gauge", "requests waiting for a slot or for memory", len(schedule.waiting)),
        ("blocks_held", "gauge", "cache blocks in use by running answers", engine.pool.held),
        ("blocks", "gauge", "cache blocks", engine.pool.count),
        ("weights_version", "gauge", "version of the weights", engine.version),
        ("tokens_total", "counter", "tokens written", driver.tokens),
        ("prompt_tokens_total", "counter", "prompt tokens computed", schedule.prompt_tokens),
        ("shared_tokens_total", "counter", "prompt tokens found in the cache", schedule.shared_tokens),
        (
            "preemptions_total",
            "counter",
            "answers that gave up their blocks and were computed again",
            schedule.preemptions,
        ),
        ("turned_away_total", "counter", "requests that got status 429", turned_away),
    ):
        yield f"# HELP stoker_serve_{name} {text}"
        yield f"# TYPE stoker_serve_{name} {kind}"
        yield f"stoker_serve_{name} {value}"
    yield "# HELP stoker_serve_answers_total answers by how they ended"
    yield "# TYPE stoker_serve_answers_total counter"
    for finish in (STOP, LENGTH, ABORTED):
        yield f'stoker_serve_answers_total{{finish="{finish}"}} {driver.finished[finish]}'
