"""--sync and --stage: copy the working directory, data or weights to every host, sending only files whose hash differs.

One thread per host starts control/agent/file_receiver.py there, over the host's transport (`RemoteProgram`), and sends it
the files.
"""

from __future__ import annotations

import hashlib
import json
import os
import select
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from stoker.contract import protocol, typed_values
from stoker.contract.errors import EX_NOINPUT, EX_UNAVAILABLE, EX_USAGE, Refusal
from stoker.contract.frozen import frozen
from stoker.contract.progress import BYTES, Progress
from stoker.contract.safe_io import open_regular
from stoker.contract.text import escape, escape_lines
from stoker.contract.units import format_bytes, format_duration, plural
from stoker.control.cluster import agent_zip, transport
from stoker.control.cluster.file_list import FileEntry, FileList, list_staged, list_working_directory
from stoker.control.cluster.hosts import Host, Hosts
from stoker.control.cluster.ssh import explain_failure
from stoker.control.machine.file_hash import FileHashes

_CHUNK = 1 << 18
SILENCE_S = 20.0  # a side without a message for this long counts as lost; a failing disk here may read slowly
GREETING_S = 60.0  # limit for the login and the start of Python, perhaps from a slow disk
_MAX_STDERR = 1 << 16  # bytes read of a remote program's stderr, of which a few lines are shown at most
_SLOW_TO_HASH = 2 * 10**9  # hashing this many bytes takes seconds, so it is announced
_COUNTS = {"written": "int", "removed": "int", "others": "dict[str, int]"}
Say = Callable[[str], None]


# ---- planning: the files to copy, and the target folder on each host ----


@frozen
class CopyJob:
    """A folder or file to copy to the hosts. Its files are listed once, so a host that joins late gets the same ones."""

    name: str  # for messages: "the working directory", or the path
    files: FileList
    offer: bytes  # the list as JSON, with hashes
    manifest: str  # where the receiver stores its list of copied files: "inside" the folder, or "" for its cache
    origin: str  # host:folder of the source; the receiver keeps files that came from other origins
    targets: dict[str, str]  # host -> folder to copy to; the host that has the source itself is left out


def plan_sync(hosts: Hosts, source: str, say: Say) -> CopyJob:
    """Plan to copy `source` to the workdir of each host, or to the same path if the host has no workdir."""
    source = os.path.abspath(source)
    targets = {host.name: host.workdir or source for host in hosts.hosts}
    job = _plan("the working directory", list_working_directory(source), "inside", hosts, targets, say)
    for path, why in job.files.skipped[:3]:
        say(f"not copying {escape(path)}: {why}")
    if len(job.files.skipped) > 3:
        say(f"{len(job.files.skipped) - 3} more paths are not copied either")
    return job


def plan_stage(hosts: Hosts, argument: str, say: Say) -> CopyJob:
    """Plan the copy for a --stage argument: PATH, which is copied to the same path, or PATH=REMOTE.

    An argument that exists as a path is a PATH, even if it contains '='.
    """
    path, equals, remote = argument.rpartition("=")
    if not equals or os.path.exists(os.path.expanduser(argument)):
        path, remote = argument, ""
    path = os.path.abspath(os.path.expanduser(path))
    if not os.path.exists(path):
        raise Refusal(f"--stage {argument}: {path} does not exist", EX_NOINPUT)
    remote = remote.rstrip("/") or path
    targets = {}
    for host in hosts.hosts:
        target = remote if remote.startswith(("/", "~")) else os.path.join(host.workdir or os.getcwd(), remote)
        if os.path.isfile(path):
            target, name = os.path.split(target)
            if name != os.path.basename(path):
                line = f"--stage {argument}: REMOTE must end with the name of the file, got {name}"
                line += f"; end it with /{os.path.basename(path)}"
                raise Refusal(line, EX_USAGE)
        targets[host.name] = target
    return _plan(path, list_staged(path), "", hosts, targets, say)


def _plan(name: str, files: FileList, manifest: str, hosts: Hosts, targets: dict[str, str], say: Say) -> CopyJob:
    """Hash the files. A host whose target is the source itself is left out of the job."""
    total = sum(entry.size for entry in files.entries)
    if total > _SLOW_TO_HASH:
        say(f"hashing {name}, {format_bytes(total)}; hashes of big files are stored for the next time")
    hashes = FileHashes()
    rows = []
    with Progress(f"hashing {name}", total, unit=BYTES) as progress:
        for entry in files.entries:
            path = os.path.join(files.root, entry.path)
            try:
                value = entry.target if entry.kind == "link" else hashes.of(path, progress.tick)
            except OSError as problem:
                raise Refusal(f"{path} can't be read: {problem.strerror}", EX_NOINPUT) from problem
            rows.append([entry.path, entry.kind, entry.mode, entry.size, value])
    hashes.save()
    source = os.path.realpath(files.root)
    local = {host.name for host in hosts.hosts if host.here}
    targets = {
        host: target
        for host, target in targets.items()
        if host not in local or os.path.realpath(os.path.expanduser(target)) != source
    }
    origin = f"{os.uname().nodename}:{files.root}" if manifest else ""
    return CopyJob(name, files, json.dumps(rows).encode(), manifest, origin, targets)


# ---- copying ----


def copy_to_hosts(hosts: Hosts, job: CopyJob, say: Say) -> None:
    """Copy the job's files to the hosts in parallel. Raises CopyFailed with all hosts that failed."""
    copies = [_Copy(host, hosts, job, job.targets[host.name]) for host in hosts.hosts if host.name in job.targets]
    threads = [threading.Thread(target=copy.run, name=f"copy to {copy.host.name}", daemon=True) for copy in copies]
    for thread in threads:
        thread.start()
    started = time.monotonic()
    progress = Progress(f"copying {job.name} to {plural(len(copies), 'host')}", 0, unit=BYTES, say=say)
    try:
        while running := [thread for thread in threads if thread.is_alive()]:
            running[0].join(0.1)
            progress.total = sum(copy.needed for copy in copies)
            progress.at(sum(copy.sent for copy in copies), "" if progress.total else "comparing")
    finally:
        progress.end()
        for copy in copies:
            copy.stop()
    failed = {copy.host.name: copy.failure for copy in copies if copy.failure}
    if failed:
        raise CopyFailed(failed)
    for copy in copies:
        for origin, count in copy.others.items():
            line = f"{copy.target} also has {plural(count, 'file')} that --sync copied from {origin}"
            say(f"host {copy.host.name}: {line}; to separate them, set another workdir: for each source")
    changed = [copy for copy in copies if copy.summary]
    if changed:
        names = ", ".join(f"{copy.host.name} ({copy.summary})" for copy in changed)
        unchanged = f"; {len(copies) - len(changed)} already had it" if len(changed) < len(copies) else ""
        say(f"copied {job.name} to {names} in {format_duration(time.monotonic() - started)}{unchanged}")
    elif copies:
        say(f"{job.name} is already the same on all hosts")


class CopyFailed(Refusal):
    """Raised if copies fail. `hosts` maps each host that failed to the reason."""

    def __init__(self, hosts: dict[str, str]) -> None:
        self.hosts = hosts
        first, *others = (f"host {name}: {why}" for name, why in hosts.items())
        super().__init__(first, EX_UNAVAILABLE, cause="host.copy", more=others)


class LateCopy:
    """Copies all jobs to a host that joins during a run, in a thread, while the ranks on the other hosts continue.

    The copy fails if staged data has changed since the run began. The working directory may change, for example by a
    growing log; the launch compares the program files afterwards.
    """

    def __init__(self, host: Host, hosts: Hosts, jobs: Sequence[CopyJob]) -> None:
        self._copies = [
            _Copy(host, hosts, job, job.targets[host.name], must_match_offer=not job.manifest)
            for job in jobs
            if host.name in job.targets
        ]
        self._stopped = False
        self.failure = ""
        self._thread = threading.Thread(target=self._run, name=f"copy to {host.name}", daemon=True)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    @property
    def summary(self) -> str:
        """Return a text that describes the copied files, or "" if the host had them all."""
        return "; ".join(
            f"copied {copy.job.name} to {copy.host.name} ({copy.summary})" for copy in self._copies if copy.summary
        )

    def _run(self) -> None:
        for copy in self._copies:
            if not self._stopped and not self.failure:
                copy.run()
                self.failure = f"{copy.job.name} could not be copied: {copy.failure}" if copy.failure else ""

    def stop(self) -> None:
        self._stopped = True
        for copy in self._copies:
            copy.stop()


class _Copy:
    """A copy of one job to one host. With `must_match_offer` it fails if a file has changed since it was hashed."""

    def __init__(self, host: Host, hosts: Hosts, job: CopyJob, target: str, must_match_offer: bool = False) -> None:
        self.host, self._hosts, self.job, self.target = host, hosts, job, target
        self._must_match_offer = must_match_offer
        self.needed = self.sent = 0  # bytes
        self.written = self.removed = 0  # files
        self.others: dict[str, int] = {}  # origin of other copies to the same folder -> number of its files there
        self.failure = ""
        self._receiver: RemoteProgram | None = None

    @property
    def summary(self) -> str:
        """Return a text that describes the changes on the host, or "" if there are none."""
        parts = [f"{plural(self.written, 'file')}, {format_bytes(self.sent)}"] if self.written else []
        return ", ".join([*parts, *([f"{self.removed} removed"] if self.removed else [])])

    def run(self) -> None:
        """Copy the files. Set `failure` if that fails."""
        self.failure = "the copy was interrupted"  # until it is complete
        try:
            self._exchange()
            self.failure = ""
        except (protocol.ProtocolError, OSError) as problem:
            self.failure = self._explain(problem)
        except Exception as problem:  # an exception of a thread would go unnoticed
            self.failure = f"{type(problem).__name__}: {problem}"
        finally:
            self.stop()

    def stop(self) -> None:
        if self._receiver is not None:
            self._receiver.stop()

    def _explain(self, problem: Exception) -> str:
        receiver = self._receiver
        if receiver is None:
            return "ssh is not on the PATH" if isinstance(problem, FileNotFoundError) else str(problem)
        why = receiver.explain(problem)
        if not receiver.greeted or isinstance(problem, protocol.ProtocolError):
            return why
        lost = f"the connection was lost in the middle of the copy, after {format_bytes(self.sent)}"
        return f"{lost}: {why}" if why else lost

    def _exchange(self) -> None:
        """Offer all files, send those that the receiver requests, and read its counts."""
        job = self.job
        receiver = RemoteProgram(self.host, self._hosts, "stoker.control.agent.file_receiver", SILENCE_S)
        self._receiver = receiver
        receiver.start()
        order = {
            "do": "offer",
            "root": self.target,
            "silence": SILENCE_S,
            "manifest": job.manifest,
            "origin": job.origin,
        }
        receiver.send(protocol.encode_message(order, job.offer))
        needed = set(protocol.read_payload("list[str]", receiver.answer()[1], "its list of missing files"))
        missing = [entry for entry in job.files.entries if entry.path in needed]
        self.needed = sum(entry.size for entry in missing)
        offered = {path: digest for path, _, _, _, digest in json.loads(job.offer)} if self._must_match_offer else {}
        for entry in missing:
            self._send_file(receiver, entry, offered.get(entry.path))
        receiver.send(protocol.encode_message({"do": "finish"}))
        try:
            counts = typed_values.read_fields(_COUNTS, receiver.answer()[0])
        except ValueError as problem:
            raise protocol.ProtocolError(f"its last message can't be read: {problem}") from None
        self.written, self.removed = counts["written"], counts["removed"]
        self.others = {escape(origin): count for origin, count in counts["others"].items()}

    def _send_file(self, receiver: RemoteProgram, entry: FileEntry, offered: str | None) -> None:
        """Send a file and the hash of the sent bytes. Raises RemoteRefusal if that differs from `offered`, unless it is None."""
        path = os.path.join(self.job.files.root, entry.path)
        receiver.send(protocol.encode_message({"do": "begin", "path": entry.path, "mode": entry.mode}))
        digest = hashlib.sha256()
        try:
            fd = open_regular(path)
        except OSError as problem:
            raise RemoteRefusal(f"{path} can no longer be read: {problem.strerror}") from problem
        with os.fdopen(fd, "rb", buffering=0) as file:
            while data := file.read(_CHUNK):
                digest.update(data)
                receiver.send(protocol.encode_message({"do": "data"}, data))
                self.sent += len(data)
        if offered not in (None, digest.hexdigest()):
            raise RemoteRefusal(f"{path} has changed here since the run began")
        receiver.send(protocol.encode_message({"do": "end", "sha256": digest.hexdigest()}))


# ---- running a module of Stoker on another host without installation: the file receiver or the gauge server ----


class RemoteRefusal(protocol.ProtocolError):
    """Raised if the copy can't continue, with a line that gives the reason, often from the remote program."""


class RemoteProgram:
    """Runs a module's `boot` on a host and exchanges messages with it.

    The program pings every second and counts as lost when it falls silent. We read while we send, because both sides would
    wait forever if its pipe filled up. Methods raise ProtocolError, or OSError if the program is lost. `explain` returns a
    text for either.
    """

    def __init__(self, host: Host, hosts: Hosts, module: str, silence_s: float, *args: str) -> None:
        """Start the process, which then needs `start`. `args` are passed to `boot`. Raises OSError without an ssh client."""
        self._host = host
        self._files = agent_zip.pack_agent()
        code = ("-I", "-S", "-c", agent_zip.unpack_code(module), agent_zip.size_and_digest(self._files))
        argv = transport.transport_for(host, hosts).python(host, hosts, [*code, *args])
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  a pipe could fill up; `explain` reads it
        self._process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._stderr, start_new_session=True
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._stdin, False)
        self._decoder = protocol.Decoder(expect_sentinel=True)
        self._answers: deque[tuple[protocol.Message, bytes]] = deque()
        self._silence_s = silence_s
        self._heard_at = time.monotonic()

    @property
    def greeted(self) -> bool:
        return self._decoder.greeted

    def start(self) -> None:
        """Send the files that the program needs."""
        self.send(self._files)

    def stop(self) -> None:
        """Kill the local process. The remote program ends when its stdin closes."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def explain(self, problem: Exception) -> str:
        """Return why the exchange failed with `problem`, or "" if the connection broke without an error message."""
        if isinstance(problem, (RemoteRefusal, TimeoutError)):
            return str(problem)
        if isinstance(problem, protocol.ProtocolError):
            return f"it sent an invalid message: {problem}" if self.greeted else str(problem)
        try:
            code: int | None = self._process.wait(2.0)
        except subprocess.TimeoutExpired:
            code = None
        errors = escape_lines(os.pread(self._stderr.fileno(), _MAX_STDERR, 0).decode("utf-8", "replace"))
        if self.greeted and not errors:
            return ""
        return explain_failure(self._host.name, errors, code).removeprefix(f"host {self._host.name}: ")

    def send(self, data: bytes) -> None:
        """Send bytes, and read messages meanwhile. Raises the program's refusal if it sent one before it ended."""
        unsent = memoryview(data)
        while unsent:
            if not self._wait(sending=True):
                continue
            try:
                unsent = unsent[os.write(self._stdin, unsent[:_CHUNK]) :]
            except BlockingIOError:
                continue
            except BrokenPipeError:
                deadline = time.monotonic() + self._silence_s
                while time.monotonic() < deadline:
                    self._wait(sending=False)  # raises a refusal that has arrived
                raise

    def answer(self) -> tuple[protocol.Message, bytes]:
        """Wait for the program's next message. Return it and its payload."""
        while not self._answers:
            self._wait(sending=False)
        return self._answers.popleft()

    def _wait(self, sending: bool) -> bool:
        """Wait for messages, and read them. With `sending`, also wait for space in the pipe. Return whether there is space."""
        limit = self._silence_s if self.greeted else GREETING_S
        poll = select.poll()  # select() can't take descriptors above 1023
        poll.register(self._stdout, select.POLLIN)
        if sending:
            poll.register(self._stdin, select.POLLOUT)
        events = dict(poll.poll(max(0.0, self._heard_at + limit - time.monotonic()) * 1000.0))
        if self._stdout in events:
            data = os.read(self._stdout, _CHUNK)
            if not data:
                raise ConnectionResetError("the remote program ended")
            self._heard_at = time.monotonic()
            for message, payload in self._decoder.feed(data):
                if message.get("is") == "refused":
                    raise RemoteRefusal(escape(message["line"]))
                if message.get("is") != "ping":
                    self._answers.append((message, payload))
        elif time.monotonic() - self._heard_at >= limit:
            raise TimeoutError(f"it sent nothing for {limit:.0f} s")
        return self._stdin in events
