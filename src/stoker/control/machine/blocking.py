"""Reads from /proc what a process is blocked on: its system call, the file of that call, and the processes at its other end.

An agent calls this when a rank is suspected, never in a healthy run. What may not be read is reported as missing.
"""

from __future__ import annotations

import os
import re
import stat
import struct
import time
from collections.abc import Iterator, Mapping
from typing import Any

from stoker.contract.process import find_process, kernel_lines, read_kernel_file
from stoker.contract.text import escape, is_digits
from stoker.control.machine import procfs

COMMAND = 120  # characters of a command line
MAX_FILES = 8  # descriptors of one poll() that are described
SCAN_S = 1.0  # for the open files of all processes: one of them may have a million
PATH = 300  # characters
MAX_OTHERS = 8  # processes at the other end: forked workers inherit the pipes of the others
_POLLIN, _POLLOUT = 1, 4
_CLOSE_WAIT, _LISTEN, _SYN_SENT = "08", "0A", "02"

SYSCALLS: dict[str, dict[int, str]] = {
    "x86_64": {
        0: "read", 1: "write", 2: "open", 7: "poll", 19: "readv", 20: "writev", 23: "select", 35: "nanosleep", 42: "connect", 43: "accept", 44: "sendto",
        45: "recvfrom", 46: "sendmsg", 47: "recvmsg", 61: "wait4", 72: "fcntl", 73: "flock", 74: "fsync", 202: "futex", 230: "clock_nanosleep",
        232: "epoll_wait", 247: "waitid", 257: "openat", 270: "pselect6", 271: "ppoll", 281: "epoll_pwait", 288: "accept4",
    },
    "aarch64": {
        22: "epoll_pwait", 25: "fcntl", 32: "flock", 56: "openat", 63: "read", 64: "write", 65: "readv", 66: "writev", 72: "pselect6", 73: "ppoll",
        82: "fsync", 95: "waitid", 98: "futex", 101: "nanosleep", 115: "clock_nanosleep", 202: "accept", 203: "connect", 206: "sendto", 207: "recvfrom",
        211: "sendmsg", 212: "recvmsg", 242: "accept4", 260: "wait4",
    },
}  # fmt: skip
_READS = ("read", "readv", "recvfrom", "recvmsg", "accept", "accept4")
_WRITES = ("write", "writev", "sendto", "sendmsg", "connect", "fsync")
_LOCKS = ("flock", "fcntl")

RankOf = Mapping[int, "tuple[int, bool]"]  # pid -> (the rank it belongs to, whether it is the rank's own process)


def _syscall(pid: int) -> tuple[str, list[int], str]:
    """Return the name and the arguments of the system call the main thread is in, and why they can't be read.

    The name is "running" where it is in none, and empty where the kernel does not show it.
    """
    try:
        with open(f"/proc/{pid}/syscall", encoding="ascii") as file:
            number, *arguments = file.read().split()
    except (OSError, ValueError) as problem:
        return "", [], f"/proc/{pid}/syscall: {problem.strerror if isinstance(problem, OSError) else 'it is empty'}"
    if not is_digits(number.removeprefix("-")):
        return number, [], ""
    name = SYSCALLS.get(os.uname().machine, {}).get(int(number), f"system call {number}")
    return name, [int(one, 16) for one in arguments[:6]], ""


class OpenFiles:
    """The open files of all processes that may be inspected, read from /proc when they are first asked for."""

    def __init__(self) -> None:
        self._holders: dict[str, list[tuple[int, int]]] = {}
        self._is_read = False
        self.hidden = 0  # processes whose files may not be read, or not in that time

    def holders(self, target: str) -> list[tuple[int, int]]:
        """Return (pid, descriptor) of all who have it open. `target`: as /proc/PID/fd shows it: a path, pipe:[7], socket:[7]."""
        if not self._is_read:
            self._is_read = True
            deadline = time.monotonic() + SCAN_S
            for pid in procfs.pids_here():
                self._read(pid, deadline)
        return self._holders.get(target, [])

    def _read(self, pid: int, deadline: float) -> None:
        try:
            for fd in os.listdir(f"/proc/{pid}/fd"):
                if time.monotonic() > deadline:
                    self.hidden += 1
                    return
                target = _target(pid, int(fd))
                if target:
                    self._holders.setdefault(target, []).append((pid, int(fd)))
        except PermissionError:
            self.hidden += 1
        except OSError:
            return  # it has ended


def read_wait(pid: int, files: OpenFiles, rank_of: RankOf) -> dict[str, Any]:
    """Return what the main thread of a process is blocked on, as fields of watch's Snapshot and Worker."""
    name, arguments, problem = _syscall(pid)
    wchan = read_kernel_file(f"/proc/{pid}/wchan").strip().strip("0")
    found: dict[str, Any] = {"wchan": wchan, "syscall": name, "wait_unseen": problem, "awaited_pid": awaited_child(pid)}
    found["blocked"] = []
    if name in ("open", "openat") and arguments:
        fifo = _opened_fifo(pid, name, arguments) if "partner" in wchan or "fifo" in wchan else None
        if fifo:
            found["blocked"] = [fifo]
    else:
        described = []
        for fd, writes in _descriptors(pid, name, arguments)[:MAX_FILES]:
            one = _describe(pid, fd, name, writes, files, rank_of)
            if one:
                described.append(one)
        found["blocked"] = described
    return found


def awaited_child(pid: int) -> int:
    """Return the child whose end the main thread waits for; 0 if it waits for none, or for any of them."""
    name, arguments, _ = _syscall(pid)
    if name not in ("wait4", "waitid") or len(arguments) < 2:
        return 0
    wanted = arguments[0 if name == "wait4" else 1]
    return wanted if 0 < wanted < 1 << 31 else 0


def _descriptors(pid: int, name: str, arguments: list[int]) -> list[tuple[int, bool]]:
    """Return (descriptor, whether it waits to write to it) of the files a system call waits for."""
    if not arguments:
        return []
    if name in (*_READS, *_WRITES, *_LOCKS):
        return [(arguments[0], name in _WRITES)]
    if name in ("poll", "ppoll"):
        data = _memory(pid, arguments[0], 8 * min(arguments[1], 64))
        entries = struct.iter_unpack("=ihh", data[: len(data) // 8 * 8])
        return [(fd, not events & _POLLIN and bool(events & _POLLOUT)) for fd, events, _ in entries if fd >= 0]
    if name in ("select", "pselect6"):
        size = min(arguments[0], 1024)
        sets = ((address, _memory(pid, address, (size + 7) // 8) if address else b"") for address in arguments[1:3])
        bits = [[fd for fd in range(8 * len(data)) if data[fd // 8] >> fd % 8 & 1] for _, data in sets]
        return [(fd, bool(writes)) for writes, fds in enumerate(bits) for fd in fds]
    if name in ("epoll_wait", "epoll_pwait"):
        lines = [line.split() for line in kernel_lines(f"/proc/{pid}/fdinfo/{arguments[0]}")]
        return [(int(words[1]), False) for words in lines if words[:1] == ["tfd:"]]
    return []


def _memory(pid: int, address: int, size: int) -> bytes:
    try:
        with open(f"/proc/{pid}/mem", "rb", buffering=0) as file:
            file.seek(address)
            return file.read(size)
    except (OSError, ValueError, OverflowError):
        return b""


def _opened_fifo(pid: int, name: str, arguments: list[int]) -> dict[str, Any] | None:
    """Return the named pipe that a process waits to open. The kernel waits until it is opened at the other end."""
    folder, address, flags = (-100, *arguments[:2]) if name == "open" else arguments[:3]
    path = os.fsdecode(_text(pid, address))
    at_folder = folder == 0xFFFFFF9C or folder < 0 or folder > 1 << 31
    base = _link(f"/proc/{pid}/cwd") if at_folder else _target(pid, folder)
    if not path:
        return None
    writes = flags & os.O_ACCMODE == os.O_WRONLY
    whole = escape(os.path.normpath(os.path.join(base, path)), PATH)
    return {"call": "open", "kind": "fifo", "name": whole, "writes": writes}


def _text(pid: int, address: int) -> bytes:
    """Return the bytes up to a zero. By pieces: the text may end just before memory that can't be read."""
    data = b""
    while len(data) < 4096 and b"\0" not in data:
        piece = _memory(pid, address + len(data), 64 - (address + len(data)) % 64)
        if not piece:
            break
        data += piece
    return data.partition(b"\0")[0]


def _describe(pid: int, fd: int, name: str, writes: bool, files: OpenFiles, rank_of: RankOf) -> dict[str, Any] | None:
    target = _target(pid, fd)
    if not target:
        return None
    found: dict[str, Any] = {"call": name, "fd": fd, "writes": writes, "name": escape(target, PATH)}
    if name in _LOCKS:
        found.update(kind="lock", holders=_lock_holders(pid, fd, target, files))
    elif target.startswith("socket:["):
        found.update(_socket(pid, target, files))
    elif target.startswith("pipe:["):
        found.update(kind="pipe", name="", holders=_other_end(pid, fd, target, writes, files))
    elif target.startswith("/") and _is_fifo(pid, fd):
        found.update(kind="fifo", holders=_other_end(pid, fd, target, writes, files))
    elif target.startswith("/"):
        found.update(kind="file")
    else:
        return None  # an event descriptor: nothing to name
    holders = found.pop("holders", [])
    return {**found, "others": [_shown(one, rank_of) for one in holders[:MAX_OTHERS]], "hidden": files.hidden}


def _shown(pid: int, rank_of: RankOf) -> dict[str, Any]:
    rank, is_rank = rank_of.get(pid, (None, False))
    command = (procfs.command_line(pid) or "")[:COMMAND]
    return {"pid": pid, "command": command, "rank": rank, "is_rank": is_rank}


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _target(pid: int, fd: int) -> str:
    return _link(f"/proc/{pid}/fd/{fd}")


def _is_fifo(pid: int, fd: int) -> bool:
    """Read the type of an open file. Not while the process is in state D: its file system may not answer us either."""
    one = find_process(pid)
    if one is None or one.state == "D":
        return False
    try:
        return stat.S_ISFIFO(os.stat(f"/proc/{pid}/fd/{fd}").st_mode)
    except OSError:
        return False


def _other_end(pid: int, fd: int, target: str, writes: bool, files: OpenFiles) -> list[int]:
    """Return the processes that could end the wait: those that have the pipe open for writing, or for reading if we write."""
    wanted = (os.O_RDONLY, os.O_RDWR) if writes else (os.O_WRONLY, os.O_RDWR)
    ends = [one for one in files.holders(target) if one != (pid, fd) and _access_mode(*one) in wanted]
    return list(dict.fromkeys(holder for holder, _ in ends))


def _access_mode(pid: int, fd: int) -> int:
    lines = kernel_lines(f"/proc/{pid}/fdinfo/{fd}")
    flags = next((line.split()[1] for line in lines if line.startswith("flags:")), "")
    return int(flags, 8) & os.O_ACCMODE if flags else -1


# ---- file locks ----


def _lock_holders(pid: int, fd: int, path: str, files: OpenFiles) -> list[int]:
    """Return who holds the lock that a process waits for.

    The kernel names the process that took it. A lock of flock() outlives that process in a child that inherited the file.
    """
    table = [line.split() for line in kernel_lines("/proc/locks")]
    # 1: FLOCK ADVISORY WRITE 14822 fe:00:2146356 0 EOF, and of those that wait for it: 1: -> FLOCK ...
    waiting = [words for words in table if words[1:2] == ["->"] and len(words) > 6 and words[5] == str(pid)]
    numbers = {words[0] for words in waiting}
    held = [words for words in table if words[0] in numbers and words[1:2] != ["->"] and len(words) > 5]
    takers = [int(words[4]) for words in held if is_digits(words[4]) and find_process(int(words[4])) is not None]
    if takers:
        return takers
    inodes = {words[5] for words in held}
    heirs = [
        one
        for one, other_fd in files.holders(path)
        if _holds_lock(one, other_fd, inodes) and (one, other_fd) != (pid, fd)
    ]
    return list(dict.fromkeys(heirs))


def _holds_lock(pid: int, fd: int, inodes: set[str]) -> bool:
    lines = [line.split() for line in kernel_lines(f"/proc/{pid}/fdinfo/{fd}") if line.startswith("lock:")]
    return any(len(words) > 6 and (not inodes or words[6] in inodes) for words in lines)


# ---- sockets ----


def _socket(pid: int, target: str, files: OpenFiles) -> dict[str, Any]:
    inode = target[len("socket:[") : -1]
    rows = list(_connections(pid))
    own = next((row for row in rows if row[3] == inode), None)
    if own is None:
        return {"kind": "socket", "name": _unix_path(pid, inode)}
    local, remote, state, _ = own
    if state == _LISTEN:
        return {"kind": "socket", "name": _address(local), "state": "listening"}
    found = {"kind": "socket", "name": _address(remote)}
    if state == _SYN_SENT:
        return {**found, "state": "connecting"}
    if state == _CLOSE_WAIT:
        found["state"] = "closed"
    peer = next((row for row in rows if row[0] == remote and row[1] == local), None)
    if peer is not None and peer[3] == "0":  # in the queue of a listener
        peer = next((row for row in rows if row[2] == _LISTEN and row[0][1] == remote[1]), None)
        found["state"] = "not accepted"
    holders = files.holders(f"socket:[{peer[3]}]") if peer is not None else []
    return {**found, "holders": list(dict.fromkeys(holder for holder, _ in holders))}


def _connections(pid: int) -> Iterator[tuple[tuple[str, int], tuple[str, int], str, str]]:
    """Yield the TCP connections in the network of a process: local and remote address, state, inode."""
    for family in ("tcp", "tcp6"):
        for line in kernel_lines(f"/proc/{pid}/net/{family}")[1:]:
            words = line.split()
            if len(words) > 9:
                yield _parsed(words[1]), _parsed(words[2]), words[3], words[9]


def _parsed(text: str) -> tuple[str, int]:
    """Read an address as the kernel writes it: words of 32 bits in the machine's byte order, in hexadecimal."""
    import socket

    host, _, port = text.partition(":")
    raw = b"".join(struct.pack("=I", int(word, 16)) for word in re.findall("." * 8, host))
    name = socket.inet_ntop(socket.AF_INET if len(raw) == 4 else socket.AF_INET6, raw)
    return name.replace("::ffff:", "") if "." in name else name, int(port, 16)


def _address(address: tuple[str, int]) -> str:
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _unix_path(pid: int, inode: str) -> str:
    """Return the path of a Unix socket; most clients have none."""
    lines = [line.split(None, 7) for line in kernel_lines(f"/proc/{pid}/net/unix")]
    return next((escape(words[7], PATH) for words in lines if len(words) > 7 and words[6] == inode), "")
