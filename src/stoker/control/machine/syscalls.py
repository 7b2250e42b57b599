"""Names of the system calls a stuck process is found in, by architecture; the others keep their number."""

from __future__ import annotations

NAMES: dict[str, dict[int, str]] = {
    "x86_64": {
        0: "read", 1: "write", 7: "poll", 23: "select", 35: "nanosleep", 42: "connect", 43: "accept", 45: "recvfrom", 47: "recvmsg", 61: "wait4", 73: "flock",
        74: "fsync", 202: "futex", 230: "clock_nanosleep", 232: "epoll_wait", 247: "waitid", 257: "openat", 270: "pselect6", 271: "ppoll", 281: "epoll_pwait",
    },
    "aarch64": {
        63: "read", 64: "write", 72: "pselect6", 73: "ppoll", 101: "nanosleep", 203: "connect", 202: "accept", 207: "recvfrom", 212: "recvmsg", 260: "wait4",
        32: "flock", 82: "fsync", 98: "futex", 115: "clock_nanosleep", 22: "epoll_pwait", 95: "waitid", 56: "openat",
    },
}  # fmt: skip
