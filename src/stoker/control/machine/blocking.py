"""Reads from /proc what a process is blocked on: its system call, the file of that call, and the processes at its other end.

An agent calls this when a rank is suspected, never in a healthy run. Values that may not be read are reported as missing.
"""

from __future__ import annotations

import os
import re
import stat
import struct
import time
from collections.abc import Iterator, Mapping
from typing import Any

from stoker.contract.process import find_process, read_kernel_file, read_kernel_lines
from stoker.contract.text import escape, is_digits
from stoker.control.machine import procfs

MAX_COMMAND = 120  # characters of a command line
MAX_PATH = 300  # characters
MAX_FILES = 8  # descriptors that are described of one poll()
MAX_OTHERS = 8  # processes at the other end that are described; forked workers inherit each other's pipes
SCAN_S = 1.0  # limit for reading the open files of all processes, one of which may have a million
_POLLIN, _POLLOUT = 1, 4
_CLOSE_WAIT, _LISTEN, _SYN_SENT = "08", "0A", "02"

_SYSCALLS: dict[str, dict[int, str]] = {
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


class OpenFiles:
    """The open files of all processes, read from /proc when they are first needed."""

    def __init__(self) -> None:
        self._holders: dict[str, list[tuple[int, int]]] = {}
        self._is_read = False
        self.hidden = 0  # processes whose files may not be read, or not within SCAN_S

    def holders(self, target: str) -> list[tuple[int, int]]:
        """Return the (pid, descriptor) pairs that have a file open.

        `target` is its name in /proc/PID/fd: a path, pipe:[7] or socket:[7].
        """
        if not self._is_read:
            self._is_read = True
            deadline = time.monotonic() + SCAN_S
            for pid in procfs.list_pids():
                self._read(pid, deadline)
        return self._holders.get(target, [])

    def _read(self, pid: int, deadline: float) -> None:
        try:
            for fd in os.listdir(f"/proc/{pid}/fd"):
                if time.monotonic() > deadline:
                    self.hidden += 1
                    return
                target = _read_open_file(pid, int(fd))
                if target:
                    self._holders.setdefault(target, []).append((pid, int(fd)))
        except PermissionError:
            self.hidden += 1
        except OSError:
            return  # the process has ended


def read_wait(pid: int, files: OpenFiles, rank_of: RankOf) -> dict[str, Any]:
    """Return what the main thread of a process is blocked on, as fields of the types in control/watch/rank_inspection.py."""
    call, arguments, problem = _read_syscall(pid)
    wchan = read_kernel_file(f"/proc/{pid}/wchan").strip().strip("0")
    blocked = []
    if call in ("open", "openat") and arguments:
        if "partner" in wchan or "fifo" in wchan:
            blocked.append(_describe_opened_fifo(pid, call, arguments))
    else:
        for fd, writes in _find_awaited_descriptors(pid, call, arguments)[:MAX_FILES]:
            blocked.append(_describe_file(pid, fd, call, writes, files, rank_of))
    return {
        "wchan": wchan,
        "syscall": call,
        "wait_unseen": problem,
        "awaited_pid": find_awaited_child(pid),
        "blocked": [description for description in blocked if description is not None],
    }


def find_awaited_child(pid: int) -> int:
    """Return the pid of the child that the main thread waits for, or 0 if it waits for no child or for any child."""
    call, arguments, _ = _read_syscall(pid)
    if call not in ("wait4", "waitid") or len(arguments) < 2:
        return 0
    child = arguments[0 if call == "wait4" else 1]
    return child if 0 < child < 1 << 31 else 0


def _read_syscall(pid: int) -> tuple[str, list[int], str]:
    """Return the name and the arguments of the system call that the main thread is in, and why they can't be read.

    The name is "running" if it is in no call, and "" if the kernel does not show it.
    """
    try:
        with open(f"/proc/{pid}/syscall", encoding="ascii") as file:
            number, *arguments = file.read().split()
    except (OSError, ValueError) as problem:
        return "", [], f"/proc/{pid}/syscall: {problem.strerror if isinstance(problem, OSError) else 'it is empty'}"
    if not is_digits(number.removeprefix("-")):
        return number, [], ""
    call = _SYSCALLS.get(os.uname().machine, {}).get(int(number), f"system call {number}")
    return call, [int(argument, 16) for argument in arguments[:6]], ""


def _find_awaited_descriptors(pid: int, call: str, arguments: list[int]) -> list[tuple[int, bool]]:
    """Return the (descriptor, whether it waits to write) of the files that a system call waits for."""
    if not arguments:
        return []
    if call in (*_READS, *_WRITES, *_LOCKS):
        return [(arguments[0], call in _WRITES)]
    if call in ("poll", "ppoll"):
        data = _read_memory(pid, arguments[0], 8 * min(arguments[1], 64))
        entries = struct.iter_unpack("=ihh", data[: len(data) // 8 * 8])
        return [(fd, not events & _POLLIN and bool(events & _POLLOUT)) for fd, events, _ in entries if fd >= 0]
    if call in ("select", "pselect6"):
        size = (min(arguments[0], 1024) + 7) // 8
        descriptors = []
        for writes, address in enumerate(arguments[1:3]):  # the sets to read from and to write to
            bits = _read_memory(pid, address, size) if address else b""
            descriptors += [(fd, bool(writes)) for fd in range(8 * len(bits)) if bits[fd // 8] >> fd % 8 & 1]
        return descriptors
    if call in ("epoll_wait", "epoll_pwait"):
        lines = [line.split() for line in read_kernel_lines(f"/proc/{pid}/fdinfo/{arguments[0]}")]
        return [(int(fields[1]), False) for fields in lines if fields[:1] == ["tfd:"]]
    return []


def _read_memory(pid: int, address: int, size: int) -> bytes:
    try:
        with open(f"/proc/{pid}/mem", "rb", buffering=0) as file:
            file.seek(address)
            return file.read(size)
    except (OSError, ValueError, OverflowError):
        return b""


def _read_string(pid: int, address: int) -> bytes:
    """Return the bytes up to a zero. Reads in pieces, because the string may end just before unreadable memory."""
    data = b""
    while len(data) < 4096 and b"\0" not in data:
        piece = _read_memory(pid, address + len(data), 64 - (address + len(data)) % 64)
        if not piece:
            break
        data += piece
    return data.partition(b"\0")[0]


# ---- the file that a process waits for ----


def _describe_opened_fifo(pid: int, call: str, arguments: list[int]) -> dict[str, Any] | None:
    """Describe the named pipe that a process waits to open, which lasts until it is opened at the other end."""
    folder, address, flags = (-100, *arguments[:2]) if call == "open" else arguments[:3]
    path = os.fsdecode(_read_string(pid, address))
    if not path:
        return None
    is_relative_to_cwd = folder == 0xFFFFFF9C or folder < 0 or folder > 1 << 31  # AT_FDCWD
    base = _read_link(f"/proc/{pid}/cwd") if is_relative_to_cwd else _read_open_file(pid, folder)
    name = escape(os.path.normpath(os.path.join(base, path)), MAX_PATH)
    return {"call": "open", "kind": "fifo", "name": name, "writes": flags & os.O_ACCMODE == os.O_WRONLY}


def _describe_file(
    pid: int, fd: int, call: str, writes: bool, files: OpenFiles, rank_of: RankOf
) -> dict[str, Any] | None:
    """Describe an open file and the processes at its other end. Returns None for an event descriptor or a closed one."""
    target = _read_open_file(pid, fd)
    if not target:
        return None
    name = escape(target, MAX_PATH)
    holders: list[int] = []
    details: dict[str, str] = {}
    if call in _LOCKS:
        kind, holders = "lock", _find_lock_holders(pid, fd, target, files)
    elif target.startswith("socket:["):
        kind = "socket"
        name, details, holders = _read_socket(pid, target, files)
    elif target.startswith("pipe:["):
        kind, name, holders = "pipe", "", _find_other_end(pid, fd, target, writes, files)
    elif target.startswith("/") and _is_fifo(pid, fd):
        kind, holders = "fifo", _find_other_end(pid, fd, target, writes, files)
    elif target.startswith("/"):
        kind = "file"
    else:
        return None
    return {
        "call": call,
        "fd": fd,
        "writes": writes,
        "name": name,
        "kind": kind,
        **details,
        "others": [_describe_process(holder, rank_of) for holder in holders[:MAX_OTHERS]],
        "hidden": files.hidden,
    }


def _describe_process(pid: int, rank_of: RankOf) -> dict[str, Any]:
    rank, is_rank = rank_of.get(pid, (None, False))
    command = (procfs.read_command_line(pid) or "")[:MAX_COMMAND]
    return {"pid": pid, "command": command, "rank": rank, "is_rank": is_rank}


def _read_link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _read_open_file(pid: int, fd: int) -> str:
    """Return the target of a process's descriptor, or "" if it is closed."""
    return _read_link(f"/proc/{pid}/fd/{fd}")


def _is_fifo(pid: int, fd: int) -> bool:
    """Return whether an open file is a FIFO. In state D, don't ask: its file system might block us, too."""
    process = find_process(pid)
    if process is None or process.state == "D":
        return False
    try:
        return stat.S_ISFIFO(os.stat(f"/proc/{pid}/fd/{fd}").st_mode)
    except OSError:
        return False


def _find_other_end(pid: int, fd: int, target: str, writes: bool, files: OpenFiles) -> list[int]:
    """Return the processes that could end the wait: they have the pipe open for reading if we write, else for writing."""
    modes = (os.O_RDONLY, os.O_RDWR) if writes else (os.O_WRONLY, os.O_RDWR)
    ends = [end for end in files.holders(target) if end != (pid, fd) and _read_access_mode(*end) in modes]
    return list(dict.fromkeys(holder for holder, _ in ends))


def _read_access_mode(pid: int, fd: int) -> int:
    lines = read_kernel_lines(f"/proc/{pid}/fdinfo/{fd}")
    flags = next((line.split()[1] for line in lines if line.startswith("flags:")), "")
    return int(flags, 8) & os.O_ACCMODE if flags else -1


# ---- file locks ----


def _find_lock_holders(pid: int, fd: int, path: str, files: OpenFiles) -> list[int]:
    """Return the processes that hold the lock that a process waits for.

    The kernel names the process that took the lock. After that process's end, a lock of flock() is held by the children
    that inherited the file.
    """
    rows = [line.split() for line in read_kernel_lines("/proc/locks")]
    # A lock is "1: FLOCK ADVISORY WRITE 14822 fe:00:2146356 0 EOF", a process that waits for it "1: -> FLOCK ...".
    numbers = {row[0] for row in rows if row[1:2] == ["->"] and len(row) > 6 and row[5] == str(pid)}
    held = [row for row in rows if row[0] in numbers and row[1:2] != ["->"] and len(row) > 5]
    takers = [int(row[4]) for row in held if is_digits(row[4]) and find_process(int(row[4])) is not None]
    if takers:
        return takers
    inodes = {row[5] for row in held}
    heirs = [
        holder
        for holder, holder_fd in files.holders(path)
        if _holds_lock(holder, holder_fd, inodes) and (holder, holder_fd) != (pid, fd)
    ]
    return list(dict.fromkeys(heirs))


def _holds_lock(pid: int, fd: int, inodes: set[str]) -> bool:
    rows = [line.split() for line in read_kernel_lines(f"/proc/{pid}/fdinfo/{fd}") if line.startswith("lock:")]
    return any(len(row) > 6 and (not inodes or row[6] in inodes) for row in rows)


# ---- sockets ----


def _read_socket(pid: int, target: str, files: OpenFiles) -> tuple[str, dict[str, str], list[int]]:
    """Return a socket's name, a dict with its "state" if that is special, and the processes at its other end."""
    inode = target[len("socket:[") : -1]
    rows = list(_list_tcp_connections(pid))
    own = next((row for row in rows if row[3] == inode), None)
    if own is None:
        return _find_unix_path(pid, inode), {}, []
    local, remote, state, _ = own
    if state == _LISTEN:
        return _format_address(local), {"state": "listening"}, []
    name = _format_address(remote)
    if state == _SYN_SENT:
        return name, {"state": "connecting"}, []
    details = {"state": "closed"} if state == _CLOSE_WAIT else {}
    peer = next((row for row in rows if row[0] == remote and row[1] == local), None)
    if peer is not None and peer[3] == "0":  # the connection is in the queue of the listening process
        peer = next((row for row in rows if row[2] == _LISTEN and row[0][1] == remote[1]), None)
        details = {"state": "not accepted"}
    holders = files.holders(f"socket:[{peer[3]}]") if peer is not None else []
    return name, details, list(dict.fromkeys(holder for holder, _ in holders))


def _list_tcp_connections(pid: int) -> Iterator[tuple[tuple[str, int], tuple[str, int], str, str]]:
    """Yield the (local address, remote address, state, inode) of the TCP sockets in the network of a process."""
    for family in ("tcp", "tcp6"):
        for line in read_kernel_lines(f"/proc/{pid}/net/{family}")[1:]:
            fields = line.split()
            if len(fields) > 9:
                yield _parse_address(fields[1]), _parse_address(fields[2]), fields[3], fields[9]


def _parse_address(text: str) -> tuple[str, int]:
    """Parse an address as the kernel writes it: 32-bit words in the machine's byte order, in hexadecimal."""
    import socket

    host, _, port = text.partition(":")
    raw = b"".join(struct.pack("=I", int(word, 16)) for word in re.findall("." * 8, host))
    name = socket.inet_ntop(socket.AF_INET if len(raw) == 4 else socket.AF_INET6, raw)
    return name.replace("::ffff:", "") if "." in name else name, int(port, 16)


def _format_address(address: tuple[str, int]) -> str:
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _find_unix_path(pid: int, inode: str) -> str:
    """Return the path of a Unix socket, or "" for most clients, which have no path."""
    rows = [line.split(None, 7) for line in read_kernel_lines(f"/proc/{pid}/net/unix")]
    return next((escape(row[7], MAX_PATH) for row in rows if len(row) > 7 and row[6] == inode), "")
