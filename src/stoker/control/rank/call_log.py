"""A rank's latest `torch.distributed` calls, in shared memory: the shim writes them, the agent reads them.

torch's flight recorder knows which operations ran, but not which line called them, and it is lost when a rank aborts.
This log survives an abort, and can be read while a thread holds the GIL, without the rank's help.
"""

from __future__ import annotations

import struct
from mmap import mmap

from stoker.contract.stack_traces import is_library

TYPE_CHECKING = False  # keeps the start of every rank short
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType, FrameType, ModuleType
    from typing import Any

VERSION = 1
SLOTS = 128
FRAMES = 4  # lines of the script recorded for a call, innermost first
_HEAD = struct.Struct("<II")  # version, bytes of text
# number of the call (from 1), entered_ns, left_ns (0: not yet, 1: it raised), count within its group, elements, text, peer
_CALL = struct.Struct("<QQQIqIi")
_LEFT = struct.Struct("<Q")
_LEFT_AT = 16
_CALLS_AT = _HEAD.size
_TEXT_AT = _CALLS_AT + SLOTS * _CALL.size
_TEXT_SIZE = 48 << 10
SIZE = _TEXT_AT + _TEXT_SIZE
_NO_PEER = -1

# The recorded functions: (name, index of the `group` argument or None, index of the peer argument or None).
_RECORDED_CALLS: tuple[tuple[str, int | None, int | None], ...] = (
    ("all_gather", 2, None),
    ("all_gather_into_tensor", 2, None),
    ("all_gather_object", 2, None),
    ("all_reduce", 2, None),
    ("all_to_all", 2, None),
    ("all_to_all_single", 4, None),
    ("barrier", 0, None),
    ("broadcast", 2, None),
    ("broadcast_object_list", 2, None),
    ("gather", 3, None),
    ("gather_object", 3, None),
    ("irecv", 2, 1),
    ("isend", 2, 1),
    ("monitored_barrier", 0, None),
    ("new_group", None, None),
    ("recv", 2, 1),
    ("reduce", 3, None),
    ("reduce_scatter", 3, None),
    ("reduce_scatter_tensor", 3, None),
    ("scatter", 3, None),
    ("scatter_object_list", 3, None),
    ("send", 2, 1),
)
_TENSOR_AT = {"all_gather": 1}  # index of the rank's own tensor if it is not the first argument
# Only some members of a group make these calls, so they are counted apart from collectives, and messages also by peer.
_KINDS = {"send": "out", "isend": "out", "recv": "in", "irecv": "in", "new_group": "new_group"}


class CallLogWriter:
    """Wraps the functions of torch.distributed and records each call, in about 1.5 µs."""

    def __init__(self, memory: mmap, offset: int, clock: Callable[[], int]) -> None:
        self._memory = memory
        self._offset = offset
        self._clock = clock
        self._number = 0
        self._text_used = 0
        self._texts: dict[Any, int] = {}  # call site -> position of its text, from 1, or 0 if there was no space
        # id -> (whether it is the script's code, the code). By id, since code objects of different files may be equal.
        self._codes: dict[int, tuple[bool, CodeType]] = {}
        self._counts: dict[tuple[str, str, int], int] = {}
        self.is_active = True  # False in a forked worker, which shares the memory and must not write to it
        _HEAD.pack_into(memory, offset, VERSION, 0)

    def wrap(self, module: ModuleType) -> None:
        """Replace the functions of torch.distributed.distributed_c10d, before other modules import them from there."""
        for name, group_at, peer_at in _RECORDED_CALLS:
            function = getattr(module, name, None)
            if function is not None:
                setattr(module, name, self._wrap_function(function, name, group_at, peer_at, module.__dict__))
        batch = getattr(module, "batch_isend_irecv", None)
        if batch is not None:
            module.__dict__["batch_isend_irecv"] = self._wrap_batch(batch, module.__dict__)

    def _wrap_function(
        self, function: Any, name: str, group_at: int | None, peer_at: int | None, c10d_globals: dict[str, Any]
    ) -> Any:
        import functools
        from sys import _getframe

        begin, end, names = self._begin, self._end, c10d_globals["_world"].pg_names
        tensor_at = _TENSOR_AT.get(name, 0)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            frame = _getframe(1)
            if frame.f_globals is c10d_globals or not self.is_active:  # a call within another one, which is recorded
                return function(*args, **kwargs)
            group = None
            if group_at is not None:
                group = args[group_at] if len(args) > group_at else kwargs.get("group")
            peer: Any = _NO_PEER
            if peer_at is not None:
                peer = args[peer_at] if len(args) > peer_at else kwargs.get("dst", kwargs.get("src"))
            try:
                group_name = "0" if group is None else names.get(group, "")
                tensor = args[tensor_at] if len(args) > tensor_at else kwargs.get("tensor")
                number = begin(name, frame, group_name, tensor, peer)
            except Exception:  # the script must not fail because a call can't be recorded
                return function(*args, **kwargs)
            try:
                result = function(*args, **kwargs)
            except BaseException:
                end(number, False)
                raise
            end(number, True)
            return result

        return call

    def _wrap_batch(self, function: Any, c10d_globals: dict[str, Any]) -> Any:
        """Wrap batch_isend_irecv, which makes one record per message."""
        import functools
        from sys import _getframe

        begin, names = self._begin, c10d_globals["_world"].pg_names

        @functools.wraps(function)
        def batch(p2p_op_list: Any) -> Any:
            numbers = []
            try:
                for message in p2p_op_list if self.is_active else ():
                    group = "0" if message.group is None else names.get(message.group, "")
                    numbers.append(begin(message.op.__name__, _getframe(1), group, message.tensor, message.peer))
            except Exception:  # torch reports what is wrong with the list
                numbers.clear()
            try:
                result = function(p2p_op_list)
            except BaseException:
                for number in numbers:
                    self._end(number, False)
                raise
            for number in numbers:
                self._end(number, True)
            return result

        return batch

    def _begin(self, name: str, frame: FrameType | None, group: str, tensor: Any, peer: Any) -> int:
        try:
            elements, dtype = tensor.numel(), tensor.dtype
        except AttributeError:  # a list of tensors, an object
            elements, dtype = -1, None
        codes, key = self._codes, [name, group, dtype]
        while frame is not None and len(key) < 2 * FRAMES + 3:
            code = frame.f_code
            entry = codes.get(id(code))
            if entry is None:
                entry = codes[id(code)] = not is_library(code.co_filename), code
            if entry[0]:
                key.append(id(code))
                key.append(frame.f_lasti)
            frame = frame.f_back
        site = tuple(key)
        text = self._texts.get(site)
        if text is None:
            text = self._texts[site] = self._store_text(name, group, dtype, key[3:])
        peer = peer if type(peer) is int else _NO_PEER
        counter = group, _KINDS.get(name, "collective"), peer
        count = self._counts[counter] = self._counts.get(counter, 0) + 1
        self._number = number = self._number + 1
        at = self._offset + _CALLS_AT + (number - 1) % SLOTS * _CALL.size
        _CALL.pack_into(self._memory, at, number, self._clock(), 0, count, elements, text, peer)
        return number

    def _end(self, number: int, returned: bool) -> None:
        at = self._offset + _CALLS_AT + (number - 1) % SLOTS * _CALL.size + _LEFT_AT
        _LEFT.pack_into(self._memory, at, self._clock() if returned else 1)

    def _store_text(self, name: str, group: str, dtype: Any, sites: list[Any]) -> int:
        """Store the text that describes a call site. Return its position, from 1, or 0 if there is no space."""
        lines = [f"{name}\t{group}\t{'' if dtype is None else str(dtype).removeprefix('torch.')}"]
        for code_id, instruction in zip(sites[::2], sites[1::2], strict=True):
            code = self._codes[code_id][1]
            lines.append(f"{code.co_filename}\t{_find_line(code, instruction)}\t{code.co_name}")
        text = "\n".join(lines).encode("utf-8", "replace") + b"\0"
        at = self._text_used
        if at + len(text) > _TEXT_SIZE:
            return 0
        start = self._offset + _TEXT_AT + at
        self._memory[start : start + len(text)] = text
        self._text_used = at + len(text)
        _HEAD.pack_into(self._memory, self._offset, VERSION, self._text_used)
        return at + 1


def _find_line(code: CodeType, instruction: int) -> int:
    for first, last, line in code.co_lines():
        if first <= instruction < last:
            return line or 0
    return code.co_firstlineno


def read_calls(memory: mmap, offset: int, newest: int = SLOTS) -> list[dict[str, Any]]:
    """Return the newest calls that the log still holds, oldest first, without unreadable ones.

    Keys: number (among all calls of the rank, from 1), count (among the collectives of the group, or the messages to or from
    the peer), name, group (torch's name), entered_ns, left_ns (0: it has not returned; 1: it raised), elements (-1: its
    argument is not one tensor), dtype, peer (of a message, else None), frames ([function, file, line] of the script,
    innermost first).
    """
    version, used = _HEAD.unpack_from(memory, offset)
    if version != VERSION or used > _TEXT_SIZE:
        return []  # the script has not imported torch.distributed, or overwrote the memory
    texts = memory[offset + _TEXT_AT : offset + _TEXT_AT + used]
    calls = []
    for slot in range(SLOTS):
        record = _CALL.unpack_from(memory, offset + _CALLS_AT + slot * _CALL.size)
        number, entered_ns, left_ns, count, elements, text, peer = record
        if number and (number - 1) % SLOTS == slot and text <= used:
            calls.append(
                {
                    "number": number,
                    "count": count,
                    "entered_ns": entered_ns,
                    "left_ns": left_ns,
                    "elements": elements,
                    "peer": None if peer == _NO_PEER else peer,
                    **_parse_text(texts, text),
                }
            )
    return sorted(calls, key=lambda call: int(call["number"]))[-newest:]


def _parse_text(texts: bytes, position: int) -> dict[str, Any]:
    if not position:
        return {"name": "?", "group": "", "dtype": "", "frames": []}
    head, *lines = texts[position - 1 :].partition(b"\0")[0].decode("utf-8", "replace").split("\n")
    name, group, dtype = [*head.split("\t"), "", ""][:3]
    frames = []
    for line in lines:
        file, number, function = [*line.split("\t"), "", ""][:3]
        frames.append([function, file, int(number) if number.isdecimal() else 0])
    return {"name": name, "group": group, "dtype": dtype, "frames": frames}
