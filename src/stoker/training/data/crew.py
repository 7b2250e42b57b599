"""Processes that do jobs, as many as there are cores. They speak JSON lines; results come back in the order of the
jobs.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue
from types import TracebackType
from typing import Any, TypeVar

import stoker
from stoker.contract.errors import EX_SOFTWARE, Refusal
from stoker.contract.frozen import as_json
from stoker.training.data.units import Span
from stoker.training.data.work import Part, Work, do, files_in, prepared_tokenizer, too_much_memory

_NO_MEMORY = (-signal.SIGKILL, -signal.SIGABRT)  # the kernel's way, and that of a library at the process's limit
T = TypeVar("T")
ALONE = 8 << 20  # bytes that are done before processes would have started


def cores() -> int:
    return len(os.sched_getaffinity(0))


def run_interruptibly(job: Callable[[], T]) -> T:
    """Run a job in a thread and wait for it, so that Ctrl-C works while a tokenizer's library encodes one long text.

    Python handles signals in the main thread only, between two of its instructions. The libraries release the GIL. An
    interrupted job is abandoned with its thread, which ends with the process.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(job())
        except BaseException as problem:
            future.set_exception(problem)

    threading.Thread(target=run, daemon=True, name="stoker-prepare").start()
    return future.result()


class Crew:
    def __init__(self, work: Work, count: int) -> None:
        """`count` 0: here, in this process."""
        self.work = work
        self._processes: list[subprocess.Popen[bytes]] = []
        root = os.path.dirname(os.path.dirname(os.path.abspath(stoker.__file__)))
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])]),
        }
        environment |= {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        for _ in range(count):  # from this thread: a worker dies with the thread that made it
            made = subprocess.Popen(
                [sys.executable, "-P", "-m", "stoker.training.data.work"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
                bufsize=0,
            )
            self._processes.append(made)
        for process in self._processes:
            _send(process, as_json(work))

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                pipe.close()

    def run(
        self, jobs: Sequence[list[Span]], path_of: Callable[[int], str], tick: Callable[[int], None]
    ) -> Iterator[Part]:
        """In the order of the jobs. `tick` gets the bytes of each that is done."""
        if not self._processes:
            tokenizer = prepared_tokenizer(self.work)
            for number, spans in enumerate(jobs):
                try:
                    part = run_interruptibly(partial(do, tokenizer, self.work, spans, path_of(number)))
                except MemoryError as problem:
                    raise too_much_memory(spans) from problem
                yield part
                tick(sum(span.size for span in spans))
            return
        free: SimpleQueue[subprocess.Popen[bytes]] = SimpleQueue()
        for process in self._processes:
            free.put(process)

        def one(number: int) -> Part:
            process = free.get()
            try:
                _send(process, {"spans": as_json(jobs[number]), "path": path_of(number)})
                told: dict[str, Any] = json.loads(_whole_line(process, jobs[number]))
            finally:
                free.put(process)
            if "refusal" in told:
                raise Refusal(told["refusal"], told["code"])
            return Part(**told)

        pool = ThreadPoolExecutor(len(self._processes))
        try:
            for spans, part in zip(jobs, pool.map(one, range(len(jobs))), strict=True):
                tick(sum(span.size for span in spans))
                yield part
        finally:  # who leaves early waits for no job: the processes are killed next
            pool.shutdown(wait=False, cancel_futures=True)


def _send(process: subprocess.Popen[bytes], told: Any) -> None:
    assert process.stdin is not None
    data = memoryview(json.dumps(told).encode() + b"\n")
    try:
        while data:
            data = data[os.write(process.stdin.fileno(), data) :]
    except BrokenPipeError as problem:
        raise _died(process) from problem


def _whole_line(process: subprocess.Popen[bytes], spans: Sequence[Span]) -> bytes:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line.endswith(b"\n"):
        raise _died(process, f" at {files_in(spans)}")
    return line


def _died(process: subprocess.Popen[bytes], where: str = "") -> Refusal:
    code = process.wait()
    how = (
        f"was killed by signal {-code}"
        + (" (out of memory? fewer data.num_workers take less)" if code in _NO_MEMORY else "")
        if code < 0
        else f"ended with exit code {code}"
    )
    return Refusal(f"preparing data{where}: process {process.pid} {how}", EX_SOFTWARE)
