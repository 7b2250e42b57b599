"""`pytest --workers 10`: the tests in ten processes, a file each, forked from one that has collected them.

Importing torch and all test files takes 10 s of a core, and pytest-xdist does that in every worker. Forked ones have it all. The
files are handed out in the order of the items. When none is left, a worker without work takes the second half of what another
still has to do, if that is worth setting up the file's fixtures again. A worker that dies fails the test it was running, and
another goes on behind it.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import signal
import sys
import time
import traceback
import warnings
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest
from _pytest.config import create_terminal_writer

import forked_ranks

WORTH_SHARING_S = 4.0  # of work, as far as the file's tests so far can tell
LOOK_S = 1.0  # between two looks for something to share


@dataclass
class Worker:
    """It knows the test it runs and the one behind it, which tells it what to tear down. The rest of its file is still the office's."""

    pid: int
    line: Connection
    items: list[int] = field(
        default_factory=list
    )  # numbers of those it was given, those before the running one taken out
    rest: list[int] = field(default_factory=list)
    told_end: bool = True  # of its file
    ran: int = 0  # tests of this file that it has begun
    since: float = 0.0

    def seconds_left(self) -> float:
        return (time.monotonic() - self.since) / self.ran * len(self.rest) if self.ran else 0.0


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--workers", type=int, default=0, help="run test files in this many processes, forked after collection"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    config = session.config
    if config.option.workers < 1 or config.option.collectonly or session.testsfailed:
        return None  # pytest's own
    numbers = itertools.groupby(range(len(session.items)), key=lambda number: session.items[number].path)
    _Office(session, [list(some) for _, some in numbers]).work()
    if session.shouldfail:
        raise session.Failed(session.shouldfail)
    return True


class _Office:
    """Hands files to workers, and their reports to pytest."""

    def __init__(self, session: pytest.Session, files: list[list[int]]) -> None:
        self._session, self._config, self._files = session, session.config, files
        self._workers: list[Worker] = []
        self._idle: list[Worker] = []
        self._names = itertools.count()
        session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]  # workers' are in it

    def work(self) -> None:
        try:
            for _ in range(min(self._config.option.workers, len(self._session.items))):
                self._hire()
            while self._workers:
                for line in wait([worker.line for worker in self._workers], LOOK_S if self._idle else None):
                    (worker,) = (one for one in self._workers if one.line is line)
                    try:
                        self._hear(worker, *worker.line.recv())
                    except (EOFError, ConnectionResetError):  # the second: with numbers that it has not read
                        self._bury(worker)
                self._share()
        except KeyboardInterrupt:
            for worker in self._workers:
                os.kill(worker.pid, signal.SIGINT)  # on a terminal they have it already
            raise
        finally:
            for worker in self._workers:
                worker.line.close()  # it ends when it next says something

    def _hire(self) -> None:
        ours, theirs = Pipe()
        name = next(self._names)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: of the threads that numpy's OpenBLAS has
            pid = os.fork()
        if pid == 0:
            code = 1
            try:
                for worker in self._workers:
                    worker.line.close()  # or they would not see that we are gone
                ours.close()
                _run(self._session, theirs, name)
                code = 0
            except (KeyboardInterrupt, BrokenPipeError):
                with contextlib.suppress(BaseException):
                    self._session._setupstate.teardown_exact(None)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        theirs.close()
        self._workers.append(Worker(pid, ours))

    def _hear(self, worker: Worker, what: str, told: Any) -> None:
        hook = self._config.hook
        if what == "report":
            hook.pytest_runtest_logreport(report=hook.pytest_report_from_serializable(config=self._config, data=told))
        elif what == "warning":
            hook.pytest_warning_recorded.call_historic(kwargs=told)
        elif what == "running":
            del worker.items[: worker.items.index(told)]
            worker.ran += 1
            if not worker.told_end:
                self._hand_on(worker)
        else:
            self._idle.append(worker)

    def _share(self) -> None:
        """Files to those that have nothing to do; then halves of what others still have. With nothing left to share they end."""
        if self._session.shouldfail or self._session.shouldstop:
            self._files.clear()
            for worker in self._workers:
                worker.rest.clear()
        while self._idle:
            busiest = max(self._workers, key=Worker.seconds_left)
            if self._files:
                self._begin(self._idle.pop(0), self._files.pop(0))
            elif not any(worker.rest for worker in self._workers):
                self._tell(self._idle.pop(0), None)
            elif busiest.seconds_left() >= WORTH_SHARING_S:
                keeps = len(busiest.rest) // 2
                taken, busiest.rest = busiest.rest[keeps:], busiest.rest[:keeps]
                self._begin(self._idle.pop(0), taken)
            else:
                return  # the next look may find that a test takes long

    def _begin(self, worker: Worker, file: list[int]) -> None:
        worker.rest, worker.ran, worker.since, worker.told_end = list(file), 0, time.monotonic(), False
        for _ in range(2):
            self._hand_on(worker)

    def _hand_on(self, worker: Worker) -> None:
        number = worker.rest.pop(0) if worker.rest else None
        worker.told_end = number is None
        worker.items += [] if number is None else [number]
        self._tell(worker, number)

    def _tell(self, worker: Worker, number: int | None) -> None:
        with contextlib.suppress(ConnectionError):  # it has died, and is buried when we read that
            worker.line.send(number)

    def _bury(self, worker: Worker) -> None:
        self._workers.remove(worker)
        if worker in self._idle:
            self._idle.remove(worker)
        code = os.waitstatus_to_exitcode(os.waitpid(worker.pid, 0)[1])
        if code == 0:
            return
        if worker.items:
            item = self._session.items[worker.items[0]]
            why = (
                f"the process that ran it {'was killed by signal' if code < 0 else 'ended with exit code'} {abs(code)}"
            )
            report = pytest.TestReport(item.nodeid, item.location, {}, "failed", why, "call")
            self._config.hook.pytest_runtest_logreport(report=report)
            if left := worker.items[1:] + worker.rest:
                self._files.insert(0, left)
        self._hire()


class _Teller:
    """In a worker: what pytest would print goes to the process that collected."""

    def __init__(self, line: Connection, config: pytest.Config) -> None:
        self._line, self._config = line, config

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._line.send(("report", data))

    @pytest.hookimpl
    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: str, nodeid: str, location: tuple[str, int, str] | None
    ) -> None:
        bare = warnings.WarningMessage(
            str(warning_message.message), warning_message.category, warning_message.filename, warning_message.lineno
        )
        told = {"warning_message": bare, "when": when, "nodeid": nodeid, "location": location}
        self._line.send(("warning", told))


def _run(session: pytest.Session, line: Connection, name: int) -> None:
    config = session.config
    atexit._clear()  # those are of the process that collected
    plugins = config.pluginmanager
    reporter: Any = plugins.getplugin("terminalreporter")  # rerunfailures and timeout ask for it
    reporter._tw = create_terminal_writer(config, open(os.devnull, "w"))  # noqa: SIM115
    plugins.register(_Teller(line, config))
    capture: Any = plugins.getplugin("capturemanager")
    capture.stop_global_capturing()  # into a file that all share
    capture.start_global_capturing()
    capture.suspend_global_capture()
    folders: Any = config._tmp_path_factory  # type: ignore[attr-defined]
    folders._basetemp = folders.getbasetemp() / f"worker-{name}"
    folders._basetemp.mkdir(mode=0o700)
    forked_ranks.warm()
    line.send(("next", None))
    while (number := line.recv()) is not None:
        while number is not None:
            following = line.recv()
            line.send(("running", number))
            nextitem = None if following is None else session.items[following]
            config.hook.pytest_runtest_protocol(item=session.items[number], nextitem=nextitem)
            number = None if session.shouldfail or session.shouldstop else following
        if session.shouldfail or session.shouldstop:
            break
        line.send(("next", None))
    session._setupstate.teardown_exact(None)
    atexit._run_exitfuncs()
